"""Linear maps before sums where they narrow rows: exact, fewer bytes by formula, or left alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from oracle import (
    CHANNELS,
    MODES,
    Job,
    Partitions,
    Sizes,
    Sweep,
    apart,
    error,
    make_graph,
    one_pass,
    single_process,
    whole,
    workers,
)
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch.nn.utils.parametrizations import weight_norm
from torch_geometric import nn as gnn
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm import current
from pyg_sar.kernels import ops
from pyg_sar.message.layer_facts import facts_of
from pyg_sar.tensors import NodeTensor

NARROW = 2
WEIGHT, TYPE = ("edge_weight",), ("edge_type",)
BACK: dict[str, Any] = {"flow": "target_to_source"}


class Signed(torch.nn.Module):
    """A SignedConv whose negative edges are the positive ones without loops."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.SignedConv(CHANNELS, NARROW, first_aggr=True)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, edge_index, edge_index[:, edge_index[0] != edge_index[1]])


def rgcn(**options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: gnn.RGCNConv(CHANNELS, NARROW, 3, **options)


# name: (layer, edge attributes with a gradient, those without, sums of source rows)
LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...], tuple[str, ...], int]] = {
    "sage": (lambda: gnn.SAGEConv(CHANNELS, NARROW), (), (), 1),
    "sage, sum": (lambda: gnn.SAGEConv(CHANNELS, NARROW, aggr="add", bias=False), (), (), 1),
    "sage, project": (lambda: gnn.SAGEConv(CHANNELS, NARROW, project=True), (), (), 1),
    "sage, normalize": (
        lambda: gnn.SAGEConv(CHANNELS, NARROW, normalize=True, root_weight=False), (), (), 1),
    "sage, reversed": (lambda: gnn.SAGEConv(CHANNELS, NARROW, **BACK), (), (), 1),
    "graph": (lambda: gnn.GraphConv(CHANNELS, NARROW), (), WEIGHT, 1),
    "graph, learned weights": (lambda: gnn.GraphConv(CHANNELS, NARROW), WEIGHT, (), 1),
    "graph, mean": (lambda: gnn.GraphConv(CHANNELS, NARROW, aggr="mean"), (), (), 1),
    "cluster": (lambda: gnn.ClusterGCNConv(CHANNELS, NARROW, diag_lambda=0.3), (), (), 1),
    "signed": (Signed, (), (), 2),
    "sg": (lambda: gnn.SGConv(CHANNELS, NARROW, K=3), (), WEIGHT, 3),
    "ssg": (lambda: gnn.SSGConv(CHANNELS, NARROW, 0.2, K=2), (), (), 2),
    "gin": (lambda: gnn.GINConv(Sequential(Linear(CHANNELS, 3), ReLU(), Linear(3, 9)),
                                train_eps=True), (), (), 1),
    "gin, mlp": (lambda: gnn.GINConv(gnn.MLP([CHANNELS, 3, 9])), (), (), 1),
    "gin, linear": (lambda: gnn.GINConv(gnn.Linear(CHANNELS, NARROW)), (), (), 1),
    "tag": (lambda: gnn.TAGConv(CHANNELS, NARROW, K=3), (), WEIGHT, 3),
    "tag, plain": (lambda: gnn.TAGConv(CHANNELS, NARROW, K=1, normalize=False), (), (), 1),
    "cheb 2": (lambda: gnn.ChebConv(CHANNELS, NARROW, K=2), (), (), 1),
    "cheb 5": (lambda: gnn.ChebConv(CHANNELS, NARROW, K=5, normalization="rw"), (), WEIGHT, 4),
    "rgcn": (rgcn(), (), TYPE, 3),
    "rgcn, sum": (rgcn(aggr="add", root_weight=False), (), TYPE, 3),
    "rgcn, bases": (rgcn(num_bases=2, bias=False), (), TYPE, 3),
    "rgcn, blocks": (rgcn(num_blocks=2), (), TYPE, 3),
}  # fmt: skip


def random_policies(seed: int, count: int) -> tuple[SARPolicy, ...]:
    draw = random.Random(seed)
    return tuple(
        SARPolicy(
            mode=draw.choice((1, 2, 3)),
            prefetch=draw.choice((0, 1)),
            message_budget=draw.choice((None, 1, 600)),
            strategy=draw.choice(("auto", "chunked")),
            kernels=draw.choice(("auto", "off")),
            push=draw.choice(("auto", "off")),
            transform_first=draw.choice((True, True, False)),
        )
        for _ in range(count)
    )


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(50, 260)


