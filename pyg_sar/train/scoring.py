"""Metrics over the rows of all workers, computed by whatever computes them for one process.

[Note: on rank 0] A metric that is no sum over rows (an area under a curve, an F1, a rank) needs all
rows in one place: those of a split travel to rank 0, in the whole graph's order, which hands them
to the metric once and sends the number to all workers. So any function will do, and the number is
the one that it gives in one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.reduction.metrics import gather_selected

Metric = Any
"""``metric(pred, target)`` gives a number; or an object with ``update(pred, target)``,
``compute()`` and ``reset()``, as those of torchmetrics, whose ``compute()`` gives a number, or a
dictionary of numbers."""


def check_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Returns the metrics by name.

    Raises:
        TypeError: When one is neither a function nor an object as torchmetrics has them.
        ValueError: For the name ``'loss'``, which is taken.
    """
    for name, metric in (metrics or {}).items():
        if name == "loss":
            raise ValueError("'loss' is the name of the loss: give the metric another one")
        if not callable(metric) and not _accumulates(metric):
            raise TypeError(
                f"Expected metrics[{name!r}] to be a function of (pred, target), or to have update"
                f"() and compute() (got {type(metric).__name__})"
            )
    return dict(metrics or {})


def higher_is_better(metric: Metric) -> bool:
    """Returns what a metric says of itself; true if it says nothing."""
    return getattr(metric, "higher_is_better", None) is not False


def _accumulates(metric: Metric) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def score(
    metrics: Mapping[str, Metric],
    pred: Tensor,
    target: Tensor,
    ids: Tensor | None,
    comm: Communicator,
) -> dict[str, float | None]:
    """Returns the metrics of all workers' rows, the same on every worker. Collective.

    Args:
        metrics: By name.
        pred: This worker's rows of the model's output, ``[n, *]``.
        target: Their targets.
        ids: Where these rows are in the whole graph's order, int64 ``[n]``.
        comm: The workers.

    Returns:
        Numbers by name; of a metric that gives several ``name_key``. ``None`` where there is no
        row, or the number is not finite.

    Raises:
        ValueError: On every worker, when a metric fails or gives no number, or a worker doesn't
            know its rows' order.
    """
    if not metrics:
        return {}
    if ids is None and comm.world_size == 1:
        ids = torch.arange(len(pred), device=pred.device)
    known = comm.all_gather_object(ids is not None)
    if ids is None or not all(known):
        raise ValueError(
            f"Rank {known.index(False)} does not know its targets' order in the whole graph, which "
            "metrics see: 'data' must have 'n_id' (of nodes), 'e_id' or 'NAME_index_place' (of "
            "edges), as pyg_sar.load_partition gives them"
        )
    rows = [gather_selected(values, ids, comm) for values in (pred.detach(), target)]
    found, problem = {}, ""
    if rows[0] is not None and rows[1] is not None:
        try:
            found = _measure(metrics, rows[0], rows[1])
        except Exception as error:
            if comm.world_size == 1:
                raise
            # Whatever happens in a user's function: the others wait for its number.
            problem = f"{type(error).__name__}: {error}"
    problem, found = comm.broadcast_object([problem, found])
    if problem:
        raise ValueError(f"A metric failed on rank 0, which computes them: {problem}")
    return found


def _measure(
    metrics: Mapping[str, Metric], pred: Tensor, target: Tensor
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, metric in metrics.items():
        if not len(pred):
            found[name] = None
            continue
        value = _accumulated(metric, pred, target) if _accumulates(metric) else metric(pred, target)
        if isinstance(value, Mapping):
            found |= {f"{name}_{key}": _number(f"{name}_{key}", v) for key, v in value.items()}
        else:
            found[name] = _number(name, value)
    return found


def _accumulated(metric: Metric, pred: Tensor, target: Tensor) -> Any:
    for part in metric.modules() if isinstance(metric, torch.nn.Module) else [metric]:
        if hasattr(part, "distributed_available_fn"):
            part.distributed_available_fn = _alone  # It has all rows: it must not wait for others.
    metric.reset()
    metric.update(pred, target)
    value = metric.compute()
    metric.reset()
    return value


def _alone() -> bool:
    return False


def _number(name: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"Expected metrics[{name!r}] to give one number (got {type(value).__name__}): {error}"
        ) from None
    return number if math.isfinite(number) else None
