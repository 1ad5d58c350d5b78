"""What the wire costs on one host: epoch times of workers that share memory, and that use gloo.

    python benchmarks/wire.py --out wire.md

Full-batch training of a 3-layer GraphSAGE (256) and GAT (4 heads of 32) on a graph with power-law
degrees. One worker with two threads is the unit; 2, 4 and 8 workers have one thread each. Within a
round one worker, shared memory and gloo run one after the other; each entry is the median over the
rounds of a ratio within a round, so that a machine whose speed drifts says the same.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric
from command_line import command
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GraphSAGE

import pyg_sar

CLASSES = 40
MODELS: dict[str, Callable[[int], torch.nn.Module]] = {
    "sage": lambda features: GraphSAGE(features, 256, 3, CLASSES),
    "gat": lambda features: GAT(features, 128, 3, CLASSES, heads=4),
}
WAYS = {"shared memory": "1", "gloo": "0"}


def power_law_graph(nodes: int, edges: int, features: int) -> Data:
    """Both ends drawn with a density that falls as a power of the node's rank."""
    draw = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, edges, generator=draw) ** 3 * nodes).long()
    return Data(
        x=torch.randn(nodes, features, generator=draw),
        edge_index=torch.randperm(nodes, generator=draw)[ends],
        y=torch.randint(CLASSES, (nodes,), generator=draw),
    )


def train(root: str, name: str, epochs: int) -> tuple[list[float], float, int, int]:
    """Seconds of each epoch but the first, processor seconds of one, bytes in of one, peak."""
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(MODELS[name](data.x.size(1)))
    optimizer = torch.optim.Adam(model.parameters())

    def epoch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()

    with pyg_sar.Ledger(comm) as ledger:
        epoch()
        first = ledger.received
        before = time.process_time()
        times = []
        for _ in range(epochs):
            comm.barrier()
            start = time.perf_counter()
            epoch()
            comm.barrier()
            times.append(time.perf_counter() - start)
        processor = (time.process_time() - before) / epochs
        bytes_in = (ledger.received - first) // epochs
    return times, processor, bytes_in, ledger.peak_memory


def measure(
    root: Path, workers: int, threads: int, switch: str, name: str, epochs: int
) -> tuple[float, float, float, float]:
    """Median epoch (s), processor time of all workers (s), their bytes in, the largest peak."""
    found = pyg_sar.launch(
        train,
        workers,
        str(root),
        name,
        epochs,
        threads_per_worker=threads,
        env={"PYG_SAR_SHARED_MEMORY": switch},
    )
    return (
        statistics.median(found[0][0]),
        sum(worker[1] for worker in found),
        sum(worker[2] for worker in found),
        max(worker[3] for worker in found),
    )


def rows_of(arguments: argparse.Namespace, data: Data, folder: Path) -> list[list[str]]:
    """The table's rows."""
    roots = {}
    for parts in (1, *arguments.workers):
        roots[parts] = folder / f"parts{parts}"
        pyg_sar.write_partitions(data, parts, roots[parts], arguments.partition)
    table = []
    for name in arguments.models:
        for workers in arguments.workers:
            rounds = []
            for _ in range(arguments.rounds):
                one = measure(roots[1], 1, 2, "auto", name, arguments.epochs)
                ways = [
                    measure(roots[workers], workers, 1, switch, name, arguments.epochs)
                    for switch in WAYS.values()
                ]
                rounds.append((one, *ways))
                print(name, workers, [f"{m[0]:.2f} s, {m[1]:.2f} s" for m in rounds[-1]])
            table.append([name, str(workers), *entries(rounds)])
    return table


Measured = tuple[float, float, float, float]


def entries(rounds: Sequence[tuple[Measured, ...]]) -> list[str]:
    """Ratios of one model and number of workers."""

    def ratio(number: int, above: int, below: int) -> str:
        return f"{statistics.median(r[above][number] / r[below][number] for r in rounds):.2f}"

    return [
        f"{statistics.median(r[0][0] for r in rounds):.2f}",
        ratio(0, 1, 0),
        ratio(0, 2, 0),
        ratio(0, 2, 1),
        ratio(1, 1, 0),
        ratio(1, 2, 0),
        f"{rounds[0][1][2] / 1e6:.0f}",
        ratio(3, 1, 2),
    ]


HEADER = [
    "model",
    "workers",
    "epoch of one worker, s",
    "epoch, shared memory / one worker",
    "epoch, gloo / one worker",
    "epoch, gloo / shared memory",
    "processor time, shared memory / one worker",
    "processor time, gloo / one worker",
    "MB in, all workers",
    "peak memory, shared memory / gloo",
]


def markdown(arguments: argparse.Namespace, table: Sequence[Sequence[str]]) -> str:
    """The result as a document."""
    lines = [
        "# The wire on one host",
        "",
        f"{date.today()}, `{command(arguments)}`, {platform.machine()}, "
        f"{torch.get_num_threads()} core(s), torch {torch.__version__}, "
        f"torch-geometric {torch_geometric.__version__}. Graph with power-law degrees of "
        f"{arguments.nodes:,} nodes and {arguments.edges:,} edges. One "
        "worker has two threads, several have one each. Peak memory is the resident set of the "
        "largest worker; with shared memory it counts what a worker maps of others."
        + f" {arguments.note}".rstrip(),
        "",
        "| " + " | ".join(HEADER) + " |",
        "| " + " | ".join("---" for _ in HEADER) + " |",
        *("| " + " | ".join(row) + " |" for row in table),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--partition", choices=["balanced", "metis", "random"], default="balanced")
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--note", default="", help="a sentence on how it was measured")
    parser.add_argument("--out", type=Path, help="write the table here as Markdown")
    arguments = parser.parse_args()
    data = power_law_graph(arguments.nodes, arguments.edges, arguments.features)
    with tempfile.TemporaryDirectory() as folder:
        text = markdown(arguments, rows_of(arguments, data, Path(folder)))
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
