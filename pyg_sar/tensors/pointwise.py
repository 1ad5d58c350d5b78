"""Rules of operators that work on each element, or make tensors like others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from pyg_sar.space.draws import bernoulli_rows, drawn_rows, generator_mark, pieces
from pyg_sar.tensors.node_tensor import (
    NodeTensor,
    Rule,
    by_gathering,
    in_memory,
    into_plain,
    mapped,
    method,
    name_of,
    new_in_order,
    node_tensors,
    refusal,
    rule,
    tensors_in,
)
from pyg_sar.tensors.operands import arguments, beside, place, wrap
from pyg_sar.tensors.rows import GATHER_LIMIT, Rows


def _writes(func: Any) -> bool:
    """Returns whether an operator writes into its first argument."""
    first = func._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write


@rule(
    "pointwise",
    *("_prelu_kernel", "_prelu_kernel_backward", "complex", "copy_", "copysign", "fill", "fill_"),
    *("floor_divide", "floor_divide_", "log_sigmoid_forward", "log_sigmoid_backward"),
    *("masked_fill", "masked_fill_", "polar", "where", "zero_", "nan_to_num", "nan_to_num_"),
    *("view_as_real_copy", "view_as_complex_copy", "mse_loss_backward_elementwise"),
    *("native_dropout_backward", "_standard_gamma_grad"),
    *("_conj", "_neg_view"),
    *("elu_backward", "leaky_relu_backward", "rrelu_with_noise_backward"),
    *("hardtanh_backward", "threshold_backward", "softplus_backward", "silu_backward"),
    *("gelu_backward", "hardswish_backward", "hardsigmoid_backward", "softshrink_backward"),
    *("isnan", "isinf", "isneginf", "isposinf"),
)
def by_element(func: Any, args: Any, kwargs: Any) -> Any:
    """Each element of the result is made of one element of each operand, broadcast."""
    operands = tensors_in(args, kwargs)
    if "out" in kwargs and kwargs["out"] is not None:
        raise refusal(func, "with out=... is not supported: assign the result", *operands)
    writes = _writes(func)
    if writes and not isinstance(args[0], NodeTensor):
        return into_plain(func, args, kwargs)
    rows, axis = place(operands)
    if rows.total == 1 and any(t.dim() >= -axis and t.size(axis) != 1 for t in operands):
        return by_gathering(func, args, kwargs)  # One row is broadcast to all of another layout.
    if writes:
        if args[0].rows is not rows and not args[0].rows.same(rows):
            rows = args[0].rows
        args[0].edges = None
    take = lambda t: beside(func, t, rows, axis, operands)  # noqa: E731
    out = func(*mapped(take, args), **mapped(take, kwargs))
    if writes:
        return args[0]
    found = mapped(lambda t: wrap(t, rows, t.dim() + axis), out)
    return found


@rule("detach_")
def _detached(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the tensor itself: it comes in inference mode alone, where nothing has a graph."""
    return args[0]


@rule("clone", "_to_copy", "detach", "alias", "lift_fresh")
def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """The same values: an ``edge_index`` goes on standing for its edges."""
    source = args[0]
    if source.edges is None or kwargs.get("dtype", torch.long) != torch.long:
        return by_element(func, args, kwargs)
    out = wrap(source._local, source.rows, source.axis)
    change = lambda ids: func(ids, **kwargs)  # noqa: E731
    alias = func.is_view  # detach(): it sees what is written later.
    out.edges = source.edges
    out.make = (lambda: change(source.local)) if alias else ids_of(source, change)
    return out


