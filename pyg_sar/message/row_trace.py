"""Runs of a message that are watched: whatever they compute is labelled. See [Note: labels] in
:mod:`pyg_sar.message.row_labels`.

[Note: two runs] How many edges there are is a number in Python, which no operator shows. So a
message runs twice, on other numbers of edges and of nodes. Where a number is another in the second
run, it counts edges or nodes, of which a worker has its own; where a shape is, it belongs to them.
The second run has the edges of the first among others, at other places: their messages are the
same, or depend on the place. Random numbers of these edges are those of the first run.
A tensor that holds the same for each edge (zeros, say) is labelled as if it were made of the edges,
so that a sum of ones is seen for what it is.

[Note: constants beyond the runs] ``x_j[:150]``, or ``x_j.size(0) > 200``, does nothing to the few
edges of a run, whatever it does to more. So slices that end beyond a tensor, errors that the
message catches, and what Python makes of the number of rows (:class:`Count`) are noted as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from pyg_sar.message.recording import Operators
from pyg_sar.message.row_labels import (
    COUNT,
    EDGE,
    MIXED,
    NODE,
    PLACE,
    RULES,
    STEP,
    Call,
    Labels,
    as_values,
    combined,
    is_number,
    matrix_labels,
    reduced,
    scatter_labels,
)
from pyg_sar.space.distributed_index import METADATA, name_of, storage_of
from pyg_sar.tensors import node_tensors
from pyg_sar.tensors.nested import tensors_in
from pyg_sar.tensors.node_tensor import RULES as NODE_RULES
from pyg_sar.tensors.pointwise import by_element

# Operators ####################################################################

# Those below autograd (``aten``, without overloads) by what they do with axes.

#: Beside those that torch itself tags as pointwise, and those that are so of node tensors.
POINTWISE = frozenset({
    "_conj_physical", "bernoulli", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "ldexp",
    "leaky_relu", "leaky_relu_", "native_dropout", "normal", "rrelu_with_noise",
    "scale_rows", "selu_",
})  # fmt: skip

#: The values themselves.
COPIES = frozenset({
    "_to_copy", "alias_copy", "clone", "contiguous", "copy", "copy_",
})  # fmt: skip

#: They reduce, sort or scan along given axes, or all; other axes apart.
ALONG = frozenset({
    "_cummax_helper", "_cummin_helper", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_log_softmax",
    "_log_softmax_backward_data", "_safe_softmax", "_softmax", "_softmax_backward_data", "all",
    "amax", "amin", "aminmax", "any", "argmax", "argmin", "argsort", "count_nonzero", "cummax",
    "cummin", "cumprod", "cumsum", "dist", "dot", "glu", "kthvalue", "linalg_cross",
    "linalg_vector_norm", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "mode",
    "nanmedian", "nansum", "norm", "prod", "sort", "std", "std_mean", "sum", "topk", "trace",
    "var", "var_mean", "vdot",
})  # fmt: skip

#: Those of them whose result depends on the place.
SCANS = frozenset({
    "cummax", "cummin", "cumprod", "cumsum", "logcumsumexp",
})  # fmt: skip

#: Each element of the first axis apart.
BATCHED = frozenset({
    "_adaptive_avg_pool2d", "_convolution", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "adaptive_max_pool2d", "avg_pool2d",
    "convolution", "max_pool2d_with_indices", "mkldnn_convolution", "native_group_norm",
    "spline_basis", "spline_weighting",
})  # fmt: skip

#: They move values, and compute nothing.
MOVES = frozenset({
    "cat", "constant_pad_nd", "diag_embed", "expand_copy", "flip", "permute_copy", "repeat",
    "roll", "select_copy", "select_scatter", "slice_copy", "slice_scatter", "stack", "tril",
    "triu", "unfold_copy", "unsqueeze_copy", "view_copy",
})  # fmt: skip

#: The same, or random numbers of the same kind, everywhere.
UNIFORM = frozenset({
    "bernoulli_", "empty", "empty_like", "empty_strided", "exponential_", "full", "full_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal_", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "resize_", "scalar_tensor", "uniform_", "zero_", "zeros", "zeros_like",
})  # fmt: skip

#: They write by an index.
SCATTERS = frozenset({
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
    "index_reduce", "index_reduce_", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_",
})  # fmt: skip


def labels_after(call: Call) -> list[Tensor] | None:
    """Returns labels that broadcast to the results; ``None`` of unknown operators."""
    rule = _rule(call)
    found = None if rule is None else rule(call)
    return [found] * len(call.outs) if isinstance(found, Tensor) else found


def _rule(call: Call) -> Callable[[Call], Any] | None:
    name = call.name
    if name in COPIES:
        return _copies
    if name in ("eq", "ne", "eq_", "ne_"):
        return _equal
    if name in UNIFORM:
        return lambda call: torch.zeros((), dtype=torch.int32)
    if call.pointwise or name in POINTWISE or NODE_RULES.get(name) is by_element:
        return lambda call: combined([call.of(t) for t in call.operands()])
    if name in ALONG:
        return _along
    if name in BATCHED:
        return _batched
    if name in MOVES:
        return _moves
    if name in SCATTERS:
        return scatter_labels
    if name.startswith(("linalg_", "_linalg_", "triangular_solve", "cholesky")):
        return matrix_labels
    return RULES.get(name)


def _copies(call: Call) -> Tensor:
    source = call.given["src"] if "src" in call.given else call.given["self"]
    return call.labels.of(source)


def _equal(call: Call) -> Tensor:
    """Two ids may be compared, where they number the same nodes."""
    given = [call.labels.of(t) for t in call.operands()]
    if len(given) == 2 and all(bool(is_number(labels).all()) for labels in given):
        left, right = torch.broadcast_tensors(*given)
        return torch.where(left == right, EDGE + left % STEP, MIXED).to(torch.int32)
    return combined([as_values(labels) for labels in given])


def _along(call: Call) -> list[Tensor]:
    given = call.given
    names = ("self", "input", "grad_output")
    source: Tensor = next(given[name] for name in names if name in given)
    dims = given.get("dim", given.get("dims"))
    if call.name == "trace":
        dims = None
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        dims = range(source.dim())
    dims = [dims] if isinstance(dims, int) else list(dims)
    found = call.labels.of(source)
    if call.name in ("max", "amax") and bool(is_number(found).all()) and len(dims) == found.dim():
        return [torch.full((), COUNT, dtype=torch.int32)] * len(call.outs)
    parts = [call.over(t, dims, True) for t in call.operands() if t.dim() == source.dim()]
    whole = combined(parts)
    small = whole.amax(dims, False) if source.dim() and whole.numel() else whole.sum(dims)
    kept = [whole if out.dim() == source.dim() else small.to(whole.dtype) for out in call.outs]
    if not any(label.numel() for label in kept):
        return [torch.zeros((), dtype=torch.int32)] * len(kept)
    return kept


def _batched(call: Call) -> list[Tensor]:
    rows = call.outs[0].size(0) if call.outs[0].dim() else 0
    parts = []
    for tensor in call.operands():
        own = tensor.dim() > 1 and tensor.size(0) == rows and rows > 1
        dims = range(1 if own else 0, tensor.dim())
        found = call.over(tensor, list(dims))
        parts.append(found if own else found.view(1) if found.dim() == 0 else found)
    whole = combined(parts)
    return [
        whole.view(-1, *[1] * (out.dim() - 1)) if out.dim() and out.size(0) == rows
        else reduced(whole, [0], False)
        for out in call.outs
    ]  # fmt: skip


def _moves(call: Call) -> Tensor:
    """Returns the operator's result on labels in the place of values."""
    given = {
        key: [call.labels.of(t) for t in value] if isinstance(value, list | tuple) and value
        and isinstance(value[0], Tensor) else call.labels.of(value)
        if isinstance(value, Tensor) else value
        for key, value in call.given.items()
    }  # fmt: skip
    if call.name == "constant_pad_nd":
        given["value"] = 0
    moved: Tensor = getattr(torch.ops.aten, call.name)(*given.values())
    return moved


