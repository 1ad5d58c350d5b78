"""Rows of all workers in one ``.npy`` file, in global order; each worker writes its own.

[Note: written once] The file grows under a hidden name beside its own, with all its bytes reserved,
and gets its name when every worker has written and flushed its rows: who reads it by its name reads
all of it. A full disk is an error before the first row, not a signal in the middle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator, Label, current
from pyg_sar.files import TemporaryFolder, explained, flush
from pyg_sar.wording import counted

_LABEL: Label = ("", "", "rows file")
_WINDOW = 2**24  # bytes of the file that a worker maps at a time


@torch.no_grad()
def write_rows(values: Tensor, places: Tensor, path: str | os.PathLike[str]) -> None:
    """Writes the rows of all workers' nodes to a ``.npy`` file in the whole graph's order.

    Collective. No worker holds more than its own rows and 32 MiB. A file of that name is replaced
    in one step once all rows are written. On several hosts the folder must be a shared one.

    Args:
        values: A row per node of this worker, ``[num_local, *]``, of a dtype that NumPy has.
        places: The places of these rows in the file, int64 ``[num_local]``.
        path: The file.

    Raises:
        ValueError: On every worker alike, when rows and nodes differ in number, dtypes or shapes
            differ between workers, or the places of all workers are not 0, 1, ..., each once.
        OSError: On every worker, when the file can't be written; none is left then.
    """
    comm, path = current(), Path(path)
    problem, rows = "", np.empty((0,))
    try:
        places = places.cpu()
        if values.dim() == 0 or values.size(0) != places.numel():
            raise ValueError(
                f"Expected 'values' to have one row per node, {counted(places.numel(), 'rows')} "
                f"(got shape {list(values.shape)})"
            )
        rows = values.as_subclass(Tensor).detach().resolve_conj().resolve_neg().cpu().numpy()
    except (TypeError, ValueError) as error:
        problem = str(error)
    total = _agree(values, problem, comm)
    _check_places(places, total, comm)
    folder, hidden, start = _reserve(path, (total, *rows.shape[1:]), rows.dtype, comm)
    try:
        with _on_all(comm, path):
            _write_own(hidden, start, rows, places)
            flush(hidden)
        with _on_all(comm, path):
            if comm.rank == 0:
                hidden.replace(path)
                flush(path.parent)
    finally:
        if folder is not None:
            folder.close()


def _agree(values: Tensor, problem: str, comm: Communicator) -> int:
    """Returns the rows of all workers; raises on all of them alike where theirs differ."""
    mine = [problem, len(values) if values.dim() else 0, str(values.dtype), list(values.shape[1:])]
    everyone = comm.all_gather_object(mine, label=_LABEL)
    for rank, (text, _, *kind) in enumerate(everyone):
        if text:
            raise ValueError(f"rank {rank}: {text}")
        for name, one, other in zip(("dtype", "row shape"), everyone[0][2:], kind, strict=True):
            if one != other:
                raise ValueError(
                    f"Expected 'values' to be alike on all workers (got {name} {one} at rank 0 and "
                    f"{other} at rank {rank})"
                )
    return sum(count for _, count, *_ in everyone)


def _check_places(places: Tensor, total: int, comm: Communicator) -> None:
    """Raises on all workers unless their places are 0 to ``total - 1``, each once."""
    # A byte per row of the graph, summed in pieces.
    step, wrong = _WINDOW, 0
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < total:
        wrong = 1
    ascending = places.sort().values
    for low in range(0, total, step):
        high = min(low + step, total)
        first, last = torch.searchsorted(ascending, torch.tensor([low, high])).tolist()
        seen = torch.zeros(high - low, dtype=torch.uint8)
        seen[ascending[first:last] - low] = 1
        wrong |= int(seen.sum()) != last - first
        found = comm.all_reduce(seen.to(comm.device), label=_LABEL)
        wrong |= int(bool((found != 1).any()))
    flag = torch.tensor([int(wrong)], device=comm.device)
    if int(comm.all_reduce(flag, "max", label=_LABEL)):
        raise ValueError(f"The places of all workers' rows are not 0 to {total - 1}, each once")


def _reserve(
    path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], comm: Communicator
) -> tuple[TemporaryFolder | None, Path, int]:
    """Has rank 0 make the hidden file; returns at rank 0 the folder that it is in, its name, and
    where its rows begin. Collective.
    """
    made: list[Any] = ["", 0]
    with ExitStack() as stack:
        folder = None
        with _on_all(comm, path):
            if comm.rank == 0:
                folder = TemporaryFolder.beside(path.absolute())
                stack.callback(folder.close)
                hidden = folder.path / "rows"
                made = [os.fspath(hidden), _make(hidden, shape, dtype)]
        name, start = comm.broadcast_object(made, label=_LABEL)
        hidden = Path(name)
        with _on_all(comm, path):
            if not hidden.exists():
                raise OSError(
                    f"rank {comm.rank} does not see the file that rank 0 has made beside it: "
                    "choose a folder that all hosts share"
                )
        stack.pop_all()
    return folder, hidden, int(start)


def _make(hidden: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    with hidden.open("xb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        file.flush()
        start = file.tell()
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if size:
            os.posix_fallocate(file.fileno(), start, size)
    return start


def _write_own(hidden: Path, start: int, rows: np.ndarray[Any, Any], places: Tensor) -> None:
    """Writes a worker's rows, some of the file at a time. See [Note: written once]."""
    row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=object))
    if not places.numel() or not row_bytes:
        return
    ids, order = (found.numpy() for found in places.sort())
    step = max(_WINDOW // row_bytes, 1)
    at = 0
    while at < len(ids):
        low = int(ids[at])
        end = int(np.searchsorted(ids, low + step))
        window = np.memmap(
            hidden,
            rows.dtype,
            "r+",
            offset=start + low * row_bytes,
            shape=(int(ids[end - 1]) - low + 1, *rows.shape[1:]),
        )
        window[ids[at:end] - low] = rows[order[at:end]]
        del window  # Unmaps it: what is written counts as the system's, not as this worker's.
        at = end


@contextmanager
def _on_all(comm: Communicator, path: Path) -> Iterator[None]:
    """Raises an ``OSError`` that any worker meets in the block on all of them. Collective."""
    trouble: list[Any] | None = None
    try:
        yield
    except OSError as error:
        found = explained(error, path)
        text = getattr(found, "strerror", None) or str(found)
        trouble = [error.errno, f"{text} (rank {comm.rank})"]
    for said in comm.all_gather_object(trouble, label=_LABEL):
        if said is not None:
            raise OSError(*said, os.fspath(path))
