"""Relations between nodes of two types: one plan for the sources, a number of targets besides."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from combinations import some
from oracle import (
    ALL_POLICIES,
    BUDGET,
    MODES,
    both,
    error,
    make_graph,
    node_losses,
    parts,
    set_policy,
    whole,
    workers,
)
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GINConv,
    GraphConv,
    HypergraphConv,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.utils import degree

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import DistributedIndexError

SOURCES, TARGETS, EDGES = 23, 17, 120
WIDE, NARROW, OUT = 6, 4, 5


def relation(seed: int = 0) -> HeteroData:
    """Source and target features and edges, with duplicates and nodes without edges."""
    draw = torch.Generator().manual_seed(seed)
    edges = torch.stack(
        [
            torch.randint(SOURCES - 2, (EDGES,), generator=draw),
            torch.randint(TARGETS - 2, (EDGES,), generator=draw),
        ]
    )
    data = HeteroData()
    data["a"].x = torch.randn(SOURCES, WIDE, generator=draw, dtype=torch.float64)
    data["b"].x = torch.randn(TARGETS, NARROW, generator=draw, dtype=torch.float64)
    data["a", "to", "b"].edge_index = torch.cat([edges, edges[:, :4]], dim=1)
    return data


def owners(world: int, kind: str) -> dict[str, Tensor]:
    """The worker of each source and target node."""
    sources, targets = torch.arange(SOURCES) % world, torch.arange(TARGETS) * world // TARGETS
    if kind == "apart":  # all sources on one worker, all targets on another
        sources, targets = torch.zeros_like(sources), torch.full_like(targets, world - 1)
    if kind == "empty":  # the last worker has nothing
        sources, targets = sources % max(world - 1, 1), targets.clamp(max=max(world - 2, 0))
    return {"a": sources, "b": targets}


def written(root: Path, world: int, kind: str = "mixed") -> HeteroData:
    data = relation()
    pyg_sar.write_partitions(data, world, root, owners(world, kind))
    return data


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


def run(layer, data):
    """Outputs, and gradients of the features and parameters."""
    layer.zero_grad()
    x, y = (data[name].x.clone().requires_grad_() for name in "ab")
    out = layer((x, y), data["a", "to", "b"].edge_index)
    node_losses(out).mean().backward()
    grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    return [whole(out.detach()), whole(x.grad), whole(y.grad)], grads


def on_worker(jobs, policies, root):
    data, found = pyg_sar.load_partition(root), {}
    for name, plain in jobs.items():
        layer = pyg_sar.distribute(copy.deepcopy(plain))
        for policy in policies[name]:
            set_policy(layer, policy)
            found[name, policy] = run(layer, data)
    return found


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "mixed"), (2, "apart"), (3, "mixed"), (3, "empty"), (5, "mixed")],
)
def test_bipartite_layers_equal_one_process(world, kind, tmp_path):
    given = ALL_POLICIES if (world, kind) == (3, "mixed") else MODES
    data, jobs = written(tmp_path / "parts", world, kind), layers()
    jobs = {name: jobs[name] for name in some(list(jobs), f"{world} {kind}", 3)}
    policies = {name: some(given, f"{name} {world} {kind}", 2) for name in jobs}
    every = workers(on_worker, world, jobs, policies, tmp_path / "parts")
    for name, layer in jobs.items():
        expected, gradients = run(layer, data)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for policy in policies[name]:
            where = f"{name}, {world} workers, {kind}, {policy}"
            for rows, found in (worker[name, policy] for worker in every):
                for got, right in zip(rows, expected, strict=True):
                    assert error(got, right) <= 1e-10, where
                assert found.keys() == gradients.keys(), where
                for n, gradient in gradients.items():
                    assert error(found[n], gradient, largest) <= 1e-10, (where, n)


def looked_at(root):
    """What a layer meets beneath: this worker's edges between nodes of two types."""
    data = pyg_sar.load_partition(root)
    rows = {name: data[name].x.rows.ids for name in "ab"}
    x, y = (data[name].x for name in "ab")
    edges = data["a", "to", "b"].edge_index
    local, sources, targets = edges.to_local(), len(rows["a"]), len(rows["b"])
    keep = torch.arange(local.size(1)) % 2 == 0
    for derived in (
        local[:, keep],
        local.flip(0),
        local.clone(),
        local.index_select(1, torch.arange(0)),
    ):
        assert (derived.num_targets, derived.bipartite) == (targets, True)
    assert (int(local.max()), int(local[0].max())) == (max(sources, targets) - 1, sources - 1)
    for place, name in enumerate("ab"):
        right = degree(relation()["a", "to", "b"].edge_index[place], (SOURCES, TARGETS)[place])
        assert torch.equal(degree(local[place], len(rows[name])), right[rows[name]])
        assert torch.equal(degree(edges[place], len(right)), right)
    layer = pyg_sar.distribute(SAGEConv((WIDE, NARROW), 2).double())
    gat = pyg_sar.distribute(GATConv((WIDE, NARROW), 2).double())
    found = []
    for case in (
        lambda: torch.cat([local, torch.arange(3).expand(2, -1)], dim=1),
        lambda: local[0] != local[1],
        lambda: gat((x, y), edges),
        lambda: layer((y[:, :1].expand(-1, WIDE), y), edges),
        lambda: layer((x, y), edges, size=(SOURCES + 1, TARGETS)),
    ):
        with pytest.raises((DistributedIndexError, ValueError)) as caught:
            case()
        found.append(str(caught.value))
    return found


