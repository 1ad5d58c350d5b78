"""Training in less memory than it needs: one process trains 16 parts of a graph in turn.

Tensors of parts that wait are moved to a file, so that the process grows by no more than
``MEMORY`` while it trains. Run it: ``python examples/larger_than_memory.py``
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import pyg_sar
from pyg_sar.tools import load_graph

PARTS, MEMORY = 16, "80MiB"


def resident(field: str) -> float:
    """MiB of this process: now (``VmRSS``), or at most so far (``VmHWM``)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def train(root: str) -> tuple[float, float, float]:
    """Runs for each part, as on a worker of its own. Returns the accuracy; MiB before and most."""
    before = resident("VmRSS")
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(GraphSAGE(data.num_features, 256, 3, 8, norm="batch_norm"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mask = data.train_mask
    for epoch in range(1, 7):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[mask], data.y[mask])
        loss.backward()
        optimizer.step()
        if epoch % 3 == 0 and pyg_sar.comm.current().rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    right = (out.argmax(1) == data.y)[data.test_mask].float().mean()
    return float(right), before, resident("VmHWM")


def prepare(folder: str) -> str:
    graph = load_graph("synthetic:nodes=12000,degree=10,features=64,classes=8")
    pyg_sar.write_partitions(graph, PARTS, f"{folder}/parts")
    return f"{folder}/parts"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        how = {"parts": PARTS, "memory": MEMORY, "store": folder}
        found = pyg_sar.launch(train, 1, prepare(folder), **how)
        print(f"test accuracy {found[0][0]:.4f}")
        print(
            f"at most {found[-1][2] - found[0][1]:.0f} MiB beyond the start; the limit was {MEMORY}"
        )
