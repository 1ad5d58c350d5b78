"""``metadata.json`` of a partition: its fields, and how they are read.

[Note: checked once] Checksums guard against accidents, not against a file that another program
wrote. So values of JSON become dataclasses by the types that these declare (:func:`structured`),
and must agree with each other. The tensors of a part (``part_checks.py``) must be those that the
metadata describes: whatever does not fit is one :class:`~pyg_sar.errors.PartitionError` that names
the file and the field or tensor.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from pyg_sar.errors import PartitionError
from pyg_sar.files import from_json, has_checksum, read_text
from pyg_sar.partition.attributes import RESERVED, Attribute, decode, stored_dtype
from pyg_sar.partition.layout import HeteroPartitionStatistics, PartitionStatistics
from pyg_sar.partition.node_lists import NodeList
from pyg_sar.partition.schema import FORMAT, VERSION, RowGroup, StoreInfo, is_hetero
from pyg_sar.usage import METHODS
from pyg_sar.wording import Shown, counted

_MOST = 2**63 - 1
_WORDS: dict[Any, str] = {str: "a text", bool: "true or false", int: "a whole number from 0 on"}


class _WrongField(ValueError):
    """A field that is not what it should be; ``place`` is where it stands in the file."""

    def __init__(self, place: str, expected: Any, got: Any) -> None:
        text = "nothing" if got is ... else repr(got)
        shown = text if len(text) <= 60 else text[:57] + "..."
        super().__init__(f"expected '{place}' to be {expected} (got {shown})")


def expect(fits: bool, place: str, expected: Any, got: Any) -> None:
    """Raises unless a field is as it should be."""
    if not fits:
        raise _WrongField(place, expected, got)


def structured(kind: Any, value: Any, place: str) -> Any:
    """Returns a value of JSON as a type: a dataclass, of which all fields must be there, a list, a
    dict by texts, a text, a truth value, or a whole number; ``kind | None`` may be null.
    """
    inner = get_args(kind)
    if inner and inner[-1] is type(None):
        return None if value is None else structured(inner[0], value, place)
    if get_origin(kind) is list:
        expect(type(value) is list, place, "a list", value)
        return [structured(inner[0], item, f"{place}[{k}]") for k, item in enumerate(value)]
    prefix = f"{place}." if place else ""
    if get_origin(kind) is dict:
        expect(type(value) is dict, place, "an object", value)
        return {name: structured(inner[1], item, prefix + name) for name, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        expect(type(value) is dict, place, "an object", value)
        return kind(**fields_of(kind, value, prefix, *get_type_hints(kind)))
    if kind is not Any:
        fits = type(value) is kind and (kind is not int or 0 <= value <= _MOST)
        expect(fits, place, _WORDS[kind], value)
    return value


def fields_of(kind: Any, content: Mapping[str, Any], prefix: str, *names: str) -> dict[str, Any]:
    """Returns fields of an object, by the types that a dataclass declares."""
    kinds = get_type_hints(kind)
    return {n: structured(kinds[n], content.get(n, ...), prefix + n) for n in names}


METADATA = "metadata.json"

_FORMS = {
    "dense": ("tensor", "column_major", "numpy", "list", "tuple"),
    "csr": ("sparse_coo", "sparse_csr", "sparse_csc", "SparseTensor"),
    "json": ("json", "tuple", "coded"),
}
_KINDS = ("nodes", "links")
_PLAIN = ("num_parts", "num_nodes", "num_edges", "method", "seed", "batched")
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
    method: str
    seed: int
    statistics: PartitionStatistics
    stores: list[StoreInfo]
    parts: list[PartInfo]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _SeriesFile:
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    dtype: str
    shape: list[int]
    files: list[_SeriesFile]


def parse_metadata(path: Path, content: Any) -> PartitionMetadata:
    """Returns the metadata of a partition, of its content in JSON, checked; errors name the file
    ``path``.
    """
    try:
        return _parsed(path.parent, content)
    except _WrongField as error:
        remedy = "copy it again or partition the graph anew"
        raise PartitionError(f"'{path}': {error}; {remedy}") from None


def _parsed(root: Path, content: dict[str, Any]) -> PartitionMetadata:
    missing: dict[str, Any] = {"batched": None, "lists": [], "series": {}}
    content = missing | content
    graph = fields_of(PartitionMetadata, content, "", *_PLAIN)
    num_parts = graph["num_parts"]
    expect(num_parts > 0, "num_parts", "at least 1", num_parts)
    stores = _stores(graph, content)
    statistics = _statistics(graph, content.get("statistics"), stores)
    parts = structured(list[PartInfo], content.get("parts"), "parts")
    expect(len(parts) == num_parts, "parts", f"{num_parts} parts", len(parts))
    for p, part in enumerate(parts):
        for name in _SUMMED:
            rows, known = getattr(part, f"num_{name}"), getattr(statistics, name)[p]
            expect(rows == known, f"parts[{p}].num_{name}", known, rows)
    return PartitionMetadata(
        root=root,
        version=VERSION,
        statistics=statistics,
        stores=stores,
        parts=parts,
        series=_series(content["series"], statistics),
        **graph,
    )


def _series(content: Any, statistics: PartitionStatistics) -> dict[str, SeriesInfo]:
    """Reads what is known of snapshots, whose files have so many bytes as their shapes tell."""
    found, count = {}, statistics.num_parts
    rows = structured(dict[str, _Series], content, "series")
    for number, (name, row) in enumerate(rows.items()):
        place, shape = f"series.{name}", row.shape
        dtype = getattr(torch, row.dtype, None)
        fits = len(shape) > 1 and shape[1] == statistics.num_nodes
        expect(fits, f"{place}.shape", f"[T, {statistics.num_nodes}, ...]", shape)
        if not isinstance(dtype, torch.dtype):
            raise _WrongField(f"{place}.dtype", "a dtype of PyTorch", row.dtype)
        each = math.prod((shape[0], *shape[2:], dtype.itemsize))
        files = [series_file(number, p, count) for p in range(count)]
        sizes = [nodes * each + 4 * shape[0] for nodes in statistics.nodes]
        expected, got = list(zip(files, sizes, strict=True)), [(f.file, f.bytes) for f in row.files]
        expect(got == expected, f"{place}.files", expected, got)
        sums = [file.sha256 for file in row.files]
        found[name] = SeriesInfo(
            dtype=row.dtype, shape=shape, files=files, bytes=sizes, sha256=sums
        )
    return found


def series_file(number: int, part: int, num_parts: int) -> str:
    """Returns the name of the file of a part's snapshots of one name, which has this number."""
    return f"series-{number:03d}-{part:05d}-of-{num_parts:05d}.bin"


