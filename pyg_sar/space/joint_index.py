"""Several relations as one: rows shifted by offsets and concatenated, as PyG's layers do.

[Note: a joint space] ``construct_bipartite_edge_index`` (HGT) and ``to_hetero_with_bases`` clone
each relation's ``edge_index``, add the offset of its source type to one row and that of its target
type to the other, and concatenate them. Over workers a source offset shifts own nodes only: the
halo of all relations follows behind all own nodes, grouped by owner and then by relation. Every
worker knows both sides of that without asking: it sends the rows that it sent for each relation,
moved by the offset, in the relations' order.

How many own nodes there are in all is known from below only, as node types without relations may
lie behind the last block. The tensors that are read tell: :func:`widened` makes room for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.space.distributed_index import (
    DistEdgeIndex,
    DistIndex,
    InSpace,
    dist_edge_index,
    dist_index,
    handles,
    plain,
    refusal,
    version_of,
)


class ShiftedRow(InSpace):
    """A row of sources with an offset; all that can be done with it is to put it back."""

    shift: int


class ShiftedEdges(InSpace):
    """A relation's edges with offsets; all that can be done with them is to concatenate them.

    Attributes:
        shift: Offset of the sources.
        origin: The edges without offsets.
        dist_row: The row of the sources.
    """

    shift: int
    origin: DistEdgeIndex
    dist_row: int


@handles(Tensor.__iadd__, Tensor.add_)
def _add(func: Any, args: Any, kwargs: Any) -> Any:
    row, offset = args if len(args) == 2 else (None, None)
    if kwargs or not isinstance(row, DistIndex | ShiftedRow) or isinstance(offset, bool):
        raise refusal(func)
    if not isinstance(offset, int) or row.dim() != 1:
        raise refusal(func)
    out = plain(row).view_as(plain(row)).as_subclass(ShiftedRow)
    out.plan, out.targets, out.memory = row.plan, row.targets, OrderedDict()
    out.shift = offset + (row.shift if isinstance(row, ShiftedRow) else 0)
    return out


def set_shifted_row(edges: Any, key: Any, value: Any, refuse: Any) -> None:
    """``edge_index[0] += offset`` of the caller's own edges (a clone): Python calls this with the
    shifted row, or a plain row of targets.

    ``key`` is the row's number, or ``(number, slice(None))``; for anything else it raises
    ``refuse``.
    """
    if isinstance(key, tuple) and len(key) == 2 and key[1] == slice(None):
        key = key[0]
    shifted = isinstance(value, ShiftedRow)
    if not isinstance(key, int) or (key % 2 == edges.dist_row) != shifted:
        raise refuse
    if isinstance(edges, DistEdgeIndex):
        origin = edges.origin
        if origin is None:
            raise DistributedIndexError(
                f"Can't write into the distributed edge_index at rank {edges.plan.rank}: shift a "
                "copy of it, edge_index.clone()"
            )
        moved: Any = edges
        moved.__class__ = ShiftedEdges
        moved.origin, moved.shift = origin, 0
    if shifted:
        edges.shift = value.shift
    elif value.data_ptr() != plain(edges)[key].data_ptr():
        plain(edges)[key] = value
    edges.memory.clear()


def row_of_shifted(edges: ShiftedEdges, number: int) -> Tensor:
    """A row, to add an offset to."""
    row = plain(edges)[number]
    if number != edges.dist_row:
        return row
    out = row.as_subclass(ShiftedRow)
    out.plan, out.targets, out.shift = edges.plan, edges.targets, edges.shift
    out.memory = OrderedDict()
    return out


def join(parts: Sequence[Any]) -> DistEdgeIndex:
    """Concatenates shifted relations to one bipartite relation. See [Note: a joint space].

    The result is remembered on the first relation, for as long as all of them, their offsets and
    targets are the same.
    """
    first = parts[0]
    for part in parts:
        if not isinstance(part, ShiftedEdges) or part.dist_row != first.dist_row:
            raise DistributedIndexError(
                "Can't join edges of different index spaces at rank "
                f"{first.plan.rank}, unless each is a relation whose rows were shifted by offsets"
            )
    row = first.dist_row
    targets = [plain(part)[1 - row] for part in parts]

    def make() -> Any:
        origins = [part.origin for part in parts]
        return origins, [t.clone() for t in targets], _joined(parts, targets)

    key = ("join", tuple((id(p.origin), version_of(p.origin), p.shift) for p in parts))
    found = first.origin.remember(key, make)
    if not all(torch.equal(a, b) for a, b in zip(found[1], targets, strict=True)):
        del first.origin.memory[key]
        found = first.origin.remember(key, make)
    result: DistEdgeIndex = found[2]
    return result


def _joined(parts: Sequence[ShiftedEdges], targets: Sequence[Tensor]) -> DistEdgeIndex:
    plan = _joint_plan(parts)
    starts = torch.tensor(plan.halo_offsets[:-1])  # where each owner's rows of this relation go
    sources = []
    for part in parts:
        ids, old = plain(part)[part.dist_row], part.plan
        moves = plan.num_local + starts - torch.tensor(old.halo_offsets[:-1])
        halo = moves.repeat_interleave(torch.tensor(old.halo_counts)).to(ids.device)
        remote = ids >= old.num_local
        moved = ids + part.shift
        moved[remote] = ids[remote] - old.num_local + halo[ids[remote] - old.num_local]
        sources.append(moved)
        starts = starts + torch.tensor(old.halo_counts)
    least = max(_end(part, rows) for part, rows in zip(parts, targets, strict=True))
    rows = [torch.cat(sources), torch.cat(list(targets))]
    place = parts[0].dist_row
    joined = torch.stack(rows if place == 0 else rows[::-1])
    by_content = any(part.origin.by_content for part in parts)
    return dist_edge_index(joined, plan, place, least, by_content)


def _end(part: ShiftedEdges, targets: Tensor) -> int:
    """Where a relation's targets end, as far as its edges tell."""
    if targets.numel() == 0:
        return 0
    offset = int(targets[0]) - int(plain(part.origin)[1 - part.dist_row][0])
    return offset + part.origin.num_targets


