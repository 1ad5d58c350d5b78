"""Link prediction: a GCN scores pairs of nodes; pairs that are no edges are drawn in each epoch.

It prints losses and AUC of 1, 2 and 3 workers, which are the same. Run it:
``python examples/link_prediction.py [SOURCE]``, where a source is ``cora``, a file such as
``cora.npz``, ... (docs/partitioning.md); by default a synthetic graph.
"""

import random
import sys
import tempfile

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import negative_sampling

import pyg_sar
from pyg_sar.partition import assign_nodes
from pyg_sar.tools import load_graph

SPLITS, EPOCHS = ("train", "val", "test"), 40


def score(z: Tensor, pairs: Tensor) -> Tensor:
    return (z[pairs[0]] * z[pairs[1]]).sum(dim=-1)  # z[pairs[0]] fetches rows of other workers


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """The share of (edge, no edge) of which the edge has the higher score."""
    ranks = scores.argsort().argsort() + 1.0
    edges, others = int(labels.sum()), int((labels == 0).sum())
    return float(ranks[labels == 1].sum() - edges * (edges + 1) / 2) / (edges * others)


def evaluate(model: torch.nn.Module, data: Data) -> float:
    """The area of the test pairs, which sorts all scores: on every worker."""
    with torch.no_grad():
        found = score(model(data.x, data.edge_index), data.edge_label_index)
    return area_under_curve(found, data.edge_label)


def train(root: str) -> tuple[list[float], float]:
    """Runs on each worker. Returns the losses, and the area of the test pairs."""
    data, test = (pyg_sar.load_partition(f"{root}/{name}") for name in ("train", "test"))
    torch.manual_seed(0)
    random.seed(0)  # of the pairs
    model = pyg_sar.distribute(GCN(data.num_features, 64, 2, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        z = model(data.x, data.edge_index)
        no_edges = negative_sampling(data.edge_index, data.num_nodes, 0.5)
        pairs = torch.cat([data.edge_label_index, no_edges], dim=1)
        labels = torch.cat([data.edge_label, torch.zeros(no_edges.size(1))])
        loss = F.binary_cross_entropy_with_logits(score(z, pairs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, evaluate(model, test)


if __name__ == "__main__":
    graph = load_graph(sys.argv[1] if len(sys.argv) > 1 else "synthetic:nodes=2000,classes=8")
    torch.manual_seed(0)
    random.seed(0)
    splits = T.RandomLinkSplit(0.05, 0.1, is_undirected=True, add_negative_train_samples=False)
    graphs = dict(zip(SPLITS, splits(graph), strict=True))
    for workers in (1, 2, 3):
        with tempfile.TemporaryDirectory() as root:
            part = assign_nodes(graphs["train"].edge_index, graph.num_nodes, workers)
            for name, split in graphs.items():  # every worker owns the same nodes in each
                pyg_sar.write_partitions(split, workers, f"{root}/{name}", part)
            losses, area = pyg_sar.launch(train, workers, root)[0]
        curve = "  ".join(f"{loss:.5f}" for loss in losses[9::10])
        print(f"{workers} workers: loss {curve}  test AUC {area:.4f}")
