"""Watches a run of a message and labels whatever it computes. See
:mod:`pyg_sar.message.row_labels`.

[Note: two runs] How many edges there are is a number in Python, which no operator shows. So a
message runs twice, on other numbers of edges and of nodes. Where a number is another in the second
run, it counts edges or nodes, of which a worker has its own; where a shape is, it belongs to them.
A tensor that holds the same for each edge (zeros, say) is labelled as if it were made of the edges,
so that a sum of ones is seen for what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyg_sar.message.row_labels import (
    COUNT,
    EDGE,
    MIXED,
    NODE,
    PLACE,
    STEP,
    Labels,
    as_values,
    is_number,
)
from pyg_sar.message.row_rules import Call, labels_after
from pyg_sar.message.row_tables import COPIES, MOVES, SCANS, UNIFORM

_READS = frozenset(
    getattr(Tensor, name) for name in ("__array__", "__dlpack__", "numpy", "storage", "tolist")
)
_SCALARS = ("number", "Optional[number]", "float", "Optional[float]", "List[float]")
_SLICES = frozenset(
    [
        "as_strided",
        "diagonal",
        "narrow",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "unbind",
        "unfold",
    ]
)
_ASKS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "item"])
_IGNORED = frozenset(["_assert_async", "set_", "sym_size", "sym_stride", "resize_"])


@dataclass(slots=True)
class Step:
    """What there is to compare of an operator's call in two runs."""

    name: str
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    numbers: list[Any]


@dataclass(slots=True)
class Sizes:
    """How many edges and nodes (of the targets' and the sources' type) a run has."""

    edges: int
    targets: int
    sources: int


@dataclass(slots=True)
class Causes:
    """What made a value depend on more than its own edge, in order, by kind."""

    found: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, what: str) -> None:
        self.found.setdefault(kind, what)


