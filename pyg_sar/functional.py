r"""Sums and attention over a graph's edges as functions that autograd records, for new layers.

Their arguments are tensors, numbers, strings and ``None``: ``torch.jit.script``, ``torch.compile``
and ``torch.export`` take code that calls them. Edges are sorted once, by :func:`sorted_edges`:

.. code-block:: python

    source, offsets, edges = sorted_edges(edge_index, num_sources, num_targets)
    out = gather_sum(x, source, offsets, edge_weight[edges])

The kernels are the operators ``torch.ops.pyg_sar.sort_edges``, ``gather_sum`` and ``attention``,
registered with gradients and shapes. Where they are missing or not made for the tensors, PyTorch
gives the same results and gradients, and materializes a message per edge. Layers that
:func:`pyg_sar.distribute` converts need none of this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.kernels import fallback, ops
from pyg_sar.kernels.attention_terms import (
    check_per_edge,
    check_segments,
    check_terms,
    wide_dtype,
)
from pyg_sar.kernels.scores import declared, number_of


def use_kernel(native: bool | None, fits: bool) -> bool:
    """Tells whether to call the kernel: it is asked for, or it is there and made for the tensors.

    Raises:
        RuntimeError: The kernel was asked for and is missing.
    """
    if native is None:
        if not torch.jit.is_scripting() and fits and not torch.compiler.is_compiling():
            ops.warn_if_missing()
        return ops.built and fits
    if native and not ops.built:
        raise RuntimeError("pyg_sar has no C++ kernels: call this with native=None")
    return native


def sorted_edges(
    edge_index: Tensor, num_sources: int, num_targets: int, native: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Sorts edges by target, and those of a target by source.

    Args:
        edge_index: Sources and targets, ``[2, E]``, int64.
        num_sources: Source rows, M.
        num_targets: Target rows, N.
        native: ``True``: the kernel; ``False``: PyTorch; ``None``: the kernel where there is one.

    Returns:
        Each edge's source, ``[E]``; the first edge of each target, and at last E, ``[N + 1]``; each
        edge's column in ``edge_index``, ``[E]``: int32 where all of these fit, else int64.

    Raises:
        ValueError: ``edge_index`` is not ``[2, E]``.
        TypeError: It is not int64.
        IndexError: A node is out of range (``RuntimeError`` without the kernel).
    """
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"sorted_edges: expected 'edge_index' of shape [2, E] (got {list(edge_index.shape)})"
        )
    if edge_index.dtype != torch.int64:
        raise TypeError(f"sorted_edges: expected int64 'edge_index' (got {edge_index.dtype})")
    source, target = edge_index[0], edge_index[1]
    kernel = use_kernel(native, edge_index.device.type == "cpu")
    if ops.built and kernel:
        if torch.jit.is_scripting():
            by_source = torch.ops.pyg_sar.sort_edges(source, num_sources, None)[0]
            edges, offsets = torch.ops.pyg_sar.sort_edges(target, num_targets, by_source)
        else:  # A script knows errors as RuntimeError alone.
            by_source = ops.run(torch.ops.pyg_sar.sort_edges, source, num_sources, None)[0]
            edges, offsets = ops.run(torch.ops.pyg_sar.sort_edges, target, num_targets, by_source)
    else:
        by_source = fallback.sort_edges(source, num_sources, None)[0]
        edges, offsets = fallback.sort_edges(target, num_targets, by_source)
    ordered = source[edges]
    if num_sources < 2147483648:
        return ordered.to(edges.dtype), offsets, edges
    return ordered, offsets.to(ordered.dtype), edges.to(ordered.dtype)


