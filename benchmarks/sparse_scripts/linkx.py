"""A weight for each node, multiplied by the adjacency, beside the features: as LINKX has them."""

import os.path as osp

import torch
import torch.nn.functional as F
import torch_sparse
from torch_geometric import transforms as T
from torch_geometric.datasets import Planetoid

torch.manual_seed(0)
path = osp.join(osp.dirname(osp.realpath(__file__)), "..", "data", "Planetoid")
dataset = Planetoid(path, "Cora", transform=T.NormalizeFeatures())
data = dataset[0]


class LINKX(torch.nn.Module):
    def __init__(self, nodes, width, hidden, classes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(nodes, hidden) / hidden)
        self.of_edges = torch.nn.Linear(hidden, hidden)
        self.of_nodes = torch.nn.Linear(width, hidden)
        self.joined = torch.nn.Linear(2 * hidden, hidden)
        self.last = torch.nn.Linear(hidden, classes)

    def forward(self, x, edge_index, value):
        nodes = x.size(0)
        a = torch_sparse.spmm(edge_index, value, nodes, nodes, self.weight)
        a, x = self.of_edges(a), self.of_nodes(x)
        out = self.joined(torch.cat([a, x], dim=-1)) + a + x
        return self.last(F.dropout(out.relu(), 0.5, self.training))


edge_index, value = torch_sparse.coalesce(
    data.edge_index.flip(0),
    torch.ones(data.num_edges, dtype=data.x.dtype),
    data.num_nodes,
    data.num_nodes,
)
model = LINKX(data.num_nodes, dataset.num_features, 16, dataset.num_classes)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(1, 4):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, edge_index, value)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    print(f"Epoch {epoch}, loss {loss.item()}, weight {model.weight.norm().item()}")
