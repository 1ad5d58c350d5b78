"""``metadata.json`` of a partition, read field by field and checked against itself.

[Note: checked once] Checksums guard against accidents, not against a file that another program
wrote. So each field is read by its type, what two fields tell must agree, and the tensors of a part
(``part_checks.py``) must be those that the metadata describes: whatever does not fit is one
:class:`~pyg_sar.errors.PartitionError` that names the file and the field or tensor.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pyg_sar.errors import PartitionError
from pyg_sar.files import check_regular, from_json, with_checksum
from pyg_sar.partition.assignment import METHODS
from pyg_sar.partition.attributes import RESERVED, Attribute, decode, stored_dtype
from pyg_sar.partition.layout import (
    HeteroPartitionStatistics,
    PartitionStatistics,
    RelationStatistics,
    TypeStatistics,
)
from pyg_sar.partition.node_lists import NodeList
from pyg_sar.partition.schema import FORMAT, VERSION, RowGroup, StoreInfo, is_hetero
from pyg_sar.wording import Shown, counted

_MOST = 2**63 - 1


class Fields:
    """An object of a partition's metadata. Every method raises :class:`PartitionError`.

    Args:
        file: The file that it came from.
        content: The object.
        place: Where it stands in the file, such as ``'parts[0]'``.
    """

    def __init__(self, file: Path, content: Any, place: str = "") -> None:
        self.file, self.place = file, place
        self.content: Mapping[str, Any] = content
        if not isinstance(content, dict):
            raise self.wrong("", "an object", content)

    def _place(self, name: str) -> str:
        return ".".join(filter(None, (self.place, name)))

    def wrong(self, name: str, expected: str, got: Any) -> PartitionError:
        """Returns the error for a field."""
        where = self._place(name)
        text = repr(got)
        shown = text if len(text) <= 60 else text[:57] + "..."
        return PartitionError(
            f"'{self.file}': expected '{where}' to be {expected} (got {shown}); copy it again or "
            "partition the graph anew"
        )

    def get(self, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        """Returns a field, which must be there and fit."""
        if name not in self.content:
            raise self.wrong(name, expected, "nothing")
        value = self.content[name]
        if not fits(value):
            raise self.wrong(name, expected, value)
        return value

    def count(self, name: str, least: int = 0, most: int = _MOST) -> int:
        """Returns a field that is a whole number."""
        limit = f"from {least} to {most}" if most < _MOST else f"of at least {least}"
        what = f"a whole number {limit}"
        return int(self.get(name, what, lambda v: _is_int(v) and least <= v <= most))

    def text(self, name: str, choices: tuple[str, ...] = ()) -> str:
        """Returns a field that is a string, one of ``choices`` if there are any."""
        expected = "one of " + ", ".join(choices) if choices else "a text"
        return str(self.get(name, expected, lambda v: _is_str(v) and (not choices or v in choices)))

    def flag(self, name: str) -> bool:
        """Returns a field that is ``true`` or ``false``."""
        return bool(self.get(name, "true or false", lambda v: isinstance(v, bool)))

    def _list(
        self, name: str, what: str, length: int | None, fits: Callable[[Any], bool]
    ) -> list[Any]:
        """Returns a field that is a list, of ``length`` entries that fit each."""
        return list(
            self.get(
                name,
                what if length is None else f"{length} {what}",
                lambda v: isinstance(v, list) and length in (None, len(v)) and all(map(fits, v)),
            )
        )

    def counts(self, name: str, length: int | None = None) -> list[int]:
        """Returns a field that is a list of whole numbers of at least 0, as many as ``length``."""
        what = "whole numbers of at least 0"
        return self._list(name, what, length, lambda n: _is_int(n) and 0 <= n <= _MOST)

    def texts(self, name: str, length: int) -> list[str]:
        """Returns a field that is a list of ``length`` strings."""
        return self._list(name, "texts", length, _is_str)

    def same(self, name: str, expected: Any) -> None:
        """Raises unless a field is what other fields tell already."""
        self.get(name, f"{expected!r}", lambda v: type(v) is type(expected) and v == expected)

    def inner(self, name: str) -> Fields:
        """Returns a field that is an object."""
        return Fields(self.file, self.get(name, "an object", lambda v: True), self._place(name))

    def items(self) -> dict[str, Fields]:
        """Returns all fields, which are objects."""
        return {name: self.inner(name) for name in self.content}

    def rows(self, name: str, length: int | None = None) -> list[Fields]:
        """Returns a field that is a list of objects, as many as ``length``."""
        rows = self._list(name, "objects in a list", length, lambda v: True)
        start = self._place(name)
        return [Fields(self.file, row, f"{start}[{k}]") for k, row in enumerate(rows)]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


METADATA = "metadata.json"

_FORMS = {
    "dense": ("tensor", "numpy", "list", "tuple"),
    "csr": ("sparse_coo", "sparse_csr", "sparse_csc", "SparseTensor"),
    "strings": ("list", "tuple", "numpy"),
    "json": ("json", "tuple", "coded"),
}
_KINDS = ("nodes", "links")
_ID_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo(Shown):
    """One part's file: its name, checksum (SHA-256), size in bytes, and row counts."""

    file: str
    sha256: str
    bytes: int
    num_nodes: int
    num_edges: int
    num_halo: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesInfo(Shown):
    """Snapshots of all nodes: dtype, ``[T, N, *]``, and of each part the file and its bytes."""

    dtype: str
    shape: list[int]
    files: list[str]
    bytes: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionMetadata(Shown):
    """The content of ``metadata.json``, about the whole partition."""

    root: Path
    version: int
    num_parts: int
    num_nodes: int
    num_edges: int
    is_directed: bool
    method: str
    seed: int
    statistics: PartitionStatistics
    stores: list[StoreInfo]
    parts: list[PartInfo]
    num_graphs: int | None = None
    series: dict[str, SeriesInfo] = field(default_factory=dict)

    @property
    def hetero(self) -> bool:
        """True where the graph is a ``HeteroData``."""
        return is_hetero(self.stores)

    @property
    def attributes(self) -> dict[str, Attribute]:
        """The graph's attributes, without those of node types and relations."""
        return self.stores[0].attributes

    def groups(self) -> list[RowGroup]:
        """Returns all rows that are split among parts; nodes come before the edges between them."""
        return [group for store in self.stores for group in store.groups()]

    def sizes(self, store: StoreInfo, part: int) -> dict[str, int]:
        """Returns the numbers of a part's nodes, edges and halo rows by their letters."""
        rows: Any = self.statistics
        if isinstance(rows, HeteroPartitionStatistics) and store.totals:
            kinds: dict[Any, Any] = {row.name: row for row in rows.types}
            kinds |= {tuple(row.edge_type): row for row in rows.relations}
            rows = kinds[store.key]
        letters = {"node": {"n": "nodes"}, "edge": {"e": "edges", "h": "halo"}}
        return {
            letter: getattr(rows, name)[part]
            for level in store.totals
            for letter, name in letters[level].items()
        }

    def check_world_size(self, world_size: int, hosted: bool = False) -> None:
        """Raises :class:`PartitionError` unless there is one part per rank.

        Args:
            world_size: The number of ranks.
            hosted: They are parts that workers host (``launch(parts=...)``).
        """
        if world_size == self.num_parts:
            return
        parts = self.num_parts
        there, start = counted(world_size, "workers"), f"start {counted(parts, 'workers')}"
        start += f", host them (parts={parts})"
        if hosted:
            there, start = counted(world_size, "hosted parts"), f"pass parts={parts}"
        raise PartitionError(
            f"The partition '{self.root}' has {counted(parts, 'parts')}, but this run has {there}; "
            f"{start} or partition the graph into {counted(world_size, 'parts')}"
        )


