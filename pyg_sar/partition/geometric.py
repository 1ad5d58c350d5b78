"""Recursive coordinate bisection: parts that are boxes around nodes with positions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BINS = 1 << 16


def geometric_assignment(pos: Tensor, weight: Tensor, num_parts: int) -> Tensor:
    r"""Assigns nodes to parts by halving the graph's box, its halves, and so on.

    Nodes of :math:`p` parts are cut in two along the axis of their largest extent, where one side
    has :math:`\lfloor p/2 \rfloor / p` of their weight, as nearly as whole nodes allow. Nodes of
    one coordinate are cut by their ids.

    ``pos`` are positions, ``[N, D]`` or ``[N]``, finite; ``weight`` is what each node counts,
    positive, ``[N]``. Returns the part of each node, int64, ``[N]``; the same on every machine.

    Source: Berger and Bokhari, "A Partitioning Strategy for Nonuniform Problems on
    Multiprocessors", IEEE Trans. Computers 1987.
    """
    if pos.is_complex() or pos.dim() not in (1, 2) or pos.size(-1) == 0:
        raise ValueError(
            f"method='geometric' needs 'pos' of real numbers [N, D] (got {pos.dtype} of shape "
            f"{list(pos.shape)}); choose another method"
        )
    points = pos.detach().cpu().view(len(weight), *pos.shape[1:] or (1,)).double().numpy()
    wrong = np.flatnonzero(~np.isfinite(points).all(1))
    if wrong.size:
        raise ValueError(
            f"method='geometric' needs finite positions (got {points[wrong[0]].tolist()} at node "
            f"{wrong[0]}, {wrong.size} such nodes in all); correct 'pos' or choose another method"
        )
    part = np.zeros(len(points), dtype=np.int64)
    mass = weight.cpu().double().numpy()
    waiting = [(np.arange(len(points)), np.ascontiguousarray(points.T), mass, 0, num_parts)]
    while waiting:
        nodes, axes, mass, first, count = waiting.pop()
        if count == 1 or not nodes.size:
            part[nodes] = first
            continue
        few = count // 2
        widest = int(np.argmax(axes.max(1) - axes.min(1)))
        left = _lowest(axes[widest], mass, few / count)
        for side, start, number in ((left, first, few), (~left, first + few, count - few)):
            given = nodes[side], np.ascontiguousarray(axes[:, side]), mass[side]
            waiting.append((*given, start, number))
    return torch.from_numpy(part)


def _lowest(
    values: NDArray[np.float64], mass: NDArray[np.float64], share: float
) -> NDArray[np.bool_]:
    """Returns which are the lowest values that have a share of the mass, in bool.

    Only values in the bin where the cut falls are sorted.
    """
    low, high = values.min(), values.max()
    scale = (_BINS - 1) / (high - low) if high > low else 0.0
    if not np.isfinite(scale):  # The values differ by less than a float tells.
        scale = 0.0
    bins = ((values - low) * scale).astype(np.int32)
    ends = np.bincount(bins, mass, _BINS).cumsum()
    wanted = share * ends[-1]
    cut = int(np.searchsorted(ends, wanted))
    found = bins < cut
    inside = np.flatnonzero(bins == cut)
    inside = inside[np.argsort(values[inside], kind="stable")]
    before = ends[cut - 1] if cut else 0.0
    # A node goes where more of it is.
    taken = int(((before + mass[inside].cumsum() - mass[inside] / 2) <= wanted).sum())
    found[inside[:taken]] = True
    return found
