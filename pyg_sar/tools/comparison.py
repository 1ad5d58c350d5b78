"""Compares a model on workers with the same model in one process, tensor by tensor.

What passes between the modules is recorded in one process and on each worker, compared, and
reported as an object and as a table, which name the first place that differs.

The error of a tensor is ``max |a - b| / max |b|``. One that is 0 by construction is rounding noise:
that of a parameter's gradient is relative to the largest one of all parameters, that of an input's
gradient to the largest one of all parameters and inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pyg_sar.files import spoken_bytes
from pyg_sar.nn import NORMS
from pyg_sar.nn.global_calls import GlobalCalls
from pyg_sar.tensors import NodeTensor, mapped
from pyg_sar.tensors.nested import tensors_in
from pyg_sar.train.hosted import describe_hosting
from pyg_sar.wording import Shown, aligned, counted

# The report ###################################################################


@dataclass
class LayerReport(Shown):
    """How one message passing layer ran.

    Attributes:
        name: Its name in ``model.named_modules()``.
        kind: Its class.
        strategy: ``'sequential'``, ``'chunked'``, ``'one_shot'``, or several of these.
        case: 2 where the backward pass fetches source rows again, 1 where not, 0 for one shot.
        received_bytes: Halo rows received by all workers, forward and backward.
        resident_rows: The most remote rows that a worker held at once for it.
        halo_rows: All remote rows that this worker's edges need.
        output_error: The largest relative error of its outputs.
        gradient_error: The largest error of its parameters' gradients, relative to the largest
            gradient of the model.
        transforms_first: It maps source rows before it sums them (docs/how_it_works.md).
    """

    name: str
    kind: str
    strategy: str
    case: int
    received_bytes: int
    resident_rows: int
    halo_rows: int
    output_error: float = 0.0
    gradient_error: float = 0.0
    transforms_first: bool = False


@dataclass
class VerifyReport(Shown):
    """The verdict of :func:`pyg_sar.verify`; ``str(report)`` is a table.

    Attributes:
        model: The model's class.
        num_nodes: Nodes that were looked at.
        of_nodes: Nodes of the graph.
        num_edges: Edges that were looked at.
        num_workers: Workers.
        tolerance: The largest error that counts as equal.
        layers: One entry per message passing layer.
        output_error: The largest relative error of the model's outputs.
        gradient_errors: Errors of gradients, by parameter, and ``data.NAME`` for inputs.
        buffer_errors: Errors of buffers (running statistics).
        refused: Modules that can't run distributed, and why. The others were looked at all the
            same, with results of one process in these modules' places, but not their gradients.
        failure: Why the workers could not run at all.
        first_difference: Where numbers first differ.
        warnings: Layers that fetch their whole halo, and why.
        hosting: Of hosted parts, what they kept, computed again and moved
            (:meth:`pyg_sar.train.hosted.HostedRun.summary`).
    """

    model: str
    num_nodes: int
    of_nodes: int
    num_edges: int
    num_workers: int
    tolerance: float
    layers: list[LayerReport] = field(default_factory=list)
    output_error: float = 0.0
    gradient_errors: dict[str, float] = field(default_factory=dict)
    buffer_errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    first_difference: str = ""
    warnings: list[str] = field(default_factory=list)
    hosting: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Is true where everything runs and is equal."""
        return not (self.refused or self.failure or self.first_difference)

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.num_nodes:,} of {counted(self.of_nodes, 'nodes')}, "
            f"{self.num_edges:,} edges: {counted(self.num_workers, 'workers')} against one "
            "process, float64"
        ]
        if self.layers:
            lines += _table(self.layers)
        if not self.failure:
            lines.append(f"outputs: largest error {self.output_error:.1e}")
        if self.gradient_errors:
            lines.append(f"gradients: largest error {max(self.gradient_errors.values()):.1e}")
        if self.hosting:
            lines += describe_hosting(self.hosting)
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"not supported: {name}: {why}" for name, why in self.refused.items()]
        if self.failure and self.failure not in self.refused.values():
            lines.append(f"failed: {self.failure}")
        if self.first_difference:
            lines.append(f"DIFFERS: {self.first_difference}")
        lines.append("ok: the same as one process" if self.ok else "not ok")
        return "\n".join(lines)


_COLUMNS = ("layer", "class", "strategy", "case", "received", "rows held/halo", "output", "grads")


def _table(layers: list[LayerReport]) -> list[str]:
    cells = [list(_COLUMNS)] + [
        [
            layer.name or "(model)",
            layer.kind,
            layer.strategy + (", transforms first" if layer.transforms_first else ""),
            str(layer.case or "-"),
            spoken_bytes(layer.received_bytes),
            f"{layer.resident_rows}/{layer.halo_rows}",
            f"{layer.output_error:.0e}",
            f"{layer.gradient_error:.0e}",
        ]
        for layer in layers
    ]
    return aligned(cells)


# Recording ####################################################################

Key = tuple[str, int, str, int]
"""Module, number of its call, ``'input'`` or ``'output'``, number of the tensor."""


