"""What a backward pass began at: a mean over one worker's values, or a node of another pass.

[Note: local means] Parameter gradients are summed over the workers. A sum over nodes is right so,
and so is :func:`pyg_sar.mean`; ``loss.mean()``, or a loss function that averages, gives the sum of
the workers' means. The graph of the loss is read from its end, as far as its values are scalars:
every node there that averages takes a mean over this worker's values, unless its result is
scaled, by which a user may have put it right.
"""

from __future__ import annotations

import math
import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_ENTRY = "_engine_run_backward"  # torch's function through which every pass begins
_NODE = "BackwardCFunction.apply"  # and through which a node written in Python runs
_LONGEST = 200
_JOINS = ("StackBackward", "CatBackward")
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


def local_mean(root: Any) -> str | None:
    """The name of the autograd node that averages values of this worker, if there is one."""
    stack: list[Any] = [root]
    seen: set[Any] = set()
    while stack and len(seen) < _LONGEST:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        averages = name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
        if averages and not any(_scalar(p) or p.name().startswith(_JOINS) for p in parents[:1]):
            return name
        if name.startswith(_SCALES):
            continue
        joins = [p for p in parents if p.name().startswith(_JOINS)]
        parents += [scalar for join in joins for scalar, _ in join.next_functions if scalar]
        stack += [p for p in parents if _scalar(p)]
    return None


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
