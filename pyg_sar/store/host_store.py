"""Keeps a GPU's tensors of parts that wait in host memory, where copies are fastest: pinned.

A process that computes several parts of a graph in turn needs one part's tensors at a time on the
device. When a part's turn ends, the storages that its operators made there and that are still alive
are copied to the host and their memory on the device is freed; when its next turn begins they get
memory again and are filled. The storages stay the same objects, so tensors, views, what autograd
has saved, parameters and states of optimizers need not know.

[Note: which storages] A dispatch mode on each part's thread sees the operators. It notes the
storages that they make, by weak references. Before an operator runs, the mode brings in what it is
given and is out: what one part made and another one reads, as gradients of rows. At the end of the
turn this goes out again.

[Note: one stream] All copies are on the current stream, behind the operators of the turn, and one
wait for it stands between the last copy and the first storage that is freed. Whatever has not ended
by then has not begun either: transfers between processes use memory that is made in
:meth:`HostStore.unpaged`.

Rules:

1. All that is alive moves at each turn, whether it was changed or not: a kernel that writes through
   a pointer is not seen by the mode.
2. What is not seen being made stays where it is: tensors of before the first turn, storages of
   fewer than ``SMALLEST`` bytes, those that can't change their size (of NumPy, of files, of others'
   memory), and those made in :meth:`HostStore.unpaged`.
3. A pointer that someone else keeps over the end of a turn (DLPack, a CUDA graph) is not followed.
4. Only the thread of a part may use its tensors. Its backward passes run on that thread, too
   (:mod:`pyg_sar.comm.hosting` sees to it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_sar.errors import StoreError

PINNED = "pinned"
"""The ``store=`` that means pinned host memory."""
SMALLEST = 1 << 12
"""Bytes of the smallest storage that moves."""
DEVICES = ("cuda",)
"""Types of devices whose tensors can wait on the host."""


@dataclass(slots=True)
class _Noted:
    """A storage that a part's operators made."""

    weak: StorageWeakRef
    arena: int
    size: int = 0
    host: Tensor | None = None  # its bytes, while it is out

    def storage(self) -> UntypedStorage | None:
        """Returns the storage, if it is still alive."""
        if self.weak.expired():
            return None
        found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return found


