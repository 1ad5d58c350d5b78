"""Partition files that another program wrote, with checksums that fit: refused, or the same graph.

Mutations are drawn from a fixed seed. Each either raises one :class:`PartitionError` on every
worker, or loads to the data of the original.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from combinations import everything
from hetero_graphs import make_hetero, random_parts
from oracle import make_graph, parts, whole
from safetensors.torch import load, save_file
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.data.data import BaseData

import pyg_sar
import pyg_sar.partition.storage as storage
from pyg_sar.errors import PartitionError
from pyg_sar.partition.metadata import METADATA, read_metadata
from pyg_sar.partition.parts import decode_attributes
from pyg_sar.partition.storage import merge_partitions, part_file, read_part

WORLD = 3
PER_GRAPH = 75 if everything() else 30  # mutations of each kind of graph and of file


def make_homogeneous() -> Any:
    data = make_graph()
    data.sparse = torch.eye(40, 7).to_sparse_csr()
    data.pairs = {("a", 1): [(2, 3.5)]}
    data.batch = torch.arange(40) // 14
    data.small = torch.arange(40).to(torch.float8_e4m3fn)
    data.wave = torch.randn(40, dtype=torch.complex64)
    data.numbers = np.arange(7, dtype=np.float32)
    data.scale, data.title, data.pair = torch.tensor(2.5), "a graph", (1, 2)
    data.train_idx = torch.tensor([33, 2, 7, 7, 0, 39, 12], dtype=torch.int32)
    data.train_y = torch.arange(7) * 100
    data.split_idx = {"train": torch.tensor([1, 31, 2]), "test": torch.tensor([30, 5])}
    data.array_idx = np.array([9, 3, 21, 9], dtype=np.int16)
    data.edge_label_index = torch.arange(60).view(2, 30) % 40
    data.edge_label = torch.randn(30, dtype=torch.float64)
    return data


def make_several() -> HeteroData:
    data = make_hetero()
    data["paper"].bag = torch.eye(21, 7).to_sparse_csr()
    data["paper"].note, data.title = "of papers", "whole"
    data["paper"].train_idx = torch.tensor([20, 0, 3, 3])
    data["paper"].split_idx = {"train": torch.tensor([7, 1]), "test": torch.tensor([2])}
    data["paper"].pair_index = torch.tensor([[3, 20, 5], [20, 0, 0]])
    relation = data["author", "writes", "paper"]
    relation.edge_label_index = torch.stack([torch.arange(30) % 13, torch.arange(30) % 21])
    relation.edge_label = torch.randn(30)
    return data


GRAPHS: dict[str, Callable[[], Any]] = {"plain": make_homogeneous, "hetero": make_several}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_flush", lambda path: None)


@pytest.fixture(scope="module", params=GRAPHS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = GRAPHS[request.param]()
    method = random_parts(data, WORLD) if isinstance(data, HeteroData) else "random"
    root = tmp_path_factory.mktemp("forged") / "parts"
    pyg_sar.write_partitions(data, WORLD, root, method)
    return root


def leaves(data: BaseData) -> dict[str, Any]:
    """Everything that a data object holds, by name."""
    found = {}
    for number, store in enumerate(data.stores):
        for name, value in store.items():
            if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
                parts = value.crow_indices(), value.col_indices(), value.values()
                found |= {f"{number}.{name}.{k}": part for k, part in enumerate(parts)}
            elif isinstance(value, dict):
                found |= {f"{number}.{name}.{key}": part for key, part in value.items()}
            else:
                found[f"{number}.{name}"] = value
    return found


def assert_same(found: BaseData, expected: BaseData, what: Any) -> None:
    left, right = leaves(found), leaves(expected)
    assert left.keys() == right.keys(), what
    for name, value in right.items():
        other = left[name]
        assert type(other) is type(value), (what, name)
        if isinstance(value, Tensor):
            plain = [t.as_subclass(Tensor).reshape(-1).contiguous() for t in (other, value)]
            bits = [t.view(torch.uint8) for t in plain]
            assert other.dtype == value.dtype and other.shape == value.shape, (what, name)
            assert torch.equal(*bits), (what, name)
        elif isinstance(value, np.ndarray):
            assert other.dtype == value.dtype and (other == value).all(), (what, name)
        else:
            assert other == value, (what, name)


# Mutations of tensors ########################################################

STRUCTURE = (
    *("n_id", "e_id", "halo_n_id", "halo_counts", "send_index", "send_counts"),
    *("cover_edges", "place"),
)
"""Tensors of which every other value can be told from the right one."""
RANGES = ("edge_index", "crow", "col", "ids")
"""Tensors of which values out of range can be told: others are those of another graph."""


def mutated(tensors: dict[str, Tensor], rng: random.Random) -> str:
    """Changes one tensor; returns what was done."""
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    ways = ["drop", "rename", "dtype", "view", "shape", "longer", "shorter", "transpose"]
    last = re.split(r"[/.:]", name)[-1]
    indices = last in STRUCTURE + RANGES and tensor.numel() > 0
    way = rng.choice([*ways, *["value"] * 8]) if indices else rng.choice(ways)
    if way == "drop":
        del tensors[name]
    elif way == "rename":
        tensors[name + "x"] = tensors.pop(name)
    elif way == "dtype":
        kinds = torch.int32, torch.int64, torch.float32, torch.float64, torch.bool, torch.uint8
        kind = rng.choice([kind for kind in kinds if kind != tensor.dtype])
        tensors[name] = tensor.to(kind)
    elif way == "view":
        same = {1: torch.int8, 2: torch.bfloat16, 4: torch.int32, 8: torch.float64}
        kind = same[tensor.element_size()]
        kind = torch.uint32 if kind == tensor.dtype == torch.int32 else kind
        tensors[name] = tensor.view(torch.uint64 if kind == tensor.dtype else kind)
    elif way == "shape":
        tensors[name] = tensor.unsqueeze(rng.randrange(tensor.dim() + 1)).contiguous()
    elif way == "transpose":
        tensors[name] = tensor.flatten().clone() if tensor.dim() != 1 else tensor.view(-1, 1)
    elif way in ("longer", "shorter"):
        rows = tensor if tensor.dim() else tensor.view(1)
        tensors[name] = torch.cat([rows, rows[:1]]) if way == "longer" else rows[1:].clone()
    if way == "value":
        tensors[name] = _other_value(tensor.clone(), rng, last in STRUCTURE)
    return f"{way} {name}"


def _other_value(tensor: Tensor, rng: random.Random, exact: bool) -> Tensor:
    flat, place = tensor.view(-1), rng.randrange(tensor.numel())
    old = int(flat[place])
    choices = [-1, 2**31 - 1, -(2**31)]
    if exact:
        choices += [old + 1, old - 1, 0, int(flat.max()) + 1]
    if tensor.dtype == torch.int64:
        choices += [2**63 - 1, -(2**63), 2**32 + old]
    flat[place] = rng.choice([value for value in choices if value != old])
    return tensor


# Mutations of metadata #######################################################

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**30, 2.5, float("nan"), "", "x", "float32", "tensor", "node"),
    *("edge", "csr", [], {}, [1], [-1, 2, 3], [[1]], {"a": 1}, ["x"], "torch", "int32", "qint8"),
)
FREE = ("name", "key", "dtype", "form")
"""Texts of a list of node ids: others that fit are those of another graph."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each value of a JSON document stands."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name, inner in value.items():
            found += places(inner, (*path, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            found += places(inner, (*path, number))
    return found


def other_metadata(content: dict[str, Any], rng: random.Random) -> str:
    """Changes one field; returns what was done."""
    path = rng.choice([p for p in places(content) if p[0] != "values" and "values" not in p[:-1]])
    inner: Any = content
    for step in path[:-1]:
        inner = inner[step]
    if rng.random() < 0.2:
        del inner[path[-1]]
        return f"drop {path}"
    old = inner[path[-1]]
    choices = [value for value in VALUES if repr(value) != repr(old)]
    if "lists" in path and path[-1] in FREE:
        choices = [value for value in choices if not isinstance(value, str)]
    if type(old) is int:
        choices += [old + 1, old - 1, float(old), str(old)]
    inner[path[-1]] = value = rng.choice(choices)
    return f"{path}: {old!r} is {value!r}"


# The fuzzer ##################################################################


Original = tuple[BaseData, list[BaseData]]
"""The whole graph, as it is read without workers, and as each of them has it, if they can."""


def original_of(root: Path) -> Original:
    whole = merge_partitions(root)
    return whole, parts(gathered, WORLD, root)


def gathered(root: Path) -> BaseData:
    """What a worker loads, of which it gathers all rows."""
    data = pyg_sar.load_partition(root)
    for store in data.stores:
        for name, value in list(store.items()):
            some = isinstance(value, dict)
            store[name] = {k: whole(v) for k, v in value.items()} if some else whole(value)
    return data


def write_part(root: Path, part: int, tensors: dict[str, Tensor]) -> None:
    content = metadata_of(root)
    row = storage._write_part(root, tensors, part, WORLD)
    content["parts"][part] |= {"sha256": row["sha256"], "bytes": row["bytes"]}
    storage._write_metadata(root, content)


def load_file(path: Path) -> dict[str, Tensor]:
    """A part's tensors, which do not change with the file."""
    tensors = load(path.read_bytes()).items()
    return {name: tensor.clone() for name, tensor in tensors if not name.startswith("filler.")}


def metadata_of(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / METADATA).read_text())
    del content["checksum"]
    return content


def all_parts(root: Path) -> BaseData:
    """Everything that can be read from a folder without workers."""
    metadata = read_metadata(root)
    for p in range(metadata.num_parts):
        tensors = read_part(root, p, metadata=metadata)
        decode_attributes(metadata.attributes, metadata.stores[0].values, tensors)
    return merge_partitions(root)


def outcome(root: Path, original: Original, what: str) -> str:
    """What reading a mutated folder gives: ``'refused'``, or ``'same'``; all else fails."""
    try:
        found = all_parts(root)
    except PartitionError as error:
        assert str(root) in str(error), (what, error)
        return "refused"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert_same(found, original[0], what)
    return loaded(root, original[1], what) if original[1] else "same"


def loaded(root: Path, expected: list[BaseData], what: str) -> str:
    """What workers get of a folder that merges to the original."""

    def worker() -> Any:
        try:
            return gathered(root)
        except PartitionError as error:
            return str(error)

    found = parts(worker, WORLD)
    if isinstance(found[0], str):
        assert len(set(found)) == 1, what
        return "refused"
    for data, right in zip(found, expected, strict=True):
        assert_same(data, right, what)
    return "same"


def test_mutated_tensors_are_refused_or_the_same(written: Path, tmp_path: Path):
    expected, rng = original_of(written), random.Random(1)
    original = [load_file(written / part_file(p, WORLD)) for p in range(WORLD)]
    root = Path(shutil.copytree(written, tmp_path / "parts"))
    found = []
    for _ in range(PER_GRAPH):
        part = rng.randrange(WORLD)
        tensors = dict(original[part])
        what = f"part {part}: {mutated(tensors, rng)}"
        write_part(root, part, tensors)
        found.append(outcome(root, expected, what))
        save_file(original[part], root / part_file(part, WORLD))
        shutil.copy(written / METADATA, root / METADATA)
    assert found.count("refused") > 0.8 * len(found)


def test_mutated_metadata_is_refused_or_the_same(written: Path, tmp_path: Path):
    expected, rng = original_of(written), random.Random(2)
    root = Path(shutil.copytree(written, tmp_path / "parts"))
    original = metadata_of(written)
    found = []
    for _ in range(PER_GRAPH):
        content = copy.deepcopy(original)
        what = other_metadata(content, rng)
        storage._write_metadata(root, content)
        found.append(outcome(root, expected, what))
    assert found.count("refused") > 0.8 * len(found)


# What one part alone does not show ###########################################


def swap(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Exchanges the first two values, which stay in range."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][:2] = tensors[name][:2].flip(0)

    return change


def other_row(prefix: str = "") -> Callable[[dict[str, Tensor]], None]:
    """Sends the neighbouring row: in range and ascending, but not what the peer asked for."""

    def change(tensors: dict[str, Tensor]) -> None:
        name, counts = f"{prefix}send_index", tensors[f"{prefix}send_counts"]
        index = tensors[name] = tensors[name].clone()
        ends = counts.cumsum(0) - 1
        last = int(ends[(counts > 0) & (index[ends] < tensors["n_id"].numel() - 1)][0])
        index[last] += 1

    return change


def twice(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][0] = tensors[name][1]

    return change


LINKS = 4  # edge_label_index of make_homogeneous()

CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "order of sent rows": (swap("send_index"), "'send_index' of .*its values don't ascend"),
    "another row is sent": (other_row(), r"Parts \d and \d of .* don't belong together"),
    "an edge twice": (twice("e_id"), "don't hold each node and edge of the graph once"),
    "order of a list": (swap("list.0:place"), "'list.0:place' of .*its values don't ascend"),
    "a pair twice": (twice(f"list.{LINKS}:place"), "or each entry of a list of node ids"),
    "another row for pairs": (other_row(f"list.{LINKS}:"), r"Parts \d and \d of .* don't belong"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_rows_in_range_are_one_error_on_every_worker(name: str, tmp_path: Path):
    pyg_sar.write_partitions(make_homogeneous(), WORLD, tmp_path / "parts", "random")
    change, text = CHANGES[name]
    tensors = load_file(tmp_path / "parts" / part_file(1, WORLD))
    change(tensors)
    write_part(tmp_path / "parts", 1, tensors)

    def worker() -> str:
        with pytest.raises(PartitionError, match=text) as caught:
            pyg_sar.load_partition(tmp_path / "parts")
        return str(caught.value)

    assert len(set(parts(worker, WORLD))) == 1


LISTS: dict[str, tuple[int, str, Any, str]] = {
    "the name of an attribute": (0, "name", "x", r"lists and rows of different names.*'x'"),
    "the name of a row": (0, "name", "edge_label", "lists and rows of different names"),
    "a name of PyG's": (0, "name", "_mapping", "lists and rows of other names"),
    "a key twice": (2, "key", "test", "one list for each key of 'split_idx'"),
    "a list among keys": (2, "key", None, "one list for each key of 'split_idx'"),
    "pairs of floats": (LINKS, "dtype", "float64", "'lists.4..attribute.dtype' to be one of int8"),
    "ids beyond the dtype": (0, "dtype", "int8", "names nodes beyond int8, .* of 'train_idx'"),
    "pairs beyond the dtype": (LINKS, "dtype", "int8", "beyond int8, .* 'edge_label_index'"),
}


def test_lists_that_another_program_described(tmp_path: Path):
    data = make_graph(300)
    data.train_idx, data.array_idx = torch.tensor([5, 299, 290]), np.array([3])
    data.split_idx = {"train": torch.tensor([1]), "test": torch.tensor([2])}
    data.edge_label_index, data.edge_label = torch.tensor([[1, 290], [2, 3]]), torch.ones(2)
    pyg_sar.write_partitions(data, 1, tmp_path / "parts")
    original = metadata_of(tmp_path / "parts")
    order = ["train_idx", "array_idx", "split_idx", "split_idx", "edge_label_index"]
    assert [row["name"] for row in original["lists"]] == order
    for name, (number, field, value, text) in LISTS.items():
        content = copy.deepcopy(original)
        row = content["lists"][number]
        (row["attribute"] if field == "dtype" else row)[field] = value
        storage._write_metadata(tmp_path / "parts", content)
        with pytest.raises(PartitionError, match=text):
            merge_partitions(tmp_path / "parts")
            raise AssertionError(name)


def test_attributes_are_not_those_of_the_object_that_holds_them(tmp_path: Path):
    """PyG would set ``data._store._mapping``: all other attributes were gone, without a word."""
    pyg_sar.write_partitions(make_graph(), 1, tmp_path / "parts")
    content = metadata_of(tmp_path / "parts")
    plain = {"level": "graph", "layout": "json", "dtype": "json", "shape": [], "dim": 0}
    content["attributes"]["_mapping"] = {**plain, "form": "coded"}
    content["values"]["_mapping"] = {"dict": []}
    storage._write_metadata(tmp_path / "parts", content)
    for read in (pyg_sar.load_partition, merge_partitions):
        with pytest.raises(PartitionError, match="'attributes._mapping' to be .* another name"):
            read(tmp_path / "parts")
