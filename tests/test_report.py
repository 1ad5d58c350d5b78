"""The report folder: what is in it, what it counts, and when it is not written."""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from small_graphs import CLASSES, FEATURES, small_graph

import pyg_sar
from pyg_sar.errors import DivergedError, ReportError
from pyg_sar.tools.models import build_model
from pyg_sar.train import report
from pyg_sar.train.config import EpochRecord, TrainConfig
from pyg_sar.train.report import Report, draw_report, read_metrics
from pyg_sar.train.trainer import Callback, Trainer

CONFIG = TrainConfig(epochs=4, eval_every=2, clip_norm=1.0)
KEYS = {"epoch", "loss", "lr", "grad_norm", "seconds"}
SCORES = {f"{s}_{v}" for s in ("train", "val", "test") for v in ("accuracy", "loss")}
WORKER_KEYS = {"sent_bytes", "received_bytes", "sent_by_kind", "start_memory_bytes", "memory_bytes"}


def line(epoch: int, **values: Any) -> dict[str, Any]:
    kinds = dict.fromkeys(("fetch", "refetch", "gradient", "query", "state", "others"), 0)
    kinds |= {"fetch": 4 * 2**20, "others": (epoch - 1) * 2**20}
    memory = {"start_memory_bytes": [100 * 2**20, 50 * 2**20]}
    memory["memory_bytes"] = [120 * 2**20, 49 * 2**20]
    return {"epoch": epoch, "loss": 1.0, "sent_by_kind": kinds, **memory, **values}


LINES = [
    line(1, seconds=0.5, sent_bytes=[4 * 2**20], val_f1=None),
    line(2, seconds=0.25, sent_bytes=[4 * 2**20, 2**20], val_f1=0.5),
]


def make_trainer(*callbacks: Callback, config: TrainConfig = CONFIG) -> Trainer:
    torch.manual_seed(0)
    model = build_model("sage", FEATURES, 4, CLASSES)
    return Trainer(model, small_graph(), config, callbacks=callbacks)


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(report, "draw_report", lambda folder: None)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def test_the_folder_holds_settings_metrics_summary_and_picture(tmp_path):
    folder = tmp_path / "a" / "report"
    result = make_trainer(Report(folder, config={"graph": "small"})).fit()
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "report.png",
        "summary.json",
    ]
    config = read_json(folder, "config.json")
    assert config["train"] == asdict(CONFIG) and config["graph"] == "small"
    assert config["workers"] == 1 and config["versions"]["torch"] == torch.__version__
    assert config["hosts"] == [platform.node()] and config["cpus"] == os.cpu_count()
    assert shlex.split(config["command"])[1:] == sys.argv
    metrics = read_metrics(folder)
    assert [m["loss"] for m in metrics] == result.losses
    assert [m["epoch"] for m in metrics] == [1, 2, 3, 4]
    assert set(metrics[0]) == KEYS | WORKER_KEYS
    assert set(metrics[1]) == KEYS | WORKER_KEYS | SCORES
    assert metrics[3]["val_accuracy"] == result.final["val_accuracy"]
    assert metrics[0]["sent_bytes"] == [0] and metrics[0]["memory_bytes"][0] > 2**20
    summary = read_json(folder, "summary.json")
    assert summary["epochs"] == 4 and summary["best"] == result.best
    assert summary["workers"][0]["sent_bytes"] == 0 and "losses" not in summary
    picture = (folder / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_the_picture_shows_epochs_times_memory_and_kinds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    monkeypatch.setattr(report, "replace_file", lambda path, write: write(path))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    draw_report(tmp_path)
    loss, scores, seconds, memory, traffic, kinds = drawn[0].axes
    assert [list(line.get_xdata()) for line in seconds.lines] == [[1, 2]]
    assert list(seconds.lines[0].get_ydata()) == [0.5, 0.25]
    assert [line.get_label() for line in scores.lines] == ["val f1"]
    assert [line.get_label() for line in loss.lines] == ["train (loss of the step)"]
    bars = [(bar.get_y(), bar.get_height()) for bar in memory.patches]
    assert bars == [(0, 100), (0, 50), (100, 20), (50, 0)]
    assert {line.get_label(): list(line.get_ydata()) for line in kinds.lines} == {
        "fetch": [4, 4],
        "others": [0, 1],
    }
    assert [list(line.get_xdata()) for line in traffic.lines] == [[1, 2], [2]]
    drawn[0].draw_without_rendering()
    for axes in drawn[0].axes:
        assert all(tick == int(tick) for tick in axes.get_xticks())
        assert len({curve.get_linestyle() for curve in axes.lines}) == len(axes.lines)
        legend = axes.get_legend()
        assert legend is None or legend.get_window_extent().y1 < axes.get_window_extent().y0
        assert axes.get_ylabel() and axes.get_xlabel()
        assert all(curve.get_marker() == "." for curve in axes.lines)  # One epoch is seen.
    for axes in drawn[0].axes[2:]:
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] >= 1.05 * axes.dataLim.y1


