"""Sums and attention over a graph's edges as functions that autograd records, for new layers.

These are the kernels for all edges at once: ``torch.ops.pyg_sar.gather_sum`` and
``torch.ops.pyg_sar.attention``, registered with gradients and shapes, so that ``torch.compile`` and
:func:`torch.library.opcheck` know them too. Layers that :func:`pyg_sar.distribute` converts need
neither: they go shard by shard, by the same kernels. Edges are sorted once by
:func:`pyg_sar.space.shard.segments_of`:

    segments = segments_of(edge_index[0], edge_index[1], num_sources, num_targets)
    out = gather_sum(x, segments, num_targets, edge_weight[segments.edges])

Where the kernels are missing or not made for the tensors, PyTorch gives the same results and
gradients, and materializes a message per edge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.kernels import attention_fallback
from pyg_sar.kernels.attention_ops import arguments_of, takes_attention
from pyg_sar.kernels.attention_sums import weight_of
from pyg_sar.kernels.attention_terms import Attention, Segments, check_segments, wide_dtype
from pyg_sar.kernels.ops import takes, use_kernel, warn_if_missing


def gather_sum(
    rows: Tensor,
    segments: Segments,
    num_targets: int,
    weight: Tensor | None = None,
    *,
    native: bool | None = None,
) -> Tensor:
    r"""Sums of gathered rows, with weights or without, and their gradients.

    .. math::
        \mathrm{out}_i = \sum_{e: t(e) = i} w_e \, \mathrm{rows}_{s(e)}, \qquad
        \frac{\partial L}{\partial \mathrm{rows}_j} = \sum_{e: s(e) = j} w_e \, g_{t(e)}, \qquad
        \frac{\partial L}{\partial w_e} = \langle \mathrm{rows}_{s(e)}, g_{t(e)} \rangle

    with :math:`g = \partial L / \partial \mathrm{out}`. Keeps ``rows`` for the backward pass where
    the weights want a gradient, and else nothing but the edges. bfloat16 accumulates in float32.

    Args:
        rows: ``[M, F]``, float32, float64 or bfloat16.
        segments: The edges, by target; their ``edges`` are not looked at.
        num_targets: Rows of the result, N.
        weight: A number for each edge in the order of ``segments.source``, ``[E]``; ``None`` for 1.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Returns:
        ``[N, F]``; 0 for targets without edges.

    Raises:
        ValueError: Shapes don't fit, or edges are not sorted.
        TypeError: Dtypes don't fit.
        IndexError: An index is out of range.
        RuntimeError: The kernel was asked for and is missing.
        NotImplementedError: A second derivative is asked for, of the kernel.
    """
    check_segments(segments)
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(
            "gather_sum: expected 'rows' of shape [M, F], floating point (got "
            f"{list(rows.shape)}, {rows.dtype})"
        )
    if weight is not None and weight.shape != segments.source.shape:
        raise ValueError(
            f"gather_sum: expected a 'weight' for each of the {segments.source.numel()} edges "
            f"(got shape {list(weight.shape)})"
        )
    if _native(takes(rows), native):
        weight = None if weight is None else weight.to(wide_dtype(rows.dtype))
        found: Tensor = torch.ops.pyg_sar.gather_sum(
            rows, segments.source, segments.offsets, segments.targets, weight, None, num_targets
        )
        return found
    wide = wide_dtype(rows.dtype)
    messages = rows.to(wide).index_select(0, segments.source)
    if weight is not None:
        messages = messages * weight.to(wide).unsqueeze(-1)
    out = messages.new_zeros(num_targets, rows.size(1))
    return out.index_add(0, attention_fallback.targets_of(segments), messages).to(rows.dtype)


def attention(
    terms: Attention,
    segments: Segments,
    num_targets: int | None = None,
    *,
    native: bool | None = None,
) -> Tensor:
    r"""Attention over a graph's edges, and its gradients.

    .. math::
        \mathrm{out}_i = \sum_e a_e k_e \, \mathrm{value}_e, \qquad
        a_e = \frac{e^{s_e}}{\sum_{e'} e^{s_{e'}}}

    over the in-edges of target i, per head; the scores s, values and factors k of dropout are those
    of :class:`~pyg_sar.kernels.attention_terms.Attention`. Keeps its inputs, the output and two
    numbers per target and head for the backward pass, nothing per edge (``tanh``: the edges'
    weights).

    Args:
        terms: Scores and values.
        segments: The edges, by target.
        num_targets: N; ``None``: the rows of ``terms.query``.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Returns:
        ``[N, H, C]`` of the dtype of ``terms.value``; 0 for targets without edges.

    Raises:
        As :func:`gather_sum`.
    """
    terms.check(segments)
    rows = num_targets if terms.query is None else terms.query.size(0)
    if rows is None or num_targets not in (None, rows):
        raise ValueError(
            f"attention: expected 'num_targets' to be the rows of 'query' (got {num_targets} and "
            f"{None if terms.query is None else rows} rows)"
        )
    wide = wide_dtype(terms.value.dtype)
    if terms.kind == "tanh":
        weight, value = weight_of(terms, segments), terms.value[:, 0].to(wide)
        out = gather_sum(value, segments, rows, weight, native=native).unsqueeze(1)
    elif _native(takes_attention(terms, rows), native):
        out, _, _ = torch.ops.pyg_sar.attention(*arguments_of(terms, segments), rows)
    else:
        out = attention_fallback.attention(terms, segments, rows)
    return out.to(terms.value.dtype)


def _native(fits: bool, native: bool | None) -> bool:
    """True where the kernel is to be called; warns once where it is missing."""
    if native is None and fits:
        warn_if_missing()
    return use_kernel(native, fits)
