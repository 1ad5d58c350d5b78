"""What changing graphs cost: edges anew in each step, forces, snapshots, replicas.

    python benchmarks/changing.py [--atoms 100000] [--steps 3]

Atoms lie in a periodic box, with about 40 neighbours each. Prints four kinds of tables.
"""

import argparse
import concurrent.futures
import math
import multiprocessing
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


def replica_step(root: str, steps: int, beside: tuple[str, int] | None = None) -> list[float]:
    """Seconds of each training step.

    With ``beside``, a file and 0 or 1, each step begins with that of the other group that trains.
    """
    data = pyg_sar.load_partition(root)
    series = pyg_sar.partition.load_series(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(GraphSAGE(64, 64, 2, 64))
    times = []
    for k in range(steps + 1):
        if beside is not None:
            begun = np.memmap(beside[0], np.int64, "r+")
            begun[beside[1]] += 1
            while begun.min() < begun[beside[1]]:
                time.sleep(0)
        start = time.perf_counter()
        x = pyg_sar.from_local(series[k % len(series)]["x"], data)
        model(x, data.edge_index).square().mean().backward()
        times.append(time.perf_counter() - start)
    return times[1:]


def one_group(root: str, steps: int, beside: tuple[str, int] | None = None) -> list[float]:
    """Seconds of each step of one worker that averages nothing."""
    return pyg_sar.launch(replica_step, 1, root, steps, beside)[0]


def snapshots(folder: str) -> None:
    """Bytes that a worker reads of a snapshot."""
    print("\n| parts | bytes of a snapshot that a worker reads | of all |\n|---|---|---|")
    for parts in (1, 2, 4):
        root, whole = f"{folder}/frames-{parts}", 20_000 * 64 * 4
        write_frames(root, 20_000, parts)
        read = max(pyg_sar.launch(_snapshot_bytes, parts, root))
        print(f"| {parts} | {read:,} | {read / whole:.2f} |", flush=True)


def write_frames(root: str, nodes: int, parts: int) -> None:
    """Partitions a graph of so many nodes, with four snapshots of 64 features."""
    graph = pyg_sar.tools.load_graph(f"synthetic:nodes={nodes},degree=10,features=1")
    frames = np.random.default_rng(0).standard_normal((4, nodes, 64), dtype=np.float32)
    pyg_sar.write_partitions(graph, parts, root, series={"x": frames})


def replicas(folder: str, nodes: int, steps: int) -> None:
    """A step of two replicas; of two groups that train apart, step beside step; and of one."""
    root = f"{folder}/replicas-{nodes}"
    write_frames(root, nodes, 1)
    times: dict[str, list[float]] = {"one alone": [], "two apart": [], "two replicas": []}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, spawn) as pool:
        for _ in range(5):  # A step takes as long as the slower of two that begin together.
            with tempfile.NamedTemporaryFile() as begun:
                begun.write(bytes(16))
                begun.flush()
                groups = [pool.submit(one_group, root, steps, (begun.name, k)) for k in range(2)]
                times["two apart"] += map(max, *(group.result() for group in groups))
            both = pyg_sar.launch(replica_step, 2, root, steps, replicas=2)
            times["two replicas"] += map(max, *both)
            times["one alone"] += one_group(root, steps)
    base = statistics.median(times["two apart"])
    print(f"\n| groups, of {nodes:,} nodes each | step ms | to two apart |\n|---|---|---|")
    for name, seconds in times.items():
        step = statistics.median(seconds)
        print(f"| {name} | {1000 * step:.1f} | {step / base:.2f} |", flush=True)


def _snapshot_bytes(root: str) -> int:
    return sum(t.nbytes for t in pyg_sar.partition.load_series(root)[0].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        edges_and_forces(folder, args.atoms, args.steps)
        snapshots(folder)
        for nodes, steps in ((20_000, 20 * args.steps), (100_000, 7 * args.steps)):
            replicas(folder, nodes, steps)


if __name__ == "__main__":
    main()
