"""MeshGraphNet on many meshes: each is divided among the workers when its turn comes.

20 triangular meshes of different shapes, in PyTorch Geometric's ``DataLoader``. The node and edge
networks are those of MeshGraphNets (Pfaff et al., 2021). One process has the same losses.
"""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP
from torch_geometric.transforms import Cartesian, Distance, FaceToEdge
from torch_geometric.utils import scatter

import pyg_sar

MESHES, HIDDEN, STEPS, EPOCHS, WORKERS = 20, 16, 3, 4, 2


def make_mesh(seed: int) -> Data:
    """A strip of triangles, bent; the target is the Laplacian of a heat on it."""
    draw = torch.Generator().manual_seed(seed)
    length = int(torch.randint(6, 12, (1,), generator=draw))
    across = torch.stack(torch.meshgrid(torch.arange(length), torch.arange(5), indexing="ij"), -1)
    pos = across.view(-1, 2).double() + 0.3 * torch.rand(5 * length, 2, generator=draw).double()
    corner = (torch.arange(length - 1).view(-1, 1) * 5 + torch.arange(4)).view(-1)
    face = torch.stack([corner, corner + 1, corner + 5, corner + 1, corner + 5, corner + 6])
    mesh = Data(pos=pos, x=torch.exp(-(pos - 2).square().sum(1, keepdim=True)))
    mesh.face = torch.cat([face[:3], face[3:]], 1)
    mesh = Distance(cat=True)(Cartesian(norm=False)(FaceToEdge()(mesh)))
    source, target = mesh.edge_index
    mesh.y = scatter(mesh.x[source] - mesh.x[target], target, 0, mesh.num_nodes)
    return mesh


class MeshGraphNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mlp = lambda inputs, out=HIDDEN: MLP([inputs, HIDDEN, out], norm=None)  # noqa: E731
        self.node, self.edge, self.last = mlp(1), mlp(3), mlp(HIDDEN, 1)
        self.of_edges = torch.nn.ModuleList([mlp(3 * HIDDEN) for _ in range(STEPS)])
        self.of_nodes = torch.nn.ModuleList([mlp(2 * HIDDEN) for _ in range(STEPS)])

    def forward(self, mesh: Data) -> torch.Tensor:
        (source, target), x, e = mesh.edge_index, self.node(mesh.x), self.edge(mesh.edge_attr)
        for of_edges, of_nodes in zip(self.of_edges, self.of_nodes, strict=True):
            e = e + of_edges(torch.cat([x[source], x[target], e], 1))
            x = x + of_nodes(torch.cat([x, scatter(e, target, 0, x.size(0))], 1))
        return self.last(x)


def train(several: bool) -> list[float]:
    torch.manual_seed(0)
    model = MeshGraphNet().double()
    if several:
        pyg_sar.init()
        model = pyg_sar.distribute(model)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    meshes = DataLoader([make_mesh(k) for k in range(MESHES)], batch_size=2, shuffle=True)
    for _ in range(EPOCHS):
        for mesh in meshes:
            if several:
                mesh = pyg_sar.scatter(mesh)
            optimizer.zero_grad()
            loss = (model(mesh) - mesh.y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found, alone = pyg_sar.launch(train, WORKERS, True)[0], train(False)
    apart = max(abs(a / b - 1) for a, b in zip(found, alone, strict=True))
    print(f"loss {found[0]:.3f} to {found[-1]:.3f}; largest difference {apart:.0e}")
