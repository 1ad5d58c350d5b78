r"""Gradients of summed rows where workers read each other's memory: each owner adds up its own.

For a sum or mean of source rows, :math:`\partial L / \partial x_j = \sum_{j \to i} c_i g_i`, where
:math:`c_i` is 1, or one over the in-degree. The owner of j has the edges to its peers' targets by
source (:class:`~pyg_sar.pushed_edges.PushedEdges`, all of them pushed), and reads :math:`c_i g_i`
where the owner of i published it. So no worker writes gradients of rows for others to add: that
takes two passes over all halo rows and memory for them, which over a network there is no way round.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyg_sar.exchange import Use, flat_rows
from pyg_sar.ledger import Label
from pyg_sar.ops import gather_sum_
from pyg_sar.pushed_edges import PushedEdges
from pyg_sar.rounds import ShardRounds
from pyg_sar.shard import Segments
from pyg_sar.shared_rows import SharedRows
from pyg_sar.streams import ShardStream


class OwnerRounds(ShardRounds):
    """The way through the edges where owners add up the gradients of their rows.

    Args:
        rounds: The way through all edges.
        edges: The edges between workers, all of them pushed.
    """

    def __init__(self, rounds: ShardRounds, edges: PushedEdges) -> None:
        super().__init__(rounds.shards, 1)
        self._edges = edges

    def add_gradients(
        self, total: Tensor, gradient: Tensor, scale: Tensor | None, layer: str, prefetch: int
    ) -> None:
        """Adds the gradients of own rows that are summed, over all edges.

        Args:
            total: Of own rows, ``[num_local, *]``, added to.
            gradient: Of own targets' sums :math:`g`, ``[num_targets, *]``.
            scale: :math:`c`, ``[num_targets]``; ``None``: 1.
            layer: Whom the ledger charges.
            prefetch: Units fetched ahead.
        """
        self._edges.slots.comm.returning()
        flat = total.view(total.size(0), total.shape[1:].numel())
        label: Label = (layer, "backward", "gradient")
        stream = _Shares(self._edges, flat_rows(gradient), scale, label, prefetch)
        for unit, rows in stream:
            (shares,) = rows.tensors
            if unit == 0:
                self._add_own(flat, shares, scale)
            for pushed in self._edges.pushed[unit]:
                edges = pushed.run.transposed()
                mine = shares if rows.index is not None else shares[pushed.rows]
                _add(flat, mine, replace(edges, source=rows.places(edges.source)))
                del mine
            del rows, shares

    def _add_own(self, total: Tensor, gradient: Tensor, scale: Tensor | None) -> None:
        edges, weight = self.segments(0, transposed=True), None
        if scale is not None:
            wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
            weight = scale.to(wide).index_select(0, edges.source)
        _add(total, gradient, replace(edges, edges=None), weight)


class _Shares(ShardStream):
    """Own gradients as they are, then the peers', times their scales.

    Args:
        edges: Whose slots are read.
        gradient: ``[num_targets, F]``.
        scale: ``[num_targets]``.
        label: Whom the ledger charges.
        prefetch: Units fetched ahead.
    """

    def __init__(
        self,
        edges: PushedEdges,
        gradient: Tensor,
        scale: Tensor | None,
        label: Label,
        prefetch: int,
    ) -> None:
        super().__init__(edges.slots, [gradient], label, prefetch, use=Use.IN_PLACE)
        self._scale = scale

    def _fill(self, shared: SharedRows, dtype: torch.dtype, out: Tensor) -> None:
        scale, (gradient,) = self._scale, self.tensors
        if scale is None:
            super()._fill(shared, dtype, out)
        elif shared.rows is None:
            torch.mul(gradient[: shared.count], scale[: shared.count].unsqueeze(1), out=out)
        else:
            torch.index_select(gradient, 0, shared.rows, out=out)
            out *= scale[shared.rows].unsqueeze(1)


def _add(total: Tensor, rows: Tensor, edges: Segments, weight: Tensor | None = None) -> None:
    gather_sum_(total, rows, edges.source, edges.offsets, edges.targets, weight, edges.edges)
