"""Features propagated once: as PyG's own on any number of parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_workers import host
from oracle import CHANNELS, TOLERANCE, error, make_graph, whole, workers
from torch_geometric import nn as gnn
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
