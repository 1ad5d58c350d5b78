"""Summing parameter gradients over workers when a backward pass ends.

[Note: when the sum is taken] A leaf's gradient hook runs once per backward pass, before its
gradient is accumulated. It puts an earlier ``.grad`` aside, so that only this pass's gradients are
summed (accumulation over several passes stays right), and asks the autograd engine for a callback
at the end of the pass. There one all-reduce per dtype carries all parameters in the model's order,
whichever of them got a gradient here: every worker sends the same, and where no worker has one,
``.grad`` stays ``None``, as in one process. ``torch.autograd.grad`` accumulates nothing; then the
callback puts everything back and communicates nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm import Communicator, current

_LABEL = ("", "backward", "gradient sum")


MARK = "_pyg_sar_gradient"
"""Attribute of parameters whose gradients are summed, here or by hand."""


class ParameterHook(ABC):
    """A forward pre-hook that knows a model's parameters, those of copies of the model too."""

    def __init__(self) -> None:
        self._copying: tuple[dict[int, Any], list[Tensor]] | None = None
        self.parameters: list[Tensor] = []

    def __call__(self, model: torch.nn.Module, inputs: Any = None) -> None:
        """Takes in the model's parameters, those added since the last call too."""
        self._copying = None
        self._set(model.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterHook:
        # The model's parameters may be copied after this: they are looked up at the first use.
        copy = self.fresh()
        copy._copying = (memo, self.parameters)
        return copy

    def settle(self) -> None:
        """Takes in the parameters of a copied model, whichever of its methods runs first."""
        if self._copying is None:
            return
        memo, originals = self._copying
        self._copying = None
        found = (memo.get(id(original)) for original in originals)
        self._set(parameter for parameter in found if parameter is not None)

    def _set(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        for parameter in self.parameters:
            if parameter.requires_grad and not hasattr(parameter, MARK):
                setattr(parameter, MARK, True)
                self.take_in(parameter)

    @abstractmethod
    def fresh(self) -> ParameterHook:
        """One of its kind, without parameters."""

    @abstractmethod
    def take_in(self, parameter: Tensor) -> None:
        """Called once for each parameter that requires a gradient."""


class SummedByHand(ParameterHook):
    """Marks the parameters of a model whose user calls :func:`sum_gradients`."""

    def fresh(self) -> SummedByHand:
        return SummedByHand()

    def take_in(self, parameter: Tensor) -> None:
        pass


def unsummed_parameter(values: Tensor) -> Tensor | None:
    """A parameter that ``values`` depend on and whose gradient nobody sums, if there is one."""
    stack, seen = [values.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter) and not hasattr(leaf, MARK):
            return leaf
        stack += [parent for parent, _ in node.next_functions]
    return None


class GradientSum(ParameterHook):
    """Sums gradients over workers when a backward pass ends. See [Note: when the sum is taken].

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self._aside: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._accumulated: set[int] = set()
        self._waiting = False

    def fresh(self) -> GradientSum:
        return GradientSum(self.comm)

    def take_in(self, parameter: Tensor) -> None:
        parameter.register_hook(partial(self._before, parameter))
        parameter.register_post_accumulate_grad_hook(self._after)

    def _before(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if id(parameter) not in self._aside:
            self._aside[id(parameter)] = (parameter, parameter.grad)
            parameter.grad = None
        if not self._waiting:
            self._waiting = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _after(self, parameter: Tensor) -> None:
        self._accumulated.add(id(parameter))

    def _finish(self) -> None:
        aside, self._aside = self._aside, {}
        accumulated, self._accumulated = self._accumulated, set()
        self._waiting = False
        if accumulated:
            _sum(self.parameters, self.comm)
        for parameter, earlier in aside.values():
            if earlier is not None:
                if parameter.grad is not None:
                    earlier.add_(parameter.grad)
                parameter.grad = earlier


@torch.no_grad()
def _sum(parameters: Iterable[Tensor], comm: Communicator) -> None:
    """Replaces each ``.grad`` by its sum over the workers, in one message per dtype."""
    groups: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            groups[parameter.dtype, parameter.device].append(parameter)
    for group in groups.values():
        present = [float(p.grad is not None) for p in group]
        parts = []
        for p in group:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ValueError(
                    f"A parameter of shape {list(p.shape)} has a sparse gradient at rank "
                    f"{comm.rank}; use torch.nn.Embedding(..., sparse=False)"
                )
            parts.append(torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1))
        flat = torch.cat([*parts, parts[0].new_tensor(present)])
        comm.all_reduce(flat, label=_LABEL)
        sums = flat[: -len(group)].split([p.numel() for p in group])
        for p, total, holders in zip(group, sums, flat[-len(group) :].tolist(), strict=True):
            if holders:
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                p.grad.copy_(total.view_as(p))


def sum_gradients(model: torch.nn.Module) -> None:
    r"""Sums every ``p.grad`` over the workers, in place: :math:`g \leftarrow \sum_p g_p`.

    For models converted with ``distribute(model, sum_gradients=False)``; call it once after
    ``backward()`` on every worker.

    Args:
        model: The model.

    Raises:
        ValueError: When the model sums its gradients by itself.
    """
    hooks = model._forward_pre_hooks.values()
    if any(isinstance(hook, GradientSum) for hook in hooks):
        raise ValueError(
            "This model sums its gradients inside backward() already; convert it with "
            "pyg_sar.distribute(model, sum_gradients=False) to do it by hand"
        )
    comm = current()
    if comm.world_size > 1:
        _sum(model.parameters(), comm)
