r"""Reductions over workers, differentiable any number of times.

[Note: gradients of replicated values] A reduced value is the same on all workers, and each worker
goes on computing with its own copy. What is differentiated is the *sum* of what the workers call
``backward()`` on, :math:`L = \sum_p L_p`; parameter gradients are summed over workers for that
reason. So a worker's gradient of its copy is a share, :math:`\partial L_p / \partial r`, and the
adjoint of every reduction starts by summing the shares. :func:`pyg_sar.mean` divides by the number
of values on all workers, copies included: the mean of :math:`W` equal copies is the mean, and a
loss of replicated values goes through it like a loss of nodes.

One that doesn't is counted W times: a warning says so.

[Note: local means] Parameter gradients are summed over the workers. A sum over nodes is right so,
and so is :func:`pyg_sar.mean`; ``loss.mean()``, or a loss function that averages, gives the sum of
the workers' means. The graph of the loss is read from its end, as far as its values are scalars:
every node there that averages takes a mean over this worker's values, unless its result is
scaled, by which a user may have put it right.

[Note: copies of a loss] What comes out of a readout is the same on all workers, and so is a loss
of it. If each worker calls ``backward()`` on its copy, it is counted W times. It shows where the
readout's gradient comes back: the workers' shares are equal, and the loss is neither scaled nor
made of :func:`pyg_sar.mean`. Equal shares can be a coincidence (a readout that is added to as many
nodes on every worker), so that it is a warning.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.ledger import Label
from pyg_sar.wording import counted

# Where a backward pass began ##################################################

_ENTRY = "_engine_run_backward"  # torch's function through which every pass begins
_NODE = "BackwardCFunction.apply"  # and through which a node written in Python runs
_LONGEST = 200
_JOINS = ("StackBackward", "CatBackward")
_MEANS = ("_GlobalMean",)  # of pyg_sar.mean
_SCALES = ("MulBackward", "DivBackward")  # By what is not known any more in a backward pass.


def warn_of_local_mean(device: torch.device) -> bool:
    """Warns when the pass under way began at a mean over one worker's values.

    Returns:
        Whether it warned.
    """
    for root, gradient in _roots(device):
        if not isinstance(root, Tensor) or root.dim() or root.grad_fn is None:
            continue
        if gradient is not None and float(gradient) != 1:
            continue
        found = local_mean(root.grad_fn)
        if found is not None:
            warnings.warn(
                f"backward() began at a mean over one worker's values ({found}): gradients are "
                "summed over the workers, so that the sum of the workers' means is what is "
                "minimised. Take pyg_sar.mean() of the values per node (reduction='none'), or sum "
                "them (reduction='sum') and divide by the number of values on all workers",
                stacklevel=2,
            )
            return True
    return False


@torch.no_grad()
def warn_of_copies(share: Tensor, total: Tensor, world_size: int) -> None:
    """Warns of a loss that every worker computes alike. See [Note: copies of a loss].

    Args:
        share: This worker's gradient of a readout.
        total: The sum of all workers'.
        world_size: The number of workers.
    """
    if world_size == 1 or not bool(share.any()):
        return
    if not torch.allclose(total, share * world_size, rtol=1e-5, atol=0):
        return
    for root, gradient in _roots(share.device):
        if gradient is not None and (gradient.dim() or float(gradient) != 1):
            continue
        names = [] if root.grad_fn is None else [node.name() for node in _scalars(root.grad_fn)]
        if not any(name.startswith((*_SCALES, *_MEANS)) for name in names):
            warnings.warn(
                f"The gradients of a readout are the same on all {counted(world_size, 'workers')}, "
                "as those of a loss of graphs are that each of them computes: if it is one, all "
                f"gradients are {world_size} times those of one process. Call backward() on "
                "pyg_sar.mean(losses), with a loss for each graph",
                stacklevel=2,
            )
            return


def local_mean(root: Any) -> str | None:
    """Returns the name of the autograd node that averages values of this worker, or ``None``."""
    for node in _scalars(root):
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        averages = (
            node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
        )
        if averages and not any(_scalar(p) or p.name().startswith(_JOINS) for p in parents[:1]):
            return str(node.name())
    return None


def _scalars(root: Any) -> Iterator[Any]:
    """Yields the nodes that compute a loss as one number, up to those that scale it."""
    stack: list[Any] = [root]
    seen: set[Any] = set()
    while stack and len(seen) < _LONGEST:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if node.name().startswith(_SCALES):
            continue
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        joins = [p for p in parents if p.name().startswith(_JOINS)]
        parents += [scalar for join in joins for scalar, _ in join.next_functions if scalar]
        stack += [p for p in parents if _scalar(p)]


def _scalar(node: Any) -> bool:
    """Returns whether what a node computes is one number."""
    metadata: Any = getattr(node, "_input_metadata", ())
    return len(metadata) == 1 and math.prod(metadata[0].shape) == 1


def begun_within_another() -> bool:
    """Returns whether a node of another backward pass began the one under way.

    Reversible layers differentiate by ``torch.autograd.grad`` inside their backward pass, and hand
    on what it returns: parts, which the outer pass sums.
    """
    frame = _entry()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == _ENTRY:
            return False  # A hook began it.
        if frame.f_code.co_qualname == _NODE:
            return True
    return False


def _entry() -> FrameType | None:
    """Returns the call on this thread that began the pass under way."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != _ENTRY:
        frame = frame.f_back
    return frame


def _roots(device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
    """Returns where the pass under way began, with the gradients given; nothing if not seen."""
    frame = _entry()
    if frame is None and device.type != "cpu":
        # Its nodes run on a thread of the device, while the caller's waits.
        frames = [f for f in sys._current_frames().values() if f.f_code.co_name == _ENTRY]
        frame = frames[0] if len(frames) == 1 else None
    if frame is None:
        return []
    tensors = frame.f_locals.get("t_outputs", ())
    arguments = frame.f_locals.get("args", ())
    gradients = arguments[0] if arguments else ()
    return list(zip(tensors, gradients, strict=False))


# Reductions ###################################################################

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
    r"""Returns :math:`\sum_p x_p`, of the same shape on all workers.

    See [Note: gradients of replicated values]: :math:`\bar x = \sum_p \bar r_p`.
    """
    return _Sum.apply(x, comm, label) if comm.world_size > 1 else x


def product_over_workers(x: Tensor, comm: Communicator) -> Tensor:
    r"""Returns :math:`\prod_p x_p`; its gradient is :math:`\sum_p \bar r_p \prod_{q \ne p} x_q`."""
    if comm.world_size == 1:
        return x
    factors = [x if q == comm.rank else torch.zeros_like(x) for q in range(comm.world_size)]
    return sum_over_workers(torch.stack(factors), comm).prod(0)


def largest_of_groups(x: Tensor, index: Tensor, size: int, comm: Communicator) -> Tensor:
    r"""Returns :math:`\max_{k : g_k = g} x_k` over the rows of all workers; 0 for no rows.

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
    """Returns rank 0's ``x`` on all workers: for replicated values made by random numbers."""
    return sum_over_workers(x if comm.rank == 0 else torch.zeros_like(x), comm)
