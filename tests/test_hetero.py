"""Layers and models on heterogeneous graphs against PyG in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from combinations import everything, in_turn, some
from hetero_graphs import WIDTHS, make_hetero, random_parts
from oracle import (
    CHANNELS,
    EDGE_DIM,
    MODES,
    both,
    error,
    gradient_scale,
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
    BatchNorm,
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    HANConv,
    HeteroConv,
    HeteroDictLinear,
    HeteroLayerNorm,
    HGTConv,
    MessagePassing,
    RGATConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
    to_hetero,
    to_hetero_with_bases,
)

import pyg_sar

pytestmark = pytest.mark.filterwarnings(
    "ignore:There exist node types", "ignore::pyg_sar.errors.OneShotWarning"
)
OUT = 4
Run = Callable[[torch.nn.Module, HeteroData, dict[str, Tensor]], dict[str, Tensor | None]]

# Models #######################################################################


def relations(make: Callable[[str, str], torch.nn.Module]) -> dict[Any, torch.nn.Module]:
    return {key: make(key[0], key[2]) for key in make_hetero().edge_types}


def bipartite() -> torch.nn.Module:
    kinds = [SAGEConv, GraphConv, GATv2Conv, TransformerConv, GATConv]
    convs = {}
    for k, key in enumerate(make_hetero().edge_types):
        kind = kinds[k % len(kinds)]
        options = {"add_self_loops": False} if kind in (GATConv, GATv2Conv) else {}
        convs[key] = kind((WIDTHS[key[0]], WIDTHS[key[2]]), OUT, **options)
    return HeteroConv(convs, aggr="sum")


class Homogeneous(torch.nn.Module):
    """What ``to_hetero`` takes: two layers with a jump around them."""

    def __init__(self, kind: Any, hidden: int = 4, **options: Any) -> None:
        super().__init__()
        self.one = kind((-1, -1) if kind is not GCNConv else -1, hidden, **options)
        self.two = kind((-1, -1) if kind is not GCNConv else -1, hidden, **options)
        self.skip = torch.nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.one(x, edge_index).relu()
        return self.two(x, edge_index) + self.skip(x)


class Transformer(torch.nn.Module):
    """Two HGT layers, between which features of each type are projected and normalised."""

    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.first = HeteroDictLinear(dict(WIDTHS), 4)
        self.norm = HeteroLayerNorm(4, num_types=len(WIDTHS))
        self.convs = torch.nn.ModuleList([HGTConv(4, 4, metadata, heads=2) for _ in range(2)])

    def forward(self, x: dict[str, Tensor], edges: Any) -> dict[str, Tensor]:
        x = self.first(x)
        for kind, (name, rows) in enumerate(x.items()):
            x[name] = self.norm(rows, torch.full((rows.size(0),), kind))
        for conv in self.convs:
            x = {**x, **conv(x, edges)}
        return x


class Messages(torch.nn.Module):
    """HANConv's message passing for each relation, without its mean over all nodes."""

    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.conv = HANConv(dict(WIDTHS), 4, metadata, heads=2)

    def forward(self, x: dict[str, Tensor], edges: Any) -> dict[str, Tensor]:
        rows = {name: self.conv.proj[name](value).view(-1, 2, 2) for name, value in x.items()}
        out: dict[str, Tensor] = {}
        for key, edge_index in edges.items():
            source, target = rows[key[0]], rows[key[2]]
            alphas = [
                (side * weight["__".join(key)]).sum(-1)
                for side, weight in ((source, self.conv.lin_src), (target, self.conv.lin_dst))
            ]
            found = self.conv.propagate(edge_index, x=(source, target), alpha=tuple(alphas))
            out[key[2]] = out.get(key[2], 0) + found.relu()
        return out


def by_dicts(model: torch.nn.Module, data: HeteroData, x: dict[str, Tensor]) -> Any:
    return model(x, data.edge_index_dict)


def weighted(model: torch.nn.Module, data: HeteroData, x: dict[str, Tensor]) -> Any:
    return model(x, data.edge_index_dict, edge_weight_dict=data.edge_weight_dict)


def attributed(model: torch.nn.Module, data: HeteroData, x: dict[str, Tensor]) -> Any:
    return model(x, data.edge_index_dict, edge_attr_dict=data.edge_attr_dict)


