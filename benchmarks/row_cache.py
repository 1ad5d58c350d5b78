"""Rows that a planned cache reads from a file, beside HongTu's reuse between adjacent parts.

    python benchmarks/row_cache.py --data ../shared/data --out row_cache.md

Parts of one process run in turn. HongTu's count: each part's turn loads its own rows and its halo
rows into a buffer as large as the union of two adjacent parts' rows, the turn's own among them; one
pass, from an empty buffer. The planned cache: own rows are at hand, a part's halo rows have a
buffer of their own, and the cache beside it has the rows of the largest halo, or a multiple.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pymetis
import torch
import torch_geometric
from command_line import command
from numpy.typing import NDArray
from part_order import order_parts
from row_loads import check_plan, loads

from pyg_sar.exchange.row_plan import gap_of, nearest, next_uses, plan_rows
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.balance import undirected_csr
from pyg_sar.partition.layout import NodeOrder, group_edges
from pyg_sar.tools.graph_sources import load_npz

GRAPHS = (
    *("snap_soc_slashdot0902", "coauthor_physics", "snap_cit_hepph", "law_dblp_2010"),
    "web_cnr_2000",
)
ROW_BYTES = 512
Rows = NDArray[np.int64]


@dataclass
class Problem:
    """The halo rows of the parts of a graph, by node and by published row."""

    name: str
    nodes: int
    owned: list[Rows]
    halos: list[Rows]
    needs: list[Rows]
    first: Rows

    @property
    def published(self) -> int:
        return int(self.first[-1])

    @property
    def largest(self) -> int:
        return max(rows.size for rows in self.needs)


def problem(path: Path, parts: int, method: str) -> Problem:
    data = load_npz(path)
    edges, nodes = data.edge_index, int(data.num_nodes)
    if method == "metis":
        adjacency = pymetis.CSRAdjacency(*(t.numpy() for t in undirected_csr(edges, nodes)))
        part = torch.tensor(pymetis.part_graph(parts, adjacency)[1])
    else:
        part = assign_nodes(edges, nodes, parts, method)
    layout = group_edges(edges, NodeOrder.of(part, parts))
    halos = [halo.numpy() for halo in layout.halos]
    offsets = layout.sources.offsets.numpy()
    published = np.unique(np.concatenate(halos))
    return Problem(
        name=path.stem,
        nodes=nodes,
        owned=[np.arange(start, stop) for start, stop in pairwise(offsets)],
        halos=halos,
        needs=[np.searchsorted(published, halo) for halo in halos],
        first=np.searchsorted(published, offsets),
    )


# HongTu's count ###############################################################


def reorganised(lists: Sequence[Rows]) -> list[Rows]:
    """Section 5.3, second phase: each part is followed by that which shares the most rows."""
    left = list(lists)
    order = [left.pop(0)]
    while left:
        shared = [np.intersect1d(order[-1], rows, assume_unique=True).size for rows in left]
        order.append(left.pop(int(np.argmax(shared))))
    return order


def adjacent_loads(lists: Sequence[Rows]) -> int:
    """Section 5.1: rows of the last turn are not loaded again."""
    shared = sum(np.intersect1d(a, b, assume_unique=True).size for a, b in pairwise(lists))
    return sum(rows.size for rows in lists) - shared


def buffer_loads(lists: Sequence[Rows], nodes: int, buffer: int) -> int:
    """The fewest loads when a turn's rows are in the buffer, all at once."""
    never, total = len(lists), 0
    held = np.full(nodes, never, np.int32)
    following, _ = next_uses(lists, nodes)
    for turn, (rows, uses) in enumerate(zip(lists, following, strict=True)):
        total += int(np.count_nonzero(held[rows] == never))
        held[rows] = uses
        room = buffer - lists[turn + 1].size if turn + 1 < never else 0
        others = np.flatnonzero((held != never) & (held != turn + 1))
        held[others[~nearest(held[others], room)]] = never
    return total


def hongtu_row(graph: Problem) -> tuple[Any, ...]:
    lists = [np.union1d(a, b) for a, b in zip(graph.owned, graph.halos, strict=True)]
    turned = reorganised(lists)
    buffer = max(np.union1d(a, b).size for a, b in pairwise(turned))
    counts = (
        sum(rows.size for rows in lists),
        adjacent_loads(lists),
        adjacent_loads(turned),
        buffer_loads(lists, graph.nodes, buffer),
        buffer_loads(turned, graph.nodes, buffer),
    )
    return graph.name, f"{buffer:,}", *(f"{count / graph.nodes:.2f}" for count in counts)


# The planned cache ############################################################


def cache_row(graph: Problem) -> tuple[Any, ...]:
    def rows(times: float, stay: bool) -> float:
        plan = plan_rows(graph.needs, graph.first, int(times * graph.largest), None, stay)
        check_plan(plan, graph.needs)
        return loads(plan).rows / graph.nodes

    total = sum(rows.size for rows in graph.needs) / graph.nodes
    values = (
        total,
        adjacent_loads(graph.needs) / graph.nodes,
        rows(1, False),
        *(rows(times, True) for times in (0.25, 0.5, 1, 2)),
        graph.published / graph.nodes,
    )
    return graph.name, f"{graph.largest:,}", *(f"{value:.3f}" for value in values)


