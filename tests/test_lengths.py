"""Messages and aggregations by which an edge's place, or how many edges there are, decides.

The constants are beyond the few edges that a message is looked at with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Partitions, error, make_graph, whole, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import Aggregation, MessagePassing
from torch_geometric.utils import add_self_loops, softmax

import pyg_sar

NODES, EDGES, CHANNELS = 90, 400, 6
pytestmark = pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")


def by_error(x: Tensor) -> Tensor:
    try:
        return x * x[250].tanh()
    except IndexError:
        return x


def scaled_write(x: Tensor) -> Tensor:
    out = x.clone()
    out[200:] *= -1
    return out


def padded(x: Tensor) -> Tensor:
    rows = torch.cat([x, x.new_zeros(max(4000 - x.size(0), 0), CHANNELS)])
    return torch.cat([rows[:150], 2 * rows[150:]])[: x.size(0)]


MESSAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "two slices": lambda x: torch.cat([x[:150], 3 * x[150:]]),
    "from the end": lambda x: torch.cat([x[:-120], 3 * x[-120:]]),
    "write": scaled_write,
    "pieces": lambda x: torch.cat([(k + 1) * part for k, part in enumerate(x.split(128))]),
    "size": lambda x: x.tanh() if x.size(0) > 200 else x,
    "shape": lambda x: x.tanh() if x.shape[0] >= 200 else x,
    "len": lambda x: x.tanh() if len(x) > 200 else x,
    "number of elements": lambda x: x.tanh() if x.numel() > 200 * CHANNELS else x,
    "least": lambda x: x / min(x.size(0), 250),
    "ratio": lambda x: x * max(1.0, x.size(0) / 200),
    "logarithm": lambda x: x * (math.log(x.size(0)) if x.size(0) > 150 else 1.0),
    "whole number": lambda x: x.tanh() if int(x.size(0)) > 200 else x,
    "error": by_error,
    "difference": lambda x: x.tanh() if x.size(0) - 200 > 0 else x,
    "quotient": lambda x: x.tanh() if x.size(0) // 200 else x,
    "remainder": lambda x: x.tanh() if divmod(x.size(0), 200)[0] else x,
    "text": lambda x: x.tanh() if len(str(x.size(0))) > 2 else x,
    "table": lambda x: x * (1.0 if x.size(0) < 64 else {64: 2.0}.get(x.size(0) & 64, 3.0)),
    "bytes": lambda x: x.tanh() if x.nbytes > 200 * CHANNELS * 8 else x,
    "shape of all": lambda x: x.tanh() if x.shape.numel() > 200 * CHANNELS else x,
    "padded": padded,
    "made in Python": lambda x: (
        x * torch.tensor([[1.0 + (k > 150)] for k in range(x.size(0))]).to(x)
    ),
    "unsafe pieces": lambda x: torch.cat(
        [(k + 1) * part for k, part in enumerate(torch.unsafe_split(x, 150))]
    ),
}
NO_MATTER: dict[str, Callable[[Tensor], Tensor]] = {
    "lengths": lambda x: x.view(x.size(0), 2, -1).sum(1).repeat(1, 2) * x.new_ones(x.shape[0], 1),
    "empty": lambda x: x if x.size(0) == 0 else x.tanh(),
    "same length": lambda x: x.sin() if x.size(0) == x.tanh().shape[0] else x,
    "columns": lambda x: torch.cat([x[:, :2], 2 * x[:, 2:]], -1) * x.size(1),
    "by columns": lambda x: x.topk(2, -1)[0].sum(-1, keepdim=True) * x.sort(-1)[0].abs(),
    "repeated": lambda x: x * torch.arange(CHANNELS).to(x).view(1, -1).repeat(x.size(0), 1),
    "whole slice": lambda x: x[:][: x.size(0)] * torch.zeros(x.shape).add_(1.5).to(x),
}


class Layer(MessagePassing):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.lin = fn, torch.nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor) -> Tensor:
        return self.fn(x_j)


class OfLoops(Layer):
    """Self-loops have a weight of their own."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.loops = x.size(0)
        return super().forward(x, add_self_loops(edge_index, num_nodes=x.size(0))[0])

    def message(self, x_j: Tensor) -> Tensor:
        return torch.cat([x_j[: -self.loops], 3 * x_j[-self.loops :]])


class Counting(Layer):
    """The number of nodes is that of the graph, by whatever name it is passed."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), num_nodes=x.size(0))

    def message(self, x_j: Tensor, index: Tensor, num_nodes: int) -> Tensor:
        score = softmax(x_j[:, :1], index, num_nodes=num_nodes)
        return self.fn(score * x_j / num_nodes)


class Backwards(Layer):
    """PyG's compiled ``propagate`` reads the first of a pair as ``x_j``, whatever the flow."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__(fn)
        self.flow = "target_to_source"

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=(self.lin(x), x))

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return self.fn(x_j * x_i.tanh())


