"""Partitions of heterogeneous graphs: what is written comes back, per node type and relation."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from hetero_graphs import EDGES, SIZES, make_hetero, random_parts
from oracle import workers
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.errors import PartitionError
from pyg_sar.partition.assignment import assign_node_types
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.partition.storage import merge_partitions, write_partitions
from pyg_sar.space.index_space import plain
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.run import ModelConfig, RunConfig, train_worker


def rich() -> HeteroData:
    """Attributes of every level and layout in every kind of store."""
    data = make_hetero()
    del data["venue"].x
    data["venue"].num_nodes = SIZES["venue"]
    data["venue"].name = ["a", "bé", ""]
    data["paper"].bag = torch.randn(SIZES["paper"], 7).to_sparse_csr()
    data["paper"].year = torch.arange(SIZES["paper"])
    data["paper"].note = "of papers"
    data["paper"].scale = torch.tensor(2.5)
    data["author", "writes", "paper"].time = torch.arange(53)
    data["author", "writes", "paper"].unit = "days"
    data["paper", "cites", "paper"].kind = torch.zeros(63, dtype=torch.bool)
    data.title = "whole"
    data.mean = torch.randn(3)
    data.metapath_dict = {("paper", "metapath_0", "paper"): [("paper", "author"), (1, None)]}
    data["author", "paper:odd / name", "author"].edge_index = torch.tensor([[0, 1], [1, 0]])
    return data


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        if a.layout != torch.strided:
            return a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and bool((a == b).all())
    return type(a) is type(b) and a == b


def assert_same(found: HeteroData, data: HeteroData) -> None:
    assert found.node_types == data.node_types and found.edge_types == data.edge_types
    for store in data.stores:
        other = found._global_store if store._key is None else found[store._key]
        assert set(store.keys()) - {"num_nodes"} == set(other.keys()) - {"num_nodes"}
        for name, value in store.items():
            assert same(value, other[name]), (store._key, name)


@pytest.mark.parametrize(
    ("method", "parts"),
    [("random", 1), ("balanced", 3), ("metis", 5), ("contiguous", 5), ("vectors", 3)],
)
def test_parts_give_the_graph_back(method, parts, tmp_path):
    data = rich()
    chosen = random_parts(data, parts) if method == "vectors" else method
    statistics = write_partitions(data, parts, tmp_path / "p", chosen)
    assert_same(merge_partitions(tmp_path / "p"), data)
    assert statistics.nodes == [info.num_nodes for info in read_metadata(tmp_path / "p").parts]
    again = read_metadata(tmp_path / "p").statistics
    assert again == statistics
    for row in statistics.relations:
        assert sum(row.edges) == data[tuple(row.edge_type)].num_edges
    text = str(statistics)
    assert all(name in text for name in (*SIZES, "cites", "paper:odd / name"))


def test_statistics_count_what_is_cut(tmp_path):
    data = make_hetero()
    parts = random_parts(data, 3)
    found = write_partitions(data, 3, tmp_path / "p", parts)
    for row in found.relations:
        source, _, target = row.edge_type
        edges = data[tuple(row.edge_type)].edge_index
        owner, home = parts[source][edges[0]], parts[target][edges[1]]
        assert row.edge_cut == int((owner != home).sum())
        assert row.edges == torch.bincount(home, minlength=3).tolist()
        assert row.halo == [edges[0][(home == p) & (owner != p)].unique().numel() for p in range(3)]
    for kind in found.types:
        mask = data[kind.name].train_mask
        assert kind.training_nodes == torch.bincount(parts[kind.name][mask], minlength=3).tolist()


@pytest.mark.parametrize("method", ["balanced", "metis"])
def test_the_graph_of_all_types_is_cut(method):
    """Two islands, each of both types: only the joint graph tells them apart."""
    left = torch.cartesian_prod(torch.arange(6), torch.arange(6)).t()
    edges = {("a", "to", "b"): torch.cat([left, left + 6], dim=1)}
    part = assign_node_types(edges, {"a": 12, "b": 12}, 2, method)
    assert part["a"][:6].unique().numel() == 1 and torch.equal(part["a"], part["b"])
    assert int(part["a"].sum()) == 6


def part_of(root):
    """What a worker holds of each type and relation; all rows are the graph's."""
    whole, data = make_hetero(), pyg_sar.load_partition(root)
    assert data.node_types == whole.node_types and set(data.edge_types) == set(EDGES)
    nodes = {name: data[name].x.rows.ids for name in data.node_types}
    for name, ids in nodes.items():
        assert data[name].num_nodes == SIZES[name]
        assert torch.equal(data[name].x.full_tensor(), whole[name].x)
        assert torch.equal(data[name].x.to_local(), whole[name].x[ids])
    for edge_type in data.edge_types:
        store, right = data[edge_type], whole[edge_type]
        assert torch.equal(store.edge_index.full_tensor(), right.edge_index)
        assert torch.equal(store.edge_attr.full_tensor(), right.edge_attr)
        e_id, index = store.edge_attr.rows.ids, store.edge_index.to_local()
        assert torch.equal(store.edge_attr.to_local(), right.edge_attr[e_id])
        assert isinstance(index, pyg_sar.space.DistEdgeIndex)
        assert index.num_targets == len(nodes[edge_type[2]])
        assert index.bipartite == (edge_type[0] != edge_type[2])
        source, target = right.edge_index[:, e_id]
        gathered = data[edge_type[0]].x.to_local()[index[0]]
        assert torch.equal(gathered, whole[edge_type[0]].x[source])
        assert torch.equal(nodes[edge_type[2]][plain(index)[1]], target)
    return nodes


