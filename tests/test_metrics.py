"""``pyg_sar.mean`` and ``pyg_sar.accuracy``: global numbers from uneven workers."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import threads
from torch import Tensor

import pyg_sar


def piece(values: Tensor, sizes: list[int]) -> Tensor:
    """This worker's rows."""
    return values.split(sizes)[pyg_sar.comm.current().rank]


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(lambda s: sum(s) > 0),
    columns=st.sampled_from([(), (3,), (2, 2)]),
    factor=st.sampled_from([1.0, -2.5]),
)
@settings(max_examples=25)
def test_mean_and_gradient(sizes: list[int], columns: tuple[int, ...], factor: float):
    """Workers with unequal numbers of values, or none: the mean of all, and each value's share."""
    draw = torch.Generator().manual_seed(sum(sizes))
    values = torch.randn(sum(sizes), *columns, generator=draw, dtype=torch.float64)
    whole = values.clone().requires_grad_()
    expected = whole.mean()
    (factor * expected).backward()
    assert whole.grad is not None

    def worker() -> Any:
        mine = piece(values, sizes).clone().requires_grad_()
        found = pyg_sar.mean(mine)
        assert found.dim() == 0 and found.requires_grad
        (factor * found).backward()
        return found.detach(), mine.grad

    workers = threads(worker, len(sizes))
    assert len({float(found) for found, _ in workers}) == 1, "to the bit on every worker"
    assert torch.allclose(workers[0][0], expected.detach(), rtol=1e-14, atol=1e-15)
    gradient = torch.cat([g for _, g in workers])
    assert torch.allclose(gradient, whole.grad, rtol=1e-14)


def test_mean_is_not_the_mean_of_means():
    """Pitfall 8: three values here, one there."""
    values = torch.tensor([1.0, 1.0, 1.0, 5.0])
    assert [float(m) for m in threads(lambda: pyg_sar.mean(piece(values, [3, 1])), 2)] == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mean_dtypes(dtype: torch.dtype):
    """The result has the values' dtype; counts and sums are exact (257 is no bfloat16 number)."""
    sizes = [257, 0, 515]

    def worker() -> Any:
        rank = pyg_sar.comm.current().rank
        mine = torch.full((sizes[rank],), [1.0, 0.0, 3.0][rank], dtype=dtype).requires_grad_()
        found = pyg_sar.mean(mine)
        found.backward()
        return found.detach(), mine.grad

    right = (257 + 3 * 515) / 772
    for rank, (found, gradient) in enumerate(threads(worker, 3)):
        assert found.dtype == gradient.dtype == dtype
        assert abs(float(found) - right) <= torch.finfo(dtype).eps * right
        assert gradient.shape == (sizes[rank],)
        if gradient.numel():
            assert torch.allclose(
                gradient.double(), torch.full_like(gradient, 1 / 772).double(), rtol=2**-8
            )


def test_mean_counts_beyond_half_precision():
    """float16 ends at 65,504, where the count was infinite: loss and gradient were 0."""

    def worker(dtype: torch.dtype) -> Any:
        mine = torch.ones(35_000, dtype=dtype).requires_grad_()
        found = pyg_sar.mean(mine)
        (1024 * found).backward()
        return float(found.detach()), mine.grad[0].double().item()

    for dtype in (torch.float16, torch.bfloat16):
        for found, gradient in threads(lambda dtype=dtype: worker(dtype), 2):
            assert found == 1 and abs(gradient / (1024 / 70_000) - 1) <= torch.finfo(dtype).eps


def test_mean_without_gradient():
    def worker() -> Any:
        with torch.no_grad():
            found = pyg_sar.mean(torch.ones(2, requires_grad=True))
        return found, pyg_sar.mean(torch.ones(3))

    for inside, plain in threads(worker, 2):
        assert not inside.requires_grad and not plain.requires_grad
        assert float(inside) == float(plain) == 1


def test_infinite_values_reach_everyone():
    def worker() -> list[float]:
        rank = pyg_sar.comm.current().rank
        values = [torch.tensor([math.inf if rank else 1.0]), torch.tensor([math.nan] * rank)]
        return [float(pyg_sar.mean(v)) for v in values]

    for infinite, nan in threads(worker, 2):
        assert infinite == math.inf and math.isnan(nan)


