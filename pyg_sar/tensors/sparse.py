"""Rules of torch-scatter's and torch-sparse's operators on tensors of the whole graph.

[Note: rows of a product] A product of a ``SparseTensor`` and a dense matrix runs on each worker's
rows of the result. The matrix' entries go to the workers of their rows once, three numbers each;
then each product fetches the rows that a worker's entries name, each once, and calls torch-sparse's
own kernel. So ties of maxima fall as in one process, and nobody holds all rows. Reductions by
torch-scatter, and all that prepares a matrix, take all of its entries on every worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors.boundary import Shared, to_local
from pyg_sar.tensors.node_tensor import (
    FromLocal,
    Full,
    NodeTensor,
    mapped,
    name_of,
    node_tensors,
    rule,
    whole,
)
from pyg_sar.tensors.operands import own, summed, wrap
from pyg_sar.tensors.rows import Fetch, Rows, all_to_all, written

_PLACE_OF_OUT = {"gather_coo": 2, "gather_csr": 2} | {
    f"{kind}_{op}{form}": 2 if form else 3
    for kind, forms in (("scatter", ("",)), ("segment", ("_coo", "_csr")))
    for form in forms
    for op in ("sum", "mean", "mul", "min", "max")
}
"""Operators of torch-scatter that write into an argument, if given, and which."""


class _WholeGradient(torch.autograd.Function):
    """A copy. Its gradient is a plain tensor, as backward passes of other packages need it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, what: str) -> Tensor:
        ctx.what = what
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if isinstance(gradient, NodeTensor):
            gradient = cast(Tensor, Full.apply(gradient, ctx.what))
        return gradient, None


@rule(
    *(f"torch_scatter::{name}" for name in _PLACE_OF_OUT),
    *("torch_sparse::ptr2ind", "torch_sparse::non_diag_mask", "torch_sparse::random_walk"),
    *("torch_sparse::saint_subgraph", "torch_sparse::sample_adj", "torch_sparse::partition"),
)
def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """Gathers all rows and calls the operator on them: the same result on all workers."""
    what = f"'{name_of(func)}'"
    place = _PLACE_OF_OUT.get(what[1:-1].rpartition(".")[2], len(args))
    take = lambda t: Full.apply(t, what) if isinstance(t, NodeTensor) else t  # noqa: E731
    into = args[place] if place < len(args) else None
    given = [t if into is None or t is not into else whole(t.detach(), what).clone() for t in args]
    found = func(*mapped(take, given), **mapped(take, kwargs))
    found = mapped(lambda t: _WholeGradient.apply(t, what) if t.requires_grad else t, found)
    if into is None:
        return found
    into.copy_(found if isinstance(found, Tensor) else found[0])
    return into if isinstance(found, Tensor) else (into, *found[1:])


@rule("torch_sparse::ind2ptr")
def _pointers(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Returns where each of ``size`` rows begins among sorted row ids, int64 ``[size + 1]``."""
    rows, size = args
    counts = summed(torch.bincount(rows.local, minlength=size), rows.rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


# Products #####################################################################


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Facts that products of a matrix with rows of a layout share. See [Note: rows of a product].

    Attributes:
        targets: The layout of the result's rows.
        entries: The layout of the entries, each at the worker of its row.
        sources: This worker's columns, sorted; the product takes these rows.
        row: The row of each of this worker's entries, by its own numbers.
        col: The place among ``sources`` that each of them reads.
    """

    targets: Rows
    entries: Rows
    sources: Tensor
    row: Tensor
    col: Tensor
    fetches: dict[tuple[int, int], tuple[Rows, Fetch]]

    def fetch(self, rows: Rows, ids: Tensor) -> Fetch:
        """Returns the plan that gets rows of a layout. Collective where there is none yet."""
        key = id(rows), id(ids)
        if key not in self.fetches:
            with torch.inference_mode(False):
                found = Fetch(*rows.homes(ids), rows.count, rows.comm)
            self.fetches[key] = rows, found
        return self.fetches[key][1]

    def taken(self, x: Tensor, ids: Tensor, axis: int) -> Tensor:
        """Returns rows of ``x`` by their places in the whole, differentiable."""
        if not isinstance(x, NodeTensor):
            comm = self.targets.comm
            if x.requires_grad and torch.is_grad_enabled():
                (x,) = Shared.apply(comm, x)
            return x.index_select(axis, ids)
        local = to_local(x, x.rows, axis).movedim(axis, 0)
        return cast(Tensor, _Fetched.apply(local, self.fetch(x.rows, ids))).movedim(0, axis)


class _Fetched(torch.autograd.Function):
    """Rows of other workers. Its adjoint is :class:`_Returned`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, fetch: Fetch) -> Tensor:
        ctx.fetch = fetch
        return fetch.get(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Returned.apply(gradient, ctx.fetch)), None


class _Returned(torch.autograd.Function):
    """Rows that go back: those of the same row are added up where it lies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, fetch: Fetch) -> Tensor:
        ctx.fetch = fetch
        return fetch.put(rows, rows.new_zeros(fetch.num_local, *rows.shape[1:]), True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Fetched.apply(gradient, ctx.fetch)), None


