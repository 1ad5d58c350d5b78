"""Which rows a worker publishes for its local peers, and where in theirs it finds its halo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.comm.sharing import Sharing
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import RowLayout, flat_rows
from pyg_sar.ledger import Label

_PLAN: Label = ("", "", "plan")
_WHOLE = 0.6  # A copy of all rows takes as long as gathering this part of them.


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A plan's exchange with the local peers. See [Note: publication] in sharing.

    Attributes:
        rows: Own rows that are published, ascending; ``None``: the first :attr:`count`.
        count: How many these are.
        readers: How many of them each local peer takes.
        counts: How many rows each local peer publishes, where it has halo rows of this worker.
        index: Positions of the halo rows in each of these publications, ``[halo_counts[q]]``;
            none where they are the publication.
    """

    rows: Tensor | None
    count: int
    readers: dict[int, int]
    counts: dict[int, int]
    index: dict[int, Tensor]

    def fill(
        self, out: Tensor, tensors: Sequence[Tensor], layout: RowLayout, dtype: torch.dtype
    ) -> None:
        """Writes what is published of the tensors of a dtype, side by side."""
        with torch.no_grad():
            for k, start, stop in layout.groups[dtype]:
                flat, columns = flat_rows(tensors[k]), out[:, start:stop]
                if self.rows is None:
                    columns.copy_(flat[: self.count])
                else:
                    torch.index_select(flat, 0, self.rows, out=columns)

    def gather(self, publication: Tensor, piece: slice, owner: int, out: Tensor) -> None:
        """Takes a piece of the halo rows of ``owner`` from what it published."""
        if owner in self.index:
            torch.index_select(publication, 0, self.index[owner][piece], out=out[piece])
        else:
            out[piece] = publication[piece]


def shared_rows(plan: HaloPlan, sharing: Sharing) -> SharedRows:
    """The plan's exchange with the local peers, agreed once by all workers together."""
    if plan.shared is None:
        plan.shared = _agree(plan, sharing.ranks)
    found: SharedRows = plan.shared
    return found


def _agree(plan: HaloPlan, near: frozenset[int]) -> SharedRows:
    sends = {q: plan.send_rows(q) for q in near if plan.send_rows(q).numel()}
    rows: Tensor | None = torch.unique(torch.cat(list(sends.values()))) if sends else None
    count = 0 if rows is None else rows.numel()
    if rows is not None and count >= _WHOLE * plan.num_local:
        rows, count = None, plan.num_local
    counts, index = {}, {}
    for owner, peer in plan.rounds():
        message = found = None
        if peer in sends:
            wanted = sends[peer]
            positions = wanted if rows is None else torch.searchsorted(rows, wanted)
            message = torch.cat([positions.new_tensor([count]), positions])
        if owner in near and plan.halo_counts[owner]:
            found = torch.empty(1 + plan.halo_counts[owner], dtype=torch.long)
        plan.comm.exchange(message, peer, found, owner, label=_PLAN).wait()
        if found is not None:
            counts[owner] = int(found[0])
            index[owner] = found[1:].int() if counts[owner] < 2**31 else found[1:]
    readers = {q: part.numel() for q, part in sends.items()}
    return SharedRows(rows, count, readers, counts, index)
