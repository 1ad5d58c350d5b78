"""A training run as ``pyg-sar train`` describes it."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.devices import seed_generators
from pyg_sar.comm.group import Communicator, current
from pyg_sar.comm.processes import SignalNotice
from pyg_sar.convert import distribute
from pyg_sar.errors import CheckpointError, PygSarError, ReportError
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.message_flow import message_flow_graphs
from pyg_sar.policy import SARPolicy
from pyg_sar.tools.models import (
    Call,
    StockModel,
    call_with,
    check_names,
    imported_model,
    stock_model,
)
from pyg_sar.train.callbacks import CheckpointEvery, LineProgress, TensorBoard, TqdmProgress
from pyg_sar.train.checkpoint import inspect_checkpoint
from pyg_sar.train.config import TrainConfig, TrainResult
from pyg_sar.train.flow import NeighborSampling, call_model, flow_that_pays
from pyg_sar.train.objective import Loss
from pyg_sar.train.report import SUMMARY, Report, write_json
from pyg_sar.train.targets import SPLITS, find_targets, node_labels, with_labels
from pyg_sar.train.trainer import Callback, Trainer
from pyg_sar.usage import MODELS, OF_CLASSES, OF_NUMBERS
from pyg_sar.wording import counted

_FEW_CLASSES = 2**16  # may be numbered with gaps, however small the graph

#: Losses by name; ``None`` is cross entropy, the trainer's own.
LOSSES: dict[str, Loss | None] = {
    "cross_entropy": None,
    "bce": F.binary_cross_entropy_with_logits,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
}


class UsageError(PygSarError, ValueError):
    """Options that do not fit together; every worker meets them alike."""


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Raises what does not fit as a :class:`UsageError`; the package's own errors stay."""
    try:
        yield
    except PygSarError:
        raise
    except (ImportError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A model: a name and arguments of :func:`pyg_sar.tools.models.stock_model`, or the user's own.

    The name of one's own is ``'module:callable'`` or ``'FILE.py:callable'``
    (:func:`pyg_sar.tools.models.imported_model`), which takes none of the arguments; ``layers`` is
    then the number of hops that it looks.
    """

    name: str = "gat"
    hidden: int = 64
    layers: int = 2
    heads: int = 8
    dropout: float = 0.5
    norm: str = "none"

    def stock(self, in_channels: int, out_channels: int, *, cached: bool = True) -> StockModel:
        """Returns the class of PyG and its arguments; ``cached`` for a run with one graph."""
        options = asdict(self)
        name, hidden = options.pop("name"), options.pop("hidden")
        return stock_model(name, in_channels, hidden, out_channels, cached=cached, **options)

    @property
    def own(self) -> bool:
        """Is true of a model of the user's."""
        return self.name not in MODELS


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The options of ``pyg-sar train``, as :func:`train_worker` takes them.

    ``mfg='auto'`` takes message flow graphs where they pay. ``metric`` decides on the best epoch,
    by default the accuracy where targets are classes, else the loss. ``seeds`` are runs with the
    seeds ``train.seed``, ``train.seed + 1``, ... ``auto_resume`` goes on from ``checkpoint`` where
    that file exists, else from ``resume``.
    """

    parts: str
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    policy: SARPolicy = field(default_factory=partial(SARPolicy, random="keyed"))
    mfg: Literal["auto", "on", "off"] = "off"
    loss: str = "cross_entropy"
    metric: str | None = None
    seeds: int = 1
    args: Sequence[str] | None = None
    labels: float | None = None
    sampler: NeighborSampling | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 10
    resume: str | None = None
    auto_resume: bool = False
    allow_changes: bool = False
    report: str | None = None
    tensorboard: str | None = None
    overwrite: bool = False
    progress: Literal["bar", "lines", "none"] = "bar"


def say_kept(config: RunConfig) -> str:
    """Says what an interrupted run leaves."""
    path = config.checkpoint
    if path is None:
        return "nothing is kept of this run (--checkpoint FILE keeps its state)"
    if not os.path.exists(path):
        return f"there is no {path!r} before the first checkpoint; the same command begins anew"
    epoch = inspect_checkpoint(path).state["epoch"]
    return f"{path!r} holds the state after epoch {epoch}; --resume goes on from there"


def train_worker(config: RunConfig, stop: SignalNotice | None = None) -> TrainResult:
    """Loads the graph, trains, and returns the result. Collective.

    ``stop`` says whether a signal asked for a checkpoint and the end: ``StoppedError`` on every
    worker. Settings that do not fit the graph or each other are a ``UsageError`` on every worker.
    """
    with as_usage_errors():
        trainer = _prepare(config, current(), stop)
    return trainer.fit()


def train_seeds(config: RunConfig, stop: SignalNotice | None = None) -> list[TrainResult]:
    """Trains with each seed (:func:`train_worker`), and returns the results. Collective.

    Reports and TensorBoard's files of several seeds lie in folders ``seed-0``, ``seed-1``, ...
    of the given ones, beside a ``summary.json`` with means and spreads (:func:`over_seeds`).
    """
    if config.seeds == 1:
        return [train_worker(config, stop)]
    comm, first = current(), config.train.seed or 0
    path = None if config.report is None else Path(config.report) / SUMMARY
    taken = path is not None and path.exists() and not config.overwrite
    if comm.broadcast_object(taken):
        raise ReportError(
            f"Cannot write the report {config.report!r}: {SUMMARY!r} of another run is there; "
            "choose another folder, or replace it (--overwrite)"
        )
    results = []
    for seed in range(first, first + config.seeds):
        folders = {"report": config.report, "tensorboard": config.tensorboard}
        own: dict[str, Any] = {
            name: at and os.path.join(at, f"seed-{seed}") for name, at in folders.items()
        }
        of_seed = replace(config, seeds=1, train=replace(config.train, seed=seed), **own)
        results.append(train_worker(of_seed))
    if path is not None and comm.rank == 0:
        write_json(path, over_seeds(results, first))
    return results


def over_seeds(results: Sequence[TrainResult], first: int) -> dict[str, Any]:
    """Returns ``seeds`` (``first``, ``first + 1``, ...), ``best_epoch`` and ``best`` of each run,
    and of each score that all runs have the ``mean`` and the ``spread``, the standard deviation of
    a sample.
    """
    every = [result.best or {} for result in results]
    found: dict[str, Any] = {
        "seeds": list(range(first, first + len(results))),
        "best_epoch": [result.best_epoch for result in results],
        "best": every,
        "mean": {},
        "spread": {},
    }
    for name in every[0]:
        values = [value for best in every if (value := best.get(name)) is not None]
        if len(values) == len(results):
            found["mean"][name] = mean(values)
            found["spread"][name] = stdev(values)
    return found


def _prepare(config: RunConfig, comm: Communicator, stop: SignalNotice | None) -> Trainer:
    path = config.resume
    if config.auto_resume and config.checkpoint is not None:
        there = comm.broadcast_object(os.path.lexists(config.checkpoint))  # Rank 0 writes it.
        path = config.checkpoint if there else path
    data = load_partition(config.parts)
    if not isinstance(data, Data):
        raise UsageError(
            f"{config.parts!r} holds a heterogeneous graph, which the models of this command don't "
            "take: write a training script as examples/hetero.py does"
        )
    use_features(data, own=config.model.own)
    check_names(config.args or (), data)
    seed = config.train.seed
    if seed is not None:
        seed_generators(seed)
    flow = _message_flow(config, data)
    outputs = _outputs(config, data)
    columns = 0 if config.labels is None else outputs
    stock = None
    if config.model.own:
        model = imported_model(config.model.name, data)
    else:
        one_graph = flow is None and config.sampler is None
        stock = config.model.stock(data.x.size(1) + columns, outputs, cached=one_graph)
        model = stock.build()
    worse = config.metric in ("mae", "mse")
    trainer = Trainer(
        distribute(model.to(comm.device), config.policy),
        data,
        replace(config.train, monitor=config.metric, monitor_mode="min" if worse else "auto"),
        forward=_forward(config, data, columns),
        loss=LOSSES[config.loss],
        metrics=_metrics(config, outputs),
        flow=flow,
        labels=config.labels,
        sampler=config.sampler,
        callbacks=_callbacks(config, stock, stop),
    )
    if config.loss == "bce":
        _check_binary(trainer)
    if path is not None:
        _resume(trainer, path, config)
    return trainer


def use_features(data: Data, *, own: bool) -> None:
    """Gives ``data.x`` the floats that the model has: float32, but for a model of one's ``own``.

    So ``data.edge_weight``, which a GCN takes.
    """
    x, weight = data.get("x"), data.get("edge_weight")
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.size(1):
        found = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise UsageError(
            "The graph has no node features: data.x must have shape [num_nodes, F], F >= 1 (got "
            f"{found}). Of tables, `pyg-sar partition --features` names the columns"
        )
    if x.is_complex():
        raise UsageError(
            f"data.x holds complex numbers ({x.dtype}): give real ones, such as .abs()"
        )
    if not own or not x.is_floating_point():
        data.x = x.float()
    if not own and isinstance(weight, Tensor):
        data.edge_weight = weight.float()


def _outputs(config: RunConfig, data: Data) -> int:
    """Returns the columns of the model's output, of targets that the loss can read."""
    if config.loss == "cross_entropy":
        return count_classes(data)
    y = data.get("y")
    if not isinstance(y, Tensor) or y.dim() not in (1, 2) or len(y) != data.num_nodes:
        shape = f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise UsageError(
            f"--loss {config.loss} takes data.y of shape [num_nodes] or [num_nodes, T] (got "
            f"{shape})"
        )
    data.y = y.to(data.x.dtype)
    return int(y.size(1)) if y.dim() == 2 else 1


def _forward(config: RunConfig, data: Data, columns: int) -> Call:
    call = call_with(config.args) if config.args else call_of(config.model.name, data, columns)
    if config.loss == "cross_entropy" or data.y.dim() == 2:
        return call

    def forward(model: nn.Module, data: Data) -> Tensor:
        out: Tensor = call(model, data)
        return out.squeeze(1) if out.dim() == 2 else out

    return forward


def _metrics(config: RunConfig, outputs: int) -> dict[str, Any]:
    """Returns the metric that ``config.metric`` names, if the trainer hasn't got it."""
    name, numbers = config.metric, config.loss in ("mse", "mae")
    if name is None or name == "loss" or (name == "accuracy" and config.loss == "cross_entropy"):
        return {}
    if (name in OF_NUMBERS) != numbers:
        fit = ["mse", "mae"] if name in OF_NUMBERS else ["cross_entropy", "bce"]
        raise UsageError(
            f"--metric {name} does not go with --loss {config.loss}: give --loss {' or '.join(fit)}"
        )
    try:
        from torchmetrics import functional
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--metric {name} is computed by torchmetrics: pip install 'pyg_sar[metrics]'"
        ) from error
    measure: Any = getattr(functional, OF_NUMBERS.get(name) or OF_CLASSES[name])
    if numbers:
        return {name: lambda pred, y: measure(pred.double(), y.double())}
    task = "multiclass" if config.loss == "cross_entropy" else "multilabel"
    task = "binary" if task == "multilabel" and outputs == 1 else task
    of_task = {"multiclass": {"num_classes": outputs}, "multilabel": {"num_labels": outputs}}
    options = {"task": task, **of_task.get(task, {})}
    if task != "binary":
        options["average"] = "macro"

    def metric(pred: Tensor, y: Tensor) -> Tensor:
        # Probabilities: torchmetrics would guess by the values whether these are logits.
        pred = pred.double()
        probabilities = pred.softmax(1) if task == "multiclass" else pred.sigmoid()
        return measure(probabilities, y.long(), **options)

    return {name: metric}


