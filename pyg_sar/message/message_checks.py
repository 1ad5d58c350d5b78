"""The facts about a message that all workers agree on: levels of tensors, what rows it mixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.dependence import Observation
from pyg_sar.message.program import DeferredEdge
from pyg_sar.message.row_wise import RowCheck, RowWise
from pyg_sar.message.target_index import NeedsAllEdges
from pyg_sar.space.index_space import DistEdgeIndex

# Levels of tensors ############################################################


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


# Rows of a message ############################################################


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
        self.levels: tuple[dict[str, bool], dict[str, int]] = {}, {}
        self.seen: Observation | None = None

    def look(self, levels: dict[str, bool], nodes: dict[str, int], method: str) -> RowWise:
        """Returns what this worker finds."""
        try:
            check = RowCheck(self.layer, self.edges, self.kwargs, levels, nodes, method)
        except NeedsAllEdges:  # PyG itself says better what is wrong.
            return RowWise()
        found = check.found()
        self.seen = check.seen
        if found.refused and nodes and self.comm.world_size == 1:
            # It has all edges, and all nodes: it may read these by any id.
            again = self.look(levels, {}, method)
            return found if again.refused else again
        return found

    def observation(self) -> Observation:
        """Returns a watched run of the message.

        Raises:
            NeedsAllEdges: There is none.
        """
        if self.seen is None:
            self.look(*self.levels, "message")
        if self.seen is None:
            raise NeedsAllEdges("it reads a tensor of the whole graph")
        return self.seen

    def agree(
        self, levels: dict[str, bool], nodes: dict[str, int], method: str
    ) -> tuple[RowWise, RowWise]:
        """Returns what this worker found about the message's rows, and what all did."""
        edges, mine = self.edges, self.look(levels, nodes, method)
        said = [mine.refused, list(mine.updates), mine.numbers, list(mine.keeps)]
        row = mine.rows
        shape = None if row is None else [list(row.shape[1:]), str(row.dtype)]
        everyone = self.comm.all_gather_object([said, shape])
        known = [found for found, _ in everyone]
        for rank, found in enumerate(known):
            self.refuse(found[0], rank, together=True)
        rows = next((found for _, found in everyone if found), None)
        agreed = RowWise(
            refused=next((found[0] for found in known if found[0]), ""),
            updates=tuple(sorted({name for found in known for name in found[1]})),
            keeps=tuple(sorted({name for found in known for name in found[3]})),
            numbers=all(found[2] for found in known),
            rows=None if rows is None else without_rows(*rows, edges.device),
        )
        return mine, agreed

    def sizes(self) -> dict[str, Any]:
        """Returns the whole graph's numbers of nodes as a message gets them. Collective, once."""
        edges = self.edges

        def count() -> list[int]:
            here = [edges.plan.num_local, edges.num_targets]
            return [sum(column) for column in zip(*self.comm.all_gather_object(here), strict=True)]

        sources, targets = edges.remember_together("sizes", count)
        both = [sources, targets] if self.layer.flow == "source_to_target" else [targets, sources]
        return {"size_i": targets, "dim_size": targets, "size_j": sources, "size": both}

    def refuse(self, reason: str, rank: int, *, together: bool = False) -> None:
        """Raises where workers can't do what one process does; ``together``: all of them do."""
        if reason and self.comm.world_size > 1:
            error = DistributedIndexError(
                f"{self.title} can't be computed from each worker's own edges (rank {rank}): "
                f"{reason}"
            )
            error.mixes_edges = together
            raise error
