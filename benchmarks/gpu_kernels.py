"""Times of the Triton kernels on a GPU, by the size of their tiles and their warps.

    python benchmarks/gpu_kernels.py --edges 8000000

A power-law graph, float32; medians of ``triton.testing.do_bench``, which empties the cache before
each run. ``now``: as :mod:`pyg_sar.kernels.triton_operators` has them. Arguments aren't checked,
and kernels are not compared with PyTorch's operators: ``pytest tests/test_gpu_kernels.py`` does.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
from torch import Tensor

from pyg_sar.kernels import on_gpu, triton_operators
from pyg_sar.kernels.attention_ops import (
    attention_,
    attention_backward_sources_,
    attention_backward_targets_,
)
from pyg_sar.kernels.attention_terms import (
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
)
from pyg_sar.space.shard import segments_of
from pyg_sar.tools.graph_sources import SyntheticGraph, synthetic_graph

SHAPES = [(k, *s) for k in ("additive", "gatv2", "dot") for s in ((4, 8), (4, 32))]
SHAPES += [("additive", 1, 64), ("additive", 4, 64)]
TILES = [(256, 1), (256, 2), (512, 1), (512, 2), (1024, 1)]


def attention(kind: str, heads: int, channels: int, nodes: int) -> Attention:
    draw = partial(torch.randn, nodes, heads, device="cuda")
    if kind == "additive":
        return Attention(kind=kind, value=draw(channels), key=draw(), query=draw(), slope=0.2)
    if kind == "gatv2":
        att = draw(channels)[0].clone()
        return Attention(kind=kind, value=draw(channels), query=draw(channels), att=att, slope=0.2)
    return Attention(
        kind=kind, value=draw(channels), key=draw(channels), query=draw(channels), slope=1.0
    )


def problems(edge_index: Tensor, nodes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names of kernels, and calls."""
    source, target = edge_index
    forward, backward = (
        segments_of(a, b, nodes, nodes) for a, b in ((source, target), (target, source))
    )
    for width in (100, 256):
        rows, out = torch.randn(2, nodes, width, device="cuda")
        at = forward.source, forward.offsets, forward.targets
        yield f"sum {width}", partial(triton_operators.gather_sum_, out, rows, *at, None, None)
        if width == 100:
            run = partial(triton_operators.edge_dot, rows, out, *at, forward.edges)
            yield f"product {width}", run
    for kind, heads, channels in SHAPES:
        a = attention(kind, heads, channels, nodes)
        state = attention_(AttentionState.start(nodes, a.value), a, forward)
        out = state.finish()
        cotangent = Cotangent.of(torch.randn_like(out), out, state.maximum, state.normaliser)
        wanted = {name: torch.zeros_like(t) for name, t in a.tensors().items()}
        given = AttentionGradients(**wanted), a, cotangent
        name = f"{kind} {heads}x{channels}"
        yield f"{name}, forward", partial(attention_, state, a, forward)
        yield f"{name}, by source", partial(attention_backward_sources_, *given, backward)
        if kind != "additive":
            yield f"{name}, by target", partial(attention_backward_targets_, *given, forward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=8_000_000)
    args = parser.parse_args()
    names = ("SUMS", "PRODUCTS", "FORWARD", "BACKWARD")
    now = {name: getattr(triton_operators, name) for name in names}
    on_gpu._agrees = lambda *given: True  # type: ignore[assignment]
    triton_operators._check_edges = lambda *given: None
    graph = synthetic_graph(SyntheticGraph(nodes=args.nodes, edges=args.edges, features=1))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"| ms, {args.edges} edges | now | {' | '.join(f'{t}, {w}' for t, w in TILES)} |")
    print("|---" * (2 + len(TILES)) + "|")
    with torch.no_grad():
        for name, run in problems(graph.edge_index.cuda(), args.nodes):
            found = []
            for how in (now, *(dict.fromkeys(names, tile) for tile in TILES)):
                vars(triton_operators).update(how)
                run()
                found.append(triton.testing.do_bench(run, return_mode="median"))
            vars(triton_operators).update(now)
            print(f"| {name} | {' | '.join(f'{t:.3f}' for t in found)} |", flush=True)


if __name__ == "__main__":
    main()
