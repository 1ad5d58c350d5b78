"""Layers through ``distribute`` on one worker against plain PyG: time ratios and peak memory.

    python benchmarks/attention.py --out attention.md

A power-law graph, float32, no self loops are added. What is compared is timed alternately in one
process, the least of the rounds counts; peaks are those of fresh processes over what they hold
before the first pass (``VmHWM`` over ``VmRSS``, after a pass over a tiny graph).
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric
from command_line import command
from torch import Tensor, nn
from torch_geometric.nn import (
    FAConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    SAGEConv,
    SuperGATConv,
    TransformerConv,
)
from tqdm import tqdm

import pyg_sar
from pyg_sar.kernels.attention_ops import attention_
from pyg_sar.kernels.attention_terms import Attention, AttentionState
from pyg_sar.kernels.ops import gather_sum_
from pyg_sar.space.shard import segments_of
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

FEATURES = 100
SHAPES = {
    "GATConv 4x8": (GATConv, 4, 8),
    "GATConv 4x32": (GATConv, 4, 32),
    "GATv2Conv 4x8": (GATv2Conv, 4, 8),
    "TransformerConv 4x8": (TransformerConv, 4, 8),
}
MORE = ("SuperGATConv MX 4x8", "SuperGATConv SD 4x8", "FAConv 64")  # where --layers asks for them


class Net(nn.Module):
    """Three layers: SAGE of 256 channels, or GAT of 4 heads of 32."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "sage":
            layers: list[nn.Module] = [SAGEConv(n, 256) for n in (FEATURES, 256, 256)]
        else:
            layers = [GATConv(n, 32, heads=4, add_self_loops=False) for n in (FEATURES, 128, 128)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x, edge_index))
        return x


class Residual(nn.Module):
    """FAConv of 64 channels, with the weights of edges given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 64)
        self.conv = FAConv(64, normalize=False, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.linear(x)
        return self.conv(x, x, edge_index, x.new_ones(edge_index.size(1)))


def make(name: str) -> nn.Module:
    """A layer or model by name."""
    torch.manual_seed(0)
    if name == "FAConv 64":
        return Residual()
    if name in MORE:  # in training it draws edges, which is not what is measured
        kind = {"attention_type": name.split()[1], "add_self_loops": False}
        return SuperGATConv(FEATURES, 8, heads=4, **kind).eval()
    if name in ("sage", "gat"):
        return Net(name)
    if name not in SHAPES:
        heads = int(name.split()[1].split("x")[0])
        return GATConv(FEATURES, 100, heads=heads, add_self_loops=False)
    kind, heads, channels = SHAPES[name]
    options: dict[str, Any] = {} if kind is TransformerConv else {"add_self_loops": False}
    return kind(FEATURES, channels, heads=heads, **options)


class Pass:
    """Forward and backward passes of a module, timed."""

    def __init__(self, module: nn.Module, x: Tensor, edge_index: Tensor) -> None:
        self.module, self.x, self.edge_index = module, x, edge_index
        with torch.no_grad():
            width = module(x[:2], edge_index[:, :0]).size(1)
        self.gradient = torch.randn(x.size(0), width)

    def run(self) -> None:
        self.module(self.x, self.edge_index).backward(self.gradient)

    def parts(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass."""
        start = time.perf_counter()
        out = self.module(self.x, self.edge_index)
        middle = time.perf_counter()
        out.backward(self.gradient)
        return middle - start, time.perf_counter() - middle


def least(rounds: int, *timed: Callable[[], Any]) -> list[Any]:
    """The least of each over rounds in which they take turns; the first round does not count."""
    found: list[list[Any]] = [[] for _ in timed]
    for step in range(rounds + 1):
        for call, times in zip(timed, found, strict=True):
            start = time.perf_counter()
            result = call()
            if step:
                times.append(result or time.perf_counter() - start)
    return [
        tuple(map(min, zip(*times, strict=True))) if isinstance(times[0], tuple) else min(times)
        for times in found
    ]


