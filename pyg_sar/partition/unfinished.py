"""Keeps what a killed partitioning has finished, for the next one with the same arguments.

[Note: resuming] With a limit of memory, which means hours for large graphs, the assignment and each
part are kept in a hidden folder beside the partition as soon as they are whole, under names that
only a rename gives. The next call takes them if its arguments, and a digest of the whole graph, are
the same to the bit, and checksums say that they were not altered; else it begins anew. The same
arguments give the same bytes, so parts of two runs belong together. Ctrl-C
leaves them as well, an error nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from pyg_sar.files import (
    MARKER,
    empty_folder,
    has_checksum,
    lock_folder,
    read_text,
    remove_folder,
    replace_file,
    sha256_of,
    with_checksum,
)

_PIECE = 1 << 24  # bytes that are read at a time
_REQUEST = "request.json"


class Unfinished:
    """The folder of a partitioning under way. See [Note: resuming].

    Its name can be foretold, so it is looked at before anything of it is taken or removed: it is a
    folder, no link, of this user, and empty or marked as one of this package.
    ``request`` is all that decides the partition's bytes, as values of JSON.

    Attributes:
        parts: The folder of finished parts.
        scratch: A folder for scratch files, which doesn't exist yet.
        keep: Leave the folder to a next run.
    """

    def __init__(self, root: Path, request: Mapping[str, Any], report: Callable[[str], None]):
        self.folder = unfinished_folder(root)
        self.parts, self.scratch = self.folder / "parts", self.folder / "scratch"
        self.report, self.keep = report, False
        with suppress(FileExistsError):
            self.folder.mkdir(0o700)
        try:
            found = lock_folder(self.folder)
        except OSError as error:
            self._refuse(error.strerror or str(error))
        if found is None:
            raise ValueError(f"Another process is writing '{root}'; choose another folder")
        self._descriptor = found[0]
        try:
            held = os.listdir(self._descriptor)
            if held and MARKER not in held:
                self._refuse(f"it holds '{held[0]}', and no '{MARKER}'")
            if self._saved(_REQUEST) != {"request": dict(request)}:
                empty_folder(self._descriptor)
                (self.folder / MARKER).touch()
                self._save(_REQUEST, {"request": dict(request)})
            shutil.rmtree(self.scratch, ignore_errors=True)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _refuse(self, problem: str) -> NoReturn:
        raise OSError(
            f"'{self.folder}' has the name of what an unfinished partitioning leaves, and is not "
            f"that ({problem}): move it elsewhere, or choose another folder"
        )

    def _save(self, name: str, content: dict[str, Any]) -> None:
        text = with_checksum(content)
        replace_file(self.folder / name, lambda file: file.write_text(text))

    def _saved(self, name: str) -> dict[str, Any] | None:
        """Returns what was saved; ``None``: nothing, or it was altered since."""
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            text = read_text(self.folder / name)
            content = json.loads(text)
            del content["checksum"]
            return content if has_checksum(text) else None
        return None

    def _is_whole(self, path: Path, about: Mapping[str, Any] | None) -> bool:
        """Says if a file is there as it was written."""
        regular = path.is_file() and not path.is_symlink()
        if about is None or not regular or path.stat().st_size != about["bytes"]:
            return False
        if sha256_of(path) == about["sha256"]:
            return True
        self.report(f"'{path.name}' of a run that did not end was altered: making it anew")
        return False

    def assignment(self, make: Callable[[], Tensor]) -> Tensor:
        """Returns the part of each node, ``[num_nodes]``: as it was found before, or made now."""
        path = self.folder / "assignment.npy"
        if self._is_whole(path, self._saved("assignment.json")):
            self.report("taking the assignment of a run that did not end")
            return torch.from_numpy(np.load(path, allow_pickle=False))
        found = make()

        def write(file: Path) -> None:
            with file.open("wb") as opened:  # np.save would change a name.
                np.save(opened, found.numpy())

        replace_file(path, write)
        about = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        self._save("assignment.json", about)
        return found

    def part(self, name: str, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Returns what the metadata says of the part in the file ``name``.

        Where it isn't whole, ``write`` writes it to the folder that it gets, and returns what is
        said of it.
        """
        about = self._saved(f"{name}.json")
        if about is not None and about["file"] == name and self._is_whole(self.parts / name, about):
            return about
        about = write(self.parts)
        self._save(f"{name}.json", about)
        return about

    def close(self) -> None:
        """Removes the folder; where ``keep``, scratch files only."""
        if self.keep:
            shutil.rmtree(self.scratch, ignore_errors=True)
        else:
            with suppress(OSError):
                remove_folder(self.folder, self._descriptor)
        os.close(self._descriptor)


def unfinished_folder(root: Path) -> Path:
    """Returns where a partitioning under way keeps what is done."""
    return root.with_name(f".{root.name[:100]}.unfinished")


def digest(data: Any) -> str | None:
    """Returns a digest of a graph's tensors and plain values; ``None``: it holds others."""
    total = hashlib.blake2b()
    try:
        for store in data.stores:
            values = sorted(store.items(), key=lambda item: str(item[0]))
            add_to_digest(total, [store._key, values])
    except TypeError:
        return None
    return total.hexdigest()


def add_to_digest(total: Any, value: Any) -> None:
    """Adds a value to a digest: tensors by their bytes, containers by what is in them.

    Raises ``TypeError`` with the type's name where a value has no such form.
    """
    total.update(type(value).__name__.encode() + b"\0")
    if isinstance(value, Mapping):
        for item in value.items():
            add_to_digest(total, item[0])
            add_to_digest(total, item[1])
    elif isinstance(value, list | tuple):
        for one in value:
            add_to_digest(total, one)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        add_to_digest(total, torch.from_numpy(np.ascontiguousarray(value)))
    elif isinstance(value, Tensor):
        _add_tensor(total, value)
    elif isinstance(value, SparseTensor):
        add_to_digest(total, [value.sparse_sizes(), value.csr()])
    elif value is None or isinstance(value, str | int | float | bool | bytes):
        total.update(repr(value).encode())
    else:
        raise TypeError(type(value).__name__)
    total.update(b"\1")


def _add_tensor(total: Any, value: Tensor) -> None:
    total.update(f"{value.dtype} {list(value.shape)} {value.layout}".encode())
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        add_to_digest(total, [value.indices(), value.values()])
    elif value.layout == torch.sparse_csr:
        add_to_digest(total, [value.crow_indices(), value.col_indices(), value.values()])
    elif value.layout == torch.sparse_csc:
        add_to_digest(total, [value.ccol_indices(), value.row_indices(), value.values()])
    elif value.numel():
        rows = value.detach().as_subclass(Tensor)
        rows = rows.reshape(1) if rows.dim() == 0 else rows
        for piece in rows.split(max(_PIECE // max(rows[:1].nbytes, 1), 1)):
            total.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
