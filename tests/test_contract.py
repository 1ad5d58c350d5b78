"""The contract of rematerialization (DESIGN, section 4), rule by rule.

Rule 1 is ``test_exactness.py``; rules 4 and 5 are ``test_contract_state.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    ALL_POLICIES,
    BUDGET,
    CHANNELS,
    CLASSES,
    MODES,
    OUT,
    TOLERANCE,
    Job,
    Partitions,
    Sweep,
    assemble,
    error,
    make_graph,
    node_losses,
    set_policy,
    threads,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Linear, Parameter, ParameterList, Sequential, Tanh
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import DistMessagePassing, SARPolicy

WORLD = 3
REMADE = SARPolicy(mode=1, prefetch=0, message_budget=BUDGET)
KEPT = SARPolicy(mode=2, prefetch=0, message_budget=BUDGET)


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph()


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, WORLD, "random")


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


def make_net() -> torch.nn.Module:
    torch.manual_seed(5)
    return Net().double()


def losses(model: torch.nn.Module, data: Data, x: Tensor | None = None) -> Tensor:
    """The training nodes' losses."""
    out = model(data.x if x is None else x, data.edge_index)[data.train_mask]
    return F.cross_entropy(out, data.y[data.train_mask], reduction="none")


def loss_on(model: torch.nn.Module, data: Data) -> Tensor:
    return pyg_sar.mean(losses(model, data))


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def reference(model: torch.nn.Module, data: Data) -> dict[str, Tensor | None]:
    """Single-process parameter gradients; the model stays as it is."""
    model = copy.deepcopy(model)
    losses(model, data).mean().backward()
    return gradients(model)


def same(found: dict[str, Any], expected: dict[str, Any], factor: float = 1.0) -> bool:
    """Whether gradients agree, relative to the largest of them."""
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None) * factor
    return found.keys() == expected.keys() and all(
        error(found[n], None if g is None else g * factor, scale) <= TOLERANCE
        for n, g in expected.items()
    )


# Rule 2: nothing of a remote shard outlives its turn #########################


class Nonlinear(MessagePassing):
    """A message whose backward pass needs all of its inputs (case 2)."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__(aggr=aggr)
        self.lin = Linear(2 * CHANNELS, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], dim=-1)).tanh()


class Watch:
    """Message hooks that watch the storages of a message's inputs and outputs."""

    def __init__(self, layer: MessagePassing, comm: pyg_sar.comm.Communicator) -> None:
        self.comm = comm
        self.begin()
        layer.register_message_forward_pre_hook(self.before)
        layer.register_message_forward_hook(self.after)

    def begin(self) -> None:
        self.refs: list[StorageWeakRef] = []
        self.calls = self.most_alive = self.most_rows = 0

    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.refs)

    def watch(self, tensor: Tensor) -> None:
        self.refs.append(StorageWeakRef(tensor.untyped_storage()))

    def before(self, layer: Any, inputs: Any) -> None:
        self.calls += 1
        self.most_alive = max(self.most_alive, self.alive())
        self.most_rows = max(self.most_rows, *(led.resident_rows() for led in self.comm.ledgers))
        self.watch(self.source(inputs))

    def after(self, layer: Any, inputs: Any, out: Tensor) -> None:
        self.watch(out)
        source = self.source(inputs)
        if out.requires_grad and source.requires_grad:
            source.register_hook(lambda gradient: self.watch(gradient))

    @staticmethod
    def source(inputs: Any) -> Tensor:
        return inputs[0]["x_j"] if "x_j" in inputs[0] else inputs[0]["key_j"]


LIFETIME_LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "case 1": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sum": lambda: Nonlinear(),
    "max": lambda: Nonlinear("max"),
    "mean": lambda: Nonlinear("mean"),
    "attention": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
}


