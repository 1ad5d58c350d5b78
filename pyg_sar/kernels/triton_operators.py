"""The operators by Triton: arguments as those of :mod:`pyg_sar.kernels.fallback`, and the launches.

Shapes are checked here, and numbers by the device: an index out of range ends the process's use of
the GPU by an assertion, as PyTorch's own operators do, and nothing waits for the check. Importing
this module needs ``triton``; :mod:`pyg_sar.kernels.on_gpu` says who may call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.kernels import triton_attention, triton_sums
from pyg_sar.kernels.attention_terms import Arguments, check_sums, wide_dtype
from pyg_sar.kernels.fallback import threshold
from pyg_sar.kernels.scores import declared
from pyg_sar.wording import counted

CHUNK = 1024  # Edges; see [Note: edges by chunks] in triton_sums.
# Numbers of a tile, of which a program has a few at a time, and its warps: the fastest of those
# that benchmarks/gpu_kernels.py tried on an H200.
SUMS, PRODUCTS = (512, 2), (1024, 1)
FORWARD, BACKWARD = (256, 1), (256, 2)
LARGEST_TILE = 8192  # of one edge: heads times channels, each filled up to a power of two
CHECKED = 1024  # Edges, or targets, that a program checks.
SLOTS = 32  # Copies of what all edges add to.


def gather_sum_(
    out: Tensor,
    rows: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    weight: Tensor | None,
    edges: Tensor | None,
    *,
    chunk: int = CHUNK,
) -> None:
    """See :func:`pyg_sar.kernels.ops.gather_sum_`."""
    check_sums("gather_sum", out, rows, source, offsets, targets, weight, numbers=False)
    if source.numel() == 0 or out.size(1) == 0:
        return
    _check_rows("gather_sum", out=out)
    _check_edges(source, offsets, targets, edges, rows.size(0), out.size(0), source.numel())
    width = out.size(1)

    def launch(to: Tensor, pieces: Tensor | None, programs: int) -> None:
        triton_sums.gather_sum[_grid(programs, width)](
            *(to, pieces, rows, *_flat(source, offsets, targets, weight, edges), width),
            *(offsets.numel() - 1, chunk, to.stride(0), *rows.stride()),
            CHUNKS=to is not out,
            **_blocks(width, out.dtype, SUMS),
        )

    with _on(out):
        pieces = _of_chunks(source, chunk, wide_dtype(out.dtype), width)
        if pieces is not None:
            launch(pieces, None, pieces.size(0))
        launch(out, pieces, offsets.numel() - 1)


def edge_dot(
    rows: Tensor,
    gradient: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    edges: Tensor | None,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """See :func:`pyg_sar.kernels.ops.edge_dot`."""
    check_sums("edge_dot", gradient, rows, source, offsets, targets, None, numbers=False)
    out = torch.zeros(source.numel(), dtype=wide_dtype(rows.dtype), device=rows.device)
    if source.numel() == 0 or rows.size(1) == 0:
        return out
    counts = rows.size(0), gradient.size(0), source.numel()
    _check_edges(source, offsets, targets, edges, *counts)

    def launch(programs: int, chunks: bool) -> None:
        triton_sums.edge_dot[(programs,)](
            *(out, rows, gradient, *_flat(source, offsets, targets, edges)),
            *(rows.size(1), offsets.numel() - 1, chunk, *rows.stride(), *gradient.stride()),
            CHUNKS=chunks,
            **_blocks(rows.size(1), rows.dtype, PRODUCTS),
        )

    with _on(out):
        if source.numel() >= chunk:
            launch(source.numel() // chunk, True)
        launch(offsets.numel() - 1, False)
    return out


def extremum_(
    best: Tensor,
    ties: Tensor,
    rows: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    largest: bool,
) -> None:
    """See :func:`pyg_sar.kernels.ops.extremum_`."""
    for name, tensor in (("extremum", best), ("extremum's ties", ties)):
        check_sums(name, tensor, rows, source, offsets, targets, None, numbers=False)
    if source.numel() == 0 or best.size(1) == 0:
        return
    _check_rows("extremum", best=best, ties=ties)
    _check_edges(source, offsets, targets, None, rows.size(0), best.size(0), 0)
    with _on(best):
        triton_sums.extremum[_grid(offsets.numel() - 1, best.size(1))](
            best,
            ties,
            rows,
            *_flat(source, offsets, targets),
            best.size(1),
            best.stride(0),
            ties.stride(0),
            *rows.stride(),
            LARGEST=largest,
            **_blocks(best.size(1), best.dtype, SUMS),
        )


def extremum_backward_(
    total: Tensor,
    rows: Tensor,
    gradient: Tensor,
    best: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
) -> Tensor:
    """See :func:`pyg_sar.kernels.ops.extremum_backward_`."""
    for name, tensor in (("gradient", gradient), ("best", best)):
        check_sums(
            f"extremum's {name}", total, tensor, source, offsets, targets, None, numbers=False
        )
    if source.numel() == 0 or total.size(1) == 0:
        return torch.zeros((), dtype=torch.long, device=total.device)
    _check_rows("extremum", total=total)
    _check_edges(source, offsets, targets, None, best.size(0), total.size(0), 0)
    grid = _grid(offsets.numel() - 1, total.size(1))
    hits = torch.zeros(grid, dtype=torch.long, device=total.device)
    with _on(total):
        triton_sums.extremum_backward[grid](
            total,
            hits,
            rows,
            gradient,
            best,
            *_flat(source, offsets, targets),
            total.size(1),
            total.stride(0),
            *rows.stride(),
            *gradient.stride(),
            *best.stride(),
            **_blocks(total.size(1), total.dtype, SUMS),
        )
    return hits.sum()


# Attention ####################################################################


def fits(heads: int, channels: int) -> bool:
    """Tells whether a tile of the kernels holds an edge's numbers."""
    tile = triton.next_power_of_2(heads) * triton.next_power_of_2(channels)
    return heads > 0 and channels > 0 and bool(tile <= LARGEST_TILE)


