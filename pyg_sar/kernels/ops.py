"""The C++ kernels' Python face (sources in ``extensions/``), and the same in PyTorch.

``ops.built`` tells whether the kernels are there, and loads them: an attribute that is looked up
when it is read, so that TorchScript and ``torch.compile`` take it for a constant, and importing
this module loads nothing.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from pyg_sar.kernels import KernelWarning, fallback, on_gpu
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.kernels.scores import declared

_LIBRARY = "_kernels.so"
_REASON = "_no_kernels.txt"  # What setup.py says of a build that failed.


def not_built(library: str, reason: str) -> str | None:
    """Returns that a library of the package was not built, and why; ``None`` where it is there."""
    folder = Path(__file__).parent.parent
    if (folder / library).exists():
        return None
    said = folder / reason
    why = f" ({said.read_text().strip()})" if said.exists() else ""
    return f"not built when it was installed{why}"


@cache
def why_missing() -> str | None:
    """Loads the kernels on first use; returns why there are none, or ``None`` where there are."""
    if (reason := not_built(_LIBRARY, _REASON)) is not None:
        return f"they were {reason}"
    path = Path(__file__).parent.parent / _LIBRARY
    try:
        torch.ops.load_library(str(path))
        runs_here = bool(torch.ops.pyg_sar.runs_here())
    except (AttributeError, OSError, RuntimeError) as error:
        return f"{path} can't be loaded: {error}"
    if not runs_here:
        return "this x86-64 processor has no AVX2 and FMA"
    _register()
    return None


def run(operator: Any, *given: Any) -> Any:
    """Calls an operator, and raises its errors as what they are."""
    try:
        return operator(*given)
    except RuntimeError as error:
        raise named(error) from None


def named(error: RuntimeError) -> Exception:
    """Returns an operator's error as what it is.

    PyTorch's stable ABI has ``RuntimeError`` alone: another kind is what the message begins with
    (``Error`` in ``extensions/tensors.h``).
    """
    kind, _, text = str(error).partition(": ")
    kinds = {"ValueError": ValueError, "TypeError": TypeError, "IndexError": IndexError}
    return kinds[kind](text) if kind in kinds else error


def __getattr__(name: str) -> Any:
    if name == "built":
        return why_missing() is None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def warn_if_missing() -> None:
    """Warns, once in a process, where there are no kernels."""
    reason = why_missing()
    if reason is not None:
        warnings.warn(
            f"pyg_sar runs without its C++ kernels, with the same results but slower: {reason}. "
            "Install it after PyTorch, with a C++ compiler at hand; "
            "SARPolicy(kernels='off') silences this",
            KernelWarning,
            stacklevel=2,
        )


def takes(rows: Tensor) -> bool:
    """Tells whether the kernels are made for tensors of this device and dtype."""
    return rows.device.type == "cpu" and rows.dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
    )


def made_for(rows: Tensor) -> bool:
    """Tells whether kernels, in C++ or Triton, are made for tensors of this device and dtype."""
    return takes(rows) or on_gpu.takes(rows)


def why_missing_on(device: torch.device) -> str | None:
    """Returns why there are no kernels for tensors of a device, or ``None`` where there are."""
    return on_gpu.why_missing() if device.type == on_gpu.DEVICE else why_missing()


def warn_if_missing_on(device: torch.device) -> None:
    """Warns, once in a process, where there are no kernels for a device."""
    if device.type == on_gpu.DEVICE:
        on_gpu.warn_if_missing()
    else:
        warn_if_missing()


def use_kernel(native: bool | None, fits: bool) -> bool:
    """Tells whether to call the kernel: asked for, or there and made for the tensors."""
    if native is None:
        return fits and why_missing() is None
    if native and (reason := why_missing()) is not None:
        raise RuntimeError(f"pyg_sar has no C++ kernels: {reason}")
    return native


def _operator(name: str, rows: Tensor, native: bool | None) -> Any:
    """The operator for tensors like ``rows``: by Triton, in C++, or PyTorch's."""
    if native is None and on_gpu.takes(rows):
        return on_gpu.sums_operator(name, rows)
    return getattr(torch.ops.pyg_sar if use_kernel(native, takes(rows)) else fallback, name)


