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

from pyg_sar.cover import SUMS
from pyg_sar.cuts import Cut, Cuts
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
        is_worth_it: Whether it saves enough; the same on all workers.

    Args:
        edge_index: Distributed edges.
    """

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        halo = self._halo = edge_index.plan
        self.num_targets = edge_index.num_targets
        self._known: OrderedDict[tuple[int, int], tuple[Tensor, Weights]] = OrderedDict()
        cuts = Cuts(edge_index, SUMS)
        self.is_worth_it = cuts.is_worth_it
        self._columns = [(cut.pulled, cut.pushed, cut.slots.numel()) for cut in cuts.mine]
        self._make_sent(halo, cuts)
        self._make_received(halo, cuts.mine)

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
        arriving = [weight.new_empty(count) for count in self._partial]
        for owner, peer in self._halo.rounds():
            message = weight[self._columns[owner][1]]
            comm.exchange(message, owner, arriving[peer], peer, label=_PLAN).wait()
        received = []
        for owners in self._order:
            cuts = [self._columns[owner] for owner in owners]
            parts = [p for pulled, _, slots in cuts for p in (weight[pulled], ones(slots))]
            received.append(torch.cat(parts) if parts else weight[:0])
        return Weights(torch.cat(sent + arriving), received)

    # B, P and R #############################################################

    def _make_sent(self, halo: HaloPlan, cuts: Cuts) -> None:
        """B's rows, P, and the halo plan."""
        shared = torch.unique(torch.cat([request.rows for request in cuts.requests]))
        self._shared = start = shared.numel()
        self._partial = [request.source.numel() for request in cuts.requests]
        sends, own, at = [], [shared], [torch.arange(start, device=shared.device)]
        for request, slots in zip(cuts.requests, cuts.slots[:, halo.rank].tolist(), strict=True):
            partial = torch.arange(slots, device=shared.device) + start
            sends.append(torch.cat([torch.searchsorted(shared, request.rows), partial]))
            own.append(request.source)
            at.append(request.place + start)
            start += slots
        self.num_rows = start
        self.plan = HaloPlan(
            halo.comm,
            start,
            (cuts.rows + cuts.slots)[halo.rank].tolist(),
            torch.cat(sends),
            [part.numel() for part in sends],
            halo.timetable,
        )
        x_rows, b_rows = torch.cat(own), torch.cat(at)
        self.sent = segments_of(x_rows, b_rows, halo.num_local, start)
        self.sent_back = segments_of(b_rows, x_rows, start, halo.num_local)

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
        found = Boundary(edge_index)
        ready = torch.tensor(int(why_missing() is None), device=edge_index.device)
        edge_index.plan.comm.all_reduce(ready, "min", label=_PLAN)
        return (found if found.is_worth_it and int(ready) else None,)

    boundary: Boundary | None = edge_index.remember_together("boundary", make)[0]
    return None if boundary is None else BoundaryRounds(rounds, boundary, weight)
