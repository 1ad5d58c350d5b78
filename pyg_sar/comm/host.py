"""A worker process that hosts several parts of a graph: meetings of parts, and their messages.

[Note: meetings] All parts run the same operations in the same order. The n-th operation of each
part is one *meeting*: every part brings something, the last one of a process to come combines what
its parts have brought, with the other processes if there are any, and then each takes the result.
The last ones of all processes come to the n-th meeting before they come to the next: so processes
call each other in the same order, too.

[Note: the order of sums] What parts bring is added up in the order of the parts, wherever they
are. So results are the same to the bit for any number of processes that host the same parts.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_sar.comm.backends import reduced, to_bytes
from pyg_sar.comm.communicator import Communicator, GroupCommunicator
from pyg_sar.comm.environment import read_environment
from pyg_sar.comm.issuer import Work
from pyg_sar.comm.messages import GATHER, num_bytes, unlike
from pyg_sar.comm.store import no_check
from pyg_sar.comm.turns import Turns
from pyg_sar.errors import DistributedIndexError
from pyg_sar.files import parse_bytes
from pyg_sar.ledger import Label
from pyg_sar.store.host_store import PINNED, HostStore
from pyg_sar.store.part_store import PartStore, available_memory

T = TypeVar("T")
Combine = Callable[[dict[int, Any]], Any]
"""Takes what the parts of this process have brought, and returns the result."""

HEADER = 256  # Bytes of a message's name.
LARGE = 1 << 16  # Bytes of a sum from which one total goes from process to process.


@dataclass(frozen=True, slots=True)
class Hosting:
    """How a worker hosts parts.

    Attributes:
        parts: Parts of the graph, of all workers.
        memory: By how many bytes a worker may grow; ``None``: no limit.
        store: The directory where parts wait, or ``'pinned'``: in a GPU's host memory. ``None``:
            they wait in memory.
    """

    parts: int
    memory: int | None = None
    store: str | None = None

    @property
    def device(self) -> str | None:
        """Where workers compute if nothing else was said.

        A store on disk has the CPU's tensors, pinned memory a GPU's, which workers share where
        there are too few.
        """
        if self.store == PINNED:
            return "cuda" if torch.cuda.is_available() else None
        return None if self.store is None and self.memory is None else "cpu"

    @classmethod
    def of(
        cls, parts: int | None, memory: int | str | None, store: str | os.PathLike[str] | None
    ) -> Hosting | None:
        """The hosting that arguments of ``launch`` and ``run`` ask for, if any do.

        Raises ``ValueError`` on a limit or a store without a number of parts, and on a limit of
        what waits in host memory.
        """
        if store == PINNED and memory is not None:
            raise ValueError(
                f"memory={memory!r} is the limit of a store on disk; with store={PINNED!r} a GPU "
                "holds what one part's turn needs: leave it out, and cut the graph into more parts"
            )
        if parts is None and (memory is not None or store is not None):
            name, value = ("memory", memory) if memory is not None else ("store", store)
            raise ValueError(f"{name}={value!r} needs parts=, the number of the partition's parts")
        if parts is None:
            return None
        size = None if memory is None else parse_bytes(memory, "memory")
        if store is not None and store != PINNED:
            store = os.path.abspath(store)
        return cls(parts, size, store if store is None else os.fspath(store))


def split_parts(num_parts: int, num_workers: int) -> list[range]:
    """Returns which parts each worker hosts: runs that differ by at most one part."""
    bounds = [worker * num_parts // num_workers for worker in range(num_workers + 1)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


class Started(NamedTuple):
    """A result that is there when transfers between processes have ended."""

    works: list[Work]
    result: Any


class Meeting:
    """One operation of all parts. See [Note: meetings].

    Attributes:
        brought: What each part has brought.
        result: What came out of it, once it is :meth:`over`.
        works: Transfers between processes that end it.
        shared: Of the parts of this process: :meth:`Host.share`.
    """

    def __init__(self, name: str, first: int, size: int) -> None:
        self.name, self.first = name, first
        self.brought: dict[int, Any] = {}
        self.result: Any = None
        self.works: list[Work] = []
        self.shared: Any = None
        self._met = False
        self._missing = self._guests = size

    def come(self, part: int, thing: Any) -> bool:
        """Returns whether this part is the last one."""
        self.brought[part] = thing
        self._missing -= 1
        return self._missing == 0

    def end(self, found: Any) -> None:
        """Takes what came out of it; it never ends where that has failed."""
        if isinstance(found, Started):
            self.works, found = found.works, found.result
        self.result, self.brought, self._met = found, {}, True

    def over(self) -> bool:
        """Returns whether the result is there."""
        return self._met and all(work.done() for work in self.works)

    def leave(self) -> bool:
        """Returns whether all parts have left."""
        self._guests -= 1
        return self._guests == 0


class Host:
    """Holds all that the parts of one process share; ``outer`` is the worker processes'
    communicator.
    """

    def __init__(self, hosting: Hosting, outer: Communicator) -> None:
        num_parts, memory, store = hosting.parts, hosting.memory, hosting.store
        self.num_parts, self.outer = num_parts, outer
        self.hosted = split_parts(num_parts, outer.world_size)
        self.parts = self.hosted[outer.rank]
        self.worker_of = [w for w, parts in enumerate(self.hosted) for _ in parts]
        group = outer if isinstance(outer, GroupCommunicator) else outer.across
        check = group.check if isinstance(group, GroupCommunicator) else no_check
        self.store: PartStore | HostStore | None = None
        if store == PINNED:
            self.store = HostStore(len(self.parts), outer.device)
        elif memory is not None or store is not None:
            if outer.device.type != "cpu":
                name = "memory" if store is None else "store"
                raise ValueError(
                    f"{name}={memory if store is None else store!r} is for parts that compute on "
                    f"the CPU, and this worker computes on {outer.device}: say store={PINNED!r}, "
                    "or init(device='cpu')"
                )
            place = read_environment()
            size = memory or available_memory(1 if place is None else place.local_world_size)
            self.store = PartStore(len(self.parts), num_parts, size, store)
        turn = self._begin, self._end
        self.turns = Turns(self.parts, check, self._under_way, *turn, outer.device)
        self._numbers = dict.fromkeys(self.parts, 0)
        self._meetings: dict[int, Meeting] = {}
        self._learning = WeakTensorKeyDictionary()

    def claim(self, tensor: Tensor, part: int) -> None:
        """Notes the part that a tensor learns in, or in which a norm keeps what it has seen.

        Raises:
            DistributedIndexError: Another part has used it. Each would add to its one gradient, and
                step it, or move it.
        """
        owner = self._learning.setdefault(tensor, part)
        if owner != part:
            raise DistributedIndexError(
                f"Parts {owner} and {part} of one process use the same tensor of shape "
                f"{list(tensor.shape)}, a parameter or the running statistics of a norm: make it, "
                "its model, and the optimizer within the function that each part runs"
            )

    def speaker(self, part: int) -> int:
        """Returns the rank that a part's own errors name; none with replicas: workers have them."""
        return part if self.outer.across is None else -1

    @property
    def rows_on(self) -> torch.device:
        """Where published rows are."""
        on_host = isinstance(self.store, HostStore)
        return torch.device("cpu") if on_host else self.outer.device

    @property
    def piece(self) -> int | None:
        """Bytes of rows that may be on their way to other workers at once; ``None``: any."""
        return self.store.cache_bytes // 2 if isinstance(self.store, PartStore) else None

    def _begin(self, part: int) -> None:
        if self.store is not None:
            self.store.begin(part - self.parts.start)

    def _end(self, part: int) -> None:
        if self.store is not None:
            self.store.end()

    def leave(self, part: int) -> None:
        """Ends the last turn of a part, on its thread."""
        self.turns.leave(part)
        if isinstance(self.store, HostStore):
            self.store.leave(part - self.parts.start)

    def saving(self) -> AbstractContextManager[Any]:
        """How this thread's part saves what its backward pass needs."""
        return self.store.saving() if isinstance(self.store, PartStore) else nullcontext()

    def unpaged(self, size: int = 0) -> AbstractContextManager[Any]:
        """Makes tensors that stay in memory, of ``size`` bytes: for all parts, and the network."""
        return nullcontext() if self.store is None else self.store.unpaged(size)

    def take_rows(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Memory for rows that parts publish, ``[rows, width]``."""
        if isinstance(self.store, PartStore):
            return self.store.take_rows(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.rows_on)

    def close(self) -> None:
        """Removes the store."""
        if self.store is not None:
            self.store.check()
            self.store.close()

    def _under_way(self) -> bool:
        return any(not work.done() for m in self._meetings.values() for work in m.works)

    # Meetings ----------------------------------------------------------------

    def come(
        self,
        part: int,
        name: str,
        thing: Any,
        combine: Combine,
        ready: Callable[[], bool] | None = None,
    ) -> Callable[[], Any]:
        """Has a part come to its next meeting.

        Args:
            part, name, thing: The part, what it does there, and what it brings.
            combine: Called by the last part of this process. Where it returns :class:`Started`,
                the meeting is over when these transfers are.
            ready: The part takes the result when this is true, too.

        Returns:
            A function that waits and returns the result.

        Raises:
            MismatchError: Another part does something else.
        """
        meeting, number = self._meeting(part, name), self._numbers[part]
        self._numbers[part] += 1
        if meeting.come(part, thing):
            meeting.end(combine(meeting.brought))
            self.turns.restart()
            for work in meeting.works:
                work.then(self.turns.look)

        def over() -> bool:
            return meeting.over() and (ready is None or ready())

        def take() -> Any:
            self.turns.wait(part, over, name)
            for work in meeting.works:
                work.wait()
            # Another part that left its autocast has emptied the cache of all: for any number of
            # workers to give the same bits, no cast of a parameter lives through a meeting.
            torch.clear_autocast_cache()
            if meeting.leave():
                del self._meetings[number]
            return meeting.result

        return take

    def share(self, part: int, name: str, make: Callable[[], T]) -> T:
        """An object that the parts of this process share at a part's next meeting, made by the
        first.

        Raises:
            MismatchError: Another part does something else.
        """
        meeting = self._meeting(part, name)
        if meeting.shared is None:
            meeting.shared = make()
        found: T = meeting.shared
        return found

    def _meeting(self, part: int, name: str) -> Meeting:
        new = Meeting(name, part, len(self.parts))
        meeting = self._meetings.setdefault(self._numbers[part], new)
        if meeting.name != name:
            raise unlike(part, meeting.first, name, meeting.name)
        return meeting

    def everyone(self, mine: Mapping[int, Tensor]) -> list[Tensor]:
        """Tensors of all parts, in their order, of equal shapes: those of this process are given.

        The last part of each process calls it.
        """
        own = [mine[part] for part in self.parts]
        if self.outer.world_size == 1:
            return own
        like, most = own[0], max(len(parts) for parts in self.hosted)
        rows = [to_bytes(tensor.contiguous()) for tensor in own]
        rows += [torch.zeros_like(rows[0])] * (most - len(rows))
        with self.unpaged():
            gathered = self.outer.all_gather(torch.stack(rows), label=GATHER)
        pairs = zip(gathered, self.hosted, strict=True)
        parts = [found[k] for found, parts in pairs for k in range(len(parts))]
        return [part.view(like.dtype).view(like.shape) for part in parts]

    def reduced(self, mine: Mapping[int, Tensor], op: str, label: Label) -> Tensor:
        """Reduces tensors of all parts, in their order. The last part of each process calls it."""
        outer, like = self.outer, mine[self.parts.start]
        chain = op == "sum" and like.is_floating_point() and num_bytes(like) > LARGE
        if outer.world_size == 1 or not chain:
            return reduced(self.everyone(mine), op)
        # One total goes from process to process, and at last to all.
        dtype = torch.float32 if like.element_size() == 2 else like.dtype
        own, rank, last = list(self.parts), outer.rank, outer.world_size - 1
        with self.unpaged():
            total = torch.empty_like(like, dtype=dtype)
        if rank:
            outer.exchange(None, rank, total, rank - 1, label=label).wait()
        else:
            total.copy_(mine[own.pop(0)])
        for part in own:
            total += mine[part]
        if rank < last:
            outer.exchange(total, rank + 1, None, rank, label=label).wait()
        return outer.broadcast(total, last, label=label).to(like.dtype)

    # Messages ----------------------------------------------------------------

    def exchanged(self, brought: Mapping[int, Posted], label: Label) -> Started:
        """Messages by the part that they come from and the part that they are for.

        The last part of each process calls it. :func:`unpack` takes a message.

        Raises:
            MismatchError: A part of this process sends what another one doesn't expect.
        """
        outer, size = self.outer, 0
        found: dict[tuple[int, int], Parcel] = {}
        for src, dst in itertools.product(self.parts, self.parts):
            sent, wanted = brought[src].sends.get(dst), brought[dst].wanted.get(src)
            names = [None if message is None else message[0] for message in (wanted, sent)]
            if names[0] != names[1]:
                raise unlike(dst, src, *(name or "nothing" for name in names))
            if sent is not None:
                found[src, dst] = _header(sent[0]), to_bytes(sent[1])
        if outer.world_size == 1:
            return Started([], found)
        sends: list[Tensor | None] = [None] * outer.world_size
        receives: list[Tensor | None] = [None] * outer.world_size
        for posted in brought.values():
            far = [*posted.sends.items(), *posted.wanted.items()]
            size += sum(HEADER + num_bytes(t) for q, (_, t) in far if q not in self.parts)
        with self.unpaged(size):
            for w, theirs in enumerate(self.hosted):
                if w == outer.rank:
                    continue
                going: list[Tensor] = []
                for src, dst in itertools.product(self.parts, theirs):
                    if dst in brought[src].sends:
                        name, tensor = brought[src].sends[dst]
                        going += [_header(name).to(outer.device), to_bytes(tensor)]
                pairs = itertools.product(theirs, self.parts)
                coming = [(src, dst) for src, dst in pairs if src in brought[dst].wanted]
                sizes = [num_bytes(brought[dst].wanted[src][1]) for src, dst in coming]
                total = sum(sizes) + HEADER * len(sizes)
                arriving = torch.empty(total, dtype=torch.uint8, device=outer.device)
                sends[w], receives[w] = torch.cat(going) if going else None, arriving
                pieces = iter(arriving.split([n for size in sizes for n in (HEADER, size)]))
                found |= dict(zip(coming, zip(pieces, pieces, strict=True), strict=True))
        return Started([outer.exchange_all(sends, receives, label=label)], found)


class Posted(NamedTuple):
    """Messages of a part: names and tensors, by the part that they are for, or come from.

    Tensors of ``wanted`` are what is received into.
    """

    sends: dict[int, tuple[str, Tensor]]
    wanted: dict[int, tuple[str, Tensor]]


Parcel = tuple[Tensor, Tensor]
"""A message's name, and its values, as bytes."""


def unpack(parcel: Parcel, name: str, into: Tensor, src: int, dst: int) -> None:
    """Fills a contiguous tensor with a message of part ``src`` to part ``dst``.

    Raises:
        MismatchError: It has another name.
    """
    header, data = parcel
    if not torch.equal(header.cpu(), _header(name)):
        sent = header.cpu().numpy().tobytes().decode(errors="replace").rstrip()
        raise unlike(dst, src, name, sent)
    to_bytes(into).copy_(data)


def _header(name: str) -> Tensor:
    """The last bytes of a message's name, which tell its dtype and shape."""
    text = name.encode()[-HEADER:].ljust(HEADER)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
