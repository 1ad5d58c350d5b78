"""One process, compiled: layers by kernel under ``torch.compile``, ``torch.export`` and
``torch.jit.script``.

[Note: compiled layers] A compiled graph has no place for the engine, which keeps structures, looks
at values and runs layers block by block. On a plain ``edge_index`` it isn't needed: the functions
below take its place, all of them TorchScript, with edges sorted inside of the graph. They run for
any number of edges, so that no shape is specialised on. Layers that are not in ``PROPAGATE`` and
``FORWARD`` are compiled as PyG's own.

[Note: loops] PyG selects the edges that are no self-loops before it adds one per node, and a graph
whose shapes depend on values can't be compiled in one piece. Here such edges stay, and add to one
row more than there are targets, which is cut off.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # which PyG imports, too
from torch import Tensor
from torch_geometric.nn import (
    AGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MessagePassing,
    SAGEConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.typing import Adj
from torch_geometric.utils import scatter
from torch_geometric.utils.loop import compute_loop_attr

from pyg_sar.functional import attention, gather_sum, sorted_edges
from pyg_sar.message.layer_facts import pristine
from pyg_sar.space.index_space import DistEdgeIndex, DistIndex

# Edges ########################################################################


def with_loops(edge_index: Tensor, num_loops: int, num_targets: int) -> Tensor:
    """The edges with a loop at each of the first nodes; loops among them go to one row more.

    Args:
        edge_index: ``[2, E]``.
        num_loops: Nodes that get a loop.
        num_targets: Target rows, N.

    Returns:
        ``[2, E + num_loops]``, with targets up to N. See [Note: loops].
    """
    source, target = edge_index[0], edge_index[1]
    spare = torch.full_like(target, num_targets)
    # What was out of range stays so: sorting raises for it.
    target = torch.where(source == target, spare, target + (target >= num_targets).long())
    loops = torch.arange(num_loops, device=edge_index.device)
    return torch.stack([torch.cat([source, loops]), torch.cat([target, loops])])


def drop_keys(edge_index: Tensor, p: float) -> Tensor | None:
    """Random numbers, ``[E]``, that dropout knows edges by in a call; ``None`` where p is 0."""
    if p == 0.0:
        return None
    size = [edge_index.size(1)]
    return torch.randint(2147483647, size, dtype=torch.int32, device=edge_index.device)


def with_row(rows: Tensor) -> Tensor:
    """Rows, and a row of zeros."""
    return torch.cat([rows, torch.zeros_like(rows[:1])])


def reduced(
    x: Tensor, edge_index: Tensor, num_targets: int, weight: Tensor | None, mean: bool
) -> Tensor:
    """Sums or means of source rows, times weights, by kernel; ``[N, F]``."""
    source, offsets, edges = sorted_edges(edge_index, x.size(0), num_targets)
    ordered = None if weight is None else weight.view(-1)[edges]
    out = gather_sum(x, source, offsets, ordered)
    if mean:
        counts = (offsets[1:] - offsets[:-1]).clamp(min=1)
        out = out / counts.to(out.dtype).unsqueeze(-1)
    return out


def targets_among(x: tuple[Tensor, Tensor | None], size: tuple[int, int] | None) -> int:
    """The number of target rows of a layer's call."""
    targets = x[1]
    if targets is not None:
        return targets.size(0)
    return x[0].size(0) if size is None else size[1]


def plain_edges(edge_index: Adj) -> Tensor:
    """The edges ``[2, E]``.

    Raises:
        TypeError: They are a sparse matrix.
    """
    if not isinstance(edge_index, Tensor):
        raise TypeError("edge_index: compiled layers take a tensor [2, E], and no SparseTensor")
    return edge_index


class Layer:
    """A layer of PyG, to the functions below that read its attributes as their ``self``."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Any attribute that PyG's layer has."""


# Layers by their propagate() ##################################################


