"""Messages that index a node tensor themselves are exact, as those that index tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle import CHANNELS, MODES, Job, Partitions, Sweep, make_graph
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data


class Reading(gnn.MessagePassing):
    """Its message reads more than its arguments; subclasses say what."""

    def __init__(self) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.weight = torch.nn.Parameter(torch.rand(CHANNELS))
        self.register_buffer("table", torch.rand(14, CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.rows = x.detach()
        places = torch.arange(x.size(0))
        return self.propagate(edge_index, x=x, place=places, whole=self.rows)

    def message(self, x_j: Tensor, place_j: Tensor) -> Tensor:
        raise NotImplementedError


class Indexed(Reading):
    def message(self, x_j: Tensor, place_j: Tensor) -> Tensor:
        return x_j * self.weight + self.rows[place_j]


class Embedded(Reading):
    def message(self, x_j: Tensor, place_j: Tensor) -> Tensor:
        return x_j * self.weight + F.embedding(place_j, self.rows)


class Gathered(Reading):
    def message(self, x_j: Tensor, place_j: Tensor) -> Tensor:
        return x_j * self.weight + self.rows.gather(0, place_j.view(-1, 1).expand_as(x_j))


class Mapped(Reading):
    """It reads what it made of all nodes."""

    def message(self, x_j: Tensor, place_j: Tensor) -> Tensor:
        return x_j * self.weight + self.rows.sin().index_select(0, place_j)


class Computed(Reading):
    """It computes ids from values."""

    def message(self, x_j: Tensor, whole: Tensor) -> Tensor:
        ids = (x_j.sum(-1).abs() * 10).long() % whole.size(0)
        return x_j * self.weight + whole[ids]


class AtTargets(Reading):
    """It reads at the edges' targets what it has not been given."""

    def message(self, x_j: Tensor, place_i: Tensor) -> Tensor:
        return x_j * self.weight + self.rows[place_i]


class ByPlace(Reading):
    """Ids of the graph's nodes are not numbers of this worker's rows."""

    def message(self, x_j: Tensor, place_i: Tensor, whole: Tensor) -> Tensor:
        return x_j * self.weight + whole[place_i % whole.size(0)]


class ByTarget(Reading):
    """The edges' targets are."""

    def message(self, x_j: Tensor, edge_index_i: Tensor, whole: Tensor) -> Tensor:
        return x_j * self.weight + whole[edge_index_i]


class FromTable(Reading):
    """A buffer is a table, whatever its number of rows."""

    def message(self, x_j: Tensor) -> Tensor:
        ids = (x_j.sum(-1).abs() * 10).long() % self.table.size(0)
        return x_j * self.weight + self.table[ids]


class OwnColumns(Reading):
    """Columns of the messages themselves."""

    def message(self, x_j: Tensor) -> Tensor:
        return (x_j * self.weight)[:, torch.tensor([1, 0, *range(2, CHANNELS)])]


KINDS = (Indexed, Embedded, Gathered, Mapped, Computed, AtTargets, ByPlace)  # of the whole graph
KINDS += ByTarget, FromTable, OwnColumns


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(42)


@pytest.fixture(scope="module")
def roots(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    made = Partitions(tmp_path_factory.mktemp("reads"))
    return lambda world: made(graph, world, torch.arange(42) % world)  # as many nodes each


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("world", [1, 3])
def test_reads_are_exact(world: int, graph: Data, roots: Callable[[int], Path]):
    sweep = Sweep(world)
    for kind in KINDS:
        sweep.add(kind.__name__, Job(kind().double(), roots(world), (), MODES), graph)
    sweep.check()
