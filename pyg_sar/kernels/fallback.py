"""The operators in PyTorch alone, for where the C++ kernels are missing or not made for a tensor.

Each function has the name and the arguments of the operator in ``torch.ops.pyg_sar`` that it stands
for, so that callers choose between the two and pass the same. All of them are TorchScript: they
take tensors, numbers and ``None``, and ``torch.jit.script`` compiles them as they stand. Edges are
gathered a block at a time, but by ``gather_sum`` and ``attention``, which autograd records.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.kernels.attention_terms import check_offsets, check_sums, wide_dtype
from pyg_sar.kernels.scores import declared, edge_gradients, edge_scores


def mixed_bits(x: Tensor) -> Tensor:
    """lowbias32, a bijection of 32 bits (C. Wellons, "Prospecting for hash functions", 2018)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def product_of_words(high: int, low: int, other_high: int, other_low: int) -> tuple[int, int]:
    """The product of two numbers of 64 bits, modulo :math:`2^{64}`, in words of 32 bits.

    No number on the way has more than 63 bits, which is what TorchScript's integers hold.
    """
    first, second = low * (other_low & 0xFFFF), low * (other_low >> 16)
    sum_low = first + ((second & 0xFFFF) << 16)
    carried = (second >> 16) + (sum_low >> 32)
    crossed = high * (other_low & 0xFFFF) + (((high * (other_low >> 16)) & 0xFFFF) << 16)
    crossed += low * (other_high & 0xFFFF) + (((low * (other_high >> 16)) & 0xFFFF) << 16)
    return (carried + crossed) & 0xFFFFFFFF, sum_low & 0xFFFFFFFF


def split_seed(seed: int) -> tuple[int, int]:
    """Two words of 32 bits, each of which depends on all 64 bits of the seed (splitmix64)."""
    low = (seed & 0xFFFFFFFF) + 0x7F4A7C15
    high = (((seed >> 32) & 0xFFFFFFFF) + 0x9E3779B9 + (low >> 32)) & 0xFFFFFFFF
    low &= 0xFFFFFFFF
    low, high = low ^ (((high << 2) & 0xFFFFFFFF) | (low >> 30)), high ^ (high >> 30)
    high, low = product_of_words(high, low, 0xBF58476D, 0x1CE4E5B9)
    low, high = low ^ (((high << 5) & 0xFFFFFFFF) | (low >> 27)), high ^ (high >> 27)
    high, low = product_of_words(high, low, 0x94D049BB, 0x133111EB)
    return low ^ (((high << 1) & 0xFFFFFFFF) | (low >> 31)), high ^ (high >> 31)


def threshold(p: float) -> int:
    """The 32-bit hash below which a weight is dropped."""
    return min(int(p * 4294967296.0), 0xFFFFFFFF)


