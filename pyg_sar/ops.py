"""The C++ kernels' Python face (sources in ``extensions/``), and the same in PyTorch."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = "_kernels.so"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_BLOCK = 2**18  # values that the PyTorch implementation gathers at a time


class KernelWarning(UserWarning):
    """The C++ kernels can't be used, and PyTorch stands in: same results, slower."""


@cache
def why_missing() -> str | None:
    """Loads the kernels on first use; says why there are none, or ``None`` where there are."""
    path = Path(__file__).parent / _LIBRARY
    if not path.exists():
        return "they were not built when it was installed"
    try:
        torch.ops.load_library(str(path))
        built_with = str(torch.ops.pyg_sar.built_with())
    except (AttributeError, OSError, RuntimeError) as error:
        return f"{path} can't be loaded: {error}"
    if built_with != torch.__version__.partition("+")[0]:
        return f"they were built with PyTorch {built_with}, and this is {torch.__version__}"
    return None


@cache
def warn_if_missing() -> None:
    """Warns, once in a process, where there are no kernels."""
    reason = why_missing()
    if reason is not None:
        warnings.warn(
            f"pyg_sar runs without its C++ kernels, with the same results but slower: {reason}. "
            "Install it with a C++ compiler at hand by `pip install --no-build-isolation`; "
            "SARPolicy(kernels='off') silences this",
            KernelWarning,
            stacklevel=2,
        )


def takes(rows: Tensor) -> bool:
    """Whether the kernels are made for tensors of this device and dtype."""
    return rows.device.type == "cpu" and rows.dtype in _DTYPES


def gather_sum_(
    out: Tensor,
    rows: Tensor,
    source: Tensor,
    position: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    *,
    native: bool | None = None,
) -> Tensor:
    r"""Adds gathered rows to their targets, in place, without materializing a message.

    .. math::
        \mathrm{out}_{t(p(e))} \mathrel{+}= w_e \, \mathrm{rows}_{s(e)}
        \quad \text{for all edges } e

    A sparse-dense product that accumulates, with the edges in the order of their targets (the
    "copy-reduce" of DistGNN, Md et al., SC 2021). Its transpose, for the backward pass, is the same
    on edges in the order of their sources. bfloat16 accumulates in float32, and is rounded once per
    target and call. The kernel's result doesn't depend on the number of threads. Not recorded by
    autograd.

    Args:
        out: ``[N, F]``, float32, float64 or bfloat16 (the kernel), any dtype (PyTorch); each row in
            one piece.
        rows: ``[M, F]``, of the same dtype, any strides.
        source: The row of each edge, ``[E]``, int32 or int64.
        position: The place of each edge's target in ``targets``, ``[E]``, ascending.
        targets: Rows of ``out``, ``[U]``, int64, ascending between the first and the last place
            that occur.
        weight: ``[E]``, float64 for float64 rows, else float32; ``None`` for 1.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes don't fit, edges are not sorted, or autograd would have to record this.
        TypeError: Dtypes don't fit.
        IndexError: An index is out of range. ``out`` may have been added to.
        RuntimeError: The kernel was asked for and is missing, or ``out`` and ``rows`` overlap.
    """
    if torch.is_grad_enabled() and (out.requires_grad or rows.requires_grad):
        raise ValueError(
            "gather_sum_ is not recorded by autograd, and was given tensors that require a "
            "gradient: call it under torch.no_grad()"
        )
    if position.dtype != source.dtype:
        source, position = source.long(), position.long()
    if native is None:
        native = takes(out) and why_missing() is None
    if not native:
        _gather_sum(out, rows, source, position, targets, weight)
    elif (reason := why_missing()) is not None:
        raise RuntimeError(f"pyg_sar has no C++ kernels: {reason}")
    else:
        torch.ops.pyg_sar.gather_sum_(out, rows, source, position, targets, weight)
    return out


def _gather_sum(
    out: Tensor,
    rows: Tensor,
    source: Tensor,
    position: Tensor,
    targets: Tensor,
    weight: Tensor | None,
) -> None:
    """:func:`gather_sum_` in PyTorch, a block of edges at a time."""
    if out.dim() != 2 or rows.dim() != 2 or out.size(1) != rows.size(1):
        raise ValueError(
            "gather_sum: expected 'out' and 'rows' of shapes [N, F] and [M, F] (got "
            f"{list(out.shape)} and {list(rows.shape)})"
        )
    if out.dtype != rows.dtype:
        raise TypeError(
            f"gather_sum: expected 'out' and 'rows' of one dtype (got {out.dtype} and {rows.dtype})"
        )
    if source.dim() != 1 or position.shape != source.shape or targets.dim() != 1:
        raise ValueError(
            "gather_sum: expected 'source' and 'position' of shape [E] and 'targets' of shape [U] "
            f"(got {list(source.shape)}, {list(position.shape)} and {list(targets.shape)})"
        )
    if weight is not None and weight.shape != source.shape:
        raise ValueError(
            f"gather_sum: expected a 'weight' for each of the {source.numel()} edges (got shape "
            f"{list(weight.shape)})"
        )
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    block = max(_BLOCK // max(out.size(1), 1), 1)
    first = int(position[0]) if position.numel() else 0
    last = int(position[-1]) if position.numel() else -1
    # One row for each target that occurs: a target's sum is rounded once.
    sums = out.new_zeros(last - first + 1, out.size(1), dtype=wide)
    for start in range(0, source.numel(), block):
        edges = slice(start, start + block)
        part = rows.index_select(0, source[edges]).to(wide)
        if weight is not None:
            part *= weight[edges].view(-1, 1)
        place = (position[edges].long() - first).view(-1, 1).expand_as(part)
        sums.scatter_add_(0, place, part)
    out.index_add_(0, targets[first : last + 1], sums.to(out.dtype))
