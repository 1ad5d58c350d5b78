"""A training run as ``pyg-sar train`` describes it: what each of its workers does."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator, current
from pyg_sar.convert import distribute
from pyg_sar.errors import CheckpointError, PygSarError
from pyg_sar.partition.loading import load_partition
from pyg_sar.policy import SARPolicy
from pyg_sar.tools.models import build_model
from pyg_sar.train.callbacks import CheckpointEvery, LineProgress, TqdmProgress
from pyg_sar.train.checkpoint import load_checkpoint
from pyg_sar.train.config import TrainConfig, TrainResult
from pyg_sar.train.report import Report
from pyg_sar.train.splits import node_labels
from pyg_sar.train.trainer import Callback, Trainer

__all__ = ["ModelConfig", "RunConfig", "UsageError", "train_worker"]


class UsageError(PygSarError, ValueError):
    """What the user asked for does not fit together; met by every worker alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The arguments of :func:`pyg_sar.tools.models.build_model` that a user chooses.

    ``hidden=None`` means 8 per head for attention models and 64 otherwise.
    """

    name: str = "gat"
    hidden: int | None = None
    layers: int = 2
    heads: int = 8
    out_heads: int = 1
    dropout: float = 0.5
    norm: str = "none"

    def build(self, in_channels: int, out_channels: int) -> nn.Module:
        """The model, its parameters drawn from the current random state."""
        hidden = self.hidden
        if hidden is None:
            hidden = 8 if self.name in ("gat", "gatv2") else 64
        return build_model(
            self.name,
            in_channels,
            hidden,
            out_channels,
            layers=self.layers,
            heads=self.heads,
            out_heads=self.out_heads,
            dropout=self.dropout,
            norm=self.norm,
            cached=True,  # A run has one graph.
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run.

    Args:
        parts: A folder that :func:`pyg_sar.write_partitions` wrote.
        model: The model.
        train: Settings of the training loop; its seed also draws the first parameters.
        policy: How layers run distributed.
        checkpoint: File for checkpoints.
        checkpoint_every: Epochs between them.
        resume: Checkpoint to go on from.
        auto_resume: Go on from ``checkpoint`` where that file exists.
        allow_changes: Resume although settings differ.
        report: Folder for the report.
        overwrite: Replace another run's report.
        progress: A bar, a line per evaluation, or nothing.
    """

    parts: str
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    policy: SARPolicy = field(default_factory=SARPolicy)
    checkpoint: str | None = None
    checkpoint_every: int = 10
    resume: str | None = None
    auto_resume: bool = False
    allow_changes: bool = False
    report: str | None = None
    overwrite: bool = False
    progress: Literal["bar", "lines", "none"] = "bar"


def train_worker(config: RunConfig) -> TrainResult:
    """Loads this worker's part, trains, and returns the result. Collective.

    Raises:
        UsageError: on every worker, where the settings do not fit the graph or each other.
    """
    try:
        trainer = _prepare(config, current())
    except PygSarError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return trainer.fit()


def _prepare(config: RunConfig, comm: Communicator) -> Trainer:
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
    model = config.model.build(data.x.size(1), _count_classes(data, comm)).to(comm.device)
    trainer = Trainer(
        distribute(model, policy=config.policy),
        data,
        config.train,
        forward=_forward(config.model.name, data),
        callbacks=_callbacks(config),
    )
    path = config.resume
    if path is None and config.auto_resume and config.checkpoint is not None:
        # Rank 0 wrote it, so rank 0 knows whether there is one.
        path = (
            config.checkpoint if comm.broadcast_object(os.path.isfile(config.checkpoint)) else None
        )
    if path is not None:
        _resume(trainer, path, config)
    return trainer


def _features(data: Data) -> Tensor:
    x = data.get("x")
    if not isinstance(x, Tensor) or x.dim() != 2:
        raise UsageError("The graph has no node features: data.x must have shape [num_nodes, F]")
    if x.layout != torch.strided:
        x = x.to_dense()
    return x if x.is_floating_point() else x.float()


def _count_classes(data: Data, comm: Communicator) -> int:
    labels = node_labels(data)
    highest = comm.all_gather_object(int(labels.max()) if labels.numel() else -1)
    return int(max(highest)) + 1


def _forward(name: str, data: Data) -> Any:
    """GCN takes edge weights where the graph has them; the other models have no use for them."""
    weighted = name == "gcn" and isinstance(data.get("edge_weight"), Tensor)

    def forward(model: nn.Module, data: Data) -> Any:
        if weighted:
            return model(data.x, data.edge_index, data.edge_weight.view(-1))
        return model(data.x, data.edge_index)

    return forward


def _callbacks(config: RunConfig) -> list[Callback]:
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
        callbacks.append(
            CheckpointEvery(config.checkpoint, config.checkpoint_every, model=asdict(config.model))
        )
    return callbacks


def _resume(trainer: Trainer, path: str, config: RunConfig) -> None:
    saved = load_checkpoint(path, comm=trainer.comm).state.get("extra", {}).get("model")
    now = asdict(config.model)
    if saved is not None and saved != now and not config.allow_changes:
        changes = [
            f"{k}={saved.get(k)!r} is now {v!r}" for k, v in now.items() if saved.get(k) != v
        ]
        raise CheckpointError(
            f"{path!r} was saved with another model: {', '.join(changes)}; give the same model"
        )
    trainer.resume(path, allow_changes=config.allow_changes)
