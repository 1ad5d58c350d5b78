"""A narrow wire: what is rounded, what it saves, how far gradients are off, and who says so."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from hosted_workers import host
from oracle import (
    CHANNELS,
    OUT,
    TOLERANCE,
    Partitions,
    apart,
    error,
    make_graph,
    node_losses,
    whole,
    workers,
)
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.exchange.wire import Wire
from pyg_sar.train.wire_error import ALL

WORLD = 3
PRECISION = {"bfloat16": 2**-8, "float16": 2**-11}
NARROW = tuple(PRECISION)
BITS = {"int8": 8, "int4": 4, "int2": 2}

# Rows ########################################################################


def travelled(wire: Wire, rows: Tensor) -> Tensor:
    """What arrives of ``rows``."""
    buffer = torch.empty_like(rows)
    landing, message = wire.landing(buffer), wire.encode(rows)
    assert landing.shape == message.shape and landing.dtype == message.dtype
    landing.copy_(message)
    wire.land(buffer)
    return buffer


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_arrive_rounded_once(name: str, dtype: torch.dtype):
    wire = Wire(name)
    for width, count in product((0, 1, 2, 5, 64), (0, 1, 3, 257, 1500)):
        rows = torch.randn(count, width, dtype=dtype)
        found = travelled(wire, rows)
        assert found.shape == rows.shape and found.dtype == dtype
        most = rows.abs().amax(1, keepdim=True) if width else rows
        scale = rows.abs() if name == "bfloat16" else most
        assert bool(((found - rows).abs() <= PRECISION[name] * scale).all())
        assert rows.numel() < 10 or not torch.equal(found, rows)
        assert torch.equal(travelled(wire, found), found)


def test_float16_rows_have_exponents_of_their_own():
    """From subnormal to huge rows; a row's infinity stays one, a row of zeros stays zeros."""
    base = torch.randn(400, 7, dtype=torch.float64)
    sizes = 10.0 ** torch.linspace(-300, 300, 400, dtype=torch.float64)
    rows = base * sizes.view(-1, 1)
    rows[17] = 0
    found = travelled(Wire("float16"), rows)
    most = rows.abs().amax(1, keepdim=True)
    assert bool(((found - rows).abs() <= PRECISION["float16"] * most).all())
    small = torch.tensor([[1e-40, -3e-41], [1e38, -3e38], [65519.0, 1.0]])
    found = travelled(Wire("float16"), small)
    assert bool(((found - small).abs() <= PRECISION["float16"] * small.abs().amax(1, True)).all())
    strange = torch.tensor([[float("inf"), 1.0], [float("nan"), 2.0], [0.0, 0.0]])
    assert torch.equal(travelled(Wire("float16"), strange).isfinite(), strange.isfinite())