def attention_(
    acc: Tensor, maximum: Tensor, normaliser: Tensor, *given: Any, chunk: int = CHUNK
) -> None:
    """See :func:`pyg_sar.kernels.attention_ops.attention_`; halves are not widened before.

    Args:
        acc, maximum, normaliser: The state.
        given: :class:`~pyg_sar.kernels.attention_terms.Arguments`.
        chunk: Edges of a chunk.
    """
    a = Arguments(*given)
    if a.source.numel() == 0:
        return
    _check_rows("attention", acc=acc, maximum=maximum, normaliser=normaliser)
    numbered = _numbered(a.edge_attr, a.drop_key)
    edges = a.edges if numbered else None
    _check_edges(a.source, a.offsets, a.targets, edges, a.value.size(0), acc.size(0), numbered)
    read, states = _read(a), (acc, maximum, normaliser)

    def launch(to: Sequence[Tensor], pieces: Sequence[Tensor | None], programs: int) -> None:
        triton_attention.forward[(programs,)](
            *(*to, *pieces, *read, *_flat(a.source, a.offsets, a.targets, edges, a.drop_key)),
            *(a.low, a.high, *_counts(a), chunk, *(t.stride(0) for t in to)),
            *_strides(a.value, a.key, a.query, a.edge_attr),
            **_settings(a, acc.dtype, FORWARD),
            LOWEST=torch.finfo(acc.dtype).min,
            CHUNKS=to is not states,
        )

    with _on(acc):
        pieces = [
            _of_chunks(a.source, chunk, acc.dtype, *state.shape[1:], fill=fill)
            for state, fill in zip(states, (0, -torch.inf, 0), strict=True)
        ]
        found = [t for t in pieces if t is not None]
        if found:
            launch(found, (None, None, None), found[0].size(0))
        launch(states, pieces, a.offsets.numel() - 1)


