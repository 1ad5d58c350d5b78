"""Gradients of what only messages read, where no edge is: zeros or ``None``, as in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Partitions, make_graph, threads
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch_geometric.data import Data
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GCNConv,
    GINEConv,
    MessagePassing,
    NNConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation

import pyg_sar
from pyg_sar import SARPolicy


class Reads(MessagePassing):
    """Reads parameters in ``message``, a frozen one too, an unread one, and in ``update``."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.unread, self.last = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(x_j).relu() * x_i[:, :3] * self.frozen

    def update(self, inputs: Tensor) -> Tensor:
        return self.last(inputs)


class Updates(MessagePassing):
    """Reads its parameters in ``edge_update`` alone."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(8, 4)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=self.edge_updater(edge_index, x=x))

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], -1)).sigmoid()

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return x_j * e


class Aggregates(MessagePassing):
    """Has its parameter in the aggregation."""

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x.abs())


class Alone(nn.Module):
    """A layer that takes no edge attributes."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    found = [
        Reads(),
        Updates(),
        Aggregates(SoftmaxAggregation(learn=True)),
        Aggregates(PowerMeanAggregation(learn=True)),
        Alone(GCNConv(4, 3)),
        Alone(SAGEConv(4, 3, project=True)),
        Alone(GATConv(4, 3, add_self_loops=False)),
        Alone(EdgeConv(nn.Linear(8, 3))),
        NNConv(4, 3, nn.Linear(2, 12)),
        GINEConv(nn.Linear(4, 3), edge_dim=2, train_eps=True),
        TransformerConv(4, 3, edge_dim=2),
    ]
    return [model.double() for model in found]


def stepped(model: nn.Module, data: Any) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients, and parameters after a step with weight decay."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5)
    model(data.x, data.edge_index, data.edge_attr).square().sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return gradients, [p.detach() for p in model.parameters()]


def trained(root: Path, every: list[nn.Module], view: str, modes: list[int]) -> list[Any]:
    data, found = pyg_sar.load_partition(root, view=view), []
    for model in every:
        for mode in modes:
            own = copy.deepcopy(model)
            dist = pyg_sar.distribute(own, SARPolicy(mode=mode), view=view)
            found.append(stepped(dist, data))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("some", [False, True])
def test_gradients_are_there_where_one_process_has_them(some: bool, tmp_path: Path) -> None:
    """No edge anywhere; and edges of the first worker only."""
    torch.manual_seed(1)
    edges = torch.randint(0, 4, (2, 9)).unique(dim=1) if some else torch.empty(2, 0).long()
    attributes = torch.randn(edges.size(1), 2).double()
    data = Data(torch.randn(10, 4).double(), edges, attributes, num_nodes=10)
    every = models()
    right = [stepped(copy.deepcopy(model), data) for model in every]
    root = Partitions(tmp_path)(data, 2, "contiguous")
    local = threads(trained, 2, root, every, "local", [1, 2, 3])
    whole = pyg_sar.launch(trained, 1, root, every, "global", [1], parts=2)
    for workers, modes in ((local, 3), (whole, 1)):
        for got in workers:
            for number, one in enumerate(got):
                expected, name = right[number // modes], type(every[number // modes]).__name__
                for mine, plain in zip(one[0] + one[1], expected[0] + expected[1], strict=True):
                    assert (mine is None) == (plain is None), name
                    if mine is not None:
                        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10, msg=name)


def transformed(root: Path) -> list[str]:
    data, found = pyg_sar.load_partition(root, view="local"), []
    one = torch.ones(2, dtype=torch.float64)
    for conv in (GCNConv, GATConv, SAGEConv):
        layer = conv(data.num_features, 3).double()
        layer = pyg_sar.distribute(layer, sum_gradients=False, view="local")
        parameters = {name: 2 * p.detach() for name, p in layer.named_parameters()}

        def run(s: Tensor, layer: Any = layer) -> Tensor:
            return layer(data.x * s, data.edge_index).sum()

        for call in (
            lambda run=run: grad(run)(one[0]),
            lambda run=run: vmap(run)(one),
            lambda run=run: jvp(run, (one[0],), (one[0],)),
            lambda run=run: jacrev(run)(one[0]),
        ):
            with pytest.raises(pyg_sar.errors.DistributedIndexError) as error:
                call()
            found.append(str(error.value))
        out = functional_call(layer, parameters, (data.x, data.edge_index))
        layer.load_state_dict(parameters)
        expected = layer(data.x, data.edge_index)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10, msg=conv.__name__)
    return found


def test_transforms_of_functions_are_refused(tmp_path: Path) -> None:
    """``torch.func`` names the transform and what to do; ``functional_call`` is right."""
    root = Partitions(tmp_path)(make_graph(), 2, "random")
    for worker in threads(transformed, 2, root):
        for text in worker:
            assert "torch.func." in text and ("autograd.grad" in text or "loop" in text), text
