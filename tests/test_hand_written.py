"""Layers that researchers write without PyG's classes: rows by edges' ends, and scatter()."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from oracle import CHANNELS, Partitions, alike, both, error, make_graph, parts, whole, workers
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, scatter, softmax

import pyg_sar
from pyg_sar.tensors import NodeTensor


def _reduced(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, edge_index: scatter(x[edge_index[0]], edge_index[1], 0, x.size(0), name)


def _attention(x: Tensor, edge_index: Tensor) -> Tensor:
    row, col = edge_index
    scores = softmax((x[row] * x[col]).sum(-1, keepdim=True).sin(), col, num_nodes=x.size(0))
    return scatter(scores * x[row], col, 0, x.size(0))


def _by_methods(x: Tensor, edge_index: Tensor) -> Tensor:
    far, near = edge_index.unbind(0)
    messages = x.gather(0, far.view(-1, 1).expand(-1, x.size(1))) * 2
    out = messages.new_zeros(x.size(0), x.size(1)).index_add(0, near, messages)
    least = messages.new_full((x.size(0), x.size(1)), 9.0)
    return out + least.scatter_reduce(0, near[:, None].expand_as(messages), messages, "amin")


def _repeated_ids(x: Tensor, edge_index: Tensor) -> Tensor:
    """Ids in memory once per column, of which none knows that they are alike."""
    messages = x.index_select(0, edge_index[0])
    ids = edge_index[1].unsqueeze(-1).repeat(1, x.size(1))
    out = messages.new_zeros(x.size(0), x.size(1)).scatter_add(0, ids, messages)
    most = messages.new_ones(x.shape).scatter_reduce(0, ids, messages, "prod")
    total = x.new_ones(x.shape).scatter_reduce(0, ids, messages, "sum", include_self=False)
    return out * most + total


def _towards_sources(x: Tensor, edge_index: Tensor) -> Tensor:
    row, col = edge_index
    most = scatter(x[col], row, 0, x.size(0), "max")
    fewer = scatter(x[col], row, 0, None, "mul")  # of the nodes before the last with edges
    return scatter(x[col].sin(), row, 0, x.size(0)) + most + fewer.sum(0)


def _without_some(x: Tensor, edge_index: Tensor) -> Tensor:
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return scatter(x[edge_index[0]], edge_index[1], 0, x.size(0), "max")


def _filled(x: Tensor, edge_index: Tensor) -> Tensor:
    ids = edge_index[1].view(-1, 1).expand(-1, x.size(1))
    return x.sin().scatter(0, ids, 0.5) + x


LAYERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: _reduced(name) for name in ("sum", "mean", "max", "min", "mul")},
    "attention": _attention,
    "methods": _by_methods,
    "repeated ids": _repeated_ids,
    "towards sources": _towards_sources,
    "without some": _without_some,
    "filled": _filled,
}


EMPTY = torch.tensor([0, 2, 0, 3]).repeat(10)
"""An assignment in which one of four workers has no nodes."""


class Net(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.lin = name, torch.nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(x) + LAYERS[self.name](self.lin(x).tanh(), edge_index)


def _pass(net: torch.nn.Module, data: Any) -> list[Tensor | None]:
    """Output, gradients of the input and of parameters, in a second call, in which plans stand."""
    for _ in range(2):
        net.zero_grad()
        x = data.x.clone().requires_grad_()
        out = net(x, data.edge_index)
        (out.sin() * torch.linspace(0.5, 1, out.size(1), dtype=out.dtype)).sum().backward()
    assert not isinstance(x, NodeTensor) or isinstance(out, NodeTensor)
    return [whole(t) for t in (out, x.grad, *(p.grad for p in net.parameters()))]


def _check(kind: type[Net], names: Iterable[str], graph: Data, root: Path, number: int) -> None:
    """Output and gradients on workers and on hosted parts are those of one process.

    All of them on three workers and as four parts, of which one has no nodes; else some.
    """

    def passed(name: str, data: Any) -> list[Tensor | None]:
        torch.manual_seed(1)
        net = kind(name).double()
        return _pass(net if data is graph else pyg_sar.distribute(net), data)

    for start in (workers, parts):
        whole_share = (start, number) in ((workers, 3), (parts, 4))
        share = some(list(names), f"{start.__name__} {number}", 1 if whole_share else 4)
        expected = {name: passed(name, graph) for name in share}

        def work(expected: dict[str, Any] = expected) -> dict[str, float]:
            data = pyg_sar.load_partition(root)
            return {n: max(map(error, passed(n, data), right)) for n, right in expected.items()}

        for found in start(work, number):
            assert {name: wrong for name, wrong in found.items() if not wrong < 1e-10} == {}


@pytest.mark.parametrize("number", (1, 2, 3, 4))
def test_equal_to_one_process(number: int, graph: Data, partitions: Partitions) -> None:
    root = partitions(graph, number, EMPTY if number == 4 else "random")
    _check(Net, LAYERS, graph, root, number)


def test_rows_travel_once_and_sums_stay(root: Path) -> None:
    """A row that many edges read is sent once, sums into own nodes send nothing."""

    def work() -> tuple[int, int, int, int]:
        data = pyg_sar.load_partition(root)
        row, col = data.edge_index
        far = set(row.local.tolist()) - set(data.x.rows.ids.tolist())
        for _ in range(2):  # The plans are made in the first pass.
            with pyg_sar.Ledger(data.x.rows.comm) as read:
                messages = data.x[row]
            with pyg_sar.Ledger(data.x.rows.comm) as summed:
                out = scatter(messages, col, 0, data.num_nodes, "max")
        return len(far), out.to_local().size(0), read.received, summed.received

    results = workers(work, 3)
    assert sum(own for _, own, _, _ in results) == make_graph().num_nodes
    for far, _, read, summed in results:
        assert read == far * CHANNELS * 8
        assert summed == 0


def test_ids_beyond_the_rows_are_refused(root: Path) -> None:
    """PyTorch takes ids that count from the end where it indexes, and nowhere else."""

    def work(shift: int) -> list[str]:
        data = pyg_sar.load_partition(root)
        x, ids = data.x, data.edge_index[1] + shift
        messages, wide = x[data.edge_index[0]], ids.view(-1, 1).expand(-1, CHANNELS)
        ways: list[Callable[[], Tensor]] = [
            lambda: messages.new_zeros(x.shape).scatter_add_(0, wide, messages),
            lambda: messages.new_zeros(x.shape).index_add_(0, ids, messages),
            lambda: x.index_select(0, ids),
            lambda: x.gather(0, wide),
            lambda: x[ids],
        ]
        found = []
        for way in ways:
            try:
                way()
            except IndexError as problem:
                found.append(str(problem))
        return found

    for shift, refused in ((-40, 4), (40, 5)):
        for texts in workers(work, 3, shift):
            assert len(texts) == refused and all("out of bounds" in text for text in texts)


# Sparse matrices of torch #####################################################


def _matrix(x: Tensor, edge_index: Tensor, turned: bool = False) -> Tensor:
    row, col = edge_index.flip(0) if turned else edge_index
    values = torch.linspace(0.1, 1.0, row.size(0), dtype=x.dtype)
    return torch.sparse_coo_tensor(torch.stack([col, row]), values, (x.size(0), x.size(0)))


def _laplacian(x: Tensor, edge_index: Tensor) -> Tensor:
    loops = torch.arange(x.size(0)).repeat(2, 1)
    matrix = torch.sparse_coo_tensor(
        torch.cat([edge_index, loops], 1),
        torch.full((edge_index.size(1) + x.size(0),), 0.5, dtype=x.dtype),
        (x.size(0), x.size(0)),
    )
    return torch.sparse.mm((matrix + matrix.t()).coalesce() * 0.5, x)


def _whole(x: Tensor, edge_index: Tensor) -> Tensor:
    """The matrix in the memory of each worker, as SciPy or a file gives it."""
    index = edge_index.full_tensor() if isinstance(edge_index, NodeTensor) else edge_index
    values = torch.linspace(0.1, 1.0, index.size(1), dtype=x.dtype)
    return torch.sparse_coo_tensor(index, values, (x.size(0), x.size(0)))


MATRICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of edges": lambda x, e: torch.sparse.mm(_matrix(x, e), x),
    "towards sources": lambda x, e: _matrix(x, e, turned=True) @ x,
    "turned": lambda x, e: torch.spmm(_matrix(x, e).t(), x),
    "by rows": lambda x, e: _matrix(x, e).coalesce().to_sparse_csr().matmul(x),
    "scaled, twice": lambda x, e: (m := _matrix(x, e) * 0.5) @ (m @ x) / 3,
    "laplacian": _laplacian,
    "with a vector": lambda x, e: torch.mv(_matrix(x, e), x[:, 0]).unsqueeze(1) * x,
    "degrees": lambda x, e: (_matrix(x, e) @ torch.ones(x.size(0), 1, dtype=x.dtype)) * x,
    "whole": lambda x, e: torch.spmm(_whole(x, e), x).sin() @ torch.ones(CHANNELS, 1).to(x) * x,
    "whole, by rows": lambda x, e: _whole(x, e).to_sparse_csr() @ (_whole(x, e).t() @ x),
    "of its values": lambda x, e: torch.sparse.mm(_matrix(x, e).coalesce(), x).sin(),
}
"""Products that run on each worker's rows."""

GATHERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dense": lambda x, e: _matrix(x, e).to_dense() @ x,
    "of matrices": lambda x, e: torch.sparse.mm(_matrix(x, e), _matrix(x, e)) @ x,
    "from the left": lambda x, e: (x.t() @ _matrix(x, e)).t(),
    "its values": lambda x, e: x * _matrix(x, e).coalesce().values().sum(),
    "number": lambda x, e: x * _matrix(x, e).coalesce()._nnz(),
    "sum of rows": lambda x, e: x * torch.sparse.sum(_matrix(x, e), 1).to_dense().view(-1, 1),
    "largest of rows": lambda x, e: torch.sparse.mm(_matrix(x, e).to_sparse_csr(), x, "amax"),
    "learned": lambda x, e: torch.sparse.mm(
        torch.sparse_coo_tensor(e, x[e[0]][:, 0] * x[e[1]][:, 1], (x.size(0), x.size(0))), x
    ),
}
"""What takes the whole matrix."""


class MatrixNet(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x).tanh()
        return self.lin(x) + (MATRICES | GATHERED)[self.name](h, edge_index)


@pytest.mark.parametrize("number", (1, 2, 3, 4))
def test_products_equal_to_one_process(number: int, graph: Data, partitions: Partitions) -> None:
    root = partitions(graph, number, EMPTY if number == 4 else "random")
    _check(MatrixNet, MATRICES | GATHERED, graph, root, number)


