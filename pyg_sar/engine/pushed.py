r"""Sums with fewer rows on the wire: pull some source rows, push partial sums for some targets.

The edges from worker q to worker p are a sparse matrix :math:`A_{qp}`. Instead of one row for each
source, q sends the rows of :math:`B = P x`: some are rows of x (pulled), others sums over edges
into one target of p (pushed). The receiver adds :math:`R B`, with :math:`R P = A_{qp}`, and sends
:math:`R^T g` back, of which the owner adds :math:`P^T R^T g`: the adjoint. Which rows, a minimum
vertex cover says (:mod:`pyg_sar.exchange.cover`): one row per covering node is the least that this
way of splitting a sum can do.

[Note: boundary] B holds, once for all peers, the rows that anybody pulls, and the partial sums for
each peer. To the streams it is a node tensor like any other, with a halo plan of its own. It is not
made as a whole: each peer's rows are made when its message is packed, or in the memory that
local peers read, and what comes back is added to the gradients of x at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyg_sar.engine.cuts import Cut, Cuts, rows_travel
from pyg_sar.engine.owner_gradients import OfWeights, OwnerRounds, RemoteWeights
from pyg_sar.engine.pushed_edges import PushedEdges, pushed_edges
from pyg_sar.engine.rounds import Returns, ShardRounds
from pyg_sar.exchange.cover import ALL_PUSHED, SUMS
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import UnitRows, Use, add_rows, flat_rows
from pyg_sar.exchange.shared_rows import SharedRows
from pyg_sar.exchange.streams import GradientReturn, ShardStream
from pyg_sar.exchange.wire import Wire
from pyg_sar.kernels.ops import gather_sum_, why_missing
from pyg_sar.ledger import Label
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import EdgeRun, Segments, Tile, narrowed, segments_of

_PLAN: Label = ("", "", "plan")


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the edges of P, ``sent`` by peer, and of R, ``received`` by unit."""

    sent: list[Tensor]
    received: list[Tensor]


class Boundary:
    """A factorization of the edges between workers. See [Note: boundary].

    Made by all workers together.

    Attributes:
        plan: The halo plan of B.
        shared: Own rows that anybody pulls: the first rows of B.
        partial: The edges that are pushed to each peer, from own rows to its targets.
        places: Where the partial sums for each peer are in B.
        is_worth_it: Whether it saves enough; the same on all workers.

    Args:
        edge_index: Distributed edges.
    """

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        halo = self._halo = edge_index.plan
        self.num_targets = edge_index.num_targets
        self._known = OfWeights[Weights]()
        cuts = Cuts(edge_index, SUMS, numbered=True)
        self.is_worth_it = cuts.is_worth_it
        self._columns = [(cut.pulled, cut.pushed, cut.slots.numel()) for cut in cuts.mine]
        self._make_sent(halo, cuts)
        self._make_received(halo, cuts.mine)

    def weights(self, weight: Tensor) -> Weights:
        """The weights of the edges of P and R. All workers call this together.

        Args:
            weight: Constant weights of the edges ``[E]``.
        """
        return self._known.of(self._halo.comm, weight, self._send_weights)

    def _send_weights(self, weight: Tensor) -> Weights:
        comm, ones = self._halo.comm, weight.new_ones
        arriving = [weight.new_empty(run.numbers.numel()) for run in self.partial]
        for owner, peer in self._halo.rounds():
            message = weight[self._columns[owner][1]]
            comm.exchange(message, owner, arriving[peer], peer, label=_PLAN).wait()
        sent = [found[run.numbers] for found, run in zip(arriving, self.partial, strict=True)]
        received = []
        for owners in self._order:
            cuts = [self._columns[owner] for owner in owners]
            parts = [p for pulled, _, slots in cuts for p in (weight[pulled], ones(slots))]
            received.append(torch.cat(parts) if parts else weight[:0])
        return Weights(sent, received)

    # B, P and R #############################################################

    def _make_sent(self, halo: HaloPlan, cuts: Cuts) -> None:
        """B's rows, P, and the halo plan."""
        self.shared = torch.unique(torch.cat([request.rows for request in cuts.requests]))
        start = self.shared.numel()
        sends, self.partial, self.places = [], [], []
        for request, slots in zip(cuts.requests, cuts.slots[:, halo.rank].tolist(), strict=True):
            order = torch.arange(request.source.numel(), device=self.shared.device)
            order = narrowed(order, order.numel())
            ends = request.source, request.place
            self.partial.append(EdgeRun(*ends, order, halo.num_local, slots))
            self.places.append(slice(start, start + slots))
            partial = torch.arange(start, start + slots, device=self.shared.device)
            sends.append(torch.cat([torch.searchsorted(self.shared, request.rows), partial]))
            start += slots
        self.plan = HaloPlan(
            halo.comm,
            start,
            (cuts.rows + cuts.slots)[halo.rank].tolist(),
            torch.cat(sends),
            [part.numel() for part in sends],
        )

    def pulled_by(self, peer: int) -> Tensor:
        """Own rows that a peer pulls: the first that it is sent."""
        sent = self.plan.send_rows(peer)
        return self.shared[sent[: sent.numel() - self.slots_of(peer)]]

    def slots_of(self, peer: int) -> int:
        """Targets of a peer that partial sums are pushed to."""
        return self.places[peer].stop - self.places[peer].start

    def _make_received(self, halo: HaloPlan, cuts: Sequence[Cut]) -> None:
        """R and its transpose, unit by unit."""
        units, places = self.plan.places()
        self._order: list[list[int]] = [[] for _ in self.plan.units()]
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.plan.units()]
        for owner, cut in enumerate(cuts):
            if owner == halo.rank or cut.rows.numel() + cut.slots.numel() == 0:
                continue
            row = torch.searchsorted(cut.rows, cut.source[0])
            slot = torch.arange(cut.slots.numel(), device=row.device) + cut.rows.numel()
            place = torch.cat([row, slot]) + places[owner]
            self._order[units[owner]].append(owner)
            parts[units[owner]].append((place, torch.cat([cut.target[0], cut.slots])))
        self.received: list[Segments] = []
        self.received_back: list[Segments] = []
        nothing = cuts[halo.rank].rows
        for unit, found in zip(self.plan.units(), parts, strict=True):
            rows = torch.cat([nothing, *(place for place, _ in found)])
            into = torch.cat([nothing, *(ids for _, ids in found)])
            self.received.append(segments_of(rows, into, unit.num_rows, self.num_targets))
            self.received_back.append(segments_of(into, rows, self.num_targets, unit.num_rows))


