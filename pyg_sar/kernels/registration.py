"""Shapes and gradients of the C++ kernels' operators, for code that is traced and recorded.

The library registers their schemas and what they compute on CPUs. PyTorch's stable ABI has no symbolic
sizes and no autograd, so that these are Python: :func:`register` runs when the library is loaded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.kernels.scores import declared

# Shapes #######################################################################
#
# Arguments are checked when a kernel runs; sizes may be symbols here.


def _nothing(*arguments: Any) -> None:
    """Of operators that add in place."""


def _sort_edges(key: Tensor, num_keys: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    dtype = torch.int32 if key.numel() < 2**31 else torch.int64
    return key.new_empty(key.numel(), dtype=dtype), key.new_empty(num_keys + 1, dtype=dtype)


def _transpose(
    source: Tensor, offsets: Tensor, targets: Any, edges: Any, num_rows: int, num_targets: int, numbered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    count = source.numel()
    numbers = source.new_empty(count if numbered else 0)
    return source.new_empty(count), source.new_empty(num_rows + 1), numbers


def _edge_dot(rows: Tensor, gradient: Tensor, source: Tensor, *others: Any) -> Tensor:
    return rows.new_empty(source.shape, dtype=wide_dtype(rows.dtype))


def _gather_sum(rows: Tensor, *others: Any) -> Tensor:
    return rows.new_empty(others[-1], rows.size(1))


def _extremum_backward(total: Tensor, *others: Any) -> Tensor:
    return total.new_empty((), dtype=torch.int64)


def _attention(kind: int, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = others[-1], value.size(1)
    return value.new_empty(*shape, value.size(2)), value.new_empty(shape), value.new_empty(shape)


def _philox_rows(ids: Tensor, width: int, low: int, high: int) -> Tensor:
    return ids.new_empty(ids.size(0), width)


def _columns(x: Tensor) -> Tensor:
    return x.new_empty(2, x.size(1), dtype=torch.float64)


def _column_products(gradient: Tensor, x: Tensor, shift: Tensor) -> Tensor:
    return _columns(x)


def _scale_rows(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


_SHAPES: dict[str, Any] = {
    "gather_sum_": _nothing,
    "extremum_": _nothing,
    "attention_": _nothing,
    "attention_backward_sources_": _nothing,
    "attention_backward_targets_": _nothing,
    "sort_edges": _sort_edges,
    "transpose": _transpose,
    "edge_dot": _edge_dot,
    "gather_sum": _gather_sum,
    "extremum_backward_": _extremum_backward,
    "attention": _attention,
    "philox_rows": _philox_rows,
    "column_moments": _columns,
    "column_products": _column_products,
    "scale_rows": _scale_rows,
}


# Gradients ####################################################################
#
# Made of the operators that add in place, so that they are traced and functionalized as these are. What
# a shard at a time needs (pyg_sar/engine/fused_attention.py) is not a function of its inputs alone, and
# calls the operators in place itself.


def _check_once(name: str) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"pyg_sar::{name} has no second derivatives: call it without create_graph=True"
        )


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, source, offsets, targets, weight, edges, _ = inputs
    ctx.num_rows = rows.size(0)
    kept = rows if ctx.needs_input_grad[4] else None
    ctx.save_for_backward(kept, source, offsets, targets, weight, edges)


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    _check_once("gather_sum")
    kernels = torch.ops.pyg_sar
    rows, source, offsets, targets, weight, edges = ctx.saved_tensors
    of_rows = of_weight = None
    if ctx.needs_input_grad[0]:
        numbered = weight is not None
        given = source, offsets, targets, edges, ctx.num_rows, gradient.size(0), numbered
        source_rows, first, numbers = kernels.transpose(*given)
        of_rows = gradient.new_zeros(ctx.num_rows, gradient.size(1))
        places = source_rows, first, None, weight, numbers if numbered else None
        kernels.gather_sum_(of_rows, gradient, *places)
    if ctx.needs_input_grad[4]:
        of_weight = kernels.edge_dot(rows, gradient, source, offsets, targets, edges)
    return of_rows, None, None, None, of_weight, None, None


_WANTED = {1: "value", 2: "key", 3: "query", 4: "att", 5: "edge_attr", 6: "edge_weight"}
"""Inputs of ``attention`` that have a gradient."""


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = [*inputs[1:7], *inputs[9:14]]
    ctx.numbers = inputs[0], *inputs[7:9], *inputs[14:17]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _attention_backward(ctx: Any, grad_out: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    _check_once("attention")
    kernels = torch.ops.pyg_sar
    kind, slope, scale, low, high, p = ctx.numbers
    floats, ends, (out, *state) = (
        ctx.saved_tensors[:6],
        ctx.saved_tensors[6:11],
        ctx.saved_tensors[11:],
    )
    source, offsets, targets, edges, drop_key = ends
    found = {
        name: torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for (place, name), tensor in zip(_WANTED.items(), floats, strict=True)
        if ctx.needs_input_grad[place]
    }
    grad_out = grad_out.contiguous()
    known = grad_out, *state, (grad_out * out).sum(-1)
    scores = kind, *floats, slope, scale
    words = drop_key, low, high, p
    names = "query", "edge_attr", "edge_weight"
    by_source = declared()[kind].by_source
    sources = ["value", "key", *(names if by_source else ())]
    if any(name in found for name in sources):
        numbered = floats[4] is not None or drop_key is not None
        given = source, offsets, targets, edges, floats[0].size(0), grad_out.size(0), numbered
        rows, first, numbers = kernels.transpose(*given)
        written = [found.get(name) if name in sources else None for name in ("value", "key", *names)]
        transposed = rows, first, None, numbers if numbered else None
        kernels.attention_backward_sources_(*written, *known, *scores, *transposed, *words)
    by_target = [found.get(name) for name in ("query", "att", "edge_attr", "edge_weight")]
    if not by_source and any(tensor is not None for tensor in by_target):
        kernels.attention_backward_targets_(
            *by_target, *known, *scores, source, offsets, targets, edges, *words
        )
    return tuple(found.get(_WANTED.get(place, "")) for place in range(18))


@cache
def register() -> Library:
    """Registers all of it, once, with the operators of the library, which is loaded."""
    library = Library("pyg_sar", "FRAGMENT")
    for name, shape in _SHAPES.items():
        register_fake(f"pyg_sar::{name}", shape, lib=library)
    sums, attention = "pyg_sar::gather_sum", "pyg_sar::attention"
    register_autograd(sums, _sum_backward, setup_context=_keep_sum, lib=library)
    register_autograd(attention, _attention_backward, setup_context=_keep_attention, lib=library)
    return library
