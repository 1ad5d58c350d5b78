"""Message flow graphs: the seeds' outputs and gradients are those of the whole graph."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hetero_graphs import make_hetero
from oracle import (
    CHANNELS,
    CLASSES,
    MODES,
    TOLERANCE,
    error,
    gradient_scale,
    make_graph,
    node_losses,
    parts,
    set_policy,
    whole,
    workers,
)
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph, trim_to_layer

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import DistributedIndexError
from pyg_sar.partition.message_flow import sample_neighbors
from pyg_sar.tools import run as tool
from pyg_sar.train import TrainConfig, check_flow
from pyg_sar.train.flow import call_model, trimming

NODES, HIDDEN, LAYERS, SEEDS = 90, 8, 2, [5, 17, 60]


class Own(nn.Module):
    """A model of one's own that trims; edge attributes, and two hops in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GATConv(CHANNELS, HIDDEN, edge_dim=4)
        self.last = gnn.SGConv(HIDDEN, CLASSES, K=2)

    def forward(self, data: Data) -> Tensor:
        x, edge_index, attr = data.x, data.edge_index, data.edge_attr
        x = self.first(x, edge_index, attr).tanh()
        if "num_sampled_nodes" in data:
            hops = data.num_sampled_nodes, data.num_sampled_edges
            x, edge_index, attr = trim_to_layer(1, *hops, x, edge_index, attr)
        return self.last(x, edge_index)


def call(model: nn.Module, data: Data) -> Tensor:
    return model(data) if isinstance(model, Own | Relations | Labelled) else call_model(model, data)


