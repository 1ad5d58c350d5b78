"""Exactness (contract, rule 1): every convolution, mode, world size and partition, float64.

Outputs, gradients of inputs, edge attributes and parameters, and buffers, equal those of one
process within 1e-10 relative.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import some
from oracle import (
    ALL_POLICIES,
    CHANNELS,
    CLASSES,
    EDGE_DIM,
    MODES,
    OUT,
    TOLERANCE,
    Job,
    Partitions,
    Sweep,
    copied,
    error,
    hosted,
    make_graph,
    parts,
    two_islands,
    whole,
    workers,
)
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric import nn as gnn
from torch_geometric import utils
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy

Make = Callable[[], torch.nn.Module]
Layers = dict[str, tuple[Make, tuple[str, ...], tuple[str, ...]]]
WEIGHT, ATTR = ("edge_weight",), ("edge_attr",)


def mlp(inputs: int, *extra: torch.nn.Module) -> Sequential:
    return Sequential(Linear(inputs, 8), ReLU(), *extra, Linear(8, OUT))


# name: (layer, edge attributes with a gradient, edge attributes without)
LAYERS: Layers = {
    "gcn": (lambda: gnn.GCNConv(CHANNELS, OUT), (), ()),
    "gcn, learned weights": (lambda: gnn.GCNConv(CHANNELS, OUT), WEIGHT, ()),
    "gcn, weights": (lambda: gnn.GCNConv(CHANNELS, OUT), (), WEIGHT),
    "gcn, weights, cached": (lambda: gnn.GCNConv(CHANNELS, OUT, cached=True), (), WEIGHT),
    "gcn, cached": (lambda: gnn.GCNConv(CHANNELS, OUT, cached=True), (), ()),
    "gcn, improved": (lambda: gnn.GCNConv(CHANNELS, OUT, improved=True, bias=False), (), WEIGHT),
    "gcn, no loops": (lambda: gnn.GCNConv(CHANNELS, OUT, add_self_loops=False), WEIGHT, ()),
    "gcn, not normalised": (lambda: gnn.GCNConv(CHANNELS, OUT, normalize=False), (), WEIGHT),
    "sage, mean": (lambda: gnn.SAGEConv(CHANNELS, OUT), (), ()),
    "sage, sum": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="sum", project=True), (), ()),
    "sage, max": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max", normalize=True), (), ()),
    "sage, min": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="min", root_weight=False), (), ()),
    "gin": (lambda: gnn.GINConv(mlp(CHANNELS, BatchNorm1d(8)), train_eps=True), (), ()),
    "gine": (lambda: gnn.GINEConv(mlp(CHANNELS), edge_dim=EDGE_DIM), ATTR, ()),
    "gat": (lambda: gnn.GATConv(CHANNELS, OUT, heads=2), (), ()),
    "gat, edges": (
        lambda: gnn.GATConv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM, concat=False),
        ATTR,
        (),
    ),
    "gat, constant edges, fill": (
        lambda: gnn.GATConv(CHANNELS, OUT, edge_dim=EDGE_DIM, fill_value=0.5, residual=True),
        (),
        ATTR,
    ),
    "gat, no loops": (
        lambda: gnn.GATConv(CHANNELS, OUT, heads=3, add_self_loops=False, edge_dim=EDGE_DIM),
        ATTR,
        (),
    ),
    "gatv2": (lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, concat=False), (), ()),
    "gatv2, shared, no loops": (
        lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, share_weights=True, add_self_loops=False),
        (),
        (),
    ),
    "gatv2, edges": (lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM), ATTR, ()),
    "transformer": (
        lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, concat=False, root_weight=False),
        (),
        (),
    ),
    "transformer, edges": (
        lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM, beta=True),
        ATTR,
        (),
    ),
    "edge conv": (lambda: gnn.EdgeConv(mlp(2 * CHANNELS), aggr="max"), (), ()),
    "edge conv, mean": (lambda: gnn.EdgeConv(mlp(2 * CHANNELS), aggr="mean"), (), ()),
    "nnconv": (lambda: gnn.NNConv(CHANNELS, OUT, Linear(EDGE_DIM, CHANNELS * OUT)), ATTR, ()),
    "nnconv, max": (
        lambda: gnn.NNConv(CHANNELS, OUT, Linear(EDGE_DIM, CHANNELS * OUT), aggr="max"),
        ATTR,
        (),
    ),
    "gated": (lambda: gnn.ResGatedGraphConv(CHANNELS, OUT), (), ()),
    "gated, edges": (lambda: gnn.ResGatedGraphConv(CHANNELS, OUT, edge_dim=EDGE_DIM), ATTR, ()),
    "cg": (lambda: gnn.CGConv(CHANNELS, dim=EDGE_DIM), ATTR, ()),
    "cg, batch norm": (
        lambda: gnn.CGConv(CHANNELS, dim=EDGE_DIM, batch_norm=True, aggr="mean"),
        (),
        ATTR,
    ),
    "graph conv": (lambda: gnn.GraphConv(CHANNELS, OUT), WEIGHT, ()),
}


class OwnAggregate(gnn.MessagePassing):
    """An aggregation that nobody but the layer knows: a weighted mean of minimum and sum."""

    def __init__(self) -> None:
        super().__init__(aggr=None)
        self.mix = torch.nn.Parameter(torch.rand(CHANNELS))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: torch.Tensor) -> torch.Tensor:
        return x_j.sin()

    def aggregate(
        self, inputs: torch.Tensor, index: torch.Tensor, dim_size: int | None = None
    ) -> torch.Tensor:
        least = utils.scatter(inputs, index, 0, dim_size, "min")
        total = utils.scatter(inputs, index, 0, dim_size, "sum")
        return self.mix * least + (1 - self.mix) * total


class StaticGraph(gnn.MessagePassing):
    """Three feature matrices on one graph: nodes on the axis before the last."""

    def __init__(self) -> None:
        super().__init__(aggr=["mean", "max", "std"])
        self.weight = torch.nn.Parameter(torch.rand(CHANNELS))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out = self.propagate(edge_index, x=torch.stack([x, x.sin(), x.cos()]))
        return out.transpose(0, 1).flatten(1)

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        return x_j * self.weight + (x_i * x_j).tanh()


class Remembering(gnn.MessagePassing):
    """Its message leaves values behind, which its forward looks for, as RGATConv's does."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.gate: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out = self.propagate(edge_index, x=x)
        assert self.gate is not None
        self.gate = None
        return out

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        self.gate = (x_i * x_j).sigmoid()
        return self.gate * x_j


