"""Losses and metrics of tensors of the whole graph: PyTorch's numbers, from uneven workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import whole, workers
from torch import Tensor

import pyg_sar
from pyg_sar.tensors import NodeTensor, node_rows, wrap

WORKERS = 4
SIZES = ([3, 0, 2, 6], [0, 0, 0, 1], [5, 1, 1, 1], [2, 6, 0, 0])
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def spread(values: Tensor, sizes: list[int]) -> NodeTensor:
    """A tensor of the whole graph, of which each worker has so many of the rows, in turn."""
    comm = pyg_sar.comm.current()
    ids = torch.arange(sum(sizes)).split(sizes)[comm.rank]
    return wrap(values[ids], node_rows(comm, ids, sum(sizes)), 0)


def values_of(sizes: list[int], *columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sum(sizes), *columns, generator=draw, dtype=torch.float64)


def means(h: Tensor, y: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Losses that are means over rows, in part, of both, or of neither, and a penalty."""
    row, log, one, yes = y.double(), h.log_softmax(1), h[:, 0], y.double().clamp(max=1)
    values = F.cross_entropy(h, y, reduction="none")
    return {
        "values": lambda: values.mean(),
        "squares": lambda: h.square().mean((0, 1)),
        "cross entropy": lambda: F.cross_entropy(h, y),
        "two": lambda: one.mean() + F.nll_loss(log, y).float().double(),
        "penalty": lambda: F.mse_loss(one, row) + weight.square().sum() / 3,
        "stacked": lambda: torch.stack([one.mean(), F.l1_loss(one, row)]).mean(),
        "negative": lambda: -F.smooth_l1_loss(one, row),
        "viewed": lambda: F.huber_loss(one, row).view(1).squeeze(),
        "binary": lambda: F.binary_cross_entropy(one.sigmoid(), row.clamp(max=1)),
        "logits": lambda: F.binary_cross_entropy_with_logits(one, yes),
        "sum": lambda: F.cross_entropy(h, y, reduction="sum") / len(y),
        "rows": lambda: values.mean() + h.mean(1).mean(),
        "mean of a parameter": lambda: values.mean() + weight.square().mean() / 3,
        "joined": lambda: torch.cat([values.mean().view(1), h.mean().view(1)]).mean(),
    }


def losses(x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Each loss with its gradients, of rows and of a parameter."""
    found = {}
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    x = x.clone().requires_grad_()
    for name in means(x @ weight, y, weight):
        x.grad = weight.grad = None
        loss = means(x @ weight, y, weight)[name]()
        loss.backward()
        found[name] = loss.detach(), whole(x.grad), weight.grad
    return found


def accuracies(out: Tensor, y: Tensor, mask: Tensor) -> list[float]:
    """As scripts write them."""
    right = out.argmax(-1) == y
    return [
        int(right.sum()) / len(y),
        right.double().mean().item(),
        int(right[mask].sum()) / max(int(mask.sum()), 1),
        (out.argmax(-1)[mask] == y[mask]).double().mean().item(),
    ]


def work() -> dict[str, Any]:
    found: dict[str, Any] = {"mean": [], "accuracy": [], "dtype": [], "half": [], "odd": []}
    for sizes in SIZES:
        for columns in ((), (3,), (2, 2)):
            mine = spread(values_of(sizes, *columns), sizes).requires_grad_()
            mean = mine.mean()
            (-2.5 * mean).backward()
            found["mean"].append((mean.detach(), whole(mine.grad)))
        y = torch.arange(sum(sizes)) % 3
        mask = spread(values_of(sizes) > 0, sizes)
        found["accuracy"].append(
            accuracies(spread(values_of(sizes, 3), sizes), spread(y, sizes), mask)
        )
    for dtype in DTYPES:
        sizes = [257, 0, 515, 0]
        ones = torch.cat([torch.full((257,), 1.0), torch.full((515,), 3.0)]).to(dtype)
        mine = spread(ones, sizes).requires_grad_()
        mean = mine.mean()
        mean.backward()
        found["dtype"].append((mean.detach(), whole(mine.grad)))
    for dtype in DTYPES[2:]:
        many = spread(torch.ones(70_000, dtype=dtype), [35_000, 35_000, 0, 0]).requires_grad_()
        mean = many.mean()
        (1024 * mean).backward()
        found["half"].append((float(mean.detach()), whole(many.grad)[0].double().item()))
    for odd in (math.inf, math.nan):
        found["odd"].append(spread(torch.tensor([1.0, odd]), [1, 0, 0, 1]).mean().item())
    found["odd"].append(spread(torch.empty(0), [0] * WORKERS).mean().item())
    x, y = values_of([9], 4), torch.arange(9) % 3
    found["losses"] = losses(spread(x, [5, 2, 0, 2]), spread(y, [5, 2, 0, 2]))
    with torch.no_grad():
        found["plain"] = spread(torch.ones(2, requires_grad=True), [1, 1, 0, 0]).mean()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return workers(work, WORKERS)


def test_means_and_their_gradients(results):
    """Workers have unequal numbers of values, or none: it is no mean of their means."""
    cases = [(sizes, columns) for sizes in SIZES for columns in ((), (3,), (2, 2))]
    for k, (sizes, columns) in enumerate(cases):
        values = values_of(sizes, *columns).requires_grad_()
        expected = values.mean()
        (-2.5 * expected).backward()
        for found in results:
            torch.testing.assert_close(
                found["mean"][k][0], expected.detach(), rtol=1e-14, atol=1e-15
            )
            torch.testing.assert_close(found["mean"][k][1], values.grad, rtol=1e-14, atol=0)
        assert len({float(found["mean"][k][0]) for found in results}) == 1, "to the bit"
    assert not any(found["plain"].requires_grad for found in results)


def test_means_keep_their_dtype(results):
    """Counts and sums are exact: 257 is no number of bfloat16."""
    right = (257 + 3 * 515) / 772
    for dtype, *found in zip(DTYPES, *(f["dtype"] for f in results), strict=True):
        for mean, gradient in found:
            assert mean.dtype == gradient.dtype == dtype
            assert abs(float(mean) - right) <= torch.finfo(dtype).eps * right
            share = torch.full_like(gradient, 1 / 772).double()
            assert torch.allclose(gradient.double(), share, rtol=2**-8)


def test_means_count_beyond_half_precision(results):
    """float16 ends at 65,504."""
    for found in results:
        for dtype, (mean, gradient) in zip(DTYPES[2:], found["half"], strict=True):
            assert mean == 1 and abs(gradient / (1024 / 70_000) - 1) <= torch.finfo(dtype).eps


def test_infinite_values_and_none_reach_everyone(results):
    for infinite, nan, nothing in (found["odd"] for found in results):
        assert infinite == math.inf and math.isnan(nan) and math.isnan(nothing)


def test_accuracies(results):
    for k, sizes in enumerate(SIZES):
        y, out = torch.arange(sum(sizes)) % 3, values_of(sizes, 3)
        expected = accuracies(out, y, values_of(sizes) > 0)
        for found in results:
            assert found["accuracy"][k] == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_losses_that_average(results):
    expected = losses(values_of([9], 4), torch.arange(9) % 3)
    for found in results:
        for name, parts in expected.items():
            for mine, theirs in zip(found["losses"][name], parts, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=name)