class Relations(nn.Module):
    """Relations as types of edges, as of ``HeteroData.to_homogeneous``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.RGCNConv(CHANNELS, HIDDEN, 3, num_bases=2)
        self.last = gnn.RGATConv(HIDDEN, CLASSES, 3)

    def forward(self, data: Data) -> Tensor:
        x, edge_index, kind = data.x, data.edge_index, data.edge_type
        x = self.first(x, edge_index, kind).tanh()
        if "num_sampled_nodes" in data:
            hops = data.num_sampled_nodes, data.num_sampled_edges
            x, edge_index, kind = trim_to_layer(1, *hops, x, edge_index, kind)
        return self.last(x, edge_index, kind)


def layers_of(model: nn.Module) -> int:
    return 3 if isinstance(model, Own) else LAYERS


@pytest.fixture(scope="module")
def graph() -> Data:
    data = make_graph(NODES, 200, seed=3)
    data.train_mask = torch.zeros(NODES, dtype=torch.bool)
    data.train_mask[SEEDS] = True
    data.val_mask = data.test_mask = ~data.train_mask
    del data.edge_weight
    return data


@pytest.fixture(scope="module")
def models() -> Iterator[list[nn.Module]]:
    torch.manual_seed(1)
    sizes = CHANNELS, HIDDEN, LAYERS, CLASSES
    made = [gnn.GCN(*sizes), gnn.GAT(*sizes, heads=2), gnn.GraphSAGE(*sizes), Own(), Relations()]
    return [model.double() for model in made]


Found = tuple[Tensor, Tensor, dict[str, Tensor]]


def one_step(model: nn.Module, data: Data, rows: Any, ids: Tensor) -> Found:
    model.zero_grad()
    data = copy.copy(data)
    data.x = data.x.clone().requires_grad_()
    out = call(model, data)[rows]
    node_losses(out, ids).mean().backward()
    named = model.named_parameters()
    grads = {n: p.grad.clone() for n, p in named if p.grad is not None}
    return whole(out.detach()), whole(data.x.grad), grads


def rows_of_layers(model: nn.Module) -> list[int]:
    """Filled in each call of a layer: the rows that it reads here."""
    rows: list[int] = []

    def note(_: Any, args: Any) -> None:
        rows.append(args[0].rows.count)
        edges = args[1].edges
        assert edges.sources is edges.targets is args[0].rows  # Nothing is asked of the others.

    for module in model.modules():
        if isinstance(module, gnn.MessagePassing):
            module.register_forward_pre_hook(note)
    return rows


def steps(root: Any, models: list[nn.Module], policies: Sequence[SARPolicy]) -> list[Any]:
    data = pyg_sar.load_partition(root)
    found = []
    for model in models:
        flow = pyg_sar.partition.message_flow_graphs(data, data.train_mask, layers_of(model))
        own = pyg_sar.distribute(copy.deepcopy(model))
        check_flow(own, data, flow, forward=call)
        rows = rows_of_layers(own)
        for policy in policies:
            set_policy(own, policy)
            step = one_step(own, flow, slice(flow.batch_size), flow.input_id)
            found.append((step, flow.n_id.full_tensor(), tuple(rows)))
            rows.clear()
    return found


@pytest.mark.parametrize(("world", "run"), [(1, workers), (2, workers), (3, workers), (5, parts)])
def test_outputs_gradients_and_rows(world, run, graph, models, partitions):
    policies = MODES if world == 2 else MODES[:1]
    models = models if world == 2 else models[:-1]  # Relations take long.
    everyone = run(steps, world, partitions(graph, world), models, policies)
    ids = torch.arange(NODES)[graph.train_mask]
    for k, model in enumerate(models):
        expected = one_step(copy.deepcopy(model), graph, graph.train_mask, ids)
        hops = layers_of(model)
        # By PyG: the nodes within so many hops of a seed.
        near = [len(k_hop_subgraph(ids, n, graph.edge_index)[0]) for n in range(hops + 1)]
        for step in range(len(policies)):
            found = [worker[len(policies) * k + step] for worker in everyone]
            for (out, x_grad, grads), n_id, _ in found:
                grad = torch.zeros_like(expected[1])
                grad[n_id] = x_grad
                assert torch.equal(n_id[: len(ids)], ids)
                assert error(out, expected[0]) < TOLERANCE and error(grad, expected[1]) < TOLERANCE
                assert grads.keys() == expected[2].keys()
                scale = gradient_scale(expected[2])
                assert all(error(grads[n], g, scale) < TOLERANCE for n, g in expected[2].items())
            computed = [sum(rows) for rows in zip(*(f[2] for f in found), strict=True)]
            assert computed == near[::-1][: len(computed)] and computed[-1] < NODES // 2


SIZES = CHANNELS, HIDDEN, LAYERS, CLASSES
STOCK: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "gin": (lambda: gnn.GIN(*SIZES), ()),
    "pna": (
        lambda: gnn.PNA(
            *SIZES,
            aggregators=["mean", "std", "max"],
            scalers=["identity", "amplification"],
            deg=torch.ones(9, dtype=torch.long),
        ),
        (),
    ),
    "edge": (lambda: gnn.EdgeCNN(*SIZES), ()),
    "attributes": (lambda: gnn.GAT(*SIZES, v2=True, heads=2, edge_dim=4), ("edge_attr",)),
    "weights": (lambda: gnn.GCN(*SIZES, normalize=False), ("edge_weight",)),
    "no loops": (lambda: gnn.GCN(*SIZES, add_self_loops=False), ()),
    "jumps": (lambda: gnn.GCN(*SIZES, jk="cat"), ()),  # It doesn't trim.
    "lstm": (lambda: gnn.GraphSAGE(*SIZES, aggr="lstm"), ()),
    "median": (lambda: gnn.GraphSAGE(*SIZES, aggr="median", project=True), ()),
}


def of_stock(name: str, data: Data, rows: Any, make: Any, check: Any) -> tuple[Tensor, Any]:
    """Outputs, and gradients of PyTorch's own loss."""
    build, names = STOCK[name]
    torch.manual_seed(3)
    model = make(build().double())

    def forward(model: nn.Module, data: Data) -> Tensor:
        return model(
            data.x, data.edge_index, **{n: data[n] for n in names}, **trimming(model, data)
        )

    check(model, forward)
    out = forward(model, data)[rows]
    F.cross_entropy(out, data.y[rows]).backward()
    return whole(out.detach()), {n: p.grad for n, p in model.named_parameters()}