def lifetimes(root: Path, layer: MessagePassing, policy: SARPolicy) -> dict[str, Any]:
    """Runs one pass and tells what was alive when."""
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root, view="local")
    layer = pyg_sar.distribute(copy.deepcopy(layer), policy, view="local")
    watch = Watch(layer, comm)  # The same hooks: with others the call would be looked at again.
    x = data.x.clone().requires_grad_()
    with pyg_sar.Ledger(comm) as ledger:
        layer(x, data.edge_index)
        left_by_analysis = watch.alive()
        watch.begin()
        out = layer(x, data.edge_index)
        after_forward = watch.alive(), ledger.resident_rows()
        pyg_sar.mean(node_losses(out, data.n_id)).backward()
        after_backward = watch.alive(), ledger.resident_rows()
    return {
        "calls": watch.calls,
        "alive": watch.most_alive,
        "rows": watch.most_rows,
        "shard": max(data.edge_index.plan.halo_counts),
        "left by analysis": left_by_analysis,
        "after forward": after_forward,
        "after backward": after_backward,
    }


@pytest.mark.parametrize("name", LIFETIME_LAYERS)
def test_rule_2_nothing_of_a_shard_outlives_its_turn(name: str, root: Path):
    """Storages are counted, not objects: a graph may hold one without Python's knowing."""
    layer = LIFETIME_LAYERS[name]().double()
    for rank, found in enumerate(threads(lifetimes, WORLD, root, layer, REMADE)):
        where = (name, rank, found)
        assert found["calls"] > WORLD, where
        assert found["after forward"] == (0, 0), where
        assert found["after backward"] == (0, 0), where
        assert found["alive"] == 0, where
        assert 0 < found["rows"] <= found["shard"], where


@pytest.mark.parametrize("name", ["sum", "max", "attention"])
def test_rule_2_the_analysis_leaves_nothing_behind(name: str, root: Path):
    layer = LIFETIME_LAYERS[name]().double()
    found = threads(lifetimes, WORLD, root, layer, REMADE)
    assert [f["left by analysis"] for f in found] == [0] * WORLD


def test_rule_2_the_instrument_sees_what_is_kept(root: Path):
    """Mode 2 keeps the graph, until the backward pass: the same counts are not 0 there."""
    for name in ("sum", "attention"):
        layer = LIFETIME_LAYERS[name]().double()
        for found in threads(lifetimes, WORLD, root, layer, KEPT):
            assert found["after forward"][0] > 0
            assert found["after backward"] == (0, 0)


def test_rule_2_holds_when_the_backward_pass_never_comes(root: Path):
    """A graph that is dropped frees everything, in all modes."""

    def worker(policy: SARPolicy) -> int:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(Nonlinear().double(), policy, view="local")
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            out = layer(data.x.clone().requires_grad_(), data.edge_index)
            del out
            return ledger.resident_rows()

    for policy in ALL_POLICIES:
        assert threads(worker, WORLD, policy) == [0] * WORLD, policy


# Rule 3: parameters ##########################################################


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


@pytest.mark.parametrize("kind", [Everywhere, Direct])
def test_rule_3_parameters_are_found(kind: type[MessagePassing], graph: Data, root: Path):
    sweep = Sweep(WORLD)
    sweep.add(kind.__name__, Job(kind().double(), root), graph)
    sweep.check()


class Borrower(MessagePassing):
    """Its message uses a parameter that is not the layer's own."""

    def __init__(self, lender: Linear) -> None:
        super().__init__(aggr="sum")
        self.__dict__["lender"] = lender

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.lender(x_j).tanh()


