"""What must hold of a message that is computed tile by tile, checked by running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyg_sar.message.layer_state import AmbientState
from pyg_sar.message.program import TileProgram
from pyg_sar.message.target_index import NeedsAllEdges, Reductions, spread
from pyg_sar.space.shard import Tile


def _close(values: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, measured by the largest value."""
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

    modes = [(module, module.training) for module in layer.modules()]
    try:
        for module, _ in modes:
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
    finally:
        for module, training in modes:
            module.training = training
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
    """The middle half of a tile, with whole targets; ``None`` where there are too few."""
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
    """Whether weights apply to values without changing their shape."""
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
