"""Kernels on several threads: graphs that are large enough for all of them, and the same results.

``extensions/sanitize.sh thread`` runs these under ThreadSanitizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pyg_sar import functional
from pyg_sar.kernels import ops
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.space.shard import Segments

pytestmark = pytest.mark.skipif(ops.why_missing() is not None, reason=str(ops.why_missing()))
EDGES, ROWS, WIDTH = 2**16 + 77, 1500, 12
Compute = Callable[[Segments, Tensor, Tensor], tuple[Tensor, ...]]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sums(edges: Segments, rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    out = functional.gather_sum(rows, edges.source, edges.offsets, weight)
    return out, *torch.autograd.grad(out.square().sum(), (rows, weight))


def extrema(edges: Segments, rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    best, ties = torch.full_like(rows, -torch.inf), torch.zeros_like(rows)
    ops.extremum_(best, ties, rows, edges.source, edges.offsets, edges.targets)
    source, offsets, _ = ops.transpose(edges.source, edges.offsets, edges.targets, ROWS, ROWS)
    total = torch.zeros_like(rows)
    found = ops.extremum_backward_(total, rows, ties, best, source, offsets)
    return best, ties, total, found


def structures(edges: Segments, rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    given = (edges.source, edges.offsets, edges.targets, ROWS, ROWS)
    source, offsets, numbers = ops.transpose(*given, numbered=True)
    assert numbers is not None
    return source, offsets, numbers, *ops.sort_edges(edges.source, ROWS)


def norms(edges: Segments, rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    kernels, many = torch.ops.pyg_sar, rows.repeat(9, 1)
    moments = kernels.column_moments(many)
    products = kernels.column_products(many.flip(0), many, moments[0])
    return moments, products, kernels.scale_rows(many, *moments, products[0])


def attention(kind: str) -> Compute:
    def compute(edges: Segments, rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        heads, inner = 3, {"additive": [3]}.get(kind, [3, 4])
        shape = {"gatv2": [3, 4], "mixed": [2, 3, 4]}.get(kind)
        att = None if shape is None else torch.linspace(-1, 1, 12 * (len(shape) - 1)).view(shape)
        attr = None if kind == "mixed" else weight.unsqueeze(-1)
        terms = Attention(
            kind=kind,  # type: ignore[arg-type]
            value=rows.view(ROWS, heads, 4),
            key=rows.flip(0)[:, : 3 * len(inner) ** 2].reshape(ROWS, *inner),
            query=rows.flip(1)[:, : 3 * len(inner) ** 2].reshape(ROWS, *inner),
            att=None if att is None else att.double(),
            edge_attr=attr,
            edge_weight=None if attr is None else torch.full([1, *inner], 0.3).double(),
            slope=0.2,
            drop_key=torch.arange(EDGES),
            p=0.3,
        )
        leaves = [t.detach().requires_grad_() for t in terms.tensors().values()]
        names = dict(zip(terms.tensors(), leaves, strict=True))
        given = {n: names.get(n, getattr(terms, n)) for n in Attention.__dataclass_fields__}
        del given["places"], given["bias"]
        ends = {"source": edges.source, "offsets": edges.offsets, "edges": edges.edges}
        out = functional.attention(**given, **ends)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    return compute


OPERATIONS: dict[str, Compute] = {
    "sums": sums,
    "extrema": extrema,
    "structures": structures,
    "norms": norms,
    "additive": attention("additive"),
    "gatv2": attention("gatv2"),
    "dot": attention("dot"),
    "mixed": attention("mixed"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_threads_give_what_one_gives(name: str, threads: None) -> None:
    draw = torch.Generator().manual_seed(0)
    ends = torch.rand(2, EDGES, generator=draw) ** 3 * (ROWS - 5)  # hubs, and rows without edges
    rows = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    weight = torch.randn(EDGES, generator=draw, dtype=torch.float64)
    found = []
    for count in (1, 4):
        torch.set_num_threads(count)
        source, offsets, numbers = functional.sorted_edges(ends.long(), ROWS, ROWS)
        edges = Segments(source, offsets, None, numbers)
        found.append(OPERATIONS[name](edges, rows.clone(), weight.clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
