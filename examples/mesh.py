"""Simulation on a partitioned mesh: an encoder, a processor and a decoder, as in MeshGraphNets.

The model (Pfaff et al., ICLR 2021) learns how much heat each vertex takes up in one step. It is
plain PyTorch: nodes are read by ``x[source]``, edges summed up by ``scatter``. Two workers train it
on the whole mesh, and one process without pyg_sar has the same losses.
"""

import tempfile

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MLP
from torch_geometric.utils import grid, scatter, to_undirected

import pyg_sar

SIDE, HIDDEN, STEPS, WORKERS = 24, 16, 4, 2


def make_mesh() -> Data:
    """A square of triangles, its vertices slightly moved, with a source of heat."""
    draw = torch.Generator().manual_seed(0)
    edges, pos = grid(SIDE, SIDE, dtype=torch.float64)
    pos = (pos + 0.2 * torch.rand(pos.shape, generator=draw, dtype=pos.dtype)) / SIDE
    edges = to_undirected(edges[:, edges[0] != edges[1]])
    source, target = edges
    heat = torch.exp(-20 * (pos - 0.4).square().sum(1, keepdim=True))
    offset = pos[source] - pos[target]
    length = offset.norm(dim=1, keepdim=True)
    flow = (heat[source] - heat[target]) / length
    y = scatter(flow, target, dim_size=len(pos), reduce="mean")
    return Data(x=heat, edge_index=edges, edge_attr=torch.cat([offset, length], 1), y=y)


def mlp(inputs: int, out: int = HIDDEN) -> MLP:
    return MLP([inputs, HIDDEN, out], norm=None).double()


class MeshGraphNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges, self.decoder = mlp(1), mlp(3), mlp(HIDDEN, 1)
        self.of_edges = torch.nn.ModuleList([mlp(3 * HIDDEN) for _ in range(STEPS)])
        self.of_nodes = torch.nn.ModuleList([mlp(2 * HIDDEN) for _ in range(STEPS)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        x, e = self.nodes(x), self.edges(edge_attr)
        for of_edges, of_nodes in zip(self.of_edges, self.of_nodes, strict=True):
            e = e + of_edges(torch.cat([e, x[source], x[target]], dim=1))
            x = x + of_nodes(torch.cat([x, scatter(e, target, 0, x.size(0))], dim=1))
        return self.decoder(x)


def train(model: torch.nn.Module, data: Data, mean) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = mean((model(data.x, data.edge_index, data.edge_attr) - data.y).square().sum(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(root: str) -> list[float]:
    torch.manual_seed(0)
    return train(pyg_sar.distribute(MeshGraphNet()), pyg_sar.load_partition(root), pyg_sar.mean)


if __name__ == "__main__":
    mesh = make_mesh()
    with tempfile.TemporaryDirectory() as root:
        print(pyg_sar.write_partitions(mesh, WORKERS, f"{root}/parts"))
        found = pyg_sar.launch(work, WORKERS, f"{root}/parts")[0]
    torch.manual_seed(0)
    alone = train(MeshGraphNet(), mesh, torch.mean)
    apart = max(abs(a / b - 1) for a, b in zip(found, alone, strict=True))
    print(f"loss {found[0]:.3f} to {found[-1]:.3f}; largest difference {apart:.0e}")
