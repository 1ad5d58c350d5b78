"""Triton kernels: sums, inner products and extrema of rows, over edges sorted by target.

Each program has a target and some columns, and goes through the target's edges, ``BLOCK_E`` at a
time, always in the same order. Rows are read where they lie. See :mod:`pyg_sar.kernels.ops` for the
equations, ``triton_operators`` for who launches them, and docs/gpu.md for the
bytes that each reads and writes. Importing this module needs ``triton``.

[Note: edges by chunks] A program goes through its edges one block after the other; one of a target
with most of the edges would end long after all others. So edges are counted off in chunks of
``chunk``, from the shard's first edge on. A chunk whose edges are all one target's is gone through
by a program of its own, in a launch before the targets', into a row of a buffer (``pieces``); the
target's program adds these rows up in their order, and goes through the other edges alone, which
are less than two chunks. Which target a chunk has is found by bisection: nothing is looked up on
the host.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_edges", "num_targets", "num_read", "num_written", "num_numbers"]
)
def check_edges(
    fine,
    source,
    offsets,
    targets,
    edges,
    num_edges,
    num_targets,
    num_read,
    num_written,
    num_numbers,
    BLOCK: tl.constexpr,
):
    """Stores 0 in ``fine`` where an index is out of range, or what must ascend does not."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    an_edge, a_target = k < num_edges, k < num_targets
    row = tl.load(source + k, an_edge, 0)
    wrong = (row < 0) | (row >= num_read)
    if edges is not None:
        number = tl.load(edges + k, an_edge, 0)
        wrong = wrong | (number < 0) | (number >= num_numbers)
    wrong = wrong & an_edge
    first = tl.load(offsets + k, k <= num_targets, 0)
    wrong = wrong | (a_target & (tl.load(offsets + k + 1, a_target, 0) < first))
    wrong = wrong | ((k == 0) & (first != 0)) | ((k == num_targets) & (first != num_edges))
    if targets is not None:
        row = tl.load(targets + k, a_target, 0)
        before = tl.load(targets + k - 1, a_target & (k > 0), -1)
        wrong = wrong | (a_target & ((row <= before) | (row >= num_written)))
    tl.store(fine, 0, tl.max(wrong.to(tl.int32), 0) > 0)


@triton.jit
def edges_of(k, offsets, targets):
    """The row that target k is, its first edge, and the one after its last."""
    row = k.to(tl.int64)
    if targets is not None:
        row = tl.load(targets + k)
    return row, tl.load(offsets + k), tl.load(offsets + k + 1)


@triton.jit
def work_of(offsets, targets, num_targets, chunk, CHUNKS: tl.constexpr):
    """A program's share, of a chunk (``CHUNKS``) or a target. See [Note: edges by chunks].

    The row that the target is, the row that is written, the first edge, the last one's successor
    if none was left out, from which edge on others are, and how many.
    """
    program = tl.program_id(0)
    if CHUNKS:
        begin = program.to(offsets.dtype.element_ty) * chunk
        low, high = program * 0, num_targets + program * 0
        while high - low > 1:  # offsets[low] <= begin
            middle = low + (high - low) // 2
            if tl.load(offsets + middle) <= begin:
                low = middle
            else:
                high = middle
        row, first, last = edges_of(low, offsets, targets)
        whole = last >= begin + chunk
        written, first, gap = program.to(tl.int64), begin, begin
        end = tl.where(whole, begin + chunk, begin)
        skipped = begin * 0
    else:
        row, first, last = edges_of(program, offsets, targets)
        # Nothing here is more than ``last``, which may be the largest number of its dtype.
        written = row
        gap = first + tl.minimum((chunk - first % chunk) % chunk, last - first)
        skipped = (last - gap) // chunk * chunk
        end = last - skipped
    return row, written, first, end, gap, skipped


@triton.jit
def pieces_of(gap, skipped, chunk):
    """The first row of the buffer that a target adds up, and the one after its last."""
    return (gap // chunk).to(tl.int64), ((gap + skipped) // chunk).to(tl.int64)


@triton.jit
def numbers_of(e, there, edges):
    """The numbers under which edges are known."""
    numbers = e.to(tl.int64)
    if edges is not None:
        numbers = tl.load(edges + e, mask=there, other=0).to(tl.int64)
    return numbers


@triton.jit(do_not_specialize=["num_targets", "chunk"])
def gather_sum(
    out,
    pieces,
    rows,
    source,
    offsets,
    targets,
    weight,
    edges,
    width,
    num_targets,
    chunk,
    out_row,
    rows_row,
    rows_column,
    CHUNKS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = columns < width
    columns = columns.to(tl.int64)
    _, row, first, end, gap, skipped = work_of(offsets, targets, num_targets, chunk, CHUNKS)
    total = tl.zeros([BLOCK_E, BLOCK_F], WIDE)
    for start in range(first, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        there = e < end
        e = tl.where(e < gap, e, e + skipped)
        j = tl.load(source + e, mask=there, other=0).to(tl.int64)
        at = rows + j[:, None] * rows_row + columns[None, :] * rows_column
        part = tl.load(at, mask=there[:, None] & inside[None, :], other=0).to(WIDE)
        if weight is not None:
            numbers = numbers_of(e, there, edges)
            part *= tl.load(weight + numbers, mask=there, other=0).to(WIDE)[:, None]
        total += part
    at = out + row * out_row + columns
    sums = tl.load(at, mask=inside, other=0).to(WIDE) + tl.sum(total, 0)
    if pieces is not None:
        first_piece, end_piece = pieces_of(gap, skipped, chunk)
        for piece in range(first_piece, end_piece):
            sums += tl.load(pieces + piece * width + columns, mask=inside, other=0)
    tl.store(at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_targets", "chunk"])
def edge_dot(
    out,
    rows,
    gradient,
    source,
    offsets,
    targets,
    edges,
    width,
    num_targets,
    chunk,
    rows_row,
    rows_column,
    gradient_row,
    gradient_column,
    CHUNKS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row, _, first, end, gap, skipped = work_of(offsets, targets, num_targets, chunk, CHUNKS)
    for start in range(first, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        there = e < end
        e = tl.where(e < gap, e, e + skipped)
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
