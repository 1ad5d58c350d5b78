"""Labels of values: of which edge, of which node, or of several each element of a tensor tells.

[Note: labels] A label is a number beside each element of each storage, so that views, writes in
place and aliases need no care. It says what the element was computed from:

* ``0``: from nothing that belongs to an edge or a node (parameters, constants);
* ``MIXED``: from several edges or nodes, or from something that only this worker knows;
* ``edge + e``: from edge *e*, or from what was reduced at one of its two ends;
* ``node + v``: from edges of node *v* only;
* ``number + e``: it is the id of an end of edge *e*, which means something as an index alone;
* ``place + k``: it is the position *k*, of use as an index alone;
* ``COUNT``: the largest node id, of use as a size alone.

[Note: rules] A rule gives the labels of an operator's results from those of its operands. Operators
are those below autograd (``aten``), of which every other is composed. One that stands in no table
here is taken to make each element of its result from all of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_sar.space.distributed_index import storage_of

MIXED, COUNT = -1, -2
STEP = 2**12  # more than a sample has edges or nodes
EDGE, NODE, NUMBER, PLACE = STEP, 2 * STEP, 4 * STEP, 6 * STEP
_LARGE = 2**30


def is_node(labels: Tensor) -> Tensor:
    return (labels >= NODE) & (labels < NUMBER)


def is_number(labels: Tensor) -> Tensor:
    return (labels >= NUMBER) & (labels < PLACE)


def is_place(labels: Tensor) -> Tensor:
    return labels >= PLACE


def as_values(labels: Tensor) -> Tensor:
    """Returns labels of values computed with: ids, positions and sizes count as ``MIXED``."""
    return torch.where((labels >= NUMBER) | (labels == COUNT), MIXED, labels)


def combined(labels: Sequence[Tensor]) -> Tensor:
    """Returns labels of elements computed from one element of each tensor, broadcast."""
    out = labels[0]
    for other in labels[1:]:
        same = torch.where((out == other) | (other == 0), out, MIXED)
        out = torch.where(out == 0, other, same)
    return out


def reduced(labels: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Returns labels of elements computed from all elements along some axes."""
    if labels.dim() == 0 or not dims:
        return labels
    if labels.numel() == 0:
        return labels.new_zeros(labels.shape).sum(list(dims), keepdim, dtype=labels.dtype)
    most = labels.amax(list(dims), keepdim)
    least = torch.where(labels == 0, _LARGE, labels).amin(list(dims), keepdim)
    out = torch.where(least == most, most, MIXED)
    return torch.where((least == _LARGE) & (most == 0), 0, out)


def scattered(base: Tensor, dim: int, index: Tensor, entries: Tensor, keeps: bool) -> Tensor:
    """Returns labels of what is reduced at positions ``index`` of an axis, and was there before."""
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
    """Returns labels of elements ``found`` read by an index with these labels, broadcast."""
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
    """Returns labels of values put to positions ``where`` by an index with these labels."""
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

    def known(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._of

    def of(self, tensor: Tensor) -> Tensor:
        """Returns labels ``[*tensor.shape]``."""
        found = self._of.get(storage_of(tensor))
        if found is None:
            return torch.zeros((), dtype=torch.int32).expand(tensor.shape)
        flat = _of_width(*found, tensor.element_size())
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, labels: Tensor) -> None:
        """Sets a tensor's labels, ``labels`` broadcast to it."""
        key = storage_of(tensor)
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