# Statistics ##################################################################

_SUMMED = ("nodes", "edges", "halo")


def _statistics(
    graph: dict[str, Any], content: Any, stores: list[StoreInfo]
) -> PartitionStatistics:
    place, num_parts = "statistics", graph["num_parts"]
    expect(type(content) is dict, place, "an object", content)
    kind = HeteroPartitionStatistics if is_hetero(stores) else PartitionStatistics
    found: PartitionStatistics = structured(kind, content | graph, place)
    sums = {"nodes": found.num_nodes, "edges": found.num_edges}
    _check_counts(found, place, num_parts, sums)
    if not isinstance(found, HeteroPartitionStatistics):
        return found
    rows: list[Any] = [*found.types, *found.relations]
    named = [store for store in stores if store.totals]
    keys = [row.name for row in found.types] + [tuple(r.edge_type) for r in found.relations]
    expect(keys == [store.key for store in named], place, "of the types and relations", keys)
    for row, store in zip(rows, named, strict=True):
        own = {"nodes": store.totals.get("node", 0), "edges": store.totals.get("edge", 0)}
        _check_counts(row, f"{place} of {store.key}", num_parts, own)
    for name in _SUMMED:
        columns = [getattr(row, name) for row in rows if hasattr(row, name)]
        total = [sum(column[p] for column in columns) for p in range(num_parts)]
        expect(total == getattr(found, name), f"{place}.{name}", total, getattr(found, name))
    return found