def peak(name: str, distributed: bool, graph: str) -> float:
    """MiB added by passes of a module, in a fresh process."""
    command = [sys.executable, __file__, "--peak", name, "--graph", graph]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    command += ["--plain"] * (not distributed)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return float(done.stdout) if done.returncode == 0 else float("nan")


def print_peak(name: str, distributed: bool, graph: str) -> None:
    x, edge_index = torch.load(graph)
    module = make(name)
    module = pyg_sar.distribute(module) if distributed else module
    Pass(module, x[:50], edge_index[:, :0]).run()
    work = Pass(module, x, edge_index)

    def status(key: str) -> float:
        return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) / 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work.run()
    work.run()
    print(status("VmHWM") - before)


def sums(x: Tensor, edge_index: Tensor, width: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A fused sum, and a product of torch's CSR matrix, over rows of a width."""
    rows, nodes = torch.randn(x.size(0), width), x.size(0)
    segments = segments_of(edge_index[0], edge_index[1], nodes, nodes)
    counts = torch.bincount(edge_index[1], minlength=nodes)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    source = edge_index[0][edge_index[1].argsort(stable=True)]
    matrix = torch.sparse_csr_tensor(offsets, source, torch.ones(source.numel()), (nodes, nodes))

    def fused() -> None:
        at = segments.source, segments.offsets, segments.targets
        gather_sum_(rows.new_zeros(nodes, width), rows, *at)

    def product() -> None:
        torch.mm(matrix, rows)

    return fused, product


def attention_of(edge_index: Tensor, heads: int, channels: int) -> tuple[int, Callable[[], Any]]:
    """GAT's attention alone, forward, without what the layer does to each node before and after."""
    nodes, width = int(edge_index.max()) + 1, heads * channels
    segments = segments_of(edge_index[0], edge_index[1], nodes, nodes)
    terms = Attention(
        kind="additive",
        value=torch.randn(nodes, heads, channels),
        key=torch.randn(nodes, heads),
        query=torch.randn(nodes, heads),
        slope=0.2,
    )

    def forward() -> None:
        attention_(AttentionState.start(nodes, terms.value), terms, segments)

    return width, forward


def real_graphs(folder: Path, rounds: int) -> list[str]:
    """Layers on real graphs of any size, with their self loops, hubs and empty rows."""
    kinds = {
        "SAGEConv 64": lambda: SAGEConv(64, 64),
        "GCNConv 64": lambda: GCNConv(64, 64),
        "GATConv 4x16": lambda: GATConv(64, 16, heads=4),
    }
    lines = ["", "PyG / here, forward and backward, on real graphs (64 drawn features):", ""]
    lines += [f"| graph | nodes | edges | {' | '.join(kinds)} |", "| --- |" + " --- |" * 5]
    for path in tqdm(sorted(folder.glob("*.npz"))):
        with np.load(path, allow_pickle=False) as file:
            if "edge_index" not in file:
                continue
            edge_index = torch.from_numpy(file["edge_index"].astype(np.int64))
            nodes = int(file["num_nodes"])
        x, ratios = torch.randn(nodes, 64), []
        for kind in kinds.values():
            plain = kind()
            here = Pass(pyg_sar.distribute(copy.deepcopy(plain)), x, edge_index)
            fast, slow = least(rounds, here.run, Pass(plain, x, edge_index).run)
            ratios.append(f"{slow / fast:.1f}")
        counts = f"{nodes:,} | {edge_index.size(1):,}"
        lines.append(f"| {path.stem} | {counts} | {' | '.join(ratios)} |")
    return lines


def measure(args: argparse.Namespace, graph: str) -> list[str]:
    x, edge_index = torch.load(graph)
    lines = ["| layer | PyG / here, forward and backward | PyG, MiB | here, MiB |"]
    lines += ["| --- | --- | --- | --- |"]
    names = args.layers or list(SHAPES)
    bar = tqdm(total=len(names) + 9 * (not args.layers))
    for name in names:
        here = Pass(pyg_sar.distribute(make(name)), x, edge_index)
        mine = peak(name, True, graph)
        if name == "GATConv 4x32":  # plain PyG needs more memory than there may be
            ratio, other = "-", "-"
        else:
            plain = Pass(make(name), x, edge_index)
            fast, slow = least(args.rounds, here.run, plain.run)
            ratio, other = f"{slow / fast:.1f}", f"{peak(name, False, graph):.0f}"
        lines.append(f"| {name} | {ratio} | {other} | {mine:.0f} |")
        bar.update()
    if args.layers:
        return lines
    lines += ["", "| one against another | ratio |", "| --- | --- |"]
    for name, width in (("GATConv 4x8", 32), ("GATConv 4x32", 128)):
        here = Pass(pyg_sar.distribute(make(name)), x, edge_index)
        fused, product = sums(x, edge_index, width)
        (forward, back), one, csr = least(args.rounds, here.parts, fused, product)
        lines.append(f"| {name}, forward / fused sum of width {width} | {forward / one:.2f} |")
        lines.append(
            f"| {name}, forward and backward / torch.sparse CSR product of width {width} "
            f"| {(forward + back) / csr:.2f} |"
        )
        bar.update()
    for heads, channels in ((4, 8), (4, 32), (8, 100)):
        width, alone = attention_of(edge_index, heads, channels)
        forward, one, _ = least(args.rounds, alone, *sums(x, edge_index, width))
        name = f"attention {heads}x{channels} alone, forward"
        lines.append(f"| {name} / fused sum of width {width} | {forward / one:.2f} |")
        bar.update()
    for heads in (2, 4, 8):
        here = Pass(pyg_sar.distribute(make(f"GATConv {heads}x100")), x, edge_index)
        ((forward, back),) = least(args.rounds, here.parts)
        lines.append(f"| GATConv {heads}x100, backward / forward | {back / forward:.2f} |")
        bar.update()
    sage = Pass(pyg_sar.distribute(make("sage")), x, edge_index)
    gat = Pass(pyg_sar.distribute(make("gat")), x, edge_index)
    plain = Pass(make("sage"), x, edge_index)
    fast, slow, attention = least(max(args.rounds - 1, 1), sage.run, plain.run, gat.run)
    lines.append(f"| three SAGEConv layers of 256, PyG / here | {slow / fast:.2f} |")
    lines.append(f"| three GATConv layers 4x32 / three SAGEConv of 256 | {attention / fast:.2f} |")
    bar.update()
    bar.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    names = (*SHAPES, *MORE)
    parser.add_argument("--layers", nargs="+", choices=names, help="these alone, to PyG's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", type=Path, help="folder of .npz graphs to try as well")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        print_peak(args.peak, not args.plain, args.graph)
        return
    kind = SyntheticGraph(nodes=args.nodes, edges=args.edges, features=FEATURES)
    with tempfile.TemporaryDirectory() as folder:
        data = synthetic_graph(kind)
        torch.save((data.x, data.edge_index), f"{folder}/graph.pt")
        del data
        lines = measure(args, f"{folder}/graph.pt")
    if args.data:
        lines += real_graphs(args.data, 2 * args.rounds)
    head = [
        "# Layers on one worker",
        "",
        f"{date.today()}, `{command(args)}`, {args.threads} threads, "
        f"{platform.machine()}, torch {torch.__version__}, torch-geometric "
        f"{torch_geometric.__version__}. Power-law graph of {args.nodes:,} nodes and "
        f"{args.edges:,} edges, {FEATURES} features. Load at the start and at the end: "
        f"{LOAD[0]:.1f} and {os.getloadavg()[0]:.1f}.",
        "",
    ]
    text = "\n".join([*head, *lines, ""])
    print(text)
    if args.out:
        args.out.write_text(text)


LOAD = os.getloadavg()

if __name__ == "__main__":
    main()
