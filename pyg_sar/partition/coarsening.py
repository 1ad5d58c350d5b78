r"""Assignment for graphs whose adjacency does not fit into memory: METIS on a coarsened graph.

The adjacency lies in files, and is read node by node, in passes:

1. **Clusters.** At first each node is a cluster. In :data:`CLUSTERING` passes each node goes to the
   cluster that most of its neighbours are in (label propagation), as long as no cluster has more
   than a :data:`CLUSTERS`-th of a part's nodes or in-edges. Nodes that the same full cluster has
   no room for, as the leaves of a hub, go together, and so do nodes without neighbours: METIS
   would have as many clusters as nodes.
2. **METIS** cuts the graph of the clusters. These weigh as many nodes and in-edges as they have,
   and a pair of them the edges between; of those every k-th is taken where all would not fit.
3. **Restreaming.** In :data:`RESTREAMS` passes, or up to :data:`MOST_RESTREAMS` where parts are
   too large, each node goes to the part that most of its neighbours are in, less a price of the
   part's load (Fennel),

.. math::
    \arg\max_i \; |N(v) \cap V_i|
    - \gamma \frac{m}{N} \sum_c \frac{w_{vc}}{2 \bar w_c} \ell_{ci}^{\gamma - 1},

with :math:`\gamma = 3/2`, :math:`m` edges, and what is balanced, :math:`c`: nodes
(:math:`w_v = 1`), in-edges (the in-degree) and, if asked for, training nodes; their prices add up
in equal shares. A part's load :math:`\ell_{ci}` is its sum of
:math:`w_c` over the parts' average, :math:`\bar w_c` the nodes' average. Nodes decide one after
another, and prices are rounded, so that kernel and plain loops find the same. No part exceeds
:data:`~pyg_sar.partition.balance.LIMIT` times the mean of nodes or of in-edges, or the in-edges of
one node if these are more, where that can be kept.

Source: Meyerhenke, Sanders and Schulz, "Partitioning Complex Networks via Size-Constrained
Clustering", SEA 2014; LaSalle et al., "Improving Graph Partitioning for Modern Graphs and
Architectures", IA3 2015 (leaves of a hub); Tsourakakis et al., "FENNEL: Streaming Graph
Partitioning for Massive Scale Graphs", WSDM 2014; Nishimura and Ugander, "Restreaming Graph
Partitioning", KDD 2013.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor

from pyg_sar.kernels.ops import run, sort_edges, use_kernel
from pyg_sar.partition.balance import (
    METIS_EDGE,
    METIS_NODE,
    Coarse,
    Loads,
    limits,
    metis_assignment,
)
from pyg_sar.partition.scratch import GroupedRows, Scratch, group_by_part, offsets_of
from pyg_sar.wording import counted

CLUSTERING, RESTREAMS, MOST_RESTREAMS = 3, 3, 8
CLUSTERS = 100
"""Clusters in a part, at least, if the graph has as many nodes."""
_GAMMA = 1.5
_NODES = 2**20  # at a time
_POINT = 2**16  # that prices are multiples of, under one neighbour

Edges = Sequence[tuple[Tensor, int, int]]
"""``edge_index`` of each relation, and what is added to its sources and targets."""


def coarsened_assignment(
    edges: Edges,
    num_nodes: int,
    num_parts: int,
    seed: int,
    scratch: Scratch,
    marked: Tensor | None = None,
) -> Tensor:
    """Assigns nodes, of which there are more than parts, by METIS on a coarsened graph, and
    restreaming.

    The edges are read in pieces; the adjacency goes to ``scratch``, whose memory METIS may take.
    Nodes that are ``marked``, bool ``[N]``, are balanced by themselves, too. Returns the part of
    each node, int64, ``[N]``; the same for the same arguments.
    """
    blocks = Blocks(edges, num_nodes, scratch, marked)
    part = _coarse_assignment(blocks, num_parts, seed, scratch)
    state = Parts(blocks, num_parts, part)
    for number in range(MOST_RESTREAMS):
        state.stream(f"restreaming, pass {number + 1}")
        if number + 1 >= RESTREAMS and state.fits:
            break
    return state.part.long()


class Blocks:
    """The adjacency in runs of consecutive nodes, each of which fits into memory, in files."""

    def __init__(
        self, edges: Edges, num_nodes: int, scratch: Scratch, marked: Tensor | None = None
    ) -> None:
        self.num_nodes, self._scratch, self._edges = num_nodes, scratch, edges
        self.dtype = torch.int32 if num_nodes < 2**31 else torch.int64
        self._marked = marked
        self.indegree = torch.zeros(num_nodes, dtype=torch.long)
        degree = torch.zeros(num_nodes, dtype=torch.long)
        for source, target in self._pieces("degrees"):
            self.indegree += torch.bincount(target, minlength=num_nodes)
            degree += torch.bincount(source, minlength=num_nodes)
        self._starts = offsets_of(degree.add_(self.indegree))
        self.num_edges = int(self.indegree.sum())
        self.totals = [num_nodes, self.num_edges]
        self.totals += [] if marked is None else [int(marked.sum())]
        # A run of pairs, and twice as much to sort them.
        run = max(scratch.memory // 8 // (6 * self.dtype.itemsize), 1)
        by_edges = torch.searchsorted(self._starts, torch.arange(0, 2 * self.num_edges, run))
        by_nodes = torch.arange(0, num_nodes, _NODES)
        self._firsts = torch.cat([by_edges.clamp(max=num_nodes - 1), by_nodes]).unique()
        bounds = torch.cat([self._firsts, torch.tensor([num_nodes])])
        empty = torch.empty(0, dtype=self.dtype)
        counts = self._starts[bounds].diff()
        self._ends = [GroupedRows(scratch, counts, empty) for _ in range(2)]
        for source, target in self._pieces("adjacency"):
            node = torch.cat([source, target]).to(self.dtype)
            other = torch.cat([target, source]).to(self.dtype)
            block = torch.bucketize(node, self._firsts[1:], right=True)
            order, starts = group_by_part(block, counts.numel())
            for rows, values in zip(self._ends, (node, other), strict=True):
                rows.put(values, order, starts)
        self._bounds = bounds.tolist()
        self._sorted = [False] * counts.numel()

    def _pieces(self, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        for edge_index, first, second in self._edges:
            for piece in self._scratch.pieces(what, edge_index.size(1)):
                source, target = edge_index[:, piece].long()
                yield source + first, target + second

    def weights(self, nodes: slice) -> Tensor:
        """Returns what nodes count of all that is balanced, int64, ``[n, 2 or 3]``."""
        indegree = self.indegree[nodes]
        kinds = [torch.ones_like(indegree), indegree]
        kinds += [] if self._marked is None else [self._marked[nodes].long()]
        return torch.stack(kinds, dim=1)

    def loads(self, group: Tensor, count: int) -> Tensor:
        """Returns what each of the groups of nodes counts, ``[count, 2 or 3]``."""
        loads = torch.zeros(count, len(self.totals), dtype=torch.long)
        for first in range(0, self.num_nodes, _NODES):
            nodes = slice(first, first + _NODES)
            loads.index_add_(0, group[nodes], self.weights(nodes))
        return loads

    def read(self, what: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields runs: nodes, where the neighbours of each start, and these."""
        for block, (first, last) in enumerate(pairwise(self._bounds)):
            node, other = (rows.part(block) for rows in self._ends)
            if not self._sorted[block]:
                order, _ = sort_edges(node.sub_(first), last - first)
                other = other.index_select(0, order)
                self._ends[1].replace(block, other)
                self._sorted[block] = True
            self._scratch.say(what, last, self.num_nodes)
            yield slice(first, last), self._starts[first : last + 1] - self._starts[first], other