def stock_models(root: Any) -> dict[str, Any]:
    data = pyg_sar.load_partition(root)
    flow = pyg_sar.partition.message_flow_graphs(data, data.train_mask, LAYERS)
    check = lambda model, forward: check_flow(model, data, flow, forward=forward)  # noqa: E731
    seeds = slice(flow.batch_size)
    return {name: of_stock(name, flow, seeds, pyg_sar.distribute, check) for name in STOCK}


def test_models_of_pyg_with_losses_of_pytorch(graph, partitions):
    graph = graph.sort(sort_by_row=False)  # PyG's LSTM needs that.
    graph.edge_weight = graph.edge_attr[:, 0]
    nothing = lambda *_: None  # noqa: E731
    mask = graph.train_mask
    expected = {name: of_stock(name, graph, mask, copy.copy, nothing) for name in STOCK}
    for found in parts(stock_models, 3, partitions(graph, 3)):
        for name, (out, grads) in expected.items():
            scale = gradient_scale(grads)
            assert error(found[name][0], out) < TOLERANCE, name
            assert all(error(found[name][1][n], g, scale) < TOLERANCE for n, g in grads.items())


def subgraphs(root: Any, seeds: Tensor) -> list[Data]:
    """The subgraph of the same seeds, named in four ways."""
    data, mask = pyg_sar.load_partition(root), torch.zeros(NODES, dtype=torch.bool)
    mask[seeds] = True
    data.more = torch.arange(NODES).view(-1, 1)  # plain: all workers hold it
    named = [mask, seeds, data.train_mask, data.train_mask.nonzero().view(-1)]
    found = []
    for seeds in named:
        flow = pyg_sar.partition.message_flow_graphs(data, seeds, LAYERS)
        assert all(isinstance(v, int | list) or v.rows is not None for v in flow.to_dict().values())
        found.append(Data(**{name: whole(value) for name, value in flow.to_dict().items()}))
    return found


def test_the_subgraph_is_the_same_for_any_number_of_workers(graph, partitions):
    ids = torch.tensor(SEEDS)
    first, n_id = None, None
    for world, run in ((1, workers), (3, workers), (4, parts)):
        for flow in (f for w in run(subgraphs, world, partitions(graph, world), ids) for f in w):
            first = first or flow
            n_id, e_id = flow.n_id, flow.e_id
            assert flow.keys() == first.keys()
            for name, value in first.to_dict().items():
                assert torch.equal(flow[name], value) if isinstance(value, Tensor) else True
            assert torch.equal(flow.more.view(-1), n_id) and torch.equal(flow.input_id, ids)
            assert torch.equal(flow.x, graph.x[n_id]) and torch.equal(flow.y, graph.y[n_id])
            assert torch.equal(flow.edge_attr, graph.edge_attr[e_id])
            assert torch.equal(n_id[flow.edge_index], graph.edge_index[:, e_id])
            assert sum(flow.num_sampled_nodes) == len(n_id) == flow.num_nodes
            assert sum(flow.num_sampled_edges) == len(e_id)


def test_edges_beside_as_many_nodes_keep_their_attributes(tmp_path):
    """PyG takes 40 weights for those of 40 nodes; write_partitions() was told."""
    loops = torch.arange(NODES)
    ring = Data(edge_index=torch.stack([loops, loops.roll(-7)]), weight=torch.rand(NODES))
    ring.num_nodes = NODES
    pyg_sar.write_partitions(ring, 2, tmp_path / "parts", "random", levels={"weight": "edge"})

    def worker() -> list[Tensor | None]:
        data = pyg_sar.load_partition(tmp_path / "parts")
        flow = pyg_sar.partition.message_flow_graphs(data, loops[:5], 1)
        return [whole(flow.weight), whole(flow.e_id)]

    for weight, e_id in workers(worker, 2):
        assert torch.equal(weight, ring.weight[e_id])


