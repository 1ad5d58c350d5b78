"""A training run as ``pyg-sar train`` describes it, and the one that ``pyg-sar demo`` shows.

[Note: the demo]
A built-in synthetic graph is cut into parts; a GAT is trained on them by as many workers, and on
the whole graph by one process that uses PyG alone. Three things are shown: the losses are the same,
each worker needs less memory than the single process, and what the workers send is what the law
says: per layer and pass, worker p's halo rows H_p times the bytes of a row,

- forward: fetched, H_p F b;
- backward: source rows fetched again (SAR's case 2, which attention is), H_p F b, and their
  gradients sent to the owners, H_p F b.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator, current
from pyg_sar.comm.launch import launch
from pyg_sar.comm.processes import SignalNotice
from pyg_sar.convert import distribute
from pyg_sar.errors import CheckpointError, PygSarError
from pyg_sar.files import TemporaryFolder
from pyg_sar.ledger import Ledger
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.message_flow import message_flow_graphs
from pyg_sar.partition.storage import merge_partitions, read_metadata, write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.models import StockModel, build_model, stock_model
from pyg_sar.train.callbacks import CheckpointEvery, LineProgress, TqdmProgress
from pyg_sar.train.checkpoint import inspect_checkpoint
from pyg_sar.train.config import TrainConfig, TrainResult
from pyg_sar.train.flow import NeighborSampling, call_model, flow_that_pays
from pyg_sar.train.report import Report, legend_below
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
        print(f"resumed from {path} after {done}", file=sys.stderr, flush=True)


# The demo #####################################################################

TOLERANCE = 1e-5
HEADS, HIDDEN, CLASSES = 4, 16, 8
ROW_BYTES = {
    # GAT's messages read a source row's transformed features, [heads, channels], and its share of
    # the attention score, [heads]; float32.
    "convs.0": 4 * (HEADS * HIDDEN + HEADS),
    "convs.1": 4 * (HEADS * CLASSES + HEADS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """The settings of the demo; see ``pyg-sar demo --help``."""

    nodes: int = 20_000
    workers: int = 4
    epochs: int = 20
    mode: int = 1
    prefetch: Literal[0, 1] = 1
    seed: int = 0
    out: str = "runs/demo"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRun:
    """The measurements of a worker, or of the single process.

    Attributes:
        losses: Per epoch.
        base_memory: Bytes in use before training, the graph included.
        peak_memory: The most bytes in use while training.
        traffic: Bytes per kind: ``'fetch'`` and ``'refetch'`` received, ``'gradient'`` sent.
        sent: All bytes sent, sums over workers included.
    """

    losses: list[float]
    base_memory: int
    peak_memory: int
    traffic: dict[str, int]
    sent: int


def run_demo(config: DemoConfig) -> int:
    """Runs the demo and prints what it shows.

    Returns:
        0 when the losses agree within 1e-5 and the bytes equal the law's, otherwise 1.
    """
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("pyg_sar-demo-", out) as folder:
        parts = folder / "parts"
        data = load_graph("synthetic", seed=config.seed, nodes=config.nodes, classes=CLASSES)
        print(
            f"synthetic graph: {counted(data.num_nodes, 'nodes')}, "
            f"{counted(data.num_edges, 'edges')}"
        )
        print(str(write_partitions(data, config.workers, parts, seed=config.seed)))
        del data
        print(
            f"\ntraining a GAT for {counted(config.epochs, 'epochs')}: one process with plain "
            f"PyG ..."
        )
        single = launch(_single, 1, str(parts), config)[0]
        print(f"... and {counted(config.workers, 'workers')}\n")
        workers = launch(_worker, config.workers, str(parts), config)
        halos = [part.num_halo for part in read_metadata(parts).parts]
    same = _show_losses(single.losses, workers[0].losses)
    _show_memory(single, workers)
    lawful = _show_bytes(workers, halos, config)
    picture = _draw(single, workers, _law(halos, config), out / "demo.png")
    print(f"\npicture: {picture}" if picture else "\nno picture: pip install 'pyg_sar[plot]'")
    return 0 if same and lawful else 1


# The two trainings ###########################################################


def _model(in_channels: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("gat", in_channels, HEADS * HIDDEN, CLASSES, heads=HEADS, dropout=0.0)


def _single(parts: str, config: DemoConfig) -> DemoRun:
    """Trains with plain PyG: nothing of this package but the file format."""
    data = merge_partitions(parts)
    model = _model(data.num_features, config.seed)
    return _train(model, data, config)


def _worker(parts: str, config: DemoConfig) -> DemoRun:
    """Trains the same on several workers: other data, and ``distribute``."""
    data = load_partition(parts)
    # The law that is shown is that of pulling all rows.
    policy = SARPolicy(mode=config.mode, prefetch=config.prefetch, push="off")
    return _train(distribute(_model(data.num_features, config.seed), policy), data, config)


def _train(model: nn.Module, data: Data, config: DemoConfig) -> DemoRun:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    mask, losses = data.train_mask, []
    with Ledger(current()) as ledger:
        for _ in range(config.epochs):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.x, data.edge_index)[mask], data.y[mask])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return DemoRun(
        losses=losses,
        base_memory=ledger.baseline_memory,
        peak_memory=ledger.peak_memory,
        traffic={
            "fetch": ledger.received_bytes(kind="fetch"),
            "refetch": ledger.received_bytes(kind="refetch"),
            "gradient": ledger.sent_bytes(kind="gradient"),
        },
        sent=ledger.sent,
    )


# What is shown ###############################################################


def _show_losses(one: list[float], many: list[float]) -> bool:
    print(f"{'epoch':>5}  {'one process':>12}  {'workers':>12}  {'difference':>12}")
    for epoch, (a, b) in enumerate(zip(one, many, strict=True), start=1):
        print(f"{epoch:5d}  {a:12.8f}  {b:12.8f}  {abs(a - b):12.2e}")
    largest = max((abs(a - b) for a, b in zip(one, many, strict=True)), default=0.0)
    same = largest <= TOLERANCE
    verdict = "the same" if same else f"NOT the same: more than {TOLERANCE:.0e} apart"
    print(f"largest difference {largest:.2e}: {verdict}")
    return same


def _show_memory(single: DemoRun, workers: list[DemoRun]) -> None:
    print("\nmemory (MiB)     before training   peak   training alone")
    rows = [("one process", single), *((f"worker {p}", run) for p, run in enumerate(workers))]
    for name, figures in rows:
        base, peak = figures.base_memory / 2**20, figures.peak_memory / 2**20
        print(f"{name:<15}  {base:15.1f}  {peak:5.0f}  {peak - base:15.1f}")
    most = max(w.peak_memory - w.base_memory for w in workers)
    share = most / max(single.peak_memory - single.base_memory, 1)
    print(f"training needs at most {100 * share:.0f}% of the single process's memory on a worker")


def _law(halos: list[int], config: DemoConfig) -> list[dict[str, int]]:
    """Returns each worker's bytes per kind, from the partition and the layer widths."""
    layer_bytes = config.epochs * sum(ROW_BYTES.values())
    # Modes 2 and 3 keep the rows of the forward pass, so that none are fetched again.
    refetched = 1 if config.mode == 1 else 0
    return [
        {
            "fetch": halo * layer_bytes,
            "refetch": halo * layer_bytes * refetched,
            "gradient": halo * layer_bytes,
        }
        for halo in halos
    ]