class SideBySide(gnn.MessagePassing):
    """Attention whose heads lie side by side in one axis."""

    def __init__(self) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.score = Linear(2 * CHANNELS, 2)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x)

    def message(
        self, x_i: torch.Tensor, x_j: torch.Tensor, index: torch.Tensor, size_i: int | None
    ) -> torch.Tensor:
        weights = utils.softmax(self.score(torch.cat([x_i, x_j], -1)), index, None, size_i)
        return (weights.unsqueeze(-1) * x_j.view(-1, 2, CHANNELS // 2)).flatten(1)


class AttentionOfEdges(torch.nn.Module):
    """Returns attention weights, of which the message's arguments get gradients as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GATConv(CHANNELS, OUT, edge_dim=EDGE_DIM, add_self_loops=False)

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor
    ) -> torch.Tensor:
        asked = {"return_attention_weights": True}
        out, (_, alpha) = self.conv(x, edge_index, edge_attr, **asked)
        return out + alpha.square().sum()


def sage(aggr: Any, **kwargs: Any) -> Make:
    return lambda: gnn.SAGEConv(CHANNELS, OUT, aggr=aggr, aggr_kwargs=kwargs)


# What else PyG offers: several rounds of messages, other aggregations, edge attention.
WIDER: Layers = {
    "agnn": (lambda: gnn.AGNNConv(), (), ()),
    "appnp": (lambda: gnn.APPNP(3, 0.1), WEIGHT, ()),
    "arma": (lambda: gnn.ARMAConv(CHANNELS, OUT, num_stacks=2, num_layers=2), WEIGHT, ()),
    "cheb": (lambda: gnn.ChebConv(CHANNELS, OUT, 3), (), WEIGHT),
    "cluster gcn": (lambda: gnn.ClusterGCNConv(CHANNELS, OUT), (), ()),
    "feast": (lambda: gnn.FeaStConv(CHANNELS, OUT, heads=2), (), ()),
    "film": (lambda: gnn.FiLMConv(CHANNELS, OUT), (), ()),
    "gated graph": (lambda: gnn.GatedGraphConv(CHANNELS, 2), WEIGHT, ()),
    "gen, softmax": (lambda: gnn.GENConv(CHANNELS, OUT, edge_dim=EDGE_DIM), ATTR, ()),
    "general": (lambda: gnn.GeneralConv(CHANNELS, OUT, EDGE_DIM, attention=True), ATTR, ()),
    "gmm": (lambda: gnn.GMMConv(CHANNELS, OUT, EDGE_DIM, kernel_size=2), ATTR, ()),
    "leconv": (lambda: gnn.LEConv(CHANNELS, OUT), WEIGHT, ()),
    "mf": (lambda: gnn.MFConv(CHANNELS, OUT), (), ()),
    "pna": (
        lambda: gnn.PNAConv(
            CHANNELS, OUT, ["mean", "max", "std"], ["identity", "amplification"],
            torch.arange(12), edge_dim=EDGE_DIM,
        ),
        ATTR,
        (),
    ),
    "own aggregate": (OwnAggregate, (), ()),
    "std": (sage("std"), (), ()),
    "var": (sage("var"), (), ()),
    "median": (sage("median"), (), ()),
    "quantile": (sage("quantile", q=0.3), (), ()),
    "mul": (sage("mul"), (), ()),
    "softmax, learned": (sage("softmax", learn=True), (), ()),
    "powermean, learned": (sage("powermean", learn=True), (), ()),
    "several": (sage(["mean", "max", "std", "median"]), (), ()),
    "several, attended": (
        sage(["mean", "max"], mode="attn", mode_kwargs={
            "in_channels": CHANNELS, "out_channels": CHANNELS, "num_heads": 2}),
        (),
        (),
    ),
    "degree scaled": (
        lambda: gnn.SimpleConv(aggr=gnn.aggr.DegreeScalerAggregation(
            ["mean", "std"], ["identity", "amplification"], torch.arange(12))),
        (),
        (),
    ),
    "attentional": (
        lambda: gnn.GINConv(Linear(CHANNELS, OUT), aggr=gnn.aggr.AttentionalAggregation(
            Linear(CHANNELS, 1), Linear(CHANNELS, CHANNELS))),
        (),
        (),
    ),
    "semi std": (sage("std", semi_grad=True), (), ()),
    "semi std, fused": (sage(["mean", gnn.aggr.StdAggregation(semi_grad=True)]), (), ()),
    "static graph": (StaticGraph, (), ()),
    "sets an attribute": (Remembering, (), ()),
    "rgat": (lambda: gnn.RGATConv(CHANNELS, OUT, 3, heads=2), (), ("edge_type",)),
    "rgat, within relations": (
        lambda: gnn.RGATConv(
            CHANNELS, OUT, 3, heads=2, attention_mechanism="within-relation", edge_dim=EDGE_DIM
        ),
        ATTR,
        ("edge_type",),
    ),
    "heads side by side": (SideBySide, (), ()),
    "deep sets": (lambda: gnn.GINConv(Linear(CHANNELS, OUT), aggr=gnn.aggr.DeepSetsAggregation(
        Linear(CHANNELS, 4), Linear(4, CHANNELS))), (), ()),
    "sg": (lambda: gnn.SGConv(CHANNELS, OUT, K=2), WEIGHT, ()),
    "ssg": (lambda: gnn.SSGConv(CHANNELS, OUT, 0.1, K=2), (), WEIGHT),
    "tag": (lambda: gnn.TAGConv(CHANNELS, OUT), WEIGHT, ()),
}  # fmt: skip


# Aggregation at the sources ##################################################


class Reversed(torch.nn.Module):
    """A layer on flipped edges."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, **edge: Any) -> torch.Tensor:
        return self.conv(x, edge_index.flip([0]), **edge)


def pna(**kwargs: Any) -> torch.nn.Module:
    return gnn.PNAConv(
        CHANNELS, OUT, ["mean", "min", "std"], ["identity", "attenuation"], torch.arange(12),
        edge_dim=EDGE_DIM, **kwargs,
    )  # fmt: skip


BACK = {"flow": "target_to_source"}
AT_SOURCES: Layers = {
    "gcn": (lambda: gnn.GCNConv(CHANNELS, OUT, **BACK), WEIGHT, ()),
    "sage, max": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max", **BACK), (), ()),
    "sage, median": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="median", **BACK), (), ()),
    "gat": (lambda: gnn.GATConv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM, **BACK), ATTR, ()),
    "gatv2": (lambda: gnn.GATv2Conv(CHANNELS, OUT, edge_dim=EDGE_DIM, **BACK), (), ATTR),
    "transformer": (
        lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM, **BACK), ATTR, (),
    ),
    "pna": (lambda: pna(**BACK), ATTR, ()),
    "flipped sage": (lambda: Reversed(gnn.SAGEConv(CHANNELS, OUT)), (), ()),
    "flipped gat": (lambda: Reversed(gnn.GATConv(CHANNELS, OUT, edge_dim=EDGE_DIM)), ATTR, ()),
    "both ways": (lambda: gnn.DirGNNConv(gnn.GCNConv(CHANNELS, OUT)), (), ()),
}  # fmt: skip


