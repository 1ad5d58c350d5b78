"""The gradient-dependence analysis: what is fetched again, computed again, or neither.

Case 1: the backward pass needs no source values. Case 2: it does (SAR, section 3.2). Every case is
checked twice: by what the ledger counted and by the gradients against single-process PyG.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import (
    BUDGET,
    CHANNELS,
    EDGE_DIM,
    OUT,
    Job,
    Partitions,
    Sweep,
    make_graph,
    node_losses,
    threads,
)
from torch import Tensor
from torch.nn import Linear, Parameter
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy

WORLD = 3
POLICIES = (
    SARPolicy(mode=1, prefetch=0),
    SARPolicy(mode=1, prefetch=1, message_budget=BUDGET),
    SARPolicy(mode=2, prefetch=0, message_budget=BUDGET),
)
BYTES = 8  # float64


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph()


@pytest.fixture(scope="module")
def root(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("dependence"))(graph, WORLD, "random")


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


def counts(root: Path, layer: MessagePassing, policy: SARPolicy) -> dict[str, Any]:
    """Two passes, counted; messages are counted by a hook."""
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root, view="local")
    layer = pyg_sar.distribute(copy.deepcopy(layer), policy, view="local")
    calls = [0]
    layer.register_message_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    backward_calls = 0
    with pyg_sar.Ledger(comm) as ledger:
        for _ in range(2):
            x = data.x.clone().requires_grad_()
            out = layer(x, data.edge_index, data.edge_weight, data.edge_attr)
            before = calls[0]
            pyg_sar.mean(node_losses(out, data.n_id)).backward()
            backward_calls += calls[0] - before
    halo = data.edge_index.plan.num_halo * CHANNELS * BYTES
    return {
        "refetches": ledger.received_bytes(kind="refetch") / (2 * halo),
        "fetches": ledger.received_bytes(kind="fetch") / (2 * halo),
        "gradients": ledger.sent_bytes(kind="gradient") / (2 * halo),
        "recomputes": ledger.events("recompute") / 2,
        "backward calls": backward_calls,
        "analyses": ledger.events("analysis"),
    }


def check(
    name: str, fn: Fn, graph: Data, root: Path, aggr: str, refetch: bool, recompute: bool
) -> None:
    layer = Formula(fn, aggr).double()
    sweep = Sweep(WORLD)
    constants = ("edge_weight", "edge_attr")
    sweep.add(name, Job(layer, root, (), POLICIES, constants), graph)
    sweep.check()
    for policy in POLICIES:
        for found in threads(counts, WORLD, root, layer, policy):
            again = policy.mode == 1
            assert found["fetches"] == 1, found
            assert found["gradients"] == 1, found
            assert found["refetches"] == float(refetch and again), found
            assert found["recomputes"] == float(recompute and again), found
            assert (found["backward calls"] > 0) == (recompute and again), found
            assert found["analyses"] == 1, found


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("name", LIGHT)
def test_case_1_neither_fetched_nor_computed_again(name: str, aggr: str, graph: Data, root: Path):
    check(name, LIGHT[name], graph, root, aggr, refetch=False, recompute=False)


@pytest.mark.parametrize("name", HEAVY)
def test_case_1_computed_again_without_values(name: str, graph: Data, root: Path):
    check(name, HEAVY[name], graph, root, "sum", refetch=False, recompute=True)


@pytest.mark.parametrize("name", VALUES)
def test_case_2_fetched_again(name: str, graph: Data, root: Path):
    check(name, VALUES[name], graph, root, "sum", refetch=True, recompute=True)


@pytest.mark.parametrize("name", ESCAPES)
def test_values_that_escape_are_refused(name: str, root: Path):
    """Nobody sees whether each edge's values come back to it alone."""

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        for mode in (1, 2, 3):
            layer = pyg_sar.distribute(
                Formula(ESCAPES[name]).double(), SARPolicy(mode=mode), view="local"
            )
            with pytest.raises(
                pyg_sar.errors.DistributedIndexError, match="hands values of its edges"
            ):
                layer(data.x, data.edge_index, data.edge_weight, data.edge_attr)

    threads(worker, WORLD)


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.parametrize("name", ["source", "constant weight", "difference"])
def test_case_2_maxima_need_values(name: str, aggr: str, graph: Data, root: Path):
    check(name, LIGHT[name], graph, root, aggr, refetch=True, recompute=True)


def test_learned_weights_are_case_2(graph: Data, root: Path):
    """The same sum is case 1 with constant weights and case 2 with weights that need a gradient."""

    def worker(learned: bool) -> dict[str, Any]:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(gnn.GraphConv(CHANNELS, OUT).double(), view="local")
        x = data.x.clone().requires_grad_()
        weight = data.edge_weight.clone().requires_grad_(learned)
        with pyg_sar.Ledger(comm) as ledger:
            layer(x, data.edge_index, weight).sum().backward()
        halo = data.edge_index.plan.num_halo * OUT * BYTES  # rows are mapped first
        return {
            "refetches": ledger.received_bytes(kind="refetch") / halo,
            "recomputes": ledger.events("recompute"),
        }

    assert threads(worker, WORLD, False) == [{"refetches": 0, "recomputes": 0}] * WORLD
    assert threads(worker, WORLD, True) == [{"refetches": 1, "recomputes": 1}] * WORLD


