"""Would another order of nodes, or of parts, serve better than the ones that are there?

    python benchmarks/node_order.py --data ../shared/data --out node_order.md

Nodes: sums of gathered rows on a graph whose nodes are in the order of the file, in a random one,
in that of reverse Cuthill-McKee (neighbours near each other), of METIS's parts of 2,000 nodes, and
by in-degree. One thread; calls in turns; the least time of each over the file's. A part
keeps the nodes it owns in the order of their ids, so this is what another order in it could bring.

Parts: with 8 parts of the default method on two hosts, the first four on one, halo rows that cross
between hosts, over the fewest and the mean of all 35 ways to give each host four parts.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from datetime import date
from itertools import combinations
from pathlib import Path

import numpy as np
import pymetis
import torch
from command_line import command
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor
from tqdm import tqdm

import pyg_sar.functional as F
from pyg_sar.partition import assign_nodes
from pyg_sar.tools.graphs import load_graph

GRAPHS = (
    *("amazon_computers", "coauthor_physics", "snap_ego_twitter_undirected"),
    *("snap_soc_slashdot0902", "snap_cit_hepph", "law_dblp_2010", "web_cnr_2000", "pkg_npm_2016"),
)
WIDTHS, PER_PART, PARTS = (64, 256), 2000, 8


def orders(edge_index: Tensor, num_nodes: int) -> Iterator[tuple[str, Tensor]]:
    """Each node's place in some orders."""

    def place(order: Tensor) -> Tensor:
        return torch.empty_like(order).scatter_(0, order, torch.arange(num_nodes))

    ends = edge_index.numpy()
    matrix = csr_matrix((np.ones(ends.shape[1], np.int8), ends), shape=(num_nodes, num_nodes))
    both = (matrix + matrix.T).tocsr()
    yield "file", torch.arange(num_nodes)
    yield "random", torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0))
    near = reverse_cuthill_mckee(both, symmetric_mode=True).astype(np.int64)
    yield "Cuthill-McKee", place(torch.from_numpy(near))
    graph = pymetis.CSRAdjacency(both.indptr, both.indices)
    part = torch.tensor(pymetis.part_graph(max(2, num_nodes // PER_PART), graph)[1])
    yield "METIS", place(part.argsort(stable=True))
    degree = torch.bincount(edge_index[1], minlength=num_nodes)
    yield "degree", place(degree.argsort(descending=True, stable=True))


def seconds_of_sums(edge_index: Tensor, num_nodes: int, width: int, rounds: int) -> list[float]:
    """The least seconds of a sum, for each of the orders."""
    edges = [
        F.sorted_edges(place[edge_index], num_nodes, num_nodes)[:2]
        for _, place in orders(edge_index, num_nodes)
    ]
    rows = torch.randn(num_nodes, width)
    least = [float("inf")] * len(edges)
    for _ in range(rounds):
        for k, (source, offsets) in enumerate(edges):
            start = time.perf_counter()
            F.gather_sum(rows, source, offsets)
            least[k] = min(least[k], time.perf_counter() - start)
    return least


def rows_between_hosts(edge_index: Tensor, num_nodes: int) -> tuple[int, int, float]:
    """Halo rows between two hosts: as parts are numbered, the fewest, the mean of all ways."""
    part = assign_nodes(edge_index, num_nodes, PARTS)
    needed = torch.unique(torch.stack([edge_index[0], part[edge_index[1]]]), dim=1)
    owner = part[needed[0]]
    rows = torch.bincount(owner * PARTS + needed[1], minlength=PARTS * PARTS).view(PARTS, PARTS)

    def between(first: tuple[int, ...]) -> int:
        on = torch.isin(torch.arange(PARTS), torch.tensor(first))
        return int(rows[on][:, ~on].sum() + rows[~on][:, on].sum())

    ways = [between((0, *rest)) for rest in combinations(range(1, PARTS), PARTS // 2 - 1)]
    return between(tuple(range(PARTS // 2))), min(ways), sum(ways) / len(ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of .npz graphs")
    parser.add_argument("--graphs", nargs="+", default=GRAPHS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load, sums, between = os.getloadavg()[0], [], []
    for name in tqdm(args.graphs):
        graph = load_graph(str(args.data / f"{name}.npz"))
        edges, count = graph.edge_index, graph.num_nodes
        for width in WIDTHS:
            first, *others = seconds_of_sums(edges, count, width, args.rounds)
            cells = [name, f"{count:,}", f"{edges.size(1):,}", str(width), f"{first * 1e3:.1f}"]
            cells += [f"{one / first:.2f}" for one in others]
            sums.append(f"| {' | '.join(cells)} |")
        given, least, mean = rows_between_hosts(edges, count)
        between.append(f"| {name} | {given:,} | {given / max(least, 1):.2f} | {given / mean:.2f} |")
    names = list(dict(orders(torch.tensor([[0, 1], [1, 0]]), 2)))[1:]
    text = "\n".join(
        [
            "# Orders of nodes and of parts",
            "",
            f"{date.today()}, `{command(args)}`, "
            f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}. Load at the "
            f"start and at the end: {load:.1f} and {os.getloadavg()[0]:.1f}.",
            "",
            "## Nodes",
            "",
            "Sums of gathered rows, one thread: milliseconds in the file's order, and the others "
            "over it.",
            "",
            f"| graph | nodes | edges | width | file, ms | {' | '.join(names)} |",
            f"|{'---|' * (5 + len(names))}",
            *sums,
            "",
            "## Parts on two hosts",
            "",
            "8 parts of the default method, the first four on one host: halo rows between hosts; "
            "over the fewest, and over the mean, of all ways to give each host four parts.",
            "",
            "| graph | rows | over the fewest | over the mean |",
            "|---|---|---|---|",
            *between,
            "",
        ]
    )
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
