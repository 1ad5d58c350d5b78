"""Layers between tensors of the whole graph: they compute with this worker's rows.

A layer's call gets its parameters through
:class:`~pyg_sar.nn.shared_parameters.SharedParameters`, and whatever else is the same on all
workers through :class:`~pyg_sar.tensors.boundary.Shared`: their backward passes sum over these.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any, cast
from weakref import ReferenceType, ref
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import (
    ARMAConv,
    ChebConv,
    DynamicEdgeConv,
    GravNetConv,
    HANConv,
    HypergraphConv,
    LabelPropagation,
    MeshCNNConv,
    MessagePassing,
    RGCNConv,
    SuperGATConv,
)
from torch_geometric.nn.models.linkx import SparseLinear
from torch_geometric.typing import SparseTensor

from pyg_sar.comm.group import current
from pyg_sar.engine.analysis import Choice, title_of
from pyg_sar.errors import DistributedIndexError, refuse_transforms
from pyg_sar.message.layer_facts import (
    asked_by,
    draws_nothing,
    draws_within_messages,
    plain_class,
    standing_in,
)
from pyg_sar.message.layer_state import TileValue
from pyg_sar.message.row_modules import (
    changes_of,
    has_own,
    holds_foreign_module,
    names_within,
    overridden_entry,
    update_asks_for_edges,
)
from pyg_sar.nn.global_inputs import (
    is_watched,
    refuse_replaced,
    refuse_watched,
    warn_of_memory,
    with_edges_of_matrix,
    with_hooks,
    without_matrix,
)
from pyg_sar.nn.made_edges import of_size, plain_arguments, with_made_edges
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.nn.norm import NORMS
from pyg_sar.nn.propagation import keeping_rows
from pyg_sar.nn.shared_parameters import compute_again
from pyg_sar.space.distributed_index import DistEdgeIndex, version_of
from pyg_sar.tensors import Edges, FromLocal, NodeTensor, Rows, edge_tensor, mapped, node_tensors
from pyg_sar.tensors.boundary import Shared, to_local
from pyg_sar.tensors.node_tensor import is_transformed
from pyg_sar.tensors.operands import wrap
from pyg_sar.tensors.pointwise import known_rows
from pyg_sar.tensors.rows import note_first
from pyg_sar.wording import counted

_LABEL = ("", "backward", "gradient sum")
_EDGE_METHODS = "message", "edge_update"
_METHODS = frozenset({*_EDGE_METHODS, "aggregate", "update", "message_and_aggregate"})
_OF_A_RUN = frozenset(
    {"ledger_name", "_one_shot_call", "_global_calls", "_mixes_edges", "_kept_of"}
)
_CACHED_ROWS = frozenset({"_cached_x", "_cached_h"})
_CACHES = _CACHED_ROWS | {"_cached_edge_index", "_cached_adj_t"}


class _Call:
    """A call of a module between tensors of the whole graph.

    Args:
        module, args, kwargs: The module, and its arguments.
        found: The node tensors among these.

    Raises:
        DistributedIndexError: When an ``edge_index`` stands for no distributed edges, or it can't
            be told which rows a tensor has.
    """

    def __init__(
        self, module: torch.nn.Module, args: Any, kwargs: Any, found: list[NodeTensor]
    ) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refuse_transforms(type(module).__name__)
        self.module, self.comm = module, current()
        if vars(type(module)).get("replaced") in NORMS and self.comm.world_size > 1:
            raise DistributedIndexError(
                f"{type(module).__name__} was distributed in one process, and is compiled on "
                f"{self.comm.world_size} workers (rank {self.comm.rank}): call distribute() there"
            )
        if self.comm.host is not None:
            for tensor in found:
                tensor.rows.check_part()
            cast(Any, module).shared_parameters.check_part(self.comm)
        ends_of = [(t, t.edges) for t in found]
        self.edge_tensors = [t for t, edges in ends_of if edges is not None]
        self.edges: list[Edges] = [edges for _, edges in ends_of if edges is not None]
        self.indices = {id(t): edges.index for t, edges in ends_of if edges is not None}
        layers = isinstance(module, MessagePassing)
        if layers and found and not self.edges:
            raise DistributedIndexError(
                f"{type(module).__name__} got node tensors, but no edges of which it is known "
                f"between which of them they are (rank {self.comm.rank}): pass the nodes' tensor "
                "as 'x' and the edges as int64 [2, E]"
            )
        if not layers:
            refuse_watched(module, self.comm.rank)
        self.shared: list[Tensor] = []
        names = type(module).__name__, getattr(module, "ledger_name", "")
        self.mark = crc32(repr(names).encode())
        for tensor in found:
            self.mark = hash((self.mark, tensor.mark))
        for value in (*args, *kwargs.values()) if self.comm.world_size > 1 else ():
            if isinstance(value, int | float):  # See [Note: the same beside rows].
                number = value if value == value else 0.1  # NaN
                self.comm.beside = hash((self.comm.beside, number))
            elif type(value) in (Tensor, torch.nn.Parameter):
                note_first(value, self.comm)
        if not module.training and self.comm.world_size > 1:
            for value in module.buffers():  # A norm's running statistics.
                if type(value) is Tensor:
                    note_first(value, self.comm)
        # Layouts of the graph itself come before those of selections.
        ends = [r for e in self.edges for r in (e.sources, e.targets)]
        own = self.edge_rows = [t.rows for t in self.edge_tensors]
        by_type = [v for v in (*args, *kwargs.values()) if isinstance(v, dict)]
        types = [t.rows for d in by_type for t in d.values() if isinstance(t, NodeTensor)]
        self.known = list(dict.fromkeys([*ends, *own, *types])) or [t.rows for t in found[:1]]
        pairs = dict.fromkeys((e.sources, e.targets) for e in self.edges)
        self.pair = next(iter(pairs)) if len(pairs) == 1 else None  # of a relation
        backwards = getattr(module, "flow", "source_to_target") != "source_to_target"
        # Whose rows are read as ``_j``, and as ``_i``: the first of a pair and the second, in PyG.
        self.read = self.pair[::-1] if self.pair is not None and backwards else self.pair
        self.one_type = len(set(ends)) == 1 and not by_type
        self.types: dict[str, Rows] = {}
        for key, edges in ((k, getattr(t, "edges", None)) for d in by_type for k, t in d.items()):
            if isinstance(key, tuple) and len(key) == 3 and edges is not None:
                self.types |= {key[0]: edges.sources, key[2]: edges.targets}
        if any(r.compared is not None and module not in r.compared for r in self.known):
            raise DistributedIndexError(
                f"{type(module).__name__} ({getattr(module, 'ledger_name', '')}) got nodes of a "
                f"message flow graph at rank {self.comm.rank} before its model was compared with "
                "the whole graph: call pyg_sar.train.check_flow(model, data, flow) once, with a "
                "model that holds this layer (norms, readouts, or more layers than hops would give "
                "other numbers)"
            )
        self.axis: int | None = None
        of_edges, of_nodes = {rows.total for rows in own}, {rows.total for rows in ends}
        self.many = of_edges & of_nodes  # Whose rows may be either.
        of_edges -= of_nodes
        axis, pygs = int(getattr(module, "node_dim", 0)), not isinstance(module, GlobalPropagation)
        batches = [
            t
            for t, edges in ends_of
            if edges is None
            and (t.axis or (pygs and t._local.dim() > 2 and t.rows in ends))
            and t.is_floating_point()
        ]
        aside = [t.rows.total in of_edges and t.axis != _axis_in(t, axis) for t in batches]
        self.edges_aside = not pygs and any(aside)
        if self.edges_aside:
            batches = [t for t in batches if t.rows.total not in of_edges]
        if batches:
            self.axis = self._axis_of(batches)
        elif layers and set(map(attrgetter("rows"), found)).issubset(own):
            self.axis = self._axis_of_plain(tree_leaves((args, kwargs)))

    def _axis_of(self, batches: list[NodeTensor]) -> int:
        """Returns the axis of the nodes, as the layer says, of ``[T, N, F]`` (static graphs)."""
        axis = int(getattr(self.module, "node_dim", 0))
        for tensor in batches:
            if tensor.axis != _axis_in(tensor, axis):
                raise DistributedIndexError(
                    f"{type(self.module).__name__} got a tensor of shape {list(tensor.shape)} with "
                    f"its nodes along axis {tensor.axis}, where it takes them along axis {axis} "
                    f"(rank {self.comm.rank}): pass x.movedim({tensor.axis}, {axis})"
                )
        return axis

    def _axis_of_plain(self, given: list[Any]) -> int | None:
        """Returns the axis of the nodes, as the layer says, of plain tensors ``[T, N, F]``."""
        axis, totals = int(self.module.node_dim), {rows.total for rows in self.known}  # type: ignore[arg-type]
        wide = [v for v in given if isinstance(v, Tensor) and v.dim() > 2]
        many = [v for v in wide if 0 < _axis_in(v, axis) < v.dim()]
        return axis if any(v.is_floating_point() and v.size(axis) in totals for v in many) else None

    def local(self, value: Any, like: Rows | None = None, gathered: bool = False) -> Any:
        """Returns a tensor as what this worker's computation takes.

        Args:
            value: The tensor.
            like: The layout of the nodes that it is of, where its place tells: another type's may
                have as many.
            gathered: It is all rows of a tensor that has none of the edges or their nodes.
        """
        if isinstance(value, NodeTensor):
            if id(value) in self.indices:
                return self.indices[id(value)]
            rows = value.rows
            if like is not None and like.total == rows.total and rows not in self.edge_rows:
                rows = like
            if self.edges and all(rows.total != r.total for r in self.known):
                # No rows of the edges' nodes: a weight that was computed from some, say.
                return self.local(value.full_tensor(), gathered=True)
            if self.known and rows not in self.known:
                same, why = [r for r in self.known if r.total == rows.total], ""
                if len(same) > 1:  # Nodes that were loaded twice, and as many edges, say.
                    why = ": its nodes and its edges are as many"
                    same = [r for r in same if r.same(rows)][:1]
                if len(same) != 1:
                    raise DistributedIndexError(
                        f"{type(self.module).__name__} got rows of another order than its graph's "
                        f"(shape {list(value.shape)}, rank {self.comm.rank}){why}"
                    )
                rows = same[0]
            return to_local(value, rows, value.axis)
        groups = value.dim() == 1 and value.dtype == torch.long  # a norm's, or a readout's, batch
        if value.dim() and (self.edges or groups):
            axis = int(getattr(self.module, "node_dim", 0)) if value.dim() > 2 else 0
            if value.size(axis) not in [r.total for r in self.known]:
                axis = 0
            fits = [r for r in self.known if r.total == value.size(axis)]
            fits = [like] if like is not None and like in fits else fits
            if len(fits) > 1 and value.size(axis):
                raise DistributedIndexError(
                    f"{type(self.module).__name__} got a plain tensor of shape "
                    f"{list(value.shape)}, as many rows as there are nodes of two types, or nodes "
                    f"and edges (rank {self.comm.rank}): make it from the data's own tensors, by "
                    "zeros_like() or new_zeros(), say"
                )
            if fits:
                return to_local(value, fits[0], axis % value.dim())
            mine = gathered or value.dim() > 1
            if self.edges and mine and value.size(0) in [r.count for r in self.known]:
                kind = f"{type(self.module).__name__} got a"
                if gathered:
                    raise DistributedIndexError(
                        f"{kind} tensor of shape {list(value.shape)}, whose rows are neither its "
                        f"edges nor their nodes (rank {self.comm.rank}): pass a row for each of "
                        "these, or the edges of a subgraph"
                    )
                raise DistributedIndexError(
                    f"{kind} plain tensor of shape {list(value.shape)}, the number of this "
                    f"worker's rows alone (rank {self.comm.rank}): pass tensors of "
                    "load_partition(root), or pyg_sar.from_local(rows, data)"
                )
        if value.requires_grad:
            self.shared.append(value)
        return value

    def number(self, value: Any, like: Rows | None = None) -> Any:
        """Returns a number of nodes of the whole graph as this worker's."""
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        fits = {r.count for r in ([like] if like else self.known) if r.total == value}
        return fits.pop() if len(fits) == 1 else value

    def arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of this worker's computation.

        Plain tensors that need gradients have them summed over the workers.

        Raises:
            DistributedIndexError: ``x`` has other rows than the edges have nodes.
        """
        for x in [*args[:1], kwargs.get("x")] if self.edges else ():
            other = isinstance(x, NodeTensor) and id(x) not in self.indices
            if other and all(x.rows.total != rows.total for rows in self.known):
                self._refuse_as_x(x, args, kwargs)
        local = cache(self.local)  # One tensor in two roles stays one, and travels once.
        ends, read = self.pair or (None, None), self.read or (None, None)

        def placed(value: Any, name: str = "") -> Any:
            """Takes a dict's tensors for rows of its types, a pair's for those of its ends."""
            at = lambda v, rows: mapped(partial(local, like=rows), v)  # noqa: E731
            if isinstance(value, dict):
                return {k: at(v, self.types.get(k)) for k, v in value.items()}
            if type(value) in (tuple, list) and len(value) == 2:
                return type(value)(map(at, value, read))
            if isinstance(value, NodeTensor) and self._fits_both(value):
                return self._of_either_end(value, name, at)
            by = [] if isinstance(value, NodeTensor) else self._ends_read(name)
            return at(value, by[0] if len(by) == 1 else None)

        if self.one_type:
            args = tuple(local(v) if isinstance(v, Tensor) else mapped(local, v) for v in args)
            kwargs = {
                k: local(v) if isinstance(v, Tensor) else mapped(local, v)
                for k, v in kwargs.items()
            }
        else:
            args, kwargs = tuple(map(placed, args)), {k: placed(v, k) for k, v in kwargs.items()}
        if isinstance(kwargs.get("size"), tuple | list):
            kwargs["size"] = tuple(map(self.number, kwargs["size"], ends))
        if isinstance(self.module, RGCNConv) and self.edges:
            if "x" in kwargs and kwargs["x"] is None:
                kwargs["x"] = self.edges[0].sources.ids
            elif args and args[0] is None:
                args = (self.edges[0].sources.ids, *args[1:])
        if self.shared and self.comm.world_size > 1:
            shared = Shared.apply(self.comm, *self.shared)
            summed = dict(zip(map(id, self.shared), shared, strict=True))
            take = lambda t: summed.get(id(t), t)  # noqa: E731
            return mapped(take, args), mapped(take, kwargs)
        return args, kwargs

    def _refuse_as_x(self, x: NodeTensor, args: Any, kwargs: Any) -> None:
        """Raises where a tensor is the argument ``x``, and no weight that rows were made into."""
        try:
            found = inspect.signature(self.module.forward).bind_partial(*args, **kwargs).arguments
        except TypeError:  # It calls itself otherwise.
            return
        if found.get("x") is x:
            totals = {rows.total for one in self.edges for rows in (one.sources, one.targets)}
            raise DistributedIndexError(
                f"{type(self.module).__name__} got 'x' of shape {list(x.shape)}, where its edges "
                f"have {' or '.join(map(str, sorted(totals)))} nodes (rank {self.comm.rank}): pass "
                "a row for each of them, or the edges of a subgraph"
            )

    def _fits_both(self, value: NodeTensor) -> bool:
        """Says if a tensor has as many rows as both ends of a relation, which differ."""
        if self.pair is None or id(value) in self.indices or value.rows in self.edge_rows:
            return False
        sources, targets = self.pair
        fits = sources.total == targets.total == value.rows.total
        return fits and self.comm.world_size > 1 and not sources.same(targets)

    def _of_either_end(self, value: NodeTensor, name: str, local: Any) -> Any:
        """Returns the rows that an argument of ``propagate`` is read by, or both."""
        own: Any = self.module
        if not name or not isinstance(own, GlobalPropagation):
            raise DistributedIndexError(
                f"{type(own).__name__} got one tensor of shape {list(value.shape)} for edges "
                f"between two types of {value.rows.total} nodes (rank {self.comm.rank}): pass a "
                "pair, (x_src, x_dst)"
            )
        read = [local(value, rows) for rows in self._ends_read(name)]
        return local(value, None) if not read else read[0] if len(read) == 1 else tuple(read)

    def _ends_read(self, name: str) -> list[Rows]:
        """Returns the ends of a relation by whose nodes an argument of ``propagate`` is read."""
        own: Any = self.module
        if not name or self.read is None or not isinstance(own, GlobalPropagation):
            return []
        asked = asked_by(own, *_EDGE_METHODS, "aggregate", "update")
        ends = zip("ji", self.read, strict=True)
        return [rows for end, rows in ends if f"{name}_{end}" in asked]

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """The module's parameters are those whose gradients are summed over the workers.

        Modules take what they are called with meanwhile for this worker's rows.
        """
        layer: Any = self.module
        several = self.comm.world_size > 1
        learns = torch.is_grad_enabled() and several
        swapped: dict[int, Any] = layer.shared_parameters.of(layer, self.comm) if learns else {}
        if several and not learns:
            layer.shared_parameters.compare(layer, self.comm)
        modules = [*layer.modules()]
        computed = list(_computed(modules)) if learns else []
        for module in modules:
            if isinstance(module, SparseLinear) and self.edges:  # Its weight has a row per node.
                rows = self.edges[0].sources
                swapped[id(module.weight)] = to_local(module.weight, rows, 0)
            for name, value in module._parameters.items():  # By torch.func.functional_call.
                if isinstance(value, NodeTensor) and not isinstance(value, torch.nn.Parameter):
                    computed.append((module._parameters, name, value))
                elif learns and value is not None and not value.requires_grad:
                    note_first(value, self.comm)  # The sum of gradients has none of its own.
        if computed:
            values = [v.full_tensor() if isinstance(v, NodeTensor) else v for _, _, v in computed]
            values = Shared.apply(self.comm, *values) if learns else values
            swapped |= {id(p[2]): one for p, one in zip(computed, values, strict=True)}
        places = computed + [
            (module._parameters, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if id(parameter) in swapped
        ]
        relations = vars(layer).get("_edge_type")  # PyG's to_hetero_with_bases leaves it there.
        if isinstance(relations, Tensor):
            places.append((vars(layer), "_edge_type", relations))
            swapped[id(relations)] = self.local(relations)
        for registry, name, original in places:
            registry[name] = swapped[id(original)]
        outer, self.comm.in_layer = self.comm.in_layer, True
        try:
            yield
        finally:
            self.comm.in_layer = outer
            for registry, name, original in places:
                registry[name] = original
            if computed:
                compute_again(layer)
            for _, _, value in _computed(layer.modules()) if learns else ():
                if all(value is not before for _, _, before in computed):
                    value._pyg_sar_rows = True  # What the layer keeps of this worker's rows.

    @contextmanager
    def draws(self) -> Iterator[None]:
        """A layer draws numbers of the worker's own meanwhile; then states are one."""
        device = self.comm.device
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state, count = torch.get_rng_state(), self.module.__dict__.get("_global_calls", 0)
        self.module.__dict__["_global_calls"] = count + 1
        seed = hash((torch.initial_seed(), count, self.comm.rank))
        torch.random.default_generator.manual_seed(seed % 2**63)
        if gpu is not None:
            torch.cuda.manual_seed(seed % 2**63)
        try:
            yield
        finally:
            torch.set_rng_state(state)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu, device)

    def out(self, value: Any, rows: Rows) -> Any:
        """Returns a result with a row per node as a tensor of the whole graph."""
        if not isinstance(value, Tensor):
            return value
        axis = 0 if self.axis is None else _axis_in(value, self.axis)
        if not 0 <= axis < value.dim() or value.size(axis) != rows.count:
            raise DistributedIndexError(
                f"{type(self.module).__name__} gave a tensor of shape {list(value.shape)} for "
                f"{counted(rows.count, 'rows')} (rank {self.comm.rank}): it is no tensor of the "
                "whole graph"
            )
        found = FromLocal.apply(value, rows, axis)
        found.mark = self.mark  # See [Note: the same rows].
        return found

    def results(self, out: Any, args: Any, kwargs: Any) -> Any:
        """Returns the module's results as tensors of the whole graph."""
        if isinstance(out, dict) and self.edges:
            given = [d for d in (*args, *kwargs.values()) if isinstance(d, dict)]
            found = {}
            for name, value in out.items():
                like = (d[name].rows for d in given if isinstance(d.get(name), NodeTensor))
                rows = self.types.get(name) or next(like, None)
                if value is not None and rows is None:
                    raise DistributedIndexError(
                        f"{type(self.module).__name__} gave rows of '{name}', of which it got none "
                        f"(rank {self.comm.rank})"
                    )
                found[name] = value if rows is None else self.out(value, rows)
            return found
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], tuple):
            return self._with_attention(out[0], *out[1])
        if isinstance(out, tuple | list | dict):
            raise DistributedIndexError(
                f"{type(self.module).__name__} gave a {type(out).__name__} (rank "
                f"{self.comm.rank}), of which it is not known which rows they have: let it return "
                "a tensor with a row per node, or a dict of them by node type"
            )
        return self.out(out, self._targets())

    def _targets(self) -> Rows:
        """Returns the layout of the nodes that the module's result has rows of."""
        if not self.edges:
            return self.known[0]
        edges = self.edges[0]
        if len({id(e.targets) for e in self.edges}) > 1:
            raise DistributedIndexError(
                f"{type(self.module).__name__} got edges to nodes of several types (rank "
                f"{self.comm.rank}), and gave one tensor"
            )
        backwards = getattr(self.module, "flow", "source_to_target") == "target_to_source"
        return edges.sources if backwards else edges.targets

    def _with_attention(self, out: Any, index: Any, attention: Any) -> Any:
        """Returns a result and the attention on each edge (``return_attention_weights``)."""
        given = self.edge_tensors[0]
        edges, rows = given.edges, given.rows
        if index is not edges.index:  # It has put loops of its own in the place of the graph's.
            kept = cast(NodeTensor, given[:, given[0] != given[1]])
            rows = kept.rows.joined([edges.targets])
        if not rows.agree(isinstance(index, DistEdgeIndex) and index.size(1) == rows.count):
            raise DistributedIndexError(
                f"{type(self.module).__name__} gave values of other edges than its own, and loops "
                f"(rank {self.comm.rank}): add or remove loops before write_partitions()"
            )
        found = edge_tensor(Edges(index, edges.sources, edges.targets), rows)
        return self.out(out, self._targets()), (found, self.out(attention, rows))


