"""Checks of a message before it runs over workers, and the facts that all of these agree on.

[Note: products] ``edge_weight.view(-1, 1) * x_j`` is the message of GCNConv, GraphConv and many
others. That a message is one is read off what it does: one multiplication, of the source rows and
of a view of a tensor with one number per edge, and nothing else that touches any of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.layer_state import AmbientState, modes_kept
from pyg_sar.message.program import DeferredEdge, Mapped, TileProgram
from pyg_sar.message.row_wise import RowCheck, RowWise
from pyg_sar.message.target_index import NeedsAllEdges, Reductions, spread
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile

# Levels of tensors ############################################################


def maximum(comm: Any, numbers: Sequence[int], device: torch.device) -> list[int]:
    """Returns the numbers' maxima over all workers."""
    if comm.world_size == 1:
        return list(numbers)
    agreed = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    result: list[int] = comm.all_reduce(agreed, "max", label=("", "", "agreement")).tolist()
    return result


def unsuffixed(
    layer: Any, kwargs: dict[str, Any], complete: bool, method: str = "message"
) -> dict[str, Tensor]:
    """Returns unsuffixed tensors by ``'name'`` (as in ``message``) or ``'method.name'``."""
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
    """Finds the unsuffixed tensors that hold one row per edge on every worker.

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

    def look(self, levels: dict[str, bool], nodes: dict[str, int], method: str) -> RowWise:
        """Returns what this worker finds."""
        try:
            return RowCheck(self.layer, self.edges, self.kwargs, levels, nodes, method).found()
        except NeedsAllEdges:  # PyG itself says better what is wrong.
            return RowWise()

    def agree(
        self, levels: dict[str, bool], nodes: dict[str, int], method: str
    ) -> tuple[RowWise | None, RowWise]:
        """Returns what this worker found about the message's rows, and what all did."""
        edges, mine = self.edges, None
        if edges.size(1):
            mine = self.look(levels, nodes, method)
        said = (
            None
            if mine is None
            else [mine.refused, list(mine.updates), mine.numbers, list(mine.keeps)]
        )
        row = None if mine is None or mine.rows is None else mine.rows
        shape = None if row is None else [list(row.shape[1:]), str(row.dtype)]
        everyone = self.comm.all_gather_object([said, shape])
        for rank, (found, _) in enumerate(everyone):
            self.refuse(found[0] if found else "", rank)
        known = [found for found, _ in everyone if found]
        shapes = [found for _, found in everyone if found]
        rows = None
        if shapes:
            dtype = getattr(torch, shapes[0][1].removeprefix("torch."))
            rows = torch.empty(0, *shapes[0][0], dtype=dtype, device=edges.device)
        agreed = RowWise(
            refused=next((found[0] for found in known if found[0]), ""),
            updates=tuple(sorted({name for found in known for name in found[1]})),
            keeps=tuple(sorted({name for found in known for name in found[3]})),
            numbers=bool(known) and all(found[2] for found in known),
            rows=rows,
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

    def refuse(self, reason: str, rank: int) -> None:
        """Raises where workers can't do what one process does."""
        if reason and self.comm.world_size > 1:
            raise DistributedIndexError(
                f"{self.title} can't run distributed (rank {rank}): {reason}"
            )


# Running it tile by tile ######################################################


def _close(values: Tensor, expected: Tensor) -> bool:
    """Says if they are equal but for rounding, measured by the largest value."""
    if values.shape != expected.shape:
        return False
    if values.numel() == 0:
        return True
    tolerance = {2: 6e-2, 4: 1e-3, 8: 1e-6}.get(expected.element_size(), 6e-2)
    difference = (values - expected).nan_to_num(0, 0, 0).abs().max()
    scale = expected.nan_to_num(0, 0, 0).abs().max()
    return bool(difference <= tolerance * scale + torch.finfo(expected.dtype).tiny)


def check_edges_apart(
    program: TileProgram,
    tile: Tile,
    rows: Callable[[Tile], list[Tensor | None]],
    ambient: AmbientState,
) -> None:
    """A message of an edge must not depend on edges of other targets: it has only some of them."""
    layer = program.layer
    piece = _middle(tile)
    if piece is None:
        return

    with modes_kept(layer):
        for module in layer.modules():
            module.training = False
        still = AmbientState(ambient.device, layer)

        def run(part: Tile, draws: int) -> Tensor:
            with still.restored():
                torch.rand(draws)
                mapped = program.run(part, rows(part), Reductions())
                return torch.cat([m.messages.reshape(m.messages.size(0), -1) for m in mapped], 1)

        whole = run(tile, 0)
        if not torch.equal(whole, run(tile, 1)):
            return  # Random also in evaluation: nothing can be told.
        alone = run(piece, 0)
    start = piece.edges.start - tile.edges.start
    if program.complete:
        start = int(tile.index[start])
    if not whole.is_floating_point() or _close(alone, whole[start : start + alone.size(0)]):
        return
    raise NeedsAllEdges(
        "its message mixes edges of different targets (such as by a mean over all edges), of which "
        "a worker has some only: compute that on the whole graph before write_partitions(), or "
        "from node features",
        forbidden=True,
    )


def _middle(tile: Tile) -> Tile | None:
    """Returns the middle half of a tile, with whole targets; ``None`` where there are too few."""
    edges = tile.num_edges
    if edges < 4 or int(tile.index[edges // 4]) == int(tile.index[(3 * edges) // 4]):
        return None
    first, stop = int(tile.index[edges // 4]), int(tile.index[(3 * edges) // 4])
    start, end = (int((tile.index < bound).sum()) for bound in (first, stop))

    def columns() -> Tensor | slice:
        whole = tile.columns
        if isinstance(whole, slice):
            return slice(whole.start + start, whole.start + end)
        return whole[start:end]

    return Tile(
        tile.unit,
        slice(tile.edges.start + start, tile.edges.start + end),
        tile.targets[first:stop],
        tile.index[start:end] - first,
        tile.source[start:end],
        columns,
    )


def _broadcasts(weights: Tensor, values: Tensor) -> bool:
    """Says if weights apply to values without changing their shape."""
    return all(w in (1, v) for w, v in zip(weights.shape, values.shape, strict=True))


def check_linear(
    program: TileProgram,
    tile: Tile,
    rows: Callable[[Tile], Sequence[Tensor | None]],
    ambient: AmbientState,
    pattern: tuple[str, ...],
) -> None:
    """The message must be linear in the normalised weights and blind to the maximum's value."""

    def run(log: Reductions) -> Tensor:
        with ambient.restored():
            return program.run(tile, rows(tile), log)[0].messages

    first = Reductions()
    original = run(first)
    scales: list[Tensor] = []

    def scale(total: Tensor) -> Tensor:
        # Powers of two scale floating point numbers exactly, differently per target and head. Not
        # by 1: there may be one target alone.
        steps = torch.arange(total.numel(), device=total.device).view(total.shape) % 3 + 1
        scales.append((2.0**steps).to(total.dtype))
        return scales[-1]

    scaled = run(Reductions(scale=scale))
    if not scales or first.total is None:
        return
    per_edge = scales[0].index_select(0, tile.index)
    fits = per_edge.dim() <= original.dim()
    per_edge = spread(per_edge, original) if fits else per_edge
    if not fits or not _broadcasts(per_edge, original) or not _close(scaled * per_edge, original):
        raise NeedsAllEdges("the message is not linear in the weights that it normalises")
    if pattern[0] == "max":
        moved = Reductions(shift=0.5)
        again = run(moved)
        expected = first.total * torch.exp(torch.tensor(-0.5, dtype=first.total.dtype))
        shifted = torch.empty(0) if moved.total is None else moved.total
        if not _close(again, original) or not _close(shifted, expected):
            raise NeedsAllEdges("the message uses its targets' maximum for more than a softmax")


# Products #####################################################################


_VIEWS = frozenset(
    f"aten::{name}"
    for name in ("_reshape_alias", "_unsafe_view", "alias", "detach", "slice", "unsqueeze", "view")
)


class Products(TorchDispatchMode):
    """Watches a run of a message on some edges.

    Args:
        program: The message.
        values: The operands' rows that it is run on.

    Attributes:
        changed: Source rows or numbers of edges were written to.
    """

    def __init__(self, program: TileProgram, values: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._sources, self._weights = (
            {k: values[k] for k in program.numbers(role) if program.operands[k].axis == 0}
            for role in ("source", "edge")
        )
        kept = [*self._sources.values(), *self._weights.values()]
        self._alive = [value for value in kept if value is not None]
        self._storages = {_storage(value) for value in self._alive}
        self._found: tuple[int, int] | None = None
        self._product: Tensor | None = None
        self._other = self.changed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func._schema.name
        if name in _VIEWS or not any(_storage(t) in self._storages for t in inputs):
            return out
        self.changed |= func._schema.is_mutable
        if name == "aten::mul" and func._overloadname == "Tensor" and self._product is None:
            self._found = self._factors(*inputs) if len(inputs) == 2 else None
            self._product = out
            self._storages.add(_storage(out))
        else:
            self._other = True
        return out

    def _factors(self, a: Tensor, b: Tensor) -> tuple[int, int] | None:
        for rows, factor in ((a, b), (b, a)):
            for k, source in self._sources.items():
                for n, weight in self._weights.items():
                    if _is(rows, source) and _is_column(factor, weight, rows):
                        return k, n
        return None

    def is_source(self, mapped: Sequence[Mapped], rows: Tensor | None) -> bool:
        """Says if all messages are ``rows``, the source rows as they were."""
        return not self.changed and all(m.messages is rows for m in mapped)

    def found(self, mapped: Sequence[Mapped]) -> tuple[int, int] | None:
        """Returns the operands whose product all messages are: source rows and numbers of edges."""
        product = self._product
        if self._other or product is None:
            return None
        if not all(_is(m.messages, product) for m in mapped):
            return None
        return self._found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is(a: Tensor, b: Tensor | None) -> bool:
    """Says if two tensors are the same memory, read in the same way."""
    return (
        b is not None
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and (_storage(a), a.storage_offset()) == (_storage(b), b.storage_offset())
    )


def _is_column(factor: Tensor, weight: Tensor | None, rows: Tensor) -> bool:
    """Says if a factor of rows is a number per edge: ``weight [E, 1, ...]`` as a view."""
    if weight is None or weight.dim() == 0 or weight.dtype != rows.dtype:
        return False
    column = torch.Size([rows.size(0), *[1] * (rows.dim() - 1)])
    return (
        rows.dim() > 1
        and factor.shape == column
        and weight.numel() == weight.size(0) == column[0]
        and factor.dtype == weight.dtype
        and factor.stride(0) == weight.stride(0)
        and (_storage(factor), factor.storage_offset())
        == (_storage(weight), weight.storage_offset())
    )