# The watched run ##############################################################

_OPEN = 2**62  # ends of slices that have none
_READS = frozenset(
    getattr(Tensor, name) for name in ("__array__", "__dlpack__", "numpy", "storage", "tolist")
)
_MEMORY = frozenset({Tensor.data_ptr, Tensor.untyped_storage})
_SCALARS = ("number", "Optional[number]", "float", "Optional[float]", "List[float]")
_SLICES = frozenset({
    "as_strided", "diagonal", "narrow", "select", "slice", "split", "split_with_sizes", "unbind",
    "unfold",
})  # fmt: skip
_ASKS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "item"])
_IGNORED = frozenset(["_assert_async", "set_", "sym_size", "sym_stride", "resize_"])


@dataclass(slots=True)
class Step:
    """The parts of an operator's call that two runs are compared by."""

    name: str
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    numbers: list[Any]


@dataclass(slots=True)
class Sizes:
    """Numbers of edges and of nodes (of the targets' and the sources' type) of a run.

    A second run has those of the ``first`` after ``before`` edges to a node before them.
    """

    edges: int
    targets: int
    sources: int
    first: Sizes | None = None
    before: int = 0


class RowTrace(Operators):
    """Labels what a run computes.

    Args:
        labels: Labels of what it starts from.
        sizes: How large this run is.
        other: The run before; ``None`` in the first run.
    """

    def __init__(
        self,
        labels: Labels,
        sizes: Sizes,
        other: RowTrace | None = None,
    ) -> None:
        super().__init__()
        self.labels, self.sizes, self.other = labels, sizes, other
        self.steps: list[Step] = []
        self.drawn: list[list[Tensor]] = []
        self.read: list[Tensor] = []  # through their memory, below the operators
        self.causes: dict[str, str] = {}  # why a value depends on more than its edge, by kind
        self.differs = False  # other operators ran than the time before
        self.asking = True
        self.asks = False  # a value goes to Python, also of what is no edge's
        self.generators: dict[Generator, Tensor] = {}  # of the message's own, as they were at first

    def forget(self) -> None:
        """Lets go of the tensors of its steps and of their labels."""
        self.steps, self.drawn, self.labels = [], [], Labels()

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator and labels its results."""
        schema = func._schema
        name = schema.name.rpartition("::")[2]
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in schema.arguments:  # A default doesn't come along.
            if argument.name == "dim" and "dim" not in given:
                given["dim"] = argument.default_value
        self._look_beyond(name, given)
        out = func(*args, **kwargs)
        if name in _IGNORED:
            return out
        written = [
            given[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
            if torch.Tag.inplace_view not in func.tags
        ]
        results = tensors_in(out, written)
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name:
            self._draw(name, given, results)
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

    def _look_beyond(self, name: str, given: dict[str, Any]) -> None:
        """Notes what an operator would do to more edges, and generators of the message's own."""
        generator = given.get("generator")
        if generator is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()
            self.causes.setdefault("generator", name)
        source = given.get("self")
        if (
            name not in ("slice", "split", "unsafe_split")
            or not isinstance(source, Tensor)
            or not source.dim()
        ):
            return
        rows = source.size(given.get("dim", 0))
        ends = [given.get(key) for key in ("start", "end", "split_size")]
        beyond = any(end is not None and rows < abs(end) < _OPEN for end in ends)
        if beyond and bool(self.labels.of(source).any()):
            self.causes.setdefault("places", name)

    def _draw(self, name: str, given: dict[str, Any], results: list[Tensor]) -> None:
        """Keeps what is drawn; has edges, and nodes, of the first run the numbers that they had."""
        drawn = results[1:] if name == "native_dropout" else results
        number = len(self.drawn)
        self.drawn.append([t.clone() for t in drawn])
        if self.other is None or number >= len(self.other.drawn):
            return
        for now, before in zip(drawn, self.other.drawn[number], strict=False):
            same = self._rows_of_the_first(now, before)
            if same is not None:
                same.copy_(before)
        if name == "native_dropout":
            kept = drawn[0].to(results[0].dtype) / (1 - given["p"])
            results[0].copy_(given["input"] * kept)

    def _rows_of_the_first(self, drawn: Tensor, before: Tensor) -> Tensor | None:
        """Returns the part of a tensor that has the edges, or nodes, of one of the first run."""
        other = self.other
        if other is None or drawn.numel() <= 1 or drawn.dim() != before.dim():
            return None
        starts = {
            (self.sizes.sources, other.sizes.sources): 1,
            (self.sizes.targets, other.sizes.targets): 1,
            (self.sizes.edges, other.sizes.edges): self.sizes.before,
        }
        found = drawn
        for axis, ends in enumerate(zip(drawn.shape, before.shape, strict=True)):
            if ends[0] != ends[1] and ends in starts:
                found = found.narrow(axis, starts[ends], ends[1])
        return found if found.shape == before.shape else None

    # Comparing with the other run ############################################

    def _compare(self, call: Call, numbers: list[Any]) -> Step | None:
        """Returns the step of the other run; notes what differs."""
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
        steps = self.other.steps
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
                self.causes.setdefault("operator", call.name)
        ragged = any(storage_of(t) in self.labels.ragged for t in operands)
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
                self.causes.setdefault(kind, call.name)
            self.labels.put(out, label)
            if ragged and out.dim() and call.name not in ("index_put_", "index_put"):
                self.labels.ragged.add(storage_of(out))

    def _constant(self, call: Call, out: Tensor, before: tuple[int, ...], label: Tensor) -> Tensor:
        """Returns labels of what is made of constants alone, of which the edges may be as many."""
        shape = tuple(out.shape)
        if shape == before:
            return label
        axes = [k for k, (a, b) in enumerate(zip(shape, before, strict=False)) if a != b]
        mixed = torch.full((), MIXED, dtype=torch.int32)
        if len(shape) != len(before) or len(axes) != 1 or self.other is None:
            return mixed
        axis, other = axes[0], self.other.sizes
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
        repeats = call.name == "repeat" and rows == call.given["repeats"][axis]  # of one row
        if not (alike or repeats) or (call.name in MOVES and not repeats) or call.name in SCANS:
            return mixed
        return (base + numbers).view([-1 if k == axis else 1 for k in range(len(shape))])

    def _viewed(self, call: Call, before: Step | None) -> None:
        """A view has its source's labels; part of a constant, cut by a number of edges, is new."""
        if before is None or call.name not in _SLICES:
            return
        for out, shape in zip(call.outs, before.outputs, strict=False):
            new = tuple(out.shape) != shape and out.numel() > 0
            if new and not bool(self.labels.of(out).any()):
                self.causes.setdefault("numbers", call.name)
                self.labels.put(out, torch.full((), MIXED, dtype=torch.int32))

    def _asked(self, call: Call) -> None:
        """A value goes to Python: the largest id may, as the number of nodes is found by it."""
        of_edges = any(bool(as_mixed(self.labels.of(t))) for t in call.operands())
        self.asks |= not of_edges
        if self.asking and of_edges:
            self.causes.setdefault("python", call.name)

    def lengths(self, func: Any, tensor: Tensor, found: Any) -> Any:
        """Returns lengths of a tensor, of which those that count its edges note their use."""
        if func is Tensor.__len__:  # Python makes an ordinary number of it.
            self.causes.setdefault("branches", "len")
            return found
        rows = (self.sizes.edges, self.sizes.targets, self.sizes.sources)
        if not isinstance(found, int):
            return torch.Size([Count.of(self, n) if n in rows else n for n in found])
        many = func in (Tensor.size, _SHAPE)
        return Count.of(self, found) if not many or found in rows else found

    def escapes(self, tensor: Tensor) -> bool:
        with torch._C._DisableTorchDispatch():  # Or these would be the message's operators.
            return self.labels.known(tensor) and bool(self.labels.of(tensor).any())


