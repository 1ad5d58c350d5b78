"""The index space: ``edge_index`` as an ordinary ``[2, E]`` tensor over own and halo nodes.

[Note: what may be done with a distributed index] Reading a node tensor with it is a halo gather,
scattering into a node tensor with it is a halo reduction; selecting, cutting and joining edges
stays in the space. Anything else would compute with numbers that only this worker understands,
and raises :class:`DistributedIndexError` instead of returning local results.

[Note: once per structure] PyG derives edge lists anew in each forward pass (self loops removed and
added, say). Derivations are remembered on the tensor they start from, by the identity and version
of what selected the edges (or by equal content for joined edges), so that the same tensor object
comes back and what hangs on it (shards, normalisation) is made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.gather import halo_gather, halo_reduce
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.space.distributed_index import (
    METADATA,
    RESHAPE,
    SAME_SHAPE_COMPARE,
    DistEdgeIndex,
    DistIndex,
    InSpace,
    Order,
    Selections,
    builtin,
    dist_edge_index,
    dist_index,
    handles,
    name_of,
    plain,
    refusal,
    require_rows,
    version_of,
)
from pyg_sar.space.edge_ids import Given, Joined, Recipe, Selected
from pyg_sar.space.joint_index import (
    ShiftedEdges,
    join,
    row_of_shifted,
    set_shifted_row,
    widened_row,
)
from pyg_sar.space.num_nodes import adds_loops
from pyg_sar.space.partial_edges import derived, flow_targets, refuse_partial
from pyg_sar.space.pyg_calls import pyg_call

__all__ = [
    "METADATA",
    "RESHAPE",
    "DistEdgeIndex",
    "DistIndex",
    "builtin",
    "dist_edge_index",
    "dist_index",
    "name_of",
    "plain",
    "version_of",
]


# Selecting and joining edges #################################################


def _row(edge_index: DistEdgeIndex, number: int) -> Tensor:
    def make() -> Tensor:
        row = plain(edge_index)[number]
        if number != edge_index.dist_row:
            return row if edge_index.partial is None else flow_targets(row, edge_index)
        index = dist_index(row, edge_index.plan, targets=edge_index.targets)
        index.by_content = edge_index.by_content
        return derived(index.ordered(edge_index.places), edge_index)

    return edge_index.remember(("row", number), make)


@handles(Tensor.unbind, torch.unbind, Tensor.__iter__)
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if isinstance(source, DistEdgeIndex) and (len(args) < 2 or args[1] == 0):
        rows = (_row(source, 0), _row(source, 1))
        return iter(rows) if func is Tensor.__iter__ else rows
    raise refusal(func)


def _edges_like(edge_index: Tensor, source: DistEdgeIndex) -> DistEdgeIndex:
    """Other edges in the same space."""
    place = source.dist_row, source.targets, source.by_content
    return derived(dist_edge_index(edge_index, source.plan, *place), source)


def _only_loops_left_out(source: DistEdgeIndex, columns: Any) -> bool:
    """True where a mask leaves out no edge between two nodes."""
    if not isinstance(columns, Tensor) or columns.dtype != torch.bool:
        return False
    ends = plain(source)[:, ~columns]
    return torch.equal(ends[0], ends[1])


def _selected_order(source: Any, columns: Any, ascending: bool = False) -> Order | None:
    """The edges' order after a selection; unknown when that changes it."""
    places: Order | None = source.places
    if places is None:
        return None
    permutes = not isinstance(columns, slice | Tensor)
    if isinstance(columns, slice):
        permutes = (columns.step or 1) < 0
    elif isinstance(columns, Tensor):
        ascending = ascending or columns.dtype == torch.bool
        permutes = not ascending and bool((columns.diff() <= 0).any())
    # All workers' recipes are of one form, also where the order is lost on some.
    recipe = places.recipe and Selected(places.recipe, None if permutes else columns)

    def make() -> Tensor | None:
        order = places.find()
        return None if order is None else order[columns]

    return Order(None if permutes else make, recipe)


def _recipe(part: Tensor, plan: HaloPlan) -> Recipe:
    """Where the global numbers of joined edges come from: plain ones must be all self loops."""
    if isinstance(part, InSpace):
        return Given(None) if part.places is None else part.places.recipe or Given(None)
    n_id = plan.n_id
    if n_id is None or part.dim() != 2 or part.size(1) > plan.num_local:
        return Given(None)
    loops = torch.arange(part.size(1), device=part.device).expand_as(part)
    return Given(n_id[: part.size(1)] if torch.equal(part, loops) else None)


