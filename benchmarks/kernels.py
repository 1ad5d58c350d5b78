r"""The sum kernels against PyTorch's ways: times, memory, and what memory itself would allow.

    OMP_WAIT_POLICY=passive python benchmarks/kernels.py \
        --out kernels.md --plot kernels.png

Sums of gathered rows on a power-law graph, plain and weighted, by target and transposed: the
kernel, the product with a ``torch.sparse`` CSR matrix, ``torch_sparse.spmm_sum`` where that is
installed, and what PyG does with an ``edge_index``: gather, multiply, scatter. They run alternately
within one process. Both the least wall time and the median processor time (of all threads) over
the rounds are told: other work on the machine disturbs the latter less. Peak memory is that of a
fresh process each. ``OMP_WAIT_POLICY`` keeps threads that wait for others from counting as work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command_line import command
from torch import Tensor

from pyg_sar.kernels import ops
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

try:
    import torch_sparse
except ImportError:
    torch_sparse = None

Ways = dict[str, Callable[[], object]]
NAMES = ("kernel", "torch.sparse CSR", "torch_sparse", "PyG, COO")
TARGETS = {256: 5.5, 100: 3.5, 16: 2.0}  # times as fast as torch.sparse


@dataclass(frozen=True)
class Edges:
    """Edges in the order of their targets."""

    source: Tensor
    target: Tensor
    offsets: Tensor
    weight: Tensor
    nodes: int


def grouped(edge_index: Tensor, nodes: int) -> Edges:
    source, target = edge_index
    order = ops.sort_edges(source, nodes)[0]
    order, offsets = ops.sort_edges(target, nodes, order)
    draw = torch.Generator().manual_seed(0)
    weight = torch.rand(source.numel(), generator=draw)
    return Edges(source[order].int(), target[order], offsets, weight, nodes)


def one_way(name: str, edges: Edges, rows: Tensor, weighted: bool) -> Callable[[], object]:
    """A way to sum rows, with all that is made once per graph made already."""
    weight = edges.weight if weighted else None
    if name == "kernel":
        at = edges.source, edges.offsets, None, weight
        return lambda: ops.gather_sum_(torch.zeros_like(rows), rows, *at, native=True)
    source, offsets = edges.source.long(), edges.offsets.long()
    if name == "torch.sparse CSR":
        values = edges.weight if weighted else torch.ones(source.numel())
        matrix = torch.sparse_csr_tensor(offsets, source, values, (edges.nodes, edges.nodes))
        return lambda: matrix @ rows
    if name == "torch_sparse":
        return lambda: torch.ops.torch_sparse.spmm_sum(
            None, offsets, source, weight, None, None, rows
        )
    place = edges.target.view(-1, 1).expand(-1, rows.size(1))

    def scatter() -> Tensor:
        message = rows.index_select(0, source)
        if weight is not None:
            message = weight.view(-1, 1) * message
        return torch.zeros_like(rows).scatter_add_(0, place, message)

    return scatter


def names(edges: Edges, width: int, most_bytes: float) -> list[str]:
    """The ways that can be run: PyG's makes a message per edge."""
    found = [name for name in NAMES if name != "torch_sparse" or torch_sparse is not None]
    return [n for n in found if n != NAMES[-1] or edges.source.numel() * width * 4 <= most_bytes]


