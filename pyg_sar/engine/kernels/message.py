"""Any message, by tiles: sequential aggregation and rematerialization (SAR, algorithms 1, 2).

[Note: the modes] Forward and backward go through the same blocks and the same tiles. What differs
is where the backward pass finds a tile's graph:

* kept: it was made in the forward pass. Mode 2 keeps every graph with the rows in it. Mode 1 does
  so where the graph holds nothing of the source rows (case 1) and little else.
* remade: the message runs again, on rows fetched again (case 2) or, in case 1, on stand-ins
  without memory, since the gradient doesn't depend on their values. A message that may read what is
  neither an argument nor held by the layer (a global) gets its rows in case 1, too: its values are
  compared with those of the forward pass.
* none: the message is the source rows themselves; its gradient is the aggregate's.

[Note: order of random numbers] A remade message must see the random numbers that it saw at first.
Tiles are remade in the order in which they were made, from the random state at the start. With
``SARPolicy(random=...)`` each edge has numbers of its own (:class:`EdgeDraws`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pyg_sar.engine.analysis import titled
from pyg_sar.engine.chunks import Chunks
from pyg_sar.engine.reducers import Reducer, make_reducer, present
from pyg_sar.engine.run import Kernel, Pass
from pyg_sar.engine.schedule import Schedule
from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.rows import UnitRows, add_rows
from pyg_sar.exchange.wire import wire_of
from pyg_sar.message.decompose import Decomposition, alike
from pyg_sar.message.dependence import Dependence, Inject, token_for
from pyg_sar.message.edge_draws import EdgeDraws
from pyg_sar.message.layer_state import AmbientState, detached_parameters, preserved_attributes
from pyg_sar.message.outside import outside_of
from pyg_sar.message.program import STAND_INS, EdgeProgram, opens_without_edges
from pyg_sar.message.target_index import Reductions
from pyg_sar.policy import SARPolicy
from pyg_sar.space.distributed_index import version_of
from pyg_sar.space.shard import Block, Tile, empty_tile

_LIGHT_GRAPH_BYTES = 16.0  # per edge: an edge weight or a few, not a message
_TOGETHER = 1024  # messages that have a checksum


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
    roots: list[_Root]
    tokens: list[Tensor | None] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def _is_light(needs: Dependence) -> bool:
    return not needs.needs_sources and needs.saved_bytes_per_edge <= _LIGHT_GRAPH_BYTES


def keeps_graphs(needs: Dependence, policy: SARPolicy) -> bool:
    """True where tiles keep their graphs for the backward pass. See [Note: the modes]."""
    return needs.needs_gradient and (policy.mode > 1 or _is_light(needs))


class Messages(Kernel):
    """One call of ``propagate``: its message, aggregation and what both need.

    Its inputs are the message's operands, then the layer's parameters that want a gradient.

    Args:
        program, decomposition: The message, and the aggregation.
        needs: The analysis' findings.
        schedule: The way through the edges.
        policy: Its mode: 1 makes graphs again, 2 keeps them.
        name: The layer's name, for the ledger.
        max_edges: Edges per tile.
        out_rows: Messages of each group of reductions, without rows, ``[0, *]``.
        draws: The random numbers of its edges; ``None``: those of each worker.
    """

    def __init__(
        self,
        program: EdgeProgram,
        decomposition: Decomposition,
        needs: Dependence,
        schedule: Schedule,
        policy: SARPolicy,
        name: str,
        max_edges: int,
        out_rows: Sequence[Tensor],
        draws: EdgeDraws | None = None,
    ) -> None:
        self.draws = draws
        self.program, self.decomposition, self.needs = program, decomposition, needs
        self.schedule, self.name, self.max_edges = schedule, name, max_edges
        self.needs_gradient = needs.needs_gradient
        self.prefetch, self.wire, self.out_rows = (
            policy.prefetch,
            wire_of(policy.wire),
            list(out_rows),
        )
        self.requires_grad = [operand.tensor.requires_grad for operand in program.operands]
        self.keeps_graphs = keeps_graphs(needs, policy)
        readers = [reducer for group in self.reducers() for reducer in group]
        self.no_graph = needs.source >= 0 and not any(r.needs_values for r in readers)
        self.remakes = not (self.no_graph or self.keeps_graphs)
        reads_sources = needs.needs_sources or (self.remakes and needs.reads_outside)
        self.refetches = reads_sources and self.remakes
        sources = () if reads_sources else program.numbers("source")
        self.unread = frozenset(range(len(program.operands)) if self.no_graph else sources)
        # Where a mode remakes graphs it does so in the order of the forward pass, and all add up in
        # the same order.
        by_chunks = isinstance(schedule.backward[0].exchange, Chunks)
        self.own_last = (self.no_graph or _is_light(needs)) and not by_chunks
        named = program.layer.named_parameters()
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.graphs: list[_Graph] = []
        self.read: dict[str, Tensor] = {}  # by a message of no edges, in a call that had none
        self._operands: list[tuple[Tensor, int] | None] = []  # with versions, of graphs that stay
        self.made: dict[tuple[int, int], list[Tensor]] = {}  # checksums of each tile's messages
        self.title = titled(type(program.layer).__name__, name, schedule.plan.rank)
        self.ambient = AmbientState(schedule.in_degree.device, program.layer)
        self.code = outside_of(program.layer).code() if self.remakes else []

    def tensors(self) -> list[Tensor]:
        """The inputs."""
        return [operand.tensor for operand in self.program.operands] + [*self.parameters.values()]

    def reducers(self) -> list[list[Reducer]]:
        """Fresh states, by group."""
        pattern = bool(self.needs.pattern)
        return [
            [
                make_reducer(
                    kind,
                    group.normalises or (pattern and not group.premap),
                    self.schedule.in_degree,
                )
                for kind in group.kinds
            ]
            for group in self.decomposition.groups
        ]

    def forward(self, tensors: Sequence[Tensor], record: bool) -> MessagesForward:
        return MessagesForward(self, tensors[: len(self.requires_grad)], record)

    def saved(self, tensors: Sequence[Tensor], done: MessagesForward) -> list[Tensor]:
        count = len(self.requires_grad)
        # Zero-size stand-ins keep the places of what needn't be saved.
        kept = [t if self._saves(k) else t.new_empty(0) for k, t in enumerate(tensors[:count])]
        self._lengths = [len(state) for state in done.states]
        self.program.release()
        if self.keeps_graphs and not self.no_graph:  # Second derivatives read the operands.
            self._operands = [
                None if k in self.unread else (tensor, tensor._version)
                for k, tensor in enumerate(tensors[:count])
            ]
        # Parameters are saved for the sake of their versions: a change in place is noticed.
        return [*kept, *tensors[count:], *(tensor for state in done.states for tensor in state)]

    def _saves(self, number: int) -> bool:
        """True where the backward pass needs an operand's values."""
        return self.remakes and number not in self.unread

    def inputs(self, saved: Sequence[Tensor]) -> list[Tensor]:
        count = len(self.requires_grad)
        found = list(saved[: count + len(self.parameters)])
        for k, kept in enumerate(self._operands):
            if kept is not None:
                found[k], version = kept
                if found[k]._version != version:
                    problem = "a tensor that its second derivative reads was changed in place"
                    raise RuntimeError(f"{self.title}: {problem}")
        return found

    def backward(
        self,
        cotangent: Sequence[Tensor],
        saved: Sequence[Tensor],
        wanted: Sequence[bool],
        last: bool,
    ) -> MessagesBackward:
        count = len(self.requires_grad)
        operands = [t if self._saves(k) else None for k, t in enumerate(saved[:count])]
        rest = iter(saved[count + len(self.parameters) :])
        states = [[next(rest) for _ in range(length)] for length in self._lengths]
        if last:
            self._operands = []
        return MessagesBackward(self, cotangent, operands, states, last)

    def check_source(self, graph: _Graph, rows: Tensor | None) -> None:
        """Raises where a message that was the source row when it was analysed is not."""
        if any(root.messages is not rows for root in graph.roots):
            raise changed_message(self.title)

    def check_made(self, graph: _Graph) -> None:
        """Raises where messages that are made again are others than in the forward pass."""
        before = self.made.get((graph.tile.unit, graph.tile.edges.start))
        if before is None:
            return
        now = [checksums(present(root.messages)) for root in graph.roots]
        if not all(torch.equal(a, b) or alike(a, b) for a, b in zip(now, before, strict=True)):
            raise self._other_message()

    def check_code(self) -> None:
        """Raises where other functions stand where messages find theirs since the forward pass."""
        if self.code and not outside_of(self.program.layer).has_code(self.code):
            raise self._other_message()

    def _other_message(self) -> DistributedIndexError:
        return DistributedIndexError(
            f"the message of {self.title} came out differently when it was computed again for the "
            "backward pass: it is not deterministic, or reads what has changed since and is "
            "neither an argument nor an attribute of the layer (a global, a tensor in an object): "
            "make that an attribute. SARPolicy(mode=2) keeps messages instead of recomputing them"
        )

    def run_message(
        self, tile: Tile, values: list[Tensor | None], parameters: dict[str, Tensor], graph: bool
    ) -> _Graph:
        """Runs the message, with leaves for what requires a gradient."""
        tokens: list[Tensor | None] = [None] * len(values)
        inputs: list[Tensor | None] = list(values)
        if graph:
            for k, value in enumerate(values):
                if self.requires_grad[k] and value is not None:
                    tokens[k] = token = token_for(value)
                    inputs[k] = Inject.apply(token, value)
        with self._random_numbers(tile):
            found = self.program.run(tile, inputs, Reductions())
        roots = [
            _Root(
                mapped.messages,
                get_gradient_edge(mapped.messages)
                if graph and mapped.messages.requires_grad
                else None,
                mapped.log,
            )
            for mapped in found
        ]
        return _Graph(tile, roots, tokens, parameters)

    def _random_numbers(self, tile: Tile) -> AbstractContextManager[None]:
        if self.draws is None:
            return nullcontext()
        padded = self.program.complete and opens_without_edges(tile)
        return self.draws.of_edges(tile.columns, tile.num_edges, STAND_INS if padded else 0)