def test_mean_of_nothing_anywhere():
    """An error on every worker, none waiting."""

    def worker() -> str:
        with pytest.raises(ValueError, match="No worker of 3 holds a value") as caught:
            pyg_sar.mean(torch.empty(0))
        return str(caught.value)

    assert len(set(threads(worker, 3))) == 1


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (torch.tensor([1, 2]), "int64"),
        (torch.tensor([True]), "bool"),
        ([1.0], "list"),
        (1.0, "float"),
    ],
)
def test_mean_refuses_what_is_no_floating_point_tensor(values: Any, kind: str):
    with pytest.raises(TypeError, match=f"floating point tensor.*{kind}"):
        pyg_sar.mean(values)


def test_mean_refuses_reduced_losses():
    with pytest.raises(ValueError, match="reduction='none'"):
        pyg_sar.mean(torch.tensor(1.0))


def test_mean_refuses_models_that_are_not_distributed():
    """Their gradients would stay local; evaluating them is all right."""

    def worker() -> None:
        model = torch.nn.Linear(2, 1)
        with pytest.raises(ValueError, match="distribute"):
            pyg_sar.mean(model(torch.ones(3, 2)).view(-1))
        with torch.no_grad():
            pyg_sar.mean(model(torch.ones(3, 2)).view(-1))

    threads(worker, 2)


def test_mean_alone():
    """World size 1 goes through the same call."""
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    found = pyg_sar.mean(values)
    found.backward()
    assert float(found.detach()) == 3 and torch.allclose(values.grad, torch.full((3,), 1 / 3))
    with pytest.raises(ValueError, match="holds a value"):
        pyg_sar.mean(torch.empty(0))


# Accuracy ####################################################################


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    masked=st.booleans(),
    scores=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_accuracy(sizes: list[int], masked: bool, scores: bool, seed: int):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (sum(sizes),), generator=draw)
    out = torch.randn(sum(sizes), 3, generator=draw)
    mask = torch.rand(sum(sizes), generator=draw) < 0.5
    chosen = mask if masked else torch.ones_like(mask)
    right = (out.argmax(1) == y)[chosen]
    expected = right.double().mean().item()

    def worker() -> float:
        pred = piece(out if scores else out.argmax(1), sizes)
        return pyg_sar.accuracy(pred, piece(y, sizes), piece(mask, sizes) if masked else None)

    found = threads(worker, len(sizes))
    assert all(isinstance(value, float) for value in found)
    assert len({repr(value) for value in found}) == 1
    assert math.isnan(found[0]) if not right.numel() else abs(found[0] - expected) < 1e-15


def test_accuracy_of_nothing_is_nan():
    def worker() -> float:
        return pyg_sar.accuracy(
            torch.zeros(2, 3), torch.zeros(2).long(), torch.zeros(2, dtype=torch.bool)
        )

    assert all(math.isnan(value) for value in threads(worker, 2))


def test_accuracy_refuses_other_shapes():
    for pred, y in ((torch.zeros(3, 2), torch.zeros(2)), (torch.zeros(3), torch.zeros(3, 1))):
        with pytest.raises(ValueError, match=r"Expected predictions for 'y' of shape"):
            pyg_sar.accuracy(pred, y)
    with pytest.raises(ValueError, match=r"at least 2 classes.*got shape \[3, 1\] at rank 0"):
        pyg_sar.accuracy(torch.ones(3, 1, dtype=torch.long), torch.ones(3, dtype=torch.long))


