"""The libraries that carry tensors between processes.

A transport's methods block; the communicator calls them from its issuing thread alone.

[Note: messages that don't fit] gloo ends the process when a message is larger than what the
receiver made ready for it, and takes a smaller one, or another one of its size, for the right one.
So each message has a tag made of its name (operation, dtype, shape): one that isn't expected is
never received, both sides wait, and the watch says what for. Its collectives have no tags: small
ones are therefore exchanges of all with all, summed in the order of ranks by everyone, and before
a large one all exchange a byte with a tag of its name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_sar.comm.environment import WorkerInfo
from pyg_sar.comm.messages import MEET, RECEIVE, SEND, Posts, name_of
from pyg_sar.comm.processes import interface_to
from pyg_sar.errors import PygSarError
from pyg_sar.wording import counted

PeerTensor = tuple[int, Tensor]
"""(peer, contiguous tensor)"""

TAGS = 1 << 30
"""The first tag of a name's; all are below twice that."""
ABORT_TAG = 1 << 20
"""Nobody ever sends with this tag."""
SMALL_SUM = 1 << 14  # Bytes up to which all send all to all, in one step.
MOST_BETWEEN_TWO = 1 << 20  # The same between two ranks; more would take memory twice.

OPS = ("sum", "max", "min")

_INTERFACE = "GLOO_SOCKET_IFNAME"


class TransportError(PygSarError):
    """The backend reported a failed transfer; why is still to be found out."""


def to_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor's memory as a flat uint8 tensor: any dtype can travel so."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Reduces tensors in their order: the same bits wherever it is done.

    The sum of truth values is "any"; floats of 16 bits are summed in 32.
    """
    first = tensors[0]
    if op != "sum" or first.dtype == torch.bool:
        stacked = torch.stack(list(tensors))
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    if first.is_floating_point() and first.element_size() == 2:
        first = first.float()
    total = first.clone()
    for other in tensors[1:]:
        total += other
    return total.to(tensors[0].dtype)


# Through torch.distributed ###################################################


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Holds what a transport is opened with.

    ``store`` is where the workers meet, ``timeout`` the seconds that an operation may take. The
    workers are divided into ``groups``, each given by its ranks; by default they are one. ``world``
    is the group of all workers, where another transport has it already.
    """

    info: WorkerInfo
    store: dist.Store | None
    timeout: float
    device: torch.device
    groups: Sequence[Sequence[int]] = ()
    world: Any = None


