"""Arguments of a ``Trainer``, which are checked here, and schedulers of the learning rate.

Schedulers are PyTorch's own, and their state is JSON. Every worker runs its own copies on the same
values, hence in step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    StepLR,
)
from torch_geometric.data.data import BaseData

from pyg_sar.comm.group import current
from pyg_sar.files import check_type
from pyg_sar.train.config import TrainConfig
from pyg_sar.train.flow import NeighborSampling
from pyg_sar.train.targets import SPLITS

_NEEDED: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "a torch.nn.Module"),
    "data": ((BaseData, list, tuple), "a Data, as load_partition gives it, or a list of such"),
    "forward": (Callable, "a function of model and data"),
    "callbacks": (Sequence, "a list of callbacks"),
}
_CALLBACK = ("on_start", "on_epoch", "on_end", "close")
_OPTIONAL: dict[str, tuple[Any, str]] = {
    "config": (TrainConfig, "a TrainConfig or None"),
    "metrics": (Mapping, "a dict of functions by name, or None"),
    "splits": (Mapping, "a dict of attributes by split, or None"),
    "flow": (BaseData, "what message_flow_graphs gives, or None"),
    "sampler": (NeighborSampling, "a NeighborSampling or None"),
    "evaluate_on": (Mapping, "a dict of graphs by split, or None"),
    "optimizer": (torch.optim.Optimizer, "an optimizer that was made, or None"),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises where an argument of a ``Trainer`` can't be meant; errors name it."""
    for name, (kind, wanted) in _NEEDED.items():
        check_type(name, given[name], kind, wanted)
    for name, (kind, wanted) in _OPTIONAL.items():
        if given[name] is not None:
            check_type(name, given[name], kind, wanted)
    for k, one in enumerate(given["callbacks"]):
        missing = [name for name in _CALLBACK if not callable(getattr(one, name, None))]
        if missing:
            raise TypeError(
                f"callbacks[{k}]={one!r} has no {missing[0]}(): derive its class from "
                "pyg_sar.train.Callback"
            )
    unknown = sorted(set(given["splits"] or ()) - set(SPLITS))
    if unknown:
        raise ValueError(f"Expected 'splits' to name {', '.join(SPLITS)} (got {unknown})")
    if given["flow"] is not None and "input_id" not in given["flow"]:
        raise ValueError("'flow' has no 'input_id': make it by message_flow_graphs")
    if given["optimizer"] is not None:
        _check_optimizer(given["optimizer"], given["model"])


def as_list(name: str, graphs: Any) -> list[Any]:
    """Returns a graph, or several, as a list."""
    found = list(graphs) if isinstance(graphs, list | tuple) else [graphs]
    for k, graph in enumerate(found):
        check_type(f"{name}[{k}]" if len(found) > 1 else name, graph, BaseData, "a Data")
    if not found:
        raise ValueError(f"'{name}' has no graph{current().place}: give each replica one at least")
    return found


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if own and not own & held:
        raise ValueError(
            "'optimizer' holds no parameter of 'model', which would not be trained: make it for "
            "model.parameters()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer=LBFGS asks for a closure, which the Trainer does not give: write the loop "
            "yourself, optimizer.step(closure)"
        )


# Schedulers ###################################################################

_FLOOR = 1e-4  # Of the learning rate that a plateau leaves, as a share of the first one.


def make_schedulers(
    config: TrainConfig, optimizer: torch.optim.Optimizer, higher_is_better: bool
) -> list[LRScheduler]:
    """Returns the schedulers that the settings name; all of them make a step after each epoch.

    The learning rates of the optimizer's groups are the first ones. ``higher_is_better`` is of the
    validation value that a plateau looks at.
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
    """Returns a scheduler that the user gave, or makes it by the function that was given.

    One of another optimizer is refused, one besides those that ``config`` names, and one that waits
    for values to fall where higher ones are better.
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
