"""Replicas: groups of workers that train one model on samples of their own.

The oracle is what ``DistributedDataParallel`` computes, by one process: it runs the replicas'
samples one after the other and averages the gradients.
"""

from __future__ import annotations

import copy
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import some
from oracle import CHANNELS, OUT, TOLERANCE, error, make_graph, node_losses, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GAT, BatchNorm, GATConv, SAGEConv

import pyg_sar
from pyg_sar.comm import finalize
from pyg_sar.errors import CheckpointError, DivergedError, LostWorkerError, PygSarError, WorkerError
from pyg_sar.reduction.parameters import LIMBS
from pyg_sar.train import (
    Callback,
    LineProgress,
    Report,
    TrainConfig,
    Trainer,
    load_checkpoint,
    read_metrics,
    save_checkpoint,
)

SHAPES = [(1, 2), (2, 2), (2, 1), (1, 4), (3, 1)]
SAMPLES = 6
LIMIT = 0.02
EPOCHS, FEW = 9, 4


class Net(torch.nn.Module):
    """Layers, a norm, a head that odd samples leave out, and a scale that is used elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(CHANNELS, 8), GATConv(8, OUT)])
        self.norm = BatchNorm(8)
        self.head = torch.nn.Linear(OUT, OUT)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, OUT))
        self.again: bool | None = None

    def forward(self, x: Tensor, edge_index: Tensor, odd: int = 0) -> Tensor:
        x = self.norm(self.convs[0](x, edge_index).tanh())
        if self.again is None:
            x = self.convs[1](x, edge_index)
        else:
            x = checkpoint(self.convs[1], x, edge_index, use_reentrant=self.again)
        x = x.tanh() * self.scale + self.convs[1].bias.sin()
        return x if odd else self.head(x)


def loss_of(model: Any, data: Any, k: int) -> Tensor:
    out = model(data.x, data.edge_index, k % 2)
    return node_losses(out).mean() + 0.1 * model.scale.square().sum()


# Trainings: what each backward pass is of, and what is done with the gradients ##############


def sgd(model: Any, backward: Callable[..., None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for k in range(3):
        optimizer.zero_grad()
        backward(k)
        optimizer.step()


def accumulated_and_clipped(model: Any, backward: Callable[..., None]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for k in range(2):
        optimizer.zero_grad(set_to_none=k == 0)
        backward(k, 0.5)
        backward(k + 1, 0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()


def hooked(model: Any, backward: Callable[..., None]) -> None:
    """A hook that is not linear, on the gradient of each sample; one that is frozen, and thawed."""
    handles = [p.register_hook(lambda g: g.clamp(-LIMIT, LIMIT)) for p in model.parameters()]
    backward(0)
    for handle in handles:
        handle.remove()
    model.head.weight.requires_grad_(False)
    backward(1)
    model.head.weight.requires_grad_(True)
    model.head.bias = torch.nn.Parameter(model.head.bias.detach().clone())
    backward(2)


def line_search(model: Any, backward: Callable[..., Tensor]) -> None:
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(0)

    optimizer.step(closure)


def checkpointed(model: Any, backward: Callable[..., Tensor]) -> None:
    """A layer that is computed again, in the pass itself or in one of its own within it."""
    for model.again in (False, True):
        backward(0)


RUNS = (sgd, accumulated_and_clipped, hooked, line_search, checkpointed)


def state(model: Any) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        found[f"{name}.grad"] = None if p.grad is None else p.grad.clone()
    return {**found, **{name: b.clone() for name, b in model.named_buffers()}}


def made() -> Any:
    torch.manual_seed(0)
    return Net().double()


class OneProcess:
    """Runs the samples of all replicas, each with its own buffers, and averages the gradients."""

    def __init__(self, samples: list[Data], replicas: int) -> None:
        self.samples, self.replicas, self.model = samples, replicas, made()
        self.buffers = [[b.clone() for b in self.model.buffers()] for _ in range(replicas)]

    def backward(self, k: int, factor: float = 1.0) -> Tensor:
        before = [(p, p.grad) for p in self.model.parameters()]
        found: list[list[Tensor]] = [[] for _ in before]
        losses = []
        for r in range(self.replicas):
            self.use_buffers(r)
            self.model.zero_grad()
            sample = self.samples[k * self.replicas % len(self.samples) + r]
            loss = loss_of(self.model, sample, k + r) * factor
            loss.backward()
            losses.append(loss.detach())
            for own, (p, _) in zip(found, before, strict=True):
                own += [] if p.grad is None else [p.grad]
            for kept, buffer in zip(self.buffers[r], self.model.buffers(), strict=True):
                kept.copy_(buffer)
        for own, (p, grad) in zip(found, before, strict=True):
            mean = [torch.stack(own).sum(0) / self.replicas] if own else []
            terms = mean if grad is None else [grad, *mean]
            p.grad = torch.stack(terms).sum(0) if terms else None
        return torch.stack(losses).mean()

    def use_buffers(self, r: int) -> None:
        for kept, buffer in zip(self.buffers[r], self.model.buffers(), strict=True):
            buffer.copy_(kept)


def in_a_worker(roots: list[Path], run: Any) -> tuple[int, dict[str, Tensor | None]]:
    comm = pyg_sar.init()
    order = list(DistributedSampler(roots, comm.replicas, comm.replica, shuffle=False))
    model = pyg_sar.distribute(made())

    def backward(k: int, factor: float = 1.0) -> Tensor:
        data = pyg_sar.load_partition(roots[order[k % len(order)]])
        loss = loss_of(model, data, k + comm.replica) * factor
        loss.backward()
        return comm.average(loss)

    run(model, backward)
    return comm.replica, state(model)


def train(roots: list[Path], runs: Any = RUNS) -> list[tuple[int, dict[str, Tensor | None]]]:
    return [in_a_worker(roots, run) for run in runs]


@pytest.fixture(scope="module")
def samples() -> list[Data]:
    graphs = [make_graph(20 + 3 * k, 60 + 10 * k, seed=k) for k in range(SAMPLES)]
    for graph in graphs:
        graph.train_mask = torch.arange(graph.num_nodes) % 2 == 0
        graph.train_mask[16:] = False
        graph.val_mask = ~graph.train_mask & (graph.y > 0)
    return graphs


@pytest.fixture(scope="module")
def folders(samples: list[Data], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("samples")

    def write(parts: int) -> list[Path]:
        roots = [folder / f"{parts}-{k}" for k in range(SAMPLES)]
        for data, root in zip(samples, roots, strict=True):
            if not root.exists():
                pyg_sar.write_partitions(data, parts, root, "random")
        return roots

    return write


@pytest.mark.parametrize("shape", SHAPES)
def test_replicas_train_as_one_process_that_averages(shape, samples, folders):
    replicas, parts = shape
    given = train, replicas * parts, folders(parts)
    workers = pyg_sar.launch(*given, replicas=replicas, timeout=60.0)
    assert_trained(workers, replicas, samples)


@pytest.mark.parametrize(("number", "stores"), [(2, True), (4, False)])
def test_workers_of_replicas_host_parts(number, stores, samples, folders, tmp_path):
    """Two replicas of four parts, on one or two workers each."""
    options: Any = {"parts": 4, "replicas": 2, "timeout": 60.0}
    stored: Any = {"store": tmp_path, "memory": "1GiB"} if stores else {}
    runs = some(RUNS, str(number))
    workers = pyg_sar.launch(train, number, folders(4), runs, **options, **stored)
    assert_trained(workers, 2, samples, runs)
    if number == 2:
        given = 2, folders(2), tmp_path, False, FEW
        expected = by_one_process(samples, 2, FEW)
        for found in pyg_sar.launch(with_trainer, *given, parts=2, replicas=2, timeout=60.0):
            assert_outcome(found, expected)
    worker = number // 2 - 1  # Of the first replica, which hosts part 2.
    place = rf"Rank {worker} \(replica 0, part {worker}\) failed: KeyError: 'in a sample'"
    with pytest.raises(WorkerError, match=place + r"(.|\n)*in part 2"):
        pyg_sar.launch(fails, number, tmp_path, "raises", **options)


def assert_trained(
    workers: list[Any], replicas: int, samples: list[Data], runs: Any = RUNS
) -> None:
    parts = len(workers) // replicas
    for k, run in enumerate(runs):
        oracle = OneProcess(samples, replicas)
        run(oracle.model, oracle.backward)
        for rank, worker in enumerate(workers):
            replica, found = worker[k]
            assert replica == rank // parts
            oracle.use_buffers(replica)
            expected = state(oracle.model)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert error(found[name], value) <= TOLERANCE, (run.__name__, rank, name)


class Normed(torch.nn.Module):
    """A batch norm of torch's and one of PyG's, which ``convert_sync_batchnorm`` both finds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(CHANNELS, 8)
        self.norm, self.other = torch.nn.BatchNorm1d(8), BatchNorm(8, momentum=None)
        self.head = torch.nn.Linear(8, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.other(self.norm(self.conv(x, edge_index).tanh()).tanh()))


