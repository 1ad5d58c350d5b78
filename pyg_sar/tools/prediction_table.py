"""Predictions of all workers as one table, with the ids that the user's own tables have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.comm.group import current
from pyg_sar.files import TemporaryFolder, replace_file
from pyg_sar.reduction.rows_file import write_rows
from pyg_sar.tools.tables import arrow, names_of

_ROWS = 2**16  # of a piece of a table


def write_table(
    values: Tensor, places: Tensor, names: Tensor | None, path: str | os.PathLike[str]
) -> None:
    """Writes the rows of all workers to a table, ``.parquet`` or ``.csv``. Collective.

    Its columns are ``id``, what the nodes are called, and ``out_0``, ``out_1``, ... The rows pass
    through ``.npy`` files beside it, so that no worker holds more than its own.

    Args:
        values: A row per node of this worker, ``[num_local, *]``.
        places: The places of these rows in the table, int64 ``[num_local]``.
        names: The ids of these nodes (``data.node_name``); without them ids are the places.
        path: The file.

    Raises:
        ImportError: On every worker, where rank 0 has no pyarrow.
        OSError, ValueError: As :func:`~pyg_sar.reduction.rows_file.write_rows`.
    """
    comm, path = current(), Path(path).absolute()
    begun: list[Any] = ["", None]
    folder: TemporaryFolder | None = None
    if comm.rank == 0:
        try:
            arrow(path)
            folder = TemporaryFolder.beside(path)
            begun[0] = os.fspath(folder.path)
        except (ImportError, OSError) as error:
            begun[1] = _described(error)
    name, trouble = comm.broadcast_object(begun)
    _raise(trouble, path)
    rows = Path(name)
    try:
        write_rows(values.reshape(len(values), -1), places, rows / "rows.npy")
        if names is not None:
            write_rows(names, places, rows / "names.npy")
        if comm.rank == 0:
            try:
                replace_file(path, lambda file: _convert(rows, file, path.suffix))
            except OSError as error:
                trouble = _described(error)
        _raise(comm.broadcast_object(trouble), path)
    finally:
        if folder is not None:
            folder.close()


def _described(error: Exception) -> list[Any]:
    number = error.errno if isinstance(error, OSError) else None
    return [isinstance(error, ImportError), number, str(getattr(error, "strerror", error) or error)]


def _raise(trouble: list[Any] | None, path: Path) -> None:
    if trouble is not None and trouble[0]:
        raise ImportError(trouble[2])
    if trouble is not None:
        raise OSError(*trouble[1:], os.fspath(path))


def _convert(folder: Path, file: Path, suffix: str) -> None:
    pyarrow, csv, parquet = arrow(file)
    with torch.no_grad():
        batches = _batches(folder, pyarrow)
        first = next(batches)
        if suffix == ".csv":
            with csv.CSVWriter(file, first.schema) as writer:
                for batch in (first, *batches):
                    writer.write_batch(batch)
        else:
            with parquet.ParquetWriter(file, first.schema) as writer:
                writer.write_batch(first)
                for batch in batches:
                    writer.write_batch(batch)


def _batches(folder: Path, pyarrow: Any) -> Iterator[Any]:
    rows = np.load(folder / "rows.npy", mmap_mode="r", allow_pickle=False)
    path = folder / "names.npy"
    names = np.load(path, mmap_mode="r", allow_pickle=False) if path.exists() else None
    for first in range(0, max(len(rows), 1), _ROWS):
        piece = rows[first : first + _ROWS]
        known = np.arange(first, first + len(piece)) if names is None else None
        ids = names_of(names[first : first + _ROWS]) if names is not None else known
        columns = {f"out_{k}": np.ascontiguousarray(piece[:, k]) for k in range(rows.shape[1])}
        yield pyarrow.RecordBatch.from_pydict({"id": ids, **columns})
