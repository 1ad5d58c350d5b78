"""Norms inside messages, over all edges of all workers, and norms between the layers of models.

Statistics inside a message are over every edge of the graph. Each edge belongs to one worker, so
that the one-shot path with merged moments is exact, also on a worker without an edge or a node.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from combinations import some
from oracle import (
    ALL_POLICIES,
    CHANNELS,
    EDGE_DIM,
    MODES,
    OUT,
    Job,
    Partitions,
    Sweep,
    alike,
    both,
    hosted,
    make_graph,
    set_policy,
    workers,
)
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import softmax

import pyg_sar
from pyg_sar import SARPolicy

pytestmark = [
    pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning"),
    pytest.mark.filterwarnings("ignore:input's size at dim=0:UserWarning"),
]


class EdgeMLP(MessagePassing):
    """A message as GINEConv's, with an MLP over source, target and edge."""

    def __init__(self, norm: torch.nn.Module, aggr: Any = "add") -> None:
        options = [{"q": 0.3}, {}, {}] if isinstance(aggr, list) else None
        super().__init__(aggr=aggr, aggr_kwargs=options and {"aggrs_kwargs": options})
        self.mlp = Sequential(Linear(2 * CHANNELS + EDGE_DIM, 8), norm, ReLU(), Linear(8, OUT))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j, edge_attr], dim=-1))


class Attention(MessagePassing):
    """Scores with a norm, then a softmax over targets: both in one message."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.score = gnn.MLP([2 * CHANNELS + EDGE_DIM, 8, 1], norm="batch_norm")

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(
        self,
        x_i: Tensor,
        x_j: Tensor,
        edge_attr: Tensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: int | None,
    ) -> Tensor:
        scores = self.score(torch.cat([x_i, x_j, edge_attr], dim=-1))
        return softmax(scores, index, ptr, size_i) * x_j


class Points(torch.nn.Module):
    """PointNet's set layer, whose message is an MLP of PyG with its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        mlp = gnn.MLP([CHANNELS + 3, 8, OUT], norm="batch_norm", plain_last=False)
        self.conv = gnn.PointNetConv(mlp, gnn.MLP([OUT, OUT], norm=None))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, x[:, :3], edge_index)


ATTR = ("edge_attr",)
LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...]]] = {
    "EdgeConv": (lambda: gnn.EdgeConv(Sequential(Linear(12, 8), BatchNorm1d(8), ReLU())), ()),
    "EdgeConv, MLP": (
        lambda: gnn.EdgeConv(gnn.MLP([12, 8, OUT], norm="batch_norm"), aggr="mean"), ()),
    "edge MLP": (lambda: EdgeMLP(BatchNorm1d(8)), ATTR),
    "edge MLP, cumulative": (lambda: EdgeMLP(BatchNorm1d(8, momentum=None), "mean"), ATTR),
    "edge MLP, no statistics": (lambda: EdgeMLP(BatchNorm1d(8, track_running_stats=False)), ATTR),
    "edge MLP, median": (lambda: EdgeMLP(gnn.BatchNorm(8), "median"), ATTR),
    "edge MLP, several": (lambda: EdgeMLP(BatchNorm1d(8), ["quantile", "std", "max"]), ATTR),
    "edge MLP, evaluation": (lambda: EdgeMLP(BatchNorm1d(8)).eval(), ATTR),
    "PointNet": (Points, ()),
    "NNConv": (
        lambda: gnn.NNConv(CHANNELS, OUT, Sequential(
            Linear(EDGE_DIM, 8), BatchNorm1d(8), ReLU(), Linear(8, CHANNELS * OUT))), ATTR),
    "attention": (Attention, ATTR),
    "CGConv": (lambda: gnn.CGConv(CHANNELS, EDGE_DIM, batch_norm=True), ATTR),
    "GraphNorm": (lambda: EdgeMLP(gnn.GraphNorm(8)), ATTR),
    "InstanceNorm": (
        lambda: EdgeMLP(gnn.InstanceNorm(8, affine=True, track_running_stats=True)), ATTR),
    "LayerNorm": (lambda: EdgeMLP(gnn.LayerNorm(8)), ATTR),
    "LayerNorm, node": (lambda: EdgeMLP(gnn.LayerNorm(8, mode="node")), ATTR),
    "PairNorm": (lambda: EdgeMLP(gnn.PairNorm()), ATTR),
    "GraphSizeNorm": (lambda: EdgeMLP(gnn.GraphSizeNorm()), ATTR),
    "MeanSubtractionNorm": (lambda: EdgeMLP(gnn.MeanSubtractionNorm(), "max"), ATTR),
    "single": (lambda: EdgeMLP(gnn.BatchNorm(8, allow_single_element=True)), ATTR),
    "GENConv": (lambda: gnn.GENConv(CHANNELS, OUT, edge_dim=EDGE_DIM), ATTR),
    "GENConv, instance": (
        lambda: gnn.GENConv(CHANNELS, OUT, edge_dim=EDGE_DIM, norm="instance"), ATTR),
    "GINConv": (lambda: gnn.GINConv(gnn.MLP([CHANNELS, 8, OUT], norm="batch_norm")), ()),
    "GINConv, MeanSubtractionNorm": (
        lambda: gnn.GINConv(Sequential(
            Linear(CHANNELS, 8), gnn.MeanSubtractionNorm(), ReLU(), gnn.GraphSizeNorm())), ()),
    "GINConv, single": (
        lambda: gnn.GINConv(Sequential(
            Linear(CHANNELS, 8), gnn.BatchNorm(8, allow_single_element=True))), ()),
    "GINConv, GraphNorm": (lambda: gnn.GINConv(gnn.MLP([CHANNELS, 8, OUT], norm="graph_norm")), ()),
    "DiffGroupNorm": (lambda: EdgeMLP(gnn.DiffGroupNorm(8, 2)), ATTR),
}  # fmt: skip


