"""Compares what workers computed with one process, tensor by tensor, and finds the first place.

The error of a tensor is ``max |a - b| / max |b|``; that of a parameter's gradient is relative to
the largest gradient of the model, since one that is 0 by construction is rounding noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyg_sar.tools.recording import Key, Rows
from pyg_sar.tools.verify_report import LayerReport, VerifyReport


@dataclass
class ModelPass:
    """What a forward and backward pass leaves."""

    rows: Rows
    events: dict[Key, Tensor]
    outputs: list[Tensor]
    input_grads: dict[str, Tensor | None] = field(default_factory=dict)
    parameter_grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, list[Any]] = field(default_factory=dict)
    layers: dict[str, LayerReport] = field(default_factory=dict)


def compare(
    model: nn.Module, expected: ModelPass, workers: Sequence[ModelPass], report: VerifyReport
) -> None:
    """Fills ``report`` with errors, and with the first place where numbers differ.

    Args:
        model: The plain model.
        expected: What one process found.
        workers: What the workers found.
        report: Where the result goes. Gradients count where it holds no refused modules.
    """
    errors = {
        key: _error([w.events.get(key) for w in workers], [w.rows for w in workers], whole)
        for key, whole in expected.events.items()
    }
    known = {key: value for key, value in errors.items() if value is not None}
    rows = [w.rows for w in workers]
    for k, whole in enumerate(expected.outputs):
        found = _error([w.outputs[k] if k < len(w.outputs) else None for w in workers], rows, whole)
        report.output_error = max(report.output_error, float("inf") if found is None else found)
    gradients = {} if report.refused else expected.parameter_grads
    scale = max((float(g.abs().max()) for g in gradients.values() if g is not None), default=0.0)
    for name, gradient in gradients.items():
        each = [_distance(w.parameter_grads[name], gradient, scale) for w in workers]
        report.gradient_errors[name] = max(each)
    for name, gradient in ({} if report.refused else expected.input_grads).items():
        if gradient is not None:
            found = _error([w.input_grads[name] for w in workers], rows, gradient)
            report.gradient_errors[f"data.{name}"] = float("inf") if found is None else found
    for name, buffer in ({} if report.refused else expected.buffers).items():
        each = [_distance(w.buffers[name], buffer) for w in workers]
        report.buffer_errors[name] = max(each)
    report.layers = _merged_layers(workers, known, report)
    report.first_difference = _first_difference(model, known, report)


def _merged_layers(
    workers: Sequence[ModelPass], errors: Mapping[Key, float], report: VerifyReport
) -> list[LayerReport]:
    layers = []
    for name in workers[0].layers:
        each = [worker.layers[name] for worker in workers]
        most = max(each, key=lambda layer: layer.resident_rows)
        most.received_bytes = sum(layer.received_bytes for layer in each)
        outputs = [e for (n, _, what, _), e in errors.items() if n == name and what == "output"]
        most.output_error = max(outputs, default=0.0)
        prefix = f"{name}." if name else ""
        mine = [e for n, e in report.gradient_errors.items() if n.startswith(prefix)]
        most.gradient_error = max(mine, default=0.0)
        layers.append(most)
    return layers


def _error(found: Sequence[Tensor | None], rows: Sequence[Rows], whole: Tensor) -> float | None:
    """The error of workers' rows (or copies) of a tensor; ``None`` where they don't compare."""
    worst = 0.0
    seen = 0
    scale = float(whole.abs().max()) if whole.numel() else 0.0
    for mine, place in zip(found, rows, strict=True):
        ids = place.ids(whole)
        part = whole if ids is None else whole[ids]
        if mine is None or mine.shape != part.shape:
            return None
        seen += part.size(0)
        worst = max(worst, _distance(mine, part, scale))
    return worst


def _distance(a: Tensor | None, b: Tensor | None, scale: float | None = None) -> float:
    """``max |a - b|`` relative to ``max |b|`` or ``scale``; infinite where one is missing."""
    if a is None or b is None:
        return 0.0 if a is None and b is None else float("inf")
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    size = float(b.abs().max()) if scale is None else scale
    difference = torch.where(a.isnan() & b.isnan(), 0.0, (a - b).abs())
    error = float(difference.max()) / max(size, 1e-300)
    return error if error == error else float("inf")


def _first_difference(model: nn.Module, errors: Mapping[Key, float], report: VerifyReport) -> str:
    """Where values first differ, in the order in which one process computes them."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    for (name, number, what, _), error in errors.items():
        if error <= report.tolerance:
            continue
        title = f"'{name}' ({kinds[name]})" if name else kinds[""]
        call = f", call {number + 1}" if number else ""
        if what == "input":
            parent = kinds[name.rpartition(".")[0]] if name else "the caller"
            owner = parent if parent not in ("ModuleList", "ModuleDict") else kinds[""]
            return (
                f"the input of {title}{call} differs by {error:.1e}, and nothing before it: the "
                f"code that computes it, in {owner}.forward(), gives other numbers on a part of "
                "the nodes (a reduction over nodes such as x.mean(0)?)"
            )
        inner = [n for n in kinds if n.startswith(f"{name}." if name else "") and n != name]
        code = f": the code of {kinds[name]}.forward()" if inner else ""
        return f"the output of {title}{call} differs by {error:.1e}, and nothing before it{code}"
    wrong = {n: e for n, e in report.gradient_errors.items() if not e <= report.tolerance}
    if wrong:
        name = max(wrong, key=lambda n: wrong[n])
        return f"outputs agree, but the gradient of '{name}' differs by {wrong[name]:.1e}"
    wrong = {n: e for n, e in report.buffer_errors.items() if not e <= report.tolerance}
    if wrong:
        name = max(wrong, key=lambda n: wrong[n])
        return f"outputs and gradients agree, but the buffer '{name}' differs by {wrong[name]:.1e}"
    if report.output_error > report.tolerance:
        return f"the model's output differs by {report.output_error:.1e}"
    return ""
