"""An interatomic potential on a partitioned crystal: forces are derivatives of the energy.

A SchNet (Schütt et al., 2017) gives each atom an energy. The loss is of forces, so its gradient
is a second derivative. One process without pyg_sar has the same losses.
"""

import sys
import tempfile

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MLP
from torch_geometric.nn.models.schnet import CFConv, GaussianSmearing, ShiftedSoftplus

import pyg_sar

SIDE, EPOCHS = map(int, sys.argv[1:] or (6, 60))
HIDDEN, LAYERS, CUTOFF, WORKERS = 16, 2, 1.6, 2


def make_crystal() -> Data:
    """A cube of atoms of two kinds, moved a little; forces are those of a Morse potential."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randint(2, (SIDE**3,), generator=draw)
    places = torch.cartesian_prod(*[torch.arange(SIDE)] * 3)
    pos = (places + 0.2 * torch.rand(len(z), 3, generator=draw).double()).requires_grad_()
    source, target = edges = (torch.cdist(pos, pos).fill_diagonal_(9) < CUTOFF).nonzero().t()
    length = (pos[source] - pos[target]).norm(dim=1)
    energy = (1 - torch.exp(1 + 0.1 * (z[source] + z[target]) - length)).square().sum() / 2
    (gradient,) = torch.autograd.grad(energy, pos)
    return Data(z=z, pos=pos.detach(), edge_index=edges, force=-gradient)


class Potential(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.smear = torch.nn.Embedding(2, HIDDEN), GaussianSmearing(0.0, CUTOFF, 20)
        self.convs, self.head = torch.nn.ModuleList(), torch.nn.Linear(HIDDEN, 1)
        for _ in range(LAYERS):
            net = MLP([20, HIDDEN, HIDDEN], act=ShiftedSoftplus(), norm=None)
            self.convs.append(CFConv(HIDDEN, HIDDEN, HIDDEN, net, CUTOFF))

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        length = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=1)
        x, shape = self.atoms(z), self.smear(length)
        for conv in self.convs:
            x = x + conv(x, edge_index, length, shape)
        return self.head(x.tanh())


def train(model: torch.nn.Module, data: Data) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(EPOCHS):
        pos = data.pos.clone().requires_grad_()
        energy = model(data.z, pos, data.edge_index)
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        loss = (gradient + data.force).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(root: str) -> list[float]:
    torch.manual_seed(0)
    model = pyg_sar.distribute(Potential().double())
    return train(model, pyg_sar.load_partition(root))


if __name__ == "__main__":
    crystal = make_crystal()
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(crystal, WORKERS, f"{root}/parts")
        found = pyg_sar.launch(work, WORKERS, f"{root}/parts")[0]
    torch.manual_seed(0)
    alone = train(Potential().double(), crystal)
    apart = max(abs(a / b - 1) for a, b in zip(found, alone, strict=True))
    print(f"loss {found[0]:.3f} to {found[-1]:.3f}; largest difference {apart:.0e}")
