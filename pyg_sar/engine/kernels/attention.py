r"""Softmax attention: scores on the fly, nothing per edge is kept.

The forward pass goes through the edges once, with a state of a row per target. The backward pass
has the source rows fetched again (mode 1) or kept (mode 2), and computes each weight again from the
state's maximum and normaliser. See :mod:`pyg_sar.kernels.attention_ops` for the equations.

*There*, a peer's worker adds its edges into a state of its own, from the target's query, and
returns that (acc, maximum, normaliser); the target's worker merges the states,

.. math::
    m = \max(m_1, m_2), \qquad \mathrm{acc} = e^{m_1 - m} \mathrm{acc}_1
        + e^{m_2 - m} \mathrm{acc}_2, \qquad \text{and the normalisers alike.}

In the backward pass what is known of the target goes there (:class:`Cotangent`, and the query
again, unless it was kept: mode 2), and the gradient of the query comes back. Gradients of keys and
values fall on the worker's own rows, those of parameters on its share of the sum over workers:
nothing is fetched again and no gradient row of a source travels.

[Note: law of bytes] Per row, with H heads of C channels, K and Q values of a key and of a query
(additive: H; else H C; 0 where there is none), b bytes per value and w per value of accumulators,
in modes 1 and 2:

==========  ===========================  =====================================================
pass        pulled row                   pushed slot
==========  ===========================  =====================================================
forward     (H C + K) b                  Q b there, (H C + 2 H) w back
backward    2 or 1 times (H C + K) b     (H C + 3 H) w and Q b (mode 1) there, Q w back
==========  ===========================  =====================================================

[Note: a cover for each pass] In mode 1 nothing of the forward pass is left that the backward pass
would find at one end of an edge, so each pass has a cover of its own. That of the backward pass is
mostly pushed: a pulled row is twice as dear, as it comes and its gradient goes. Where all cuts are
so dense that covers save nothing, bytes fall from 3 (H C + K) b per halo row, the law of SAR's case
2, to (H C + K) b and about as much for each target in a pair of workers. Between workers that read
each other's memory all of the backward pass is pushed with additive scores: targets are read where
they lie, and none but gradients of their narrow queries are written for others. Mode 2 keeps rows,
hence one cover for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_sar.engine.cuts import SplitEdges, split_edges
from pyg_sar.engine.reducers import present
from pyg_sar.engine.run import Kernel, Pass
from pyg_sar.engine.schedule import Schedule
from pyg_sar.exchange.cover import ALL_PUSHED, Costs, nearest_costs
from pyg_sar.exchange.rows import UnitRows, add_distinct_rows
from pyg_sar.exchange.wire import wire_of
from pyg_sar.kernels.attention_ops import (
    attention_,
    attention_backward_sources_,
    attention_backward_targets_,
)
from pyg_sar.kernels.attention_terms import (
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
    wide_dtype,
)
from pyg_sar.ledger import Label
from pyg_sar.policy import SARPolicy
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Block

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator

_SEEDS: Label = ("", "", "agreement")
_SALT = 0x9E3779B97F4A7C15  # workers number their edges alike, and must not drop alike


class SoftmaxAttention(Kernel):
    """One call of a layer. Made by all workers together.

    Its inputs are the attention's tensors, in their order.

    Args:
        attention: Scores and values (an :class:`~pyg_sar.kernels.attention_terms.Attention`, or
            what a subclass takes); ``key`` and ``value`` of this worker's nodes, ``edge_attr`` by
            column of ``edge_index``. ``drop_key``: which heads of each edge are kept,
            ``[E, 1]``; ``None``: the seed tells.
        schedule, policy: The way through the edges; mode and prefetch depth.
        name, title: Of the layer: for the ledger, and with the rank for messages.
        sent: ``drop_key`` of pushed edges, by unit from 1 on, of the forward and of the backward
            pass.
    """

    sources: tuple[str, ...] = ("value", "key")  # which tensors have a row per source
    in_place = True  # fetched rows are read where they lie
    reads_output = True

    def __init__(
        self,
        attention: Any,
        schedule: Schedule,
        policy: SARPolicy,
        name: str,
        title: str,
        sent: Sequence[Sequence[Tensor]] = ((), ()),
    ) -> None:
        plan = schedule.plan
        self.schedule, self.mode, self.name, self.title = schedule, policy.mode, name, title
        self.prefetch, self.wire = policy.prefetch, wire_of(policy.wire)
        seed = (attention.seed + _SALT * plan.rank) % 2**64
        tensors = attention.tensors()
        self.names = list(tensors)
        # Nothing but shapes of these is asked for later; autograd has what it needs.
        bare = {n: t.detach().new_zeros(()).expand(t.shape) for n, t in tensors.items()}
        self.drop_key, self.sent = attention.drop_key, sent
        self.attention = replace(attention, seed=seed, drop_key=None, **bare)
        self.source_names = [name for name in self.names if name in self.sources]
        self.seeds: list[int] = []
        if schedule.forward[0].there or schedule.backward[0].there:
            told = self.drop_key is not None
            self.seeds = (
                [0] * plan.world_size if told else _dropout_seeds(plan.comm, self.attention)
            )
        self.kept: dict[tuple[bool, int], UnitRows] = {}  # of stages there, and here

    def given(self, tensors: Iterable[Tensor]) -> Any:
        """The attention of these tensors, in the order of :attr:`names`."""
        return replace(self.attention, **dict(zip(self.names, tensors, strict=True)))

    def forward(self, tensors: Sequence[Tensor], record: bool) -> AttentionForward:
        for ledger in self.schedule.plan.comm.ledgers:
            ledger.count("fused attention")
        return AttentionForward(self, self.given(tensors), record)

    def saved(self, tensors: Sequence[Tensor], done: AttentionForward) -> list[Tensor]:
        return [*tensors, done.state.maximum, done.state.normaliser]

    def inputs(self, saved: Sequence[Tensor]) -> list[Tensor]:
        return list(saved[: len(self.names)])

    def cotangent(
        self, gradients: Sequence[Tensor], saved: Sequence[Tensor], output: Tensor
    ) -> Cotangent:
        maximum, normaliser = saved[-2:]
        bias = saved[self.names.index("bias")] if "bias" in self.names else None
        return Cotangent.of(gradients[0], output, maximum, normaliser, bias)

    def backward(
        self, cotangent: Cotangent, saved: Sequence[Tensor], wanted: Sequence[bool], last: bool
    ) -> AttentionBackward:
        names = list(compress(self.names, wanted))
        kept = dict(self.kept)
        if last:
            self.kept.clear()
        return AttentionBackward(self, self.given(saved[:-2]), cotangent, names, kept)

    # One block ###############################################################

    def start(self, given: Any) -> AttentionState:
        """The state before the first block."""
        return AttentionState.start(self.schedule.in_degree.numel(), given.value)

    def add(self, state: AttentionState, given: Any, block: Block, rows: UnitRows) -> None:
        """Adds a block's edges to the state; ``rows`` are its rows of each source tensor."""
        attention_(state, self._of_block(given, block, rows), block.segments)

    def add_gradients(
        self,
        sums: dict[str, Tensor],
        given: Any,
        cotangent: Cotangent,
        block: Block,
        rows: UnitRows,
    ) -> None:
        """Adds a block's gradients, by name: of source tensors, those of the unit's rows."""
        shard = self._of_block(given, block, rows)
        columns = block.columns if "edge_attr" in sums else slice(0, 0)
        gradients = AttentionGradients(**sums)
        if "edge_attr" in sums:
            total = sums["edge_attr"]
            # Edges in order have their own part of the total; others take a buffer.
            part = total[columns] if isinstance(columns, slice) else total[: columns.numel()]
            part = part if isinstance(columns, slice) else torch.zeros_like(part)
            gradients = replace(gradients, edge_attr=part)
        numbered = shard.edge_attr is not None or shard.drop_key is not None
        attention_backward_sources_(gradients, shard, cotangent, block.transposed(numbered))
        if not shard.score.by_source:
            attention_backward_targets_(gradients, shard, cotangent, block.segments)
        if "edge_attr" in sums and not isinstance(columns, slice):
            sums["edge_attr"][columns] = present(gradients.edge_attr)

    def _of_block(self, given: Attention, block: Block, rows: UnitRows) -> Attention:
        """The attention of the edges of a block."""
        own: dict[str, Any] = dict(zip(self.source_names, rows.tensors, strict=True))
        own["places"] = rows.index
        if given.edge_attr is None and given.p == 0:
            return replace(given, **own)
        columns = block.columns
        edge_attr = None if given.edge_attr is None else given.edge_attr[columns]
        key = self.drop_keys(columns, given.value.device) if given.p > 0 else None
        return replace(given, **own, edge_attr=edge_attr, drop_key=key)

    def drop_keys(self, columns: Tensor | slice, device: torch.device) -> Tensor:
        """The keys by which dropout knows the edges in these columns."""
        if self.drop_key is not None:
            return self.drop_key[columns]
        if isinstance(columns, slice):
            return torch.arange(columns.start, columns.stop, device=device)
        return columns

    def there(
        self, own: Attention, block: Block, queries: Sequence[Tensor], backward: bool = False
    ) -> Attention:
        """The attention of the edges that are gone through for a peer."""
        peer = self.schedule.plan.peers[block.unit][0]
        query = queries[0].to(own.value.dtype) if queries else None
        key: Any = block.columns if own.p > 0 else None
        if key is not None and self.drop_key is not None:
            key = self.sent[int(backward)][block.unit - 1]
        return replace(own, query=query, drop_key=key, seed=self.seeds[peer])