def _is_id(labels: Tensor) -> Tensor:
    return is_number(labels) | (labels == COUNT)


def as_mixed(labels: Tensor) -> Tensor:
    """Says if values with these labels tell of an edge."""
    return ((labels > 0) | (labels == MIXED)).any()


_SHAPE = getattr(Tensor, "shape").__get__  # noqa: B009
_BYTES = getattr(Tensor, "nbytes").__get__  # noqa: B009
_LENGTHS = frozenset(
    [Tensor.size, _SHAPE, Tensor.__len__, Tensor.numel, Tensor.nelement, torch.numel, _BYTES]
)


def _compares(name: str) -> Callable[[Count, Any], Any]:
    def compare(self: Count, other: Any) -> Any:
        if not isinstance(other, Count) and not (isinstance(other, int) and -1 <= other <= 1):
            self.trace.causes.setdefault("branches", name)
        return getattr(int, name)(self, other)

    return compare


def _computes(name: str) -> Callable[..., Any]:
    def compute(self: Count, *given: Any) -> Any:
        found = getattr(int, name)(self, *given)
        if type(found) is int and name not in ("__int__", "__mod__"):
            return Count.of(self.trace, found)  # a length as well
        self.trace.causes.setdefault("branches", name)
        return found

    return compute


def _tells(name: str) -> Callable[..., Any]:
    def tell(self: Count, *given: Any) -> Any:
        self.trace.causes.setdefault("branches", name)
        return getattr(int, name)(self, *given)

    return tell


