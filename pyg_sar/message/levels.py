"""Which unsuffixed tensors of a call have a row per edge or per node: what all workers agree on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.message.program import DeferredEdge
from pyg_sar.space.index_space import DistEdgeIndex


def maximum(comm: Any, numbers: Sequence[int], device: torch.device) -> list[int]:
    """The numbers' maxima over all workers."""
    if comm.world_size == 1:
        return list(numbers)
    agreed = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    result: list[int] = comm.all_reduce(agreed, "max", label=("", "", "agreement")).tolist()
    return result


def unsuffixed(
    layer: Any, kwargs: dict[str, Any], complete: bool, method: str = "message"
) -> dict[str, Tensor]:
    """Unsuffixed tensors: by ``'name'`` for arguments of ``message``, else ``'method.name'``."""
    found: dict[str, Tensor] = {}
    for value_kwargs, used in _methods(kwargs, complete, method):
        for name in layer.inspector.get_param_names(used):
            value = value_kwargs.get(name)
            if name[-2:] in ("_i", "_j") or not isinstance(value, Tensor):
                continue
            if not isinstance(value, DeferredEdge):
                found[name if used == "message" else f"{used}.{name}"] = value
    return found


def _methods(
    kwargs: dict[str, Any], complete: bool, method: str
) -> Iterator[tuple[dict[str, Any], str]]:
    yield kwargs, method
    if method == "message":
        yield kwargs, "update"
    if complete:
        yield kwargs, "aggregate"
    for value in kwargs.values():
        if isinstance(value, DeferredEdge):
            yield value.kwargs, "edge_update"


def edge_level_names(
    layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], complete: bool
) -> dict[str, bool]:
    """Which unsuffixed tensors hold one row per edge: those that do so on every worker.

    Returns:
        By name, as :func:`unsuffixed` gives it.
    """
    return row_levels(layer, edge_index, kwargs, complete)[0]


def row_levels(
    layer: Any,
    edge_index: DistEdgeIndex,
    kwargs: dict[str, Any],
    complete: bool,
    method: str = "message",
) -> tuple[dict[str, bool], dict[str, int]]:
    """As :func:`edge_level_names`, and which hold a row per node (0: source, 1: target).

    Returns:
        The edge-level names and the node-level names.
    """
    found = unsuffixed(layer, kwargs, complete, method)
    if not found:
        return {}, {}
    sizes = (edge_index.size(1), edge_index.plan.num_local, edge_index.num_targets)
    misses = [
        int(value.dim() == 0 or value.size(0) != size) for size in sizes for value in found.values()
    ]
    agreed = maximum(edge_index.plan.comm, misses, edge_index.device)
    count = len(found)
    edges = {n: not miss for n, miss in zip(found, agreed[:count], strict=True)}
    nodes = {n: 0 for n, miss in zip(found, agreed[count : 2 * count], strict=True) if not miss}
    nodes |= {n: 1 for n, miss in zip(found, agreed[2 * count :], strict=True) if not miss}
    nodes = {n: space for n, space in nodes.items() if not edges[n]}
    return edges, nodes
