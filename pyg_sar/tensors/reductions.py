"""Rules of reductions, and of what works along axes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.space.pyg_calls import library_frames
from pyg_sar.tensors.boundary import Total, to_local
from pyg_sar.tensors.node_tensor import (
    NodeTensor,
    as_it_is,
    by_decomposition,
    by_gathering,
    mapped,
    method,
    node_tensors,
    rule,
    whole,
)
from pyg_sar.tensors.operands import (
    arguments,
    as_kind,
    beside,
    called,
    extreme,
    identity,
    own,
    place,
    summed,
    widened,
    wrap,
)
from pyg_sar.tensors.pointwise import by_element, ids_of
from pyg_sar.tensors.rows import Rows, every_rows


def _dims(source: Tensor, dim: Any) -> list[int]:
    """Returns the axes that a reduction is over, none given being all."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(source.dim()))
    return [d % source.dim() for d in ([dim] if isinstance(dim, int) else dim)]


def _kept_axis(source: NodeTensor, dims: list[int], keepdim: bool) -> int:
    """Returns the axis of the rows after a reduction along others."""
    return source.axis - (0 if keepdim else sum(d < source.axis for d in dims))


def _wrapped(out: Any, source: NodeTensor, axis: int) -> Any:
    """Returns one or several results as node tensors."""
    if isinstance(out, Tensor):
        return wrap(out, source.rows, axis)
    return tuple(wrap(part, source.rows, axis) for part in out)


def _kind_of(func: Any, given: Any, source: NodeTensor) -> torch.dtype | None:
    """Returns a result's dtype where it may be another one; torch's own error where there is none.

    It is asked of a few numbers: torch takes no mean of integers, say, and sums booleans as int64.
    """
    out = called(func, given, self=source.local.new_ones([2] * source.dim()))
    return out.dtype if isinstance(out, Tensor) else None


def reduction(*names: str) -> Any:
    """Registers how results of workers' rows are made into one of all."""

    def register(combine: Any) -> Any:
        @rule(*names)
        def reduce(func: Any, args: Any, kwargs: Any) -> Any:
            given = arguments(func, args, kwargs)
            source = given["self"]
            if "other" in given:
                return by_element(func, args, kwargs)
            dims = _dims(source, given.get("dim"))
            keepdim = bool(given.get("keepdim", False))
            if source.axis not in dims:
                out = called(func, given, self=source.local)
                return _wrapped(out, source, _kept_axis(source, dims, keepdim))
            usual = source.is_floating_point() and given.get("dtype") is None
            kind = None if usual else _kind_of(func, given, source)
            out = combine(func, given, source, dims, keepdim)
            return out if kind is None else out.to(kind)

        return combine

    return register


