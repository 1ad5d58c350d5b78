"""The communicator of a part that shares its process with others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.backends import PeerTensor
from pyg_sar.comm.communicator import Communicator, check_src
from pyg_sar.comm.host import Combine, Host, Posted, Started, unpack
from pyg_sar.comm.issuer import Work
from pyg_sar.comm.messages import (
    BROADCAST,
    GATHER,
    Outgoing,
    called_from,
    count,
    count_all,
    failed,
    is_consequence,
    name_of,
    num_bytes,
    pack,
)
from pyg_sar.errors import PygSarError
from pyg_sar.ledger import Label, spoken

TRANSPORT = "parts"
"""The name of transfers between parts, in ledgers."""


class PartWork(Work):
    """A transfer that is carried out when it is waited for."""

    def __init__(self, finish: Callable[[], None], doing: str) -> None:
        super().__init__(None, doing)
        self._finish = finish

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the data is there."""
        if not self.done():
            self._finish()
            self._finish = lambda: None  # Nor is what it received into kept.
            self._end()


def module_in_import() -> str:
    """Returns the name of the module that this thread imports, or ``''``."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        spec: Any = frame.f_globals.get("__spec__")
        if frame.f_code.co_name == "<module>" and getattr(spec, "_initializing", False):
            return str(spec.name)
        frame = frame.f_back
    return ""


class PartCommunicator(Communicator):
    """The communicator of a part, whose rank it is, of a process."""

    backend = TRANSPORT

    def __init__(self, host: Host, part: int) -> None:
        outer = host.outer
        super().__init__(part, host.num_parts, outer.device, outer.timeout)
        self.host = host
        self.place_among(None if outer.across is None else PartAcross(self, outer.across))

    def come(
        self, kind: str, label: Label, shape: str, thing: Any, combine: Combine
    ) -> Callable[[], Any]:
        """Has this part come to its next meeting: :meth:`Host.come`."""
        self._check()
        return self.host.come(self.rank, self.name_of(kind, label, shape), thing, combine)

    def name_of(self, kind: str, label: Label, shape: str) -> str:
        """Names a meeting."""
        unnamed = not label[0] and label[1] == "forward"
        what = called_from(label) if unnamed else spoken(label)
        return f"{kind}{f' [{what}]' if what else ''}, {shape}"

    def _check(self) -> None:
        if self.closed:
            raise PygSarError(
                "This tensor, or model, belongs to a run that has ended: return out.full_tensor(), "
                "or a number, from the function"
            )

    def _post(
        self,
        sends: Sequence[tuple[int, Outgoing]],
        recvs: Sequence[PeerTensor],
        label: Label,
        doing: str,
    ) -> Work:
        where, host = spoken(label), self.host

        def named(tensor: Tensor) -> tuple[str, Tensor]:
            return name_of(where, tensor.dtype, tensor.shape), tensor

        with torch.no_grad():
            packed = {dst: pack(send).clone() for dst, send in sends}
        posted = Posted(
            {dst: named(tensor) for dst, tensor in packed.items() if tensor.numel()},
            {src: named(tensor) for src, tensor in recvs if tensor.numel()},
        )

        def combine(brought: dict[int, Posted]) -> Started:
            with torch.no_grad():
                return host.exchanged(brought, label)

        take = self.come("exchange", label, "rows", posted, combine)
        out, back = ({q: num_bytes(t) for q, (_, t) in way.items()} for way in posted)
        count(self.ledgers, label, out, back, TRANSPORT)

        def finish() -> None:
            found = take()
            with torch.no_grad():
                for src, (name, into) in posted.wanted.items():
                    unpack(found[src, self.rank], name, into, src, self.rank)

        return PartWork(finish, doing)

    def _reduce(self, tensor: Tensor, op: str, label: Label) -> Work:
        target = tensor.detach()

        def combine(brought: dict[int, Tensor]) -> Tensor:
            with torch.no_grad():
                return self.host.reduced(brought, op, label)

        copy = target.clone(memory_format=torch.contiguous_format)
        take = self.come(f"all_reduce ({op})", label, _form(target), copy, combine)
        count_all(self.ledgers, label, num_bytes(copy), num_bytes(copy), TRANSPORT)

        def finish() -> None:
            with torch.no_grad():
                target.copy_(take())

        return PartWork(finish, f"all_reduce ({op})")

    def all_gather(self, tensor: Tensor, *, label: Label = GATHER) -> list[Tensor]:
        copy = pack(tensor).clone()
        take = self.come("all_gather", label, _form(copy), copy, self.host.everyone)
        size = num_bytes(copy)
        count_all(self.ledgers, label, size, size * (self.world_size - 1), TRANSPORT)
        return [found.clone() for found in take()]

    def broadcast(self, tensor: Tensor, src: int = 0, *, label: Label = BROADCAST) -> Tensor:
        if name := module_in_import():
            raise RuntimeError(
                f"the module {name!r} loads a graph, sets a seed, or calls something else that "
                "parts do together, while it is imported: parts of one process import it once, and "
                "would wait for each other. Do it in a function that the script calls, or start a "
                "worker for each part"
            )
        check_src(src, self.world_size, "parts")
        host, target = self.host, tensor.detach()
        worker = host.worker_of[src]

        def combine(brought: dict[int, Tensor]) -> Tensor:
            like = brought[src] if src in brought else next(iter(brought.values()))
            with host.unpaged():
                value = like.clone(memory_format=torch.contiguous_format)
            return host.outer.broadcast(value, worker, label=label)

        take = self.come(f"broadcast from rank {src}", label, _form(target), target, combine)
        found = take()
        if self.rank != src:
            with torch.no_grad():
                target.copy_(found)
        mine, size = self.rank == src, num_bytes(target)
        count_all(self.ledgers, label, size if mine else 0, 0 if mine else size, TRANSPORT)
        return tensor

    def unpaged(self) -> AbstractContextManager[Any]:
        return self.host.unpaged()

    def report(self, error: BaseException, rank: int | None = None) -> None:
        if not is_consequence(error, self.host.speaker(self.rank)):
            self.host.turns.fail(failed(self.rank, error))


class PartAcross(Communicator):
    """The communicator of a part and of the same part of other replicas; ``outer`` is that of the
    processes which host the same parts.

    For each operation all parts of a process meet; the last one to come carries it out for all.
    """

    backend = TRANSPORT

    def __init__(self, part: PartCommunicator, outer: Communicator) -> None:
        super().__init__(outer.rank, outer.world_size, outer.device, outer.timeout)
        self._part, self._outer = part, outer

    def _meet(
        self, kind: str, label: Label, tensor: Tensor, act: Callable[[Tensor], list[Tensor]]
    ) -> Callable[[], list[Tensor]]:
        """Acts on all parts' tensors as one, and returns how this part takes its own."""
        host, copy = self._part.host, pack(tensor).clone()

        def combine(brought: dict[int, Tensor]) -> list[Sequence[Tensor]]:
            own = [brought[part].view(-1) for part in host.parts]
            with host.unpaged():
                found = act(torch.cat(own))
            return [flat.split([one.numel() for one in own]) for flat in found]

        dtype = str(copy.dtype).removeprefix("torch.")
        take = self._part.come(f"{kind} over replicas", label, dtype, copy, combine)
        place = self._part.rank - host.parts.start
        return lambda: [found[place].view(copy.shape).clone() for found in take()]

    def _post(
        self,
        sends: Sequence[tuple[int, Outgoing]],
        recvs: Sequence[PeerTensor],
        label: Label,
        doing: str,
    ) -> Work:
        raise PygSarError(f"{doing}: replicas whose workers host parts send each other no rows")

    def _reduce(self, tensor: Tensor, op: str, label: Label) -> Work:
        target, size = tensor.detach(), num_bytes(tensor)
        kind = f"all_reduce ({op})"
        take = self._meet(
            kind, label, target, lambda flat: [self._outer.all_reduce(flat, op, label=label)]
        )
        count_all(self.ledgers, label, size, size, TRANSPORT)

        def finish() -> None:
            with torch.no_grad():
                target.copy_(take()[0])

        return PartWork(finish, kind)

    def all_gather(self, tensor: Tensor, *, label: Label = GATHER) -> list[Tensor]:
        size = num_bytes(tensor)
        take = self._meet(
            "all_gather", label, tensor, lambda flat: self._outer.all_gather(flat, label=label)
        )
        count_all(self.ledgers, label, size, size * (self.world_size - 1), TRANSPORT)
        return take()

    def broadcast(self, tensor: Tensor, src: int = 0, *, label: Label = BROADCAST) -> Tensor:
        mine, size = self.rank == src, num_bytes(tensor)
        take = self._meet(
            f"broadcast from replica {src}",
            label,
            tensor,
            lambda flat: [self._outer.broadcast(flat, src, label=label)],
        )
        with torch.no_grad():
            tensor.detach().copy_(take()[0])
        count_all(self.ledgers, label, size if mine else 0, 0 if mine else size, TRANSPORT)
        return tensor


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
