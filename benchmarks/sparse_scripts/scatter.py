"""Attention and a maximum over neighbours by torch-scatter, in a layer of one's own."""

import os.path as osp

import torch
import torch.nn.functional as F
from torch_geometric import transforms as T
from torch_geometric.datasets import Planetoid
from torch_geometric.utils import add_self_loops
from torch_scatter import scatter, scatter_add, scatter_max, scatter_softmax

torch.manual_seed(0)
path = osp.join(osp.dirname(osp.realpath(__file__)), "..", "data", "Planetoid")
dataset = Planetoid(path, "Cora", transform=T.NormalizeFeatures())
data = dataset[0]


class Layer(torch.nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.lin = torch.nn.Linear(width, out)
        self.ahead, self.behind = torch.nn.Linear(out, 1), torch.nn.Linear(out, 1)

    def forward(self, x, edge_index):
        row, col = edge_index
        x = self.lin(x)
        score = F.leaky_relu(self.ahead(x)[row] + self.behind(x)[col], 0.2).squeeze(-1)
        alpha = scatter_softmax(score, col, dim=0)
        mean = scatter_add(x[row] * alpha.unsqueeze(-1), col, dim=0, dim_size=x.size(0))
        top, _ = scatter_max(x[row], col, dim=0, dim_size=x.size(0))
        return mean + top


class Net(torch.nn.Module):
    def __init__(self, width, hidden, classes):
        super().__init__()
        self.first, self.second = Layer(width, hidden), Layer(hidden, classes)

    def forward(self, x, edge_index):
        x = F.elu(self.first(x, edge_index))
        return self.second(F.dropout(x, 0.5, self.training), edge_index)


edge_index, _ = add_self_loops(data.edge_index, num_nodes=data.num_nodes)
model = Net(dataset.num_features, 16, dataset.num_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(1, 4):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    print(f"Epoch {epoch}, loss {loss.item()}")
model.eval()
by_class = scatter(model(data.x, edge_index).detach(), data.y, dim=0, reduce="mean")
print("Means by class", by_class.tolist())
