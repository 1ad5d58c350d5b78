"""Graph sources: what is drawn, read and refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.data.storage import AttrType
from torch_geometric.utils import contains_self_loops, degree, is_undirected

from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph
from pyg_sar.tools.graphs import GraphOptions, load_graph, parse_source


def equal(a: Data, b: Data) -> bool:
    left, right = a.to_dict(), b.to_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[key], right[key])
        if torch.is_tensor(left[key])
        else left[key] == right[key]
        for key in left
    )


def same_class_edges(data: Data) -> int:
    return int((data.y[data.edge_index[0]] == data.y[data.edge_index[1]]).sum())


# Synthetic ####################################################################


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("homophily", [0.0, 0.25, 0.7, 1.0])
def test_synthetic_counts_are_exact(directed, homophily):
    graph = SyntheticGraph(
        nodes=2000, edges=30_000, classes=5, features=7, homophily=homophily, directed=directed
    )
    data = synthetic_graph(graph, seed=1)
    assert data.edge_index.shape == (2, 30_000)
    assert data.x.shape == (2000, 7) and data.x.dtype == torch.float32
    assert torch.bincount(data.y).tolist() == [400] * 5
    assert same_class_edges(data) == round(30_000 * homophily)
    assert data.is_coalesced() and not contains_self_loops(data.edge_index)
    assert is_undirected(data.edge_index) != directed


def test_synthetic_degrees_follow_the_power_law():
    """The Hill estimate of the tail's exponent, from the largest 2% of the degrees."""
    for exponent in (2.2, 3.0):
        graph = SyntheticGraph(nodes=40_000, degree=20, features=0, classes=2, exponent=exponent)
        edge_index = synthetic_graph(graph).edge_index
        largest = degree(edge_index[1], 40_000).sort(descending=True).values[:800].double()
        estimate = 1 + 1 / (largest / largest[-1]).log().mean().item()
        assert abs(estimate - exponent) < 0.25


def test_edges_between_classes_favour_no_class():
    graph = SyntheticGraph(nodes=9000, degree=20, classes=3, homophily=0.0, directed=True)
    data = synthetic_graph(graph)
    source, target = data.y[data.edge_index]
    pairs = torch.bincount(3 * source + target, minlength=9).view(3, 3)
    assert pairs.diag().tolist() == [0, 0, 0]
    others = pairs[~torch.eye(3, dtype=torch.bool)] / data.num_edges
    assert (others - 1 / 6).abs().max() < 0.02


def test_synthetic_features_tell_the_class():
    data = synthetic_graph(SyntheticGraph(nodes=4000, classes=4, signal=0.5))
    centroids = torch.stack([data.x[data.y == c].mean(0) for c in range(4)])
    guess = torch.cdist(data.x, centroids).argmin(1)
    assert (guess == data.y).float().mean() > 0.9
    noise = synthetic_graph(SyntheticGraph(nodes=4000, classes=4, signal=0.0))
    assert noise.x.mean().abs() < 0.01 and abs(noise.x.std().item() - 1) < 0.01


def test_synthetic_is_the_same_for_a_seed():
    first, again, other = (load_graph("synthetic:nodes=500", seed=s) for s in (3, 3, 4))
    assert equal(first, again)
    assert not torch.equal(first.edge_index, other.edge_index)
    assert not torch.equal(first.x, other.x)


