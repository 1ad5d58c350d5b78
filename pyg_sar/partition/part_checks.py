"""Checks of the tensors of one part against the metadata, and of all parts against each other.

See [Note: checked once].

[Note: marks] What one part alone can't tell is told by a few numbers per part, the marks, which all
workers compare as they load: sums over the ids of its nodes and edges, and over the places of its
entries of lists of node ids, which show whether each is held once; and of each pair of parts a hash
of the rows that one needs and of those that the other sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import PartitionError
from pyg_sar.partition.attributes import Attribute, ascends, stored_dtype, tensor_names
from pyg_sar.partition.metadata import PartitionMetadata
from pyg_sar.partition.node_lists import NodeList
from pyg_sar.partition.parts import PartTensors, list_tensors
from pyg_sar.partition.whole_graph import HeteroSchema, StoreInfo, store_tensors
from pyg_sar.wording import counted

_PLAN = ("halo_n_id", "halo_counts", "send_index", "send_counts")
_TABLES = ("pair_rows", "pair_units")  # in versions 3 to 5; not read
_COVERS = ("covers", "cover_costs", "cover_edges")
_MOST_COVERS = 8


class _Store:
    """The tensors of one node type, one relation, or a whole homogeneous part.

    Every method raises :class:`PartitionError` where a tensor is not as it should be.

    Args:
        path: The part's file.
        tensors: By their own names.
        prefix: What stands before the names in the file.
    """

    def __init__(self, path: Path, tensors: PartTensors, prefix: str = "") -> None:
        self.path, self.tensors, self.prefix = path, tensors, prefix

    def wrong(self, name: str, problem: str) -> PartitionError:
        return PartitionError(
            f"The tensor '{self.prefix}{name}' of '{self.path}' was altered: {problem}; copy the "
            "part again or partition the graph anew"
        )

    def check(self, good: Any, name: str, problem: str) -> None:
        if not bool(good):
            raise self.wrong(name, problem)

    def of_kind(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Returns a tensor, which must be of this dtype and shape; -1 is any size."""
        tensor = self.tensors[name]
        fits = tensor.dim() == len(shape) and all(
            n in (-1, m) for n, m in zip(shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype != dtype:
            sizes = ["*" if n < 0 else n for n in shape]
            raise self.wrong(
                name,
                f"it is {tensor.dtype} of shape {list(tensor.shape)} instead of {dtype} of shape "
                f"[{', '.join(map(str, sizes))}]",
            )
        return tensor

    def within(self, name: str, values: Tensor, stop: int, what: str) -> None:
        """Checks that all values are in ``[0, stop)``."""
        if values.numel():
            low, high = (int(v) for v in values.aminmax())
            good = 0 <= low and high < stop
            self.check(good, name, f"it names {what} {low} to {high} of {stop}")

    def ascending(self, name: str, values: Tensor, counts: Tensor | None = None) -> None:
        """Checks that values ascend without duplicates, each run of ``counts`` by itself."""
        rises = values[1:] > values[:-1]
        if counts is not None:
            ends = counts.cumsum(0)
            rises[ends[(ends > 0) & (ends < values.numel())] - 1] = True
        self.check(rises.all(), name, "its values don't ascend")


def check_part(metadata: PartitionMetadata, part: int, tensors: PartTensors, path: Path) -> None:
    """Raises :class:`PartitionError` unless the tensors of a part fit the metadata.

    Names, dtypes and shapes of all tensors; the values of those that are indices or offsets.
    Values of features and labels aren't read.

    Args:
        metadata: The partition's.
        part: The part.
        tensors: What its file holds.
        path: The file, for messages.
    """
    _check_names(metadata, tensors, path)
    whole = _Store(path, tensors)
    if metadata.hetero is None:
        counts = {
            "node": _check_ids(whole, metadata.parts[part].num_nodes, metadata.num_nodes),
            "edge": metadata.parts[part].num_edges,
        }
        ends = (tensors["n_id"], metadata.num_nodes, tensors["n_id"])
        _check_e_id(whole, counts["edge"], metadata.num_edges)
        _check_relation(whole, part, metadata, ends, counts["edge"])
        _check_lists(whole, part, metadata, metadata.lists, ends)
        _check_attributes(whole, metadata.attributes, counts)
        _check_batch(whole, metadata)
        return
    _check_attributes(whole, metadata.attributes, {})
    statistics: Any = metadata.statistics
    types: dict[str, tuple[Tensor, int]] = {}
    for k, info in enumerate(metadata.hetero.types):
        store = _Store(path, store_tensors(tensors, "type", k), f"type.{k}/")
        count = _check_ids(store, statistics.types[k].nodes[part], info.count)
        _check_attributes(store, info.attributes, {"node": count})
        types[info.name[0]] = own, total = store.tensors["n_id"], info.count
        _check_lists(store, part, metadata, info.lists, (own, total, own))
    for k, info in enumerate(metadata.hetero.relations):
        store = _Store(path, store_tensors(tensors, "relation", k), f"relation.{k}/")
        count = statistics.relations[k].edges[part]
        ends = (*types[info.name[0]], types[info.name[2]][0])
        _check_e_id(store, count, info.count)
        _check_relation(store, part, metadata, ends, count)
        _check_attributes(store, info.attributes, {"edge": count})
        _check_lists(store, part, metadata, info.lists, ends)


def _check_names(metadata: PartitionMetadata, tensors: PartTensors, path: Path) -> None:
    edges: tuple[str, ...] = ("edge_index", *_PLAN)
    edges += _COVERS * (metadata.version >= 4)

    def of(attributes: dict[str, Attribute], lists: list[NodeList]) -> Iterator[str]:
        for name, attribute in attributes.items():
            yield from tensor_names(name, attribute).values()
        for k, info in enumerate(lists):
            names = edges if info.kind == "links" else ("ids",)
            yield from (f"list.{k}:{name}" for name in ("place", *names, *of(info.rows, [])))

    expected = [*of(metadata.attributes, metadata.lists)]
    if metadata.hetero is None:
        expected += ["n_id", "e_id", *edges]
    else:
        stores: tuple[tuple[str, list[StoreInfo], tuple[str, ...]], ...] = (
            ("type", metadata.hetero.types, ("n_id",)),
            ("relation", metadata.hetero.relations, ("e_id", *edges)),
        )
        for kind, infos, names in stores:
            for k, info in enumerate(infos):
                inner = *names, *of(info.attributes, info.lists)
                expected += [f"{kind}.{k}/{name}" for name in inner]
    missing, unknown = set(expected) - tensors.keys(), tensors.keys() - set(expected)
    if metadata.version < 6:
        unknown = {name for name in unknown if not name.endswith(_TABLES)}
    if missing or unknown:
        what = f"lacks the tensor '{min(missing)}'" if missing else f"holds '{min(unknown)}'"
        raise PartitionError(
            f"'{path}' was altered: it {what}, unlike the metadata; copy the part again or "
            "partition the graph anew"
        )


def _check_ids(store: _Store, count: int, total: int) -> int:
    n_id = store.of_kind("n_id", torch.int64, count)
    store.ascending("n_id", n_id)
    store.within("n_id", n_id, total, "nodes")
    return count


# Edges and halo ##############################################################


_Ends = tuple[Tensor, int, Tensor]
"""Own source nodes by id, source nodes of the graph, and own target nodes by id."""


def _check_e_id(store: _Store, count: int, total: int) -> None:
    store.within("e_id", store.of_kind("e_id", torch.int64, count), total, "edges")


def _check_relation(
    store: _Store, part: int, metadata: PartitionMetadata, ends: _Ends, count: int
) -> None:
    """Checks the edges into a part and their halo.

    Args:
        store: The tensors.
        part: The part.
        metadata: The partition's.
        ends: The nodes that they are between.
        count: Edges of the part.
    """
    own, sources, targets = ends
    num_halo = _check_halo(store, part, metadata.num_parts, own, sources)
    _check_sends(store, part, metadata, own.numel())
    edges = store.of_kind("edge_index", torch.int64, 2, count)
    store.within("edge_index", edges[0], own.numel() + num_halo, "sources")
    store.within("edge_index", edges[1], targets.numel(), "targets")
    if metadata.version >= 4:
        store.of_kind("covers", torch.uint8, num_halo)
        costs = store.of_kind("cover_costs", torch.int32, -1, 2)
        known = costs.size(0) <= _MOST_COVERS and bool((costs >= 0).all())
        store.check(known, "cover_costs", f"it does not hold the costs of 0 to {_MOST_COVERS}")
        cut = int((edges[0] >= own.numel()).sum())
        covered = int(store.of_kind("cover_edges", torch.int64, 1))
        store.check(
            covered == cut, "cover_edges", f"there are {counted(cut, 'edges')} from other parts"
        )


def _check_halo(store: _Store, part: int, num_parts: int, own: Tensor, sources: int) -> int:
    """Checks the rows of other parts, and returns how many there are."""
    halo = store.of_kind("halo_n_id", torch.int64, -1)
    counts = _check_counts(store, "halo_counts", part, num_parts, "halo_n_id", halo)
    store.within("halo_n_id", halo, sources, "nodes")
    store.ascending("halo_n_id", halo, counts)
    if own.numel() and halo.numel():
        place = torch.searchsorted(own, halo).clamp_(max=own.numel() - 1)
        store.check((own[place] != halo).all(), "halo_n_id", "it names nodes of the part itself")
    return halo.numel()


def _check_sends(store: _Store, part: int, metadata: PartitionMetadata, rows: int) -> None:
    """Checks the own rows that peers need."""
    index = store.of_kind("send_index", torch.int32 if metadata.version >= 3 else torch.int64, -1)
    counts = _check_counts(store, "send_counts", part, metadata.num_parts, "send_index", index)
    store.within("send_index", index, rows, "rows")
    store.ascending("send_index", index, counts)


def _check_counts(
    store: _Store, name: str, part: int, num_parts: int, of: str, rows: Tensor
) -> Tensor:
    counts = store.of_kind(name, torch.int64, num_parts)
    most = rows.numel()
    # Bounded one by one first: a sum of large numbers may come out small.
    good = bool(((counts >= 0) & (counts <= most)).all()) and int(counts.sum()) == most
    store.check(good, name, f"it does not add up to the {counted(most, 'rows')} of '{of}'")
    store.check(int(counts[part]) == 0, name, "it counts rows of the part itself")
    return counts


# Lists of node ids ###########################################################


def _check_lists(
    whole: _Store, part: int, metadata: PartitionMetadata, lists: list[NodeList], ends: _Ends
) -> None:
    """Checks lists and pairs of node ids, and the attributes with a row per entry."""
    own, _, targets = ends
    for k, info in enumerate(lists):
        store = _Store(whole.path, list_tensors(whole.tensors, k), f"{whole.prefix}list.{k}:")
        place = store.of_kind("place", torch.int64, -1)
        count = place.numel()
        store.within("place", place, info.count, "entries")
        if info.kind == "links":
            _check_relation(store, part, metadata, ends, count)
            source, target = store.tensors["edge_index"]
            sources = torch.cat([own, store.tensors["halo_n_id"]])
            name, ids = "edge_index", torch.stack([sources[source], targets[target]])
        else:
            store.ascending("place", place)
            name, ids = "ids", store.of_kind("ids", torch.int64, count)
            store.within("ids", ids, own.numel(), "nodes")
            ids = own[ids]
        dtype = info.attribute.dtype
        fits = not ids.numel() or int(ids.max()) <= torch.iinfo(getattr(torch, dtype)).max
        store.check(fits, name, f"it names nodes beyond {dtype}, the dtype of '{info.name}'")
        _check_attributes(store, info.rows, {"row": count})


# Attributes ##################################################################


def _check_attributes(
    store: _Store, attributes: dict[str, Attribute], counts: dict[str, int]
) -> None:
    """Checks the tensors of attributes, of so many rows of each level."""
    for name, attribute in attributes.items():
        names = tensor_names(name, attribute)
        shape = list(attribute.shape)
        if attribute.level in counts:
            shape[attribute.dim] = counts[attribute.level]
        if attribute.layout == "dense":
            dtype, axes = stored_dtype(attribute.dtype)
            store.of_kind(names[""], dtype, *shape, *axes)
        elif attribute.layout == "csr":
            _check_matrix(store, attribute, names, shape)
        elif attribute.layout == "strings":
            _check_strings(store, names, shape[0])


def _check_offsets(store: _Store, name: str, rows: int, of: str, entries: Tensor) -> Tensor:
    offsets = store.of_kind(name, torch.int64, rows + 1)
    good = ascends(offsets, entries.size(0))
    store.check(
        good, name, f"it does not ascend from 0 to the {counted(entries.size(0), 'rows')} of '{of}'"
    )
    return offsets


def _check_matrix(
    store: _Store, attribute: Attribute, names: dict[str, str], shape: list[int]
) -> None:
    column = store.of_kind(names["col"], torch.int64, -1)
    offsets = _check_offsets(store, names["crow"], shape[0], names["col"], column)
    store.within(names["col"], column, shape[1], "columns")
    if attribute.form != "SparseTensor":  # Of other matrices duplicates were summed.
        store.ascending(names["col"], column, offsets.diff())
    if "values" in names:
        dtype, axes = stored_dtype(attribute.dtype)
        store.of_kind(names["values"], dtype, column.numel(), *axes)


def _check_strings(store: _Store, names: dict[str, str], rows: int) -> None:
    text = store.of_kind(names["bytes"], torch.uint8, -1)
    starts = _check_offsets(store, names["starts"], rows, names["bytes"], text)
    try:
        text.numpy().tobytes().decode()
    except UnicodeDecodeError as error:
        raise store.wrong(names["bytes"], f"it is no UTF-8 ({error})") from None
    inside = text[starts[starts < text.numel()]]
    whole = (inside & 0xC0 != 0x80).all()  # No string begins within a character.
    store.check(whole, names["starts"], "it cuts a character")


def _check_batch(store: _Store, metadata: PartitionMetadata) -> None:
    """Checks that graph ids are those of ``num_graphs`` graphs."""
    batch = graph_ids(metadata, store.tensors)
    if metadata.num_graphs is None:
        return
    if batch is None:
        raise PartitionError(
            f"The metadata of '{store.path.parent}' was altered: 'num_graphs' is "
            f"{metadata.num_graphs}, but there is no vector 'batch'; copy it again or partition "
            "the graph anew"
        )
    store.within("node.batch", batch, metadata.num_graphs, "graphs")


def graph_ids(metadata: PartitionMetadata, tensors: PartTensors) -> Tensor | None:
    """Returns the graph of each node, where there is a vector of such ids."""
    kind = metadata.attributes.get("batch")
    if metadata.hetero is not None or kind is None:
        return None
    if (kind.level, kind.layout, kind.dtype, len(kind.shape)) != ("node", "dense", "int64", 1):
        return None
    return tensors["node.batch"]


def num_marks(num_parts: int) -> int:
    """Returns the number of entries of :func:`part_marks`."""
    return 3 + 2 * num_parts


def part_marks(metadata: PartitionMetadata, tensors: PartTensors) -> Tensor:
    """Returns the numbers that are compared with other parts', int64. See [Note: marks]."""
    sums = [0, 0]
    for k, ids in enumerate(_ids(metadata, tensors)):
        sums[0] += _factor(k) * int(ids.sum())
        sums[1] += _factor(k) * int(torch.dot(ids, ids))
    batch = graph_ids(metadata, tensors)
    graphs = 0 if batch is None or not batch.numel() else int(batch.max()) + 1
    needs = [hashlib.sha256() for _ in range(metadata.num_parts)]
    sends = [hashlib.sha256() for _ in range(metadata.num_parts)]
    for own, rows in relations(metadata, tensors):
        wanted = rows["halo_n_id"].split(rows["halo_counts"].tolist())
        given = rows["send_index"].split(rows["send_counts"].tolist())
        for q in range(metadata.num_parts):
            needs[q].update(wanted[q].numpy().tobytes() + b"|")
            sends[q].update(own[given[q].long()].numpy().tobytes() + b"|")
    hashes = [int.from_bytes(found.digest()[:8], "little") for found in (*needs, *sends)]
    return torch.tensor([_signed(n) for n in (*sums, graphs, *hashes)])


def check_marks(metadata: PartitionMetadata, marks: Tensor) -> None:
    """Raises :class:`PartitionError` unless the marks ``[P, *]`` of all parts fit each other."""
    rows = marks.tolist()
    remedy = "copy the parts of one pyg_sar.write_partitions(), or partition the graph anew"
    expected = [0, 0]
    for k, total in enumerate(_totals(metadata)):
        expected[0] += _factor(k) * (total * (total - 1) // 2)
        expected[1] += _factor(k) * ((total - 1) * total * (2 * total - 1) // 6)
    if any(_signed(sum(r[n] for r in rows)) != _signed(expected[n]) for n in (0, 1)):
        raise PartitionError(
            f"The parts of '{metadata.root}' don't hold each node and edge of the graph once, or "
            f"each entry of a list of node ids ('n_id', 'e_id', 'place'): one was altered; {remedy}"
        )
    if metadata.num_graphs is not None and max(r[2] for r in rows) != metadata.num_graphs:
        raise PartitionError(
            f"The parts of '{metadata.root}' hold {counted(max(r[2] for r in rows), 'graphs')} "
            f"('batch'), its metadata says {metadata.num_graphs}: one was altered; {remedy}"
        )
    count = metadata.num_parts
    for p in range(count):
        for q in range(count):
            if rows[p][3 + q] != rows[q][3 + count + p]:
                raise PartitionError(
                    f"Parts {p} and {q} of '{metadata.root}' don't belong together: 'halo_n_id' of "
                    f"part {p} names other rows than 'send_index' of part {q}; {remedy}"
                )


def _factor(k: int) -> int:
    """Returns a factor that keeps the sums of several types and relations apart."""
    return 2 * k * 0x9E3779B97F4A7C15 + 1


def _signed(number: int) -> int:
    """Returns the number modulo 2 to the 64, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


def _ids(metadata: PartitionMetadata, tensors: PartTensors) -> Iterator[Tensor]:
    """Yields the ids of a part's nodes and edges of each kind, and the places of its lists."""
    if metadata.hetero is None:
        yield from (tensors["n_id"], tensors["e_id"])
    else:
        yield from (tensors[f"type.{k}/n_id"] for k in range(len(metadata.hetero.types)))
        yield from (tensors[f"relation.{k}/e_id"] for k in range(len(metadata.hetero.relations)))
    # Counted from 1, so that an entry at place 0 is missed: no metadata says how many a part has.
    yield from (rows["place"] + 1 for _, _, rows in _lists(metadata, tensors))


def _totals(metadata: PartitionMetadata) -> list[int]:
    if metadata.hetero is None:
        counts, lists = [metadata.num_nodes, metadata.num_edges], metadata.lists
    else:
        infos = [*metadata.hetero.types, *metadata.hetero.relations]
        counts = [info.count for info in infos]
        lists = [found for info in infos for found in info.lists]
    return counts + [found.count + 1 for found in lists]


def relations(
    metadata: PartitionMetadata, tensors: PartTensors
) -> Iterator[tuple[Tensor, PartTensors]]:
    """Yields the ids of own sources, and the tensors, of each relation and list of pairs."""
    if metadata.hetero is None:
        yield tensors["n_id"], tensors
    else:
        own = _own(metadata.hetero, tensors)
        for k, info in enumerate(metadata.hetero.relations):
            yield own[info.name[0]], store_tensors(tensors, "relation", k)
    for found, ids, rows in _lists(metadata, tensors):
        if found.kind == "links":
            yield ids, rows


def _own(schema: HeteroSchema, tensors: PartTensors) -> dict[str, Tensor]:
    """Returns the ids of own nodes of each type."""
    return {info.name[0]: tensors[f"type.{k}/n_id"] for k, info in enumerate(schema.types)}


def _lists(
    metadata: PartitionMetadata, tensors: PartTensors
) -> Iterator[tuple[NodeList, Tensor, PartTensors]]:
    """Yields each list of node ids of a part, the ids of own (source) nodes, and its tensors."""
    if metadata.hetero is None:
        stores = [(metadata.lists, tensors["n_id"], tensors)]
    else:
        own = _own(metadata.hetero, tensors)
        kinds = ("type", metadata.hetero.types), ("relation", metadata.hetero.relations)
        stores = [
            (info.lists, own[info.name[0]], store_tensors(tensors, kind, k))
            for kind, infos in kinds
            for k, info in enumerate(infos)
        ]
    for lists, ids, rows in stores:
        for k, info in enumerate(lists):
            yield info, ids, list_tensors(rows, k)
