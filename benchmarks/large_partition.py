"""A graph made in pieces and partitioned within a limit of memory: time by stage, and the peak.

    python benchmarks/large_partition.py --nodes 20_000_000 --edges 200_000_000 --parts 64

Degree-corrected planted partition model (see ``tools/graph_sources.py``) with groups of 2,000 nodes
under scattered ids; each piece of edges is drawn by itself, so that duplicates stay. Then ``pyg-sar
partition`` runs in a cgroup that holds ``--limit`` bytes, its page cache included, where one can be
made: beyond it the system would kill it. Its anonymous memory (``RssAnon``) is read all the while.

    python benchmarks/large_partition.py --nodes 500_000 --edges 10_000_000 --features 64 \
        --parts 8 --in-memory metis balanced coarsened

Without a limit, the graph in memory: the processor's time of ``write_partitions``, of METIS alone
with the adjacency it needs, and the most memory beyond the graph, over the graph's size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from larger_than_memory import CPU, memory_group
from tqdm import tqdm

from pyg_sar.files import parse_bytes
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.partition.balance import metis, undirected_csr
from pyg_sar.partition.storage import write_partitions
from pyg_sar.tools import load_graph

GROUP, NEAR, EXPONENT = 2_000, 0.7, 2.5
PIECE = 2_000_000  # edges, or values, drawn at a time
ALONE = "METIS alone, with its adjacency"


def make(folder: Path, nodes: int, edges: int, features: int, both: bool = False) -> None:
    """Writes the arrays of a graph folder; node i of the model has id (a i) mod nodes.

    Args:
        both: Whether the second half of the edges is the first half in the other direction.
    """
    draw, step = np.random.default_rng(0), 7_368_787  # a prime
    folder.mkdir()
    ends = np.maximum(1 - draw.random(nodes), 1 / nodes) ** (-1 / (EXPONENT - 1))
    weight = np.concatenate([[0.0], ends.cumsum()])

    def rows(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)

    def drawn(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        wanted = weight[low] + draw.random(low.size) * (weight[high] - weight[low])
        return np.clip(np.searchsorted(weight, wanted, side="right") - 1, low, high - 1)

    edge_index = rows("edge_index", (2, edges), np.int64)
    drawn_edges = edges // 2 if both else edges
    for first in tqdm(range(0, drawn_edges, PIECE), desc="edges"):
        count = min(PIECE, drawn_edges - first)
        everywhere = np.zeros(count, np.int64)
        source = drawn(everywhere, everywhere + nodes)
        near = draw.random(count) < NEAR
        low = np.where(near, source // GROUP * GROUP, 0)
        target = drawn(low, np.where(near, np.minimum(low + GROUP, nodes), nodes))
        ids = np.stack([source, target]) * step % nodes
        edge_index[:, first : first + count] = ids
        if both:
            edge_index[:, drawn_edges + first : drawn_edges + first + count] = ids[::-1]
    x = rows("x", (nodes, features), np.float32)
    y, mask = rows("y", (nodes,), np.int64), rows("train_mask", (nodes,), np.bool_)
    for first in range(0, nodes, PIECE // features):
        some = slice(first, min(first + PIECE // features, nodes))
        x[some] = draw.standard_normal(x[some].shape, np.float32)
        y[some] = draw.integers(8, size=some.stop - some.start)
        mask[some] = draw.random(some.stop - some.start) < 0.1


def partition(graph: Path, out: Path, parts: int, memory: str, limit: int) -> None:
    """Runs the command, and prints its lines with times, and its peak."""
    size = sum(file.stat().st_size for file in graph.iterdir())
    command = [sys.executable, "-m", "pyg_sar", "partition", str(graph), "--parts", str(parts)]
    command += ["--out", str(out), "--memory", memory]
    with memory_group(limit) as group:
        start, most, disk = time.perf_counter(), 0, 0
        free = shutil.disk_usage(out.parent).free

        def join() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=join
        )

        def watch() -> None:
            nonlocal most, disk
            while run.poll() is None:
                status = Path(f"/proc/{run.pid}/status").read_text()
                found = [line for line in status.splitlines() if line.startswith("RssAnon")]
                most = max(most, int(found[0].split()[1]) * 1024 if found else 0)
                disk = max(disk, free - shutil.disk_usage(out.parent).free)
                time.sleep(0.1)

        thread = threading.Thread(target=watch)
        thread.start()
        for line in run.stdout or ():
            print(f"{time.perf_counter() - start:8.1f} s  {line.rstrip()}", flush=True)
        code = run.wait()
        thread.join()
        print(f"cgroup: {'none' if group is None else f'{limit:,} bytes'}, exit code {code}")
    seconds = time.perf_counter() - start
    print(
        f"graph {size / 1e9:.2f} GB, {seconds:.0f} s, at most {most / 1e9:.2f} GB that can't be "
        f"given back, {disk / 1e9:.1f} GB of disk"
    )
    if code:
        raise SystemExit(code)


def compare(graph: Path, out: Path, parts: int, method: str) -> None:
    """Prints time and memory of a method; runs in a process of its own."""
    data = load_graph(str(graph))
    for name, value in data.to_dict().items():
        if torch.is_tensor(value):
            data[name] = value.clone()
    size = sum(value.nbytes for value in data.to_dict().values() if torch.is_tensor(value))
    torch.set_num_threads(1)
    begin, start = time.process_time(), reset_peak_memory(CPU)
    if method == ALONE:
        metis(undirected_csr(data.edge_index, data.num_nodes), parts, 0)
    else:
        write_partitions(data, parts, out, method)
    seconds, beyond = time.process_time() - begin, peak_memory(CPU) - start
    print(
        f"{method}: {seconds:.1f} s, {beyond / 1e6:.0f} MB beyond the graph of {size / 1e6:.0f} MB "
        f"({beyond / size:.2f} times)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--both", action="store_true", help="each edge in both directions")
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--memory", default="3GiB", help="of pyg-sar partition")
    parser.add_argument("--limit", default="4GB", help="of the cgroup")
    parser.add_argument("--in-memory", nargs="+", metavar="METHOD", help="compare, without a limit")
    parser.add_argument("--folder", help="where the files go for the time")
    parser.add_argument("--keep", metavar="DIR", help="make DIR/graph and DIR/parts, which stay")
    args = parser.parse_args()
    if args.both and args.edges % 2:
        parser.error(f"--both needs an even number of --edges, which is {args.edges:,}")
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = args.keep or temporary
        Path(folder).mkdir(exist_ok=True)
        graph = Path(folder) / "graph"
        make(graph, args.nodes, args.edges, args.features, args.both)
        if args.in_memory:
            for method in (ALONE, *args.in_memory):
                given = graph, Path(folder) / method, args.parts, method
                process = multiprocessing.get_context("spawn").Process(target=compare, args=given)
                process.start()
                process.join()
            return
        limit = parse_bytes(args.limit, "--limit")
        partition(graph, Path(folder) / "parts", args.parts, args.memory, limit)


if __name__ == "__main__":
    main()
