"""Counts the Python that one steady call of a layer runs: files, functions, calls.

.. code-block:: bash

    python benchmarks/calls.py            # 400 nodes, 2 workers; times beside PyG's
    python benchmarks/calls.py --starts 5 # seconds that starting 2 workers, or 2 parts, takes

Also the package's size. A steady call is a forward and a backward pass after two of its kind. Files
and functions are those of pyg_sar that the calling thread enters at rank 0. Times are the median of
many calls, in milliseconds, and PyG's on the same edges of one worker.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import pyg_sar
from pyg_sar.tools.graphs import load_graph

LAYERS = {
    "SAGE": lambda: SAGEConv(16, 16),
    "GCN": lambda: GCNConv(16, 16),
    "GAT": lambda: GATConv(16, 4, heads=4),
}


def entered(run: Any) -> Counter[tuple[str, int, str]]:
    """Calls of each function of the package that ``run`` makes on this thread."""
    found: Counter[tuple[str, int, str]] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions are frames of their own in Python 3.11; they are part of their function.
        if event == "call" and "/pyg_sar/" in code.co_filename and code.co_name[0] != "<":
            found[code.co_filename, code.co_firstlineno, code.co_qualname] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def steady_calls(root: str, name: str, timed: int) -> dict[str, Any]:
    """Calls of the forward and backward pass of a layer, and its times, at this worker."""
    torch.set_num_threads(1)
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    layers: Any = pyg_sar.distribute(torch.nn.ModuleList([LAYERS[name]()]))
    layer = layers[0]
    x = data.x[:, :16].clone().requires_grad_()
    out = layer(x, data.edge_index)
    gradient = torch.ones_like(out)
    for _ in range(2):
        layer(x, data.edge_index).backward(gradient)
    found = []
    for _ in range(3):  # Memory that others return is taken back in this call, or in the next.
        outs: list[torch.Tensor] = []
        forward = entered(lambda: outs.append(layer(x, data.edge_index)))  # noqa: B023
        backward = entered(lambda: outs[0].backward(gradient))  # noqa: B023
        found.append((forward, backward))
    forward, backward = min(found, key=lambda one: len(one[0] + one[1]))
    times: list[tuple[float, float]] = []
    for _ in range(timed):
        start = time.perf_counter()
        out = layer(x, data.edge_index)
        middle = time.perf_counter()
        out.backward(gradient)
        times.append((middle - start, time.perf_counter() - middle))
    return {"forward": forward, "backward": backward, "times": times}


def plain_times(name: str, timed: int) -> list[tuple[float, float]]:
    """PyG's own layer on one worker's share of such a graph."""
    torch.set_num_threads(1)
    graph = load_graph("synthetic:nodes=200,degree=10,features=16")
    layer = LAYERS[name]()
    x = graph.x.clone().requires_grad_()
    times = []
    for _ in range(timed + 2):
        start = time.perf_counter()
        out = layer(x, graph.edge_index)
        middle = time.perf_counter()
        out.sum().backward()
        times.append((middle - start, time.perf_counter() - middle))
    return times[2:]


def summary(found: dict[str, Any]) -> dict[str, int]:
    """Files, functions and calls of both passes."""
    both = found["forward"] + found["backward"]
    return {
        "files": len({file for file, _, _ in both}),
        "functions": len(both),
        "calls": sum(both.values()),
    }


def nothing() -> None:
    """Returns at once: a call of it takes what its start takes."""


def start_times(rounds: int) -> dict[str, list[float]]:
    """Seconds of each start, all imported: of two worker processes, of two parts in this one."""
    found: dict[str, list[float]] = {"launch(fn, 2)": [], "run(fn, parts=2)": []}
    for _ in range(rounds):
        for way, times in found.items():
            start = time.perf_counter()
            if way == "launch(fn, 2)":
                pyg_sar.launch(nothing, 2)
            else:
                pyg_sar.run(nothing, parts=2)
            times.append(time.perf_counter() - start)
    return found


CORE = ("engine/run.py", "engine/schedule.py", "exchange/rows.py", "exchange/halo_rows.py")


def size() -> tuple[int, int, int]:
    """Modules, lines, and lines of the loop, its schedules, row sources and row sinks."""
    package = Path(pyg_sar.__file__).parent
    lines = {file: len(file.read_text().splitlines()) for file in package.rglob("*.py")}
    modules = [file for file in lines if file.name != "__init__.py"]
    core = sum(lines[package / name] for name in CORE)
    return len(modules), sum(lines.values()), core


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--timed", type=int, default=200)
    parser.add_argument("--list", action="store_true", help="name every function")
    parser.add_argument("--starts", type=int, help="time so many starts of workers, no layers")
    args = parser.parse_args()
    if args.starts:
        for way, times in start_times(args.starts).items():
            print(f"{way}: {median(times):.2f} s ({min(times):.2f} to {max(times):.2f})")
        return
    print("{} modules, {:,} lines, {:,} of them the core".format(*size()))
    graph = load_graph("synthetic:nodes=400,degree=10,features=16")
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(graph, 2, root, overwrite=True)
        for name in LAYERS:
            found = pyg_sar.launch(steady_calls, 2, root, name, args.timed)[0]
            here, plain = found["times"], plain_times(name, args.timed)
            ms = [
                [1e3 * median(column) for column in zip(*rows, strict=True)]
                for rows in (here, plain)
            ]
            numbers = ", ".join(f"{n} {what}" for what, n in summary(found).items())
            print(
                f"{name}: {numbers}; forward {ms[0][0]:.2f} ms (PyG {ms[1][0]:.2f}), "
                f"backward {ms[0][1]:.2f} ms (PyG {ms[1][1]:.2f})"
            )
            if args.list:
                for phase in ("forward", "backward"):
                    for (file, line, function), count in found[phase].items():
                        place = file.split("/pyg_sar/")[-1] + f":{line}"
                        print(f"  {phase:8} {count:4} {place} {function}")


if __name__ == "__main__":
    main()
