r"""Sums, means and extrema of source rows, and of their products with weights: no message is made.

.. math::
    out_i = c_i \sum_{e: t(e) = i} w_e x_{s(e)}, \qquad
    \frac{\partial L}{\partial x_j} = \sum_{e: s(e) = j} w_e c_{t(e)} g_{t(e)}, \qquad
    \frac{\partial L}{\partial w_e} = \langle x_{s(e)}, c_{t(e)} g_{t(e)} \rangle

with :math:`c_i = 1` of a sum and one over the in-degree of a mean. Both ends of an edge can compute
them: a partial sum travels as well as a source row, and :math:`c_i g_i` as well as a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyg_sar.engine.cuts import SplitEdges
from pyg_sar.engine.derivatives import Derivatives
from pyg_sar.engine.reducers import check_found_again
from pyg_sar.engine.run import Kernel, Pass, run
from pyg_sar.engine.schedule import Schedule
from pyg_sar.exchange.rows import UnitRows, add_distinct_rows
from pyg_sar.exchange.wire import Wire
from pyg_sar.kernels.ops import edge_dot, extremum_, extremum_backward_, gather_sum_
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Block, Segments

Weights = Sequence[Tensor]
"""Weights of the edges of a stage *there*, by unit from 1 on."""
KeptWeights = MutableMapping[Block, dict[bool, Tensor]]
"""Weights that layers keep for their next calls, in the order of each block's edges by target, and
by source (``True``)."""


class Sums(Kernel):
    """Reductions of source rows, one for each of ``kinds``.

    Its inputs are the rows ``x [num_local, F]`` and, where edges have weights, these ``[E]``.

    Args:
        name, title: Of the layer: for the ledger, and with the rank for messages.
        prefetch, wire: Units fetched ahead, 0 or 1; how rows travel.
        kinds: ``'sum'``, ``'mean'``, ``'max'`` or ``'min'``.
        needs_sources: The backward pass reads source rows: of extrema, and where weights want a
            gradient.
        schedule: The way through the edges.
        there: Weights of the edges that are gone through there, forward and backward.
    """

    def __init__(
        self,
        name: str,
        title: str,
        prefetch: int,
        wire: Wire,
        kinds: tuple[str, ...],
        needs_sources: bool,
        schedule: Schedule,
        there: tuple[Weights, Weights] = ((), ()),
    ) -> None:
        self.name, self.title, self.schedule = name, title, schedule
        self.prefetch, self.wire = prefetch, wire
        self.kinds, self.needs_sources, self.there = kinds, needs_sources, there
        self.unread = frozenset(() if needs_sources else (0,))
        self.kept: KeptWeights | None = None

    def forward(self, tensors: Sequence[Tensor], record: bool) -> SumsForward:
        return SumsForward(self, tensors)

    def saved(self, tensors: Sequence[Tensor], done: SumsForward) -> list[Tensor]:
        x, *weight = tensors
        rows = x if self.needs_sources else x.new_empty(0, x.size(1))
        return [rows, *weight, *chain(*done.extrema)]

    def inputs(self, saved: Sequence[Tensor]) -> list[Tensor]:
        return list(saved[: len(saved) - 2 * sum(kind in ("max", "min") for kind in self.kinds)])

    def backward(
        self,
        cotangent: Sequence[Tensor],
        saved: Sequence[Tensor],
        wanted: Sequence[bool],
        last: bool,
    ) -> SumsBackward:
        return SumsBackward(self, cotangent, saved, wanted)

    def degrees(self, like: Tensor) -> Tensor:
        """In-degrees, at least 1, to divide by; in float32 at least, to count so far."""
        return self.schedule.in_degree.clamp(min=1).to(
            torch.promote_types(like.dtype, torch.float32)
        )


def weights_of(
    block: Block, weight: Tensor, kept: KeptWeights | None, by_source: bool = False
) -> Tensor:
    """A number for each of the block's edges, in what kernels add up in: in the block's order.

    Weights that are ``kept`` are put in order once, with ``by_source`` in that of the block's edges
    by source. Others stay in the block's order, of which the kernel reads them by ``edges``.
    """
    if kept is None:
        found = weight.reshape(-1)[block.columns]
        return found.to(torch.promote_types(found.dtype, torch.float32))
    orders = kept.setdefault(block, {})
    if by_source not in orders:
        numbers = block.transposed(numbered=True).edges if by_source else None
        ordered = weights_of(block, weight, kept if by_source else None)
        orders[by_source] = ordered if numbers is None else ordered[numbers]
    return orders[by_source]


def add_gathered(out: Tensor, rows: Tensor, segments: Segments, weight: Tensor | None) -> None:
    """Adds gathered rows ``[M, F]``, by weight, to their targets in ``out [N, F]``."""
    at = segments.source, segments.offsets, segments.targets
    gather_sum_(out, rows, *at, weight, segments.edges)


Way = tuple[Schedule, SplitEdges | None, bool]
"""How sums go through a structure: the schedule; how its edges are split, and forward, too."""


@dataclass(frozen=True, slots=True, eq=False)
class SumsCall:
    """A kind of call that is sums, as :mod:`pyg_sar.engine.choose` has decided it once.

    Attributes:
        source: The argument of ``propagate`` that holds the rows.
        weight: The one that holds numbers of the edges, if there is one.
        axis: Of the nodes, in the rows.
        kernel: Makes the kernel of a schedule and weights that are needed elsewhere.
        record: A gradient may be wanted.
        key: By which edges remember their way; ``None``: kernels are missing here.
        way: Finds it, or makes it, together with all workers; ``None``: not for these edges.
        check: Raises where arguments don't fit the edges, and where the message is another one.
        derivatives: Of gradients, by the edges.
    """

    source: str
    weight: str | None
    axis: int
    kernel: Callable[[Schedule, tuple[Weights, Weights]], Sums]
    record: bool
    key: tuple[Any, ...] | None
    way: Callable[[DistEdgeIndex], Way | None]
    check: Callable[..., None]
    checks_always: bool
    derivatives: Callable[[DistEdgeIndex], Derivatives]

    def run(
        self, layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any]
    ) -> tuple[Any, Tensor] | None:
        """One output of each kind, nodes on the axis, and the in-degrees; or ``None``.

        All workers call it together.
        """
        plan, axis = edge_index.plan, self.axis
        rows, weight = kwargs[self.source], None if self.weight is None else kwargs[self.weight]
        rows = rows[0] if isinstance(rows, tuple | list) else rows
        fits = axis in (0, -2) and rows.dim() == 2 and rows.size(0) == plan.num_local
        if not fits or weight is not None or self.checks_always:
            self.check(layer, edge_index, kwargs, rows, weight)
        memory = edge_index.memory
        way = None if edge_index.by_content else memory.get(self.key)
        if way is None:
            way = self.way(edge_index)
        else:
            memory.move_to_end(self.key)
        if way is None:
            return None
        schedule, split, forward = way
        there: tuple[Weights, Weights] = (), ()
        if weight is not None and split is not None:
            weights = split.pushed_weights(edge_index, weight)
            there = (weights if forward else (), weights)
        if axis % rows.dim():
            rows = rows.movedim(axis, 0)
        shape = rows.shape[1:]
        if len(shape) != 1:
            rows = rows.reshape(rows.size(0), shape.numel())
        kernel = self.kernel(schedule, there)
        kernel.kept = getattr(weight, "kept_by_all", None)
        kernel.derivatives = self.derivatives(edge_index)
        results = run(kernel, [rows] if weight is None else [rows, weight], self.record)
        if len(shape) != 1:
            results = [out.view(-1, *shape) for out in results]
        if axis % (1 + len(shape)):
            results = [out.movedim(0, axis) for out in results]
        return results, schedule.in_degree


class SumsForward(Pass):
    """Adds source rows up, where they are read in place."""

    in_place = True
    kinds = ("fetch", "state", "query", "fetch")

    def __init__(self, kernel: Sums, tensors: Sequence[Tensor]) -> None:
        x = tensors[0]
        self._kernel, self.sources = kernel, [x]
        self._weight = tensors[1] if len(tensors) > 1 else None
        self._shape = shape = kernel.schedule.in_degree.numel(), x.size(1)
        self._largest = [kind == "max" for kind in kernel.kinds if kind in ("max", "min")]
        self.extrema = [
            (x.new_full(shape, float("-inf") if is_largest else float("inf")), x.new_zeros(shape))
            for is_largest in self._largest
        ]
        # Where rows come here, memory for sums is taken when they are there.
        self._adds = len(self._largest) < len(kernel.kinds)
        if self._adds and kernel.schedule.forward[0].there:
            self.answers = [x.new_zeros(shape)]

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        edges, read = block.segments, rows.tensors[0]
        if edges.source.numel() == 0:
            return
        if self._adds and not self.answers:
            self.answers = [self.sources[0].new_zeros(self._shape)]
        source = edges.source
        if rows.index is not None:
            source = rows.index.index_select(0, source).to(source.dtype)
        at = source, edges.offsets, edges.targets
        kept = self._kernel.kept
        for total in self.answers:
            weight = None if self._weight is None else weights_of(block, self._weight, kept)
            gather_sum_(total, read, *at, weight, edges.edges)
        for is_largest, (best, ties) in zip(self._largest, self.extrema, strict=True):
            extremum_(best, ties, read, *at, is_largest)

    def add_there_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        weights = self._kernel.there[0]
        weight = weights[block.unit - 1] if weights else None
        add_gathered(into[0], self.sources[0], block.segments, _wide(weight, into[0]))

    def merge_(self, index: Tensor, rows: Sequence[Tensor]) -> None:
        add_distinct_rows(self.answers[0], index, rows[0])

    def finish(self) -> list[Tensor]:
        """One output for each kind, ``[num_targets, F]``."""
        kernel, out, extrema = self._kernel, [], iter(self.extrema)
        if self._adds and not self.answers:  # There were no edges.
            self.answers = [self.sources[0].new_zeros(self._shape)]
        sums = [kind for kind in kernel.kinds if kind in ("sum", "mean")]
        for kind in kernel.kinds:
            if kind in ("max", "min"):
                best = next(extrema)[0]
                best[kernel.schedule.in_degree == 0] = 0
                out.append(best)
                continue
            total = self.answers[0] if len(sums) == 1 else self.answers[0].clone()
            if kind == "mean":
                total.div_(kernel.degrees(total).unsqueeze(1))
            out.append(total)
        self.sources = []
        return out


class SumsBackward(Pass):
    """Adds gradients up by source."""

    phase = "backward"
    slots_in_place = True
    own_last = True
    kinds = ("refetch", "gradient", "gradient", "gradient")

    def __init__(
        self,
        kernel: Sums,
        gradients: Sequence[Tensor],
        saved: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> None:
        self._kernel = kernel
        count = len(wanted)
        x, *rest = saved[:count]
        self._weight = rest[0] if rest else None
        self._wanted, self._like = wanted, x.new_empty(0, x.size(1))
        self._weight_total: Tensor | None = None
        if self._weight is not None and wanted[1]:
            self._weight_total = torch.zeros_like(self._weight)
        if kernel.needs_sources:
            self.sources, self.in_flight = [x], False
            for ledger in kernel.schedule.plan.comm.ledgers:
                ledger.count("recompute")
        self._divided: Tensor | None = None
        # The gradient of the sum, and of each extremum.
        found = iter(saved[count:])
        sums: list[Tensor] = []
        means: list[Tensor] = []
        self._extrema: list[Extremum] = []
        for kind, gradient in zip(kernel.kinds, gradients, strict=True):
            if kind in ("max", "min"):
                self._extrema.append(Extremum(gradient, next(found), next(found)))
            else:
                (means if kind == "mean" else sums).append(gradient)
        self._gradient: Tensor | None = None
        if not sums and len(means) == 1:
            (self._gradient,) = means
            self.scale = kernel.degrees(means[0]).reciprocal_()
        elif sums or means:
            divided = [(g / kernel.degrees(g).unsqueeze(1)).to(g.dtype) for g in means]
            first, *others = [*sums, *divided]
            self._gradient = sum(others, first)
        if self._gradient is not None:
            self.slots = [self._gradient]

    @cached_property
    def returned(self) -> list[Tensor]:  # type: ignore[override]
        """The sums, of which memory is taken when rows are there; none: they aren't wanted."""
        rows, width = self._kernel.schedule.plan.num_local, self._like.size(1)
        return [self._like.new_zeros(rows, width)] if self._wanted[0] else []

    def _shares(self) -> Tensor:
        """The gradient of each edge's row by target, ``[num_targets, F]``."""
        gradient, scale = self._gradient, self.scale
        if gradient is None:
            raise RuntimeError("Extrema have no shares")
        if scale is None:
            return gradient
        if self._divided is None:
            degrees = self._kernel.degrees(gradient)
            self._divided = (gradient / degrees.unsqueeze(1)).to(gradient.dtype)
        return self._divided

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        if block.segments.source.numel() == 0:
            return
        read = rows.tensors[0] if rows.tensors else None
        if into:
            self._add_rows(block, into[0], read)
        if self._weight_total is not None and read is not None:
            edges, shares = block.segments, self._shares()
            at = edges.source, edges.offsets, edges.targets, edges.edges
            found = edge_dot(read, shares, *at)
            # Each edge is in one block.
            self._weight_total.view(-1)[block.columns] = found.to(self._weight_total.dtype)

    def _add_rows(self, block: Block, into: Tensor, read: Tensor | None) -> None:
        kept, weight = self._kernel.kept, None
        edges = block.by_source
        if edges is None or self._weight is not None:
            edges = block.transposed(numbered=self._weight is not None)
        if self._weight is not None:
            weight = weights_of(block, self._weight, kept, by_source=True)
            edges = edges if kept is None else replace(edges, edges=None)
        gradient, scale = self._gradient, self.scale
        # A divided copy of all rows is made only where numbers for the edges would take more.
        if gradient is not None and (
            scale is None or self._divided is not None or edges.source.numel() > gradient.numel()
        ):
            add_gathered(into, self._shares(), edges, weight)
        elif gradient is not None and scale is not None:
            shares = scale.index_select(0, edges.source)
            if weight is not None:
                shares *= weight if edges.edges is None else weight.index_select(0, edges.edges)
            gather_sum_(into, gradient, edges.source, edges.offsets, edges.targets, shares)
        for extremum in self._extrema:
            if read is None:
                raise RuntimeError("An extremum's rows were not fetched again")
            extremum.add_(into, read, edges)

    def add_there_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        weights = self._kernel.there[1]
        edges = block.by_source
        if edges is None or weights:
            edges = block.transposed(numbered=bool(weights))
        if not self.returned:
            return
        total = self.returned[0]
        weight = _wide(weights[block.unit - 1], total) if weights else None
        source = edges.source
        if rows.index is not None:
            source = rows.index.index_select(0, source).to(source.dtype)
        at = source, edges.offsets, edges.targets
        gather_sum_(total, rows.tensors[0], *at, weight, edges.edges)

    def finish(self) -> list[Tensor | None]:
        """The gradients of the rows and of the weights."""
        for extremum in self._extrema:
            check_found_again(extremum.missing, extremum.best)
        total = self.returned[0] if self.returned else None
        found: list[Any] = [total, self._weight_total]
        return found[: len(self._wanted)]