def test_accuracy_refuses_what_would_be_another_number():
    y = torch.tensor([0, 1, 2])
    for pred, labels, mask, text in (
        (torch.zeros(3), y, None, r"'pred' of shape \[3\] to hold classes, integers"),
        (torch.zeros(3, 2), y, None, r"scores of 2 classes, 'y' holds label 2 \(rank 0\)"),
        (y, y, torch.tensor([1, 0, 1]), r"'mask' to be bool .*got torch.int64 .* pred\[ids\]"),
        (y, y, torch.ones(2).bool(), r"'mask' to be bool of shape \[3\]"),
    ):
        with pytest.raises(ValueError, match=text):
            pyg_sar.accuracy(pred, labels, mask)
    for arguments, name in ((([0, 1, 2], y), "pred"), ((y, None), "y"), ((y, y, [True]), "mask")):
        with pytest.raises(TypeError, match=f"'{name}' to be a tensor"):
            pyg_sar.accuracy(*arguments)
    # A label that the mask leaves out has no say.
    assert pyg_sar.accuracy(torch.eye(3)[:, :2], y, y < 2) == 1


# Means of one worker's values #################################################


def local_means(h: Tensor, y: Tensor, weight: Tensor) -> dict[str, Any]:
    """Losses whose gradients are those of a sum of the workers' means."""
    row, log, one, yes = y.double(), h.log_softmax(1), h[:, 0], y.double().clamp(max=1)
    return {
        "MeanBackward0": lambda: F.cross_entropy(h, y, reduction="none").mean(),
        "MeanBackward1": lambda: h.square().mean((0, 1)),
        "NllLossBackward0": lambda: F.cross_entropy(h, y),
        "NllLossBackward0 ": lambda: pyg_sar.mean(one) + F.nll_loss(log, y).float().double(),
        "MseLossBackward0": lambda: F.mse_loss(one, row) + weight.square().sum() / 3,
        "MeanBackward0 ": lambda: torch.stack([pyg_sar.mean(one), F.l1_loss(one, row)]).mean(),
        "SmoothL1LossBackward0": lambda: -F.smooth_l1_loss(one, row),
        "HuberLossBackward0": lambda: F.huber_loss(one, row).view(1).squeeze(),
        "BinaryCrossEntropyBackward0": lambda: F.binary_cross_entropy(
            one.sigmoid(), row.clamp(max=1)
        ),
        "BinaryCrossEntropyWithLogitsBackward0": (
            lambda: F.binary_cross_entropy_with_logits(one, yes)
        ),
    }


def rightly_scaled(h: Tensor, y: Tensor, weight: Tensor) -> list[Any]:
    """Losses that are right, or that may be for all that can be known."""
    total = pyg_sar.comm.current().all_reduce(torch.tensor([len(y)])).item()
    values = F.cross_entropy(h, y, reduction="none")
    return [
        lambda: pyg_sar.mean(values) + pyg_sar.mean(h.mean(1)),
        lambda: values.sum() / total,
        lambda: F.cross_entropy(h, y, reduction="sum") / total,
        lambda: F.cross_entropy(h, y) * (len(y) / total),
        lambda: pyg_sar.mean(values) + weight.square().mean() / 3,
        lambda: torch.stack([pyg_sar.mean(values), pyg_sar.mean(h)]).mean(),
        lambda: torch.cat([pyg_sar.mean(values).view(1), pyg_sar.mean(h).view(1)]).mean(),
    ]


def test_a_mean_over_one_workers_values_is_warned_of_once():
    """The autograd node that averages is named; right losses are let be."""
    plain = torch.nn.Linear(4, 3).double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3

    def worker(which: Any, key: Any, gradient: Tensor | None) -> None:
        model = pyg_sar.distribute(torch.nn.Sequential(copy.deepcopy(plain)), view="local")
        mine = piece(torch.arange(9), [5, 2, 2])
        for _ in range(2):
            losses = which(model(x[mine]), y[mine], model[0].weight)
            losses[key]().backward(gradient)

    def warned(*args: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            threads(worker, 3, *args)
        return [str(warning.message) for warning in caught]

    for key in threads(lambda: list(local_means(x, y, x)), 1)[0]:
        messages = warned(local_means, key, None)
        assert len(messages) == 3 and all(f"({key.strip()})" in m for m in messages), key
        assert all("pyg_sar.mean() of the values per node" in m for m in messages)
    for key in range(7):
        assert warned(rightly_scaled, key, None) == [], key
    assert warned(local_means, "NllLossBackward0", torch.tensor(1 / 3).double()) == []
