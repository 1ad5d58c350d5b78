"""Seconds and balance of ``geometric``: ``python benchmarks/geometric.py --nodes N --parts P``."""

from __future__ import annotations

import argparse
import time

import torch

from pyg_sar.partition.geometric import geometric_assignment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=8)
    given = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    pos = torch.rand(given.nodes, 3, generator=draw)
    weight = torch.randint(1, 10, (given.nodes,), generator=draw)
    start = time.perf_counter()
    part = geometric_assignment(pos, weight, given.parts)
    seconds = time.perf_counter() - start
    held = torch.bincount(part, weight.double(), given.parts)
    print(f"{given.nodes:,} nodes, {given.parts} parts: {seconds:.2f} s")
    print(f"the largest part has {float(held.max() / held.mean()):.4f} times the mean weight")


if __name__ == "__main__":
    main()