@pytest.mark.parametrize("name", ["exact", *NARROW])
def test_other_dtypes_travel_as_they_are(name: str):
    for dtype in (torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float16):
        rows, wire = torch.randint(0, 2, (5, 3)).to(dtype), Wire(name)
        assert wire.encode(rows) is rows and wire.landing(rows) is rows
        assert not wire.narrows(rows)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_arrive_as_integers_with_a_scale(name: str, dtype: torch.dtype):
    wire, bits = Wire(name), BITS[name]
    # Both fewer rows, and more, than are brought to integers at a time.
    for width, count in ((1, 3), (2, 1), (3, 257), (5, 0), (5, 5000), (21, 257), (64, 4100)):
        rows = torch.randn(count, width, dtype=dtype)
        found = travelled(wire, rows)
        message = -(-width * bits // 8) + 2 * dtype.itemsize
        if message >= width * dtype.itemsize:  # A message would not be smaller.
            assert wire.encode(rows) is rows and torch.equal(found, rows)
            continue
        assert wire.encode(rows).shape == (count, message)
        assert wire.encode(rows).dtype == torch.uint8
        step = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
        assert bool(((found - rows).abs() <= 1.001 * step.view(-1, 1)).all())
        assert torch.equal(travelled(wire, rows), found)  # Fetched again: the same row.
        part = travelled(wire, rows[count // 2 :])  # Whoever it is sent to.
        assert torch.equal(part, found[count // 2 :])
    strange = torch.ones(4, 64, dtype=dtype)
    strange[0, 3], strange[1, 5], strange[3] = float("inf"), float("nan"), 0.0
    found = travelled(wire, strange)
    assert found[:2].isnan().all() and torch.equal(found[2:], strange[2:])


@pytest.mark.parametrize("name", BITS)
def test_integers_are_rounded_without_bias(name: str):
    """Values 0.3 steps above a level, where rounding to nearest would always go down."""
    levels = 2 ** BITS[name] - 1
    below = torch.randint(levels, (4000, 34)).float()
    rows = below + 0.3 + 1e-3 * torch.rand(4000, 34)
    rows[:, 0], rows[:, 1] = 0, levels
    found = (travelled(Wire(name), rows) - below)[:, 2:]
    assert bool(((found - found.round()).abs() < 1e-3).all())
    assert float(found.min()) > -0.5 and float(found.max()) < 1.5
    assert float(found.mean()) == pytest.approx(0.3, abs=0.01)
    for mean in (found.mean(0), found.mean(1)):  # In columns and rows alike.
        spread = (0.21 / (found.numel() / mean.numel())) ** 0.5
        assert float(mean.std()) < 1.3 * spread and float((mean - 0.3).abs().max()) < 6 * spread


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.02), (torch.float64, 0.0)])
def test_sums_in_another_order_are_rounded_alike(name: str, dtype: torch.dtype, share: float):
    terms = torch.randn(8, 2000, 40, dtype=dtype)
    first, second = terms.sum(0), sum(reversed(terms))
    assert not torch.equal(first, second)
    found, other = (travelled(Wire(name), rows) for rows in (first, second))
    step = (first.amax(1) - first.amin(1)) / (2 ** BITS[name] - 1)
    moved = (found - other).abs() > 0.5 * step.view(-1, 1)
    assert float(moved.double().mean()) <= share


# Layers ######################################################################


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(50, 300, dtype=torch.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, graph: Data) -> Path:
    return Partitions(tmp_path_factory.mktemp("wire"))(graph, WORLD, "random")


# name: (layer, values of a halo row)
LAYERS: dict[str, tuple[Any, int]] = {
    "sage": (lambda: gnn.SAGEConv(CHANNELS, OUT), OUT),
    "gat": (lambda: gnn.GATConv(CHANNELS, OUT, heads=2), 2 * OUT + 2),
    "max": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"), CHANNELS),
}
POLICIES = {
    "mode 1": {"mode": 1, "push": "off"},
    "no prefetch": {"mode": 1, "prefetch": 0, "push": "off"},
    "mode 2": {"mode": 2, "prefetch": 1, "push": "off"},
    "mode 3": {"mode": 3},
    "pushed": {"mode": 1},
    "chunked": {"mode": 1, "strategy": "chunked", "message_budget": 10**7},
}


# Of maxima only how rows come and gradients go.
WAYS = {"sage": (*POLICIES,), "gat": (*POLICIES,), "max": ("mode 1", "chunked")}


def bytes_and_results(root: Path, layers: Any, wires: Any, policies: Any) -> Any:
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root)
    found = {}
    for name, layer in layers.items():
        layer = pyg_sar.distribute(copy.deepcopy(layer))
        for way in (way for way in policies if way in WAYS[name]):
            for wire in wires:
                layer.policy = SARPolicy(wire=wire, **POLICIES[way])
                x = data.x.clone().requires_grad_()
                layer(x, data.edge_index)  # analyses the message
                with pyg_sar.Ledger(comm) as ledger:
                    out = layer(x, data.edge_index)
                    node_losses(out).mean().backward()
                kinds = ("fetch", "refetch", "gradient")
                sent = {kind: ledger.sent_bytes(kind=kind) for kind in kinds}
                got = {kind: ledger.received_bytes(kind=kind) for kind in kinds}
                peak = ledger.peak_resident_rows()
                results = out.detach().full_tensor(), x.grad.full_tensor()
                found[name, way, wire] = sent, got, peak, *results
    return found, data.edge_index.to_local().plan.halo_counts


@pytest.fixture(scope="module")
def measured(root: Path) -> Any:
    """What the workers found of all layers, in one launch."""
    layers = {}
    for name, (make, _) in LAYERS.items():
        torch.manual_seed(1)
        layers[name] = make()

    @cache
    def find() -> Any:
        with apart():
            return workers(bytes_and_results, WORLD, root, layers, ("exact", *NARROW), POLICIES)

    return find


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in WAYS for way in WAYS[name]])
def test_bytes_and_errors(name: str, way: str, measured: Any):
    """Two bytes a value instead of four, and two for a row's exponent in float16.

    Errors are those of rounding.
    """
    width = LAYERS[name][1]
    for found, halo in measured():
        for wire in NARROW:
            for place in (3, 4):
                exact, narrow = found[name, way, "exact"][place], found[name, way, wire][place]
                error = float((narrow - exact).norm() / exact.norm())
                assert 0 < error < 2 * PRECISION[wire], (place, error)
            if way == "mode 2":  # Fetched again or kept, a row is the same row.
                first, again = found[name, "mode 1", wire][3], found[name, way, wire][3]
                assert torch.allclose(again, first, rtol=1e-5, atol=1e-6)
        # With a narrow wire rows are pulled.
        exact = found[name, "mode 1" if way == "pushed" else way, "exact"]
        for way_of in (0, 1):
            bf16, f16 = (found[name, way, wire][way_of] for wire in NARROW)
            assert sum(exact[way_of].values()) > 0
            for kind, count in exact[way_of].items():
                assert 2 * bf16[kind] == count
                # GAT's source tensors are two in mode 3, and one message per unit elsewhere.
                messages = 2 if (name, way) == ("gat", "mode 3") else 1
                assert f16[kind] * width == bf16[kind] * (width + messages)
        if way not in ("mode 3", "pushed"):
            assert exact[1]["fetch"] == sum(halo) * width * 4


