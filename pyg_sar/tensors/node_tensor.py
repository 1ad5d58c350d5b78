"""``NodeTensor``: a tensor with a row per node, or edge, of which each worker holds its own.

[Note: what is where] To the code that uses it, a node tensor is the whole tensor: its shape is the
global one. Each worker holds its rows of it. A plain tensor is the same on all workers. Every
operator keeps to this: what works on each row stays local; a sum over rows is taken over all
workers and gives a plain tensor; a plain tensor with as many rows that meets a node tensor is cut
to this worker's. So gradients need no care: operators of backward passes follow the same rules,
and the gradient of a plain tensor is complete on every worker. An operator without a rule is
refused.

[Note: below autograd] The rules are for the operators below autograd (``aten``), of which all
others are composed, so that nothing gets past them. DTensor works in the same way, but with rows
cut into equal runs and torch's own process groups; here rows lie where the partition put them.

[Note: operators of other packages] Those of torch-scatter, say, read memory above the rules: their
kernels come before a tensor's class does. They are taken where they are called, by their full name
(``torch_scatter::scatter_max``), and refused there where none is known, whatever an operator of
torch by that name does.

[Note: lazy bits] ``z.conj()`` is a view with a bit that operators look at, and so is the negative
of an imaginary part. A worker's own rows carry these bits; the node tensor around them doesn't.
PyTorch switches the look at them off where it calls a rule, so it is switched on again.

[Note: versions] So it does with versions, by which autograd, and kernels that read their output
again, notice what is written between a forward and its backward pass. What was saved may be a
worker's own rows: operators that write, and views, count for these, too.

[Note: strides] Random numbers are drawn in the order of memory, and ``reshape()`` and autograd
choose operators by strides. So a node tensor has the strides of one process's tensor, found by the
same operator on tensors without memory, and a worker's rows lie in the same order of axes.

[Note: told] A rule computes with a worker's rows: what it gives for arguments that PyTorch refuses
in one process (an axis beyond the last, parts whose sizes don't add up) is anything, or an error on
some workers. So PyTorch is asked first, of tensors of the whole graph's shapes that have no memory,
and its error is raised, on all workers alike, as all know the shapes. The same call tells the
strides of the results. Where it can't tell, as values decide, a rule looks for itself. Of ids it
looks at no kind of number: that is asked of tensors with a single number each. All this is done
once for arguments of the same shapes, strides and kinds of numbers, and not for operators on each
element, whose rule looks at all operands.

[Note: the same beside rows] Numbers and plain tensors that operators get beside a node tensor must
be alike on all workers: a temperature, weights of classes, a bound. Each is noted, as what rows are
taken of is, and the next sum of gradients compares the notes, or a sum over rows where no
distributed model learns (``sum_compared`` of ``operands.py``). Gradients are where losses were
scaled, and where a backward pass begins. Of a table that rows are read of only what some worker
read must be alike (``note_table`` of ``rows.py``): the rest may be memory that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from math import prod
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.utils._python_dispatch import return_and_correct_aliasing

from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.pyg_calls import pyg_call
from pyg_sar.tensors.copies import PASSES_BACK, Origin, pass_back, row_copy, shares_memory
from pyg_sar.tensors.derivations import KINDS, note_derivation
from pyg_sar.tensors.nested import mapped as mapped
from pyg_sar.tensors.nested import tensors_in as tensors_in
from pyg_sar.tensors.rows import Rows, Writes, note_first, note_plain

Rule = Callable[[Any, Any, Any], Any]

_READERS = frozenset({"index", "_unsafe_index", "index_select", "embedding", "gather", "take"})
_excludes = torch._C._SetExcludeDispatchKeyGuard
_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_BITS = (torch._C.DispatchKey.Conjugate, False), (torch._C.DispatchKey.Negative, False)

_MOST = 4096  # calls that are remembered
_NUMBERS = 2**22  # of which zeros are made, to confirm an error
_PUTS = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
_WRITES = frozenset({"index_add", "index_copy", "index_fill", "index_reduce"})
_BY_IDS = _PUTS | _WRITES | {f"{name}_" for name in _WRITES}
_BY_IDS |= {"index", "_unsafe_index", "index_select"}
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_AS_THEY_ARE = frozenset({int, bool, str, type(None), *_KINDS})
_TAKE_ALL = frozenset({"clone", "_to_copy", "detach", "alias", "lift_fresh"})

RULES: dict[str, Rule] = {}
"""Rules by the operator's name without namespace and overload; ``pointwise``: torch says so.

