"""Linear maps before sums where they narrow rows: exact, fewer bytes by formula, or left alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    CHANNELS,
    MODES,
    Job,
    Partitions,
    Sweep,
    error,
    make_graph,
    one_pass,
    single_process,
    threads,
)
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn as gnn
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm import current
from pyg_sar.kernels import ops

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


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("transform"))


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, 3, "random")


# Numbers ######################################################################


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exact(world: int, graph: Data, partitions: Partitions) -> None:
    """Outputs and all gradients, in every mode and by policies drawn at random."""
    sweep = Sweep(world)
    for number, (name, (make, learned, constants, _)) in enumerate(LAYERS.items()):
        policies = (*MODES, *random_policies(100 * world + number, world - 1))
        where = partitions(graph, world, "random")
        sweep.add(name, Job(make().double(), where, learned, policies, constants), graph)
    sweep.check()


def halves(root: Path, layer: torch.nn.Module) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    data.x = data.x.bfloat16()
    model = pyg_sar.distribute(copy.deepcopy(layer), view="local")
    found = one_pass(model, data, data.n_id, pyg_sar.mean)
    return data.n_id, found, model._transforms_first


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
    workers = threads(halves, 3, root, layer)
    out = torch.empty_like(plain.out)
    for ids, found, first in workers:
        assert first and found.out.dtype == torch.bfloat16
        out[ids] = found.out
        for name, gradient in exact.parameter_grads.items():
            theirs = distance(plain.parameter_grads[name], gradient)
            assert distance(found.parameter_grads[name], gradient) <= 2 * theirs, name
    assert distance(out, exact.out) <= 2 * distance(plain.out, exact.out)


def forces(root: Path, layer: torch.nn.Module) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    model = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy(mode=3), view="local")
    x = data.x.clone().requires_grad_()
    out = pyg_sar.nn.global_add_pool(model(x, data.edge_index).square())
    (force,) = torch.autograd.grad(pyg_sar.mean(out.sum().view(1)), x, create_graph=True)
    pyg_sar.mean(force.square().sum(1)).backward()
    return data.n_id, x.grad, [p.grad for p in model.parameters()], model._transforms_first


def test_second_derivatives(root: Path, graph: Data) -> None:
    layer = gnn.SAGEConv(CHANNELS, NARROW).double()
    plain = copy.deepcopy(layer)
    x = graph.x.clone().requires_grad_()
    (force,) = torch.autograd.grad(plain(x, graph.edge_index).square().sum(), x, create_graph=True)
    force.square().sum(1).mean().backward()
    for ids, gradient, parameters, taken in threads(forces, 3, root, layer):
        assert taken
        torch.testing.assert_close(gradient, x.grad[ids], rtol=1e-9, atol=1e-9)
        for mine, parameter in zip(parameters, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-9)


# Bytes ########################################################################

BOTH_PASSES = {("forward", "fetch"), ("backward", "gradient")}


def bytes_of(
    root: Path,
    layer: torch.nn.Module,
    policy: SARPolicy,
    learns: bool,
    learned: tuple[str, ...] = (),
    constants: tuple[str, ...] = (),
) -> Any:
    """Bytes of a second pass by (phase, kind), the halo's rows, and whether it transforms first."""
    comm = current()
    data = pyg_sar.load_partition(root, view="local")
    model = pyg_sar.distribute(copy.deepcopy(layer), policy, view="local")
    conv = next(m for m in model.modules() if isinstance(m, gnn.MessagePassing))
    width = getattr(conv, "in_channels", CHANNELS)
    x = data.x[:, :1].repeat(1, width).requires_grad_(learns)
    tensors = {name: data[name].requires_grad_() for name in learned}
    tensors |= {name: data[name] for name in constants}
    with pyg_sar.Ledger(comm) as ledger:
        for _ in range(2):
            before = {
                (phase, kind): ledger.received_bytes(phase=phase, kind=kind)
                for phase in ("forward", "backward")
                for kind in ("fetch", "refetch", "gradient", "reduce")
            }
            out = model(x, data.edge_index, **tensors)
            pyg_sar.mean(out.square().sum(-1)).backward()
    found = {
        (phase, kind): ledger.received_bytes(phase=phase, kind=kind) - bytes_before
        for (phase, kind), bytes_before in before.items()
    }
    plan = data.edge_index.plan
    sends = sum(plan.send_rows(peer).numel() for peer in range(comm.world_size))
    return found, plan.num_halo, sends, conv._transforms_first


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["sage", "graph"])
def test_bytes_by_the_law(kind: str, first: bool, mode: int, root: Path) -> None:
    """``H F' b`` come in, ``H F' b`` go back, and nothing is fetched twice (case 1)."""
    make = {"sage": gnn.SAGEConv, "graph": gnn.GraphConv}[kind]
    policy = SARPolicy(mode=mode, push="off", transform_first=first)
    row = (40 if first else 256) * 8
    for found, halo, sends, taken in threads(
        bytes_of, 3, root, make(256, 40).double(), policy, True
    ):
        assert taken is first and halo > 0
        law = {("forward", "fetch"): halo * row, ("backward", "gradient"): sends * row}
        assert {key: n for key, n in found.items() if n} == law


