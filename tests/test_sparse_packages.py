"""torch-scatter and torch-sparse on tensors of the whole graph: one process's numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import parts
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric import utils
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.typing import (
    WITH_TORCH_SCATTER,
    WITH_TORCH_SPARSE,
    SparseTensor,
    torch_scatter,
    torch_sparse,
)

import pyg_sar
from pyg_sar.comm import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import is_shared_matrix, node_rows, whole, wrap
from pyg_sar.tensors import rows as rows_module
from pyg_sar.tensors.sparse import edges_of_matrix, unsorted_matrices
from pyg_sar.tools.script_patches import _put

N, E = 17, 70
DOUBLE = torch.float64
Values = SimpleNamespace

needs_both = pytest.mark.skipif(
    not (WITH_TORCH_SPARSE and WITH_TORCH_SCATTER),
    reason="needs torch-sparse and torch-scatter: pip install 'pyg_sar[sparse]'",
)


def _values() -> dict[str, Tensor]:
    """Edges in any order, some twice; ties among the values; node 16 has no edge."""
    draw = torch.Generator().manual_seed(0)
    row, col = torch.randint(0, N - 1, (2, E), generator=draw)
    return {
        "x": torch.randint(-3, 4, (N, 4), generator=draw).to(DOUBLE),
        "e": torch.randn(E, 3, dtype=DOUBLE, generator=draw),
        "v": torch.rand(E, dtype=DOUBLE, generator=draw) + 0.5,
        "w": torch.randn(N, 2, dtype=DOUBLE, generator=draw),
        "row": row,
        "col": col,
        "segment": row.sort().values,
        "lengths": torch.bincount(row, minlength=N),
    }


def _shared(world: int) -> Values:
    """The tensors as each worker has them; ``w`` and ``lengths`` are the same on all."""
    comm, values = current(), _values()
    draw = torch.Generator().manual_seed(1)
    layouts = {}
    for total in (N, E):
        # The last of three workers owns nothing where there are two: rows lie anywhere.
        owner = torch.randint(0, 3, (total,), generator=draw) % world
        layouts[total] = node_rows(comm, (owner == comm.rank).nonzero().view(-1), total)
    out = {}
    for name, value in values.items():
        rows = layouts.get(value.size(0))
        plain = name in ("w", "lengths") or rows is None
        out[name] = value if plain else wrap(rows.cut(value, 0), rows, 0)
    return Values(**out)


def _results(case: Callable[[Values], Any], v: Values) -> list[Tensor]:
    """What a case gives, and its gradients."""
    leaves = [v.x, v.e, v.v, v.w]
    for leaf in leaves:
        leaf.requires_grad_()
    found = case(v)
    tensors = [t for t in (found if isinstance(found, tuple | list) else [found]) if t is not None]
    terms = [
        (p * torch.linspace(0.5, 1.5, p.numel(), dtype=DOUBLE).view(p.shape)).sum()
        for p in tensors
        if p.requires_grad
    ]
    gradients: Any = [None] * len(leaves)
    if terms:
        gradients = torch.autograd.grad(sum(terms), leaves, allow_unused=True)
    return [
        torch.zeros(0) if t is None else whole(t.detach(), "test") for t in (*tensors, *gradients)
    ]


def _work(cases: list[str]) -> list[str]:
    comm, wrong = current(), []
    for name in cases:
        expected = _results(CASES[name], Values(**_values()))
        try:
            found = _results(CASES[name], _shared(comm.world_size))
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for k, (mine, right) in enumerate(zip(found, expected, strict=True)):
            fits = mine.shape == right.shape and mine.dtype == right.dtype
            if not fits or not torch.allclose(mine.double(), right.double(), atol=1e-10, rtol=0):
                wrong.append(f"{name}: result {k} {list(mine.shape)} {list(right.shape)}")
    return wrong


def scattered(name: str) -> Callable[[Values], Any]:
    return lambda v: getattr(torch_scatter, name)(v.e, v.row, dim=0, dim_size=N)


def segmented(name: str) -> Callable[[Values], Any]:
    if name.endswith("csr"):
        return lambda v: getattr(torch_scatter, name)(v.e, _pointers(v.lengths))
    return lambda v: getattr(torch_scatter, name)(v.e, v.segment, dim_size=N)


def _pointers(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def adj(v: Values, weighted: bool = True) -> Any:
    return SparseTensor(row=v.row, col=v.col, value=v.v if weighted else None, sparse_sizes=(N, N))


def coo(a: Any) -> list[Tensor]:
    return list(a.coo())


def other_rows(matrix: Any, x: Tensor) -> list[Tensor]:
    """Two matrices that share a tensor of columns."""
    rowptr, col, value = matrix.csr()
    moved = SparseTensor(
        rowptr=rowptr[:1].new_tensor([0, E, *[E] * (N - 1)]),
        col=col,
        value=value,
        sparse_sizes=(N, N),
    )
    return [matrix @ x, moved @ x]


def adj_of_entries(v: Values) -> Any:
    """A square matrix of entries by entries: values and products have the same layout."""
    return SparseTensor(row=v.segment, col=v.col, value=v.v, sparse_sizes=(E, E))


def evaluated_first(v: Values) -> Tensor:
    matrix = adj(v)
    with torch.no_grad():
        matrix @ v.x
    return matrix @ (v.x * 2)


def into_out(v: Values) -> Tensor:
    out = torch.zeros_like(v.x[:, :3])
    torch_scatter.scatter_max(v.e, v.row, 0, out)
    return out


PLAIN: dict[str, Callable[[Values], Any]] = {
    "segment_reduce": lambda v: torch.segment_reduce(v.e, "sum", lengths=v.lengths),
    "segment_reduce, max": lambda v: torch.segment_reduce(v.e, "max", lengths=v.lengths, initial=0),
    "segment, mean": lambda v: utils.segment(v.e, _pointers(v.lengths), "mean"),
    **{
        f"scatter, {how}": lambda v, how=how: utils.scatter(v.e, v.row, 0, N, how)
        for how in ("sum", "mean", "max", "min", "mul")
    },
    "softmax": lambda v: utils.softmax(v.e, v.row, num_nodes=N),
    "softmax, ptr": lambda v: utils.softmax(v.e, ptr=_pointers(v.lengths)),
    "cumsum": lambda v: utils.cumsum(v.row),
    "degree": lambda v: utils.degree(v.row, N),
}
SCATTER = {
    **{
        f"scatter_{n}": scattered(f"scatter_{n}")
        for n in ("sum", "add", "mul", "mean", "std", "logsumexp", "softmax", "log_softmax")
    },
    "scatter_min": scattered("scatter_min"),
    "scatter_max": scattered("scatter_max"),
    "scatter, no size": lambda v: torch_scatter.scatter(v.x[v.col], v.row, 0, reduce="max"),
    "scatter, out": into_out,
    **{
        f"segment_{op}_{form}": segmented(f"segment_{op}_{form}")
        for op in ("sum", "mean", "min", "max")
        for form in ("csr", "coo")
    },
    "gather_csr": lambda v: torch_scatter.gather_csr(v.x, _pointers(v.lengths)),
    "gather_coo": lambda v: torch_scatter.gather_coo(v.x, v.segment),
}
SPARSE: dict[str, Callable[[Values], Any]] = {
    "coo": lambda v: coo(adj(v)),
    "csr": lambda v: list(adj(v).csr()),
    "csc": lambda v: list(adj(v).csc()),
    "from_edge_index": lambda v: coo(
        SparseTensor.from_edge_index(torch.stack([v.row, v.col]), v.v, (N, N))
    ),
    "from torch": lambda v: coo(
        SparseTensor.from_torch_sparse_coo_tensor(adj(v).to_torch_sparse_coo_tensor())
    ),
    "from torch csr": lambda v: coo(
        SparseTensor.from_torch_sparse_csr_tensor(adj(v).coalesce().to_torch_sparse_csr_tensor())
    ),
    "from dense": lambda v: coo(SparseTensor.from_dense(v.x)),
    "from scipy": lambda v: coo(SparseTensor.from_scipy(adj(v).detach().to_scipy("csr"))),
    "to torch csc": lambda v: adj(v).coalesce().to_torch_sparse_csc_tensor().to_dense(),
    "to_dense": lambda v: adj(v).coalesce().to_dense(),
    "t": lambda v: coo(adj(v).t()),
    "t, product": lambda v: adj(v).t() @ v.x,
    "set_value": lambda v: coo(adj(v).set_value(v.v * 2, layout="coo")),
    "fill_value": lambda v: coo(adj(v, False).fill_value(1.0, dtype=DOUBLE)),
    "fill_diag": lambda v: coo(adj(v).fill_diag(2.0)),
    "set_diag": lambda v: coo(adj(v, False).set_diag()),
    "set_diag, values": lambda v: coo(adj(v).set_diag(v.x[:, 0])),
    "remove_diag": lambda v: coo(adj(v).remove_diag()),
    "get_diag": lambda v: adj(v).coalesce().get_diag(),
    "mul, rows": lambda v: coo(adj(v).mul(v.x[:, :1])),
    "mul, columns": lambda v: coo(adj(v) * v.x[:, 0].view(1, -1)),
    "mul, matrices": lambda v: coo(adj(v).coalesce() * adj(v).t().coalesce()),
    "mul_nnz": lambda v: coo(adj(v).mul_nnz(v.v, layout="coo")),
    "add": lambda v: coo(adj(v) + adj(v).t()),
    "sum": lambda v: [adj(v).sum(), adj(v).sum(0), adj(v).sum(dim=1), adj(v, False).sum(dim=1)],
    "mean": lambda v: [adj(v).mean(), adj(v).mean(0), adj(v).mean(dim=1)],
    "max": lambda v: [adj(v).max(0), adj(v).min(dim=1)],
    "to_symmetric": lambda v: coo(adj(v).to_symmetric()),
    "coalesce": lambda v: coo(adj(v).coalesce("max")),
    "index_select": lambda v: coo(adj(v)[v.segment[:9]]),
    "masked_select": lambda v: coo(adj(v)[v.x[:, 0] > 0]),
    "narrow": lambda v: coo(adj(v)[2:9, 3:]),
    "cat": lambda v: coo(torch_sparse.cat([adj(v), adj(v).t()], dim=1)),
    "eye": lambda v: torch_sparse.matmul(SparseTensor.eye(N, dtype=DOUBLE), v.x),
    "spspmm": lambda v: coo(adj(v) @ adj(v).t()),
    **{
        f"matmul, {how}": lambda v, how=how: torch_sparse.matmul(adj(v), v.x, reduce=how)
        for how in ("sum", "mean", "min", "max")
    },
    **{
        f"matmul without values, {how}": lambda v, how=how: adj(v, False).matmul(v.x, reduce=how)
        for how in ("sum", "mean", "max")
    },
    "matmul, plain matrix": lambda v: adj(v) @ v.w,
    "matmul, plain entries": lambda v: adj(Values(**_values())) @ v.x,
    "matmul, several heads": lambda v: adj(v) @ v.x.view(N, 2, 2).movedim(1, 0),
    "matmul, other sizes": lambda v: (
        SparseTensor(row=torch.arange(E), col=v.col, value=v.v, sparse_sizes=(E, N)) @ v.x
    ),
    "same columns, other rows": lambda v: other_rows(adj(v), v.x),
    "as many rows as entries": lambda v: adj_of_entries(v) @ v.e,
    "eval first": evaluated_first,
    "spmm_max": lambda v: torch_sparse.matmul.__globals__["spmm_max"](adj(v), v.x),
    "PyG's spmm": lambda v: utils.spmm(adj(v), v.x, "mean"),
    **{
        f"PyG's spmm of constants, {how}": lambda v, how=how: utils.spmm(adj(v).detach(), v.x, how)
        for how in ("sum", "mean", "max")
    },
    "function spmm": lambda v: torch_sparse.spmm(torch.stack([v.row, v.col]), v.v, N, N, v.x),
    "function coalesce": lambda v: list(
        torch_sparse.coalesce(torch.stack([v.row, v.col]), v.v, N, N, "mean")
    ),
    "function transpose": lambda v: list(
        torch_sparse.transpose(torch.stack([v.row, v.col]), v.v, N, N)
    ),
    "function spspmm": lambda v: list(
        torch_sparse.spspmm(*[torch.stack([v.row, v.col]), v.v] * 2, N, N, N, coalesced=True)
    ),
}
CASES = PLAIN | SCATTER | SPARSE


def check(cases: dict[str, Any], world: int = 3) -> None:
    for found in parts(_work, world, list(cases)):
        assert not found


def test_reductions_by_index():
    check(PLAIN)


@needs_both
def test_torch_scatter():
    check(SCATTER)


@needs_both
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_torch_sparse():
    check(SPARSE)


def attention(v: Values) -> list[Tensor]:
    """A model's product with a matrix that it makes each time, by entries that it computes."""
    value = v.v * v.x[v.row].sum(-1)
    matrix = SparseTensor(row=v.row, col=v.col, value=value, sparse_sizes=(N, N))
    return [torch_sparse.matmul(matrix, v.x), matrix.matmul(v.x * v.x, "max"), matrix @ v.w]


