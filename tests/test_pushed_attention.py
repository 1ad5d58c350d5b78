"""Attention of which partial states are pushed: exact, the same masks, and bytes by the law."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from oracle import (
    CHANNELS,
    EDGE_DIM,
    OUT,
    Job,
    Partitions,
    Sweep,
    error,
    errors,
    make_graph,
    one_pass,
    probe,
    run_jobs,
    single_process,
    workers,
)
from test_pushed import stars
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.engine.cuts import split_edges
from pyg_sar.engine.kernels.attention import row_bytes
from pyg_sar.exchange.cover import minimum_cover, nearest_costs
from pyg_sar.kernels import ops
from pyg_sar.kernels.attention_terms import Attention, AttentionState
from pyg_sar.ledger import HALO_KINDS

Make = Callable[[], torch.nn.Module]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read nothing in each other's memory: by itself a policy pushes then."""
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")


POLICIES = (
    SARPolicy(mode=1, prefetch=0),
    SARPolicy(mode=1, prefetch=1),
    SARPolicy(mode=2, prefetch=0),
    SARPolicy(mode=2, prefetch=1),
)
HEADS = 2


@pytest.fixture(scope="module")
def root(partitions: Partitions) -> Path:
    return partitions(stars(), 3)


DROPPING = ("gat", "gatv2", "transformer")


class InPlace(torch.nn.Module):
    """Writes into what the attention gave."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GATConv(CHANNELS, OUT, heads=HEADS, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        out *= 2
        return out


class TwoTypes(torch.nn.Module):
    """Sources and targets with inputs of their own, or sources with one alone."""

    def __init__(self, conv: torch.nn.Module, targets: bool) -> None:
        super().__init__()
        self.conv, self.targets = conv, targets

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        size = (x.size(0), x.size(0))
        other = x.sin() if self.targets else None
        out: Tensor = self.conv((x, other), edge_index, size=size)
        return out


def plain_gat(**options: Any) -> gnn.GATConv:
    return gnn.GATConv(CHANNELS, OUT, heads=HEADS, add_self_loops=False, **options)


LAYERS: dict[str, Make] = {
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=HEADS),
    "gat, no loops": plain_gat,
    "gat, mean of heads": lambda: gnn.GATConv(CHANNELS, OUT, heads=3, concat=False),
    "gat, at the sources": lambda: plain_gat(flow="target_to_source"),
    "gat, two inputs": lambda: TwoTypes(
        gnn.GATConv((CHANNELS, CHANNELS), OUT, add_self_loops=False), True
    ),
    "gat, no query": lambda: TwoTypes(
        gnn.GATConv((CHANNELS, CHANNELS), OUT, add_self_loops=False), False
    ),
    "gat, written into": InPlace,
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=HEADS, add_self_loops=False),
    "gatv2, shared": lambda: gnn.GATv2Conv(CHANNELS, OUT, share_weights=True),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=HEADS, beta=True),
    "agnn": lambda: gnn.AGNNConv(add_self_loops=False),
    "gat stack": lambda: gnn.GAT(CHANNELS, 8, 3, OUT, heads=HEADS, v2=False),
}


def fan_in() -> tuple[Data, Tensor]:
    """Targets all of whose in-edges come from another part, and one target alone in a third."""
    data = make_graph(30, 0)
    source, hubs = torch.arange(20), torch.tensor([20, 21, 29])
    data.edge_index = torch.cat([torch.stack([source, h.expand(20)]) for h in hubs], 1)
    data.train_mask[:] = True
    del data.edge_attr, data.edge_weight, data.edge_type
    part = torch.zeros(30, dtype=torch.long)
    part[20:29], part[29] = 1, 2
    return data, part


# Exactness ###################################################################


@pytest.mark.parametrize("world", [5, 3])
def test_layers_equal_pyg(
    world: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between hosts; the five workers share their memory."""
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "1" if world == 5 else "0")
    partitions = Partitions(tmp_path_factory.mktemp("parts"))
    data, sweep = stars(), Sweep(world)
    torch.manual_seed(0)
    policies = POLICIES if world == 3 else POLICIES[1::3]
    for name in LAYERS if world == 3 else some(list(LAYERS), f"{world}", 2):
        root = partitions(data, world, "random" if world != 3 else torch.arange(60) % 2 * 2)
        sweep.add(name, Job(LAYERS[name]().double(), root, (), policies), data)
    sweep.check()


