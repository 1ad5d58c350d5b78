"""The report folder of a training run, written while it goes on; docs/training.md lists its files.

Rank 0 writes all of it. Where that fails after the start (a full disk), training goes on, with one
warning. The picture needs matplotlib (the extra ``plot``); without it everything else is written,
with one warning, and :func:`draw_report` makes the picture later.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import ReportError
from pyg_sar.files import explained, read_text, replace_file
from pyg_sar.ledger import HALO_KINDS, Ledger, peak_memory
from pyg_sar.train.config import EpochRecord, TrainResult
from pyg_sar.train.hosted import HostedRun, describe_hosting
from pyg_sar.train.targets import SPLITS
from pyg_sar.train.trainer import Callback, Trainer

_METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
_SETTINGS = "config.json"
_KINDS = (*HALO_KINDS, "others")  # What else is sent: sums of losses and gradients, agreements.
_PACKAGES = ("pyg_sar", "torch", "torch_geometric", "numpy")
_PICTURE = "report.png"


class Report(Callback):
    """Writes a report folder while a :class:`pyg_sar.train.trainer.Trainer` trains.

    A resumed run continues the lines of the epochs before it. The figures of each part travel to
    rank 0 once per epoch, 72 bytes per part, and are not part of the bytes reported.

    Args:
        folder: Made where it does not exist.
        config: Further settings for ``config.json``, values that JSON can hold.
        overwrite: Replace the report of another run in this folder.
        again: Replace the report of a run of the same settings that has not come to its end: it was
            killed, and this one begins anew.

    Raises:
        ReportError: on every worker when training starts, where the folder holds a report and
            neither ``overwrite`` nor a resumed run explains it, or rank 0 cannot write there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        again: bool = False,
    ) -> None:
        self.folder, self.again = Path(folder), again
        self.config = dict(config or {})
        self.overwrite = overwrite
        self._ledger: Ledger | None = None
        self._hosted: HostedRun | None = None
        self._epochs = 0
        self._before = torch.zeros(1 + len(_KINDS), dtype=torch.int64)
        self._warned = False

    def on_start(self, trainer: Trainer) -> None:
        problem: str | None = None
        hosts = trainer.comm.all_gather_object(platform.node())
        if trainer.comm.writes:
            try:
                self._prepare(trainer, list(dict.fromkeys(hosts)))
            except (OSError, TypeError, ValueError) as error:
                why = explained(error, self.folder)
                problem = f"Cannot write the report {os.fspath(self.folder)!r}: {why}"
        problem = trainer.comm.from_everyone(problem)[0]
        if problem is not None:
            raise ReportError(problem)
        self._hosted, self._epochs = HostedRun(trainer.comm), 0
        self._ledger = Ledger(trainer.comm)
        self._ledger.__enter__()

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if self._ledger is None:  # on_start() was not called.
            return
        self._epochs += 1
        workers = self._gather_figures(trainer.comm, self._ledger)
        if trainer.comm.writes:
            line = asdict(record)
            line |= (line.pop("scores") or {}) | workers
            with self._going_on():
                _append(self.folder / _METRICS, json.dumps(line) + "\n")

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        if self._ledger is None or self._hosted is None:
            return
        workers = trainer.comm.all_gather_object(self._ledger.summary())
        nodes = int(trainer.data.num_nodes or 0)
        hosting = self._hosted.summary(trainer.model, self._ledger, nodes, self._epochs)
        if not trainer.comm.writes:
            return
        outcome: dict[str, Any] = asdict(result) | {"workers": workers}
        if hosting:
            outcome["hosting"] = hosting
        del outcome["losses"]  # They are in metrics.jsonl.
        with self._going_on():
            write_json(self.folder / SUMMARY, outcome)
            draw_report(self.folder)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Warns once that the report can't be written; training goes on."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"The report {os.fspath(self.folder)!r} is incomplete: {error}; training goes "
                    "on without what can't be written",
                    stacklevel=3,
                )
            self._warned = True

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
            self._ledger = None

    def _prepare(self, trainer: Trainer, hosts: list[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _METRICS
        lines: list[dict[str, Any]] = []
        if path.exists():
            anew = self.overwrite or (self.again and self._is_unfinished(trainer))
            if trainer.epoch == 0 and not anew:
                raise ValueError(
                    "it holds the report of another run; choose another folder, or pass "
                    "overwrite=True (--overwrite)"
                )
            lines = [m for m in read_metrics(self.folder) if m["epoch"] <= trainer.epoch]
        else:
            names = (_SETTINGS, SUMMARY, _PICTURE, "metadata.json")
            foreign = [name for name in names if (self.folder / name).exists()]
            if foreign and not self.overwrite:
                raise ValueError(f"{foreign[0]!r} is there, of no report; choose another folder")
        settings = {
            "train": asdict(trainer.config),
            "workers": len(set(_worker_of(trainer.comm))),
            "num_parts": trainer.comm.world_size,
            "replicas": trainer.comm.replicas,
            "backend": trainer.comm.backend,
            "device": str(trainer.comm.device),
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "hosts": hosts,
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "versions": _versions(),
        }
        # Settings first: on a full disk they fail, and a file of no line would look like a report.
        write_json(self.folder / _SETTINGS, settings | self.config)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        replace_file(path, lambda file: file.write_text(text))

    def _is_unfinished(self, trainer: Trainer) -> bool:
        """Returns whether the folder holds what a run of these settings has begun."""
        own = json.loads(json.dumps({"train": asdict(trainer.config)} | self.config))
        with suppress(OSError, ValueError):
            found = json.loads(read_text(self.folder / _SETTINGS))
            same = all(found.get(name) == value for name, value in own.items())
            return same and not (self.folder / SUMMARY).exists()
        return False

    def _gather_figures(self, comm: Communicator, ledger: Ledger) -> dict[str, Any]:
        """Returns bytes of this epoch of every part, and the memory of every worker."""
        memory = torch.tensor([ledger.baseline_memory, peak_memory(comm.device)])
        own = torch.cat([self._bytes(ledger) - self._before, memory]).to(comm.device)
        table = torch.stack(comm.all_gather(own, label=("", "", "report"))).cpu()
        # Read again: what this function itself sent belongs to no epoch.
        self._before = self._bytes(ledger)
        received, kinds, start, peak = table.T.split([1, len(_KINDS), 1, 1])
        workers = _worker_of(comm)
        starts = dict(zip(reversed(workers), reversed(start[0].tolist()), strict=True))
        peaks = dict(zip(workers, peak[0].tolist(), strict=True))
        return {
            "sent_bytes": kinds.sum(dim=0).tolist(),
            "received_bytes": received[0].tolist(),
            "sent_by_kind": dict(zip(_KINDS, kinds.sum(dim=1).tolist(), strict=True)),
            "start_memory_bytes": [starts[worker] for worker in peaks],
            "memory_bytes": list(peaks.values()),
        }

    @staticmethod
    def _bytes(ledger: Ledger) -> torch.Tensor:
        """Returns the bytes received so far, and those sent of each kind."""
        kinds = [ledger.sent_bytes(kind=kind) for kind in HALO_KINDS]
        return torch.tensor([ledger.received, *kinds, ledger.sent - sum(kinds)])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):  # A checkout that is not installed.
            found[name] = version(name)
    return found


def _worker_of(comm: Communicator) -> list[int]:
    """Returns the worker of each rank: several parts may be in one."""
    ranks = list(range(comm.world_size))
    return ranks if comm.host is None else list(comm.host.worker_of)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file of a report, in one step."""
    replace_file(path, lambda file: file.write_text(json.dumps(content, indent=2) + "\n"))


def _append(path: Path, text: str) -> None:
    """Appends a line, or nothing where the disk is full: another may follow."""
    if path.is_fifo() or (path.is_symlink() and path.is_file()):
        raise OSError(errno.ELOOP, "is a link, which this report did not make", os.fspath(path))
    with path.open("ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[file.write(rest) or 0 :]
        except OSError as error:
            with suppress(OSError):
                file.truncate(before)
            raise explained(error, path) from error


def read_metrics(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of a report's ``metrics.jsonl``, one dictionary per epoch.

    A last line that a killed run left unfinished is dropped.
    """
    lines = read_text(Path(folder) / _METRICS).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def hosting_lines(folder: str | os.PathLike[str]) -> list[str]:
    """Returns a table of what hosted parts kept, computed again and moved; none without hosts."""
    try:
        summary = json.loads(read_text(Path(folder) / SUMMARY))
    except OSError:  # The report could not be written, of which it has warned.
        return []
    return describe_hosting(summary["hosting"]) if "hosting" in summary else []


def draw_report(folder: str | os.PathLike[str]) -> Path | None:
    """Draws ``report.png`` from a report's ``metrics.jsonl``.

    Returns:
        The picture's path, or ``None``, after one warning, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        warnings.warn(
            f"{_PICTURE} is not drawn: matplotlib is not installed "
            "(pip install 'pyg_sar[plot]', then pyg_sar.train.draw_report(folder))",
            stacklevel=2,
        )
        return None
    metrics = read_metrics(folder)
    # A figure without pyplot: no global state, no window, and usable beside a notebook's own.
    figure = Figure(figsize=(15, 8), layout="constrained")
    (loss, scores, seconds), (memory, traffic, kinds) = figure.subplots(2, 3)
    _draw_scores(loss, scores, metrics)
    _draw_bytes(memory, traffic, kinds, metrics)
    seconds.plot(*_points(metrics, "seconds"))
    loss.set(title="Loss", ylabel="mean over rows")
    scores.set(title="Metrics", ylabel="value (accuracy: share of rows)")
    seconds.set(title="Time per epoch, with its evaluation", ylabel="seconds (rank 0)")
    memory.set(title="Peak memory per worker", xlabel="worker", ylabel="MiB")
    traffic.set(title="Bytes sent per epoch and rank", ylabel="MiB")
    kinds.set(title="Bytes sent per epoch, by kind", ylabel="MiB")
    for axes in (loss, scores, seconds, traffic, kinds):
        axes.set_xlabel("epoch")
        for line, place in zip(axes.lines, cycle(range(4)), strict=False):
            # Equal curves are both seen; one epoch is a point, which a line alone doesn't show.
            line.set(linestyle=("-", "--", "-.", ":")[place], zorder=2 + place, marker=".")
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (seconds, memory, traffic, kinds):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    for axes in (loss, scores, memory, traffic, kinds):
        legend_below(axes)
    path = Path(folder) / _PICTURE
    replace_file(path, lambda file: figure.savefig(file, dpi=110, format="png"))
    return path


def legend_below(axes: Any) -> None:
    """Puts the legend, if there is anything to name, below the axes: no curve is behind it."""
    number = len(axes.get_legend_handles_labels()[0])
    if number:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17)}
        axes.legend(fontsize="small", ncols=min(number, 4), **place)


def _draw_scores(loss: Any, scores: Any, metrics: list[dict[str, Any]]) -> None:
    loss.plot(*_points(metrics, "loss"), label="train (loss of the step)")
    names = dict.fromkeys(name for line in metrics for name in line)
    for name in names:
        split, _, what = name.partition("_")
        points = _points(metrics, name)
        if split not in SPLITS or not points[0] or name == "train_loss":
            continue
        if what == "loss":
            loss.plot(*points, label=f"{split} (evaluation)")
        else:
            scores.plot(*points, label=f"{split} {what}")


def _draw_bytes(memory: Any, traffic: Any, kinds: Any, metrics: list[dict[str, Any]]) -> None:
    from matplotlib import colormaps

    if not metrics:
        return
    last = metrics[-1]
    start, peak = ([n / 2**20 for n in last[f"{k}memory_bytes"]] for k in ("start_", ""))
    beyond = [max(b - a, 0.0) for a, b in zip(start, peak, strict=True)]
    memory.bar(range(len(peak)), start, label="at the start", color="tab:gray")
    memory.bar(range(len(peak)), beyond, bottom=start, label="growth since the start")
    ranks = len(last["sent_bytes"])
    every = math.ceil(ranks / 12)  # All colors differ; the legend names twelve of them at most.
    for rank in range(ranks):
        # A run that was resumed may have had fewer parts before.
        lines = [line for line in metrics if rank < len(line["sent_bytes"])]
        sent = [line["sent_bytes"][rank] / 2**20 for line in lines]
        label = None if rank % every else f"rank {rank}"
        color = colormaps["turbo"](0.1 + 0.8 * rank / ranks)
        traffic.plot([line["epoch"] for line in lines], sent, color=color, label=label)
    for kind in _KINDS:
        sent = [line["sent_by_kind"][kind] / 2**20 for line in metrics]
        if any(sent):
            kinds.plot([line["epoch"] for line in metrics], sent, label=kind)


def _points(metrics: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Returns the epochs that have a number, and these numbers."""
    lines = [line for line in metrics if line.get(name) is not None]
    return [line["epoch"] for line in lines], [line[name] for line in lines]
