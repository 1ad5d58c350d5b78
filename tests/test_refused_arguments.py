"""What PyTorch refuses in one process is refused of node tensors: whatever rules would give.

A rule that reads an axis beyond the last as another one, or leaves operands out, gives numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import both, parts
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_geometric.utils import unbatch

from pyg_sar.comm import current
from pyg_sar.tensors import NodeTensor, node_rows, whole, wrap

N = 23
DOUBLE = torch.float64
Values = SimpleNamespace

REDUCED = (
    *("sum", "mean", "prod", "amax", "amin", "std", "var", "norm", "logsumexp", "all", "any"),
    *("nansum", "count_nonzero", "max", "min", "argmax", "argmin", "median", "mode"),
)
CUMULATED = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "log_softmax")
"""Methods that take an axis."""

FLOAT = torch.tensor([1.7, 3.0])
INT = torch.tensor([1, 3])

CALLS: dict[str, Callable[[Values], Any]] = {
    **{f"{name} beyond": lambda v, n=name: getattr(v.x, n)(dim=2) for name in REDUCED + CUMULATED},
    **{f"{name} before": lambda v, n=name: getattr(v.x, n)(dim=-3) for name in REDUCED + CUMULATED},
    "sum of an axis twice": lambda v: v.x.sum((0, 0)),
    "var of an axis twice": lambda v: v.x.var((0, -2)),
    "mean of integers": lambda v: v.ids.mean(),
    "std and mean beyond": lambda v: torch.std_mean(v.x, 2),
    "aminmax beyond": lambda v: v.x.aminmax(dim=2),
    "normalize beyond": lambda v: F.normalize(v.x, dim=2),
    "sort beyond": lambda v: v.x.sort(2),
    "argsort beyond": lambda v: v.x.argsort(2),
    "topk beyond": lambda v: v.x.topk(1, 2),
    "topk of too many": lambda v: v.x.topk(N + 1, 0),
    "kthvalue of too many": lambda v: v.x.kthvalue(N + 1, 0),
    "flip beyond": lambda v: v.x.flip(2),
    "flip of an axis twice": lambda v: v.x.flip(0, 0),
    "roll beyond": lambda v: v.x.roll(1, 2),
    "roll by other numbers of shifts": lambda v: v.x.roll((1, 1), (0,)),
    "cross of other sizes": lambda v: torch.linalg.cross(v.x, v.x),
    "glu of an odd number": lambda v: F.glu(v.x[:, :5]),
    # Joined and split
    "cat of other dimensions": lambda v: torch.cat([v.edges, v.m], 1),
    "cat of a plain one": lambda v: torch.cat([v.x, torch.zeros(6, dtype=DOUBLE)]),
    "cat after a plain one": lambda v: torch.cat([torch.zeros(6, dtype=DOUBLE), v.x]),
    "cat of other sizes": lambda v: torch.cat([v.x, v.x[:, :5]]),
    "cat of other rows": lambda v: torch.cat([v.x, v.x[:9]], 1),
    "cat beyond": lambda v: torch.cat([v.x, v.x], 3),
    "hstack of other dimensions": lambda v: torch.hstack([v.x, v.y]),
    "concat of other dimensions": lambda v: torch.concat([v.x, v.y], 1),
    "stack of other dimensions": lambda v: torch.stack([v.x, v.y]),
    "stack of other sizes": lambda v: torch.stack([v.x, v.x[:, :5]]),
    "stack beyond": lambda v: torch.stack([v.x, v.x], 5),
    "split into too little": lambda v: v.x.split([3, 4]),
    "split into too much": lambda v: v.x.split([20, 4]),
    "split into less than nothing": lambda v: v.x.split([-1, N + 1]),
    "split of columns": lambda v: v.x.split([3, 4], 1),
    "split by nothing": lambda v: v.x.split(0),
    "split by less than nothing": lambda v: v.x.split(-2),
    "split beyond": lambda v: v.x.split(3, 2),
    "unbind beyond": lambda v: v.x.unbind(2),
    "unbatch by too few": lambda v: unbatch(v.x, v.ids.sort()[0][:10]),
    # Views
    "unsqueeze beyond": lambda v: v.x.unsqueeze(5),
    "squeeze beyond": lambda v: v.x.squeeze(5),
    "transpose beyond": lambda v: v.x.transpose(0, 2),
    "permute beyond": lambda v: v.x.permute(0, 2),
    "permute of one axis": lambda v: v.x.permute(0),
    "permute of an axis twice": lambda v: v.x.permute(0, 0),
    "t of three axes": lambda v: v.z.t(),
    "select beyond": lambda v: v.x.select(2, 0),
    "select of no row": lambda v: v.x.select(0, N),
    "select of no column": lambda v: v.x[:, 6],
    "narrow of too much": lambda v: v.x.narrow(0, 20, 5),
    "expand of columns": lambda v: v.x.expand(N, 7),
    "expand of rows": lambda v: v.x.expand(2 * N, 6),
    "expand to fewer": lambda v: v.x.expand(6),
    "view of another size": lambda v: v.x.view(N - 1, 6),
    "view across memory": lambda v: v.x.t().view(-1),
    "unfold of too much": lambda v: v.x.unfold(0, N + 1, 1),
    "diagonal of one axis": lambda v: v.x.diagonal(0, 0, 0),
    "diagonal beyond": lambda v: v.x.diagonal(0, 0, 2),
    "repeat of fewer axes": lambda v: v.x.repeat(2),
    "repeat less than never": lambda v: v.x.repeat(1, -1),
    "pad of more axes": lambda v: F.pad(v.x, (1, 1, 1, 1, 1, 1)),
    # Rows by ids
    "index by numbers": lambda v: v.x[FLOAT],
    "index by numbers of nodes": lambda v: v.x[v.ids.double()],
    "index by int16": lambda v: v.x[INT.short()],
    "index by a mask of numbers": lambda v: v.x[(v.y == 1).double()],
    "index of columns by numbers": lambda v: v.x[:, FLOAT],
    "index of a plain one": lambda v: torch.zeros(N, 6)[v.y],
    "index of more axes": lambda v: v.x[INT, INT, INT],
    "index by a mask of other rows": lambda v: v.x[v.m[:9] > 0],
    "index by other numbers of ids": lambda v: v.x[v.ids, INT],
    "index_select by numbers": lambda v: v.x.index_select(0, FLOAT),
    "index_select by numbers of nodes": lambda v: v.x.index_select(0, v.y),
    "index_select by int16": lambda v: v.x.index_select(0, INT.short()),
    "index_select by pairs": lambda v: v.x.index_select(0, torch.ones(2, 2, dtype=torch.long)),
    "index_select beyond": lambda v: v.x.index_select(3, v.ids),
    "take by numbers": lambda v: v.x.take(FLOAT),
    "embedding of numbers": lambda v: F.embedding(v.y, v.x),
    "set by numbers": lambda v: v.x.clone().__setitem__(FLOAT, 0.0),
    "set by a mask of numbers": lambda v: v.x.clone().__setitem__((v.y == 1).double(), 0.0),
    "set of another width": lambda v: v.x.clone().__setitem__(v.ids, v.x[:, :5]),
    "index_put by numbers": lambda v: v.x.index_put((FLOAT,), torch.tensor(0.0, dtype=DOUBLE)),
    "index_put of another kind": lambda v: v.x.index_put((INT,), torch.tensor(0.0)),
    "index_add by numbers": lambda v: v.x.index_add(0, FLOAT, v.x[:2]),
    "index_add of other numbers": lambda v: v.x.index_add(0, INT, v.x[:3]),
    "index_add_ beyond": lambda v: v.x.clone().index_add_(2, INT, v.x[:2]),
    "index_copy by numbers": lambda v: v.x.index_copy(0, FLOAT, v.x[:2]),
    "index_fill by numbers": lambda v: v.x.index_fill(0, FLOAT, 1.0),
    "index_fill beyond": lambda v: v.x.index_fill(2, INT, 1.0),
    "index_reduce by numbers": lambda v: v.x.index_reduce(0, FLOAT, v.x[:2], "prod"),
    "gather by numbers": lambda v: v.x.gather(0, v.x),
    "gather beyond": lambda v: v.x.gather(3, v.wide),
    "gather of fewer axes": lambda v: v.x.gather(0, v.ids),
    "scatter_add by numbers": lambda v: v.x.scatter_add(0, v.x, v.x),
    "scatter_add of too few": lambda v: v.x.scatter_add(0, v.wide, v.x[:, :5]),
    "scatter_add beyond": lambda v: v.x.scatter_add(2, v.wide, v.x),
    "scatter of another kind": lambda v: v.x.scatter(0, v.wide, v.x.float()),
    "scatter_reduce by no name": lambda v: v.x.scatter_reduce(0, v.wide, v.x, "most"),
    "masked_fill by numbers": lambda v: v.x.masked_fill(v.x, 0),
    "masked_fill of other rows": lambda v: v.x.masked_fill(v.m > 0, 0),
    # Products, losses, sums
    "product of other sizes": lambda v: v.x @ v.x,
    "product of other kinds": lambda v: v.x @ torch.zeros(6, 2),
    "product with fewer": lambda v: v.x.t() @ v.x[:9],
    "sum with other rows": lambda v: v.x + v.x[:9],
    "sum with a plain one": lambda v: v.x + torch.zeros(N),
    "where of other rows": lambda v: torch.where(v.x > 0, v.x, v.x[:9]),
    "sum in place of more": lambda v: v.y.clone().add_(v.z),
    "cross entropy of fewer": lambda v: F.cross_entropy(v.x, v.ids[:9]),
    "cross entropy by a number of another kind": lambda v: F.nll_loss(v.x, v.m),
    "mse_loss of other sizes": lambda v: F.mse_loss(v.x, v.z),
    "layer_norm of another width": lambda v: F.layer_norm(v.x, (7,)),
    "bincount with other weights": lambda v: v.ids.bincount(v.x[:9, 0]),
}


def values() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (N,), generator=draw)
    return {
        "x": torch.randn(N, 6, dtype=DOUBLE, generator=draw),
        "z": torch.randn(N, 2, 3, dtype=DOUBLE, generator=draw),
        "y": torch.randn(N, dtype=DOUBLE, generator=draw),
        "m": torch.randn(N, generator=draw),
        "ids": ids,
        "wide": ids.view(-1, 1).expand(-1, 6).contiguous(),
        "edges": torch.randint(0, N, (2, N), generator=draw),
    }


def answer(call: Callable[[Values], Any], given: dict[str, Tensor]) -> str:
    """The name of the error that a call ends in, and what it says; or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(SimpleNamespace(**given))
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"
    return ""


