"""The training loop: against a hand-written PyG loop, and workers against one process."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from combinations import everything
from small_graphs import CLASSES, FEATURES, small_graph
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv

import pyg_sar
from pyg_sar.errors import DivergedError
from pyg_sar.tools.models import build_model, stock_model
from pyg_sar.train import callbacks as callbacks_module
from pyg_sar.train.arguments import make_schedulers, step
from pyg_sar.train.callbacks import LineProgress, TqdmProgress
from pyg_sar.train.config import EpochRecord, TrainConfig, TrainResult
from pyg_sar.train.targets import find_targets
from pyg_sar.train.trainer import Callback, Trainer
from pyg_sar.usage import MODELS, NORMS

DROPOUT_FREE = TrainConfig(epochs=4, lr=0.02)


def make_model(name: str = "gcn", *, norm: str = "none", dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return build_model(name, FEATURES, 8, CLASSES, layers=3, heads=2, norm=norm, dropout=dropout)


def labelled(data: Data, mask: Tensor) -> Tensor:
    return mask & (data.y >= 0)


# Models ######################################################################


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", NORMS)
def test_models_are_those_of_pyg(name, norm):
    data = small_graph()
    stock = stock_model(name, FEATURES, 8, CLASSES, layers=3, heads=2, norm=norm, dropout=0.4)
    arguments = json.loads(json.dumps(stock.arguments))
    plain = getattr(torch_geometric.nn, stock.name)(**arguments).eval()
    model = build_model(name, FEATURES, 8, CLASSES, layers=3, heads=2, norm=norm, dropout=0.4)
    plain.load_state_dict(model.eval().state_dict())
    assert type(model) is type(plain)
    out = model(data.x, data.edge_index)
    assert out.shape == (data.num_nodes, CLASSES)
    assert torch.equal(out, plain(data.x, data.edge_index))


def test_biases_before_a_batch_norm_stay_zero():
    for name, frozen in (("gat", 2), ("gatv2", 2), ("sage", 2), ("gcn", 2), ("gin", 5)):
        model = build_model(name, FEATURES, 8, CLASSES, layers=3, heads=2, norm="batch")
        still = [p for p in model.parameters() if not p.requires_grad]
        assert len(still) == frozen and not any(p.any() for p in still), name
        # A gradient of theirs would be 0: what they add, the norm takes away.
        model.requires_grad_(True)
        data = small_graph(dtype=torch.float64)
        model.double()(data.x, data.edge_index).square().sum().backward()
        assert max(p.grad.abs().max() for p in still) < 1e-11


def test_gat_has_the_papers_shape():
    model = build_model("gat", 1433, 64, 7, dropout=0.6)
    first, last = model.convs
    assert isinstance(first, GATConv) and (first.heads, first.out_channels) == (8, 8)
    assert (last.heads, last.concat, last.in_channels, last.out_channels) == (8, False, 64, 7)
    assert first.dropout == model.dropout.p == 0.6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "gatt"}, "'name' to be one of"),
        ({"hidden": 0}, "'hidden' to be an integer of at least 1"),
        ({"hidden": 12}, "to be a multiple of heads=8"),
        ({"layers": 2.5}, "'layers' to be an integer of at least 1"),
        ({"dropout": 1.0}, r"'dropout' to be in \[0, 1\)"),
        ({"norm": "instance"}, "'norm' to be one of"),
    ],
)
def test_models_name_the_wrong_argument(changes, message):
    arguments = {"name": "gat", "in_channels": 4, "hidden": 8, "out_channels": 3} | changes
    with pytest.raises(ValueError, match=message):
        build_model(**arguments)


# Settings and schedules ######################################################


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("epochs", -1),
        ("lr", 0.0),
        ("lr", math.inf),
        ("optimizer", "lion"),
        ("weight_decay", -1e-4),
        ("schedule", "linear"),
        ("warmup", -1),
        ("step_size", 0),
        ("gamma", 1.5),
        ("label_smoothing", 1.0),
        ("clip_norm", 0.0),
        ("eval_every", 0),
        ("monitor", ""),
        ("monitor_mode", "up"),
        ("patience", 0),
        ("split", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("epochs", 2.5),
        ("epochs", "3"),
        ("eval_every", True),
        ("patience", 1.5),
        ("lr", "0.1"),
        ("lr", math.nan),
        ("gamma", None),
        ("weight_decay", math.inf),
        ("clip_norm", "1"),
        ("monitor", 3),
    ],
)
def test_config_names_the_wrong_setting(setting, value):
    with pytest.raises(ValueError, match=f"Expected '{setting}' to be"):
        TrainConfig(**{setting: value})


def rates(config: TrainConfig, values: list[float] = []) -> list[float]:  # noqa: B006
    """The learning rates of each epoch, from 1, where ``values`` are the validation values."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedulers = make_schedulers(config, optimizer, True)
    found = []
    for epoch in range(config.epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            step(scheduler, values[epoch] if values else None)
    return found


def test_schedules_follow_their_formulas():
    cosine = [0.5 * (1 + math.cos(math.pi * epoch / 10)) for epoch in range(10)]
    ramp = [0.25, 0.5, 0.75, *[1.0] * 7]
    config = TrainConfig(epochs=10, schedule="cosine")
    assert rates(config) == pytest.approx(cosine, rel=1e-12)
    both = rates(replace(config, warmup=3))
    assert both == pytest.approx([a * b for a, b in zip(cosine, ramp, strict=True)], rel=1e-12)
    steps = TrainConfig(epochs=7, schedule="step", step_size=3, gamma=0.5)
    assert rates(steps) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    assert rates(TrainConfig(epochs=4, warmup=3)) == pytest.approx(ramp[:4], rel=1e-12)


def test_a_plateau_waits():
    config = TrainConfig(epochs=12, schedule="plateau", step_size=2, gamma=0.5)
    values = [0.1, 0.3, 0.3, 0.2, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert rates(config, values) == [1, 1, 1, 1, *[0.5] * 3, 0.25, 0.25, 0.125, 0.125, 0.0625]


# One process #################################################################


def plain_losses(data: Data, model: nn.Module, config: TrainConfig) -> list[float]:
    """What a PyG user writes: the oracle."""
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[config.optimizer](
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay
    )
    schedulers, losses = make_schedulers(config, optimizer, True), []
    mask = labelled(data, data.train_mask)
    torch.manual_seed(config.seed)
    for _ in range(config.epochs):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        smoothing = config.label_smoothing
        loss = F.cross_entropy(out[mask], data.y[mask], label_smoothing=smoothing)
        loss.backward()
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "sgd", "lr": 0.5, "schedule": "step", "step_size": 2},
        {"optimizer": "adamw", "schedule": "cosine", "warmup": 2, "label_smoothing": 0.1},
        {"clip_norm": 0.05, "eval_every": 3},
    ],
)
def test_trainer_is_the_loop_that_a_pyg_user_writes(changes):
    config = replace(TrainConfig(epochs=6), **changes)
    data = small_graph(dtype=torch.float64)
    trained = make_model(norm="batch", dropout=0.3).double()
    by_hand = make_model(norm="batch", dropout=0.3).double()
    # Dropout in training makes this also a test of the seed; evaluation draws nothing.
    result = Trainer(trained, data, replace(config, restore_best=False)).fit()
    assert result.losses == pytest.approx(plain_losses(data, by_hand, config), rel=1e-12)
    for a, b in zip(trained.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_evaluation_counts_labelled_nodes_only():
    data, model = small_graph(), make_model(dropout=0.5)
    scores = Trainer(model, data, DROPOUT_FREE).evaluate()
    assert not model.training
    out = model(data.x, data.edge_index)
    for split in ("train", "val", "test"):
        mask = labelled(data, data[f"{split}_mask"])
        right = (out.argmax(1) == data.y)[mask].float().mean().item()
        loss = F.cross_entropy(out[mask].double(), data.y[mask]).item()
        assert scores[f"{split}_accuracy"] == pytest.approx(right, abs=1e-7)
        assert scores[f"{split}_loss"] == pytest.approx(loss, rel=1e-6)


class Recorder(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[EpochRecord] = []
        self.events: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        self.events.append("start")

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        self.records.append(record)

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        self.events.append("end")

    def close(self) -> None:
        self.events.append("close")


def test_early_stop_restores_the_best_weights():
    recorder = Recorder()
    model, data = make_model(), small_graph()
    config = TrainConfig(epochs=500, lr=0.3, patience=4, eval_every=2, monitor="loss")
    trainer = Trainer(model, data, config, callbacks=[recorder])
    result = trainer.fit()
    evaluated = [r for r in recorder.records if r.scores is not None]
    assert [r.epoch for r in evaluated] == list(range(2, result.epochs + 1, 2))
    losses = [r.scores["val_loss"] for r in evaluated]
    best = losses.index(min(losses))
    assert result.stopped_early and result.epochs < 500
    assert len(losses) == best + 1 + config.patience
    assert result.best_epoch == evaluated[best].epoch
    assert trainer.evaluate() == result.best == evaluated[best].scores
    assert result.final == evaluated[-1].scores
    assert recorder.events == ["start", "end", "close"]


def test_plateau_follows_the_validation_value():
    recorder = Recorder()
    config = TrainConfig(epochs=40, lr=0.3, schedule="plateau", step_size=2, gamma=0.1)
    Trainer(make_model(), small_graph(), config, callbacks=[recorder]).fit()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    (plateau,) = make_schedulers(config, optimizer, True)
    for record in recorder.records:
        assert record.lr == optimizer.param_groups[0]["lr"]
        step(plateau, record.scores["val_accuracy"])
    assert recorder.records[-1].lr < 0.3


def test_the_last_epoch_is_evaluated_and_splits_may_be_missing():
    recorder, data = Recorder(), small_graph()
    del data.val_mask, data.test_mask
    config = TrainConfig(epochs=5, eval_every=3)
    result = Trainer(make_model(), data, config, callbacks=[recorder]).fit()
    assert [r.epoch for r in recorder.records if r.scores] == [3, 5]
    assert result.best["val_accuracy"] is None and result.best["test_loss"] is None
    assert result.best == result.final and result.best_epoch == 5


def test_columns_of_masks():
    data = small_graph(splits=3)
    for column in range(3):
        for split, mask in find_targets(data, column=column).masks.items():
            assert torch.equal(mask, labelled(data, data[f"{split}_mask"][:, column]))
    with pytest.raises(ValueError, match=r"split 3: data.train_mask has 3 splits"):
        find_targets(data, column=3)


def drop(name: str) -> Any:
    def change(data: Data) -> None:
        del data[name]

    return change


def put(name: str, value: Any) -> Any:
    def change(data: Data) -> None:
        data[name] = value(data)

    return change


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (drop("y"), {}, r"data\.y is missing"),
        (drop("train_mask"), {}, r"data\.train_mask is missing.*RandomNodeSplit"),
        (put("y", lambda d: d.y.float()), {}, r"'data\.y' to hold one integer class.*float32"),
        (put("y", lambda d: d.y.view(-1, 2)), {}, r"\[num_nodes, 1\] \(got torch.int64 \[45, 2\]"),
        (put("val_mask", lambda d: d.val_mask[1:]), {}, r"'data\.val_mask' to be bool of shape"),
        (put("train_mask", lambda d: d.train_mask & False), {}, "no labelled node"),
        (drop("val_mask"), {"patience": 3}, "need validation nodes"),
        (drop("val_mask"), {"schedule": "plateau"}, "need validation nodes"),
    ],
)
def test_unfit_data_is_named(change, config, message):
    data = small_graph()
    change(data)
    with pytest.raises(ValueError, match=message):
        Trainer(make_model(), data, TrainConfig(**config))


