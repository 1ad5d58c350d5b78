"""What the global view costs: epochs of the same training on tensors of the whole graph and on a
worker's own rows, in turn.

    python benchmarks/global_view.py --out docs/benchmarks/global_view.md

Each ratio is the median over pairs of epochs that follow each other, the local view first in every
other pair. What the views' epochs run and send is counted, too: functions of the package that are
called, and messages.
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

    def epoch(view: str) -> float:
        comm.barrier()
        start = time.perf_counter()
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
        return time.perf_counter() - start

    pairs = [{view: epoch(view) for view in VIEWS[:: (-1) ** k]} for k in range(1 + epochs)][1:]
    counts = {}
    for view in VIEWS:
        with pyg_sar.Ledger(comm) as ledger:
            calls = entered(partial(epoch, view)).total()
        counts[view] = calls, ledger.sent_messages()
    return {"pairs": pairs, "counts": counts}


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
        "of these. Calls of pyg_sar's functions, and messages, of one epoch at rank 0.\n",
        "| model | workers | s per epoch, local | ratio | middle half | calls, local and global | "
        "messages |",
        "|---|---|---|---|---|---|---|",
    ]
    data = power_law_graph(arguments.nodes, arguments.edges, 100)
    for name in MODELS:
        for workers in arguments.workers:
            with tempfile.TemporaryDirectory() as root:
                pyg_sar.write_partitions(data, workers, root)
                found = pyg_sar.launch(
                    train,
                    workers,
                    root,
                    name,
                    arguments.hidden,
                    arguments.epochs,
                    threads_per_worker=2 // workers,
                )[0]
            pairs, counts = found["pairs"], [found["counts"][view] for view in VIEWS]
            low, ratio, high = statistics.quantiles(p["global"] / p["local"] for p in pairs)
            seconds = statistics.median(pair["local"] for pair in pairs)
            calls, messages = (" / ".join(map(str, n)) for n in zip(*counts, strict=True))
            lines.append(
                f"| {name} | {workers} | {seconds:.2f} | {ratio:.3f} | {low:.2f} to {high:.2f} | "
                f"{calls} | {messages} |"
            )
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
