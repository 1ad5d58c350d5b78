"""Edges by global ids become distributed edges, between nodes whose places are known.

[Note: known places] Edges that were computed, or that every worker holds, have no partition. Their
nodes have one: a layout says who owns which. So each worker takes the edges into its own nodes, and
they are numbered as a partition numbers them (``partition/parts.py``): own nodes, then the halo by
owner and global id; edges by the worker of their source, own ones first, and target. Nothing is
searched: each layout has a table of all its nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.kernels.ops import sort_edges
from pyg_sar.space.distributed_index import dist_edge_index
from pyg_sar.tensors.edges import Edges, edge_tensor
from pyg_sar.tensors.node_tensor import NodeTensor
from pyg_sar.tensors.rows import Rows, all_to_all


def distributed_edges(edge_index: Tensor, sources: Rows, targets: Rows) -> NodeTensor:
    """Returns ``edge_index`` ``[2, E]`` as one that stands for distributed edges. Collective.

    Each edge goes to the owner of its target. See [Note: known places].

    Args:
        edge_index: Global ids, int64 ``[2, E]``, all of them valid: a node tensor, or a plain one
            that all workers hold.
        sources: The layout of the source nodes.
        targets: That of the target nodes; the same object where these are nodes of one type.
    """
    comm = sources.comm
    worker, _ = targets.places()
    if isinstance(edge_index, NodeTensor):
        found = torch.cat([edge_index.local, edge_index.rows.ids.view(1, -1)])
        order, first = sort_edges(_of(worker, found[1]), comm.world_size)
        parts = found.t().index_select(0, order).split(first.diff().tolist())
        source, target, ids = torch.cat(all_to_all(parts, comm)).unbind(1)
    else:
        ids = (_of(worker, edge_index[1]) == comm.rank).nonzero().view(-1)
        source, target = (end.index_select(0, ids) for end in edge_index)
    plan, source, owner = _sources(source, sources, sources is targets)
    target = _of(targets.places()[1], target)
    by_id = ids.argsort() if isinstance(edge_index, NodeTensor) else None
    # Stable sorts, the last key first.
    order, _ = sort_edges(target, targets.count, by_id)
    order, first = sort_edges(owner, comm.world_size, order)
    order = order.roll(-int(first[comm.rank]))
    ends = torch.stack([_of(source, order), _of(target, order)]).long()
    count = None if sources is targets else targets.count
    rows = Rows(comm, edge_index.size(1), ids.numel(), _of(ids, order))
    index = dist_edge_index(ends, plan, targets=count).ordered(rows.ids)
    return edge_tensor(Edges(index, sources, targets), rows)


def _sources(ids: Tensor, rows: Rows, named: bool) -> tuple[HaloPlan, Tensor, Tensor]:
    """Returns a halo plan of source nodes, and of each edge its source by it, and the owner.

    Args:
        ids: The source of each of this worker's edges, by global ids ``[E]``.
        rows: The layout of the nodes.
        named: Whether the plan is to know the own nodes' ids.
    """
    comm, (worker, place) = rows.comm, rows.places()
    owner = _of(worker, ids)
    away = (owner != comm.rank).nonzero().view(-1)
    remote = _of(ids, away)
    needed = torch.zeros(rows.total, dtype=torch.bool, device=ids.device)
    halo = needed.index_fill_(0, remote, True).nonzero().view(-1)
    halo = halo[worker[halo].argsort(stable=True)]
    counts = torch.bincount(worker[halo], minlength=comm.world_size).tolist()
    sends = all_to_all(place[halo].split(counts), comm)
    number = torch.empty_like(place)  # of halo nodes only
    number[halo] = torch.arange(
        rows.count, rows.count + halo.numel(), dtype=place.dtype, device=ids.device
    )
    local = _of(place, ids).index_copy_(0, away, _of(number, remote))
    sent = [part.numel() for part in sends]
    known = rows.ids if named else None
    return HaloPlan(comm, rows.count, counts, torch.cat(sends), sent, known), local, owner


def _of(table: Tensor, ids: Tensor) -> Tensor:
    """Returns rows of a table, a few times as quick as by ``table[ids]``."""
    return table.index_select(0, ids)