def test_the_picture_of_many_ranks_names_some_and_every_color_differs(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
    monkeypatch.setattr(report, "replace_file", lambda path, write: write(path))
    many = line(1, seconds=0.5, sent_bytes=[2**20] * 40)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(many) + "\n")
    draw_report(tmp_path)
    traffic = drawn[0].axes[4]
    assert len({curve.get_color() for curve in traffic.lines}) == 40
    names = [text.get_text() for text in traffic.get_legend().get_texts()]
    assert names == [f"rank {rank}" for rank in range(0, 40, 4)]


def test_files_of_others_are_kept(tmp_path):
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ReportError, match=r"'config.json' is there, of no report; choose another"):
        make_trainer(Report(tmp_path)).fit()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_another_runs_report_is_not_overwritten_unasked(tmp_path, no_picture):
    make_trainer(Report(tmp_path)).fit()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ReportError, match=r"holds the report of another run; choose another"):
        make_trainer(Report(tmp_path)).fit()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    make_trainer(Report(tmp_path, overwrite=True), config=replace(CONFIG, epochs=1)).fit()
    assert len(read_metrics(tmp_path)) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"Cannot write the report .*file"):
        make_trainer(Report(tmp_path / "file")).fit()
    with pytest.raises(ReportError, match="not JSON serializable"):
        make_trainer(Report(tmp_path / "b", config={"a": object()})).fit()


def test_a_report_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch, no_picture):
    """A file of no line would be taken for another run's report."""

    def full(path: Path, write: Any) -> None:
        write(tmp_path / "size")
        if (tmp_path / "size").stat().st_size:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        path.touch()

    with monkeypatch.context() as patch, pytest.raises(ReportError, match="No space left"):
        patch.setattr(report, "replace_file", full)
        make_trainer(Report(tmp_path / "report")).fit()
    assert not list((tmp_path / "report").iterdir())
    make_trainer(Report(tmp_path / "report")).fit()


