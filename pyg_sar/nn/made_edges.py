"""Edges that were made, not loaded: layers distribute them on their way in.

[Note: made edges] Layers run on distributed edges. An ``edge_index`` that was computed
(``dropout_edge``, ``coalesce``, ``cat``), or that every worker holds, stands for none. It is
distributed between the nodes that the layer gets (``tensors/distributing.py``); edge tensors beside
it have their rows in its order, so they fit. Distributed edges are kept, and found again for
edges of equal content, which is compared: those of snapshots are a new tensor each time. A node
tensor's content is compared by each worker for itself, and all must have found the same one.
"""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.linkx import SparseLinear

from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.layer_facts import asked_by
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.space.distributed_index import InSpace
from pyg_sar.tensors import NodeTensor, Rows, mapped, node_rows, node_tensors, whole
from pyg_sar.tensors.distributing import distributed_edges
from pyg_sar.tensors.rows import known_by

METHOD = "balanced"
"""The partitioner of nodes that have no places yet."""

_MANY = 16  # layouts of nodes, node tensors, and lists of edges that are kept whatever they take
_FEW = 4  # of these, lists between the same nodes
_ROOM = 1 << 28  # bytes of others
_BYTES = 256  # of an edge: as it was given, distributed, and what layers made of it
_SAMPLE = 16  # edges, or a few more, by which lists are told apart before they are compared
_LABEL = ("", "", "made edges")


def with_made_edges(
    layer: Any, args: Any, kwargs: Any, other_nodes: bool = False
) -> tuple[Any, Any]:
    """Returns the arguments of a layer's call with distributed edges for made ones. Collective.

    Args:
        layer: The layer; of others than message passing layers nothing is changed.
        args: What it is called with.
        kwargs: The same by name.
        other_nodes: Edges to more nodes stay as they are: to hyperedges, say, of which the layer's
            own ``forward`` tells ``propagate`` the number.

    Raises:
        ValueError: Edges between nodes that are not there.
    """
    leaves = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if not isinstance(layer, MessagePassing) or not any(map(_is_made, leaves)):
        return args, kwargs
    if torch.compiler.is_compiling() and not node_tensors(args, kwargs):
        return args, kwargs  # Dynamo can't trace context variables.
    known = made_edges(current())
    inner = any(isinstance(value, InSpace) for value in leaves)
    if inner or not (node_tensors(args, kwargs) or known.all_plain):
        return args, kwargs
    found = {
        id(made): known.distributed(type(layer).__name__, made, ends, other_nodes)
        for made, ends in _with_ends(layer, args, kwargs)
    }
    take = lambda value: found.get(id(value), value)  # noqa: E731
    return mapped(take, args), mapped(take, kwargs)


_SIMPLE = (bool, int, float, str, type(None))


def plain_arguments(given: Iterable[Any]) -> list[NodeTensor] | None:
    """Returns the node tensors of a call; ``None``: there may be a matrix or made edges."""
    found = []
    for value in given:
        for one in value if type(value) in (list, tuple) else (value,):
            if isinstance(one, NodeTensor):
                if one.axis == 1 and one.edges is None and _is_made(one):
                    return None
                found.append(one)
            elif type(one) in (Tensor, torch.nn.Parameter):
                if one.layout != torch.strided or (one.dtype == torch.long and _is_made(one)):
                    return None
            elif not isinstance(one, _SIMPLE):
                return None
    return found


def made_edges(comm: Communicator) -> MadeEdges:
    """Returns what these workers know of made edges."""
    if comm.made_edges is None:
        comm.made_edges = MadeEdges(comm)
    found: MadeEdges = comm.made_edges
    return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """Distributed edges, and the content by which they are found again.

    Attributes:
        number: Which ones, alike on all workers.
        content: The edges, ``[2, E]``; of a node tensor this worker's, and their numbers
            ``[3, E_p]``.
        found: The distributed edges.
        edges: How many there are.
    """

    number: int
    content: Tensor
    found: NodeTensor
    edges: int


