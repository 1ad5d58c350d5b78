"""Sums and extrema of source rows, and of their products with weights, by kernels: no messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyg_sar.engine.owner_gradients import OwnerRounds
from pyg_sar.engine.reduce import ExtremumReducer, MeanReducer, Reducer, RowReducer, SumReducer
from pyg_sar.engine.rounds import Rounds, ShardRounds
from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.rows import UnitRows
from pyg_sar.kernels.ops import takes, warn_if_missing, why_missing
from pyg_sar.message.dependence import Dependence
from pyg_sar.message.message_checks import Products
from pyg_sar.message.program import TileProgram
from pyg_sar.message.target_index import Reductions
from pyg_sar.policy import SARPolicy


class FusedSum:
    r"""A reduction of source rows, one unit of edges at a time and without tiles.

    A maximum or minimum of them, or a sum or mean of them with weights:

    .. math::
        out_i \mathrel{+}= \sum_{e: t(e) = i} w_e x_{s(e)}, \qquad
        \frac{\partial L}{\partial x_j} \mathrel{+}= \sum_{e: s(e) = j} w_e g_{t(e)}, \qquad
        \frac{\partial L}{\partial w_e} = \langle x_{s(e)}, g_{t(e)} \rangle

    with :math:`w_e = 1` where the message is the source row. Communicates nothing, so that workers
    needn't agree on whether they use it.

    Args:
        program: The message.
        rounds: The way through the edges.
        source: The operand whose source rows are the message.
        weight: The operand with the numbers that they are multiplied by, if they are.

    Attributes:
        rounds: The way through the edges that it takes.
        weight: See above.
        units: The units whose messages were added in this way.
    """

    def __init__(
        self, program: TileProgram, rounds: ShardRounds, source: int, weight: int | None
    ) -> None:
        self._program, self._source = program, source
        self.rounds = self._pulled = rounds
        self._place = program.numbers("source").index(source)
        self.weight = weight
        self.units: set[int] = set()

    def merge(
        self,
        unit: int,
        tensors: Sequence[Tensor],
        rows: UnitRows,
        reducers: Sequence[Reducer],
    ) -> bool:
        """Adds a unit's messages to the reducers' states.

        Args:
            unit: A unit of the rounds.
            tensors: The operands' tensors.
            rows: The unit's rows of each source operand.
            reducers: Sums, means and extrema.

        Returns:
            Whether it did: not where there is no edge, nor where the message, tried on one edge,
            is not what it was when it was analysed.
        """
        if self.rounds.sums_arrive(unit):
            return self._merge(unit, tensors, rows, reducers)
        tile = self.rounds.first_edge(unit)
        if tile is None:
            return False
        tile = replace(tile, source=rows.places(tile.source))
        values = self._program.gather(tile, tensors, rows.tensors)
        with Products(self._program, values) as products:
            mapped = self._program.run(tile, values, Reductions())
        if self.weight is None:
            same = products.is_source(mapped, values[self._source])
        else:
            same = products.found(mapped) == (self._source, self.weight)
        if same:
            return self._merge(unit, tensors, rows, reducers)
        if self.rounds is not self._pulled:
            raise DistributedIndexError(
                f"the message of {type(self._program.layer).__name__} was a weighted source row "
                "when it was analysed, and is not now; other workers sum rows for this one. Set "
                "`layer.policy = pyg_sar.SARPolicy(push='off')`"
            )
        return False

    def _merge(
        self,
        unit: int,
        tensors: Sequence[Tensor],
        rows: UnitRows,
        reducers: Sequence[Reducer],
    ) -> bool:
        segments = self.rounds.segments(unit)
        if segments.source.numel() == 0:
            return False
        wide = segments.source.dtype == torch.int64
        if wide and any(isinstance(r, ExtremumReducer) for r in reducers):
            return False
        segments = replace(segments, source=rows.places(segments.source))
        weight = self._weights(unit, tensors)
        for reducer in _of_rows(reducers):
            reducer.merge_rows(segments, rows.tensors[self._place], weight)
        self.units.add(unit)
        return True

    def _weights(self, unit: int, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """A number for each of the unit's edges, in shard order, in what kernels add up in."""
        if self.weight is None:
            return None
        weight = tensors[self.weight]
        if weight is None:
            raise RuntimeError("The weights of a sum were not kept for its backward pass")
        found = self.rounds.in_shard_order(unit, weight.reshape(-1))
        return found.float() if found.dtype == torch.bfloat16 else found

    def add_by_owners(
        self,
        totals: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        reducers: Sequence[Reducer],
        layer: str,
        prefetch: int,
    ) -> bool:
        """Adds the gradients of own source rows over all edges, if that is the way it takes.

        Args:
            totals: The operands' gradients.
            tensors: The operands' tensors.
            reducers: A sum or a mean.
            layer: Whom the ledger charges.
            prefetch: Units fetched ahead.
        """
        total, (reducer, *others) = totals[self._source], reducers
        if not isinstance(self.rounds, OwnerRounds) or total is None:
            return False
        if others or not isinstance(reducer, SumReducer):
            raise RuntimeError("Owners add up gradients of a single sum or mean")
        gradient, scale = reducer.gradient()

        def own() -> None:
            self.add_gradients(0, totals, tensors, [], reducers)

        self.rounds.add_gradients(total, own, gradient, scale, layer, prefetch)
        return True

    def add_gradients(
        self,
        unit: int,
        totals: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        handed: list[list[Tensor]],
        reducers: Sequence[Reducer],
    ) -> None:
        """Adds a unit's gradients to those of the operands that want one.

        Args:
            unit: A unit of the rounds.
            totals: The operands' gradients; of source operands, those of the unit's rows.
            tensors: The operands' tensors.
            handed: The unit's rows of each source operand, where they were fetched again.
            reducers: Sums, means and extrema.
        """
        rows = handed.pop() if handed else None
        total = totals[self._source]
        if total is not None:
            numbered = self.weight is not None
            transposed = self.rounds.segments(unit, transposed=True, numbered=numbered)
            weight = self._weights(unit, tensors)
            values = None if rows is None else rows[self._place]
            for reducer in _of_rows(reducers):
                reducer.add_row_gradients(transposed, total, values, weight)
            del weight, values
        total = None if self.weight is None else totals[self.weight]
        if total is not None and rows is not None:
            segments = self.rounds.segments(unit)
            sums = [r for r in reducers if isinstance(r, SumReducer)]
            shares = [r.weight_gradient(segments, rows[self._place]) for r in sums]
            # Each edge is in one unit.
            total.view(-1)[self.rounds.columns(unit)] = torch.stack(shares).sum(0).to(total.dtype)


