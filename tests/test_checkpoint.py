"""Checkpoints: whole or refused, the same on every worker; resumed curves; a killed worker."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_graphs import CLASSES, FEATURES, small_graph
from torch import nn

import pyg_sar
from pyg_sar.errors import CheckpointError
from pyg_sar.tools.models import build_model
from pyg_sar.train import checkpoint as module
from pyg_sar.train.callbacks import CheckpointEvery
from pyg_sar.train.checkpoint import load_checkpoint, save_checkpoint
from pyg_sar.train.config import EpochRecord, TrainConfig
from pyg_sar.train.trainer import Callback, Trainer, call_model

CONFIG = TrainConfig(epochs=8, lr=0.05, schedule="plateau", step_size=1, warmup=1, patience=50)


def make_model(name: str = "gat", hidden: int = 4, norm: str = "batch") -> nn.Module:
    torch.manual_seed(1)
    return build_model(name, FEATURES, hidden, CLASSES, heads=2, dropout=0.4, norm=norm)


def make_trainer(config: TrainConfig = CONFIG, **options: Any) -> Trainer:
    return Trainer(make_model(), small_graph(), config, **options)


def same_state(a: nn.Module, b: nn.Module) -> bool:
    others = b.state_dict()
    return all(torch.equal(value, others[key]) for key, value in a.state_dict().items())


# One process #################################################################


class SaveAt(Callback):
    """Saves after one epoch of a longer training."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.epoch == self.epoch:
            trainer.save(self.path, note="half way")


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_a_resumed_run_continues_the_very_same_curve(tmp_path, optimizer):
    path = tmp_path / "run.ckpt"
    config = replace(CONFIG, optimizer=optimizer)
    whole = make_trainer(config, callbacks=[SaveAt(path, 5)])
    reference = whole.fit()
    torch.manual_seed(99)  # A resumed run starts in another process, at another random state.
    resumed = make_trainer(config)
    checkpoint = resumed.resume(path)
    assert resumed.epoch == 5 and checkpoint.state["extra"] == {"note": "half way"}
    result = resumed.fit()
    assert result.losses == reference.losses
    assert replace(result, seconds=0.0) == replace(reference, seconds=0.0)
    assert same_state(whole.model, resumed.model)
    assert [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]


def test_what_numpy_and_python_draw_goes_on(tmp_path):
    def make(**options: Any) -> Trainer:
        def forward(model: nn.Module, data: Any) -> Any:  # As negative sampling does.
            return call_model(model, data) * (random.gauss(2, 0.3) + float(np.random.randn()))

        return Trainer(make_model(), small_graph(), CONFIG, forward=forward, **options)

    path = tmp_path / "run.ckpt"
    whole = make(callbacks=[SaveAt(path, 3)]).fit()
    assert make().fit().losses == whole.losses  # config.seed decides them all.
    resumed = make()
    resumed.resume(path)
    assert resumed.fit().losses == whole.losses


