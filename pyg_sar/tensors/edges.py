"""Edges of the whole graph: ``edge_index``, a node tensor that stands for distributed edges, and
``adj_t``, the sparse matrix that ``ToSparseTensor`` makes (``NodeMatrix``)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.space.distributed_index import DistEdgeIndex
from pyg_sar.tensors.node_tensor import NodeTensor, whole
from pyg_sar.tensors.operands import wrap
from pyg_sar.tensors.rows import Rows


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

    Args:
        edges: The distributed edges.
        rows: The layout of the edges.
    """
    rows.ends = edges.targets, edges.sources
    out = NodeTensor(edges.index.as_subclass(Tensor).detach(), rows, 1)
    out.edges, out.make = edges, edges.global_ids
    return out


class NodeMatrix(Tensor):
    """A sparse matrix between nodes, of which each worker holds its edges' entries.

    Layers take it for their edges and weights. It can be transposed, scaled, added to a sparse
    matrix and multiplied by a dense one; anything else is refused by name.

    Attributes:
        places: Rows and columns of its entries, ``[2, E]``.
        entries: Their values ``[E]``.
        ones: Whether these are all 1.
        ends: The layouts of the nodes along rows and columns.
        form: The layout of the matrix that it stands for.
    """

    places: NodeTensor
    entries: NodeTensor
    ones: bool
    ends: tuple[Rows, Rows]
    form: torch.layout

    @staticmethod
    def __new__(
        cls,
        places: NodeTensor,
        entries: NodeTensor,
        ones: bool,
        ends: tuple[Rows, Rows],
        form: torch.layout,
    ) -> NodeMatrix:
        shape = (ends[0].total, ends[1].total)
        out: NodeMatrix = Tensor._make_wrapper_subclass(
            cls, shape, dtype=entries.dtype, device=entries.device, requires_grad=False
        )
        out.places, out.entries, out.ones, out.ends, out.form = places, entries, ones, ends, form
        return out

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def changed(self, **parts: Any) -> NodeMatrix:
        """Returns a matrix that differs in these attributes."""
        given = {
            name: getattr(self, name) for name in ("places", "entries", "ones", "ends", "form")
        }
        return NodeMatrix(**{**given, **parts})

    def whole(self) -> Tensor:
        """Returns all of it as a plain sparse tensor. Collective."""
        index, entries = whole(self.places, "adj_t"), whole(self.entries, "adj_t")
        csr = self.form == torch.sparse_csr
        make = to_torch_csr_tensor if csr else to_torch_coo_tensor
        out: Tensor = make(index, entries, size=(self.ends[0].total, self.ends[1].total))
        return out.to_sparse_csc() if self.form == torch.sparse_csc else out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = _FUNCTIONS.get(func)
        out = NotImplemented if found is None else found(*args, **(kwargs or {}))
        if out is NotImplemented:
            name = getattr(func, "__name__", func)
            if name == "__get__":
                name = func.__self__.__name__
            raise DistributedIndexError(
                f"'{name}' of 'adj_t' has no rule that would give the whole graph's numbers: "
                "layers take adj_t and adj_t.t(), and it can be scaled, added to a sparse matrix "
                "and multiplied by a dense one. Or leave ToSparseTensor out: use data.edge_index"
            )
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise DistributedIndexError(f"'{func}' of 'adj_t' is not supported on several workers")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeMatrix:
        return self


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


def _turned(matrix: NodeMatrix, *axes: int) -> Any:
    if axes and sorted(axis % 2 for axis in axes) != [0, 1]:
        return NotImplemented
    forms = {torch.sparse_csr: torch.sparse_csc, torch.sparse_csc: torch.sparse_csr}
    form = forms.get(matrix.form, matrix.form)
    return matrix.changed(places=matrix.places.flip(0), ends=matrix.ends[::-1], form=form)


def _same(matrix: NodeMatrix) -> NodeMatrix:
    return matrix


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
        index: Tensor = more.places
        entries: Tensor = more.entries
    else:
        plain = more.to_sparse_coo().coalesce()
        index, entries = plain.indices(), plain.values()
    return matrix.changed(
        places=torch.cat([matrix.places, index], 1),
        entries=torch.cat([matrix.entries, entries]),
        ones=False,
    )


def _product(matrix: Any, x: Any) -> Any:
    """Returns the sum, for each row of the matrix, of rows of a dense ``x``."""
    if not isinstance(matrix, NodeMatrix) or isinstance(x, NodeMatrix) or x.dim() not in (1, 2):
        return NotImplemented
    if x.layout != torch.strided:
        return NotImplemented
    if x.size(0) != matrix.size(1) or x.dtype != matrix.dtype:
        raise RuntimeError(
            f"shapes {list(matrix.shape)} and {list(x.shape)} cannot be multiplied, of types "
            f"{matrix.dtype} and {x.dtype}"
        )
    target, source = matrix.places.unbind(0)
    terms = x[source] * matrix.entries.view(-1, *[1] * (x.dim() - 1))
    rows = matrix.ends[0]
    local = torch.zeros(rows.count, *x.shape[1:], dtype=x.dtype, device=x.device)
    return wrap(local, rows, 0).index_put((target,), terms, accumulate=True)


_METADATA = frozenset({
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.is_floating_point, Tensor.__hash__,
    Tensor.requires_grad.__get__, Tensor.shape.__get__, Tensor.dtype.__get__,  # type: ignore
    Tensor.device.__get__, Tensor.ndim.__get__, Tensor.is_cuda.__get__,  # type: ignore
    Tensor.is_nested.__get__, Tensor.is_leaf.__get__, Tensor.grad.__get__,  # type: ignore
    Tensor.get_device, torch.is_floating_point, torch.is_tensor, Tensor.__len__,
})  # fmt: skip

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.layout.__get__: lambda matrix: matrix.form,  # type: ignore
    Tensor.is_sparse.__get__: lambda matrix: matrix.form == torch.sparse_coo,  # type: ignore
    Tensor.is_sparse_csr.__get__: lambda m: m.form == torch.sparse_csr,  # type: ignore
    Tensor._nnz: lambda matrix: matrix.entries.size(0),
    Tensor.T.__get__: _turned,  # type: ignore
    **dict.fromkeys((Tensor.t, torch.t, Tensor.transpose, torch.transpose), _turned),
    **dict.fromkeys((Tensor.detach, Tensor.contiguous, Tensor.clone), _same),
    **dict.fromkeys((Tensor.to, Tensor.cpu, Tensor.cuda), _to),
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__), _scaled),
    **dict.fromkeys((Tensor.div, torch.div, Tensor.__truediv__), _divided),
    **dict.fromkeys((Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__), _added),
    **dict.fromkeys((Tensor.matmul, torch.matmul, Tensor.__matmul__, operator.matmul), _product),
    **dict.fromkeys((Tensor.mm, torch.mm, torch.sparse.mm, torch.spmm), _product),
}  # fmt: skip