# Numbers ######################################################################


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exact(world: int, graph: Data, partitions: Partitions) -> None:
    """Outputs and all gradients, in every mode and by policies drawn at random."""
    sweep = Sweep(world)
    for number, (name, (make, learned, constants, _)) in enumerate(LAYERS.items()):
        policies = (*MODES, *random_policies(100 * world + number, world - 1))
        policies = some(policies, f"{name} {world}")
        where = partitions(graph, world, "random")
        sweep.add(name, Job(make().double(), where, learned, policies, constants), graph)
    sweep.check()


def halves(root: Path, layer: torch.nn.Module) -> Any:
    data = pyg_sar.load_partition(root)
    data.x = data.x.bfloat16()
    model = pyg_sar.distribute(copy.deepcopy(layer))
    return one_pass(model, data), facts_of(model).transforms_first


def distance(found: Any, expected: Any) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_half_precision_loses_no_more_than_pyg(root: Path, graph: Data) -> None:
    """At most twice PyG's error, both against float64: sums are taken in float32."""
    layer = gnn.SAGEConv(CHANNELS, NARROW, aggr="sum").bfloat16()
    narrow = copy.copy(graph)
    narrow.x = graph.x.bfloat16()
    plain, exact = (
        single_process(layer, narrow),
        single_process(copy.deepcopy(layer).double(), graph),
    )
    for found, first in workers(halves, 3, root, layer):
        assert first and found.out.dtype == torch.bfloat16
        assert distance(found.out, exact.out) <= 2 * distance(plain.out, exact.out)
        for name, gradient in exact.parameter_grads.items():
            theirs = distance(plain.parameter_grads[name], gradient)
            assert distance(found.parameter_grads[name], gradient) <= 2 * theirs, name


def forces(model: Any, data: Data) -> list[Tensor]:
    x = data.x.clone().requires_grad_()
    out = gnn.global_add_pool(model(x, data.edge_index).square(), None)
    (force,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    force.square().sum(1).mean().backward()
    return [whole(x.grad), *(p.grad for p in model.parameters())]


def test_second_derivatives(root: Path, graph: Data) -> None:
    layer = gnn.SAGEConv(CHANNELS, NARROW).double()

    def worker() -> list[Tensor]:
        model = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy(mode=3))
        found = forces(model, pyg_sar.load_partition(root))
        assert facts_of(model).transforms_first
        return found

    expected = forces(copy.deepcopy(layer), graph)
    for found in workers(worker, 3):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# Bytes ########################################################################

BOTH_PASSES = {("forward", "fetch"), ("backward", "gradient")}


@dataclass
class Run:
    """A layer and how it runs."""

    layer: torch.nn.Module
    policy: SARPolicy
    learns: bool = True
    learned: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


def bytes_of(root: Path, runs: list[Run]) -> tuple[list[Any], int, int]:
    """Bytes of a second pass by (phase, kind), and whether the layer transforms first.

    And rows of the halo, and rows that others need of this worker.
    """
    data, comm, results = pyg_sar.load_partition(root), current(), []
    for run in runs:
        model = pyg_sar.distribute(copy.deepcopy(run.layer), run.policy)
        conv = next(m for m in model.modules() if isinstance(m, gnn.MessagePassing))
        width = getattr(conv, "in_channels", CHANNELS)
        x = data.x[:, :1].repeat(1, width).requires_grad_(run.learns)
        tensors = {name: data[name].clone().requires_grad_() for name in run.learned}
        tensors |= {name: data[name] for name in run.constants}
        with pyg_sar.Ledger(comm) as ledger:
            for _ in range(2):
                before = {
                    (phase, kind): ledger.received_bytes(phase=phase, kind=kind)
                    for phase in ("forward", "backward")
                    for kind in ("fetch", "refetch", "gradient", "reduce")
                }
                out = model(x, data.edge_index, **tensors)
                out.square().sum(-1).mean().backward()
        found = {
            (phase, kind): ledger.received_bytes(phase=phase, kind=kind) - bytes_before
            for (phase, kind), bytes_before in before.items()
        }
        results.append((found, facts_of(conv).transforms_first))
    plan = data.edge_index.to_local().plan
    sends = sum(plan.send_rows(peer).numel() for peer in range(comm.world_size))
    return results, plan.num_halo, sends


def counted(root: Path, runs: list[Run]) -> list[Any]:
    """What workers say that send all rows to each other."""
    with apart():
        return workers(bytes_of, 3, root, runs)


