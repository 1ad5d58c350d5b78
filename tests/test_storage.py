"""The partition format: what is written comes back, and nothing damaged is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from combinations import everything
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ended
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import pyg_sar.partition.storage as storage
from pyg_sar.errors import PartitionError
from pyg_sar.partition.metadata import METADATA, read_metadata
from pyg_sar.partition.parts import decode_attributes
from pyg_sar.partition.storage import (
    merge_partitions,
    part_file,
    read_part,
    write_partitions,
)

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint16, torch.uint32, torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random values of a dtype, without NaN."""
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(2 if dtype == torch.bool else 100, shape).to(dtype)


def random_sparse(rows: int, columns: int, layout: torch.layout) -> torch.Tensor:
    dense = torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.3)
    return dense.to_sparse(layout=layout)


def random_data(num_nodes: int, num_edges: int, seed: int) -> Data:
    """A graph with self loops, duplicate edges, isolated nodes and one attribute of each kind."""
    torch.manual_seed(seed)
    data = Data(num_nodes=num_nodes, edge_index=torch.randint(num_nodes, (2, num_edges)))
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        data[f"node_{name}"] = random_tensor((num_nodes, 2), dtype)
        data[f"edge_{name}"] = random_tensor((num_edges,), dtype)
        data[f"graph_{name}"] = random_tensor((50, 3), dtype)
    data.x = random_sparse(num_nodes, 5, [torch.sparse_csr, torch.sparse_coo][seed % 2])
    data.edge_sparse = random_sparse(num_edges, 3, torch.sparse_csc)
    data.train_mask = torch.rand(num_nodes, 3) < 0.5
    data.edge_weight = torch.rand(num_edges)
    data.node_index = torch.randint(9, (2, num_nodes))  # PyG: nodes run along the last dimension.
    data.titles, data.array = ["nöde", ""] * 25, np.arange(50) / 2
    data.scalar = torch.tensor(2.5)
    data.name, data.note = "a graph", {"list": [1, 2.5, None, True], "text": "é"}
    return data


def assert_equal(a: Any, b: Any, name: str = "") -> None:
    """Same type, dtype, layout and values."""
    assert type(a) is type(b), (name, type(a), type(b))
    if isinstance(a, SparseTensor):
        assert a.sizes() == b.sizes()
        for left, right in zip(a.csr(), b.csr(), strict=True):
            assert_equal(left, right, name)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.layout, a.shape) == (b.dtype, b.layout, b.shape), name
        if a.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.dtype.itemsize == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        assert torch.equal(a, b), name
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b), name
    else:
        assert a == b, name


def assert_same_data(a: Data, b: Data) -> None:
    assert a.num_nodes == b.num_nodes
    left, right = a.to_dict(), b.to_dict()
    assert left.keys() - {"num_nodes"} == right.keys() - {"num_nodes"}
    for name in left.keys() - {"num_nodes"}:
        assert_equal(left[name], right[name], name)


def folder_bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir())}


def small_data() -> Data:
    edge_index = torch.tensor([[0, 1, 2, 3, 3, 0], [1, 2, 3, 0, 1, 0]])
    return Data(x=torch.randn(4, 2), edge_index=edge_index, y=torch.tensor([0, 1, 0, 1]))


@pytest.fixture
def root(tmp_path) -> Path:
    """A partition of :func:`small_data` in 2 parts."""
    write_partitions(small_data(), 2, tmp_path / "parts", "contiguous")
    return tmp_path / "parts"


# Round trip ###################################################################


