"""Edges of a message flow graph: the in-edges of some of a worker's nodes, and of others none.

[Note: partial edges] Layers of a message flow graph need the in-edges of the nodes that they
compute and the rows of these edges' sources, whose own in-edges are left out. What a layer
aggregates is right for the former. The number of in-edges is known for all nodes
(``Partial.missing``): ``degree(col)``, and what ``gcn_norm`` sums up, are those of the whole graph,
for that many ones are added. Attributes of self loops that are reduced over in-edges go to the
node's own loop alone, and may be anything where its in-edges are left out. Any other sum over the
in-edges of all nodes is refused, and so are sums over out-edges and edges in the opposite
direction, for a node's out-edges are not all here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.distributed_index import (
    METADATA,
    RESHAPE,
    SAME_CLASS,
    DistEdgeIndex,
    Partial,
    builtin,
    dist_edge_index,
    plain,
)
from pyg_sar.space.pyg_calls import library_frames


def refuse_partial(what: str) -> DistributedIndexError:
    """The error of what partial edges can't give. See [Note: partial edges]."""
    return DistributedIndexError(
        f"{what} on the edges of a message flow graph: they are the in-edges of the nodes that a "
        "layer computes, not all edges of all nodes. Apply it to the whole graph before "
        "(transforms.GCNNorm, with normalize=False in the layer, for weighted edges), or train "
        "this model on the whole graph"
    )


def derived(edges: Any, source: Any, *, known: bool = True) -> Any:
    """Edges, or a row of them, that were made of others which may be partial."""
    if source.partial is not None:
        edges.partial = Partial(source.partial.missing if known else None)
    return edges


def inner(edge_index: DistEdgeIndex, sources: int) -> DistEdgeIndex:
    """Partial edges as a layer aggregates over them, whose sources are in the row ``sources``.

    Raises:
        DistributedIndexError: When the layer sends messages from targets to sources.
    """
    if edge_index.dist_row != sources:
        raise refuse_partial("Messages from targets to sources")

    def make() -> DistEdgeIndex:
        rows, content = plain(edge_index), edge_index.by_content
        edges = dist_edge_index(rows, edge_index.plan, sources, by_content=content)
        return edges.ordered(edge_index.places)

    found: DistEdgeIndex = edge_index.remember("inner", make)
    return found


# The row of targets ##########################################################


class FlowTargets(Tensor):
    """The targets of partial edges: local ids into which little can be summed up.

    Attributes:
        sources: The other row, plain.
        missing: In-edges that each own node has beside those that are here, or ``None``.
    """

    sources: Tensor
    missing: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if builtin(func) in _SCATTERS or func in _SCATTERS:
            return _scattered(func, args, kwargs)
        out = func(*tree_map(_ids, args), **tree_map(_ids, kwargs))
        source = args[0] if args else None
        if not isinstance(source, FlowTargets) or not isinstance(out, Tensor):
            return out
        if func in RESHAPE or func in SAME_CLASS or func is Tensor.view_as:
            return _wrap(out, source.sources, source.missing)
        chosen = func in (Tensor.__getitem__, Tensor.index_select, torch.index_select)
        return _wrap(out, source.sources, None) if chosen and out.dtype == source.dtype else out


def flow_targets(row: Tensor, edge_index: DistEdgeIndex) -> FlowTargets:
    """The row of targets of partial edges."""
    missing = None if edge_index.partial is None else edge_index.partial.missing
    return _wrap(row, edge_index.ends()[0], missing)


def _wrap(row: Tensor, sources: Tensor, missing: Tensor | None) -> FlowTargets:
    out = row.view_as(row).as_subclass(FlowTargets)
    out.sources, out.missing = sources, missing
    return out


def _ids(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, FlowTargets) else value


_SCATTERS = {
    Tensor.scatter_add_, Tensor.scatter_add, torch.scatter_add, Tensor.index_add_,
    Tensor.index_add, torch.index_add, Tensor.scatter_reduce_, Tensor.scatter_reduce,
    torch.scatter_reduce, Tensor.index_reduce_, Tensor.index_reduce, Tensor.scatter_,
    Tensor.scatter, torch.scatter, torch.bincount, Tensor.bincount, Tensor.index_put_,
    Tensor.__setitem__,
}  # fmt: skip
_SUMS = {
    Tensor.scatter_add_, Tensor.scatter_add, torch.scatter_add, Tensor.index_add_,
    Tensor.index_add, torch.index_add,
}  # fmt: skip


def _scattered(func: Any, args: Any, kwargs: Any) -> Any:
    """A sum of ones over the in-edges of each node of the whole graph; others are refused."""
    named = dict(zip(("out", "dim", "index", "values"), args, strict=False)) | kwargs
    index, values = named.get("index"), named.get("values", named.get("src", named.get("source")))
    missing = index.missing if isinstance(index, FlowTargets) else None
    complete = missing is not None and not bool(missing.any())
    if complete or any(f.f_code.co_name == "compute_loop_attr" for f in library_frames()):
        return func(*tree_map(_ids, args), **tree_map(_ids, kwargs))
    fits = func in _SUMS and values is not None and len(named) == 4
    if missing is None or not fits or args[0].shape != missing.shape:
        raise refuse_partial("A reduction over the in-edges of all nodes")
    ones = (values == 1) | (index.sources == _ids(index))
    if values.requires_grad or not bool(ones.all()):
        raise refuse_partial("A weighted sum over the in-edges of all nodes")
    out = func(*tree_map(_ids, args))
    more = missing.to(out.dtype)
    return out.add_(more) if out is args[0] else out + more
