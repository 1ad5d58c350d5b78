r"""Which rows of a cut between two workers to pull, and for which targets to push partial sums.

An edge :math:`j \to i` whose ends lie on two workers can be served in two ways: the target's worker
*pulls* the row of j, or the source's worker aggregates into a partial state of i and *pushes* that.
A choice of rows that serves all edges is a vertex cover of the bipartite graph of the cut, and the
smallest is as large as its largest matching (König, 1931). Where a pulled row costs more than a
pushed one (it is fetched twice, say), the cheapest cover is a minimum cut (Picard and Queyranne,
1982).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_sar.kernels.ops import run, sort_edges, use_kernel

Costs = tuple[int, int]
"""The costs of a pulled row and of a pushed one."""
SUMS: Costs = (1, 1)
ALL_PUSHED: Costs = (1, 0)
COSTS: tuple[Costs, ...] = ((1, 2), (2, 3), SUMS, (4, 3))
"""The costs for which there are covers. See :func:`nearest_costs`."""


@dataclass(frozen=True, slots=True)
class Cover:
    """A cheapest vertex cover of a cut.

    Attributes:
        pulled: Whether a source's row is pulled, ``[num_sources]``.
        pushed: Whether a target's partial state is pushed, ``[num_targets]``.
        bound: What a cover costs at least: the size of the largest matching, or of the flow.
    """

    pulled: Tensor
    pushed: Tensor
    bound: int

    def cost(self, pull: int = 1, push: int = 1) -> int:
        """Its cost at these costs per row."""
        return pull * int(self.pulled.sum()) + push * int(self.pushed.sum())


@dataclass(frozen=True, slots=True)
class StoredCovers:
    """Covers of the edges into one part, as a partition holds them.

    Attributes:
        pulled: Of each halo row, bit k: whether it is pulled at ``costs[k]``. ``[H]``, uint8.
        costs: The costs that there are covers for.
        num_edges: The edges from other parts that they were made for.
    """

    pulled: Tensor
    costs: tuple[Costs, ...]
    num_edges: int

    def find(self, costs: Costs, num_edges: int) -> Tensor | None:
        """Which halo rows are pulled, ``[H]``; ``None``: it is not known of these edges.

        Where a layer left out edges, rows that the others need would be a cover still, and perhaps
        a dear one.
        """
        if costs not in self.costs or num_edges != self.num_edges:
            return None
        return (self.pulled >> self.costs.index(costs)) % 2 == 1


def stored_covers(row: Tensor, target: Tensor, offsets: Sequence[int]) -> StoredCovers:
    """The covers that are worth storing, as of :func:`pulled_rows`."""
    bits = pulled_rows(row, target, offsets, COSTS)
    pulled = torch.zeros(offsets[-1], dtype=torch.uint8)
    for bit, rows in enumerate(bits):
        pulled |= rows.to(torch.uint8) << bit
    return StoredCovers(pulled, COSTS, row.numel())


def pulled_rows(
    row: Tensor, target: Tensor, offsets: Sequence[int], costs: Sequence[Costs]
) -> list[Tensor]:
    """Which halo rows a cheapest cover of each owner's edges pulls, bool ``[H]``, for each of
    ``costs``.

    ``row`` and ``target`` are those of each edge between parts, ``[E]``. An owner's halo rows begin
    at its offset; the last one is their number H.
    """
    row, target = row.cpu(), target.cpu()
    # The owners' cuts side by side: no two have a source or a target in common.
    owner = torch.bucketize(row, torch.tensor(offsets[1:]), right=True)
    key = owner * (int(target.max()) + 1 if target.numel() else 1) + target
    targets, number = torch.unique(key, return_inverse=True)
    solve = _solver(row, number, offsets[-1], targets.numel(), None)
    return [solve(pull, push).pulled for pull, push in costs]


def nearest_costs(pull: int, push: int) -> Costs:
    """The entry of :data:`COSTS` whose covers are good for other costs, such as bytes.

    [Note: few covers] The cheapest covers of a cut are few: which one is cheapest changes where one
    row is as much as one, two or three of the other kind, and hardly in between. In between, any
    ratio's cover is within about a percent of the cheapest.
    """
    for most, costs in zip((0.58, 0.8, 1.0), COSTS, strict=False):
        if pull <= most * push:
            return costs
    return COSTS[-1]


def minimum_cover(
    source: Tensor,
    target: Tensor,
    num_sources: int,
    num_targets: int,
    pull: int = 1,
    push: int = 1,
    *,
    native: bool | None = None,
) -> Cover:
    """A cheapest vertex cover of a bipartite graph: of several, the one with most sources.

    Edges have one end in ``source`` and one in ``target``, ``[E]``; ``pull`` and ``push`` are the
    costs of these, below 65,536. ``native`` says whether to use the kernel; ``None``: where it is
    there.

    Raises:
        ValueError: When a cost is out of range.
    """
    for name, cost in (("pull", pull), ("push", push)):
        if not 1 <= cost < 2**16:
            raise ValueError(f"Expected costs from 1 to 65,535 (got {name}={cost})")
    return _solver(source.cpu(), target.cpu(), num_sources, num_targets, native)(pull, push)


def _solver(
    source: Tensor, target: Tensor, num_sources: int, num_targets: int, native: bool | None
) -> Callable[[int, int], Cover]:
    """Returns what finds a cover by the costs."""
    if use_kernel(native, max(num_sources, num_targets) < 2**31):
        order, starts = sort_edges(source, num_sources)
        given = starts.long(), target.index_select(0, order).int(), num_targets
        return lambda *costs: Cover(*run(torch.ops.pyg_sar.minimum_cover, *given, *costs))
    from scipy.sparse import csr_array  # seconds to import

    j, i = source.numpy().astype(np.int64), target.numpy().astype(np.int64)
    graph = csr_array((np.ones(j.size, np.int8), (j, i)), shape=(num_sources, num_targets))
    graph.sum_duplicates()

    def solve(pull: int, push: int) -> Cover:
        if graph.nnz == 0:
            nothing = torch.zeros(num_sources, dtype=torch.bool)
            return Cover(nothing, torch.zeros(num_targets, dtype=torch.bool), 0)
        near, far, bound = _minimum_cut(graph, pull, push)
        return Cover(torch.from_numpy(~near), torch.from_numpy(far), bound)

    return solve


def _minimum_cut(
    graph: Any, pull: int, push: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], int]:
    """Sources and targets on the source side of the smallest minimum cut, and the flow."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    sources, targets = graph.shape
    first, last = sources + targets, sources + targets + 1
    coo = graph.tocoo()
    start = np.concatenate([np.full(sources, first), coo.row, np.arange(targets) + sources])
    stop = np.concatenate([np.arange(sources), coo.col + sources, np.full(targets, last)])
    most = pull + push  # more than a source can give
    room = np.concatenate(
        [np.full(sources, pull), np.full(coo.nnz, most), np.full(targets, push)]
    ).astype(np.int32)
    network = csr_array((room, (start, stop)), shape=(last + 1, last + 1))
    result = maximum_flow(network, first, last)
    flow = csr_array(result.flow)
    given = np.asarray(flow[[first], :sources].todense()).ravel()
    used = csr_array(flow[:sources, sources : sources + targets])
    used.data = np.maximum(used.data, 0)
    used.eliminate_zeros()
    senders = csr_array(used.T)

    # From sources that could give more along edges to targets, and from these to their senders.
    near, far = given < pull, np.zeros(targets, np.bool_)
    fresh = np.flatnonzero(near)
    while fresh.size:
        found = np.unique(graph[fresh].indices)
        found = found[~far[found]]
        far[found] = True
        fresh = np.unique(senders[found].indices)
        fresh = fresh[~near[fresh]]
        near[fresh] = True
    return near, far, int(result.flow_value)
