"""Workers that were set up differently are told so, by name: models, settings, parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, OUT, Partitions, make_graph, node_losses, parts, workers
from torch import Tensor
from torch.distributed import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GAT, GATConv, GCNConv

import pyg_sar
from pyg_sar.reduction.parameters import LIMBS, differ, marks, reconcile
from pyg_sar.train.checkpoint import save_checkpoint
from pyg_sar.train.config import TrainConfig
from pyg_sar.train.trainer import Trainer

WORLD = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("replicas"))(make_graph(), WORLD, "random")


class Net(torch.nn.Module):
    """Attributes of all kinds: those of layers, and some of its own."""

    def __init__(self, slope: float = 0.2, p: float = 0.5, act: Any = torch.tanh) -> None:
        super().__init__()
        self.conv = GATConv(CHANNELS, 8, negative_slope=slope)
        self.dropout = torch.nn.Dropout(p)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, OUT)
        self.act, self.widths, self.options = act, (8, [OUT, None]), {"on": True}
        self.rank = pyg_sar.comm.current().rank  # May differ, and so may this:
        self._log = f"worker{self.rank}.log"

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.act(self.norm(self.conv(x, edge_index))))


def built(how: str, other: bool) -> Net:
    net = Net(0.1 if other and how == "slope" else 0.2, 0.4 if other and how == "p" else 0.5)
    if other and how == "act":
        net.act = torch.relu
    if other and how == "nested":
        net.widths, net.options = (8, [OUT, 1]), {"on": False}
    if other and how == "eval":
        net.norm.eval()
    if other and how == "frozen":
        net.last.bias.requires_grad_(False)
    return net


BUILT = {
    "slope": "'conv.negative_slope: 0.1' at rank 2, 'conv.negative_slope: 0.2' at rank 0",
    "p": "'dropout.p: 0.4' at rank 2, 'dropout.p: 0.5' at rank 0",
    "act": "relu' at rank 2, 'act: ",
    "nested": "at rank 2",
    "eval": "'norm.training: False' at rank 2, 'norm.training: True'",
    "frozen": "'last.bias: requires_grad=False' at rank 2",
    "alike": "",
}


def refusal(act: Callable[[], Any]) -> str:
    """What a ValueError says, if there is one."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def test_attributes_of_modules():
    """Numbers, strings, functions and their containers are compared; private names are not."""

    def worker() -> list[str]:
        other = pyg_sar.comm.current().rank == 2
        return [refusal(lambda how=how: pyg_sar.distribute(built(how, other))) for how in BUILT]

    for found in workers(worker, WORLD):
        for message, (how, expected) in zip(found, BUILT.items(), strict=True):
            assert expected in message and bool(message) == (how != "alike"), (how, message)


