"""Summing parameter gradients over workers when a backward pass ends.

[Note: when the sum is taken] A leaf's gradient hook runs once per backward pass, before its
gradient is accumulated. It keeps the gradient, gives autograd zeros to accumulate in its place, and
asks the engine for a callback at the end of the pass. There one all-reduce per dtype carries all
parameters in the model's order, whichever of them got a gradient here: every worker sends the same,
and where no worker has one, ``.grad`` stays ``None``, as in one process. The sums pass through the
users' hooks (see [Note: hooks on sums]) and are added to ``.grad``. In ``torch.autograd.grad``,
which accumulates nothing, they are written into the tensors that it returns.

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

from pyg_sar.comm.collectives import begun_within_another, warn_of_local_mean
from pyg_sar.comm.group import Communicator, current
from pyg_sar.comm.messages import num_bytes
from pyg_sar.errors import DistributedIndexError, PygSarError, refuse_second_derivative
from pyg_sar.reduction.parameters import (
    LIMBS,
    attribute_rows,
    check_replicas,
    defer_hooks,
    differ,
    hooks_are_forgotten,
    in_space,
    marks,
    reconcile,
    refuse_node_hooks,
    refuse_wrapped,
    shared_names,
    shared_parameters,
    tensors_of,
)
from pyg_sar.tensors import NodeTensor

_LABEL = ("", "backward", "gradient sum")
BUCKET = 1 << 20  # bytes: of smaller models all gradients are summed at the end


MARK = "_pyg_sar_gradient"
"""Attribute of parameters whose gradients are summed, here or by hand: their name."""


class ParameterHook(ABC):
    """A forward pre-hook that knows a model's parameters, those of copies of the model too.

    Args:
        comm: The communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._copying: tuple[dict[int, Any], list[Tensor]] | None = None
        self.parameters: list[Tensor] = []
        self.settings: list[str] = []  # of the model's layers, in its last call

    @torch.compiler.disable
    def __call__(self, model: torch.nn.Module, *inputs: Any) -> None:
        """Takes in the model's parameters, those added since the last call too."""
        refuse_wrapped(model)
        if any(isinstance(tensor, NodeTensor) for tensor in tensors_of(inputs)):
            raise other_view(f"An input of {type(model).__name__}", self.comm.rank)
        self._copying = None
        self.settle()
        if torch.is_grad_enabled() or not inputs:
            self.settings = attribute_rows(model, settings=True)
            self._set(shared_names(model))
        elif in_space(inputs):
            check_replicas(model, self.comm)  # No gradient sum will do it.

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
        found = ((getattr(one, MARK, "?"), memo.get(id(one))) for one in originals)
        self._set((name, copy) for name, copy in found if copy is not None)

    def _set(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.parameters = []
        for name, parameter in named:
            self.parameters.append(parameter)
            if parameter.requires_grad and not hasattr(parameter, MARK):
                setattr(parameter, MARK, name)
                self.take_in(parameter)

    @abstractmethod
    def fresh(self) -> ParameterHook:
        """Returns one of its kind, without parameters."""

    @abstractmethod
    def take_in(self, parameter: Tensor) -> None:
        """Adds a parameter; called once for each that requires a gradient."""


class SummedByHand(ParameterHook):
    """Marks the parameters of a model whose user calls :func:`sum_gradients`."""

    def fresh(self) -> SummedByHand:
        return SummedByHand(self.comm)

    def take_in(self, parameter: Tensor) -> None:
        pass


def unsummed_parameter(values: Tensor) -> Tensor | None:
    """Returns a parameter that ``values`` depend on and whose gradient nobody sums, or ``None``."""
    stack, seen = [values.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter) and not hasattr(leaf, MARK):
            return leaf
        if node.name() != "ToLocalBackward":  # What is before it is of the whole graph.
            stack += [parent for parent, _ in node.next_functions]
    return None


def other_view(what: str, rank: int) -> DistributedIndexError:
    """Returns the error of a model for own rows that meets tensors of the whole graph."""
    return DistributedIndexError(
        f"{what} is of the whole graph (rank {rank}), where gradients are complete on every worker "
        "already, but the model was converted with view='local', which sums them over the "
        "workers: call distribute(model), or load_partition(root, view='local')"
    )


class GradientSum(ParameterHook):
    """Sums gradients over workers when a backward pass ends. See [Note: when the sum is taken].

    Args:
        comm: The communicator.
        bucket_bytes: From how many bytes on gradients are sent before that. See [Note: buckets].
    """

    def __init__(self, comm: Communicator, bucket_bytes: int = BUCKET) -> None:
        super().__init__(comm)
        self.bucket_bytes = bucket_bytes
        self._warned = False
        self._called: dict[int, int] = {}
        self._known: dict[int, None] = {}
        self._passes: dict[int, _Pass] = {}
        self._points: dict[int, int] = {}
        self._schedule: dict[int, list[Tensor]] | None = None
        comm.add_listener(self)

    def fresh(self) -> GradientSum:
        return GradientSum(self.comm, self.bucket_bytes)

    def _set(self, named: Iterable[tuple[str, Tensor]]) -> None:
        before = list(self._known)
        super()._set(named)
        self._known = {id(parameter): None for parameter in self.parameters}
        if before != list(self._known):
            self._schedule = None

    def take_in(self, parameter: Tensor) -> None:
        if not parameter.is_leaf:
            raise ValueError(
                f"Parameter {getattr(parameter, MARK)!r} is computed from other tensors "
                f"(functional_call, at rank {self.comm.rank}), whose gradients would be this "
                "worker's part: convert the model with distribute(model, sum_gradients=False), "
                "and sum the gradients of those tensors over the workers"
            )
        after = self._check_called if hooks_are_forgotten() else None
        defer_hooks(parameter, partial(self._before, parameter), after)

    def settle(self) -> None:
        if self._copying is not None:
            super().settle()
        if torch._C._current_graph_task_id() == -1:
            # Not within a backward pass: those that are open failed, and their callbacks with them.
            self._points, self._passes = {}, {}

    def _before(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        task = self._called[id(parameter)] = torch._C._current_graph_task_id()
        one = None if gradient is None else self._opened(task)
        node = None if one is None else one.nodes.get(id(parameter))
        if node is None:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
        if gradient is None or _use(node) is None:
            return gradient
        name = getattr(parameter, MARK)
        if torch.is_grad_enabled():
            refuse_second_derivative(
                f"The gradient of parameter {name!r} at rank {self.comm.rank}",
                "are not there, as it is summed over the workers; of inputs they are: "
                "torch.autograd.grad(out, inputs, create_graph=True)",
            )
        if one is None or id(parameter) not in self._known:
            raise PygSarError(
                f"Parameter {name!r} was replaced, or the model was called with others "
                "(functional_call), before this backward pass: run backward() before that"
            )
        refuse_node_hooks(node, name)
        if gradient.layout != torch.strided:
            raise ValueError(
                f"Parameter {name!r} has a sparse gradient at rank {self.comm.rank}; use "
                "torch.nn.Embedding(..., sparse=False)"
            )
        if self.comm.global_pass == task:
            raise other_view(f"The gradient of parameter {name!r}", self.comm.rank)
        one.own[id(parameter)] = gradient
        one.points[id(parameter)] = self._points.get(task, 0)
        if one.captures:
            one.captured[id(parameter)] = gradient.clone()
            return one.captured[id(parameter)]
        return gradient.new_zeros(()).expand_as(gradient)

    def _check_called(self, parameter: Tensor) -> None:
        """Refuses a gradient that autograd has accumulated without a call of the hook."""
        if self._called.get(id(parameter)) != torch._C._current_graph_task_id():
            raise PygSarError(
                f"Parameter {getattr(parameter, MARK)!r} got this worker's part of its gradient "
                f"(rank {self.comm.rank}): PyTorch {torch.__version__} has not called its hook, as "
                "an autograd.Function has saved it within torch.utils.checkpoint or "
                "saved_tensors_hooks: save parameter.detach() there, or take a newer PyTorch"
            )

    def _opened(self, task: int) -> _Pass | None:
        """Returns the pass under way, whose end will call :meth:`_finish`.

        ``None`` where it has no gradient of a parameter.
        """
        if task not in self._passes:
            wanted = [p for p in self.parameters if p.requires_grad]
            nodes = {id(p): torch.autograd.graph.get_gradient_edge(p).node for p in wanted}
            uses = {_use(node) for node in nodes.values()}
            if uses <= {None}:
                return None
            self._warned = self._warned or warn_of_local_mean(self.comm.device)
            self._passes[task] = _Pass("captured" in uses, nodes)
            callback = partial(self._finish, task)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        return self._passes[task]

    @torch.no_grad()
    def returning(self) -> None:
        """Sends what is complete: a layer begins to return gradients. See [Note: buckets]."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        point = self._points.get(task, 0)
        self._points[task] = point + 1
        if not point:
            self._opened(task)
        bucket = (self._schedule or {}).get(point)
        if bucket is not None and task in self._passes:
            one = self._passes[task]
            one.sent |= {id(p): id(p) in one.own for p in bucket}
            own = [one.own.get(id(p)) for p in bucket]
            one.under_way.append(post_totals(_named(bucket), own, self.comm, self.settings))

    def _sum(self, one: _Pass, task: int) -> dict[int, Tensor]:
        """Returns all sums of a pass, those under way and those of what is left."""
        left = [p for p in self.parameters if id(p) not in one.sent]
        mine = [one.own.get(id(p)) for p in left]
        totals = post_totals(_named(left), mine, self.comm, self.settings)()
        for arrive in one.under_way:
            totals |= arrive()
        if one.sent:
            late = [p for p in self.parameters if not one.sent.get(id(p), True)]
            late = [p for p in late if id(p) in one.own]
            count = torch.tensor([float(len(late))], device=self.comm.device)
            if self.comm.all_reduce(count, label=_LABEL).item():
                self._schedule = {}
                early = [p for p in self.parameters if id(p) in one.sent]
                ids = {id(p) for p in late}
                own = [one.own[id(p)] if id(p) in ids else None for p in early]
                for key, total in post_totals(_named(early), own, self.comm)().items():
                    totals[key] = totals[key] + total if key in totals else total
        elif self._schedule is None and not one.captures:
            self._schedule = self._learn(one, self._points.get(task, 0))
        return totals

    def _learn(self, one: _Pass, points: int) -> dict[int, list[Tensor]]:
        """Learns which parameters' gradients are sent at which point, the same on every worker."""
        wanted = [p for p in self.parameters if p.requires_grad]
        if sum(map(num_bytes, wanted)) < self.bucket_bytes:
            return {}
        ready = [one.points.get(id(p), -1) for p in wanted]
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
        totals = self._sum(one, task)
        for parameter in self.parameters:
            if id(parameter) not in totals:
                continue
            hooks: Any = parameter._backward_hooks
            after: Any = parameter._post_accumulate_grad_hooks
            total = totals[id(parameter)]
            for hook in list(hooks.users.values()):
                found = hook(total)
                total = total if found is None else found
            if one.captures:
                self._returned(one, parameter).copy_(total)
                continue
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.add_(total)
            for hook in list(after.users.values()):
                hook(parameter)

    def _returned(self, one: _Pass, parameter: Tensor) -> Tensor:
        """Returns what ``torch.autograd.grad`` will return for a parameter."""
        if id(parameter) not in one.captured:
            raise PygSarError(
                f"torch.autograd.grad() returns no gradient of {getattr(parameter, MARK)!r} at "
                f"rank {self.comm.rank}, where the output does not depend on it; it does on "
                "another worker. Use backward()"
            )
        return one.captured[id(parameter)]


def _use(node: Any) -> str | None:
    """Returns whether the pass under way accumulates a parameter's gradient, or returns it.

    ``None`` if it does neither, or returns it to another pass.
    """
    try:
        return "accumulated" if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # The engine's answer for a leaf in torch.autograd.grad().
        return None if begun_within_another() else "captured"


@dataclass(slots=True)
class _Pass:
    """A backward pass under way.

    ``captures`` says that it is one of ``torch.autograd.grad``. ``nodes`` holds what accumulates
    each parameter's gradient, by ``id(parameter)``. ``own`` holds this worker's
    gradients by ``id(parameter)``, ``points`` says at which point each was there, ``captured``
    holds what autograd will return in its place. ``sent`` says which gradients are under way
    already, and whether there was one here.
    """

    captures: bool
    nodes: dict[int, Any]
    own: dict[int, Tensor] = field(default_factory=dict)
    points: dict[int, int] = field(default_factory=dict)
    captured: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, bool] = field(default_factory=dict)
    under_way: list[Callable[[], dict[int, Tensor]]] = field(default_factory=list)


def _named(parameters: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(getattr(p, MARK, "?"), p) for p in parameters]  # Frozen ones have no name.


def post_totals(
    named: Sequence[tuple[str, Tensor]],
    own: Sequence[Tensor | None],
    comm: Communicator,
    settings: Sequence[str] = (),
) -> Callable[[], dict[int, Tensor]]:
    """Begins to sum gradients over the workers, in one message per dtype.

    The message carries checksums of the parameters, too: see [Note: marks].

    Args:
        named: All parameters and their names, alike on every worker.
        own: The gradients that count here, ``None`` in the places of the others.
        comm: The communicator.
        settings: Of the model's layers, to compare.

    Returns:
        Waits for the sums and returns them by ``id(parameter)``, for those parameters to which
        any worker contributed.
    """
    groups: defaultdict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor | None]]]
    groups, names = defaultdict(list), {id(p): name for name, p in named}
    for (_, parameter), gradient in zip(named, own, strict=True):
        if parameter.requires_grad:
            groups[parameter.dtype, parameter.device].append((parameter, gradient))
    posted = []
    for group in groups.values():
        parts = [torch.zeros_like(p) if g is None else g.resolve_conj() for p, g in group]
        present = parts[0].new_tensor([float(gradient is not None) for _, gradient in group])
        ours = marks([p for p, _ in group], comm, present, settings)
        flat = torch.cat([*(part.reshape(-1) for part in parts), present, ours])
        posted.append((group, flat, comm.all_reduce_async(flat, label=_LABEL)))

    def arrive() -> dict[int, Tensor]:
        totals: dict[int, Tensor] = {}
        for group, flat, work in posted:
            work.wait()
            tail = len(group) + LIMBS * comm.world_size
            holders, found = flat[-tail:].split([len(group), tail - len(group)])
            if differ(found.tolist()):
                reconcile([(names[id(p)], p) for p, _ in group], comm, settings)
            sums = flat[:-tail].split([p.numel() for p, _ in group])
            for (p, _), total, count in zip(group, sums, holders.tolist(), strict=True):
                if count:
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
        own = [parameter.grad for parameter in parameters]
        settings = attribute_rows(model, settings=True)
        for key, total in post_totals(_named(parameters), own, comm, settings)().items():
            parameter = next(p for p in parameters if id(p) == key)
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.copy_(total)
