"""Edges by global ids become distributed edges, between nodes whose places are known.

[Note: known places] Edges that were computed, or that every worker holds, have no partition. Their
nodes have one: a layout says who owns which. So each worker takes the edges into its own nodes, and
they are numbered as a partition numbers them (``partition/parts.py``): own nodes, then the halo by
owner and the row there; edges by the worker of their source, own ones first, and target. Nothing is
searched: each layout has a table of all its nodes. Where every worker holds all edges, it sees as
well what the others need of it, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.kernels.ops import sort_edges
from pyg_sar.space.distributed_index import Partial, dist_edge_index
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
    if not isinstance(edge_index, NodeTensor):
        return _distributed(list(edge_index), None, edge_index.size(1), sources, targets)
    comm = sources.comm
    found = torch.cat([edge_index.local, edge_index.rows.ids.view(1, -1)])
    order, first = sort_edges(_of(targets.places()[0], found[1]), comm.world_size)
    parts = found.t().index_select(0, order).split(first.diff().tolist())
    here = torch.cat(all_to_all(parts, comm))
    *ends, numbers = here.index_select(0, here[:, 2].argsort()).unbind(1)
    return edges_at_targets(ends, numbers, edge_index.size(1), sources, targets)


def edges_at_targets(
    ends: Sequence[Tensor], numbers: Tensor, total: int, sources: Rows, targets: Rows
) -> NodeTensor:
    """Returns distributed edges, of which each worker has those into its own nodes. Collective.

    Args:
        ends: Sources and targets by global ids, int64 ``[E_p]`` each.
        numbers: The edges' places among all, ascending, ``[E_p]``.
        total: All edges, E.
        sources: The layout of the source nodes.
        targets: That of the target nodes; the same object where these are nodes of one type.
    """
    return _distributed(ends, numbers, total, sources, targets)


def _distributed(
    ends: Sequence[Tensor], numbers: Tensor | None, total: int, sources: Rows, targets: Rows
) -> NodeTensor:
    """Returns distributed edges: of all edges without ``numbers``, else of those into own nodes."""
    comm = sources.comm
    world, rank = comm.world_size, comm.rank
    worker = targets.places()[0]
    # Edges by the worker of their target, and that of their source.
    key = _of(worker, ends[1]).mul_(world).add_(_of(sources.places()[0], ends[0]))
    order, first = sort_edges(key, world * world)
    runs = order.split(first.diff().tolist())
    units = [runs[rank * world + (rank + unit) % world] for unit in range(world)]
    order = torch.cat(units)
    source, target = _of(ends[0], order), _of(targets.places()[1], _of(ends[1], order))
    unit = _repeated([run.numel() for run in units], order.device)
    wanted = None
    if numbers is None:
        others = [runs[peer * world + rank] for peer in range(world)]
        others[rank] = order[:0]
        wanted = [_of(ends[0], run) for run in others]
    plan, source = _sources(source, units[0].numel(), wanted, sources, sources is targets)
    # Stable sorts, the last key first.
    by_unit, _ = sort_edges(unit, world, sort_edges(target, targets.count)[0])
    ids = _of(order, by_unit).long()
    ids = ids if numbers is None else _of(numbers, ids)
    local = torch.stack([_of(source, by_unit), _of(target, by_unit)]).long()
    count = None if sources is targets else targets.count
    rows = Rows(comm, total, ids.numel(), ids)
    index = dist_edge_index(local, plan, targets=count).ordered(ids)
    if targets.compared is not None:
        index.partial = Partial(None)
    return edge_tensor(Edges(index, sources, targets), rows)


def _sources(
    ids: Tensor, own: int, wanted: list[Tensor] | None, rows: Rows, named: bool
) -> tuple[HaloPlan, Tensor]:
    """Returns a halo plan of source nodes, and of each edge its source by it.

    Args:
        ids: The source of each of this worker's edges, by global ids ``[E]``.
        own: How many of them, the first ones, are nodes of this worker.
        wanted: The own nodes that each worker's edges come from, by global ids, each of them once
            or more; ``None``: each worker is to say it.
        rows: The layout of the nodes.
        named: Whether the plan is to know the own nodes' ids.
    """
    comm, place = rows.comm, rows.places()[1]
    position, starts = rows.keep("positions", None, lambda: _positions(rows))
    remote = _of(position, ids[own:])
    needed = torch.zeros(rows.total, dtype=torch.bool, device=ids.device)
    halo = needed.index_fill_(0, remote, True).nonzero().view(-1)
    number = torch.empty_like(place)  # of halo nodes only
    stop = rows.count + halo.numel()
    number[halo] = torch.arange(rows.count, stop, dtype=place.dtype, device=ids.device)
    local = torch.cat([_of(place, ids[:own]), _of(number, remote)])
    counts = torch.searchsorted(halo, starts).diff()
    if wanted is None:
        there = halo - starts[:-1].repeat_interleave(counts)
        sends = all_to_all(there.split(counts.tolist()), comm)
        sent, send = [part.numel() for part in sends], torch.cat(sends)
    else:
        key = _repeated([part.numel() for part in wanted], ids.device).long() * rows.count
        key += _of(place, torch.cat(wanted))
        needed = torch.zeros(len(wanted) * rows.count, dtype=torch.bool, device=ids.device)
        found = needed.index_fill_(0, key, True).nonzero().view(-1)
        send, peer = found % max(rows.count, 1), found // max(rows.count, 1)
        sent = torch.bincount(peer, minlength=len(wanted)).tolist()
    known = rows.ids if named else None
    return HaloPlan(comm, rows.count, counts.tolist(), send, sent, known), local


def _positions(rows: Rows) -> tuple[Tensor, Tensor]:
    """Returns each node's place among all, worker by worker, and each worker's first one."""
    worker, place = rows.places()
    counts = torch.bincount(worker, minlength=rows.comm.world_size)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return _of(starts, worker).add_(place), starts


def _repeated(counts: list[int], device: torch.device) -> Tensor:
    """Returns 0, 1, ... as often as ``counts`` says."""
    found = torch.empty(sum(counts), dtype=torch.int32, device=device)
    for number, part in enumerate(found.split(counts)):
        part.fill_(number)
    return found


def _of(table: Tensor, ids: Tensor) -> Tensor:
    """Returns rows of a table, a few times as quick as by ``table[ids]``."""
    return table.index_select(0, ids)
