"""Layers as published models have them: what they read of edges, and rows of other nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, EDGE_DIM, parts, whole, workers
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

import pyg_sar

HYPEREDGES = 7


class Gated(MessagePassing):
    """GatedGCN of GraphGPS: ``update`` takes what ``message`` has set."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * CHANNELS + EDGE_DIM, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        out, edges = self.propagate(data.edge_index, x=x, edge_attr=data.edge_attr)
        return out + self.norm(edges).square().mean(0)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        self.kept = self.lin(torch.cat([x_i, x_j, edge_attr], -1))
        return x_j * self.kept.sigmoid()

    def update(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return out, self.kept


class Helped(Gated):
    """A method that ``update`` calls does."""

    def update(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return out, self.edges()

    def edges(self) -> Tensor:
        return self.kept.tanh()


class Asked(Gated):
    """``forward`` takes it: mode 3 gives it."""

    mode = 3

    def forward(self, x: Tensor, data: Data) -> Tensor:
        out = self.propagate(data.edge_index, x=x, edge_attr=data.edge_attr)
        return out + self.norm(self.kept).square().mean(0)

    def update(self, out: Tensor) -> Tensor:
        return out


class Short(MessagePassing):
    """HalfNLHconv of AllSet: nodes at the end without edges get no row, which is added here."""

    def forward(self, x: Tensor, data: Data) -> Tensor:
        out = self.propagate(data.edge_index, x=x)
        return x + torch.cat([out, x.new_zeros(x.size(0) - out.size(0), x.size(1))])

    def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
        return scatter(inputs, index, 0, reduce="mean")


class Fixed(MessagePassing):
    """``aggregate`` knows the number of nodes."""

    def forward(self, x: Tensor, data: Data) -> Tensor:
        return self.propagate(data.edge_index, x=x)

    def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
        return inputs.new_zeros(40, inputs.size(1)).index_add(0, index, inputs)


class OwnPropagate(MessagePassing):
    """EGNN of lucidrains: ``propagate`` is the layer's own, and gives a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, data: Data) -> Tensor:
        out, most = self.propagate(data.edge_index, x=x)
        return out + most.mean(0)

    def message(self, x_j: Tensor) -> Tensor:
        return self.lin(x_j)

    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
        size = self._check_input(edge_index, size)
        collected = self._collect(self._user_args, edge_index, size, kwargs)
        messages = self.message(**self.inspector.collect_param_data("message", collected))
        given = self.inspector.collect_param_data("aggregate", collected)
        return self.aggregate(messages, **given), messages.amax(1, keepdim=True)


class Hyper(MessagePassing):
    """HCHA: to hyperedges, of which ``size`` tells the number, and back."""

    def __init__(self, number: int) -> None:
        super().__init__(node_dim=0)
        self.number = number

    def forward(self, x: Tensor, data: Data) -> Tensor:
        sizes = x.size(0), self.number
        index = torch.stack([torch.arange(90) % sizes[0], torch.arange(90) * 3 % sizes[1]])
        share = 1 / scatter(x.new_ones(90), index[1], 0, sizes[1]).clamp(min=1)
        self.flow = "source_to_target"
        out = self.propagate(index, x=x, norm=share, size=sizes)
        self.flow = "target_to_source"
        return self.propagate(index, x=out.sin(), norm=x[:, 0], size=sizes)

    def message(self, x_j: Tensor, norm_i: Tensor) -> Tensor:
        return norm_i.view(-1, 1) * x_j


class Given(Hyper):
    """The same, where ``forward`` gets edges to more hyperedges than there are nodes."""

    def forward(self, x: Tensor, index: Any) -> Tensor:
        if not isinstance(index, Tensor):
            index = torch.stack([torch.arange(90) % x.size(0), torch.arange(90)])
            return self(x, index)
        out = self.propagate(index, x=x, norm=None, size=(x.size(0), 90))
        return self.propagate(index.flip(0), x=out.sin(), norm=None, size=(90, x.size(0)))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Heads(MessagePassing):
    """ChebConvAttention of ASTGCN: weights ``[B, E]``, and plain rows ``[B, N, F]``."""

    def __init__(self) -> None:
        super().__init__(node_dim=-2)
        self.lin, self.rows = nn.Linear(EDGE_DIM, 3), nn.Parameter(torch.randn(3, 40, CHANNELS))

    def forward(self, x: Tensor, data: Data) -> Tensor:
        weight = self.lin(data.edge_attr).t()
        out = self.propagate(data.edge_index, x=x.expand(3, -1, -1), weight=weight)
        again = self.propagate(data.edge_index, x=self.rows, weight=data.edge_attr[:, 0])
        return (out + again).mean(0)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-1) * x_j


class Buffered(nn.Module):
    """PPRPowerIteration: the adjacency is a sparse buffer."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        edges = torch.stack([torch.arange(40), torch.arange(40) * 3 % 40])
        matrix = torch.sparse_coo_tensor(edges, torch.rand(40), (40, 40)).coalesce()
        self.register_buffer("matrix", matrix.to_sparse(layout=layout))

    def forward(self, x: Tensor, data: Data) -> Tensor:
        return x + self.matrix @ x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (Gated, Helped, Asked, Short, Fixed, OwnPropagate, Heads)},
    **{f"Hyper {n}": lambda n=n: Hyper(n) for n in (HYPEREDGES, 40, 80)},
    "Given": lambda: Given(90),
    "Buffered": lambda: Buffered(torch.sparse_coo),
    "Buffered, rows": lambda: Buffered(torch.sparse_csr),
}


def trained(root: Path | None, names: list[str], data: Data | None = None) -> list[Any]:
    """Outputs and gradients of layers between two linear ones, in two steps."""
    found: list[Any] = []
    data = data or pyg_sar.load_partition(root)
    for name in names:
        torch.manual_seed(0)
        model: Any = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS), LAYERS[name]()]).double()
        policy = pyg_sar.SARPolicy(mode=getattr(model[1], "mode", 1))
        model = model if root is None else pyg_sar.distribute(model, policy)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            out = torch.dropout(model[1](model[0](data.x).tanh(), data), 0.3, True)
            out[data.train_mask].sin().square().sum().backward()
            found += [(name, whole(out.detach())), *gradients(name, model)]
            optimizer.step()
    return found


def gradients(name: str, model: nn.Module) -> list[tuple[str, Tensor]]:
    named = model.named_parameters()
    return [(f"{name}, {n}", whole(p.grad).clone()) for n, p in named if p.grad is not None]


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning", "ignore:Sparse CSR")
@pytest.mark.parametrize(("start", "world"), [(workers, 3), (parts, 3)])
@pytest.mark.usefixtures("double")
def test_published_layers(start: Any, world: int, graph: Data, root: Path):
    names = list(LAYERS)
    expected = trained(None, names, graph)
    for found in start(trained, world, root, names):
        for (name, right), (_, value) in zip(expected, found, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-9, msg=name)
