r"""Layers that are softmax attention as the kernels know it, and the terms of their scores.

A layer is recognized by its class and options, where its ``message``, ``edge_update`` and
``aggregate`` are PyG's own and no hook watches them; any other layer goes the general way.

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

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    AGNNConv,
    FAConv,
    GATConv,
    GATv2Conv,
    HGTConv,
    Linear,
    MessagePassing,
    RGATConv,
    SumAggregation,
    SuperGATConv,
    TransformerConv,
)
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.utils import scatter

from pyg_sar.engine.kernels.relational import RelationalTerms
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.kernels.ops import made_for
from pyg_sar.message.layer_facts import facts_of, is_plain_module, pristine
from pyg_sar.message.message_checks import maximum
from pyg_sar.message.program import DeferredEdge
from pyg_sar.nn.propagation import charged
from pyg_sar.space.index_space import DistEdgeIndex


def attention_of(
    layer: MessagePassing, edge_index: DistEdgeIndex, kwargs: Mapping[str, Any]
) -> Attention | RelationalTerms | None:
    """The attention that a call of ``propagate`` computes, or ``None`` where it isn't one.

    All workers call it together.

    Args:
        layer: The layer.
        edge_index: The edges of ``propagate``.
        kwargs: Its keyword arguments.

    Returns:
        The attention, with this worker's rows as keys and values; its output is ``[N, H, C]``.
    """
    own: Any = type(layer)
    kind = known_attention(own)
    if kind is None or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return None
    methods = ("message", "edge_update", "aggregate", *_METHODS.get(kind, ()))
    plain = pristine(layer, *methods, of=kind) and layer.__dict__.get("_edge_type") is None
    if not plain or not is_plain_module(layer.aggr_module, SumAggregation):
        return None
    found: Attention | RelationalTerms | None = _LAYERS[kind](layer, kwargs)
    if isinstance(found, Attention) and isinstance(layer, HGTConv):
        with charged(edge_index, layer.ledger_name):
            found = _by_relation(found, edge_index, kwargs["edge_attr"])
    if found is None:
        return None
    first, *others = found.tensors().values()
    alike = all(t.dtype == first.dtype and t.device == first.device for t in others)
    if not alike or not made_for(first):
        return None
    bias = facts_of(layer).bias
    if isinstance(found, Attention) and bias is not None and bias.dtype == first.dtype:
        found = replace(found, bias=bias)
    return found


@cache
def known_attention(own: Any) -> Any:
    """Returns the class of PyG's attention layers that a class is, or derives from, if any."""
    return next((kind for kind in _LAYERS if issubclass(own, kind)), None)


@contextmanager
def adding_bias(layer: Any) -> Iterator[None]:
    """Lets kernels add a layer's bias to their output, which their backward pass reads.

    PyG's code would make another tensor of it, and both would be kept.
    """
    facts = facts_of(layer)
    plain = layer.concat and getattr(layer, "res", None) is None and not facts.bias_apart
    plain &= not layer.explain and pristine(layer, "propagate", *_BEFORE_BIAS)
    if not plain or not isinstance(layer._parameters.get("bias"), Tensor):
        yield
        return
    propagate = layer.propagate

    def added(*args: Any, **kwargs: Any) -> Tensor:
        facts.bias = bias = layer._parameters["bias"].view(layer.heads, layer.out_channels)
        out: Tensor = propagate(*args, **kwargs)
        taken, facts.bias = facts.bias is None, None
        return out if taken else out + bias

    attributes = layer.__dict__
    attributes["propagate"], attributes["bias"] = added, None
    try:
        yield
    finally:
        del attributes["propagate"], attributes["bias"]
        facts.bias = None