class Net(torch.nn.Module):
    def __init__(self, columns: int, out: int = CHANNELS) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(columns, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if x.size(0) < 200 else self.lin(x).tanh()


class OwnSum(Aggregation):
    def forward(
        self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
    ) -> Tensor:
        out = self.reduce(x, index, ptr, dim_size, dim, "sum")
        return out.tanh() if dim_size > 50 else out


class Aggregates(Layer):
    """An ``aggregate()`` of its own."""

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        assert dim_size is not None
        out = inputs.new_zeros(dim_size, CHANNELS).index_add(0, index, inputs)
        return self.fn(out)


class CutInputs(Aggregates):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        inputs = torch.cat([inputs[:280], 3 * inputs[280:]])
        return super().aggregate(inputs, index, dim_size)


def with_aggregation() -> Layer:
    layer = Layer(torch.tanh)
    layer.aggr_module = OwnSum()
    return layer


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: lambda fn=fn: Layer(fn) for name, fn in (MESSAGES | NO_MATTER).items()},
    "loops": OfLoops,
    "number of nodes": lambda: Counting(torch.tanh),
    "pair": lambda: Backwards(torch.tanh),
    "pair of all edges": lambda: Backwards(lambda x: x - x.mean(0)),
    "EdgeConv": lambda: gnn.EdgeConv(Net(2 * CHANNELS)),
    "own aggregation": with_aggregation,
    "aggregate, slices": lambda: Aggregates(lambda o: torch.cat([o[:30], 3 * o[30:]])),
    "aggregate, inputs": lambda: CutInputs(torch.tanh),
}


AGGREGATIONS: dict[str, Callable[[], Aggregation]] = {
    "attention": lambda: gnn.AttentionalAggregation(Net(CHANNELS, 1)),
    "sets": lambda: gnn.DeepSetsAggregation(Net(CHANNELS), Net(CHANNELS)),
}


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(num_nodes=NODES, num_edges=EDGES)


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, 2)


def trained(layer: torch.nn.Module, x: Tensor, edge_index: Any) -> list[Tensor]:
    out = layer(x, edge_index)
    out.square().sum().backward()
    return [whole(out), *[p.grad for p in layer.parameters()]]


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in AGGREGATIONS:
        return gnn.SAGEConv(CHANNELS, CHANNELS, aggr=AGGREGATIONS[name]()).double()
    return LAYERS[name]().double()


def test_places_and_lengths_are_those_of_the_whole_graph(graph: Data, root: Path) -> None:
    """All of them, in one run of two workers; networks of an aggregation, too."""
    names = [*LAYERS, *AGGREGATIONS]

    def worker() -> list[Any]:
        data = pyg_sar.load_partition(root)
        layers = [pyg_sar.distribute(made(name)) for name in names]
        return [trained(layer, data.x, data.edge_index) for layer in layers]

    expected = [trained(made(name), graph.x, graph.edge_index) for name in names]
    for found in workers(worker, 2):
        for name, one, other in zip(names, found, expected, strict=True):
            assert max(map(error, one, other)) <= 1e-10, name


@pytest.mark.filterwarnings("error::pyg_sar.errors.OneShotWarning")
def test_lengths_alone_need_no_whole_graph(root: Path) -> None:
    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for name in NO_MATTER:
            pyg_sar.distribute(made(name))(data.x, data.edge_index)

    workers(worker, 2)


BEYOND: dict[str, Callable[[Tensor], Tensor]] = {
    "quotient": lambda x: x.tanh() if x.size(0) // 4500 else x,
    "range": lambda x: x.tanh() if 4500 in range(x.size(0)) else x,
    "list": lambda x: x.tanh() if len([0] * x.size(0)) > 4500 else x,
    "bits": lambda x: x.tanh() if x.size(0) >> 12 else x,
    "text": lambda x: x.tanh() if str(x.size(0)) > "45" else x,
    "table": lambda x: x.tanh() if x.size(0) in frozenset(range(4500, 20000)) else x,
    "bytes": lambda x: x.tanh() if x.nbytes > 4500 * CHANNELS * 8 else x,
}


def beyond(name: str, data: Any) -> list[Any]:
    torch.manual_seed(0)
    layer: Any = Layer(BEYOND[name]).double()
    layer = layer if type(data.x) is Tensor else pyg_sar.distribute(layer)
    return [whole(layer(data.x, data.edge_index).detach())]


def all_beyond(root: Path) -> list[list[Any]]:
    data = pyg_sar.load_partition(root)
    return [beyond(name, data) for name in BEYOND]


def test_numbers_beyond_thousands_of_edges(tmp_path: Path) -> None:
    """A worker has about 3,000 of the 9,000 edges."""
    data = make_graph(num_nodes=900, num_edges=9000)
    for every in workers(all_beyond, 3, Partitions(tmp_path)(data, 3, "random")):
        for name, found in zip(BEYOND, every, strict=True):
            assert error(found[0], beyond(name, data)[0]) <= 1e-10, name
