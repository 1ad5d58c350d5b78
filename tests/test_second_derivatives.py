"""Derivatives of gradients in every mode, and an error by name where there are none.

The oracle is the same code in one process with plain PyG. Most cases are those of interatomic
potentials: forces are the derivative of the energy, a loss of forces is differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import everything, some
from oracle import TOLERANCE, both, error, gradient_scale, make_graph, parts, whole, workers
from test_exactness import LAYERS, WIDER, build
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    BatchNorm,
    FAConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphNorm,
    HeteroConv,
    MeanAggregation,
    MessagePassing,
    SAGEConv,
    global_add_pool,
    global_max_pool,
)
from torch_geometric.nn.models.schnet import CFConv

import pyg_sar
from pyg_sar import SARPolicy

ATOMS, WIDTH, KINDS, GRAPHS = 36, 8, 3, 3
MODES = (1, 2, 3)


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


def of_absolute_values(model: Any, data: Data, pos: Tensor) -> Tensor:
    """The third derivative of absolute values: of nodes, of edges, and of a sum over nodes.

    PyTorch's second derivative of ``abs`` is a 0 that has no memory.
    """
    source, target = data.edge_index
    energy = model(data, pos)
    lengths = (pos[source] - pos[target]).abs().sum(-1).square()
    value = energy.sum(0).abs().sum() * energy.abs().mean() + lengths.mean() + pos.sgn().sum()
    (gradient,) = torch.autograd.grad(value, pos, create_graph=True)
    (second,) = torch.autograd.grad(gradient.abs().sum(), pos, create_graph=True)
    return second.sin().mean() + gradient.square().mean()


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
        Case(Potential("mean"), of_absolute_values),
    ]


def one_step(
    case: Case, model: Any, data: Data
) -> tuple[float, Tensor | None, dict[str, Tensor | None]]:
    pos = data.pos.clone().requires_grad_()
    loss = case.loss(model, data, pos)
    loss.backward()
    return float(loss.detach()), whole(pos.grad), {n: p.grad for n, p in model.named_parameters()}


def work(root: Any, chosen: list[tuple[int, int]]) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    try:
        data, found = pyg_sar.load_partition(root), []
        for number, mode in chosen:
            case = cases()[number]
            model = pyg_sar.distribute(case.model, SARPolicy(mode=mode))
            found.append(one_step(case, model, data))
        return found
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
    numbers = range(len(expected))
    chosen = [(k, mode) for k in numbers for mode in some(MODES, f"{k} {world}", 3)]
    for steps in start(work, world, tmp_path / "parts", chosen):
        for k, (found, (number, _)) in enumerate(zip(steps, chosen, strict=True)):
            loss, pos_grad, gradients = expected[number]
            assert pos_grad is not None and pos_grad.abs().max() > 1e-4
            assert abs(found[0] - loss) <= TOLERANCE * abs(loss), k
            assert error(found[1], pos_grad) <= TOLERANCE, k
            scale = gradient_scale(gradients)
            wrong = {n: error(found[2][n], g, scale) for n, g in gradients.items()}
            assert max(wrong.values()) <= TOLERANCE, (k, wrong)


# Layer by layer ###################################################################################


class Drops(MessagePassing):
    """A message that drops what it computes."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.lin(x_j)) * x_i, 0.4, self.training)


