"""The loop: one kernel over one schedule, forward and backward; and the gap that it leaves in the
autograd trace.

[Note: passes] A kernel makes a :class:`Pass` for each direction. The loop opens a unit's rows,
hands them to the pass with the unit's block, and closes it: whether rows are source rows, queries
or gradients, whether what goes back is a partial state or a gradient, is the pass's matter. So a
kernel knows nothing of workers, and a row source nothing of what is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyg_sar.engine.derivatives import Derivatives, recorded
from pyg_sar.engine.schedule import Schedule, Stage
from pyg_sar.errors import note_place
from pyg_sar.exchange.rows import Travel, UnitRows
from pyg_sar.exchange.wire import Wire
from pyg_sar.space.shard import Block


class Pass:
    """One direction of one call. Rows are lists of tensors, the first axis along nodes.

    Attributes:
        sources: Rows of own nodes that are read at their edges' targets; none: no row comes.
        returned: Sums by own source rows that rows computed at the targets go back to.
        slots: Rows of own targets that are read at their edges' sources.
        scale: Multiplies rows of ``slots`` for other workers, ``[num_targets]``.
        answers: Sums by own targets that rows computed at the sources go back to.
        in_place: Rows of ``sources`` may be read where they lie; ``slots_in_place``: of ``slots``.
        own_last: Own edges come last, while the last rows are on their way back.
        in_flight: Rows that go back may travel over a network while the next are worked on.
        scope: Entered around the loop, if there is one.
        kinds: By which the ledger counts ``sources``, ``returned``, ``slots``, ``answers``.
    """

    sources: Sequence[Tensor] = ()
    returned: Sequence[Tensor] = ()
    slots: Sequence[Tensor] = ()
    scale: Tensor | None = None
    answers: Sequence[Tensor] = ()
    in_place = False
    slots_in_place = False
    own_last = False
    in_flight = True
    scope: Callable[[], AbstractContextManager[Any]] | None = None
    phase = "forward"
    kinds = ("fetch", "state", "query", "state")

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        """Adds a block that is gone through here.

        Args:
            block: Edges into own targets.
            rows: The unit's rows of :attr:`sources`.
            into: Sums by these rows, of each of :attr:`returned`.
        """
        raise NotImplementedError

    def add_there_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        """Adds a block that is gone through on a peer's behalf.

        Args:
            block: Edges from own nodes to the peer's slots.
            rows: The peer's rows of :attr:`slots`.
            into: Zeroed rows for the peer, of each of :attr:`answers`.
        """
        raise NotImplementedError

    def merge_(self, index: Tensor, rows: Sequence[Tensor]) -> None:
        """Takes in what a peer computed for own targets: ``index [K]``, ``rows [K, *]`` each."""
        for total, part in zip(self.answers, rows, strict=True):
            total.index_add_(0, index, part)


class Kernel(ABC):
    """A computation over edges: a forward and a backward pass.

    Attributes:
        name: The layer's name, for the ledger.
        title: The layer and the rank, for messages.
        schedule: The way through the edges.
        prefetch: Units fetched ahead, 0 or 1.
        wire: How rows travel; by default exactly.
        reads_output: The backward pass reads it; computed again where it was changed in place.
        needs_gradient: An input may want a gradient.
        unread: Inputs that no gradient depends on, which need not be saved.
        was_changed: Called where the output that the backward pass reads was changed in place.
        derivatives: Of its gradients. ``second_derivative`` ends a message that there are none.
    """

    name = title = ""
    schedule: Schedule
    prefetch = 1
    wire = Wire()
    reads_output = False
    needs_gradient = True
    unread = frozenset[int]()
    derivatives: Derivatives | None = None
    was_changed: Callable[[], None] = staticmethod(lambda: None)
    second_derivative = "need SARPolicy(mode=3)"

    @abstractmethod
    def forward(self, tensors: Sequence[Tensor], record: bool) -> Any:
        """The forward :class:`Pass` over detached inputs; ``record``: a backward pass may follow.

        Its ``finish()`` gives the outputs.
        """

    @abstractmethod
    def saved(self, tensors: Sequence[Tensor], done: Any) -> Iterable[Tensor]:
        """Of inputs and of a forward pass that is done, what the backward pass needs."""

    def cotangent(
        self, gradients: Sequence[Tensor], saved: Sequence[Tensor], output: Tensor
    ) -> Any:
        """All that the backward pass of a kernel that :attr:`reads_output` knows of targets.

        Args:
            gradients: Of the outputs, contiguous.
            saved: What :meth:`saved` gave, detached.
            output: The first output; freed afterwards.
        """
        raise NotImplementedError

    @abstractmethod
    def backward(
        self, cotangent: Any, saved: Sequence[Tensor], wanted: Sequence[bool], last: bool
    ) -> Any:
        """The backward :class:`Pass`; its ``finish()`` gives the inputs' gradients.

        Args:
            cotangent: What :meth:`cotangent` gave; by default the outputs' gradients, contiguous.
            saved: What :meth:`saved` gave, detached.
            wanted: Which inputs want a gradient.
            last: What was kept for this pass may be freed.
        """

    def inputs(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """The inputs among what was saved."""
        raise NotImplementedError


def go(kernel: Kernel, todo: Pass, stages: Sequence[Stage]) -> None:
    """Goes through a schedule's stages. All workers call it together."""
    comm = kernel.schedule.plan.comm
    if comm.interrupted:
        comm.settle()
    try:
        with nullcontext() if todo.scope is None else todo.scope():
            for stage in stages:
                source = sink = None
                there, units = stage.there, range(len(stage.blocks))
                if tensors := todo.slots if there else todo.sources:
                    label = kernel.name, todo.phase, todo.kinds[2 if there else 0]
                    in_place = todo.slots_in_place if there else todo.in_place
                    scale = todo.scale if there else None
                    how = Travel(label, kernel.prefetch, kernel.wire, in_place, scale)
                    source = stage.exchange.source(tensors, how)
                if totals := todo.answers if there else todo.returned:
                    label = kernel.name, todo.phase, todo.kinds[3 if there else 1]
                    in_flight = (there or todo.in_flight) if kernel.prefetch else None
                    merge = todo.merge_ if there else None
                    how = Travel(label, wire=kernel.wire, in_flight=in_flight, merge=merge)
                    sink = stage.exchange.sink(totals, how)
                own_last = source is None and todo.own_last
                for unit in _own_last(units, kernel.prefetch) if own_last else units:
                    block = stage.blocks[unit]
                    rows = UnitRows([]) if source is None else source.open(unit)
                    into = [] if sink is None else sink.open(unit)
                    if block is not None and there and unit:
                        todo.add_there_(block, rows, into)
                    elif block is not None:
                        if there:
                            rows, into = UnitRows(list(todo.sources)), list(todo.returned)
                        todo.add_(block, rows, into)
                    del rows, into
                    if sink is not None:
                        sink.close(unit)
                    if source is not None:
                        source.close(unit)
                if sink is not None:
                    sink.finish()
                if source is not None:
                    source.finish()
    except BaseException:
        comm.interrupted = True  # Whoever catches it may go on: with rows of the next pass.
        raise


