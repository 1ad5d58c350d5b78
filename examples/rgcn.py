"""Entity classification with R-GCN (Schlichtkrull et al., 2018), bases and blocks, on two workers.

The graph is made here; ``python examples/rgcn.py FILE.npz`` takes arrays ``edge_index``,
``edge_type``, ``num_nodes``, ``y``, ``train_mask`` and ``test_mask``.
"""

import sys
import tempfile

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.nn import RGCNConv

import pyg_sar

WORKERS, HIDDEN, EPOCHS, SPLITS = 2, 16, 20, ("train", "test")


def with_inverses(data: Data) -> Data:
    """Each relation gets an inverse, as in the paper: messages go both ways."""
    relations = int(data.edge_type.max()) + 1
    data.edge_index = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1).long()
    data.edge_type = torch.cat([data.edge_type, data.edge_type + relations]).long()
    return data


def read_graph(path: str) -> Data:
    arrays = np.load(path, allow_pickle=False)
    names = "edge_index", "edge_type", "y", "train_mask", "test_mask"
    found = {name: torch.from_numpy(arrays[name]) for name in names}
    return with_inverses(Data(num_nodes=int(arrays["num_nodes"]), **found))


def make_graph(entities: int = 200, classes: int = 3, relations: int = 3) -> Data:
    """Facts join entities of one class by a relation that the class prefers."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (entities,), generator=draw)
    ends = torch.randint(entities, (2, 30 * entities), generator=draw)
    ends = ends[:, y[ends[0]] == y[ends[1]]]
    noise = torch.randint(relations, (ends.size(1),), generator=draw)
    kind = torch.where(torch.rand(ends.size(1), generator=draw) < 0.5, y[ends[0]], noise)
    masks = {f"{name}_mask": torch.arange(entities) % 2 == k for k, name in enumerate(SPLITS)}
    return with_inverses(Data(edge_index=ends, edge_type=kind, y=y, num_nodes=entities, **masks))


class RGCN(torch.nn.Module):
    """Entities have no features: each has a trainable vector, at the worker that owns it."""

    def __init__(self, entities: torch.nn.Module, relations: int, classes: int, **how: int) -> None:
        super().__init__()
        self.entities = entities
        self.first = RGCNConv(HIDDEN, HIDDEN, relations, **how)
        self.last = RGCNConv(HIDDEN, classes, relations, num_bases=8)

    def forward(self, edge_index: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return self.last(
            self.first(self.entities.weight, edge_index, kind).relu(), edge_index, kind
        )


def train(root: str, relations: int, classes: int) -> None:
    data = pyg_sar.load_partition(root)
    config = pyg_sar.train.TrainConfig(epochs=EPOCHS, lr=0.01, eval_every=EPOCHS)
    call = lambda model, data: model(data.edge_index, data.edge_type)  # noqa: E731
    for how in ({"num_bases": 8}, {"num_blocks": 4}):
        torch.manual_seed(0)
        own = pyg_sar.nn.NodeEmbedding(data.num_nodes, HIDDEN)
        model = pyg_sar.distribute(RGCN(own, relations, classes, **how))
        result = pyg_sar.Trainer(model, data, config, forward=call).fit()
        if pyg_sar.comm.current().rank == 0:
            print(f"{how}: test accuracy {result.final['test_accuracy']:.3f}")


if __name__ == "__main__":
    graph = read_graph(sys.argv[1]) if sys.argv[1:] else make_graph()
    sizes = int(graph.edge_type.max()) + 1, int(graph.y.max()) + 1
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.write_partitions(graph, WORKERS, f"{folder}/parts")
        pyg_sar.launch(train, WORKERS, f"{folder}/parts", *sizes)