@settings(max_examples=60 if everything() else 12)
@given(
    num_nodes=st.integers(1, 12),
    num_edges=st.integers(0, 30),
    num_parts=st.integers(1, 6),
    method=st.sampled_from(["balanced", "metis", "random", "contiguous", "vector"]),
    seed=st.integers(0, 2**16),
)
def test_round_trip_and_format(num_nodes, num_edges, num_parts, method, seed):
    data = random_data(num_nodes, num_edges, seed)
    if method == "vector":
        method = torch.randint(num_parts, (num_nodes,))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "parts"
        plain = {"node_index": False}  # Its values are no ids, whatever its name says.
        statistics = write_partitions(data, num_parts, root, method, seed, node_ids=plain)
        metadata = read_metadata(root)
        parts = [read_part(root, p) for p in range(num_parts)]
        assert metadata.statistics == statistics
        check_format(data, parts)
        check_attributes(data, metadata, parts)
        assert_same_data(data, merge_partitions(root))


def check_format(data: Data, parts: list[dict[str, torch.Tensor]]) -> None:
    """The definitions of the format, one by one."""
    owner = torch.full((data.num_nodes,), -1)
    for p, part in enumerate(parts):
        assert torch.equal(part["n_id"], part["n_id"].sort().values)
        assert bool((owner[part["n_id"]] == -1).all())
        owner[part["n_id"]] = p
    assert bool((owner >= 0).all())
    assert torch.cat([part["e_id"] for part in parts]).sort().values.tolist() == list(
        range(data.num_edges)
    )
    for p, part in enumerate(parts):
        ids = torch.cat([part["n_id"], part["halo_n_id"]])
        source, target = part["edge_index"]
        edges = torch.stack([ids[source], ids[target]])
        assert torch.equal(edges, data.edge_index[:, part["e_id"]])
        assert bool((target < part["n_id"].numel()).all())
        came_from = owner[edges[0]]
        rows = zip(
            *(((came_from - p) % len(parts)).tolist(), edges[1].tolist(), came_from.tolist()),
            *(edges[0].tolist(), part["e_id"].tolist()),
            strict=True,
        )
        rows = list(rows)
        assert rows == sorted(rows)
        halo_owner = owner[part["halo_n_id"]]
        halo = list(zip(halo_owner.tolist(), part["halo_n_id"].tolist(), strict=True))
        remote = edges[0][owner[edges[0]] != p]
        assert halo == sorted({(int(owner[v]), int(v)) for v in remote})
        assert torch.equal(part["halo_counts"], torch.bincount(halo_owner, minlength=len(parts)))
        assert part["halo_counts"][p] == 0 == part["send_counts"][p]
    for p, part in enumerate(parts):
        sends = part["n_id"][part["send_index"]].split(part["send_counts"].tolist())
        for q, rows in enumerate(sends):
            wanted = parts[q]["halo_n_id"].split(parts[q]["halo_counts"].tolist())[p]
            assert torch.equal(rows, wanted)


def check_attributes(data: Data, metadata: Any, parts: list[dict[str, torch.Tensor]]) -> None:
    for part in parts:
        own = decode_attributes(metadata.attributes, metadata.stores[0].values, part)
        n_id, e_id = part["n_id"], part["e_id"]
        assert_equal(own["node_bfloat16"], data.node_bfloat16[n_id])
        assert_equal(own["node_index"], data.node_index[:, n_id])
        assert_equal(own["train_mask"], data.train_mask[n_id])
        assert_equal(own["edge_weight"], data.edge_weight[e_id])
        assert_equal(own["x"].to_dense(), data.x.to_dense()[n_id])
        assert_equal(own["graph_int8"], data.graph_int8)
        assert own["note"] == data.note
        # The names of the format, for those who read the file without this package.
        assert torch.equal(part["edge.edge_weight"], data.edge_weight[e_id])
        assert part["node.x.crow"].numel() == n_id.numel() + 1


@pytest.mark.parametrize("name", ["cora.npz", "minesweeper.npz", "snap_cit_hepph.npz"])
def test_real_graphs(name, shared_data, tmp_path):
    with np.load(shared_data(name), allow_pickle=False) as file:
        data = Data(
            edge_index=torch.from_numpy(file["edge_index"].astype(np.int64)),
            num_nodes=int(file["num_nodes"]),
            **{key: torch.from_numpy(file[key]) for key in ("x", "y", "train_mask") if key in file},
        )
    statistics = write_partitions(data, 4, tmp_path / "parts")
    random = write_partitions(data, 4, tmp_path / "random", "random")
    assert statistics.edge_cut < random.edge_cut / 1.5
    assert statistics.balance["nodes"] <= 1.1 and statistics.balance["edges"] <= 1.1
    assert_same_data(data, merge_partitions(tmp_path / "parts"))


