r"""Assignment for graphs whose adjacency does not fit into memory: METIS on a coarsened graph.

The adjacency lies in files, and is read node by node, in passes:

1. **Clusters.** At first each node is a cluster. In :data:`CLUSTERING` passes each node goes to the
   cluster that most of its neighbours are in (label propagation), as long as no cluster has more
   than a :data:`CLUSTERS`-th of a part's nodes or in-edges.
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
:math:`w_c` over the parts' average, :math:`\bar w_c` the nodes' average. Nodes come in batches,
which decide at once. No part exceeds :data:`LIMIT` of nodes or of in-edges, or the in-edges of one
node if these are more, where that can be kept.

Source: Meyerhenke, Sanders and Schulz, "Partitioning Complex Networks via Size-Constrained
Clustering", SEA 2014; Tsourakakis et al., "FENNEL: Streaming Graph Partitioning for Massive Scale
Graphs", WSDM 2014; Nishimura and Ugander, "Restreaming Graph Partitioning", KDD 2013.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pyg_sar.partition.balance import LIMIT, METIS_EDGE, METIS_NODE, Coarse, metis_assignment
from pyg_sar.partition.scratch import GroupedRows, Scratch, group_by_part, offsets_of

CLUSTERING, RESTREAMS, MOST_RESTREAMS = 3, 3, 8
CLUSTERS = 100
"""Clusters in a part, at least, if the graph has as many nodes."""
_GAMMA = 1.5
_BATCHES = 16  # of nodes, for each part, at least
_LARGEST = 8192  # nodes of a batch
_ENTRIES = 2**22  # [nodes, parts] at a time

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
    """Assigns nodes to parts by METIS on a coarsened graph, and restreaming.

    Args:
        edges: The edges, read in pieces.
        num_nodes: Nodes N, more than ``num_parts``.
        num_parts: Parts P.
        seed: METIS's seed.
        scratch: Where the adjacency goes, and the memory that METIS may take.
        marked: Nodes that are balanced by themselves, too, bool, ``[N]``.

    Returns:
        The part of each node, int64, ``[N]``; the same for the same arguments.
    """
    wanted = min(_LARGEST, max(num_nodes // (num_parts * _BATCHES), 1))
    batch = max(min(wanted, _ENTRIES // num_parts), 1)
    blocks = _Blocks(edges, num_nodes, batch, scratch, marked)
    part = _coarse_assignment(blocks, num_parts, batch, seed, scratch)
    state = _State(blocks, num_parts, batch, part)
    for number in range(MOST_RESTREAMS):
        for run in blocks.read(f"restreaming, pass {number + 1}"):
            state.stream(*run)
        if number + 1 >= RESTREAMS and state.fits:
            break
    return state.part.long()


class _Blocks:
    """The adjacency in runs of consecutive batches, each of which fits into memory, in files."""

    def __init__(
        self,
        edges: Edges,
        num_nodes: int,
        batch: int,
        scratch: Scratch,
        marked: Tensor | None = None,
    ) -> None:
        self.num_nodes, self._scratch, self._edges = num_nodes, scratch, edges
        self._marked = marked
        self.indegree = torch.zeros(num_nodes, dtype=torch.long)
        degree = torch.zeros(num_nodes, dtype=torch.long)
        for source, target in self._pieces("degrees"):
            self.indegree += torch.bincount(target, minlength=num_nodes)
            degree += torch.bincount(source, minlength=num_nodes)
        self._starts = offsets_of(degree + self.indegree)
        self.num_edges = int(self.indegree.sum())
        self.totals = [num_nodes, self.num_edges]
        self.totals += [] if marked is None else [int(marked.sum())]
        # A run of pairs: 16 bytes each, and as much twice to sort them.
        run = max(scratch.memory // 8 // 48, 1)
        blocks = (self._starts[:-1:batch] // run).unique_consecutive(return_inverse=True)[1]
        self._block = blocks.repeat_interleave(batch)[:num_nodes]
        counts = torch.zeros(int(self._block[-1]) + 1, dtype=torch.long)
        counts.index_add_(0, self._block, self._starts.diff())
        empty = torch.empty(0, dtype=torch.long)
        self._ends = [GroupedRows(scratch, counts, empty) for _ in range(2)]
        for source, target in self._pieces("adjacency"):
            node, other = torch.cat([source, target]), torch.cat([target, source])
            order, bounds = group_by_part(self._block[node], counts.numel())
            for rows, values in zip(self._ends, (node, other), strict=True):
                rows.put(values, order, bounds)
        self._sorted = [False] * counts.numel()

    def _pieces(self, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        for edge_index, first, second in self._edges:
            for piece in self._scratch.pieces(what, edge_index.size(1)):
                source, target = edge_index[:, piece].long()
                yield source + first, target + second

    def weights(self, nodes: slice = slice(None)) -> Tensor:
        """Returns what nodes count of all that is balanced, int64, ``[2 or 3, n]``."""
        indegree = self.indegree[nodes]
        rows = [torch.ones_like(indegree), indegree]
        return torch.stack(rows if self._marked is None else [*rows, self._marked[nodes].long()])

    def read(self, what: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields runs: the first node, where each node's neighbours start, and these."""
        sizes = torch.bincount(self._block)
        firsts = offsets_of(sizes).tolist()
        for block, (first, last) in enumerate(pairwise(firsts)):
            node, other = (rows.part(block) for rows in self._ends)
            if not self._sorted[block]:
                other = other[node.sort(stable=True).indices]
                self._ends[1].replace(block, other)
                self._sorted[block] = True
            self._scratch.say(what, last, self.num_nodes)
            yield first, self._starts[first : last + 1] - self._starts[first], other


