"""Times scripts on snapshots: each has its edges as a new tensor, of equal or of other content.

A cell of a recurrent network with six ``ChebConv`` layers (GConvGRU), as the examples of PyTorch
Geometric Temporal have it, runs over snapshots in one process and by ``pyg-sar run``. Every epoch
prints its seconds; the last one is reported, and the time for each layer call on edges that were
not seen before.

    python benchmarks/snapshots.py [--workers 2] [--nodes 1000] [--edges 10000] [--snapshots 20]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys, time
import torch
from torch_geometric.nn import ChebConv

nodes, edges, snapshots, new = (int(text) for text in sys.argv[1:])

class Cell(torch.nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.hidden = hidden
        self.of_x = torch.nn.ModuleList(ChebConv(width, hidden, K=2) for _ in range(3))
        self.of_h = torch.nn.ModuleList(ChebConv(hidden, hidden, K=2) for _ in range(3))
        self.linear = torch.nn.Linear(hidden, 1)
    def forward(self, x, edge_index, weight, h):
        h = torch.zeros(x.size(0), self.hidden) if h is None else h
        z, r = (
            torch.sigmoid(self.of_x[k](x, edge_index, weight) + self.of_h[k](h, edge_index, weight))
            for k in range(2)
        )
        new = self.of_x[2](x, edge_index, weight) + self.of_h[2](h * r, edge_index, weight)
        h = z * h + (1 - z) * torch.tanh(new)
        return self.linear(torch.relu(h)), h

torch.manual_seed(1)
lists = [torch.randint(nodes, (2, edges)) for _ in range(snapshots if new else 1)]
signal = [
    (torch.randn(nodes, 8), lists[k % len(lists)].numpy(), torch.rand(edges), torch.randn(nodes))
    for k in range(snapshots)
]
model = Cell(8, 32)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    begin = time.perf_counter()
    cost, h = 0, None
    for x, edge_index, weight, y in signal:
        out, h = model(x, torch.tensor(edge_index), weight, h)
        cost = cost + (out.squeeze() - y).square().mean()
    loss = cost / len(signal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f} {time.perf_counter() - begin:.3f}")
"""


def epochs(script: Path, start: list[str], arguments: list[str]) -> list[tuple[float, float]]:
    """Returns the losses and seconds of a run's epochs."""
    command = [sys.executable, *start, str(script), *arguments]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [(float(loss), float(seconds)) for loss, seconds in map(str.split, text.splitlines())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("workers", 2), ("nodes", 1000), ("edges", 10000), ("snapshots", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = [str(n) for n in (given.nodes, given.edges, given.snapshots)]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "snapshots.py"
        script.write_text(SCRIPT)
        run = ["-m", "pyg_sar", "run", "--workers", str(given.workers), "--cache", folder]
        for new in ("0", "1"):
            alone, found = (epochs(script, start, [*sizes, new]) for start in ([], run))
            apart = max(abs(a - b) for (a, _), (b, _) in zip(alone, found, strict=True))
            print(f"{'other' if int(new) else 'equal'} edges in each snapshot, seconds per epoch:")
            for name, rows in (("one process", alone), (f"{given.workers} workers", found)):
                print(f"  {name:12}", "  ".join(f"{seconds:8.3f}" for _, seconds in rows))
            more = (found[0][1] - found[-1][1]) / given.snapshots
            print(f"  losses differ by {apart:.1e}; the first epoch took {more * 1e3:.1f} ms more")
            print("  for each snapshot than the last")


if __name__ == "__main__":
    main()
