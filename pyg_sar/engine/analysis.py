"""The analysis of a kind of call of ``propagate``, made once and by all workers.

[Note: one decision] Workers that decide differently wait for each other forever. A kind of call is
what they all see alike (dtypes, row shapes, ``requires_grad``, policy, training); its first
occurrence is looked at by all, and what they find is merged. Later calls look it up. Flags and
names among a layer's attributes may change what its message computes: when they do change, each
worker looks again by itself, and only if it needs something else now is there a new decision.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import (
    EquilibriumAggregation,
    GRUAggregation,
    LCMAggregation,
    LSTMAggregation,
    MedianAggregation,
    MLPAggregation,
    PatchTransformerAggregation,
    QuantileAggregation,
)

from pyg_sar.engine.kernels.sums import SumsCall
from pyg_sar.errors import DistributedIndexError, OneShotWarning
from pyg_sar.message.decompose import Decomposition, decompose, in_place, is_known
from pyg_sar.message.dependence import Dependence, Observation
from pyg_sar.message.layer_facts import facts_of
from pyg_sar.message.layer_state import other_draws, pads
from pyg_sar.message.message_checks import maximum, row_levels, without_rows
from pyg_sar.message.program import TileProgram
from pyg_sar.message.row_wise import RowCheck, RowWise
from pyg_sar.message.target_index import NeedsAllEdges
from pyg_sar.reduction.parameters import first_difference
from pyg_sar.space.index_space import DistEdgeIndex

_ORDERED = (
    GRUAggregation,
    LCMAggregation,
    LSTMAggregation,
    MLPAggregation,
    PatchTransformerAggregation,
)
_UNSORTED = (MedianAggregation, QuantileAggregation)  # they sort messages by value
_VALUES = {"max", "min", "mul", "var"}  # reductions whose gradient reads the messages
_ALL_EDGES = 2**40
_LEAST_BUDGET, _MOST_BUDGET = 2**22, 2**23  # beyond a few MiB, messages leave the caches


@dataclass(frozen=True, slots=True)
class RowsFound:
    """Findings about a message's rows, by this worker and by all, and of which levels they are."""

    mine: RowWise
    edges: dict[str, bool]
    nodes: dict[str, int]
    agreed: RowWise


@dataclass(frozen=True, slots=True)
class SumsOf:
    """A message that is a source row, or its product with a number of the edge, and is reduced.

    Attributes:
        source: The argument of ``propagate`` that holds the rows.
        weight: The one that holds the numbers, if there is one.
        kinds: The reductions: ``'sum'``, ``'mean'``, ``'max'`` and ``'min'``.
        alone: The message gets no other source rows.
    """

    source: str
    weight: str | None
    kinds: tuple[str, ...]
    alone: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """How a call of ``propagate`` runs, agreed on by all workers.

    Attributes:
        strategy: ``'sequential'``, ``'chunked'`` or ``'one_shot'``.
        needs: What the message needs (``None`` for one shot).
        edge_level: Which unsuffixed tensors hold one row per edge.
        max_edges: Edges per tile or chunk.
        out_rows: Messages of each group of reductions, without rows, ``[0, *]``; known of one
            shot where its message was looked at.
        sets: Attributes that the message sets, of which there is no value for all edges.
        found: What this worker alone found.
        sizes: What the message gets as ``size_i`` and the like, where they are numbers to it.
        rows: What was found about the message's rows.
        sums: The sums that it is, if it is nothing else.
        sums_call: How these are computed, where nothing is done with them but to hand them back.
    """

    strategy: str
    needs: Dependence | None = None
    edge_level: dict[str, bool] = field(default_factory=dict)
    max_edges: int = 0
    out_rows: tuple[Tensor, ...] = ()
    sets: tuple[str, ...] = ()
    found: Dependence | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    rows: RowsFound | None = None
    sums: SumsOf | None = None
    sums_call: SumsCall | None = None


def decomposition_of(layer: Any, complete: bool) -> Decomposition:
    """How a layer's aggregation goes tile by tile.

    ``complete``: tiles hold all in-edges of their targets, and the layer aggregates itself.

    Raises:
        NeedsAllEdges: When its partial states don't merge.
    """
    found = in_place() if complete else decompose(layer.aggr_module)
    if found is None:
        raise NeedsAllEdges(f"partial states of {layer.aggr_module} don't merge")
    return found


