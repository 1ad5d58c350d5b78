"""Callbacks for the training loop: progress, checkpoints and the report folder, all on rank 0.

[Note: the report folder]

================== ============================================================================
``config.json``    settings, versions, numbers of workers and of parts
``metrics.jsonl``  one JSON object per epoch: loss, learning rate, accuracies, per part of the graph
                   the bytes sent and received in the epoch, per worker the peak memory so far
``summary.json``   the result, and each part's ledger (bytes per layer and peer, resident rows)
``report.png``     loss, accuracy, memory per worker, bytes sent per epoch
================== ============================================================================

Rank 0 writes all of it. Where that fails after the start (a full disk), training goes on, with one
warning. The picture needs matplotlib (the extra ``plot``); without it everything
else is written, with one warning, and :func:`draw_report` makes the picture later.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from tqdm import tqdm

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import ReportError
from pyg_sar.files import explained, replace_file
from pyg_sar.ledger import Ledger, peak_memory
from pyg_sar.train.config import EpochRecord, Scores, TrainResult
from pyg_sar.train.trainer import Callback, Trainer


def _write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class TqdmProgress(Callback):
    """A progress bar over the epochs with loss and accuracies, on rank 0.

    Args:
        description: What stands before the bar.
    """

    def __init__(self, description: str = "train") -> None:
        self.description = description
        self._bar: tqdm[Any] | None = None
        self._scores: Scores | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.comm.rank == 0:
            self._scores = trainer.final
            self._bar = tqdm(
                total=trainer.config.epochs,
                initial=trainer.epoch,
                desc=self.description,
                unit="epoch",
            )

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if self._bar is None:
            return
        self._scores = record.scores or self._scores
        self._bar.set_postfix(_figures(record.loss, self._scores), refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LineProgress(Callback):
    """A line per evaluation, on rank 0: for logs, where a bar would be noise.

    Args:
        write: Takes each line; by default it goes to stdout at once, also where that is a file.
    """

    def __init__(self, write: Callable[[str], object] = _write_line) -> None:
        self.write = write

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if trainer.comm.rank == 0 and record.scores is not None:
            figures = _figures(record.loss, record.scores)
            text = "  ".join(f"{name} {value}" for name, value in figures.items())
            self.write(f"epoch {record.epoch:4d}  {text}")


class CheckpointEvery(Callback):
    """Saves a checkpoint every so many epochs, and after the last one.

    Args:
        path: The file; each checkpoint replaces the one before in one step.
        every: Epochs between checkpoints.
        extra: Further values that JSON can hold, kept in the checkpoint.

    Raises:
        ValueError: When ``every`` is less than 1.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1, **extra: object) -> None:
        if every < 1:
            raise ValueError(f"Expected 'every' to be at least 1 (got {every})")
        self.path = path
        self.every = every
        self.extra = extra
        self._saved = -1

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.epoch % self.every == 0:
            self._save(trainer)

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        if self._saved != trainer.epoch:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.save(self.path, **self.extra)
        self._saved = trainer.epoch


def _figures(loss: float, scores: Scores | None) -> dict[str, str]:
    figures = {"loss": f"{loss:.4f}"}
    if scores is not None:
        for split in ("train", "val", "test"):
            accuracy = getattr(scores, f"{split}_accuracy")
            if accuracy is not None:
                figures[split] = f"{accuracy:.4f}"
    return figures


# The report folder ############################################################

_METRICS = "metrics.jsonl"
_PICTURE = "report.png"


