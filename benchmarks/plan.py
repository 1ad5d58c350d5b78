"""Memory and time that ``pyg_sar.plan`` predicts, beside what workers take, on many configurations.

    python benchmarks/plan.py --out docs/benchmarks/plan.md

Each graph is cut into parts; for each model and mode fresh processes make two training steps, after
one on a tiny graph that loads libraries (``measure`` of ``benchmarks/memory.py``). The peak is the
higher one of two epochs (``VmHWM``) over the baseline, of the worker that needs most. Times are the
processor's for the thread that trains, the fastest of three later steps, of the worker that needs
most: on a machine with other work a clock would say little.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from memory import give_back
from torch import nn
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.nn.conv import TransformerConv
from tqdm import tqdm

import pyg_sar
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph
from pyg_sar.tools.plan_runs import train_step
from pyg_sar.train.flow import call_model


class Transformer(nn.Module):
    """A layer that messages of edges make, without a kernel."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = TransformerConv(features, 16, heads=2)
        self.last = TransformerConv(32, classes)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


ALL_GOES_BACK, AS_LAUNCHED = 1 << 16, 1 << 20  # bytes of tensors that malloc gives back
GRAPHS = {
    "sparse": {"nodes": 160_000, "edges": 640_000, "features": 64},
    "dense": {"nodes": 40_000, "edges": 1_600_000, "features": 32},
    "wide": {"nodes": 60_000, "edges": 600_000, "features": 200},
}
CASES: list[tuple[str, int, int, str, str, tuple[int, ...]]] = [
    # graph, workers, parts, method, model, modes
    ("sparse", 2, 2, "balanced", "sage", (1, 3)),
    ("sparse", 4, 4, "random", "gcn", (1, 3)),
    ("dense", 2, 2, "random", "gat", (1, 2, 3)),
    ("dense", 4, 4, "balanced", "sage-batch", (1, 3)),
    ("wide", 3, 3, "balanced", "gin", (1, 2, 3)),
    ("wide", 2, 2, "random", "gat-narrow", (1, 2)),
    ("wide", 3, 3, "random", "transformer", (1,)),
    ("sparse", 1, 4, "random", "sage", (1,)),
    ("dense", 1, 4, "balanced", "gat-narrow", (1,)),
    ("wide", 1, 3, "balanced", "sage-batch", (1,)),
    ("dense", 3, 3, "balanced", "gcn", (1, 3)),
    ("sparse", 2, 2, "random", "gin", (1, 3)),
    ("wide", 2, 2, "balanced", "sage", (1, 3)),
]


def build(name: str, features: int) -> nn.Module:
    """The models; none of them calibrated anything."""
    models: dict[str, Callable[[], nn.Module]] = {
        "sage": lambda: GraphSAGE(features, 96, 3, 8),
        "sage-batch": lambda: GraphSAGE(features, 128, 2, 8, norm="BatchNorm", dropout=0.5),
        "gcn": lambda: GCN(features, 64, 3, 8),
        "gat": lambda: GAT(features, 64, 2, 8, heads=4),
        "gat-narrow": lambda: GAT(features, 32, 3, 8, heads=2, dropout=0.3),
        "gin": lambda: GIN(features, 80, 2, 8),
        "transformer": lambda: Transformer(features, 8),
    }
    return models[name]()


def measure(
    root: str, tiny: str, model: nn.Module, policies: list[pyg_sar.SARPolicy]
) -> list[tuple[int, int, float]]:
    """Bytes at the start and at the peak of two steps, and the processor's seconds of a later."""
    comm = pyg_sar.comm.current()

    def train(folder: str, policy: pyg_sar.SARPolicy, more: int = 0) -> float:
        data = pyg_sar.load_partition(folder)
        trained = pyg_sar.distribute(copy.deepcopy(model), policy)
        optimizer = torch.optim.Adam(trained.parameters())
        times = []
        for _ in range(2 + more):
            start = time.thread_time()
            train_step(trained, data, optimizer, call_model)
            times.append(time.thread_time() - start)
        return min(times[2:] or times)

    found = []
    for policy in policies:
        mallopt(ALL_GOES_BACK)
        train(tiny, policy)
        give_back()
        with pyg_sar.Ledger(comm) as ledger:
            train(root, policy)
        mallopt(AS_LAUNCHED)
        found.append((ledger.baseline_memory, ledger.peak_memory, train(root, policy, 3)))
    return found


def mallopt(threshold: int) -> None:
    """Sets from which size on glibc gives memory back to the system."""
    ctypes.CDLL(None).mallopt(-3, threshold)


