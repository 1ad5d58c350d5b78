"""Compares two checkouts of the package: epochs, time of processors, memory and bytes, in turns.

.. code-block:: bash

    git worktree add ../before COMMIT          # and build its kernels there
    python benchmarks/versions.py ../before --out versions.md

Both train GraphSAGE and GAT on the same graph and the same random partition, with workers that read
each other's memory ("one host") and that don't ("network"); the order changes from turn to turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command_line import command
from torch_geometric.nn import GAT, GraphSAGE
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parent.parent
POLICIES: dict[str, dict[str, Any]] = {"mode 1": {}, "mode 2": {"mode": 2}}
Found = dict[str, list[float]]  # seconds, of processors, MiB, MB by model and policy


def train(root: str, name: str, policy: dict[str, Any], epochs: int) -> tuple[float, ...]:
    """The fastest epoch, the least time of the processor, the peak of resident memory, bytes."""
    import pyg_sar

    # Where node tensors were each worker's own rows, losses were averaged by the package.
    mean = getattr(pyg_sar, "mean", torch.mean)

    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    width = data.num_features
    model = GraphSAGE(width, 256, 3, 40) if name == "SAGE" else GAT(width, 128, 3, 40, heads=4)
    model = pyg_sar.distribute(model, pyg_sar.SARPolicy(**policy))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    comm, times, busy, received = pyg_sar.comm.current(), [], [], 0
    for _ in range(epochs + 1):
        comm.barrier()
        with pyg_sar.Ledger(comm) as ledger:
            start, processor = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)
            mean(F.cross_entropy(out, data.y, reduction="none")).backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
            busy.append(time.process_time() - processor)
        received = ledger.received
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return min(times[1:]), min(busy[1:]), peak, received / 1e6


def measure(workers: int, epochs: int, nodes: int) -> Found:
    """Trains by the package that this process imports."""
    import pyg_sar
    from pyg_sar.tools.graphs import load_graph

    found: Found = {}
    graph = load_graph(f"synthetic:nodes={nodes},degree=40,features=100,classes=40")
    part = torch.randint(workers, (nodes,), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.write_partitions(graph, workers, f"{folder}/parts", part)
        del graph
        for model in ("SAGE", "GAT"):
            for name, policy in POLICIES.items():
                given = f"{folder}/parts", model, policy, epochs
                each = pyg_sar.launch(train, workers, *given, threads_per_worker=1)
                seconds, busy, peaks, received = zip(*each, strict=True)
                found[f"{model}, {name}"] = [max(seconds), sum(busy), max(peaks), sum(received)]
    return found


def run(checkout: Path, shared: str, args: argparse.Namespace) -> Found:
    """Measures one checkout in a process of its own."""
    numbers = [str(n) for n in (args.workers, args.epochs, args.nodes)]
    command = [sys.executable, str(Path(__file__).resolve()), str(checkout), "--inside", *numbers]
    setting = {"PYTHONPATH": str(checkout), "PYG_SAR_SHARED_MEMORY": shared}
    done = subprocess.run(
        command, env={**os.environ, **setting}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{checkout} failed:\n{done.stderr}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def table(before: list[Found], after: list[Found]) -> list[str]:
    """One line per model and policy; ratios of the best turns."""
    lines = [
        "| | epoch, s | ratio | processors, s | ratio | peak, MiB | ratio | MB received | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in before[0]:
        cells = [name]
        for k, digits in ((0, 3), (1, 3), (2, 0), (3, 0)):
            old, new = (min(turn[name][k] for turn in turns) for turns in (before, after))
            cells += [f"{old:.{digits}f} to {new:.{digits}f}", f"{new / max(old, 1e-9):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout, its kernels built")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--inside", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(measure(*args.inside)))
        return
    commit = subprocess.run(
        ["git", "-C", args.before, "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    load, lines = os.getloadavg()[0], []
    for title, shared in (("One host", "1"), ("Network", "0")):
        turns: dict[Path, list[Found]] = {args.before: [], REPOSITORY: []}
        for turn in tqdm(range(args.turns), desc=title):
            for checkout in list(turns)[:: 1 if turn % 2 == 0 else -1]:
                turns[checkout].append(run(checkout, shared, args))
        lines += [f"## {title}", "", *table(turns[args.before], turns[REPOSITORY])]
    head = [
        f"# This version beside commit {commit}",
        "",
        f"{date.today()}, `{command(args).replace('.py', '.py BEFORE')}`, {args.workers} "
        f"workers with one thread each, {args.nodes:,} nodes, {20 * args.nodes:,} undirected "
        f"edges, 100 features, 3 layers, random parts, {os.cpu_count()} cores, "
        f"{platform.machine()}, torch "
        f"{torch.__version__}. Load at the start and at the end: {load:.1f} and "
        f"{os.getloadavg()[0]:.1f}. Before and after, and after over before.",
        "",
    ]
    text = "\n".join([*head, *lines])
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