class Anneal(Callback):
    """Changes options of the optimizer by hand."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        for group in trainer.optimizer.param_groups:
            group |= {"lr": group["lr"] * 0.7, "momentum": 0.5 if record.epoch > 2 else 0.9}


def test_options_of_ones_own_optimizer_and_scheduler_go_on(tmp_path):
    def make(lr: float = 0.1, decay: float = 1e-3, size: int | None = None, **rest: Any) -> Trainer:
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=decay)
        rest["scheduler"] = None if size is None else torch.optim.lr_scheduler.StepLR(sgd, size)
        return Trainer(model, small_graph(), TrainConfig(epochs=8), optimizer=sgd, **rest)

    path, stepped = tmp_path / "run.ckpt", tmp_path / "stepped.ckpt"
    whole = make(callbacks=[Anneal(), SaveAt(path, 3)]).fit()
    resumed = make(callbacks=[Anneal()])
    resumed.resume(path)
    assert resumed.fit().losses == whole.losses
    make(size=5).save(stepped)
    groups = r"settings: optimizer\.param_groups\[0\]\['"
    for file, other, text in (
        (path, make(lr=0.2), groups + r"lr'\]=0\.1 is now 0\.2; give"),
        (path, make(decay=1.0), groups + r"weight_decay'\]=0\.001 is now 1\.0; give"),
        (stepped, make(size=6), r"settings: scheduler\.step_size=5 is now 6; give"),
    ):
        with pytest.raises(CheckpointError, match=text):
            other.resume(file)
    other = make(decay=1.0)
    other.resume(path, allow_changes=True)
    (group,) = other.optimizer.param_groups
    assert (group["weight_decay"], group["momentum"]) == (1.0, 0.5)
    assert group["lr"] == pytest.approx(0.1 * 0.7**3)


def test_momentum_and_other_group_options_come_back(tmp_path):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model(norm="none")
        first, second = model.convs
        groups = [{"params": first.parameters(), "lr": 0.3}, {"params": second.parameters()}]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = small_graph()
        optimizer.zero_grad()
        model(data.x, data.edge_index).square().mean().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    save_checkpoint(tmp_path / "c", model, optimizer, state={"a": [1, None, "x"]})
    other, resumed = make()
    assert load_checkpoint(tmp_path / "c", other, resumed).state == {"a": [1, None, "x"]}
    step(other, resumed)
    load_checkpoint(tmp_path / "c", restore_rng=True)  # The same dropout as the other one had.
    step(model, optimizer)
    assert same_state(model, other)
    assert resumed.param_groups[0]["lr"] == 0.3 and resumed.param_groups[1]["momentum"] == 0.9


def test_best_weights_and_weights_alone(tmp_path):
    trainer = make_trainer(callbacks=[CheckpointEvery(tmp_path / "c", every=3)])
    trainer.fit()  # Leaves the best weights in the model; the checkpoint has both.
    torch.manual_seed(5)
    before = torch.get_rng_state()
    best, last = make_model(), make_model()
    before = torch.get_rng_state()
    load_checkpoint(tmp_path / "c", best, weights="best")
    load_checkpoint(tmp_path / "c", last)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_state(best, trainer.model)
    assert trainer.best_epoch == trainer.epoch or not same_state(last, trainer.model)
    save_checkpoint(tmp_path / "d", best)
    with pytest.raises(CheckpointError, match="holds no 'best' weights"):
        load_checkpoint(tmp_path / "d", best, weights="best")
    with pytest.raises(CheckpointError, match="to be 'last' or 'best'"):
        load_checkpoint(tmp_path / "d", best, weights="first")  # type: ignore[arg-type]


def test_tied_weights_and_odd_dtypes(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)).bfloat16()
    model[1].weight = model[0].weight
    model.register_buffer("flag", torch.tensor(True))
    model.register_buffer("empty", torch.empty(0, 4))
    save_checkpoint(tmp_path / "c", model, tensors={"mine": torch.arange(3)})
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint = load_checkpoint(tmp_path / "c", model)
    assert torch.equal(checkpoint.tensors["mine"], torch.arange(3))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Writes the file anew after ``change(tensors, header)``."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["pyg_sar"])
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    change(tensors, header)
    save_file(tensors, path, metadata={"pyg_sar": json.dumps(header)})


def signed(path: Path, name: str, value: Any) -> None:
    """Changes a field of the header as another program may, with its checksum."""

    def change(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        header[name] = value
        header["sha256"] = module._digest(module._Content(tensors, header))

    rewrite(path, change)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def foreign(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: p.unlink(), "there is no such file"),
    "truncated": (truncate, "truncated or damaged"),
    "empty": (lambda p: p.write_bytes(b""), "truncated or damaged"),
    "text": (lambda p: p.write_text("no tensors " * 50), "truncated or damaged"),
    "a bit": (flip, "checksum is wrong"),
    "a number": (
        lambda p: rewrite(p, lambda t, h: h["state"].update(epoch=1)),
        "checksum is wrong",
    ),
    "foreign": (foreign, "not a checkpoint of pyg_sar"),
    "torch.save": (lambda p: torch.save({}, p), r"no checkpoint of pyg_sar; .* torch\.save loads"),
    **{
        f"other {name}": (lambda p, name=name, value=value: signed(p, name, value), message)
        for name, value, message in (
            ("state", [], r"header says state=\[\], not a dict"),
            ("world_size", "1", "header says world_size='1'"),
            ("optimizer", {"class": "Adam"}, r"header says optimizer\.groups=None"),
        )
    },
    "newer": (
        lambda p: rewrite(p, lambda t, h: h.update(version=2)),
        "format version 2, this package knows 1; update",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_and_nothing_changes(tmp_path, damage):
    path = tmp_path / "c"
    make_trainer().save(path)
    change, message = DAMAGES[damage]
    change(path)
    trainer = make_trainer()
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer.resume(path)
    assert str(path) in str(caught.value)
    assert trainer.epoch == 0
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())


def test_another_model_optimizer_or_settings_are_refused(tmp_path):
    path, data = tmp_path / "c", small_graph()
    make_trainer().save(path)
    with pytest.raises(CheckpointError, match=r"another model: .*float32 \[4\] in the checkpoint"):
        load_checkpoint(path, make_model(hidden=2))
    with pytest.raises(CheckpointError, match=r"another model: convs\.0\.\S+ is only in the"):
        load_checkpoint(path, make_model("gin"))
    model = make_model()
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=r"another optimizer: Adam .* this run has SGD"):
        load_checkpoint(path, model, sgd)
    changed = replace(CONFIG, lr=0.2, gamma=0.1, epochs=99, patience=7)
    message = r"other settings: lr=0\.05 is now 0\.2, gamma=0\.5 is now 0\.1; give the same, or"
    with pytest.raises(CheckpointError, match=message):
        make_trainer(changed).resume(path)
    trainer = make_trainer(changed)
    trainer.resume(path, allow_changes=True)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1  # On the ramp to 0.2.
    data.train_mask[:9] = False
    with pytest.raises(CheckpointError, match="another graph or other splits: other labels or s"):
        Trainer(make_model(), data, CONFIG).resume(path)
    save_checkpoint(path, model, sgd)
    with pytest.raises(CheckpointError, match="not saved by a Trainer"):
        make_trainer().resume(path)
    save_checkpoint(path, model)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load_checkpoint(path, model, sgd)


@pytest.mark.parametrize("kind", ["MultiStepLR", "ReduceLROnPlateau", "OneCycleLR"])
def test_a_scheduler_of_a_loop_goes_on(kind, tmp_path):
    options: dict[str, Any] = {"milestones": [1, 3]} if kind == "MultiStepLR" else {}
    options |= {"max_lr": 1.0, "total_steps": 6} if kind == "OneCycleLR" else {}

    def made() -> tuple[Any, Any, Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, optimizer, getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)

    def step(optimizer: Any, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    (model, *first), (again, *second) = made(), made()
    if kind != "ReduceLROnPlateau":  # Before its first step its best value is infinite.
        step(*first)
    state = {"scheduler": first[1].state_dict(), "odd": ({1: None}, float("inf"))}
    save_checkpoint(tmp_path / "c", model, first[0], state=state)
    found = load_checkpoint(tmp_path / "c", again, second[0]).state
    second[1].load_state_dict(found["scheduler"])
    assert [step(*second) for _ in range(4)] == [step(*first) for _ in range(4)]
    assert found["odd"] == state["odd"]


def test_what_cannot_be_written_leaves_the_file_before(tmp_path):
    path, model = tmp_path / "c", make_model()
    save_checkpoint(path, model, state={"n": 1})
    for value, why in (
        (object(), "not JSON serializable"),
        ((OrderedDict(a=1),), r"state\['n'\] does not come back from JSON as it is"),
        (torch.ones(2), r"state\['n'\] is a Tensor: .* call \.tolist\(\)"),
    ):
        with pytest.raises(CheckpointError, match=f"Cannot write the checkpoint.*{why}"):
            save_checkpoint(path, model, state={"n": value})
    with pytest.raises(CheckpointError, match="Cannot write the checkpoint"):
        save_checkpoint(tmp_path / "no" / "c", model)
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: sum(p.square().sum() for p in model.parameters()))
    optimizer.state[optimizer.param_groups[0]["params"][0]] |= {"old_dirs": [torch.ones(2)]}
    with pytest.raises(CheckpointError, match="LBFGS keeps several tensors in 'old_dirs'"):
        save_checkpoint(path, model, optimizer)
    assert load_checkpoint(path).state == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    with pytest.raises(ValueError, match="'every' to be an integer of at least 1"):
        CheckpointEvery(path, every=0)
    trainer = make_trainer(callbacks=[CheckpointEvery(tmp_path / "no" / "c")])
    with pytest.raises(CheckpointError, match=r"no/c': there is no folder '.*no' where rank 0 may"):
        trainer.fit()
    assert trainer.epoch == 0


def test_files_of_other_runs_are_not_replaced(tmp_path):
    path = tmp_path / "c"

    def run(epochs: int, *others: Callback, **options: Any) -> Trainer:
        config = replace(CONFIG, epochs=epochs, restore_best=False)
        return make_trainer(config, callbacks=[*others, CheckpointEvery(path, every=2, **options)])

    class OtherRun(Callback):
        def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
            if record.epoch == 5:
                save_checkpoint(path, make_model())

    refused = pytest.raises(CheckpointError, match=r"/c': the file is there, of another run; go on")
    path.write_text("mine")
    with refused:
        run(2).fit()
    assert path.read_text() == "mine"
    path.unlink()
    trainer = run(4)
    trainer.fit()
    trainer.config = replace(trainer.config, epochs=5)
    trainer.fit()  # Its own file.
    before = path.read_bytes()
    with refused:
        run(6).fit()
    assert path.read_bytes() == before
    resumed = run(8, OtherRun())
    resumed.resume(path)
    path.write_bytes(before)  # The same content may lie in another file.
    resumed.fit()
    with refused:
        run(6, OtherRun(), overwrite=True).fit()  # Two runs at once: the second one says it.
    assert load_checkpoint(path).state == {}
    path.unlink()
    run(2).fit()


# Several workers #############################################################

KILLED_AT = 7
WORKERS = 3


def parallel_trainer(parts: str, **options: Any) -> Trainer:
    data = pyg_sar.load_partition(parts)
    return Trainer(pyg_sar.distribute(make_model()), data, CONFIG, **options)


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def sweep(folder: str) -> dict[str, Any]:
    """Runs on each worker: the uninterrupted curve, the killed run's sequel, and bad files."""
    here, parts, rank = Path(folder), f"{folder}/parts", pyg_sar.comm.current().rank
    comm = pyg_sar.comm.current()
    whole = parallel_trainer(parts, callbacks=[SaveAt(here / "whole", 3)])
    reference = whole.fit()
    torch.manual_seed(rank + 50)
    resumed = parallel_trainer(parts)
    resumed.resume(here / "killed.ckpt")
    start = resumed.epoch
    again = resumed.fit()
    errors = {}
    for name, (change, _) in DAMAGES.items():
        comm.barrier()
        if rank == 0:
            target = here / name
            target.write_bytes((here / "whole").read_bytes())
            change(target)
        comm.barrier()
        trainer = parallel_trainer(parts)
        errors[name] = attempt(lambda: trainer.resume(here / name))  # noqa: B023
    own = here / f"copy-{rank}"
    own.write_bytes((here / "whole").read_bytes())
    if rank == 1:
        truncate(own)
    errors["one worker's"] = attempt(lambda: load_checkpoint(own))
    comm.barrier()
    own.write_bytes((here / ("whole" if rank else "killed.ckpt")).read_bytes())
    errors["not the same"] = attempt(lambda: load_checkpoint(own))
    errors["model"] = attempt(lambda: load_checkpoint(here / "whole", make_model(hidden=2)))
    errors["folder"] = attempt(lambda: whole.save(here / "no" / "c"))
    torch.manual_seed(rank)
    whole.save(here / "unlike")
    # One state of all workers is taken up by any number of them, as is that of one process.
    torch.manual_seed(0)
    load_checkpoint(here / "single", make_model(), restore_rng=True)
    return {
        "random": torch.rand(3),
        "losses": (reference.losses, again.losses),
        "results": (replace(reference, seconds=0.0), replace(again, seconds=0.0)),
        "start": start,
        "same": same_state(whole.model, resumed.model),
        "errors": errors,
    }