class BoundaryRounds(ShardRounds):
    """The way through the edges where what comes from other workers are rows of B.

    Args:
        rounds: The way where source rows come.
        boundary: The factorization of the edges between workers.
        weight: Constant weights of the edges ``[E]``.
    """

    def __init__(self, rounds: ShardRounds, boundary: Boundary, weight: Tensor | None) -> None:
        super().__init__(rounds.shards, 1)
        self._boundary = boundary
        self._weights = None if weight is None else boundary.weights(weight)

    def units(self) -> list[int]:
        return list(range(len(self._boundary.plan.units())))

    def tiles(self, unit: int) -> Iterator[Tile]:
        return super().tiles(unit) if unit == 0 else iter(())

    def sums_arrive(self, unit: int) -> bool:
        return unit > 0

    def segments(self, unit: int, transposed: bool = False, numbered: bool = False) -> Segments:
        if unit == 0:
            return super().segments(unit, transposed, numbered)
        found = self._boundary
        return (found.received_back if transposed else found.received)[unit]

    def in_shard_order(self, unit: int, values: Tensor) -> Tensor:
        if unit == 0 or self._weights is None:
            return super().in_shard_order(unit, values)
        return self._weights.received[unit]

    def stream(
        self,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None = None,
        use: Use = Use.KEEPS,
    ) -> Iterable[tuple[int, UnitRows]]:
        sums = self._boundary, self._weights
        return _BoundaryStream(sums, tensors, label, prefetch, wire, use)

    def returns(
        self,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool,
        wire: Wire | None = None,
    ) -> Returns:
        sums = self._boundary, self._weights
        return _BoundaryReturn(sums, totals, layer, prefetch, refetches, wire)


_Sums = tuple[Boundary, Weights | None]


class _BoundaryStream(ShardStream):
    """Own rows as they are, then rows of the peers' B. See [Note: boundary].

    Args:
        sums: The factorization, and its weights.
        tensors: Source tensors ``[num_local, *]``, detached.
        label: Whom the ledger charges.
        prefetch: Units fetched ahead.
        wire: How rows travel.
        use: As :class:`ShardStream`.
    """

    def __init__(
        self,
        sums: _Sums,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None,
        use: Use,
    ) -> None:
        super().__init__(sums[0].plan, tensors, label, prefetch, wire, use)
        self._sums = sums

    @torch.no_grad()
    def _fill(self, shared: SharedRows, dtype: torch.dtype, out: Tensor) -> None:
        boundary = self._sums[0]
        if shared.rows is None:
            self._write(dtype, out, boundary.shared, boundary.places)
            return
        whole = out.new_empty(boundary.plan.num_local, out.size(1))
        self._write(dtype, whole, boundary.shared, boundary.places)
        torch.index_select(whole, 0, shared.rows, out=out)

    def _packer(self, peer: int, dtype: torch.dtype) -> Callable[[], Tensor] | None:
        count = self.plan.send_counts[peer]
        return partial(self._pack, peer, dtype) if count else None

    @torch.no_grad()
    def _pack(self, peer: int, dtype: torch.dtype) -> Tensor:
        boundary, width = self._sums[0], dict(self.layout.widths())[dtype]
        pulled, count = boundary.pulled_by(peer), self.plan.send_counts[peer]
        out = torch.empty(count, width, dtype=dtype, device=pulled.device)
        places = [slice(0, 0)] * self.plan.world_size
        places[peer] = slice(pulled.numel(), count)
        self._write(dtype, out, pulled, places)
        return self.layout.wire.encode(out)

    def _write(
        self, dtype: torch.dtype, out: Tensor, pulled: Tensor, places: Sequence[slice]
    ) -> None:
        """Writes pulled rows, then at each peer's place the partial sums for it."""
        for k, start, stop in self.layout.groups[dtype]:
            flat, columns = flat_rows(self.tensors[k]), out[:, start:stop]
            columns[: pulled.numel()] = flat[pulled]
            columns[pulled.numel() :] = 0
            for peer, place in enumerate(places):
                weight = _weight_of(self._sums, peer, flat)
                _add(columns[place], flat, self._sums[0].partial[peer].segments, weight)