def gather_sum(
    rows: Tensor,
    source: Tensor,
    offsets: Tensor,
    weight: Tensor | None = None,
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
        source: Each edge's source row, ``[E]``, int32 or int64; see :func:`sorted_edges`.
        offsets: The first edge of each target, and at last E, ``[N + 1]``, of the same dtype.
        weight: A number for each edge in the order of ``source``, ``[E]``; ``None`` for 1.
        native: ``True``: the kernel; ``False``: PyTorch; ``None``: the kernel where it is there and
            made for the tensors.

    Returns:
        ``[N, F]``; 0 for targets without edges.

    Raises:
        ValueError: Shapes don't fit, or edges are not sorted.
        TypeError: Dtypes don't fit.
        IndexError: An index is out of range.
        RuntimeError: The kernel was asked for and is missing.
        NotImplementedError: A second derivative is asked for, of the kernel.
    """
    check_segments(source, offsets, None, None)
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(
            "gather_sum: expected 'rows' of shape [M, F], floating point (got "
            f"{list(rows.shape)}, {rows.dtype})"
        )
    if weight is not None and (weight.dim() != 1 or weight.size(0) != source.size(0)):
        raise ValueError(
            f"gather_sum: expected a 'weight' for each of the {source.numel()} edges "
            f"(got shape {list(weight.shape)})"
        )
    count = offsets.size(0) - 1
    kernel = use_kernel(native, ops.takes(rows))
    if ops.built and kernel:
        wide = None if weight is None else weight.to(wide_dtype(rows.dtype))
        given = (rows, source, offsets, None, wide, None, count)
        if torch.jit.is_scripting():
            return torch.ops.pyg_sar.gather_sum(*given)
        return ops.run(torch.ops.pyg_sar.gather_sum, *given)
    return fallback.gather_sum(rows, source, offsets, weight, count)


def attention(
    kind: str,
    value: Tensor,
    key: Tensor | None,
    query: Tensor | None,
    source: Tensor,
    offsets: Tensor,
    edges: Tensor | None = None,
    att: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    slope: float = 1.0,
    scale: float = 1.0,
    drop_key: Tensor | None = None,
    seed: int = 0,
    p: float = 0.0,
    native: bool | None = None,
) -> Tensor:
    r"""Attention over a graph's edges, and its gradients.

    .. math::
        \mathrm{out}_i = \sum_e a_e k_e \, \mathrm{value}_e, \qquad
        a_e = \frac{e^{s_e}}{\sum_{e'} e^{s_{e'}}}

    over the in-edges of target i, per head; :mod:`pyg_sar.kernels.scores` has the scores s, and the
    arguments are the attributes of :class:`~pyg_sar.kernels.attention_terms.Attention`, which has
    their shapes. Keeps its inputs, the output and two numbers per target and head for the backward
    pass, nothing per edge (``tanh``: the edges' weights).

    Args:
        kind: The score: ``'additive'``, ``'gatv2'``, ``'dot'``, ``'mixed'``, ``'tanh'`` ...
        value: ``[M, H, C]``, floating point.
        key: ``[M, H]`` or ``[M, H, C]``, or ``None`` for ``value``.
        query: ``[N, H]`` or ``[N, H, C]``, or ``None`` for 0 (additive).
        source: Each edge's source row, ``[E]``, int32 or int64; see :func:`sorted_edges`.
        offsets: The first edge of each target, and at last E, ``[N + 1]``, of the same dtype.
        edges: The row of ``edge_attr`` and ``drop_key`` of each edge, ``[E]``, of the same dtype;
            ``None``: in order.
        att: ``[H, C]``, ``[2, H, C]`` or ``None``.
        edge_attr: ``[E, D]`` or ``None``.
        edge_weight: ``[D, H]`` or ``[D, H, C]``, as keys are; goes with ``edge_attr``.
        slope: Leaky ReLU's negative slope; 1: none.
        scale: Of inner products.
        drop_key: ``[E]``, int32 or int64: the number that an edge is known by to the dropout.
            Needed where p > 0. Compiled code draws it anew, with ``torch.randint``, for other
            factors in each call.
        seed: Of the dropout, 64 bits; a constant in compiled code.
        p: Probability to drop a weight after the normalisation.
        native: ``True``: the kernel; ``False``: PyTorch; ``None``: the kernel where it is there and
            made for the tensors.

    Returns:
        ``[N, H, C]`` of the dtype of ``value``; 0 for targets without edges.

    Raises:
        ValueError: Shapes or numbers don't fit, or edges are not sorted.
        TypeError: Dtypes don't fit.
        IndexError: An index is out of range.
        RuntimeError: The kernel was asked for and is missing.
        NotImplementedError: A second derivative is asked for, of the kernel.
    """
    check_terms(kind, value, query, key, att, edge_attr, edge_weight)
    check_segments(source, offsets, None, edges)
    check_per_edge(source, edges is not None, edge_attr, drop_key, p)
    count = offsets.size(0) - 1
    if query is not None and query.size(0) != count:
        raise ValueError(
            f"attention: expected 'query' with a row for each of the {count} targets of 'offsets' "
            f"(got {query.size(0)})"
        )
    wide = wide_dtype(value.dtype)
    low, high = (0, 0)
    if p > 0:
        low, high = fallback.split_seed(seed)
    else:
        drop_key = None
    number = number_of(kind)
    additive = not declared()[number].softmax  # check_terms() has seen a key and a query.
    if additive and key is not None and query is not None:
        place = fallback.targets_of(offsets, None, source.numel())
        weight = key.to(wide).view(-1).index_select(0, source)
        weight = (weight + query.to(wide).view(-1).index_select(0, place)).tanh()
        if edge_attr is not None:
            factor = edge_attr.to(wide).view(-1)
            weight = weight * (factor if edges is None else factor.index_select(0, edges))
        if drop_key is not None:
            keys = drop_key if edges is None else drop_key.index_select(0, edges)
            weight = weight * fallback.keep_factors(keys, 1, low, high, p).view(-1).to(wide)
        out = gather_sum(value[:, 0].to(wide), source, offsets, weight, native)
        return out.unsqueeze(1).to(value.dtype)
    rows = value.to(wide)
    wide_key = None if key is None else key.to(wide)
    wide_query = None if query is None else query.to(wide)
    wide_att = None if att is None else att.to(wide)
    wide_attr = None if edge_attr is None else edge_attr.to(wide)
    wide_weight = None if edge_weight is None else edge_weight.to(wide)
    given = (
        number,
        rows,
        wide_key,
        wide_query,
        wide_att,
        wide_attr,
        wide_weight,
        slope,
        scale,
        source,
        offsets,
    )
    fits = ops.takes(value) and value.size(0) < 2147483648 and count < 2147483648
    kernel = use_kernel(native, fits)
    if ops.built and kernel:
        words = None if drop_key is None else drop_key.to(torch.int32)
        more = (None, edges, words, low, high, p, count)
        if torch.jit.is_scripting():
            return torch.ops.pyg_sar.attention(*given, *more)[0].to(value.dtype)
        return ops.run(torch.ops.pyg_sar.attention, *given, *more)[0].to(value.dtype)
    out = fallback.attention(*given, edges, drop_key, low, high, p)
    return out.to(value.dtype)