@needs_both
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_matrices_that_are_made_each_time_are_not_gathered(monkeypatch):
    """As ``pyg-sar run`` has them: what asks for the entries' order gathers, products don't."""
    with ExitStack() as stack:
        unsorted_matrices(partial(_put, stack))
        check(SPARSE, 2)
        CASES["attention"] = attention
        monkeypatch.setattr(rows_module, "GATHER_LIMIT", 0)
        for found in parts(_own_rows, 3):
            assert not found
    del CASES["attention"]


def _own_rows() -> list[str]:
    """Compares each worker's rows: nothing is gathered."""
    expected, wrong = attention(Values(**_values())), []
    v = _shared(3)
    v.x.requires_grad_()
    found = attention(v)
    (mine,) = torch.autograd.grad(sum(t.sum() for t in found), [v.x])
    alone = Values(**_values())
    alone.x.requires_grad_()
    (right,) = torch.autograd.grad(sum(t.sum() for t in attention(alone)), [alone.x])
    for k, (one, other) in enumerate(zip([*found, mine], [*expected, right], strict=True)):
        if not torch.allclose(one.local, one.rows.cut(other, 0), atol=1e-10, rtol=0):
            wrong.append(f"result {k}")
    return wrong


class Own(gnn.MessagePassing):
    """Aggregates by a product of its own, another one than its messages would give."""

    def forward(self, x: Tensor, adj_t: Any) -> Tensor:
        return self.propagate(adj_t, x=x)

    def message_and_aggregate(self, adj_t: Any, x: Tensor) -> Tensor:
        return torch_sparse.matmul(adj_t, x, reduce="mean") * 2


