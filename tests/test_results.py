"""Real graphs: training on several workers is training in plain PyG, to the last digits.

``benchmarks/accuracy.py`` shows the same at length, with the papers' settings.
"""

from __future__ import annotations

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


def _train(model: nn.Module, data: Data) -> Run:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = (model(data.x, data.edge_index).argmax(dim=1) == data.y)[data.test_mask]
    return Run(losses, int(right.sum()) / right.numel())


def _build(kind: str, data: Data) -> nn.Module:
    torch.manual_seed(0)
    return TwoLayers(kind, data.num_features, int(data.y.max()) + 1).double()


def _worker(root: str) -> dict[tuple[str, str], Run]:
    """Every case on this worker."""
    runs = {}
    for graph, kind in CASES:
        data = pyg_sar.load_partition(Path(root) / graph)
        runs[graph, kind] = _train(pyg_sar.distribute(_build(kind, data)), data)
    return runs


@pytest.fixture(scope="module")
def graphs(shared_data) -> dict[str, Data]:
    loaded = {}
    for name, options in GRAPHS.items():
        data = load_graph(f"{shared_data(f'{name}.npz')}:{options}")
        data = data.subgraph(torch.arange(min(NODES, data.num_nodes)))
        data.x = data.x.double()
        loaded[name] = data
    return loaded


@pytest.fixture(scope="module")
def plain(graphs) -> dict[tuple[str, str], Run]:
    """Every case in PyG alone."""
    return {(g, kind): _train(_build(kind, graphs[g]), graphs[g]) for g, kind in CASES}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loss_curve_and_accuracy_of_plain_pyg(workers, graphs, plain, tmp_path):
    for name, data in graphs.items():
        pyg_sar.write_partitions(data, workers, tmp_path / name)
    results = pyg_sar.launch(_worker, workers, str(tmp_path))
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
