"""What batch norm over workers costs beside PyTorch's own on the same rows, and how exact both are.

    python benchmarks/norms.py

Processor time of a worker's thread, of two workers, forward and backward; the least of many calls
that take turns. Errors of outputs and gradients: the largest one in float32 beside float64, over
the largest value.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import pyg_sar
from pyg_sar.nn import NORMS

Norm = torch.nn.BatchNorm1d


def step(norm: torch.nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, Tensor, Tensor]:
    """Seconds of this thread, outputs and gradients."""
    x = x.clone().requires_grad_()
    start = time.thread_time()
    out = norm(x)
    out.backward(gradient)
    end = time.thread_time()
    assert x.grad is not None
    return end - start, out.detach(), x.grad


def compare(rows: int, channels: int, mean: float, calls: int) -> list[float]:
    """This worker's times over PyTorch's, and errors of outputs and gradients of both."""
    torch.set_num_threads(1)
    comm = pyg_sar.comm.current()
    draw = torch.Generator().manual_seed(0)
    everyone = comm.world_size * rows
    x = torch.randn(everyone, channels, generator=draw, dtype=torch.float64).add(mean).float()
    gradient = torch.randn(everyone, channels, generator=draw)
    _, *right = step(Norm(channels).double(), x.double(), gradient.double())
    _, *plain = step(Norm(channels), x, gradient)
    own = slice(comm.rank * rows, (comm.rank + 1) * rows)
    norms = {"workers": NORMS[Norm](channels), "plain": Norm(channels)}
    found = {name: [step(norm, x[own], gradient[own])] for name, norm in norms.items()}
    for _ in range(calls):
        for name, norm in norms.items():
            found[name].append(step(norm, x[own], gradient[own]))
    seconds = {name: min(took for took, _, _ in steps) for name, steps in found.items()}
    errors = []
    for values, part in ((found["workers"][0][1:], own), (plain, slice(None))):
        errors += [
            float((v - r[part]).abs().max() / r.abs().max())
            for v, r in zip(values, right, strict=True)
        ]
    return [seconds["workers"] / seconds["plain"], *errors]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 12_500, 50_000])
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--means", type=float, nargs="+", default=[0.0, 1e4])
    parser.add_argument("--calls", type=int, default=10)
    given = parser.parse_args()
    print("| rows of a worker | mean | time, to PyTorch's | errors | PyTorch's |")
    print("|---|---|---|---|---|")
    for rows in given.rows:
        for mean in given.means:
            found = pyg_sar.launch(compare, 2, rows, given.channels, mean, given.calls)[0]
            ours, plain = (", ".join(f"{e:.0e}" for e in part) for part in (found[1:3], found[3:]))
            print(f"| {rows:,} | {mean:g} | {found[0]:.1f} | {ours} | {plain} |")


if __name__ == "__main__":
    main()
