r"""Gradients of summed rows where workers read each other's memory: each owner adds up its own.

For a sum or mean of source rows, times constant weights or not,

.. math:: \partial L / \partial x_j = \sum_{e: j \to i} w_e c_i g_i,

where :math:`c_i` is 1, or one over the in-degree. The owner of j has the edges to its peers'
targets by source (:class:`~pyg_sar.engine.pushed_edges.PushedEdges`, all of them pushed), and reads
:math:`c_i g_i` where the owner of i published it. So no worker writes gradients of rows for others
to add, which takes two passes over all halo rows, and memory for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from pyg_sar.engine.pushed_edges import PushedEdges
from pyg_sar.engine.rounds import ShardRounds
from pyg_sar.exchange.rows import Use, flat_rows
from pyg_sar.exchange.shared_rows import SharedRows
from pyg_sar.exchange.streams import ShardStream
from pyg_sar.kernels.ops import gather_sum_
from pyg_sar.ledger import Label
from pyg_sar.space.index_space import DistEdgeIndex, version_of

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator

Made = TypeVar("Made")
_PLAN: Label = ("", "", "plan")
_AGREEMENT: Label = ("", "", "agreement")
_MEMORY = 8  # weights


class OfWeights(Generic[Made]):
    """What all workers made together of the last few constant weights of edges."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], tuple[Tensor, Made]] = OrderedDict()

    def of(self, comm: Communicator, weight: Tensor, make: Callable[[Tensor], Made]) -> Made:
        """What there is of a weight, made again where it was written into.

        Args:
            comm: The workers' communicator.
            weight: Constant weights of the edges, ``[E]`` or ``[E, 1]``.
            make: Makes it of these, ``[E]``.
        """
        key = id(weight), version_of(weight)
        known = torch.tensor(int(key in self._known), device=weight.device)
        if not int(comm.all_reduce(known, "min", label=_AGREEMENT)):
            self._known[key] = weight, make(weight.detach().reshape(-1))  # keeps it, and so its id
            while len(self._known) > _MEMORY:
                self._known.popitem(last=False)
        return self._known[key][1]


class RemoteWeights:
    """Constant weights of edges, sent once to the owners of their sources.

    Args:
        edges: The edges between workers, all of them pushed, and numbered.
    """

    def __init__(self, edges: PushedEdges) -> None:
        self._edges = edges
        self._known = OfWeights[dict[int, Tensor]]()

    def of(self, edge_index: DistEdgeIndex, weight: Tensor) -> dict[int, Tensor]:
        """By peer, the weights of the edges to its targets, in the order of their run.

        All workers call this together.

        Args:
            edge_index: The edges into this worker's targets.
            weight: Of these, ``[E]``.
        """
        return self._known.of(edge_index.plan.comm, weight, partial(self._send, edge_index))

    def _send(self, edge_index: DistEdgeIndex, weight: Tensor) -> dict[int, Tensor]:
        plan, source = edge_index.plan, edge_index.ends()[0]
        runs = {pushed.peer: pushed.run for unit in self._edges.pushed for pushed in unit}
        found = {}
        for owner, peer in plan.rounds():
            rows = plan.halo_slice(owner)
            here = (source >= plan.num_local + rows.start) & (source < plan.num_local + rows.stop)
            message = weight[here]
            numbers = runs[peer].numbers if peer in runs else source[:0]
            arriving = message.new_empty(numbers.numel())
            plan.comm.exchange(message, owner, arriving, peer, label=_PLAN).wait()
            # They come in the order of the peer's list.
            found[peer] = torch.empty_like(arriving)
            found[peer][numbers.argsort()] = arriving
        return found


class OwnerRounds(ShardRounds):
    """The way through the edges where owners add up the gradients of their rows.

    Args:
        rounds: The way through all edges.
        edges: The edges between workers, all of them pushed.
        weights: Of these, by peer; ``None``: 1.
    """

    def __init__(
        self, rounds: ShardRounds, edges: PushedEdges, weights: dict[int, Tensor] | None
    ) -> None:
        super().__init__(rounds.shards, 1)
        self._edges, self._weights = edges, weights

    def add_gradients(
        self,
        total: Tensor,
        own: Callable[[], None],
        gradient: Tensor,
        scale: Tensor | None,
        layer: str,
        prefetch: int,
    ) -> None:
        """Adds the gradients of own rows that are summed, over all edges.

        Args:
            total: Of own rows, ``[num_local, *]``, added to.
            own: Adds those over the worker's own edges.
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
            if unit == 0:
                own()
            (shares,) = rows.tensors
            for pushed in self._edges.pushed[unit]:
                edges = pushed.run.transposed()
                mine = shares if rows.index is not None else shares[pushed.rows]
                at = rows.places(edges.source), edges.offsets, edges.targets
                gather_sum_(flat, mine, *at, self._weights_of(pushed.peer, flat))
                del mine, at
            del rows, shares

    def _weights_of(self, peer: int, rows: Tensor) -> Tensor | None:
        """The weights of the edges to a peer, in what kernels add up in."""
        if self._weights is None:
            return None
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        return self._weights[peer].to(wide)


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