def _two_types(root: Path, layer: torch.nn.Module) -> tuple[Any, ...]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy())
    x = {name: data[name].x.requires_grad_() for name in ("a", "b")}
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        out = layer((x["a"], x["b"]), data["a", "to", "b"].edge_index)
        (out * probe(torch.arange(7), out)).sum(-1).mean().backward()
    weights = [p.grad for p in layer.parameters()]
    gradients = {name: tensor.grad.full_tensor() for name, tensor in x.items()}
    return out.detach().full_tensor(), gradients, weights, ledger.received_bytes(kind="state")


def test_targets_of_another_type(tmp_path: Path) -> None:
    data = HeteroData()
    for name, count in (("a", 40), ("b", 7)):
        data[name].x = torch.randn(count, CHANNELS, dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(7))
    data["a", "to", "b"].edge_index = pairs[torch.rand(280) < 0.5].T.contiguous()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    plain = gnn.GATConv((CHANNELS, CHANNELS), OUT, heads=HEADS, add_self_loops=False).double()
    each = workers(_two_types, 3, tmp_path / "parts", plain)
    assert sum(state for *_, state in each) > 0
    x = {name: data[name].x.requires_grad_() for name in ("a", "b")}
    out = plain((x["a"], x["b"]), data["a", "to", "b"].edge_index)
    (out * probe(torch.arange(7), out)).sum(-1).mean().backward()
    for found, gradients, weights, _ in each:
        assert error(found, out) < 1e-10
        for name, tensor in x.items():
            assert error(gradients[name], tensor.grad) < 1e-10
        for gradient, parameter in zip(weights, plain.parameters(), strict=True):
            assert error(gradient, parameter.grad) < 1e-10