def test_second_derivatives_of_products_and_of_all_rows(graph: Data, root: Path) -> None:
    def penalty(data: Any, _: Any) -> list[Tensor | None]:
        x = data.x.clone().requires_grad_()
        weight = torch.linspace(0.5, 1.5, CHANNELS, dtype=x.dtype).requires_grad_()
        product = torch.sparse.mm(_matrix(x, data.edge_index), x.sin() * weight)
        everything = x.full_tensor() if isinstance(x, NodeTensor) else x
        out = product.square().sum() + (everything @ weight).pow(3).sum()
        plain = torch.zeros_like(everything).index_add(0, data.edge_index[1], x[data.edge_index[0]])
        out = out + torch.sparse.mm(_matrix(x, data.edge_index), plain).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()
        return [x.grad, weight.grad]

    alike(penalty, graph, root, 3, both)


def test_a_product_gets_each_row_once(root: Path) -> None:
    def work() -> tuple[int, int, int]:
        data = pyg_sar.load_partition(root)
        matrix = _matrix(data.x, data.edge_index)
        far = set(data.edge_index[0].local.tolist()) - set(data.x.rows.ids.tolist())
        for _ in range(2):
            with pyg_sar.Ledger(data.x.rows.comm) as ledger:
                out = matrix @ data.x
        return len(far), ledger.received, out.to_local().size(0)

    results = workers(work, 3)
    assert sum(own for _, _, own in results) == make_graph().num_nodes
    for far, received, _ in results:
        assert received == far * CHANNELS * 8


def test_a_matrix_that_is_written_counts_anew(graph: Data, root: Path) -> None:
    def products(data: Any, _: Any) -> list[Tensor]:
        matrix, found = _whole(data.x, data.edge_index).coalesce(), []
        for change in (
            lambda: None,
            lambda: matrix.mul_(2),
            lambda: matrix._values().data[:1].mul_(3),
        ):
            change()
            found.append(matrix @ data.x)
        return found

    alike(products, graph, root, 3, both)


def test_writing_into_a_matrix_is_refused(root: Path) -> None:
    def work() -> list[str]:
        data = pyg_sar.load_partition(root)
        matrix, found = _matrix(data.x, data.edge_index), []
        for change in (
            lambda: matrix.mul_(2),
            lambda: matrix.requires_grad_(),
            lambda: setattr(matrix, "requires_grad", True),
            lambda: torch.sparse.mm(matrix, data.x, out=data.x),
        ):
            try:
                change()
            except Exception as problem:
                found.append(type(problem).__name__)
        return found

    for found in workers(work, 3):
        assert len(found) == 4 and set(found) <= {"DistributedIndexError", "TypeError"}


