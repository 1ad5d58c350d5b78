r"""Softmax attention that is pushed: the sources' worker goes through the edges for its peers.

Of a pushed target i, its worker p sends the query row to the worker q of the sources, which adds
its edges into a state of its own and returns that (acc, maximum, normaliser); p merges the states,

.. math::
    m = \max(m_1, m_2), \qquad \mathrm{acc} = e^{m_1 - m} \mathrm{acc}_1
        + e^{m_2 - m} \mathrm{acc}_2, \qquad \text{and the normalisers alike.}

In the backward pass p sends what it knows of the target (:class:`Cotangent`, and the query again,
unless q kept it: mode 2), and gets the gradient of the query. Gradients of keys and values fall on
q's own rows, those of parameters on q's share of the sum over workers: nothing is refetched and no
gradient row of a source travels.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_sar.engine.pushed_edges import Pushed, PushedEdges, pushed_edges
from pyg_sar.exchange.cover import ALL_PUSHED, Costs, nearest_costs
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import Use
from pyg_sar.exchange.streams import GradientReturn, RowReturn, ShardStream
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

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator

_SEEDS: Label = ("", "", "agreement")


def row_bytes(attention: Attention, mode: int) -> tuple[Costs, Costs]:
    """Bytes of a pulled row and of a pushed slot, forward and backward. See [Note: law of bytes].

    Args:
        attention: For its shapes and dtypes.
        mode: The policy's mode, 1 or 2.

    Returns:
        ``(pulled, pushed)`` of the forward pass, and of the backward pass.
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


@dataclass(frozen=True, slots=True)
class Covers:
    """The edges between workers in each pass; ``None`` where all rows are pulled.

    See [Note: a cover for each pass].
    """

    forward: PushedEdges | None = None
    backward: PushedEdges | None = None


def edges_to_push(
    edge_index: DistEdgeIndex, attention: Attention, policy: SARPolicy, record: bool
) -> Covers:
    """The edges by the covers for an attention.

    All workers call this together. Edge features stay with the targets' workers, and maxima and
    normalisers would not stand a narrow wire: then all rows are pulled.

    Args:
        edge_index: Distributed edges.
        attention: For its shapes and dtypes.
        policy: Its mode, wire and switch.
        record: Whether a backward pass may follow.
    """
    exact = policy.wire == "exact" and attention.edge_attr is None
    exact &= attention.kind != "tanh"  # which is no softmax: there are no states to merge
    if policy.push == "off" or not exact or attention.value.shape[1:].numel() == 0:
        return Covers()
    forward, backward = row_bytes(attention, policy.mode)
    numbered, everywhere = attention.p > 0, policy.push == "always"
    if policy.mode > 1:
        both = nearest_costs(forward[0] + backward[0], forward[1] + backward[1])
        edges = pushed_edges(edge_index, both, both if everywhere else None, numbered=numbered)
        return Covers(edges, edges)
    costs = nearest_costs(*forward)
    there = pushed_edges(edge_index, costs, costs if everywhere else None, numbered=numbered)
    if not record:
        return Covers(there)
    costs, by_source = nearest_costs(*backward), attention.kind == "additive"
    near = costs if everywhere else ALL_PUSHED if by_source else None
    back = pushed_edges(edge_index, costs, near, numbered=numbered, by_source=by_source)
    return Covers(there, back)


def dropout_seeds(comm: Communicator, attention: Attention) -> list[int]:
    """The workers' seeds: whether a weight is dropped is the same, pulled or pushed.

    All workers call this together.

    Args:
        comm: Their communicator.
        attention: For its dropout, whose seed is this worker's.
    """
    if attention.p == 0:
        return [0] * comm.world_size
    halves = torch.tensor([attention.seed >> 32, attention.seed & 0xFFFFFFFF])
    found = comm.all_gather(halves.to(comm.device), label=_SEEDS)
    return [(int(high) << 32) + int(low) for high, low in found]


