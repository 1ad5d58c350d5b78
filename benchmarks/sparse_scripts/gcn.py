"""A GCN of one's own: the adjacency is normalized by torch-sparse, once, and multiplied."""

import os.path as osp

import torch
import torch.nn.functional as F
from torch_geometric import transforms as T
from torch_geometric.datasets import Planetoid
from torch_geometric.utils import to_undirected
from torch_sparse import SparseTensor, fill_diag, matmul, mul
from torch_sparse import sum as sparse_sum

torch.manual_seed(0)
path = osp.join(osp.dirname(osp.realpath(__file__)), "..", "data", "Planetoid")
dataset = Planetoid(path, "Cora", transform=T.NormalizeFeatures())
data = dataset[0]

row, col = to_undirected(data.edge_index)
N = data.num_nodes
adj = SparseTensor(row=row, col=col, sparse_sizes=(N, N))
adj = fill_diag(adj.fill_value(1.0), 1.0)
degree = sparse_sum(adj, dim=1)
scale = degree.pow(-0.5)
scale.masked_fill_(scale == float("inf"), 0.0)
adj = mul(mul(adj, scale.view(-1, 1)), scale.view(1, -1))


class GCN(torch.nn.Module):
    def __init__(self, width, hidden, classes):
        super().__init__()
        self.first = torch.nn.Linear(width, hidden)
        self.second = torch.nn.Linear(hidden, classes)

    def forward(self, x, adj):
        x = F.dropout(x, 0.5, self.training)
        x = matmul(adj, self.first(x)).relu()
        x = F.dropout(x, 0.5, self.training)
        return adj @ self.second(x)


model = GCN(dataset.num_features, 16, dataset.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(1, 4):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, adj)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        hit = model(data.x, adj).argmax(-1) == data.y
    accuracy = float(hit[data.train_mask].float().mean())
    print(f"Epoch {epoch}, loss {loss.item()}, train {accuracy}")
print(f"{adj.nnz()} entries, {float(adj.sum())} in all")
