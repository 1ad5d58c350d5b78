"""Between tensors of the whole graph and this worker's rows of them, differentiable.

[Note: rows of a batch] Some functions treat each row of a batch for itself, by one operator or by
many, as recurrent cells do. :func:`by_rows` calls them with this worker's rows, plain tensors: so
autograd has their backward passes, on whatever device. What all workers hold, the weights, goes
through :class:`Shared`, whose backward pass sums over the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data.storage import EdgeStorage

from pyg_sar.comm.group import Communicator
from pyg_sar.ledger import Label
from pyg_sar.tensors.node_tensor import FromLocal, NodeTensor, ToLocal, rows_at
from pyg_sar.tensors.operands import sum_compared
from pyg_sar.tensors.rows import Rows, note_first

_LABEL = ("", "backward", "gradient sum")


class Total(torch.autograd.Function):
    """The sum over workers, which every worker then holds: its adjoint is :class:`Shared`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, label: Label = _LABEL, learns: bool = True
    ) -> Tensor:
        ctx.comm = comm
        return sum_compared(x.detach().clone().contiguous(), comm, label, learns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if isinstance(gradient, NodeTensor):  # where rows and what all workers hold were joined
            gradient = gradient.full_tensor()
        note_first(gradient, ctx.comm)
        return Shared.apply(ctx.comm, gradient)[0], None, None, None


class Shared(torch.autograd.Function):
    """Tensors that all workers hold, for computations with each worker's rows."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.given = comm, [v.detach() for v in values]
        ctx.set_materialize_grads(False)
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        comm, values = ctx.given
        return None, *summed_gradients(values, gradients, comm)


def shared_by_all(values: Sequence[Tensor], comm: Communicator) -> Sequence[Tensor]:
    """Returns tensors that all workers hold, for computations with each worker's rows.

    The parameters of a distributed model are taken from its one autograd node.
    """
    if comm.world_size == 1:
        return values
    found, rest = list(values), []
    for k, value in enumerate(values):
        owner, name = comm.shared_parameters.get(value, (lambda: None, ""))
        model, learns = owner(), value.requires_grad and torch.is_grad_enabled()
        if learns and model is not None:  # Whose sum of gradients compares it.
            found[k] = model.take(name, value, comm)
            continue
        note_first(value, comm)
        if learns:
            rest.append(k)
    taken = Shared.apply(comm, *(values[k] for k in rest)) if rest else ()
    for k, value in zip(rest, taken, strict=True):
        found[k] = value
    return found


def summed_gradients(
    values: Sequence[Tensor], gradients: Sequence[Tensor | None], comm: Communicator
) -> list[Tensor | None]:
    """Returns sums over the workers, differentiable, of the gradients that any of them has.

    Args:
        values: What they are gradients of, alike on all workers.
        gradients: This worker's.
        comm: The communicator.
    """
    totals: list[Tensor | None] = [None] * len(gradients)
    for kind in dict.fromkeys((v.dtype, v.device) for v in values):
        places = [k for k, v in enumerate(values) if (v.dtype, v.device) == kind]
        given = [gradients[k] for k in places]
        like = values[places[0]]
        parts = [
            like.new_zeros(values[k].numel()) if g is None else g.reshape(-1)
            for k, g in zip(places, given, strict=True)
        ]
        there = [float(g is not None) for g in given]
        parts.append(torch.tensor(there, dtype=like.dtype, device=like.device))
        total = Total.apply(torch.cat(parts), comm, _LABEL, False)
        *sums, holders = total.split([part.numel() for part in parts])
        for k, part, count in zip(places, sums, holders.tolist(), strict=True):
            totals[k] = part.view(values[k].shape) if count else None
    return totals


def to_local(x: Tensor, rows: Rows, axis: int) -> Tensor:
    """Returns this worker's rows of a tensor of the whole graph, differentiable.

    Of a constant they are the same object in each call, by which layers know it again.
    """
    local = rows_at(x, rows, axis)
    learns = x.requires_grad and torch.is_grad_enabled()
    if not learns and isinstance(x, NodeTensor) and local is x.writes.rows:
        return local  # Its version tells of writes.
    return cast(Tensor, ToLocal.apply(x, local, rows, axis))


def from_local(rows: Tensor, data: Any, dim: int = 0) -> NodeTensor:
    """Returns rows of all workers' nodes as a tensor of the whole graph, differentiable.

    The way back from ``x.to_local()``. Collective; of each layout one number is sent, once.

    .. code-block:: python

        h = pyg_sar.from_local(own_code(data.x.to_local()), data)  # row by row

    Args:
        rows: This worker's rows, a plain tensor ``[rows here, *]``.
        dim: Where ``rows`` has them: -2 for a batch ``[B, rows here, F]`` of snapshots.
        data: Whose they are: what :func:`pyg_sar.load_partition` gave, or the store of a node type,
            for its nodes; a node tensor, for rows where that has its own (``data.edge_attr``).

    Raises:
        TypeError: When ``rows`` is no plain tensor.
        ValueError: When the number of rows is another one, or ``data`` has no node tensors, or has
            nodes in several orders.
    """
    if not isinstance(rows, Tensor) or isinstance(rows, NodeTensor) or not rows.dim():
        raise TypeError(
            f"Expected 'rows' to be a plain tensor with this worker's rows (got "
            f"{type(rows).__name__})"
        )
    layout = rows_of(data)
    if not -rows.dim() <= dim < rows.dim():
        raise ValueError(f"from_local(dim={dim}): 'rows' has the shape {list(rows.shape)}")
    if rows.size(dim) != layout.count:
        raise ValueError(
            f"Expected 'rows' to have this worker's {layout.count} of {layout.total} rows (got "
            f"shape {list(rows.shape)} at rank {layout.comm.rank}): see x.to_local()"
        )
    return cast(NodeTensor, FromLocal.apply(rows, layout, dim % rows.dim()))


def rows_of(data: Any) -> Rows:
    """Returns the layout of a graph's nodes, of those of a type, or of a node tensor.

    Raises:
        ValueError: ``data`` has no node tensors, or has nodes in several orders.
    """
    layout = data.rows if isinstance(data, NodeTensor) else _nodes_of(data)
    if layout is None:
        raise ValueError(
            "Expected 'data' to be what pyg_sar.load_partition gave, a node store of it, or a node "
            f"tensor (got {type(data).__name__})"
        )
    return layout


def _nodes_of(data: Any) -> Rows | None:
    """Returns the layout of a graph's nodes, or of those of a type. Collective at first."""
    none = isinstance(data, Tensor | EdgeStorage)  # A relation's rows are those of its edges.
    held: Iterable[Any] = () if none else getattr(data, "values", tuple)()
    values = [v for v in held if isinstance(v, NodeTensor)]
    edges = next((v.edges for v in values if v.edges is not None), None)
    total = getattr(data, "num_nodes", None) if edges is None else edges.targets.total
    of_edges = {id(v.rows) for v in values if v.axis == 1 and v.dtype == torch.long}
    found = [v.rows for v in values if v.rows.total == total and id(v.rows) not in of_edges]
    found = found if edges is None else [edges.targets, *found]
    if not all(rows.same(found[0]) for rows in found[1:]):
        raise ValueError(
            f"The tensors of 'data' with a row for each of its {total} nodes are not all in the "
            "same order (one was sorted or permuted, say): pass the one whose rows they are in "
            "place of 'data'"
        )
    return found[0] if found else None


def by_rows(
    func: Callable[..., Any],
    batches: Sequence[tuple[Tensor, int]],
    shared: Sequence[Tensor],
    out_axes: Sequence[int],
) -> tuple[Tensor, ...]:
    """Returns what a function that treats each row for itself gives, as node tensors.

    Args:
        func: Called with this worker's rows of ``batches``, then with ``shared``.
        batches: Tensors with a row per node, and the axis of the rows; one is a node tensor.
        shared: Plain tensors that all workers hold.
        out_axes: The axes of the rows in what the function gives.
    """
    rows = next(t.rows for t, _ in batches if isinstance(t, NodeTensor))
    local = [to_local(t, rows, axis) for t, axis in batches]
    if not rows.count:  # Many functions take no batch without rows: one, of which none is kept.
        local = [
            torch.cat(
                [t, t.new_zeros([1 if d == axis else n for d, n in enumerate(t.shape)])], axis
            )
            for t, (_, axis) in zip(local, batches, strict=True)
        ]
    shared = shared_by_all(shared, rows.comm)
    found = func(*local, *shared)
    return tuple(
        FromLocal.apply(part.narrow(axis, 0, rows.count), rows, axis)
        for part, axis in zip(found, out_axes, strict=True)
    )
