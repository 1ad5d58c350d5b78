"""Softmax attention over shards by kernel: scores on the fly, nothing per edge is kept.

The forward pass goes through the shards once, with a state of a row per target. The backward pass
has the shards' source rows fetched again (mode 1) or kept (mode 2), and computes each weight again
from the state's maximum and normaliser. See :mod:`pyg_sar.kernels.attention_ops` for the equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_sar.engine.pushed_attention import Covers, PushedAttention, dropout_seeds
from pyg_sar.engine.pushed_edges import PulledRounds, PushedEdges
from pyg_sar.engine.rounds import Returns, ShardRounds
from pyg_sar.errors import named, refuse_second_derivative
from pyg_sar.exchange.rows import UnitRows, Use
from pyg_sar.exchange.wire import Wire
from pyg_sar.kernels.attention_ops import (
    attention_,
    attention_backward_sources_,
    attention_backward_targets_,
)
from pyg_sar.kernels.attention_terms import Attention, AttentionGradients, AttentionState, Cotangent
from pyg_sar.policy import SARPolicy

_SALT = 0x9E3779B97F4A7C15  # workers number their edges alike, and must not drop alike


class FusedAttention:
    """One call of a layer: its attention, edges and policy. Made by all workers together.

    Args:
        attention: Scores and values (an :class:`~pyg_sar.kernels.attention_terms.Attention`, or
            what a subclass takes); ``key`` and ``value`` of this worker's nodes, ``edge_attr`` by
            column of ``edge_index``, without ``drop_key``.
        rounds: The way through the edges.
        policy: Its mode and prefetch depth.
        name: The layer's name, for the ledger.
        title: The layer and the rank, for messages.
        covers: The edges between workers, where some are pushed.
    """

    sources: tuple[str, ...] = ("value", "key")  # which tensors have a row per source
    use = Use.IN_PLACE  # how fetched rows are read

    def __init__(
        self,
        attention: Any,
        rounds: ShardRounds,
        policy: SARPolicy,
        name: str,
        title: str,
        covers: Covers | None = None,
    ) -> None:
        seed = (attention.seed + _SALT * rounds.plan.rank) % 2**64
        self.attention = replace(attention, seed=seed)
        self.rounds, self.policy, self.name, self.title = rounds, policy, name, title
        self.names = list(attention.tensors())
        self._sources = [name for name in self.names if name in self.sources]
        self._wire = Wire(policy.wire)
        self._kept: list[tuple[int, UnitRows]] = []
        covers = covers or Covers()
        seeds: list[int] = []
        if covers.forward or covers.backward:
            seeds = dropout_seeds(rounds.plan.comm, self.attention)
        self._there, self.rounds = self._way(rounds, covers.forward, seeds)
        self._back, self.rounds_back = self._there, self.rounds
        if covers.backward is not covers.forward:
            self._back, self.rounds_back = self._way(rounds, covers.backward, seeds)

    def _way(
        self, rounds: ShardRounds, edges: PushedEdges | None, seeds: list[int]
    ) -> tuple[PushedAttention | None, ShardRounds]:
        """The pushed edges of a pass, and the way through the others."""
        if edges is None:
            return None, rounds
        pushed = PushedAttention(edges, seeds, self.policy, self.name)
        return pushed, PulledRounds(rounds, edges)

    def forward(self, given: Any, record: bool) -> tuple[Tensor, AttentionState]:
        """The output ``[N, H, C]`` and the state after the last shard.

        Args:
            given: The attention, detached.
            record: Whether a backward pass may follow.
        """
        rounds = self.rounds
        for ledger in rounds.plan.comm.ledgers:
            ledger.count("fused attention")
        state = self.start(given)
        if self._there is not None:
            pushed = self._there.forward(given, state, record)
            self._around(pushed, lambda own: self.add(state, given, 0, own), given)
        for unit, rows in self._stream(rounds, given, "forward", "fetch"):
            if record and self.policy.mode > 1:
                self._kept.append((unit, rows))
            if unit != 0 or self._there is None:
                self.add(state, given, unit, rows)
            del rows
        return state.finish().to(given.tensors()[self._sources[0]].dtype), state

    def backward(
        self, given: Any, cotangent: Cotangent, wanted: Iterable[str], last: bool
    ) -> dict[str, Tensor]:
        """Gradients by name, of the inputs' dtypes.

        Args:
            given: The attention, detached.
            cotangent: Of the targets.
            wanted: Whose gradients.
            last: Kept rows may be freed.
        """
        wide = cotangent.grad_out.dtype
        tensors = given.tensors()
        totals = {name: _zeros(tensors[name], wide) for name in wanted}
        wanted_sources = [name for name in self._sources if name in totals]
        # Half precision is summed in float32 here, and travels as it is.
        returned = [
            totals[name] if tensors[name].dtype == wide else _zeros(tensors[name])
            for name in wanted_sources
        ]
        returns = self.rounds_back.returns(
            returned, self.name, self.policy.prefetch, self.policy.mode == 1, self._wire
        )
        if self._back is not None:
            pushed = self._back.backward(given, cotangent, totals, last)
            self._around(
                pushed, lambda own: self.add_gradients(totals, given, cotangent, 0, own), given
            )
        for unit, rows in self._again(given, last):
            if unit == 0 and self._back is not None:
                continue
            sums = dict(totals)
            sent = returns.start(unit) if wanted_sources else []
            if unit != 0:
                sums |= {
                    name: rows_ if rows_.dtype == wide else torch.zeros_like(rows_, dtype=wide)
                    for name, rows_ in zip(wanted_sources, sent, strict=True)
                }
            if sums:
                self.add_gradients(sums, given, cotangent, unit, rows)
            del rows
            self._send(unit, sums, wanted_sources, sent, returns)
            del sums, sent
        returns.drain()
        for name, total in zip(wanted_sources, returned, strict=True):
            if total is not totals[name]:
                totals[name] += total
        return {name: total.to(tensors[name].dtype) for name, total in totals.items()}

    def _around(self, pushed: Iterator[None], own: Callable[[UnitRows], None], given: Any) -> None:
        """Goes through the own edges between the steps of the pushed ones."""
        next(pushed)
        own(UnitRows([given.tensors()[name] for name in self._sources]))
        for _ in pushed:
            pass

    # One unit ################################################################

    def start(self, given: Any) -> AttentionState:
        """The state before the first unit."""
        return AttentionState.start(self.rounds.in_degree.numel(), given.value)

    def add(self, state: AttentionState, given: Any, unit: int, rows: UnitRows) -> None:
        """Adds a unit's edges to the state; ``rows`` are its rows of each source tensor."""
        shard = self._shard(given, unit, rows, self.rounds)
        attention_(state, shard, self.rounds.segments(unit))

    def add_gradients(
        self,
        sums: dict[str, Tensor],
        given: Any,
        cotangent: Cotangent,
        unit: int,
        rows: UnitRows,
    ) -> None:
        """Adds a unit's gradients, by name: of source tensors, those of the unit's rows."""
        rounds = self.rounds_back
        shard = self._shard(given, unit, rows, rounds)
        columns = rounds.columns(unit) if "edge_attr" in sums else slice(0, 0)
        gradients = AttentionGradients(**sums)
        if "edge_attr" in sums:
            total = sums["edge_attr"]
            # Edges in order have their own part of the total; others take a buffer.
            part = total[columns] if isinstance(columns, slice) else total[: columns.numel()]
            part = part if isinstance(columns, slice) else torch.zeros_like(part)
            gradients = replace(gradients, edge_attr=part)
        numbered = shard.edge_attr is not None or shard.drop_key is not None
        transposed = rounds.segments(unit, transposed=True, numbered=numbered)
        attention_backward_sources_(gradients, shard, cotangent, transposed)
        if shard.kind != "additive":
            attention_backward_targets_(gradients, shard, cotangent, rounds.segments(unit))
        if "edge_attr" in sums and not isinstance(columns, slice):
            sums["edge_attr"][columns] = _present(gradients.edge_attr)

    def _send(
        self,
        unit: int,
        sums: dict[str, Tensor],
        names: list[str],
        sent: list[Tensor],
        returns: Returns,
    ) -> None:
        if not names:
            return
        if unit != 0:
            for name, rows in zip(names, sent, strict=True):
                if rows is not sums[name]:
                    rows.copy_(sums[name])
        returns.send(unit)

    # Shards ##################################################################

    def _stream(
        self, rounds: ShardRounds, given: Any, phase: str, kind: str
    ) -> Iterable[tuple[int, UnitRows]]:
        sources = [given.tensors()[name] for name in self._sources]
        label, prefetch = (self.name, phase, kind), self.policy.prefetch
        use = self.use if self.policy.mode == 1 else Use.KEEPS  # for the backward pass
        return rounds.stream(sources, label, prefetch, self._wire, use)

    def _again(self, given: Any, last: bool) -> Iterator[tuple[int, UnitRows]]:
        """Each unit's source rows once more."""
        if self.policy.mode == 1:
            for ledger in self.rounds.plan.comm.ledgers:
                ledger.count("recompute")
            yield from self._stream(self.rounds_back, given, "backward", "refetch")
            return
        kept = list(reversed(self._kept))
        if last:
            self._kept = []
        while kept:
            yield kept.pop()

    def _shard(self, given: Attention, unit: int, rows: UnitRows, rounds: ShardRounds) -> Attention:
        """The attention of one shard."""
        own: dict[str, Any] = dict(zip(self._sources, rows.tensors, strict=True))
        own["places"] = rows.index
        if given.edge_attr is None and given.p == 0:
            return _with(given, own)
        columns = rounds.columns(unit)
        edge_attr = given.edge_attr
        if edge_attr is not None:
            edge_attr = edge_attr[columns]
        key: Tensor | None = None
        if given.p > 0 and isinstance(columns, slice):
            key = torch.arange(columns.start, columns.stop, device=given.value.device)
        elif isinstance(columns, Tensor) and given.p > 0:
            key = columns
        return _with(given, {**own, "edge_attr": edge_attr, "drop_key": key})


