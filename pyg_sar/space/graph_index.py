"""``data.batch`` over workers: an index of graphs into which all workers scatter together.

[Note: graph indices] A node-level vector of graph ids is a plain index on one process. Here its
graphs are spread over workers, and ``scatter(x, batch)`` would reduce over this worker's nodes.
As the source row of an ``edge_index`` it therefore is a tensor subclass: what is scattered with it
is reduced over the nodes of all workers, reading with it is local, and the number of graphs that
``batch.max() + 1`` infers is that of all workers. So PyG's own code (``global_mean_pool``,
``softmax``, aggregations, ``degree``) is exact, and the results (one row per graph) are the same
on all workers. Everything else is refused.

A worker without nodes sizes its output by its empty index, to no row: such outputs are given their
rows here, in place, for PyG goes on with the tensor that it scattered into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.collectives import largest_of_groups, product_over_workers, sum_over_workers
from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.space.distributed_index import METADATA, builtin, name_of
from pyg_sar.wording import counted

_LABEL = ("", "", "number of graphs")
_HANDLERS: dict[Any, Callable[..., Any]] = {}

_SAME = (
    Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda,
    Tensor.long, Tensor.int, torch.clone, torch.detach, Tensor.pin_memory, Tensor.view,
    Tensor.reshape, torch.reshape, Tensor.expand_as, Tensor.expand, Tensor.unsqueeze,
    torch.unsqueeze, Tensor.view_as,
)  # fmt: skip

_LOCAL = (
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, Tensor.new_zeros,
    Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor, Tensor.eq, Tensor.ne,
    Tensor.__eq__, Tensor.__ne__, torch.eq, torch.ne, Tensor.__lt__, Tensor.__gt__, Tensor.__le__,
    Tensor.__ge__, Tensor.lt, Tensor.gt, Tensor.le, Tensor.ge,
)  # fmt: skip


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            _HANDLERS[builtin(function)] = _HANDLERS[function] = handler
        return handler

    return register


class DistBatch(Tensor):
    """Graph ids of this worker's nodes. See [Note: graph indices] and :func:`dist_batch`.

    Attributes:
        comm: The communicator.
        num_graphs: Graphs on all workers.
        flat: The one-dimensional index that a view or an expansion of it came from.
    """

    comm: Communicator
    num_graphs: int
    flat: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise _refusal(func)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DistBatch({plain_batch(self)!r}, num_graphs={self.num_graphs})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DistributedIndexError(
            "A distributed batch vector belongs to these workers and can't be pickled; save "
            "batch.as_subclass(torch.Tensor)"
        )


def plain_batch(batch: Any) -> Any:
    """The graph ids of this worker's nodes as an ordinary tensor."""
    return batch.as_subclass(Tensor) if isinstance(batch, DistBatch) else batch


def _wrap(index: Tensor, like: DistBatch, flat: Tensor | None = None) -> DistBatch:
    out = index.view_as(index).as_subclass(DistBatch)
    out.comm, out.num_graphs = like.comm, like.num_graphs
    out.flat = index if flat is None else flat
    return out


