"""Finds what the backward pass of a message needs by looking at it; nobody declares it.

The message runs once on a sample tile. Three things are read off:

1. *Case.* Every operator's result that derives from source rows is followed by its storage (below
   autograd, so that masks, ``argmax`` positions and other values without a ``grad_fn`` are seen).
   A tensor of that kind among those that autograd saves means case 2 (SAR, section 3.2): the
   backward pass needs source values. Custom autograd functions and values that leave the tensor
   world (``.item()``) are opaque: case 2.
2. *Reductions over targets* inside the message, and whether the message is linear in what they
   normalise (see [Note: softmax over targets]).
3. *Whether the message is the source rows themselves*, so that nothing need be recorded at all,
   or their product with a number per edge (see [Note: products]).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_sar.message.layer_state import AmbientState, detached_parameters, preserved_attributes
from pyg_sar.message.message_checks import Products, check_edges_apart, check_linear
from pyg_sar.message.program import TileProgram
from pyg_sar.message.target_index import NeedsAllEdges, NodeReads, Reductions
from pyg_sar.reduction.moments import OVER_ROWS, reduces_over_rows
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile

_SAMPLE_EDGES = 256
_MANY = 2**40
_OPERANDS = 2**16  # more than a message has
_READS_MEMORY = frozenset(
    getattr(Tensor, name)
    for name in (
        "__array__",
        "__dlpack__",
        "data_ptr",
        "numpy",
        "storage",
        "tolist",
        "untyped_storage",
    )
)
_REMEDY = "(make it an attribute of the layer, or pass it to propagate)"
_PATTERNS: tuple[tuple[str, ...], ...] = ((), ("max", "sum"), ("sum",))


@dataclass(frozen=True, slots=True)
class Dependence:
    """The needs of a message in its backward pass.

    Attributes:
        needs_gradient: Whether anything that the message reads requires a gradient.
        needs_sources: Case 2: the backward pass needs source values.
        source: The operand whose source rows are the message, unchanged; -1 if there is none.
        product: The operands whose product is the message: source rows, and numbers of edges.
        pattern: Reductions over targets inside the message.
        saved_bytes_per_edge: What autograd keeps per edge besides source values.
        message_bytes: Bytes of one message, and of what the aggregation maps it to.
        reads_nodes: It reads rows of a tensor of this worker's nodes by ids of its own.
    """

    needs_gradient: bool
    needs_sources: bool
    source: int
    pattern: tuple[str, ...]
    saved_bytes_per_edge: float
    message_bytes: int
    reads_nodes: bool = False
    product: tuple[int, int] | None = None

    @staticmethod
    def no_opinion() -> list[int]:
        """Returns the numbers of a worker without edges, which agrees with the others."""
        return [0, 0, -_MANY, -_MANY, 0, 0, 0, 0, 0, -_MANY, -_MANY]

    def encode(self) -> list[int]:
        """Returns numbers that workers agree on by their maximum."""
        product = -1 if self.product is None else self.product[0] * _OPERANDS + self.product[1]
        return [
            int(self.needs_gradient),
            int(self.needs_sources),
            self.source,
            -self.source,
            _PATTERNS.index(self.pattern),
            int(self.saved_bytes_per_edge * 1000),
            self.message_bytes,
            int(self.reads_nodes),
            int(not self.reads_nodes),
            product,
            -product,
        ]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Dependence:
        """Inverse of :meth:`encode`."""
        gradient, sources, most, least, pattern, saved, size, reads, apart, high, low = numbers
        return cls(
            bool(gradient),
            bool(sources),
            most if most == -least and most >= 0 else -1,
            _PATTERNS[pattern],
            saved / 1000,
            size,
            bool(reads) and not apart,
            divmod(high, _OPERANDS) if high == -low and high >= 0 else None,
        )


class Inject(torch.autograd.Function):
    """Rows with a leaf of their own that holds no memory: ``inject(token, rows)`` is ``rows``.

    A kept graph refers to its leaves; with tokens it doesn't keep the rows that stood in for them.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor) -> Tensor:
        # Shares the rows' memory without being a view: messages may write into it.
        alias = rows.new_empty(0)
        return alias.set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def token_for(rows: Tensor) -> Tensor:
    """Returns a leaf of the rows' shape without memory of its own."""
    return rows.new_zeros(()).expand(rows.shape).requires_grad_()


