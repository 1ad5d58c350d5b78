"""Mergeable partial states: aggregating tile by tile, and each message's share of the gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from pyg_sar.engine.rounds import Rounds
from pyg_sar.exchange.rows import flat_rows
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.kernels.ops import edge_dot, extremum_, extremum_backward_, gather_sum_
from pyg_sar.message.target_index import Reductions, trailing
from pyg_sar.space.shard import Segments, Tile


def present(value: Tensor | None) -> Tensor:
    """A state that the first tile made.

    Raises:
        RuntimeError: When there was none.
    """
    if value is None:
        raise RuntimeError("The reducer has not seen a tile yet")
    return value


def segment_sum(tile: Tile, values: Tensor) -> Tensor:
    """Sums per target of the tile, added up in float32 at least: ``[E_tile, *]`` to ``[U, *]``."""
    flat = flat_rows(values).to(wide_dtype(values.dtype))
    out = flat.new_zeros(tile.targets.numel(), flat.size(1))
    out.scatter_add_(0, tile.index.view(-1, 1).expand_as(flat), flat)
    return out.view(out.size(0), *values.shape[1:]).to(values.dtype)


def gather_into(
    out: Tensor, rows: Tensor, segments: Segments, weight: Tensor | None = None
) -> None:
    """Adds gathered rows ``[M, *]``, by weight, to their targets in ``out [N, *]``."""
    flat = out.view(out.size(0), out.shape[1:].numel())  # a view, also of columns of a buffer
    at = segments.source, segments.offsets, segments.targets
    gather_sum_(flat, flat_rows(rows), *at, weight, segments.edges)


class Reducer(ABC):
    r"""Aggregates messages of tiles into :math:`[n_p, *]`, with the messages' dtype and device.

    Attributes:
        needs_values: The backward pass depends on message values (case 2).
        reads_messages: :meth:`message_gradient` reads the messages themselves.
    """

    needs_values = False
    reads_messages = False

    def __init__(self, rounds: Rounds) -> None:
        self.in_degree = rounds.in_degree
        self.num_targets = rounds.in_degree.numel()

    @abstractmethod
    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        """Adds a tile's messages ``[E_tile, *]`` to the state."""

    @abstractmethod
    def finish(self) -> Tensor:
        """The aggregate ``[num_targets, *]``."""

    def state(self) -> list[Tensor]:
        """What the backward pass needs of the state, the aggregate first if it is among them."""
        return []

    @abstractmethod
    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        """Takes the aggregate's gradient ``[num_targets, *]``."""

    @abstractmethod
    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        """The messages' gradient ``[E_tile, *]``."""

    def total_gradient(self, tile: Tile, log: Reductions) -> Tensor | None:
        """The gradient of the tile's softmax normaliser, if there is one."""
        return None

    def finish_backward(self) -> None:
        """Checks made after the last tile."""

    def _zeros(self, messages: Tensor) -> Tensor:
        return messages.new_zeros(self.num_targets, *messages.shape[1:])

    def _degrees(self, like: Tensor) -> Tensor:
        """What sums like this are divided by for means; in float32 at least, to count so far."""
        return trailing(self.in_degree.clamp(min=1).to(wide_dtype(like.dtype)), like)


class RowReducer(Reducer):
    """A reducer that also takes shards whose messages are source rows: none is materialized."""

    @abstractmethod
    def merge_rows(self, segments: Segments, rows: Tensor, weight: Tensor | None) -> None:
        """Adds a shard of source rows ``[*, *]`` to the state.

        Or of their products with ``weight``, a number for each edge in shard order, ``[E]``.
        """

    @abstractmethod
    def add_row_gradients(
        self, transposed: Segments, total: Tensor, rows: Tensor | None, weight: Tensor | None
    ) -> None:
        """Adds the gradients of the rows that :meth:`merge_rows` took to ``total``.

        The rows themselves are only asked for where the reducer ``needs_values``.
        """


