"""Edges of the whole graph: ``edge_index``, a node tensor that stands for distributed edges, and
sparse matrices between nodes, of which each worker holds its entries (``NodeMatrix``).

[Note: matrices of a graph] ``adj_t``, which ``ToSparseTensor`` makes, is one, and so is what
``torch.sparse_coo_tensor`` makes of edges. A product with a dense matrix runs on each worker's rows
of the result: entries go to the workers of their rows once, and each product gets the rows that
these name, each once. What has no rule here gets the whole matrix, as a plain one of torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.kernels.ops import edge_dot, gather_sum_, transpose
from pyg_sar.space.distributed_index import DistEdgeIndex, version_of
from pyg_sar.tensors.node_tensor import (
    FromLocal,
    NodeTensor,
    by_gathering,
    mapped,
    method,
    rule,
    whole,
)
from pyg_sar.tensors.operands import arguments, own, wrap
from pyg_sar.tensors.pointwise import known_rows
from pyg_sar.tensors.rows import Rows, note_plain, written
from pyg_sar.tensors.sparse import ProductPlan, plan_product, sparse_mm

_SUMMED = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Edges:
    """Distributed edges and the layouts of the nodes that they join.

    Attributes:
        index: The distributed edges, in this worker's numbering.
        sources: The layout of the source nodes.
        targets: That of the target nodes.
        following: Of a message flow graph: the edges of the next layer, the first ones of these.
    """

    index: DistEdgeIndex
    sources: Rows
    targets: Rows
    following: NodeTensor | None = None

    def changed(self, change: Callable[[DistEdgeIndex], Tensor]) -> Edges | None:
        """Returns what becomes of the edges by an operation on the distributed index."""
        with torch._C._EnableTorchFunction():  # Below autograd it is off.
            index = change(self.index)
        if not isinstance(index, DistEdgeIndex):
            return None
        turned = index.dist_row != self.index.dist_row
        ends = (self.targets, self.sources) if turned else (self.sources, self.targets)
        return Edges(index, *ends)

    def global_ids(self) -> Tensor:
        """Returns both ends of this worker's edges by global ids, int64 ``[2, E]``. Collective."""
        far, near = self.index.ends()
        ends = (self.sources, self.targets)
        if self.index.dist_row == 1:
            ends = ends[::-1]
        known = halo_gather(ends[0].ids, self.index.plan)
        pair = (known[far.long()], ends[1].ids[near.long()])
        return torch.stack(pair if self.index.dist_row == 0 else pair[::-1])


def edge_tensor(edges: Edges, rows: Rows) -> NodeTensor:
    """Returns ``edge_index`` ``[2, E]`` of the whole graph, int64.

    Its ids are found when something asks for them: layers take the distributed edges.
    """
    rows.ends = edges.targets, edges.sources
    out = NodeTensor(edges.index.as_subclass(Tensor).detach(), rows, 1)
    out.edges, out.make = edges, edges.global_ids
    return out


# Matrices #####################################################################