def assignment(world: int, nodes: int) -> Tensor:
    """Workers of the nodes: the last owns an isolated node, so no edge; of five one owns none."""
    part = torch.randint(world - 1, (nodes,), generator=torch.Generator().manual_seed(world))
    part[-1] = world - 1
    if world > 3:
        part[part == 1] = 0
    return part


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(30, 120, seed=3)


def root_of(world: int, graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, world, assignment(world, graph.num_nodes))


@pytest.mark.parametrize("world", [5, 2, 3])
def test_norms_inside_messages(world: int, graph: Data, partitions: Partitions):
    """Outputs, all gradients and running statistics, in every mode and strategy."""
    sweep, root = Sweep(world), root_of(world, graph, partitions)
    for name, (make, edge) in LAYERS.items():
        torch.manual_seed(4)
        policies = ALL_POLICIES if name == "edge MLP" else MODES
        policies = some(policies, f"norms {name} {world}", 4)
        sweep.add(name, Job(make().double(), root, edge, policies), graph)
    sweep.check(hosted(world))


def test_statistics_inside_a_message_travel_and_rows_of_edges_do_not(
    graph: Data, partitions: Partitions
):
    """Besides mode 3's halo: two collectives of O(F) numbers, whatever the number of edges."""
    layer = EdgeMLP(BatchNorm1d(8)).double()

    def worker(root: Path) -> tuple[int, int]:
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy(mode=3))
        x = data.x.requires_grad_()
        model(x, data.edge_index, data.edge_attr).sum().backward()
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            model(x, data.edge_index, data.edge_attr).sum().backward()
        sent = ledger.sent_bytes
        return sent(kind="statistics", phase="forward"), sent(kind="statistics", phase="backward")

    found = workers(worker, 3, root_of(3, graph, partitions))
    assert found == [((1 + 2 * 8) * 8, 2 * 8 * 8)] * 3


