"""After training: models from checkpoints, outputs for all nodes, and the file that holds them."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hetero_graphs import make_hetero, random_parts
from hosted_workers import host
from oracle import TOLERANCE, Partitions, make_graph, workers
from small_graphs import CLASSES, FEATURES, small_graph
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAT, GCN, GATConv, GraphSAGE, HeteroConv, SAGEConv

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.errors import CheckpointError, WorkerError
from pyg_sar.kernels import ops
from pyg_sar.partition.storage import merge_partitions
from pyg_sar.reduction import rows_file
from pyg_sar.reduction.rows_file import write_rows
from pyg_sar.tools import cli, inference, predict
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.run import ModelConfig
from pyg_sar.train.callbacks import CheckpointEvery
from pyg_sar.train.checkpoint import inspect_checkpoint, load_checkpoint
from pyg_sar.usage import MODELS, NORMS

NODES = 40
IN_PARTS = pytest.mark.skipif(
    not (ops.built and sys.platform.startswith("linux")), reason="a store needs Linux and kernels"
)


def sage() -> nn.Module:
    """A model that trains, but for one layer."""
    torch.manual_seed(0)
    model = GraphSAGE(6, 8, 2, 3, norm="batch_norm", dropout=0.5).double()
    model.train()
    model.convs[0].eval()
    return model


def whole(model: nn.Module, data: Any) -> Tensor:
    """The oracle: plain PyG in one process."""
    with torch.no_grad():
        out: Tensor = copy.deepcopy(model).eval()(data.x, data.edge_index)
    return out


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def close(found: Any, expected: Tensor) -> bool:
    return torch.allclose(torch.as_tensor(found), expected, rtol=0, atol=TOLERANCE)


# Inference ####################################################################


@pytest.mark.parametrize("world", [1, 3])
def test_outputs_are_those_of_one_process(world: int, partitions: Partitions, tmp_path: Path):
    data, model = make_graph(NODES), sage()
    expected = whole(model, data)
    path = tmp_path / "out.npy"
    part = torch.arange(NODES) % max(world - 1, 1)  # The last worker has no nodes.

    def worker(root: Path) -> None:
        mine, plain = pyg_sar.load_partition(root), copy.deepcopy(model)
        before = [type(module) for module in plain.modules()], modes(plain)
        rows = pyg_sar.infer(plain, mine, out=path)
        assert close(rows.full_tensor(), expected) and not rows.requires_grad
        assert ([type(module) for module in plain.modules()], modes(plain)) == before
        trained = pyg_sar.distribute(plain)
        assert close(pyg_sar.infer(trained, mine).full_tensor(), expected)
        assert modes(trained) == before[1]

    workers(worker, world, partitions(data, world, part))
    found = np.load(path)
    assert found.dtype == np.float64 and close(found, expected)
    assert os.listdir(tmp_path) == ["out.npy"]


def test_in_one_process(tmp_path: Path):
    data, model = make_graph(NODES), sage()
    expected, before = whole(model, data), modes(model)
    assert close(pyg_sar.infer(model, data), expected)
    rows = pyg_sar.infer(model, data, out=tmp_path / "out.npy")
    rows += 1  # A change of what is mapped stays in memory.
    assert close(np.load(tmp_path / "out.npy"), expected) and modes(model) == before
    with pytest.raises(ZeroDivisionError):
        pyg_sar.infer(model, data, forward=lambda model, data: data.x / (1 // 0))
    assert modes(model) == before


def test_what_layers_remember_belongs_to_their_graph(partitions: Partitions):
    """``cached=True`` would give the first graph's normalisation to the second."""
    first, second = make_graph(NODES), make_graph(NODES, seed=1)
    model = GCN(6, 8, 2, 3, cached=True).double()
    expected = [whole(model, data) for data in (first, second)]
    model(first.x, first.edge_index)
    kept = model.convs[0]._cached_edge_index
    assert all(
        close(pyg_sar.infer(model, data), out)
        for data, out in zip((first, second), expected, strict=True)
    )

    def worker(root: Path) -> None:
        mine, plain = pyg_sar.load_partition(root), copy.deepcopy(model)
        assert close(pyg_sar.infer(plain, mine).full_tensor(), expected[1])

    workers(worker, 2, partitions(second, 2))
    assert model.convs[0]._cached_edge_index is kept and kept is not None


