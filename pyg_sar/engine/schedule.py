"""Schedules: in which order a pass goes through blocks of edges, and at which end it computes.

[Note: here and there] A worker p owns targets, q owns sources, edges go q -> p. A block of these
edges is gone through *here*, at p, or *there*, at q, on p's behalf:

=========  ====================================  ===============================================
pass       here                                  there
=========  ====================================  ===============================================
forward    source rows q -> p                    what is read of targets p -> q, their states
                                                 q -> p, which p merges
backward   source rows again (case 2),           what is known of targets p -> q, gradients of
           their gradients p -> q                what was read of them q -> p
=========  ====================================  ===============================================

A stage is a run of blocks at one end, one for each unit of an exchange. In a stage *there*, what
travels are rows of targets (*slots*), by a halo plan in which the sources' worker has the slots as
its halo. Unit 0 of a stage has the worker's own edges, which are at both ends. All workers go
through the same stages in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyg_sar.engine.chunks import Chunks
from pyg_sar.engine.cuts import SplitEdges
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.halo_rows import HaloRows
from pyg_sar.exchange.part_rows import PartRows, is_hosted
from pyg_sar.exchange.rows import Exchange
from pyg_sar.space.shard import Block, Shards


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks at one end of their edges. See [Note: here and there].

    Attributes:
        exchange: By which their rows come and go.
        blocks: One for each unit, or ``None`` where it has no edges.
        there: They are gone through on their targets' workers' behalf.
    """

    exchange: Exchange
    blocks: Sequence[Block | None]
    there: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """The stages of a forward pass and of the backward pass that follows it.

    Attributes:
        plan: The halo plan of the edges.
        in_degree: Edges into each target, ``[num_targets]``.
        forward: Stages.
        backward: Stages.
    """

    plan: HaloPlan
    in_degree: Tensor
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]


def by_shards(
    shards: Shards, forward: SplitEdges | None = None, backward: SplitEdges | None = None
) -> Schedule:
    """Goes through the edges owner by owner, where source rows come here; or in each pass as a
    cover has split those between workers.
    """
    there = _stages(shards, forward)
    back = there if backward is forward else _stages(shards, backward)
    return Schedule(shards.plan, shards.in_degree, there, back)


def _stages(shards: Shards, split: SplitEdges | None) -> tuple[Stage, ...]:
    """Own edges first, while the first slots travel; then slots; then rows that come here."""
    if split is None:
        return (Stage(rows_of(shards.plan), shards.blocks),)
    own = shards.blocks[0]
    there = Stage(rows_of(split.slots), [own, *split.pushed], there=True)
    if not split.pulls:
        return (there,)
    return there, Stage(rows_of(split.plan), [None, *split.pulled])


def rows_of(plan: HaloPlan) -> Exchange:
    """The exchange of a plan's halo rows."""
    return PartRows(plan) if is_hosted(plan) else HaloRows(plan)


def by_chunks(chunks: Chunks) -> Schedule:
    """Goes through the edges some targets after others, each with all their in-edges."""
    blocks: Any = chunks.blocks
    stages = (Stage(chunks, blocks),)
    return Schedule(chunks.plan, chunks.in_degree, stages, stages)
