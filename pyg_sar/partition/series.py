"""Snapshots of one graph in time: each worker reads its own rows of those that it needs.

A part's file of a series is ``[T, n_p, *]`` in row-major order, without a header: a snapshot is one
run of bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import HeteroData

from pyg_sar.comm.group import current
from pyg_sar.errors import PartitionError
from pyg_sar.files import flush
from pyg_sar.partition.metadata import SeriesInfo, read_metadata, series_file
from pyg_sar.wording import counted

SERIES_FILES = r"series-\d+-\d+-of-\d+\.bin"
_PIECE = 2**26  # bytes that are read of an array at once


def check_series(series: Mapping[str, Any], data: Any) -> None:
    """Raises unless these are arrays ``[T, N, *]`` of a graph with one type of nodes."""
    if series and isinstance(data, HeteroData):
        raise TypeError("'series' is for a Data (got a HeteroData): write one for each node type")
    for name, array in series.items():
        shape = tuple(getattr(array, "shape", ()))
        if (
            not isinstance(name, str)
            or len(shape) < 2
            or not shape[0]
            or shape[1] != data.num_nodes
        ):
            raise ValueError(
                f"Expected series[{name!r}] to have the shape [T, {data.num_nodes}, ...], a "
                f"snapshot of all nodes for each of T times (got {list(shape)})"
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

    Args:
        folder: Where the files go.
        series: The arrays by name.
        ids: Global ids of the nodes of each part.
        report: Called with a line of text for each array.

    Returns:
        What the metadata says of them.
    """
    found, rows = {}, [part.numpy() for part in ids]
    for number, (name, array) in enumerate(series.items()):
        shape, dtype = [int(n) for n in array.shape], _dtype(name, array)
        report(f"writing {counted(shape[0], 'snapshots')} of '{name}'")
        step = max(_PIECE // max(math.prod(shape[1:]) * dtype.itemsize, 1), 1)
        paths = [folder / series_file(number, p, len(ids)) for p in range(len(ids))]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            for first in range(0, shape[0], step):
                piece = np.asarray(array[first : first + step])
                piece = piece.astype(piece.dtype.newbyteorder("="), copy=False)
                for file, own in zip(files, rows, strict=True):
                    file.write(np.take(piece, own, axis=1).tobytes())
        for path in paths:
            flush(path)
        found[name] = {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": shape,
            "files": [{"file": path.name, "bytes": path.stat().st_size} for path in paths],
        }
    return found


class Series(Dataset[dict[str, Tensor]]):
    """This worker's rows of the snapshots of a graph: item ``t`` is ``{name: [n_p, *]}``.

    Items are plain tensors, which ``torch.utils.data.DataLoader`` reads ahead of need in processes
    of its own (``num_workers``). :func:`pyg_sar.from_local` makes tensors of the whole graph of
    them, ``from_local(item['x'], data)`` of a snapshot and ``from_local(batch['x'], data, dim=1)``
    of a batch ``[B, n_p, F]``, which layers with ``node_dim=-2`` take.

    Args:
        root: The partition folder.
        part: Whose rows.

    Raises:
        PartitionError: There are no series, a file is missing or has another size, or series have
            different numbers of snapshots.
        IndexError: By ``series[t]``: there is no snapshot ``t``.
    """

    def __init__(self, root: str | os.PathLike[str], part: int) -> None:
        metadata = read_metadata(root)
        self._files: dict[str, tuple[Path, torch.dtype, list[int]]] = {}
        lengths = {name: info.shape[0] for name, info in metadata.series.items()}
        if len(set(lengths.values())) != 1:
            raise PartitionError(
                f"'{root}' holds no series with one number of snapshots (got {lengths}); write "
                "them by pyg_sar.write_partitions(..., series=...)"
            )
        self._length = next(iter(lengths.values()))
        for name, info in metadata.series.items():
            self._files[name] = self._file(Path(root), info, part, metadata.parts[part].num_nodes)

    @staticmethod
    def _file(
        root: Path, info: SeriesInfo, part: int, rows: int
    ) -> tuple[Path, torch.dtype, list[int]]:
        path, size = root / info.files[part], info.bytes[part]
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise PartitionError(
                f"'{path}' has {found} bytes instead of {size:,}; copy it again or partition the "
                "graph anew"
            )
        return path, getattr(torch, info.dtype), [rows, *info.shape[2:]]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, t: int) -> dict[str, Tensor]:
        if not -self._length <= t < self._length:
            raise IndexError(f"series[{t}]: there are {counted(self._length, 'snapshots')}")
        found = {}
        for name, (path, dtype, shape) in self._files.items():
            found[name] = torch.empty(shape, dtype=dtype)
            flat = found[name].view(-1).view(torch.uint8).numpy().data
            with path.open("rb", buffering=0) as file:
                file.seek(t % self._length * len(flat))
                done = 0
                while done < len(flat):
                    count = file.readinto(flat[done:])
                    if not count:
                        raise PartitionError(f"'{path}' ends within snapshot {t}; copy it again")
                    done += count
        return found


def load_series(root: str | os.PathLike[str]) -> Series:
    """Returns this worker's rows of the snapshots that ``write_partitions(series=...)`` wrote.

    .. code-block:: python

        data = pyg_sar.load_partition("parts")
        series = pyg_sar.partition.load_series("parts")
        for batch in DataLoader(series, batch_size=8, num_workers=2):
            x = pyg_sar.from_local(batch["x"], data, dim=1)  # [8, N, F]
            loss = F.mse_loss(model(x, data.edge_index), ...)

    All workers must take the same snapshots: a loader that shuffles draws alike on all workers
    after ``load_partition``. Nothing is sent, and no checksum read.

    Args:
        root: The partition folder.

    Raises:
        PartitionError: As of :class:`Series`; the partition is of another number of workers.
    """
    comm = current()
    read_metadata(root).check_world_size(comm.world_size, comm.host is not None)
    return Series(root, comm.rank)