def models() -> dict[str, tuple[torch.nn.Module, Run]]:
    torch.manual_seed(1)
    data = make_hetero()
    known = [name for name in data.node_types if name != "loner"], data.edge_types
    widths = WIDTHS
    found: dict[str, tuple[torch.nn.Module, Run]] = {
        "HeteroConv": (bipartite(), by_dicts),
        "HeteroConv, weights": (
            HeteroConv(relations(lambda a, b: GraphConv((widths[a], widths[b]), OUT)), aggr="mean"),
            weighted,
        ),
        "HeteroConv, attributes": (
            HeteroConv(
                relations(
                    lambda a, b: GATConv(
                        (widths[a], widths[b]), OUT, edge_dim=2, add_self_loops=False
                    )
                ),
                aggr="max",
            ),
            attributed,
        ),
        "HeteroConv, max": (
            HeteroConv(relations(lambda a, b: SAGEConv((widths[a], widths[b]), OUT, aggr="max"))),
            by_dicts,
        ),
        "to_hetero, lazy": (to_hetero(Homogeneous(SAGEConv), known), by_dicts),
        "to_hetero, attention": (
            to_hetero(Homogeneous(GATConv, add_self_loops=False), known),
            by_dicts,
        ),
        "to_hetero_with_bases": (
            to_hetero_with_bases(Homogeneous(SAGEConv), data.metadata(), 3, in_channels={"x": 5}),
            by_dicts,
        ),
        "to_hetero_with_bases, GCN": (
            to_hetero_with_bases(
                Homogeneous(GCNConv, add_self_loops=False), data.metadata(), 2, in_channels={"x": 5}
            ),
            by_dicts,
        ),
        "HGT": (Transformer(data.metadata()), by_dicts),
        "HAN's messages": (Messages(data.metadata()), by_dicts),
    }
    for model, run in found.values():
        model.double()
        with torch.no_grad():
            run(model, data, data.x_dict)
    return found


# Comparing ####################################################################


def passed(model: torch.nn.Module, run: Run, data: HeteroData) -> Any:
    """One pass: outputs, and gradients of the features and parameters."""
    model.zero_grad()
    x = {name: value.clone().requires_grad_() for name, value in data.x_dict.items()}
    out = run(model, data, x)
    sum(node_losses(rows).mean() for rows in out.values() if rows is not None).backward()
    return (
        {name: None if rows is None else whole(rows.detach()) for name, rows in out.items()},
        {name: whole(value.grad) for name, value in x.items()},
        {n: None if p.grad is None else whole(p.grad).clone() for n, p in model.named_parameters()},
    )


def on_worker(policies: Any, tried: dict[str, list[int]], root: Any) -> Any:
    data, found, jobs = pyg_sar.load_partition(root), {}, models()
    for name in tried:
        plain, run = jobs[name]
        model = pyg_sar.distribute(copy.deepcopy(plain))
        for k in tried[name]:
            set_policy(model, policies[k])
            found[name, k] = passed(model, run, data)
    return found


def check(jobs: Any, world: int, policies: Any, root: Any, data: HeteroData) -> None:
    numbers = in_turn([range(len(policies))] * len(jobs), world)
    tried = dict(zip(jobs, numbers, strict=True))
    start = workers if world < 5 or everything() else parts
    every = start(on_worker, world, policies, tried, root)
    for name, (plain, run) in jobs.items():
        expected = passed(plain, run, data)
        scale = gradient_scale(expected[2])
        for k in tried[name]:
            for rank, found in enumerate(every):
                where = f"{name}, rank {rank} of {world}, {policies[k]}"
                for place in (0, 1):
                    assert set(found[name, k][place]) == set(expected[place]), where
                    for kind, right in expected[place].items():
                        assert error(found[name, k][place][kind], right) <= 1e-10, (where, kind)
                for n, gradient in expected[2].items():
                    assert error(found[name, k][2][n], gradient, scale) <= 1e-10, (where, n)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_models_equal_one_process(world, tmp_path):
    data = make_hetero()
    root = tmp_path / "parts"
    pyg_sar.write_partitions(data, world, root, random_parts(data, world))
    jobs = models()
    check({name: jobs[name] for name in some(list(jobs), f"{world}", 3)}, world, MODES, root, data)