def test_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also a model of layers that ``distribute`` has made, which no other process knows."""
    data, calls = make_graph(NODES), []

    def launched(fn: Any, workers: int, *args: Any, **options: Any) -> None:
        calls.append((workers, options))
        sent = pickle.dumps(args)
        plain = pickle.loads(sent)[0]
        assert {type(module) for module in plain.modules()} & {GATConv, SAGEConv}
        host(lambda: fn(*pickle.loads(sent)), options["parts"])

    monkeypatch.setattr(inference, "launch", launched)
    for model in (sage(), pyg_sar.distribute(GAT(6, 8, 2, 3, heads=2).double())):
        expected, before = whole(model, data), (modes(model), type(model.convs[0]))
        rows = pyg_sar.infer(model, data, memory="150MiB", out=tmp_path / "out.npy", workers=2)
        assert close(rows, expected) and close(np.load(tmp_path / "out.npy"), expected)
        assert close(pyg_sar.infer(model, data, parts=3), expected)
        assert (modes(model), type(model.convs[0])) == before
        assert os.listdir(tmp_path) == ["out.npy"]
    (workers, options), second = calls[:2]
    assert workers == options["parts"] == 2 and options["memory"] == 150 << 20
    assert Path(options["store"]).parent == tmp_path and second == (1, {"parts": 3})


class Centred(nn.Module):
    """Reduces over all nodes in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(6, 3).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x - x.mean(0), edge_index)
        share = torch.softmax(out.sum(1), dim=0) * x.size(0)
        return (out - out.max(0).values) * share.view(-1, 1)


def test_models_that_reduce_over_nodes(
    partitions: Partitions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a partition's parts, a plain model and a distributed one; and on those of a graph."""
    data, model = make_graph(NODES), Centred()
    expected, root, path = whole(model, data), partitions(data, 3), tmp_path / "out.npy"

    def part() -> None:
        mine: Any = pyg_sar.load_partition(root)
        for taken in (model, pyg_sar.distribute(copy.deepcopy(model))):
            rows = pyg_sar.infer(taken, mine, out=path)
            assert np.abs(rows.numpy() - expected.numpy()).max() < TOLERANCE
        assert type(model.conv) is SAGEConv

    def launched(fn: Any, workers: int, *args: Any, parts: int) -> None:
        host(lambda: fn(*copy.deepcopy(args)), parts)

    host(part, 3)
    assert close(torch.from_numpy(np.load(path)), expected)
    monkeypatch.setattr(inference, "launch", launched)
    assert close(pyg_sar.infer(model, data, parts=3), expected)
    alike = r"result of the nodes.*got shape .40, 2. on all workers, at rank 0.: pass forward="
    with pytest.raises(WorkerError, match=alike):
        pyg_sar.infer(model, data, parts=2, forward=lambda m, d: torch.ones(NODES, 2))


def measured(fn: Any, *args: Any) -> tuple[int, int]:
    """MiB of the process before ``fn``, and at most."""

    def resident(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0]) // 1024

    before = resident("VmRSS")
    fn(*args)
    return before, resident("VmHWM")


@IN_PARTS
def test_parts_follow_from_the_memory(monkeypatch: pytest.MonkeyPatch):
    data: Any = load_graph("synthetic:nodes=15000,degree=6,features=16,classes=8")
    model = GraphSAGE(16, 256, 3, 8)
    expected, calls = whole(model, data), []
    launch = pyg_sar.launch

    def watched(fn: Any, workers: int, *args: Any, **options: Any) -> list[Any]:
        if not calls:
            calls.append((options["parts"], 0, 0))
            raise WorkerError("StoreError: memory=1: Cut the graph into more parts", rank=0)
        found = launch(measured, workers, fn, *args, **options)
        calls.append((options["parts"], found[0][0], max(most for _, most in found)))
        return found

    monkeypatch.setattr(inference, "launch", watched)
    rows = pyg_sar.infer(model, data, memory="96MiB")
    assert float((rows - expected).abs().max()) < 1e-5
    (first, _, _), (second, before, most) = calls
    assert 1 < first < second and most - before <= 96


