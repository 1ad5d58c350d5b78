"""Which layers are softmax attention as the kernels know it, and what their scores are made of.

A layer is recognized by its class and options, where its ``message``, ``edge_update`` and
``aggregate`` are PyG's own and no hook watches them; any other layer goes the general way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    AGNNConv,
    GATConv,
    GATv2Conv,
    Linear,
    MessagePassing,
    SumAggregation,
    TransformerConv,
)

from pyg_sar.attention_terms import Attention
from pyg_sar.nn.projected import terms_together
from pyg_sar.ops import takes
from pyg_sar.program import DeferredEdge


def attention_of(layer: MessagePassing, kwargs: Mapping[str, Any]) -> Attention | None:
    """The attention that a call of ``propagate`` computes, or ``None`` where it isn't one.

    Args:
        layer: The layer.
        kwargs: Keyword arguments of ``propagate``.

    Returns:
        The attention, with this worker's rows as keys and values; its output is ``[N, H, C]``.
    """
    make = next((make for kind, make in _LAYERS.items() if _is_plainly(layer, kind)), None)
    if make is None or torch.is_autocast_enabled("cpu"):
        return None
    found: Attention | None = make(layer, kwargs)
    if found is None or not takes(found.value):
        return None
    tensors = found.tensors().values()
    alike = all(t.dtype == found.value.dtype and t.device == found.value.device for t in tensors)
    return found if alike else None


def as_aggregated(layer: MessagePassing, out: Tensor) -> Tensor:
    """The attention's output ``[N, H, C]`` in the shape of the layer's aggregated messages."""
    return out.squeeze(1) if isinstance(layer, AGNNConv) else out  # which has no axis of heads


def _is_plainly(layer: Any, kind: type[MessagePassing]) -> bool:
    """Whether a layer's messages are those of ``kind``, unwatched."""
    methods = ("message", "edge_update", "aggregate")
    return (
        isinstance(layer, kind)
        and all(getattr(type(layer), name) is getattr(kind, name) for name in methods)
        and not any(name in layer.__dict__ for name in methods)
        and type(layer.aggr_module) is SumAggregation
        and not (layer._message_forward_pre_hooks or layer._message_forward_hooks)
        and not (layer._aggregate_forward_pre_hooks or layer._aggregate_forward_hooks)
        and not (layer._edge_update_forward_pre_hooks or layer._edge_update_forward_hooks)
        and layer.__dict__.get("_edge_type") is None
    )


def _dropout(layer: Any) -> dict[str, Any]:
    """Probability, and a seed from PyTorch's random state where it is drawn."""
    p = float(layer.dropout) if layer.training else 0.0
    if p == 0.0:
        return {}
    return {"p": p, "seed": int(torch.randint(2**62, ()))}


def _edge_term(layer: Any, edge_attr: Any) -> dict[str, Any] | None:
    """Edge features and their weights, ``[D, heads, channels]``; ``None``: not the plain way."""
    if edge_attr is None:
        return {}
    linear = layer.lin_edge
    plain = type(linear) in (Linear, torch.nn.Linear) and linear.bias is None
    if not plain or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    if not isinstance(edge_attr, Tensor) or edge_attr.dim() > 2:
        return None
    weight = linear.weight.t().unflatten(1, (layer.heads, layer.out_channels))
    columns = edge_attr.unsqueeze(-1) if edge_attr.dim() == 1 else edge_attr
    return {"edge_attr": columns, "edge_weight": weight}


def _gat(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    value, alpha = kwargs["x"][0], kwargs["alpha"]
    if not isinstance(alpha, DeferredEdge):
        return None
    key, query = alpha.kwargs["alpha"]
    given = alpha.kwargs.get("edge_attr")
    edges = _edge_term(layer, given if layer.lin_edge is not None else None)
    if edges is None:
        return None
    if edges:
        edges["edge_weight"] = (edges["edge_weight"] * layer.att_edge).sum(-1)
    slope = layer.negative_slope
    value, key, query = terms_together(value, key, query, layer.att_src, layer.att_dst)
    return Attention(
        kind="additive", value=value, key=key, query=query, slope=slope, **edges, **_dropout(layer)
    )


def _gatv2(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    value, alpha = kwargs["x"][0], kwargs["alpha"]
    if not isinstance(alpha, DeferredEdge):
        return None
    key, query = alpha.kwargs["x"]
    edges = _edge_term(layer, alpha.kwargs.get("edge_attr"))
    if edges is None or key is not value:
        return None
    return Attention(
        kind="gatv2",
        value=value,
        query=query,
        att=layer.att[0],
        slope=layer.negative_slope,
        **edges,
        **_dropout(layer),
    )


def _transformer(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    edge_attr = kwargs.get("edge_attr")
    if (edge_attr is None) != (layer.lin_edge is None):
        return None
    edges = _edge_term(layer, edge_attr)
    if edges is None:
        return None
    return Attention(
        kind="dot",
        value=kwargs["value"],
        key=kwargs["key"],
        query=kwargs["query"],
        scale=1 / math.sqrt(layer.out_channels),
        **edges,
        **_dropout(layer),
    )


def _agnn(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    x, normalized = kwargs["x"], kwargs["x_norm"]
    if x.dim() != 2:
        return None
    return Attention(
        kind="dot",
        value=x.unsqueeze(1),
        key=normalized.unsqueeze(1),
        query=(layer.beta * normalized).unsqueeze(1),
    )


_LAYERS = {GATConv: _gat, GATv2Conv: _gatv2, TransformerConv: _transformer, AGNNConv: _agnn}