def test_synthetic_of_two_hundred_thousand_nodes_and_ten_million_edges():
    data = load_graph("synthetic:nodes=200_000,edges=1e7,features=4,classes=40")
    assert data.edge_index.shape == (2, 10_000_000)
    assert same_class_edges(data) == 7_000_000


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 1, "degree": 0, "classes": 1},
        {"nodes": 10, "degree": 4, "classes": 2},
        {"nodes": 60, "degree": 20, "classes": 1, "homophily": 0.1},
        {"nodes": 5, "edges": 0, "classes": 5, "features": 0},
    ],
)
def test_synthetic_of_any_size(options):
    data = load_graph("synthetic", **options)
    assert data.num_nodes == options["nodes"]
    assert data.num_edges == options.get("edges", options["nodes"] * options.get("degree", 0))
    assert ("x" in data) == (options.get("features") != 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nodes": 0}, "'nodes'.*at least 1 \\(got 0\\)"),
        ({"edges": 7}, "'edges'.*even unless 'directed' \\(got 7\\)"),
        ({"homophily": 1.5}, "'homophily'.*0 to 1 \\(got 1.5\\)"),
        ({"classes": 0}, "'classes'.*1 to 'nodes' \\(got 0\\)"),
        ({"exponent": 1}, "'exponent'.*above 1"),
        ({"features": -1}, "'features'"),
        ({"degree": -2.0}, "'degree'"),
        ({"nodes": 100, "degree": 90}, "more than half of the 4950"),
        ({"nodes": 100, "degree": 40, "classes": 50, "homophily": 1.0}, "within 50 classes"),
        ({"nodes": "many"}, "'nodes' to be a number \\(got 'many'\\)"),
        ({"nodes": 10.5}, "'nodes' to be a whole number"),
        ({"directed": "maybe"}, "'directed' to be true or false"),
        ({"node": 10}, "Unknown option 'node' of 'synthetic'; did you mean 'nodes'"),
    ],
)
def test_wrong_synthetic_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_graph("synthetic", **options)


# Splits and other options #####################################################


def sizes(data: Data) -> list[int]:
    masks = [data.train_mask, data.val_mask, data.test_mask]
    assert int(torch.stack(masks).sum(0).max()) <= 1  # Disjoint.
    return [int(mask.sum()) for mask in masks]


def test_a_split_is_drawn_by_seed():
    first, again, other = (load_graph("synthetic:nodes=1000", seed=s) for s in (1, 1, 2))
    assert sizes(first) == [600, 200, 200]
    assert torch.equal(first.train_mask, again.train_mask)
    assert not torch.equal(first.train_mask, other.train_mask)


def test_per_class_split():
    data = load_graph("synthetic:nodes=1000,classes=8,split=per_class")
    assert sizes(data) == [160, 240, 600]
    for c in range(8):
        assert [int(data.y[mask].eq(c).sum()) for mask in (data.train_mask, data.val_mask)] == [
            20,
            30,
        ]


def test_nodes_without_label_are_in_no_split(tmp_path):
    y = np.where(np.arange(100) < 30, -1, np.arange(100) % 2)
    np.savez(tmp_path / "g.npz", edge_index=np.zeros((2, 0), np.int32), num_nodes=100, y=y)
    for split in ("auto", "per_class"):
        data = load_graph(str(tmp_path / "g.npz"), split=split)
        assert sum(sizes(data)) == 70
        assert not (data.train_mask | data.val_mask | data.test_mask)[:30].any()
    # Several labels per node: those of which one is known.
    many = np.where(y[:, None] < 0, np.nan, 1.0) * np.ones((100, 3))
    np.savez(tmp_path / "m.npz", edge_index=np.zeros((2, 0), np.int32), num_nodes=100, y=many)
    assert sum(sizes(load_graph(tmp_path / "m.npz"))) == 70
    with pytest.raises(ValueError, match="per_class needs one class per node"):
        load_graph(str(tmp_path / "m.npz"), split="per_class")


def test_masks_of_several_splits(tmp_path):
    masks = {f"{part}_mask": np.random.rand(4, 3) < 0.5 for part in ("train", "val")}
    test = np.array([True, False, False, False])  # As in WikiCS: one test mask for all splits.
    path = str(tmp_path / "g.npz")
    np.savez(path, edge_index=[[0], [1]], num_nodes=4, y=[0, 1, 0, 1], test_mask=test, **masks)
    data = load_graph(path)
    assert data.train_mask.shape == (4, 3)
    data = load_graph(path, split=2)
    assert data.train_mask.tolist() == masks["train_mask"][:, 2].tolist()
    assert data.val_mask.tolist() == masks["val_mask"][:, 2].tolist()
    assert data.test_mask.tolist() == test.tolist()
    assert load_graph(path + ":split=random").train_mask.shape == (4,)
    with pytest.raises(ValueError, match="'split' below 3.*got 3"):
        load_graph(path, split=3)
    with pytest.raises(ValueError, match="'split' to be 'auto'.*got 'half'"):
        load_graph(path, split="half")


