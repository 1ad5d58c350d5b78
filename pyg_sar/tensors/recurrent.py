"""Recurrent layers and cells, whose batch the nodes are: each worker runs those of its rows.

Where the nodes are the steps of one sequence, torch's own operators get all rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.tensors.boundary import by_rows
from pyg_sar.tensors.node_tensor import NodeTensor, method, node_tensors

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
