"""The contract, rules 4 and 5: random, autocast and running state; dtypes of accumulators."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from combinations import some
from contract_case import WORLD, Case, Nonlinear, check, gradients, leaf, made, one_step
from oracle import (
    ALL_POLICIES,
    BUDGET,
    CHANNELS,
    EDGE_DIM,
    MODES,
    OUT,
    TOLERANCE,
    Job,
    Partitions,
    Result,
    Sweep,
    assert_small,
    both,
    error,
    errors,
    make_graph,
    node_losses,
    parts,
    run_jobs,
    set_policy,
    single_process,
    whole,
    workers,
)
from torch import Tensor
from torch.nn import LayerNorm, Linear, ReLU, Sequential
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import DistributedIndexError, WorkerError

REMADE = {"mode": 1, "prefetch": 0, "message_budget": BUDGET}
AHEAD = {"mode": 1, "prefetch": 1, "message_budget": BUDGET}
KEPT = {"mode": 2, "prefetch": 1, "message_budget": BUDGET}


# Rule 4: random numbers ######################################################


class DropsMessages(MessagePassing):
    """Dropout in message: of source features, then of a learned function of them."""

    def __init__(self, aggr: str = "sum", plain: bool = False) -> None:
        super().__init__(aggr=aggr)
        self.lin = Linear(CHANNELS, OUT)
        self.plain = plain

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x) if self.plain else x)

    def message(self, x_j: Tensor) -> Tensor:
        x_j = F.dropout(x_j, 0.4, self.training)
        return x_j if self.plain else F.dropout(self.lin(x_j).tanh(), 0.3, self.training)


class DropsEdges(MessagePassing):
    """Dropout and noise in edge_update, and noise in message."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.score = Linear(2 * CHANNELS, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        score = self.score(torch.cat([x_i, x_j], -1)).sigmoid()
        return F.dropout(score + 0.1 * torch.rand_like(score), 0.3, self.training)

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate * x_j.sin() + 0.01 * torch.randn_like(x_j)


RANDOM: dict[str, Callable[[], MessagePassing]] = {
    "messages": DropsMessages,
    "messages, plain": lambda: DropsMessages(plain=True),
    "messages, max": lambda: DropsMessages("max"),
    "edges": DropsEdges,
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, dropout=0.4),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, dropout=0.4, add_self_loops=False),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, dropout=0.4),
}


SAME = [SARPolicy(random="same", **how) for how in (REMADE, AHEAD, KEPT, {"mode": 3})]


def drop(layer: Any, data: Data) -> Any:
    """A pass that draws as one process; the second seed draws other numbers; evaluation none."""
    found = []
    for seed in (3, 50):
        torch.manual_seed(seed)
        layer.zero_grad()
        x = leaf(data)
        out = layer(x, data.edge_index)
        state = torch.get_rng_state()
        node_losses(out).mean().backward()
        assert torch.equal(torch.get_rng_state(), state), "the backward pass draws no numbers"
        found.append((out.detach(), x.grad, gradients(layer), state.long()))
    assert not torch.equal(whole(found[0][0]), whole(found[1][0])), "no dropout happened"
    layer.eval()
    with torch.no_grad():
        return found, layer(data.x, data.edge_index)


@pytest.mark.parametrize("batch", range(2))
def test_rule_4_messages_draw_what_one_process_draws(batch: int, graph: Data, root: Path):
    """Also those that are computed again, whatever is fetched ahead, to the bit."""
    names = list(RANDOM)[batch::2]
    policies = {name: (*SAME[:2], *some(SAME[2:], name, 2)) for name in names}
    cases = {name: Case(drop, RANDOM[name], policies[name]) for name in names}
    for found in check(cases, graph, root, parts if batch else workers):
        results = iter(found)
        for name in names:
            remade, ahead, *_ = islice(results, len(policies[name]))
            for mine, other in zip(leaves(remade), leaves(ahead), strict=True):
                assert torch.equal(mine, other), name


