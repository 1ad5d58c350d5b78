"""What a user of GPUs does, against one process on the CPU: models, training, files.

`make test-gpu` runs this on CUDA devices, and tests/test_pretended_gpu.py on one that isn't there.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hetero_graphs import WIDTHS, make_hetero, random_parts
from oracle import CHANNELS, CLASSES, EDGE_DIM, Partitions, like_loops, make_graph, whole
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.nn import aggr

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm import current, finalize
from pyg_sar.train import TrainConfig, load_checkpoint
from pyg_sar.train.callbacks import CheckpointEvery

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(GPUS == 0, reason="PyTorch sees no CUDA device"),
    pytest.mark.filterwarnings("ignore::pyg_sar.kernels.KernelWarning"),
    pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning"),
    pytest.mark.filterwarnings("ignore:.*torch-scatter"),
]
PARTS = 3


def alone(fn: Callable[..., Any], root: Callable[[int], Path], *args: Any) -> list[Any]:
    return hosted(lambda *given: [fn(*given)], root(1), *args)


def hosted(fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
    """Runs a function in this process, with a GPU."""
    finalize()
    pyg_sar.init(device="cuda")
    try:
        return fn(*args) if not how else pyg_sar.run(fn, *args, **how)
    finally:
        finalize()


def together(fn: Callable[..., Any], *args: Any) -> Any:
    """What a worker process does: workers share a GPU where there are too few."""
    finalize()
    pyg_sar.init(device="cuda", timeout=60)
    return fn(*args)


def parts_together(fn: Callable[..., Any], *args: Any) -> list[Any]:
    finalize()
    pyg_sar.init("gloo", device="cuda", timeout=60)
    return pyg_sar.run(fn, *args, parts=PARTS)


def on_two_workers(fn: Callable[..., Any], root: Callable[[int], Path], *args: Any) -> list[Any]:
    found = pyg_sar.launch(parts_together, 2, fn, root(PARTS), *args)
    return [part for worker in found for part in worker]


WAYS: dict[str, Callable[..., list[Any]]] = {
    "alone": alone,
    "two workers": lambda fn, root, *args: pyg_sar.launch(together, 2, fn, root(2), *args),
    "parts": lambda fn, root, *args: hosted(fn, root(PARTS), *args, parts=PARTS),
    "parts on two workers": on_two_workers,
    "parts that wait on the host": lambda fn, root, *args: hosted(
        fn, root(PARTS), *args, parts=PARTS, store="pinned"
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    partitions, data = Partitions(tmp_path_factory.mktemp("flows")), like_loops(make_graph())
    return lambda parts: partitions(data, parts, "random")


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> bool:
    found, expected = torch.as_tensor(found).cpu().double(), torch.as_tensor(expected).double()
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1))


# Models #######################################################################


class Readout(torch.nn.Module):
    """A layer, readouts of all nodes that each node reads, and edge features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GATv2Conv(CHANNELS, 8, edge_dim=EDGE_DIM, heads=2, concat=False)
        kinds = ["mean", "max", "std", "softmax"]
        self.pools = torch.nn.ModuleList(aggr.MultiAggregation([kind]) for kind in kinds)
        self.norms = torch.nn.ModuleList(
            [gnn.InstanceNorm(8), gnn.DiffGroupNorm(8, groups=2), gnn.MeanSubtractionNorm()]
        )
        self.head = torch.nn.Linear(8 * (1 + len(kinds)), CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.conv(x, edge_index, edge_attr=edge_attr)
        for norm in self.norms:
            x = norm(x).relu()
        batch = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
        pooled = [pool(x, batch, dim_size=1) for pool in self.pools]
        return self.head(torch.cat([x, *(p.expand(x.size(0), -1) for p in pooled)], dim=-1))


def stock(kind: Any, **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: kind(CHANNELS, 8, 2, CLASSES, **options)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...]]] = {
    "sage": (stock(gnn.GraphSAGE, norm="BatchNorm"), ()),
    "max": (stock(gnn.GraphSAGE, aggr="max", norm="GraphNorm"), ()),
    "gcn": (stock(gnn.GCN, norm="PairNorm"), ("edge_weight",)),
    "gat": (stock(gnn.GAT, heads=2, norm="LayerNorm", jk="cat"), ()),
    "pna": (
        stock(
            gnn.PNA,
            aggregators=["mean", "std", "min"],
            scalers=["identity", "amplification"],
            deg=torch.ones(9, dtype=torch.long),
        ),
        (),
    ),
    "transformer": (
        lambda: gnn.TransformerConv(CHANNELS, CLASSES, edge_dim=EDGE_DIM),
        ("edge_attr",),
    ),
    "relations": (lambda: gnn.RGCNConv(CHANNELS, CLASSES, 3), ("edge_type",)),
    "moments": (lambda: gnn.SimpleConv(["mean", "std", "softmax", "median"]), ()),
    "readout": (Readout, ("edge_attr",)),
}


