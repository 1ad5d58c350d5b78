"""A layer of your own, with parameters and edge features inside ``message``.

It derives from ``DistMessagePassing``; PyG's ``MessagePassing`` would do, as ``distribute``
converts it. Nothing in it says anything about workers: on an ordinary ``edge_index`` it is a PyG
layer, and on a distributed one it gives the same numbers, which this script shows. Run it:
``python examples/custom_layer.py``
"""

import tempfile

import torch
from torch import Tensor

import pyg_sar
from pyg_sar.tools import load_graph

FEATURES, EDGE_FEATURES, CLASSES, WORKERS = 16, 3, 5, 2


class GatedConv(pyg_sar.DistMessagePassing):
    r"""Sums neighbours, each weighted by a gate that sees both ends and the edge.

    .. math::
        x_i' = W_0 x_i + \sum_{j \in N(i)}
               \sigma(W_g [x_i, x_j, e_{ji}] + b_g) \odot W_1 x_j
    """

    def __init__(self, in_channels: int, out_channels: int, edge_channels: int) -> None:
        super().__init__(aggr="sum")
        self.root = torch.nn.Linear(in_channels, out_channels)
        self.neighbour = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.gate = torch.nn.Linear(2 * in_channels + edge_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.root(x) + self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(torch.cat([x_i, x_j, edge_attr], dim=-1)))
        return gate * self.neighbour(x_j)


class Model(torch.nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GatedConv(FEATURES, 8, EDGE_FEATURES)
        self.conv2 = GatedConv(8, CLASSES, EDGE_FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


def step(model: torch.nn.Module, data) -> dict[str, Tensor]:
    """One forward and backward pass: the output and the gradients of all parameters."""
    out = model(data.x, data.edge_index, data.edge_attr)
    torch.nn.functional.cross_entropy(out, data.y).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"out": out.detach()} | gradients


def make_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def worker(parts: str) -> dict[str, Tensor]:
    """Runs on each worker."""
    found = step(pyg_sar.distribute(make_model()), pyg_sar.load_partition(parts))
    return found | {"out": found["out"].full_tensor()}


def main() -> None:
    """Compares the workers with one process."""
    graph = load_graph(f"synthetic:nodes=600,degree=10,features={FEATURES},classes={CLASSES}")
    generator = torch.Generator().manual_seed(1)
    graph.x = graph.x.double()
    graph.edge_attr = torch.randn(
        graph.num_edges, EDGE_FEATURES, generator=generator, dtype=torch.float64
    )
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.write_partitions(graph, WORKERS, f"{folder}/parts")
        results = pyg_sar.launch(worker, WORKERS, f"{folder}/parts")

    expected = step(make_model(), graph)
    differences = {
        name: (results[0][name] - value).abs().max().item() for name, value in expected.items()
    }
    for name, difference in differences.items():
        print(f"{name:<22} differs by at most {difference:.1e}")
    largest = max(differences.values())
    if largest > 1e-12:
        raise SystemExit(f"{WORKERS} workers and one process differ by {largest:.1e}")
    print(f"{WORKERS} workers and one process: the same")


if __name__ == "__main__":
    main()
