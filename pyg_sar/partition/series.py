"""Snapshots of one graph in time: each worker reads its own rows of those that it needs.

A part's file of a series is ``[T, n_p, *]`` in row-major order, without a header: a snapshot is one
run of bytes. Behind them stands a CRC-32 of each snapshot, ``[T]``, of which the metadata has the
SHA-256: so what is read is known to be what was written, without reading all of it.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torch_geometric.data import HeteroData

from pyg_sar.comm.group import current
from pyg_sar.errors import PartitionError
from pyg_sar.files import flush
from pyg_sar.partition.metadata import PartitionMetadata, SeriesInfo, read_metadata, series_file
from pyg_sar.tensors.rows import note_first
from pyg_sar.wording import counted

SERIES_FILES = r"series-\d+-\d+-of-\d+\.bin"
SNAPSHOT = "snapshot"  # what an item says of itself: no series has this name
_PIECE = 2**26  # bytes that are read of an array at once
_CRC, _CRC_BYTES = "<u4", 4
_AGAIN = "copy it again or partition the graph anew"


def check_series(series: Any, data: Any) -> None:
    """Raises unless these are arrays ``[T, N, *]`` of a graph with one type of nodes."""
    if not isinstance(series, Mapping):
        raise TypeError(
            f"Expected 'series' to be a dict of arrays (got {type(series).__name__}): of a group "
            "of zarr's say series=dict(group.arrays())"
        )
    if series and isinstance(data, HeteroData):
        raise TypeError("'series' is for a Data (got a HeteroData): write one for each node type")
    for name, array in series.items():
        shape = tuple(getattr(array, "shape", ()))
        if (
            not isinstance(name, str)
            or name == SNAPSHOT
            or len(shape) < 2
            or not shape[0]
            or shape[1] != data.num_nodes
        ):
            raise ValueError(
                f"Expected series[{name!r}] to have the shape [T, {data.num_nodes}, ...], a "
                f"snapshot of all nodes for each of T times (got {list(shape)}), and a name other "
                f"than {SNAPSHOT!r}"
            )
        _dtype(name, array)


def _dtype(name: str, array: Any) -> torch.dtype:
    if isinstance(array, Tensor):
        raise TypeError(f"series[{name!r}] is a tensor: pass series[{name!r}].numpy()")
    try:
        return torch.from_numpy(np.empty(0, np.dtype(array.dtype).newbyteorder("="))).dtype
    except (TypeError, AttributeError):
        raise TypeError(
            f"series[{name!r}] has the dtype {getattr(array, 'dtype', None)}, which is none "
            "of PyTorch's; convert it"
        ) from None


def write_series(
    folder: Path, series: Mapping[str, Any], ids: Sequence[Tensor], report: Callable[[str], None]
) -> dict[str, Any]:
    """Writes each part's rows of arrays ``[T, N, *]``, a few snapshots at a time.

    ``ids`` are the global ids of the nodes of each part. Returns what the metadata says of the
    files.
    """
    found, rows = {}, [part.numpy() for part in ids]
    for number, (name, array) in enumerate(series.items()):
        shape, dtype = [int(n) for n in array.shape], _dtype(name, array)
        report(f"writing {counted(shape[0], 'snapshots')} of '{name}'")
        step = max(_PIECE // max(math.prod(shape[1:]) * dtype.itemsize, 1), 1)
        paths = [folder / series_file(number, p, len(ids)) for p in range(len(ids))]
        sums: list[list[int]] = [[] for _ in ids]
        ends: list[bytes] = []
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            for first in range(0, shape[0], step):
                piece = _piece(name, array, first, min(first + step, shape[0]))
                for file, own, found_sums in zip(files, rows, sums, strict=True):
                    for snapshot in piece:
                        content = np.take(snapshot, own, axis=0).tobytes()
                        file.write(content)
                        found_sums.append(zlib.crc32(content))
            for file, found_sums in zip(files, sums, strict=True):
                ends.append(np.array(found_sums, _CRC).tobytes())
                file.write(ends[-1])
        for path in paths:
            flush(path)
        found[name] = {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": shape,
            "files": [
                {
                    "file": path.name,
                    "bytes": path.stat().st_size,
                    "sha256": hashlib.sha256(end).hexdigest(),
                }
                for path, end in zip(paths, ends, strict=True)
            ],
        }
    return found


def _piece(name: str, array: Any, first: int, last: int) -> Any:
    """Returns some snapshots of an array, in this machine's order of bytes."""
    piece, wanted = np.asanyarray(array[first:last]), (last - first, *array.shape[1:])
    where = f"series[{name!r}][{first}:{last}]"
    if np.ma.is_masked(piece):
        raise ValueError(f"{where} has masked values: fill them, by .filled(0), say")
    if piece.shape != wanted or piece.dtype != array.dtype:
        raise ValueError(
            f"{where} gives {piece.dtype} {list(piece.shape)}, not {array.dtype} {list(wanted)} as "
            "its shape and dtype say: was it cut, or is it being written?"
        )
    return np.asarray(piece).astype(piece.dtype.newbyteorder("="), copy=False)


class Snapshot(UserDict[str, Tensor]):
    """Rows ``[n_p, *]`` of a snapshot by name, and its number as ``['snapshot']``.

    PyTorch's ``default_collate`` makes a batch of several: rows ``[B, n_p, *]``, and B numbers.
    Workers compare the numbers of those whose rows they take (:func:`note_first`): rows of
    different snapshots make no graph.
    """

    _noted = False

    def __getitem__(self, name: str) -> Tensor:
        # A process that loads for this one takes rows only to stack them.
        if not self._noted and get_worker_info() is None:
            self._noted = True
            note_first(self.data[SNAPSHOT], current())
        return self.data[name]

    def pin_memory(self) -> Snapshot:
        """Returns the same in memory that a GPU copies from."""
        return Snapshot({name: value.pin_memory() for name, value in self.data.items()})