def as_read(
    layer: MessagePassing, edge_index: DistEdgeIndex, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of ``edge_updater`` that a layer reads: GATConv, no features of no edges.

    All workers call it together.
    """
    is_gat = isinstance(layer, GATConv) and pristine(layer, "edge_update", of=GATConv)
    if not is_gat or kwargs.get("edge_attr") is None:
        return kwargs
    most = partial(maximum, edge_index.plan.comm, [edge_index.size(1)], edge_index.device)
    there = edge_index.remember_together("most edges", most) != [0]
    return kwargs if there else kwargs | {"edge_attr": None}


_BEFORE_BIAS = "forward", "message", "edge_update", "aggregate", "update"


@cache
def adds_bias(own: Any) -> bool:
    """Says if layers of a class add a bias to what they aggregate, and read it nowhere else."""
    kinds = [kind for kind in (GATConv, GATv2Conv) if issubclass(own, kind)]
    alike = [getattr(own, name) is getattr(k, name) for k in kinds for name in _BEFORE_BIAS]
    return bool(alike) and all(alike)


def as_aggregated(layer: MessagePassing, out: Tensor) -> Tensor:
    """The attention's output ``[N, H, C]`` in the shape of the layer's aggregated messages."""
    return out.flatten(1) if isinstance(layer, AGNNConv | FAConv | GATEConv | HGTConv) else out


def _dropout(layer: Any) -> dict[str, Any]:
    """Probability, and a seed from PyTorch's random state where it is drawn."""
    p = float(layer.dropout) if layer.training else 0.0
    return {"p": p, "seed": seed_for(layer, p)}


def seed_for(layer: Any, p: float) -> int:
    """A seed from PyTorch's random state, unless others draw (:class:`EdgeDraws`)."""
    return int(torch.randint(2**62, ())) if p and layer.policy.random is None else 0


def _is_plain_linear(linear: Any) -> bool:
    """Says if a module is a product with its weight alone, which no hook watches."""
    return is_plain_module(linear, Linear, torch.nn.Linear) and linear.bias is None


def _edge_term(layer: Any, edge_attr: Any) -> dict[str, Any] | None:
    """Edge features and their weights, ``[D, heads, channels]``; ``None``: not the plain way."""
    if edge_attr is None:
        return {}
    if not _is_plain_linear(linear := layer.lin_edge):
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


def _supergat(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    x = kwargs["x"]
    shared = {"value": x, "query": x, "slope": layer.negative_slope, **_dropout(layer)}
    if layer.attention_type == "MX":
        return Attention(kind="mixed", att=torch.cat([layer.att_l, layer.att_r]), **shared)
    return Attention(kind="dot", scale=1 / math.sqrt(layer.out_channels), **shared)


def _fa(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    x, weight, (key, query) = kwargs["x"], kwargs["edge_weight"], kwargs["alpha"]
    if x.dim() != 2 or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    return Attention(
        kind="tanh",
        value=x.unsqueeze(1),
        key=key,
        query=query,
        edge_attr=weight.unsqueeze(-1),
        **_dropout(layer),
    )


def _gate(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    x, alpha = kwargs["x"], kwargs["alpha"]
    if not isinstance(alpha, DeferredEdge) or alpha.kwargs["x"] is not x or x.dim() != 2:
        return None
    edge_attr = alpha.kwargs["edge_attr"]
    if not isinstance(edge_attr, Tensor) or edge_attr.dim() != 2:
        return None
    if not all(map(_is_plain_linear, (layer.lin1, layer.lin2))):
        return None
    of_x, of_edges = layer.lin1.weight.split([x.size(1), edge_attr.size(1)], dim=1)
    return Attention(
        kind="nested",
        value=layer.lin2(x).unsqueeze(1),
        key=(x @ of_x.t()).unsqueeze(1),
        query=x @ layer.att_r.t(),
        att=layer.att_l,
        edge_attr=edge_attr,
        edge_weight=of_edges.t().unsqueeze(1),
        slope=0.01,  # that of F.leaky_relu_
        **_dropout(layer),
    )


def _hgt(layer: Any, kwargs: Mapping[str, Any]) -> Attention | None:
    key = kwargs["k"]
    if kwargs["edge_attr"].dim() != 2:
        return None
    scale = 1 / math.sqrt(key.size(-1))
    return Attention(kind="dot", value=kwargs["v"], key=key, query=kwargs["q"], scale=scale)


def _by_relation(
    attention: Attention, edge_index: DistEdgeIndex, factor: Tensor
) -> Attention | None:
    """With a factor of each edge and head, ``[E, H]``, in the keys: ``None`` where it can't be.

    [Note: HGT's keys] ``forward`` of HGTConv makes a row of keys for each relation and source node,
    so that a row's edges are of one relation and have its ``p_rel`` in common. Their mean is that
    factor at the keys' owner, and its gradient, shared among the row's edges, that of the factor.
    """
    key = attention.key
    if key is None or factor.dtype != key.dtype:
        return None
    row, rows = edge_index[edge_index.dist_row], key.size(0)
    wide = torch.float64  # sums of as many equal numbers as a hub has edges

    def count() -> Tensor:
        return scatter(factor.new_ones(row.numel(), 1, dtype=wide), row, 0, rows).clamp(min=1)

    counts = edge_index.remember_together(("edges of keys", rows), count)
    mean = (scatter(factor.to(wide), row, 0, rows) / counts).to(key.dtype)
    # The layer's rows lie apart in memory, head by head.
    value, key = attention.value.contiguous(), (key * mean.unsqueeze(-1)).contiguous()
    return replace(attention, value=value, key=key)


def _rgat(layer: Any, kwargs: Mapping[str, Any]) -> RelationalTerms | None:
    x, edge_type = kwargs["x"], kwargs["edge_type"]
    plain = layer.attention_mode == "additive-self-attention" and layer.mod is None
    plain &= layer.attention_mechanism == "across-relation"
    if not plain or not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        return None
    if not isinstance(edge_type, Tensor) or edge_type.dim() != 1 or edge_type.dtype != torch.long:
        return None
    edges = _edge_term(layer, kwargs["edge_attr"]) if layer.lin_edge is not None else {}
    if edges is None or (layer.lin_edge is None and kwargs["edge_attr"] is not None):
        return None
    if edges:
        edges["edge_weight"] = edges["edge_weight"].flatten(1) @ layer.e
    weight = _relation_weights(layer)
    return RelationalTerms(
        x=x,
        weight=weight,
        key_weight=weight @ layer.k,
        query=x @ (weight @ layer.q),
        edge_type=edge_type,
        slope=layer.negative_slope,
        **edges,
        **_dropout(layer),
    )


def _relation_weights(layer: Any) -> Tensor:
    """RGATConv's transforms of all relations, ``[R, F, H * C]``."""
    if layer.num_bases is not None:
        found: Tensor = torch.tensordot(layer.att, layer.basis, 1)
        return found
    weight: Tensor = layer.weight
    if layer.num_blocks is None:
        return weight
    blocks = torch.eye(layer.num_blocks, dtype=weight.dtype, device=weight.device)
    spread = weight.unsqueeze(3) * blocks.view(1, layer.num_blocks, 1, -1, 1)
    return spread.flatten(3).flatten(1, 2)


_LAYERS = {
    GATConv: _gat,
    GATv2Conv: _gatv2,
    TransformerConv: _transformer,
    AGNNConv: _agnn,
    SuperGATConv: _supergat,
    FAConv: _fa,
    GATEConv: _gate,
    HGTConv: _hgt,
    RGATConv: _rgat,
}

# What else must be PyG's own.
_METHODS = {
    SuperGATConv: ("get_attention",),
    HGTConv: ("forward", "_construct_src_node_feat"),
}

# Additive terms ##############################################################

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
        total, *shares = gradients
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
                add = total.addcmul if torch.is_grad_enabled() else total.addcmul_
                total = add(share.unsqueeze(-1), weight)
            if not wanted:
                found.append(None)
                continue
            heads, channels = value.shape[1:]
            # einsum("nh,nhc->hc") by one product of matrices, of which heads keep their own.
            product = (share.t() @ value.flatten(1)).view(heads, heads, channels)
            found.append(product.diagonal(dim1=0, dim2=1).t().reshape(weight.shape))
        return (total, None, *[None] * len(shares), *found)


def _is_projection(term: Any, value: Tensor, weight: Any) -> bool:
    """Says if autograd knows ``term`` as ``(value * weight).sum(-1)``, unwatched."""
    if not isinstance(term, Tensor) or not isinstance(weight, Tensor):
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
    (left, number), (right, place) = product.next_functions
    if weight.grad_fn is None:
        weighted = getattr(right, "variable", None) is weight
    else:  # On workers a parameter comes through a node that sums its gradients.
        weighted = right is weight.grad_fn and place == weight.output_nr
    return weighted and left is made and number == value.output_nr


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
    if query is None or not _is_projection(query, value, query_weight):
        value, key = _Together.apply(value, 1, key.detach(), key_weight)
        return value, key, query
    return _Together.apply(value, 2, key.detach(), query.detach(), key_weight, query_weight)
