"""Assignments of nodes to parts, layouts and statistics, against slow definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.data.hypergraph_data import HyperGraphData

import pyg_sar
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.balance import undirected_csr
from pyg_sar.partition.layout import (
    NodeOrder,
    PartitionStatistics,
    group_edges,
    partition_statistics,
)


def random_graph(num_nodes: int, num_edges: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes, (2, num_edges), generator=generator)


def two_cliques(size: int) -> torch.Tensor:
    """Two cliques joined by one edge in both directions."""
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    clique = torch.stack([row.reshape(-1), column.reshape(-1)])
    bridge = torch.tensor([[0, size], [size, 0]])
    return torch.cat([clique, clique + size, bridge], dim=1)


@pytest.mark.parametrize("method", ["balanced", "metis"])
def test_two_cliques_are_found(method):
    edge_index = two_cliques(20)
    part = assign_nodes(edge_index, 40, 2, method)
    assert part.dtype == torch.int64
    assert part[:20].unique().numel() == part[20:].unique().numel() == 1
    statistics = partition_statistics(group_edges(edge_index, NodeOrder.of(part, 2)))
    assert statistics.edge_cut == 2
    assert statistics.halo == [1, 1]
    assert statistics.nodes == [20, 20]
    assert statistics.edges == [401, 401]
    assert statistics.replication_factor == 42 / 40


@pytest.mark.parametrize("method", ["balanced", "metis", "random"])
def test_same_seed_same_assignment(method):
    edge_index = random_graph(300, 1500, seed=1)
    first, again, other = (assign_nodes(edge_index, 300, 4, method, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("num_nodes, num_parts", [(10, 3), (10, 10), (3, 7), (1, 1), (0, 2)])
@pytest.mark.parametrize("method", ["random", "contiguous"])
def test_even_node_counts(method, num_nodes, num_parts):
    part = assign_nodes(torch.empty(2, 0, dtype=torch.long), num_nodes, num_parts, method)
    counts = torch.bincount(part, minlength=num_parts)
    assert part.shape == (num_nodes,) and counts.numel() == num_parts
    assert counts.max() - counts.min() <= 1
    if method == "contiguous":
        assert torch.equal(part, part.sort().values)


@pytest.mark.parametrize("method", ["balanced", "metis"])
@pytest.mark.parametrize("num_parts", [1, 2, 5, 6, 90, 100, 101, 1000])
def test_takes_any_number_of_parts(num_parts, method):
    ring = torch.stack([torch.arange(100), (torch.arange(100) + 1) % 100])
    part = assign_nodes(ring, 100, num_parts, method)
    assert part.shape == (100,)
    assert 0 <= part.min() and part.max() < num_parts


@pytest.mark.parametrize("method", ["balanced", "metis"])
def test_without_edges(method):
    part = assign_nodes(torch.empty(2, 0, dtype=torch.long), 50, 4, method)
    assert torch.bincount(part, minlength=4).max() <= 14


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 1000))
def test_undirected_csr_is_the_set_of_undirected_edges(num_nodes, num_edges, seed):
    edge_index = random_graph(num_nodes, num_edges, seed)
    starts, adjacent = undirected_csr(edge_index, num_nodes)
    expected = {(a, b) for a, b in edge_index.t().tolist() if a != b}
    expected |= {(b, a) for a, b in expected}
    found = [
        (row, int(column))
        for row in range(num_nodes)
        for column in adjacent[starts[row] : starts[row + 1]]
    ]
    assert sorted(expected) == sorted(found)


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 5), st.integers(0, 1000))
def test_layout_and_statistics_by_definition(num_nodes, num_edges, num_parts, seed):
    edge_index = random_graph(num_nodes, num_edges, seed)
    part = random_graph(num_parts, num_nodes, seed + 1)[0]
    layout = group_edges(edge_index, NodeOrder.of(part, num_parts))
    owner, edges = part.tolist(), edge_index.t().tolist()
    for p in range(num_parts):
        assert layout.sources.ids(p).tolist() == [v for v in range(num_nodes) if owner[v] == p]
        assert layout.edges.part(p)[2].tolist() == [
            i for i, (_, t) in enumerate(edges) if owner[t] == p
        ]
        halo = {(owner[s], s) for s, t in edges if owner[t] == p and owner[s] != p}
        assert layout.sources.order[layout.halos[p]].tolist() == [s for _, s in sorted(halo)]
        assert layout.halo_counts(p).tolist() == [
            sum(q == o for o, _ in halo) for q in range(num_parts)
        ]
        for q in range(num_parts):
            needed = layout.sources.ids(q)[layout.send_rows(q, p)].tolist()
            assert needed == sorted(s for o, s in halo if o == q)
    mask = torch.arange(num_nodes) % 2 == 0
    statistics = partition_statistics(layout, mask)
    assert statistics.edge_cut == sum(owner[s] != owner[t] for s, t in edges)
    assert statistics.training_nodes == [
        sum(owner[v] == p for v in range(0, num_nodes, 2)) for p in range(num_parts)
    ]
    assert sum(statistics.nodes) == num_nodes and sum(statistics.edges) == num_edges


def test_training_nodes_of_several_splits_are_those_of_the_first():
    layout = group_edges(
        torch.empty(2, 0, dtype=torch.long), NodeOrder.of(torch.tensor([0, 0, 1]), 2)
    )
    mask = torch.tensor([[True, False], [False, True], [True, True]])
    assert partition_statistics(layout, mask).training_nodes == [1, 1]


@pytest.mark.parametrize("make", [torch.tensor, np.array])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_given_assignment(make, dtype):
    module = torch if make is torch.tensor else np
    vector = make([1, 0, 1], dtype=getattr(module, dtype))
    part = assign_nodes(torch.empty(2, 0, dtype=torch.long), 3, 2, vector)
    assert part.dtype == torch.int64 and part.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "vector, message",
    [
        (torch.tensor([0, 1]), r"shape \[3\].*got shape \[2\]"),
        (torch.tensor([[0], [1], [0]]), r"got shape \[3, 1\]"),
        (torch.tensor([0, 1, 2]), r"parts 0 to 1 \(got 2 at node 2.*num_parts=3"),
        (torch.tensor([0, -4, 1]), r"got -4 at node 1"),
        (torch.tensor([0.0, 1.0, 0.0]), r"float32.*\.long\(\)"),
        (np.array([0.0, 1.0, 0.0]), r"float64.*\.long\(\)"),
        (torch.tensor([True, False, True]), r"torch.bool"),
    ],
)
def test_wrong_assignments_are_named(vector, message):
    with pytest.raises(ValueError, match=message):
        assign_nodes(torch.empty(2, 0, dtype=torch.long), 3, 2, vector)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"num_parts": 0}, ValueError, "'num_parts' to be at least 1 \\(got 0\\)"),
        ({"num_parts": 10**6}, ValueError, "'num_parts' to be at most 99999 \\(got 1000000\\)"),
        ({"num_parts": -3}, ValueError, "got -3"),
        ({"num_parts": 2.0}, TypeError, "'num_parts' to be an integer \\(got 2.0\\)"),
        ({"num_parts": True}, TypeError, "got True"),
        (
            {"method": "meits"},
            ValueError,
            "'metis', 'coarsened', 'geometric', 'random'.*got 'meits'",
        ),
        ({"method": [0, 1, 0]}, TypeError, "got list.*torch.tensor"),
        ({"seed": -1}, ValueError, "'seed'.*got -1"),
        ({"seed": 2**31}, ValueError, "'seed'"),
        ({"seed": None}, TypeError, "'seed'.*got None"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        assign_nodes(torch.empty(2, 0, dtype=torch.long), 3, **{"num_parts": 2, **arguments})


class Counted(Data):
    """Counts each edge and its reverse as one, which a ``Data`` does not."""

    @property
    def num_edges(self) -> int:
        return super().num_edges // 2

    def is_directed(self) -> bool:
        return False


def test_no_graph_and_no_number_of_parts_are_named(graph, tmp_path):
    for data, parts, message in (
        ("graph.pt", 2, r"'data' to be a Data or a HeteroData, one graph \(got str\)"),
        ([graph], 2, r"one graph \(got list\)"),
        (Counted.from_dict(graph.to_dict()), 2, "redefines is_directed, num_edges, but"),
        (HyperGraphData(edge_index=graph.edge_index), 2, "redefines .*num_edges"),
        (graph, "2", r"'num_parts' to be an integer \(got '2'\)"),
    ):
        with pytest.raises(TypeError, match=message):
            pyg_sar.write_partitions(data, parts, tmp_path / "parts")
    with pytest.raises(ValueError, match=rf"at most 64 for {graph.num_nodes} nodes \(got 5000\)"):
        pyg_sar.write_partitions(graph, 5000, tmp_path / "parts")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(FileExistsError, match="is not a partition, .*; choose another folder"):
        pyg_sar.write_partitions(graph, 2, tmp_path / "mine", overwrite=True)


def test_table():
    statistics = PartitionStatistics(
        num_parts=2,
        num_nodes=1000,
        num_edges=4000,
        edge_cut=1000,
        nodes=[400, 600],
        edges=[3000, 1000],
        halo=[100, 150],
        training_nodes=[0, 50],
    )
    text = str(statistics)
    assert "1,000 edges (25.00%)" in text
    assert "replication factor  1.250" in text
    header, first, second, balance = text.splitlines()[-4:]
    assert header.split() == ["part", "nodes", "edges", "training", "nodes", "halo", "rows"]
    assert first.split() == ["0", "400", "3,000", "0", "100"]
    assert second.split() == ["1", "600", "1,000", "50", "150"]
    assert balance.split() == ["max/mean", "1.200", "1.500", "2.000", "1.200"]


def test_table_of_many_parts_and_of_nothing():
    zeros = [0] * 40
    statistics = PartitionStatistics(
        num_parts=40, num_nodes=0, num_edges=0, edge_cut=0, nodes=zeros, edges=zeros, halo=zeros
    )
    text = str(statistics)
    assert "(24 more)" in text and "training" not in text
    assert statistics.balance == {"nodes": 1.0, "edges": 1.0, "halo rows": 1.0}
    assert statistics.replication_factor == 0.0
