r"""Moments of groups of rows over all workers, and normalisation by them.

Every norm over nodes is made of two differentiable steps. With :math:`b(i)` the group (graph, type)
of row i and :math:`n_b` its rows on all workers,

.. math::
    \mu_b = \frac{1}{n_b} \sum_{b(i)=b} x_i, \qquad
    v_b = \frac{1}{n_b} \sum_{b(i)=b} (x_i - \mu_b)^2, \qquad
    y_i = (x_i - a_{b(i)}) \, s_{b(i)} + o_{b(i)},

where a, s and o are computed, alike on every worker, from the moments and from parameters.
The first step (:func:`moments`) communicates: what workers found is merged in the forward pass,
and as :math:`\partial \mu_b / \partial x_i = 1 / n_b` and
:math:`\partial v_b / \partial x_i = 2 (x_i - \mu_b) / n_b`, the backward pass is one sum over
workers of the gradients of :math:`\mu` and :math:`v`. The second (:func:`standardise`) is local.
Both keep nothing per row but x, and accumulate in float64, a block of rows at a time, by kernels
in C++ (``extensions/norms.cpp``) where there is one group. Both
backward passes are made of differentiable operators, so that derivatives of any order are exact.
:func:`normalise` is the two of batch norms in one step, whose backward pass reads the rows twice.

[Note: rows and sums] What belongs to a row is computed in the row's dtype (float32 at least), as
PyTorch does; what is summed over rows is float64 from block to block. With ``batch``, where every
row has moments of its own group, all is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from pyg_sar.comm.group import Communicator, current
from pyg_sar.kernels import ops
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.ledger import Label
from pyg_sar.wording import counted

OVER_ROWS: tuple[type, ...] = (
    _NormBase,
    gnn.BatchNorm,
    gnn.DiffGroupNorm,
    gnn.GraphNorm,
    gnn.HeteroBatchNorm,
    gnn.LayerNorm,
    gnn.PairNorm,
)
"""Norms that may take statistics over rows, and their subclasses; others run as users' modules."""

_LABEL = ("", "forward", "statistics")
_LABEL_BACK = ("", "backward", "statistics")
_BLOCK = 2**17  # values at a time; stays in a CPU's cache
_BLOCK_GPU = 2**24


def reduces_over_rows(module: torch.nn.Module) -> bool:
    """Returns whether a call of this norm would take statistics over the rows that it gets."""
    if isinstance(module, gnn.HeteroBatchNorm | _InstanceNorm):
        return bool(module.training or not module.track_running_stats)
    if isinstance(module, _NormBase):
        return module.training or module.running_mean is None
    if isinstance(module, gnn.LayerNorm):
        return bool(module.mode == "graph")
    wrappers = (gnn.BatchNorm, gnn.DiffGroupNorm)  # of a batch norm, which is asked itself
    return isinstance(module, OVER_ROWS) and not isinstance(module, wrappers)


@dataclass(frozen=True, slots=True)
class Moments:
    """Of B groups of rows, over all workers, the same on each, in float64.

    Attributes:
        count: Rows per group, ``[B]``.
        mean: ``[B, F]``; 0 for a group without rows.
        variance: Biased, ``[B, F]``; 0 for a group without rows.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor


def moments(x: Tensor, batch: Tensor | None = None, size: int = 1) -> Moments:
    r"""Returns count, mean and variance per group over the rows of all workers; differentiable.

    Each worker's count :math:`n_p`, mean :math:`\mu_p` and :math:`M_p = \sum (x - \mu_p)^2`
    merge by

    .. math::
        \mu = \sum_p \frac{n_p}{n} \mu_p, \qquad
        M = \sum_p M_p + n_p (\mu_p - \mu)^2

    (Chan et al., 1979); never :math:`E[x^2] - E[x]^2`, which cancels. One collective of ``1 + 2F``
    numbers forward. Those of several groups are summed, first x, then squares about the mean: two
    of ``size * (1 + F)`` and ``size * F`` numbers. One of ``size * 2F`` backward.

    Args:
        x: ``[N, F]``; every worker's own rows.
        batch: The group of each row, ``[N]``; ``None`` on all workers for a single group.
        size: The number of groups B, the same on all workers.

    Raises:
        ValueError: When ``batch`` doesn't fit.
    """
    comm = current()
    check_batch(x, batch, size, comm)
    return Moments(*_Moments.apply(x, batch, size, comm))


def graph_moments(title: str, x: Tensor, batch: Tensor | None, batch_size: int | None) -> Moments:
    """:func:`moments` for arguments as PyG's norms take them; ``title`` is the norm, for messages.

    Without ``batch_size``, one more collective finds the number of graphs: one more than the
    largest entry of any worker.

    Raises:
        ValueError: When ``x`` or ``batch`` doesn't fit.
    """
    comm = current()
    if x.dim() != 2:
        raise ValueError(
            f"{title}: expected node features 'x' of shape [num_nodes, channels], got "
            f"{list(x.shape)} at rank {comm.rank}"
        )
    check_batch(x, batch, batch_size, comm)
    if batch is None:
        size = 1
    elif batch_size is None:
        most = batch.max().view(1) + 1 if batch.numel() else batch.new_zeros(1)
        size = int(comm.all_reduce(most, "max", label=_LABEL))
    else:
        size = batch_size
    return Moments(*_Moments.apply(x, batch, size, comm))


def check_batch(x: Tensor, batch: Tensor | None, size: int | None, comm: Communicator) -> None:
    """Raises ``ValueError`` where a vector of groups doesn't fit its rows."""
    if batch is None:
        return
    if batch.dtype != torch.long or batch.dim() != 1 or batch.numel() != x.size(0):
        raise ValueError(
            f"Expected one group (int64) for each of the {counted(x.size(0), 'rows')} of rank "
            f"{comm.rank}, got {batch.dtype} of shape {list(batch.shape)}"
        )
    if batch.numel():
        least, most = (int(value) for value in batch.aminmax())
        if least < 0 or (size is not None and most >= size):
            limit = "" if size is None else f" of {size}"
            raise ValueError(
                f"Rank {comm.rank} has rows of the groups {least} to {most}{limit}; groups are "
                "counted from 0, and their number is that of all workers"
            )


