"""The contract of rematerialization, rule by rule.

Rule 1 is ``test_exactness.py``; rules 4 and 5 are ``test_contract_state.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import everything, some
from contract_case import THREE_MODES, WORLD, Case, Nonlinear, check, gradients, leaf, one_step
from oracle import (
    ALL_POLICIES,
    BUDGET,
    CHANNELS,
    CLASSES,
    MODES,
    OUT,
    TOLERANCE,
    Job,
    OutOfSight,
    Partitions,
    Sweep,
    apart,
    error,
    hosted,
    make_graph,
    node_losses,
    parts,
    set_policy,
    whole,
    workers,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Linear, Parameter, ParameterList, Sequential, Tanh
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import DistMessagePassing, SARPolicy
from pyg_sar.errors import DistributedIndexError, WorkerError

REMADE = SARPolicy(mode=1, prefetch=0, message_budget=BUDGET)
KEPT = SARPolicy(mode=2, prefetch=0, message_budget=BUDGET)


# Layers and models ###########################################################


class Net(torch.nn.Module):
    """Attention (case 2), a batch norm, and a mean (case 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = gnn.GATConv(CHANNELS, 4, heads=2)
        self.norm = torch.nn.BatchNorm1d(8)
        self.conv2 = gnn.SAGEConv(8, CLASSES)

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.conv1(x, edge_index)).relu()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.encode(x, edge_index), edge_index)


class Everywhere(MessagePassing):
    """Parameters in message and edge_update, of submodules too, and outside of them."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.outer = Linear(CHANNELS, 8)
        self.inner = Sequential(Linear(8, 8), Tanh())
        self.scale = Parameter(torch.rand(8))
        self.shifts = ParameterList([torch.rand(8), torch.rand(1)])
        self.edge = torch.nn.ModuleDict({"score": Linear(16, 1)})
        self.unused = Parameter(torch.rand(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.outer(x)
        gate = self.edge_updater(edge_index, x=x)
        return self.inner(self.propagate(edge_index, x=x, gate=gate))

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(self.edge["score"](torch.cat([x_i, x_j], -1)) + self.shifts[1])

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate * self.inner(x_j) * self.scale + self.shifts[0]


class Direct(DistMessagePassing):
    """A layer written against the package, as ``examples/custom_layer.py`` does."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = Linear(CHANNELS, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(x_j - x_i).sigmoid()

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + x[:, :OUT]


class Borrower(MessagePassing):
    """Its message uses a parameter that is not the layer's own, or what was computed of it."""

    def __init__(self, lender: Linear, how: str) -> None:
        super().__init__(aggr="sum")
        self.__dict__["lender"] = lender
        self.how = how

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.computed = self.lender.weight.exp()
        self.hidden = [self.computed]
        out = self.propagate(edge_index, x=x)
        del self.computed, self.hidden
        return out

    def message(self, x_j: Tensor) -> Tensor:
        if self.how == "lender":
            return self.lender(x_j).tanh()
        weight = self.computed if self.how == "computed" else self.hidden[0]
        return F.linear(x_j, weight).tanh()