def check_not_recorded(name: str, *tensors: Tensor) -> None:
    """Raises ``ValueError`` where autograd would have to record an operator without a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{name} is not recorded by autograd, and was given tensors that require a gradient: "
            "call it under torch.no_grad()"
        )


def sort_edges(
    key: Tensor, num_keys: int, order: Tensor | None = None, *, native: bool | None = None
) -> tuple[Tensor, Tensor]:
    r"""Sorts edges by a key, stably, and says where each key's edges begin.

    A counting sort, so that edges are sorted by two keys by sorting them by the second, then by the
    first: ``sort_edges(first, n, sort_edges(second, m)[0])``.

    Args:
        key: ``[E]``, int32 or int64, in :math:`[0, \mathrm{num\_keys})`.
        num_keys: Keys that there may be.
        order: Numbers of the edges in the order in which ties are left, ``[E]``; ``None``: as they
            are.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Returns:
        The edges' numbers in the order of their keys, ``[E]``, and the place of each key's first
        edge in it, ``[num_keys + 1]``: int32 where the number of edges fits, else int64.

    Raises:
        ValueError: Shapes don't fit.
        TypeError: Dtypes don't fit.
        IndexError: A key is out of range.
        RuntimeError: The kernel was asked for and is missing.
    """
    narrow = torch.int32 if key.numel() < 2**31 else torch.int64
    if order is not None:
        order = order.to(narrow)
    if use_kernel(native, key.device.type == "cpu" and key.dtype in (torch.int32, torch.int64)):
        found: tuple[Tensor, Tensor] = run(torch.ops.pyg_sar.sort_edges, key, num_keys, order)
        return found
    if key.numel() and not (0 <= int(key.min()) and int(key.max()) < num_keys):
        raise IndexError(f"sort_edges: expected keys in [0, {num_keys})")
    return fallback.sort_edges(key, num_keys, order)


def transpose(
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    num_rows: int,
    num_targets: int,
    *,
    numbered: bool = False,
    native: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Edges in the order of their targets, put into the order of the rows that they read.

    Args:
        source: The row that each edge reads, ``[E]``, int32 or int64.
        offsets: The first edge of each target, and at last E: ``[U + 1]``, of the same dtype.
        targets: The targets' rows, ``[U]``, int64, ascending; ``None``: rows 0 to U - 1.
        num_rows: Rows that are read, M.
        num_targets: Rows that are added to.
        numbered: Whether the edges' numbers are wanted.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Returns:
        Each edge's target row, ``[E]``; the first edge of each row that is read, and at last E,
        ``[M + 1]``; each edge's number in the given order, ``[E]``, or ``None``. Edges of a row
        stay in order.

    Raises:
        ValueError: Shapes don't fit, or edges are not sorted.
        TypeError: Dtypes don't fit.
        IndexError: An index is out of range.
        RuntimeError: The kernel was asked for and is missing.
    """
    given = (source, offsets, targets, None, num_rows, num_targets, numbered)
    if use_kernel(native, source.device.type == "cpu"):
        rows, first, numbers = run(torch.ops.pyg_sar.transpose, *given)
        return rows, first, numbers if numbered else None
    if source.numel() and not (0 <= int(source.min()) and int(source.max()) < num_rows):
        raise IndexError(f"transpose: expected rows in [0, {num_rows})")
    rows, first, numbers = fallback.transpose(*given)
    return rows, first, numbers if numbered else None