class Borrowing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = Linear(CHANNELS, OUT)
        self.conv = Borrower(self.lin)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def test_rule_3_foreign_parameters_are_noticed(graph: Data, root: Path):
    """What autograd can't be told of is not lost: the layer falls back to one shot, and says so."""
    sweep = Sweep(WORLD)
    sweep.add("borrowed", Job(Borrowing().double(), root, policies=MODES[:1]), graph)
    with pytest.warns(pyg_sar.errors.OneShotWarning, match="neither a parameter of the layer"):
        sweep.check()


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rule_3_autograd_grad_returns_sums(mode: int, graph: Data, root: Path):
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")
        calls: list[str] = []
        for name, parameter in mine.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
        x = data.x.clone().requires_grad_()
        parameters = dict(mine.named_parameters())
        loss = pyg_sar.mean(losses(mine, data, x))
        *found, x_grad = torch.autograd.grad(loss, [*parameters.values(), x])
        assert all(p.grad is None for p in parameters.values())
        assert x.grad is None and not calls
        # An earlier .grad stays the object that it was, and the next backward pass is right.
        loss_on(mine, data).backward()
        earlier = {name: p.grad for name, p in parameters.items()}
        values = gradients(mine)
        torch.autograd.grad(loss_on(mine, data), list(parameters.values()))
        assert all(p.grad is earlier[name] for name, p in parameters.items())
        assert all(torch.equal(p.grad, values[name]) for name, p in parameters.items())
        return dict(zip(parameters, found, strict=True)), values, data.n_id, x_grad

    workers = threads(worker, WORLD)
    expected = reference(model, graph)
    assert all(same(w[0], expected) for w in workers)
    assert all(same(w[1], expected) for w in workers)
    x = graph.x.clone().requires_grad_()
    (x_grad,) = torch.autograd.grad(losses(copy.deepcopy(model), graph, x).mean(), x)
    assert error(assemble(((w[2], w[3]) for w in workers), 40), x_grad) <= TOLERANCE


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rule_3_hooks_run_once_with_the_right_total(mode: int, graph: Data, root: Path):
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")
        seen: dict[str, list[Tensor]] = {name: [] for name, _ in mine.named_parameters()}
        for name, parameter in mine.named_parameters():
            parameter.register_hook(lambda g, name=name: seen[name].append(g.clone()))
        loss_on(mine, data).backward()
        assert all(len(calls) == 1 for calls in seen.values()), seen.keys()
        return {name: calls[0] for name, calls in seen.items()}, gradients(mine)

    workers = threads(worker, WORLD)
    expected = reference(model, graph)
    assert all(same(w[0], expected) for w in workers)
    assert all(same(w[1], expected) for w in workers)


