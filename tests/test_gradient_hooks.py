"""Gradients as users see them beside ``.grad``: hooks on parameters, ``torch.autograd.grad``."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, OUT, TOLERANCE, Partitions, error, make_graph, node_losses, threads
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv

import pyg_sar

WORLD = 3
LIMIT = 0.02


class Net(torch.nn.Module):
    """``only`` names the rank that uses the head, if not all do."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(CHANNELS, 8), GATConv(8, OUT)])
        self.head = torch.nn.Linear(OUT, OUT)
        self.only: int | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x if self.only not in (None, pyg_sar.comm.current().rank) else self.head(x)


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph()


@pytest.fixture(scope="module")
def root(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("hooks"))(graph, WORLD, "random")


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


Loss = Callable[..., Tensor]
Run = Callable[[Any, Loss], Any]


def clipped(model: Any, loss: Loss) -> Any:
    """A hook that is not linear, twice, over accumulated passes; a third pass without."""
    handles = [p.register_hook(lambda g: g.clamp(-LIMIT, LIMIT)) for p in model.parameters()]
    handles += [p.register_hook(lambda g: g * g.norm()) for p in model.parameters()]
    loss().backward()
    loss().backward()
    for handle in handles:
        handle.remove()
    loss().backward()
    return [p.grad for p in model.parameters()]


def stepped_in_backward(model: Any, loss: Loss) -> Any:
    """An optimizer per parameter that steps inside the backward pass, and frees the gradient."""
    optimizers = {p: torch.optim.Adam([p], lr=0.05) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss().backward()
    assert all(p.grad is None for p in model.parameters())
    return [p.detach() for p in model.parameters()]


def seen_together(model: Any, loss: Loss) -> Any:
    """All gradients at once, and what hooks see of a pass for some of the parameters."""
    found: list[Tensor] = []
    handle = register_multi_grad_hook(tuple(model.parameters()), found.extend)
    loss().backward()
    handle.remove()
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.update({name: g.clone()}))
    model.zero_grad()
    wanted = list(model.convs.parameters())
    loss().backward(inputs=wanted)
    assert all(p.grad is None for p in model.head.parameters())
    return [*found, *(seen[name] for name in sorted(seen)), *(p.grad for p in wanted)]


def returned(model: Any, loss: Loss) -> Any:
    """``torch.autograd.grad``, of all and of some, with hooks, on a graph that is kept."""
    parameters = list(model.parameters())
    kept = loss()
    found = [*torch.autograd.grad(kept, parameters, retain_graph=True)]
    found += torch.autograd.grad(kept, parameters[:2], retain_graph=True)
    parameters[0].register_hook(lambda g: g.sign() * g.square())
    found += torch.autograd.grad(kept, parameters[:2], retain_graph=True)
    assert all(p.grad is None for p in parameters)
    kept.backward()
    return found + [p.grad for p in parameters]


def called_with_others(model: Any, loss: Loss) -> Any:
    """``functional_call`` with leaves of the user's own, and then without."""
    given = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    called = loss(lambda *inputs: functional_call(model, given, inputs))
    found = [*torch.autograd.grad(called, list(given.values()))]
    student = loss()
    teacher = {name: (3 * p).detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        found.append(loss(lambda *inputs: functional_call(model, teacher, inputs)))
    student.backward()
    return found + [p.grad for p in model.parameters()]


def asked_by_a_hook(model: Any, loss: Loss) -> Any:
    """``torch.autograd.grad`` within a hook of another pass: of a loss of its own."""
    parameters, found = list(model.parameters()), []
    other = loss()
    last = loss()
    last.register_hook(lambda _: found.extend(torch.autograd.grad(other, parameters)))
    last.backward()
    return found + [p.grad for p in parameters]


def scaled(model: Any, loss: Loss) -> Any:
    """A ``GradScaler``, whose scale is taken off the sums."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss()).backward()
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    scaler.step(optimizer)
    return [total, *(p.detach() for p in model.parameters())]


RUNS = [clipped, stepped_in_backward, seen_together, returned, called_with_others]
RUNS += [asked_by_a_hook, scaled]


@pytest.mark.parametrize("run", RUNS)
def test_hooks_see_sums(run: Run, net: Net, graph: Data, root: Path):
    """As in one process: the total goes into hooks, and what comes out is what is kept."""
    alone = copy.deepcopy(net)
    ids = torch.arange(graph.num_nodes)

    def loss_alone(call: Any = alone) -> Tensor:
        return node_losses(call(graph.x, graph.edge_index), ids).mean()

    expected = run(alone, loss_alone)

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        model = pyg_sar.distribute(copy.deepcopy(net), view="local")

        def loss(call: Any = model) -> Tensor:
            return pyg_sar.mean(node_losses(call(data.x, data.edge_index), data.n_id))

        return run(model, loss)

    for found in threads(worker, WORLD):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert error(ours, theirs) <= TOLERANCE or (ours - theirs).abs().max() < 1e-14


def test_hooks_of_before_distribute_and_early_buckets(net: Net, graph: Data, root: Path):
    """They move to the sums, their handles still take them away; so where sums start early."""
    ids = torch.arange(graph.num_nodes)

    def run(model: Any, loss: Loss, convert: Callable[[Any], Any]) -> Any:
        handles = [p.register_hook(lambda g: g.sign() * g.square()) for p in model.parameters()]
        model = convert(model)
        for hook in model._forward_pre_hooks.values():
            hook.bucket_bytes = 1
        found = []
        for _ in range(3):
            model.zero_grad()
            loss().backward()
            found += [p.grad.clone() for p in model.parameters()]
        for handle in handles:
            handle.remove()
        loss().backward()
        return found + [p.grad for p in model.parameters()]

    alone = copy.deepcopy(net)
    expected = run(
        alone, lambda: node_losses(alone(graph.x, graph.edge_index), ids).mean(), lambda m: m
    )

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        model: Any = copy.deepcopy(net)
        return run(
            model,
            lambda: pyg_sar.mean(node_losses(model(data.x, data.edge_index), data.n_id)),
            partial(pyg_sar.distribute, view="local"),
        )

    for found in threads(worker, WORLD):
        for ours, theirs in zip(found, expected, strict=True):
            assert error(ours, theirs) <= TOLERANCE or (ours - theirs).abs().max() < 1e-14


class Remade(torch.autograd.Function):
    """Differentiates by ``torch.autograd.grad`` in its backward pass, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x @ weight).tanh(), (x, weight), gradient)


