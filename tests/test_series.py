"""Snapshots of one graph: each worker reads its rows only; models equal one process."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import CHANNELS, TOLERANCE, error, make_graph, parts, whole, workers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv

import pyg_sar
from pyg_sar.errors import PartitionError
from pyg_sar.partition import add_attributes, load_series, merge_partitions

TIMES, NODES = 7, 40


class Sliced:
    """An array as zarr has them: shape, dtype and slices. It counts what is held at once.

    Args:
        values: What it says that it is.
        found: What it gives.
    """

    def __init__(self, values: Any, found: Any = None) -> None:
        self.shape, self.dtype, self.most = values.shape, values.dtype, 0
        self.values = values if found is None else found

    def __getitem__(self, key: slice) -> Any:
        self.most = max(self.most, len(range(*key.indices(len(self.values)))))
        return self.values[key]


def arrays() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 9, (TIMES, NODES)).astype(">i4")
    return {"y": y, "x": draw.standard_normal((TIMES, NODES, CHANNELS))}


def one_step(model: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = (model(x, edges).tanh() * y.unsqueeze(-1)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def train(root: Path, model: nn.Module, processes: int) -> list[Any]:
    """Single snapshots, then batches in a drawn order; and the bytes that were read."""
    comm = pyg_sar.init()
    data = pyg_sar.load_partition(root)
    series = load_series(root)
    assert len(series) == TIMES
    before = read_bytes()
    item = series[2]
    count = read_bytes() - before
    assert item.pop("snapshot") == 2
    expected = sum(t.nbytes for t in item.values())
    # The second term: what reading /proc/self/io itself counts.
    assert comm.host is not None or expected <= count <= expected + 300
    assert item["x"].shape == (data.x.to_local().size(0), CHANNELS)
    model, found = pyg_sar.distribute(copy.deepcopy(model)), []
    x, y = (pyg_sar.from_local(item[name], data) for name in ("x", "y"))
    found.append([whole(x), whole(y), *one_step(model, x, data.edge_index, y)])
    torch.manual_seed(5)
    for batch in DataLoader(series, 3, shuffle=True, num_workers=processes):
        x, y = (pyg_sar.from_local(batch[name], data, dim=1) for name in ("x", "y"))
        found.append([whole(x), whole(y), *one_step(model, x, data.edge_index, y)])
    return found


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("start", "world", "processes"),
    [(workers, 2, 2), (workers, 3, 0), (workers, 4, 0), (parts, 3, 0)],
)
def test_snapshots_equal_one_process(start: Any, world: int, processes: int, tmp_path: Path):
    data, series = make_graph(), arrays()
    pyg_sar.write_partitions(data, world, tmp_path / "p", "random", series=series)
    model = SAGEConv(CHANNELS, 3).double()
    numbers = [torch.from_numpy(series[name].astype(series[name].dtype.newbyteorder("="))) for name
               in ("x", "y")]  # fmt: skip
    torch.manual_seed(5)
    order = [torch.tensor(2), *DataLoader(range(TIMES), 3, shuffle=True)]
    for found in start(train, world, tmp_path / "p", model, processes):
        assert len(found) == len(order) == 4
        for mine, times in zip(found, order, strict=True):
            x, y = (t[times] for t in numbers)
            oracle = [x, y, *one_step(copy.deepcopy(model), x, data.edge_index, y)]
            for a, b in zip(mine, oracle, strict=True):
                assert error(a, b) < TOLERANCE


def train_on(root: Path, model: nn.Module, seeds: list[int], processes: int, look: bool) -> str:
    """Takes an order of snapshots that each worker draws by a seed of its own."""
    rank = pyg_sar.init().rank
    data, model = pyg_sar.load_partition(root), pyg_sar.distribute(copy.deepcopy(model))
    order = torch.Generator().manual_seed(seeds[rank])
    for batch in DataLoader(load_series(root), 2, True, generator=order, num_workers=processes):
        if look and rank == 1:
            assert batch["x"].size(0) == len(batch["snapshot"])  # On one worker, and no operation.
        x, y = (pyg_sar.from_local(rows, data, dim=1) for rows in (batch["x"], batch["y"]))
        try:
            one_step(model, (x - 1) / 2, data.edge_index, y)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("start", [workers, parts])
def test_workers_that_take_different_snapshots(start: Any, tmp_path: Path):
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "p", series=arrays())
    model = SAGEConv(CHANNELS, 3).double()
    given = tmp_path / "p", model, [5, 6]
    for text in (*start(train_on, 2, *given, 0, False), *start(train_on, 2, *given, 2, False)):
        assert "got different numbers" in text and "the number of a snapshot" in text
    assert start(train_on, 2, tmp_path / "p", model, [5, 5], 2, True) == ["", ""]


def test_arrays_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pyg_sar.partition import series as module

    monkeypatch.setattr(module, "_PIECE", 2 * NODES * CHANNELS * 8)
    given, same = Sliced(arrays()["x"]), arrays()["x"]
    for name, how in (("a", {}), ("b", {"memory": "1GiB"})):
        pyg_sar.write_partitions(make_graph(), 3, tmp_path / name, series={"x": given}, **how)
        found = np.empty_like(same)
        for p in range(3):
            ids = pyg_sar.partition.storage.read_part(tmp_path / name, p)["n_id"]
            mine = module.Series(tmp_path / name, p)
            found[:, ids] = np.stack([mine[t]["x"] for t in range(TIMES)])
        assert np.array_equal(found, same)
    assert given.most == 2
    merged: dict[str, Any] = {"x": np.empty_like(same)}
    graph = merge_partitions(tmp_path / "b", merged)
    assert np.array_equal(merged["x"], same) and torch.equal(graph.y, make_graph().y)
    made: dict[str, Any] = {}
    merge_partitions(tmp_path / "b", made)
    assert np.array_equal(made["x"], same) and made["x"].dtype == same.dtype
    with pytest.raises(ValueError, match=r"holds series \['x'\]: pass series=\{\}"):
        merge_partitions(tmp_path / "b")
    with pytest.raises(ValueError, match=r"series\['x'\] to have the shape \[7, 40, 6\]"):
        merge_partitions(tmp_path / "b", {"x": same[:3]})
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "a", overwrite=True)
    assert len(os.listdir(tmp_path / "a")) == 3


def test_what_is_refused(tmp_path: Path):
    data, x = make_graph(), arrays()["x"]
    for series, text in (
        ({"x": x[:, :9]}, r"series\['x'\] to have the shape \[T, 40, ...\]"),
        ({"x": x[:0]}, r"got \[0, 40, 6\]"),
        ({"x": torch.from_numpy(x)}, "is a tensor"),
        ({"x": x.astype("U4")}, "dtype <U4"),
        ({"snapshot": x}, "a name other than 'snapshot'"),
        (Sliced(x), "to be a dict of arrays .got Sliced.: of a group of zarr's"),
        ({"x": np.ma.masked_array(x, x > 2)}, r"series\['x'\]\[0:7\] has masked values"),
        ({"x": Sliced(x, x[:5])}, r"\[0:7\] gives float64 \[5, 40, 6\], not float64 \[7, 40, 6"),
        ({"x": Sliced(x, x[:, :, 1:])}, r"gives float64 \[7, 40, 5\], not float64 \[7, 40, 6"),
        ({"x": Sliced(x, x.astype("f4"))}, r"gives float32 \[7, 40, 6\], not float64 \[7, 40, 6"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            pyg_sar.write_partitions(data, 2, tmp_path / "p", series=series)
    hetero = HeteroData()
    hetero["a"].num_nodes = 40
    with pytest.raises(TypeError, match="got a HeteroData"):
        pyg_sar.write_partitions(hetero, 2, tmp_path / "p", series={"x": x})
    pyg_sar.write_partitions(data, 1, tmp_path / "p")
    with pytest.raises(PartitionError, match="holds no series"):
        load_series(tmp_path / "p")
    pyg_sar.write_partitions(data, 1, tmp_path / "p", series={"x": x}, overwrite=True)
    add_attributes(tmp_path / "p", {"extra": torch.zeros(40)}, tmp_path / "q")
    assert torch.equal(load_series(tmp_path / "q")[-1]["x"], torch.from_numpy(x[-1]))
    with pytest.raises(IndexError, match="there are 7 snapshots"):
        load_series(tmp_path / "q")[7]
    (file,) = (tmp_path / "q").glob("series-*")
    content = bytearray(file.read_bytes())
    content[3 * 1920 + 5] ^= 1
    file.write_bytes(content)
    assert torch.equal(load_series(tmp_path / "q")[2]["x"], torch.from_numpy(x[2]))
    with pytest.raises(PartitionError, match="altered: the checksum of snapshot 3 differs; copy"):
        load_series(tmp_path / "q")[3]
    content[-1] ^= 1
    for wrong, size in ((content, "13,468"), (b"short", "5")):
        file.write_bytes(wrong)
        with pytest.raises(
            PartitionError, match=f"has {size.replace(',', '')} bytes instead of 13,4"
        ):
            load_series(tmp_path / "q")
    rows = pyg_sar.load_partition(tmp_path / "p")
    with pytest.raises(ValueError, match="this worker's 40 of 40 rows"):
        pyg_sar.from_local(torch.zeros(2, 39, 1), rows, dim=1)
    with pytest.raises(ValueError, match="dim=3"):
        pyg_sar.from_local(torch.zeros(40), rows, dim=3)
