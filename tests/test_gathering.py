"""``pyg_sar.gather_nodes``: rows of all workers in global order, on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hetero_graphs import make_hetero, random_parts
from oracle import make_graph, threads
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.reduction import metrics as gathering

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


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_rows_come_to_their_places(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every dtype and shape, on each rank, from a worker without nodes too, in small steps."""
    world = 3 if backend == "threads" else 2
    part = torch.randint(2, (NODES,), generator=torch.Generator().manual_seed(0))
    pyg_sar.write_partitions(make_graph(NODES), world, tmp_path / "parts", part)
    pyg_sar.launch(look, world, tmp_path / "parts", backend=backend, timeout=60.0)
    monkeypatch.setattr(gathering, "_BUFFER", 24)
    if backend == "threads":  # The last of three has no nodes.
        threads(look, world, tmp_path / "parts")


def look(root: Path) -> None:
    comm, data = pyg_sar.comm.current(), pyg_sar.load_partition(root, view="local")
    for dst, dtype in enumerate(DTYPES):
        dst %= comm.world_size
        for shape in ((), (3,), (2, 1), (0,)):
            whole = column(dtype, shape)
            found = pyg_sar.gather_nodes(whole[data.n_id], data, dst)
            assert (found is None) == (comm.rank != dst)
            if found is not None:
                assert found.dtype == dtype and found.shape == whole.shape
                assert same_bits(found, whole)
    x = data.x.clone().requires_grad_()
    found = pyg_sar.gather_nodes(x.t()[:2].t(), data)  # strided, with a gradient
    assert found is None or (not found.requires_grad and found.shape == (NODES, 2))
    edges = pyg_sar.gather_nodes(data.edge_weight, data.e_id)
    assert edges is None or torch.equal(edges, make_graph(NODES).edge_weight)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.numel() == 0:
        return a.shape == b.shape
    return torch.equal(*(t.contiguous().view(NODES, -1).view(torch.uint8) for t in (a, b)))


def test_nothing_but_rows_and_ids_is_sent(tmp_path: Path):
    pyg_sar.write_partitions(make_graph(NODES), 2, tmp_path / "parts", "contiguous")

    def worker() -> int:
        comm, data = (
            pyg_sar.comm.current(),
            pyg_sar.load_partition(tmp_path / "parts", view="local"),
        )
        before = pyg_sar.gather_nodes(data.x[:, :0], data)
        assert before is None or before.shape == (NODES, 0)
        with pyg_sar.Ledger(comm) as ledger:
            pyg_sar.gather_nodes(data.x, data)
        with pyg_sar.Ledger(comm) as empty:
            pyg_sar.gather_nodes(data.x[:, :0], data)
        return ledger.sent - empty.sent

    rows = NODES // 2 * 6 * 8
    assert threads(worker, 2)[1] == rows


def test_one_process_and_node_types(tmp_path: Path):
    data = make_hetero()
    pyg_sar.write_partitions(data, 3, tmp_path / "h", random_parts(data, 3))
    pyg_sar.write_partitions(make_graph(NODES), 1, tmp_path / "one")
    alone = pyg_sar.load_partition(tmp_path / "one", view="local")
    assert torch.equal(pyg_sar.gather_nodes(alone.y, alone), make_graph(NODES).y)

    def worker() -> Any:
        part = pyg_sar.load_partition(tmp_path / "h", view="local")
        found = [pyg_sar.gather_nodes(part[n].x, part, 1, n) for n in part.node_types]
        store = pyg_sar.gather_nodes(part["paper"].y, part["paper"], dst=1)
        with pytest.raises(ValueError, match="rank 0: .*'node_type' to be one of .*paper.*None"):
            pyg_sar.gather_nodes(part["paper"].y, part)
        return found, store

    nobody, (found, store), _ = threads(worker, 3)
    assert nobody == ([None] * 4, None) and torch.equal(store, data["paper"].y)
    for name, rows in zip(data.node_types, found, strict=True):
        assert torch.equal(rows, data[name].x)


# case: (values and data of a worker, what the error says)
WRONG: dict[str, tuple[Any, str]] = {
    "rows": (lambda d, r: (d.x[: len(d.x) - (r == 1)], d), r"rank 1: .*one row per node, 20 rows"),
    "scalar": (lambda d, r: (d.x.sum(), d), r"rank 0: .*got shape \[\]"),
    "no tensor": (lambda d, r: ([1, 2], d), "rank 0: .*dense tensor .got list"),
    "dst": (lambda d, r: (d.x, d, 2), r"rank 0: .*'dst' to be in 0 \.\. 1 .got 2"),
    "other dst": (lambda d, r: (d.x, d, r), "dst 0 at rank 0 and 1 at rank 1"),
    "dtype": (lambda d, r: (d.x.float() if r else d.x, d), "torch.float64 at rank 0 and torch.fl"),
    "shape": (lambda d, r: (d.x[:, r:], d), r"row shape \[6\] at rank 0 and \[5\] at rank 1"),
    "no ids": (lambda d, r: (d.x, Data(x=d.x)), "rank 0: .*'n_id'"),
    "twice": (lambda d, r: (d.x, torch.arange(20)), "not 0 to 39, each once"),
}


def test_mistakes_are_one_error_on_every_worker(tmp_path: Path):
    pyg_sar.write_partitions(make_graph(NODES), 2, tmp_path / "parts", "contiguous")

    def worker() -> list[str]:
        comm, data = (
            pyg_sar.comm.current(),
            pyg_sar.load_partition(tmp_path / "parts", view="local"),
        )
        said = []
        for case, message in WRONG.values():
            with pytest.raises(ValueError, match=message) as caught:
                pyg_sar.gather_nodes(*case(data, comm.rank))
            said.append(str(caught.value))
        return said

    first, second = threads(worker, 2)
    assert first == second
