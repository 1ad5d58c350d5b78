"""The index space: ``edge_index`` as an ordinary ``[2, E]`` tensor over own and halo nodes.

[Note: what may be done with a distributed index] Reading a node tensor with it is a halo gather,
scattering into a node tensor with it is a halo reduction; selecting, cutting and joining edges
stays in the space. Anything else would compute with numbers that only this worker understands,
and raises :class:`DistributedIndexError` instead of returning local results.

[Note: once per structure] PyG derives edge lists anew in each forward pass (self loops removed and
added, say). Derivations are remembered on the tensor they start from, by the identity and version
of what selected the edges (or by equal content for joined edges), so that the same tensor object
comes back and what hangs on it (shards, normalisation) is made once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange import halo_gather, halo_reduce
from pyg_sar.halo import HaloPlan

_MEMORY = 16  # derivations remembered per tensor

_METADATA: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "is_sparse_csr",
        "is_quantized", "is_meta", "requires_grad", "grad", "grad_fn", "is_leaf", "names",
        "_version", "is_nested", "itemsize", "nbytes", "is_mkldnn", "is_cpu", "is_mps", "is_xpu",
        "is_xla", "_backward_hooks",
    )
    if hasattr(Tensor, name)
) | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__,
    Tensor.stride, Tensor.is_contiguous, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.data_ptr, Tensor.storage_offset, Tensor.is_signed, Tensor.get_device,
    Tensor.untyped_storage, Tensor.is_pinned, Tensor.is_shared, Tensor.is_inference,
    Tensor.__hash__, Tensor.type, torch.is_floating_point, torch.is_complex, torch.numel,
    torch.is_tensor, getattr(Tensor, "requires_grad").__set__,  # noqa: B009
}  # fmt: skip

_SAME_CLASS = {
    Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda,
    Tensor.long, Tensor.int, torch.clone, torch.detach, Tensor.pin_memory,
    Tensor.requires_grad_,
}  # fmt: skip

_SAME_SHAPE_COMPARE = {
    Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__, torch.eq, torch.ne,
}  # fmt: skip

_RESHAPE = {
    Tensor.view, Tensor.expand_as, Tensor.expand, Tensor.unsqueeze, Tensor.reshape,
    torch.unsqueeze, torch.reshape,
}  # fmt: skip

_LIKE = {
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like,
    torch.randn_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
    Tensor.new_tensor,
}  # fmt: skip

_HANDLERS: dict[Any, Callable[..., Any]] = {}


def builtin(function: Any) -> Any:
    """What torch itself calls ``function``: PyG puts wrappers in the place of a few."""
    return getattr(torch._C._VariableFunctions, getattr(function, "__name__", ""), function)


def name_of(function: Any) -> str:
    """A function's name for messages, such as ``torch.Tensor.sort``."""
    name = torch.overrides.resolve_name(function) or getattr(function, "__qualname__", None)
    return str(name or function)


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            _HANDLERS[builtin(function)] = _HANDLERS[function] = handler
        return handler

    return register


def version_of(tensor: Tensor) -> int:
    """Counts writes into a tensor; inference tensors don't, and are taken for constant."""
    return -1 if tensor.is_inference() else tensor._version


def plain(value: Any) -> Any:
    """The tensor without its meaning: ids of this worker's own numbering."""
    return value.as_subclass(Tensor) if isinstance(value, _InSpace) else value