def test_derived_edges_keep_the_targets_and_node_types_are_not_mixed_up(tmp_path):
    written(tmp_path / "parts", 3)
    for loops, compare, attention, rows, size in workers(looked_at, 3, tmp_path / "parts"):
        assert "add_self_loops=False" in loops and "two types" in loops
        assert "add_self_loops=False" in compare and "add_self_loops=False" in attention
        assert "to hold the" in rows and "with a row for each" in rows
        assert f"size=({SOURCES + 1}, " in size


def bytes_of(policy, root):
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(SAGEConv((WIDE, NARROW), OUT, aggr="max").double(), policy)
    x, y = (data[name].x.clone().requires_grad_() for name in "ab")
    edges = data["a", "to", "b"].edge_index
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        node_losses(layer((x, y), edges)).mean().backward()
    received = ledger.received_bytes(kind="fetch"), ledger.received_bytes(kind="refetch")
    return received, edges.to_local().plan.num_halo


def test_only_source_rows_travel(tmp_path):
    written(tmp_path / "parts", 3)
    policy = SARPolicy(mode=1, message_budget=BUDGET)
    for got, halo in workers(bytes_of, 3, policy, tmp_path / "parts"):
        assert got == (halo * WIDE * 8, halo * WIDE * 8)


def test_targets_without_rows(tmp_path):
    """``(x, None)`` targets: rows per target come from the relation, not from the sources."""
    whole_data = written(tmp_path / "parts", 2)
    layer = GINConv(torch.nn.Linear(WIDE, OUT)).double()

    def run(layer, data, **size):
        return layer((data["a"].x, None), data["a", "to", "b"].edge_index, **size).detach()

    def worker():
        data = pyg_sar.load_partition(tmp_path / "parts")
        return run(pyg_sar.distribute(copy.deepcopy(layer)), data).full_tensor()

    expected = run(layer, whole_data, size=(SOURCES, TARGETS))
    for found in workers(worker, 2):
        assert error(found, expected) <= 1e-10


class Sources(MessagePassing):
    """A layer whose message reads nothing of the targets."""

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def _some_targets(root: Path) -> list[str]:
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, OUT)
    layers = [SAGEConv(6, OUT), GATConv((6, 6), OUT, add_self_loops=False), GINConv(linear)]
    layers += [GraphConv((6, 6), OUT), TransformerConv((6, 6), OUT), Sources()]
    x, texts = data.x, []
    edges = data.edge_index[:, data.edge_index[1] < 10]
    for layer in (pyg_sar.distribute(layer.double()) for layer in layers):
        out = whole(layer((x, x), edges)[:10])
        for few in (x[:10], x[:1], torch.ones(10, 6, dtype=x.dtype)):
            with pytest.raises(ValueError, match="to hold the .* of rank") as caught:
                layer((x, few), edges)
            texts.append(str(caught.value))
        assert torch.equal(whole(layer((x, x), edges)[:10]), out)
    return texts


