"""The communicator's interface, and its two kinds: a single process, and a group of workers."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.comm.backends import OPS, PeerTensor, Transport, TransportError
from pyg_sar.comm.issuer import Issuer, Work
from pyg_sar.comm.messages import (
    BARRIER,
    BROADCAST,
    GATHER,
    OBJECT,
    SUM,
    Outgoing,
    Posts,
    Watch,
    called_from,
    count,
    count_all,
    decode,
    encode,
    num_bytes,
    pack,
    place_in,
)
from pyg_sar.comm.processes import TerminationNotice
from pyg_sar.comm.shared_memory import SharedMemory
from pyg_sar.comm.sharing import Sharing
from pyg_sar.errors import PygSarError
from pyg_sar.ledger import Label, spoken
from pyg_sar.wording import counted


class Communicator(ABC):
    """Transfers between the workers of a group.

    Every rank must call the same operations in the same order (with sizes that fit). They are
    issued by one thread, in that order. After an error the communicator is broken: every
    later operation raises as well. As a context manager it is closed on leaving, and an exception
    that leaves the block is told to the other workers, which then end with it.

    Args:
        rank: Rank of this worker.
        world_size: Number of workers.
        device: Device of this worker.
        timeout: Seconds that an operation may take.

    Attributes:
        replica: Which group of workers this is, of those that train on samples of their own; the
            ``rank`` of a ``DistributedSampler``.
        replicas: How many groups there are; the sampler's ``num_replicas``.
    """

    backend: str
    member, members = "rank", "workers"
    """How errors speak of one and of all."""

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout = timeout
        self.ledgers: list[Any] = []
        self.sharing: Sharing | None = None
        """Operations between workers that read each other's memory, if there are such."""
        self.host: Any = None
        """The process of a part that shares it with others (``host.py``); else ``None``."""
        self.layouts: dict[int, Any] = {}
        """Where nodes lie, by how many they are (``tensors/rows.py``)."""
        self.shared_parameters: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()
        """Who sums a parameter's gradients, and its name (``nn/shared_parameters.py``)."""
        self.learns = False
        """Says if a distributed model computes with gradients, of which a sum will follow."""
        self.drawn = 0
        """Tells the state of the random generators after the last draw of rows of all workers."""
        self.drawn_by_others = 0
        """Tells the states of generators that the user passed, after each of their draws."""
        self.plain = 0
        """Tells what plain tensors held of which this worker took rows (``tensors/rows.py``)."""
        self.noted: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        """Writes into each of these plain tensors, a number."""
        self.beside = 0
        """Tells what numbers and plain tensors operators got beside rows (``node_tensor.py``)."""
        self.call = 0
        """Tells what an operator of rows computes, and of what, while it does (the same place)."""
        self.added_up = 0
        """Tells of which tensors rows were added up (the same place)."""
        self.tables: list[tuple[int, Tensor, Tensor]] = []
        """Plain tables that rows were read of: a checksum, bytes, and which of them were read."""
        self.tables_told = False
        """Says if that checksum has been sent since."""
        self.compares = True
        """Says if that is compared: not by ``verify``, which finds where it differs, nor between
        unlike processors, which round differently."""
        self.in_layer = False
        """Says if a layer computes: modules in it get this worker's rows."""
        self.derivations: Any = None
        """Which ids and masks are the same as others were (``tensors/derivations.py``)."""
        self.told: dict[Any, Any] = {}
        """Answers of PyTorch on operators' arguments (``tensors/node_tensor.py``)."""
        self.serials = itertools.count()
        """Numbers, of which each is given once."""
        self.made_edges: Any = None
        """Facts known of edges that were computed (``nn/made_edges.py``)."""
        self.replica, self.replicas = 0, 1
        self.across: Communicator | None = None
        """The workers of this rank in all replicas, by replica; ``None`` where there is one."""
        self.interrupted = False
        """Says if an exception has ended a pass over edges: rows that others sent for it may still
        be on their way."""
        self.closed = False

    def place_among(self, across: Communicator | None) -> None:
        """Takes in the workers of this rank in all replicas."""
        self.across = across
        if across is not None:
            self.replica, self.replicas = across.rank, across.world_size
            across.ledgers = self.ledgers
            across.member, across.members = "replica", "replicas"

    @property
    def place(self) -> str:
        """Returns which replica and part this is, in words; nothing where there is one replica."""
        rank = self.replica * self.world_size + self.rank
        return place_in(rank, None if self.across is None else self.world_size)

    @property
    def writes(self) -> bool:
        """Says if this is rank 0 of replica 0, which writes what all workers share."""
        return self.rank == self.replica == 0

    def from_everyone(self, obj: Any) -> list[Any]:
        """Returns every worker's object, replica by replica; see :meth:`all_gather_object`."""
        found = self.all_gather_object(obj)
        replicas = [found] if self.across is None else self.across.all_gather_object(found)
        return [said for replica in replicas for said in replica]

    def average(self, tensor: Tensor) -> Tensor:
        r"""Returns the mean over the replicas, :math:`\frac{1}{R} \sum_r t_r`. Collective.

        For what depends on a replica's own sample: a loss that a line search or a plateau rule
        looks at, or a metric. Gradients are averaged already.

        Args:
            tensor: Of floating point, of the same shape and dtype on all workers, and the same
                values on those of a replica.

        Returns:
            A new tensor, without a gradient.

        Raises:
            TypeError: The tensor isn't of floating point.
        """
        if not tensor.is_floating_point():
            raise TypeError(f"average() takes floating-point tensors (got {tensor.dtype})")
        total = tensor.detach().clone()
        if self.across is not None:
            self.across.all_reduce(total, label=("", "", "average over replicas"))
        return total / self.replicas

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, "
            f"backend={self.backend!r}, device='{self.device}')"
        )

    # Halo rows ---------------------------------------------------------------

    def exchange(
        self, send: Outgoing, dst: int, recv: Tensor | None, src: int, *, label: Label
    ) -> Work:
        """Sends to one rank while receiving from one, without waiting.

        Both sides know the sizes: an empty tensor isn't sent, and must not be expected.

        Args:
            send: What rank ``dst`` gets; a function is called on the issuing thread, when the
                transfer starts. Must not change before the transfer ended.
            dst: Rank to send to.
            recv: Where to put what comes from rank ``src``: contiguous, of its very size and dtype.
            src: Rank to receive from.
            label: (layer, phase, kind) for the ledgers.

        Returns:
            The handle to wait for.

        Raises:
            ValueError: ``recv`` isn't contiguous, or a rank isn't another one of the group.
        """
        sends: list[tuple[int, Outgoing]] = []
        recvs: list[PeerTensor] = []
        if send is not None:
            self._check_peer("dst", dst)
            sends.append((dst, send))
        if recv is not None:
            self._check_peer("src", src)
            recvs.append((src, self._check_recv(recv, src)))
        return self._post(sends, recvs, label, f"exchange with ranks {dst} (to) and {src} (from)")

    def exchange_all(
        self, sends: Sequence[Outgoing], recvs: Sequence[Tensor | None], *, label: Label
    ) -> Work:
        """Exchanges with all ranks at once: one entry per rank, the own one ``None``."""
        for name, entries in (("sends", sends), ("recvs", recvs)):
            if len(entries) != self.world_size:
                raise ValueError(
                    f"'{name}' needs one entry per rank ({self.world_size}), got {len(entries)}"
                )
            if entries[self.rank] is not None:
                raise ValueError(f"'{name}[{self.rank}]' is this rank's own entry: must be None")
        outgoing = [(rank, send) for rank, send in enumerate(sends) if send is not None]
        incoming = [(r, self._check_recv(t, r)) for r, t in enumerate(recvs) if t is not None]
        to, come = (", ".join(str(rank) for rank, _ in way) for way in (outgoing, incoming))
        doing = f"exchange with ranks {to or 'none'} (to) and {come or 'none'} (from)"
        return self._post(outgoing, incoming, label, doing)

    def _check_peer(self, name: str, peer: int) -> None:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise ValueError(
                f"'{name}'={peer} must be another rank than {self.rank} of "
                f"{counted(self.world_size, 'workers')}"
            )

    def _check_recv(self, recv: Tensor, src: int) -> Tensor:
        if not recv.is_contiguous():
            raise ValueError(
                f"rank {self.rank}: the tensor to receive into from rank {src} (shape "
                f"{tuple(recv.shape)}, strides {recv.stride()}) isn't contiguous; receive into a "
                f"contiguous one and copy"
            )
        return recv

    @abstractmethod
    def _post(
        self,
        sends: Sequence[tuple[int, Outgoing]],
        recvs: Sequence[PeerTensor],
        label: Label,
        doing: str,
    ) -> Work:
        """Queues an exchange."""

    # Collectives -------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, label: Label = SUM) -> Tensor:
        r"""Reduces over all ranks, in place: :math:`t \leftarrow \sum_p t_p` (or max, min).

        All ranks get the same bits. The sum of booleans is "any"; 16-bit floats are summed in
        32 bits on the CPU.

        Args:
            tensor: Of the same shape and dtype on every rank.
            op: ``'sum'``, ``'max'`` or ``'min'``.
            label: (layer, phase, kind) for the ledgers.

        Returns:
            ``tensor``.
        """
        self.all_reduce_async(tensor, op, label=label).wait()
        return tensor

    def all_reduce_async(self, tensor: Tensor, op: str = "sum", *, label: Label = SUM) -> Work:
        """Starts :meth:`all_reduce` without waiting."""
        if op not in OPS:
            raise ValueError(f"'op' must be one of {', '.join(OPS)}; got {op!r}")
        return self._reduce(tensor, op, label)

    @abstractmethod
    def _reduce(self, tensor: Tensor, op: str, label: Label) -> Work: ...

    @abstractmethod
    def all_gather(self, tensor: Tensor, *, label: Label = GATHER) -> list[Tensor]:
        """Returns every rank's tensor in rank order; shapes and dtypes must be equal."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0, *, label: Label = BROADCAST) -> Tensor:
        """Overwrites ``tensor`` with the one of rank ``src``, in place; returns it."""

    def all_gather_object(self, obj: Any, *, label: Label = OBJECT) -> list[Any]:
        """Returns every rank's object in rank order. They travel as JSON (tuples become lists).

        Raises:
            TypeError: When ``obj`` has no JSON form.
        """
        data = encode(obj)
        sizes = self.all_gather(torch.tensor([data.numel()], device=self.device), label=label)
        largest = int(max(sizes))
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: data.numel()] = data
        everyone = self.all_gather(padded.to(self.device), label=label)
        return [decode(t[: int(n)]) for t, n in zip(everyone, sizes, strict=True)]

    def broadcast_object(self, obj: Any = None, src: int = 0, *, label: Label = OBJECT) -> Any:
        """Returns rank ``src``'s object; see :meth:`all_gather_object`."""
        data = encode(obj) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()], device=self.device)
        self.broadcast(size, src, label=label)
        buffer = data if self.rank == src else torch.empty(int(size), dtype=torch.uint8)
        return decode(self.broadcast(buffer.to(self.device), src, label=label))

    def barrier(self) -> None:
        """Waits until every rank came here (and all earlier operations ended)."""
        self.all_reduce(torch.zeros(1, device=self.device), label=BARRIER)

    def settle(self) -> None:
        """Drops what is left of passes that an exception has ended on all workers. Collective."""
        self.interrupted = False

    def unpaged(self) -> AbstractContextManager[Any]:
        """Makes tensors that stay in memory, also where a part's others wait in a store."""
        return nullcontext()

    # Its end -----------------------------------------------------------------

    def report(self, error: BaseException, rank: int | None = None) -> None:
        """Tells the other workers that this one fails by ``error``, so that they end promptly.

        Args:
            error: By what.
            rank: Whose error it is: a part that this worker hosts. By default its own.
        """
        if self.across is not None:
            self.across.report(error)

    def close(self) -> None:
        """Ends it, after what is queued. Never raises."""
        self.closed = True
        if self.across is not None:
            self.across.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.report(error)
        self.close()