class Checkpointed(torch.nn.Module):
    """A layer whose tensors are computed again before its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GATv2Conv(6, 6), SAGEConv(6, 6, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = checkpoint(lambda v: self.first(v, edge_index).tanh(), x, use_reentrant=False)
        return self.second(h, edge_index)


ALWAYS: dict[str, Any] = {
    "gat, dropout": (lambda: GATConv(6, 4, heads=2, dropout=0.5), (), ()),
    "a message's dropout": (Drops, (), ()),
}
EVERY = {**LAYERS, **WIDER, **ALWAYS}
# PyTorch's batch norm has no third derivative that is right: its second one takes the saved mean
# and variance for constants.
NORMS = ("gin", "cg, batch norm", "gen, softmax")
STREAMED = (SARPolicy(mode=1), SARPolicy(mode=2), SARPolicy(mode=1, kernels="off"))
NEED_MODE_3 = ("rgat", "semi std")


def derivatives(
    layer: torch.nn.Module, data: Data, edge: Any, constants: Any, order: int
) -> dict[str, Tensor | None]:
    """Derivatives of an output's sine, of the sines of these, and so on; then by parameters."""
    torch.manual_seed(7)
    x = data.x.clone().requires_grad_()
    edges = {name: data[name].clone().requires_grad_() for name in edge}
    leaves = {"x": x, **edges}
    out = layer(x, data.edge_index, **edges, **{name: data[name] for name in constants})
    total, found = out.sin().sum(), {}
    for k in range(1, order):
        slopes = torch.autograd.grad(
            total, [*leaves.values()], create_graph=True, allow_unused=k > 1
        )
        named = zip(leaves, slopes, strict=True)
        found |= {f"{name}, {k}": None if g is None else whole(g.detach()) for name, g in named}
        total = sum(g.sin().sum() for g in slopes if g is not None)
    total.backward()
    ends = {name: None if t.grad is None else whole(t.grad) for name, t in leaves.items()}
    return found | ends | {name: p.grad for name, p in layer.named_parameters()}


def orders(name: str) -> tuple[int, ...]:
    return (2,) if name in NORMS else (2, 3)


def of_layers(root: Any, chosen: list[tuple[str, SARPolicy, int]]) -> list[Any]:
    data, found = pyg_sar.load_partition(root), []
    for name, policy, order in chosen:
        make, *arguments = EVERY[name]
        model = pyg_sar.distribute(build(make), policy)
        try:
            found.append(derivatives(model, data, *arguments, order))
        except NotImplementedError as caught:
            found.append(str(caught))
    return found


@pytest.mark.parametrize(("start", "world"), [(workers, 3), (parts, 4)])
def test_layers_have_derivatives_of_derivatives_in_modes_1_and_2(start, world, tmp_path):
    data, names = make_graph(), some(list(EVERY), start.__name__, 6)
    fixed = *ALWAYS, *NEED_MODE_3, "gcn, learned weights"  # whose empty lists torch.cat joins
    fixed = fixed if start is parts or everything() else ()
    names = [*names, *(name for name in fixed if name not in names)]
    expected, chosen = {}, []
    for name in names:
        make, *arguments = EVERY[name]
        for k in some(orders(name), f"{name} {world}", 2):
            expected[name, k] = derivatives(build(make), data, *arguments, k)
            chosen += [(name, p, k) for p in some(STREAMED, f"{name} {k} {world}", 3)]
    # The last has no node, hence no edge.
    part = torch.arange(data.num_nodes) * 7 % (world - 1)
    pyg_sar.write_partitions(data, world, tmp_path / "parts", part)
    for found in start(of_layers, world, tmp_path / "parts", chosen):
        for mine, (name, policy, k) in zip(found, chosen, strict=True):
            theirs = expected[name, k]
            if isinstance(mine, str):
                assert name in NEED_MODE_3 and "need SARPolicy(mode=3)" in mine, (name, mine)
                continue
            assert mine.keys() == theirs.keys()
            scale = 1e-3 * max(float(g.abs().max()) for g in theirs.values() if g is not None)
            for key, right in theirs.items():
                assert (mine[key] is None) == (right is None), (name, policy, key, k)
                if right is not None:
                    assert error(mine[key], right, scale) <= TOLERANCE, (name, policy, key, k)


def checkpointed(root: Any, policies: list[SARPolicy]) -> list[Any]:
    data = pyg_sar.load_partition(root)
    models = [pyg_sar.distribute(build(Checkpointed), policy) for policy in policies]
    return [derivatives(model, data, (), (), 2) for model in models]


