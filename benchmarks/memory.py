"""Peak memory per worker against 1/W and what is expected: modes 1, 2, 3, SAGE and GAT.

    python benchmarks/memory.py --out memory.md --plot memory.png

Full-batch training of a 3-layer GraphSAGE (256) and GAT (4 heads of 32) on a power-law graph, METIS
and random parts. Each number of workers, model and kind of parts starts fresh processes, in which
the modes follow one another, mode 1 first. Before each one a pass over a tiny graph loads libraries
and starts threads, and memory that is kept for use again is given back; then the baseline is taken,
the partition is loaded, and the higher peak of two epochs counts (``VmHWM``, bytes over the
baseline), of the worker whose ratio to the expected memory is highest.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric
from command_line import command
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GraphSAGE
from tqdm import tqdm

import pyg_sar
from pyg_sar.store.pager import keep_freed
from pyg_sar.tensors import NodeTensor
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

CLASSES, HEADS = 8, 4
MODELS: dict[str, Callable[[int], torch.nn.Module]] = {
    "sage": lambda features: GraphSAGE(features, 256, 3, CLASSES),
    "gat": lambda features: GAT(features, 128, 3, CLASSES, heads=HEADS),
}
POLICIES = {
    "1, prefetch 0": pyg_sar.SARPolicy(prefetch=0),
    "1, prefetch 1": pyg_sar.SARPolicy(prefetch=1),
    "2": pyg_sar.SARPolicy(mode=2),
    "3": pyg_sar.SARPolicy(mode=3),
}
HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system


# The law #####################################################################


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the law needs to know of a worker's part.

    Attributes:
        nodes: Own nodes.
        edges: Edges into them.
        halo: Remote nodes that they need.
        shard: The most of these that come at a time.
        stored: Bytes of its tensors.
    """

    nodes: int
    edges: int
    halo: int
    shard: int
    stored: int

    @classmethod
    def of(cls, data: Data) -> Part:
        edges, tensors = data.edge_index.to_local(), data.to_dict().values()
        plan, own = edges.plan, [t.to_local() for t in tensors if isinstance(t, NodeTensor)]
        stored = sum(t.numel() * t.element_size() for t in own)
        return cls(
            nodes=plan.num_local,
            edges=edges.size(1),
            halo=plan.num_halo,
            shard=max(plan.halo_counts),
            stored=stored + 4 * sum(plan.send_counts),
        )


