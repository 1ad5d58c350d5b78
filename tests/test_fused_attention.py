"""Layers whose softmax attention runs by kernel: exact, lean on the wire and in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import some
from oracle import (
    CHANNELS,
    EDGE_DIM,
    OUT,
    Job,
    Partitions,
    Sizes,
    Sweep,
    alike,
    hosted,
    make_graph,
    parts,
    set_policy,
    single_process,
    workers,
)
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn.models.attentive_fp import GATEConv

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.kernels.ops import why_missing
from pyg_sar.nn.fused_layers import adds_bias

Make = Callable[[], torch.nn.Module]
POLICIES = (
    SARPolicy(mode=1, prefetch=0),
    SARPolicy(mode=1, prefetch=1),
    SARPolicy(mode=2, prefetch=1),
    SARPolicy(mode=1, prefetch=1, kernels="off"),
)
ATTR = ("edge_attr",)


class Residual(torch.nn.Module):
    """FAConv, whose first features are its input."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.conv = gnn.FAConv(CHANNELS, **options)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.conv(x, x, edge_index, edge_weight)


class ByRelation(torch.nn.Module):
    """HGTConv with a relation for each type of edge, of which one is of no edge."""

    def __init__(self, heads: int, conv: type[gnn.HGTConv] = gnn.HGTConv) -> None:
        super().__init__()
        self.relations = [("node", name, "node") for name in ("a", "b", "none")]
        self.conv = conv({"node": CHANNELS}, 6, (["node"], self.relations), heads)
        with torch.no_grad():
            for relation, factor in enumerate(self.conv.p_rel.values()):
                factor += torch.linspace(-2, relation, heads)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor | None = None) -> Tensor:
        kinds = torch.arange(edge_index.size(1)) if edge_type is None else edge_type
        kinds = kinds % 3 > 0
        nothing = torch.zeros_like(kinds)
        edges = [edge_index[:, at] for at in (kinds, ~kinds, nothing)]
        return self.conv({"node": x}, dict(zip(self.relations, edges, strict=True)))["node"]


class Typed(torch.nn.Module):
    """RGATConv whose edges' types follow from their places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.RGATConv(CHANNELS, OUT, 3, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index, torch.arange(edge_index.size(1)) % 3)


class Strided(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


def strided(conv: gnn.TransformerConv) -> gnn.TransformerConv:
    """Keys and values whose rows lie apart in memory."""
    conv.lin_key, conv.lin_value = (Strided(CHANNELS, 2 * OUT) for _ in range(2))
    return conv


def supergat(**options: object) -> gnn.SuperGATConv:
    """In training it draws negative edges, which workers can't."""
    return gnn.SuperGATConv(CHANNELS, OUT, **options).eval()