class SumReducer(RowReducer):
    r""":math:`out_i = \sum_e m_e`; gradient :math:`\partial L/\partial m_e = g_i`."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds)
        self._out: Tensor | None = None
        self._gradient: Tensor | None = None

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None:
            self._out = self._zeros(messages)
        self._out.index_add_(0, tile.targets, segment_sum(tile, messages))

    def merge_rows(self, segments: Segments, rows: Tensor, weight: Tensor | None) -> None:
        if self._out is None:
            self._out = self._zeros(rows)
        gather_into(self._out, rows, segments, weight)

    def finish(self) -> Tensor:
        out = present(self._out)
        self._out = None
        return out

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._gradient = gradient

    def _shares(self) -> Tensor:
        """What each message of a target gets, ``[num_targets, *]``."""
        return present(self._gradient)

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        return present(self._gradient).index_select(0, tile.target_rows)

    def add_row_gradients(
        self, transposed: Segments, total: Tensor, rows: Tensor | None, weight: Tensor | None
    ) -> None:
        gather_into(total, present(self._gradient), transposed, weight)

    def gradient(self) -> tuple[Tensor, Tensor | None]:
        """Each message's gradient by target: :math:`g`, and what its rows are multiplied by."""
        return present(self._gradient), None

    def weight_gradient(self, segments: Segments, rows: Tensor) -> Tensor:
        """The gradients of the weights that :meth:`merge_rows` took, in shard order, ``[E]``."""
        gradient = flat_rows(self._shares())
        at = segments.source, segments.offsets, segments.targets, segments.edges
        return edge_dot(flat_rows(rows), gradient, *at)


class MeanReducer(SumReducer):
    r""":math:`out_i = \frac{1}{\max(d_i, 1)} \sum_e m_e` with the in-degree :math:`d_i`.

    The gradient's rows are divided where they are read: a divided copy of all of them is made only
    where numbers for a shard's edges would take more.
    """

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds)
        self._divided: Tensor | None = None

    def gradient(self) -> tuple[Tensor, Tensor | None]:
        gradient = present(self._gradient)
        wide = wide_dtype(gradient.dtype)
        return gradient, self.in_degree.clamp(min=1).to(wide).reciprocal_()

    def finish(self) -> Tensor:
        out = super().finish()
        return out.div_(self._degrees(out))

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._gradient, self._divided = gradient, None

    def _shares(self) -> Tensor:
        """The gradient over the in-degrees, ``[num_targets, *]``; kept from its first use on."""
        if self._divided is None:
            gradient = present(self._gradient)
            self._divided = (gradient / self._degrees(gradient)).to(gradient.dtype)
        return self._divided

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        found = super().message_gradient(tile, messages, log)
        return found.div_(self._degrees(found).index_select(0, tile.target_rows))

    def add_row_gradients(
        self, transposed: Segments, total: Tensor, rows: Tensor | None, weight: Tensor | None
    ) -> None:
        gradient = present(self._gradient)
        if self._divided is not None or transposed.source.numel() > gradient.numel():
            gather_into(total, self._shares(), transposed, weight)
            return
        shares = present(self.gradient()[1]).index_select(0, transposed.source)
        if weight is not None:
            edges = transposed.edges
            shares *= weight if edges is None else weight.index_select(0, edges)
        gather_into(total, gradient, replace(transposed, edges=None), shares)