FIRST: dict[str, Callable[[], MessagePassing]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage, max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "gin": lambda: gnn.GINConv(Linear(CHANNELS, OUT)),
    "simple": lambda: gnn.SimpleConv(aggr="mean"),
}


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("name", FIRST)
def test_first_layer_needs_nothing_in_backward(name: str, mode: int, root: Path):
    """Raw features need no gradient: no traffic, no message and nothing kept for it."""
    layer = FIRST[name]().double()

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy(mode=mode), view="local")
        with pyg_sar.Ledger(comm) as ledger:
            out = mine(data.x, data.edge_index)
            held = ledger.resident_rows()
            if out.requires_grad:
                out.sum().backward()
        kinds = ("fetch", "refetch", "gradient", "reduce")
        backward = sum(ledger.received_bytes(phase="backward", kind=kind) for kind in kinds)
        return backward, ledger.events("recompute"), held if mode != 3 else 0

    assert threads(worker, WORLD) == [(0, 0, 0)] * WORLD


@pytest.mark.parametrize("mode", [1, 2])
def test_parameters_of_the_message_need_values_of_raw_features(mode: int, graph: Data, root: Path):
    """No gradient goes to raw features, but a learned map of them needs them again."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        layer = Formula(VALUES["learned map"]).double()
        mine = pyg_sar.distribute(layer, SARPolicy(mode=mode), view="local")
        with pyg_sar.Ledger(comm) as ledger:
            out = mine(data.x, data.edge_index, data.edge_weight, data.edge_attr)
            pyg_sar.mean(node_losses(out, data.n_id)).backward()
        halo = data.edge_index.plan.num_halo * CHANNELS * BYTES
        shares = {
            kind: ledger.received_bytes(kind=kind) / halo
            for kind in ("fetch", "refetch", "gradient")
        }
        return shares, layer.lin.weight.grad

    torch.manual_seed(0)
    expected = {"fetch": 1, "refetch": float(mode == 1), "gradient": 0}
    for shares, gradient in threads(worker, WORLD):
        assert shares == expected
        assert gradient is not None and gradient.abs().max() > 0


def test_workers_agree_where_some_see_no_edges(tmp_path: Path):
    """A worker without nodes or edges can't see what the message needs; the others tell it."""
    data = make_graph(seed=20)
    part = torch.arange(40) % 2 + 1
    root = Partitions(tmp_path)(data, WORLD, part)
    for name, fn in (("mask", VALUES["mask"]), ("source", LIGHT["source"])):
        sweep = Sweep(WORLD)
        constants = ("edge_weight", "edge_attr")
        sweep.add(name, Job(Formula(fn).double(), root, (), POLICIES, constants), data)
        sweep.check()


def test_analysis_follows_what_changes(graph: Data, root: Path):
    """Training or evaluation, frozen parameters, learned weights: each has its own answer."""

    def worker() -> list[int]:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(Formula(VALUES["learned scale"]).double(), view="local")
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

    assert threads(worker, WORLD) == [[1, 0, 1]] * WORLD


def test_a_message_that_changes_its_mind(graph: Data, root: Path):
    """A switch on the layer makes a linear message nonlinear: the first answer must not be used."""

    class Switched(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="sum")
            self.nonlinear = False
            self.register_buffer("fixed", torch.linspace(-1, 1, EDGE_DIM * CHANNELS).view(4, -1))

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, edge_attr=edge_attr)

        def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            gate = (edge_attr @ self.fixed).cos()
            return gate * (x_j.sin() if self.nonlinear else x_j)

    plain = Switched().double()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(copy.deepcopy(plain), POLICIES[1], view="local")
        gradients = []
        for nonlinear in (False, True):
            layer.nonlinear = nonlinear
            x = data.x.clone().requires_grad_()
            layer(x, data.edge_index, data.edge_attr).square().sum().backward()
            gradients.append(x.grad)
        return data.n_id, gradients

    workers = threads(worker, WORLD)
    for step, nonlinear in enumerate((False, True)):
        plain.nonlinear = nonlinear
        x = graph.x.clone().requires_grad_()
        plain(x, graph.edge_index, graph.edge_attr).square().sum().backward()
        assert x.grad is not None
        for n_id, gradients in workers:
            assert torch.allclose(gradients[step], x.grad[n_id], rtol=1e-10, atol=1e-12)


def test_one_target_alone_shows_that_a_message_is_not_linear(tmp_path: Path) -> None:
    """A message that adds to its weighted row, where all edges have the same target."""
    torch.manual_seed(0)
    data = make_graph(2, 0)
    data.edge_index = torch.tensor([[1, 1], [0, 0]])
    data.edge_type = torch.tensor([0, 2])
    del data.edge_attr, data.edge_weight
    plain = gnn.RGATConv(CHANNELS, 4, 3, num_bases=2, mod="additive").double()
    x, y = (data.x.clone().requires_grad_() for _ in range(2))
    expected = plain(x, data.edge_index, data.edge_type)
    expected.square().sum().backward()
    pyg_sar.write_partitions(data, 1, tmp_path / "parts", "random")
    part = pyg_sar.load_partition(tmp_path / "parts", view="local")
    out = pyg_sar.distribute(copy.deepcopy(plain), view="local")(y, part.edge_index, part.edge_type)
    out.square().sum().backward()
    assert torch.allclose(out, expected, rtol=1e-10)
    assert torch.allclose(y.grad, x.grad, rtol=1e-10)
