"""Partial sums that are pushed where that takes fewer rows: exact, and as few as said."""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CHANNELS, OUT, Job, Partitions, Sweep, apart, make_graph, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.engine.cuts import split_edges
from pyg_sar.exchange.cover import COSTS, SUMS, minimum_cover
from pyg_sar.exchange.halo_rows import HaloSource
from pyg_sar.kernels import ops

pytestmark = pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")

POLICIES = (
    SARPolicy(mode=1, prefetch=0),
    SARPolicy(mode=1, prefetch=1),
    SARPolicy(mode=2, prefetch=1),
    SARPolicy(mode=1, prefetch=1, push="off"),
)
WEIGHT = ("edge_weight",)
LAYERS = {
    "sage": (lambda: gnn.SAGEConv(CHANNELS, OUT), (), ()),
    "sage, sum": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="sum"), (), ()),
    "gin": (lambda: gnn.GINConv(torch.nn.Linear(CHANNELS, OUT)), (), ()),
    "gcn": (lambda: gnn.GCNConv(CHANNELS, OUT), (), ()),
    "gcn, weights": (lambda: gnn.GCNConv(CHANNELS, OUT), (), WEIGHT),
    "graph, weights": (lambda: gnn.GraphConv(CHANNELS, OUT), (), WEIGHT),
    "graph, learned weights": (lambda: gnn.GraphConv(CHANNELS, OUT), WEIGHT, ()),
    "sage stack": (lambda: gnn.GraphSAGE(CHANNELS, 8, 3, OUT), (), ()),
}


def stars(seed: int = 0) -> Data:
    """Hubs with many in-edges and hubs with many out-edges: pulling alone is wasteful."""
    data, draw = make_graph(60, 60, seed), torch.Generator().manual_seed(seed)
    others = torch.randperm(56, generator=draw)
    into = torch.stack([others, torch.full_like(others, 3)])
    out = torch.stack([torch.full_like(others, 5), others])
    data.edge_index = torch.cat([data.edge_index, into, into[:, ::2] + 1, out], 1)
    count = data.edge_index.size(1)
    data.edge_weight = torch.rand(count, generator=draw, dtype=torch.float64) + 0.1
    del data.edge_attr, data.edge_type
    return data


# The cover ###################################################################

edges = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=14)


@settings(deadline=None, max_examples=100)
@given(edges, st.sampled_from([(1, 1), (3, 2), (2, 5)]))
def test_the_cover_is_the_cheapest(pairs: list[tuple[int, int]], costs: tuple[int, int]) -> None:
    pull, push = costs
    best = min(
        pull * sum(chosen) + push * len({i for j, i in pairs if not chosen[j]})
        for chosen in itertools.product([0, 1], repeat=6)
    )
    ends = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
    for native in (True, False):
        cover = minimum_cover(ends[:, 0], ends[:, 1], 6, 6, pull, push, native=native)
        assert all(cover.pulled[j] or cover.pushed[i] for j, i in pairs)
        assert cover.cost(pull, push) == cover.bound == best


def chain(length: int) -> tuple[Tensor, Tensor]:
    """Source i has targets i and i + 1, from the last to the first: ways through all of them."""
    source = torch.arange(length).flip(0).repeat_interleave(2)
    return source, source + torch.tensor([0, 1]).repeat(length)


