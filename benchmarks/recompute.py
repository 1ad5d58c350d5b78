"""What lies between layers: kept in the store, as bits, or computed again in the backward pass?

    python benchmarks/recompute.py --out recompute.md

Three layers of 256 with BatchNorm, ReLU and dropout; 8 parts on one worker, with a quarter of the
memory that they take without a limit. ReLU and dropout save whole tensors, as in PyTorch, or bits,
as pyg_sar has them; or, written into the model by ``torch.utils.checkpoint``, ReLU and dropout are
computed again. Fresh processes, alternately; medians over the rounds. The processor's time of an
epoch, all threads, hardly depends on what else the host does. Saving bytes pays without doubt where
the store moves less than ``break-even``, the bytes saved by the seconds of processor added; above
it only as far as the store's time is not hidden behind computing, and most is. ``--rate`` limits
the store's disk, to see how it is on slower ones.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from command_line import command
from pager import PlainFile, seconds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import BatchNorm, GATConv, SAGEConv
from tqdm import tqdm

import pyg_sar
from pyg_sar.comm.communicator import LocalCommunicator
from pyg_sar.comm.host import Host, Hosting
from pyg_sar.comm.hosting import host_parts
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

WIDTH, CLASSES, PARTS, MB = 256, 8, 8, 1 << 20
WAYS = {
    "whole": "nothing, whole tensors",
    "bits": "nothing, bits",
    "pointwise": "ReLU, dropout",
}
CPU = torch.device("cpu")


class Net(nn.Module):
    """Three layers; what lies between them is kept or computed again."""

    def __init__(self, kind: str, features: int, dropout: float, way: str) -> None:
        super().__init__()
        self.dropout, self.way = dropout, way
        sizes = ((features, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES))
        self.convs = nn.ModuleList(
            SAGEConv(a, b) if kind == "sage" or b == CLASSES else GATConv(a, b // 4, 4)
            for a, b in sizes
        )
        self.norms = nn.ModuleList(BatchNorm(WIDTH) for _ in sizes[1:])

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self._update(conv(x, edge_index), norm)
        out: Tensor = self.convs[-1](x, edge_index)
        return out

    def _update(self, x: Tensor, norm: BatchNorm) -> Tensor:
        def end(x: Tensor) -> Tensor:
            return F.dropout(x.relu(), self.dropout)

        if self.way in ("whole", "bits"):
            return end(norm(x))
        return checkpoint(end, norm(x), use_reentrant=False)


def measure(root: str, kind: str, dropout: float, way: str, epochs: int) -> tuple[Any, ...]:
    """A part's: bytes at its start and at most; bytes read and written; times; the last loss."""
    comm: Any = pyg_sar.comm.current()
    start = reset_peak_memory(CPU) if comm.rank == 0 else 0
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(Net(kind, data.num_features, dropout, way))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marks, loss = [], torch.zeros(())
    for _ in range(epochs + 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
        loss.backward()
        optimizer.step()
        found = {} if comm.host.store is None else comm.host.store.counters()
        moved = found.get("bytes_read", 0), found.get("bytes_written", 0)
        marks.append((time.perf_counter(), time.process_time(), *moved))
    each = [(b - a) / epochs for a, b in zip(marks[0], marks[-1], strict=True)]
    return start, peak_memory(CPU), each, loss.item()


def hosted(hosting: Hosting, bits: bool, *given: Any) -> list[Any]:
    """All parts' results in this process, where ReLU and dropout save bits, or tensors."""
    if not bits:
        Host.saving = lambda _: nullcontext()  # type: ignore[assignment,method-assign]
    return host_parts(measure, given, hosting, LocalCommunicator(CPU))


def row(root: str, args: argparse.Namespace, kind: str, way: str, limit: int | None) -> Any:
    """Trains in a fresh process: the peak; seconds, processor's seconds, bytes; the loss."""
    store = None if limit is None else str(args.store)
    given = Hosting(PARTS, limit, store), way == "bits", root, kind, args.dropout, way, args.epochs
    found = pyg_sar.launch(hosted, 1, *given, threads_per_worker=1)[0]
    return max(most for _, most, *_ in found) - found[0][0], *found[-1][2:]


@contextmanager
def disk_of(folder: Path, rate: int | None) -> Iterator[None]:
    """Limits this process and those that it starts to ``rate`` MB/s each way, by a cgroup (v1)."""
    if rate is None:
        yield
        return
    device = os.stat(folder).st_dev
    group = Path(f"/sys/fs/cgroup/blkio/pyg_sar_benchmark_{os.getpid()}")
    group.mkdir()
    try:
        for way in ("read", "write"):
            limit = f"{os.major(device)}:{os.minor(device)} {rate * 1_000_000}"
            (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def store_rates(folder: Path) -> tuple[float, float]:
    """Bytes per second of plain writes and reads past the page cache."""
    plain, size = PlainFile(folder / "plain", 16 * MB, 32), 512 * MB
    plain.write()
    times = [(seconds(plain.write), seconds(plain.read)) for _ in range(3)]
    os.close(plain.file)
    write, read = (median(each) for each in zip(*times, strict=True))
    return size / write, size / read


HEAD = (
    *("model", "computed again", "MB in", "MB out", "s of processor", "s in all", "MB saved"),
    *("s of processor added", "break-even MB/s"),
)


def table(root: str, args: argparse.Namespace) -> list[str]:
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for kind in args.models:
        free, _, exact = row(root, args, kind, "whole", None)
        found: dict[str, list[list[float]]] = {way: [] for way in args.ways}
        for _ in tqdm(range(args.rounds), desc=kind):
            for way, each in found.items():
                _, numbers, loss = row(root, args, kind, way, free // 4)
                # Normalisation by another module rounds otherwise.
                if loss != exact:
                    raise SystemExit(f"{kind}, {way}: a loss of {loss}, {exact} without a limit")
                each.append(numbers)
        mid = {way: [median(v) for v in zip(*each, strict=True)] for way, each in found.items()}
        _, work, *moved = mid["whole"]
        for way, (took, used, read, written) in mid.items():
            saved, added = (sum(moved) - read - written) / 1e6, used - work
            cells = [kind, WAYS[way], f"{read / 1e6:.0f}", f"{written / 1e6:.0f}", f"{used:.2f}"]
            cells += [f"{took:.2f}"]
            if way == "whole":
                cells += [""] * 3
            else:
                limit = f"{saved / added:.0f}" if added > 0 else "any"
                cells += [f"{saved:.0f}", f"{added:.2f}", limit if saved > 0 else "never"]
            lines.append("| " + " | ".join(cells) + " |")
            tqdm.write(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--edges", type=int, default=400_000)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--models", nargs="+", default=["sage", "gat"], choices=["sage", "gat"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", type=int, help="MB/s of the store's disk at most; needs root")
    parser.add_argument("--store", type=Path, default=Path.cwd())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        kind = SyntheticGraph(nodes=args.nodes, edges=args.edges, features=64, classes=CLASSES)
        pyg_sar.write_partitions(synthetic_graph(kind), PARTS, f"{folder}/parts")
        with disk_of(Path(folder), args.rate):
            rows = table(f"{folder}/parts", args)
            write, read = store_rates(Path(folder))
    text = "\n".join(
        [
            "# Kept, as bits, or computed again",
            "",
            f"{date.today()}, `{command(args)}`, {os.cpu_count()} cores, one thread per worker, "
            f"torch {torch.__version__}. Power-law graph of {args.nodes:,} nodes and "
            f"{args.edges:,} edges. {PARTS} parts on one worker, a quarter of the memory. Per "
            f"epoch. Plain writes to the store: {write / 1e6:.0f} MB/s, reads {read / 1e6:.0f} "
            f"MB/s. Load at the start and at the end: {load:.1f} and {os.getloadavg()[0]:.1f}.",
            "",
            *rows,
            "",
        ]
    )
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
