"""Modules that users put into PyG's layers, such as ``GINConv(nn)``: right, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from oracle import Partitions, Result, make_graph, one_pass, parts, whole, workers
from torch import Tensor, nn
from torch_geometric.nn import (
    MLP,
    DeepSetsAggregation,
    EdgeConv,
    GATConv,
    GCNConv,
    GINConv,
    GINEConv,
    MessagePassing,
    NNConv,
    SAGEConv,
)

import pyg_sar
from pyg_sar.errors import DistributedIndexError

GRAPH = make_graph()


class Own(nn.Module):
    """What somebody writes as a module: a function of rows, or of all rows at once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](self, x)


def averaged(module: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.seen += x.detach().abs().mean()
    return x * (1 + module.seen)


KINDS = {
    "by row": lambda m, x: (x * m.weight).tanh(),
    "centred": lambda m, x: x - m.weight * x.mean(0),
    "softmax": lambda m, x: (x * m.weight).softmax(0),
    "counted": lambda m, x: x * m.weight / x.size(0),
    "largest": lambda m, x: x * m.weight / x.detach().abs().max().item(),
    "first": lambda m, x: x + m.weight * x[0],
    "numbered": lambda m, x: x + m.weight * torch.arange(x.size(0)).view(-1, 1),
    "scaled": lambda m, x: m.weight * x / x.norm(),
    "standardised": lambda m, x: (x - x.mean(0)) / (x.std(0) + 1e-3) * m.weight,
    "averaged": averaged,
}


class Updating(GCNConv):
    """A layer of PyG with an ``update`` of the user's."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__(6, 5)
        self.own = own

    def update(self, inputs: Tensor) -> Tensor:
        return self.own(inputs)


class OwnLayer(MessagePassing):
    """A user's layer, whose ``update`` takes its input, too."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__(aggr="max")
        self.own = own

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return self.own(inputs) + x.mean(0)


class Scores(GATConv):
    """Scores of edges of the user's."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__(6, 4, heads=2)
        self.own = own

    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        return self.own(super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size))


def layer_of(place: str, kind: str) -> tuple[nn.Module, tuple[str, ...]]:
    """A layer of PyG with a module of the user's in one of its places."""
    torch.manual_seed(1)
    own = Own(kind)
    mapped = nn.Sequential(nn.Linear(6, 6), own)
    edge: tuple[str, ...] = ()
    if place == "GIN":
        layer: Any = GINConv(mapped)
    elif place == "GIN, of a function":
        layer = GINConv(partial(KINDS[kind], own))
        layer.own = own
    elif place == "GIN, of torch's function":
        layer = GINConv(partial(torch.softmax, dim=0))
    elif place == "GINE":
        layer, edge = GINEConv(mapped, edge_dim=4), ("edge_attr",)
    elif place == "linear":
        layer = SAGEConv(6, 6)
        layer.lin_l = nn.Sequential(layer.lin_l, own)
    elif place == "MLP":
        layer = GINConv(MLP([6, 6, 6], act=own, norm=None))
    elif place == "update":
        layer = Updating(own)
    elif place == "update of an own layer":
        layer = OwnLayer(own)
    elif place == "scores":
        layer = Scores(own)
    elif place == "attention":
        layer = GATConv(6, 3, heads=2)
        layer.lin = nn.Sequential(layer.lin, own)
    return layer.double(), edge


PLACES = (
    *("GIN", "GIN, of a function", "GINE", "linear", "MLP", "attention"),
    *("GIN, of torch's function", "update", "update of an own layer", "scores"),
)


def found_by(place: str, kind: str, root: Path | None) -> Result | str:
    layer, edge = layer_of(place, kind)
    if root is None:
        return one_pass(layer, GRAPH, edge)
    try:
        return one_pass(pyg_sar.distribute(layer), pyg_sar.load_partition(root), edge)
    except DistributedIndexError as error:
        return str(error)


def sweep(root: Path | None, cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    found = {}
    for place, kind in cases:
        result = found_by(place, kind, root)
        found[place, kind] = result if isinstance(result, str) else vars(result)
    return found


@pytest.fixture(scope="module")
def root(partitions: Partitions) -> Path:
    return partitions(GRAPH, 2)


@pytest.mark.parametrize("start", [workers, parts])
def test_they_compute_with_all_nodes(start: Any, root: Path):
    cases = some(list(product(PLACES, KINDS)), start.__name__, 3 if start is parts else 7)
    expected = sweep(None, cases)
    for found in start(sweep, 2, root, cases):
        for case, result in found.items():
            assert not isinstance(result, str), (case, result)
            torch.testing.assert_close(result, expected[case], rtol=1e-9, atol=1e-9, msg=str(case))


# Within messages and aggregations ##############################################


def inner_layers(kind: str) -> dict[str, tuple[nn.Module, tuple[str, ...]]]:
    """Layers that call a module of the user's with edges."""
    torch.manual_seed(1)
    own = lambda i, o: nn.Sequential(nn.Linear(i, o), Own(kind))  # noqa: E731
    sets = DeepSetsAggregation(local_nn=own(6, 6))
    after = DeepSetsAggregation(global_nn=own(6, 6))
    layers = {
        "EdgeConv": (EdgeConv(own(12, 5)), ()),
        "NNConv": (NNConv(6, 3, own(4, 18)), ("edge_attr",)),
        "local": (SAGEConv(6, 5, aggr=sets), ()),
        "global": (SAGEConv(6, 5, aggr=after), ()),
    }
    return {name: (layer.double(), edge) for name, (layer, edge) in layers.items()}


def inner_sweep(root: Path | None, cases: Sequence[Any]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for kind, name in cases:
        layer, edge = inner_layers(kind)[name]
        try:
            layer = layer if root is None else pyg_sar.distribute(layer)
            data = GRAPH if root is None else pyg_sar.load_partition(root)
            found[name, kind] = vars(one_pass(layer, data, edge))
        except DistributedIndexError as error:
            found[name, kind] = str(error)
    return found


def test_in_messages_they_are_right_or_refused(root: Path):
    cases = some(list(product(KINDS, inner_layers("by row"))), "inner", 3)
    expected = inner_sweep(None, cases)
    for found in workers(inner_sweep, 2, root, cases):
        for case, result in found.items():
            if not isinstance(result, str):
                torch.testing.assert_close(result, expected[case], rtol=1e-9, atol=1e-9)
            assert (case[1] == "by row") <= (not isinstance(result, str)), (case, result)


# After distribute() ############################################################


def replaced(root: Path | None) -> list[Tensor]:
    """Modules, and an ``update``, that a layer gets after calls without them."""
    data, found = GRAPH if root is None else pyg_sar.load_partition(root), []
    for place in ("inner", "whole", "update"):
        torch.manual_seed(2)
        model: Any = GINConv(nn.Sequential(nn.Linear(6, 5), nn.ReLU())).double()
        model = model if root is None else pyg_sar.distribute(model)
        model(data.x, data.edge_index)
        if place == "inner":
            model.nn[1] = Own("centred")
        elif place == "whole":
            model.nn = nn.Sequential(nn.BatchNorm1d(6).double(), Own("softmax"))
        else:
            model.update = lambda inputs: inputs - inputs.mean(0)
        out = model(data.x, data.edge_index)
        found.append(whole(out.detach()))
        model.nn = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
        found.append(whole(model(data.x, data.edge_index).detach()))
    return found


def test_modules_that_were_replaced_since(root: Path):
    expected = replaced(None)
    for found in workers(replaced, 2, root):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