def spread() -> dict[str, Tensor]:
    comm = current()
    owner = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(1))
    rows = node_rows(comm, (owner % comm.world_size == comm.rank).nonzero().view(-1), N)

    def own(t: Tensor) -> NodeTensor:
        axis = list(t.shape).index(N)
        return wrap(t.index_select(axis, rows.ids), rows, axis)

    return tree_map_only(Tensor, own, values())


def answers(calls: Any = tuple(CALLS)) -> dict[str, str]:
    given = spread()
    return {name: answer(CALLS[name], given) for name in calls}


# Calls of which rules look at the values themselves, in other words than PyTorch's.
OTHER_WORDS = (
    *("select of no row", "index by a mask of other rows", "set of another width"),
    *("bincount with other weights", "sum with other rows", "where of other rows"),
    "sum in place of more",
)


@pytest.mark.parametrize("world", [1, 3])
def test_what_one_process_refuses_is_refused(world: int) -> None:
    plain = {name: answer(call, values()) for name, call in CALLS.items()}
    assert [name for name, said in plain.items() if not said] == []
    for found in parts(answers, world):
        assert [name for name, said in found.items() if not said] == []
        same = {name: said for name, said in found.items() if name not in OTHER_WORDS}
        assert same == {name: plain[name] for name in same}


