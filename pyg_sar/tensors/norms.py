"""Norms whose statistics are over rows: made of node tensors' own reductions, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from pyg_sar.tensors.node_tensor import method

_BATCH = ("input", "running_mean", "running_var", "weight", "bias")
_INSTANCE = ("use_input_stats", "momentum", "eps")


def _named(names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    given: dict[str, Any] = dict.fromkeys(("running_mean", "running_var", "weight", "bias"))
    given |= {"training": False, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
    return given | dict(zip(names, args, strict=False)) | kwargs


@method(F.batch_norm)
def _batch_norm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Normalizes each channel over the batch and all places."""
    given = _named((*_BATCH, "training", "momentum", "eps"), args, kwargs)
    x = given["input"]
    if given["training"] and x.numel() == x.size(1):
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    return _normalized(given, [0, *range(2, x.dim())], given["training"])


@method(F.instance_norm)
def _instance_norm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Normalizes each channel of each row over all places."""
    given = _named((*_BATCH, *_INSTANCE), args, kwargs)
    x = given["input"]
    if given["use_input_stats"] and x[:1, :1].numel() == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {x.shape}"
        )
    return _normalized(given, list(range(2, x.dim())), given["use_input_stats"])


def _normalized(given: dict[str, Any], dims: list[int], own: bool) -> Tensor:
    """Returns ``(x - mean) / sqrt(var + eps) * weight + bias``, of its own statistics or kept ones.

    Args:
        given: The arguments by name.
        dims: The axes that statistics are over.
        own: Whether they are those of ``x``; those kept, if there are, move towards them.
    """
    x, mean, var = given["input"], given["running_mean"], given["running_var"]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if own:
        var, now = torch.var_mean(x, dims, correction=0, keepdim=True)
        if mean is not None:
            count = x.numel() // now.numel()
            unbiased = var.detach() * (count / (count - 1))
            for kept, value in ((mean, now.detach()), (given["running_var"], unbiased)):
                value = value.mean(0).view(-1).to(kept.dtype)
                with torch.no_grad():
                    kept.mul_(1 - given["momentum"]).add_(value * given["momentum"])
        mean = now
    else:
        mean, var = mean.view(shape), var.view(shape)
    out: Tensor = (x - mean) * (var + given["eps"]).rsqrt()
    for name, apply in (("weight", torch.mul), ("bias", torch.add)):
        if given[name] is not None:
            out = apply(out, given[name].view(shape))
    return out.to(x.dtype).contiguous(memory_format=suggest_memory_format(x))