def test_a_narrow_wire_needs_no_more_rows(measured: Any):
    for found, halo in measured():
        for prefetch, way in ((1, "mode 1"), (0, "no prefetch")):
            for name, wire in product(("sage", "gat"), NARROW):
                assert found[name, way, wire][2] <= (1 + prefetch) * max(halo)


WIDE = 40


def with_integers(root: Path, modes: Any) -> Any:
    """Bytes, outputs and gradients of layers with rows of 40 values, and the gradients' errors."""
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root)
    wide = data.x.repeat(1, -(-WIDE // CHANNELS))[:, :WIDE] * torch.linspace(1, 2, WIDE)
    found: dict[Any, Any] = {}
    for name, layer in (("sage", gnn.SAGEConv(WIDE, WIDE)), ("gat", gnn.GATConv(WIDE, WIDE))):
        torch.manual_seed(2)
        layer.reset_parameters()
        layer = pyg_sar.distribute(layer)
        for way in modes if name == "sage" else ("pushed",):
            for wire in ("exact", *BITS):
                layer.policy = SARPolicy(wire=wire, **POLICIES[way])
                x = wide.clone().requires_grad_()

                def step(x: Tensor = x, layer: Any = layer) -> Tensor:
                    out: Tensor = layer(x, data.edge_index)
                    node_losses(out).mean().backward()
                    return out

                error = pyg_sar.train.gradient_error(layer, step)[ALL]
                x.grad = None
                with pyg_sar.Ledger(comm) as ledger:
                    out = step().detach()
                results = out.full_tensor(), x.grad.full_tensor()
                found[name, way, wire] = error, ledger.received_bytes(), *results
    plan = data.edge_index.to_local().plan
    return found, plan.num_halo + plan.send_index.numel()


def test_integers_in_layers(root: Path):
    """A quarter of the bytes and less, errors by bits; the same rows wherever workers run."""
    with apart():
        distant = workers(with_integers, WORLD, root, ("mode 1", "mode 2", "mode 3"))
    near = workers(with_integers, WORLD, root, ("mode 1",))
    for (here, _), (there, _) in zip(near, distant, strict=True):
        for key in (key for key in here if key[2] != "exact"):
            assert all(map(torch.equal, here[key][2:], there[key][2:])), key
    for results, rows in distant:
        for name, way in {key[:2] for key in results}:
            errors = [results[name, way, wire][0] for wire in ("exact", *BITS)]
            assert errors[0] == 0 and 0 < errors[1] < 0.02
            assert errors == sorted(errors), (name, way, errors)
        for wire, bits in BITS.items():  # Case 1: rows in, gradients back.
            saved = results["sage", "mode 1", "exact"][1] - results["sage", "mode 1", wire][1]
            assert saved == rows * (4 * WIDE - 8 - WIDE * bits // 8)
            same = [results["sage", f"mode {mode}", wire][2:] for mode in (1, 2)]
            assert all(
                torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*same, strict=True)
            )


class Numbered(MessagePassing):
    """Sends node numbers beside features, far beyond what 16 bits hold."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def forward(self, x: Tensor, number: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, number=number)

    def message(self, x_j: Tensor, number_j: Tensor) -> Tensor:
        return x_j * 0 + number_j.to(x_j.dtype)


def test_results_do_not_depend_on_shared_memory(
    root: Path, measured: Any, monkeypatch: pytest.MonkeyPatch
):
    """Workers that share nothing measured the others; what is pushed is the same, too."""
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "auto")
    layers = {}
    for name in ("sage", "gat"):
        torch.manual_seed(1)
        layers[name] = LAYERS[name][0]()
    ways = ("mode 2", "mode 3", "pushed", "chunked")
    again = workers(bytes_and_results, WORLD, root, layers, ("bfloat16",), ways)
    for (found, _), (first, _) in zip(again, measured(), strict=True):
        for key, here in found.items():
            assert here[:2] == first[key][:2], key
            assert all(map(torch.equal, here[3:], first[key][3:])), key


def hosted_or_not(root: Path, wires: Any) -> Any:
    data = pyg_sar.load_partition(root)
    x = data.x.double().repeat(1, 8)
    found = []
    for kind, wire, options in wires:
        torch.manual_seed(5)
        model = getattr(gnn, kind)(x.size(1), 24, 2, OUT).double()
        model = pyg_sar.distribute(model, SARPolicy(wire=wire, **options))
        node_losses(model(x, data.edge_index)).mean().backward()
        found.append([p.grad for p in model.parameters()])
    return found


def test_parts_hosted_together_round_the_same_rows(root: Path):
    ways = ({}, {"mode": 2}, {"mode": 3}, {"strategy": "chunked"})
    kinds = ("GCN", "bfloat16"), ("GCN", "int8"), ("GCN", "int2"), ("GAT", "int4")
    wires = [(*kind, way) for kind in kinds for way in some(ways, " ".join(kind), 2)]
    small = [("GCN", "int8", {"strategy": "chunked", "message_budget": 2000})]
    apart = workers(hosted_or_not, WORLD, root, wires + small)[0]
    together = host(hosted_or_not, WORLD, root, wires)[0]
    for case, a, b in zip(wires, apart, together, strict=False):
        for first, second in zip(a, b, strict=True):
            assert error(second, first) < TOLERANCE, case
    with pytest.raises(Exception, match=r"of \d+ chunks, .*"):
        host(hosted_or_not, WORLD, root, small)


def of_one_edge(data: Any, ready: Any) -> list[Tensor | None]:
    """Results and gradients of a layer whose rows, and gradients of rows, no wire changes."""
    torch.manual_seed(5)
    layer = gnn.SAGEConv((16, 16), 24, aggr="sum").double()
    with torch.no_grad():
        layer.lin_l.weight.copy_(torch.eye(24, 16))
    layer = ready(layer)
    x = data["a"].x.clone().requires_grad_()
    out = layer((x, data["b"].x), data["a", "to", "b"].edge_index)
    out.sum().backward()
    return [whole(t) for t in (out.detach(), x.grad, *(p.grad for p in layer.parameters()))]


def test_empty_halos_are_as_narrow_as_others(tmp_path: Path):
    """One edge leads to another worker's node, so that only one worker has a halo."""
    data, draw = HeteroData(), torch.Generator().manual_seed(3)
    for name in ("a", "b"):
        data[name].x = torch.randint(2, (6, 16), generator=draw).double()
    data["a", "to", "b"].edge_index = torch.tensor([[0], [0]])
    owners = torch.arange(6) % 3
    pyg_sar.write_partitions(data, 3, tmp_path, {"a": owners, "b": (owners + 1) % 3})
    expected = of_one_edge(data, lambda layer: layer)
    policies = [SARPolicy(wire=n) for n in ("bfloat16", *BITS)]
    policies += [SARPolicy(wire=n, mode=3) for n in ("exact", "float16", "int4")]

    def worker() -> Any:
        mine = pyg_sar.load_partition(tmp_path)
        return [of_one_edge(mine, lambda m, p=p: pyg_sar.distribute(m, p)) for p in policies]

    for found in (*workers(worker, 3), *host(worker, 3)):
        for policy, results in zip(policies, found, strict=True):
            for one, right in zip(results, expected, strict=True):
                assert error(one, right) < TOLERANCE, policy


def test_integers_are_exact_in_a_layer(root: Path, graph: Data):
    numbers = torch.arange(50).view(-1, 1) * 1001
    expected = Numbered()(graph.x, numbers, graph.edge_index)

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for wire, mode in (("bfloat16", 1), ("bfloat16", 2), ("float16", 3)):
            layer = pyg_sar.distribute(Numbered(), SARPolicy(wire=wire, mode=mode))
            found = layer(data.x, numbers, data.edge_index)
            assert torch.equal(found.full_tensor(), expected)

    workers(worker, WORLD)


def test_under_checkpoint(root: Path):
    """What is computed again in the backward pass sees the very same rows."""

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        torch.manual_seed(3)
        model = gnn.GraphSAGE(CHANNELS, 8, 2, OUT)
        model = pyg_sar.distribute(model, SARPolicy(wire="bfloat16"))
        found = []
        for again in (False, True):
            model.zero_grad()
            if again:
                out = torch.utils.checkpoint.checkpoint(
                    model, data.x, data.edge_index, use_reentrant=False
                )
            else:
                out = model(data.x, data.edge_index)
            node_losses(out).mean().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    workers(worker, WORLD)


def test_verify_says_how_far_it_is(graph: Data):
    torch.manual_seed(0)
    model, policy = gnn.SAGEConv(CHANNELS, OUT), SARPolicy(wire="bfloat16")
    assert pyg_sar.verify(model, graph, 2, policy=SARPolicy(wire="exact")).ok
    assert not pyg_sar.verify(model, graph, 2, policy=policy).ok
    assert pyg_sar.verify(model, graph, 2, policy=policy, tolerance=0.02).ok
    wide = copy.copy(graph)
    wide.x = graph.x.repeat(1, 5)
    model = gnn.SAGEConv(wide.num_features, wide.num_features)
    assert not pyg_sar.verify(model, wide, 2, policy=SARPolicy(wire="int8")).ok


# The gradient's error ########################################################


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [gnn.SAGEConv(CHANNELS, 8), gnn.GATConv(8, 4, heads=2), gnn.SAGEConv(8, OUT)]
        )
        self.norm = torch.nn.BatchNorm1d(8)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.convs[0](x, edge_index)).relu()
        return self.convs[2](self.convs[1](x, edge_index).relu(), edge_index)


