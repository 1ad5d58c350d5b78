"""Learning-rate schedules as small objects: constant, cosine, step, plateau, and a warmup.

A schedule is asked once per epoch for the factor on the initial learning rate, and is told each new
validation value. Its whole state is a flat dictionary of numbers, so that a checkpoint holds it
without pickle. Every worker runs its own copy on the same global values, hence in step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

__all__ = ["SCHEDULES", "Constant", "Cosine", "Plateau", "Schedule", "Step", "Warmup"]

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