def dist_batch(batch: Tensor, num_graphs: int | None = None) -> DistBatch:
    """Marks a node-level vector of graph ids as spread over the workers.

    :func:`pyg_sar.load_partition` does so for ``data.batch``. Every worker has to call it, with
    its own nodes' ids (none where it has no nodes).

    Args:
        batch: Graph of each of this worker's nodes, int64 ``[num_local]``.
        num_graphs: Graphs on all workers; one more than the largest id by default.

    Returns:
        The marked vector.

    Raises:
        TypeError: When ``batch`` is no vector of int64.
        ValueError: On every worker, when ``num_graphs`` differs or an id doesn't fit.
    """
    if isinstance(batch, DistBatch) and num_graphs in (None, batch.num_graphs):
        return batch
    batch = plain_batch(batch)
    if not isinstance(batch, Tensor) or batch.dtype != torch.long or batch.dim() != 1:
        kind = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch)
        raise TypeError(f"Expected 'batch' to be an int64 vector of graph ids (got {kind})")
    comm = current()
    low, high = (int(batch.min()), int(batch.max())) if batch.numel() else (0, -1)
    wanted = -1 if num_graphs is None else num_graphs
    facts = comm.all_reduce(
        torch.tensor([high, -low, wanted, -wanted], device=batch.device), "max", label=_LABEL
    )
    high, low, most, least = int(facts[0]), -int(facts[1]), int(facts[2]), -int(facts[3])
    if most != least:
        raise ValueError(
            f"'num_graphs' must be the same on all workers (got {num_graphs} at rank {comm.rank}, "
            f"and between {least} and {most} on the others; -1 is none)"
        )
    if low < 0 or (wanted >= 0 and high >= wanted):
        raise ValueError(
            f"Expected graph ids from 0 to {wanted - 1 if wanted >= 0 else 'num_graphs - 1'}; "
            f"the workers' 'batch' holds {low} to {high} (rank {comm.rank})"
        )
    return whole_batch(batch, high + 1 if wanted < 0 else wanted, comm)


def whole_batch(batch: Tensor, num_graphs: int, comm: Communicator) -> DistBatch:
    """As :func:`dist_batch`, with a number of graphs that all workers know: nothing is sent."""
    out = batch.view_as(batch).as_subclass(DistBatch)
    out.comm, out.num_graphs, out.flat = comm, num_graphs, batch
    return out


def one_graph(num_nodes: int, device: torch.device, comm: Communicator | None = None) -> DistBatch:
    """The batch vector of a single graph."""
    zeros = torch.zeros(num_nodes, dtype=torch.long, device=device)
    return whole_batch(zeros, 1, current() if comm is None else comm)


def _refusal(func: Any) -> DistributedIndexError:
    return DistributedIndexError(
        f"'{name_of(func)}' on a distributed batch vector would see this worker's own nodes only. "
        "Supported: scattering with it (scatter, softmax, degree, pooling, aggregations), reading "
        "graph tensors with it (u[batch]), selecting nodes, comparing, batch.max(). Its plain ids "
        "are batch.as_subclass(torch.Tensor)"
    )


# Selecting and reading #######################################################


@_handles(*_SAME)
def _same(func: Any, args: Any, kwargs: Any) -> Any:
    source, rest = args[0], [plain_batch(a) if isinstance(a, Tensor) else a for a in args[1:]]
    if not isinstance(source, DistBatch):
        raise _refusal(func)
    out = func(plain_batch(source), *rest, **kwargs)
    if out.dtype != torch.long:
        raise _refusal(func)
    same = out.shape == source.shape == source.flat.shape
    return _wrap(out, source, out if same else source.flat.to(out.device))


@_handles(*_LOCAL)
def _local(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*[plain_batch(a) if isinstance(a, Tensor) else a for a in args], **kwargs)


@_handles(Tensor.max, torch.max, Tensor.amax, torch.amax)
def _max(func: Any, args: Any, kwargs: Any) -> Any:
    """The last graph's id: PyG infers the number of graphs by it."""
    if len(args) > 1 or kwargs:
        raise _refusal(func)
    return torch.tensor(args[0].num_graphs - 1, device=args[0].device)


@_handles(Tensor.__getitem__)
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    source, key = args
    if not isinstance(source, DistBatch):
        keys = key if isinstance(key, tuple) else (key,)
        plain = tuple(plain_batch(k) if isinstance(k, Tensor) else k for k in keys)
        return source[plain if isinstance(key, tuple) else plain[0]]
    if source.dim() != 1 or isinstance(key, int | tuple | DistBatch):
        raise _refusal(func)
    return _wrap(plain_batch(source)[key], source)


@_handles(Tensor.index_select, torch.index_select)
def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    index = args[2] if len(args) > 2 else kwargs["index"]
    if isinstance(x, DistBatch):
        if isinstance(index, DistBatch):
            raise _refusal(func)
        return _wrap(plain_batch(x).index_select(dim, index), x)
    return x.index_select(dim, plain_batch(index))


