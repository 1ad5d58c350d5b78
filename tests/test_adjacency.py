"""Graphs whose edges are ``adj_t``: layers take the distributed one as they took that."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import CHANNELS, OUT, TOLERANCE, error, make_graph, node_losses, whole, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import Compose, GCNNorm, ToSparseTensor
from torch_geometric.typing import WITH_TORCH_SPARSE
from torch_geometric.utils import coalesce, remove_self_loops

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import whole_matrix

needs_sparse = pytest.mark.skipif(
    not WITH_TORCH_SPARSE, reason="needs torch-sparse: pip install 'pyg_sar[sparse]'"
)
LAYOUTS = [
    pytest.param("SparseTensor", marks=needs_sparse),
    "torch.sparse_csr",
    "torch.sparse_coo",
]
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage, max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "gin": lambda: gnn.GINConv(torch.nn.Linear(CHANNELS, OUT)),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, add_self_loops=False),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT),
}


def sparse_graph(layout: str) -> Data:
    """No loops, no duplicates: a sparse matrix adds these up. Features are equal in many nodes."""
    data = make_graph(dtype=torch.float32)
    edges = coalesce(remove_self_loops(data.edge_index)[0])
    data = Data(x=data.x.round(), y=data.y, train_mask=data.train_mask, edge_index=edges)
    kind = None if layout == "SparseTensor" else getattr(torch, layout.removeprefix("torch."))
    return ToSparseTensor(layout=kind)(data) if kind else ToSparseTensor()(data)


def run(layer: torch.nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    x = data.x.clone().requires_grad_()
    out = layer(x, data.adj_t)
    node_losses(out).mean().backward()
    return whole(out.detach()), whole(x.grad)


def worker(layers: list[torch.nn.Module], *roots: Path) -> list[list[tuple[Tensor, Tensor]]]:
    """Of the adjacency that was written, and of a plain one that the script makes."""
    data, *others = [pyg_sar.load_partition(root) for root in roots]
    assert "edge_index" not in data
    graphs = [data, *map(ToSparseTensor(layout=torch.sparse_csr), others)]
    layers = [pyg_sar.distribute(copy.deepcopy(layer)) for layer in layers]
    return [[run(layer, graph) for layer in layers] for graph in graphs]


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_on_adjacencies(layout: str, tmp_path: Path):
    """PyG's GATConv leaves torch's sparse matrices to torch-sparse."""
    # PyG writes propagate() of a class for its first object, and another test's may not be fused.
    gnn.GINConv.propagate = getattr(gnn.GINConv, "_orig_propagate", gnn.GINConv.propagate)
    sys.modules.pop(f"{gnn.GINConv.__module__}_GINConv_propagate", None)
    data = sparse_graph(layout)
    torch.manual_seed(0)
    names = [name for name in LAYERS if layout == "SparseTensor" or name != "gat"]
    layers = [LAYERS[name]() for name in names]
    expected = [run(layer, data) for layer in layers]
    roots = [tmp_path / "parts"]
    pyg_sar.write_partitions(data, 3, roots[0], "random")
    if layout == "torch.sparse_csr":
        roots.append(tmp_path / "edges")
        data.edge_index = data.adj_t.to_sparse_coo().indices().flip(0)
        del data.adj_t
        pyg_sar.write_partitions(data, 3, roots[1], "random")
    for graphs in workers(worker, 3, layers, *roots):
        for found in graphs:
            for name, got, right in zip(names, found, expected, strict=True):
                assert all(error(a, b) <= 1e-5 for a, b in zip(got, right, strict=True)), name


def weighted(layout: str, order: str) -> Data:
    """What PyG's transforms make of a graph: an ``adj_t`` with weights."""
    data = sparse_graph("torch.sparse_coo")
    data.edge_index = data.adj_t.indices().flip(0)
    del data.adj_t
    kind = None if layout == "SparseTensor" else getattr(torch, layout.removeprefix("torch."))
    steps = [GCNNorm(), ToSparseTensor(attr="edge_weight", layout=kind)]
    return Compose(steps if order == "norm first" else [steps[1], steps[0]])(data)