@reduction("sum", "nansum", "count_nonzero")
def _sum(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    usual = source.is_floating_point() and given.get("dtype") is None
    local = widened(source.local) if usual else source.local
    out = summed(called(func, given, self=local), source.rows)
    return as_kind(out, source.dtype) if out.dtype == local.dtype else out


@reduction("mean")
def _mean(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    count = math.prod(source.size(d) for d in dims)
    local, kind = source.local, given.get("dtype") or source.dtype
    total = summed(
        widened(local if kind == local.dtype else local.to(kind)).sum(dims, keepdim), source.rows
    )
    return as_kind(total / count if count else total * float("nan"), kind)


_MEAN, _PROD = (torch.mean, Tensor.mean), (torch.prod, Tensor.prod)


@method(torch.sum, Tensor.sum, *_MEAN, *_PROD)
def _learning(func: Any, args: Any, kwargs: Any) -> Any:
    """Sums and products over rows, whose gradient each worker makes for its own rows alone.

    That of PyTorch's operators is made of the plain result's, with all rows.
    """
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    source, dim = given.pop("input", None), given.pop("dim", None)
    keepdim, kind = bool(given.pop("keepdim", False)), given.pop("dtype", None)
    axes = [dim] if isinstance(dim, int) else dim or []
    if given or len(args) > 3 or not _learns(source, axes) or (func in _PROD and dim == axes):
        return as_it_is(func, args, kwargs)
    rows = source.rows
    if kind is not None:
        source = source.to(kind)
    dims, local = _dims(source, dim), widened(to_local(source, rows, source.axis))
    if func in _PROD:
        local = local.prod() if dim is None else local.prod(dim, keepdim)
        own = [rank == rows.comm.rank for rank in range(rows.comm.world_size)]
        everyone = torch.stack([local if mine else torch.zeros_like(local) for mine in own])
        out = _total(everyone, rows).prod(0)
    else:
        out = _total(local.sum(dims, keepdim), rows)
    if func in _MEAN:
        out = out / math.prod(source.size(d) for d in dims)
    return as_kind(out, source.dtype)


def _learns(source: Any, axes: Any) -> bool:
    """Returns whether a reduction along axes, none being all, is to have a gradient over rows."""
    learns = isinstance(source, NodeTensor) and source.requires_grad and torch.is_grad_enabled()
    if not learns or source.rows.comm.world_size == 1:
        return False
    size = source.dim()
    valid = all(type(axis) is int and -size <= axis < size for axis in axes)
    inside = torch._C._functorch.maybe_current_level() is not None
    return valid and source.axis in _dims(source, axes) and not inside


def _total(local: Tensor, rows: Rows) -> Tensor:
    """Returns the sum over workers, differentiable."""
    out: Tensor = Total.apply(local, rows.comm, ("", "", "node tensors"))
    return out


@method(torch.max, Tensor.max, torch.min, Tensor.min)
def _learning_extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """Extremes along the rows, with their places, each of which one worker has."""
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    source, dim = given.get("input"), given.get("dim")
    if len(given) - len(kwargs) < len(args) or type(dim) is not int or not _learns(source, [dim]):
        return as_it_is(func, args, kwargs)
    keepdim = bool(given.get("keepdim", False))
    found = as_it_is(func, (source.detach(), dim, keepdim), {})
    there = _ids(source) == (found.indices if keepdim else found.indices.unsqueeze(dim))
    local = torch.where(there, to_local(source, source.rows, source.axis), 0)
    return type(found)((_total(local.sum(dim, keepdim), source.rows), found.indices))


@method(torch.var_mean, torch.std_mean)
def _both(func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "dim", "unbiased", "keepdim"), args, strict=False)) | kwargs
    named = given.keys() <= {"input", "dim", "unbiased", "correction", "keepdim"}  # not axis=
    if not (named and isinstance(given["input"], NodeTensor)) or isinstance(given.get("dim"), bool):
        return as_it_is(func, args, kwargs)
    spread = torch.var if func is torch.var_mean else torch.std
    mean = _learning(
        torch.mean, (given["input"], given.get("dim"), given.get("keepdim", False)), {}
    )
    return as_it_is(spread, args, kwargs), mean


@method(
    *(F.l1_loss, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.hinge_embedding_loss),
    *(F.margin_ranking_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss),
    *(F.cosine_embedding_loss, F.multilabel_soft_margin_loss, F.multi_margin_loss),
)
def _reduced_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses that are a mean or a sum of each element's, or row's, inside of one function."""
    if func is F.l1_loss and "weight" not in kwargs:
        kwargs = {**kwargs, "weight": _forgotten_weight()}
    how = kwargs.get("reduction", "mean")
    other = ("weight", "size_average", "reduce")
    if len(args) > 3 or how == "none" or any(kwargs.get(name) is not None for name in other):
        return as_it_is(func, args, kwargs)
    each = as_it_is(func, args, {**kwargs, "reduction": "none"})
    return each.mean() if how == "mean" else each.sum() / (each.size(0) if how[0] == "b" else 1)


def _forgotten_weight() -> Any:
    """Returns the ``weight`` of ``F.l1_loss``, which PyTorch 2.13 doesn't tell of subclasses."""
    calls = (f for f in library_frames() if f.f_code.co_name == "l1_loss")
    frame = next(calls, None)
    return None if frame is None else frame.f_locals.get("weight")


def _largest(local: Tensor, dims: list[int], keepdim: bool, op: str) -> Tensor:
    """Returns extremes along axes; where there is nothing, what changes no extreme."""
    if all(local.shape):
        return getattr(local, f"a{op}")(dims, keepdim)
    shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
    out = local.new_full(shape, identity(local.dtype, op))
    return out if keepdim else out.reshape([n for d, n in enumerate(shape) if d not in dims])


