"""Triton kernels: softmax attention over edges, forward and backward, all heads at once.

A program has a target (backward by source: a source row) and goes through its edges, ``BLOCK_E`` at
a time, in tiles ``[BLOCK_E, heads, channels]``; heads and channels are filled up to powers of two.
Each of the ``BLOCK_E`` places has a softmax, and sums, of its own, which are put together at the
end: nothing is exchanged between threads on the way. Rows with most of the edges are gone through
in pieces, see [Note: edges by chunks] in ``triton_sums``.
Numbers of half precision are widened when they are read; states and gradients are wide. Nothing per
edge is kept. See [Note: attention by shards] in :mod:`pyg_sar.kernels.attention_ops`.

``KIND`` is the number of a score of :mod:`pyg_sar.kernels.scores`, whose formulas are compiled
here; the constants after it are what is declared of it. ``DROP``: 0 without dropout, 1 by a hash of
edges' keys, 2 by bits. Tensors that an attention doesn't have are ``None``. Importing this module
needs ``triton``.
"""

from types import FunctionType

import triton
import triton.language as tl

from pyg_sar.kernels import scores
from pyg_sar.kernels.triton_sums import numbers_of, pieces_of, work_of


@triton.jit
def leaky(x, SLOPE: tl.constexpr):
    return tl.where(x > 0, x, x * SLOPE)


@triton.jit
def through_leaky(gradient, x, SLOPE: tl.constexpr):
    return tl.where(x > 0, gradient, gradient * SLOPE)


@triton.jit
def over_channels(x):
    return tl.sum(x, 2)


@triton.jit
def per_channel(x):
    return x[:, :, None]


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


def formula(function):
    """A formula of :mod:`pyg_sar.kernels.scores`, of tiles: its names mean the functions above."""
    words = (leaky, through_leaky, over_channels, per_channel, sigmoid)
    names = {word.__name__: word for word in words} | {"tl": tl, "Tensor": tl.tensor}
    return triton.jit(FunctionType(function.__code__, names | {"__name__": __name__}))


edge_scores, edge_gradients = formula(scores.edge_scores), formula(scores.edge_gradients)


