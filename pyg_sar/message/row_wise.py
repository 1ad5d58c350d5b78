"""Finds by its operators if a message treats each edge alone, before it runs over workers.

A worker has some edges of the graph, in an order and a numbering of its own. What a message may do
with a set of edges is therefore: the same to each of them, and reductions at their two ends. It is
run twice on made-up edges (:mod:`pyg_sar.message.row_trace`); if anything else reaches a message,
or is left on the layer, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing

from pyg_sar.errors import PygSarError
from pyg_sar.message.decompose import EDGES, NOT_KNOWN, TARGETS, AggregateCheck, alike, is_known
from pyg_sar.message.dependence import Observation, without_statistics
from pyg_sar.message.layer_state import Changes, Snapshot, preserved_attributes
from pyg_sar.message.outside import outside_of
from pyg_sar.message.program import TileProgram
from pyg_sar.message.row_labels import EDGE, NODE, NUMBER, STEP, Labels
from pyg_sar.message.row_modules import has_own, holds_foreign_module, update_asks_for_edges
from pyg_sar.message.row_trace import Asked, Count, RowTrace, Sizes, Step, WholeGraphError
from pyg_sar.message.target_index import make_target_index
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile

_ALWAYS = frozenset({"python", "generator", "places", "branches"})
"""Causes by which a message is refused also where its rows are each of one edge."""
SIZE_NAMES = ("size", "size_i", "size_j", "dim_size")
_MANY = 1009  # targets of a run that shows lengths: no layer has as many columns
_MANY_EDGES = 3001  # of a run by whose values it is seen what larger numbers decide
_MANY_BYTES = 1 << 26  # of the rows of a run with more
_OTHER_EDGES, _OTHER_NODES = 31, 8  # of which a run is made
_BEFORE = 11  # edges of a second run before those of the first: what few periods divide
_REMEDIES = {  # The first says most.
    "python": (
        "hands values of its edges to Python (by '{}'), where nobody sees what becomes of them: "
        "use operators on tensors instead, such as torch.where()"
    ),
    "generator": (
        "draws numbers of a generator of its own (by '{}'), for all edges of the list: draw in "
        "forward(), and pass them to propagate(), with a row per edge"
    ),
    "places": (
        "treats edges by their places in the list, which are others on each worker: pass what "
        "tells them apart to propagate(), with a row per edge"
    ),
    "ids": (
        "computes with ids of nodes ('{}' of 'index', 'edge_index_i' or 'edge_index_j'), which are "
        "this worker's own numbering: pass torch.arange(x.size(0)) to propagate() and take it as "
        "an '_i' or '_j' argument"
    ),
    "operator": (
        "calls '{}', of which it is not known that it treats each edge alone: compute that before "
        "propagate(), and pass the result as an edge-level or node-level tensor"
    ),
    "edges": (
        "mixes edges of different targets (by '{}'), of which a worker has some only: compute that "
        "on the whole graph before write_partitions(), or from node features"
    ),
    "numbers": (
        "computes with a number of edges or nodes (in '{}'), of which this worker has its own: "
        "pass the graph's numbers to the layer as constants"
    ),
    "branches": (
        "takes another way for another number of edges, of which each worker has its own: let it "
        "compute the same for any number of edges"
    ),
    "nodes": (
        "reads rows of a tensor of the whole graph (by '{}') that is not among its arguments: pass "
        "it to propagate() and take it as an '_i' or '_j' argument"
    ),
    "takes": (
        "may take the next of a {} each time that it runs, and it runs for some edges at a time: "
        "take it in forward(), and pass it to propagate()"
    ),
    "changes": (
        "changes '{}', which is no attribute of the layer, each time that it runs, and it runs for "
        "some edges at a time: change it in forward()"
    ),
    "gradients": (
        "mixes the gradients of different targets' edges (in a hook, or a backward() of its own), "
        "of which a worker has some only: let an edge's gradient depend on that edge alone"
    ),
}


@dataclass(frozen=True, slots=True)
class RowWise:
    """The facts that a worker found out about a message.

    Attributes:
        refused: Why it can't run over workers, or an empty string.
        updates: Attributes and buffers that it changes by itself: it must run once per call.
        numbers: Whether sizes are numbers to it, and lengths of no tensor.
        rows: The messages, without rows ``[0, *]``, where they are one tensor.
        keeps: Attributes that it leaves with a row per edge.
        asks: What it does may depend on values of tensors, such as a counter among its buffers.
    """

    refused: str = ""
    updates: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    numbers: bool = False
    rows: Tensor | None = None
    asks: bool = False


class RowProgram(TileProgram):
    """A message with all arguments that PyG knows, as in one shot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asks = self.method == "message" and update_asks_for_edges(self.layer)
        self.update = self._bind("update", args[2]) if asks else None

    def updated(self, out: Tensor, values: Sequence[Any], own: Mapping[str, Any]) -> Any:
        """Returns the result of ``update`` for aggregates; these, where it asks for no edges."""
        if self.update is None:
            return out
        return self.layer.update(out, **self._collect(self.update, values, own))

    never_per_tile: tuple[str, ...] = ("adj_t",)
    only_scalars = False


