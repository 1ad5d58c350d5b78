"""Sequential aggregation and rematerialization (SAR, algorithms 1 and 2), for any message.

[Note: the modes] Forward and backward walk the same rounds and the same tiles. What differs is
where the backward pass finds a tile's graph:

* kept: it was made in the forward pass. Mode 2 keeps every graph with the rows in it. Mode 1 does
  so where the graph holds nothing of the source rows (case 1) and little else.
* remade: the message runs again, on rows fetched again (case 2) or, in case 1, on stand-ins
  without memory, since the gradient doesn't depend on their values.
* none: the message is the source rows themselves; its gradient is the aggregate's. A sum or mean
  of them, or of their products with numbers of the edges, is fused (:mod:`pyg_sar.engine.fused`):
  no tile, no message.

[Note: order of random numbers] A remade message must see the random numbers that it saw at first.
Tiles are remade in the order in which they were made, from the random state at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pyg_sar.engine.fused import fused_sum
from pyg_sar.engine.reduce import Reducer
from pyg_sar.engine.rounds import Rounds
from pyg_sar.engine.softmax_reduce import make_reducer
from pyg_sar.exchange.rows import Use, add_rows
from pyg_sar.exchange.wire import Wire
from pyg_sar.message.decompose import Decomposition
from pyg_sar.message.dependence import Dependence, Inject, token_for
from pyg_sar.message.layer_state import AmbientState, detached_parameters, preserved_attributes
from pyg_sar.message.program import TileProgram
from pyg_sar.message.target_index import Reductions
from pyg_sar.policy import SARPolicy
from pyg_sar.space.shard import Tile, empty_tile

_LIGHT_GRAPH_BYTES = 16.0  # per edge: an edge weight or a few, not a message


@dataclass(slots=True)
class _Root:
    """Messages for one group of reductions; dropped as soon as only their graph is needed."""

    messages: Tensor | None
    edge: GradientEdge | None
    log: Reductions


@dataclass(slots=True)
class _Graph:
    """A tile's graph, from the leaves ``tokens`` and ``parameters`` to its ``roots``."""

    tile: Tile
    tokens: list[Tensor | None]
    roots: list[_Root]
    parameters: dict[int, Tensor]


