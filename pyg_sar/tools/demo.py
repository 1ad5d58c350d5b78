"""The demo that ``pyg-sar demo`` shows.

A built-in synthetic graph is cut into parts; a GAT is trained on them by as many workers, and on
the whole graph by one process that uses PyG alone. Three things are shown: the losses are the same,
each worker needs less memory than the single process, and workers send as many bytes as SAR's
formula says: per layer and pass, worker p's halo rows H_p times the bytes of a row,

- forward: fetched, H_p F b;
- backward: source rows fetched again (SAR's case 2, which attention is), H_p F b, and their
  gradients sent to the owners, H_p F b.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data

from pyg_sar.comm.group import current
from pyg_sar.comm.launch import launch
from pyg_sar.convert import distribute
from pyg_sar.files import TemporaryFolder
from pyg_sar.ledger import Ledger
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.storage import merge_partitions, read_metadata, write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.models import build_model
from pyg_sar.train.report import legend_below
from pyg_sar.usage import DemoConfig
from pyg_sar.wording import counted

TOLERANCE = 1e-5
HEADS, HIDDEN, CLASSES = 4, 16, 8
ROW_BYTES = {
    # GAT's messages read a source row's transformed features, [heads, channels], and its share of
    # the attention score, [heads]; float32.
    "convs.0": 4 * (HEADS * HIDDEN + HEADS),
    "convs.1": 4 * (HEADS * CLASSES + HEADS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRun:
    """The measurements of a worker, or of the single process: the loss of each epoch; bytes in use
    before training, the graph included, and the most while training; bytes received of the kinds
    ``'fetch'`` and ``'refetch'``, and sent of ``'gradient'``; all bytes sent, sums over workers
    included.
    """

    losses: list[float]
    base_memory: int
    peak_memory: int
    traffic: dict[str, int]
    sent: int


def run_demo(config: DemoConfig) -> int:
    """Runs the demo and prints what it shows.

    Returns:
        0 when the losses agree within 1e-5 and the bytes are those expected, otherwise 1.
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
    equal = _show_bytes(workers, halos, config)
    picture = _draw(single, workers, _expected(halos, config), out / "demo.png")
    print(f"\npicture: {picture}" if picture else "\nno picture: pip install 'pyg_sar[plot]'")
    return 0 if same and equal else 1


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
    # The bytes that are expected are those of pulling all rows.
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


def _expected(halos: list[int], config: DemoConfig) -> list[dict[str, int]]:
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
        "\nHalo rows: rows of other workers' nodes that a worker's edges need. Expected: halo rows"
    )
    print("times the bytes of a row; between hosts SARPolicy(push='auto') sends fewer.")
    print("\nbytes            halo rows          fetched    fetched again   gradients sent")
    by_formula = _expected(halos, config)
    for p, (figures, expected) in enumerate(zip(workers, by_formula, strict=True)):
        for name, values in ((f"worker {p}", figures.traffic), ("  expected", expected)):
            text = "  ".join(f"{values[kind]:15,d}" for kind in ("fetch", "refetch", "gradient"))
            print(f"{name:<15}  {halos[p]:9,d}  {text}")
    equal = all(w.traffic == expected for w, expected in zip(workers, by_formula, strict=True))
    sent = sum(w.sent for w in workers)
    halo_bytes = sum(sum(expected.values()) for expected in by_formula)
    print(
        f"{counted(sent, 'bytes')} sent in all, {halo_bytes:,} as expected and "
        f"{sent - halo_bytes:,} for sums (loss, parameter gradients): "
        f"{'equal' if equal else 'NOT equal'}"
    )
    return equal


def _draw(
    single: DemoRun, workers: list[DemoRun], expected: list[dict[str, int]], path: Path
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
    _draw_bytes(traffic, workers, expected)
    figure.savefig(path, dpi=110)
    return path


def _draw_bytes(axes: Any, workers: list[DemoRun], expected: list[dict[str, int]]) -> None:
    for offset, label, totals in (
        (-0.2, "counted", [sum(w.traffic.values()) / 2**20 for w in workers]),
        (0.2, "expected", [sum(row.values()) / 2**20 for row in expected]),
    ):
        axes.bar([p + offset for p in range(len(workers))], totals, width=0.38, label=label)
    axes.set(title="Halo rows and gradients", xlabel="worker", ylabel="MiB")
    axes.set_xticks(range(len(workers)))
    legend_below(axes)
