"""What the global view costs: epochs of the same training on tensors of the whole graph and on a
worker's own rows, in turn.

    python benchmarks/global_view.py --out global_view.md

Each ratio is the median over pairs of epochs that follow each other, the local view first in every
other pair; on a shared machine such epochs differ by a third. What the global view adds does not
grow with the graph but for what it sends, so it is measured on a small one, too, where little else
happens: milliseconds per epoch. What the views' epochs run and send is counted: functions of the
package that are called, and messages.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from datetime import date
from functools import partial
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
SMALL, SMALL_EPOCHS = (400, 4_000), 200
MODELS: dict[str, Any] = {
    "sage": lambda features, hidden: GraphSAGE(features, hidden, 3, CLASSES, norm="batch_norm"),
    "gat": lambda features, hidden: GAT(features, hidden, 3, CLASSES, heads=4, norm="batch_norm"),
}


def train(root: str, name: str, hidden: int, epochs: int) -> dict[str, Any]:
    """Seconds of each pair of epochs, by view, and the calls and messages of one.

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
        """Seconds, and those that this worker's threads computed."""
        comm.barrier()
        start, busy = time.perf_counter(), time.process_time()
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
        return time.perf_counter() - start, time.process_time() - busy

    pairs = [{view: epoch(view) for view in VIEWS[:: (-1) ** k]} for k in range(1 + epochs)][1:]
    counts = {}
    for view in VIEWS:
        with pyg_sar.Ledger(comm) as ledger:
            calls = entered(partial(epoch, view)).total()
        counts[view] = calls, ledger.sent_messages()
    return {"pairs": pairs, "counts": counts}


def measure(data: Any, workers: int, name: str, hidden: int, epochs: int) -> dict[str, Any]:
    """What rank 0 of ``workers`` measures, on two threads in all."""
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(data, workers, root)
        found: list[dict[str, Any]] = pyg_sar.launch(
            train, workers, root, name, hidden, epochs, threads_per_worker=max(2 // workers, 1)
        )
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = [
        "# The global view beside the local one\n",
        f"{date.today()}, `python benchmarks/global_view.py --nodes {arguments.nodes} "
        f"--edges {arguments.edges} --hidden {arguments.hidden} --epochs {arguments.epochs}`, "
        f"2 cores, {platform.machine()}, torch {torch.__version__}, torch-geometric "
        f"{torch_geometric.__version__}. Power-law graph, 3 layers, BatchNorm. Ratio: median of "
        "epochs of the global view over those of the local view beside them, and the middle half "
        "of these; then the same of the seconds of processor of rank 0. More: median difference of "
        f"{SMALL_EPOCHS} pairs of epochs on a graph of {SMALL[0]} nodes and "
        f"{SMALL[1]} edges, in milliseconds and as a share of the large "
        "graph's epoch. Calls of pyg_sar's functions, and messages, of one epoch at rank 0.\n",
        "| model | workers | s per epoch, local | ratio | middle half | processor | "
        "middle half | ms more | share | calls, local and global | messages |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    large, small = (
        power_law_graph(*size, 100) for size in ((arguments.nodes, arguments.edges), SMALL)
    )
    for name in MODELS:
        for workers in arguments.workers:
            found = measure(large, workers, name, arguments.hidden, arguments.epochs)
            pairs, counts = found["pairs"], [found["counts"][view] for view in VIEWS]
            quarters = [
                statistics.quantiles(p["global"][kind] / p["local"][kind] for p in pairs)
                for kind in (0, 1)
            ]
            ratios = " | ".join(
                f"{ratio:.3f} | {low:.2f} to {high:.2f}" for low, ratio, high in quarters
            )
            seconds = statistics.median(pair["local"][0] for pair in pairs)
            short = measure(small, workers, name, arguments.hidden, SMALL_EPOCHS)["pairs"]
            more = statistics.median(pair["global"][0] - pair["local"][0] for pair in short)
            calls, messages = (" / ".join(map(str, n)) for n in zip(*counts, strict=True))
            lines.append(
                f"| {name} | {workers} | {seconds:.2f} | {ratios} | "
                f"{1e3 * more:.1f} | {more / seconds:.3f} | {calls} | {messages} |"
            )
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
