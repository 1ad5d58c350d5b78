r"""Linear maps that a layer applies to sums of rows, applied to the source rows where that is less.

[Note: transform first] A sum, or a mean, commutes with a linear map:

.. math::
    W \sum_{j \in \mathcal{N}(i)} w_{ij} \mathbf{x}_j
    = \sum_{j \in \mathcal{N}(i)} w_{ij} \, (W \mathbf{x}_j).

``SAGEConv(256, 40)`` sums rows of 256 numbers, then maps them to 40. Mapped first, 40 are sent,
summed and kept. The two sides differ by rounding alone. A layer is recognized by its class and
options where its methods are PyG's own and nothing watches the rows in between; biases are added
after the sum, as PyG does. docs/how_it_works.md lists PyG's layers.

[Note: what travels] With rows of :math:`F` numbers, mapped to :math:`F'`, each of :math:`H` halo
rows carries :math:`F` numbers in the forward pass and, if the rows take a gradient, :math:`F` in
the backward pass; mapped first :math:`F'` and, if the rows or the weight take one, :math:`F'`. The
map goes first where that sum is less. So constant features need :math:`2 F' < F` in training. A
square map goes first as well where the rows take a gradient: nothing less is sent, but the weight's
gradient then takes the rows, which are kept anyway, in place of their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.typing
from torch import Tensor
from torch.nn.modules import module as all_modules
from torch_geometric.nn import (
    MLP,
    ChebConv,
    ClusterGCNConv,
    GINConv,
    GraphConv,
    Linear,
    MeanAggregation,
    MessagePassing,
    RGCNConv,
    SAGEConv,
    SGConv,
    SignedConv,
    SSGConv,
    SumAggregation,
    TAGConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_sar.message.layer_facts import facts_of, is_plain_module, pristine, standing_in

_LINEAR = (Linear, torch.nn.Linear)
_METHODS = ("forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate")

Methods = list[tuple[torch.nn.Module, str, Callable[..., Any]]]
"""Modules, names of their methods, and what stands in for these."""


@contextmanager
def transforming_first(layer: Any) -> Iterator[None]:
    """Lets a call of the layer map source rows before it sums them, where that is less.

    See [Note: transform first]. ``facts_of(layer).transforms_first`` then says if the call did so.

    Args:
        layer: A :class:`~pyg_sar.nn.DistMessagePassing`, called on a distributed ``edge_index``.
    """
    facts_of(layer).transforms_first = False
    own: Any = type(layer)
    kind = known_base(own)
    maps = kind and layer.policy.transform_first and pristine(layer, *_METHODS, of=kind)
    maps = maps and _is_unwatched(layer)
    with standing_in(*_WAYS[kind](layer)) if kind and maps else nullcontext():
        yield


@cache
def known_base(own: Any) -> type[MessagePassing] | None:
    """Returns the class of those known here that ``own`` is derived from."""
    return next((kind for kind in _WAYS if issubclass(own, kind)), None)


def _is_unwatched(layer: Any) -> bool:
    """Says if a layer computes what its class does, by sums that nothing watches."""
    if layer.explain or layer.decomposed_layers > 1 or all_modules._has_any_global_hook():
        return False
    plain = is_plain_module(layer.aggr_module, SumAggregation, MeanAggregation)
    return plain and pristine(layer, "propagate")


def _is_less(layer: Any, rows: Any, weight: Tensor, wide: int, narrow: int) -> bool:
    """Says if mapped rows take fewer numbers on the wire. See [Note: what travels].

    Marks the layer if so.
    """
    if not isinstance(rows, Tensor) or rows.layout != torch.strided or rows.dtype != weight.dtype:
        return False
    if rows.dim() < 2 or rows.size(-1) != wide or torch.is_autocast_enabled(rows.device.type):
        return False
    learns = torch.is_grad_enabled()
    returns = learns and rows.requires_grad
    before = wide * (1 + returns)
    after = narrow * (1 + (returns or (learns and weight.requires_grad)))
    # Square maps too: the weight's gradient then takes the rows, and their sums are not kept.
    less = after < before or (wide == narrow and returns)
    if less:
        facts_of(layer).transforms_first = True
    return less


@dataclass(slots=True)
class _Ahead:
    """A linear map whose product is taken before a sum, and whose bias is added after it.

    Attributes:
        layer: The layer.
        linear: Its linear map, whose ``forward`` :meth:`rest` stands in for.
        done: The product was taken.
    """

    layer: Any
    linear: Any
    done: bool = False

    def rows(self, x: Any) -> Any:
        """Returns ``x`` times the weight where that is less, else ``x``; of a pair, its sources."""
        first = x[0] if isinstance(x, tuple) else x
        weight = self.linear.weight
        if not _is_less(self.layer, first, weight, weight.size(1), weight.size(0)):
            return x
        self.done = True
        mapped = F.linear(first, weight)
        return (mapped, *x[1:]) if isinstance(x, tuple) else mapped

    def rest(self, out: Tensor) -> Tensor:
        """Returns the linear map of ``out``, of which only the bias may be left to add."""
        if not self.done:
            mapped: Tensor = type(self.linear).forward(self.linear, out)
            return mapped
        self.done = False  # A module that is called twice maps the second time.
        # The sums are nobody else's, and no gradient reads them.
        return out if self.linear.bias is None else out.add_(self.linear.bias)


@dataclass(slots=True, frozen=True)
class _Product:
    """The product of a layer's own rows, which ``out + product`` adds to ``out`` in place.

    ``out`` is what :class:`_Ahead` gave: a sum, or a product of one, that the layer alone holds.

    [Note: own rows of waiting parts] Where parts wait in a store, rows that are read, or gradients
    that are made, before a wait and after it go to the file and come back. There the product is
    taken with that of the sources, before the sums. Its backward pass then comes after theirs: of
    what autograd may do next it does first what was recorded last.

    Attributes:
        linear: The map, without a bias.
        taken: Of parts, the rows, and their product if it was taken before the sums; or nothing.
        rows: ``[N, F]``.
    """

    linear: Any
    taken: list[Any]
    rows: Tensor

    def __radd__(self, out: Tensor) -> Tensor:
        rows, weight = self.rows, self.linear.weight
        if self.taken and self.taken[0] is rows:  # The same bits with a store and without.
            early = self.taken.pop()
            self.taken.clear()
            return out.add_(F.linear(rows, weight) if early is None else early)
        # Autocast gives ``out`` another dtype.
        dense = rows.layout == torch.strided and rows.dim() == 2
        if dense and rows.dtype == out.dtype == weight.dtype:
            return out.addmm_(rows, weight.t())
        product: Tensor = type(self.linear).forward(self.linear, rows)
        return out + product


# Ways #########################################################################


def _sums(*names: str, own: str | None = None) -> Callable[[Any], Methods]:
    """Returns the way of layers whose calls of ``propagate(x=...)`` are each fed to one map.

    ``own`` names the map of the layer's own rows that is added to it, if there is one.
    """

    def way(layer: Any) -> Methods:
        linears = [getattr(layer, name, None) for name in names]
        plain = all(is_plain_module(one, *_LINEAR) for one in linears)
        if len(set(linears)) < len(names) or not plain:
            return []
        maps = [_Ahead(layer, linear) for linear in linears]
        turns, propagate = iter(maps), layer.propagate
        ahead: Methods = [(one.linear, "forward", one.rest) for one in maps]
        root: Any = None if own is None else getattr(layer, own, None)
        adds = root not in linears and is_plain_module(root, *_LINEAR) and root.bias is None
        taken: list[Any] = []
        if adds:
            ahead.append((root, "forward", partial(_Product, root, taken)))

        def mapped(edge_index: Any, *args: Any, x: Any, **kwargs: Any) -> Any:
            sources, host = next(turns), edge_index.plan.comm.host
            rows = sources.rows(x)
            # See [Note: own rows of waiting parts].
            if adds and sources.done and host is not None:
                targets = x[1] if isinstance(x, tuple) else x
                if isinstance(targets, Tensor) and targets.layout == torch.strided:
                    early = host.store is not None
                    taken[:] = targets, F.linear(targets, root.weight) if early else None
            return propagate(edge_index, *args, x=rows, **kwargs)

        return [(layer, "propagate", mapped), *ahead]

    return way


def _signed(layer: Any) -> Methods:
    return _sums("lin_pos_l", "lin_neg_l")(layer) if layer.first_aggr else []


def _inputs(find: Callable[[Any], Any]) -> Callable[[Any], Methods]:
    """Returns the way of layers that are linear in ``x``, up to the map ``find(layer)``."""

    def way(layer: Any) -> Methods:
        linear = find(layer)
        if not is_plain_module(linear, *_LINEAR) or layer.__dict__.get("cached", False):
            return []  # A cache keeps sums of rows that are not mapped.
        ahead, forward = _Ahead(layer, linear), layer.forward

        def mapped(x: Any, *args: Any, **kwargs: Any) -> Any:
            sources = x[0] if isinstance(x, tuple) else x
            rows = ahead.rows(sources)
            if ahead.done and isinstance(x, tuple):
                target = x[1] if x[1] is None else F.linear(x[1], linear.weight)
                return forward((rows, rows if x[1] is sources else target), *args, **kwargs)
            return forward(rows if ahead.done else x, *args, **kwargs)

        return [(layer, "forward", mapped), (linear, "forward", ahead.rest)]

    return way


def _first_linear(layer: Any) -> Any:
    """Returns the linear map that a GINConv's network begins with, if it does."""
    network = layer.nn
    if is_plain_module(network, *_LINEAR):
        return network
    if not is_plain_module(network, MLP, torch.nn.Sequential):
        return None
    return next(iter(network.lins if isinstance(network, MLP) else network), None)


