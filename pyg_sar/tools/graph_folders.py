"""Graphs in folders of arrays and tables, which are memory mapped and may exceed the memory.

.. code-block:: text

    FOLDER/edge_index.npy    integers [2, E] (source, target)
    FOLDER/NAME.npy          an attribute: x.npy, y.npy, train_mask.npy, edge_weight.npy, ...
    FOLDER/num_nodes.npy     one integer; may be left out where x.npy tells it

    FOLDER/edges.parquet     or .csv: columns source and target, others are edge attributes
    FOLDER/nodes.parquet     or .csv: a row per node, in the order of the ids; columns are
                             attributes, lists of numbers too; masks may be 0 and 1

A heterogeneous graph has a folder of this kind for each node type (``TYPE``, without edges) and for
each relation (``SOURCE__RELATION__TARGET``, without nodes). Tables need ``pyarrow``
(``pip install 'pyg_sar[tables]'``): they are read in pieces and written as arrays to files without
a name in the system's temporary folder (``TMPDIR``), which go with the process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.files import check_regular

Array = NDArray[Any]

TABLES = (".parquet", ".csv")
_SOURCES, _TARGETS = ("source", "src", "row"), ("target", "dst", "col")
_IDS = ("id", "node", "node_id", "nodeid")
_ROWS = 2**16  # of a piece of a table


def is_graph_folder(path: Path) -> bool:
    """Says if a path is a folder with edges, or with relations that have some."""
    names = ("edge_index.npy", *(f"edges{suffix}" for suffix in TABLES))
    folders = [path, *path.glob("*__*__*")] if path.is_dir() else []
    return any((folder / name).is_file() for folder in folders for name in names)


def load_folder(folder: str | os.PathLike[str]) -> Data | HeteroData:
    """Returns the graph of a folder; see this module.

    Raises:
        ValueError: When a file is not what it should be: names the file.
        ImportError: When there is a table, and no pyarrow.
        OSError: When a file can't be read.
    """
    root = Path(folder)
    inner = sorted(path for path in root.iterdir() if path.is_dir())
    if any(path.suffix in (".npy", *TABLES) for path in root.iterdir()):
        return _homogeneous(root)
    if not inner:
        raise ValueError(f"'{root}' holds no graph: expected edge_index.npy or edges.parquet in it")
    data = HeteroData()
    for path in inner:
        name = path.name.split("__")
        if len(name) not in (1, 3):
            raise ValueError(
                f"'{path}' is neither a node type (TYPE) nor a relation (SOURCE__RELATION__TARGET)"
            )
        key = name[0] if len(name) == 1 else tuple(name)
        store = data[key]
        for attribute, value in _attributes(path).items():
            store[attribute] = value
        if len(name) == 3 and "edge_index" not in store:
            raise ValueError(f"'{path}' has no edge_index.npy, edges.parquet or edges.csv")
        if len(name) == 1 and store.num_nodes is None:
            raise ValueError(f"'{path}' has no x.npy and no num_nodes.npy")
    return data


def _homogeneous(root: Path) -> Data:
    found = _attributes(root)
    if "edge_index" not in found:
        raise ValueError(f"'{root}' has no edge_index.npy, edges.parquet or edges.csv")
    if "num_nodes" not in found and "x" not in found:
        raise ValueError(f"'{root}' has no x.npy, no nodes table and no num_nodes.npy")
    return Data(**found)


def _attributes(folder: Path) -> dict[str, Any]:
    """Returns what the files of a folder hold, by attribute."""
    found: dict[str, Any] = {}

    def take(file: Path, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in found:
                raise ValueError(f"'{file}' gives '{name}', which another file of it gives as well")
            found[name] = value

    for path in sorted(folder.iterdir()):
        if path.suffix == ".npy":
            take(path, {path.stem: _mapped(path)})
        elif path.suffix in TABLES:
            if path.stem not in ("nodes", "edges"):
                raise ValueError(f"Expected a table to be named nodes or edges (got '{path}')")
            take(path, _table(path))
    if "num_nodes" in found:
        number = found["num_nodes"]
        if number.dim() or number.is_floating_point():
            raise ValueError(f"Expected '{folder}/num_nodes.npy' to hold one integer")
        found["num_nodes"] = int(number)
    return found


def _mapped(path: Path) -> Tensor:
    check_regular(path)
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
        return torch.from_numpy(array)
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{path}' is not an array of numbers: {error}") from error


# Tables #######################################################################


def _table(path: Path) -> dict[str, Any]:
    """Returns the columns of a table as arrays in files; of ``edges`` the ends as one."""
    with ExitStack() as files:
        writers: dict[str, ColumnFile] = {}
        for piece in _pieces(path):
            for name, values in piece.items():
                if name not in writers:
                    file = files.enter_context(tempfile.TemporaryFile())
                    writers[name] = ColumnFile(path, name, values, file)
                writers[name].add(values)
        return _columns(path, writers)


def _columns(path: Path, writers: dict[str, ColumnFile]) -> dict[str, Any]:
    rows = next(iter(writers.values())).rows if writers else 0
    if path.stem == "nodes":
        return {"num_nodes": torch.tensor(rows)} | {n: w.tensor() for n, w in writers.items()}
    if not writers:
        return {"edge_index": torch.empty(2, 0, dtype=torch.long)}
    ends = []
    for name in _ends(path, list(writers)):
        if writers[name].dtype.kind not in "iu":
            raise ValueError(
                f"Expected '{name}' of '{path}' to hold node ids, integers from 0 "
                f"(got {writers[name].dtype})"
            )
        ends.append(writers.pop(name))
    return {"edge_index": joined_ends(ends)} | {n: w.tensor() for n, w in writers.items()}


def _ends(path: Path, columns: list[str]) -> list[str]:
    """Returns the columns of the sources and of the targets of a table of edges."""
    ends = []
    for what, names in (("source", _SOURCES), ("target", _TARGETS)):
        known = [name for name in columns if name.lower() in names]
        if len(known) != 1:
            raise ValueError(
                f"Expected '{path}' to have one column named {' or '.join(names)}, the {what} of "
                f"each edge (it has {', '.join(map(repr, columns))}); the first line of a .csv "
                "names the columns, with commas and no blanks between"
            )
        ends.append(known[0])
    return ends


def _check_names(path: Path, names: list[str]) -> None:
    """Raises where columns are missing, or have one name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"'{path}' has more than one column named {twice!r}; rename one")
    if path.stem == "edges":
        _ends(path, names)


