"""Aggregation at the sources: the same edges, kept by the owners of their other ends.

A worker keeps the edges into its own nodes. A layer that aggregates at the other end
(``flow='target_to_source'``, ``edge_index.flip(0)`` as in ``DirGNNConv``) reduces over nodes of
other workers. The edges are sent to these once per structure, and the layer then runs there like
any other, by shards or chunks, in every mode. Edge-level tensors follow their edges in each call
(constant ones once), and their gradients come back: a row per cut edge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.exchange.gather import post_all
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import flat_rows
from pyg_sar.ledger import Label
from pyg_sar.message.program import DeferredEdge
from pyg_sar.space.index_space import DistEdgeIndex, dist_edge_index
from pyg_sar.tensors.rows import unchanged_as

_PLAN: Label = ("", "", "plan")


class ReversedEdges:
    """A worker's edges into the other end, where the layer aggregates, and how edge-level rows get
    there.

    Made by all workers together, once per structure.

    Attributes:
        edge_index: The edges out of which this worker's nodes aggregate, in an index space of
            their own. Their distributed row is the other one.
        edge_level: Which arguments of a kind of call hold one row per edge.
    """

    edge_index: DistEdgeIndex
    edge_level: dict[Any, set[str]]

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        plan = edge_index.plan
        for ledger in plan.comm.ledgers:
            ledger.count("bucketing")
        self._plan, self.edge_level = plan, {}
        far, near = edge_index.ends()
        bounds = torch.tensor(plan.halo_offsets, device=far.device) + plan.num_local
        owner = torch.bucketize(far, bounds[1:], right=True)
        owner[far < plan.num_local] = plan.rank
        self._leaving = [(owner == q).nonzero().view(-1) for q in range(plan.world_size)]
        starts = [0 if q == plan.rank else int(bounds[q]) for q in range(plan.world_size)]
        needs = [torch.unique(near[columns], return_inverse=True) for columns in self._leaving]
        counts = [
            [int(c.numel()), int(ids.numel())]
            for c, (ids, _) in zip(self._leaving, needs, strict=True)
        ]
        everyone = torch.stack(
            plan.comm.all_gather(torch.tensor(counts, device=far.device), label=_PLAN)
        )
        self._arriving: list[int] = everyone[:, plan.rank, 0].tolist()
        rows = [
            torch.stack([far[columns] - start, inverse], dim=1)
            for columns, start, (_, inverse) in zip(self._leaving, starts, needs, strict=True)
        ]
        arrived = self._exchange(rows, self._arriving, _PLAN)
        halo = everyone[:, plan.rank, 1].tolist()
        halo[plan.rank] = 0
        own = plan.rank
        sends = [ids if q != own else ids[:0] for q, (ids, _) in enumerate(needs)]
        there = HaloPlan(
            plan.comm,
            edge_index.num_targets,
            halo,
            torch.cat(sends),
            [ids.numel() for ids in sends],
        )
        sources, targets = [], []
        for q, part in enumerate(arrived):
            place, inverse = part.unbind(1)
            targets.append(place if q == own else plan.send_rows(q)[place])
            start = there.num_local + there.halo_offsets[q]
            sources.append(needs[own][0][inverse] if q == own else inverse + start)
        ends = [torch.cat(sources), torch.cat(targets)]
        if edge_index.dist_row == 0:
            ends.reverse()
        self.edge_index = dist_edge_index(
            torch.stack(ends),
            there,
            1 - edge_index.dist_row,
            plan.num_local if edge_index.bipartite else None,
        )

    def _exchange(
        self, rows: Sequence[Tensor], counts: Sequence[int], label: Label
    ) -> list[Tensor]:
        """Sends ``rows[q]`` to worker q; returns what came from each, ``counts[q]`` rows."""
        like = rows[0]
        receives = [like.new_empty(count, *like.shape[1:]) for count in counts]
        post_all(self._plan, [part.contiguous() for part in rows], receives, label).wait()
        receives[self._plan.rank] = rows[self._plan.rank]
        return receives

    def send(self, rows: Tensor, label: Label) -> Tensor:
        """Edge-level rows ``[E, *]`` of the original edges, in the order of the new ones."""
        parts = [rows.index_select(0, columns) for columns in self._leaving]
        return torch.cat(self._exchange(parts, self._arriving, label))

    def send_back(self, rows: Tensor, label: Label) -> Tensor:
        """The adjoint of :meth:`send`: every edge has one row on either side."""
        counts = [columns.numel() for columns in self._leaving]
        found = self._exchange(rows.split(self._arriving), counts, label)
        out = rows.new_empty(sum(counts), *rows.shape[1:])
        for columns, part in zip(self._leaving, found, strict=True):
            out[columns] = part
        return out

    def carry(self, tensor: Tensor, layer: str) -> Tensor:
        """:meth:`send`, differentiable; constant tensors travel once."""
        label = (layer, "forward", "edges")
        if tensor.requires_grad:
            moved: Tensor = _Carry.apply(tensor, self, label, False)
            return moved
        key = ("carried", id(tensor), unchanged_as(tensor, self._plan.world_size))
        found = self.edge_index.remember(key, lambda: (tensor, self.send(tensor, label)))
        kept: Tensor = found[1]
        return kept

    def carried(
        self, kwargs: Mapping[str, Any], names: Collection[str], layer: str
    ) -> dict[str, Any]:
        """Keyword arguments whose tensors in ``names`` follow their edges."""
        return {
            name: self.carry(value, layer)
            if name in names and isinstance(value, Tensor) and not isinstance(value, DeferredEdge)
            else value
            for name, value in kwargs.items()
        }


class _Carry(torch.autograd.Function):
    """Rows sent with their edges, or back; each way is the other's adjoint."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, edges: ReversedEdges, label: Label, back: bool) -> Tensor:
        ctx.given = edges, (label[0], "backward", label[2]), not back
        way = edges.send_back if back else edges.send
        return way(flat_rows(rows.detach().contiguous()), label).view(-1, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Carry.apply(gradient, *ctx.given), None, None, None


def reversed_edges(edge_index: DistEdgeIndex) -> ReversedEdges:
    """The reversed edges, made on first use and kept with ``edge_index``."""
    found: ReversedEdges = edge_index.remember_together(
        "reversed", lambda: ReversedEdges(edge_index)
    )
    return found
