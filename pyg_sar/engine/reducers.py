"""Mergeable partial states: aggregating tile by tile, and each message's share of the gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from pyg_sar.exchange.rows import flat_rows
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.message.target_index import Reductions, spread, trailing
from pyg_sar.space.shard import Tile


def present(value: Tensor | None) -> Tensor:
    """A tensor that an earlier step made: a state of the first tile, say.

    Raises:
        RuntimeError: When there is none.
    """
    if value is None:
        raise RuntimeError("A tensor that an earlier step makes is not there")
    return value


def segment_sum(tile: Tile, values: Tensor) -> Tensor:
    """Sums per target of the tile, added up in float32 at least: ``[E_tile, *]`` to ``[U, *]``."""
    flat = flat_rows(values).to(wide_dtype(values.dtype))
    out = flat.new_zeros(tile.targets.numel(), flat.size(1))
    out.scatter_add_(0, tile.index.view(-1, 1).expand_as(flat), flat)
    return out.view(out.size(0), *values.shape[1:]).to(values.dtype)


def check_found_again(missing: Tensor, best: Tensor) -> None:
    """Raises ``RuntimeError`` where so many extrema were not found again by the backward pass."""
    if float(missing) != 0 and bool(best.isfinite().all()):
        raise RuntimeError(
            "A message came out differently when it was computed again for the backward pass "
            f"({float(missing):.0f} extrema not found again). Is it deterministic? "
            "SARPolicy(mode=2) keeps messages instead of recomputing them"
        )


def worst(dtype: torch.dtype, largest: bool) -> float | int:
    """The value that every other one exceeds, or that exceeds every other one."""
    if dtype == torch.bool:
        return not largest
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max
    return float("-inf") if largest else float("inf")


class Reducer(ABC):
    r"""Aggregates messages of tiles into :math:`[n_p, *]`, with the messages' dtype and device.

    Attributes:
        needs_values: The backward pass depends on message values (case 2).
        reads_messages: :meth:`message_gradient` reads the messages themselves.
    """

    needs_values = False
    reads_messages = False
    _out: Tensor | None = None
    _gradient: Tensor | None = None

    def __init__(self, in_degree: Tensor) -> None:
        self.in_degree = in_degree
        self.num_targets = in_degree.numel()

    @abstractmethod
    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        """Adds a tile's messages ``[E_tile, *]`` to the state."""

    @abstractmethod
    def finish(self) -> Tensor:
        """The aggregate ``[num_targets, *]``."""

    def state(self) -> list[Tensor]:
        """The tensors that the backward pass needs, the aggregate first if it is among them."""
        return []

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        """Takes the aggregate's gradient ``[num_targets, *]``, and what :meth:`state` gave."""
        self._gradient = gradient

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
        """Divisors of sums like this for means; in float32 at least, to count so far."""
        return trailing(self.in_degree.clamp(min=1).to(wide_dtype(like.dtype)), like)


class SumReducer(Reducer):
    r""":math:`out_i = \sum_e m_e`; gradient :math:`\partial L/\partial m_e = g_i`."""

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None:
            self._out = self._zeros(messages)
        self._out.index_add_(0, tile.targets, segment_sum(tile, messages))

    def finish(self) -> Tensor:
        out = present(self._out)
        self._out = None
        return out

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        return present(self._gradient).index_select(0, tile.target_rows)


class MeanReducer(SumReducer):
    r""":math:`out_i = \frac{1}{\max(d_i, 1)} \sum_e m_e` with the in-degree :math:`d_i`."""

    def finish(self) -> Tensor:
        out = super().finish()
        return out.div_(self._degrees(out))

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        found = super().message_gradient(tile, messages, log)
        return found.div_(self._degrees(found).index_select(0, tile.target_rows))


class ExtremumReducer(Reducer):
    r""":math:`out_i = \max_e m_e` (or minimum), 0 without in-edges.

    All :math:`k` messages that reach the extremum, on whichever shard, get :math:`g_i / k`, or
    :math:`g_i / (k + 1)` where it is 0: the gradient of PyG's ``scatter_reduce``, which counts the
    zero that its output began with among the winners. Where an in-edge's message is NaN, so is the
    extremum; nobody reaches it, and the gradient of all in-edges is :math:`0 \cdot g_i / 0`, NaN.
    """

    needs_values = True
    reads_messages = True
    _ties: Tensor | None = None
    _missing: Tensor | None = None

    def __init__(self, in_degree: Tensor, largest: bool) -> None:
        super().__init__(in_degree)
        self._reduce = "amax" if largest else "amin"
        self._largest = largest
        self._better = torch.maximum if largest else torch.minimum

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None or self._ties is None:
            self._out = self._zeros(messages).fill_(worst(messages.dtype, self._largest))
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
        self._missing = self._ties.sum(dtype=torch.float64)

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        rows = tile.target_rows
        reached = present(messages) == present(self._out).index_select(0, rows)
        self._missing = present(self._missing) - reached.sum()
        return present(self._gradient).index_select(0, rows) * reached

    def finish_backward(self) -> None:
        check_found_again(present(self._missing), present(self._out))


