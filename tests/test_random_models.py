"""Random layers on random graphs and partitions: what one process says, or refused by name.

A few dozen draws in the ordinary run, the same ones every time; a thousand new ones with
``make test-random`` (``--hypothesis-profile thousand``).
"""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverage_case import Case, dressed
from coverage_judge import exact_errors
from coverage_modules import TABLES
from coverage_run import Pass, build, one_pass
from hosted_workers import host
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from oracle import error, make_graph, node_losses, whole, workers
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    HANConv,
    HeteroConv,
    HGTConv,
    ResGatedGraphConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.transforms import ToUndirected

import pyg_sar
from pyg_sar import SARPolicy

TOLERANCE = 1e-8  # some draws are badly conditioned: a variance of two nearly equal numbers
LEAST = 1e-3  # gradients are of the order of 1; those that cancel are rounding noise
ORDINARY = 15
LAYERS = {
    f"{name}, {option}": case
    for kind in ("conv", "aggr", "norm")
    for name, options in TABLES[kind][1].items()
    for option, case in options.items()
    if not (case.refused or case.unavailable or case.no_layer or case.default_double)
    and case.graph in ("random", "sorted")
}
POLICIES = st.builds(
    SARPolicy,
    mode=st.sampled_from([1, 1, 2, 3]),
    prefetch=st.integers(0, 1),
    message_budget=st.sampled_from([None, 1, 300, 2000]),
    strategy=st.sampled_from(["auto", "auto", "chunked"]),
)


@st.composite
def graphs(draw: st.DrawFn) -> Data:
    """Directed, with or without isolated nodes, loops and duplicates; or hardly any edges."""
    nodes, edges = draw(st.integers(1, 30)), draw(st.integers(0, 90))
    data = make_graph(nodes, edges, draw(st.integers(0, 10_000)))
    keep = torch.ones(data.num_edges, dtype=torch.bool)
    source, target = data.edge_index
    if not draw(st.booleans()):
        keep &= source != target
    if draw(st.booleans()):
        keep &= target >= draw(st.integers(0, nodes))
    data = data.edge_subgraph(keep)
    data.num_nodes = nodes
    return dressed(data, torch.Generator().manual_seed(draw(st.integers(0, 100))))