def test_workers_refuse_alike_and_go_on() -> None:
    """A few calls, on processes too; a sum over all of them comes after."""
    for found in both(refused_and_summed, 2):
        assert found == (["RuntimeError", "IndexError", "IndexError", "RuntimeError"], N)


def refused_and_summed() -> tuple[list[str], float]:
    calls = "cat of other dimensions", "norm beyond", "index by numbers", "unbatch by too few"
    said = [text.partition(":")[0] for text in answers(calls).values()]
    return said, float((spread()["x"] * 0 + 1).mean(1).sum())


FITTING: dict[str, Callable[[Values], Any]] = {
    "cat with nothing": lambda v: torch.cat([v.x, torch.empty(0, dtype=DOUBLE)], 1),
    "cat after nothing": lambda v: torch.cat([torch.empty(0, dtype=DOUBLE), v.x]),
    "cat of rows with no rows": lambda v: torch.cat([v.y, v.y[v.y > 99]]),
    "stack of the last": lambda v: torch.stack([v.x, v.x], -1),
    "norm of the last": lambda v: v.x.norm(dim=-1),
    "index by int32": lambda v: v.x[INT.int()],
    "index by a mask": lambda v: v.x[v.y > 0],
    "split of all": lambda v: v.x.split([20, 0, 3]),
    "sequences": lambda v: packed(v, (v.x[:, 0] > 0) + 1),
    "sequences of plain lengths": lambda v: packed(v, torch.arange(N) % 2 + 1),
}


def packed(v: Values, lengths: Tensor) -> list[Tensor]:
    """A sequence of one or two entries for each node; none of no entries is taken."""
    given = v.z, lengths.cpu()
    return list(pack_padded_sequence(*given, batch_first=True, enforce_sorted=False))


def fits() -> list[str]:
    given, plain = SimpleNamespace(**spread()), SimpleNamespace(**values())
    wrong = []
    for name, call in FITTING.items():
        found, expected = (tree_leaves(call(v)) for v in (given, plain))
        pairs = zip(found, expected, strict=True)
        if not all(torch.equal(whole(a, "test"), b) for a, b in pairs):
            wrong.append(name)
    return wrong


def test_what_one_process_takes_is_taken() -> None:
    for world in (1, 2):
        assert parts(fits, world) == [[]] * world


def told_twice() -> tuple[int, int, int]:
    x = spread()["x"]
    comm, sizes = x.rows.comm, []
    for columns in (2, 2, 3):
        torch.cat([x[:, :columns], x], 1).sum(1)
        sizes.append(len(comm.told))
    return tuple(sizes)


def test_pytorch_is_asked_once_for_each_shape() -> None:
    ((first, second, third),) = parts(told_twice, 1)
    assert first == second < third


def test_a_call_that_changes_its_numbers_is_known_again() -> None:
    def run() -> list[int]:
        x, sizes = spread()["x"], []
        for step in range(3):
            F.pad(x, (1, 1), value=0.1 * step)
            sizes.append(len(x.rows.comm.told))
        return sizes

    assert parts(run, 1) == [[1, 1, 1]]
