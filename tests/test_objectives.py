"""Losses, metrics, targets and schedulers of the user's, on workers as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.transforms as T
from oracle import parts, workers
from small_graphs import FEATURES, small_graph
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import pyg_sar
from pyg_sar.errors import CheckpointError
from pyg_sar.files import from_json, to_json
from pyg_sar.partition import assign_nodes
from pyg_sar.tensors import NodeTensor, node_rows, wrap
from pyg_sar.train.config import EpochRecord, TrainConfig
from pyg_sar.train.objective import Objective
from pyg_sar.train.trainer import Callback, Trainer

ROWS, CLASSES = 23, 5
OWNERS = torch.tensor([0, 2, 3])[torch.arange(ROWS) * 7 % 3]  # Worker 1 has no row.
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)


def rows(kind: str) -> tuple[Tensor, Tensor]:
    """Predictions and targets of all rows."""
    draw = torch.Generator().manual_seed(3)
    pred = torch.randn(ROWS, CLASSES, generator=draw, dtype=torch.float64)
    target = torch.rand(ROWS, CLASSES, generator=draw, dtype=torch.float64)
    if kind == "classes":
        return pred, target.argmax(1)
    if kind == "logs":
        return pred.log_softmax(1), target.argmax(1)
    if kind == "multi-label":
        return pred, (target > 0.5).double()
    if kind == "columns":
        return pred, target.softmax(1)
    return pred[:, 0], target[:, 0]


def squares(pred: Tensor, target: Tensor) -> Tensor:
    return (pred - target).square().sum(-1).mean()


LOSSES: dict[str, tuple[str, Any]] = {  # Kind of rows, the loss.
    "default": ("classes", None),
    "weights": ("classes", nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2)),
    "smoothed": ("classes", nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2)),
    "ignored": ("classes", partial(F.cross_entropy, ignore_index=1)),
    "likelihood": ("logs", partial(F.nll_loss, weight=WEIGHT)),
    "likelihood module": ("logs", nn.NLLLoss(reduction="sum")),
    "probabilities": ("columns", nn.CrossEntropyLoss(weight=WEIGHT)),
    "labels": ("multi-label", nn.BCEWithLogitsLoss(pos_weight=WEIGHT)),
    "labels function": ("multi-label", F.binary_cross_entropy_with_logits),
    "margins": ("multi-label", F.multilabel_soft_margin_loss),
    "squares": ("numbers", F.mse_loss),
    "sum of squares": ("columns", partial(F.mse_loss, reduction="sum")),
    "absolute": ("columns", nn.L1Loss()),
    "huber": ("numbers", nn.HuberLoss(delta=0.3)),
    "divergence": ("columns", nn.KLDivLoss(reduction="batchmean")),
    "divergence of values": ("columns", F.kl_div),
    "own": ("columns", squares),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_losses_are_those_of_one_process():
    def work() -> dict[str, Any]:
        comm, found = pyg_sar.comm.current(), {}
        ids = (OWNERS == comm.rank).nonzero().view(-1)
        here = node_rows(comm, ids, ROWS)
        for name, (kind, loss) in LOSSES.items():
            pred, target = (wrap(values[ids], here, 0) for values in rows(kind))
            pred.requires_grad_()
            value = Objective(loss)(pred, target)
            value.backward()
            evaluated = Objective(loss).evaluated(pred.detach(), target)
            found[name] = value.detach(), pred.grad.full_tensor(), evaluated
        return found

    results = workers(work, 4)
    for name, (kind, loss) in LOSSES.items():
        pred, target = rows(kind)
        pred.requires_grad_()
        expected = (loss or F.cross_entropy)(pred, target)
        expected.backward()
        for found in results:
            for value in (found[name][0], found[name][2]):
                torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(found[name][1], pred.grad, rtol=1e-12, atol=1e-15)


def test_names_tell_losses_apart():
    losses = [loss for _, loss in LOSSES.values()]
    losses += [nn.CrossEntropyLoss(weight=WEIGHT + 1, ignore_index=2), nn.HuberLoss(delta=0.4)]
    names = [Objective(loss).name for loss in losses]
    assert len(set(names)) == len(names)
    assert names == [Objective(copy.deepcopy(loss)).name for loss in losses]


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        ("cross_entropy", TypeError, "'loss' to be a function"),
        (lambda p, t: (p - t).square(), ValueError, r"one number of 23 rows, .* \(got \[23\]\)"),
        (lambda p, t: float((p - t).mean()), ValueError, r"one number .* \(got float\)"),
        (nn.MSELoss(), ValueError, r"of shape \[23\] and targets of shape \[23, 1\].*squeeze"),
    ],
)
def test_losses_that_give_no_number_are_refused(loss, error, message):
    pred, target = rows("numbers")
    with pytest.raises(error, match=message):
        Objective(loss)(pred, target.view(-1, 1) if isinstance(loss, nn.Module) else target)


def test_smoothing_belongs_to_the_default_loss():
    with pytest.raises(ValueError, match=r"CrossEntropyLoss\(label_smoothing"):
        Objective(nn.CrossEntropyLoss(), 0.1)


# The trainer ##################################################################


class Spread:
    """A metric as torchmetrics has them: the share of the variance that is explained."""

    higher_is_better = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def distributed_available_fn(self) -> bool:
        return True  # It would wait for others.

    def reset(self) -> None:
        self.pred, self.target = torch.empty(0), torch.empty(0)

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.pred, self.target = pred, target

    def compute(self) -> Tensor:
        assert not self.distributed_available_fn()
        rest = (self.pred - self.target).square().sum()
        return 1 - rest / (self.target - self.target.mean(0)).square().sum()


def first_rows(pred: Tensor, target: Tensor) -> float:
    """A metric that depends on the rows' order."""
    return float((pred[:5] * torch.arange(1, 6).view(5, *[1] * (pred.dim() - 1))).sum())