def build(make: Make) -> torch.nn.Module:
    torch.manual_seed(1)
    return make().double()


def add_layers(
    sweep: Sweep, layers: Layers, data: Data, root: Path, policies: Sequence[SARPolicy], where: str
) -> None:
    for name, (make, edge, constants) in layers.items():
        sweep.add(f"{name}{where}", Job(build(make), root, edge, policies, constants), data)


def sweep_layers(
    layers: Layers, world: int, data: Data, root: Path, policies: Sequence[SARPolicy]
) -> Sweep:
    sweep = Sweep(world)
    add_layers(sweep, layers, data, root, policies, "")
    return sweep


@pytest.mark.parametrize(
    ("layers", "policies"),
    [(LAYERS, ALL_POLICIES), (WIDER, MODES), (AT_SOURCES, MODES)],
    ids=["layers", "wider", "at the sources"],
)
def test_layers_in_every_mode(
    layers: Layers, policies: Sequence[SARPolicy], graph: Data, partitions: Partitions
):
    """By shards or by chunks of targets, whichever the aggregation needs: exact.

    None falls back to one shot: the warning would be an error here.
    """
    root = partitions(graph, 3, "random")
    sweep_layers(layers, 3, graph, root, policies).check(timeout=300)


@pytest.mark.parametrize(
    ("world", "method"),
    [(1, "contiguous"), (2, "random"), (3, "metis"), (5, "metis")],
)
def test_world_sizes_and_partitioners(world: int, method: str, graph: Data, partitions: Partitions):
    root = partitions(graph, world, method)
    # All modes with 2 and 3 workers; every other one with 1 and 5.
    layers = {name: LAYERS[name] for name in some(list(LAYERS), f"{world}", 4)}
    sweep_layers(layers, world, graph, root, MODES if world in (2, 3) else MODES[::2]).check("gloo")