def _of_width(flat: Tensor, size: int, wanted: int) -> Tensor:
    """Returns labels of the same memory as numbers of another width (``view_as_real``, say)."""
    if size > wanted:
        return as_values(flat).repeat_interleave(size // wanted)
    if size < wanted:
        count = flat.numel() * size // wanted
        parts = as_values(flat)[: count * (wanted // size)].view(count, wanted // size)
        return combined(list(parts.unbind(1)))
    return flat


# Rules ########################################################################


@dataclass(slots=True)
class Call:
    """One call of an operator.

    Attributes:
        name: Its name without namespace and overload.
        given: Its arguments by name.
        outs: Its results that are tensors.
        labels: Where labels are.
        pointwise: Whether torch says so.
        counted: Each operand's axes whose length depends on the number of edges, although it may
            hold the same for each: to reduce over them is to count edges.
    """

    name: str
    given: dict[str, Any]
    outs: list[Tensor]
    labels: Labels
    pointwise: bool
    counted: list[list[int]] = field(default_factory=list)
    _operands: list[Tensor] | None = None

    def operands(self) -> list[Tensor]:
        """Returns the arguments that are tensors, in order."""
        if self._operands is None:
            self._operands = []
            for value in self.given.values():
                if isinstance(value, Tensor):
                    self._operands.append(value)
                elif isinstance(value, list | tuple):
                    self._operands += [t for t in value if isinstance(t, Tensor)]
        return self._operands

    def of(self, tensor: Any) -> Tensor:
        """Returns the labels of a value to compute with."""
        if not isinstance(tensor, Tensor):
            return torch.zeros((), dtype=torch.int32)
        return as_values(self.labels.of(tensor))

    def over(self, tensor: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """Returns labels reduced along axes."""
        found = self.of(tensor)
        dims = sorted({d % found.dim() for d in dims}) if found.dim() else []
        out = reduced(found, dims, keepdim)
        ragged = 0 in dims and storage_of(tensor) in self.labels.ragged
        places = [
            axes for t, axes in zip(self.operands(), self.counted, strict=False) if t is tensor
        ]
        if ragged or any(set(dims).intersection(axes) for axes in places):
            out = torch.full_like(out, MIXED)
        return out


def matrix_labels(call: Call) -> Tensor:
    parts = [
        call.over(t, [-2, -1] if t.dim() > 1 else [-1] if t.dim() else [], True)
        for t in call.operands()
    ]
    whole = combined([p.view(1, 1) if p.dim() < 2 else p for p in parts])
    batch = whole.shape[:-2]
    if not batch:
        return whole.view(())
    dims = {out.dim() for out in call.outs}
    if any(out.shape[: len(batch)] != batch for out in call.outs) or len(dims) == 0:
        return reduced(whole, range(whole.dim()), False)
    most = max(dims)
    return whole.view(*batch, *[1] * (most - len(batch))) if len(dims) == 1 else _all(whole)


def _all(labels: Tensor) -> Tensor:
    return reduced(labels, list(range(labels.dim())), False)


def _product(left: str, right: str, added: str = "") -> Callable[[Call], Tensor]:
    """Returns the rule for products of matrices, or of a matrix and a vector."""

    def rule(call: Call) -> Tensor:
        a, b = call.given[left], call.given[right]
        rows = call.over(a, [-1], True)
        columns = call.over(b, [-2 if b.dim() > 1 else -1], True)
        rows = rows if b.dim() > 1 else rows.squeeze(-1)
        parts = [rows, columns]
        if added:
            parts.append(call.of(call.given[added]))
        return combined(parts)

    return rule


def _transposed_product(call: Call) -> Tensor:
    """``linear``: each row with each row of the weights."""
    given = call.given
    rows = call.over(given["input"], [-1], True)
    columns = call.over(given["weight"], [-1])
    parts = [rows, columns]
    if isinstance(given.get("bias"), Tensor):
        parts.append(call.of(given["bias"]))
    return combined(parts)


def _distances(call: Call) -> Tensor:
    first, second = call.given["x1"], call.given["x2"]
    return combined([call.over(first, [-1], True), call.over(second, [-1]).unsqueeze(-2)])


def _layer_norm(call: Call) -> Tensor:
    source, axes = call.given["input"], len(call.given["normalized_shape"])
    parts = [call.over(source, list(range(-axes, 0)), True)]
    for name in ("weight", "bias"):
        if isinstance(call.given.get(name), Tensor):
            parts.append(_all(call.of(call.given[name])))
    return combined(parts)


def _batch_norm(call: Call) -> Tensor:
    given = call.given
    source = given["input"]
    trains = given.get("training", given.get("train", True))
    if "no_training" in call.name:
        trains = False
    axes = [d for d in range(source.dim()) if d != 1]
    rows = call.over(source, axes, True) if trains else call.of(source)
    names = ("weight", "bias", "running_mean", "running_var")
    others = [_all(call.of(given[n])) for n in names if isinstance(given.get(n), Tensor)]
    whole = combined([rows, *others])
    return whole if all(out.dim() == source.dim() for out in call.outs[:1]) else _all(whole)


def _norm_outputs(rule: Callable[[Call], Tensor]) -> Callable[[Call], list[Tensor]]:
    """The first result has the rule's labels; the others are its statistics."""

    def labels(call: Call) -> list[Tensor]:
        whole = rule(call)
        return [whole, *[_all(whole) for _ in call.outs[1:]]]

    return labels


# Reading and writing by an index ##############################################


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _index_select(call: Call) -> Tensor:
    given, labels = call.given, call.labels
    source, index = given["self"], given["index"]
    dim = given["dim"] % max(source.dim(), 1)
    found = labels.of(source).index_select(dim, _plain(index).reshape(-1))
    shape = [-1 if d == dim else 1 for d in range(source.dim())]
    return read_by(found, labels.of(index).reshape(shape))


def _gather(call: Call) -> Tensor:
    given, labels = call.given, call.labels
    found = labels.of(given["self"]).gather(given["dim"], _plain(given["index"]))
    return read_by(found, labels.of(given["index"]))


def _embedding(call: Call) -> Tensor:
    given, labels = call.given, call.labels
    index = given["indices"]
    found = labels.of(given["weight"])[_plain(index)]
    return read_by(found, labels.of(index).unsqueeze(-1))


def _take(call: Call) -> Tensor:
    given, labels = call.given, call.labels
    found = labels.of(given["self"]).reshape(-1)[_plain(given["index"])]
    return read_by(found, labels.of(given["index"]))


def _positions(call: Call) -> tuple[list[Any], list[Tensor], int, bool]:
    """Returns indices without masks, their labels, axes before them, and if values chose rows."""
    places: list[Any] = []
    labels: list[Tensor] = []
    chosen = False
    for index in call.given["indices"]:
        if index is None:
            places.append(None)
        elif index.dtype in (torch.bool, torch.uint8):
            mask = _plain(index).bool()
            own = call.of(index)
            chosen |= bool(own.any())
            places += list(mask.nonzero(as_tuple=True))
            labels.append(own[mask])
        else:
            chosen |= storage_of(index) in call.labels.ragged
            places.append(_plain(index))
            labels.append(call.labels.of(index))
    named = [k for k, place in enumerate(places) if place is not None]
    together = named == list(range(named[0], named[-1] + 1)) if named else True
    return places, labels, named[0] if together and named else 0, chosen


def _spread(labels: Sequence[Tensor], before: int, result: Tensor) -> list[Tensor]:
    """Returns labels of indices, as wide as what is read or written by them."""
    wide = torch.broadcast_tensors(*labels) if labels else []
    after = result.dim() - before - (wide[0].dim() if wide else 0)
    return [part.reshape(*[1] * before, *part.shape, *[1] * after) for part in wide]


def _index(call: Call) -> Tensor:
    places, labels, before, chosen = _positions(call)
    found = torch.ops.aten.index(call.labels.of(call.given["self"]), places)
    for part in _spread(labels, before, found):
        found = read_by(found, part)
    if chosen:
        call.labels.ragged |= {storage_of(out) for out in call.outs}
    return found


def _index_put(call: Call) -> Tensor:
    places, labels, before, _ = _positions(call)
    base = call.labels.of(call.given["self"]).clone()
    region = torch.ops.aten.index(base, places)
    entries = call.of(call.given["values"]).expand(region.shape)
    where = next((p for p in places if p is not None), torch.zeros((), dtype=torch.long))
    if call.given.get("accumulate", False):
        entries = torch.where((entries == 0) & (region == 0), 0, MIXED)
        labels = []
    for part in _spread(labels, before, region):
        wide = where.reshape([*where.shape, *[1] * (part.dim() - before - where.dim())])
        entries = entries_at_nodes(entries, part, wide).to(torch.int32)
    return base.index_put_(tuple(places) if None not in places else _full(base, places), entries)


def _full(base: Tensor, places: Sequence[Any]) -> tuple[Any, ...]:
    """Returns indices with whole axes where there were none."""
    numbers = torch.arange(base.numel()).view(base.shape)
    chosen = torch.ops.aten.index(numbers, list(places))
    return torch.unravel_index(chosen, base.shape)


def scatter_labels(call: Call) -> Tensor:
    given, labels = call.given, call.labels
    base, index, dim = given["self"], given["index"], given["dim"]
    dim = dim % max(base.dim(), 1)
    values = given.get("src", given.get("source", given.get("value", 0)))
    place, own = _plain(index), labels.of(index)
    if call.name.startswith("index_"):
        shape = list(base.shape)
        shape[dim] = index.numel()
        wide = [-1 if d == dim else 1 for d in range(base.dim())]
        place = place.reshape(wide).expand(shape)
        own = own.reshape(wide).expand(shape)
    found = call.of(values)
    if found.dim():
        found = found[tuple(slice(n) for n in place.shape)]
    entries = entries_at_nodes(found, own, place).to(torch.int32)
    reduces = "add" in call.name or "reduce" in call.name or given.get("reduce") is not None
    keeps = reduces and given.get("include_self", True)
    return scattered(call.of(base), dim, place, entries, keeps)


def _bincount(call: Call) -> Tensor:
    index, labels = call.given["self"], call.labels
    weights = call.of(call.given.get("weights")).expand(index.shape)
    entries = entries_at_nodes(weights, labels.of(index), _plain(index)).to(torch.int32)
    base = torch.zeros(call.outs[0].shape, dtype=torch.int32)
    return scattered(base, 0, _plain(index), entries, False)


def _nonzero(call: Call) -> Tensor:
    """Positions: those of edges are as good as an index that runs through them."""
    source, out = call.given["self"], _plain(call.outs[0])
    found = call.of(source)[tuple(out.unbind(1))].unsqueeze(1) if out.size(1) else out
    if out.size(1) and bool(found.any()):
        call.labels.ragged.add(storage_of(call.outs[0]))
    return torch.where(found == EDGE + out, PLACE + out, found).to(torch.int32)


def _search(values: str, table: str) -> Callable[[Call], Tensor]:
    def rule(call: Call) -> Tensor:
        return combined([call.of(call.given[values]), _all(call.of(call.given[table]))])

    return rule


def _one_hot(call: Call) -> Tensor:
    return call.of(call.given["self"]).unsqueeze(-1)


RULES: dict[str, Callable[[Call], Any]] = {
    "_addmm_activation": _product("mat1", "mat2", "self"),
    "_cdist_forward": _distances,
    "_native_batch_norm_legit": _norm_outputs(_batch_norm),
    "_native_batch_norm_legit_no_training": _norm_outputs(_batch_norm),
    "addmm": _product("mat1", "mat2", "self"),
    "addmv": _product("mat", "vec", "self"),
    "baddbmm": _product("batch1", "batch2", "self"),
    "bincount": _bincount,
    "bmm": _product("self", "mat2"),
    "bucketize": _search("self", "boundaries"),
    "embedding": _embedding,
    "gather": _gather,
    "index": _index,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_unsafe_index": _index,
    "_unsafe_index_put": _index_put,
    "index_select": _index_select,
    "isin": _search("elements", "test_elements"),
    "linear": _transposed_product,
    "mm": _product("self", "mat2"),
    "mv": _product("self", "vec"),
    "native_batch_norm": _norm_outputs(_batch_norm),
    "native_layer_norm": _layer_norm,
    "nonzero": _nonzero,
    "one_hot": _one_hot,
    "take": _take,
}
