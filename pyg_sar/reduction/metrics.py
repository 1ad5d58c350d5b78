"""The mean over the values of all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator, current
from pyg_sar.reduction.gradients import unsummed_parameter
from pyg_sar.tensors import NodeTensor


class _GlobalMean(torch.autograd.Function):
    """The mean over all workers' values; its adjoint is :class:`_Share`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator, phase: str) -> Tensor:
        # Both in float64: half precision has no 70,000, bfloat16 no 257.
        total = values.detach().sum(dtype=torch.float64)
        sums = torch.stack([total, total.new_tensor(values.numel())])
        comm.all_reduce(sums, label=("", phase, "mean"))
        total, count = sums.tolist()
        if count == 0:
            raise ValueError(
                f"No worker of {comm.world_size} holds a value to average: is the mask empty on "
                "the whole graph?"
            )
        ctx.given = values.shape, count, comm
        return values.new_tensor(total / count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Share.apply(gradient, *ctx.given), None, None


class _Share(torch.autograd.Function):
    """Gives each value its share of the mean's gradient, which all workers hold alike."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, shape: torch.Size, count: float, comm: Communicator
    ) -> Tensor:
        ctx.comm = comm
        return (gradient.double() / count).to(gradient.dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _GlobalMean.apply(gradient, ctx.comm, "backward"), None, None, None


def mean(values: Tensor) -> Tensor:
    r"""Returns the mean over all workers' values, the same on every worker.

    .. math::
        \frac{\sum_p \sum_k v_{p,k}}{\sum_p n_p}, \qquad
        \frac{\partial}{\partial v_{p,k}} = \frac{1}{\sum_p n_p}

    Workers may hold different numbers of values, or none. With the gradients summed over workers
    (as :func:`pyg_sar.distribute` arranges), ``mean(values).backward()`` on every worker gives the
    gradients of one process. A term that every worker computes alike, such as a penalty on
    parameters, would be counted once per worker: divide it by ``comm.world_size``.

    Args:
        values: Per-node values of any shape, such as
            ``F.cross_entropy(out[mask], y[mask], reduction='none')``.

    Returns:
        A scalar.

    Raises:
        TypeError: When ``values`` is no floating point tensor.
        ValueError: When no worker holds a value, or the values depend on a parameter of a model
            that was not passed through :func:`pyg_sar.distribute`.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values)
        raise TypeError(f"Expected 'values' to be a floating point tensor (got {kind})")
    if values.dim() == 0:
        raise ValueError(
            "Expected per-node values, got a scalar: pass the loss with reduction='none'"
        )
    if isinstance(values, NodeTensor):  # Its mean is over all workers, as are gradients.
        return values.mean()
    comm = current()
    stray = unsummed_parameter(values) if comm.world_size > 1 else None
    if stray is not None:
        raise ValueError(
            f"'values' depend on a parameter of shape {list(stray.shape)} whose gradients are not "
            f"summed over the workers (rank {comm.rank}): pass the model through "
            "pyg_sar.distribute(model) first"
        )
    return _GlobalMean.apply(values, comm, "forward")
