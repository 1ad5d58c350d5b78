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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pyg_sar.attention_ops import (
    attention_,
    attention_backward_sources_,
    attention_backward_targets_,
)
from pyg_sar.attention_terms import (
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
    wide_dtype,
)
from pyg_sar.cover import Costs, nearest_costs
from pyg_sar.halo import HaloPlan
from pyg_sar.index_space import DistEdgeIndex
from pyg_sar.ledger import Label
from pyg_sar.policy import SARPolicy
from pyg_sar.pushed_edges import Pushed, PushedEdges, pushed_edges
from pyg_sar.streams import GradientReturn, RowReturn, ShardStream

_SEEDS: Label = ("", "", "agreement")


def row_bytes(attention: Attention, mode: int) -> Costs:
    """Bytes of a pulled row and of a pushed slot, forward and backward. See [Note: law of bytes].

    Args:
        attention: For its shapes and dtypes.
        mode: The policy's mode, 1 or 2.
    """
    narrow, wide = attention.value.element_size(), wide_dtype(attention.value.dtype).itemsize
    heads, channels = attention.value.shape[1:]
    row = heads * channels

    def width(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.shape[1:].numel()

    query = width(attention.query)
    pull = (4 - mode) * (row + width(attention.key)) * narrow
    there = (2 - mode) * query * narrow + (row + 3 * heads) * wide
    return pull, query * narrow + (row + 2 * heads) * wide + there + query * wide


def edges_to_push(
    edge_index: DistEdgeIndex, attention: Attention, policy: SARPolicy
) -> PushedEdges | None:
    """The edges by the cover for an attention; ``None`` where all rows are to be pulled.

    All workers call this together. Edge features stay with the targets' workers, and maxima and
    normalisers would not stand a narrow wire: then all rows are pulled, too.

    Args:
        edge_index: Distributed edges.
        attention: For its shapes and dtypes.
        policy: Its mode, wire and switch.
    """
    exact = policy.wire == "exact" and attention.edge_attr is None
    exact &= attention.kind != "tanh"  # which is no softmax: there are no states to merge
    if policy.push == "off" or not exact or attention.value.shape[1:].numel() == 0:
        return None
    costs = nearest_costs(*row_bytes(attention, policy.mode))
    return pushed_edges(edge_index, costs, policy.push == "always")


class PushedAttention:
    """The pushed edges of one call of a layer. Made by all workers together.

    Args:
        edges: The edges.
        attention: For its shapes and dropout, whose seed is this worker's.
        policy: Its mode and prefetch depth.
        name: The layer's name, for the ledger.
    """

    def __init__(
        self, edges: PushedEdges, attention: Attention, policy: SARPolicy, name: str
    ) -> None:
        self.edges, self.policy, self.name = edges, policy, name
        self._kept: list[tuple[int, list[Tensor]]] = []
        comm = edges.plan.comm
        self._seeds = [0] * comm.world_size
        if attention.p > 0:
            # Whether a weight is dropped is the same function of the edge, pulled or pushed.
            halves = torch.tensor([attention.seed >> 32, attention.seed & 0xFFFFFFFF])
            found = comm.all_gather(halves.to(comm.device), label=_SEEDS)
            self._seeds = [(int(high) << 32) + int(low) for high, low in found]

    def forward(self, given: Attention, state: AttentionState, record: bool) -> None:
        """Adds the peers' shares to a state.

        Args:
            given: The attention of this worker's rows, detached.
            state: Of its targets.
            record: Whether a backward pass may follow.
        """
        own = _widened(given)
        returns = _StateReturn(self.edges.slots, state, self.name, self.policy.prefetch)
        queries = [] if given.query is None else [given.query]
        for unit, rows in self._slots(queries, "forward"):
            if record and self.policy.mode > 1:
                self._kept.append((unit, rows))
            if unit != 0:
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
    ) -> None:
        """Adds the pushed edges' gradients to those of own rows.

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
        for unit, rows in self._slots(sent, "backward"):
            asked = kept.pop(unit) if unit in kept else rows[len(known) :]
            if unit != 0:
                parts = returns.start(unit) if sums else []
                about = Cotangent(*rows[: len(known)])
                self._add_gradients(own, unit, asked, about, totals, parts)
                del parts, about
                if sums:
                    returns.send(unit)
            del rows, asked
        returns.drain()

    def _add_gradients(
        self,
        own: Attention,
        unit: int,
        queries: Sequence[Tensor],
        cotangent: Cotangent,
        totals: Mapping[str, Tensor],
        parts: Sequence[Tensor],
    ) -> None:
        """Adds a unit's gradients to those of own rows, and to its slots', ``parts``."""
        for pushed in self.edges.pushed[unit]:
            there = self._there(own, pushed, queries)
            about = Cotangent(*(getattr(cotangent, f.name)[pushed.rows] for f in fields(Cotangent)))
            into = dict(totals)
            for part in parts:
                into["query"] = part[pushed.rows]
            gradients = AttentionGradients(**into)
            by_source = pushed.run.transposed(there.drop_key is not None)
            attention_backward_sources_(gradients, there, about, by_source)
            attention_backward_targets_(gradients, there, about, pushed.run.segments)

    def _slots(self, tensors: Sequence[Tensor], phase: str) -> Iterator[tuple[int, list[Tensor]]]:
        """What peers say of their slots, unit by unit."""
        plan = self.edges.slots
        if not tensors:
            return iter([(unit, []) for unit in range(len(plan.units()))])
        label = (self.name, phase, "query")
        stream = ShardStream(plan, tensors, label, self.policy.prefetch)
        return ((unit, rows.tensors) for unit, rows in stream)

    def _there(self, own: Attention, pushed: Pushed, queries: Sequence[Tensor]) -> Attention:
        """The attention of the edges that are pushed to a peer."""
        query = queries[0][pushed.rows].to(own.value.dtype) if queries else None
        key = pushed.run.numbers if own.p > 0 else None
        return replace(own, query=query, drop_key=key, seed=self._seeds[pushed.peer])


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
