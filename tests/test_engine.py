"""A kernel and a row source of one's own: each is one class, and nothing else changes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import CHANNELS, OUT, Partitions, apart, make_graph, workers
from test_pushed import stars
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.utils import scatter

import pyg_sar
from pyg_sar.engine.cuts import split_edges
from pyg_sar.engine.kernels.sums import Sums, add_gathered
from pyg_sar.engine.run import Kernel, Pass, run
from pyg_sar.engine.schedule import Schedule, Stage, by_shards
from pyg_sar.exchange.cover import SUMS
from pyg_sar.exchange.halo_rows import HaloSource
from pyg_sar.exchange.rows import RowSink, RowSource, Travel, UnitRows
from pyg_sar.exchange.wire import Wire
from pyg_sar.space.shard import Block, shards_of

WORLD = 3


# A kernel ####################################################################


class Squares(Kernel):
    """Sums of squared source rows: case 2, and sums of squares travel as well as rows do."""

    title = "sums of squares"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.name = schedule, "squares"

    def forward(self, tensors: Sequence[Tensor], record: bool) -> Any:
        return Forward(tensors[0], self.schedule.in_degree.numel())

    def saved(self, tensors: Sequence[Tensor], done: Any) -> Sequence[Tensor]:
        return tensors

    def backward(self, cotangent: Any, saved: Any, wanted: Any, last: bool) -> Any:
        return Backward(cotangent[0], saved[0])


class Forward(Pass):
    def __init__(self, x: Tensor, targets: int) -> None:
        self.sources, self.answers = [x], [x.new_zeros(targets, x.size(1))]

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        add_gathered(self.answers[0], rows.tensors[0].square(), block.segments, None)

    def add_there_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        add_gathered(into[0], self.sources[0].square(), block.segments, None)

    def finish(self) -> Sequence[Tensor]:
        return self.answers


class Backward(Pass):
    phase = "backward"

    def __init__(self, gradient: Tensor, x: Tensor) -> None:
        self.sources, self.slots, self.returned = [x], [gradient], [torch.zeros_like(x)]

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        part = torch.zeros_like(into[0])
        add_gathered(part, self.slots[0], block.transposed(), None)
        into[0].addcmul_(part, rows.tensors[0], value=2)

    def add_there_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        part = torch.zeros_like(self.returned[0])
        add_gathered(part, rows.tensors[0], block.transposed(), None)
        self.returned[0].addcmul_(part, self.sources[0], value=2)

    def finish(self) -> Sequence[Tensor]:
        return self.returned


def squares(root: Path) -> list[tuple[Tensor, Tensor, int]]:
    return [squares_by(root, covered) for covered in (False, True)]


def squares_by(root: Path, covered: bool) -> tuple[Tensor, Tensor, int]:
    data = pyg_sar.load_partition(root)
    edges = data.edge_index.to_local()
    split = split_edges(edges, SUMS, SUMS) if covered else None
    schedule = by_shards(shards_of(edges), split, split)
    x = data.x.to_local().requires_grad_()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        (out,) = run(Squares(schedule), [x], record=True)
        out.square().sum().backward()
    return *whole(data, out, x.grad), ledger.received_bytes(layer="squares")


def whole(data: Any, *rows: Tensor) -> list[Tensor]:
    """All workers' rows of each tensor, on every worker."""
    return [pyg_sar.from_local(one.detach(), data).full_tensor() for one in rows]


def summed(x: Tensor, edge_index: Tensor) -> Tensor:
    return scatter(x[edge_index[0]], edge_index[1], 0, x.size(0), reduce="sum")


