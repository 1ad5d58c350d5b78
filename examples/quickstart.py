"""The shortest whole script: cut a graph into parts, train a PyG model on it with four workers.

Two lines differ from a single-process PyG script; each shows what it replaces. Run it:
``python examples/quickstart.py``
"""

import tempfile

import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv

import pyg_sar
from pyg_sar.tools import load_graph


class GAT(torch.nn.Module):
    """An ordinary PyG model."""

    def __init__(self, in_channels: int, hidden: int, out_channels: int, heads: int) -> None:
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden, heads)
        self.conv2 = GATConv(hidden * heads, out_channels)

    def forward(self, x, edge_index):
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


def train(parts: str) -> float:
    """Runs on each worker, which holds its part of the graph."""
    data = pyg_sar.load_partition(parts)  # data = load_graph("synthetic")
    torch.manual_seed(0)
    model = pyg_sar.distribute(GAT(data.num_features, 8, 8, heads=4))  # model = GAT(...)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mask = data.train_mask
    for epoch in range(1, 31):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[mask], data.y[mask])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0 and pyg_sar.comm.current().rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    return float((out.argmax(1) == data.y)[data.test_mask].float().mean())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        graph = load_graph("synthetic:nodes=5000,features=64,classes=8")
        print(pyg_sar.write_partitions(graph, 4, f"{folder}/parts"))
        accuracy = pyg_sar.launch(train, 4, f"{folder}/parts")[0]  # each returns the same
    print(f"test accuracy {accuracy:.4f}")