def attention_backward_(*given: Any, chunk: int = CHUNK) -> None:
    """Adds the gradients that are wanted of a shard's edges, grouped by source row or by target.

    Where all gradients come by source, the query's are added by atomic operations of the GPU, in no
    fixed order; those of ``att`` and ``edge_weight`` always, in ``SLOTS`` sums that are then added
    up.

    Args:
        given: Those of :func:`pyg_sar.kernels.fallback.attention_backward_`, and ``places``: where
            in ``value`` and ``key`` the source rows lie; only by source row.
        chunk: Edges of a chunk.
    """
    gradients, known, a = given[:6], given[6:10], Arguments(*given[10:-2])
    transposed, places = given[-2:]
    if a.source.numel() == 0:
        return
    grad_value, grad_key, grad_query, grad_att, grad_edge_attr, grad_edge_weight = gradients
    rows = (grad_value, grad_key, grad_query, grad_edge_attr, *known)
    names = ("value", "key", "query", "edge_attr", "grad_out", "maximum", "normaliser", "delta")
    named = zip(names, rows, strict=True)
    _check_rows("attention", **{name: t for name, t in named if t is not None})
    targets = known[0].size(0)
    sources = a.value.size(0) if places is None else places.numel()
    reached = (targets, sources) if transposed else (sources, targets)
    numbered = _numbered(a.edge_attr, a.drop_key)
    edges = a.edges if numbered else None
    read, written = reached
    _check_edges(a.source, a.offsets, a.targets, edges, read, written, numbered)
    if places is not None:
        _check_index(places, a.value.size(0), "'places' names a row")
    shared_att, shared_weight = _copies(grad_att), _copies(grad_edge_weight)
    by_edge = shared_att, grad_edge_attr, shared_weight
    # Sums of a program's row; additive scores' query has those of its edges' other ends.
    own = grad_value, grad_key, None if transposed else grad_query
    ends = _flat(a.source, a.offsets, a.targets, edges, a.drop_key, places)
    read, numbers = _read(a), (a.low, a.high, *_counts(a), chunk)

    def launch(to: Sequence[Tensor | None], pieces: Sequence[Tensor | None], programs: int) -> None:
        into = *to[:2], grad_query if transposed else to[2], grad_edge_attr
        triton_attention.backward[(programs,)](
            *(*into[:3], *by_edge, *pieces, *known, *read, *ends, *numbers),
            *(0 if tensor is None else tensor.stride(0) for tensor in (*into, *known)),
            *_strides(a.value, a.key, a.query, a.edge_attr),
            **_settings(a, known[0].dtype, BACKWARD),
            BY_SOURCE=transposed,
            SLOTS=SLOTS,
            CHUNKS=to is not own,
        )

    with _on(a.value):
        wide = known[0].dtype
        pieces = [t if t is None else _of_chunks(a.source, chunk, wide, *t.shape[1:]) for t in own]
        if a.source.numel() >= chunk:
            launch(pieces, (None, None, None), a.source.numel() // chunk)
        launch(own, pieces, a.offsets.numel() - 1)
    for total, copies in ((grad_att, shared_att), (grad_edge_weight, shared_weight)):
        if total is not None and copies is not None:
            total += copies.sum(0)


def _read(a: Arguments) -> list[Tensor | None]:
    """Returns the tensors that are read; parameters in one piece."""
    att, weight = (None if t is None else t.contiguous() for t in (a.att, a.edge_weight))
    return [a.value, a.key, a.query, att, a.edge_attr, weight]


def _counts(a: Arguments) -> tuple[int, int]:
    """Returns the number of an edge's features, and that of targets."""
    return 0 if a.edge_attr is None else a.edge_attr.size(1), a.offsets.numel() - 1


def _copies(total: Tensor | None) -> Tensor | None:
    return None if total is None else total.new_zeros(SLOTS, *total.shape)


def _settings(a: Arguments, wide: torch.dtype, shape: tuple[int, int]) -> dict[str, Any]:
    """Returns the constants that kernels of attention are compiled with."""
    heads, channels, drop_key = a.value.size(1), a.value.size(2), a.drop_key
    block_h, block_c = triton.next_power_of_2(heads), triton.next_power_of_2(channels)
    bits = drop_key is not None and drop_key.dim() == 2
    score = declared()[a.kind]
    return {
        "KIND": a.kind,
        "NARROW_KEY": score.narrow_key,
        "NARROW_QUERY": score.narrow_query,
        "JOINED": score.joined,
        "ATT": score.att,
        "TERM_IN_VALUE": score.term == "key and value",
        "SLOPE": float(a.slope),
        "SCALE": float(a.scale),
        "DROP": 0 if drop_key is None else 2 if bits else 1,
        "THRESHOLD": threshold(a.p),
        "FACTOR": 1.0 / (1.0 - a.p) if a.p < 1 else 0.0,
        "WORDS": drop_key.size(1) if drop_key is not None and bits else 1,
        "H": heads,
        "C": channels,
        "WIDE": _WIDE[wide],
        **_tile(*shape, block_h * block_c),
        "BLOCK_H": block_h,
        "BLOCK_C": block_c,
    }


def _tile(tile: int, warps: int, numbers: int) -> dict[str, int]:
    """Returns how many edges a block has, and how many warps a program, by an edge's numbers."""
    edges = min(max(tile // numbers, 1), 32)
    return {"BLOCK_E": edges, "num_warps": max(warps, numbers // 1024)}


def _strides(
    value: Tensor, key: Tensor | None, query: Tensor | None, edge_attr: Tensor | None
) -> list[int]:
    """Returns strides of the tensors that are read where they lie; 0 for axes that aren't there."""
    found = list(value.stride())
    for tensor in (key, query):
        own = [] if tensor is None else list(tensor.stride())
        found += own + [0] * (3 - len(own))
    return found + ([0, 0] if edge_attr is None else list(edge_attr.stride()))


# Arguments ####################################################################

_WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


def _blocks(width: int, dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, Any]:
    columns = min(triton.next_power_of_2(width), 128)
    return {"WIDE": _WIDE[wide_dtype(dtype)], "BLOCK_F": columns, **_tile(*shape, columns)}


def _grid(programs: int, width: int) -> tuple[int, int]:
    return programs, triton.cdiv(width, min(triton.next_power_of_2(width), 128))


def _of_chunks(
    source: Tensor, chunk: int, dtype: torch.dtype, *shape: int, fill: float = 0
) -> Tensor | None:
    """A buffer with a row for each chunk, where there is one. See [Note: edges by chunks]."""
    rows = (source.numel() // chunk, *shape)
    return torch.full(rows, fill, dtype=dtype, device=source.device) if rows[0] else None


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launches are on the current device."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def _flat(*tensors: Tensor | None) -> list[Tensor | None]:
    """Numbers of edges and targets, one after the other."""
    return [None if t is None else t.contiguous() for t in tensors]


def _check_rows(name: str, **tensors: Tensor) -> None:
    """Raises ``ValueError`` where a row of what is added to is not in one piece."""
    for role, tensor in tensors.items():
        row = tensor[:1]
        if tensor.size(0) > 1 and tensor.stride(0) == 0:
            raise ValueError(f"{name}: rows of '{role}' are the same memory")
        if tensor.size(0) and not row.is_contiguous():
            raise ValueError(f"{name}: expected each row of '{role}' to lie in one piece")


def _check_edges(
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    edges: Tensor | None,
    num_read: int,
    num_written: int,
    num_numbers: int,
) -> None:
    """Has the device check what edges name, in one launch."""
    num_edges, num_targets = source.numel(), offsets.numel() - 1
    if targets is None and num_targets > num_written:
        raise IndexError(
            f"{counted(num_targets, 'targets')} are more than {counted(num_written, 'rows')}"
        )
    fine = torch.ones((), dtype=torch.int32, device=source.device)
    with _on(source):
        triton_sums.check_edges[(triton.cdiv(max(num_edges, num_targets + 1), CHECKED),)](
            *(fine, *_flat(source, offsets, targets, edges), num_edges, num_targets),
            *(num_read, num_written, num_numbers),
            BLOCK=CHECKED,
        )
    torch._assert_async(
        fine,
        "'source', 'edges' or 'targets' name what isn't there "
        f"({num_read} rows to read, {num_numbers} numbers of edges, {num_written} rows to write), "
        "or 'offsets' don't ascend from 0 to the number of edges, or 'targets' don't ascend",
    )


def _numbered(edge_attr: Tensor | None, drop_key: Tensor | None) -> int:
    """Up to which number edges have what is known by it; 0 where nothing is."""
    return min([t.size(0) for t in (edge_attr, drop_key) if t is not None], default=0)


def _check_index(index: Tensor, count: int, what: str) -> None:
    if index.numel():
        least, most = torch.aminmax(index)
        torch._assert_async((least >= 0) & (most < count), f"{what} that is not in [0, {count})")