def test_data_without_features_or_edges(tmp_path):
    for k, data in enumerate(
        [
            Data(num_nodes=0, x=torch.empty(0, 3), edge_index=torch.empty(2, 0).long()),
            Data(num_nodes=5),
            Data(num_nodes=5, edge_index=torch.empty(2, 0, dtype=torch.long)),
            Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=9),
        ]
    ):
        statistics = write_partitions(data, 3, tmp_path / str(k))
        assert sum(statistics.nodes) == data.num_nodes
        merged = merge_partitions(tmp_path / str(k))
        assert merged.num_nodes == data.num_nodes and merged.num_edges == data.num_edges


def test_number_of_nodes_is_inferred_as_pyg_does(tmp_path):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]))
    with pytest.warns(UserWarning, match="num_nodes"):
        statistics = write_partitions(data, 2, tmp_path / "parts")
    assert sum(statistics.nodes) == 3


def test_stale_attribute_levels_of_pyg_are_not_trusted(tmp_path):
    data = Data(num_nodes=3, edge_index=torch.zeros(2, 4, dtype=torch.long), note=torch.zeros(5))
    assert not data.is_node_attr("note")
    data.num_nodes = 5
    write_partitions(data, 2, tmp_path / "parts")
    assert read_metadata(tmp_path / "parts").attributes["note"].level == "node"


def test_the_tensor_subclasses_of_pyg(tmp_path):
    data = small_data()
    plain = data.edge_index
    data.edge_index = EdgeIndex(plain, sparse_size=(4, 4))
    data.group = Index([0, 1, 1, 2], dim_size=3)
    write_partitions(data, 2, tmp_path / "parts")
    merged = merge_partitions(tmp_path / "parts")
    assert_equal(merged.edge_index, plain)
    assert_equal(merged.group, torch.tensor([0, 1, 1, 2]))


def test_many_parts_most_of_them_empty(tmp_path):
    data = Data(x=torch.randn(20, 2), edge_index=torch.randint(20, (2, 60)))
    write_partitions(data, 50, tmp_path / "parts")
    metadata = read_metadata(tmp_path / "parts")
    check_format(data, [read_part(tmp_path / "parts", p, metadata=metadata) for p in range(50)])
    assert_same_data(data, merge_partitions(tmp_path / "parts"))


def test_int32_edges_shared_storage_and_gradients(tmp_path):
    data = small_data()
    data.edge_index = data.edge_index.int()
    data.x.requires_grad_()
    data.mirror = data.x  # Two attributes in one storage.
    write_partitions(data, 2, tmp_path / "parts")
    merged = merge_partitions(tmp_path / "parts")
    assert_equal(merged.edge_index, data.edge_index.long())
    assert_equal(merged.x, data.x.detach())
    assert_equal(merged.mirror, data.x.detach())


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs the extra 'sparse' (torch-sparse)")
@pytest.mark.parametrize("values", [True, False])
def test_torch_sparse_features(tmp_path, values):
    data = small_data()
    value = torch.rand(5) if values else None
    data.x = SparseTensor(
        row=torch.tensor([0, 0, 2, 3, 3]),
        col=torch.tensor([1, 2, 0, 1, 2]),
        value=value,
        sparse_sizes=(4, 3),
    )
    write_partitions(data, 2, tmp_path / "parts", "random")  # Infers 4 nodes from x.
    data.num_nodes = 4
    assert_same_data(data, merge_partitions(tmp_path / "parts"))


