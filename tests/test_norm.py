"""Batch normalisation over the nodes of all workers, against torch's and PyG's on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, error, threads
from torch import Tensor
from torch.nn import BatchNorm1d

import pyg_sar
from pyg_sar.kernels import ops

CHANNELS = 5
ROWS = 23

NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "torch": lambda: BatchNorm1d(CHANNELS),
    "torch, cumulative": lambda: BatchNorm1d(CHANNELS, momentum=None),
    "torch, momentum": lambda: BatchNorm1d(CHANNELS, momentum=0.37, eps=1e-2),
    "torch, not affine": lambda: BatchNorm1d(CHANNELS, affine=False),
    "torch, no statistics": lambda: BatchNorm1d(CHANNELS, track_running_stats=False),
    "torch, nothing": lambda: BatchNorm1d(CHANNELS, affine=False, track_running_stats=False),
    "pyg": lambda: gnn.BatchNorm(CHANNELS),
    "pyg, options": lambda: gnn.BatchNorm(CHANNELS, eps=1e-3, momentum=0.5, affine=False),
    "pyg, no statistics": lambda: gnn.BatchNorm(CHANNELS, track_running_stats=False),
    "pyg, single": lambda: gnn.BatchNorm(CHANNELS, allow_single_element=True),
}


def make_norm(name: str) -> torch.nn.Module:
    norm = NORMS[name]().double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return norm


def batches(rows: int = ROWS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [
        torch.randn(rows, CHANNELS, generator=draw, dtype=torch.float64).mul(k + 1).add(k).to(dtype)
        for k in range(3)
    ]


def split(world: int, rows: int = ROWS) -> list[slice]:
    """Uneven parts; with three workers the second has no row."""
    bounds = {1: [0, rows], 2: [0, 4, rows], 3: [0, rows - 2, rows - 2, rows]}[world]
    return [slice(a, b) for a, b in pairwise(bounds)]


def steps(norm: torch.nn.Module, inputs: list[Tensor]) -> list[Any]:
    """Two steps of training, one of evaluation with gradients: everything they leave."""
    found = []
    for k, value in enumerate(inputs):
        norm.train(k < 2)
        norm.zero_grad()
        x = value.clone().requires_grad_()
        out = norm(x)
        weight = torch.cos(torch.arange(CHANNELS, dtype=torch.float64)).to(out.dtype)
        (out.sin() * weight).sum().backward()
        grads = {n: p.grad.clone() for n, p in norm.named_parameters() if p.grad is not None}
        buffers = {n: b.clone() for n, b in norm.named_buffers()}
        found.append((out.detach(), x.grad, grads, buffers))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_equal_to_one_process(name: str, world: int):
    norm, inputs = make_norm(name), batches()
    expected = steps(copy.deepcopy(norm), inputs)

    def worker() -> Any:
        mine = split(world)[pyg_sar.comm.current().rank]
        model = pyg_sar.distribute(torch.nn.Sequential(copy.deepcopy(norm)), view="local")
        return steps(model, [value[mine] for value in inputs])

    workers = threads(worker, world)
    for k, (out, x_grad, grads, buffers) in enumerate(expected):
        found = [w[k] for w in workers]
        assert error(torch.cat([f[0] for f in found]), out) <= TOLERANCE, (k, "out")
        assert error(torch.cat([f[1] for f in found]), x_grad) <= TOLERANCE, (k, "x.grad")
        for f in found:
            assert {n.removeprefix("0.") for n in f[2]} == set(grads)
            for n, gradient in grads.items():
                assert error(f[2][f"0.{n}"], gradient) <= TOLERANCE, (k, n)
            for n, buffer in buffers.items():
                assert error(f[3][f"0.{n}"], buffer) <= TOLERANCE, (k, n)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda s: sum(s) > 1),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    shift=st.sampled_from([0.0, 100.0]),
)
@settings(max_examples=20)
def test_any_split(sizes: list[int], scale: float, shift: float):
    draw = torch.Generator().manual_seed(sum(sizes))
    x = torch.randn(sum(sizes), CHANNELS, generator=draw, dtype=torch.float64) * scale + shift
    norm = BatchNorm1d(CHANNELS).double()
    expected = copy.deepcopy(norm)(x)

    def worker() -> Tensor:
        model = pyg_sar.distribute(torch.nn.Sequential(copy.deepcopy(norm)), view="local")
        return model(x.split(sizes)[pyg_sar.comm.current().rank]).detach()

    found = torch.cat(threads(worker, len(sizes)))
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_large_mean_small_deviation(world: int, dtype: torch.dtype):
    """Mean 100 and standard deviation 0.01: E[x^2] - E[x]^2 would cancel (pitfall 6).

    In float32 the error is at most twice that of torch, both against float64 with the same
    inputs; in float64 the numbers are torch's within 1e-10.
    """
    draw = torch.Generator().manual_seed(3)
    x = (100 + 0.01 * torch.randn(400, CHANNELS, generator=draw, dtype=torch.float64)).to(dtype)
    gradient = torch.randn(400, CHANNELS, generator=draw, dtype=torch.float64)

    def run(norm: torch.nn.Module, value: Tensor, weight: Tensor) -> Any:
        value = value.clone().requires_grad_()
        out = norm(value)
        out.backward(weight.to(out.dtype))
        norms = [m for m in norm.modules() if isinstance(m, BatchNorm1d)]
        return out.detach(), value.grad, norms[0].running_var

    exact = run(BatchNorm1d(CHANNELS).double(), x.double(), gradient)
    theirs = run(BatchNorm1d(CHANNELS).to(dtype), x, gradient)

    def worker() -> Any:
        mine = split(world, 400)[pyg_sar.comm.current().rank]
        model = pyg_sar.distribute(
            torch.nn.Sequential(BatchNorm1d(CHANNELS).to(dtype)), view="local"
        )
        return run(model, x[mine], gradient[mine])

    workers = threads(worker, world)
    ours = (torch.cat([w[0] for w in workers]), torch.cat([w[1] for w in workers]), workers[0][2])
    slack = TOLERANCE if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
    for mine, torchs, right in zip(ours, theirs, exact, strict=True):
        limit = 2 * error(torchs.double(), right) + slack
        assert error(mine.double(), right) <= limit


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_low_precision(parameters: torch.dtype):
    """bfloat16 rows, parameters of either kind: torch's dtype, at most twice its error."""
    inputs = batches(60, torch.bfloat16)
    norm = BatchNorm1d(CHANNELS).to(parameters)
    theirs = copy.deepcopy(norm)(inputs[1])
    exact = copy.deepcopy(norm).double()(inputs[1].double())

    def worker() -> Any:
        mine = split(3, 60)[pyg_sar.comm.current().rank]
        model = pyg_sar.distribute(torch.nn.Sequential(copy.deepcopy(norm)), view="local")
        return model(inputs[1][mine]).detach()

    ours = torch.cat(threads(worker, 3))
    assert ours.dtype == theirs.dtype
    assert error(ours.double(), exact) <= 2 * error(theirs.double(), exact) + 2**-8


