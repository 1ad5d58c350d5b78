"""Finds what the backward pass of a message needs by looking at it; nobody declares it.

A run of the message on a few edges is watched. Three things are read off:

1. *Case.* Every operator's result that derives from source rows is followed by its storage (below
   autograd, so that masks, ``argmax`` positions and other values without a ``grad_fn`` are seen).
   A tensor of that kind among those that autograd saves means case 2 (SAR, section 3.2): the
   backward pass needs source values. Custom autograd functions and values that leave the tensor
   world (``.item()``) are opaque: case 2.
2. *Reductions over targets* inside the message, and whether the message is linear in what they
   normalise (see [Note: softmax over targets]).
3. *Whether the message is a formula that kernels know*, such as the source rows themselves, so that
   nothing need be recorded at all (see [Note: formulas by operators] of ``formulas.py``).

The run is one of two by which :mod:`pyg_sar.message.row_wise` tells if a message treats each edge
alone. Its operators are recorded; a softmax is tried by running these again, without the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_sar.message.formulas import AttentionOf, Formula, formula_of, is_by_pyg
from pyg_sar.message.layer_facts import standing_in
from pyg_sar.message.layer_state import AmbientState, detached_parameters, preserved_attributes
from pyg_sar.message.outside import outside_of
from pyg_sar.message.program import Mapped, TileProgram
from pyg_sar.message.recording import Recording
from pyg_sar.message.target_index import NeedsAllEdges, Reductions, spread
from pyg_sar.reduction.moments import OVER_ROWS, reduces_over_rows
from pyg_sar.space.distributed_index import storage_of
from pyg_sar.space.shard import Tile

_REMEDY = "(make it an attribute of the layer, or pass it to propagate)"
Rows = Mapping[int, Tensor]
Changes = Mapping[int, Callable[[Tensor], Any]]
_PATTERNS: tuple[tuple[str, ...], ...] = ((), ("max", "sum"), ("sum",))


@dataclass(frozen=True, slots=True)
class Dependence:
    """The needs of a message in its backward pass.

    Attributes:
        needs_gradient: Whether anything that the message reads requires a gradient.
        needs_sources: Case 2: the backward pass needs source values.
        source: The operand whose source rows are the message, unchanged; -1 if there is none.
        product: The operands whose product is the message: source rows, and numbers of edges.
        attention: The softmax attention that the message is, if nothing else is done.
        pattern: Reductions over targets inside the message.
        saved_bytes_per_edge: What autograd keeps per edge besides source values.
        message_bytes: Bytes of one message, and of what the aggregation maps it to.
        reads_nodes: It reads rows of a tensor of this worker's nodes by ids of its own.
        reads_outside: It may read what is neither an argument nor held by the layer.
    """

    needs_gradient: bool
    needs_sources: bool
    source: int
    pattern: tuple[str, ...]
    saved_bytes_per_edge: float
    message_bytes: int
    reads_nodes: bool = False
    product: tuple[int, int] | None = None
    attention: AttentionOf | None = None
    reads_outside: bool = False

    @classmethod
    def agreed(cls, everyone: Sequence[Sequence[Any]]) -> Dependence:
        """The needs of all workers together, each given by its attributes in their order."""
        gradient, sources, source, patterns, saved, size, reads, *found, outside = zip(
            *everyone, strict=True
        )
        products, attentions = found
        same, attends = (
            found[0] is not None and found.count(found[0]) == len(found)
            for found in (products, attentions)
        )
        return cls(
            any(gradient),
            any(sources),
            source[0] if source.count(source[0]) == len(source) else -1,
            max(map(tuple, patterns), key=_PATTERNS.index),
            max(saved),
            max(size),
            all(reads),
            tuple(products[0]) if same else None,
            AttentionOf(*attentions[0]) if attends else None,
            any(outside),
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


@contextmanager
def without_statistics(layer: torch.nn.Module, log: Reductions) -> Iterator[None]:
    """Norms over edges pass their input through, and are told to ``log``.

    They take statistics of all edges of all workers. A layer with one runs in one shot, which is
    exact: each edge belongs to one worker, whose norm sees all of that worker's edges at once and
    merges with the others'. That costs what mode 3 does: the whole halo and every message are
    resident, and kept for the backward pass.
    """

    def forward(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        reason = f"its message takes statistics over all edges ({name})"
        log.refuse(NeedsAllEdges(reason, collective=True), always=True)
        return x * 1

    norms = norms_over_rows(layer)
    with standing_in(*((m, "forward", partial(forward, type(m).__name__)) for m in norms)):
        yield


def norms_over_rows(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules in a layer that take statistics over rows now."""
    return [m for m in layer.modules() if isinstance(m, OVER_ROWS) and reduces_over_rows(m)]


