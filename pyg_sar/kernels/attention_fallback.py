"""Attention over a shard's edges in PyTorch, a block of edges at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from pyg_sar.kernels.attention_terms import (
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
    Segments,
    wide_dtype,
)

_BLOCK = 2**18  # values that are gathered at a time
_PER_EDGE = ("value", "key", "query", "edge_attr")
_BITS = 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    """lowbias32, a bijection of 32 bits (C. Wellons, "Prospecting for hash functions", 2018)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _BITS
    return x ^ (x >> 16)


def split_seed(seed: int) -> tuple[int, int]:
    """Two words of 32 bits, each of which depends on all 64 bits of the seed (splitmix64)."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return z & _BITS, z >> 32


def threshold(p: float) -> int:
    """The 32-bit hash below which a weight is dropped."""
    return min(int(p * 2**32), _BITS)


def keep_factors(drop_key: Tensor, heads: int, seed: int, p: float) -> Tensor:
    r"""0 where an edge's weight is dropped, else :math:`1 / (1 - p)`: a function of its arguments.

    Args:
        drop_key: ``[E]``, int32 or int64 of which 32 bits count.
        heads: H.
        seed: 64 bits.
        p: Probability of 0.

    Returns:
        ``[E, H]``, float64.
    """
    low, high = split_seed(seed)
    head = torch.arange(heads, device=drop_key.device) * 0x9E3779B9 + high
    first = _mixed(((drop_key.long() & _BITS) + low) & _BITS)
    kept = _mixed(first.unsqueeze(-1) ^ (head & _BITS)) >= threshold(p)
    return kept.double() * (1 / (1 - p) if p < 1 else 0.0)


def targets_of(segments: Segments) -> Tensor:
    """The row that each edge adds to, ``[E]``."""
    counts, rows = segments.offsets.diff(), segments.targets
    if rows is None:
        rows = torch.arange(counts.numel(), device=counts.device)
    return rows.repeat_interleave(counts)


@dataclass(frozen=True, slots=True)
class _Block:
    """Edges: their source rows j, target rows i, numbers, and the rows of tensors they read."""

    j: Tensor
    i: Tensor
    numbers: Tensor
    rows: dict[str, Tensor]

    def keep(self, attention: Attention) -> Tensor | None:
        if attention.p == 0 or attention.drop_key is None:
            return None
        keys = attention.drop_key[self.numbers]
        value = self.rows["value"]
        return keep_factors(keys, value.size(1), attention.seed, attention.p).to(value.dtype)


def _blocks(attention: Attention, segments: Segments, transposed: bool) -> Iterator[_Block]:
    """A shard's edges, in order."""
    source, offsets = segments.source, segments.offsets.long()
    width = attention.value.shape[1:].numel()
    size = max(_BLOCK // max(width, 1), 1)
    given = {n: t.to(wide_dtype(t.dtype)) for n, t in attention.tensors().items()}
    for start in range(0, source.numel(), size):
        edges = torch.arange(start, min(start + size, source.numel()), device=source.device)
        row = torch.searchsorted(offsets, edges, right=True) - 1
        row = row if segments.targets is None else segments.targets[row]
        read = source[edges].long()
        j, i = (row, read) if transposed else (read, row)
        numbers = edges if segments.edges is None else segments.edges[edges].long()
        by = {"value": j, "key": j, "query": i, "edge_attr": numbers}
        rows = {n: t.index_select(0, by[n]) if n in by else t for n, t in given.items()}
        yield _Block(j, i, numbers, rows)


def _scores(attention: Attention, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores ``[B, H]`` and values ``[B, H, C]`` of a block."""
    value = rows["value"]
    key, query = rows.get("key", value), rows.get("query")
    term = None
    if "edge_attr" in rows:
        term = torch.tensordot(rows["edge_attr"], rows["edge_weight"], 1)
    if attention.kind == "dot":
        key, value = (key, value) if term is None else (key + term, value + term)
        scores = (rows["query"] * key).sum(-1) * attention.scale
        return leaky_relu(scores, attention.slope), value
    if attention.kind == "mixed":
        att, query = rows["att"], rows["query"]
        scores = (att[0] * key).sum(-1) + (att[1] * query).sum(-1)
        return leaky_relu(scores * (query * key).sum(-1).sigmoid(), attention.slope), value
    key = key if query is None else key + query
    mixed = leaky_relu(key if term is None else key + term, attention.slope)
    return (mixed if attention.kind == "additive" else (mixed * rows["att"]).sum(-1)), value


def attention(given: Attention, segments: Segments, num_targets: int) -> Tensor:
    """:func:`pyg_sar.functional.attention`, recorded by autograd: everything per edge is there."""
    i, j, numbers = targets_of(segments), segments.source.long(), segments.edges
    numbers = torch.arange(j.numel(), device=j.device) if numbers is None else numbers.long()
    by = {"value": j, "key": j, "query": i, "edge_attr": numbers}
    tensors = {n: t.to(wide_dtype(t.dtype)) for n, t in given.tensors().items()}
    rows = {n: t.index_select(0, by[n]) if n in by else t for n, t in tensors.items()}
    scores, values = _scores(given, rows)
    shape = num_targets, scores.size(1)
    index, top = i.unsqueeze(-1).expand_as(scores), scores.new_full(shape, -torch.inf).detach()
    top.scatter_reduce_(0, index, scores.detach(), "amax")
    weights = (scores - top[i]).exp()
    weights = weights / scores.new_zeros(shape).index_add(0, i, weights)[i]
    keep = _Block(j, i, numbers, rows).keep(given)
    weights = weights if keep is None else weights * keep
    out = values.new_zeros(num_targets, *values.shape[1:])
    return out.index_add(0, i, weights.unsqueeze(-1) * values)


def attention_(state: AttentionState, attention: Attention, segments: Segments) -> None:
    """:func:`~pyg_sar.kernels.attention_ops.attention_`: first the maximum of the scores, then the
    sums."""
    old, lowest = state.maximum.clone(), torch.finfo(state.maximum.dtype).min
    for block in _blocks(attention, segments, transposed=False):
        # NaN reaches the sums by itself; -inf would give NaN where it is not the only score.
        scores = _scores(attention, block.rows)[0].nan_to_num(lowest, torch.inf, lowest)
        index = block.i.unsqueeze(-1).expand_as(scores)
        state.maximum.scatter_reduce_(0, index, scores, "amax")
    grown = state.maximum > old
    factor = torch.where(grown, (old - state.maximum).exp(), 1)
    state.acc.mul_(factor.unsqueeze(-1))
    state.normaliser.mul_(factor)
    for block in _blocks(attention, segments, transposed=False):
        scores, values = _scores(attention, block.rows)
        weights = (scores - state.maximum[block.i]).exp()
        state.normaliser.index_add_(0, block.i, weights)
        keep = block.keep(attention)
        weights = weights if keep is None else weights * keep
        state.acc.index_add_(0, block.i, weights.unsqueeze(-1) * values)


def backward_(
    gradients: AttentionGradients,
    attention: Attention,
    cotangent: Cotangent,
    segments: Segments,
    transposed: bool,
) -> None:
    """Adds the wanted gradients of a shard's edges, whichever they are."""
    wanted = gradients.wanted()
    for block in _blocks(attention, segments, transposed):
        for name, found in _gradients(attention, cotangent, block, list(wanted)).items():
            if name == "edge_attr":
                wanted[name][block.numbers] = found
            elif name in _PER_EDGE:
                wanted[name].index_add_(0, block.i if name == "query" else block.j, found)
            else:
                wanted[name].add_(found)


def _gradients(
    attention: Attention, cotangent: Cotangent, block: _Block, names: list[str]
) -> dict[str, Tensor]:
    """A block's gradients, by differentiating what has the wanted ones with the weights fixed."""
    rows = {n: t.detach().requires_grad_(n in names) for n, t in block.rows.items()}
    with torch.enable_grad():
        scores, values = _scores(attention, rows)
    grad_out = cotangent.grad_out[block.i]
    weights = (scores.detach() - cotangent.maximum[block.i]).exp() / cotangent.normaliser[block.i]
    keep = block.keep(attention)
    keep = torch.ones_like(weights) if keep is None else keep
    inner = torch.linalg.vecdot(grad_out, values.detach())
    grad_scores = weights * (keep * inner - cotangent.delta[block.i])
    grad_values = (weights * keep).unsqueeze(-1) * grad_out
    pairs = [(t, g) for t, g in ((scores, grad_scores), (values, grad_values)) if t.requires_grad]
    leaves = [rows[n] for n in names]
    outputs, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves, cotangents, materialize_grads=True)
    return dict(zip(names, found, strict=True))