@_handles(Tensor.gather, torch.gather)
def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], DistBatch):
        raise _refusal(func)
    return func(*[plain_batch(a) if isinstance(a, Tensor) else a for a in args], **kwargs)


# Scattering ##################################################################


def _rows(out: Tensor, dim: int, index: DistBatch, values: Tensor) -> tuple[Tensor, int, list[int]]:
    """The values as ``[n, width]``, the number of groups, and the shape of the result."""
    dim = dim % out.dim()
    flat = values.movedim(dim, 0)
    size, graphs = out.size(dim), index.num_graphs
    if size < graphs:
        if size or index.flat.numel():
            raise ValueError(
                f"Expected room for the {counted(graphs, 'graphs')} of all workers along axis "
                f"{dim} (got {size} at rank {index.comm.rank})"
            )
        size = graphs  # See [Note: graph indices] on workers without nodes.
    if flat.size(0) != index.flat.numel():
        raise ValueError(
            f"Expected a value for each of the {index.flat.numel()} entries of 'batch' (got "
            f"{flat.size(0)} at rank {index.comm.rank})"
        )
    shape = [size, *flat.shape[1:]]
    return flat.reshape(flat.size(0), flat.shape[1:].numel()), size, shape


def _reduced(out: Tensor, dim: int, index: DistBatch, values: Tensor, reduce: str) -> Tensor:
    """The reduction over all workers, shaped as ``out`` should be."""
    rows, size, shape = _rows(out, dim, index, values)
    flat, comm = index.flat, index.comm
    wide = flat.view(-1, 1).expand_as(rows)
    if reduce == "sum":
        kept = rows.to(wide_dtype(rows.dtype))
        local = kept.new_zeros(size, rows.size(1)).scatter_add(0, wide, kept)
        result = sum_over_workers(local, comm).to(rows.dtype)
    elif reduce == "prod":
        local = rows.new_ones(size, rows.size(1)).scatter_reduce(0, wide, rows, "prod")
        result = product_over_workers(local, comm)
    else:
        sign = 1 if reduce == "amax" else -1
        kept = rows if rows.is_floating_point() else rows.double()
        result = sign * largest_of_groups(sign * kept, flat, size, comm)
        result = result.to(rows.dtype)
    return result.view(shape).movedim(0, dim % out.dim())


def _write(out: Tensor, result: Tensor, in_place: bool) -> Tensor:
    if not in_place:
        return result
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


@_handles(Tensor.scatter_add_, Tensor.scatter_add, torch.scatter_add, Tensor.index_add_)
def _scatter_add(func: Any, args: Any, kwargs: Any) -> Any:
    out, dim, index, values = args[:4]
    if isinstance(out, DistBatch) or not isinstance(index, DistBatch) or len(args) > 4 or kwargs:
        raise _refusal(func)
    result = _reduced(out, dim, index, plain_batch(values), "sum")
    if out.shape == result.shape:
        result = out + result
    return _write(out, result, func in (Tensor.scatter_add_, Tensor.index_add_))


@_handles(Tensor.scatter_reduce_, Tensor.scatter_reduce, torch.scatter_reduce)
def _scatter_reduce(func: Any, args: Any, kwargs: Any) -> Any:
    out, dim, index, values = args[:4]
    reduce = args[4] if len(args) > 4 else kwargs["reduce"]
    kept = kwargs.get("include_self", True)
    if isinstance(out, DistBatch) or not isinstance(index, DistBatch) or reduce == "mean":
        raise _refusal(func)
    if kept != (reduce in ("sum", "prod")):
        raise _refusal(func)
    result = _reduced(out, dim, index, values, reduce)
    if kept and out.shape == result.shape:
        result = out.clone() * result if reduce == "prod" else out + result
    return _write(out, result, func is Tensor.scatter_reduce_)


@_handles(torch.bincount, Tensor.bincount)
def _bincount(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if kwargs.get("weights", args[1] if len(args) > 1 else None) is not None:
        raise _refusal(func)
    count = plain_batch(source).bincount(minlength=max(least, source.num_graphs))
    return sum_over_workers(count, source.comm)