class Observation:
    """A run of a message on a few edges with all in-edges of their targets, and what it showed.

    Args:
        program: The message and its operands.
        tile: The edges.
        rows: The operands' rows for these edges, edges first, that the run may write into.

    Attributes:
        values: The operands' rows that it is to be called with.
        log: The reductions over targets that it makes.
        sets: Attributes that it sets.
    """

    def __init__(self, program: TileProgram, tile: Tile, rows: Sequence[Any]) -> None:
        self._layer, self._tile = program.layer, tile
        self.log, self.sets = Reductions(watched=True), list[str]()
        self.values: list[Any] = []
        self._leaves: set[int] = set()
        for operand, row in zip(program.operands, rows, strict=True):
            value = row
            if operand.tensor.requires_grad:
                token = token_for(row)
                self._leaves.add(id(token))
                with torch.enable_grad():
                    value = Inject.apply(token, row)
            self.values.append(value)
        roles = [operand.role for operand in program.operands]
        self._own = [row for row, role in zip(rows, roles, strict=True) if role != "whole"]
        self._first = {storage_of(row): row.clone() for row in self._own}
        self._tables = [*program.layer.parameters(), *program.layer.buffers()]
        self._known = [row for row, role in zip(rows, roles, strict=True) if role == "whole"]
        self.recording = Recording()
        self._ambient = AmbientState(tile.index.device, program.layer)
        self._begin = _sequence_number()

    @contextmanager
    def watching(self, *modes: AbstractContextManager[Any]) -> Iterator[None]:
        """Records what runs meanwhile in these modes, with leaves in the place of parameters."""
        with (
            self._ambient.restored(),
            detached_parameters(self._layer) as parameters,
            torch.enable_grad(),
            ExitStack() as stack,
        ):
            self._known += parameters.values()
            self._leaves |= {id(p) for p in parameters.values()}
            for mode in (*modes, self.recording, self.recording.saving()):
                stack.enter_context(mode)
            yield

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Lets what runs meanwhile run in the same state, and keeps nothing of it."""
        with self._ambient.restored(), detached_parameters(self._layer), torch.no_grad():
            yield

    def ran(
        self, out: Any, values: Sequence[Any], given: dict[str, Any], read: Sequence[Tensor]
    ) -> None:
        """Takes what the run gave.

        Args:
            out: The messages.
            values: The operands as the layer got them.
            given: Other arguments.
            read: Tensors that were read through their memory, below the operators.
        """
        self._out, self._moved, self._given, self._read = out, values, given, read

    def needs(self, program: TileProgram, values_needed: bool, linear: bool) -> Dependence:
        """Returns what the message needs, with what becomes of it.

        Args:
            program: The message, whose operands are the first of those that were observed, and its
                maps or its aggregation.
            values_needed: The aggregation's own backward pass reads message values.
            linear: The aggregation is linear in the messages.

        Raises:
            NeedsAllEdges: When the message can't be computed tile by tile.
        """
        for problem, always in self.log.problems:
            if always or not program.complete:
                raise problem
        alone = self._alone = self.recording
        self.recording = Recording(alone)
        values = self._moved[: len(program.operands)]
        given = {**self._given, **program.own(self._tile, Reductions())}
        try:
            with (
                preserved_attributes(self._layer, buffers=True) as sets,
                self.watching(),
                without_statistics(self._layer, Reductions()),
            ):
                mapped = program.finished(self._tile, self._out, values, given, self.log)
            found = self._found(program, mapped, values_needed)
        finally:
            self.recording = alone
        if found.pattern not in _PATTERNS:
            made = found.pattern
            raise NeedsAllEdges(f"the message makes the reductions {made} over its targets")
        if found.pattern and not linear:
            raise NeedsAllEdges("its aggregation is not linear in the weights that it normalises")
        if found.pattern:
            self._check_linear()
        program.sets = [*self.sets, *sets]
        return found

    def _found(
        self, program: TileProgram, mapped: Sequence[Mapped], values_needed: bool
    ) -> Dependence:
        complete = program.complete
        pattern = () if complete else self.log.pattern
        results = [one.messages for one in mapped]
        results += [one.log.total for one in mapped if one.log.total is not None and not complete]
        roots = [t for t in results if t.requires_grad]
        opaque = _check_graph(roots, self._leaves, self._begin)
        recording, tile = self.recording, self._tile
        known = *self._known, *self._tables
        formula = Formula() if opaque else self._formula(program)
        plain = not complete and all(group.premap is None for group in program.groups)
        sources = [self.values[k] for k in program.numbers("source")]
        reads = recording.needs_values(sources, self._read)
        reads |= opaque or values_needed
        return Dependence(
            needs_gradient=bool(roots),
            needs_sources=bool(roots) and (reads or bool(pattern)),
            source=formula.source if plain else -1,
            pattern=pattern,
            saved_bytes_per_edge=recording.saved_bytes(known) / tile.num_edges,
            message_bytes=program.message_bytes,
            reads_nodes=recording.reads_nodes(
                (program.num_local, program.num_targets),
                (tile.source, *self._own, *known),
                tile.index,
            ),
            product=formula.product if plain else None,
            attention=formula.attention,
            reads_outside=outside_of(self._layer).changes,
        )

    def _formula(self, program: TileProgram) -> Formula:
        index, values, message = self._tile.index, self.values, self._out
        found = formula_of(self._alone, program, values, index, message)
        if (self._layer.message.__module__ or "").startswith("torch_geometric."):
            return found._replace(attention=None)  # Those are known by the layer's class.
        name = "" if found.attention is None else found.attention.att
        att = dict(program.layer.named_parameters()).get(name)
        if att is not None:  # A leaf stands for it, unless it is frozen.
            own = storage_of(att)
            att = next((t for t in self._known if storage_of(t) == own), att)
        known = found != Formula()
        return found if known and is_by_pyg(found, values, att, index, message) else Formula()

    # Softmax #################################################################

    @torch.no_grad()
    def _check_linear(self) -> None:
        """The message must be linear in the normalised weights and blind to the maximum's value.

        It is tried with the rows at hand, and with others, drawn at random.
        """
        draw = torch.Generator(self._tile.index.device).manual_seed(0)
        others = {
            key: torch.empty_like(row).normal_(generator=draw) if row.is_floating_point() else row
            for key, row in self._first.items()
        }
        total = self.log.total
        if total is None:
            return
        self._check_scaled(total, self._first, *self._replayed(self._first))
        try:
            replayed = self._replayed(others)
        except (IndexError, RuntimeError, ValueError):  # Values decide about shapes.
            return
        self._check_scaled(total, others, *replayed)

    def _check_scaled(self, total: Tensor, rows: Rows, original: Tensor, first: Tensor) -> None:
        """The same with other totals and another maximum.

        Args:
            total: The total of the run that was recorded.
            rows: The rows that it is tried with.
            original: The messages of these rows.
            first: The totals of these rows.
        """
        maximum = self.log.maximum
        # Powers of two scale floating point numbers exactly, differently per target and head.
        steps = torch.arange(total.numel(), device=total.device).view(total.shape) % 3 + 1
        scales = (2.0**steps).to(total.dtype)
        scaled, _ = self._replayed(rows, {storage_of(total): lambda t: t.mul_(scales)})
        per_edge = scales.index_select(0, self._tile.index)
        fits = per_edge.dim() <= original.dim()
        per_edge = spread(per_edge, original) if fits else per_edge
        same = fits and _broadcasts(per_edge, original) and _close(scaled * per_edge, original)
        if not same:
            raise NeedsAllEdges("the message is not linear in the weights that it normalises")
        if maximum is not None:
            moved, shifted = self._replayed(rows, {storage_of(maximum): lambda t: t.add_(0.5)})
            expected = first * torch.exp(torch.tensor(-0.5, dtype=first.dtype))
            if not _close(moved, original) or not _close(shifted, expected):
                raise NeedsAllEdges("the message uses its targets' maximum for more than a softmax")

    def _replayed(self, rows: Rows, changes: Changes | None = None) -> list[Tensor]:
        """Returns messages and normalisers by the same operators, of other rows."""
        wanted = [t for t in (self._out, self.log.total) if t is not None]
        with self._ambient.restored(), torch.autocast(self._tile.index.device.type, enabled=False):
            out, total = self.recording.replayed(rows, changes or {}, wanted)
        axis = self._layer.node_dim
        return [out.movedim(axis, 0) if axis % out.dim() else out, total]


def _close(values: Tensor, expected: Tensor) -> bool:
    """Says if they are equal but for rounding, measured by the largest value."""
    if values.shape != expected.shape:
        return False
    if values.numel() == 0:
        return True
    tolerance = {2: 6e-2, 4: 1e-3, 8: 1e-6}.get(expected.element_size(), 6e-2)
    difference = (values - expected).nan_to_num(0, 0, 0).abs().max()
    scale = expected.nan_to_num(0, 0, 0).abs().max()
    return bool(difference <= tolerance * scale + torch.finfo(expected.dtype).tiny)


def _broadcasts(weights: Tensor, values: Tensor) -> bool:
    """Says if weights apply to values without changing their shape."""
    return all(w in (1, v) for w, v in zip(weights.shape, values.shape, strict=True))


# The graph ####################################################################


def _sequence_number() -> int:
    """Autograd nodes that this thread makes from now on have a higher number."""
    with torch.inference_mode(False):  # which records, whatever the caller does
        node: Any = (torch.zeros((), requires_grad=True) * 1).grad_fn
    return int(node._sequence_nr())


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