def test_workers_get_their_rows(tmp_path):
    data, world = make_hetero(), 3
    write_partitions(data, world, tmp_path / "p", random_parts(data, world))
    held = workers(part_of, world, tmp_path / "p")
    for name, count in SIZES.items():
        ids = torch.cat([nodes[name] for nodes in held])
        assert torch.equal(ids.sort().values, torch.arange(count))


def test_same_bytes(tmp_path):
    data = rich()
    for name in "ab":
        write_partitions(data, 2, tmp_path / name, "random", 3)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all(
        (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files
    )


def test_versions(tmp_path):
    graph = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    write_partitions(graph, 1, tmp_path / "plain")
    write_partitions(make_hetero(), 1, tmp_path / "hetero")
    assert read_metadata(tmp_path / "plain").version == 6
    assert read_metadata(tmp_path / "hetero").version == 6
    for version, message in ((7, "newer than 6.*update pyg_sar"), (0, "not known.*anew")):
        shutil.copytree(tmp_path / "hetero", tmp_path / str(version))
        path = tmp_path / str(version) / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
        with pytest.raises(PartitionError, match=message):
            read_metadata(tmp_path / str(version))


def wrong_graphs():
    cases = []

    def case(message):
        def add(change):
            data = make_hetero()
            change(data)
            cases.append((data, message))

        return add

    case("source ids 0 to 12 of 'author'")(
        lambda d: d["author", "writes", "paper"].edge_index.__setitem__((0, 0), 13)
    )
    case("target ids 0 to 20 of 'paper'")(
        lambda d: d["author", "writes", "paper"].edge_index.__setitem__((1, 0), -1)
    )
    case("'x' of the node type 'ghost'")(lambda d: d["ghost"].update({"x": 3, "num_nodes": 2}))
    case("does not tell how many 'ghost'")(lambda d: d["ghost"].update({"y": torch.zeros(2)}))
    case("refers to the node type 'nobody'")(
        lambda d: d["author", "r", "nobody"].update({"edge_index": torch.zeros(2, 0).long()})
    )
    case("'edge_attr' of .*to have one row per edge, 53 rows")(
        lambda d: d["author", "writes", "paper"].update({"edge_attr": torch.zeros(2, 2)})
    )
    case("'n_id' of the node type 'paper'.*reserved|global ids")(
        lambda d: d["paper"].update({"n_id": torch.arange(21)})
    )
    sparse = torch.eye(3).to_sparse_csr()
    case("'bag' of the node type 'paper'.*3 rows are not one per node or edge")(
        lambda d: d["paper"].update({"bag": sparse})
    )
    case("'bag'.*3 rows are not one per node or edge")(lambda d: d.__setattr__("bag", sparse))
    return cases


@pytest.mark.parametrize("number", range(9))
def test_what_is_wrong_is_named(number, tmp_path):
    data, message = wrong_graphs()[number]
    with pytest.raises(ValueError, match=message):
        write_partitions(data, 2, tmp_path / "p", "random")
    assert list(tmp_path.iterdir()) == []


def test_wrong_assignments(tmp_path):
    data = make_hetero()
    parts = random_parts(data, 2)
    for method, message in (
        ({"paper": parts["paper"]}, "missing.*author"),
        ({**parts, "x": parts["paper"]}, r"unknown: \['x'\]"),
        ({**parts, "paper": parts["author"]}, r"method\['paper'\].*\[21\]"),
        ("nearest", "'method' to be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            write_partitions(data, 2, tmp_path / "p", method)
    with pytest.raises(TypeError, match="dict"):
        write_partitions(data, 2, tmp_path / "p", parts["paper"])


def test_files_and_command_line(tmp_path, capsys):
    data = make_hetero(dtype=torch.float32)
    torch.save(data, tmp_path / "graph.pt")
    assert_same(load_graph(str(tmp_path / "graph.pt")), data)
    torch.save(data.to_dict(), tmp_path / "dict.pt")
    assert_same(load_graph(str(tmp_path / "dict.pt")), data)
    arrays = {f"num_nodes__{name}": np.array(count) for name, count in SIZES.items()}
    for store in data.stores:
        owner = store._key if isinstance(store._key, tuple) else (store._key,)
        arrays |= {"__".join((key, *owner)): value.numpy() for key, value in store.items()}
    np.savez(tmp_path / "graph.npz", **arrays)
    assert_same(load_graph(str(tmp_path / "graph.npz")), data)
    folder = str(tmp_path / "parts")
    assert main(["partition", str(tmp_path / "graph.npz"), "--parts", "2", "--out", folder]) == 0
    assert "writes" in capsys.readouterr().out
    assert_same(merge_partitions(folder), data)


def test_options(tmp_path):
    data = make_hetero()
    for name in data.node_types:
        del data[name].x, data[name].train_mask
        data[name].num_nodes = SIZES[name]
    torch.save(data, tmp_path / "g.pt")
    found = load_graph(
        str(tmp_path / "g.pt"), random_features=8, split="random", remove_self_loops=True
    )
    for name in data.node_types:
        assert found[name].x.shape == (SIZES[name], 8) and found[name].train_mask.any()
    source, target = found["paper", "cites", "paper"].edge_index
    assert (source != target).all() and source.numel() == found["paper", "cites", "paper"].num_edges
    assert found["paper", "cites", "paper"].edge_attr.size(0) == source.numel()
    both = load_graph(str(tmp_path / "g.pt"), undirected=True)
    assert ("paper", "rev_writes", "author") in both.edge_types


@pytest.mark.parametrize("name", ["hetero_yelpchi", "kg_aifb"])
def test_real_graphs(name, tmp_path, shared_data):
    data = load_graph(str(shared_data(f"{name}.npz")))
    write_partitions(data, 3, tmp_path / "p", "random")
    found = merge_partitions(tmp_path / "p")
    if isinstance(data, HeteroData):
        assert_same(found, data)
    else:
        assert torch.equal(found.edge_index, data.edge_index)
        assert torch.equal(found.edge_type, data.edge_type)


def test_the_training_command_says_what_it_takes(tmp_path):
    write_partitions(make_hetero(), 1, tmp_path / "parts")
    config = RunConfig(parts=str(tmp_path / "parts"), model=ModelConfig(name="gcn"))
    with pytest.raises(pyg_sar.errors.WorkerError, match=r"UsageError.*heterogeneous graph"):
        workers(train_worker, 1, config)
