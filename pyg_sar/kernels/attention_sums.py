r"""Attention without a softmax (``tanh``): sums of source rows by the kernels for sums.

With :math:`\alpha_e = \tanh(k_j + q_i)`, a factor :math:`f_e` (an edge's number, times what dropout
makes of 1) and dL/dout = g,

.. math::
    \mathrm{out}_i = \sum_e \alpha_e f_e v_j, \qquad
    \frac{\partial L}{\partial v_j} = \sum_e \alpha_e f_e g_i, \qquad
    \frac{\partial L}{\partial (k_j + q_i)} = \langle v_j, g_i \rangle f_e (1 - \alpha_e^2).

It is linear in the sources: nothing but numbers of a shard's edges is needed beside it, and these
only while a pass lasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyg_sar.kernels.attention_fallback import keep_factors, targets_of
from pyg_sar.kernels.attention_terms import (
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
    Segments,
    wide_dtype,
)
from pyg_sar.kernels.ops import edge_dot, gather_sum_


@dataclass(frozen=True, slots=True)
class _Weights:
    """Of a shard's edges, in order: ``alpha`` and ``keep * attr``, each ``[E]``."""

    alpha: Tensor
    keep: Tensor | None
    attr: Tensor | None

    def times(self, numbers: Tensor, *, keep: bool = True, attr: bool = True) -> Tensor:
        """Numbers of the edges, times their factors."""
        if keep and self.keep is not None:
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


def weight_of(attention: Attention, segments: Segments) -> Tensor:
    """The number that each edge's value is multiplied by, ``[E]``, in order."""
    weights = _weights(attention, segments, segments.source, targets_of(segments))
    return weights.times(weights.alpha)


def attention_(
    state: AttentionState,
    attention: Attention,
    segments: Segments,
    *,
    native: bool | None = None,
) -> None:
    """:func:`~pyg_sar.kernels.attention_ops.attention_` for ``tanh``: the state's ``acc`` alone
    changes."""
    value = attention.value.detach().to(state.acc.dtype)[:, 0]
    gather_sum_(
        state.acc[:, 0],
        value,
        segments.source,
        segments.offsets,
        segments.targets,
        weight_of(attention, segments).detach(),
        native=native,
    )


def backward_(
    gradients: AttentionGradients,
    attention: Attention,
    cotangent: Cotangent,
    transposed: Segments,
    *,
    native: bool | None = None,
) -> None:
    """Adds the wanted gradients of a shard's edges, grouped by source row."""
    grad_out = cotangent.grad_out[:, 0]
    i, j = transposed.source, targets_of(transposed)
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
