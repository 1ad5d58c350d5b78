"""The gradient-dependence analysis: what is fetched again, computed again, or neither.

Case 1: the backward pass needs no source values. Case 2: it does (SAR, section 3.2). Every case is
checked twice: by what the ledger counted and by the gradients against single-process PyG.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from combinations import everything, some
from oracle import (
    BUDGET,
    CHANNELS,
    EDGE_DIM,
    MODES,
    OUT,
    Job,
    OutOfSight,
    Partitions,
    Sweep,
    apart,
    error,
    make_graph,
    node_losses,
    whole,
    workers,
)
from torch import Tensor
from torch.nn import Linear, Parameter
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import WorkerError

WORLD = 3
POLICIES = (
    SARPolicy(mode=1, prefetch=0),
    SARPolicy(mode=1, prefetch=1, message_budget=BUDGET),
    SARPolicy(mode=2, prefetch=0, message_budget=BUDGET),
)
BYTES = 8  # float64
BATCHES = 4
EXTREMA = ("source", "constant weight", "difference")
CONSTANTS = ("edge_weight", "edge_attr")


class Formula(MessagePassing):
    """A layer whose message is a function of (layer, x_i, x_j, edge_weight, edge_attr)."""

    def __init__(self, fn: Callable[..., Tensor], aggr: str = "sum") -> None:
        super().__init__(aggr=aggr)
        self.fn = fn
        self.scale = Parameter(torch.linspace(0.5, 1.5, CHANNELS))
        self.lin = Linear(CHANNELS, CHANNELS)
        self.register_buffer("fixed", torch.linspace(-1, 1, EDGE_DIM * CHANNELS).view(EDGE_DIM, -1))
        self.register_buffer("square", torch.linspace(-1, 1, CHANNELS**2).view(CHANNELS, -1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        return self.fn(self, x_i, x_j, edge_weight.view(-1, 1), edge_attr)


class Square(torch.autograd.Function):
    """A function whose backward pass nobody can look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.kept * gradient


