"""A training run as ``pyg-sar train`` describes it."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator, current
from pyg_sar.comm.processes import SignalNotice
from pyg_sar.convert import distribute
from pyg_sar.errors import CheckpointError, PygSarError
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.message_flow import message_flow_graphs
from pyg_sar.policy import SARPolicy
from pyg_sar.tools.models import StockModel, stock_model
from pyg_sar.train.callbacks import CheckpointEvery, LineProgress, TqdmProgress
from pyg_sar.train.checkpoint import inspect_checkpoint
from pyg_sar.train.config import TrainConfig, TrainResult
from pyg_sar.train.flow import NeighborSampling, call_model, flow_that_pays
from pyg_sar.train.report import Report
from pyg_sar.train.targets import find_targets, node_labels, with_labels
from pyg_sar.train.trainer import Callback, Trainer
from pyg_sar.wording import counted

_FEW_CLASSES = 2**16  # may be numbered with gaps, however small the graph


class UsageError(PygSarError, ValueError):
    """Options that do not fit together; every worker meets them alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The arguments of :func:`pyg_sar.tools.models.stock_model` that a user chooses."""

    name: str = "gat"
    hidden: int = 64
    layers: int = 2
    heads: int = 8
    dropout: float = 0.5
    norm: str = "none"

    def stock(self, in_channels: int, out_channels: int, *, cached: bool = True) -> StockModel:
        """Returns the class of PyG and its arguments; ``cached`` for a run with one graph."""
        return stock_model(
            self.name,
            in_channels,
            self.hidden,
            out_channels,
            layers=self.layers,
            heads=self.heads,
            dropout=self.dropout,
            norm=self.norm,
            cached=cached,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run.

    Args:
        parts: A folder that :func:`pyg_sar.write_partitions` wrote.
        model: The model.
        train: Settings of the training loop; its seed also draws the first parameters.
        policy: How layers run distributed.
        mfg: Whether training steps run on message flow graphs; ``'auto'``: where they pay.
        labels: The share of training nodes that show their labels in each step, as one-hot columns
            behind the features (``Trainer(labels=...)``).
        sampler: Train on sampled neighbours.
        checkpoint: File for checkpoints.
        checkpoint_every: Epochs between them.
        resume: Checkpoint to go on from.
        auto_resume: Go on from ``checkpoint`` where that file exists, else from ``resume``.
        allow_changes: Resume although settings differ.
        report: Folder for the report.
        overwrite: Replace another run's report and checkpoint.
        progress: A bar, a line per evaluation, or nothing.
    """

    parts: str
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    policy: SARPolicy = field(default_factory=partial(SARPolicy, random="keyed"))
    mfg: Literal["auto", "on", "off"] = "off"
    labels: float | None = None
    sampler: NeighborSampling | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 10
    resume: str | None = None
    auto_resume: bool = False
    allow_changes: bool = False
    report: str | None = None
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

    Args:
        config: The run.
        stop: Says whether a signal asked for a checkpoint and the end.

    Raises:
        StoppedError: on every worker, after such a checkpoint.
        UsageError: on every worker, where the settings do not fit the graph or each other.
    """
    try:
        trainer = _prepare(config, current(), stop)
    except PygSarError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return trainer.fit()


def _prepare(config: RunConfig, comm: Communicator, stop: SignalNotice | None) -> Trainer:
    path = comm.broadcast_object(_checkpoint_to_resume(config) if comm.rank == 0 else None)
    if path == "":
        raise UsageError(
            f"--checkpoint {config.checkpoint}: the file is there, and this run would replace it; "
            "go on from it (--resume), give another file, or replace it (--overwrite)"
        )
    data = load_partition(config.parts)
    if not isinstance(data, Data):
        raise UsageError(
            f"{config.parts!r} holds a heterogeneous graph, which the models of this command don't "
            "take: write a training script as examples/hetero.py does"
        )
    data.x = _features(data)
    seed = config.train.seed
    if seed is not None:
        torch.manual_seed(seed)
    flow = _message_flow(config, data)
    classes = count_classes(data)
    columns = 0 if config.labels is None else classes
    one_graph = flow is None and config.sampler is None
    stock = config.model.stock(data.x.size(1) + columns, classes, cached=one_graph)
    trainer = Trainer(
        distribute(stock.build().to(comm.device), config.policy),
        data,
        config.train,
        forward=call_of(config.model.name, data, columns),
        flow=flow,
        labels=config.labels,
        sampler=config.sampler,
        callbacks=_callbacks(config, stock, stop),
    )
    if path is not None:
        _resume(trainer, path, config)
    return trainer


def _checkpoint_to_resume(config: RunConfig) -> str | None:
    """Returns where the run goes on from; ``""``: it would replace a file without being told to.

    Rank 0 writes the file, so rank 0 knows whether there is one.
    """
    if config.checkpoint is None or not os.path.lexists(config.checkpoint):
        return config.resume
    if config.auto_resume:
        return config.checkpoint
    named = config.resume is not None
    if named and os.path.realpath(str(config.resume)) == os.path.realpath(config.checkpoint):
        return config.resume
    return config.resume if config.overwrite else ""


def _features(data: Data) -> Tensor:
    x = data.get("x")
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.size(1):
        found = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise UsageError(
            "The graph has no node features: data.x must have shape [num_nodes, F], F >= 1 (got "
            f"{found})"
        )
    return x if x.is_floating_point() else x.float()


def count_classes(data: Data) -> int:
    labels = node_labels(data)
    highest = int(labels.max()) if labels.numel() else -1
    if highest < 0:
        raise UsageError("data.y holds no class, a number of at least 0")
    return classes_of(highest, data.num_nodes)


def classes_of(highest: int, num_nodes: int) -> int:
    """Returns the number of classes, of which ``highest`` is the highest label.

    Raises:
        UsageError: When it can't be a class: a model has parameters for each.
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


def _callbacks(config: RunConfig, stock: StockModel, stop: SignalNotice | None) -> list[Callback]:
    callbacks: list[Callback] = []
    if config.progress == "bar":
        callbacks.append(TqdmProgress(config.model.name))
    elif config.progress == "lines":
        callbacks.append(LineProgress())
    if config.report is not None:
        settings = {
            "parts": os.path.abspath(config.parts),
            "model": asdict(config.model),
            "policy": asdict(config.policy),
            "resumed_from": config.resume,
        }
        callbacks.append(Report(config.report, config=settings, overwrite=config.overwrite))
    if config.checkpoint is not None:
        extra: dict[str, Any] = {"model": asdict(config.model), "pyg": asdict(stock)}
        extra |= {"labels": config.labels, "split": config.train.split}
        every = config.checkpoint_every
        callbacks.append(CheckpointEvery(config.checkpoint, every, stop, **extra))
    return callbacks


def _resume(trainer: Trainer, path: str, config: RunConfig) -> None:
    saved = inspect_checkpoint(path, trainer.comm).state.get("extra", {}).get("model")
    now = asdict(config.model)
    if saved is not None and saved != now and not config.allow_changes:
        changes = [
            f"{k}={saved.get(k)!r} is now {v!r}" for k, v in now.items() if saved.get(k) != v
        ]
        raise CheckpointError(
            f"{path!r} was saved with another model: {', '.join(changes)}; give the same model"
        )
    trainer.resume(path, allow_changes=config.allow_changes)
    if trainer.comm.rank == 0:
        done = f"epoch {trainer.epoch} of {config.train.epochs}"
        sys.stderr.write(f"resumed from {path} after {done}\n")