@triton.jit
def mixed_bits(x):
    """lowbias32, of uint32; see :func:`pyg_sar.kernels.fallback.mixed_bits`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept_factors(
    drop,
    numbers,
    there,
    heads,
    low,
    high,
    DROP: tl.constexpr,
    THRESHOLD: tl.constexpr,
    FACTOR: tl.constexpr,
    WORDS: tl.constexpr,
    H: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Dropout's factors, ``[BLOCK_E, heads]``: 0 or 1 / (1 - p)."""
    if DROP == 2:
        mask = there[:, None] & (heads < H)[None, :]
        words = tl.load(
            drop + numbers[:, None] * WORDS + (heads // 32)[None, :], mask=mask, other=0
        )
        kept = ((words >> (heads % 32).to(tl.int32)[None, :]) & 1) != 0
    else:
        keys = tl.load(drop + numbers, mask=there, other=0).to(tl.uint32)
        first = mixed_bits(keys + low.to(tl.uint32))
        of_head = heads.to(tl.uint32) * 0x9E3779B9 + high.to(tl.uint32)
        kept = mixed_bits(first[:, None] ^ of_head[None, :]) >= THRESHOLD
    return kept.to(WIDE) * FACTOR


@triton.jit
def rows_2(base, rows, heads, by_row, by_head, there, H: tl.constexpr, WIDE: tl.constexpr):
    """Rows ``[R, heads]``, 0 where there are none."""
    at = base + rows[:, None] * by_row + heads[None, :] * by_head
    mask = there[:, None] & (heads < H)[None, :]
    return tl.load(at, mask=mask, other=0).to(WIDE)


@triton.jit
def rows_3(
    base,
    rows,
    heads,
    channels,
    by_row,
    by_head,
    by_channel,
    there,
    H: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows ``[R, heads, channels]``, 0 where there are none."""
    inner = heads[:, None] * by_head + channels[None, :] * by_channel
    inside = (heads < H)[:, None] & (channels < C)[None, :]
    at = base + rows[:, None, None] * by_row + inner[None, :, :]
    return tl.load(at, mask=there[:, None, None] & inside[None, :, :], other=0).to(WIDE)


@triton.jit
def inner_rows(base, row, heads, channels, H: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """Row ``[heads, channels]`` of a tensor in one piece."""
    at = base + (row * H + heads)[:, None] * C + channels[None, :]
    inside = (heads < H)[:, None] & (channels < C)[None, :]
    return tl.load(at, mask=inside, other=0).to(WIDE)


@triton.jit
def term_2(
    attr,
    weight,
    numbers,
    there,
    heads,
    features,
    by_edge,
    by_feature,
    H: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Edges' features times their weight, ``[BLOCK_E, heads]``."""
    total = tl.zeros([BLOCK_E, BLOCK_H], WIDE)
    for d in range(features):
        at = attr + numbers * by_edge + d * by_feature
        numbers_d = tl.load(at, mask=there, other=0).to(WIDE)
        weights = tl.load(weight + d * H + heads, mask=heads < H, other=0).to(WIDE)
        total += numbers_d[:, None] * weights[None, :]
    return total


@triton.jit
def term_3(
    attr,
    weight,
    numbers,
    there,
    heads,
    channels,
    features,
    by_edge,
    by_feature,
    H: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The same, ``[BLOCK_E, heads, channels]``."""
    total = tl.zeros([BLOCK_E, BLOCK_H, BLOCK_C], WIDE)
    for d in range(features):
        at = attr + numbers * by_edge + d * by_feature
        numbers_d = tl.load(at, mask=there, other=0).to(WIDE)
        weights = inner_rows(weight, d, heads, channels, H, C, WIDE)
        total += numbers_d[:, None, None] * weights[None, :, :]
    return total


@triton.jit
def rows_of(base, rows, heads, channels, by_row, by_head, by_channel, there,
            NARROW: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
            WIDE: tl.constexpr):  # fmt: skip
    """Rows ``[R, heads]`` where they are narrow, else ``[R, heads, channels]``."""
    if NARROW:
        found = rows_2(base, rows, heads, by_row, by_head, there, H, WIDE)
    else:
        found = rows_3(base, rows, heads, channels, by_row, by_head, by_channel, there,
                       H, C, WIDE)  # fmt: skip
    return found


@triton.jit
def own_row(base, row, heads, channels, by_row, by_head, by_channel,
            NARROW: tl.constexpr, H: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
            BLOCK_E: tl.constexpr):  # fmt: skip
    """One row, ``[1, heads]`` or ``[1, heads, channels]``, for all edges.

    It is read as the first of a tile's rows: how tiles are read is how the compiler shares them out
    among threads. Where one row alone was read, every thread had all edges.
    """
    place = tl.arange(0, BLOCK_E)
    rows = row + place.to(tl.int64) * 0
    found = rows_of(base, rows, heads, channels, by_row, by_head, by_channel, place == 0,
                    NARROW, H, C, WIDE)  # fmt: skip
    return tl.sum(found, 0, keep_dims=True)


@triton.jit
def att_rows(att, heads, channels, ATT: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
             WIDE: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Both rows of ``att``, ``[1, heads, channels]``; zeros where it has none."""
    first = tl.zeros([1, 1, 1], WIDE)
    second = tl.zeros([1, 1, 1], WIDE)
    if ATT > 0:
        first = own_row(att, 0, heads, channels, H * C, C, 1, False, H, C, WIDE, BLOCK_E)
    if ATT > 1:
        second = own_row(att, 1, heads, channels, H * C, C, 1, False, H, C, WIDE, BLOCK_E)
    return first, second


@triton.jit
def term_of(attr, weight, numbers, there, heads, channels, features, by_edge, by_feature,
            NARROW: tl.constexpr, H: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
            BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Edges' features times their weight, as keys are."""
    if NARROW:
        found = term_2(attr, weight, numbers, there, heads, features, by_edge, by_feature,
                       H, WIDE, BLOCK_E, BLOCK_H)  # fmt: skip
    else:
        found = term_3(attr, weight, numbers, there, heads, channels, features,
                       by_edge, by_feature, H, C, WIDE, BLOCK_E, BLOCK_H, BLOCK_C)  # fmt: skip
    return found


@triton.jit
def joined_rows(
    k, v, q, attr, weight, numbers, there, heads, channels, features, attr_row, attr_column,
    NARROW_KEY: tl.constexpr, JOINED: tl.constexpr, TERM_IN_VALUE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows from which edges' scores come (``x`` of :func:`scores.edge_scores`), and values."""
    x = k
    if JOINED:
        x = x + q
    if attr is not None:
        term = term_of(attr, weight, numbers, there, heads, channels, features,
                       attr_row, attr_column, NARROW_KEY, H, C, WIDE,
                       BLOCK_E, BLOCK_H, BLOCK_C)  # fmt: skip
        x = x + term
        if TERM_IN_VALUE:
            v = v + term
    return x, v


@triton.jit
def joined_states(top, norm, total, more_top, more_norm, more_total):
    """Two softmaxes in one: maxima and normalisers ``[heads]``, sums ``[heads, channels]``."""
    new = tl.maximum(top, more_top)
    here = tl.where(new > top, tl.exp(top - new), 1.0).to(norm.dtype)
    there = tl.where(new > more_top, tl.exp(more_top - new), 1.0).to(norm.dtype)
    total = total * here[:, None] + more_total * there[:, None]
    return new, norm * here + more_norm * there, total


@triton.jit(do_not_specialize=["low", "high", "features", "num_targets", "chunk"])
def forward(
    acc, maximum, normaliser, acc_pieces, maximum_pieces, normaliser_pieces,
    value, key, query, att, attr, weight,
    source, offsets, targets, edges, drop, low, high, features, num_targets, chunk,
    acc_row, maximum_row, normaliser_row,
    value_row, value_head, value_channel, key_row, key_head, key_channel,
    query_row, query_head, query_channel, attr_row, attr_column,
    KIND: tl.constexpr, NARROW_KEY: tl.constexpr, NARROW_QUERY: tl.constexpr,
    JOINED: tl.constexpr, ATT: tl.constexpr, TERM_IN_VALUE: tl.constexpr,
    SLOPE: tl.constexpr, SCALE: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr, WORDS: tl.constexpr,
    LOWEST: tl.constexpr, CHUNKS: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_H).to(tl.int64)
    channels = tl.arange(0, BLOCK_C).to(tl.int64)
    of_head = heads < H
    inside = of_head[:, None] & (channels < C)[None, :]
    target, row, first, end, gap, skipped = work_of(offsets, targets, num_targets, chunk, CHUNKS)
    top = tl.full([BLOCK_E, BLOCK_H], float("-inf"), WIDE)
    norm = tl.zeros([BLOCK_E, BLOCK_H], WIDE)
    total = tl.zeros([BLOCK_E, BLOCK_H, BLOCK_C], WIDE)
    q = tl.zeros([1, BLOCK_H], WIDE)
    if query is not None:
        q = own_row(query, target, heads, channels, query_row, query_head, query_channel,
                    NARROW_QUERY, H, C, WIDE, BLOCK_E)  # fmt: skip
    att_of_key, att_of_query = att_rows(att, heads, channels, ATT, H, C, WIDE, BLOCK_E)
    for start in range(first, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        there = e < end
        e = tl.where(e < gap, e, e + skipped)
        both = there[:, None] & of_head[None, :]
        j = tl.load(source + e, mask=there, other=0).to(tl.int64)
        numbers = numbers_of(e, there, edges)
        v = rows_3(value, j, heads, channels, value_row, value_head, value_channel, there,
                   H, C, WIDE)  # fmt: skip
        k = v
        if key is not None:
            k = rows_of(key, j, heads, channels, key_row, key_head, key_channel, there,
                        NARROW_KEY, H, C, WIDE)  # fmt: skip
        x, v = joined_rows(k, v, q, attr, weight, numbers, there, heads, channels, features,
                           attr_row, attr_column, NARROW_KEY, JOINED, TERM_IN_VALUE,
                           H, C, WIDE, BLOCK_E, BLOCK_H, BLOCK_C)  # fmt: skip
        s = edge_scores(KIND, x, q, att_of_key, att_of_query, SLOPE, SCALE)
        # NaN reaches the sums by itself; -inf would give NaN where others are finite.
        seen = tl.where(both, tl.where(s > LOWEST, s, LOWEST), float("-inf")).to(WIDE)
        new = tl.maximum(top, seen)
        rescaled = tl.where(new > top, tl.exp(top - new), 1.0).to(WIDE)
        p = tl.where(both, tl.exp(s - new), 0.0).to(WIDE)
        norm = norm * rescaled + p
        if DROP != 0:
            p *= kept_factors(drop, numbers, there, heads, low, high, DROP, THRESHOLD, FACTOR,
                              WORDS, H, WIDE)  # fmt: skip
        total = total * rescaled[:, :, None] + p[:, :, None] * v
        top = new
    most = tl.max(top, 0)
    share = tl.where(most[None, :] > top, tl.exp(top - most[None, :]), 1.0).to(WIDE)
    norms, sums = tl.sum(norm * share, 0), tl.sum(total * share[:, :, None], 0)
    inner = heads[:, None] * C + channels[None, :]
    if acc_pieces is not None:
        first_piece, end_piece = pieces_of(gap, skipped, chunk)
        for piece in range(first_piece, end_piece):
            at = piece * H + heads
            most, norms, sums = joined_states(
                most, norms, sums,
                tl.load(maximum_pieces + at, mask=of_head, other=0),
                tl.load(normaliser_pieces + at, mask=of_head, other=0),
                tl.load(acc_pieces + piece * H * C + inner, mask=inside, other=0),
            )  # fmt: skip
    at_acc = acc + row * acc_row + inner
    most, norms, sums = joined_states(
        tl.load(maximum + row * maximum_row + heads, mask=of_head, other=0),
        tl.load(normaliser + row * normaliser_row + heads, mask=of_head, other=0),
        tl.load(at_acc, mask=inside, other=0),
        most, norms, sums,
    )  # fmt: skip
    tl.store(maximum + row * maximum_row + heads, most, mask=of_head)
    tl.store(normaliser + row * normaliser_row + heads, norms, mask=of_head)
    tl.store(at_acc, sums, mask=inside)


@triton.jit
def add_sums(base, row, by_row, pieces, first_piece, end, found, heads, channels,
             NARROW: tl.constexpr, H: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Adds what edges found, and pieces, to a row that no other program writes."""
    total = tl.sum(found, 0)
    if NARROW:
        inner, inside, width = heads, heads < H, H
    else:
        inner = heads[:, None] * C + channels[None, :]
        inside, width = (heads < H)[:, None] & (channels < C)[None, :], H * C
    if pieces is not None:
        for piece in range(first_piece, end):
            total += tl.load(pieces + piece * width + inner, mask=inside, other=0)
    at = base + row * by_row + inner
    tl.store(at, tl.load(at, mask=inside, other=0) + total, mask=inside)


@triton.jit
def share_rows(base, slot, found, heads, channels, H: tl.constexpr, C: tl.constexpr):
    """Adds ``[heads, channels]`` to a row of a buffer that several programs write."""
    at = base + (slot * H + heads)[:, None] * C + channels[None, :]
    inside = (heads < H)[:, None] & (channels < C)[None, :]
    tl.atomic_add(at, found, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["low", "high", "features", "num_targets", "chunk"])
def backward(
    grad_value, grad_key, grad_query, grad_att, grad_attr, grad_weight,
    value_pieces, key_pieces, query_pieces,
    grad_out, maximum, normaliser, delta, value, key, query, att, attr, weight,
    source, offsets, targets, edges, drop, places, low, high, features, num_targets, chunk,
    grad_value_row, grad_key_row, grad_query_row, grad_attr_row,
    grad_out_row, maximum_row, normaliser_row, delta_row,
    value_row, value_head, value_channel, key_row, key_head, key_channel,
    query_row, query_head, query_channel, attr_row, attr_column,
    BY_SOURCE: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr,
    KIND: tl.constexpr, NARROW_KEY: tl.constexpr, NARROW_QUERY: tl.constexpr,
    JOINED: tl.constexpr, ATT: tl.constexpr, TERM_IN_VALUE: tl.constexpr,
    SLOPE: tl.constexpr, SCALE: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, FACTOR: tl.constexpr, WORDS: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_H).to(tl.int64)
    channels = tl.arange(0, BLOCK_C).to(tl.int64)
    of_head = heads < H
    read, row, first, end, gap, skipped = work_of(offsets, targets, num_targets, chunk, CHUNKS)
    first_piece, end_piece = pieces_of(gap, skipped, chunk)
    slot = (tl.program_id(0) % SLOTS).to(tl.int64)
    if places is not None:
        read = tl.load(places + read).to(tl.int64)
    # What the program's row gives to all of its edges.
    own_q = tl.zeros([1, BLOCK_H], WIDE)
    if BY_SOURCE:
        own_v = own_row(value, read, heads, channels, value_row, value_head, value_channel,
                        False, H, C, WIDE, BLOCK_E)  # fmt: skip
        own_k = own_v
        if key is not None:
            own_k = own_row(key, read, heads, channels, key_row, key_head, key_channel,
                            NARROW_KEY, H, C, WIDE, BLOCK_E)  # fmt: skip
    else:
        own_g = own_row(grad_out, read, heads, channels, grad_out_row, C, 1,
                        False, H, C, WIDE, BLOCK_E)  # fmt: skip
        if query is not None:
            own_q = own_row(query, read, heads, channels, query_row, query_head, query_channel,
                            NARROW_QUERY, H, C, WIDE, BLOCK_E)  # fmt: skip
        own_top = own_row(maximum, read, heads, channels, maximum_row, 1, 0,
                          True, H, C, WIDE, BLOCK_E)  # fmt: skip
        own_norm = own_row(normaliser, read, heads, channels, normaliser_row, 1, 0,
                           True, H, C, WIDE, BLOCK_E)  # fmt: skip
        own_sums = own_row(delta, read, heads, channels, delta_row, 1, 0,
                           True, H, C, WIDE, BLOCK_E)  # fmt: skip
    # Of the row, over all of its edges: of each place of a block.
    of_value = tl.zeros([BLOCK_E, BLOCK_H, BLOCK_C], WIDE)
    of_key = tl.zeros([BLOCK_E, BLOCK_H], WIDE) if NARROW_KEY else of_value
    of_query = tl.zeros([BLOCK_E, BLOCK_H], WIDE) if NARROW_QUERY else of_value
    att_of_key, att_of_query = att_rows(att, heads, channels, ATT, H, C, WIDE, BLOCK_E)
    of_att = tl.zeros([BLOCK_E, BLOCK_H, BLOCK_C], WIDE)
    of_att_2 = tl.zeros([BLOCK_E, BLOCK_H, BLOCK_C], WIDE)
    for start in range(first, end, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        there = e < end
        e = tl.where(e < gap, e, e + skipped)
        both = there[:, None] & of_head[None, :]
        other = tl.load(source + e, mask=there, other=0).to(tl.int64)
        numbers = numbers_of(e, there, edges)
        q = own_q
        if BY_SOURCE:
            k, v = own_k, own_v
            g = rows_3(grad_out, other, heads, channels, grad_out_row, C, 1, there, H, C, WIDE)
            if query is not None:
                q = rows_of(query, other, heads, channels, query_row, query_head, query_channel,
                            there, NARROW_QUERY, H, C, WIDE)  # fmt: skip
            top = rows_2(maximum, other, heads, maximum_row, 1, there, H, WIDE)
            norm = rows_2(normaliser, other, heads, normaliser_row, 1, there, H, WIDE)
            sums = rows_2(delta, other, heads, delta_row, 1, there, H, WIDE)
        else:
            g, top, norm, sums = own_g, own_top, own_norm, own_sums
            v = rows_3(value, other, heads, channels, value_row, value_head, value_channel, there,
                       H, C, WIDE)  # fmt: skip
            k = v
            if key is not None:
                k = rows_of(key, other, heads, channels, key_row, key_head, key_channel, there,
                            NARROW_KEY, H, C, WIDE)  # fmt: skip
        x, w = joined_rows(k, v, q, attr, weight, numbers, there, heads, channels, features,
                           attr_row, attr_column, NARROW_KEY, JOINED, TERM_IN_VALUE,
                           H, C, WIDE, BLOCK_E, BLOCK_H, BLOCK_C)  # fmt: skip
        s = edge_scores(KIND, x, q, att_of_key, att_of_query, SLOPE, SCALE)
        divisor = tl.where(both, norm + tl.zeros([BLOCK_E, BLOCK_H], WIDE), 1.0).to(WIDE)
        p = tl.where(both, tl.exp(s - top) / divisor, 0.0).to(WIDE)
        inner, kept = tl.sum(g * w, 2), p
        if DROP != 0:
            factors = kept_factors(drop, numbers, there, heads, low, high, DROP, THRESHOLD, FACTOR,
                                   WORDS, H, WIDE)  # fmt: skip
            inner *= factors
            kept = p * factors
        gs = tl.where(both, p * (inner - sums), 0.0).to(WIDE)
        grad_v = tl.where(there[:, None, None], kept[:, :, None] * g, 0.0).to(WIDE)
        if BY_SOURCE:
            of_value += grad_v
        found_key, found_query, found_att, found_att_2 = edge_gradients(
            KIND, x, q, att_of_key, att_of_query, SLOPE, SCALE, gs
        )
        if BY_SOURCE:
            of_key += found_key
        if grad_query is not None:
            if BY_SOURCE:  # Narrow, and of another row for each edge.
                at_query = grad_query + other[:, None] * grad_query_row + heads[None, :]
                tl.atomic_add(at_query, found_query, mask=both, sem="relaxed")
            else:
                of_query += found_query
        if grad_att is not None:
            of_att += found_att
            if ATT > 1:
                of_att_2 += found_att_2
        if attr is not None:
            found_term = found_key
            if TERM_IN_VALUE:
                found_term += grad_v
            for d in range(features):
                if grad_attr is not None:
                    at = grad_attr + numbers * grad_attr_row + d
                    if NARROW_KEY:
                        weights = tl.load(weight + d * H + heads, mask=of_head, other=0).to(WIDE)
                        of_edge = tl.sum(found_term * weights[None, :], 1)
                    else:
                        weights = inner_rows(weight, d, heads, channels, H, C, WIDE)
                        of_edge = tl.sum(tl.sum(found_term * weights[None, :, :], 2), 1)
                    tl.store(at, of_edge, mask=there)
                if grad_weight is not None:
                    at = attr + numbers * attr_row + d * attr_column
                    numbers_d = tl.load(at, mask=there, other=0).to(WIDE)
                    if NARROW_KEY:
                        at = grad_weight + (slot * features + d) * H + heads
                        shared = tl.sum(found_term * numbers_d[:, None], 0)
                        tl.atomic_add(at, shared, mask=of_head, sem="relaxed")
                    else:
                        shared = tl.sum(found_term * numbers_d[:, None, None], 0)
                        share_rows(grad_weight, slot * features + d, shared, heads, channels, H, C)
    if BY_SOURCE:
        if grad_value is not None:
            if key is None:
                of_value += of_key
            add_sums(grad_value, row, grad_value_row, value_pieces, first_piece, end_piece,
                     of_value, heads, channels, False, H, C)  # fmt: skip
        if grad_key is not None:
            add_sums(grad_key, row, grad_key_row, key_pieces, first_piece, end_piece,
                     of_key, heads, channels, NARROW_KEY, H, C)  # fmt: skip
    else:
        if grad_query is not None:
            add_sums(grad_query, row, grad_query_row, query_pieces, first_piece, end_piece,
                     of_query, heads, channels, NARROW_QUERY, H, C)  # fmt: skip
        if grad_att is not None:
            share_rows(grad_att, slot * ATT, tl.sum(of_att, 0), heads, channels, H, C)
            if ATT > 1:
                of_both = tl.sum(of_att_2, 0)
                share_rows(grad_att, slot * ATT + 1, of_both, heads, channels, H, C)
