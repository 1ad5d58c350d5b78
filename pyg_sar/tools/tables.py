"""Tables of nodes and edges, ``.parquet`` or ``.csv``, read in pieces as memory mapped arrays.

[Note: ids of nodes] Nodes are numbered 0, 1, 2, ... in the order of their table. Where its column
``id`` holds anything else (text, sparse numbers), or where there is no table of nodes and the
edges hold text, the ends of the edges are numbered by these ids, and the ids stay with the graph:
``data.node_name``, int64 ``[N]``, or UTF-8 bytes ``[N, L]`` padded with zeros. ``pyg-sar predict``
writes them beside the predictions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_sar.files import check_regular
from pyg_sar.wording import counted

Array = NDArray[Any]

TABLES = (".parquet", ".csv")
_SOURCES, _TARGETS = ("source", "src", "row"), ("target", "dst", "col")
_IDS = ("id", "node", "node_id", "nodeid")
_ROWS = 2**16  # of a piece of a table


def read_tables(nodes: Path | None, edges: Path | None, *, alone: bool = False) -> dict[str, Any]:
    """Returns what a table of nodes and a table of edges hold, by attribute.

    With ``alone`` nothing besides tells the number of nodes: without a table of nodes they are
    those that the edges name.
    """
    found: dict[str, Any] = {}
    ids = NodeIds("", complete=alone)
    with ExitStack() as files:
        if nodes is not None:
            ids = NodeIds(f"'{nodes}'")
            table = Table(nodes, of_edges=False)
            columns, rows = _columns(table, files, ids)
            found |= {"num_nodes": torch.tensor(rows)}
            for name in table.id_columns(list(columns)) if ids.numbers is not None else ():
                del columns[name]  # They are the names of the nodes.
            found |= {name: column.tensor() for name, column in columns.items()}
        if edges is not None:
            table = Table(edges, of_edges=True)
            columns, _ = _columns(table, files, ids)
            for name, value in _with_ends(table, columns, ids, alone and nodes is None).items():
                if name in found:
                    raise ValueError(f"'{edges}' gives '{name}', which '{nodes}' gives as well")
                found[name] = value
        if ids.numbers is not None:
            found |= {"num_nodes": torch.tensor(len(ids.numbers)), "node_name": ids.names()}
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """A file, and if its rows are nodes or edges."""

    path: Path
    of_edges: bool

    def __str__(self) -> str:
        return f"'{self.path}'"

    def id_columns(self, columns: list[str]) -> list[str]:
        """Returns the columns that name nodes: the ends of edges, or the id of a node."""
        if self.of_edges:
            return _ends(self, columns)
        found = [name for name in columns if name.lower() in _IDS]
        if len(found) > 1:
            raise ValueError(
                f"{self} has columns {' and '.join(map(repr, found))}, and only one names the "
                "nodes: rename the other"
            )
        return found


class NodeIds:
    """The ids of nodes in the user's tables, and the numbers of these nodes.

    ``source`` is the table of nodes, as errors name it; empty: there is none. ``complete``: the
    nodes are those that edges name, so text is numbered as it comes.
    """

    def __init__(self, source: str, *, complete: bool = False) -> None:
        self.source, self._complete = source, complete
        #: The number of each node by its id; ``None`` while ids are the numbers themselves.
        self.numbers: dict[Any, int] | None = None

    def add(self, ids: Array, first: int) -> None:
        """Takes the ids of the nodes ``first``, ``first + 1``, ... from the table of nodes."""
        if self.numbers is None:
            if ids.dtype.kind == "i" and np.array_equal(ids, np.arange(first, first + len(ids))):
                return
            self.numbers = {node: node for node in range(first)}
        before = len(self.numbers)
        self.numbers.update(zip(ids.tolist(), range(first, first + len(ids)), strict=True))
        if len(self.numbers) != before + len(ids):
            twice = next(id for k, id in enumerate(ids.tolist()) if self.numbers[id] != first + k)
            raise ValueError(f"{self.source} names node {_shown(twice)} more than once")

    def numbers_of(self, ids: Array, column: str) -> Array:
        """Returns the numbers, int64, of the ids in a column of edges."""
        if self.numbers is None:
            if ids.dtype.kind != "S":
                return ids
            if not self._complete:
                raise ValueError(
                    f"{column} holds text, "
                    + (
                        f"and {self.source} has no column of such ids: name it 'id'"
                        if self.source
                        else "and there is no table of nodes whose column 'id' tells their order"
                    )
                )
            self.numbers = {}
        distinct, places = np.unique(ids, return_inverse=True)
        names = distinct.tolist()
        if self.source:
            unknown = next((id for id in names if id not in self.numbers), None)
            if unknown is not None:
                raise ValueError(
                    f"{column} names node {_shown(unknown)}, which {self.source} lacks"
                )
        numbers = [self.numbers.setdefault(id, len(self.numbers)) for id in names]
        return np.array(numbers, np.int64)[places.reshape(-1)]

    def names(self) -> Tensor:
        """Returns the ids in the nodes' order: int64 ``[N]``, or UTF-8 bytes ``[N, L]``."""
        ids = np.array(list(self.numbers or ()))
        if ids.dtype.kind == "i":
            return torch.from_numpy(ids)
        return torch.from_numpy(ids.view(np.uint8).reshape(len(ids), -1).copy())


