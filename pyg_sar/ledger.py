"""Counts what was sent, fetched and kept: bytes, resident remote rows, peak memory of a worker."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pyg_sar.wording import Shown, aligned, counted

Label = tuple[str, str, str]
"""(layer, phase, kind): phase is ``'forward'``, ``'backward'`` or ``''``; kind is ``'fetch'``,
``'refetch'``, ``'gradient'`` (halo rows), ``'query'``, ``'state'`` (pushed targets), ``'sum'``
(collectives), ..."""

Entry = tuple[Label, int, str]
"""(label, peer, transport) of counted bytes."""

HALO_KINDS = ("fetch", "refetch", "gradient", "query", "state")


@lru_cache(512)
def spoken(label: Label) -> str:
    """Returns a label in words: those of its parts that are there."""
    return " ".join([part for part in label if part])


class Recorder(Protocol):
    """Whoever carries ledgers: a communicator."""

    rank: int
    device: torch.device
    ledgers: list[Any]


class Ledger(Shown):
    """Counts a worker's traffic and memory while it is open, as a context manager.

    .. code-block:: python

        with pyg_sar.Ledger(comm) as ledger:
            train_epoch()
        ledger.received_bytes(layer="convs.0", phase="backward")
        ledger.peak_resident_rows("convs.0")

    Bytes are those handed to the backend, without its headers. Resident rows are rows of other
    workers in memory: those of each fetched buffer, from its allocation until it is freed. Memory
    is the resident set of the process on CPU (``VmHWM``, bytes) and the allocator's peak on CUDA.

    Args:
        comm: The communicator to watch (``pyg_sar.comm.current()``).

    Attributes:
        gradient_errors: What :func:`pyg_sar.train.gradient_error` found while this was open.

    Raises:
        TypeError: When ``comm`` is something else.
    """

    def __init__(self, comm: Recorder) -> None:
        if not isinstance(getattr(comm, "ledgers", None), list):
            raise TypeError(
                "Expected 'comm' to be the workers, pyg_sar.comm.current() (got "
                f"{type(comm).__name__})"
            )
        self.comm = comm
        self.baseline_memory = 0
        self.peak_memory = 0
        self._sent: Counter[Entry] = Counter()
        self._messages: Counter[Entry] = Counter()
        self._received: Counter[Entry] = Counter()
        self._resident: Counter[str] = Counter()
        self._peak_resident: defaultdict[str, int] = defaultdict(int)
        self._resident_all = 0
        self._peak_resident_all = 0
        self._events: Counter[str] = Counter()
        self._gathers: defaultdict[str, defaultdict[str, Counter[str]]]
        self._gathers = defaultdict(lambda: defaultdict(Counter))
        self.gradient_errors: list[dict[str, float]] = []

    def __repr__(self) -> str:
        more = max(self.peak_memory - self.baseline_memory, 0)
        return (
            f"Ledger(rank={self.comm.rank}, sent={self.sent}, received={self.received}, "
            f"peak_resident_rows={self._peak_resident_all}, memory={more})"
        )

    def __str__(self) -> str:
        more = max(self.peak_memory - self.baseline_memory, 0)
        rows = [["layer", "bytes received", "bytes sent", "most rows held"]]
        for layer in self.by_layer():
            way = self.received_bytes(layer=layer), self.sent_bytes(layer=layer)
            counts = *way, self._peak_resident.get(layer, 0)
            rows.append([layer or "(no layer)", *(f"{count:,}" for count in counts)])
        rows.append(
            ["all", *(f"{n:,}" for n in (self.received, self.sent, self._peak_resident_all))]
        )
        memory = f"memory beyond the start: {counted(more, 'bytes')}"
        return "\n".join([f"rank {self.comm.rank}", *aligned(rows), memory])

    def __enter__(self) -> Ledger:
        self.baseline_memory = reset_peak_memory(self.comm.device)
        self.comm.ledgers.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.comm.ledgers.remove(self)
        self.peak_memory = peak_memory(self.comm.device)

    # What the package reports ################################################

    def transfer(
        self, label: Label, peer: int, *, sent: int = 0, received: int = 0, transport: str = ""
    ) -> None:
        """Records bytes that went to or came from ``peer`` (-1: a collective)."""
        if sent:
            self._sent[label, peer, transport] += sent
            self._messages[label, peer, transport] += 1
        if received:
            self._received[label, peer, transport] += received

    def hold(self, layer: str, rows: int) -> None:
        """Records remote rows that became resident (negative: were freed)."""
        self._resident[layer] += rows
        self._peak_resident[layer] = max(self._peak_resident[layer], self._resident[layer])
        self._resident_all += rows
        self._peak_resident_all = max(self._peak_resident_all, self._resident_all)

    def gather(self, label: Label, read: int, halo: int) -> None:
        """Records a hosted part's halo rows in one pass, and those of them read from the store."""
        layer, phase, _ = label
        self._gathers[layer][phase].update(passes=1, read=read, halo=halo)

    def count(self, event: str, number: int = 1) -> None:
        """Counts an event: ``'bucketing'``, ``'probe'``, ``'recompute'``, ``'halo_gather'``..."""
        self._events[event] += number

    # What a user asks ########################################################

    def sent_bytes(self, **where: Any) -> int:
        """Returns bytes sent, of a ``layer``, ``phase``, ``kind``, ``peer`` or ``transport``."""
        return sum(n for _, n in self._select(self._sent, where))

    def received_bytes(self, **where: Any) -> int:
        """Returns bytes received. Keywords select as those of :meth:`sent_bytes`."""
        return sum(n for _, n in self._select(self._received, where))

    def sent_messages(self, **where: Any) -> int:
        """Messages with content sent. Keywords select as those of :meth:`sent_bytes` do."""
        return sum(n for _, n in self._select(self._messages, where))

    @property
    def sent(self) -> int:
        """All bytes sent."""
        return sum(self._sent.values())

    @property
    def received(self) -> int:
        """All bytes received."""
        return sum(self._received.values())

    def events(self, event: str) -> int:
        """Returns how often ``event`` happened."""
        return self._events[event]

    def peak_resident_rows(self, layer: str | None = None) -> int:
        """Returns the most remote rows resident at once, for ``layer`` or in all."""
        return self._peak_resident_all if layer is None else self._peak_resident[layer]

    def resident_rows(self) -> int:
        """Returns the remote rows resident now."""
        return self._resident_all

    def gathers(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns halo rows of hosted parts, and those of them that were read from the store.

        Of all passes, per layer and phase: ``{layer: {'forward': {'passes', 'read', 'halo'}}}``.
        """
        return {
            layer: {phase: dict(counts) for phase, counts in phases.items()}
            for layer, phases in self._gathers.items()
        }

    def by_layer(self) -> dict[str, dict[str, int]]:
        """Returns bytes per layer, phase, kind and way: ``{layer: {'forward fetch in': n}}``."""
        return self._by(lambda entry: (entry[0][0], " ".join(entry[0][1:])))

    def by_peer(self) -> dict[int, dict[str, int]]:
        """Returns bytes per peer (-1: collectives): ``{peer: {'in': n, 'out': m}}``."""
        return self._by(lambda entry: (entry[1], ""))

    def by_transport(self) -> dict[str, dict[str, int]]:
        """Returns bytes per transport (a backend's, or ``'shared memory'``), as :meth:`by_peer`."""
        return self._by(lambda entry: (entry[2], ""))

    def _by(self, place: Callable[[Entry], tuple[Any, str]]) -> dict[Any, dict[str, int]]:
        """Returns bytes by what they are counted under: its row, and words before the way."""
        table: defaultdict[Any, Counter[str]] = defaultdict(Counter)
        for counts, way in ((self._received, "in"), (self._sent, "out")):
            for entry, number in counts.items():
                row, words = place(entry)
                table[row][f"{words} {way}".strip()] += number
        return {name: dict(row) for name, row in table.items()}

    def summary(self) -> dict[str, Any]:
        """Returns everything as plain values that JSON can hold."""
        return {
            "rank": self.comm.rank,
            "sent_bytes": self.sent,
            "received_bytes": self.received,
            "sent_messages": sum(self._messages.values()),
            "layers": self.by_layer(),
            "peers": {str(peer): row for peer, row in self.by_peer().items()},
            "transports": self.by_transport(),
            "gathers": self.gathers(),
            "peak_resident_rows": self._peak_resident_all,
            "peak_resident_rows_by_layer": dict(self._peak_resident),
            "baseline_memory_bytes": self.baseline_memory,
            "peak_memory_bytes": self.peak_memory or peak_memory(self.comm.device),
            "events": dict(self._events),
            "gradient_errors": list(self.gradient_errors),
        }

    @staticmethod
    def _select(counts: Counter[Entry], where: dict[str, Any]) -> Iterator[tuple[Entry, int]]:
        names = ("layer", "phase", "kind", "peer", "transport")
        unknown = set(where) - set(names)
        if unknown:
            raise ValueError(
                f"Unknown selection {sorted(unknown)}; choose from {', '.join(map(repr, names))}"
            )
        for entry, number in counts.items():
            row = dict(zip(names, (*entry[0], *entry[1:]), strict=True))
            if all(row[name] == value for name, value in where.items()):
                yield entry, number


def _status_bytes(field: str) -> int:
    """Returns a field of ``/proc/self/status`` in bytes; 0 where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak_memory(device: torch.device) -> int:
    """Starts a new peak and returns the memory in use now (bytes)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    with suppress(OSError):  # Not permitted: the peak is then that of the whole process.
        Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_memory(device: torch.device) -> int:
    """Returns the most memory in use since :func:`reset_peak_memory` (bytes)."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status_bytes("VmHWM")


def tracked_buffer(
    ledgers: Sequence[Ledger],
    layer: str,
    remote_rows: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns an uninitialized buffer, whose remote rows ledgers count while its storage lives."""
    if not ledgers or remote_rows == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu":
        # The array lives exactly as long as the storage that torch makes of it, views included.
        count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
        owner: Any = np.empty(max(count, 1), dtype=np.uint8)
        buffer = torch.from_numpy(owner)[:count].view(dtype).view(tuple(shape))
    else:
        owner = buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
    for ledger in ledgers:
        ledger.hold(layer, remote_rows)
        weakref.finalize(owner, ledger.hold, layer, -remote_rows).atexit = False
    return buffer
