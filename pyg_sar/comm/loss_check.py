"""Where a backward pass began: at a mean of one worker, at a copy of a loss, in another pass.

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
                f"The gradients of a readout are the same on all {world_size} workers, as those "
                "of a loss of graphs are that each of them computes: if it is one, all gradients "
                f"are {world_size} times those of one process. Call backward() on "
                "pyg_sar.mean(losses), with a loss for each graph",
                stacklevel=2,
            )
            return


def local_mean(root: Any) -> str | None:
    """The name of the autograd node that averages values of this worker, if there is one."""
    for node in _scalars(root):
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        averages = (
            node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
        )
        if averages and not any(_scalar(p) or p.name().startswith(_JOINS) for p in parents[:1]):
            return str(node.name())
    return None


def _scalars(root: Any) -> Iterator[Any]:
    """The nodes that a loss is computed by as one number, up to those that scale it."""
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
    """Whether what a node computes is one number."""
    metadata: Any = getattr(node, "_input_metadata", ())
    return len(metadata) == 1 and math.prod(metadata[0].shape) == 1


def begun_within_another() -> bool:
    """Whether a node of another backward pass began the one under way.

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
    """The call on this thread that began the pass under way."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != _ENTRY:
        frame = frame.f_back
    return frame


def _roots(device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
    """Where the pass under way began, with the gradients given; nothing where it can't be seen."""
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
