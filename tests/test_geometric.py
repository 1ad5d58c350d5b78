"""Parts by positions: balanced, compact, the same each time, and refused where there are none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.partition import assign_nodes
from pyg_sar.partition.geometric import geometric_assignment


def cloud(count: int) -> Data:
    """Points, and edges from the six nearest others of each."""
    pos = torch.rand(count, 3, generator=torch.Generator().manual_seed(1)) ** 2
    near = torch.cdist(pos, pos).topk(7, largest=False).indices[:, 1:].reshape(-1)
    edges = torch.stack([near, torch.arange(count).repeat_interleave(6)])
    return Data(pos=pos, edge_index=edges)


def halo(data: Data, part: torch.Tensor) -> int:
    source, target = data.edge_index
    remote = part[source] != part[target]
    return torch.stack([source, part[target]])[:, remote].unique(dim=1).size(1)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 7, 8, 16])
def test_parts_are_balanced_and_compact(num_parts: int):
    data = cloud(2000)
    given = data.edge_index, 2000, num_parts, "geometric"
    part = assign_nodes(*given, pos=data.pos)
    assert torch.equal(part, assign_nodes(*given, seed=7, pos=data.pos))
    weight = 1 + torch.bincount(data.edge_index[1], minlength=2000)
    held = torch.bincount(part, weight.double(), num_parts)
    # Each of at most log2(P) cuts is off by half a node at most.
    assert (held - weight.sum() / num_parts).abs().max() <= 5 * weight.max()
    if num_parts > 1:
        drawn = assign_nodes(data.edge_index, 2000, num_parts, "random")
        assert halo(data, part) < 0.5 * halo(data, drawn)


def test_edges_are_balanced_where_degrees_differ():
    pos = torch.linspace(0, 1, 1000).view(-1, 1)
    weight = torch.where(pos.view(-1) < 0.1, 100, 1)
    held = torch.bincount(geometric_assignment(pos, weight, 4), weight.double())
    assert held.max() <= 1.05 * held.mean()


@pytest.mark.parametrize("pos", [torch.zeros(11, 2), torch.zeros(11), torch.full((11, 1), 1e-320)])
def test_equal_positions_are_cut_by_ids(pos: torch.Tensor):
    part = geometric_assignment(pos.double(), torch.ones(11), 3)
    assert part.tolist() == sorted(part.tolist())
    assert torch.bincount(part).max() == 4


def test_few_nodes_and_no_edges():
    assert geometric_assignment(torch.rand(2, 2), torch.ones(2), 5).unique().numel() == 2
    assert geometric_assignment(torch.rand(0, 3), torch.ones(0), 3).numel() == 0
    none = torch.empty(2, 0, dtype=torch.long)
    part = assign_nodes(none, 4, 2, "geometric", pos=torch.tensor([[3.0], [0.0], [2.0], [1.0]]))
    assert part.tolist() == [1, 0, 1, 0]


def test_files_by_positions(tmp_path: Any):
    data = cloud(60)
    statistics = pyg_sar.write_partitions(data, 3, tmp_path / "a", "geometric")
    assert max(statistics.edges) <= 1.1 * sum(statistics.edges) / 3
    hetero = HeteroData()
    hetero["a"].pos, hetero["b"].pos = torch.rand(9, 2), torch.rand(5, 2)
    hetero["a", "to", "b"].edge_index = torch.tensor([[0, 8], [4, 0]])
    assert sum(pyg_sar.write_partitions(hetero, 2, tmp_path / "b", "geometric").nodes) == 14
    del hetero["b"].pos
    hetero["b"].num_nodes = 5
    with pytest.raises(ValueError, match=re.escape("'pos' of all node types, in one space")):
        pyg_sar.write_partitions(hetero, 2, tmp_path / "c", "geometric")
    data.pos[3, 1] = torch.nan
    with pytest.raises(ValueError, match="finite positions .* at node 3, 1 such"):
        pyg_sar.write_partitions(data, 2, tmp_path / "c", "geometric")
    del data.pos
    data.num_nodes = 60
    with pytest.raises(ValueError, match=re.escape("needs positions 'pos' of all 60 nodes (got n")):
        pyg_sar.write_partitions(data, 2, tmp_path / "c", "geometric")
