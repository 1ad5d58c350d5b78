"""Backward passes by the sources' workers, where these read each other's memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    CHANNELS,
    OUT,
    Job,
    Partitions,
    Sweep,
    error,
    one_pass,
    probe,
    single_process,
    whole,
    workers,
)
from test_pushed import stars
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.exchange.halo_rows import HaloSink
from pyg_sar.ledger import HALO_KINDS

POLICIES = (
    SARPolicy(prefetch=0),
    SARPolicy(prefetch=1),
    SARPolicy(mode=2, prefetch=1),
)
HEADS = 2

# name: layer, whether its edges have weights
SUMS: dict[str, tuple[Callable[[], torch.nn.Module], bool]] = {
    "sage": (lambda: gnn.SAGEConv(CHANNELS, OUT), False),
    "sage, sum": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="sum"), False),
    "gin": (lambda: gnn.GINConv(torch.nn.Linear(CHANNELS, OUT)), False),
    "gcn": (lambda: gnn.GCNConv(CHANNELS, OUT), False),
    "gcn, weights": (lambda: gnn.GCNConv(CHANNELS, OUT), True),
    "graph conv": (lambda: gnn.GraphConv(CHANNELS, OUT), True),
    "graph conv, mean": (lambda: gnn.GraphConv(CHANNELS, OUT, aggr="mean"), True),
    "tag": (lambda: gnn.TAGConv(CHANNELS, OUT, K=2), True),
    "sources and targets": (
        lambda: gnn.SAGEConv((CHANNELS, CHANNELS), OUT, flow="target_to_source"),
        False,
    ),
}
ATTENTION: dict[str, Callable[[], torch.nn.Module]] = {
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=HEADS, add_self_loops=False),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=HEADS, add_self_loops=False),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=HEADS),
}


def several(data: Data) -> Data:
    """Some edges twice, and a node without any."""
    more = data.edge_index[:, ::7]
    data.edge_index = torch.cat([data.edge_index, more], 1)
    data.edge_weight = torch.cat([data.edge_weight, data.edge_weight[::7] + 1])
    return data


@pytest.mark.parametrize("world", [2, 5])
def test_gradients_equal_pyg(world: int, tmp_path: Path) -> None:
    data, sweep = several(stars()), Sweep(world)
    part = torch.arange(60) * 7 % world
    part[part == 1] = 0 if world == 5 else 1  # one of five workers has no node
    root = Partitions(tmp_path)(data, world, part)
    torch.manual_seed(0)
    for name, (make, weighted) in SUMS.items():
        constants = ("edge_weight",) if weighted else ()
        sweep.add(name, Job(make().double(), root, (), POLICIES, constants), data)
    for name, layer in ATTENTION.items():
        sweep.add(name, Job(layer().double(), root, (), POLICIES), data)
    sweep.check(network=False)


def _changing(root: Path, layer: torch.nn.Module) -> list[Tensor | None]:
    data, found = pyg_sar.load_partition(root), []
    layer = pyg_sar.distribute(copy.deepcopy(layer))
    weight = data.edge_weight.clone()
    for step in range(4):
        if step == 1:
            weight *= torch.arange(1, data.num_edges + 1).sqrt()  # the same tensor
        if step == 2:
            weight = weight + 1
        data.edge_weight = weight
        found.append(one_pass(layer, data, (), ("edge_weight",)).x_grad)
    return found


def test_weights_that_change(tmp_path: Path) -> None:
    """New ones, and the same tensor written into, are sent again."""
    data = several(stars())
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    torch.manual_seed(0)
    layer = gnn.GraphConv(CHANNELS, OUT).double()
    changed = data.edge_weight * torch.arange(1, data.num_edges + 1).sqrt()
    expected = []
    for weight in (data.edge_weight, changed, changed + 1, changed + 1):
        given = data.clone()
        given.edge_weight = weight
        expected.append(single_process(layer, given, (), ("edge_weight",)).x_grad)
    for gradients in workers(_changing, 3, tmp_path / "parts", layer):
        assert max(map(error, gradients, expected)) < 1e-10


# What travels ################################################################


def _rows(root: Path, layer: torch.nn.Module, policy: SARPolicy, weighted: bool) -> Any:
    """Bytes by phase and kind of a second epoch, units whose gradients go back; rows of the halo.

    And rows that others need of this worker.
    """
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(copy.deepcopy(layer), policy)
    x = data.x.requires_grad_()
    arguments = (x, data.edge_index, data.edge_weight) if weighted else (x, data.edge_index)
    layer(*arguments).to_local().sum().backward()
    started, start = [0], HaloSink.open

    def counted(self: HaloSink, unit: int) -> list[Tensor]:
        started[0] += unit > 0 and self.plan.rank == pyg_sar.comm.current().rank
        return start(self, unit)

    HaloSink.open = counted
    try:
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            layer(*arguments).to_local().square().sum().backward()
    finally:
        HaloSink.open = start
    found = {
        (phase, kind): ledger.received_bytes(phase=phase, kind=kind)
        for phase in ("forward", "backward")
        for kind in HALO_KINDS
    }
    assert ledger.received_bytes(kind="plan") == ledger.resident_rows() == 0
    plan = data.edge_index.to_local().plan
    rows = {key: n for key, n in found.items() if n}
    return rows, started[0], plan.num_halo, sum(plan.send_counts)


def _targets(data: Data, part: Tensor, rank: int, out: bool) -> int:
    """Pairs of a target and another worker that has sources of it.

    Of those this worker has the sources (``out``), or the targets.
    """
    owner_j, owner_i = part[data.edge_index]
    mine, other = (owner_j, owner_i) if out else (owner_i, owner_j)
    cut = (mine == rank) & (other != rank)
    workers = owner_j[cut]
    return int(torch.stack([data.edge_index[1, cut], workers]).unique(dim=1).size(1))


@pytest.mark.parametrize("name", ["sage", "graph conv"])
def test_owners_read_gradients_of_targets(name: str, tmp_path: Path) -> None:
    """A row for each target of a peer, and no worker writes rows for another."""
    data, part = several(stars()), torch.randint(3, (60,))
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", part)
    make, weighted = SUMS[name]
    layer, size = make().double(), OUT * 8  # narrower than CHANNELS: rows are mapped first
    way = SARPolicy(prefetch=0)
    found_by = workers(_rows, 3, tmp_path / "parts", layer, way, weighted)
    for rank, (found, started, halo, _) in enumerate(found_by):
        asked = _targets(data, part, rank, out=True)
        assert found == {("forward", "fetch"): halo * size, ("backward", "gradient"): asked * size}
        assert started == 0
    off = workers(_rows, 3, tmp_path / "parts", layer, SARPolicy(prefetch=0, push="off"), weighted)
    for found, started, halo, _ in off:
        assert found["forward", "fetch"] == halo * size
        assert started > 0


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_fetches_nothing_again(name: str, tmp_path: Path) -> None:
    """What is known of a target comes to its sources, and the gradient of its query goes back.

    With wide queries, whose gradients would be as many numbers, rows of sources come again.
    """
    data, part = several(stars()), torch.randint(3, (60,))
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", part)
    row = HEADS * OUT
    source = {"gat": row + HEADS, "gatv2": row, "transformer": 2 * row}[name]
    layer = ATTENTION[name]().double()
    found_by = workers(_rows, 3, tmp_path / "parts", layer, SARPolicy(prefetch=0), False)
    for rank, (found, _, halo, given) in enumerate(found_by):
        asked, told = (_targets(data, part, rank, out=out) for out in (True, False))
        law = {("forward", "fetch"): halo * source}
        if name == "gat":
            law["backward", "query"] = asked * (row + 4 * HEADS)
            law["backward", "gradient"] = told * HEADS
        else:
            law["backward", "refetch"] = halo * source
            law["backward", "gradient"] = given * source
        assert found == {key: 8 * n for key, n in law.items()}


def _without_gradients(root: Path) -> tuple[int, int]:
    """Bytes of plans that inference takes, and of a training step after it."""
    data = pyg_sar.load_partition(root)
    layers = [
        pyg_sar.distribute(ATTENTION["gat"]().double()),
        pyg_sar.distribute(SUMS["gin"][0]()),
    ]
    x, found = data.x, []
    layers[1] = layers[1].double()
    for grad in (False, True):
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger, torch.set_grad_enabled(grad):
            for layer in layers:
                layer(x.requires_grad_(grad), data.edge_index)
        found.append(ledger.received_bytes(kind="plan"))
    return found[0], found[1]


def test_inference_makes_nothing_for_backward_passes(tmp_path: Path) -> None:
    data = stars()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    for first, then in workers(_without_gradients, 3, tmp_path / "parts"):
        assert then > 2 * first  # edges by their sources' workers


DTYPES = {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def _dtypes(root: Path) -> list[list[tuple[Tensor, Tensor]]]:
    """Outputs and gradients of two layers, in each dtype."""
    found = []
    for make in (SUMS["sage"][0], ATTENTION["gat"]):
        found.append([])
        for dtype in DTYPES:
            data = pyg_sar.load_partition(root)
            torch.manual_seed(0)
            layer = pyg_sar.distribute(make().to(dtype))
            x = data.x.to(dtype).requires_grad_()
            out = layer(x, data.edge_index)
            (out * probe(torch.arange(data.num_nodes), out)).sum().backward()
            found[-1].append((whole(out.detach()), whole(x.grad)))
    return found


def test_other_dtypes(tmp_path: Path) -> None:
    pyg_sar.write_partitions(stars(), 3, tmp_path / "parts", "random")
    for layers in workers(_dtypes, 3, tmp_path / "parts"):
        for exact, *others in layers:
            for (dtype, most), found in zip([*DTYPES.items()][1:], others, strict=True):
                for one, right in zip(found, exact, strict=True):
                    assert one.dtype == dtype
                    assert error(one.double(), right, float(right.abs().max())) < most
