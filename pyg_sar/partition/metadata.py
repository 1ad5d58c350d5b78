"""``metadata.json`` of a partition: its fields, declared once, and how it is read by them.

[Note: checked once] Checksums guard against accidents, not against a file that another program
wrote. So each field is read by its declaration (:data:`Rule`): its type, its range, and what it
has to be beside other fields. These must agree, and the tensors of a part
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
from pyg_sar.files import from_json, has_checksum, read_text
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
Known = Mapping[str, Any]
Rule = Callable[[Any, Known], tuple[bool, str]]
"""Says whether a field's value is what it has to be, and what that is, in words. It may depend on
what is known: fields that are declared before it, and what the reader of the object passes."""


def count(least: int = 0, most: str = "") -> Rule:
    """Returns the rule of a whole number; ``most`` names a known value."""

    def rule(value: Any, known: Known) -> tuple[bool, str]:
        top = known[most] if most else _MOST
        limit = f"from {least} to {top}" if most else f"of at least {least}"
        return _is_int(value) and least <= value <= top, f"a whole number {limit}"

    return rule


def text(*choices: str, known_as: str = "") -> Rule:
    """Returns the rule of a text, one of the choices or known values if there are any."""

    def rule(value: Any, known: Known) -> tuple[bool, str]:
        allowed = known[known_as] if known_as else choices
        fits = isinstance(value, str) and (not allowed or value in allowed)
        several = "one of " + ", ".join(allowed)
        return fits, several if len(allowed) > 1 else repr(*allowed) if allowed else "a text"

    return rule


def same(name: str) -> Rule:
    """Returns the rule of a field that is a known value."""
    return lambda value, known: (
        type(value) is type(known[name]) and value == known[name],
        repr(known[name]),
    )


def many(what: str, fits: Callable[[Any], bool], length: str = "", total: str = "") -> Rule:
    """Returns the rule of a list, where known values may be its length and its sum."""

    def rule(value: Any, known: Known) -> tuple[bool, str]:
        expected = f"{known[length]} {what}" if length else what
        if not isinstance(value, list) or not all(map(fits, value)):
            return False, expected
        if total and sum(value) != known[total]:
            return False, f"{expected} with the sum {known[total]}"
        return not length or len(value) == known[length], expected

    return rule


def counts(length: str = "", total: str = "") -> Rule:
    """Returns the rule of a list of whole numbers of at least 0."""
    return many("whole numbers of at least 0", _is_count, length, total)


def or_null(rule: Rule) -> Rule:
    """Returns the rule of a field that may be ``null``."""
    return lambda value, known: (
        value is None or rule(value, known)[0],
        f"{rule(value, known)[1]} or null",
    )


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= _MOST


class Fields:
    """An object of a partition's metadata. Every method raises :class:`PartitionError`.

    ``place`` is where it stands in the file, such as ``'parts[0]'``.
    """

    def __init__(self, file: Path, content: Any, place: str = "") -> None:
        self.file, self.place = file, place
        self.content: Mapping[str, Any] = content
        if type(content) is not dict:
            raise self.wrong("", "an object", content)

    def wrong(self, name: str, expected: Any, got: Any) -> PartitionError:
        """Returns the error for a field."""
        text = repr(got)
        shown = text if len(text) <= 60 else text[:57] + "..."
        return PartitionError(
            f"'{self.file}': expected '{self._place(name)}' to be {expected} (got {shown}); copy "
            "it again or partition the graph anew"
        )

    def _place(self, name: str) -> str:
        return ".".join(filter(None, (self.place, name)))

    def get(self, name: str, rule: Rule, known: Known | None = None) -> Any:
        """Returns a field, which must be there and fit."""
        value = self.content.get(name, "nothing")
        fits, expected = rule(value, known or {})
        if name not in self.content or not fits:
            raise self.wrong(name, expected, value)
        return value

    def read(self, declared: Mapping[str, Rule], **known: Any) -> dict[str, Any]:
        """Returns the declared fields."""
        found: dict[str, Any] = {}
        for name, rule in declared.items():
            found[name] = self.get(name, rule, known | found)
        return found

    def inner(self, name: str) -> Fields:
        """Returns a field that is an object."""
        value = self.get(name, lambda value, known: (True, "an object"))
        return Fields(self.file, value, self._place(name))

    def objects(self, name: str) -> dict[str, Fields]:
        """Returns an object whose fields are objects."""
        inner = self.inner(name)
        return {name: inner.inner(name) for name in inner.content}

    def rows(self, name: str, length: int | None = None) -> list[Fields]:
        """Returns a field that is a list of objects, as many as ``length``."""
        rule = many("objects in a list", lambda v: True, "" if length is None else "length")
        rows, start = self.get(name, rule, {"length": length}), self._place(name)
        return [Fields(self.file, row, f"{start}[{k}]") for k, row in enumerate(rows)]


METADATA = "metadata.json"

_FORMS = {
    "dense": ("tensor", "column_major", "numpy", "list", "tuple"),
    "csr": ("sparse_coo", "sparse_csr", "sparse_csc", "SparseTensor"),
    "strings": ("list", "tuple", "numpy"),
    "json": ("json", "tuple", "coded"),
}
_KINDS = ("nodes", "links")
_ID_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

GRAPH = {
    "num_parts": count(least=1),
    "num_nodes": count(),
    "num_edges": count(),
    "is_directed": lambda value, known: (isinstance(value, bool), "true or false"),
    "method": text(),
    "seed": lambda value, known: (_is_int(value), "a whole number"),
    "num_graphs": or_null(count()),
    "batched": or_null(count()),
}
STATISTICS = {
    "edge_cut": count(most="num_edges"),
    "nodes": counts("num_parts", total="num_nodes"),
    "edges": counts("num_parts", total="num_edges"),
    "halo": counts("num_parts"),
    "training_nodes": or_null(counts("num_parts")),
}
TYPE_STATISTICS = {
    "name": same("key"),
    "nodes": counts("num_parts", total="count"),
    "training_nodes": or_null(counts("num_parts")),
}
RELATION_STATISTICS = {
    "edge_type": same("key"),
    "edge_cut": count(most="count"),
    "edges": counts("num_parts", total="count"),
    "halo": counts("num_parts"),
}
PART = {
    "num_nodes": same("nodes"),
    "num_edges": same("edges"),
    "num_halo": same("halo"),
    "file": text(),
    "sha256": text(),
    "bytes": count(),
}
SERIES = {
    "dtype": lambda value, known: (
        isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype),
        "a dtype of PyTorch",
    ),
    "shape": lambda value, known: (
        counts()(value, known)[0] and len(value) > 1 and value[1] == known["num_nodes"],
        f"[T, {known['num_nodes']}, ...]",
    ),
}
SERIES_FILE = {"file": same("file"), "bytes": same("size"), "sha256": text()}
STORE = {
    "name": many("texts", lambda value: isinstance(value, str), "length"),
    "count": count(),
}
ATTRIBUTE = {
    "level": text(known_as="levels"),
    "layout": text(*_FORMS),
    "dtype": text(),
    "shape": counts(),
    "dim": count(),
    "form": lambda value, known: text(*_FORMS[known["layout"]])(value, known),
}
NODE_LIST = {
    "name": text(),
    "kind": text(known_as="kinds"),
    "key": or_null(text()),
}
NODE_LIST_IDS = {
    "dtype": text(*_ID_DTYPES),
    "layout": text("dense"),
    "shape": counts(),
    "dim": same("axis"),
}
"""The attribute of a list of node ids, which :data:`ATTRIBUTE` describes as well."""


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
    """Snapshots of all nodes: dtype, ``[T, N, *]``, and each part's file, bytes and checksum."""

    dtype: str
    shape: list[int]
    files: list[str]
    bytes: list[int]
    sha256: list[str]  # Of the checksums of its snapshots.


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
    batched: int | None = None  # Graphs of a ``Batch``, which it is again.
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

        ``hosted``: ranks are parts that workers host (``launch(parts=...)``).
        """
        if world_size == self.num_parts:
            return
        parts = self.num_parts
        there, start = counted(world_size, "workers"), f"start {counted(parts, 'workers')}"
        if world_size < parts:
            start += f", pass parts={parts} to pyg_sar.launch or pyg_sar.run,"
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
        text = read_text(path)
    except (FileNotFoundError, NotADirectoryError):
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
    if not has_checksum(text):
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
    """Returns the metadata of a partition, of its content in JSON, checked; errors name the file
    ``path``.
    """
    fields = Fields(path, content)
    graph = Fields(path, {"num_graphs": None, "batched": None, **fields.content}).read(GRAPH)
    stores = _stores(fields, graph)
    statistics = _statistics(fields.inner("statistics"), graph, stores)
    parts = [
        PartInfo(**row.read(PART, **{name: getattr(statistics, name)[p] for name in _SUMMED}))
        for p, row in enumerate(fields.rows("parts", statistics.num_parts))
    ]
    return PartitionMetadata(
        root=path.parent,
        version=VERSION,
        statistics=statistics,
        stores=stores,
        parts=parts,
        series=_series(fields, statistics) if "series" in fields.content else {},
        **graph,
    )


def _series(fields: Fields, statistics: PartitionStatistics) -> dict[str, SeriesInfo]:
    """Reads what is known of snapshots, whose files have so many bytes as their shapes tell."""
    found, count = {}, statistics.num_parts
    for number, (name, row) in enumerate(fields.objects("series").items()):
        dtype, shape = row.read(SERIES, num_nodes=statistics.num_nodes).values()
        each = math.prod((shape[0], *shape[2:], getattr(torch, dtype).itemsize))
        files = [series_file(number, p, count) for p in range(count)]
        sizes = [nodes * each + 4 * shape[0] for nodes in statistics.nodes]
        rows = zip(files, sizes, row.rows("files", count), strict=True)
        sums = [
            given.read(SERIES_FILE, file=file, size=size)["sha256"] for file, size, given in rows
        ]
        found[name] = SeriesInfo(dtype=dtype, shape=shape, files=files, bytes=sizes, sha256=sums)
    return found


def series_file(number: int, part: int, num_parts: int) -> str:
    """Returns the name of the file of a part's snapshots of one name, which has this number."""
    return f"series-{number:03d}-{part:05d}-of-{num_parts:05d}.bin"