@dataclass(frozen=True, slots=True)
class _Analysis:
    """The findings of one worker about a message."""

    severity: int
    reason: str
    budget: int = 1
    needs: Dependence | None = None
    rows: Sequence[tuple[list[int], torch.dtype]] = ()
    sets: Sequence[str] = ()
    program: TileProgram | None = None


def title_of(layer: Any) -> str:
    """A layer's class and name, for messages."""
    kind = type(layer).__name__
    return kind if layer.ledger_name in ("", kind) else f"{kind} '{layer.ledger_name}'"


@lru_cache(1024)
def titled(kind: str, name: str, rank: int) -> str:
    """A layer's class and name, and the rank, for messages."""
    return f"{kind}{f' {name!r}' if name not in ('', kind) else ''} at rank {rank}"


Key = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Of a layer's ``call_key``: a call's kind, and what may change its message besides."""


class Chooser:
    """Chooses the strategy of one call of ``propagate`` of a ``DistMessagePassing``."""

    def __init__(
        self, layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], key: Key
    ) -> None:
        self.layer, self.edge_index, self.kwargs, self.key = layer, edge_index, kwargs, key
        self.comm = edge_index.plan.comm
        self.title = title_of(layer)
        self.levels: tuple[dict[str, bool], dict[str, int]] = {}, {}
        self.seen: Observation | None = None

    def choice(self, strategy: str, reason: str) -> Choice:
        """The choice for a call whose layer allows ``strategy`` by its definition.

        Raises:
            ValueError: When workers call the layer differently.
            DistributedIndexError: When no strategy is right.
        """
        kind, switches = self.key
        key = (strategy, reason, self.layer.policy, kind)
        facts = facts_of(self.layer)
        choices = facts.choices
        known = choices.get((key, switches))
        if known is None:
            with other_draws(self.layer) as drawn:
                known = choices.get(key)
                known = None if known is None else self._still_holding(known)
                is_new = known is None
                if known is None:
                    rows = facts.rows.get((kind, switches))
                    everywhere = self._agree_on_call(str(key), rows is not None)
                    known = self._decide(strategy, reason, rows if everywhere else None)
            if drawn and (known.needs is not None or self.comm.world_size > 1):
                raise DistributedIndexError(
                    f"{self.title} can't run distributed: its message (or aggregation) draws "
                    f"numbers of {drawn[0]}, and runs several times, on some edges at a time. "
                    "Draw in forward(), or with torch"
                )
            if is_new:
                choices[key] = known
                facts.rows[kind, switches] = known.rows
            choices[key, switches] = known
            facts.found(known.rows is not None and known.rows.mine.asks)
        # Of this graph, which may be another one than the last.
        return replace(known, sizes=self._sizes()) if known.sizes else known

    def _still_holding(self, known: Choice) -> Choice | None:
        """The choice where the layer, some of whose attributes changed, needs the same as before,
        but for numbers of an attention.
        """
        if known.rows is not None:
            self.levels = known.rows.edges, known.rows.nodes
            mine = self._found(*self.levels, "message")
            self._refuse(mine.refused, self.comm.rank)
            if replace(mine, rows=None) != replace(known.rows.mine, rows=None):
                return None
        if known.needs is None:  # One shot.
            return known
        now, found = self._look(known.strategy == "chunked", known.sizes).needs, known.found
        attention = known.needs.attention
        if now is None or found is None or attention is None:
            return known if now == found else None
        same = replace(now, attention=found.attention) == found
        if not same or not attention.is_like(now.attention):
            return None
        return replace(known, found=now, needs=replace(known.needs, attention=now.attention))

    def _decide(self, strategy: str, reason: str, found: RowsFound | None) -> Choice:
        """The leanest strategy that is right, agreed on by all workers."""
        for module in self.layer.modules():
            if isinstance(module, EquilibriumAggregation):
                raise DistributedIndexError(
                    f"{self.title} can't run distributed: {type(module).__name__} minimises one "
                    "energy over the targets of all workers together. Use another aggregation"
                )
            if isinstance(module, _ORDERED) and self.edge_index.order is None:
                raise DistributedIndexError(
                    f"{self.title} can't run distributed: {type(module).__name__} depends on the "
                    "order of a node's edges, which is not known after reversing or permuting "
                    "them. Use an aggregation that does not"
                )
        if found is None:
            levels, nodes = row_levels(self.layer, self.edge_index, self.kwargs)
            mine, agreed = self._agree_on_rows(levels, nodes, "message")
            found = RowsFound(mine, levels, nodes, agreed)
        self.levels = found.edges, found.nodes
        sizes = self._sizes() if found.agreed.numbers else {}
        choice = self._chosen(strategy, reason, found.agreed, sizes)
        return replace(choice, sizes=sizes, rows=found)

    def _chosen(self, strategy: str, reason: str, rows: RowWise, sizes: dict[str, Any]) -> Choice:
        known = () if rows.rows is None else (rows.rows,)
        if rows.refused:  # One worker has all edges; several have raised.
            return replace(self._whole(rows.refused), out_rows=known)
        if rows.updates and strategy != "one_shot":
            names = ", ".join(f"'{name}'" for name in rows.updates)
            reason = f"it changes {names} each time that it runs, which must be once per call"
            return replace(self._whole(reason), out_rows=known)
        if strategy == "one_shot":
            source = 0 if self.layer.flow == "source_to_target" else 1
            if reason == "asked for" and self.edge_index.dist_row == source and not rows.updates:
                self._attempt("sequential", sizes)  # a second look, which refuses as well
            return replace(self._whole(reason), out_rows=known)
        for attempt in ("sequential", "chunked"):
            if attempt == "sequential" and strategy == "chunked":
                continue
            choice, reason, severity = self._attempt(attempt, sizes)
            if choice is not None:
                return choice
            if severity > 1:
                break
        return replace(self._whole(reason), out_rows=known)

    def check_edge_update(self) -> tuple[str, ...]:
        """Refuses an ``edge_update`` of all edges at once that doesn't treat each edge alone;
        returns the attributes that it leaves with a row per edge.
        """
        kind, switches = self.key
        key, facts, method = (self.layer.policy, kind), facts_of(self.layer), "edge_update"
        known = facts.edge_updates
        if (key, switches) in known:
            return known[key, switches]
        levels, nodes = row_levels(self.layer, self.edge_index, self.kwargs, method)
        with other_draws(self.layer):  # It runs once more, for all edges.
            if key in known:  # Each worker looks again by itself.
                mine, keeps = self._found(levels, nodes, method), known[key]
                self._refuse(mine.refused, self.comm.rank)
            else:
                self._agree_on_call(str(key))
                mine, agreed = self._agree_on_rows(levels, nodes, method)
                known[key] = keeps = agreed.keeps
        known[key, switches] = keeps
        facts.found(mine.asks)
        return keeps

    def _whole(self, reason: str) -> Choice:
        facts = facts_of(self.layer)
        if reason != "asked for" and not facts.warned:
            facts.warned = True
            warnings.warn(
                f"{self.title} fetches its whole halo at once: {reason}. Its memory does not "
                "fall with the number of workers. SARPolicy(mode=3) for this layer silences this",
                OneShotWarning,
                stacklevel=6,
            )
        return Choice("one_shot")

    def _attempt(self, strategy: str, sizes: dict[str, Any]) -> tuple[Choice | None, str, int]:
        """Looks at the message and agrees with the other workers on what it needs.

        Returns:
            The choice, or why there is none and how bad it is (:class:`NeedsAllEdges`).
        """
        plan, device = self.edge_index.plan, self.edge_index.device
        look = self._look(strategy == "chunked", sizes)
        mine = None if look.needs is None else astuple(look.needs)
        shapes = [(row, str(dtype)) for row, dtype in look.rows]
        said = look.severity, look.budget, mine, shapes, look.sets
        everyone = self.comm.all_gather_object(said)
        severities, budgets, known, *_ = zip(*everyone, strict=True)
        severity = max(severities)
        reason = look.reason or "another worker found that it needs all edges"
        if severity == 3 and plan.world_size > 1:
            raise DistributedIndexError(f"{self.title} can't run distributed: {reason}")
        if severity:
            return None, reason, severity
        needs = Dependence.agreed(known)
        if needs.reads_nodes and plan.world_size > 1:
            raise DistributedIndexError(
                f"{self.title} can't run distributed (rank {plan.rank}): its message reads rows of "
                "a tensor with one row per node of this worker, by ids of its own, which may be "
                "other workers' nodes. Hand the tensor to propagate() and take its rows as '_j' or "
                "'_i' arguments; if its rows are not nodes, register it as a buffer"
            )
        *_, rows, sets = everyone[0]
        choice = Choice(
            strategy,
            needs,
            self.levels[0],
            min(budgets),
            tuple(without_rows(shape, dtype, device) for shape, dtype in rows),
            tuple(sets),
            look.needs,
            sums=None if look.program is None else _sums_of(look.program, needs),
        )
        return choice, "", 0

    def _look(self, complete: bool, sizes: dict[str, Any]) -> _Analysis:
        """Looks at the message on a few made-up edges. Communicates nothing."""
        for ledger in self.comm.ledgers:
            ledger.count("analysis")
        try:
            reductions = decomposition_of(self.layer, complete)
            program = TileProgram(
                self.layer,
                self.edge_index,
                self.kwargs,
                self.levels[0],
                reductions.groups,
                complete,
                most_edges(self.layer, self.edge_index) if complete else 0,
                sizes,
            )
            reads = any(_VALUES.intersection(group.kinds) for group in reductions.groups)
            linear = complete or reductions.linear
            needs = self._observation().needs(program, reads, linear)
            rows, sets = program.out_rows, program.sets
            _refuse_states_of_integers(reductions, rows or [])
            budget = self._max_edges(program)
        except NeedsAllEdges as error:
            return _Analysis(error.severity, str(error))
        return _Analysis(0, "", budget, needs, rows or [], sets, program)

    def _max_edges(self, program: TileProgram) -> int:
        """Edges whose messages and inputs are materialized at a time."""
        if self.layer.policy.mode == 3:
            return _ALL_EDGES
        budget = self.layer.policy.message_budget
        if budget is None:
            sources = [program.operands[k].tensor for k in program.numbers("source")]
            own = sum(t.numel() * t.element_size() for t in sources)
            budget = min(max(own // 4, _LEAST_BUDGET), _MOST_BUDGET)
        per_edge: int = program.row_bytes() + program.message_bytes
        return max(budget // max(per_edge, 1), 1)

    # Rows of the message #####################################################

    def _found(self, levels: dict[str, bool], nodes: dict[str, int], method: str) -> RowWise:
        """Returns what this worker finds."""
        try:
            check = RowCheck(self.layer, self.edge_index, self.kwargs, levels, nodes, method)
        except NeedsAllEdges:  # PyG itself says better what is wrong.
            return RowWise()
        found = check.found()
        self.seen = check.seen
        if found.refused and nodes and self.comm.world_size == 1:
            # It has all edges, and all nodes: it may read these by any id.
            again = self._found(levels, {}, method)
            return found if again.refused else again
        return found

    def _observation(self) -> Observation:
        """Returns a watched run of the message.

        Raises:
            NeedsAllEdges: There is none.
        """
        if self.seen is None:
            self._found(*self.levels, "message")
        if self.seen is None:
            raise NeedsAllEdges("it reads a tensor of the whole graph")
        return self.seen

    def _agree_on_rows(
        self, levels: dict[str, bool], nodes: dict[str, int], method: str
    ) -> tuple[RowWise, RowWise]:
        """Returns what this worker found about the message's rows, and what all did."""
        mine = self._found(levels, nodes, method)
        said = [mine.refused, list(mine.updates), mine.numbers, list(mine.keeps)]
        row = mine.rows
        shape = None if row is None else [list(row.shape[1:]), str(row.dtype)]
        everyone = self.comm.all_gather_object([said, shape])
        known = [found for found, _ in everyone]
        for rank, found in enumerate(known):
            self._refuse(found[0], rank, together=True)
        rows = next((found for _, found in everyone if found), None)
        agreed = RowWise(
            refused=next((found[0] for found in known if found[0]), ""),
            updates=tuple(sorted({name for found in known for name in found[1]})),
            keeps=tuple(sorted({name for found in known for name in found[3]})),
            numbers=all(found[2] for found in known),
            rows=None if rows is None else without_rows(rows[0], rows[1], self.edge_index.device),
        )
        return mine, agreed

    def _sizes(self) -> dict[str, Any]:
        """Returns the whole graph's numbers of nodes as a message gets them. Collective, once."""
        edges = self.edge_index

        def count() -> list[int]:
            here = [edges.plan.num_local, edges.num_targets]
            return [sum(column) for column in zip(*self.comm.all_gather_object(here), strict=True)]

        sources, targets = edges.remember_together("sizes", count)
        both = [sources, targets] if self.layer.flow == "source_to_target" else [targets, sources]
        return {"size_i": targets, "dim_size": targets, "size_j": sources, "size": both}

    def _refuse(self, reason: str, rank: int, *, together: bool = False) -> None:
        """Raises where workers can't do what one process does; ``together``: all of them do."""
        if reason and self.comm.world_size > 1:
            error = DistributedIndexError(
                f"{self.title} can't be computed from each worker's own edges (rank {rank}): "
                f"{reason}"
            )
            error.mixes_edges = together
            raise error

    # What the workers must see alike #########################################

    def _agree_on_call(self, call: str, known: bool = False) -> bool:
        """Refuses rows of unlike width or dtype; whether something is ``known`` to all workers."""
        everyone = self.comm.all_gather_object((call, known))
        if any(other != everyone[0][0] for other, _ in everyone):
            found = first_difference([*self._parts_of_call(), call], self.comm)
            rank, other, first = found or (0, call, call)
            raise ValueError(
                f"{self.title} is called differently on the workers, with '{other}' at rank "
                f"{rank} and '{first}' at rank 0 (this is rank {self.comm.rank}; of a tensor: "
                "dtype, requires_grad, shape of a row). Do the same on every worker"
            )
        return all(knows for _, knows in everyone)

    def _parts_of_call(self) -> list[str]:
        """Returns a line for each thing that a call's kind tells: see ``call_key``."""
        training, grad, autocast, _, _, kinds = self.key[0]
        lines = [
            f"{name}: requires_grad={p.requires_grad}" for name, p in self.layer.named_parameters()
        ]
        lines += [f"training: {training}", f"torch.is_grad_enabled(): {grad}"]
        lines += [f"autocast: {autocast}", f"policy: {self.layer.policy}"]
        return [*lines, *(f"{name}: {kind}" for name, kind in kinds)]