def weighted_worker(layer: torch.nn.Module, root: Path) -> list[Tensor]:
    data = pyg_sar.load_partition(root)
    assert "edge_index" not in data and "edge_weight" not in data
    layer = pyg_sar.distribute(copy.deepcopy(layer))
    # PyG's GCNNorm leaves a pair where adj_t is a matrix of torch's.
    adjacency = data.adj_t[0] if isinstance(data.adj_t, tuple) else data.adj_t
    return [layer(data.x, adjacency).detach().full_tensor()]


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["norm first", "norm last"])
def test_an_adjacency_with_weights(order, layout, tmp_path):
    data = weighted(layout, order)
    # PyG's GCNNorm leaves a pair where adj_t is a matrix of torch's.
    adjacency = data.adj_t[0] if isinstance(data.adj_t, tuple) else data.adj_t
    layer = gnn.GCNConv(CHANNELS, OUT, normalize=False)
    expected = layer(data.x, adjacency).detach()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    for found in workers(weighted_worker, 3, layer, tmp_path / "parts"):
        assert all(error(out, expected) <= 1e-5 for out in found)
    merged = pyg_sar.partition.merge_partitions(tmp_path / "parts")
    assert "edge_index" not in merged and "edge_weight" not in merged
    assert type(merged.adj_t) is type(adjacency)
    assert torch.equal(merged.adj_t.to_dense(), adjacency.to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adjacency_comes_back(layout: str, tmp_path: Path):
    data = sparse_graph(layout)
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    merged = pyg_sar.partition.merge_partitions(tmp_path / "parts")
    assert "edge_index" not in merged and type(merged.adj_t) is type(data.adj_t)
    assert torch.equal(merged.adj_t.to_dense(), data.adj_t.to_dense())
    assert error(merged.x, data.x) <= TOLERANCE


def test_types_of_edges_as_matrices_are_refused_by_name(tmp_path: Path):
    data = HeteroData()
    data["a"].x, data["b"].x = torch.rand(4, 2), torch.rand(3, 2)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 3], [0, 2, 1]])
    with pytest.raises(ValueError, match="'a', 'to', 'b'.*'adj_t'.*before ToSparseTensor"):
        pyg_sar.write_partitions(ToSparseTensor()(data), 2, tmp_path / "parts")


@needs_sparse
def test_a_sparse_tensor_has_a_global_view(tmp_path: Path):
    data = sparse_graph("SparseTensor")
    pyg_sar.write_partitions(data, 1, tmp_path / "parts")
    found = pyg_sar.load_partition(tmp_path / "parts").adj_t
    assert type(found) is type(data.adj_t)
    assert torch.equal(whole_matrix(found).to_dense(), data.adj_t.to_dense())


@pytest.mark.parametrize("written", ["edges", "weight", "plain"])
def test_a_matrix_of_what_was_written_since_is_refused(written: str, tmp_path: Path):
    """In torch it shares memory with what it was made of."""
    data = make_graph()
    pyg_sar.write_partitions(data, 2, tmp_path, "random")

    def work() -> None:
        mine, n = pyg_sar.load_partition(tmp_path), data.num_nodes
        weight = torch.ones(data.num_edges) if written == "plain" else mine.edge_weight
        weight = weight.to(mine.x.dtype)
        matrix = torch.sparse_coo_tensor(mine.edge_index, weight, (n, n))
        turned, twice = matrix.t(), 2 * matrix
        matrix @ mine.x
        (mine.edge_index if written == "edges" else weight)[..., :3] = 0
        for one in (matrix, turned):
            with pytest.raises(DistributedIndexError, match="that were written since: make it"):
                one @ mine.x
        assert written == "edges" or (twice @ mine.x).shape == mine.x.shape
        torch.sparse_coo_tensor(mine.edge_index, weight, (n, n)) @ mine.x

    workers(work, 2)
