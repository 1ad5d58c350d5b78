"""The global view's ``edge_index``: a node tensor of ids, which stands for distributed edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.exchange.gather import halo_gather
from pyg_sar.space.distributed_index import DistEdgeIndex
from pyg_sar.tensors.node_tensor import NodeTensor
from pyg_sar.tensors.rows import Rows


@dataclass(frozen=True, slots=True)
class Edges:
    """Distributed edges and the layouts of the nodes that they join.

    Attributes:
        index: The distributed edges, in this worker's numbering.
        sources: The layout of the source nodes.
        targets: That of the target nodes.
    """

    index: DistEdgeIndex
    sources: Rows
    targets: Rows

    def changed(self, change: Callable[[DistEdgeIndex], Tensor]) -> Edges | None:
        """Returns what becomes of the edges by an operation on the distributed index."""
        with torch._C._EnableTorchFunction():  # Below autograd it is off.
            index = change(self.index)
        if not isinstance(index, DistEdgeIndex):
            return None
        turned = index.dist_row != self.index.dist_row
        ends = (self.targets, self.sources) if turned else (self.sources, self.targets)
        return Edges(index, *ends)

    def global_ids(self) -> Tensor:
        """Returns both ends of this worker's edges by global ids, int64 ``[2, E]``. Collective."""
        far, near = self.index.ends()
        ends = (self.sources, self.targets)
        if self.index.dist_row == 1:
            ends = ends[::-1]
        known = halo_gather(ends[0].ids, self.index.plan)
        pair = (known[far.long()], ends[1].ids[near.long()])
        return torch.stack(pair if self.index.dist_row == 0 else pair[::-1])


def edge_tensor(edges: Edges, rows: Rows) -> NodeTensor:
    """Returns ``edge_index`` ``[2, E]`` of the whole graph, int64.

    Its ids are found when something asks for them: layers take the distributed edges.

    Args:
        edges: The distributed edges.
        rows: The layout of the edges.
    """
    out = NodeTensor(edges.index.as_subclass(Tensor).detach(), rows, 1)
    out.edges, out.make = edges, edges.global_ids
    return out
