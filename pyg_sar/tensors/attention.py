"""Scaled dot-product attention: each worker asks for its rows; keys and values are gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyg_sar.tensors.node_tensor import NodeTensor, by_gathering, node_tensors, refusal, rule, whole
from pyg_sar.tensors.operands import arguments, called, own, summed, wrap
from pyg_sar.tensors.rows import Rows

_QUERIES = ("query", "grad_out", "out", "logsumexp")  # [B, H, L, E], or [B, H, L]
_KEYS = ("key", "value")  # [B, H, S, E]


@rule("_fused_sdp_choice")
def _choice(func: Any, args: Any, kwargs: Any) -> int:
    """1: the operator below, which keeps no pairs; 0: products and a softmax."""
    given = arguments(func, args, kwargs)
    query, key, value, mask = (given[n] for n in ("query", "key", "value", "attn_mask"))
    heads = {t.shape[-1] for t in (query, key, value)}, {t.shape[:-2] for t in (query, key, value)}
    plain_mask = mask is None or (mask.dim() in (2, 4) and not mask.requires_grad)
    full = query.is_cpu and query.dim() == 4 and query.numel() and key.numel()
    return int(
        bool(full and not given["dropout_p"] and plain_mask and all(len(h) == 1 for h in heads))
    )


@rule(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows along the queries' axis, or along that of the batch."""
    given = arguments(func, args, kwargs)
    if given["dropout_p"]:
        raise refusal(func, "with dropout draws random numbers of its own", *node_tensors(args))
    queries = [given[n] for n in _QUERIES if n in given]
    first = next(iter(node_tensors(queries)), None)
    masked = isinstance(given["attn_mask"], Tensor)
    if first is None or first.axis not in (0, 2) or (given["is_causal"] and first.axis):
        return by_gathering(func, args, kwargs)
    rows, axis = first.rows, first.axis
    changed: dict[str, Any] = {n: own(given[n], rows, axis) for n in _QUERIES if n in given}
    for name in _KEYS:
        changed[name] = whole(given[name], "attention") if axis else own(given[name], rows, 0)
    if masked:
        changed["attn_mask"] = _mask(given["attn_mask"], rows, axis - 4)
    if not rows.count:  # A row that asks in vain.
        for name in changed if axis == 0 else [n for n in _QUERIES if n in given]:
            part = changed[name]
            changed[name] = part.new_zeros(
                [1 if d == axis else n for d, n in enumerate(part.shape)]
            )
        if masked:
            changed["attn_mask"] = None
    out, *rest = called(func, given, **changed)
    keep = lambda part: wrap(part.narrow(axis, 0, rows.count), rows, axis)  # noqa: E731
    if axis == 0 or not func._schema.name.endswith("backward"):
        return (keep(out), *map(keep, rest))
    totals = (summed(part, rows) for part in rest)
    return (keep(out), *(_like(given[n], t) for n, t in zip(_KEYS, totals, strict=True)))


def _mask(mask: Tensor, rows: Rows, axis: int) -> Tensor:
    """Returns this worker's rows of a mask ``[..., L, S]``, which may have one for all."""
    if mask.dim() < -axis or mask.size(axis) == 1:
        return whole(mask, "attention")
    if isinstance(mask, NodeTensor) and mask.axis - mask.dim() != axis:
        mask = whole(mask, "attention")
    return own(mask, rows, axis)


def _like(tensor: Tensor, total: Tensor) -> Tensor:
    """Returns a gradient that all workers hold as that of what it is the gradient of."""
    if not isinstance(tensor, NodeTensor):
        return total
    return wrap(tensor.rows.cut(total, tensor.axis), tensor.rows, tensor.axis)