class ExtremumReducer(RowReducer):
    r""":math:`out_i = \max_e m_e` (or minimum), 0 without in-edges.

    All :math:`k` messages that reach the extremum, on whichever shard, get :math:`g_i / k`, or
    :math:`g_i / (k + 1)` where it is 0: the gradient of PyG's ``scatter_reduce``, which counts the
    zero that its output began with among the winners. Where an in-edge's message is NaN, so is the
    extremum; nobody reaches it, and the gradient of all in-edges is :math:`0 \cdot g_i / 0`, NaN.
    """

    needs_values = True
    reads_messages = True

    def __init__(self, rounds: Rounds, largest: bool) -> None:
        super().__init__(rounds)
        self._reduce = "amax" if largest else "amin"
        self._worst = float("-inf") if largest else float("inf")
        self._better = torch.maximum if largest else torch.minimum
        self._out: Tensor | None = None
        self._ties: Tensor | None = None
        self._gradient: Tensor | None = None
        self._missing: Tensor | None = None
        self._nowhere: Tensor | None = None

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None or self._ties is None:
            self._out = self._zeros(messages).fill_(self._worst)
            self._ties = self._zeros(messages).to(wide_dtype(messages.dtype))
        if tile.num_edges == 0:
            return
        index = tile.index.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        best = messages.new_zeros(tile.targets.numel(), *messages.shape[1:])
        best.scatter_reduce_(0, index, messages, reduce=self._reduce, include_self=False)
        reached = messages == best.index_select(0, tile.index)
        ties = segment_sum(tile, reached.to(self._ties.dtype))
        old, old_ties = self._out[tile.targets], self._ties[tile.targets]
        new = self._better(old, best)
        self._out[tile.targets] = new
        self._ties[tile.targets] = old_ties * (old == new) + ties * (best == new)

    def merge_rows(self, segments: Segments, rows: Tensor, weight: Tensor | None) -> None:
        if weight is not None:
            raise RuntimeError("An extremum of weighted rows has no kernel")
        if self._out is None or self._ties is None:
            self._out = self._zeros(rows).fill_(self._worst)
            self._ties = self._zeros(rows)
        at = segments.source, segments.offsets, segments.targets
        largest = self._worst < 0
        extremum_(flat_rows(self._out), flat_rows(self._ties), flat_rows(rows), *at, largest)

    def finish(self) -> Tensor:
        out = present(self._out)
        out[self.in_degree == 0] = 0
        return out

    def state(self) -> list[Tensor]:
        return [present(self._out), present(self._ties)]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._out, self._ties = state
        winners = self._ties + (self._out == 0)
        self._gradient = (gradient / winners).to(gradient.dtype)  # infinite or NaN for NaN
        nobody = winners == 0
        self._nowhere = None
        if bool(nobody.any()):
            self._nowhere = gradient.new_zeros(gradient.shape).masked_fill_(nobody, float("nan"))
        self._missing = self._ties.sum(dtype=torch.float64)

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        rows = tile.target_rows
        reached = present(messages) == present(self._out).index_select(0, rows)
        self._missing = present(self._missing) - reached.sum()
        return present(self._gradient).index_select(0, rows) * reached

    def add_row_gradients(
        self, transposed: Segments, total: Tensor, rows: Tensor | None, weight: Tensor | None
    ) -> None:
        flat = total.view(total.size(0), total.shape[1:].numel())
        gradient, best = flat_rows(present(self._gradient)), flat_rows(present(self._out))
        at = transposed.source, transposed.offsets, transposed.targets
        found = extremum_backward_(flat, flat_rows(present(rows)), gradient, best, *at)
        self._missing = present(self._missing) - found
        if self._nowhere is not None:  # The kernel gives a share to those that reach it only.
            gather_into(total, self._nowhere, transposed)

    def finish_backward(self) -> None:
        if float(present(self._missing)) != 0 and bool(present(self._out).isfinite().all()):
            raise RuntimeError(
                "A message came out differently when it was computed again for the backward pass "
                f"({float(present(self._missing)):.0f} extrema not found again). Is it "
                "deterministic? SARPolicy(mode=2) keeps messages instead of recomputing them"
            )


