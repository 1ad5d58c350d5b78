"""Times a training step on an R-MAT graph, beside the least that it has to compute.

.. code-block:: bash

    python benchmarks/epochs.py --out epochs.md

R-MAT (a=.57, b=c=.19), SAGE 100-256-256-40 and GAT 4 heads of 32. One process: a step beside its
dense products alone, and beside its sums alone as transformed (the last layer's after its map).
Several workers with one thread each: their step beside that of one worker with two threads, all on
the default partition, measured in turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from command_line import command
from partitions import rmat
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GraphSAGE
from tqdm import tqdm

import pyg_sar

WIDTHS = (100, 256, 256, 40)
MODELS: dict[str, Callable[[float], torch.nn.Module]] = {
    "SAGE": lambda p: GraphSAGE(100, 256, 3, 40, dropout=p),
    "GAT": lambda p: GAT(100, 128, 3, 40, heads=4, dropout=p),
}


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def graph(nodes: int, edges: int) -> Data:
    """The graph, with drawn features and classes."""
    draw = torch.Generator().manual_seed(0)
    data = Data(edge_index=rmat(nodes, edges), num_nodes=nodes)
    data.x = torch.randn(nodes, WIDTHS[0], generator=draw)
    data.y = torch.randint(WIDTHS[-1], (nodes,), generator=draw)
    return data


def step_of(model: torch.nn.Module, data: Data) -> Any:
    """A training step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out, data.y).backward()
        optimizer.step()

    return step


# One process #################################################################


def products(nodes: int) -> Callable[[], None]:
    """The dense products of a SAGE step: two maps per layer, forward and backward."""
    maps = [
        (torch.randn(nodes, a), torch.randn(nodes, b), torch.randn(a, b), k)
        for k, (a, b) in enumerate(pairwise(WIDTHS))
    ]

    def run() -> None:
        for x, gradient, weight, layer in maps:
            for _ in range(2):  # of the sums, and of the node's own row
                x @ weight
                x.t() @ gradient
                if layer:  # features want no gradient
                    gradient @ weight.t()

    return run


def sums(data: Data) -> Callable[[], None]:
    """The sums of a SAGE step: of 100, 256 and 40 numbers forward; of 256 and 40 backward."""
    from pyg_sar.nn.one_process import OwnGraphs
    from pyg_sar.space.shard import shards_of

    edges = OwnGraphs().find(data.edge_index, data.num_nodes, None)
    block = shards_of(edges).blocks[0]
    from pyg_sar.engine.kernels.sums import add_gathered

    rows = {width: torch.randn(data.num_nodes, width) for width in (100, 256, 40)}
    totals = {width: torch.zeros(data.num_nodes, width) for width in rows}
    block.transposed()

    def run() -> None:
        for width in (100, 256, 40):
            add_gathered(totals[width].zero_(), rows[width], block.segments, None)
        for width in (40, 256):
            add_gathered(totals[width].zero_(), rows[width], block.transposed(), None)

    return run


def one_process(nodes: int, edges: int, rounds: int) -> list[str]:
    """The step, the products and the sums, in turns."""
    torch.set_num_threads(2)
    data = graph(nodes, edges)
    model = pyg_sar.distribute(GraphSAGE(100, 256, 3, 40))
    ways = {
        "dense products alone": products(nodes),
        "sums alone, as transformed": sums(data),
        "training step": step_of(model, data),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in tqdm(range(rounds + 1), desc="one process"):
        for name, run in ways.items():
            spent = seconds(run)
            if turn:
                times[name].append(spent)
    found = {name: median(spent) for name, spent in times.items()}
    least = found["dense products alone"] + found["sums alone, as transformed"]
    lines = [f"| {name} | {spent:.2f} |" for name, spent in found.items()]
    ratio = found["training step"] / least
    return [
        f"## One process, two threads, {nodes:,} nodes, {edges:,} edges, SAGE",
        "",
        "| | seconds |",
        "|---|---|",
        *lines,
        "",
        f"The step takes {ratio:.2f} times products and sums.",
        "",
    ]


# Workers #####################################################################


KINDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem")


def resident() -> list[float]:
    """MiB resident now, the most so far, and of now: anonymous, of files, and shared."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(status[name].split()[0]) / 1024 for name in KINDS]


def measure(
    root: str, model: str, dropout: float, rounds: int
) -> tuple[list[float], float, list[float]]:
    """Seconds of steps at this worker; MiB kept between them; what is resident at the peak."""
    start = resident()
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    step = step_of(pyg_sar.distribute(MODELS[model](dropout)), data)
    step()
    comm, times = pyg_sar.comm.current(), []
    for _ in range(rounds):
        comm.barrier()
        times.append(seconds(step))
    kept, samples, over = resident(), [], threading.Event()

    def watch() -> None:
        samples.append(resident())
        while not over.wait(0.01):
            samples.append(resident())

    thread = threading.Thread(target=watch)
    thread.start()
    step()
    over.set()
    thread.join()
    most = max(samples)
    most[1] = resident()[1]
    return times, kept[0] - start[0], [m - s for m, s in zip(most, start, strict=True)][1:]


def workers(nodes: int, edges: int, counts: list[int], dropout: float, rounds: int) -> list[str]:
    """Steps of several workers beside those of one, in turns."""
    data, lines = graph(nodes, edges), []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            pyg_sar.write_partitions(data, count, f"{folder}/{count}")
        del data
        for model in MODELS:
            times: dict[int, list[float]] = {count: [] for count in counts}
            sizes: dict[int, list[float]] = {}
            for _ in tqdm(range(rounds), desc=model):
                for count in counts:
                    given = f"{folder}/{count}", model, dropout, 2
                    threads = 2 if count == 1 else 1
                    found = pyg_sar.launch(measure, count, *given, threads_per_worker=threads)
                    times[count] += [max(turn) for turn in zip(*(f[0] for f in found), strict=True)]
                    sizes[count] = [max(f[1] for f in found), *max(f[2] for f in found)]
            first, (_, most, own, *_) = min(times[1]), sizes[1]
            lines += [
                f"| {model} | {count} | {min(spent):.2f} | {min(spent) / first:.2f} "
                f"| {kept:.0f} | {peak:.0f} | {peak / most:.2f} | {anonymous:.0f} "
                f"| {anonymous / own:.2f} | {of_files:.0f} | {shared:.0f} |"
                for (count, spent), (kept, peak, anonymous, of_files, shared) in zip(
                    times.items(), sizes.values(), strict=True
                )
            ]
    return [
        f"## Workers, {nodes:,} nodes, {edges:,} edges, dropout {dropout:g}",
        "",
        "The fastest step of the slowest worker. Memory: MiB resident in the largest worker "
        "more than at its start, kept between steps, and at the peak, which are anonymous, pages "
        "of the part's file (which the system takes back when it needs memory), and shared with "
        "other workers (those of others that it reads, too, so that they count twice).",
        "",
        "| model | workers | seconds | to one | kept | peak | to one | anonymous | to one | file "
        "| shared |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *lines,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--dropout", type=float, default=0.0, help="of the workers' models")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the tables here as Markdown")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    lines = one_process(args.nodes, args.edges, 2 * args.rounds)
    if args.workers:
        counts = sorted({1, *args.workers})
        lines += workers(args.nodes, args.edges, counts, args.dropout, args.rounds)
    head = [
        "# Training steps on an R-MAT graph",
        "",
        f"{date.today()}, `{command(args)}`, {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__}. Load at the start and at the end: {load:.1f} and "
        f"{os.getloadavg()[0]:.1f}.",
        "",
    ]
    text = "\n".join([*head, *lines])
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