@dataclass(slots=True)
class _Run:
    trace: RowTrace
    out: Any
    nodes: Any
    changed: dict[str, Any]
    seen: Observation


class RowCheck:
    """Looks at the message of one call of ``propagate``. Communicates nothing.

    Args:
        layer: The layer.
        edge_index: Distributed edges.
        kwargs: Keyword arguments of ``propagate``.
        levels: What has a row per edge, as :class:`TileProgram` takes it.
        nodes: Unsuffixed tensors with a row per node of a type: 0 for sources, 1 for targets.
        method: ``'message'``, or ``'edge_update'`` alone.
    """

    def __init__(
        self,
        layer: MessagePassing,
        edge_index: DistEdgeIndex,
        kwargs: Mapping[str, Any],
        levels: Mapping[str, bool],
        nodes: Mapping[str, int],
        method: str = "message",
    ) -> None:
        self.layer, self.edge_index = layer, edge_index
        self.aggregates = method == "message"
        self.own_aggregate = self.aggregates and not is_known(layer)
        self.program = RowProgram(
            layer, edge_index, kwargs, levels, (), method == "message", method=method
        )
        self.nodes = {k: nodes[n] for n, k in self.program.whole.items() if n in nodes}
        self.bipartite = edge_index.bipartite
        names = set(layer.inspector.get_param_names(method))
        if method == "message" and self.program._deferred:
            names |= set(layer.inspector.get_param_names("edge_update"))
        self.asks_sizes = bool(names.intersection(SIZE_NAMES))
        self.seen: Observation | None = None

    def found(self) -> RowWise:
        """Returns what the message does, and leaves the layer, and what is outside, as it was."""
        outside = outside_of(self.layer)
        if outside.takes:
            return RowWise(f"its message {_REMEDIES['takes'].format(outside.takes)}")
        with outside.kept() as changed:
            found = self._tried()
        if changed:
            return RowWise(f"its message {_REMEDIES['changes'].format(changed[0])}")
        return found

    def _tried(self) -> RowWise:
        try:
            return self._found()
        except WholeGraphError as problem:
            return RowWise(f"its message {_REMEDIES['nodes'].format(problem)}")
        except (RuntimeError, IndexError, AssertionError) as error:
            if isinstance(error, PygSarError):
                raise
            return RowWise(f"its message does not take other edges ({error})")

    def _found(self) -> RowWise:
        small = Sizes(34, 10, 13 if self.bipartite else 10)
        if self.asks_sizes:
            small = Sizes(34, _MANY, _MANY + 4 if self.bipartite else _MANY)
        sources = small.sources + (4 if self.bipartite else 2)
        large = Sizes(46, small.targets + 2, sources, small, _BEFORE)
        first = self._run(small, None)
        numbers: Mapping[str, Any] | None = None
        if self.asks_sizes and not _are_lengths(small, first.trace.steps):
            numbers = self._numbers(small)
        second = self._run(large, numbers, first.trace)
        self.seen = second.seen
        trace, changes = second.trace, Changes()
        changes.judge(first.changed, iter(second.changed["*"]), lambda t: self._kind(trace, t))
        if len(trace.steps) != len(first.trace.steps):
            trace.differs = True
        if trace.differs:
            trace.causes.setdefault("branches", "")
        first.trace.forget()
        mixed = any(self._kind(trace, t) == "mixed" for t in _tensors(second.out))
        reason = ""
        if changes.refused:
            reason = (
                f"its message changes '{changes.refused}' by what its edges hold or how many they "
                "are, of which each worker has its own: compute that from node features, outside"
            )
        elif mixed or trace.differs or _ALWAYS & trace.causes.keys():
            reason = f"its message {_reason(trace)}"
        elif not isinstance(second.nodes, Tensor | None):
            reason = f"its update() gives a {type(second.nodes).__name__}{NOT_KNOWN}"
        elif any(self._kind(trace, t, NODE) == "mixed" for t in _tensors(second.nodes)):
            reason = f"its update() {_reason(trace)}"
        else:
            each = (second.out, EDGE), (second.nodes, NODE)
            known = [[bool(self._kind(trace, t, n)) for t in _tensors(out)] for out, n in each]
            same = self._same(first, second, known)
            alone = trace.drawn or self._same_among_many(first, large, numbers, known[0])
            if not same or not alone:
                reason = f"its message {_REMEDIES['places']}"
            elif not self._same_gradients(first, second):
                reason = f"its message {_REMEDIES['gradients']}"
        rows = second.out if isinstance(second.out, Tensor) else None
        if rows is not None and rows.dim() > 0 and -rows.dim() <= self._axis < rows.dim():
            rows = rows.detach().movedim(self._axis, 0)[:0].clone()
        updates = set(changes.updates)
        if self.own_aggregate and isinstance(rows, Tensor) and rows.size(0) == 0 and not reason:
            reason, more, asks = self._aggregate(rows)
            updates |= more
            trace.asks |= asks
        elif self.aggregates and rows is None and not reason:
            reason = (
                f"its aggregate() takes a {type(second.out).__name__} of messages, which is not "
                "tried: let message() return one tensor with a row per edge"
            )
        keeps = tuple(sorted(changes.rows))
        has_numbers = numbers is not None
        return RowWise(reason, tuple(sorted(updates)), keeps, has_numbers, rows, trace.asks)

    def _aggregate(self, rows: Tensor) -> tuple[str, set[str], bool]:
        """Tries the layer's own aggregation: why it can't run, what it changes, if it asks."""
        for name in ("edge_index", "edge_index_j"):
            if name in self.layer.inspector.get_param_names("aggregate"):
                reason = (
                    f"its aggregate() takes '{name}', the ends of a worker's edges in its own "
                    "numbering: let it take 'index', and what message() returns"
                )
                return reason, set(), False
        sizes = Sizes(EDGES, TARGETS, TARGETS)
        source, index = self._ends(sizes)
        values = self._values(Labels(), sizes, source, index)
        given, levels = {}, {}
        asked = self.program._aggregate
        for name, place in (asked.arguments if asked else {}).items():
            given[name] = place[0] if isinstance(place, tuple) else values[place].detach()
            if isinstance(place, int):
                role = self.program.operands[place].role
                if role != "whole":
                    levels[name] = "edge"
                elif place in self.nodes:
                    levels[name] = "node"
        trace = RowTrace(Labels(), sizes)

        @contextmanager
        def watching(messages: Tensor, index: Tensor) -> Iterator[Callable[[int], int]]:
            of_edge = torch.arange(EDGES, dtype=torch.int32)
            trace.labels.put(index, NUMBER + of_edge)
            trace.labels.put(messages, (EDGE + of_edge).view(-1, *[1] * (messages.dim() - 1)))
            with Asked(trace), trace:
                yield partial(Count.of, trace)

        check = AggregateCheck(self.layer, rows, given, levels)
        reason = check.found(self.edge_index.order is not None, watching)
        if not reason and (beyond := trace.causes.keys() & {"places", "branches"}):
            reason = f"its aggregate() {_REMEDIES[min(beyond)]}"
        return reason, check.updates, trace.asks

    @property
    def _axis(self) -> int:
        return int(self.layer.node_dim)

    def _numbers(self, sizes: Sizes) -> dict[str, Any]:
        size = [sizes.sources, sizes.targets]
        if self.layer.flow != "source_to_target":
            size.reverse()
        targets = dict.fromkeys(("size_i", "dim_size"), sizes.targets)
        return {**targets, "size_j": sizes.sources, "size": size}

    # One run #################################################################

    def _run(
        self,
        sizes: Sizes,
        numbers: Mapping[str, Any] | None,
        other: RowTrace | None = None,
        watched: bool = True,
    ) -> _Run:
        labels = Labels()
        with torch.no_grad():
            source, index = self._ends(sizes)
            values = self._values(labels, sizes, source, index)
            own = self._own(labels, sizes, source, index)
            targets = torch.arange(sizes.targets, device=index.device)
            tile = Tile(0, slice(0, sizes.edges), targets, index, source, slice(0, sizes.edges))
            seen = Observation(self.program, tile, values)
            at_targets = make_target_index(index, index, sizes.targets, sizes.targets, seen.log)
        trace = RowTrace(labels, sizes, other)
        state = Snapshot(self.layer)
        counts = {n: Count.of(trace, own[n]) for n in ("dim_size", "size_i", "size_j")}
        size = {"size": [Count.of(trace, n) for n in own["size"]]}
        given = {**own, **(numbers or ({**counts, **size} if watched else {}))}
        given |= {"index": at_targets, "edge_index_i": at_targets}
        try:
            with preserved_attributes(self.layer, buffers=False) as seen.sets:
                modes = seen.watching(Asked(trace), trace) if watched else seen.unwatched()
                with modes, without_statistics(self.layer, seen.log):
                    out, moved, given = self.program.call(seen.values, given)
                changes = [*state.changes()]
                nodes = self._updated(trace, out, moved, own) if watched else None
        finally:
            state.restore()
            for generator, before in trace.generators.items():
                generator.set_state(before)
        seen.ran(out, moved, given, trace.read)
        changed = {"*": changes, **{name: now for name, _, now in changes}}
        return _Run(trace, out, nodes, changed, seen)

    def _updated(
        self, trace: RowTrace, out: Any, values: Sequence[Any], own: Mapping[str, Any]
    ) -> Any:
        """Returns what ``update`` makes of aggregates of the messages, where it asks for edges."""
        if self.program.update is None or not isinstance(out, Tensor):
            return None
        data = self.layer.inspector.collect_param_data("aggregate", dict(own))
        with torch.no_grad():
            total = self.layer.aggregate(out.detach(), **data)
        if not isinstance(total, Tensor):
            return None
        targets = NODE + torch.arange(trace.sizes.targets, dtype=torch.int32)
        axis = self._axis % total.dim()
        shape = [-1 if k == axis else 1 for k in range(total.dim())]
        trace.labels.put(total, targets.view(shape))
        with torch.no_grad(), Asked(trace), trace:
            return self.program.updated(total, values, own)

    def _ends(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Sources and targets of made-up edges; every node is an end of one."""
        edges = torch.arange(sizes.edges, device=self.edge_index.device) - sizes.before
        if sizes.first is None:
            return edges * 3 % sizes.sources, edges * sizes.targets // sizes.edges
        first = sizes.first
        new = (edges < 0) | (edges >= first.edges)
        source = torch.where(new, (edges + 1) % sizes.sources, edges * 3 % first.sources + 1)
        index = (edges * first.targets // first.edges).clamp(-1, first.targets) + 1
        return source, index

    def _values(self, labels: Labels, sizes: Sizes, source: Tensor, index: Tensor) -> list[Any]:
        """Returns the operands' rows for these edges, with labels."""
        device = self.edge_index.device
        edges = (torch.arange(sizes.edges, device=device) - sizes.before) % _OTHER_EDGES
        one_more = int(sizes.first is not None)  # node before those of the first run
        of_edge = EDGE + torch.arange(sizes.edges, dtype=torch.int32)
        values: list[Any] = []
        for number, operand in enumerate(self.program.operands):
            tensor = operand.tensor.detach()
            space = self.nodes.get(number)
            if operand.role == "whole" and space is None:
                values.append(tensor.clone())
                continue
            rows, label = edges, of_edge
            if operand.role == "source":
                rows = source
            elif operand.role == "target":
                rows = index
            elif space is not None:
                count = sizes.targets if space else sizes.sources
                rows = torch.arange(count, device=device)
                base = NODE + (STEP if self.bipartite and not space else 0)
                label = base + torch.arange(count, dtype=torch.int32)
            if tensor.size(0) == 0:
                one = int(tensor.is_floating_point())  # zero is a number of some type, say
                tensor = tensor.new_full((1, *tensor.shape[1:]), one)
            if operand.role in ("source", "target") or space is not None:
                # The same rows in both runs: masks find the same.
                rows = (rows - one_more) % _OTHER_NODES
            value = tensor.index_select(0, rows % tensor.size(0))
            labels.put(value, label.view(-1, *[1] * (value.dim() - 1)))
            values.append(value)
        return values

    def _own(self, labels: Labels, sizes: Sizes, source: Tensor, index: Tensor) -> dict[str, Any]:
        """Returns the arguments that PyG adds."""
        at_targets = NUMBER + torch.arange(sizes.edges, dtype=torch.int32)
        at_sources = at_targets + (STEP if self.bipartite else 0)
        ends = [source, index] if self.layer.flow == "source_to_target" else [index, source]
        both = [at_sources, at_targets] if ends[0] is source else [at_targets, at_sources]
        edge_index = torch.stack(ends)
        labels.put(edge_index, torch.stack(both))
        labels.put(source, at_sources)
        labels.put(index, at_targets)
        size = (sizes.sources, sizes.targets)
        return {
            "index": index,
            "edge_index_i": index,
            "edge_index_j": source,
            "edge_index": edge_index,
            "ptr": None,
            "dim_size": sizes.targets,
            "size_i": sizes.targets,
            "size_j": sizes.sources,
            "size": list(size if ends[0] is source else size[::-1]),
        }

    def _same_among_many(
        self, first: _Run, large: Sizes, numbers: Any, known: Sequence[bool]
    ) -> bool:
        """Says if edges have the same values among some thousands, by code of the user's.

        Constants in Python beyond the other runs decide here, whatever becomes of a length.
        """
        if not self._has_own_code():
            return True
        largest = outside_of(self.layer).largest  # number by which its code may tell edges apart
        edges = max(_MANY_EDGES, 2 * (largest + large.edges) + 1)
        edges = edges if edges * self.program.row_bytes() < _MANY_BYTES else _MANY_EDGES
        many = replace(large, edges=edges, before=edges // 2)
        try:
            third = self._run(many, numbers, first.trace, watched=False)
        except (RuntimeError, IndexError, AssertionError, ValueError):
            return False
        return self._same(replace(first, nodes=None), third, [known, []])

    def _has_own_code(self) -> bool:
        return has_own(self.layer, "message") or holds_foreign_module(self.layer)

    def _same(self, first: _Run, second: _Run, known: Sequence[Sequence[bool]]) -> bool:
        """Says if edges, and nodes, of the first run have the same values in the second.

        Args:
            first: The first run.
            second: The second.
            known: Which results have a row per edge; which have one per node.
        """
        start, small = second.trace.sizes.before, first.trace.sizes
        for ours, theirs, rows, begin, count in (
            (first.out, second.out, known[0], start, small.edges),
            (first.nodes, second.nodes, known[1], 1, small.targets),
        ):
            for one, other, row in zip(_tensors(ours), _tensors(theirs), rows, strict=True):
                axes = (0, self._axis % max(one.dim(), 1)) if one.dim() and row else ()
                found = [other.narrow(k, begin, count) for k in axes if one.shape[k] == count]
                if not any(alike(one, same) for same in found or [other]):
                    return False
        return True

    def _same_gradients(self, first: _Run, second: _Run) -> bool:
        """Says the same of the gradients of their operands' rows."""
        start, count = second.trace.sizes.before, first.trace.sizes.edges
        pairs = zip(self._gradients(first), self._gradients(second), strict=False)
        return all(
            one is None or other is None or alike(one, other[start : start + count])
            for one, other in pairs
        )

    def _gradients(self, run: _Run) -> Sequence[Tensor | None]:
        """Returns gradients of the operands' rows for these edges, of messages of one's own."""
        if not self._has_own_code():
            return []
        outs = [t for t in _tensors(run.out) if t.requires_grad and t.dim()]
        places = torch.arange(run.trace.sizes.edges, dtype=torch.float64) - run.trace.sizes.before
        given = []
        for out in outs:
            axis = self._axis if -out.dim() <= self._axis and out.dim() > 1 else 0
            if out.size(axis) != places.numel():
                return []
            shape = [-1 if k == axis % out.dim() else 1 for k in range(out.dim())]
            given.append(places.cos().to(out).view(shape).expand(out.shape))
        operands = zip(self.program.operands, run.seen.values, strict=True)
        rows = [v for o, v in operands if o.role != "whole" and v.requires_grad]
        if not outs or not rows:
            return []
        state = Snapshot(self.layer)  # Hooks may change it.
        try:
            return torch.autograd.grad(outs, rows, given, retain_graph=True, allow_unused=True)
        except RuntimeError:  # The backward pass says so, too.
            return []
        finally:
            state.restore()

    def _kind(self, trace: RowTrace, tensor: Tensor, base: int = EDGE) -> str:
        """Returns ``'rows'``: each of one edge (or node) alone; ``''``: of none; or ``'mixed'``."""
        found = trace.labels.of(tensor)
        if not bool(found.any()):
            return ""
        count = trace.sizes.edges if base == EDGE else trace.sizes.targets
        axes = {self._axis, 0} if -found.dim() <= self._axis < found.dim() else {0}
        for axis in axes:
            if found.dim() and found.size(axis) == count:
                rows = found.movedim(axis, 0).reshape(count, -1)
                own = base + torch.arange(count, dtype=torch.int32).view(-1, 1)
                if bool(((rows == 0) | (rows == own)).all()):
                    return "rows"
        return "mixed"


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _reason(trace: RowTrace) -> str:
    """Returns the first cause, of the kind that says most."""
    found = trace.causes
    kind = next((kind for kind in _REMEDIES if kind in found), "edges")
    return _REMEDIES[kind].format(found.get(kind, "its order of edges"))


def _are_lengths(sizes: Sizes, steps: Sequence[Step]) -> bool:
    """Says if numbers of nodes, or multiples and neighbours of these, are lengths of tensors."""
    known = {length for step in steps for s in (*step.inputs, *step.outputs) for length in s}
    return any(
        length > size // 2 and min(2 * length % size, -2 * length % size) <= 4
        for length in known
        for size in (sizes.targets, sizes.sources)
    )
