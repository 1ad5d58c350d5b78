"""Digests of the graph that a run trains on, the same under every partition.

[Note: sums of hashes] Each node and each edge is hashed by global ids. The hashes are added up,
modulo 2^64, so that neither the order nor the worker that holds a node or an edge matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator
from pyg_sar.exchange.gather import post_all
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.space.distributed_index import DistEdgeIndex

_LABEL = ("", "", "checkpoint")
_CHUNK = 2**20  # edges that are hashed at a time

DIFFERENCES = {
    "nodes": "number of nodes",
    "edges": "number of edges",
    "node_digest": "labels or splits",
    "edge_digest": "ends of edges",
}
"""Names what differs between graphs, for each value of :func:`graph_digest`."""


def graph_digest(
    data: Any,
    targets: Tensor,
    ids: Tensor | None,
    splits: Mapping[str, Tensor],
    comm: Communicator,
) -> dict[str, Any] | None:
    """Returns the sizes of the whole graph and digests of its nodes and edges. Collective.

    Features are not looked at, nor are attributes of edges.

    Args:
        data: This worker's part (a ``Data`` with ``n_id``), or the whole graph in one process.
        targets: The targets, ``[n, *]``, of nodes or of something else.
        ids: Where these rows are in the whole graph's order, int64 ``[n]``.
        splits: The rows of each split.
        comm: The workers.

    Returns:
        ``nodes`` and ``edges``, how many there are; ``node_digest`` of ids, targets and splits;
        ``edge_digest`` of the pairs of ids; ``owners``, a digest of the ids of each worker. The
        same on all workers, and but for ``owners`` under all partitions. ``None`` where a worker
        does not know its nodes' ids, or has no ``edge_index`` between them.
    """
    ends = _ends(data, comm)
    if ids is None and comm.world_size == 1:
        ids = torch.arange(len(targets), device=targets.device)
    known = ends is not None and ids is not None
    if not all(comm.all_gather_object(known)) or ends is None or ids is None:
        return None
    n_id, source, target, plan = ends
    sources = n_id
    if plan is not None:
        sources = torch.cat([n_id, _halo_ids(n_id, plan)])
    member = torch.zeros_like(ids)
    for k, rows in enumerate(splits.values()):
        member[rows] += 1 << k
    owner = _mixed(n_id)
    node = _mixed(_mixed(_mixed(ids) + _bits(targets)) + member)
    edge = 0
    for low in range(0, source.numel(), _CHUNK):
        part = slice(low, low + _CHUNK)
        edge += int(_mixed(_mixed(sources[source[part]]) + n_id[target[part]]).sum())
    mine = [n_id.numel(), source.numel(), int(node.sum()), edge, int(owner.sum())]
    columns = list(zip(*comm.all_gather_object(mine), strict=True))
    return {
        "nodes": sum(columns[0]),
        "edges": sum(columns[1]),
        "node_digest": f"{sum(columns[2]) % 2**64:016x}",
        "edge_digest": f"{sum(columns[3]) % 2**64:016x}",
        "owners": [f"{value % 2**64:016x}" for value in columns[4]],
    }


def _bits(targets: Tensor) -> Tensor:
    """Returns a number for each row, another one for other values: a class is its own."""
    columns = targets.view(len(targets), -1) if targets.numel() else targets.view(-1, 1)
    if columns.is_floating_point():
        columns = columns.double().view(torch.int64)
    rows = columns[:, 0].long()
    for k in range(1, columns.size(1)):
        rows = _mixed(rows) + columns[:, k].long()
    return rows


def _ends(data: Any, comm: Communicator) -> tuple[Tensor, Tensor, Tensor, HaloPlan | None] | None:
    """Returns global ids of the nodes, and local ids of the edges' sources and targets."""
    if not isinstance(data, Data):
        return None
    n_id, edges = data.get("n_id"), data.get("edge_index")
    if n_id is None and comm.world_size == 1:
        n_id = torch.arange(data.num_nodes or 0)
    if (
        not isinstance(n_id, Tensor)
        or n_id.dim() != 1
        or not isinstance(edges, Tensor)
        or edges.layout != torch.strided
    ):
        return None
    if isinstance(edges, DistEdgeIndex):
        fits = edges.targets is None and edges.plan.num_local == n_id.numel()
        return (n_id.to(edges.device), *edges.ends(), edges.plan) if fits else None
    if comm.world_size > 1 or edges.dim() != 2:
        return None
    source, target = edges.as_subclass(Tensor)
    return n_id.to(edges.device), source, target, None


def _halo_ids(n_id: Tensor, plan: HaloPlan) -> Tensor:
    halo = n_id.new_empty(plan.num_halo)
    sends = [n_id[plan.send_rows(q)] for q in range(plan.world_size)]
    receives = [halo[plan.halo_slice(q)] for q in range(plan.world_size)]
    post_all(plan, sends, receives, _LABEL).wait()
    return halo


def _mixed(values: Tensor) -> Tensor:
    """Returns hashes of int64 numbers (the last steps of the generator SplitMix64)."""
    mixed = values.long() + (0x9E3779B97F4A7C15 - 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * (factor - 2**64)
    return mixed ^ _shifted(mixed, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    return (values >> by) & ((1 << (64 - by)) - 1)
