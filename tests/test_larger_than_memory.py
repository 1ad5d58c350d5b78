"""Training in less memory than it takes: exact, within the limit, and an error where it can't be.

Resident sets are those of fresh processes, beyond what they had when their parts began.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, SAGEConv, Sequential

import pyg_sar
from pyg_sar.comm import current
from pyg_sar.errors import WorkerError
from pyg_sar.kernels import ops
from pyg_sar.ledger import peak_memory, reset_peak_memory

pytestmark = [
    pytest.mark.skipif(not ops.built, reason="no C++ kernels"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pager is for Linux"),
]

MB = 1 << 20
NODES, DEGREE, FEATURES, CLASSES = 20_000, 8, 16, 5
TINY, WIDE = 320, 700
MODELS = {
    "gcn": lambda: GCN(FEATURES, 128, 3, CLASSES, norm="batch_norm"),
    "sage": lambda: GraphSAGE(FEATURES, 128, 3, CLASSES, norm="batch_norm"),
    "gat": lambda: GAT(FEATURES, 128, 3, CLASSES, heads=4, norm="batch_norm"),
    "gin": lambda: GIN(FEATURES, 128, 3, CLASSES, norm="batch_norm"),
    "deep": lambda: GAT(FEATURES, 64, 8, CLASSES, heads=4, norm="batch_norm"),
    "wide": lambda: Sequential(
        "x, edge_index",
        [
            (SAGEConv(FEATURES, WIDE), "x, edge_index -> x"),
            torch.nn.ReLU(),
            (SAGEConv(WIDE, CLASSES), "x, edge_index -> x"),
        ],
    ),
    "dropout": lambda: GAT(FEATURES, 32, 2, CLASSES, heads=2, norm="batch_norm", dropout=0.3),
}


def make_graph(nodes: int) -> Data:
    """Most edges join nodes with near numbers."""
    draw = torch.Generator().manual_seed(0)
    source = torch.arange(nodes).repeat_interleave(DEGREE)
    near = torch.randint(-nodes // 64, nodes // 64, (nodes * DEGREE,), generator=draw)
    far = torch.randint(nodes, (nodes * DEGREE,), generator=draw)
    target = torch.where(torch.rand(far.shape, generator=draw) < 0.02, far, source + near)
    return Data(
        x=torch.randn(nodes, FEATURES, generator=draw, dtype=torch.float64),
        edge_index=torch.stack([source, target % nodes]),
        y=torch.randint(CLASSES, (nodes,), generator=draw),
    )


def write(folder: Path, nodes: int, parts: int) -> str:
    root = folder / f"{nodes}_{parts}"
    pyg_sar.write_partitions(make_graph(nodes), parts, root, torch.arange(nodes) * parts // nodes)
    return str(root)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], str]:
    folder = tmp_path_factory.mktemp("parts")
    return {(nodes, p): write(folder, nodes, p) for nodes in (TINY, NODES) for p in (8, 32)}


def make_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def gradients(model: torch.nn.Module, data: Data, mean: Any) -> Tensor:
    mean(F.cross_entropy(model(data.x, data.edge_index), data.y, reduction="none")).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# On the workers ##############################################################


def plain_step(name: str) -> tuple[Tensor, int]:
    """Plain PyG on the whole graph: gradients, and bytes beyond the start."""
    data = make_graph(NODES)
    start = reset_peak_memory(torch.device("cpu"))
    found = gradients(make_model(name), data, torch.mean)
    return found, peak_memory(torch.device("cpu")) - start


def counters() -> Mapping[str, int]:
    host: Any = current().host  # type: ignore[attr-defined]
    return {} if host.store is None else host.store.counters()


def part_step(root: str, name: str) -> tuple[Tensor, Mapping[str, int]]:
    """A part's gradients, and bytes moved so far."""
    data = pyg_sar.load_partition(root)
    return gradients(pyg_sar.distribute(make_model(name)), data, pyg_sar.mean), counters()


def hosted_steps(
    root: str, tiny: str, name: str, parts: int, memory: int, store: Path
) -> tuple[list[Tensor], int, Mapping[str, int]]:
    """All parts' gradients, bytes beyond the start, and bytes moved.

    Before, a pass over a tiny graph brings in the libraries.
    """
    pyg_sar.run(part_step, tiny, name, parts=parts)
    gc.collect()
    start = reset_peak_memory(torch.device("cpu"))
    found = pyg_sar.run(part_step, root, name, parts=parts, memory=memory, store=store)
    peak = peak_memory(torch.device("cpu")) - start
    return [gradient for gradient, _ in found], peak, found[-1][1]


def train(root: str, epochs: int) -> tuple[list[float], Tensor, int]:
    """Losses, parameters and bytes read of some epochs."""
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(make_model("dropout"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        values = F.cross_entropy(model(data.x, data.edge_index), data.y, reduction="none")
        loss = pyg_sar.mean(values)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, parameters, counters().get("bytes_read", 0)


# Within the limit, exactly ####################################################

LIMITS = {"gcn": 96, "sage": 72, "gat": 96, "gin": 84, "deep": 96, "wide": 80}
CASES = [*((name, 32) for name in LIMITS), ("sage", 8), ("gat", 8), ("deep", 8)]


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[Tensor, int]]:
    """Plain PyG's gradients and peaks, once for each model that is asked for."""
    return {}


@pytest.mark.parametrize(("name", "parts"), CASES)
def test_exact_in_a_fourth_of_the_memory(name, parts, roots, plain, tmp_path):
    limit = LIMITS[name] * MB
    if name not in plain:
        plain[name] = pyg_sar.launch(plain_step, 1, name)[0]
    expected, most = plain[name]
    given = roots[NODES, parts], roots[TINY, parts], name, parts, limit, tmp_path
    found, peak, moved = pyg_sar.launch(hosted_steps, 1, *given, timeout=120)[0]
    print(f"{name} {parts}: plain {most / MB:.0f}, limit {limit / MB:.0f}, peak {peak / MB:.1f}", {k: v // MB for k, v in moved.items()})
    for gradient in found:
        assert (gradient - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert peak <= limit
    assert most >= 4 * limit
    assert moved["bytes_read"] + moved["bytes_written"] >= 100 * MB
    assert moved["overrun_bytes"] == 0
    if name == "wide":
        assert NODES * WIDE * 8 > limit
