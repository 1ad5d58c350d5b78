"""Rules of reading and writing rows by masks and global ids, and of scattering."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from pyg_sar.tensors.node_tensor import (
    NodeTensor,
    by_gathering,
    into_plain,
    method,
    node_tensors,
    refusal,
    rule,
    tensors_in,
    whole,
)
from pyg_sar.tensors.operands import (
    arguments,
    beside,
    called,
    extreme,
    identity,
    own,
    summed,
    widened,
    wrap,
)
from pyg_sar.tensors.pointwise import ids_of
from pyg_sar.tensors.rows import Fetch, Rows, note_first, note_table

_PUT = torch.ops.aten.index_put_.default  # Unlike the method it takes axes without an index.


class Chosen:
    """The rows that an index along the rows chooses.

    Args:
        rows: The layout of what is chosen.
        local: This worker's rows that it chooses, or the plan that fetches them.
    """

    def __init__(self, rows: Rows, local: Tensor | Fetch) -> None:
        self.rows, self.local = rows, local

    def read(self, source: Tensor, axis: int) -> Tensor:
        """Returns what it chooses, with rows at ``axis``."""
        if isinstance(self.local, Fetch):
            return self.local.get(source.movedim(axis, 0)).movedim(0, axis).contiguous()
        return source.index_select(axis, self.local)


def choose(rows: Rows, index: Tensor, negative: bool = True) -> Chosen:
    """Returns what a mask ``[N]`` or ids ``[K]`` choose of rows; may these be negative?"""
    if index.dtype in (torch.bool, torch.uint8):
        if index.size(0) != rows.total:
            raise IndexError(
                f"The shape of the mask [{index.size(0)}] at index 0 does not match the shape of "
                f"the indexed tensor [{rows.total}] at index 0"
            )
        chosen = rows.selected(own(index, rows, 0).bool(), index)
        return Chosen(chosen, _source(chosen))
    if isinstance(index, NodeTensor):
        return Chosen(index.rows, rows.fetch_by(index, -rows.total if negative else 0))
    if not negative and index.numel() and int(index.min()) < 0:
        raise IndexError("index out of range in self")  # as torch
    chosen = rows.taken(index)
    return Chosen(chosen, _source(chosen))


def _source(rows: Rows) -> Tensor:
    """Returns their numbers among the rows that they were selected from, or among themselves."""
    if rows.source is None:
        return torch.arange(rows.count, device=rows.comm.device)
    return rows.source


@rule("index", "_unsafe_index")
def _index(func: Any, args: Any, kwargs: Any) -> Any:
    source, indices = args[0], list(args[1])
    named = [k for k, index in enumerate(indices) if index is not None]
    if _over_rows(source, indices):
        return by_gathering(func, args, kwargs)
    if not isinstance(source, NodeTensor):
        return _index_plain(func, source, indices, named)
    if source.axis not in named:
        indices = [whole(index, "index") for index in indices]
        if source.edges is not None and indices[named[0]].tolist() == [1, 0]:
            return source.flip(0)
        return wrap(func(source.local, indices), source.rows, _axis_after(func, source, indices))
    index = indices[source.axis]
    if index.dim() != 1:
        if index.dim() == 0 and len(named) == 1:
            return source.select(source.axis, int(whole(index, "index")))
        return by_gathering(func, args, kwargs)
    chosen = choose(source.rows, index)
    others = [k for k in named if k != source.axis]
    if source.edges is not None and not others:
        return _selected_edges(source, index, chosen)
    part = chosen.read(source.local, source.axis)
    if not others:
        return wrap(part, chosen.rows, source.axis)
    if any(indices[k].dtype == torch.bool for k in others) or source.axis != 0:
        return by_gathering(func, args, kwargs)
    here: list[Any] = [None] * len(indices)
    here[0] = torch.arange(part.size(0), device=part.device)
    for k in others:
        if indices[k].dim() > 1 or (
            indices[k].dim() == 1 and indices[k].size(0) not in (1, chosen.rows.total)
        ):
            return by_gathering(func, args, kwargs)
        here[k] = beside(func, indices[k], chosen.rows, -1, [source, indices[k]])
    return wrap(func(part, here), chosen.rows, 0)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _over_rows(source: Tensor, indices: list[Any]) -> bool:
    """Returns whether a mask of several axes, of which the rows may be one, is among the indices.

    The indices after it are of other axes than their places say.
    """
    if not isinstance(source, NodeTensor):
        return False
    axis = 0
    for index in indices:
        width = 1 if index is None or not _is_mask(index) else index.dim()
        if width > 1 and axis <= source.axis:
            return True
        axis += width
    return False


def _axis_after(func: Any, source: NodeTensor, indices: list[Any]) -> int:
    """Returns where the rows are after axes other than theirs were indexed."""
    named = [k for k, index in enumerate(indices) if index is not None]
    together = named == list(range(named[0], named[-1] + 1))
    if together and source.axis < named[0]:
        return source.axis
    if any(_is_mask(indices[k]) and indices[k].dim() > 1 for k in named):
        raise refusal(func, "by several indices is not supported", source)
    width = max(indices[k].dim() for k in named)
    if together:
        return source.axis - len(named) + width
    # Indices with a slice between them: what they choose comes first.
    return width + source.axis - sum(k < source.axis for k in named)


def _selected_edges(source: NodeTensor, index: Tensor, chosen: Chosen) -> NodeTensor:
    """Returns ``edge_index[:, index]``; by a mask, it stands for the edges selected."""
    if index.dtype != torch.bool:
        return wrap(chosen.read(source.local, 1), chosen.rows, 1)
    mask = own(index, source.rows, 0)
    edges = source.edges.changed(lambda edges: edges[:, mask])
    if edges is None:
        return wrap(chosen.read(source.local, 1), chosen.rows, 1)
    out = wrap(source._local.index_select(1, _source(chosen.rows)), chosen.rows, 1)
    out.edges, out.make = edges, ids_of(source, lambda ids: chosen.read(ids, 1))
    if any(end.total == out.rows.total for end in source.rows.ends):
        out.rows.ends = source.rows.ends  # as many edges as nodes
    return out


def _index_plain(func: Any, source: Tensor, indices: list[Any], named: list[int]) -> Any:
    """Reads a plain tensor, which all workers hold, by node tensors of ids or by a mask."""
    nodes = node_tensors(indices)
    first = nodes[0]
    if first.dtype == torch.bool:
        if len(named) > 1 or first.dim() != 1:
            note_first(source, first.rows.comm)
            return by_gathering(func, (source, indices), {})
        axis = named[0]
        if source.size(axis) != first.size(0):
            raise IndexError(
                f"The shape of the mask {list(first.shape)} at index {axis} does not match the "
                f"shape of the indexed tensor {list(source.shape)} at index {axis}"
            )
        chosen = first.rows.selected(first.local, first)
        here = first.rows.cut(source, axis).index_select(axis, _source(chosen))
        note_table(source, [*[None] * axis, first.rows.ids[first.local]], first.rows.comm)
        return wrap(here, chosen, axis)
    rows, axis = first.rows, first.axis - first.dim()
    together = named == list(range(named[0], named[-1] + 1))
    before = named[0] if together else 0
    width = max(indices[k].dim() for k in named)
    local = [
        i if i is None else beside(func, i, rows, axis, [t for t in indices if t is not None])
        for i in indices
    ]
    out = func(source, local)
    note_table(source, local, rows.comm)
    return wrap(out, rows, before + width + axis)


@rule("index_select")
def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    source, dim, index = args
    dim = dim % source.dim()
    if source.layout != torch.strided:  # A matrix that all workers hold.
        return by_gathering(func, args, kwargs)
    if not isinstance(source, NodeTensor):
        out = func(source, dim, index.local)
        note_table(source, [*[None] * dim, index.local], index.rows.comm)
        return wrap(out, index.rows, dim)
    if dim != source.axis:
        return wrap(func(source.local, dim, whole(index, "index_select")), source.rows, source.axis)
    chosen = choose(source.rows, index, negative=False)
    return wrap(chosen.read(source.local, dim), chosen.rows, dim)


@method(Tensor.masked_select, torch.masked_select)
def _masked_select(func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "mask"), args, strict=False)) | kwargs
    source, mask = given["input"], given["mask"]
    if source.shape == mask.shape and source.dim() == 1:
        return source[mask]
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule("take")
def _take(func: Any, args: Any, kwargs: Any) -> Any:
    source, index = args
    if isinstance(source, NodeTensor):
        return by_gathering(func, args, kwargs)
    return torch.ops.aten.index.Tensor(source.reshape(-1), [index])


@rule("masked_select")
def _select_by_mask(func: Any, args: Any, kwargs: Any) -> Any:
    """Called by losses with ``weight`` and ``label_smoothing``."""
    source, mask = args
    if source.shape != mask.shape or source.dim() != 1:
        return by_gathering(func, args, kwargs)
    return torch.ops.aten.index.Tensor(source, [mask])


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    target, indices, values = given["self"], list(given["indices"]), given["values"]
    accumulate = bool(given["accumulate"])
    writes = func._schema.name.endswith("_")
    named = [k for k, index in enumerate(indices) if index is not None]
    if not isinstance(target, NodeTensor):
        if accumulate and _is_row_by_row(indices, named, values):
            added = torch.zeros_like(target)
            own_indices = [own(index, values.rows, 0) for index in indices]
            _PUT(added, own_indices, values.local, True)
            total = summed(added, values.rows)
            return target.add_(total) if writes else target + total
        return into_plain(func, args, kwargs) if writes else by_gathering(func, args, kwargs)
    out: Any = target if writes else target.clone()
    out.edges = None
    if _over_rows(target, indices):
        return _put_gathered(given, out)
    axis = target.axis
    if axis not in named:
        indices = [whole(index, "index_put()") for index in indices]
        chosen_axes = [indices[k] for k in named]
        taken = sum(index.dim() if _is_mask(index) else 1 for index in chosen_axes)
        width = max(1 if _is_mask(index) else index.dim() for index in chosen_axes)
        place = _axis_after(func, target, indices) - (target.dim() - taken + width)
        reach = values
        if values.dim():
            reach = beside(func, values, target.rows, place, [target, values])
        _PUT(out.local, indices, reach, accumulate)
        return out
    index = indices[axis]
    beyond = any(indices[k].dim() > 1 or index.numel() < indices[k].numel() for k in named)
    if axis != 0 or index.dim() != 1 or beyond:
        return _put_gathered(given, out)
    chosen = choose(target.rows, index)
    inner = target.dim() - len(named) if len(named) > 1 else target.dim() - 1
    operands = [target, values]
    if isinstance(values, NodeTensor) or values.dim() > inner:
        values = beside(func, values, chosen.rows, -inner - 1, operands)
    if len(named) > 1:
        others: list[Any] = [None] * len(indices)
        for k in named[1:]:
            if indices[k].dtype == torch.bool:
                return _put_gathered(given, out)
            others[k] = beside(func, indices[k], chosen.rows, -1, operands)
        if isinstance(chosen.local, Fetch):
            return _put_gathered(given, out)
        others[0] = chosen.local
        _PUT(out.local, others, values, accumulate)
        return out
    shape = [chosen.rows.count, *target.shape[1:]]
    values = values.expand(shape)
    if isinstance(chosen.local, Fetch):
        chosen.local.put(values.contiguous(), out.local, accumulate)
    else:
        out.local.index_put_((chosen.local,), values, accumulate)
    return out


def _is_row_by_row(indices: list[Any], named: list[int], values: Tensor) -> bool:
    """Returns whether each row of values has one id along each of the first axes."""
    if not isinstance(values, NodeTensor) or values.axis or len(named) != len(indices):
        return False
    ids = (i for i in indices if not _is_mask(i))
    return sum(i.dim() == 1 and i.size(0) == values.size(0) for i in ids) == len(indices)


def _put_gathered(given: dict[str, Any], out: NodeTensor) -> NodeTensor:
    """Writes into all rows, gathered, and keeps those here."""
    everything = whole(out, "index_put()")
    indices = [None if i is None else whole(i, "index_put()") for i in given["indices"]]
    values = whole(given["values"], "index_put()")
    _PUT(everything, indices, values, bool(given["accumulate"]))
    out.local.copy_(out.rows.cut(everything, out.axis))
    return out


# Along axes ###################################################################


@rule("gather")
def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    source, dim, index = args[:3]
    first = next(iter(node_tensors(source, index)))
    dim, axis, rows = dim % first.dim(), first.axis, first.rows
    if dim == axis and not isinstance(source, NodeTensor):
        out = func(source, dim, index.local)  # by rows of what all workers hold
        places = torch.meshgrid(*map(torch.arange, index.local.shape), indexing="ij")
        read = [index.local if d == dim else place for d, place in enumerate(places)]
        note_table(source, read, rows.comm)
        return wrap(out, rows, axis)
    if dim == axis and index.dim() == source.dim() and _id_per_row(source, index):
        return wrap(source.rows.fetch_by(index, 0).get(source.local), index.rows, 0)
    if dim == axis or source.size(axis) != index.size(axis):
        if not isinstance(source, NodeTensor):
            note_first(source, rows.comm)
        return by_gathering(func, args, kwargs)
    return wrap(func(own(source, rows, axis), dim, own(index, rows, axis)), rows, axis)


@rule(
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    *("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_"),
    *("index_reduce", "index_reduce_"),
)
def _scatter(func: Any, args: Any, kwargs: Any) -> Any:
    """Along another axis each row for itself; along the rows into what all workers hold."""
    given = arguments(func, args, kwargs)
    name = func._schema.name.rpartition("::")[2]
    writes, name = name.endswith("_"), name.rstrip("_")
    target, dim = given["self"], given["dim"] % max(given["self"].dim(), 1)
    index = given["index"]
    value_name = next((n for n in ("src", "source", "value") if n in given), "value")
    values = given[value_name]
    by_axis = name.startswith("index_")
    nodes = node_tensors(target, index, values)
    axis = next((t.axis for t in nodes if t is not index or not by_axis), dim)
    aligned = [target, *([] if by_axis else [index]), *tensors_in(values)]
    aligned = [t for t in aligned if t.dim()]
    if axis != dim and any(t.size(axis) != nodes[0].rows.total for t in aligned):
        return _scatter_gathered(func, args, kwargs, writes)
    if axis != dim:
        rows = nodes[0].rows
        if not isinstance(target, NodeTensor) and (writes or target.size(axis) != rows.total):
            return into_plain(func, args, kwargs) if writes else by_gathering(func, args, kwargs)
        local = own(target, rows, axis)
        changed = {**given, "self": local}
        if isinstance(values, Tensor) and values.dim():
            changed[value_name] = own(values, rows, axis)
        changed["index"] = whole(index, name) if by_axis else own(index, rows, axis)
        out = called(func, changed)
        return target if writes else wrap(out, rows, axis)
    if name in ("index_add", "index_copy", "index_fill") and isinstance(target, NodeTensor):
        return _put_by_axis(given, name, value_name, dim, writes)
    adds = name in ("scatter_add", "index_add") or given.get("reduce") in ("sum", "add")
    fills = name == "scatter" and value_name == "value" and given.get("reduce") is None
    if isinstance(target, NodeTensor):
        if adds or given.get("reduce") is not None:
            return _into_own(func, given, target, index, value_name, writes)
        if not fills or index.dim() != target.dim() or not _id_per_row(target, index):
            return _scatter_gathered(func, args, kwargs, writes)
        named = torch.ones(index.rows.count, dtype=torch.bool, device=index.device)
        none = torch.zeros(target.rows.count, dtype=torch.bool, device=index.device)
        there = target.rows.fetch_by(index, 0).put(named, none, False)
        fill = target.masked_fill_ if writes else target.masked_fill
        return fill(wrap(there, target.rows, 0).view(-1, *[1] * (target.dim() - 1)), values)
    if fills and isinstance(index, NodeTensor) and index.axis == dim:
        out = torch.where(_there(target, index.local, dim, index.rows), values, target)
        return target.copy_(out) if writes else out.to(target.dtype)
    if name == "scatter_reduce" and given["reduce"] in ("amax", "amin"):
        return _extremes_into_plain(func, given, target, values, dim, writes)
    if not adds or not isinstance(values, Tensor):
        return _scatter_gathered(func, args, kwargs, writes)
    return _add_into_plain(func, given, target, values, value_name, dim, writes)


def _put_by_axis(given: dict[str, Any], name: str, value: str, dim: int, writes: bool) -> Any:
    """Writes, or adds, rows by ids, a list of them."""
    target, index, values = given["self"], given["index"], given[value]
    if name == "index_fill":  # It alone takes ids that count from the end.
        values = torch.as_tensor(values, dtype=target.dtype, device=target.device)
    elif isinstance(index, NodeTensor):
        target.rows.fetch_by(index, 0)
    elif index.numel() and int(index.min()) < 0:
        raise IndexError(f"{name}(): index out of range in self")
    if name == "index_add" and given["alpha"] != 1:
        values = values * given["alpha"]
    put = _PUT if writes else torch.ops.aten.index_put.default
    return put(target, [*[None] * dim, index], values, name == "index_add")


def _id_per_row(source: Tensor, index: Tensor) -> bool:
    """Returns whether an index, as wide as a source, holds one id of its rows in each row."""
    if not isinstance(source, NodeTensor) or not isinstance(index, NodeTensor):
        return False
    found = source.axis == index.axis == 0 and index.column is not None
    return found and index.shape[1:] in ((), source.shape[1:])


def _into_own(
    func: Any, given: Any, target: NodeTensor, index: Tensor, name: str, writes: bool
) -> NodeTensor:
    """Sends each row of values to the owner of the row that it goes into, which reduces them."""
    values, rows, axis = given[name], target.rows, target.axis
    wide = isinstance(values, Tensor) and (len(index), *target.shape[1:]) == values.shape
    by_axis = func._schema.name.startswith("aten::index_")
    narrow = index.dim() == (1 if by_axis else target.dim())
    if not (wide and narrow and _id_per_row(target, index)):
        everything = called(func, given, self=whole(target, "scatter"))  # N rows, not E
        found = rows.cut(whole(everything, "scatter"), axis)
    else:
        ids = cast(NodeTensor, index)
        numbers, sent = rows.fetch_by(ids, 0).sent(own(values, ids.rows, 0))
        if not by_axis:
            numbers = numbers.view(-1, *[1] * (sent.dim() - 1)).expand_as(sent)
        found = called(func, given, self=target.local, index=numbers, **{name: sent})
    if not writes:
        return wrap(found, rows, axis)
    if found is not target.local:
        target.local.copy_(found)
    return target


@rule("masked_scatter")
def _masked_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    return _scatter_gathered(func, args, kwargs, False)


def _scatter_gathered(func: Any, args: Any, kwargs: Any, writes: bool) -> Any:
    """Scatters all rows, gathered, and keeps those here."""
    target = args[0]
    if not isinstance(target, NodeTensor):
        return into_plain(func, args, kwargs) if writes else by_gathering(func, args, kwargs)
    found = by_gathering(func, args, kwargs)
    kept = target.rows.cut(found, target.axis)
    if writes:
        target.local.copy_(kept)
        return target
    return wrap(kept, target.rows, target.axis)


def _by_row(index: Tensor, values: Tensor, dim: int) -> Rows | None:
    """Returns the layout of values that are scattered, of which each row has its own index."""
    rows = node_tensors(index, values)[0].rows
    sizes = [t.size(0 if t.dim() == 1 else dim) for t in (index, values) if t.dim()]
    return rows if sizes == [rows.total] * 2 else None


def _scattered_whole(func: Any, given: Any, writes: bool) -> Tensor:
    """Scatters all rows, gathered, into a plain tensor."""
    out: Tensor = called(func, {name: whole(value, "scatter") for name, value in given.items()})
    return given["self"] if writes else out


def _extremes_into_plain(
    func: Any, given: Any, target: Tensor, values: Tensor, dim: int, writes: bool
) -> Tensor:
    """Puts extremes into a plain tensor: of this worker's rows, then over workers."""
    index, op = given["index"], given["reduce"][1:]
    rows = _by_row(index, values, dim)
    if rows is None or not target.dim():
        return _scattered_whole(func, given, writes)
    index, values = own(index, rows, dim), own(values, rows, dim)
    nothing = torch.full_like(target, identity(target.dtype, op))
    found = extreme(nothing.scatter_reduce(dim, index, values, given["reduce"]), rows, op)
    if given["include_self"]:
        found = getattr(torch, f"{op}imum")(found, target)
    out = torch.where(_there(target, index, dim, rows), found, target)
    return target.copy_(out) if writes else out


def _there(target: Tensor, index: Tensor, dim: int, rows: Rows) -> Tensor:
    """Returns where in a plain tensor something is put, by this worker's rows of the index."""
    here = torch.zeros_like(target, dtype=torch.bool).scatter(dim, index, True)
    return extreme(here, rows, "max")


def _add_into_plain(
    func: Any, given: Any, target: Tensor, values: Tensor, name: str, dim: int, writes: bool
) -> Tensor:
    """Adds rows into a plain tensor: sums of this worker's rows, then over workers."""
    index = given["index"]
    rows = _by_row(index, values, dim)
    if rows is None:
        return _scattered_whole(func, given, writes)
    local = {
        **given,
        "self": torch.zeros_like(widened(target)),
        "index": own(index, rows, dim if index.dim() > 1 else 0),
        name: widened(own(values, rows, dim)),
    }
    if "include_self" in given:
        local["include_self"] = True
        if not given["include_self"]:
            there = _there(target, local["index"], dim, rows)
            target = target.masked_fill_(there, 0) if writes else target.masked_fill(there, 0)
    total = summed(called(func, local), rows).to(target.dtype)
    return target.add_(total) if writes else target + total
