"""Measures what rounded and stale rows cost: the gradient's error against the true one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator, current
from pyg_sar.nn import DistMessagePassing

ALL = "all parameters"
"""The name of the error of all parameters together."""


def narrow_layers(model: torch.nn.Module) -> list[Any]:
    """Returns the model's layers whose halo rows travel rounded, or not in each step."""
    layers = [m for m in model.modules() if isinstance(m, DistMessagePassing)]
    return [m for m in layers if m.policy.wire != "exact" or m.policy.refresh_every > 1]


def measure_every(model: torch.nn.Module) -> int | None:
    """Returns the smallest ``measure_every`` of the policies of such layers."""
    return min((n for m in narrow_layers(model) if (n := m.policy.measure_every)), default=None)


@contextmanager
def exact_rows(model: torch.nn.Module) -> Iterator[None]:
    """Meanwhile all rows of the model's layers travel as they are, in each step."""
    kept = [(layer, layer.policy) for layer in narrow_layers(model)]
    try:
        for layer, policy in kept:
            layer.policy = replace(policy, wire="exact", refresh_every=1)
        yield
    finally:
        for layer, policy in kept:
            layer.policy = policy


def gradient_error(
    model: torch.nn.Module, closure: Callable[[], Any], *, comm: Communicator | None = None
) -> dict[str, float]:
    r"""Runs a step's passes exactly and as the policies say, and compares gradients.

    .. math:: \| \tilde g - g \|_2 \; / \; \| g \|_2

    with :math:`g` the exact gradient of a parameter. Collective. Both runs see the same random
    numbers; parameters' ``.grad``, buffers, kept rows and the random state are afterwards as they
    were, so that the next step is the one that was measured. Open
    ledgers record the result (``Ledger.gradient_errors``).

    Args:
        model: What :func:`pyg_sar.distribute` returned.
        closure: Forward pass, loss and ``backward()``; no optimizer step.
        comm: The workers; the current ones by default.

    Returns:
        The relative error by parameter name, and under ``'all parameters'`` that of all of them
        together; the same on every worker. 0 where both gradients are, infinite where only the
        exact one is.
    """
    comm = comm or current()
    layers = narrow_layers(model)
    kept = [(p, p.grad) for p in model.parameters()]
    stale = [layer.kept_rows for layer in layers]
    try:
        with exact_rows(model):
            exact = _gradients(model, closure, comm)
        for layer in layers:
            layer.kept_rows = layer.kept_rows and layer.kept_rows.copied()
        narrow = _gradients(model, closure, comm)
    finally:
        for layer, rows in zip(layers, stale, strict=True):
            layer.kept_rows = rows
        for parameter, gradient in kept:
            parameter.grad = gradient
    errors = _compare(model, narrow, exact)
    for ledger in comm.ledgers:
        ledger.gradient_errors.append(errors)
    return errors


def _gradients(
    model: torch.nn.Module, closure: Callable[[], Any], comm: Communicator
) -> list[Tensor | None]:
    for parameter in model.parameters():
        parameter.grad = None
    devices = [comm.device] if comm.device.type == "cuda" else []
    with torch.random.fork_rng(devices), values_kept(model.buffers()):
        closure()
    return [parameter.grad for parameter in model.parameters()]


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gives tensors their values again afterwards."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _compare(
    model: torch.nn.Module, narrow: Sequence[Tensor | None], exact: Sequence[Tensor | None]
) -> dict[str, float]:
    table, zero = {}, (0.0, 0.0)
    for (name, parameter), found, true in zip(model.named_parameters(), narrow, exact, strict=True):
        nothing = torch.zeros_like(parameter)
        found, true = (nothing if g is None else g for g in (found, true))
        difference = (found.double() - true.double()).square().sum()
        table[name] = float(difference), float(true.double().square().sum())
    sums = [sum(column) for column in zip(zero, *table.values(), strict=True)]
    return {name: _ratio(*pair) for name, pair in {**table, ALL: (sums[0], sums[1])}.items()}


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size > 0 else math.inf