def test_bytes_by_the_law(root: Path) -> None:
    """``H F' b`` come in, ``H F' b`` go back, and nothing is fetched twice (case 1)."""
    makers = gnn.SAGEConv(256, 40), gnn.GraphConv(256, 40)
    runs = [
        Run(layer.double(), SARPolicy(mode=mode, push="off", transform_first=first))
        for layer, first, mode in product(makers, (True, False), (1, 2, 3))
    ]
    for results, halo, sends in counted(root, runs):
        assert halo > 0
        for run, (found, taken) in zip(runs, results, strict=True):
            assert taken is run.policy.transform_first
            row = (40 if taken else 256) * 8
            law = {("forward", "fetch"): halo * row, ("backward", "gradient"): sends * row}
            assert {key: n for key, n in found.items() if n} == law, run


def test_constant_features_are_mapped_where_both_passes_take_less(root: Path) -> None:
    """PyG's order sends 256 numbers once; mapped, ``out`` numbers travel both ways."""
    policy, widths = SARPolicy(mode=1, push="off"), (100, 128, 200)
    runs = [Run(gnn.SAGEConv(256, out).double(), policy, learns=False) for out in widths]
    for results, halo, sends in counted(root, runs):
        for out, (found, taken) in zip(widths, results, strict=True):
            first = 2 * out < 256
            assert taken is first
            law = {("forward", "fetch"): halo * (out if first else 256) * 8}
            if first:
                law["backward", "gradient"] = sends * out * 8
            assert {key: n for key, n in found.items() if n} == law


def saved_numbers(root: Path, first: bool) -> tuple[list[torch.Tensor], int, int, bool]:
    """Outputs and gradients of a square layer, the numbers that autograd keeps, and rows."""
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    layer = gnn.SAGEConv(64, 64).double()
    conv = pyg_sar.distribute(layer, SARPolicy(transform_first=first))
    x = data.x[:, :1].repeat(1, 64).requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, NodeTensor) else tensor
        kept[local.data_ptr()] = local.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = conv(x, data.edge_index)
    out.square().sum(-1).mean().backward()
    gradients = [p.grad for p in conv.parameters() if p.grad is not None]
    found = [whole(out.detach()), whole(x.grad), *gradients]
    return found, sum(kept.values()), len(x.to_local()), facts_of(conv).transforms_first


def test_a_square_map_goes_first_and_keeps_no_sums(root: Path) -> None:
    """Autograd keeps the rows alone, in place of the rows and their sums; the numbers are equal."""
    both = (workers(saved_numbers, 3, root, first) for first in (True, False))
    for (found, kept, rows, took), (expected, more, _, not_taken) in zip(*both, strict=True):
        assert took and not not_taken and rows > 0
        assert more - kept == rows * 64
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_every_layer_takes_less(root: Path) -> None:
    """By the difference of the widths, for each sum and halo row, in both passes."""
    policies = SARPolicy(push="off"), SARPolicy(push="off", transform_first=False)
    layers = {name: LAYERS[name] for name in some(list(LAYERS), "takes less", 2)}
    runs = [
        Run(make().double(), policy, True, learned, constants)
        for make, learned, constants, _ in layers.values()
        for policy in policies
    ]
    for results, halo, sends in counted(root, runs):
        pairs = zip(results[::2], results[1::2], strict=True)
        for (name, case), ((mine, taken), (theirs, not_taken)) in zip(
            layers.items(), pairs, strict=True
        ):
            assert taken and not not_taken, name
            narrow = 3 if name in ("gin", "gin, mlp") else NARROW
            own_halos = "rgcn" in name or "reversed" in name  # of a relation; of edges gone away
            for (phase, kind), n in mine.items():
                count = (theirs[phase, kind] - n) // (8 * (CHANNELS - narrow))
                where = (name, phase, kind)
                if own_halos:
                    assert n * CHANNELS == theirs[phase, kind] * narrow, where
                elif (phase, kind) in BOTH_PASSES:
                    assert count == case[3] * (halo if kind == "fetch" else sends), where
                else:
                    again = (phase, kind) == ("backward", "refetch") and case[1]
                    assert count == (halo if again else 0), where


# Left alone ###################################################################


class OwnMessage(gnn.SAGEConv):
    def message(self, x_j: Any) -> Any:
        return x_j.relu()


class OwnForward(gnn.SAGEConv):
    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Any:
        return self.lin_l(self.propagate(edge_index, x=(x, x), size=size).relu())


def nothing(*_: Any) -> None:
    pass


def own_map() -> torch.nn.Module:
    layer = gnn.SAGEConv(CHANNELS, NARROW)
    layer.lin_l.forward = partial(type(layer.lin_l).forward, layer.lin_l)
    return layer