# Relations as edge types ######################################################

TYPES, NODES = 3, 40


class ByType(torch.nn.Module):
    """A relational layer on features, or on node ids as features."""

    def __init__(self, conv: torch.nn.Module, ids: bool = False, attr: bool = False) -> None:
        super().__init__()
        self.conv, self.ids, self.attr = conv, ids, attr

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor, attr: Any):
        if self.ids:
            ids = torch.arange(x.size(0))
            return self.conv(ids, edge_index, edge_type) + 0 * x.sum(1, keepdim=True)
        more = {"edge_attr": attr} if self.attr else {}
        return self.conv(x, edge_index, edge_type, **more)


def relational() -> dict[str, torch.nn.Module]:
    torch.manual_seed(2)
    size = (CHANNELS, 6, TYPES)
    found = {
        "RGCN": ByType(RGCNConv(*size)),
        "RGCN, bases": ByType(RGCNConv(*size, num_bases=2)),
        "RGCN, blocks": ByType(RGCNConv(*size, num_blocks=2)),
        "RGCN, max": ByType(RGCNConv(*size, aggr="max")),
        "RGCN, ids": ByType(RGCNConv(NODES, 6, TYPES), ids=True),
        "FastRGCN": ByType(FastRGCNConv(*size)),
        "FastRGCN, bases": ByType(FastRGCNConv(*size, num_bases=2)),
        "FastRGCN, blocks": ByType(FastRGCNConv(*size, num_blocks=2)),
        "RGAT": ByType(RGATConv(*size, heads=2)),
        "RGAT, within": ByType(RGATConv(*size, attention_mechanism="within-relation")),
        "RGAT, bases, attr": ByType(
            RGATConv(*size, num_bases=2, mod="f-scaled", edge_dim=EDGE_DIM), attr=True
        ),
    }
    return {name: model.double() for name, model in found.items()}


def relational_pass(model: Any, data: Data) -> Any:
    model.zero_grad()
    x = data.x.clone().requires_grad_()
    attr = data.edge_attr.clone().requires_grad_()
    out = model(x, data.edge_index, data.edge_type, attr)
    node_losses(out).mean().backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return whole(out.detach()), whole(x.grad), whole(attr.grad), grads


def relational_worker(jobs: Any, root: Any, passes: int = 1) -> Any:
    data, found = pyg_sar.load_partition(root), {}
    for name, plain in jobs.items():
        model = pyg_sar.distribute(copy.deepcopy(plain))
        for k, policy in enumerate(some(MODES, name)):
            set_policy(model, policy)
            found[name, k] = [relational_pass(model, data) for _ in range(passes)]
    return found


def check_relational(jobs: Any, world: int, data: Data, root: Any, passes: int = 1) -> None:
    start = workers if world < 5 or everything() else parts
    every = start(relational_worker, world, jobs, root, passes)
    for name, plain in jobs.items():
        *expected, gradients = relational_pass(plain, data)
        scale = gradient_scale(gradients)
        for k, policy in enumerate(some(MODES, name)):
            where = f"{name}, {world} workers, {policy}"
            for one in (one for found in every for one in found[name, k]):
                for got, right in zip(one[:3], expected, strict=True):
                    assert error(got, right) <= 1e-10, where
                for n, gradient in gradients.items():
                    assert error(one[3][n], gradient, scale) <= 1e-10, (where, n)


def typed_graph() -> Data:
    data = make_graph(NODES)
    data.edge_type = torch.arange(data.num_edges) % (TYPES - 1)  # the last relation is absent
    return data


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_relational_layers_equal_one_process(world, tmp_path):
    data, root, jobs = typed_graph(), tmp_path / "parts", relational()
    jobs = {name: jobs[name] for name in some(list(jobs), f"{world}", 2)}
    part = torch.arange(NODES) * max(world - 1, 1) // NODES  # the last of several parts is empty
    pyg_sar.write_partitions(data, world, root, part)
    check_relational(jobs, world, data, root)


def by_ids(data: Data, convert: Any) -> list[Tensor]:
    """Layers that take no features for those of the nodes' ids, or the ids."""
    found = []
    for kind in (RGCNConv, FastRGCNConv):
        torch.manual_seed(2)
        model = convert(kind(NODES, 4, TYPES).double())
        ids = torch.arange(data.num_nodes)
        for x in (None, ids)[: 1 if kind is FastRGCNConv else 2]:
            found.append(whole(model(x, data.edge_index, data.edge_type).detach()))
    return found


