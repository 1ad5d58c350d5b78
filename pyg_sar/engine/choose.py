"""The one place that decides: strategy, kernel and schedule of a call of ``propagate``.

[Note: one decision] Workers that decide differently wait for each other forever. A kind of call is
what they all see alike (dtypes, row shapes, ``requires_grad``, policy, training); its first
occurrence is looked at by all, and what they find is merged. Later calls look it up. Flags and
names among a layer's attributes may change what its message computes: when they do change, each
worker looks again by itself, and only if it needs something else now is there a new decision.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
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

from pyg_sar.engine.chunks import Chunks
from pyg_sar.engine.cuts import rows_travel, split_edges
from pyg_sar.engine.kernels.attention import SoftmaxAttention, covers_of
from pyg_sar.engine.kernels.message import Messages, changed_message
from pyg_sar.engine.kernels.relational import RelationalAttention, RelationalTerms
from pyg_sar.engine.kernels.sums import Sums
from pyg_sar.engine.run import Kernel
from pyg_sar.engine.schedule import Schedule, by_chunks, by_shards
from pyg_sar.errors import DistributedIndexError, OneShotWarning
from pyg_sar.exchange.cover import ALL_PUSHED, SUMS
from pyg_sar.exchange.wire import Wire
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.kernels.ops import takes, warn_if_missing, why_missing
from pyg_sar.ledger import Label
from pyg_sar.message.decompose import Decomposition, decompose, in_place, is_known
from pyg_sar.message.dependence import Dependence, analyse, sample
from pyg_sar.message.layer_state import pads, preserved_attributes
from pyg_sar.message.message_checks import (
    Products,
    RowAgreement,
    edge_level_names,
    maximum,
    row_levels,
)
from pyg_sar.message.program import DeferredEdge, TileProgram
from pyg_sar.message.row_wise import RowWise
from pyg_sar.message.target_index import NeedsAllEdges, Reductions
from pyg_sar.policy import SARPolicy
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import shards_of

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
_FLAGS = (bool, str, type(None))
_SWITCHES = (*_FLAGS, int, float)
_PLAN: Label = ("", "", "plan")
_MANY_CHOICES = 32  # numbers among a layer's attributes are steps, say, and tell nothing
_LEAST_BUDGET, _MOST_BUDGET = 2**20, 2**23  # beyond a few MiB, messages leave the caches


@dataclass(frozen=True, slots=True)
class RowsFound:
    """What this worker and all of them found about a message's rows, and of which levels."""

    mine: RowWise | None
    edges: dict[str, bool]
    nodes: dict[str, int]
    agreed: RowWise


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
    """

    strategy: str
    needs: Dependence | None = None
    edge_level: dict[str, bool] = field(default_factory=dict)
    max_edges: int = 0
    out_rows: tuple[Tensor, ...] = ()
    sets: tuple[str, ...] = ()
    found: tuple[int, ...] = ()
    sizes: dict[str, Any] = field(default_factory=dict)
    rows: RowsFound | None = None


def decomposition_of(layer: Any, complete: bool) -> Decomposition:
    """How a layer's aggregation goes tile by tile.

    Args:
        layer: The layer.
        complete: Tiles hold all in-edges of their targets, and the layer aggregates itself.

    Raises:
        NeedsAllEdges: When its partial states don't merge.
    """
    found = in_place() if complete else decompose(layer.aggr_module)
    if found is None:
        raise NeedsAllEdges(f"partial states of {layer.aggr_module} don't merge")
    return found


class Choices(dict[Any, Choice]):
    """Choices per kind of call. A copy of the layer starts without them, on all workers alike."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Choices:
        return Choices()

    def __reduce__(self) -> Any:
        return Choices, ()


@dataclass(frozen=True, slots=True)
class _Analysis:
    """The findings of one worker about a message."""

    severity: int
    reason: str
    budget: int
    numbers: list[int]
    rows: list[tuple[list[int], torch.dtype]] | None
    sets: list[str]


def title_of(layer: Any) -> str:
    """A layer's class and name, for messages."""
    name = f" '{layer.ledger_name}'" if layer.ledger_name else ""
    return f"{type(layer).__name__}{name}"