@torch.inference_mode(False)
@torch.no_grad()
def plan_product(row: Tensor, col: Tensor, targets: Rows, is_sorted: bool) -> ProductPlan:
    """Plans products of a matrix. Collective.

    Args:
        row: The entries' rows ``[E]``, a node tensor or a plain one.
        col: Their columns.
        targets: The layout of the result's rows.
        is_sorted: Whether entries are in the matrix' own order; else they are put in it here.
    """
    given = next(iter(node_tensors(col, row)), None)
    if given is None:
        place = targets.local(row)
        ids = (place >= 0).nonzero().view(-1)
        place, col = place[ids], col[ids]
    else:
        rows = given.rows
        row, col = own(row, rows, 0), own(col, rows, 0)
        owner, place = targets.homes(row)
        facts = torch.stack([place, col, rows.ids], 1)[owner.argsort(stable=True)]
        counts = torch.bincount(owner, minlength=rows.comm.world_size).tolist()
        facts = torch.cat(all_to_all(list(facts.split(counts)), rows.comm))
        place, col, ids = facts[facts[:, 2].argsort()].unbind(1)
    order = place.argsort(stable=True)
    if not is_sorted:
        order = col.argsort(stable=True)
        order = order[place[order].argsort(stable=True)]
    sources, col = col[order].unique(return_inverse=True)
    total = row.numel() if given is None else given.rows.total
    entries = Rows(targets.comm, total, ids.numel(), ids[order])
    return ProductPlan(targets, entries, sources, place[order], col, {})


@torch.inference_mode(False)
def _matrix(plan: ProductPlan) -> Any:
    """Returns torch-sparse's matrix between a worker's rows and its sources."""
    # A matrix without rows or columns divides torch-sparse's kernels by zero.
    size = max(plan.targets.count, 1), max(plan.sources.numel(), 1)
    make = sys.modules["torch_sparse"].SparseTensor
    matrix = make(row=plan.row, col=plan.col, sparse_sizes=size, is_sorted=True, trust_data=True)
    matrix.storage.rowcount()  # With it rowptr; made later, they might be tensors of inference.
    return matrix