def _check_counts(row: Any, place: str, num_parts: int, sums: Mapping[str, int]) -> None:
    """Checks the counts of each part, where sums of some are known."""
    for name in (*_SUMMED, "training_nodes"):
        if (counts := getattr(row, name, None)) is not None:
            fits = len(counts) == num_parts and sum(counts) == sums.get(name, sum(counts))
            total = f" with the sum {sums[name]}" if name in sums else ""
            expect(fits, f"{place}.{name}", f"{num_parts} whole numbers{total}", counts)
    cut = getattr(row, "edge_cut", 0)
    expect(cut <= sums["edges"], f"{place}.edge_cut", f"at most {sums['edges']}", cut)


# Attributes ##################################################################


def _stores(graph: dict[str, Any], content: Mapping[str, Any]) -> list[StoreInfo]:
    """Reads the stores of the graph, of its node types and of its relations."""
    if "hetero" not in content:
        totals = {"node": graph["num_nodes"], "edge": graph["num_edges"]}
        return [_store(content, None, "", totals, "", _KINDS)]
    stores = [_store({**content, "lists": []}, None, "", {}, "", _KINDS)]
    hetero = structured(dict[str, list[dict[str, Any]]], content["hetero"], "hetero")
    found: dict[str, list[Any]] = {"types": [], "relations": []}
    for kind, prefix, length in (("types", "type", 1), ("relations", "relation", 3)):
        for k, row in enumerate(hetero.get(kind, ())):
            place = f"hetero.{kind}[{k}]"
            name = structured(list[str], row.get("name", ...), f"{place}.name")
            count = structured(int, row.get("count", ...), f"{place}.count")
            known = len(name) == length and (length == 1 or {name[0], name[2]} <= {*found["types"]})
            wanted = f"a text, or a relation between the node types {found['types']}"
            expect(known, f"{place}.name", wanted, name)
            key = name[0] if length == 1 else tuple(name)
            expect(key not in found[kind], f"{place}.name", "of no other one", name)
            found[kind].append(key)
            totals = {"node" if length == 1 else "edge": count}
            kinds = _KINDS if length == 1 else ("links",)
            stores.append(_store(row, key, f"{prefix}.{k}/", totals, f"{place}.", kinds))
    expect(bool(found["types"]), "hetero.types", "one node type at least", [])
    return stores


def _store(
    row: Any, key: Any, prefix: str, totals: dict[str, int], place: str, kinds: tuple[str, ...]
) -> StoreInfo:
    """Returns a store, checked, whose lists of node ids are of these kinds."""
    found = StoreInfo(
        key, prefix, totals, **fields_of(StoreInfo, row, place, "attributes", "values", "lists")
    )
    _check_attributes(found, place)
    for k, info in enumerate(found.lists):
        _check_list(info, kinds, f"{place}lists[{k}]")
    _check_list_names(found, f"{place}lists")
    return found


def _check_attributes(store: StoreInfo, place: str) -> None:
    """Checks attributes of a store, and its plain values."""
    attributes, values = store.attributes, store.values
    for name, attribute in attributes.items():
        # Names that begin with "_" are those of the object that holds the attributes.
        known = name not in (*RESERVED, "edge_index") and not name.startswith("_")
        if name == "num_nodes":
            known = values.get(name) == store.totals.get("node")
        expect(known, f"{place}attributes.{name}", "an attribute of another name", name)
        _check_attribute(attribute, store.totals, f"{place}attributes.{name}")
    plain = {name for name, attribute in attributes.items() if attribute.layout == "json"}
    expect(plain == values.keys(), f"{place}values", f"those of {sorted(plain)}", sorted(values))
    for name in plain:
        where, form = f"{place}values.{name}", attributes[name].form
        expect(form != "tuple" or isinstance(values[name], list), where, "a list", values[name])
        if form == "coded":
            try:
                from_json(values[name])
            except ValueError as error:
                raise _WrongField(where, "a coded value", str(error)) from None


