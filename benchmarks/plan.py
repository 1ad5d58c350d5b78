"""Memory and time that ``pyg_sar.plan`` predicts, beside what workers take, on many configurations.

    python benchmarks/plan.py --out plan.md

Each graph is cut into parts; for each model and mode fresh processes make two training steps, after
one on a tiny graph that loads libraries (``measure`` of ``benchmarks/memory.py``). The peak is the
higher one of two epochs (``VmHWM``) over the baseline, of the worker that needs most. Times are the
processor's for the thread that trains, the fastest of three later steps, of the worker that needs
most: on a machine with other work a clock would say little.

    python benchmarks/plan.py --stored --out plan_stored.md

Parts that wait in a store, with limits of memory: what is moved, the time of an epoch by the clock,
and whether the training goes on at all. Each run is a fresh process, from its start on in a cgroup
with the same limit where one can be made. The benchmark needs an idle machine.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import json
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
from command_line import command
from larger_than_memory import memory_group
from memory import give_back
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.nn.conv import TransformerConv
from tqdm import tqdm

import pyg_sar
from pyg_sar.comm.host import split_parts
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph
from pyg_sar.tools.plan_runs import STEPS, train_step
from pyg_sar.train.flow import call_model


class Transformer(nn.Module):
    """A layer that messages of edges make, without a kernel."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = TransformerConv(features, 16, heads=2)
        self.last = TransformerConv(32, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index).relu(), edge_index)


