"""Which way through the edges: by shards (partial states merge) or by chunks (they don't)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from pyg_sar.engine.chunk import ChunkReturn, Chunks, ChunkStream
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import UnitRows, Use
from pyg_sar.exchange.streams import GradientReturn, ShardStream
from pyg_sar.exchange.wire import Wire
from pyg_sar.ledger import Label
from pyg_sar.space.shard import Segments, Shards, Tile


class Returns(Protocol):
    """Takes gradients of source rows back to their owners."""

    def start(self, unit: int) -> list[Tensor]:
        """Gradient rows of a unit's sources, to add to."""

    def send(self, unit: int) -> None:
        """Sends them; once per unit, in order."""

    def drain(self) -> None:
        """Waits for what is in flight."""


class Rounds(ABC):
    """An order of units (shards or chunks), each a few tiles over one buffer of source rows.

    Attributes:
        plan: The halo plan.
        in_degree: Edges into each target node, ``[num_targets]``.
    """

    plan: HaloPlan
    in_degree: Tensor

    @abstractmethod
    def units(self) -> list[int]:
        """The units, in order."""

    def units_back(self, prefetch: int) -> list[int]:
        """The units in the order in which gradients go back; of the policy's ``prefetch``."""
        return self.units()

    @abstractmethod
    def tiles(self, unit: int) -> Iterator[Tile]:
        """A unit's tiles, if it has any."""

    @abstractmethod
    def stream(
        self,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None = None,
        use: Use = Use.KEEPS,
    ) -> Iterable[tuple[int, UnitRows]]:
        """Fetches the units' source rows for a consumer that does ``use`` with them."""

    @abstractmethod
    def returns(
        self,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool,
        wire: Wire | None = None,
    ) -> Returns:
        """Returns gradients of source rows, while ``prefetch`` shards are fetched or none are."""


class ShardRounds(Rounds):
    """Shard by shard: the worker's own, then unit by unit (:meth:`HaloPlan.units`).

    Args:
        shards: The edges.
        max_edges: Edges per tile.
        cheaper: Gives a better way for sums, if there is one: of ``self`` and the
            arguments of :meth:`for_sums`. All workers call it together.
    """

    def __init__(
        self,
        shards: Shards,
        max_edges: int,
        cheaper: Callable[[ShardRounds, Tensor | None, bool, bool], ShardRounds | None]
        | None = None,
    ) -> None:
        self.plan, self.in_degree = shards.plan, shards.in_degree
        self.shards, self._max_edges = shards, max_edges
        self._cheaper = cheaper

    def for_sums(self, weight: Tensor | None, everywhere: bool, by_owners: bool) -> ShardRounds:
        """The way through the edges that sums of rows, times constant weights ``[E]``, take.

        Args:
            weight: The weights.
            everywhere: Whether fewer rows are worth it where all are read in place, too.
            by_owners: Whether owners may add up the gradients of their rows.
        """
        if self._cheaper is None:
            return self
        found = self._cheaper(self, weight, everywhere, by_owners)
        return self if found is None else found

    def sums_arrive(self, unit: int) -> bool:
        """Whether a unit's rows are sums over edges already, not source rows."""
        return False

    def units(self) -> list[int]:
        return list(range(len(self.plan.units())))

    def units_back(self, prefetch: int) -> list[int]:
        """The worker's own edges come while the last unit's gradients are on their way.

        Where none are left on their way, before these: gradients are added up in the same order.
        """
        own, *others = self.units()
        place = max(len(others) - (prefetch == 0), 0)
        return [*others[:place], own, *others[place:]]

    def tiles(self, unit: int) -> Iterator[Tile]:
        for edges in self.shards.tiles(unit, self._max_edges):
            yield self.shards.tile(unit, edges)

    def first_edge(self, unit: int) -> Tile | None:
        """A tile of a single edge, if the unit has one."""
        start, stop = (edges := self.shards.edges(unit)).start, edges.stop
        return self.shards.tile(unit, slice(start, start + 1)) if stop > start else None

    def in_shard_order(self, unit: int, values: Tensor) -> Tensor:
        """A unit's part of edge-level values ``[E]``, in the order of its edges."""
        return values[self.columns(unit)]

    def columns(self, unit: int) -> Tensor | slice:
        """Column of ``edge_index`` of each of a unit's edges, in shard order."""
        return self.shards.columns(unit)

    def segments(self, unit: int, transposed: bool = False, numbered: bool = False) -> Segments:
        """All of a unit's edges for a kernel, or for its backward pass.

        Args:
            unit: The unit.
            transposed: By source.
            numbered: Whether edge-level data will be found by the edges' numbers.
        """
        shards = self.shards
        return shards.transposed(unit, numbered) if transposed else shards.segments(unit)

    def stream(
        self,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None = None,
        use: Use = Use.KEEPS,
    ) -> Iterable[tuple[int, UnitRows]]:
        return ShardStream(self.plan, tensors, label, prefetch, wire, use)

    def returns(
        self,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool,
        wire: Wire | None = None,
    ) -> Returns:
        return GradientReturn(self.plan, totals, layer, prefetch, refetches, wire)


class ChunkRounds(Rounds):
    """Chunk by chunk, each a single tile.

    Args:
        chunks: The chunks.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.plan, self.in_degree = chunks.plan, chunks.in_degree
        self._chunks = chunks

    def units(self) -> list[int]:
        return list(range(len(self._chunks.chunks)))

    def tiles(self, unit: int) -> Iterator[Tile]:
        tile = self._chunks.tile(unit)
        if tile.targets.numel():
            yield tile

    def stream(
        self,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None = None,
        use: Use = Use.KEEPS,
    ) -> Iterable[tuple[int, UnitRows]]:
        return ChunkStream(self._chunks, tensors, label, prefetch, wire)

    def returns(
        self,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool,
        wire: Wire | None = None,
    ) -> Returns:
        return ChunkReturn(self._chunks, totals, layer, wire)