METRICS: dict[str, Any] = {
    "spread": Spread(),
    "first": first_rows,
    "two": lambda p, t: {"low": float(p.min()), "nan": float("nan")},
}


def small_gcn(outputs: int) -> nn.Module:
    torch.manual_seed(2)
    return GCN(FEATURES, 8, 2, outputs).double()


def regression(data: Data) -> tuple[dict[str, Any], int]:
    return {"loss": nn.MSELoss(), "forward": lambda m, d: m(d.x, d.edge_index).view(-1)}, 1


def multi_label(data: Data) -> tuple[dict[str, Any], int]:
    return {"loss": F.binary_cross_entropy_with_logits, "target": "labels", "splits": MASKS}, 3


def of_pairs(model: nn.Module, data: Data) -> Tensor:
    source, target = data.edge_label_index
    z = model(data.x, data.edge_index)
    return (z[source] * z[target]).sum(-1)


MASKS = {"train": "train_mask", "val": "val_idx", "test": "test_mask"}
CASES: dict[str, tuple[Callable[[Data], tuple[dict[str, Any], int]], dict[str, Any]]] = {
    "regression": (regression, {"monitor": "spread"}),
    "multi-label": (multi_label, {"monitor": "two_low", "monitor_mode": "min"}),
}


def a_graph() -> Data:
    data = small_graph(dtype=torch.float64)
    data.y = torch.where(data.y < 0, torch.nan, data.x[:, 0].sin())
    data.train_mask &= ~data.y.isnan()
    data.val_mask &= ~data.y.isnan()
    data.test_mask &= ~data.y.isnan()
    data.labels = (data.x[:, 1:4] > 0.5).double()
    data.val_idx = data.val_mask.nonzero().view(-1)
    return data


def run_case(data: Data, name: str) -> Any:
    make, changes = CASES[name]
    options, outputs = make(data)
    model = small_gcn(outputs)
    if isinstance(data.y, NodeTensor):
        model = pyg_sar.distribute(model)
    config = TrainConfig(epochs=4, lr=0.02, **changes)
    trainer = Trainer(model, data, config, metrics=METRICS, **options)
    return replace(trainer.fit(), seconds=0.0), trainer


