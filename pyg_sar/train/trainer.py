"""The training loop: full-batch epochs, evaluation on all nodes, schedule, early stop, checkpoints.

.. code-block:: python

    model = pyg_sar.distribute(build_model("gat", data.num_features, 8, num_classes))
    trainer = Trainer(model, data, TrainConfig(epochs=200, lr=5e-3, patience=50),
                      callbacks=[TqdmProgress(), CheckpointEvery("run.ckpt", every=10)])
    result = trainer.fit()

The loop does not know how the graph is divided. It takes a model, a PyG ``Data`` with this worker's
nodes, and the workers; losses and counts are global, and a worker without training nodes takes part
in everything.

[Note: in step] Workers must agree on when to evaluate, lower the learning rate, and stop. Each of
these decisions depends on global values only, and :meth:`Trainer.evaluate` adds up the workers'
parts in rank order on every worker, so that they are the same numbers to the last bit.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import CheckpointError, DivergedError
from pyg_sar.reduction.metrics import mean
from pyg_sar.reduction.parameters import check_settings, clip_grad_norm
from pyg_sar.train.checkpoint import (
    Checkpoint,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from pyg_sar.train.config import (
    SPLITS,
    EpochRecord,
    Scores,
    TrainConfig,
    TrainResult,
    node_labels,
    split_nodes,
)
from pyg_sar.train.graph_digest import DIFFERENCES, graph_digest
from pyg_sar.train.wire_error import gradient_error, measure_every

__all__ = [
    "Callback",
    "EpochRecord",
    "Scores",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "seed_worker",
]

#: Settings that a resumed run may change without leaving the loss curve it continues.
_FREE_ON_RESUME = frozenset({"epochs", "patience", "restore_best"})


class Callback:
    """Told what happens, on every worker, in the same order; the null version does nothing.

    A subclass may communicate as long as it does so on every worker.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Is called before the first epoch of a :meth:`Trainer.fit`."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Is called after each epoch."""

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Is called after the last epoch, the last epoch's weights still in the model."""

    def close(self) -> None:
        """Is called at the very end, also when training failed. Must not communicate."""


def call_model(model: nn.Module, data: Data) -> Tensor:
    """Makes the default forward pass: ``model(data.x, data.edge_index)``."""
    out: Tensor = model(data.x, data.edge_index)
    return out