def product(
    reduce: str,
    size: int,
    row: Tensor,
    col: Tensor,
    value: Tensor | None,
    mat: Tensor,
    is_sorted: bool = True,
) -> tuple[Tensor, Tensor | None]:
    r"""Returns :math:`y_i = \bigoplus_{e: row_e = i} value_e \, mat_{col_e}`, differentiable.

    Args:
        reduce: ``'sum'``, ``'mean'``, ``'min'`` or ``'max'``.
        size: Rows of the result.
        row: The entries' rows, int64 ``[E]``.
        col: Their columns, int64 ``[E]``.
        value: Their values ``[E]``; ``None``: all 1.
        mat: The dense matrix ``[*, N, F]``.
        is_sorted: Whether entries are sorted by row.

    Returns:
        A node tensor ``[*, size, F]``; of ``'min'`` and ``'max'`` also which entry it was, as they
        were given.
    """
    axis = mat.dim() - 2
    at_rows = isinstance(mat, NodeTensor) and mat.axis == axis
    mat = mat if at_rows else whole(mat, "'torch_sparse.spmm'")
    first = node_tensors(mat, col, row, value)[0].rows
    targets = first if at_rows and first.total == size else first.share(size)
    key = id(targets), id(row), written(row), written(col), is_sorted
    kept = col.__dict__.get("_product")
    if kept is None or kept[0] != key:
        plan = plan_product(row, col, targets, is_sorted)
        kept = key, plan, _matrix(plan), (targets, row)
        col.__dict__["_product"] = kept
    _, plan, matrix, _ = kept
    table = plan.taken(mat, plan.sources, axis)
    if not plan.sources.numel():
        shape = list(table.shape)
        shape[axis] = 1
        table = torch.cat([table, table.new_zeros(shape)], axis)
    if value is not None:
        value = plan.taken(value, plan.entries.ids, 0).to(mat.dtype)
        matrix = matrix.set_value(value, layout="coo")
    found = getattr(sys.modules["torch_sparse.matmul"], f"spmm_{reduce}")(matrix, table)
    out, *which = found if isinstance(found, tuple) else (found,)
    out = FromLocal.apply(out.narrow(axis, 0, targets.count), targets, axis)
    if not which:
        return out, None
    ends = torch.cat([plan.entries.ids, plan.entries.ids.new_full((1,), plan.entries.total)])
    return out, wrap(ends[which[0].narrow(axis, 0, targets.count)], targets, axis)


@rule(*(f"torch_sparse::spmm_{reduce}" for reduce in ("sum", "mean", "min", "max")))
def _spmm(func: Any, args: Any, kwargs: Any) -> Any:
    reduce = name_of(func).rpartition("_")[2]
    if reduce in ("sum", "mean"):
        args = args[1:]
    rowptr, col, value = args[:3]
    mat = args[-1]
    key, rowptr = (id(rowptr), written(rowptr)), whole(rowptr, "'torch_sparse.spmm'")
    kept, row, _ = col.__dict__.get("_row_of", (None, None, None))
    if kept != key:
        places = col.rows.ids if isinstance(col, NodeTensor) else torch.arange(col.numel())
        row = torch.searchsorted(rowptr, places.to(rowptr.device), right=True) - 1
        row = wrap(row, col.rows, 0) if isinstance(col, NodeTensor) else row
        col.__dict__["_row_of"] = key, row, args[0]  # alive: ids are unique
    out, which = product(reduce, rowptr.numel() - 1, row, col, value, mat)
    return out if which is None else (out, which)


def sparse_mm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """PyG's product, by a matrix of torch, where a ``SparseTensor`` needs no gradient."""
    reduce = args[2] if len(args) > 2 else kwargs.get("reduce")
    matrix, x = args[:2]
    csr = not isinstance(matrix, NodeTensor) and matrix.layout == torch.sparse_csr
    if reduce is None or not csr or matrix.requires_grad or "torch_sparse" not in sys.modules:
        with torch._C.DisableTorchFunctionSubclass():
            return cast(Tensor, func(*args, **kwargs))
    rowptr, col = matrix.crow_indices().long(), matrix.col_indices().long()
    row = torch.searchsorted(rowptr, torch.arange(col.numel(), device=col.device), right=True) - 1
    name = {"amax": "max", "amin": "min"}.get(reduce, reduce)
    return product(name, matrix.size(0), row, col, matrix.values(), x)[0]


# Matrices #####################################################################

_REDUCTIONS = {"add": "sum"} | {name: name for name in ("sum", "mean", "min", "max")}
_IN_ORDER = ("_row", "_col", "_value", "_csr2csc", "_csc2csr")


