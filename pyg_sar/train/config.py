"""Settings and records of the training loop, learning-rate schedules, and splits of the nodes.

A schedule is a small object. It is asked once per epoch for the factor on the initial learning
rate, and is told each new validation value. Its whole state is a flat dictionary of numbers, so
that a checkpoint holds it without pickle. Every worker runs its own copy on the same global
values, hence in step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch_geometric.data import Data

# Schedules ####################################################################

#: Names that :class:`pyg_sar.train.trainer.TrainConfig` takes.
SCHEDULES: tuple[str, ...] = ("none", "cosine", "step", "plateau")


class Schedule(Protocol):
    """What the training loop asks of a schedule."""

    def factor(self, epoch: int) -> float:
        """Factor on the initial learning rate in epoch ``epoch`` (counted from 0)."""

    def observe(self, value: float) -> None:
        """Takes note of a global validation value, higher being better."""

    def state_dict(self) -> dict[str, float]:
        """Everything that :meth:`factor` depends on besides the arguments."""

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what :meth:`state_dict` gave."""


class Constant:
    """The null schedule: factor 1 throughout."""

    def factor(self, epoch: int) -> float:
        return 1.0

    def observe(self, value: float) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        pass


class Cosine(Constant):
    r"""Half a cosine from 1 to ``floor`` over ``epochs`` epochs.

    .. math:: f(e) = f_{\min} + (1 - f_{\min}) \tfrac12 (1 + \cos(\pi e / E))

    Source: Loshchilov and Hutter, "SGDR" (ICLR 2017), without restarts.
    """

    def __init__(self, epochs: int, floor: float = 0.0) -> None:
        self.epochs = max(epochs, 1)
        self.floor = floor

    def factor(self, epoch: int) -> float:
        done = min(epoch / self.epochs, 1.0)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done))