def _own_last(units: range, prefetch: int) -> list[int]:
    """Own edges come while the last unit's rows are on their way back.

    Where none are left on their way, before these: rows are added up in the same order.
    """
    own, *others = units
    place = max(len(others) - (prefetch == 0), 0)
    return [*others[:place], own, *others[place:]]


class _Run(torch.autograd.Function):
    """The gap in the autograd trace, from a kernel's inputs to its outputs."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, *tensors: Tensor) -> Any:
        done = kernel.forward([tensor.detach() for tensor in tensors], True)
        go(kernel, done, kernel.schedule.forward)
        out = done.finish()
        saved = kernel.saved(tensors, done)
        ctx.save_for_backward(*saved)
        ctx.kernel, ctx.out = kernel, None
        if kernel.reads_output:
            ctx.out = out[0].detach()
            ctx.version = ctx.out._version
        return tuple(out) if len(out) > 1 else out[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kernel: Kernel = ctx.kernel
        if torch.is_grad_enabled():
            return recorded(_Run.backward, ctx, gradients)
        last = not torch._C._autograd._get_current_graph_task_keep_graph()
        # Messages run again: what they read tells its operators by its class, which is switched off
        # where the loss is of a class of its own.
        try:
            saved = [tensor.detach() for tensor in ctx.saved_tensors]  # Raises if one was written.
            with torch._C._EnableTorchFunction():
                cotangent: Any = [g.resolve_conj().resolve_neg().contiguous() for g in gradients]
                if kernel.reads_output:
                    out: Tensor = ctx.out
                    if out._version != ctx.version:
                        kernel.was_changed()
                        anew = kernel.forward(kernel.inputs(saved), False)
                        go(kernel, anew, kernel.schedule.forward)
                        out = anew.finish()[0]
                    if last:
                        ctx.out = None
                    cotangent = kernel.cotangent(cotangent, saved, out)
                    del out
                todo = kernel.backward(cotangent, saved, ctx.needs_input_grad[1:], last)
                del cotangent, saved
                go(kernel, todo, kernel.schedule.backward)
                return (None, *todo.finish())
        except Exception as error:
            note_place(error, f"the backward pass of {kernel.title}")
            raise


def run(kernel: Kernel, tensors: Sequence[Tensor], record: bool) -> Sequence[Tensor]:
    """A kernel's outputs, recorded for autograd where a gradient may be wanted."""
    tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]  # memory is read as it is
    if record:
        out = _Run.apply(kernel, *tensors)
        return out if isinstance(out, tuple) else (out,)
    with torch.no_grad():
        done = kernel.forward([tensor.detach() for tensor in tensors], False)
        go(kernel, done, kernel.schedule.forward)
        return list(done.finish())