def test_counts_are_exact():
    """Bessel's correction by the number of all rows, with workers of one row and of none."""

    def worker() -> Tensor:
        rows = [1, 0, 1][pyg_sar.comm.current().rank]
        model = pyg_sar.distribute(torch.nn.Sequential(BatchNorm1d(CHANNELS)), view="local")
        model(torch.full((rows, CHANNELS), float(pyg_sar.comm.current().rank)))
        return model[0].running_var

    for variance in threads(worker, 3):
        # Rows 0 and 2: variance 2 with Bessel's correction.
        assert torch.allclose(variance, torch.full((CHANNELS,), 0.9 * 1 + 0.1 * 2.0))


@pytest.mark.parametrize("world", [1, 3])
def test_too_few_rows(world: int):
    """One row on all workers together: an error on every worker, as torch's."""

    def worker() -> None:
        rank = pyg_sar.comm.current().rank
        model = pyg_sar.distribute(torch.nn.Sequential(BatchNorm1d(CHANNELS)), view="local")
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(torch.zeros(int(rank == world - 1), CHANNELS))
        model.eval()
        assert model(torch.zeros(int(rank == 0), CHANNELS)).shape[1] == CHANNELS

    threads(worker, world)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_allow_single_element(world: int, rows: int):
    """PyG's option: with one row in all, running statistics are used, and nothing is tracked."""
    norm = make_norm("pyg, single")
    with torch.no_grad():
        norm.module.running_mean.fill_(0.3)
        norm.module.running_var.fill_(2.0)
    x = batches(2)[0][:rows]
    plain = copy.deepcopy(norm)
    expected = plain(x) if rows else x

    def worker() -> Any:
        rank = pyg_sar.comm.current().rank
        model = pyg_sar.distribute(torch.nn.Sequential(copy.deepcopy(norm)), view="local")
        mine = x[rank : rank + 1] if world > 1 else x
        return model(mine).detach(), model[0].module.running_mean

    workers = threads(worker, world)
    assert error(torch.cat([w[0] for w in workers]), expected.detach()) <= TOLERANCE
    assert all(error(w[1], plain.module.running_mean) <= TOLERANCE for w in workers)


