"""``WLConv`` over workers: colours are numbered as one process numbers them."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.index_space import DistEdgeIndex

_LABEL = ("", "forward", "colours")


class DistWLConv(gnn.WLConv):
    r"""Weisfeiler-Lehman colours of the nodes of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \textrm{hash} \left( \mathbf{x}_i, \{ \mathbf{x}_j \colon j \in
        \mathcal{N}(i) \} \right)

    PyG numbers colours in the order in which they come up among nodes :math:`0, 1, \ldots`; so
    every worker sees the hashes of all nodes, 16 bytes each, and keeps the same table.

    Raises:
        DistributedIndexError: When edges are flipped, or the partition's global ids are not known.
    """

    @torch.no_grad()
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        if not isinstance(edge_index, DistEdgeIndex):
            return super().forward(x, edge_index)
        plan = edge_index.plan
        if edge_index.dist_row != 0 or edge_index.bipartite or plan.n_id is None:
            raise DistributedIndexError(
                f"WLConv needs the edge_index of load_partition(), not flipped (rank {plan.rank})"
            )
        if x.dim() > 1:
            if not bool((x.sum(dim=-1) == 1).all()):
                raise ValueError(f"Expected one-hot colours in 'x' at rank {plan.rank}")
            x = x.argmax(dim=-1)
        source, target = edge_index
        order = target.argsort(stable=True)
        degrees = torch.bincount(target, minlength=plan.num_local).tolist()
        neighbours = x[source][order].split(degrees)
        hashes = [
            hash((node, *sorted(near.tolist())))
            for node, near in zip(x.tolist(), neighbours, strict=True)
        ]
        return self._numbered(torch.tensor(hashes, dtype=torch.long, device=x.device), plan)

    def _numbered(self, hashes: Tensor, plan: Any) -> Tensor:
        """Numbers hashes ``[num_local]`` in the order of the nodes of all workers."""
        comm = plan.comm
        count = hashes.new_tensor([hashes.numel()])
        counts = [int(n) for n in comm.all_gather(count, label=_LABEL)]
        mine = hashes.new_zeros(2, max(counts))
        mine[:, : hashes.numel()] = torch.stack([plan.n_id, hashes])
        rows = comm.all_gather(mine, label=_LABEL)
        ids, every = torch.cat([row[:, :n] for row, n in zip(rows, counts, strict=True)], 1)
        for value in every[ids.argsort()].tolist():
            self.hashmap.setdefault(value, len(self.hashmap))
        numbers = [self.hashmap[value] for value in hashes.tolist()]
        return torch.tensor(numbers, dtype=torch.long, device=hashes.device)


MODULES: dict[type, type] = {gnn.WLConv: DistWLConv}
