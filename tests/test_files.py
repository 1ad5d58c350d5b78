"""What is written: its access, several writers of one path, and disks that fail."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from small_graphs import CLASSES, FEATURES, small_graph

import pyg_sar
import pyg_sar.files as files
from pyg_sar.errors import CheckpointError, ReportError
from pyg_sar.partition import storage
from pyg_sar.tools.models import build_model
from pyg_sar.train import report
from pyg_sar.train.config import TrainConfig
from pyg_sar.train.report import Report, read_metrics
from pyg_sar.train.trainer import Callback, Trainer


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make_trainer(*callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    model = build_model("sage", FEATURES, 4, CLASSES)
    return Trainer(model, small_graph(), TrainConfig(epochs=3, eval_every=3), callbacks=callbacks)


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_one_rule_of_access(umask: int, tmp_path: Path):
    """Parts and checkpoints were their owner's alone, the metadata beside them everyone's."""
    pyg_sar.write_partitions(small_graph(), 2, tmp_path / "parts", "random")
    pyg_sar.train.save_checkpoint(tmp_path / "run.ckpt", torch.nn.Linear(2, 2))
    make_trainer(Report(tmp_path / "report")).fit()
    found = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert len(found) == 3 + 3 + 4
    for name, mode in found.items():
        assert mode == (0o777 if name in ("parts", "report") else 0o666) & ~umask, name


def test_many_writers_of_one_checkpoint(tmp_path: Path):
    """They shared a temporary name, which one renamed under the other."""
    path = tmp_path / "run.ckpt"
    models = [torch.nn.Linear(64, 64) for _ in range(4)]

    def save(model: torch.nn.Linear) -> None:
        for _ in range(15):
            pyg_sar.train.save_checkpoint(path, model)

    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(save, models))
    read = torch.nn.Linear(64, 64)
    pyg_sar.train.load_checkpoint(path, read)
    assert any(torch.equal(read.weight, model.weight) for model in models)
    assert [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]


# Disks that fail #############################################################


def full_disk(*_: Any, **__: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


def broken_disk(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_access(*_: Any, **__: Any) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/some/.hidden.tmp")


WRITES = [(files, "save_file"), (storage, "save_aligned")]
FAILURES: dict[str, tuple[list[tuple[Any, str]], Any, str]] = {
    "full": (WRITES, full_disk, "No space left on device; free some space or choose"),
    "broken": ([(os, "fsync")], broken_disk, "Input/output error; check the disk or choose"),
    "closed": (WRITES, no_access, "Permission denied; allow writing there"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_write_names_the_path_and_leaves_what_was_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root, path, model = tmp_path / "parts", tmp_path / "run.ckpt", torch.nn.Linear(2, 2)
    pyg_sar.write_partitions(small_graph(), 2, root, "random")
    pyg_sar.train.save_checkpoint(path, model)
    before = content(tmp_path)
    places, fail, text = FAILURES[name]
    for place, function in places:
        monkeypatch.setattr(place, function, fail)
    with pytest.raises(OSError, match=f"{text}.*{root}'$") as caught:
        pyg_sar.write_partitions(small_graph(), 3, root, "random", overwrite=True)
    assert ".tmp" not in str(caught.value)
    with pytest.raises(OSError, match=f"{text}.*new'$"):
        pyg_sar.write_partitions(small_graph(), 3, tmp_path / "new", "random")
    with pytest.raises(CheckpointError, match=f"Cannot write the checkpoint '{path}': .*{text}"):
        pyg_sar.train.save_checkpoint(path, model)
    assert content(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts", "run.ckpt"]


class DiskFills(Callback):
    """From the first epoch on nothing can be written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def on_start(self, trainer: Trainer) -> None:
        (self.folder / "metrics.jsonl").unlink()
        (self.folder / "metrics.jsonl").symlink_to("/dev/full")
        self.monkeypatch.setattr(os, "fsync", broken_disk)


def test_a_report_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full on this system")
    folder = tmp_path / "report"
    callbacks = Report(folder), DiskFills(folder, monkeypatch)
    with pytest.warns(UserWarning, match="is incomplete.*No space left.*goes on") as caught:
        result = make_trainer(*callbacks).fit()
    assert result.epochs == 3 and len(caught) == 1
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "metrics.jsonl"]


def test_a_line_that_does_not_fit_leaves_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half a line would make the next one unreadable."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n')

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 5

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, text: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            done, self.room = self.file.write(text[: self.room]), 0
            return int(done)

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *a, **k: Full(opened(self, *a, **k)))
        with pytest.raises(OSError, match=r"free some space.*metrics.jsonl"):
            report._append(path, '{"epoch": 2}\n')
    report._append(path, '{"epoch": 3}\n')
    assert [line["epoch"] for line in read_metrics(tmp_path)] == [1, 3]


def test_a_report_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", broken_disk)
    with pytest.raises(ReportError, match="Input/output error; check the disk"):
        make_trainer(Report(tmp_path / "report")).fit()


def test_sizes_in_bytes():
    sizes = {
        12: 12,
        "12": 12,
        "7 B": 7,
        "500MB": 5 * 10**8,
        "2GiB": 2**31,
        "1.5 tib": 3 * 2**39,
        "0.1kB": 100,
        "64KiB": 2**16,
    }
    assert {size: files.parse_bytes(size, "memory") for size in sizes} == sizes
    for wrong in (0, -1, True, 1.5, None, "", "GiB", "2 apples", "-2GB", "1e3", "0.5B", "\u0663"):
        with pytest.raises(ValueError, match=r"^memory=.* must be a number of bytes of at least 1"):
            files.parse_bytes(wrong, "memory")  # type: ignore[arg-type]