class Chooser:
    """Chooses the strategy of one call.

    Args:
        layer: The layer (a ``DistMessagePassing``).
        edge_index: Distributed edges.
        kwargs: Keyword arguments of ``propagate``.
    """

    def __init__(self, layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any]) -> None:
        self.layer, self.edge_index, self.kwargs = layer, edge_index, kwargs
        self.comm = edge_index.plan.comm
        self.title = title_of(layer)
        self.rows = RowAgreement(layer, edge_index, kwargs, self.title)

    def choice(self, strategy: str, reason: str) -> Choice:
        """The choice for a call whose layer allows ``strategy`` by its definition.

        Raises:
            ValueError: When workers call the layer differently.
            DistributedIndexError: When no strategy is right.
        """
        key = (strategy, reason, self.layer.policy, self._kind_of_call())
        choices: Choices = self.layer.__dict__.setdefault("_choices", Choices())
        kinds = _SWITCHES if len(choices) < _MANY_CHOICES else _FLAGS
        switches = tuple(_switches(module, kinds) for module in self.layer.modules())
        known = choices.get((key, switches))
        if known is None:
            known = choices.get(key)
            if known is None or not self._still_holds(known):
                of_rows = "rows", key[-1], switches  # whatever the policy
                looked = choices.get(of_rows)
                everywhere = self._agree_on_call(str(key), looked is not None)
                rows = looked.rows if looked is not None and everywhere else None
                known = choices[key] = self._decide(strategy, reason, rows)
                choices[of_rows] = known
            choices[key, switches] = known
        # Of this graph, which may be another one than the last.
        return replace(known, sizes=self.rows.sizes()) if known.sizes else known

    def _still_holds(self, known: Choice) -> bool:
        """Whether the layer, some of whose attributes changed, needs what it needed."""
        if known.rows is not None and known.rows.mine is not None:
            mine = self.rows.look(known.rows.edges, known.rows.nodes, "message")
            self.rows.refuse(mine.refused, self.comm.rank)
            if replace(mine, rows=None) != replace(known.rows.mine, rows=None):
                return False
        if known.needs is None:
            return True
        edge_level, some_edges = known.edge_level, True
        look = self._look(known.strategy == "chunked", edge_level, some_edges, known.sizes)
        return (look.severity, *look.numbers) == known.found

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
            own = not is_known(self.layer)
            levels, nodes = row_levels(self.layer, self.edge_index, self.kwargs, own)
            mine, agreed = self.rows.agree(levels, nodes, "message")
            if nodes:
                agreed = replace(agreed, refused="")
            found = RowsFound(mine, levels, nodes, agreed)
        sizes = self.rows.sizes() if found.agreed.numbers else {}
        choice = self._chosen(strategy, reason, found.agreed, sizes)
        return replace(choice, sizes=sizes, rows=found)

    def _chosen(self, strategy: str, reason: str, rows: RowWise, sizes: dict[str, Any]) -> Choice:
        known = () if rows.rows is None else (rows.rows,)
        if rows.refused:  # One worker has all edges, and all nodes: it may read these by any id.
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

    def check_edge_update(self) -> None:
        """Refuses an ``edge_update`` of all edges at once that doesn't treat each edge alone."""
        key = ("edge_update", self.layer.policy, self._kind_of_call())
        choices: Choices = self.layer.__dict__.setdefault("_choices", Choices())
        if key in choices:
            return
        self._agree_on_call(str(key))
        method = "edge_update"
        levels, nodes = row_levels(self.layer, self.edge_index, self.kwargs, False, method)
        self.rows.agree(levels, nodes, method)
        choices[key] = Choice("one_shot")

    def _whole(self, reason: str) -> Choice:
        if reason != "asked for" and not self.layer.__dict__.get("_warned", False):
            self.layer._warned = True
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
        complete = strategy == "chunked"
        edge_level = edge_level_names(self.layer, self.edge_index, self.kwargs, complete)
        some_edges = maximum(self.comm, [self.edge_index.size(1)], device)[0] > 0
        look = self._look(complete, edge_level, some_edges, sizes)
        agreed = maximum(self.comm, [look.severity, -look.budget, *look.numbers], device)
        reason = look.reason or "another worker found that it needs all edges"
        if agreed[0] == 3 and plan.world_size > 1:
            raise DistributedIndexError(f"{self.title} can't run distributed: {reason}")
        if agreed[0]:
            return None, reason, agreed[0]
        needs = Dependence.decode(agreed[2:])
        if needs.reads_nodes and plan.world_size > 1:
            raise DistributedIndexError(
                f"{self.title} can't run distributed (rank {plan.rank}): its message reads rows of "
                "a tensor with one row per node of this worker, by ids of its own, which may be "
                "other workers' nodes. Hand the tensor to propagate() and take its rows as '_j' or "
                "'_i' arguments; if its rows are not nodes, register it as a buffer"
            )
        mine: Any = None
        if look.rows is not None:
            mine = [(row, str(dtype)) for row, dtype in look.rows], look.sets
        everyone = self.comm.all_gather_object(mine)
        rows, sets = next(found for found in everyone if found is not None)
        choice = Choice(
            strategy,
            needs,
            edge_level,
            -agreed[1],
            tuple(
                torch.empty(
                    0, *shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device
                )
                for shape, dtype in rows
            ),
            tuple(sets),
            (look.severity, *look.numbers),
        )
        return choice, "", 0

    def _look(
        self,
        complete: bool,
        edge_level: dict[str, bool],
        some_edges: bool,
        sizes: dict[str, Any],
    ) -> _Analysis:
        """Looks at the message on a few of this worker's edges. Communicates nothing."""
        for ledger in self.comm.ledgers:
            ledger.count("analysis")
        numbers, budget, rows = Dependence.no_opinion(), 1, None
        sets: list[str] = []
        try:
            reductions = decomposition_of(self.layer, complete)
            program = TileProgram(
                self.layer,
                self.edge_index,
                self.kwargs,
                edge_level,
                reductions.groups,
                complete,
                most_edges(self.layer, self.edge_index, complete),
                sizes,
            )
            tile = sample(self.edge_index)
            if tile.num_edges or not some_edges:
                reads = any(_VALUES.intersection(group.kinds) for group in reductions.groups)
                linear = complete or reductions.linear
                numbers = analyse(program, tile, reads, linear).encode()
                rows, sets = program.out_rows, program.sets
            budget = self._max_edges(program)
        except NeedsAllEdges as error:
            return _Analysis(error.severity, str(error), budget, Dependence.no_opinion(), None, [])
        return _Analysis(0, "", budget, numbers, rows, sets)

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

    # What the workers must see alike #########################################

    def _kind_of_call(self) -> tuple[Any, ...]:
        """What an analysis depends on; the same on all workers."""

        layer = self.layer

        def kind(value: Any) -> Any:
            if isinstance(value, DeferredEdge):
                return "deferred", tuple((k, kind(v)) for k, v in sorted(value.kwargs.items()))
            if isinstance(value, Tensor):
                nodes = {0, layer.node_dim % max(value.dim(), 1)}
                shape = [n for axis, n in enumerate(value.shape) if axis not in nodes]
                return value.dtype, value.requires_grad, tuple(shape), value.dim()
            if isinstance(value, tuple | list):
                return tuple(kind(v) for v in value)
            return value if isinstance(value, bool | int | float | str | None) else type(value)

        cuda = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        cpu = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return (
            layer.training,
            torch.is_grad_enabled(),
            (cpu, cuda),
            type(layer.aggr_module),
            tuple(p.requires_grad for p in layer.parameters()),
            tuple((name, kind(value)) for name, value in sorted(self.kwargs.items())),
        )

    def _agree_on_call(self, call: str, known: bool = False) -> bool:
        """Refuses rows of unlike width or dtype; whether something is ``known`` to all workers."""
        everyone = self.comm.all_gather_object((call, known))
        calls = [other for other, _ in everyone]
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise ValueError(
                    f"{self.title} is called differently on the workers, with {other} at rank "
                    f"{rank} and {calls[0]} at rank 0 (per tensor: dtype, requires_grad, shape of "
                    "a row, axes). Pass the same arguments on every worker"
                )
        return all(knows for _, knows in everyone)