class PushedAttention:
    """The pushed edges of one call of a layer. Made by all workers together.

    Args:
        edges: The edges.
        seeds: Of the workers' dropout.
        policy: Its mode and prefetch depth.
        name: The layer's name, for the ledger.
    """

    def __init__(
        self, edges: PushedEdges, seeds: Sequence[int], policy: SARPolicy, name: str
    ) -> None:
        self.edges, self.policy, self.name = edges, policy, name
        self._seeds = seeds
        self._kept: list[tuple[int, list[Tensor]]] = []

    def forward(self, given: Attention, state: AttentionState, record: bool) -> Iterator[None]:
        """Adds the peers' shares to a state, in two steps: after the first, slots are on their way.

        Args:
            given: The attention of this worker's rows, detached.
            state: Of its targets.
            record: Whether a backward pass may follow.
        """
        own = _widened(given)
        returns = _StateReturn(self.edges.slots, state, self.name, self.policy.prefetch)
        queries = [] if given.query is None else [given.query]
        keep = record and self.policy.mode > 1
        use = Use.KEEPS if keep else Use.PASSES
        for unit, (rows, _) in self._slots(queries, "forward", use):
            if keep:
                self._kept.append((unit, rows))
            if unit == 0:
                yield
            else:
                self._make_states(own, unit, rows, returns.start(unit))
                returns.send(unit)
            del rows
        returns.drain()

    def _make_states(
        self, own: Attention, unit: int, queries: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> None:
        """States of a unit's slots, into rows of zeros."""
        for pushed in self.edges.pushed[unit]:
            share = AttentionState(*(part[pushed.rows] for part in parts))
            share.maximum.fill_(-torch.inf)
            attention_(share, self._there(own, pushed, queries), pushed.run.segments)

    def backward(
        self, given: Attention, cotangent: Cotangent, totals: Mapping[str, Tensor], last: bool
    ) -> Iterator[None]:
        """Adds the pushed edges' gradients to those of own rows, in two steps.

        After the first, slots are on their way.

        Args:
            given: The attention of this worker's rows, detached.
            cotangent: Of its targets.
            totals: Gradients to add to, by name, of the cotangent's dtype.
            last: Kept queries may be freed.
        """
        own = _widened(given)
        known = [cotangent.grad_out, cotangent.maximum, cotangent.normaliser, cotangent.delta]
        queries = [] if given.query is None else [given.query]
        kept = dict(self._kept)
        if last:
            self._kept = []
        sent = known if kept else [*known, *queries]
        sums = [totals["query"]] if "query" in totals else []
        returns = GradientReturn(self.edges.slots, sums, self.name, self.policy.prefetch)
        # Edges that are gone through by source alone find slots by an index.
        in_place = given.kind == "additive" and not kept
        use = Use.IN_PLACE if in_place else Use.PASSES
        for unit, (rows, index) in self._slots(sent, "backward", use):
            if unit == 0:
                yield
                continue
            about, asked = rows[: len(known)], rows[len(known) :]
            slots = _Slots(Cotangent(*about), kept.pop(unit) if unit in kept else asked, index)
            del rows, about, asked
            parts = returns.start(unit) if sums else []
            for pushed in self.edges.pushed[unit]:
                into = dict(totals)
                for part in parts:
                    into["query"] = part[pushed.rows]
                self._add_gradients(own, pushed, slots, into)
                del into
            del parts, slots
            if sums:
                returns.send(unit)
        returns.drain()

    def _add_gradients(
        self, own: Attention, pushed: Pushed, slots: _Slots, into: dict[str, Tensor]
    ) -> None:
        """Adds the gradients of a peer's edges to those of own rows and of its slots' queries."""
        numbered = own.p > 0
        if slots.index is None:
            there = self._there(own, pushed, slots.queries)
            known = (getattr(slots.cotangent, f.name)[pushed.rows] for f in fields(Cotangent))
            about, gradients = Cotangent(*known), AttentionGradients(**into)
            by_source = pushed.run.transposed(numbered)
            attention_backward_sources_(gradients, there, about, by_source)
            if own.kind != "additive":
                attention_backward_targets_(gradients, there, about, pushed.run.segments)
            return
        # The unit has one peer, whose slots are read where they lie.
        there = self._there(own, replace(pushed, rows=slice(None)), slots.queries)
        slot = into.pop("query", None)
        if slot is not None:
            into["query"] = slot.new_zeros(slots.cotangent.delta.shape)
        edges = pushed.run.transposed(numbered)
        by_source = replace(edges, source=slots.index.index_select(0, edges.source))
        gradients = AttentionGradients(**into)
        attention_backward_sources_(gradients, there, slots.cotangent, by_source)
        if slot is not None:
            torch.index_select(into["query"], 0, slots.index, out=slot)

    def _slots(
        self, tensors: Sequence[Tensor], phase: str, use: Use
    ) -> Iterator[tuple[int, tuple[list[Tensor], Tensor | None]]]:
        """What peers say of their slots, unit by unit, and where in it they lie."""
        plan = self.edges.slots
        if not tensors:
            return iter([(unit, ([], None)) for unit in range(len(plan.units()))])
        label = (self.name, phase, "query")
        stream = ShardStream(plan, tensors, label, self.policy.prefetch, use=use)
        return ((unit, (rows.tensors, rows.index)) for unit, rows in stream)

    def _there(self, own: Attention, pushed: Pushed, queries: Sequence[Tensor]) -> Attention:
        """The attention of the edges that are pushed to a peer."""
        query = queries[0][pushed.rows].to(own.value.dtype) if queries else None
        key = pushed.run.numbers if own.p > 0 else None
        return replace(own, query=query, drop_key=key, seed=self._seeds[pushed.peer])


@dataclass(frozen=True, slots=True)
class _Slots:
    """What peers say of a unit's slots.

    Attributes:
        cotangent: What the backward pass knows of them.
        queries: Their query rows, if there are any.
        index: Where in these the slots lie, ``[num_rows]``; ``None``: in order.
    """

    cotangent: Cotangent
    queries: list[Tensor]
    index: Tensor | None


class _StateReturn(RowReturn):
    """Sends partial states to the targets' workers, which merge them.

    Args:
        plan: The halo plan of slots.
        state: Of this worker's targets.
        layer: Whom the ledger charges.
        prefetch: Units fetched ahead; 0 leaves nothing in flight.
    """

    def __init__(self, plan: HaloPlan, state: AttentionState, layer: str, prefetch: int) -> None:
        label: Label = (layer, "forward", "state")
        super().__init__(plan, [state.acc, state.maximum, state.normaliser], label, prefetch)
        self._state = state

    def _take(self, peer: int, place: slice, rows: Sequence[Tensor]) -> None:
        self._state.merge_(self.plan.send_rows(peer)[place], AttentionState(*rows))


def _widened(given: Attention) -> Attention:
    """Half precision as the accumulators have it, once for all peers."""
    wide = wide_dtype(given.value.dtype)
    if wide == given.value.dtype:
        return given
    tensors: dict[str, Any] = {name: t.to(wide) for name, t in given.tensors().items()}
    return replace(given, **tensors)
