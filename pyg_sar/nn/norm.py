"""Batch normalisation over the nodes of all workers."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_sar.comm import Communicator, current

_LABEL = ("", "forward", "statistics")
_LABEL_BACK = ("", "backward", "statistics")


def merged_moments(x: Tensor, comm: Communicator) -> tuple[Tensor, Tensor, int]:
    r"""Mean, biased variance and count over the rows of all workers.

    Each worker's count :math:`n_p`, mean :math:`\mu_p` and :math:`M_p = \sum (x - \mu_p)^2`
    merge by

    .. math::
        \mu = \sum_p \frac{n_p}{n} \mu_p, \qquad
        M = \sum_p M_p + n_p (\mu_p - \mu)^2

    (Chan et al., 1979), in float64; never :math:`E[x^2] - E[x]^2`, which cancels.

    Args:
        x: ``[num_local, F]``.
        comm: The communicator.

    Returns:
        Mean ``[F]`` and variance ``[F]`` in float64, and the number of rows :math:`n`.
    """
    count = x.size(0)
    local = x.detach().double()
    mean = local.mean(0) if count else local.new_zeros(x.size(1))
    squares = (local - mean).square().sum(0)
    mine = torch.cat([mean.new_tensor([float(count)]), mean, squares])
    rows = torch.stack(comm.all_gather(mine, label=_LABEL))
    counts = rows[:, :1]
    total = counts.sum()
    means, squares = rows[:, 1:].tensor_split(2, dim=1)
    whole = total.clamp(min=1)
    merged = (counts * means).sum(0) / whole
    spread = (squares + counts * (means - merged).square()).sum(0)
    return merged, spread / whole, int(total)


class _Normalise(torch.autograd.Function):
    r""":math:`\hat x = (x - \mu) / \sqrt{\sigma^2 + \epsilon}` with global moments.

    .. math::
        \frac{\partial L}{\partial x} = \frac{1}{\sqrt{\sigma^2 + \epsilon}} \left( g -
        \frac{1}{n}\sum g - \hat x \frac{1}{n} \sum g \hat x \right)

    with sums over the rows of all workers.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, inverse: Tensor, total: int, comm: Communicator
    ) -> Tensor:
        normal = ((x - mean) * inverse).to(x.dtype)
        ctx.save_for_backward(normal, inverse)
        ctx.total, ctx.comm = total, comm
        return normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse = ctx.saved_tensors
        sums = torch.stack(
            [gradient.sum(0, dtype=torch.float64), (gradient * normal).sum(0, dtype=torch.float64)]
        )
        sums = ctx.comm.all_reduce(sums, label=_LABEL_BACK) / ctx.total
        first, second = sums.to(inverse.dtype)
        result = ((gradient - first - normal * second) * inverse).to(normal.dtype)
        return result, None, None, None, None


class DistBatchNorm1d(torch.nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` whose batch is the nodes of all workers.

    Equal to one process in training and evaluation, running statistics included (variance with
    Bessel's correction over all nodes, ``momentum=None`` as cumulative average).

    Raises:
        ValueError: When all workers together have at most one row in training.
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        comm = current()
        batch_statistics = self.training or self.running_mean is None
        if not batch_statistics:
            return super().forward(input)
        if input.dim() == 3:  # [N, C, L]: every position is a row
            rows = input.transpose(1, 2)
            return self(rows.reshape(-1, input.size(1))).view(rows.shape).transpose(1, 2)
        mean, variance, total = merged_moments(input, comm)
        if total <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training (got {total} rows on all "
                f"{comm.world_size} workers)"
            )
        if self.training and self.track_running_stats:
            self._track(mean, variance, total)
        kind = torch.promote_types(input.dtype, torch.float32)
        inverse = (variance + self.eps).rsqrt().to(kind)
        out = _Normalise.apply(input, mean.to(kind), inverse, total, comm)
        if self.affine:
            out = (out * self.weight + self.bias).to(input.dtype)
        return out

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: int) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = variance * (total / (total - 1))
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.mul_(1 - factor).add_(now.to(running.dtype), alpha=factor)


class DistBatchNorm(torch_geometric.nn.BatchNorm):
    """:class:`torch_geometric.nn.BatchNorm` over the nodes of all workers."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.allow_single_element:
            return self.module(x)
        total = torch.tensor([x.size(0)], device=x.device)
        comm = current()
        if int(comm.all_reduce(total, label=_LABEL)) > 1:
            return self.module(x)
        norm = self.module
        return torch.nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
