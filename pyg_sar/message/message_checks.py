"""The levels of tensors that messages take, on which all workers agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.layer_facts import asked_by
from pyg_sar.message.program import DeferredEdge
from pyg_sar.space.index_space import DistEdgeIndex

_OF_NODES = "message", "aggregate", "update"  # They get the arguments of ``propagate``.


def maximum(comm: Any, numbers: Sequence[int], device: torch.device) -> list[int]:
    """Returns the numbers' maxima over all workers."""
    if comm.world_size == 1:
        return list(numbers)
    agreed = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    result: list[int] = comm.all_reduce(agreed, "max", label=("", "", "agreement")).tolist()
    return result


def unsuffixed(layer: Any, kwargs: dict[str, Any], method: str = "message") -> dict[str, Tensor]:
    """Returns unsuffixed tensors by ``'name'`` (as in ``message``) or ``'method.name'``."""
    found: dict[str, Tensor] = {}
    for value_kwargs, used in _methods(kwargs, method):
        for name in layer.inspector.get_param_names(used):
            value = value_kwargs.get(name)
            if name[-2:] in ("_i", "_j") or not isinstance(value, Tensor):
                continue
            if not isinstance(value, DeferredEdge):
                found[name if used == "message" else f"{used}.{name}"] = value
    return found


def _methods(kwargs: dict[str, Any], method: str) -> Iterator[tuple[dict[str, Any], str]]:
    yield kwargs, method
    if method == "message":
        yield kwargs, "update"
        yield kwargs, "aggregate"
    for value in kwargs.values():
        if isinstance(value, DeferredEdge):
            yield value.kwargs, "edge_update"


def row_levels(
    layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any], method: str = "message"
) -> tuple[dict[str, bool], dict[str, int]]:
    """Finds the unsuffixed tensors that hold one row per edge, or per node, on every worker.

    Returns:
        By name, as :func:`unsuffixed` gives it: if there is a row per edge; and of tensors with a
        row per node of which type (0: source, 1: target).
    """
    found = unsuffixed(layer, kwargs, method)
    if not found:
        return {}, {}
    sizes = (edge_index.size(1), edge_index.plan.num_local, edge_index.num_targets)
    misses = [
        int(value.dim() == 0 or value.size(0) != size) for size in sizes for value in found.values()
    ]
    agreed = maximum(edge_index.plan.comm, misses, edge_index.device)
    count = len(found)
    edges = {n: not miss for n, miss in zip(found, agreed[:count], strict=True)}
    for own in edges:  # What is read at the ends of edges as well has a row for each node.
        of_edges = own.startswith("edge_update.")
        asked = asked_by(layer, *(("edge_update",) if of_edges else _OF_NODES))
        name = own.rpartition(".")[2]
        edges[own] &= f"{name}_i" not in asked and f"{name}_j" not in asked
    nodes = {n: 0 for n, miss in zip(found, agreed[count : 2 * count], strict=True) if not miss}
    nodes |= {n: 1 for n, miss in zip(found, agreed[2 * count :], strict=True) if not miss}
    nodes = {n: space for n, space in nodes.items() if not edges[n]}
    return edges, nodes


def refuse_batched_edges(layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any]) -> None:
    """Refuses tensors of edges ``[B, E, *]``, whose rows don't follow their edges."""
    axis, edges = int(layer.node_dim), edge_index.size(1)
    for name, value in unsuffixed(layer, kwargs).items():
        shape = list(value.shape)
        if len(shape) > 2 and -len(shape) <= axis < len(shape) and shape[axis] == edges != shape[0]:
            raise DistributedIndexError(
                f"{type(layer).__name__} (rank {edge_index.plan.rank}) takes "
                f"'{name.rpartition('.')[2]}' of shape {shape}, with its edges along axis {axis}: "
                "pass it as [E, *], each edge's row once, and expand it in the method that takes it"
            )


def without_rows(shape: Sequence[int], dtype: str, device: torch.device) -> Tensor:
    """Returns a tensor ``[0, *shape]`` of a dtype by its name, as workers tell each other."""
    kind = getattr(torch, dtype.removeprefix("torch."))
    return torch.empty(0, *shape, dtype=kind, device=device)
