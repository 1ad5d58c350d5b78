"""Whether the parts of a partition are one graph.

[Note: marks] What one part alone can't tell is told by a few numbers per part, the marks, which all
workers compare as they load: sums over the ids of its nodes and edges, and over the places of its
entries of lists of node ids, which show whether each is held once; and of each pair of parts a hash
of the rows that one needs and of those that the other sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_sar.errors import PartitionError
from pyg_sar.partition.hetero_parts import HeteroSchema, store_tensors
from pyg_sar.partition.metadata import PartitionMetadata
from pyg_sar.partition.node_lists import NodeList, list_tensors
from pyg_sar.partition.part_checks import graph_ids
from pyg_sar.partition.parts import PartTensors


def num_marks(num_parts: int) -> int:
    """How many numbers :func:`part_marks` has."""
    return 3 + 2 * num_parts


def part_marks(metadata: PartitionMetadata, tensors: PartTensors) -> Tensor:
    """What is compared with other parts, int64. See [Note: marks]."""
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
            f"The parts of '{metadata.root}' hold {max(r[2] for r in rows)} graphs ('batch'), its "
            f"metadata says {metadata.num_graphs}: one was altered; {remedy}"
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
    """Keeps the sums of several types and relations apart."""
    return 2 * k * 0x9E3779B97F4A7C15 + 1


def _signed(number: int) -> int:
    """The number modulo 2 to the 64, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


def _ids(metadata: PartitionMetadata, tensors: PartTensors) -> Iterator[Tensor]:
    """The ids of a part's nodes and edges of each kind, and the places of its lists."""
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
    """The ids of own sources, and the tensors, of each relation and list of pairs of a part."""
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
    """The ids of own nodes of each type."""
    return {info.name[0]: tensors[f"type.{k}/n_id"] for k, info in enumerate(schema.types)}


def _lists(
    metadata: PartitionMetadata, tensors: PartTensors
) -> Iterator[tuple[NodeList, Tensor, PartTensors]]:
    """Each list of node ids of a part, the ids of own (source) nodes, and its tensors."""
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
