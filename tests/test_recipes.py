"""Each recipe on 1, 2, 4 workers, and on 8 parts of 2 workers: the test accuracy of each epoch.

Float64; the numbers are those of plain PyG in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import CHANNELS, CLASSES, TOLERANCE, Partitions, error, make_graph, workers
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.transforms import SIGN

import pyg_sar
from pyg_sar.train import Callback, NeighborSampling, TrainConfig, ratio_mask
from pyg_sar.train.flow import call_model

NODES, RATIO = 60, 0.6
CONFIG = TrainConfig(epochs=2, lr=0.05, restore_best=False, seed=3)
SAMPLING = NeighborSampling(num_neighbors=(3, 2), batch_size=10)

Run = tuple[list[float], Tensor]  # Test accuracy by epoch, and the outputs of all nodes at last.


class Recipe(nn.Module):
    """A model that is called with the data of a graph.

    Args:
        net: What computes.
        call: Calls it.
    """

    def __init__(self, net: nn.Module, call: Callable[[Any, Data], Tensor]) -> None:
        super().__init__()
        self.net, self.call = net, call

    def forward(self, data: Data) -> Tensor:
        return self.call(self.net, data)


class Labels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label, self.conv = gnn.MaskLabel(CLASSES, CHANNELS), gnn.SAGEConv(CHANNELS, CLASSES)

    def forward(self, data: Data) -> Tensor:
        return self.conv(self.label(data.x, data.y, data.label_mask), data.edge_index)


class Relations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.RGCNConv(CHANNELS, 4, 3, num_bases=2)
        self.last = gnn.FastRGCNConv(4, 2 * CLASSES, 3, num_blocks=2)

    def forward(self, data: Data) -> Tensor:
        edges = data.edge_index, data.edge_type
        return self.last(self.first(data.x, *edges).tanh(), *edges)[:, :CLASSES]


def with_edges(net: Any, data: Data) -> Tensor:
    return net(data.x, data.edge_index)


def models() -> dict[str, nn.Module]:
    """The recipes' models, with the same parameters in each call."""
    torch.manual_seed(2)
    sizes = CHANNELS, 8, 2, CLASSES
    whole = {
        "full batch": Recipe(gnn.GCN(*sizes), with_edges),
        "message flow graph": Recipe(gnn.GAT(*sizes, heads=2), call_model),
        "labels": Labels(),
        "sampled": Recipe(gnn.GraphSAGE(*sizes), call_model),
        "SIGN": Recipe(
            nn.Linear(3 * CHANNELS, CLASSES),
            lambda net, data: net(torch.cat([data.x, data.x1, data.x2], dim=1)),
        ),
        "SGC": Recipe(gnn.SGConv(CHANNELS, CLASSES, K=2, cached=True), with_edges),
        "APPNP": Recipe(
            nn.ModuleList([nn.Linear(CHANNELS, CLASSES), gnn.APPNP(K=3, alpha=0.2)]),
            lambda net, data: net[1](net[0](data.x), data.edge_index),
        ),
        "R-GCN": Relations(),
    }
    return {name: model.double() for name, model in whole.items()}