@pytest.mark.parametrize("world", [1, 2])
def test_inputs_of_three_axes(world: int):
    """``[N, C, L]``, which BatchNorm1d takes as well: exact, or refused; never local."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(9, CHANNELS, 4, generator=draw, dtype=torch.float64)
    norm = make_norm("torch")
    expected = copy.deepcopy(norm)(x).detach()

    def worker() -> Tensor:
        mine = slice(0, 3) if pyg_sar.comm.current().rank == 0 else slice(3, 9)
        mine = mine if world == 2 else slice(0, 9)
        model = pyg_sar.distribute(torch.nn.Sequential(copy.deepcopy(norm)), view="local")
        return model(x[mine]).detach()

    try:
        found = threads(worker, world)
    except pyg_sar.errors.WorkerError as refusal:
        assert isinstance(refusal.__cause__, ValueError) and world > 1, refusal
        return
    assert error(torch.cat(found), expected) <= TOLERANCE


def test_wrong_shapes_are_torchs_errors():
    model = pyg_sar.distribute(torch.nn.Sequential(BatchNorm1d(CHANNELS)), view="local")
    with pytest.raises(ValueError, match="2D or 3D"):
        model(torch.zeros(3))
    with pytest.raises((ValueError, RuntimeError)):
        model(torch.zeros(4, CHANNELS + 1))


def test_evaluation_sends_nothing():
    def worker() -> int:
        comm = pyg_sar.comm.current()
        model = pyg_sar.distribute(torch.nn.Sequential(BatchNorm1d(CHANNELS)), view="local").eval()
        with pyg_sar.Ledger(comm) as ledger:
            model(torch.zeros(comm.rank, CHANNELS))
        return ledger.sent + ledger.received

    assert threads(worker, 3) == [0, 0, 0]


def test_training_costs_o_of_f():
    """Statistics travel, not rows: ``1 + 2F`` numbers forward, ``2F`` backward."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        model = pyg_sar.distribute(
            torch.nn.Sequential(BatchNorm1d(CHANNELS).double()), view="local"
        )
        with pyg_sar.Ledger(comm) as ledger:
            out = model(torch.randn(50 + comm.rank, CHANNELS, dtype=torch.float64))
            forward = ledger.sent
            out.sum().backward()
        return forward, ledger.sent_bytes(phase="backward", kind="statistics")

    for forward, backward in threads(worker, 2):
        assert forward <= (1 + 2 * CHANNELS) * 8
        assert backward <= 2 * CHANNELS * 8


def test_conversion_keeps_parameters_and_names():
    def worker(world: int) -> None:
        norm = gnn.BatchNorm(CHANNELS)
        before = dict(norm.named_parameters())
        keys = list(norm.state_dict())
        model = pyg_sar.distribute(torch.nn.Sequential(norm), view="local")
        assert model[0] is norm
        assert list(norm.state_dict()) == keys
        assert all(p is before[name] for name, p in norm.named_parameters())
        assert isinstance(norm, gnn.BatchNorm) and isinstance(norm.module, BatchNorm1d)
        converted = isinstance(copy.deepcopy(norm).module, pyg_sar.nn.DistBatchNorm1d)
        assert converted == (world > 1)  # one process has all nodes

    for world in (1, 2):
        threads(worker, world, world)


# Refused norms ###############################################################


