"""Transfers beside computation on one GPU, as PyTorch's profiler sees an epoch of one worker.

    python benchmarks/gpu_overlap.py --out gpu_overlap.svg

Two workers share the GPU; gloo carries their rows, through pinned memory of the host. A SAGE of
three layers trains; printed are milliseconds of an epoch: with kernels, with copies between host
and device, and with both at once. The picture shows both over time, for each way to prefetch.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch_geometric.nn import GraphSAGE

import pyg_sar
from pyg_sar.comm import current
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

Spans = list[tuple[float, float]]  # Beginnings and ends, ms.


def spans(trace: Path, category: str) -> Spans:
    """What a trace has of a category, without what overlaps of it."""
    events = json.loads(trace.read_text())["traceEvents"]
    times = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == category]
    found: Spans = []
    for begin, end in sorted((a / 1e3, b / 1e3) for a, b in times):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def both(first: Spans, second: Spans) -> float:
    """Milliseconds in which both go on."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in first for c, d in second)


def measured(root: str, prefetch: Literal[0, 1], epochs: int, device: str) -> dict[str, Any]:
    pyg_sar.comm.finalize()
    comm = pyg_sar.init("gloo", device=device)
    data: Any = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 256, 3, 47)
    model = pyg_sar.distribute(model, pyg_sar.SARPolicy(prefetch=prefetch))
    optimizer = torch.optim.Adam(model.parameters())

    def epoch() -> float:
        current().barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        return 1e3 * (time.perf_counter() - start)

    seconds = min(epoch() for _ in range(epochs))
    trace = Path(root, f"trace{comm.rank}.json")
    with profile() as seen:
        epoch()
    seen.export_chrome_trace(str(trace))
    return {"epoch": seconds, **{kind: spans(trace, kind) for kind in ("kernel", "gpu_memcpy")}}


def picture(path: Path, found: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 1.3 * len(found)), layout="constrained")
    for axes, one, prefetch in zip(figure.subplots(len(found)), found, (0, 1), strict=True):
        first = min((a for kind in ("kernel", "gpu_memcpy") for a, _ in one[kind]), default=0.0)
        for row, kind in enumerate(("gpu_memcpy", "kernel")):
            bars = [(a - first, b - a) for a, b in one[kind]]
            axes.broken_barh(bars, (row, 0.8), color=f"C{row}")
        axes.set_yticks([0.4, 1.4], ["copies", "kernels"])
        axes.set_xlabel(f"ms of an epoch, prefetch={prefetch}")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=3_000_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="picture to write: .svg or .png")
    args = parser.parse_args()
    data = synthetic_graph(SyntheticGraph(nodes=args.nodes, edges=args.edges, features=100))
    print("| prefetch | epoch, ms | kernels | copies | both |\n|---|---|---|---|---|")
    found = []
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(data, 2, root, "random")
        for prefetch in (0, 1):
            one = pyg_sar.launch(measured, 2, root, prefetch, args.epochs, args.device)[0]
            found.append(one)
            kernels, copies = one["kernel"], one["gpu_memcpy"]
            times = [sum(b - a for a, b in kind) for kind in (kernels, copies)]
            columns = [one["epoch"], *times, both(kernels, copies)]
            print(f"| {prefetch} | {' | '.join(f'{t:.1f}' for t in columns)} |", flush=True)
    if args.out:
        picture(args.out, found)


if __name__ == "__main__":
    main()