def rows(folder: Path, cases: list[Any]) -> Iterator[tuple[Any, ...]]:
    for graph, workers, parts, method, name, modes in tqdm(cases, desc="plan"):
        features = GRAPHS[graph]["features"]
        root, tiny = folder / f"{graph}-{parts}-{method}", folder / f"tiny-{features}-{parts}"
        if not root.exists():
            data = synthetic_graph(SyntheticGraph(**GRAPHS[graph], classes=8))
            pyg_sar.write_partitions(data, parts, root, method)
        if not tiny.exists():
            small = synthetic_graph(SyntheticGraph(nodes=400, degree=5, features=features))
            pyg_sar.write_partitions(small, parts, tiny, "random")
        torch.manual_seed(0)
        model = build(name, features)
        plan = pyg_sar.plan(model, root, workers=[workers], modes=modes)
        how: Any = {} if workers == parts else {"parts": parts}
        given = str(root), str(tiny), model, [pyg_sar.SARPolicy(mode=mode) for mode in modes]
        everyone = pyg_sar.launch(measure, workers, *given, threads_per_worker=1, **how)
        for forecast, runs in zip(plan.forecasts, zip(*everyone, strict=True), strict=True):
            starts, peaks, times = zip(*runs, strict=True)
            if workers == parts:
                peak = max(most - start for start, most in zip(starts, peaks, strict=True))
                seconds = max(times)
            else:  # One process hosts all of them.
                peak, seconds = max(peaks) - min(starts), sum(times)
            predicted = max(forecast.memory), forecast.seconds
            row = graph, workers, parts, method, name, forecast.mode, *predicted, peak, seconds
            tqdm.write(f"{row} {row[6] / peak:.2f} {row[7] / seconds:.2f}")
            yield row


def document(found: list[Any], load: float) -> str:
    lines = [
        "# Predicted memory and time",
        "",
        f"{date.today()}, `python benchmarks/plan.py`, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, torch-geometric {torch_geometric.__version__}. Synthetic graphs "
        "with power-law degrees: "
        + ", ".join(f"{k} ({v['nodes']:,} nodes, {v['edges']:,} edges, {v['features']} features)"
                    for k, v in GRAPHS.items())
        + f". Load at the start and at the end: {load:.1f} and {os.getloadavg()[0]:.1f}.",
        "",
        "MiB of the worker that needs most, beyond the start of its process: as `pyg_sar.plan` "
        "predicts it from samples of the partition's shape, and as measured (`VmHWM`) in two "
        "training steps of workers of one host. The 8 MiB that `plan` adds for a process come from "
        "another graph (100,000 nodes, 1,500,000 edges) and are not fitted to these. Seconds of an "
        "epoch are the processor's for the thread that trains, of the worker that needs most; one "
        "that hosts several parts needs their sum.",
        "",
        "| graph | W | parts | method | model | mode | predicted MiB | measured | ratio "
        "| predicted s | measured | ratio |",
        "|---" * 12 + "|",
    ]  # fmt: skip
    for row in found:
        *names, memory, seconds, peak, time_taken = row
        cells = [*map(str, names), f"{memory / 2**20:.0f}", f"{peak / 2**20:.0f}"]
        cells += [f"{memory / peak:.2f}", f"{seconds:.2f}", f"{time_taken:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{seconds / time_taken:.2f}"]) + " |")
    lines.append("")
    for what, k, limit in (("Memory", 6, 0.1), ("Time", 7, 0.25)):
        ratios = [row[k] / row[k + 2] for row in found]
        within = sum(abs(ratio - 1) <= limit for ratio in ratios)
        lines.append(
            f"{what} within {100 * limit:.0f} %: {within} of {len(ratios)}; lowest "
            f"{min(ratios):.2f}, median {statistics.median(ratios):.2f}, highest "
            f"{max(ratios):.2f}, median error {statistics.median(abs(r - 1) for r in ratios):.2f}."
        )
    lines.append("")
    lines.append(
        "What the mode with the shortest predicted epoch takes beside the fastest of those tried, "
        f"by configuration: {', '.join(f'{ratio:.2f}' for ratio in sorted(choices(found)))}."
    )
    return "\n".join(lines) + "\n"


def choices(found: list[Any]) -> Iterator[float]:
    """Yields measured seconds of the chosen mode over those of the best."""
    for _, rows in itertools.groupby(found, lambda row: row[:5]):
        tried = list(rows)
        if len(tried) > 1:
            chosen = min(tried, key=lambda row: row[7])
            yield chosen[9] / min(row[9] for row in tried)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--only", help="run the cases of this graph or model alone")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only is None or args.only in case]
    found, load = [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), cases):
            found.append(row)
            text = document(found, load)
            if args.out:
                args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