class Dropped(nn.Module):
    """Dropout of features, of attention and of edges, and layers that need the edges' order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GATConv(CHANNELS, HIDDEN, heads=2, concat=False, dropout=0.4)
        self.last = gnn.SAGEConv(HIDDEN, CLASSES)

    def forward(self, data: Data) -> Tensor:
        hops = data.num_sampled_nodes, data.num_sampled_edges
        x, edge_index = data.x, data.edge_index
        x = F.dropout(self.first(x, edge_index).tanh(), 0.3, self.training)
        x, edge_index, _ = trim_to_layer(1, *hops, x, edge_index)
        kept = torch.rand_like(x[:, 0]) < 0.9
        x = x * kept.view(-1, 1)
        return self.last(x, edge_index)


def drawn(root: Any, model: nn.Module, random: Any) -> tuple[Data, Found]:
    data = pyg_sar.load_partition(root)
    flow = pyg_sar.partition.message_flow_graphs(data, data.train_mask, LAYERS)
    own = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(random=random))
    for layer in own.modules():
        flow.n_id.rows.compared.add(layer)
    torch.manual_seed(8)
    step = one_dropped(own, flow)
    names = "x", "edge_index", "num_sampled_nodes", "num_sampled_edges", "batch_size"
    return Data(**{name: whole(flow[name]) for name in names}), step


def one_dropped(model: nn.Module, flow: Data) -> Found:
    flow.x = flow.x.detach().clone().requires_grad_()
    out = model(flow)[: flow.batch_size]
    out.square().sum().backward()
    return whole(out.detach()), whole(flow.x.grad), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("random", ["same", "keyed"])
def test_dropout_is_that_of_one_process_on_the_subgraph(random, graph, partitions):
    torch.manual_seed(2)
    model = Dropped().double()
    expected: Any = None
    for world, run in ((1, workers), (3, workers), (4, parts)):
        for flow, found in run(drawn, world, partitions(graph, world), model, random):
            if random == "same" and expected is None:
                torch.manual_seed(8)
                expected = one_dropped(copy.deepcopy(model), flow)
            expected = expected or found
            assert error(found[0], expected[0]) < TOLERANCE
            assert error(found[1], expected[1]) < TOLERANCE
            assert all(error(g, expected[2][n]) < TOLERANCE for n, g in found[2].items())


class Labelled(nn.Module):
    """Training nodes show their labels, as of masked label prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.label = gnn.MaskLabel(CLASSES, CHANNELS)
        self.conv = gnn.GraphSAGE(CHANNELS, HIDDEN, LAYERS, CLASSES)

    def forward(self, data: Data) -> Tensor:
        more = {}
        if "num_sampled_nodes" in data:
            more = {f"{n}_per_hop": data[n] for n in ("num_sampled_nodes", "num_sampled_edges")}
        return self.conv(self.label(data.x, data.y, data.label_mask), data.edge_index, **more)


def train(root: Any, model: nn.Module, layers: int, arguments: dict[str, Any]) -> list[Any]:
    """Results with message flow graphs and without."""
    data, found = pyg_sar.load_partition(root), []
    config = TrainConfig(epochs=2, restore_best=False)
    for flow in (pyg_sar.partition.message_flow_graphs(data, data.train_mask, layers), None):
        own = pyg_sar.distribute(copy.deepcopy(model))
        found.append(pyg_sar.Trainer(own, data, config, flow=flow, **arguments).fit())
    return found


def test_the_trainer_trains_the_same(graph, models, partitions):
    root = partitions(graph, 3)
    for model, run, more in (
        (models[3], parts, {}),
        (Labelled().double(), workers, {"labels": 0.3}),
    ):
        how = {"forward": call, **more}
        flow, every = run(train, 3, root, model, layers_of(model), how)[0]
        assert flow.losses == pytest.approx(every.losses, rel=TOLERANCE)
        assert flow.final == pytest.approx(every.final, rel=TOLERANCE)


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = gnn.SAGEConv(CHANNELS, CLASSES), norm

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.conv(x, edge_index))