# A worker without ... ########################################################

SOME = {
    name: LAYERS[name]
    for name in (
        "gcn, learned weights", "sage, mean", "sage, max", "gin", "gat, edges", "gatv2",
        "transformer, edges", "edge conv", "nnconv", "cg, batch norm",
    )
}  # fmt: skip
# Their messages do something else without edges, fail there, leave values, or take statistics.
IN_ONE_SHOT = {
    **{name: LAYERS[name] for name in ("gat, edges", "gat, no loops", "gine", "nnconv")},
    **{name: WIDER[name] for name in ("cheb", "pna", "rgat, within relations", "attentional")},
    **{name: WIDER[name] for name in ("heads side by side", "sets an attribute")},
    "batch norm": (lambda: gnn.EdgeConv(mlp(2 * CHANNELS, BatchNorm1d(8))), (), ()),
    "attention": (AttentionOfEdges, ATTR, ()),
}  # fmt: skip
WITHOUT_EDGES = ("gcn", "sage, mean", "sage, max", "gat", "gatv2", "transformer", "gin")


def uneven_parts() -> Iterator[tuple[str, Data, str | torch.Tensor]]:
    """Graphs and assignments to three parts, of which one or two lack something."""
    thirds = torch.arange(40) % 3
    data = make_graph(seed=3)
    data.train_mask &= thirds != 1
    yield "one without training nodes", data, thirds
    data = make_graph(seed=4)
    data.train_mask = thirds == 2
    yield "training nodes on one only", data, thirds
    yield "two without edges between them", *two_islands()
    data = make_graph(30, 150, seed=5)
    part = torch.arange(30) // 10
    source, target = part[data.edge_index]
    data = data.edge_subgraph(((source == 1) | (target == 1)) <= (source == target))
    data.num_nodes = 30
    yield "part 1 neither needs nor gives rows", data, part
    for empty in range(3):
        part = torch.arange(40) % 2
        part = part + (part >= empty).long()
        assert empty not in part.tolist()
        yield f"no nodes in part {empty}", make_graph(seed=6), part
    data = make_graph(seed=8)
    data = data.edge_subgraph(thirds[data.edge_index[1]] != 0)
    data.num_nodes = 40
    yield "nodes that others read, without an in-edge", data, thirds
    data = make_graph(seed=8)
    data = data.edge_subgraph((thirds[data.edge_index] != 0).all(0))
    data.num_nodes = 40
    yield "no edges in part 0", data, thirds
    data = make_graph(seed=10)
    both = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1)
    weight, attr = (torch.cat([t, t]) for t in (data.edge_weight, data.edge_attr))
    data.edge_index, data.edge_weight, data.edge_attr = both, weight, attr
    del data.edge_type
    yield "undirected", data, "metis"