def _joint_plan(parts: Sequence[ShiftedEdges]) -> HaloPlan:
    comm, world = parts[0].plan.comm, parts[0].plan.world_size
    counts = [sum(part.plan.halo_counts[q] for part in parts) for q in range(world)]
    sends = [
        torch.cat([part.plan.send_rows(q) + part.shift for part in parts]) for q in range(world)
    ]
    nodes = max(part.shift + part.plan.num_local for part in parts)
    sent = [rows.numel() for rows in sends]
    return HaloPlan(comm, nodes, counts, torch.cat(sends), sent, open_ended=True)


def widened(edge_index: DistEdgeIndex, sources: int, targets: int) -> DistEdgeIndex:
    """The same edges among more nodes: ``sources`` and ``targets`` of this worker.

    Only edges of a joint space can be widened; others are returned as they are.
    """
    plan = edge_index.plan
    more = sources - plan.num_local
    if not plan.open_ended or more < 0 or targets < edge_index.num_targets:
        return edge_index
    if more == 0 and targets == edge_index.num_targets:
        return edge_index

    def make() -> DistEdgeIndex:
        rows = plain(edge_index).clone()
        ids = rows[edge_index.dist_row]
        ids[ids >= plan.num_local] += more
        place = edge_index.dist_row, targets, edge_index.by_content
        return dist_edge_index(rows, plan.widened(sources), *place)

    found: DistEdgeIndex = edge_index.remember(("widened", sources, targets), make)
    return found


def widened_row(row: DistIndex, sources: int) -> DistIndex:
    """The same source ids among ``sources`` own nodes; see :func:`widened`."""
    plan = row.plan
    if not plan.open_ended or sources <= plan.num_local:
        return row

    def make() -> DistIndex:
        ids = row.flat + (row.flat >= plan.num_local) * (sources - plan.num_local)
        return dist_index(ids, plan.widened(sources), targets=row.targets)

    found: DistIndex = row.remember(("widened", sources), make)
    return found
