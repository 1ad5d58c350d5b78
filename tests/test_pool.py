"""Readouts over the nodes of the whole graph, against PyG's on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from oracle import TOLERANCE, error, gradient_scale, parts, whole, workers
from torch import Tensor
from torch.nn import Linear, Sequential, Tanh
from torch_geometric.data import Data
from torch_geometric.nn import aggr
from torch_geometric.utils import degree, scatter, softmax, to_dense_batch

import pyg_sar

CHANNELS, ROWS, GRAPHS = 4, 23, 5
WORLDS = ((1, workers), (3, workers), (4, parts))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def graph() -> Data:
    """Rows with ties, and a maximum that several workers have; of 5 graphs the fourth is empty."""
    x = draw(ROWS, CHANNELS)
    x[1::4, 0] = 2.5
    x[:, 1] = (x[:, 1] > 0).double() + 0.5
    ids = torch.randint(GRAPHS, (ROWS,), generator=torch.Generator().manual_seed(1))
    ids[ids == 3] = 4
    ids = ids.sort().values
    return Data(x=x, batch=ids, edge_index=torch.zeros(2, 0, dtype=torch.long))


def written(root: Path, world: int) -> Path:
    """A partition of interleaved rows; of three workers, the second has none."""
    part = torch.randint(world, (ROWS,), generator=torch.Generator().manual_seed(2))
    part = torch.where(part == 1, 0, part) if world == 3 else part
    pyg_sar.write_partitions(graph(), world, root / f"parts{world}", part)
    return root / f"parts{world}"


def deg() -> Tensor:
    return torch.tensor([0, 3, 4, 2, 1])


class OwnReadout(aggr.Aggregation):
    """A readout that PyG doesn't have."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.sum(0, keepdim=True) - x.mean(0)


READOUTS: dict[str, Callable[[], torch.nn.Module]] = {
    "sum": aggr.SumAggregation,
    "mean": aggr.MeanAggregation,
    "max": aggr.MaxAggregation,
    "min": aggr.MinAggregation,
    "mul": aggr.MulAggregation,
    "var": aggr.VarAggregation,
    "var, semi-gradient": lambda: aggr.VarAggregation(semi_grad=True),
    "std": aggr.StdAggregation,
    "softmax": lambda: aggr.SoftmaxAggregation(t=0.7, learn=True),
    "softmax, semi-gradient": lambda: aggr.SoftmaxAggregation(semi_grad=True),
    "softmax, channels": lambda: aggr.SoftmaxAggregation(learn=True, channels=CHANNELS),
    "power mean": lambda: aggr.PowerMeanAggregation(p=2.0, learn=True),
    "multi": lambda: aggr.MultiAggregation(["mean", "max", "std", "min", "sum", "var", "mul"]),
    "multi, softmax": lambda: aggr.MultiAggregation(
        ["mean", "softmax", "max"],
        mode="proj",
        mode_kwargs={"in_channels": CHANNELS, "out_channels": 3},
    ),
    "multi, attention": lambda: aggr.MultiAggregation(
        ["mean", "max"],
        mode="attn",
        mode_kwargs={"in_channels": CHANNELS, "out_channels": 4, "num_heads": 2},
    ),
    "degree scaler": lambda: aggr.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "amplification", "inverse_linear"], deg()
    ),
    "attentional": lambda: aggr.AttentionalAggregation(Linear(CHANNELS, 1), Linear(CHANNELS, 3)),
    "attentional, mlp": lambda: aggr.AttentionalAggregation(
        gnn.MLP([CHANNELS, 5, 1]), gnn.MLP([CHANNELS, 5, 3])
    ),
    "set2set": lambda: aggr.Set2Set(CHANNELS, processing_steps=3),
    "deep sets": lambda: aggr.DeepSetsAggregation(
        Sequential(Linear(CHANNELS, 5), Tanh()), gnn.MLP([5, 6, 3])
    ),
    "variance preserving": aggr.VariancePreservingAggregation,
    "set transformer": lambda: aggr.SetTransformerAggregation(
        CHANNELS, 2, heads=2, layer_norm=True
    ),
    "set transformer, mean": lambda: aggr.SetTransformerAggregation(
        CHANNELS, 3, num_encoder_blocks=2, concat=False
    ),
    "median": aggr.MedianAggregation,
    "quantile": lambda: aggr.QuantileAggregation([0.3, 0.8]),
    "sort": lambda: aggr.SortAggregation(3),
    "lstm": lambda: aggr.LSTMAggregation(CHANNELS, 3),
    "gru": lambda: aggr.GRUAggregation(CHANNELS, 3),
    "mlp": lambda: aggr.MLPAggregation(CHANNELS, 3, 10, num_layers=1),
    "lcm": lambda: aggr.LCMAggregation(CHANNELS, 3),
    "patches": lambda: aggr.PatchTransformerAggregation(
        CHANNELS, 3, 2, 4, num_transformer_blocks=1
    ),
    "equilibrium": lambda: aggr.EquilibriumAggregation(CHANNELS, 3, [4], grad_iter=2),
    "own": OwnReadout,
    "multiset transformer": lambda: aggr.GraphMultisetTransformer(
        CHANNELS, 3, heads=2, layer_norm=True
    ),
}