def gradients_with(model: Any, data: Data, wire: str) -> dict[str, Tensor | None]:
    model = copy.deepcopy(model)
    for layer in model.convs:
        layer.policy = SARPolicy(wire=wire)
    model.zero_grad()
    node_losses(model(data.x, data.edge_index)).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradient_error(root: Path):
    def measured(wire: str) -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        torch.manual_seed(5)
        model = pyg_sar.distribute(Net(), SARPolicy(wire=wire))
        exact, narrow = (gradients_with(model, data, w) for w in ("exact", wire))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        marks = [torch.full_like(p, 7.0) for p in model.parameters()]
        for parameter, mark in zip(model.parameters(), marks, strict=True):
            parameter.grad = mark

        def closure() -> None:
            torch.rand(3)
            out = model(data.x, data.edge_index)
            node_losses(out).mean().backward()

        with pyg_sar.Ledger(comm) as ledger:
            errors = pyg_sar.train.gradient_error(model, closure)
        assert ledger.gradient_errors == [errors]
        assert ledger.summary()["gradient_errors"] == [errors]
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert all(p.grad is mark for p, mark in zip(model.parameters(), marks, strict=True))
        assert all(layer.policy == SARPolicy(wire=wire) for layer in model.convs)
        assert set(errors) == {ALL, *(name for name, _ in model.named_parameters())}
        for name, gradient in exact.items():
            if gradient is None:
                assert errors[name] == 0
                continue
            difference = (narrow[name].double() - gradient.double()).norm()
            expected = float(difference / gradient.double().norm())
            assert errors[name] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        return errors

    wires = ("exact", *NARROW)
    first, *others = workers(lambda: [measured(wire) for wire in wires], WORLD)
    assert all(other == first for other in others)
    assert first[0][ALL] == 0
    for wire, errors in zip(NARROW, first[1:], strict=True):
        assert 0 < errors[ALL] < 4 * PRECISION[wire]


def test_it_is_measured_every_few_epochs(root: Path):
    config = pyg_sar.train.TrainConfig(epochs=5, lr=0.01)
    plain_model = gnn.GraphSAGE(CHANNELS, 8, 2, 3)

    def trained(every: int | None) -> Any:
        data = pyg_sar.load_partition(root)
        policy = SARPolicy(wire="bfloat16", measure_every=every)
        model = pyg_sar.distribute(copy.deepcopy(plain_model), policy)
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            result = pyg_sar.Trainer(model, data, config).fit()
        return len(ledger.gradient_errors), result.losses

    for (count, losses), plain in workers(lambda: [trained(2), trained(None)], WORLD):
        assert count == 3  # before epochs 1, 3 and 5
        assert plain == (0, losses)
