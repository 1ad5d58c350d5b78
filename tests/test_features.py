"""Features propagated once, and models that only propagate: as PyG's own on any number of parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_workers import host
from oracle import CHANNELS, CLASSES, TOLERANCE, error, make_graph, whole, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.transforms import SIGN
from torch_geometric.utils import coalesce

import pyg_sar
from pyg_sar.errors import PartitionError
from pyg_sar.partition import add_attributes, merge_partitions

pytestmark = pytest.mark.usefixtures("double")  # SIGN and LabelPropagation make tensors of it.
NODES, K = 60, 3


def powers(root: Any, out: Any, loops: bool) -> None:
    pyg_sar.tools.propagate_features(root, K, out, add_self_loops=loops)


@pytest.mark.parametrize(
    ("world", "run", "weights", "loops"),
    [(1, workers, True, False), (2, workers, False, False), (4, workers, False, True),
     (8, host, True, False)],
)  # fmt: skip
def test_features_are_those_of_sign(world, run, weights, loops, partitions, tmp_path):
    graph = make_graph(NODES, 200)
    if not weights:
        del graph.edge_weight
    run(powers, world, partitions(graph, world), tmp_path / "out", loops)
    found = merge_partitions(tmp_path / "out")
    expected, x = copy.copy(graph), graph.x
    if not loops:
        expected = SIGN(K)(expected)
    for k in range(1, K + 1):
        if loops:
            conv = gnn.SGConv(CHANNELS, CHANNELS, K=k, bias=False)
            conv.lin.weight.data = torch.eye(CHANNELS)
            expected[f"x{k}"] = conv(x, graph.edge_index).detach()
        assert error(found[f"x{k}"], expected[f"x{k}"]) < TOLERANCE
    before = graph.to_dict()
    for name, value in found.to_dict().items():
        assert name in ("x1", "x2", "x3") or torch.equal(
            torch.as_tensor(value), torch.as_tensor(before.pop(name))
        )
    assert not before


def replaced(root: Any, name: str, rows: int, overwrite: bool, plain: bool = False) -> None:
    data = pyg_sar.load_partition(root)
    value = torch.arange(NODES + rows) if plain or rows else data.x[:, 0]
    if rows < 0:
        value = data.x[data.train_mask]
    add_attributes(root, {name: value}, root, overwrite=overwrite)


def test_attributes_are_added_all_or_none(partitions, tmp_path):
    graph = make_graph(NODES, 200)
    pyg_sar.write_partitions(graph, 2, tmp_path / "parts")
    before = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    for name, rows, overwrite, message in (
        ("new", 0, False, "exists"),
        ("x", 0, True, "already"),
        ("new", 1, True, "a row for each"),
        ("new", -1, True, "a row for each"),
    ):
        with pytest.raises((PartitionError, Exception), match=message):
            workers(replaced, 2, tmp_path / "parts", name, rows, overwrite)
        assert {p.name: p.read_bytes() for p in (tmp_path / "parts").iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["parts"]
    workers(replaced, 2, tmp_path / "parts", "new", 0, True)
    workers(replaced, 2, tmp_path / "parts", "plain", 0, True, True)
    found = merge_partitions(tmp_path / "parts")
    assert torch.equal(found.new, graph.x[:, 0]) and torch.equal(found.plain, torch.arange(NODES))


def test_a_transform_gives_the_same_features(partitions):
    graph = make_graph(NODES, 200)
    graph.edge_index, graph.edge_weight = coalesce(graph.edge_index, graph.edge_weight)
    del graph.edge_attr, graph.edge_type

    def transform(root: Path) -> Any:
        data = SIGN(2)(pyg_sar.load_partition(root))
        return whole(data.x1), whole(data.x2)

    expected = SIGN(2)(copy.copy(graph))
    for found in workers(transform, 2, partitions(graph, 2)):
        assert error(found[0], expected.x1) < TOLERANCE
        assert error(found[1], expected.x2) < TOLERANCE


class Propagating(torch.nn.Module):
    """A linear map between two propagations, labels spread, and C&S behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.SGConv(CHANNELS, 4, K=2)
        self.last = gnn.Linear(4, CLASSES)
        self.spread = gnn.APPNP(K=4, alpha=0.2)
        self.labels = gnn.LabelPropagation(3, 0.8)
        self.post = gnn.CorrectAndSmooth(2, 0.8, 3, 0.7)

    def forward(self, data: Data) -> tuple[Tensor, Tensor]:
        z = self.last(self.first(data.x, data.edge_index).tanh())
        out = self.spread(z, data.edge_index)
        loss = out[data.train_mask].square().sum(-1).mean()
        y = torch.nn.functional.one_hot(data.y, CLASSES).to(out.dtype)
        labels = self.labels(y, data.edge_index, mask=data.train_mask)
        soft, mask = out.detach().softmax(-1), data.train_mask
        soft = self.post.correct(soft, data.y[mask], mask, data.edge_index)
        soft = self.post.smooth(soft, data.y[mask], mask, data.edge_index)
        return loss, torch.cat([out.detach(), labels, soft], dim=1)


def propagated(root: Path, model: torch.nn.Module) -> Any:
    data = pyg_sar.load_partition(root)
    own = pyg_sar.distribute(copy.deepcopy(model))
    loss, out = own(data)
    loss.backward()
    return whole(out), [p.grad.clone() for p in own.parameters()]


def test_models_that_only_propagate(partitions):
    graph, model = make_graph(NODES, 200), Propagating()
    loss, expected = model(graph)
    loss.backward()
    for out, grads in host(propagated, 8, partitions(graph, 8), model):
        assert error(out, expected) < TOLERANCE
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            assert error(grad, parameter.grad) < TOLERANCE


class Relational(torch.nn.Module):
    """R-GCN: bases in the first layer, blocks in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.RGCNConv(CHANNELS, 4, 3, num_bases=2)
        self.last = gnn.RGCNConv(4, 2, 3, num_blocks=2)

    def forward(self, data: Data) -> tuple[Tensor, Tensor]:
        edges = data.edge_index, data.edge_type
        out = self.last(self.first(data.x, *edges).relu(), *edges)
        return out[data.train_mask].square().sum(-1).mean(), out.detach()


def test_rgcn_on_parts(partitions):
    graph, model = make_graph(NODES, 200), Relational()
    loss, expected = model(graph)
    loss.backward()
    for out, grads in host(propagated, 8, partitions(graph, 8), model):
        assert error(out, expected) < TOLERANCE
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            assert error(grad, parameter.grad) < TOLERANCE