class LocalCommunicator(Communicator):
    """The communicator of a single process: there is nobody to talk to."""

    backend = "local"

    def __init__(self, device: torch.device | None = None, timeout: float = 1800.0) -> None:
        super().__init__(0, 1, device or torch.device("cpu"), timeout)

    def _post(
        self,
        sends: Sequence[tuple[int, Outgoing]],
        recvs: Sequence[PeerTensor],
        label: Label,
        doing: str,
    ) -> Work:
        return Work.completed()

    def _reduce(self, tensor: Tensor, op: str, label: Label) -> Work:
        return Work.completed()

    def all_gather(self, tensor: Tensor, *, label: Label = GATHER) -> list[Tensor]:
        return [tensor.detach().clone()]

    def broadcast(self, tensor: Tensor, src: int = 0, *, label: Label = BROADCAST) -> Tensor:
        check_src(src, 1)
        return tensor


class GroupCommunicator(Communicator):
    """A communicator over a transport.

    Args:
        transport: What carries the tensors.
        watch: What finds out who failed.
        timeout: Seconds that an operation may take.
        local_peers: Workers whose memory this one reads.
        posts: Where messages between all workers are noted; by default the transport's.
        main: The communicator of this worker whose issuing thread and watch this one uses, so that
            the operations of both are in the order of the calls; it is closed with that one.
    """

    def __init__(
        self,
        transport: Transport,
        watch: Watch,
        timeout: float,
        local_peers: SharedMemory | None = None,
        posts: Posts | None = None,
        main: GroupCommunicator | None = None,
    ) -> None:
        super().__init__(transport.rank, transport.world_size, transport.device, timeout)
        self.backend = transport.name
        self._transport, self._transports = transport, [transport]
        self._watch = watch
        self._local_peers = local_peers
        self._main = main
        self._issuer: Issuer
        if main is not None:
            self._issuer = main._issuer
            main._transports.append(transport)
            return
        name = f"pyg_sar issuer {self.rank}"
        self._issuer = Issuer(name, timeout, self._diagnose, self._abort)
        if local_peers is not None:
            local_peers.posts = transport.posts
            self.sharing = Sharing(local_peers, self.rank, self._issuer, self.ledgers)
        watch.start(self._issuer.fail, self._issuer.progress, posts or transport.posts)
        self._notice = TerminationNotice(self._explain_termination)
        self._notice.install()

    def _post(
        self,
        sends: Sequence[tuple[int, Outgoing]],
        recvs: Sequence[PeerTensor],
        label: Label,
        doing: str,
    ) -> Work:
        ledgers = list(self.ledgers)
        shared = self.sharing

        def task() -> None:
            packed = [(peer, pack(send)) for peer, send in sends]
            full = [(peer, tensor) for peer, tensor in packed if tensor.numel()]
            wanted = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
            if shared is not None:
                shared.exchange(self._transport, full, wanted, ledgers, label)
                return
            self._transport.exchange(full, wanted, spoken(label))
            out, back = ({q: num_bytes(t) for q, t in tensors} for tensors in (full, wanted))
            count(ledgers, label, out, back, self.backend)

        return self._issuer.submit(task, label, doing)

    def _reduce(self, tensor: Tensor, op: str, label: Label) -> Work:
        ledgers = list(self.ledgers)
        shared = self.sharing
        unnamed = not label[0] and label[1] == "forward"
        where = f"{called_from(label) if unnamed else spoken(label)} ({op})"

        def task() -> None:
            carrier = shared if shared is not None and shared.reduces(tensor) else self._transport
            with _as_a_whole(tensor) as whole:
                if whole.numel():
                    carrier.all_reduce(whole, op, where)
            size = num_bytes(whole)
            count_all(ledgers, label, size, size, carrier.name)

        return self._issuer.submit(task, label, f"all_reduce ({op})")

    def all_gather(self, tensor: Tensor, *, label: Label = GATHER) -> list[Tensor]:
        ledgers = list(self.ledgers)
        result: list[Tensor] = []

        def task() -> None:
            whole = pack(tensor)
            if whole.numel():
                result.extend(self._transport.all_gather(whole, spoken(label)))
            else:
                result.extend(whole.clone() for _ in range(self.world_size))
            size = num_bytes(whole)
            count_all(ledgers, label, size, size * (self.world_size - 1), self.backend)

        self._issuer.submit(task, label, "all_gather").wait()
        for found in result:
            if found.is_cuda:  # It was made on the issuer's stream, and will be used on this one.
                found.record_stream(torch.cuda.current_stream(found.device))
        return result

    def broadcast(self, tensor: Tensor, src: int = 0, *, label: Label = BROADCAST) -> Tensor:
        check_src(src, self.world_size)
        ledgers = list(self.ledgers)

        def task() -> None:
            with _as_a_whole(tensor) as whole:
                if whole.numel():
                    self._transport.broadcast(whole, src, f"{spoken(label)} from rank {src}")
            size = num_bytes(whole)
            mine = self.rank == src
            count_all(ledgers, label, size if mine else 0, 0 if mine else size, self.backend)

        self._issuer.submit(task, label, f"broadcast from rank {src}").wait()
        return tensor

    def settle(self) -> None:
        super().settle()
        self.barrier()
        if self._local_peers is not None:
            self._issuer.submit(self._local_peers.drop_unread, BARRIER, "settling").wait()
        self.barrier()  # Nobody sends rows of the next pass before.

    # Failure -----------------------------------------------------------------

    def _abort(self) -> None:
        if self._local_peers is not None:
            self._local_peers.abort()
        for transport in self._transports:
            transport.abort()

    def _diagnose(self, error: BaseException, doing: str) -> BaseException:
        if isinstance(error, TransportError | TimeoutError):
            reason = self._watch.diagnose(error, doing)
            reason.__cause__ = error
            return reason
        # Packing failed: this worker's own mistake, whose type and traceback are to be kept.
        self._watch.report(error)
        return error

    def check(self) -> None:
        """Raises the error that broke this communicator, if one has."""
        self._issuer.check()

    def _explain_termination(self) -> PygSarError | None:
        error = self._watch.cause()
        if error is not None:
            self._issuer.fail(error)
        return error

    def report(self, error: BaseException, rank: int | None = None) -> None:
        self._watch.report(error, rank)
        self._issuer.fail(error)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._main is not None:
            return
        self._issuer.close()
        self._watch.close()
        self._notice.remove()
        if self._local_peers is not None:
            self._local_peers.close()
        # What is under way in a broken backend may never end: leave it to the process's end.
        if self._issuer.broken is None:
            for transport in reversed(self._transports):
                transport.close()


@contextmanager
def _as_a_whole(tensor: Tensor) -> Iterator[Tensor]:
    """Gives a tensor's values in one piece, to be changed in place."""
    target = tensor.detach()
    whole = target if target.is_contiguous() else target.contiguous()
    yield whole
    if whole is not target:
        target.copy_(whole)


def check_src(src: int, world_size: int, members: str = "workers") -> None:
    """Raises ``ValueError`` on a rank to broadcast from that is none."""
    if not 0 <= src < world_size:
        raise ValueError(f"'src'={src} must be a rank of the {counted(world_size, members)}")
