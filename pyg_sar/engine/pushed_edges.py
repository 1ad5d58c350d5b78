r"""Attention with fewer bytes on the wire: the edges, split by a cover into pulled and pushed ones.

For pulled edges the target's worker p fetches source rows from their owner q, as always. For pushed
ones it sends the *slots*, its targets of these edges, to q, which goes through the edges over its
own rows and returns a row per slot: in the forward pass a partial state, in the backward pass a
gradient of the query. See :mod:`pyg_sar.engine.pushed_attention`.

[Note: two plans] Slots travel like source rows of a second halo plan: at q they are the halo rows
of owner p. Either plan is walked by itself: the worker's own edges
come first, while the first slots travel, then the slots', then pulled edges. So what is added to
states and gradients comes in the same order however far ahead is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_sar.engine.cuts import Cuts, Request, rows_travel
from pyg_sar.engine.rounds import ShardRounds
from pyg_sar.exchange.cover import Costs
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.ledger import Label
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import EdgeRun, Segments

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator

_PLAN: Label = ("", "", "plan")


@dataclass(frozen=True, slots=True)
class Pushed:
    """The edges that are pushed to one peer.

    Attributes:
        peer: Whose targets they go to.
        rows: The peer's slots among the unit's.
        run: The edges, from own rows to the peer's slots; numbered as in its list of edges.
    """

    peer: int
    rows: slice
    run: EdgeRun


class PushedEdges:
    """The edges between workers, pulled and pushed. Made by all workers together.

    Args:
        edge_index: Distributed edges.
        cuts: How they are covered; emptied.
        numbered: Whether the edges' numbers will be asked for.
        by_source: Whether the edges will be asked for by source alone.

    Attributes:
        plan: The halo plan of pulled rows.
        slots: The halo plan of slots: its own rows are the targets.
        pulled: The pulled edges of each unit; none of unit 0.
        pushed: The edges of each unit that this worker goes through for its peers.
    """

    def __init__(
        self, edge_index: DistEdgeIndex, cuts: Cuts, numbered: bool, by_source: bool
    ) -> None:
        halo, rows, slots = edge_index.plan, cuts.rows, cuts.slots
        wanted = torch.cat([request.rows for request in cuts.requests])
        self.plan = _plan(halo.comm, halo.num_local, rows, wanted)
        own = torch.cat([cut.slots for cut in cuts.mine])
        self.slots = _plan(halo.comm, edge_index.num_targets, slots.T, own)
        self.pulled = self._pulled(cuts, numbered, by_source)
        requests = dict(enumerate(cuts.requests))
        cuts.mine.clear()  # For the sake of memory: the runs are all that is kept.
        cuts.requests.clear()
        self.pushed = self._pushed(requests, by_source)

    def _pulled(self, cuts: Cuts, numbered: bool, by_source: bool) -> list[EdgeRun]:
        units, (_, places) = self.plan.units(), self.plan.places()
        nothing = cuts.mine[self.plan.rank].rows
        found = []
        for number, unit in enumerate(units):
            owners = unit.owners if number else ()
            mine = [cuts.mine[q] for q in owners]
            source = [
                torch.searchsorted(cut.rows, cut.source[0]) + places[q]
                for q, cut in zip(owners, mine, strict=True)
            ]
            target = [cut.target[0] for cut in mine]
            columns = [cut.pulled for cut in mine if cut.pulled is not None]
            source, target = ([nothing, *part] for part in (source, target))
            numbers = torch.cat([nothing, *columns]) if numbered else None
            size = unit.num_rows, self.slots.num_local
            ends = torch.cat(source), torch.cat(target)
            found.append(EdgeRun(*ends, numbers, *size, by_source=by_source))
        return found

    def _pushed(self, requests: dict[int, Request], by_source: bool) -> list[list[Pushed]]:
        found: list[list[Pushed]] = [[]]
        for unit in self.slots.units()[1:]:
            found.append([])
            starts = accumulate(unit.counts, initial=0)
            for peer, start, count in zip(unit.owners, starts, unit.counts, strict=False):
                asked = requests.pop(peer)
                ends = asked.source, asked.place
                size = self.plan.num_local, count
                run = EdgeRun(*ends, asked.columns, *size, by_source=by_source)
                del asked, ends
                found[-1].append(Pushed(peer, slice(start, start + count), run))
        return found


def _plan(comm: Communicator, num_local: int, rows: Tensor, send: Tensor) -> HaloPlan:
    """A halo plan of the rows that p needs of q, ``[W, W]``."""
    table = rows.cpu()
    needs, sends = table[comm.rank].tolist(), table[:, comm.rank].tolist()
    return HaloPlan(comm, num_local, needs, send, sends)


class PulledRounds(ShardRounds):
    """The way through the worker's own edges and the pulled ones.

    Args:
        rounds: The way through all edges.
        edges: The edges between workers.
    """

    def __init__(self, rounds: ShardRounds, edges: PushedEdges) -> None:
        super().__init__(rounds.shards, 1)
        self.plan, self._edges = edges.plan, edges

    def tiles(self, unit: int) -> Any:
        raise NotImplementedError("Pulled edges are for kernels")

    def columns(self, unit: int) -> Tensor | slice:
        return self._edges.pulled[unit].numbers if unit else super().columns(unit)

    def segments(self, unit: int, transposed: bool = False, numbered: bool = False) -> Segments:
        if unit == 0:
            return super().segments(unit, transposed, numbered)
        run = self._edges.pulled[unit]
        return run.transposed(numbered) if transposed else run.segments


def pushed_edges(
    edge_index: DistEdgeIndex,
    costs: Costs,
    near: Costs | None,
    *,
    numbered: bool = False,
    by_source: bool = False,
) -> PushedEdges | None:
    """The edges between workers by a cover, or ``None`` where it saves too little.

    All workers call this together; it is made once per structure and arguments, and kept with it.

    Args:
        edge_index: Distributed edges.
        costs: What a pulled and a pushed row cost.
        near: The same where all workers read each other's memory; ``None``: nothing is pushed then.
        numbered: Whether the edges' numbers will be asked for.
        by_source: Whether the edges will be asked for by source alone.
    """
    if edge_index.plan.world_size == 1:
        return None

    def make() -> tuple[PushedEdges | None]:
        chosen = costs if costs == near or rows_travel(edge_index.plan.comm) else near
        if chosen is None:
            return (None,)
        with torch.inference_mode(False):
            cuts = Cuts(edge_index, chosen, numbered)
            if not cuts.is_worth_it:
                return (None,)
            return (PushedEdges(edge_index, cuts, numbered, by_source),)

    key = "pushed", costs, near, numbered, by_source
    found: PushedEdges | None = edge_index.remember_together(key, make)[0]
    return found
