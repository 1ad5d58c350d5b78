"""Edges bucketed by the unit that their source comes in, sorted by target: once per structure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.halo import HaloPlan
from pyg_sar.index_space import DistEdgeIndex


def _narrow(index: Tensor, bound: int) -> Tensor:
    """32-bit indices where they fit: structures are kept, features come and go."""
    return index.int() if bound < 2**31 else index


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of a shard's edges whose messages are materialized together.

    Attributes:
        unit: What it is a piece of: the shard of that unit, or a chunk's number.
        edges: The run in shard order.
        targets: Local ids of the targets that occur, ascending, ``[U]``.
        index: Position of each edge's target in ``targets``, ``[E_tile]``, ascending.
        source: Row of each edge's source in the unit's buffer, ``[E_tile]``.
        columns: Column of each edge in ``edge_index``, ``[E_tile]``; a slice when sorted already.
    """

    unit: int
    edges: slice
    targets: Tensor
    index: Tensor
    source: Tensor
    columns: Tensor | slice

    @property
    def num_edges(self) -> int:
        """Edges of the tile."""
        return self.edges.stop - self.edges.start

    @property
    def target_rows(self) -> Tensor:
        """Local id of each edge's target, ``[E_tile]``."""
        return self.targets.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class Segments:
    """A shard's edges as :func:`pyg_sar.ops.gather_sum_` takes them, sorted by what they add to.

    Attributes:
        source: The row that each edge reads, ``[E]``.
        position: Each edge's place in ``targets``, ``[E]``, ascending.
        targets: The row that is added to, ``[U]``.
    """

    source: Tensor
    position: Tensor
    targets: Tensor


def empty_tile(device: torch.device) -> Tile:
    """A tile without edges."""
    nothing = torch.empty(0, dtype=torch.long, device=device)
    return Tile(0, slice(0, 0), nothing, nothing, nothing, nothing)


class Shards:
    r"""The edges of one worker as shards.

    Shard 0 holds those from its own nodes, shard u those from the owners of unit u
    (:meth:`HaloPlan.units`).

    Within a shard edges are sorted by target, so that tiles of it touch few targets.

    Args:
        edge_index: Distributed edges ``[2, E]`` with local targets.

    Attributes:
        in_degree: Edges into each target node, ``[num_targets]``.
    """

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        plan = edge_index.plan
        for ledger in plan.comm.ledgers:
            ledger.count("bucketing")
        self.plan: HaloPlan = plan
        source, target = edge_index.ends()
        self.num_edges = source.numel()
        num_targets = edge_index.num_targets
        self.in_degree = torch.bincount(target, minlength=num_targets)
        number = len(plan.units())
        source, unit = self._place(source)
        counts = torch.bincount(unit, minlength=number)
        self._offsets: list[int] = [0, *counts.cumsum(0).tolist()]
        wide = num_targets * number >= 2**31
        key = (unit.long() if wide else unit).mul_(max(num_targets, 1)).add_(target)
        del unit
        order = None if bool((key[1:] >= key[:-1]).all()) else key.argsort(stable=True)
        if order is not None:
            source, target, key = source[order], target[order], key[order]
        self._columns = None if order is None else _narrow(order, self.num_edges)
        del order
        self._source = source
        del source
        first = torch.ones_like(key, dtype=torch.bool)
        torch.ne(key[1:], key[:-1], out=first[1:])
        del key
        self._targets = target[first]
        self._position = first.cumsum(0, dtype=torch.int32 if self.num_edges < 2**31 else None)
        self._position -= 1
        self._transposed: dict[int, Segments] = {}

    def _place(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Each source's row in the buffer of its unit, and the unit (32 bits)."""
        plan = self.plan
        ends = torch.tensor(plan.halo_offsets, device=source.device) + plan.num_local
        owner = torch.bucketize(source, ends[1:], right=True, out_int32=True)
        owner[source < plan.num_local] = plan.rank
        units, places = (torch.tensor(t, device=source.device) for t in plan.places())
        moves = ends[:-1] - places
        moves[plan.rank] = 0
        rows = _narrow(source, plan.num_ids) - _narrow(moves, plan.num_ids)[owner]
        return rows, units.int()[owner]

    def edges(self, unit: int) -> slice:
        """The shard's edges in shard order."""
        return slice(self._offsets[unit], self._offsets[unit + 1])

    def tiles(self, unit: int, max_edges: int) -> list[slice]:
        """Cuts a shard into runs of at most ``max_edges`` edges."""
        shard = self.edges(unit)
        return [
            slice(start, min(start + max_edges, shard.stop))
            for start in range(shard.start, shard.stop, max(max_edges, 1))
        ]

    def tile(self, unit: int, edges: slice) -> Tile:
        """The index tensors of a run of edges (64-bit, made for its turn)."""
        position = self._position[edges].long()
        if position.numel():
            first, last = int(position[0]), int(position[-1])
            targets, index = self._targets[first : last + 1], position - first
        else:
            targets, index = self._targets[:0], position
        columns = edges if self._columns is None else self._columns[edges].long()
        return Tile(unit, edges, targets, index, self._source[edges].long(), columns)

    def segments(self, unit: int) -> Segments:
        """The shard by target: local ids add up rows of the unit's buffer."""
        edges = self.edges(unit)
        return Segments(self._source[edges], self._position[edges], self._targets)

    def transposed(self, unit: int) -> Segments:
        """The shard by source: rows of the unit's buffer add up local ids. Made on first use."""
        if unit not in self._transposed:
            edges = self.edges(unit)
            order = self._source[edges].argsort(stable=True)
            source = self._source[edges][order]
            target = self._targets[self._position[edges][order]]
            del order
            targets, position = torch.unique_consecutive(source, return_inverse=True)
            self._transposed[unit] = Segments(
                _narrow(target, self.in_degree.numel()),
                _narrow(position, self.num_edges),
                targets.long(),
            )
        return self._transposed[unit]


def shards_of(edge_index: DistEdgeIndex) -> Shards:
    """The shards of ``edge_index``, made on first use and kept with it."""
    shards: Shards = edge_index.remember("shards", lambda: Shards(edge_index))
    return shards