class AttentionForward(Pass):
    """Adds blocks to the states of own targets, and to states for peers.

    Attributes:
        state: Of own targets. Where rows come here, its memory is taken when they are there.
    """

    state: AttentionState

    def __init__(self, kernel: SoftmaxAttention, given: Any, record: bool) -> None:
        self._kernel, self._given = kernel, given
        self._keep = record and kernel.mode > 1
        self.in_place = kernel.in_place and kernel.mode == 1
        tensors = given.tensors()
        self.sources = [tensors[name] for name in kernel.source_names]
        if kernel.schedule.forward[0].there:
            self._own = _widened(given)
            self.slots = [] if given.query is None else [given.query]
            self.state = kernel.start(given)
            self.answers = [self.state.acc, self.state.maximum, self.state.normaliser]

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        if self._keep:
            self._kernel.kept[False, block.unit] = rows
        if "state" not in self.__dict__:
            self.state = self._kernel.start(self._given)
        self._kernel.add(self.state, self._given, block, rows)

    def add_there_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        if self._keep:
            self._kernel.kept[True, block.unit] = rows
        share = AttentionState(*into)
        share.maximum.fill_(-torch.inf)
        attention_(share, self._kernel.there(self._own, block, rows.tensors), block.segments)

    def merge_(self, index: Tensor, rows: Sequence[Tensor]) -> None:
        self.state.merge_(index, AttentionState(*rows))

    def finish(self) -> list[Tensor]:
        """The output, ``[num_targets, H, C]``."""
        if "state" not in self.__dict__:  # There were no edges.
            self.state = self._kernel.start(self._given)
        out = self.state.finish()
        if "bias" in self._kernel.names:
            out += self._given.bias
        return [out.to(self.sources[0].dtype)]


