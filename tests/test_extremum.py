"""Maxima and minima of source rows: PyTorch's values, ties, NaN and gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    Partitions,
    make_graph,
    whole,
    workers,
)
from test_ops import problem
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SimpleConv, global_max_pool

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.kernels import ops

WIDTHS = (1, 2, 3, 4, 7, 15, 16, 17, 63, 64, 65, 100, 130)


def with_ties(width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A few values only, so that several rows reach an extremum; and a NaN and infinities."""
    given = problem(width, dtype, seed=width)
    given["rows"] = (given["rows"] * 2).round()
    given["rows"][3, 0], given["rows"][4, -1] = float("nan"), float("inf")
    given["rows"][5] = -float("inf")
    return given


def looped(given: dict[str, Tensor], largest: bool) -> tuple[Tensor, Tensor]:
    """Target by target, by PyTorch's own maximum."""
    width = given["rows"].size(1)
    best = given["rows"].new_full((45, width), -float("inf") if largest else float("inf"))
    ties = torch.zeros_like(best)
    offsets = given["offsets"].tolist()
    for k, target in enumerate(given["targets"].tolist()):
        values = given["rows"][given["source"][offsets[k] : offsets[k + 1]].long()]
        if values.size(0):
            best[target] = values.amax(0) if largest else values.amin(0)
            ties[target] = (values == best[target]).sum(0).to(ties.dtype)
    return best, ties