def test_uneven_parts(partitions: Partitions):
    sweep = Sweep(3)
    for title, data, part in uneven_parts():
        root, where = partitions(data, 3, part), f", {title}"
        names = some(list(SOME), title, 5)
        add_layers(sweep, {name: SOME[name] for name in names}, data, root, MODES, where)
        if title in ("no nodes in part 0", "no edges in part 0"):
            layers = {name: IN_ONE_SHOT[name] for name in some(list(IN_ONE_SHOT), title, 2)}
            add_layers(sweep, layers, data, root, (SARPolicy(mode=3),), f"{where}, at once")
    data = make_graph(seed=9)
    data = data.edge_subgraph(torch.zeros(data.num_edges, dtype=torch.bool))
    data.num_nodes = 40
    layers = {name: LAYERS[name] for name in WITHOUT_EDGES}
    add_layers(sweep, layers, data, partitions(data, 3), MODES, ", no edge at all")
    sweep.check(timeout=300)


def test_more_parts_than_metis_fills(partitions: Partitions):
    """METIS leaves parts empty where a graph is small."""
    data = make_graph(6, 14, seed=7)
    data.train_mask[:] = True
    root = partitions(data, 5, "metis")
    layers = {name: SOME[name] for name in some(list(SOME), "metis", 2)}
    sweep_layers(layers, 5, data, root, MODES).check(hosted(5))


def test_few_nodes_and_edges(partitions: Partitions):
    """A part without nodes, one without in-edges; parts without edges between them."""
    data = make_graph(seed=6)
    part = (torch.arange(40) >= 38).long() * 2
    assert not (part[data.edge_index[1]] == 2).any()
    root, sweep = partitions(data, 3, part), Sweep(3)
    names = ("own aggregate", "std", "median", "softmax, learned", "several", "powermean, learned")
    add_layers(sweep, {name: WIDER[name] for name in names}, data, root, MODES[:2], "")
    names = ("gcn", "sage, max", "gat", "flipped sage")
    at_sources = {name: AT_SOURCES[name] for name in names}
    add_layers(sweep, at_sources, data, root, MODES[:2], ", at the sources")
    # A message that reshapes by -1, and one that holds all parameters, where nothing is.
    once = {"feast": WIDER["feast"], "edge conv": LAYERS["edge conv"], "gat": LAYERS["gat"]}
    add_layers(sweep, once, data, root, (SARPolicy(mode=3),), ", at once")
    data, part = two_islands()
    add_layers(sweep, at_sources, data, partitions(data, 3, part), MODES[:2], ", two islands")
    sweep.check()


