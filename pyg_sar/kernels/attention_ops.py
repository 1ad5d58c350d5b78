"""Attention over a shard's edges: the kernels' Python face; without them, PyTorch.

[Note: attention by shards]

For a target i and a head h, over the in-edges e = (j -> i),

    s_e = score(query_i, key_j, edge_attr_e),      a_e = exp(s_e - max_i) / normaliser_i,
    out_i = sum_e a_e k_e value_e,

where k_e is 0 with probability p, else 1 / (1 - p). Shards come one at a time: the state (``acc``,
``maximum``, ``normaliser``) goes from one to the next, and is rescaled when the maximum grows
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; SAR, section 3.4).
Nothing per edge is kept; only ``tanh``, which has no softmax, takes a few numbers per edge of a
shard for as long as a pass lasts. With g = dL/dout and delta_i = <g_i, out_i>, the backward pass
recomputes a_e from the state after the last shard, and

    dL/dvalue_e = a_e k_e g_i,      dL/ds_e = a_e (k_e <g_i, value_e> - delta_i).

A source row's gradient is summed over its own edges (the transposed shard), a target row's over its
in-edges, in a fixed order: no two threads write to one row. Gradients that edges of several rows
share (parameters; the query of additive scores) have a buffer per thread, summed in thread order:
for one number of threads they are always the same. ::

    state = AttentionState.start(num_targets, value)
    for shard:      attention_(state, attention, segments)
    out = state.finish()

    cotangent = Cotangent.of(grad_out, out, state.maximum, state.normaliser)
    for shard:      attention_backward_sources_(gradients, attention, cotangent, transposed)
                    attention_backward_targets_(gradients, attention, cotangent, segments)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from pyg_sar.kernels import fallback, on_gpu
from pyg_sar.kernels.attention_terms import (
    Arguments,
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
    Segments,
    wide_dtype,
)
from pyg_sar.kernels.ops import (
    check_not_recorded,
    edge_dot,
    gather_sum_,
    named,
    takes,
    use_kernel,
)
from pyg_sar.kernels.scores import NUMBERS

_ROWS = 2**31 - 1  # what the kernels' row numbers reach


def attention_(
    state: AttentionState,
    attention: Attention,
    segments: Segments,
    *,
    native: bool | None = None,
) -> AttentionState:
    r"""Adds a shard's edges to a softmax over targets, in place.

    .. math::
        m'_i &= \max(m_i, \max_e s_e), \qquad r_i = e^{m_i - m'_i} \\
        \mathrm{normaliser}_i &\leftarrow r_i \, \mathrm{normaliser}_i + \sum_e e^{s_e - m'_i} \\
        \mathrm{acc}_i &\leftarrow r_i \, \mathrm{acc}_i
            + \sum_e e^{s_e - m'_i} \, k_e \, \mathrm{value}_e

    per head, over the edges e into target i. See [Note: attention by shards]; the scores s are
    those of :class:`~pyg_sar.kernels.attention_terms.Attention`, whose ``tanh`` only adds to
    ``acc``. Half precision accumulates in float32. NaN and infinite features give what PyG gives: a
    NaN score makes the head of its target NaN. Not recorded by autograd.

    Args:
        state: What was added so far; each row of its tensors in one piece.
        attention: Scores and values of the shard.
        segments: Its edges by target: ``source`` are rows of ``key`` and ``value``, ``targets``
            rows of ``query`` and the state.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Returns:
        ``state``.

    Raises:
        ValueError: Shapes don't fit, edges are not sorted, or autograd would have to record this.
        TypeError: Dtypes don't fit.
        IndexError: An index is out of range. The state may have been added to.
        RuntimeError: The kernel was asked for and is missing.
    """
    attention.check(segments)
    state.check(attention)
    if torch.is_grad_enabled():
        check_not_recorded("attention", *attention.tensors().values())
    if attention.places is not None:
        attention, segments = _in_place(attention, segments, attention.places)
    if not attention.score.softmax:
        _add_tanh(state, attention, segments, native)
        return state
    run: Any = fallback.attention_
    on_device = _on_gpu(attention, native)
    if on_device is not None:
        run = on_device.attention_
    elif use_kernel(native, takes_attention(attention, state.acc.size(0))):
        run = torch.ops.pyg_sar.attention_
    given = _detached(attention, segments, widen=on_device is None)
    try:
        run(state.acc, state.maximum, state.normaliser, *given)
    except RuntimeError as error:
        raise named(error) from None
    return state


def attention_backward_sources_(
    gradients: AttentionGradients,
    attention: Attention,
    cotangent: Cotangent,
    transposed: Segments,
    *,
    native: bool | None = None,
) -> None:
    r"""Adds to the gradients that come by source row: one pass over a transposed shard.

    .. math::
        \frac{\partial L}{\partial v_j} \mathrel{+}= \sum_e a_e k_e g_i, \qquad
        \frac{\partial L}{\partial k_j} \mathrel{+}= \sum_e \frac{\partial L}{\partial s_e}
            \frac{\partial s_e}{\partial k_j}, \qquad
        \frac{\partial L}{\partial s_e} = a_e (k_e \langle g_i, \mathrm{value}_e \rangle - \delta_i)

    over the edges e out of source row j; with additive scores and ``tanh`` those of ``query``,
    ``edge_attr`` and ``edge_weight`` too, which then need no other pass. See [Note: attention by
    shards].

    Args:
        gradients: What is wanted, and added to (``edge_attr``: written); each row in one piece.
            Those that the other pass gives are left alone.
        attention: Scores and values of the shard, as in the forward pass.
        cotangent: Of the targets.
        transposed: The shard's edges by source row: ``source`` are rows of ``query`` and the
            cotangent, ``targets`` rows of ``key`` and ``value``.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Raises:
        As :func:`attention_`.
    """
    names: tuple[str, ...] = ("value", "key")
    if attention.score.by_source:
        names = (*names, "query", "edge_attr", "edge_weight")
    _backward(gradients, names, attention, cotangent, transposed, True, native)


def attention_backward_targets_(
    gradients: AttentionGradients,
    attention: Attention,
    cotangent: Cotangent,
    segments: Segments,
    *,
    native: bool | None = None,
) -> None:
    r"""Adds to the gradients that come by target: one pass over a shard.

    .. math::
        \frac{\partial L}{\partial q_i} \mathrel{+}= \sum_e \frac{\partial L}{\partial s_e}
            \frac{\partial s_e}{\partial q_i}

    over the in-edges e of target i, and those of ``att``, ``edge_attr`` and ``edge_weight``.
    Nothing is left to do here with additive scores and ``tanh``, nor where none of these is wanted.

    Args:
        gradients: What is wanted, and added to (``edge_attr``: written); each row in one piece.
            Those that the other pass gives are left alone.
        attention: Scores and values of the shard, as in the forward pass.
        cotangent: Of the targets.
        segments: The shard's edges by target, as in the forward pass.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Raises:
        As :func:`attention_`.
    """
    names: tuple[str, ...] = ("query", "att", "edge_attr", "edge_weight")
    names = () if attention.score.by_source else names
    _backward(gradients, names, attention, cotangent, segments, False, native)


def keep_factors(drop_key: Tensor, heads: int, seed: int, p: float) -> Tensor:
    r"""The dropout factors :math:`k_e` of edges and heads: 0, or :math:`1 / (1 - p)`.

    A function of its arguments alone, by a hash of the edge's key, the head and the seed.

    Args:
        drop_key: ``[E]``, int32 or int64 of which 32 bits count; or which heads are kept.
        heads: H.
        seed: 64 bits.
        p: Probability of 0.

    Returns:
        ``[E, H]``, float64.
    """
    return fallback.keep_factors(drop_key, heads, *fallback.split_seed(seed), p)


def _backward(
    gradients: AttentionGradients,
    names: tuple[str, ...],
    attention: Attention,
    cotangent: Cotangent,
    segments: Segments,
    transposed: bool,
    native: bool | None,
) -> None:
    attention.check(segments)
    cotangent.check(attention)
    gradients.check(attention)
    if torch.is_grad_enabled():
        check_not_recorded("attention", *attention.tensors().values())
    gradients = gradients.only(names)
    if not gradients.wanted():
        return
    if not transposed and attention.places is not None:
        attention, segments = _in_place(attention, segments, attention.places)
    if not attention.score.softmax:
        _add_tanh_gradients(gradients, attention.in_order(), cotangent, segments, native)
        return
    known = (cotangent.grad_out, cotangent.maximum, cotangent.normaliser, cotangent.delta)
    by_edge = gradients.edge_attr, gradients.edge_weight
    own = gradients.value, gradients.key, gradients.query, gradients.att
    run: Any
    on_device = _on_gpu(attention, native)
    if on_device is not None:
        given = *known, *_detached(attention, segments, widen=False)
        run = on_device.attention_backward_
        run(*own, *by_edge, *given, transposed, attention.places)
        return
    kernel = use_kernel(native, takes_attention(attention, cotangent.grad_out.size(0)))
    attention = attention if kernel else attention.in_order()
    given = *known, *_detached(attention, segments)
    if not kernel:
        run = fallback.attention_backward_
        given = *own, *by_edge, *given, transposed
    elif transposed:
        by_source = gradients.value, gradients.key, gradients.query, *by_edge
        run = torch.ops.pyg_sar.attention_backward_sources_
        given = *by_source, *given, attention.places
    else:
        run = torch.ops.pyg_sar.attention_backward_targets_
        given = gradients.query, gradients.att, *by_edge, *given
    try:
        run(*given)
    except RuntimeError as error:
        raise named(error) from None


def _in_place(
    attention: Attention, segments: Segments, places: Tensor
) -> tuple[Attention, Segments]:
    """Edges that read source rows where they lie."""
    source = places.index_select(0, segments.source).to(segments.source.dtype)
    return replace(attention, places=None), replace(cast(Any, segments), source=source)


def _on_gpu(attention: Attention, native: bool | None) -> Any:
    """The operators by Triton that compute this attention, or ``None``."""
    value, key = attention.value, attention.drop_key
    here = value.device.type == on_gpu.DEVICE
    if native is not None or not here or not on_gpu.takes(value):
        return None
    drop = 0 if key is None or attention.p == 0 else key.dim()
    features = None if attention.edge_attr is None else attention.edge_attr.size(1)
    shape = on_gpu.AttentionShape(
        kind=NUMBERS[attention.kind],
        heads=value.size(1),
        channels=value.size(2),
        features=features,
        own_key=attention.key is not None,
        own_query=attention.query is not None,
        drop=drop,
        p=attention.p if drop else 0.0,
        slope=attention.slope,
        scale=attention.scale,
    )
    return on_gpu.attention_operators(shape, value)


def _detached(attention: Attention, segments: Segments, widen: bool = True) -> tuple[object, ...]:
    given = arguments_of(attention, segments, widen)
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in given)


def arguments_of(attention: Attention, segments: Segments, widen: bool = True) -> Arguments:
    """The kernels' arguments; they compute in the accumulators' dtype.

    Args:
        attention: Scores and values.
        segments: Edges.
        widen: Whether tensors are given in that dtype; else kernels widen what they read.
    """
    a, wide = attention, wide_dtype(attention.value.dtype) if widen else attention.value.dtype
    floats = (a.value, a.key, a.query, a.att, a.edge_attr, a.edge_weight)
    value, *others = (None if t is None else t.to(wide) for t in floats)
    keys = a.drop_key.to(torch.int32) if a.p > 0 and a.drop_key is not None else None
    words = fallback.split_seed(a.seed) if a.p > 0 else (0, 0)
    ends = segments.source, segments.offsets, segments.targets, segments.edges
    score = NUMBERS[a.kind], value, *others, a.slope, a.scale
    arguments: tuple[Any, ...] = (*score, *ends, keys, *words, a.p)
    return Arguments(*arguments)


def takes_attention(attention: Attention, num_targets: int) -> bool:
    """Tells whether the kernels are made for the tensors."""
    return takes(attention.value) and max(attention.value.size(0), num_targets) <= _ROWS


# Without a softmax ############################################################
#
# [Note: tanh] With alpha_e = tanh(k_j + q_i), a factor f_e (an edge's number, times dropout's
# factor) and dL/dout = g,
#
#     out_i = sum_e alpha_e f_e v_j,              dL/dv_j = sum_e alpha_e f_e g_i,
#     dL/d(k_j + q_i) = <v_j, g_i> f_e (1 - alpha_e^2).
#
# It is linear in the sources: a shard needs a few numbers per edge, while a pass lasts.


@dataclass(frozen=True, slots=True)
class _Weights:
    """Of a shard's edges, in order: ``alpha`` and ``keep * attr``, each ``[E]``."""

    alpha: Tensor
    keep: Tensor | None
    attr: Tensor | None

    def times(self, numbers: Tensor, *, attr: bool = True) -> Tensor:
        """Numbers of the edges, times their factors."""
        if self.keep is not None:
            numbers = numbers * self.keep
        return numbers * self.attr if attr and self.attr is not None else numbers


def _weights(attention: Attention, segments: Segments, j: Tensor, i: Tensor) -> _Weights:
    wide = wide_dtype(attention.value.dtype)
    ends = [(attention.key, j), (attention.query, i)]
    key, query = (t.to(wide).view(-1).index_select(0, at) for t, at in ends if t is not None)
    alpha = (key + query).tanh()
    keep, attr, numbers = None, attention.edge_attr, segments.edges
    if attr is not None:
        attr = attr.to(wide).view(-1)
        attr = attr if numbers is None else attr.index_select(0, numbers)
    if attention.p > 0 and attention.drop_key is not None:
        keys = attention.drop_key
        keys = keys if numbers is None else keys.index_select(0, numbers)
        keep = keep_factors(keys, 1, attention.seed, attention.p).view(-1).to(wide)
    return _Weights(alpha, keep, attr)


def _targets_of(segments: Segments) -> Tensor:
    count = segments.source.numel()
    return fallback.targets_of(segments.offsets, segments.targets, count)


def _add_tanh(
    state: AttentionState, attention: Attention, segments: Segments, native: bool | None
) -> None:
    """Adds a shard's edges to ``acc``, which alone changes. See [Note: tanh]."""
    value = attention.value.detach().to(state.acc.dtype)[:, 0]
    weights = _weights(attention, segments, segments.source, _targets_of(segments))
    weight = weights.times(weights.alpha).detach()
    where = (segments.source, segments.offsets, segments.targets)
    gather_sum_(state.acc[:, 0], value, *where, weight, native=native)


def _add_tanh_gradients(
    gradients: AttentionGradients,
    attention: Attention,
    cotangent: Cotangent,
    transposed: Segments,
    native: bool | None,
) -> None:
    """Adds the wanted gradients of a shard's edges, grouped by source row. See [Note: tanh]."""
    grad_out = cotangent.grad_out[:, 0]
    i, j = transposed.source, _targets_of(transposed)
    weights = _weights(attention, transposed, j, i)
    where = (i, transposed.offsets, transposed.targets)
    if gradients.value is not None:
        weight = weights.times(weights.alpha)
        gather_sum_(gradients.value[:, 0], grad_out, *where, weight, native=native)
    if list(gradients.wanted()) in ([], ["value"]):
        return
    value = attention.value.detach().to(grad_out.dtype)[:, 0]
    inner = edge_dot(grad_out, value, *where, native=native)
    if gradients.edge_attr is not None:
        numbers = slice(None) if transposed.edges is None else transposed.edges.long()
        found = weights.times(inner * weights.alpha, attr=False)
        gradients.edge_attr[numbers] = found.unsqueeze(-1)
    slopes = weights.times(inner.mul_(1 - weights.alpha.square())).unsqueeze(-1)
    if gradients.key is not None:
        gradients.key.index_add_(0, j, slopes)
    if gradients.query is not None:
        gradients.query.index_add_(0, i, slopes)
