"""The command line: partition, train, demo; alone, with --workers, and under torchrun."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from combinations import everything
from safetensors.torch import load_file
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.comm.group import finalize
from pyg_sar.comm.messages import RESUME
from pyg_sar.errors import LostWorkerError, ReportError, WorkerError
from pyg_sar.tools import cli, demo, load_graph, start
from pyg_sar.tools.models import build_model, imported_model
from pyg_sar.tools.run import ModelConfig, RunConfig, _metrics, train_seeds, train_worker
from pyg_sar.train.callbacks import TensorBoard
from pyg_sar.train.checkpoint import load_checkpoint
from pyg_sar.train.config import TrainConfig
from pyg_sar.train.report import read_metrics
from pyg_sar.usage import MODELS, DemoConfig
from pyg_sar.wording import counted

GRAPH = "synthetic:nodes=200,degree=6,features=8,classes=3"
SMALL = ["--hidden", "4", "--heads", "2", "--eval-every", "2"]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def in_this_process(monkeypatch):
    """As torchrun starts one worker, which hosts all parts."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr("pyg_sar.train.report.draw_report", lambda folder: None)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> str:
    """A partition into two, and beside it one into one part (``parts1``)."""
    folder = tmp_path_factory.mktemp("cli")
    for number, name in ((2, "parts"), (1, "parts1")):
        arguments = ["partition", GRAPH, "--parts", str(number), "--out", str(folder / name)]
        assert main([*arguments, "--method", "random", "--quiet"]) == 0
    return str(folder / "parts")


def usage_error(capsys, *arguments: str) -> str:
    """Runs a command that must end with exit code 2 and one line on stderr."""
    assert main(arguments) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("pyg-sar: error: ")
    return captured.err


# partition ###################################################################


def test_partition_prints_statistics(tmp_path, capsys):
    out = str(tmp_path / "p")
    assert main(["partition", GRAPH, "--parts", "3", "--out", out, "--seed", "4"]) == 0
    captured = capsys.readouterr()
    for word in ("edge cut", "replication factor", "training nodes", "halo rows", out):
        assert word in captured.out
    assert "writing part 3 of 3" in captured.err
    metadata = pyg_sar.partition.merge_partitions(out)
    assert metadata.num_nodes == 200
    again = ["partition", GRAPH, "--parts", "2", "--out", out]
    assert "exists" in usage_error(capsys, *again, "--quiet")
    assert main([*again, "--overwrite", "--quiet"]) == 0


def test_partition_explains_mistakes_in_one_line(tmp_path, capsys):
    out, missing = str(tmp_path / "p"), str(tmp_path / "none.npz")
    for arguments, text in (
        ("corra --parts 2", "did you mean 'cora'"),
        (f"{GRAPH} --parts 0", "--parts 0 must be at least 1"),
        (f"{GRAPH} --parts 2 --seed -1", "'seed' to be in 0 .. 2**31 - 1 (got -1)"),
        (f"{missing} --parts 2", missing),
    ):
        assert text in usage_error(capsys, "partition", *arguments.split(), "--out", out)
    with pytest.raises(SystemExit):
        main(["partition", GRAPH, "--parts", "2", "--out", out, "--node-ids", "x=maybe"])
    assert "--node-ids: 'x=maybe': expected NAME or NAME=no" in capsys.readouterr().err
    assert not Path(out).exists()


def test_help_tells_sources_hosts_and_defaults(capsys):
    for command, words in {
        "partition": ("ogbn-arxiv", "synthetic:nodes=200000", "(default: balanced)"),
        "train": ("--nnodes 2", "--node-rank", "GLOO_SOCKET_IFNAME", "--max-restarts", *MODELS),
        "demo": ("no download", "--nodes"),
    }.items():
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        text = " ".join(capsys.readouterr().out.split())  # Lines may break anywhere.
        assert all(word in text for word in words), command
        assert "None" not in text


# train #######################################################################