def test_a_resumed_run_continues_the_lines(tmp_path, no_picture):
    first = make_trainer(Report(tmp_path / "r"), config=replace(CONFIG, restore_best=False))
    first.fit()
    first.save(tmp_path / "c")
    path = tmp_path / "r" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # The killed run had gone on for an epoch, and was killed while it wrote another line.
    path.write_text("".join(lines) + lines[-1].replace('"epoch": 4', '"epoch": 5') + '{"epo')
    second = make_trainer(Report(tmp_path / "r"), config=replace(CONFIG, epochs=6))
    second.resume(tmp_path / "c")
    result = second.fit()
    metrics = read_metrics(tmp_path / "r")
    assert [m["epoch"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["loss"] for m in metrics] == result.losses


def test_without_matplotlib_only_the_picture_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(UserWarning, match=r"matplotlib is not installed \(pip install 'pyg_sar\["):
        make_trainer(Report(tmp_path)).fit()
    assert (tmp_path / "summary.json").exists() and not (tmp_path / "report.png").exists()
    monkeypatch.undo()
    assert draw_report(tmp_path) == tmp_path / "report.png"
    assert (tmp_path / "report.png").exists()


def test_a_failed_training_leaves_its_metrics_and_closes_the_ledger(tmp_path):
    class Spoil(Callback):
        def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
            if record.epoch == 3:
                trainer.data.x.fill_(float("nan"))

    trainer = make_trainer(Report(tmp_path), Spoil())
    with pytest.raises(DivergedError):
        trainer.fit()
    assert len(read_metrics(tmp_path)) == 3
    assert not (tmp_path / "summary.json").exists()
    assert trainer.comm.ledgers == []
    assert draw_report(tmp_path) is not None


def test_an_empty_report_is_drawn_all_the_same(tmp_path):
    make_trainer(Report(tmp_path), config=replace(CONFIG, epochs=0)).fit()
    assert read_metrics(tmp_path) == [] and (tmp_path / "report.png").exists()


def train_with_report(folder: str) -> dict[str, Any]:
    """On each worker: two reports of the same training with another ledger beside."""
    data = pyg_sar.load_partition(f"{folder}/parts")
    comm = pyg_sar.comm.current()
    model = pyg_sar.distribute(build_model("sage", FEATURES, 4, CLASSES))
    trainer = Trainer(model, data, CONFIG, comm=comm, callbacks=[Report(f"{folder}/report")])
    halo = []

    class Count(Callback):
        def on_start(self, trainer: Trainer) -> None:
            self.ledger = pyg_sar.Ledger(comm).__enter__()

        def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
            kinds = ("fetch", "refetch", "gradient")
            halo.append(sum(self.ledger.sent_bytes(kind=kind) for kind in kinds))

        def close(self) -> None:
            self.ledger.__exit__(None, None, None)

    trainer.callbacks.append(Count())
    trainer.evaluate()  # In the first passes workers agree on how layers run, and say so.
    trainer.train_step()
    trainer.fit()
    try:
        Trainer(model, data, CONFIG, callbacks=[Report(f"{folder}/report")]).fit()
        refused = ""
    except ReportError as error:
        refused = str(error)
    return {"halo": halo, "refused": refused}


def test_bytes_and_memory_of_every_worker(tmp_path):
    pyg_sar.write_partitions(small_graph(), 3, tmp_path / "parts", method="random")
    workers = pyg_sar.launch(train_with_report, 3, str(tmp_path))
    metrics = read_metrics(tmp_path / "report")
    summary = read_json(tmp_path / "report", "summary.json")
    for m in metrics:
        assert sum(m["sent_by_kind"].values()) == sum(m["sent_bytes"])
        assert m["sent_by_kind"]["fetch"] > 0 and len(m["start_memory_bytes"]) == 3
    halos = [sum(w["halo"][3] - w["halo"][2] for w in workers)]
    assert halos == [sum(v for k, v in metrics[3]["sent_by_kind"].items() if k != "others")]
    for rank, worker in enumerate(workers):
        sent = [m["sent_bytes"][rank] for m in metrics]
        halo = [b - a for a, b in zip([0, *worker["halo"]], worker["halo"], strict=False)]
        # What is left are sums of losses and parameter gradients; of an evaluation three sums of
        # 8 bytes for each split, with a checksum of each of 3 workers, four such numbers by which
        # each of the two layers compares the workers' calls, and at most 256 bytes by which
        # evaluate() compares the workers' weights.
        rest = [a - b for a, b in zip(sent, halo, strict=True)]
        assert min(halo) > 0 and 0 < rest[0] < 10_000
        assert rest == rest[:2] * 2
        assert 0 <= rest[1] - rest[0] - (3 * 3 * (1 + 3) + 2 * 4) * 8 <= 256
        assert len(metrics[0]["memory_bytes"]) == 3
        assert summary["workers"][rank]["rank"] == rank
        assert summary["workers"][rank]["sent_bytes"] >= sum(sent)
        assert set(summary["workers"][rank]["layers"]) >= {"convs.0", "convs.1"}
        assert "holds the report of another run" in worker["refused"]


def test_results_are_tables_in_a_notebook():
    result = make_trainer().fit()
    assert str(result).startswith("4 epochs, last loss") and "best epoch" in str(result)
    assert result._repr_html_().startswith("<div>4 epochs, last loss")
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        ledger.transfer(("<b>", "forward", "fetch"), 0, received=1200)
        ledger.transfer(("", "", "sum"), -1, sent=8)
    html = ledger._repr_html_()
    assert "<tr><td>&lt;b&gt;</td><td>1,200</td><td>0</td><td>0</td></tr>" in html
    assert "<tr><th>layer</th><th>bytes received</th>" in html and "<b>" not in html
    assert repr(ledger).startswith("Ledger(rank=0, sent=8, received=1200, ")
    verdict = pyg_sar.verify(build_model("gcn", FEATURES, 4, CLASSES), small_graph(), 2)
    html = verdict._repr_html_()
    assert "<th>layer</th><th>class</th>" in html and "<div>ok: the same" in html
    layer = verdict.layers[0]
    assert f"<tr><td>kind</td><td>{layer.kind!r}</td></tr>".replace("'", "&#x27;") in (
        layer._repr_html_().replace("th>", "td>")
    )
