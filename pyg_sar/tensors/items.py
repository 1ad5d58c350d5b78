"""``x[...]`` and ``x[...] = values`` of node tensors: what torch does through views of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.tensors.copies import Origin, row_copy
from pyg_sar.tensors.node_tensor import NodeTensor, as_it_is, method


@method(Tensor.__getitem__)
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    """One row is a plain tensor: autograd can't take it for a view."""
    source, key = args
    first = key[0] if isinstance(key, tuple) and key else key
    if isinstance(source, NodeTensor) and source.axis == 0 and _is_row(first):
        first = int(first)
        if not -source.size(0) <= first < source.size(0):
            raise IndexError(
                f"index {first} is out of bounds for dimension 0 with size {source.size(0)}"
            )
        row = source[first % source.size(0) :][:1]
        row = row.any(0) if source.dtype == torch.bool else row.sum(0, dtype=source.dtype)
        number = first % source.size(0)
        row = row_copy(row, Origin(row, source, lambda t: t[number], number))
        return row[key[1:]] if isinstance(key, tuple) and len(key) > 1 else row
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args)


@method(Tensor.select, torch.select)
def _select(func: Any, args: Any, kwargs: Any) -> Any:
    """As ``x[3]``, which can be written, and whose gradient its owner alone makes."""
    given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    source, dim, number = given.get("input"), given.get("dim"), given.get("index")
    if isinstance(source, NodeTensor) and dim in (0, -source.dim()) and _is_number(number):
        return source[number]
    return as_it_is(func, args, kwargs)


@method(Tensor.__setitem__)
def _setitem(func: Any, args: Any, kwargs: Any) -> None:
    """Rows that torch would write through a view are written by their ids."""
    target, key, value = args
    if isinstance(target, NodeTensor):
        place = _place_of_rows(target, key)
        if place is not None:
            _set_rows(target, *place, value)
            return
    with torch._C.DisableTorchFunctionSubclass():
        func(target, key, value)


@method(Tensor.fill_diagonal_)
def _fill_diagonal(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Writes by ids; torch does it by the tensor's place in memory."""
    given = dict(zip(("self", "fill_value", "wrap"), args, strict=False)) | kwargs
    target: Tensor = given["self"]
    if target.dim() < 2 or (target.dim() > 2 and len(set(target.shape)) > 1):
        raise RuntimeError(
            f"fill_diagonal_ takes a matrix, or axes of one length, got {list(target.shape)}"
        )
    rows, columns = target.shape[:2]
    count = rows if given.get("wrap") and target.dim() == 2 else min(rows, columns)
    ids = torch.arange(0, count * columns, columns + 1, device=target.device)
    places = [ids // columns, ids % columns, *[ids // columns] * (target.dim() - 2)]
    target[tuple(places)] = given["fill_value"]
    return target


def _is_number(key: Any) -> bool:
    return isinstance(key, int | np.integer) and not isinstance(key, bool)


def _is_row(key: Any) -> bool:
    """Returns whether a part of a key names one row or column, for which torch makes a view."""
    if isinstance(key, Tensor):
        whole = not key.is_floating_point() and key.dtype not in (torch.bool, torch.uint8)
        return key.dim() == 0 and whole and not torch._C._functorch.is_functorch_wrapped_tensor(key)
    return _is_number(key)


def _place_of_rows(target: NodeTensor, key: Any) -> tuple[list[Any], int] | None:
    """Returns the key's parts, and the place of the one that names rows as a number or a run.

    ``None`` where it names all rows, or rows by a mask or ids.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    taken = [_axes(part) for part in parts]
    rest = target.dim() - sum(n for n in taken if n is not None)
    axis = 0
    for k, part in enumerate(parts):
        width = rest if part is Ellipsis else taken[k]
        if width and axis <= target.axis < axis + width:
            run = isinstance(part, slice) and part != slice(None)
            return (parts, k) if run or _is_row(part) else None
        axis += width or 0
    return None


def _axes(part: Any) -> int | None:
    """Returns how many axes a part of a key takes; ``None`` for an ellipsis."""
    if part is Ellipsis:
        return None
    if part is None or isinstance(part, bool):
        return 0
    masks = isinstance(part, Tensor | np.ndarray) and part.dtype in (torch.bool, np.bool_)
    return part.ndim if masks else 1


def _set_rows(target: NodeTensor, parts: list[Any], place: int, value: Any) -> None:
    """Writes rows that are named by a number or a run."""
    named, total = parts[place], target.size(target.axis)
    if not all(
        part is None or part is Ellipsis or isinstance(part, slice) or _is_row(part)
        for k, part in enumerate(parts)
        if k != place
    ):
        _set_beside_ids(target, parts, place, value)
        return
    ids = torch.arange(total, device=target.device)[named]
    view = target[tuple(slice(None) if k == place else part for k, part in enumerate(parts))]
    if not isinstance(view, NodeTensor):
        raise AssertionError("all rows are no node tensor")
    rows_first = view.movedim(view.axis, 0)
    if isinstance(value, Tensor) and value.dim():
        shape = list(view.shape)
        shape[view.axis : view.axis + 1] = [] if ids.dim() == 0 else [ids.numel()]
        while value.dim() > len(shape) and value.size(0) == 1:
            value = value.squeeze(0)
        value = value.expand(shape).to(target.dtype)
        if ids.dim():
            value = value.movedim(view.axis, 0)
    rows_first[ids.view(-1)] = value


def _set_beside_ids(target: NodeTensor, parts: list[Any], place: int, value: Any) -> None:
    """Writes rows that are named by a number or a run beside a mask or ids, through a view."""
    named, axis = parts[place], target.axis
    before, after = parts[:place], parts[place + 1 :]
    if isinstance(named, slice):
        rows = target[(slice(None),) * axis + (named,)]
        rows[(*before, slice(None), *after)] = value
        return
    total, number = target.size(axis), int(named)
    if not -total <= number < total:
        raise IndexError(f"index {number} is out of bounds for dimension {axis} with size {total}")
    one = slice(number % total, number % total + 1)
    # Torch's view has no such axis: it comes last, where it moves no axis of the value.
    rows = target[(slice(None),) * axis + (one,)].movedim(axis, -1)
    rows[(*before, *after, slice(None))] = (
        value.unsqueeze(-1) if isinstance(value, Tensor) and value.dim() else value
    )