class Extremum:
    r"""The backward pass of :math:`out_i = \max_e x_{s(e)}` (or minimum), 0 without in-edges.

    See :class:`~pyg_sar.engine.reducers.ExtremumReducer`. ``ties`` is how many rows reach the
    extrema, ``best``.

    Attributes:
        gradient: Of each row that reaches the extremum.
        missing: How many of those that reached it have not been found again, ``[]``.
    """

    def __init__(self, gradient: Tensor, best: Tensor, ties: Tensor) -> None:
        winners = ties + (best == 0)
        self.gradient = (gradient / winners).to(gradient.dtype)  # infinite or NaN for NaN
        self.best, self.missing = best, ties.sum(dtype=torch.float64)
        nobody = winners == 0
        self._nowhere: Tensor | None = None
        if bool(nobody.any()):
            self._nowhere = gradient.new_zeros(gradient.shape).masked_fill_(nobody, float("nan"))

    def add_(self, into: Tensor, read: Tensor, edges: Segments) -> None:
        """Adds a block's gradients ``into`` the rows that were ``read``; ``edges`` by source."""
        at = edges.source, edges.offsets, edges.targets
        found = extremum_backward_(into, read, self.gradient, self.best, *at)
        self.missing = self.missing - found
        if self._nowhere is not None:  # The kernel gives a share to those that reach it only.
            add_gathered(into, self._nowhere, edges, None)


def _wide(weight: Tensor | None, rows: Tensor) -> Tensor | None:
    """Weights in what kernels add up in."""
    if weight is None:
        return None
    return weight.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