def test_undirected_keeps_edge_attributes(tmp_path):
    path = str(tmp_path / "g.npz")
    edge_index = np.array([[0, 1, 1, 2], [1, 0, 2, 2]])
    np.savez(path, edge_index=edge_index, edge_weight=np.array([1.0, 3.0, 2.0, 5.0]), num_nodes=4)
    data = load_graph(path + ":undirected=true")
    assert data.edge_index.tolist() == [[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]]
    assert data.edge_weight.tolist() == [3.0, 3.0, 2.0, 2.0, 5.0]
    assert data.num_nodes == 4 and "train_mask" not in data
    data = load_graph(path + ":remove_self_loops=yes")
    assert data.edge_index.tolist() == edge_index[:, :3].tolist()
    assert data.edge_weight.tolist() == [1.0, 3.0, 2.0] and data.num_nodes == 4


def test_features_normalized_sparse_and_random(tmp_path):
    path = str(tmp_path / "g.npz")
    x = np.array([[1.0, 3.0], [0.0, 0.0], [5.0, 0.0]], dtype=np.float32)
    np.savez(path, edge_index=[[0], [1]], x=x)
    expected = [[0.25, 0.75], [0.0, 0.0], [1.0, 0.0]]
    assert load_graph(path, normalize=True).x.tolist() == expected
    sparse = load_graph(path, normalize=True, sparse=True).x
    assert sparse.layout == torch.sparse_csr and sparse.to_dense().tolist() == expected
    assert load_graph(path, random_features=9).x.tolist() == x.tolist()
    np.savez(path, edge_index=[[0], [1]], num_nodes=3)
    first, again = (load_graph(path, random_features=9, seed=s).x for s in (0, 0))
    assert first.shape == (3, 9) and torch.equal(first, again)
    with pytest.raises(ValueError, match="'random_features' to be at least 0"):
        GraphOptions(random_features=-1)
    np.savez(path, edge_index=[[0], [1]], x=x, y=np.array([0, 1, 1], np.uint16))
    assert load_graph(path, split="random").train_mask.sum() == 1


@pytest.mark.parametrize("form", ["sparse", "sparse_csr", "sparse_csc"])
@pytest.mark.parametrize("lowest", [0.0, -1.0])
def test_sparse_features_are_normalized_as_dense_ones(form, lowest, tmp_path):
    x = torch.tensor([[lowest, 2.0], [0.0, 0.0], [3.0, 1.0]])
    data = Data(x=x, edge_index=torch.tensor([[0], [1]]))
    expected = T.NormalizeFeatures()(data.clone()).x
    data.x = getattr(x, f"to_{form}")()
    torch.save(data, tmp_path / "g.pt")
    for options in ({}, {"sparse": True}):
        found = load_graph(str(tmp_path / "g.pt"), normalize=True, **options).x
        assert torch.equal(found.to_dense(), expected)


# NumPy archives ###############################################################