def _refuse_states_of_integers(
    reductions: Decomposition, rows: list[tuple[list[int], torch.dtype]]
) -> None:
    """Has PyG divide integers and booleans itself: the dtype of its result is another one.

    Raises:
        NeedsAllEdges: Where their partial states are none of their own dtype.
    """
    for group, (_, dtype) in zip(reductions.groups, rows, strict=False):
        if not dtype.is_floating_point and {"mean", "var", "semi_var"}.intersection(group.kinds):
            raise NeedsAllEdges(f"a mean of {dtype} is no {dtype}")


def needs_sorted_edges(layer: Any) -> bool:
    """True where the aggregation may ask for edges by target, in the whole graph's order."""
    used = layer.aggr_module
    if used is None or not is_known(layer):
        return not is_known(layer)
    return decompose(used) is None and type(used) not in _UNSORTED


def most_edges(layer: Any, edge_index: DistEdgeIndex) -> int:
    """The most in-edges of a node on any worker, where the aggregation depends on it; else 0."""
    if not pads(layer):
        return 0

    def make() -> int:
        target = edge_index.ends()[1]
        degrees = torch.bincount(target, minlength=1)
        return maximum(edge_index.plan.comm, [int(degrees.max())], edge_index.device)[0]

    found: int = edge_index.remember("most edges", make)
    return max(found, 1)


def _sums_of(program: TileProgram, needs: Dependence) -> SumsOf | None:
    """The sums that a message is, by arguments of ``propagate``; ``None`` where it is none."""
    source, weight = (needs.source, None) if needs.product is None else needs.product
    (group, *others), kinds = program.groups, set(program.groups[0].kinds)
    plain = not (others or group.premap or group.normalises or needs.pattern or program.complete)
    if source < 0 or not plain or not kinds <= {"sum", "mean", "max", "min"}:
        return None
    names = program.argument_of(source), None if weight is None else program.argument_of(weight)
    if names[0] is None or (weight is not None and names[1] is None):
        return None
    return SumsOf(names[0], names[1], group.kinds, len(program.numbers("source")) == 1)