# Programs drawn at random #####################################################


def _edges(draw: random.Random, edge_index: Tensor) -> Tensor:
    return draw.choice(
        [
            lambda e: e,
            lambda e: e.flip(0),
            lambda e: e[:, e[0] != e[1]],
            lambda e: e[:, 5:150:2],
            lambda e: torch.cat([e, e.flip(0)], 1),
            lambda e: torch.stack([e[1], e[0]]),
            lambda e: add_self_loops(e, num_nodes=40)[0],
        ]
    )(edge_index)


def _read(draw: random.Random, x: Tensor, ids: Tensor) -> Tensor:
    wide = ids.view(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:])
    ways = [lambda: x[ids], lambda: x.index_select(0, ids), lambda: x.gather(0, wide)]
    return draw.choice(ways)()


def _put(draw: random.Random, rows: Tensor, ids: Tensor, like: Tensor) -> Tensor:
    narrow = ids.view(-1, *[1] * (rows.dim() - 1))
    wide = draw.choice([narrow.expand_as(rows), narrow.repeat(1, *rows.shape[1:])])
    shape, self_too = (40, *rows.shape[1:]), draw.random() < 0.5
    reduce = draw.choice(["sum", "mean", "amax", "amin", "prod"])
    return draw.choice(
        [
            lambda: scatter(rows, ids, 0, 40, reduce.removeprefix("a").replace("prod", "mul")),
            lambda: rows.new_zeros(shape).index_add_(0, ids, rows, alpha=2.0),
            lambda: like.new_zeros(shape).scatter_add_(0, wide, rows),
            lambda: rows.new_full(shape, 0.3).scatter_reduce(
                0, wide, rows, reduce, include_self=self_too
            ),
            lambda: torch.zeros(shape).to(rows).scatter_add(0, wide, rows),
            lambda: like.new_zeros(shape).index_put((ids,), rows, accumulate=True),
            lambda: scatter(softmax(rows, ids, num_nodes=40) * rows, ids, 0, 40),
            lambda: (
                scatter(rows, ids, 0, 40)
                / (1 + torch.bincount(ids, minlength=40)).view(-1, *[1] * (rows.dim() - 1))
            ),
        ]
    )()


def _times(draw: random.Random, x: Tensor, edge_index: Tensor) -> Tensor:
    matrix = draw.choice([_matrix, _whole])(x, edge_index)
    for _ in range(draw.randrange(3)):
        matrix = draw.choice(
            [
                lambda m: m.t(),
                lambda m: m * 0.5,
                lambda m: (m + m.t()).coalesce(),
                lambda m: m + torch.eye(40, dtype=x.dtype).to_sparse(),
            ]
        )(matrix)
    return matrix @ x


def _program(seed: int, data: Any) -> list[Tensor | None]:
    """Output and gradient, of every fourth program also that of a gradient."""
    draw, leaf = random.Random(seed), data.x.clone().requires_grad_()
    x = leaf.view(40, 2, 3) if draw.random() < 0.3 else leaf
    out = x
    for _ in range(draw.randrange(1, 4)):
        edge_index = _edges(draw, data.edge_index)
        if draw.random() < 0.3 and out.dim() == 2:
            found = _times(draw, out, edge_index)
        else:
            far, near = edge_index if draw.random() < 0.7 else edge_index.flip(0)
            rows = _read(draw, out, far)
            rows = rows * _read(draw, out.sin(), near) if draw.random() < 0.4 else rows
            found = _put(draw, rows, near, x)
        out = found.tanh() + (out if draw.random() < 0.5 else 0)
    loss = out.sin().square().sum()
    if seed % 4 == 0:
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        loss = slope.square().sum() + loss
    loss.backward()
    return [whole(out.detach()), whole(leaf.grad)]


@pytest.mark.parametrize("number", (1, 3, 4))
def test_random_programs(number: int, graph: Data, partitions: Partitions) -> None:
    root = partitions(graph, number, EMPTY if number == 4 else "random")
    expected = {
        s: _program(s, graph) for s in some(range(60 * number, 60 * number + 60), "seeds", 2)
    }

    def work() -> dict[int, float]:
        data = pyg_sar.load_partition(root)
        return {s: max(map(error, _program(s, data), right)) for s, right in expected.items()}

    for found in parts(work, number):
        assert {seed: wrong for seed, wrong in found.items() if not wrong < 1e-10} == {}