class _Sum(torch.autograd.Function):
    """The sum over workers; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, label: Label) -> Tensor:
        ctx.given = comm, (label[0], "backward", label[2])
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        return comm.all_reduce(copy, label=label)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(gradient, *ctx.given), None, None


def _sum_over_workers(x: Tensor, comm: Communicator, label: Label) -> Tensor:
    r"""Returns :math:`\sum_p x_p`, of the same shape on all workers."""
    return _Sum.apply(x, comm, label) if comm.world_size > 1 else x


class _Moments(torch.autograd.Function):
    """:func:`moments`; its backward pass sums the moments' gradients over the workers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, batch: Tensor | None, size: int, comm: Communicator
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, mean, variance = _merged(x.detach(), batch, size, comm)
        ctx.save_for_backward(x, batch, count, mean)
        ctx.comm = comm
        ctx.mark_non_differentiable(count)
        return count, mean, variance

    @staticmethod
    def backward(ctx: Any, _: Any, of_mean: Tensor, of_variance: Tensor) -> tuple[Any, ...]:
        x, batch, count, mean = ctx.saved_tensors
        sums = torch.stack([of_mean, 2 * of_variance])
        sums = _sum_over_workers(sums, ctx.comm, _LABEL_BACK) / count.clamp(min=1).unsqueeze(-1)
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        of_mean, of_variance, mean = (_of_rows(t, x.dtype, batch) for t in (*sums, mean))
        for part in _blocks(result):
            centred = x[part] - _rows(mean, batch, part)
            result[part] = _rows(of_mean, batch, part) + centred * _rows(of_variance, batch, part)
        return result, None, None, None


