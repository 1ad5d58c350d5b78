"""Callbacks for the training loop: progress and checkpoints."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from pyg_sar.comm.processes import SignalNotice
from pyg_sar.errors import CheckpointError, StoppedError
from pyg_sar.files import check_whole, spoken_bytes
from pyg_sar.store.part_store import PartStore
from pyg_sar.train.checkpoint import checksum_in
from pyg_sar.train.config import EpochRecord, Scores, TrainResult
from pyg_sar.train.trainer import Callback, Trainer


def _write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


LONG_EPOCH = 15.0
"""Seconds after which an epoch that goes on says so."""


class _Ticking(Callback):
    """Calls a function with the seconds of a long epoch so far, every so often, on a thread."""

    _over: threading.Event | None = None

    def start(self, every: float, tell: Callable[[float], object]) -> None:
        """Starts the calls of ``tell`` in the epochs that take ``every`` seconds and more."""
        self._begin, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every, tell), daemon=True)
        self._thread.start()

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        self._begin = time.monotonic()

    def close(self) -> None:
        if self._over is not None:
            self._over.set()
            self._thread.join()
            self._over = None

    def _run(self, every: float, tell: Callable[[float], object]) -> None:
        over = self._over
        while over is not None and not over.wait(every):
            passed = time.monotonic() - self._begin
            if passed >= every:
                tell(passed)


class TqdmProgress(_Ticking):
    """A progress bar over the epochs with loss and accuracies, on rank 0.

    Args:
        description: What stands before the bar.
    """

    def __init__(self, description: str = "train") -> None:
        self.description = description
        self._bar: tqdm[Any] | None = None
        self._scores: Scores | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.comm.writes:
            self._scores = trainer.final
            self._bar = bar = tqdm(
                total=trainer.config.epochs,
                initial=trainer.epoch,
                desc=self.description,
                unit="epoch",
            )
            self.start(1.0, lambda _: bar.refresh())

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if self._bar is None:
            return
        self._scores = record.scores or self._scores
        self._bar.set_postfix(_figures(record.loss, self._scores), refresh=False)
        self._bar.update()

    def close(self) -> None:
        super().close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LineProgress(_Ticking):
    """A line per evaluation, on rank 0: for logs, where a bar would be noise.

    An epoch that takes long has a line every 15 seconds, with the bytes that a store has moved.

    Args:
        write: Takes each line; by default it goes to stdout at once, also where that is a file.
    """

    def __init__(self, write: Callable[[str], object] = _write_line) -> None:
        self.write = write

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.comm.writes:
            return
        store = getattr(trainer.comm.host, "store", None)

        def tell(seconds: float) -> None:
            text = f"epoch {trainer.epoch + 1:4d}  {seconds:.0f} s so far"
            if isinstance(store, PartStore):
                found = store.counters()
                moved = spoken_bytes(found["bytes_read"] + found["bytes_written"])
                text += f", {moved} moved by the store since the start"
            self.write(text)

        self.start(LONG_EPOCH, tell)

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        super().on_epoch(trainer, record)
        if trainer.comm.writes and record.scores is not None:
            figures = _figures(record.loss, record.scores)
            text = "  ".join(f"{name} {value}" for name, value in figures.items())
            self.write(f"epoch {record.epoch:4d}  {text}")


class TensorBoard(Callback):
    """Writes each epoch's loss, learning rate and scores for TensorBoard, on rank 0.

    Args:
        folder: Where TensorBoard's files go. A resumed run replaces epochs after its checkpoint.

    Raises:
        ModuleNotFoundError: When tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "TensorBoard's files are written by the package tensorboard, which is not "
                "installed: pip install tensorboard"
            )
        self.folder = os.fspath(folder)
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.comm.writes:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.folder, purge_step=trainer.epoch + 1)

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if self._writer is not None:
            numbers = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm}
            for name, value in (numbers | (record.scores or {})).items():
                if value is not None:
                    self._writer.add_scalar(name, value, record.epoch)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class CheckpointEvery(Callback):
    """Saves a checkpoint every so many epochs, and after the last one.

    With ``stop`` it also saves one when the signal has come, be it to a single worker, and ends the
    training: after each epoch all workers tell each other whether it came, so that all save the
    same epoch. SLURM sends signals before it ends a job
    (``#SBATCH --signal=USR1@120``).

    Args:
        path: The file; each checkpoint replaces the one before in one step.
        every: Epochs between checkpoints.
        stop: Says whether the signal came; made, and entered, in the main thread.
        overwrite: Replace a file that is there when the training starts.
        extra: Further values that JSON can hold, kept in the checkpoint.

    Raises:
        CheckpointError: On every worker, when the training starts and the file's folder is missing
            or can't be written, or when a checkpoint can't be; where the file is neither this
            training's nor what it was resumed from: another run wrote it, before or meanwhile.
        StoppedError: On every worker, after that checkpoint.
        ValueError: When ``every`` is less than 1.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int = 1,
        stop: SignalNotice | None = None,
        *,
        overwrite: bool = False,
        **extra: object,
    ) -> None:
        check_whole("every", every)
        if os.path.isdir(path):
            raise ValueError(f"path={os.fspath(path)!r} is a folder: give the name of a file")
        self.path = path
        self.every = every
        self.stop = stop
        self.overwrite = overwrite
        self.extra = extra
        self._saved = -1
        self._written: str | None = None

    def on_check(self, trainer: Trainer) -> None:
        if self.overwrite:
            self._written = checksum_in(self.path)
        self._check_file(trainer)

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        stopped = self.stop is not None and any(trainer.comm.from_everyone(self.stop.came))
        if stopped or record.epoch % self.every == 0:
            self._save(trainer)
        if stopped:
            raise StoppedError(
                f"Stopped by a signal after epoch {record.epoch}, which "
                f"{os.fspath(self.path)!r} holds; resume from it to go on"
            )

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        if self._saved != trainer.epoch:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._check_file(trainer)
        trainer.save(self.path, **self.extra)
        self._saved, self._written = trainer.epoch, checksum_in(self.path)

    def _check_file(self, trainer: Trainer) -> None:
        """Raises on every worker where rank 0 can't write, or would replace another run's file."""
        problem, folder = "", os.path.dirname(os.path.abspath(self.path))
        if not os.access(folder, os.W_OK | os.X_OK):
            problem = f"there is no folder {folder!r} where rank 0 may write; make it, or choose "
            problem += "another one"
        elif checksum_in(self.path) not in (None, self._written, trainer.resumed):
            problem = "the file is there, of another run; go on from it (trainer.resume, --resume)"
            problem += ", give another file, or replace it (overwrite=True, --overwrite)"
        problem = trainer.comm.from_everyone(problem)[0]
        if problem:
            raise CheckpointError(
                f"Cannot write the checkpoint {os.fspath(self.path)!r}: {problem}"
            )


def _figures(loss: float, scores: Scores | None) -> dict[str, str]:
    figures = {"loss": f"{loss:.4f}"}
    if scores is not None:
        # The metrics; of the losses those of other rows, where nothing else is known.
        plain = {n: v for n, v in scores.items() if v is not None and not n.endswith("_loss")}
        short = {n.removesuffix("_accuracy"): v for n, v in plain.items()}
        known = short or {n: v for n, v in scores.items() if v is not None and n != "train_loss"}
        figures |= {name: f"{value:.4f}" for name, value in known.items()}
    return figures
