"""Checks of the tensors of one part against the metadata, and of all parts against each other.

See [Note: checked once].

[Note: marks] What one part alone can't tell is told by a few numbers per part, the marks, which all
workers compare as they load: sums over the ids of its nodes and edges, and over the places of its
entries of lists of node ids, which show whether each is held once; and of each pair of parts a hash
of the rows that one needs and of those that the other sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator, Label
from pyg_sar.errors import PartitionError
from pyg_sar.partition.attributes import Attribute, ascends, stored_dtype, tensor_names
from pyg_sar.partition.metadata import PartitionMetadata
from pyg_sar.partition.schema import (
    NodeList,
    PartRows,
    PartTensor,
    PartTensors,
    global_ids,
    tensors_of,
    without_prefix,
)
from pyg_sar.wording import counted


class _Tensors:
    """The tensors of a store of a part, or of a list of node ids, whose names in the file begin
    with ``prefix``. Every method raises :class:`PartitionError` where a tensor is not as it
    should be.
    """

    def __init__(self, path: Path, tensors: PartTensors, prefix: str = "") -> None:
        self.path, self.prefix = path, prefix
        self.tensors = without_prefix(tensors, prefix)

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
    """Raises :class:`PartitionError` unless the tensors of a part's file fit the metadata.

    Names, dtypes and shapes of all tensors; the values of those that are indices or offsets.
    Values of features and labels aren't read.
    """
    _check_names(metadata, tensors, path)
    totals = {group.ends[0]: group.total for group in metadata.groups() if group.kind == "node"}
    own: dict[str, Tensor] = {}
    for store in metadata.stores:
        known = metadata.sizes(store, part)
        for group in store.groups():
            checked = _Tensors(path, tensors, group.prefix)
            if group.kind == "node":
                own[group.ends[0]] = checked.tensors["n_id"]
            source, target = (own[name] for name in group.ends)
            sizes = {"n": source.numel(), "m": target.numel(), "P": metadata.num_parts}
            sizes |= {"N": totals[group.ends[0]], "E": group.total}
            if group.listed is None:
                sizes |= known
            rows = PartRows(checked.tensors, sizes, source)
            _check_rows(checked, group.kind, rows, part)
            if group.listed is not None:
                _check_dtype(checked, group.kind, group.listed, source, target)
                _check_attributes(checked, group.attributes, {"row": sizes["e"]})
        counts = {level: known["n" if level == "node" else "e"] for level in store.totals}
        _check_attributes(_Tensors(path, tensors, store.prefix), store.attributes, counts)


def _check_names(metadata: PartitionMetadata, tensors: PartTensors, path: Path) -> None:
    expected = {name for store in metadata.stores for name in store.names()}
    missing, unknown = expected - tensors.keys(), tensors.keys() - expected
    if missing or unknown:
        what = f"lacks the tensor '{min(missing)}'" if missing else f"holds '{min(unknown)}'"
        raise PartitionError(
            f"'{path}' was altered: it {what}, unlike the metadata; copy the part again or "
            "partition the graph anew"
        )


# Nodes, edges and lists ######################################################


def _check_rows(checked: _Tensors, kind: str, rows: PartRows, part: int) -> None:
    """Checks the tensors of rows of a kind by the table of the format.

    ``rows`` are the same tensors, and the sizes that are known; the others are found by shapes.
    """
    declared = tensors_of(kind)
    for tensor in declared:
        _check_tensor(checked, tensor, rows.sizes, part)
    for tensor in declared:
        if problem := tensor.problem(rows):
            raise checked.wrong(tensor.name, problem)


def _check_tensor(checked: _Tensors, tensor: PartTensor, sizes: dict[str, int], part: int) -> None:
    shape = [sizes.get(size, -1) if isinstance(size, str) else size for size in tensor.shape]
    values = checked.of_kind(tensor.name, tensor.dtype, *shape)
    for size, count in zip(tensor.shape, values.shape, strict=True):
        if isinstance(size, str):
            sizes.setdefault(size, count)
    counts = None
    if tensor.counted_by:
        counts, most = checked.of_kind(tensor.counted_by, torch.int64, sizes["P"]), values.numel()
        # Bounded one by one first: a sum of large numbers may come out small.
        good = bool(((counts >= 0) & (counts <= most)).all()) and int(counts.sum()) == most
        problem = f"it does not add up to the {counted(most, 'rows')} of '{tensor.name}'"
        checked.check(good, tensor.counted_by, problem)
        own = int(counts[part])
        checked.check(own == 0, tensor.counted_by, "it counts rows of the part itself")
    for number, bound in enumerate(tensor.below):
        row = values if len(tensor.below) == 1 else values[number]
        checked.within(tensor.name, row, sum(sizes[size] for size in bound.split(" + ")), "rows")
    if tensor.ascends or counts is not None:
        checked.ascending(tensor.name, values, counts)


def _check_dtype(
    checked: _Tensors, kind: str, info: NodeList, source: Tensor, target: Tensor
) -> None:
    """Checks that the dtype in which a list was given holds its ids."""
    ids = global_ids(kind, checked.tensors, source, target)
    dtype, name = info.attribute.dtype, "ids" if kind == "nodes" else "edge_index"
    good = not ids.numel() or int(ids.max()) <= torch.iinfo(getattr(torch, dtype)).max
    problem = f"it names nodes beyond {dtype}, the dtype of '{info.name}'"
    checked.check(good, name, problem)


# Attributes ##################################################################


def _check_attributes(
    checked: _Tensors, attributes: dict[str, Attribute], counts: dict[str, int]
) -> None:
    """Checks the tensors of attributes, of so many rows of each level."""
    for name, attribute in attributes.items():
        names = tensor_names(name, attribute)
        shape = list(attribute.shape)
        if attribute.level in counts:
            shape[attribute.dim] = counts[attribute.level]
        if attribute.layout == "dense":
            dtype, axes = stored_dtype(attribute.dtype)
            checked.of_kind(names[""], dtype, *shape, *axes)
        elif attribute.layout == "csr":
            _check_matrix(checked, attribute, names, shape)


def _check_offsets(checked: _Tensors, name: str, rows: int, of: str, entries: Tensor) -> Tensor:
    offsets = checked.of_kind(name, torch.int64, rows + 1)
    good = ascends(offsets, entries.size(0))
    checked.check(
        good, name, f"it does not ascend from 0 to the {counted(entries.size(0), 'rows')} of '{of}'"
    )
    return offsets


def _check_matrix(
    checked: _Tensors, attribute: Attribute, names: dict[str, str], shape: list[int]
) -> None:
    column = checked.of_kind(names["col"], torch.int64, -1)
    offsets = _check_offsets(checked, names["crow"], shape[0], names["col"], column)
    checked.within(names["col"], column, shape[1], "columns")
    if attribute.form != "SparseTensor":  # Of other matrices duplicates were summed.
        checked.ascending(names["col"], column, offsets.diff())
    if "values" in names:
        dtype, axes = stored_dtype(attribute.dtype)
        checked.of_kind(names["values"], dtype, column.numel(), *axes)


def num_marks(num_parts: int) -> int:
    """Returns the number of entries of :func:`part_marks`."""
    return 2 + 2 * num_parts


def part_marks(metadata: PartitionMetadata, tensors: PartTensors) -> Tensor:
    """Returns the numbers that are compared with other parts', int64. See [Note: marks]."""
    sums = [0, 0]
    for k, group in enumerate(metadata.groups()):
        # Entries are counted from 1, so that one at place 0 is missed: the metadata does not say
        # how many a part has.
        ids = group.ids(tensors) if group.listed is None else group.ids(tensors) + 1
        sums[0] += _factor(k) * int(ids.sum())
        sums[1] += _factor(k) * int(torch.dot(ids, ids))
    needs = [hashlib.sha256() for _ in range(metadata.num_parts)]
    sends = [hashlib.sha256() for _ in range(metadata.num_parts)]
    own: dict[str, Tensor] = {}
    for group in metadata.groups():
        if group.kind == "node":
            own[group.ends[0]] = group.ids(tensors)
        elif group.kind != "nodes":
            _add_halo(needs, sends, own[group.ends[0]], without_prefix(tensors, group.prefix))
    hashes = [int.from_bytes(found.digest()[:8], "little") for found in (*needs, *sends)]
    return torch.tensor([_signed(n) for n in (*sums, *hashes)])


