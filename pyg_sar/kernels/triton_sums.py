"""Triton kernels: sums, inner products and extrema of rows, over edges sorted by target.

Each program has a target and some columns, and goes through the target's edges, ``BLOCK_E`` at a
time, always in the same order. Rows are read where they lie. See :mod:`pyg_sar.kernels.ops` for the
equations, ``triton_operators`` for who launches them, and docs/gpu.md for the
bytes that each reads and writes. Importing this module needs ``triton``.
"""

import triton
import triton.language as tl


@triton.jit
def edges_of(k, offsets, targets):
    """The row that target k is, its first edge, and the one after its last."""
    row = k.to(tl.int64)
    if targets is not None:
        row = tl.load(targets + k)
    return row, tl.load(offsets + k), tl.load(offsets + k + 1)


@triton.jit
def numbers_of(e, there, edges):
    """The numbers under which edges are known."""
    numbers = e.to(tl.int64)
    if edges is not None:
        numbers = tl.load(edges + e, mask=there, other=0).to(tl.int64)
    return numbers


@triton.jit
def gather_sum(
    out,
    rows,
    source,
    offsets,
    targets,
    weight,
    edges,
    width,
    out_row,
    rows_row,
    rows_column,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = columns < width
    columns = columns.to(tl.int64)
    row, first, last = edges_of(tl.program_id(0), offsets, targets)
    total = tl.zeros([BLOCK_F], WIDE)
    for start in range(first, last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        there = e < last
        j = tl.load(source + e, mask=there, other=0).to(tl.int64)
        at = rows + j[:, None] * rows_row + columns[None, :] * rows_column
        part = tl.load(at, mask=there[:, None] & inside[None, :], other=0).to(WIDE)
        if weight is not None:
            numbers = numbers_of(e, there, edges)
            part *= tl.load(weight + numbers, mask=there, other=0).to(WIDE)[:, None]
        total += tl.sum(part, 0)
    at = out + row * out_row + columns
    sums = tl.load(at, mask=inside, other=0).to(WIDE) + total
    tl.store(at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def edge_dot(
    out,
    rows,
    gradient,
    source,
    offsets,
    targets,
    edges,
    width,
    rows_row,
    rows_column,
    gradient_row,
    gradient_column,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row, first, last = edges_of(tl.program_id(0), offsets, targets)
    for start in range(first, last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        there = e < last
        j = tl.load(source + e, mask=there, other=0).to(tl.int64)
        total = tl.zeros([BLOCK_E], WIDE)
        for begin in range(0, width, BLOCK_F):
            columns = begin + tl.arange(0, BLOCK_F)
            inside = columns < width
            columns = columns.to(tl.int64)
            at = gradient + row * gradient_row + columns * gradient_column
            here = tl.load(at, mask=inside, other=0).to(WIDE)
            at = rows + j[:, None] * rows_row + columns[None, :] * rows_column
            read = tl.load(at, mask=there[:, None] & inside[None, :], other=0).to(WIDE)
            total += tl.sum(tl.where(there[:, None], read * here[None, :], 0.0), 1)
        tl.store(out + numbers_of(e, there, edges), total, mask=there)


@triton.jit
def extremum(
    best,
    ties,
    rows,
    source,
    offsets,
    targets,
    width,
    best_row,
    ties_row,
    rows_row,
    rows_column,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = columns < width
    columns = columns.to(tl.int64)
    row, first, last = edges_of(tl.program_id(0), offsets, targets)
    most = tl.load(best + row * best_row + columns, mask=inside, other=0)
    count = tl.load(ties + row * ties_row + columns, mask=inside, other=0)
    bad = (most != most).to(tl.int32)  # NaN wins over all numbers.
    worst = float("-inf") if LARGEST else float("inf")
    for start in range(first, last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        both = (e < last)[:, None] & inside[None, :]
        j = tl.load(source + e, mask=e < last, other=0).to(tl.int64)
        at = rows + j[:, None] * rows_row + columns[None, :] * rows_column
        read = tl.load(at, mask=both, other=0)
        bad = tl.maximum(bad, tl.max((both & (read != read)).to(tl.int32), 0))
        usable = tl.where(both & (read == read), read, worst)
        if LARGEST:
            found = tl.max(usable, 0)
            better = found > most
        else:
            found = tl.min(usable, 0)
            better = found < most
        most = tl.where(better, found, most)
        reached = (both & (read == most[None, :])).to(WIDE)
        count = tl.where(better, 0.0, count) + tl.sum(reached, 0)
    most = tl.where(bad > 0, float("nan"), most)
    tl.store(best + row * best_row + columns, most.to(WIDE), mask=inside)
    count = tl.where(bad > 0, 0.0, count)
    tl.store(ties + row * ties_row + columns, count.to(WIDE), mask=inside)


@triton.jit
def extremum_backward(
    total,
    hits,
    rows,
    gradient,
    best,
    source,
    offsets,
    targets,
    width,
    total_row,
    rows_row,
    rows_column,
    gradient_row,
    gradient_column,
    best_row,
    best_column,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    k, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = columns < width
    columns = columns.to(tl.int64)
    row, first, last = edges_of(k, offsets, targets)
    own = tl.load(rows + row * rows_row + columns * rows_column, mask=inside, other=0)
    found = tl.zeros([BLOCK_F], WIDE)
    count = tl.zeros([BLOCK_F], tl.int64)
    for start in range(first, last, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        both = (e < last)[:, None] & inside[None, :]
        i = tl.load(source + e, mask=e < last, other=0).to(tl.int64)
        at = best + i[:, None] * best_row + columns[None, :] * best_column
        reached = both & (tl.load(at, mask=both, other=0) == own[None, :])
        at = gradient + i[:, None] * gradient_row + columns[None, :] * gradient_column
        found += tl.sum(tl.load(at, mask=reached, other=0), 0)
        count += tl.sum(reached.to(tl.int64), 0)
    at = total + row * total_row + columns
    tl.store(at, tl.load(at, mask=inside, other=0) + found, mask=inside)
    tl.store(hits + k.to(tl.int64) * tl.num_programs(1) + block, tl.sum(count, 0))
