"""Compares a model's rows with their targets: the loss, the accuracy, any metric.

Predictions and targets are tensors of the whole graph: a metric that is a sum over rows sends a
number, and one that needs all rows in one place (an area under a curve) gathers them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator
from pyg_sar.tensors import NodeTensor
from pyg_sar.tensors.operands import wrap
from pyg_sar.tensors.rows import every_rows
from pyg_sar.train.config import Scores, TrainConfig
from pyg_sar.train.objective import Objective
from pyg_sar.train.targets import SPLITS, Targets, find_targets
from pyg_sar.wording import counted

Metric = Any
"""``metric(pred, target)`` gives a number; or an object with ``update(pred, target)``,
``compute()`` and ``reset()``, as those of torchmetrics, whose ``compute()`` gives a number, or a
dictionary of numbers."""


def check_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Returns the metrics by name, of objects a copy: parts of one process would share them."""
    for name, metric in (metrics or {}).items():
        if name == "loss":
            raise ValueError("'loss' is the name of the loss: give the metric another one")
        if not callable(metric) and not _accumulates(metric):
            raise TypeError(
                f"Expected metrics[{name!r}] to be a function of (pred, target), or to have update"
                f"() and compute() (got {type(metric).__name__})"
            )
    return {n: copy.deepcopy(m) if _accumulates(m) else m for n, m in (metrics or {}).items()}


def _accumulates(metric: Metric) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def score(metrics: Mapping[str, Metric], pred: Tensor, target: Tensor) -> dict[str, float | None]:
    """Returns the metrics of predictions ``[n, *]`` and their targets: numbers by name.

    Of a metric that gives several they are named ``name_key``. ``None`` where there is no row, or
    the number is not finite.
    """
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
            # It has all rows: it must not wait for others.
            part.distributed_available_fn = lambda: False
    metric.reset()
    metric.update(pred, target)
    value = metric.compute()
    metric.reset()
    return value


def _number(name: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"Expected metrics[{name!r}] to give one number (got {type(value).__name__}): {error}"
        ) from None
    return number if math.isfinite(number) else None


Forward = Callable[[nn.Module, Data], Tensor]


def over_replicas(rows: Tensor, comm: Communicator) -> Tensor:
    """Returns rows of a tensor of the whole graph, ``[n, *]``, of all replicas one after the other.

    Each worker holds those of its part in every replica. Collective; without a gradient.
    """
    if comm.across is None:
        return rows
    if not isinstance(rows, NodeTensor):
        return torch.cat(every_rows(rows, comm.across))
    own = torch.cat(every_rows(rows.to_local(), comm.across))
    return wrap(own, rows.rows.of_replicas(comm.across), 0)


Graph = tuple[Data, Targets, tuple[str, ...]]
"""A graph, its targets, and the splits that are evaluated on it."""