class Reversible(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(CHANNELS, 8), SAGEConv(8, OUT)])
        self.weight = torch.nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index)
        return self.convs[1](Remade.apply(x, self.weight), edge_index)


def test_gradients_handed_to_an_outer_pass_are_summed_once(graph: Data, root: Path):
    """Each of the two passes returns a part; the sum is that of the outer one."""
    plain = Reversible().double()

    def run(model: Any, data: Data, ids: Tensor, mean: Any) -> list[Tensor]:
        def loss() -> Tensor:
            return mean(node_losses(model(data.x, data.edge_index), ids))

        parameters = list(model.parameters())
        loss().backward()
        return [*torch.autograd.grad(loss(), parameters), *(p.grad for p in parameters)]

    expected = run(copy.deepcopy(plain), graph, torch.arange(graph.num_nodes), torch.mean)

    def worker() -> list[Tensor]:
        data = pyg_sar.load_partition(root, view="local")
        model = pyg_sar.distribute(copy.deepcopy(plain), view="local")
        return run(model, data, data.n_id, pyg_sar.mean)

    for found in threads(worker, WORLD):
        assert all(error(*pair) <= TOLERANCE for pair in zip(found, expected, strict=True))


def test_what_cannot_be_summed_is_refused(net: Net, root: Path):
    """Second derivatives, hooks on autograd's nodes, gradients that are not returned here."""

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        model: Any = pyg_sar.distribute(copy.deepcopy(net), view="local")
        weight = model.head.weight

        def loss() -> Tensor:
            return pyg_sar.mean(node_losses(model(data.x, data.edge_index), data.n_id))

        with pytest.raises(NotImplementedError, match=r"parameter .* second derivatives"):
            loss().backward(create_graph=True)
        with pytest.raises(NotImplementedError, match="create_graph=True"):
            torch.autograd.grad(loss(), weight, create_graph=True)
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        for register in (node.register_hook, node.register_prehook):
            handle = register(lambda *_: None)
            with pytest.raises(
                pyg_sar.errors.PygSarError, match=r"'head.weight' has a hook on its Acc"
            ):
                loss().backward()
            handle.remove()
        early = loss()
        given = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
        functional_call(model, given, (data.x, data.edge_index))
        with pytest.raises(
            pyg_sar.errors.PygSarError, match=r"was called with others .*before that"
        ):
            early.backward()
        computed = {name: 2 * p for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=r"'convs.0.lin_l.weight' is computed from other tens"):
            functional_call(model, computed, (data.x, data.edge_index))
        model.zero_grad()
        loss().backward()  # Nothing of them is left.
        model.only = 1
        return torch.autograd.grad(loss(), list(model.parameters()), allow_unused=True)

    with pytest.raises(
        pyg_sar.errors.WorkerError,
        match=r"no gradient of 'head.weight' at rank [02], .*Use backward",
    ):
        threads(worker, WORLD)


def test_hooks_that_pytorch_forgets_are_missed(
    net: Net, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """As PyTorch 2.6 forgets those of parameters that a function saves in a checkpoint."""
    monkeypatch.setattr("pyg_sar.reduction.gradients.hooks_are_forgotten", lambda: True)

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        model: Any = pyg_sar.distribute(copy.deepcopy(net), view="local")

        def loss() -> Tensor:
            return pyg_sar.mean(node_losses(model(data.x, data.edge_index), data.n_id))

        loss().backward()
        loss().backward()
        torch.autograd.grad(loss(), model.head.weight)  # Called in another pass.
        model.head.weight._backward_hooks = None
        with pytest.raises(pyg_sar.errors.PygSarError, match="'head.weight' got this worker's"):
            loss().backward()

    threads(worker, WORLD)


def test_converted_models_are_freed(net: Net, root: Path):
    """Hooks on parameters don't keep a model that nobody uses any more."""

    def worker() -> bool:
        data = pyg_sar.load_partition(root, view="local")
        model: Any = pyg_sar.distribute(copy.deepcopy(net), view="local")
        model.head.weight.register_hook(lambda g: 2 * g)
        pyg_sar.mean(node_losses(model(data.x, data.edge_index), data.n_id)).backward()
        alive = weakref.ref(model)
        del model
        gc.collect()
        return alive() is None

    assert all(threads(worker, WORLD))