# Statistics ##################################################################

_SUMMED = ("nodes", "edges", "halo")


def _statistics(
    fields: Fields, graph: dict[str, Any], stores: list[StoreInfo]
) -> PartitionStatistics:
    totals = {name: graph[name] for name in ("num_parts", "num_nodes", "num_edges")}
    found = totals | fields.read(STATISTICS, **totals)
    if not is_hetero(stores):
        return PartitionStatistics(**found)
    kinds: dict[str, list[dict[str, Any]]] = {"types": [], "relations": []}
    for name, level, declared in (
        ("types", "node", TYPE_STATISTICS),
        ("relations", "edge", RELATION_STATISTICS),
    ):
        of_level = [store for store in stores if level in store.totals]
        for store, row in zip(of_level, fields.rows(name, len(of_level)), strict=True):
            key = store.key if level == "node" else list(store.key)
            known = totals | {"key": key, "count": store.totals[level]}
            kinds[name].append(row.read(declared, **known))
    for name in _SUMMED:
        columns = [row[name] for rows in kinds.values() for row in rows if name in row]
        for p, number in enumerate(found[name]):
            if (total := sum(column[p] for column in columns)) != number:
                raise fields.wrong(f"{name}[{p}]", f"{total}, the sum of its kinds", number)
    return HeteroPartitionStatistics(
        **found,
        types=[TypeStatistics(**row) for row in kinds["types"]],
        relations=[RelationStatistics(**row) for row in kinds["relations"]],
    )


