r"""Sums with fewer rows on the wire: pull some source rows, push partial sums for some targets.

The edges from worker q to worker p are a sparse matrix :math:`A_{qp}`. Instead of one row for each
source, q sends the rows of :math:`B = P x`: some are rows of x (pulled), others sums over edges
into one target of p (pushed). The receiver adds :math:`R B`, with :math:`R P = A_{qp}`, and sends
:math:`R^T g` back, of which the owner adds :math:`P^T R^T g`: the adjoint. Which rows, a minimum
vertex cover says (:mod:`pyg_sar.cover`): one row per covering node is the least that this way of
splitting a sum can do.

[Note: boundary] B holds, once for all peers, the rows that anybody pulls, and the partial sums for
each peer. To the streams it is a node tensor like any other, with a halo plan of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.cover import minimum_cover
from pyg_sar.exchange import flat_rows
from pyg_sar.halo import HaloPlan
from pyg_sar.index_space import DistEdgeIndex, version_of
from pyg_sar.ledger import Label
from pyg_sar.ops import gather_sum_, why_missing
from pyg_sar.rounds import Returns, ShardRounds
from pyg_sar.shard import Segments, Tile, segments_of
from pyg_sar.streams import GradientReturn, ShardStream
from pyg_sar.wire import Wire

_PLAN: Label = ("", "", "plan")
_AGREEMENT: Label = ("", "", "agreement")
_MEMORY = 8  # weights
_WORTH = 0.95  # of the pulled rows: a cover that saves less is not worth a second sum


@dataclass(frozen=True, slots=True)
class _Cut:
    """The edges from one owner, as this worker covers them.

    ``rows`` are the halo rows that are pulled, ``slots`` the targets that are pushed to; edges are
    numbered by their column.
    """

    rows: Tensor
    slots: Tensor
    pulled: Tensor
    pushed: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the edges of P, ``sent``, and of R, ``received`` unit by unit."""

    sent: Tensor
    received: list[Tensor]


