"""Simulation on a partitioned mesh: an encoder, a processor and a decoder, as in MeshGraphNets.

A bipartite encoder brings the points' heat to a mesh. One process has the losses of two workers.
"""

import tempfile

import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import MLP
from torch_geometric.utils import grid, scatter

import pyg_sar

POINTS, SIDE, HIDDEN, WORKERS = 400, 8, 16, 2
ENCODE, PROCESS, DECODE = ("point", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "point")
TURNS = ENCODE, PROCESS, PROCESS, DECODE


def make_graph() -> HeteroData:
    draw = torch.Generator().manual_seed(0)
    data, (edges, mesh) = HeteroData(), grid(SIDE, SIDE, dtype=torch.float64)
    pos = {"point": torch.rand(POINTS, 2, generator=draw).double(), "mesh": mesh / (SIDE - 1)}
    near = torch.cdist(pos["point"], pos["mesh"]).topk(3, largest=False).indices.view(-1)
    points = torch.arange(POINTS).repeat_interleave(3)
    radius = 5 * (pos["point"] - 0.4).square().sum(1, keepdim=True)
    data["point"].x, data["mesh"].x = torch.exp(-radius), pos["mesh"]
    data["point"].y = (radius - 1) * data["point"].x  # The heat taken up: its Laplacian.
    for kind, ends in ((ENCODE, (points, near)), (PROCESS, edges), (DECODE, (near, points))):
        offset = pos[kind[0]][ends[0]] - pos[kind[2]][ends[1]]
        data[kind].edge_index = torch.stack(tuple(ends))
        data[kind].edge_attr = torch.cat([offset, offset.norm(dim=1, keepdim=True)], dim=1)
    return data


class MeshGraphNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mlp = lambda inputs, out=HIDDEN: MLP([inputs, HIDDEN, out], norm=None)  # noqa: E731
        self.inputs = torch.nn.ModuleDict({"point": mlp(1), "mesh": mlp(2)})
        self.of_edges = torch.nn.ModuleList([mlp(2 * HIDDEN + 3) for _ in TURNS])
        self.of_nodes = torch.nn.ModuleList([mlp(2 * HIDDEN) for _ in TURNS])
        self.last = mlp(HIDDEN, 1)

    def forward(self, data: HeteroData) -> torch.Tensor:
        x = {name: net(data[name].x) for name, net in self.inputs.items()}
        for kind, of_edges, of_nodes in zip(TURNS, self.of_edges, self.of_nodes, strict=True):
            (source, target), own = data[kind].edge_index, x[kind[2]]
            ends = x[kind[0]][source], own[target], data[kind].edge_attr
            sums = scatter(of_edges(torch.cat(ends, dim=1)), target, 0, own.size(0))
            x[kind[2]] = own + of_nodes(torch.cat([own, sums], dim=1))
        return self.last(x["point"])


def train(model: torch.nn.Module, data: HeteroData) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(data) - data["point"].y).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(root: str) -> list[float]:
    torch.manual_seed(0)
    return train(pyg_sar.distribute(MeshGraphNet().double()), pyg_sar.load_partition(root))


if __name__ == "__main__":
    graph = make_graph()
    with tempfile.TemporaryDirectory() as root:
        print(pyg_sar.write_partitions(graph, WORKERS, f"{root}/parts"))
        found = pyg_sar.launch(work, WORKERS, f"{root}/parts")[0]
    torch.manual_seed(0)
    alone = train(MeshGraphNet().double(), graph)
    apart = max(abs(a / b - 1) for a, b in zip(found, alone, strict=True))
    print(f"loss {found[0]:.3f} to {found[-1]:.3f}; largest difference {apart:.0e}")
