"""The pager against the disk and against PyTorch's own allocator.

    python benchmarks/pager.py --directory /scratch --out pager.md

Moves tensors of one size out, and in as others go (read ahead, and on demand), as a ratio of the
rate of plain reads and writes of the same pieces past the page cache, alternately in one process;
medians over the rounds. Then an allocation, with and without filling it, as a multiple of the
usual one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
from command_line import command

from pyg_sar.store import Pager

MB = 1 << 20


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class PlainFile:
    """A file that is written and read past the page cache, piece by piece.

    Each piece is in memory of its own: one for all would stay in the processor's cache.
    """

    def __init__(self, path: Path, piece: int, pieces: int) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self.file, 0, piece * pieces)
        self.pieces = [(piece * i, mmap.mmap(-1, piece)) for i in range(pieces)]
        for _, memory in self.pieces:
            memory.write(b"x" * piece)

    def write(self) -> None:
        for place, memory in self.pieces:
            assert os.pwrite(self.file, memory, place) == len(memory)

    def read(self) -> None:
        for place, memory in self.pieces:
            assert os.preadv(self.file, [memory], place) == len(memory)


MOVES = {"out": "write", "prefetch": "read", "demand": "read"}


def moves(directory: Path, total: int, piece: int, rounds: int, io_threads: int) -> list[str]:
    """Rates of the disk, and the pager's as parts of them: rows of a table."""
    pieces = total // piece
    plain = PlainFile(directory / "plain", piece, pieces)
    plain.write()
    times: dict[str, list[float]] = {
        name: [] for name in ("write", "out", "read", "prefetch", "demand")
    }
    with Pager(2, None, directory, io_threads) as pager:
        tensors = []
        for arena in (0, 1):
            pager.enter(arena)
            tensors.append([torch.full((piece // 8,), i) for i in range(pieces)])
            pager.move_out(arena)
        pager.enter(None)
        pager.budget = total

        def demand(arena: int) -> None:
            assert [int(x[0]) for x in tensors[arena]] == [int(x[-1]) for x in tensors[arena]]

        def prefetch() -> None:
            pager.turn(1)  # What the first such turn needed is read ahead.
            pager.wait()

        def turn(number: int) -> None:
            """Begins a turn of arena 0 that is like no other one, with as many tensors before."""
            pager.turn(0)
            pager.enter(0)
            for _ in range(number):
                torch.empty(64 << 10, dtype=torch.uint8)
            pager.enter(None)
            pager.turn(0)

        pager.turn(1)
        demand(1)
        for round in range(rounds):
            turn(2 * round + 1)
            demand(0)  # Memory is full of arena 0, as it is when all arenas don't fit.
            times["read"].append(seconds(plain.read))
            times["prefetch"].append(seconds(prefetch))
            turn(2 * round + 2)
            times["demand"].append(seconds(partial(demand, 0)))
            for x in tensors[0]:
                x.add_(1)
            times["write"].append(seconds(plain.write))
            times["out"].append(seconds(lambda: pager.move_out(0)))
        found = pager.counters()
        assert found.prefetched_bytes >= rounds * total, found
    os.close(plain.file)
    rows = []
    for name, base in MOVES.items():
        ratios = sorted(b / a for a, b in zip(times[name], times[base], strict=True))
        rate = total / statistics.median(times[base]) / 1e6
        rows.append(
            f"| {piece >> 10:,} | {name} | {base} | {rate:.0f} | {statistics.median(ratios):.2f} | "
            f"{ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )
    return rows


def allocations(directory: Path, rounds: int) -> list[str]:
    """What an allocation costs: rows of a table."""

    def empty(size: int) -> None:
        for _ in range(100):
            torch.empty(size, dtype=torch.uint8)

    def filled(size: int) -> None:
        for _ in range(100):
            torch.empty(size, dtype=torch.uint8).fill_(1)

    def kept(size: int) -> None:
        alive = [torch.empty(size, dtype=torch.uint8).fill_(1) for _ in range(100)]
        assert len(alive) == 100

    works = {"made and freed": empty, "made, filled and freed": filled, "100 kept": kept}
    rows = []
    with Pager(1, 8 << 30, directory) as pager:
        for size in (64 << 10, MB, 16 * MB):
            for name, work in works.items():
                found: dict[int | None, list[float]] = {None: [], 0: []}
                for _ in range(rounds + 1):
                    for arena, times in found.items():
                        pager.enter(arena)
                        times.append(seconds(partial(work, size)))
                usual, paged = (statistics.median(times[1:]) * 1e4 for times in found.values())
                rows.append(f"| {size >> 10:,} | {name} | {paged:.1f} | {paged / usual:.2f} |")
        pager.enter(None)
    return rows


def document(given: argparse.Namespace, moved: list[str], made: list[str], load: float) -> str:
    return "\n".join(
        [
            "# The pager and the disk",
            "",
            f"{date.today()}, `{command(given)}`, {os.cpu_count()} cores, one thread, torch "
            f"{torch.__version__}. {given.megabytes} MiB of tensors of one size go out, and come "
            "in as others go: read ahead (prefetch), and when they are used (demand). Plain: the "
            "same pieces written and read past the page cache, in turns in the same run. Medians "
            f"and extremes of {given.rounds} rounds. Load at the start and the end: {load:.1f} and "
            f"{os.getloadavg()[0]:.1f}.",
            "",
            "| KiB of a tensor | moved | plain | plain MB/s | share of plain | from, to |",
            "|---|---|---|---|---|---|",
            *moved,
            "",
            "What an allocation costs beside PyTorch's own allocator, in microseconds:",
            "",
            "| KiB | tensors | us each | to PyTorch's own |",
            "|---|---|---|---|",
            *made,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[16 << 10, 1 << 10, 256, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io-threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the tables here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    load, moved = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        for kilobytes in given.kilobytes:
            piece, total = kilobytes << 10, given.megabytes * MB
            moved += moves(Path(folder), total, piece, given.rounds, given.io_threads)
            print(*moved[-len(MOVES) :], sep="\n", flush=True)
        text = document(given, moved, allocations(Path(folder), given.rounds), load)
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