class _InSpace(Tensor):
    """What :class:`DistIndex` and :class:`DistEdgeIndex` share. Not a public class."""

    plan: HaloPlan
    _memory: OrderedDict[Any, Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise _refusal(func)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({plain(self)!r}, plan={self.plan!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DistributedIndexError(
            "A distributed edge index belongs to this worker's running exchange and can't be "
            "pickled; save the partition folder and call pyg_sar.load_partition(root) instead"
        )

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value made earlier for ``key``, or a new one."""
        if key not in self._memory:
            with torch.inference_mode(False):  # Training may come after inference.
                self._memory[key] = make()
            while len(self._memory) > _MEMORY:
                self._memory.popitem(last=False)
        self._memory.move_to_end(key)
        return self._memory[key]


class DistIndex(_InSpace):
    """A row of source ids: own nodes below ``plan.num_local``, halo nodes from there on.

    ``flat`` is the one-dimensional index that a view or an expansion of it came from.
    """

    flat: Tensor


class DistEdgeIndex(_InSpace):
    r"""Edges ``[2, E]`` whose targets are this worker's nodes, in the index space.

    ``edge_index[0]`` is a :class:`DistIndex`, ``edge_index[1]`` a plain tensor of local ids
    (the other way round after ``edge_index.flip(0)``: ``dist_row`` is 1 then).

    Args of :func:`dist_edge_index`:
        edge_index: Integer tensor ``[2, E]``.
        plan: The halo plan.
    """

    dist_row: int


def dist_index(index: Tensor, plan: HaloPlan, flat: Tensor | None = None) -> DistIndex:
    """Wraps source ids ``[E]`` (int64, below ``plan.num_ids``)."""
    index = plain(index)
    out = index.as_subclass(DistIndex)
    if out is index:
        out = index.view_as(index).as_subclass(DistIndex)
    out.plan, out._memory = plan, OrderedDict()
    out.flat = index if flat is None else flat
    return out


def dist_edge_index(edge_index: Tensor, plan: HaloPlan, dist_row: int = 0) -> DistEdgeIndex:
    """Wraps edges ``[2, E]`` in the index space of ``plan``.

    Raises:
        ValueError: When the shape is not ``[2, E]``.
    """
    edge_index = plain(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' of shape [2, num_edges] (got {list(edge_index.shape)}) at "
            f"rank {plan.rank}"
        )
    out = edge_index.as_subclass(DistEdgeIndex)
    out.plan, out._memory, out.dist_row = plan, OrderedDict(), dist_row
    return out


def _refusal(func: Any) -> DistributedIndexError:
    return DistributedIndexError(
        f"'{name_of(func)}' on a distributed edge index would compute with this worker's own "
        "numbering and give local numbers. Supported: reading node tensors with it (x[row], "
        "index_select), scattering into node tensors (scatter, degree, softmax), selecting, "
        "cutting and joining edges, comparing its two rows. Do other preprocessing on the whole "
        "graph before write_partitions(), or keep its result as an edge attribute"
    )


def _require_rows(x: Tensor, dim: int, plan: HaloPlan, what: str) -> None:
    if x.dim() == 0 or x.size(dim) != plan.num_local:
        raise DistributedIndexError(
            f"{what} a tensor of shape {list(x.shape)} with a distributed index at rank "
            f"{plan.rank}: axis {dim} must hold the worker's {plan.num_local} nodes"
        )


# Selecting and joining edges #################################################


@_handles(*_SAME_CLASS)
def _same(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        out = func(plain(source), *args[1:], **kwargs)
    if out.is_floating_point():
        raise _refusal(func)
    unchanged = func not in (Tensor.clone, torch.clone) and out.data_ptr() == source.data_ptr()
    if unchanged and out.dtype == source.dtype:
        return source
    plan = source.plan.to(out.device)
    if isinstance(source, DistEdgeIndex):
        return dist_edge_index(out, plan, source.dist_row)
    return dist_index(out, plan)


def _row(edge_index: DistEdgeIndex, number: int) -> Tensor:
    def make() -> Tensor:
        row = plain(edge_index)[number]
        return dist_index(row, edge_index.plan) if number == edge_index.dist_row else row

    return edge_index.remember(("row", number), make)


@_handles(Tensor.unbind, torch.unbind, Tensor.__iter__)
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if isinstance(source, DistEdgeIndex) and (len(args) < 2 or args[1] == 0):
        rows = (_row(source, 0), _row(source, 1))
        return iter(rows) if func is Tensor.__iter__ else rows
    raise _refusal(func)


@_handles(Tensor.select, torch.select)
def _select(func: Any, args: Any, kwargs: Any) -> Any:
    source, dim, number = args
    if isinstance(source, DistEdgeIndex) and dim == 0:
        return _row(source, number % 2)
    raise _refusal(func)


def _selected_edges(source: DistEdgeIndex, columns: Any) -> DistEdgeIndex:
    """``edge_index[:, columns]``. See [Note: once per structure]."""

    def make() -> Any:
        return columns, dist_edge_index(plain(source)[:, columns], source.plan, source.dist_row)

    if not isinstance(columns, Tensor):
        key = ("columns", str(columns)) if isinstance(columns, slice) else None
        return make()[1] if key is None else source.remember(key, make)[1]
    # The entry keeps `columns` alive, so that its id stays its own.
    return source.remember(("columns", id(columns), version_of(columns)), make)[1]


@_handles(Tensor.__getitem__)
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    source, key = args
    if isinstance(source, DistEdgeIndex):
        if isinstance(key, int):
            return _row(source, key % 2)
        if isinstance(key, tuple) and len(key) == 2:
            rows, columns = key
            if isinstance(rows, int) and isinstance(columns, slice | Tensor):
                return _selected_edges(source, columns)[rows]
            if isinstance(rows, slice) and rows == slice(None):
                return _selected_edges(source, columns)
        if isinstance(key, list | Tensor) and list(map(int, key)) == [1, 0]:
            return _flip(Tensor.flip, (source, 0), {})
        raise _refusal(func)
    if isinstance(source, DistIndex):
        if not isinstance(key, _InSpace) and source.dim() == 1 and not isinstance(key, int):
            return dist_index(plain(source)[key], source.plan)
        raise _refusal(func)
    if isinstance(key, DistIndex):
        return _gather(source, 0, key)
    if isinstance(key, tuple):
        places = [k for k, part in enumerate(key) if isinstance(part, DistIndex)]
        before = key[: places[0]] if len(places) == 1 else (0,)
        after = key[places[0] + 1 :] if places else ()
        if all(isinstance(p, slice) and p == slice(None) for p in (*before, *after)):
            return _gather(source, places[0], key[places[0]])
    raise _refusal(func)


@_handles(Tensor.flip, torch.flip)
def _flip(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dims")
    if not isinstance(source, DistEdgeIndex) or dims not in (0, [0], (0,)):
        raise _refusal(func)
    return source.remember(
        "flip", lambda: dist_edge_index(plain(source).flip(0), source.plan, 1 - source.dist_row)
    )


@_handles(torch.stack)
def _stack(func: Any, args: Any, kwargs: Any) -> Any:
    rows = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    places = [k for k, row in enumerate(rows) if isinstance(row, DistIndex)]
    if dim != 0 or len(rows) != 2 or len(places) != 1:
        raise _refusal(func)
    place = places[0]
    base, other = rows[place], rows[1 - place]

    def make() -> Any:
        joined = torch.stack([plain(row) for row in rows], 0)
        return other, dist_edge_index(joined, base.plan, place)

    return base.remember(("stack", place, id(other), version_of(other)), make)[1]


@_handles(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    base: Any = next(part for part in parts if isinstance(part, _InSpace))
    edges = isinstance(base, DistEdgeIndex)
    if dim not in ((1, -1) if edges else (0, -1)):
        raise _refusal(func)
    for part in parts:
        _check_joined(part, base)
    others = [plain(part) for part in parts if part is not base]
    where = tuple(id(part) if isinstance(part, _InSpace) else tuple(part.shape) for part in parts)

    def make() -> Any:
        joined = torch.cat([plain(part) for part in parts], dim)
        kept = [other.clone() for other in others]
        if edges:
            return parts, kept, dist_edge_index(joined, base.plan, base.dist_row)
        return parts, kept, dist_index(joined, base.plan)

    key = ("cat", where)
    found = base.remember(key, make)
    if not all(torch.equal(a, b) for a, b in zip(found[1], others, strict=True)):
        del base._memory[key]
        found = base.remember(key, make)
    return found[2]


def _check_joined(part: Tensor, base: Any) -> None:
    """Plain edges joined to distributed ones must hold local ids."""
    plan = base.plan
    if isinstance(part, _InSpace):
        same_row = getattr(part, "dist_row", 0) == getattr(base, "dist_row", 0)
        if part.plan is not plan or not same_row:
            raise DistributedIndexError(
                f"Can't join edges of different index spaces at rank {plan.rank}"
            )
    elif part.numel() and not 0 <= int(part.min()) <= int(part.max()) < plan.num_local:
        wrong = int(part.min()) if int(part.min()) < 0 else int(part.max())
        raise DistributedIndexError(
            f"Can't join plain edges with the id {wrong} to a distributed edge index "
            f"at rank {plan.rank}: they must be local ids below {plan.num_local}. Add other edges "
            "before write_partitions()"
        )


# Comparing, measuring ########################################################


@_handles(*_SAME_SHAPE_COMPARE)
def _compare(func: Any, args: Any, kwargs: Any) -> Any:
    left, right = args
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.shape != right.shape:
        raise _refusal(func)
    base: Any
    base, other = (left, right) if isinstance(left, _InSpace) else (right, left)

    def make() -> Any:
        return other, func(plain(left), plain(right))

    key = ("compare", func.__name__, id(other), version_of(other))
    found = base.remember(key, make)
    if found[1]._version != 0:  # Somebody wrote into the mask: make a new one.
        del base._memory[key]
        found = base.remember(key, make)
    return found[1]


@_handles(Tensor.max, torch.max, Tensor.amax, torch.amax)
def _max(func: Any, args: Any, kwargs: Any) -> Any:
    """The largest node id: PyG infers the number of nodes by it."""
    if len(args) > 1 or kwargs:
        raise _refusal(func)
    return torch.tensor(args[0].plan.num_local - 1, device=args[0].device)


@_handles(Tensor.min, torch.min)
def _min(func: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 or kwargs:
        raise _refusal(func)
    return plain(args[0]).min()


@_handles(*_LIKE)
def _like(func: Any, args: Any, kwargs: Any) -> Any:
    return func(plain(args[0]), *args[1:], **kwargs)


@_handles(Tensor.view_as)
def _view_as(func: Any, args: Any, kwargs: Any) -> Any:
    source, other = args
    if not isinstance(source, _InSpace) or source.shape != other.shape:
        raise _refusal(func)
    return source  # The same object: what is remembered on it stays.


@_handles(*_RESHAPE)
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if not isinstance(source, DistIndex):
        raise _refusal(func)
    out = func(plain(source), *[plain(a) for a in args[1:]], **kwargs)
    return dist_index(out, source.plan, flat=source.flat)


# Halo gather and reduction ###################################################


def _gather(x: Tensor, dim: int, index: DistIndex) -> Tensor:
    plan = index.plan
    dim = dim % x.dim() if x.dim() else 0
    _require_rows(x, dim, plan, "Reading")
    key = (id(x), dim, version_of(x), torch.is_grad_enabled())
    if key not in plan.gathered:
        moved = x.movedim(dim, 0).contiguous() if dim else x
        plan.gathered[key] = (x, halo_gather(moved, plan, plan.scope))
    ext = plan.gathered[key][1]
    if not plan.scope:
        plan.gathered.clear()
    out = ext.index_select(0, index.flat)
    return out.movedim(0, dim) if dim else out


@_handles(Tensor.index_select, torch.index_select)
def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    index = args[2] if len(args) > 2 else kwargs["index"]
    if isinstance(x, DistEdgeIndex) and dim in (1, -1):
        return _selected_edges(x, index)
    if isinstance(x, DistIndex) and not isinstance(index, _InSpace):
        return dist_index(plain(x).index_select(0, index), x.plan)
    if isinstance(x, _InSpace) or not isinstance(index, DistIndex):
        raise _refusal(func)
    return _gather(x, dim, index)


def _scatter(
    out: Tensor, dim: int, index: DistIndex, values: Tensor, reduce: Literal["sum", "amax", "amin"]
) -> Tensor:
    """Scatters ``values`` into a copy of ``out``, remote targets included."""
    plan = index.plan
    dim = dim % out.dim()
    _require_rows(out, dim, plan, "Scattering into")
    out0, values0 = out.movedim(dim, 0), values.movedim(dim, 0)
    rows = index.flat.view(-1, *[1] * (values0.dim() - 1)).expand_as(values0)
    shape = (plan.num_ids, *out0.shape[1:])
    if reduce == "sum":
        ext = values0.new_zeros(shape).scatter_add(0, rows, values0)
        result = out0 + halo_reduce(ext, plan, "sum", plan.scope)
    else:
        if values.requires_grad:
            raise DistributedIndexError(
                f"Scattering with reduce='{reduce}' over a distributed index has no gradient at "
                f"rank {plan.rank}; reduce at the target, edge_index[1], or detach the values"
            )
        worst = float("-inf") if reduce == "amax" else float("inf")
        ext = values0.new_full(shape, worst).scatter_reduce(0, rows, values0, reduce=reduce)
        merged = halo_reduce(ext, plan, reduce, plan.scope)
        result = torch.where(merged == worst, out0, merged)
    return result.movedim(0, dim)


@_handles(Tensor.scatter_add_, Tensor.scatter_add, torch.scatter_add, Tensor.index_add_)
def _scatter_add(func: Any, args: Any, kwargs: Any) -> Any:
    out, dim, index, values = args[:4]
    if isinstance(out, _InSpace) or not isinstance(index, DistIndex):
        raise _refusal(func)
    result = _scatter(out, dim, index, values, "sum")
    return out.copy_(result) if func in (Tensor.scatter_add_, Tensor.index_add_) else result


@_handles(Tensor.scatter_reduce_, Tensor.scatter_reduce, torch.scatter_reduce)
def _scatter_reduce(func: Any, args: Any, kwargs: Any) -> Any:
    out, dim, index, values = args[:4]
    reduce = args[4] if len(args) > 4 else kwargs["reduce"]
    kept = kwargs.get("include_self", True)
    if isinstance(out, _InSpace) or reduce not in ("sum", "amax", "amin") or kept:
        raise _refusal(func)
    result = _scatter(torch.zeros_like(out), dim, index, values, reduce)
    return out.copy_(result) if func is Tensor.scatter_reduce_ else result


@_handles(Tensor.__setitem__)
def _setitem(func: Any, args: Any, kwargs: Any) -> Any:
    out, key, value = args
    if isinstance(out, _InSpace) or not isinstance(key, DistIndex):
        raise _refusal(func)
    rows = key.flat
    if rows.numel() and int(rows.max()) >= key.plan.num_local:
        raise DistributedIndexError(
            f"Writing to rows of other workers with a distributed index at rank {key.plan.rank}"
        )
    out[rows] = value
