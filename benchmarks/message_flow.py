"""What message flow graphs save: an epoch's rows, bytes and time against the whole graph's.

    python benchmarks/message_flow.py

Training steps alone, of the stock models, by share of training nodes. Prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import pyg_sar
from pyg_sar.tools import load_graph
from pyg_sar.tools.models import build_model
from pyg_sar.train.flow import call_model, check_flow
from pyg_sar.usage import MODELS

LAYERS = 2


def measured(root: str, name: str, hidden: int, share: float, epochs: int) -> list[float]:
    """The flow graph's rows, bytes and seconds over the whole graph's; rounds take turns."""
    comm, data = pyg_sar.comm.current(), pyg_sar.load_partition(root)
    seeds = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(0)) < share
    model = pyg_sar.distribute(build_model(name, data.num_features, hidden, 8, dropout=0.0))
    flow = pyg_sar.partition.message_flow_graphs(data, seeds, LAYERS)
    check_flow(model, data, flow)
    kinds: dict[str, Any] = {"flow": (flow, slice(flow.batch_size)), "whole": (data, seeds)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    moved = dict.fromkeys(kinds, 0)
    for epoch in range(epochs + 1):  # The first is for warming up.
        for kind, (graph, rows) in kinds.items():
            comm.barrier()
            start = time.perf_counter()
            with pyg_sar.Ledger(comm) as ledger:
                out = call_model(model, graph)[rows]
                F.cross_entropy(out, graph.y[rows]).backward()
            comm.barrier()
            if epoch:
                seconds[kind].append(time.perf_counter() - start)
            moved[kind] = ledger.received_bytes()
    nodes = flow.num_sampled_nodes
    computed, every = sum(sum(nodes[: k + 1]) for k in range(LAYERS)), LAYERS * data.num_nodes
    own = torch.tensor([moved["flow"], moved["whole"]], dtype=torch.float64)
    less, all_bytes = comm.all_reduce(own).tolist()
    ratio = statistics.median(seconds["flow"]) / statistics.median(seconds["whole"])
    return [computed / every, less / max(all_bytes, 1), ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="synthetic:nodes=20000,degree=10,features=64")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gcn", "sage", "gat"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.01, 0.1, 0.6])
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    print("| model | training nodes | rows computed | bytes | time |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "parts")
        pyg_sar.write_partitions(load_graph(given.graph), given.workers, root)
        for name in given.models:
            for share in given.shares:
                how = root, name, given.hidden, share, given.epochs
                found = pyg_sar.launch(measured, given.workers, *how)[0]
                columns = " | ".join(f"{ratio:.2f}" for ratio in found)
                print(f"| {name} | {share:.0%} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
