"""What all workers agree on about the rows of a message (:mod:`pyg_sar.message.row_wise`)."""

from __future__ import annotations

from typing import Any

import torch

from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.row_wise import RowCheck, RowWise
from pyg_sar.message.target_index import NeedsAllEdges
from pyg_sar.space.index_space import DistEdgeIndex


class RowAgreement:
    """Looks at the message of one call, together with the other workers.

    Args:
        layer: The layer.
        edge_index: Distributed edges.
        kwargs: Keyword arguments of ``propagate``.
        title: What to call the layer.
    """

    def __init__(
        self, layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], title: str
    ) -> None:
        self.layer, self.edges, self.kwargs, self.title = layer, edge_index, kwargs, title
        self.comm = edge_index.plan.comm

    def look(self, levels: dict[str, bool], nodes: dict[str, int], method: str) -> RowWise:
        """What this worker finds."""
        try:
            return RowCheck(self.layer, self.edges, self.kwargs, levels, nodes, method).found()
        except NeedsAllEdges:  # PyG itself says better what is wrong.
            return RowWise()

    def agree(
        self, levels: dict[str, bool], nodes: dict[str, int], method: str
    ) -> tuple[RowWise | None, RowWise]:
        """What this worker found about the message's rows, and what all did."""
        edges, mine = self.edges, None
        if edges.size(1):
            mine = self.look(levels, nodes, method)
        said = None if mine is None else [mine.refused, list(mine.updates), mine.numbers]
        row = None if mine is None or mine.rows is None else mine.rows
        shape = None if row is None else [list(row.shape[1:]), str(row.dtype)]
        everyone = self.comm.all_gather_object([said, shape])
        for rank, (found, _) in enumerate(everyone):
            self.refuse(found[0] if found else "", rank)
        known = [found for found, _ in everyone if found]
        shapes = [found for _, found in everyone if found]
        rows = None
        if shapes:
            dtype = getattr(torch, shapes[0][1].removeprefix("torch."))
            rows = torch.empty(0, *shapes[0][0], dtype=dtype, device=edges.device)
        agreed = RowWise(
            refused=next((found[0] for found in known if found[0]), ""),
            updates=tuple(sorted({name for found in known for name in found[1]})),
            numbers=bool(known) and all(found[2] for found in known),
            rows=rows,
        )
        return mine, agreed

    def sizes(self) -> dict[str, Any]:
        """The whole graph's numbers of nodes as a message gets them. Collective, once a graph."""
        edges = self.edges

        def count() -> list[int]:
            here = [edges.plan.num_local, edges.num_targets]
            return [sum(column) for column in zip(*self.comm.all_gather_object(here), strict=True)]

        sources, targets = edges.remember_together("sizes", count)
        both = [sources, targets] if self.layer.flow == "source_to_target" else [targets, sources]
        return {"size_i": targets, "dim_size": targets, "size_j": sources, "size": both}

    def refuse(self, reason: str, rank: int) -> None:
        """Raises where workers can't do what one process does."""
        if reason and self.comm.world_size > 1:
            raise DistributedIndexError(
                f"{self.title} can't run distributed (rank {rank}): {reason}"
            )