def law(part: Part, kind: str, features: int, mode: int, prefetch: int) -> int:
    """Bytes that a worker needs at its peak: the largest of all layers' passes."""
    shards = min(1 + prefetch, max(-(-part.halo // max(part.shard, 1)), 1)) * part.shard
    find = _sage if kind == "sage" else _gat
    return part.stored + find(part, features, mode, shards)


def _sage(part: Part, features: int, mode: int, shards: int) -> int:
    """Kept: each layer's input and mean. The gradients: of the mean, and of the input, twice.

    The gradient needs no source rows (case 1), so that mode 2 is mode 1, and rows are resident
    either as sources or as gradients of targets.
    """
    widths = [features, 256, 256]
    peak = kept = 0
    for k, width in enumerate(widths):
        own = part.nodes * width
        remote = shards * width
        if mode == 3:  # and every message; the means' gradients, too, are read edge by edge
            remote = (part.nodes + part.halo + part.edges) * width
        kept += own * (k > 0)
        forward = kept + own + remote
        backward = kept + (3 * own + remote) * (k > 0)
        kept += own
        peak = max(peak, forward, backward)
    return 8 * part.edges + 4 * peak


def _gat(part: Part, features: int, mode: int, shards: int) -> int:
    """Kept: each layer's values, output and activation, and four numbers per head.

    In the backward pass the output makes room for the values' gradient. In mode 1 as many rows of
    targets, with four numbers per head, are resident there as rows of sources before; mode 2 keeps
    the halo's rows instead of a shard's, and gradients of a shard's rows are resident beside them.
    Self loops make an edge list of their own.
    """
    nodes, edges = part.nodes, part.edges + part.nodes
    widths = [HEADS * 32, HEADS * 32, HEADS * CLASSES]
    peak = kept = 0
    for width in widths:
        row, own = width + HEADS, nodes * (2 * width + 4 * HEADS)
        rows = {1: shards * row, 2: part.halo * row, 3: (nodes + part.halo) * row}[mode]
        messages = edges * row if mode == 3 else 0
        slots = shards * (width + 4 * HEADS)
        remote = {1: slots, 2: rows + shards * row, 3: 2 * rows}[mode]
        forward = kept + own + rows + messages
        backward = kept + own + nodes * width + remote + 2 * messages
        kept += own + nodes * width + (mode == 2) * part.halo * row + messages
        activation = kept + 2 * nodes * width  # and its backward pass, that of a layer's output
        peak = max(peak, forward, backward, activation)
    lists = 16 * edges + 8 * edges
    return lists + 4 * peak


# What is measured ############################################################


def epoch(model: torch.nn.Module, data: Data) -> None:
    model.zero_grad()
    F.cross_entropy(model(data.x, data.edge_index), data.y).backward()


def train(root: str, kind: str, policy: pyg_sar.SARPolicy) -> Data:
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(MODELS[kind](data.x.size(1)), policy)
    epoch(model, data)
    epoch(model, data)
    return data


def give_back() -> None:
    """Memory that this process keeps for use again goes back to the system."""
    comm = pyg_sar.comm.current()
    comm.barrier()
    gc.collect()
    keep_freed(False)  # What was kept goes back; from here on it is kept as before.
    keep_freed(comm.device.type == "cpu")
    if comm.sharing is not None:
        comm.sharing.trim()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    comm.barrier()


def measure(
    root: str, tiny: str, kind: str, policies: Sequence[pyg_sar.SARPolicy]
) -> list[tuple[int, int, int]]:
    """Bytes at the peak, bytes of the law and remote rows at the peak, by policy."""
    comm, found = pyg_sar.comm.current(), []
    for policy in policies:
        train(tiny, kind, policy)
        give_back()
        with pyg_sar.Ledger(comm) as ledger:
            data = train(root, kind, policy)
        allowed = law(Part.of(data), kind, data.x.size(1), policy.mode, policy.prefetch)
        peak = ledger.peak_memory - ledger.baseline_memory
        found.append((peak, allowed, ledger.peak_resident_rows()))
        del data
    return found


Case = tuple[str, str, str]
"""Model, kind of parts, mode."""


@dataclass(frozen=True)
class Measured:
    """The worker that needs most, of what the law allows it.

    Attributes:
        peak: Bytes.
        law: Bytes.
        rows: Remote rows resident at most.
    """

    peak: int
    law: int
    rows: int


Found = dict[Case, dict[int, Measured]]


def run(args: argparse.Namespace, folder: Path) -> Iterator[Found]:
    """The measurements so far, by case and number of workers."""
    kind = SyntheticGraph(
        nodes=args.nodes, edges=args.edges, features=args.features, classes=CLASSES
    )
    graph = synthetic_graph(kind)
    small = synthetic_graph(SyntheticGraph(nodes=400, degree=5, features=args.features))
    found: Found = {}
    steps = [(w, p, m) for w in args.workers for p in args.partition for m in args.models]
    for workers, parts, model in tqdm(steps, desc="memory"):
        root, tiny = folder / f"{parts}{workers}", folder / f"tiny{workers}"
        if not root.exists():
            pyg_sar.write_partitions(graph, workers, root, parts)
        if not tiny.exists():
            pyg_sar.write_partitions(small, workers, tiny, "random")
        given = str(root), str(tiny), model, list(POLICIES.values())
        everyone = pyg_sar.launch(measure, workers, *given, threads_per_worker=1, env=HEAP)
        for mode, per_worker in zip(POLICIES, zip(*everyone, strict=True), strict=True):
            worst = Measured(*max(per_worker, key=lambda worker: worker[0] / worker[1]))
            found.setdefault((model, parts, mode), {})[workers] = worst
            tqdm.write(f"{model}, {parts}, {mode}, {workers}: {worst}")
        yield found


# What is shown ###############################################################


def table(found: Found, workers: Sequence[int]) -> list[str]:
    """Peaks in MiB and over the law."""
    head = ["model", "parts", "mode", *(f"W={w}" for w in workers)]
    lines = [
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    for (model, parts, mode), by_workers in found.items():
        cells = [
            f"{m.peak / 2**20:.0f} ({m.peak / m.law:.2f})" if m else ""
            for m in (by_workers.get(w) for w in workers)
        ]
        lines.append("| " + " | ".join([model, parts, mode, *cells]) + " |")
    return lines


def plot(found: Found, path: Path) -> None:
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((model, parts) for model, parts, _ in found))
    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        for (model, parts, mode), by_workers in found.items():
            if (model, parts) != panel:
                continue
            counts = sorted(by_workers)
            peaks = [by_workers[w].peak / 2**20 for w in counts]
            number = list(POLICIES).index(mode)
            # Markers of lines below are larger, so that equal peaks are seen.
            style = {"color": f"C{number}", "marker": "osD^"[number], "markersize": 12 - 3 * number}
            axes.plot(counts, peaks, label=f"mode {mode}", **style)
            laws = [by_workers[w].law / 2**20 for w in counts]
            if mode == "1, prefetch 1":
                axes.plot(counts, laws, color="C4", linestyle=":", label="expected")
                ideal = [peaks[0] * counts[0] / w for w in counts]
                axes.plot(counts, ideal, color="black", linestyle="--", label="1/W")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{panel[0]}, {panel[1]} parts")
        axes.set_xlabel("workers W")
        axes.set_ylabel("peak memory per worker (MiB)")
        axes.set_xticks(counts, [str(w) for w in counts])
    lines = all_axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=7)
    figure.savefig(path, dpi=110)


LAW = """\
Each entry: MiB that a worker's resident set grows by, from before it loads its part to the peak of
two epochs, and in brackets that divided by the expected memory, for the worker whose ratio is
highest. Expected (`law` in `benchmarks/memory.py`) are: its part as stored; 8 bytes per edge
for its edges by target and by source (GAT: and the list that self loops make); what the layers keep
for each own node (SAGE: each layer's input and mean; GAT: values, output, activation, four numbers
per head); the gradients of the layer at hand; and the remote rows that the mode allows. In mode 1
these are one shard of the largest size, or two with a prefetched one: of sources in the forward
pass, of targets in the backward pass. Mode 2 keeps the halo's rows of each GAT layer, and holds
gradients on their way back, mode 3 the halo and every message. Not expected are
own rows as local peers read them in shared memory and what they have not read, temporary tensors
(of all messages in mode 3), and a few megabytes of libraries that don't shrink with the part."""


def document(args: argparse.Namespace, found: Found, load: float) -> str:
    lines = [
        "# Peak memory per worker",
        "",
        f"{date.today()}, `{command(args)}`, {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__}, torch-geometric {torch_geometric.__version__}. Power-law graph "
        f"(`pyg_sar.tools.synthetic_graph`) of {args.nodes:,} nodes, {args.edges:,} edges and "
        f"{args.features} "
        "features; three layers, SAGE of 256 channels, GAT of 4 heads of 32; workers of one host, "
        f"one thread each. Load at the start and at the end: {load:.1f} and "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        " ".join(LAW.split("\n")),
        "",
        *table(found, args.workers),
        "",
    ]
    if args.plot:
        lines += [f"![Peaks]({args.plot.name})", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--partition",
        nargs="+",
        choices=["balanced", "metis", "random"],
        default=["metis", "random"],
    )
    parser.add_argument("--out", type=Path, help="write the table here as Markdown")
    parser.add_argument("--plot", type=Path, help="a picture of the peaks")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for found in run(args, Path(folder)):
            if args.plot:
                plot(found, args.plot)
            text = document(args, found, load)
            if args.out:
                args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