def _shown(id: Any) -> str:
    return repr(id.decode(errors="replace")) if isinstance(id, bytes) else str(id)


def names_of(rows: Array) -> list[Any]:
    """Returns rows of ``data.node_name`` as integers or text."""
    if rows.ndim == 1:
        return list(rows.tolist())
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


def _columns(table: Table, files: ExitStack, ids: NodeIds) -> tuple[dict[str, ColumnFile], int]:
    """Returns the columns of a table as arrays in files, ends of edges as numbers, and its rows."""
    columns: dict[str, ColumnFile] = {}
    rows = 0
    for piece in _pieces(table):
        length = len(next(iter(piece.values()), ()))
        for name in table.id_columns(list(piece)):
            if table.of_edges:
                piece[name] = ids.numbers_of(piece[name], f"'{name}' of {table}")
            else:
                ids.add(piece[name], rows)
                if piece[name].dtype.kind == "S":
                    del piece[name]
        rows += length
        for name, values in piece.items():
            if name not in columns:
                file = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
                columns[name] = ColumnFile(table.path, name, values, file)
            columns[name].add(values)
    return columns, rows


def _with_ends(
    table: Table, columns: dict[str, ColumnFile], ids: NodeIds, alone: bool
) -> dict[str, Any]:
    if not columns:
        none = {"edge_index": torch.empty(2, 0, dtype=torch.long)}
        return none | {"num_nodes": torch.tensor(0)} if alone else none
    ends = [columns.pop(name).array() for name in _ends(table, list(columns))]
    others = {name: column.tensor() for name, column in columns.items()}
    if not alone or ids.numbers is not None:
        return {"edge_index": joined_ends(ends)} | others
    nodes = torch.tensor(_number_ends(ends, ids))
    return {"edge_index": joined_ends(ends, ids), "num_nodes": nodes} | others


def _number_ends(ends: list[Array], ids: NodeIds) -> int:
    """Numbers the integers that edges name, in ascending order; returns how many there are."""
    distinct = np.empty(0, np.int64)
    for end in ends:
        for first in range(0, len(end), 64 * _ROWS):
            distinct = np.union1d(distinct, end[first : first + 64 * _ROWS])
    ids.add(distinct, 0)
    return len(distinct)


def _ends(table: Table, columns: list[str]) -> list[str]:
    """Returns the columns of the sources and of the targets of a table of edges."""
    ends = []
    for what, names in (("source", _SOURCES), ("target", _TARGETS)):
        known = [name for name in columns if name.lower() in names]
        if len(known) != 1:
            raise ValueError(
                f"Expected {table} to have one column named {' or '.join(names)}, the {what} of "
                f"each edge (it has {', '.join(map(repr, columns))}); the first line of a .csv "
                "names the columns, with commas and no blanks between"
            )
        ends.append(known[0])
    return ends


def _check_names(table: Table, names: list[str]) -> None:
    """Raises where columns are missing, or have one name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{table} has more than one column named {twice!r}; rename one")
    if table.of_edges:
        _ends(table, names)


def arrow(path: Path) -> tuple[Any, Any, Any]:
    """Returns the modules ``pyarrow``, ``pyarrow.csv`` and ``pyarrow.parquet``, for a table."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import csv, parquet
    except ImportError as error:
        raise ImportError(
            f"'{path}' needs pyarrow: pip install 'pyg_sar[tables]', or take arrays (.npy)"
        ) from error
    return pyarrow, csv, parquet


def _pieces(table: Table) -> Iterator[dict[str, Array]]:
    pyarrow, csv, parquet = arrow(table.path)
    check_regular(table.path)
    try:
        if table.path.suffix == ".csv":
            # A line without a value is a node without one, where there is one column.
            options = csv.ParseOptions(ignore_empty_lines=table.of_edges)
            with csv.open_csv(table.path, parse_options=options) as reader:
                _check_names(table, reader.schema.names)
                yield from (_arrays(table, piece) for piece in reader)
        else:
            with parquet.ParquetFile(table.path) as file:
                _check_names(table, file.schema_arrow.names)
                yield from (_arrays(table, piece) for piece in file.iter_batches(_ROWS))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{table} can't be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{table} is not UTF-8: {error}; save it as UTF-8") from error