def test_what_a_checkpoint_packs_is_unpacked_once(tmp_path):
    data = make_graph()
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")
    expected = derivatives(build(Checkpointed), data, (), (), 2)
    for found in both(checkpointed, 2, tmp_path / "parts", STREAMED):
        for mine in found:
            wrong = {n: error(mine[n], g, 1e-2) for n, g in expected.items() if g is not None}
            assert max(wrong.values()) <= TOLERANCE, wrong


class Relations(torch.nn.Module):
    """A layer for each relation between nodes of two types, and of one."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.conv = HeteroConv({kind: make() for kind in RELATIONS})

    def forward(self, data: HeteroData) -> dict[str, Tensor]:
        x = {name: data[name].x.clone().requires_grad_() for name in data.node_types}
        out = self.conv(x, data.edge_index_dict)
        slopes = torch.autograd.grad(
            sum(o.sin().sum() for o in out.values()), [*x.values()], create_graph=True
        )
        sum(slope.sin().sum() for slope in slopes).backward()
        found = {name: whole(tensor.grad) for name, tensor in x.items()}
        return found | {name: p.grad for name, p in self.named_parameters()}


RELATIONS = {("a", "to", "b"): (30, 17), ("b", "of", "a"): (17, 30), ("a", "is", "a"): (30, 30)}
BIPARTITE = (
    lambda: SAGEConv((6, 6), 4),
    lambda: SAGEConv((6, 6), 4, aggr="max"),
    lambda: GATConv((6, 6), 4, add_self_loops=False),
    lambda: GATv2Conv((6, 6), 4, add_self_loops=False),
)


def two_types() -> HeteroData:
    draw, data = torch.Generator().manual_seed(0), HeteroData()
    for name, count in (("a", 30), ("b", 17)):
        data[name].x = torch.randn(count, 6, generator=draw, dtype=torch.float64)
    for kind, counts in RELATIONS.items():
        ends = [torch.randint(count, (90,), generator=draw) for count in counts]
        data[kind].edge_index = torch.stack(ends)
    return data


def of_relations(root: Any, chosen: list[tuple[int, SARPolicy]]) -> list[Any]:
    data, found = pyg_sar.load_partition(root), []
    for k, policy in chosen:
        model = build(lambda k=k: Relations(BIPARTITE[k]))
        found.append(pyg_sar.distribute(model, policy)(data))
    return found


@pytest.mark.parametrize("start", [workers, parts])
def test_relations_between_two_types_of_nodes(start, tmp_path):
    data = two_types()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    expected = [build(lambda m=m: Relations(m))(data) for m in BIPARTITE]
    numbers = range(len(BIPARTITE))
    chosen = [(k, p) for k in numbers for p in some(STREAMED, f"{start.__name__} {k}", 3)]
    for found in start(of_relations, 3, tmp_path / "parts", chosen):
        for mine, (k, _) in zip(found, chosen, strict=True):
            theirs = expected[k]
            scale = gradient_scale(theirs)
            wrong = {n: error(mine[n], g, scale) for n, g in theirs.items() if g is not None}
            assert max(wrong.values()) <= TOLERANCE, wrong
            assert {n for n, g in mine.items() if g is None} == {*theirs} - {*wrong}


def rows_held(root: Any) -> dict[str, Any]:
    """The most halo rows at a time: of a layer and its gradient, and of the gradient of that."""
    data, found = pyg_sar.load_partition(root), {}
    halo = data.edge_index.to_local().plan.num_halo
    for name in ("sage, mean", "gated", "gat"):
        policy = SARPolicy(mode=1, prefetch=0, message_budget=2**12)
        layer = pyg_sar.distribute(build(EVERY[name][0]), policy)
        x = data.x.clone().requires_grad_()
        layer(x, data.edge_index).sin().sum().backward()
        with pyg_sar.Ledger(pyg_sar.comm.current()) as first:
            out = layer(x, data.edge_index).sin().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
        with pyg_sar.Ledger(pyg_sar.comm.current()) as second:
            slope.sin().sum().backward()
        found[name] = halo, first.peak_resident_rows(), second.peak_resident_rows()
    return found


def test_the_rows_of_one_owner_or_chunk_are_resident(tmp_path):
    """Not the halo: mode 1 keeps its promise in the backward pass of a gradient, too."""
    data = make_graph(400, 1600)
    pyg_sar.write_partitions(data, 4, tmp_path / "parts", "random")
    for worker in workers(rows_held, 4, tmp_path / "parts"):
        for name, (halo, first, second) in worker.items():
            assert 0 < second <= first < 0.4 * halo, name


class Network(torch.nn.Module):
    """Layers, and a parameter that is used between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GATv2Conv(6, 4, heads=2), GCNConv(8, 3)
        self.scale, self.head = torch.nn.Parameter(torch.rand(3)), torch.nn.Linear(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x, edge_index).tanh()
        return self.head(self.second(h, edge_index).sin() * self.scale)