def _extreme(op: str, func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Any:
    if not source.numel():
        raise RuntimeError(
            f"a{op}(): Expected reduction dim to be specified for input.numel() == 0"
        )
    if "dim" in given and isinstance(given["dim"], int):
        return _with_place(op, source, keepdim)
    return extreme(_largest(source.local, dims, keepdim, op), source.rows, op)


def _ids(source: NodeTensor) -> Tensor:
    """Returns the places of this worker's rows in the whole, along their axis."""
    shape = [-1 if d == source.axis else 1 for d in range(source.dim())]
    return source.rows.ids.to(source.device).view(shape)


def _with_place(
    op: str, source: NodeTensor, keepdim: bool, flat: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns extremes along the rows, and the first place that has each, or has NaN.

    With ``flat`` those of all numbers, which are counted through.
    """
    local, rows, ids, dims = source.local, source.rows, _ids(source), [source.axis]
    if flat:
        dims = list(range(source.dim()))
        steps = [math.prod(source.shape[d + 1 :]) for d in dims]
        ids = ids * steps[source.axis]
        for d, n in enumerate(source.shape):
            if d != source.axis:
                at = torch.arange(n, device=local.device).view(-1, *[1] * (dims[-1] - d))
                ids = ids + at * steps[d]
    found = extreme(_largest(local, dims, True, op), rows, op)
    places = torch.where((local == found) | (local != local), ids, source.numel())
    first = extreme(_largest(places, dims, True, "min"), rows, "min")
    return (found, first) if keepdim else (found.squeeze(dims), first.squeeze(dims))


@reduction("max", "amax")
def _max(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Any:
    return _extreme("max", func, given, source, dims, keepdim)


@reduction("min", "amin")
def _min(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Any:
    return _extreme("min", func, given, source, dims, keepdim)


@rule("_is_all_true", "_is_any_true")
def _is_true(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Asked by the checks of ``torch.distributions``."""
    return args[0].all() if "all" in func._schema.name else args[0].any()


@reduction("all")
def _all(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    return extreme(called(func, given, self=source.local), source.rows, "min")


@reduction("any")
def _any(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    return extreme(called(func, given, self=source.local), source.rows, "max")


@reduction("prod")
def _prod(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    local = called(func, given, self=source.local)
    everyone = source.rows.comm.all_gather(local, label=("", "", "node tensors"))
    return torch.stack(everyone).prod(0)


@reduction("linalg_vector_norm", "norm")
def _norm(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    order = given.get("ord", given.get("p", 2))
    order = 2 if order is None else float(order)
    kind = given.get("dtype")
    local = source.local.abs() if kind is None else source.local.to(kind).abs()
    if math.isinf(order):
        op = "max" if order > 0 else "min"
        return extreme(_largest(local, dims, keepdim, op), source.rows, op)
    kind, local = local.dtype, widened(local)
    if order == 0:
        return as_kind(summed((local != 0).to(local.dtype).sum(dims, keepdim), source.rows), kind)
    total = summed(local.pow(order).sum(dims, keepdim), source.rows)
    return as_kind(total.sqrt() if order == 2 else total.pow(1 / order), kind)


@reduction("var")
def _var(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    correction = given.get("correction", int(given.get("unbiased", 1)))
    count, local = math.prod(source.size(d) for d in dims), widened(source.local)
    mean = summed(local.sum(dims, True), source.rows) / count
    squares = summed((local - mean).abs().square().sum(dims, True), source.rows)
    left = count - (1 if correction is None else correction)
    var = as_kind(squares / left if left > 0 else squares * float("nan"), source.dtype)
    return var if keepdim else var.squeeze(dims)


@reduction("var_mean", "std_mean")
def _spread_and_mean(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Any:
    name = func._schema.name.rpartition("::")[2].partition("_")[0]
    spread = getattr(torch.ops.aten, name).correction
    return (
        spread(source, dims, correction=given.get("correction"), keepdim=keepdim),
        source.mean(dims, keepdim),
    )


@reduction("std")
def _std(func: Any, given: Any, source: NodeTensor, dims: Any, keepdim: bool) -> Tensor:
    return _var(func, given, source, dims, keepdim).sqrt()


# Along an axis ################################################################


@rule("_softmax", "_log_softmax", "_safe_softmax", "aminmax")
def _decomposed(func: Any, args: Any, kwargs: Any) -> Any:
    """Along the rows, or all axes, made of other reductions."""
    source, dim = args[0], arguments(func, args, kwargs)["dim"]
    along_rows = source.numel() and (dim is None or dim % source.dim() == source.axis)
    return (_asked_first if along_rows else _along)(func, args, kwargs)


@rule("argmax", "argmin")
def _place(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    source, dim = given["self"], given["dim"]
    flat = dim is None
    if not source.numel() or not (flat or dim % source.dim() == source.axis):
        return _along(func, args, kwargs)
    _kind_of(func, given, source)
    return _with_place(func._schema.name[-3:], source, given["keepdim"], flat)[1]


@rule("topk")
def _top(func: Any, args: Any, kwargs: Any) -> Any:
    """Merges the largest of each worker. Which of equal numbers PyTorch takes, all rows tell."""
    given = arguments(func, args, kwargs)
    source, k, largest = given["self"], given["k"], given["largest"]
    axis, rows = source.axis, source.rows
    if given["dim"] % source.dim() != axis or not 0 < k < rows.total:
        return _along(func, args, kwargs)
    values, places = source.local.topk(min(k + 1, rows.count), axis, largest)
    ids = _ids(source).expand(source.local.shape).gather(axis, places)
    values, ids = (torch.cat(every_rows(t.movedim(axis, 0), rows.comm)) for t in (values, ids))
    values, places = values.topk(k + 1, 0, largest)
    distinct = (values[1:] < values[:-1]) if largest else (values[1:] > values[:-1])
    if not bool(distinct.all()):  # Nor are NaN.
        return by_gathering(func, args, kwargs)
    return tuple(t[:k].movedim(0, axis) for t in (values, ids.gather(0, places)))


@rule("flip", "roll")
def _turned(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows in other places: each goes to the worker that has the row of its new place."""
    given = arguments(func, args, kwargs)
    source, dims, rows = given["self"], given["dims"], given["self"].rows
    dims, axis = [d % source.dim() for d in dims], source.axis
    if axis not in dims or not source.numel():
        return _along(func, args, kwargs)
    others, shifts = [d for d in dims if d != axis], given.get("shifts")
    if shifts is None:
        local, by = source.local.flip(others), None
    else:
        pairs = list(zip(shifts, dims, strict=True))
        moves = [n for n, d in pairs if d != axis]
        local = source.local.roll(moves, others) if others else source.local
        by = sum(n for n, d in pairs if d == axis) % rows.total

    def make() -> Rows:
        ids = rows.total - 1 - rows.ids if by is None else (rows.ids + by) % rows.total
        return Rows(rows.comm, rows.total, rows.count, ids)

    return wrap(rows.keep(("turned", by), None, make).moved(local, axis, rows), rows, axis)


@rule("cumsum", "cumprod", "logcumsumexp")
def _cumulated(func: Any, args: Any, kwargs: Any) -> Any:
    """Each worker takes a run of the rows, behind what those before it come to."""
    given = arguments(func, args, kwargs)
    source, axis = given["self"], given["self"].axis
    if given["dim"] % source.dim() != axis or not source.numel():
        return _along(func, args, kwargs)
    rows, comm = source.rows, source.rows.comm
    runs = rows.share(rows.total)
    local = rows.moved(source.local, axis, runs)
    out = called(func, given, self=local)
    shape = [1 if d == axis else n for d, n in enumerate(out.shape)]
    last = out.narrow(axis, -1, 1).contiguous() if runs.count else out.new_zeros(shape)
    ends = comm.all_gather(last, label=("", "", "node tensors"))
    starts = [rows.total * rank // comm.world_size for rank in range(comm.rank + 1)]
    before = [end for end, a, b in zip(ends, starts, starts[1:], strict=False) if a < b]
    if before:
        first = called(func, given, self=torch.cat(before, axis)).narrow(axis, -1, 1)
        out = called(func, given, self=torch.cat([first, local.to(out.dtype)], axis))
        out = out.narrow(axis, 1, runs.count)
    return wrap(runs.moved(out, axis, rows), rows, axis)


@rule(
    *("sort", "cummax", "cummin", "kthvalue", "median"),
    *("mode", "_cummax_helper", "nanmedian", "glu"),
    *("_fft_r2c", "_fft_c2c", "_fft_c2r"),
    *("trace", "tril", "triu"),
)
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    """Along an axis of each row; along the rows, and without an axis, they are gathered."""
    given = arguments(func, args, kwargs)
    source = given["self"] if "self" in given else given["input"]
    dim = given.get("dim", given.get("dims"))
    dims = _dims(source, dim)
    if func._schema.name == "aten::flip" and source.edges is not None and dims == [0]:
        turned = wrap(source._local, source.rows, 1)
        turned.edges = source.edges.changed(lambda edges: edges.flip(0))
        turned.make = ids_of(source, lambda ids: ids.flip(0))
        return turned
    if dim is None or source.axis in dims or not isinstance(source, NodeTensor):
        return by_gathering(func, args, kwargs)
    name, local = "self" if "self" in given else "input", source.local
    if not source.rows.count:  # Fourier transforms, say, want a row.
        shape = [1 if d == source.axis else n for d, n in enumerate(local.shape)]
        local = local.new_zeros(shape)
    out = called(func, given, **{name: local})
    parts = out if isinstance(out, tuple | list) else (out,)
    keeps = all(part.dim() == source.dim() for part in parts)
    axis = source.axis if keeps else _kept_axis(source, dims, False)
    here = [part.narrow(axis, 0, source.rows.count) for part in parts]
    return _wrapped(here[0] if isinstance(out, Tensor) else here, source, axis)


@rule("linalg_cross")
def _cross(func: Any, args: Any, kwargs: Any) -> Any:
    """Products of vectors along an axis, which each row has whole."""
    given = arguments(func, args, kwargs)
    first = next(iter(node_tensors(args)))
    along = given["dim"] % max(t.dim() for t in (given["self"], given["other"]))
    gather = along == first.axis or given["self"].dim() != given["other"].dim()
    return (by_gathering if gather else by_element)(func, args, kwargs)


# Others without a rule are, too; these two would be taken for what they are composed of.
rule("_sparse_coo_tensor_unsafe", "repeat_interleave")(by_gathering)


@rule("linalg_lstsq")
def _of_first(func: Any, args: Any, kwargs: Any) -> Any:
    """Gathers the rows and calls an operator that rounds equal numbers differently: rank 0's count.

    PyTorch lets its default driver begin with memory that was never written.
    """
    comm = node_tensors(args, kwargs)[0].rows.comm
    out = by_gathering(func, args, kwargs)
    if comm.world_size == 1:
        return out
    shapes = comm.broadcast_object([list(part.shape) for part in out])  # The rank tells them.
    same = (
        part.contiguous() if list(part.shape) == shape else part.new_empty(shape)
        for part, shape in zip(out, shapes, strict=True)
    )
    return tuple(comm.broadcast(part) if part.numel() else part for part in same)


@rule("bincount")
def _bincount(func: Any, args: Any, kwargs: Any) -> Any:
    """Counts on each worker, which are summed."""
    given = arguments(func, args, kwargs)
    index, weights = given["self"], given["weights"]
    rows = node_tensors(index, weights)[0].rows
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        return by_gathering(func, args, kwargs)  # PyTorch's error
    local = own(index, rows, 0)
    least, most = (int(n) for n in local.aminmax()) if local.numel() else (0, -1)
    facts = torch.tensor([-least, most], device=rows.comm.device)
    least, most = rows.comm.all_reduce(facts, "max", label=("", "", "node tensors")).tolist()
    if least > 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    weights = None if weights is None else own(weights, rows, 0)
    return summed(torch.bincount(local, weights, max(given["minlength"], most + 1)), rows)


@rule("equal")
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    left, right = args
    if left.shape != right.shape:
        return False
    return bool((left == right).all())


@rule("is_same_size")
def _same_size(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


# Norms of each row ############################################################


@rule("native_layer_norm")
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    source, shape, weight, bias, eps = args
    axes = source.dim() - len(shape)
    if not isinstance(source, NodeTensor) or source.axis >= axes or node_tensors(weight, bias):
        return by_gathering(func, args, kwargs)
    found = func(source.local, shape, weight, bias, eps)
    return tuple(wrap(t, source.rows, source.axis) for t in found)


@rule("native_layer_norm_backward")
def _layer_norm_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, source, shape, mean, rstd, weight, bias, mask = args
    first = next(iter(node_tensors(source, gradient)), None)
    if first is None or first.axis >= first.dim() - len(shape):
        return by_gathering(func, args, kwargs)
    rows, axis = first.rows, first.axis
    weight, bias = (whole(t, "layer_norm()") for t in (weight, bias))
    out = func(
        *(own(gradient, rows, axis), own(source, rows, axis), shape),
        *(own(mean, rows, axis), own(rstd, rows, axis), weight, bias, mask),
    )
    inner, *parameters = out
    inner = None if inner is None else wrap(inner, rows, axis)
    return (inner, *(None if p is None else summed(p, rows) for p in parameters))


# Losses #######################################################################


@rule(
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "logsumexp"),
    "binary_cross_entropy_with_logits",
)
def _asked_first(func: Any, args: Any, kwargs: Any) -> Any:
    """Decomposed, but for PyTorch's own error, which it is asked for by a few numbers."""
    few = lambda t: torch.ones([2] * t.dim(), dtype=t.dtype, device=t.device)  # noqa: E731
    func(*mapped(few, args), **mapped(few, kwargs))
    return by_decomposition(func, args, kwargs)


@rule("binary_cross_entropy")
def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's kernel refuses probabilities beyond 0 and 1, of which each worker has its own."""
    tensors = args[:2]
    rows, axis = place(node_tensors(tensors))
    func(*(beside(func, t, rows, axis, tensors) for t in tensors), None, 0)
    return _asked_first(func, args, kwargs)


rule(
    *("mse_loss_backward", "binary_cross_entropy_backward", "smooth_l1_loss_backward"),
    *("huber_loss_backward", "soft_margin_loss_backward", "glu_backward"),
    *("_softmax_backward_data", "_log_softmax_backward_data"),
)(by_decomposition)


@rule("nll_loss_forward")
def _nll_loss(func: Any, args: Any, kwargs: Any) -> Any:
    scores, target, weight, how, ignored = args
    first = next(iter(node_tensors(scores, target)))
    rows = first.rows
    if scores.dim() != 2 or (isinstance(scores, NodeTensor) and scores.axis != 0):
        return by_gathering(func, args, kwargs)
    scores, target = own(scores, rows, 0), own(target, rows, 0)
    weight = whole(weight, "nll_loss")
    if how == 0:
        each, none = func(scores, target, weight, 0, ignored)
        return wrap(each, rows, 0), none
    kind, wide = scores.dtype, None if weight is None else widened(weight)
    total, weights = func(widened(scores), target, wide, 2, ignored)
    facts = summed(torch.stack([total.reshape(()), weights.reshape(())]), rows)
    total, weights = facts.unbind()
    return as_kind(total / weights if how == 1 else total, kind), weights


@rule("nll_loss_backward")
def _nll_loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, scores, target, weight, how, ignored, total = args
    first = next(iter(node_tensors(scores, target, gradient)))
    rows = first.rows
    if scores.dim() != 2 or (isinstance(scores, NodeTensor) and scores.axis != 0):
        return by_gathering(func, args, kwargs)
    if gradient.dim():
        gradient = own(gradient, rows, 0)
    scores, target = own(scores, rows, 0), own(target, rows, 0)
    weight, kind = whole(weight, "nll_loss"), scores.dtype
    values = (None if t is None else widened(t) for t in (gradient, scores, weight, total))
    gradient, scores, weight, total = values
    out = func(gradient, scores, target, weight, how, ignored, total)
    return wrap(as_kind(out, kind), rows, 0)