def test_workers_without_kernels_push_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker has none; what it sends and expects is the same."""

    def without(jobs: Any) -> Any:
        if pyg_sar.comm.current().rank == 0:
            ops.why_missing = lambda: "not built here"
        return run_jobs(jobs)

    monkeypatch.setattr("oracle.run_jobs", without)
    data, sweep = stars(), Sweep(3)
    root = Partitions(tmp_path)(data, 3)
    for name in ("gat", "gatv2", "transformer"):
        sweep.add(name, Job(LAYERS[name]().double(), root, (), POLICIES[2:4]), data)
    sweep.check()


def test_targets_without_an_edge_of_their_own_worker(tmp_path: Path) -> None:
    data, part = fan_in()
    root = Partitions(tmp_path)(data, 4, part)  # the last part is empty
    sweep = Sweep(4)
    for name in ("gat", "gat, no loops", "gatv2", "transformer", "agnn"):
        sweep.add(name, Job(LAYERS[name]().double(), root, (), POLICIES[1:4]), data)
    sweep.check()


def _extreme(root: Path, layers: list[torch.nn.Module]) -> Any:
    data = pyg_sar.load_partition(root)
    return [one_pass(pyg_sar.distribute(copy.deepcopy(layer)), data) for layer in layers]


def test_scores_of_ten_thousand(root: Path) -> None:
    data = stars()
    layers: list[torch.nn.Module] = []
    for sign in (1, -1):
        plain = plain_gat().double()
        with torch.no_grad():
            plain.att_src *= 1e4
            plain.att_dst *= sign * 1e5
        layers.append(plain)
    found = workers(_extreme, 3, root, layers)
    for layer, *each in zip(layers, *found, strict=True):
        expected = single_process(layer, data)
        assert expected.out.isfinite().all()
        # Exponents of numbers like these have a relative error of 1e4 eps.
        assert max(errors(each, expected).values()) < 1e-8


BAD = (torch.nan, torch.inf, -torch.inf)


def _finite(root: Path, layers: list[torch.nn.Module]) -> list[Tensor]:
    data, found = pyg_sar.load_partition(root), []
    models = [pyg_sar.distribute(copy.deepcopy(layer)) for layer in layers]
    for bad in BAD:
        x = data.x.clone()
        x[[3, 20], [1, 2]] = bad
        found += [model(x, data.edge_index).isfinite().full_tensor() for model in models]
    return found


def test_nan_and_inf_spread_as_in_pyg(root: Path) -> None:
    """Of a target of all, whose query goes to the others, and of another node."""
    data, expected = stars(), []
    layers = [LAYERS[name]().double() for name in ("gat, no loops", "gatv2", "transformer")]
    for bad in BAD:
        x = data.x.clone()
        x[[3, 20], [1, 2]] = bad
        expected += [layer(x, data.edge_index).isfinite() for layer in layers]
    assert all(finite.any() and not finite.all() for finite in expected)
    for found in workers(_finite, 3, root, layers):
        assert all(map(torch.equal, found, expected))


def test_states_merge_exactly() -> None:
    draw = torch.Generator().manual_seed(0)

    def state(rows: int, level: float) -> AttentionState:
        acc = torch.randn(rows, 2, 3, generator=draw, dtype=torch.float64)
        maximum = torch.randn(rows, 2, generator=draw, dtype=torch.float64) + level
        return AttentionState(acc, maximum, torch.rand(rows, 2, generator=draw).double() + 1)

    for level in (0.0, 700.0, -700.0):
        into, other, rows = state(5, 0.0), state(3, level), torch.tensor([4, 0, 2])
        into.acc[4], into.maximum[4], into.normaliser[4] = 0, -torch.inf, 0  # no edge yet
        out = [into.acc.clone(), into.normaliser.clone()]
        before = into.maximum.clone()
        into.merge_(rows, other)
        highest = torch.maximum(before[rows], other.maximum)
        for total, first, second in zip(
            (into.acc, into.normaliser), out, (other.acc, other.normaliser), strict=True
        ):
            old = (before[rows] - highest).exp().view(3, 2, *[1] * (first.dim() - 2))
            new = (other.maximum - highest).exp().view_as(old)
            assert torch.allclose(total[rows], first[rows] * old + second * new, rtol=1e-14)
            assert torch.equal(total[[1, 3]], first[[1, 3]])
        assert torch.equal(into.maximum[rows], highest)


# The same mask whichever way #################################################


def _masks(root: Path, policies: tuple[SARPolicy, ...]) -> list[list[Tensor]]:
    data = pyg_sar.load_partition(root)
    found = []
    for name, policy in itertools.product(DROPPING, policies):
        torch.manual_seed(0)
        layer = pyg_sar.distribute(LAYERS[name]().double(), policy)
        layer.dropout = 0.5
        x = data.x.clone().requires_grad_()
        torch.manual_seed(3)
        out = layer(x, data.edge_index)
        out.square().sum(-1).mean().backward()
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        found.append([out.detach().full_tensor(), x.grad.full_tensor(), *gradients])
    return found


def test_pulled_and_pushed_edges_drop_the_same(root: Path) -> None:
    policies = (SARPolicy(push="off"), *POLICIES[1:4])
    for found in workers(_masks, 3, root, policies):
        for start in range(0, len(found), len(policies)):
            first, *others = found[start : start + len(policies)]
            for other in others:
                for a, b in zip(first, other, strict=True):
                    assert torch.allclose(a, b, rtol=1e-11, atol=1e-13)


# When #########################################################################


def _all_traffic(root: Path, cases: list[Any]) -> list[dict[Any, int]]:
    return [_traffic(root, *case) for case in cases]


def _traffic(root: Path, make: Make, policy: SARPolicy, edge: tuple[str, ...]) -> dict[Any, int]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(make().double(), policy)
    x, kwargs = data.x.requires_grad_(), {name: data[name] for name in edge}
    layer(x, data.edge_index, **kwargs).sum().backward()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        layer(x, data.edge_index, **kwargs).square().sum().backward()
    assert ledger.received_bytes(kind="plan") == 0  # made once
    found = {
        (phase, kind): ledger.received_bytes(phase=phase, kind=kind)
        for phase in ("forward", "backward")
        for kind in HALO_KINDS
    }
    found["all"] = sum(found.values())
    found["resident"] = ledger.peak_resident_rows()
    found["left"] = ledger.resident_rows()
    return found


def _total(rows: Sequence[dict[Any, int]], key: Any) -> int:
    return sum(row[key] for row in rows)


def test_who_pushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = stars()
    data.edge_attr = torch.randn(data.num_edges, EDGE_DIM, dtype=torch.float64)
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    root = tmp_path / "parts"
    auto, off, state = SARPolicy(), SARPolicy(push="off"), ("forward", "state")
    pushing = (plain_gat, LAYERS["gatv2"], LAYERS["transformer"], LAYERS["agnn"])
    cases = [(make, policy, ()) for make in pushing for policy in (auto, off)]
    others = (off, SARPolicy(kernels="off"), SARPolicy(wire="bfloat16"))
    cases += [(plain_gat, policy, ()) for policy in others]
    cases.append((lambda: plain_gat(edge_dim=EDGE_DIM), auto, ("edge_attr",)))
    found = [*zip(*workers(_all_traffic, 3, root, cases), strict=True)]
    for pushed, pulled in zip(found[:8:2], found[1:8:2], strict=True):
        assert _total(pushed, state) > 0
        assert _total(pushed, "all") < 0.95 * _total(pulled, "all")
        assert _total(pushed, "left") == 0
    assert all(_total(found_of, state) == 0 for found_of in found[8:])
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "auto")
    assert _total(workers(_traffic, 3, root, plain_gat, auto, ()), state) == 0


@pytest.mark.parametrize("pairs, saves", [(39, False), (20, True)])
def test_a_cover_that_saves_little_is_not_taken(pairs: int, saves: bool, tmp_path: Path) -> None:
    """Pairs that can only be pulled, and one target with four sources: 2 instead of 4 rows."""
    data = Data(x=torch.randn(100, CHANNELS, dtype=torch.float64), num_nodes=100)
    source, target = torch.arange(pairs + 4), torch.arange(pairs + 4).clamp(max=pairs) + 50
    data.edge_index = torch.stack([source, target])
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", torch.arange(100) // 50)
    found = workers(_traffic, 2, tmp_path / "parts", LAYERS["gatv2"], SARPolicy(mode=2), ())
    assert (_total(found, ("forward", "state")) > 0) == saves
    rows = pairs if saves else pairs + 4
    assert _total(found, ("forward", "fetch")) == rows * HEADS * OUT * 8


# The law of bytes ############################################################


def _terms(kind: str) -> Attention:
    """An attention of the shapes that the layers below have."""
    row = torch.zeros(1, HEADS, OUT, dtype=torch.float64)
    narrow = row[..., 0]
    if kind == "gat":
        return Attention(kind="additive", value=row, key=narrow, query=narrow)
    if kind == "gatv2":
        return Attention(kind="gatv2", value=row, query=row, att=row[0])
    return Attention(kind="dot", value=row, key=row, query=row)


def _costs(kind: str, mode: int) -> list[tuple[int, int]]:
    """What a pulled and a pushed row cost in each pass; mode 2 has one cover for both."""
    (pull, push), (again, known) = row_bytes(_terms(kind), mode)
    both = pull + again, push + known
    return [(pull, push), (again, known)] if mode == 1 else [both, both]


def _law(
    root: Path, kind: str, mode: int
) -> tuple[dict[Any, int], dict[Any, int], list[tuple[int, int]]]:
    """What the ledger says, what the law says, and rows of the two plans of each pass."""
    make = plain_gat if kind == "gat" else LAYERS[kind]
    found = _traffic(root, make, SARPolicy(mode=mode, prefetch=0), ())
    terms = _terms(kind)
    edge_index = pyg_sar.load_partition(root).edge_index.to_local()
    there, back = _costs(kind, mode)
    ways = []
    for costs in (there, back):
        by_source = kind == "gat" and mode == 1 and costs is back
        costs = nearest_costs(*costs)
        edges = split_edges(edge_index, costs, costs, by_source=by_source)
        assert edges is not None
        ways.append(edges)
    (pulled, _, served, slots), (again, returned, asked, known) = (
        (e.plan.num_halo, sum(e.plan.send_counts), e.slots.num_halo, sum(e.slots.send_counts))
        for e in ways
    )
    row, query = HEADS * OUT, terms.query[0].numel()
    source = row + (0 if terms.key is None else terms.key[0].numel())
    law = {
        ("forward", "fetch"): pulled * source,
        ("forward", "query"): served * query,
        ("forward", "state"): slots * (row + 2 * HEADS),
        ("backward", "refetch"): again * source * (mode == 1),
        ("backward", "query"): asked * (row + 3 * HEADS + query * (mode == 1)),
        ("backward", "gradient"): returned * source + known * query,
    }
    if mode == 1:
        plans = [plan for e in ways for plan in (e.plan, e.slots)]
        assert found["resident"] == max(max(plan.halo_counts) for plan in plans)
    del found["resident"]
    law = {key: 8 * n for key, n in law.items()}
    return found, law, [(pulled, slots), (again, known)]


KINDS_AND_MODES = list(itertools.product(DROPPING, (1, 2)))


def _laws(root: Path) -> list[Any]:
    return [_law(root, kind, mode) for kind, mode in KINDS_AND_MODES]


def test_bytes_by_the_law(tmp_path: Path) -> None:
    data, world = stars(), 3
    assignment = torch.randint(world, (60,), generator=torch.Generator().manual_seed(1))
    pyg_sar.write_partitions(data, world, tmp_path / "parts", assignment)
    by_case = zip(*workers(_laws, world, tmp_path / "parts"), strict=True)
    for (kind, mode), each in zip(KINDS_AND_MODES, by_case, strict=True):
        for found, law, _ in each:
            assert {key: n for key, n in found.items() if n and key != "all"} == {
                key: n for key, n in law.items() if n
            }, (kind, mode)
        total = _total([found for found, *_ in each], "all")
        passes = row_bytes(_terms(kind), mode)
        assert total == sum(
            pull * pulled + push * slots
            for *_, rows in each
            for (pull, push), (pulled, slots) in zip(passes, rows, strict=True)
        ), (kind, mode)
        costs = _costs(kind, mode)[: 1 if mode == 2 else 2]
        bound = sum(_bound(data, assignment, world, pull, push) for pull, push in costs)
        assert bound <= total <= 1.05 * bound, (kind, mode)


def _bound(data: Data, assignment: Tensor, world: int, pull: int, push: int) -> int:
    """The cheapest covers of the whole graph's cuts, by what the tests say and not the plan."""
    total = 0
    owner_j, owner_i = assignment[data.edge_index]
    for q, p in itertools.permutations(range(world), 2):
        j, i = data.edge_index[:, (owner_j == q) & (owner_i == p)]
        total += minimum_cover(j, i, data.num_nodes, data.num_nodes, pull, push).bound
    return total