LAYERS: dict[str, Callable[[], Any]] = {
    "GCN": lambda: gnn.GCNConv(4, 3),
    "SAGE": lambda: gnn.SAGEConv(4, 3, aggr="max"),
    "GIN": lambda: gnn.GINConv(torch.nn.Linear(4, 3)),
    "GAT": lambda: gnn.GATConv(4, 3, heads=2),
    "GraphConv": lambda: gnn.GraphConv(4, 3, aggr="mean"),
    "APPNP": lambda: gnn.APPNP(2, 0.1),
    "ARMA": lambda: gnn.ARMAConv(4, 3),
    "labels": lambda: gnn.LabelPropagation(2, 0.5),
    "own": lambda: Own(),
}


def _layers(data: Data, convert: Callable[[Any], Any]) -> list[Tensor]:
    """Layers on the graph's matrix, with weights and without, and on one made of it."""
    out = []
    matrix = data.adj_t
    without = matrix.set_value(None, layout=None)
    assert not is_shared_matrix(matrix) or edges_of_matrix(without) is not None
    for k, (name, make) in enumerate(LAYERS.items()):
        for matrix in (data.adj_t, without, without.set_diag(), data.adj_t.t()):
            torch.manual_seed(k)
            layer = convert(make().to(DOUBLE))
            x = data.x.detach().clone().requires_grad_(name != "labels")
            found = layer(x, matrix)
            out.append(found)
            if name != "labels":
                loss = (found * torch.linspace(1, 2, found.numel()).view(found.shape)).sum()
                out += torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)
    return [torch.zeros(0) if t is None else whole(t.detach(), "test") for t in out]


