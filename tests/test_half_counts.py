"""Nodes and edges are counted exactly in half precision: float16 has no 2,049, bfloat16 no 257."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from oracle import threads
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.space.node_rows import node_rows, plain_rows

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_degrees_and_ties_of_half_precision(dtype: torch.dtype, root: Path):
    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        found = []
        for aggr in AGGREGATIONS:
            for policy in POLICIES:
                layer = pyg_sar.distribute(gnn.SimpleConv(aggr), policy, view="local")
                x = data.x.to(dtype).requires_grad_()
                out = layer(x, data.edge_index)
                first = out[data.n_id == 0].double()
                (4096 * out[data.n_id == 0].sum()).backward()
                found.append((first.detach(), data.n_id, x.grad.double()))
        return found

    results = iter(zip(*threads(worker, 2), strict=True))
    for aggr in AGGREGATIONS:
        row, gradient = expected(aggr)
        for policy in POLICIES:
            workers = next(results)
            out = torch.cat([first for first, _, _ in workers])[0]
            close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-3}
            assert torch.allclose(out, row, **close), (aggr, policy, out, row)
            for _, n_id, found in workers:
                assert torch.allclose(found, gradient[n_id], **close), (aggr, policy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nodes_of_half_precision(dtype: torch.dtype):
    """Means over 70,000 nodes: readouts, a summary's mean, and HAN's semantic attention."""
    nodes = 35_000

    def worker() -> Any:
        rank = pyg_sar.comm.current().rank
        x = torch.full((nodes, 1), 1.0 + 2 * rank, dtype=dtype)
        batch = pyg_sar.space.dist_batch(torch.zeros(nodes, dtype=torch.long))
        mean = pyg_sar.distribute(gnn.MeanAggregation(), view="local")
        several = pyg_sar.distribute(gnn.MultiAggregation(["mean", "std"]), view="local")
        found = [
            pyg_sar.nn.global_mean_pool(x),
            pyg_sar.nn.global_mean_pool(x, batch),
            mean(x, batch),
            several(x, batch)[:, :1],
            several(x, batch)[:, 1:] + 1,
            plain_rows(node_rows(x).mean(dim=0)),
        ]
        assert all(value.dtype == dtype for value in found)
        return [float(value) for value in found]

    assert threads(worker, 2) == [[2.0] * 6] * 2
