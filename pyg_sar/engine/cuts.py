"""The edges between workers, split by a cover: rows of some sources come, of some targets go.

For *pulled* edges the target's worker p fetches source rows from their owner q, as always. For
*pushed* ones q goes through the edges over its own rows on p's behalf: for each target of these (a
*slot*), p sends what is read of it, and gets back a partial state, or a gradient. A minimum vertex
cover says which edges are which (:mod:`pyg_sar.exchange.cover`): one row per covering node is the
least that this way of splitting can do.

[Note: joined] Parts that share a process push all of their edges, as each reads what is known of
the others' targets where it lies. What a part goes through for all others is one block, like its
halo; so sums don't depend on where the others are.

[Note: two plans] Slots travel like source rows of a second halo plan: at q they are the halo rows
of owner p. Either plan is gone through by itself, so what is added to states and gradients comes in
the same order however far ahead is fetched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_sar.exchange.cover import ALL_PUSHED, Costs, pulled_rows
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.part_rows import is_hosted
from pyg_sar.ledger import Label
from pyg_sar.space.index_space import DistEdgeIndex, version_of
from pyg_sar.space.shard import EdgeRun, narrowed

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator

_PLAN: Label = ("", "", "plan")
_AGREEMENT: Label = ("", "", "agreement")
_WORTH = 0.95  # of what pulling alone costs: a cover that saves less is not worth the work
_WEIGHTS = 8  # that are remembered


@dataclass(frozen=True, slots=True)
class Cut:
    """The edges from one owner, as this worker covers them.

    Attributes:
        rows: The owner's halo rows that are pulled, counted from its first, ascending.
        slots: The targets that are pushed to, ascending.
        pulled: Columns of the edges from pulled rows, if they are wanted.
        pushed: Columns of the others, if they are wanted.
        source: Halo row of each of both, counted from the owner's first: ``pulled``, ``pushed``.
        target: Target of each of both.
    """

    rows: Tensor
    slots: Tensor
    pulled: Tensor | None
    pushed: Tensor | None
    source: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Request:
    """A peer's wish: rows to pull, and edges to go through on its behalf.

    Attributes:
        rows: Own rows that it pulls.
        source: Own row of each edge that is pushed to it.
        place: The target of each, as its place among the peer's slots.
        columns: The number of each in the peer's list of edges, if it is wanted.
    """

    rows: Tensor
    source: Tensor
    place: Tensor
    columns: Tensor | None


class Cuts:
    """A cover of the edges between workers at some costs. Made by all workers together.

    Attributes:
        pulled: Which halo rows are pulled, ``[H]``; ``None``: none.
        mine: How this worker covers the edges from each owner.
        requests: What each peer wants.
        rows: Rows that worker p pulls from q, ``[W, W]``.
        slots: Targets of worker p that q pushes to, ``[W, W]``.
        num_halo: Rows that all workers would take by pulling alone.
    """

    def __init__(self, edge_index: DistEdgeIndex, costs: Costs, numbered: bool) -> None:
        halo = edge_index.plan
        self.costs = costs
        self.pulled = None if costs == ALL_PUSHED else _pulled(edge_index, costs)
        owners = range(halo.world_size)
        self.mine = [_cut(edge_index, owner, self.pulled, numbered) for owner in owners]
        sizes = [[c.rows.numel(), c.slots.numel(), c.source[1].numel()] for c in self.mine]
        table = torch.tensor(sizes, device=edge_index.device)
        pulls = torch.tensor(halo.halo_counts, device=edge_index.device).view(-1, 1)
        most = torch.full_like(pulls, max(halo.num_ids, edge_index.size(1)))
        table = torch.stack(halo.comm.all_gather(torch.cat([table, pulls, most], 1), label=_PLAN))
        self._index = torch.int32 if int(table[:, :, 4].max()) < 2**31 else torch.int64
        self.rows, self.slots = table[:, :, 0], table[:, :, 1]
        self.num_halo = int(table[:, :, 3].sum())
        self.requests = self._exchange(halo, table[:, halo.rank].tolist())

    @property
    def is_worth_it(self) -> bool:
        """True where it saves enough; the same on all workers."""
        pull, push = self.costs
        cost = pull * int(self.rows.sum()) + push * int(self.slots.sum())
        return cost <= _WORTH * pull * self.num_halo

    def _exchange(self, halo: HaloPlan, coming: Sequence[Sequence[int]]) -> list[Request]:
        """Tells each owner what to send, and hears it from each peer."""
        nothing = self.mine[halo.rank].rows
        found = [Request(nothing, nothing, nothing, None)] * halo.world_size
        works = []
        for owner, peer in halo.peers[1:]:
            rows, _, edges, *_ = coming[peer]
            cut = self.mine[owner]
            sizes = [rows] + [edges] * (2 if cut.pushed is None else 3)
            arriving = torch.empty(sum(sizes), dtype=self._index, device=nothing.device)
            message = partial(self._message, cut)
            work = halo.comm.exchange(message, owner, arriving, peer, label=_PLAN)
            works.append((peer, sizes, arriving, work))
        while works:
            peer, sizes, arriving, work = works.pop(0)
            work.wait()
            wanted, source, place, *columns = arriving.split(sizes)
            own, numbers = halo.send_rows(peer), columns[0].clone() if columns else None
            ends = own.to(self._index)[source], place.clone()
            found[peer] = Request(own[wanted], *ends, numbers)
        return found

    def _message(self, cut: Cut) -> Tensor:
        """Packs a cut for the owner of its sources."""
        place = torch.searchsorted(cut.slots, cut.target[1], out_int32=self._index != torch.long)
        parts = [cut.rows, cut.source[1], place] + ([] if cut.pushed is None else [cut.pushed])
        return torch.cat([part.to(self._index) for part in parts])


def _pulled(edge_index: DistEdgeIndex, costs: Costs) -> Tensor:
    """The halo rows that a cover pulls, ``[H]``, bool."""
    halo, (source, target) = edge_index.plan, edge_index.ends()
    remote = source >= halo.num_local
    found = None if halo.covers is None else halo.covers.find(costs, int(remote.sum()))
    if found is None:
        for ledger in halo.comm.ledgers:
            ledger.count("cover")
        row = source[remote] - halo.num_local
        found = pulled_rows(row, target[remote], halo.halo_offsets, [costs])[0]
    return found.to(source.device)


def _cut(edge_index: DistEdgeIndex, owner: int, pulled: Tensor | None, numbered: bool) -> Cut:
    """The edges from an owner. ``pulled``: which halo rows are; ``None``: none."""
    halo, (source, target) = edge_index.plan, edge_index.ends()
    rows, first = halo.halo_slice(owner), halo.num_local
    here = (source >= first + rows.start) & (source < first + rows.stop)
    columns = here.nonzero().view(-1)
    row = narrowed(source[columns] - (first + rows.start), halo.num_ids)
    into = narrowed(target[columns], edge_index.num_targets)
    columns = narrowed(columns, edge_index.size(1))
    pulls: Any = slice(0)
    pushes: Any = slice(None)
    if pulled is not None:
        pulls = pulled[rows][row]
        pushes = ~pulls
    return Cut(
        torch.unique(row[pulls]),
        torch.unique(into[pushes]),
        columns[pulls] if numbered else None,
        columns[pushes] if numbered else None,
        (row[pulls], row[pushes]),
        (into[pulls], into[pushes]),
    )


def rows_travel(comm: Communicator) -> bool:
    """True where rows of any worker go over a network. All workers call this together."""
    near = 1 if comm.sharing is None else 1 + len(comm.sharing.ranks)
    far = torch.tensor(int(near < comm.world_size), device=comm.device)
    return bool(comm.all_reduce(far, "max", label=_PLAN))


# Both kinds of edges for the kernels ##########################################


class SplitEdges:
    """The edges between workers, pulled and pushed. Made by all workers together.

    It empties ``cuts``. The edges' numbers will be asked for where they are ``numbered``, and edges
    by source alone with ``by_source``.

    Attributes:
        plan: The halo plan of pulled rows.
        slots: The halo plan of slots: its own rows are the targets.
        pulls: Whether any worker pulls rows.
        pulled: The pulled edges of each unit from 1 on, if there are any.
        pushed: The edges of each unit from 1 on that this worker goes through for its peer; of a
            part that shares its process, for all others. See [Note: joined].
    """

    def __init__(
        self, edge_index: DistEdgeIndex, cuts: Cuts, numbered: bool, by_source: bool
    ) -> None:
        halo = self._halo = edge_index.plan
        wanted = torch.cat([request.rows for request in cuts.requests])
        self.plan = _plan(halo.comm, halo.num_local, cuts.rows, wanted)
        own = torch.cat([cut.slots for cut in cuts.mine])
        self.slots = _plan(halo.comm, edge_index.num_targets, cuts.slots.T, own)
        self.pulls = int(cuts.rows.sum()) > 0
        self._pulled = cuts.pulled if numbered else None
        owners = [owner for owner, _ in halo.peers[1:]]
        self.pulled = []
        for unit, owner in enumerate(owners if self.pulls else (), start=1):
            cut = cuts.mine[owner]
            source = torch.searchsorted(cut.rows, cut.source[0])
            sizes = cut.rows.numel(), edge_index.num_targets
            self.pulled.append(
                EdgeRun(unit, source, cut.target[0], cut.pulled, *sizes, by_source=by_source)
            )
        requests = dict(enumerate(cuts.requests))
        cuts.mine.clear()  # For the sake of memory: the runs are all that is kept.
        cuts.requests.clear()
        self._peers = [[peer] for peer in owners]
        if is_hosted(halo):
            self._peers = [sorted(owners)]
        self._counts = [requests[q].source.numel() for q in range(halo.world_size)]
        self.pushed = []
        for unit, peers in enumerate(self._peers, start=1):
            ends = self._ends([requests.pop(peer) for peer in peers], peers)
            sizes = halo.num_local, sum(self.slots.halo_counts[peer] for peer in peers)
            self.pushed.append(EdgeRun(unit, *ends, *sizes, by_source=by_source))
            del ends
        self._weights: OrderedDict[tuple[int, int], tuple[Tensor, list[Tensor]]] = OrderedDict()

    def _ends(
        self, requests: Sequence[Request], peers: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sources, slots and numbers of the edges of some peers, one after another."""
        if len(requests) == 1:
            return requests[0].source, requests[0].place, requests[0].columns
        first = self.slots.halo_offsets
        places = [asked.place + first[q] for asked, q in zip(requests, peers, strict=True)]
        source = torch.cat([asked.source for asked in requests])
        numbered = requests[0].columns is not None
        numbers = torch.arange(source.numel(), device=source.device) if numbered else None
        return source, torch.cat(places), numbers

    def pushed_weights(self, edge_index: DistEdgeIndex, weight: Tensor) -> list[Tensor]:
        """Constant weights of the pushed edges, by unit from 1 on, in the order of their run.

        All workers call this together. Weights of the edges into this worker's targets, ``[E]`` or
        ``[E, 1]``, are sent to the owners of the sources once, and again where they were written
        into.
        """
        key = id(weight), version_of(weight)
        known = key in self._weights
        if not hasattr(weight, "kept_by_all"):
            flag = torch.tensor(int(known), device=weight.device)
            known = bool(self._halo.comm.all_reduce(flag, "min", label=_AGREEMENT))
        if not known:
            sent = self.sent(edge_index, weight.detach().reshape(-1))
            self._weights[key] = weight, sent  # keeps it, and so its id
            while len(self._weights) > _WEIGHTS:
                self._weights.popitem(last=False)
        return self._weights[key][1]

    def sent(self, edge_index: DistEdgeIndex, weight: Tensor) -> list[Tensor]:
        """As :meth:`pushed_weights`, sent anew, and not kept."""
        halo, source = self._halo, edge_index.ends()[0]
        first, arriving, works = halo.num_local, {}, []
        for owner, peer in halo.peers[1:]:
            rows = halo.halo_slice(owner)
            columns = ((source >= first + rows.start) & (source < first + rows.stop)).nonzero()
            columns = columns.view(-1)
            if self._pulled is not None:
                columns = columns[~self._pulled[source[columns] - first]]
            arriving[peer] = weight.new_empty(self._counts[peer])
            ends = owner, arriving[peer], peer
            works.append(halo.comm.exchange(weight[columns], *ends, label=_PLAN))
        for work in works:
            work.wait()
        found = []
        for peers, run in zip(self._peers, self.pushed, strict=True):
            # They come in the order of the peers' lists.
            part = weight.new_empty(run.columns.numel())
            part[run.columns.argsort()] = torch.cat([arriving[peer] for peer in peers])
            found.append(part)
        return found