def test_npz_keys(tmp_path):
    path = str(tmp_path / "g.npz")
    arrays = {
        "edge_index": np.array([[0, 2], [1, 1]], dtype=np.int32),
        "num_nodes": 3,
        "x_indptr": np.array([0, 2, 2, 3], dtype=np.int32),
        "x_indices": np.array([4, 1, 0], dtype=np.int32),  # Any order within a row.
        "x_values": np.array([1.0, 2.0, 3.0], dtype=np.float32),
        "x_shape": np.array([3, 5]),
        "edge_type": np.array([7, 8], dtype=np.int32),
        "num_relations": 9,
        "relation_names": np.array(["a", "bc"]),
        "meta": json.dumps({"source": "here"}),
    }
    np.savez(path, **arrays)
    data = load_graph(path)
    assert data.edge_index.dtype == torch.int64 and data.edge_index.tolist() == [[0, 2], [1, 1]]
    assert data.x.tolist() == [[0, 2, 0, 0, 1], [0] * 5, [3, 0, 0, 0, 0]]
    assert data.edge_type.tolist() == [7, 8] and data.num_relations == 9
    assert data.relation_names == ["a", "bc"] and "meta" not in data
    assert torch.equal(load_graph(path, sparse=True).x.to_dense(), data.x)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"a": np.zeros(3)}, "no 'edge_index'; it holds a"),
        ({"num_nodes__user": 3, "x__item": np.zeros(2)}, "x__item.*belongs to no node type"),
        ({"edge_index": np.array([[None], [1]], dtype=object)}, "not a NumPy archive of plain"),
        (
            {
                "edge_index": np.zeros((2, 0), int),
                "x_indptr": np.array([0, 1]),
                "x_indices": np.array([7]),
                "x_values": np.array([1.0]),
                "x_shape": np.array([1, 5]),
            },
            "is not a CSR matrix",
        ),
    ],
)
def test_npz_that_cannot_be_used(arrays, message, tmp_path):
    np.savez(tmp_path / "g.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_graph(str(tmp_path / "g.npz"))


SQUARE: dict[str, Any] = {"edge_index": np.array([[0, 1], [1, 3]]), "num_nodes": 4}
CSR: dict[str, Any] = {
    "x_indptr": np.array([0, 1, 1, 2, 2]),
    "x_indices": np.array([0, 2]),
    "x_values": np.array([1.0, 2.0]),
    "x_shape": np.array([4, 3]),
}
TWO: dict[str, Any] = {"num_nodes__a": 2, "edge_index__a__to__a": np.array([[0], [1]])}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"edge_index": np.array([[0.0, 1.7], [1.0, 2.0]])}, r"'edge_index'.*64-bit.*float64.*astype"),
    ({"edge_index": np.array([[True], [False]])}, r"'edge_index'.*got dtype bool"),
    ({"edge_index": np.array([[2**64 - 1], [0]], dtype=np.uint64)}, r"'edge_index'.*dtype uint64"),
    ({"edge_index": np.zeros((3, 2), int)}, r"'edge_index'.*shape \[2, \*\].*shape \[3, 2\]"),
    ({"edge_index": np.array([[0], [-1]])}, r"ids 0 to 3 \(got -1 to 0\)"),
    ({"edge_index": np.array([[0], [4]])}, r"ids 0 to 3 \(got 0 to 4\)"),
    ({"num_nodes": 20.5}, r"'num_nodes'.*one integer.*got 20.5, dtype float64.*int\(num_nodes\)"),
    ({"num_nodes": -1}, r"'num_nodes'.*one integer of at least 0 \(got -1"),
    ({"num_nodes": True}, r"'num_nodes'.*got True, dtype bool"),
    ({"num_nodes": np.array([4, 4])}, r"'num_nodes'.*got shape \[2\]"),
    ({"train_mask": np.array([1, 0, 1, 0])}, r"'train_mask'.*bool.*int64.*astype\(bool\)"),
    ({"y": np.array([1, 2, 3], "datetime64[s]")}, r"'y'.*can't be a tensor \(dtype datetime64"),
    ({**CSR, "x_indices": np.array([0.5, 2.0])}, r"'x_indices'.*64-bit.*float64"),
    ({**CSR, "x_indices": np.array([0, 3])}, r"CSR matrix: expected columns 0 to 2.*got 0 to 3"),
    ({**CSR, "x_indptr": np.array([0, 1, 2])}, r"'x_indptr'.*shape \[5\]"),
    ({**CSR, "x_indptr": np.array([1, 1, 1, 2, 2])}, "'x_indptr' to ascend from 0 to the 2 entr"),
    ({**CSR, "x_indptr": np.array([0, 2, 1, 2, 2])}, "'x_indptr' to ascend from 0 to the 2 entr"),
    ({**CSR, "x_values": np.array([1.0])}, "CSR matrix: expected a value for each of 2 entries"),
    ({**CSR, "x_shape": np.array([4.0, 3.0])}, "'x_shape'.*float64"),
    ({"x_indptr": CSR["x_indptr"]}, "holds x_indptr, but not x_indices, x_values, x_shape"),
]
WRONG_HETERO: list[tuple[dict[str, Any], str]] = [
    ({"num_nodes__a": 2.5}, "'num_nodes__a'.*got 2.5"),
    ({"edge_index__a__to__a": np.array([[0.9], [1.0]])}, "'edge_index__a__to__a'.*float64"),
    ({"edge_index__a__to__a": np.array([[0], [2]])}, "target ids 0 to 1 of 'a'"),
    ({"val_mask__a": np.array([1, 0])}, "'val_mask__a'.*bool.*int64"),
]


