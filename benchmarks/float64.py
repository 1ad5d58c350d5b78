"""Shows how far float32 runs of a script part, and that float64 runs don't.

The script trains a GCN with BatchNorm by Adam. A bias before a BatchNorm has the gradient 0; what
rounding leaves of it, Adam scales to the learning rate. So runs that add up in another order part:
with more threads, or on workers. Each is compared with one process and one thread.

    python benchmarks/float64.py [--epochs 200]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.nn import GCNConv

class Graphs(InMemoryDataset):
    def __init__(self):
        super().__init__("graphs")
        self.load(self.processed_paths[0])
    processed_file_names = ["data.pt"]
    def process(self):
        g = torch.Generator().manual_seed(1)
        y = torch.randint(7, (2000,), generator=g)
        order = y.argsort()
        near = torch.randint(8000, (2, 4000), generator=g) // 4
        edges = torch.cat([order[near], torch.randint(2000, (2, 4000), generator=g)], 1)
        x = F.one_hot(y, 7).float() + 2 * torch.randn(2000, 7, generator=g)
        data = Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=y)
        data.train_mask = torch.rand(2000, generator=g) < 0.1
        self.save([data], self.processed_paths[0])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GCNConv(7, 64), GCNConv(64, 64), GCNConv(64, 7)])
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(64) for _ in range(2))
    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms):
            x = F.dropout(norm(conv(x, edge_index)).relu(), 0.5, self.training)
        return self.convs[-1](x, edge_index)

torch.manual_seed(0)
data, model = Graphs()[0], Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(int(sys.argv[1])):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(-1) == data.y
    print(f"{loss.item():.15e} {float(right[~data.train_mask].double().mean()):.15e}")
"""


def run(folder: str, workers: int, threads: int, float64: bool, epochs: int) -> list[list[float]]:
    """Returns loss and accuracy of each epoch."""
    command = [sys.executable, "-m", "pyg_sar", "run", "--workers", str(workers), "--cache", "kept"]
    command += [*(["--float64"] if float64 else []), "script.py", str(epochs)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    text = subprocess.run(
        command, check=True, cwd=folder, env=env, stdout=subprocess.PIPE, text=True
    ).stdout
    return [list(map(float, re.findall(r"\S+e[+-]\d+", line))) for line in text.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    epochs = parser.parse_args().epochs
    print("| dtype | run | losses differ by | accuracies by, points |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(SCRIPT)
        for float64 in (False, True):
            first = run(folder, 1, 1, float64, epochs)
            for workers, threads in ((1, 2), (2, 1)):
                found = run(folder, workers, threads, float64, epochs)
                losses, points = (
                    max(abs(a[k] - b[k]) for a, b in zip(first, found, strict=True)) for k in (0, 1)
                )
                name = f"{threads} threads" if workers == 1 else f"{workers} workers"
                dtype = "float64" if float64 else "float32"
                print(f"| {dtype} | {name} | {losses:.1e} | {100 * points:.2f} |", flush=True)


if __name__ == "__main__":
    main()
