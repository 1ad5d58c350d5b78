"""The halo plan: which remote rows a worker's edges need, and which of its rows others need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_sar.exchange.cover import StoredCovers
from pyg_sar.exchange.wire import Wire

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator


@dataclass(frozen=True, slots=True)
class Unit:
    """One round of the exchange, as one worker sees it: a worker each way, or none.

    Attributes:
        owners: Workers that rows come from. Their rows lie in this order.
        counts: Rows of each.
        peers: Workers that rows go to.
    """

    owners: tuple[int, ...]
    counts: tuple[int, ...]
    peers: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows that come."""
        return sum(self.counts)


class _Call:
    """What a layer that runs now makes of a plan; shared with the plan's widened ones."""

    def __init__(self) -> None:
        self.scope = ""
        self.wire = Wire()
        self.gathered: dict[Any, Any] = {}


class HaloPlan:
    r"""A worker's place in the distributed node numbering, and its exchange with the peers.

    A worker numbers its own nodes :math:`0 \ldots n_p - 1` and the :math:`H_p` remote nodes that
    its edges need (its *halo*) :math:`n_p \ldots n_p + H_p - 1`, grouped by owner.

    Args:
        comm: The communicator of the workers.
        num_local: Own nodes :math:`n_p`.
        halo_counts: Halo rows per owner, ``world_size`` numbers, 0 for the worker itself.
        send_index: Own row numbers that peers need, grouped by peer, in the order of that peer's
            halo numbering. Shape ``[sum(send_counts)]``, int32 or int64.
        send_counts: Rows that each peer needs from here, ``world_size`` numbers.

    Raises:
        ValueError: When the counts don't fit the communicator or each other.
    """

    def __init__(
        self,
        comm: Communicator,
        num_local: int,
        halo_counts: Sequence[int],
        send_index: Tensor,
        send_counts: Sequence[int],
    ) -> None:
        world = comm.world_size
        for name, counts in (("halo_counts", halo_counts), ("send_counts", send_counts)):
            if len(counts) != world:
                raise ValueError(
                    f"Expected {world} numbers in '{name}', one per worker (got {len(counts)}); "
                    f"partition the graph into {world} parts or start {len(counts)} workers"
                )
            if counts[comm.rank] != 0:
                raise ValueError(f"'{name}' of rank {comm.rank} counts its own rows as remote")
        if int(sum(send_counts)) != send_index.numel():
            raise ValueError(
                f"'send_counts' sum to {sum(send_counts)}, but 'send_index' holds "
                f"{send_index.numel()} rows"
            )
        self.comm = comm
        self.num_local = int(num_local)
        self.halo_counts = [int(n) for n in halo_counts]
        self.halo_offsets = [0, *accumulate(self.halo_counts)]
        self.num_halo = self.halo_offsets[-1]
        self.n_id: Tensor | None = None  # global ids of the own nodes, where they are known
        self._call = _Call()
        self.tokens = 0  # things made together by all workers, see distributed_index.py
        self.shared: Any = None  # what local peers read in place, see shared_rows.py
        self.open_ended = False  # more own rows may follow the last that a relation has
        self.covers: StoredCovers | None = None  # of the edges that the partition came with
        self.send_counts = [int(n) for n in send_counts]
        self._sends = list(send_index.split(self.send_counts))
        self._units: list[Unit] = []

    @property
    def scope(self) -> str:
        """The layer that runs now: whom the ledger charges for plain gathers."""
        return self._call.scope

    @scope.setter
    def scope(self, layer: str) -> None:
        self._call.scope = layer

    @property
    def wire(self) -> Wire:
        """How rows that this layer gathers plainly travel."""
        return self._call.wire

    @wire.setter
    def wire(self, wire: Wire) -> None:
        self._call.wire = wire

    @property
    def gathered(self) -> dict[Any, Any]:
        """Halo gathers of that layer's present call."""
        return self._call.gathered

    @property
    def rank(self) -> int:
        """This worker."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.comm.world_size

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

    def rounds(self) -> list[tuple[int, int]]:
        r"""The exchange schedule: ``(source, destination)`` peers of rounds 1 to W-1.

        In round r worker p receives rows from p + r and sends rows to p - r, so that every
        worker has one peer each way in each round.
        """
        p, world = self.rank, self.world_size
        return [((p + r) % world, (p - r) % world) for r in range(1, world)]

    def units(self) -> list[Unit]:
        """The worker itself as unit 0, then the rounds of :meth:`rounds`.

        All workers have the same number of units, and walk them in the same order; a worker
        that neither needs nor sends rows in a round has no part in it.
        """
        if not self._units:
            self._units = [Unit((self.rank,), (self.num_local,), ())]
            for source, destination in self.rounds():
                count = self.halo_counts[source]
                owners, counts = ((source,), (count,)) if count else ((), ())
                peers = (destination,) if self.send_counts[destination] else ()
                self._units.append(Unit(owners, counts, peers))
        return self._units

    def places(self) -> tuple[list[int], list[int]]:
        """Per owner: its unit, and its first row's place among the unit's rows."""
        units, places = [0] * self.world_size, [0] * self.world_size
        for number, unit in enumerate(self.units()):
            for owner, start in zip(unit.owners, accumulate(unit.counts, initial=0), strict=False):
                units[owner], places[owner] = number, start
        return units, places

    def _like(self, num_local: int, send: Tensor) -> HaloPlan:
        plan = HaloPlan(self.comm, num_local, self.halo_counts, send, self.send_counts)
        plan.covers = self.covers
        return plan

    def to(self, device: torch.device) -> HaloPlan:
        """The same plan with its indices on ``device``."""
        send = torch.cat(self._sends) if self._sends else torch.empty(0, dtype=torch.long)
        if send.device == device:
            return self
        plan = self._like(self.num_local, send.to(device))
        plan.open_ended = self.open_ended
        plan.n_id = None if self.n_id is None else self.n_id.to(device)
        return plan

    def widened(self, num_local: int) -> HaloPlan:
        """The same exchange among more own rows, the new ones behind those known so far."""
        plan = self._like(num_local, torch.cat(self._sends))
        plan._call = self._call  # Other workers' plans may not need to be widened.
        return plan

    def __deepcopy__(self, memo: dict[int, Any]) -> HaloPlan:
        return self  # Immutable, and bound to a communicator that can't be copied.

    def __repr__(self) -> str:
        return (
            f"HaloPlan(rank={self.rank}, world_size={self.world_size}, "
            f"num_local={self.num_local}, num_halo={self.num_halo})"
        )
