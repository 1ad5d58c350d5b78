"""Sums of source rows by kernel: where a message is a source row, none is materialized."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pyg_sar.ops import takes, warn_if_missing, why_missing
from pyg_sar.policy import SARPolicy
from pyg_sar.program import TileProgram
from pyg_sar.reduce import MeanReducer, Reducer, SumReducer
from pyg_sar.rounds import Rounds, ShardRounds
from pyg_sar.target_index import Reductions


class FusedSum:
    r"""A sum or mean of source rows, one unit of edges at a time and without tiles.

    .. math::
        out_i \mathrel{+}= \sum_{e: t(e) = i} x_{s(e)}, \qquad
        \frac{\partial L}{\partial x_j} \mathrel{+}= \sum_{e: s(e) = j} g_{t(e)}

    Communicates nothing, so that workers needn't agree on whether they use it.

    Args:
        program: The message.
        rounds: The way through the edges.
        source: The operand whose source rows are the message.
    """

    def __init__(self, program: TileProgram, rounds: ShardRounds, source: int) -> None:
        self._program, self._rounds, self._source = program, rounds, source
        self._place = program.numbers("source").index(source)

    def merge(
        self,
        unit: int,
        tensors: Sequence[Tensor],
        rows: Sequence[Tensor],
        reducers: Sequence[Reducer],
    ) -> bool:
        """Adds a unit's messages to the reducers' states.

        Args:
            unit: A unit of the rounds.
            tensors: The operands' tensors.
            rows: The unit's rows of each source operand.
            reducers: Sums and means.

        Returns:
            Whether it did: not where there is no edge, nor where the message, tried on one edge,
            is not the source row that it was when it was analysed.
        """
        tile = self._rounds.first_edge(unit)
        if tile is None:
            return False
        values = self._program.gather(tile, tensors, rows)
        mapped = self._program.run(tile, values, Reductions())
        if any(m.messages is not values[self._source] for m in mapped):
            return False
        segments = self._rounds.segments(unit)
        for reducer in reducers:
            if isinstance(reducer, SumReducer):
                reducer.merge_rows(segments, rows[self._place])
        return True

    def add_gradients(self, unit: int, total: Tensor | None, reducers: Sequence[Reducer]) -> None:
        """Adds the gradients of a unit's source rows to ``total``, if they are wanted."""
        if total is None:
            return
        transposed = self._rounds.segments(unit, transposed=True)
        for reducer in reducers:
            if isinstance(reducer, SumReducer):
                reducer.add_row_gradients(transposed, total)


def fused_sum(
    program: TileProgram,
    rounds: Rounds,
    source: int,
    reducers: Sequence[Sequence[Reducer]],
    policy: SARPolicy,
) -> FusedSum | None:
    """The fused way of an aggregation, where it has one and the kernels are there.

    Args:
        program: The message.
        rounds: The way through the edges.
        source: The operand whose source rows are the message; -1 if there is none.
        reducers: The aggregation's reducers, by group.
        policy: Its switch.
    """
    if policy.kernels == "off" or source < 0 or not isinstance(rounds, ShardRounds):
        return None
    layer = program.layer
    watched = layer._message_forward_pre_hooks or layer._message_forward_hooks
    kinds = {type(reducer) for group in reducers for reducer in group}
    if watched or len(reducers) != 1 or not kinds <= {SumReducer, MeanReducer}:
        return None
    if not takes(program.operands[source].tensor):
        return None
    if why_missing() is not None:
        if rounds.plan.rank == 0:
            warn_if_missing()
        return None
    return FusedSum(program, rounds, source)
