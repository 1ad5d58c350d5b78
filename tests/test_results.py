"""Real graphs: training on several workers is training in plain PyG, to the last digits.

``benchmarks/accuracy.py`` shows the same at length, with the papers' settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv

import pyg_sar
from pyg_sar.tools.graphs import load_graph

EPOCHS = 30
NODES = 3000  # The first so many nodes of a larger graph, to be quick.
TOLERANCE = 1e-9  # Of the loss, in every epoch.
BACKENDS = {1: "threads", 2: "gloo", 3: "threads"}  # By number of workers.
GRAPHS = {
    "cora": "undirected=true,remove_self_loops=true,normalize=true",
    "amazon_photo": "undirected=true,remove_self_loops=true,split=per_class",
}
CASES = [(graph, model) for graph in GRAPHS for model in ("gcn", "gat")]


@dataclass
class Run:
    """A training run: the loss of each epoch, and the test accuracy after the last."""

    losses: list[float]
    accuracy: float


class TwoLayers(nn.Module):
    """The usual two-layer network, without dropout."""

    def __init__(self, kind: str, inputs: int, classes: int) -> None:
        super().__init__()
        if kind == "gcn":
            self.first, self.second = GCNConv(inputs, 8), GCNConv(8, classes)
        else:
            self.first = GATConv(inputs, 4, heads=2)
            self.second = GATConv(8, classes, heads=2, concat=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


def _train(
    model: nn.Module,
    data: Data,
    mean: Callable[[Tensor], Tensor],
    accuracy: Callable[[Tensor, Tensor, Tensor], float],
) -> Run:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)[data.train_mask]
        loss = mean(F.cross_entropy(out, data.y[data.train_mask], reduction="none"))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    return Run(losses, accuracy(out, data.y, data.test_mask))


def _build(kind: str, data: Data) -> nn.Module:
    torch.manual_seed(0)
    return TwoLayers(kind, data.num_features, data.num_labels).double()


def _plain(graphs: dict[str, Data]) -> dict[tuple[str, str], Run]:
    """Every case in PyG alone."""

    def accuracy(out: Tensor, y: Tensor, mask: Tensor) -> float:
        right = (out.argmax(dim=1) == y)[mask]
        return int(right.sum()) / right.numel()

    return {
        (graph, kind): _train(_build(kind, graphs[graph]), graphs[graph], torch.mean, accuracy)
        for graph, kind in CASES
    }


def _worker(
    root: str, start: dict[tuple[str, str], dict[str, Tensor]]
) -> dict[tuple[str, str], Run]:
    """Every case on this worker, from the given parameters (threads share a random state)."""
    runs = {}
    for graph, kind in CASES:
        data = pyg_sar.load_partition(Path(root) / graph, view="local")
        model = TwoLayers(kind, data.num_features, data.num_labels).double()
        model.load_state_dict(start[graph, kind])
        model = pyg_sar.distribute(model, view="local")
        runs[graph, kind] = _train(model, data, pyg_sar.mean, pyg_sar.accuracy)
    return runs


@pytest.fixture(scope="module")
def graphs(shared_data) -> dict[str, Data]:
    loaded = {}
    for name, options in GRAPHS.items():
        data = load_graph(f"{shared_data(f'{name}.npz')}:{options}")
        data.num_labels = int(data.y.max()) + 1
        data = data.subgraph(torch.arange(min(NODES, data.num_nodes)))
        data.x = data.x.double()
        loaded[name] = data
    return loaded


@pytest.fixture(scope="module")
def plain(graphs) -> dict[tuple[str, str], Run]:
    return _plain(graphs)


@pytest.mark.parametrize("workers", BACKENDS)
def test_loss_curve_and_accuracy_of_plain_pyg(workers, graphs, plain, tmp_path):
    for name, data in graphs.items():
        pyg_sar.write_partitions(data, workers, tmp_path / name)
    start = {(name, kind): _build(kind, graphs[name]).state_dict() for name, kind in CASES}
    results = pyg_sar.launch(_worker, workers, str(tmp_path), start, backend=BACKENDS[workers])
    for case in CASES:
        for rank, runs in enumerate(results):
            losses, expected = runs[case].losses, plain[case].losses
            difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            assert difference < TOLERANCE, (case, rank, difference)
            assert runs[case].accuracy == plain[case].accuracy, (case, rank)


def test_training_learns_the_classes(plain):
    for (graph, kind), run in plain.items():
        assert run.losses[-1] < 0.95 * run.losses[0], (graph, kind)
        assert run.accuracy > 0.25, (graph, kind)