class MadeEdges:
    """Made edges, at one rank. See [Note: made edges].

    Args:
        comm: The workers.

    Attributes:
        all_plain: Whether calls without any node tensor are distributed as well.
        made: How many lists of edges were distributed.
        room: Bytes that more than a few of them may take.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.all_plain, self.made, self.room = comm, False, 0, _ROOM
        self._layouts: OrderedDict[int, Rows] = OrderedDict()
        self._seen: OrderedDict[Any, tuple[Any, Tensor]] = OrderedDict()
        # Apart: which plain ones are known is the same on all workers, without a message.
        self._kept: dict[bool, OrderedDict[Any, _Kept]] = {k: OrderedDict() for k in (False, True)}
        self._held = dict.fromkeys(self._kept, 0)  # edges

    def distributed(
        self,
        title: str,
        made: Tensor,
        ends: Sequence[NodeTensor | int],
        other_nodes: bool = False,
    ) -> Tensor:
        """Returns distributed edges for made ones. Collective.

        Args:
            title: The layer's name, for errors.
            made: Edges ``[2, E]``.
            ends: A tensor of the source nodes, or how many there are, and of the target nodes;
                one if they are the same nodes.
            other_nodes: Edges to nodes that are not there are returned as they are.
        """
        if not isinstance(made, NodeTensor):
            with torch.inference_mode(False), torch.no_grad():
                content = made.as_subclass(Tensor)
                return self._by_content(title, made, content, ends, other_nodes)
        rows = [end.rows if isinstance(end, NodeTensor) else end for end in ends]
        key = *known_by(made), *map(_id, rows)
        if key not in self._seen:
            with torch.inference_mode(False), torch.no_grad():
                content = torch.cat([made.local, made.rows.ids.view(1, -1)])
                # What is kept alive keeps its id its own.
                found = self._by_content(title, made, content, ends, other_nodes)
                self._seen[key] = (made, rows), found
            if len(self._seen) > _MANY:
                self._seen.popitem(last=False)
        self._seen.move_to_end(key)
        return self._seen[key][1]

    def _by_content(
        self,
        title: str,
        made: Tensor,
        content: Tensor,
        ends: Sequence[NodeTensor | int],
        other_nodes: bool,
    ) -> Tensor:
        layouts = [self._layout(title, made, end, len(ends) > 1) for end in ends]
        spread = isinstance(made, NodeTensor)
        known, key = self._kept[spread], (tuple(map(id, layouts)), *_outline(content))
        old = kept = known.get(key)
        if kept is not None and not torch.equal(kept.content, content):
            kept = None
        if spread:
            number = 0 if kept is None else kept.number
            facts = torch.tensor([number, -number, *_bounds(content)], device=self.comm.device)
            most, least, *bounds = self.comm.all_reduce(facts, "max", label=_LABEL).tolist()
            kept = kept if most == -least else None
        elif kept is None:
            bounds = _bounds(content)
        if kept is None:
            totals = [rows.total for rows in layouts]
            if other_nodes and (bounds[0] >= totals[0] or bounds[1] >= totals[-1]):
                return made
            _check_ids(title, bounds, totals, self.comm.rank)
            self.made += 1
            found = distributed_edges(made.detach(), layouts[0], layouts[-1])
            content = content if spread else content.clone()
            kept = _Kept(self.made, content, found, made.size(1))
        known[key] = kept
        known.move_to_end(key)
        self._held[spread] += kept.edges - (0 if old is None else old.edges)
        self._forget(spread)
        return kept.found

    def _forget(self, spread: bool) -> None:
        """Drops the oldest lists where all take too much, but for a few between the same nodes."""
        known = self._kept[spread]
        lists = Counter(nodes for nodes, *_ in known)
        for key in [*known]:
            if _BYTES * self._held[spread] <= self.room:
                return
            if lists[key[0]] > _FEW or len(known) > _MANY:
                lists[key[0]] -= 1
                dropped = known.pop(key)
                self._held[spread] -= dropped.edges
                for other in [k for k, (_, found) in self._seen.items() if found is dropped.found]:
                    del self._seen[other]

    def _layout(self, title: str, made: Tensor, end: NodeTensor | int, bipartite: bool) -> Rows:
        """Returns the layout of nodes: as they lie, as others of their number do, or a new one."""
        known: dict[int, Rows] = self.comm.layouts
        if isinstance(end, NodeTensor):
            found = known.get(end.rows.total, end.rows)
            return found if found.same(end.rows) else end.rows
        if end in known:
            return known[end]
        if end not in self._layouts:
            comm = self.comm
            edges = whole(made.detach(), "an 'edge_index'").cpu()
            owner = torch.empty(end, dtype=torch.long, device=comm.device)
            if not bipartite:
                _check_ids(title, _bounds(edges), [end], comm.rank)
            if comm.rank == 0:
                method = "contiguous" if bipartite else METHOD
                owner.copy_(assign_nodes(edges, end, comm.world_size, method))
            comm.broadcast(owner, label=_LABEL)
            self._layouts[end] = node_rows(comm, (owner == comm.rank).nonzero().view(-1), end)
            if len(self._layouts) > _MANY:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(end)
        return self._layouts[end]


def _id(value: Any) -> int:
    return value if isinstance(value, int) else id(value)


def _outline(content: Tensor) -> tuple[int, ...]:
    """Returns what tells most lists of edges apart: their size, sums and a few of them."""
    count = content.size(1)
    sample = content[:, :: max(count // _SAMPLE, 1)].flatten().tolist()
    return (count, *content.sum(1).tolist(), *sample)


def _bounds(edges: Tensor) -> list[int]:
    """Returns the largest source and target, and the smallest ones with the other sign."""
    if not edges.numel():
        return [-1, -1, 0, 0]
    low, high = edges[:2].aminmax(dim=1)
    return [*high.tolist(), *(-low).tolist()]


def _check_ids(title: str, bounds: Sequence[int], counts: Sequence[int], rank: int) -> None:
    for row, name in enumerate(("source", "target")):
        low, high, count = -bounds[2 + row], bounds[row], counts[min(row, len(counts) - 1)]
        if low < 0 or high >= count:
            raise ValueError(
                f"{title} got an 'edge_index' with {name} nodes {min(low, high)} to {high}, and "
                f"rows of nodes 0 to {count - 1} (rank {rank})"
            )


# Between which nodes edges are #################################################


def of_size(edge_index: Any, size: Any) -> Any:
    """Returns edges as made ones where ``size`` says other numbers of nodes: of hyperedges, say."""
    edges = getattr(edge_index, "edges", None)
    if edges is None or not _is_pair(size):
        return edge_index
    return edge_index if (edges.sources.total, edges.targets.total) == size else edge_index + 0


def _is_pair(size: Any) -> bool:
    """Says if ``propagate``'s ``size`` has two numbers of nodes, which differ."""
    if not isinstance(size, tuple) or not all(isinstance(number, int) for number in size):
        return False
    return len(size) == 2 and size[0] != size[1]


