"""Mergeable partial states: aggregating tile by tile, and each message's share of the gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from pyg_sar.exchange import flat_rows
from pyg_sar.rounds import Rounds
from pyg_sar.shard import Tile
from pyg_sar.target_index import Reductions


def _trailing(values: Tensor, like: Tensor) -> Tensor:
    """``values [N, *]`` with axes of size 1 appended, to broadcast against ``like [N, *, *]``."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))


def spread(weights: Tensor, like: Tensor) -> Tensor:
    """Weights ``[N, *]`` to broadcast against ``like``: per row, or per head of ``like``.

    Heads are leading axes of ``[N, H, C]``, or blocks of the last axis of ``[N, H * C]``, into
    which layers flatten their heads.
    """
    heads, width = weights.size(-1), like.size(-1)
    if weights.dim() == like.dim() > 1 and 1 < heads < width and width % heads == 0:
        return weights.repeat_interleave(width // heads, dim=-1)
    return _trailing(weights, like)


def _gathered(values: Tensor, like: Tensor) -> Tensor:
    """Adjoint of :func:`spread`: sums of ``values`` in the shape of ``like``."""
    heads, width = like.size(-1), values.size(-1)
    if values.dim() == like.dim() > 1 and 1 < heads < width and width % heads == 0:
        return values.unflatten(-1, (heads, width // heads)).sum(-1)
    return values.sum_to_size(*_trailing(like, values).shape).view_as(like)


def _segment_sum(tile: Tile, values: Tensor) -> Tensor:
    """Sums per target of the tile: ``[E_tile, *]`` to ``[U, *]``."""
    flat = flat_rows(values)
    out = flat.new_zeros(tile.targets.numel(), flat.size(1))
    out.scatter_add_(0, tile.index.view(-1, 1).expand_as(flat), flat)
    return out.view(out.size(0), *values.shape[1:])


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


class SumReducer(Reducer):
    r""":math:`out_i = \sum_e m_e`; gradient :math:`\partial L/\partial m_e = g_i`."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds)
        self._out: Tensor | None = None
        self._gradient: Tensor | None = None

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None:
            self._out = self._zeros(messages)
        self._out.index_add_(0, tile.targets, _segment_sum(tile, messages))

    def finish(self) -> Tensor:
        out = _present(self._out)
        self._out = None
        return out

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._gradient = gradient

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        return _present(self._gradient).index_select(0, tile.target_rows)


class MeanReducer(SumReducer):
    r""":math:`out_i = \frac{1}{\max(d_i, 1)} \sum_e m_e` with the in-degree :math:`d_i`."""

    def _count(self, like: Tensor) -> Tensor:
        return _trailing(self.in_degree.clamp(min=1).to(like.dtype), like)

    def finish(self) -> Tensor:
        out = super().finish()
        return out.div_(self._count(out))

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._gradient = gradient / self._count(gradient)


class ExtremumReducer(Reducer):
    r""":math:`out_i = \max_e m_e` (or minimum), 0 without in-edges.

    All :math:`k` messages that reach the extremum, on whichever shard, get :math:`g_i / k`, or
    :math:`g_i / (k + 1)` where it is 0: the gradient of PyG's ``scatter_reduce``, which counts the
    zero that its output began with among the winners.
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

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if self._out is None or self._ties is None:
            self._out = self._zeros(messages).fill_(self._worst)
            self._ties = self._zeros(messages)
        if tile.num_edges == 0:
            return
        index = tile.index.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        best = messages.new_zeros(tile.targets.numel(), *messages.shape[1:])
        best.scatter_reduce_(0, index, messages, reduce=self._reduce, include_self=False)
        reached = messages == best.index_select(0, tile.index)
        ties = _segment_sum(tile, reached.to(messages.dtype))
        old, old_ties = self._out[tile.targets], self._ties[tile.targets]
        new = self._better(old, best)
        self._out[tile.targets] = new
        self._ties[tile.targets] = old_ties * (old == new) + ties * (best == new)

    def finish(self) -> Tensor:
        out = _present(self._out)
        out[self.in_degree == 0] = 0
        return out

    def state(self) -> list[Tensor]:
        return [_present(self._out), _present(self._ties)]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._out, self._ties = state
        winners = self._ties + (self._out == 0)
        self._gradient = gradient / winners.clamp(min=1)
        self._missing = self._ties.sum(dtype=torch.float64)

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        rows = tile.target_rows
        reached = _present(messages) == _present(self._out).index_select(0, rows)
        self._missing = _present(self._missing) - reached.sum()
        return _present(self._gradient).index_select(0, rows) * reached

    def finish_backward(self) -> None:
        if float(_present(self._missing)) != 0 and bool(_present(self._out).isfinite().all()):
            raise RuntimeError(
                "A message came out differently when it was computed again for the backward pass "
                f"({float(_present(self._missing)):.0f} extrema not found again). Is it "
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
        self._zeros_seen[tile.targets] += _segment_sum(tile, zero.to(messages.dtype))

    def finish(self) -> Tensor:
        return _present(self._product).masked_fill(_present(self._zeros_seen) > 0, 0)

    def state(self) -> list[Tensor]:
        return [_present(self._product), _present(self._zeros_seen)]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._product, self._zeros_seen = state
        self._gradient = gradient * self._product

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        values, rows = _present(messages), tile.target_rows
        zero = values == 0
        others = _present(self._zeros_seen).index_select(0, rows) - zero.to(values.dtype)
        share = _present(self._gradient).index_select(0, rows) / values.masked_fill(zero, 1)
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
            self._count = messages.new_zeros(self.num_targets)
        if tile.num_edges == 0:
            return
        rows = tile.targets
        count = _segment_sum(tile, messages.new_ones(tile.num_edges))
        mean = _segment_sum(tile, messages) / _trailing(count, messages)
        squares = _segment_sum(tile, (messages - mean.index_select(0, tile.index)).square())
        seen, old = self._count[rows], self._mean[rows]
        share = _trailing(count / (seen + count), mean)
        apart = mean - old
        self._count[rows] = seen + count
        self._mean[rows] = old + apart * share
        self._squares[rows] += squares + apart.square() * share * _trailing(seen, mean)

    def finish(self) -> Tensor:
        out = _present(self._squares)
        return out / _trailing(self.in_degree.clamp(min=1).to(out.dtype), out)

    def state(self) -> list[Tensor]:
        return [_present(self._mean)]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        (self._mean,) = state
        count = self.in_degree.clamp(min=1).to(gradient.dtype)
        self._gradient = 2 * gradient / _trailing(count, gradient)

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        rows = tile.target_rows
        apart = -_present(self._mean).index_select(0, rows)
        if self.needs_values:
            apart += _present(messages)
        return _present(self._gradient).index_select(0, rows) * apart


class SoftmaxReducer(Reducer):
    r""":math:`out_i = \sum_e p_e v_e` where messages carry weights normalised over their tile.

    State: the maximum :math:`M`, the normaliser :math:`S` and :math:`S \cdot out`, rescaled when
    the maximum grows. See [Note: softmax over targets].

    Args:
        rounds: The way through the edges.
        mean: Divide by the in-degree.
    """

    needs_values = True

    def __init__(self, rounds: Rounds, mean: bool = False) -> None:
        super().__init__(rounds)
        self._mean = mean
        self._out: Tensor | None = None
        self._max: Tensor | None = None
        self._sum: Tensor | None = None
        self._gradient: Tensor | None = None
        self._inner: Tensor | None = None

    def merge(self, tile: Tile, messages: Tensor, log: Reductions) -> None:
        if tile.num_edges == 0:  # Layers return early here, without their softmax.
            self._out = self._zeros(messages) if self._out is None else self._out
            return
        total = _present(log.total).detach()
        maximum = log.maximum if log.maximum is not None else torch.zeros_like(total)
        if self._out is None:
            self._out = self._zeros(messages)
        if self._max is None or self._sum is None:
            self._max = self._zeros(total).fill_(torch.finfo(total.dtype).min)
            self._sum = self._zeros(total)
        old = self._max[tile.targets]
        new = torch.maximum(old, maximum)
        keep, weight = (old - new).exp(), (maximum - new).exp() * total
        part = _segment_sum(tile, messages)
        self._max[tile.targets] = new
        self._sum[tile.targets] = self._sum[tile.targets] * keep + weight
        self._out[tile.targets] = (
            self._out[tile.targets] * spread(keep, part) + part * spread(weight, part)
        ).to(part.dtype)

    def finish(self) -> Tensor:
        out = _present(self._out)
        if self._sum is not None:
            safe = torch.where(self._sum == 0, torch.ones_like(self._sum), self._sum)
            out = self._out = (out / spread(safe, out)).to(out.dtype)
        if self._mean:
            out = out / _trailing(self.in_degree.clamp(min=1).to(out.dtype), out)
        return out

    def state(self) -> list[Tensor]:
        if self._max is None or self._sum is None:
            return []
        # A copy: what was handed out may be written into (F.relu(out, inplace=True)).
        return [_present(self._out).clone(), self._max, self._sum]

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        if not state:
            self._gradient = gradient
            return
        self._out, self._max, self._sum = state
        if self._mean:
            count = self.in_degree.clamp(min=1).to(gradient.dtype)
            gradient = gradient / _trailing(count, gradient)
        self._gradient = gradient
        self._inner = _gathered(gradient * self._out, self._sum)

    def _share(self, tile: Tile, log: Reductions) -> Tensor:
        """``e^{m_t - M} / S`` per target of the tile."""
        total = _present(log.total).detach()
        maximum = log.maximum if log.maximum is not None else torch.zeros_like(total)
        top, norm = _present(self._max)[tile.targets], _present(self._sum)[tile.targets]
        return (maximum - top).exp() / norm

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        gradient = _present(self._gradient)[tile.targets]
        if tile.num_edges == 0:
            return gradient.index_select(0, tile.index)
        weight = self._share(tile, log) * _present(log.total).detach()
        scaled = (gradient * spread(weight, gradient)).to(gradient.dtype)
        return scaled.index_select(0, tile.index)

    def total_gradient(self, tile: Tile, log: Reductions) -> Tensor | None:
        if tile.num_edges == 0:
            return None
        total = _present(log.total)
        inner = _present(self._inner)[tile.targets]
        return (-self._share(tile, log) * inner).to(total.dtype)


def _present(value: Tensor | None) -> Tensor:
    if value is None:
        raise RuntimeError("The reducer has not seen a tile yet")
    return value


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
        return _present(self._out)

    def start_backward(self, gradient: Tensor, state: list[Tensor]) -> None:
        self._gradient = gradient

    def message_gradient(self, tile: Tile, messages: Tensor | None, log: Reductions) -> Tensor:
        return _present(self._gradient).index_select(0, tile.targets)


def make_reducer(kind: str, normalised: bool, rounds: Rounds) -> Reducer:
    """The reducer of an aggregation.

    Args:
        kind: ``'sum'``, ``'mean'``, ``'max'``, ``'min'``, ``'mul'``, ``'var'``, ``'semi_var'``, or
            ``'place'`` where chunks hold all in-edges.
        normalised: The message reduces over targets: it holds weights normalised over a tile.
        rounds: The way through the edges.
    """
    if normalised and kind != "place":
        return SoftmaxReducer(rounds, mean=kind == "mean")
    make: dict[str, Callable[[], Reducer]] = {
        "place": lambda: PlaceReducer(rounds),
        "sum": lambda: SumReducer(rounds),
        "mean": lambda: MeanReducer(rounds),
        "max": lambda: ExtremumReducer(rounds, largest=True),
        "min": lambda: ExtremumReducer(rounds, largest=False),
        "mul": lambda: ProductReducer(rounds),
        "var": lambda: VarianceReducer(rounds, semi_grad=False),
        "semi_var": lambda: VarianceReducer(rounds, semi_grad=True),
    }
    return make[kind]()
