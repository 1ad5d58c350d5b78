"""What changing graphs cost: edges anew in each step, forces, snapshots, replicas.

    python benchmarks/changing.py [--atoms 100000] [--steps 3]

Atoms lie in a periodic box, with about 40 neighbours each. Prints four tables.
"""

import argparse
import math
import resource
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MLP, GraphSAGE, MessagePassing
from torch_geometric.nn.models.schnet import CFConv, GaussianSmearing

import pyg_sar
from pyg_sar import SARPolicy

CUTOFF, NEIGHBOURS, HIDDEN, LAYERS = 1.0, 40, 32, 2


class EquivariantConv(MessagePassing):
    """An E(n)-equivariant layer's messages (Satorras et al., 2021), without moving the nodes."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.of_edges = MLP([2 * HIDDEN + 1, HIDDEN, HIDDEN], act="silu", norm=None)
        self.of_nodes = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor, length: Tensor, shape: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x, length=length.square().view(-1, 1))
        return self.of_nodes(torch.cat([x, out], 1))

    def message(self, x_i: Tensor, x_j: Tensor, length: Tensor) -> Tensor:
        return self.of_edges(torch.cat([x_i, x_j, length], 1))


def cfconv() -> CFConv:
    """A layer of SchNet."""
    return CFConv(HIDDEN, HIDDEN, HIDDEN, MLP([16, HIDDEN, HIDDEN], norm=None), CUTOFF)


LAYER = {"SchNet": cfconv, "E(n)-equivariant": EquivariantConv}


class Potential(torch.nn.Module):
    """Energies of atoms."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.atoms, self.smear = torch.nn.Embedding(2, HIDDEN), GaussianSmearing(0.0, CUTOFF, 16)
        self.convs = torch.nn.ModuleList([LAYER[kind]() for _ in range(LAYERS)])
        self.head = torch.nn.Linear(HIDDEN, 1)

    def forward(self, z: Tensor, pos: Tensor, edges: tuple[Tensor, Tensor]) -> Tensor:
        edge_index, shift = edges
        length = (pos[edge_index[0]] - pos[edge_index[1]] + shift).norm(dim=1)
        x = self.atoms(z)
        for conv in self.convs:
            x = x + conv(x, edge_index, length, self.smear(length)).tanh()
        return self.head(x)


def box_of(atoms: int) -> float:
    """The length of a box in which they have so many neighbours."""
    return float((atoms * 4 / 3 * math.pi * CUTOFF**3 / NEIGHBOURS) ** (1 / 3))


def make_atoms(count: int) -> Data:
    """Atoms at drawn places; the edges that partitions want are few and of no use."""
    draw = torch.Generator().manual_seed(0)
    pos = box_of(count) * torch.rand(count, 3, generator=draw)
    chain = torch.arange(count - 1)
    return Data(
        pos=pos,
        z=torch.randint(2, (count,), generator=draw),
        force=torch.randn(count, 3, generator=draw),
        edge_index=torch.stack([chain, chain + 1]),
    )


def forces_step(root: str, kind: str, mode: int, steps: int) -> dict[str, float]:
    """Seconds of neighbours and of a step, and what a step takes beyond the edges.

    Mode 0 is plain PyG, in this process alone.
    """
    data = torch.load(root, weights_only=False) if mode == 0 else pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model: Any = Potential(kind)
    if mode:
        model = pyg_sar.distribute(model, SARPolicy(mode=mode))
    cell = torch.full((3,), box_of(data.num_nodes))
    times: list[tuple[float, float]] = []
    base = peak = 0
    for _ in range(steps + 1):
        start = time.perf_counter()
        edges = pyg_sar.nn.radius_graph(data.pos, CUTOFF, cell=cell)
        made = time.perf_counter()
        base = base or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pos = data.pos.clone().requires_grad_()
        energy = model(data.z, pos, edges).sum()
        (gradient,) = torch.autograd.grad(energy, pos, create_graph=True)
        (gradient + data.force).square().mean().backward()
        times.append((made - start, time.perf_counter() - start))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made, whole = map(statistics.median, zip(*times[1:], strict=True))
    return {"edges": made, "step": whole, "MiB": (peak - base) / 1024}


def edges_and_forces(folder: str, atoms: int, steps: int) -> None:
    """Neighbours' share of a step by workers; then peaks, by mode and layer."""
    data = make_atoms(atoms)
    torch.save(data, f"{folder}/atoms.pt")
    print("| layer | workers | mode | step s | edges s | edges % | peak MiB of a worker |")
    print("|---|---|---|---|---|---|---|")
    for kind in LAYER:
        for workers, mode in ((1, 0), (1, 1), (2, 1), (4, 1), (4, 3)):
            root = f"{folder}/atoms.pt"
            if mode:
                root = f"{folder}/atoms-{workers}"
                pyg_sar.write_partitions(data, workers, root, "geometric", overwrite=True)
            found = pyg_sar.launch(forces_step, workers, root, kind, mode, steps)
            step, made = (max(w[name] for w in found) for name in ("step", "edges"))
            peak, name = max(w["MiB"] for w in found), mode or "plain PyG"
            shown = f"{step:.2f} | {made:.2f} | {100 * made / step:.0f} | {peak:.0f} |"
            print(f"| {kind} | {workers} | {name} | {shown}", flush=True)


def replica_step(root: str, steps: int) -> float:
    """Seconds of a training step."""
    data = pyg_sar.load_partition(root)
    series = pyg_sar.partition.load_series(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(GraphSAGE(64, 64, 2, 64))
    times = []
    for k in range(steps + 1):
        start = time.perf_counter()
        x = pyg_sar.from_local(series[k % len(series)]["x"], data)
        model(x, data.edge_index).square().mean().backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def snapshots_and_replicas(folder: str, steps: int) -> None:
    """Bytes that a worker reads of a snapshot; a step of one group, and of two replicas of one."""
    graph = pyg_sar.tools.load_graph("synthetic:nodes=20000,degree=10,features=1")
    frames = np.random.default_rng(0).standard_normal((4, 20000, 64), dtype=np.float32)
    print("\n| parts | bytes of a snapshot that a worker reads | of all |\n|---|---|---|")
    for parts in (1, 2, 4):
        root = f"{folder}/frames-{parts}"
        pyg_sar.write_partitions(graph, parts, root, series={"x": frames})
        read = max(pyg_sar.launch(_snapshot_bytes, parts, root))
        print(f"| {parts} | {read:,} | {read / frames[0].nbytes:.2f} |")
    root = f"{folder}/frames-1"
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3):  # A worker that has the machine to itself, and two replicas that average.
        for replicas, seconds in times.items():
            apart = pyg_sar.launch(replica_step, replicas, root, steps, replicas=replicas)
            seconds.append(statistics.median(apart))
    one, two = (statistics.median(seconds) for seconds in times.values())
    print(f"\nA step of 2 replicas takes {two / one:.2f} times that of one group.")


def _snapshot_bytes(root: str) -> int:
    return sum(t.nbytes for t in pyg_sar.partition.load_series(root)[0].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        edges_and_forces(folder, args.atoms, args.steps)
        snapshots_and_replicas(folder, 5 * args.steps)


if __name__ == "__main__":
    main()