def ids_of(source: NodeTensor, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    """Returns what finds an ``edge_index``'s ids later, though it may be written until then."""
    edges, writes = source.edges, source.writes.count

    def make() -> Tensor:
        same = source.writes.count == writes
        return change(source.local if same else edges.global_ids())

    return make


@rule("view_as_real", "view_as_complex")
def _complex_view(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    local = source.local.resolve_conj().resolve_neg()
    if not local.is_complex() and local.stride(-1) != 1:  # As an expanded gradient's rows may lie.
        local = local.contiguous()
    return wrap(func(local), source.rows, source.axis)


_REAL: Any = Tensor.real
_IMAG: Any = Tensor.imag


@method(torch.real, torch.imag, _REAL.__get__, _IMAG.__get__)
def _part(func: Any, args: Any, kwargs: Any) -> Any:
    """Takes a conjugate's parts of what it is the conjugate of, as torch does: as views."""
    source: NodeTensor = (*args, *kwargs.values())[0]
    with torch._C.DisableTorchFunctionSubclass():
        if not (source.is_complex() and source.local.is_conj()):
            return func(source)
        part = func(source.conj())
        return torch._neg_view(part) if func in (torch.imag, _IMAG.__get__) else part


# Tensors like others ##########################################################


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def _like(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    return wrap(func(source.local, *args[1:], **kwargs), source.rows, source.axis)


def known_rows(source: NodeTensor, total: int) -> Rows | None:
    """Returns the layout with as many rows: a tensor's, what it was selected from, edges' nodes."""
    rows: Rows | None = source.rows
    while rows is not None and rows.total != total:
        ends = [one for one in rows.ends if one.total == total]
        rows = ends[0] if ends else rows.parent
    return rows


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor of as many rows lies as this one, any other on all workers."""
    source, size = args[0], list(args[1])
    axis = source.axis if source.axis < len(size) else 0
    rows = known_rows(source, size[axis]) if size else None
    if rows is None and size:
        axis = 0
        rows = known_rows(source, size[0])
    if rows is None:
        return func(source.local, *args[1:], **kwargs)
    size[axis] = rows.count
    if func._schema.name.endswith("strided"):
        return wrap(source.local.new_empty(size, **kwargs), rows, axis)
    return wrap(func(source.local, size, *args[2:], **kwargs), rows, axis)


# Random numbers ###############################################################


def _marked(draw: Rule) -> Rule:
    """A rule that draws, after which the generators' state is known: see ``SharedParameters``."""

    def rule_that_draws(func: Any, args: Any, kwargs: Any) -> Any:
        found = draw(func, args, kwargs)
        comm = node_tensors(args, kwargs)[0].rows.comm
        comm.drawn = generator_mark(comm.device)
        if (own := arguments(func, args, kwargs).get("generator")) is not None:
            state = own.get_state().numpy().tobytes()
            comm.drawn_by_others = crc32(state, comm.drawn_by_others)
        return found

    return rule_that_draws


@rule(
    *("bernoulli_", "uniform_", "normal_", "exponential_", "random_", "cauchy_", "log_normal_"),
    *("geometric_",),
)
@_marked
def _draw_into(func: Any, args: Any, kwargs: Any) -> Any:
    """Every worker draws what one process would draw, and keeps its rows."""
    target, *rest = args
    if node_tensors(rest, kwargs):
        if not isinstance(target, NodeTensor):
            return into_plain(func, args, kwargs)
        lies = _order_in_memory(func, target)
        if lies is not None and lies[0] != list(range(target.dim())):
            raise refusal(func, _OTHER_ORDER, target)
        target.local.copy_(_of_rows(func, args, kwargs))
    else:
        lies = _order_in_memory(func, target)
        draw = lambda like: func(like, *rest, **kwargs)  # noqa: E731
        plain = func is torch.ops.aten.bernoulli_.float and kwargs.get("generator") is None
        p = arguments(func, args, kwargs)["p"] if plain else None
        own = _own_of(target, draw, p) if lies is None else _own_as(target, draw, lies)
        target.local.copy_(own)
    return target


def _order_in_memory(func: Any, source: NodeTensor) -> tuple[list[int], bool] | None:
    """Returns the axes in their order in memory, and whether it has gaps.

    ``None``: in their own order, without gaps.

    Raises:
        DistributedIndexError: All rows, which are drawn in another order, take too much.
    """
    if source.steps is None:
        return None
    order, gaps = in_memory(source)
    if order == list(range(source.dim())) and not gaps:
        return None
    source.rows.comm.beside = hash((source.rows.comm.beside, *order, gaps))
    if source.numel() * source.element_size() * (1 + gaps) > GATHER_LIMIT:
        raise refusal(func, _OTHER_ORDER, source)
    return order, gaps


_OTHER_ORDER = "on such a view would draw in another order: take x.contiguous() before"


def _own_as(
    source: NodeTensor, draw: Callable[[Tensor], Tensor], lies: tuple[list[int], bool]
) -> Tensor:
    """Returns this worker's rows of what ``draw`` makes of one process's tensor, as that lies."""
    like = new_in_order(source.local, source.shape, *lies)
    return source.rows.cut(draw(like), source.axis)


def _own_of(source: NodeTensor, draw: Callable[[Tensor], Tensor], p: float | None = None) -> Tensor:
    """Returns this worker's rows of what ``draw`` makes of a tensor like the whole one.

    It is drawn in one process's order, a piece at a time: see :mod:`pyg_sar.space.draws`.

    Args:
        p: Of ``bernoulli_(p)``, if ``draw`` is that; the rows are bool then.
    """
    before, rest = list(source.shape[: source.axis]), source.shape[source.axis + 1 :]
    repeats, total, ids = prod(before), source.rows.total, source.rows.ids
    if before:  # Rows of the whole are in as many places in memory.
        starts = torch.arange(repeats, device=ids.device) * total
        ids = (starts.view(-1, 1) + ids).view(-1)

    def make(shape: Sequence[int]) -> Tensor:
        return draw(torch.empty(shape, dtype=source.dtype, device=source.device))

    if p is not None and 0 <= p <= 1 and source.device.type == "cpu":
        drawn = bernoulli_rows(p, rest, ids, repeats * total, source.dtype)
    else:
        drawn = drawn_rows(make, rest, ids, repeats * total, source.device)
    return drawn.view(*before, source.rows.count, *rest)


@rule("rand_like", "randn_like", "randint_like")
@_marked
def _draw_like(func: Any, args: Any, kwargs: Any) -> Any:
    source, *rest = args
    as_it_lies = kwargs.get("memory_format") in (None, torch.preserve_format)
    lies = (
        _order_in_memory(func, cast(NodeTensor, torch.empty_like(source))) if as_it_lies else None
    )
    draw = lambda like: func(like, *rest, **kwargs)  # noqa: E731
    drawn = _own_of(source, draw) if lies is None else _own_as(source, draw, lies)
    return wrap(drawn, source.rows, source.axis)


@rule(
    *("bernoulli", "multinomial", "poisson", "normal", "binomial", "_standard_gamma"),
    "_sample_dirichlet",
)
@_marked
def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Drawn with the probabilities of all rows, which are gathered."""
    rows, axis = place(node_tensors(args, kwargs))
    if "multinomial" not in func._schema.name:
        drawn = _of_rows(func, args, kwargs)
        return wrap(drawn, rows, drawn.dim() + axis)
    drawn = by_gathering(func, args, kwargs)
    return wrap(rows.cut(drawn, 0), rows, 0) if drawn.dim() == 2 and axis == -2 else drawn


def _of_rows(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Returns this worker's rows of what is drawn by other tensors' elements.

    These are gathered: a piece of the rows at a time, where the rows come first.
    """
    tensors = [t for t in tensors_in(args, kwargs) if t.dim()]
    rows, axis = place(node_tensors(args, kwargs))
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    nodes = node_tensors(tensors)
    if len(shape) != -axis or not all(
        t.axis - t.dim() == axis and t.rows.same(rows) for t in nodes
    ):
        return rows.cut(by_gathering(func, args, kwargs), axis)
    drawn = []
    order = rows.ids.argsort()
    for first, end in pieces(rows.total, prod(shape[1:])):
        part = rows.sliced(first, end, 1)

        def take(t: Tensor, part: Rows = part, first: int = first) -> Tensor:
            if isinstance(t, NodeTensor):
                own = torch.arange(rows.count) if part.source is None else part.source
                return part.whole(t.local.index_select(0, own), 0, name_of(func))
            mine = t.dim() == len(shape) and t.size(0) == rows.total
            return t.narrow(0, first, part.total) if mine else t

        found = func(*mapped(take, args), **mapped(take, kwargs))
        drawn.append(found.index_select(0, part.ids.sort().values))
    return torch.cat(drawn).index_select(0, order.argsort())


@rule("rrelu_with_noise", "rrelu_with_noise_")
@_marked
def _rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    """In evaluation a leaky ReLU; in training a slope is drawn wherever a number is negative."""
    given = arguments(func, args, kwargs)
    source, noise = given["self"], given["noise"]
    bounds = given["lower"], given["upper"]
    if not given["training"]:  # As torch's lies.
        out = torch.ops.aten.leaky_relu(source, sum(bounds) / 2).contiguous()
    elif _order_in_memory(func, source) is not None:
        raise refusal(func, _OTHER_ORDER, source)  # PyTorch's own gradient is wrong there.
    else:

        def slopes(numbers: Tensor) -> Tensor:
            drawn = torch.empty_like(numbers)
            torch.ops.aten.rrelu_with_noise(numbers, drawn, *bounds, True, given["generator"])
            return drawn

        own = _of_rows(slopes, (source,), {})
        noise.local.copy_(own)
        noise.writes.add()
        out = wrap(source.local * own, source.rows, source.axis)
    return source.copy_(out) if func._schema.name.endswith("_") else out


@rule("native_dropout")
def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    source, p = given["input"], given["p"]
    if not given["train"]:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    mask = _own_of(source, lambda like: like.bernoulli_(1 - p), 1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    kept = wrap(mask.bool(), source.rows, source.axis)
    return wrap(source.local * mask * scale, source.rows, source.axis), kept