def _of_rows(reducers: Sequence[Reducer]) -> list[RowReducer]:
    return [reducer for reducer in reducers if isinstance(reducer, RowReducer)]


def _reduced_by_kernels(
    reducers: Sequence[Sequence[Reducer]], rows: Tensor, weighted: bool, keeps_graphs: bool
) -> bool:
    """Whether there are kernels for what messages are reduced by."""
    if len(reducers) != 1:
        return False
    kinds = {type(reducer) for reducer in reducers[0]}
    if kinds <= {SumReducer, MeanReducer}:
        return True
    # Extrema need the rows again, which a message's graph would have kept.
    plain = not weighted and not keeps_graphs and rows.dtype != torch.bfloat16
    return plain and kinds <= {SumReducer, MeanReducer, ExtremumReducer}


def fused_sum(
    program: TileProgram,
    rounds: Rounds,
    needs: Dependence,
    keeps_graphs: bool,
    reducers: Sequence[Sequence[Reducer]],
    policy: SARPolicy,
) -> FusedSum | None:
    """The fused way of an aggregation, where it has one and the kernels are there.

    Args:
        program: The message.
        rounds: The way through the edges.
        needs: What the message is.
        keeps_graphs: Source rows are not fetched again for the backward pass.
        reducers: The aggregation's reducers, by group.
        policy: Its switch.
    """
    source, weight = (needs.source, None) if needs.product is None else needs.product
    if policy.kernels == "off" or source < 0 or not isinstance(rounds, ShardRounds):
        return None
    layer = program.layer
    watched = layer._message_forward_pre_hooks or layer._message_forward_hooks
    operands = program.operands
    rows = operands[source].tensor
    if watched or not takes(rows):
        return None
    if not _reduced_by_kernels(reducers, rows, weight is not None, keeps_graphs):
        return None
    if weight is not None and operands[weight].tensor.requires_grad and keeps_graphs:
        return None
    # All workers get here together; whether each has the kernels, they find out together.
    constant = None if weight is None else operands[weight].tensor
    pushes = policy.push != "off" and len(program.numbers("source")) == 1
    pushes &= constant is None or not constant.requires_grad
    pushes &= all(isinstance(reducer, SumReducer) for reducer in reducers[0])
    if pushes:
        by_owners = len(reducers[0]) == 1 and policy.wire == "exact" and torch.is_grad_enabled()
        by_owners &= rows.requires_grad
        # What a narrow wire rounds must not depend on where workers run.
        everywhere = policy.push == "always" or policy.wire != "exact"
        way = rounds.for_sums(constant, everywhere, by_owners)
    else:
        way = rounds
    if why_missing() is not None:
        if rounds.plan.rank == 0:
            warn_if_missing()
        return None
    found = FusedSum(program, rounds, source, weight)
    found.rounds = way
    return found
