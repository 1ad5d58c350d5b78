"""Edges selected from an edge index, found again by the columns that selected them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_sar.space.distributed_index import DistEdgeIndex, version_of


class Selections:
    """Edges selected from a tensor earlier, found again by the same or by equal columns.

    Relational layers select the edges of each relation by a mask that they make anew in each
    pass. As many edges are remembered as there are in a few copies of the whole.

    Args:
        num_edges: Edges that may be selected.
    """

    def __init__(self, num_edges: int) -> None:
        self._room = 4 * num_edges + 64
        self._narrow = num_edges < 2**31
        self._held = 0
        self._by_identity: OrderedDict[Any, tuple[Tensor, DistEdgeIndex]] = OrderedDict()
        self._by_content: OrderedDict[Any, tuple[Tensor, DistEdgeIndex]] = OrderedDict()

    def find(self, columns: Tensor, make: Callable[[], DistEdgeIndex]) -> DistEdgeIndex:
        """The edges in these columns (a mask, or their numbers)."""
        key = (id(columns), version_of(columns))
        if key not in self._by_identity:
            # The entry keeps `columns` alive, so that its id stays its own.
            self._by_identity[key] = columns, self._equal(columns, make)
            if len(self._by_identity) > 16:
                self._by_identity.popitem(last=False)
        self._by_identity.move_to_end(key)
        return self._by_identity[key][1]

    def _equal(self, columns: Tensor, make: Callable[[], DistEdgeIndex]) -> DistEdgeIndex:
        with torch.inference_mode(False):
            mask = columns.dtype in (torch.bool, torch.uint8)
            numbers = columns.nonzero().view(-1) if mask else columns.clone()
            numbers = numbers.int() if self._narrow else numbers
        places = torch.arange(numbers.numel(), device=numbers.device) % 1009
        key = numbers.numel(), int(numbers.sum()), int((numbers * places).sum())
        found = self._by_content.pop(key, None)
        if found is not None and not torch.equal(found[0], numbers):
            self._held -= numbers.numel()
            found = None
        if found is None:
            found = numbers, make()
            found[1].by_content = True
            self._held += numbers.numel()
        self._by_content[key] = found
        while self._held > self._room and len(self._by_content) > 1:
            _, (dropped, _) = self._by_content.popitem(last=False)
            self._held -= dropped.numel()
        return found[1]