class Net(torch.nn.Module):
    """A layer per node, a readout, a head per graph; and a head per node that reads graphs."""

    def __init__(self, readout: torch.nn.Module) -> None:
        super().__init__()
        self.lin = Linear(CHANNELS, CHANNELS)
        self.readout = readout
        self.head = gnn.MLP([-1, 6, 2], norm=None)
        self.node = Linear(CHANNELS + 2, 2)

    def forward(self, x: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # The second channel keeps its ties.
        h = torch.cat([x[:, :2], self.lin(x)[:, 2:].sigmoid()], dim=1)
        pooled = self.head(self.readout(h, batch))
        back = pooled.expand(x.size(0), -1) if batch is None else pooled[batch]
        return pooled, self.node(torch.cat([h, back], dim=1))


def make(name: str) -> Net:
    torch.manual_seed(5)
    net = Net(READOUTS[name]()).double()
    with torch.no_grad():
        net(graph().x, None if name == "own" else graph().batch)  # Makes the lazy head.
    return net.train()


def one_pass(net: torch.nn.Module, data: Data, several: bool) -> Any:
    """A loss of graphs and nodes, with weights of their own."""
    x = data.x.clone().requires_grad_()
    pooled, nodes = net(x, data.batch if several else None)
    by_graph = (pooled * draw(*pooled.shape, seed=7)).sum(1)
    by_node = (nodes * draw(ROWS, 2, seed=8) + nodes.square()).sum(1)
    (by_graph.mean() + by_node.mean()).backward()
    grads = {n: p.grad for n, p in net.named_parameters()}
    found = whole(pooled.detach()), whole(nodes.detach()), whole(x.grad)
    return (*found, grads, dict(net.named_buffers()))


CASES = [
    *((name, True) for name in READOUTS if name != "own"),
    *((name, False) for name in READOUTS if name != "deep sets"),  # One row: no batch norm.
]


def all_passes(root: Path, nets: dict[str, Net]) -> list[Any]:
    """A worker's part: every readout."""
    data = pyg_sar.load_partition(root)
    return [
        one_pass(pyg_sar.distribute(copy.deepcopy(nets[name])), data, several)
        for name, several in CASES
    ]


@pytest.mark.parametrize(("world", "launch"), WORLDS)
def test_readouts_are_exact(world: int, launch: Any, tmp_path: Path):
    nets = {name: make(name) for name in READOUTS}
    expected = [one_pass(copy.deepcopy(nets[name]), graph(), s) for name, s in CASES]
    for outcome in launch(all_passes, world, written(tmp_path, world), nets):
        for case, found, want in zip(CASES, outcome, expected, strict=True):
            limit = 1e-5 if case[0] == "equilibrium" else TOLERANCE  # PyG's starts in float32.
            for place in range(3):
                assert error(found[place], want[place]) <= limit, (case, place)
            scale = gradient_scale(want[3])
            for name, gradient in want[3].items():
                assert error(found[3][name], gradient, scale) <= limit, (case, name)
            for name, buffer in want[4].items():
                assert error(found[4][name], buffer) <= limit, (case, name)


def test_every_aggregation_of_pyg_is_shown():
    """One that a new PyG brings must be looked at."""
    shown = {type(make()).__name__ for make in READOUTS.values()}
    assert set(aggr.__all__) - {"Aggregation"} <= shown


@pytest.mark.parametrize(("world", "launch"), WORLDS)
def test_functions(world: int, launch: Any, tmp_path: Path):
    """Functions with and without a batch vector, and what models do with it by themselves."""

    def use(data: Data) -> list[Tensor]:
        found, x, batch = [], data.x, data.batch
        for pool in (gnn.global_add_pool, gnn.global_mean_pool, gnn.global_max_pool):
            for args in ((batch,), (batch, GRAPHS + 2), (None,)):
                value = x.clone().requires_grad_()
                out = pool(value, *args)
                (out * draw(*out.shape, seed=3)).sum().backward()
                found += [out.detach(), value.grad]
        size = int(batch.max()) + 1
        attention = softmax(x[:, 0], batch, num_nodes=size)
        chosen = batch[x[:, 1] > 0]
        found += [
            x.new_zeros(size, CHANNELS).index_add_(0, batch, x * attention.view(-1, 1)),
            degree(batch, dtype=x.dtype),
            torch.bincount(batch, minlength=GRAPHS + 1),
            scatter(x.t().contiguous(), batch, dim=1, reduce="max"),
            scatter(x[x[:, 1] > 0], chosen, dim=0, dim_size=size, reduce="min"),
            scatter(batch.new_ones(batch.numel()), batch, dim=0),
            *(attention, (batch == 2).to(x.dtype)),
            x - scatter(x, batch, dim=0, reduce="mean").index_select(0, batch),
            *(batch.unique(), batch.sort().values, batch + 1, batch.diff()),
            *(torch.tensor(int(batch[-1])), torch.tensor(batch.tolist())),
            *(torch.nn.functional.one_hot(batch), *to_dense_batch(x, batch)),
        ]
        return [whole(tensor) for tensor in found]

    expected = use(graph())
    worker = lambda root: use(pyg_sar.load_partition(root))  # noqa: E731
    for found in launch(worker, world, written(tmp_path, world)):
        for k, (value, want) in enumerate(zip(found, expected, strict=True)):
            assert error(value, want) <= TOLERANCE, k


def test_one_row_per_graph_travels(tmp_path: Path):
    """The sum of 4 columns over 5 graphs: nothing per node, and nothing comes back.

    With it go checksums, one number for each of 2 workers.
    """

    def worker(root: Path) -> list[int]:
        data = pyg_sar.load_partition(root)
        x = data.x.requires_grad_()
        size = int(data.batch.max()) + 1
        for _ in range(2):  # Where rows lie is asked once.
            with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
                out = gnn.global_add_pool(x, data.batch, size)
                there = ledger.sent
                out.square().sum().backward()
        return [there, ledger.sent - there]

    assert workers(worker, 2, written(tmp_path, 2)) == [[(GRAPHS * CHANNELS + 2) * 8, 0]] * 2
