"""Gradients of plain tensors into which rows were written, and of single rows that are leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import both, error, parts, whole
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import NodeTensor
from pyg_sar.tensors.rows import node_rows

N, WIDTH = 60, 6
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(N, WIDTH, generator=DRAW, dtype=torch.float64)
ZEROS: Any = {"dtype": torch.float64}


def _graph() -> NodeTensor:
    comm = pyg_sar.comm.current()
    ids = torch.arange(comm.rank, N, comm.world_size)
    return NodeTensor(X[ids], node_rows(comm, ids, N), 0)


def _filled(shape: tuple[int, ...], *written: tuple[Any, Tensor]) -> Tensor:
    """What scripts allocate, and fill: all workers hold it."""
    out = torch.zeros(shape, **ZEROS)
    for place, rows in written:
        out[place] = rows
    return out


def _in_place(x: Tensor) -> Tensor:
    out = torch.zeros(2, N, WIDTH, **ZEROS)
    out[0] += x
    out[1].add_(x)
    out[1].mul_(x)
    out[0, :, 2:5] *= x[:, :3]
    return out.sum(0)


COLUMNS = slice(None)
FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "times": lambda x: _filled((3, N, WIDTH), (0, x), (1, x.sin()), (-1, x))[1:].sum(0),
    "last": lambda x: _filled((2, N, WIDTH), (0, x), (1, x.sin()))[-1],
    "columns": lambda x: _filled(
        (N, 2 * WIDTH), ((COLUMNS, slice(6)), x), ((COLUMNS, slice(6, 12)), x.sin())
    )[:, 3:9],
    "every second": lambda x: _filled(
        (N, 2 * WIDTH), ((COLUMNS, slice(0, 12, 2)), x), ((COLUMNS, slice(1, 12, 2)), x.sin())
    )[:, 3:9],
    "between": lambda x: _filled((N, 2, WIDTH), ((COLUMNS, 0), x), ((COLUMNS, 1), x.sin()))[:, 1],
    "one column": lambda x: _filled((N, WIDTH), ((COLUMNS, 3), x[:, 0])),
    "no column": lambda x: x * _filled((N, WIDTH), ((COLUMNS, slice(3, 3)), x[:, :0])),
    "rows": lambda x: _filled((N, WIDTH), (slice(5, 15), x[20:30]), (slice(30, 60), x[30:].sin())),
    "every third row": lambda x: _filled((N, WIDTH), (slice(1, N, 3), x[:20])),
    "rows of all": lambda x: (
        torch.cat([x, torch.ones(4, WIDTH, **ZEROS)])
        * _filled((N + 4, WIDTH), (slice(0, N), x.sin()), (slice(N - 2, N + 4), x[:6]))
    )[2 : N + 2],
    "in place": _in_place,
}


def _gradients(x: Tensor, fill: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of rows by what is filled, whose own gradient comes from rows of the graph."""
    leaf = x.clone().requires_grad_()
    out = fill(leaf)
    (out.sin() * x[:, : out.size(-1)].cos()).sum().backward()
    return whole(out.detach()), whole(leaf.grad)


@pytest.mark.parametrize("number", (1, 3))
def test_plain_tensors_that_rows_were_written_into(number: int) -> None:
    expected = {name: _gradients(X, fill) for name, fill in FILLED.items()}

    def work() -> dict[str, float]:
        found = {name: _gradients(_graph(), fill) for name, fill in FILLED.items()}
        return {name: max(map(error, found[name], right)) for name, right in expected.items()}

    for found in both(work, number):
        assert {name: wrong for name, wrong in found.items() if not wrong < 1e-10} == {}


def test_parts_without_rows_of_each_worker_are_refused() -> None:
    def work() -> None:
        for place, row in ((4, X[3]), ((4, slice(0, 3)), X[3, :3])):
            leaf = row.clone().requires_grad_()
            with pytest.raises(DistributedIndexError, match=r"as_strided.*x\.new_zeros"):
                (_filled((N, WIDTH), (place, leaf)) * _graph()).sum().backward()
        for shape, steps, offset in (((WIDTH,), (WIDTH + 1,), 0), ((N, WIDTH), (WIDTH, 1), 1)):
            with pytest.raises(DistributedIndexError, match="as_strided"):
                torch.as_strided(_graph(), shape, steps, offset)
        with pytest.raises(DistributedIndexError, match="as_strided"):
            torch.as_strided(_graph()[:, 1:], (N, 2), (WIDTH, 1), 0)

    parts(work, 2)


def _of_a_row(x: Tensor) -> list[Tensor | None]:
    """Gradients of a row that is a leaf, by all ways in which autograd is asked for them."""
    row, seen = x[3].detach().requires_grad_(), []
    z = row.sin() * x
    weights = (2 * x).requires_grad_()
    found = [
        *torch.autograd.grad(z.sum(), row, retain_graph=True, allow_unused=True),
        *torch.autograd.grad(outputs=z, inputs=[row], grad_outputs=2 * x, retain_graph=True),
        *torch.autograd.grad(z, (row,), 2 * x, True),
        *torch.autograd.grad(z, (row,), weights, True, True),
    ]
    found += torch.autograd.grad(found[-1].square().sum(), weights)
    torch.autograd.graph.register_multi_grad_hook((row,), seen.extend)
    torch.autograd.backward(z, 2 * x)
    return [whole(t) for t in (*found, row.grad, *seen)]


def test_a_row_that_is_a_leaf() -> None:
    expected = _of_a_row(X)
    for found in parts(lambda: _of_a_row(_graph()), 3):
        assert max(map(error, found, expected)) < 1e-10


def _block_matrix(x: Tensor, row: Tensor, col: Tensor) -> list[Tensor | None]:
    """A product with a matrix of two rows per node, whose values are of nodes and of edges."""
    leaf = x.clone().requires_grad_()
    count = x.size(0)
    places = torch.arange(2 * count).expand(2, -1)
    index = torch.cat([torch.stack([2 * row, 2 * col + 1]), places, places.flip(1)], 1)
    of_nodes = torch.cat([leaf[:, :2].reshape(-1), leaf[:, 2:4].sin().reshape(-1)])
    values = torch.cat([(leaf[row] * leaf[col]).sum(1), of_nodes])
    blocks = leaf.view(2 * count, -1)[index[1]] * values[:, None]
    out = scatter(blocks, index[0], 0, 2 * count).view(count, -1)
    (out.sin() * x).sum().backward()
    return [whole(out.detach()), whole(leaf.grad)]


def test_gradients_of_what_was_joined_are_viewed(graph: Data, root: Path) -> None:
    def work() -> list[Tensor | None]:
        data = pyg_sar.load_partition(root)
        return _block_matrix(data.x, *data.edge_index)

    expected = _block_matrix(graph.x, *graph.edge_index)
    for found in parts(work, 3):
        assert max(map(error, found, expected)) < 1e-10
