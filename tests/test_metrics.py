"""Means over rows of uneven workers; losses and accuracies are cases of test_node_tensors.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
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


def work() -> dict[str, Any]:
    found: dict[str, Any] = {"mean": [], "dtype": [], "odd": []}
    for sizes in SIZES:
        for columns in ((), (3,), (2, 2)):
            mine = spread(values_of(sizes, *columns), sizes).requires_grad_()
            mean = mine.mean()
            (-2.5 * mean).backward()
            found["mean"].append((mean.detach(), whole(mine.grad)))
    for dtype in DTYPES:
        sizes = [257, 0, 515, 0]
        ones = torch.cat([torch.full((257,), 1.0), torch.full((515,), 3.0)]).to(dtype)
        mine = spread(ones, sizes).requires_grad_()
        mean = mine.mean()
        mean.backward()
        found["dtype"].append((mean.detach(), whole(mine.grad)))
    for odd in (math.inf, math.nan):
        found["odd"].append(spread(torch.tensor([1.0, odd]), [1, 0, 0, 1]).mean().item())
    found["odd"].append(spread(torch.empty(0), [0] * WORKERS).mean().item())
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


def test_infinite_values_and_none_reach_everyone(results):
    for infinite, nan, nothing in (found["odd"] for found in results):
        assert infinite == math.inf and math.isnan(nan) and math.isnan(nothing)
