"""Gradients of parameters as users see them: in hooks, by ``autograd.grad``, in optimizers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from oracle import (
    CHANNELS,
    OUT,
    TOLERANCE,
    Partitions,
    error,
    node_losses,
    parts,
    whole,
    workers,
)
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, GATConv, SAGEConv

import pyg_sar
from pyg_sar import SARPolicy

WORLD = 3
LIMIT = 0.02
DOUBLE = torch.float64
POLICIES = (SARPolicy(message_budget=600), SARPolicy(mode=3), SARPolicy(strategy="chunked"))


@pytest.fixture(scope="module")
def root(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("hooks"))(graph, WORLD, "random")


class Net(torch.nn.Module):
    """Layers, a norm between them, and a head that some calls leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(CHANNELS, 8), GATConv(8, OUT)])
        self.norm = BatchNorm(8, momentum=0.0)
        self.head = torch.nn.Linear(OUT, OUT)
        self.headless = False

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.convs[0](x, edge_index).tanh())
        x = self.convs[1](x, edge_index).tanh()
        return x if self.headless else self.head(x)


Loss = Callable[..., Tensor]
Run = Callable[[Any, Loss], Any]


def grads(model: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


# Hooks ########################################################################


def clipped(model: Any, loss: Loss) -> Any:
    """A hook that is not linear, twice, over accumulated passes; a third pass without."""
    handles = [p.register_hook(lambda g: g.clamp(-LIMIT, LIMIT)) for p in model.parameters()]
    handles += [p.register_hook(lambda g: g * g.norm()) for p in model.parameters()]
    loss().backward()
    loss().backward()
    for handle in handles:
        handle.remove()
    loss().backward()
    return grads(model)


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


def seen_by_nodes(model: Any, loss: Loss) -> Any:
    """Hooks on the nodes of autograd that accumulate the gradients."""
    found = []
    for parameter in (model.convs[1].bias, model.convs[0].lin_l.weight, model.head.weight):
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        found.append(node)
        node.register_prehook(lambda given: (given[0].sign() * given[0].square(),))
    loss().backward()
    return grads(model)


def asked_by_a_hook(model: Any, loss: Loss) -> Any:
    """``torch.autograd.grad`` within a hook of another pass: of a loss of its own."""
    parameters, found = list(model.parameters()), list[Any]()
    other = loss()
    last = loss()
    last.register_hook(lambda _: found.extend(torch.autograd.grad(other, parameters)))
    last.backward()
    return found + grads(model)


# Gradients that are asked for, passes that are combined #######################


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
    return found + grads(model)


def second_derivatives(model: Any, loss: Loss) -> Any:
    """A penalty of the gradients of parameters, by ``grad`` and by ``backward``."""
    for conv in model.convs:
        if isinstance(getattr(conv, "policy", None), SARPolicy):
            conv.policy = SARPolicy(mode=3, kernels="off")
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss(), parameters, create_graph=True)
    torch.stack([g.square().sum() for g in first]).sum().backward()
    found = grads(model)
    model.zero_grad()
    loss().backward(create_graph=True)
    squares = torch.stack([p.grad.square().sum() for p in parameters]).sum()
    found += torch.autograd.grad(squares, parameters)
    model.zero_grad()
    return found


def several_losses(model: Any, loss: Loss) -> Any:
    """Two losses of one graph, one after the other and weighed; one whose graph is dropped."""
    loss()
    one = loss()
    two = (one.square(), one.sin())
    two[0].backward(retain_graph=True)
    two[1].backward()
    found = grads(model)
    model.zero_grad()
    torch.autograd.backward([loss(), loss()], [torch.tensor(2.0, dtype=DOUBLE), None])
    return found + grads(model)


def in_a_checkpoint(model: Any, loss: Loss) -> Any:
    """All of the model is computed again, twice nested, beside a pass that isn't."""
    for reentrant in (False, True):

        def inner(x: Tensor, edge_index: Tensor, reentrant: bool = reentrant) -> Tensor:
            x.requires_grad_()
            return checkpoint(model, x, edge_index, use_reentrant=reentrant)

        outer = lambda *given: checkpoint(inner, *given, use_reentrant=False)  # noqa: E731
        (loss(outer) + loss(inner) + loss()).backward()
    return grads(model)