def step(model: Any, data: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    node_losses(model(data.x, data.edge_index)).mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("launch", "dtypes"),
    [(workers, [torch.float64, torch.bfloat16]), (parts, [torch.float32])],
)
def test_parameters_that_part(launch: Any, dtypes: list[torch.dtype], root: Path):
    """Another learning rate, or weights, on one worker: noticed by the next backward pass."""

    def worker(root: Path, dtype: torch.dtype) -> list[str]:
        comm, data = pyg_sar.comm.current(), pyg_sar.load_partition(root)
        data.x = data.x.to(dtype)
        torch.manual_seed(0)
        model: Any = pyg_sar.distribute(Net().to(dtype))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05 if comm.rank == 1 else 0.01)
        step(model, data, optimizer)
        messages = [refusal(lambda: step(model, data, optimizer))]
        model = pyg_sar.distribute(Net().to(dtype))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step(model, data, optimizer)
        if comm.rank == 0:
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        messages.append(refusal(lambda: step(model, data, optimizer)))
        messages.append(refusal(lambda: save_checkpoint(root / "no.ckpt", model, comm=comm)))
        model = pyg_sar.distribute(model)  # Takes rank 0's.
        step(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
        if comm.rank == 2:
            model.norm.running_mean.add_(1)
        messages.append(refusal(lambda: save_checkpoint(root / "no.ckpt", model, comm=comm)))
        return messages

    for dtype in dtypes:
        for *messages, saved in launch(worker, WORLD, root, dtype):
            for message, others in zip(messages, ([1], [1, 2], [1, 2]), strict=True):
                assert "'conv." in message, message
                assert f"ranks {others} hold other values than rank 0" in message
                assert "load_state_dict() on all of them" in message
            assert "'norm.running_mean' differs" in saved and "ranks [2]" in saved
    assert not (root / "no.ckpt").exists()


def test_settings_of_a_trainer(root: Path):
    """The first that differs is named, before a step is taken; the evaluation compares weights."""

    def worker(root: Path) -> list[str]:
        data = pyg_sar.load_partition(root)
        data.x = data.x.float()
        data.val_mask, data.y = data.train_mask, data.y.clamp(max=OUT - 1)
        other = pyg_sar.comm.current().rank == 1
        found = []
        for changes in ({"lr": 0.02}, {"epochs": 9}, {"clip_norm": 1.0}, {"eval_every": 2}):
            config = TrainConfig(**{"epochs": 2, **(changes if other else {})})
            trainer = Trainer(pyg_sar.distribute(Net()), data, config)
            found.append(refusal(trainer.fit))
        model = pyg_sar.distribute(Net())
        beta = 0.8 if other else 0.9
        given = torch.optim.Adam(model.parameters(), betas=(beta, 0.99))
        found.append(refusal(Trainer(model, data, TrainConfig(epochs=2), optimizer=given).fit))
        trainer = Trainer(model, data, TrainConfig(epochs=2, seed=int(other)))
        found.append(refusal(trainer.fit))
        if other:
            model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
        found.append(refusal(trainer.evaluate))
        return found

    names = ["lr", "epochs", "clip_norm", "eval_every", "optimizer.param_groups[0]['betas']"]
    for *messages, alike, weights in workers(worker, WORLD, root):
        for name, message in zip(names, messages, strict=True):
            assert f"settings differ: '{name}: " in message and "at rank 1" in message
        assert alike == "" and "ranks [1] hold other values" in weights


def test_checksums_and_roundings(root: Path):
    """A changed bit anywhere is seen, in every dtype; roundings are taken away, not refused."""

    def worker(root: Path) -> Any:
        comm = pyg_sar.comm.current()
        seen = []
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for place in (None, 0, 4095):
                values = [torch.ones(4096, dtype=dtype), torch.ones((), dtype=dtype)]
                if comm.rank == 1 and place is not None:
                    values[0][place] = 2
                own = marks(values, comm, values[1].detach())
                assert own.numel() == LIMBS * comm.world_size and own.dtype == dtype
                comm.all_reduce(own)
                seen.append(differ(own.tolist()) == (place is not None))
            strided = torch.ones(4, 2, dtype=dtype)[:, 0]
            seen.append(
                marks([strided], comm, strided).equal(marks([strided.clone()], comm, strided))
            )
            doubled = torch.full((4096,), 1.0 + comm.rank, dtype=dtype)
            own = comm.all_reduce(marks([doubled], comm, doubled[0]))
            seen.append(differ(own.tolist()))
        data = pyg_sar.load_partition(root)
        model: Any = pyg_sar.distribute(GCNConv(CHANNELS, 6).double())
        weight = model.lin.weight
        if comm.rank == 1:
            weight.data = torch.nextafter(weight.data, torch.tensor(torch.inf))
        model(data.x, data.edge_index).square().sum().backward()
        whole = torch.full((2,), 1j * comm.rank)
        seen.append("'z' differs" in refusal(lambda: reconcile([("z", whole)], comm)))
        return seen, weight.detach(), weight.grad

    found = workers(worker, WORLD, root)
    for seen, weight, gradient in found:
        assert all(seen)
        assert torch.equal(weight, found[0][1]) and torch.equal(gradient, found[0][2])


class Outer(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*inputs)


def test_distributed_data_parallel(root: Path, tmp_path: Path):
    """Around a distributed model it averages what is complete on all; inside it is refused."""
    plain = GAT(CHANNELS, 16, 2, OUT).double()
    data = make_graph()
    node_losses(plain(data.x, data.edge_index)).mean().backward()
    expected = [p.grad for p in plain.parameters()]
    plain.zero_grad()

    def worker(root: Path) -> tuple[list[list[Tensor]], str]:
        rank = pyg_sar.comm.current().rank
        if not torch.distributed.is_initialized():
            store = FileStore(str(tmp_path / "store"), WORLD)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        data, found = pyg_sar.load_partition(root), []
        for around in (lambda m: m, Outer):
            model: Any = pyg_sar.distribute(copy.deepcopy(plain))
            out = DistributedDataParallel(around(model))(data.x, data.edge_index)
            node_losses(out).mean().backward()
            found.append([p.grad for p in model.parameters()])
        return found, refusal(lambda: pyg_sar.distribute(DistributedDataParallel(plain)))

    for found, message in workers(worker, WORLD, root):
        torch.testing.assert_close(found, [expected] * 2, rtol=1e-10, atol=1e-10)
        assert "without DistributedDataParallel" in message
