"""Whose values a tensor holds, element by element: of which edge, of which node, or of several.

[Note: labels] A label is a number beside each element of each storage, so that views, writes in
place and aliases need no care. It says what the element was computed from:

* ``0``: from nothing that belongs to an edge or a node (parameters, constants);
* ``MIXED``: from several edges or nodes, or from something that only this worker knows;
* ``edge + e``: from edge *e*, or from what was reduced at one of its two ends;
* ``node + v``: from edges of node *v* only;
* ``number + e``: it is the id of an end of edge *e*, which means something as an index alone;
* ``place + k``: it is the position *k*, of use as an index alone;
* ``COUNT``: the largest node id, of use as a size alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MIXED, COUNT = -1, -2
STEP = 2**12  # more than a sample has edges or nodes
EDGE, NODE, NUMBER, PLACE = STEP, 2 * STEP, 4 * STEP, 6 * STEP
_LARGE = 2**30


def is_node(labels: Tensor) -> Tensor:
    return (labels >= NODE) & (labels < NUMBER)


def is_edge(labels: Tensor) -> Tensor:
    return (labels >= EDGE) & (labels < NODE)


def is_number(labels: Tensor) -> Tensor:
    return (labels >= NUMBER) & (labels < PLACE)


def is_place(labels: Tensor) -> Tensor:
    return labels >= PLACE


def as_values(labels: Tensor) -> Tensor:
    """Ids, positions and sizes that are computed with, where only an index is right."""
    return torch.where((labels >= NUMBER) | (labels == COUNT), MIXED, labels)


def combined(labels: Sequence[Tensor]) -> Tensor:
    """Of elements computed from one element of each tensor, broadcast."""
    out = labels[0]
    for other in labels[1:]:
        same = torch.where((out == other) | (other == 0), out, MIXED)
        out = torch.where(out == 0, other, same)
    return out


def reduced(labels: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Of elements computed from all elements along some axes."""
    if labels.dim() == 0 or not dims:
        return labels
    if labels.numel() == 0:
        return labels.new_zeros(labels.shape).sum(list(dims), keepdim, dtype=labels.dtype)
    most = labels.amax(list(dims), keepdim)
    least = torch.where(labels == 0, _LARGE, labels).amin(list(dims), keepdim)
    out = torch.where(least == most, most, MIXED)
    return torch.where((least == _LARGE) & (most == 0), 0, out)


def scattered(base: Tensor, dim: int, index: Tensor, entries: Tensor, keeps: bool) -> Tensor:
    """Of what is reduced at positions ``index`` along an axis, and of what was there before."""
    if entries.numel() == 0:
        return base
    start = base if keeps else torch.zeros_like(base)
    most = start.scatter_reduce(dim, index, entries, "amax")
    known = torch.where(start == 0, _LARGE, start)
    entries = torch.where(entries == 0, _LARGE, entries)
    least = known.scatter_reduce(dim, index, entries, "amin")
    out = torch.where(least == most, most, MIXED)
    out = torch.where((least == _LARGE) & (most == 0), 0, out)
    hit = torch.zeros_like(base, dtype=torch.bool).scatter(dim, index, True)
    return torch.where(hit, out, base)


def read_by(found: Tensor, index: Tensor) -> Tensor:
    """Of elements ``found`` that were read by an index with these labels, broadcast."""
    found, index = torch.broadcast_tensors(found, index)
    number, place = is_number(index), is_place(index)
    edge = EDGE + (index - NUMBER) % STEP
    # A node's value is complete at each of its edges: it is as good as the edge's own.
    by_node = torch.where(is_node(found), edge, MIXED)
    by_place = torch.where(found == EDGE + (index - PLACE), found, MIXED)
    plainly = combined([found, torch.where(number | place, 0, as_values(index))])
    # An id stays one where its own edge chose it.
    own = torch.where(is_place(found), found - PLACE, (found - NUMBER) % STEP)
    ids = (found >= NUMBER) & ((index == 0) | (index == EDGE + own))
    plainly = torch.where(ids, found, plainly)
    out = torch.where(number, by_node, plainly)
    return torch.where(place, by_place, out)


def entries_at_nodes(values: Tensor, index: Tensor, where: Tensor) -> Tensor:
    """Of values that are put to positions ``where`` by an index with these labels."""
    values, index, where = torch.broadcast_tensors(as_values(values), index, where)
    edge = EDGE + (index - NUMBER) % STEP
    space = (index - NUMBER) // STEP
    own = (values == 0) | (values == edge)
    at_node = torch.where(own, NODE + space * STEP + where.to(index.dtype), MIXED)
    own_place = (values == 0) | (values == EDGE + (index - PLACE))
    at_place = torch.where(own_place, EDGE + (index - PLACE), MIXED)
    out = torch.where(is_number(index), at_node, combined([values, as_values(index)]))
    return torch.where(is_place(index), at_place, out)


@dataclass(slots=True)
class Labels:
    """The labels of all storages that a run came across."""

    _of: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # or a storage's number would come again
    ragged: set[int] = field(default_factory=set)  # storages of rows that values have chosen

    def key(self, tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def known(self, tensor: Tensor) -> bool:
        return self.key(tensor) in self._of

    def of(self, tensor: Tensor) -> Tensor:
        """Labels ``[*tensor.shape]``."""
        found = self._of.get(self.key(tensor))
        if found is None:
            return torch.zeros((), dtype=torch.int32).expand(tensor.shape)
        flat, size = found
        if size != tensor.element_size():  # the same memory as numbers of another width
            mixed = MIXED if bool(flat.any()) else 0
            return torch.full(tensor.shape, mixed, dtype=torch.int32)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, labels: Tensor) -> None:
        """Sets a tensor's labels, ``labels`` broadcast to it."""
        key = self.key(tensor)
        if key not in self._of:
            size = tensor.element_size()
            count = tensor.untyped_storage().nbytes() // size
            self._of[key] = torch.zeros(count, dtype=torch.int32), size
            self._alive.append(tensor)
        if tensor.numel():
            flat, size = self._of[key]
            if size == tensor.element_size():
                view = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                view.copy_(labels.expand(tensor.shape))
            elif bool(labels.any()):
                flat.fill_(MIXED)
