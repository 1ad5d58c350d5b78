"""A layer's message as a program over tiles: which tensors it reads, in which role.

PyG lifts a tensor ``x`` to ``x_j`` (source), ``x_i`` (target) or hands an edge-level tensor over as
it is. The program knows each tensor once per role, gathers its rows for a tile, and runs
``edge_update`` (when its result is only used in ``message``) and ``message`` on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_geometric.nn import MessagePassing

from pyg_sar.message.decompose import Group
from pyg_sar.message.layer_facts import hooked_message
from pyg_sar.message.layer_state import padded_to
from pyg_sar.message.target_index import NeedsAllEdges, Reductions, TargetIndex, make_target_index
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile
from pyg_sar.wording import counted

Role = Literal["source", "target", "edge", "whole", "aggregate"]

STAND_INS = 2  # edges that are put before a tile whose first target has none

_PER_TILE = ("index", "edge_index_i", "ptr", "dim_size", "size_i")
_NEVER_PER_TILE = ("edge_index", "edge_index_j", "adj_t", "size", "size_j")


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in its role: ``[num_local, *]`` (source), ``[num_targets, *]`` (target), ``[E, *]``
    (edge) or any; or ``[num_targets, *]`` of which a tile takes one row per target, not per edge
    (aggregate).

    ``axis`` is where the message wants its edges; here they, and nodes, come first.
    """

    role: Role
    tensor: Tensor
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One method of the layer and where its arguments come from.

    ``arguments`` maps names to an operand's number or, wrapped in a tuple, to a constant.
    """

    method: str
    arguments: dict[str, int | tuple[Any]]


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tile's messages for a group of reductions, and the reductions made on the way."""

    messages: Tensor
    log: Reductions