class Boundary:
    """A factorization of the edges between workers. See [Note: boundary].

    Made by all workers together.

    Attributes:
        plan: The halo plan of B.
        rows: Rows that travel to this worker, and those that pulling alone would take.

    Args:
        edge_index: Distributed edges.
    """

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        halo = self._halo = edge_index.plan
        source, target = edge_index.ends()
        self.num_targets = edge_index.num_targets
        self._known: OrderedDict[tuple[int, int], tuple[Tensor, Weights]] = OrderedDict()
        self._cuts = cuts = [self._cut(halo, q, source, target) for q in range(halo.world_size)]
        sizes = [[c.rows.numel(), c.slots.numel(), c.pushed.numel()] for c in cuts]
        device = source.device
        everyone = halo.comm.all_gather(torch.tensor(sizes, device=device), label=_PLAN)
        coming = torch.stack(everyone)[:, halo.rank].tolist()
        requests = self._exchange(halo, cuts, source, target, coming)
        self._make_sent(halo, requests, [c.rows.numel() + c.slots.numel() for c in cuts])
        self._make_received(halo, cuts, source, target)
        self.rows = sum(c.rows.numel() + c.slots.numel() for c in cuts), halo.num_halo

    def weights(self, weight: Tensor) -> Weights:
        """The weights of the edges of P and R. All workers call this together.

        Args:
            weight: Constant weights of the edges ``[E]``.
        """
        key = id(weight), version_of(weight)
        known = torch.tensor(int(key in self._known), device=weight.device)
        if not int(self._halo.comm.all_reduce(known, "min", label=_AGREEMENT)):
            self._known[key] = weight, self._send_weights(weight.detach().reshape(-1))
            while len(self._known) > _MEMORY:
                self._known.popitem(last=False)
        return self._known[key][1]

    def _send_weights(self, weight: Tensor) -> Weights:
        comm, ones = self._halo.comm, weight.new_ones
        sent: list[Tensor] = [ones(self._shared)]
        arriving = [weight.new_empty(rows.numel()) for rows in self._partial]
        for owner, peer in self._halo.rounds():
            message = weight[self._cuts[owner].pushed]
            comm.exchange(message, owner, arriving[peer], peer, label=_PLAN).wait()
        received = []
        for owners in self._order:
            cuts = [self._cuts[owner] for owner in owners]
            parts = [p for c in cuts for p in (weight[c.pulled], ones(c.slots.numel()))]
            received.append(torch.cat(parts) if parts else weight[:0])
        return Weights(torch.cat(sent + arriving), received)

    # The cut #################################################################

    def _cut(self, halo: HaloPlan, owner: int, source: Tensor, target: Tensor) -> _Cut:
        """Covers the edges from one owner."""
        part = halo.halo_slice(owner)
        first = halo.num_local + part.start
        columns = ((source >= first) & (source < halo.num_local + part.stop)).nonzero().view(-1)
        place = source[columns] - first
        targets, number = torch.unique(target[columns], return_inverse=True)
        cover = minimum_cover(place, number, part.stop - part.start, targets.numel())
        pulls = cover.pulled.to(place.device)[place]
        used = torch.zeros(part.stop - part.start, dtype=torch.bool, device=place.device)
        used[place[pulls]] = True
        pushed = columns[~pulls]
        slots = torch.unique(target[pushed])
        return _Cut(used.nonzero().view(-1), slots, columns[pulls], pushed)

    def _exchange(
        self,
        halo: HaloPlan,
        cuts: Sequence[_Cut],
        source: Tensor,
        target: Tensor,
        coming: Sequence[Sequence[int]],
    ) -> list[tuple[Tensor, Tensor]]:
        """Tells owners what to send; returns, per peer, boundary edges as (own row, place)."""
        found: list[tuple[Tensor, Tensor]] = []
        arriving: dict[int, Tensor] = {}
        for owner, peer in halo.rounds():
            cut = cuts[owner]
            first = halo.num_local + halo.halo_offsets[owner]
            place = torch.searchsorted(cut.slots, target[cut.pushed])
            message = torch.cat([cut.rows, source[cut.pushed] - first, place])
            rows, _, edges = coming[peer]
            arriving[peer] = message.new_empty(rows + 2 * edges)
            halo.comm.exchange(message, owner, arriving[peer], peer, label=_PLAN).wait()
        for peer in range(halo.world_size):
            if peer == halo.rank:
                nothing = torch.empty(0, dtype=torch.long, device=source.device)
                found.append((nothing, nothing))
                continue
            rows, _, edges = coming[peer]
            pulled, pushed, place = arriving[peer].split([rows, edges, edges])
            own = halo.send_rows(peer)[torch.cat([pulled, pushed])]
            at = torch.cat([torch.arange(rows, device=place.device), place + rows])
            found.append((own, at))
        self._pulled = [coming[peer][0] for peer in range(halo.world_size)]
        self._slots = [coming[peer][1] for peer in range(halo.world_size)]
        return found

    def _make_sent(
        self, halo: HaloPlan, requests: Sequence[tuple[Tensor, Tensor]], counts: Sequence[int]
    ) -> None:
        """B's rows, P, and the halo plan."""
        pulled = [own[:n] for (own, _), n in zip(requests, self._pulled, strict=True)]
        shared = torch.unique(torch.cat(pulled))
        start, sends = shared.numel(), []
        self._shared, self._partial = (
            start,
            [rows[n:] for (rows, _), n in zip(requests, self._pulled, strict=True)],
        )
        own, at = [shared], [torch.arange(start, device=shared.device)]
        for (rows, place), wanted, slots in zip(requests, self._pulled, self._slots, strict=True):
            partial = torch.arange(slots, device=shared.device) + start
            sends.append(torch.cat([torch.searchsorted(shared, rows[:wanted]), partial]))
            own.append(rows[wanted:])
            at.append(place[wanted:] - wanted + start)
            start += slots
        self.num_rows = start
        counts = list(counts)
        self.plan = HaloPlan(
            halo.comm,
            start,
            counts,
            torch.cat(sends),
            [part.numel() for part in sends],
            halo.timetable,
        )
        x_rows, b_rows = torch.cat(own), torch.cat(at)
        self.sent = segments_of(x_rows, b_rows, halo.num_local, start)
        self.sent_back = segments_of(b_rows, x_rows, start, halo.num_local)

    def _make_received(
        self, halo: HaloPlan, cuts: Sequence[_Cut], source: Tensor, target: Tensor
    ) -> None:
        """R and its transpose, unit by unit."""
        units, places = self.plan.places()
        self._order: list[list[int]] = [[] for _ in self.plan.units()]
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.plan.units()]
        for owner, cut in enumerate(cuts):
            if owner == halo.rank or cut.rows.numel() + cut.slots.numel() == 0:
                continue
            first = halo.num_local + halo.halo_offsets[owner]
            row = torch.searchsorted(cut.rows, source[cut.pulled] - first)
            slot = torch.arange(cut.slots.numel(), device=row.device) + cut.rows.numel()
            place = torch.cat([row, slot]) + places[owner]
            self._order[units[owner]].append(owner)
            parts[units[owner]].append((place, torch.cat([target[cut.pulled], cut.slots])))
        self.received: list[Segments] = []
        self.received_back: list[Segments] = []
        nothing = source[:0]
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
        self, tensors: Sequence[Tensor], label: Label, prefetch: int, wire: Wire | None = None
    ) -> Iterable[tuple[int, list[Tensor]]]:
        rows = [self._boundary_rows(tensor) for tensor in tensors]
        stream = iter(ShardStream(self._boundary.plan, rows, label, prefetch, wire))
        del rows
        return self._own_first(stream, list(tensors))

    @staticmethod
    def _own_first(
        stream: Iterator[tuple[int, list[Tensor]]], tensors: list[Tensor]
    ) -> Iterator[tuple[int, list[Tensor]]]:
        for unit, rows in stream:
            handed = [rows if unit else tensors]
            del rows
            yield unit, handed.pop()

    def _boundary_rows(self, tensor: Tensor) -> Tensor:
        """B of a node tensor."""
        flat = flat_rows(tensor)
        out = flat.new_zeros(self._boundary.num_rows, flat.size(1))
        _add(out, flat, self._boundary.sent, self._sent_weights(flat))
        return out.view(out.size(0), *tensor.shape[1:])

    def _sent_weights(self, rows: Tensor) -> Tensor | None:
        if self._weights is None:
            return None
        return self._weights.sent.to(
            torch.float64 if rows.dtype == torch.float64 else torch.float32
        )

    def returns(
        self,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool,
        wire: Wire | None = None,
    ) -> Returns:
        rows = self._boundary.num_rows
        own = [total.new_zeros(rows, *total.shape[1:]) for total in totals]
        way = GradientReturn(self._boundary.plan, own, layer, prefetch, refetches, wire)

        def add() -> None:
            for total, part in zip(totals, own, strict=True):
                flat = total.view(total.size(0), total.shape[1:].numel())
                weight = self._sent_weights(total)
                _add(flat, flat_rows(part), self._boundary.sent_back, weight)

        return _BoundaryReturn(way, list(totals), add)


