"""A forecast: snapshots on one graph, two replicas of two parts, an encoder, a mesh and a decoder.

Each worker reads its own rows of a snapshot; each replica takes other snapshots, and gradients are
averaged over replicas. One process that averages the replicas' gradients has the same losses.
"""

import tempfile

import numpy as np
import torch
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import pyg_sar

POINTS, MESH, TIMES, WIDTHS, REPLICAS, PARTS = 240, 40, 16, (2, 16, 16, 2), 2, 2


def make_graph() -> Data:
    """Points of the weather, then those of a coarser mesh, which all points are joined to."""
    pos = torch.rand(POINTS + MESH, 2, generator=torch.Generator().manual_seed(0))
    near = torch.cdist(pos, pos[POINTS:]).topk(4, largest=False).indices.flatten() + POINTS
    into = torch.stack([near, torch.arange(len(pos)).repeat_interleave(4)])
    return Data(pos=pos, edge_index=torch.cat([into, into.flip(0)], 1))


def make_snapshots(pos: np.ndarray) -> np.ndarray:
    """A wave that travels over the points: ``[T, N, F]``."""
    time, phase = np.arange(TIMES + 1).reshape(-1, 1, 1), pos @ [[3.0, 1.0], [1.0, 4.0]]
    return np.sin(phase + 0.3 * time)


class Forecast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(map(SAGEConv, WIDTHS, WIDTHS[1:]))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out = self.convs[0](x, edge_index).tanh()
        out = self.convs[1](out, edge_index).tanh()
        return x + self.convs[2](out, edge_index)


def train(model: torch.nn.Module, batches: list) -> list[float]:
    """One step per batch, which holds the graph and pairs of a snapshot and the next one."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for graph, pairs in batches:
        errors = [model(now, graph.edge_index) - later for now, later in pairs]
        optimizer.zero_grad()
        loss = sum(error.square().mean() for error in errors) / len(pairs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(root: str) -> list[float]:
    comm, graph = pyg_sar.comm.current(), pyg_sar.load_partition(root)
    series = pyg_sar.partition.load_series(root)  # reads this part's rows only
    whole = lambda time: pyg_sar.from_local(series[time]["x"], graph)  # noqa: E731
    torch.manual_seed(0)
    times = DistributedSampler(range(TIMES), comm.replicas, comm.replica, shuffle=False)
    batches = [(graph, [(whole(time), whole(time + 1))]) for time in times]
    losses = train(pyg_sar.distribute(Forecast().double()), batches)
    return comm.average(torch.tensor(losses, dtype=torch.float64)).tolist()


if __name__ == "__main__":
    graph = make_graph()
    snapshots = make_snapshots(graph.pos.double().numpy())
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(graph, PARTS, root, series={"x": snapshots}, overwrite=True)
        found = pyg_sar.launch(work, REPLICAS * PARTS, root, replicas=REPLICAS)[0]
    x, times = torch.from_numpy(snapshots), torch.arange(TIMES).split(REPLICAS)
    torch.manual_seed(0)
    pairs = [(graph, [(x[t], x[t + 1]) for t in of_replicas]) for of_replicas in times]
    expected = train(Forecast().double(), pairs)
    apart = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    print(f"loss {found[0]:.3f} to {found[-1]:.3f}; largest difference {apart:.0e}")
