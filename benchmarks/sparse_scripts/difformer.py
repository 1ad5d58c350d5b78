"""Linear attention between all nodes beside a graph convolution, as DIFFormer has them.

The convolution makes its matrix in each call, of the edges that the model gets.
"""

import os.path as osp

import torch
import torch.nn.functional as F
from torch_geometric import transforms as T
from torch_geometric.datasets import Planetoid
from torch_geometric.utils import degree
from torch_sparse import SparseTensor, matmul

torch.manual_seed(0)
path = osp.join(osp.dirname(osp.realpath(__file__)), "..", "data", "Planetoid")
dataset = Planetoid(path, "Cora", transform=T.NormalizeFeatures())
data = dataset[0]


def attention(queries, keys, values):
    queries = queries / torch.norm(queries, p=2)
    keys = keys / torch.norm(keys, p=2)
    nodes = queries.shape[0]
    out = torch.einsum("nhm,hmd->nhd", queries, torch.einsum("lhm,lhd->hmd", keys, values))
    out = out + values.sum(0, keepdim=True)
    normalizer = torch.einsum("nhm,hm->nh", queries, keys.sum(0)) + nodes
    return out / normalizer.unsqueeze(-1)


def convolution(x, edge_index):
    nodes = x.shape[0]
    row, col = edge_index
    count = degree(col, nodes, x.dtype)
    value = (1.0 / count[col]).sqrt() * (1.0 / count[row]).sqrt()
    value = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
    adj = SparseTensor(row=col, col=row, value=value, sparse_sizes=(nodes, nodes))
    return torch.stack([matmul(adj, x[:, head]) for head in range(x.shape[1])], dim=1)


class Layer(torch.nn.Module):
    def __init__(self, width, out, heads):
        super().__init__()
        self.queries, self.keys, self.values = (
            torch.nn.Linear(width, out * heads) for _ in range(3)
        )
        self.heads, self.out = heads, out

    def forward(self, x, edge_index):
        parts = (lin(x).reshape(-1, self.heads, self.out) for lin in (self.queries, self.keys))
        queries, keys = parts
        values = self.values(x).reshape(-1, self.heads, self.out)
        return (attention(queries, keys, values) + convolution(values, edge_index)).mean(1)


class Net(torch.nn.Module):
    def __init__(self, width, hidden, classes):
        super().__init__()
        self.first = torch.nn.Linear(width, hidden)
        self.layers = torch.nn.ModuleList(Layer(hidden, hidden, 2) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden) for _ in range(2))
        self.last = torch.nn.Linear(hidden, classes)

    def forward(self, x, edge_index):
        x = F.dropout(self.first(x).relu(), 0.2, self.training)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(0.5 * layer(x, edge_index) + 0.5 * x).relu()
        return self.last(x)


model = Net(dataset.num_features, 16, dataset.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(1, 4):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    print(f"Epoch {epoch}, loss {loss.item()}")