def _is_made(value: Any) -> bool:
    if isinstance(value, NodeTensor) and (value.axis != 1 or value.edges is not None):
        return False
    if not isinstance(value, Tensor) or isinstance(value, InSpace) or value.dim() != 2:
        return False
    return value.size(0) == 2 and value.dtype == torch.long and value.layout == torch.strided


def _with_ends(
    layer: Any, args: Any, kwargs: Any
) -> Iterator[tuple[Tensor, Sequence[NodeTensor | int]]]:
    """Yields made edges of a call, and the nodes that they join, where these are known."""
    forward = getattr(layer.forward, "__func__", None)
    known = _parameters(layer.forward) if forward is None else _parameters(forward)[1:]
    names = [*known, *map(str, range(len(args)))]
    given = dict(zip(names, args, strict=False)) | kwargs
    types = next((v for k, v in given.items() if isinstance(v, dict) and _is_of_types(v)), {})
    for value in given.values():
        if _is_made(value):
            ends = _ends(layer, value, given)
            if ends is not None:
                yield value, ends
        elif isinstance(value, dict):
            for kind, made in value.items():
                if _is_made(made) and isinstance(kind, tuple):
                    source, target = types.get(kind[0]), types.get(kind[-1])
                    if source is not None and target is not None:
                        yield made, _joined(layer, source, target)