def _coarse_assignment(
    blocks: _Blocks, num_parts: int, batch: int, seed: int, scratch: Scratch
) -> Tensor:
    """Returns the part of each node that METIS gives to its cluster, int32."""
    clusters = _Clusters(blocks, num_parts, batch)
    for number in range(CLUSTERING):
        for run in blocks.read(f"clustering, pass {number + 1} of {CLUSTERING}"):
            clusters.stream(*run)
    most = max(scratch.memory // (2 * METIS_NODE), num_parts * CLUSTERS)
    label, count = clusters.numbered(most)
    del clusters
    size = torch.zeros(count, len(blocks.totals), dtype=torch.long)
    for first in range(0, label.numel(), _ENTRIES):
        some = slice(first, first + _ENTRIES)
        size.index_add_(0, label[some], blocks.weights(some).t())
    rows = max((scratch.memory - METIS_NODE * count) // METIS_EDGE, 1)
    pairs, step = [], -(-blocks.num_edges // rows)
    for first, starts, adjacent in blocks.read("the graph of the clusters"):
        own = torch.repeat_interleave(label[first : first + starts.numel() - 1], starts.diff())
        other = label[adjacent]
        # Each edge is there twice, once from either end.
        pairs.append((own * count + other)[own < other][::step])
    key, weight = torch.cat(pairs).unique(return_counts=True)
    pairs.clear()
    scratch.report(f"METIS cuts {count:,} clusters with {key.numel():,} edges between them")
    graph = Coarse.of(torch.div(key, count, rounding_mode="floor"), key % count, weight, size)
    return metis_assignment(graph, num_parts, seed).int()[label]


class _Clusters:
    """Disjoint sets of nodes that are near each other, none of them a large share of a part."""

    def __init__(self, blocks: _Blocks, num_parts: int, batch: int) -> None:
        self._batch = batch
        self._label = torch.arange(blocks.num_nodes)
        self._weights, self._loads = blocks.weights, blocks.weights()
        most = [total // (num_parts * CLUSTERS) for total in blocks.totals]
        self._most = torch.tensor(most).clamp(min=1)[:, None]

    def stream(self, first: int, starts: Tensor, adjacent: Tensor) -> None:
        """Lets a run of nodes decide."""
        for low in range(0, starts.numel() - 1, self._batch):
            high = min(low + self._batch, starts.numel() - 1)
            counts = starts[low : high + 1].diff()
            there = self._label[adjacent[int(starts[low]) : int(starts[high])]]
            self._decide(slice(first + low, first + high), counts, there)

    def _decide(self, nodes: slice, counts: Tensor, there: Tensor) -> None:
        """Moves nodes to the clusters of most of their neighbours, of which ``there`` are."""
        number, all_nodes = counts.numel(), self._label.numel()
        row = torch.repeat_interleave(torch.arange(number), counts)
        key, near = (row * all_nodes + there).sort().values.unique_consecutive(return_counts=True)
        row, cluster = torch.div(key, all_nodes, rounding_mode="floor"), key % all_nodes
        own = self._label[nodes].clone()
        weights = self._weights(nodes)
        fits = (self._loads[:, cluster] + weights[:, row] <= self._most).all(0)
        fits |= cluster == own[row]
        row, cluster = row[fits], cluster[fits]
        # Among equals any cluster will do, but not always the one with the least id.
        gain = near[fits].double() + (cluster * 2654435761 % 1000003).double() / 1000004
        best = gain.new_full((number,), -1.0).scatter_reduce(0, row, gain, "amax")
        chosen = own.clone()
        is_best = gain == best[row]
        chosen[row[is_best]] = cluster[is_best]
        moving = (chosen != own).nonzero().view(-1)
        moving = moving[chosen[moving].sort(stable=True).indices]
        to, taken = chosen[moving], weights[:, moving]
        # Of those that want the same cluster the first ones fit.
        _, place, sizes = to.unique_consecutive(return_inverse=True, return_counts=True)
        total = torch.cat([torch.zeros_like(taken[:, :1]), taken.cumsum(1)], dim=1)
        within = total[:, 1:] - total[:, offsets_of(sizes)[:-1]][:, place]
        fits = (self._loads[:, to] + within <= self._most).all(0)
        moving, to, taken = moving[fits], to[fits], taken[:, fits]
        self._loads.index_add_(1, own[moving], -taken)
        self._loads.index_add_(1, to, taken)
        self._label[nodes.start + moving] = to

    def numbered(self, most: int) -> tuple[Tensor, int]:
        """Returns the number of each node's cluster, and how many there are, at most ``most``."""
        there = torch.zeros(self._label.numel(), dtype=torch.bool)
        there[self._label] = True
        number = there.cumsum(0).sub_(1)
        label, count = number[self._label], int(there.sum())
        if count <= most:
            return label, count
        return torch.div(label * most, count, rounding_mode="floor"), most


class _State:
    """Where nodes are, and the parts' loads: all that is balanced, over its average."""

    def __init__(self, blocks: _Blocks, num_parts: int, batch: int, part: Tensor) -> None:
        self.part = part
        self._counts = blocks.weights
        totals = torch.tensor(blocks.totals).double().clamp(min=1)
        self._shares = (num_parts / totals)[:, None]
        # One node may weigh more, and an average need not be a whole number.
        largest = torch.tensor([1, int(blocks.indegree.max()), 1])[: len(totals)]
        whole = torch.maximum(largest, (totals / num_parts).ceil())
        self._most = (whole[:, None] * self._shares).clamp(min=LIMIT) + 1e-9
        loads = torch.zeros(len(totals), num_parts, dtype=torch.long)
        for first in range(0, blocks.num_nodes, _ENTRIES):
            some = slice(first, first + _ENTRIES)
            loads.index_add_(1, part[some], blocks.weights(some))
        self._loads = loads * self._shares
        # By the shares of a part's average that the weights are; an equal part of it for each load.
        self._price = _GAMMA * blocks.num_edges / num_parts / len(totals)
        self._batch = batch

    @property
    def fits(self) -> bool:
        """Says if no part is too large."""
        return bool((self._loads <= self._most).all())

    def stream(self, first: int, starts: Tensor, adjacent: Tensor) -> None:
        """Lets a run of nodes decide again."""
        parts = self._loads.size(1)
        for low in range(0, starts.numel() - 1, self._batch):
            high = min(low + self._batch, starts.numel() - 1)
            counts = starts[low : high + 1].diff()
            row = torch.repeat_interleave(torch.arange(0, (high - low) * parts, parts), counts)
            there = self.part.index_select(0, adjacent[int(starts[low]) : int(starts[high])])
            near = torch.bincount(row.add_(there), minlength=(high - low) * parts).view(-1, parts)
            nodes = slice(first + low, first + high)
            weights = self._weights(nodes)
            self._loads.index_add_(1, self.part[nodes], -weights)
            self.part[nodes] = self._choose(near.double(), weights).int()

    def _weights(self, nodes: slice) -> Tensor:
        """Returns what nodes add to the loads, ``[2 or 3, n]``."""
        return self._counts(nodes) * self._shares

    def _choose(self, near: Tensor, weights: Tensor) -> Tensor:
        """Returns the part of each node of a batch, and adds the nodes to the loads."""
        price = weights.t() @ (self._price * self._loads.clamp(min=0) ** (_GAMMA - 1))
        gain = near - price
        chosen = torch.full((len(near),), -1)
        left = torch.arange(len(near))
        for _ in range(near.size(1)):
            best, wanted = gain[left].max(1)
            order = best.sort(descending=True, stable=True).indices
            order = order[wanted[order].sort(stable=True).indices]
            left, wanted = left[order], wanted[order]
            fits = self._fitting(wanted, weights[:, left])
            chosen[left[fits]] = wanted[fits]
            self._loads.index_add_(1, wanted[fits], weights[:, left[fits]])
            gain[left[~fits], wanted[~fits]] = -torch.inf
            left = left[~fits]
            if not left.numel():
                return chosen
        for some in left.split(near.size(1)):  # No part has room: the limit can't be kept.
            parts = self._loads.max(0).values.argsort()[: some.numel()]
            chosen[some] = parts
            self._loads.index_add_(1, parts, weights[:, some])
        return chosen

    def _fitting(self, wanted: Tensor, weights: Tensor) -> Tensor:
        """Says which nodes, sorted by the part they want, still fit into it."""
        total = weights.cumsum(1)
        counts = torch.bincount(wanted, minlength=self._loads.size(1))
        firsts = offsets_of(counts)[:-1]
        before = torch.cat([torch.zeros_like(total[:, :1]), total], 1)[:, firsts]
        within = total - before[:, wanted]
        return (self._loads[:, wanted] + within <= self._most).all(0)
