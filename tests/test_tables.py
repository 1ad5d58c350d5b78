"""Graphs as tables: ids that are text or sparse numbers, features in columns, and predictions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import workers

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.predict import write_table
from pyg_sar.tools.tables import names_of

pyarrow = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
parquet = pytest.importorskip("pyarrow.parquet")

NAMES = ["zoë", "b", "a long name", "d"]


def write(folder: Path, **tables: str) -> None:
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")


def people(folder: Path, ids: list[object]) -> str:
    """Three edges among four people; what names the graph."""
    rows = "".join(f"{id},{age},{2 * age},{age % 2}\n" for age, id in enumerate(ids))
    ends = [(ids[2], ids[0]), (ids[0], ids[1]), (ids[2], ids[1])]
    edges = "".join(f"{source},{target},0.5\n" for source, target in ends)
    write(folder, people="id,age,income,y\n" + rows, links="source,target,w\n" + edges)
    return f"{folder / 'links.csv'}:nodes={folder / 'people.csv'}"


@pytest.mark.parametrize("ids", [NAMES, [10**12, 7, 0, 1], [1, 0, 2, 3], [0, 1, 2, 3]])
def test_edges_name_nodes_by_their_ids(ids, tmp_path):
    data = load_graph(people(tmp_path, ids))
    assert data.edge_index.tolist() == [[2, 0, 2], [0, 1, 1]] and data.num_nodes == 4
    assert data.w.tolist() == [0.5] * 3 and data.y.tolist() == [0, 1, 0, 1]
    if ids == [0, 1, 2, 3]:
        assert "node_name" not in data
    else:
        assert names_of(data.node_name.numpy()) == ids and "id" not in data


def test_folders_and_parquet_do_the_same(tmp_path):
    people(tmp_path, NAMES)
    folder = tmp_path / "graph"
    folder.mkdir()
    for old, new in (("people", "nodes"), ("links", "edges")):
        parquet.write_table(csv.read_csv(tmp_path / f"{old}.csv"), folder / f"{new}.parquet")
    data = load_graph(str(folder))
    assert data.edge_index.tolist() == [[2, 0, 2], [0, 1, 1]]
    assert names_of(data.node_name.numpy()) == NAMES


def test_without_a_table_of_nodes_they_are_those_of_the_edges(tmp_path):
    write(
        tmp_path,
        text="src,dst\nc,a\na,b\n",
        sparse="src,dst\n900,3\n3,40\n",
        dense="src,dst\n1,0\n",
    )
    text, sparse, dense = (
        load_graph(f"{tmp_path}/{name}.csv") for name in ("text", "sparse", "dense")
    )
    found = names_of(text.node_name.numpy())
    ends = [[found[k] for k in row] for row in text.edge_index.tolist()]
    assert ends == [["c", "a"], ["a", "b"]] and text.num_nodes == 3
    assert sparse.node_name.tolist() == [3, 40, 900]
    assert sparse.edge_index.tolist() == [[2, 0], [0, 1]]
    assert dense.num_nodes == 2 and "node_name" not in dense


def test_columns_that_are_no_features_are_named(tmp_path, capsys):
    command = ["partition", people(tmp_path, NAMES), "--parts", "2", "--method", "random"]
    command += ["--out", str(tmp_path / "parts"), "--overwrite", "--quiet"]
    assert main(command) == 0
    assert capsys.readouterr().err == (
        "no features: 2 columns stay attributes of their own; make x of them by --features age "
        "income\n"
    )
    assert main([*command, "--features", "age"]) == 0
    assert capsys.readouterr().err == ""


def test_columns_become_features(tmp_path):
    source = people(tmp_path, NAMES)
    data = load_graph(source, feature_columns="income a*")
    assert data.x.dtype == torch.float32
    assert data.x.tolist() == [[0.0, 0.0], [2.0, 1.0], [4.0, 2.0], [6.0, 3.0]]
    assert "age" not in data and "income" not in data
    with pytest.raises(ValueError, match=r"there is no column 'height'.*'y', 'age', 'income'"):
        load_graph(source, feature_columns="height")


WRONG = {
    "unknown": (
        "id\na\n",
        "source,target\na,b\n",
        "'target' of .* names node 'b', which .* lacks",
    ),
    "number": ("id\n5\n", "source,target\n5,6\n", "'target' of .* names node 6, which"),
    "twice": ("id\na\na\n", "source,target\na,a\n", "names node 'a' more than once"),
    "no ids": ("y\n1\n", "source,target\na,a\n", "'source' of .* no column of such ids"),
    "empty": ("id\na\n", "source,target\na,a\na,\n", "'target' of .* has rows without a value"),
    "floats": ("id\n2.0\n0.0\n1.0\n", "source,target\n2,0\n", "'id' of .* below 2.*got float64"),
    "two ids": ("node,id\n0,1\n1,0\n", "source,target\n1,0\n", "columns 'node' and 'id', and only"),
    "text": ("id,y,z,k\na,u,v,1\n", "source,target\na,a\n", r"got 'y' \(string\), 'z' \(string\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tables_are_named(name, tmp_path):
    nodes, edges, message = WRONG[name]
    write(tmp_path, nodes=nodes, edges=edges)
    with pytest.raises(ValueError, match=message):
        load_graph(str(tmp_path))


def test_ends_of_other_kinds_are_named(tmp_path):
    write(tmp_path, mixed="source,target\n1,a\n0,b\n", none="source,target\n")
    with pytest.raises(ValueError, match="'source' and 'target' of .* name nodes alike"):
        load_graph(f"{tmp_path}/mixed.csv")
    assert load_graph(f"{tmp_path}/none.csv").num_nodes == 0
    for first, problem in ((2**63, "below 2.*got uint64"), ([1, 2], "got lists"), (9, "")):
        numbers = pyarrow.array([first], None if problem == "got lists" else "uint64")
        parquet.write_table(
            pyarrow.table({"source": numbers, "target": numbers}), tmp_path / "of.parquet"
        )
        with pytest.raises(ValueError, match=problem) if problem else nullcontext():
            assert load_graph(f"{tmp_path}/of.parquet").node_name.tolist() == [9]


def test_relations_with_text_are_refused(tmp_path):
    for name, tables in {
        "user": {"nodes": "id\na\nb\n"},
        "user__likes__user": {"edges": ""},
    }.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, **tables)
    with pytest.raises(ValueError, match="ids of the nodes in .*user' to be 0, 1, 2"):
        load_graph(str(tmp_path))
    (tmp_path / "user" / "nodes.csv").write_text("y\n1\n2\n")
    (tmp_path / "user__likes__user" / "edges.csv").write_text("source,target\na,b\n")
    with pytest.raises(
        ValueError, match="'source' of .* holds text, and there is no table of nodes"
    ):
        load_graph(str(tmp_path))


@pytest.mark.parametrize(
    ("suffix", "ids"), [(".csv", NAMES), (".parquet", [9, 5, 7, 1]), (".parquet", None)]
)
def test_predictions_have_the_ids_of_the_tables(suffix, ids, tmp_path):
    data = load_graph(people(tmp_path, ids or [0, 1, 2, 3]), feature_columns="age income")
    part = torch.tensor([2, 0, 2, 0])  # The second of three has no nodes.
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", part)
    path = tmp_path / f"out{suffix}"

    def worker() -> None:
        part = pyg_sar.load_partition(tmp_path / "parts")
        names = part.get("node_name")
        own = None if names is None else names.to_local()
        write_table(3 * part.x.to_local(), part.x.rows.ids, own, path)

    workers(worker, 3)
    read = csv.read_csv if suffix == ".csv" else parquet.read_table
    table = read(path).to_pydict()
    assert list(table) == ["id", "out_0", "out_1"]
    assert table["id"] == (ids or [0, 1, 2, 3])
    assert np.array_equal([table["out_0"], table["out_1"]], 3 * data.x.T)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "links.csv",
        path.name,
        "parts",
        "people.csv",
    ]
