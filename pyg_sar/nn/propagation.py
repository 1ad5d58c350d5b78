"""The surroundings of an aggregation in a call of ``propagate``: stand-ins, order, rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch_geometric.nn import (
    APPNP,
    DNAConv,
    EGConv,
    FAConv,
    GCN2Conv,
    GCNConv,
    MessagePassing,
)

from pyg_sar.engine.analysis import Choice, title_of
from pyg_sar.engine.chunks import by_target
from pyg_sar.engine.reverse import reversed_edges
from pyg_sar.exchange.gather import KeptRows
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.wire import Wire
from pyg_sar.message.decompose import decompose
from pyg_sar.message.dependence import norms_over_rows
from pyg_sar.message.layer_facts import asked_by, facts_of, standing_in
from pyg_sar.message.message_checks import maximum, refuse_batched_edges, row_levels
from pyg_sar.message.program import STAND_INS, DeferredEdge, check_nodes
from pyg_sar.message.row_wise import SIZE_NAMES
from pyg_sar.space.index_space import DistEdgeIndex, dist_edge_index
from pyg_sar.space.joint_index import widened
from pyg_sar.tensors.rows import unchanged_as
from pyg_sar.wording import counted


def kind_of_argument(value: Any, axis: int) -> Any:
    """Returns an argument without the numbers of nodes and edges, alike on all workers."""
    if isinstance(value, DeferredEdge):  # not asked for its shape: that would compute it
        named = sorted(value.kwargs.items())
        return "deferred", tuple((name, kind_of_argument(v, axis)) for name, v in named)
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if shape:
            shape[axis % len(shape)] = shape[0] = -1
        return value.dtype, value.requires_grad, tuple(shape)
    if isinstance(value, tuple | list):
        return tuple(kind_of_argument(v, axis) for v in value)
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def note_tensors(error: Exception, given: Mapping[str, Any], device: torch.device) -> None:
    """Notes on a layer's error which of its arguments no layer takes: PyTorch names operators.

    Args:
        error: The error, which gets a note for each.
        given: The layer's arguments by name.
        device: That of the edges.
    """
    for name, value in given.items():
        whole = list(value.values()) if isinstance(value, dict) else value
        for one in whole if isinstance(whole, tuple | list) else [whole]:
            if not isinstance(one, Tensor) or not one.dim():
                continue
            note = ""
            if one.device != device:
                note = f"'{name}' is on {one.device}, and the edges on {device}: move it"
            elif "float8" in str(one.dtype):
                note = f"'{name}' is {one.dtype}, of which PyTorch has no sums: give bfloat16, say"
            if note and note not in getattr(error, "__notes__", ()):
                error.add_note(note)


@contextmanager
def charged(edge_index: DistEdgeIndex, layer: str) -> Iterator[None]:
    """Ledgers charge the layer for what these edges gather meanwhile, each tensor once."""
    context = edge_index.plan.context
    before, context.layer = context.layer, layer
    try:
        yield
    finally:
        context.layer = before
        context.gathered.clear()


@contextmanager
def travelling(layer: Any, plan: HaloPlan) -> Iterator[None]:
    """Rows that are gathered plainly meanwhile travel as the layer's policy says."""
    context, kept = plan.context, layer.kept_rows
    active = layer.policy.refresh_every > 1 and kept is not None and kept.active
    outer, context.wire = context.wire, Wire(layer.policy.wire, kept if active else None)
    try:
        yield
    finally:
        context.wire = outer