class NodeMatrix(Tensor):
    """A sparse matrix between nodes. See [Note: matrices of a graph].

    Attributes:
        places: Rows and columns of its entries, ``[2, E]``.
        entries: Their values ``[E]``.
        ones: Whether these are all 1.
        ends: The layouts of the nodes along rows and columns.
        form: The layout of the matrix that it stands for.
        made: Whether a model's code made it. Layers take such a matrix whole.
        coalesced: Whether entries of the same place count as one.
        kept: What is known of its places: plans of products, the transposed ones.
        given: Tensors that it was made of, and how often each had been written.
    """

    places: NodeTensor
    entries: NodeTensor
    ones: bool
    ends: tuple[Rows, Rows]
    form: torch.layout
    made: bool
    coalesced: bool
    kept: dict[Any, Any]
    given: tuple[tuple[Tensor, int], ...]

    goes_first = True  # before node tensors, where an operator gets both

    @staticmethod
    def __new__(
        cls,
        places: NodeTensor,
        entries: NodeTensor,
        ones: bool,
        ends: tuple[Rows, Rows],
        form: torch.layout,
        made: bool = False,
        coalesced: bool = True,
        kept: dict[Any, Any] | None = None,
        given: tuple[tuple[Tensor, int], ...] = (),
    ) -> NodeMatrix:
        shape = (ends[0].total, ends[1].total)
        out: NodeMatrix = Tensor._make_wrapper_subclass(
            cls, shape, dtype=entries.dtype, device=entries.device, requires_grad=False
        )
        out.places, out.entries, out.ones, out.ends, out.form = places, entries, ones, ends, form
        out.made, out.coalesced, out.kept = made, coalesced, {} if kept is None else kept
        out.given = given
        return out

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def changed(self, **parts: Any) -> NodeMatrix:
        """Returns a matrix that differs in these attributes."""
        names = "places", "entries", "ones", "ends", "form", "made", "coalesced"
        given = {name: getattr(self, name) for name in names}
        if "places" not in parts:
            given["kept"] = self.kept
        if "entries" not in parts:
            given["given"] = self.given
        return NodeMatrix(**{**given, **parts})

    def check(self) -> None:
        """Raises ``DistributedIndexError`` where a write is not seen here, as it is in torch."""
        if any(written(tensor) != times for tensor, times in self.given):
            raise DistributedIndexError(
                "A sparse matrix of the graph was made of edges or values that were written since: "
                "make it again (torch.sparse_coo_tensor)"
            )

    def whole(self) -> Tensor:
        """Returns all of it as a plain sparse tensor, differentiable. Collective."""
        self.check()
        learns = self.entries.requires_grad and torch.is_grad_enabled()
        key = self.form, self.coalesced, id(self.entries), written(self.entries)
        kept, found, _ = self.kept.get("whole", (None, None, None))
        if not learns and kept == key:
            return cast(Tensor, found)
        entries = self.entries.full_tensor() if learns else whole(self.entries, "a sparse matrix")
        index = whole(self.places, "a sparse matrix")
        out = torch.sparse_coo_tensor(index, entries, tuple(self.shape))
        out = out.coalesce() if self.coalesced or self.form != torch.sparse_coo else out
        if self.form != torch.sparse_coo:
            out = out.to_sparse_csr() if self.form == torch.sparse_csr else out.to_sparse_csc()
        if not learns:
            self.kept["whole"] = key, out, self.entries
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for matrix in args:
            if isinstance(matrix, NodeMatrix):
                matrix.check()
        found = _FUNCTIONS.get(func)
        out = NotImplemented if found is None else found(*args, **kwargs)
        if out is not NotImplemented:
            return out
        name = getattr(func, "__name__", str(func))
        plain = name.strip("_")
        if name == "__set__" or "out" in kwargs or name == f"{plain}_" or plain in _WRITE:
            raise DistributedIndexError(
                f"'{name}' would write into a sparse matrix of the graph, which has no rule that "
                "would do so on all workers: make another matrix of it"
            )
        take = lambda t: t.whole() if isinstance(t, NodeMatrix) else t  # noqa: E731
        return func(*mapped(take, args), **mapped(take, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].changed()
        raise DistributedIndexError(f"'{func}' of a sparse matrix of the graph is not supported")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeMatrix:
        return self


_WRITE = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow")


def adjacency(edge_index: NodeTensor, weight: NodeTensor | None, form: torch.layout) -> NodeMatrix:
    """Returns ``adj_t``: a row for each target, a column for each source.

    Args:
        edge_index: Distributed edges.
        weight: Their weights; ``None``: all 1.
        form: The layout of the matrix that it stands for.
    """
    rows, edges = edge_index.rows, edge_index.edges
    ones = weight is None
    if weight is None:
        weight = wrap(torch.ones(rows.count, device=edge_index.device), rows, 0)
    ends = edges.targets, edges.sources
    return NodeMatrix(edge_index.flip(0), weight, ones, ends, form)


@rule("_sparse_coo_tensor_with_dims_and_tensors")
def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.sparse_coo_tensor``: of edges between nodes a matrix of the graph."""
    given = arguments(func, args, kwargs)
    places, entries, shape = given["indices"], given["values"], list(given["size"])
    edges = isinstance(places, NodeTensor) and places.axis == 1 and places.dim() == 2
    single = entries.dim() == 1 and entries.dtype in _SUMMED and not entries.requires_grad
    if not edges or not single or len(shape) != 2 or given["is_coalesced"]:
        return by_gathering(func, args, kwargs)
    ends = [known_rows(places, total) for total in shape]
    if None in ends:
        return by_gathering(func, args, kwargs)
    made_of = (places, written(places)), (entries, written(entries))
    entries = wrap(own(entries, places.rows, 0), places.rows, 0)
    both = cast(tuple[Rows, Rows], tuple(ends))
    return NodeMatrix(places, entries, False, both, torch.sparse_coo, True, False, given=made_of)


def _of_plain(matrix: Tensor, rows: Rows) -> NodeMatrix:
    """Returns the rows here of a square sparse matrix that all workers hold. Collective at first.

    It is kept for as long as the matrix lives and is not written.
    """
    coo = matrix.layout == torch.sparse_coo
    values = matrix._values() if coo else matrix.values()
    known = rows.keep("matrices", None, WeakTensorKeyDictionary)
    kept = known.get(matrix)
    if kept is not None and kept[0] == version_of(matrix) and torch.equal(values, kept[1]):
        return cast(NodeMatrix, kept[2])  # Nobody counts writes into x.data.
    with torch.inference_mode(False), torch.no_grad():
        index = (matrix if coo else matrix.to_sparse_coo())._indices()
        note_plain(index, rows.comm)
        note_plain(values, rows.comm)
        ids = (rows.local(index[0]) >= 0).nonzero().view(-1)
        here = Rows(rows.comm, index.size(1), ids.numel(), ids)
        places, entries = wrap(index[:, ids], here, 1), wrap(values[ids], here, 0)
        found = NodeMatrix(places, entries, False, (rows, rows), matrix.layout, True)
    known[matrix] = version_of(matrix), values.clone(), found
    return found


@method(
    *(torch.mm, torch.spmm, torch.sparse.mm, torch.matmul),
    *(Tensor.mm, Tensor.matmul, Tensor.__matmul__),
)
def _times_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """A square sparse matrix that all workers hold, times rows: each worker computes its own."""
    matrix, x = args if len(args) == 2 and not kwargs else (None, None)
    if x is not None and type(matrix) is Tensor and matrix.layout in _FORMS and x.axis == 0:
        total = x.rows.total
        fits = matrix.shape == (total, total) and matrix.dtype == x.dtype and x.dtype in _SUMMED
        if fits and x.dim() < 3 and not matrix.requires_grad:
            return _product(_of_plain(matrix, x.rows), x)
    if func is torch.sparse.mm:
        return sparse_mm(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


_FORMS = (torch.sparse_coo, torch.sparse_csr)


# Functions ####################################################################


def _turned(matrix: NodeMatrix, *axes: int) -> Any:
    if axes and sorted(axis % 2 for axis in axes) != [0, 1]:
        return NotImplemented
    if "turned" not in matrix.kept:
        matrix.kept["turned"] = matrix.places.flip(0), {}
    places, kept = matrix.kept["turned"]
    forms = {torch.sparse_csr: torch.sparse_csc, torch.sparse_csc: torch.sparse_csr}
    form = forms.get(matrix.form, matrix.form)
    return matrix.changed(places=places, ends=matrix.ends[::-1], form=form, kept=kept)


def _same(matrix: NodeMatrix) -> NodeMatrix:
    return matrix


def _copied(matrix: NodeMatrix, **kwargs: Any) -> NodeMatrix:
    return matrix.changed(entries=matrix.entries.clone())


def _detached(matrix: NodeMatrix) -> NodeMatrix:
    return matrix.changed(entries=matrix.entries.detach())


def _coalesced(matrix: NodeMatrix) -> NodeMatrix:
    return matrix.changed(coalesced=True)


def _by_rows(matrix: NodeMatrix) -> NodeMatrix:
    return matrix.changed(coalesced=True, form=torch.sparse_csr)


def _by_entries(matrix: NodeMatrix) -> NodeMatrix:
    return matrix.changed(form=torch.sparse_coo)


def _number(matrix: NodeMatrix) -> int:
    again = matrix.made and matrix.coalesced
    return matrix.whole()._nnz() if again else matrix.entries.size(0)


def _to(matrix: NodeMatrix, *args: Any, **kwargs: Any) -> NodeMatrix:
    return matrix.changed(entries=matrix.entries.to(*args, **kwargs))


def _scaled(one: Any, other: Any) -> Any:
    matrix, factor = (one, other) if isinstance(one, NodeMatrix) else (other, one)
    number = isinstance(factor, int | float) or (
        isinstance(factor, Tensor) and factor.dim() == 0 and not isinstance(factor, NodeMatrix)
    )
    if not number:
        return NotImplemented
    return matrix.changed(entries=matrix.entries * factor, ones=False)


def _divided(matrix: Any, divisor: Any) -> Any:
    if not isinstance(divisor, int | float):
        return NotImplemented
    return matrix.changed(entries=matrix.entries / divisor, ones=False)


def _added(one: Any, other: Any) -> Any:
    matrix, more = (one, other) if isinstance(one, NodeMatrix) else (other, one)
    if not isinstance(more, Tensor) or more.shape != matrix.shape or more.layout == torch.strided:
        return NotImplemented
    if isinstance(more, NodeMatrix):
        index, entries = more.places, more.entries
    else:
        plain = more.to_sparse_coo().coalesce()
        index, entries = plain.indices(), plain.values()
    return matrix.changed(
        places=torch.cat([matrix.places, index], 1),
        entries=torch.cat([matrix.entries, entries]),
        ones=False,
    )


# Products #####################################################################


@dataclass(frozen=True, slots=True)
class _Sums:
    """Which rows of a table are summed up: for the entries grouped by rows, or by columns.

    Attributes:
        source: The row that each entry reads ``[E]``.
        offsets: The first entry of each sum, and at last E.
        numbers: Each entry's number ``[E]``; ``None``: in order.
        kept: The same by the rows that are read, once it was asked for.
        size: Rows that are read.
    """

    source: Tensor
    offsets: Tensor
    numbers: Tensor | None
    kept: list[_Sums]
    size: int

    def turned(self) -> _Sums:
        if not self.kept:
            targets = self.offsets.numel() - 1
            source, first, numbers = transpose(
                self.source, self.offsets, None, self.size, targets, numbered=True
            )
            self.kept.append(_Sums(source, first, numbers, [self], targets))
        return self.kept[0]


class _Times(torch.autograd.Function):
    r""":math:`y_i = \sum_{e: row_e = i} value_e \, table_{col_e}`, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, table: Tensor, sums: _Sums) -> Tensor:
        ctx.sums = sums
        ctx.save_for_backward(values, table if ctx.needs_input_grad[0] else None)
        out = table.new_zeros(sums.offsets.numel() - 1, table.size(1))
        rows = table.contiguous()
        return gather_sum_(out, rows, sums.source, sums.offsets, None, values, sums.numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        values, table = ctx.saved_tensors
        of_values = of_table = None
        if ctx.needs_input_grad[0]:
            of_values = _Dots.apply(table, gradient, ctx.sums)
        if ctx.needs_input_grad[1]:
            of_table = _Times.apply(values, gradient, ctx.sums.turned())
        return of_values, of_table, None


class _Dots(torch.autograd.Function):
    r""":math:`y_e = \langle table_{col_e}, g_{row_e} \rangle`, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, gradient: Tensor, sums: _Sums) -> Tensor:
        ctx.sums = sums
        ctx.save_for_backward(table, gradient)
        given = table.contiguous(), gradient.contiguous()
        return edge_dot(*given, sums.source, sums.offsets, None, sums.numbers)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        table, gradient = ctx.saved_tensors
        of_table = _Times.apply(above, gradient, ctx.sums.turned())
        return of_table, _Times.apply(above, table, ctx.sums), None


def _plan(matrix: NodeMatrix) -> tuple[ProductPlan, _Sums]:
    """Returns the plan of products with a matrix of these places. Collective at first."""
    found = matrix.kept.get("product")
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            row, col = matrix.places.unbind(0)
            plan = plan_product(row, col, matrix.ends[0], False)
            counts = torch.bincount(plan.row, minlength=plan.targets.count)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            sums = _Sums(plan.col, offsets, None, [], plan.sources.numel())
        found = matrix.kept["product"] = plan, sums
    return cast(tuple[ProductPlan, _Sums], found)


def _entries(matrix: NodeMatrix, plan: ProductPlan) -> Tensor:
    """Returns the entries of this worker's rows, in the order of a plan."""
    entries = matrix.entries
    if entries.requires_grad and torch.is_grad_enabled():
        return plan.taken(entries, plan.entries.ids, 0)
    key = id(entries), written(entries)
    kept, found, _ = matrix.kept.get("entries", (None, None, None))
    if kept != key:
        with torch.inference_mode(False), torch.no_grad():
            found = plan.taken(entries, plan.entries.ids, 0)
        matrix.kept["entries"] = key, found, entries
    return cast(Tensor, found)


def _product(matrix: Any, x: Any, reduce: str | None = None) -> Any:
    """Returns the sum, for each row of the matrix, of rows of a dense ``x``."""
    if not isinstance(matrix, NodeMatrix) or isinstance(x, NodeMatrix) or x.dim() not in (1, 2):
        return NotImplemented
    if x.layout != torch.strided or reduce not in (None, "sum") or x.dtype not in _SUMMED:
        return NotImplemented
    if isinstance(x, NodeTensor) and x.axis:
        return NotImplemented
    if x.size(0) != matrix.size(1) or x.dtype != matrix.dtype:
        raise RuntimeError(
            f"shapes {list(matrix.shape)} and {list(x.shape)} cannot be multiplied, of types "
            f"{matrix.dtype} and {x.dtype}"
        )
    plan, sums = _plan(matrix)
    table = plan.taken(x, plan.sources, 0)
    table = table.unsqueeze(1) if x.dim() == 1 else table
    out = _Times.apply(_entries(matrix, plan), table, sums)
    return FromLocal.apply(out.squeeze(1) if x.dim() == 1 else out, plan.targets, 0)


_METADATA = frozenset({
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.is_floating_point, Tensor.__hash__,
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__,  # type: ignore
    Tensor.ndim.__get__, Tensor.is_cuda.__get__, Tensor.is_nested.__get__,  # type: ignore
    Tensor.is_leaf.__get__, Tensor.grad.__get__,  # type: ignore
    Tensor.get_device, torch.is_floating_point, torch.is_tensor, Tensor.__len__,
})  # fmt: skip

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.layout.__get__: lambda matrix: matrix.form,  # type: ignore
    Tensor.is_sparse.__get__: lambda matrix: matrix.form == torch.sparse_coo,  # type: ignore
    Tensor.is_sparse_csr.__get__: lambda m: m.form == torch.sparse_csr,  # type: ignore
    Tensor.requires_grad.__get__: lambda m: m.entries.requires_grad,  # type: ignore
    Tensor.is_coalesced: lambda matrix: matrix.coalesced,
    Tensor._nnz: _number,
    Tensor.coalesce: _coalesced,
    Tensor.to_sparse_csr: _by_rows,
    Tensor.to_sparse_coo: _by_entries,
    Tensor.T.__get__: _turned,  # type: ignore
    **dict.fromkeys((Tensor.t, torch.t, Tensor.transpose, torch.transpose), _turned),
    **dict.fromkeys((Tensor.contiguous, Tensor.cpu), _same),
    **dict.fromkeys((Tensor.clone, torch.clone), _copied),
    **dict.fromkeys((Tensor.detach, torch.detach), _detached),
    **dict.fromkeys((Tensor.to, Tensor.cuda), _to),
    Tensor.float: lambda matrix: _to(matrix, torch.float32),
    Tensor.double: lambda matrix: _to(matrix, torch.float64),
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__), _scaled),
    **dict.fromkeys((Tensor.div, torch.div, Tensor.__truediv__), _divided),
    **dict.fromkeys((Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__), _added),
    **dict.fromkeys((Tensor.matmul, torch.matmul, Tensor.__matmul__, operator.matmul), _product),
    **dict.fromkeys((Tensor.mm, torch.mm, torch.sparse.mm, torch.spmm), _product),
    **dict.fromkeys((Tensor.mv, torch.mv), _product),
}  # fmt: skip