def _joined_order(parts: Sequence[Any], edges: bool, plan: HaloPlan) -> Order | None:
    """Part after part, as in the whole graph's list; plain edges are in order."""
    counts = [part.size(1 if edges else 0) for part in parts]
    nothing = torch.empty(0, dtype=torch.long, device=parts[0].device)
    known = [part.places if isinstance(part, InSpace) else Order(nothing) for part in parts]
    in_space = [isinstance(part, InSpace) for part in parts]
    if any(places is None for places in known):
        return None

    def make() -> Tensor | None:
        ranks: list[Tensor] = []
        start = 0
        for places, count, ordered in zip(known, counts, in_space, strict=True):
            order = None if places is None else places.find()
            if order is None:
                return None
            here = torch.arange(count, device=order.device)
            ranks.append((order.argsort().argsort() if ordered else here) + start)
            start += count
        return torch.cat(ranks)

    return Order(make, Joined([_recipe(part, plan) for part in parts]) if edges else None)


def _comparison_of_ends(source: DistEdgeIndex, mask: Tensor) -> str | None:
    """Names the comparison of the edges' ends that a mask is: all workers have made it, of theirs.

    PyG removes loops so.
    """
    row, other = [source.memory.get(("row", k)) for k in (source.dist_row, 1 - source.dist_row)]
    for key, found in () if row is None else row.memory.items():
        if key[0] == "compare" and found[0] is other and found[1] is mask and mask._version == 0:
            return str(key[1])
    return None


def _selected_edges(source: DistEdgeIndex, columns: Any) -> DistEdgeIndex:
    """``edge_index[:, columns]``. See [Note: once per structure]."""

    mask = isinstance(columns, Tensor) and columns.dtype in (torch.bool, torch.uint8)

    def make(found: Any = columns) -> DistEdgeIndex:
        numbers = mask and found is not columns
        with torch.inference_mode(False):
            if numbers and found.numel() == source.size(1):
                # The same memory, but edges of their own: other workers may have lost some.
                everything = _edges_like(plain(source), source)
                return everything.ordered(source.places)
            pairs = plain(source)
            pairs = pairs.index_select(1, found) if numbers else pairs[:, found]
            chosen = _edges_like(pairs, source)
            if source.partial is not None:
                derived(chosen, source, known=_only_loops_left_out(source, columns))
            return chosen.ordered(_selected_order(source, found, mask))

    if isinstance(columns, slice):
        first, last, step = columns.indices(source.size(1))
        some = (first, last, step) != (0, source.size(1), 1) and first != last
        if source.plan.world_size > 1 and some:
            raise refusal(Tensor.__getitem__)  # Positions count edges here, not the graph's.
        return source.remember(("columns", str(columns)), make)
    if not isinstance(columns, Tensor) or (mask and columns.shape != source.shape[1:]):
        return make()  # PyTorch refuses the mask.
    if (own := _comparison_of_ends(source, columns)) is not None:
        return source.remember(("columns", own), lambda: make(columns.nonzero().view(-1)))
    selections: Selections = source.remember("selections", lambda: Selections(source.size(1)))
    return selections.find(columns, make)


@handles(Tensor.__getitem__)
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    source, key = args
    if isinstance(source, DistEdgeIndex | ShiftedEdges):
        if isinstance(key, tuple) and len(key) == 2 and key[1] == slice(None):
            key = key[0]
        if isinstance(key, int):
            if isinstance(source, ShiftedEdges):
                return row_of_shifted(source, key % 2)
            return _row(source, key % 2)
    if isinstance(source, DistEdgeIndex):
        if isinstance(key, slice) and key == slice(None):
            return _selected_edges(source, key)
        if isinstance(key, tuple) and len(key) == 2:
            rows, columns = key
            if isinstance(rows, int) and isinstance(columns, slice | Tensor):
                return _selected_edges(source, columns)[rows]
            if isinstance(rows, slice) and rows == slice(None):
                return _selected_edges(source, columns)
        raise refusal(func)
    if isinstance(source, DistIndex):
        if not isinstance(key, InSpace) and source.dim() == 1 and not isinstance(key, int):
            chosen = dist_index(plain(source)[key], source.plan, targets=source.targets)
            derived(chosen, source, known=False)
            kept = key.clone() if isinstance(key, Tensor) else key
            return chosen.ordered(_selected_order(source, kept))
        raise refusal(func)
    if isinstance(key, DistIndex):
        return _gather(source, 0, key)
    if isinstance(key, tuple):
        places = [k for k, part in enumerate(key) if isinstance(part, DistIndex)]
        before = key[: places[0]] if len(places) == 1 else (0,)
        after = key[places[0] + 1 :] if places else ()
        if all(isinstance(p, slice) and p == slice(None) for p in (*before, *after)):
            return _gather(source, places[0], key[places[0]])
    raise refusal(func)


