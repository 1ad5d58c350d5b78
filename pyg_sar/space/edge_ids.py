"""Global numbers of edges: where each edge of a worker stands in one process's list of all edges.

[Note: global numbers] PyG derives edge lists anew: self loops are removed, and added behind all
others in the order of the nodes. A worker has some edges of each list, in the order of the whole.
So a list has a recipe: edges that were loaded have the numbers that came with them, selected edges
those of their list, joined ones those of the parts, one part behind the other, and added self loops
the number of their node. These are *ids*: an edge's own, whatever worker has it, but with gaps
where edges were removed. *Places* have none: they are what one process counts.

Recipes are made by each worker for itself; numbers come of them when all workers ask together, and
are kept with the edges. As long as all workers ran the same program, their recipes are of one form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_sar.space.draws import ascending

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator

_AGREE = ("", "", "agreement")
_PIECE = 2**24  # ids that are looked at together


class Recipe:
    """Ids of some edges."""

    def known(self) -> bool:
        """Returns whether this worker's ids can be told."""
        raise NotImplementedError

    def bounds(self) -> list[int]:
        """Returns numbers above this worker's ids, of each part that has numbers of its own."""
        raise NotImplementedError

    def ids(self, bounds: Iterator[int]) -> tuple[Tensor, int]:
        """Returns the ids ``[E]`` and a number above those of all workers.

        Args:
            bounds: The largest of all workers' :meth:`bounds`, in their order.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Given(Recipe):
    """Ids that are known, ``[E]``, or what finds them; ``None``: they should be, and are not."""

    found: Tensor | Callable[[], Tensor | None] | None

    def known(self) -> bool:
        return self.found is not None

    def bounds(self) -> list[int]:
        found = self._ids()
        return [0 if found is None or found.numel() == 0 else int(found.max()) + 1]

    def ids(self, bounds: Iterator[int]) -> tuple[Tensor, int]:
        found = self._ids()
        if found is None:
            raise RuntimeError("The edges have no ids")
        return found, next(bounds)

    def _ids(self) -> Tensor | None:
        found = self.found
        return found if found is None or isinstance(found, Tensor) else found()


@dataclass(frozen=True, slots=True)
class Selected(Recipe):
    """Edges of another list, in its order; ``columns`` are ``None`` where the order is another."""

    of: Recipe
    columns: Tensor | slice | None

    def known(self) -> bool:
        return self.columns is not None and self.of.known()

    def bounds(self) -> list[int]:
        return self.of.bounds()

    def ids(self, bounds: Iterator[int]) -> tuple[Tensor, int]:
        found, bound = self.of.ids(bounds)
        return found[slice(None) if self.columns is None else self.columns], bound


@dataclass(frozen=True, slots=True)
class Joined(Recipe):
    """Edges of several lists, one behind the other."""

    parts: Sequence[Recipe]

    def known(self) -> bool:
        return all(part.known() for part in self.parts)

    def bounds(self) -> list[int]:
        return [bound for part in self.parts for bound in part.bounds()]

    def ids(self, bounds: Iterator[int]) -> tuple[Tensor, int]:
        ids, start = [], 0
        for part in self.parts:
            found, bound = part.ids(bounds)
            ids.append(found + start)
            start += bound
        return torch.cat(ids), start


@dataclass(frozen=True)
class EdgeNumbers:
    """The global numbers of a worker's edges. See [Note: global numbers].

    Attributes:
        numbers: Of each edge its own, ``[E]``.
        total: A number above those of all workers; of places, the edges of all workers.
    """

    numbers: Tensor
    total: int

    @cached_property
    def ascending(self) -> Tensor:
        """The edges in ascending order of their numbers, ``[E]``, int32."""
        with torch.inference_mode(False):  # Training may come after inference.
            return ascending(self.numbers)


def edge_numbers(edge_index: Any, places: bool) -> EdgeNumbers | None:
    """The places of a distributed edge index, or its ids; ``None`` on all workers where they are
    not known.

    All workers call this together.
    """

    def make() -> tuple[EdgeNumbers | None]:
        found = edge_numbers(edge_index, False) if places else _edge_ids(edge_index)
        return (_places(found, edge_index.plan.comm) if places and found is not None else found,)

    key = "edge places" if places else "edge ids"
    found: tuple[EdgeNumbers | None] = edge_index.remember_together(key, make)
    return found[0]


def _edge_ids(edge_index: Any) -> EdgeNumbers | None:
    comm, device = edge_index.plan.comm, edge_index.device
    recipe = None if edge_index.places is None else edge_index.places.recipe
    fine = torch.tensor(int(recipe is not None and recipe.known()), device=device)
    if not int(comm.all_reduce(fine, "min", label=_AGREE)) or recipe is None:
        return None
    bounds = comm.all_reduce(torch.tensor(recipe.bounds(), device=device), "max", label=_AGREE)
    ids, bound = recipe.ids(iter(bounds.tolist()))
    return EdgeNumbers(ids.to(device), bound)


def _places(found: EdgeNumbers, comm: Communicator) -> EdgeNumbers | None:
    """Numbers the edges of all workers without gaps, in the order of their ids."""
    ids, device = found.numbers, found.numbers.device
    total = comm.all_reduce(torch.tensor(ids.numel(), device=device), label=_AGREE)
    if int(total) == found.total:
        return found
    places = torch.empty_like(ids)
    ordered, order = ids.sort()
    before = 0
    for start in range(0, found.total, _PIECE):
        there = torch.zeros(min(_PIECE, found.total - start), dtype=torch.int32, device=device)
        ends = torch.tensor([start, start + there.numel()], device=device)
        low, high = torch.searchsorted(ordered, ends).tolist()
        mine = ordered[low:high] - start
        there[mine] = 1
        counts = comm.all_reduce(there, "max", label=_AGREE).cumsum(0)
        places[order[low:high]] = counts[mine] + (before - 1)
        before += int(counts[-1])
    # An id that two edges have would be counted once.
    return EdgeNumbers(places, before) if before == int(total) else None
