"""Operands side by side: each as this worker's rows of the same layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import DistributedIndexError
from pyg_sar.ledger import Label
from pyg_sar.tensors.node_tensor import NodeTensor, refusal, whole
from pyg_sar.tensors.rows import GATHER_LIMIT, Rows, compare_notes, note_plain, notes
from pyg_sar.wording import counted


def wrap(local: Tensor, rows: Rows, axis: int) -> NodeTensor:
    """Returns a node tensor of this worker's rows."""
    return NodeTensor(local, rows, axis % local.dim())


def arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of an operator by their names, with their defaults."""
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    names = [a.name for a in func._schema.arguments]
    return {**given, **dict(zip(names, args, strict=False)), **kwargs}


def called(func: Any, given: dict[str, Any], **changed: Any) -> Any:
    """Calls an operator with its arguments by name."""
    given = {**given, **changed}
    found = func._schema.arguments
    values = [given[a.name] for a in found if not a.kwarg_only]
    return func(*values, **{a.name: given[a.name] for a in found if a.kwarg_only})


def place(tensors: Sequence[Tensor]) -> tuple[Rows, int]:
    """Returns the layout that operands of a broadcast take, and its axis counted from the end."""
    nodes = [t for t in tensors if isinstance(t, NodeTensor)]
    wide = [t for t in nodes if t.rows.total != 1] or nodes
    first = wide[0]
    return first.rows, first.axis - first.dim()


def beside(func: Any, tensor: Tensor, rows: Rows, axis: int, operands: Sequence[Tensor]) -> Tensor:
    """Returns an operand of a broadcast as what this worker's rows of it are.

    Args:
        func: The operator.
        tensor: The operand.
        rows: The layout.
        axis: Its axis, counted from the end.
        operands: All of them, for errors.
    """
    if isinstance(tensor, NodeTensor):
        if tensor.axis - tensor.dim() == axis:
            if tensor.rows.same(rows):
                return tensor.local
            if tensor.rows.total == rows.total:
                return tensor.rows.moved(tensor.local, tensor.axis, rows)
        elif tensor.rows.total != 1:
            check_pairs(func, rows, tensor.rows.total, *operands)
        tensor = whole(tensor, str(func))
    if tensor.dim() < -axis or tensor.size(axis) == 1:
        if rows.total == 1 and tensor.dim() >= -axis:
            return rows.cut(tensor, axis)
        return tensor
    if tensor.size(axis) == rows.total:
        note_plain(tensor, rows.comm)
        return rows.cut(tensor, axis)
    if rows.total == 1:
        raise refusal(func, "broadcasts one selected row", *operands)
    raise RuntimeError(
        f"The size of tensor a ({rows.total}) must match the size of tensor b "
        f"({tensor.size(axis)}) at dimension {axis} (shapes "
        f"{', '.join(str(list(t.shape)) for t in operands)})"
    )


def check_pairs(func: Any, rows: Rows, columns: int, *operands: Tensor) -> None:
    """Raises where this worker's rows of all pairs of rows take too much."""
    size = rows.count * columns * 8
    if not rows.agree(size <= GATHER_LIMIT):
        raise refusal(
            func,
            f"is as many numbers as pairs of rows, on some worker more than {GATHER_LIMIT >> 20} "
            "MiB: take some of the rows at a time",
            *operands,
        )


def own(tensor: Any, rows: Rows, axis: int) -> Any:
    """Returns a tensor's rows here, where it has this layout's number of rows along an axis."""
    if isinstance(tensor, NodeTensor):
        if tensor.axis == axis % tensor.dim() and tensor.rows.same(rows):
            return tensor.local
        if tensor.axis == axis % tensor.dim() and tensor.rows.total == rows.total:
            return tensor.rows.moved(tensor.local, tensor.axis, rows)
        if tensor.size(axis) == rows.total:  # Pairs of rows, which lie by the other one.
            return rows.cut(whole(tensor, "an operand with rows along another axis"), axis)
        raise DistributedIndexError(
            f"A tensor of shape {list(tensor.shape)} has its rows along axis {tensor.axis} (rank "
            f"{rows.comm.rank}), not along axis {axis % tensor.dim()}, or other rows"
        )
    if tensor.size(axis) != rows.total:
        raise RuntimeError(
            f"A tensor of shape {list(tensor.shape)} has not {counted(rows.total, 'rows')} along "
            f"axis {axis}"
        )
    note_plain(tensor, rows.comm)
    return rows.cut(tensor, axis)


def widened(local: Tensor) -> Tensor:
    """Returns values in whose dtype many can be added up: float16 ends at 65504."""
    return local.float() if local.dtype in (torch.float16, torch.bfloat16) else local


def as_kind(out: Tensor, kind: torch.dtype) -> Tensor:
    """Returns what was computed of widened values in their own dtype."""
    return out.to(kind) if kind in (torch.float16, torch.bfloat16) else out


def summed(local: Tensor, rows: Rows) -> Tensor:
    """Returns the sum over workers."""
    kind = local.dtype
    if kind == torch.bool:
        local = local.to(torch.int32)
    return sum_compared(local.contiguous(), rows.comm, ("", "", "node tensors")).to(kind)


def sum_compared(local: Tensor, comm: Communicator, label: Label, learns: bool = False) -> Tensor:
    """Returns the sum over workers, which then have compared what they had beside rows.

    A checksum of what each noted (:func:`pyg_sar.tensors.rows.notes`) goes along, unless a
    distributed model learns: its sum of gradients has that, and says more of its layers.

    Args:
        local: This worker's, contiguous; the sum is written there.
        comm: The workers.
        label: For the ledgers.
        learns: Whether a backward pass follows.

    Raises:
        ValueError: on every worker, when they noted different things.
    """
    comm.added_up = hash((comm.added_up, comm.call))  # See [Note: the same rows].
    later = learns and comm.learns
    narrow = local.element_size() < 4 or local.device.type != "cpu"
    if comm.world_size == 1 or not comm.compares or later or narrow:
        return comm.all_reduce(local, label=label)
    marks = local.new_zeros(comm.world_size)
    marks[comm.rank] = zlib.crc32("\n".join(notes(comm)).encode()) % 2**24  # as float32 has it
    flat = comm.all_reduce(torch.cat([local.view(-1), marks]), label=label)
    total, found = flat.split([local.numel(), comm.world_size])
    if len({*found.tolist()}) > 1:
        compare_notes(comm)
    local.view(-1).copy_(total)
    return local


def identity(dtype: torch.dtype, op: str) -> float | int | bool:
    """Returns what changes no ``'max'`` or ``'min'``."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    info = torch.iinfo(dtype)
    return info.max if op == "min" else info.min


def extreme(local: Tensor, rows: Rows, op: str) -> Tensor:
    """Returns the ``'max'`` or ``'min'`` over workers; NaN where one has it."""
    kind, label = local.dtype, ("", "", "node tensors")
    rows.comm.added_up = hash((rows.comm.added_up, rows.comm.call))
    if not kind.is_floating_point:
        out = local.to(torch.int64).contiguous()
        return rows.comm.all_reduce(out, op, label=label).to(kind)
    nan = local.isnan()
    out = local.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).contiguous()
    rows.comm.all_reduce(out, op, label=label)
    flags = rows.comm.all_reduce(nan.to(torch.int32), "max", label=label)
    return out.masked_fill(flags.bool(), float("nan"))