def _arrays(table: Table, piece: Any) -> dict[str, Array]:
    arrays, wrong = {}, []
    ids = table.id_columns(piece.schema.names)
    for name, column in zip(piece.schema.names, piece.columns, strict=True):
        if column.null_count:
            raise ValueError(f"'{name}' of {table} has rows without a value")
        values = _values(f"'{name}' of {table}", column)
        if name in ids:
            values = _ids(f"'{name}' of {table}", values)
        elif values.dtype.kind not in "iufb":
            wrong.append(f"'{name}' ({column.type})")
        is_mask = name.endswith("mask") and values.dtype.kind in "iu"
        arrays[name] = values.astype(bool) if is_mask and (values // 2 == 0).all() else values
    if len({arrays[name].dtype.kind for name in ids}) > 1:
        raise ValueError(
            f"Expected {' and '.join(map(repr, ids))} of {table} to name nodes alike (got text and "
            "integers): save both as text"
        )
    if wrong:
        raise ValueError(
            f"Expected the columns of {table} to hold numbers (got {', '.join(wrong)}): number "
            "what they hold, or leave them out; only ids of nodes may be text"
        )
    return arrays


def _ids(what: str, values: Array) -> Array:
    """Returns ids of nodes as int64 or as UTF-8 bytes."""
    kind = values.dtype.kind
    if values.ndim == 1 and kind in "iu" and not (kind == "u" and (values >= 2**63).any()):
        return values.astype(np.int64)
    if kind == "O" and all(isinstance(text, str) for text in values):
        if not all(values):
            raise ValueError(f"{what} has rows without a value")
        return np.array([text.encode() for text in values], dtype=np.bytes_)
    found = values.dtype if values.ndim == 1 else "lists"
    raise ValueError(
        f"Expected {what} to hold node ids, text or integers below 2**63 (got {found}): save them "
        "so, or rename the column if it holds no ids"
    )


def _values(what: str, column: Any) -> Array:
    if not (hasattr(column, "flatten") and hasattr(column.type, "value_type")):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    inner = column.flatten()
    if inner.null_count:
        raise ValueError(f"{what} has lists without a value")
    lengths = np.asarray(column.value_lengths())
    if lengths.size and (lengths != lengths[0]).any():
        raise ValueError(f"{what} has lists of unlike lengths")
    return np.asarray(inner.to_numpy(zero_copy_only=False)).reshape(len(column), -1)


def mapped_array(
    file: Any, dtype: Any, shape: tuple[int, ...], order: Literal["C", "F"] = "C"
) -> Array:
    """Returns the array that was written to a file, memory mapped; changes stay in memory."""
    file.flush()
    if 0 in shape or not shape:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, mode="c", shape=shape, order=order)


class ColumnFile:
    """A column of a table on its way into a file without a name."""

    def __init__(self, path: Path, name: str, like: Array, file: Any) -> None:
        self._what, self.dtype, self._shape = f"'{name}' of '{path}'", like.dtype, like.shape[1:]
        self.rows, self._file = 0, file

    def add(self, values: Array) -> None:
        if values.dtype != self.dtype or values.shape[1:] != self._shape:
            raise ValueError(
                f"{self._what} changes from {self.dtype} of shape {list(self._shape)} to "
                f"{values.dtype} of shape {list(values.shape[1:])} after "
                f"{counted(self.rows, 'rows')}"
            )
        self._file.write(np.ascontiguousarray(values).data)
        self.rows += len(values)

    def array(self) -> Array:
        """Returns the rows, memory mapped."""
        return mapped_array(self._file, self.dtype, (self.rows, *self._shape))

    def tensor(self) -> Tensor:
        """Returns the rows as a tensor that is memory mapped."""
        return torch.from_numpy(self.array())


def joined_ends(ends: list[Array], ids: NodeIds | None = None) -> Tensor:
    """Returns an ``edge_index`` of two columns, numbered by ``ids``, in another file."""
    rows = len(ends[0])
    with tempfile.TemporaryFile() as file:
        for end in ends:
            for first in range(0, rows, _ROWS):
                part = end[first : first + _ROWS]
                numbers = part if ids is None else ids.numbers_of(part, "a column")
                file.write(numbers.astype(np.int64).data)
        return torch.from_numpy(mapped_array(file, np.int64, (2, rows)))