class _BoundaryReturn:
    """Gradients of B's rows on their way back, then of the rows that B was made of."""

    def __init__(self, way: Returns, totals: list[Tensor], add: Callable[[], None]) -> None:
        self._way, self._totals, self._finish = way, totals, add

    def start(self, unit: int) -> list[Tensor]:
        return self._totals if unit == 0 else self._way.start(unit)

    def send(self, unit: int) -> None:
        self._way.send(unit)

    def drain(self) -> None:
        self._way.drain()
        self._finish()


@torch.no_grad()
def _add(out: Tensor, rows: Tensor, segments: Segments, weight: Tensor | None) -> None:
    """Adds gathered rows to their targets, ``[N, F]`` both."""
    if out.numel():
        source, offsets, targets = segments.source, segments.offsets, segments.targets
        gather_sum_(out, rows, source, offsets, targets, weight, segments.edges)


def cheaper_rounds(
    edge_index: DistEdgeIndex, rounds: ShardRounds, weight: Tensor | None
) -> BoundaryRounds | None:
    """The way through the edges by a cover, or ``None`` where it saves too little.

    All workers call this together; the factorization is made once per structure and kept with it.

    Args:
        edge_index: Distributed edges.
        rounds: The way where source rows come.
        weight: Constant weights of the edges ``[E]``.
    """
    if edge_index.plan.world_size == 1:
        return None

    def make() -> tuple[Boundary | None]:
        comm, found = edge_index.plan.comm, Boundary(edge_index)
        numbers = torch.tensor([*found.rows, int(why_missing() is None)], device=edge_index.device)
        rows, pulled, ready = comm.all_reduce(numbers, label=_PLAN).tolist()
        return (None if rows > _WORTH * pulled or ready < comm.world_size else found,)

    boundary: Boundary | None = edge_index.remember_together("boundary", make)[0]
    return None if boundary is None else BoundaryRounds(rounds, boundary, weight)