def test_rule_3_hooks_may_change_gradients(graph: Data, root: Path):
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), view="local")
        for parameter in mine.parameters():
            parameter.register_hook(lambda g: 3 * g)
        loss_on(mine, data).backward()
        return gradients(mine)

    assert all(same(w, reference(model, graph), factor=3.0) for w in threads(worker, WORLD))


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rule_3_backward_for_some_parameters(mode: int, graph: Data, root: Path):
    """``backward(inputs=...)`` accumulates into these, summed, and into no other."""
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")
        chosen = [mine.conv1.lin.weight, mine.conv2.lin_l.weight]
        for _ in range(2):
            loss_on(mine, data).backward(inputs=chosen)
        return gradients(mine)

    expected = reference(model, graph)
    scale = max(float(g.abs().max()) for g in expected.values())
    for found in threads(worker, WORLD):
        for name, gradient in expected.items():
            if name in ("conv1.lin.weight", "conv2.lin_l.weight"):
                assert error(found[name], 2 * gradient, scale) <= TOLERANCE, name
            else:
                assert found[name] is None, name


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rule_3_gradients_accumulate(mode: int, to_none: bool, graph: Data, root: Path):
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")
        loss_on(mine, data).backward()
        once = gradients(mine)
        loss_on(mine, data).backward()
        twice = gradients(mine)
        mine.zero_grad(set_to_none=to_none)
        loss_on(mine, data).backward()
        return once, twice, gradients(mine)

    expected = reference(model, graph)
    for once, twice, anew in threads(worker, WORLD):
        assert same(once, expected)
        assert same(twice, expected, factor=2.0)
        assert same(anew, expected)


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rule_3_grad_scaler(mode: int, graph: Data, root: Path):
    """Scaling by a power of two is exact; an overflow on one worker skips the step on all."""
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")
        before = [p.detach().clone() for p in mine.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        values = losses(mine, data)
        if pyg_sar.comm.current().rank == 1:
            values = values * torch.tensor(float("inf"))
        scaler.scale(pyg_sar.mean(values)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(p, b) for p, b in zip(mine.parameters(), before, strict=True))
        assert scaler.get_scale() == 2.0**9
        mine.norm.reset_running_stats()
        optimizer.zero_grad()
        scaler.scale(loss_on(mine, data)).backward()
        scaler.unscale_(optimizer)
        found = gradients(mine)
        scaler.step(optimizer)
        scaler.update()
        return found, [p.detach() for p in mine.parameters()], before

    expected = reference(model, graph)
    for found, after, before in threads(worker, WORLD):
        assert same(found, expected)
        for new, old, gradient in zip(after, before, expected.values(), strict=True):
            assert torch.allclose(new, old - 0.1 * gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rule_3_frozen_parameters(mode: int, graph: Data, root: Path):
    """Frozen ones get none; unfrozen after ``distribute`` they are summed like the others."""
    model = make_net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("conv1" not in name and name != "conv2.lin_r.weight")
    thawed = copy.deepcopy(model).requires_grad_(True)

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")
        loss_on(mine, data).backward()
        frozen = gradients(mine)
        mine.requires_grad_(True).zero_grad()
        loss_on(mine, data).backward()
        return frozen, gradients(mine)

    for frozen, all_of_them in threads(worker, WORLD):
        assert same(frozen, reference(model, graph))
        assert frozen["conv1.lin.weight"] is None
        assert same(all_of_them, reference(thawed, graph))


def test_rule_3_everything_frozen_but_the_input(graph: Data, root: Path):
    layer = gnn.TransformerConv(CHANNELS, OUT).double().requires_grad_(False)
    sweep = Sweep(WORLD)
    sweep.add("frozen", Job(layer, root), graph)
    sweep.check()


# Rule 3: the autograd graph ##################################################


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sage", "sage weighted", "max", "gat", "custom"])
def test_retained_graph_runs_backward_again(mode: int, kind: str, graph: Data, root: Path):
    layer: MessagePassing = {
        "sage": gnn.SAGEConv(CHANNELS, OUT),
        "sage weighted": gnn.GCNConv(CHANNELS, OUT),
        "max": Nonlinear("max"),
        "gat": gnn.GATConv(CHANNELS, OUT, heads=2),
        "custom": Everywhere(),
    }[kind].double()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(
            copy.deepcopy(layer), SARPolicy(mode=mode, message_budget=BUDGET), view="local"
        )
        x = data.x.clone().requires_grad_()
        loss = pyg_sar.mean(node_losses(mine(x, data.edge_index), data.n_id))
        loss.backward(retain_graph=True)
        once = gradients(mine) | {"x": x.grad.clone()}
        loss.backward()
        twice = gradients(mine) | {"x": x.grad.clone()}
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return once, twice

    alone = copy.deepcopy(layer)
    node_losses(alone(graph.x, graph.edge_index), torch.arange(40)).mean().backward()
    expected = gradients(alone)
    for once, twice in threads(worker, WORLD):
        x_once, x_twice = once.pop("x"), twice.pop("x")
        assert same(once, expected)
        assert same(twice, expected, factor=2.0)
        assert error(x_twice, 2 * x_once) <= TOLERANCE


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_inside_activation_checkpointing(mode: int, graph: Data, root: Path):
    """``torch.utils.checkpoint`` runs a whole layer again, exchange included."""
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")

        def forward(x: Tensor, edge_index: Tensor) -> Tensor:
            hidden = checkpoint(mine.encode, x, edge_index, use_reentrant=False)
            return mine.conv2(hidden, edge_index)

        out = forward(data.x, data.edge_index)[data.train_mask]
        y = data.y[data.train_mask]
        pyg_sar.mean(F.cross_entropy(out, y, reduction="none")).backward()
        return gradients(mine)

    assert all(same(w, reference(model, graph)) for w in threads(worker, WORLD))


# Models ######################################################################


@pytest.mark.parametrize("trained", [False, True])
def test_deepcopy_of_a_distributed_model(trained: bool, graph: Data, root: Path):
    """The copy trains right and sums its own gradients; the original stays as it was."""
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=1), view="local")
        if trained:
            loss_on(mine, data).backward()
            mine.norm.reset_running_stats()
            mine.zero_grad()
        twin = copy.deepcopy(mine)
        loss_on(twin, data).backward()
        assert all(p.grad is None for p in mine.parameters())
        found = gradients(twin)
        loss_on(mine, data).backward()
        assert all(torch.equal(p.grad, found[name]) for name, p in twin.named_parameters()), (
            "the original's backward pass changed the copy"
        )
        return found, gradients(mine)

    for found, original in threads(worker, WORLD):
        assert same(found, reference(model, graph))
        assert same(original, reference(model, graph))