class HostStore:
    """Keeps the tensors of waiting parts on the host. See the module's rules.

    Args:
        parts: Parts of this process.
        device: Where they compute.

    Attributes:
        memory: No limit is kept: what one part's turn needs is on the device.
        rows: No file of rows: published rows are in host memory.

    Raises:
        ValueError: The device is none that tensors can be moved out of.
    """

    memory = None
    rows = None
    directory = PINNED

    def __init__(self, parts: int, device: torch.device) -> None:
        if device.type not in DEVICES:
            raise ValueError(
                f"store={PINNED!r} moves tensors of a GPU to host memory, and this worker computes "
                f"on {device}: pass a folder instead, or call pyg_sar.init(device='cuda') before"
            )
        self.device = torch.empty(0, device=device).device  # with its number
        self._pin = device.type == "cuda"
        self._noted: dict[int, _Noted] = {}
        self._out: set[int] = set()
        self._modes: dict[int, _Notes] = {}
        self._turn: int | None = None
        self._noting, self._enough = False, 1024
        self._guests: set[int] = set()
        self._bytes = {"bytes_read": 0, "bytes_written": 0, "demand_bytes": 0}
        self._peak = 0

    # Turns -------------------------------------------------------------------

    def begin(self, arena: int) -> None:
        """Begins a part's turn, on its thread: brings in all that is its. Arenas count from 0."""
        if arena not in self._modes:
            self._modes[arena] = _Notes(self, arena)
            self._modes[arena].__enter__()
        for key in [key for key in self._out if self._noted[key].arena == arena]:
            self._fill(key)
        self._turn, self._noting = arena, True

    def end(self) -> None:
        """Ends the turn: moves out what is the part's, and what it had of others."""
        arena, self._turn, self._noting = self._turn, None, False
        self._forget_dead()
        going = []
        for key, noted in self._noted.items():
            storage = None if key in self._out else noted.storage()
            if storage is None or not storage.resizable():
                continue
            if noted.arena == arena or key in self._guests:
                going.append((key, noted, storage))
        self._guests.clear()
        self._peak = max(self._peak, sum(storage.nbytes() for *_, storage in going))
        self._move_out(going)

    def leave(self, arena: int) -> None:
        """Ends what a part's thread does here, behind its last turn; on its thread."""
        mode = self._modes.pop(arena, None)
        if mode is not None:
            mode.__exit__(None, None, None)

    def close(self) -> None:
        """Brings in all that is still alive. It stays."""
        for key in list(self._out):
            self._fill(key)
        self._noted.clear()
        self._noting = False

    def check(self) -> None:
        """Nothing can be exceeded."""

    @contextmanager
    def unpaged(self, size: int = 0) -> Iterator[None]:
        """Makes tensors that stay: for all parts, and for the network, in whatever ``size``."""
        before, self._noting = self._noting, False
        try:
            yield
        finally:
            self._noting = before

    # Storages ----------------------------------------------------------------

    def note(self, tensor: Tensor, known: set[int], arena: int) -> None:
        """Notes what an operator of a part made in its turn, of memory that was not ``known``."""
        if not self._noting or self._turn != arena or not self._has_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in known or key in self._noted or storage.nbytes() < SMALLEST:
            return
        self._noted[key] = _Noted(StorageWeakRef(storage), arena)
        if len(self._noted) > self._enough:
            self._forget_dead()
            self._enough = max(1024, 2 * len(self._noted))

    def bring(self, tensor: Tensor) -> int:
        """Brings in what an operator is given; returns which storage it is, or 0."""
        if not self._has_memory(tensor):
            return 0
        key: int = tensor.untyped_storage()._cdata
        if key in self._out:
            self._bytes["demand_bytes"] += self._fill(key)
            self._guests.add(key)
        return key

    def _has_memory(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and tensor.layout == torch.strided and _is_plain(tensor)

    def _fill(self, key: int) -> int:
        noted = self._noted[key]
        self._out.discard(key)
        storage, host, noted.host = noted.storage(), noted.host, None
        if storage is None or host is None:
            return 0
        with _unseen():
            storage.resize_(noted.size)
            _as_bytes(storage, self.device).copy_(host, non_blocking=True)
        self._bytes["bytes_read"] += noted.size
        return noted.size

    def _move_out(self, going: list[tuple[int, _Noted, UntypedStorage]]) -> None:
        """See [Note: one stream]."""
        with _unseen():
            for _, noted, storage in going:
                noted.size = storage.nbytes()
                noted.host = torch.empty(noted.size, dtype=torch.uint8, pin_memory=self._pin)
                noted.host.copy_(_as_bytes(storage, self.device), non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
                _free_workspaces()
            for key, noted, storage in going:
                storage.resize_(0)
                self._out.add(key)
                self._bytes["bytes_written"] += noted.size

    def _forget_dead(self) -> None:
        for key in [key for key, noted in self._noted.items() if noted.weak.expired()]:
            self._out.discard(key)
            del self._noted[key]

    # What is known of it ------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Bytes moved so far (``bytes_read``: to the device), and the most that went out at once.

        ``demand_bytes`` are those of what one part made and another one read.
        """
        return {**self._bytes, "peak_resident_bytes": self._peak}

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Returns the device's refusal with the remedy; other errors as they are."""
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        cause = str(error).partition("\n")[0]
        return StoreError(
            f"store={PINNED!r}: a part's turn needs more memory than {self.device} has ({cause}). "
            "Cut the graph into more parts (pyg-sar partition --parts)"
        )


class _Notes(TorchDispatchMode):
    """See [Note: which storages]."""

    def __init__(self, store: HostStore, arena: int) -> None:
        super().__init__()
        self.store, self.arena = store, arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        store, kwargs = self.store, kwargs or {}
        for kind in types:
            if not _is_plain_type(kind):  # What it stands for comes here by operators of its own.
                with self:
                    return kind.__torch_dispatch__(func, types, args, kwargs)
        known = {
            store.bring(given) for given in tree_leaves((args, kwargs)) if isinstance(given, Tensor)
        }
        out = func(*args, **kwargs)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                store.note(made, known, self.arena)
        return out


def _is_plain(tensor: Tensor) -> bool:
    return _is_plain_type(type(tensor))


def _is_plain_type(kind: type) -> bool:
    """False for tensors that stand for others and have no memory of their own."""
    dispatch: Any = Tensor.__torch_dispatch__
    return bool(kind.__torch_dispatch__ is dispatch)  # type: ignore[attr-defined]


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _free_workspaces() -> None:
    """Frees what cuBLAS keeps for each thread that multiplied matrices: 32 MiB on recent GPUs."""
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()


@contextmanager
def _unseen() -> Iterator[None]:
    """Without gradients, modes and subclasses."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        yield