def _computed(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Attributes of modules that were computed of parameters: pruned, or another network's, say."""
    for module in modules:
        for name, value in vars(module).items():
            plain = isinstance(value, Tensor) and not isinstance(value, NodeTensor | TileValue)
            if plain and value.requires_grad and not hasattr(value, "_pyg_sar_rows"):
                yield vars(module), name, value


def _refuse_local(module: Any, *given: Any) -> None:
    """Raises on a worker's own edges, with which gradients would stay each worker's own.

    Also where a transform of ``torch.func`` has wrapped node tensors.
    """
    compiling = torch.compiler.is_compiling()
    transforms = not compiling and torch._C._functorch.peek_interpreter_stack() is not None
    if transforms and any(map(is_transformed, tree_leaves(given))):
        refuse_transforms(type(module).__name__)
    if not any(isinstance(a, DistEdgeIndex) for a in tree_leaves(given)):
        return
    comm = current()
    if comm.world_size > 1:
        raise DistributedIndexError(
            f"{type(module).__name__} got a worker's own 'edge_index' (rank {comm.rank}): pass "
            "data.edge_index of load_partition(root), not its to_local()"
        )


def _derived(layer: Any) -> DistributedIndexError:
    """Returns an error for a layer whose class a user has derived from that of this package."""
    return DistributedIndexError(
        f"{title_of(layer)} got this class after distribute(), as a parametrization of a layer's "
        "own parameters gives it one: give it before distribute()"
    )


class GlobalCalls:
    """Goes before a class of layers that compute with this worker's rows.

    Hooks of the layer itself are called with tensors of the whole graph.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = vars(type(self)).get("replaced")
        if kind in NORMS and not torch.compiler.is_compiling() and current().world_size > 1:
            # It was distributed where one process had all rows, and is a copy here.
            self.__class__ = global_class(named_as(NORMS[kind], kind))
            return self(*args, **kwargs)
        known = plain_arguments((*args, *kwargs.values()))
        if isinstance(self, MessagePassing) and "replaced" not in vars(type(self)):
            raise _derived(self)
        if isinstance(self, MessagePassing) and not known:
            args, kwargs, matrix = with_edges_of_matrix(self, args, kwargs)
            if matrix:
                return torch.nn.Module.__call__(self, *args, **kwargs)
        if not known:
            args, kwargs = with_made_edges(self, args, kwargs)
            if not node_tensors(args, kwargs):
                _refuse_local(self, args, kwargs)
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if isinstance(self, MessagePassing):
            given = known or node_tensors(args, kwargs)
            unsure = isinstance(self, ChebConv) and _may_be_of_graphs(
                given, (*args, *kwargs.values())
            )
            for tensor in given:
                rows = tensor.rows
                for end in rows.ends:
                    if end.total == rows.total:
                        unsure = unsure or _may_be_of_edges(rows, given)
            only = self.policy.random is None or draws_nothing(self) or draws_within_messages(self)
            keeps = not _CACHES.isdisjoint(vars(self)) and _keeps_all_nodes(self)
            if is_watched(self) or not only or keeps or unsure:
                with _taking_all_nodes(self, args, kwargs):
                    return self(*args, **kwargs)
            if not _METHODS.isdisjoint(vars(self)) or holds_foreign_module(self):
                _take_all_nodes(self, args, kwargs)  # Something was put there after distribute().
                return self(*args, **kwargs)
        elif changes := changes_of(self):  # type: ignore[arg-type]
            return _called_as_in_pyg(self, changes, args, kwargs)
        return with_hooks(self, self._called, args, kwargs)  # type: ignore[arg-type]

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's result, without its hooks."""
        found = plain_arguments((*args, *kwargs.values()))
        if not found:
            if not node_tensors(args, kwargs):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            args, kwargs = without_matrix(self, args, kwargs)
            found = node_tensors(args, kwargs)
        call = _Call(self, args, kwargs, found)  # type: ignore[arg-type]
        policy = getattr(self, "policy", None)
        with call.parameters():
            own_args, own_kwargs = call.arguments(args, kwargs)
            may_keep = not _CACHES.isdisjoint(vars(self)) and not _kept(self)
            with nullcontext() if policy is None or policy.random is not None else call.draws():
                out = super().__call__(*own_args, **own_kwargs)  # type: ignore[misc]
        if may_keep and _kept(self):
            vars(self)["_kept_of"] = _edges_given(args, kwargs)
        return call.results(out, args, kwargs)


def _axis_in(tensor: Tensor, axis: int) -> int:
    """Returns an axis, which may count from the end, as counted from the first."""
    return axis + tensor.dim() if axis < 0 else axis


def _may_be_of_edges(edges: Rows, given: Iterable[NodeTensor]) -> bool:
    """Returns whether it isn't sure which tensors have rows of nodes: ``edges`` are as many.

    It is sure of one that is laid out as the nodes are. ``propagate`` tells the others apart by the
    names by which messages read them.
    """
    others = [t.rows for t in given if t.edges is None and t.rows.total == edges.total]
    return others not in ([], *([rows] for rows in edges.ends))


def _may_be_of_graphs(given: Iterable[NodeTensor], values: Iterable[Any]) -> bool:
    """Returns whether ``lambda_max`` has as many numbers, one of each graph, as there are rows."""
    counts = {tensor.rows.total for tensor in given}
    plain = [v for v in values if isinstance(v, Tensor) and not isinstance(v, NodeTensor)]
    return any(v.numel() > 1 and v.size(0) in counts for v in plain)


def _keeps_all_nodes(layer: Any) -> bool:
    """Returns whether a layer keeps (``cached=True``) what it has made of the whole graph."""
    return bool(node_tensors([vars(layer)[name] for name in vars(layer).keys() & _CACHES]))


def _kept(layer: Any) -> dict[str, Any]:
    """Returns what a layer keeps (``cached=True``), by name."""
    state = vars(layer)
    return {name: state[name] for name in state.keys() & _CACHES if state[name] is not None}


def _edges_given(args: Any, kwargs: Any) -> list[tuple[ReferenceType[Tensor], int]]:
    """Returns edges among arguments, and tensors with a row for each, with their versions."""
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    edges = [t.rows for t in node_tensors(given) if t.edges is not None]
    many, nodes = {rows.total for rows in edges}, {end for rows in edges for end in rows.ends}
    of_edges = [t for t in given if many & {*t.shape[:2]} and getattr(t, "rows", None) not in nodes]
    return [(ref(t), version_of(t)) for t in of_edges]


def _take_all_nodes(layer: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Lets a layer's ``forward`` compute with tensors of the whole graph from now on.

    Returns what it has kept of this worker's edges and rows.

    Raises:
        DistributedIndexError: These edges were others.
    """
    caches = {} if _keeps_all_nodes(layer) else _kept(layer)
    known, given = (
        [(id(tensor()), version) for tensor, version in found]
        for found in (vars(layer).get("_kept_of", []), _edges_given(args, kwargs))
    )
    if caches.keys() - _CACHED_ROWS and known != given:
        raise DistributedIndexError(
            f"{title_of(layer)} goes on using what it has kept of other edges (cached=True), which "
            "can't be done since it has got hooks, or other methods or modules, or is explained "
            f"(rank {current().rank}): change it before its first call, or take cached=False"
        )
    layer.__class__ = global_class(type(layer).replaced, True)
    whole: dict[str, Any] = dict.fromkeys(caches)
    ends = [t.edges.targets for t in node_tensors(args, kwargs) if t.edges is not None]
    for name in caches.keys() & _CACHED_ROWS:
        rows = caches[name]
        whole[name] = FromLocal.apply(rows, ends[0], _axis_in(rows, layer.node_dim))
    vars(layer).update(whole)
    return caches


@contextmanager
def _taking_all_nodes(layer: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Lets a layer's ``forward`` compute with tensors of the whole graph meanwhile."""
    own, caches = type(layer), _take_all_nodes(layer, args, kwargs)
    try:
        yield
    finally:
        layer.__class__ = own
        vars(layer).update(caches)


def _called_as_in_pyg(module: Any, changes: list[str], args: Any, kwargs: Any) -> Any:
    """Runs a norm's own code on tensors of the whole graph: a user has changed what it does.

    Raises:
        DistributedIndexError: By a hook within it, or what it can't be run with.
    """
    refuse_watched(module, current().rank)
    refuse_replaced(module, changes)
    own: Any = type(module)
    module.__class__ = plain_class(own)
    try:
        return module(*args, **kwargs)
    finally:
        module.__class__ = own


def _as_it_is(inputs: Tensor, **others: Any) -> Tensor:
    return inputs


class GlobalPropagation(DistMessagePassing):
    """Goes before a class whose ``forward`` works on all nodes, and aggregates in between."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "replaced" not in vars(type(self)):
            raise _derived(self)
        if not plain_arguments((*args, *kwargs.values())):
            args, kwargs, matrix = with_edges_of_matrix(self, args, kwargs)
            if matrix:
                return torch.nn.Module.__call__(self, *args, **kwargs)
            args, kwargs = with_made_edges(self, args, kwargs, other_nodes=True)
            if not node_tensors(args, kwargs):
                _refuse_local(self, args, kwargs)
                return super().__call__(*args, **kwargs)
            args, kwargs = without_matrix(self, args, kwargs)
        given = node_tensors(args, kwargs) if self.policy.refresh_every > 1 else []
        edges = [t.edges.index for t in given if t.edges is not None]
        with keeping_rows(self, edges) if edges else nullcontext():
            return torch.nn.Module.__call__(self, *args, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        found = plain_arguments((edge_index, *kwargs.values())) if size is None else None
        if not found:
            if isinstance(edge_index, SparseTensor) or not node_tensors(edge_index, kwargs):
                return super().propagate(edge_index, size=size, **kwargs)
            given = {**kwargs, "edge_index": of_size(edge_index, size), "size": size}
            edge_index = with_made_edges(self, (), given)[1]["edge_index"]
            if size is not None:
                kwargs["size"] = size
            found = node_tensors(edge_index, kwargs)
        call = _Call(self, (edge_index,), kwargs, found)
        watched = is_watched(self, forward=False)
        if watched and not self.explain:
            within = f" ({', '.join(changes)})" if (changes := changes_of(self)) else ""
            what = "hooks, or methods or functions of the user's, within it"
            warn_of_memory(f"{title_of(self)} has {what}{within}")
        aggr = self.aggr_module  # None: a layer has a method of its own
        draws = None not in (self.policy.random, aggr) and not draws_nothing(aggr)
        if draws:
            warn_of_memory(f"{title_of(self)} draws random numbers for what its messages add up to")
        mixes = vars(self).get("_mixes_edges") or (
            call.many and self._takes_other_rows(call, kwargs)
        )
        if watched or draws or mixes:
            return self._on_whole_graph(edge_index, kwargs)
        if call.edges_aside:
            why = f"{title_of(self)} takes values of edges along another axis than the first"
            return self._on_whole_graph(edge_index, kwargs, DistributedIndexError(why))
        own_update = has_own(self, "update") and not update_asks_for_edges(self)
        try:
            with call.parameters():
                (edges,), local = call.arguments((edge_index,), kwargs)
                # A user's update waits meanwhile: it is to get all nodes.
                with standing_in((self, "update", _as_it_is)) if own_update else nullcontext():
                    out = super().propagate(edges, **local)
        except DistributedIndexError as error:
            if not error.mixes_edges:
                raise
            return self._on_whole_graph(edge_index, kwargs, error)
        axis = int(self.node_dim)
        if call.axis is not None or out.dim() == -axis or axis == 0:
            out = call.results(out, (), {})
        else:
            out = call.results(out.movedim(axis, 0), (), {}).movedim(0, axis)
        if own_update:
            asked = self.inspector.get_param_names("update")
            data = {name: kwargs.get(name, inspect.Parameter.empty) for name in asked}
            out = self.update(out, **self.inspector.collect_param_data("update", data))
        return cast(Tensor, out)

    def _takes_other_rows(self, call: _Call, kwargs: dict[str, Any]) -> bool:
        """Returns whether rows of nodes may stand for edges, or the other way round: they are as
        many. On tensors of the whole graph each row then stands where PyG has it.
        """
        ends = {r for e in call.edges for r in (e.sources, e.targets)}
        asked, unsure = asked_by(self, *_EDGE_METHODS), asked_by(self, "aggregate")
        for name, value in kwargs.items():
            fits = call.edge_rows if name in asked else () if name in unsure else ends
            for tensor in node_tensors(value):
                if tensor.rows.total in call.many and tensor.rows not in fits:
                    return True
        return False

    def _check_choice(self, choice: Choice) -> None:
        """Raises where an attribute is wanted that ``message`` sets, of a worker's edges.

        By ``update``, which names it, or by whoever asks for one shot. Also where one worker has
        all edges, but in an order of its own.
        """
        keeps = () if choice.rows is None else choice.rows.agreed.keeps
        names, kind = {*choice.sets, *keeps}, cast(Any, type(self))
        if names and self.policy.mode != 3:
            names &= names_within(kind, "update")
        if names and current().world_size > 1:
            wants = "mode 3" if self.policy.mode == 3 else "its update()"
            error = DistributedIndexError(
                f"{title_of(self)} can't be computed from each worker's own edges: {wants} asks "
                f"for '{min(names)}', which message() sets for all of them"
            )
            error.mixes_edges = True
            raise error
        refused = "" if choice.rows is None else choice.rows.agreed.refused
        if refused and choice.needs is None:
            title = f"{title_of(self)} can't be computed in the order that edges have here"
            error = DistributedIndexError(f"{title}: {refused}")
            error.mixes_edges = True
            raise error

    def _on_whole_graph(
        self, edge_index: Any, kwargs: dict[str, Any], why: DistributedIndexError | None = None
    ) -> Tensor:
        """Runs PyG's own ``propagate`` on tensors of the whole graph, of nodes and of edges.

        A message of an edge may depend on other edges there, or have rows of nodes, which its own
        ``aggregate`` knows (NBFNet's). Each operator's rule gives the whole graph's numbers.

        Raises:
            DistributedIndexError: Where an operator has no rule, with ``why``.
        """
        kind: Any = type(self)
        kind = plain_class(kind)
        explains = self.explain or self.decomposed_layers > 1  # not in PyG's compiled template
        own = MessagePassing if explains and overridden_entry(kind) != "propagate" else kind
        try:
            out = own.propagate(self, edge_index, **kwargs)
        except DistributedIndexError as error:
            if why is None:
                raise
            raise DistributedIndexError(f"{why}; nor of the whole graph: {error}") from error
        if why is not None:
            self.__dict__.update(_mixes_edges=True)
            warn_of_memory(str(why))
        if type(out) is Tensor and isinstance(edge_index, NodeTensor):
            axis = int(self.node_dim)
            rows = known_rows(edge_index, out.size(axis))
            if rows is not None:  # Made with all rows gathered (a median's sort): own ones stay.
                out = out.index_select(axis, wrap(rows.ids, rows, 0))
        return cast(Tensor, out)


_FIND_EDGES = (DynamicEdgeConv, GravNetConv)
_WORK_ON_ALL_NODES = (
    *(ARMAConv, HANConv, MeshCNNConv, LabelPropagation, SuperGATConv, HypergraphConv, *_FIND_EDGES),
)
_KNOWN = ("torch.", "torch_geometric.", "pyg_sar.")
_ASKED = frozenset(
    {
        *("reset_parameters", "propagate", "collect", "edge_updater", "edge_collect"),
        *("_orig_propagate", "_jinja_propagate", "_orig_edge_updater", "_jinja_edge_updater"),
    }
)
"""Methods that no forward pass calls with rows, but those that PyG writes."""
_OF_ALL = frozenset({"to_dense_adj", "knn", "knn_graph", "radius", "radius_graph"})
"""Functions of, or on, all nodes; layers that call them work on these."""


def _works_on_all_nodes(kind: Any) -> bool:
    """Returns whether a layer's ``forward`` may do more than treat each row for itself."""
    if not issubclass(kind, MessagePassing):
        return False
    author = next((base for base in kind.__mro__ if "forward" in vars(base)), object)
    if not author.__module__.startswith((*_KNOWN, "builtins")):
        return True
    users = [base for base in kind.__mro__ if not base.__module__.startswith(_KNOWN)]
    own = [vars(base) for base in users if "replaced" not in vars(base)]
    for name in {name for names in own for name in names} - _ASKED:
        if hasattr(author, name) and not hasattr(torch.nn.Module, name):
            return True  # PyG's forward() may call it, with the rows of all nodes.
    methods = [method for names in own for method in names.values()]
    return issubclass(kind, _WORK_ON_ALL_NODES) or any(
        not _OF_ALL.isdisjoint(method.__code__.co_names)
        for method in methods
        if inspect.isfunction(method)
    )


def _pickled(module: Any, protocol: Any) -> Any:
    """A module is pickled as what it was before: a plain one, which any process can load."""
    state = {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_A_RUN and not type(value).__module__.startswith("pyg_sar.")
    }
    state |= dict.fromkeys(state.keys() & _CACHES)
    kind: Any = type(module)
    return copyreg._reconstructor, (plain_class(kind), object, None), state  # type: ignore[attr-defined]


def _copied(module: Any, memo: Any = None) -> Any:
    """A copy of a module runs as that one does."""
    twin = object.__new__(type(module))
    if memo is None:
        twin.__dict__.update(vars(module))
    else:
        memo[id(module)] = twin
        twin.__setstate__(copy.deepcopy(vars(module), memo))
    return twin


def names_of(kind: type) -> dict[str, Any]:
    """Returns what a class that takes the place of another one has by its body: its names, and it.

    So a model prints as PyG's, and errors name the user's class. ``isinstance`` tells. What is
    pickled is of the class ``kind``.
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "replaced": kind}
    return {**names, "__reduce_ex__": _pickled, "__copy__": _copied, "__deepcopy__": _copied}


@cache
def named_as(dist: type, kind: type) -> type:
    """Returns ``dist``, which takes the place of ``kind``, under the name of that."""
    return type(kind.__name__, (dist,), names_of(kind))


@cache
def global_class(kind: type, on_all_nodes: bool = False) -> type:
    """Returns a class of modules that also take and give tensors of the whole graph.

    Args:
        kind: The class.
        on_all_nodes: Its ``forward`` may do more than treat each row for itself.
    """
    if on_all_nodes or _works_on_all_nodes(kind):
        own = vars(kind).get("replaced", kind)  # or one's own, written against DistMessagePassing
        return type(kind.__name__, (GlobalPropagation, own), names_of(kind))
    return type(kind.__name__, (GlobalCalls, kind), names_of(kind))
