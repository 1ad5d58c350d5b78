"""Schedulers of the learning rate: PyTorch's own, and their state as JSON.

Every worker runs its own copies on the same global values, hence in step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    StepLR,
)

from pyg_sar.train.config import TrainConfig

_FLOOR = 1e-4  # Of the learning rate that a plateau leaves, as a share of the first one.


def make_schedulers(
    config: TrainConfig, optimizer: torch.optim.Optimizer, higher_is_better: bool
) -> list[LRScheduler]:
    """Returns the schedulers that the settings name; all of them make a step after each epoch.

    Args:
        config: The settings.
        optimizer: The learning rates of its groups are the first ones.
        higher_is_better: Of the validation value that a plateau looks at.
    """
    schedulers: list[LRScheduler] = []
    floors = [group["lr"] * _FLOOR for group in optimizer.param_groups]
    if config.warmup:
        first = 1 / (config.warmup + 1)
        schedulers.append(LinearLR(optimizer, first, 1.0, total_iters=config.warmup))
    if config.schedule == "cosine":
        schedulers.append(CosineAnnealingLR(optimizer, max(config.epochs, 1)))
    elif config.schedule == "step":
        schedulers.append(StepLR(optimizer, config.step_size, config.gamma))
    elif config.schedule == "plateau":
        schedulers.append(
            ReduceLROnPlateau(
                optimizer,
                mode="max" if higher_is_better else "min",
                factor=config.gamma,
                patience=config.step_size - 1,
                threshold=0.0,
                threshold_mode="abs",
                min_lr=floors,
                eps=0.0,
            )
        )
    return schedulers


def check_scheduler(
    scheduler: Any, config: TrainConfig, optimizer: torch.optim.Optimizer, higher_is_better: bool
) -> LRScheduler:
    """Returns a scheduler that the user gave.

    Raises:
        TypeError: When it is no scheduler of ``torch.optim.lr_scheduler``.
        ValueError: When it is another optimizer's, ``config`` names one as well, or it waits for
            values to fall where higher ones are better.
    """
    if callable(scheduler) and not isinstance(scheduler, LRScheduler):
        scheduler = scheduler(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            "Expected 'scheduler' to be one of torch.optim.lr_scheduler, or a function that makes "
            f"one for an optimizer (got {type(scheduler).__name__})"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            "'scheduler' belongs to another optimizer: pass that optimizer too (optimizer=...), or "
            "a function, scheduler=lambda optimizer: StepLR(optimizer, 30)"
        )
    if config.schedule != "none" or config.warmup:
        raise ValueError(
            f"config.schedule={config.schedule!r} and config.warmup={config.warmup} name "
            "schedulers besides 'scheduler': leave one of them out"
        )
    wanted = "max" if higher_is_better else "min"
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != wanted:
        raise ValueError(
            f"Expected 'scheduler' to have mode={wanted!r}, as the monitored validation value (got "
            f"{scheduler.mode!r}); config.monitor and config.monitor_mode choose the value"
        )
    return scheduler


def step(scheduler: LRScheduler, value: float | None) -> None:
    """Ends an epoch; ``value`` is the new validation value, where there is one."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    elif value is not None:
        scheduler.step(value)


def cycles_momentum(scheduler: LRScheduler) -> bool:
    """Returns whether a scheduler writes momenta, besides learning rates."""
    return bool(getattr(scheduler, "cycle_momentum", False))
