"""Derivatives of any order where messages are PyG's own, and an error by name where they aren't.

The oracle is the same code in one process with plain PyG. Most cases are those of interatomic
potentials: forces are the derivative of the energy, a loss of forces is differentiated again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from oracle import TOLERANCE, error, gradient_scale, make_graph, parts, set_policy, whole, workers
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import (
    BatchNorm,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphNorm,
    MeanAggregation,
    MessagePassing,
    SAGEConv,
    TransformerConv,
    global_add_pool,
    global_max_pool,
)
from torch_geometric.nn.models.schnet import CFConv

import pyg_sar
from pyg_sar import SARPolicy

ATOMS, WIDTH, KINDS, GRAPHS = 36, 8, 3, 3
ONE_SHOT = SARPolicy(mode=3)


class Edges(MessagePassing):
    """Aggregates at the sources, so that edge-level rows travel to these."""

    def __init__(self) -> None:
        super().__init__(aggr="add", flow="target_to_source")
        self.lin = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.tanh(self.lin(x_j)) * edge_attr.sin()


class Potential(torch.nn.Module):
    """Energies of atoms from distances, by one kind of message after the other.

    Args:
        parts: What it consists of besides CFConv.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(KINDS, WIDTH)
        self.filters = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Softplus(), torch.nn.Linear(WIDTH, WIDTH)
        )
        self.cfconv = CFConv(WIDTH, WIDTH, WIDTH, self.filters, 4.0)
        self.convs = torch.nn.ModuleDict()
        if "attention" in parts:
            self.convs["attention"] = GATv2Conv(WIDTH, WIDTH // 2, heads=2, edge_dim=WIDTH)
        if "mean" in parts:
            self.convs["mean"] = SAGEConv(WIDTH, WIDTH, aggr=MeanAggregation())
        if "reversed" in parts:
            self.convs["reversed"] = Edges()
        self.norms = torch.nn.ModuleList()
        if "norm" in parts:
            self.norms += [BatchNorm(WIDTH), GraphNorm(WIDTH)]
        self.head = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Softplus())

    def forward(self, data: Data, pos: Tensor) -> Tensor:
        source, target = data.edge_index
        distance = (pos[source] - pos[target]).square().sum(-1).add(0.1).sqrt()
        radial = torch.exp(-(distance.view(-1, 1) - torch.linspace(0, 3, WIDTH)).square())
        h = self.embedding(data.z)
        h = h + torch.tanh(self.cfconv(h, data.edge_index, distance, radial))
        for name, conv in self.convs.items():
            given = () if name == "mean" else (radial,)
            h = h + torch.tanh(conv(h, data.edge_index, *given))
        for norm in self.norms:
            h = norm(h)
        return self.head(h)


def atoms(seed: int = 0) -> Data:
    graph = make_graph(ATOMS, 150, seed)
    draw = torch.Generator().manual_seed(seed)
    return Data(
        z=torch.randint(KINDS, (ATOMS,), generator=draw),
        pos=torch.randn(ATOMS, 3, generator=draw),
        force=torch.randn(ATOMS, 3, generator=draw),
        edge_index=graph.edge_index,
        batch=torch.arange(ATOMS) * GRAPHS // ATOMS,
        num_nodes=ATOMS,
    )


# Losses of gradients: of a model, a part of the graph (or all of it), and positions ###############


def forces(model: Any, data: Data, pos: Tensor) -> Tensor:
    """A loss of forces, which are the derivative of a sum over atoms."""
    energy = model(data, pos)
    (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    return (gradient + data.force).square().mean() + energy.square().mean()


def curvature(model: Any, data: Data, pos: Tensor) -> Tensor:
    """A loss of third order: forces, then the derivative of their squares."""
    energy = model(data, pos)
    (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), pos, create_graph=True)
    return (10 * second).sin().mean()


def of_mean(model: Any, data: Data, pos: Tensor) -> Tensor:
    """The derivative of a function of a mean that is not linear in it."""
    energy = model(data, pos).mean().square()
    (gradient,) = torch.autograd.grad(energy, pos, create_graph=True)
    return (1000 * gradient).sin().mean()


def of_readouts(model: Any, data: Data, pos: Tensor) -> Tensor:
    """The derivative of the mean energy of graphs, read out by sums and by maxima."""
    atoms = model(data, pos)
    energy = global_add_pool(atoms, data.batch, GRAPHS).tanh()
    energy = energy * global_max_pool(atoms, data.batch, GRAPHS)
    (gradient,) = torch.autograd.grad(energy.mean(), pos, create_graph=True)
    return (1000 * gradient).sin().mean()


@dataclass
class Case:
    """A model and the loss of its gradients."""

    model: Potential
    loss: Callable[[Any, Data, Tensor], Tensor]


