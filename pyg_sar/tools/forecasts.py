"""Forecasts of :func:`pyg_sar.plan`: from runs on samples to a table, and which of them to take."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from pyg_sar.comm.host import split_parts
from pyg_sar.files import spoken_bytes
from pyg_sar.store.part_store import LEAST, RESERVE
from pyg_sar.tools.plan_sample import PublishedPartition
from pyg_sar.tools.rates import Disk, Moved, Rates, Work, peak_together
from pyg_sar.train.report import legend_below
from pyg_sar.wording import Shown, counted

PROCESS = 8 << 20
"""Bytes that training takes in a process beside its tensors: code that is read, the allocator's."""
FIRST_USE = 36 << 20
"""Bytes that the first use of libraries takes in a process; limits of memory hold for them, too."""


def left_to_tensors(limit: int) -> int | None:
    """Returns what a limit of memory leaves to parts' tensors; ``None`` where it is too little."""
    left = limit - max(int(limit * RESERVE[0]), RESERVE[1]) - FIRST_USE
    return None if left < LEAST * limit else left


# Runs on samples ############################################################


@dataclass(frozen=True, slots=True)
class Run:
    """Holds what a part did: bytes alive, with their log, bytes sent by peer, and its time."""

    peak: int
    log: list[tuple[int, int]]
    sent: dict[int, int]
    seconds: float
    work: Work


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs on samples: ``runs[size][part]``, and their lines to the whole partition."""

    sizes: list[float]
    runs: list[list[Run]]

    def line(self, of: Callable[[list[Run]], float]) -> float:
        """Returns what a number of the parts' runs is on the whole partition.

        It is continued from (one or) two sizes, along their line.
        """
        return continued(self.sizes, [of(parts) for parts in self.runs])

    def peak(self, hosted: Sequence[int]) -> int:
        """Returns the most memory that parts of one process take."""
        return round(self.line(lambda parts: _together(parts, hosted)))

    def share_of(self, hosted: Sequence[int], memory: int, number: int) -> int:
        """Returns what parts of a process have in the sample ``number`` for ``memory`` bytes."""
        share = memory / max(self.peak(hosted), 1)
        return max(round(share * _together(self.runs[number], hosted)), 1)

    def sent(self, p: int, to: Collection[int]) -> int:
        """Returns the bytes that part ``p`` sends to others, or to all workers (-1)."""
        return round(self.line(lambda parts: sum(parts[p].sent.get(q, 0) for q in to)))

    def seconds(self, hosted: range, rates: Rates | None) -> float:
        """Returns the time of an epoch of some parts, one after the other."""
        if rates is not None:
            return sum(rates.seconds(self.runs[0][p].work.times(1 / self.sizes[0])) for p in hosted)
        found = self.line(lambda parts: sum(parts[p].seconds for p in hosted))
        return max(found, sum(self.runs[0][p].seconds for p in hosted))


def continued(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns what a value of one or two sizes is at size 1, along their line."""
    if len(values) == 1:
        return values[0]
    slope = (values[0] - values[1]) / (sizes[0] - sizes[1])
    return values[0] + slope * (1 - sizes[0])


def _together(parts: Sequence[Run], hosted: Sequence[int]) -> int:
    if len(hosted) == 1:
        return parts[hosted[0]].peak
    return peak_together([parts[p].log for p in hosted])


