"""Relations between nodes of two types: one plan for the sources, a number of targets besides."""

from __future__ import annotations

import copy

import pytest
import torch
from combinations import some
from oracle import ALL_POLICIES, BUDGET, MODES, assemble, error, node_losses, set_policy, threads
from torch import Tensor
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.utils import degree

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.space.index_space import dist_edge_index

SOURCES, TARGETS, EDGES = 23, 17, 120
WIDE, NARROW, OUT = 6, 4, 5


def relation(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Source and target features and edges, with duplicates and nodes without edges."""
    draw = torch.Generator().manual_seed(seed)
    edges = torch.stack(
        [
            torch.randint(SOURCES - 2, (EDGES,), generator=draw),
            torch.randint(TARGETS - 2, (EDGES,), generator=draw),
        ]
    )
    edges = torch.cat([edges, edges[:, :4]], dim=1)
    x = torch.randn(SOURCES, WIDE, generator=draw, dtype=torch.float64)
    y = torch.randn(TARGETS, NARROW, generator=draw, dtype=torch.float64)
    return x, y, edges


def owners(world: int, kind: str) -> tuple[Tensor, Tensor]:
    """The worker of each source and target node."""
    sources, targets = torch.arange(SOURCES) % world, torch.arange(TARGETS) * world // TARGETS
    if kind == "apart":  # all sources on one worker, all targets on another
        return torch.zeros_like(sources), torch.full_like(targets, world - 1)
    if kind == "empty":  # the last worker has nothing
        return sources % max(world - 1, 1), targets.clamp(max=max(world - 2, 0))
    return sources, targets


def my_relation(edges: Tensor, sources: Tensor, targets: Tensor):
    """This worker's edges, and global ids of its source and target nodes and edges."""
    comm = pyg_sar.comm.current()
    rank, world = comm.rank, comm.world_size

    def needs(p: int) -> list[Tensor]:
        wanted = edges[0][targets[edges[1]] == p].unique()
        return [wanted[(sources[wanted] == q) & (q != p)] for q in range(world)]

    mine = (sources == rank).nonzero().view(-1)
    own = (targets == rank).nonzero().view(-1)
    halo = needs(rank)
    place = torch.full((SOURCES,), -1)
    place[mine] = torch.arange(mine.numel())
    sends = [place[needs(p)[rank]] for p in range(world)]
    plan = HaloPlan(
        comm,
        mine.numel(),
        [ids.numel() for ids in halo],
        torch.cat(sends),
        [rows.numel() for rows in sends],
    )
    place[torch.cat(halo)] = mine.numel() + torch.arange(plan.num_halo)
    e_id = (targets[edges[1]] == rank).nonzero().view(-1)
    row, column = edges[:, e_id]
    local = torch.stack([place[row], torch.searchsorted(own, column)])
    return dist_edge_index(local, plan, targets=own.numel()), mine, own, e_id


class Flipped(torch.nn.Module):
    """Sources hear of targets: the layer aggregates where the edges' sources are."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index):
        return self.layer((x[1], x[0]), edge_index.flip(0))


class MedianConv(MessagePassing):
    """An aggregation whose partial states don't merge."""

    def __init__(self):
        super().__init__(aggr="median")
        self.lin = torch.nn.Linear(WIDE, OUT)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=(self.lin(x[0]), x[1])) + x[1].sum(1, keepdim=True)

    def message(self, x_j):
        return x_j.tanh()


def layers() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    both = (WIDE, NARROW)
    found = {
        "sage": SAGEConv(both, OUT),
        "sage max": SAGEConv(both, OUT, aggr="max"),
        "graph": GraphConv(both, OUT),
        "gat": GATConv(both, OUT, heads=2, add_self_loops=False),
        "gatv2": GATv2Conv(both, OUT, heads=2, add_self_loops=False),
        "transformer": TransformerConv(both, OUT, heads=2),
        "median": MedianConv(),
        "flipped": Flipped(SAGEConv(both[::-1], OUT)),
        "flipped attention": Flipped(GATConv(both[::-1], OUT, add_self_loops=False)),
    }
    return {name: layer.double() for name, layer in found.items()}


def run(layer, x, y, edges, mean):
    layer.zero_grad()
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = layer((x, y), edges)
    return out, x, y