def watched(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that a model calls outside of messages, by name.

    What a message passing layer calls may run edge by edge, several times, or not at all; norms and
    attention over all nodes call others with this worker's rows. A module that a layer shares with
    the model, as those of PyG's models share their activation, is one of the layer's.
    """
    inside = {
        inner
        for module in model.modules()
        if isinstance(module, MessagePassing | GlobalCalls) or type(module) in NORMS
        for inner in module.modules()
        if inner is not module
    }
    return {name: module for name, module in model.named_modules() if module not in inside}


def floats(value: Any) -> list[Tensor]:
    """Returns the dense floating point tensors of nested lists, tuples and dictionaries."""
    return [
        leaf
        for leaf in tensors_in(value)
        if leaf.is_floating_point() and leaf.layout == torch.strided and leaf.dim() > 0
    ]


def in_full(tensor: Tensor) -> Tensor:
    """Returns a tensor of the whole graph with all rows, without its gradient. Collective."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, NodeTensor) else tensor
    return whole.detach().clone()


class Recorder:
    """Keeps copies of what goes into and comes out of a model's modules, in order.

    With ``keep_results`` whole results as well, for :class:`StandIn`.
    """

    def __init__(self, model: nn.Module, keep_results: bool = False) -> None:
        self.events: dict[Key, Tensor] = {}
        self.results: dict[str, list[tuple[Any, Tensor]]] = {}
        self.active: list[str] = []
        self._model, self._keep = model, keep_results
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watch(self) -> Iterator[Recorder]:
        """Records for as long as it is open."""
        handles = []
        for name, module in watched(self._model).items():
            # Functions: where a model copies a module, its hooks stay those of this recorder.
            enter = lambda _, args, kwargs, name=name: self._enter(name, (args, kwargs))  # noqa: E731
            leave = lambda _, args, result, name=name: self._leave(name, result)  # noqa: E731
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, given: Any) -> None:
        self.active.append(name)
        self._note(name, "input", given)

    def _leave(self, name: str, result: Any) -> None:
        self._note(name, "output", result)
        self._calls[name] += 1
        if self._keep:
            kept = mapped(Tensor.detach, result), torch.get_rng_state()
            self.results.setdefault(name, []).append(kept)
        self.active.pop()

    def _note(self, name: str, what: str, value: Any) -> None:
        for number, tensor in enumerate(floats(value)):
            self.events[name, self._calls[name], what, number] = in_full(tensor)


class StandIn(nn.Module):
    """In place of a module that can't run: gives its results of one process, one per call.

    Random numbers go on from where they were after the call, as the module may have drawn some.
    """

    def __init__(self, results: list[tuple[Any, Tensor]]) -> None:
        super().__init__()
        self.results, self.calls = results, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result, state = self.results[(self.calls - 1) % len(self.results)]
        torch.set_rng_state(state)
        return result


# Comparing ####################################################################


@dataclass
class ModelPass:
    """Holds what a forward and backward pass leaves."""

    events: dict[Key, Tensor]
    outputs: list[Tensor]
    input_grads: dict[str, Tensor | None] = field(default_factory=dict)
    parameter_grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, list[tuple[Any, Tensor]]] = field(default_factory=dict)
    layers: dict[str, LayerReport] = field(default_factory=dict)
    hosting: dict[str, Any] = field(default_factory=dict)


def compare(
    model: nn.Module, expected: ModelPass, workers: Sequence[ModelPass], report: VerifyReport
) -> None:
    """Fills ``report`` with errors, and with the first place where numbers differ.

    Gradients and buffers count where the report holds no refused modules.
    """
    errors = {
        key: _error([w.events.get(key) for w in workers], whole)
        for key, whole in expected.events.items()
    }
    known = {key: value for key, value in errors.items() if value is not None}
    for k, whole in enumerate(expected.outputs):
        found = _error([w.outputs[k] if k < len(w.outputs) else None for w in workers], whole)
        report.output_error = max(report.output_error, float("inf") if found is None else found)
    scale = 0.0
    for kind, prefix in (("parameter_grads", ""), ("input_grads", "data.")):
        gradients = {} if report.refused else getattr(expected, kind)
        if prefix:  # Of an input that is not used one process has none.
            gradients = {name: g for name, g in gradients.items() if g is not None}
        scale = max([scale, *(_size(g) for g in gradients.values() if g is not None)])
        for name, gradient in gradients.items():
            each = [_distance(getattr(w, kind)[name], gradient, scale) for w in workers]
            report.gradient_errors[prefix + name] = max(each)
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


def _error(found: Sequence[Tensor | None], whole: Tensor) -> float | None:
    """Returns the largest error of the workers' tensors; ``None`` if not comparable."""
    scale = _size(whole)
    if any(one is None or one.shape != whole.shape for one in found):
        return None
    return max(_distance(one, whole, scale) for one in found)


def _size(tensor: Tensor) -> float:
    """Returns ``max |tensor|`` of what is finite, 0 of nothing."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _distance(a: Tensor | None, b: Tensor | None, scale: float | None = None) -> float:
    """Returns ``max |a - b|`` relative to ``max |b|`` or ``scale``; infinite if one is missing."""
    if a is None or b is None:
        return 0.0 if a is None and b is None else float("inf")
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    size = _size(b) if scale is None else scale
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    error = float(difference.max()) / max(size, 1e-300)
    return error if error == error else float("inf")


def _first_difference(model: nn.Module, errors: Mapping[Key, float], report: VerifyReport) -> str:
    """Returns where values first differ, in the order in which one process computes them."""
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
                f"code that computes it, in {owner}.forward(), gives other numbers on workers "
                "(of rows of x.to_local(), which are one worker's?)"
            )
        inner = [n for n in kinds if n.startswith(f"{name}." if name else "") and n != name]
        code = f": the code of {kinds[name]}.forward()" if inner else ""
        return f"the output of {title}{call} differs by {error:.1e}, and nothing before it{code}"
    for before, what, found in (
        ("outputs agree", "gradient of", report.gradient_errors),
        ("outputs and gradients agree", "buffer", report.buffer_errors),
    ):
        wrong = {name: error for name, error in found.items() if not error <= report.tolerance}
        if wrong:
            name = max(wrong, key=lambda n: wrong[n])
            return f"{before}, but the {what} '{name}' differs by {wrong[name]:.1e}"
    if report.output_error > report.tolerance:
        return f"the model's output differs by {report.output_error:.1e}"
    return ""