class _Taint(TorchDispatchMode):
    """Follows what derives from given tensors, by storage."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._alive = list(tensors)  # storages must not be freed, or their numbers come again
        self._storages = {_storage(t) for t in tensors}
        self.escaped = False

    def keep(self, tensor: Tensor) -> None:
        """Keeps a tensor, and so its storage's number, until :meth:`forget`."""
        self._alive.append(tensor)

    def forget(self) -> None:
        """Lets go of all tensors: a graph that saved them may hold this object."""
        self._alive.clear()

    def holds(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) and self.holds(t) for t in tree_leaves((args, kwargs))):
            for result in tree_leaves(out):
                if isinstance(result, Tensor):
                    self._alive.append(result)
                    self._storages.add(_storage(result))
                elif result is not None:
                    self.escaped = True
        return out


class _Escapes(TorchFunctionMode):
    """Notes values that leave through their memory, below the dispatcher."""

    def __init__(self, taint: _Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_MEMORY and isinstance(args[0], Tensor):
            self._taint.escaped |= self._taint.holds(args[0])
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def sample(edge_index: DistEdgeIndex, most: int = _SAMPLE_EDGES) -> Tile:
    """Returns at most so many of the worker's edges; sources are taken from its own rows.

    Without own rows (of the sources' type) the analysis has one that stands in for them.
    """
    nodes = edge_index.plan.num_local
    count = min(most, edge_index.size(1))
    source, target = (row[:count] for row in edge_index.ends())
    order = target.argsort(stable=True)
    targets, index = torch.unique_consecutive(target[order], return_inverse=True)
    return Tile(0, slice(0, count), targets, index, source[order] % max(nodes, 1), order)


def analyse(
    program: TileProgram, tile: Tile, values_needed: bool = False, linear: bool = True
) -> Dependence:
    """Runs the message on a sample tile and tells what it needs.

    Args:
        program: The message and its operands.
        tile: Some edges, with sources among the worker's own rows (:func:`sample`).
        values_needed: The aggregation's own backward pass reads message values.
        linear: The aggregation is linear in the messages.

    Raises:
        NeedsAllEdges: When the message can't be computed tile by tile.
    """
    layer = program.layer
    tensors = [operand.tensor.detach() for operand in program.operands]
    sources = [_with_rows(tensors[k]) for k in program.numbers("source")]

    def rows(piece: Tile) -> list[Tensor | None]:
        """Returns fresh rows for each run: a message may write into them."""
        with torch.no_grad():
            return program.gather(piece, tensors, sources)

    ambient = AmbientState(tile.index.device, layer)
    with (
        preserved_attributes(layer, buffers=True) as program.sets,
        ambient.restored(),
        torch.enable_grad(),
        _watched_norms(layer),
    ):
        found = _observe(program, tile, rows(tile), values_needed)
    if found.pattern not in _PATTERNS:
        raise NeedsAllEdges(f"the message makes the reductions {found.pattern} over its targets")
    if found.pattern and not linear:
        raise NeedsAllEdges("its aggregation is not linear in the weights that it normalises")
    with preserved_attributes(layer, buffers=True), torch.no_grad():
        check_edges_apart(program, tile, rows, ambient)
        if found.pattern:
            check_linear(program, tile, rows, ambient, found.pattern)
    return found


def _with_rows(tensor: Tensor) -> Tensor:
    """Returns a source tensor, or one row where the worker owns none: its sources are remote."""
    return tensor if tensor.size(0) else tensor.new_ones(1, *tensor.shape[1:])


@contextmanager
def _watched_norms(layer: torch.nn.Module) -> Iterator[None]:
    """Raises when a message takes statistics over edges, which are all edges of all workers.

    The layer then runs in one shot, which is exact: each edge belongs to one worker, whose norm
    sees all of that worker's edges at once and merges with the others'. That costs what mode 3
    does: the whole halo and every message are resident, and kept for the backward pass.
    """

    def refuse(module: torch.nn.Module, inputs: Any) -> None:
        if reduces_over_rows(module):
            raise NeedsAllEdges(
                f"its message takes statistics over all edges ({type(module).__name__})",
                collective=True,
            )

    norms = [module for module in layer.modules() if isinstance(module, OVER_ROWS)]
    handles = [norm.register_forward_pre_hook(refuse) for norm in norms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe(
    program: TileProgram, tile: Tile, rows: Sequence[Tensor | None], values_needed: bool
) -> Dependence:
    values: list[Any] = []
    marked: list[Tensor] = []
    leaves: set[int] = set()
    for operand, row in zip(program.operands, rows, strict=True):
        value = row.detach() if row is not None else None
        if value is not None and operand.tensor.requires_grad:
            token = token_for(value)
            leaves.add(id(token))
            value = Inject.apply(token, value)
        values.append(value)
        if operand.role == "source" and value is not None:
            marked.append(value)
    taint = _Taint(marked)
    kept: dict[int, int] = {}
    known = {_storage(t) for t, o in zip(values, program.operands, strict=True)
             if t is not None and o.role == "whole"}  # fmt: skip
    saved_source = False

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved_source
        saved_source |= taint.holds(tensor)
        if _storage(tensor) not in known and not isinstance(tensor, torch.nn.Parameter):
            seen = tensor.numel() * tensor.element_size()
            kept[_storage(tensor)] = min(seen, tensor.untyped_storage().nbytes())
        taint.keep(tensor)
        return tensor.detach()  # an alias, or an operator's output would own itself

    log = Reductions()
    with detached_parameters(program.layer) as parameters:
        known |= {_storage(p) for p in (*parameters.values(), *program.layer.buffers())}
        leaves |= {id(p) for p in parameters.values()}
        begin = _sequence_number()
        reads = _node_reads(program, tile, values)
        products = Products(program, values)
        with (
            reads,
            _Escapes(taint),
            taint,
            products,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            mapped = program.run(tile, values, log)
        results = [result for m in mapped for result in (m.messages, m.log.total)]
        roots = [t for t in results if t is not None and t.requires_grad]
        opaque = _check_graph(roots, leaves, begin)
        taint.forget()
    same = [k for k in program.numbers("source") if products.is_source(mapped, values[k])]
    same = [] if program.complete else same
    edges = max(tile.num_edges, 1)
    return Dependence(
        needs_gradient=bool(roots),
        needs_sources=bool(roots)
        and (saved_source or taint.escaped or opaque or values_needed or bool(log.pattern)),
        source=same[0] if same else -1,
        pattern=log.pattern,
        saved_bytes_per_edge=sum(kept.values()) / edges,
        message_bytes=program.message_bytes,
        reads_nodes=bool(reads.found),
        product=None if program.complete else products.found(mapped),
    )


def _node_reads(program: TileProgram, tile: Tile, values: Sequence[Any]) -> NodeReads:
    """Watches for reads of node tensors that are not by the edges' ends."""
    known = [(o.role, v) for o, v in zip(program.operands, values, strict=True) if v is not None]
    return NodeReads(
        (program.num_local, program.num_targets),
        [tile.targets, tile.index, tile.source]
        + [value for role, value in known if role != "whole"],
        (*program.layer.parameters(), *program.layer.buffers()),
    )


def _sequence_number() -> int:
    """Autograd nodes made from now on have a higher number."""
    node = (torch.zeros((), requires_grad=True) * 1).grad_fn
    return int(node._sequence_nr()) if node is not None else 0


def _check_graph(roots: Sequence[Tensor], leaves: set[int], begin: int) -> bool:
    """Says if the graph holds opaque nodes; refuses tensors that came in by the back door.

    Their gradients would be of a worker's edges alone, but where they are summed over the workers
    (``Shared`` of :mod:`pyg_sar.tensors.boundary`).
    """
    opaque = shared = False
    stack, seen = [root.grad_fn for root in roots], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if name.endswith("SharedBackward"):
            shared = True
            continue
        stack += [parent for parent, _ in node.next_functions]
        if hasattr(node, "variable"):
            if id(node.variable) not in leaves:
                raise NeedsAllEdges(
                    "the message uses a tensor that requires a gradient and is neither a parameter "
                    f"of the layer nor an argument of propagate() {_REMEDY}",
                    forbidden=True,
                )
        elif name == "InjectBackward":
            continue
        elif node._sequence_nr() <= begin:
            raise NeedsAllEdges(
                f"the message uses a computed tensor that is not an argument of propagate() "
                f"{_REMEDY}",
                forbidden=True,
            )
        else:
            opaque |= isinstance(node, torch.autograd.function.BackwardCFunction)
            opaque |= "Differentiable" in name or "Compiled" in name
    if shared:
        raise NeedsAllEdges("the message uses a computed tensor that is an attribute of the layer")
    return opaque
