"""The names that options and arguments may have, and the demo's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

METHODS = ("balanced", "metis", "coarsened", "geometric", "random", "contiguous")
LEVELS = ("node", "edge", "graph")
OPTIMIZERS: tuple[str, ...] = ("adam", "adamw", "sgd")
SCHEDULES: tuple[str, ...] = ("none", "cosine", "step", "plateau")
LOSSES: tuple[str, ...] = ("cross_entropy", "bce", "mse", "mae")

#: How halo rows may travel.
WIRES: tuple[str, ...] = ("exact", "bfloat16", "float16", "int8", "int4", "int2")

#: The models of the command line.
MODELS: tuple[str, ...] = ("gat", "gatv2", "sage", "gcn", "gin")

#: Normalisations that :func:`stock_model` takes: none, ``BatchNorm``, ``LayerNorm`` of each row.
NORMS: tuple[str, ...] = ("none", "batch", "layer")

OF_CLASSES = {"accuracy": "accuracy", "auc": "auroc", "ap": "average_precision", "f1": "f1_score"}
OF_NUMBERS = {"mae": "mean_absolute_error", "mse": "mean_squared_error", "r2": "r2_score"}

#: Metrics by name, of which all but the loss and the accuracy of classes are torchmetrics'.
METRICS: tuple[str, ...] = ("loss", *OF_CLASSES, *OF_NUMBERS)

#: Workers of ``pyg-sar run``, where nothing else is said.
SCRIPT_WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """The settings of the demo; see ``pyg-sar demo --help``."""

    nodes: int = 20_000
    workers: int = 4
    epochs: int = 20
    mode: int = 1
    prefetch: Literal[0, 1] = 1
    seed: int = 0
    out: str = "runs/demo"
