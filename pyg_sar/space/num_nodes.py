"""How many nodes edges have, where PyG infers it: by the largest id, of which a worker has its own.

PyG first asks whether there are edges at all: that is answered for the whole graph, as a worker may
have nodes, but no edges. To whoever asks, a worker's nodes are all of its own. Only self loops
would be others: PyG gives none to nodes behind the last one with an edge.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.distributed_index import DistEdgeIndex, DistIndex, handles, plain, refusal
from pyg_sar.space.pyg_calls import module_of

_LOOPS = ("add_self_loops", "add_remaining_self_loops")


def _caller() -> Any:
    """The frame that called this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back and module_of(frame).partition(".")[0] == "pyg_sar":
        frame = frame.f_back
    return frame


def adds_loops() -> bool:
    """True where PyG adds loops of nodes: the first ones, as many as it was told."""
    caller = _caller()
    return caller.f_code.co_name in _LOOPS and module_of(caller) == "torch_geometric.utils.loop"


def _asks() -> str:
    """The function for which PyG's ``maybe_num_nodes`` asks, or ``''`` where somebody else asks."""
    frame = _caller()
    inferred = frame.f_code.co_name == "maybe_num_nodes" and frame.f_back
    return str(frame.f_back.f_code.co_name) if inferred else ""


def _own_nodes(source: DistIndex | DistEdgeIndex) -> int:
    """Returns the number of own nodes."""
    nodes = source.plan.num_local
    return max(nodes, source.num_targets) if isinstance(source, DistEdgeIndex) else nodes


@handles(Tensor.numel, torch.numel, Tensor.nelement)
def _numel(func: Any, args: Any, kwargs: Any) -> int:
    (source,) = args
    asks = _asks()
    if asks in _LOOPS and source.plan.world_size > 1:
        raise DistributedIndexError(
            f"{asks}() of a worker's own edges (rank {source.plan.rank}) was not told how many "
            "nodes there are: pass num_nodes=data.num_nodes"
        )
    return _own_nodes(source) if asks else plain(source).numel()


@handles(Tensor.max, torch.max, Tensor.amax, torch.amax)
def _max(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The largest node id: PyG infers the number of nodes by it."""
    if len(args) > 1 or kwargs or not isinstance(args[0], DistIndex | DistEdgeIndex):
        raise refusal(func)
    return torch.tensor(_own_nodes(args[0]) - 1, device=args[0].device)