class Borrowing(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin = Linear(CHANNELS, OUT)
        self.conv = Borrower(self.lin, how)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


class Twice(torch.nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.TransformerConv(CHANNELS, CHANNELS, edge_dim=4)
        self.again = self.conv
        self.gcn = gnn.GCNConv(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.gcn(self.conv(x, edge_index, edge_attr).tanh(), edge_index)
        return self.gcn(self.again(x, edge_index, edge_attr), edge_index)


class Remembers(MessagePassing):
    """Its message leaves tensors on the layer and on a submodule."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = Linear(CHANNELS, OUT)
        self.kept = "as before"
        self.last: Tensor | None = torch.zeros(1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        self.last = self.lin(x_j).tanh()
        self.lin.input = x_j
        self.new = x_j * 2
        return self.last


ATTENTION: dict[str, Callable[[], MessagePassing]] = {
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, add_self_loops=False),
    "gat, loops": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, add_self_loops=False),
    "gatv2, loops": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
}


# Uses ########################################################################


def net_loss(model: Any, data: Data, x: Tensor | None = None) -> Tensor:
    """The training nodes' loss."""
    out = model(data.x if x is None else x, data.edge_index)[data.train_mask]
    return F.cross_entropy(out, data.y[data.train_mask])


def autograd_grad(model: Any, data: Data) -> Any:
    """It touches no ``.grad``; an earlier one stays the object that it was."""
    calls: list[Tensor] = []
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.register_post_accumulate_grad_hook(calls.append)
    x = leaf(data)
    *found, x_grad = torch.autograd.grad(net_loss(model, data, x), [*parameters.values(), x])
    assert all(p.grad is None for p in (*parameters.values(), x)) and not calls
    net_loss(model, data).backward()
    earlier, values = {name: p.grad for name, p in parameters.items()}, gradients(model)
    torch.autograd.grad(net_loss(model, data), list(parameters.values()))
    assert all(p.grad is earlier[name] for name, p in parameters.items())
    assert all(torch.equal(p.grad, values[name]) for name, p in parameters.items())
    return dict(zip(parameters, found, strict=True)), values, x_grad


def accumulated(model: Any, data: Data) -> Any:
    found = []
    for to_none in (True, False):
        for _ in range(2):
            net_loss(model, data).backward()
            found.append(gradients(model))
        model.zero_grad(set_to_none=to_none)
    net_loss(model, data).backward()
    return found, gradients(model)


def retained(model: Any, data: Data) -> Any:
    x = leaf(data)
    loss = node_losses(model(x, data.edge_index)).mean()
    loss.backward(retain_graph=True)
    once = gradients(model), x.grad.clone()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return once, gradients(model), x.grad


def by_another_method(model: Any, data: Data) -> Any:
    """A model, or its copy, need not be run through its ``forward``."""
    found = []
    for one in (model, copy.deepcopy(model)):
        node_losses(one.encode(data.x, data.edge_index)).mean().backward()
        found.append(gradients(one))
    return found


def saved(model: Any, data: Data) -> Any:
    """A state is the plain model's, which loads it."""
    net_loss(model, data).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = Net().double()
    plain.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        return state, model(data.x, data.edge_index)


def evaluated_first(model: Any, data: Data) -> Any:
    """Evaluation leaves nothing behind, nor harms it training."""
    found: list[Any] = []
    for off in (torch.no_grad, torch.inference_mode):
        model.eval()
        with off(), pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            out = model(data.x, data.edge_index)
            assert not out.requires_grad
            assert ledger.resident_rows() == ledger.received_bytes(phase="backward") == 0
        model.train().zero_grad()
        net_loss(model, data).backward()
        found += [out.clone(), gradients(model)]
    return found


def by_all_policies(model: Any, data: Data) -> Any:
    """A policy may be set at any time; what a layer has learnt about itself stays right."""
    found = []
    for policy in (*ALL_POLICIES, *reversed(ALL_POLICIES)):
        set_policy(model, policy)
        found.append(one_step(model, data))
    return found


def weights_returned(model: Any, data: Data) -> Any:
    out, (edges, alpha) = model(data.x, data.edge_index, return_attention_weights=True)
    alpha.square().sum(-1).mean().backward()
    return out, model(data.x, data.edge_index), edges, alpha, gradients(model)


def heads(model: Any, data: Data, used: tuple[bool, ...]) -> Any:
    """Passes that use a head, or don't; another one is used nowhere, and gets no gradient."""
    found = []
    for use in used:
        node_losses(model(data.x, data.edge_index, use)).mean().backward()
        found.append(gradients(model))
        assert found[-1]["nowhere.weight"] is None
    return found


class Choosy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GATConv(CHANNELS, OUT)
        self.here, self.nowhere = Linear(OUT, OUT), Linear(OUT, OUT)

    def forward(self, x: Tensor, edge_index: Tensor, use: bool) -> Tensor:
        out = self.conv(x, edge_index)
        return self.here(out) if use else out


def without_edges(model: Any, data: Data) -> Any:
    """Targets without in-edges are 0, whatever the signs of others."""
    degree = torch.zeros(data.num_nodes).scatter_add(
        0, data.edge_index[1], torch.ones(data.num_edges)
    )
    alone, found = degree == 0, []
    assert alone.sum() >= 2
    for conv, sign in product(model, (-1, 1)):
        x = (sign * (data.x.abs() + 1)).requires_grad_()
        out = conv(x, data.edge_index)
        out.sum().backward()
        assert not out[alone].any() and bool((out[~alone] * sign > 0).all())
        assert x.grad.isfinite().all()
        found.append((out.detach(), x.grad))
    return found


RETAINED: dict[str, Callable[[], MessagePassing]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage weighted": lambda: gnn.GCNConv(CHANNELS, OUT),
    "max": lambda: Nonlinear("max"),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "custom": Everywhere,
}
TILED = tuple(SARPolicy(mode=mode, message_budget=BUDGET) for mode in (1, 2, 3))
DEFAULT = (SARPolicy(),)
CASES: dict[str, Case] = {
    "rule_3-autograd.grad": Case(autograd_grad, Net),
    "rule_3-accumulated gradients": Case(accumulated, Net),
    **{f"rule_3-retained graph, {n}": Case(retained, make, TILED) for n, make in RETAINED.items()},
    "rule_3-by another method": Case(by_another_method, Net, DEFAULT),
    "rule_3-state": Case(saved, Net),
    "rule_3-evaluation first": Case(evaluated_first, Net),
    "rule_3-policies change": Case(
        by_all_policies, lambda: gnn.GATConv(CHANNELS, OUT, heads=2), DEFAULT
    ),
    **{f"rule_3-attention, {n}": Case(weights_returned, make) for n, make in ATTENTION.items()},
    "rule_6-targets without edges": Case(
        without_edges,
        lambda: torch.nn.ModuleList(gnn.SimpleConv(a) for a in ("max", "min", "sum", "mean")),
        MODES,
    ),
    **{
        f"rule_7-heads {used}": Case(partial(heads, used=used), Choosy, DEFAULT)
        for used in ((True,), (True, True), (True, False, True), (False, True))
    },
}


GROUPS: dict[str, dict[str, Case]] = {}
for number, (title, one) in enumerate(CASES.items()):
    group = f"{title[:6]}-{number % 4 if title.startswith('rule_3') else 0}"
    GROUPS.setdefault(group, {})[title] = one


@pytest.mark.parametrize("group", GROUPS)
def test_cases(group: str, graph: Data, root: Path):
    """Half of those of rule 3 by parts; with ``--all`` by worker processes, as all others."""
    hosted = group in ("rule_3-1", "rule_3-3") and not everything()
    cases = {
        name: replace(case, policies=some(case.policies, name, len(case.policies)))
        for name, case in GROUPS[group].items()
    }
    check(cases, graph, root, parts if hosted else workers)


# Rule 2: nothing of a remote shard outlives its turn #########################


class Watch:
    """A layer's class, whose message has the storages of its inputs and outputs watched.

    Numbers of its own would change from call to call, and have the message looked at in each.
    """

    def __init__(self, layer: MessagePassing) -> None:
        self._state = OutOfSight(SimpleNamespace(refs=[], numbers=[0, 0, 0]))
        kind: Any = type(layer)

        @wraps(kind.message)
        def message(layer: Any, **given: Any) -> Tensor:
            self.before(self.source(given))
            out = kind.message(layer, **given)
            self.after(self.source(given), out)
            return out

        layer.__class__ = type(kind.__name__, (kind,), {"message": message})

    def begin(self) -> None:
        self.state.refs, self.state.numbers = [], [0, 0, 0]

    @property
    def state(self) -> Any:
        return self._state.held

    @property
    def found(self) -> list[int]:
        """Calls, storages alive at once, and rows at once."""
        found: list[int] = self.state.numbers
        return found

    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.state.refs)

    def watch(self, tensor: Tensor) -> None:
        self.state.refs.append(StorageWeakRef(tensor.untyped_storage()))

    def before(self, source: Tensor) -> None:
        calls, alive, rows = self.found
        rows = max(rows, *(led.resident_rows() for led in pyg_sar.comm.current().ledgers))
        self.state.numbers = [calls + 1, max(alive, self.alive()), rows]
        self.watch(source)

    def after(self, source: Tensor, out: Tensor) -> None:
        self.watch(out)
        if out.requires_grad and source.requires_grad:
            source.register_hook(lambda gradient: self.watch(gradient))

    @staticmethod
    def source(given: dict[str, Tensor]) -> Tensor:
        return given["x_j"] if "x_j" in given else given["key_j"]


LIFETIME_LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "case 1": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sum": lambda: Nonlinear(),
    "max": lambda: Nonlinear("max"),
    "mean": lambda: Nonlinear("mean"),
    "attention": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
}


def lifetimes(root: Path) -> None:
    """Storages are counted, not objects: a graph may hold one without Python's knowing."""
    comm, data = pyg_sar.comm.current(), pyg_sar.load_partition(root)
    shard = max(data.edge_index.to_local().plan.halo_counts)
    for (name, make), policy in product(LIFETIME_LAYERS.items(), (REMADE, KEPT)):
        layer: Any = make().double()
        watch = Watch(layer)
        layer = pyg_sar.distribute(layer, replace(policy, kernels="off"))  # They run no message.
        x = leaf(data)
        with pyg_sar.Ledger(comm) as ledger:
            layer(x, data.edge_index)
            left_by_analysis = watch.alive()
            watch.begin()
            out = layer(x, data.edge_index)
            after_forward = watch.alive(), ledger.resident_rows()
            node_losses(out).mean().backward()
            assert (watch.alive(), ledger.resident_rows()) == (0, 0), (name, policy)
        if policy is REMADE:
            calls, alive, rows = watch.found
            assert calls > WORLD and alive == 0, name
            assert after_forward == (0, 0), name
            assert 0 < rows <= shard, name
            assert left_by_analysis == 0 or name in ("case 1", "mean"), name
        elif name in ("sum", "attention"):  # The instrument sees what mode 2 keeps.
            assert after_forward[0] > 0, name


def test_rule_2_nothing_of_a_shard_outlives_its_turn(root: Path):
    with apart():
        workers(lifetimes, WORLD, root)


def test_rule_2_holds_when_the_backward_pass_never_comes(root: Path):
    """A graph that is dropped frees everything, in all modes."""

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for policy in ALL_POLICIES:
            layer = pyg_sar.distribute(Nonlinear().double(), policy)
            with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
                out = layer(leaf(data), data.edge_index)
                del out
                assert ledger.resident_rows() == 0, policy

    with apart():
        workers(worker, WORLD)


# Rule 3: parameters ##########################################################


def test_rule_3_parameters_are_found(graph: Data, root: Path):
    sweep = Sweep(WORLD)
    for kind in (Everywhere, Direct):
        sweep.add(kind.__name__, Job(kind().double(), root), graph)
    frozen = gnn.TransformerConv(CHANNELS, OUT).double().requires_grad_(False)
    sweep.add("frozen", Job(frozen, root), graph)
    sweep.add("twice", Job(Twice().double(), root, ("edge_attr",)), graph)
    sweep.add("remembers", Job(Remembers().double(), root), graph)
    sweep.check()


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_rule_3_foreign_parameters_are_refused(graph: Data, root: Path, partitions: Partitions):
    """A worker would add the gradient of its edges alone. An attribute of the layer is none."""
    one, several = Sweep(1), Sweep(WORLD)
    borrowed = Job(Borrowing("lender").double(), partitions(graph, 1, "random"), policies=MODES)
    one.add("of one process", borrowed, graph)
    one.check("parts")
    several.add("computed", Job(Borrowing("computed").double(), root, policies=MODES), graph)
    several.check()

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for how, policy in product(("lender", "hidden"), MODES):
            model = pyg_sar.distribute(Borrowing(how).double(), policy)
            with pytest.raises(DistributedIndexError, match="make it an attribute of the layer"):
                model(data.x, data.edge_index)

    workers(worker, WORLD)


def test_attributes_that_a_message_sets(root: Path):
    """Nothing of a tile is left, but what says that it was set."""

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        mine = pyg_sar.distribute(Remembers().double(), REMADE)
        out = mine(data.x, data.edge_index)
        for _ in range(2):  # after the forward and after the backward pass
            for stand_in in (mine.last, mine.new, mine.lin.input):
                with pytest.raises(DistributedIndexError, match="was set by"):
                    stand_in.sum()
            out.sum().backward(retain_graph=True)
        attention = pyg_sar.distribute(gnn.TransformerConv(CHANNELS, OUT).double(), REMADE)
        attention(data.x, data.edge_index)
        assert attention._alpha is None

    workers(worker, WORLD)


# Rule 6: ties ################################################################


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rule_6_ties(world: int, partitions: Partitions):
    """Integer-valued features tie within and across shards; the gradient is split as PyG does."""
    data = make_graph(30, 300, seed=11)
    data.x = torch.randint(-2, 1, data.x.shape).double()
    root = partitions(data, world, "random")
    sweep = Sweep(world)
    for aggr in ("max", "min"):
        sweep.add(aggr, Job(gnn.SimpleConv(aggr=aggr), root), data)
        learned = Nonlinear(aggr).double()
        with torch.no_grad():
            learned.lin.weight.round_()
        sweep.add(f"{aggr}, learned", Job(learned, root), data)
    sweep.check(hosted(world))
    for gradient in (sweep.expected[0].x_grad, sweep.expected[2].x_grad):
        assert gradient is not None and gradient.abs().max() > 0


# Rule 7: the same collectives in the same order ##############################


def recorded(comm: pyg_sar.comm.Communicator) -> list[Any]:
    """All that is asked of a communicator from now on; of exchanges to and from whom."""
    calls: list[Any] = []
    exchange, exchange_all = comm.exchange, comm.exchange_all
    all_reduce, all_gather = comm.all_reduce_async, comm.all_gather

    def note(kind: str, label: Any, *details: Any) -> None:
        calls.append((kind, label, *details))

    def one(send: Any, dst: int, recv: Any, src: int, *, label: Any) -> Any:
        note("exchange", label, [dst] * (send is not None), [src] * (recv is not None))
        return exchange(send, dst, recv, src, label=label)

    def everyone(sends: Any, recvs: Any, *, label: Any) -> Any:
        ways = ([rank for rank, t in enumerate(way) if t is not None] for way in (sends, recvs))
        note("exchange", label, *ways)
        return exchange_all(sends, recvs, label=label)

    def reduce(tensor: Tensor, op: str = "sum", *, label: Any = None) -> Any:
        note("all_reduce", label, op, tuple(tensor.shape), tensor.dtype)
        return all_reduce(tensor, op, label=label)

    def gather(tensor: Tensor, *, label: Any = None) -> list[Tensor]:
        note("all_gather", label, tuple(tensor.shape), tensor.dtype)
        return all_gather(tensor, label=label)

    comm.exchange, comm.exchange_all = one, everyone  # type: ignore[method-assign]
    # all_reduce() is this one and a wait.
    comm.all_reduce_async, comm.all_gather = reduce, gather  # type: ignore[method-assign]
    return calls


def collectives(calls: list[Any]) -> list[Any]:
    return [call for call in calls if call[0] != "exchange"]


def messages(calls: list[Any], peer: int, way: int) -> list[Any]:
    """Labels of what goes to (way 2), or comes from (way 3) a peer, between which collectives."""
    found, before = [], 0
    for call in calls:
        if call[0] != "exchange":
            before += 1
        elif peer in call[way]:
            found.append((before, call[1]))
    return found


def assert_in_step(workers: list[list[Any]], title: str) -> None:
    """The same collectives everywhere, and between them each pair's messages, as both expect."""
    for p, calls in enumerate(workers):
        assert collectives(calls) == collectives(workers[0]), title
        for q, others in enumerate(workers):
            if p != q:
                assert messages(calls, q, 2) == messages(others, p, 3), (title, p, q)


def uneven_graphs() -> Iterator[tuple[str, Data, Tensor]]:
    data = make_graph(seed=12)
    part = torch.arange(40) % 3
    data.train_mask = part == 0
    yield "training nodes on one worker", data, part
    data = make_graph(seed=13)
    yield "a worker without nodes", data, (torch.arange(40) % 2) * 2
    data = make_graph(seed=14)
    part = (torch.arange(40) >= 38).long() * 2
    data.train_mask[:5] = True
    yield "a worker without in-edges, one without nodes", data, part


@pytest.mark.parametrize("case", range(3))
def test_rule_7_same_collectives_everywhere(case: int, partitions: Partitions):
    title, data, part = list(uneven_graphs())[case]
    root = partitions(data, WORLD, part)
    cases = {title: Case(accumulated, Net, some(THREE_MODES, title, 2))}

    def worker() -> Any:
        data, found = pyg_sar.load_partition(root), []
        calls = recorded(pyg_sar.comm.current())
        for policy in THREE_MODES:
            torch.manual_seed(5)
            net = pyg_sar.distribute(Net().double(), policy)
            calls.clear()
            accumulated(net, data)
            found.append(calls.copy())
        return found

    with apart():
        for calls in zip(*workers(worker, WORLD), strict=True):
            assert len(calls[0]) > 4
            assert_in_step(list(calls), title)
    check(cases, data, root, parts)


# Rule 8: errors ##############################################################


class Fails(Nonlinear):
    """Fails where it, or its class, is armed: its own attributes are the forward pass's."""

    armed = False
    rank = -1

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if self.armed or pyg_sar.comm.current().rank == Fails.rank:
            raise ArithmeticError("a cause of its own")
        return super().message(x_i, x_j)


@pytest.mark.parametrize("when", ["analysis", "forward", "backward"])
def test_rule_8_an_error_ends_all_workers_and_names_rank_layer_and_cause(
    when: str, root: Path, tmp_path: Path
):
    """The launch's own timeout is 60 s: ending is by the error, not by it."""

    def worker() -> None:
        rank, Fails.rank = pyg_sar.comm.current().rank, -1
        data = pyg_sar.load_partition(root)
        net = pyg_sar.distribute(torch.nn.ModuleDict({"first": Fails().double()}), REMADE)
        layer: Any = net["first"]
        try:
            layer.armed = rank == 1 and when == "analysis"
            layer(data.x, data.edge_index)
            layer.armed = rank == 1 and when == "forward"
            out = layer(data.x, data.edge_index)
            Fails.rank = 1
            out.sum().backward()
        except BaseException as problem:
            (tmp_path / str(rank)).write_text(type(problem).__name__)
            raise

    with pytest.raises(WorkerError, match="a cause of its own") as caught:
        workers(worker, WORLD)
    ended = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(ended) == ["0", "1", "2"] and "TimeoutError" not in str(ended)
    assert caught.value.rank == 1 and "ArithmeticError" in str(caught.value)
    assert when == "analysis" or "first" in str(caught.value), "the layer's name"


class Talks(Nonlinear):
    verbose = False

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if self.verbose:
            assert x_j.dim() == 2
        return super().message(x_i, x_j)


def test_attributes_may_differ_between_workers(graph: Data, root: Path):
    """Rank 0 talks, say: neither a mistake nor a reason to wait for each other."""
    plain = Talks().double()

    def worker() -> list[Tensor]:
        data, found = pyg_sar.load_partition(root), []
        first = pyg_sar.comm.current().rank == 0
        for later in (False, True):
            layer: Any = copy.deepcopy(plain)
            layer.verbose = first and not later
            layer = pyg_sar.distribute(layer)
            layer(data.x, data.edge_index)
            layer.verbose = first
            found.append(whole(layer(data.x, data.edge_index)))
        return found

    expected = plain(graph.x, graph.edge_index)
    for found in pyg_sar.launch(worker, WORLD, timeout=15.0):
        assert max(error(one, expected) for one in found) <= TOLERANCE


class Changes(Nonlinear):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return super().message(x_i, x_j) + self.settings.shift


def change(data: Data) -> None:
    """Maxima that aren't found again in the backward pass: not silently wrong gradients."""
    layer: Any = pyg_sar.distribute(Changes("max").double(), REMADE)
    layer.settings = SimpleNamespace(shift=torch.zeros(1))
    out = layer(data.x, data.edge_index)
    layer.settings.shift += 0.25
    out.sum().backward()


def fewer_nodes(data: Data) -> None:
    pyg_sar.distribute(Nonlinear().double())(data.x[1:], data.edge_index)


def own_nodes(data: Data) -> None:
    pyg_sar.distribute(Nonlinear().double())(data.x.to_local(), data.edge_index)


def fewer_edges(data: Data) -> None:
    layer = pyg_sar.distribute(gnn.TransformerConv(CHANNELS, OUT, edge_dim=4).double())
    layer(data.x, data.edge_index, data.edge_attr)
    layer(data.x, data.edge_index, data.edge_attr[1:])


def own_number_of_edges(data: Data) -> None:
    """As many as the first worker holds: no more right there than elsewhere."""
    count = data.edge_index.to_local().size(1)
    count = int(pyg_sar.comm.current().all_gather(torch.tensor([count]))[0])
    layer = pyg_sar.distribute(gnn.GraphConv(CHANNELS, OUT).double())
    layer(data.x, data.edge_index, data.edge_weight[:count])


def first_nodes(data: Data) -> None:
    pyg_sar.distribute(gnn.GCNConv(CHANNELS, OUT).double())(data.x[:17], data.edge_index)


MISTAKES: dict[Callable[[Data], None], str] = {
    change: "came out differently",
    first_nodes: r"got 'x' of shape \[17, 6\], where its edges have 40 nodes",
    fewer_nodes: r"Expected 'x' to hold the .*got shape \[39, 6\].: pass a tensor of the graph",
    own_nodes: r"got a plain tensor of shape \[\d+, 6\], the number of this worker's rows alone",
    own_number_of_edges: r"shape \[\d+\], whose rows are neither its edges nor their nodes",
    fewer_edges: "edge-level tensor of 210 rows for .*: pass a tensor of the graph's edges",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_rule_8_mistakes_are_named(mistake: Callable[[Data], None], root: Path):
    with pytest.raises(WorkerError, match=MISTAKES[mistake]):
        parts(lambda: mistake(pyg_sar.load_partition(root)), WORLD)