def test_a_heterogeneous_graph_is_refused_by_name():
    data = HeteroData({"paper": {"x": torch.ones(3, 2), "y": torch.arange(3)}})
    with pytest.raises(ValueError, match=r"data\.y by type, .* as in examples/hetero\.py"):
        Trainer(make_model(), data)


def test_unfit_models_are_named():
    data = small_graph()
    with pytest.raises(ValueError, match=r"scores for 2 classes, data.y holds labels up to 3"):
        Trainer(build_model("gcn", FEATURES, 8, 2), data, DROPOUT_FREE).fit()
    with pytest.raises(ValueError, match=r"scores of shape \[90, num_classes\]"):
        Trainer(make_model(), data, forward=lambda m, d: m(d.x, d.edge_index)[1:]).fit()


def test_a_diverged_loss_ends_the_training_and_closes_the_callbacks():
    recorder = Recorder()
    data = small_graph()
    data.x[0, 0] = math.inf
    trainer = Trainer(make_model(), data, DROPOUT_FREE, callbacks=[recorder])
    with pytest.raises(DivergedError, match=r"is nan in epoch 1: data\.x holds NaN or infinite"):
        trainer.fit()
    assert recorder.events == ["start", "close"]
    trainer = Trainer(make_model(), small_graph(), TrainConfig(lr=1e38, optimizer="sgd"))
    with pytest.raises(DivergedError, match=r"in epoch [23]; lower 'lr', or set 'clip_norm'"):
        trainer.fit()