def gather_sum_(
    out: Tensor,
    rows: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None = None,
    weight: Tensor | None = None,
    edges: Tensor | None = None,
    *,
    native: bool | None = None,
) -> Tensor:
    r"""Adds gathered rows to their targets, in place, without materializing a message.

    .. math::
        \mathrm{out}_{t_k} \mathrel{+}= \sum_{e = o_k}^{o_{k+1} - 1} w_{n(e)} \,
        \mathrm{rows}_{s(e)} \quad \text{for all targets } k

    A sparse-dense product that accumulates, with the edges grouped by target, as in compressed
    sparse rows (the "copy-reduce" of DistGNN, Md et al., SC 2021). Its transpose, for the backward
    pass, is the same on edges grouped by source. bfloat16 accumulates in float32, and is rounded
    once per target and call. The kernel's result doesn't depend on the number of threads. Not
    recorded by autograd.

    Args:
        out: ``[N, F]``, float32, float64 or bfloat16 (the kernel), any dtype (PyTorch); each row in
            one piece.
        rows: ``[M, F]``, of the same dtype, any strides.
        source: The row :math:`s(e)` of each edge, ``[E]``, int32 or int64.
        offsets: The first edge :math:`o_k` of each target, and at last :math:`E`: ``[U + 1]``.
        targets: Rows :math:`t_k` of ``out``, ``[U]``, int64, ascending; ``None``: the first U.
        weight: ``[E]``, float64 for float64 rows, else float32; ``None`` for 1.
        edges: The place :math:`n(e)` of each edge's weight in ``weight``, ``[E]``; ``None``: in
            order.
        native: Whether to use the kernel; ``None``: where it is there and made for the tensors.

    Returns:
        ``out``.

    Raises:
        ValueError: Shapes don't fit, ``offsets`` don't ascend from 0 to E, or autograd would have
            to record this.
        TypeError: Dtypes don't fit.
        IndexError: An index is out of range.
        RuntimeError: The kernel was asked for and is missing, or ``out`` and ``rows`` overlap.
    """
    if torch.is_grad_enabled():
        check_not_recorded("gather_sum_", out, rows)
    add = _operator("gather_sum_", out, native)
    try:  # run(), which is a call more
        add(out, rows, source, offsets, targets, weight, edges)
    except RuntimeError as error:
        raise named(error) from None
    return out


def edge_dot(
    rows: Tensor,
    gradient: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None = None,
    edges: Tensor | None = None,
    *,
    native: bool | None = None,
) -> Tensor:
    r"""Inner products of gathered rows with their targets' rows: the gradient of weights.

    .. math::
        \mathrm{out}_{n(e)} = \langle \mathrm{rows}_{s(e)}, \mathrm{gradient}_{t_k} \rangle
        \quad \text{for } o_k \le e < o_{k+1}

    Args:
        rows: ``[M, F]``, float32, float64 or bfloat16 (the kernel), any dtype (PyTorch).
        gradient: ``[N, F]``, of the same dtype.
        source: See :func:`gather_sum_`, as of ``offsets``, ``targets``, ``edges`` and ``native``.
        offsets: ``[U + 1]``.
        targets: ``[U]``.
        edges: Each edge's place in the result, ``[E]``, once each; ``None``: in order.
        native: Whether to use the kernel.

    Returns:
        ``[E]``, float32 for bfloat16 rows, else of their dtype.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: See :func:`gather_sum_`.
    """
    check_not_recorded("edge_dot", rows, gradient)
    multiply = _operator("edge_dot", rows, native)
    found: Tensor = run(multiply, rows, gradient, source, offsets, targets, edges)
    return found


def extremum_(
    best: Tensor,
    ties: Tensor,
    rows: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None = None,
    largest: bool = True,
) -> None:
    r"""Merges gathered rows into their targets' extrema, in place, and counts who reaches them.

    .. math::
        b_{t_k} \leftarrow \max(b_{t_k}, \max_{o_k \le e < o_{k+1}} \mathrm{rows}_{s(e)}), \qquad
        n_{t_k} = \#\{e: \mathrm{rows}_{s(e)} = b_{t_k}\}

    column by column, or the minimum. NaN wins over all numbers, and is counted as 0. On a CPU there
    is no implementation but the kernel: see :class:`pyg_sar.engine.kernels.sums.Extremum`.

    Args:
        best: The extrema so far, ``[N, F]``, float32 or float64; infinite at first.
        ties: The edges that reach them so far, ``[N, F]``, of the same dtype.
        rows: ``[M, F]``, of the same dtype.
        source: See :func:`gather_sum_`, as of ``offsets`` and ``targets``; int32.
        offsets: ``[U + 1]``.
        targets: ``[U]``.
        largest: Whether the extremum is the maximum.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: See :func:`gather_sum_`.
    """
    merge = _operator("extremum_", best, None if on_gpu.takes(best) else True)
    run(merge, best, ties, rows, source, offsets, targets, largest)