LAYERS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "gat": (lambda: gnn.GATConv(CHANNELS, OUT, heads=2), ()),
    "gat, mean of heads": (lambda: gnn.GATConv(CHANNELS, OUT, heads=3, concat=False), ()),
    "gat, edges": (lambda: gnn.GATConv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM), ATTR),
    "gat, no loops": (
        lambda: gnn.GATConv(
            CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM, add_self_loops=False, residual=True
        ),
        ATTR,
    ),
    "gat, edges unused": (lambda: gnn.GATConv(CHANNELS, OUT), ()),
    "gatv2": (lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2), ()),
    "gatv2, shared": (lambda: gnn.GATv2Conv(CHANNELS, OUT, share_weights=True), ()),
    "gatv2, edges": (lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM), ATTR),
    "transformer": (lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, beta=True), ()),
    "transformer, edges": (
        lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM, concat=False),
        ATTR,
    ),
    "transformer, strided": (lambda: strided(gnn.TransformerConv(CHANNELS, OUT, heads=2)), ()),
    "agnn": (gnn.AGNNConv, ()),
    "supergat, MX": (lambda: supergat(heads=2), ()),
    "supergat, MX, no loops": (
        lambda: supergat(heads=3, concat=False, add_self_loops=False, negative_slope=0.0),
        (),
    ),
    "supergat, SD": (lambda: supergat(heads=2, attention_type="SD"), ()),
    "fa": (Residual, ()),
    "fa, weights": (
        lambda: Residual(normalize=False, add_self_loops=False, eps=0.0),
        ("edge_weight",),
    ),
    "fa, cached": (lambda: Residual(cached=True), ()),
    "gate": (lambda: GATEConv(CHANNELS, CHANNELS, EDGE_DIM), ATTR),
    "hgt": (lambda: ByRelation(2), ()),
    "hgt, one head": (lambda: ByRelation(1), ()),
    "rgat": (lambda: gnn.RGATConv(CHANNELS, OUT, 4, heads=2), ()),
    "rgat, bases, edges": (
        lambda: gnn.RGATConv(CHANNELS, OUT, 3, num_bases=2, heads=2, edge_dim=EDGE_DIM),
        ATTR,
    ),
    "rgat, blocks": (
        lambda: gnn.RGATConv(CHANNELS, 4, 3, num_blocks=2, heads=2, concat=False, bias=False),
        (),
    ),
    "gat stack": (lambda: gnn.GAT(CHANNELS, 8, 3, OUT, heads=2, v2=False), ()),
}

# Which take each edge's type.
TYPED = {"hgt": ("edge_type",), "rgat": ("edge_type",)}


