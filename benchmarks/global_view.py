"""What the global view costs: epochs of the same training on tensors of the whole graph and on a
worker's own rows, in turn.

    python benchmarks/global_view.py --out docs/benchmarks/global_view.md
    python benchmarks/global_view.py --models gat --workers 2 --results FILE    # in portions

Epochs of both views follow each other in the same processes, the local view first in every other
pair, with one thread per worker. A ratio is the median over pairs, with an interval that holds the
true median with 95 % (order statistics). Beside the time that passes stands the processor time of
all workers, which other programs disturb less. What the global view adds does not grow with the
graph but for what it sends, so it is measured on a small one, too, where little else happens:
milliseconds per epoch. What the views' epochs run and send is counted: functions of the package
that are called, and messages.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import date
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric
from calls import entered
from torch_geometric.nn import GAT, GraphSAGE
from wire import CLASSES, power_law_graph

import pyg_sar
from pyg_sar.comm import current

VIEWS = ("local", "global")
SMALL, SMALL_PAIRS = (400, 4_000), 100
MODELS: dict[str, Any] = {
    "sage": lambda features, hidden: GraphSAGE(features, hidden, 3, CLASSES, norm="batch_norm"),
    "gat": lambda features, hidden: GAT(features, hidden, 3, CLASSES, heads=4, norm="batch_norm"),
}


def train(root: str, name: str, hidden: int, pairs: int) -> dict[str, Any]:
    """Seconds of each pair of epochs, by view: passed, and of the processor; calls and messages.

    The first pair is not counted.
    """
    comm = current()
    data: dict[str, Any] = {}
    models: dict[str, torch.nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for view in VIEWS:
        data[view] = pyg_sar.load_partition(root, view=view)
        torch.manual_seed(0)
        model = MODELS[name](data[view].x.size(1), hidden)
        models[view] = pyg_sar.distribute(model, view=view)
        optimizers[view] = torch.optim.Adam(model.parameters())

    def epoch(view: str) -> tuple[float, float]:
        comm.barrier()
        start = time.perf_counter(), time.process_time()
        optimizers[view].zero_grad()
        out = models[view](data[view].x, data[view].edge_index)
        if view == "local":
            losses = F.cross_entropy(out, data[view].y, reduction="none")
            loss = pyg_sar.mean(losses)
        else:
            loss = F.cross_entropy(out, data[view].y)
        loss.backward()
        optimizers[view].step()
        comm.barrier()
        return time.perf_counter() - start[0], time.process_time() - start[1]

    found = [{view: epoch(view) for view in VIEWS[:: (-1) ** k]} for k in range(1 + pairs)][1:]
    counts = {}
    for view in VIEWS:
        with pyg_sar.Ledger(comm) as ledger:
            calls = entered(partial(epoch, view)).total()
        counts[view] = calls, ledger.sent_messages()
    return {"pairs": found, "counts": counts}


def measure(data: Any, workers: int, name: str, hidden: int, pairs: int) -> dict[str, Any]:
    """Seconds of rank 0's epochs, by view, the processor's of all, and rank 0's counts."""
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(data, workers, root)
        found: list[dict[str, Any]] = pyg_sar.launch(
            train, workers, root, name, hidden, pairs, threads_per_worker=1
        )
    passed = {view: [pair[view][0] for pair in found[0]["pairs"]] for view in VIEWS}
    used = {
        view: [sum(r["pairs"][k][view][1] for r in found) for k in range(pairs)] for view in VIEWS
    }
    return {"passed": passed, "used": used, "counts": found[0]["counts"]}


def ratio(seconds: dict[str, list[float]]) -> str:
    """The median ratio of pairs, and an interval that holds the true one with 95 %."""
    pairs = zip(seconds["global"], seconds["local"], strict=True)
    ratios = sorted(ours / plain for ours, plain in pairs)
    count, below, chance = len(ratios), 0, 0.0
    while (chance := chance + comb(count, below) / 2**count) < 0.025:
        below += 1
    low, high = ratios[max(below - 1, 0)], ratios[min(count - below, count - 1)]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def row(graphs: Any, name: str, workers: int, given: argparse.Namespace) -> str:
    """A line of the table."""
    large, small = graphs
    found = measure(large, workers, name, given.hidden, given.pairs)
    short = measure(small, workers, name, given.hidden, SMALL_PAIRS)["used"]
    pairs = zip(short["global"], short["local"], strict=True)
    more = statistics.median(ours - plain for ours, plain in pairs) / workers
    seconds, used = (statistics.median(found[kind]["local"]) for kind in ("passed", "used"))
    counts = zip(*(found["counts"][view] for view in VIEWS), strict=True)
    calls, messages = (" / ".join(map(str, numbers)) for numbers in counts)
    return (
        f"| {name} | {workers} | {seconds:.2f}, {used / workers:.2f} | {ratio(found['passed'])} | "
        f"{ratio(found['used'])} | {1e3 * more:.1f} | {more * workers / used:.4f} | {calls} | "
        f"{messages} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--results", type=Path, help="file of finished rows, to go on from")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    keep = given.results
    rows: dict[str, str] = json.loads(keep.read_text()) if keep and keep.exists() else {}
    sizes = ((given.nodes, given.edges), SMALL)
    graphs = [power_law_graph(*size, 100) for size in sizes]
    for name in given.models:
        for workers in given.workers:
            if (key := f"{name} {workers}") not in rows:
                rows[key] = row(graphs, name, workers, given)
                if keep:
                    keep.write_text(json.dumps(rows))
            print(rows[key], flush=True)
    if given.out:
        given.out.write_text("\n".join([*describe(given), *rows.values()]) + "\n")


def describe(given: argparse.Namespace) -> list[str]:
    """The document up to the rows."""
    return [
        "# The global view beside the local one\n",
        f"{date.today()}, `python benchmarks/global_view.py --nodes {given.nodes} --edges "
        f"{given.edges} --hidden {given.hidden} --pairs {given.pairs}`, 2 cores, one thread per "
        f"worker, {platform.machine()}, torch {torch.__version__}, torch-geometric "
        f"{torch_geometric.__version__}. Power-law graph, 3 layers, BatchNorm. Ratio: median over "
        "pairs of epochs that follow each other, the global view over the local one, and the "
        "interval that holds the true median with 95 %; of the time that passes, and of the "
        f"processor time of all workers. More: median difference of {SMALL_PAIRS} pairs of epochs "
        f"on a graph of {SMALL[0]} nodes and {SMALL[1]} edges, in milliseconds of processor time "
        "per worker, and as a share of the large graph's epoch. Calls of pyg_sar's functions, and "
        "messages, of one epoch at rank 0.\n",
        "| model | workers | s per epoch, local: passed, processor | ratio, time passed | ratio, "
        "processor | ms more | share | calls, local and global | messages |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    main()