def _plan(comm: Communicator, num_local: int, rows: Tensor, send: Tensor) -> HaloPlan:
    """A halo plan of the rows that p needs of q, ``[W, W]``."""
    needs, sends = rows[comm.rank].tolist(), rows[:, comm.rank].tolist()
    return HaloPlan(comm, num_local, needs, send, sends)


def split_edges(
    edge_index: DistEdgeIndex,
    costs: Costs,
    near: Costs | None,
    *,
    numbered: bool = False,
    by_source: bool = False,
) -> SplitEdges | None:
    """The edges between workers by a cover, or ``None`` where it saves too little.

    All workers call this together; it is made once per structure and arguments, and kept with it.

    Args:
        edge_index: Distributed edges.
        costs: Of a pulled and of a pushed row.
        near: The same where all workers read each other's memory, or share a process; ``None``:
            nothing is pushed then.
        numbered, by_source: See :class:`SplitEdges`.
    """
    plan = edge_index.plan
    if plan.world_size == 1:
        return None

    def make() -> tuple[SplitEdges | None]:
        chosen = near
        if not is_hosted(plan) and (costs == near or rows_travel(plan.comm)):
            chosen = costs
        if chosen is None:
            return (None,)
        cuts = Cuts(edge_index, chosen, numbered)
        if not cuts.is_worth_it:
            return (None,)
        return (SplitEdges(edge_index, cuts, numbered, by_source),)

    key = "split", costs, near, numbered, by_source
    found: SplitEdges | None = edge_index.remember_together(key, make)[0]
    return found