def request_row(graph: Problem) -> tuple[Any, ...]:
    plan = plan_rows(graph.needs, graph.first, graph.largest)
    alone, joined = loads(plan), loads(plan, gap_of(ROW_BYTES))
    return (
        graph.name,
        *(f"{count:,}" for count in (alone.rows, alone.requests)),
        f"{alone.mean:.1f}",
        f"{joined.requests:,}",
        f"{joined.mean:.1f}",
        f"{joined.read / max(joined.rows, 1):.2f}",
    )


def order_row(graph: Problem) -> tuple[Any, ...]:
    before = loads(plan_rows(graph.needs, graph.first, graph.largest)).rows
    greedy = reorganised(graph.needs)
    index = {id(rows): part for part, rows in enumerate(graph.needs)}
    order = [index[id(rows)] for rows in greedy]
    after = loads(plan_rows(graph.needs, graph.first, graph.largest, order)).rows
    start = time.process_time()
    _, found = order_parts(graph.needs, graph.first, graph.largest)
    seconds = time.process_time() - start
    counts = (f"{count / graph.nodes:.3f}" for count in (before, after, found))
    return graph.name, *counts, f"{found / max(before, 1):.2f}", f"{seconds:.2f}"


def random_problem(rows: int, parts: int, halo: int) -> Problem:
    """Parts that need rows at random, some far more often than others."""
    draw = np.random.default_rng(0)
    needs = [np.unique((draw.random(halo) ** 3 * rows).astype(np.int64)) for _ in range(parts)]
    return Problem("random", rows, [], [], needs, np.linspace(0, rows, parts + 1).astype(np.int64))


def time_row(graph: Problem) -> tuple[Any, ...]:
    start = time.process_time()
    plan_rows(graph.needs, graph.first, graph.largest)
    seconds = time.process_time() - start
    total = sum(rows.size for rows in graph.needs)
    sizes = (f"{n:,}" for n in (len(graph.needs), graph.published, total, graph.largest))
    return graph.name, *sizes, f"{seconds:.3f}", f"{1e9 * seconds / total:.0f}"


# Output #######################################################################


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""


def markdown(arguments: argparse.Namespace) -> str:
    files = [arguments.data / f"{name}.npz" for name in arguments.graphs]
    graphs = [problem(file, arguments.parts, "metis") for file in files]
    default = [problem(file, arguments.parts, "balanced") for file in files]
    sizes = (4_000_000, 64, 500_000), (10_000_000, 256, 200_000)
    large = [random_problem(n // arguments.shrink, p, h // arguments.shrink) for n, p, h in sizes]
    order_head = ("graph", "parts as numbered", "HongTu 5.3", "searched", "searched / numbered")
    lines = [
        "# A planned cache of rows",
        "",
        f"{date.today()}, `{command(arguments)}`, "
        f"{platform.machine()}, one thread, torch {torch.__version__}, torch-geometric "
        f"{torch_geometric.__version__}. {arguments.parts} parts by METIS, default options, "
        "unless another partitioner is named.",
        "",
        "## HongTu's count",
        "",
        "Rows loaded per node and pass. A turn loads the part's own rows and its halo rows; the "
        "buffer holds them, and is as large as the union of two adjacent parts' rows in the "
        "reorganised order. One pass, from an empty buffer. Belady: in both orders of parts.",
        "",
        *table(
            (
                *("graph", "buffer, rows", "no reuse", "HongTu 5.1 (adjacent)"),
                *("+ its reorganisation 5.3", "Belady", "Belady, reorganised"),
            ),
            [hongtu_row(graph) for graph in graphs],
        ),
        "## The planned cache",
        "",
        "Halo rows read from the file per node and pass: own rows are at hand. The cache lies "
        "beside the buffer of a part's halo rows, and has a multiple of the largest halo's rows. "
        "Published stay: rows may enter the cache at publication. Published: all of these rows; a "
        "cache that nothing enters at publication can't read fewer.",
        "",
        *table(
            (
                *("graph", "largest halo, rows", "no reuse", "adjacent, 1x", "Belady, 1x"),
                *(f"published stay, {times}x" for times in ("0.25", "0.5", "1", "2")),
                "published",
            ),
            [cache_row(graph) for graph in graphs],
        ),
        "## Requests",
        "",
        f"Cache of 1x, published stay; rows of {ROW_BYTES} bytes. Joined: runs at most "
        f"{gap_of(ROW_BYTES)} rows apart are read in one request.",
        "",
        *table(
            (
                *("graph", "rows", "runs", "rows per run", "joined requests"),
                *("rows per request", "rows read / needed"),
            ),
            [request_row(graph) for graph in graphs],
        ),
        "## Order of parts",
        "",
        "Rows read per node and pass, cache of 1x, published stay, and CPU seconds of the search.",
        "",
        *table((*order_head, "search, s"), [order_row(graph) for graph in graphs]),
        "With the partitioner `'balanced'`:",
        "",
        *table((*order_head, "search, s"), [order_row(graph) for graph in default]),
        "## Time",
        "",
        "CPU seconds of a plan, once per partition; cache of 1x. `random`: halo rows drawn with "
        "density falling as the power -2/3 of the position.",
        "",
        *table(
            (
                *("graph", "parts", "published rows", "halo rows", "cache, rows", "plan, s"),
                "ns per halo row",
            ),
            [time_row(graph) for graph in (*graphs, *large)],
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS))
    parser.add_argument("--parts", type=int, default=32)
    parser.add_argument("--shrink", type=int, default=1, help="drawn halos smaller by this factor")
    parser.add_argument("--out", type=Path, help="write the tables here as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = markdown(arguments)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