def crowded(length: int) -> tuple[Tensor, Tensor]:
    """A few targets for many sources, most of them for some, and sources without any."""
    draw = torch.Generator().manual_seed(length)
    source = torch.randint(length // 2, (4 * length,), generator=draw)
    target = torch.rand(4 * length, generator=draw).pow(4).mul(length + 1).long()
    return source, target


@pytest.mark.parametrize("costs", [*COSTS, (5, 3), (1, 7)], ids=str)
@pytest.mark.parametrize("graph", [chain, crowded])
def test_the_kernel_finds_the_same_cover(graph: Any, costs: tuple[int, int]) -> None:
    """Of several cheapest ones, too: the files of a partition don't depend on the compiler."""
    for length in (2, 7, 300, 3000):
        ends = *graph(length), length, length + 1
        plain, kernel = (minimum_cover(*ends, *costs, native=native) for native in (False, True))
        assert torch.equal(plain.pulled, kernel.pulled)
        assert torch.equal(plain.pushed, kernel.pushed)
        assert plain.bound == kernel.bound == kernel.cost(*costs)


def test_the_kernel_refuses_what_would_be_read_outside() -> None:
    good = torch.tensor([0, 1, 2]), torch.tensor([1, 0], dtype=torch.int32), 2, 1, 1
    call = partial(ops.run, torch.ops.pyg_sar.minimum_cover)
    assert call(*good)[2] == 2
    for error, place, value in (
        (IndexError, 1, torch.tensor([1, 2], dtype=torch.int32)),
        (IndexError, 1, torch.tensor([-1, 0], dtype=torch.int32)),
        (TypeError, 1, torch.tensor([1, 0])),
        (TypeError, 0, torch.tensor([0, 1, 2], dtype=torch.int32)),
        (ValueError, 0, torch.tensor([0, 2, 1])),
        (ValueError, 0, torch.tensor([0, 3, 2])),
        (ValueError, 0, torch.tensor([], dtype=torch.long)),
        (ValueError, 2, 2**31),
        (ValueError, 3, 0),
        (ValueError, 4, 2**16),
    ):
        given = [*good]
        given[place] = value
        with pytest.raises(error, match="minimum_cover: expected"):
            call(*given)


@pytest.mark.parametrize("push", [0, 2**16])
def test_costs_are_in_range(push: int) -> None:
    with pytest.raises(ValueError, match=f"push={push}"):
        minimum_cover(torch.tensor([0]), torch.tensor([0]), 1, 1, 1, push)


# Exactness ###################################################################


@pytest.mark.parametrize("world", [3, 5])
def test_layers_equal_pyg(world: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    partitions = Partitions(tmp_path_factory.mktemp("parts"))
    data, sweep = stars(), Sweep(world)
    torch.manual_seed(0)
    for name, (make, edge, constants) in LAYERS.items():
        root = partitions(data, world, "random" if world != 3 else torch.arange(60) % 2 * 2)
        sweep.add(name, Job(make().double(), root, edge, POLICIES, constants), data)
    sweep.check(network=True)


# Rows ########################################################################


def _rows(root: Path, policy: SARPolicy) -> dict[str, int]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT, project=False).double(), policy)
    x = data.x.requires_grad_()
    layer(x, data.edge_index).sum().backward()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        layer(x, data.edge_index).sum().backward()
    size = OUT * 8  # narrower than CHANNELS: rows are mapped first
    kinds = ("fetch", "refetch", "gradient")
    return {kind: ledger.received_bytes(kind=kind) // size for kind in kinds}


def _bound(data: Data, assignment: Tensor, world: int) -> int:
    """The sum of the largest matchings, by what the tests say and not the plan."""
    total = 0
    owner_j, owner_i = assignment[data.edge_index]
    for q, p in itertools.permutations(range(world), 2):
        j, i = data.edge_index[:, (owner_j == q) & (owner_i == p)]
        total += minimum_cover(j, i, data.num_nodes, data.num_nodes).bound
    return total


def test_as_many_rows_as_the_matching_says(tmp_path: Path) -> None:
    data, world = stars(), 3
    assignment = torch.randint(world, (60,), generator=torch.Generator().manual_seed(1))
    pyg_sar.write_partitions(data, world, tmp_path / "parts", assignment)
    bound = _bound(data, assignment, world)

    def rows(push: Literal["auto", "off"]) -> list[dict[str, int]]:
        return workers(_rows, world, tmp_path / "parts", SARPolicy(prefetch=0, push=push))

    with apart():
        pushed, pulled = rows("auto"), rows("off")
    for kind in ("fetch", "gradient"):
        assert sum(found[kind] for found in pushed) == bound
        assert sum(found[kind] for found in pulled) > bound * 1.2
    assert all(found["refetch"] == 0 for found in pushed)
    # Where rows are read in place they are pulled, and each owner reads the gradients of targets.
    found = rows("auto")
    assert [way["fetch"] for way in found] == [way["fetch"] for way in pulled]
    owner_j, owner_i = assignment[data.edge_index]
    for rank, way in enumerate(found):
        targets = data.edge_index[1, (owner_j == rank) & (owner_i != rank)]
        assert way["gradient"] == targets.unique().numel() > 0 == way["refetch"]


def _found(root: Path, partly: bool) -> tuple[int, int]:
    """Covers that were computed, and rows that were received."""
    data = pyg_sar.load_partition(root)
    some = torch.arange(0, data.num_edges, 2 if partly else 1)
    edge_index = data.edge_index[:, some] if partly else data.edge_index
    policy = SARPolicy()
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT, project=False).double(), policy)
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        layer(data.x, edge_index)
        attention = gnn.GATConv(CHANNELS, OUT).double()
        pyg_sar.distribute(attention, policy)(data.x, edge_index)
    return ledger.events("cover"), ledger.received_bytes(kind="fetch")