class RowTrace(TorchDispatchMode):
    """Labels what a run computes.

    Args:
        labels: Labels of what it starts from.
        sizes: How large this run is.
        other: The same of the run before, and its steps; ``None`` in the first run.
    """

    def __init__(
        self, labels: Labels, sizes: Sizes, other: tuple[Sizes, list[Step]] | None = None
    ) -> None:
        super().__init__()
        self.labels, self.sizes, self.other = labels, sizes, other
        self.steps: list[Step] = []
        self.causes = Causes()
        self.differs = False  # other operators ran than the time before
        self.asking = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name.rpartition("::")[2]
        out = func(*args, **kwargs)
        if name in _IGNORED:
            return out
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        written = [
            given[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        results = [t for t in tree_leaves((out, written)) if isinstance(t, Tensor)]
        call = Call(name, given, results, self.labels, torch.Tag.pointwise in func.tags)
        before = self._compare(call, _numbers(schema, given))
        call.counted = self._counted(before)
        if name in _ASKS:
            self._asked(call)
        elif func.is_view or (not written and _is_alias(call)):
            self._viewed(call, before)
        else:
            self._label(call, before)
        return out

    # Comparing with the other run ############################################

    def _compare(self, call: Call, numbers: list[Any]) -> Step | None:
        """The step of the other run; notes what differs."""
        operands = call.operands()
        mine = Step(
            call.name,
            [tuple(t.shape) for t in operands],
            [tuple(t.shape) for t in call.outs],
            [*numbers, *(_contents(t) for t in operands if not self.labels.known(t))],
        )
        place = len(self.steps)
        self.steps.append(mine)
        if self.other is None:
            return None
        steps = self.other[1]
        if place >= len(steps) or steps[place].name != mine.name:
            self.differs = True
            return None
        return steps[place]

    def _counted(self, before: Step | None) -> list[list[int]]:
        """Axes of each operand of this step whose length depends on the number of edges."""
        mine = self.steps[-1].inputs
        if before is None or len(before.inputs) != len(mine):
            return [[] for _ in mine]
        return [
            [k for k, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
            if len(now) == len(then)
            else []
            for now, then in zip(mine, before.inputs, strict=True)
        ]

    # Labels ##################################################################

    def _label(self, call: Call, before: Step | None) -> None:
        operands = call.operands()
        known = [self.labels.of(t) for t in operands if self.labels.known(t)]
        own = any(bool(labels.any()) for labels in known)
        found = labels_after(call)
        if found is None:
            mixed = torch.full((), MIXED, dtype=torch.int32)
            found = [mixed if own else mixed * 0] * len(call.outs)
            if own:
                self.causes.note("operator", call.name)
        ragged = any(self.labels.key(t) in self.labels.ragged for t in operands)
        numbers = before is not None and _differ(self.steps[-1].numbers, before.numbers)
        clean = own and not any(bool((labels == MIXED).any()) for labels in known)
        for number, (out, label) in enumerate(zip(call.outs, found, strict=True)):
            if not own and before is not None and number < len(before.outputs):
                label = self._constant(call, out, before.outputs[number], label)
            if numbers and not (call.name == "arange" and bool((label > 0).any())):
                label = torch.full_like(label, MIXED)
            if (clean or not own) and bool((label == MIXED).any()):
                numbered = any(bool(_is_id(labels).any()) for labels in known)
                kind = "ids" if numbered else "numbers" if numbers or not own else "edges"
                self.causes.note(kind, call.name)
            self.labels.put(out, label)
            if ragged and out.dim() and call.name not in ("index_put_", "index_put"):
                self.labels.ragged.add(self.labels.key(out))

    def _constant(self, call: Call, out: Tensor, before: tuple[int, ...], label: Tensor) -> Tensor:
        """Labels of what is made of constants alone: its length may be that of the edges."""
        shape = tuple(out.shape)
        if shape == before:
            return label
        axes = [k for k, (a, b) in enumerate(zip(shape, before, strict=False)) if a != b]
        mixed = torch.full((), MIXED, dtype=torch.int32)
        if len(shape) != len(before) or len(axes) != 1 or self.other is None:
            return mixed
        axis, other = axes[0], self.other[0]
        rows, rows_before = shape[axis], before[axis]
        known = [
            (base, rows // mine)
            for mine, theirs, base in (
                (self.sizes.edges, other.edges, EDGE),
                (self.sizes.targets, other.targets, NODE),
                (self.sizes.sources, other.sources, NODE + STEP),
            )
            if rows % mine == 0 and rows_before == rows // mine * theirs
        ]
        if not known and rows > self.sizes.targets:
            return mixed
        # Else it goes up to the largest target that some of the edges have.
        base, width = known[0] if known else (NODE, 1)
        numbers = torch.arange(rows, dtype=torch.int32) // width
        if call.name == "arange":
            counts = rows == self.sizes.edges and bool((out.cpu() == numbers).all())
            return PLACE + numbers if counts else mixed
        alike = call.name in UNIFORM or call.name in COPIES or call.pointwise
        if not alike or call.name in MOVES or call.name in SCANS:
            return mixed
        return (base + numbers).view([-1 if k == axis else 1 for k in range(len(shape))])

    def _viewed(self, call: Call, before: Step | None) -> None:
        """A view has its source's labels; part of a constant, cut by a number of edges, is new."""
        if before is None or call.name not in _SLICES:
            return
        for out, shape in zip(call.outs, before.outputs, strict=False):
            new = tuple(out.shape) != shape and out.numel() > 0
            if new and not bool(self.labels.of(out).any()):
                self.causes.note("numbers", call.name)
                self.labels.put(out, torch.full((), MIXED, dtype=torch.int32))

    def _asked(self, call: Call) -> None:
        """A value goes to Python: the largest id may, as the number of nodes is found by it."""
        if self.asking and any(bool(as_mixed(self.labels.of(t))) for t in call.operands()):
            self.causes.note("python", call.name)

    def escapes(self, tensor: Tensor) -> bool:
        return bool(self.labels.of(tensor).any())


def _is_id(labels: Tensor) -> Tensor:
    return is_number(labels) | (labels == COUNT)


def as_mixed(labels: Tensor) -> Tensor:
    """Whether values with these labels tell of an edge."""
    return ((labels > 0) | (labels == MIXED)).any()


class Asked(TorchFunctionMode):
    """Notes values that go to Python below the operators; and calls that ask for nothing else."""

    def __init__(self, trace: RowTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        trace = self._trace
        if func in _READS and isinstance(args[0], Tensor) and trace.escapes(args[0]):
            trace.causes.note("python", func.__name__)
        if func is not torch.nn.functional.one_hot or len(args) + len(kwargs) < 2:
            return func(*args, **kwargs)
        # It asks for the least and the largest value, to check them.
        trace.asking = False
        try:
            out = func(*args, **kwargs)
        finally:
            trace.asking = True
        source = as_values(trace.labels.of(args[0])).unsqueeze(-1)
        trace.labels.put(out, source.expand(out.shape))
        return out


def _is_alias(call: Call) -> bool:
    """Whether the results share the memory of an operand, as they are."""
    keys = {call.labels.key(t) for t in call.operands()}
    return bool(call.outs) and all(call.labels.key(out) in keys for out in call.outs)


def _numbers(schema: Any, given: dict[str, Any]) -> list[Any]:
    """The numbers among the arguments that are values, not sizes."""
    found: list[Any] = []
    for argument in schema.arguments:
        value = given.get(argument.name)
        kind = str(argument.type)
        if kind in _SCALARS or (kind == "Tensor" and isinstance(value, int | float)):
            found += value if isinstance(value, list | tuple) else [value]
    return found


def _contents(tensor: Tensor) -> Any:
    """The content of a constant of one element: it may be a number of edges."""
    if tensor.numel() != 1 or tensor.device.type == "meta":
        return None
    return tensor.detach().reshape(()).item()


def _differ(mine: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether numbers differ; a NaN does not from itself."""
    if len(mine) != len(before):
        return True
    return any(a != b and not (a != a and b != b) for a, b in zip(mine, before, strict=True))
