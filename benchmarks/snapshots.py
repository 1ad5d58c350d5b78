"""Times scripts on snapshots: each has its edges as a new tensor, of equal or of other content.

A cell of a recurrent network with six ``ChebConv`` layers (GConvGRU), as the examples of PyTorch
Geometric Temporal have it, runs over snapshots in one process and by ``pyg-sar run``. In each run
epochs alternate: with one tensor of edges for all snapshots ("fixed"), with a copy of it for each
("equal"), and with edges that were not seen before ("other"). Printed are the medians of an
epoch's seconds, of their ratios to the epoch before on fixed edges, and of what a snapshot takes
more than there: by the clock, and by the seconds of rank 0's processor.

    python benchmarks/snapshots.py [--workers 2] [--nodes 1000] [--edges 10000] [--snapshots 20]
        [--rounds 7]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

SCRIPT = """
import sys, time
import torch
from torch_geometric.nn import ChebConv

nodes, edges, snapshots, rounds = (int(text) for text in sys.argv[1:])

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
made = torch.randint(nodes, (2, edges))
signal = [(torch.randn(nodes, 8), torch.rand(edges), torch.randn(nodes)) for _ in range(snapshots)]
lists = {
    "fixed": lambda: made,
    "equal": lambda: torch.tensor(made.numpy()),
    "other": lambda: torch.randint(nodes, (2, edges)),
}
model = Cell(8, 32)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for name in [*lists] * rounds:
    given = [lists[name]() for _ in signal]
    begin, used = time.perf_counter(), time.process_time()
    cost, h = 0, None
    for edge_index, (x, weight, y) in zip(given, signal):
        out, h = model(x, edge_index, weight, h)
        cost = cost + (out.squeeze() - y).square().mean()
    loss = cost / len(signal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    took = time.perf_counter() - begin, time.process_time() - used
    print(f"{name} {loss.item():.6f} {took[0]:.5f} {took[1]:.5f}")
"""


def epochs(script: Path, start: list[str], arguments: list[str]) -> list[tuple[str, list[float]]]:
    """Returns the kind of edges, and loss and seconds, of a run's epochs but the first ones."""
    command = [sys.executable, *start, str(script), *arguments]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [line.split() for line in text.splitlines()]
    return [(name, [float(number) for number in numbers]) for name, *numbers in rows][3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"workers": 2, "nodes": 1000, "edges": 10000, "snapshots": 20, "rounds": 7}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = [str(n) for n in (given.nodes, given.edges, given.snapshots, given.rounds)]
    print("| run | edges | s per epoch | processor | ratio to fixed | processor | "
          "ms more per snapshot | processor |")  # fmt: skip
    print("|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "snapshots.py"
        script.write_text(SCRIPT)
        run = ["-m", "pyg_sar", "run", "--workers", str(given.workers), "--cache", folder]
        alone, found = (epochs(script, start, sizes) for start in ([], run))
    for title, rows in (("one process", alone), (f"{given.workers} workers", found)):
        fixed = [numbers for name, numbers in rows if name == "fixed"]
        for name in ("fixed", "equal", "other"):
            pairs = list(zip([n for kind, n in rows if kind == name], fixed, strict=True))
            cells = [f"{median(n[k] for n, _ in pairs):.3f}" for k in (1, 2)]
            cells += [f"{median(n[k] / f[k] for n, f in pairs):.2f}" for k in (1, 2)]
            more = [median(n[k] - f[k] for n, f in pairs) / given.snapshots for k in (1, 2)]
            cells += [f"{seconds * 1e3:.1f}" for seconds in more]
            print(f"| {title} | {name} | {' | '.join(cells)} |")
    apart = max(abs(a[0] - b[0]) for (_, a), (_, b) in zip(alone, found, strict=True))
    print(f"Losses differ by {apart:.1e}.")


if __name__ == "__main__":
    main()