def same_results(found: Any, expected: Any) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert found.best_epoch == expected.best_epoch
    for mine, theirs in ((found.best, expected.best), (found.final, expected.final)):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == (None if value is None else pytest.approx(value, rel=1e-9)), key


def test_targets_that_are_no_classes(tmp_path):
    data = a_graph()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")

    def work() -> list[Any]:
        part = pyg_sar.load_partition(tmp_path / "parts")
        return [run_case(part, name)[0] for name in CASES]

    results = workers(work, 3) + parts(work, 3)
    for k, name in enumerate(CASES):
        expected, trainer = run_case(data, name)
        for found in results:
            same_results(found[k], expected)
        assert len({str(found[k]) for found in results}) == 1
        assert expected.final["test_two_nan"] is None and "val_accuracy" not in expected.final
        # By hand.
        out = trainer.model.eval()(data.x, data.edge_index).detach()
        mask, target = data.val_mask, data.y if name == "regression" else data.labels
        pred = out.view(-1) if name == "regression" else out
        best = expected.best
        assert best["val_first"] == pytest.approx(first_rows(pred[mask], target[mask]), rel=1e-9)
        loss = trainer.objective(pred[mask], target[mask])
        assert best["val_loss"] == pytest.approx(float(loss), rel=1e-9)


def link_run(train: Data, others: dict[str, Data]) -> Any:
    model = small_gcn(4)
    if isinstance(train.x, NodeTensor):
        model = pyg_sar.distribute(model)
    return Trainer(
        model,
        train,
        TrainConfig(epochs=3, monitor="area"),
        forward=of_pairs,
        loss=nn.BCEWithLogitsLoss(),
        metrics={"area": lambda p, t: (p[t > 0].view(-1, 1) > p[t == 0]).double().mean()},
        target="edge_label",
        evaluate_on=others,
    )


def test_targets_of_pairs_of_nodes(tmp_path):
    torch.manual_seed(0)
    names = ("train", "val", "test")
    graph = small_graph(dtype=torch.float64)
    graph = Data(x=graph.x, edge_index=graph.edge_index)
    splits = dict(zip(names, T.RandomLinkSplit()(graph), strict=True))
    for data in splits.values():
        data.edge_label = data.edge_label.double()
    owners = assign_nodes(splits["train"].edge_index, graph.num_nodes, 3, "random")
    for name, data in splits.items():
        pyg_sar.write_partitions(data, 3, tmp_path / name, owners)
    expected = link_run(splits["train"], {n: splits[n] for n in names[1:]}).fit()
    assert {"train_area", "val_area", "test_area", "test_loss"} <= expected.final.keys()

    def work() -> Any:
        parts = {name: pyg_sar.load_partition(tmp_path / name) for name in names}
        trainer = link_run(parts["train"], {n: parts[n] for n in names[1:]})
        result = trainer.fit()
        trainer.save(tmp_path / "c")
        again = link_run(parts["train"], {n: parts[n] for n in names[1:]})
        again.resume(tmp_path / "c")
        return result, again.epoch

    for result, epoch in parts(work, 3):
        same_results(result, expected)
        assert epoch == 3
    with pytest.raises(ValueError, match=r"'evaluate_on' is for 'val' and 'test' \(got \['x'\]"):
        link_run(splits["train"], {"x": splits["val"]})


