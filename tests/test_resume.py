"""Resuming on another number of workers, and on another partition of the same graph."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from combinations import some
from oracle import whole as in_full
from small_graphs import CLASSES, FEATURES, small_graph
from torch import Tensor, nn
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.comm.group import finalize
from pyg_sar.errors import CheckpointError
from pyg_sar.tensors import NodeTensor
from pyg_sar.tools.models import build_model
from pyg_sar.train.callbacks import CheckpointEvery
from pyg_sar.train.config import EpochRecord, TrainConfig
from pyg_sar.train.trainer import Callback, Trainer

PARTS, NODES, WIDTH = 4, 90, 3
CONFIG = TrainConfig(epochs=5, lr=0.05, schedule="plateau", step_size=1, warmup=1, seed=3)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
TRIED = some(list(DTYPES), "resume", 2)


class WithRows(nn.Module):
    """A GAT with batch norms whose nodes have a trained row besides their features."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = nn.Embedding(NODES, WIDTH)
        self.gnn = build_model(
            "gat", FEATURES + WIDTH, 4, CLASSES, heads=2, dropout=dropout, norm="batch"
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.gnn(torch.cat([x, self.rows.weight], dim=1), edge_index)


class SaveAt(Callback):
    """Saves after one epoch of a longer training."""

    def __init__(self, path: str, epoch: int = 3) -> None:
        self.path, self.epoch = path, epoch

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.epoch == self.epoch:
            trainer.save(self.path)


def make_trainer(
    data: Data, dropout: float, config: TrainConfig = CONFIG, **options: Any
) -> Trainer:
    model = WithRows(dropout).to(data.x.dtype)
    if isinstance(data.x, NodeTensor):
        model = pyg_sar.distribute(model)
    return Trainer(model, data, config, **options)


def curve(trainer: Trainer) -> tuple[list[float], Any, dict[str, Tensor]]:
    """Losses, scores and this rank's last weights."""
    result = trainer.fit()
    state = {name: in_full(value).clone() for name, value in trainer.model.state_dict().items()}
    return result.losses, (result.best_epoch, result.best, result.final), state


def saved_at(path: str | Path, epoch: int, start: str | Path = "") -> dict[str, Any]:
    """A part's program: it goes on from a checkpoint, and saves one after some epoch."""
    found = {}
    for dtype in TRIED:
        data = pyg_sar.load_partition(f"{Path(path).parent}/{dtype}")
        torch.manual_seed(99)  # A process starts at another random state.
        trainer = make_trainer(data, 0.4, callbacks=[SaveAt(f"{path}.{dtype}", epoch)])
        if start:
            trainer.resume(f"{start}.{dtype}")
            assert trainer.epoch == epoch - 1
        found[dtype] = curve(trainer)
    return found


def hosted(num_parts: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Runs the parts in this very process, one worker."""
    try:
        return pyg_sar.run(partial(fn, **options), *args, parts=num_parts)
    finally:
        finalize()


def same(a: Any, b: Any) -> bool:
    """Equal to the bit: losses, scores and weights."""
    return a[:2] == b[:2] and all(torch.equal(value, b[2][name]) for name, value in a[2].items())


def test_the_parts_of_a_checkpoint_go_on_in_any_number_of_workers(tmp_path):
    for name, dtype in DTYPES.items():
        graph = small_graph(NODES, dtype=dtype)
        pyg_sar.write_partitions(graph, PARTS, tmp_path / name, method="random")
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    whole = hosted(PARTS, saved_at, first, 2)
    runs = [
        pyg_sar.launch(saved_at, 3, second, 3, first, parts=PARTS),
        pyg_sar.launch(saved_at, 2, third, 4, second, parts=PARTS),
        hosted(PARTS, saved_at, str(tmp_path / "last"), 5, third),
    ]
    for part, expected in enumerate(whole):
        for dtype in TRIED:
            assert len(set(expected[dtype][0])) == CONFIG.epochs
            for workers, run in zip((3, 2, 1), runs, strict=True):
                assert same(run[part][dtype], expected[dtype]), (part, dtype, workers)


# Under torchrun, with hosts that come and go ##################################


def elastic_worker(folder: str) -> None:
    """A worker as torchrun starts it; with two of them, the second one's host is lost."""

    def train() -> None:
        comm = pyg_sar.comm.current()
        workers = len(set(comm.host.worker_of))

        class LoseHost(Callback):
            def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
                if workers == 2 and comm.rank == PARTS - 1 and record.epoch == 3:
                    os.kill(os.getppid(), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)

        data, path = (
            pyg_sar.load_partition(f"{folder}/parts"),
            Path(folder) / "run.ckpt",
        )
        callbacks = [CheckpointEvery(path, every=2), LoseHost()]
        trainer = make_trainer(data, 0.4, callbacks=callbacks)
        if path.exists():
            trainer.resume(path)
        found = [workers, trainer.epoch, trainer.fit().losses]
        (Path(folder) / f"part{comm.rank}").write_text(json.dumps(found))

    pyg_sar.run(train, parts=PARTS)


def test_the_hosts_that_are_left_go_on_with_all_parts(tmp_path):
    graph = small_graph(NODES, dtype=torch.float64)
    pyg_sar.write_partitions(graph, PARTS, tmp_path / "parts", method="random")
    script = tmp_path / "script.py"
    script.write_text(f"import test_resume\ntest_resume.elastic_worker({str(tmp_path)!r})")
    limit = timedelta(seconds=150)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    command += ["--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", "resume", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    quick = "is_host=false,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
    command += ["--rdzv-conf", quick, str(script)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    hosts = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        codes = sorted(host.wait(timeout=150) for host in hosts)
    finally:
        for host in hosts:
            host.terminate()  # It ends its workers.
    assert codes == [-signal.SIGKILL, 0]
    parts = tmp_path / "parts"
    whole = hosted(PARTS, lambda: curve(make_trainer(pyg_sar.load_partition(parts), 0.4)))[0][0]
    for part in range(PARTS):
        workers, start, losses = json.loads((tmp_path / f"part{part}").read_text())
        assert (workers, start) == (1, 2) and losses == whole


# Another partition ###########################################################


@pytest.fixture(scope="module")
def partitions(tmp_path_factory) -> Path:
    """The same graph in three parts, and in two by another method; and other graphs."""
    folder = tmp_path_factory.mktemp("partitions")
    graph = small_graph(NODES, dtype=torch.float64)
    pyg_sar.write_partitions(graph, 3, folder / "three", method="random")
    pyg_sar.write_partitions(graph, 3, folder / "other", method="random", seed=1)
    pyg_sar.write_partitions(graph, 2, folder / "two", method="contiguous")
    moved, named = copy.copy(graph), copy.copy(graph)
    moved.edge_index = graph.edge_index.clone()
    moved.edge_index[0, 5] = (moved.edge_index[0, 5] + 1) % NODES
    pyg_sar.write_partitions(moved, 2, folder / "edge", method="contiguous")
    named.y = graph.y.clone()
    named.y[[1, 2]] = named.y[[2, 1]]
    assert named.y[1] != named.y[2]
    pyg_sar.write_partitions(named, 2, folder / "label", method="contiguous")
    return folder


def loaded(root: str, turned: bool = False) -> Data:
    """The graph; ``turned``: its labels alone in another order."""
    data = pyg_sar.load_partition(root)
    data.y = data.y[torch.arange(NODES).flip(0)] if turned else data.y
    return data


def saved_run(root: str, path: str, dropout: float = 0.0, turned: bool = False) -> Any:
    data = loaded(root, turned)
    return curve(make_trainer(data, dropout, callbacks=[SaveAt(path)]))


def resumed_run(root: str, path: str, dropout: float = 0.0, turned: bool = False) -> Any:
    data = loaded(root, turned)
    trainer = make_trainer(data, dropout)
    trainer.resume(path)
    assert trainer.epoch == 3
    return (data.x.rows.ids, *curve(trainer))


def close(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-11, abs=0)


def test_another_partition_of_the_graph_continues_the_curve(partitions, tmp_path):
    path = str(tmp_path / "c")
    whole = hosted(3, saved_run, str(partitions / "three"), path)[0]
    for _, losses, _, state in hosted(2, resumed_run, str(partitions / "two"), path):
        rows = state["rows.weight"]
        close(losses, whole[0])
    other = hosted(3, resumed_run, str(partitions / "other"), path)
    for _, losses, scores, state in other:
        close(losses, whole[0])
        assert scores[0] == whole[1][0]
        torch.testing.assert_close(state["rows.weight"], rows, rtol=1e-9, atol=1e-12)
    # Plain PyG in one process.
    alone = make_trainer(small_graph(NODES, dtype=torch.float64), 0.0)
    alone.resume(path)
    close(alone.fit().losses, whole[0])
    torch.testing.assert_close(alone.model.rows.weight.data, rows, rtol=1e-9, atol=1e-12)


def test_labels_in_another_order_are_the_same_under_another_partition(partitions, tmp_path):
    path = str(tmp_path / "c")
    whole = hosted(3, saved_run, str(partitions / "three"), path, 0.0, True)[0]
    for _, losses, _, _ in hosted(2, resumed_run, str(partitions / "two"), path, 0.0, True):
        close(losses, whole[0])


def test_dropout_goes_on_with_the_same_masks(partitions, tmp_path):
    path = str(tmp_path / "c")
    whole = hosted(3, saved_run, str(partitions / "three"), path, 0.4)[0]
    for *_, losses, _, _ in hosted(2, resumed_run, str(partitions / "two"), path, 0.4):
        close(losses, whole[0])
    alone = make_trainer(small_graph(NODES, dtype=torch.float64), 0.4)
    alone.resume(path)
    close(alone.fit().losses, whole[0])


# What is refused #############################################################


def refused(root: str, path: str, **options: Any) -> str:
    data = pyg_sar.load_partition(root)
    if options.pop("without_edges", False):
        del data["edge_index"]
    trainer = make_trainer(data, 0.0)
    before = copy.deepcopy(trainer.model.state_dict())
    try:
        trainer.resume(path, **options)
    except CheckpointError as error:
        after = trainer.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return str(error)
    return ""


def test_other_graphs_are_refused_by_name(partitions, tmp_path):
    path = str(tmp_path / "c")
    hosted(3, saved_run, str(partitions / "three"), path)
    for name, text in (("edge", "other ends of edges"), ("label", "other labels or splits")):
        for message in hosted(2, refused, str(partitions / name), path):
            assert "belongs to another graph or other splits" in message
            assert message.endswith(text), message
    smaller = small_graph(50, dtype=torch.float64)
    model = build_model("gat", FEATURES, 4, CLASSES, heads=2).double()
    with pytest.raises(
        CheckpointError, match=r"other number of nodes \(\d+, now \d+\), number of edges .*labels"
    ):
        Trainer(model, smaller, CONFIG).resume(path)
    with pytest.raises(CheckpointError, match="it is of another model"):
        Trainer(model, small_graph(dtype=torch.float64), CONFIG).resume(path)


def test_other_graphs_to_evaluate_on_are_refused(tmp_path):
    data, other = (small_graph(n, dtype=torch.float64) for n in (NODES, 30))
    del data.val_mask
    moved = copy.copy(other)
    moved.edge_index = other.edge_index.flip(0)

    def trainer(on: Any) -> Trainer:
        model = build_model("sage", FEATURES, 4, CLASSES).double()
        return Trainer(model, data, CONFIG, evaluate_on={"val": on})

    trainer(other).save(path := tmp_path / "c")
    trainer(other).resume(path)
    for on, text in ((moved, "other ends of edges"), ([other, other], "other number of nodes")):
        with pytest.raises(CheckpointError, match=f"was evaluated on other graphs: {text}"):
            trainer(on).resume(path)
        trainer(on).resume(path, allow_changes=True)


def test_one_evaluation_more_than_without_a_stop_is_refused(tmp_path):
    """The last epoch is evaluated, which patience and a plateau would not have seen so early.

    Neither does a run go on from best weights, which fit() leaves in the place of the last.
    """

    def trainer(epochs: int, restore_best: bool = False, **options: Any) -> Trainer:
        torch.manual_seed(0)
        rest = {"eval_every": 2, "seed": 0, "restore_best": restore_best, **options}
        config = TrainConfig(epochs=epochs, **rest)
        return Trainer(build_model("sage", FEATURES, 4, CLASSES), small_graph(), config)

    for epochs, options in ((3, {"patience": 9}), (1, {"schedule": "plateau"})):
        first = trainer(epochs, **options)
        first.fit()
        first.save(path := tmp_path / "c")
        trainer(epochs, **options).resume(path)
        more = trainer(6, **options)
        with pytest.raises(CheckpointError, match=f"epochs={epochs}, after which it was evaluated"):
            more.resume(path)
        more.resume(path, allow_changes=True)
    first = trainer(4, restore_best=True)
    first.fit()
    first.save(path)
    more, whole = trainer(6), trainer(6)
    with pytest.raises(CheckpointError, match="weights of epoch 2 in the place of"):
        more.resume(path)
    first = trainer(4)
    first.fit()
    first.save(path)
    more.resume(path)
    results = [replace(one.fit(), seconds=0.0) for one in (more, whole)]
    assert results[0] == results[1]


def test_what_cannot_be_shown_to_be_the_same_graph_is_refused(partitions, tmp_path):
    path = str(tmp_path / "c")
    hosted(3, saved_run, str(partitions / "three"), path)
    for message in hosted(2, refused, str(partitions / "two"), path, without_edges=True):
        assert "it can't be shown that they are of the same graph" in message
        assert "must have an 'edge_index'" in message
        assert "Start workers that host 3 parts" in message


def test_state_of_one_worker_alone_is_not_saved(partitions, tmp_path):
    def save(root: str, path: str) -> str:
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(WithRows(0.0).double())
        here = len(data.x.to_local())
        model.register_buffer("seen", torch.zeros(here, here))
        try:
            pyg_sar.train.save_checkpoint(path, model)
        except CheckpointError as error:
            return str(error)
        return ""

    uneven = torch.tensor([0] * 40 + [1] * 50)
    graph = small_graph(NODES, dtype=torch.float64)
    pyg_sar.write_partitions(graph, 2, tmp_path / "parts", uneven)
    for buffer in hosted(2, save, str(tmp_path / "parts"), str(tmp_path / "c")):
        assert "'model/seen' has the shape [40, 40] on rank 0, [50, 50] on rank 1" in buffer
    assert not (tmp_path / "c").exists()


def test_more_workers_than_parts():
    with pytest.raises(ValueError, match="parts=2 can be hosted by 1 to 2 workers"):
        pyg_sar.launch(len, 3, "", parts=2)