class Count(int):
    """A number of edges or nodes, which notes what Python makes of it: ``x_j.size(0) > 200``.

    It may be compared with another one, with 0 and 1, and computed with to be a tensor's length.
    """

    trace: RowTrace

    @classmethod
    def of(cls, trace: RowTrace, value: int) -> Count:
        """Returns a number that notes its use in ``trace``."""
        out = cls(value)
        out.trace = trace
        return out

    __lt__, __le__ = _compares("__lt__"), _compares("__le__")
    __gt__, __ge__ = _compares("__gt__"), _compares("__ge__")
    __eq__, __ne__ = _compares("__eq__"), _compares("__ne__")
    __add__, __radd__ = _computes("__add__"), _computes("__radd__")
    __sub__, __rsub__ = _computes("__sub__"), _computes("__rsub__")
    __mul__, __rmul__ = _computes("__mul__"), _computes("__rmul__")
    __floordiv__, __rfloordiv__ = _computes("__floordiv__"), _computes("__rfloordiv__")
    __truediv__, __rtruediv__ = _computes("__truediv__"), _computes("__rtruediv__")
    __neg__, __float__, __int__ = _computes("__neg__"), _computes("__float__"), _computes("__int__")
    __pow__, __mod__ = _computes("__pow__"), _computes("__mod__")
    __and__, __or__, __xor__ = _tells("__and__"), _tells("__or__"), _tells("__xor__")
    __lshift__, __rshift__ = _tells("__lshift__"), _tells("__rshift__")
    __rpow__, __divmod__ = _tells("__rpow__"), _tells("__divmod__")
    __str__, __repr__, __format__ = _tells("__str__"), _tells("__repr__"), _tells("__format__")
    __hash__, bit_length = _tells("__hash__"), _tells("bit_length")