class Types(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = {("author", "writes", "paper"): (5, 6), ("paper", "written_by", "author"): (6, 5)}
        self.conv = HeteroConv({name: SAGEConv(pair, 4) for name, pair in widths.items()})

    def forward(self, x: Any, edges: Any) -> Any:
        kept = [key for key in edges if key[1] in ("writes", "written_by")]
        return self.conv(x, {key: edges[key] for key in kept})


def by_type(model: Any, data: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = model(data.x_dict, data.edge_index_dict)
    return found


def test_node_types(tmp_path: Path):
    data, model = make_hetero(), Types()
    with torch.no_grad():
        expected = model.double()(data.x_dict, data.edge_index_dict)["paper"]
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", random_parts(data, 3))

    def worker() -> None:
        mine: Any = pyg_sar.load_partition(tmp_path / "parts")
        rows = pyg_sar.infer(model, mine, out=tmp_path / "out.npy", node_type="paper")
        assert close(rows.full_tensor(), expected)

    workers(worker, 3)
    assert close(np.load(tmp_path / "out.npy"), expected)
    assert close(pyg_sar.infer(model, data, node_type="paper"), expected)
    asked: list[Any] = [by_type, lambda m, d: by_type(m, d)["paper"]]
    for forward in asked:
        rows = pyg_sar.infer(model, data, node_type="paper", forward=forward)
        assert close(rows, expected)
    found = pyg_sar.infer(model, data, node_type="paper", forward=by_type, parts=3)
    assert close(found, expected)
    with pytest.raises(ValueError, match=r"4 nodes of rank 0 .got dict.: pass .* that does"):
        pyg_sar.infer(model, data, node_type="venue", forward=by_type)
    with pytest.raises(ValueError, match="'node_type' to be one of"):
        pyg_sar.infer(model, data)


def test_other_outputs(tmp_path: Path):
    """Classes, half precision, more axes, no columns; what has no row per node is refused."""
    data, model, path = make_graph(NODES), sage(), tmp_path / "out.npy"
    expected = whole(model, data)
    shapes: dict[Any, Any] = {
        "classes": lambda out: out.argmax(-1),
        "half": lambda out: out.half(),
        "axes": lambda out: out.view(-1, 3, 1),
        "no columns": lambda out: out[:, :0],
        "bool": lambda out: out > 0,
    }
    for name, change in shapes.items():
        rows = pyg_sar.infer(
            model, data, out=path, forward=lambda m, d, c=change: c(m(d.x, d.edge_index))
        )
        assert torch.equal(rows, change(expected)), name
    rows = pyg_sar.infer(
        model.bfloat16(), data, out=path, forward=lambda m, d: m(d.x.bfloat16(), d.edge_index)
    )
    assert rows.dtype == torch.float32 and torch.equal(rows, rows.bfloat16().float())
    for wrong in (lambda m, d: d.x[:3], lambda m, d: {"a": d.x}, lambda m, d: d.x.sum()):
        with pytest.raises(ValueError, match=r"40 nodes of rank 0 .got .*pass forward="):
            pyg_sar.infer(model, data, forward=wrong)  # type: ignore[arg-type]


def test_arguments_that_do_not_fit(partitions: Partitions):
    data, model = make_graph(NODES), sage()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"store": "."}, "store='.' is for parts: pass memory= or parts="),
        ({"workers": 2}, "workers=2 is for parts"),
        ({"parts": 0}, "'parts' to be an integer of at least 1 or None .got 0"),
        ({"parts": 2, "workers": True}, "'workers' to be an integer of at least 1 .got True"),
        ({"memory": "lots"}, "memory='lots' must be"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            pyg_sar.infer(model, data, **options)
    with pytest.raises(TypeError, match="got list at rank 0"):
        pyg_sar.infer(model, [data])  # type: ignore[arg-type]

    def worker(root: Path) -> None:
        with pytest.raises(ValueError, match=r"at rank \d of 2 is not a part"):
            pyg_sar.infer(model, data)
        with pytest.raises(ValueError, match=r"memory='1GiB' is of the workers.*rank \d"):
            pyg_sar.infer(model, pyg_sar.load_partition(root), memory="1GiB")

    workers(worker, 2, partitions(data, 2))


# The file #####################################################################


def permuted(world: int) -> list[Tensor]:
    """Places of each worker's rows, in no order."""
    order = torch.randperm(NODES, generator=torch.Generator().manual_seed(1))
    return [order[rank::world] for rank in range(world)]


def test_each_worker_writes_its_rows(tmp_path: Path):
    path, sent = tmp_path / "rows.npy", []

    def worker(rows: Tensor, window: int) -> int:
        comm = pyg_sar.comm.current()
        places = permuted(3)[comm.rank]
        with pytest.MonkeyPatch.context() as patch, pyg_sar.Ledger(comm) as ledger:
            patch.setattr(rows_file, "_WINDOW", window)
            write_rows(rows[places], places, path)
        return ledger.sent

    for width, window in ((5, 2**24), (5, 100), (5000, 2**24)):
        rows = torch.randn(NODES, width)
        sent.append(max(workers(worker, 3, rows, window)))
        assert np.array_equal(np.load(path), rows.numpy()) and os.listdir(tmp_path) == ["rows.npy"]

    # A byte per row and some words travel, whatever a row holds.
    assert sent[2] <= sent[0] + 32 and sent[0] < 5000


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "rows.npy"
    rows, write = torch.randn(NODES, 2), rows_file._write_own

    def worker(module: Any, name: str, change: Any) -> str:
        places = permuted(2)[pyg_sar.comm.current().rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, change)
            try:
                write_rows(rows[places], places, path)
            except OSError as error:
                return f"{error.errno} {error}"
        return ""

    def watched(hidden: Path, *args: Any) -> None:
        assert not path.exists() and hidden.parent.parent == tmp_path
        write(hidden, *args)

    assert workers(worker, 2, rows_file, "_write_own", watched) == ["", ""]
    before = path.read_bytes()

    def full(*args: Any) -> None:
        if pyg_sar.comm.current().rank == 1:
            raise OSError(errno.EIO, "Input/output error")

    for error in workers(worker, 2, rows_file, "_write_own", full):
        assert error.startswith(f"{errno.EIO} ") and "rank 1" in error and "rows.npy" in error

    def no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for error in workers(worker, 2, os, "posix_fallocate", no_space):
        assert (
            error.startswith(f"{errno.ENOSPC} ")
            and "free some space" in error
            and "rows.npy" in error
        )
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["rows.npy"]


def test_rows_that_are_not_all_nodes(tmp_path: Path):
    def worker() -> None:
        rank = pyg_sar.comm.current().rank
        places = torch.arange(4) + 4 * rank
        wrong: list[tuple[Tensor, Tensor, str]] = [
            (torch.ones(4), torch.arange(4) + 3 * rank, "not 0 to 7, each once"),
            (torch.ones(4), torch.arange(4), "not 0 to 7, each once"),
            (torch.ones(4), places.flip(0) // 2, "not 0 to 7, each once"),
            (torch.ones(4 - rank), places, "rank 1: Expected 'values' to have one row per node"),
            (torch.ones(4, 1 + rank), places, "row shape .1. at rank 0 and .2. at rank 1"),
            (torch.ones(4).bfloat16(), places, "BFloat16"),
        ]
        for values, ids, message in wrong:
            with pytest.raises(ValueError, match=message):
                write_rows(values, ids, tmp_path / "rows.npy")

    workers(worker, 2)
    assert os.listdir(tmp_path) == []


# Checkpoints ##################################################################


class Mine(nn.Module):
    def __init__(self, hidden: int, *, norm: bool = True) -> None:
        super().__init__()
        self.net = GCN(FEATURES, hidden, 2, CLASSES, norm="batch_norm" if norm else None)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.net(x, edge_index)
        return out


def trained(model: nn.Module, path: Path, epochs: int = 3, /, **extra: Any) -> pyg_sar.Trainer:
    config = pyg_sar.train.TrainConfig(epochs=epochs, lr=0.1, restore_best=False)
    callbacks = [CheckpointEvery(path, epochs, overwrite=True, **extra)]
    trainer = pyg_sar.Trainer(model, small_graph(), config, callbacks=callbacks)
    trainer.fit()
    return trainer


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_models_without_remembering_arguments(tmp_path: Path):
    path, arguments = tmp_path / "run.ckpt", {"hidden": 6, "norm": True}
    model = Mine(6)
    trainer = trained(model, path, arguments=arguments)
    for weights, state in (("last", model.state_dict()), ("best", trainer.best_state)):
        found = pyg_sar.tools.load_model(path, Mine, weights=weights)  # type: ignore[arg-type]
        assert type(found) is Mine and same(found, state) and not any(modes(found))
    plain = GCN(FEATURES, 4, 2, CLASSES, cached=True)
    trainer = trained(plain, path, **about("gcn", hidden=4))
    found = pyg_sar.tools.load_model(path)
    assert type(found) is GCN and same(found, trainer.best_state)
    assert not found.convs[0].cached  # The next graph is another one.


def about(
    name: Any, in_channels: Any = FEATURES, out_channels: Any = CLASSES, **options: Any
) -> dict[str, Any]:
    """What ``pyg-sar train`` writes of a model."""
    sizes = {"in_channels": in_channels, "out_channels": out_channels}
    return {"model": {"name": name, **options}, "pyg": {"name": "GCN", "arguments": sizes}}


def test_checkpoints_of_which_no_model_can_be_built(tmp_path: Path):
    path = tmp_path / "run.ckpt"
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({}, None, "does not say how its model is built: pass its class"),
        (about("gnc"), None, "Can't build the model of .*'name' to be one of .* .got 'gnc'"),
        (about(["gcn"]), None, r"'name' to be one of .* .got \['gcn'\]"),
        ({**about("gcn"), "pyg": []}, None, "does not say how its model is built"),
        (about("gcn", in_channels="3"), None, "Can't build the model of .*'in_channels'"),
        ({"arguments": {"width": 6}}, Mine, "Can't build the model of .*'width'"),
        ({"arguments": {"hidden": 7}}, Mine, "it is of another model"),
        ({}, lambda: 3, "returned int, not a torch.nn.Module"),
    ]
    model = Mine(6)
    for extra, make, message in wrong:
        trained(model, path, 1, **extra)
        with pytest.raises(CheckpointError, match=message):
            pyg_sar.tools.load_model(path, make)
    with pytest.raises(ValueError, match="'best' or 'last' .got 'worst'"):
        pyg_sar.tools.load_model(path, weights="worst")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="there is no such file"):
        pyg_sar.tools.load_model(tmp_path / "none.ckpt")


