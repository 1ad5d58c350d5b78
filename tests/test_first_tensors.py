"""Layers whose first tensor is none of the nodes', and layers that make a dense matrix of edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import parts, workers
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_dense_adj

import pyg_sar
from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.nn.made_edges import made_edges
from pyg_sar.tensors import whole

NODES, WIDTH, DOUBLE = 20, 4, torch.float64


class EvolvedGCN(MessagePassing):
    """The layer of EvolveGCN: its weight is given with each call."""

    def forward(self, weight: Tensor, nodes: Tensor, edge_index: Any, edge_weight: Any) -> Tensor:
        edge_index, norm = gcn_norm(edge_index, edge_weight, nodes.size(0), dtype=nodes.dtype)
        out: Tensor = self.propagate(edge_index, x=nodes @ weight, norm=norm)
        return out

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Evolving(torch.nn.Module):
    """EvolveGCN-O, and with ``of_nodes`` -H: a recurrent cell changes the weight."""

    def __init__(self, of_nodes: bool) -> None:
        super().__init__()
        self.of_nodes = of_nodes
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.cell, self.conv = torch.nn.GRU(WIDTH, WIDTH), EvolvedGCN()
        self.score = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any) -> Tensor:
        weight = self.weight
        for _ in range(2):
            given = weight
            if self.of_nodes:  # TopKPooling of all nodes' scores
                score = torch.tanh(x @ self.score / self.score.norm())
                top = score.topk(WIDTH).indices
                given = x[top] * score[top].view(-1, 1)
            weight = self.cell(given[None], weight[None])[1].squeeze(0)
        out: Tensor = self.conv(weight, x, edge_index, edge_weight)
        return out


class DiffusionConv(MessagePassing):
    """The layer of DCRNN, as PyTorch Geometric Temporal has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 2, WIDTH, WIDTH))

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any) -> Tensor:
        dense = to_dense_adj(edge_index, edge_attr=edge_weight)
        dense = dense.reshape(dense.size(1), dense.size(2))
        ones = torch.ones(dense.size(0), 1, dtype=dense.dtype)
        leaving, coming = (dense @ ones).flatten(), (ones.t() @ dense).flatten()
        row = edge_index[0]
        turned = torch.vstack(dense.transpose(0, 1).nonzero(as_tuple=True))
        out = x @ self.weight[0, 0] + x @ self.weight[1, 0]
        there = self.propagate(edge_index, x=x, norm=(1 / leaving)[row], size=None)
        back = self.propagate(turned, x=x, norm=(1 / coming)[row], size=None)
        return out + there @ self.weight[0, 1] + back @ self.weight[1, 1]


def graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    nodes = torch.arange(NODES)
    ends = torch.cat([(nodes + step) % NODES for step in (1, 7, 3)])
    return Data(
        x=torch.randn(NODES, WIDTH, dtype=DOUBLE, generator=draw),
        edge_index=torch.stack([nodes.repeat(3), ends]),
        edge_weight=torch.rand(3 * NODES, dtype=DOUBLE, generator=draw) + 0.5,
    )


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(1)
    kinds = {"H": Evolving(True), "O": Evolving(False), "dense": DiffusionConv()}
    return {name: model.double() for name, model in kinds.items()}


def results(model: torch.nn.Module, *given: Any) -> list[Tensor]:
    out = model(*given)
    (out**2).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), *gradients]


def arguments(data: Any, made: str) -> tuple[Any, Any, Any]:
    if made == "plain":
        return graph().x, graph().edge_index, graph().edge_weight
    if made == "computed":
        return data.x, data.edge_index[:, :50], data.edge_weight[:50]
    return data.x, data.edge_index, data.edge_weight


class Mixed(EvolvedGCN):
    """Two plain tensors that both have rows for all ids of the edges."""


def ambiguous(root: str) -> str:
    made_edges(current()).all_plain = True
    pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(Mixed())
    with pytest.raises(DistributedIndexError) as error:
        layer(torch.rand(25, WIDTH), graph().x, graph().edge_index, graph().edge_weight)
    return str(error.value)


def test_rows_of_which_it_is_not_known_what_they_are(tmp_path: Path) -> None:
    pyg_sar.write_partitions(graph(), 2, tmp_path / "parts")
    for text in workers(ambiguous, 2, str(tmp_path / "parts")):
        assert "Mixed got tensors of [20, 25] rows" in text


def found_by_workers(root: str) -> dict[Any, list[Tensor]]:
    made_edges(current()).all_plain = True
    data = pyg_sar.load_partition(root)
    found = {}
    for made in ("given", "computed", "plain"):
        for name, model in models().items():
            if (name, made) != ("dense", "plain"):
                model = pyg_sar.distribute(model)
                values = results(model, *arguments(data, made))
                found[name, made] = [whole(v, "a test").as_subclass(Tensor) for v in values]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_layers_equal_those_of_one_process(world: int, tmp_path: Path) -> None:
    pyg_sar.write_partitions(graph(), world, tmp_path / "parts")
    start = parts if world == 2 else workers
    for found in start(found_by_workers, world, str(tmp_path / "parts")):
        assert len(found) == 8
        for (name, made), values in found.items():
            expected = results(models()[name], *arguments(graph(), made))
            torch.testing.assert_close(values, expected, msg=f"{name}, {made}")
