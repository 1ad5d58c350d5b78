"""Between tensors of the whole graph and this worker's rows of them, differentiable.

[Note: rows of a batch] Some functions treat each row of a batch for itself, by one operator or by
many, as recurrent cells do. :func:`by_rows` calls them with this worker's rows, plain tensors: so
autograd has their backward passes, on whatever device. What all workers hold, the weights, goes
through :class:`Shared`, whose backward pass sums over the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors.node_tensor import NodeTensor
from pyg_sar.tensors.operands import wrap
from pyg_sar.tensors.rows import Rows

_LABEL = ("", "backward", "gradient sum")


class _ToLocal(torch.autograd.Function):
    """A tensor's rows here, as :func:`to_local` finds them. Its adjoint is :class:`FromLocal`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, local: Tensor, rows: Rows, axis: int) -> Tensor:
        ctx.place = rows, axis
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return FromLocal.apply(gradient, *ctx.place), None, None, None


class FromLocal(torch.autograd.Function):
    """Rows here as a node tensor. Its adjoint is :func:`to_local`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: Rows, axis: int) -> Tensor:
        ctx.place = rows, axis
        return wrap(local.detach(), rows, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return to_local(gradient, *ctx.place), None, None


class _Total(torch.autograd.Function):
    """The sum over workers, which every worker then holds: its adjoint is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        return comm.all_reduce(x.detach().clone(), label=_LABEL)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


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
        parts.append(like.new_tensor([float(g is not None) for g in given]))
        total = _Total.apply(torch.cat(parts), comm)
        *sums, holders = total.split([part.numel() for part in parts])
        for k, part, count in zip(places, sums, holders.tolist(), strict=True):
            totals[k] = part.view(values[k].shape) if count else None
    return totals


def to_local(x: Tensor, rows: Rows, axis: int) -> Tensor:
    """Returns this worker's rows of a tensor of the whole graph, differentiable.

    Args:
        x: A node tensor, or a plain one, which all workers hold.
        rows: The layout.
        axis: The axis of the rows.
    """
    if not isinstance(x, NodeTensor):
        local = rows.cut(x.detach(), axis)
    elif x.axis == axis and x.rows.same(rows):
        local = x.local
    elif x.axis == axis:
        local = x.rows.moved(x.local, axis, rows)
    else:
        raise DistributedIndexError(
            f"A tensor of shape {list(x.shape)} has its rows along axis {x.axis}, where axis "
            f"{axis} is asked for (rank {rows.comm.rank})"
        )
    return cast(Tensor, _ToLocal.apply(x, local, rows, axis))


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
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in shared)
    if learns and rows.comm.world_size > 1:
        shared = Shared.apply(rows.comm, *shared)
    found = func(*local, *shared)
    return tuple(
        FromLocal.apply(part.narrow(axis, 0, rows.count), rows, axis)
        for part, axis in zip(found, out_axes, strict=True)
    )