def fused_passes(layer: torch.nn.Module, data: object) -> int:
    """How often the kernels' way was taken in a forward pass."""
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        layer(data.x, data.edge_index)
    return ledger.events("fused attention")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_layers_equal_pyg(world: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    partitions = Partitions(tmp_path_factory.mktemp("parts"))
    data, sweep = make_graph(), Sweep(world)
    torch.manual_seed(0)
    names = some(list(LAYERS), f"{world}", 2)
    for k, (name, (make, edge)) in enumerate((name, LAYERS[name]) for name in names):
        root = partitions(data, world, "random" if world != 3 else torch.arange(40) % 2 * 2)
        constants = TYPED.get(name.split(",")[0], ())
        # Of one and of five each layer has every other policy: all of them are tried with 2 and 3.
        policies = POLICIES if world in (2, 3) else POLICIES[k % 2 :: 2]
        policies = some(policies, f"{name} {world}", 2)
        sweep.add(name, Job(make().double(), root, edge, policies, constants), data)
    sweep.check(hosted(world))


def _fused_counts(root: object) -> list[int]:
    data = pyg_sar.load_partition(root)
    counts = []
    for name, (make, edge) in LAYERS.items():
        layer = pyg_sar.distribute(make().double())
        arguments = {key: data[key] for key in (*edge, *TYPED.get(name.split(",")[0], ()))}
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            layer(data.x, data.edge_index, **arguments)
        counts.append((name, ledger.events("fused attention")))
        set_policy(layer, SARPolicy(kernels="off"))
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            layer(data.x, data.edge_index, **arguments)
        assert ledger.events("fused attention") == 0
    return counts


def test_these_layers_take_the_kernels_way(tmp_path) -> None:
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")
    for counts in parts(_fused_counts, 2, tmp_path / "parts"):
        assert counts == [(name, 3 if name == "gat stack" else 1) for name in LAYERS]


class Watched(gnn.GATConv):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return 2 * super().message(x_j, alpha)


@pytest.mark.parametrize("kind", ["own message", "hook", "mean", "autocast"])
def test_others_do_not(kind: str) -> None:
    data = make_graph()
    plain = (Watched if kind == "own message" else gnn.GATConv)(CHANNELS, OUT).double()
    if kind == "mean":
        plain = gnn.GATConv(CHANNELS, OUT, aggr="mean").double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    if kind == "hook":
        for layer in (plain, model):
            layer.register_message_forward_hook(lambda module, inputs, out: out * 3)
    with torch.autocast("cpu", enabled=kind == "autocast"):
        assert fused_passes(model, data) == 0
        if kind != "autocast":
            assert torch.allclose(model(data.x, data.edge_index), plain(data.x, data.edge_index))


class Sharper(gnn.SuperGATConv):
    def get_attention(self, *args: object, **kwargs: object) -> Tensor:
        return super().get_attention(*args, **kwargs) ** 2


class Own(gnn.HGTConv):
    """Whose forward() is one of tensors of the whole graph: keys have a row per relation."""

    def forward(self, *args: object) -> dict[str, Tensor]:
        return super().forward(*args)


def sharper() -> torch.nn.Module:
    return Sharper(CHANNELS, OUT).eval()


def _fused_of_own(root: object) -> int:
    return fused_passes(pyg_sar.distribute(sharper().double()), pyg_sar.load_partition(root))


def test_neither_do_layers_whose_scores_are_their_own(tmp_path) -> None:
    data, partitions, sweep = make_graph(), Partitions(tmp_path), Sweep(2)
    root = partitions(data, 2)
    sweep.add("scores", Job(sharper().double(), root, (), POLICIES[:1]), data)
    own = ByRelation(2, Own).double()
    sweep.add("own forward", Job(own, root, (), POLICIES[:1], ("edge_type",)), data)
    sweep.check()
    assert workers(_fused_of_own, 2, root) == [0, 0]


# Dropout #####################################################################


def _dropped(layer: torch.nn.Module, data: object, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    out = layer(x, data.edge_index)
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()


def set_dropout(model: torch.nn.Module, p: float) -> None:
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = p


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer", "fa", "rgat"])
def test_the_backward_pass_sees_the_same_mask(name: str) -> None:
    torch.manual_seed(0)
    data = make_graph(20, 80)
    layer = (Typed if name == "rgat" else LAYERS[name][0])().double()
    set_dropout(layer, 0.5)
    model = pyg_sar.distribute(layer)
    assert _dropped(model, data, data.x) == _dropped(model, data, data.x)
    set_dropout(model, 0.0)
    without = _dropped(model, data, data.x)
    set_dropout(model, 0.5)
    assert _dropped(model, data, data.x) != without
    x = data.x.clone().requires_grad_()
    assert fused_passes(model, data) == (why_missing() is None)
    assert torch.autograd.gradcheck(lambda x: _dropped(model, data, x), x)


# The laws ####################################################################


def _traffic(root: object, make: Make) -> dict[str, int]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(make().double(), SARPolicy(prefetch=0, push="off"))
    assert fused_passes(layer, data) == 1
    layer(data.x, data.edge_index).sum().backward()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        layer(data.x.requires_grad_(), data.edge_index).sum().backward()
    plan = data.edge_index.to_local().plan
    kinds = ("fetch", "refetch", "gradient")
    found = {kind: ledger.received_bytes(kind=kind) for kind in kinds}
    sent = sum(plan.send_rows(q).numel() for q in range(plan.world_size))
    return {
        **found,
        "halo": plan.num_halo,
        "sent": sent,
        "resident": ledger.peak_resident_rows(),
        "largest": max(plan.halo_counts),
    }


WIDTHS = {
    "gat": 2 * OUT + 2,
    "gatv2": 2 * OUT,
    "transformer": 4 * OUT,
    "supergat, MX": 2 * OUT,
    "supergat, SD": 2 * OUT,
    "fa": CHANNELS + 1,
    "rgat": CHANNELS,
}


def _all_traffic(root: object) -> dict[str, dict[str, int]]:
    makes = {name: Typed if name == "rgat" else LAYERS[name][0] for name in WIDTHS}
    return {name: _traffic(root, make) for name, make in makes.items()}


def test_bytes_and_resident_rows(tmp_path) -> None:
    pyg_sar.write_partitions(make_graph(60, 300), 3, tmp_path / "parts", "random")
    for worker in workers(_all_traffic, 3, tmp_path / "parts"):
        for name, found in worker.items():
            size = WIDTHS[name] * 8
            assert found["fetch"] == found["refetch"] == found["halo"] * size, name
            assert found["gradient"] == found["sent"] * size, name
            assert found["resident"] == found["largest"], name


class Saved:
    """Counts what autograd keeps between the passes."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer", "supergat, MX", "supergat, SD"])
def test_nothing_per_edge_is_kept(name: str) -> None:
    nodes, edges, saved = 50, 20_000, Saved()
    data = make_graph(nodes, edges)
    model = pyg_sar.distribute(LAYERS[name][0]().double())
    model(data.x, data.edge_index)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        out = model(data.x.requires_grad_(), data.edge_index)
    assert sum(saved.sizes.values()) < edges * 8 / 2
    out.sum().backward()


# Extremes ####################################################################


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["gat", "gatv2", "transformer", "agnn", "supergat, MX", "supergat, SD", "fa"]
)
def test_rounding_is_at_most_twice_pyg(dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(0)
    data = make_graph(200, 3000)
    exact = LAYERS[name][0]().double()
    truth = single_process(exact, data)
    plain = copy.deepcopy(exact).to(dtype)
    worst = {}
    for who, layer in (
        ("pyg", plain),
        ("here", pyg_sar.distribute(copy.deepcopy(plain))),
    ):
        x = data.x.to(dtype).requires_grad_()
        out = layer(x, data.edge_index)
        worst[who] = float((out.detach().double() - truth.out).norm() / truth.out.norm())
        out.float().square().sum().backward()
        assert x.grad.dtype == dtype
        assert x.grad.isfinite().all()
    assert worst["here"] <= 2 * worst["pyg"]


def _half(layer: torch.nn.Module, root: object) -> tuple[int, Tensor]:
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(copy.deepcopy(layer))
    with torch.no_grad(), pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        out = model(data.x, data.edge_index, edge_type=data.edge_type)
    return ledger.events("fused attention"), out.full_tensor()


def test_the_factors_of_a_hub_do_not_round(tmp_path) -> None:
    """A key with thousands of edges: their sum has more digits than bfloat16."""
    data = make_graph(60, 200)
    data.edge_index[0, 5:] = 7
    data.edge_index = data.edge_index.repeat(1, 20)
    data.edge_type = data.edge_type.repeat(20) // 2
    data.edge_attr = data.edge_weight = None
    exact = ByRelation(2).double()
    truth = single_process(exact, data, constants=("edge_type",)).out
    data.x = data.x.bfloat16()
    half = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        plain = half(data.x, data.edge_index, data.edge_type)
    ((fused, out),) = workers(_half, 1, half, Partitions(tmp_path)(data, 1))
    assert fused == 1
    errors = [float((x.double() - truth).norm()) for x in (out, plain)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.filterwarnings("ignore:RGATConv .*out of range:pyg_sar.errors.OneShotWarning")
def test_an_edge_of_no_relation_is_an_error() -> None:
    data = make_graph()
    model = pyg_sar.distribute(gnn.RGATConv(CHANNELS, OUT, 3).double())
    for bad in (3, -1):
        kinds = data.edge_type.clone()
        kinds[7] = bad
        with pytest.raises(IndexError, match=r"'edge_type' in \[0, 3\)|out of range|index"):
            model(data.x, data.edge_index, kinds)


def test_no_edges_at_all() -> None:
    data = make_graph()
    plain = gnn.GATConv(CHANNELS, OUT, add_self_loops=False).double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    out = model(data.x, data.edge_index[:, :0])
    assert torch.equal(out, plain(data.x, data.edge_index[:, :0]))
    F.mse_loss(out, torch.ones_like(out)).backward()


# The bias ######################################################################

BIASED: dict[str, Callable[..., Any]] = {
    "GAT": lambda **how: gnn.GATConv(CHANNELS, OUT, heads=3, **how),
    "GATv2": lambda **how: gnn.GATv2Conv(CHANNELS, OUT, heads=3, **how),
    # Its dropped weights are no kernel's.
    "GAT, many heads": lambda **how: gnn.GATConv(CHANNELS, OUT, heads=33, **how),
}
WAYS = {
    "plain": lambda x, out: (out * out).sum(),
    "changed in place": lambda x, out: out.relu_().square().sum(),
    "second derivative": lambda x, out: (
        torch.autograd.grad(out.square().sum(), x, create_graph=True)[0].square().sum() + out.sum()
    ),
}


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(50, 260)


@pytest.mark.parametrize(
    ("name", "start"), [("GAT", workers), ("GATv2", parts), ("GAT, many heads", parts)]
)
def test_the_bias_is_added_by_the_kernel(
    name: str, start: Any, graph: Data, partitions: Partitions
) -> None:
    """Its backward pass reads the sum: exact, whatever becomes of that, in two steps."""

    def use(data: Any, ready: Callable[[Any], Any]) -> list[Tensor]:
        found = []
        for way, how in product(WAYS.values(), ({}, {"dropout": 0.4}, {"concat": False})):
            torch.manual_seed(0)
            layer = BIASED[name](**how).double()
            torch.nn.init.normal_(layer.bias)
            layer, x = ready(layer), data.x.clone().requires_grad_()
            for _ in range(2):
                layer.zero_grad()
                x.grad = None
                out = layer(x, data.edge_index)
                found.append(out.detach().clone())
                way(x, out).backward()
                found += [x.grad, *(p.grad.clone() for p in layer.parameters())]
        return found

    alike(use, graph, partitions(graph, 2, "random"), 2, start)


class ReadsBias(gnn.GATConv):
    """Its messages have the bias, too."""

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        x = x_j if self.bias is None else x_j + self.bias.view(self.heads, -1)
        return alpha.unsqueeze(-1) * x


class UpdatesByBias(gnn.GATConv):
    """As is what it aggregates."""

    def update(self, inputs: Tensor) -> Tensor:
        return inputs if self.bias is None else inputs * self.bias.view(self.heads, -1)


@pytest.mark.parametrize("own", [ReadsBias, UpdatesByBias])
def test_layers_that_read_their_bias_find_it(own: Any, graph: Data, partitions: Partitions) -> None:
    """No kernel may add it, whichever way such a layer takes."""
    assert adds_bias(gnn.GATConv) and not adds_bias(own)

    def use(data: Any, ready: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = own(CHANNELS, OUT, heads=3).double()
        torch.nn.init.normal_(layer.bias)
        layer = ready(layer)
        out = layer(data.x, data.edge_index)
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in layer.parameters())]

    alike(use, graph, partitions(graph, 2, "random"), 2)


def sums_made(root: Path, name: str) -> list[int]:
    """Tensors like the output that are made as sums: in a first call, and after a change in place;
    by another layer.
    """
    data, counts = pyg_sar.load_partition(root), []
    layer = pyg_sar.distribute(BIASED[name]().double())
    for one in (layer, layer, layer, pyg_sar.distribute(BIASED[name](residual=True).double())):
        with Sizes() as sizes:
            out = one(data.x, data.edge_index)
        counts.append(sizes.made.count(("aten::add", out.to_local().numel())))
        (out.relu_() if len(counts) == 2 else out).sum().backward()
    return counts


@pytest.mark.skipif(why_missing() is not None, reason="needs the C++ kernels")
@pytest.mark.parametrize("name", BIASED)
def test_an_output_with_its_bias_is_one_tensor(
    name: str, graph: Data, partitions: Partitions
) -> None:
    """But for layers whose output is changed in place, which would be computed again each time."""
    for found in workers(sums_made, 2, partitions(graph, 2, "random"), name):
        assert found == [0, 0, 1, 2]