def needs_sorted_edges(layer: Any) -> bool:
    """Whether the aggregation may ask for edges sorted by target, in the whole graph's order."""
    known = is_known(layer)
    return not known or any(
        decompose(m) is None and type(m) not in _UNSORTED
        for m in ([layer.aggr_module] if layer.aggr_module is not None else [])
    )


def most_edges(layer: Any, edge_index: DistEdgeIndex, complete: bool) -> int:
    """The most in-edges of a node on any worker, where the aggregation depends on it; else 0."""
    if not complete or not pads(layer):
        return 0

    def make() -> int:
        target = edge_index.ends()[1]
        degrees = torch.bincount(target, minlength=1)
        return maximum(edge_index.plan.comm, [int(degrees.max())], edge_index.device)[0]

    found: int = edge_index.remember("most edges", make)
    return max(found, 1)


def _switches(module: torch.nn.Module, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Attributes that may decide what a message computes: flags, names and numbers."""
    found = [
        (name, value)
        for name, value in module.__dict__.items()
        if name[:1] != "_" and isinstance(value, kinds)
    ]
    return type(module).__name__, *found


# Schedules and kernels ########################################################


def attention_kernel(
    attention: Attention | RelationalTerms,
    edge_index: DistEdgeIndex,
    policy: SARPolicy,
    name: str,
    title: str,
) -> tuple[Kernel, list[Tensor]]:
    """The kernel of a call that is an attention, and its inputs. Made by all workers together.

    Args:
        attention: Scores and values.
        edge_index: The edges.
        policy: The layer's mode and prefetch depth.
        name: The layer's name, for the ledger.
        title: The layer and the rank, for messages.

    Raises:
        IndexError: An edge is of no relation.
    """
    tensors = list(attention.tensors().values())
    if isinstance(attention, RelationalTerms):
        return RelationalAttention(attention, edge_index, policy, name, title), tensors
    covers = covers_of(edge_index, attention, policy, torch.is_grad_enabled())
    schedule = by_shards(shards_of(edge_index), covers.forward, covers.backward)
    return SoftmaxAttention(attention, schedule, policy, name, title), tensors


def aggregation_kernel(
    program: TileProgram,
    edge_index: DistEdgeIndex,
    choice: Choice,
    decomposition: Decomposition,
    policy: SARPolicy,
    name: str,
) -> tuple[Kernel, list[Tensor]]:
    """The kernel of any other call, and its inputs. Made by all workers together.

    Args:
        program: The message.
        edge_index: The edges.
        choice: How the call runs.
        decomposition: The aggregation.
        policy: The layer's policy.
        name: The layer's name, for the ledger.
    """
    needs, most = choice.needs, choice.max_edges
    if needs is None:
        raise RuntimeError("Expected a choice for running in parts")
    if choice.strategy == "chunked":
        key = ("chunks", most)
        chunks = edge_index.remember_together(key, lambda: Chunks(edge_index, most))
        schedule = by_chunks(chunks)
    else:
        schedule = by_shards(shards_of(edge_index))
    rest = schedule, policy, name, most, choice.out_rows
    kernel = Messages(program, decomposition, needs, *rest)
    if choice.strategy == "sequential":
        found = _sums(kernel, edge_index, policy)
        if found is not None:
            return found
    return kernel, kernel.tensors()


def _sums(
    kernel: Messages, edge_index: DistEdgeIndex, policy: SARPolicy
) -> tuple[Sums, list[Tensor]] | None:
    """The same reduction of source rows without messages, where there are kernels for it."""
    program, needs = kernel.program, kernel.needs
    source, number = (needs.source, None) if needs.product is None else needs.product
    if policy.kernels == "off" or source < 0 or len(kernel.decomposition.groups) != 1:
        return None
    layer, rows = program.layer, program.operands[source].tensor
    watched = layer._message_forward_pre_hooks or layer._message_forward_hooks
    group, weight = kernel.decomposition.groups[0], None
    if number is not None:
        weight = program.operands[number].tensor
    if watched or not takes(rows) or group.normalises or needs.pattern:
        return None
    kinds = set(group.kinds)
    extrema = bool(kinds & {"max", "min"})
    if extrema:  # They need the rows again, which a message's graph would have kept.
        plain = weight is None and not kernel.keeps_graphs and rows.dtype != torch.bfloat16
        narrow = all(b.segments.source.dtype == torch.int32 for b in shards_of(edge_index).blocks)
        if not (plain and narrow):
            return None
    if not kinds <= {"sum", "mean", "max", "min"}:
        return None
    learnt = weight is not None and weight.requires_grad
    if learnt and kernel.keeps_graphs:
        return None
    # All workers get here together; whether each has the kernels, they find out together.
    schedule, there = kernel.schedule, ((), ())
    if policy.push != "off" and len(program.numbers("source")) == 1 and not (learnt or extrema):
        record = torch.is_grad_enabled() and rows.requires_grad
        schedule, there = sums_schedule(edge_index, policy, weight, record)
    if why_missing() is not None:
        if schedule.plan.rank == 0:
            warn_if_missing()
        return None
    _check_message(program, edge_index, source, number, kernel.title)
    rest = policy.prefetch, Wire(policy.wire), group.kinds, extrema or learnt, there
    sums = Sums(kernel.name, kernel.title, schedule, *rest)
    sums.needs_gradient = needs.needs_gradient
    return sums, [rows] if weight is None else [rows, weight]


def sums_schedule(
    edge_index: DistEdgeIndex, policy: SARPolicy, weight: Tensor | None, record: bool
) -> tuple[Schedule, Any]:
    """The way of sums of rows, times constant weights or not, and weights that it needs elsewhere.

    By a cover, where rows travel; where all are read in place, owners add up the gradients of their
    rows. All workers call this together; it is made once per structure and kept with it.

    Args:
        edge_index: Distributed edges.
        policy: The layer's policy.
        weight: Constant weights of the edges ``[E]``.
        record: Whether a backward pass may follow.
    """
    shards, comm = shards_of(edge_index), edge_index.plan.comm
    numbered = weight is not None
    # What a narrow wire rounds must not depend on where workers run.
    exact = policy.wire == "exact"
    if comm.world_size == 1:
        return by_shards(shards), ((), ())

    def make() -> tuple[bool, bool]:
        ready = torch.tensor(int(why_missing() is None), device=edge_index.device)
        can = bool(int(comm.all_reduce(ready, "min", label=_PLAN)))
        return can, rows_travel(comm)

    can, travel = edge_index.remember_together("sums", make)
    if not can or (exact and not travel and not record):
        return by_shards(shards), ((), ())
    if travel or not exact:
        split = split_edges(edge_index, SUMS, SUMS, numbered=numbered)
        if split is None:
            return by_shards(shards), ((), ())
        weights = () if weight is None else split.pushed_weights(edge_index, weight)
        return by_shards(shards, split, split), (weights, weights)
    # The same as those of additive attention.
    split = split_edges(edge_index, ALL_PUSHED, ALL_PUSHED, numbered=numbered, by_source=True)
    if split is None:
        return by_shards(shards), ((), ())
    weights = () if weight is None else split.pushed_weights(edge_index, weight)
    return by_shards(shards, None, split), ((), weights)


def _check_message(
    program: TileProgram, edge_index: DistEdgeIndex, source: int, weight: int | None, title: str
) -> None:
    """Raises where the message, tried on an edge, is not what it was when it was analysed."""
    message = program.layer.message
    if getattr(message, "__module__", "").startswith("torch_geometric."):
        return  # What it computes depends on its arguments, flags, names and numbers.
    if edge_index.size(1) == 0 or edge_index.plan.num_local == 0:
        return
    tile = sample(edge_index, 1)
    tensors = [operand.tensor.detach() for operand in program.operands]
    with torch.no_grad(), preserved_attributes(program.layer, buffers=True):
        values = program.gather(tile, tensors, [tensors[k] for k in program.numbers("source")])
        with Products(program, values) as products:
            mapped = program.run(tile, values, Reductions())
    if weight is None:
        same = products.is_source(mapped, values[source])
    else:
        same = products.found(mapped) == (source, weight)
    if not same:
        raise changed_message(title)