def test_node_ids_in_the_place_of_features(tmp_path):
    data = typed_graph()
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "contiguous")
    expected = by_ids(data, lambda model: model)
    worker = lambda: by_ids(pyg_sar.load_partition(tmp_path / "parts"), pyg_sar.distribute)  # noqa: E731
    for found in workers(worker, 2):
        for k, (out, right) in enumerate(zip(found, expected, strict=True)):
            assert error(out, right) <= 1e-10, k


def bucketings(root: Any) -> list[int]:
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(RGCNConv(CHANNELS, 4, 40).double())
    found = []
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        for _ in range(3):
            model(data.x, data.edge_index, data.edge_type).sum().backward()
            found.append(ledger.events("bucketing"))
    return found


def test_relations_are_bucketed_once(tmp_path):
    data = typed_graph()
    data.edge_type = torch.arange(data.num_edges) % 40
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")
    for found in workers(bucketings, 2, tmp_path / "parts"):
        assert found == [40, 40, 40]


class Shared(torch.nn.Module):
    """One layer for all relations, whose edges are selected by masks made anew in each pass."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor, attr: Any):
        out = x.new_zeros(x.size(0), OUT)
        for k in range(4):
            out = out + (k + 1) * self.conv(x, edge_index[:, edge_type == k])
        return out


def test_relations_that_are_equal_on_one_worker_only(tmp_path):
    """What hangs on edges found by content is made by all workers, or by none."""
    data = make_graph(NODES)
    part = torch.arange(NODES) * 3 // NODES
    home = part[data.edge_index[1]]
    data.edge_type = torch.where(home == 0, 0, torch.arange(data.num_edges) % 4)
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", part)
    jobs = {kind.__name__: Shared(kind(CHANNELS, OUT).double()) for kind in (GCNConv, GATConv)}
    check_relational(jobs, 3, data, tmp_path / "parts", 2)


def transformer_worker(layer: Any, root: Any) -> Any:
    data = pyg_sar.load_partition(root)
    policy = pyg_sar.SARPolicy(mode=1, prefetch=0, push="off")
    layer = pyg_sar.distribute(copy.deepcopy(layer), policy)
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        for _ in range(2):
            layer(data.x_dict, data.edge_index_dict)
    halo = [data[key].edge_index.to_local().plan.halo_counts for key in data.edge_types]
    shards = [sum(counts) for counts in zip(*halo, strict=True)]
    peak = ledger.peak_resident_rows("HGTConv")
    events = ledger.events("bucketing"), ledger.events("fused attention")
    moved = ledger.received_bytes(kind="fetch"), ledger.sent_bytes(kind="reduce")
    return events, moved, peak, shards


def test_joined_relations_stream_like_one(tmp_path):
    """The halo rows of all relations travel, and their factors back; they are joined once."""
    data = make_hetero()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    layer = HGTConv(dict(WIDTHS), OUT, data.metadata(), heads=2).double()
    for events, (received, reduced), peak, shards in workers(
        transformer_worker, 3, layer, tmp_path / "parts"
    ):
        assert events == (1, 2) and peak == max(shards)
        assert received == 2 * sum(shards) * 2 * OUT * 8  # passes, rows, keys and values
        # In each pass a factor of each row and head; once, how many edges a row has.
        assert reduced == (2 * 2 + 1) * sum(shards) * 8


def misuse(root: Any) -> list[str]:
    data = pyg_sar.load_partition(root)
    x = {name: data[name].x.to_local() for name in data.node_types}
    edges = data["author", "writes", "paper"].edge_index.to_local()
    cites = data["paper", "cites", "paper"].edge_index.to_local()
    shifted = edges.clone()
    shifted[0] += 3
    found = []
    for case in (
        lambda: edges.__setitem__(0, edges[1]),
        lambda: shifted.max(),
        lambda: x["author"][shifted[0]],
        lambda: torch.cat([edges, shifted], dim=1),
        lambda: torch.cat([edges, cites], dim=1),
        lambda: SAGEConv((5, 6), 2).double()((x["author"], x["paper"]), shifted),
    ):
        with pytest.raises(pyg_sar.errors.DistributedIndexError) as caught:
            case()
        found.append(str(caught.value))
    return found


def test_half_shifted_edges_are_refused(tmp_path):
    pyg_sar.write_partitions(make_hetero(), 2, tmp_path / "parts", "random")
    for found in workers(misuse, 2, tmp_path / "parts"):
        assert "different index spaces" in found[3] and "different index spaces" in found[4]


# Lazy parameters ##############################################################


def lazy_models() -> dict[str, torch.nn.Module]:
    data = make_hetero()
    known = [name for name in data.node_types if name != "loner"], data.edge_types
    torch.manual_seed(3)
    found = {
        "HeteroConv": HeteroConv(relations(lambda a, b: SAGEConv((-1, -1), OUT))),
        "to_hetero": to_hetero(Homogeneous(GATv2Conv, add_self_loops=False), known),
        "with bases": to_hetero_with_bases(
            Homogeneous(SAGEConv), data.metadata(), 2, in_channels={"x": 5}
        ),
        "HGT": HGTConv(-1, OUT, data.metadata()),
    }
    return {name: model.double() for name, model in found.items()}


def lazy_worker(root: Any) -> Any:
    data, found, problem = pyg_sar.load_partition(root), {}, ""
    for name, model in lazy_models().items():
        try:
            pyg_sar.distribute(model)
        except ValueError as refusal:
            problem = str(refusal)
        pyg_sar.nn.initialize(model, data.x_dict, data.edge_index_dict)
        model = pyg_sar.distribute(model)
        out = {kind: whole(rows) for kind, rows in model(data.x_dict, data.edge_index_dict).items()}
        found[name] = model.state_dict(), model.training, out
    return found, problem


def test_lazy_parameters_are_initialised_from_the_partition(tmp_path):
    data = make_hetero()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", random_parts(data, 3))
    every = parts(lazy_worker, 3, tmp_path / "parts")
    for name, plain in lazy_models().items():
        pyg_sar.nn.initialize(plain, data.x_dict, data.edge_index_dict)  # In one process, too.
        plain.load_state_dict(every[0][0][name][0])
        expected = plain(data.x_dict, data.edge_index_dict)
        for found, problem in every:
            assert "pyg_sar.nn.initialize" in problem and found[name][1]
            for kind, right in expected.items():
                assert error(found[name][2][kind], right) <= 1e-10, (name, kind)


# Types of as many nodes, and workers without edges ############################

TWINS = 8


class BothEnds(MessagePassing):
    """Reads one tensor of nodes at the ends of edges between two types."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")

    def forward(self, x: Tensor, h: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, h=h, size=(TWINS, TWINS))

    def message(self, x_i: Tensor, x_j: Tensor, h_j: Tensor) -> Tensor:
        return x_i * x_j + h_j


