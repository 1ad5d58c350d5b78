"""The tables of ``benchmarks/alternatives.py``: what is reached, when, and against what."""

from __future__ import annotations

import torch
from benchmark_scripts import benchmark
from torch_geometric.data import Data

MIB = 2**20


def a_run(curve, epoch, mib, losses=(1.0, 0.5)):
    """One training; the curve has epochs, seconds, validation and test."""
    return {"curve": curve, "epoch": epoch, "peak": mib * MIB, "losses": list(losses)}


def test_ways_are_compared_with_plain_pyg_of_the_same_seed():
    tables = benchmark("alternatives_report")
    found = {
        "plain PyG": [
            a_run([[5, 10.0, 80.0, 70.0], [10, 20.0, 90.0, 75.0]], 2.0, 100),
            a_run([[5, 5.0, 90.0, 71.0], [10, 10.0, 90.5, 76.0]], 1.0, 120),
        ],
        "sampled": [
            a_run([[1, 4.0, 89.5, 60.0], [2, 8.0, 88.0, 90.0]], 4.0, 30),
            a_run([[1, 4.0, 50.0, 60.0], [2, 8.0, 60.0, 61.0]], 4.0, 30),
        ],
        "exact": [a_run([], 1.0, 50), a_run([], 3.0, 40, losses=(1.0, 0.5 + 1e-3))],
        "refused": [{}, {}],
    }
    target, table = tables.compared(found)
    assert target == 0.99 * 90.25
    assert table["plain PyG"]["until"] == [10, 5] and table["plain PyG"]["time"] == [1, 1]
    # The test metric is that of the best validation; the second seed doesn't get there.
    assert table["sampled"]["test"] == [60.0, 61.0]
    assert table["sampled"]["until"] == [1] and table["sampled"]["time"] == [0.2]
    # What is exact takes plain PyG's epochs at its own pace.
    assert table["exact"]["until"] == [10, 5] and table["exact"]["time"] == [0.5, 3.0]
    graph = Data(x=torch.zeros(3, 2), edge_index=torch.zeros(2, 0), y=torch.tensor([0, 1, 2]))
    text = tables.report("a graph", graph, found)
    assert "| sampled | 60.5 ± 0.7 | 1 of 2 | 1 | 0.20 (0.20 to 0.20) |" in text
    assert "| exact | as plain | 2 of 2 |" in text and "| 50 | 0.42 | 1e-03 |" in text
    assert "| refused | - |" in text