class WholeGraphError(Exception):
    """A message calls this function of a tensor of the whole graph, not of its edges' rows."""


class Asked(TorchFunctionMode):
    """Notes values that go to Python below the operators; and calls that ask for nothing else.

    Raises:
        WholeGraphError: At a tensor of the whole graph, which no message is given.
    """

    def __init__(self, trace: RowTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        trace = self._trace
        if func not in METADATA and node_tensors(args):
            raise WholeGraphError(name_of(func))
        if func in _MEMORY and isinstance(args[0], Tensor):
            trace.read.append(args[0])
        if func in _READS and isinstance(args[0], Tensor):
            if trace.escapes(args[0]):
                trace.causes.setdefault("python", func.__name__)
            else:
                trace.asks = True
        if func in _LENGTHS and trace.escapes(args[0]):
            return trace.lengths(func, args[0], func(*args, **kwargs))
        if func is not torch.nn.functional.one_hot or len(args) + len(kwargs) < 2:
            try:
                return func(*args, **kwargs)
            except Exception:  # The message may catch it.
                trace.causes.setdefault("branches", func.__name__)
                raise
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
    """Says if the results share the memory of an operand, as they are."""
    keys = {storage_of(t) for t in call.operands()}
    return bool(call.outs) and all(storage_of(out) in keys for out in call.outs)


def _numbers(schema: Any, given: dict[str, Any]) -> list[Any]:
    """Returns the numbers among the arguments that are values, not sizes."""
    found: list[Any] = []
    for argument in schema.arguments:
        value = given.get(argument.name)
        kind = str(argument.type)
        if kind in _SCALARS or (kind == "Tensor" and isinstance(value, int | float)):
            found += value if isinstance(value, list | tuple) else [value]
    return found


def _contents(tensor: Tensor) -> Any:
    """Returns the content of a constant of one element: it may be a number of edges."""
    if tensor.numel() != 1 or tensor.device.type == "meta":
        return None
    return tensor.detach().reshape(()).item()


def _differ(mine: Sequence[Any], before: Sequence[Any]) -> bool:
    """Says if numbers differ; a NaN does not from itself."""
    if len(mine) != len(before):
        return True
    return any(a != b and not (a != a and b != b) for a, b in zip(mine, before, strict=True))
