"""Sampled against full-batch training on the same partition: accuracy, bytes and time of an epoch.

    python benchmarks/sampling.py shared/data/coauthor_cs.npz:split=random ...

Both train GraphSAGE from the same initial parameters, once per seed. Prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyg_sar
from pyg_sar.tools import load_graph
from pyg_sar.tools.run import ModelConfig, RunConfig, train_worker
from pyg_sar.train import NeighborSampling, TrainConfig


def measured(config: RunConfig, seeds: int) -> tuple[list[float], list[int], float, int]:
    """Test accuracies and best epochs by seed, seconds of an epoch, bytes of an epoch."""
    accuracies, best, seconds, received = [], [], [], []
    for epochs in (1, 2):
        few = replace(config, train=replace(config.train, epochs=epochs, eval_every=9))
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            seconds.append(train_worker(few).seconds)
        received.append(ledger.received_bytes())
    for seed in range(seeds):
        run = replace(config, train=replace(config.train, seed=seed))
        result = train_worker(run)
        scores: Any = result.best
        accuracies.append(100 * scores["test_accuracy"])
        best.append(result.best_epoch)
    return accuracies, best, seconds[1] - seconds[0], received[1] - received[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", nargs=2, type=int, default=[60, 15], help="full batch, sampled")
    parser.add_argument("--num-neighbors", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1024)
    given = parser.parse_args()
    print(
        "| graph | training | test accuracy | best epoch | bytes of an epoch | time of an epoch |"
    )
    print("|---|---|---|---|---|---|")
    sampler = NeighborSampling(
        num_neighbors=(given.num_neighbors,) * 2, batch_size=given.batch_size
    )
    for graph in given.graphs:
        with tempfile.TemporaryDirectory() as folder:
            root = str(Path(folder) / "parts")
            pyg_sar.write_partitions(load_graph(graph), given.workers, root)
            first = None
            for name, how, epochs in zip(
                ("full batch", "sampled"), (None, sampler), given.epochs, strict=True
            ):
                config = RunConfig(
                    parts=root,
                    model=ModelConfig(name="sage", hidden=given.hidden),
                    train=TrainConfig(epochs=epochs, eval_every=3),
                    sampler=how,
                    progress="none",
                )
                found = pyg_sar.launch(measured, given.workers, config, given.seeds)[0]
                first = first or found
                print(
                    f"| {Path(graph.partition(':')[0]).stem} | {name}, {epochs} epochs | "
                    f"{statistics.mean(found[0]):.2f} ± {statistics.stdev(found[0]):.2f} | "
                    f"{statistics.mean(found[1]):.0f} | {found[3] / first[3]:.2f} | "
                    f"{found[2] / first[2]:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