def steps(data: Any, model: Any, names: tuple[str, ...]) -> tuple[list[Tensor], Tensor]:
    """Losses of two steps, and the accuracy after them; the scores."""
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.05) if parameters else None
    more, found = [data[name] for name in names], []
    for _ in range(2):
        out = model(data.x, data.edge_index, *more)
        loss = out.log_softmax(-1)[:, 0].square().mean()
        found.append(loss.detach().cpu())
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    scores = model(data.x, data.edge_index, *more).detach()
    mask = data.train_mask
    right = (scores.argmax(-1) == data.y)[mask].sum() / mask.sum()
    return [*found, right.double().cpu()], whole(scores).cpu()


def on_workers(
    root: Path, model: Any, names: tuple[str, ...], policy: SARPolicy
) -> tuple[list[Tensor], Tensor]:
    data: Any = pyg_sar.load_partition(root)
    assert data.x.is_cuda and data.edge_index.is_cuda
    return steps(data, pyg_sar.distribute(copy.deepcopy(model), policy), names)


@pytest.mark.parametrize("way", WAYS)
def test_training_equals_one_process(way: str, root: Callable[[int], Path]):
    data = like_loops(make_graph())
    for number, (name, (make, names)) in enumerate(MODELS.items()):
        torch.manual_seed(0)
        model = make().double()
        mode: Any = 1 + number % 3
        policy = SARPolicy(mode=mode, message_budget=600 if number % 2 else None)
        expected = steps(data, copy.deepcopy(model), names)
        for numbers, scores in WAYS[way](on_workers, root, model, names, policy):
            assert close(torch.stack(numbers), torch.stack(expected[0])), name
            assert close(scores, expected[1]), name


# Training, files, inference ###################################################


def gcn() -> torch.nn.Module:
    torch.manual_seed(3)
    return gnn.GCN(CHANNELS, 8, 2, CLASSES, norm="LayerNorm").double()


def trainer(model: Any, data: Any, path: Path, epochs: int) -> pyg_sar.Trainer:
    config = TrainConfig(epochs=epochs, lr=0.02, schedule="cosine", clip_norm=1.0)
    return pyg_sar.Trainer(model, data, config, callbacks=[CheckpointEvery(path, 1)])


def trained(root: Path, path: Path, resume: bool) -> tuple[list[float], Tensor, Tensor]:
    """Losses; scores by the trained model; the same by the model of its checkpoint."""
    data: Any = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(gcn())
    training = trainer(model, data, path, 4)
    if resume:
        training.resume(path)
    losses = training.fit().losses
    scores = pyg_sar.infer(model, data)
    current().barrier()
    loaded = gcn()
    load_checkpoint(path, loaded)
    again = pyg_sar.infer(loaded, data)
    return losses, whole(scores).cpu(), whole(again).cpu()


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_and_outputs_for_all_nodes(
    way: str, root: Callable[[int], Path], tmp_path: Path
):
    data, model, path = like_loops(make_graph()), gcn(), tmp_path / "run.ckpt"
    losses = trainer(model, data, tmp_path / "one.ckpt", 4).fit().losses
    expected = pyg_sar.infer(model, data)
    for resume in (False, True):
        found = WAYS[way](trained, root, path, resume)
        assert found[0][0] == pytest.approx(losses, rel=1e-9)
        for scores in found[0][1:]:
            assert close(scores, expected, 1e-9), resume


# All nodes together ############################################################


