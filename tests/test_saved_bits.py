"""ReLU and dropout that save bits: the gradients of plain PyTorch, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyg_sar.store.part_store import (
    BITS_CHUNK,
    LEAST_BITS,
    SavedBits,
    _Saved,
)

NAN = float("nan")
Call = Callable[[Tensor, Tensor], Tensor]

CALLS: dict[str, Call] = {
    "relu, dropout": lambda x, w: F.dropout(F.relu(x @ w), 0.5) @ w,
    "method, module": lambda x, w: torch.nn.Dropout(0.3)((x @ w).relu()) @ w,
    "in place": lambda x, w: torch.dropout((x @ w).relu_(), 0.1, True) @ w,
    "another use of relu": lambda x, w: F.dropout(r := (x @ w).relu(), 0.7) @ w + r,
    "another use of dropout": lambda x, w: (d := F.dropout((x @ w).relu())).square() + d @ w,
    "dropout alone": lambda x, w: F.dropout(x @ w, 0.9) @ w,
    "dropout in place": lambda x, w: F.dropout(x @ w, 0.2, inplace=True).exp(),
    "dropout of something else": lambda x, w: F.dropout(F.relu(x @ w).exp()) @ w,
    "columns": lambda x, w: F.dropout((x @ w).t().relu()).sin(),
    "all dropped": lambda x, w: F.dropout((x @ w).relu(), 1.0) + x,
    "not training": lambda x, w: F.dropout((x @ w).relu(), 0.5, training=False) @ w,
    "part of it in place": lambda x, w: (h := x @ w, h[:250].relu_(), F.dropout(h, 0.4) @ w)[-1],
    "a part of relu": lambda x, w: F.dropout((r := (x @ w).relu())[:, 1:], 0.4) + r[:, :-1],
    "a view": lambda x, w: F.dropout((x @ w).relu().view(-1)).view(x.shape) @ w,
    "nan": lambda x, w: F.dropout((x @ w).masked_fill(x > 1, float("nan")).relu()).nan_to_num(0.0),
}


def gradients(call: Call, dtype: torch.dtype, mode: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, w = (torch.randn(*size).to(dtype).requires_grad_() for size in ((301, 67), (67, 67)))
    with mode:
        out = call(x, w)
        return out, *torch.autograd.grad(out.square().sum(), (x, w)), torch.rand(1)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_same(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        expected = gradients(CALLS[name], dtype, nullcontext())
        found = gradients(CALLS[name], dtype, SavedBits())
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), dtype


def test_what_is_kept():
    """Both tensors; more than one chunk, whose last one is no whole number of bytes."""
    size = BITS_CHUNK + LEAST_BITS + 3
    x, mode = torch.randn(size, requires_grad=True), SavedBits()
    with mode:
        F.dropout((2 * x).relu()).sum().backward()
        assert mode.kept == 2 * 4 * size
        (2 * x)[: LEAST_BITS - 1].relu().sum()
        F.relu(x.detach())
        with torch.no_grad():
            F.dropout(x)
        assert mode.kept == 2 * 4 * size
    assert x.grad is not None and set(x.grad.unique().tolist()) == {0.0, 4.0}


@pytest.mark.parametrize("name", CALLS)
def test_without_a_backward_pass_nothing_stays(name):
    """What only the graph holds goes with the graph: no output holds itself."""
    x, w = (torch.randn(*size, requires_grad=True) for size in ((301, 67), (67, 67)))
    freed: list[bool] = []
    with SavedBits():
        inner = x * 1
        inner.grad_fn.register_hook(Freed(freed))  # type: ignore[union-attr]
        out = CALLS[name](inner, w)
    del inner
    assert not freed
    del out
    assert freed


class Freed:
    """A hook that says when its node is gone."""

    def __init__(self, freed: list[bool]) -> None:
        self._freed = freed

    def __call__(self, *_: Any) -> None:
        """Nothing."""

    def __del__(self) -> None:
        self._freed.append(True)


def test_second_derivatives():
    def run(mode: Any) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(LEAST_BITS, requires_grad=True)
        with mode:
            out = F.dropout((x**3).relu(), 0.5)
            (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(run(nullcontext()), run(SavedBits()))


def test_values_that_change_are_refused():
    """Like PyTorch's own; bits don't change."""
    x = torch.randn(LEAST_BITS, requires_grad=True)
    with SavedBits():
        out = (2 * x).relu()
        out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        out = F.dropout((2 * x).relu_(), inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        out = (2 * x).relu()
        F.dropout(out)
        out.add_(1)
        out.sum().backward()
    assert torch.equal(x.grad, 2.0 * (x > 0))


def test_checkpoints_keep_their_own():
    x, mode = torch.randn(LEAST_BITS, requires_grad=True), SavedBits()
    with mode:
        checkpoint(lambda x: F.dropout(x.relu()), x, use_reentrant=False).sum().backward()
        assert mode.kept == 0
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            F.dropout((2 * x).relu())
        assert len(packed) == 2 and mode.kept == 0


def test_other_values_stay_whole():
    """A third value, in the second chunk only; a first chunk of zeros; NaN."""
    values = torch.zeros(2 * BITS_CHUNK)
    values[::2] = 1.5
    two = _Saved(values.clone(), sign=False)
    assert two.become_bits() == values.nbytes and torch.equal(two.whole(), values)
    zeros = values.clone()
    zeros[:BITS_CHUNK] = 0
    for other in (zeros, *(values.index_fill(0, torch.tensor([BITS_CHUNK]), v) for v in (2, NAN))):
        found = _Saved(other, sign=False)
        assert found.become_bits() == 0 and found.whole().data_ptr() == other.data_ptr()
