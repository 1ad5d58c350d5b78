"""Tools, training and special graphs on GPUs, against the same on the CPU.

`make test-gpu` runs this on CUDA devices, and tests/test_pretended_gpu.py on one that isn't there.
"""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, CLASSES, make_graph
from test_devices import table_of_gpus
from test_gpu_flows import GPUS, WAYS, close
from test_gpu_flows import pytestmark as on_gpus
from test_script import GRAPH
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric import transforms as T
from torch_geometric.data import Data
from torch_geometric.utils import negative_sampling, softmax

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.comm import finalize
from pyg_sar.tools.rates import Rates
from pyg_sar.train import NeighborSampling, TrainConfig, with_labels

pytestmark = on_gpus
SOME = ("alone", "two workers", "parts that wait on the host")


def graph() -> Data:
    data = make_graph(80, 400)
    data.val_mask = data.test_mask = ~data.train_mask
    del data.edge_weight
    return data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tools")
    for parts in (1, 2, 3):
        pyg_sar.write_partitions(graph(), parts, folder / str(parts), "random")
    return lambda parts: folder / str(parts)


# Training #####################################################################


TRAINING: dict[str, dict[str, Any]] = {
    "labels": {"labels": 0.6},
    "flow": {"flow": True},
    "labels and flow": {"labels": 0.5, "flow": True},
    "sampler": {"sampler": NeighborSampling(num_neighbors=(4, 2), batch_size=16)},
}


def forward(model: Any, data: Any) -> Any:
    return model(with_labels(data.x, data.y, data.label_mask, CLASSES), data.edge_index)


def trained(root: Path, option: str) -> list[float]:
    data: Any = pyg_sar.load_partition(root)
    options = dict(TRAINING[option])
    if "flow" in options:
        options["flow"] = pyg_sar.partition.message_flow_graphs(data, data.train_mask, 2)
    width = CHANNELS
    if "labels" in options:
        options["forward"], width = forward, CHANNELS + CLASSES
    torch.manual_seed(1)
    model = pyg_sar.distribute(gnn.GraphSAGE(width, 8, 2, CLASSES, jk="last").double())
    config = TrainConfig(epochs=3, eval_every=2, seed=3)
    result = pyg_sar.Trainer(model, data, config, **options).fit()
    return [*result.losses, *(float(v) for _, v in sorted(result.final.items()))]


@pytest.mark.parametrize("option", TRAINING)
def test_training_options(option: str, root: Any):
    expected = trained(root(1), option)
    for way in SOME:
        assert WAYS[way](trained, root, option)[0] == pytest.approx(expected, rel=1e-9), way


@pytest.mark.parametrize("more", [["--mfg", "on"], ["--sampler", "neighbor"], ["--labels", "0.5"]])
def test_the_command_trains(more: list[str], tmp_path: Path):
    data = graph()
    data.x = data.x.float()
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")
    given = [
        "train",
        "--parts",
        str(tmp_path / "parts"),
        "--epochs",
        "2",
        "--quiet",
        "--hidden",
        "8",
    ]
    given += ["--report", str(tmp_path / "r"), "--checkpoint", str(tmp_path / "c"), *more]
    assert main([*given, "--workers", "2"]) == 0


def test_the_command_trains_parts_that_take_turns(monkeypatch: Any, tmp_path: Path):
    """On the GPUs, carried by gloo also where there is NCCL; or, with a limit, on the CPU."""
    monkeypatch.setenv("PRETENDED_NCCL", "1")  # which could carry nothing
    data, curves = graph(), []
    data.x = data.x.float()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    for number, more in enumerate(
        (
            ["--memory", "1GiB", "--workers", "1"],
            ["--store", "pinned"],
            ["--store", "pinned", "--workers", "1"],
            ["--workers", "2"],
        )
    ):
        report = tmp_path / str(number)
        line = ["train", "--parts", str(tmp_path / "parts"), "--epochs", "2", "--hidden", "8"]
        line += ["--seed", "1", "--dropout", "0", "--quiet", "--report", str(report), *more]
        assert main(line) == 0
        epochs = (report / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(epoch)["loss"] for epoch in epochs])
        assert len(epochs) == 2 and curves[-1] == pytest.approx(curves[0], rel=1e-5), more


# Verify, plan, infer ##########################################################


def test_verify_of_a_model_on_a_gpu():
    model = gnn.GAT(CHANNELS, 8, 2, CLASSES).cuda()
    for data in (graph(), graph().to("cuda")):
        report = pyg_sar.verify(model, data, 2)
        assert report.ok, report
    assert next(model.parameters()).is_cuda


def test_plan_of_a_model_on_a_gpu(root: Any):
    model = gnn.GraphSAGE(CHANNELS, 8, 2, CLASSES).double()
    rates = Rates(dense=1e9, stream=1e9, gather=1e9)
    here, there = (
        pyg_sar.plan(m, root(2), modes=[1], rates=rates).forecasts[0]
        for m in (model, copy.deepcopy(model).cuda())
    )
    assert there.sent == here.sent and there.memory == here.memory


# Layers of the user's own, readouts, links ####################################