class _Attend(torch.autograd.Function):
    """Keeps a row per node: inputs, output, maximum and normaliser.

    The output is kept as an alias. Where it was changed in place since, which PyG's own layers
    allow too, the backward pass computes it again.
    """

    @staticmethod
    def forward(ctx: Any, run: FusedAttention, *tensors: Tensor) -> Tensor:
        given = _with(run.attention, dict(zip(run.names, tensors, strict=True)))
        out, state = run.forward(given, record=True)
        ctx.save_for_backward(*tensors, state.maximum, state.normaliser)
        ctx.run, ctx.out = run, out.detach()
        ctx.version = ctx.out._version
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        run: FusedAttention = ctx.run
        refuse_second_derivative(run.title, "need SARPolicy(mode=3)")
        *tensors, maximum, normaliser = ctx.saved_tensors
        given = dict(zip(run.names, (t.detach() for t in tensors), strict=True))
        wanted = [n for n, need in zip(run.names, ctx.needs_input_grad[1:], strict=True) if need]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        with named(f"the backward pass of {run.title}"):
            attention, out = _with(run.attention, given), ctx.out
            if out._version != ctx.version:
                out = run.forward(attention, record=False)[0]
            cotangent = Cotangent.of(gradient, out, maximum, normaliser)
            del out
            if not keep:
                ctx.out = None
            found = run.backward(attention, cotangent, wanted, last=not keep)
        return (None, *[found.get(name) for name in run.names])


def attend(run: FusedAttention) -> Tensor:
    """Runs the attention, recorded for autograd where a gradient is wanted: ``[N, H, C]``."""
    tensors = list(run.attention.tensors().values())
    detached = {n: t.detach() for n, t in run.attention.tensors().items()}
    attention, run.attention = run.attention, _with(run.attention, detached)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        out: Tensor = _Attend.apply(run, *tensors)
        # Nothing but shapes of these is asked for later; autograd has what it needs.
        run.attention = _with(
            attention, {n: t.new_zeros(()).expand(t.shape) for n, t in detached.items()}
        )
        return out
    with torch.no_grad():
        return run.forward(run.attention, record=False)[0]


def _with(attention: Any, tensors: Mapping[str, Any]) -> Any:
    """The attention with other tensors."""
    return replace(attention, **tensors)


def _zeros(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows in one piece each, which those of a layer's keys and values needn't be."""
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _present(value: Tensor | None) -> Tensor:
    if value is None:
        raise RuntimeError("A tensor that the attention needs is not there")
    return value