def alternately(ways: Ways, rounds: int) -> dict[str, tuple[float, float]]:
    """Least wall time and median processor time of each way, after a round that doesn't count."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            if number:
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - used)
    return {name: (min(wall[name]), statistics.median(processor[name])) for name in ways}


# Memory ######################################################################


def peak_of(name: str, file: str, width: int, weighted: bool) -> int:
    """Bytes that one way adds to what it is given; run in a process of its own."""
    edges = Edges(**torch.load(file, weights_only=True))
    rows = torch.randn(edges.nodes, width)
    run = one_way(name, edges, rows, weighted)
    before = reset_peak_memory(rows.device)
    run()
    return peak_memory(rows.device) - before


def peak_in_a_fresh_process(name: str, file: str, width: int, weighted: bool) -> int:
    one = json.dumps([name, file, width, weighted])
    done = subprocess.run(
        [sys.executable, __file__, "--peak-of", one], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


# Tables ######################################################################


def limits(nodes: int, widths: Sequence[int]) -> list[list[str]]:
    """What memory allows: a copy, and rows gathered at random, in GB of what is read per second."""
    x = torch.randn(nodes, max(widths))
    y = torch.empty_like(x)
    best, _ = alternately({"copy": lambda: y.copy_(x)}, 5)["copy"]
    table = [["copy", "-", f"{x.numel() * 4 / best / 1e9:.1f}"]]
    place = torch.randperm(nodes)
    for width in widths:
        rows = x[:, :width].contiguous()
        out = torch.empty_like(rows)
        gathered = partial(torch.index_select, rows, 0, place, out=out)
        best, _ = alternately({"rows": gathered}, 5)["rows"]
        table.append(
            ["every row once, at random", str(width), f"{rows.numel() * 4 / best / 1e9:.1f}"]
        )
    return table


def times_of(
    edges: Edges, direction: str, args: argparse.Namespace
) -> tuple[list[list[str]], dict[Any, tuple[float, float]]]:
    """Rows of the table of times; and how many times as fast as torch.sparse the kernel is."""
    table: list[list[str]] = []
    ratio: dict[Any, tuple[float, float]] = {}
    for width in args.widths:
        rows = torch.randn(edges.nodes, width)
        gigabytes = edges.source.numel() * width * 4 / 1e9
        for weighted in (False, True):
            run = names(edges, width, args.coo_bytes)
            found = alternately({n: one_way(n, edges, rows, weighted) for n in run}, args.rounds)
            wall, used = found["kernel"]
            others = [
                f"{found[n][0] / wall:.1f} ({found[n][1] / used:.1f})" if n in found else "-"
                for n in NAMES[1:]
            ]
            other = found[NAMES[1]]
            ratio[direction, width, weighted] = other[0] / wall, other[1] / used
            kind = "weighted" if weighted else "plain"
            goal = f"{TARGETS[width]:.1f}" if width in TARGETS else "-"
            row = [direction, kind, str(width), f"{wall:.3f}", f"{gigabytes / wall:.0f}"]
            table.append([*row, *others, goal])
            print(" | ".join(table[-1]), flush=True)
    return table, ratio


def memory_rows(edges: Edges, args: argparse.Namespace) -> list[list[str]]:
    """Rows of the table of memory."""
    table = []
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(vars(edges), file.name)
        for width in args.widths:
            run = names(edges, width, args.coo_bytes)
            found = {n: peak_in_a_fresh_process(n, file.name, width, False) for n in run}
            numbers = [f"{found[n] / 2**20:.0f}" if n in found else "-" for n in NAMES]
            table.append([str(width), f"{edges.nodes * width * 4 / 2**20:.0f}", *numbers])
            print(" | ".join(table[-1]), flush=True)
    return table


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(ratio: dict[Any, tuple[float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    widths = sorted({width for _, width, _ in ratio})
    kinds = sorted({(direction, weighted) for direction, _, weighted in ratio})
    for k, (direction, weighted) in enumerate(kinds):
        places = [n + 0.2 * (k - len(kinds) / 2 + 0.5) for n in range(len(widths))]
        label = f"{direction}, {'weighted' if weighted else 'plain'}"
        axes.bar(places, [ratio[direction, w, weighted][1] for w in widths], 0.18, label=label)
    known = [n for n, width in enumerate(widths) if width in TARGETS]
    goals = [TARGETS[widths[n]] for n in known]
    left, right = ([n + side for n in known] for side in (-0.4, 0.4))
    axes.hlines(goals, left, right, colors="black", linestyles="dashed", label="goal")
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_xlabel("width")
    axes.set_ylabel("speed (processor time),\ntorch.sparse CSR = 1")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


def measure(args: argparse.Namespace) -> tuple[str, dict[Any, tuple[float, float]]]:
    """The document, and the ratios that are drawn."""
    reason = ops.why_missing()
    if reason is not None:
        raise SystemExit(f"There are no C++ kernels to measure: {reason}")
    torch.manual_seed(0)
    graph = SyntheticGraph(nodes=args.nodes, edges=args.edges, features=0)
    edge_index = synthetic_graph(graph).edge_index
    table: list[list[str]] = []
    ratio: dict[Any, tuple[float, float]] = {}
    for direction, ends in (("by target", edge_index), ("transposed", edge_index.flip(0))):
        rows, found = times_of(grouped(ends, args.nodes), direction, args)
        table += rows
        ratio |= found
    memory = memory_rows(grouped(edge_index, args.nodes), args)
    load = f"{os.getloadavg()[0]:.1f}"
    return "\n".join(
        [
            "# Kernels",
            "",
            f"{date.today()}, `{command(args)}`, {args.threads} threads, "
            f"{os.cpu_count()} cores, {processor()}, torch {torch.__version__}, torch_sparse "
            f"{'not installed' if torch_sparse is None else torch_sparse.__version__}. Power-law "
            f"graph (`pyg_sar.tools.synthetic_graph`) of {args.nodes:,} nodes and "
            f"{args.edges:,} edges, float32. The machine's load at the end was {load}: "
            f"above {args.threads}, other work slowed all ways.",
            "",
            "Sums of gathered rows, `pyg_sar.kernels.ops.gather_sum_`. GB/s: values of "
            "rows that are added "
            "up, most of which come from caches. Ratios: times as fast as the other way, by least "
            "wall time (by median processor time).",
            "",
            markdown(
                ["edges", "sum", "width", "kernel (s)", "GB/s", *NAMES[1:], "goal (CSR)"], table
            ),
            "",
            verdict(ratio),
            "",
            "What memory allows:",
            "",
            markdown(["", "width", "GB/s"], limits(args.nodes, args.widths)),
            "",
            "Peak memory that a plain sum adds, MB, in a fresh process each (the result included):",
            "",
            markdown(["width", "result", *NAMES], memory),
            "",
            "PyG's way materializes a message for every edge; a dash is where that would not "
            "fit, or where a package is missing.",
            "",
        ]
    ), ratio  # fmt: skip


def verdict(ratio: dict[Any, tuple[float, float]]) -> str:
    """Which goals are not reached, by either clock."""
    said = []
    for k, clock in enumerate(("least wall time", "processor time")):
        missed = [
            f"{direction}, {'weighted' if weighted else 'plain'}, width {width}"
            for (direction, width, weighted), found in ratio.items()
            if found[k] < TARGETS.get(width, 0)
        ]
        said.append(f"By {clock}, {'not reached: ' if missed else 'every goal is reached'}")
        said[-1] += "; ".join(missed) + "."
    return " ".join(said)


def processor() -> str:
    """The processor's name, without what identifies the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, 'unknown')}, {platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 100, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--coo-bytes", type=float, default=1e9, help="of PyG's messages at most")
    parser.add_argument("--out", type=Path, help="a Markdown file to write the tables to")
    parser.add_argument("--plot", type=Path, help="a picture of the ratios")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
    torch.set_num_threads(args.threads)
    if args.peak_of is not None:
        print(peak_of(*json.loads(args.peak_of)))
        return
    text, ratio = measure(args)
    print(text)
    if args.plot is not None:
        plot(ratio, args.plot)
        text += f"\n![Ratios]({args.plot.name})\n"
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