def test_uncoalesced_features_are_summed(tmp_path):
    data = small_data()
    data.x = torch.sparse_coo_tensor([[1, 1, 3], [0, 0, 1]], [1.0, 2.0, 4.0], (4, 2))
    write_partitions(data, 2, tmp_path / "parts")
    assert_equal(merge_partitions(tmp_path / "parts").x, data.x.coalesce())


def test_unsorted_columns_and_duplicates_are_put_in_order(tmp_path):
    data = small_data()
    matrix = ([0, 2, 2, 2, 5], [1, 0, 1, 0, 1], [1.0, 2.0, 4.0, 8.0, 16.0], (4, 2))
    data.x = torch.sparse_csr_tensor(*map(torch.tensor, matrix[:3]), matrix[3])
    write_partitions(data, 2, tmp_path / "parts")
    merged = merge_partitions(tmp_path / "parts").x
    assert merged.to_dense().tolist() == [[2.0, 1.0], [0.0, 0.0], [0.0, 0.0], [8.0, 20.0]]
    assert merged.col_indices().tolist() == [0, 1, 0, 1]


# What can't be stored #########################################################


def crooked(layout: torch.layout, last: int = 2) -> torch.Tensor:
    """A matrix ``[4, 3]`` that torch makes without a look at its offsets and entries."""
    rows = 4 if layout == torch.sparse_csr else 3
    offsets = torch.tensor([0, *[1] * (rows - 1), last])
    entries = torch.tensor([0, 7]), torch.ones(2)
    return torch.sparse_compressed_tensor(
        offsets, *entries, (4, 3), layout=layout, check_invariants=False
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(3, 2)}, "'x' to have one row per node, 4 rows.*shape \\[3, 2\\]"),
        ({"edge_weight": torch.zeros(4)}, "'edge_weight' to have one row per edge, 6 rows"),
        ({"edge_index": None, "edge_attr": torch.ones(6, 1)}, "of 6 edges .* no 'edge_index'"),
        ({"edge_index": torch.zeros(2, 6)}, "'edge_index' to hold integers.*float32.*long"),
        ({"edge_index": torch.zeros(3, 6).long()}, "shape \\[2, num_edges\\] \\(got \\[3, 6\\]"),
        ({"edge_index": torch.tensor([[0], [4]])}, "ids 0 to 3 \\(got 0 to 4\\)"),
        ({"edge_index": torch.tensor([[-1], [0]])}, "got -1 to 0"),
        ({"edge_index": torch.ones(2, 3).long().to_sparse()}, "got a matrix in torch.sparse_coo"),
        ({"train_mask": torch.tensor([1, 0, 1, 0])}, "'train_mask'.*a mask is bool.*int64"),
        ({"val_mask": torch.ones(3, dtype=torch.bool)}, "'val_mask' to have one row per node"),
        ({"x": crooked(torch.sparse_csr)}, "'x' .*expected columns 0 to 2 .*got 0 to 7"),
        ({"x": crooked(torch.sparse_csc)}, "'x' .*expected rows 0 to 3 .*got 0 to 7"),
        ({"x": crooked(torch.sparse_csr, 9)}, "'x' .*offsets of a sparse matrix to ascend from 0"),
        ({"edge_index": [[0], [1]]}, "'edge_index' to be a tensor \\(got list\\)"),
        ({"n_id": torch.arange(4)}, "'n_id' has the name of the global ids.*rename"),
        ({"thing": object()}, "'thing' \\(object\\) can't be stored.*delete"),
        ({"pair": {1: object()}}, "'pair' \\(dict\\) can't be stored"),
        ({"pair": {"a": (1, {2})}}, "'pair' \\(dict\\) can't be stored"),
        ({"mixed": [1, "a", 2.0, None]}, "'mixed' \\(list\\).*those of a tensor"),
        ({"objects": np.array([None] * 4)}, "'objects' \\(ndarray\\) can't be stored"),
        ({"adj_t": torch.eye(4).to_sparse_csr()}, "sparse attribute 'adj_t' of shape \\[4, 4\\]"),
        (
            {
                "edge_index": None,
                "edge_weight": torch.ones(4),
                "adj_t": 2 * torch.eye(4).to_sparse_csr(),
            },
            "'adj_t' holds weights, and there is 'edge_weight'",
        ),
        ({"edge_index": None, "adj": torch.eye(4).to_sparse_csr()}, "before ToSparseTensor"),
        ({"x": torch.eye(4).to_sparse(), "x.crow": torch.zeros(4)}, "stored as 'node.x.crow'"),
    ],
)
def test_what_cannot_be_stored_is_named(change, message, tmp_path):
    data = small_data()
    for name, value in change.items():
        data[name] = value
    data.num_nodes = 4
    with pytest.raises(ValueError, match=message):
        write_partitions(data, 2, tmp_path / "parts", "contiguous")
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_nodes_is_whole(tmp_path):
    """It was cut down to an integer."""
    for wrong in (4.5, -1):
        data = Data(edge_index=torch.tensor([[0], [0]]), num_nodes=wrong)
        with pytest.raises(ValueError, match=r"'data.num_nodes' to be an integer.*got"):
            write_partitions(data, 2, tmp_path / "parts")
    several = HeteroData()
    several["a"].num_nodes = 3.5
    with pytest.raises(ValueError, match=r"data\['a'\].num_nodes' to be an integer.*got 3.5"):
        write_partitions(several, 2, tmp_path / "parts")