class ProductReducer(Reducer):
    r""":math:`out_i = \prod_e m_e`, 1 without in-edges.

    State: the product :math:`P` of the factors that are not 0, and the number :math:`Z` of those
    that are. The gradient of a factor is the product of the others: :math:`g_i P / m_e` where
    :math:`Z = 0`, :math:`g_i P` for the only zero, else 0.
    """

    needs_values = True
    reads_messages = True
    _product: Tensor | None = None
    _zeros_seen: Tensor | None = None

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

    """

    _count: Tensor | None = None
    _mean: Tensor | None = None
    _squares: Tensor | None = None

    def __init__(self, in_degree: Tensor, semi_grad: bool) -> None:
        super().__init__(in_degree)
        self.needs_values = self.reads_messages = not semi_grad

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

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None:
            self._out = self._zeros(messages)
        self._out[tile.targets] = messages

    def finish(self) -> Tensor:
        return present(self._out)

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        return present(self._gradient).index_select(0, tile.targets)


def _gathered(values: Tensor, like: Tensor) -> Tensor:
    """Adjoint of :func:`spread`: sums of ``values`` in the shape of ``like``."""
    heads, width = like.size(-1), values.size(-1)
    if values.dim() == like.dim() > 1 and 1 < heads < width and width % heads == 0:
        return values.unflatten(-1, (heads, width // heads)).sum(-1)
    return values.sum_to_size(*trailing(like, values).shape).view_as(like)


class SoftmaxReducer(Reducer):
    r""":math:`out_i = \sum_e p_e v_e` where messages carry weights normalised over their tile.

    State: the maximum :math:`M`, the normaliser :math:`S` and :math:`S \cdot out`, rescaled when
    the maximum grows. See [Note: softmax over targets].
    """

    needs_values = True
    _max: Tensor | None = None
    _sum: Tensor | None = None
    _inner: Tensor | None = None

    def __init__(self, in_degree: Tensor, mean: bool) -> None:
        super().__init__(in_degree)
        self._mean = mean

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if tile.num_edges == 0:  # Layers return early here, without their softmax.
            self._out = self._zeros(messages) if self._out is None else self._out
            return
        total = present(log.total).detach()
        maximum = log.maximum if log.maximum is not None else torch.zeros_like(total)
        if self._out is None:
            self._out = self._zeros(messages)
        if self._max is None or self._sum is None:
            self._max = self._zeros(total).fill_(torch.finfo(total.dtype).min)
            self._sum = self._zeros(total)
        old = self._max[tile.targets]
        new = torch.maximum(old, maximum)
        keep, weight = (old - new).exp(), (maximum - new).exp() * total
        part = segment_sum(tile, messages)
        self._max[tile.targets] = new
        self._sum[tile.targets] = self._sum[tile.targets] * keep + weight
        self._out[tile.targets] = (
            self._out[tile.targets] * spread(keep, part) + part * spread(weight, part)
        ).to(part.dtype)

    def finish(self) -> Tensor:
        out = present(self._out)
        if self._sum is not None:
            safe = torch.where(self._sum == 0, torch.ones_like(self._sum), self._sum)
            out = self._out = (out / spread(safe, out)).to(out.dtype)
        if self._mean:
            out = (out / self._degrees(out)).to(out.dtype)
        return out

    def state(self) -> list[Tensor]:
        if self._max is None or self._sum is None:
            return []
        # A copy: what was handed out may be written into (F.relu(out, inplace=True)).
        return [present(self._out).clone(), self._max, self._sum]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        if not state:
            self._gradient = gradient
            return
        self._out, self._max, self._sum = state
        if self._mean:
            gradient = (gradient / self._degrees(gradient)).to(gradient.dtype)
        self._gradient = gradient
        self._inner = _gathered(gradient * self._out, self._sum)

    def _share(self, tile: Tile, log: Reductions) -> Tensor:
        """``e^{m_t - M} / S`` per target of the tile, as exact as the gradient."""
        total = present(log.total).detach()
        total = total.to(torch.promote_types(total.dtype, present(self._gradient).dtype))
        maximum = log.maximum if log.maximum is not None else torch.zeros_like(total)
        top, norm = present(self._max)[tile.targets], present(self._sum)[tile.targets]
        return (maximum - top).exp() / norm

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        gradient = present(self._gradient)[tile.targets]
        if tile.num_edges == 0:
            return gradient.index_select(0, tile.index)
        weight = self._share(tile, log) * present(log.total).detach()
        scaled = (gradient * spread(weight, gradient)).to(gradient.dtype)
        return scaled.index_select(0, tile.index)

    def total_gradient(self, tile: Tile, log: Reductions) -> Tensor | None:
        if tile.num_edges == 0:
            return None
        total = present(log.total)
        inner = present(self._inner)[tile.targets]
        return (-self._share(tile, log) * inner).to(total.dtype)


def make_reducer(kind: str, normalised: bool, in_degree: Tensor) -> Reducer:
    """The reducer of an aggregation.

    Args:
        kind: ``'sum'``, ``'mean'``, ``'max'``, ``'min'``, ``'mul'``, ``'var'``, ``'semi_var'``, or
            ``'place'`` where chunks hold all in-edges.
        normalised: The message reduces over targets: it holds weights normalised over a tile.
        in_degree: Edges into each target.
    """
    if normalised and kind != "place":
        return SoftmaxReducer(in_degree, mean=kind == "mean")
    make: dict[str, Callable[[], Reducer]] = {
        "place": lambda: PlaceReducer(in_degree),
        "sum": lambda: SumReducer(in_degree),
        "mean": lambda: MeanReducer(in_degree),
        "max": lambda: ExtremumReducer(in_degree, largest=True),
        "min": lambda: ExtremumReducer(in_degree, largest=False),
        "mul": lambda: ProductReducer(in_degree),
        "var": lambda: VarianceReducer(in_degree, semi_grad=False),
        "semi_var": lambda: VarianceReducer(in_degree, semi_grad=True),
    }
    return make[kind]()
