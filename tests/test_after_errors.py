"""A program that catches the error of a layer goes on with the right rows."""

from __future__ import annotations

import pytest
import torch
from oracle import Partitions, error, make_graph, processes, whole
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar.errors import DistributedIndexError


class Drawing(MessagePassing):
    """A layer that draws in a way that is refused, in the middle of a pass, when told to."""

    draws = False

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        out = (x_i * x_j).tanh()
        return out * torch.rand(out.size(0), 1, dtype=out.dtype) if self.draws else out


def passed(layer: torch.nn.Module, data: Data, step: int) -> list[torch.Tensor | None]:
    x = (data.x * (step + 1)).detach().requires_grad_()
    out = layer(x, data.edge_index)
    out.square().sum().backward()
    return [whole(out.detach()), whole(x.grad)]


def after_errors(root: str, prefetch: int) -> list[torch.Tensor | None]:
    data, found = pyg_sar.load_partition(root), []
    policy = pyg_sar.SARPolicy(prefetch=prefetch)
    for step in range(3):
        layer = pyg_sar.distribute(Drawing(), policy)
        layer.draws = True
        for _ in range(step + 1):
            with pytest.raises(DistributedIndexError, match="rand"):
                layer(data.x, data.edge_index)
        other = pyg_sar.distribute(Drawing(), policy)
        found += passed(other, data, step) + passed(other, data, step)
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_rows_of_a_pass_that_failed_are_not_the_next_ones(
    world: int, prefetch: int, partitions: Partitions
) -> None:
    data = make_graph()
    expected = [t for step in range(3) for t in passed(Drawing(), data, step) * 2]
    for found in processes(after_errors, world, partitions(data, world, "metis"), prefetch):
        assert all(error(a, b) < 1e-10 for a, b in zip(found, expected, strict=True))