class MessagesForward(Pass):
    """Merges the messages of tiles into the states of targets.

    Attributes:
        states: The reductions' states for the backward pass, once it is finished.
    """

    states: list[list[Tensor]]

    def __init__(self, kernel: Messages, tensors: Sequence[Tensor], record: bool) -> None:
        self._kernel, self._tensors, self._record = kernel, tensors, record
        self._reducers = kernel.reducers()
        self.sources = [tensors[k] for k in kernel.program.numbers("source")]
        self._keep = record and kernel.keeps_graphs and not kernel.no_graph
        self._parameters: dict[str, Tensor] = {}
        self._seen = False

    @contextmanager
    def scope(self) -> Iterator[None]:
        layer = self._kernel.program.layer
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._keep))
            stack.enter_context(preserved_attributes(layer, buffers=False))
            stack.enter_context(self._kernel.ambient.autocast())
            if self._keep:
                # Others' hooks (checkpointing, offloading) are for graphs that they see.
                stack.enter_context(saved_tensors_hooks(_kept, _as_kept))
                self._parameters = stack.enter_context(detached_parameters(layer))
            yield

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        kernel, read = self._kernel, rows.tensors
        for tile in block.tiles(kernel.max_edges):
            self._seen = True
            values = kernel.program.gather(tile, self._tensors, read)
            graph = kernel.run_message(tile, values, self._parameters, self._keep)
            if kernel.no_graph:
                kernel.check_source(graph, values[kernel.needs.source])
            del values
            if self._record and kernel.refetches:
                made = [checksums(present(root.messages)) for root in graph.roots]
                kernel.made[tile.unit, tile.edges.start] = made
            self._merge(graph)
            if self._keep:
                for root, group in zip(graph.roots, self._reducers, strict=True):
                    if not any(reducer.reads_messages for reducer in group):
                        root.messages = None
                kernel.graphs.append(graph)
            del graph

    @torch.no_grad()
    def _merge(self, graph: _Graph) -> None:
        for root, group in zip(graph.roots, self._reducers, strict=True):
            messages = present(root.messages).detach()
            for reducer in group:
                reducer.merge(graph.tile, messages, root.log)

    def finish(self) -> list[Tensor]:
        """Each reduction's result ``[num_targets, *]``."""
        kernel = self._kernel
        if not self._seen:  # This worker has no edges: others know what a row looks like.
            if self._record:
                kernel.read = self.of_no_edges()
            nothing = [_Root(row, None, Reductions()) for row in kernel.out_rows]
            self._merge(_Graph(empty_tile(kernel.ambient.device), nothing))
        found = [reducer for group in self._reducers for reducer in group]
        out = [reducer.finish() for reducer in found]
        self.states = [reducer.state() if self._record else [] for reducer in found]
        return out

    def of_no_edges(self) -> dict[str, Tensor]:
        """Zeros for the parameters that the message reads: their gradients where no edge is."""
        program, ambient = self._kernel.program, self._kernel.ambient
        tile = empty_tile(ambient.device)
        with (
            torch.random.fork_rng([]),
            preserved_attributes(program.layer, buffers=True),
            ambient.autocast(),
            detached_parameters(program.layer) as parameters,
            saved_tensors_hooks(_kept, _as_kept),  # Not a checkpoint's, which would recompute.
            suppress(IndexError, RuntimeError, ValueError),  # Some messages fail without edges.
        ):
            rows = [source[:0] for source in self.sources]
            values = program.gather(tile, self._tensors, rows)
            with torch.enable_grad():
                found = [one.messages for one in program.run(tile, values, Reductions())]
                roots = [one for one in found if one.requires_grad]
                shares = [torch.zeros_like(one) for one in roots]
                if not (roots and parameters):
                    return {}
                leaves = list(parameters.values())
                gradients = torch.autograd.grad(roots, leaves, shares, allow_unused=True)
            pairs = zip(parameters, gradients, strict=True)
            return {name: value for name, value in pairs if value is not None}
        return {}