@lru_cache(256)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def _is_of_types(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _ends(layer: Any, made: Tensor, given: dict[str, Any]) -> Sequence[NodeTensor | int] | None:
    """Returns the nodes that a call's edges join, where its arguments tell."""
    if isinstance(layer, SparseLinear):
        return [layer.in_channels]  # LINKX: a parameter's row for each node
    x = given.get("x")
    nothing = isinstance(x, tuple | list) and all(end is None for end in x)
    if nothing or "x" not in given:
        x = _read(layer, given) or _nodes(layer, made, given)
    if x is None and isinstance(getattr(layer, "in_channels_l", None), int):
        return [layer.in_channels_l]  # RGCNConv: a parameter's row for each node
    if isinstance(x, Tensor):
        end = _end(layer, x)
        size: Any = given.get("size")
        count = end.rows.total if isinstance(end, NodeTensor) else end
        return [end if n == count else n for n in size] if _is_pair(size) else [end]
    if not isinstance(x, tuple | list) or len(x) != 2 or not isinstance(x[0], Tensor):
        return None
    if x[1] is None and given.get("size") is None:  # As ``pos`` of PointNetConv beside its ``x``.
        ends = [v for v in given.values() if isinstance(v, tuple | list) and len(v) == 2]
        x = next((v for v in ends if all(isinstance(end, Tensor) for end in v)), x)
    target = x[1]
    if target is None and given.get("size") is not None:
        target = given["size"][1]
    return None if target is None else _joined(layer, x[0], target)


def _read(layer: Any, given: dict[str, Any]) -> list[Any] | None:
    """Returns a tensor of the source nodes and one of the target nodes, as a message reads them.

    So HGTConv passes ``k``, read as ``k_j``, and ``q``, read as ``q_i``.
    """
    asked = asked_by(layer, "message", "edge_update")
    found = []
    for end in "ji" if layer.flow == "source_to_target" else "ij":
        values = (given.get(name[:-2]) for name in asked if name[-2:] == f"_{end}")
        found.append(next((value for value in values if isinstance(value, NodeTensor)), None))
    return None if found[0] is None or found[1] is None else found


def _nodes(layer: Any, made: Tensor, given: dict[str, Any]) -> Any:
    """Returns the tensor of the nodes, of arguments of which none is named ``x``.

    Node tensors come first. Of several (weights, encodings, selected rows) the edges tell, which
    name no node behind the last one.

    Raises:
        DistributedIndexError: Several numbers of nodes would do.
    """
    tensors = [v for v in given.values() if isinstance(v, Tensor) and v.dim() and not _is_made(v)]
    pairs = [v for v in given.values() if isinstance(v, tuple | list) and len(v) == 2]
    of_edges = getattr(made, "rows", None)
    tensors = [v for v in tensors if getattr(v, "edges", None) is None]
    nodes = [v for v in tensors if isinstance(v, NodeTensor) and v.rows is not of_edges]
    if not nodes and pairs:
        return pairs[0]
    found: list[Any] = nodes or [v for v in tensors if not isinstance(v, NodeTensor)]
    counts: dict[int, Tensor] = {}
    for value in found:
        end = _end(layer, value)
        counts.setdefault(end.rows.total if isinstance(end, NodeTensor) else end, value)
    if len(counts) > 1:
        bounds = _bounds(made.local if isinstance(made, NodeTensor) else made)[:2]
        if isinstance(made, NodeTensor):
            facts = torch.tensor(bounds, device=made.device)
            bounds = current().all_reduce(facts, "max", label=_LABEL).tolist()
        counts = {count: value for count, value in counts.items() if count > max(bounds)}
    if len(counts) > 1:
        counts.pop(made.size(1), None)  # They have a row per edge.
    if len(counts) > 1:
        raise DistributedIndexError(
            f"{type(layer).__name__} got tensors of {sorted(counts)} rows, of which each may be "
            f"the number of nodes (rank {current().rank}): name the nodes' argument of forward() "
            "'x'"
        )
    return next(iter([*counts.values(), *found]), None)


def _joined(layer: Any, source: Tensor, target: Any) -> Sequence[NodeTensor | int]:
    ends = [_end(layer, source), _end(layer, target)]
    rows = [end.rows if isinstance(end, NodeTensor) else None for end in ends]
    same = source is target or (rows[0] is not None and rows[0] is rows[1])
    return ends[:1] if same else ends


def _end(layer: Any, x: Tensor | int) -> NodeTensor | int:
    if isinstance(x, NodeTensor | int):
        return x
    return x.size(int(layer.node_dim) if x.dim() > 2 else 0)