class Own(pyg_sar.DistMessagePassing):
    """Attention that normalizes in ``message``, and an ``edge_updater``."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        weight = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, weight=weight)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i - x_j).abs().sum(-1)

    def message(self, x_j: Tensor, weight: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax(weight, index, num_nodes=size_i).unsqueeze(-1) * x_j


class Pooled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.own(x, edge_index)
        batch = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        pools = [gnn.global_add_pool, gnn.global_mean_pool, gnn.global_max_pool]
        return torch.cat([x, *(p(x, batch, 1).expand_as(x) for p in pools)], -1)


def outputs(root: Path, model: Any) -> tuple[Tensor, list[Tensor]]:
    data = pyg_sar.load_partition(root)
    data = T.Compose([T.AddSelfLoops(), T.LocalDegreeProfile(), T.GCNNorm()])(data)
    model = pyg_sar.distribute(copy.deepcopy(model))
    out = model(data.x[:, :CHANNELS], data.edge_index)
    more = torch.cat([out, data.x[:, CHANNELS:]], -1)
    out.square().sum(-1).mean().backward()
    return more.detach().full_tensor().cpu(), [p.grad.cpu() for p in model.parameters()]


def links(root: Path, model: Any) -> tuple[float, list[Tensor]]:
    data: Any = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(copy.deepcopy(model))
    z = model(data.x, data.edge_index)
    torch.manual_seed(3)
    random.seed(3)
    pairs = negative_sampling(data.edge_index, data.num_nodes, num_neg_samples=50)
    score = (z[pairs[0]] * z[pairs[1]]).sum(-1)
    known = (z[data.edge_index[0]] * z[data.edge_index[1]]).sum(-1)
    loss = score.sigmoid().mean() - known.sigmoid().mean()
    loss.backward()
    return float(loss.detach()), [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("task", [outputs, links])
def test_models_of_the_users_own(task: Any, root: Any):
    torch.manual_seed(0)
    model = Pooled().double() if task is outputs else gnn.GCN(CHANNELS, 8, 2, 4).double()
    finalize()
    first, expected = task(root(1), model)
    for way in SOME:
        (found, gradients) = WAYS[way](task, root, model)[0]
        assert close(found, first), way
        assert all(close(a, b) for a, b in zip(gradients, expected, strict=True)), way


# Scripts ######################################################################


SCRIPT = (
    GRAPH
    + """
dataset = Graphs(transform=T.NormalizeFeatures())
data = dataset[0].to("DEVICE")
model = Net(GCNConv, dataset.num_features, dataset.num_classes).to("DEVICE").eval()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model.train = lambda mode=True: model
for epoch in range(3):
    print(f"{epoch} {train(model, data, optimizer):.10f}")
pred = model(data.x, data.edge_index).argmax(-1)
print(int((pred == data.y).sum()), pred[:3].tolist())
torch.save(model.state_dict(), "state.pt")
"""
)


@pytest.mark.parametrize(
    ("device", "more"),
    [
        ("cuda", []),
        ("cuda", ["--parts", "3", "--store", "pinned"]),
        ("cpu", ["--backend", "gloo"]),
        ("cpu", ["--parts", "3", "--memory", "1GiB"]),
    ],
    ids=["cuda", "cuda, parts", "cpu", "cpu, parts"],
)
def test_a_script_prints_what_it_prints_alone(
    device: str, more: list[str], tmp_path: Path, monkeypatch: Any, capfd: Any
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("DEVICE", device))
    monkeypatch.chdir(tmp_path)
    plain = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    if "--parts" in more:
        monkeypatch.setenv("PRETENDED_NCCL", "1")  # Parts are carried by gloo all the same.
    counts = ("2",) if "--parts" in more else ("1", "2")
    for workers in ("1",) if device == "cuda" and not more and GPUS < 2 else counts:
        code = main(["run", *more, "--workers", workers, "script.py"])
        found = capfd.readouterr()
        assert code == 0, found.err
        assert found.out == plain.stdout, workers


@pytest.mark.parametrize(
    ("old", "new", "more", "text"),
    [
        ("DEVICE", "cpu", [], r"Net got a tensor of the graph on cpu.*run --backend gloo`"),
        ("DEVICE", "cuda", ["--backend", "gloo"], r"Net has parameters on cuda:0.*VISIBLE_DEVICES"),
        # Which chooses no device; PyTorch says what is apart, and a note what to do.
        (
            "\npred =",
            "\ndata.x + torch.rand(40, 5)\npred =",
            [],
            r"on cuda:0: .*run --backend gloo`",
        ),
    ],
    ids=["cpu", "cuda", "neither"],
)
def test_a_script_elsewhere_is_told_what_to_do(
    old: str, new: str, more: list[str], text: str, tmp_path: Path, monkeypatch: Any, capfd: Any
):
    (tmp_path / "script.py").write_text(SCRIPT.replace(old, new).replace('.to("DEVICE")', ""))
    monkeypatch.chdir(tmp_path)
    if GPUS < 2 and not more:
        pytest.skip("needs a GPU for each of two workers")
    assert main(["run", *more, "--workers", "2", "script.py"]) == 1
    found = capfd.readouterr().err
    assert re.search(text, found.splitlines()[-1]), found


def test_the_benchmark_runs(tmp_path: Path, capsys: Any):
    layer, _, *parts = table_of_gpus("cuda", tmp_path)
    assert all(float(number) > 0 for number in layer[1:-1])
    for row in parts:
        assert float(row[5]) > 0 and float(row[7]) > 0, row  # peak, bytes out
    for row in (layer, *parts):
        assert float(row[-1].strip("| ")) < 1e-5, row
