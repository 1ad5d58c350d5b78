"""Outputs of all nodes: peak memory and time per node, against training and layer-wise inference.

    python benchmarks/inference.py

Each row is a process of its own: what its resident set grows by (``VmHWM``), over that after the
graph is there, and the time of the second run. "PyG, layer by layer" is ``BasicGNN.inference``:
its ``inference_per_layer`` on batches of nodes with all their neighbours. ``NeighborLoader``,
which makes these, needs pyg-lib, so plain torch makes them here. Prints a table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

import pyg_sar
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.tools import load_graph

CPU = torch.device("cpu")
BATCH = 4096
Found = tuple[int, float, Tensor]  # Bytes, seconds, outputs of the first nodes.


def build(data: Data, given: argparse.Namespace) -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(data.x.size(1), given.hidden, given.layers, 40)


def batches(data: Data) -> Iterator[Data]:
    """One hop with all neighbours, as ``NeighborLoader(data, [-1])`` in the nodes' order."""
    source, target = data.edge_index[:, data.edge_index[1].argsort(stable=True)]
    starts = F.pad(target.bincount(minlength=data.num_nodes).cumsum(0), (1, 0)).tolist()
    place = torch.empty(data.num_nodes, dtype=torch.long)
    for first in range(0, data.num_nodes, BATCH):
        last = min(first + BATCH, data.num_nodes)
        sources, own = source[starts[first] : starts[last]], torch.arange(first, last)
        others = sources.unique()
        n_id = torch.cat([own, others[(others < first) | (others >= last)]])
        place[n_id] = torch.arange(len(n_id))
        ends = torch.stack([place[sources], target[starts[first] : starts[last]] - first])
        yield Data(edge_index=ends, n_id=n_id, batch_size=last - first)


@torch.no_grad()
def layerwise(model: GraphSAGE, data: Data) -> Tensor:
    """The loop of ``BasicGNN.inference``."""
    model.eval()
    x = data.x
    for layer in range(model.num_layers):
        found = [
            model.inference_per_layer(layer, x[b.n_id], b.edge_index, b.batch_size)
            for b in batches(data)
        ]
        x = torch.cat(found)
    return x


def train(model: torch.nn.Module, data: Data) -> Tensor:
    """A training step on all nodes."""
    out = model(data.x, data.edge_index)
    F.cross_entropy(out, data.y).backward()
    return out.detach()


WAYS: dict[str, Callable[[Any, Data], Tensor]] = {
    "PyG: a training step": train,
    "PyG: layer by layer": layerwise,
    "PyG: all nodes at once, pyg_sar.infer(model, data)": pyg_sar.infer,
    "pyg_sar.infer(distribute(model), data)": lambda model, data: pyg_sar.infer(
        pyg_sar.distribute(model), data
    ),
    "pyg_sar: a training step": lambda model, data: train(pyg_sar.distribute(model), data),
}


def alone(way: str, graph: str, given: argparse.Namespace) -> Found:
    """In one process, which holds the graph."""
    torch.set_num_threads(1)
    data = load_graph(graph)
    WAYS[way](build(data, given), load_graph("synthetic:nodes=50,degree=3,features=64"))
    model, bytes_ = build(data, given), 0
    for _ in range(2):
        start = reset_peak_memory(CPU)
        begin = time.perf_counter()
        out = WAYS[way](model, data)
        seconds = time.perf_counter() - begin
        bytes_ = max(bytes_, peak_memory(CPU) - start)
    return bytes_, seconds, out[:100]


def part(root: str, path: str, given: argparse.Namespace) -> tuple[int, int, float]:
    """What ``infer(model, data, parts=..., memory=...)`` runs for each part."""
    start = reset_peak_memory(CPU)
    begin = time.perf_counter()
    data = pyg_sar.load_partition(root)
    pyg_sar.infer(build(data, given), data, out=path)
    return start, peak_memory(CPU), time.perf_counter() - begin


def in_parts(parts: int, memory: str | None, graph: str, given: argparse.Namespace) -> Found:
    """On one worker, that holds a part of the graph at a time."""
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.write_partitions(load_graph(graph), parts, f"{folder}/parts")
        how: dict[str, Any] = {"memory": memory, "store": folder} if memory else {}
        task = part, 1, f"{folder}/parts", f"{folder}/out.npy", given
        found = pyg_sar.launch(*task, parts=parts, threads_per_worker=1, **how)
        out = torch.from_numpy(np.load(f"{folder}/out.npy", mmap_mode="r")[:100].copy())
    return max(most for _, most, _ in found) - found[0][0], max(s for *_, s in found), out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", default="synthetic:nodes=100000,degree=10,features=64")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--memory", nargs="*", default=["256MiB", "128MiB"])
    given = parser.parse_args()
    nodes = load_graph(given.graph).num_nodes
    own = multiprocessing.get_context("spawn")
    rows: list[tuple[str, Found]] = []

    def tell(name: str, found: Found) -> None:
        rows.append((name, found))
        step, outputs = rows[0][1], found[2]
        off = float((outputs - rows[0][1][2]).abs().max() / rows[0][1][2].abs().max())
        if off > 1e-4:
            raise SystemExit(f"{name}: outputs are {off:.1e} off")
        print(
            f"| {name} | {found[0] / 2**20:.0f} | {found[0] / step[0]:.2f} | "
            f"{1e6 * found[1] / nodes:.1f} |",
            flush=True,
        )

    print("| | peak memory, MiB | of PyG's training step | microseconds a node |")
    print("|---|---|---|---|")
    for way in WAYS:
        with own.Pool(1) as pool:
            tell(way, pool.apply(alone, (way, given.graph, given)))
    for memory in (None, *given.memory):
        name = f"pyg_sar.infer, parts={given.parts}" + (f", memory={memory}" if memory else "")
        tell(name, in_parts(given.parts, memory, given.graph, given))


if __name__ == "__main__":
    main()
