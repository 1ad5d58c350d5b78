"""Summing parameter gradients over workers when a backward pass ends.

[Note: when the sum is taken] A leaf's gradient hook runs once per backward pass, before its
gradient is accumulated. It puts an earlier ``.grad`` aside, so that only this pass's gradients are
summed (accumulation over several passes stays right), and asks the autograd engine for a callback
at the end of the pass. There one all-reduce per dtype carries all parameters in the model's order,
whichever of them got a gradient here: every worker sends the same, and where no worker has one,
``.grad`` stays ``None``, as in one process. ``torch.autograd.grad`` accumulates nothing; then the
callback puts everything back and communicates nothing.

[Note: buckets] Large models needn't wait for the end. A backward pass comes through the same points
on every worker: where a layer begins to return gradients of its rows. From the first pass the
workers learn, together, at which point each parameter's gradient is complete on all of them; in
later passes it travels from there, in buckets, behind the rest of the pass. A gradient that comes
later than it was learnt is summed at the end, and then nothing is sent early any more: right in
any case, for the order of the messages depends on the points alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm import Communicator, current
from pyg_sar.owned_rows import owned_parameters, shared_parameters
from pyg_sar.payload import num_bytes

_LABEL = ("", "backward", "gradient sum")
BUCKET = 1 << 20  # bytes: of smaller models all gradients are summed at the end


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
        bucket_bytes: From how many bytes on gradients are sent before that. See [Note: buckets].
    """

    def __init__(self, comm: Communicator, bucket_bytes: int = BUCKET) -> None:
        super().__init__()
        self.comm = comm
        self.bucket_bytes = bucket_bytes
        self._passes: dict[int, _Pass] = {}
        self._points: dict[int, int] = {}
        self._schedule: dict[int, list[Tensor]] | None = None
        comm.add_listener(self)

    def fresh(self) -> GradientSum:
        return GradientSum(self.comm, self.bucket_bytes)

    def _set(self, parameters: Iterable[Tensor]) -> None:
        before = [id(parameter) for parameter in self.parameters]
        super()._set(parameters)
        if before != [id(parameter) for parameter in self.parameters]:
            self._schedule = None

    def take_in(self, parameter: Tensor) -> None:
        parameter.register_hook(partial(self._before, parameter))
        parameter.register_post_accumulate_grad_hook(self._after)

    def settle(self) -> None:
        super().settle()
        if torch._C._current_graph_task_id() == -1:
            self._points = {}
        if torch._C._current_graph_task_id() == -1 and self._passes:
            # Not within a backward pass: those that are open failed, and their callbacks with them.
            failed, self._passes = self._passes, {}
            for one in reversed(failed.values()):
                for parameter, earlier, stand_in in one.aside.values():
                    if parameter.grad is stand_in:  # Else the user has reset it since.
                        parameter.grad = earlier

    def _before(self, parameter: Tensor, gradient: Tensor | None) -> None:
        one = self._open(torch._C._current_graph_task_id())
        one.accumulates |= _will_accumulate(parameter)
        aside = one.aside
        if id(parameter) not in aside:
            earlier = parameter.grad
            stand_in = None if earlier is None else torch.zeros_like(earlier)
            aside[id(parameter)] = (parameter, earlier, stand_in)
            parameter.grad = stand_in

    def _open(self, task: int) -> _Pass:
        """The pass under way, whose end will call :meth:`_finish`."""
        if task not in self._passes:
            self._passes[task] = _Pass()
            callback = partial(self._finish, task)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        return self._passes[task]

    def _after(self, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        self._passes[task].accumulated[id(parameter)] = self._points.get(task, 0)

    @torch.no_grad()
    def returning(self) -> None:
        """A layer begins to return gradients, on every worker. See [Note: buckets]."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        point = self._points.get(task, 0)
        self._points[task] = point + 1
        bucket = (self._schedule or {}).get(point)
        if bucket is None:
            return
        one = self._open(task)
        leaves = (p for p in self.parameters if p.requires_grad)
        one.accumulates = one.accumulates or any(map(_will_accumulate, leaves))
        if one.accumulates:
            one.sent |= {id(p): id(p) in one.accumulated for p in bucket}
            one.under_way.append(_post_totals(bucket, one.own(bucket), self.comm))

    def _sum(self, one: _Pass, task: int) -> dict[int, Tensor]:
        """All sums of a pass, those under way and those of what is left."""
        left = [p for p in self.parameters if id(p) not in one.sent]
        totals = _post_totals(left, one.own(left), self.comm)()
        for arrive in one.under_way:
            totals |= arrive()
        if one.sent:
            late = [p for p in self.parameters if not one.sent.get(id(p), True)]
            late = [p for p in late if id(p) in one.accumulated]
            count = torch.tensor([float(len(late))], device=self.comm.device)
            if self.comm.all_reduce(count, label=_LABEL).item():
                self._schedule = {}
                early = [p for p in self.parameters if id(p) in one.sent]
                ids = {id(p) for p in late}
                own = [p if id(p) in ids else None for p in early]
                for key, total in _post_totals(early, own, self.comm)().items():
                    totals[key] = totals[key] + total if key in totals else total
        elif self._schedule is None:
            self._schedule = self._learn(one, self._points.get(task, 0))
        return totals

    def _learn(self, one: _Pass, points: int) -> dict[int, list[Tensor]]:
        """Which parameters' gradients are sent at which point, the same on every worker."""
        wanted = [p for p in self.parameters if p.requires_grad]
        if sum(map(num_bytes, wanted)) < self.bucket_bytes:
            return {}
        ready = [one.accumulated.get(id(p), -1) for p in wanted]
        agreed = torch.tensor([*ready, points], device=self.comm.device)
        self.comm.all_reduce(agreed, "max", label=_LABEL)
        *ready, points = agreed.tolist()
        schedule: dict[int, list[Tensor]] = {}
        bucket: list[Tensor] = []
        for point in range(points):
            bucket += [p for p, at in zip(wanted, ready, strict=True) if at == point]
            if bucket and sum(map(num_bytes, bucket)) >= self.bucket_bytes:
                schedule[point], bucket = bucket, []
        return schedule

    @torch.no_grad()
    def _finish(self, task: int) -> None:
        one = self._passes.pop(task)
        totals: dict[int, Tensor] = {}
        if one.accumulates:
            totals = self._sum(one, task)
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
    ``accumulated`` says at which point that was. ``accumulates`` is false for a pass of
    ``torch.autograd.grad``. ``sent`` says which gradients are under way already, and whether there
    was one here.
    """

    aside: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=dict)
    accumulated: dict[int, int] = field(default_factory=dict)
    accumulates: bool = False
    sent: dict[int, bool] = field(default_factory=dict)
    under_way: list[Callable[[], dict[int, Tensor]]] = field(default_factory=list)

    def own(self, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """Those parameters whose gradient is there, ``None`` in the places of the others."""
        return [p if id(p) in self.accumulated else None for p in parameters]


def _post_totals(
    parameters: Sequence[Tensor], own: Sequence[Tensor | None], comm: Communicator
) -> Callable[[], dict[int, Tensor]]:
    """Begins to sum gradients over the workers, in one message per dtype.

    Args:
        parameters: All parameters, alike on every worker.
        own: Those whose ``.grad`` counts here, ``None`` in the places of the others.
        comm: The communicator.

    Returns:
        Waits for the sums and returns them by ``id(parameter)``, for those parameters to which
        any worker contributed.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor | None]]]
    groups = defaultdict(list)
    for parameter, mine in zip(parameters, own, strict=True):
        if parameter.requires_grad:
            gradient = None if mine is None else mine.grad
            groups[parameter.dtype, parameter.device].append((parameter, gradient))
    posted = []
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
        posted.append((group, flat, comm.all_reduce_async(flat, label=_LABEL)))

    def arrive() -> dict[int, Tensor]:
        totals: dict[int, Tensor] = {}
        for group, flat, work in posted:
            work.wait()
            sums = flat[: -len(group)].split([p.numel() for p, _ in group])
            for (p, _), total, holders in zip(
                group, sums, flat[-len(group) :].tolist(), strict=True
            ):
                if holders:
                    totals[id(p)] = total.view_as(p).clone()
        return totals

    return arrive


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
        for key, total in _post_totals(parameters, parameters, comm)().items():
            parameter = next(p for p in parameters if id(p) == key)
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.copy_(total)