def test_arrays_of_wrong_dtypes_and_values_are_named(tmp_path):
    """Nothing is truncated or reinterpreted: each is an error that names file and key."""
    path = tmp_path / "g.npz"
    cases = [({**SQUARE, **change}, text) for change, text in WRONG]
    cases += [({**TWO, **change}, text) for change, text in WRONG_HETERO]
    for arrays, text in cases:
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=text) as caught:
            load_graph(str(path))
        assert str(path) in str(caught.value), text
    np.savez(path, **SQUARE, **CSR)
    assert load_graph(str(path)).x.shape == (4, 3)


def test_saved_graphs_with_wrong_edges_are_named(tmp_path):
    path = tmp_path / "g.pt"
    for edges, text in (
        (torch.tensor([[0.0], [1.5]]), "'edge_index' to hold integers.*float32"),
        (torch.tensor([[0], [9]]), "ids 0 to 3 .got 0 to 9"),
        (torch.tensor([[-1], [0]]), "ids 0 to 3 .got -1 to 0"),
    ):
        torch.save(Data(x=torch.zeros(4, 1), edge_index=edges), path)
        for options in ({}, {"undirected": True}):
            with pytest.raises(ValueError, match=text) as caught:
                load_graph(str(path), **options)
            assert str(path) in str(caught.value)


def test_files_that_are_no_archives(tmp_path):
    for content in (b"", b"text", b"PK\x03\x04 and then nothing", bytes(200)):
        (tmp_path / "g.npz").write_bytes(content)
        with pytest.raises(ValueError, match="not a NumPy archive"):
            load_graph(str(tmp_path / "g.npz"))
    with pytest.raises(FileNotFoundError):
        load_graph(str(tmp_path / "missing.npz"))


@pytest.mark.parametrize(
    "name, options, num_edges, num_features, split_sizes",
    [
        ("cora", {}, 10_858, 1433, [140, 500, 1000]),
        (
            "citeseer",
            {"undirected": True, "remove_self_loops": True},
            9_104,
            3703,
            [120, 500, 1000],
        ),
        (
            "amazon_photo",
            {"undirected": True, "remove_self_loops": True},
            238_162,
            745,
            [4590, 1530, 1530],
        ),
        ("amazon_photo", {"split": "per_class"}, 143_663, 745, [160, 240, 7250]),
        ("tolokers", {"undirected": True, "split": 3}, 1_038_000, 10, [5879, 2939, 2940]),
        ("coauthor_cs", {"sparse": True}, 163_788, 6805, None),
        ("kg_aifb", {"random_features": 5}, 29_043, 5, None),
    ],
)
def test_real_archives(name, options, num_edges, num_features, split_sizes, shared_data):
    data = load_graph(str(shared_data(f"{name}.npz")), **options)
    assert data.num_edges == num_edges and data.x.size(1) == num_features
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    assert is_undirected(data.edge_index) or "undirected" not in options
    if split_sizes is not None:
        assert sizes(data) == split_sizes


