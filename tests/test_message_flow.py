"""Message flow graphs: the seeds' outputs and gradients are those of the whole graph."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hetero_graphs import make_hetero
from hosted_workers import host
from oracle import (
    CHANNELS,
    CLASSES,
    MODES,
    TOLERANCE,
    Partitions,
    error,
    gradient_scale,
    make_graph,
    node_losses,
    set_policy,
    threads,
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
from pyg_sar.train.flow import call_model

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
    return model(data) if isinstance(model, Own | Relations) else call_model(model, data)


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


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("flow"))


Found = tuple[Tensor, Tensor, dict[str, Tensor]]


def one_step(model: nn.Module, data: Data, rows: Any, ids: Tensor, mean: Callable) -> Found:
    model.zero_grad()
    data = copy.copy(data)
    data.x = data.x.clone().requires_grad_()
    out = call(model, data)[rows]
    mean(node_losses(out, ids)).backward()
    named = model.named_parameters()
    return out.detach(), data.x.grad, {n: p.grad.clone() for n, p in named if p.grad is not None}


def rows_of_layers(model: nn.Module) -> list[int]:
    """Filled in each call of a layer: the rows that it reads."""
    rows: list[int] = []
    for module in model.modules():
        if isinstance(module, gnn.MessagePassing):
            module.register_forward_pre_hook(lambda _, args: rows.append(args[0].size(0)))
    return rows


def steps(root: Any, models: list[nn.Module], policies: Sequence[SARPolicy]) -> list[Any]:
    data = pyg_sar.load_partition(root, view="local")
    found = []
    for model in models:
        flow = pyg_sar.message_flow_graphs(data, data.train_mask, layers_of(model))
        seeds = flow.n_id[: flow.batch_size]
        own = pyg_sar.distribute(copy.deepcopy(model), view="local")
        check_flow(own, data, flow, forward=call)
        rows = rows_of_layers(own)
        for policy in policies:
            set_policy(own, policy)
            step = one_step(own, flow, slice(flow.batch_size), seeds, pyg_sar.mean)
            found.append((step, flow.n_id, seeds, tuple(rows)))
            rows.clear()
    return found


@pytest.mark.parametrize(("world", "run"), [(1, threads), (2, threads), (4, threads), (8, host)])
def test_outputs_gradients_and_rows(world, run, graph, models, partitions):
    policies = MODES if world == 2 else MODES[:1]
    models = models if world == 2 else models[:-1]  # Relations take long.
    workers = run(steps, world, partitions(graph, world), models, policies)
    ids = torch.arange(NODES)[graph.train_mask]
    for k, model in enumerate(models):
        whole = one_step(copy.deepcopy(model), graph, graph.train_mask, ids, torch.mean)
        hops = layers_of(model)
        # By PyG: the nodes within so many hops of a seed.
        near = [len(k_hop_subgraph(ids, n, graph.edge_index)[0]) for n in range(hops + 1)]
        for step in range(len(policies)):
            found = [worker[len(policies) * k + step] for worker in workers]
            out, grad = torch.zeros_like(whole[0]), torch.zeros_like(whole[1])
            for (mine, x_grad, _), n_id, seeds, _ in found:
                out[torch.searchsorted(ids, seeds)] = mine
                grad[n_id] = x_grad
            assert error(out, whole[0]) < TOLERANCE and error(grad, whole[1]) < TOLERANCE
            for (_, _, grads), *_ in found:
                assert grads.keys() == whole[2].keys()
                scale = gradient_scale(whole[2])
                assert all(error(grads[n], g, scale) < TOLERANCE for n, g in whole[2].items())
            computed = [sum(rows) for rows in zip(*(f[3] for f in found), strict=True)]
            assert computed == near[::-1][: len(computed)] and computed[-1] < NODES // 2


def train(root: Any, model: nn.Module, layers: int, arguments: dict[str, Any]) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    flow = pyg_sar.message_flow_graphs(data, data.train_mask, layers) if layers else None
    config = TrainConfig(epochs=4, restore_best=False)
    own = pyg_sar.distribute(copy.deepcopy(model), view="local")
    return pyg_sar.Trainer(own, data, config, flow=flow, **arguments).fit()


def test_the_trainer_trains_the_same(graph, models, partitions):
    root = partitions(graph, 2)
    for model in (models[0], models[3]):
        how = {"forward": call}
        flow, whole = (threads(train, 2, root, model, n, how)[0] for n in (layers_of(model), 0))
        assert flow.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert flow.final == pytest.approx(whole.final, rel=TOLERANCE)


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


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
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
    ],
)
def test_what_would_be_wrong_is_refused(graph, partitions, model, layers, message):
    with pytest.raises(Exception, match=message):
        threads(train, 2, partitions(graph, 2), model.double(), layers, {})


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.back = layer, nn.Linear(CLASSES, CHANNELS).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(self.back(self.layer(x, edge_index)), edge_index)


def weighted(root: Any) -> None:
    data = pyg_sar.load_partition(root, view="local")
    flow = pyg_sar.message_flow_graphs(data, data.train_mask, 1)
    layer = pyg_sar.distribute(gnn.GCNConv(CHANNELS, CLASSES).double(), view="local")
    for layers in (
        layer,
        pyg_sar.distribute(gnn.GAT(CHANNELS, 4, 2, CLASSES).double(), view="local"),
    ):
        with pytest.raises(DistributedIndexError, match="before its model was compared"):
            layers(flow.x, flow.edge_index)
    deeper = pyg_sar.distribute(Twice(layer), view="local")
    for _ in range(2):
        with pytest.raises(ValueError, match="outputs are up to"):
            check_flow(deeper, data, flow)
        with pytest.raises(DistributedIndexError, match="before its model was compared"):
            deeper(flow.x, flow.edge_index)
    with pytest.raises(TypeError, match="Expected 'flow'"):
        check_flow(layer, data, data)
    check_flow(layer, data, flow)
    narrow, seen = (
        pyg_sar.distribute(gnn.GCNConv(64, CLASSES), SARPolicy(wire="int8"), view="local"),
        [],
    )

    def rounded(model: Any, part: Data) -> Tensor:  # Narrow wires round other rows of either.
        seen.append(model.policy.wire)
        return model(part.x.float().repeat(1, 64)[:, :64], part.edge_index)

    check_flow(narrow, data, flow, forward=rounded)
    assert seen == ["exact"] * 4 and narrow.policy.wire == "int8"
    with pytest.raises(DistributedIndexError, match="weighted sum"):
        layer(flow.x, flow.edge_index, flow.edge_attr[:, 0])
    kept = flow.edge_index[:, flow.edge_attr[:, 0] > 0]
    with pytest.raises(DistributedIndexError, match="in-edges of all nodes"):
        layer(flow.x, kept)
    with pytest.raises(ValueError, match="no node on any worker"):
        pyg_sar.message_flow_graphs(data, torch.empty(0, dtype=torch.long), 1)
    with pytest.raises(ValueError, match=r"got torch.uint8; if it is a mask, pass seeds.bool\(\)"):
        pyg_sar.message_flow_graphs(data, data.train_mask.byte(), 1)
    with pytest.raises(ValueError, match="local ids below"):
        pyg_sar.message_flow_graphs(data, torch.tensor([NODES]), 1)
    with pytest.raises(ValueError, match=r"each once \(got 4 of 2 nodes; .* seeds.bool\(\)\)"):
        pyg_sar.message_flow_graphs(data, torch.tensor([1, 0, 0, 1]), 1)
    with pytest.raises(TypeError, match="edges of a message flow graph as edge_index"):
        pyg_sar.message_flow_graphs(flow, torch.tensor([0]), 1)
    for other, found in (
        (Data(edge_index=torch.zeros(2, 1).long()), "Data with Tensor"),
        (3, "int with NoneType"),
    ):
        with pytest.raises(TypeError, match=found):
            pyg_sar.message_flow_graphs(other, torch.tensor([0]), 1)
    keyed = pyg_sar.distribute(
        gnn.GCN(CHANNELS, 4, 1, 3).double(), SARPolicy(random="keyed"), view="local"
    )
    with pytest.raises(ValueError, match="random numbers of the whole graph"):
        check_flow(keyed, data, flow)
    with pytest.raises(DistributedIndexError, match="can't be told for a message flow graph"):
        keyed(flow.x, flow.edge_index)


def of_several_types(root: Any) -> None:
    data = pyg_sar.load_partition(root, view="local")
    seeds = data["paper"].train_mask
    message = "of types author, paper, venue, loner.*whole HeteroData.*to_homogeneous"
    with pytest.raises(TypeError, match=message):
        pyg_sar.message_flow_graphs(data, seeds, 2)
    with pytest.raises(TypeError, match=message):
        sample_neighbors(data, seeds, (3,), key=0)


def test_graphs_of_several_types_are_refused(tmp_path):
    pyg_sar.write_partitions(make_hetero(), 2, tmp_path / "hetero", "random")
    host(of_several_types, 2, tmp_path / "hetero")


def test_weighted_degrees_and_wrong_seeds_are_refused(graph, partitions):
    host(weighted, 2, partitions(graph, 2))


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
        host(tool.train_worker, 2, dataclasses.replace(config, **given))[0] for given in how
    )
    assert [flow is None for flow in seen] == [True, True, False, False, False, False]
    assert on.losses == pytest.approx(off.losses, rel=1e-5) and on.losses == auto.losses
    normed = dataclasses.replace(config.model, norm="batch")
    host(tool.train_worker, 2, dataclasses.replace(config, model=normed, mfg="auto"))
    assert seen[-1] is None