class Series(Dataset[Snapshot]):
    """This worker's rows of the snapshots of a graph: item ``t`` is a :class:`Snapshot`.

    Rows are plain tensors, which ``torch.utils.data.DataLoader`` reads ahead of need in processes
    of its own (``num_workers``). :func:`pyg_sar.from_local` makes tensors of the whole graph of
    them, ``from_local(item['x'], data)`` of a snapshot and ``from_local(batch['x'], data, dim=1)``
    of a batch ``[B, n_p, F]``, which layers with ``node_dim=-2`` take.

    Args:
        root: The partition folder.
        part: Whose rows.

    Raises:
        PartitionError: There are no series, a file is missing or has another size, or series have
            different numbers of snapshots. By ``series[t]``: the file was altered.
        IndexError: By ``series[t]``: there is no snapshot ``t``.
    """

    def __init__(self, root: str | os.PathLike[str], part: int) -> None:
        metadata = read_metadata(root)
        lengths = {name: info.shape[0] for name, info in metadata.series.items()}
        if len(set(lengths.values())) != 1:
            raise PartitionError(
                f"'{root}' holds no series with one number of snapshots (got {lengths}); write "
                "them by pyg_sar.write_partitions(..., series=...)"
            )
        self._length = next(iter(lengths.values()))
        rows = metadata.parts[part].num_nodes
        self._files = {}
        for name, info in metadata.series.items():
            path, shape = Path(root) / info.files[part], [rows, *info.shape[2:]]
            sums = self._sums_of(path, info, part)
            self._files[name] = path, getattr(torch, info.dtype), shape, sums

    @staticmethod
    def _sums_of(path: Path, info: SeriesInfo, part: int) -> list[int]:
        """Reads the checksum of each snapshot."""
        size, end = info.bytes[part], b""
        found = path.stat().st_size if path.is_file() else None
        if found == size:
            with path.open("rb") as file:
                file.seek(size - info.shape[0] * _CRC_BYTES)
                end = file.read()
        if hashlib.sha256(end).hexdigest() != info.sha256[part]:
            raise PartitionError(
                f"'{path}' has {found} bytes instead of {size:,}, or checksums of other snapshots; "
                f"{_AGAIN}"
            )
        return np.frombuffer(end, _CRC).tolist()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, t: int) -> Snapshot:
        if not -self._length <= t < self._length:
            raise IndexError(f"series[{t}]: there are {counted(self._length, 'snapshots')}")
        t %= self._length
        found = {SNAPSHOT: torch.tensor(t)}
        for name, (path, dtype, shape, sums) in self._files.items():
            found[name] = torch.empty(shape, dtype=dtype)
            flat = found[name].view(-1).view(torch.uint8).numpy().data
            with path.open("rb", buffering=0) as file:
                file.seek(t * len(flat))
                done = 0
                while done < len(flat):
                    count = file.readinto(flat[done:])
                    if not count:
                        raise PartitionError(f"'{path}' ends within snapshot {t}; {_AGAIN}")
                    done += count
            if zlib.crc32(flat) != sums[t]:
                raise PartitionError(
                    f"'{path}' was altered: the checksum of snapshot {t} differs; {_AGAIN}"
                )
        return Snapshot(found)


def merge_series(
    root: str | os.PathLike[str],
    metadata: PartitionMetadata,
    ids: Sequence[Tensor],
    into: dict[str, Any],
) -> None:
    """Writes all parts' rows of a folder's series into arrays ``[T, N, *]``, a snapshot at a time.

    ``ids`` are the global ids of the nodes of each part. Arrays that ``into`` lacks are made.
    """
    read = [Series(root, p) for p in range(len(ids))] if metadata.series else []
    for name, info in metadata.series.items():
        dtype = torch.empty(0, dtype=getattr(torch, info.dtype)).numpy().dtype
        array = into.setdefault(name, np.empty(info.shape, dtype))
        if tuple(array.shape) != tuple(info.shape):
            raise ValueError(
                f"Expected series[{name!r}] to have the shape {list(info.shape)} (got "
                f"{list(array.shape)})"
            )
    for t in range(len(read[0]) if read else 0):
        items = [one[t].data for one in read]
        for name, info in metadata.series.items():
            snapshot = np.empty(info.shape[1:], items[0][name].numpy().dtype)
            for rows, item in zip(ids, items, strict=True):
                snapshot[rows.numpy()] = item[name].numpy()
            into[name][t] = snapshot


def load_series(root: str | os.PathLike[str]) -> Series:
    """Returns this worker's rows of the snapshots that ``write_partitions(series=...)`` wrote.

    .. code-block:: python

        data = pyg_sar.load_partition("parts")
        series = pyg_sar.partition.load_series("parts")
        for batch in DataLoader(series, batch_size=8, num_workers=2):
            x = pyg_sar.from_local(batch["x"], data, dim=1)  # [8, N, F]
            loss = F.mse_loss(model(x, data.edge_index), ...)

    All workers must take the same snapshots, or the next backward pass raises an error: a loader
    that shuffles draws alike on all workers after ``load_partition``. Nothing is sent to read them.
    A snapshot's checksum is compared.

    Args:
        root: The partition folder.

    Raises:
        PartitionError: As of :class:`Series`; the partition is of another number of workers.
    """
    comm = current()
    read_metadata(root).check_world_size(comm.world_size, comm.host is not None)
    return Series(root, comm.rank)