def kernel(given: dict[str, Tensor], largest: bool, halves: bool = False) -> tuple[Tensor, Tensor]:
    """All edges at once, or half of every target's first, as they come from two workers."""
    rows, targets = given["rows"], given["targets"]
    best = rows.new_full((45, rows.size(1)), -float("inf") if largest else float("inf"))
    ties = torch.zeros_like(best)
    source, offsets = given["source"], given["offsets"]
    if not halves:
        ops.extremum_(best, ties, rows, source, offsets, targets, largest)
        return best, ties
    half = (offsets[:-1] + offsets[1:]) // 2
    for low, high in ((offsets[:-1], half), (half, offsets[1:])):
        parts = [source[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        counts = torch.tensor([0, *(p.numel() for p in parts)], dtype=torch.int32)
        at = torch.cat(parts), counts.cumsum(0, dtype=torch.int32), targets
        ops.extremum_(best, ties, rows, *at, largest)
    return best, ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
def test_extrema_and_ties_equal_pytorchs(dtype: torch.dtype, largest: bool, kernels: None):
    for width in WIDTHS:
        given = with_ties(width, dtype)
        expected = looped(given, largest)
        assert bool((expected[1] > 1).any())
        for halves in (False, True):
            found = kernel(given, largest, halves)
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), (width, halves)
                assert torch.equal(mine.isnan(), theirs.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_go_to_all_that_reach_the_extremum(dtype: torch.dtype, kernels: None):
    for width in WIDTHS:
        given = with_ties(width, dtype)
        best, ties = kernel(given, True)
        target = given["targets"].repeat_interleave(given["offsets"].diff())
        source = given["source"].long()
        order = source.argsort(stable=True)
        rows, counts = source[order].unique(return_counts=True)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        total, expected = (torch.ones(30, width, dtype=dtype) for _ in "ab")
        gradient = given["out"]
        at = target[order].int(), offsets, rows
        reached = ops.extremum_backward_(total, given["rows"], gradient, best, *at)
        same = given["rows"][source] == best[target]
        expected.index_add_(0, source, gradient[target] * same)
        torch.testing.assert_close(total, expected)
        assert int(reached) == int(same.sum()) == int(ties.sum())


def test_bad_input_raises(kernels: None):
    given = with_ties(6, torch.float32)
    best, ties = kernel(given, True)
    at = given["source"], given["offsets"], given["targets"]
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((best, ties, given["rows"][:9], *at), IndexError, "'source' names a row"),
        ((best[:5], ties[:5], given["rows"], *at), IndexError, "ascending 'targets'"),
        ((best, ties[1:], given["rows"], *at), ValueError, "'ties' of the shape of 'best'"),
        ((best, ties, given["rows"][:, 1:], *at), ValueError, "rows of one width"),
        ((best, ties, given["rows"].double(), *at), TypeError, "of one dtype"),
        ((best, ties, given["rows"], at[0].long(), at[1].long(), at[2]), TypeError, "int32 'sour"),
        ((best, best, given["rows"], *at), RuntimeError, "overlap|memory location"),
        ((best.half(), ties.half(), given["rows"].half(), *at), TypeError, "float32 or float64"),
    ]
    for arguments, kind, text in cases:
        with pytest.raises(kind, match=text):
            ops.extremum_(*arguments)
    bad = at[0].clone().fill_(45), at[1], torch.arange(at[2].numel())
    with pytest.raises(IndexError, match="extremum_backward: 'source' names a row"):
        ops.extremum_backward_(torch.zeros(30, 6), given["rows"], best, best, *bad)


def test_the_operators_are_registered_as_torch_wants_it(kernels: None):
    given = problem(4, torch.float64, edges=20)
    best, ties = torch.zeros(45, 4).double(), torch.zeros(45, 4).double()
    at = given["source"], given["offsets"], given["targets"]
    arguments: tuple[Any, ...] = (best, ties, given["rows"], *at, False)
    torch.library.opcheck(torch.ops.pyg_sar.extremum_.default, arguments)
    arguments = (torch.zeros(45, 4).double(), given["out"], given["rows"], given["rows"] + 1, *at)
    torch.library.opcheck(torch.ops.pyg_sar.extremum_backward_.default, arguments)


# Layers #######################################################################


WHOLE = (
    SARPolicy(),
    SARPolicy(kernels="off", message_budget=600),
    SARPolicy(mode=2),
    SARPolicy(mode=3),
    SARPolicy(strategy="chunked"),
)


def same(found: Tensor, right: Tensor) -> bool:
    close = torch.allclose(found.nan_to_num(), right.nan_to_num(), rtol=1e-10, atol=1e-12)
    return close and torch.equal(found.isnan(), right.isnan())


def test_integers(partitions: Partitions):
    """Labels have an extremum, too."""
    data = make_graph()
    root = partitions(data, 2, "random")
    layers = [SimpleConv(aggr=aggr) for aggr in ("max", "min")]
    values = data.y.view(-1, 1) - 1
    expected = [layer(values, data.edge_index) for layer in layers]

    def worker() -> Any:
        part = pyg_sar.load_partition(root)
        mine = [pyg_sar.distribute(SimpleConv(aggr=aggr)) for aggr in ("max", "min")]
        found = [layer(part.y.view(-1, 1) - 1, part.edge_index) for layer in mine]
        return [out.full_tensor() for out in found]

    for found in workers(worker, 2):
        assert all(map(torch.equal, found, expected))


def test_nan_and_infinite_features_as_in_one_process(tmp_path: Path):
    """PyG's gradient of a target whose extremum is NaN is NaN at all of its in-edges; it was 0."""
    data = make_graph()
    data.x[3, 0], data.x[7, 1], data.x[8, 2] = math.nan, math.inf, -math.inf
    data.x[5], data.x[10:20, 3] = math.nan, 0
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    weight = torch.randn(data.x.size(1), dtype=torch.float64)
    expected = {}
    for aggr in ("max", "min"):
        x = data.x.clone().requires_grad_()
        out = SimpleConv(aggr)(x, data.edge_index)
        (out * weight).sum().backward()
        assert x.grad is not None and x.grad.isnan().sum() > out.isnan().sum() > 0
        expected[aggr] = out.detach(), x.grad

    def worker() -> None:
        part = pyg_sar.load_partition(tmp_path / "parts")
        for policy in WHOLE:
            for aggr, (out, gradient) in expected.items():
                layer = pyg_sar.distribute(SimpleConv(aggr), policy)
                x = part.x.clone().requires_grad_()
                found = layer(x, part.edge_index)
                (found * weight).sum().backward()
                assert same(found.full_tensor().detach(), out), (aggr, policy)
                assert same(x.grad.full_tensor(), gradient), (aggr, policy)

    workers(worker, 3)


def test_nan_in_a_readout_as_in_one_process(tmp_path: Path):
    x = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [5.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    data = Data(x=x, batch=torch.tensor([0, 0, 1, 1]), edge_index=torch.tensor([[0], [1]]))
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", torch.tensor([0, 1, 0, 1]))

    def run(data: Data) -> list[Tensor]:
        x = data.x.clone().requires_grad_()
        out = global_max_pool(x, data.batch)
        (out * torch.tensor([1.0, 2.0])).sum().backward()
        return [whole(out.detach()), whole(x.grad)]

    for found in workers(lambda: run(pyg_sar.load_partition(tmp_path / "parts")), 2):
        assert all(map(same, found, run(data)))


def largest(root: Path) -> Tensor:
    data = pyg_sar.load_partition(root)
    groups = data.group.view(-1, 1).expand(-1, 2)
    out = torch.zeros(2, 2, dtype=data.x.dtype)
    return out.scatter_reduce(0, groups, data.x, "amax", include_self=False)


def test_the_largest_of_all_workers_may_be_nan(tmp_path: Path):
    """gloo's maximum of NaN and a number is the one or the other."""
    x = torch.tensor([[1.0, math.nan], [2.0, 3.0], [0.0, 1.0], [5.0, 2.0]])
    data = Data(x=x, edge_index=torch.tensor([[0, 1], [1, 2]]), group=torch.arange(4) // 2)
    for part in ([0, 1, 0, 1], [1, 0, 1, 0]):
        root = tmp_path / str(part[0])
        pyg_sar.write_partitions(data, 2, root, torch.tensor(part))
        for found in workers(largest, 2, root):
            assert same(found, torch.tensor([[2.0, math.nan], [5.0, 2.0]]))