def test_a_checkpoint_runs_no_code(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """PyG's ``Sequential`` evaluates ``input_args``; others build what their arguments name."""
    path, sign = tmp_path / "run.ckpt", tmp_path / "ran"
    pyg_sar.write_partitions(small_graph(), 1, tmp_path / "parts", "random")
    code = f"x: __import__('pathlib').Path({str(sign)!r}).touch() or x"
    forged: list[tuple[dict[str, Any], str]] = [
        (about("Sequential", input_args=code, modules=[]), "'name' to be one of .*'Sequential'"),
        (about("gcn", norm="GraphNorm"), "'norm' to be one of .*'GraphNorm'"),
        (about("gat", heads="2"), "'heads' to be an integer .*'2'"),
        (about("gin", hidden="4"), "'hidden' to be an integer .*'4'"),
        (about("gin", layers=True), "'layers' to be an integer .*True"),
        (about("sage", dropout=2), "'dropout' to be in .*2"),
        (about("sage", out_channels=None), "'out_channels' to be an integer .*None"),
    ]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for extra, message in forged:
        pyg_sar.train.save_checkpoint(path, nn.Linear(1, 1), state={"extra": extra})
        with pytest.raises(CheckpointError, match=message):
            pyg_sar.tools.load_model(path)
        command = ["predict", "--checkpoint", str(path), "--parts", str(tmp_path / "parts")]
        assert main([*command, "--out", str(tmp_path / "o.npy")]) != 0
        assert re.search(message, capsys.readouterr().err) and not sign.exists()


@pytest.mark.parametrize("name", MODELS)
def test_what_the_trainer_writes_is_built(name: str):
    """Every option of the command, with values of another type than their defaults."""
    for norm in NORMS:
        config = ModelConfig(name=name, hidden=8, layers=3, heads=4, dropout=0, norm=norm)
        stock = config.stock(3, 2)
        extra = json.loads(json.dumps({"model": asdict(config), "pyg": asdict(stock)}))
        assert predict._stock(extra) == config.stock(3, 2, cached=False)


def test_without_validation_nodes_the_last_weights_are_taken(tmp_path: Path):
    data, path = small_graph(), tmp_path / "run.ckpt"
    del data.val_mask
    model = Mine(6)
    config = pyg_sar.train.TrainConfig(epochs=1)
    saving = CheckpointEvery(path, 1, arguments={"hidden": 6})
    pyg_sar.Trainer(model, data, config, callbacks=[saving]).fit()
    assert same(pyg_sar.tools.load_model(path, Mine), model.state_dict())


# pyg-sar predict ##############################################################


def test_the_command(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    graph = "synthetic:nodes=200,degree=6,features=8,classes=3"
    assert main(["partition", graph, "--parts", "2", "--out", "parts", "--quiet"]) == 0
    alone, parts = {"RANK": "0", "WORLD_SIZE": "1"}, ["--parts", "parts"]
    with monkeypatch.context() as hosted:  # As under torchrun, with both parts.
        for name, value in alone.items():
            hosted.setenv(name, value)
        train = ["train", *parts, "--model", "gcn", "--norm", "batch", "--quiet", "--epochs", "3"]
        assert main([*train, "--checkpoint", "run.ckpt"]) == 0
        predict = ["predict", "--checkpoint", "run.ckpt", *parts, "--out"]
        assert main([*predict, "one.npy"]) == 0
        Path("net.py").write_text(
            "from torch_geometric.nn import GCN\n"
            "def make(data): return GCN(data.num_features, 64, 2, 3, norm='BatchNorm')\n"
            "class Net(GCN):\n"
            "    def __init__(self, data): super().__init__(data.num_features, 8, 2, 3)\n"
            "    def forward(self, x, edge_index, train_mask=None):\n"
            "        out = super().forward(x, edge_index)\n"
            "        return out if train_mask is None else out + train_mask.view(-1, 1)\n"
        )
        assert main([*predict, "own.npy", "--model", "net.py:make"]) == 0
        own = ["--checkpoint", "own.ckpt", *parts, "--model", "net.py:Net"]
        given = ["--args", "x,edge_index,train_mask"]
        assert main(["train", *own, *given, "--epochs", "1", "--quiet"]) == 0
        capsys.readouterr()
        assert main(["train", *own, "--epochs", "2", "--resume", "--quiet"]) == cli.EXIT_USAGE
        assert "args=['x', 'edge_index', 'train_mask'] is now None" in capsys.readouterr().err
        assert main(["predict", *own[:2], *parts, "--out", "no.npy"]) == cli.EXIT_USAGE
        assert "how its model is built: add --model net.py:Net\n" in capsys.readouterr().err
        assert main(["predict", *own, "--out", "masked.npy"]) == 0
        assert main(["predict", *own, "--out", "plain.npy", "--args", "x,edge_index"]) == 0
    assert main([*predict, "two.npy"]) == 0
    assert "200 rows of [3] written to two.npy" in capsys.readouterr().out
    data: Any = merge_partitions("parts")
    added = np.load("masked.npy") - np.load("plain.npy")
    assert np.allclose(added, data.train_mask.view(-1, 1).numpy(), rtol=0, atol=1e-5)
    expected = whole(pyg_sar.tools.load_model("run.ckpt"), data)
    for name in ("one.npy", "own.npy", "two.npy"):
        assert np.allclose(np.load(name), expected.numpy(), rtol=0, atol=1e-5), name


def test_a_model_that_was_trained_with_labels(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """All training nodes of the split show their labels, as in the training's evaluations."""
    monkeypatch.chdir(tmp_path)
    graph = small_graph()
    splits = torch.rand(graph.num_nodes, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    graph.train_mask, graph.val_mask, graph.test_mask = splits, ~splits, ~splits
    pyg_sar.write_partitions(graph, 3, "parts", "random")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    train = "train --parts parts --model sage --labels 0.5 --split 1 --epochs 3 --quiet"
    assert main([*train.split(), "--checkpoint", "run.ckpt"]) == 0
    predict = ["predict", "--checkpoint", "run.ckpt", "--parts"]
    assert main([*predict, "parts", "--out", "out.npy"]) == 0
    extra = inspect_checkpoint("run.ckpt").state["extra"]
    model = GraphSAGE(**extra["pyg"]["arguments"])
    load_checkpoint("run.ckpt", model, weights="best")
    known = splits[:, 1] & (graph.y >= 0)
    shown = nn.functional.one_hot(graph.y.clamp(min=0), CLASSES) * known.view(-1, 1)
    given = pyg_sar.train.with_labels(graph.x, graph.y, known, CLASSES)
    graph.x = torch.cat([graph.x, shown], dim=1).float()
    assert torch.equal(given.float(), graph.x)
    with pytest.raises(ValueError, match=rf"label {CLASSES - 1}; classes are 0 to {CLASSES - 2}"):
        pyg_sar.train.with_labels(graph.x, graph.y, known, CLASSES - 1)
    expected = whole(model, graph)
    assert torch.equal(whole(pyg_sar.tools.load_model("run.ckpt"), graph), expected)
    assert np.allclose(np.load("out.npy"), expected.numpy(), rtol=0, atol=1e-5)
    graph.x[:, -CLASSES:] = 0.0  # The labels count.
    assert not np.allclose(np.load("out.npy"), whole(model, graph).numpy(), rtol=0, atol=1e-3)

    other = small_graph()
    other.y[0], other.train_mask = CLASSES, splits.clone()
    other.train_mask[0] = True
    pyg_sar.write_partitions(other, 2, "other", "random")
    del other.train_mask
    pyg_sar.write_partitions(other, 2, "without", "random")
    capsys.readouterr()
    for parts, message in (
        ("other", f"labels of {CLASSES} classes .* of 'other' has label {CLASSES}"),
        ("without", "data.train_mask is missing"),
    ):
        assert main([*predict, parts, "--out", "o.npy"]) == cli.EXIT_USAGE
        assert re.search(message, capsys.readouterr().err)


def test_mistakes_of_the_command(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data: Data | HeteroData
    data = small_graph()
    pyg_sar.write_partitions(data, 1, "parts", "random")
    wide = GCN(FEATURES + 1, 4, 2, 3)
    extra = about("gcn", FEATURES + 1, 3, hidden=4)
    pyg_sar.train.save_checkpoint("wide.ckpt", wide, state={"extra": extra})
    pyg_sar.write_partitions(make_hetero(), 1, "hetero", "random")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    wrong = {
        (
            "wide.ckpt",
            "parts",
            "o.npy",
        ): f"takes {FEATURES + 1} features per node, the graph 'parts'",
        ("wide.ckpt", "hetero", "o.npy"): "'hetero' holds a heterogeneous graph",
        ("none.ckpt", "parts", "o.npy"): "there is no such file",
        ("wide.ckpt", "parts", "no/o.npy"): "--out no/o.npy: there is no such folder",
        ("wide.ckpt", "parts", "o.txt"): "--out o.txt: expected a name in .npy, .parquet or .csv",
        ("wide.ckpt", "nothing", "o.npy"): "'nothing'",
    }
    for (checkpoint, parts, out), message in wrong.items():
        arguments = ["--checkpoint", checkpoint, "--parts", parts, "--out", out]
        assert main(["predict", *arguments]) == cli.EXIT_USAGE
        captured = capsys.readouterr()
        assert captured.err.startswith("pyg-sar: error: ") and captured.err.count("\n") == 1
        assert message in captured.err
    assert not Path("o.npy").exists()
