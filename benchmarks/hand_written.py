"""Models without PyG's layers, on workers and in one process: time of an epoch, peak memory.

    python benchmarks/hand_written.py --nodes 50000 --degree 10

Three layers ``relu(lin(x) + A lin(x))`` of 64, where ``A h`` is ``scatter(h[row], col)`` (means or
maxima), or a product with ``torch.sparse_coo_tensor``. Fresh processes, alternately, two threads in
all; medians over the rounds. The peak is that of one process, or of the worker with the most,
beyond what it held before the first epoch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

import torch
import torch.nn.functional as F
from command_line import command
from torch import Tensor, nn
from torch_geometric.utils import scatter

import pyg_sar
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.tools import load_graph

WIDTH, CLASSES, CPU, MIB = 64, 8, torch.device("cpu"), 1 << 20
WAYS = ("mean", "max", "sparse.mm")


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.lins = nn.ModuleList(nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, CLASSES))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for lin in self.lins:
            h = lin(x)
            if self.way == "sparse.mm":
                gathered = torch.sparse.mm(edges, h)
            else:
                row, col = edges
                gathered = scatter(h[row], col, 0, x.size(0), self.way)
            x = (h + gathered).relu()
        return x


def measure(root: str | None, spec: str, way: str, epochs: int) -> tuple[float, int, float]:
    """Seconds of the quickest epoch, bytes at most, the last loss."""
    data = load_graph(spec) if root is None else pyg_sar.load_partition(root)
    edges = data.edge_index
    if way == "sparse.mm":
        weight = torch.full((edges.size(1),), 0.1)
        edges = torch.sparse_coo_tensor(edges.flip(0), weight, (data.num_nodes, data.num_nodes))
    start = reset_peak_memory(CPU)
    torch.manual_seed(0)
    model = Net(way) if root is None else pyg_sar.distribute(Net(way))
    optimizer, seconds = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(epochs):
        begin = time.perf_counter()
        loss = F.cross_entropy(model(data.x, edges), data.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), peak_memory(CPU) - start, loss.item()


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"`{command(args)}`\n")
    spec = f"synthetic:nodes={args.nodes},degree={args.degree},features={WIDTH},classes={CLASSES}"
    print("| aggregation | | seconds | of one process | peak, MiB | of one process | loss |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        for workers in (1, 2):
            pyg_sar.write_partitions(load_graph(spec), workers, f"{root}/{workers}")
        for way in WAYS:
            found: dict[int, list[tuple[float, int, float]]] = {0: [], 1: [], 2: []}
            for _ in range(args.rounds):
                for workers, rows in found.items():
                    folder = f"{root}/{workers}" if workers else None
                    threads = 1 if workers == 2 else 2
                    each = pyg_sar.launch(
                        measure, max(workers, 1), folder, spec, way, args.epochs,
                        threads_per_worker=threads,
                    )  # fmt: skip
                    rows.append(max(each))
            plain = [median(column) for column in zip(*found[0], strict=True)]
            for workers, rows in found.items():
                seconds, peak, loss = (median(column) for column in zip(*rows, strict=True))
                title = f"{workers} worker{'s' * (workers > 1)}" if workers else "one process"
                print(
                    f"| {way} | {title} | {seconds:.2f} | {seconds / plain[0]:.2f} "
                    f"| {peak / MIB:.0f} | {peak / plain[1]:.2f} | {loss:.5f} |"
                )


if __name__ == "__main__":
    main()
