"""What it saves to map rows before they are summed: bytes and epochs, with and without.

    python benchmarks/transform_first.py

A 3-layer GraphSAGE on a graph with power-law degrees, `SARPolicy(transform_first=True)` and `False`
in turn; each ratio is the median over pairs of epochs that follow each other.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric
from command_line import command
from torch_geometric.nn import GraphSAGE, MessagePassing
from wire import CLASSES, power_law_graph

import pyg_sar
from pyg_sar.comm import current

WAYS = (True, False)


def train(root: str, hidden: int, epochs: int) -> tuple[list[dict[bool, float]], dict[bool, int]]:
    """Seconds of each pair of epochs, and bytes in of one epoch, by way."""
    comm = current()
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(GraphSAGE(data.x.size(1), hidden, 3, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())

    def epoch(first: bool) -> float:
        for layer in model.modules():
            if isinstance(layer, MessagePassing):
                layer.policy = pyg_sar.SARPolicy(transform_first=first)
        comm.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()
        comm.barrier()
        return time.perf_counter() - start

    for first in WAYS:
        epoch(first)
    bytes_in, pairs = {}, []
    for first in WAYS:
        with pyg_sar.Ledger(comm) as ledger:
            epoch(first)
        bytes_in[first] = sum(
            ledger.received_bytes(kind=kind) for kind in ("fetch", "refetch", "gradient")
        )
    for _ in range(epochs):
        pairs.append({first: epoch(first) for first in WAYS})
    return pairs, bytes_in


def row_of(root: str, workers: int, switch: str, arguments: argparse.Namespace) -> list[str]:
    """One row of the table."""
    found = pyg_sar.launch(
        train,
        workers,
        root,
        arguments.hidden,
        arguments.epochs,
        threads_per_worker=2 if workers == 1 else 1,
        env={"PYG_SAR_SHARED_MEMORY": switch},
    )
    pairs = found[0][0]
    first, last = (sum(worker[1][way] for worker in found) / 1e6 for way in WAYS)
    ratio = statistics.median(pair[True] / pair[False] for pair in pairs)
    seconds = statistics.median(pair[False] for pair in pairs)
    wire = "-" if workers == 1 else {"1": "shared memory", "0": "gloo"}[switch]
    share = "-" if workers == 1 else f"{first / last:.2f}"
    bytes_of = [f"{last:.0f}", f"{first:.0f}", share]
    return [str(workers), wire, *bytes_of, f"{seconds:.2f}", f"{ratio:.2f}"]


HEADER = (
    "workers",
    "wire",
    "MB in, summed first",
    "MB in, transformed first",
    "bytes, ratio",
    "epoch, summed first, s",
    "epoch, ratio",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5, help="timed pairs of epochs")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="write the table here as Markdown")
    arguments = parser.parse_args()
    data = power_law_graph(arguments.nodes, arguments.edges, arguments.features)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for workers in arguments.workers:
            root = f"{folder}/parts{workers}"
            pyg_sar.write_partitions(data, workers, root)
            for switch in ("1",) if workers == 1 else ("1", "0"):
                rows.append(row_of(root, workers, switch, arguments))
                print(*rows[-1])
    text = "\n".join(
        [
            "# Maps before sums",
            "",
            f"{date.today()}, `{command(arguments)}`, {platform.machine()}, "
            f"torch {torch.__version__}, torch-geometric {torch_geometric.__version__}. "
            f"GraphSAGE {arguments.features} - {arguments.hidden} - {arguments.hidden} - "
            f"{CLASSES} on {arguments.nodes:,} nodes "
            f"and {arguments.edges:,} edges with power-law degrees, METIS parts. Halo rows of an "
            "epoch of all workers; epochs with and without run in turn, and their ratio is the "
            "median over pairs.",
            "",
            "| " + " | ".join(HEADER) + " |",
            "| " + " | ".join("---" for _ in HEADER) + " |",
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