@dataclass(frozen=True, slots=True)
class Stored:
    """Runs with a limit of memory and a store: ``runs[size][worker][part]``, what its process moved
    and the part's own seconds; ``refused`` says why such a limit can't be kept, if so.
    """

    sizes: list[float]
    runs: list[list[list[tuple[Moved, float]]]]
    refused: str

    def seconds(self, worker: int) -> float:
        """Returns the processor's time of a worker's parts together."""
        return self._line([sum(seconds for _, seconds in run[worker]) for run in self.runs])

    def moved(self, worker: int) -> Moved:
        """Returns what a worker's store moves; each part saw the moves of all of its process."""

        def line(name: str) -> float:
            means = [fmean(getattr(part, name) for part, _ in run[worker]) for run in self.runs]
            return self._line(means)

        return Moved(*(line(field.name) for field in fields(Moved)))

    def _line(self, values: list[float]) -> float:
        return max(continued(self.sizes, values), 0.0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Turns runs into forecasts, by what workers may take of their machines."""

    limit: int | None
    store: str | None
    bandwidth: float | None
    hosts: int | None
    rates: Rates | None
    disk: Disk | None = None

    def forecast(
        self, apart: Runs, hosted: Runs, workers: int, stored: Stored | None = None
    ) -> dict[str, Any]:
        """Returns the fields of a forecast."""
        num_parts = len(apart.runs[0])
        groups, runs = split_parts(num_parts, workers), apart if workers == num_parts else hosted
        memory, waiting = [], []
        for parts in groups:
            needs = [runs.peak([p]) for p in parts]
            whole = runs.peak(parts)
            kept = whole
            if self.store is not None and self.limit is not None and len(parts) > 1:
                # What waits goes to the store, of the part that computes as well; if that was not
                # tried, its tensors must fit.
                tried = stored is not None and not stored.refused
                kept = min(whole, max(self.limit - PROCESS, 0 if tried else max(needs)))
            memory.append(PROCESS + kept)
            waiting.append(whole - kept)

        def sent_from(places: Sequence[Collection[int]]) -> list[int]:
            """Returns bytes to other places, each of some parts; of collectives all."""
            if len(places) == 1:
                return [0]
            everyone = {-1, *range(num_parts)}
            return [sum(apart.sent(p, everyone - {*parts}) for p in parts) for parts in places]

        times = [runs.seconds(parts, self.rates) for parts in groups]
        moved = self._moved(stored, times)
        seconds = max(times)
        if self.bandwidth is not None:
            hosts = split_parts(workers, min(self.hosts or workers, workers))
            links = sent_from([[p for worker in host for p in groups[worker]] for host in hosts])
            seconds += max(links) / self.bandwidth
        sent = sent_from(groups)
        found = {"memory": memory, "sent": sent, "seconds": seconds, "stored": waiting}
        return found | moved

    def _moved(self, stored: Stored | None, times: list[float]) -> dict[str, Any]:
        """Returns the fields of a store's traffic, which is added to workers' times."""
        if stored is None or stored.refused:
            return {} if stored is None else {"refused": stored.refused}
        found = [stored.moved(worker) for worker in range(len(times))]
        for worker, moved in enumerate(found):
            if self.rates is None:
                times[worker] = stored.seconds(worker)
            if self.disk is not None:
                times[worker] = self.disk.seconds(times[worker], moved)
        read, written = ([round(getattr(one, k)) for one in found] for k in ("read", "written"))
        return {"read": read, "written": written}

    def published(self, runs: Runs, parts: PublishedPartition, mode: int) -> dict[str, Any]:
        """Returns the fields of a forecast, with a worker for each of the equal parts."""
        tried = parts.tried(mode)
        each = range(tried)
        rows = max(runs.sent(p, each) for p in each)
        if mode == 1:  # Those of the pairs that are tried.
            rows = rows * (parts.parts - 1) // (tried - 1)
        sent = rows + max(runs.sent(p, [-1]) for p in each)
        memory = PROCESS + max(runs.peak([p]) for p in each)
        seconds = max(runs.seconds(range(p, p + 1), self.rates) for p in each)
        if self.bandwidth is not None:
            seconds += sent / self.bandwidth
        return {"memory": [memory] * parts.parts, "sent": [sent] * parts.parts, "seconds": seconds}


# Forecasts ############################################################


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast(Shown):
    """A row of a :class:`Plan`.

    Attributes:
        parts: The partition.
        workers: One for each of its parts, or fewer, which host several each.
        mode: Of :class:`SARPolicy`.
        memory: Bytes at the peak of each worker, beyond the start of its process.
        sent: Bytes that each worker sends in an epoch, where all rows are pulled; of workers that
            host several parts at most these.
        seconds: Of an epoch.
        stored: Bytes at the peak of each worker that wait in the store.
        read: Bytes that each worker reads from the store in an epoch.
        written: Bytes that it writes to the store.
        refused: Why the training would end with an error at this limit of memory; empty: it won't.
    """

    parts: str
    workers: int
    mode: int
    memory: list[int]
    sent: list[int]
    seconds: float
    stored: list[int] = field(default_factory=lambda: [0])
    read: list[int] = field(default_factory=lambda: [0])
    written: list[int] = field(default_factory=lambda: [0])
    refused: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Shown):
    """Forecasts, and the one to take. ``print`` shows a table.

    Attributes:
        forecasts: By partition and mode.
        limit: Bytes that a worker may take; ``None``: any.
        bandwidth: Bytes per second between workers; ``None``: they share memory.
    """

    forecasts: list[Forecast]
    limit: int | None
    bandwidth: float | None

    @property
    def fitting(self) -> list[Forecast]:
        """The forecasts within the limit of memory."""
        limit = self.limit
        return [
            f for f in self.forecasts if not f.refused and (limit is None or max(f.memory) <= limit)
        ]

    @property
    def best(self) -> Forecast | None:
        """The fastest that fits; among those within 2 %, the one that takes least memory."""
        if not self.fitting:
            return None
        fastest = min(one.seconds for one in self.fitting)
        equal = [one for one in self.fitting if one.seconds <= 1.02 * fastest]
        return min(equal, key=lambda one: max(one.memory))

    def __str__(self) -> str:
        lines = [f"{'workers':>7}  {'mode':>4}  {'memory/worker':>13}  {'in store':>10}  "
                 f"{'moved/epoch':>11}  {'sent/epoch':>10}  {'s/epoch':>8}  parts"]  # fmt: skip
        for one in self.forecasts:
            mark = "*" if one is self.best else " " if one in self.fitting else "too large"
            lines.append(
                f"{one.workers:>7}  {one.mode:>4}  {spoken_bytes(max(one.memory)):>13}  "
                f"{spoken_bytes(max(one.stored)):>10}  "
                f"{spoken_bytes(sum(one.read) + sum(one.written)):>11}  "
                f"{spoken_bytes(sum(one.sent)):>10}  "
                f"{one.seconds:>8.3g}  {one.parts} {mark}".rstrip()
            )
        return "\n".join([*lines, self._why()])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of memory over time of an epoch; the one to take is a star."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a picture needs matplotlib: pip install 'pyg_sar[plot]'") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for one in self.forecasts:
            place = one.seconds, max(one.memory) / 2**30
            axes.plot(*place, "*" if one is self.best else "o", color=f"C{one.mode}", markersize=9)
            axes.annotate(f"{counted(one.workers, 'workers')}, mode {one.mode}", place, (5, 5),
                          textcoords="offset points", fontsize="small")  # fmt: skip
        if self.limit is not None:
            axes.axhline(self.limit / 2**30, color="black", linestyle="--", label="limit")
            legend_below(axes)
        axes.set(xlabel="seconds per epoch", ylabel="GiB of the largest worker")
        axes.margins(x=0.3, y=0.1)
        axes.set_ylim(bottom=0)
        figure.savefig(path)

    def _why(self) -> str:
        if self.best is None:
            possible = [one for one in self.forecasts if not one.refused]
            if not possible:
                return (
                    f"None fits into {spoken_bytes(self.limit or 0)}: {self.forecasts[0].refused}; "
                    "allow more memory, take more parts, or host fewer of them on each worker"
                )
            least = min(possible, key=lambda one: max(one.memory))
            return (
                f"None fits into {spoken_bytes(self.limit or 0)}; the least is "
                f"{spoken_bytes(max(least.memory))} (mode {least.mode}, "
                f"{counted(least.workers, 'workers')}): take more parts, or host several in turn "
                "with --memory and --store"
            )
        limit = "" if self.limit is None else f" of those within {spoken_bytes(self.limit)}"
        fewest = min(one.workers for one in self.fitting)
        if limit and fewest < self.best.workers:
            limit += f", where {counted(fewest, 'workers')} are enough"
        return (
            f"* take mode {self.best.mode} with {counted(self.best.workers, 'workers')}: the least "
            f"memory within 2 % of the shortest epoch{limit}. Memory is what training adds to a "
            "started process of some 350 MB"
        )
