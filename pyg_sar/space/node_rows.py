"""Node tensors given to a user's function that reduces over nodes, and their global shuffle.

[Note: node rows] Some models call functions of the user with all node embeddings: the ``summary``
and the ``corruption`` of :class:`~torch_geometric.nn.models.DeepGraphInfomax`. Over workers these
get a tensor subclass: what works on each row stays local, sums, means and extremes over the rows
are taken over all workers, and what would mix this worker's own rows is refused.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.comm.collectives import sum_over_workers
from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.space.distributed_index import METADATA, builtin, name_of
from pyg_sar.space.graph_index import one_graph

_BY_ELEMENT = (
    "abs", "add", "clamp", "clone", "cos", "detach", "div", "exp", "float", "double", "log",
    "mul", "neg", "pow", "reciprocal", "relu", "rsub", "sigmoid", "sin", "sqrt", "square", "sub",
    "tanh", "to", "true_divide", "type_as", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "__pow__", "contiguous",
)  # fmt: skip

_FUNCTIONS = (
    F.dropout, F.elu, F.gelu, F.layer_norm, F.leaky_relu, F.linear, F.relu, F.selu, F.sigmoid,
    F.silu, F.softplus, F.tanh, F.prelu, F.normalize, F.hardtanh,
)  # fmt: skip

_BY_ROW: frozenset[Any] = frozenset(
    function
    for name in _BY_ELEMENT
    for function in (getattr(Tensor, name, None), getattr(torch, name, None))
    if function is not None
) | frozenset(_FUNCTIONS)

_PRODUCTS = (Tensor.matmul, torch.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)

_REDUCED: dict[Any, str] = {
    function: name
    for name in ("sum", "mean", "max", "min", "amax", "amin")
    for function in (getattr(Tensor, name), getattr(torch, name), builtin(getattr(torch, name)))
}


class NodeRows(Tensor):
    """This worker's rows of a node tensor ``[num_local, *]``. See [Note: node rows]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REDUCED:
            return _reduce(func, args, kwargs)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _BY_ROW:
            return _by_row(func, args, kwargs)
        if func in _PRODUCTS and type(args[0]) is NodeRows and type(args[1]) is not NodeRows:
            return _by_row(func, args, kwargs)
        raise DistributedIndexError(
            f"'{name_of(func)}' on this worker's node rows would mix its own nodes only (rank "
            f"{current().rank}). Supported: functions of each row, and sum, mean, max, min over "
            "axis 0. For PyG's global_mean_pool(x, batch) and its kin take those of pyg_sar.nn; to "
            "permute the nodes of the whole graph pyg_sar.nn.shuffle_nodes(x)"
        )


def node_rows(value: Any) -> Any:
    """A floating point tensor as node rows; anything else as it is."""
    matters = isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point()
    return value.as_subclass(NodeRows) if matters and type(value) is Tensor else value


def plain_rows(value: Any) -> Any:
    """Node rows as an ordinary tensor; anything else as it is."""
    return value.as_subclass(Tensor) if isinstance(value, NodeRows) else value


def _by_row(func: Any, args: Any, kwargs: Any) -> Any:
    rows = next(a for a in (*args, *kwargs.values()) if isinstance(a, NodeRows))
    out = func(*map(plain_rows, args), **{k: plain_rows(v) for k, v in kwargs.items()})
    if not isinstance(out, Tensor) or out.dim() < 1 or out.size(0) != rows.size(0):
        raise DistributedIndexError(f"'{name_of(func)}' lost the node axis of shape {rows.shape}")
    return out.as_subclass(NodeRows)


def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    rows, reduce = plain_rows(args[0]), _REDUCED[func]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    axes = range(rows.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    places = {axis % rows.dim() for axis in axes}
    if 0 not in places:
        out = func(rows, *args[1:], **kwargs)
        return out.as_subclass(NodeRows) if isinstance(out, Tensor) else out
    flat = rows.reshape(rows.size(0), rows.shape[1:].numel())
    index = one_graph(rows.size(0), rows.device)
    if reduce in ("sum", "mean"):
        wide = flat.to(wide_dtype(flat.dtype))
        out = wide.new_zeros(1, flat.size(1)).index_add_(0, index, wide)
        if reduce == "mean":
            count = torch.tensor(rows.size(0), device=rows.device)
            out = out / sum_over_workers(count, current())
        out = out.to(flat.dtype)
    else:
        expanded = index.view(-1, 1).expand_as(flat)
        out = flat.new_zeros(1, flat.size(1))
        kind = f"a{reduce[-3:]}"
        out = out.scatter_reduce_(0, expanded, flat, kind, include_self=False)
    out = out.view(1, *rows.shape[1:])
    if rest := sorted(places - {0}):
        name = reduce if reduce in ("sum", "mean") else f"a{reduce[-3:]}"
        out = getattr(out, name)(rest, keepdim=True)
    if not keep:
        out = out.view([n for axis, n in enumerate(out.shape) if axis not in places])
    if dim is not None and reduce in ("max", "min"):
        raise DistributedIndexError(
            f"'{reduce}' over nodes has no index over workers; use a{reduce}(dim=0), or "
            f"pyg_sar.nn.global_max_pool(x) for PyG's"
        )
    return out


# Shuffling ###################################################################


def shuffle_nodes(x: Tensor) -> Tensor:
    r"""The rows of all workers in a random order, each worker keeping its number of rows.

    The permutation is one of the whole graph, as ``x[torch.randperm(x.size(0))]`` is on one
    process; rank 0's random state decides it. Differentiable. Each worker holds the permutation
    (8 bytes per node of the graph) for the time of the call.

    Args:
        x: This worker's rows ``[num_local, *]``.

    Returns:
        ``[num_local, *]``.
    """
    x, comm = plain_rows(x), current()
    label = ("", "forward", "shuffle")
    here = torch.tensor([x.size(0), int(torch.randint(2**62, ()))], device=x.device)
    facts = torch.stack(comm.all_gather(here, label=label)).tolist()
    counts = [n for n, _ in facts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(facts[0][1]))
    plan, index = _exchange_by(order, counts, comm, x.device)
    return halo_gather(x, plan).index_select(0, index)


def _exchange_by(
    order: Tensor, counts: list[int], comm: Communicator, device: torch.device
) -> tuple[HaloPlan, Tensor]:
    """The plan by which row k of all gets row ``order[k]``, and where own rows are in it."""
    starts = [0, *accumulate(counts)]
    bounds = torch.tensor(starts[1:])

    def wanted(rank: int) -> tuple[Tensor, Tensor]:
        rows = order[starts[rank] : starts[rank + 1]]
        return rows, torch.searchsorted(bounds, rows, right=True)

    rows, owner = wanted(comm.rank)
    sends = []
    for rank in range(comm.world_size):
        theirs, source = wanted(rank)
        mine = theirs[source == comm.rank] - starts[comm.rank]
        sends.append(mine[:0] if rank == comm.rank else mine)
    halo = [int((owner == rank).sum()) if rank != comm.rank else 0 for rank in range(len(counts))]
    plan = HaloPlan(
        comm, counts[comm.rank], halo, torch.cat(sends).to(device), [s.numel() for s in sends]
    )
    index = rows - starts[comm.rank]
    for rank in range(comm.world_size):
        if rank != comm.rank:
            first = plan.num_local + plan.halo_offsets[rank]
            index[owner == rank] = torch.arange(first, first + halo[rank])
    return plan, index.to(device)
