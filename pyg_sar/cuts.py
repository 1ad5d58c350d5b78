"""The edges between workers, split by covers: those of pulled rows, and those of pushed targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_sar.cover import ALL_PUSHED, Costs, pulled_rows
from pyg_sar.halo import HaloPlan
from pyg_sar.index_space import DistEdgeIndex
from pyg_sar.ledger import Label
from pyg_sar.shard import narrowed

if TYPE_CHECKING:
    from pyg_sar.comm import Communicator

_PLAN: Label = ("", "", "plan")
_WORTH = 0.95  # of what pulling alone costs: a cover that saves less is not worth the work


@dataclass(frozen=True, slots=True)
class Cut:
    """The edges from one owner, as this worker covers them.

    Attributes:
        rows: The owner's halo rows that are pulled, counted from its first, ascending.
        slots: The targets that are pushed to, ascending.
        pulled: Columns of the edges from pulled rows.
        pushed: Columns of the others.
        source: Halo row of each of both, counted from the owner's first: ``pulled``, ``pushed``.
        target: Target of each of both.
    """

    rows: Tensor
    slots: Tensor
    pulled: Tensor
    pushed: Tensor
    source: tuple[Tensor, Tensor]
    target: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Request:
    """What one peer wants of this worker.

    Attributes:
        rows: Own rows that it pulls.
        source: Own row of each edge that is pushed to it.
        place: The target of each, as its place among the peer's slots.
        columns: The number of each in the peer's list of edges.
    """

    rows: Tensor
    source: Tensor
    place: Tensor
    columns: Tensor


class Cuts:
    """A cover of the edges between workers. Made by all workers together.

    Args:
        edge_index: Distributed edges.
        costs: What a pulled and a pushed row cost.

    Attributes:
        mine: How this worker covers the edges from each owner.
        requests: What each peer wants.
        rows: Rows that worker p pulls from q, ``[W, W]``.
        slots: Targets of worker p that q pushes to, ``[W, W]``.
        num_halo: Rows that all workers would take by pulling alone.
    """

    def __init__(self, edge_index: DistEdgeIndex, costs: Costs) -> None:
        halo = edge_index.plan
        self.costs, self.mine = costs, _covered(edge_index, costs)
        sizes = [[c.rows.numel(), c.slots.numel(), c.pushed.numel()] for c in self.mine]
        table = torch.tensor(sizes, device=edge_index.device)
        pulls = torch.tensor(halo.halo_counts, device=edge_index.device).view(-1, 1)
        table = torch.stack(halo.comm.all_gather(torch.cat([table, pulls], 1), label=_PLAN))
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
        found = [Request(nothing, nothing, nothing, nothing)] * halo.world_size
        for owner, peer in halo.rounds():
            cut = self.mine[owner]
            place = torch.searchsorted(cut.slots, cut.target[1])
            message = torch.cat([cut.rows, cut.source[1], place, cut.pushed.long()])
            rows, _, edges, _ = coming[peer]
            arriving = message.new_empty(rows + 3 * edges)
            halo.comm.exchange(message, owner, arriving, peer, label=_PLAN).wait()
            wanted, source, place, columns = arriving.split([rows, edges, edges, edges])
            own = halo.send_rows(peer)
            columns = narrowed(columns, int(columns.max()) if edges else 0)
            found[peer] = Request(own[wanted], own[source], place.clone(), columns)
        return found


def _covered(edge_index: DistEdgeIndex, costs: Costs) -> list[Cut]:
    """Covers the edges from each owner."""
    halo, (source, target) = edge_index.plan, edge_index.ends()
    columns = (source >= halo.num_local).nonzero().view(-1)
    row, target = source[columns] - halo.num_local, target[columns]
    covers, pulled = halo.covers, None
    if covers is not None:
        pulled = covers.find(costs, columns.numel())
    if costs == ALL_PUSHED:
        pulled = torch.zeros(halo.num_halo, dtype=torch.bool)
    elif pulled is None:
        for ledger in halo.comm.ledgers:
            ledger.count("cover")
        pulled = pulled_rows(row, target, halo.halo_offsets, [costs])[0]
    pulls = pulled.to(row.device)[row]
    ends = torch.tensor(halo.halo_offsets[1:], device=row.device)
    owner = torch.bucketize(row, ends, right=True)
    order = owner.sort(stable=True).indices
    counts = torch.bincount(owner, minlength=halo.world_size).tolist()
    columns = narrowed(columns, edge_index.size(1))
    return [
        _cut(columns[part], row[part] - halo.halo_offsets[q], target[part], pulls[part])
        for q, part in enumerate(order.split(counts))
    ]


def _cut(columns: Tensor, row: Tensor, target: Tensor, pulls: Tensor) -> Cut:
    pushes = ~pulls
    return Cut(
        torch.unique(row[pulls]),
        torch.unique(target[pushes]),
        columns[pulls],
        columns[pushes],
        (row[pulls], row[pushes]),
        (target[pulls], target[pushes]),
    )


def rows_travel(comm: Communicator) -> bool:
    """Whether rows of any worker go over a network. All workers call this together."""
    near = 1 if comm.sharing is None else 1 + len(comm.sharing.ranks)
    far = torch.tensor(int(near < comm.world_size), device=comm.device)
    return bool(comm.all_reduce(far, "max", label=_PLAN))