class Transport:
    """Carries tensors between ranks, by any backend of :mod:`torch.distributed`.

    ``where`` names an operation; it is the same on all ranks that take part.

    Where the script has a process group, the transport's is made beside it. Otherwise
    ``torch.distributed`` looks as in one process: a library that finds a default group there
    (torchmetrics, say) would add up over the workers what each of them has of the whole graph.
    """

    name: ClassVar[str]
    stand_in: ClassVar[dict[torch.dtype, torch.dtype]] = {torch.bool: torch.uint8}
    """dtypes that the backend can't (or shouldn't) reduce: which one is used instead."""
    tagged: ClassVar[bool] = False
    """True where messages have tags made of their names."""

    def __init__(self, setting: Setting) -> None:
        scripts, world = dist.group.WORLD, setting.world
        self.own: list[Any] = []
        limit = timedelta(seconds=setting.timeout)
        if world is not None:
            dist.group.WORLD = world
        elif scripts is None:
            dist.init_process_group(timeout=limit, **self.arguments(setting))
            self.own.append(dist.group.WORLD)
        self.world, rank = dist.group.WORLD, dist.get_rank()
        self.members: Sequence[int] = range(dist.get_world_size())
        everyone = [] if self.own else [self.members]
        try:
            for members in setting.groups or everyone:  # All make all groups, in one order.
                made = dist.new_group(list(members), backend=self.name, timeout=limit)
                if rank in members:
                    self.own.append(made)
                    self.members = members
        finally:
            dist.group.WORLD = scripts
        self.group: dist.ProcessGroup = self.own[-1]
        self.rank, self.world_size = self.members.index(rank), len(self.members)
        self.device, self.posts = setting.device, Posts()

    @classmethod
    def check(cls) -> None:
        """Raises ``ValueError`` where this backend isn't available."""
        if not dist.is_backend_available(cls.name):
            raise unavailable(cls.name, f"a PyTorch built with {cls.name}")

    @classmethod
    def choose_device(cls, info: WorkerInfo) -> torch.device:
        """Returns the device of a worker."""
        return torch.device("cpu")

    def arguments(self, setting: Setting) -> dict[str, Any]:
        """Returns the arguments of ``init_process_group``."""
        if setting.store is None:
            return {"backend": self.name}
        return {
            "backend": self.name,
            "store": setting.store,
            "rank": setting.info.rank,
            "world_size": setting.info.world_size,
        }

    def home(self) -> torch.device:
        """Returns the device whose memory the backend reads and writes."""
        return torch.device("cpu")

    def stage(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, or a copy of it that the backend can read."""
        buffer = self.buffer(tensor)
        return tensor if buffer is tensor else buffer.copy_(tensor)

    def buffer(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, or memory of its size that the backend can write."""
        home = self.home()
        if tensor.device == home:
            return tensor
        # A GPU copies fastest from and to pinned memory, which PyTorch keeps for the next copies.
        pin = tensor.is_cuda and home.type == "cpu"
        return torch.empty_like(tensor, device=home, pin_memory=pin)

    def exchange(
        self, sends: Sequence[PeerTensor], recvs: Sequence[PeerTensor], where: str = ""
    ) -> None:
        """Sends and receives all tensors at once; returns when all have arrived."""
        outgoing = [(peer, to_bytes(self.stage(tensor))) for peer, tensor in sends]
        landing = [(self.buffer(tensor), tensor) for _, tensor in recvs]
        incoming = [
            (peer, to_bytes(buffer[0])) for (peer, _), buffer in zip(recvs, landing, strict=True)
        ]
        ways = (RECEIVE, recvs), (SEND, sends)
        names = [(way, p, name_of(where, t.dtype, t.shape)) for way, all in ways for p, t in all]
        with self.posts.waiting(names) as posts, _reported():
            tags = [TAGS + post.mark if self.tagged else 0 for post in posts]
            self.transfer(outgoing, incoming, tags)
        for buffer, target in landing:
            if buffer is not target:
                target.copy_(buffer)

    def transfer(
        self, sends: Sequence[PeerTensor], recvs: Sequence[PeerTensor], tags: Sequence[int]
    ) -> None:
        """Posts all (``tags``: first of what is received), then waits for all."""
        posts = zip(tags, [*recvs, *sends], strict=True)
        works = []
        for k, (tag, (peer, tensor)) in enumerate(posts):
            post = dist.irecv if k < len(recvs) else dist.isend
            works.append(post(tensor, self.members[peer], group=self.group, tag=tag))
        for work in works:
            if work is not None:
                work.wait()

    @contextlib.contextmanager
    def together(self, tensor: Tensor, where: str) -> Iterator[None]:
        """Waits for all in the block, for a collective."""
        name = name_of(where, tensor.dtype, tensor.shape)
        with self.posts.waiting([(MEET, peer, name) for peer in self.others()]), _reported():
            yield

    def others(self) -> list[int]:
        """Returns all other ranks."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def all_reduce(self, tensor: Tensor, op: str, where: str = "") -> None:
        """Reduces a contiguous tensor over all ranks, in place."""
        staged = self.stage(tensor)
        dtype = self.stand_in.get(tensor.dtype, tensor.dtype)
        wide = staged if dtype == staged.dtype else staged.to(dtype)
        # The sum of truth values is "any", which uint8 would wrap around.
        how = "max" if tensor.dtype == torch.bool and op == "sum" else op
        with self.together(wide, where):
            dist.all_reduce(wide, getattr(dist.ReduceOp, how.upper()), group=self.group)
        if wide is not tensor:
            tensor.copy_(wide)

    def all_gather(self, tensor: Tensor, where: str = "") -> list[Tensor]:
        """Returns every rank's tensor, of equal shapes, in rank order."""
        staged = self.stage(tensor)
        out = [torch.empty_like(staged) for _ in range(self.world_size)]
        with self.together(staged, where):
            dist.all_gather([to_bytes(t) for t in out], to_bytes(staged), group=self.group)
        return [t.to(tensor.device) for t in out]

    def broadcast(self, tensor: Tensor, src: int, where: str = "") -> None:
        """Overwrites a contiguous tensor with the one of rank ``src``."""
        staged = self.stage(tensor)
        with self.together(staged, where):
            dist.broadcast(to_bytes(staged), self.members[src], group=self.group)
        if staged is not tensor:
            tensor.copy_(staged)

    def abort(self) -> None:
        """Gives up what is under way, without waiting for it."""

    def close(self) -> None:
        """Frees what it holds."""
        for group in reversed(self.own):
            with contextlib.suppress(ValueError):  # The script has ended all groups.
                dist.destroy_process_group(group)


class GlooTransport(Transport):
    """gloo: CPU, over TCP. Tensors of other devices are staged through CPU memory."""

    name = "gloo"
    tagged = True
    # Half precision is summed in float32: W roundings become one.
    stand_in: ClassVar[dict[torch.dtype, torch.dtype]] = {
        torch.bool: torch.uint8,
        torch.int16: torch.int32,
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
    }

    def __init__(self, setting: Setting) -> None:
        with _interface(setting.info.address):
            super().__init__(setting)

    # See [Note: messages that don't fit].

    def all_gather(self, tensor: Tensor, where: str = "") -> list[Tensor]:
        staged = self.stage(tensor)
        out = [torch.empty_like(staged) for _ in self.others()]
        sends = [(peer, staged) for peer in self.others()]
        self.exchange(sends, list(zip(self.others(), out, strict=True)), where)
        out.insert(self.rank, staged.clone())
        return [found.to(tensor.device) for found in out]

    def all_reduce(self, tensor: Tensor, op: str, where: str = "") -> None:
        # Between two ranks as many bytes travel either way: it is one step in place of three.
        limit = SMALL_SUM if self.world_size > 2 else MOST_BETWEEN_TWO
        if tensor.numel() * tensor.element_size() > limit:
            self._agree(tensor, where)
            super().all_reduce(tensor, op, where)
            return
        tensor.copy_(reduced(self.all_gather(tensor, where), op))

    def broadcast(self, tensor: Tensor, src: int, where: str = "") -> None:
        self._agree(tensor, where)
        super().broadcast(tensor, src, where)

    def _agree(self, tensor: Tensor, where: str) -> None:
        """Waits until all are about to do the same."""
        name = name_of(where, tensor.dtype, tensor.shape)
        byte = torch.zeros(1, dtype=torch.uint8)
        sends = [(peer, byte) for peer in self.others()]
        self.exchange(sends, [(peer, byte.clone()) for peer in self.others()], name)

    def abort(self) -> None:
        # gloo has no call for it, but a receive that times out closes all connections of the
        # group, which ends whatever waits for them.
        for peer in self.others():
            with contextlib.suppress(RuntimeError, ValueError):
                source, tag = self.members[peer], ABORT_TAG
                work = dist.irecv(torch.empty(1), source, group=self.group, tag=tag)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))