class MessagesBackward(Pass):
    """Adds up the gradients of operands and parameters, tile by tile."""

    phase = "backward"
    kinds = ("refetch", "gradient", "query", "gradient")

    def __init__(
        self,
        kernel: Messages,
        gradients: Sequence[Tensor],
        tensors: Sequence[Tensor | None],
        states: Sequence[list[Tensor]],
        last: bool,
    ) -> None:
        program = kernel.program
        self._kernel, self._tensors, self._last = kernel, tensors, last
        self._reducers = kernel.reducers()
        self._found = [reducer for group in self._reducers for reducer in group]
        for reducer, gradient, state in zip(self._found, gradients, states, strict=True):
            reducer.start_backward(gradient, state)
        self._totals = [self._total(k) for k in range(len(kernel.requires_grad))]
        self._sources = [k for k in program.numbers("source") if self._totals[k] is not None]
        self.returned = [present(self._totals[k]) for k in self._sources]
        self.own_last, self.in_flight = kernel.own_last, not kernel.refetches
        if kernel.refetches:
            self.sources = [present(tensors[k]) for k in program.numbers("source")]
        self._graphs = kernel.graphs
        if last:
            kernel.graphs = []
        self._parameters: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def _total(self, number: int) -> Tensor | None:
        if not self._kernel.requires_grad[number]:
            return None
        operand = self._kernel.program.operands[number]
        return torch.zeros_like(operand.tensor, memory_format=torch.contiguous_format)

    @contextmanager
    def scope(self) -> Iterator[None]:
        kernel = self._kernel
        if not kernel.remakes:
            yield
            return
        for ledger in kernel.schedule.plan.comm.ledgers:
            ledger.count("recompute")
        layer = kernel.program.layer
        with (
            kernel.ambient.restored(),
            preserved_attributes(layer, buffers=True),
            detached_parameters(layer) as parameters,
        ):
            self._parameters = parameters
            yield
            kernel.check_code()  # After the messages, whose own errors tell more.

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        totals = list(self._totals)
        for k, part in zip(self._sources, into, strict=True):
            totals[k] = part
        for graph in self._graphs_of(block, rows):
            self._add_gradients(graph, totals)
            del graph

    def _graphs_of(self, block: Block, rows: UnitRows) -> Iterator[_Graph]:
        """The block's tiles with their graphs. See [Note: the modes]."""
        kernel = self._kernel
        if kernel.no_graph:
            for tile in block.tiles(kernel.max_edges):
                yield _Graph(tile, [_Root(None, None, Reductions()) for _ in self._reducers])
        elif kernel.keeps_graphs:
            own = [graph for graph in self._graphs if graph.tile.unit == block.unit]
            if self._last:
                self._graphs = [graph for graph in self._graphs if graph.tile.unit != block.unit]
            own.reverse()
            while own:  # Each is freed after its turn.
                yield own.pop()
        else:
            yield from self._remade(block, rows)

    def _remade(self, block: Block, rows: UnitRows) -> Iterator[_Graph]:
        kernel, program = self._kernel, self._kernel.program
        numbers = program.numbers("source")
        read: Sequence[Tensor | None] = rows.tensors or [None] * len(numbers)
        for tile in block.tiles(kernel.max_edges):
            values = program.gather(tile, self._tensors, read)
            if not rows.tensors:
                for k in numbers:
                    operand = program.operands[k].tensor
                    shape = (tile.num_edges, *operand.shape[1:])
                    values[k] = operand.new_zeros(()).expand(shape)
            with torch.enable_grad():
                graph = kernel.run_message(tile, values, self._parameters, graph=True)
            del values
            kernel.check_made(graph)
            yield graph
            del graph

    def _add_gradients(self, graph: _Graph, totals: Sequence[Tensor | None]) -> None:
        kernel, tile = self._kernel, graph.tile
        roots: list[Any] = []
        shares: list[Tensor] = []
        for root, group in zip(graph.roots, self._reducers, strict=True):
            share, extra = _shares(tile, root, group)
            if kernel.no_graph:
                add_rows(present(totals[kernel.needs.source]), tile.source, share)
            if root.edge is not None:
                roots.append(root.edge)
                shares.append(share)
            total = root.log.total
            if extra is not None and total is not None and total.requires_grad:
                roots.append(total)
                shares.append(extra)
            del share, extra, total
        numbers = [k for k, token in enumerate(graph.tokens) if token is not None]
        inputs = [present(graph.tokens[k]) for k in numbers] + list(graph.parameters.values())
        if not roots or not inputs:
            return
        with torch.enable_grad():
            found = torch.autograd.grad(
                roots, inputs, shares, retain_graph=kernel.keeps_graphs, allow_unused=True
            )
        del roots, inputs, shares
        for k, value in zip(numbers, found[: len(numbers)], strict=True):
            if value is not None:
                self._add_operand(k, tile, value, present(totals[k]))
        for key, value in zip(graph.parameters, found[len(numbers) :], strict=True):
            if value is not None:
                sums = self._sums
                # A sum's gradient is expanded: its numbers are one in memory.
                sums[key] = sums[key].add_(value) if key in sums else value.contiguous()

    def _add_operand(self, number: int, tile: Tile, value: Tensor, total: Tensor) -> None:
        role = self._kernel.program.operands[number].role
        if role == "source":
            add_rows(total, tile.source, value)
        elif role == "target":
            add_rows(total, tile.target_rows, value)
        elif role == "aggregate":
            add_rows(total, tile.targets, value)
        elif role == "edge":
            total[tile.columns] = value  # Each edge is in one tile.
        else:
            total += value

    def finish(self) -> list[Tensor | None]:
        """The gradients of operands and parameters."""
        for reducer in self._found:
            reducer.finish_backward()
        found = self._kernel.read | self._sums
        return [*self._totals, *map(found.get, self._kernel.parameters)]