@pytest.mark.parametrize("out", [100, 128, 200])
def test_constant_features_are_mapped_where_both_passes_take_less(out: int, root: Path) -> None:
    """PyG's order sends 256 numbers once; mapped, ``out`` numbers travel both ways."""
    policy = SARPolicy(mode=1, push="off")
    layer = gnn.SAGEConv(256, out).double()
    for found, halo, sends, taken in threads(bytes_of, 3, root, layer, policy, False):
        first = 2 * out < 256
        assert taken is first
        law = {("forward", "fetch"): halo * (out if first else 256) * 8}
        if first:
            law["backward", "gradient"] = sends * out * 8
        assert {key: n for key, n in found.items() if n} == law


def saved_numbers(root: Path, first: bool) -> tuple[list[torch.Tensor], int, int, bool]:
    """Outputs and gradients of a square layer, the numbers that autograd keeps, and rows."""
    data = pyg_sar.load_partition(root, view="local")
    torch.manual_seed(0)
    layer = gnn.SAGEConv(64, 64).double()
    conv = pyg_sar.distribute(layer, SARPolicy(transform_first=first), view="local")
    x = data.x[:, :1].repeat(1, 64).requires_grad_()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = conv(x, data.edge_index)
    pyg_sar.mean(out.square().sum(-1)).backward()
    gradients = [p.grad for p in conv.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *gradients], sum(kept.values()), len(x), conv._transforms_first


def test_a_square_map_goes_first_and_keeps_no_sums(root: Path) -> None:
    """Autograd keeps the rows alone, in place of the rows and their sums; the numbers are equal."""
    both = (threads(saved_numbers, 3, root, first) for first in (True, False))
    for (found, kept, rows, took), (expected, more, _, not_taken) in zip(*both, strict=True):
        assert took and not not_taken and rows > 0
        assert more - kept == rows * 64
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_takes_less(name: str, root: Path) -> None:
    """By the difference of the widths, for each sum and halo row, in both passes."""
    make, learned, constants, sums = LAYERS[name]
    layer = make().double()
    narrow = 3 if name in ("gin", "gin, mlp") else NARROW
    first, last = (
        threads(bytes_of, 3, root, layer, policy, True, learned, constants)
        for policy in (SARPolicy(push="off"), SARPolicy(push="off", transform_first=False))
    )
    own_halos = "rgcn" in name or "reversed" in name  # of a relation; of edges that went elsewhere
    for (mine, halo, sends, taken), (theirs, _, _, not_taken) in zip(first, last, strict=True):
        assert taken and not not_taken
        saved = {key: (theirs[key] - n) // (8 * (CHANNELS - narrow)) for key, n in mine.items()}
        rows = {"fetch": sums * halo, "gradient": sums * sends}
        for (phase, kind), count in saved.items():
            where = (name, phase, kind)
            if not own_halos and (phase, kind) in BOTH_PASSES:
                assert count == rows[kind], where
            elif own_halos:
                assert mine[phase, kind] * CHANNELS == theirs[phase, kind] * narrow, where
            else:
                again = (phase, kind) == ("backward", "refetch") and learned
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
    "forward hook": lambda: with_hook("register_forward_hook", "lin_l"),
    "forward pre-hook": lambda: with_hook("register_forward_pre_hook", "lin_l"),
    "backward hook": lambda: with_hook("register_full_backward_hook", "lin_l"),
    "backward pre-hook": lambda: with_hook("register_full_backward_pre_hook", "lin_l"),
    "propagate hook": lambda: with_hook("register_propagate_forward_pre_hook"),
    "message hook": lambda: with_hook("register_message_forward_hook"),
    "aggregate hook": lambda: with_hook("register_aggregate_forward_pre_hook"),
    "aggregation's hook": lambda: with_hook("register_forward_hook", "aggr_module"),
    "gin, no linear map first": lambda: gnn.GINConv(Sequential(ReLU(), Linear(CHANNELS, NARROW))),
    "tag of one power": lambda: gnn.TAGConv(CHANNELS, NARROW, K=0),
    "sg, cached": lambda: gnn.SGConv(CHANNELS, NARROW, cached=True),
    "gcn": lambda: gnn.GCNConv(CHANNELS, NARROW),
}


