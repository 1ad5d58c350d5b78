"""The gather-sum kernel against PyTorch: sums of source rows, and a layer that is made of them.

    python benchmarks/kernels.py --out docs/benchmarks/kernels.md

On a graph with power-law degrees. What is compared runs alternately within one process, and each
entry is the median over the rounds of one processor time over another: above 1, the kernel is the
faster. Compared with: the package's own PyTorch implementation, the product with a
``torch.sparse`` CSR matrix, and, for the layer, ``distribute`` with ``SARPolicy(kernels="off")``
and plain PyG.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
import torch_geometric
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import pyg_sar
from pyg_sar import SARPolicy, ops
from pyg_sar.shard import Segments, shards_of

Ways = dict[str, Callable[[], object]]


def power_law_edges(nodes: int, edges: int) -> Tensor:
    """Both ends drawn with a density that falls as a power of the node's rank."""
    draw = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, edges, generator=draw) ** 3 * nodes).long()
    shuffle = torch.randperm(nodes, generator=draw)
    return shuffle[ends]


def alternately(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each way, round by round, after one that doesn't count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start = time.process_time()
            run()
            if number:
                times[name].append(time.process_time() - start)
    return times


def ratios(times: dict[str, list[float]]) -> list[str]:
    """Each other way's time over the first one's."""
    first, *others = times.values()
    return [
        f"{statistics.median(a / b for a, b in zip(other, first, strict=True)):.2f}"
        for other in others
    ]


def sum_rows(segments: Segments, nodes: int, widths: Sequence[int], rounds: int) -> list[list[str]]:
    """Rows of the table of sums."""
    counts = torch.zeros(nodes, dtype=torch.long)
    targets = slice(None) if segments.targets is None else segments.targets
    counts[targets] = segments.offsets.diff().long()
    pointers = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        for width in widths if dtype == torch.float32 else widths[-1:]:
            rows = torch.randn(nodes, width).to(dtype)

            def add(native: bool, rows: Tensor = rows) -> Tensor:
                at = (segments.source, segments.offsets, segments.targets)
                return ops.gather_sum_(torch.zeros_like(rows), rows, *at, native=native)

            ways: Ways = {"kernel": lambda: add(True), "PyTorch": lambda: add(False)}
            if dtype == torch.float32:
                values = torch.ones(segments.source.numel())
                matrix = torch.sparse_csr_tensor(
                    pointers, segments.source.long(), values, (nodes, nodes)
                )
                ways["CSR"] = lambda matrix=matrix, rows=rows: matrix @ rows
            found = ratios(alternately(ways, rounds))
            table.append([str(dtype).removeprefix("torch."), str(width), *found, "-"][:4])
    return table


def layer_rows(data: Data, root: Path, widths: Sequence[int], rounds: int) -> list[list[str]]:
    """Rows of the table of a SAGEConv layer, forward and backward, in one process."""
    table = []
    part = pyg_sar.load_partition(root)
    for width in widths:
        x = torch.randn(data.num_nodes, width)
        layers = [SAGEConv(width, width) for _ in range(3)]
        fused = pyg_sar.distribute(layers[0], SARPolicy())
        general = pyg_sar.distribute(layers[1], SARPolicy(kernels="off"))

        def step(layer: torch.nn.Module, edge_index: Tensor, x: Tensor = x) -> None:
            layer(x.requires_grad_(), edge_index).square().sum().backward()

        ways: Ways = {
            "kernel": lambda fused=fused, step=step: step(fused, part.edge_index),
            "off": lambda general=general, step=step: step(general, part.edge_index),
            "PyG": lambda plain=layers[2], step=step: step(plain, data.edge_index),
        }
        table.append([str(width), *ratios(alternately(ways, rounds))])
    return table


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measure(args: argparse.Namespace) -> str:
    """Both tables as Markdown."""
    reason = ops.why_missing()
    if reason is not None:
        raise SystemExit(f"There are no C++ kernels to measure: {reason}")
    torch.manual_seed(0)
    edge_index = power_law_edges(args.nodes, args.edges)
    data = Data(x=torch.randn(args.nodes, 1), edge_index=edge_index, num_nodes=args.nodes)
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.write_partitions(data, 1, folder, "contiguous")
        pyg_sar.init()
        try:
            shards = shards_of(pyg_sar.load_partition(folder).edge_index)
            segments = [shards.segments(0), shards.transposed(0)]
            tables = [sum_rows(s, args.nodes, args.widths, args.rounds) for s in segments]
            layers = layer_rows(data, Path(folder), args.widths, args.rounds)
        finally:
            pyg_sar.finalize()
    both = [[d, *row] for d, t in zip(("forward", "transposed"), tables, strict=True) for row in t]
    command = f"--nodes {args.nodes} --edges {args.edges} --rounds {args.rounds}"
    versions = f"torch {torch.__version__}, torch-geometric {torch_geometric.__version__}"
    return "\n".join(
        [
            "# Kernels",
            "",
            f"{date.today()}, `python benchmarks/kernels.py {command}`, one "
            f"thread, {platform.machine()}, {versions}. Graph with power-law degrees of "
            f"{args.nodes:,} nodes and {args.edges:,} edges. Ratios of processor times: above "
            "1, the kernel is the faster. Other work ran on the machine at the same time.",
            "",
            "Sums of gathered rows, `pyg_sar.ops.gather_sum_`:",
            "",
            markdown(["edges", "dtype", "width", "PyTorch / kernel", "CSR / kernel"], both),
            "",
            "A SAGEConv layer through `distribute` on one worker, forward and backward, float32:",
            "",
            markdown(["width", 'kernels="off" / kernel', "plain PyG / kernel"], layers),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=200_000)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 100, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a Markdown file to write the tables to")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")
    torch.set_num_threads(1)  # processor time is that of all threads together
    text = measure(args)
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