def _pieces(path: Path) -> Iterator[dict[str, Array]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import csv, parquet
    except ImportError as error:
        raise ImportError(
            f"'{path}' needs pyarrow: pip install 'pyg_sar[tables]', or save arrays (.npy)"
        ) from error
    check_regular(path)
    try:
        if path.suffix == ".csv":
            # A line without a value is a node without one, where there is one column.
            options = csv.ParseOptions(ignore_empty_lines=path.stem == "edges")
            with csv.open_csv(path, parse_options=options) as reader:
                _check_names(path, reader.schema.names)
                yield from _in_order(path, (_arrays(path, piece) for piece in reader))
        else:
            with parquet.ParquetFile(path) as file:
                _check_names(path, file.schema_arrow.names)
                pieces = (_arrays(path, piece) for piece in file.iter_batches(_ROWS))
                yield from _in_order(path, pieces)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"'{path}' can't be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8: {error}; save it as UTF-8") from error


def _in_order(path: Path, pieces: Iterator[dict[str, Array]]) -> Iterator[dict[str, Array]]:
    """Yields the pieces of a table, of nodes if their ids, where it has them, are 0, 1, 2, ..."""
    rows = 0
    for piece in pieces:
        for name, values in piece.items() if path.stem == "nodes" else ():
            if name.lower() in _IDS and values.ndim == 1 and values.dtype.kind in "iu":
                wrong = np.flatnonzero(values != np.arange(rows, rows + len(values)))
                if wrong.size:
                    row = rows + int(wrong[0])
                    raise ValueError(
                        f"Expected the rows of '{path}' in the order of the nodes' ids, all of "
                        f"them from 0 (row {row} has {name}={values[wrong[0]]}); sort them, or "
                        "rename the column if it is no such id"
                    )
        rows += len(next(iter(piece.values()), ()))
        yield piece


def _arrays(path: Path, piece: Any) -> dict[str, Array]:
    found = {}
    for name, column in zip(piece.schema.names, piece.columns, strict=True):
        if column.null_count:
            raise ValueError(f"'{name}' of '{path}' has rows without a value")
        if hasattr(column, "flatten") and hasattr(column.type, "value_type"):
            inner = column.flatten()
            if inner.null_count:
                raise ValueError(f"'{name}' of '{path}' has lists without a value")
            if len(column) and len(inner) % len(column):
                raise ValueError(f"'{name}' of '{path}' has lists of unlike lengths")
            lengths = np.asarray(column.value_lengths())
            if lengths.size and (lengths != lengths[0]).any():
                raise ValueError(f"'{name}' of '{path}' has lists of unlike lengths")
            values = inner.to_numpy(zero_copy_only=False).reshape(len(column), -1)
        else:
            values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "iufb":
            raise ValueError(
                f"Expected '{name}' of '{path}' to hold numbers (got {column.type}); number them"
            )
        is_mask = name.endswith("mask") and values.dtype.kind in "iu"
        found[name] = values.astype(bool) if is_mask and (values // 2 == 0).all() else values
    return found


class ColumnFile:
    """A column of a table on its way into a file without a name."""

    def __init__(self, path: Path, name: str, like: Array, file: Any) -> None:
        self._what, self.dtype, self._shape = f"'{name}' of '{path}'", like.dtype, like.shape[1:]
        self.rows, self._file = 0, file

    def add(self, values: Array) -> None:
        if values.dtype != self.dtype or values.shape[1:] != self._shape:
            raise ValueError(
                f"{self._what} changes from {self.dtype} of shape {list(self._shape)} to "
                f"{values.dtype} of shape {list(values.shape[1:])} after {self.rows:,} rows"
            )
        self._file.write(np.ascontiguousarray(values).data)
        self.rows += len(values)

    def array(self) -> Array:
        """Returns the rows, memory mapped."""
        self._file.flush()
        shape = self.rows, *self._shape
        if 0 in shape:
            return np.empty(shape, self.dtype)
        return np.memmap(self._file, self.dtype, mode="c", shape=shape)

    def tensor(self) -> Tensor:
        """Returns the rows as a tensor that is memory mapped."""
        return torch.from_numpy(self.array())


def joined_ends(ends: list[ColumnFile]) -> Tensor:
    """Returns an ``edge_index`` of two columns, in another file."""
    rows = ends[0].rows
    if not rows:
        return torch.empty(2, 0, dtype=torch.long)
    with tempfile.TemporaryFile() as file:
        for end in ends:
            values = end.array()
            for first in range(0, rows, _ROWS):
                file.write(values[first : first + _ROWS].astype(np.int64).data)
        file.flush()
        return torch.from_numpy(np.memmap(file, np.int64, mode="c", shape=(2, rows)))