def changed_message(title: str) -> DistributedIndexError:
    """The error where a message is not any more what its backward pass rests on."""
    return DistributedIndexError(
        f"the message of {title} was a source row, a weighted one, or an attention, when it was "
        "analysed, and is not now, or is another one, though no flag, name or number among the "
        "layer's attributes tells. Set `layer.policy = pyg_sar.SARPolicy(mode=3)`"
    )


@torch.no_grad()
def checksums(messages: Tensor) -> Tensor:
    r"""Sums of every 1024 messages by which it shows that they were made again as at first.

    .. math:: c_k = \sum_{e = 1024 k}^{1024 k + 1023} w_e \sum_f v_f m_{ef}

    The weights differ, so that messages which change places, or signs, change the sums.

    Args:
        messages: ``[E, *]``.

    Returns:
        ``[ceil(E / 1024)]``, of at least single precision.
    """
    rows = torch.view_as_real(messages.resolve_conj()) if messages.is_complex() else messages
    rows = rows.reshape(rows.size(0), math.prod(rows.shape[1:]))
    rows = rows.float() if rows.element_size() < 4 or not rows.is_floating_point() else rows
    of_columns = torch.arange(rows.size(1), dtype=rows.dtype, device=rows.device).cos()
    of_rows = torch.arange(_TOGETHER, dtype=rows.dtype, device=rows.device).sin().add_(2)
    with torch.autocast(rows.device.type, enabled=False):
        sums = rows @ of_columns.add_(2)
        left = -sums.numel() % _TOGETHER
        return torch.nn.functional.pad(sums, (0, left)).view(-1, _TOGETHER) @ of_rows


def _kept(tensor: Tensor) -> tuple[Tensor, int]:
    """An alias of what a tile's graph saves, or an operator's output would own itself."""
    return tensor.detach(), version_of(tensor)


def _as_kept(kept: tuple[Tensor, int]) -> Tensor:
    """A saved tensor, as it was: PyTorch looks at versions only of what no hook has packed."""
    tensor, version = kept
    if version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that the message reads was changed in place "
            "after the layer's call and before its backward pass: give the layer another tensor "
            "(`layer.x = layer.x + 1`), as PyTorch asks for, too"
        )
    return tensor


@torch.no_grad()
def _shares(tile: Tile, root: _Root, reducers: Sequence[Reducer]) -> tuple[Tensor, Tensor | None]:
    """The gradients of a tile's messages ``[E_tile, *]`` and of its softmax normaliser."""
    messages = None if root.messages is None else root.messages.detach()
    found = [reducer.message_gradient(tile, messages, root.log) for reducer in reducers]
    extra = reducers[0].total_gradient(tile, root.log)
    return (found[0] if len(found) == 1 else torch.stack(found).sum(0)), extra