def extremum_backward_(
    total: Tensor,
    rows: Tensor,
    gradient: Tensor,
    best: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None = None,
) -> Tensor:
    r"""Adds the gradients of rows that reach extrema, over edges grouped by the rows they read.

    .. math::
        \mathrm{total}_{t_k} \mathrel{+}= \sum_{o_k \le e < o_{k+1}} g_{s(e)} \,
        [\mathrm{rows}_{t_k} = b_{s(e)}]

    Args:
        total: ``[M, F]``, float32 or float64.
        rows: The rows that were read, ``[M, F]``.
        gradient: The gradient of the extrema, shared between those that reach them, ``[N, F]``.
        best: The extrema, ``[N, F]``.
        source: The target of each edge, ``[E]``, int32; see :func:`gather_sum_`.
        offsets: ``[U + 1]``.
        targets: The row that its edges read, ``[U]``.

    Returns:
        How many values reached an extremum, ``[]``, int64.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: See :func:`gather_sum_`.
    """
    add = _operator("extremum_backward_", total, None if on_gpu.takes(total) else True)
    found: Tensor = run(add, total, rows, gradient, best, source, offsets, targets)
    return found


# Shapes #######################################################################
#
# PyTorch's stable ABI has no symbolic sizes and no autograd: what code that is traced and recorded
# needs of the operators is registered from here when the library is loaded. Arguments are checked
# when a kernel runs.


def _nothing(*arguments: Any) -> None:
    """Of operators that add in place."""