def on_worker(jobs, policies, kind):
    x, y, edges = relation()
    world = pyg_sar.comm.current().world_size
    local, mine, own, _ = my_relation(edges, *owners(world, kind))
    found = {}
    for name, plain in jobs.items():
        layer = pyg_sar.distribute(copy.deepcopy(plain), view="local")
        for k, policy in enumerate(policies):
            set_policy(layer, policy)
            out, a, b = run(layer, x[mine], y[own], local, None)
            ids = mine if name.startswith("flipped") else own
            pyg_sar.mean(node_losses(out, ids)).backward()
            grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
            found[name, k] = mine, own, out.detach(), a.grad, b.grad, grads
    return found


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "mixed"), (2, "apart"), (3, "mixed"), (3, "empty"), (5, "mixed"), (5, "apart")],
)
def test_bipartite_layers_equal_one_process(world, kind):
    policies = ALL_POLICIES if (world, kind) == (3, "mixed") else MODES
    x, y, edges = relation()
    jobs = layers()
    jobs = {name: jobs[name] for name in some(list(jobs), f"{world} {kind}", 3)}
    workers = threads(on_worker, world, jobs, policies, kind)
    for name, layer in jobs.items():
        out, a, b = run(layer, x, y, edges, None)
        flipped = name.startswith("flipped")
        node_losses(out, torch.arange(out.size(0))).mean().backward()
        for k in range(len(policies)):
            rows = [worker[name, k] for worker in workers]
            where = f"{name}, {world} workers, {kind}, {policies[k]}"
            for place, ids, expected, count in (
                (2, 0, out, SOURCES) if flipped else (2, 1, out, TARGETS),
                (3, 0, a.grad, SOURCES),
                (4, 1, b.grad, TARGETS),
            ):
                whole = assemble(((row[ids], row[place]) for row in rows), count)
                if expected is None or whole is None:
                    assert whole is None and expected is None, where
                else:
                    assert error(whole, expected) <= 1e-10, (where, place)
            largest = max(float(p.grad.abs().max()) for p in layer.parameters())
            for row in rows:
                for n, p in layer.named_parameters():
                    assert error(row[5].get(n), p.grad, largest) <= 1e-10, (where, n)


def looked_at():
    x, y, edges = relation()
    local, mine, own, e_id = my_relation(edges, *owners(3, "mixed"))
    found = {"derived": [], "errors": []}
    keep = torch.arange(local.size(1)) % 2 == 0
    flipped = local.flip(0)
    stacked = torch.stack([local[0], local[1]])
    for derived in (
        local[:, keep],
        flipped,
        stacked,
        local.clone(),
        local.index_select(1, e_id[:0]),
    ):
        found["derived"].append((derived.num_targets, derived.bipartite))
    found["max"] = int(local.max()), int(local[0].max())
    found["counts"] = degree(local[0], mine.numel()), degree(local[1], own.numel())
    found["ids"], found["own"] = mine, own
    loops = torch.arange(3).expand(2, -1)
    cases = (
        lambda: torch.cat([local, loops], dim=1),
        lambda: local[0] != local[1],
        lambda: pyg_sar.distribute(SAGEConv((WIDE, NARROW), 2).double(), view="local")(
            (x[own], y[own]), local
        ),
        lambda: pyg_sar.distribute(SAGEConv((WIDE, NARROW), 2).double(), view="local")(
            (x[mine], y[own]), local, size=(mine.numel() + 1, own.numel())
        ),
    )
    for case in cases:
        try:
            case()
        except (DistributedIndexError, ValueError) as problem:
            found["errors"].append(f"{type(problem).__name__}: {problem}")
    return found


def test_derived_edges_keep_the_targets_and_node_types_are_not_mixed_up():
    _, _, edges = relation()
    workers = threads(looked_at, 3)
    for place, ids, count in ((0, "ids", SOURCES), (1, "own", TARGETS)):
        whole = assemble(((w[ids], w["counts"][place]) for w in workers), count)
        assert torch.equal(whole, degree(edges[place], count))
    for worker in workers:
        mine, own = worker["ids"].numel(), worker["own"].numel()
        assert worker["derived"] == [(own, True)] * 5
        assert worker["max"] == (max(mine, own) - 1, mine - 1)
        loops, compare, rows, size = worker["errors"]
        assert "add_self_loops=False" in loops and "two types" in loops
        assert "add_self_loops=False" in compare
        assert "'x'" in rows and str(mine) in rows
        assert f"size=({mine + 1}, {own})" in size


def bytes_of(policy):
    x, y, edges = relation()
    local, mine, own, _ = my_relation(edges, *owners(3, "mixed"))
    layer = pyg_sar.distribute(
        SAGEConv((WIDE, NARROW), OUT, aggr="max").double(), policy, view="local"
    )
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        out, *_ = run(layer, x[mine], y[own], local, None)
        pyg_sar.mean(node_losses(out, own)).backward()
    received = ledger.received_bytes(kind="fetch"), ledger.received_bytes(kind="refetch")
    return received, local.plan.num_halo


def test_only_source_rows_travel():
    for got, halo in threads(bytes_of, 3, SARPolicy(mode=1, message_budget=BUDGET)):
        assert got == (halo * WIDE * 8, halo * WIDE * 8)


def test_targets_without_rows():
    """``(x, None)`` targets: rows per target come from the relation, not from the sources."""
    x, _, edges = relation()
    layer = GINConv(torch.nn.Linear(WIDE, OUT)).double()

    def worker():
        local, mine, own, _ = my_relation(edges, *owners(2, "mixed"))
        return own, pyg_sar.distribute(copy.deepcopy(layer), view="local")(
            (x[mine], None), local
        ).detach()

    expected = layer((x, None), edges, size=(SOURCES, TARGETS))
    assert error(assemble(threads(worker, 2), TARGETS), expected) <= 1e-10