def _show_bytes(workers: list[DemoRun], halos: list[int], config: DemoConfig) -> bool:
    print(
        "\nAll rows are pulled, as on one host; between hosts SARPolicy(push='auto') takes fewer."
    )
    print("\nbytes            halo rows          fetched    fetched again   gradients sent")
    law = _law(halos, config)
    for p, (figures, expected) in enumerate(zip(workers, law, strict=True)):
        for name, values in ((f"worker {p}", figures.traffic), ("  the law", expected)):
            text = "  ".join(f"{values[kind]:15,d}" for kind in ("fetch", "refetch", "gradient"))
            print(f"{name:<15}  {halos[p]:9,d}  {text}")
    lawful = all(w.traffic == expected for w, expected in zip(workers, law, strict=True))
    sent = sum(w.sent for w in workers)
    by_law = sum(sum(expected.values()) for expected in law)
    print(
        f"{counted(sent, 'bytes')} sent in all, {by_law:,} by the law and {sent - by_law:,} for "
        f"sums (loss, parameter gradients): {'equal' if lawful else 'NOT equal'} to the byte"
    )
    return lawful


def _draw(
    single: DemoRun, workers: list[DemoRun], law: list[dict[str, int]], path: Path
) -> Path | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, memory, traffic = figure.subplots(1, 3)
    epochs = range(1, len(single.losses) + 1)
    loss.plot(epochs, single.losses, linewidth=4, alpha=0.4, label="one process, plain PyG")
    loss.plot(epochs, workers[0].losses, "k--", label=f"{counted(len(workers), 'workers')}")
    loss.set(title="Loss", xlabel="epoch", ylabel="mean cross entropy")
    legend_below(loss)
    names = ["one", *(str(p) for p in range(len(workers)))]
    used = [(r.peak_memory - r.base_memory) / 2**20 for r in (single, *workers)]
    memory.bar(names, used, color=["tab:gray", *["tab:blue"] * len(workers)])
    memory.set(title="Memory for training", xlabel="process", ylabel="MiB over the start")
    _draw_bytes(traffic, workers, law)
    figure.savefig(path, dpi=110)
    return path


def _draw_bytes(axes: Any, workers: list[DemoRun], law: list[dict[str, int]]) -> None:
    for offset, label, totals in (
        (-0.2, "counted", [sum(w.traffic.values()) / 2**20 for w in workers]),
        (0.2, "by the law", [sum(row.values()) / 2**20 for row in law]),
    ):
        axes.bar([p + offset for p in range(len(workers))], totals, width=0.38, label=label)
    axes.set(title="Halo rows and gradients", xlabel="worker", ylabel="MiB")
    axes.set_xticks(range(len(workers)))
    legend_below(axes)