def with_hook(register: str, part: str = "") -> torch.nn.Module:
    layer = gnn.SAGEConv(CHANNELS, NARROW)
    getattr(layer.get_submodule(part), register)(nothing)
    return layer


def parametrized() -> torch.nn.Module:
    layer = gnn.SAGEConv(CHANNELS, NARROW)
    weight_norm(layer.lin_l)
    return layer


LEFT: dict[str, Callable[[], torch.nn.Module]] = {
    "max": lambda: gnn.SAGEConv(CHANNELS, NARROW, aggr="max"),
    "softmax": lambda: gnn.SAGEConv(CHANNELS, NARROW, aggr="softmax"),
    "as wide": lambda: gnn.SAGEConv(CHANNELS, CHANNELS),
    "own message": lambda: OwnMessage(CHANNELS, NARROW),
    "own forward": lambda: OwnForward(CHANNELS, NARROW),
    "parametrized": parametrized,
    "own forward of the map": own_map,
    "forward hook": lambda: with_hook("register_forward_hook", "lin_l"),
    "forward pre-hook": lambda: with_hook("register_forward_pre_hook", "lin_l"),
    "backward hook": lambda: with_hook("register_full_backward_hook", "lin_l"),
    "backward pre-hook": lambda: with_hook("register_full_backward_pre_hook", "lin_l"),
    "propagate hook": lambda: with_hook("register_propagate_forward_pre_hook"),
    "aggregation's hook": lambda: with_hook("register_forward_hook", "aggr_module"),
    "message hook": lambda: with_hook("register_message_forward_hook"),
    "aggregate hook": lambda: with_hook("register_aggregate_forward_pre_hook"),
    "gin, no linear map first": lambda: gnn.GINConv(Sequential(ReLU(), Linear(CHANNELS, NARROW))),
    "tag of one power": lambda: gnn.TAGConv(CHANNELS, NARROW, K=0),
    "sg, cached": lambda: gnn.SGConv(CHANNELS, NARROW, cached=True),
    "gcn": lambda: gnn.GCNConv(CHANNELS, NARROW),
}


def taken(root: Path) -> dict[str, bool]:
    data, found = pyg_sar.load_partition(root), {}
    for name, make in LEFT.items():
        model = pyg_sar.distribute(make().double())
        model(data.x, data.edge_index)
        found[name] = facts_of(model).transforms_first
    return found


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_what_is_left_alone(root: Path, graph: Data, partitions: Partitions) -> None:
    """Rows that something watches, or that a map doesn't narrow, are PyG's; and exact."""
    sweep = Sweep(3)
    for worker in workers(taken, 3, root):
        assert worker == dict.fromkeys(LEFT, False)
    for name, make in LEFT.items():
        # A cache takes no gradient; PyG's linear map doesn't load what it saves if parametrized.
        if name not in ("sg, cached", "parametrized"):
            sweep.add(name, Job(make().double(), root, (), MODES[:1]), graph)
    sweep.check()


OWN_ROWS: dict[str, Callable[[], torch.nn.Module]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, 3 * CHANNELS),
    "sage, mapped first": lambda: gnn.SAGEConv(CHANNELS, NARROW),
    "graph": lambda: gnn.GraphConv(CHANNELS, NARROW),
    "cluster": lambda: gnn.ClusterGCNConv(CHANNELS, NARROW, bias=False),
}


def made_at_own_rows(root: Path) -> dict[str, list[int]]:
    data, found = pyg_sar.load_partition(root), {}
    for name, make in OWN_ROWS.items():
        watched = make().double()
        linear = watched.lin_r if hasattr(watched, "lin_r") else watched.lin_root
        linear.forward = partial(type(linear).forward, linear)
        counts = []
        for layer in (make().double(), watched):
            model = pyg_sar.distribute(layer)
            model(data.x, data.edge_index)  # The first call looks at the message, too.
            with Sizes() as sizes:
                out = model(data.x, data.edge_index)
            products = ("aten::mm", "aten::add.Tensor", "aten::add", "aten::addmm")
            counts.append(
                sum(n == out.to_local().numel() for op, n in sizes.made if op in products)
            )
        found[name] = counts
    return found


@pytest.mark.skipif(not ops.built, reason="needs the C++ kernels")
def test_the_product_of_own_rows_is_added_in_place(root: Path) -> None:
    """Neither it nor the sum with it is a tensor of its own; the product is, of a map that has a
    forward of its own: such a layer runs between tensors of the whole graph."""
    for worker in workers(made_at_own_rows, 3, root):
        for name, (ours, watched) in worker.items():
            assert (ours, watched) == (1, 2), name  # The other product is one in either case.


