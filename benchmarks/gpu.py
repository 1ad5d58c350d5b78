"""Layers, and parts that wait in host memory, on one GPU: times, peak memory, differences.

    python benchmarks/gpu.py --out gpu.md

A power-law graph, float32. Layers, forward and backward: plain PyG, PyG under ``torch.compile``,
and through ``distribute``, in turn; the least of the rounds counts. Memory is the peak of PyTorch's
allocator in a second pass, beyond features, edges and parameters: what a layer keeps of the graph
counts, sorting it once doesn't. Parts: three layers are trained by parts that wait in pinned host
memory, against the whole graph on the GPU; medians of epochs. A dash: PyTorch has no memory for it.
``apart``: the largest difference to PyG's outputs and gradients (parts: to the loss of the whole
graph), of the largest number. ``--device cpu`` tries the script out, without memory and a store.
"""

import argparse
import copy
import math
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import chain, pairwise, product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from attention import FEATURES, SHAPES, least, make
from command_line import command
from larger_than_memory import MODELS
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from tqdm import tqdm

import pyg_sar
from pyg_sar.comm import current, finalize
from pyg_sar.kernels import KernelWarning
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

LAYERS = (*SHAPES, "SAGEConv 256")
OF_LAYERS = (
    "layer; PyG, ms; compiled; here; compiled / here; PyG, MiB; compiled; here; / PyG; apart"
)
OF_PARTS = "model; parts; mode; epoch, s; / whole; peak, MiB; / whole; MiB out, an epoch; apart"
MIB = 1 << 20


def memory(device: torch.device, most: bool = False, reset: bool = False) -> float:
    """MiB of tensors on a GPU, now or at most, when its work has ended; not known of the CPU."""
    if device.type != "cuda":
        return math.nan
    torch.cuda.synchronize(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return (torch.cuda.max_memory_allocated if most else torch.cuda.memory_allocated)(device) / MIB


class Pass:
    """Forward and backward passes of a module; the results of the first, the peak of the second."""

    def __init__(self, module: Any, x: Tensor, edge_index: Tensor, before: float) -> None:
        self.module, self.given = module, (x, edge_index)
        out = self.out().detach().cpu()
        self.found = out, torch.cat([p.grad.flatten().cpu() for p in module.parameters()])
        memory(x.device, reset=True)
        self.run()
        self.peak = memory(x.device, most=True) - before

    def run(self) -> None:
        self.out()

    def out(self) -> Tensor:
        out: Tensor = self.module(*self.given)
        out.square().mean().backward()
        memory(out.device)  # Waits.
        return out


def table(columns: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    names = columns.split("; ")
    lines = []
    for line in chain([names, ["---"] * len(names)], rows):
        lines.append(f"| {' | '.join(map(str, line))} |")
        print(lines[-1], flush=True)  # A run that is cut short has shown what it found.
    return lines


def layers(args: argparse.Namespace, x: Tensor, edge_index: Tensor) -> Iterator[list[str]]:
    compiled = partial(torch.compile, backend=args.compiler)
    kinds: dict[str, Any] = {"PyG": nn.Identity(), "compiled": compiled, "here": pyg_sar.distribute}
    for name in tqdm(args.layers):
        plain = (SAGEConv(FEATURES, 256) if name == LAYERS[-1] else make(name)).to(x.device)
        ways: dict[str, Any] = dict.fromkeys(kinds, SimpleNamespace(peak=math.nan, found=()))
        for kind, change in kinds.items():
            before = memory(x.device)
            with suppress(torch.OutOfMemoryError):
                ways[kind] = Pass(change(copy.deepcopy(plain)), x, edge_index, before)
        ran = {kind: way.run for kind, way in ways.items() if way.found}
        seconds = dict(zip(ran, least(args.rounds, *ran.values()), strict=True))
        times = [1e3 * seconds.get(kind, math.nan) for kind in kinds]
        peaks = [way.peak for way in ways.values()]
        pairs = zip(ways["PyG"].found, ways["here"].found, strict=False)
        apart = [float((b - a).abs().max() / a.abs().max()) for a, b in pairs]
        found = [f"{t:.2f}" for t in times] + [f"{times[1] / times[2]:.2f}"]
        found += [f"{p:.1f}" for p in peaks] + [f"{peaks[2] / peaks[0]:.3f}"]
        yield [name, *found, f"{max(apart, default=math.nan):.1e}"]


def trained(root: str, name: str, mode: Any, epochs: int) -> tuple[list[float], float, float]:
    """A part's: seconds of epochs, the last loss, MiB that an epoch moves to host memory."""
    comm: Any = current()
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = MODELS[name](data.num_features)
    model = pyg_sar.distribute(model, pyg_sar.SARPolicy(mode=mode))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marks, loss = [], torch.zeros(())
    for _ in range(epochs + 1):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        memory(comm.device)
        marks.append(time.perf_counter())
    store = None if comm.host is None else comm.host.store
    moved = 0 if store is None else store.counters()["bytes_written"] / len(marks) / MIB
    return [b - a for a, b in pairwise(marks)], loss.item(), moved


def parts(args: argparse.Namespace, folder: str, data: Any) -> Iterator[list[str]]:
    for count in (1, *args.parts):
        pyg_sar.write_partitions(data, count, f"{folder}/{count}", args.method)
    store = "pinned" if args.device == "cuda" else None
    for name in args.models:
        whole = 0.0, 0.0, 0.0
        for count, mode in tqdm([(1, "-"), *product(args.parts, (1, 2, 3))]):
            finalize()
            device = pyg_sar.init(device=args.device).device
            before = memory(device, reset=True)
            how: Any = {"parts": count, "store": store} if count > 1 else {}
            given = f"{folder}/{count}", name, mode if how else 1, args.rounds
            epochs, loss, moved = pyg_sar.run(trained, *given, **how)[0]
            here = median(epochs), memory(device, most=True) - before, loss
            whole = here if count == 1 else whole
            time, peak, apart = (a / b for a, b in zip(here, whole, strict=True))
            found = [f"{here[0]:.3f}", f"{time:.2f}", f"{here[1]:.1f}", f"{peak:.3f}"]
            yield [name, str(count), str(mode), *found, f"{moved:.1f}", f"{abs(apart - 1):.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--layers", nargs="*", default=LAYERS)
    parser.add_argument("--models", nargs="*", default=("sage", "gat"))
    parser.add_argument("--parts", nargs="*", type=int, default=(2, 4, 8))
    parser.add_argument("--method", default="coarsened", help="how parts are made")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    data = synthetic_graph(SyntheticGraph(nodes=args.nodes, edges=args.edges, features=FEATURES))
    with warnings.catch_warnings(record=True) as seen, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always", KernelWarning)
        found = layers(args, data.x.to(args.device), data.edge_index.to(args.device))
        lines = [*table(OF_LAYERS, found), "", *table(OF_PARTS, parts(args, folder, data))]
    # Where a kernel was left out, PyTorch's operators were measured.
    lines += ["", *dict.fromkeys(f"* {w.message}" for w in seen if w.category is KernelWarning)]
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    head = f"{date.today()}, `{command(args)}`,"
    head += f" {gpu}, torch {version('torch')}, torch-geometric {version('torch-geometric')}."
    text = "\n".join(["# On one GPU", "", head, "", *lines, ""]).replace(" nan", " -")
    print(f"\n{head}")
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