class PairSum(Layer):
    """``propagate`` of SAGEConv and GINConv."""

    def propagate(
        self,
        edge_index: Adj,
        x: tuple[Tensor, Tensor | None],
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        return reduced(
            x[0], plain_edges(edge_index), targets_among(x, size), None, self.aggr == "mean"
        )


class WeightedPairSum(Layer):
    """``propagate`` of GraphConv."""

    def propagate(
        self,
        edge_index: Adj,
        x: tuple[Tensor, Tensor | None],
        edge_weight: Tensor | None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        return reduced(
            x[0], plain_edges(edge_index), targets_among(x, size), edge_weight, self.aggr == "mean"
        )


class WeightedSum(Layer):
    """``propagate`` of TAGConv and LGConv."""

    def propagate(
        self,
        edge_index: Adj,
        x: Tensor,
        edge_weight: Tensor | None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        count = x.size(0) if size is None else size[1]
        return reduced(x, plain_edges(edge_index), count, edge_weight, self.aggr == "mean")


class DotProducts(Layer):
    """``propagate`` of TransformerConv."""

    def propagate(
        self,
        edge_index: Adj,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edge_attr: Tensor | None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        ends = plain_edges(edge_index)
        source, offsets, edges = sorted_edges(ends, value.size(0), query.size(0))
        weight: Tensor | None = None
        if edge_attr is not None:
            if self.lin_edge is None:
                raise ValueError("edge_attr needs edge_dim: pass it to TransformerConv()")
            weight = self.lin_edge.weight.t().unflatten(1, (self.heads, self.out_channels))
        p = self.dropout if self.training else 0.0
        return attention(
            "dot",
            value,
            key,
            query,
            source,
            offsets,
            edges,
            edge_attr=edge_attr,
            edge_weight=weight,
            scale=1 / math.sqrt(self.out_channels),
            drop_key=drop_keys(ends, p),
            p=p,
        )


# Layers by their forward() ####################################################


class GCN(Layer):
    """``forward`` of GCNConv."""

    def forward(self, x: Tensor, edge_index: Adj, edge_weight: Tensor | None = None) -> Tensor:
        ends, count = plain_edges(edge_index), x.size(0)
        rows = count
        if self.normalize:
            weight = torch.ones(ends.size(1), dtype=x.dtype, device=x.device)
            weight = weight if edge_weight is None else edge_weight.view(-1)
            if self.add_self_loops:
                source = ends[0]
                looped = torch.where(source == ends[1], source, torch.full_like(source, count))
                loops = torch.ones(count + 1, dtype=weight.dtype, device=weight.device)
                loops = loops.index_put([looped], weight)[:count]
                ends = with_loops(ends, count, count)
                weight, rows = torch.cat([weight, loops]), count + 1
            degree = scatter(weight, ends[1], 0, rows, "sum").pow(-0.5)
            degree = degree.masked_fill(degree == float("inf"), 0.0)
            edge_weight = degree[ends[0]] * weight * degree[ends[1]]
        out = reduced(self.lin(x), ends, rows, edge_weight, False)[:count]
        return out if self.bias is None else out + self.bias


class AGNN(Layer):
    """``forward`` of AGNNConv."""

    def forward(self, x: Tensor, edge_index: Adj) -> Tensor:
        ends, count = plain_edges(edge_index), x.size(0)
        key = torch.nn.functional.normalize(x, p=2.0, dim=-1).unsqueeze(1)
        query = self.beta * key
        if self.add_self_loops:
            ends, query = with_loops(ends, count, count), with_row(query)
        source, offsets, edges = sorted_edges(ends, count, query.size(0))
        return attention("dot", x.unsqueeze(1), key, query, source, offsets, edges)[:count].flatten(
            1
        )


class GAT(Layer):
    """``forward`` of GATConv."""

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        ends = plain_edges(edge_index)
        res: Tensor | None = None
        target: Tensor | None = None
        if isinstance(x, Tensor):
            given = x
            other: Tensor | None = x
        else:
            given, other = x[0], x[1]
        if other is not None and self.res is not None:
            res = self.res(other)
        if self.lin is not None:
            value = self.lin(given).view(-1, self.heads, self.out_channels)
            if isinstance(x, Tensor):
                target = value
            elif other is not None:
                target = self.lin(other).view(-1, self.heads, self.out_channels)
        else:
            assert self.lin_src is not None and self.lin_dst is not None
            value = self.lin_src(given).view(-1, self.heads, self.out_channels)
            if other is not None:
                target = self.lin_dst(other).view(-1, self.heads, self.out_channels)
        count = targets_among((value, target), size)
        key = (value * self.att_src).sum(-1)
        query = torch.zeros([count, self.heads], dtype=key.dtype, device=key.device)
        if target is not None:
            query = (target * self.att_dst).sum(-1)
        if edge_attr is not None and edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)
        if self.add_self_loops:
            loops = min(value.size(0), count) if size is None else min(size[0], size[1])
            edges_before = ends.size(1)
            ends, query = with_loops(ends, loops, count), with_row(query)
            if edge_attr is not None:
                before = ends[:, :edges_before]
                fill = compute_loop_attr(before, edge_attr, count + 1, False, self.fill_value)
                edge_attr = torch.cat([edge_attr, fill[:loops]])
        weight: Tensor | None = None
        if self.lin_edge is None:
            edge_attr = None
        elif edge_attr is not None:
            weight = self.lin_edge.weight.t().unflatten(1, (self.heads, self.out_channels))
            weight = (weight * self.att_edge).sum(-1)
        source, offsets, edges = sorted_edges(ends, value.size(0), query.size(0))
        p = self.dropout if self.training else 0.0
        out = attention(
            "additive",
            value,
            key,
            query,
            source,
            offsets,
            edges,
            edge_attr=edge_attr,
            edge_weight=weight,
            slope=self.negative_slope,
            drop_key=drop_keys(ends, p),
            p=p,
        )[:count]
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        out = out if res is None else out + res
        return out if self.bias is None else out + self.bias


class GATv2(Layer):
    """``forward`` of GATv2Conv."""

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Adj,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        ends = plain_edges(edge_index)
        if isinstance(x, Tensor):
            given, other = x, x
        else:
            given, other = x[0], x[1]
        value = self.lin_l(given).view(-1, self.heads, self.out_channels)
        query = value
        if not isinstance(x, Tensor) or not self.share_weights:
            query = self.lin_r(other).view(-1, self.heads, self.out_channels)
        count = query.size(0)
        if edge_attr is not None and edge_attr.dim() == 1:
            edge_attr = edge_attr.view(-1, 1)
        if self.add_self_loops:
            loops = min(value.size(0), count)
            edges_before = ends.size(1)
            ends, query = with_loops(ends, loops, count), with_row(query)
            if edge_attr is not None:
                before = ends[:, :edges_before]
                fill = compute_loop_attr(before, edge_attr, count + 1, False, self.fill_value)
                edge_attr = torch.cat([edge_attr, fill[:loops]])
        weight: Tensor | None = None
        if edge_attr is not None:
            if self.lin_edge is None:
                raise ValueError("edge_attr needs edge_dim: pass it to GATv2Conv()")
            weight = self.lin_edge.weight.t().unflatten(1, (self.heads, self.out_channels))
        source, offsets, edges = sorted_edges(ends, value.size(0), query.size(0))
        p = self.dropout if self.training else 0.0
        out = attention(
            "gatv2",
            value,
            None,
            query,
            source,
            offsets,
            edges,
            att=self.att[0],
            edge_attr=edge_attr,
            edge_weight=weight,
            slope=self.negative_slope,
            drop_key=drop_keys(ends, p),
            p=p,
        )[:count]
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None:
            out = out + self.res(other)
        return out if self.bias is None else out + self.bias


# Several workers ##############################################################


def between_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ``torch.compile`` leaves as it is, between two graphs, and doesn't look into.

    Whatever talks to other workers is one: how often depends on the graph's parts, not on shapes.
    """
    why = "pyg_sar talks to other workers here, between two compiled graphs"
    found: Callable[..., Any] = torch.compiler.disable(function, reason=why)
    return found


def keep_out_of_graphs() -> None:
    """Tells ``torch.compile`` to hand distributed indices on, and not to take them apart."""
    torch._dynamo.config.nontraceable_tensor_subclasses.update({DistEdgeIndex, DistIndex})


# Which layers #################################################################

PROPAGATE: dict[type, Callable[..., Any]] = {
    SAGEConv: PairSum.propagate,
    GINConv: PairSum.propagate,
    GraphConv: WeightedPairSum.propagate,
    TAGConv: WeightedSum.propagate,
    LGConv: WeightedSum.propagate,
    TransformerConv: DotProducts.propagate,
}
FORWARD: dict[type, Callable[..., Any]] = {
    GCNConv: GCN.forward,
    GATConv: GAT.forward,
    GATv2Conv: GATv2.forward,
    AGNNConv: AGNN.forward,
}


def takes_layer(layer: MessagePassing) -> bool:
    """Tells whether a layer, not converted yet, is compiled by the functions of this module."""
    kind = type(layer)
    plain = layer.aggr in ("add", "sum", "mean") and layer.flow == "source_to_target"
    plain &= layer.node_dim in (0, -2) and not (getattr(layer, "cached", False))
    plain &= not getattr(layer, "improved", False) and layer.decomposed_layers == 1
    methods = "propagate", "edge_updater", "message", "aggregate", "forward"
    return plain and (kind in PROPAGATE or kind in FORWARD) and pristine(layer, *methods)


class Compiled:
    """A method of a converted layer that TorchScript reads from another function.

    TorchScript asks the class for a method, Python an instance: this gives the class ``function``,
    and instances the method of the classes below.

    Args:
        name: The method.
        function: What TorchScript compiles.
    """

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._function
        return getattr(super(self._owner, instance), self._name)


def own_forward(kind: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of a converted layer: PyG's, and compiled ``function``.

    TorchScript takes the source of a function that another one wraps.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and is_plain(args, kwargs, kind in (GATConv, GATv2Conv)):
            return function(self, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    forward.__wrapped__ = function  # type: ignore[attr-defined]
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


def without_overloads(forward: Any) -> Any:
    """A copy of a function of which no overloads are known: TorchScript calls no others alone."""
    copy = FunctionType(
        forward.__code__,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__annotations__, copy.__kwdefaults__ = forward.__annotations__, forward.__kwdefaults__
    copy.__module__ = __name__  # Overloads are known by the module and the name.
    return copy


def is_plain(args: tuple[Any, ...], kwargs: dict[str, Any], pairs: bool) -> bool:
    """Tells whether a call has plain edges and node rows, and asks for the output alone."""
    edges: Any = args[1] if len(args) > 1 else kwargs.get("edge_index")
    x = args[0] if args else kwargs.get("x")
    rows = x if isinstance(x, tuple | list) else (x,)
    return (
        type(edges) in (Tensor, torch.nn.Parameter)
        and edges.layout == torch.strided
        and all(row is None or row.dim() == 2 for row in rows)
        and (len(rows) == 1 or pairs)
        and len(args) < 5
        and kwargs.get("return_attention_weights") is None
    )


def methods_of(kind: type, by_kernel: bool) -> dict[str, Any]:
    """The attributes of a converted layer's class that compilers ask for.

    Args:
        kind: PyG's class.
        by_kernel: Whether its layers are compiled by the functions of this module.
    """
    # TorchScript reads attributes' types here, and knows none of those of DistMessagePassing.
    types = (vars(base).get("__annotations__") for base in kind.__mro__)
    found: dict[str, Any] = {"__annotations__": next(t for t in types if t is not None)}
    found["compiled_propagate"] = None
    if by_kernel and kind in FORWARD:
        found["forward"] = own_forward(kind, FORWARD[kind])
    elif torch._jit_internal._get_overloaded_methods(kind.forward, kind) is not None:  # type: ignore
        found["forward"] = without_overloads(kind.forward)  # type: ignore
    function = PROPAGATE.get(kind) if by_kernel else None
    if function is not None:
        found["compiled_propagate"] = staticmethod(function)
    for name in ("propagate", "edge_updater"):
        below = function if name == "propagate" and function is not None else getattr(kind, name)
        found[name] = Compiled(name, below)
    return found
