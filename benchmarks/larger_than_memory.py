"""Memory and time of training with many parts on one worker, with limits and a store.

    python benchmarks/larger_than_memory.py --out larger_than_memory.md

SAGE (3 layers of 256, BatchNorm) and GAT (3 layers of 4 heads of 32, BatchNorm) on a power-law
graph. Plain PyG trains on the whole graph, then one process of pyg_sar; then one worker hosts P
parts, all in memory (no limit), and with a limit of a half and of a quarter of what that took, the
rest in a store on disk.
Deep models (DeeperGCN: ``DeepGCNLayer`` of ``GENConv`` with a learned softmax) on a fixed memory:

    python benchmarks/larger_than_memory.py --nodes 20000 --edges 200000 --parts 16 \
        --models gcn-8 gcn-32 gat-8 gat-32 deepergcn-8 deepergcn-32 --memory 160MiB \
        --out deep.md

Each row is a fresh process; a first epoch is not counted. Memory: the highest resident set
(``VmHWM``) over the resident set at the start. Where the system lets a cgroup be made, the worker
is in one with the same limit from its start on: beyond it the system would kill the worker. The
benchmark stops where a limit changes a loss by one bit.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric
from command_line import command
from torch.nn import LayerNorm, Linear
from torch_geometric.nn import GAT, GCN, DeepGCNLayer, GENConv, GraphSAGE
from tqdm import tqdm

import pyg_sar
from pyg_sar.files import parse_bytes
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.partition.storage import merge_partitions
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

CLASSES = 8


class DeeperGCN(torch.nn.Module):
    """Li et al., "DeeperGCN: All You Need to Train Deeper GCNs", 2020: residual, norm first."""

    def __init__(self, features: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = Linear(features, hidden), Linear(hidden, CLASSES)
        self.layers = torch.nn.ModuleList(
            DeepGCNLayer(
                GENConv(hidden, hidden, aggr="softmax", learn_t=True, norm="layer"),
                LayerNorm(hidden),
                torch.nn.ReLU(),
                block="res+",
                dropout=0.1,
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.last(x)


MODELS: dict[str, Any] = {
    "sage": lambda features: GraphSAGE(features, 256, 3, CLASSES, norm="batch_norm"),
    "gat": lambda features: GAT(features, 128, 3, CLASSES, heads=4, norm="batch_norm"),
    "gcn-8": lambda features: GCN(features, 64, 8, CLASSES, norm="batch_norm"),
    "gcn-32": lambda features: GCN(features, 64, 32, CLASSES, norm="batch_norm"),
    "gat-8": lambda features: GAT(features, 64, 8, CLASSES, heads=4, norm="batch_norm"),
    "gat-32": lambda features: GAT(features, 64, 32, CLASSES, heads=4, norm="batch_norm"),
    "deepergcn-8": lambda features: DeeperGCN(features, 64, 8),
    "deepergcn-32": lambda features: DeeperGCN(features, 64, 32),
}
PLAIN = "plain PyG"
SHARES = {"no limit": None, "a half": 2, "a quarter": 4}
CPU = torch.device("cpu")
WARM_UP = 3
"""Epochs before those that are measured. In these it is found out what each turn needs to read."""


@dataclass(frozen=True)
class Measured:
    """A row.

    Attributes:
        peak: Bytes beyond the start.
        seconds: Of an epoch, the median.
        read: Bytes read from the store per epoch.
        written: Bytes written to it per epoch.
        losses: Of all epochs.
        limit: Bytes that were allowed.
        grouped: A cgroup had this limit.
    """

    peak: int
    seconds: float
    read: float
    written: float
    losses: list[float]
    limit: int | None = None
    grouped: bool = False


@contextmanager
def memory_group(limit: int | None) -> Iterator[Path | None]:
    """A cgroup with a limit of memory, of version 1 or 2; ``None`` where none can be made.

    What a process has when it joins is not counted.
    """
    group = None
    for line in Path("/proc/self/cgroup").read_text().split() if limit is not None else ():
        _, kinds, path = line.split(":", 2)
        old = "memory" in kinds.split(",")
        if kinds and not old:
            continue
        root = Path("/sys/fs/cgroup/memory" if old else "/sys/fs/cgroup")
        place = root / path.lstrip("/") / f"pyg_sar_benchmark_{os.getpid()}"
        with suppress(OSError):
            place.mkdir()
            try:
                (place / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
                group = place
                break
            except OSError:
                place.rmdir()
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


def measure(
    root: str, model_name: str, epochs: int, group: Path | None, plain: bool
) -> tuple[int, int, list[list[int]], Any]:
    """A part's: bytes at its start, at most; bytes read and written by epoch; times and losses."""
    start = 0
    if pyg_sar.comm.current().rank == 0:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        start = reset_peak_memory(CPU)
    data = merge_partitions(root) if plain else pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = MODELS[model_name](data.num_features)
    model = model if plain else pyg_sar.distribute(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    host: Any = getattr(pyg_sar.comm.current(), "host", None)
    moved, times, losses = [], [], []
    for _ in range(WARM_UP + epochs):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
        found = {} if host is None or host.store is None else host.store.counters()
        moved.append([found.get("bytes_read", 0), found.get("bytes_written", 0)])
    return start, peak_memory(CPU), moved, (times[WARM_UP:], losses)


def row(
    root: str, model: str, epochs: int, parts: int, name: str, limit: int | None, store: Any
) -> Measured:
    """Trains in a fresh process."""
    how: dict[str, Any] = {} if parts == 1 else {"parts": parts}
    if limit is not None:
        how |= {"memory": limit, "store": store}
    threads = len(os.sched_getaffinity(0))
    with memory_group(limit) as group:
        given = root, model, epochs, group, name == PLAIN
        found = pyg_sar.launch(measure, 1, *given, threads_per_worker=threads, **how)
    _, _, moved, (times, losses) = found[-1]
    read, written = ((b - a) / epochs for a, b in zip(moved[WARM_UP - 1], moved[-1], strict=True))
    peak = max(most for _, most, _, _ in found) - found[0][0]
    return Measured(peak, median(times), read, written, losses, limit, group is not None)


Found = dict[tuple[str, int, str], Measured]
"""By model, parts (1: the whole graph) and limit."""


def run(args: argparse.Namespace, folder: Path, refused: list[str]) -> Iterator[Found]:
    """The measurements so far; limits that were too low are added to ``refused``."""
    kind = SyntheticGraph(
        nodes=args.nodes, edges=args.edges, features=args.features, classes=CLASSES
    )
    graph = synthetic_graph(kind)
    for parts in (1, *args.parts):
        pyg_sar.write_partitions(graph, parts, folder / f"{parts}")
    del graph
    found: Found = {}
    cases = [(m, p) for m in args.models for p in (1, *args.parts)]
    for model, parts in tqdm(cases, desc="larger than memory"):
        free: Measured | None = None
        shares = SHARES if args.memory is None else {"no limit": None, "fixed": 1}
        for name, share in (shares if parts > 1 else dict.fromkeys([PLAIN, "one process"])).items():
            limit = None if share is None or free is None else args.memory or free.peak // share
            try:
                now = row(f"{folder}/{parts}", model, args.epochs, parts, name, limit, args.store)
            except pyg_sar.errors.WorkerError as error:
                refused.append(f"{model}, {parts} parts, {name}: {str(error).splitlines()[0]}")
                tqdm.write(refused[-1])
                continue
            free = now if free is None or parts == 1 else free
            if now.losses != free.losses:
                raise SystemExit(f"{model}, {parts} parts, {name}: {now.losses}, {free.losses}")
            found[model, parts, name] = now
            tqdm.write(f"{model}, {parts}, {name}: {now}")
        if parts > 1:
            yield found


# What is shown ###############################################################

HEAD = (
    *("model", "parts", "limit", "MiB allowed", "MiB at most", "to no limit", "to one process"),
    *("to plain PyG", "s per epoch", "to no limit", "to one process", "to plain PyG"),
    *("MB read", "MB written", "to the least"),
)


def table(found: Found) -> list[str]:
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for (model, parts, name), now in found.items():
        free = found.get((model, parts, "no limit"), now)
        one, plain = found[model, 1, "one process"], found[model, 1, PLAIN]
        least = None if now.limit is None else 2 * (free.peak - now.limit)
        cells = [
            *(model, parts, name, "" if now.limit is None else f"{now.limit / 2**20:.0f}"),
            *(f"{now.peak / 2**20:.0f}", f"{now.peak / free.peak:.2f}"),
            *(f"{now.peak / one.peak:.2f}", f"{now.peak / plain.peak:.2f}"),
            *(f"{now.seconds:.2f}", f"{now.seconds / free.seconds:.2f}"),
            *(f"{now.seconds / one.seconds:.2f}", f"{now.seconds / plain.seconds:.2f}"),
            *(f"{now.read / 1e6:.0f}", f"{now.written / 1e6:.0f}"),
            "" if least is None else f"{(now.read + now.written) / least:.2f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


WORDS = {"peak memory": "peak", "time of an epoch": "seconds"}


def plot(found: Found, path: Path) -> None:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(model for model, _, _ in found))
    figure = Figure(figsize=(4.2 * len(models), 6), layout="constrained")
    grid = figure.subplots(2, len(models), squeeze=False, sharex=True)
    for column, model in enumerate(models):
        one = found[model, 1, "one process"]
        for row_number, (word, field) in enumerate(WORDS.items()):
            axes = grid[row_number][column]
            for name in dict.fromkeys(limit for _, parts, limit in found if parts > 1):
                points = {
                    parts: getattr(now, field) / getattr(one, field)
                    for (kind, parts, limit), now in found.items()
                    if (kind, limit) == (model, name)
                }
                axes.plot(list(points), list(points.values()), marker="o", label=name)
            axes.axhline(1, color="black", linestyle="--", label="one process")
            plain = found[model, 1, PLAIN]
            axes.axhline(
                getattr(plain, field) / getattr(one, field), color="gray", ls=":", label=PLAIN
            )
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{model}: {word}, to one process", fontsize="medium")
            counts = sorted({p for _, p, _ in found} - {1})
            axes.set_xticks(counts, [str(p) for p in counts])
        grid[1][column].set_xlabel("parts on one worker")
    lines = grid[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=5)
    figure.savefig(path)


def document(args: argparse.Namespace, found: Found, refused: list[str], load: float) -> str:
    grouped = all(now.grouped for now in found.values() if now.limit is not None)
    limits = "Each limit was a cgroup's, too." if grouped else "No cgroup limited the memory."
    lines = [
        "# Larger than memory",
        "",
        f"{date.today()}, `{args.command}`, {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__}, torch-geometric {torch_geometric.__version__}. Power-law graph of "
        f"{args.nodes:,} nodes, {args.edges:,} edges and {args.features} features, float32; the "
        "models are those of the script. One worker hosts all parts. Limits are shares of what "
        "the same parts take without one, or fixed. Each row is a fresh process, and shows the "
        f"median of the epochs after the first {WARM_UP}. Load at the start and at the end: "
        f"{load:.1f} and {os.getloadavg()[0]:.1f}. Losses with a limit were those without, to "
        "the bit.",
        "",
        "Plain PyG: the model alone, on the whole graph. One process: `distribute` on it. MiB: "
        "beyond the start of the process, the libraries' first use included. MB: of the store, "
        "per epoch. The least: what the same parts take beyond the limit, once out and once in. "
        f"{limits}",
        "",
        *table(found),
        "",
        *(f"Refused: {line}\n" for line in refused),
    ]
    if args.out:
        picture = args.out.with_suffix(".svg")
        plot(found, picture)
        lines += [f"![Memory and time]({picture.name})", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["sage", "gat"])
    parser.add_argument(
        "--memory",
        type=lambda text: parse_bytes(text, "--memory"),
        help="a fixed limit in place of shares",
    )
    parser.add_argument("--store", type=Path, help="a folder on the disk of the store")
    parser.add_argument("--out", type=Path, help="write the table here, a picture beside it")
    args = parser.parse_args()
    args.command = command(args)
    args.memory = None if args.memory is None else parse_bytes(args.memory, "--memory")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        args.store = folder
        refused: list[str] = []
        for found in run(args, Path(folder), refused):
            text = document(args, found, refused, load)
            if args.out:
                args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
