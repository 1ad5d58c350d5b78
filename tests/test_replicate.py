"""Replicas: groups of workers that train one model on samples of their own.

The oracle is what ``DistributedDataParallel`` computes, by one process: it runs the replicas'
samples one after the other and averages the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, OUT, TOLERANCE, error, make_graph, node_losses
from torch import Tensor
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, GATConv, SAGEConv

import pyg_sar

SHAPES = [(1, 2), (2, 1), (2, 2), (1, 4), (3, 1)]
SAMPLES = 6
LIMIT = 0.02


class Net(torch.nn.Module):
    """Layers, a norm, a head that odd samples leave out, and a scale that is used elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(CHANNELS, 8), GATConv(8, OUT)])
        self.norm = BatchNorm(8)
        self.head = torch.nn.Linear(OUT, OUT)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, OUT))

    def forward(self, x: Tensor, edge_index: Tensor, odd: int = 0) -> Tensor:
        x = self.norm(self.convs[0](x, edge_index).tanh())
        x = self.convs[1](x, edge_index).tanh() * self.scale + self.convs[1].bias.sin()
        return x if odd else self.head(x)


def loss_of(model: Any, data: Any, k: int) -> Tensor:
    out = model(data.x, data.edge_index, k % 2)
    return node_losses(out).mean() + 0.1 * model.scale.square().sum()


# Trainings: what each backward pass is of, and what is done with the gradients ##############


def sgd(model: Any, backward: Callable[..., None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for k in range(3):
        optimizer.zero_grad()
        backward(k)
        optimizer.step()


def accumulated_and_clipped(model: Any, backward: Callable[..., None]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for k in range(2):
        optimizer.zero_grad(set_to_none=k == 0)
        backward(k, 0.5)
        backward(k + 1, 0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()


def hooked(model: Any, backward: Callable[..., None]) -> None:
    """A hook that is not linear, on the gradient of each sample; one that is frozen, and thawed."""
    handles = [p.register_hook(lambda g: g.clamp(-LIMIT, LIMIT)) for p in model.parameters()]
    backward(0)
    for handle in handles:
        handle.remove()
    model.head.weight.requires_grad_(False)
    backward(1)
    model.head.weight.requires_grad_(True)
    model.head.bias = torch.nn.Parameter(model.head.bias.detach().clone())
    backward(2)


def line_search(model: Any, backward: Callable[..., Tensor]) -> None:
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(0)

    optimizer.step(closure)


RUNS = (sgd, accumulated_and_clipped, hooked, line_search)


def state(model: Any) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        found[f"{name}.grad"] = None if p.grad is None else p.grad.clone()
    return {**found, **{name: b.clone() for name, b in model.named_buffers()}}


def made() -> Any:
    torch.manual_seed(0)
    return Net().double()


class OneProcess:
    """Runs the samples of all replicas, each with its own buffers, and averages the gradients."""

    def __init__(self, samples: list[Data], replicas: int) -> None:
        self.samples, self.replicas, self.model = samples, replicas, made()
        self.buffers = [[b.clone() for b in self.model.buffers()] for _ in range(replicas)]

    def backward(self, k: int, factor: float = 1.0) -> Tensor:
        before = [(p, p.grad) for p in self.model.parameters()]
        found: list[list[Tensor]] = [[] for _ in before]
        losses = []
        for r in range(self.replicas):
            self.use_buffers(r)
            self.model.zero_grad()
            sample = self.samples[k * self.replicas % len(self.samples) + r]
            loss = loss_of(self.model, sample, k + r) * factor
            loss.backward()
            losses.append(loss.detach())
            for own, (p, _) in zip(found, before, strict=True):
                own += [] if p.grad is None else [p.grad]
            for kept, buffer in zip(self.buffers[r], self.model.buffers(), strict=True):
                kept.copy_(buffer)
        for own, (p, grad) in zip(found, before, strict=True):
            mean = [torch.stack(own).sum(0) / self.replicas] if own else []
            terms = mean if grad is None else [grad, *mean]
            p.grad = torch.stack(terms).sum(0) if terms else None
        return torch.stack(losses).mean()

    def use_buffers(self, r: int) -> None:
        for kept, buffer in zip(self.buffers[r], self.model.buffers(), strict=True):
            buffer.copy_(kept)


def in_a_worker(roots: list[Path], run: Any) -> tuple[int, dict[str, Tensor | None]]:
    comm = pyg_sar.init()
    order = list(DistributedSampler(roots, comm.replicas, comm.replica, shuffle=False))
    model = pyg_sar.distribute(made())

    def backward(k: int, factor: float = 1.0) -> Tensor:
        data = pyg_sar.load_partition(roots[order[k % len(order)]])
        loss = loss_of(model, data, k + comm.replica) * factor
        loss.backward()
        return comm.average(loss)

    run(model, backward)
    return comm.replica, state(model)


def train(roots: list[Path]) -> list[tuple[int, dict[str, Tensor | None]]]:
    return [in_a_worker(roots, run) for run in RUNS]


@pytest.fixture(scope="module")
def samples() -> list[Data]:
    return [make_graph(20 + 3 * k, 60 + 10 * k, seed=k) for k in range(SAMPLES)]


@pytest.fixture(scope="module")
def folders(samples: list[Data], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("samples")

    def write(parts: int) -> list[Path]:
        roots = [folder / f"{parts}-{k}" for k in range(SAMPLES)]
        for data, root in zip(samples, roots, strict=True):
            if not root.exists():
                pyg_sar.write_partitions(data, parts, root, "random")
        return roots

    return write


@pytest.mark.parametrize("shape", SHAPES)
def test_replicas_train_as_one_process_that_averages(shape, samples, folders):
    replicas, parts = shape
    given = train, replicas * parts, folders(parts)
    workers = pyg_sar.launch(*given, replicas=replicas, timeout=60.0)
    for k, run in enumerate(RUNS):
        oracle = OneProcess(samples, replicas)
        run(oracle.model, oracle.backward)
        for rank, worker in enumerate(workers):
            replica, found = worker[k]
            assert replica == rank // parts
            oracle.use_buffers(replica)
            expected = state(oracle.model)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert error(found[name], value) <= TOLERANCE, (run.__name__, rank, name)
