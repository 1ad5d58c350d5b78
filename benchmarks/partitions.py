"""Partitioners compared: balance of nodes and edges, halo rows, covers, epochs, memory.

    python benchmarks/partitions.py --data ../shared/data --out partitions.md

All graphs of the data folder that have one edge index, made undirected where the file has each edge
once, and an R-MAT graph (a = 0.57, b = c = 0.19). Epochs: full-batch training of a 3-layer
GraphSAGE (256) on 100 drawn features, one thread per worker; those of all partitioners alternate
within one launch, so that a machine whose speed drifts says the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric
from command_line import command
from memory import give_back
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import to_undirected
from tqdm import tqdm

import pyg_sar
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.layout import NodeOrder, group_edges, partition_statistics

METHODS = ("metis", "balanced", "coarsened", "random")
FEATURES, CLASSES = 100, 40
MOST_NODES = 500_000  # of a graph that is trained on
ONCE = {  # files that hold each undirected edge once
    "amazon_computers",
    "amazon_photo",
    "minesweeper",
    "snap_ego_twitter_undirected",
    "tolokers",
}


@dataclass
class Found:
    """A partition of one graph.

    Attributes:
        balance: The largest part's nodes and edges over the mean.
        halo: Halo rows of all workers.
        cover: Rows of the smallest covers of all cuts.
        seconds: CPU seconds of partitioning.
        epoch: An epoch over that of ``'metis'``.
        peak: Bytes of the worker that needs most.
    """

    balance: tuple[float, float]
    halo: int
    cover: int
    seconds: float
    epoch: float = float("nan")
    peak: int = 0


@dataclass
class Graph:
    """A graph, and what was found of it by number of workers and method."""

    nodes: int
    edges: int
    found: dict[int, dict[str, Found]] = field(default_factory=dict)


def rmat(nodes: int, edges: int) -> Tensor:
    """A directed R-MAT graph; edges to or from nodes beyond ``nodes`` are drawn again."""
    draw, bits = np.random.default_rng(0), (nodes - 1).bit_length()
    kept: list[np.ndarray] = []
    while sum(rows.shape[1] for rows in kept) < edges:
        ends = np.zeros((2, edges), np.int64)
        for _ in range(bits):
            quadrant = np.searchsorted([0.57, 0.76, 0.95], draw.random(edges), side="right")
            ends = 2 * ends + np.stack([quadrant // 2, quadrant % 2])
        kept.append(ends[:, (ends < nodes).all(0)])
    return torch.from_numpy(np.concatenate(kept, axis=1)[:, :edges])


def read(path: Path) -> Data | None:
    """The graph of a file, without features; ``None`` where it has several edge types."""
    with np.load(path, allow_pickle=False) as file:
        if "edge_index" not in file:
            return None
        edges = torch.from_numpy(file["edge_index"].astype(np.int64))
        nodes = int(file["num_nodes"])
    edges = to_undirected(edges, num_nodes=nodes) if path.stem in ONCE else edges
    return Data(edge_index=edges, num_nodes=nodes)


def cover_rows(edge_index: Tensor, part: Tensor, parts: int) -> int:
    """The sum of the largest matchings of the cuts between all pairs of parts."""
    source, target = edge_index[:, part[edge_index[0]] != part[edge_index[1]]]
    if source.numel() == 0:
        return 0
    pulled, row = torch.unique(source * parts + part[target], return_inverse=True)
    pushed, column = torch.unique(target * parts + part[source], return_inverse=True)
    ones = np.ones(row.numel(), np.int8)
    cut = csr_array((ones, (row.numpy(), column.numpy())), shape=(pulled.numel(), pushed.numel()))
    return int((maximum_bipartite_matching(cut, perm_type="column") >= 0).sum())


def partition(data: Data, parts: int, method: str) -> tuple[Tensor, Found]:
    start = time.process_time()
    part = assign_nodes(data.edge_index, data.num_nodes, parts, method)
    seconds = time.process_time() - start
    found = partition_statistics(group_edges(data.edge_index, NodeOrder.of(part, parts)))
    balance = found.balance["nodes"], found.balance["edges"]
    cover = cover_rows(data.edge_index, part, parts)
    return part, Found(balance, sum(found.halo), cover, seconds)


# Epochs ##################################################################################


class Training:
    """A model on one partition."""

    def __init__(self, root: str) -> None:
        self.data = pyg_sar.load_partition(root)
        torch.manual_seed(0)
        self.model = pyg_sar.distribute(GraphSAGE(FEATURES, 256, 3, CLASSES))

    def epoch(self) -> float:
        """Seconds of an epoch, from when all workers are ready."""
        pyg_sar.comm.current().barrier()
        start = time.perf_counter()
        self.model.zero_grad()
        out = self.model(self.data.x, self.data.edge_index)
        F.cross_entropy(out, self.data.y).backward()
        pyg_sar.comm.current().barrier()
        return time.perf_counter() - start


def train(roots: Sequence[str], epochs: int) -> list[tuple[int, list[float]]]:
    """Bytes at the peak of two epochs, and seconds of later ones, for each partition."""
    Training(roots[0]).epoch()  # what the first epoch in a process takes in any case
    peaks = []
    for root in roots:
        give_back()
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            training = Training(root)
            training.epoch()
            training.epoch()
        peaks.append(ledger.peak_memory - ledger.baseline_memory)
        del training
    trainings = [Training(root) for root in roots]
    for training in trainings:
        training.epoch()
    rounds = [[training.epoch() for training in trainings] for _ in range(epochs)]
    return list(zip(peaks, map(list, zip(*rounds, strict=True)), strict=True))


def add_epochs(data: Data, parts: dict[str, Tensor], found: dict[str, Found], epochs: int) -> None:
    """Trains on all partitions and fills in epochs and peaks."""
    workers = int(max(int(part.max()) for part in parts.values())) + 1
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(data.num_nodes, FEATURES, generator=draw)
    y = torch.randint(CLASSES, (data.num_nodes,), generator=draw)
    whole = Data(x=x, y=y, edge_index=data.edge_index)
    with tempfile.TemporaryDirectory() as folder:
        roots = [f"{folder}/{method}" for method in parts]
        for root, part in zip(roots, parts.values(), strict=True):
            pyg_sar.write_partitions(whole, workers, root, part)
        ranks = pyg_sar.launch(train, workers, roots, epochs, threads_per_worker=1, timeout=1800.0)
    seconds = dict(zip(parts, ([times for _, times in ranks[0]]), strict=True))
    for k, (method, row) in enumerate(found.items()):
        row.peak = max(rank[k][0] for rank in ranks)
        pairs = zip(seconds[method], seconds["metis"], strict=True)
        row.epoch = statistics.median(one / unit for one, unit in pairs)


def measure(data: Data, args: argparse.Namespace) -> Graph:
    graph = Graph(data.num_nodes, data.edge_index.size(1))
    for workers in args.workers:
        made = {method: partition(data, workers, method) for method in METHODS}
        found = {method: row for method, (_, row) in made.items()}
        if workers in args.train and graph.nodes <= MOST_NODES:
            parts = {method: part for method, (part, _) in made.items()}
            add_epochs(data, parts, found, args.epochs)
        graph.found[workers] = found
    return graph


# The document ############################################################################


def document(graphs: dict[str, Graph], args: argparse.Namespace) -> str:
    lines = [
        "# Partitioners",
        "",
        f"{date.today()}, `{command(args)}`, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, torch-geometric {torch_geometric.__version__}.",
        "",
        "Nodes, edges: the largest part over the mean. Halo rows: of all workers. Cover rows: the "
        "fewest rows, pulled and pushed, that carry all cuts. Seconds: of one thread. Epoch: over "
        "that with `metis`, epochs in turns, median. Peak: megabytes of the worker that needs "
        "most, above those before the partition is loaded.",
    ]
    for workers in args.workers:
        trained = workers in args.train
        more = " epoch | peak |" if trained else ""
        lines += [
            "",
            f"## {workers} workers",
            "",
            f"| graph | method | nodes | edges | halo rows | cover rows | seconds |{more}",
            "| --- | --- | --- | --- | --- | --- | --- |" + " --- | --- |" * trained,
        ]
        for name, graph in graphs.items():
            for method, row in graph.found[workers].items():
                nodes, edges = row.balance
                timed = f" {row.epoch:.2f} | {row.peak / 1e6:,.0f} |" if row.peak else " - | - |"
                end = timed if trained else ""
                lines.append(
                    f"| {name} | {method} | {nodes:.2f} | {edges:.2f} | {row.halo:,} "
                    f"| {row.cover:,} | {row.seconds:.1f} |{end}"
                )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the real graphs")
    add("--graphs", nargs="*", help="names of files, and 'rmat'; all, if not given")
    add("--workers", type=int, nargs="+", default=[2, 4, 8])
    add("--train", type=int, nargs="*", default=[2, 4], help="numbers of workers to train with")
    add("--epochs", type=int, default=3, help="timed epochs of each partition")
    add("--rmat", type=int, nargs=2, default=[200_000, 5_000_000], metavar=("NODES", "EDGES"))
    add("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    graphs: dict[str, Graph] = {}
    for name in tqdm(args.graphs or [*sorted(p.stem for p in args.data.glob("*.npz")), "rmat"]):
        if name == "rmat":
            data: Data | None = Data(edge_index=rmat(*args.rmat), num_nodes=args.rmat[0])
        else:
            data = read(args.data / f"{name}.npz")
        if data is None:
            continue
        graphs[name] = measure(data, args)
        if args.out:
            args.out.write_text(document(graphs, args))
    print(document(graphs, args))


if __name__ == "__main__":
    main()