class _BoundaryReturn(GradientReturn):
    """Gradients of B's rows, added to those of the rows that B is made of. See [Note: boundary].

    Args:
        sums: The factorization, and its weights.
        totals: Gradients of the worker's own rows, ``[num_local, *]``, added to in place.
        layer: Whom the ledger charges.
        prefetch: Units fetched ahead.
        refetches: Whether rows are fetched meanwhile.
        wire: How rows travel.
    """

    in_pieces = False  # a partial sum's gradient goes to many rows

    def __init__(
        self,
        sums: _Sums,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool,
        wire: Wire | None,
    ) -> None:
        super().__init__(sums[0].plan, totals, layer, prefetch, refetches, wire)
        self._sums = sums

    @torch.no_grad()
    def _take(self, peer: int, place: slice, rows: Sequence[Tensor]) -> None:
        boundary = self._sums[0]
        pulled, run = boundary.pulled_by(peer), boundary.partial[peer]
        for total, part in zip(self.totals, rows, strict=True):
            add_rows(total, pulled, part[: pulled.numel()])
            flat = total.view(total.size(0), total.shape[1:].numel())
            weight = _weight_of(self._sums, peer, total)
            back = run.transposed(weight is not None)
            _add(flat, flat_rows(part[pulled.numel() :]), back, weight)


def _weight_of(sums: _Sums, peer: int, rows: Tensor) -> Tensor | None:
    """Weights of the edges that are pushed to a peer, in what kernels add up in."""
    if sums[1] is None:
        return None
    return sums[1].sent[peer].to(torch.float64 if rows.dtype == torch.float64 else torch.float32)


def _add(out: Tensor, rows: Tensor, segments: Segments, weight: Tensor | None) -> None:
    """Adds gathered rows to their targets, ``[N, F]`` both."""
    if out.numel() and segments.source.numel():
        source, offsets, targets = segments.source, segments.offsets, segments.targets
        gather_sum_(out, rows, source, offsets, targets, weight, segments.edges)


def cheaper_rounds(
    edge_index: DistEdgeIndex,
    rounds: ShardRounds,
    weight: Tensor | None,
    everywhere: bool,
    by_owners: bool,
) -> ShardRounds | None:
    """A better way through the edges, or ``None`` where there is none that saves enough.

    By a cover, where rows travel; where all are read in place, by :class:`OwnerRounds`. All workers
    call this together; what it takes is made once per structure and kept with it.

    Args:
        edge_index: Distributed edges.
        rounds: The way where source rows come, and their gradients go.
        weight: Constant weights of the edges ``[E]``.
        everywhere: By a cover also where all workers read each other's memory.
        by_owners: Whether owners may add up the gradients of their rows.
    """
    comm = edge_index.plan.comm
    if comm.world_size == 1:
        return None

    def make_boundary() -> tuple[bool, Boundary | None]:
        ready = torch.tensor(int(why_missing() is None), device=edge_index.device)
        can = bool(int(comm.all_reduce(ready, "min", label=_PLAN)))
        if not can or not (everywhere or rows_travel(comm)):
            return can, None
        found = Boundary(edge_index)
        return False, found if found.is_worth_it else None

    def make() -> tuple[Boundary | None, PushedEdges | None, RemoteWeights | None]:
        key = "boundary", everywhere
        near, boundary = edge_index.remember_together(key, make_boundary)
        if boundary is not None or not near or not by_owners:
            return boundary, None, None
        # The same as those of additive attention.
        sorting = {"numbered": numbered, "by_source": True}
        edges = pushed_edges(edge_index, ALL_PUSHED, ALL_PUSHED, **sorting)
        return None, edges, RemoteWeights(edges) if numbered and edges is not None else None

    numbered = weight is not None
    key = "sums", everywhere, by_owners, numbered
    boundary, edges, weights = edge_index.remember_together(key, make)
    if boundary is not None:
        return BoundaryRounds(rounds, boundary, weight)
    if edges is None:
        return None
    known = None if weight is None else weights.of(edge_index, weight)
    return OwnerRounds(rounds, edges, known)