def _polynomial(compute: Callable[..., Tensor]) -> Callable[[Any], Methods]:
    """Returns the way of layers that are polynomials of their edges' matrix, with a map per power.

    ``compute(layer, mapped, x, ...)`` takes the rows ``mapped`` of all powers.
    """

    def way(layer: Any) -> Methods:
        linears, forward = list(layer.lins), layer.forward
        plain = all(is_plain_module(one, *_LINEAR) and one.bias is None for one in linears)
        if len(linears) < 2 or not plain:
            return []

        def mapped(x: Any, *args: Any, **kwargs: Any) -> Any:
            weight = linears[0].weight
            if not _is_less(layer, x, weight, weight.size(1), weight.size(0)):
                return forward(x, *args, **kwargs)
            out = compute(layer, [lin(x) for lin in linears], x, *args, **kwargs)
            return out if layer.bias is None else out + layer.bias

        return [(layer, "forward", mapped)]

    return way


def _horner(
    layer: Any, mapped: list[Tensor], x: Tensor, edge_index: Any, edge_weight: Any = None
) -> Tensor:
    r"""Returns :math:`\sum_k A^k X W_k` by Horner's rule, :math:`X W_0 + A (X W_1 + \ldots)`."""
    if layer.normalize:
        edge_index, edge_weight = gcn_norm(
            edge_index, edge_weight, x.size(layer.node_dim), False, False, layer.flow, x.dtype
        )
    out = mapped[-1]
    for rows in reversed(mapped[:-1]):
        out = rows + layer.propagate(edge_index, x=out, edge_weight=edge_weight)
    return out