def keep_factors(drop_key: Tensor, heads: int, low: int, high: int, p: float) -> Tensor:
    r"""0 where an edge's weight is dropped, else :math:`1 / (1 - p)`: a function of its arguments.

    Args:
        drop_key: ``[E]``, int32 or int64 of which 32 bits count; or ``[E, ceil(H / 32)]``, int32:
            a bit for each head, set where it is kept.
        heads: H.
        low: The first word of :func:`split_seed`.
        high: The second.
        p: Probability of 0.

    Returns:
        ``[E, H]``, float64.
    """
    if drop_key.dim() == 2:
        every = torch.arange(heads, device=drop_key.device)
        bits = (drop_key.long()[:, every // 32] >> (every % 32)) & 1
        return bits.double() * (1.0 / (1.0 - p) if p < 1 else 0.0)
    head = torch.arange(heads, device=drop_key.device) * 0x9E3779B9 + high
    first = mixed_bits(((drop_key.long() & 0xFFFFFFFF) + low) & 0xFFFFFFFF)
    kept = mixed_bits(first.unsqueeze(-1) ^ (head & 0xFFFFFFFF)) >= threshold(p)
    return kept.double() * (1.0 / (1.0 - p) if p < 1 else 0.0)


def targets_of(offsets: Tensor, targets: Tensor | None, num_edges: int) -> Tensor:
    """The row that each edge adds to, ``[E]``."""
    counts = offsets[1:] - offsets[:-1]
    rows = torch.arange(counts.numel(), device=counts.device) if targets is None else targets
    return torch.repeat_interleave(rows, counts, output_size=num_edges)


def blocks_of(num_edges: int, width: int) -> list[tuple[int, int]]:
    """First edges, and ends, of the blocks whose rows of some width are gathered at a time."""
    size = max(262144 // max(width, 1), 1)
    return [(first, min(first + size, num_edges)) for first in range(0, num_edges, size)]


# Edges in order ###############################################################


def sort_edges(key: Tensor, num_keys: int, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`pyg_sar.kernels.ops.sort_edges`."""
    inside = ((key >= 0) & (key < num_keys)).all()
    if not torch.jit.is_scripting():
        torch._assert_async(inside, "sort_edges: expected keys in [0, num_keys)")
    elif not bool(inside):  # TorchScript leaves out what has no result.
        raise IndexError(f"sort_edges: expected keys in [0, {num_keys})")
    keys = key if order is None else key[order]
    place = torch.argsort(keys, stable=True)
    found = keys[place]
    bounds = torch.arange(num_keys + 1, device=key.device, dtype=key.dtype)
    narrow = torch.int32 if key.numel() < 2147483648 else torch.int64
    offsets = torch.searchsorted(found, bounds).to(narrow)
    return (place if order is None else order[place]).to(narrow), offsets


def transpose(
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    edges: Tensor | None,
    num_rows: int,
    num_targets: int,
    numbered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pyg_sar.kernels.ops.transpose`."""
    order, first = sort_edges(source, num_rows, None)
    rows = targets_of(offsets, targets, source.numel()).to(source.dtype)[order]
    numbers = order if edges is None else edges[order]
    return rows, first.to(source.dtype), numbers.to(source.dtype)


# Sums #########################################################################


def gather_sum_(
    out: Tensor,
    rows: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    weight: Tensor | None,
    edges: Tensor | None,
) -> None:
    """See :func:`pyg_sar.kernels.ops.gather_sum_`."""
    check_sums("gather_sum", out, rows, source, offsets, targets, weight)
    count = offsets.numel() - 1
    # One row for each target: its sum is rounded once.
    sums = torch.zeros(count, out.size(1), dtype=wide_dtype(out.dtype), device=out.device)
    place = targets_of(offsets, None, source.numel())
    for start, stop in blocks_of(source.numel(), out.size(1)):
        part = rows.index_select(0, source[start:stop]).to(sums.dtype)
        if weight is not None:
            used = weight[start:stop] if edges is None else weight[edges[start:stop]]
            part *= used.view(-1, 1)
        sums.scatter_add_(0, place[start:stop].view(-1, 1).expand_as(part), part)
    if targets is None:
        out[:count] += sums.to(out.dtype)
    else:
        out.index_add_(0, targets, sums.to(out.dtype))


def edge_dot(
    rows: Tensor,
    gradient: Tensor,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    edges: Tensor | None,
) -> Tensor:
    """See :func:`pyg_sar.kernels.ops.edge_dot`."""
    check_sums("edge_dot", gradient, rows, source, offsets, targets, None)
    out = torch.zeros(source.numel(), dtype=wide_dtype(rows.dtype), device=rows.device)
    place = targets_of(offsets, targets, source.numel())
    for start, stop in blocks_of(source.numel(), rows.size(1)):
        part = rows.index_select(0, source[start:stop]).to(out.dtype)
        part *= gradient.index_select(0, place[start:stop])
        if edges is None:
            out[start:stop] = part.sum(1)
        else:
            out[edges[start:stop].long()] = part.sum(1)
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
    """See :func:`pyg_sar.kernels.ops.extremum_`: first the extrema, then who reaches them."""
    check_sums("extremum", best, rows, source, offsets, targets, None)
    place = targets_of(offsets, targets, source.numel())
    worst = -torch.inf if largest else torch.inf
    before, bad = best.clone(), best.isnan()
    for step in range(2):
        for start, stop in blocks_of(source.numel(), rows.size(1)):
            part = rows.index_select(0, source[start:stop])
            index = place[start:stop].view(-1, 1).expand_as(part)
            if step == 0:  # NaN wins by itself.
                bad.scatter_reduce_(0, index, part.isnan(), "amax")
                part = part.masked_fill(part.isnan(), worst)
                best.scatter_reduce_(0, index, part, "amax" if largest else "amin")
            else:
                reached = part == best.index_select(0, place[start:stop])
                ties.scatter_add_(0, index, reached.to(ties.dtype))
        if step == 0:
            ties.masked_fill_(best != before, 0)
    best.masked_fill_(bad, torch.nan)
    ties.masked_fill_(bad, 0)


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
    check_sums("extremum", total, best, source, offsets, targets, None)
    place = targets_of(offsets, targets, source.numel())
    hits = torch.zeros([], dtype=torch.long, device=total.device)
    for start, stop in blocks_of(source.numel(), rows.size(1)):
        j, i = place[start:stop], source[start:stop]
        reached = rows.index_select(0, j) == best.index_select(0, i)
        total.index_add_(0, j, gradient.index_select(0, i).masked_fill(~reached, 0.0))
        hits += reached.sum()
    return hits


def gather_sum(
    rows: Tensor, source: Tensor, offsets: Tensor, weight: Tensor | None, num_targets: int
) -> Tensor:
    """See :func:`pyg_sar.functional.gather_sum`; autograd records it, with a message per edge."""
    wide = wide_dtype(rows.dtype)
    messages = rows.to(wide).index_select(0, source)
    if weight is not None:
        messages = messages * weight.to(wide).unsqueeze(-1)
    out = torch.zeros(num_targets, rows.size(1), dtype=wide, device=rows.device)
    place = targets_of(offsets, None, source.numel())
    return out.index_add(0, place, messages).to(rows.dtype)


# Attention ####################################################################


def edge_rows(
    kind: int,
    value: Tensor,
    key: Tensor | None,
    query: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    at: Tensor,
    i: Tensor,
    j: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of edges ``(j, i)`` of numbers ``at``: ``x`` and ``query`` of :func:`scores.edge_scores`, and
    values ``[B, H, C]``."""
    score = declared()[kind]
    values = value.index_select(0, j)
    x = values if key is None else key.index_select(0, j)
    queries = x if query is None else query.index_select(0, i)
    if score.joined and query is not None:
        x = x + queries
    if edge_attr is not None and edge_weight is not None:
        product = edge_attr.index_select(0, at) @ edge_weight.flatten(1)
        term = product.view([product.size(0)] + list(edge_weight.shape[1:]))  # noqa: RUF005
        x = x + term
        if score.term == "key and value":
            values = values + term
    return x, queries, values


def rows_of_att(att: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of ``att``, ``[H, C]`` each; ``other`` where there is none."""
    if att is None:
        return other, other
    return (att[0], att[1]) if att.dim() == 3 else (att, att)


def block_of(
    start: int,
    stop: int,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    edges: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Edges of a block: their numbers, the rows that they add to, the rows that they read."""
    places = torch.arange(start, stop, device=source.device)
    row = torch.searchsorted(offsets.long(), places, right=True) - 1
    numbers = places if edges is None else edges[places].long()
    return numbers, row if targets is None else targets[row], source[start:stop].long()


def attention(
    kind: int,
    value: Tensor,
    key: Tensor | None,
    query: Tensor | None,
    att: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    slope: float,
    scale: float,
    source: Tensor,
    offsets: Tensor,
    edges: Tensor | None,
    drop_key: Tensor | None,
    low: int,
    high: int,
    p: float,
) -> Tensor:
    """See :func:`pyg_sar.functional.attention`; autograd records it: all that is per edge stays."""
    count = offsets.numel() - 1
    i, j = targets_of(offsets, None, source.numel()), source.long()
    numbers = torch.arange(source.numel(), device=j.device) if edges is None else edges.long()
    x, queries, values = edge_rows(kind, value, key, query, edge_attr, edge_weight, numbers, i, j)
    first, second = rows_of_att(att, x)
    scores = edge_scores(kind, x, queries, first, second, slope, scale)
    index = i.unsqueeze(-1).expand_as(scores)
    top = torch.full([count, scores.size(1)], -torch.inf, dtype=value.dtype, device=value.device)
    top = top.scatter_reduce(0, index, scores.detach(), "amax")
    weights = (scores - top[i]).exp()
    weights = weights / torch.zeros_like(top).index_add(0, i, weights)[i]
    if drop_key is not None:
        factors = keep_factors(drop_key[numbers], value.size(1), low, high, p)
        weights = weights * factors.to(weights.dtype)
    out = torch.zeros([count, value.size(1), value.size(2)], dtype=value.dtype, device=value.device)
    return out.index_add(0, i, weights.unsqueeze(-1) * values)


def attention_(
    acc: Tensor,
    maximum: Tensor,
    normaliser: Tensor,
    kind: int,
    value: Tensor,
    key: Tensor | None,
    query: Tensor | None,
    att: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    slope: float,
    scale: float,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    edges: Tensor | None,
    drop_key: Tensor | None,
    low: int,
    high: int,
    p: float,
) -> None:
    """See :func:`pyg_sar.kernels.attention_ops.attention_`: first the maximum of the scores, then
    the sums."""
    check_offsets("attention", source, offsets)
    old = maximum.clone()
    for step in range(2):
        for start, stop in blocks_of(source.numel(), value.size(1) * value.size(2)):
            at, i, j = block_of(start, stop, source, offsets, targets, edges)
            x, queries, values = edge_rows(
                kind, value, key, query, edge_attr, edge_weight, at, i, j
            )
            first, second = rows_of_att(att, x)
            scores = edge_scores(kind, x, queries, first, second, slope, scale)
            if step == 0:
                # NaN reaches the sums by itself; -inf would give NaN where others are finite.
                scores = scores.masked_fill(scores.isnan(), -torch.inf).nan_to_num(0.0, torch.inf)
                maximum.scatter_reduce_(0, i.unsqueeze(-1).expand_as(scores), scores, "amax")
                continue
            weights = (scores - maximum[i]).exp()
            normaliser.index_add_(0, i, weights)
            if drop_key is not None:
                factors = keep_factors(drop_key[at], value.size(1), low, high, p)
                weights = weights * factors.to(weights.dtype)
            acc.index_add_(0, i, weights.unsqueeze(-1) * values)
        if step == 0:
            factor = torch.where(maximum > old, (old - maximum).exp(), torch.ones_like(old))
            acc.mul_(factor.unsqueeze(-1))
            normaliser.mul_(factor)


def attention_backward_(
    grad_value: Tensor | None,
    grad_key: Tensor | None,
    grad_query: Tensor | None,
    grad_att: Tensor | None,
    grad_edge_attr: Tensor | None,
    grad_edge_weight: Tensor | None,
    grad_out: Tensor,
    maximum: Tensor,
    normaliser: Tensor,
    delta: Tensor,
    kind: int,
    value: Tensor,
    key: Tensor | None,
    query: Tensor | None,
    att: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    slope: float,
    scale: float,
    source: Tensor,
    offsets: Tensor,
    targets: Tensor | None,
    edges: Tensor | None,
    drop_key: Tensor | None,
    low: int,
    high: int,
    p: float,
    transposed: bool,
) -> None:
    """Adds the gradients that are wanted of a shard's edges, grouped by source row or by target.

    It stands for both operators of the backward pass, ``attention_backward_sources_`` and
    ``attention_backward_targets_``.
    """
    check_offsets("attention", source, offsets)
    for start, stop in blocks_of(source.numel(), value.size(1) * value.size(2)):
        at, i, j = block_of(start, stop, source, offsets, targets, edges)
        if transposed:
            i, j = j, i
        x, queries, values = edge_rows(kind, value, key, query, edge_attr, edge_weight, at, i, j)
        first, second = rows_of_att(att, x)
        scores = edge_scores(kind, x, queries, first, second, slope, scale)
        weights, gradient = (scores - maximum[i]).exp() / normaliser[i], grad_out[i]
        inner, kept = (gradient * values).sum(-1), weights
        if drop_key is not None:
            factors = keep_factors(drop_key[at], value.size(1), low, high, p).to(weights.dtype)
            inner, kept = inner * factors, weights * factors
        grad_scores = weights * (inner - delta[i])
        grad_values = kept.unsqueeze(-1) * gradient
        of_x, of_query, of_att, of_att_2 = edge_gradients(
            kind, x, queries, first, second, slope, scale, grad_scores
        )
        if grad_value is not None:
            grad_value.index_add_(0, j, grad_values + of_x if key is None else grad_values)
        if grad_key is not None:
            grad_key.index_add_(0, j, of_x)
        if grad_query is not None:
            grad_query.index_add_(0, i, of_query)
        if grad_att is not None:
            rows = [of_att.sum(0), of_att_2.sum(0)]
            grad_att.add_(torch.stack(rows) if grad_att.dim() == 3 else rows[0])
        if edge_attr is not None and edge_weight is not None:
            both = declared()[kind].term == "key and value"
            flat = (of_x + grad_values if both else of_x).flatten(1)
            if grad_edge_attr is not None:
                grad_edge_attr[at] = flat @ edge_weight.flatten(1).t()
            if grad_edge_weight is not None:
                found = edge_attr.index_select(0, at).t() @ flat
                grad_edge_weight.add_(found.view(edge_weight.shape))