class NcclTransport(Transport):
    """NCCL: one GPU per worker."""

    name = "nccl"
    stand_in: ClassVar[dict[torch.dtype, torch.dtype]] = {
        torch.bool: torch.uint8,
        torch.int16: torch.int32,
    }

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # NCCL connects at the first operation, which must be one that all ranks take part in.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    @classmethod
    def check(cls) -> None:
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise unavailable(cls.name, "a PyTorch built with NCCL, and CUDA devices")

    @classmethod
    def choose_device(cls, info: WorkerInfo) -> torch.device:
        number = info.local_rank
        if number is None:
            if info.local_world_size > 1 and torch.cuda.device_count() > 1:
                raise ValueError(
                    "LOCAL_RANK is not set, so backend 'nccl' can't choose a GPU. Start the "
                    "workers with torchrun, or pass device= to init()"
                )
            number = 0
        if number >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK={number}, but this host has "
                f"{counted(torch.cuda.device_count(), 'CUDA devices')}. Start fewer workers per "
                "host, or use backend='gloo'"
            )
        return torch.device("cuda", number)

    def arguments(self, setting: Setting) -> dict[str, Any]:
        torch.cuda.set_device(setting.device)
        return {**super().arguments(setting), "device_id": setting.device}

    def home(self) -> torch.device:
        return self.device

    def transfer(
        self, sends: Sequence[PeerTensor], recvs: Sequence[PeerTensor], tags: Sequence[int]
    ) -> None:
        ways = (dist.irecv, recvs), (dist.isend, sends)
        posts = [
            dist.P2POp(way, t, self.members[p], self.group) for way, all in ways for p, t in all
        ]
        for work in dist.batch_isend_irecv(posts) if posts else ():
            work.wait()

    def abort(self) -> None:
        self.group.abort()


class CclTransport(Transport):
    """Intel oneCCL by ``oneccl_bindings_for_pytorch``, which ended with torch 2.8."""

    name = "ccl"

    @classmethod
    def check(cls) -> None:
        try:
            # Importing it is what registers the backend.
            importlib.import_module("oneccl_bindings_for_pytorch")
        except ImportError as error:
            raise ValueError(
                f"backend='ccl' needs the package oneccl_bindings_for_pytorch, which Intel ended "
                f"with torch 2.8 (this is torch {torch.__version__}). Use backend='gloo', which "
                "every PyTorch has. PyTorch's own successor for Intel GPUs, 'xccl', is not "
                "supported here yet"
            ) from error


TRANSPORTS: dict[str, type[Transport]] = {
    kind.name: kind for kind in (GlooTransport, NcclTransport, CclTransport)
}


def unavailable(name: str, needs: str) -> ValueError:
    """Returns the error for a backend that isn't there."""
    return ValueError(
        f"backend={name!r} needs {needs}, which is not here (torch {torch.__version__}). "
        f"Use backend='gloo', which every PyTorch has"
    )


@contextlib.contextmanager
def _interface(master: str) -> Iterator[None]:
    """Has gloo connect from the interface by which the first worker is reached.

    Left alone it takes whatever the host's own name resolves to, which may be the loopback, or
    nothing. ``GLOO_SOCKET_IFNAME``, if set, is the user's choice.
    """
    name = interface_to(master) if master else None
    if name is None or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Marks errors of the backend: they tell that a transfer failed, never why."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(str(error).partition("\n")[0]) from error