class Report(Callback):
    """Writes a report folder while a :class:`pyg_sar.train.trainer.Trainer` trains.

    A resumed run continues the lines of the epochs before it. The figures of each part travel to
    rank 0 once per epoch, 24 bytes per part, and are not part of the bytes reported.

    Args:
        folder: Made where it does not exist.
        config: Further settings for ``config.json``, values that JSON can hold.
        overwrite: Replace the report of another run in this folder.

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
    ) -> None:
        self.folder = Path(folder)
        self.config = dict(config or {})
        self.overwrite = overwrite
        self._ledger: Ledger | None = None
        self._before = (0, 0)
        self._warned = False

    def on_start(self, trainer: Trainer) -> None:
        problem: str | None = None
        if trainer.comm.rank == 0:
            try:
                self._prepare(trainer)
            except (OSError, TypeError, ValueError) as error:
                why = explained(error, self.folder)
                problem = f"Cannot write the report {os.fspath(self.folder)!r}: {why}"
        problem = trainer.comm.broadcast_object(problem)
        if problem is not None:
            raise ReportError(problem)
        self._ledger = Ledger(trainer.comm)
        self._ledger.__enter__()

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        workers = self._gather_figures(trainer.comm)
        if trainer.comm.rank == 0:
            line = json.dumps(_line(record) | workers) + "\n"
            with self._going_on():
                _append(self.folder / _METRICS, line)

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        summary = {} if self._ledger is None else self._ledger.summary()
        workers = trainer.comm.all_gather_object(summary)
        if trainer.comm.rank != 0:
            return
        outcome = asdict(result) | {"workers": workers}
        del outcome["losses"]  # They are in metrics.jsonl.
        with self._going_on():
            _write_json(self.folder / "summary.json", outcome)
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

    def _prepare(self, trainer: Trainer) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _METRICS
        lines: list[dict[str, Any]] = []
        if path.exists():
            if trainer.epoch == 0 and not self.overwrite:
                raise ValueError(
                    "it holds the report of another run; choose another folder, or overwrite"
                )
            lines = [m for m in read_metrics(self.folder) if m["epoch"] <= trainer.epoch]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        replace_file(path, lambda file: file.write_text(text))
        settings = {
            "train": asdict(trainer.config),
            "workers": len(set(_worker_of(trainer.comm))),
            "num_parts": trainer.comm.world_size,
            "backend": trainer.comm.backend,
            "device": str(trainer.comm.device),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "torch_geometric": torch_geometric.__version__,
            },
        }
        _write_json(self.folder / "config.json", settings | self.config)

    def _gather_figures(self, comm: Communicator) -> dict[str, list[int]]:
        """Returns bytes of this epoch of every part, and peak memory of every worker."""
        ledger = self._ledger
        sent, received = (ledger.sent, ledger.received) if ledger else (0, 0)
        own = torch.tensor(
            [sent - self._before[0], received - self._before[1], peak_memory(comm.device)],
            device=comm.device,
        )
        rows = torch.stack(comm.all_gather(own, label=("", "", "report"))).T.tolist()
        # Read again: what this function itself sent belongs to no epoch.
        self._before = (ledger.sent, ledger.received) if ledger else (0, 0)
        sent_bytes, received_bytes, memory = rows
        peaks = dict(zip(_worker_of(comm), memory, strict=True))
        return {
            "sent_bytes": sent_bytes,
            "received_bytes": received_bytes,
            "memory_bytes": list(peaks.values()),
        }


def _worker_of(comm: Communicator) -> list[int]:
    """Returns the worker of each rank: several parts may be in one."""
    ranks = list(range(comm.world_size))
    return ranks if comm.host is None else list(comm.host.worker_of)


def _line(record: EpochRecord) -> dict[str, Any]:
    line = asdict(record)
    scores = line.pop("scores") or {}
    return line | scores


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, lambda file: file.write_text(json.dumps(content, indent=2) + "\n"))


def _append(path: Path, text: str) -> None:
    """Appends a line, or nothing where the disk is full: another may follow."""
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
    metrics: list[dict[str, Any]] = []
    for line in (Path(folder) / _METRICS).read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            metrics.append(json.loads(line))
    return metrics


def draw_report(folder: str | os.PathLike[str]) -> Path | None:
    """Draws ``report.png`` from a report's ``metrics.jsonl``.

    Returns:
        The picture's path, or ``None``, after one warning, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn(
            f"{_PICTURE} is not drawn: matplotlib is not installed "
            "(pip install 'pyg_sar[plot]', then pyg_sar.train.callbacks.draw_report(folder))",
            stacklevel=2,
        )
        return None
    metrics = read_metrics(folder)
    # A figure without pyplot: no global state, no window, and usable beside a notebook's own.
    figure = Figure(figsize=(11, 8), layout="constrained")
    (loss, accuracy), (memory, traffic) = figure.subplots(2, 2)
    epochs = [line["epoch"] for line in metrics]
    loss.plot(epochs, [line["loss"] for line in metrics], label="train (loss of the step)")
    for split in ("train", "val", "test"):
        _draw_split(loss, metrics, f"{split}_loss", f"{split} (evaluation)", skip=split == "train")
        _draw_split(accuracy, metrics, f"{split}_accuracy", split)
    if metrics:
        peak = [value / 2**20 for value in metrics[-1]["memory_bytes"]]
        memory.bar(range(len(peak)), peak)
        memory.set_xticks(range(len(peak)))
        for rank in range(len(metrics[-1]["sent_bytes"])):
            # A run that was resumed may have had fewer parts before.
            points = [
                (line["epoch"], line["sent_bytes"][rank] / 2**20)
                for line in metrics
                if rank < len(line["sent_bytes"])
            ]
            traffic.plot(*zip(*points, strict=True), label=f"rank {rank}")
    loss.set(title="Loss", xlabel="epoch", ylabel="mean cross entropy")
    accuracy.set(title="Accuracy", xlabel="epoch", ylabel="share of nodes")
    memory.set(title="Peak memory per worker", xlabel="worker", ylabel="MiB")
    traffic.set(title="Bytes sent per epoch", xlabel="epoch", ylabel="MiB")
    for axes in (loss, accuracy, traffic):
        if axes.lines:
            axes.legend(fontsize="small")
    path = Path(folder) / _PICTURE
    replace_file(path, lambda file: figure.savefig(file, dpi=110, format="png"))
    return path


def _draw_split(
    axes: Any, metrics: list[dict[str, Any]], key: str, label: str, *, skip: bool = False
) -> None:
    points = [(line["epoch"], line[key]) for line in metrics if line.get(key) is not None]
    if points and not skip:
        axes.plot(*zip(*points, strict=True), label=label)