def _check_binary(trainer: Trainer) -> None:
    targets = trainer.rows.targets
    for split in SPLITS:
        values = targets.select(split)
        if wrong := int(((values != 0) & (values != 1)).sum()):
            raise UsageError(
                f"--loss bce takes targets of 0 and 1; data.y holds {wrong} others in the "
                f"{targets.counts[split]} {split} rows: leave rows without a target out of the mask"
            )


def count_classes(data: Data) -> int:
    labels = node_labels(data)
    highest = int(labels.max()) if labels.numel() else -1
    if highest < 0:
        raise UsageError("data.y holds no class, a number of at least 0")
    return classes_of(highest, data.num_nodes)


def classes_of(highest: int, num_nodes: int) -> int:
    """Returns the number of classes, of which ``highest`` is the highest label; a model has
    parameters for each.
    """
    if highest >= max(num_nodes, _FEW_CLASSES):
        raise UsageError(
            f"data.y holds the label {highest} in a graph of {counted(num_nodes, 'nodes')}: number "
            "the classes from 0 on, as y.unique(return_inverse=True)[1] does, with -1 for none"
        )
    return highest + 1


def call_of(name: str, data: Data, columns: int = 0) -> Any:
    """Calls the model; GCN takes edge weights where the graph has them, others take none."""
    weighted = name == "gcn" and isinstance(data.get("edge_weight"), Tensor)

    def forward(model: nn.Module, data: Data) -> Any:
        if columns:
            data = copy.copy(data)
            data.x = with_labels(data.x, data.y, data.label_mask, columns)
        if weighted:
            return model(data.x, data.edge_index, data.edge_weight.view(-1))
        return call_model(model, data)

    return forward