def after_training(soft: Tensor, data: Data, made: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """What needs no training: Correct and Smooth, label propagation."""
    mask, y = data.train_mask, data.y[data.train_mask]
    post, spread = made(gnn.CorrectAndSmooth(3, 0.8, 3, 0.7)), made(gnn.LabelPropagation(3, 0.9))
    corrected = post.correct(soft.softmax(dim=1), y, mask, data.edge_index)
    labels = F.one_hot(data.y, CLASSES).to(soft.dtype)
    return {
        "C&S": post.smooth(corrected, y, mask, data.edge_index),
        "label propagation": spread(labels, data.edge_index, mask=mask),
    }


# On workers ##################################################################


class Curve(Callback):
    def __init__(self) -> None:
        self.accuracies: list[float] = []

    def on_epoch(self, trainer: Any, record: Any) -> None:
        self.accuracies.append(record.scores["test_accuracy"])


def on_workers(root: Path, out: Path) -> dict[str, Run]:
    """All recipes on a partition."""
    torch.set_default_dtype(torch.float64)  # PyG's LabelPropagation makes tensors of it.
    pyg_sar.tools.propagate_features(root, 2, out)
    data = pyg_sar.load_partition(out)
    found = {}
    for name, model in models().items():
        own, curve = pyg_sar.distribute(model), Curve()
        how: dict[str, Any] = {}
        if name == "message flow graph":
            how["flow"] = pyg_sar.partition.message_flow_graphs(data, data.train_mask, 2)
        if name == "labels":
            how["labels"] = RATIO
        if name == "sampled":
            how["sampler"] = SAMPLING
        forward = lambda model, data: model(data)  # noqa: E731
        pyg_sar.Trainer(own, data, CONFIG, forward=forward, callbacks=[curve], **how).fit()
        found[name] = curve.accuracies, pyg_sar.infer(own, data, forward=forward)
    for name, rows in after_training(found["full batch"][1], data, pyg_sar.distribute).items():
        found[name] = [accuracy(rows, data)], rows
    return {name: (accuracies, rows.full_tensor()) for name, (accuracies, rows) in found.items()}


# In one process ##############################################################


def in_one_process(model: nn.Module, data: Data, labels: bool) -> Run:
    """Plain PyG, with the documented split of the labels."""
    optimizer = torch.optim.Adam(model.parameters(), lr=CONFIG.lr, weight_decay=5e-4)
    accuracies = []
    for epoch in range(CONFIG.epochs):
        shown = torch.zeros_like(data.train_mask)
        if labels:
            key = (CONFIG.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63
            shown = ratio_mask(data.train_mask, RATIO, key)
        data.label_mask, asked = shown, data.train_mask & ~shown
        optimizer.zero_grad()
        F.cross_entropy(model(data)[asked], data.y[asked]).backward()
        optimizer.step()
        data.label_mask = data.train_mask
        with torch.no_grad():
            out = model.eval()(data)
        model.train()
        accuracies.append(accuracy(out, data))
    return accuracies, out


def accuracy(out: Tensor, data: Data) -> float:
    return (out.argmax(1) == data.y)[data.test_mask].double().mean().item()


@pytest.fixture(scope="module")
def graph() -> Data:
    data = make_graph(NODES, 200)
    data.val_mask = data.test_mask = ~data.train_mask
    del data.edge_weight
    return data


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def expected(graph: Data, partitions: Partitions, tmp_path_factory: Any) -> dict[str, Run]:
    """Plain PyG; of sampled neighbours one worker, which test_sampling compares with PyG."""
    data = SIGN(2)(copy.copy(graph))
    made = models()
    sampled = made.pop("sampled")
    runs = {name: in_one_process(model, data, name == "labels") for name, model in made.items()}
    own, curve = pyg_sar.distribute(sampled), Curve()
    part = pyg_sar.load_partition(partitions(graph, 1))
    forward = lambda model, data: model(data)  # noqa: E731
    one = pyg_sar.Trainer(own, part, CONFIG, forward=forward, sampler=SAMPLING, callbacks=[curve])
    one.fit()
    runs["sampled"] = curve.accuracies, pyg_sar.infer(own, part, forward=forward).full_tensor()
    for name, rows in after_training(runs["full batch"][1], data, lambda layer: layer).items():
        runs[name] = [accuracy(rows, data)], rows
    return runs


def check(results: list[dict[str, Run]], expected: dict[str, Run]) -> None:
    assert len({tuple(accuracies) for accuracies, _ in expected.values()}) > 4
    for name, (accuracies, out) in expected.items():
        for found in results:
            assert found[name][0] == pytest.approx(accuracies, abs=1e-12), name
            assert error(found[name][1], out) < TOLERANCE, name


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")  # FastRGCNConv.
@pytest.mark.parametrize("world", [1, 4, 2])
def test_each_recipe_on_workers(world, graph, partitions, expected, tmp_path):
    check(workers(on_workers, world, partitions(graph, world), tmp_path / "out"), expected)


def test_each_recipe_on_eight_parts_of_two_workers(graph, partitions, expected, tmp_path):
    task = on_workers, 2, partitions(graph, 8), tmp_path / "out"
    check(pyg_sar.launch(*task, parts=8, timeout=60.0), expected)