@st.composite
def parts(draw: st.DrawFn, nodes: int, world: int) -> Tensor:
    """Any assignment, also one that leaves parts empty."""
    used = draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    seed = draw(st.integers(0, 10_000))
    pick = torch.randint(len(used), (nodes,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(used)[pick]


def two_passes(case: Case, module: torch.nn.Module, data: Data) -> list[Pass]:
    """From the same parameters; the second with everything that the first has kept."""
    start = copy.deepcopy(module.state_dict())
    first = one_pass(case, module, data)
    module.load_state_dict(start)
    return [first, one_pass(case, module, data)]


def worker(root: Path, case: Case, plain: torch.nn.Module, policy: SARPolicy) -> list[Pass]:
    data = pyg_sar.load_partition(root)
    return two_passes(case, pyg_sar.distribute(copy.deepcopy(plain), policy), data)


def is_finite(found: Pass) -> bool:
    tensors = [*found.outs, *found.input_grads.values(), *found.parameter_grads.values()]
    return all(bool(t.isfinite().all()) for t in tensors if t is not None)


def difference(
    case: Case, graph: Data, world: int, part: Tensor, policy: SARPolicy, folder: Path
) -> str | None:
    """What is wrong, or an empty string; ``None`` where there is nothing to compare."""
    if graph.num_nodes == graph.num_edges:  # What rows of attributes are would have to be said.
        return None
    plain = build(case)
    single = copy.deepcopy(plain)
    try:
        expected = two_passes(case, single, graph)
    except (RuntimeError, IndexError, ValueError):
        return None
    if not all(map(is_finite, expected)):
        return None
    root = folder / "parts"
    pyg_sar.write_partitions(graph, world, root, part, overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyg_sar.errors.OneShotWarning)
        start = host if graph.num_nodes % 2 else workers
        everyone = start(worker, world, root, case, plain, policy)
    for step in range(2):
        found = exact_errors([passes[step] for passes in everyone], expected[step], LEAST)
        wrong = {key: value for key, value in found.items() if not value <= TOLERANCE}
        if graph.num_edges == 0:  # one process gives zeros to what its empty messages read
            zeros = {
                k for k, g in expected[step].parameter_grads.items() if g is None or not g.any()
            }
            wrong = {k: v for k, v in wrong.items() if k.split(".grad@")[0] not in zeros}
        if wrong:
            return f"pass {step + 1}: {wrong}"
    return ""


@given(st.data())
@settings(
    max_examples=ORDINARY
    if settings.get_current_profile_name() == "pyg_sar"
    else settings.default.max_examples,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
def test_random_models(tmp_path: Path, data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(LAYERS)), label="layer")
    case, graph = LAYERS[name], data.draw(graphs())
    if case.graph == "sorted":
        graph = graph.sort(sort_by_row=False)
    world = data.draw(st.integers(1, 5), label="workers")
    part = data.draw(parts(graph.num_nodes, world))
    policy = data.draw(POLICIES, label="policy")
    note(f"{graph.num_nodes} nodes, edges {graph.edge_index.tolist()}, parts {part.tolist()}")
    wrong = difference(case, graph, world, part, policy, tmp_path)
    assume(wrong is not None)
    assert not wrong, wrong


# Several types of nodes #######################################################

WIDTH = 4
BOTH = (WIDTH, WIDTH)
BETWEEN: tuple[Any, ...] = (
    lambda: SAGEConv(BOTH, WIDTH),
    lambda: SAGEConv(BOTH, WIDTH, aggr="max", normalize=True),
    lambda: GraphConv(BOTH, WIDTH, aggr="mean"),
    lambda: GATConv(BOTH, WIDTH, edge_dim=2, add_self_loops=False, dropout=0.3),
    lambda: GATv2Conv(BOTH, 2, heads=2, edge_dim=2, add_self_loops=False),
    lambda: TransformerConv(BOTH, WIDTH, edge_dim=2),
    lambda: ResGatedGraphConv(BOTH, WIDTH, edge_dim=2),
    lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
    lambda: EdgeConv(nn.Linear(2 * WIDTH, WIDTH)),
)
WITHIN = (*BETWEEN, lambda: GCNConv(WIDTH, WIDTH), lambda: GATConv(WIDTH, WIDTH, edge_dim=2))


@st.composite
def typed_graphs(draw: st.DrawFn) -> HeteroData:
    """Two to four types, often of as many nodes, some without features; relations of any kind."""
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    data, names = HeteroData(), "abcd"[: draw(st.integers(2, 4))]
    for name in names:
        data[name].num_nodes = draw(st.sampled_from([2, 9, 9, 14]))
    ends = st.tuples(st.sampled_from(names), st.sampled_from(names))
    for k, (source, target) in enumerate(draw(st.lists(ends, min_size=1, max_size=5))):
        store, count = data[source, f"to{k}", target], draw(st.sampled_from([0, 1, 20, 50]))
        sizes = [data[name].num_nodes for name in (source, target)]
        rows = [torch.randint(size, (count,), generator=drawn) for size in sizes]
        store.edge_index = torch.stack(rows)
        store.edge_attr = torch.randn(count, 2, generator=drawn, dtype=torch.float64)
    linked = {end for source, _, target in data.edge_types for end in (source, target)}
    for name in names:  # Whose rows a table without edges has can't be told.
        if name == "a" or name not in linked or draw(st.booleans()):
            shape = data[name].num_nodes, WIDTH
            data[name].x = torch.randn(shape, generator=drawn, dtype=torch.float64)
    return ToUndirected(merge=False)(data) if draw(st.booleans()) else data


class Typed(nn.Module):
    """Tables for types without features; a layer per relation and one of all, with dropout."""

    def __init__(self, data: HeteroData, seed: int) -> None:
        super().__init__()
        pick = random.Random(seed)
        torch.manual_seed(seed)
        bare = [name for name in data.node_types if "x" not in data[name]]
        tables = {name: nn.Embedding(data[name].num_nodes, WIDTH) for name in bare}
        self.tables, kinds = nn.ModuleDict(tables), data.metadata()
        whole = [lambda: HGTConv(WIDTH, WIDTH, kinds), lambda: HANConv(WIDTH, WIDTH, kinds, 2)]
        convs = {k: pick.choice(WITHIN if k[0] == k[2] else BETWEEN)() for k in data.edge_types}
        self.takes = [k for k, conv in convs.items() if getattr(conv, "edge_dim", None)]
        layers = [HeteroConv(convs, pick.choice(["sum", "mean", "max"])), pick.choice(whole)()]
        self.layers = nn.ModuleList(layers[:: pick.choice([1, -1])])

    def forward(self, data: HeteroData) -> dict[str, Tensor]:
        kinds = data.node_types
        x = {n: data[n].x if "x" in data[n] else self.tables[n].weight for n in kinds}
        for layer in self.layers:
            attributes = {"edge_attr_dict": {k: data[k].edge_attr for k in self.takes}}
            more = attributes if isinstance(layer, HeteroConv) else {}
            out = layer(x, data.edge_index_dict, **more)
            new = {n: rows.tanh() + x[n] for n, rows in out.items() if rows is not None}
            x = {n: F.dropout(new[n], 0.2) if n in new else x[n] for n in kinds}
        return x


def typed_steps(model: nn.Module, data: HeteroData) -> list[Tensor]:
    """Rows of all types, and the parameters, after each of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    found: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        out = model(data)
        sum(node_losses(rows).mean() for rows in out.values()).backward()
        optimizer.step()
        found += [whole(rows.detach()).clone() for rows in out.values()]
        found += [whole(p.detach()).clone() for p in model.parameters()]
    return found


def typed_worker(root: Path, plain: HeteroData, seed: int, policy: SARPolicy) -> list[Tensor]:
    data = pyg_sar.load_partition(root)
    return typed_steps(pyg_sar.distribute(Typed(plain, seed).double(), policy), data)


@pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
@given(st.data())
@settings(
    max_examples=6
    if settings.get_current_profile_name() == "pyg_sar"
    else settings.default.max_examples,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_random_models_of_several_types(tmp_path: Path, data: st.DataObject):
    graph, world = data.draw(typed_graphs()), data.draw(st.integers(1, 3), label="workers")
    seed, policy = data.draw(st.integers(0, 10_000)), data.draw(POLICIES, label="policy")
    assignment = {n: data.draw(parts(graph[n].num_nodes, world)) for n in graph.node_types}
    try:
        expected = typed_steps(Typed(graph, seed).double(), graph)
    except (RuntimeError, ValueError):  # Some layers of PyG fail without edges.
        expected = []
    assume(expected)
    pyg_sar.write_partitions(graph, world, tmp_path / "parts", assignment, overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyg_sar.errors.OneShotWarning)
        everyone = workers(typed_worker, world, tmp_path / "parts", graph, seed, policy)
    for found in everyone:
        wrong = [error(a, b, 1.0) for a, b in zip(found, expected, strict=True)]
        assert max(wrong) <= TOLERANCE, (seed, wrong)