def _sort_edges(key: Tensor, num_keys: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    dtype = torch.int32 if key.numel() < 2**31 else torch.int64
    return key.new_empty(key.numel(), dtype=dtype), key.new_empty(num_keys + 1, dtype=dtype)


def _transpose(
    source: Tensor,
    offsets: Tensor,
    targets: Any,
    edges: Any,
    num_rows: int,
    num_targets: int,
    numbered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    count = source.numel()
    numbers = source.new_empty(count if numbered else 0)
    return source.new_empty(count), source.new_empty(num_rows + 1), numbers


def _edge_dot(rows: Tensor, gradient: Tensor, source: Tensor, *others: Any) -> Tensor:
    return rows.new_empty(source.shape, dtype=wide_dtype(rows.dtype))


def _gather_sum(rows: Tensor, *others: Any) -> Tensor:
    return rows.new_empty(others[-1], rows.size(1))


def _extremum_backward(total: Tensor, *others: Any) -> Tensor:
    return total.new_empty((), dtype=torch.int64)


def _attention(kind: int, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = others[-1], value.size(1)
    return value.new_empty(*shape, value.size(2)), value.new_empty(shape), value.new_empty(shape)


def _philox_rows(ids: Tensor, width: int, low: int, high: int) -> Tensor:
    return ids.new_empty(ids.size(0), width)


def _bernoulli_rows(
    state: Tensor, ids: Tensor, order: Any, total: int, width: int, p: float
) -> Any:
    return ids.new_empty(ids.size(0), width, dtype=torch.bool), state.new_empty(state.shape)


def _columns(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(2, x.size(1), dtype=torch.float64)


def _scale_rows(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


_SHAPES: dict[str, Any] = {
    "gather_sum_": _nothing,
    "extremum_": _nothing,
    "attention_": _nothing,
    "attention_backward_sources_": _nothing,
    "attention_backward_targets_": _nothing,
    "sort_edges": _sort_edges,
    "transpose": _transpose,
    "edge_dot": _edge_dot,
    "gather_sum": _gather_sum,
    "extremum_backward_": _extremum_backward,
    "attention": _attention,
    "philox_rows": _philox_rows,
    "bernoulli_rows": _bernoulli_rows,
    "column_moments": _columns,
    "column_products": _columns,
    "scale_rows": _scale_rows,
}


# Gradients ####################################################################
#
# Made of the operators that add in place, so that they are traced and functionalized as these are.
# What a shard at a time needs (pyg_sar/engine/fused_attention.py) is not a function of its inputs
# alone, and calls the operators in place itself.


def _check_once(name: str) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"pyg_sar::{name} has no second derivatives: call it without create_graph=True"
        )


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, source, offsets, targets, weight, edges, _ = inputs
    ctx.num_rows = rows.size(0)
    kept = rows if ctx.needs_input_grad[4] else None
    ctx.save_for_backward(kept, source, offsets, targets, weight, edges)


def _sum_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    _check_once("gather_sum")
    kernels = torch.ops.pyg_sar
    rows, source, offsets, targets, weight, edges = ctx.saved_tensors
    of_rows = of_weight = None
    if ctx.needs_input_grad[0]:
        numbered = weight is not None
        given = source, offsets, targets, edges, ctx.num_rows, gradient.size(0), numbered
        source_rows, first, numbers = kernels.transpose(*given)
        of_rows = gradient.new_zeros(ctx.num_rows, gradient.size(1))
        places = source_rows, first, None, weight, numbers if numbered else None
        kernels.gather_sum_(of_rows, gradient, *places)
    if ctx.needs_input_grad[4]:
        of_weight = kernels.edge_dot(rows, gradient, source, offsets, targets, edges)
    return of_rows, None, None, None, of_weight, None, None


_WANTED = {1: "value", 2: "key", 3: "query", 4: "att", 5: "edge_attr", 6: "edge_weight"}
"""Inputs of ``attention`` that have a gradient."""


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = [*inputs[1:7], *inputs[9:14]]
    ctx.numbers = inputs[0], *inputs[7:9], *inputs[14:17]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _attention_backward(ctx: Any, grad_out: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    _check_once("attention")
    kernels = torch.ops.pyg_sar
    kind, slope, scale, low, high, p = ctx.numbers
    saved = ctx.saved_tensors  # Once: what torch.utils.checkpoint packs is unpacked once.
    floats, (source, offsets, targets, edges, drop_key) = saved[:6], saved[6:11]
    out, *state = saved[11:]
    found = {
        name: torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for (place, name), tensor in zip(_WANTED.items(), floats, strict=True)
        if ctx.needs_input_grad[place]
    }
    grad_out = grad_out.contiguous()
    known = grad_out, *state, (grad_out * out).sum(-1)
    scores = kind, *floats, slope, scale
    words = drop_key, low, high, p
    names = "query", "edge_attr", "edge_weight"
    by_source = declared()[kind].by_source
    sources = ["value", "key", *(names if by_source else ())]
    if any(name in found for name in sources):
        numbered = floats[4] is not None or drop_key is not None
        given = source, offsets, targets, edges, floats[0].size(0), grad_out.size(0), numbered
        rows, first, numbers = kernels.transpose(*given)
        written = [found.get(n) if n in sources else None for n in ("value", "key", *names)]
        transposed = rows, first, None, numbers if numbered else None
        kernels.attention_backward_sources_(*written, *known, *scores, *transposed, *words)
    by_target = [found.get(name) for name in ("query", "att", "edge_attr", "edge_weight")]
    if not by_source and any(tensor is not None for tensor in by_target):
        kernels.attention_backward_targets_(
            *by_target, *known, *scores, source, offsets, targets, edges, *words
        )
    return tuple(found.get(_WANTED.get(place, "")) for place in range(18))


@cache
def _register() -> Library:
    """Registers shapes and gradients with the operators of the library, which is loaded."""
    library = Library("pyg_sar", "FRAGMENT")
    for name, shape in _SHAPES.items():
        register_fake(f"pyg_sar::{name}", shape, lib=library)
    sums, attention = "pyg_sar::gather_sum", "pyg_sar::attention"
    register_autograd(sums, _sum_backward, setup_context=_keep_sum, lib=library)
    register_autograd(attention, _attention_backward, setup_context=_keep_attention, lib=library)
    return library