def test_gradients_are_summed_whatever_method_of_a_copy_runs(graph: Data, root: Path):
    """A model need not be run through its ``forward``."""
    model = make_net()

    def by_hand(model: Any, data: Data) -> Tensor:
        return node_losses(model.encode(data.x, data.edge_index), data.n_id)

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), view="local")
        twin = copy.deepcopy(mine)
        for one in (mine, twin):
            pyg_sar.mean(by_hand(one, data)).backward()
        return gradients(mine), gradients(twin)

    alone = copy.deepcopy(model)
    graph.n_id = torch.arange(40)
    by_hand(alone, graph).mean().backward()
    for mine, twin in threads(worker, WORLD):
        assert same(mine, gradients(alone))
        assert same(twin, gradients(alone))


def test_state_dict_is_the_plain_models(graph: Data, root: Path):
    model = make_net()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), view="local")
        loss_on(mine, data).backward()
        torch.optim.SGD(mine.parameters(), lr=0.1).step()
        state = {name: value.clone() for name, value in mine.state_dict().items()}
        mine.eval()
        with torch.no_grad():
            return state, data.n_id, mine(data.x, data.edge_index)

    for state, n_id, out in threads(worker, WORLD):
        assert list(state) == list(model.state_dict())
        plain = make_net()
        plain.load_state_dict(state)
        plain.eval()
        with torch.no_grad():
            assert error(out, plain(graph.x, graph.edge_index)[n_id]) <= TOLERANCE


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_without_gradients_and_then_training(
    mode: int, off: Callable[[], Any], graph: Data, root: Path
):
    """Evaluation first: what it leaves behind must not harm training."""
    model = make_net()

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local").eval()
        with off(), pyg_sar.Ledger(comm) as ledger:
            out = mine(data.x, data.edge_index)
            assert not out.requires_grad
            assert ledger.resident_rows() == 0
            assert ledger.received_bytes(phase="backward") == 0
        loss_on(mine.train(), data).backward()
        return data.n_id, out.clone(), gradients(mine)

    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(graph.x, graph.edge_index)
    for n_id, out, found in threads(worker, WORLD):
        assert error(out, expected[n_id]) <= TOLERANCE
        assert same(found, reference(model, graph))


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


def test_layer_called_twice(graph: Data, root: Path):
    sweep = Sweep(WORLD)
    sweep.add("twice", Job(Twice().double(), root, ("edge_attr",)), graph)
    sweep.check()


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


def test_attributes_that_a_message_sets(graph: Data, root: Path):
    layer = Remembers().double()
    sweep = Sweep(WORLD)
    sweep.add("remembers", Job(layer, root, policies=ALL_POLICIES[:5]), graph)
    sweep.check()

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(layer), REMADE, view="local")
        out = mine(data.x, data.edge_index)
        for _ in range(2):  # after the forward and after the backward pass
            for stand_in in (mine.last, mine.new, mine.lin.input):  # nothing of a tile
                with pytest.raises(pyg_sar.errors.DistributedIndexError, match="was set by"):
                    stand_in.sum()
            out.sum().backward(retain_graph=True)
        attention = pyg_sar.distribute(
            gnn.TransformerConv(CHANNELS, OUT).double(), REMADE, view="local"
        )
        attention(data.x, data.edge_index)
        assert attention._alpha is None

    threads(worker, WORLD)