ORDERED: dict[str, tuple[Callable[[], Any], int]] = {
    "gru": (lambda: gnn.aggr.GRUAggregation(CHANNELS, CHANNELS), CHANNELS),
    "lcm": (lambda: gnn.aggr.LCMAggregation(CHANNELS, CHANNELS, project=True), CHANNELS),
    "lstm": (lambda: gnn.aggr.LSTMAggregation(CHANNELS, CHANNELS), CHANNELS),
    "mlp": (
        lambda: gnn.aggr.MLPAggregation(CHANNELS, CHANNELS, max_num_elements=15, num_layers=1),
        CHANNELS,
    ),
    "patch transformer": (
        lambda: gnn.aggr.PatchTransformerAggregation(
            CHANNELS, CHANNELS, patch_size=2, hidden_channels=4, num_transformer_blocks=1
        ),
        CHANNELS,
    ),
    "several": (
        lambda: gnn.aggr.MultiAggregation(
            ["mean", gnn.aggr.LSTMAggregation(CHANNELS, CHANNELS)], mode="sum"
        ),
        CHANNELS,
    ),
    "sort": (lambda: gnn.aggr.SortAggregation(k=3), 3 * CHANNELS),
}


def ordered_graph() -> Data:
    """Edges sorted by target, as PyG's order-dependent aggregations demand."""
    data = make_graph(seed=21)
    order = data.edge_index[1].argsort(stable=True)
    data.edge_index = data.edge_index[:, order]
    return data


def ordered_layer(name: str) -> torch.nn.Module:
    make, width = ORDERED[name]
    layer = build(lambda: gnn.GraphConv((width, CHANNELS), OUT, aggr=make()))
    if width != CHANNELS:
        layer.lin_rel = Linear(width, OUT).double()
    return layer


def test_order_dependent_aggregations(partitions: Partitions):
    """They see neighbours in the order of the edge list, and pad as the whole graph needs it."""
    data, sweep = ordered_graph(), Sweep(3)
    for name in ORDERED:
        job = Job(ordered_layer(name), partitions(data, 3, "random"), (), MODES[:2])
        sweep.add(name, job, data)
    sweep.check()


def without_gradients(layer: torch.nn.Module, root: Any, mode: Any) -> torch.Tensor | None:
    data = pyg_sar.load_partition(root)
    with mode():
        return whole(pyg_sar.distribute(copied(layer))(data.x, data.edge_index).clone())


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_order_dependent_aggregations_without_gradients(mode: Any, partitions: Partitions):
    """Each in a thread that has recorded nothing before."""
    data = ordered_graph()
    for name in some(list(ORDERED), mode.__name__, 3):
        layer = ordered_layer(name)
        expected = layer(data.x, data.edge_index).detach()
        for out in parts(without_gradients, 2, layer, partitions(data, 2, "random"), mode):
            assert error(out, expected) < TOLERANCE, name


def in_another_order(layer: torch.nn.Module, root: Any) -> torch.Tensor:
    data = pyg_sar.load_partition(root)
    edges = torch.arange(data.num_edges).flip(0)
    return whole(pyg_sar.distribute(layer)(data.x, data.edge_index[:, edges]).detach())


def test_order_dependent_aggregation_of_permuted_edges(partitions: Partitions):
    """They see the permuted edges, sorted by target as PyG wants them."""
    data, layer = ordered_graph(), ordered_layer("lstm")
    edges = data.edge_index.flip(1)
    expected = layer(data.x, edges[:, edges[1].argsort(stable=True)])
    for found in workers(in_another_order, 3, layer, partitions(data, 3, "random")):
        assert error(found, expected) <= TOLERANCE


class Energy(gnn.MessagePassing):
    """Aggregates with an energy that is minimised over all targets together."""

    def __init__(self) -> None:
        super().__init__(aggr=gnn.aggr.EquilibriumAggregation(CHANNELS, OUT, [4]))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x)


def test_an_aggregation_over_all_targets_together(graph: Data, partitions: Partitions):
    def out(data: Any, ready: Any) -> torch.Tensor:
        torch.manual_seed(2)
        return whole(ready(Energy().double())(data.x, data.edge_index).detach())

    def worker(root: Any) -> torch.Tensor:
        with pytest.warns(pyg_sar.errors.OneShotWarning, match="minimises one energy"):
            return out(pyg_sar.load_partition(root), pyg_sar.distribute)

    expected = out(graph, lambda layer: layer)
    for found in workers(worker, 3, partitions(graph, 3, "random")):
        assert error(found, expected) <= 1e-6  # PyG begins with zeros in float32.


# Reversed edges ##############################################################

KINDS = ("edges", "plan", "fetch", "refetch", "gradient")