class Squared(torch.autograd.Function):
    """A function of a user's that saves a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.square().t(), 2 * weight * (x.t() @ gradient)


class Remade(torch.autograd.Function):
    """Differentiates by ``torch.autograd.grad`` in its backward pass, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, call: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return call(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.call(x), (x, *parameters), gradient)


def reversible(model: Any, loss: Loss) -> Any:
    """Each of two passes returns a part, of a layer and of a plain weight; sums are the outer's."""

    def call(x: Tensor, edge_index: Tensor) -> Tensor:
        layer = lambda x: model.convs[0](x, edge_index).tanh()  # noqa: E731
        x = Remade.apply(layer, x, *model.convs[0].parameters())
        x = model.convs[1](x, edge_index)
        x = Remade.apply(lambda x: x @ model.head.weight, x, model.head.weight)
        return checkpoint(Squared.apply, x, model.head.weight, use_reentrant=False)

    wanted = [*model.convs.parameters(), model.head.weight]
    loss(call).backward()
    return [*torch.autograd.grad(loss(call), wanted), *(p.grad for p in wanted)]


# Other parameters #############################################################


def called_with_others(model: Any, loss: Loss) -> Any:
    """``functional_call`` with leaves of the user's own, with computed ones, and then without."""
    given = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    called = loss(lambda *inputs: functional_call(model, given, inputs))
    found: list[Any] = [*torch.autograd.grad(called, list(given.values()))]
    student = loss()
    teacher = {name: (3 * p).detach() for name, p in model.named_parameters()}
    with torch.no_grad():
        found.append(loss(lambda *inputs: functional_call(model, teacher, inputs)))
    student.backward()
    found += grads(model)
    computed = {name: p.sin() for name, p in model.named_parameters()}
    loss(lambda *inputs: functional_call(model, computed, inputs)).backward()
    return found + grads(model)


def unused_and_frozen(model: Any, loss: Loss) -> Any:
    """What gets no gradient has none; what is frozen, and thawed later, as in one process."""
    model.headless = True
    model.convs[0].requires_grad_(False)
    loss().backward()
    model.convs[0].lin_l.requires_grad_(True)
    model.norm.requires_grad_(False)
    found = grads(model)
    loss().backward()
    model.headless = False
    model.zero_grad()
    loss().backward()
    found += grads(model)
    model.requires_grad_(False)
    x = loss()
    assert not x.requires_grad
    return [*found, x, *grads(model)]


def shared_weights(model: Any, loss: Loss) -> Any:
    """One weight in two layers and in the head; a layer called twice; a penalty outside."""
    other = model.convs[0].lin_r
    other.weight = model.convs[0].lin_l.weight
    square = torch.nn.Linear(OUT, OUT, dtype=DOUBLE)
    with torch.no_grad():
        square.weight.copy_(model.head.weight)
    model.head.weight = square.weight
    second = model.convs[1].lin.weight

    def call(x: Tensor, edge_index: Tensor) -> Tensor:
        first = model.convs[0]
        out = model.convs[1](first(x, edge_index) + first(x.sin(), edge_index), edge_index)
        out = out + x @ first.lin_l.weight.t() @ second.t()
        return model.head(out) @ model.head.weight.cos()

    (loss(call) + second.square().sum() + model.head.weight.mean()).backward()
    return grads(model)


# Optimizers ###################################################################


