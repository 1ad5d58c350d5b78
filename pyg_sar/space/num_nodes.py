"""How many nodes edges have, where PyG infers it: by the largest id.

[Note: the number of nodes] ``add_self_loops(edge_index)`` and some layers (``EGConv``) give each
node up to the last one with an edge a self loop; nodes behind it get none. Each worker answers with
its own nodes among these. They are its first ones, as a part's nodes are in the graph's order. PyG
first asks whether there are edges at all: that is answered for the whole graph, too, as a worker
may have nodes, but no edges. To whoever else asks, a worker's nodes are all of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.space.distributed_index import DistEdgeIndex, DistIndex, handles, plain, refusal
from pyg_sar.space.pyg_calls import module_of
from pyg_sar.wording import counted

_LOOPS = ("add_self_loops", "add_remaining_self_loops")


def _asks() -> str:
    """The function for which PyG's ``maybe_num_nodes`` asks, or ``''`` where somebody else asks."""
    frame: Any = sys._getframe(1)
    while frame.f_back and module_of(frame).partition(".")[0] == "pyg_sar":
        frame = frame.f_back
    inferred = frame.f_code.co_name == "maybe_num_nodes" and frame.f_back
    return str(frame.f_back.f_code.co_name) if inferred else ""


def _own_nodes(source: DistIndex | DistEdgeIndex) -> int:
    """Returns the number of own nodes."""
    nodes = source.plan.num_local
    return max(nodes, source.num_targets) if isinstance(source, DistEdgeIndex) else nodes


def _count(edges: DistEdgeIndex) -> int:
    """Returns how many own nodes are not behind the graph's last one with an edge. Collective."""
    plan = edges.plan
    assert plan.n_id is not None
    far, near = edges.ends()
    top = torch.full((1,), -1, dtype=torch.long, device=edges.device)
    ids = halo_gather(plan.n_id, plan)
    if near.numel():
        top = torch.maximum(ids[far.long()].max(), ids[near.long()].max()).view(1)
    plan.comm.all_reduce(top, "max", label=("", "", "number of nodes"))
    within = plan.n_id <= top
    count = int(within.sum())
    if not bool(within[:count].all()):
        raise DistributedIndexError(
            f"The number of nodes is not given, and {counted(plan.n_id.numel() - count, 'nodes')} "
            f"of rank {plan.rank} are behind the graph's last node with an edge (id {int(top)}), "
            "but among others here: pass num_nodes=data.num_nodes"
        )
    return count


@handles(Tensor.numel, torch.numel, Tensor.nelement)
def _numel(func: Any, args: Any, kwargs: Any) -> int:
    (source,) = args
    asks = _asks()
    if not asks:
        return plain(source).numel()
    known = isinstance(source, DistEdgeIndex) and source.plan.n_id is not None
    if asks not in _LOOPS or not known or source.bipartite or source.partial is not None:
        return _own_nodes(source)
    count: int = source.remember_together("number of nodes", lambda: _count(source))
    source.__dict__["_inferred"] = count
    return count


@handles(Tensor.max, torch.max, Tensor.amax, torch.amax)
def _max(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The largest node id: PyG infers the number of nodes by it."""
    if len(args) > 1 or kwargs or not isinstance(args[0], DistIndex | DistEdgeIndex):
        raise refusal(func)
    source = args[0]
    found = source.__dict__.pop("_inferred", None) if _asks() else None
    return torch.tensor((_own_nodes(source) if found is None else found) - 1, device=source.device)