class Trainer:
    """Trains a node classifier full-batch on all workers.

    Args:
        model: Called by ``forward``; its parameters are the same on every worker (as
            :func:`pyg_sar.distribute` leaves them) and after ``backward()`` every ``p.grad`` holds
            the gradient of the global loss.
        data: This worker's nodes: ``y`` int64 ``[num_nodes]`` or ``[num_nodes, 1]`` (-1: no
            label), ``train_mask`` and, where there are such nodes, ``val_mask`` and ``test_mask``,
            bool ``[num_nodes]`` or ``[num_nodes, num_splits]``. On the model's device.
        config: The settings.
        comm: The workers (:func:`pyg_sar.comm.group.current`).
        forward: Computes scores ``[num_nodes, num_classes]`` from model and data, where
            ``model(data.x, data.edge_index)`` is not the right call.
        optimizer: Made from ``config`` unless given; the schedule multiplies its learning rates.
        callbacks: Progress, checkpoints, reports, ...

    Raises:
        ValueError: on every worker, for missing or ill-shaped labels or masks, or when there is no
            training node on any worker.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        config: TrainConfig | None = None,
        *,
        comm: Communicator | None = None,
        forward: Callable[[nn.Module, Data], Tensor] = call_model,
        optimizer: torch.optim.Optimizer | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.model = model
        self.data = data
        self.config = config or TrainConfig()
        self.comm = comm or current()
        self.forward = forward
        self.callbacks = list(callbacks)
        self.optimizer = optimizer or _make_optimizer(model, self.config)
        self.schedule = self.config.make_schedule()
        self.epoch = 0
        self.losses: list[float] = []
        self.best_epoch = 0
        self.best: Scores | None = None
        self.final: Scores | None = None
        self.best_state: dict[str, Tensor] = {}
        self._initial_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._waited = 0
        self._digest: list[dict[str, Any] | None] = []
        self._labels, self._index = self._find_nodes()
        self._counts = self._count_nodes()

    # Nodes ###################################################################

    def _find_nodes(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Labels, and the labelled nodes of each split as indices."""
        problem: str | None = None
        labels, index = torch.empty(0, dtype=torch.long), {}
        try:
            labels = node_labels(self.data)
            index = split_nodes(self.data, self.config.split)
        except ValueError as error:
            problem = str(error)
        problems = self.comm.all_gather_object(problem)
        for rank, text in enumerate(problems):
            if text is not None:
                everywhere = problems.count(text) == self.comm.world_size
                raise ValueError(text if everywhere else f"{text} (rank {rank})")
        return labels, index

    def _count_nodes(self) -> list[list[int]]:
        """Returns nodes, then those of each split, of each worker; tells partitions apart."""
        own = [len(self._labels), *(len(self._index[split]) for split in SPLITS)]
        highest = int(self._labels.max()) if len(self._labels) else -1
        gathered = self.comm.all_gather_object([*own, highest])
        counts: list[list[int]] = [row[:-1] for row in gathered]
        self._num_classes = 1 + max(row[-1] for row in gathered)
        totals = [sum(column) for column in zip(*counts, strict=True)]
        if totals[1] == 0:
            raise ValueError("data.train_mask holds no labelled node on any worker")
        if totals[2] == 0 and (self.config.patience or self.config.schedule == "plateau"):
            raise ValueError(
                "data.val_mask holds no labelled node on any worker: early stopping ('patience') "
                "and the 'plateau' schedule need validation nodes"
            )
        return counts

    # Training ################################################################

    def fit(self) -> TrainResult:
        """Trains up to ``config.epochs`` epochs, or until the validation value stops improving.

        Raises:
            DivergedError: on every worker, when the loss becomes infinite or nan.
            ValueError: on every worker, when settings, parameters or buffers differ.
        """
        start = time.perf_counter()
        check_settings(_shared_settings(self.config), self.optimizer, self.comm)
        if self.epoch == 0 and self.config.seed is not None:
            seed_worker(self.config.seed, self.comm.rank)
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            while self.epoch < self.config.epochs and not self.stopped_early:
                record = self._run_epoch()
                for callback in self.callbacks:
                    callback.on_epoch(self, record)
            result = self._result(time.perf_counter() - start)
            for callback in self.callbacks:
                callback.on_end(self, result)
        finally:
            for callback in reversed(self.callbacks):
                callback.close()
        if self.config.restore_best and self.best_state:
            self.model.load_state_dict(self.best_state)
        return result

    @property
    def stopped_early(self) -> bool:
        """Is true once ``patience`` evaluations have passed without a better validation value."""
        return self.config.patience is not None and self._waited >= self.config.patience

    def _run_epoch(self) -> EpochRecord:
        start = time.perf_counter()
        factor = self.schedule.factor(self.epoch)
        for group, lr in zip(self.optimizer.param_groups, self._initial_lrs, strict=True):
            group["lr"] = lr * factor
        every = measure_every(self.model)
        if every is not None and self.epoch % every == 0:
            self.model.train()
            gradient_error(self.model, self._backward, comm=self.comm)
        loss, norm = self.train_step()
        self.epoch += 1
        self.losses.append(loss)
        scores = None
        if self.epoch % self.config.eval_every == 0 or self.epoch == self.config.epochs:
            scores = self.evaluate()
            self._take_note(scores)
        return EpochRecord(
            epoch=self.epoch,
            loss=loss,
            lr=self.optimizer.param_groups[0]["lr"],
            grad_norm=norm,
            seconds=time.perf_counter() - start,
            scores=scores,
        )

    def train_step(self) -> tuple[float, float | None]:
        """Makes one optimizer step; returns the global loss, and the gradient norm if clipped.

        Raises:
            DivergedError: on every worker, when the loss is infinite or nan; no step is taken.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        value = self._backward()
        norm = None
        if self.config.clip_norm is not None:
            norm = clip_grad_norm(self.model, self.config.clip_norm, self.comm)
        self.optimizer.step()
        return value, norm

    def _backward(self) -> float:
        """Returns the global training loss, after adding its gradients to the parameters'."""
        index = self._index["train"]
        values = F.cross_entropy(
            self._scores()[index],
            self._labels[index],
            reduction="none",
            label_smoothing=self.config.label_smoothing,
        )
        loss = mean(values)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise DivergedError(
                f"The training loss is {value} in epoch {self.epoch + 1}; lower 'lr', set "
                "'clip_norm', or look for infinite features"
            )
        loss.backward()
        return value

    def _scores(self) -> Tensor:
        out = self.forward(self.model, self.data)
        if out.dim() != 2 or out.size(0) != len(self._labels):
            raise ValueError(
                f"The model must return scores of shape [{len(self._labels)}, num_classes] "
                f"(got {list(out.shape)} on rank {self.comm.rank})"
            )
        if out.size(1) < self._num_classes:
            raise ValueError(
                f"The model returns scores for {out.size(1)} classes, data.y holds labels up to "
                f"{self._num_classes - 1}"
            )
        return out

    @torch.no_grad()
    def evaluate(self) -> Scores:
        """Returns accuracy and loss on all labelled nodes of all workers, in evaluation mode.

        Raises:
            ValueError: on every worker, when the model's parameters or buffers differ between them.
        """
        self.model.eval()
        out = self._scores()
        parts = torch.zeros(len(SPLITS), 3, dtype=torch.float64, device=out.device)
        for row, split in zip(parts, SPLITS, strict=True):
            scores, labels = out[self._index[split]], self._labels[self._index[split]]
            row[0] = len(labels)
            row[1] = (scores.argmax(dim=-1) == labels).sum()
            row[2] = F.cross_entropy(scores.double(), labels, reduction="sum")
        # See [Note: in step] for why this is not a sum by the backend.
        totals = torch.stack(self.comm.all_gather(parts, label=("", "", "sum"))).sum(dim=0).tolist()
        values: dict[str, float | None] = {}
        for split, (count, correct, loss) in zip(SPLITS, totals, strict=True):
            values[f"{split}_accuracy"] = correct / count if count else None
            values[f"{split}_loss"] = loss / count if count else None
        return Scores(**values)

    def _take_note(self, scores: Scores) -> None:
        """Keeps the best weights, counts evaluations without a better value, tells the schedule."""
        self.final = scores
        value = self._monitored(scores)
        if value is None:
            self.best, self.best_epoch = scores, self.epoch
            return
        best = None if self.best is None else self._monitored(self.best)
        if best is None or value > best:
            self.best, self.best_epoch, self._waited = scores, self.epoch, 0
            self.best_state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        else:
            self._waited += 1
        self.schedule.observe(value)

    def _monitored(self, scores: Scores) -> float | None:
        """Returns the validation value, higher being better."""
        if self.config.monitor == "accuracy":
            return scores.val_accuracy
        return None if scores.val_loss is None else -scores.val_loss

    def _result(self, seconds: float) -> TrainResult:
        return TrainResult(
            epochs=self.epoch,
            losses=list(self.losses),
            best_epoch=self.best_epoch,
            best=self.best,
            final=self.final,
            stopped_early=self.stopped_early,
            seconds=seconds,
        )

    # Checkpoints #############################################################

    def save(self, path: str | os.PathLike[str], **extra: Any) -> None:
        """Saves everything that the rest of the training depends on. Collective.

        Args:
            path: The file; replaced in one step.
            extra: Further values that JSON can hold (what built the model, say).

        Raises:
            CheckpointError: on every worker, when it cannot be written.
        """
        state = {
            "config": asdict(self.config),
            "counts": self._counts,
            "graph": self._graph(),
            "epoch": self.epoch,
            "losses": self.losses,
            "best_epoch": self.best_epoch,
            "best": None if self.best is None else asdict(self.best),
            "final": None if self.final is None else asdict(self.final),
            "waited": self._waited,
            "schedule": self.schedule.state_dict(),
            "extra": extra,
        }
        best = {f"best/{name}": tensor for name, tensor in self.best_state.items()}
        save_checkpoint(path, self.model, self.optimizer, state=state, tensors=best, comm=self.comm)

    def resume(self, path: str | os.PathLike[str], *, allow_changes: bool = False) -> Checkpoint:
        """Takes up the training that :meth:`save` saved: :meth:`fit` continues the very same curve.

        Call it on a trainer made as the saved one was, before :meth:`fit`. With the same parts of
        the graph the curve is the same to the bit, whatever number of workers hosts them. Another
        partition of the same graph continues it up to rounding: rows per node
        (:class:`~pyg_sar.nn.NodeEmbedding`) go by global id. Dropout draws other masks then. With
        another number of parts it starts from the seed and the epoch, which a warning of rank 0
        says.

        Args:
            path: The file.
            allow_changes: Go on with other settings than the checkpoint's, or with another number
                of parts where it can't be shown that they are of the same graph.

        Raises:
            CheckpointError: on every worker, for an unfit file (:func:`load_checkpoint`), another
                graph (nodes, edges, labels or splits), or other settings.
        """
        # The settings are compared first, by a pass that changes nothing.
        first = inspect_checkpoint(path, self.comm)
        state = first.state
        self._check_same_run(path, first, allow_changes)
        restore = first.world_size == self.comm.world_size
        options = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        checkpoint = load_checkpoint(
            path, self.model, self.optimizer, restore_rng=restore, comm=self.comm
        )
        for group, option in zip(self.optimizer.param_groups, options, strict=True):
            group.update(option)
        if not restore:
            self._start_randomly(path, first)
        self.epoch = state["epoch"]
        self.losses = list(state["losses"])
        self.best_epoch = state["best_epoch"]
        self.best = None if state["best"] is None else Scores(**state["best"])
        self.final = None if state["final"] is None else Scores(**state["final"])
        self.best_state = {
            name.removeprefix("best/"): tensor for name, tensor in checkpoint.tensors.items()
        }
        self._waited = state["waited"]
        if self.config.schedule == state["config"]["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        return checkpoint

    def _start_randomly(self, path: str | os.PathLike[str], saved: Checkpoint) -> None:
        """Seeds the random state where the checkpoint's are those of other parts."""
        seed, epoch = self.config.seed, saved.state["epoch"]
        if seed is not None:
            seed_worker(seed + epoch, self.comm.rank)
        if self.comm.rank == 0:
            start = "go on as they are" if seed is None else f"start from seed {seed} + {epoch}"
            warnings.warn(
                f"{os.fspath(path)!r} holds the random states of {saved.world_size} parts, this "
                f"run has {self.comm.world_size}: they {start} (other dropout masks)",
                stacklevel=3,
            )

    def _graph(self) -> dict[str, Any] | None:
        """Returns what tells the graph from others; the first call is collective."""
        if not self._digest:
            self._digest.append(graph_digest(self.data, self._labels, self._index, self.comm))
        return self._digest[0]

    def _check_same_run(
        self, path: str | os.PathLike[str], saved: Checkpoint, allow_changes: bool
    ) -> None:
        name, state = os.fspath(path), saved.state
        if "counts" not in state or "config" not in state:
            raise CheckpointError(f"{name!r} was not saved by a Trainer")
        free = _FREE_ON_RESUME - ({"epochs"} if self.config.schedule == "cosine" else set())
        now, before = asdict(self.config), state["config"]
        changes = [
            f"{field.name}={before[field.name]!r} is now {now[field.name]!r}"
            for field in fields(self.config)
            if field.name not in free and before.get(field.name) != now[field.name]
        ]
        if changes and not allow_changes:
            raise CheckpointError(
                f"{name!r} was saved with other settings: {', '.join(changes)}; give the same, or "
                "allow changes"
            )
        self._check_same_graph(name, saved, allow_changes)

    def _check_same_graph(self, name: str, saved: Checkpoint, allow_changes: bool) -> None:
        now, before = self._graph(), saved.state.get("graph")
        counts, same_size = saved.state["counts"], saved.world_size == self.comm.world_size
        if now is not None and before is not None:
            other = [text for key, text in DIFFERENCES.items() if now[key] != before[key]]
            moved = now["owners"] != before["owners"]
        else:
            moved = not same_size or counts != self._counts
            other = ["nodes of the workers"] if moved and same_size else []
        if other:
            raise CheckpointError(
                f"{name!r} belongs to another graph or other splits: its workers held "
                f"{_shares(counts)}, these hold {_shares(self._counts)}; other "
                f"{', '.join(other)}"
            )
        if moved and (now is None or before is None) and not allow_changes:
            raise CheckpointError(
                f"{name!r} is of {saved.world_size} parts, this run has {self.comm.world_size}, "
                "and it can't be shown that they are of the same graph: 'data' must have 'n_id' "
                "and 'edge_index' (as load_partition gives them) when saving and now. Start "
                f"workers that host {saved.world_size} parts, or allow changes"
            )
        local = [parameter for parameter, by_id in saved.owned.items() if not by_id]
        if moved and local:
            raise CheckpointError(
                f"{name!r} is of another partition of the graph, and holds the rows of "
                f"'{local[0]}' without the global ids of its nodes: go on with the same "
                "partition, or set 'n_id' of its module to data.n_id before saving"
            )


def _shares(counts: Sequence[Sequence[int]]) -> str:
    """Returns the nodes and the training nodes of each worker as text."""
    return f"{[row[0] for row in counts]} nodes, {[row[1] for row in counts]} to train on"


def _shared_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that must be alike on all workers."""
    return {name: value for name, value in asdict(config).items() if name != "seed"}


def _make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer: torch.optim.Optimizer = kinds[config.optimizer](
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay
    )
    return optimizer


def seed_worker(seed: int, rank: int) -> None:
    """Seeds torch's generators differently on each worker; rank 0 as one process would be."""
    torch.manual_seed((seed + 0x9E3779B97F4A7C15 * rank) % 2**63)
