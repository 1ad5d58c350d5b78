"""Attributes whose rows could be nodes or edges, of which a graph has as many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import workers
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv

import pyg_sar
from pyg_sar.partition.metadata import METADATA
from pyg_sar.partition.storage import merge_partitions, write_partitions
from pyg_sar.usage import levels_in

NODES = 8


def ring(**attributes: Any) -> Data:
    """A ring, which has as many edges as nodes; edges don't come in the order of their targets."""
    source = torch.arange(NODES) * 3 % NODES
    edge_index = torch.stack([source, (source + 1) % NODES])
    x = torch.randn(NODES, 4, dtype=torch.float64)
    return Data(x=x, y=torch.arange(NODES), edge_index=edge_index, **attributes)


def weights() -> torch.Tensor:
    return torch.rand(NODES, dtype=torch.float64) + 0.5


def written_levels(root: Path) -> dict[str, str]:
    attributes = json.loads((root / METADATA).read_text())["attributes"]
    return {name: info["level"] for name, info in attributes.items()}


@pytest.mark.parametrize("name", ["weight", "w", "length", "time"])
def test_a_name_that_does_not_tell_is_asked(name: str, tmp_path: Path):
    values: list[Any] = [weights(), weights().numpy(), weights().tolist(), torch.eye(NODES)]
    for value in [*values, torch.eye(NODES).to_sparse()]:
        with pytest.raises(ValueError, match=rf"'{name}'.*as many edges as nodes.*rename.*levels="):
            write_partitions(ring(**{name: value}), 2, tmp_path / "p")
    data = ring(**{name: weights()})
    for level in ("node", "edge", "graph"):
        write_partitions(data, 2, tmp_path / "p", levels={name: level}, overwrite=True)
        assert written_levels(tmp_path / "p")[name] == level
        assert torch.equal(merge_partitions(tmp_path / "p")[name], data[name])


def test_names_that_tell_are_not_asked(tmp_path: Path):
    data = ring(
        edge_w=weights(), edge_attr=weights(), node_w=weights(), good_mask=weights() > 1,
        train_idx=torch.arange(NODES), pos=weights(), batch=torch.zeros(NODES, dtype=torch.long),
    )  # fmt: skip
    write_partitions(data, 2, tmp_path / "p", node_ids=["train_idx"])
    found = written_levels(tmp_path / "p")
    assert found.pop("edge_w") == found.pop("edge_attr") == "edge"
    assert set(found.values()) == {"node"}
    other = Data(
        x=torch.rand(5, 1), edge_index=torch.zeros(2, 3, dtype=torch.long), w=weights()[:3]
    )
    write_partitions(other, 2, tmp_path / "q")
    assert written_levels(tmp_path / "q")["w"] == "edge"


def test_lists_named_after_edges_are_those_of_edges(tmp_path: Path):
    data = ring(edge_names=[f"e{i}" for i in range(NODES)])
    with pytest.raises(ValueError, match="The edge-level attribute 'edge_names' "):
        write_partitions(data, 2, tmp_path / "parts")


def test_weights_of_a_ring_are_those_of_its_edges(tmp_path: Path):
    data = ring(weight=weights())
    write_partitions(data, 2, tmp_path / "p", "random", levels={"weight": "edge"})
    layer = GCNConv(4, 3).double()
    expected = layer(data.x, data.edge_index, data.weight)

    def worker() -> Any:
        part = pyg_sar.load_partition(tmp_path / "p")
        own = pyg_sar.distribute(layer)
        return own(part.x, part.edge_index, part.weight).detach().full_tensor()

    for out in workers(worker, 2):
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_levels_that_make_no_sense(tmp_path: Path):
    for levels, problem in (
        ({"weight": "rows"}, "to be 'node', 'edge' or 'graph'"),
        ({"nothing": "edge"}, "'nothing', which 'data' does not have"),
        ({"short": "edge"}, "has 3 rows instead of 8"),
    ):
        with pytest.raises(ValueError, match=problem):
            write_partitions(
                ring(weight=weights(), short=torch.rand(3)), 2, tmp_path / "p", levels=levels
            )
    with pytest.raises(TypeError, match="'levels' to be a dict"):
        write_partitions(ring(), 2, tmp_path / "p", levels=["weight"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'levels' is for a Data"):
        write_partitions(HeteroData(), 2, tmp_path / "p", levels={"weight": "edge"})


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 3)

    def forward(self, x: Any, edge_index: Any, weight: Any) -> Any:
        return self.conv(x, edge_index, weight)


def test_verify_takes_the_levels_of_the_graph():
    """Of a sample with as many edges as nodes too, and of one of such a graph."""
    with pytest.raises(ValueError, match="as many edges as nodes"):
        pyg_sar.verify(Weighted(), ring(weight=weights()), 2)
    for most in (100, 5):
        report = pyg_sar.verify(
            Weighted(), ring(weight=weights()), 2, max_nodes=most, levels={"weight": "edge"}
        )
        assert report.ok
    line = torch.stack([torch.arange(7), torch.arange(1, 8)])
    loops = torch.cat([line, torch.tensor([[0, 0], [0, 0]])], 1)
    data = Data(x=torch.rand(8, 4), edge_index=loops, weight=torch.rand(9))
    assert pyg_sar.verify(Weighted(), data, 2, max_nodes=7).ok


def test_the_option():
    assert levels_in("weight=edge,d=node") == {"weight": "edge", "d": "node"}
    with pytest.raises(Exception, match="expected NAME=node"):
        levels_in("weight")


def test_a_matrix_of_edges_beside_edges_is_refused(tmp_path: Path):
    data = Data(x=torch.rand(4, 2), edge_index=torch.tensor([[0, 1], [2, 3]]))
    data.adj_t = torch.eye(4).to_sparse_coo()
    with pytest.raises(ValueError, match=r"'adj_t' of shape \[4, 4\] is an adjacency matrix by"):
        pyg_sar.write_partitions(data, 2, tmp_path / "p", "random")
