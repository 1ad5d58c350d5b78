"""Labels as inputs: the split of each epoch is the same for any number of workers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hosted_workers import host
from oracle import CHANNELS, CLASSES, TOLERANCE, make_graph, workers
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE, MaskLabel

import pyg_sar
from pyg_sar.tools import run as tool
from pyg_sar.train import TrainConfig, ratio_mask, with_labels


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label = MaskLabel(CLASSES, CHANNELS)
        self.conv = GraphSAGE(CHANNELS, 8, 2, CLASSES, aggr="max", jk="max")

    def forward(self, x: Tensor, y: Tensor, edge_index: Tensor, label_mask: Tensor) -> Tensor:
        return self.conv(self.label(x, y, label_mask), edge_index)


def forward(model: nn.Module, data: Data) -> Tensor:
    return model(data.x, data.y, data.edge_index, data.label_mask)


@pytest.fixture(scope="module")
def graph() -> Data:
    data = make_graph(60, 200)
    data.val_mask = ~data.train_mask
    return data


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(2)
    return Net().double()


CONFIG = TrainConfig(epochs=4, restore_best=False, seed=3)


def train(root: Any, model: nn.Module, flow: bool) -> tuple[Any, Tensor]:
    data = pyg_sar.load_partition(root)
    seeds = pyg_sar.partition.message_flow_graphs(data, data.train_mask, 2) if flow else None
    own = pyg_sar.distribute(copy.deepcopy(model))
    trainer = pyg_sar.Trainer(own, data, CONFIG, forward=forward, labels=0.6, flow=seeds)
    return trainer.fit(), ratio_mask(data.train_mask, 0.6, 5).full_tensor()


def plain_training(model: nn.Module, data: Data) -> tuple[list[float], Tensor]:
    """The recipe in PyG, with the documented split."""
    optimizer = torch.optim.Adam(model.parameters(), lr=CONFIG.lr, weight_decay=5e-4)
    losses = []
    for epoch in range(CONFIG.epochs):
        key = (CONFIG.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63
        shown = ratio_mask(data.train_mask, 0.6, key)
        assert 0 < shown.sum() < data.train_mask.sum() and not (shown & ~data.train_mask).any()
        rest = data.train_mask & ~shown
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.y, data.edge_index, shown)[rest], data.y[rest])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model(data.x, data.y, data.edge_index, data.train_mask).detach()


@pytest.mark.parametrize(("world", "run", "flow"), [(3, workers, True), (8, host, False)])
def test_the_trainer_is_the_recipe(world, run, flow, graph, model, partitions):
    losses, out = plain_training(copy.deepcopy(model), graph)
    found = run(train, world, partitions(graph, world), model, flow)
    assert found[0][0].losses == pytest.approx(losses, rel=TOLERANCE)
    loss = F.cross_entropy(out[graph.val_mask], graph.y[graph.val_mask]).item()
    assert found[0][0].final["val_loss"] == pytest.approx(loss, rel=TOLERANCE)
    whole = ratio_mask(graph.train_mask, 0.6, 5)
    assert all(torch.equal(mask, whole) for _, mask in found)
    assert not torch.equal(whole, ratio_mask(graph.train_mask, 0.6, 6))


def in_pyg(model: nn.Module, data: Data) -> list[float]:
    torch.manual_seed(7)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        shown = MaskLabel.ratio_mask(data.train_mask, 0.5)
        rest = data.train_mask & ~shown
        out = model(data.x, data.y, data.edge_index, shown)
        loss = F.cross_entropy(out[rest], data.y[rest])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def distributed(root: Any, model: nn.Module) -> list[float]:
    return in_pyg(pyg_sar.distribute(copy.deepcopy(model)), pyg_sar.load_partition(root))


def test_workers_draw_as_pyg(graph, model, partitions):
    expected = in_pyg(copy.deepcopy(model), graph)
    for losses in host(distributed, 3, partitions(graph, 3), model):
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_the_command(graph, partitions):
    graph = copy.copy(graph)
    graph.x = graph.x.float()
    del graph.edge_weight
    config = tool.RunConfig(
        parts=str(partitions(graph, 3)),
        model=tool.ModelConfig(name="sage", hidden=4, dropout=0.0),
        train=CONFIG,
        labels=0.5,
        progress="none",
    )
    found = host(tool.train_worker, 3, config)[0]
    alone = dataclasses.replace(config, parts=str(partitions(graph, 1)))
    assert found.losses == pytest.approx(host(tool.train_worker, 1, alone)[0].losses, rel=1e-5)
    without = dataclasses.replace(config, labels=None)
    assert found.losses != host(tool.train_worker, 3, without)[0].losses
    with pytest.raises(Exception, match="'labels' to be in"):
        host(tool.train_worker, 3, dataclasses.replace(config, labels=1.0))


def test_what_is_no_mask_and_no_label_is_refused(graph):
    mask = graph.train_mask
    for given in (mask.long(), mask.view(-1, 1)):  # Not rows 0 and 1, in turn.
        with pytest.raises(ValueError, match="'mask' to be bool with a value for each node"):
            ratio_mask(given, 0.5, 1)
    with pytest.raises(ValueError, match=r"'ratio' to be in \[0, 1\] \(got 65\)"):
        ratio_mask(mask, 65, 1)
    for y, shown in ((graph.y + 0.7, mask), (graph.y, mask.long()), (graph.y[:-1], mask)):
        with pytest.raises(ValueError, match="an integer and 'shown' a bool for each node"):
            with_labels(graph.x, y, shown, CLASSES + 1)