class Hidden(nn.Module):
    """Three hops, behind a factor that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.factor = gnn.SGConv(CHANNELS, CLASSES, K=3), nn.Parameter(torch.zeros(1))
        self.last = gnn.SAGEConv(CHANNELS, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(x, edge_index) + self.factor * self.conv(x, edge_index)


REFUSED = [
    (Hidden(), 2, "outputs are up to"),
    (Norm(nn.BatchNorm1d(CLASSES)), 1, "statistics over all nodes in training"),
    (Norm(gnn.InstanceNorm(CLASSES, track_running_stats=True)), 1, "in training"),
    (Norm(gnn.GraphNorm(CLASSES)), 1, "outputs are up to"),
    (gnn.SGConv(CHANNELS, CLASSES, K=3), 2, "outputs are up to"),
    (gnn.GCN(CHANNELS, HIDDEN, 3, CLASSES), 2, "once less often"),
    (gnn.GCN(CHANNELS, HIDDEN, 2, CLASSES, cached=True), 2, "cached=True"),
    (gnn.DirGNNConv(gnn.SAGEConv(CHANNELS, CLASSES)), 1, "Turning edges round"),
    (gnn.SAGEConv(CHANNELS, CLASSES, flow="target_to_source"), 1, "targets to sources"),
    (gnn.ChebConv(CHANNELS, CLASSES, K=2), 1, "over the out-edges"),
]


def refused(root: Any) -> None:
    for model, layers, message in REFUSED:
        with pytest.raises(Exception, match=message):
            train(root, model.double(), layers, {})


def test_what_would_be_wrong_is_refused(graph, partitions):
    workers(refused, 2, partitions(graph, 2))


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.back = layer, nn.Linear(CLASSES, CHANNELS).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(self.back(self.layer(x, edge_index)), edge_index)


class Computed(nn.Module):
    """Edges that the model makes itself; the same in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.SAGEConv(CHANNELS, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index + 0)


