"""``x.full_tensor()``: rows of all workers in the graph's order, on each of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hetero_graphs import make_hetero, random_parts
from oracle import make_graph, workers
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import rows as gathering

NODES = 40
DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.uint16),
)


def column(dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
    """Values of the whole graph, NaN and the largest integers among them."""
    draw = torch.Generator().manual_seed(1)
    found = torch.randint(2, (NODES, *shape), generator=draw)
    if dtype == torch.bool:
        return found.bool()
    if dtype.is_floating_point or dtype.is_complex:
        found = found * torch.randn(NODES, *shape, generator=draw, dtype=torch.float64)
        found[0] = float("nan")
    elif dtype == torch.int64:
        found[3] = 2**62 + 1
    return found.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.numel() == 0:
        return a.shape == b.shape
    return torch.equal(*(t.contiguous().view(NODES, -1).view(torch.uint8) for t in (a, b)))


def look(root: Path) -> None:
    """At once, and 24 bytes at a time."""
    for piece in (gathering._PIECE, 24):
        gathering._PIECE = piece
        look_at(pyg_sar.load_partition(root))


def look_at(data: Any) -> None:
    ids = torch.arange(NODES)[data.y >= 0].to_local()
    for dtype in DTYPES:
        for shape in ((), (3,), (2, 1), (0,)):
            whole = column(dtype, shape)
            found = pyg_sar.from_local(whole[ids], data).full_tensor()
            assert found.dtype == dtype and same_bits(found, whole)
    x = data.x.clone().requires_grad_()
    found = x.t()[:2].t().full_tensor()  # strided, with a gradient
    assert torch.equal(found, make_graph(NODES).x[:, :2])
    (found * torch.arange(1.0, NODES + 1).view(-1, 1)).sum().backward()
    expected = torch.arange(1.0, NODES + 1).view(-1, 1) * (torch.arange(6) < 2)
    assert torch.equal(x.grad.full_tensor(), expected.double())
    assert torch.equal(data.edge_weight.full_tensor(), make_graph(NODES).edge_weight)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_come_to_their_places(world: int, tmp_path: Path):
    """Every dtype and shape; of three workers the last has no nodes."""
    part = torch.randint(2, (NODES,), generator=torch.Generator().manual_seed(0)) % world
    pyg_sar.write_partitions(make_graph(NODES), world, tmp_path / "parts", part)
    workers(look, world, tmp_path / "parts")


def test_nothing_but_rows_and_ids_is_sent(tmp_path: Path):
    pyg_sar.write_partitions(make_graph(NODES), 2, tmp_path / "parts", "contiguous")

    def worker() -> int:
        data, comm = pyg_sar.load_partition(tmp_path / "parts"), pyg_sar.comm.current()
        assert data.x[:, :0].full_tensor().shape == (NODES, 0)
        with pyg_sar.Ledger(comm) as ledger:
            data.x.full_tensor()
        with pyg_sar.Ledger(comm) as empty:
            data.x[:, :0].full_tensor()
        return ledger.sent - empty.sent

    assert workers(worker, 2) == [NODES // 2 * 6 * 8] * 2


def test_node_types(tmp_path: Path):
    data = make_hetero()
    pyg_sar.write_partitions(data, 3, tmp_path / "h", random_parts(data, 3))

    def worker() -> list[Any]:
        part = pyg_sar.load_partition(tmp_path / "h")
        rows = part["paper"].y.to_local()
        with pytest.raises(ValueError, match="a node store of it, .* EdgeStorage"):
            pyg_sar.from_local(rows, part["paper", "cites", "paper"])
        again = pyg_sar.from_local(rows, part["paper"])
        return [again.full_tensor(), *(part[n].x.full_tensor() for n in part.node_types)]

    for labels, *found in workers(worker, 3):
        assert torch.equal(labels, data["paper"].y)
        assert all(map(torch.equal, found, (data[n].x for n in data.node_types)))


def test_nodes_beside_as_many_edges(tmp_path: Path):
    data = make_graph(NODES)
    kept = torch.arange(NODES) * 5
    lists = {"edge_index": data.edge_index[:, kept], "edge_attr": data.edge_attr[kept]}
    few = Data(**lists, num_nodes=NODES, node_size=data.x)
    pyg_sar.write_partitions(few, 2, tmp_path / "parts", "random")

    def worker() -> Tensor:
        part = pyg_sar.load_partition(tmp_path / "parts")
        part.edge_index = part.edge_index.flip(1)
        return pyg_sar.from_local(part.node_size.to_local(), part).full_tensor()

    assert all(torch.equal(found, data.x) for found in workers(worker, 2))


def in_order(data: Data, **changes: Tensor) -> Data:
    """The graph with its features alone in ascending order."""
    found = copy.copy(data)
    return found.update({"x": data.x[data.x[:, 0].argsort()], **changes})


# case: (rows, what they are of, what the error says)
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "rows": (lambda x, d: pyg_sar.from_local(x[:-1], d), ValueError, "this worker's 20 of 40 rows"),
    "scalar": (lambda x, d: pyg_sar.from_local(x.sum(), d), TypeError, "'rows' to be a plain tens"),
    "no tensor": (lambda x, d: pyg_sar.from_local([1, 2], d), TypeError, "got list"),
    "whole": (lambda x, d: pyg_sar.from_local(d.x, d), TypeError, "got NodeTensor"),
    "no data": (lambda x, d: pyg_sar.from_local(x, x), ValueError, "what pyg_sar.load_partition"),
    "sorted": (lambda x, d: pyg_sar.from_local(x, in_order(d)), ValueError, "not all in the same"),
    "made edges": (
        lambda x, d: pyg_sar.from_local(x, in_order(d, edge_index=d.edge_index + 0)),
        ValueError,
        "of its 40 nodes are not all in the same order .*: pass the one",
    ),
    "large": (
        lambda x, d: d.x.unsqueeze(-1).expand(-1, -1, 1 << 24).full_tensor(),
        DistributedIndexError,
        "full_tensor.. needs all 40 rows on every worker, 30720 MiB, more than 2048 MiB",
    ),
}


def test_mistakes_are_named(tmp_path: Path):
    pyg_sar.write_partitions(make_graph(NODES), 2, tmp_path / "parts", "contiguous")

    def worker() -> None:
        data = pyg_sar.load_partition(tmp_path / "parts")
        for act, kind, message in WRONG.values():
            with pytest.raises(kind, match=message):
                act(data.x.to_local(), data)

    workers(worker, 2)
