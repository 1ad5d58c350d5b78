r"""Assignment by a stream of nodes, for graphs whose adjacency does not fit into memory.

Fennel: node :math:`v` goes to the part that most of its neighbours are in, less a price of the
part's load,

.. math::
    \arg\max_i \; |N(v) \cap V_i|
    - \gamma \frac{m}{N} \sum_c \frac{w_{vc}}{2 \bar w_c} \ell_{ci}^{\gamma - 1},

with :math:`\gamma = 3/2`, :math:`m` edges, and what is balanced, :math:`c`: nodes
(:math:`w_v = 1`) and in-edges (the in-degree). A part's load :math:`\ell_{ci}` is its sum of
:math:`w_c` over the parts' average, :math:`\bar w_c` the nodes' average. Nodes come in batches,
which decide at once; after the first pass each node decides again (restreaming), knowing where all
others are. No part exceeds :data:`LIMIT` of nodes or of in-edges where that can be kept.

Source: Tsourakakis et al., "FENNEL: Streaming Graph Partitioning for Massive Scale Graphs", WSDM
2014; Nishimura and Ugander, "Restreaming Graph Partitioning", KDD 2013.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pyg_sar.partition.balance import LIMIT
from pyg_sar.partition.scratch import GroupedRows, Scratch, group_by_part, offsets_of

PASSES = 8
_GAMMA = 1.5
_BATCHES = 16  # of nodes, for each part, at least
_LARGEST = 8192  # nodes of a batch
_ENTRIES = 2**22  # [nodes, parts] at a time

Edges = Sequence[tuple[Tensor, int, int]]
"""``edge_index`` of each relation, and what is added to its sources and targets."""


def stream_assignment(edges: Edges, num_nodes: int, num_parts: int, scratch: Scratch) -> Tensor:
    """Assigns nodes to parts by restreamed Fennel.

    Args:
        edges: The edges, read in pieces.
        num_nodes: Nodes N, more than ``num_parts``.
        num_parts: Parts P.
        scratch: Where the adjacency goes.

    Returns:
        The part of each node, int64, ``[N]``; the same for the same arguments.
    """
    wanted = min(_LARGEST, max(num_nodes // (num_parts * _BATCHES), 1))
    batch = max(min(wanted, _ENTRIES // num_parts), 1)
    blocks = _Blocks(edges, num_nodes, batch, scratch)
    state = _State(blocks, num_parts, batch)
    best, fewest = state.part, -1
    for number in range(PASSES):
        cut = 0
        for first, starts, adjacent in blocks.read(f"streaming, pass {number + 1} of {PASSES}"):
            cut += state.stream(first, starts, adjacent, number > 0)
        if number and (fewest < 0 or cut < fewest):
            best, fewest = state.part.clone(), cut
    return best.long()


class _Blocks:
    """The adjacency in runs of consecutive batches, each of which fits into memory, in files."""

    def __init__(self, edges: Edges, num_nodes: int, batch: int, scratch: Scratch) -> None:
        self.num_nodes, self._scratch, self._edges = num_nodes, scratch, edges
        self.indegree = torch.zeros(num_nodes, dtype=torch.long)
        degree = torch.zeros(num_nodes, dtype=torch.long)
        for source, target in self._pieces("degrees"):
            self.indegree += torch.bincount(target, minlength=num_nodes)
            degree += torch.bincount(source, minlength=num_nodes)
        self._starts = offsets_of(degree + self.indegree)
        self.num_edges = int(self.indegree.sum())
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


class _State:
    """Where nodes are, and the parts' loads: nodes and in-edges over their averages."""

    def __init__(self, blocks: _Blocks, num_parts: int, batch: int) -> None:
        count = blocks.num_nodes
        self.part = torch.full((count,), -1, dtype=torch.int32)  # Reads are at random.
        self._indegree = blocks.indegree
        self._shares = num_parts / count, num_parts / max(blocks.num_edges, 1)
        self._loads = torch.zeros(2, num_parts, dtype=torch.double)
        # By the shares of a part's average that the weights are; half of it for each load.
        self._price = _GAMMA * blocks.num_edges / num_parts / 2
        self._batch = batch

    def stream(self, first: int, starts: Tensor, adjacent: Tensor, again: bool) -> int:
        """Lets a run of nodes decide; returns how many of their edge ends are then cut.

        ``again``: they have parts already, as all nodes have.
        """
        cut, parts = 0, self._loads.size(1)
        for low in range(0, starts.numel() - 1, self._batch):
            high = min(low + self._batch, starts.numel() - 1)
            counts = starts[low : high + 1].diff()
            row = torch.repeat_interleave(torch.arange(0, (high - low) * parts, parts), counts)
            there = self.part.index_select(0, adjacent[int(starts[low]) : int(starts[high])])
            if not again:
                known = there >= 0
                row, there = row[known], there[known]
            near = torch.bincount(row.add_(there), minlength=(high - low) * parts).view(-1, parts)
            nodes = slice(first + low, first + high)
            weights = self._weights(nodes)
            if again:
                self._loads.index_add_(1, self.part[nodes], -weights)
            chosen = self._choose(near.double(), weights)
            self.part[nodes] = chosen
            cut += int(counts.sum() - near.gather(1, chosen[:, None]).sum())
        return cut

    def _weights(self, nodes: slice) -> Tensor:
        """Returns what nodes add to the loads, ``[2, n]``."""
        one, edges = self._shares
        indegree = self._indegree[nodes].double()
        return torch.stack([torch.full_like(indegree, one), indegree * edges])

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
        before = torch.cat([total.new_zeros(2, 1), total], 1)[:, firsts]
        within = total - before[:, wanted]
        return (self._loads[:, wanted] + within <= LIMIT).all(0)