def taken(root: Path, layers: dict[str, torch.nn.Module]) -> dict[str, bool]:
    data, found = pyg_sar.load_partition(root, view="local"), {}
    for name, layer in layers.items():
        model = pyg_sar.distribute(copy.deepcopy(layer), view="local")
        model(data.x, data.edge_index)
        found[name] = model._transforms_first
    return found


def test_what_is_left_alone(root: Path, graph: Data, partitions: Partitions) -> None:
    """Rows that something watches, or that a map doesn't narrow, are PyG's; and exact."""
    sweep = Sweep(3)
    layers = {name: make().double() for name, make in LEFT.items()}
    for worker in threads(taken, 3, root, layers):
        assert worker == dict.fromkeys(LEFT, False)
    for name, layer in layers.items():
        # A cache takes no gradient; PyG's linear map doesn't load what it saves if parametrized.
        if name not in ("sg, cached", "parametrized"):
            sweep.add(name, Job(layer, root, (), MODES[:1]), graph)
    sweep.check()


class Sizes(TorchDispatchMode):
    """Notes the numbers of elements of the results that operators make, and their names."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {a.data_ptr() for a in args if isinstance(a, Tensor)}
        if isinstance(out, Tensor) and out.data_ptr() not in known:
            self.made.append((func._schema.name, out.numel()))
        return out


OWN_ROWS: dict[str, Callable[[], torch.nn.Module]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, 3 * CHANNELS),
    "sage, mapped first": lambda: gnn.SAGEConv(CHANNELS, NARROW),
    "graph": lambda: gnn.GraphConv(CHANNELS, NARROW),
    "cluster": lambda: gnn.ClusterGCNConv(CHANNELS, NARROW, bias=False),
}


def made_at_own_rows(root: Path) -> dict[str, list[int]]:
    data, found = pyg_sar.load_partition(root, view="local"), {}
    for name, make in OWN_ROWS.items():
        watched = make().double()
        linear = watched.lin_r if hasattr(watched, "lin_r") else watched.lin_root
        linear.register_forward_hook(nothing)
        counts = []
        for layer in (make().double(), watched):
            model = pyg_sar.distribute(layer, view="local")
            model(data.x, data.edge_index)  # The first call looks at the message, too.
            with Sizes() as sizes:
                out = model(data.x, data.edge_index)
            products = ("aten::mm", "aten::add.Tensor", "aten::add", "aten::addmm")
            counts.append(sum(n == out.numel() for op, n in sizes.made if op in products))
        found[name] = counts
    return found


@pytest.mark.skipif(not ops.built, reason="needs the C++ kernels")
def test_the_product_of_own_rows_is_added_in_place(root: Path) -> None:
    """Neither it nor the sum with it is a tensor of its own; a hook on the map gets it from PyG."""
    for worker in threads(made_at_own_rows, 3, root):
        for name, (ours, watched) in worker.items():
            assert (ours, watched) == (1, 3), name  # The other product is one in either case.


def shared(root: Path) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, NARROW), view="local")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(data.x.float(), data.edge_index)
    mixed = layer._transforms_first
    layer = gnn.SAGEConv(CHANNELS, NARROW, bias=False).double()
    layer.lin_r = layer.lin_l
    model = pyg_sar.distribute(layer, view="local")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[Any] = []
    model.register_forward_hook(lambda _, given, out: seen.append((given[0].size(1), out.size(1))))
    out = model(data.x, data.edge_index)
    plain = copy.deepcopy(layer)
    same = all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    return mixed, model._transforms_first, seen, same, list(before), plain, data.n_id, out.detach()


def test_state_hooks_of_the_layer_and_shared_maps(root: Path, graph: Data) -> None:
    """A map that is called twice maps the second time; its ``forward`` is there again."""
    for mixed, first, seen, same, names, plain, ids, out in threads(shared, 3, root):
        assert not mixed and first and same
        assert seen == [(CHANNELS, NARROW)]
        assert names == ["lin_l.weight", "lin_r.weight"]
        assert "forward" not in plain.lin_l.__dict__ and "propagate" not in plain.__dict__
        weight = plain.lin_l.weight.detach()
        means = gnn.SimpleConv(aggr="mean")(graph.x, graph.edge_index)
        torch.testing.assert_close(out, ((means + graph.x) @ weight.t())[ids], rtol=1e-10, atol=0)


def unlike(root: Path) -> None:
    data = pyg_sar.load_partition(root, view="local")
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, NARROW).double(), view="local")
    if current().rank == 1:
        layer.lin_l.register_forward_hook(nothing)
    layer(data.x, data.edge_index)


def test_a_hook_on_one_worker_is_named(root: Path) -> None:
    with pytest.raises(Exception, match="called differently on the workers"):
        threads(unlike, 3, root)


# Uses #########################################################################


def hetero(root: Path) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    torch.manual_seed(0)
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    model = gnn.HeteroConv({kind: gnn.SAGEConv((-1, -1), NARROW) for kind in kinds})
    x = {"a": data.x, "b": torch.cat([data.x, data.x], 1)}
    edges = dict.fromkeys(kinds, data.edge_index)
    pyg_sar.nn.initialize(model.double(), x, edges)
    model = pyg_sar.distribute(model, view="local")
    out = model(x, edges)["b"]
    conv = next(iter(model.convs.values()))
    return data.n_id, out.detach(), conv._transforms_first, conv.state_dict()


def test_bipartite_lazy_layers_of_heterogeneous_models(root: Path, graph: Data) -> None:
    for ids, out, first, state in threads(hetero, 3, root):
        assert first
        plain = gnn.SAGEConv((CHANNELS, 2 * CHANNELS), NARROW).double()
        plain.load_state_dict(state)
        whole = plain((graph.x, torch.cat([graph.x, graph.x], 1)), graph.edge_index)
        torch.testing.assert_close(out, whole[ids].detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")
def test_one_process(monkeypatch: pytest.MonkeyPatch, graph: Data) -> None:
    """With kernels rows are mapped first; a small graph runs as PyG's own, to the bit."""
    plain = gnn.SAGEConv(CHANNELS, NARROW).double()
    expected = single_process(plain, graph)
    layer = pyg_sar.distribute(copy.deepcopy(plain), view="local")
    found = one_pass(layer, graph, torch.arange(50), torch.mean)
    assert layer._transforms_first
    assert error(found.out, expected.out) < 1e-12
    assert error(found.x_grad, expected.x_grad) < 1e-12
    monkeypatch.setattr("pyg_sar.nn.one_process.FEWEST_EDGES", graph.num_edges + 1)
    layer = pyg_sar.distribute(copy.deepcopy(plain), view="local")
    found = one_pass(layer, graph, torch.arange(50), torch.mean)
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
    text = (Path(__file__).parent.parent / "docs" / "transform_first.md").read_text()
    assert [name for name in gnn.conv.__all__[1:] if f"`{name}" not in text] == []


def test_the_policy_is_checked() -> None:
    with pytest.raises(ValueError, match="'transform_first' to be True or False"):
        SARPolicy(transform_first=1)  # type: ignore[arg-type]