@contextmanager
def keeping_rows(layer: Any, edges: Sequence[DistEdgeIndex]) -> Iterator[None]:
    """Exchanges the layer's rows in every ``refresh_every``-th training step only.

    Raises:
        ValueError: Where that is not supported.
    """
    every = layer.policy.refresh_every
    if not (layer.training and torch.is_grad_enabled()):
        yield
        return
    plan = edges[0].plan
    title = f"{title_of(layer)} at rank {plan.rank} with SARPolicy(refresh_every={every})"
    parameters = [p for p in layer.parameters() if p.requires_grad]
    for wrong, reason in (
        (plan.comm.host is not None, "runs on parts that a worker hosts in turn: start a worker "
         "for each part"),
        (any(e.partial is not None for e in edges), "got the edges of a message flow graph or of "
         "sampled neighbours: train on the whole graph"),
        (not parameters, "has no parameter to train, by which it would know steps"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"{title} {reason}; or set layer.policy with refresh_every=1")
    kept = layer.kept_rows = layer.kept_rows or KeptRows()
    kept.begin(title, [p._version for p in parameters], plan.context, every)
    kept.active = True
    try:
        yield
    finally:
        kept.active = False


def known_size(edge_index: DistEdgeIndex, size: Any, layer: Any) -> Any:
    """Returns the size of a relation between nodes of two types; a given one must agree with it."""
    if not edge_index.bipartite:
        return size
    known = (edge_index.plan.num_local, edge_index.num_targets)
    known = known if edge_index.dist_row == 0 else known[::-1]
    for given, expected in zip(size or (None, None), known, strict=True):
        if given not in (None, expected):
            raise ValueError(
                f"{title_of(layer)} got size={tuple(size)} for a relation of {known[0]} and "
                f"{counted(known[1], 'nodes')} at rank {edge_index.plan.rank}; pass this worker's "
                "numbers of nodes, or leave 'size' out"
            )
    return known


def check_pairs(edge_index: DistEdgeIndex, kwargs: dict[str, Any], layer: Any) -> None:
    """Refuses pairs of tensors of other nodes than the edges' ends, whatever the message reads.

    PyG takes the numbers of nodes from both: with ``(h, h[:10])`` its output has 10 rows.

    Raises:
        ValueError: A tensor has not a row for each node of its end.
    """
    plan, axis = edge_index.plan, int(layer.node_dim)
    for name, pair in kwargs.items():
        if isinstance(pair, tuple | list) and len(pair) == 2:
            for value, nodes in zip(pair, (plan.num_local, edge_index.num_targets), strict=True):
                if isinstance(value, Tensor) and value.shape[axis : axis + 1 or None] != (nodes,):
                    asked = asked_by(layer, "message", "edge_update", "aggregate")
                    if f"{name}_i" in asked or f"{name}_j" in asked:
                        check_nodes(value, axis, nodes, name, plan.rank)


def stand_ins(edge_index: DistEdgeIndex) -> int:
    """Returns how many edges stand in for those of a worker without, where others have some.

    All workers call this together.
    """
    plan, here = edge_index.plan, edge_index.size(1)
    if plan.world_size == 1:
        return 0
    most = partial(maximum, plan.comm, [here], edge_index.device)
    return STAND_INS if edge_index.remember_together("most", most)[0] > here == 0 else 0


@contextmanager
def on_stand_ins(layer: MessagePassing, method: str, keeps: Sequence[str]) -> Iterator[None]:
    """Runs a method of a layer that has no edges here on some that stand in, and drops their rows.

    Without edges it may do something else (GATConv returns at once) or fail (where it reshapes by
    -1): random numbers would not be drawn, and arguments and parameters be missing in autograd's
    trace, where all workers take part in the backward pass of these. Norms over edges get none.

    Args:
        layer: The layer.
        method: ``'message'`` or ``'edge_update'``.
        keeps: Attributes that it leaves with a row per edge.
    """
    own, axis = getattr(layer, method), int(layer.node_dim)

    def filled(number: int, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return tree_map_only(int, lambda n: max(n, 1), value) if name in SIZE_NAMES else value
        shape, dim = list(value.shape), axis if name[-2:] in ("_i", "_j") else 0
        dim = -1 if name in ("index", "edge_index", "edge_index_i", "edge_index_j") else dim
        if not shape or shape[dim]:
            return value
        shape[dim] = STAND_INS
        rows = torch.zeros(shape, dtype=value.dtype, device=value.device)
        if not rows.dtype.is_floating_point:
            return rows
        # Such that functions have finite derivatives there, also of differences of arguments.
        places = torch.arange(rows.numel(), device=rows.device) + 7 * number
        return torch.cat([value, rows + (0.5 + 0.25 * places.cos()).view(shape).to(rows)], dim)

    def without_rows(rows: Tensor, dim: int = axis) -> Tensor:
        dim = dim if -rows.dim() <= dim < rows.dim() else 0
        there = rows.dim() > 0 and rows.size(dim) == STAND_INS
        return rows.narrow(dim, 0, 0) if there else rows

    def normed(forward: Callable[..., Tensor], x: Tensor, *given: Any, **named: Any) -> Tensor:
        cut = tree_map_only(Tensor, partial(without_rows, dim=0), ((x, *given), named))
        return torch.cat([forward(*cut[0], **cut[1]), x])

    def run(**arguments: Any) -> Any:
        given = {n: filled(k, n, value) for k, (n, value) in enumerate(arguments.items())}
        norms = [(m, "forward", partial(normed, m.forward)) for m in norms_over_rows(layer)]
        with standing_in(*norms):
            found = own(**given)
        kept = {name: layer.__dict__[name] for name in keeps if name in layer.__dict__}
        found, kept = tree_map_only(Tensor, without_rows, (found, kept))
        layer.__dict__.update(kept)
        return found

    with standing_in((layer, method, run)):
        yield


@contextmanager
def message_with_sizes(layer: MessagePassing, sizes: Mapping[str, Any]) -> Iterator[None]:
    """Gives the message these numbers of nodes, where PyG would hand over the worker's own."""
    own = layer.message

    def message(**arguments: Any) -> Any:
        for name in sizes.keys() & arguments.keys():
            mine, whole = arguments[name], sizes[name]
            if isinstance(mine, list | tuple):
                whole = [None if n is None else w for n, w in zip(mine, whole, strict=True)]
            arguments[name] = None if mine is None else whole
        return own(**arguments)

    with standing_in((layer, "message", message)):
        yield


@contextmanager
def whole_scope(layer: Any, edge_index: DistEdgeIndex, choice: Choice) -> Iterator[int]:
    """Lets a message of all edges at once get the whole graph's sizes, and go without edges.

    Yields:
        How many edges stand in.
    """
    padding = stand_ins(edge_index)
    with ExitStack() as stack:
        if choice.sizes:
            stack.enter_context(message_with_sizes(layer, choice.sizes))
        if padding:
            keeps = () if choice.rows is None else choice.rows.agreed.keeps
            stack.enter_context(on_stand_ins(layer, "message", keeps))
        yield padding


@contextmanager
def first_target_filled(layer: MessagePassing) -> Iterator[None]:
    """Shows an aggregation whose first target has no message two of zeros before the first.

    PyG's median and quantiles fail on that, and on fewer than two messages: rare in a graph, not in
    its parts. The target of these messages is cut off again.
    """
    names = {"index", "ptr", "dim_size", "size_i"}
    takes_more = not names.issuperset(layer.inspector.get_param_names("aggregate", exclude=[0]))
    merges = decompose(layer.aggr_module) is not None
    if takes_more or (merges and type(layer).aggregate is MessagePassing.aggregate):
        yield
        return
    own = layer.aggregate

    def aggregate(inputs: Any, *args: Any, **given: Any) -> Any:
        index: Any = given.get("index")
        dim = int(layer.node_dim)
        if type(index) is not Tensor or not isinstance(inputs, Tensor) or args:
            return own(inputs, *args, **given)
        if inputs.size(dim) >= 2 and bool(torch.any(index == 0)):
            return own(inputs, **given)
        shape = [2 if axis == dim % inputs.dim() else n for axis, n in enumerate(inputs.shape)]
        given["index"] = torch.cat([index.new_zeros(2), index + 1])
        for name in ("dim_size", "size_i"):
            if given.get(name) is not None:
                given[name] += 1
        out = own(torch.cat([inputs.new_zeros(shape), inputs], dim), **given)
        return out.narrow(dim, 1, out.size(dim) - 1)

    with standing_in((layer, "aggregate", aggregate)):
        yield


def sorted_edges(edge_index: DistEdgeIndex) -> tuple[DistEdgeIndex, Tensor] | None:
    """Returns edges by target, in the whole graph's order; ``None`` where they are so."""

    def make() -> tuple[DistEdgeIndex, Tensor] | None:
        columns = by_target(edge_index.ends()[1], edge_index.order)
        in_place = torch.arange(columns.numel(), device=columns.device)
        if torch.equal(columns, in_place):
            return None
        ordered: Any = edge_index[:, columns]
        return ordered, columns

    found: tuple[DistEdgeIndex, Tensor] | None = edge_index.remember("sorted", make)
    return found


@contextmanager
def in_first_order(layer: MessagePassing, columns: Tensor | None) -> Iterator[None]:
    """Puts edge-level attributes that a message sets back in the order that edges came in."""
    before = dict(layer.__dict__)
    yield
    if columns is None:
        return
    for name, value in layer.__dict__.items():
        fresh = isinstance(value, Tensor) and value is not before.get(name)
        if fresh and value.dim() and value.size(0) == columns.numel():
            layer.__dict__[name] = value.index_select(0, columns.argsort())


class JoinsOfNothing(TorchFunctionMode):
    """Keeps the gradients of edges' numbers where a worker has no edges.

    Of a tensor of shape ``[0]`` that was joined to others, PyTorch's ``torch.cat`` gives a gradient
    that has no derivatives: this worker would call other operators than the others.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in (torch.cat, torch.concat, torch.concatenate):
            for part in args[0] if args else kwargs["tensors"]:
                if isinstance(part, Tensor) and part.requires_grad and part.shape == (0,):
                    out = out + part.sum()
        return out


# What these make of edges depends on texts and switches among the layer's attributes alone.
_NORMALISE = frozenset(kind.forward for kind in (APPNP, DNAConv, EGConv, FAConv, GCN2Conv, GCNConv))


@contextmanager
def kept_normalisation(
    layer: Any, edge_index: DistEdgeIndex, arguments: Callable[[], Mapping[str, Any]]
) -> Iterator[None]:
    """Keeps what ``cached=True`` would keep, for as long as edges and weights are the same.

    PyG normalises edges in every forward pass unless told to cache. The result hangs on the
    edge index here, so that another graph or other weights get their own.

    Args:
        layer: The layer, whose ``cached`` is ``False``.
        edge_index: Distributed edges.
        arguments: Gives the arguments of ``forward``, by name.
    """
    bound = arguments()
    x, weight = bound.get("x"), bound.get("edge_weight")
    constant = weight is None or (isinstance(weight, Tensor) and not weight.requires_grad)
    if not isinstance(x, Tensor) or not constant:
        yield
        return
    version = None if weight is None else unchanged_as(weight, edge_index.plan.world_size)
    # Layers that normalise alike share what they make: L layers don't hold it L times. Else not
    # id(layer), which a later layer may get: on some workers only, and with other options.
    forward, options = type(layer).forward, [("node_dim", layer.node_dim)]
    for name, value in vars(layer).items():
        if name[0] != "_" and name not in ("training", "ledger_name"):
            if isinstance(value, bool | str):
                options.append((name, value))
            elif isinstance(value, list | tuple):  # EGConv's aggregators
                options.append((name, tuple(v for v in value if isinstance(v, str))))
    whose = (forward, layer.policy) if forward in _NORMALISE else facts_of(layer).identity
    key = ("normalised", whose, tuple(options), x.dtype, id(weight), version)
    found = edge_index.recall_together(key)
    layer._cached_edge_index = None if found is None else found[0]
    layer.cached = True
    try:
        yield
        lasting = not torch.is_inference_mode_enabled()
        if found is None and lasting and layer._cached_edge_index is not None:
            made = (layer._cached_edge_index, weight)  # keeps the weight, and so its id
            edge_index.keep_together(key, made)
    finally:
        layer.cached = False
        layer._cached_edge_index = None


def as_kept(layer: Any, edge_index: DistEdgeIndex) -> DistEdgeIndex:
    """Returns edges that a layer has just kept (``cached=True``), as a list that only it finds.

    Selected edges may be found by their content, so that workers ask each other whether they mean
    the same list (see [Note: made together]). Kept ones are one list on all workers, and so are
    their weights: nobody asks in later passes.
    """
    kept = layer._cached_edge_index
    if not (isinstance(kept, tuple) and kept[0] is edge_index and edge_index.partial is None):
        return edge_index
    for weight in kept[1:]:
        if isinstance(weight, Tensor) and not hasattr(weight, "kept_by_all"):
            weight.kept_by_all = WeakKeyDictionary()  # type: ignore[attr-defined]
    if edge_index.plan.world_size == 1:
        return edge_index
    with torch.inference_mode(edge_index.is_inference()):
        own = dist_edge_index(
            edge_index, edge_index.plan, edge_index.dist_row, edge_index.targets
        ).ordered(edge_index.places)
    own.kept = True
    layer._cached_edge_index = (own, *kept[1:])
    return own


def with_room(layer: Any, edge_index: DistEdgeIndex, kwargs: dict[str, Any]) -> DistEdgeIndex:
    """Returns edges of several relations, among all nodes of the layer's tensors."""
    if not edge_index.plan.open_ended:
        return edge_index
    rows: dict[int, int] = {}  # nodes by the row of edges that refers to them
    for name in asked_by(layer, "message", "edge_update"):
        value: Any = kwargs.get(name[:-2]) if name[-2:] in ("_i", "_j") else None
        row = int((name[-2:] == "_i") == (layer.flow == "source_to_target"))
        found = dict(enumerate(value)) if isinstance(value, tuple | list) else {row: value}
        for place, tensor in found.items():
            if isinstance(tensor, Tensor):
                rows[place] = tensor.size(int(layer.node_dim))
    place = edge_index.dist_row
    sources = rows.get(place, edge_index.plan.num_local)
    return widened(edge_index, sources, rows.get(1 - place, sources))


def reversed_call(
    layer: Any, edge_index: DistEdgeIndex, size: Any, kwargs: dict[str, Any]
) -> tuple[DistEdgeIndex, dict[str, Any]]:
    """Returns the edges at the owners of the nodes that sum, with edge-level tensors there."""
    refuse_batched_edges(layer, edge_index, kwargs)
    edges = reversed_edges(edge_index)
    axis, named = int(layer.node_dim), sorted(kwargs.items())
    key = (type(layer), tuple((name, kind_of_argument(v, axis)) for name, v in named))
    if key not in edges.edge_level:
        found, _ = row_levels(layer, edge_index, kwargs)
        edges.edge_level[key] = {n.rpartition(".")[2] for n, level in found.items() if level}
    names, ledger = edges.edge_level[key], layer.ledger_name
    for value in kwargs.values():
        if isinstance(value, DeferredEdge):
            value.kwargs = edges.carried(value.kwargs, names, ledger)
            there = edges.edge_index
            value.compute = partial(layer._edge_updates, there, size=size, **value.kwargs)
    return edges.edge_index, edges.carried(kwargs, names, ledger)


def refuse_local_ids(layer: Any, plan: HaloPlan, x: Any) -> None:
    """Refuses RGCNConv without features: it would number this worker's nodes 0, 1, ..."""
    if (x[0] if isinstance(x, tuple) else x) is None and plan.world_size > 1:
        raise ValueError(
            f"{title_of(layer)} got x=None at rank {plan.rank}, and would take this worker's "
            "nodes for nodes 0, 1, ... of the graph: pass torch.arange(num_nodes), with as many "
            "in_channels as the graph has nodes"
        )
