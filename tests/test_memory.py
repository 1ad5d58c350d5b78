"""What a pass holds at its peak, in bytes, counted by the tensors that are alive."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from oracle import workers
from torch import Tensor
from torch_geometric.nn import GATConv, SimpleConv

import pyg_sar
from pyg_sar.comm.group import current
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.kernels import ops
from pyg_sar.space import draws
from pyg_sar.space.index_space import DistEdgeIndex, dist_edge_index, plain
from pyg_sar.tensors import node_rows, wrap
from pyg_sar.tensors.node_tensor import RULES
from pyg_sar.tools.rates import LiveBytes

NODES, EDGES, HEADS, CHANNELS = 4000, 40_000, 4, 32
WIDE = NODES * HEADS * CHANNELS * 4  # bytes of a row of all heads for each node, float32

needs_kernels = pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")


def graph(width: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES), generator=draw)
    return torch.randn(NODES, width, generator=draw), edges


def peak_of(run: Callable[[], object]) -> int:
    """The peak of the second pass: the first one makes what is kept with the edges."""
    run()
    with LiveBytes() as live:
        run()
    return live.peak


def test_live_bytes_follow_tensors() -> None:
    before = torch.zeros(10)
    with LiveBytes() as live:
        kept = before + 1
        view = kept[2:]
        assert live.now == 40
        big = torch.zeros(1000)
        del big, kept
        assert (live.now, live.peak) == (40, 4040)
        before.add_(1)
        del view
        assert live.now == 0


@needs_kernels
def test_attention_holds_no_products_of_all_rows() -> None:
    """Values, output, output with bias; then values, output with bias, the values' gradient.

    PyG's graph of the score terms would add a product for each, and a sum of all products the
    cotangent's.
    """
    x, edges = graph(16)
    layer = pyg_sar.distribute(GATConv(16, CHANNELS, heads=HEADS, add_self_loops=False))
    gradient = torch.randn(NODES, HEADS * CHANNELS)
    peak = peak_of(lambda: layer(x, edges).backward(gradient))
    per_head = NODES * HEADS * 4
    products = 2**18 * 4
    assert 3 * WIDE < peak <= 3 * WIDE + products + 10 * per_head


@needs_kernels
def test_a_mean_divides_no_copy_of_its_gradient() -> None:
    x, edges = graph(HEADS * CHANNELS)
    layer, gradient = pyg_sar.distribute(SimpleConv("mean")), torch.randn_like(x)
    x.requires_grad_()
    out = layer(x, edges)
    peak = peak_of(lambda: torch.autograd.grad(out, x, gradient, retain_graph=True))
    assert WIDE <= peak <= WIDE + EDGES * 4 + 4 * NODES * 8


def _peaks_of_draws(width: int) -> tuple[list[int], int]:
    draws._PIECE, draws._comes_in_pieces = 2**14, lambda make: True
    comm = current()
    rows = node_rows(comm, torch.arange(comm.rank, NODES, comm.world_size), NODES)
    x = wrap(torch.ones(rows.count, width), rows, 0)
    peaks = []
    for name, args in (("bernoulli_", (0.5,)), ("randn_like", ()), ("bernoulli", ())):
        op = getattr(torch.ops.aten, name)
        with LiveBytes() as live, torch.no_grad():
            RULES[name](op.float if args else op.default, (x, *args), {})
        peaks.append(live.peak)
    return peaks, x.local.numel() * 4


def test_draws_for_node_tensors_hold_no_rows_of_others() -> None:
    """A few copies of a worker's own rows, and of one piece: not all rows."""
    for peaks, own in workers(_peaks_of_draws, 4, 128):
        assert max(peaks) < 2.5 * own + 6 * 2**14 * 4 < NODES * 128 * 4


def edges_in_space(order: bool) -> DistEdgeIndex:
    _, edges = graph(1)
    plan = HaloPlan(current(), NODES, [0], torch.empty(0, dtype=torch.long), [0])
    return dist_edge_index(edges, plan).ordered(torch.arange(EDGES) if order else None)


def test_all_edges_selected_share_their_memory() -> None:
    edges = edges_in_space(order=True)
    mask = torch.ones(EDGES, dtype=torch.bool)
    with LiveBytes() as live:
        chosen = edges[:, mask]
    # Others may have lost some: it is a list of its own there and here.
    assert chosen is not edges and chosen.by_content and not edges.by_content
    assert plain(chosen).data_ptr() == plain(edges).data_ptr()
    assert live.now == 4 * EDGES  # the columns, by which it is found again
    assert torch.equal(chosen.order, edges.order)
    mask[7] = False
    fewer = edges[:, mask]
    assert fewer.size(1) == EDGES - 1 and edges.size(1) == EDGES
    assert fewer[:, torch.ones(EDGES - 1, dtype=torch.bool)].size(1) == EDGES - 1


def test_places_of_joined_edges_are_made_when_asked_for() -> None:
    edges, loops = edges_in_space(order=True), torch.arange(NODES).expand(2, -1)
    with LiveBytes() as live:
        joined = torch.cat([edges, loops], 1)
        without = live.now
        order = joined.order
    assert live.now - without == 8 * (EDGES + NODES)
    assert torch.equal(order, torch.arange(EDGES + NODES)) and joined.order is order
    assert joined[0].order is order
    assert torch.cat([edges_in_space(order=False), loops], 1).order is None


class Watched(GATConv):
    """Reads a score term once more, for an output of its own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(x, edge_index)
        term = (self.lin(x).view(-1, self.heads, self.out_channels) * self.att_src).sum(-1)
        return found * term.sigmoid().repeat_interleave(self.out_channels, 1)


def _double(**options: object) -> tuple[torch.nn.Module, Tensor, Tensor]:
    x, edges = graph(6)
    torch.manual_seed(1)
    layer = GATConv(6, 5, heads=3, **options)  # type: ignore[arg-type]
    return layer.double(), x.double(), edges


def _gradients(layer: torch.nn.Module, x: Tensor, edges: Tensor, passes: int) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x, edges)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    for _ in range(passes):
        (out * weights).sum().backward(retain_graph=True)
    found = [p.grad for p in layer.parameters() if p.requires_grad]
    return [out.detach(), *(g for g in (x.grad, *found) if g is not None)]


@pytest.mark.parametrize("case", ["plain", "twice", "frozen", "hooked", "watched", "residual"])
def test_terms_that_come_together_have_the_same_gradients(case: str) -> None:
    layer, x, edges = _double(residual=case == "residual")
    if case == "watched":
        layer.__class__ = Watched
    if case == "frozen":
        layer.att_src.requires_grad_(False)
    here = pyg_sar.distribute(copy.deepcopy(layer))
    if case == "hooked":
        for module in (layer, here):
            module.lin.register_forward_hook(lambda _module, _args, out: out * 0.5)
    passes = 2 if case == "twice" else 1
    expected = _gradients(layer, x, edges, passes)
    found = _gradients(here, x, edges, passes)
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-10 * other.abs().max()