def test_torchmetrics(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")
    data = small_graph(200)
    given = {"task": "multiclass", "num_classes": 4}
    many = torchmetrics.MetricCollection([torchmetrics.F1Score(**given, average="macro")])
    metrics = {"acc": torchmetrics.Accuracy(**given, average="micro"), "all": many}
    metrics["area"] = torchmetrics.AUROC(**given)
    model, config = GCN(FEATURES, 8, 2, 4), TrainConfig(monitor="all_F1Score")
    scores = Trainer(model, data, config, metrics=metrics).evaluate()
    assert scores["val_acc"] == pytest.approx(scores["val_accuracy"], abs=1e-6)
    assert 0 <= scores["test_all_MulticlassF1Score"] <= 1
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")

    def work() -> Any:
        part = pyg_sar.load_partition(tmp_path / "parts")
        own = pyg_sar.distribute(copy.deepcopy(model))
        return Trainer(own, part, config, metrics=metrics).evaluate()

    for found in workers(work, 3):
        assert found == pytest.approx(scores, rel=1e-5)


def test_torchmetrics_in_a_loop_of_ones_own(tmp_path):
    """They add up over a default process group, of workers that each have seen all rows."""
    pytest.importorskip("torchmetrics")
    data = small_graph(200)
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")

    def scores(data: Any) -> list[Tensor]:
        from torchmetrics import MeanMetric, SumMetric
        from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

        given = MulticlassConfusionMatrix(4), MulticlassAUROC(4), SumMetric(), MeanMetric()
        for metric in given[:2]:
            metric.update(data.x[:, :4][data.y >= 0], data.y[data.y >= 0])
        for metric in given[2:]:
            metric.update(data.x[:, 0])
        return [torch.as_tensor(metric.compute().tolist()) for metric in given]

    def work() -> tuple[list[Tensor], bool]:
        return scores(pyg_sar.load_partition(tmp_path / "parts")), dist.is_initialized()

    expected = scores(data)
    for found, default_group in [*workers(work, 2), *parts(work, 2)]:
        torch.testing.assert_close(found, expected)
        assert not default_group  # as in one process


def test_unfit_metrics_and_targets_are_named(tmp_path):
    data = a_graph()
    options = {"loss": nn.MSELoss(), "forward": lambda m, d: m(d.x, d.edge_index).view(-1)}

    def refused(match: str, error: Any = ValueError, **changes: Any) -> None:
        given = options | changes
        config = given.pop("config", TrainConfig(epochs=1))
        with pytest.raises(error, match=match):
            Trainer(small_gcn(1), given.pop("data", data), config, **given).fit()

    refused("'loss' is the name of the loss", metrics={"loss": first_rows})
    refused("to be a function of", TypeError, metrics={"f1": 3})
    refused(r"metrics\['f'\] to give one number \(got Tensor\)", metrics={"f": lambda p, t: p})
    refused(
        r"'monitor' to be one of \['loss', 'f'\] \(got 'g'\)",
        metrics={"f": first_rows},
        config=TrainConfig(monitor="g"),
    )
    refused("the name of a score", metrics={"f": first_rows}, config=TrainConfig(monitor="f_2"))
    refused("data.z is missing: the target", target="z")
    refused("data.mine is missing", splits={"train": "mine"})
    refused(
        "holds rows 0 to 90, data.y has 90",
        splits={"train": "far"},
        data=Data(**data.to_dict(), far=torch.tensor([0, 90])),
    )
    refused(
        r"data.ones lists 2 rows in 90 numbers: give each once; .* data.ones.bool\(\)",
        splits={"train": "ones"},
        data=Data(**data.to_dict(), ones=data.train_mask.long()),
    )
    refused(
        "a row for each of data.labels",
        target="labels",
        splits=MASKS,
        forward=lambda m, d: m(d.x, d.edge_index)[1:],
    )
    missing = data.clone()
    missing.y[data.train_mask.nonzero()[3]] = torch.nan
    refused(r"data.y holds NaN in 1 of the \d+ train rows", data=missing)

    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")

    def work() -> None:
        part = pyg_sar.load_partition(tmp_path / "parts")
        model = pyg_sar.distribute(small_gcn(1))

        def refused(error: Any, match: str, **changes: Any) -> None:
            with pytest.raises(error, match=match):
                Trainer(model, part, **options | changes).evaluate()

        refused(ZeroDivisionError, "division by zero", metrics={"fails": lambda p, t: 1 / 0})
        own = lambda p, t: F.mse_loss(p.to_local(), t.to_local())  # noqa: E731
        other = r"is \S+ on rank 0, \S+ on rank 1: losses and metrics .*to_local\(\)"
        refused(ValueError, "'train_own' " + other, metrics={"own": own})
        refused(ValueError, "'train_loss' " + other, loss=own)

    workers(work, 2)


# Schedulers ###################################################################

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "sequence": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.8**epoch),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", patience=0, factor=0.5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