def check(found: Sequence[tuple[Tensor, Tensor, int]], out: Tensor, gradient: Tensor) -> None:
    """Compares what all workers found with one process."""
    for each in found:
        for one, right in zip(each, (out, gradient), strict=False):
            assert torch.allclose(one, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("near", [True, False])
def test_a_kernel_of_ones_own(near: bool, tmp_path: Path) -> None:
    """Where its rows come from, and at which end it runs, is not its matter."""
    data = stars()
    root = Partitions(tmp_path)(data, WORLD, "random")
    x = data.x.clone().requires_grad_()
    expected = summed(x.square(), data.edge_index)
    expected.square().sum().backward()
    with nullcontext() if near else apart():
        every = workers(squares, WORLD, root)
    counts = []
    for found in zip(*every, strict=True):
        check(found, expected, x.grad)
        counts.append(sum(fetched for *_, fetched in found))
    assert counts[1] < counts[0]  # a cover takes fewer rows


# A row source ################################################################


@dataclass(frozen=True)
class FileRows:
    """Source rows in a file of all rows, which every worker maps into its memory.

    Nothing is fetched from the workers that own them; sums only, whose gradients need no rows.
    """

    exchange: Any
    plan: Any
    file: Path
    ids: Sequence[Tensor]  # of the halo nodes, by unit

    def source(self, tensors: Sequence[Tensor], how: Travel) -> RowSource:
        return FileSource(self, list(tensors))

    def sink(self, totals: Sequence[Tensor], how: Travel) -> RowSink:
        sink: RowSink = self.exchange.sink(totals, how)
        return sink


class FileSource(RowSource):
    """Own rows from memory, others by their numbers from the file."""

    def __init__(self, rows: FileRows, tensors: list[Tensor]) -> None:
        self._rows, self._tensors = rows, tensors
        self._file = np.load(rows.file, mmap_mode="r", allow_pickle=False)

    def open(self, unit: int) -> UnitRows:
        if unit == 0:
            return UnitRows(self._tensors)
        return UnitRows([torch.from_numpy(self._file[self._rows.ids[unit].numpy()])])


def from_a_file(root: Path, file: Path) -> tuple[Tensor, Tensor, int]:
    data = pyg_sar.load_partition(root)
    edges = data.edge_index.to_local()
    plan, shards = edges.plan, shards_of(edges)
    mine = (data.x[:, 0] * 0 + torch.arange(data.num_nodes)).long().to_local()
    own = HaloSource(plan, [mine], Travel(("", "", "plan"), 0))
    ids = [own.open(unit).tensors[0].clone() for unit in range(plan.world_size)]
    own.finish()
    ours = by_shards(shards)
    (stage,) = ours.forward
    mapped = Stage(FileRows(stage.exchange, plan, file, ids), stage.blocks)
    schedule = Schedule(plan, shards.in_degree, (mapped,), ours.backward)
    x = data.x.to_local().requires_grad_()
    kernel = Sums("sums", "sums of rows", 1, Wire(), ("sum",), False, schedule)
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        (out,) = run(kernel, [x], record=True)
        out.square().sum().backward()
    fetched = ledger.received_bytes(layer="sums", kind="fetch")
    return *whole(data, out, x.grad), fetched


def test_a_row_source_over_a_file(tmp_path: Path) -> None:
    """The kernel doesn't know; no row of another worker is sent forward."""
    data = make_graph()
    root, file = Partitions(tmp_path)(data, WORLD, "random"), tmp_path / "rows.npy"
    np.save(file, data.x.numpy())
    x = data.x.clone().requires_grad_()
    expected = summed(x, data.edge_index)
    expected.square().sum().backward()
    found = workers(from_a_file, WORLD, root, file)
    check(found, expected, x.grad)
    assert [fetched for *_, fetched in found] == [0] * WORLD


# What is left ################################################################


def left_over(root: Path, make: Any) -> int:
    """Objects in reference cycles after a step, which the collector alone would free."""
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(make().double())
    x = data.x.requires_grad_()
    for _ in range(2):
        layer(x, data.edge_index).sum().backward()
    gc.collect()
    gc.disable()
    try:
        layer(x, data.edge_index).sum().backward()
        return gc.collect()
    finally:
        gc.enable()


LAYERS: dict[str, Any] = {
    "sums": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "extrema": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "attention": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "messages": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="var"),
    "chunks": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="median"),
}


def test_a_step_leaves_no_cycles(tmp_path: Path) -> None:
    """Tensors that a step is done with are freed then, not when the collector comes by."""
    root = Partitions(tmp_path)(make_graph(), 2, "random")

    def all_left() -> dict[str, int]:
        return {name: left_over(root, make) for name, make in LAYERS.items()}

    assert workers(all_left, 2) == [dict.fromkeys(LAYERS, 0)] * 2