def twins() -> HeteroData:
    draw, data = torch.Generator().manual_seed(0), HeteroData()
    for name in ("a", "b"):
        data[name].x = torch.randn(TWINS, 4, generator=draw, dtype=torch.float64)
    for key in (("a", "to", "b"), ("b", "to", "a")):
        data[key].edge_index = torch.randint(TWINS, (2, 30), generator=draw)
    return data


def of_twins(data: HeteroData, convert: Any) -> list[Tensor]:
    """Results, with each type's table and with the other type's features, and the gradients."""
    torch.manual_seed(1)
    kinds = {"a": TWINS, "b": TWINS}
    tables = torch.nn.ModuleDict({k: torch.nn.Embedding(n, 4) for k, n in kinds.items()})
    convs = {key: SAGEConv((4, 4), OUT) for key in data.edge_types}
    models = torch.nn.ModuleList(
        [HeteroConv(convs), HGTConv(4, OUT, data.metadata()), HANConv(4, OUT, data.metadata())]
    )
    tables, models, own = convert(tables.double()), convert(models.double()), convert(BothEnds())
    attends = GATConv((4, 4), OUT, add_self_loops=False)
    backwards = convert(torch.nn.ModuleList([SAGEConv((4, 4), OUT), attends]).double())
    x, found = {name: table.weight for name, table in tables.items()}, []
    for rows in (x, {"a": data["b"].x, "b": data["a"].x}):
        for model in models:
            found += model(rows, data.edge_index_dict).values()
        found.append(own(rows["a"], rows["b"], data["a", "b"].edge_index))
        for layer in (own, *backwards):  # Then PyG reads the first of a pair as ``x_j``, too.
            layer.flow = "target_to_source"
        found.append(own(rows["a"], rows["b"], data["a", "b"].edge_index))
        for layer in backwards:
            found.append(layer((rows["a"], rows["b"]), data["a", "b"].edge_index))
        own.flow = "source_to_target"
    sum(node_losses(rows).mean() for rows in found).backward()
    return [*(whole(t.detach()) for t in found), *(whole(t.weight.grad) for t in tables.values())]


