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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm import Communicator, current
from pyg_sar.owned_rows import owned_parameters, shared_parameters

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
        self.settle()
        for _, _, rows in owned_parameters(model):
            setattr(rows, MARK, True)  # Their gradients are complete where they are.
        self._set(shared_parameters(model))

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
        self._passes: dict[int, _Pass] = {}

    def fresh(self) -> GradientSum:
        return GradientSum(self.comm)

    def take_in(self, parameter: Tensor) -> None:
        parameter.register_hook(partial(self._before, parameter))
        parameter.register_post_accumulate_grad_hook(self._after)

    def settle(self) -> None:
        super().settle()
        if torch._C._current_graph_task_id() == -1 and self._passes:
            # Not within a backward pass: those that are open failed, and their callbacks with them.
            failed, self._passes = self._passes, {}
            for one in reversed(failed.values()):
                for parameter, earlier, stand_in in one.aside.values():
                    if parameter.grad is stand_in:  # Else the user has reset it since.
                        parameter.grad = earlier

    def _before(self, parameter: Tensor, gradient: Tensor | None) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = _Pass()
            callback = partial(self._finish, task)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._passes[task].accumulates |= _will_accumulate(parameter)
        aside = self._passes[task].aside
        if id(parameter) not in aside:
            earlier = parameter.grad
            stand_in = None if earlier is None else torch.zeros_like(earlier)
            aside[id(parameter)] = (parameter, earlier, stand_in)
            parameter.grad = stand_in

    def _after(self, parameter: Tensor) -> None:
        self._passes[torch._C._current_graph_task_id()].accumulated.add(id(parameter))

    @torch.no_grad()
    def _finish(self, task: int) -> None:
        one = self._passes.pop(task)
        totals: dict[int, Tensor] = {}
        if one.accumulates:
            own = [p if id(p) in one.accumulated else None for p in self.parameters]
            totals = _totals(self.parameters, own, self.comm)
        for parameter in self.parameters:
            key = id(parameter)
            total = totals.get(key)
            earlier = one.aside[key][1] if key in one.aside else parameter.grad
            outer = next((p for p in self._passes.values() if key in p.aside), None)
            if outer is not None and total is not None:
                # A pass within a pass: this sum is done, the outer pass's part is not.
                _, before, stand_in = outer.aside[key]
                done = total if before is None else before.add_(total)
                outer.aside[key] = (parameter, done, stand_in)
                total = None
            if total is not None:
                earlier = total if earlier is None else earlier.add_(total)
            parameter.grad = earlier


def _will_accumulate(parameter: Tensor) -> bool:
    """Whether the pass under way accumulates; ``torch.autograd.grad`` runs hooks, but doesn't."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # The engine's answer for a leaf in torch.autograd.grad().
        return False


@dataclass(slots=True)
class _Pass:
    """A backward pass under way: gradients put aside, and whose were accumulated since.

    ``aside`` holds parameters with their earlier gradients and what stands in for these.
    ``accumulates`` is false for a pass of ``torch.autograd.grad``.
    """

    aside: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=dict)
    accumulated: set[int] = field(default_factory=set)
    accumulates: bool = False


def _totals(
    parameters: Sequence[Tensor], own: Sequence[Tensor | None], comm: Communicator
) -> dict[int, Tensor]:
    """Sums gradients over the workers, in one message per dtype.

    Args:
        parameters: All parameters, alike on every worker.
        own: Those whose ``.grad`` counts here, ``None`` in the places of the others.
        comm: The communicator.

    Returns:
        The sum by ``id(parameter)``, for those to which any worker contributed.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor | None]]]
    groups = defaultdict(list)
    for parameter, mine in zip(parameters, own, strict=True):
        if parameter.requires_grad:
            gradient = None if mine is None else mine.grad
            groups[parameter.dtype, parameter.device].append((parameter, gradient))
    totals: dict[int, Tensor] = {}
    for group in groups.values():
        parts = []
        for p, gradient in group:
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(
                    f"A parameter of shape {list(p.shape)} has a sparse gradient at rank "
                    f"{comm.rank}; use torch.nn.Embedding(..., sparse=False)"
                )
            parts.append((torch.zeros_like(p) if gradient is None else gradient).reshape(-1))
        present = [float(gradient is not None) for _, gradient in group]
        flat = torch.cat([*parts, parts[0].new_tensor(present)])
        comm.all_reduce(flat, label=_LABEL)
        sums = flat[: -len(group)].split([p.numel() for p, _ in group])
        for (p, _), total, holders in zip(group, sums, flat[-len(group) :].tolist(), strict=True):
            if holders:
                totals[id(p)] = total.view_as(p).clone()
    return totals


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
    if comm.world_size == 1:
        return
    parameters = shared_parameters(model)
    with torch.no_grad():
        for key, total in _totals(parameters, parameters, comm).items():
            parameter = next(p for p in parameters if id(p) == key)
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.copy_(total)
