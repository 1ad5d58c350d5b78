"""How much Python a steady call of a layer runs, and by which way: bounds on calls, no clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmark_scripts import benchmark
from oracle import OutOfSight, Partitions, alike, make_graph, workers
from test_house import WINGS
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.nn import MaxAggregation, SAGEConv

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.kernels import ops
from pyg_sar.message.layer_facts import draws_nothing
from pyg_sar.tensors import NodeTensor

# files and functions of the package that are entered, and their calls, forward and backward; calls
# that pass or hold the edges, and climbs, forward
BOUNDS = {
    "SAGE": (29, 132, 278, 25, 0),
    "GCN": (33, 136, 272, 30, 0),
    "GAT": (39, 218, 566, 61, 0),
    "MLP": (48, 246, 669, 29, 0),
    "MLP, max": (48, 249, 688, 29, 0),
}

compiled = pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")


def measured(root: str, name: str) -> dict[str, int]:
    calls = sys.modules["calls"] = benchmark("calls")  # PyG looks there for types of arguments.
    seen = calls.steady_calls(root, name, 0)
    for counts in (seen["forward"], seen["backward"]):
        for where in [where for where in counts if where[2] == "Pool.release"]:
            del counts[where]  # Called when memory has died, in this step or another one.
    found: dict[str, int] = {**calls.summary(seen), **calls.way_of(seen, WINGS)}
    return found


@compiled
@pytest.mark.parametrize("name", BOUNDS)
def test_a_steady_call_runs_little_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pyg_sar.write_partitions(benchmark("calls").make_graph(400), 2, tmp_path / "parts")
    found = pyg_sar.launch(measured, 2, str(tmp_path / "parts"), name)[0]
    numbers, bounds = tuple(found.values()), BOUNDS[name]
    assert all(n <= most for n, most in zip(numbers, bounds, strict=True)), (numbers, bounds)


def test_the_engine_stays_small() -> None:
    modules, _, core = benchmark("calls").size()
    assert modules <= 192 and core < 1000


def test_layers_that_draw_nothing_are_known() -> None:
    """Of the others each draw is watched."""

    class Own(SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j * torch.rand(())

    silent = (gnn.GCNConv(4, 4), gnn.GATConv(4, 4), SAGEConv(4, 4, aggr="softmax"))
    assert all(map(draws_nothing, silent))
    patched, hooked = SAGEConv(4, 4), SAGEConv(4, 4)
    patched.message = lambda x_j: x_j * torch.rand(())
    hooked.register_message_forward_hook(lambda *_: torch.rand(()))
    drawing = (gnn.GATConv(4, 4, dropout=0.1), gnn.SuperGATConv(4, 4), Own(4, 4), patched, hooked)
    assert not any(map(draws_nothing, drawing))
    assert not draws_nothing(gnn.GINConv(torch.nn.Sequential(torch.nn.Dropout())))


class Counting(gnn.MessagePassing):
    """Notes the edges of each run of its message, which draws for them."""

    def __init__(self, dropout: float, runs: list[int]) -> None:
        super().__init__()
        self.dropout, self.runs = dropout, OutOfSight(runs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.runs.held.append(x_j.size(0))
        return F.dropout(torch.tanh(x_i * x_j), self.dropout, self.training)


def counted(root: Path, dropout: float) -> list[list[int]]:
    runs: list[int] = []
    layer = pyg_sar.distribute(Counting(dropout, runs))
    data = pyg_sar.load_partition(root)
    found = []
    for _ in range(2):
        del runs[:]
        out = layer(data.x.requires_grad_(), data.edge_index)
        found.append(list(runs))
    del runs[:]
    out.sum().backward()
    return [*found, list(runs)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_first_call_runs_the_message_on_made_up_edges(root: Path, dropout: float) -> None:
    """Twice on few, and once on many, unless it draws."""
    runs = 2 if dropout else 3
    for first, second, backward in workers(counted, 3, root, dropout):
        assert first[runs:] == second == backward and sum(first[:2]) < 100, first


def tiles(root: Path) -> list[int]:
    """How many tiles there are in calls of one kind whose policies differ."""
    layers: Any = pyg_sar.distribute(torch.nn.ModuleList([gnn.ResGatedGraphConv(6, 4).double()]))
    data, calls = pyg_sar.load_partition(root), benchmark("calls")
    found = []
    for budget in (500, 500, 2**20, 2**20, 500):
        layers[0].policy = pyg_sar.SARPolicy(message_budget=budget)
        entered = calls.entered(lambda: layers[0](data.x, data.edge_index))
        found.append(sum(n for where, n in entered.items() if where[2] == "Messages.run_message"))
    return found


def test_a_layer_whose_policy_changes_runs_by_the_new_one(root: Path) -> None:
    for small, again, large, after, last in workers(tiles, 3, root):
        assert small == again == last > 3 == large == after  # one tile of each worker's rows


class Quiet(Counting):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x_i * x_j), self.dropout, self.training)


def modes_entered(root: Path) -> list[int]:
    """How often draws are watched for, in the first call and in a later one, both ways."""
    data, calls = pyg_sar.load_partition(root), benchmark("calls")
    policy = pyg_sar.SARPolicy(message_budget=2000)  # many tiles
    layer = pyg_sar.distribute(Quiet(0.0, []), policy)
    found = []
    for _ in range(2):
        x = data.x.clone().requires_grad_()
        entered = calls.entered(lambda: layer(x, data.edge_index).sum().backward())  # noqa: B023
        watching = [n for (file, *_), n in entered.items() if file.endswith("_draws.py")]
        found.append((sum(watching), sum(entered.values())))
    return found


def test_a_layer_that_was_seen_to_draw_nothing_is_not_watched(root: Path) -> None:
    for first, later in workers(modes_entered, 3, root):
        assert later[0] < first[0] / 2, (first, later)


# What is decided once ########################################################


def doubled(layer: Any, *_: Any) -> Any:
    """A hook: after ``propagate``, ``message`` or ``aggregate``."""
    return _[-1] * 2


def tripled(inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: Any = None) -> Tensor:
    out = inputs.new_zeros(dim_size, inputs.size(1))
    return 3 * out.index_add(0, index, inputs)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooks": lambda layer: layer.register_propagate_forward_hook(doubled),
    "message hooks": lambda layer: layer.register_message_forward_hook(doubled),
    "aggregate hooks": lambda layer: layer.register_aggregate_forward_hook(doubled),
    "own message": lambda layer: setattr(layer, "message", lambda x_j: x_j * x_j),
    "own aggregate": lambda layer: setattr(layer, "aggregate", tripled),
    "own update": lambda layer: setattr(layer, "update", lambda inputs: inputs + 1),
    "maximum": lambda layer: setattr(layer, "aggr_module", MaxAggregation()),
    "backwards": lambda layer: setattr(layer, "flow", "target_to_source"),
}


class Own(gnn.MessagePassing):
    """A layer of a user's, which calls ``propagate`` with tensors of the whole graph."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(*channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * torch.tanh(x_j)


def changed(data: Any, ready: Callable[[Any], Any]) -> list[Any]:
    """Outputs and gradients of layers that change before their first call, or after some."""
    found = []
    for kind, change, calls in product((SAGEConv, Own), CHANGES.values(), (0, 3)):
        torch.manual_seed(0)
        layer = ready(kind(data.num_features, 4).double())
        layer.policy = pyg_sar.SARPolicy(transform_first=False)
        x = data.x.clone().requires_grad_()
        for _ in range(calls):
            layer(x, data.edge_index).sum().backward()
        if calls and isinstance(x, NodeTensor):
            refused = DistributedIndexError if kind is SAGEConv else ValueError
            with pytest.raises(refused, match=r"'x' .*\[39, 6\]"):
                layer(x[:-1], data.edge_index)
        change(layer)
        x.grad = None
        out = layer(x, data.edge_index)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    return found


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_what_changes_after_a_decision_takes_effect(tmp_path: Path) -> None:
    """Hooks, methods, aggregation, flow and tensors of a later call count as in one process."""
    data = make_graph()
    alike(changed, data, Partitions(tmp_path)(data, 2, "random"), 2)
