"""The training loop: full-batch epochs, evaluation on all rows, schedules, early stop, checkpoints.

The loop does not know how the graph is divided: predictions and targets are tensors of the whole
graph, losses and metrics PyTorch's own. With replicas, each has graphs of its own; a step is of one
graph of each.

[Note: in step] Workers must agree on when to evaluate, lower the learning rate, and stop. Each of
these decisions depends on values that are the same numbers to the last bit on every worker.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch_geometric.data import Data

from pyg_sar.comm.devices import seed_generators
from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import DivergedError
from pyg_sar.files import to_json
from pyg_sar.reduction.parameters import check_replicas, check_settings, copy_from_first
from pyg_sar.train.arguments import as_list, check_arguments, check_scheduler, make_schedulers, step
from pyg_sar.train.checkpoint import (
    Checkpoint,
    checksum_in,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from pyg_sar.train.config import EpochRecord, Scores, TrainConfig, TrainResult
from pyg_sar.train.evaluation import Evaluation, Metric, check_metrics
from pyg_sar.train.flow import (
    NeighborSampling,
    call_model,
    check_flow,
    refuse_in_flow,
    training_seeds,
)
from pyg_sar.train.objective import Loss, Objective
from pyg_sar.train.resuming import (
    check_same_graph,
    check_same_run,
    digest_of_all,
    resume_schedulers,
    start_of,
)
from pyg_sar.train.targets import LabelSplit, not_finite
from pyg_sar.train.wire_error import gradient_error, measure_every
from pyg_sar.wording import counted

_KEPT = ("epoch", "losses", "best_epoch", "best", "final")
"""Attributes of a trainer that a checkpoint holds as they are."""


class Callback:
    """Told what happens, on every worker, in the same order; the null version does nothing.

    A subclass may communicate as long as it does so on every worker.
    """

    def on_check(self, trainer: Trainer) -> None:
        """Is called before any ``on_start``: raises what forbids a training, on every worker."""

    def on_start(self, trainer: Trainer) -> None:
        """Is called before the first epoch of a :meth:`Trainer.fit`."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Is called after each epoch."""

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Is called after the last epoch, the last epoch's weights still in the model."""

    def close(self) -> None:
        """Is called at the very end, also when training failed. Must not communicate."""


