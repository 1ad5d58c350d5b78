"""Compares a checkpoint with the run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pyg_sar.coded import from_json
from pyg_sar.errors import CheckpointError
from pyg_sar.train.checkpoint import Checkpoint
from pyg_sar.train.graph_digest import DIFFERENCES
from pyg_sar.train.schedules import cycles_momentum

#: Settings that a resumed run may change without leaving the loss curve it continues.
_FREE = frozenset({"epochs", "patience", "restore_best"})

_OF_SCHEDULE = ("schedule", "warmup", "step_size", "gamma", "scheduler")


def check_same_run(
    name: str, saved: Checkpoint, now: Mapping[str, Any], *, allow_changes: bool
) -> None:
    """Compares the settings of a trainer with those that a checkpoint was saved with.

    Args:
        name: The file.
        saved: Its content.
        now: The trainer's settings, as values of JSON.
        allow_changes: Go on with others.

    Raises:
        CheckpointError: For a file of something else, or other settings.
    """
    state = saved.state
    if "counts" not in state or "config" not in state:
        raise CheckpointError(f"{name!r} was not saved by a Trainer")
    before = state["config"]
    free = _FREE - ({"epochs"} if now["schedule"] == "cosine" else set())
    changes = [
        f"{key}={before.get(key)!r} is now {value!r}"
        for key, value in now.items()
        if key not in free and before.get(key) != value
    ]
    if changes and not allow_changes:
        raise CheckpointError(
            f"{name!r} was saved with other settings: {', '.join(changes)}; give the same, or "
            "pass allow_changes=True (--allow-changes)"
        )


def check_same_graph(
    name: str,
    saved: Checkpoint,
    graph: Mapping[str, Any] | None,
    counts: Sequence[Sequence[int]],
    *,
    allow_changes: bool,
) -> None:
    """Compares the graph of a trainer with that of a checkpoint.

    Args:
        name: The file.
        saved: Its content.
        graph: The digest of this run's graph, if there is one.
        counts: Rows of targets of each worker, then those of each split.
        allow_changes: Go on with another number of parts where nothing tells the graphs apart.

    Raises:
        CheckpointError: For another graph, and for rows of nodes that can't be found in it.
    """
    before, old, size = saved.state.get("graph"), saved.state["counts"], len(counts)
    same_size = saved.world_size == size
    if graph is not None and before is not None:
        other = [text for key, text in DIFFERENCES.items() if graph[key] != before[key]]
        moved = graph["owners"] != before["owners"]
    else:
        moved = not same_size or old != counts
        other = ["nodes of the workers"] if moved and same_size else []
    if other:
        raise CheckpointError(
            f"{name!r} belongs to another graph or other splits: its workers held "
            f"{_shares(old)}, these hold {_shares(counts)}; other {', '.join(other)}"
        )
    if moved and (graph is None or before is None) and not allow_changes:
        raise CheckpointError(
            f"{name!r} is of {saved.world_size} parts, this run has {size}, and it can't be shown "
            "that they are of the same graph: 'data' must have 'n_id' and 'edge_index' (as "
            "load_partition gives them) when saving and now. Start workers that host "
            f"{saved.world_size} parts, or pass "
            "allow_changes=True (--allow-changes)"
        )
    local = [parameter for parameter, by_id in saved.owned.items() if not by_id]
    if moved and local:
        raise CheckpointError(
            f"{name!r} is of another partition of the graph, and holds the rows of "
            f"'{local[0]}' without the global ids of its nodes: go on with the same partition, or "
            "set 'n_id' of its module to data.n_id before saving"
        )


def _shares(counts: Sequence[Sequence[int]]) -> str:
    """Returns the rows and the training rows of each worker as text."""
    return f"{[row[0] for row in counts]} nodes, {[row[1] for row in counts]} to train on"


def resume_schedulers(
    schedulers: Sequence[LRScheduler],
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    initial: Sequence[float],
    state: Mapping[str, Any],
    now: Mapping[str, Any],
) -> None:
    """Sets the options of the optimizer, and the schedulers, after the optimizer's state is loaded.

    The options are those of this run. Where the schedule is the saved one it goes on, and the
    learning rates are the saved ones, times what a first one has changed by; another schedule
    begins.

    Args:
        schedulers: This run's.
        optimizer: With the options of the checkpoint.
        options: Of each group in this run.
        initial: This run's first learning rate of each group.
        state: The checkpoint's.
        now: This run's settings.
    """
    keys = [*_OF_SCHEDULE, *(["epochs"] if now["schedule"] == "cosine" else [])]
    before = state["config"]
    goes_on = all(before.get(key) == now[key] for key in keys)
    cycles = any(cycles_momentum(scheduler) for scheduler in schedulers)
    written = ("momentum", "betas") if cycles else ()
    groups = zip(optimizer.param_groups, options, initial, state["initial_lrs"], strict=True)
    for group, option, first, old in groups:
        saved = dict(group)
        group.update(option)
        if goes_on and schedulers:
            group["lr"] = saved["lr"] if first == old else saved["lr"] * first / old
            group |= {key: saved[key] for key in written if key in saved}
    if goes_on:
        for scheduler, values in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(from_json(values))
            if hasattr(scheduler, "base_lrs") and list(initial) != state["initial_lrs"]:
                scheduler.base_lrs = list(initial)
