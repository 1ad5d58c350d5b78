"""A heterogeneous graph: several node types and relations, one of the types without features.

Authors write papers, papers cite papers; papers have features, authors a trainable vector each. Two
workers train a ``HeteroConv`` model on the whole graph to find the papers' topics. After
``distribute`` each worker holds the vectors of its own authors. Run it:
``python examples/hetero.py``
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, SAGEConv

import pyg_sar

PAPERS, AUTHORS, FEATURES, TOPICS, WORKERS = 300, 90, 8, 3, 2


def make_graph() -> HeteroData:
    """Authors keep to one topic each, papers cite mostly within theirs."""
    draw = torch.Generator().manual_seed(0)
    data = HeteroData()
    topic = torch.randint(TOPICS, (PAPERS,), generator=draw)
    data["paper"].x = torch.randn(PAPERS, FEATURES, generator=draw)
    data["paper"].y = topic
    data["paper"].train_mask = torch.arange(PAPERS) % 2 == 0
    data["author"].num_nodes = AUTHORS
    author = torch.randint(AUTHORS // TOPICS, (PAPERS,), generator=draw) * TOPICS + topic
    data["author", "writes", "paper"].edge_index = torch.stack([author, torch.arange(PAPERS)])
    data["paper", "written_by", "author"].edge_index = torch.stack([torch.arange(PAPERS), author])
    cites = torch.randint(PAPERS, (2, 8 * PAPERS), generator=draw)
    kept = topic[cites[0]] == topic[cites[1]]
    data["paper", "cites", "paper"].edge_index = cites[:, kept]
    return data


class Model(torch.nn.Module):
    """Two layers; what it is called with is plain PyG."""

    def __init__(self) -> None:
        super().__init__()
        self.authors = torch.nn.Embedding(AUTHORS, 16)
        self.convs = torch.nn.ModuleList([self.layer(32), self.layer(TOPICS)])

    def layer(self, out: int) -> HeteroConv:
        return HeteroConv(
            {
                ("author", "writes", "paper"): SAGEConv((-1, -1), out),
                ("paper", "written_by", "author"): SAGEConv((-1, -1), out),
                ("paper", "cites", "paper"): GATConv((-1, -1), out, add_self_loops=False),
            }
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict) -> dict[str, Tensor]:
        x_dict = {**x_dict, "author": self.authors.weight}
        x_dict = {name: x.relu() for name, x in self.convs[0](x_dict, edge_index_dict).items()}
        return self.convs[1](x_dict, edge_index_dict)


def train(root: str) -> float:
    torch.manual_seed(0)
    data = pyg_sar.load_partition(root)
    model = Model()
    pyg_sar.nn.initialize(model, data.x_dict, data.edge_index_dict)  # the lazy (-1, -1)
    model = pyg_sar.distribute(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    paper = data["paper"]
    for epoch in range(1, 31):
        optimizer.zero_grad()
        out = model(data.x_dict, data.edge_index_dict)["paper"]
        mask = paper.train_mask
        loss = F.cross_entropy(out[mask], paper.y[mask])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0 and pyg_sar.comm.current().rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    return float((out.argmax(1) == paper.y)[~paper.train_mask].float().mean())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(pyg_sar.write_partitions(make_graph(), WORKERS, f"{folder}/parts"))
        found = pyg_sar.launch(train, WORKERS, f"{folder}/parts")
        print(f"accuracy on the other papers {found[0]:.3f}")