class OwnNorm(BatchNorm1d):
    """A norm that the package doesn't know."""


REFUSED: dict[str, Callable[[], torch.nn.Module]] = {
    "BatchNorm2d": lambda: torch.nn.BatchNorm2d(CHANNELS),
    "BatchNorm3d": lambda: torch.nn.BatchNorm3d(CHANNELS),
    "InstanceNorm2d": lambda: torch.nn.InstanceNorm2d(CHANNELS),
    "LazyBatchNorm1d": lambda: torch.nn.LazyBatchNorm1d(affine=False, track_running_stats=False),
    "OwnNorm": lambda: OwnNorm(CHANNELS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_norms_name_the_module(name: str):
    norm = REFUSED[name]()

    def worker() -> str:
        model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([copy.deepcopy(norm)])})
        with pytest.raises(ValueError, match=name) as caught:
            pyg_sar.distribute(model, view="local")
        return str(caught.value)

    for message in threads(worker, 2):
        assert "blocks.0" in message and "Supported" in message
    pyg_sar.distribute(copy.deepcopy(norm), view="local")  # One process is exact as it is.


@pytest.mark.parametrize(
    "norm",
    [gnn.LayerNorm(CHANNELS, mode="node"), torch.nn.LayerNorm(CHANNELS), gnn.MessageNorm(),
     torch.nn.GroupNorm(1, CHANNELS)],
)  # fmt: skip
def test_norms_per_node_are_as_they_were(norm: torch.nn.Module):
    x = torch.randn(7, CHANNELS, generator=torch.Generator().manual_seed(0))
    both = isinstance(norm, gnn.MessageNorm)
    expected = norm(x, x) if both else norm(x)

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        mine = x[:3] if comm.rank == 0 else x[3:]
        model = pyg_sar.distribute(copy.deepcopy(norm), view="local")
        with pyg_sar.Ledger(comm) as ledger:
            out = model(mine, mine) if both else model(mine)
        return out.detach(), ledger.sent

    workers = threads(worker, 2)
    assert torch.allclose(torch.cat([w[0] for w in workers]), expected)
    assert [w[1] for w in workers] == [0, 0]


@pytest.mark.skipif(ops.why_missing() is not None, reason=str(ops.why_missing()))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 3), (1, 1), (33, 257), (17_000, 5)])
def test_kernels_of_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(3, rows, 2 * width, generator=draw, dtype=torch.float64).add(1e3).to(dtype)
    x, g, _ = given[..., :width]  # rows that lie apart
    shift, *columns = torch.randn(4, width, generator=draw, dtype=torch.float64).to(dtype).double()
    shift = (shift + 1e3).float().double()
    scale, offset, factor = columns
    right = x.double(), g.double()
    centred, away = right[0] - shift, right[1] - offset
    mean = right[0].mean(0) if rows else torch.zeros(width, dtype=torch.float64)
    kernels, wide = torch.ops.pyg_sar, torch.float64 if dtype == torch.float64 else torch.float32
    least = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    sums = torch.finfo(wide).eps * 64
    moments, products = kernels.column_moments(x), kernels.column_products(g, x, shift)
    made = kernels.scale_rows(x, shift, scale, offset)
    both = kernels.scale_rows(x, shift, scale, offset, g, factor)
    for found, expected, most in (
        (moments[0], mean, sums),
        (moments[1], (right[0] - mean).square().sum(0), sums),
        (products[0], right[1].sum(0), sums),
        (products[1], (right[1] * centred).sum(0), sums * max(rows, 1) ** 0.5),
        (made, centred * scale + offset, least),
        (both, centred * scale + away * factor, least),
    ):
        most *= float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=most)
    for call in (
        (kernels.column_moments.default, (x,)),
        (kernels.column_products.default, (g, x, shift)),
        (kernels.scale_rows.default, (x, shift, scale, offset, g, factor)),
    ):
        torch.library.opcheck(*call)
    with pytest.raises(ValueError, match=f"'shift' to have {width} numbers"):
        kernels.scale_rows(x, shift[:-1], scale, offset)
    with pytest.raises(ValueError, match="'gradient' of shape"):
        kernels.column_products(g.repeat(2, 2), x, shift)