def test_the_first_targets_alone_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """PyG's output then has the rows of these alone, even where the message reads none of them."""
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")
    for texts in parts(_some_targets, 2, tmp_path / "parts"):
        assert len(texts) == 18 and all("layer((h, h), edge_index)[:k]" in text for text in texts)


# Hypergraphs ##################################################################

ATTENTION = {"use_attention": True, "heads": 2}
HYPERGRAPHS: dict[str, dict[str, object]] = {
    "plain": {},
    "by node": {**ATTENTION, "attention_mode": "node"},
    "by hyperedge": {**ATTENTION, "attention_mode": "edge", "concat": False},
}


def hypergraph() -> HeteroData:
    """Hyperedges as nodes of a type, of which the last ones hold nothing, as in ``relation``."""
    data = relation()
    data["b"].x = torch.randn(TARGETS, WIDE, dtype=torch.float64)
    data["b"].weight = torch.rand(TARGETS, dtype=torch.float64) + 0.5
    return data


def of_hypergraph(data: HeteroData, distributed: bool) -> list[Tensor]:
    """Two layers of each kind: outputs and all gradients."""
    found = []
    for options in HYPERGRAPHS.values():
        torch.manual_seed(0)
        layer = HypergraphConv(WIDE, OUT, **options).double()
        layer = pyg_sar.distribute(layer) if distributed else layer
        x = data["a"].x.clone().requires_grad_()
        rows = data["b"].x.clone().requires_grad_()
        weight = data["b"].weight.clone().requires_grad_()
        edges = data["a", "to", "b"].edge_index
        attr = rows if options else None
        out = layer(x, edges, weight, attr)
        numbered = layer(x, edges, hyperedge_attr=attr, num_edges=data["b"].num_nodes)
        (out.sin().sum() + numbered.cos().sum()).backward()
        grads = [t.grad for t in (x, weight, *([rows] if options else []))]
        found += [whole(t).detach() for t in (out, numbered, *grads)]
        found += [p.grad for p in layer.parameters()]
    return found


def _of_hypergraph(root: Path) -> list[Tensor]:
    return of_hypergraph(pyg_sar.load_partition(root), True)


def test_hyperedges_are_nodes_of_a_type(tmp_path: Path) -> None:
    torch.manual_seed(1)
    data = hypergraph()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts")
    expected = of_hypergraph(data, False)
    for found in both(_of_hypergraph, 3, tmp_path / "parts"):
        wrong = [error(*pair) for pair in zip(found, expected, strict=True)]
        assert max(wrong) < 1e-10, wrong


def of_few_hyperedges(data: Data, distributed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    layer = HypergraphConv(WIDE, OUT).double()
    layer = pyg_sar.distribute(layer) if distributed else layer
    x = data.x.clone().requires_grad_()
    out = layer(x, data.edge_index)
    out.sin().sum().backward()
    return [whole(out).detach(), whole(x.grad)]


def _of_few_hyperedges(root: Path) -> list[Tensor]:
    return of_few_hyperedges(pyg_sar.load_partition(root), True)


@pytest.mark.parametrize("members", [[], [4, 2, 7, 2], list(range(SOURCES))])
def test_hyperedges_without_members_or_with_one(members: list[int], tmp_path: Path) -> None:
    """As many as the edges, or as the nodes: which rows PyG's own numbers have, their use tells."""
    x = torch.randn(SOURCES, WIDE, dtype=torch.float64)
    edges = torch.tensor([members, [*range(len(members))]], dtype=torch.long)
    data = Data(x, edges)
    pyg_sar.write_partitions(data, 2, tmp_path / "parts")
    expected = of_few_hyperedges(data, False)
    for found in both(_of_few_hyperedges, 2, tmp_path / "parts"):
        wrong = [error(*pair) for pair in zip(found, expected, strict=True)]
        assert max(wrong) < 1e-10, wrong