def test_covers_come_with_the_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, roots = stars(), (tmp_path / "stored", tmp_path / "bare")
    pyg_sar.write_partitions(data, 3, roots[0], "random")
    monkeypatch.setattr("pyg_sar.exchange.cover.COSTS", ())
    pyg_sar.write_partitions(data, 3, roots[1], "random")
    monkeypatch.undo()
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")
    stored, bare = (workers(_found, 3, root, False) for root in roots)
    assert [made for made, _ in stored] == [0, 0, 0]
    assert [made for made, _ in bare] == [3, 3, 3]  # sums; attention forward, and backward
    assert [received for _, received in stored] == [received for _, received in bare]
    # Of other edges the stored covers may be dear.
    assert sum(made for made, _ in workers(_found, 3, roots[0], True)) > 0


def _made_at_once(root: Path, prefetch: int) -> tuple[int, int, int]:
    """The most pulled rows packed at a time, those of the largest unit, and all."""
    data = pyg_sar.load_partition(root)
    policy = SARPolicy(prefetch=prefetch)
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT, project=False).double(), policy)
    alive, most, pack = [0], [0], HaloSource._pack

    def watched(self: Any, peer: int, dtype: torch.dtype) -> Tensor:
        out = pack(self, peer, dtype)
        if self.plan.rank == pyg_sar.comm.current().rank:
            alive[0] += out.size(0)
            most[0] = max(most[0], alive[0])
            weakref.finalize(out, lambda rows: alive.__setitem__(0, alive[0] - rows), out.size(0))
        return out

    layer(data.x, data.edge_index)
    split = split_edges(data.edge_index.to_local(), SUMS, SUMS)
    assert split is not None
    HaloSource._pack = watched
    try:
        layer(data.x, data.edge_index)
    finally:
        HaloSource._pack = pack
    sent = split.plan.send_counts
    return most[0], max(sent), sum(sent)


def test_messages_are_made_when_it_is_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pyg_sar.write_partitions(stars(), 4, tmp_path / "parts", "random")
    for most, largest, everything in workers(_made_at_once, 4, tmp_path / "parts", 0):
        assert 0 < most <= largest < everything


def _structures(root: Path) -> int:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(gnn.GCNConv(CHANNELS, OUT).double(), SARPolicy())
    layer(data.x, data.edge_index).sum().backward()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        for _ in range(3):
            layer(data.x, data.edge_index).sum().backward()
    return ledger.received_bytes(kind="plan")


def test_the_plan_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")
    pyg_sar.write_partitions(stars(), 3, tmp_path / "parts", "random")
    for numbers in workers(_structures, 3, tmp_path / "parts"):
        assert numbers == 0


# Size ########################################################################


def test_rows_by_the_thousand(tmp_path: Path) -> None:
    """As many as PyTorch's operators have other ways for."""
    draw = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, 60_000, generator=draw) ** 3 * 4000).long()
    data = Data(
        x=torch.randn(4000, 32, generator=draw, dtype=torch.float64),
        edge_index=torch.randperm(4000, generator=draw)[ends],
        train_mask=torch.ones(4000, dtype=torch.bool),
    )
    root, sweep = Partitions(tmp_path)(data, 2, "random"), Sweep(2)
    for layer in (gnn.SAGEConv(32, 8), gnn.GCNConv(32, 8), gnn.GATConv(32, 8, heads=2)):
        sweep.add(type(layer).__name__, Job(layer.double(), root, (), (SARPolicy(),)), data)
    sweep.check(network=True)
    sweep.check(network=False)