class Trainer:
    """Trains a model full-batch on all workers, or in one process on a plain ``Data``.

    .. code-block:: python

        config = TrainConfig(epochs=200, lr=0.01, patience=50)  # of pyg_sar.train
        trainer = pyg_sar.Trainer(pyg_sar.distribute(model), data, config)
        result = trainer.fit()  # losses, best epoch, scores: the same on every worker
        scores = trainer.evaluate()  # {"val_loss": ..., "val_accuracy": ..., ...}

    Args:
        model: Called by ``forward``; its parameters are the same on every worker (as
            :func:`pyg_sar.distribute` leaves them) and after ``backward()`` every ``p.grad`` holds
            its gradient.
        data: The graph, as :func:`pyg_sar.load_partition` gives it, or a list of graphs: an epoch
            has a step for each, in their order. With replicas those of this one, as many as the
            others have; the loss is the mean over replicas, scores are of the rows of all graphs of
            all replicas together. For node classification: ``y`` int64 ``[num_nodes]`` or
            ``[num_nodes, 1]`` (-1: no label), ``train_mask`` and, where there are such nodes,
            ``val_mask`` and ``test_mask``, bool ``[num_nodes]`` or ``[num_nodes, num_splits]``.
        config: The settings.
        comm: The workers (:func:`pyg_sar.comm.group.current`).
        forward: Computes the predictions from model and data, a row per row of the target, where
            ``model(data.x, data.edge_index)`` is not the right call.
        loss: Cross entropy unless given. A loss of ``torch.nn`` or ``torch.nn.functional``, or a
            function of predictions and targets that returns a number.
        metrics: By name, functions of predictions and targets that return a number, or objects as
            those of torchmetrics, of which a copy is taken. Predictions and targets are tensors of
            the whole graph, in its order; every worker calls the loss and the metrics. The accuracy
            is among the scores in any case where targets are classes.
        target: The attribute that holds the targets: of nodes (``'y'``), or of edges, pairs or
            whatever ``forward`` returns rows for (``'edge_label'``).
        splits: The mask or list of rows of each split, by name, such as ``{'train': 'train_mask'}``
            (:func:`~pyg_sar.train.targets.find_targets`).
        flow: The message flow graph of the training nodes
            (:func:`pyg_sar.partition.message_flow_graphs`).
            Training steps run on it, evaluation on ``data``. The seeds' outputs on both are
            compared before the first step. ``forward`` is called with it in place of ``data``.
        labels: Masked label prediction: the share of the training nodes that show the model their
            labels in each step, drawn anew, while the loss is that of the others. In evaluation all
            of them do. ``forward`` finds the mask in ``data.label_mask``, bool ``[num_nodes]``, for
            PyG's ``MaskLabel`` say.
        sampler: Train on sampled neighbours, to compare with: an epoch has a step for each batch of
            training nodes, with ``forward`` on its graph. Evaluation is exact.
        evaluate_on: Other graphs for ``'val'`` and ``'test'``, or lists of them, of whose targets
            all count, as ``RandomLinkSplit`` makes them.
        optimizer: Made from ``config`` unless given.
        scheduler: Any of ``torch.optim.lr_scheduler`` with the optimizer, or a function that makes
            it for the optimizer, in place of ``config.schedule``. It makes a step after each epoch;
            ``ReduceLROnPlateau`` after each evaluation, with the monitored value.
        callbacks: Progress, checkpoints, reports, ...

    Raises:
        TypeError: for an argument of another type.
        ValueError: For missing or ill-shaped targets or masks, or when there is no training row;
            for settings that don't fit each other.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data | Sequence[Data],
        config: TrainConfig | None = None,
        *,
        comm: Communicator | None = None,
        forward: Callable[[nn.Module, Data], Tensor] = call_model,
        loss: Loss | None = None,
        metrics: Mapping[str, Metric] | None = None,
        target: str = "y",
        splits: Mapping[str, str] | None = None,
        flow: Data | None = None,
        labels: float | None = None,
        sampler: NeighborSampling | None = None,
        evaluate_on: Mapping[str, Data | Sequence[Data]] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        given = {"model": model, "data": data, "config": config, "forward": forward}
        given |= {"metrics": metrics, "splits": splits, "flow": flow, "sampler": sampler}
        given |= {"evaluate_on": evaluate_on, "optimizer": optimizer, "callbacks": callbacks}
        check_arguments(given)
        self.model = model
        graphs = as_list("data", data)
        self.data, self._steps = graphs[0], len(graphs)
        self.config = config or TrainConfig()
        self.comm = comm or current()
        if self._steps > 1 or self.comm.replicas > 1:
            for name, value in (("flow", flow), ("labels", labels), ("sampler", sampler)):
                if value is not None:
                    raise ValueError(
                        f"{name!r} is for one graph, and this Trainer has "
                        f"{counted(self._steps, 'graphs')} in "
                        f"{counted(self.comm.replicas, 'replicas')}: leave it out"
                    )
        self.forward = forward
        self.callbacks = list(callbacks)
        self.objective = Objective(loss, self.config.label_smoothing)
        self.metrics = check_metrics(metrics)
        self.target, self.splits = target, None if splits is None else dict(splits)
        self.epoch = 0
        self.losses: list[float] = []
        self.best_epoch = 0
        self.best: Scores | None = None
        self.final: Scores | None = None
        self.best_state: dict[str, Tensor] = {}
        self.resumed: str | None = None  # The checksum of the file that it goes on from.
        self._waited, self._restored = 0, False
        self._digests: list[dict[str, Any]] = []
        self.rows = Evaluation(
            graphs,
            {k: as_list(f"evaluate_on[{k!r}]", v) for k, v in (evaluate_on or {}).items()},
            target=target,
            splits=splits,
            column=self.config.split,
            objective=self.objective,
            metrics=self.metrics,
            comm=self.comm,
        )
        config = self.config
        self.flow = flow
        if flow is not None:
            refuse_in_flow(model)
            self._seeds = training_seeds(flow, self.rows.targets, target)
        self.labels = None
        if labels is not None:
            self.labels = LabelSplit(labels, config.seed or 0, self.rows.targets.masks["train"])
        self.sampler = sampler
        if sampler is not None:
            refuse_in_flow(model, sampled=True)
        if sampler is not None and (flow is not None or labels is not None):
            raise ValueError("Give the Trainer 'sampler' without 'flow' and 'labels'")
        self.monitor, self._higher = self.rows.monitored(config)
        self.optimizer = optimizer or _make_optimizer(model, config)
        of_epochs = config, self.optimizer, self._higher
        if scheduler is None:
            self.schedulers = make_schedulers(*of_epochs)
        else:
            self.schedulers = [check_scheduler(scheduler, *of_epochs)]
        self._start = start_of(self.optimizer, self.schedulers)
        plateau = any(isinstance(one, ReduceLROnPlateau) for one in self.schedulers)
        if self.rows.totals["val"] == 0 and (config.patience or plateau):
            raise ValueError(
                "data.val_mask holds no labelled node: early stopping ('patience') "
                "and the 'plateau' schedule need validation nodes"
            )

    def _settings(self) -> dict[str, Any]:
        """Returns all settings as values of JSON."""
        return asdict(self.config) | {
            "target": self.target,
            "splits": self.splits,
            "loss": self.objective.name,
            "metrics": list(self.metrics),
            "scheduler": [type(scheduler).__name__ for scheduler in self.schedulers],
            "labels": None if self.labels is None else self.labels.ratio,
            "sampler": None if self.sampler is None else str(self.sampler),
        }

    # Training ################################################################

    def fit(self) -> TrainResult:
        """Trains up to ``config.epochs`` epochs, or until the validation value stops improving.

        Raises:
            DivergedError: on every worker, when the loss becomes infinite or nan.
            ValueError: on every worker, when settings, parameters or buffers differ.
        """
        start = time.perf_counter()
        shared = self._settings() | {"scheduler": str(self._schedule_state())}
        shared |= {"graphs": self._steps, "classes": self.rows.classifies}
        shared.pop("seed")
        for group in (self.comm, self.comm.across):
            if group is not None:
                check_settings(shared, self.optimizer, group)
        if self.epoch == 0 and self.config.seed is not None:
            seed_generators(self.config.seed)
        if self.flow is not None:
            self._show(None if self.labels is None else self.labels.mask)
            check_flow(self.model, self.data, self.flow, forward=self.forward)
        for callback in self.callbacks:
            callback.on_check(self)
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
            self._restored = self.best_epoch != self.epoch
        return result

    @property
    def stopped_early(self) -> bool:
        """Is true once ``patience`` evaluations have passed without a better validation value."""
        return self.config.patience is not None and self._waited >= self.config.patience

    def _run_epoch(self) -> EpochRecord:
        start = time.perf_counter()
        lr = float(self.optimizer.param_groups[0]["lr"])
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
        value = None if scores is None else scores.get(f"val_{self.monitor}")
        for scheduler in self.schedulers:
            step(scheduler, value)
        return EpochRecord(
            epoch=self.epoch,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            seconds=time.perf_counter() - start,
            scores=scores,
        )

    def train_step(self) -> tuple[float, float | None]:
        """Makes the steps of an epoch: one, or one for each of several graphs or batches.

        Returns:
            The mean of the losses, and the last gradient norm if clipped.

        Raises:
            DivergedError: on every worker, when a loss is infinite or nan; no step is taken on it.
        """
        self.model.train()
        losses, norm = [], None
        for rows in self._batches():
            losses.append(self._backward(rows))
            norm = self._step()
        return sum(losses) / len(losses), norm

    def _step(self) -> float | None:
        """Changes the parameters by their gradients; returns the gradients' norm if clipped."""
        norm = None
        if self.config.clip_norm is not None:
            parameters = self.model.parameters()
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_norm))
        self.optimizer.step()
        return norm

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the model's rows, and targets, of each step; no gradients are left before it."""
        if self.sampler is None:
            for number in range(self._steps):
                self.optimizer.zero_grad(set_to_none=True)
                yield self._training_rows(number)
            return
        targets, seed = self.rows.targets, self.config.seed or 0
        for flow in self.sampler.batches(self.data, targets.masks["train"], seed, self.epoch):
            self.optimizer.zero_grad(set_to_none=True)
            out = self.forward(self.model, flow)[: flow.batch_size]
            yield out, targets.values[flow.input_id]

    def _backward(self, rows: tuple[Tensor, Tensor] | None = None) -> float:
        """Returns the training loss, after adding its gradients to the parameters'."""
        loss = self.objective(*(rows or self._training_rows()))
        value = float(self.comm.average(loss))
        if not math.isfinite(value):
            why = not_finite(self.data, self.target) or "; lower 'lr', or set 'clip_norm'"
            raise DivergedError(f"The training loss is {value} in epoch {self.epoch + 1}{why}")
        loss.backward()
        return value

    def _training_rows(self, number: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the model's rows, and targets, of a step on a graph."""
        targets = self.rows.graphs[number][1]
        mask, values = targets.masks["train"], targets.values
        shown = None if self.labels is None else self.labels.shown(self.epoch)
        self._show(shown)
        if self.flow is None:
            out = self.rows.predict(self.forward, self.model, number)
        else:
            out = self.forward(self.model, self.flow)[: self.flow.batch_size]
            seeds = self.flow.input_id
            mask, values = self._seeds, values[seeds]
            shown = None if shown is None else shown[seeds]
        mask = mask if shown is None else mask & ~shown
        return out[mask], values[mask]

    def _show(self, labels: Tensor | None) -> None:
        """Gives the graphs the mask of the nodes that show their labels."""
        if labels is not None:
            self.data.label_mask = labels
            if self.flow is not None:
                self.flow.label_mask = labels[self.flow.n_id]

    @torch.no_grad()
    def evaluate(self) -> Scores:
        """Returns loss and metrics on the rows of all workers, in evaluation mode. Collective.

        Raises:
            ValueError: on every worker, when the model's parameters or buffers differ between them,
                or a metric fails.
        """
        if self.comm.across is not None:  # The model that is judged is the one that is saved.
            copy_from_first(self.model.buffers(), self.comm.across)
        check_replicas(self.model, self.comm)
        self.model.eval()
        self._show(None if self.labels is None else self.labels.mask)
        return self.rows.scores(self.forward, self.model)

    def _take_note(self, scores: Scores) -> None:
        """Keeps the best weights, and counts evaluations without a better value."""
        self.final = scores
        name = f"val_{self.monitor}"
        if name not in scores:
            raise ValueError(
                f"Expected 'monitor' to be the name of a score (got {self.monitor!r}); there are "
                f"{sorted(scores)}"
            )
        value = scores[name]
        if value is None:
            if self.rows.totals["val"]:
                self._waited += 1
            else:
                self.best, self.best_epoch = scores, self.epoch
            return
        best = None if self.best is None else self.best[name]
        if best is None or (value > best if self._higher else value < best):
            self.best, self.best_epoch, self._waited = scores, self.epoch, 0
            self.best_state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        else:
            self._waited += 1

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
            "config": self._settings(),
            **dict(zip(("graph", "evaluated"), self._graphs(), strict=True)),
            **{name: getattr(self, name) for name in _KEPT},
            "waited": self._waited,
            "restored": self._restored,
            "start": self._start,
            "schedulers": self._schedule_state(),
            "extra": extra,
        }
        best = {f"best/{name}": tensor for name, tensor in self.best_state.items()}
        save_checkpoint(path, self.model, self.optimizer, state=state, tensors=best, comm=self.comm)

    def resume(self, path: str | os.PathLike[str], *, allow_changes: bool = False) -> Checkpoint:
        """Takes up the training that :meth:`save` saved: :meth:`fit` continues the very same curve.

        Call it on a trainer made as the saved one was, before :meth:`fit`. With the same parts of
        the graph the curve is the same to the bit, whatever number of workers hosts them. Another
        partition of the same graph continues it up to rounding: rows per node
        (:class:`~pyg_sar.nn.NodeEmbedding`) go by global id, and dropout draws the same masks.

        Args:
            path: The file.
            allow_changes: Go on with other settings than the checkpoint's, with another number
                of parts where it can't be shown that they are of the same graph, or with other
                random numbers than those of another number of replicas.

        Raises:
            CheckpointError: on every worker, for an unfit file (:func:`load_checkpoint`), another
                graph (nodes, edges, labels or splits) to train or to evaluate on, or other
                settings.
        """
        resumed = checksum_in(path)  # At first: another run may replace the file meanwhile.
        # The settings are compared first, by a pass that changes nothing.
        first = inspect_checkpoint(path, self.comm)
        state, name, now = first.state, os.fspath(path), self._settings()
        check_same_run(name, first, now, self._start, allow_changes=allow_changes)
        graph, evaluated = self._graphs()
        check_same_graph(name, first, graph, evaluated=evaluated, allow_changes=allow_changes)
        options = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        drawn = not allow_changes or first.replicas == self.comm.replicas
        checkpoint = load_checkpoint(
            path, self.model, self.optimizer, restore_rng=drawn, comm=self.comm
        )
        resume_schedulers(self.schedulers, self.optimizer, options, self._start, state, now)
        for kept in _KEPT:
            setattr(self, kept, state[kept])
        self.best_state = {
            name.removeprefix("best/"): tensor for name, tensor in checkpoint.tensors.items()
        }
        self._waited, self.resumed = state["waited"], resumed
        return checkpoint

    def _schedule_state(self) -> list[Any]:
        return [to_json(scheduler.state_dict()) for scheduler in self.schedulers]

    def _graphs(self) -> list[dict[str, Any]]:
        """Returns what tells the graphs to train on, and those that are only evaluated, from
        others; the first call is collective."""
        if not self._digests:
            both = self.rows.graphs[: self._steps], self.rows.graphs[self._steps :]
            self._digests += [digest_of_all(graphs, self.comm) for graphs in both]
        return self._digests


def _make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    kind: Any = kinds[config.optimizer]
    return kind(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