# Attributes ##################################################################


def _stores(fields: Fields, graph: dict[str, Any]) -> list[StoreInfo]:
    """Reads the stores of the graph, of its node types and of its relations."""
    if "hetero" not in fields.content:
        totals = {"node": graph["num_nodes"], "edge": graph["num_edges"]}
        return [_store(fields, None, "", totals, _KINDS)]
    inner, stores = fields.inner("hetero"), [StoreInfo(None, "", {}, *_attributes(fields, {}))]
    types: list[Any] = []
    for k, row in enumerate(inner.rows("types")):
        found = row.read(STORE, length=1)
        types += found["name"]
        stores.append(_store(row, types[k], f"type.{k}/", {"node": found["count"]}, _KINDS))
    if not types or len(set(types)) < len(types):
        raise inner.wrong("types", "node types of different names", types)
    relations: list[Any] = []
    for k, row in enumerate(inner.rows("relations")):
        found = row.read(STORE, length=3)
        key = tuple(found["name"])
        if key[0] not in types or key[2] not in types:
            raise row.wrong("name", f"a relation between the node types {types}", list(key))
        relations.append(key)
        stores.append(_store(row, key, f"relation.{k}/", {"edge": found["count"]}, ("links",)))
    if len(set(relations)) < len(relations):
        raise inner.wrong("relations", "relations of different names", relations)
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
    for name, row in fields.objects("attributes").items():
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
    found = Attribute(**fields.read(ATTRIBUTE, levels=(*counts, "graph")))
    level, layout = found.level, found.layout
    dims = {"csr": 2, "strings": 1, "json": 0}.get(layout, len(found.shape))
    if layout == "dense":
        dims = {"list": 1, "tuple": 1, "column_major": 2}.get(found.form, dims)
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
    found = fields.read(NODE_LIST, kinds=kinds)
    inner = fields.inner("attribute")
    first = [2] if found["kind"] == "links" else []
    shape = inner.read(NODE_LIST_IDS, axis=len(first))["shape"]
    if len(shape) != len(first) + 1 or shape[:-1] != first:
        raise inner.wrong("shape", f"{[*first, 'K']}, that of {found['kind']}", shape)
    rows = fields.objects("rows").items()
    return NodeList(
        attribute=_row_attribute(inner, shape[-1]),
        rows={other: _row_attribute(row, shape[-1]) for other, row in rows},
        **found,
    )


def _row_attribute(fields: Fields, count: int) -> Attribute:
    """Reads an attribute with a row per entry of a list."""
    fields.get("level", text("row"))
    return _attribute(fields, {"row": count})