@handles(Tensor.flip, torch.flip)
def _flip(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dims")
    if not isinstance(source, DistEdgeIndex) or dims not in (0, [0], (0,)):
        raise refusal(func)
    if source.partial is not None:
        raise refuse_partial("Turning edges round")

    def make() -> Any:
        place = 1 - source.dist_row, source.targets, source.by_content
        out = dist_edge_index(plain(source).flip(0), source.plan, *place)
        return out.ordered(source.places)

    return source.remember("flip", make)


@handles(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    base: Any = next(part for part in parts if isinstance(part, InSpace))
    edges = isinstance(base, DistEdgeIndex | ShiftedEdges)
    if dim not in ((1, -1) if edges else (0, -1)):
        raise refusal(func)
    if any(isinstance(part, ShiftedEdges) for part in parts):
        return join(parts)
    for part in parts:
        _check_joined(part, base)
    others = [plain(part) for part in parts if part is not base]
    where = tuple(id(part) if isinstance(part, InSpace) else tuple(part.shape) for part in parts)
    # Kept alive, so that their ids stay their own; not the one that keeps them, in a circle.
    alive = [part for part in parts if isinstance(part, InSpace) and part is not base]

    def make() -> Any:
        joined = torch.cat([plain(part) for part in parts], dim)
        kept = [other.clone() for other in others]
        order = _joined_order(parts, edges, base.plan)
        if edges:
            out = _edges_like(joined, base)
            out.by_content |= len(others) > 0 and not adds_loops()
            derived(out, base, known=sum(isinstance(part, InSpace) for part in parts) == 1)
            return alive, kept, out.ordered(order)
        index = dist_index(joined, base.plan, targets=base.targets)
        return alive, kept, derived(index.ordered(order), base, known=False)

    key = ("cat", where)
    found = base.remember(key, make)
    if not all(torch.equal(a, b) for a, b in zip(found[1], others, strict=True)):
        del base.memory[key]
        found = base.remember(key, make)
    return found[2]


def _check_joined(part: Tensor, base: Any) -> None:
    """Plain edges joined to distributed ones must hold local ids."""
    plan = base.plan
    if isinstance(part, InSpace):
        same_row = getattr(part, "dist_row", 0) == getattr(base, "dist_row", 0)
        if part.plan is not plan or part.targets != base.targets or not same_row:
            raise DistributedIndexError(
                f"Can't join edges of different index spaces at rank {plan.rank}"
            )
        return
    if base.bipartite:
        raise DistributedIndexError(
            f"Can't join plain edges to edges between nodes of two types at rank {plan.rank}: node "
            "k of one type is not node k of the other on this worker. Give the layer "
            "add_self_loops=False, and add other edges before write_partitions()"
        )
    if part.numel() and not 0 <= int(part.min()) <= int(part.max()) < plan.num_local:
        wrong = int(part.min()) if int(part.min()) < 0 else int(part.max())
        call = pyg_call()
        raise DistributedIndexError(
            f"{f'{call!r}: ' if call else ''}Can't join plain edges with the id {wrong} to a "
            f"distributed edge index at rank {plan.rank}: they must be local ids below "
            f"{plan.num_local}. Add other edges before write_partitions()"
        )


# Comparing ###################################################################


@handles(*SAME_SHAPE_COMPARE)
def _compare(func: Any, args: Any, kwargs: Any) -> Any:
    left, right = args
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.shape != right.shape:
        raise refusal(func)
    base: Any
    base, other = (left, right) if isinstance(left, InSpace) else (right, left)
    if base.bipartite:
        raise DistributedIndexError(
            f"'{name_of(func)}' compares sources and targets that are nodes of two types at rank "
            f"{base.plan.rank}: node k of one type is not node k of the other on this worker. "
            "Give the layer add_self_loops=False, and remove edges before write_partitions()"
        )

    def make() -> Any:
        return other, func(plain(left), plain(right))

    key = ("compare", func.__name__, id(other), version_of(other))
    found = base.remember(key, make)
    if found[1]._version != 0:  # Somebody wrote into the mask: make a new one.
        del base.memory[key]
        found = base.remember(key, make)
    return found[1]


# Halo gather and reduction ###################################################


def _gather(x: Tensor, dim: int, index: DistIndex) -> Tensor:
    dim = dim % x.dim() if x.dim() else 0
    index = widened_row(index, x.size(dim)) if x.dim() else index
    plan = index.plan
    require_rows(x, dim, plan, "Reading")
    context = plan.context
    wire = context.wire.name, context.wire.kept is None
    key = (id(x), dim, version_of(x), torch.is_grad_enabled(), wire)
    if key not in context.gathered:
        moved = x.movedim(dim, 0).contiguous() if dim else x
        context.gathered[key] = (x, halo_gather(moved, plan, context.layer, context.wire))
    ext = context.gathered[key][1]
    if not context.layer:
        context.gathered.clear()
    out = ext.index_select(0, index.flat)
    return out.movedim(0, dim) if dim else out


@handles(Tensor.index_select, torch.index_select)
def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    index = args[2] if len(args) > 2 else kwargs["index"]
    if isinstance(x, DistEdgeIndex) and dim in (1, -1):
        return _selected_edges(x, index)
    if isinstance(x, DistIndex) and not isinstance(index, InSpace):
        chosen = dist_index(plain(x).index_select(0, index), x.plan, targets=x.targets)
        derived(chosen, x, known=False)
        return chosen.ordered(_selected_order(x, index.clone()))
    if isinstance(x, InSpace) or not isinstance(index, DistIndex):
        raise refusal(func)
    return _gather(x, dim, index)


def _scatter(
    out: Tensor, dim: int, index: DistIndex, values: Tensor, reduce: Literal["sum", "amax", "amin"]
) -> Tensor:
    """Scatters ``values`` into a copy of ``out``, remote targets included."""
    if index.partial is not None:
        raise refuse_partial("A reduction over the out-edges of nodes")
    dim = dim % out.dim()
    index = widened_row(index, out.size(dim))
    plan = index.plan
    require_rows(out, dim, plan, "Scattering into")
    out0, values0 = out.movedim(dim, 0), values.movedim(dim, 0)
    rows = index.flat.view(-1, *[1] * (values0.dim() - 1)).expand_as(values0)
    shape = (plan.num_ids, *out0.shape[1:])
    if reduce == "sum":
        ext = values0.new_zeros(shape).scatter_add(0, rows, values0)
        result = out0 + halo_reduce(ext, plan, "sum", plan.context.layer)
    else:
        if values.requires_grad:
            raise DistributedIndexError(
                f"Scattering with reduce='{reduce}' over a distributed index has no gradient at "
                f"rank {plan.rank}; reduce at the target, edge_index[1], or detach the values"
            )
        worst = float("-inf") if reduce == "amax" else float("inf")
        ext = values0.new_full(shape, worst).scatter_reduce(0, rows, values0, reduce=reduce)
        merged = halo_reduce(ext, plan, reduce, plan.context.layer)
        result = torch.where(merged == worst, out0, merged)
    return result.movedim(0, dim)


@handles(Tensor.scatter_add_, Tensor.scatter_add, torch.scatter_add, Tensor.index_add_)
def _scatter_add(func: Any, args: Any, kwargs: Any) -> Any:
    out, dim, index, values = args[:4]
    if isinstance(out, InSpace) or not isinstance(index, DistIndex):
        raise refusal(func)
    result = _scatter(out, dim, index, values, "sum")
    return out.copy_(result) if func in (Tensor.scatter_add_, Tensor.index_add_) else result


@handles(Tensor.scatter_reduce_, Tensor.scatter_reduce, torch.scatter_reduce)
def _scatter_reduce(func: Any, args: Any, kwargs: Any) -> Any:
    out, dim, index, values = args[:4]
    reduce = args[4] if len(args) > 4 else kwargs["reduce"]
    kept = kwargs.get("include_self", True)
    if isinstance(out, InSpace) or reduce not in ("sum", "amax", "amin") or kept:
        raise refusal(func)
    result = _scatter(torch.zeros_like(out), dim, index, values, reduce)
    return out.copy_(result) if func is Tensor.scatter_reduce_ else result


@handles(Tensor.__setitem__)
def _setitem(func: Any, args: Any, kwargs: Any) -> Any:
    out, key, value = args
    if isinstance(out, DistEdgeIndex | ShiftedEdges):
        return set_shifted_row(out, key, value, refusal(func))
    if isinstance(out, InSpace) or not isinstance(key, DistIndex):
        raise refusal(func)
    rows = key.flat
    if rows.numel() and int(rows.max()) >= key.plan.num_local:
        raise DistributedIndexError(
            f"Writing to rows of other workers with a distributed index at rank {key.plan.rank}"
        )
    out[rows] = value