# PyG's and OGB's datasets #####################################################


@pytest.mark.parametrize("name", ["cora", "Planetoid/Cora"])
def test_planetoid_offline(name, shared_data, tmp_path):
    shutil.copytree(
        shared_data("planetoid_raw/Cora"), tmp_path / "Cora", copy_function=shutil.copyfile
    )
    for path in (tmp_path / "Cora", *(tmp_path / "Cora").rglob("*")):
        path.chmod(0o755)
    data = load_graph(name, root=tmp_path)
    assert (data.num_nodes, data.num_edges) == (2708, 10_556)
    assert sizes(data) == [140, 500, 1000]
    archive = load_graph(str(shared_data("cora.npz")), undirected=True, remove_self_loops=True)
    assert torch.equal(data.edge_index.flip(0), archive.edge_index)  # PyG sorts by target.
    assert torch.equal(data.y, archive.y)


def test_a_dataset_without_download_and_without_names():
    data = load_graph("karate-club")
    assert data.num_nodes == 34 and int(data.train_mask.sum()) == 4


def test_a_dataset_that_cannot_be_had(tmp_path, monkeypatch):
    import torch_geometric.datasets as datasets

    class Offline:
        def __init__(self, root: str, name: str) -> None:
            raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "Planetoid", Offline)
    with pytest.raises(OSError, match=r"'pubmed' is not in .*Planetoid.*no network.*'root'"):
        load_graph("pubmed", root=tmp_path)


def test_where_datasets_are_put(tmp_path, monkeypatch):
    import torch_geometric.datasets as datasets

    made: list[Any] = []

    class Fake(list):
        def __init__(self, root: str, name: str | None = None) -> None:
            made.append((root, name))
            super().__init__([Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)])

    class Nameless(Fake):
        def __init__(self, root: str) -> None:
            super().__init__(root)

    monkeypatch.setattr(datasets, "Amazon", Fake)
    monkeypatch.setattr(datasets, "WikiCS", Nameless)
    load_graph("photo", root=tmp_path)
    load_graph("wiki-cs")
    (tmp_path / "Photo").mkdir()
    load_graph("Amazon_Photo", root=tmp_path)
    assert made == [
        (str(tmp_path / "Amazon"), "Photo"),
        (str(Path("data/WikiCS")), None),
        (str(tmp_path), "Photo"),
    ]
    with pytest.raises(ValueError, match="several datasets; write 'Amazon/NAME'"):
        load_graph("Amazon")


def test_datasets_of_other_kinds(monkeypatch):
    import torch_geometric.datasets as datasets

    for graphs, message in (
        ([Data(), Data()], "holds 2 graphs"),
        ([{}], "neither a Data nor a HeteroData \\(dict\\)"),
    ):
        monkeypatch.setattr(
            datasets, "KarateClub", type("Fake", (), {"__new__": lambda _, g=graphs: g})
        )
        with pytest.raises(ValueError, match=message):
            load_graph("karateclub")


@pytest.mark.parametrize("name", ["coraa", "nothing-like-it", "a/b", "data_folder", "Path"])
def test_unknown_sources(name):
    with pytest.raises(ValueError, match=f"no file or folder '{name}'.*'ogbn-NAME'.*.csv"):
        load_graph(name)
    with pytest.raises(ValueError, match="did you mean 'citeseer'"):
        load_graph("citeser")


def test_ogb_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(ImportError, match=r"pip install 'pyg_sar\[ogb\]'"):
        load_graph("ogbn-arxiv")


# Saved Data ###################################################################