ALL_GOES_BACK, AS_LAUNCHED = 1 << 16, 1 << 20  # bytes of tensors that malloc gives back
GRAPHS: dict[str, dict[str, Any]] = {
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


STORED: list[tuple[str, int, int, str, str, tuple[int, ...]]] = [
    # graph, workers, parts, method, model, limits in MiB
    ("sparse", 1, 8, "balanced", "sage", (240, 130, 60)),
    ("wide", 1, 16, "balanced", "sage-batch", (240,)),
    ("wide", 2, 6, "random", "gcn-wide", (240,)),
    ("dense", 1, 8, "random", "gat-narrow", (160, 110, 56)),
]


def build(name: str, features: int) -> nn.Module:
    """The models; none of them calibrated anything."""
    models: dict[str, Callable[[], nn.Module]] = {
        "sage": lambda: GraphSAGE(features, 96, 3, 8),
        "sage-batch": lambda: GraphSAGE(features, 128, 2, 8, norm="BatchNorm", dropout=0.5),
        "gcn": lambda: GCN(features, 64, 3, 8),
        "gcn-wide": lambda: GCN(features, 256, 3, 8),
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


def partitioned(folder: Path, graph: str, parts: int, method: str) -> Path:
    root = folder / f"{graph}-{parts}-{method}"
    if not root.exists():
        data = synthetic_graph(SyntheticGraph(**GRAPHS[graph], classes=8))
        pyg_sar.write_partitions(data, parts, root, method)
    return root


def rows(folder: Path, cases: list[Any]) -> Iterator[tuple[Any, ...]]:
    for graph, workers, parts, method, name, modes in tqdm(cases, desc="plan"):
        features = GRAPHS[graph]["features"]
        root = partitioned(folder, graph, parts, method)
        tiny = folder / f"tiny-{features}-{parts}"
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


# Parts in a store ##########################################################################


def measure_stored(root: str, model: nn.Module, group: Path | None) -> tuple[Any, ...]:
    """A part's: bytes at the start and at most; bytes read, written and seconds of a step."""
    comm: Any = pyg_sar.comm.current()
    start, cpu = 0, torch.device("cpu")
    if comm.rank == comm.host.parts.start:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        start = reset_peak_memory(cpu)
    data = pyg_sar.load_partition(root)
    trained = pyg_sar.distribute(model)
    optimizer = torch.optim.Adam(trained.parameters())
    steps = []
    for _ in range(STEPS + 2):
        before, begin = comm.host.store.counters(), time.perf_counter()
        train_step(trained, data, optimizer, call_model)
        after, seconds = comm.host.store.counters(), time.perf_counter() - begin
        moved = [after[name] - before[name] for name in ("bytes_read", "bytes_written")]
        steps.append((*moved, seconds))
    return start, peak_memory(cpu), *map(statistics.mean, zip(*steps[2:], strict=True))


def stored_rows(folder: Path, cases: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Yields rows: what a case is, the forecast, and what was measured, ``None`` if refused."""
    for graph, workers, parts, method, name, limits in tqdm(cases, desc="plan, stored"):
        root = partitioned(folder, graph, parts, method)
        torch.manual_seed(0)
        model = build(name, GRAPHS[graph]["features"])
        for limit in limits:
            bytes_ = limit << 20
            given: Any = {"workers": [workers], "modes": [1], "memory": bytes_, "store": folder}
            found = pyg_sar.plan(model, root, **given).forecasts[0]
            fits = not found.refused and max(found.memory) <= bytes_
            moved = sum(found.read) + sum(found.written)
            with memory_group(bytes_ * workers) as group:
                how: Any = {"parts": parts, "memory": bytes_, "store": folder}
                how |= {"threads_per_worker": 1}
                try:
                    runs = pyg_sar.launch(measure_stored, workers, str(root), model, group, **how)
                except pyg_sar.errors.PygSarError as error:
                    tqdm.write(str(error).splitlines()[0])
                    runs = []
            measured = stored_result(runs, workers, parts) if runs else None
            row = graph, workers, parts, method, name, limit, fits, moved, found.seconds, measured
            tqdm.write(f"{row} {'' if group is None else 'in a cgroup'}")
            yield row


def stored_result(runs: list[Any], workers: int, parts: int) -> tuple[float, ...]:
    """Returns the peak, bytes read and written in all, and seconds."""
    groups = [runs[parts.start : parts.stop] for parts in split_parts(parts, workers)]
    peak = max(max(run[1] for run in group) - group[0][0] for group in groups)
    read, written = (sum(statistics.mean(run[k] for run in g) for g in groups) for k in (2, 3))
    return peak, read, written, max(max(run[4] for run in group) for group in groups)


def stored_document(args: argparse.Namespace, found: list[Any], load: float) -> str:
    lines = [
        "# Predicted traffic of a store",
        "",
        f"{date.today()}, `{command(args)}`, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, torch-geometric {torch_geometric.__version__}. The graphs of "
        "[plan.md](plan.md), mode 1, one thread for each worker. MB: read from and written to the "
        "store per epoch, of all workers. MiB at most: of the worker that takes most, from the "
        "start of its process. Seconds are the clock's. Fits: predicted, and whether the training "
        "ended without an error and within its limit (the run was in a cgroup of this limit where "
        "one could be made). Load at the start and at the end: "
        f"{load:.1f} and {os.getloadavg()[0]:.1f}.",
        "",
        "| graph | W | parts | method | model | MiB allowed | fits | MiB at most | MB predicted "
        "| moved | ratio | predicted s | measured | ratio |",
        "|---" * 14 + "|",
    ]
    bytes_, times, right = [], [], []
    for *names, limit, predicted, moved, expected, measured in found:
        fits = measured is not None and measured[0] <= limit << 20
        right.append(predicted == fits)
        cells = [*map(str, names), str(limit)]
        cells += [" and ".join("yes" if one else "no" for one in (predicted, fits))]
        if measured is None or not predicted or not sum(measured[1:3]):
            cells += ["" if measured is None else f"{measured[0] / 2**20:.0f}", *[""] * 6]
        else:
            peak, read, written, seconds = measured
            bytes_.append(moved / (read + written))
            times.append(expected / seconds)
            cells += [f"{peak / 2**20:.0f}", f"{moved / 1e6:.0f}", f"{(read + written) / 1e6:.0f}"]
            cells += [f"{bytes_[-1]:.2f}", f"{expected:.2f}", f"{seconds:.2f}"]
            cells += [f"{times[-1]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f'"Fits" is right in {sum(right)} of {len(right)}.']
    if times:
        for what, ratios in (("Bytes moved", bytes_), ("Seconds", times)):
            lines.append(
                f"{what}: {min(ratios):.2f} to {max(ratios):.2f} times those measured, median "
                f"error {statistics.median(abs(ratio - 1) for ratio in ratios):.2f}."
            )
    return "\n".join(lines) + "\n"


# The documents ############################################################################


def document(args: argparse.Namespace, found: list[Any], load: float) -> str:
    lines = [
        "# Predicted memory and time",
        "",
        f"{date.today()}, `{command(args)}`, {os.cpu_count()} cores, torch "
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
    parser.add_argument("--stored", action="store_true", help="parts in a store, with limits")
    parser.add_argument("--folder", help="where partitions and the store go for the time")
    parser.add_argument("--shrink", type=int, default=1, help="graphs smaller by this factor")
    parser.add_argument("--rows", type=Path, help="file of rows: those of other runs are taken")
    args = parser.parse_args()
    torch.set_num_threads(1)
    everything: list[Any] = STORED if args.stored else CASES
    cases = [case for case in everything if args.only is None or args.only in case]
    found: list[Any] = []
    if args.rows and args.rows.exists():
        found = [json.loads(line) for line in args.rows.read_text().splitlines()]
    for size in GRAPHS.values():
        size["nodes"], size["edges"] = size["nodes"] // args.shrink, size["edges"] // args.shrink
    load = os.getloadavg()[0]
    make, write = (stored_rows, stored_document) if args.stored else (rows, document)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for row in make(Path(folder), cases):
            found.append(row)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            text = write(args, found, load)
            if args.out:
                args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