class SequentialAggregation:
    """One call of ``propagate``: its program, edges, policy and what its message needs.

    Args:
        program: The message.
        rounds: The way through the edges.
        decomposition: The aggregation.
        needs: The analysis' findings.
        policy: Its mode: 1 makes graphs again, 2 and 3 keep them.
        name: The layer's name, for the ledger.
        out_rows: Messages of each group of reductions, without rows, ``[0, *]``.
    """

    def __init__(
        self,
        program: TileProgram,
        rounds: Rounds,
        decomposition: Decomposition,
        needs: Dependence,
        policy: SARPolicy,
        name: str,
        out_rows: Sequence[Tensor],
    ) -> None:
        self.program, self.rounds, self.decomposition = program, rounds, decomposition
        self.needs, self.policy, self.name = needs, policy, name
        self.plan, self.out_rows = rounds.plan, list(out_rows)
        self.wire = Wire(policy.wire)
        self.requires_grad = [operand.tensor.requires_grad for operand in program.operands]
        light = not needs.needs_sources and needs.saved_bytes_per_edge <= _LIGHT_GRAPH_BYTES
        self.keeps_graphs = needs.needs_gradient and (policy.mode > 1 or light)
        groups = self.reducers()
        readers = [reducer for group in groups for reducer in group]
        self.no_graph = needs.source >= 0 and not any(r.needs_values for r in readers)
        # Where a mode remakes graphs it does so in the order of the forward pass, and all add up in
        # the same order.
        self._own_last = self.no_graph or light
        self.fused = fused_sum(program, rounds, needs, self.keeps_graphs, groups, policy)
        if self.fused is not None:
            self.rounds = self.fused.rounds
        self._graphs: list[_Graph] = []
        self._ambient = AmbientState(rounds.in_degree.device, program.layer)

    def reducers(self) -> list[list[Reducer]]:
        """Fresh states, by group."""
        pattern = bool(self.needs.pattern)
        return [
            [
                make_reducer(kind, group.normalises or (pattern and not group.premap), self.rounds)
                for kind in group.kinds
            ]
            for group in self.decomposition.groups
        ]

    # Forward #################################################################

    def forward(
        self, tensors: Sequence[Tensor], record: bool
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Aggregates over all shards.

        Args:
            tensors: The operands' tensors, detached.
            record: Whether a backward pass may follow.

        Returns:
            Each reduction's result ``[num_targets, *]`` and its state for the backward pass.
        """
        program = self.program
        reducers = self.reducers()
        sources = [tensors[k] for k in program.numbers("source")]
        label = (self.name, "forward", "fetch")
        keep = record and self.keeps_graphs and not self.no_graph
        use = Use.PASSES if self.fused is None else Use.IN_PLACE
        use = Use.KEEPS if keep else use
        stream = self.rounds.stream(sources, label, self.policy.prefetch, self.wire, use)
        seen = False
        with self._message_scope(keep) as parameters:
            for unit, rows in stream:
                fused = self.fused is not None and self.fused.merge(
                    unit, tensors, rows, reducers[0]
                )
                seen |= fused
                for tile in () if fused else self.rounds.tiles(unit):
                    seen, rows = True, rows.alone()
                    values = program.gather(tile, tensors, rows.tensors)
                    graph = self._run(tile, values, parameters, keep)
                    del values
                    self._merge(graph, reducers)
                    if keep:
                        for root, group in zip(graph.roots, reducers, strict=True):
                            if not any(reducer.reads_messages for reducer in group):
                                root.messages = None
                        self._graphs.append(graph)
                    del graph
                del rows
        if not seen:  # This worker has no edges: others know what a row looks like.
            nothing = [_Root(row, None, Reductions()) for row in self.out_rows]
            self._merge(_Graph(empty_tile(self._ambient.device), [], nothing, {}), reducers)
        found = [reducer for group in reducers for reducer in group]
        out = [reducer.finish() for reducer in found]
        return out, [reducer.state() if record else [] for reducer in found]

    @torch.no_grad()
    def _merge(self, graph: _Graph, reducers: Sequence[Sequence[Reducer]]) -> None:
        for root, group in zip(graph.roots, reducers, strict=True):
            messages = _like(root.messages).detach()
            for reducer in group:
                reducer.merge(graph.tile, messages, root.log)

    @contextmanager
    def _message_scope(self, graph: bool) -> Iterator[dict[int, Tensor]]:
        layer = self.program.layer
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(graph))
            stack.enter_context(preserved_attributes(layer, buffers=False))
            stack.enter_context(self._ambient.autocast())
            if graph:  # Others' hooks (checkpointing, offloading) are for graphs that they see.
                stack.enter_context(saved_tensors_hooks(_own, _own))
            yield stack.enter_context(detached_parameters(layer)) if graph else {}

    def _run(
        self, tile: Tile, values: list[Tensor | None], parameters: dict[int, Tensor], graph: bool
    ) -> _Graph:
        """Runs the message, with leaves for what requires a gradient."""
        tokens: list[Tensor | None] = [None] * len(values)
        inputs: list[Tensor | None] = list(values)
        if graph:
            for k, value in enumerate(values):
                if self.requires_grad[k] and value is not None:
                    tokens[k] = token = token_for(value)
                    inputs[k] = Inject.apply(token, value)
        roots = [
            _Root(
                mapped.messages,
                get_gradient_edge(mapped.messages)
                if graph and mapped.messages.requires_grad
                else None,
                mapped.log,
            )
            for mapped in self.program.run(tile, inputs, Reductions())
        ]
        return _Graph(tile, tokens, roots, parameters)

    # Backward ################################################################

    def backward(
        self,
        gradients: Sequence[Tensor],
        tensors: Sequence[Tensor | None],
        states: Sequence[list[Tensor]],
        last: bool,
    ) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Gradients of the operands and of the layer's parameters (by id).

        Args:
            gradients: The results' gradients ``[num_targets, *]``.
            tensors: The operands' tensors; ``None`` where values aren't needed.
            states: The reductions' states.
            last: Kept graphs may be freed.
        """
        reducers = self.reducers()
        found = [reducer for group in reducers for reducer in group]
        for reducer, gradient, state in zip(found, gradients, states, strict=True):
            reducer.start_backward(gradient, state)
        totals = [self._total(k) for k in range(len(self.requires_grad))]
        numbers = [k for k in self.program.numbers("source") if totals[k] is not None]
        own = [_like(totals[k]) for k in numbers]
        depth = self.policy.prefetch
        at = totals, tensors, reducers[0], self.name, depth
        if self.fused is not None and self.fused.add_by_owners(*at):
            return totals, {}
        refetches = self.needs.needs_sources and not (self.no_graph or self.keeps_graphs)
        returns = self.rounds.returns(own, self.name, depth, refetches, self.wire)
        sums: dict[int, Tensor] = {}
        for unit, handed, graphs in self._graph_rounds(tensors, last):
            unit_totals = list(totals)
            for k, rows in zip(numbers, returns.start(unit) if numbers else (), strict=True):
                unit_totals[k] = rows
                del rows
            fused = self.fused if self._is_fused(unit) else None
            if fused is not None:
                fused.add_gradients(unit, unit_totals, tensors, handed, reducers[0])
            for graph in () if fused else graphs:
                self._add_gradients(graph, reducers, unit_totals, sums)
                del graph
            del handed, graphs, unit_totals
            if numbers:
                returns.send(unit)
        returns.drain()
        for reducer in found:
            reducer.finish_backward()
        return totals, sums

    def _total(self, number: int) -> Tensor | None:
        if not self.requires_grad[number]:
            return None
        operand = self.program.operands[number]
        return torch.zeros_like(operand.tensor, memory_format=torch.contiguous_format)

    def _graph_rounds(
        self, tensors: Sequence[Tensor | None], last: bool
    ) -> Iterator[tuple[int, list[list[Tensor]], Iterator[_Graph]]]:
        """Each unit's tiles with their graphs. See [Note: the modes].

        The list holds the unit's rows of the source operands where they were fetched again; the
        tiles take them over.
        """
        if self.no_graph or self.keeps_graphs:
            kept = self._graphs
            if last:
                self._graphs = []
            units, prefetch = self.rounds.units(), self.policy.prefetch
            for unit in self.rounds.units_back(prefetch) if self._own_last else units:
                if self.no_graph:
                    yield unit, [], (self._bare(tile) for tile in self.rounds.tiles(unit))
                else:
                    own = [graph for graph in kept if graph.tile.unit == unit]
                    if last:
                        kept = [graph for graph in kept if graph.tile.unit != unit]
                    yield unit, [], _draining(own)
                    del own
            return
        layer = self.program.layer
        for ledger in self.plan.comm.ledgers:
            ledger.count("recompute")
        with (
            preserved_attributes(layer, buffers=True),
            self._ambient.restored(),
            detached_parameters(layer) as parameters,
        ):
            if self.needs.needs_sources:
                sources = [_like(tensors[k]) for k in self.program.numbers("source")]
                label = (self.name, "backward", "refetch")
                use = Use.KEEPS if self.fused is None else Use.PASSES
                prefetch = self.policy.prefetch
                stream = self.rounds.stream(sources, label, prefetch, self.wire, use)
                for unit, rows in stream:
                    handed = [rows.tensors]
                    del rows
                    yield unit, handed, self._remade(unit, tensors, handed, parameters)
            else:
                for unit in self.rounds.units():
                    yield unit, [], self._remade(unit, tensors, [], parameters)

    def _is_fused(self, unit: int) -> bool:
        return self.fused is not None and unit in self.fused.units

    def _bare(self, tile: Tile) -> _Graph:
        roots = [_Root(None, None, Reductions()) for _ in self.decomposition.groups]
        return _Graph(tile, [], roots, {})

    def _remade(
        self,
        unit: int,
        tensors: Sequence[Tensor | None],
        handed: list[list[Tensor]],
        parameters: dict[int, Tensor],
    ) -> Iterator[_Graph]:
        """Runs the unit's tiles again; takes its rows over from ``handed``, to free them first."""
        program = self.program
        numbers = program.numbers("source")
        rows = handed.pop() if handed else None
        for tile in self.rounds.tiles(unit):
            values = program.gather(tile, tensors, rows or [None] * len(numbers))
            if rows is None:
                for k in numbers:
                    operand = program.operands[k].tensor
                    shape = (tile.num_edges, *operand.shape[1:])
                    values[k] = operand.new_zeros(()).expand(shape)
            with torch.enable_grad():
                graph = self._run(tile, values, parameters, graph=True)
            del values
            yield graph
            del graph

    def _add_gradients(
        self,
        graph: _Graph,
        reducers: Sequence[Sequence[Reducer]],
        totals: Sequence[Tensor | None],
        sums: dict[int, Tensor],
    ) -> None:
        tile = graph.tile
        roots: list[Any] = []
        shares: list[Tensor] = []
        for root, group in zip(graph.roots, reducers, strict=True):
            share, extra = _shares(tile, root, group)
            if self.no_graph:
                add_rows(_like(totals[self.needs.source]), tile.source, share)
            if root.edge is not None:
                roots.append(root.edge)
                shares.append(share)
            total = root.log.total
            if extra is not None and total is not None and total.requires_grad:
                roots.append(total)
                shares.append(extra)
            del share, extra, total
        numbers = [k for k, token in enumerate(graph.tokens) if token is not None]
        inputs = [_like(graph.tokens[k]) for k in numbers] + list(graph.parameters.values())
        if not roots or not inputs:
            return
        with torch.enable_grad():
            found = torch.autograd.grad(
                roots, inputs, shares, retain_graph=self.keeps_graphs, allow_unused=True
            )
        del roots, inputs, shares
        for k, value in zip(numbers, found[: len(numbers)], strict=True):
            if value is not None:
                self._add_operand(k, tile, value, _like(totals[k]))
        for key, value in zip(graph.parameters, found[len(numbers) :], strict=True):
            if value is not None:
                sums[key] = value if key not in sums else sums[key].add_(value)

    def _add_operand(self, number: int, tile: Tile, value: Tensor, total: Tensor) -> None:
        role = self.program.operands[number].role
        if role == "source":
            add_rows(total, tile.source, value)
        elif role == "target":
            add_rows(total, tile.target_rows, value)
        elif role == "edge":
            total[tile.columns] = value  # Each edge is in one tile.
        else:
            total += value

    def title(self) -> str:
        """The layer, its name and the rank, for messages."""
        return f"{type(self.program.layer).__name__} '{self.name}' at rank {self.plan.rank}"

    def saves(self, number: int) -> bool:
        """Whether the backward pass needs an operand's values."""
        if self.fused is not None and number == self.fused.weight:
            return True
        if self.no_graph or self.keeps_graphs:
            return False
        return self.needs.needs_sources or self.program.operands[number].role != "source"


def _own(tensor: Tensor) -> Tensor:
    """What a tile's graph saves: an alias, or an operator's output would own itself."""
    return tensor.detach()


def _like(value: Tensor | None) -> Tensor:
    if value is None:
        raise RuntimeError("A tensor that the backward pass needs was not kept")
    return value


@torch.no_grad()
def _shares(tile: Tile, root: _Root, reducers: Sequence[Reducer]) -> tuple[Tensor, Tensor | None]:
    """The gradients of a tile's messages ``[E_tile, *]`` and of its softmax normaliser."""
    messages = None if root.messages is None else root.messages.detach()
    found = [reducer.message_gradient(tile, messages, root.log) for reducer in reducers]
    extra = reducers[0].total_gradient(tile, root.log)
    return (found[0] if len(found) == 1 else torch.stack(found).sum(0)), extra


def _draining(graphs: list[_Graph]) -> Iterator[_Graph]:
    """Hands graphs out and forgets them, so that each is freed after its turn."""
    graphs.reverse()
    while graphs:
        yield graphs.pop()
