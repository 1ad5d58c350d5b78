"""What memory that is kept is worth, and pages of 2 MB: epoch times with each, and without.

    python benchmarks/pages.py

Pages of 2 MB: THP_MEM_ALLOC_ENABLE=1, as launch sets it, against 0, both without kept memory. Kept:
the memory of freed tensors, as init() keeps it (pyg_sar/store/pager.py), against giving it back.
One worker and several, the models and the graph of benchmarks/wire.py; the settings take turns.
Printed only: what a system makes of them (/sys/kernel/mm/transparent_hugepage/enabled) is its own
affair.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from wire import MODELS, power_law_graph, train

import pyg_sar
from pyg_sar.store.pager import keep_freed


def measure(keep: bool, *arguments: Any) -> Any:
    keep_freed(keep)
    return train(*arguments)


def epoch_time(
    root: Path, workers: int, name: str, epochs: int, pages: str, keep: bool = False
) -> float:
    """Median seconds of an epoch."""
    environment = {"THP_MEM_ALLOC_ENABLE": pages}
    found = pyg_sar.launch(measure, workers, keep, str(root), name, epochs, env=environment)
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
    print("| model | workers | epoch, pages of 2 MB / of 4 KB | epoch, kept / given back |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for workers in arguments.workers:
            root = Path(folder) / f"parts{workers}"
            pyg_sar.write_partitions(data, workers, root)
            for name in arguments.models:
                ratios = []
                for _ in range(arguments.rounds):
                    small, large, kept = (
                        epoch_time(root, workers, name, arguments.epochs, pages, keep)
                        for pages, keep in (("0", False), ("1", False), ("1", True))
                    )
                    ratios.append((large / small, kept / large))
                pages, keeping = map(statistics.median, zip(*ratios, strict=True))
                print(f"| {name} | {workers} | {pages:.2f} | {keeping:.2f} |", flush=True)


if __name__ == "__main__":
    main()