class Harmful:
    """What a hostile file would hold: unpickling it calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("python", ["3.11.2", "3.11.4"])
def test_saved_data(python, tmp_path, monkeypatch):
    def by_name(member: AttrType, protocol: int) -> tuple[Any, ...]:
        return getattr, (AttrType, member.name)

    def by_value(member: AttrType, protocol: int) -> tuple[Any, ...]:
        return AttrType, (member.value,)

    # How members of enumerations are saved.
    monkeypatch.setattr(AttrType, "__reduce_ex__", by_name if python == "3.11.2" else by_value)
    data = Data(
        x=torch.randn(3, 2),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        train_mask=torch.tensor([True, False, True]),
        half=torch.ones(3, dtype=torch.bfloat16),
        array=np.arange(3),
        names=["a", "b", "c"],
        nested={"a": (1, None)},
        num_nodes=3,
    )
    data.is_node_attr("x")  # Fills PyG's cache, which is saved with it.
    for content in (data, data.to_dict(), (data.to_dict(), None, Data)):
        torch.save(content, tmp_path / "graph.pt")
        loaded = load_graph(str(tmp_path / "graph.pt"))
        assert loaded.is_node_attr("x") and loaded.is_edge_attr("edge_index")
        assert torch.equal(loaded.x, data.x) and torch.equal(loaded.edge_index, data.edge_index)
        assert loaded.half.dtype == torch.bfloat16 and loaded.array.tolist() == [0, 1, 2]
        assert loaded.names == data.names and loaded.nested == data.nested
    data.x = data.x.to_sparse_csr()
    torch.save(data, tmp_path / "graph.pth")
    assert torch.equal(load_graph(str(tmp_path / "graph.pth")).x, data.x.to_dense())


class Reached:
    """Saved as an attribute of a class that a file may hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Data, "__init__")


def test_a_saved_file_reaches_no_attributes(tmp_path):
    torch.save({"x": Reached()}, tmp_path / "graph.pt")
    with pytest.raises(ValueError, match="can't be loaded safely: it needs getattr"):
        load_graph(str(tmp_path / "graph.pt"))


@pytest.mark.parametrize("old_format", [False, True])
def test_a_saved_file_cannot_run_code(old_format, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Data(num_nodes=2, thing=Harmful())
    torch.save(data, "graph.pt", _use_new_zipfile_serialization=not old_format)
    with pytest.raises(ValueError, match=r"can't be loaded safely: it needs posix.mkdir.*to_dict"):
        load_graph("graph.pt")
    assert not Path("harm").exists()


def test_other_saved_files(tmp_path):
    path = tmp_path / "graph.pt"
    for value, message in (
        (torch.zeros(3), "one Data or HeteroData \\(got Tensor\\)"),
        ((Data(), {"x": [0, 1]}), "got tuple"),
    ):
        torch.save(value, path)
        with pytest.raises(ValueError, match=message):
            load_graph(str(path))
    for content in (b"not a file of torch", b"hello" * 9):  # torch raises errors of many kinds.
        path.write_bytes(content)
        with pytest.raises(ValueError, match="can't be loaded safely"):
            load_graph(str(path))
    with pytest.raises(ValueError, match="can't be loaded safely"):
        load_graph(str(path))
    with pytest.raises(FileNotFoundError, match="no file"):
        load_graph(str(tmp_path / "missing.pt"))


def test_loading_leaves_the_list_of_safe_classes_as_it_was(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    assert Data in before and defaultdict in before  # PyG's.
    torch.save(Data(num_nodes=1), tmp_path / "graph.pt")
    load_graph(str(tmp_path / "graph.pt"))
    assert set(torch.serialization.get_safe_globals()) == before


# The source's text ############################################################


def test_parse_source():
    assert parse_source("cora") == ("cora", {})
    assert parse_source("synthetic:a=1, b = x") == ("synthetic", {"a": "1", "b": "x"})
    assert parse_source("folder:1/g.npz") == ("folder:1/g.npz", {})
    with pytest.raises(ValueError, match="gives 'a' twice"):
        parse_source("cora:a=1,b=2,a=3")
    for source in ("cora:a=1,b", "cora:=1", "cora:a="):
        with pytest.raises(ValueError, match="key=value"):
            parse_source(source)
