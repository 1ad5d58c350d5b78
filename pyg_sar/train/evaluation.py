"""Compares a model's rows with their targets, on all workers: the loss, the accuracy, any metric.

[Note: on rank 0] A metric that is no sum over rows (an area under a curve, an F1, a rank) needs all
rows in one place: those of a split travel to rank 0, in the whole graph's order, which hands them
to the metric once and sends the number to all workers. So any function will do, and the number is
the one that it gives in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator
from pyg_sar.reduction.metrics import gather_selected
from pyg_sar.tensors import NodeTensor, to_local
from pyg_sar.train.config import Scores, TrainConfig
from pyg_sar.train.objective import Objective
from pyg_sar.train.own_rows import own_rows
from pyg_sar.train.targets import MASKS, SPLITS, Targets, find_targets
from pyg_sar.wording import counted

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


Forward = Callable[[nn.Module, Data], Tensor]

Graph = tuple[Data, Targets, tuple[str, ...]]
"""A graph, its targets, and the splits that are evaluated on it."""


class Evaluation:
    """The graphs, targets and metrics of a training. Collective.

    Args:
        data: This worker's part of the graph to train on.
        others: Other graphs for ``'val'`` and ``'test'``.
        target: The attribute that holds the targets.
        splits: The mask or list of rows of each split.
        column: Which split of two-dimensional masks.
        objective: The loss.
        metrics: Metrics by name.
        comm: The workers.

    Attributes:
        graphs: The first one is the one to train on.
        part: This worker's rows of it.
        counts: Rows of targets, then those of each split, of each worker; they tell partitions
            apart.
        totals: Rows of each split on all workers.
        classifies: Is true where targets are classes.

    Raises:
        ValueError: on every worker, for missing or ill-shaped targets or masks, or when there is no
            training row on any worker.
    """

    def __init__(
        self,
        data: Data,
        others: Mapping[str, Data],
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
        problem: str | None = None
        self.graphs: list[Graph] = []
        names = (splits or (MASKS if target == "y" else {})).values()
        try:
            self.part = own_rows(data, target, names)
            self.graphs = _graphs(data, self.part, others, target, splits, options)
        except ValueError as error:
            problem = str(error)
        problems = comm.all_gather_object(problem)
        for rank, text in enumerate(problems):
            if text is not None:
                everywhere = problems.count(text) == comm.world_size
                raise ValueError(text if everywhere else f"{text} (rank {rank})")
        self._count((splits or {}).get("train", "train_mask"))

    def _count(self, mask: str) -> None:
        everything = [targets for _, targets, _ in self.graphs]
        floats = any(targets.values.is_floating_point() for targets in everything)
        classifies = self.objective.of_classes and not floats
        top = [int(t.values.max()) for t in everything if classifies and t.values.numel()]
        own = [sum(len(t.values) for t in everything)]
        own += [sum(len(t.index[split]) for t in everything) for split in SPLITS]
        gathered = self.comm.all_gather_object([*own, max(top, default=-1), classifies])
        self.counts: list[list[int]] = [row[:-2] for row in gathered]
        self._num_classes = 1 + max(row[-2] for row in gathered)
        self.classifies = all(row[-1] for row in gathered)
        columns = [sum(column) for column in zip(*self.counts, strict=True)][1:]
        self.totals = dict(zip(SPLITS, columns, strict=True))
        if self.totals["train"] == 0:
            raise ValueError(f"data.{mask} holds no labelled node on any worker")

    def monitored(self, config: TrainConfig) -> tuple[str, bool]:
        """Returns the name of the validation value, and whether higher ones are better.

        Raises:
            ValueError: When there is no such value.
        """
        known = ["loss", *(["accuracy"] if self.classifies else []), *self.metrics]
        name = config.monitor or ("accuracy" if "accuracy" in known else "loss")
        metric = self.metrics.get(name)
        if name not in known:  # One of several numbers of a metric.
            metric = next((m for n, m in self.metrics.items() if name.startswith(f"{n}_")), None)
            if metric is None:
                raise ValueError(f"Expected 'monitor' to be one of {known} (got {name!r})")
        higher = name != "loss" and (metric is None or higher_is_better(metric))
        if config.monitor_mode != "auto":
            higher = config.monitor_mode == "max"
        return name, higher

    def training_rows(self, forward: Forward, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Returns the model's rows, and targets, of this worker's training split."""
        data, targets, _ = self.graphs[0]
        out = self._predict(forward, model, data, targets)[targets.index["train"]]
        return out, self.training_targets()

    def training_targets(self) -> Tensor:
        """Returns the targets of this worker's training split."""
        return self.graphs[0][1].select("train")

    def _predict(self, forward: Forward, model: nn.Module, data: Data, targets: Targets) -> Tensor:
        out, rows, rank = forward(model, data), len(targets.values), self.comm.rank
        if isinstance(out, NodeTensor):
            values = data.get(self.target)
            fits = isinstance(values, NodeTensor) and values.rows.total == out.rows.total
            out = to_local(out, values.rows if fits else out.rows, 0)
        if out.dim() == 0 or out.size(0) != rows or (self.classifies and out.dim() < 2):
            wanted = f"[{rows}, {'num_classes' if self.classifies else '*'}]"
            raise ValueError(
                f"The model must return scores of shape {wanted}, a row for each of data."
                f"{self.target} (got {list(out.shape)} on rank {rank})"
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

        The workers' parts are added up in rank order on every worker, so that all of them get the
        same numbers to the last bit.

        Raises:
            ValueError: on every worker, when a metric fails.
        """
        sums = torch.zeros(len(SPLITS), 4, dtype=torch.float64, device=self.comm.device)
        rows = dict(zip(SPLITS, sums, strict=True))
        found: Scores = {}
        for data, targets, splits in self.graphs:
            out = self._predict(forward, model, data, targets)
            for split in splits:
                index, target = targets.index[split], targets.select(split)
                pred = out[index]
                ids = None if targets.ids is None else targets.ids[index]
                measured = score(self.metrics, pred, target, ids, self.comm)
                found |= {f"{split}_{name}": value for name, value in measured.items()}
                row = rows[split]
                if len(index):
                    row[0], row[1] = self.objective.sums(pred, target, self.comm.rank)
                if self.classifies:
                    row[2], row[3] = (pred.argmax(dim=1) == target).sum(), target.numel()
        totals = torch.stack(self.comm.all_gather(sums, label=("", "", "sum"))).sum(dim=0).tolist()
        scores: Scores = {}
        for split, (total, divisor, correct, count) in zip(SPLITS, totals, strict=True):
            if self.classifies:
                scores[f"{split}_accuracy"] = correct / count if count else None
            scores[f"{split}_loss"] = self.objective.ratio(total, divisor)
        return scores | found


def _graphs(
    data: Data,
    part: Data,
    others: Mapping[str, Data],
    target: str,
    splits: Mapping[str, str] | None,
    options: dict[str, Any],
) -> list[Graph]:
    unknown = set(others) - {"val", "test"}
    if unknown:
        raise ValueError(f"'evaluate_on' is for 'val' and 'test' (got {sorted(unknown)})")
    own = find_targets(part, target, splits=splits, **options)
    for split in others:
        if own.index[split].numel():
            raise ValueError(
                f"'data' and evaluate_on[{split!r}] both hold {split} rows: leave one of them out"
            )
    rest = tuple(split for split in SPLITS if split not in others)
    graphs: list[Graph] = [(data, own, rest)]
    for split, other in others.items():
        rows = own_rows(other, target, ())
        graphs.append((other, find_targets(rows, target, whole=split, **options), (split,)))
    return graphs
