"""Sampled against full-batch training on the same partition: accuracy, bytes and time of an epoch.

    python benchmarks/sampling.py shared/data/amazon_photo.npz:split=random,normalize=true ...

Both train GraphSAGE from the same initial parameters, once per seed. Prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import pyg_sar
from pyg_sar.tools import load_graph
from pyg_sar.tools.models import build_model
from pyg_sar.train import Callback, EpochRecord, NeighborSampling, TrainConfig

LAYERS, EVERY = 2, 3


class Steps(Callback):
    """Seconds of the epochs that have no evaluation, but for the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_epoch(self, trainer: Any, record: EpochRecord) -> None:
        if record.epoch > 1 and record.scores is None:
            self.seconds.append(record.seconds)


def measured(
    root: str, hidden: int, classes: int, epochs: int, sampler: NeighborSampling | None, seeds: int
) -> tuple[list[float], list[int], float, int]:
    """Test accuracies and best epochs by seed, seconds of an epoch, bytes of an epoch."""
    data, comm = pyg_sar.load_partition(root), pyg_sar.comm.current()
    steps = Steps()

    def train(seed: int, epochs: int, every: int) -> Any:
        torch.manual_seed(seed)
        model = build_model("sage", data.num_features, hidden, classes, layers=LAYERS, dropout=0.5)
        config = TrainConfig(epochs=epochs, eval_every=every, seed=seed)
        model = pyg_sar.distribute(model)
        return pyg_sar.Trainer(model, data, config, sampler=sampler, callbacks=[steps]).fit()

    received = []
    for few in (1, 2):  # Each ends with one evaluation.
        with pyg_sar.Ledger(comm) as ledger:
            train(0, few, 9)
        received.append(ledger.received_bytes())
    results = [train(seed, epochs, EVERY) for seed in range(seeds)]
    accuracies = [100 * result.best["test_accuracy"] for result in results]
    best = [result.best_epoch for result in results]
    return accuracies, best, statistics.median(steps.seconds), received[1] - received[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", nargs=2, type=int, default=[100, 15], help="full, sampled")
    parser.add_argument("--num-neighbors", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1024)
    given = parser.parse_args()
    fanout = (given.num_neighbors,) * LAYERS
    sampler = NeighborSampling(num_neighbors=fanout, batch_size=given.batch_size)
    print(
        "| graph | training | test accuracy | best epoch | bytes of an epoch | time of an epoch |"
    )
    print("|---|---|---|---|---|---|")
    for graph in given.graphs:
        with tempfile.TemporaryDirectory() as folder:
            root, data = str(Path(folder) / "parts"), load_graph(graph)
            pyg_sar.write_partitions(data, given.workers, root)
            first = None
            for kind, how, epochs in zip(
                ("full batch", "sampled"), (None, sampler), given.epochs, strict=True
            ):
                task = root, given.hidden, int(data.y.max()) + 1, epochs, how, given.seeds
                found = pyg_sar.launch(measured, given.workers, *task)[0]
                first = first or found
                spread = f" ± {statistics.stdev(found[0]):.2f}" if given.seeds > 1 else ""
                print(
                    f"| {Path(graph.partition(':')[0]).stem} | {kind}, {epochs} epochs | "
                    f"{statistics.mean(found[0]):.2f}{spread} | "
                    f"{statistics.mean(found[1]):.0f} | {found[3] / first[3]:.2f} | "
                    f"{found[2] / first[2]:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
