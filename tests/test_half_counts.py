"""Nodes and edges are counted exactly in half precision: float16 has no 2,049, bfloat16 no 257."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch_geometric.nn as gnn
from oracle import workers
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy

SOURCES = 5000
AGGREGATIONS = ("mean", "var", "max", "min")
POLICIES = (
    SARPolicy(),
    SARPolicy(kernels="off"),
    SARPolicy(strategy="chunked"),
    SARPolicy(mode=2, kernels="off"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node 0 has 5,000 in-edges; half of the sources are on another worker, all with equal rows."""
    source = torch.arange(1, SOURCES + 1)
    data = Data(edge_index=torch.stack([source, torch.zeros_like(source)]))
    data.x = torch.where(torch.arange(SOURCES + 1) % 2 == 0, 1.0, 3.0).view(-1, 1).repeat(1, 2)
    data.x[:, 1] = 1.0
    folder = tmp_path_factory.mktemp("half") / "parts"
    pyg_sar.write_partitions(data, 2, folder, torch.arange(SOURCES + 1) % 4 // 2)
    return folder


def expected(aggr: str) -> tuple[Tensor, Tensor]:
    """Row 0 and the gradient of the sources in float64, in one process."""
    x = torch.where(torch.arange(SOURCES + 1) % 2 == 0, 1.0, 3.0).double().view(-1, 1).repeat(1, 2)
    x[:, 1] = 1.0
    x.requires_grad_()
    source = torch.arange(1, SOURCES + 1)
    out = gnn.SimpleConv(aggr)(x, torch.stack([source, torch.zeros_like(source)]))
    (4096 * out[0].sum()).backward()
    assert x.grad is not None
    return out[0].detach(), x.grad


def half(root: Path, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    data = pyg_sar.load_partition(root)
    found = []
    for aggr in AGGREGATIONS:
        for policy in POLICIES:
            layer = pyg_sar.distribute(gnn.SimpleConv(aggr), policy)
            x = data.x.to(dtype).requires_grad_()
            first = layer(x, data.edge_index)[0]
            (4096 * first.sum()).backward()
            found.append((first.detach().double(), x.grad.full_tensor().double()))
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_degrees_and_ties_of_half_precision(dtype: torch.dtype, root: Path):
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-3}
    for found in workers(half, 2, root, dtype):
        results = iter(found)
        for aggr in AGGREGATIONS:
            row, gradient = expected(aggr)
            for policy in POLICIES:
                out, grad = next(results)
                assert torch.allclose(out, row, **close), (aggr, policy, out, row)
                assert torch.allclose(grad, gradient, **close), (aggr, policy)


def means(root: Path, dtype: torch.dtype) -> list[list[float]]:
    """Readouts, their layers, and a mean over nodes, as of a summary or of HAN's attention."""
    data = pyg_sar.load_partition(root)
    x, batch = data.x.to(dtype), data.batch
    mean, several = gnn.MeanAggregation(), gnn.MultiAggregation(["mean", "std"])
    for layer in (mean, several):
        pyg_sar.distribute(layer)
    found = [
        gnn.global_mean_pool(x, None),
        gnn.global_mean_pool(x, batch),
        mean(x, batch),
        several(x, batch)[:, :1],
        several(x, batch)[:, 1:] + 1,
        x.mean(dim=0),
    ]
    assert all(value.dtype == dtype for value in found)
    return [value.double().flatten().tolist() for value in found]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nodes_of_half_precision(dtype: torch.dtype, tmp_path: Path):
    """Means over 70,000 nodes, and over 10,000 of a graph, whose sums float16 has."""
    part = torch.arange(70_000) % 2
    data = Data(x=1.0 + 2 * part.view(-1, 1), edge_index=torch.empty(2, 0, dtype=torch.long))
    data.batch = torch.arange(70_000) // 10_000
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", part)
    graphs = [[2.0] * 7] * 4
    assert workers(means, 2, tmp_path / "parts", dtype) == [[[2.0], *graphs, [2.0]]] * 2
