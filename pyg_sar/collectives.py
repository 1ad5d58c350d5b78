r"""Differentiable reductions over workers.

[Note: gradients of replicated values] A reduced value is the same on all workers, and each worker
goes on computing with its own copy. What is differentiated is the *sum* of what the workers call
``backward()`` on, :math:`L = \sum_p L_p`; parameter gradients are summed over workers for that
reason. So a worker's gradient of its copy is a share, :math:`\partial L_p / \partial r`, and the
adjoint of every reduction starts by summing the shares. :func:`pyg_sar.mean` divides by the number
of values on all workers, copies included: the mean of :math:`W` equal copies is the mean, and a
loss of replicated values goes through it like a loss of nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_sar.comm import Communicator

FORWARD = ("", "forward", "readout")
BACKWARD = ("", "backward", "readout")


def _summed(tensor: Tensor, comm: Communicator, label: tuple[str, str, str]) -> Tensor:
    return comm.all_reduce(
        tensor.detach().clone(memory_format=torch.contiguous_format), label=label
    )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return _summed(x, comm, FORWARD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.comm, BACKWARD), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        factors = torch.stack(comm.all_gather(x.detach(), label=FORWARD))
        rank = comm.rank
        ctx.save_for_backward(torch.cat([factors[:rank], factors[rank + 1 :]]).prod(0))
        ctx.comm = comm
        return factors.prod(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (others,) = ctx.saved_tensors
        return _summed(gradient, ctx.comm, BACKWARD) * others, None


class _Extreme(torch.autograd.Function):
    """Rows ``[n, F]`` to ``[size, F]``: the largest of each group on all workers, or 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, size: int, comm: Communicator) -> Tensor:
        width = x.size(1)
        # Two more columns: has rows at all, and holds NaN, which backends' maxima lose or keep.
        found = x.new_full((size, width + 2), float("-inf"))
        rows = index.view(-1, 1).expand_as(x)
        best = found[:, :width]
        best.scatter_reduce_(0, rows, x.detach(), "amax")
        nan = best.isnan()
        best.masked_fill_(nan, float("-inf"))
        found[index, width] = 0
        found[:, width + 1] = nan.any(1).to(x.dtype)
        comm.all_reduce(found, "max", label=FORWARD)
        out = best.masked_fill(found[:, width : width + 1].isinf(), 0)
        if bool(found[:, width + 1].any()):  # The same on all workers.
            everyones = comm.all_reduce(nan.to(x.dtype), "max", label=FORWARD)
            out.masked_fill_(everyones > 0, float("nan"))
        ctx.save_for_backward(index, x == out.index_select(0, index))
        ctx.comm = comm
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        index, winners = ctx.saved_tensors
        rows = index.view(-1, 1).expand_as(winners)
        ties = torch.zeros_like(gradient).scatter_add_(0, rows, winners.to(gradient.dtype))
        total, ties = _summed(torch.stack([gradient, ties]), ctx.comm, BACKWARD)
        share = total / ties  # Of NaN none: 0 times infinity, as scatter_reduce has it.
        return share.index_select(0, index) * winners, None, None, None


def sum_over_workers(x: Tensor, comm: Communicator) -> Tensor:
    r""":math:`\sum_p x_p`, of the same shape on all workers.

    See [Note: gradients of replicated values]: :math:`\bar x = \sum_p \bar r_p`.
    """
    return _Sum.apply(x, comm) if comm.world_size > 1 else x


def product_over_workers(x: Tensor, comm: Communicator) -> Tensor:
    r""":math:`\prod_p x_p`, with the gradient :math:`\sum_p \bar r_p \prod_{q \ne p} x_q`."""
    return _Product.apply(x, comm) if comm.world_size > 1 else x


def largest_of_groups(x: Tensor, index: Tensor, size: int, comm: Communicator) -> Tensor:
    r""":math:`\max_{k : g_k = g} x_k` over the rows of all workers; 0 for no rows.

    The gradient is shared evenly among equal maxima, as by :func:`torch.scatter_reduce`; that of a
    group whose maximum is NaN is NaN.

    Args:
        x: ``[n, F]``, floating point.
        index: Group of each row, ``[n]``.
        size: Number of groups.
        comm: The communicator.

    Returns:
        ``[size, F]``.
    """
    return _Extreme.apply(x, index, size, comm)


def first_workers(x: Tensor, comm: Communicator) -> Tensor:
    """Rank 0's ``x`` on all workers: for replicated values that random numbers went into."""
    return sum_over_workers(x if comm.rank == 0 else torch.zeros_like(x), comm)
