"""R-GCN on a real knowledge graph: plain PyG beside pyg_sar on workers and parts.

    python benchmarks/knowledge_graph.py

AIFB with the settings of Schlichtkrull et al. (ESWC 2018): one-hot entities, 16 hidden units, no
bases, 50 steps of Adam. PyG's ``FastRGCNConv`` computes the plain runs. On workers it is
``RGCNConv`` on the nodes' ids, which is the same model; a step of it makes the gradient of all
entities' weights anew for each relation, so there are fewer runs and, in float64, fewer steps of
it. There is no dropout, so all runs of a seed are the same training. Prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import FastRGCNConv, RGCNConv

import pyg_sar

HIDDEN, LR, EPOCHS = 16, 0.01, 50
FILE = Path(__file__).resolve().parents[2] / "shared" / "data" / "kg_aifb.npz"
Curves = list[tuple[list[float], list[float]]]  # By seed: losses, test accuracies of each epoch.


class RGCN(torch.nn.Module):
    """Two layers; the first one's weights are those of the one-hot entities."""

    def __init__(self, kind: type[RGCNConv], nodes: int, relations: int, classes: int) -> None:
        super().__init__()
        self.first = kind(nodes, HIDDEN, relations)
        self.last = kind(HIDDEN, classes, relations)

    def forward(self, ids: Tensor | None, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.first(ids, edge_index, edge_type).relu()
        return self.last(x, edge_index, edge_type)


def read(path: Path) -> Data:
    """The graph with an inverse of each relation."""
    arrays = np.load(path, allow_pickle=False)
    kept = {name: torch.from_numpy(arrays[name]) for name in ("y", "train_mask", "test_mask")}
    ends, kind = (torch.from_numpy(arrays[f"edge_{name}"]).long() for name in ("index", "type"))
    relations = int(arrays["num_relations"])
    return Data(
        edge_index=torch.cat([ends, ends.flip(0)], dim=1),
        edge_type=torch.cat([kind, kind + relations]),
        num_nodes=int(arrays["num_nodes"]),
        **kept,
    )


def train(
    data: Data,
    made: Callable[[], torch.nn.Module],
    seeds: int,
    epochs: int,
) -> Curves:
    """All seeds' curves."""
    found = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = made()
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        losses, accuracies = [], []
        for _ in range(epochs):
            optimizer.zero_grad()
            out = model(None, data.edge_index, data.edge_type)
            mask = data.train_mask
            loss = F.cross_entropy(out[mask], data.y[mask])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            # Of the step before: there is no dropout, and one pass serves both.
            right = (out.detach().argmax(1) == data.y)[data.test_mask]
            accuracies.append(right.double().mean().item())
        found.append((losses, accuracies))
    return found


def on_workers(
    root: str, seeds: int, epochs: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> Curves:
    """The same on this worker's part."""
    data = pyg_sar.load_partition(root)

    def made() -> torch.nn.Module:
        return pyg_sar.distribute(RGCN(RGCNConv, *sizes).to(dtype))

    return train(data, made, seeds, epochs)


def alone(
    data: Data, seeds: int, epochs: int, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> Curves:
    """Plain PyG."""

    def made() -> torch.nn.Module:
        return RGCN(FastRGCNConv, *sizes).to(dtype)

    return train(data, made, seeds, epochs)


def row(name: str, dtype: torch.dtype, found: Curves, plain: Curves) -> str:
    """A line of the table."""
    last = [100 * accuracies[-1] for _, accuracies in found]
    spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
    off = [
        max(
            abs(a - b)
            for mine, other in zip(found, plain, strict=True)
            for a, b in zip(mine[k], other[k], strict=True)
        )
        for k in (0, 1)
    ]
    kind = str(dtype).removeprefix("torch.")
    epochs = len(found[0][0])
    return (
        f"| {name} | {kind} | {len(last)} | {epochs} | {statistics.mean(last):.2f}{spread} | "
        f"{off[0]:.1e} | {100 * off[1]:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--seeds", type=int, default=5, help="of plain PyG")
    parser.add_argument("--seeds-of-workers", type=int, default=1, help="in float32")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="in float32")
    parser.add_argument("--exact-epochs", type=int, default=10, help="in float64, of one seed")
    parser.add_argument(
        "--worlds", nargs="+", default=["2", "1", "4", "2x8"], help="workers, or workers x parts"
    )
    given = parser.parse_args()
    data = read(given.file)
    sizes = data.num_nodes, int(data.edge_type.max()) + 1, int(data.y.max()) + 1
    print("| | numbers | runs | epochs | test accuracy, last epoch | loss off PyG's | accuracy |")
    print("|---|---|---|---|---|---|---|")
    runs = (
        (torch.float32, given.seeds, given.seeds_of_workers, given.epochs, given.worlds[:1]),
        (torch.float64, 1, 1, given.exact_epochs, given.worlds),
    )
    for dtype, seeds, seeds_of_workers, epochs, worlds in runs:
        plain = alone(data, seeds, epochs, dtype, sizes)
        print(row("plain PyG", dtype, plain, plain), flush=True)
        for world in worlds:
            workers, _, hosted = world.partition("x")
            parts = int(hosted or workers)
            with tempfile.TemporaryDirectory() as root:
                pyg_sar.write_partitions(data, parts, f"{root}/parts")
                case = seeds_of_workers, epochs, dtype, sizes
                task = on_workers, int(workers), f"{root}/parts", *case
                how: dict[str, Any] = {"parts": parts} if hosted else {}
                found = pyg_sar.launch(*task, **how, threads_per_worker=1)[0]
            name = f"{workers} workers" + (f", {parts} parts" if hosted else "")
            print(row(name, dtype, found, plain[:seeds_of_workers]), flush=True)


if __name__ == "__main__":
    main()
