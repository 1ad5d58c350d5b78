"""OGB's node datasets, read from small files in OGB's own raw layout."""

from __future__ import annotations

import gzip
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_sar.tools.graph_sources import safe_data_classes
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.ogb_folders import OGB_DATASETS

NODES, EDGES = 30, 70
RELATIONS = (("author", "writes", "paper"), ("paper", "cites", "paper"))


def write(path: Path, values: Any, header: list[str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        if header is not None:
            file.write(",".join(header) + "\n")
        for row in np.asarray(values).reshape(len(values), -1):
            file.write(",".join(str(value) for value in row) + "\n")


def write_split(folder: Path, num_nodes: int) -> None:
    order = np.random.default_rng(5).permutation(num_nodes)
    for part, nodes in zip(("train", "valid", "test"), np.split(order, [9, 15]), strict=True):
        write(folder / f"{part}.csv.gz", nodes)


def write_dataset(root: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Writes what OGB's archive of a dataset holds; returns its folder and arrays."""
    folder = root / name.replace("-", "_")
    raw, split = folder / "raw", folder / "split" / OGB_DATASETS[name].split
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {
        "edge": rng.integers(0, NODES, (EDGES, 2)),
        "node-feat": rng.standard_normal((NODES, 4)).astype(np.float32).round(6),
        "edge-feat": rng.random((EDGES, 8)).astype(np.float32).round(3),
        "node_year": rng.integers(1990, 2020, (NODES, 1)),
        "species": rng.integers(3702, 99287, (NODES, 1)),
        "node-label": rng.integers(0, 40, (NODES, 1)),
    }
    if name == "ogbn-proteins":
        arrays["node-label"] = rng.integers(0, 2, (NODES, 112))
    kept = {
        "ogbn-arxiv": ("edge", "node-feat", "node_year", "node-label"),
        "ogbn-products": ("edge", "node-feat", "node-label"),
        "ogbn-proteins": ("edge", "edge-feat", "species", "node-label"),
    }[name]
    for key in kept:
        write(raw / f"{key}.csv.gz", arrays[key])
    write(raw / "num-node-list.csv.gz", [NODES])
    write(raw / "num-edge-list.csv.gz", [EDGES])
    write_split(split, NODES)
    (folder / f"RELEASE_v{OGB_DATASETS[name].version}.txt").touch()
    return folder, arrays


def write_papers(root: Path) -> tuple[Path, dict[str, Any]]:
    folder = root / "ogbn_papers100M"
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 172, (NODES, 1)).astype(np.float32)
    labels[::3] = np.nan
    arrays: dict[str, Any] = {
        "edge_index": np.asfortranarray(rng.integers(0, NODES, (2, EDGES))),
        "node_feat": rng.standard_normal((NODES, 5)).astype(np.float32),
        "node_year": rng.integers(1990, 2020, (NODES, 1)),
        "num_nodes_list": np.array([NODES]),
        "num_edges_list": np.array([EDGES]),
    }
    (folder / "raw").mkdir(parents=True)
    np.savez_compressed(folder / "raw" / "data.npz", **arrays)
    np.savez_compressed(folder / "raw" / "node-label.npz", node_label=labels)
    write_split(folder / "split" / "time", NODES)
    return folder, arrays | {"node_label": labels}


def write_mag(root: Path) -> tuple[Path, dict[str, Any]]:
    folder = root / "ogbn_mag"
    raw, split = folder / "raw", folder / "split" / "time"
    rng = np.random.default_rng(6)
    kinds = {"author": 12, "paper": NODES}
    arrays: dict[str, Any] = {
        "x": rng.standard_normal((NODES, 3)).astype(np.float32).round(6),
        "year": rng.integers(2010, 2020, (NODES, 1)),
        "y": rng.integers(0, 349, (NODES, 1)),
    }
    write(raw / "triplet-type-list.csv.gz", RELATIONS)
    write(raw / "num-node-dict.csv.gz", [list(kinds.values())], list(kinds))
    write(raw / "nodetype-has-label.csv.gz", [[False, True]], list(kinds))
    write(split / "nodetype-has-split.csv.gz", [[False, True]], list(kinds))
    write(raw / "node-feat" / "paper" / "node-feat.csv.gz", arrays["x"])
    write(raw / "node-feat" / "paper" / "node_year.csv.gz", arrays["year"])
    write(raw / "node-label" / "paper" / "node-label.csv.gz", arrays["y"])
    for number, triplet in enumerate(RELATIONS):
        edges = np.stack([rng.integers(0, kinds[triplet[end]], 40) for end in (0, 2)], axis=1)
        arrays["___".join(triplet)] = edges
        inner = raw / "relations" / "___".join(triplet)
        write(inner / "edge.csv.gz", edges)
        write(inner / "edge_reltype.csv.gz", np.full((40, 1), number))
        write(inner / "num-edge-list.csv.gz", [40])
    write_split(split / "paper", NODES)
    return folder, arrays


def split_of(data: Any) -> list[list[int]]:
    return [
        data[mask].nonzero().view(-1).tolist() for mask in ("train_mask", "val_mask", "test_mask")
    ]


def expected_split(num_nodes: int) -> list[list[int]]:
    order = np.random.default_rng(5).permutation(num_nodes)
    return [sorted(nodes.tolist()) for nodes in np.split(order, [9, 15])]


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products", "ogbn-proteins"])
def test_tables_of_one_graph(name: str, tmp_path: Path) -> None:
    folder, arrays = write_dataset(tmp_path, name)
    data = load_graph(str(folder))
    assert isinstance(data, Data) and data.num_nodes == NODES
    edges, features = arrays["edge"].tolist(), arrays["edge-feat"]
    if name != "ogbn-arxiv":  # ogb puts the reverse of an edge behind it.
        edges = [ends for s, t in edges for ends in ((s, t), (t, s))]
        features = np.repeat(features, 2, axis=0)
    assert data.edge_index.t().tolist() == [list(ends) for ends in edges]
    assert data.y.dtype == torch.int64 and split_of(data) == expected_split(NODES)
    if name == "ogbn-proteins":
        assert data.y.tolist() == arrays["node-label"].tolist()
        assert np.array_equal(data.edge_attr.numpy(), features)
        assert data.node_species.tolist() == arrays["species"].tolist() and "x" not in data
    else:
        assert data.y.tolist() == arrays["node-label"].reshape(-1).tolist()
        assert np.array_equal(data.x.numpy(), arrays["node-feat"])
        assert ("node_year" in data) == (name == "ogbn-arxiv")
    by_name = load_graph(name.upper(), root=tmp_path)
    assert torch.equal(by_name.edge_index, data.edge_index)


def test_arrays_of_papers100m(tmp_path: Path) -> None:
    folder, arrays = write_papers(tmp_path)
    data = load_graph("ogbn-papers100M", root=tmp_path)
    assert torch.equal(data.edge_index, torch.from_numpy(arrays["edge_index"]))
    assert torch.equal(data.x, torch.from_numpy(arrays["node_feat"]))
    assert torch.equal(data.node_year, torch.from_numpy(arrays["node_year"]))
    assert data.y.tolist() == np.nan_to_num(arrays["node_label"], nan=-1).reshape(-1).tolist()
    assert data.y.dtype == torch.int64 and split_of(data) == expected_split(NODES)
    lists = zip(("train", "valid", "test"), expected_split(NODES), strict=True)
    split = {part: np.array(nodes[:2]) for part, nodes in lists}
    torch.save(split, folder / "split" / "time" / "split_dict.pt")  # ogb reads this one first.
    assert split_of(load_graph(str(folder))) == [nodes[:2] for nodes in expected_split(NODES)]


def test_relations_of_mag(tmp_path: Path) -> None:
    _, arrays = write_mag(tmp_path)
    data = load_graph("ogbn-mag", root=tmp_path)
    assert isinstance(data, HeteroData) and data["author"].num_nodes == 12
    for number, triplet in enumerate(RELATIONS):
        assert data[triplet].edge_index.t().tolist() == arrays["___".join(triplet)].tolist()
        assert data[triplet].edge_reltype.tolist() == [[number]] * 40
    paper = data["paper"]
    assert np.array_equal(paper.x.numpy(), arrays["x"])
    assert paper.node_year.tolist() == arrays["year"].tolist()
    assert paper.y.tolist() == arrays["y"].reshape(-1).tolist()
    assert split_of(paper) == expected_split(NODES)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # ogb's, of pandas.
@pytest.mark.parametrize("name", list(OGB_DATASETS))
def test_equal_to_ogbs_own_reader(name: str, tmp_path: Path) -> None:
    """With ogb: all attributes that it gives, to the bit."""
    pytest.importorskip("ogb.nodeproppred", reason="needs the extra ogb")
    from ogb.nodeproppred import PygNodePropPredDataset

    if name == "ogbn-mag":
        folder, _ = write_mag(tmp_path)
    elif name == "ogbn-papers100M":
        folder, _ = write_papers(tmp_path)
    else:
        folder, _ = write_dataset(tmp_path, name)
    found = load_graph(str(folder))
    (folder / f"RELEASE_v{OGB_DATASETS[name].version}.txt").touch()
    scalar: Any = np.int64(0).__reduce__()[0]  # num_nodes, in what ogb pickles
    with safe_data_classes(), torch.serialization.safe_globals([scalar]):
        dataset = PygNodePropPredDataset(name=name, root=str(tmp_path))
        split = dataset.get_idx_split()
    paper = found["paper"] if name == "ogbn-mag" else found
    for part, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        nodes = split[part]["paper"] if name == "ogbn-mag" else split[part]
        assert torch.equal(paper[mask].nonzero().view(-1), nodes.sort().values)
    compared = set()
    for key, value in dataset[0].to_dict().items():
        if key in ("num_nodes", "num_nodes_dict"):
            continue
        values = value if isinstance(value, dict) else {None: value}
        for kind, theirs in values.items():
            ours = (found if kind is None else found[kind])[key.removesuffix("_dict")]
            if key.startswith("y") and theirs.size(1) == 1:
                theirs = theirs.nan_to_num(-1).long().view(-1)
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), (key, kind)
            compared.add(key)
    assert len(compared) >= 3, compared


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder, arrays = write_dataset(tmp_path, "ogbn-arxiv")
    raw = folder / "raw"
    for file, values, message in (
        ("raw/node-feat.csv.gz", arrays["node-feat"][1:], "node-feat.csv.gz' to give 30 rows"),
        ("raw/node_year.csv.gz", np.full((NODES, 1), 0.5), "node_year.csv.gz' to hold whole"),
        ("raw/node-label.csv.gz", [["a"]] * NODES, "node-label.csv.gz' can't be read"),
        ("raw/edge.csv.gz", np.ones((3, 3), int), "edge.csv.gz' to have the columns source"),
        ("raw/edge.csv.gz", np.full((3, 2), NODES), "edge_index"),
        ("raw/num-node-list.csv.gz", [NODES, 2], "num-node-list.csv.gz' to hold one number"),
        ("split/time/test.csv.gz", [NODES], "test.csv.gz' to hold node ids from 0 to 29"),
    ):
        kept = (folder / file).read_bytes()
        write(folder / file, values)
        with pytest.raises(ValueError, match=message):
            load_graph(str(folder))
        (folder / file).write_bytes(kept)
    load_graph(str(folder))
    (raw / "node-feat.csv.gz").rename(raw / "kept")
    (folder / "RELEASE_v1.txt").rename(folder / "RELEASE_v0.txt")
    with pytest.raises(ValueError, match=r"holds RELEASE_v0.txt, but ogbn-arxiv is at version 1"):
        load_graph(str(folder))
    folder.rename(tmp_path / "mine")
    with pytest.raises(ValueError, match="mine' tells no dataset of OGB"):
        load_graph(str(tmp_path / "mine"))
    with pytest.raises(FileNotFoundError):
        folder, _ = write_dataset(tmp_path, "ogbn-products")
        (folder / "split" / "sales_ranking" / "test.csv.gz").unlink()
        load_graph(str(folder))


def test_ogb_downloads_what_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for ogb's class: the real one needs a download."""
    module = types.ModuleType("ogb.nodeproppred")
    calls = []

    def dataset(name: str, root: str) -> None:
        calls.append(name)
        if name == "ogbn-arxiv":
            write_dataset(Path(root), name)
        elif name == "ogbn-mag":
            raise OSError("no network")

    module.PygNodePropPredDataset = dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    for _ in range(2):
        assert load_graph("OGBN-arxiv", root=tmp_path).num_nodes == NODES
    assert calls == ["ogbn-arxiv"]
    with pytest.raises(OSError, match="'ogbn-mag' is not in .* no network"):
        load_graph("ogbn-mag", root=tmp_path)
    with pytest.raises(OSError, match="'ogbn-papers100M' .* no raw files"):
        load_graph("ogbn-papers100M", root=tmp_path)