def weighted(root: Any) -> None:
    data = pyg_sar.load_partition(root)
    flow = pyg_sar.partition.message_flow_graphs(data, data.train_mask, 1)
    layer = pyg_sar.distribute(gnn.GCNConv(CHANNELS, CLASSES).double())
    computed = pyg_sar.distribute(Computed().double())
    for layers in (layer, computed, pyg_sar.distribute(gnn.GAT(CHANNELS, 4, 2, CLASSES).double())):
        with pytest.raises(DistributedIndexError, match="before its model was compared"):
            layers(flow.x, flow.edge_index)
    deeper = pyg_sar.distribute(Twice(layer))
    for _ in range(2):
        with pytest.raises(ValueError, match="outputs are up to"):
            check_flow(deeper, data, flow)
        with pytest.raises(DistributedIndexError, match="before its model was compared"):
            deeper(flow.x, flow.edge_index)
    for other in (data, Data()):
        with pytest.raises(TypeError, match="Expected 'flow'"):
            check_flow(layer, data, other)
    check_flow(layer, data, flow)
    check_flow(computed, data, flow)
    expected = computed(data.x, data.edge_index)[data.train_mask]
    found = computed(flow.x, flow.edge_index)[: flow.batch_size]
    assert error(whole(found), whole(expected)) < TOLERANCE
    narrow, seen = pyg_sar.distribute(gnn.GCNConv(64, CLASSES), SARPolicy(wire="int8")), []

    def rounded(model: Any, part: Data) -> Tensor:  # Narrow wires round other rows of either.
        seen.append(model.policy.wire)
        return model(part.x.float().repeat(1, 64)[:, :64], part.edge_index)

    check_flow(narrow, data, flow, forward=rounded)
    assert seen == ["exact"] * 4 and narrow.policy.wire == "int8"
    with pytest.raises(DistributedIndexError, match="weighted sum"):
        layer(flow.x, flow.edge_index, flow.edge_attr[:, 0])
    for kept in (flow.edge_index[:, flow.edge_attr[:, 0] > 0], flow.edge_index + 0):
        with pytest.raises(DistributedIndexError, match="in-edges of all nodes"):
            layer(flow.x, kept)
    for seeds, kind, message in (
        (torch.empty(0, dtype=torch.long), ValueError, "holds no node"),
        (data.train_mask & ~data.train_mask, ValueError, "holds no node"),
        (data.x, ValueError, r"a mask or a list of ids \(got torch.Size"),
        (data.train_mask[:9], ValueError, rf"of {NODES} nodes \(got 9\)"),
        (data.train_mask.byte(), ValueError, r"if it is a mask, pass seeds.bool\(\)"),
        (torch.tensor([NODES]), IndexError, f"index {NODES} is out of bounds"),
        (data.y.new_full((3,), NODES), IndexError, "out of bounds"),
        (torch.tensor([1, 0, 0, 1]), ValueError, r"got 4 of 2 nodes; .* seeds.bool\(\)"),
        (data.y, ValueError, rf"each once \(got {NODES} of {CLASSES} nodes"),
    ):
        with pytest.raises(kind, match=message):
            pyg_sar.partition.message_flow_graphs(data, seeds, 1)
    made = copy.copy(data)
    made.edge_index = data.edge_index + 0
    for other, name in (
        (flow, "edges of a message flow graph as edge_index"),
        (made, "computed edges as edge_index"),
        (Data(edge_index=torch.zeros(2, 1).long()), "Data with Tensor"),
        (3, "int with NoneType"),
    ):
        with pytest.raises(TypeError, match=name):
            pyg_sar.partition.message_flow_graphs(other, torch.tensor([0]), 1)


def of_several_types(root: Any) -> None:
    data = pyg_sar.load_partition(root)
    seeds = data["paper"].train_mask
    message = "of types author, paper, venue, loner.*whole HeteroData.*to_homogeneous"
    with pytest.raises(TypeError, match=message):
        pyg_sar.partition.message_flow_graphs(data, seeds, 2)
    with pytest.raises(TypeError, match=message):
        sample_neighbors(data, seeds, (3,), key=0)


def test_graphs_of_several_types_are_refused(tmp_path):
    pyg_sar.write_partitions(make_hetero(), 2, tmp_path / "hetero", "random")
    parts(of_several_types, 2, tmp_path / "hetero")


@pytest.mark.parametrize("run", [workers, parts])
def test_weighted_degrees_and_wrong_seeds_are_refused(run, graph, partitions):
    run(weighted, 2, partitions(graph, 2))


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_the_command_takes_them_where_they_pay(graph, partitions, model, monkeypatch):
    seen = []
    original = tool.Trainer

    def trainer(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["flow"])
        return original(*args, **kwargs)

    monkeypatch.setattr(tool, "Trainer", trainer)
    graph = copy.copy(graph)
    graph.x = graph.x.float()
    config = tool.RunConfig(
        parts=str(partitions(graph, 2)),
        model=tool.ModelConfig(name=model, hidden=8, heads=2, dropout=0.0),
        train=TrainConfig(epochs=3),
        progress="none",
    )
    how = [{"mfg": "off"}, {"mfg": "on"}, {"mfg": "auto"}]
    off, on, auto = (
        parts(tool.train_worker, 2, dataclasses.replace(config, **given))[0] for given in how
    )
    assert [flow is None for flow in seen] == [True, True, False, False, False, False]
    assert on.losses == pytest.approx(off.losses, rel=1e-5) and on.losses == auto.losses
    normed = dataclasses.replace(config.model, norm="batch")
    parts(tool.train_worker, 2, dataclasses.replace(config, model=normed, mfg="auto"))
    assert seen[-1] is None
