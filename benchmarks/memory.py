"""Peak memory per worker against 1/W: modes 1, 2 and 3, SAGE and GAT, on a dense random graph.

    python benchmarks/memory.py --out docs/benchmarks/memory.md

Every node's sources are drawn from all nodes and parts are random, so that every worker needs
nearly every row. Each configuration runs in fresh processes: a warm-up on a tiny graph (libraries,
thread stacks), then the baseline, then two epochs of which the higher peak counts. Peaks are the
resident set's (``VmHWM``), over the baseline, of the worker that needs most.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv
from tqdm import tqdm

import pyg_sar


class Net(torch.nn.Module):
    """Three layers of one kind; GAT with four heads."""

    def __init__(self, kind: str, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        sizes = [(inputs, hidden), (hidden, hidden), (hidden, outputs)]
        if kind == "gat":
            layers = [GATConv(a, b // 4, heads=4) for a, b in sizes]
        else:
            layers = [SAGEConv(a, b) for a, b in sizes]
        self.convs = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


def random_graph(num_nodes: int, degree: int, features: int) -> Data:
    """Sources uniformly at random."""
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(num_nodes, features, generator=generator),
        edge_index=torch.randint(0, num_nodes, (2, num_nodes * degree), generator=generator),
        y=torch.randint(0, 16, (num_nodes,), generator=generator),
    )


def epoch(model: torch.nn.Module, data: Data) -> None:
    model.zero_grad()
    out = model(data.x, data.edge_index)
    pyg_sar.mean(F.cross_entropy(out, data.y, reduction="none")).backward()


def measure(root: str, tiny: str, kind: str, hidden: int, policy: pyg_sar.SARPolicy) -> Any:
    """Peak over the baseline and resident rows of one worker."""
    comm = pyg_sar.current()
    for folder in (tiny, root):
        data = pyg_sar.load_partition(folder)
        data.x = data.x.clone()  # out of the memory map: the features are the baseline's
        torch.manual_seed(0)
        model = pyg_sar.distribute(Net(kind, data.x.size(1), hidden, 16), policy)
        with pyg_sar.Ledger(comm) as ledger:
            epoch(model, data)
            epoch(model, data)
        comm.barrier()
    rows = ledger.peak_resident_rows() / max(data.num_nodes, 1)
    return ledger.peak_memory - ledger.baseline_memory, rows


def run(args: argparse.Namespace) -> list[str]:
    """The table's rows."""
    graph = random_graph(args.nodes, args.degree, args.features)
    small = random_graph(400, 5, args.features)
    lines = ["| model | mode | prefetch | workers | peak per worker (MB) | times W | of W=2 | "
             "remote rows over own rows |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    cases = [(k, m, p) for k in ("sage", "gat") for m, p in ((1, 0), (1, 1), (2, 1), (3, 1))]
    with tempfile.TemporaryDirectory() as folder:
        for workers in args.workers:
            pyg_sar.write_partitions(graph, workers, f"{folder}/{workers}", "random")
            pyg_sar.write_partitions(small, workers, f"{folder}/tiny{workers}", "random")
        first: dict[Any, float] = {}
        for kind, mode, prefetch in tqdm(cases, desc="memory"):
            for workers in args.workers:
                policy = pyg_sar.SARPolicy(mode=mode, prefetch=prefetch)
                folders = (f"{folder}/{workers}", f"{folder}/tiny{workers}")
                found = pyg_sar.launch(measure, workers, *folders, kind, args.hidden, policy)
                peak = max(peak for peak, _ in found) / 2**20
                rows = max(rows for _, rows in found)
                total = first.setdefault((kind, mode, prefetch), peak * workers)
                lines.append(
                    f"| {kind} | {mode} | {prefetch} | {workers} | {peak:.0f} | "
                    f"{peak * workers:.0f} | {peak * workers / total:.2f} | {rows:.2f} |"
                )
                tqdm.write(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument(
        "--workers", type=lambda s: [int(n) for n in s.split(",")], default=[2, 4, 8]
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = run(args)
    command = f"python benchmarks/memory.py --nodes {args.nodes} --degree {args.degree}"
    text = "\n".join(
        [
            "# Peak memory per worker",
            "",
            f"{date.today()}, `{command} --features {args.features} --hidden {args.hidden}`, "
            f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, "
            f"torch-geometric {torch_geometric.__version__}. Random graph of {args.nodes:,} nodes "
            f"and {args.nodes * args.degree:,} edges, random parts, three layers.",
            "",
            "With a prefetched shard (depth 1) two remote shards are resident from three workers "
            "on, but at two workers there is only one: the peak times W grows by that.",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