def gradient_penalty(model: Any, data: Data) -> dict[str, Tensor | None]:
    """The gradients of a loss of a loss's gradients by parameters."""
    loss = model(data.x, data.edge_index).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum((10 * gradient).sin().sum() for gradient in gradients)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def penalised(root: Any) -> list[dict[str, Tensor | None]]:
    data, found = pyg_sar.load_partition(root), []
    for mode in MODES:
        torch.manual_seed(0)
        model = pyg_sar.distribute(Network().double(), SARPolicy(mode=mode))
        found.append(gradient_penalty(model, data))
    return found


def test_a_penalty_of_gradients_by_parameters(tmp_path):
    data = make_graph()
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")
    torch.manual_seed(0)
    expected = gradient_penalty(Network().double(), data)
    scale = gradient_scale(expected)
    for found in both(penalised, 2, tmp_path / "parts"):
        for gradients in found:
            wrong = {n: error(gradients[n], g, scale) for n, g in expected.items()}
            assert max(wrong.values()) <= TOLERANCE, wrong


# Where there are none #############################################################################


class Noisy(MessagePassing):
    """A message that draws."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sin() * torch.rand_like(x_j)


REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], SARPolicy, str]] = {
    "a narrow wire": (lambda: SAGEConv(6, 4), SARPolicy(wire="int8"), "need SARPolicy(wire="),
    "draws of a worker": (Noisy, SARPolicy(random=None), "need SARPolicy(random='same')"),
    "weights without softmax": (
        lambda: FAConv(6),
        SARPolicy(),
        "need SARPolicy(mode=3)",
    ),
}


def refused(root: Any) -> dict[str, str]:
    data, texts = pyg_sar.load_partition(root), {}

    def slope(layer: torch.nn.Module, x: Tensor) -> None:
        rest = (data.x,) if isinstance(layer, FAConv) else ()
        out = layer(x, *rest, data.edge_index).square().sum()
        torch.autograd.grad(out, x, create_graph=True)

    for name, (make, policy, _) in REFUSED.items():
        layer = pyg_sar.distribute(make().double(), policy)
        try:
            slope(layer, data.x.clone().requires_grad_())
        except NotImplementedError as caught:
            texts[name] = str(caught)
    return texts


def test_what_has_none_is_refused_by_name(tmp_path):
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")
    for texts in workers(refused, 2, tmp_path / "parts"):
        for name, (_, _, remedy) in REFUSED.items():
            assert remedy in texts[name] and " at rank " in texts[name], texts[name]


@pytest.mark.parametrize("policy", [SARPolicy(), SARPolicy(mode=3), SARPolicy(kernels="off")])
def test_one_process(policy):
    data = make_graph()
    for name in ("sage, mean", "sage, max", "median", "gcn", "gat", "gatv2", "transformer"):
        make = EVERY[name][0]
        layer = pyg_sar.distribute(build(make), policy)
        theirs = derivatives(build(make), data, (), (), 3)
        for key, mine in derivatives(layer, data, (), (), 3).items():
            assert (mine is None) == (theirs[key] is None)
            if mine is not None:
                scale = max(1e-3, float(theirs[key].abs().max()))
                assert error(mine, theirs[key], scale) <= TOLERANCE, (name, key)
