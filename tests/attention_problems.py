"""Attention over random edges, and what it must give: a loop over targets in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import scatter, softmax

from pyg_sar.kernels import fallback, ops
from pyg_sar.kernels.attention_ops import keep_factors
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.kernels.scores import SCORES, edge_scores, number_of

MISSING = ops.why_missing()
NATIVE = [pytest.param(True, marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)))]
BOTH = [False, *NATIVE]
"""By PyTorch, and by the C++ kernels where there are any."""


@dataclass(frozen=True)
class Edges:
    """What a shard's edges are to the operators."""

    source: Tensor
    offsets: Tensor
    targets: Tensor | None
    edges: Tensor | None


@dataclass(frozen=True)
class Problem:
    """Edges (source, target) in any order, their attention, and dL/dout."""

    attention: Attention
    source: Tensor
    target: Tensor
    num_targets: int
    grad_out: Tensor

    @property
    def num_sources(self) -> int:
        return self.attention.value.size(0)


def grouped(
    key: Tensor, other: Tensor, numbers: Tensor, num_keys: int, squeezed: bool, index: torch.dtype
) -> Edges:
    """Edges by key; squeezed: only the keys that occur."""
    order = key.argsort(stable=True)
    counts = torch.bincount(key, minlength=num_keys)
    keys = counts.nonzero().view(-1) if squeezed else None
    counts = counts if keys is None else counts[keys]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Edges(other[order].to(index), offsets.to(index), keys, numbers[order].to(index))


def problem(
    kind: str,
    heads: int = 4,
    channels: int = 8,
    features: int = 0,
    p: float = 0.0,
    dtype: torch.dtype = torch.float64,
    edges: int = 300,
    sources: int = 20,
    targets: int = 15,
    own_key: bool = True,
    seed: int = 0,
) -> Problem:
    """Duplicates, a hub, and rows without edges; values that all dtypes hold exactly."""
    draw = torch.Generator().manual_seed(seed)
    score = SCORES[kind]
    if not score.softmax:
        heads, features = 1, min(features, 1)
    features = 0 if score.term == "none" else features
    row = [heads, channels]
    of_key, of_query = ([heads] if n else row for n in (score.narrow_key, score.narrow_query))
    att = [None, row, [2, *row]][score.att]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).bfloat16().to(dtype)

    source = torch.randint(max(sources - 2, 1), (edges,), generator=draw)
    target = (torch.rand(edges, generator=draw) ** 3 * max(targets - 2, 1)).long()
    attention = Attention(
        kind=kind,
        value=normal(sources, heads, channels),
        key=normal(sources, *of_key) if own_key or score.narrow_key else None,
        query=normal(targets, *of_query),
        att=None if att is None else normal(*att),
        edge_attr=normal(edges, features) if features else None,
        edge_weight=normal(features, *of_key) if features and score.term != "factor" else None,
        slope=1.0 if kind == "dot" and seed % 2 else 0.2,
        scale=channels**-0.5,
        drop_key=torch.randperm(2**20, generator=draw)[:edges] if p else None,
        seed=seed + 2**40,
        p=p,
    )
    return Problem(attention, source, target, targets, normal(targets, heads, channels))


def edge_terms(attention: Attention, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Scores ``[E, H]`` and values ``[E, H, C]``, from their definition.

    A score that isn't written out here is that of its declared formula, of which autograd takes the
    gradients; tests of its layers tell whether it is the right one.
    """
    value, query = attention.value, attention.query
    key = value if attention.key is None else attention.key
    term: Tensor | float = 0.0

    def leaky(scores: Tensor) -> Tensor:
        return torch.where(scores > 0, scores, attention.slope * scores)

    if attention.kind == "tanh":
        assert query is not None
        scores = (key[source] + query[target]).tanh()
        return (
            scores if attention.edge_attr is None else scores * attention.edge_attr,
            value[source],
        )
    if attention.edge_attr is not None and attention.edge_weight is not None:
        term = torch.einsum("ed,d...->e...", attention.edge_attr, attention.edge_weight)
    if attention.kind == "dot":
        assert query is not None
        products = query[target] * (key[source] + term)
        return leaky(attention.scale * products.sum(-1)), value[source] + term
    if attention.kind == "mixed":
        assert query is not None and attention.att is not None
        gate = (query[target] * key[source]).sum(-1).sigmoid()
        ends = (attention.att[0] * key[source] + attention.att[1] * query[target]).sum(-1)
        return leaky(ends * gate), value[source]
    if attention.kind not in ("additive", "gatv2"):
        assert query is not None and attention.att is not None
        first, second = fallback.rows_of_att(attention.att, key)
        number, terms = number_of(attention.kind), (attention.slope, attention.scale)
        ends = key[source] + term, query[target]
        return edge_scores(number, *ends, first, second, *terms), value[source]
    mixed = key[source] + term + (0.0 if query is None else query[target])
    mixed = leaky(mixed)
    scores = mixed if attention.kind == "additive" else (attention.att * mixed).sum(-1)
    return scores, value[source]


def dropout_of(given: Problem) -> Tensor:
    attention = given.attention
    heads = attention.value.size(1)
    if attention.drop_key is None:
        return torch.ones(given.source.numel(), heads, dtype=torch.float64)
    return keep_factors(attention.drop_key, heads, attention.seed, attention.p)


def looped(given: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients in float64, target by target."""
    leaves = {n: t.double().detach().requires_grad_() for n, t in given.attention.tensors().items()}
    attention = replace(given.attention, **leaves)
    scores, values = edge_terms(attention, given.source, given.target)
    keep, out = dropout_of(given), []
    for i in range(given.num_targets):
        at = (given.target == i).nonzero().view(-1)
        weights = scores[at] if not attention.score.softmax else torch.softmax(scores[at], 0)
        weights = weights * keep[at]
        out.append((weights.unsqueeze(-1) * values[at]).sum(0))
    result = torch.stack(out) if out else attention.value.new_zeros(given.grad_out.shape)
    found = torch.autograd.grad(
        result, list(leaves.values()), given.grad_out.double(), materialize_grads=True
    )
    return result.detach(), dict(zip(leaves, found, strict=True))


def plain(given: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """The same as PyG computes it, in the problem's dtype."""
    leaves = {n: t.detach().requires_grad_() for n, t in given.attention.tensors().items()}
    attention = replace(given.attention, **leaves)
    scores, values = edge_terms(attention, given.source, given.target)
    weights = scores
    if attention.score.softmax:
        weights = softmax(scores, given.target, num_nodes=given.num_targets)
    messages = weights.unsqueeze(-1) * values
    out = scatter(messages, given.target, 0, given.num_targets, "sum")
    found = torch.autograd.grad(out, list(leaves.values()), given.grad_out)
    return out.detach(), dict(zip(leaves, found, strict=True))


def shards_of(
    given: Problem, count: int, squeezed: bool = False, index: torch.dtype = torch.int32
) -> Iterator[tuple[slice, Edges, Edges]]:
    """Runs of source rows, with their edges by target and by source."""
    rows = -(-given.num_sources // count)
    for start in range(0, max(given.num_sources, 1), max(rows, 1)):
        stop = min(start + rows, given.num_sources)
        numbers = ((given.source >= start) & (given.source < stop)).nonzero().view(-1)
        source, target = given.source[numbers] - start, given.target[numbers]
        forward = grouped(target, source, numbers, given.num_targets, squeezed, index)
        yield (
            slice(start, stop),
            forward,
            grouped(source, target, numbers, stop - start, squeezed, index),
        )