def test_progress_shows_loss_and_accuracies(capsys):
    lines: list[str] = []
    callbacks = [TqdmProgress("gcn"), LineProgress(lines.append)]
    Trainer(make_model(), small_graph(), DROPOUT_FREE, callbacks=callbacks).fit()
    bar = capsys.readouterr().err
    assert "gcn: 100%" in bar and "4/4" in bar
    for text in (bar, lines[-1]):
        assert all(word in text for word in ("loss", "train", "val", "test"))
    assert len(lines) == 4 and lines[0].startswith("epoch    1")


def test_a_long_epoch_says_that_it_goes_on(monkeypatch):
    class Slow(Callback):
        def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
            time.sleep(0.15)

    before = threading.active_count()
    monkeypatch.setattr(callbacks_module, "LONG_EPOCH", 0.05)
    lines: list[str] = []
    Trainer(
        make_model(), small_graph(), DROPOUT_FREE, callbacks=[LineProgress(lines.append), Slow()]
    ).fit()
    assert any(re.fullmatch(r"epoch    2  \d+ s so far", line) for line in lines)
    assert sum("loss" in line for line in lines) == 4
    assert threading.active_count() == before


# Several workers #############################################################


CASES = [
    ("gat", "none", {}),
    ("gat", "batch", {"clip_norm": 0.1}),
    ("gatv2", "layer", {"optimizer": "sgd", "lr": 0.5}),
    ("sage", "batch", {"schedule": "cosine", "warmup": 1, "label_smoothing": 0.2}),
    ("gcn", "none", {"patience": 2, "lr": 0.5, "epochs": 12, "monitor": "loss"}),
    ("gin", "batch", {"schedule": "plateau", "step_size": 1, "lr": 0.05, "epochs": 8}),
]