class AttentionBackward(Pass):
    """Adds gradients up by source, by target and, of parameters, over all edges."""

    phase = "backward"
    kinds = ("refetch", "gradient", "query", "gradient")

    def __init__(
        self,
        kernel: SoftmaxAttention,
        given: Any,
        cotangent: Cotangent,
        wanted: list[str],
        kept: dict[tuple[bool, int], UnitRows],
    ) -> None:
        self._kernel, self._given, self._cotangent, self._kept = kernel, given, cotangent, kept
        self.in_place = kernel.in_place
        self._wanted = wanted
        self._sources = [name for name in kernel.source_names if name in wanted]
        if kernel.mode == 1:
            tensors = given.tensors()
            self.in_flight = False
            self.sources = [tensors[name] for name in kernel.source_names]
            for ledger in kernel.schedule.plan.comm.ledgers:
                ledger.count("recompute")
        if kernel.schedule.backward[0].there:
            self._own = _widened(given)
            known = cotangent.grad_out, cotangent.maximum, cotangent.normaliser, cotangent.delta
            asked = given.query is not None and kernel.mode == 1
            self.slots = [*known, given.query] if asked else list(known)
            # Edges that are gone through by source alone find slots by an index.
            self.slots_in_place = given.score.by_source and kernel.mode == 1
        else:
            _ = self.answers  # Rows come here: sums for them are needed at once.

    @cached_property
    def answers(self) -> list[Tensor]:  # type: ignore[override]
        """Takes memory for all gradients, when rows are there; returns that of queries."""
        tensors, wide = self._given.tensors(), self._cotangent.grad_out.dtype
        summed = [name for name in self._wanted if name != "bias"]
        self._totals = {name: _zeros(tensors[name], wide) for name in summed}
        # Half precision is summed in float32 here, and travels as it is.
        self.returned = [
            self._totals[name] if tensors[name].dtype == wide else _zeros(tensors[name])
            for name in self._sources
        ]
        return [self._totals["query"]] if "query" in self._totals else []

    def add_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        rows = self._kept.pop((False, block.unit), rows)
        sums = dict(self._totals)
        if block.unit:
            wide = self._cotangent.grad_out.dtype
            for name, part in zip(self._sources, into, strict=True):
                sums[name] = part if part.dtype == wide else torch.zeros_like(part, dtype=wide)
        if sums:
            given, cotangent = self._given, self._cotangent
            self._kernel.add_gradients(sums, given, cotangent, block, rows)
        if block.unit:
            for name, part in zip(self._sources, into, strict=True):
                if part is not sums[name]:
                    part.copy_(sums[name])

    def add_there_(self, block: Block, rows: UnitRows, into: list[Tensor]) -> None:
        kernel, own = self._kernel, self._own
        about, asked = Cotangent(*rows.tensors[:4]), rows.tensors[4:]
        if (True, block.unit) in self._kept:
            asked = self._kept.pop((True, block.unit)).tensors
        there = kernel.there(own, block, asked, backward=True)
        sums = dict(self._totals)
        if into:
            sums["query"] = into[0]
        edges = block.transposed(numbered=own.p > 0)
        if rows.index is None:
            gradients = AttentionGradients(**sums)
            attention_backward_sources_(gradients, there, about, edges)
            if not own.score.by_source:
                attention_backward_targets_(gradients, there, about, block.segments)
            return
        # Slots are read where they lie.
        if into:
            sums["query"] = into[0].new_zeros(about.delta.shape)
        edges = replace(edges, source=rows.index.index_select(0, edges.source))
        attention_backward_sources_(AttentionGradients(**sums), there, about, edges)
        if into:
            torch.index_select(sums["query"], 0, rows.index, out=into[0])

    def merge_(self, index: Tensor, rows: Sequence[Tensor]) -> None:
        add_distinct_rows(self.answers[0], index, rows[0])

    def finish(self) -> list[Tensor | None]:
        """The gradients of the inputs, of their dtypes."""
        for name, total in zip(self._sources, self.returned, strict=True):
            if total is not self._totals[name]:
                self._totals[name] += total
        totals, tensors = self._totals, self._given.tensors()
        if "bias" in self._wanted:
            totals["bias"] = self._cotangent.grad_out.sum(0)
        return [
            totals[name].to(tensors[name].dtype) if name in totals else None
            for name in self._kernel.names
        ]