def count_reversed(root: Any) -> tuple[dict[str, int], int]:
    data = pyg_sar.load_partition(root)
    layer = gnn.GraphConv(CHANNELS, OUT, **BACK).double()
    layer = pyg_sar.distribute(layer, SARPolicy(push="off"))
    x = data.x.requires_grad_()
    layer(x, data.edge_index, data.edge_weight).sum().backward()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        layer(x, data.edge_index, data.edge_weight).sum().backward()
    return {kind: ledger.sent_bytes(kind=kind) for kind in KINDS}, x.element_size() * OUT


def test_reversed_edges_are_sent_once(graph: Data, partitions: Partitions):
    """Later passes send a row and its gradient per pair of a source and a worker, and no edges."""
    assignment = torch.arange(graph.num_nodes) % 3
    results = workers(count_reversed, 3, partitions(graph, 3, assignment))
    near, far = graph.edge_index[1], assignment[graph.edge_index[0]]
    pairs = torch.stack([near, far])[:, assignment[near] != far].unique(dim=1)
    row = results[0][1]
    found = {kind: sum(kinds[kind] for kinds, _ in results) for kind in KINDS}
    assert found["edges"] == found["plan"] == found["refetch"] == 0
    assert found["fetch"] == found["gradient"] == pairs.size(1) * row


# Training ####################################################################


class Net(torch.nn.Module):
    """Three layers with batch norms, as a user writes them.

    Convolutions before a batch norm have no bias: its gradient is 0 but for rounding, which Adam
    would blow up, in one process too.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = {
            "gcn": lambda i, o, bias: gnn.GCNConv(i, o, bias=bias),
            "sage": lambda i, o, bias: gnn.SAGEConv(i, o, aggr="max", bias=bias),
            "gat": lambda i, o, bias: gnn.GATConv(i, o, heads=2, concat=False, bias=bias),
        }[kind]
        sizes = [(CHANNELS, 8, False), (8, 8, False), (8, CLASSES, True)]
        self.convs = torch.nn.ModuleList([make(*size) for size in sizes])
        self.norms = torch.nn.ModuleList([BatchNorm1d(8), gnn.BatchNorm(8)])

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


def train(
    model: torch.nn.Module, data: Data, optimizer: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Five epochs; returns the losses, the final state and the final outputs in evaluation."""
    if optimizer == "adam":
        step = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    else:
        step = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(5):
        model.train()
        step.zero_grad()
        out = model(data.x, data.edge_index)[data.train_mask]
        loss = F.cross_entropy(out, data.y[data.train_mask])
        loss.backward()
        step.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, whole(out)


def train_worker(root: Any, model: torch.nn.Module, optimizer: str, policy: SARPolicy) -> Any:
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(copy.deepcopy(model), policy)
    return train(model, data, optimizer)


def check_training(expected: Any, results: list[Any], title: str) -> None:
    losses, state, out = expected
    for rank, (found_losses, found_state, found_out) in enumerate(results):
        where = f"{title}, rank {rank}"
        for epoch, (a, b) in enumerate(zip(found_losses, losses, strict=True)):
            assert abs(float(a - b)) <= TOLERANCE * abs(float(b)), (where, "loss", epoch)
        assert found_state.keys() == state.keys()
        for name, value in state.items():
            error = (found_state[name].double() - value.double()).abs().max()
            assert float(error) <= TOLERANCE * max(1.0, float(value.abs().max())), (where, name)
        assert torch.allclose(found_out, out, rtol=TOLERANCE, atol=TOLERANCE), where


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("gcn", "adam"), ("sage", "adam"), ("gat", "adam"), ("gat", "sgd")]
)
def test_five_steps_of_training(kind: str, optimizer: str, graph: Data, partitions: Partitions):
    torch.manual_seed(2)
    model = Net(kind).double()
    expected = train(copy.deepcopy(model), graph, optimizer)
    for world, mode in some(((3, 1), (2, 2), (3, 3), (5, 1)), f"{kind} {optimizer}", 2):
        root = partitions(graph, world, "random")
        policy = SARPolicy(mode=mode, prefetch=mode % 2)
        results = workers(train_worker, world, root, model, optimizer, policy)
        check_training(expected, results, f"{kind}, {world} workers, mode {mode}")
