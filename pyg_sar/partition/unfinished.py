"""Keeps what a killed partitioning has finished, for the next one with the same arguments.

[Note: resuming] With a limit of memory, which means hours for large graphs, the assignment and each
part are kept in a hidden folder beside the partition as soon as they are whole, under names that
only a rename gives. The next call takes them if its arguments, and a digest of the whole graph, are
the same to the bit; else it begins anew. The same arguments give the same bytes, so parts of two
runs belong together. An error, or Ctrl-C, leaves nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.files import replace_file

_PIECE = 1 << 24  # bytes that are read at a time
_REQUEST = "request.json"


class Unfinished:
    """The folder of a partitioning under way.

    Args:
        root: The partition to be.
        request: All that decides its bytes, as values of JSON.
        report: Called with a line where something is taken over.

    Attributes:
        parts: The folder of finished parts.
        scratch: A folder for scratch files, which doesn't exist yet.

    Raises:
        ValueError: Another process writes this partition.
    """

    def __init__(self, root: Path, request: Mapping[str, Any], report: Callable[[str], None]):
        self.folder = root.with_name(f".{root.name[:100]}.unfinished")
        self.parts, self.scratch = self.folder / "parts", self.folder / "scratch"
        self.report = report
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ValueError(
                f"Another process is writing '{root}'; choose another folder"
            ) from None
        text = json.dumps(dict(request), sort_keys=True)
        path = self.folder / _REQUEST
        if not path.is_file() or path.read_text() != text:
            for old in self.folder.iterdir():
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            replace_file(path, lambda file: file.write_text(text))
        shutil.rmtree(self.scratch, ignore_errors=True)

    def assignment(self, make: Callable[[], Tensor]) -> Tensor:
        """Returns the part of each node, ``[num_nodes]``: as it was found before, or made now."""
        path = self.folder / "assignment.npy"
        if path.is_file():
            self.report("taking the assignment of a run that did not end")
            return torch.from_numpy(np.load(path, allow_pickle=False))
        found = make()

        def write(file: Path) -> None:
            with file.open("wb") as opened:  # np.save would change a name.
                np.save(opened, found.numpy())

        replace_file(path, write)
        return found

    def part(self, number: int, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Returns what is said of a part in the metadata; writes the part where it is missing."""
        path = self.folder / f"{number}.json"
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text())
            file = self.parts / found["file"]
            if file.is_file() and file.stat().st_size == found["bytes"]:
                return found
        found = write(self.parts)
        replace_file(path, lambda file: file.write_text(json.dumps(found)))
        return found

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def digest(data: Any) -> str | None:
    """Returns a digest of a graph's tensors and plain values; ``None``: it holds others."""
    total = hashlib.blake2b()
    for store in data.stores:
        total.update(repr(store._key).encode())
        for name, value in sorted(store.items(), key=lambda item: str(item[0])):
            total.update(f"{name} {type(value).__name__}".encode())
            try:
                for piece in _bytes_of(value):
                    total.update(piece)
            except TypeError:
                return None
    return total.hexdigest()


def _bytes_of(value: Any) -> Iterator[Any]:
    """Yields what a value is, and its bytes, a piece at a time."""
    if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
        yield str(tuple(value.shape)).encode()
        for tensor in (value.crow_indices(), value.col_indices(), value.values()):
            yield from _bytes_of(tensor)
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        rows = value.detach().reshape(1) if value.dim() == 0 else value.detach()
        step = max(_PIECE // max(rows[:1].numel() * rows.element_size(), 1), 1)
        for first in range(0, rows.size(0) if rows.numel() else 0, step):
            piece = rows[first : first + step].cpu().contiguous().reshape(-1)
            yield piece.view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield from _bytes_of(torch.from_numpy(value))
    else:
        yield json.dumps(value).encode()