def killed_worker(folder: str) -> None:
    """A worker as torchrun starts it, in whose backward pass rank 1 is killed."""
    with pyg_sar.init(timeout=120) as comm:

        def forward(model: nn.Module, data: Any) -> torch.Tensor:
            out = call_model(model, data)
            if trainer.epoch + 1 == KILLED_AT and comm.rank == 1 and model.training:
                out.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
            return out

        saving = CheckpointEvery(f"{folder}/killed.ckpt", every=5)
        trainer = parallel_trainer(f"{folder}/parts", forward=forward, callbacks=[saving])
        try:
            trainer.fit()
        except pyg_sar.errors.LostWorkerError as error:
            print(f"lost {error.rank}: {error}")
            raise SystemExit(3) from error


def restarted_worker(folder: str) -> None:
    """A worker under torchrun: the first attempt loses one, the second goes on."""
    path = Path(folder) / "again.ckpt"
    with pyg_sar.init(timeout=120) as comm:

        class Die(Callback):
            def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
                first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
                if first and comm.rank == 0 and record.epoch == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)

        callbacks = [CheckpointEvery(path, every=3), Die()]
        trainer = parallel_trainer(f"{folder}/parts", callbacks=callbacks)
        if path.exists():
            trainer.resume(path)
        start = trainer.epoch
        losses = trainer.fit().losses
        whole = parallel_trainer(f"{folder}/parts").fit().losses
        (Path(folder) / f"rank{comm.rank}").write_text(json.dumps([start, losses, whole]))