def branch(layer: Any, x_i: Tensor, x_j: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return x_j * 2 if x_j.sum().item() > 1e9 else x_j * 3


Fn = Callable[..., Tensor]
# The backward pass needs neither values nor another computation.
LIGHT: dict[str, Fn] = {
    "source": lambda layer, x_i, x_j, w, a: x_j,
    "constant weight": lambda layer, x_i, x_j, w, a: w * x_j,
    "scaled": lambda layer, x_i, x_j, w, a: -2.5 * x_j / 3,
    "reshaped": lambda layer, x_i, x_j, w, a: x_j.view(-1, 2, 3).transpose(1, 2).flatten(1),
    "columns": lambda layer, x_i, x_j, w, a: torch.cat([x_j[:, 3:], x_j[:, :3]], dim=1),
    "with edge attributes": lambda layer, x_i, x_j, w, a: torch.cat([x_j, a], dim=1),
    "difference": lambda layer, x_i, x_j, w, a: x_j - x_i,
    "shifted by a parameter": lambda layer, x_i, x_j, w, a: x_j + layer.scale,
    "constant matrix": lambda layer, x_i, x_j, w, a: w * (x_j @ layer.square),
    "weight of the target": lambda layer, x_i, x_j, w, a: x_j * x_i[:, :1].detach().cos(),
}  # fmt: skip
# No values, but graphs too heavy to keep: computed again, on stand-ins without memory.
HEAVY: dict[str, Fn] = {
    "gate of edge attributes": lambda layer, x_i, x_j, w, a: x_j * (a @ layer.fixed).cos(),
    "gate of the target": lambda layer, x_i, x_j, w, a: x_j * x_i.detach().tanh(),
}
# Values are needed.
VALUES: dict[str, Fn] = {
    "learned scale": lambda layer, x_i, x_j, w, a: x_j * layer.scale,
    "learned map": lambda layer, x_i, x_j, w, a: layer.lin(x_j),
    "relu": lambda layer, x_i, x_j, w, a: x_j.relu(),
    "abs": lambda layer, x_i, x_j, w, a: x_j.abs(),
    "product with target": lambda layer, x_i, x_j, w, a: x_j * x_i,
    "target gated by source": lambda layer, x_i, x_j, w, a: x_i * x_j.detach().sigmoid(),
    "mask": lambda layer, x_i, x_j, w, a: x_j * (x_j > 0),
    "where": lambda layer, x_i, x_j, w, a: torch.where(x_j > 0, 2 * x_j, x_i),
    "masked fill": lambda layer, x_i, x_j, w, a: x_j.masked_fill(x_j < 0, 0.5),
    "clamp": lambda layer, x_i, x_j, w, a: x_j.clamp(min=-0.5),
    "max of row": lambda layer, x_i, x_j, w, a: x_j.max(dim=1, keepdim=True)[0],
    "argmax": lambda layer, x_i, x_j, w, a: x_j.gather(1, x_j.argmax(1, keepdim=True)),
    "sort": lambda layer, x_i, x_j, w, a: x_j.sort(dim=1)[0],
    "lookup": lambda layer, x_i, x_j, w, a: (
        x_i + layer.scale * layer.square[(x_j[:, 0] > 0).long()]
    ),
    "index": lambda layer, x_i, x_j, w, a: layer.scale[(x_j > 0).long()] + x_j,
    "one hot": lambda layer, x_i, x_j, w, a: x_i * (x_j == x_j.amax(1, keepdim=True)),
    "detached copy": lambda layer, x_i, x_j, w, a: x_j * x_j.detach().clone().sin(),
    ".data": lambda layer, x_i, x_j, w, a: x_j * x_j.data.sin(),
    "in place": lambda layer, x_i, x_j, w, a: x_j.clone().mul_(x_j.detach()),
    "custom function": lambda layer, x_i, x_j, w, a: Square.apply(x_j),
    "norm": lambda layer, x_i, x_j, w, a: x_j / x_j.norm(dim=1, keepdim=True),
}  # fmt: skip


# Values that leave the tensor world through memory: nobody sees them pass an operator.
def through_numpy(layer: Any, x_i: Tensor, x_j: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return x_j * torch.from_numpy(np.sin(x_j.detach().numpy()))


def through_array(layer: Any, x_i: Tensor, x_j: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return x_j * torch.from_numpy(np.sin(np.asarray(x_j.detach())))


def through_list(layer: Any, x_i: Tensor, x_j: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return x_j * torch.tensor(x_j.detach().tolist(), dtype=x_j.dtype).view_as(x_j).sin()


ESCAPES: dict[str, Fn] = {
    "numpy()": through_numpy, "asarray()": through_array, "tolist()": through_list,
    ".item()": branch,
}  # fmt: skip


# (name, message, aggregation, whether mode 1 fetches rows again, and computes messages again)
CASES: list[tuple[str, Fn, str, bool, bool]] = [
    *((n, fn, aggr, False, False) for n, fn in LIGHT.items() for aggr in ("sum", "mean")),
    *((n, fn, "sum", False, True) for n, fn in HEAVY.items()),
    *((n, fn, "sum", True, True) for n, fn in VALUES.items()),
    *((n, LIGHT[n], aggr, True, True) for n in EXTREMA for aggr in ("max", "min")),
]


def counting(fn: Callable[..., Tensor], calls: OutOfSight) -> Callable[..., Tensor]:
    def counted(*given: Any) -> Tensor:
        calls.held.append(0)
        return fn(*given)

    return counted


def counts(root: Path, pairs: list[tuple[MessagePassing, SARPolicy]]) -> list[dict[str, Any]]:
    """Two passes of each layer by its policy, counted; so are the runs of messages."""
    data = pyg_sar.load_partition(root)
    halo = data.edge_index.to_local().plan.num_halo * CHANNELS * BYTES
    found = []
    for layer, policy in pairs:
        layer, calls = copy.deepcopy(layer), OutOfSight([])
        layer.fn = counting(layer.fn, calls)
        layer = pyg_sar.distribute(layer, replace(policy, kernels="off"))  # They run no message.
        backward_calls = 0
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            for _ in range(2):
                x = data.x.clone().requires_grad_()
                out = layer(x, data.edge_index, data.edge_weight, data.edge_attr)
                before = len(calls.held)
                node_losses(out).mean().backward()
                backward_calls += len(calls.held) - before
        found.append(
            {
                "refetches": ledger.received_bytes(kind="refetch") / (2 * halo),
                "fetches": ledger.received_bytes(kind="fetch") / (2 * halo),
                "gradients": ledger.sent_bytes(kind="gradient") / (2 * halo),
                "recomputes": ledger.events("recompute") / 2,
                "computed in the backward pass": backward_calls > 0,
                "analyses": ledger.events("analysis"),
            }
        )
    return found


@pytest.mark.parametrize("batch", range(BATCHES))
def test_what_is_fetched_and_computed_again(batch: int, graph: Data, root: Path):
    cases = CASES[batch::BATCHES]
    layers = [Formula(fn, aggr).double() for _, fn, aggr, _, _ in cases]
    sweep, pairs, expected = Sweep(WORLD), [], []
    for (name, _, aggr, *again), layer in zip(cases, layers, strict=True):
        title = f"{name}, {aggr}"
        sweep.add(title, Job(layer, root, (), POLICIES, CONSTANTS), graph)
        policies = some(POLICIES, title, 3)
        pairs += [(layer, policy) for policy in policies]
        expected += [(title, policy, *again) for policy in policies]
    sweep.check()
    with apart():
        results = workers(counts, WORLD, root, pairs)
    for found in results:
        for (title, policy, refetch, recompute), one in zip(expected, found, strict=True):
            again = policy.mode == 1
            assert one == {
                "refetches": float(refetch and again),
                "fetches": 1,
                "gradients": 1,
                "recomputes": float(recompute and again),
                "computed in the backward pass": recompute and again,
                "analyses": 1,
            }, (title, policy)


@pytest.mark.filterwarnings("ignore:Formula :pyg_sar.errors.OneShotWarning")
def test_values_that_escape_are_those_of_the_whole_graph(graph: Data, root: Path):
    """Nobody sees whether each edge's values come back to it alone."""
    sweep = Sweep(WORLD)
    for name, fn in ESCAPES.items():
        sweep.add(name, Job(Formula(fn).double(), root, (), MODES, CONSTANTS), graph)
    sweep.check()


FIRST: dict[str, Callable[[], MessagePassing]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage, max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "gin": lambda: gnn.GINConv(Linear(CHANNELS, OUT)),
    "simple": lambda: gnn.SimpleConv(aggr="mean"),
}


def test_first_layer_needs_nothing_in_backward(root: Path):
    """Raw features need no gradient: no traffic, no message and nothing kept for it."""

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for (name, make), mode in product(FIRST.items(), (1, 2, 3)):
            layer = pyg_sar.distribute(make().double(), SARPolicy(mode=mode))
            with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
                out = layer(data.x, data.edge_index)
                assert mode == 3 or ledger.resident_rows() == 0
                if out.requires_grad:
                    out.sum().backward()
            kinds = ("fetch", "refetch", "gradient", "reduce")
            backward = sum(ledger.received_bytes(phase="backward", kind=kind) for kind in kinds)
            assert (backward, ledger.events("recompute")) == (0, 0), (name, mode)

    with apart():
        workers(worker, WORLD)


def test_parameters_of_the_message_need_values_of_raw_features(root: Path):
    """No gradient goes to raw features, but a learned map of them needs them again."""

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        halo = data.edge_index.to_local().plan.num_halo * CHANNELS * BYTES
        for mode in (1, 2):
            layer = Formula(VALUES["learned map"]).double()
            mine = pyg_sar.distribute(layer, SARPolicy(mode=mode))
            with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
                out = mine(data.x, data.edge_index, data.edge_weight, data.edge_attr)
                node_losses(out).mean().backward()
            for kind, share in {"fetch": 1, "refetch": mode == 1, "gradient": 0}.items():
                assert ledger.received_bytes(kind=kind) == share * halo, (mode, kind)
            gradient = layer.lin.weight.grad
            assert gradient is not None and gradient.abs().max() > 0

    with apart():
        workers(worker, WORLD)


def test_workers_agree_where_some_see_no_edges(tmp_path: Path):
    """A worker without nodes or edges can't see what the message needs; the others tell it."""
    data = make_graph(seed=20)
    part = torch.arange(40) % 2 + 1
    root = Partitions(tmp_path)(data, WORLD, part)
    for name, fn in (("mask", VALUES["mask"]), ("source", LIGHT["source"])):
        sweep = Sweep(WORLD)
        sweep.add(name, Job(Formula(fn).double(), root, (), POLICIES, CONSTANTS), data)
        sweep.check()


def test_analysis_follows_what_changes(graph: Data, root: Path):
    """Training or evaluation, frozen parameters, learned weights: each has its own answer."""

    def worker() -> list[int]:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        layer = pyg_sar.distribute(Formula(VALUES["learned scale"]).double())
        refetched = []

        def run() -> None:
            x = data.x.clone().requires_grad_()
            with pyg_sar.Ledger(comm) as ledger:
                out = layer(x, data.edge_index, data.edge_weight, data.edge_attr)
                out.sum().backward()
            refetched.append(int(ledger.received_bytes(kind="refetch") > 0))

        run()
        layer.requires_grad_(False)
        run()
        layer.requires_grad_(True)
        run()
        return refetched

    with apart():
        assert workers(worker, WORLD) == [[1, 0, 1]] * WORLD


EDGES = 211
SCALE = torch.ones(EDGES, CHANNELS, dtype=torch.float64)


class Outside(MessagePassing):
    """A gate per edge that is no attribute; in case 1 its message is linear in source rows."""

    by_class = SCALE

    def __init__(self, place: str, case: int) -> None:
        super().__init__(aggr="sum")
        self.place, self.case, self.made = place, case, SimpleNamespace(scale=SCALE)
        cell = SCALE

        def look() -> Tensor:
            return cell

        def put(value: Tensor) -> None:
            nonlocal cell
            cell = value

        self.look, self.put = look, put

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, ids: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, ids=ids)

    def message(self, x_j: Tensor, edge_attr: Tensor, ids: Tensor) -> Tensor:
        gate = edge_attr.cos().repeat(1, 2)[:, :CHANNELS]
        return (x_j if self.case == 1 else x_j.sin()) * gate * self.scale()[ids]

    def scale(self) -> Tensor:
        return {
            "global": lambda: SCALE,
            "class": lambda: self.by_class,
            "object": lambda: self.made.scale,
            "closure": self.look,
        }[self.place]()

    def change(self, scale: Tensor) -> None:
        if self.place == "global":
            globals()["SCALE"] = scale
        elif self.place == "class":
            Outside.by_class = scale
        elif self.place == "object":
            self.made.scale = scale
        else:
            self.put(scale)


PLACES = ("global", "class", "object", "closure")


@pytest.fixture(scope="module")
def numbered(graph: Data, partitions: Partitions) -> tuple[Data, Path]:
    graph = copy.copy(graph)
    graph.ids = torch.arange(EDGES)
    return graph, partitions(graph, 2)


def outside_gradient(root: Path, place: str, case: int, column: int | None) -> Tensor:
    """One edge's number changes before the backward pass."""
    data, before = pyg_sar.load_partition(root), SCALE
    layer: Any = pyg_sar.distribute(Outside(place, case))
    x = data.x.clone().requires_grad_()
    loss = layer(x, data.edge_index, data.edge_attr, data.ids).square().sum()
    if column is not None:
        scale = before.clone()
        scale[column] = 3.0
        layer.change(scale)
    loss.backward()
    return whole(x.grad)


def test_what_a_message_reads_outside_of_its_layer(numbered: tuple[Data, Path]):
    graph, root = numbered
    cases = list(product(PLACES, (1, 2)))
    found = workers(lambda: [outside_gradient(root, *case, None) for case in cases], 2)
    for k, (place, case) in enumerate(cases):
        x = graph.x.clone().requires_grad_()
        out = Outside(place, case)(x, graph.edge_index, graph.edge_attr, graph.ids)
        out.square().sum().backward()
        assert all(error(one[k], x.grad) <= 1e-10 for one in found), (place, case)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", (1, 2))
def test_what_changes_outside_of_a_layer(case: int, place: str, numbered: tuple[Data, Path]):
    """No wrong gradients without an error."""
    columns = (EDGES // 3, EDGES - 1)
    for column in columns if everything() else columns[case - 1 : case]:
        with pytest.raises(WorkerError, match="came out differently"):
            workers(outside_gradient, 2, numbered[1], place, case, column)


class Counted(MessagePassing):
    """Counts how often its message runs; ``act`` is a name of ``MESSAGES``."""

    def __init__(self, act: str, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.act, self.lin, self.norm = act, Linear(CHANNELS, CHANNELS), gnn.BatchNorm(CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, runs: list[int]) -> Tensor:
        return self.propagate(edge_index, x=x, runs=runs)

    def message(
        self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int, runs: list[int]
    ) -> Tensor:
        runs.append(1)
        weights = softmax((self.lin(x_i) * x_j).sum(-1, keepdim=True), index, num_nodes=size_i)
        return {
            "plain": lambda: x_j,
            "nonlinear": lambda: x_j.sin(),
            "attention": lambda: weights * x_j,
            "no attention": lambda: weights + x_j,
            "sizes": lambda: x_j / size_i,
            "norm": lambda: self.norm(x_j),
        }[self.act]()


ACTS = ("plain", "nonlinear", "attention", "no attention", "sizes", "norm")


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_a_first_call_runs_the_message_three_times(tmp_path: Path) -> None:
    """Twice to look at it, and once for all edges."""
    data = make_graph()
    pyg_sar.write_partitions(data, 1, tmp_path / "parts", "random")
    part = pyg_sar.load_partition(tmp_path / "parts")
    for act, aggr in product(ACTS, ("sum", "softmax", "median")):
        plain = Counted(act, aggr).double()
        layer, runs = pyg_sar.distribute(copy.deepcopy(plain)), list[int]()
        out = layer(part.x, part.edge_index, runs)
        assert len(runs) <= 3, (act, aggr)
        expected = plain(data.x, data.edge_index, [])
        assert torch.allclose(out.full_tensor(), expected, rtol=1e-10), (act, aggr)


def test_one_target_alone_shows_that_a_message_is_not_linear(tmp_path: Path) -> None:
    """A message that adds to its weighted row, where all edges have the same target."""
    torch.manual_seed(0)
    data = make_graph(2, 0)
    data.edge_index = torch.tensor([[1, 1], [0, 0]])
    data.edge_type = torch.tensor([0, 2])
    del data.edge_attr, data.edge_weight
    plain = gnn.RGATConv(CHANNELS, 4, 3, num_bases=2, mod="additive").double()
    x = data.x.clone().requires_grad_()
    expected = plain(x, data.edge_index, data.edge_type)
    expected.square().sum().backward()
    pyg_sar.write_partitions(data, 1, tmp_path / "parts", "random")
    part = pyg_sar.load_partition(tmp_path / "parts")
    y = part.x.clone().requires_grad_()
    out = pyg_sar.distribute(copy.deepcopy(plain))(y, part.edge_index, part.edge_type)
    out.square().sum().backward()
    assert torch.allclose(out.full_tensor(), expected, rtol=1e-10)
    assert torch.allclose(y.grad.full_tensor(), x.grad, rtol=1e-10)