def _coarse_assignment(blocks: Blocks, num_parts: int, seed: int, scratch: Scratch) -> Tensor:
    """Returns the part of each node that METIS gives to its cluster, of the blocks' dtype."""
    clusters = Clusters(blocks, num_parts)
    for number in range(CLUSTERING):
        clusters.stream(f"clustering, pass {number + 1} of {CLUSTERING}")
    most = max(scratch.memory // (2 * METIS_NODE), num_parts * CLUSTERS)
    label, count = clusters.numbered(most)
    del clusters
    rows = max((scratch.memory - METIS_NODE * count) // METIS_EDGE, 1)
    pairs, step = [], -(-blocks.num_edges // rows)
    for nodes, starts, adjacent in blocks.read("the graph of the clusters"):
        own = torch.repeat_interleave(label[nodes], starts.diff())
        other = label[adjacent]
        # Each edge is there twice, once from either end.
        pairs.append(torch.stack([own, other])[:, own < other][:, ::step])
    low, high = torch.cat(pairs, dim=1)
    pairs.clear()
    order = sort_edges(low, count, sort_edges(high, count)[0])[0]
    key = (low.long() * count + high).index_select(0, order)
    key, weight = key.unique_consecutive(return_counts=True)
    low, high = torch.div(key, count, rounding_mode="floor"), key % count
    scratch.report(
        f"METIS cuts {counted(count, 'clusters')} with {counted(weight.numel(), 'edges')} between "
        "them"
    )
    graph = Coarse.of(low, high, weight, blocks.loads(label, count))
    return metis_assignment(graph, num_parts, seed).to(blocks.dtype)[label]


class Clusters:
    """Disjoint sets of nodes that are near each other, none of them a large share of a part."""

    def __init__(self, blocks: Blocks, num_parts: int) -> None:
        self._blocks = blocks
        self.label = torch.arange(blocks.num_nodes, dtype=blocks.dtype)
        self._loads = blocks.weights(slice(None))
        most = [max(total // (num_parts * CLUSTERS), 1) for total in blocks.totals]
        self._most = torch.tensor(most)

    def stream(self, what: str) -> None:
        """Lets each node decide, in order."""
        for nodes, starts, adjacent in self._blocks.read(what):
            weights = self._blocks.weights(nodes)
            given = self.label, self._loads, weights, self._most, nodes.start, starts, adjacent
            join_clusters_(*given)

    def numbered(self, most: int) -> tuple[Tensor, int]:
        """Returns the number of each node's cluster, and how many there are, at most ``most``."""
        there = torch.zeros(self.label.numel(), dtype=torch.bool)
        there[self.label] = True
        number = there.cumsum(0).sub_(1)
        count = int(there.sum())
        if count > most:
            number, count = torch.div(number * most, count, rounding_mode="floor"), most
        return number.to(self.label.dtype)[self.label], count


class Parts:
    """Where nodes are, and the parts' loads."""

    def __init__(self, blocks: Blocks, num_parts: int, part: Tensor) -> None:
        self.part, self._blocks = part, blocks
        largest = [1, int(blocks.indegree.max()), 1][: len(blocks.totals)]
        self.most = limits(blocks.totals, largest, num_parts)
        self.loads = blocks.loads(part, num_parts)
        # Of weight and root of the load, neither of them over its average.
        mean = torch.tensor(blocks.totals).double().clamp(min=1) / num_parts
        even = _GAMMA * blocks.num_edges / num_parts / len(mean)
        self.price = _POINT * even * mean**-1.5

    @property
    def fits(self) -> bool:
        """Says if no part is too large."""
        return bool((self.loads <= self.most).all())

    def stream(self, what: str) -> None:
        """Lets each node decide again, in order."""
        for nodes, starts, adjacent in self._blocks.read(what):
            weights, limits = self._blocks.weights(nodes), (self.most, self.price)
            join_parts_(self.part, self.loads, weights, *limits, nodes.start, starts, adjacent)


# Nodes in order #############################################################################


def join_clusters_(
    label: Tensor,
    loads: Tensor,
    weights: Tensor,
    most: Tensor,
    first: int,
    offsets: Tensor,
    adjacent: Tensor,
    *,
    native: bool | None = None,
) -> None:
    """Lets nodes join the cluster with room that most of their neighbours are in.

    A node that is alone, as no such cluster has room, joins those that want to be in the same one.

    Args:
        label: The cluster of each node, int32 or int64, ``[N]``; changed.
        loads: What clusters count of each kind, int64, ``[clusters, C]``; changed.
        weights, most: What the nodes that decide count, ``[n, C]``; what a cluster may, ``[C]``.
        first: The first of the nodes.
        offsets: Where the neighbours of each start, and at last their number, int64, ``[n + 1]``.
        adjacent: The neighbours, of the dtype of ``label``.
        native: Whether to use the kernel; ``None``: where it is there.
    """
    given = label, loads, weights, most, first, offsets, adjacent
    if use_kernel(native, True):
        run(torch.ops.pyg_sar.join_clusters_, *given)
        return
    where, held = memoryview(label.numpy()), Loads(loads, most)  # type: ignore[arg-type]
    waiting: dict[int, int] = {}
    for node, weight, near in _decisions(where, weights, first, offsets, adjacent):
        own = where[node]
        # Among equals any cluster will do, but not always the one with the least number.
        ranks = {one: (found, one * 2654435761 % 2**32) for one, found in near.items()}
        wanted = max(ranks, key=ranks.__getitem__, default=-1)
        roomy = [one for one in ranks if one == own or held.fits(one, weight)]
        best = max(roomy, key=ranks.__getitem__, default=own)
        if best == own and wanted != own and held.is_alone(own, weight):
            best = waiting.get(wanted, own)
            if best == own or not held.fits(best, weight):
                best = waiting[wanted] = own
        if best != own:
            held.add(own, weight, -1)
            held.add(best, weight, 1)
            where[node] = best


def join_parts_(
    part: Tensor,
    loads: Tensor,
    weights: Tensor,
    most: Tensor,
    price: Tensor,
    first: int,
    offsets: Tensor,
    adjacent: Tensor,
    *,
    native: bool | None = None,
) -> None:
    r"""Lets nodes join the part with room that has most of their neighbours, less its price.

    A neighbour is worth :math:`2^{16}`, and the price of part :math:`i` for node :math:`v` is
    :math:`\sum_c w_{vc} [p_c \sqrt{L_{ic}}]`, of its loads and rounded. Where no part has room, the
    node goes to the one that it takes least over its limits.

    Arguments are as of :func:`join_clusters_`, with parts for clusters, and ``price``, of each
    kind, :math:`p`, float64, ``[C]``.
    """
    given = part, loads, weights, most, price, first, offsets, adjacent
    if use_kernel(native, True):
        run(torch.ops.pyg_sar.join_parts_, *given)
        return
    where, held = memoryview(part.numpy()), Loads(loads, most)  # type: ignore[arg-type]
    prices = price.tolist()

    def costs(one: int) -> list[int]:
        return [round(p * sqrt(load)) for p, load in zip(prices, held.of(one), strict=True)]

    cost = [costs(one) for one in range(len(loads))]
    for node, weight, near in _decisions(where, weights, first, offsets, adjacent):
        own = where[node]
        held.add(own, weight, -1)
        cost[own] = costs(own)
        best, gain = -1, 0
        for one in (own, *range(len(loads))):
            found = near.get(one, 0) * _POINT
            found -= sum(w * c for w, c in zip(weight, cost[one], strict=True))
            if (best < 0 or found > gain) and held.fits(one, weight):
                best, gain = one, found
        if best < 0:  # No part has room: the limit can't be kept.
            best = min(range(len(loads)), key=lambda one: held.excess(one, weight))
        held.add(best, weight, 1)
        cost[best] = costs(best)
        where[node] = best


def _decisions(
    where: memoryview, weights: Tensor, first: int, offsets: Tensor, adjacent: Tensor
) -> Iterator[tuple[int, list[int], Counter[int]]]:
    """Yields nodes, what each counts, and how many of its neighbours are in each group by now."""
    others = memoryview(adjacent.numpy())  # type: ignore[arg-type]
    bounds = pairwise(offsets.tolist())
    for node, ((start, stop), weight) in enumerate(zip(bounds, weights.tolist(), strict=True)):
        yield first + node, weight, Counter(map(where.__getitem__, others[start:stop]))