def _clenshaw(
    layer: Any,
    mapped: list[Tensor],
    x: Tensor,
    edge_index: Any,
    edge_weight: Any = None,
    batch: Any = None,
    lambda_max: Any = None,
) -> Tensor:
    r"""Returns :math:`\sum_k T_k(L) X W_k` by Clenshaw's recurrence.

    .. math::
        B_k = X W_k + 2 L B_{k+1} - B_{k+2}, \qquad \sum_k T_k(L) X W_k = X W_0 + L B_1 - B_2.
    """
    edges, norm = layer.__norm__(
        edge_index,
        x.size(layer.node_dim),
        edge_weight,
        layer.normalization,
        lambda_max,
        dtype=x.dtype,
        batch=batch,
    )
    last: Any = 0.0
    now = mapped[-1]
    for rows in reversed(mapped[1:-1]):
        now, last = rows + 2.0 * layer.propagate(edges, x=now, norm=norm) - last, now
    return mapped[0] + layer.propagate(edges, x=now, norm=norm) - last


def _relations(layer: Any) -> Methods:
    """Returns the way of RGCNConv: a sum per relation, each mapped by a weight of its own."""
    forward = layer.forward
    if torch_geometric.typing.WITH_SEGMM and layer.num_bases is None and layer.num_blocks is None:
        return []  # PyG may then map each edge's row, and its means are over all relations.

    def mapped(x: Any, edge_index: Any, edge_type: Any = None) -> Any:
        source, target = x if isinstance(x, tuple) else (x, x)
        wide, narrow = layer.in_channels_l, layer.out_channels
        rows = isinstance(target, Tensor) and target.is_floating_point() and edge_type is not None
        if not rows or not _is_less(layer, source, layer.weight, wide, narrow):
            return forward(x, edge_index, edge_type)
        out = torch.zeros(target.size(0), narrow, device=target.device)
        size = source.size(0), target.size(0)
        for relation, product in enumerate(_products(layer)):
            edges = edge_index[:, edge_type == relation]
            out = out + layer.propagate(edges, x=product(source), edge_type_ptr=None, size=size)
        if layer.root is not None:
            out = out + target @ layer.root
        return out if layer.bias is None else out + layer.bias

    return [(layer, "forward", mapped)]


def _products(layer: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Returns the linear maps of an RGCNConv's relations."""
    weight = layer.weight
    if layer.num_blocks is not None:

        def blockwise(blocks: Tensor, x: Tensor) -> Tensor:
            parts = x.unflatten(1, (blocks.size(0), blocks.size(1)))
            return torch.einsum("nbi,bio->nbo", parts, blocks).flatten(1)

        for blocks in weight:
            yield partial(blockwise, blocks)
        return
    if layer.num_bases is not None:
        weight = torch.einsum("rb,bio->rio", layer.comp, weight)
    for matrix in weight:
        yield partial(torch.matmul, other=matrix)


_WAYS: dict[type[MessagePassing], Callable[[Any], Methods]] = {
    SAGEConv: _sums("lin_l", own="lin_r"),
    GraphConv: _sums("lin_rel", own="lin_root"),
    ClusterGCNConv: _sums("lin_out", own="lin_root"),
    SignedConv: _signed,
    SGConv: _inputs(lambda layer: layer.lin),
    SSGConv: _inputs(lambda layer: layer.lin),
    GINConv: _inputs(_first_linear),
    TAGConv: _polynomial(_horner),
    ChebConv: _polynomial(_clenshaw),
    RGCNConv: _relations,
}
