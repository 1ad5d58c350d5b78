"""What :func:`pyg_sar.verify` found, as an object and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LayerReport:
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
        transforms_first: It maps source rows before it sums them (docs/transform_first.md).
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
class VerifyReport:
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

    @property
    def ok(self) -> bool:
        """Whether everything runs and is equal."""
        return not (self.refused or self.failure or self.first_difference)

    def __str__(self) -> str:
        lines = [
            f"{self.model} on {self.num_nodes:,} of {self.of_nodes:,} nodes, {self.num_edges:,} "
            f"edges: {self.num_workers} workers against one process, float64"
        ]
        if self.layers:
            lines += _table(self.layers)
        if not self.failure:
            lines.append(f"outputs: largest error {self.output_error:.1e}")
        if self.gradient_errors:
            lines.append(f"gradients: largest error {max(self.gradient_errors.values()):.1e}")
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
            _bytes(layer.received_bytes),
            f"{layer.resident_rows}/{layer.halo_rows}",
            f"{layer.output_error:.0e}",
            f"{layer.gradient_error:.0e}",
        ]
        for layer in layers
    ]
    widths = [max(len(row[k]) for row in cells) for k in range(len(_COLUMNS))]
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in cells]
    return ["  ".join(row).rstrip() for row in padded]


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