def accumulated_and_clipped(model: Any, loss: Loss) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for _ in range(3):
        for _ in range(2):
            (loss() / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        torch.nn.utils.clip_grad_value_(model.parameters(), LIMIT / 4)
        optimizer.step()
        optimizer.zero_grad()
    return [*norms, *(p.detach() for p in model.parameters())]


def by_line_search(model: Any, loss: Loss) -> Any:
    """LBFGS, which calls the loss as often as it likes."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
    )
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(value.detach())
        return value

    for _ in range(2):
        optimizer.step(closure)
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


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


def after_a_failure(model: Any, loss: Loss) -> Any:
    """A backward pass that fails leaves nothing behind that would spoil the next one."""

    def fail(gradient: Tensor) -> Tensor:
        raise KeyError("in a hook")

    handle = model.convs[1].bias.register_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        loss().backward()
    handle.remove()
    model.zero_grad()
    loss().backward()
    return grads(model)


RUNS: tuple[Run, ...] = (
    *(clipped, stepped_in_backward, seen_together, seen_by_nodes, asked_by_a_hook, returned),
    *(second_derivatives, several_losses, in_a_checkpoint, reversible, called_with_others),
    *(unused_and_frozen, shared_weights, accumulated_and_clipped, by_line_search, scaled),
    after_a_failure,
)


OF_EACH_POLICY: tuple[Run, ...] = (clipped, returned, in_a_checkpoint)


def runs(data: Data, convert: Callable[[Any], Any], chosen: Any = RUNS) -> dict[str, list[Any]]:
    """What each run finds; nothing but its gradients may be another afterwards."""
    found = {}
    for run in chosen:
        torch.manual_seed(0)
        model = convert(Net().double())
        x, before = data.x.clone(), data.x.clone()

        def loss(call: Any = model, x: Tensor = x) -> Tensor:
            return node_losses(call(x.detach(), data.edge_index)).mean()

        found[run.__name__] = [
            None if t is None else whole(t.detach()) for t in tree_leaves(run(model, loss))
        ]
        assert x.grad is None and bool((x == before).all())
        model.requires_grad_(True)
        assert all(type(p) is torch.nn.Parameter and p.is_leaf for p in model.parameters())
    return found


def compare(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    for name, values in found.items():
        assert len(values) == len(expected[name]) > 0, name
        for ours, theirs in zip(values, expected[name], strict=True):
            close = error(ours, theirs) <= TOLERANCE
            assert close or (ours - theirs).abs().max() < 1e-14, (name, ours, theirs)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("start", [workers, parts])
def test_gradients_are_those_of_one_process(start: Any, graph: Data, root: Path) -> None:
    """By default half of the runs on workers, the others for parts."""
    key = f"by {start.__name__}"
    chosen, others = some(RUNS, key, 2), some(OF_EACH_POLICY, key, 2)
    expected = runs(graph, lambda model: model, {*chosen, *others})

    def worker() -> list[Any]:
        data = pyg_sar.load_partition(root)
        return [
            runs(data, partial(pyg_sar.distribute, policy=policy), others if k else chosen)
            for k, policy in enumerate(POLICIES)
        ]

    for by_policy in start(worker, WORLD):
        for found in by_policy:
            compare(found, expected)


def test_hooks_of_before_distribute(graph: Data, root: Path) -> None:
    """They see whole gradients, too; their handles still take them away."""

    def run(data: Data, convert: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model: Any = Net().double()
        handles = [p.register_hook(lambda g: g.sign() * g.square()) for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        convert(model)
        found = []
        for step in range(4):
            if step == 3:
                for handle in handles:
                    handle.remove()
            optimizer.zero_grad()
            node_losses(model(data.x, data.edge_index)).mean().backward()
            found += grads(model)
            optimizer.step()
        return found

    expected = run(graph, lambda model: model)
    for found in workers(lambda: run(pyg_sar.load_partition(root), pyg_sar.distribute), WORLD):
        for ours, theirs in zip(found, expected, strict=True):
            assert error(ours, theirs) <= TOLERANCE or (ours - theirs).abs().max() < 1e-14


def test_models_are_freed(root: Path) -> None:
    """Nothing keeps a model, or its parameters, that nobody uses any more."""

    def worker() -> list[type]:
        data = pyg_sar.load_partition(root)
        model: Any = pyg_sar.distribute(Net().double())
        model.head.weight.register_hook(lambda g: 2 * g)
        for _ in range(2):
            node_losses(model(data.x, data.edge_index)).mean().backward()
        alive = [weakref.ref(one) for one in (model, *model.modules(), *model.parameters())]
        del model
        gc.collect()
        return [type(one()) for one in alive if one() is not None]

    for left in workers(worker, WORLD):
        assert left == []
