"""A case of the contract: what is done with a model, alike in one process and on workers.

The same function runs with the plain model on the whole graph, and with the distributed one on
workers, by one policy after the other. What it returns is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import CHANNELS, OUT, TOLERANCE, error, gradient_scale, node_losses, whole, workers
from torch import Tensor
from torch.nn import Linear
from torch.utils._pytree import tree_map
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy

WORLD = 3
THREE_MODES = tuple(SARPolicy(mode=mode) for mode in (1, 2, 3))


@dataclass
class Case:
    """Something that is done with a model.

    Attributes:
        use: Takes the model and the graph; gives tensors, dicts of gradients, or lists of these.
        make: Makes the plain model.
        policies: How workers run it.
        tolerance: Of the numbers, relative to the largest one, or the largest of the gradients.
    """

    use: Callable[[Any, Data], Any]
    make: Callable[[], torch.nn.Module]
    policies: Sequence[SARPolicy] = THREE_MODES
    tolerance: float = TOLERANCE


class Nonlinear(MessagePassing):
    """A message whose backward pass needs all of its inputs (case 2)."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__(aggr=aggr)
        self.lin = Linear(2 * CHANNELS, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], dim=-1)).tanh()


def leaf(data: Data) -> Tensor:
    """The features, which need a gradient."""
    return data.x.clone().requires_grad_()


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    """A copy of what the parameters' gradients are."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def one_step(model: Any, data: Data) -> list[Any]:
    """Outputs and all gradients of a pass."""
    x = leaf(data)
    model.zero_grad()
    out = model(x, data.edge_index)
    node_losses(out).mean().backward()
    return [out.detach(), x.grad, gradients(model)]


def made(case: Case) -> torch.nn.Module:
    """The plain model in float64, of the same numbers each time."""
    torch.manual_seed(5)
    return case.make().double()


def run(root: Path, cases: Sequence[Case]) -> list[Any]:
    """A worker's part: each case by each of its policies."""
    data = pyg_sar.load_partition(root)
    return [
        tree_map(whole, case.use(pyg_sar.distribute(made(case), policy), data))
        for case in cases
        for policy in case.policies
    ]


def check(
    cases: dict[str, Case], data: Data, root: Path, start: Callable[..., list[Any]] = workers
) -> list[list[Any]]:
    """Runs cases in one launch of workers, or of ``parts``, and compares them with one process.

    Returns:
        For each worker what it found, for each case by each of its policies.
    """
    results = start(run, WORLD, root, list(cases.values()))
    expected = {name: case.use(made(case), data) for name, case in cases.items()}
    steps = [(name, case, policy) for name, case in cases.items() for policy in case.policies]
    for rank, found in enumerate(results):
        for (name, case, policy), one in zip(steps, found, strict=True):
            agree(one, expected[name], case.tolerance, f"{name}, rank {rank}, {policy}")
    return results


def agree(found: Any, expected: Any, tolerance: float, where: str) -> None:
    """Fails where results differ; gradients are judged by the largest of them."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        scale = gradient_scale(expected)
        for name, value in expected.items():
            assert error(found[name], value, scale) <= tolerance, f"{where}: {name}"
    elif isinstance(expected, list | tuple):
        for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            agree(mine, theirs, tolerance, f"{where}: {place}")
    elif isinstance(expected, Tensor):
        assert error(found, expected) <= tolerance, where
    else:
        assert found == expected, where
