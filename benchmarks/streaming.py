"""Edge cuts and rates of partitioners that read the edges as a stream, beside METIS.

    python benchmarks/streaming.py --data ../shared/data --out streaming.md

``balanced``, METIS with even edges, too; ``coarsened`` (``pyg_sar/partition/coarsening.py``), all
of it; and Fennel alone (Tsourakakis et al., WSDM 2014), which is its last stage: one pass that
knows nothing before, and with two passes more (Nishimura and Ugander, KDD 2013). Rates are edges of
the graph over the processor's seconds of one thread, adjacency included; small graphs say little
about them, so there is a synthetic one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from command_line import command
from partitions import read
from torch import Tensor
from tqdm import tqdm

from pyg_sar.partition import coarsening
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.scratch import Scratch
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

MEMORY = 2**30


def fennel(edge_index: Tensor, num_nodes: int, num_parts: int, passes: int) -> Tensor:
    """Nodes that have no part yet are in one more, which is full."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(Path(folder), MEMORY, lambda line: None)
        blocks = coarsening.Blocks([(edge_index, 0, 0)], num_nodes, scratch)
        nowhere = torch.full((num_nodes,), num_parts, dtype=blocks.dtype)
        parts = coarsening.Parts(blocks, num_parts, torch.zeros_like(nowhere))
        parts.part, full = nowhere, parts.most + 10 * parts.loads[:1]
        parts.loads = torch.cat([torch.zeros_like(parts.loads), full])
        for number in range(passes):
            parts.stream(f"pass {number + 1}")
    return parts.part.long()


METHODS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "metis": lambda edges, nodes, parts: assign_nodes(edges, nodes, parts, "metis"),
    "balanced": lambda edges, nodes, parts: assign_nodes(edges, nodes, parts, "balanced"),
    "coarsened": lambda edges, nodes, parts: assign_nodes(edges, nodes, parts, "coarsened"),
    "one pass": lambda edges, nodes, parts: fennel(edges, nodes, parts, 1),
    "three passes": lambda edges, nodes, parts: fennel(edges, nodes, parts, 3),
}


def measure(edges: Tensor, nodes: int, parts: int) -> dict[str, tuple[int, float]]:
    """Cut edges and edges per second, by method."""
    found = {}
    for name, method in METHODS.items():
        start = time.process_time()
        part = method(edges, nodes, parts)
        seconds = time.process_time() - start
        cut = int((part[edges[0]] != part[edges[1]]).sum())
        found[name] = cut, edges.size(1) / seconds
    return found


Found = dict[tuple[str, int, int], dict[str, tuple[int, float]]]
"""By graph, its edges, and parts."""


def document(found: Found, args: argparse.Namespace) -> str:
    others = [name for name in METHODS if name != "metis"]
    lines = [
        "# Streaming partitioners",
        "",
        f"{date.today()}, `{command(args)}`, {os.cpu_count()} cores, one thread, "
        f"torch {torch.__version__}. Cut: edges between parts, of METIS (`metis`, even nodes only) "
        "as a number, of the others over METIS's. Rates: million edges of the graph a second of "
        "the processor's time. `one pass`, `three passes`: Fennel alone, to compare; the package "
        "does not have it.",
        "",
        "| graph | edges | parts | METIS | "
        + " | ".join(f"{name}: cut" for name in others)
        + " | "
        + " | ".join(f"{name}: M edges/s" for name in METHODS)
        + " |",
        "|---" * (4 + len(others) + len(METHODS)) + "|",
    ]
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for (graph, edges, count), row in found.items():
        cut = row["metis"][0]
        cells = [graph, f"{edges:,}", str(count), f"{cut:,}"]
        for name in others:
            ratios[name].append(row[name][0] / max(cut, 1))
            cells.append(f"{ratios[name][-1]:.2f}")
        cells += [f"{row[name][1] / 1e6:.2f}" for name in METHODS]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for name, values in ratios.items():
        within = sum(value <= 1.5 for value in values)
        lines.append(
            f"{name}: within 1.5 times METIS's cut in {within} of {len(values)}; median "
            f"{statistics.median(values):.2f}, highest {max(values):.2f}."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the real graphs")
    parser.add_argument("--graphs", nargs="*", help="names of files; all, if not given")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--synthetic", type=int, nargs=2, default=[500_000, 5_000_000])
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: Found = {}
    names = args.graphs or sorted(path.stem for path in args.data.glob("*.npz"))
    for name in tqdm([*names, "synthetic"]):
        if name == "synthetic":
            nodes, edges = args.synthetic
            data = synthetic_graph(SyntheticGraph(nodes=nodes, edges=edges, features=1, classes=8))
        else:
            data = read(args.data / f"{name}.npz")
        if data is None:
            continue
        edges = data.edge_index.size(1)
        for parts in args.parts:
            found[name, edges, parts] = measure(data.edge_index, data.num_nodes, parts)
            text = document(found, args)
            if args.out:
                args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
