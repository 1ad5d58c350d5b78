"""Rules of PyTorch's modules: convolutions and pools, recurrent layers, norms.

Convolutions, pools, recurrent layers and cells take each row for itself where the nodes are the
batch: each worker computes its own. Where they are not (the steps of one sequence, say), PyTorch's
operators get all rows. Norms whose statistics are over rows are made of node tensors' own
reductions, on any device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from pyg_sar.tensors.boundary import by_rows
from pyg_sar.tensors.node_tensor import NodeTensor, by_gathering, method, node_tensors, rule
from pyg_sar.tensors.operands import arguments, called, own, summed, wrap

# Batches ######################################################################

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


# Recurrent layers #############################################################

_LAYER = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_NAMES = (*_LAYER, "batch_first")


def _without_rule(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _fits(tensors: list[tuple[Tensor, int]]) -> bool:
    """Returns whether node tensors have their rows at these axes, and others as many there."""
    rows = [t.rows for t, axis in tensors if isinstance(t, NodeTensor) and t.axis == axis]
    nodes = sum(isinstance(t, NodeTensor) for t, _ in tensors)
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    fit = (t.dim() > axis and t.size(axis) == rows[0].total for t, axis in tensors)
    return len(rows) == nodes > 0 and not transformed and all(fit)


@method(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _layer(func: Any, args: Any, kwargs: Any) -> Any:
    """``output, h, ...`` of sequences ``[T, N, F]``, or ``[N, T, F]``, of as many nodes."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    if isinstance(given["has_biases"], list | tuple):  # Packed: the batch sizes come second.
        return _without_rule(func, args, kwargs)
    several = isinstance(given["hx"], list | tuple)
    states = list(given["hx"]) if several else [given["hx"]]
    batch = 0 if given["batch_first"] else 1
    tensors = [(given["input"], batch), *((state, 1) for state in states)]
    if not _fits(tensors) or node_tensors(given["params"]):
        return _without_rule(func, args, kwargs)
    draws = given["train"] and given["dropout"] and given["num_layers"] > 1
    if draws and given["input"].is_cpu:
        return _with_dropout(func, given, states)
    if draws:  # The states of cuDNN's own generator are no worker's.
        return _without_rule(func, args, kwargs)
    options = [given[name] for name in _NAMES[3:]]

    def run(steps: Tensor, *rest: Tensor) -> Any:
        own, weights = list(rest[: len(states)]), list(rest[len(states) :])
        return func(steps, own if several else own[0], weights, *options)

    return by_rows(run, tensors, given["params"], [batch, *[1] * len(states)])


def _with_dropout(func: Any, given: dict[str, Any], states: list[Tensor]) -> Any:
    """Runs layer by layer: what is dropped in between is what one process drops."""
    count = given["num_layers"]
    steps = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]
    width = len(given["params"]) // count
    ends: list[tuple[Tensor, ...]] = []
    for k in range(count):
        own = [state.chunk(count)[k] for state in states]
        one = given | {"input": steps, "hx": own if len(own) > 1 else own[0], "num_layers": 1}
        one |= {"params": given["params"][k * width : (k + 1) * width], "batch_first": False}
        steps, *last = _layer(func, (), one)
        ends.append(tuple(last))
        if k < count - 1:
            steps = F.dropout(steps, given["dropout"], training=True)
    out = steps.transpose(0, 1) if given["batch_first"] else steps
    return (out, *(torch.cat(parts) for parts in zip(*ends, strict=True)))


@method(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def _cell(func: Any, args: Any, kwargs: Any) -> Any:
    """One step of as many nodes."""
    names = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
    given = dict(zip(names, args, strict=False)) | kwargs
    several = isinstance(given["hx"], list | tuple)
    states = list(given["hx"]) if several else [given["hx"]]
    tensors = [(given["input"], 0), *((state, 0) for state in states)]
    weights = [given[name] for name in names[2:] if given.get(name) is not None]
    if not _fits(tensors) or node_tensors(weights):
        return _without_rule(func, args, kwargs)

    def run(step: Tensor, *rest: Tensor) -> Any:
        own = rest[: len(states)]
        out = func(step, own if several else own[0], *rest[len(states) :])
        return out if several else (out,)

    out = by_rows(run, tensors, weights, [0] * len(states))
    return out if several else out[0]


# Norms ########################################################################

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
                if isinstance(x, NodeTensor) and x.rows.comm.host is not None:
                    x.rows.comm.host.claim(kept, x.rows.comm.rank)
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
