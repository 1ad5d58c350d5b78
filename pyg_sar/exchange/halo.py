"""The halo plan: which remote rows a worker's edges need, and which of its rows others need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_sar.exchange.cover import StoredCovers
from pyg_sar.exchange.wire import Wire

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator


class CallContext:
    """The layer that runs now, for plain gathers by the distributed index.

    Attributes:
        layer: Whom the ledger charges.
        wire: How rows that it gathers plainly travel.
        gathered: Halo gathers of its present call, each tensor once.
    """

    def __init__(self) -> None:
        self.layer = ""
        self.wire = Wire()
        self.gathered: dict[Any, Any] = {}


class HaloPlan:
    r"""A worker's place in the distributed node numbering, and its exchange with the peers.

    A worker numbers its own nodes :math:`0 \ldots n_p - 1` and the :math:`H_p` remote nodes that
    its edges need (its *halo*) :math:`n_p \ldots n_p + H_p - 1`, grouped by owner.

    Rows travel unit by unit. Unit 0 is the worker itself; in unit u worker p receives rows from
    p + u and sends rows to p - u, so that every worker has one peer each way in each unit.

    Args:
        comm: The communicator of the workers.
        num_local: Own nodes :math:`n_p`.
        halo_counts: Halo rows per owner, ``world_size`` numbers, 0 for the worker itself.
        send_index: Own row numbers that peers need, grouped by peer, in the order of that peer's
            halo numbering. Shape ``[sum(send_counts)]``, int32 or int64.
        send_counts: Rows that each peer needs from here, ``world_size`` numbers.
        n_id: Global ids of the own nodes, where they are known.
        covers: Of the edges that the partition came with.
        open_ended: More own rows may follow the last that a relation has.

    Attributes:
        context: The layer that runs now; shared by plans that are made of each other.
        halo_offsets: First halo row of each owner, and at last :math:`H_p`.
        peers: Of each unit, the worker that its rows come from, and the one that they go to.
        num_rows: Rows of each unit.
        tokens: Things that edges remember, which all workers have made (``distributed_index.py``).
        published: Which rows workers of one host, or parts, read in place, agreed by all of them.
    """

    def __init__(
        self,
        comm: Communicator,
        num_local: int,
        halo_counts: Sequence[int],
        send_index: Tensor,
        send_counts: Sequence[int],
        n_id: Tensor | None = None,
        covers: StoredCovers | None = None,
        open_ended: bool = False,
    ) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.num_local, self.n_id, self.covers = num_local, n_id, covers
        self.halo_counts, self.send_counts = list(halo_counts), list(send_counts)
        self.send_index, self.open_ended = send_index, open_ended
        self.context, self.tokens = CallContext(), 0
        self.published: Any = None
        self.halo_offsets = [0, *accumulate(halo_counts)]
        self.num_halo = self.halo_offsets[-1]
        rank, world = self.rank, self.world_size
        self.peers = [((rank + u) % world, (rank - u) % world) for u in range(world)]
        self.num_rows = [num_local, *(self.halo_counts[q] for q, _ in self.peers[1:])]
        self._sends = list(send_index.split(self.send_counts))

    @property
    def num_ids(self) -> int:
        """Own and halo nodes: source ids are below this."""
        return self.num_local + self.num_halo

    def send_rows(self, peer: int) -> Tensor:
        """Own row numbers that ``peer`` needs, in the order of its halo numbering."""
        return self._sends[peer].long()

    def halo_slice(self, owner: int) -> slice:
        """The halo rows of ``owner``, counted from the first halo row."""
        return slice(self.halo_offsets[owner], self.halo_offsets[owner + 1])

    def to(self, device: torch.device) -> HaloPlan:
        """The same plan with its indices on ``device``."""
        if self.send_index.device == device:
            return self
        n_id = None if self.n_id is None else self.n_id.to(device)
        send = self.send_index.to(device)
        return self._again(self.num_local, send, n_id, self.open_ended)

    def widened(self, num_local: int) -> HaloPlan:
        """The same exchange among more own rows, the new ones behind those known so far."""
        return self._again(num_local, self.send_index, None, False)

    def _again(
        self, num_local: int, send_index: Tensor, n_id: Tensor | None, open_ended: bool
    ) -> HaloPlan:
        given = self.comm, num_local, self.halo_counts, send_index, self.send_counts
        made = HaloPlan(*given, n_id, self.covers, open_ended)
        made.context = self.context  # Other workers' plans may not need to be made again.
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> HaloPlan:
        return self  # Immutable, and bound to a communicator that can't be copied.

    def __repr__(self) -> str:
        return (
            f"HaloPlan(rank={self.rank}, world_size={self.world_size}, "
            f"num_local={self.num_local}, num_halo={self.num_halo})"
        )