class ProductReducer(Reducer):
    r""":math:`out_i = \prod_e m_e`, 1 without in-edges.

    State: the product :math:`P` of the factors that are not 0, and the number :math:`Z` of those
    that are. The gradient of a factor is the product of the others: :math:`g_i P / m_e` where
    :math:`Z = 0`, :math:`g_i P` for the only zero, else 0.
    """

    needs_values = True
    reads_messages = True

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds)
        self._product: Tensor | None = None
        self._zeros_seen: Tensor | None = None
        self._gradient: Tensor | None = None

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._product is None or self._zeros_seen is None:
            self._product = self._zeros(messages).fill_(1)
            self._zeros_seen = self._zeros(messages)
        if tile.num_edges == 0:
            return
        zero = messages == 0
        index = tile.index.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        part = messages.new_ones(tile.targets.numel(), *messages.shape[1:])
        part.scatter_reduce_(0, index, messages.masked_fill(zero, 1), reduce="prod")
        self._product[tile.targets] *= part
        self._zeros_seen[tile.targets] += segment_sum(tile, zero.to(messages.dtype))

    def finish(self) -> Tensor:
        return present(self._product).masked_fill(present(self._zeros_seen) > 0, 0)

    def state(self) -> list[Tensor]:
        return [present(self._product), present(self._zeros_seen)]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._product, self._zeros_seen = state
        self._gradient = gradient * self._product

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        values, rows = present(messages), tile.target_rows
        zero = values == 0
        others = present(self._zeros_seen).index_select(0, rows) - zero.to(values.dtype)
        share = present(self._gradient).index_select(0, rows) / values.masked_fill(zero, 1)
        return share.masked_fill(others > 0, 0)


class VarianceReducer(Reducer):
    r""":math:`out_i = \frac{1}{d_i} \sum_e (m_e - \mu_i)^2`, 0 without in-edges.

    State: count, mean and :math:`M_2`, merged by Chan et al. (1979); the difference
    :math:`E[m^2] - E[m]^2` would cancel. Gradient :math:`\frac{2}{d_i} (m_e - \mu_i) g_i`, and
    :math:`-\frac{2}{d_i} \mu_i g_i` where PyG's ``semi_grad`` takes :math:`E[m^2]` for constant.

    Args:
        rounds: The way through the edges.
        semi_grad: See :class:`torch_geometric.nn.aggr.VarAggregation`.
    """

    def __init__(self, rounds: Rounds, semi_grad: bool) -> None:
        super().__init__(rounds)
        self.needs_values = self.reads_messages = not semi_grad
        self._count: Tensor | None = None
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None
        self._gradient: Tensor | None = None

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._mean is None or self._squares is None or self._count is None:
            self._mean, self._squares = self._zeros(messages), self._zeros(messages)
            self._count = self._mean.new_zeros(self.num_targets, dtype=wide_dtype(messages.dtype))
        if tile.num_edges == 0:
            return
        rows = tile.targets
        count = segment_sum(tile, self._count.new_ones(tile.num_edges))
        mean = (segment_sum(tile, messages) / trailing(count, messages)).to(messages.dtype)
        squares = segment_sum(tile, (messages - mean.index_select(0, tile.index)).square())
        seen, old = self._count[rows], self._mean[rows]
        share = trailing(count / (seen + count), mean)
        apart = mean - old
        self._count[rows] = seen + count
        self._mean[rows] = (old + apart * share).to(mean.dtype)
        merged = squares + apart.square() * share * trailing(seen, mean)
        self._squares[rows] += merged.to(mean.dtype)

    def finish(self) -> Tensor:
        out = present(self._squares)
        return (out / self._degrees(out)).to(out.dtype)

    def state(self) -> list[Tensor]:
        return [present(self._mean)]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        (self._mean,) = state
        self._gradient = (2 * gradient / self._degrees(gradient)).to(gradient.dtype)

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        rows = tile.target_rows
        apart = -present(self._mean).index_select(0, rows)
        if self.needs_values:
            apart += present(messages)
        return present(self._gradient).index_select(0, rows) * apart


class PlaceReducer(Reducer):
    """Puts each target's aggregate, computed from all its in-edges, in its place."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds)
        self._out: Tensor | None = None
        self._gradient: Tensor | None = None

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None:
            self._out = self._zeros(messages)
        self._out[tile.targets] = messages

    def finish(self) -> Tensor:
        return present(self._out)

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._gradient = gradient

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        return present(self._gradient).index_select(0, tile.targets)