def read_metadata(root: str | os.PathLike[str]) -> PartitionMetadata:
    """Reads and checks ``metadata.json``.

    Raises:
        PartitionError: When there is no partition, or it is damaged, or of another version.
    """
    root = Path(root)
    path = root / METADATA
    try:
        check_regular(path)
        text = path.read_text()
    except FileNotFoundError:
        raise PartitionError(
            f"'{root}' holds no partition ('{METADATA}' is missing); write one with "
            "pyg_sar.write_partitions or 'pyg-sar partition'"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PartitionError(
            f"'{path}' can't be read: {error}; copy it again or partition the graph anew"
        ) from error
    damaged = PartitionError(
        f"'{path}' is truncated or was altered; copy it again or partition the graph anew"
    )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PartitionError(f"'{path}' does not describe a {FORMAT}")
    _check_version(root, content)
    content.pop("checksum", None)
    if text != with_checksum(content):
        raise damaged
    return parse_metadata(path, content)


def _check_version(root: Path, content: Mapping[str, Any]) -> None:
    version = content.get("version")
    if version == VERSION and type(version) is int:
        return
    if type(version) is not int or version < 1:
        raise PartitionError(
            f"'{root}' has format version {version!r}, which is not known here ({VERSION}); "
            "partition the graph anew"
        )
    if version > VERSION:
        raise PartitionError(
            f"'{root}' has format version {version}, newer than {VERSION}, the newest known here; "
            "update pyg_sar"
        )
    command = ["pyg-sar partition GRAPH"]
    for name in ("num_parts", "method", "seed"):
        value = content.get(name)
        if type(value) is int or value in METHODS:
            command.append(f"--{name.removeprefix('num_')} {value}")
    command.append(f"--out {shlex.quote(os.fspath(root))} --overwrite")
    raise PartitionError(
        f"'{root}' has format version {version}, older than {VERSION}, the only one read here; "
        f"write it again from its graph: {' '.join(command)}"
    )


def parse_metadata(path: Path, content: Any) -> PartitionMetadata:
    """Returns the metadata of a partition, of its content in JSON, checked.

    Args:
        path: The file, for messages.
        content: What it holds.

    Raises:
        PartitionError: A field is missing, or is not what it should be.
    """
    root, fields = path.parent, Fields(path, content)
    counts = {
        "num_parts": fields.count("num_parts", least=1),
        "num_nodes": fields.count("num_nodes"),
        "num_edges": fields.count("num_edges"),
    }
    stores = _stores(fields, counts)
    statistics = _statistics(fields.inner("statistics"), counts, stores)
    known = fields.content.get("num_graphs") is not None
    return PartitionMetadata(
        root=root,
        version=VERSION,
        **counts,
        is_directed=fields.flag("is_directed"),
        method=fields.text("method"),
        seed=fields.get("seed", "a whole number", lambda v: type(v) is int),
        statistics=statistics,
        stores=stores,
        parts=_parts(fields, statistics),
        num_graphs=fields.count("num_graphs") if known else None,
        series=_series(fields, statistics) if "series" in fields.content else {},
    )


def _series(fields: Fields, statistics: PartitionStatistics) -> dict[str, SeriesInfo]:
    """Reads what is known of snapshots, whose files have so many bytes as their shapes tell."""
    found = {}
    for number, (name, row) in enumerate(fields.inner("series").items().items()):
        dtype, shape = row.text("dtype"), row.counts("shape")
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise row.wrong("dtype", "a dtype of PyTorch", dtype)
        if len(shape) < 2 or shape[1] != statistics.num_nodes:
            raise row.wrong("shape", f"[T, {statistics.num_nodes}, ...]", shape)
        each = math.prod((shape[0], *shape[2:], getattr(torch, dtype).itemsize))
        info = SeriesInfo(
            dtype=dtype,
            shape=shape,
            files=[
                series_file(number, p, len(statistics.nodes)) for p in range(len(statistics.nodes))
            ],
            bytes=[count * each for count in statistics.nodes],
        )
        for file, size, given in zip(
            info.files, info.bytes, row.rows("files", len(info.files)), strict=True
        ):
            given.same("file", file)
            given.same("bytes", size)
        found[name] = info
    return found


def series_file(number: int, part: int, num_parts: int) -> str:
    """Returns the name of the file of a part's snapshots of one name, which has this number."""
    return f"series-{number:03d}-{part:05d}-of-{num_parts:05d}.bin"


def _parts(fields: Fields, statistics: PartitionStatistics) -> list[PartInfo]:
    parts = []
    for p, row in enumerate(fields.rows("parts", statistics.num_parts)):
        counts = {
            f"num_{name}": getattr(statistics, name)[p] for name in ("nodes", "edges", "halo")
        }
        for name, count in counts.items():
            row.same(name, count)
        file, sha256, size = row.text("file"), row.text("sha256"), row.count("bytes")
        parts.append(PartInfo(file=file, sha256=sha256, bytes=size, **counts))
    return parts


# Statistics ##################################################################


def _statistics(
    fields: Fields, counts: dict[str, int], stores: list[StoreInfo]
) -> PartitionStatistics:
    number = counts["num_parts"]
    found: dict[str, Any] = {
        **counts,
        "edge_cut": fields.count("edge_cut", most=counts["num_edges"]),
        "nodes": _shares(fields, "nodes", number, counts["num_nodes"]),
        "edges": _shares(fields, "edges", number, counts["num_edges"]),
        "halo": fields.counts("halo", number),
        "training_nodes": _training(fields, number),
    }
    if not is_hetero(stores):
        return PartitionStatistics(**found)
    of_type, of_relation = (
        [(store.key, store.totals[level]) for store in stores if level in store.totals]
        for level in ("node", "edge")
    )
    types, relations = [], []
    for (name, count), row in zip(of_type, fields.rows("types", len(of_type)), strict=True):
        row.same("name", name)
        nodes, training = _shares(row, "nodes", number, count), _training(row, number)
        types.append(TypeStatistics(name=name, nodes=nodes, training_nodes=training))
    rows = fields.rows("relations", len(of_relation))
    for (key, count), row in zip(of_relation, rows, strict=True):
        row.same("edge_type", list(key))
        relation = RelationStatistics(
            edge_type=list(key),
            edge_cut=row.count("edge_cut", most=count),
            edges=_shares(row, "edges", number, count),
            halo=row.counts("halo", number),
        )
        relations.append(relation)
    for p in range(number):
        sums = {
            "nodes": sum(kind.nodes[p] for kind in types),
            "edges": sum(relation.edges[p] for relation in relations),
            "halo": sum(relation.halo[p] for relation in relations),
        }
        for name, total in sums.items():
            if found[name][p] != total:
                raise fields.wrong(f"{name}[{p}]", f"{total}, the sum of its kinds", found[name][p])
    return HeteroPartitionStatistics(**found, types=types, relations=relations)


def _shares(fields: Fields, name: str, number: int, total: int) -> list[int]:
    """Reads the rows of each part, which add up to those of the graph."""
    found = fields.counts(name, number)
    if sum(found) != total:
        raise fields.wrong(name, f"counts with the sum {total}", found)
    return found


def _training(fields: Fields, number: int) -> list[int] | None:
    if fields.content.get("training_nodes", 0) is None:
        return None
    return fields.counts("training_nodes", number)


# Attributes ##################################################################


def _stores(fields: Fields, counts: dict[str, int]) -> list[StoreInfo]:
    """Reads the stores of the graph, of its node types and of its relations."""
    if "hetero" not in fields.content:
        totals = {"node": counts["num_nodes"], "edge": counts["num_edges"]}
        return [_store(fields, None, "", totals, _KINDS)]
    stores = [StoreInfo(None, "", {}, *_attributes(fields, {}))]
    inner = fields.inner("hetero")
    for k, row in enumerate(inner.rows("types")):
        (name,) = row.texts("name", 1)
        stores.append(_store(row, name, f"type.{k}/", {"node": row.count("count")}, _KINDS))
    names = [store.key for store in stores[1:]]
    if not names or len(set(names)) < len(names):
        raise inner.wrong("types", "node types of different names", names)
    for k, row in enumerate(inner.rows("relations")):
        key = tuple(row.texts("name", 3))
        if key[0] not in names or key[2] not in names:
            raise row.wrong("name", f"a relation between the node types {names}", list(key))
        totals = {"edge": row.count("count")}
        stores.append(_store(row, key, f"relation.{k}/", totals, ("links",)))
    known = [store.key for store in stores[1 + len(names) :]]
    if len(set(known)) < len(known):
        raise inner.wrong("relations", "relations of different names", known)
    return stores


def _store(
    fields: Fields, key: Any, prefix: str, totals: dict[str, int], kinds: tuple[str, ...]
) -> StoreInfo:
    attributes, values = _attributes(fields, totals)
    lists = _lists(fields, attributes, kinds)
    return StoreInfo(key, prefix, totals, attributes, values, lists)


def _attributes(
    fields: Fields, counts: dict[str, int]
) -> tuple[dict[str, Attribute], dict[str, Any]]:
    """Reads the attributes of a store with so many rows of each level, and its plain values."""
    values = dict(fields.inner("values").content)
    attributes = {}
    for name, row in fields.inner("attributes").items().items():
        # Names that begin with "_" are those of the object that holds the attributes.
        if name in (*RESERVED, "edge_index", "num_nodes") or name.startswith("_"):
            raise row.wrong("", "an attribute of another name", name)
        attributes[name] = _attribute(row, counts)
    plain = {name for name, attribute in attributes.items() if attribute.layout == "json"}
    if plain != values.keys():
        raise fields.wrong("values", f"the values of {sorted(plain)}", sorted(values))
    for name in plain:
        if attributes[name].form == "tuple" and not isinstance(values[name], list):
            raise fields.wrong(f"values.{name}", "a list", values[name])
        if attributes[name].form == "coded":
            try:
                from_json(values[name])
            except ValueError as error:
                raise fields.wrong(f"values.{name}", "a coded value", str(error)) from None
    return attributes, values


def _attribute(fields: Fields, counts: dict[str, int]) -> Attribute:
    level = fields.text("level", (*counts, "graph"))
    layout = fields.text("layout", tuple(_FORMS))
    found = Attribute(
        level=level,
        layout=layout,
        dtype=fields.text("dtype"),
        shape=fields.counts("shape"),
        dim=fields.count("dim"),
        form=fields.text("form", _FORMS[layout]),
    )
    dims = {"csr": 2, "strings": 1, "json": 0}.get(layout, len(found.shape))
    if found.form in ("list", "tuple") and layout == "dense":
        dims = 1
    if len(found.shape) != dims:
        raise fields.wrong("shape", f"that of a {found.form} ({layout})", found.shape)
    by_rows = layout in ("csr", "strings")
    if (layout == "json" and level != "graph") or (by_rows and (found.dim or level == "graph")):
        raise fields.wrong("level", f"one that has attributes as {layout}", level)
    if level in counts and (found.dim >= dims or found.shape[found.dim] != counts[level]):
        raise fields.wrong("shape", f"of {counts[level]} {level}s on axis {found.dim}", found.shape)
    if not _known_dtype(found):
        raise fields.wrong("dtype", f"a dtype of a {found.form} ({layout})", found.dtype)
    return found


def _known_dtype(attribute: Attribute) -> bool:
    fixed = {"strings": "str", "json": "json"}.get(attribute.layout)
    if fixed is not None or (attribute.dtype == "none" and attribute.form == "SparseTensor"):
        return attribute.dtype == (fixed or "none")
    dtype = getattr(torch, attribute.dtype, None)
    if not isinstance(dtype, torch.dtype) or attribute.dtype != str(dtype).removeprefix("torch."):
        return False
    try:
        stored, axes = stored_dtype(attribute.dtype)
        form = "numpy" if attribute.form in ("numpy", "list", "tuple") else "tensor"
        plain = replace(attribute, layout="dense", form=form)
        decode(plain, {"": torch.zeros(0, *axes, dtype=stored)})
    except (RuntimeError, TypeError, KeyError):
        return False
    return True


# Lists of node ids ###########################################################


def _lists(
    fields: Fields, attributes: dict[str, Attribute], kinds: tuple[str, ...]
) -> list[NodeList]:
    """Reads the lists of node ids of a store that has these attributes."""
    found = [_list(row, kinds) for row in fields.rows("lists")]
    keys: dict[str, list[str | None]] = {}
    for info in found:
        keys.setdefault(info.name, []).append(info.key)
    names = ["edge_index", "num_nodes", *RESERVED, *attributes]
    rows = [name for info in found for name in info.rows]
    if hidden := [name for name in (*keys, *rows) if name.startswith("_")]:
        raise fields.wrong("lists", "lists and rows of other names", hidden)
    names += rows
    for name, known in keys.items():
        names.append(name)
        if len(set(known)) < len(known) or (None in known and len(known) > 1):
            raise fields.wrong("lists", f"one list for each key of '{name}'", known)
    if len(set(names)) < len(names):
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        raise fields.wrong("lists", "lists and rows of different names", twice)
    return found


def _list(fields: Fields, kinds: tuple[str, ...]) -> NodeList:
    name, kind = fields.text("name"), fields.text("kind", kinds)
    key = fields.get("key", "a text or null", lambda v: v is None or isinstance(v, str))
    inner = fields.inner("attribute")
    inner.text("dtype", _ID_DTYPES)
    inner.same("layout", "dense")
    shape = inner.counts("shape")
    first = [2] if kind == "links" else []
    if len(shape) != len(first) + 1 or shape[:-1] != first:
        raise inner.wrong("shape", f"{[*first, 'K']}, that of {kind}", shape)
    inner.same("dim", len(first))
    rows = fields.inner("rows").items()
    return NodeList(
        name,
        kind,
        _row_attribute(inner, shape[-1]),
        {other: _row_attribute(row, shape[-1]) for other, row in rows.items()},
        key,
    )


def _row_attribute(fields: Fields, count: int) -> Attribute:
    """Reads an attribute with a row per entry of a list."""
    fields.same("level", "row")
    return _attribute(fields, {"row": count})