class Evaluation:
    """The graphs, targets and metrics of a training. Collective.

    Scores are of the rows of all graphs, and of all replicas, together.

    ``data`` are the graphs to train on, the first of ``graphs``; ``others`` those for ``'val'`` and
    ``'test'``. ``targets`` are those of the first graph, ``totals`` the rows of each split of all
    replicas; ``classifies`` is true where targets are classes.
    """

    def __init__(
        self,
        data: Sequence[Data],
        others: Mapping[str, Sequence[Data]],
        *,
        target: str,
        splits: Mapping[str, str] | None,
        column: int,
        objective: Objective,
        metrics: Mapping[str, Metric],
        comm: Communicator,
    ) -> None:
        self.target, self.objective, self.metrics, self.comm = target, objective, metrics, comm
        options: dict[str, Any] = {"column": column, "of_classes": objective.of_classes}
        options["probabilities"] = not objective.default
        self.graphs = _graphs(data, others, target, splits, options)
        self.targets = self.graphs[0][1]
        everything = [targets for _, targets, _ in self.graphs]
        floats = any(targets.values.is_floating_point() for targets in everything)
        self.classifies = objective.of_classes and not floats
        top = [int(t.values.max()) for t in everything if self.classifies and len(t.values)]
        self._num_classes = 1 + max(top, default=-1)
        for k, targets in enumerate(everything[: len(data)]):
            if targets.counts["train"] == 0:
                mask = (splits or {}).get("train", "train_mask")
                which = f"[{k}]" if len(data) > 1 else ""
                raise ValueError(f"data{which}.{mask} holds no labelled node{comm.place}")
        own = [sum(t.counts[s] for t in everything) for s in SPLITS]
        if comm.across is not None:
            own = [sum(column) for column in zip(*comm.across.all_gather_object(own), strict=True)]
        self.totals = dict(zip(SPLITS, own, strict=True))

    def monitored(self, config: TrainConfig) -> tuple[str, bool]:
        """Returns the name of the validation value, and whether higher ones are better."""
        known = ["loss", *(["accuracy"] if self.classifies else []), *self.metrics]
        name = config.monitor or ("accuracy" if "accuracy" in known else "loss")
        metric = self.metrics.get(name)
        if name not in known:  # One of several numbers of a metric.
            metric = next((m for n, m in self.metrics.items() if name.startswith(f"{n}_")), None)
            if metric is None:
                raise ValueError(f"Expected 'monitor' to be one of {known} (got {name!r})")
        higher = name != "loss" and (getattr(metric, "higher_is_better", None) is not False)
        if config.monitor_mode != "auto":
            higher = config.monitor_mode == "max"
        return name, higher

    def predict(self, forward: Forward, model: nn.Module, number: int = 0) -> Tensor:
        """Returns the model's rows of a graph, by its number."""
        data, targets, _ = self.graphs[number]
        out, rows = forward(model, data), len(targets.values)
        if out.dim() == 0 or out.size(0) != rows or (self.classifies and out.dim() < 2):
            wanted = f"[{rows}, {'num_classes' if self.classifies else '*'}]"
            raise ValueError(
                f"The model must return scores of shape {wanted}, a row for each of data."
                f"{self.target} (got {list(out.shape)} on rank {self.comm.rank})"
            )
        if self.classifies and out.size(1) < self._num_classes:
            raise ValueError(
                f"The model returns scores for {counted(out.size(1), 'classes')}, "
                f"data.{self.target} holds labels up to {self._num_classes - 1}"
            )
        return out

    @torch.no_grad()
    def scores(self, forward: Forward, model: nn.Module) -> Scores:
        """Returns loss and metrics of each split, the same on every worker. Collective.

        Where a loss or a metric is another number on some workers, all of them raise
        ``ValueError``.
        """
        found: Scores = {}
        measured: Scores = {}
        selected: dict[str, list[tuple[Tensor, Tensor]]] = {split: [] for split in SPLITS}
        for k, (_, targets, splits) in enumerate(self.graphs):
            out = self.predict(forward, model, k)  # Of one graph at a time.
            for split in splits:
                if self.totals[split]:
                    selected[split].append((out[targets.masks[split]], targets.select(split)))
        for split, pairs in selected.items():
            if not self.totals[split]:
                found |= {f"{split}_accuracy": None} if self.classifies else {}
                found[f"{split}_loss"] = None
                measured |= {f"{split}_{name}": None for name in self.metrics}
                continue
            pred, target = (
                over_replicas(torch.cat(rows) if len(rows) > 1 else rows[0], self.comm)
                for rows in zip(*pairs, strict=True)
            )
            values = score(self.metrics, pred, target)
            measured |= {f"{split}_{name}": value for name, value in values.items()}
            if self.classifies:
                right = int((pred.argmax(dim=1) == target).sum())
                found[f"{split}_accuracy"] = right / self.totals[split]
            loss = float(self.objective.evaluated(pred, target))
            found[f"{split}_loss"] = loss if math.isfinite(loss) else None
        if self.metrics or not self.objective.default:
            self._check_alike(found | measured)
        return found | measured

    def _check_alike(self, scores: Scores) -> None:
        """Raises where workers have other numbers, as of their own rows alone."""
        everyone = self.comm.from_everyone(scores)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{name!r} is {value} on rank 0, {theirs.get(name)} on rank {rank}: losses "
                        "and metrics are called on every worker, with tensors of the whole graph; "
                        "nothing in them may depend on the rank (pred.to_local(), say)"
                    )


def _graphs(
    data: Sequence[Data],
    others: Mapping[str, Sequence[Data]],
    target: str,
    splits: Mapping[str, str] | None,
    options: dict[str, Any],
) -> list[Graph]:
    unknown = set(others) - {"val", "test"}
    if unknown:
        raise ValueError(f"'evaluate_on' is for 'val' and 'test' (got {sorted(unknown)})")
    own = [find_targets(one, target, splits=splits, **options) for one in data]
    for split in others:
        if any(targets.counts[split] for targets in own):
            raise ValueError(
                f"'data' and evaluate_on[{split!r}] both hold {split} rows: leave one of them out"
            )
    rest = tuple(split for split in SPLITS if split not in others)
    graphs: list[Graph] = [(one, found, rest) for one, found in zip(data, own, strict=True)]
    for split, several in others.items():
        for other in several:
            graphs.append((other, find_targets(other, target, whole=split, **options), (split,)))
    return graphs