def cases() -> list[Case]:
    torch.manual_seed(3)
    return [
        Case(Potential("attention"), forces),
        Case(Potential("mean", "reversed"), forces),
        Case(Potential("attention"), curvature),
        Case(Potential("norm"), forces),
        Case(Potential(), of_mean),
        Case(Potential("mean", "norm"), of_mean),
        Case(Potential(), of_readouts),
    ]


def one_step(
    case: Case, model: Any, data: Data
) -> tuple[float, Tensor | None, dict[str, Tensor | None]]:
    pos = data.pos.clone().requires_grad_()
    loss = case.loss(model, data, pos)
    loss.backward()
    return float(loss.detach()), whole(pos.grad), {n: p.grad for n, p in model.named_parameters()}


def work(root: Any, policy: SARPolicy) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    try:
        data = pyg_sar.load_partition(root)
        models = [(case, pyg_sar.distribute(case.model, policy)) for case in cases()]
        return [one_step(case, m, data) for case, m in models]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("world", "start"), [(1, parts), (2, workers), (3, parts)])
def test_losses_of_gradients_equal_those_of_one_process(world, start, float64, tmp_path):
    data = atoms()
    expected = [one_step(case, case.model, data) for case in cases()]
    # Of three workers the last has no node.
    part = torch.arange(ATOMS) * 7 % min(world, 2)
    pyg_sar.write_partitions(data, world, tmp_path / "parts", part)
    for steps in start(work, world, tmp_path / "parts", ONE_SHOT):
        for k, (found, (loss, pos_grad, gradients)) in enumerate(zip(steps, expected, strict=True)):
            assert pos_grad is not None and pos_grad.abs().max() > 1e-4
            assert abs(found[0] - loss) <= TOLERANCE * abs(loss), k
            assert error(found[1], pos_grad) <= TOLERANCE, k
            scale = gradient_scale(gradients)
            wrong = {n: error(found[2][n], g, scale) for n, g in gradients.items()}
            assert max(wrong.values()) <= TOLERANCE, (k, wrong)


# Where gradients are computed by other means ######################################################

LAYER = r"'conv' at rank \d: second derivatives \(create_graph=True\) need SARPolicy\(mode=3\)"
PARAMETER = r"parameter 'conv\.\S+' at rank \d: second derivatives \(create_graph=True\) are not"


class One(torch.nn.Module):
    """A single layer."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def layers() -> list[One]:
    torch.manual_seed(1)
    found = [
        *(SAGEConv(6, 4, aggr=aggr) for aggr in ("mean", "max", "median")),
        GCNConv(6, 4),
        GATConv(6, 4, heads=2),
        GATv2Conv(6, 4, heads=2),
        TransformerConv(6, 4),
    ]
    return [One(conv) for conv in found]


def linear(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """The first derivative; what comes back to the layer doesn't depend on anything."""
    (gradient,) = torch.autograd.grad(model(x, edge_index).sum(), x, create_graph=True)
    return gradient


def whole_pass(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    model(x, edge_index).square().sum().backward(create_graph=True)
    return x.grad


def refused(root: Any, policies: list[SARPolicy]) -> list[list[str]]:
    data = pyg_sar.load_partition(root)
    texts = []
    for policy, model in product(policies, layers()):
        model = pyg_sar.distribute(model.double(), policy)
        texts.append([])
        for way in (linear, whole_pass):
            x = data.x.clone().requires_grad_()
            try:
                way(model, x, data.edge_index)
            except NotImplementedError as caught:
                texts[-1].append(str(caught))
    return texts


def test_elsewhere_second_derivatives_are_refused_by_name(tmp_path):
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")
    policies = [SARPolicy(mode=m, kernels=k) for m, k in product((1, 2), ("auto", "off"))]
    for texts in workers(refused, 2, tmp_path / "parts", policies):
        for (policy, layer), found in zip(product(policies, layers()), texts, strict=True):
            assert len(found) == 2, (layer, policy)
            assert re.search(LAYER, found[0]), found[0]
            assert re.search(f"{LAYER}|{PARAMETER}", found[1]), found[1]


def test_on_one_process_kernels_refuse_and_pyg_is_exact():
    data = make_graph()
    for model in layers():
        model = model.double()

        def second(model: Any) -> list[Tensor]:
            x = data.x.clone().requires_grad_()
            linear(model, x, data.edge_index).sin().sum().backward()
            return [x.grad, *(p.grad for p in model.parameters())]

        expected = second(copy.deepcopy(model))
        converted = pyg_sar.distribute(copy.deepcopy(model))
        try:
            found = second(converted)
        except NotImplementedError as caught:
            assert "need SARPolicy(mode=3)" in str(caught)
        else:  # no kernel: PyG's own
            for mine, theirs in zip(found, expected, strict=True):
                assert error(mine, theirs) <= TOLERANCE
        for policy in (ONE_SHOT, SARPolicy(kernels="off")):
            set_policy(converted, policy)
            converted.zero_grad()
            for mine, theirs in zip(second(converted), expected, strict=True):
                assert error(mine, theirs) <= TOLERANCE