def _widened(given: Attention) -> Attention:
    """Half precision as the accumulators have it, once for all peers."""
    wide = wide_dtype(given.value.dtype)
    if wide == given.value.dtype:
        return given
    tensors: dict[str, Any] = {name: t.to(wide) for name, t in given.tensors().items()}
    return replace(given, **tensors)


def _zeros(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows in one piece each, which those of a layer's keys and values needn't be."""
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


# Which edges are pushed #######################################################


def row_bytes(attention: Attention, mode: int) -> tuple[Costs, Costs]:
    """Bytes of a pulled row and of a pushed slot, of the forward and of the backward pass. See
    [Note: law of bytes].
    """
    narrow, wide = attention.value.element_size(), wide_dtype(attention.value.dtype).itemsize
    heads, channels = attention.value.shape[1:]
    row = heads * channels

    def width(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.shape[1:].numel()

    query = width(attention.query)
    pull = (row + width(attention.key)) * narrow
    forward = pull, query * narrow + (row + 2 * heads) * wide
    there = (2 - mode) * query * narrow + (row + 3 * heads) * wide
    return forward, ((3 - mode) * pull, there + query * wide)


def covers_of(
    edge_index: DistEdgeIndex, attention: Attention, policy: SARPolicy, record: bool
) -> tuple[SplitEdges | None, SplitEdges | None]:
    """How the edges between workers are split for each pass; ``None`` where all rows are pulled.

    See [Note: a cover for each pass]. ``record``: a backward pass may follow. All workers call this
    together.
    """
    forward, backward = row_bytes(attention, policy.mode)
    numbered = attention.p > 0
    if policy.mode > 1:
        both = nearest_costs(forward[0] + backward[0], forward[1] + backward[1])
        split = split_edges(edge_index, both, None, numbered=numbered)
        return split, split
    there = split_edges(edge_index, nearest_costs(*forward), None, numbered=numbered)
    if not record:
        return there, None
    costs, by_source = nearest_costs(*backward), attention.score.by_source
    near = ALL_PUSHED if by_source else None
    back = split_edges(edge_index, costs, near, numbered=numbered, by_source=by_source)
    return there, back


def _dropout_seeds(comm: Communicator, attention: Any) -> list[int]:
    """The workers' seeds, of which the attention has this one's: whether a weight is dropped is the
    same at either end of an edge. All workers call this together.
    """
    if attention.p == 0:
        return [0] * comm.world_size
    halves = torch.tensor([attention.seed >> 32, attention.seed & 0xFFFFFFFF])
    found = comm.all_gather(halves.to(comm.device), label=_SEEDS)
    return [(int(high) << 32) + int(low) for high, low in found]