def _add_halo(needs: list[Any], sends: list[Any], own: Tensor, rows: PartTensors) -> None:
    """Adds the rows that a part needs of each other part, and those that it sends, to hashes."""
    wanted = rows["halo_n_id"].split(rows["halo_counts"].tolist())
    sent = rows["send_index"].split(rows["send_counts"].tolist())
    for q, (need, send) in enumerate(zip(needs, sends, strict=True)):
        need.update(wanted[q].numpy().tobytes() + b"|")
        send.update(own[sent[q].long()].numpy().tobytes() + b"|")


def gather_marks(
    comm: Communicator, head: Sequence[int], marks: Tensor, label: Label
) -> tuple[Tensor, Tensor]:
    """Returns some bytes, and the marks ``[P, *]``, of all workers, on the CPU. Collective."""
    mine = torch.cat([torch.tensor(head, dtype=torch.uint8), marks.view(torch.uint8)])
    everyone = torch.stack(comm.all_gather(mine.to(comm.device), label=label)).cpu()
    heads, rows = everyone[:, : len(head)], everyone[:, len(head) :]
    return heads, rows.reshape(-1).clone().view(torch.long).view(len(rows), -1)


def check_marks(metadata: PartitionMetadata, marks: Tensor) -> None:
    """Raises :class:`PartitionError` unless the marks ``[P, *]`` of all parts fit each other."""
    rows = marks.tolist()
    remedy = "copy the parts of one pyg_sar.write_partitions(), or partition the graph anew"
    expected = [0, 0]
    for k, group in enumerate(metadata.groups()):
        total = group.total + (group.listed is not None)
        expected[0] += _factor(k) * (total * (total - 1) // 2)
        expected[1] += _factor(k) * ((total - 1) * total * (2 * total - 1) // 6)
    if any(_signed(sum(r[n] for r in rows)) != _signed(expected[n]) for n in (0, 1)):
        raise PartitionError(
            f"The parts of '{metadata.root}' don't hold each node and edge of the graph once, or "
            f"each entry of a list of node ids ('n_id', 'e_id', 'place'): one was altered; {remedy}"
        )
    count = metadata.num_parts
    for p in range(count):
        for q in range(count):
            if rows[p][2 + q] != rows[q][2 + count + p]:
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
