"""What pages of 2 MB are worth: epoch times with THP_MEM_ALLOC_ENABLE=1, as launch sets it, and =0.

    python benchmarks/pages.py

One worker and several, the models and the graph of benchmarks/wire.py; the two settings take turns.
Printed only: what a system makes of them (/sys/kernel/mm/transparent_hugepage/enabled) is its own
affair.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from wire import MODELS, power_law_graph, train

import pyg_sar


def epoch_time(root: Path, workers: int, name: str, epochs: int, pages: str) -> float:
    """Median seconds of an epoch."""
    environment = {"THP_MEM_ALLOC_ENABLE": pages}
    found = pyg_sar.launch(train, workers, str(root), name, epochs, env=environment)
    return statistics.median(found[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()
    data = power_law_graph(arguments.nodes, arguments.edges, arguments.features)
    print("| model | workers | epoch, pages of 2 MB / of 4 KB |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for workers in arguments.workers:
            root = Path(folder) / f"parts{workers}"
            pyg_sar.write_partitions(data, workers, root)
            for name in arguments.models:
                ratios = []
                for _ in range(arguments.rounds):
                    large, small = (
                        epoch_time(root, workers, name, arguments.epochs, pages) for pages in "10"
                    )
                    ratios.append(large / small)
                print(f"| {name} | {workers} | {statistics.median(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