def test_train_checkpoints_reports_and_resumes(parts, tmp_path, capsys):
    checkpoint, report = tmp_path / "c", tmp_path / "r"
    train = ["train", "--parts", parts, *SMALL, "--dropout", "0.5", "--report", str(report)]
    train += ["--checkpoint", str(checkpoint), "--schedule", "step", "--step-size", "3"]
    first = [*train, "--epochs", "4", "--checkpoint-every", "3", "--auto-resume"]
    assert main(first) == 0
    out = capsys.readouterr().out
    assert "4 epochs, last loss" in out and "best epoch" in out and str(checkpoint) in out
    # One worker goes on with both parts.
    assert main([*train, "--workers", "1", "--epochs", "6", "--resume", "--quiet"]) == 0
    assert "6 epochs, last loss" in capsys.readouterr().out
    metrics = read_metrics(report)
    assert [m["epoch"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [m["lr"] for m in metrics] == [0.01] * 3 + [0.005] * 3
    assert (report / "report.png").exists() and min(metrics[0]["sent_bytes"]) > 0
    assert [len(m["sent_bytes"]) for m in metrics] == [2] * 6
    assert [len(m["memory_bytes"]) for m in metrics] == [2] * 4 + [1] * 2
    settings = json.loads((report / "config.json").read_text())
    assert (settings["workers"], settings["num_parts"]) == (1, 2)
    # One process can use what two workers trained.
    model = build_model("gat", 8, 4, 3, heads=2)
    state = load_checkpoint(checkpoint, model, weights="best").state
    assert state["epoch"] == 6 and state["extra"]["model"]["heads"] == 2
    # So can one that has plain PyG alone.
    pyg = state["extra"]["pyg"]
    plain = getattr(torch_geometric.nn, pyg["name"])(**pyg["arguments"])
    best = "extra/best/"
    saved = load_file(checkpoint).items()
    plain.load_state_dict({k.removeprefix(best): v for k, v in saved if k.startswith(best)})
    data = pyg_sar.partition.merge_partitions(parts)
    outputs = [m.eval()(data.x, data.edge_index) for m in (plain, model)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    scores = outputs[0][data.val_mask].argmax(1) == data.y[data.val_mask]
    assert float(scores.double().mean()) == pytest.approx(state["best"]["val_accuracy"], abs=1e-9)
    # The file of two parts goes on in one.
    other = ["--parts", f"{parts}1", "--epochs", "8", "--resume", "--quiet"]
    assert main([*train, *other]) == 0
    assert "8 epochs, last loss" in capsys.readouterr().out
    assert [len(m["sent_bytes"]) for m in read_metrics(report)] == [2] * 6 + [1] * 2
    # A mistake that only the workers can find: one line, exit code 2.
    error = usage_error(capsys, *train, *other, "--hidden", "6")
    assert "another model: hidden=4 is now 6; give the same model" in error


def test_train_explains_mistakes_in_one_line(parts, tmp_path, capsys, monkeypatch):
    train = ["train", "--parts", parts, *SMALL]
    for option, *texts in (
        ("--workers 0", "--workers 0: the folder", "start 1 to 2 workers"),
        ("--workers 3", "--workers 3: the folder", "start 1 to 2 workers"),
        ("--memory=2?apples", "--memory='2?apples' must be a number of bytes", "'2GiB'"),
        (f"--store {tmp_path}/no/s", "--store", "no such folder"),
        (f"--parts {tmp_path}", "holds no partition"),
        (f"--parts {__file__}", f"'{__file__}' holds no partition"),
        ("--lr -1", "'lr' to be a positive number"),
        ("--epoch 3", "--epoch: there is no such option; did you mean 'epochs'"),
        ("--resume", "file of --checkpoint"),
        ("--auto-resume", "file of --checkpoint"),
        (f"--checkpoint {tmp_path}", f"--checkpoint '{tmp_path}' is a folder"),
        (f"--checkpoint {tmp_path}/no/c", "no such folder"),
        ("--report=", "--report '' names no folder"),
        ("--model graphsage", "a model to be one of gat, gatv2", "(got 'graphsage')"),
        (
            "--labels 0.5 --loss mse",
            "--labels 0.5 shows classes to the model, which --loss mse has none of",
        ),
        ("--sampler neighbor --mfg on", "--sampler neighbor goes without --mfg and --labels"),
        ("--sampler neighbor --labels 0.5", "--sampler neighbor goes without --mfg and --labels"),
        ("--num-neighbors 3", "--num-neighbors 3 means nothing without --sampler neighbor"),
        ("--batch-size 0", "--batch-size 0 means nothing without --sampler neighbor"),
        ("--checkpoint-every 5", "--checkpoint-every 5 means nothing without --checkpoint FILE"),
        ("--measure-every 2", "--measure-every 2 means nothing without --report DIR"),
    ):
        error = usage_error(capsys, *train, *option.split())
        assert all(text in error for text in texts), (option, error)
    for options, text in (
        ("--prefetch 2", "argument --prefetch: invalid choice: 2 (choose from 0, 1)"),
        ("--epochs x", "argument --epochs: invalid int value: 'x'"),
    ):
        with pytest.raises(SystemExit):
            main([*train, *options.split()])
        error = capsys.readouterr().err
        assert error == f"pyg-sar: error: {text} (pyg-sar train --help)\n"
    run = usage_error(capsys, "run", "--epochs", "3", "script.py")
    assert "--epochs: there is no such option;" in run and "script go after its name" in run
    predict = ["predict", "--checkpoint", "run.ckpt", "--parts", str(tmp_path), "--out", "out.npy"]
    assert "--model gcn: the checkpoint names" in usage_error(capsys, *predict, "--model", "gcn")
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE" in usage_error(capsys, *train)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "leave it out" in usage_error(capsys, *train, "--workers", "1")
    monkeypatch.setenv("RANK", "5")
    assert "RANK=5 must be between 0 and 0" in usage_error(capsys, *train)


# train: options, metrics, models of one's own #################################

NET = """
import torch
from torch_geometric.nn import GraphConv


class Net(torch.nn.Module):
    def __init__(self, data):
        super().__init__()
        columns = 4 if data.y.dim() == 1 else data.y.size(1)
        columns = 1 if data.y.dim() == 1 and data.y.is_floating_point() else columns
        self.first = GraphConv(data.num_features, 8).double()
        self.last = GraphConv(8, columns).double()

    def forward(self, x, edge_index, edge_weight):
        return self.last(self.first(x, edge_index, edge_weight).tanh(), edge_index, edge_weight)
"""


def graph_of(kind: str) -> Data:
    """A graph in float64 with weights, whose targets are classes, labels or numbers."""
    data = load_graph("synthetic:nodes=200,degree=6,features=8,classes=4", seed=3)
    data.x = data.x.double()
    draw = torch.Generator().manual_seed(0)
    data.edge_weight = torch.rand(data.num_edges, dtype=torch.float64, generator=draw)
    values = data.x @ torch.randn(8, 3, dtype=torch.float64, generator=draw)
    if kind == "labels":
        data.y = (values > 0).long()
    elif kind == "yes or no":
        data.y = (values[:, 0] > 0).long()
    elif kind == "numbers":
        data.y = values[:, 0]
    return data


@pytest.mark.parametrize(
    ("kind", "loss", "metric"),
    [
        ("classes", "cross_entropy", "auc"),
        ("classes", "cross_entropy", "f1"),
        ("labels", "bce", "ap"),
        ("yes or no", "bce", "auc"),
        ("numbers", "mse", "r2"),
        ("numbers", "mae", "mae"),
    ],
)
def test_own_models_and_metrics_are_those_of_one_process(kind, loss, metric, tmp_path):
    """``pyg-sar train`` with a model in a file, against a loop of PyTorch and torchmetrics."""
    functional = pytest.importorskip("torchmetrics").functional
    data = graph_of(kind)
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")
    (tmp_path / "net.py").write_text(NET)
    model = f"{tmp_path}/net.py:Net"
    options = {"parts": tmp_path / "parts", "model": model, "args": ["x", "edge_index"]}
    options["args"].append("edge_weight")
    options |= {"loss": loss, "metric": metric, "epochs": 6, "report": tmp_path / "report"}
    options |= {"lr": 0.05, "patience": 2, "quiet": True, "weight-decay": 0}
    (tmp_path / "run.json").write_text(json.dumps(options, default=str))
    assert main(["train", "--config", str(tmp_path / "run.json")]) == 0
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())

    torch.manual_seed(0)
    data.y = y = data.y if kind == "classes" else data.y.double()
    net = imported_model(model, data)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    losses = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "mae": F.l1_loss}
    losses["bce"] = F.binary_cross_entropy_with_logits
    measures = {
        "auc": lambda p, t: functional.auroc(p, t.long(), **task),
        "f1": lambda p, t: functional.f1_score(p, t.long(), average="macro", **task),
        "ap": lambda p, t: functional.average_precision(p, t.long(), **task),
        "r2": lambda p, t: 1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum(),
        "mae": lambda p, t: (p - t).abs().mean(),
    }
    task = {"classes": {"task": "multiclass", "num_classes": 4}, "yes or no": {"task": "binary"}}
    task = task.get(kind, {"task": "multilabel", "num_labels": 3})
    scale = {"classes": lambda p: p.softmax(1), "numbers": lambda p: p}
    scale = scale.get(kind, lambda p: p.sigmoid())

    def rows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = net(data.x, data.edge_index, data.edge_weight)[mask]
        return (out if kind in ("classes", "labels") else out.squeeze(1)), y[mask]

    expected: list[tuple[float, dict[str, float]]] = []
    for _ in range(6):
        optimizer.zero_grad()
        losses[loss](*rows(data.train_mask)).backward()
        optimizer.step()
        with torch.no_grad():
            scores = {}
            for split in ("train", "val", "test"):
                pred, target = rows(data[f"{split}_mask"])
                scores[f"{split}_{metric}"] = float(measures[metric](scale(pred), target))
        expected.append(((-1 if metric == "mae" else 1) * scores[f"val_{metric}"], scores))
    for line, (_, scores) in zip(read_metrics(tmp_path / "report"), expected, strict=False):
        tolerance = {"rel": 1e-5} if metric in ("auc", "f1", "ap") else {"rel": 1e-10}
        assert {name: line[name] for name in scores} == pytest.approx(scores, **tolerance)
    done = summary["epochs"]
    best = max(range(done), key=lambda epoch: (expected[epoch][0], -epoch))
    assert summary["best_epoch"] == best + 1
    assert summary["stopped_early"] == (done < 6)
    assert done == 6 or done - summary["best_epoch"] == 2


def test_metrics_that_do_not_fit(tmp_path, capsys, monkeypatch):
    for kind in ("classes", "labels", "numbers"):
        pyg_sar.write_partitions(graph_of(kind), 1, tmp_path / kind)
    (tmp_path / "net.py").write_text(NET)
    own = f"--model {tmp_path}/net.py"
    for kind, options, *texts in (
        ("numbers", "--model gcn", "'data.y' to hold one integer class per node", "torch.float64"),
        ("numbers", "--model gcn", "(--loss bce; of numbers mse or mae)"),
        (
            "classes",
            "--metric r2",
            "--metric r2 does not go with --loss cross_entropy: give --loss mse or mae",
        ),
        ("numbers", "--metric auc --loss mse", "--metric auc does not go with --loss mse"),
        (
            "classes",
            f"--loss bce {own}:Net --args x,edge_index,edge_weight",
            "--loss bce takes targets of 0 and 1; data.y holds",
        ),
        ("classes", f"{own}:Net --hidden 3", "--hidden 3 is of the models gat"),
        ("classes", f"{own}:Nat", "has no function or class 'Nat'"),
        ("classes", f"{own}:Net --labels 0.5", "--labels 0.5 is of the models"),
        ("classes", "--seeds 2 --checkpoint c", "--seeds 2 goes without --checkpoint"),
    ):
        train = ["train", "--parts", str(tmp_path / kind), "--quiet", "--epochs", "1"]
        error = usage_error(capsys, *train, *options.split())
        assert all(text in error for text in texts), (options, error)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pyg_sar\[metrics\]'"):
        _metrics(RunConfig(parts="p", metric="f1"), 4)


def test_options_in_a_file(parts, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"parts: {parts}1\nmodel: sage\nhidden: 4\nepochs: 3\nlr: 1e-3\nmfg: off\nquiet: yes\n"
        f"report: {tmp_path}/r\nclip-norm: null\noverwrite: false\n"
    )
    assert main(["train", "--config", str(file), "--epochs", "2"]) == 0
    assert "2 epochs, last loss" in capsys.readouterr().out
    settings = json.loads((tmp_path / "r" / "config.json").read_text())
    assert settings["train"]["lr"] == 1e-3 and settings["model"]["name"] == "sage"
    for text, message in (
        ("hiden: 4\n", "hiden: there is no such option; did you mean 'hidden'"),
        ("config: a\n", "config: there is no such option; pyg-sar train --help lists them"),
        ("- 4\n", "expected options by name (got list)"),
        ("quiet: 3\n", "quiet: 3 is no value of --quiet"),
        ("epochs: true\n", "epochs: True is no value of --epochs"),
        ("a: [\n", "run.yaml: while parsing"),
        ("lr: 1\nlr: 2\n", "run.yaml: lr: given twice"),
        ("clip_norm: 1\nclip-norm: 2\n", "clip_norm: given twice"),
    ):
        file.write_text(text)
        assert message in usage_error(capsys, "train", "--config", str(file))
    twice = usage_error(capsys, "train", f"--config={file}", "--config", str(file))
    assert f"--config is given 2 times ({file}, {file}): give one file" in twice
    other = tmp_path / "run.json"
    for text, message in (('{"lr": 1, "lr": 2}', "lr: given twice"), ("{", "run.json: Expecting")):
        other.write_text(text)
        assert message in usage_error(capsys, "train", "--config", str(other))
    assert "No such file" in usage_error(capsys, "train", "--config", str(tmp_path / "no.json"))
    (tmp_path / "o.toml").write_text("")
    error = usage_error(capsys, "train", "--config", str(tmp_path / "o.toml"))
    assert "expected a file .json, .yaml or .yml" in error


def test_seeds(parts, tmp_path, capsys, no_picture, in_this_process):
    train = ["train", "--parts", parts, *SMALL, "--quiet", "--epochs", "2"]
    several = [*train, "--seed", "3", "--seeds", "2", "--report", str(tmp_path / "r")]
    assert main(several) == 0
    out = capsys.readouterr().out
    assert "seed 3: 2 epochs" in out and "seed 4: 2 epochs" in out and "test_accuracy" in out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["seeds"] == [3, 4]
    values = [best["test_accuracy"] for best in summary["best"]]
    assert summary["mean"]["test_accuracy"] == pytest.approx(sum(values) / 2, abs=1e-12)
    spread = float(torch.tensor(values, dtype=torch.float64).std())
    assert summary["spread"]["test_accuracy"] == pytest.approx(spread, abs=1e-12)
    assert main([*train, "--seed", "4", "--report", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    one, same = (read_metrics(tmp_path / folder) for folder in ("one", "r/seed-4"))
    assert [m["loss"] for m in one] == [m["loss"] for m in same]
    assert "'summary.json' of another run is there" in usage_error(capsys, *several)
    assert main([*several, "--overwrite"]) == 0


def test_tensorboard(parts, tmp_path, monkeypatch, no_picture, in_this_process):
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "tb") and purge_step == 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    train = ["train", "--parts", f"{parts}1", *SMALL, "--quiet", "--epochs", "2"]
    train += ["--report", str(tmp_path / "r"), "--tensorboard", str(tmp_path / "tb")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    fake = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    assert main(train) == 0
    lines = read_metrics(tmp_path / "r")
    assert ("loss", lines[0]["loss"], 1) in written and written[-1][0] == "closed"
    assert ("val_accuracy", lines[1]["val_accuracy"], 2) in written


def test_a_checkpoint_is_not_overwritten_by_another_run(parts, tmp_path, capfd, in_this_process):
    """One of many epochs was replaced by one of few, without a word."""
    checkpoint, other = tmp_path / "c", tmp_path / "other"
    train = ["train", "--parts", f"{parts}1", *SMALL, "--quiet", "--checkpoint", str(checkpoint)]
    assert main([*train, "--epochs", "5"]) == 0
    assert "resumed" not in capfd.readouterr().err
    before = checkpoint.read_bytes()
    assert main([*train, "--epochs", "2", "--checkpoint", str(other)]) == 0
    capfd.readouterr()
    report = ["--report", str(tmp_path / "report")]
    for more in ([], ["--resume", str(other)], report, report):
        assert main([*train, "--epochs", "3", *more]) == cli.EXIT_USAGE
        error = capfd.readouterr().err.splitlines()[-1]
        assert "of another run; go on from it (trainer.resume, --resume)" in error
        assert "--overwrite" in error and checkpoint.read_bytes() == before
    for more in (["--resume"], ["--auto-resume"], ["--auto-resume", "--resume", "none"]):
        checkpoint.write_bytes(before)
        assert main([*train, "--epochs", "6", *more]) == 0
        found = capfd.readouterr()
        assert f"resumed from {checkpoint} after epoch 5 of 6\n" in found.err
        assert load_checkpoint(checkpoint).state["epoch"] == 6
    error = usage_error(capfd, *train, "--epochs", "4", "--auto-resume")
    assert "has 6 epochs, --epochs is 4: nothing to train" in error
    assert main([*train, "--epochs", "3", "--overwrite"]) == 0
    assert load_checkpoint(checkpoint).state["epoch"] == 3


def test_graphs_whose_features_or_labels_are_no_numbers(tmp_path, capsys):
    for name, change, command, message in (
        ("x", {"x": ["a", "b", "c"]}, "partition", "Expected 'x' to hold numbers, a row per node"),
        ("y", {"y": ["a", "b", "c"]}, "partition", "'y' (list) can't be stored: rows that"),
        ("short", {"y": torch.tensor([0, 1])}, "train", "Expected 'data.y' to have a row for each"),
        ("bool", {"y": torch.ones(3).bool()}, "train", "[num_nodes, 1] (got torch.bool [3])"),
        ("wide", {"y": torch.ones(3, 2).long()}, "train", "(--loss bce; of numbers mse or mae)"),
        ("complex", {"x": torch.ones(3, 2) * 1j}, "train", "x holds complex numbers (torch.comp"),
        ("complex", {"x": torch.ones(3, 2) * 1j}, "verify", "x holds complex numbers (torch.comp"),
        ("none", {"x": None}, "plan", "The graph has no node features"),
    ):
        mask = torch.tensor([True, True, False])
        graph = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
        graph.y, graph.train_mask = torch.tensor([0, 1, 0]), mask
        for key, value in change.items():
            graph[key] = value
        torch.save(graph.to_dict(), tmp_path / f"{name}.pt")
        out = ["--out", str(tmp_path / name)]
        cut = ["partition", str(tmp_path / f"{name}.pt"), "--parts", "1", *out, "--quiet"]
        if command == "train":
            assert main(cut) == 0
            capsys.readouterr()
            cut = ["train", "--parts", str(tmp_path / name), *SMALL, "--quiet"]
        elif command != "partition":
            cut = [command, cut[1]]
        assert message in usage_error(capsys, *cut)


def test_torchrun_with_fewer_workers_than_parts(parts, tmp_path, capsys, in_this_process):
    checkpoint = str(tmp_path / "c")
    train = ["train", "--parts", parts, *SMALL, "--checkpoint", checkpoint, "--auto-resume"]
    assert main([*train, "--epochs", "2"]) == 0
    assert main([*train, "--epochs", "3"]) == 0
    captured = capsys.readouterr().out
    assert captured.count("2 epochs, last loss") == captured.count("3 epochs, last loss") == 1
    assert load_checkpoint(checkpoint).world_size == 2
    # A mistake that a part meets.
    error = usage_error(capsys, *train, "--epochs", "4", "--hidden", "6")
    assert "another model: hidden=4 is now 6; give the same model" in error


def test_what_parts_are_hosted_with(parts, tmp_path, monkeypatch):
    calls = []

    def launched(fn, workers, config, **options):
        calls.append((workers, options))
        return [train_seeds(replace(config, parts=f"{parts}1"))]

    monkeypatch.setattr(start, "launch", launched)
    train = ["train", "--parts", parts, *SMALL, "--quiet", "--epochs", "1"]
    assert main(train) == 0
    assert main([*train, "--workers", "1"]) == 0
    store = str(tmp_path)
    assert main([*train, "--memory", "1.5GiB", "--store", store, "--backend", "gloo"]) == 0
    common = {"backend": None, "timeout": 1800.0}
    assert calls == [
        (2, common),
        (1, {**common, "parts": 2}),
        (
            2,
            {"backend": "gloo", "timeout": 1800.0, "parts": 2, "memory": 3 * 2**29, "store": store},
        ),
    ]


def config_of(parts: str, **changes) -> RunConfig:
    settings = {"model": ModelConfig(hidden=4, heads=2), "train": TrainConfig(epochs=2)}
    return RunConfig(parts=f"{parts}1", progress="none", **(settings | changes))


def test_auto_resume_begins_anew_before_the_first_checkpoint(parts, tmp_path, no_picture):
    """The report of a run that was killed by then is replaced, others are not."""
    report = tmp_path / "r"
    config = config_of(parts, checkpoint=str(tmp_path / "c"), auto_resume=True, report=str(report))
    first = train_worker(config)
    (tmp_path / "c").unlink()
    with pytest.raises(ReportError, match="holds the report of another run"):
        train_worker(config)  # It had come to its end.
    (report / "summary.json").unlink()
    other = replace(config, train=replace(config.train, lr=0.5))
    for refused in (other, replace(config, auto_resume=False)):
        with pytest.raises(ReportError, match="holds the report of another run"):
            train_worker(refused)
    assert train_worker(config).losses == first.losses
    assert len((report / "metrics.jsonl").read_text().splitlines()) == first.epochs


def test_features_labels_and_weights_of_other_graphs(tmp_path):
    def losses(change, name="gcn", **train):
        data = load_graph(GRAPH)
        change(data)
        root = tmp_path / f"p{len(list(tmp_path.iterdir()))}"
        pyg_sar.write_partitions(data, 1, f"{root}1")
        settings = {"train": TrainConfig(epochs=1, **train)} if train else {}
        return train_worker(config_of(str(root), model=ModelConfig(name=name), **settings)).losses

    def weigh(data):
        data.edge_weight = torch.linspace(0.1, 2, data.num_edges).view(-1, 1)

    def wide(data):
        weigh(data)
        data.x, data.edge_weight = data.x.double(), data.edge_weight.double()

    def sparse(data):
        data.x = data.x.to_sparse_csr()

    nothing = lambda data: None  # noqa: E731
    dense, weighted = losses(nothing), losses(weigh)
    assert weighted != dense == losses(sparse) and losses(wide) == weighted
    assert losses(nothing, "sage") == losses(weigh, "sage")
    for change, text in (
        (lambda data: data.__delattr__("x"), r"no node features.*\(got NoneType\)"),
        (lambda data: data.y.fill_(-1), "data.y holds no class"),
        (
            lambda data: data.y.__setitem__(3, 10**12),
            r"label 1000000000000 in a graph of 200 nodes",
        ),
        (lambda data: data.__delattr__("y"), r"data\.y is missing"),
    ):
        with pytest.raises(ValueError, match=text):
            losses(change)
    with pytest.raises(ValueError, match="split 3: data.train_mask has one dimension"):
        losses(nothing, split=3)


# Errors ######################################################################


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("bad"), 2, "bad"),
        (FileNotFoundError(2, "no file", "x"), 2, "no file: 'x'"),
        (ZeroDivisionError("boo"), 1, "ZeroDivisionError: boo (--debug shows where)"),
        (LostWorkerError("Rank 1 was lost", rank=1), 1, "Rank 1 was lost"),
        (
            WorkerError("Rank 1 failed: PartitionError: bad part\n\nTraceback", rank=1),
            2,
            "bad part",
        ),
        (
            WorkerError("Rank 1 failed: DivergedError: nan\n\nTraceback", rank=1),
            1,
            "nan",
        ),
        (
            WorkerError("Rank 1 failed: KeyError: 'a'\n\nTraceback", rank=1),
            1,
            "Rank 1 failed: KeyError: 'a' (--debug shows where)",
        ),
        (KeyboardInterrupt(), 130, "nothing is kept; the same command begins anew"),
        (KeyboardInterrupt("'a' holds all"), 130, "'a' holds all"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(error, code, text, capsys, monkeypatch):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "run_demo", fail)
    assert main(["demo"]) == code
    captured = capsys.readouterr().err
    assert captured == ("Interrupted: " if code == 130 else "pyg-sar: error: ") + f"{text}\n"
    if code != 130:
        assert main(["demo", "--debug"]) == code
        assert "Traceback" in capsys.readouterr().err


def test_a_lost_worker_of_a_training_says_how_to_go_on(parts, tmp_path, capsys, monkeypatch):
    checkpoint = tmp_path / "c"
    train_worker(config_of(parts, checkpoint=str(checkpoint)))

    def lose(*given):
        raise LostWorkerError(f"Rank 1 was lost: it was killed. {RESUME}", rank=1)

    monkeypatch.setattr(cli, "on_workers", lose)
    assert main(["train", "--parts", parts, "--checkpoint", str(checkpoint), "--resume"]) == 1
    held = f"'{checkpoint}' holds the state after epoch 2; --resume goes on from there"
    assert capsys.readouterr().err == f"pyg-sar: error: Rank 1 was lost: it was killed; {held}\n"


def test_the_rank_that_lives_speaks(capsys, monkeypatch):
    for lost, rank, speaks in ((2, 0, True), (2, 1, False), (0, 1, True), (0, 2, False)):
        monkeypatch.setenv("RANK", str(rank))
        cli._explain(LostWorkerError(f"Rank {lost} was lost", rank=lost), debug=False)
        assert bool(capsys.readouterr().err) == speaks


# torchrun ####################################################################


def torchrun(*arguments: str, workers: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(workers), "-m", "pyg_sar", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": ""}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


def spoken(arguments: Sequence[str]) -> str:
    """What the command prints in a worker that has torchrun's variables."""
    finalize()
    with redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    return printed.getvalue()


def test_under_torchrun_rank_0_speaks_and_the_curve_is_the_same(parts):
    """By torchrun with ``--all``."""
    train = ("train", "--parts", parts, *SMALL, "--epochs", "2", "--model", "sage")
    train = (*train, "--dropout", "0")
    if everything():
        ran = torchrun(*train, workers=2)
        assert ran.returncode == 0, ran.stderr
        out = ran.stdout
    else:
        out, silent = pyg_sar.launch(spoken, 2, train, timeout=60.0)
        assert silent == ""
    assert out.count("2 epochs, last loss") == 1
    assert out.count("epoch    2") == 1
    found = re.search(r"last loss (\d\.\d+)", out)
    alone = train_worker(config_of(parts, model=ModelConfig(name="sage", hidden=4, dropout=0.0)))
    assert found is not None and float(found[1]) == pytest.approx(alone.losses[-1], abs=1e-5)


def test_under_torchrun_a_mistake_is_one_line(parts):
    ran = torchrun("train", "--parts", f"{parts}1", *SMALL, workers=2)
    assert ran.returncode != 0
    lines = [line for line in ran.stderr.splitlines() if line.startswith("pyg-sar: error: ")]
    assert len(lines) == 1 and "has 1 part" in lines[0], ran.stderr
    assert "exitcode  : 2" in ran.stderr
    assert "PartitionError: " in ran.stderr.partition("Root Cause")[2]  # by torchrun's agent


# demo ########################################################################


def test_demo_shows_equal_losses_and_expected_bytes(tmp_path, capsys):
    arguments = ["--nodes", "300", "--workers", "2", "--epochs", "3", "--out", str(tmp_path / "d")]
    assert main(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    assert "largest difference" in out and "the same" in out
    assert "parameter gradients): equal" in out and "NOT" not in out
    assert out.count("expected") >= 2 and "one process" in out and "worker 1" in out
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["demo.png"]


def test_demo_fails_where_losses_or_bytes_differ(capsys):
    assert demo._show_losses([1.0, 0.5], [1.0, 0.500009])
    assert not demo._show_losses([1.0, 0.5], [1.0, 0.50002])
    assert "NOT the same" in capsys.readouterr().out
    config, memory = DemoConfig(epochs=1), {"base_memory": 1, "peak_memory": 2}
    expected = demo._expected([10], config)[0]
    less = expected | {"fetch": expected["fetch"] - 1}
    for traffic, equal in ((expected, True), (less, False)):
        run = demo.DemoRun(losses=[1.0], traffic=traffic, sent=sum(traffic.values()), **memory)
        assert demo._show_bytes([run], [10], config) == equal
    assert "NOT equal" in capsys.readouterr().out


# Interrupts ##################################################################


@pytest.mark.parametrize(
    ("name", "command", "said"),
    [
        (
            "write_partitions",
            "partition {1} --parts 2 --out {0}/a",
            "nothing is kept; the same command",
        ),
        ("write_partitions", "partition {1} --parts 2 --out {0}/b --memory 1GiB", "the same call"),
        ("on_workers", "train --parts {0}", "nothing is kept of this run (--checkpoint FILE"),
        ("on_workers", "predict --checkpoint c --parts p --out {0}/p.npy", "nothing is kept; the"),
        ("verify", "verify {1}", "nothing is kept; the"),
    ],
)
def test_ctrl_c_says_what_is_kept(name, command, said, tmp_path, capsys, monkeypatch):
    def interrupt(*given: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def partition(*given: Any, progress: Any, **options: Any) -> None:
        def at_the_second(line: str) -> None:
            if line.startswith("writing part 2"):
                interrupt()

        write_partitions(*given, progress=at_the_second, **options)

    write_partitions = pyg_sar.write_partitions
    monkeypatch.setattr(cli, name, partition if name == "write_partitions" else interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(command.format(tmp_path, GRAPH).split()) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    text = capsys.readouterr().err.splitlines()[-1]
    assert text.startswith("Interrupted: ") and said in text
    kept = [path.name for path in tmp_path.iterdir()]
    assert kept == ([".b.unfinished"] if "--memory" in command else [])
    if kept:
        left = tmp_path / ".b.unfinished"
        assert len(list((left / "parts").iterdir())) == 1 and not (left / "scratch").exists()


# Numbers and nouns ###########################################################


def test_one_of_a_kind_is_singular(tmp_path, capsys):
    root, report = str(tmp_path / "p"), str(tmp_path / "r")
    for command in (
        f"partition {GRAPH} --parts 1 --out {root} --memory 1GiB",
        f"train --parts {root} --workers 1 --epochs 1 --model gcn --memory 1GiB --report {report}",
        f"verify {GRAPH} --workers 1 --model gcn",
    ):
        assert main(command.split()) == 0, command
    text = "".join(capsys.readouterr())
    assert "1 part on 1 worker (1)" in text and "in 1 part\n" in text and "1 epoch," in text
    assert "1 worker against one process" in text
    assert not re.search(r"\b1 (?!pass\b)\w+s\b|\w\(e?s\)", text)


def test_numbers_with_their_nouns():
    said = [counted(n, noun) for n in (1, 0, 1200) for noun in ("parts", "classes", "own passes")]
    assert said[:3] == ["1 part", "1 class", "1 own pass"]
    assert said[3:] == ["0 parts", "0 classes", "0 own passes", "1,200 parts", "1,200 classes",
                        "1,200 own passes"]  # fmt: skip