ATTENTION: dict[str, Callable[[], MessagePassing]] = {
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, add_self_loops=False),
    "gat, loops": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, add_self_loops=False),
    "gatv2, loops": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_weights_are_exact_per_edge(name: str, graph: Data, root: Path):
    layer = ATTENTION[name]().double()
    loops = "loops" in name

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy(mode=1), view="local")
        out, (edges, alpha) = mine(data.x, data.edge_index, return_attention_weights=True)
        alone = mine(data.x, data.edge_index)
        assert error(out, alone) <= TOLERANCE
        assert edges.size(1) == alpha.size(0)
        pyg_sar.mean(alpha.square().sum(-1)).backward()
        kept = data.e_id
        if loops:
            source, target = data.edge_index
            kept = kept[source != target]
            assert torch.equal(edges[1][kept.numel() :], torch.arange(data.num_nodes))
        count = kept.numel()
        return kept, alpha[:count], data.n_id, alpha[count:], gradients(mine)

    workers = threads(worker, WORLD)
    alone = copy.deepcopy(layer)
    _, (_, alpha) = alone(graph.x, graph.edge_index, return_attention_weights=True)
    alpha.square().sum(-1).mean().backward()
    expected = gradients(alone)
    numbers = torch.arange(graph.num_edges)
    if loops:
        numbers = numbers[graph.edge_index[0] != graph.edge_index[1]]
    count = numbers.numel()
    whole = torch.full((graph.num_edges, 2), float("nan"), dtype=torch.float64)
    for e_id, weights, *_ in workers:
        assert bool(whole[e_id].isnan().all())
        whole[e_id] = weights.detach()
    assert error(whole[numbers], alpha[:count].detach()) <= TOLERANCE
    if loops:
        own = assemble(((w[2], w[3].detach()) for w in workers), 40)
        assert error(own, alpha[count:].detach()) <= TOLERANCE
    for *_, found in workers:
        assert same(found, expected)


# Rule 6: ties and targets without in-edges ###################################


@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rule_6_ties(aggr: str, world: int, partitions: Partitions):
    """Integer-valued features tie within and across shards; the gradient is split as PyG does."""
    data = make_graph(30, 300, seed=11)
    data.x = torch.randint(-2, 1, data.x.shape).double()
    sweep = Sweep(world)
    conv = gnn.SimpleConv(aggr=aggr)
    sweep.add(aggr, Job(conv, partitions(data, world, "random")), data)
    learned = Nonlinear(aggr).double()
    with torch.no_grad():
        learned.lin.weight.round_()
    sweep.add(f"{aggr}, learned", Job(learned, partitions(data, world, "random")), data)
    sweep.check()
    gradient = sweep.expected[0].x_grad
    assert gradient is not None and gradient.abs().max() > 0


