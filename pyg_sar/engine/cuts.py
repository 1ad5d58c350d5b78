"""The edges between workers, split by covers: those of pulled rows, and those of pushed targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_sar.exchange.cover import ALL_PUSHED, Costs, pulled_rows
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.ledger import Label
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import narrowed

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator

_PLAN: Label = ("", "", "plan")
_WORTH = 0.95  # of what pulling alone costs: a cover that saves less is not worth the work


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
    """What one peer wants of this worker.

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
    """A cover of the edges between workers. Made by all workers together.

    Args:
        edge_index: Distributed edges.
        costs: What a pulled and a pushed row cost.
        numbered: Whether the edges' numbers are wanted.

    Attributes:
        mine: How this worker covers the edges from each owner.
        requests: What each peer wants.
        rows: Rows that worker p pulls from q, ``[W, W]``.
        slots: Targets of worker p that q pushes to, ``[W, W]``.
        num_halo: Rows that all workers would take by pulling alone.
    """

    def __init__(self, edge_index: DistEdgeIndex, costs: Costs, numbered: bool) -> None:
        halo = edge_index.plan
        self.costs, self.mine = costs, _covered(edge_index, costs, numbered)
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
        """Whether it saves enough; the same on all workers."""
        pull, push = self.costs
        cost = pull * int(self.rows.sum()) + push * int(self.slots.sum())
        return cost <= _WORTH * pull * self.num_halo

    def _exchange(self, halo: HaloPlan, coming: Sequence[Sequence[int]]) -> list[Request]:
        """Tells each owner what to send, and hears it from each peer."""
        nothing = self.mine[halo.rank].rows
        found = [Request(nothing, nothing, nothing, None)] * halo.world_size
        for owner, peer in halo.rounds():
            cut = self.mine[owner]
            place = torch.searchsorted(
                cut.slots, cut.target[1], out_int32=self._index != torch.long
            )
            parts = [cut.rows, cut.source[1], place] + ([] if cut.pushed is None else [cut.pushed])
            message = torch.cat([part.to(self._index) for part in parts])
            rows, _, edges, *_ = coming[peer]
            sizes = [rows] + [edges] * (len(parts) - 1)
            arriving = message.new_empty(sum(sizes))
            halo.comm.exchange(message, owner, arriving, peer, label=_PLAN).wait()
            del message, parts, place
            wanted, source, place, *columns = arriving.split(sizes)
            own, numbers = halo.send_rows(peer), columns[0].clone() if columns else None
            ends = own.to(self._index)[source], place.clone()
            found[peer] = Request(own[wanted], *ends, numbers)
        return found


def _covered(edge_index: DistEdgeIndex, costs: Costs, numbered: bool) -> list[Cut]:
    """Covers the edges from each owner."""
    pulled = None if costs == ALL_PUSHED else _pulled(edge_index, costs)
    return [
        _cut(edge_index, owner, pulled, numbered) for owner in range(edge_index.plan.world_size)
    ]


def _pulled(edge_index: DistEdgeIndex, costs: Costs) -> Tensor:
    """Which halo rows are pulled, ``[H]``."""
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
    pulls = torch.zeros_like(row, dtype=torch.bool) if pulled is None else pulled[rows][row]
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
    """Whether rows of any worker go over a network. All workers call this together."""
    near = 1 if comm.sharing is None else 1 + len(comm.sharing.ranks)
    far = torch.tensor(int(near < comm.world_size), device=comm.device)
    return bool(comm.all_reduce(far, "max", label=_PLAN))