class Step(Constant):
    r"""Times ``gamma`` every ``size`` epochs: :math:`f(e) = \gamma^{\lfloor e / s \rfloor}`."""

    def __init__(self, size: int, gamma: float) -> None:
        self.size = size
        self.gamma = gamma

    def factor(self, epoch: int) -> float:
        return float(self.gamma ** (epoch // self.size))


class Plateau(Constant):
    """Multiplied by ``gamma`` after ``patience`` evaluations without a new best value.

    Args:
        patience: Evaluations to wait.
        gamma: What the factor is multiplied by then.
        floor: The factor never falls below it.
    """

    def __init__(self, patience: int, gamma: float, floor: float = 1e-4) -> None:
        self.patience = patience
        self.gamma = gamma
        self.floor = floor
        self._factor = 1.0
        self._best = -math.inf
        self._waited = 0

    def factor(self, epoch: int) -> float:
        return self._factor

    def observe(self, value: float) -> None:
        if value > self._best:
            self._best = value
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            self._factor = max(self._factor * self.gamma, self.floor)
            self._waited = 0

    def state_dict(self) -> dict[str, float]:
        state: dict[str, float] = {"factor": self._factor, "waited": self._waited}
        # JSON has no infinity: a best value that was never seen is left out.
        if self._best > -math.inf:
            state["best"] = self._best
        return state

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._factor = float(state["factor"])
        self._waited = int(state["waited"])
        self._best = float(state.get("best", -math.inf))


class Warmup:
    r"""A linear ramp :math:`f(e) = (e + 1) / (w + 1)` for ``epochs`` epochs, then ``inner``."""

    def __init__(self, inner: Schedule, epochs: int) -> None:
        self.inner = inner
        self.epochs = epochs

    def factor(self, epoch: int) -> float:
        if epoch < self.epochs:
            return (epoch + 1) / (self.epochs + 1)
        return self.inner.factor(epoch - self.epochs)

    def observe(self, value: float) -> None:
        self.inner.observe(value)

    def state_dict(self) -> dict[str, float]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.inner.load_state_dict(state)


# Settings and records #########################################################

#: Names that :class:`TrainConfig` takes.
OPTIMIZERS: tuple[str, ...] = ("adam", "adamw", "sgd")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of a :class:`pyg_sar.train.trainer.Trainer`.

    Args:
        epochs: Steps to train; each sees the whole graph once.
        lr: Learning rate.
        optimizer: ``'adam'``, ``'adamw'`` or ``'sgd'``.
        weight_decay: L2 penalty (``adam``, ``sgd``) or decoupled decay (``adamw``), all parameters.
        schedule: ``'none'``, ``'cosine'`` (to 0 at the last epoch), ``'step'`` (times ``gamma``
            every ``step_size`` epochs), ``'plateau'`` (times ``gamma`` after ``step_size``
            evaluations without a better validation value).
        warmup: Epochs of a linear ramp before the schedule.
        step_size: See ``schedule``.
        gamma: See ``schedule``.
        label_smoothing: Share of each label spread over all classes, in ``[0, 1)``.
        clip_norm: Largest norm of all gradients together; larger ones are scaled down to it.
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
        monitor: What "better" means on the validation nodes: ``'accuracy'`` or ``'loss'``.
        patience: Stop after this many evaluations without a better validation value.
        restore_best: Whether ``Trainer.fit`` leaves the best weights in the model, not the last.
        split: The column of two-dimensional masks (``[num_nodes, num_splits]``).
        seed: Seeds each worker's random state (dropout) when training starts, differently on each;
            ``None`` leaves the random state as it is.

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
    monitor: Literal["accuracy", "loss"] = "accuracy"
    patience: int | None = None
    restore_best: bool = True
    split: int = 0
    seed: int | None = 0

    def __post_init__(self) -> None:
        _check(self.epochs >= 0, "epochs", self.epochs, "at least 0")
        _check(self.lr > 0 and math.isfinite(self.lr), "lr", self.lr, "a positive number")
        _check(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, _one_of(OPTIMIZERS))
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        _check(self.schedule in SCHEDULES, "schedule", self.schedule, _one_of(SCHEDULES))
        _check(self.warmup >= 0, "warmup", self.warmup, "at least 0")
        _check(self.step_size >= 1, "step_size", self.step_size, "at least 1")
        _check(0 < self.gamma <= 1, "gamma", self.gamma, "in (0, 1]")
        _check(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "in [0, 1)")
        clip = self.clip_norm
        _check(clip is None or clip > 0, "clip_norm", clip, "positive or None")
        _check(self.eval_every >= 1, "eval_every", self.eval_every, "at least 1")
        monitors = ("accuracy", "loss")
        _check(self.monitor in monitors, "monitor", self.monitor, _one_of(monitors))
        wait = self.patience
        _check(wait is None or wait >= 1, "patience", wait, "at least 1 or None")
        _check(self.split >= 0, "split", self.split, "at least 0")
        _check(self.seed is None or self.seed >= 0, "seed", self.seed, "at least 0 or None")

    def make_schedule(self) -> Schedule:
        """The learning-rate schedule that the settings describe."""
        schedule: Schedule = Constant()
        if self.schedule == "cosine":
            schedule = Cosine(self.epochs - self.warmup)
        elif self.schedule == "step":
            schedule = Step(self.step_size, self.gamma)
        elif self.schedule == "plateau":
            schedule = Plateau(self.step_size, self.gamma)
        return Warmup(schedule, self.warmup) if self.warmup else schedule


def _check(good: bool, argument: str, value: object, wanted: str) -> None:
    if not good:
        raise ValueError(f"Expected {argument!r} to be {wanted} (got {value!r})")


def _one_of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(map(repr, names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Global accuracy and mean cross entropy per split; ``None`` for a split without nodes."""

    train_accuracy: float | None
    val_accuracy: float | None
    test_accuracy: float | None
    train_loss: float | None
    val_loss: float | None
    test_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: Counted from 1.
        loss: The global training loss that the step was taken on (in training mode, before it).
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
class TrainResult:
    """What ``Trainer.fit`` returns, the same on every worker but for ``seconds``.

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


# Splits #######################################################################

SPLITS: tuple[str, ...] = ("train", "val", "test")


def split_nodes(data: Data, column: int = 0) -> dict[str, Tensor]:
    """The labelled nodes of each split.

    Args:
        data: With ``y`` (-1: no label), ``train_mask``, and ``val_mask``, ``test_mask`` where there
            are such nodes.
        column: Which split of two-dimensional masks.

    Returns:
        Node indices int64 for each of :data:`SPLITS`.

    Raises:
        ValueError: When labels or ``train_mask`` are missing or a mask has another shape or type.
    """
    labelled = node_labels(data) >= 0
    return {split: (_mask(data, split, column) & labelled).nonzero().view(-1) for split in SPLITS}


def node_labels(data: Data) -> Tensor:
    """``data.y`` as int64 ``[num_nodes]``.

    Raises:
        ValueError: When it is missing or does not hold one class per node.
    """
    labels = data.get("y")
    if not isinstance(labels, Tensor):
        raise ValueError("data.y is missing: node classification needs a label per node (-1: none)")
    if labels.dim() == 2 and labels.size(1) == 1:
        labels = labels.view(-1)
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            "Expected 'data.y' to hold one integer class per node, shape [num_nodes] or "
            f"[num_nodes, 1] (got {labels.dtype} {list(labels.shape)})"
        )
    return labels.long()


def _mask(data: Data, split: str, column: int) -> Tensor:
    name = f"{split}_mask"
    mask = data.get(name)
    if not isinstance(mask, Tensor):
        if split != "train":
            return torch.zeros(data.y.size(0), dtype=torch.bool, device=data.y.device)
        raise ValueError(
            "data.train_mask is missing: training needs to know which nodes' labels to use "
            "(torch_geometric.transforms.RandomNodeSplit makes masks)"
        )
    if mask.dtype != torch.bool or mask.dim() not in (1, 2) or len(mask) != data.y.size(0):
        raise ValueError(
            f"Expected 'data.{name}' to be bool of shape [{data.y.size(0)}] or "
            f"[{data.y.size(0)}, num_splits] (got {mask.dtype} {list(mask.shape)})"
        )
    if mask.dim() == 2:
        if column >= mask.size(1):
            raise ValueError(f"split {column}: data.{name} has {mask.size(1)} splits")
        mask = mask[:, column]
    return mask