class SaveAt(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.lrs: list[float] = []

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        self.lrs.append(record.lr)
        if record.epoch == 4:
            trainer.save(self.path)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_pytorch_go_on_from_a_checkpoint(name, tmp_path):
    data, config = small_graph(), TrainConfig(epochs=8, lr=0.05)
    torch.manual_seed(0)
    first, second = GCN(FEATURES, 8, 2, 4), GCN(FEATURES, 8, 2, 4)
    start = copy.deepcopy(first.state_dict())
    saving = SaveAt(tmp_path / "c")
    make = SCHEDULERS[name]
    whole = Trainer(first, data, config, scheduler=make, callbacks=[saving])
    losses = whole.fit().losses
    optimizer = torch.optim.Adam(second.parameters(), lr=0.05, weight_decay=config.weight_decay)
    resumed = Trainer(
        second, data, config, optimizer=optimizer, scheduler=make(optimizer), callbacks=[saving]
    )
    resumed.resume(tmp_path / "c")
    assert resumed.fit().losses == losses
    assert saving.lrs[4:8] == saving.lrs[8:] and len(set(saving.lrs)) > 1
    # The loop of a PyG user.
    second.load_state_dict(start)
    optimizer = torch.optim.Adam(second.parameters(), lr=0.05, weight_decay=config.weight_decay)
    scheduler, mask = make(optimizer), data.train_mask & (data.y >= 0)
    for epoch in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(second(data.x, data.edge_index)[mask], data.y[mask])
        loss.backward()
        assert float(loss.detach()) == pytest.approx(losses[epoch], rel=1e-5)
        assert optimizer.param_groups[0]["lr"] == saving.lrs[epoch]
        optimizer.step()
        if name == "plateau":
            out = second(data.x, data.edge_index).argmax(1)
            held_out = data.val_mask & (data.y >= 0)
            scheduler.step(float((out == data.y)[held_out].double().mean()))
        else:
            scheduler.step()


def test_what_schedulers_remember_is_json():
    state = {"best": float("inf"), "a": (1, 2.5), "b": {3: [None, float("-inf")]}, "c": True}
    assert from_json(to_json(state)) == state
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for make in SCHEDULERS.values():
        state = make(optimizer).state_dict()
        assert from_json(to_json(state)) == state


def test_unfit_schedulers_are_named(tmp_path):
    data, model = small_graph(), GCN(FEATURES, 8, 2, 4)
    optimizer = torch.optim.Adam(model.parameters())
    other = torch.optim.Adam(model.parameters())
    step = lr_scheduler.StepLR(optimizer, 3)

    def refused(match: str, error: Any = ValueError, **options: Any) -> None:
        config = options.pop("config", TrainConfig())
        with pytest.raises(error, match=match):
            Trainer(model, data, config, **options)

    refused("'scheduler' belongs to another optimizer", optimizer=other, scheduler=step)
    refused("'scheduler' to be one of torch", TypeError, scheduler=lambda optimizer: 0.1)
    refused(
        "leave one of them out",
        scheduler=step,
        optimizer=optimizer,
        config=TrainConfig(schedule="cosine"),
    )
    refused(r"mode='max'.*\(got 'min'\)", scheduler=lr_scheduler.ReduceLROnPlateau)
    for config in (TrainConfig(epochs=1), TrainConfig(epochs=1, monitor="loss")):
        trainer = Trainer(model, data, config)
        trainer.save(tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"scheduler=\[\] is now \['StepLR'\]"):
            Trainer(model, data, config, scheduler=lambda o: lr_scheduler.StepLR(o, 3)).resume(
                tmp_path / "c"
            )