def test_torchrun_starts_lost_workers_again(tmp_path):
    pyg_sar.write_partitions(small_graph(), 2, tmp_path / "parts", method="random")
    script = tmp_path / "script.py"
    script.write_text(
        f"import test_checkpoint\ntest_checkpoint.restarted_worker({str(tmp_path)!r})"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    ran = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):
        start, losses, whole = json.loads((tmp_path / f"rank{rank}").read_text())
        assert start == 6 and len(whole) == CONFIG.epochs
        assert losses == whole


def killed_workers(folder: str) -> None:
    """Workers without a parent that watches them: they have to find out by themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(WORKERS)
    pids = []
    for rank in range(WORKERS):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return killed_worker(folder)
    print("ended", [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


def test_a_worker_killed_mid_epoch_and_the_curve_after_it(tmp_path):
    data = small_graph()
    pyg_sar.write_partitions(data, WORKERS, tmp_path / "parts", method="random")
    torch.manual_seed(41)
    make_trainer().save(tmp_path / "single")
    drawn = torch.rand(3)
    code = f"import test_checkpoint; test_checkpoint.killed_workers({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert f"ended {[3, -signal.SIGKILL, 3]}" in ran.stdout, ran.stdout + ran.stderr
    told = [line for line in ran.stdout.splitlines() if line.startswith("lost 1: ")]
    assert len(told) == 2 and all("Rank 1 was lost" in t and "checkpoint" in t for t in told), told

    results = pyg_sar.launch(sweep, WORKERS, str(tmp_path))
    for result in results:
        whole, again = result["losses"]
        assert result["start"] == 5 and len(whole) == CONFIG.epochs
        assert again == whole
        assert result["results"][0] == result["results"][1]
        assert result["same"]
        assert result["losses"] == results[0]["losses"]
        for name, (_, message) in DAMAGES.items():
            assert re.search(message, result["errors"][name]), name
            assert "(rank" not in result["errors"][name]
        assert "truncated" in result["errors"]["one worker's"]
        assert "(rank 1)" in result["errors"]["one worker's"]
        assert "ranks 0 and 1 read different files" in result["errors"]["not the same"]
        assert "another model" in result["errors"]["model"]
        assert "Cannot write" in result["errors"]["folder"]
        assert "(rank 0)" in result["errors"]["folder"]
        assert torch.equal(result["random"], drawn)
    expected = "written by 3 ranks with different random states, this run has 1: start workers"
    with pytest.raises(CheckpointError, match=expected):
        load_checkpoint(tmp_path / "unlike", restore_rng=True)
    load_checkpoint(tmp_path / "whole", restore_rng=True)