def _message_flow(config: RunConfig, data: Data) -> Data | None:
    """Returns the message flow graph of the training nodes, where the run takes one."""
    weighted = config.model.name == "gcn" and isinstance(data.get("edge_weight"), Tensor)
    if config.mfg == "off":
        return None
    if config.mfg == "auto" and (weighted or config.model.norm == "batch"):
        return None
    seeds = find_targets(data, "y", column=config.train.split).masks["train"]
    if config.mfg == "auto":
        return flow_that_pays(data, seeds, config.model.layers)
    return message_flow_graphs(data, seeds, config.model.layers)


def _callbacks(
    config: RunConfig, stock: StockModel | None, stop: SignalNotice | None
) -> list[Callback]:
    callbacks: list[Callback] = []
    if config.progress == "bar":
        callbacks.append(TqdmProgress(config.model.name))
    elif config.progress == "lines":
        callbacks.append(LineProgress())
    if config.tensorboard is not None:
        callbacks.append(TensorBoard(config.tensorboard))
    if config.report is not None:
        settings = {
            "parts": os.path.abspath(config.parts),
            "model": asdict(config.model),
            "loss": config.loss,
            "metric": config.metric,
            "policy": asdict(config.policy),
            "resumed_from": config.resume,
        }
        replaces = {"overwrite": config.overwrite, "again": config.auto_resume}
        callbacks.append(Report(config.report, config=settings, **replaces))
    if config.checkpoint is not None:
        extra: dict[str, Any] = {"model": _model_of(config)}
        if stock is not None:
            extra["pyg"] = asdict(stock)
        extra |= {"labels": config.labels, "split": config.train.split}
        extra["overwrite"] = config.overwrite
        every = config.checkpoint_every
        callbacks.append(CheckpointEvery(config.checkpoint, every, stop, **extra))
    return callbacks


def _model_of(config: RunConfig) -> dict[str, Any]:
    """Returns what a checkpoint says of the model, as values of JSON."""
    return asdict(config.model) | {"args": None if config.args is None else list(config.args)}


def _resume(trainer: Trainer, path: str, config: RunConfig) -> None:
    saved = inspect_checkpoint(path, trainer.comm).state.get("extra", {}).get("model")
    now = _model_of(config)
    if saved is not None and saved != now and not config.allow_changes:
        changes = [
            f"{k}={saved.get(k)!r} is now {v!r}" for k, v in now.items() if saved.get(k) != v
        ]
        raise CheckpointError(
            f"{path!r} was saved with another model: {', '.join(changes)}; give the same model"
        )
    trainer.resume(path, allow_changes=config.allow_changes)
    if trainer.epoch > config.train.epochs:
        raise UsageError(
            f"{path} has {counted(trainer.epoch, 'epochs')}, --epochs is {config.train.epochs}: "
            "nothing to train"
        )
    if trainer.comm.rank == 0:
        done = f"epoch {trainer.epoch} of {config.train.epochs}"
        sys.stderr.write(f"resumed from {path} after {done}\n")
