"""Rules of views, and of joining and cutting along axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from pyg_sar.tensors.copies import Origin
from pyg_sar.tensors.node_tensor import (
    RULES,
    NodeTensor,
    by_gathering,
    node_tensors,
    refusal,
    rule,
    whole,
)
from pyg_sar.tensors.operands import arguments, own, wrap
from pyg_sar.tensors.pointwise import known_rows
from pyg_sar.tensors.rows import Rows, note_plain


def resized(shape: Sequence[int], numel: int) -> list[int]:
    """Returns a shape with -1 replaced by what it stands for."""
    known = math.prod(n for n in shape if n != -1)
    return [numel // max(known, 1) if n == -1 else n for n in shape]


def _new_rows(
    given: Rows, at: int, old: Sequence[int], shape: Sequence[int]
) -> tuple[Rows, int] | None:
    """Returns the layout and its axis after a reshape; ``None``: rows don't stay together."""
    before = math.prod(old[:at])
    total, step = given.total, 1
    for axis, size in enumerate(shape):
        if (step == before and size != 1) or (step == before and total == 1):
            if size == total:
                return given, axis
            inner = math.prod(old[at + 1 :])
            if total and size > total and size % total == 0 and inner % (size // total) == 0:
                return given.widened(size // total), axis
        times = size // total if total else 0
        if times > 1 and size == times * total and step * times == before and len(shape) > 1:
            return given.repeated(times), axis
        step *= size
    for (made, count), rows in given.origins.items():  # [N k, *] as [N, k, *], or as [k, N, *]
        axes = [rows.total, count] if made == "widened" else [count, rows.total]
        axis = at if made == "widened" else at + 1
        found = _new_rows(rows, axis, [*old[:at], *axes, *old[at + 1 :]], shape)
        if found is not None:
            return found
    return None


@rule("view", "_unsafe_view", "_reshape_alias", "_view_copy", "view_copy")
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    source, shape = args[0], args[1]
    if isinstance(shape, torch.dtype):
        raise refusal(func, "as another dtype is not supported", source)
    shape = resized(shape, source.numel())
    found = _new_rows(source.rows, source.axis, source.shape, shape)
    if found is None:
        flat = len(shape) == 1 or not source.numel()
        passes_back = torch._C._current_graph_task_id() != -1  # What was viewed isn't known there.
        if flat or source.rows.total == 1:
            return whole(source, "reshape()").reshape(shape)
        moved = _rows_in_groups(source, shape)
        if moved is None and not passes_back:
            why = f"to {list(shape)} would not keep rows together: .movedim() puts rows along "
            why += "another axis, .full_tensor() gives every worker all of them"
            raise refusal(func, why, source)
        return whole(source, "reshape()").reshape(shape) if moved is None else moved
    rows, axis = found
    if source.edges is not None and shape == list(source.shape):
        return _same_edges(source)
    local = list(shape)
    local[axis] = rows.count
    out = wrap(source.local.reshape(local), rows, axis)
    return out if out.is_floating_point() else _same_column(source, out)


def _rows_in_groups(source: NodeTensor, shape: list[int]) -> NodeTensor | None:
    """Returns a view of groups of rows, ``[A B, *]`` as ``[A, B, *]``: rows change places for it.

    Rows lie as those of a layout of A or B rows that is known, or evenly where none is.
    """
    at, old = source.axis, source.shape
    known = [n for n in shape if known_rows(source, n) is not None]
    for size in (*known, *sorted(shape, reverse=True)):
        times, odd = divmod(source.rows.total, max(size, 1))
        rows = known_rows(source, size) or source.rows.share(size)
        for moved in (rows.widened(times), rows.repeated(times)) if not odd else ():
            found = _new_rows(moved, at, old, shape)
            if found is not None:
                return _moved_view(source, moved, shape, *found)
    return None


def _moved_view(
    source: NodeTensor, moved: Rows, shape: list[int], rows: Rows, axis: int
) -> NodeTensor:
    """Returns a view of rows in the places of ``moved``. What is written into it moves back."""
    there = source.rows.moved(source.local, source.axis, moved)
    sizes = [rows.count if d == axis else n for d, n in enumerate(shape)]
    out = wrap(there.reshape(sizes), rows, axis)
    back = lambda copy: moved.moved(copy.reshape(there.shape), source.axis, source.rows)  # noqa: E731
    out.origin = Origin(out.local, source, back=back)
    return out


def _same_column(source: NodeTensor, out: NodeTensor) -> NodeTensor:
    """Returns a view that has the same id in each row as its source, where that has one."""
    if out.rows is source.rows:
        out.column = source.column
    return out


def _same_edges(source: NodeTensor) -> NodeTensor:
    """Returns an ``edge_index`` that goes on standing for the edges."""
    out = wrap(source._local, source.rows, source.axis)
    out.edges, out.make = source.edges, lambda: source.local
    return out


@rule("expand")
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    source, shape = args[0], list(args[1])
    axis = source.axis - source.dim() + len(shape)
    if shape[axis] not in (-1, source.rows.total):
        return by_gathering(func, args, kwargs)
    shape[axis] = source.rows.count
    out = wrap(source.local.expand(shape), source.rows, axis)
    return out if out.is_floating_point() else _same_column(source, out)


@rule("t", "transpose", "permute")
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    order = _order(func, args, source.dim())
    return wrap(source.local.permute(order), source.rows, order.index(source.axis))


def _order(func: Any, args: Any, dim: int) -> list[int]:
    """Returns the axes in their new order."""
    name = func._schema.name.rpartition("::")[2]
    axes = list(range(dim))
    if name == "permute":
        return [d % dim for d in args[1]]
    if name == "t":
        return axes[::-1]
    first, second = args[1] % dim, args[2] % dim
    axes[first], axes[second] = axes[second], axes[first]
    return axes


@rule("unsqueeze")
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    dim = args[1] % (source.dim() + 1)
    axis = source.axis + (dim <= source.axis)
    return _same_column(source, wrap(source.local.unsqueeze(dim), source.rows, axis))


@rule("squeeze")
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    given = range(source.dim()) if len(args) < 2 else args[1]
    given = [given] if isinstance(given, int) else given
    dims = [d % source.dim() for d in given if source.size(d) == 1]
    if source.axis in dims:
        return by_gathering(func, args, kwargs)
    local = source.local
    for dim in sorted(dims, reverse=True):
        local = local.squeeze(dim)
    axis = source.axis - sum(d < source.axis for d in dims)
    return _same_column(source, wrap(local, source.rows, axis))


@rule("squeeze_", "unsqueeze_", "t_", "transpose_")
def _viewed_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    source, name = args[0], func._schema.name.rpartition("::")[2][:-1]
    view = getattr(torch.ops.aten, name)
    overload = func._overloadname if name != "transpose" else "int"
    out = RULES[name](getattr(view, overload), args, kwargs)
    if not isinstance(out, NodeTensor):
        raise refusal(func, "of the rows' axis is not supported", source)
    source._local, source.axis, source.steps = out.local, out.axis, out.steps
    with no_dispatch():  # The shape that torch sees.
        func(*args, **kwargs)
    return source


@rule("as_strided")
def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """A part, which autograd asks of the gradient of a plain tensor where a part was written."""
    source, sizes, steps, *given = args
    cuts = _cuts(source, sizes, steps, given[0] or 0 if given else 0)
    out = None if cuts is None or source.origin or source._is_view() else _part(source, cuts)
    if not isinstance(out, NodeTensor):  # What is written into a row, or into rows of all, is lost.
        why = (
            "is no part with a row of each worker. Where you write into a part of a plain tensor, "
            "make it one of the graph: x.new_zeros(x.size(0), 8) in place of torch.zeros(N, 8)"
        )
        raise refusal(func, why, source)
    return out


def _part(source: NodeTensor, cuts: Sequence[int | slice]) -> Tensor:
    out = wrap(source.local, source.rows, source.axis)
    for dim, cut in reversed(list(enumerate(cuts))):
        if isinstance(cut, int):
            out = _select(torch.ops.aten.select.int, (out, dim, cut), {})
        elif cut != slice(0, source.size(dim), 1):
            out = _slice(torch.ops.aten.slice.Tensor, (out, dim, cut.start, cut.stop, cut.step), {})
    return out


def _cuts(
    source: NodeTensor, sizes: Sequence[int], steps: Sequence[int], offset: int
) -> list[int | slice] | None:
    """Returns which part of each axis lies at these places of memory; ``None``: no such part."""
    starts, own = [0] * source.dim(), source.stride()
    for dim in sorted(range(source.dim()), key=lambda d: -own[d]):
        starts[dim], offset = divmod(offset, own[dim]) if own[dim] else (0, offset)
    cuts: list[int | slice] = list(starts)
    left = list(zip(sizes, steps, strict=True))
    for dim, start in enumerate(starts):
        step, odd = divmod(left[0][1], own[dim]) if left and own[dim] else (0, 1)
        if not odd and step:
            cuts[dim] = slice(start, start + step * (left.pop(0)[0] - 1) + 1, step)
    places = [c.stop - 1 if isinstance(c, slice) else c for c in cuts]
    inside = all(place < n for place, n in zip(places, source.shape, strict=True))
    whole_rows = isinstance(cuts[source.axis], slice) and source.is_contiguous()
    return cuts if inside and whole_rows and not left and not offset else None


@rule("select")
def _select(func: Any, args: Any, kwargs: Any) -> Any:
    source, dim, number = args
    dim = dim % source.dim()
    if dim != source.axis:
        local = source.local.select(dim, number)
        out = wrap(local, source.rows, source.axis - (dim < source.axis))
        return _as_column(source, out, number % source.size(dim))
    return one_row_of(source, int(number))


def _as_column(source: NodeTensor, out: NodeTensor, number: int) -> NodeTensor:
    if source.dim() == 2:
        out.column = source, number
    return out


def one_row_of(source: NodeTensor, number: int) -> Tensor:
    """Returns one row of the whole, on all workers, to the bit."""
    rows = source.rows
    (place,) = rows.checked(torch.tensor([number], device=source.device))
    at = int(rows.local(place.view(1)))
    local = source.local.movedim(source.axis, 0)
    row = local[at].contiguous() if at >= 0 else local.new_zeros(local.shape[1:])
    holders = rows.comm.all_gather(torch.tensor([int(at >= 0)]), label=("", "", "node tensors"))
    owner = next(rank for rank, flag in enumerate(holders) if int(flag))
    return rows.comm.all_gather(row, label=("", "", "node tensors"))[owner]


@rule("slice")
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    source, dim = given["self"], (given["dim"] or 0) % given["self"].dim()
    if dim != source.axis:
        out = func(source.local, dim, given["start"], given["end"], given["step"])
        return wrap(out, source.rows, source.axis)
    start, stop, step = slice(given["start"], given["end"], given["step"]).indices(source.size(dim))
    if source.edges is not None:
        kept = _first_edges(func, source, stop if (start, step) == (0, 1) else -1)
        if kept is not None:
            return kept
    elif (start, step) == (0, 1) and stop >= source.size(dim):
        return wrap(source.local[:], source.rows, source.axis)
    part, first = source.rows.parts.get((start, stop), (None, 0))
    if part is not None and step == 1:  # As in the backward pass of what joined them.
        local = source.local.narrow(dim, first, part.count)
        return part.whole(local, dim, "cat()") if part.shared else wrap(local, part, dim)
    rows = source.rows.sliced(start, max(stop, start), step)
    return wrap(source.local.index_select(dim, rows.source), rows, source.axis)


def _first_edges(func: Any, source: NodeTensor, count: int) -> NodeTensor | None:
    """Returns the first ``count`` edges, where distributed edges are known that they stand for.

    Raises:
        DistributedIndexError: They are of a message flow graph, and no layer's.
    """
    following = source.edges.following
    for found in (following, source):
        if found is not None and count == found.size(1):
            return _same_edges(found)
    if source.edges.index.partial is not None:
        raise refusal(
            func,
            "cuts edges off those of a message flow graph otherwise than from layer to layer: "
            "trim_to_layer() may do so once less often than it has layers",
            source,
        )
    return None


@rule("split", "split_with_sizes", "unbind", "unsafe_split")
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    source = given["self"]
    dim = given.get("dim", 0) % source.dim()
    name = func._schema.name.rpartition("::")[2]
    if dim != source.axis:
        parts = func(source.local, *args[1:], **kwargs)
        axis = source.axis - (name == "unbind" and dim < source.axis)
        out = [wrap(part, source.rows, axis) for part in parts]
        if name != "unbind":
            return out
        return [_as_column(source, part, number) for number, part in enumerate(out)]
    if name == "unbind":
        return list(by_gathering(func, args, kwargs))
    sizes = given.get("split_sizes")
    if sizes is None:
        size, total = int(given["split_size"]), source.size(dim)
        sizes = [min(size, total - first) for first in range(0, total, size)] if total else [0]
    out, first = [], 0
    for size in sizes:
        rows = source.rows.sliced(first, first + size, 1)
        out.append(wrap(source.local.index_select(dim, rows.source), rows, source.axis))
        first += size
    return out


@rule("cat", "stack")
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.rpartition("::")[2]
    widest = max(t.dim() for t in args[0])
    tensors = [t for t in args[0] if t.dim() == widest]  # PyTorch skips those of shape [0].
    first = next(iter(node_tensors(tensors)), None)
    if first is None:
        return by_gathering(func, args, kwargs)
    dim = arguments(func, args, kwargs)["dim"] % (first.dim() + (name == "stack"))
    if name == "stack" or dim != first.axis:
        out = func([own(t, first.rows, first.axis) for t in tensors], dim)
        return wrap(out, first.rows, first.axis + (name == "stack" and dim <= first.axis))
    parts = []
    for tensor in tensors:
        if isinstance(tensor, NodeTensor):
            if tensor.axis != dim:
                raise refusal(func, "joins rows along different axes", *tensors)
            parts.append((tensor.local, tensor.rows))
        else:
            note_plain(tensor, first.rows.comm)
            rows = first.rows.share(tensor.size(dim))
            parts.append((rows.cut(tensor, dim), rows))
    rows = parts[0][1].joined([r for _, r in parts[1:]]) if len(parts) > 1 else parts[0][1]
    return wrap(func([t for t, _ in parts], dim), rows, dim)


# Backward passes of views #####################################################


@rule("select_backward", "slice_backward")
def _view_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, sizes, dim, *rest = args
    dim = dim % len(sizes)
    name = func._schema.name.rpartition("::")[2]
    axis = gradient.axis + (name == "select_backward" and dim <= gradient.axis)
    if dim != axis:
        local = list(sizes)
        local[axis] = gradient.rows.count
        return wrap(func(gradient.local, local, dim, *rest), gradient.rows, axis)
    rows = known_rows(gradient, sizes[dim])
    if rows is None or name == "select_backward":
        return by_gathering(func, args, kwargs)
    start, stop, step = slice(*rest).indices(sizes[dim])
    cut = rows.sliced(start, max(stop, start), step)
    local = list(sizes)
    local[dim] = rows.count
    out = gradient.local.new_zeros(local)
    return wrap(out.index_copy_(dim, cut.source, own(gradient, cut, dim)), rows, dim)


@rule("unfold")
def _unfold(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs along an axis of each row, with a new last axis."""
    source, dim, *rest = args
    if dim % source.dim() == source.axis:
        return by_gathering(func, args, kwargs)
    return wrap(func(source.local, dim, *rest), source.rows, source.axis)


@rule("diagonal")
def _diagonal(func: Any, args: Any, kwargs: Any) -> Any:
    """The axis of the diagonal comes last: each row's part of it is its own, where all have one."""
    given = arguments(func, args, kwargs)
    source = given["self"]
    dims = [given[name] % source.dim() for name in ("dim1", "dim2")]
    if source.axis not in dims:
        axis = source.axis - sum(d < source.axis for d in dims)
        return wrap(func(source.local, *args[1:], **kwargs), source.rows, axis)
    other = next((d for d in dims if d != source.axis), source.axis)
    if given["offset"] or source.size(other) < source.rows.total:
        return by_gathering(func, args, kwargs)
    local = source.local.movedim((source.axis, other), (0, 1))
    ids = source.rows.ids
    return wrap(
        local[torch.arange(len(ids), device=ids.device), ids].movedim(0, -1), source.rows, -1
    )


@rule("diagonal_backward")
def _diagonal_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, sizes, offset, *dims = args
    first, second = (d % len(sizes) for d in dims)
    rows = gradient.rows
    if gradient.axis != gradient.dim() - 1 or offset or sizes[first] != rows.total:
        return by_gathering(func, args, kwargs)
    shape = list(sizes)
    shape[first] = rows.count
    out = gradient.local.new_zeros(shape)
    places = torch.arange(rows.count, device=out.device), rows.ids
    out.movedim((first, second), (0, 1))[places] = gradient.local.movedim(-1, 0)
    return wrap(out, rows, first)


@rule("repeat")
def _repeat(func: Any, args: Any, kwargs: Any) -> Any:
    source, counts = args
    axis = source.axis - source.dim() + len(counts)
    if counts[axis] != 1:
        return by_gathering(func, args, kwargs)
    return wrap(source.local.repeat(counts), source.rows, axis)


@rule("constant_pad_nd")
def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    source, pads, *rest = args
    if len(pads) // 2 >= source.dim() - source.axis and any(
        pads[2 * (source.dim() - 1 - source.axis) :][:2]
    ):
        return by_gathering(func, args, kwargs)
    return wrap(func(source.local, pads, *rest), source.rows, source.axis)
