"""Forecasts of :func:`pyg_sar.plan`, as a table and a picture, and which of them to take."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from pyg_sar.files import spoken_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A row of a :class:`Plan`.

    Attributes:
        parts: The partition.
        workers: One for each of its parts, or fewer, which host several each.
        mode: Of :class:`SARPolicy`.
        memory: Bytes at the peak of each worker, beyond the start of its process.
        sent: Bytes that each worker sends in an epoch, where all rows are pulled; of workers that
            host several parts at most these.
        seconds: Of an epoch, the store's work left out.
        stored: Bytes at the peak of each worker that wait in the store.
    """

    parts: str
    workers: int
    mode: int
    memory: list[int]
    sent: list[int]
    seconds: float
    stored: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
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
        return [f for f in self.forecasts if self.limit is None or max(f.memory) <= self.limit]

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
                 f"{'sent/epoch':>10}  {'s/epoch':>8}  parts"]  # fmt: skip
        for one in self.forecasts:
            mark = "*" if one is self.best else " " if one in self.fitting else "too large"
            lines.append(
                f"{one.workers:>7}  {one.mode:>4}  {spoken_bytes(max(one.memory)):>13}  "
                f"{spoken_bytes(max(one.stored)):>10}  {spoken_bytes(sum(one.sent)):>10}  "
                f"{one.seconds:>8.3g}  {one.parts} {mark}".rstrip()
            )
        return "\n".join([*lines, self._why()])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of memory over time of an epoch; the one to take is a star.

        Args:
            path: A file ``.svg``, ``.png`` or another that matplotlib writes.

        Raises:
            ImportError: Without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a picture needs matplotlib: pip install 'pyg_sar[plot]'") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for one in self.forecasts:
            place = one.seconds, max(one.memory) / 2**30
            axes.plot(*place, "*" if one is self.best else "o", color=f"C{one.mode}", markersize=9)
            axes.annotate(f"{one.workers} workers, mode {one.mode}", place, (5, 5),
                          textcoords="offset points", fontsize="small")  # fmt: skip
        if self.limit is not None:
            axes.axhline(self.limit / 2**30, color="black", linestyle="--", label="limit")
            axes.legend()
        axes.set(xlabel="seconds per epoch", ylabel="GiB of the largest worker", ylim=(0, None))
        axes.margins(x=0.25)
        figure.savefig(path)

    def _why(self) -> str:
        if self.best is None:
            least = min(self.forecasts, key=lambda one: max(one.memory))
            return (
                f"None fits into {spoken_bytes(self.limit or 0)}; the least is "
                f"{spoken_bytes(max(least.memory))} (mode {least.mode}, {least.workers} workers): "
                "take more parts, or host several in turn with --memory and --store"
            )
        limit = "" if self.limit is None else f" of those within {spoken_bytes(self.limit)}"
        return (
            f"* take mode {self.best.mode} with {self.best.workers} workers: the shortest "
            f"epoch{limit}. Memory is beyond the start of a process, which takes some 350 MB"
        )