def twins_worker(root: Any) -> Any:
    data = pyg_sar.load_partition(root)
    found, conv = of_twins(data, pyg_sar.distribute), pyg_sar.distribute(SAGEConv(4, 4).double())
    with pytest.raises(pyg_sar.errors.DistributedIndexError, match="one tensor.*pass a pair"):
        conv(data["a"].x, data["a", "b"].edge_index)
    return found


def test_types_of_as_many_nodes_are_not_taken_for_each_other(tmp_path):
    parts = {"a": torch.arange(TWINS) % 2, "b": torch.arange(TWINS) // 4}
    pyg_sar.write_partitions(twins(), 2, tmp_path / "parts", parts)
    expected = of_twins(twins(), lambda module: module)
    for found in both(twins_worker, 2, tmp_path / "parts"):
        assert max(map(error, found, expected)) <= 1e-10


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = SAGEConv(5, 4), BatchNorm(4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.conv(x, edge_index))


def on_few_workers(data: HeteroData, convert: Any) -> list[Tensor]:
    """Layers of which edges are on other workers, or nowhere."""
    torch.manual_seed(1)
    inner = data["paper", "author"]
    inner.edge_attr = inner.edge_attr.clone().requires_grad_()
    edges = data.edge_index_dict
    edges = {key: edges[key] for key in sorted(edges, key=lambda key: key[1] != "invites")}
    encode, attend = torch.nn.Linear(2, 2), GATConv((6, 5), OUT, edge_dim=2, add_self_loops=False)
    han, none = HANConv(dict(WIDTHS), OUT, data.metadata(), dropout=0.3), RGATConv(5, OUT, 1)
    bases = to_hetero_with_bases(Normed(), data.metadata(), 1, in_channels={"x": 5})
    plain = torch.nn.ModuleList([encode, attend, han, none, bases]).double()
    with torch.no_grad():
        bases(make_hetero().x_dict, make_hetero().edge_index_dict)  # lazy parameters
    for parameter in plain.parameters():  # PyG leaves weights of bases as memory was
        torch.nn.init.normal_(parameter)
    if convert is not None:
        plain = convert(plain, pyg_sar.SARPolicy(mode=3))
    encode, attend, han, none, bases = plain
    torch.manual_seed(2)
    x, kinds = data.x_dict, inner.edge_index[0][:0]
    out = attend((x["paper"], x["author"]), inner.edge_index, encode(inner.edge_attr))
    rows = none(x["author"], data["author", "author"].edge_index[:, :0], kinds)
    more = [*han(x, edges).values(), *bases(x, data.edge_index_dict).values()]
    found = [out, rows, *(value for value in more if value is not None)]
    sum(node_losses(value).mean() for value in found).backward()
    gradients = [p.grad for module in (encode, attend, han) for p in module.parameters()]
    return [*(whole(t.detach()) for t in found), whole(inner.edge_attr.grad), *gradients]


def few_worker(root: Any) -> Any:
    return on_few_workers(pyg_sar.load_partition(root), pyg_sar.distribute)


def test_workers_without_edges_take_part(tmp_path):
    data = make_hetero()
    parts = random_parts(data, 2) | {"author": torch.zeros(13, dtype=torch.long)}
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", parts)
    expected = on_few_workers(data, None)
    for found in both(few_worker, 2, tmp_path / "parts"):
        # By 1: gradients of weights that scores of a single relation share are rounding noise.
        assert max(error(a, b, 1.0) for a, b in zip(found, expected, strict=True)) <= 1e-10
