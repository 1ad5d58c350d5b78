"""Merging a softmax over targets whose tiles were normalised by themselves; reducers by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_sar.engine.reduce import (
    ExtremumReducer,
    MeanReducer,
    PlaceReducer,
    ProductReducer,
    Reducer,
    SumReducer,
    VarianceReducer,
    present,
    segment_sum,
)
from pyg_sar.engine.rounds import Rounds
from pyg_sar.message.target_index import Reductions, spread, trailing
from pyg_sar.space.shard import Tile


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