def synchronized(roots: list[Path]) -> Any:
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(roots[comm.replica])
    torch.manual_seed(0)
    model: Any = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Normed().double())
    model = pyg_sar.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        node_losses(model(data.x, data.edge_index)).mean().backward()
        optimizer.step()
    found = state(model)
    with torch.no_grad():
        out = model.eval()(data.x, data.edge_index)
    x = data.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.train()(x, data.edge_index).square().sum(), x)
    problem = ""
    if comm.world_size > 1:
        try:
            loss = model(x, data.edge_index).square().sum()
            torch.autograd.grad(loss, x, create_graph=True)
        except ValueError as error:
            problem = str(error)
    return comm.replica, found, whole(out), whole(gradient), problem


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_over_all_replicas(shape, samples, folders):
    """The oracle has the replicas' graphs as one, whose loss is the mean of theirs."""
    replicas, parts = shape
    given = synchronized, replicas * parts, folders(parts)
    workers = pyg_sar.launch(*given, replicas=replicas, timeout=60.0)
    joint = Batch.from_data_list(samples[:replicas])
    torch.manual_seed(0)
    model = Normed().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        out = model(joint.x, joint.edge_index)
        losses = [node_losses(out[joint.batch == r]).mean() for r in range(replicas)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    expected = state(model)
    with torch.no_grad():
        outputs = model.eval()(joint.x, joint.edge_index)
    x = joint.x.clone().requires_grad_()
    (gradients,) = torch.autograd.grad(model.train()(x, joint.edge_index).square().sum(), x)
    for replica, found, out, gradient, problem in workers:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert error(found[name], value) <= TOLERANCE, name
        assert error(out, outputs[joint.batch == replica]) <= TOLERANCE
        assert error(gradient, gradients[joint.batch == replica]) <= TOLERANCE
        assert ("reached a SyncBatchNorm" in problem) == (replicas > 1 and parts > 1)


def overlapping(roots: list[Path]) -> Any:
    """Two models, of which one is distributed again with its parts, and a copy."""
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(roots[comm.replica])
    model, decoder = pyg_sar.distribute(made()), torch.nn.Linear(OUT, 1).double()
    pyg_sar.distribute(decoder)
    pyg_sar.distribute(model.head)
    copied = copy.deepcopy(pyg_sar.distribute(model))
    for one in (model, copied):
        decoder(one(data.x, data.edge_index)).square().mean().backward()
    return [[p.grad for p in one.parameters()] for one in (model, copied, decoder)]


def test_models_that_share_parameters_and_copies(samples, folders):
    first, *others = pyg_sar.launch(overlapping, 4, folders(2), replicas=2, timeout=60.0)
    model, decoder = made(), torch.nn.Linear(OUT, 1).double()
    losses = [decoder(model(d.x, d.edge_index)).square().mean() for d in samples[:2]]
    sum(losses).div(2).backward()  # type: ignore[union-attr]
    for found in (first, *others):
        for own, one, times in zip(found, (model, model, decoder), (1, 1, 2), strict=True):
            for gradient, p in zip(own, one.parameters(), strict=True):
                expected = None if p.grad is None else p.grad * times
                assert error(gradient, expected) <= TOLERANCE


def as_documented(roots: list[Path], code: str) -> Any:
    printed: list[float] = []
    names = {"pyg_sar": pyg_sar, "torch": torch, "F": F, "GAT": GAT, "roots": roots}
    exec(code, {**names, "DistributedSampler": DistributedSampler, "print": printed.append})
    return printed


def test_the_documented_loop(tmp_path):
    text = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*DistributedSampler.*?)```", text, re.DOTALL)
    roots = [tmp_path / name for name in "abc"]
    for root in roots:
        data = make_graph(20, 60, dtype=torch.float32)
        data.x = torch.randn(20, 16)
        pyg_sar.write_partitions(data, 2, root, "random")
    first, *others = pyg_sar.launch(as_documented, 4, roots, code, replicas=2, timeout=60.0)
    assert len(first) == 10 and first[-1] < first[0]
    assert all(found == first for found in others)


# The Trainer ##################################################################


def recall(pred: Tensor, target: Tensor) -> Tensor:
    return (pred.argmax(1) == target)[target == 1].double().mean()


class Early(Callback):
    """Saves after the fourth epoch, from which another run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_epoch(self, trainer: Trainer, record: Any) -> None:
        if record.epoch == 4:
            trainer.save(self.path)


def trainer_of(
    graphs: list[Data], tests: list[Data], callbacks: Any = (), epochs: int = EPOCHS
) -> Trainer:
    torch.manual_seed(0)
    model: Any = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Normed().double())
    config = TrainConfig(
        epochs=epochs, lr=0.1, monitor="recall", schedule="plateau", step_size=1, patience=4
    )
    options: Any = {"metrics": {"recall": recall}, "evaluate_on": {"test": tests}}
    return Trainer(pyg_sar.distribute(model), graphs, config, callbacks=callbacks, **options)


def outcome(trainer: Trainer) -> Any:
    result = trainer.fit()
    scores = [dict(sorted(s.items())) for s in (result.best, result.final) if s]
    numbers = [result.losses, *(list(s.values()) for s in scores)]
    decisions = result.epochs, result.best_epoch, result.stopped_early
    return decisions, numbers, state(trainer.model), trainer.optimizer.param_groups[0]["lr"]


def with_trainer(roots: list[Path], folder: Path, resume: bool, epochs: int = EPOCHS) -> Any:
    comm = pyg_sar.comm.current()
    ours = [pyg_sar.load_partition(root) for root in roots[comm.replica :: comm.replicas]]
    graphs, tests = ours[: 4 // comm.replicas], ours[4 // comm.replicas :]
    if resume:
        trainer = trainer_of(graphs, tests)
        trainer.resume(folder / "early.ckpt")
        return outcome(trainer)

    def write(line: str) -> None:
        with (folder / "lines").open("a") as file:
            file.write(line + "\n")

    callbacks = [Early(folder / "early.ckpt"), Report(folder / "report"), LineProgress(write)]
    return outcome(trainer_of(graphs, tests, callbacks, epochs))


def by_one_process(samples: list[Data], replicas: int, epochs: int = EPOCHS) -> Any:
    """The graphs that replicas take in the same step are one; all have as many training nodes."""
    steps = [samples[k : k + replicas] for k in range(0, SAMPLES, replicas)]
    graphs: Any = [Batch.from_data_list(step) for step in steps]
    return outcome(trainer_of(graphs[: 4 // replicas], graphs[4 // replicas :], (), epochs))


def assert_outcome(found: Any, expected: Any) -> None:
    assert found[0] == expected[0] and found[3] == pytest.approx(expected[3], rel=1e-12)
    for own, theirs in zip(found[1], expected[1], strict=True):
        assert own == pytest.approx(theirs, rel=TOLERANCE)
    for name, value in expected[2].items():
        if not name.endswith("grad"):
            assert error(found[2][name], value) <= TOLERANCE, name


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 4), (2, 2)])
def test_a_trainer_on_the_samples_of_all_replicas(shape, samples, folders, tmp_path):
    replicas, parts = shape
    expected = by_one_process(samples, replicas)
    given = with_trainer, replicas * parts, folders(parts), tmp_path, False
    for found in pyg_sar.launch(*given, replicas=replicas, timeout=60.0):
        assert_outcome(found, expected)
    epochs = expected[0][0]
    assert (tmp_path / "lines").read_text().count("\n") == epochs  # One worker writes.
    assert len(read_metrics(tmp_path / "report")) == epochs
    if shape != (2, 2):
        return
    for other, size in ((2, 1), (1, 2)):
        if other == 1:
            trainer = trainer_of(samples[:4], samples[4:])
            trainer.resume(tmp_path / "early.ckpt")
            expected = outcome(trainer)
        given = with_trainer, other * size, folders(size), tmp_path, True
        for found in pyg_sar.launch(*given, replicas=other, timeout=60.0):
            assert_outcome(found, expected)


def with_own_statistics(roots: list[Path], path: Path) -> Any:
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(roots[comm.replica])
    torch.manual_seed(0)
    config = TrainConfig(epochs=3, lr=0.1, restore_best=False)
    trainer = Trainer(pyg_sar.distribute(Normed().double()), data, config)
    final = trainer.fit().final
    trainer.save(path)
    if comm.replica == 1:
        data.x[0] = math.nan
    trainer = Trainer(pyg_sar.distribute(Normed().double()), data, TrainConfig(epochs=1))
    with pytest.raises(DivergedError):
        trainer.fit()
    return final


def test_the_model_that_is_judged_is_the_one_that_is_saved(samples, folders, tmp_path):
    """Replicas have running statistics of their own until they are judged."""
    path = tmp_path / "run.ckpt"
    scores = pyg_sar.launch(with_own_statistics, 4, folders(2), path, replicas=2, timeout=60.0)
    model = Normed().double()
    load_checkpoint(path, model)
    expected = Trainer(model, samples[:2]).evaluate()
    for found in scores:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value is found[name] is None or abs(found[name] - value) <= TOLERANCE * value


class Drawing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = GATConv(CHANNELS, 8, dropout=0.3), torch.nn.Linear(8, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(F.dropout(self.conv(x, edge_index).tanh(), 0.5, self.training))


DRAWING = {"epochs": 3, "lr": 0.1, "weight_decay": 0.0, "seed": None, "restore_best": False}


def drawing(roots: list[Path], path: Path) -> Any:
    comm = pyg_sar.comm.current()
    torch.manual_seed(0)
    model = pyg_sar.distribute(Drawing().double())
    torch.manual_seed(3 + comm.replica)
    data = pyg_sar.load_partition(roots[comm.replica])
    trainer = Trainer(model, data, TrainConfig(**DRAWING))
    losses = trainer.fit().losses
    trainer.save(path)
    return losses, state(model)


def test_replicas_draw_numbers_of_their_own(samples, folders, tmp_path):
    path = tmp_path / "run.ckpt"
    found = pyg_sar.launch(drawing, 4, folders(2), path, replicas=2, timeout=60.0)
    torch.manual_seed(0)
    model = Drawing().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    states = [torch.manual_seed(3 + r).get_state() for r in range(2)]
    expected = []
    for _ in range(3):
        losses = []
        for r, sample in enumerate(samples[:2]):
            torch.set_rng_state(states[r])
            mask = sample.train_mask
            out = model(sample.x, sample.edge_index)
            losses.append(F.cross_entropy(out[mask], sample.y[mask]))
            states[r] = torch.get_rng_state()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses, own in found:
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        for name, value in state(model).items():
            assert error(own[name], value) <= TOLERANCE, name
    trainer = Trainer(Drawing().double(), samples[:2], TrainConfig(**{**DRAWING, "epochs": 4}))
    with pytest.raises(CheckpointError, match="2 replicas with different random states"):
        trainer.resume(path)
    trainer.resume(path, allow_changes=True)
    assert len(trainer.fit().losses) == 4


# Messages, and what is refused ##############################################


def one_message(roots: list[Path]) -> Any:
    comm = pyg_sar.init(replicas=2)
    model = pyg_sar.distribute(made())
    with pyg_sar.Ledger(comm) as ledger:
        loss_of(model, pyg_sar.load_partition(roots[comm.replica]), 0).backward()
    counts = {n for (label, _, _), n in ledger._messages.items() if label[2] == "gradient average"}
    return counts, ledger.sent_bytes(kind="gradient average")


def test_one_message_averages_all_gradients(folders):
    given = one_message, 4, folders(2)
    numbers = sum(p.numel() + 1 for p in made().parameters()) + 2 * LIMBS
    for counts, size in pyg_sar.launch(*given, replicas=2, timeout=60.0):
        assert (counts, size) == ({1}, 8 * numbers)


def refused(roots: list[Path]) -> list[str]:
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(roots[comm.replica])
    found = []

    def catch(action: Callable[[Any], Any]) -> None:
        model = pyg_sar.distribute(made())
        with pytest.raises((TypeError, ValueError)) as error:
            action(model)
        found.append(str(error.value))

    def loss(model: Any) -> Tensor:
        return loss_of(model, data, 0)

    def with_hook(model: Any) -> None:
        model.scale.register_post_accumulate_grad_hook(print)
        loss(model).backward()

    def with_others(model: Any) -> None:
        others = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
        functional_call(model, others, (data.x, data.edge_index)).sum().backward()

    def unlike(model: Any) -> None:
        with torch.no_grad():
            model.scale += comm.replica
        loss(model).backward()

    def made_otherwise(_: Any) -> None:
        pyg_sar.distribute(SAGEConv(CHANNELS, 3 + comm.replica))

    def sparse(_: Any) -> None:
        model = pyg_sar.distribute(torch.nn.Embedding(3, 2, sparse=True))
        model(torch.tensor([1])).sum().backward()

    catch(lambda model: torch.autograd.grad(loss(model), [model.scale]))
    catch(lambda model: loss(model).backward(create_graph=True))
    catch(with_hook)
    catch(with_others)
    catch(unlike)
    catch(made_otherwise)
    catch(sparse)
    group = torch.nn.SyncBatchNorm(3, process_group=object())
    catch(lambda _: pyg_sar.distribute(group))
    catch(lambda _: pyg_sar.distribute(pyg_sar.nn.NodeEmbedding(data.num_nodes, 2)))
    catch(lambda model: Trainer(model, data, labels=0.5))
    catch(lambda model: Trainer(model, data, evaluate_on={"test": []}))
    catch(lambda model: Trainer(model, [data] * (1 + comm.replica)).fit())
    catch(lambda _: pyg_sar.init(replicas=4))
    catch(lambda _: comm.average(torch.tensor(1)))
    return found


MESSAGES = (
    "grad() was asked for the gradient of 'scale' at replica",
    "has a graph at replica",
    "'scale' has a hook by register_post_accumulate_grad_hook() at replica",
    "reached parameters that the model doesn't train",
    "'scale' differs between the replicas: replicas [1] hold other values than replica 0",
    "at replica 1, '",
    "is sparse at replica",
    "'' (SyncBatchNorm) has a 'process_group' of its own",
    "'weight' has a row per node at replica",
    "'labels' is for one graph, and this Trainer has 1 graph in 2 replicas",
    "'evaluate_on['test']' has no graph (replica",
    "The replicas' settings differ: 'graphs: 2' at replica 1, 'graphs: 1' at replica 0",
    "replicas=4 at rank",
    "floating-point",
)


def test_what_can_not_be_averaged_is_refused_by_name(samples, tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:  # Graphs of one size, or the models of NodeEmbedding would differ.
        pyg_sar.write_partitions(samples[0], 2, root, "random")
    for found in pyg_sar.launch(refused, 4, roots, replicas=2, timeout=60.0):
        assert len(found) == len(MESSAGES)
        for text, message in zip(found, MESSAGES, strict=True):
            assert message in text


# How replicas start ###########################################################


def by_mesh() -> Any:
    world = pyg_sar.comm.current()
    assert (world.replica, world.replicas, world.across, world.place) == (0, 1, None, "")
    finalize()
    with pytest.raises(ValueError, match="replicas=3 at rank .: 4 workers can't be divided"):
        pyg_sar.init(replicas=3)
    names = ("replicate", "part")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for wrong in (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=names[::-1]),
        init_device_mesh("cpu", (4,)),
    ):
        with pytest.raises(ValueError, match="must have the dimensions"):
            pyg_sar.init(mesh=wrong)
    with pytest.raises(ValueError, match="replicas=4, but the mesh has 2"):
        pyg_sar.init(mesh=mesh, replicas=4)
    with pytest.raises(TypeError, match="DeviceMesh"):
        pyg_sar.init(mesh=(2, 2))
    comm = pyg_sar.init(mesh=mesh, timeout=60.0)
    assert pyg_sar.init() is pyg_sar.init(mesh=mesh) is comm
    return comm.replica, comm.rank, comm.all_gather_object(comm.place)


def test_replicas_of_a_device_mesh():
    found = pyg_sar.launch(by_mesh, 4, timeout=60.0)
    assert [(r, p) for r, p, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[3][2] == [" (replica 1, part 0)", " (replica 1, part 1)"]


def test_numbers_of_replicas_that_make_no_sense():
    for given, message in (
        ({"replicas": 0}, "'replicas' to be an integer of at least 1"),
        ({"replicas": 2}, "replicas=2 of launch.*3 workers can't be divided"),
    ):
        with pytest.raises(ValueError, match=message):
            pyg_sar.launch(print, 3, **given)
    with pytest.raises(ValueError, match="1 workers? can't be divided"):
        pyg_sar.init(replicas=2)


def differing(folder: Path) -> None:
    rank = pyg_sar.comm.current().rank
    finalize()
    pyg_sar.init(replicas=1 if rank else 2, timeout=30.0)


def fails(folder: Path, how: str) -> None:
    comm = pyg_sar.comm.current()
    rank = comm.replica * comm.world_size + comm.rank
    if rank == 2 and how == "raises":
        raise KeyError("in a sample")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
        comm.average(torch.ones(1))
    except PygSarError as error:
        (folder / f"{how}{rank}").write_text(str(error))
        raise


def test_faults_name_replica_and_part(tmp_path):
    with pytest.raises(WorkerError, match="replicas: rank . wants"):
        pyg_sar.launch(differing, 2, tmp_path, timeout=60.0)
    with pytest.raises(WorkerError, match=r"Rank 2 \(replica 1, part 0\) failed: KeyError"):
        pyg_sar.launch(fails, 4, tmp_path, "raises", replicas=2, timeout=60.0)
    with pytest.raises(LostWorkerError, match=r"Rank 2 \(replica 1, part 0\) was lost"):
        pyg_sar.launch(fails, 4, tmp_path, "killed", replicas=2, timeout=60.0)
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert told and all("Rank 2 (replica 1, part 0)" in text for text in told)


# Checkpoints ##################################################################


def steps(model: Any, backward: Any, optimizer: Any, ks: range) -> None:
    for k in ks:
        optimizer.zero_grad()
        backward(k)
        optimizer.step()


def saved(roots: list[Path], path: Path, resume: bool, seeded: bool) -> Any:
    comm = pyg_sar.comm.current()
    model = pyg_sar.distribute(made())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def backward(k: int) -> None:
        number = k * comm.replicas % len(roots) + comm.replica
        loss_of(model, pyg_sar.load_partition(roots[number]), k + comm.replica).backward()

    if not resume:
        steps(model, backward, optimizer, range(2))
        torch.manual_seed(comm.replica if seeded else 1)
        save_checkpoint(path, model, optimizer)
        return torch.rand(1)
    if seeded and comm.replicas == 1:
        with pytest.raises(CheckpointError, match="2 replicas with different random states"):
            load_checkpoint(path, model, optimizer)
    load_checkpoint(path, model, optimizer, restore_rng=not seeded or comm.replicas == 2)
    drawn = torch.rand(1)
    steps(model, backward, optimizer, range(2, 3))
    return drawn, comm.replica, state(model)


@pytest.mark.parametrize("seeded", [False, True])
def test_a_checkpoint_resumes_with_other_numbers_of_replicas_and_parts(
    seeded, samples, folders, tmp_path
):
    path = tmp_path / "run.ckpt"
    drawn = pyg_sar.launch(saved, 4, folders(2), path, False, seeded, replicas=2, timeout=60.0)
    for replicas, parts in ((2, 1), (1, 2)):
        oracle = OneProcess(samples, 2)
        optimizer = torch.optim.Adam(oracle.model.parameters(), lr=0.05)
        steps(oracle.model, oracle.backward, optimizer, range(2))
        oracle.replicas = replicas
        oracle.buffers[1] = [b.clone() for b in oracle.buffers[0]]  # Saved are replica 0's.
        steps(oracle.model, oracle.backward, optimizer, range(2, 3))
        given = saved, replicas * parts, folders(parts), path, True, seeded
        for now, replica, found in pyg_sar.launch(*given, replicas=replicas, timeout=60.0):
            assert (seeded and replicas == 1) or torch.equal(now, drawn[2 * replica])
            oracle.use_buffers(replica)
            for name, value in state(oracle.model).items():
                assert error(found[name], value) <= TOLERANCE, (replicas, parts, name)
