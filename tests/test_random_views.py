"""Programs of views, operators along axes and draws: numbers, gradients and strides of one process.

Random numbers are drawn in the order of memory, so a wrong order gives wrong numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import some
from oracle import parts
from torch import Tensor

from pyg_sar.comm import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import node_rows, whole, wrap

N = 22
DOUBLE = torch.float64
Step = Callable[[Tensor], Tensor]


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=DOUBLE)


def _written(x: Tensor, at: Any, value: Any) -> Tensor:
    x = x.clone()
    x[at] = value
    return x


# By the least number of axes that they need.
STEPS: dict[int, tuple[Step, ...]] = {
    1: (
        *(Tensor.contiguous, Tensor.clone, Tensor.relu, Tensor.sigmoid, Tensor.squeeze),
        *(lambda x: x[..., 1:], lambda x: x[1:], lambda x: x[::2], lambda x: x[..., ::2]),
        *(lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(-1), lambda x: x.expand(2, *x.shape)),
        *(
            lambda x: x * 1.5,
            lambda x: x + 2 * x.flip(-1),
            lambda x: x.flip(0),
            lambda x: x.roll(1, 0),
        ),
        *(lambda x: x.cumsum(0), lambda x: x.cumsum(-1), lambda x: x.softmax(-1)),
        *(lambda x: x.softmax(0), lambda x: x.log_softmax(-1), lambda x: x - x.logsumexp(0)),
        *(lambda x: x.sort(0)[0], lambda x: x.sort(-1)[0], lambda x: x.topk(2, -1)[0]),
        *(lambda x: x[torch.tensor([0, 2, 1])], lambda x: x[..., torch.tensor([1, 0])]),
        *(lambda x: x.index_select(0, torch.tensor([1, 0, 1])), lambda x: x.chunk(2, -1)[1]),
        *(lambda x: torch.cat([x, x * 2], -1), lambda x: torch.cat([x, x * 2], 0)),
        *(lambda x: torch.stack([x, x + 1], 0), lambda x: torch.stack([x, x + 1], -1)),
        *(lambda x: x.split(4, 0)[1], lambda x: torch.where(x > 0, x, x * 0.1)),
        *(lambda x: F.normalize(x, dim=-1), lambda x: F.layer_norm(x, x.shape[-1:])),
        *(lambda x: F.pad(x, (0, 1)), lambda x: x.movedim(0, -1), lambda x: x.float().double()),
        *(lambda x: torch.zeros_like(x) + x, lambda x: torch.empty_like(x).copy_(x)),
        *(lambda x: (x * 1).mul_(x.detach().roll(1, -1)), lambda x: _written(x, (..., 0), 0.5)),
        *(lambda x: _written(x, slice(2, 4), 2), lambda x: x - x.sum(0, keepdim=True)),
        *(
            lambda x: x - x.max(-1, keepdim=True)[0],
            lambda x: x / (1 + x.norm(dim=0, keepdim=True)),
        ),
        *(lambda x: x.gather(-1, torch.zeros(*x.shape[:-1], 2, dtype=torch.long)),),
    ),
    2: (
        *(lambda x: x.transpose(0, -1), lambda x: x.permute(*range(1, x.dim()), 0)),
        *(lambda x: x.reshape(x.size(0), -1), lambda x: x.reshape(x.size(0), 2, -1)),
        *(lambda x: x @ _ones(x.size(-1), 3), lambda x: F.linear(x, _ones(4, x.size(-1)))),
        *(lambda x: x.unbind(-1)[0], lambda x: x.select(-1, 0), lambda x: x.tril()),
        *(lambda x: x.unflatten(0, (2, -1)), lambda x: x.reshape(-1, 2, *x.shape[1:])),
        *(lambda x: x.flatten(0, 1), lambda x: (x * 1).unflatten(0, (-1, 2)).mul_(2)),
        *(lambda x: x.swapaxes(0, 1), lambda x: x[x.reshape(x.size(0), -1)[:, 0] > 0]),
        *(lambda x: _ones(3, x.size(-2)) @ x, lambda x: x.transpose(-1, -2) @ x),
    ),
}
DRAWS: tuple[Step, ...] = (
    *(lambda x: F.dropout(x, 0.5), lambda x: x + torch.randn_like(x)),
    *(lambda x: x * torch.empty_like(x).uniform_(), lambda x: F.gumbel_softmax(x, dim=-1)),
    *(lambda x: x * torch.bernoulli(x.detach().sigmoid()), lambda x: F.alpha_dropout(x, 0.4)),
)


def _program(seed: int, x: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
    """Up to eight steps, of which PyTorch takes each on what those before it gave, and a draw."""
    draw, leaf = random.Random(seed), x.clone().requires_grad_()
    out, strides, length = leaf * 1, [], draw.randint(3, 8)
    torch.manual_seed(3)
    for number in range(length + 1):
        known = [*STEPS[1], *STEPS[2], *DRAWS] if out.dim() > 1 else [*STEPS[1], *DRAWS]
        step = draw.choice(DRAWS if number == length else known)
        try:
            following = step(out)
        except (IndexError, RuntimeError) as error:
            if isinstance(error, DistributedIndexError):
                raise
            continue
        if following.numel() and 0 < following.dim() < 5 and following.numel() < 5000:
            out = following
            if out.dim() > 1:  # One row is a copy, which lies without gaps.
                wide = zip(out.stride(), out.shape, strict=True)
                strides.append([step for step, n in wide if n > 1])
    weights = torch.linspace(1, 2, out.numel(), dtype=DOUBLE).view(out.shape)
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf, allow_unused=True)
    return out.detach(), torch.zeros_like(x) if gradient is None else gradient, strides


@pytest.mark.parametrize("world", [2, 3])
def test_equal_to_one_process(world: int) -> None:
    x = torch.randn(N, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    seeds = some(range(600 * world, 600 * world + 600), "programs", 6)
    expected = [_program(seed, x) for seed in seeds]

    def work() -> list[Any]:
        comm, found = current(), []
        order = torch.randperm(N, generator=torch.Generator().manual_seed(N))
        rows = node_rows(comm, (order % world == comm.rank).nonzero().view(-1), N)
        for seed in seeds:
            try:
                *numbers, strides = _program(seed, wrap(x[rows.ids], rows, 0))
                found.append(([whole(t, "test") for t in numbers], strides))
            except DistributedIndexError as error:
                found.append(str(error))
        return found

    for found in parts(work, world):
        for seed, one, (*numbers, strides) in zip(seeds, found, expected, strict=True):
            if isinstance(one, str):
                assert "node tensor" in one or "rows" in one
                continue
            close = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True, "msg": f"seed {seed}"}
            torch.testing.assert_close(one[0], numbers, **close)
            assert one[1] == strides, seed
        assert sum(isinstance(one, str) for one in found) * 10 < len(seeds)


# Keys that are written ########################################################


def _part(draw: random.Random, size: int) -> Any:
    """What a key may name along an axis: a number, a run, ids or a mask."""
    some_ids = [draw.randrange(-size, size) for _ in range(draw.choice([1, 2, 4]))]
    mask = torch.zeros(size, dtype=torch.bool)
    mask[some_ids] = True
    run = slice(draw.randrange(size), None, draw.choice([1, 2]))
    ids = torch.tensor(some_ids)
    return draw.choice([some_ids[0], run, slice(0, 4), slice(None), some_ids, ids, mask, ids[0]])


def _key_and_value(draw: random.Random, shape: tuple[int, ...]) -> tuple[Any, Tensor]:
    """A key, and values of the shape of what it names, some of their axes broadcast."""
    while True:
        key = [_part(draw, size) for size in shape][: draw.choice([1, 2, 3, 3])]
        if draw.random() < 0.15:
            key.insert(draw.randrange(len(key) + 1), draw.choice([None, Ellipsis][: 5 - len(key)]))
        try:
            sizes = torch.empty(shape)[tuple(key)].shape
        except IndexError:  # Ids, or masks, of lengths that don't fit.
            continue
        sizes = [1 if draw.random() < 0.15 else size for size in sizes]
        return tuple(key), torch.arange(1.0, 1 + math.prod(sizes), dtype=DOUBLE).view(sizes)


def _written_by(seed: int, x: Tensor) -> list[Tensor]:
    draw = random.Random(seed)
    order = draw.choice([(0, 1, 2), (1, 0, 2), (1, 2, 0)])
    leaf, scale = x.clone().requires_grad_(), torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    out = (leaf * 1).permute(order).contiguous()
    key, value = _key_and_value(draw, tuple(out.shape))
    out[key] = value * scale
    weights = torch.linspace(1, 2, out.numel(), dtype=DOUBLE).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (leaf, scale))]


def test_values_go_where_keys_say() -> None:
    x = torch.randn(N, 4, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    seeds = some(range(2000), "keys", 10)
    expected = [_written_by(seed, x) for seed in seeds]

    def work() -> list[Any]:
        comm, found = current(), []
        rows = node_rows(comm, torch.arange(comm.rank, N, comm.world_size), N)
        for seed in seeds:
            try:
                found.append(
                    [whole(t, "test") for t in _written_by(seed, wrap(x[rows.ids], rows, 0))]
                )
            except DistributedIndexError as error:
                found.append(str(error))
        return found

    for found in parts(work, 3):
        for seed, one, right in zip(seeds, found, expected, strict=True):
            if not isinstance(one, str):
                torch.testing.assert_close(one, right, rtol=1e-9, atol=1e-9, msg=f"seed {seed}")
        assert sum(isinstance(one, str) for one in found) * 40 < len(seeds)
