r"""Additive attention's score terms, :math:`\langle a, v_j \rangle`: gradients without a product.

[Note: the terms' gradients] GATConv multiplies all rows by ``att_src`` and by ``att_dst`` and adds
up each head's columns. Autograd's gradient of such a product is two tensors of the size of the
values, beside that of the values themselves. Here the terms leave one node of the graph together
with the values: its backward pass gets all three gradients and adds the terms' to the values' in
place,

.. math::
    \frac{\partial L}{\partial v_{jh}} \mathrel{+}= k_{jh} a_h, \qquad
    \frac{\partial L}{\partial a_h} = \sum_j k_{jh} v_{jh},

with :math:`k = \partial L / \partial \langle a, v \rangle`, ``[N, H]``. The terms' values are those
that the layer computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Terms = tuple[Tensor, Tensor, Tensor | None]
"""Values ``[N, H, C]``, the keys' and the queries' terms ``[N, H]``."""


class _Together(torch.autograd.Function):
    """Hands values and their terms on; ``terms`` are constants, of which each is a projection."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        terms, weights = given[:count], given[count:]
        ctx.save_for_backward(value, *weights)
        ctx.set_materialize_grads(False)
        return (value.view_as(value), *(term.view_as(term) for term in terms))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        value, *weights = ctx.saved_tensors
        total, *shares = gradients  # of attention by kernel, which is differentiated once
        # What reads the values makes this gradient anew in each pass, and for nobody else.
        total = torch.zeros_like(value) if total is None else total
        found: list[Tensor | None] = []
        for share, weight, wanted in zip(
            shares, weights, ctx.needs_input_grad[2 + len(shares) :], strict=True
        ):
            if share is None:
                found.append(None)
                continue
            if ctx.needs_input_grad[0]:
                total.addcmul_(share.unsqueeze(-1), weight)
            product = torch.einsum("nh,nhc->hc", share, value) if wanted else None
            found.append(None if product is None else product.view_as(weight))
        return (total, None, *[None] * len(shares), *found)


def _is_projection(term: Any, value: Tensor, weight: Any) -> bool:
    """Whether autograd knows ``term`` as ``(value * weight).sum(-1)`` of a parameter, unwatched."""
    if not isinstance(term, Tensor) or not isinstance(weight, torch.nn.Parameter):
        return False
    summed, made = term.grad_fn, value.grad_fn
    if made is None or summed is None or summed.name() != "SumBackward1":
        return False
    if term._backward_hooks or term.retains_grad or term.shape != value.shape[:-1]:
        return False
    if weight.dtype != value.dtype:
        return False
    (product, _), *_ = summed.next_functions
    if product is None or product.name() != "MulBackward0" or len(product.next_functions) != 2:
        return False
    (left, number), (right, _) = product.next_functions
    return left is made and number == value.output_nr and getattr(right, "variable", None) is weight


def terms_together(
    value: Tensor, key: Tensor, query: Tensor | None, key_weight: Any, query_weight: Any
) -> Terms:
    """Values and terms whose gradients come back together. See [Note: the terms' gradients].

    What is no projection of ``value`` is returned as it is. The results may be read by one
    operation alone, whose gradient of the values is nobody else's.

    Args:
        value: ``[N, H, C]``.
        key: The keys' terms ``[N, H]``.
        query: The queries' terms ``[N, H]``, if there are any.
        key_weight: What the keys' terms are projections on, ``[1, H, C]``.
        query_weight: The same for the queries'.
    """
    if not torch.is_grad_enabled() or not _is_projection(key, value, key_weight):
        return value, key, query
    if not _is_projection(query, value, query_weight):
        value, key = _Together.apply(value, 1, key.detach(), key_weight)
        return value, key, query
    terms = key.detach(), _present(query).detach()
    return _Together.apply(value, 2, *terms, key_weight, query_weight)


def _present(term: Tensor | None) -> Tensor:
    if term is None:
        raise RuntimeError("A score term that was found is not there")
    return term