By their full names those of other packages, called where autograd sees them."""

METHODS: dict[Any, Rule] = {}
"""Functions that are taken before autograd sees them: those that leave torch, and a few more."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of operators."""

    def register(found: Rule) -> Rule:
        for name in names:
            RULES[name] = found
        return found

    return register


def method(*functions: Any) -> Callable[[Rule], Rule]:
    """Registers what is done in place of functions."""

    def register(found: Rule) -> Rule:
        for function in functions:
            METHODS[function] = found
        return found

    return register


class NodeTensor(Tensor):
    """A tensor of the whole graph of which this worker holds its rows. See [Note: what is where].

    Attributes:
        rows: Which rows these are.
        axis: The axis of the rows.
        make: Finds this worker's rows, where nothing has asked for them yet. Collective.
        writes: Counts writes into its memory.
        origin: What it, or the tensor that it shares memory with, is a copy of.
        steps: The strides, which are one process's, where that tensor is not contiguous. See
            [Note: strides].
        mark: Tells how it was made. See [Note: the same rows].
        column: Of integers, one per row, repeated or not: which tensor's row (-1: the
            tensor itself) these numbers are. Plans made for ids are known again by it.
    """

    rows: Rows
    axis: int
    writes: Writes
    make: Callable[[], Tensor] | None
    origin: Origin | None
    steps: tuple[int, ...] | None
    mark: int
    _local: Tensor
    _edges: tuple[Any, int]
    _column: tuple[NodeTensor, int] | None
    _derivation: tuple[int, Writes, int, int | None] | None

    @staticmethod
    def __new__(
        cls, local: Tensor, rows: Rows, axis: int, steps: tuple[int, ...] | None = None
    ) -> NodeTensor:
        if local._is_zerotensor():  # A derivative of abs, which has no memory.
            local = torch.zeros(local.shape, dtype=local.dtype, device=local.device)
        shape = list(local.shape)
        shape[axis] = rows.total
        out: NodeTensor = Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=steps,
            dtype=local.dtype,
            device=local.device,
            requires_grad=False,
        )
        # It has no memory: C++ of others that reads it raises, where the process would end.
        torch._C._set_throw_on_mutable_data_ptr(out)
        out._local, out.rows, out.axis, out.make, out.origin = local, rows, axis, None, None
        out.steps, out.mark = steps, 0
        out.writes, out._edges, out._column = Writes(local), (None, 0), None
        out._derivation = None
        return out

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def edges(self) -> Any:
        """Of an ``edge_index``: the distributed edges that it stands for, until it is written."""
        edges, writes = self._edges
        return edges if writes == self.writes.count else None

    @edges.setter
    def edges(self, edges: Any) -> None:
        self._edges = edges, self.writes.count

    @property
    def derivation(self) -> int | None:
        """A number that tensors of the same values have. See [Note: derivations].

        ``None`` of what inference mode made, into which nobody counts writes.
        """
        if self._local.is_inference():
            return None
        if self._derivation is not None:
            number, writes, counted, version = self._derivation
            same = writes is self.writes and counted == writes.count
            if same and (version is None or version == self._local._version):
                return number
        self.derivation = number = next(self.rows.comm.serials)
        return number

    @derivation.setter
    def derivation(self, number: int) -> None:
        version = self._local._version if self.make is None else None
        self._derivation = number, self.writes, self.writes.count, version

    @property
    def column(self) -> tuple[NodeTensor, int] | None:
        one_each = self._column is None and self.numel() == self.rows.total
        return (self, -1) if one_each else self._column

    @column.setter
    def column(self, column: tuple[NodeTensor, int] | None) -> None:
        self._column = column

    @property
    def local(self) -> Tensor:
        """This worker's rows, a plain tensor."""
        if self.make is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._local = self.writes.rows = self.make()
            self.make = None
        return self._local

    def strided(self, steps: tuple[int, ...] | None) -> NodeTensor:
        """Returns this result of an operator with one process's strides."""
        out = NodeTensor(self._local, self.rows, self.axis, steps)
        out.__dict__.update(self.__dict__ | {"steps": steps})
        return out

    def to_local(self) -> Tensor:
        """Returns this worker's rows, differentiable: ``[rows here, *]``, a plain tensor.

        Of ``data.edge_index`` it is the distributed ``edge_index`` of the edges into this worker's
        nodes, in its own numbering. What is computed with rows is this worker's alone: a sum, a
        mean or a loss of them is not the graph's, and gradients of parameters are not summed.
        :func:`pyg_sar.from_local` is the way back. Nothing is sent.
        """
        if self.edges is not None:
            return cast(Tensor, self.edges.index)
        rows, axis = self.rows, self.axis
        return cast(Tensor, ToLocal.apply(self, rows_at(self, rows, axis), rows, axis))

    def full_tensor(self) -> Tensor:
        """Returns all rows in the graph's order on every worker, differentiable. Collective.

        Raises:
            DistributedIndexError: When they take more than 2 GiB.
        """
        return cast(Tensor, Full.apply(self, "full_tensor()"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in types if len(types) > 1 else ():
            if hasattr(one, "goes_first"):
                return NotImplemented  # A sparse matrix, or a copy of a row, knows both.
        found = METHODS.get(func)
        if isinstance(func, OpOverload | OpOverloadPacket):
            found = found if _is_own(func) else RULES.get(_full_name(func), refused)
        elif kwargs and kwargs.get("out") is not None:
            return _into_out(func, args, dict(kwargs))
        if found is not None:
            given = node_tensors(args, kwargs)
            if not given or given[0].rows.comm.world_size == 1:
                return found(func, args, kwargs or {})
            comm, call = given[0].rows.comm, _number_of(func)
            for one in given:  # See [Note: the same rows].
                call = hash((call, one.mark))
            outer, comm.call = comm.call, call
            try:
                out = found(func, args, kwargs or {})
            finally:
                comm.call = outer
            if isinstance(out, NodeTensor) and out.mark == 0:
                out.mark = call
            return out
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]
        found = RULES.get(name) if _is_own(func) else refused
        composed = torch.is_inference_mode_enabled() and found is not refused and name[0] != "_"
        if found is None or composed:
            # There operators that are composed of others come as they are: no rule is for these.
            out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        if found is None:
            found = RULES["pointwise"] if torch.Tag.pointwise in func.tags else _without_rule(func)
        if torch.Tag.nondeterministic_seeded in func.tags and name not in RULES:
            found = refused
        kwargs = kwargs or {}
        given = node_tensors(args, kwargs)
        comm = given[0].rows.comm
        fits = found in (RULES["pointwise"], by_gathering) or name in _TAKE_ALL  # Or these refuse.
        if not fits and found is not refused and found is not one_by_one:
            told(func, args, kwargs, comm)  # See [Note: told].
        if comm.world_size > 1:
            if comm.host is not None:
                given[0].rows.check_part()
            # What is written may hold anything before; of tables note_table() takes what is read.
            read = [*args[func._schema.is_mutable or name in _READERS :], *kwargs.values()]
            for one in args if name[:2] != "_f" else ():  # "_foreach_", "_fused_"
                if isinstance(one, list | tuple):  # Ids, say.
                    read += one
            for value in read:  # See [Note: the same beside rows].
                if isinstance(value, int | float):
                    comm.beside = hash((comm.beside, value if value == value else 0.1))  # NaN
                elif isinstance(value, Tensor) and not isinstance(value, NodeTensor):
                    note_first(value, comm)
            outer, call = comm.call, _number_of(func)
            for one in given:  # See [Note: the same rows].
                call = hash((call, one.mark))
            comm.call = call
        for one in given:
            if one.origin is not None:
                _check_copy(func, one)
        if func._schema.is_mutable:
            _count_writes(func, args, kwargs)
        try:
            with _excludes(*_BITS[0]), _excludes(*_BITS[1]):
                if not func.is_view:
                    with _excludes(_VERSIONS, not func._schema.is_mutable):
                        out = found(func, args, kwargs)
                    if func._schema.is_mutable:
                        if isinstance(args[0], NodeTensor) and args[0].origin:
                            args[0].origin.put()
                    else:
                        out = _as_in_one_process(func, args, kwargs, given, out)
                else:
                    # In inference mode as well a view of a tensor from outside is no inference
                    # tensor.
                    outside = torch.is_inference_mode_enabled()
                    with torch.inference_mode(False) if outside else nullcontext():
                        out = _viewed(func, args, kwargs, given, found)
                changes = func._schema.is_mutable
                if not changes and (not isinstance(out, Tensor) or out.dtype in KINDS):
                    note_derivation(comm, func, args, kwargs, out)
            if comm.world_size > 1:
                made = args[0] if changes else out
                for one in made if isinstance(made, list | tuple) else (made,):
                    if isinstance(one, NodeTensor):
                        one.mark = call
        finally:
            if comm.world_size > 1:
                comm.call = outer
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(whole(self, "print()"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        everything = whole(self, "pickling")
        if isinstance(self, torch.nn.Parameter):
            everything = torch.nn.Parameter(everything, self.requires_grad)
        return everything.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone()
        if self.is_leaf and self.requires_grad:
            copy.requires_grad_()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        elif self.is_leaf and self.grad is not None:  # PyTorch copies no parameter's.
            copy.grad = deepcopy(self.grad, memo)
        memo[id(self)] = copy
        return copy

    def __iter__(self) -> Any:
        return iter(self.unbind(0)) if self.axis else (self[k] for k in range(len(self)))

    def __format__(self, spec: str) -> str:
        return format(whole(self, "print()"), spec)


class ToLocal(torch.autograd.Function):
    """A tensor's rows here, in a layout. Its adjoint is :class:`FromLocal`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, local: Tensor, rows: Rows, axis: int) -> Tensor:
        ctx.place = rows, axis
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return FromLocal.apply(gradient, *ctx.place), None, None, None


class FromLocal(torch.autograd.Function):
    """Rows here as a node tensor. Its adjoint is :class:`ToLocal`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: Rows, axis: int) -> Tensor:
        ctx.place = rows, axis
        out = NodeTensor(local.detach(), rows, axis % local.dim())
        if (rows.tells_order or rows.tell_order()) and local.is_contiguous():
            return out
        order, gaps = rows.lie(*in_memory(local))
        if order == list(range(local.dim())) and not gaps:
            return out
        like = new_in_order(_without_memory(local), out.shape, order, gaps)
        return out.strided(like.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, axis = ctx.place
        return ToLocal.apply(gradient, rows_at(gradient, rows, axis), rows, axis), None, None


class Full(torch.autograd.Function):
    """All rows on every worker, where their gradient is complete. Its adjoint is :class:`_Own`."""

    @staticmethod
    def forward(ctx: Any, x: NodeTensor, what: str) -> Tensor:
        ctx.place = x.rows, x.axis, what
        return cast(Tensor, whole(x.detach(), what))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Own.apply(gradient, *ctx.place)), None


class _Own(torch.autograd.Function):
    """The own rows of a tensor that all workers hold. Its adjoint is :class:`Full`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, axis: int, what: str) -> Tensor:
        ctx.what = what
        return NodeTensor(rows_at(x, rows, axis), rows, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return cast(Tensor, Full.apply(gradient, ctx.what)), None, None, None


@cache
def _number_of(func: Any) -> int:
    """Returns what tells an operator, or a function, alike in all processes."""
    return crc32(str(getattr(func, "__name__", func)).encode())


def rows_at(x: Tensor, rows: Rows, axis: int) -> Tensor:
    """Returns this worker's rows of a tensor of the whole graph, in a layout; no gradient."""
    if not isinstance(x, NodeTensor):
        note_plain(x, rows.comm)
        return rows.cut(x.detach(), axis)
    if x.origin is not None:
        _check_copy(NodeTensor.to_local, x)
    if x.axis != axis:
        raise DistributedIndexError(
            f"A tensor of shape {list(x.shape)} has its rows along axis {x.axis}, where axis "
            f"{axis} is asked for (rank {rows.comm.rank})"
        )
    return x.local if x.rows.same(rows) else x.rows.moved(x.local, axis, rows)


def as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function, whose operators are then taken below autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _into_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function with ``out=``, one or several tensors of the results' shapes and dtypes."""
    out = kwargs.pop("out")
    found = func(*args, **kwargs)
    results, targets = tensors_in([found]), tensors_in([out])
    kinds, fitting = ([(list(t.shape), t.dtype) for t in each] for each in (results, targets))
    if kinds != fitting:
        raise refusal(func, f"gives {kinds}, which 'out' doesn't fit: assign it", *args, *targets)
    for target, result in zip(targets, results, strict=True):
        target.copy_(result)
    return out if isinstance(out, Tensor) else type(found)(targets)


def _check_copy(func: Any, copy: NodeTensor) -> None:
    """Raises where what a copy is of was written. See :mod:`pyg_sar.tensors.copies`."""
    if copy.origin is not None and copy.origin.stale():
        raise refusal(func, "takes rows of a tensor that was written since", copy)


def _count_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Counts a write for each node tensor that an operator writes into."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in node_tensors(value):
                _ = tensor.local  # It is made before it is written.
                tensor.writes.add()


def _viewed(func: Any, args: Any, kwargs: Any, given: Sequence[NodeTensor], found: Rule) -> Any:
    """Returns what a view operator gives by its rule, with its origin where it is a copy."""
    view = lambda source: found(func, (source, *args[1:]), kwargs)  # noqa: E731
    with _excludes(_VERSIONS, False):
        out = _as_in_one_process(func, args, kwargs, given, view(args[0]))
    if isinstance(out, list | tuple):
        parts = enumerate(out)
        return type(out)(
            _with_origin(func, args, kwargs, part, lambda t, k=k: view(t)[k]) for k, part in parts
        )
    return _with_origin(func, args, kwargs, out, view)


def _as_in_one_process(
    func: Any, args: Any, kwargs: Any, given: Sequence[NodeTensor], out: Any
) -> Any:
    """Returns results with the strides of one process's. See [Note: strides]."""
    settled = True  # Results of contiguous tensors are contiguous, for all that their rows tell.
    for one in given:
        settled &= one.steps is None
    for one in out if isinstance(out, list | tuple) else (out,):
        if isinstance(one, NodeTensor) and one.make is None:
            settled &= one.rows.count > 1 and one._local.is_contiguous()
            settled &= not func.is_view or shares_memory(one._local, given[0]._local)
        elif isinstance(one, Tensor) and one.layout == torch.strided:
            settled &= func.is_view or one.is_contiguous()
    if settled:
        return out
    found = told(func, args, kwargs, given[0].rows.comm, keep=True)
    if found is None:
        return out
    likes = iter(found)
    return mapped(lambda one: _laid(one, next(likes, one), given), out)


def _laid(one: Tensor, like: Tensor, given: Sequence[NodeTensor]) -> Tensor:
    """Returns a result with the strides of ``like``, and its rows in that order of axes."""
    known = like.layout == torch.strided and one.shape == like.shape
    if not known or (isinstance(one, NodeTensor) and one.make is not None):
        return one
    local = one.local if isinstance(one, NodeTensor) else one
    order, _ = in_memory(like)
    right = local.permute(order).is_contiguous() or in_memory(local)[0] == order
    if not right and not any(t.make is None and shares_memory(local, t.local) for t in given):
        local = new_in_order(local, local.shape, order).copy_(local)
    if not isinstance(one, NodeTensor):
        return local
    one._local = one.writes.rows = local
    steps = None if like.is_contiguous() else like.stride()
    return one if steps == one.steps else one.strided(steps)


def in_memory(tensor: Tensor) -> tuple[list[int], bool]:
    """Returns the axes of a tensor in their order in memory, and whether there are gaps."""
    steps = tensor.stride()
    wide = [d for d, n in enumerate(tensor.shape) if n > 1 and steps[d]]
    by_step = iter(sorted(wide, key=lambda d: -steps[d]))
    order = [next(by_step) if d in wide else d for d in range(tensor.dim())]
    base = [n if step else 1 for n, step in zip(tensor.shape, steps, strict=True)]  # Of expand().
    size = 1 + sum((n - 1) * step for n, step in zip(base, steps, strict=True))
    return order, size != prod(base)


def new_in_order(
    like: Tensor, shape: Sequence[int], order: Sequence[int], gaps: bool = False
) -> Tensor:
    """Returns a tensor of a shape, whose axes are in an order in memory, with gaps or without."""
    sizes = [shape[d] for d in order]
    back = [list(order).index(d) for d in range(len(sizes))]
    new = like.new_empty([*sizes, 2])[..., 0] if gaps else like.new_empty(sizes)
    return new.permute(back)


def told(
    func: Any, args: Any, kwargs: Any, comm: Any, keep: bool = False
) -> Sequence[Tensor] | None:
    """Returns results of an operator without memory, or what it can't tell. See [Note: told].

    Args:
        func: One of torch's own operators.
        args: Its arguments.
        kwargs: The same by name.
        comm: The workers; what was told before is kept here.
        keep: The results are wanted; else only that there are some is kept.

    Raises:
        Exception: PyTorch's own, where it refuses the call in one process.
    """
    values = [*args, *kwargs, *kwargs.values()]
    key: list[Any] = [func]
    for value in values:
        kind = type(value)
        if kind in _AS_THEY_ARE:
            key += kind, value
        elif isinstance(value, NodeTensor):
            local = value._local
            key += local.shape, value.axis, value.rows.total, value.steps, local.dtype
        elif isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return None
            key += value.shape, value.stride(), value.dtype
        elif isinstance(value, list | tuple):
            key.append(len(value))
            values += value  # They come last.
        else:
            key.append(kind)  # Of numbers with a fraction the kind decides.
    call = tuple(key)
    known = comm.told.get(call, ...)
    if known is ... or (keep and known == ()):
        known = _asked(func, args, kwargs)
        if len(comm.told) >= _MOST:
            comm.told.clear()
        comm.told[call] = known if keep or known is None else ()
    found: Sequence[Tensor] | None = known
    return found


def _asked(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """Asks PyTorch, which has not been asked yet."""
    name = func._schema.name.rpartition("::")[2]
    if name in _BY_IDS:
        single = [*map(_single, args)]
        if name in _PUTS and len(args) > 2:
            single[2] = torch.zeros((), dtype=args[2].dtype)
        func(*single, **_single(kwargs))
    try:
        return tensors_in([_called(func, args, kwargs, "meta", _without_memory)])
    except NotImplementedError:
        return None
    except Exception as problem:
        if sum(t.numel() for t in tensors_in(args, kwargs)) > _NUMBERS:
            if "meta tensors" in str(problem):
                return None
            raise
    with torch.random.fork_rng(devices=[]):  # PyTorch's error is here, where there is one.
        _called(func, args, kwargs, "cpu", _zeros)
    return None


def _called(func: Any, args: Any, kwargs: Any, device: str, make: Any) -> Any:
    """Calls an operator with other tensors, which are on another device."""
    options = {"generator": None, "device": device, "pin_memory": None}
    given = {name: options.get(name, value) for name, value in mapped(make, kwargs).items()}
    return func(*mapped(make, args), **given)


def _without_memory(t: Tensor) -> Tensor:
    """Returns a tensor of the same shape, strides and dtype without memory."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _zeros(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_()


def _single(value: Any) -> Any:
    """Returns arguments with a single number in each tensor, which is 0."""
    return mapped(lambda t: torch.zeros([1] * t.dim(), dtype=t.dtype), value)


def _with_origin(func: Any, args: Any, kwargs: Any, out: Any, view: Any) -> Any:
    """Returns a view, with its origin where it is a copy."""
    source = args[0]
    if not isinstance(out, NodeTensor):
        plain = isinstance(out, Tensor) and isinstance(source, NodeTensor)
        return row_copy(out, Origin(out, source, view)) if plain else out
    if out.make is None and source.make is None and shares_memory(out._local, source._local):
        out.writes, out.origin = source.writes, source.origin
        return return_and_correct_aliasing(func, args, kwargs, out)
    if out.edges is None:
        out.origin = out.origin or Origin(out.local, source, view)
    else:  # The same ids, which nothing has asked for yet.
        out.writes, edges = source.writes, out.edges
        out.edges = edges
    return out


def _full_name(func: Any) -> str:
    """Returns an operator's name with its package: ``torch_scatter::scatter_max``."""
    return str(func._schema.name if isinstance(func, OpOverload) else func._qualified_op_name)


@cache
def _is_own(func: Any) -> bool:
    """Returns whether an operator is one of torch's, of which all of torch is composed."""
    return _full_name(func).startswith("aten::")


def name_of(func: Any) -> str:
    """Returns an operator's name for messages: ``aten.sort``."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return _full_name(func).replace("::", ".")
    return str(func.__name__)


def refusal(func: Any, why: str, *tensors: Any) -> DistributedIndexError:
    """Returns an error that names an operator, the shapes of what it got, and why."""
    shapes = ", ".join(str(list(t.shape)) for t in tensors if isinstance(t, Tensor))
    rank = next((t.rows.comm.rank for t in tensors if isinstance(t, NodeTensor)), "?")
    call = pyg_call()
    return DistributedIndexError(
        f"{f'{call!r}: ' if call else ''}'{name_of(func)}' of node tensors (shapes {shapes}; rank "
        f"{rank}) {why}"
    )


def _without_rows(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same shape and dtype, which no worker has rows of."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@rule("refused")
def refused(func: Any, args: Any, kwargs: Any) -> Any:
    """Raises: there is no rule."""
    if isinstance(func, OpOverload) and func.namespace == "prims":
        # So PyTorch asks for the shape of a sum or product of which one side is known to be 0: a
        # derivative of abs, in backward mode; in forward mode of all that does not change.
        if forward_ad._current_level < 0:
            return func(*mapped(_without_rows, args), **kwargs)
        why = (
            "has no derivative in forward mode (torch.func.jvp, jacfwd, hessian): use "
            "torch.autograd.grad(), or backward()"
        )
        raise refusal(func, why, *tensors_in(args, kwargs))
    why = (
        "has no rule that would give the whole graph's numbers. Take it of what is the same on all "
        "workers: x.numpy(), x.tolist() and torch.from_numpy(x.numpy()) have all rows"
    )
    raise refusal(func, why, *tensors_in(args, kwargs))


def node_tensors(*values: Any) -> list[NodeTensor]:
    """Returns all node tensors in nested lists, tuples and dicts."""
    return [t for t in tensors_in(*values) if isinstance(t, NodeTensor)]


def is_transformed(value: Any) -> bool:
    """Returns whether a value is a node tensor that a transform of ``torch.func`` has wrapped."""
    inner = value
    while isinstance(inner, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    return inner is not value and isinstance(inner, NodeTensor)


def whole(value: Any, what: str) -> Any:
    """Returns a node tensor with all rows, as a plain tensor; anything else as it is. Collective.

    Without its gradient. It lies in memory as one process's tensor.
    """
    if not isinstance(value, NodeTensor):
        return value
    if value.origin is not None:
        _check_copy(NodeTensor.full_tensor, value)
    with torch.no_grad():
        found = value.rows.whole(value.local, value.axis, what)
        if value.steps is None:
            return found
        base = found[tuple(slice(None) if step else slice(1) for step in value.steps)]
        return new_in_order(base, base.shape, *in_memory(value)).copy_(base).expand(found.shape)


def by_gathering(func: Any, args: Any, kwargs: Any) -> Any:
    """The rule of what needs all rows in one place: they are gathered, on every worker."""
    what = f"'{name_of(func)}'"
    take = lambda t: whole(t, what)  # noqa: E731
    return func(*mapped(take, args), **mapped(take, kwargs))


def by_decomposition(func: Any, args: Any, kwargs: Any) -> Any:
    """The rule of what PyTorch says is made of other operators, which have rules."""
    return decomposition_table[func](*args, **kwargs)


def one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """The rule of operators on lists (``_foreach_add_``): each tensor is taken for itself."""
    return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


_OWN = ("aten", "torch_nn")
"""Namespaces of torch's own operators."""


def _without_rule(func: Any) -> Rule:
    """Returns how an operator of torch's own without a rule of its own is right: by all rows.

    Those that read memory by its strides, change a tensor's shape, or write into several, and
    others' operators are refused.
    """
    if func.namespace not in _OWN or "as_strided" in func._schema.name:
        return refused
    if func._schema.name.startswith("aten::_foreach_"):
        return one_by_one
    if not func._schema.is_mutable:
        return by_gathering
    in_place = func._schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags
    return written_by_gathering if in_place else refused


def written_by_gathering(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes into all rows of a tensor, gathered, and keeps those here."""
    target = args[0]
    if not isinstance(target, NodeTensor):
        return (
            into_plain(func, args, kwargs)
            if isinstance(target, Tensor)
            else refused(func, args, kwargs)
        )
    what = f"'{name_of(func)}'"
    found = whole(target, what)
    by_gathering(func, (found, *args[1:]), kwargs)
    target.local.copy_(target.rows.cut(found, target.axis))
    return target


def into_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Writes node tensors into a plain tensor, which all workers hold: they are gathered."""
    by_gathering(func, args, kwargs)
    return args[0]


@method(*PASSES_BACK)
def _pass_back(func: Any, args: Any, kwargs: Any) -> Any:
    return pass_back(func, args, kwargs)