class DeferredEdge(Tensor):
    """The result of ``edge_updater``, not computed: the next ``propagate`` computes it per tile.

    Any other use computes it there and then, for all edges at once. ``mark``: the state that random
    numbers would have been drawn from (``edge_draws.py``), where that counts.
    """

    kwargs: dict[str, Any]
    value: Tensor | None
    used: bool
    mark: int | None = None
    compute: Callable[[], Tensor]

    def compute_now(self) -> Tensor:
        """Returns the values of all edges ``[E, *]``, by PyG's own path."""
        if self.value is None:
            self.value = self.compute()
        return self.value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(
            DeferredEdge, lambda deferred: deferred.compute_now(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def deferred_edge(
    compute: Callable[[], Tensor], kwargs: dict[str, Any], device: torch.device
) -> DeferredEdge:
    """Returns a placeholder for edge-level values."""
    out = torch.empty(0, device=device).as_subclass(DeferredEdge)
    out.compute, out.kwargs, out.value, out.used = compute, kwargs, None, False
    return out


def check_nodes(value: Tensor | None, axis: int, nodes: int, name: str, rank: int) -> None:
    """Raises ``ValueError`` where a node tensor doesn't have a row for each of these nodes."""
    if value is None:
        return
    dims = value.dim()
    if not -dims <= axis < dims or value.size(axis) != nodes:
        raise ValueError(
            f"Expected '{name}' to hold the {counted(nodes, 'nodes')} of rank {rank} "
            f"on its axis {axis} (got shape {list(value.shape)}): pass a tensor of the graph's "
            "nodes, with a row for each of them (in place of layer((h, h[:k]), edge_index) say "
            "layer((h, h), edge_index)[:k])"
        )


class EdgeProgram:
    """Operands, whose rows are gathered for a tile, and what is computed of these.

    Attributes:
        layer: Whose parameters it reads.
        complete: Tiles hold all in-edges of their targets, and ``aggregate`` is part of it.
    """

    layer: Any
    operands: list[Operand]
    complete = False

    def run(self, tile: Tile, values: Sequence[Any], log: Reductions) -> list[Mapped]:
        """Returns what is computed for a tile, by group of reductions."""
        raise NotImplementedError

    def numbers(self, role: Role) -> list[int]:
        """Operands in a role."""
        return [k for k, operand in enumerate(self.operands) if operand.role == role]

    def row_bytes(self) -> int:
        """Bytes that one edge's inputs take when they are materialized."""
        total = 0
        for operand in self.operands:
            if operand.role != "whole":
                shape = operand.tensor.shape[1:]
                total += shape.numel() * operand.tensor.element_size()
        return total

    def release(self) -> None:
        """Forgets the operands' values: shapes, dtypes and roles are all that backward asks."""
        self.operands = [
            Operand(o.role, o.tensor.detach().new_zeros(()).expand(o.tensor.shape), o.axis)
            for o in self.operands
        ]

    def gather(
        self, tile: Tile, tensors: Sequence[Tensor | None], sources: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the operands' rows for a tile.

        Args:
            tile: The edges.
            tensors: The operands' tensors (``None``: not at hand, and not needed).
            sources: The owner's rows of the source operands, in their order.
        """
        picked: list[Tensor | None] = []
        rows: Tensor | None = None
        remaining = iter(sources)
        for operand, tensor in zip(self.operands, tensors, strict=True):
            if operand.role == "source":
                source = next(remaining)
                picked.append(None if source is None else source.index_select(0, tile.source))
            elif tensor is None or operand.role == "whole":
                picked.append(tensor)
            elif operand.role == "target":
                rows = tile.target_rows if rows is None else rows
                picked.append(tensor.index_select(0, rows))
            elif operand.role == "aggregate":
                picked.append(tensor.index_select(0, tile.targets))
            elif isinstance(tile.columns, slice):
                picked.append(tensor[tile.columns])
            else:
                picked.append(tensor.index_select(0, tile.columns))
        return picked


class TileProgram(EdgeProgram):
    """The computation of one call of ``propagate`` per edge.

    Args:
        layer: The layer.
        edge_index: Distributed edges.
        kwargs: Keyword arguments of ``propagate``.
        is_edge_level: Says of an unsuffixed tensor whether it holds one row per edge.
        groups: How messages are mapped before they are reduced.
        most_edges: The most in-edges of a node of the graph: aggregations that lay a node's
            messages out side by side pad them to as many places.
        complete: Tiles hold all in-edges of their targets, and ``aggregate`` is part of the
            program.
        sizes: What the message gets as ``size_i`` and the like where they are numbers to it, not
            lengths of tensors: the whole graph's.
        method: What is computed per edge: ``message``, or ``edge_update``.

    Raises:
        NeedsAllEdges: When the message asks for what no tile has.
        ValueError: When a node tensor doesn't have one row per node of the worker.
    """

    never_per_tile: tuple[str, ...] = _NEVER_PER_TILE
    only_scalars = True  # and rows of edges and nodes are taken by `aggregate`

    def __init__(
        self,
        layer: MessagePassing,
        edge_index: DistEdgeIndex,
        kwargs: Mapping[str, Any],
        is_edge_level: Mapping[str, bool],
        groups: Sequence[Group],
        complete: bool = False,
        most_edges: int = 0,
        sizes: Mapping[str, int] | None = None,
        method: str = "message",
    ) -> None:
        self.layer, self.method = layer, method
        self.most_edges, self.sizes = most_edges, sizes or {}
        self.groups, self.complete = tuple(groups), complete
        self.message_bytes = 0
        self.sets: list[str] = []  # attributes of the layer that the message sets
        self.out_rows: list[tuple[list[int], torch.dtype]] | None = None
        self.num_local = edge_index.plan.num_local
        self.num_targets = edge_index.num_targets
        self.rank = edge_index.plan.rank
        self.operands: list[Operand] = []
        self.whole: dict[str, int] = {}  # operands that are neither nodes' nor edges', by name
        self._numbers: dict[tuple[Role, int], int] = {}
        self._named: list[Tensor] = []  # alive, or their ids would come again
        self._is_edge_level = is_edge_level
        self._deferred: dict[str, Call] = {}
        # `to_hetero_with_bases` weighs messages in a hook, by the type of each edge.
        tag = layer.__dict__.get("_edge_type")
        self._tag = self._number("edge", tag) if isinstance(tag, Tensor) else None
        self._message = self._bind(method, kwargs)
        self._aggregate = self._bind("aggregate", kwargs) if complete else None

    def _bind(self, method: str, kwargs: Mapping[str, Any]) -> Call:
        layer = self.layer
        arguments: dict[str, int | tuple[Any]] = {}
        for name in layer.inspector.get_param_names(method):
            if name in self.never_per_tile:
                raise NeedsAllEdges(f"'{method}' asks for '{name}'")
            if name in _PER_TILE or name in _NEVER_PER_TILE:
                continue
            value = kwargs.get(name[:-2] if name[-2:] in ("_i", "_j") else name, Parameter.empty)
            if isinstance(value, DeferredEdge):
                self._deferred[name] = self._bind("edge_update", value.kwargs)
            elif name[-2:] in ("_i", "_j"):
                arguments[name] = self._bind_node(name, value)
            elif isinstance(value, Tensor):
                key = name if method == "message" else f"{method}.{name}"
                role: Role = "edge" if self._is_edge_level.get(key, False) else "whole"
                if self.only_scalars and (method, role) == ("aggregate", "whole") and value.dim():
                    raise NeedsAllEdges(f"aggregate() takes the tensor '{name}'")
                arguments[name] = self._number(role, value)
                if role == "whole":
                    self.whole[key] = self._numbers[role, id(value)]
            else:
                arguments[name] = (value,)
        return Call(method, arguments)

    def _bind_node(self, name: str, value: Any) -> int | tuple[Any]:
        target = name[-2:] == "_i"
        if isinstance(value, tuple | list):
            value = value[1 if target else 0]  # as PyG's template, whatever the flow
        if not isinstance(value, Tensor):
            return (value,)
        axis = self.layer.node_dim
        nodes = self.num_targets if target else self.num_local
        check_nodes(value, axis, nodes, name[:-2], self.rank)
        return self._number("target" if target else "source", value, axis % value.dim())

    def _number(self, role: Role, tensor: Tensor, axis: int = 0) -> int:
        key = (role, id(tensor))
        if key not in self._numbers:
            self._numbers[key] = len(self.operands)
            self._named.append(tensor)
            rows = tensor.movedim(axis, 0) if axis else tensor
            self.operands.append(Operand(role, rows, axis))
        return self._numbers[key]

    def argument_of(self, number: int) -> str | None:
        """Returns the argument of ``propagate`` that ``message`` gets as an operand."""
        for name, found in self._message.arguments.items():
            if found == number and not isinstance(found, tuple):
                return name[:-2] if name[-2:] in ("_i", "_j") else name
        return None

    def release(self) -> None:
        """See :meth:`EdgeProgram.release`."""
        self._named = []
        super().release()

    def run(self, tile: Tile, values: Sequence[Any], log: Reductions) -> list[Mapped]:
        """Returns the tile's messages ``[E_tile, *]``, mapped for each group of reductions.

        Of a complete program, the targets' aggregates ``[U, *]``.

        Args:
            tile: The edges.
            values: The operands' rows (:meth:`gather`), edges first.
            log: Where the message's own reductions over targets go.
        """
        if self.complete and opens_without_edges(tile):
            return self._run_with_stand_in(tile, values, log)
        own = self.own(tile, log)
        out, values, given = self.call(values, {**own, **self.sizes})
        return self.finished(tile, out, values, {**given, **own}, log)

    def own(self, tile: Tile, log: Reductions) -> dict[str, Any]:
        """Returns the arguments of a tile's message that are not the caller's."""
        index = self._index(tile, log)
        sizes = dict.fromkeys(("dim_size", "size_i"), index.num_targets)
        return {"index": index, "edge_index_i": index, "ptr": None, **sizes}

    def finished(
        self, tile: Tile, out: Any, values: Sequence[Any], given: Mapping[str, Any], log: Reductions
    ) -> list[Mapped]:
        """Returns messages as :meth:`run` does.

        Args:
            tile: The edges.
            out: The messages as the layer made them.
            values: The operands' rows, edges where the layer wants them.
            given: Other arguments of ``aggregate``.
            log: The reductions over targets that the message made.
        """
        self._check_rows(out, tile.num_edges, "the message is not one tensor with a row per edge")
        self.message_bytes = out.numel() // max(tile.num_edges, 1) * out.element_size()
        if self._aggregate is not None:
            arguments = self._collect(self._aggregate, values, given)
            if type(self.layer).aggregate is MessagePassing.aggregate:
                arguments["index"] = tile.index  # all in-edges are there: nothing to be noted
            out = self._aggregated(out, arguments)
        axis = self.layer.node_dim
        out = out.movedim(axis, 0) if axis % out.dim() else out
        mapped = [self._mapped(group, out, tile, log) for group in self.groups]
        self.out_rows = [(list(m.messages.shape[1:]), m.messages.dtype) for m in mapped]
        return mapped

    def _mapped(self, group: Group, out: Tensor, tile: Tile, log: Reductions) -> Mapped:
        if group.premap is None:
            return Mapped(out, log)
        own = Reductions()
        index = self._index(tile, own)
        messages = group.premap(out, index if group.normalises else tile.index, index.num_targets)
        if messages.size(0) != out.size(0):
            raise NeedsAllEdges("the aggregation changes the number of messages")
        self.message_bytes += messages.shape[1:].numel() * messages.element_size()
        return Mapped(messages, own)

    def _index(self, tile: Tile, log: Reductions) -> TargetIndex:
        targets = tile.targets.numel()
        return make_target_index(
            tile.index, tile.target_rows, targets, self.num_targets, log, self.complete
        )

    def call(
        self, values: Sequence[Any], own: Mapping[str, Any]
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Runs ``edge_update``, where it was put off, and ``message``.

        Args:
            values: The operands' rows, edges first.
            own: The arguments that are not the caller's.

        Returns:
            The messages, the operands with edges where the layer wants them, and ``own`` with the
            results of ``edge_update``.
        """
        layer = self.layer
        if self._tag is not None:
            layer.__dict__["_edge_type"] = values[self._tag]
        values = [
            value.movedim(0, o.axis) if o.axis and value is not None else value
            for o, value in zip(self.operands, values, strict=True)
        ]
        updated = {
            name: layer.edge_update(**self._collect(call, values, own))
            for name, call in self._deferred.items()
        }
        given = {**own, **updated}
        arguments = self._collect(self._message, values, given)
        if self.method != "message":
            return getattr(layer, self.method)(**arguments), values, given
        return hooked_message(layer, arguments), values, given

    def _check_rows(self, out: Any, rows: int | None, problem: str) -> None:
        axis = self.layer.node_dim
        if not isinstance(out, Tensor) or not -out.dim() <= axis < out.dim():
            raise NeedsAllEdges(problem)
        if rows is not None and out.size(axis) != rows:
            raise NeedsAllEdges(problem)

    def _run_with_stand_in(
        self, tile: Tile, values: Sequence[Any], log: Reductions
    ) -> list[Mapped]:
        """A first target without in-edges, or hardly an edge: not every aggregation takes that.

        In one process they hardly ever see it. Two copies of the first edge (zeros, if there is
        none) are put in front, with a target of their own that is dropped again.
        """
        zero = tile.index.new_zeros(STAND_INS)
        padded = Tile(
            tile.unit,
            slice(0, tile.num_edges + STAND_INS),
            torch.cat([tile.targets[:1], tile.targets]),
            torch.cat([zero, tile.index + 1]),
            torch.cat([zero, tile.source]),
            tile.where,
        )

        def padded_rows(value: Tensor) -> Tensor:
            first = value[:1] if value.size(0) else value.new_zeros(1, *value.shape[1:])
            return torch.cat([first, first, value])

        rows = [
            value if value is None or o.role == "whole" else padded_rows(value)
            for o, value in zip(self.operands, values, strict=True)
        ]
        return [Mapped(out.messages[1:], out.log) for out in self.run(padded, rows, log)]

    def _aggregated(self, messages: Tensor, arguments: dict[str, Any]) -> Tensor:
        with padded_to(self.layer, self.most_edges):
            out: Tensor = self.layer.aggregate(messages, **arguments)
        problem = "the aggregate is not one tensor with a row per target"
        self._check_rows(out, arguments.get("dim_size"), problem)
        return out

    def _collect(self, call: Call, values: Sequence[Any], own: Mapping[str, Any]) -> dict[str, Any]:
        data = dict(own)
        for name, place in call.arguments.items():
            data[name] = place[0] if isinstance(place, tuple) else values[place]
        collected: dict[str, Any] = self.layer.inspector.collect_param_data(call.method, data)
        return collected


def opens_without_edges(tile: Tile) -> bool:
    """Says if edges stand in for those of a tile's first target: :data:`STAND_INS` of them."""
    if tile.targets.numel() == 0:
        return False
    return tile.num_edges < 2 or int(tile.index[0]) != 0