class Centred(torch.nn.Module):
    """Operators that mix all nodes, and numbers that all workers must draw alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.SAGEConv(CHANNELS, 8), gnn.GATConv(8, CLASSES)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        x = x - x.mean(0) + x[x.size(0) // 2]
        return self.second(x, edge_index)


def mixing_all_nodes(root: Path, model: Any) -> tuple[list[float], Tensor, Tensor]:
    data: Any = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(copy.deepcopy(model))
    drawn = torch.rand(5, device=current().device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    right = (out.argmax(-1) == data.y).sum()
    losses.append(float(right))
    return losses, drawn.cpu(), torch.rand(5, device=current().device).cpu()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "alone"])
def test_operators_that_mix_all_nodes(way: str, root: Callable[[int], Path]):
    data = like_loops(make_graph())
    torch.manual_seed(0)
    model = Centred().double()
    plain, expected = copy.deepcopy(model), []
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    for _ in range(2):
        out = plain(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    expected.append(float((out.argmax(-1) == data.y).sum()))
    found = WAYS[way](mixing_all_nodes, root, model)
    for losses, before, after in found:
        assert losses == pytest.approx(expected, rel=1e-10)
        # Which numbers a GPU draws is its own affair, but all workers draw the same.
        assert torch.equal(before, found[0][1]) and torch.equal(after, found[0][2])
        assert not torch.equal(before, after)


# Node types, dropout, mixed precision #########################################


def of_types(root: Path, model: Any) -> dict[str, Tensor]:
    data: Any = pyg_sar.load_partition(root)
    out = pyg_sar.distribute(copy.deepcopy(model))(data.x_dict, data.edge_index_dict)
    sum(rows.square().sum(-1).mean() for rows in out.values()).backward()
    return {name: whole(rows.detach()).cpu() for name, rows in out.items()}


def test_node_types(tmp_path: Path):
    data = make_hetero(loner=False)
    torch.manual_seed(0)
    convs = {key: gnn.SAGEConv((WIDTHS[key[0]], WIDTHS[key[2]]), 4) for key in data.edge_types}
    model = gnn.HeteroConv(convs, aggr="sum").double()
    expected = model(data.x_dict, data.edge_index_dict)
    for parts in (1, 2):
        pyg_sar.write_partitions(data, parts, tmp_path / str(parts), random_parts(data, parts))
    for way in WAYS:
        if way.startswith("parts"):
            pyg_sar.write_partitions(
                data, PARTS, tmp_path / f"{PARTS} {way}", random_parts(data, PARTS)
            )
        place = {"alone": "1", "two workers": "2"}.get(way, f"{PARTS} {way}")
        found = WAYS[way](of_types, lambda parts, at=place: tmp_path / at, model)
        for name, rows in found[0].items():
            assert close(rows, expected[name]), (way, name)


def with_dropout(root: Path, random: Any) -> tuple[list[Tensor], Tensor]:
    """Gradients of a GAT with dropout within its layers and between them, computed twice."""
    data: Any = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = gnn.GAT(CHANNELS, 8, 2, CLASSES, heads=2, dropout=0.5).double()
    model = pyg_sar.distribute(model, SARPolicy(random=random))
    torch.manual_seed(5)
    out = model(data.x, data.edge_index)
    out.square().sum(-1).mean().backward()
    return [p.grad.cpu() for p in model.parameters()], whole(out.detach()).cpu()


@pytest.mark.parametrize("random", ["same", "keyed"])
def test_dropout_is_that_of_any_number_of_workers(random: str, root: Callable[[int], Path]):
    found = {way: run(with_dropout, root, random)[0] for way, run in WAYS.items() if way != "alone"}
    gradients, scores = found.pop("two workers")
    assert bool((scores != 0).any())
    for way, (others, rows) in found.items():
        assert close(rows, scores), way
        assert all(close(a, b, 1e-9) for a, b in zip(others, gradients, strict=True)), way


def in_half_precision(root: Path) -> tuple[list[Tensor], Tensor]:
    data: Any = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(gnn.GAT(CHANNELS, 8, 2, CLASSES, heads=2))
    with torch.autocast("cuda", torch.bfloat16):
        out = model(data.x.float(), data.edge_index)
        loss = out.float().square().sum(-1).mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return [p.grad.cpu() for p in model.parameters()], loss.detach().cpu()


def test_mixed_precision(root: Callable[[int], Path]):
    data = like_loops(make_graph())
    torch.manual_seed(0)
    model = gnn.GAT(CHANNELS, 8, 2, CLASSES, heads=2).double()
    torch.manual_seed(0)
    model.load_state_dict(gnn.GAT(CHANNELS, 8, 2, CLASSES, heads=2).state_dict())
    loss = model(data.x.double(), data.edge_index).square().sum(-1).mean()
    loss.backward()
    for way, run in WAYS.items():
        for gradients, found in run(in_half_precision, root):
            assert close(found, loss.detach(), 3e-2), way
            for ours, parameter in zip(gradients, model.parameters(), strict=True):
                assert parameter.grad is not None
                assert close(ours, parameter.grad, 5e-2), way


# Memory #######################################################################


def most(root: Path) -> tuple[int, int]:
    """Bytes on the GPU at most while a deep model trains, and those moved to the host."""
    data: Any = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(gnn.GraphSAGE(CHANNELS, 32, 6, CLASSES, norm="BatchNorm").double())
    optimizer = torch.optim.Adam(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model(data.x, data.edge_index).square().sum(-1).mean().backward()
        optimizer.step()
    host: Any = current().host
    moved = 0 if host.store is None else host.store.counters()["bytes_written"]
    return torch.cuda.max_memory_allocated(), moved


def workspace() -> int:
    """Bytes that cuBLAS keeps for each thread that multiplied matrices."""
    found = []

    def multiply() -> None:
        getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()
        x = torch.ones(8, 8, device="cuda", dtype=torch.float64)
        before = torch.cuda.memory_allocated()
        product = x @ x
        found.append(torch.cuda.memory_allocated() - before - product.nbytes)

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    return found[0]


def test_parts_that_wait_take_no_memory_of_the_gpu(tmp_path: Path):
    pyg_sar.write_partitions(make_graph(2400, 9600), 6, tmp_path, "random")
    (held, nothing), (waiting, moved) = (
        max(hosted(most, tmp_path, parts=6, store=store)) for store in (None, "pinned")
    )
    assert nothing == 0 and moved > 4 * (held - 6 * workspace())
    # A sixth, and what is computed with at the moment; with the workspace of one thread.
    assert waiting - workspace() < 0.4 * (held - 6 * workspace())