def leaves(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if t is not None]


def slope_error(layer: Any, data: Data) -> float:
    """The directional derivative against a central difference, relative; draws of a worker's own.

    Other numbers on each worker, the same in each call.
    """

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        layer.__dict__.pop("_global_calls", None)
        return node_losses(layer(x, data.edge_index)).mean()

    draw = torch.Generator().manual_seed(0)
    x, parameters = leaf(data), list(layer.parameters())
    ways = [torch.randn(t.shape, generator=draw, dtype=t.dtype) for t in (x, *parameters)]
    slopes = torch.autograd.grad(loss(x), [x, *parameters])
    slope = sum(float((g * way).sum()) for g, way in zip(slopes, ways, strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):  # ahead, and as far behind
            x = x + step * ways[0]
            for parameter, way in zip(parameters, ways[1:], strict=True):
                parameter.add_(way, alpha=step)
            values.append(float(loss(x)))
    difference = (values[0] - values[1]) / 2e-5
    return abs(slope - difference) / max(abs(difference), 1e-3)


def test_rule_4_gradients_are_right_where_each_worker_draws_its_own(root: Path):
    def worker() -> dict[str, float]:
        data, found = pyg_sar.load_partition(root), {}
        for name, make in RANDOM.items():
            for how in some((REMADE, KEPT, {"mode": 3}), name):
                torch.manual_seed(5)
                layer = pyg_sar.distribute(make().double(), SARPolicy(**how))
                found[f"{name}, {how}"] = slope_error(layer, data)
        return found

    for found in workers(worker, WORLD):
        assert_small(found, 1e-5, "slopes")


# Rule 4: autocast ############################################################


CAST: dict[str, Callable[[], MessagePassing]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage, max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
    "learned": Nonlinear,
    "learned, max": lambda: Nonlinear("max"),
    "edge conv": lambda: gnn.EdgeConv(Sequential(Linear(2 * CHANNELS, 8), ReLU(), Linear(8, OUT))),
}


def cast_pass(layer: Any, data: Data, cache: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """One pass under autocast."""
    layer.zero_grad()
    x = leaf(data)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        out = layer(x, data.edge_index)
    # As recommended, the backward pass runs outside: the state is that of the forward pass.
    node_losses(out.float()).mean().backward()
    return whole(out.detach()), whole(x.grad), gradients(layer)


@pytest.mark.parametrize("cache", [False, True])
def test_rule_4_autocast(cache: bool, partitions: Partitions):
    """Mode 1 equals mode 2 in dtype and value, and both equal PyG as far as bfloat16 goes.

    With the cache a cast made without a graph must not be reused where a gradient is wanted.
    """
    data = make_graph(dtype=torch.float32)
    root = partitions(data, WORLD, "random")
    cases = {name: Case(one_step, CAST[name]) for name in some(list(CAST), f"cache {cache}", 2)}

    def worker() -> Any:
        mine, found = pyg_sar.load_partition(root), []
        for case in cases.values():
            layer = pyg_sar.distribute(made(case).float())
            found.append([])
            for how in (REMADE, KEPT, {"mode": 3}):
                set_policy(layer, SARPolicy(**how))
                found[-1].append(cast_pass(layer, mine, cache))
        return found

    runs = workers(worker, WORLD)
    for k, (name, case) in enumerate(cases.items()):
        exact, *_ = case.use(made(case), make_graph())
        out, x_grad, grads = cast_pass(made(case).float(), data, cache)
        scale = max(float(g.abs().max()) for g in grads.values())
        for rank, found in enumerate(runs):
            remade, kept, _ = found[k]
            assert torch.equal(remade[0], kept[0]), name
            least = 2**-8 if cache else 0.0  # with it, sums of gradients are rounded elsewhere
            assert error(remade[1], kept[1]) <= least, name
            assert all(error(remade[2][n], kept[2][n], scale) <= least for n in grads), name
            for mine in found[k]:
                where = (name, rank)
                assert (mine[0].dtype, mine[1].dtype) == (out.dtype, x_grad.dtype), where
                assert error(mine[0].double(), exact) <= 2 * error(out.double(), exact) + 2**-8
                assert error(mine[1], x_grad) <= 0.1, where
                for key, gradient in grads.items():
                    assert error(mine[2][key], gradient, scale) <= 0.1, (key, *where)


# Rule 4: running statistics ##################################################


class Counts(MessagePassing):
    """Counts what its message is called with: in place, by a new tensor, and in Python."""

    def __init__(self, calls: bool) -> None:
        super().__init__(aggr="sum")
        self.lin, self.calls = Linear(CHANNELS, OUT), calls
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("made", torch.zeros((), dtype=torch.long))
        self.number, self.log = 0, {"calls": [0]}

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        count = 1 if self.calls else x_j.size(0)
        self.seen += count
        self.made = self.made + count
        self.number += count
        self.log["calls"][0] += count
        return self.lin(x_j).tanh()


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_rule_4_state_of_a_message_is_updated_once(root: Path):
    """Neither the analysis nor tiles nor the second computation count.

    What depends on the edges is of the whole graph's, with whose tensors the message runs.
    """

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for policy in ALL_POLICIES:
            for calls, each in ((True, 1), (False, data.num_edges)):
                layer = pyg_sar.distribute(Counts(calls).double(), policy)
                for epoch in (1, 2):
                    layer(leaf(data), data.edge_index).sum().backward()
                    found = [int(layer.seen), int(layer.made), layer.number, *layer.log["calls"]]
                    assert found == [epoch * each] * 4, (policy, found)

    workers(worker, WORLD)


class Modes(MessagePassing):
    """A message that reads attributes of every kind."""

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.net, self.function = Linear(CHANNELS, CHANNELS), torch.tanh
        self.scale, self.pair, self.kind, self.factor = 2.0, (1.0, 2.0), [1, [2]], torch.tensor(1.5)
        self.table = {"first": 1.5, "inner": {"a": 1.0}}
        self.register_buffer("shift", torch.ones(CHANNELS))
        self.register_buffer("table_of_rows", torch.ones(2**15, CHANNELS))
        self.base, self.array, self.early = torch.ones(CHANNELS), np.ones(2), 2.0
        self.settings = SimpleNamespace(rate=1.0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        sent = self.function(self.net(x_j) * x_i * self.scale) * self.pair[1] * self.factor
        sent = sent + (x_j + self.shift + self.base + self.table_of_rows[3]).tanh()
        factors = self.array[1], self.settings.rate, getattr(self, "early", 5.0)
        sent = sent * float(np.prod(factors)) * (3.0 if hasattr(self, "late") else 1.0)
        sent = sent * self.table["first"] + self.table["inner"].get("a", 3.0) * x_j.sin()
        return sent if isinstance(self.kind[1], list) else sent * x_j


def new_table(layer: Any) -> None:
    layer.table["first"] = 7.0


def other_names(layer: Any) -> None:
    layer.table["inner"] = {"b": 1.0}


CHANGES: dict[str, Callable[[Any], None]] = {
    "a number": lambda layer: setattr(layer, "scale", 5.0),
    "a tuple": lambda layer: setattr(layer, "pair", (3.0, 4.0)),
    "a structure": lambda layer: setattr(layer, "kind", [[1], 2]),
    "a structure in place": lambda layer: layer.kind.__setitem__(slice(None), [[1], 2]),
    "a tensor": lambda layer: setattr(layer, "factor", torch.tensor(4.0)),
    "a function": lambda layer: setattr(layer, "function", torch.sigmoid),
    "a dict in place": new_table,
    "names of a dict": other_names,
    "a module": lambda layer: setattr(layer, "net", Linear(CHANNELS, CHANNELS).double()),
    "an aggregation": lambda layer: setattr(layer, "aggr_module", gnn.aggr.MulAggregation()),
    "a buffer in place": lambda layer: layer.shift.add_(2.0),
    "a tensor in place": lambda layer: layer.base.add_(2.0),
    "an array in place": lambda layer: layer.array.fill(3.0),
    "a field of an object": lambda layer: setattr(layer.settings, "rate", 4.0),
    "one that was missing": lambda layer: setattr(layer, "late", True),
    "one that is deleted": lambda layer: delattr(layer, "early"),
}
WRITTEN: dict[str, Callable[[Any], None]] = {
    "Modes.table_of_rows": lambda layer: layer.table_of_rows.add_(2.0),
    "Modes.net.bias": lambda layer: layer.net.bias.data.add_(2.0),
}


AGGREGATIONS = "sum", "std", "median"


def changed_before_backward(
    data: Data, ready: Callable[[Any], Any], mode: int
) -> dict[str, list[Any]]:
    """Outputs and gradients where an attribute is another by the backward pass, and a call more."""
    found = {}
    for aggr, (name, change) in some([*product(AGGREGATIONS, CHANGES.items())], f"{mode}", 5):
        torch.manual_seed(0)
        layer, x = ready(Modes(aggr).double()), leaf(data)
        given, out = list(layer.parameters()), layer(x, data.edge_index)
        change(layer)
        loss = node_losses(out).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        after = layer(x.detach(), data.edge_index).detach()
        gradients = [p.grad for p in given]
        found[f"{aggr}, {name}"] = [whole(out.detach()), whole(x.grad), *gradients, whole(after)]
    return found


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rule_4_attributes_are_those_of_the_forward_pass(mode: int, graph: Data, root: Path):
    def worker() -> Any:
        ready = partial(pyg_sar.distribute, policy=SARPolicy(mode=mode))
        return changed_before_backward(pyg_sar.load_partition(root), ready, mode)

    expected = changed_before_backward(graph, lambda layer: layer, mode)
    for found in both(worker, WORLD):
        wrong = {name: max(map(error, numbers, expected[name])) for name, numbers in found.items()}
        assert_small(wrong, TOLERANCE, f"mode {mode}")


@pytest.mark.parametrize("name", WRITTEN)
def test_rule_4_what_is_not_copied_is_an_error_where_it_is_written(name: str, root: Path):
    def worker() -> None:
        data = pyg_sar.load_partition(root)
        layer = pyg_sar.distribute(Modes("std").double())
        loss = node_losses(layer(leaf(data), data.edge_index)).mean()
        WRITTEN[name](layer)
        with pytest.raises(DistributedIndexError, match=f"{name} was written in place"):
            loss.backward()

    parts(worker, WORLD)


class Factored(MessagePassing):
    """Has a message whose gradient reads a buffer, and maybe its sources."""

    def __init__(self, squared: bool) -> None:
        super().__init__(aggr="sum")
        self.squared = squared
        self.register_buffer("factor", torch.full((CHANNELS,), 2.0))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return (x_j.square() if self.squared else x_j) * self.factor


@pytest.mark.parametrize("mode, squared", [(1, False), (2, False), (2, True)])
def test_rule_4_what_a_kept_graph_reads_is_an_error_where_it_is_written(
    mode: int, squared: bool, graph: Data, root: Path
) -> None:
    """As in one process, where PyTorch says so."""

    def error_of(data: Data, layer: Any) -> str:
        out = layer(leaf(data), data.edge_index)
        layer.factor.mul_(3.0)
        with pytest.raises(RuntimeError) as raised:
            node_losses(out).mean().backward()
        return str(raised.value)

    def worker() -> str:
        layer = pyg_sar.distribute(Factored(squared).double(), SARPolicy(mode=mode))
        return error_of(pyg_sar.load_partition(root), layer)

    assert "modified by an inplace operation" in error_of(graph, Factored(squared).double())
    for found in parts(worker, WORLD):
        assert "message reads was changed in place" in found


class Scaled(MessagePassing):
    """Reads buffers before it aggregates, and within its message."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.utils.parametrizations.orthogonal(Linear(CHANNELS, CHANNELS))
        self.register_buffer("scale", torch.arange(1.0, CHANNELS + 1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x * self.scale)) * self.scale

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i.sigmoid() * x_j * self.scale


def edge_norm(norm: torch.nn.Module) -> Callable[[], MessagePassing]:
    return lambda: gnn.EdgeConv(Sequential(Linear(2 * CHANNELS, 8), norm, ReLU(), Linear(8, OUT)))


def test_buffers_and_norms_of_each_edge(root: Path, graph: Data):
    """Autograd has saved buffers, which nobody writes. A norm per edge is a message like others."""
    sweep = Sweep(WORLD)
    sweep.add("buffers", Job(Scaled().double(), root, policies=MODES), graph)
    sweep.add("layer norm", Job(edge_norm(LayerNorm(8))().double(), root), graph)
    sweep.check("parts")  # Parametrized layers don't go to processes.


# Rule 5: dtypes ##############################################################


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rule_5_dtypes(dtype: torch.dtype, partitions: Partitions):
    """Accumulators have the messages' dtype; errors are at most twice those of plain PyG.

    Both against float64 (the tolerance rule of flash-attention).
    """
    data, exact_data = make_graph(dtype=dtype), make_graph()
    exact_data.x = data.x.double()
    root = partitions(data, WORLD, "random")
    jobs = [
        Job(make().to(dtype), root, policies=some(MODES, f"{dtype} {name}", 4))
        for name, make in CAST.items()
    ]
    found = workers(run_jobs, WORLD, jobs)
    for k, (name, job) in enumerate(zip(CAST, jobs, strict=True)):
        plain = single_process(job.layer, data)
        exact = single_process(job.layer.double(), exact_data)
        theirs = low_precision_errors(plain, exact)
        for step, policy in enumerate(job.policies):
            for result in (worker[k][step] for worker in found):
                kinds = {n: g.dtype for n, g in result.parameter_grads.items()}
                assert kinds == {n: g.dtype for n, g in plain.parameter_grads.items()}
                assert result.out.dtype == result.x_grad.dtype == dtype
                for key, value in low_precision_errors(result, exact).items():
                    slack = 4 * torch.finfo(dtype).eps
                    assert value <= 2 * theirs[key] + slack, (name, key, theirs[key], policy)
                if dtype == torch.float32:
                    assert_small(errors([result], plain), 1e-5, f"{name}, {policy}")


def low_precision_errors(result: Result, exact: Result) -> dict[str, float]:
    """Errors against float64, as fractions of the largest value."""
    assert result.x_grad is not None
    found = {"out": error(result.out.double(), exact.out)}
    found["x.grad"] = error(result.x_grad.double(), exact.x_grad)
    scale = max(float(g.abs().max()) for g in exact.parameter_grads.values())
    for key, gradient in exact.parameter_grads.items():
        found[key] = error(result.parameter_grads[key].double(), gradient, scale)
    return found


class Typed(MessagePassing):
    """Operands of several dtypes in one message; integers get no gradient."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.table = torch.nn.Embedding(3, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        kind = (x[:, :1] > 0).long() + (x[:, 1:2] > 0).long()
        half = (x[:, 2:3] > 0).to(torch.float16)
        return self.propagate(edge_index, x=x, kind=kind, half=half)

    def message(self, x_j: Tensor, kind_j: Tensor, half_j: Tensor) -> Tensor:
        return x_j * self.table(kind_j[:, 0]) * half_j.to(x_j.dtype)


class Weighted(MessagePassing):
    """Edge attributes in float32 in a message in float64; their gradient has their own dtype."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = Linear(EDGE_DIM, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j * self.lin(edge_attr).double()


def test_rule_5_operands_of_several_dtypes(graph: Data, root: Path, partitions: Partitions):
    sweep = Sweep(WORLD)
    sweep.add("typed", Job(Typed().double(), root), graph)
    sweep.check()
    low = graph.clone()
    low.edge_attr = graph.edge_attr.float()
    sweep = Sweep(WORLD)
    job = Job(Weighted(), partitions(low, WORLD, "random"), ("edge_attr",), MODES)
    sweep.add("edge attributes", job, low)
    sweep.check(tolerance=1e-5)


class Coin(gnn.MessagePassing):
    """Draws in its message by Python, by NumPy, or by a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__("sum")
        self.kind, self.own = kind, np.random.default_rng(random.randrange(99))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if self.kind == "a scale":
            return x_j * random.random()
        draw = {"Python": random.random, "NumPy": np.random.rand, "its own": self.own.random}
        return (3 * x_j if draw[self.kind]() < 0.5 else x_j) * x_i.sign()


def coins(root: Path | None, kind: str, seed: int = 1) -> list[float]:
    random.seed(seed)
    np.random.seed(seed)
    data: Any = make_graph() if root is None else pyg_sar.load_partition(root)
    layer = Coin(kind) if root is None else pyg_sar.distribute(Coin(kind))
    found = [float(layer(data.x, data.edge_index).sum()) for _ in range(4)]
    return [*found, random.random(), float(np.random.rand())]


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("kind", ["Python", "NumPy", "its own"])
def test_a_message_that_draws_by_other_generators(kind: str, tmp_path: Path):
    """It runs once in each call, of the whole graph, and draws what one process draws."""
    root = Partitions(tmp_path)(make_graph(), 3, "random")
    for seed in range(4):
        for found in parts(coins, 3, root, kind, seed):
            assert found == pytest.approx(coins(None, kind, seed), rel=1e-9), seed


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_looking_at_a_message_draws_nothing(tmp_path: Path):
    """A message that is computed once, with all edges, draws what one process draws."""
    root = Partitions(tmp_path)(make_graph(), 3, "random")
    expected = coins(None, "a scale")
    for found in parts(coins, 3, root, "a scale"):
        assert found == pytest.approx(expected, rel=1e-9)


class OfGenerator(gnn.MessagePassing):
    """Draws in its message from a generator of torch of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__("sum")
        self.kind, self.own = kind, torch.Generator().manual_seed(3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        if self.kind == "state put back":
            before = torch.get_rng_state()
            torch.manual_seed(0)
            factor = torch.rand(x_j.size(0), 1)
            torch.set_rng_state(before)
            return x_j * factor
        local = torch.Generator().manual_seed(0)
        if self.kind == "local":
            return x_j * (torch.rand(x_j.size(0), 1, generator=local) > 0.3)
        if self.kind == "attribute":
            return x_j * torch.rand(x_j.size(0), 1, generator=self.own)
        if self.kind == "one number":
            return x_j * torch.rand(1, generator=self.own)
        if self.kind == "in place":
            return x_j * torch.empty_like(x_j).uniform_(generator=local)
        return x_j * torch.bernoulli(x_j.sigmoid(), generator=local)


def of_generator(root: Path | None, kind: str) -> list[float]:
    data: Any = make_graph() if root is None else pyg_sar.load_partition(root)
    layer = OfGenerator(kind) if root is None else pyg_sar.distribute(OfGenerator(kind))
    found = [float(layer(data.x, data.edge_index).square().sum()) for _ in range(3)]
    return [*found, float(torch.rand(1, generator=layer.own))]


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize(
    "kind", ["local", "attribute", "one number", "in place", "bernoulli", "state put back"]
)
def test_a_message_that_draws_from_a_generator_of_torch(kind: str, tmp_path: Path):
    """It is right, on tensors of the whole graph, or refused."""
    root = Partitions(tmp_path)(make_graph(), 3, "random")
    try:
        everyone = parts(of_generator, 3, root, kind)
    except WorkerError as caught:
        assert kind in ("in place", "bernoulli", "state put back"), kind
        assert "generator" in str(caught) or "draws random numbers" in str(caught)
        return
    for found in everyone:
        assert found == pytest.approx(of_generator(None, kind), rel=1e-9)
