"""Settings and records of the training loop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from pyg_sar.files import check_argument as _check
from pyg_sar.files import check_whole
from pyg_sar.usage import OPTIMIZERS, SCHEDULES
from pyg_sar.wording import Shown, counted

#: Names that :class:`TrainConfig` takes.


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of a :class:`pyg_sar.train.trainer.Trainer`.

    Args:
        epochs: Steps to train; each sees the whole graph once.
        lr: Learning rate.
        optimizer: ``'adam'``, ``'adamw'`` or ``'sgd'``.
        weight_decay: L2 penalty (``adam``, ``sgd``) or decoupled decay (``adamw``), all parameters.
        schedule: ``'none'``, ``'cosine'`` (``CosineAnnealingLR`` to 0 at the last epoch),
            ``'step'`` (``StepLR``: times ``gamma`` every ``step_size`` epochs) or ``'plateau'``
            (``ReduceLROnPlateau``: times ``gamma`` after ``step_size`` evaluations without a better
            validation value); others are given to the ``Trainer``.
        warmup: Epochs of a linear ramp (``LinearLR``), which multiplies the schedule.
        step_size: See ``schedule``.
        gamma: See ``schedule``.
        label_smoothing: Share of each label spread over all classes, in ``[0, 1)``; of the default
            loss.
        clip_norm: Largest norm of all gradients together; larger ones are scaled down to it.
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
        monitor: The number that says what "better" means on the validation rows: ``'loss'``,
            ``'accuracy'`` or the name of a metric; by default the accuracy where there is one, else
            the loss.
        monitor_mode: ``'max'``: higher is better; ``'min'``: lower is. ``'auto'``: lower for the
            loss; for a metric as its ``higher_is_better`` says, or else higher.
        patience: Stop after this many evaluations without a better validation value.
        restore_best: Whether ``Trainer.fit`` leaves the best weights in the model, not the last.
        split: The column of two-dimensional masks (``[num_nodes, num_splits]``).
        seed: Seeds the random states (PyTorch's, NumPy's and Python's) of all workers alike when
            training starts; ``None`` leaves them as they are.

    Raises:
        ValueError: for a setting out of range.
    """

    epochs: int = 200
    lr: float = 0.01
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: float = 5e-4
    schedule: Literal["none", "cosine", "step", "plateau"] = "none"
    warmup: int = 0
    step_size: int = 50
    gamma: float = 0.5
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    eval_every: int = 1
    monitor: str | None = None
    monitor_mode: Literal["auto", "max", "min"] = "auto"
    patience: int | None = None
    restore_best: bool = True
    split: int = 0
    seed: int | None = 0

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            check_whole(name, getattr(self, name), least)
        for name in ("patience", "seed"):
            value, least = getattr(self, name), int(name == "patience")
            whole = isinstance(value, int) and not isinstance(value, bool)
            fits = value is None or (whole and least <= value < 2**63)
            _check(fits, name, value, f"a whole number from {least} to 2**63 - 1 or None")
        _check(_is_number(self.lr) and self.lr > 0, "lr", self.lr, "a positive number")
        decay, gamma, smoothing = self.weight_decay, self.gamma, self.label_smoothing
        _check(_is_number(decay) and decay >= 0, "weight_decay", decay, "a number of at least 0")
        _check(_is_number(gamma) and 0 < gamma <= 1, "gamma", gamma, "in (0, 1]")
        fits = _is_number(smoothing) and 0 <= smoothing < 1
        _check(fits, "label_smoothing", smoothing, "in [0, 1)")
        clip = self.clip_norm  # Infinity: the norm alone is measured.
        fits = clip is None or clip == math.inf or (_is_number(clip) and clip > 0)
        _check(fits, "clip_norm", clip, "positive or None")
        _check(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, _one_of(OPTIMIZERS))
        _check(self.schedule in SCHEDULES, "schedule", self.schedule, _one_of(SCHEDULES))
        named = isinstance(self.monitor, str) and self.monitor != ""
        _check(self.monitor is None or named, "monitor", self.monitor, "the name of a metric")
        modes = ("auto", "max", "min")
        _check(self.monitor_mode in modes, "monitor_mode", self.monitor_mode, _one_of(modes))


_WHOLE = {"epochs": 0, "warmup": 0, "step_size": 1, "eval_every": 1, "split": 0}
"""Settings that are whole numbers, and the least of each."""


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(map(repr, names))


Scores = dict[str, float | None]
"""Numbers of an evaluation by name: ``'val_loss'``, ``'test_accuracy'``, ...

``None`` for a split without rows, and where a number is not finite.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRecord(Shown):
    """One epoch.

    Attributes:
        epoch: Counted from 1.
        loss: The training loss that the step was taken on (in training mode, before it).
        lr: The learning rate of the step.
        grad_norm: Euclidean norm of all gradients before clipping; ``None`` when not clipping.
        seconds: Duration of step and evaluation on this worker.
        scores: Evaluation after the step, in the epochs that have one.
    """

    epoch: int
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    scores: Scores | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult(Shown):
    """The result of ``Trainer.fit``, the same on every worker except for ``seconds``.

    Attributes:
        epochs: Epochs done in all, those before a resume included.
        losses: The training loss of each of them.
        best_epoch: The epoch with the best validation value; the last one without validation nodes.
        best: The scores of that epoch.
        final: The scores of the last evaluation.
        stopped_early: Whether ``patience`` ended the training.
        seconds: Duration of this call.
    """

    epochs: int
    losses: list[float]
    best_epoch: int
    best: Scores | None
    final: Scores | None
    stopped_early: bool
    seconds: float

    def __str__(self) -> str:
        if not self.losses:
            return "nothing to train"
        first = f"{counted(self.epochs, 'epochs')}, last loss {self.losses[-1]:.6f}"
        lines = [first + (", stopped early" if self.stopped_early else "")]
        if self.best is not None:
            names = dict.fromkeys(name.partition("_")[2] for name in self.best)
            for metric in [name for name in names if name != "loss"] or ["loss"]:
                values = ((s, self.best.get(f"{s}_{metric}")) for s in ("train", "val", "test"))
                scores = "  ".join(f"{split} {v:.4f}" for split, v in values if v is not None)
                of = "" if metric == "accuracy" else f" {metric}:"
                lines.append(f"best epoch {self.best_epoch}:{of} {scores}")
        return "\n".join(lines)