def test_graphs_without_nodes(tmp_path):
    with pytest.raises(ValueError, match="no node type"):
        write_partitions(HeteroData(), 2, tmp_path / "parts")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="set data.num_nodes"):
        write_partitions(Data(), 2, tmp_path / "parts")


# Determinism and atomicity ####################################################


@pytest.mark.parametrize("method", ["metis", "random"])
def test_same_seed_same_bytes(method, tmp_path):
    data = random_data(40, 200, seed=1)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        plain = {"node_index": False}
        write_partitions(data, 3, tmp_path / name, method, seed, node_ids=plain)
    a, b, c = (folder_bytes(tmp_path / name) for name in "abc")
    assert a == b
    assert a.keys() == c.keys() and a[METADATA] != c[METADATA]


def test_an_existing_folder_is_kept_unless_told(root):
    before = folder_bytes(root)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_partitions(small_data(), 3, root)
    assert folder_bytes(root) == before
    write_partitions(small_data(), 3, root, overwrite=True)
    assert read_metadata(root).num_parts == 3
    assert len(list(root.iterdir())) == 4
    assert [path.name for path in root.parent.iterdir()] == [root.name]


def test_only_partitions_and_empty_folders_are_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="not a partition"):
        write_partitions(small_data(), 2, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    write_partitions(small_data(), 2, tmp_path / "empty")
    assert read_metadata(tmp_path / "empty").num_parts == 2
    (tmp_path / "empty" / "run.ckpt").write_text("weeks")
    with pytest.raises(FileExistsError, match="holds 'run.ckpt' too"):
        write_partitions(small_data(), 2, tmp_path / "empty", overwrite=True)
    assert (tmp_path / "empty" / "run.ckpt").read_text() == "weeks"
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        write_partitions(small_data(), 2, tmp_path / "file", overwrite=True)


def test_a_folder_that_cannot_be_made_is_known_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    with pytest.raises(NotADirectoryError, match="a file stands in its path"):
        write_partitions(small_data(), 2, tmp_path / "file" / "p", progress=lines.append)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(PermissionError, match="allow writing there"):
        write_partitions(small_data(), 2, tmp_path / "new" / "p", progress=lines.append)
    assert not lines and sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize("function", ["_write_part", "_write_metadata", "_flush", "_publish"])
def test_a_failed_write_leaves_nothing_new(function, root, monkeypatch):
    before = folder_bytes(root)

    def fail(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(storage, function, fail)
    with pytest.raises(OSError, match="No space left"):
        write_partitions(small_data(), 2, root, "random", overwrite=True)
    assert [path.name for path in root.parent.iterdir()] == [root.name]
    assert folder_bytes(root) == before
    with pytest.raises(OSError, match="No space left"):
        write_partitions(small_data(), 2, root.parent / "new")
    assert [path.name for path in root.parent.iterdir()] == [root.name]


def test_a_failed_rename_puts_the_old_folder_back(root, monkeypatch):
    before = folder_bytes(root)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if target == root and self.name != "replaced":
            raise OSError("Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_partitions(small_data(), 3, root, overwrite=True)
    assert folder_bytes(root) == before
    assert [path.name for path in root.parent.iterdir()] == [root.name]


@pytest.mark.parametrize("half", [False, True])
def test_a_killed_write_leaves_no_folder_that_loads(half, tmp_path, monkeypatch):
    """Before the metadata, or in the middle of them."""
    write = storage._write_metadata

    def die(folder: Path, content: dict[str, Any]) -> None:
        if half:
            write(folder, content)
            path = folder / METADATA
            path.write_text(path.read_text()[:-9])
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write_metadata", die)
        for _ in range(2):  # The second one removes what the first one left.
            assert ended(write_partitions, small_data(), 2, tmp_path / "parts") == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with pytest.raises(PartitionError):
        read_metadata(left / "parts")
    write_partitions(small_data(), 2, tmp_path / "parts")
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


# Damage #######################################################################


def test_flipped_bytes_and_truncations_are_noticed(root):
    """Each of the metadata with ``--all``."""

    def refused(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(PartitionError):
            for p in range(read_metadata(root).num_parts):
                read_part(root, p)

    for path in sorted(root.iterdir()):
        content = path.read_bytes()
        for position in range(0, len(content), 1 if everything() else 31):
            damaged = bytearray(content)
            damaged[position] ^= 1
            refused(path, damaged)
        for size in (*range(0, len(content), 13 if everything() else 131), len(content) - 1):
            refused(path, content[:size])
        refused(path, content + b"\0")
        path.write_bytes(content)
    merge_partitions(root)


def test_a_part_that_is_no_file_of_tensors(root):
    path = root / part_file(1, 2)
    path.write_bytes(b"\xff" * len(path.read_bytes()))
    with pytest.raises(PartitionError, match="can't be read"):
        read_part(root, 1, verify=False)


def test_a_forged_file_name_is_not_followed(root, tmp_path):
    """Checksums guard against accidents; a folder made on purpose must not reach outside."""
    (tmp_path / "secret").write_bytes((root / part_file(0, 2)).read_bytes())
    content = json.loads((root / METADATA).read_text())
    del content["checksum"]
    content["parts"][0]["file"] = "../secret"
    storage._write_metadata(root, content)
    (root / part_file(0, 2)).unlink()
    with pytest.raises(PartitionError, match="missing"):
        read_part(root, 0)


# Memory mapping ###############################################################


def test_parts_are_memory_mapped_and_writable(root):
    digest = hashlib.sha256((root / part_file(0, 2)).read_bytes()).hexdigest()
    tensors = read_part(root, 0)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc/self/maps on this system")
    assert str(root / part_file(0, 2)) in maps.read_text()
    assert str(root / part_file(1, 2)) not in maps.read_text()
    tensors["node.x"].fill_(7.0)  # Copy on write: the file stays.
    assert hashlib.sha256((root / part_file(0, 2)).read_bytes()).hexdigest() == digest
    shutil.rmtree(root)
    assert bool((tensors["node.x"] == 7.0).all())


def test_progress_is_told(tmp_path):
    lines: list[str] = []
    write_partitions(small_data(), 2, tmp_path / "parts", progress=lines.append)
    assert lines[0] == "assigning 4 nodes to 2 parts"
    assert lines[1] == "METIS"
    assert lines[-2:] == ["writing part 1 of 2", "writing part 2 of 2"]