@pytest.mark.parametrize("aggr", ["max", "min", "sum", "mean"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_rule_6_targets_without_edges_are_zero(aggr: str, sign: int, graph: Data, root: Path):
    layer = gnn.SimpleConv(aggr=aggr)
    alone = (graph.edge_index[1] == torch.arange(40).view(-1, 1)).sum(1) == 0
    assert alone.sum() >= 2

    def worker(policy: SARPolicy) -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(layer), policy, view="local")
        x = (sign * (data.x.abs() + 1)).requires_grad_()
        out = mine(x, data.edge_index)
        out.sum().backward()
        return data.n_id, out.detach(), x.grad

    for policy in MODES:
        workers = threads(worker, WORLD, policy)
        out = assemble(((n, o) for n, o, _ in workers), 40)
        assert out is not None
        assert torch.equal(out[alone], torch.zeros_like(out[alone]))
        assert bool((out[~alone] * sign > 0).all())
        gradient = assemble(((n, g) for n, _, g in workers), 40)
        assert gradient is not None and bool(gradient.isfinite().all())


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


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("case", range(3))
def test_rule_7_same_collectives_everywhere(case: int, mode: int, partitions: Partitions):
    title, data, part = list(uneven_graphs())[case]
    root = partitions(data, WORLD, part)
    model = make_net()

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        mine = pyg_sar.load_partition(root, view="local")
        net = pyg_sar.distribute(copy.deepcopy(model), SARPolicy(mode=mode), view="local")
        calls = recorded(comm)
        for _ in range(2):
            loss_on(net, mine).backward()
        return calls, gradients(net)

    workers = threads(worker, WORLD)
    calls = [w[0] for w in workers]
    assert len(calls[0]) > 4
    assert_in_step(calls, title)
    assert same(workers[0][1], reference(model, data), factor=2.0)


class Choosy(torch.nn.Module):
    """Uses a head on some workers only, and one nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GATConv(CHANNELS, OUT)
        self.here = Linear(OUT, OUT)
        self.nowhere = Linear(OUT, OUT)

    def forward(self, x: Tensor, edge_index: Tensor, use: bool) -> Tensor:
        out = self.conv(x, edge_index)
        return self.here(out) if use else out


def test_rule_7_parameters_without_a_gradient(root: Path):
    """None here and a gradient there: the sum everywhere. None everywhere: None, as alone."""
    model = Choosy().double()

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        net = pyg_sar.distribute(copy.deepcopy(model), view="local")
        calls = recorded(comm)
        out = net(data.x, data.edge_index, comm.rank == 1)
        local = {}
        net.here.weight.register_hook(lambda g: local.update(g=g.clone()))
        pyg_sar.mean(node_losses(out, data.n_id)).backward()
        return calls, local.get("g"), gradients(net)

    workers = threads(worker, WORLD)
    assert_in_step([w[0] for w in workers], "parameters without a gradient")
    for _, seen, found in workers:  # Hooks see the sum, also where there is no part of it.
        assert torch.equal(found["here.weight"], seen) and seen.abs().max() > 0
        assert found["nowhere.weight"] is None and found["nowhere.bias"] is None


def test_rule_7_parameters_without_a_gradient_accumulate(root: Path):
    """A second pass in which another worker, or none, uses the head: sums of both passes."""
    model = Choosy().double()

    def worker(users: tuple[int, ...]) -> Any:
        data = pyg_sar.load_partition(root, view="local")
        net = pyg_sar.distribute(copy.deepcopy(model), view="local")
        found = []
        for user in users:
            out = net(data.x, data.edge_index, pyg_sar.comm.current().rank == user)
            pyg_sar.mean(node_losses(out, data.n_id)).backward()
            grad = net.here.weight.grad
            found.append(None if grad is None else grad.clone())
        return found

    ones = [threads(worker, WORLD, (user,))[0][0] for user in range(WORLD)]
    for users in ((1, 1), (1, 2), (0, 9, 2), (9, 1)):
        for found in threads(worker, WORLD, users):
            for step in range(len(users)):
                held = [ones[user] for user in users[: step + 1] if user < WORLD]
                expected = sum(held) if held else None
                assert error(found[step], expected) <= TOLERANCE, (users, step)


def test_rule_7_an_unused_parameter_costs_no_exchange(root: Path):
    """Gradients go in one message per dtype, however many parameters there are."""

    def worker() -> list[Any]:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        net = pyg_sar.distribute(make_net(), view="local")
        loss = loss_on(net, data)
        calls = recorded(comm)
        loss.backward()
        return [call for call in calls if call[1] == ("", "backward", "gradient sum")]

    for calls in threads(worker, WORLD):
        assert len(calls) == 1


# Rule 8: errors ##############################################################


class Fails(MessagePassing):
    """Fails on one worker, the first or the second time that it is computed."""

    def __init__(self, when: str) -> None:
        super().__init__(aggr="sum")
        self.lin = Linear(CHANNELS, OUT)
        self.when = when
        self.armed = [False]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        if self.armed[0]:
            raise ArithmeticError("a cause of its own")
        return self.lin(x_j).tanh()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_rule_8_an_error_ends_all_workers_and_names_rank_layer_and_cause(when: str, root: Path):
    """The launch's own timeout is 60 s: ending is by the error, not by it."""
    ended: list[tuple[int, str]] = []

    def worker() -> None:
        rank = pyg_sar.comm.current().rank
        data = pyg_sar.load_partition(root, view="local")
        inner = Fails(when).double()
        net = pyg_sar.distribute(torch.nn.ModuleDict({"first": inner}), REMADE, view="local")
        try:
            layer: Any = net["first"]
            layer(data.x, data.edge_index)  # analysed
            layer.armed[0] = rank == 1 and when == "forward"
            out = layer(data.x, data.edge_index)
            layer.armed[0] = rank == 1
            out.sum().backward()
        except BaseException as problem:
            ended.append((rank, type(problem).__name__))
            raise

    with pytest.raises(pyg_sar.errors.WorkerError) as caught:
        threads(worker, WORLD)
    assert sorted(rank for rank, _ in ended) == [0, 1, 2], ended
    assert "TimeoutError" not in str(ended)
    assert caught.value.rank == 1
    assert "ArithmeticError" in str(caught.value) and "a cause of its own" in str(caught.value)
    assert "first" in str(caught.value), "the layer's name"


def test_rule_8_an_error_in_the_analysis(root: Path):
    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer: Any = pyg_sar.distribute(Fails("analysis").double(), view="local")
        layer.armed[0] = pyg_sar.comm.current().rank == 2
        layer(data.x, data.edge_index)

    with pytest.raises(pyg_sar.errors.WorkerError, match="a cause of its own") as caught:
        threads(worker, WORLD)
    assert caught.value.rank == 2


@pytest.mark.parametrize("later", [False, True])
def test_attributes_may_differ_between_workers(later: bool, graph: Data, root: Path):
    """Rank 0 talks, say: neither a mistake nor a reason to wait for each other."""

    class Talks(Nonlinear):
        verbose = False

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            if self.verbose:
                assert x_j.dim() == 2
            return super().message(x_i, x_j)

    plain = Talks().double()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        layer: Any = copy.deepcopy(plain)
        first = pyg_sar.comm.current().rank == 0
        layer.verbose = first and not later
        layer = pyg_sar.distribute(layer, view="local")
        layer(data.x, data.edge_index)
        layer.verbose = first
        return data.n_id, layer(data.x, data.edge_index)

    workers = pyg_sar.launch(worker, WORLD, backend="threads", timeout=15.0)
    found = assemble(workers, 40)
    assert error(found, plain(graph.x, graph.edge_index)) <= TOLERANCE


def test_rule_8_wrong_shapes_are_named(root: Path):
    """Rows of the whole graph, or of too few edges, are a user's mistake: ValueError."""

    def nodes() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(Nonlinear().double(), view="local")
        layer(torch.zeros(40, CHANNELS, dtype=torch.float64), data.edge_index)

    def edges() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(
            gnn.TransformerConv(CHANNELS, OUT, edge_dim=4).double(), view="local"
        )
        layer(data.x, data.edge_index, data.edge_attr)
        layer(data.x, data.edge_index, data.edge_attr[1:])

    with pytest.raises(
        pyg_sar.errors.WorkerError, match=r"ValueError: Expected 'x' to hold the \d+ nodes"
    ):
        threads(nodes, WORLD)
    with pytest.raises(
        pyg_sar.errors.WorkerError, match=r"ValueError: .*edge-level tensor of \d+ rows"
    ):
        threads(edges, WORLD)


def test_rule_8_a_message_that_changes_is_noticed(root: Path):
    """Maxima that aren't found again in the backward pass: not silently wrong gradients."""

    class Changes(Nonlinear):
        shift = 0.0

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return super().message(x_i, x_j) + self.shift

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer: Any = pyg_sar.distribute(Changes("max").double(), REMADE, view="local")
        out = layer(data.x, data.edge_index)
        layer.shift = 0.25
        out.sum().backward()

    with pytest.raises(pyg_sar.errors.WorkerError, match="came out differently"):
        threads(worker, WORLD)


def test_policies_change_between_calls(graph: Data, root: Path):
    """A policy may be set at any time; what a layer has learnt about itself stays right."""
    layer = gnn.GATConv(CHANNELS, OUT, heads=2).double()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        mine = pyg_sar.distribute(copy.deepcopy(layer), view="local")
        found = []
        for policy in (*ALL_POLICIES, *reversed(ALL_POLICIES)):
            set_policy(mine, policy)
            mine.zero_grad()
            pyg_sar.mean(node_losses(mine(data.x, data.edge_index), data.n_id)).backward()
            found.append(gradients(mine))
        return found

    alone = copy.deepcopy(layer)
    node_losses(alone(graph.x, graph.edge_index), torch.arange(40)).mean().backward()
    for found in threads(worker, WORLD):
        assert all(same(one, gradients(alone)) for one in found)