def _check_attribute(found: Attribute, counts: dict[str, int], place: str) -> None:
    level, layout = found.level, found.layout
    for name, known in (("level", (*counts, "graph")), ("layout", (*_FORMS,)),
                        ("form", _FORMS.get(layout, ()))):  # fmt: skip
        value = getattr(found, name)
        expect(value in known, f"{place}.{name}", f"one of {', '.join(known)}", value)
    dims = {"csr": 2, "json": 0}.get(layout, len(found.shape))
    if layout == "dense":
        dims = {"list": 1, "tuple": 1, "column_major": 2}.get(found.form, dims)
    kind = f"{found.form} ({layout})"
    expect(len(found.shape) == dims, f"{place}.shape", f"that of a {kind}", found.shape)
    fits = level == "graph" if layout == "json" else layout == "dense" or not found.dim
    fits &= layout != "csr" or level != "graph"
    expect(fits, f"{place}.level", f"one that has attributes as {layout}", level)
    if level in counts:
        fits = found.dim < dims and found.shape[found.dim] == counts[level]
        rows = f"of {counts[level]} {level}s on axis {found.dim}"
        expect(fits, f"{place}.shape", rows, found.shape)
    expect(_known_dtype(found), f"{place}.dtype", f"a dtype of a {kind}", found.dtype)


def _known_dtype(attribute: Attribute) -> bool:
    if attribute.layout == "json" or attribute.dtype == "json":
        return attribute.layout == attribute.dtype
    if attribute.dtype == "none" and attribute.form == "SparseTensor":
        return True
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


def _check_list_names(row: StoreInfo, place: str) -> None:
    """Checks that no other list, row of one, attribute or name of PyG's is named alike."""
    keys: dict[str, list[str | None]] = {}
    for info in row.lists:
        keys.setdefault(info.name, []).append(info.key)
    rows = [name for info in row.lists for name in info.rows]
    hidden = [name for name in (*keys, *rows) if name.startswith("_")]
    expect(not hidden, place, "lists and rows of other names", hidden)
    for name, known in keys.items():
        single = len(set(known)) == len(known) and (None not in known or len(known) == 1)
        expect(single, place, f"one list for each key of '{name}'", known)
    names = ["edge_index", *RESERVED, *row.attributes, *rows, *keys]
    twice = sorted(name for name in set(names) if names.count(name) > 1)
    expect(not twice, place, "lists and rows of different names", twice)


def _check_list(info: NodeList, kinds: tuple[str, ...], place: str) -> None:
    """Checks a list of node ids, and the attributes with a row per entry."""
    expect(info.kind in kinds, f"{place}.kind", f"one of {', '.join(kinds)}", info.kind)
    ids, first = info.attribute, [2] if info.kind == "links" else []
    shape = len(ids.shape) == len(first) + 1 and ids.shape[:-1] == first
    for name, fits, expected in (
        ("dtype", ids.dtype in _ID_DTYPES, f"one of {', '.join(_ID_DTYPES)}"),
        ("layout", ids.layout == "dense", "dense"),
        ("dim", ids.dim == len(first), len(first)),
        ("shape", shape, f"{[*first, 'K']}, that of {info.kind}"),
    ):
        expect(fits, f"{place}.attribute.{name}", expected, getattr(ids, name))
    for name, row in {"attribute": ids, **{f"rows.{n}": r for n, r in info.rows.items()}}.items():
        expect(row.level == "row", f"{place}.{name}.level", "row", row.level)
        _check_attribute(row, {"row": info.count}, f"{place}.{name}")