def edges_matrix(edge_index: NodeTensor, weight: NodeTensor | None) -> Any:
    """Returns the ``SparseTensor`` of distributed edges: a row for each target.

    Args:
        edge_index: The edges, sorted by target and source. Layers are given these again.
        weight: Its values; ``None``: it has none.
    """
    edges = edge_index.edges
    size = edges.targets.total, edges.sources.total
    col, row = edge_index.unbind(0)
    make = sys.modules["torch_sparse"].SparseTensor
    out = make(row=row, col=col, value=weight, sparse_sizes=size, is_sorted=True, trust_data=True)
    row, col, _ = out.coo()
    col.__dict__["_edges_of"] = edge_index, row
    return out


def edges_of_matrix(matrix: Any) -> NodeTensor | None:
    """Returns the distributed edges that a ``SparseTensor`` was made of, if so."""
    row, col, _ = matrix.coo()
    edge_index, of_row = col.__dict__.get("_edges_of", (None, None))
    return edge_index if of_row is row else None


def is_shared_matrix(value: Any) -> bool:
    """Returns whether ``value`` is a ``SparseTensor`` of node tensors."""
    storage = getattr(value, "storage", None)
    return hasattr(value, "sparse_sizes") and bool(node_tensors(dict(vars(storage))))


def whole_matrix(matrix: Any) -> Any:
    """Returns a ``SparseTensor`` with all entries, as plain tensors. Collective."""
    row, col, value = (whole(part, "adj_t") for part in matrix.coo())
    given = {"sparse_sizes": matrix.sparse_sizes(), "is_sorted": True, "trust_data": True}
    return type(matrix)(row=row, col=col, value=value, **given)


def _as_given(storage: Any) -> Any:
    """Returns rows, columns and values that wait to be sorted; ``None`` where they don't wait."""
    parts, before = storage.__dict__.get("_given", (None, None))
    if parts and [written(part) for part in parts if part is not None] != before:
        raise DistributedIndexError(
            "A tensor that a SparseTensor was made of was written since, before the matrix has "
            "sorted its entries: make the matrix of copies, row.clone(), say"
        )
    return parts


def unsorted_matrices(put: Callable[..., None]) -> None:
    """Replaces what torch-sparse does when a matrix is made, so that models can make one each time.

    It sorts the entries, for which they would be gathered. Those of node tensors are sorted when
    something asks for their order; products don't.

    Args:
        put: Called with an owner, a name, and what makes the new attribute of the old one.
    """
    plain = sys.modules["torch_sparse.storage"].SparseStorage

    def make(real: Callable[..., None]) -> Callable[..., None]:
        def sort(storage: Any, name: str) -> Any:
            if name not in _IN_ORDER:
                raise AttributeError(name)
            storage.__class__ = plain
            row, col, value = _as_given(storage)
            del storage.__dict__["_given"]
            real(storage, row=row, col=col, value=value, sparse_sizes=storage._sparse_sizes)
            return storage.__dict__[name]

        unsorted = type(plain.__name__, (plain,), {"__getattr__": sort})

        def init(storage: Any, *args: Any, **kwargs: Any) -> None:
            names = ("row", "rowptr", "col", "value")
            given = dict(zip(names, args, strict=False)) | kwargs
            waits = len(args) <= len(names) and not given.get("is_sorted")
            waits = waits and isinstance(given.get("col"), NodeTensor) and len(given["col"]) > 0
            if not waits or given.get("row") is None:
                real(storage, *args, **kwargs)
                return
            real(storage, **{**given, "is_sorted": True})
            parts = [storage.__dict__.pop(name) for name in _IN_ORDER][:3]
            before = [written(part) for part in parts if part is not None]
            storage.__class__, storage.__dict__["_given"] = unsorted, (parts, before)

        return init

    def multiply(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spmm(src: Any, other: Tensor, reduce: str = "sum") -> Tensor:
            given = _as_given(src.storage)
            row, col, value = given or (None, src.storage._col, src.storage._value)
            if reduce not in _REDUCTIONS or not node_tensors(col, value, other):
                return real(src, other, reduce)
            row = src.storage.row() if row is None else row
            size = src.sparse_size(0)
            return product(_REDUCTIONS[reduce], size, row, col, value, other, given is None)[0]

        return spmm

    put(plain, "__init__", make)
    put(sys.modules["torch_sparse.matmul"], "spmm", multiply)
