"""Rules of operators of batches, each row of which is for itself: convolutions, pools and others.

Where the nodes are not the batch, they are gathered.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyg_sar.tensors.node_tensor import NodeTensor, by_gathering, node_tensors, rule
from pyg_sar.tensors.operands import arguments, called, own, summed, wrap

# What all rows use: it has no axis of the batch, and its gradient is a sum over rows.
_SHARED = ("weight", "bias")
# The axes that an operator's first argument has at least where its first one is the batch.
_LEAST = {"im2col": 4, "col2im": 3, "pixel_shuffle": 4, "pixel_unshuffle": 4}

_POOLS = ("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
_ADAPTIVE = ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d")
_PADS = tuple(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3))
_SIZES = (
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_BOTH_WAYS = (
    *("convolution", "native_group_norm", "_fused_rms_norm", "adaptive_max_pool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "grid_sampler_2d", "grid_sampler_3d"),
    *(*_POOLS, *_ADAPTIVE, *_PADS, *_SIZES),
)


@rule(
    *_BOTH_WAYS,
    *(f"{name}_backward" for name in _BOTH_WAYS),
    *("max_unpool2d", "max_unpool3d", "im2col", "col2im", "pixel_shuffle", "pixel_unshuffle"),
    *("channel_shuffle", "native_channel_shuffle"),
)
def _batch(func: Any, args: Any, kwargs: Any) -> Any:
    """The first axis of all but weights is the batch."""
    given = arguments(func, args, kwargs)
    name = func._schema.name.rpartition("::")[2]
    rows = node_tensors(args, kwargs)[0].rows
    batches = {key: t for key, t in given.items() if isinstance(t, Tensor) and key not in _SHARED}
    first = next(iter(batches.values()))
    whole_rows = len(given.get("normalized_shape", ())) < first.dim() >= _LEAST.get(name, 1)
    fits = all(
        t.dim() and t.size(0) == rows.total and not (isinstance(t, NodeTensor) and t.axis)
        for t in batches.values()
    )
    if not fits or not whole_rows or node_tensors([given.get(key) for key in _SHARED]):
        return by_gathering(func, args, kwargs)
    changed: dict[str, Any] = {key: own(t, rows, 0) for key, t in batches.items()}
    count = max(rows.count, 1)
    if not rows.count:  # Some take no batch without rows: one, of which nothing is kept.
        changed = {key: t.new_zeros(1, *t.shape[1:]) for key, t in changed.items()}
    if "N" in given:
        changed["N"] = count
    if "upsample" in name and "input_size" in given:
        changed["input_size"] = [count, *given["input_size"][1:]]
    out = called(func, given, **changed)
    if isinstance(out, Tensor):
        return wrap(out[: rows.count], rows, 0)
    sums = name.endswith("_backward") and not name.startswith("grid_sampler")
    return tuple(
        part
        if part is None
        else summed(part, rows)
        if sums and k
        else wrap(part[: rows.count], rows, 0)
        for k, part in enumerate(out)
    )