def train_case(data: Data, name: str, norm: str, changes: dict[str, Any]) -> dict[str, Any]:
    recorder = Recorder()
    model = pyg_sar.distribute(make_model(name, norm=norm).double())
    config = replace(TrainConfig(epochs=3, split=1), **changes)
    result = Trainer(model, data, config, callbacks=[recorder]).fit()
    return {
        "result": result,
        "lrs": [record.lr for record in recorder.records],
        "norms": [record.grad_norm for record in recorder.records],
        "state": {k: v.clone() for k, v in model.state_dict().items()},
    }


def train_cases(parts: str) -> dict[str, Any]:
    data = pyg_sar.load_partition(parts)
    results = {f"{case[0]} {case[1]}": train_case(data, *case) for case in CASES}
    nodes = int((data.train_mask[:, 1] & (data.y >= 0)).to_local().sum())
    progress: list[str] = []
    Trainer(
        pyg_sar.distribute(make_model().double()),
        data,
        DROPOUT_FREE,
        callbacks=[LineProgress(progress.append)],
    ).fit()
    data.x = data.x.clone()
    data.x[0] = math.nan
    with pytest.raises(DivergedError, match="loss is nan in epoch 1"):
        train_case(data, "sage", "none", {})
    data.train_mask = data.train_mask.long()
    with pytest.raises(ValueError, match=r"'data.train_mask' to be bool of shape \[90\]"):
        train_case(data, "sage", "none", {})
    return results | {"lines": len(progress), "nodes": nodes}


def strip_time(result: TrainResult) -> TrainResult:
    return replace(result, seconds=0.0)


def test_workers_train_as_one_process_does(tmp_path):
    data = small_graph(dtype=torch.float64, splits=2)
    data.train_mask = data.train_mask[:, [1, 0]]
    data.train_mask[:, 1] &= torch.arange(data.num_nodes) % 3 > 0
    part = (torch.arange(data.num_nodes) ** 2) % 2
    part[(~data.train_mask[:, 1]).nonzero().view(-1)[::2]] = 2
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", method=part)
    parts = {} if everything() else {"parts": 3}
    workers = pyg_sar.launch(train_cases, 1 if parts else 3, str(tmp_path / "parts"), **parts)
    compare(data, workers)
    assert [w["nodes"] > 0 for w in workers] == [True, True, False]
    assert [w["lines"] for w in workers] == [4, 0, 0]


def compare(data: Data, workers: Any) -> None:
    """All workers' results are the same, and those of one process."""
    for case in CASES:
        name = f"{case[0]} {case[1]}"
        one = train_case(data, *case)
        first = workers[0][name]
        for worker in workers[1:]:
            assert strip_time(worker[name]["result"]) == strip_time(first["result"]), name
            assert worker[name]["lrs"] == first["lrs"]
            for key, value in worker[name]["state"].items():
                assert torch.equal(value, first["state"][key]), (name, key)
        a, b = one["result"], first["result"]
        assert (a.epochs, a.stopped_early) == (b.epochs, b.stopped_early), name
        assert a.best_epoch == b.best_epoch, name
        assert b.losses == pytest.approx(a.losses, rel=1e-9), name
        assert first["lrs"] == one["lrs"]
        if case[2].get("clip_norm"):
            assert first["norms"] == pytest.approx(one["norms"], rel=1e-9)
        for split in ("train", "val", "test"):
            accuracy, loss = f"{split}_accuracy", f"{split}_loss"
            assert a.best[accuracy] == b.best[accuracy], name
            assert b.best[loss] == pytest.approx(a.best[loss], rel=1e-9), name
    stopped = workers[0]["gcn none"]["result"]
    assert stopped.stopped_early
    assert min(workers[0]["gin batch"]["lrs"]) < 0.05
