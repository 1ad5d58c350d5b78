"""``method='balanced'``: nodes and edges of each part, halo rows, what can't be evened out."""

from __future__ import annotations

import ctypes
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.kernels import ops
from pyg_sar.partition import balance
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.balance import LIMIT
from pyg_sar.partition.layout import NodeOrder, group_edges, partition_statistics
from pyg_sar.tools.graphs import load_graph


def rmat(scale: int, num_edges: int, seed: int = 0) -> Tensor:
    """A directed R-MAT graph with 2**scale nodes and the usual probabilities."""
    draw = np.random.default_rng(seed).choice(4, (scale, num_edges), p=[0.57, 0.19, 0.19, 0.05])
    powers = 2 ** np.arange(scale)[:, None]
    return torch.from_numpy(np.stack([(draw // 2 * powers).sum(0), (draw % 2 * powers).sum(0)]))


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes, (2, num_edges), generator=draw)


def communities(sizes: list[int], edges: list[int]) -> Tensor:
    """Random graphs side by side, with some edges between them."""
    starts = np.cumsum([0, *sizes])
    blocks = [
        random_graph(n, e, seed=k) + int(starts[k])
        for k, (n, e) in enumerate(zip(sizes, edges, strict=True))
    ]
    return torch.cat([*blocks, random_graph(sum(sizes), sum(edges) // 50, seed=99)], dim=1)


def stars(number: int, leaves: int) -> Tensor:
    """Each star's leaves point to its centre."""
    leaf = torch.arange(number * leaves) + number
    return torch.stack([leaf, (leaf - number) // leaves])


GRAPHS = {  # edges and nodes
    "R-MAT": (rmat(12, 60_000), 2**12),
    "one dense community": (communities([500] * 4, [14_000, 2000, 2000, 2000]), 2000),
    "even communities": (communities([500] * 8, [4000] * 8), 4000),
    "stars": (stars(60, 50), 60 * 51),
    "stars that send": (stars(60, 50).flip(0), 60 * 51),
    "half isolated": (random_graph(2000, 12_000), 4000),
    "citations": (torch.stack([*random_graph(3000, 20_000)]).sort(0, descending=True).values, 3000),
    "a ring": (torch.stack([torch.arange(5000), (torch.arange(5000) + 1) % 5000]), 5000),
    "loops and duplicates": (random_graph(50, 2000).repeat(1, 3), 1000),
}


def measure(edge_index: Tensor, part: Tensor, num_parts: int):
    return partition_statistics(group_edges(edge_index, NodeOrder.of(part, num_parts)))


@pytest.mark.parametrize("num_parts", [2, 4, 7])
@pytest.mark.parametrize("name", GRAPHS)
def test_nodes_and_edges_are_within_the_limit(name, num_parts):
    edge_index, num_nodes = GRAPHS[name]
    part = assign_nodes(edge_index, num_nodes, num_parts, "balanced")
    found = measure(edge_index, part, num_parts)
    degree = torch.bincount(edge_index[1])
    assert found.balance["nodes"] <= LIMIT
    assert max(found.edges) <= max(LIMIT * found.num_edges / num_parts, int(degree.max()))
    random = measure(
        edge_index, assign_nodes(edge_index, num_nodes, num_parts, "random"), num_parts
    )
    assert sum(found.halo) <= sum(random.halo)
    assert found.edge_cut <= random.edge_cut


@pytest.mark.parametrize("num_parts", [2, 8])
@pytest.mark.parametrize("name", ["cora", "amazon_computers", "tolokers", "snap_cit_hepph"])
def test_real_graphs_are_within_the_limit(name, num_parts, shared_data):
    data = load_graph(str(shared_data(f"{name}.npz")))
    edges, nodes = data.edge_index, data.num_nodes
    found, random = (
        measure(edges, assign_nodes(edges, nodes, num_parts, method), num_parts)
        for method in ("balanced", "random")
    )
    assert found.balance["nodes"] <= LIMIT and found.balance["edges"] <= LIMIT
    assert sum(found.halo) < sum(random.halo) and found.edge_cut < random.edge_cut


def test_the_default_evens_out_what_metis_does_not(tmp_path):
    edge_index, num_nodes = GRAPHS["R-MAT"]
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    found = pyg_sar.write_partitions(data, 4, tmp_path / "balanced")
    metis = pyg_sar.write_partitions(data, 4, tmp_path / "metis", "metis")
    assert max(found.balance["nodes"], found.balance["edges"]) <= LIMIT
    assert metis.balance["edges"] > 2


@pytest.mark.parametrize("name", ["R-MAT", "one dense community"])
def test_same_seed_same_parts(name):
    edge_index, num_nodes = GRAPHS[name]
    first, again, other = (
        assign_nodes(edge_index, num_nodes, 3, "balanced", seed) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_cut_between_communities_is_found():
    edge_index, num_nodes = GRAPHS["even communities"]
    found = measure(edge_index, assign_nodes(edge_index, num_nodes, 8, "balanced"), 8)
    assert found.edge_cut <= 1.05 * 32_000 // 50


@given(st.integers(1, 40), st.integers(0, 200), st.integers(1, 12), st.integers(0, 1000))
def test_small_graphs(num_nodes, num_edges, num_parts, seed):
    """Each node is in a part, no part has more nodes than it may, and nothing is warned of."""
    edge_index = random_graph(num_nodes, num_edges, seed)
    part = assign_nodes(edge_index, num_nodes, num_parts, "balanced", seed)
    assert part.dtype == torch.int64 and part.shape == (num_nodes,)
    assert 0 <= part.min() and part.max() < num_parts
    most = max(LIMIT * num_nodes / num_parts, math.ceil(num_nodes / num_parts))
    assert torch.bincount(part).max() <= most or num_nodes < 4 * num_parts


@pytest.mark.parametrize(("nodes", "edges", "parts"), [(59, 14, 9), (641, 17, 13), (3000, 40, 16)])
def test_few_edges_leave_nodes_even(nodes, edges, parts):
    """Where parts have one or two edges each, 1.1 times the mean of edges is no whole number."""
    for seed in range(8):
        edge_index = random_graph(nodes, edges, seed)
        found = measure(edge_index, assign_nodes(edge_index, nodes, parts, seed=seed), parts)
        assert max(found.nodes) <= max(LIMIT * nodes / parts, math.ceil(nodes / parts))
        most = math.ceil(max(LIMIT * edges / parts, int(torch.bincount(edge_index[1]).max())))
        assert max(found.edges) <= most


@pytest.mark.parametrize("method", ["balanced", "coarsened"])
def test_training_nodes_are_balanced_where_asked_for(method, tmp_path):
    """All of them are in two communities of eight; of several splits the first counts."""
    edge_index, num_nodes = GRAPHS["even communities"]
    mask = torch.zeros(num_nodes, 2, dtype=torch.bool)
    mask[:1000:3, 0] = True
    data = Data(edge_index=edge_index, num_nodes=num_nodes, train_mask=mask)
    plain = pyg_sar.write_partitions(data, 4, tmp_path / "plain", method)
    even: dict[str, Any] = {"balance_training": True}
    found = pyg_sar.write_partitions(data, 4, tmp_path / "even", method, **even)
    assert max(found.balance[name] for name in ("nodes", "edges", "training nodes")) <= LIMIT
    assert plain.balance["training nodes"] > 1.5 and found.edge_cut > plain.edge_cut
    hetero = HeteroData()
    hetero["a"].num_nodes, hetero["b"].num_nodes = num_nodes, 5
    hetero["a"].train_mask, hetero["a", "to", "a"].edge_index = mask, edge_index
    of_types = pyg_sar.write_partitions(hetero, 4, tmp_path / "types", method, **even)
    assert of_types.balance["training nodes"] <= LIMIT


def test_training_nodes_that_cannot_be_balanced_are_refused(tmp_path):
    data = Data(edge_index=GRAPHS["a ring"][0], num_nodes=5000)
    even: dict[str, Any] = {"balance_training": True}
    with pytest.raises(ValueError, match="needs a 'train_mask' with training nodes"):
        pyg_sar.write_partitions(data, 2, tmp_path / "parts", **even)
    data.train_mask = torch.ones(5000, dtype=torch.bool)
    for method in ("metis", torch.zeros(5000, dtype=torch.long)):
        with pytest.raises(ValueError, match="is for method='balanced' and 'coarsened'"):
            pyg_sar.write_partitions(data, 2, tmp_path / "parts", method, **even)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_one_node_with_most_edges_is_warned_of_by_its_numbers(num_parts):
    """Of 40,000 edges 30,000 lead to node 0: its part can't have fewer."""
    edge_index = random_graph(5000, 40_000)
    edge_index[1, :30_000] = 0
    most = r"edges \([2-3]\.[0-9]{2}|edges \(1\.[5-9][0-9]"
    with pytest.warns(UserWarning, match="within 1.1 of the mean") as caught:
        part = assign_nodes(edge_index, 5000, num_parts, "balanced")
    (message,) = [str(warning.message) for warning in caught]
    found = measure(edge_index, part, num_parts)
    assert f"{max(found.nodes):,} nodes" in message and f"{max(found.edges):,} edges" in message
    assert "one node alone has 30,0" in message and "in-edges of 40,000" in message
    assert re.search(most, message)
    assert found.balance["nodes"] <= LIMIT
    assert found.edges[int(part[0])] <= 30_000 + 10_000 * 1.1 / num_parts


def test_what_no_node_prevents_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for edge_index, num_nodes in GRAPHS.values():
            assign_nodes(edge_index, num_nodes, 2, "balanced")


def test_without_metis_own_functions_parts_are_still_even(monkeypatch):
    class Hidden:
        def __getattr__(self, name: str):
            raise AttributeError(f"undefined symbol: {name}")

    monkeypatch.setattr(ctypes, "CDLL", lambda path: Hidden())
    edge_index, num_nodes = GRAPHS["one dense community"]
    # One part is full of nodes then, the other of edges: single moves can't mend the last percent.
    for method, most in (("balanced", LIMIT), ("coarsened", LIMIT + 0.01)):
        with pytest.warns(UserWarning, match="METIS_PartGraph.*install pymetis from its wheels"):
            part = assign_nodes(edge_index, num_nodes, 2, method)
        found = measure(edge_index, part, 2)
        assert max(found.balance["nodes"], found.balance["edges"]) <= most


def test_an_error_of_metis_is_named(monkeypatch):
    class Failing:
        def __getattr__(self, name: str):
            return lambda *arguments: -3

    monkeypatch.setattr(ctypes, "CDLL", lambda path: Failing())
    edge_index, num_nodes = GRAPHS["a ring"]
    with pytest.raises(RuntimeError, match="code -3 on 5,000 nodes and 2 parts.*not enough memory"):
        assign_nodes(edge_index, num_nodes, 2, "balanced")


def test_stages_are_reported():
    lines: list[str] = []
    edge_index, num_nodes = GRAPHS["R-MAT"]
    assign_nodes(edge_index, num_nodes, 2, "balanced", report=lines.append)
    assert any("METIS" in line for line in lines) and any("improving" in line for line in lines)
    assign_nodes(edge_index, num_nodes, 2, "random", report=pytest.fail)


def sorted_ends(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """Targets by source and sources by target, with where those of each node start."""
    found = []
    for first, second in ((0, 1), (1, 0)):
        order = (edge_index[first] * num_nodes + edge_index[second]).argsort()
        counts = torch.bincount(edge_index[first], minlength=num_nodes)
        offsets = torch.cat([torch.zeros(1).long(), counts.cumsum(0)])
        found += [offsets, edge_index[second, order]]
    return tuple(found)


@given(
    st.integers(2, 30), st.integers(1, 120), st.integers(2, 5), st.sampled_from([0.9, 1.2, 9.0]),
    st.integers(0, 10_000),
)  # fmt: skip
def test_savings_are_the_difference_of_halo_rows(num_nodes, num_edges, num_parts, room, seed):
    """By kernel and plain loops alike, with duplicates and loops, also where no part has room."""
    edge_index = random_graph(num_nodes, num_edges, seed)
    ends = sorted_ends(edge_index, num_nodes)
    start = torch.from_numpy(np.random.default_rng(seed).integers(num_parts, size=num_nodes))
    degree = torch.bincount(edge_index[1], minlength=num_nodes)
    weights = torch.stack([torch.ones_like(degree), degree], 1)
    most = (room * weights.sum(0) / num_parts).long() + 1
    found = []
    for dtype in (torch.int32, torch.int64):
        for native in (False, True)[: 1 + ops.built]:
            part = start.to(dtype, copy=True)
            loads = torch.zeros(num_parts, 2).long().index_add_(0, part, weights)
            before, rows = loads.clone(), sum(measure(edge_index, part.long(), num_parts).halo)
            typed = [t if t is ends[0] or t is ends[2] else t.to(dtype) for t in ends]
            saved = balance.save_halo_rows_(part, loads, weights, most, *typed, native=native)
            found.append(part.long())
            assert sum(measure(edge_index, part.long(), num_parts).halo) == rows - saved
            assert torch.equal(loads, torch.zeros_like(loads).index_add_(0, part, weights))
            over, was = ((held - most).clamp(min=0).sum() for held in (loads, before))
            assert over == 0 or was > 0
            assert was > 0 or saved >= 0
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.skipif(not ops.built, reason="the C++ kernels were not built")
def test_the_kernel_refuses_ends_that_are_not_those_of_one_graph():
    def given(**other: Any) -> list[Any]:
        usual = {
            "part": torch.tensor([0, 0, 1]),
            "loads": torch.tensor([[2, 1], [1, 2]]),
            "weights": torch.tensor([[1, 1], [1, 0], [1, 2]]),
            "most": torch.tensor([3, 3]),
            "first_out": torch.tensor([0, 1, 2, 3]),
            "target": torch.tensor([2, 2, 0]),
            "first_in": torch.tensor([0, 1, 1, 3]),
            "source": torch.tensor([2, 0, 1]),
        }
        return list((usual | other).values())

    assert balance.save_halo_rows_(*given(), native=True) == 3
    for error, other in (
        (IndexError, {"target": torch.tensor([2, 3, 0])}),
        (IndexError, {"source": torch.tensor([-1, 0, 1])}),
        (IndexError, {"part": torch.tensor([0, 0, 2])}),
        (ValueError, {"first_out": torch.tensor([0, 2, 1, 3])}),
        (ValueError, {"first_in": torch.tensor([0, 1, 1, 2])}),
        (ValueError, {"source": torch.tensor([1, 1, 1])}),
        (ValueError, {"weights": torch.ones(3, 1).long()}),
        (TypeError, {"source": torch.tensor([2, 0, 1]).int()}),
        (TypeError, {"most": torch.tensor([3.0, 3.0])}),
    ):
        with pytest.raises(error, match="save_halo_rows_: expected"):
            balance.save_halo_rows_(*given(**other), native=True)
