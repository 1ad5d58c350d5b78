r"""Reductions over workers, differentiable any number of times.

[Note: gradients of replicated values] A reduced value is the same on all workers, and each worker
goes on computing with its own copy. What is differentiated is the *sum* of what the workers call
``backward()`` on, :math:`L = \sum_p L_p`; parameter gradients are summed over workers for that
reason. So a worker's gradient of its copy is a share, :math:`\partial L_p / \partial r`, and the
adjoint of every reduction starts by summing the shares. :func:`pyg_sar.mean` divides by the number
of values on all workers, copies included: the mean of :math:`W` equal copies is the mean, and a
loss of replicated values goes through it like a loss of nodes.

One that doesn't is counted W times, of which ``loss_check.py`` warns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.comm.loss_check import warn_of_copies
from pyg_sar.ledger import Label

FORWARD: Label = ("", "forward", "readout")
BACKWARD: Label = ("", "backward", "readout")


class _Sum(torch.autograd.Function):
    """The sum over workers; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, label: Label) -> Tensor:
        ctx.comm, ctx.label = comm, (label[0], "backward", label[2])
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        return comm.all_reduce(copy, label=label)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = _Sum.apply(gradient, ctx.comm, ctx.label)
        if ctx.label[2] == "readout":
            warn_of_copies(gradient, total, ctx.comm.world_size)
        return total, None, None


class _Extreme(torch.autograd.Function):
    """Rows ``[n, F]`` to ``[size, F]``: the largest of each group on all workers, or 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, size: int, comm: Communicator) -> Tensor:
        width, x = x.size(1), x.detach()
        # Two more columns: has rows at all, and holds NaN, which backends' maxima lose or keep.
        found = x.new_full((size, width + 2), float("-inf"))
        rows = index.view(-1, 1).expand_as(x)
        best = found[:, :width]
        best.scatter_reduce_(0, rows, x, "amax")
        nan = best.isnan()
        best.masked_fill_(nan, float("-inf"))
        found[index, width] = 0
        found[:, width + 1] = nan.any(1).to(x.dtype)
        comm.all_reduce(found, "max", label=FORWARD)
        empty = found[:, width : width + 1].isinf()
        out = best.masked_fill(empty, 0)
        if bool(found[:, width + 1].any()):  # The same on all workers.
            everyones = comm.all_reduce(nan.to(x.dtype), "max", label=FORWARD)
            out.masked_fill_(everyones > 0, float("nan"))
        ctx.save_for_backward(index, x == out.index_select(0, index), empty)
        ctx.comm = comm
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        index, winners, empty = ctx.saved_tensors
        rows = index.view(-1, 1).expand_as(winners)
        ties = torch.zeros_like(gradient).scatter_add_(0, rows, winners.to(gradient.dtype))
        total, ties = _Sum.apply(torch.stack([gradient, ties]), ctx.comm, BACKWARD)
        warn_of_copies(gradient, total, ctx.comm.world_size)
        # Of NaN there are no ties: 0 times infinity, as scatter_reduce has it.
        share = total / ties.masked_fill(empty, 1)
        return share.index_select(0, index) * winners, None, None, None


def sum_over_workers(x: Tensor, comm: Communicator, label: Label = FORWARD) -> Tensor:
    r""":math:`\sum_p x_p`, of the same shape on all workers.

    See [Note: gradients of replicated values]: :math:`\bar x = \sum_p \bar r_p`.
    """
    return _Sum.apply(x, comm, label) if comm.world_size > 1 else x


def product_over_workers(x: Tensor, comm: Communicator) -> Tensor:
    r""":math:`\prod_p x_p`, with the gradient :math:`\sum_p \bar r_p \prod_{q \ne p} x_q`."""
    if comm.world_size == 1:
        return x
    factors = [x if q == comm.rank else torch.zeros_like(x) for q in range(comm.world_size)]
    return sum_over_workers(torch.stack(factors), comm).prod(0)


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
