"""Atoms that move in a periodic box: forces and neighbours anew in each step, energy conserved.

The potential is a SchNet (Schütt et al., 2017), whose forces are the gradient of its energy. Run as
``python examples/molecular_dynamics.py``: two workers, and one process without pyg_sar's parts.
"""

import sys
import tempfile

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MLP
from torch_geometric.nn.models.schnet import CFConv, GaussianSmearing, ShiftedSoftplus

import pyg_sar

SIDE, STEPS = map(int, sys.argv[1:] or (6, 40))
HIDDEN, CUTOFF, TIME_STEP, WORKERS = 16, 1.7, 0.01, 2


class Potential(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.smear = torch.nn.Embedding(2, HIDDEN), GaussianSmearing(0.0, CUTOFF, 20)
        net = MLP([20, HIDDEN, HIDDEN], act=ShiftedSoftplus(), norm=None)
        self.conv = CFConv(HIDDEN, HIDDEN, HIDDEN, net, CUTOFF)
        self.head = torch.nn.Linear(HIDDEN, 1)

    def forward(self, z: Tensor, pos: Tensor) -> Tensor:
        edge_index, shift = pyg_sar.nn.radius_graph(pos.detach(), CUTOFF, cell=[float(SIDE)] * 3)
        length = (pos[edge_index[0]] - pos[edge_index[1]] + shift).norm(dim=1)
        x = self.atoms(z)
        x = x + self.conv(x, edge_index, length, self.smear(length))
        repulsion = (CUTOFF - length).clamp(min=0).pow(4).sum()
        return self.head(x.tanh()).sum() + repulsion


def energy_and_forces(model: torch.nn.Module, z: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    pos = pos.detach().requires_grad_()
    energy = model(z, pos)
    (gradient,) = torch.autograd.grad(energy, pos)
    return energy.detach(), -gradient


def simulate(model: torch.nn.Module, data: Data) -> list[float]:
    """Velocity Verlet, all masses 1. Returns the total energy of each step."""
    pos, velocity, totals = data.pos, data.velocity, []
    energy, force = energy_and_forces(model, data.z, pos)
    for _ in range(STEPS):
        velocity = velocity + 0.5 * TIME_STEP * force
        pos = (pos + TIME_STEP * velocity) % SIDE
        energy, force = energy_and_forces(model, data.z, pos)
        velocity = velocity + 0.5 * TIME_STEP * force
        totals.append(float(energy + 0.5 * velocity.square().sum()))
    return totals


def work(root: str) -> list[float]:
    torch.manual_seed(0)
    return simulate(pyg_sar.distribute(Potential().double()), pyg_sar.load_partition(root))


if __name__ == "__main__":
    draw = torch.Generator().manual_seed(0)
    places = torch.cartesian_prod(*[torch.arange(SIDE)] * 3)
    pos = places + 0.1 * torch.rand(len(places), 3, generator=draw).double()
    z = torch.randint(2, (len(pos),), generator=draw)
    velocity = torch.randn(len(pos), 3, generator=draw).double()
    edge_index, _ = pyg_sar.nn.radius_graph(pos, CUTOFF, cell=[float(SIDE)] * 3)
    box = Data(z=z, pos=pos, velocity=velocity, edge_index=edge_index)
    with tempfile.TemporaryDirectory() as root:
        pyg_sar.write_partitions(box, WORKERS, f"{root}/parts")
        found = pyg_sar.launch(work, WORKERS, f"{root}/parts")[0]
    torch.manual_seed(0)
    alone = simulate(Potential().double(), box)
    drift = max(abs(total - found[0]) for total in found) / float(0.5 * velocity.square().sum())
    apart = max(abs(a / b - 1) for a, b in zip(found, alone, strict=True))
    print(f"energy {found[0]:.3f}, drift {drift:.0e} of the kinetic; differs by {apart:.0e}")