def test_costs_by_hand() -> None:
    heads, channels, size = HEADS, OUT, 8
    row = heads * channels
    rows = {  # pulled, there forward, back forward, there backward, back backward
        "gat": (row + heads, heads, row + 2 * heads, row + 4 * heads, heads),
        "gatv2": (row, row, row + 2 * heads, 2 * row + 3 * heads, row),
        "transformer": (2 * row, row, row + 2 * heads, 2 * row + 3 * heads, row),
    }
    for kind, (pull, *push) in rows.items():
        there, back = sum(push[:2]) * size, sum(push[2:]) * size
        assert row_bytes(_terms(kind), 1) == ((pull * size, there), (2 * pull * size, back))
        kept = _terms(kind).query[0].numel() * size
        assert row_bytes(_terms(kind), 2) == ((pull * size, there), (pull * size, back - kept))


def test_near_costs_have_good_covers() -> None:
    draw = torch.Generator().manual_seed(0)
    j, i = (torch.randint(60, (200,), generator=draw).square() // 60 for _ in range(2))
    for pull, push in ((1, 2), (2, 3), (4, 5), (1, 1), (8, 7), (11, 8), (3, 2)):
        best = minimum_cover(j, i, 60, 60, pull, push).bound
        near = minimum_cover(j, i, 60, 60, *nearest_costs(pull, push)).cost(pull, push)
        assert best <= near <= 1.05 * best


# Passes #######################################################################


def _twice_each(root: Path) -> list[list[tuple[Tensor, Tensor]]]:
    return [_twice(root, mode) for mode in (1, 2)]


def _twice(root: Path, mode: int) -> list[tuple[Tensor, Tensor]]:
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    layer = pyg_sar.distribute(LAYERS["gatv2"]().double(), SARPolicy(mode=mode))
    with torch.inference_mode():
        before = layer(data.x, data.edge_index).clone()
    x = data.x.requires_grad_()
    outs = [layer(x, data.edge_index), layer(2 * x, data.edge_index)]  # the layer is shared
    assert torch.equal(outs[0], before)
    assert torch.equal(copy.deepcopy(layer)(x, data.edge_index), before)
    loss = sum(out.square().sum() for out in outs)
    found = []
    for keep in (True, False):
        x.grad = None
        layer.zero_grad()
        loss.backward(retain_graph=keep)
        found.append((x.grad.full_tensor(), layer.att.grad.clone()))
    return found


def test_several_backward_passes(root: Path) -> None:
    for found in workers(_twice_each, 3, root):
        for first, second in found:
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            assert all(a.abs().max() > 0 for a in first)


def _half(root: Path, policies: tuple[SARPolicy, ...]) -> list[list[Tensor]]:
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    exact = LAYERS["gat"]().double()
    found = []
    for dtype, policy in zip(
        (torch.float64, torch.bfloat16, torch.bfloat16), policies, strict=True
    ):
        layer = pyg_sar.distribute(LAYERS["gat"]().to(dtype), policy)
        layer.load_state_dict(exact.state_dict())
        x = data.x.to(dtype).clone().requires_grad_()
        out = layer(x, data.edge_index)
        out.float().square().sum().backward()
        assert out.dtype == x.grad.dtype == dtype
        found.append([out.detach().full_tensor().double(), x.grad.full_tensor().double()])
    return found


def test_half_precision_loses_no_more_than_pulling(root: Path) -> None:
    pushed = SARPolicy()
    policies = (pushed, SARPolicy(push="off"), pushed)
    found = workers(_half, 3, root, policies)[0]
    for exact, pulled, pushed in zip(*found, strict=True):
        assert (pushed - exact).norm() <= 2 * (pulled - exact).norm()