def shared(root: Path) -> tuple[Tensor, Tensor]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, NARROW))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(data.x.float(), data.edge_index)
    mixed = facts_of(layer).transforms_first
    layer = gnn.SAGEConv(CHANNELS, NARROW, bias=False).double()
    layer.lin_r = layer.lin_l
    model = pyg_sar.distribute(layer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(before) == ["lin_l.weight", "lin_r.weight"]
    seen: list[Any] = []
    model.register_forward_hook(lambda _, given, out: seen.append((given[0].size(1), out.size(1))))
    out = model(data.x, data.edge_index)
    assert not mixed and facts_of(model).transforms_first and seen == [(CHANNELS, NARROW)]
    twin = copy.deepcopy(layer)
    assert "forward" not in twin.lin_l.__dict__ and "propagate" not in twin.__dict__
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    return whole(out.detach()), before["lin_l.weight"]


def test_state_hooks_of_the_layer_and_shared_maps(root: Path, graph: Data) -> None:
    """A map that is called twice maps the second time; its ``forward`` is there again."""
    means = gnn.SimpleConv(aggr="mean")(graph.x, graph.edge_index)
    for out, weight in workers(shared, 3, root):
        torch.testing.assert_close(out, (means + graph.x) @ weight.t(), rtol=1e-10, atol=0)


def unlike(root: Path) -> None:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, NARROW).double())
    if current().rank == 1:
        layer.register_message_forward_hook(nothing)
    layer(data.x, data.edge_index)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_a_hook_on_one_worker_ends_in_an_error(root: Path) -> None:
    with pytest.raises(Exception, match=r"(?s)rank 0 waits.*a hook that only some have"):
        workers(unlike, 3, root)


# Uses #########################################################################


def hetero(root: Path) -> Any:
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    model = gnn.HeteroConv({kind: gnn.SAGEConv((-1, -1), NARROW) for kind in kinds})
    x = {"a": data.x, "b": torch.cat([data.x, data.x], 1)}
    edges = dict.fromkeys(kinds, data.edge_index)
    pyg_sar.nn.initialize(model.double(), x, edges)
    model = pyg_sar.distribute(model)
    out = model(x, edges)["b"]
    conv = next(iter(model.convs.values()))
    return whole(out.detach()), facts_of(conv).transforms_first, conv.state_dict()


def test_bipartite_lazy_layers_of_heterogeneous_models(root: Path, graph: Data) -> None:
    for out, first, state in workers(hetero, 3, root):
        assert first
        plain = gnn.SAGEConv((CHANNELS, 2 * CHANNELS), NARROW).double()
        plain.load_state_dict(state)
        right = plain((graph.x, torch.cat([graph.x, graph.x], 1)), graph.edge_index)
        torch.testing.assert_close(out, right.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")
def test_one_process(monkeypatch: pytest.MonkeyPatch, graph: Data) -> None:
    """With kernels rows are mapped first; a small graph runs as PyG's own, to the bit."""
    plain = gnn.SAGEConv(CHANNELS, NARROW).double()
    expected = single_process(plain, graph)
    layer = pyg_sar.distribute(copy.deepcopy(plain))
    found = one_pass(layer, graph)
    assert facts_of(layer).transforms_first
    assert error(found.out, expected.out) < 1e-12
    assert error(found.x_grad, expected.x_grad) < 1e-12
    monkeypatch.setattr("pyg_sar.nn.one_process.FEWEST_EDGES", graph.num_edges + 1)
    layer = pyg_sar.distribute(copy.deepcopy(plain))
    found = one_pass(layer, graph)
    assert torch.equal(found.out, expected.out)
    for name, gradient in expected.parameter_grads.items():
        assert torch.equal(found.parameter_grads[name], gradient)


def test_verify_names_it(graph: Data) -> None:
    model = gnn.GraphSAGE(CHANNELS, 5, 2, NARROW)
    report = pyg_sar.verify(model, Data(x=graph.x, edge_index=graph.edge_index))
    assert report.ok and [layer.transforms_first for layer in report.layers] == [True, True]
    assert str(report).count("sequential, transforms first") == 2
    policy = SARPolicy(transform_first=False)
    report = pyg_sar.verify(model, Data(x=graph.x, edge_index=graph.edge_index), policy=policy)
    assert report.ok and not any(layer.transforms_first for layer in report.layers)


def test_the_document_names_every_convolution() -> None:
    text = (Path(__file__).parent.parent / "docs" / "how_it_works.md").read_text()
    assert [name for name in gnn.conv.__all__[1:] if f"`{name}" not in text] == []