def _merged(
    x: Tensor,
    batch: Tensor | None,
    size: int,
    comm: Communicator,
    across: Communicator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns count ``[B]``, mean and variance ``[B, F]`` over all workers, and over replicas."""
    if batch is not None:
        together = torch.cat([batch.bincount(minlength=size).view(-1, 1), _sums(x, batch, size)], 1)
        count, total = comm.all_reduce(together, label=_LABEL).split([1, x.size(1)], dim=1)
        mean = total / count.clamp(min=1)
        squares = comm.all_reduce(_squares(x, batch, mean), label=_LABEL)
        return count.squeeze(1), mean, squares / count.clamp(min=1)
    count = x.new_full((1, 1), x.size(0), dtype=torch.float64)
    kernels = _kernels(x, batch)
    if kernels is not None:
        mean, squares = kernels.column_moments(x).split(1)
    else:
        mean = _sums(x, batch, size) / count.clamp(min=1)
        squares = _squares(x, batch, mean)
    for group in (comm, across):
        if group is not None:
            count, mean, squares = _combined(count, mean, squares, group)
    return count.squeeze(1), mean, squares / count.clamp(min=1)


def _combined(
    count: Tensor, mean: Tensor, squares: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns count, mean and sum of squares about it, ``[1, *]``, of all members' together."""
    rows = torch.stack(comm.all_gather(torch.cat([count, mean, squares], dim=1), label=_LABEL))
    width = mean.size(1)
    counts, means, sums = rows.split([1, width, width], dim=2)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return count, mean, (sums + counts * (means - mean).square()).sum(0)


def _sums(x: Tensor, batch: Tensor | None, size: int) -> Tensor:
    total = x.new_zeros(size, x.size(1), dtype=torch.float64)
    for part in _blocks(x):
        _add(total, x[part].double(), batch, part)
    return total


def _squares(x: Tensor, batch: Tensor | None, mean: Tensor) -> Tensor:
    total, centre = torch.zeros_like(mean), _of_rows(mean, x.dtype, batch)
    for part in _blocks(x):
        _add(total, (x[part] - _rows(centre, batch, part)).square(), batch, part)
    if batch is None:  # About the rounded mean; by Steiner's theorem:
        total = (total - x.size(0) * (mean - centre).square()).clamp(min=0)
    return total


def standardise(
    x: Tensor,
    shift: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    batch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Returns :math:`(x_i - a_{b(i)}) \, s_{b(i)} + o_{b(i)}`, a block of rows at a time.

    Args:
        x: ``[N, F]``.
        shift: :math:`a`, ``[B, F]`` in float64.
        scale, offset: :math:`s` and :math:`o`, broadcastable to ``[B, F]``; 1 and 0 by default.
        batch: The group of each row, ``[N]``; a single group by default.
        dtype: Of the result; by default that of ``x``.
    """
    wide = [None if t is None else t.double().expand_as(shift) for t in (scale, offset)]
    return _Standardise.apply(x, shift.double(), *wide, batch, dtype or x.dtype)


class _Standardise(torch.autograd.Function):
    """:func:`standardise`; keeps ``x`` alone, and that only where there is a scale."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shift: Tensor,
        scale: Tensor | None,
        offset: Tensor | None,
        batch: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        out = _standardised(x, shift, scale, offset, batch, dtype)
        ctx.save_for_backward(None if scale is None else x, shift, scale, batch)
        ctx.dtype, ctx.has_offset = x.dtype, offset is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, shift, scale, batch = ctx.saved_tensors
        result = gradient.new_empty(gradient.shape, dtype=ctx.dtype)
        total, scaled = torch.zeros_like(shift), torch.zeros_like(shift)
        by_row = None if scale is None else _of_rows(scale, gradient.dtype, batch)
        if ctx.needs_input_grad[2]:
            total, scaled = _products(gradient, x, shift, batch)
        elif any(ctx.needs_input_grad[1:4]):
            total = _sums(gradient, batch, shift.size(0))
        for part in _blocks(gradient):
            value = gradient[part]
            result[part] = value if by_row is None else value * _rows(by_row, batch, part)
        of_shift = -total if scale is None else -total * scale
        of_scale = None if scale is None else scaled
        return result, of_shift, of_scale, total if ctx.has_offset else None, None, None


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    across: Communicator | None = None,
    track: Callable[[Moments], None] | None = None,
) -> tuple[Tensor, Moments]:
    r"""Batch normalisation over the rows of all workers.

    .. math:: y_i = (x_i - \mu) (v + \epsilon)^{-1/2} \odot w + b

    With :math:`\hat x = (x - \mu) (v + \epsilon)^{-1/2}`, g the gradient of y and n the rows of all
    workers, that of x is (Ioffe and Szegedy, 2015)

    .. math::
        \frac{\partial L}{\partial x_i} = \frac{w}{\sqrt{v + \epsilon}} \odot \Big(g_i -
        \frac{1}{n} \sum_k g_k - \hat x_i \odot \frac{1}{n} \sum_k g_k \odot \hat x_k\Big).

    One collective forward and one backward, of the numbers of :func:`moments`.

    Args:
        x: ``[N, F]``; every worker's own rows.
        weight: ``[F]``.
        bias: ``[F]``.
        eps: What is added to the variance.
        across: The workers of this rank in all replicas, where statistics are over these, too: one
            collective more in both passes.
        track: Gets the moments before anything is saved for the backward pass: a checkpoint that
            computes again stops at the last that is.

    Returns:
        y, of the dtype of ``x``, and the moments, without a gradient.
    """
    out, *found = _Normalise.apply(x, weight, bias, eps, current(), across, track)
    return out, Moments(*found)


class _Normalise(torch.autograd.Function):
    """:func:`normalise`; keeps ``x`` alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        comm: Communicator,
        across: Communicator | None,
        track: Callable[[Moments], None] | None,
    ) -> tuple[Tensor, ...]:
        count, mean, variance = _merged(x.detach(), None, 1, comm, across)
        if track is not None:
            track(Moments(count, mean, variance))
        inverse = (variance + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        out = _standardised(x, mean, scale, bias, None, x.dtype)
        ctx.save_for_backward(x, weight, bias, count, mean, inverse)
        ctx.eps, ctx.comm, ctx.across = eps, comm, across
        ctx.mark_non_differentiable(count, mean, variance)
        return out, count, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, bias, count, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # Further derivatives go through the moments.
            if ctx.across is not None:
                raise ValueError(
                    "create_graph=True reached a SyncBatchNorm, whose statistics are over all "
                    f"replicas (replica {ctx.across.rank}): take torch.nn.BatchNorm1d, of each "
                    "replica's own rows"
                )
            _, mean, variance = _Moments.apply(x, None, 1, ctx.comm)
            inverse = (variance + ctx.eps).rsqrt()
        total, scaled = _products(gradient, x, mean, None)
        of_weight = None if weight is None else (scaled * inverse).view_as(weight).to(weight.dtype)
        of_bias = None if bias is None else total.view_as(bias).to(bias.dtype)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None, None, None, None
        sums = _sum_over_workers(torch.stack([total, scaled]), ctx.comm, _LABEL_BACK)
        if ctx.across is not None:
            sums = _sum_over_workers(sums, ctx.across, _LABEL_BACK)
        average, slope = sums / count.clamp(min=1)
        scale = inverse if weight is None else inverse * weight
        by_row = (mean, -inverse.square() * slope, average, scale)
        kernels = _kernels(x, None)
        if kernels is not None:
            result = kernels.scale_rows(x, mean, by_row[1] * scale, average, gradient, scale)
            return result, of_weight, of_bias, None, None, None, None
        shift, slope, average, scale = (_of_rows(values, x.dtype, None) for values in by_row)
        result = torch.empty_like(x)
        for part in _blocks(x):
            result[part] = ((x[part] - shift) * slope + (gradient[part] - average)) * scale
        return result, of_weight, of_bias, None, None, None, None


def _standardised(
    x: Tensor,
    shift: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    batch: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the rows of :func:`standardise`, which autograd doesn't record."""
    kernels = _kernels(x, batch) if dtype == x.dtype else None
    if kernels is not None:
        scale = torch.ones_like(shift) if scale is None else scale
        offset = torch.zeros_like(shift) if offset is None else offset
        return kernels.scale_rows(x, shift, scale, offset)
    out = x.new_empty(x.shape, dtype=dtype)
    shift = _of_rows(shift, x.dtype, batch)
    scale, offset = (None if t is None else _of_rows(t, x.dtype, batch) for t in (scale, offset))
    for part in _blocks(x):
        value = x[part] - _rows(shift, batch, part)
        if scale is not None:
            value *= _rows(scale, batch, part)
        if offset is not None:
            value += _rows(offset, batch, part)
        out[part] = value
    return out


def _products(
    gradient: Tensor, x: Tensor, shift: Tensor, batch: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the groups' sums of g and of g (x - shift), ``[B, F]``."""
    kernels = _kernels(x, batch) if gradient.dtype == x.dtype else None
    if kernels is not None:
        total, scaled = kernels.column_products(gradient, x, shift).split(1)
        return total, scaled
    total, scaled = torch.zeros_like(shift), torch.zeros_like(shift)
    centre = _of_rows(shift, x.dtype, batch)
    for part in _blocks(gradient):
        value = gradient[part]
        _add(total, value, batch, part)
        _add(scaled, value * (x[part] - _rows(centre, batch, part)), batch, part)
    return total, scaled


def _kernels(x: Tensor, batch: Tensor | None) -> Any:
    """Returns the kernels where they are made for these rows, and autograd records nothing."""
    fits = batch is None and x.dim() == 2 and ops.takes(x) and not torch.is_grad_enabled()
    return torch.ops.pyg_sar if ops.use_kernel(None, fits) else None


def _of_rows(values: Tensor, dtype: torch.dtype, batch: Tensor | None) -> Tensor:
    """Returns what rows are computed with. See [Note: rows and sums]."""
    return values.to(wide_dtype(dtype)) if batch is None else values


def _blocks(x: Tensor) -> Iterator[slice]:
    """Yields the rows, some at a time; all at once where autograd records their use."""
    if torch.is_grad_enabled():
        yield slice(0, x.size(0))
        return
    values = _BLOCK if x.device.type == "cpu" else _BLOCK_GPU
    step = max(values // max(x[:1].numel(), 1), 1)
    for start in range(0, x.size(0), step):
        yield slice(start, start + step)


def _rows(values: Tensor, batch: Tensor | None, part: slice) -> Tensor:
    """Returns the groups' values at some rows; broadcastable where there is one group."""
    return values if batch is None else values.index_select(0, batch[part])


def _add(total: Tensor, values: Tensor, batch: Tensor | None, part: slice) -> None:
    """Adds rows to their groups' sums."""
    if batch is None:
        total += values.to(wide_dtype(values.dtype)).sum(0)
    else:
        values = values.double()
        total.scatter_add_(0, batch[part].view(-1, 1).expand_as(values), values)