def _graph(loops: bool) -> Data:
    v = Values(**_values())
    row, col, value = adj(v).coalesce().coo()
    data = Data(x=v.x, edge_index=torch.stack([col, row]), edge_weight=value, num_nodes=N)
    if not loops:
        data.edge_index, data.edge_weight = utils.remove_self_loops(
            data.edge_index, data.edge_weight
        )
    return ToSparseTensor(attr="edge_weight")(data)


@needs_both
def test_layers_on_matrices(tmp_path: Path):
    kinds = (True, False)
    for loops in kinds:
        pyg_sar.write_partitions(_graph(loops), 2, tmp_path / str(loops))

    def work(root: Path) -> list[Tensor]:
        graphs = [pyg_sar.load_partition(root / str(loops)) for loops in kinds]
        return [t for data in graphs for t in _layers(data, pyg_sar.distribute)]

    expected = [t for loops in kinds for t in _layers(_graph(loops), lambda layer: layer)]
    for found in parts(work, 2, tmp_path):
        for k, (mine, right) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(
                mine, right, rtol=1e-9, atol=1e-9, msg=lambda m, k=k: f"{k} {m}"
            )


def test_operators_of_other_packages_are_refused_by_name():
    """Kernels of their own, composed ones, and one by the name of an operator of torch."""
    library = torch.library.Library("pyg_sar_test", "FRAGMENT")
    ran = []

    def kernel(x: Any, *rest: Any) -> Tensor:
        ran.append(x)
        return torch.zeros(3)

    for name, key in (("own", "CPU"), ("sum", "CompositeImplicitAutograd"), ("many", "CPU")):
        library.define(f"{name}(Tensor{'[]' if name == 'many' else ''} x) -> Tensor")
        library.impl(name, kernel, key)

    def work() -> list[str]:
        x, found = _shared(2).x, []
        operators = torch.ops.pyg_sar_test
        for call in (operators.own, operators.own.default, operators.sum, operators.many):
            for grad in (True, False):
                given = x.detach().requires_grad_(grad)
                with pytest.raises(DistributedIndexError) as error:
                    call([given] if call is operators.many else given)
                found.append(str(error.value))
        with torch.inference_mode(), pytest.raises(DistributedIndexError, match="test.own"):
            operators.own(x)
        return found

    for found in parts(work, 2):
        names = [text.partition("' of node")[0] for text in found]
        assert names == [f"'pyg_sar_test.{n}" for n in ("own", "own", "sum", "many") for _ in "ab"]
    assert not ran
    assert float(torch.ops.pyg_sar_test.own(torch.ones(3)).sum()) == 0