def test_training_evaluation_and_training_again(graph: Data, partitions: Partitions):
    """The strategy follows ``train()`` and ``eval()``; statistics are those of one process."""
    layers = []
    for norm in (BatchNorm1d(8), gnn.InstanceNorm(8, track_running_stats=True)):
        torch.manual_seed(0)
        layers.append(EdgeMLP(norm, "max").double())
    cases = [(layer, SARPolicy(mode=mode)) for layer in layers for mode in (1, 3)]
    cotangents = torch.randn(graph.num_nodes, OUT, dtype=torch.float64)

    def steps(model: torch.nn.Module, data: Data) -> list[Tensor]:
        found = []
        for training in (True, True, False, True, False):
            model.train(training)
            x = data.x.clone().requires_grad_()
            out = model(x, data.edge_index, data.edge_attr)
            (out * cotangents).sum().backward()
            found += [out.detach(), x.grad]
        return [*found, *(b.detach().clone() for b in model.buffers())]

    def all_of(data: Data, ready: Callable[[Any], Any]) -> list[list[Tensor]]:
        found = []
        for layer, policy in cases:
            model = ready(copy.deepcopy(layer))
            set_policy(model, policy)
            found.append(steps(model, data))
        return found

    alike(all_of, graph, root_of(3, graph, partitions), 3)


def test_one_shot_warns_and_says_why(graph: Data, partitions: Partitions):
    root = partitions(graph, 1, torch.zeros(graph.num_nodes, dtype=torch.long))

    def worker(root: Path) -> None:
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(EdgeMLP(gnn.GraphNorm(8)).double())
        with pytest.warns(pyg_sar.errors.OneShotWarning, match=r"over all edges \(GraphNorm\)"):
            model(data.x, data.edge_index, data.edge_attr)

    workers(worker, 1, root)


class Pooled(MessagePassing):
    """A layer of one's own whose forward has norms of rows, and of a row for each of three types.

    The latter are the same on all workers, and are counted once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.types = BatchNorm1d(CHANNELS), BatchNorm1d(CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.rows(x)
        types = torch.arange(x.size(0)) % 3
        means = self.types(gnn.global_mean_pool(x, types, 3).cos())
        return self.propagate(edge_index, x=x) + means[types]

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def test_norms_in_layers_of_ones_own(graph: Data, partitions: Partitions):
    def steps(data: Data, ready: Callable[[Any], Any]) -> list[Any]:
        layer = ready(Pooled().double())
        for _ in range(2):
            x = data.x.clone().requires_grad_()
            out = layer(x, data.edge_index)
            out.sin().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        return [out.detach(), x.grad, *grads, *(b for b in layer.buffers())]

    alike(steps, graph, root_of(3, graph, partitions), 3, both)


# Models ######################################################################


class Between(torch.nn.Module):
    """A model of PyG with a norm between its layers, on one graph or on several."""

    def __init__(self, norm: str, graphs: int, norm_kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.graphs = graphs
        self.model = gnn.GraphSAGE(
            CHANNELS, 8, 3, OUT, norm=norm, norm_kwargs=norm_kwargs, jk="last"
        )

    def forward(self, x: Tensor, edge_index: Tensor, group: Tensor) -> Tensor:
        if not self.graphs:
            return self.model(x, edge_index)
        return self.model(x, edge_index, batch=group, batch_size=self.graphs)


def test_norms_between_the_layers_of_models(graph: Data, partitions: Partitions):
    """``BasicGNN(norm=...)`` hands ``batch`` to the norms that take it."""
    data = graph.clone()
    data.group = torch.arange(data.num_nodes) % 3
    root = partitions(data, 3, assignment(3, data.num_nodes))
    names = ("BatchNorm", "DiffGroupNorm", "GraphNorm", "InstanceNorm", "LayerNorm", "PairNorm")
    models = [
        Between(name, graphs, {"groups": 2} if name == "DiffGroupNorm" else {}).double()
        for name in names
        for graphs in (0, 4)
    ]
    cotangents = torch.randn(data.num_nodes, OUT, dtype=torch.float64)

    def step(model: torch.nn.Module, data: Data) -> list[Tensor]:
        x = data.x.clone().requires_grad_()
        out = model(x, data.edge_index, data.group)
        (out * cotangents).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach(), x.grad, *grads, *model.buffers()]

    def all_of(data: Data, ready: Callable[[Any], Any]) -> list[list[Tensor]]:
        return [step(ready(copy.deepcopy(model)), data) for model in models]

    alike(all_of, data, root, 3, tolerance=1e-9)
