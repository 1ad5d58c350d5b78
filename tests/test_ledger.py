"""The laws of traffic and residence (DESIGN, section 5), counted to the byte and to the row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from combinations import some
from oracle import CHANNELS, CLASSES, EDGE_DIM, OUT, Partitions, make_graph, node_losses, workers
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.engine.cuts import split_edges
from pyg_sar.exchange.cover import ALL_PUSHED
from pyg_sar.reduction.parameters import LIMBS

WORLD = 4
HEADS = 3
HALO_KINDS = ("fetch", "refetch", "gradient", "reduce")


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(50, 260)


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, WORLD, "random")


# name: (layer, values per halo row, case, edge attributes). Sums that a linear map narrows travel
# mapped.
LAWS: dict[str, tuple[Callable[[], MessagePassing], int, int, tuple[str, ...]]] = {
    "gcn": (lambda: gnn.GCNConv(CHANNELS, OUT), OUT, 1, ()),
    "gcn, weights": (lambda: gnn.GCNConv(CHANNELS, OUT), OUT, 1, ("edge_weight",)),
    "sage": (lambda: gnn.SAGEConv(CHANNELS, OUT), OUT, 1, ()),
    "sage, projected": (lambda: gnn.SAGEConv(CHANNELS, OUT, project=True), OUT, 1, ()),
    "sage, max": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"), CHANNELS, 2, ()),
    "graph conv": (lambda: gnn.GraphConv(CHANNELS, OUT), OUT, 1, ("edge_weight",)),
    "gin": (lambda: gnn.GINConv(Linear(CHANNELS, OUT)), OUT, 1, ()),
    "gine": (lambda: gnn.GINEConv(Linear(CHANNELS, OUT), edge_dim=EDGE_DIM), CHANNELS, 2,
             ("edge_attr",)),
    "gat": (lambda: gnn.GATConv(CHANNELS, OUT, heads=HEADS), HEADS * OUT + HEADS, 2, ()),
    "gat, edges": (lambda: gnn.GATConv(CHANNELS, OUT, heads=HEADS, edge_dim=EDGE_DIM),
                   HEADS * OUT + HEADS, 2, ("edge_attr",)),
    "gatv2": (lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=HEADS), HEADS * OUT, 2, ()),
    "transformer": (lambda: gnn.TransformerConv(CHANNELS, OUT, heads=HEADS), 2 * HEADS * OUT, 2,
                    ()),
    "edge conv": (lambda: gnn.EdgeConv(Linear(2 * CHANNELS, OUT)), CHANNELS, 2, ()),
}  # fmt: skip


class One(torch.nn.Module):
    """A model of one named layer."""

    def __init__(self, layer: MessagePassing) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])

    def forward(self, *args: Any) -> Tensor:
        return self.layers[0](*args)


class Picky(MessagePassing):
    """Sends one of three tensors."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, y=x[:, :2], z=x.sin())

    def message(self, y_j: Tensor, z_i: Tensor) -> Tensor:
        return y_j + z_i[:, :2]


class Same(MessagePassing):
    """Passes one tensor twice."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, y=x)

    def message(self, x_j: Tensor, y_j: Tensor) -> Tensor:
        return x_j * 2 + y_j


def pulled(mode: int = 2) -> SARPolicy:
    """Without pushing: what that saves, test_pushed counts."""
    return SARPolicy(mode=mode, push="off")


ONE_CHUNK = SARPolicy(mode=1, strategy="chunked", message_budget=2**30)
DTYPES = (torch.float32, torch.bfloat16)
LAW_CASES = [(name, mode) for name in LAWS for mode in some((1, 2, 3), name, 3)]
NAMES = ("sage", "gat", "transformer")
# case: (layer, policy, edge attributes, dtype)
CASES: dict[Any, tuple[Callable[[], MessagePassing], SARPolicy, tuple[str, ...], torch.dtype]] = {
    **{(n, mode): (LAWS[n][0], pulled(mode), LAWS[n][3], torch.float64) for n, mode in LAW_CASES},
    **{(name, dtype): (LAWS[name][0], pulled(), (), dtype) for name in NAMES for dtype in DTYPES},
    **{(name, "chunk"): (LAWS[name][0], ONE_CHUNK, (), torch.float64) for name in NAMES},
    "one of three": (Picky, SARPolicy(), (), torch.float64),
    "one in two roles": (Same, SARPolicy(), (), torch.float64),
    "sent": (LAWS["transformer"][0], SARPolicy(), (), torch.float64),
    "gat": (LAWS["gat"][0], SARPolicy(), (), torch.float64),
}


def traffic(root: Path, cases: Sequence[Any]) -> dict[Any, Any]:
    """Of each case the second epoch's bytes by (phase, kind, peer), and the plan's numbers."""
    return {case: traffic_of(root, *CASES[case]) for case in cases}


def traffic_of(
    root: Path,
    make: Callable[[], MessagePassing],
    policy: SARPolicy,
    edge: tuple[str, ...],
    dtype: torch.dtype,
) -> Any:
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(One(make().to(dtype)), policy)
    tensors = [data[name].to(dtype) for name in edge]

    def epoch() -> None:
        x = data.x.to(dtype).requires_grad_()
        node_losses(model(x, data.edge_index, *tensors)).mean().backward()

    epoch()  # edges are normalised and analysed once
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        epoch()
    sent, received = {}, {}
    for key in product(("forward", "backward"), HALO_KINDS, range(WORLD)):
        where = {"layer": "layers.0", **dict(zip(("phase", "kind", "peer"), key, strict=True))}
        sent[key], received[key] = ledger.sent_bytes(**where), ledger.received_bytes(**where)
    plan = data.edge_index.to_local().plan
    sends = [plan.send_rows(peer).numel() for peer in range(WORLD)]
    shapes = [p.shape for p in model.parameters()]
    return sent, received, plan.halo_counts, sends, ledger.summary(), shapes


@pytest.fixture(scope="module")
def measured(root: Path) -> Callable[[Any], list[Any]]:
    """What the workers measured of a case; all cases take one launch."""
    chosen = [case for case in CASES if case != "gat"]
    find = cache(lambda: workers(traffic, WORLD, root, chosen))
    return lambda case: [found[case] for found in find()]


def total(numbers: dict[Any, int], kind: str) -> int:
    """The bytes of a kind of transfer."""
    return sum(n for (_, k, _), n in numbers.items() if k == kind)


def expected_rows(policy: SARPolicy, case: int) -> dict[tuple[str, str], tuple[bool, bool]]:
    """Which transfers there are, as (rows of my halo come in, go out)."""
    rows = {("forward", "fetch"): (True, False), ("backward", "gradient"): (False, True)}
    if policy.mode == 1 and case == 2:
        rows["backward", "refetch"] = (True, False)
    return rows


@pytest.mark.parametrize(("name", "mode"), LAW_CASES)
def test_bytes_equal_the_law(name: str, mode: int, measured: Callable[[Any], list[Any]]):
    """Per phase, kind and peer: ``H_p F b`` in, ``H_p F b`` gradients out, a refetch in case 2.

    Per peer q: halo rows owned by q come in and their gradients go out; what the peer needs of
    mine goes out and its gradients come in.
    """
    _, width, case, _ = LAWS[name]
    size = width * 8
    for rank, (sent, received, halo, needed, summary, shapes) in enumerate(measured((name, mode))):
        assert sum(halo) > 0
        rows = expected_rows(pulled(mode), case)
        for phase, kind, peer in sent:
            halo_in, _ = rows.get((phase, kind), (False, False))
            gradient = (phase, kind) in rows and not halo_in
            incoming = halo[peer] if halo_in else needed[peer] if gradient else 0
            outgoing = needed[peer] if halo_in else halo[peer] if gradient else 0
            where = (name, rank, phase, kind, peer)
            assert received[phase, kind, peer] == incoming * size, where
            assert sent[phase, kind, peer] == outgoing * size, where
        # Lists that are found by their content: in one shot workers ask whether some are without
        # edges, and what loops with features are joined to is a new list in each pass.
        check_the_rest(summary, shapes, "layers.0", 2 * (mode == 3) + (name == "gat, edges"))


def check_the_rest(
    summary: dict[str, Any], shapes: list[torch.Size], layer: str, questions: int
) -> None:
    """Nothing else but O(1), and the sum of the parameters' gradients with their checksums.

    A question is 32 bytes each way, the loss 8.
    """
    others = {name: row for name, row in summary["layers"].items() if name != layer}
    assert set(others) == {""}
    gradients = sum(shape.numel() for shape in shapes) + len(shapes) + LIMBS * WORLD
    assert others[""]["backward gradient sum in"] == gradients * 8
    rest = sum(n for key, n in others[""].items() if "gradient sum" not in key)
    assert rest <= 2 * (8 + 32 * questions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_follow_the_dtype(dtype: torch.dtype, measured: Callable[[Any], list[Any]]):
    for name in NAMES:
        size = LAWS[name][1] * dtype.itemsize
        for _, received, halo, needed, *_ in measured((name, dtype)):
            assert total(received, "fetch") == sum(halo) * size
            assert total(received, "gradient") == sum(needed) * size


@pytest.mark.parametrize("name", NAMES)
def test_one_chunk_ships_what_shards_ship(name: str, measured: Callable[[Any], list[Any]]):
    """With a budget for all edges a row travels once: ``H_p F b``, and again in case 2."""
    size = LAWS[name][1] * 8
    for _, received, halo, needed, *_ in measured((name, "chunk")):
        assert total(received, "fetch") == sum(halo) * size
        assert total(received, "gradient") == sum(needed) * size


@pytest.mark.parametrize("case, width", [("one of three", 2), ("one in two roles", CHANNELS)])
def test_what_messages_read_travels_once(
    case: str, width: int, measured: Callable[[Any], list[Any]]
):
    """What they don't read stays, and a tensor in two roles, as GATv2's ``x_j``, travels once."""
    for _, received, halo, *_ in measured(case):
        assert sum(received.values()) - total(received, "gradient") == sum(halo) * width * 8


def test_what_is_sent_is_received(measured: Callable[[Any], list[Any]]):
    found = measured("sent")
    for p, (sent, *_) in enumerate(found):
        for (phase, kind, q), number in sent.items():
            assert number == found[q][1][phase, kind, p]


def test_exchanges_are_pairwise(root: Path, monkeypatch: pytest.MonkeyPatch):
    """W - 1 exchanges per layer and direction: no padded all-to-all, no barrier, per round."""
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")

    def worker() -> list[Counter[Any]]:
        return [counted(kind, push) for kind in ("sage", "gat") for push in ("off", "auto")]

    def counted(kind: str, push: Literal["auto", "off"]) -> Counter[Any]:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        make = LAWS[kind][0]
        model = pyg_sar.distribute(One(make().double()), SARPolicy(push=push))
        x = data.x.clone().requires_grad_()
        model(x, data.edge_index).sum().backward()
        calls: Counter[Any] = Counter()
        exchange, exchange_all = comm.exchange, comm.exchange_all

        def one(*args: Any, label: Any) -> Any:
            calls[label[1:]] += 1
            return exchange(*args, label=label)

        def everyone(*args: Any, label: Any) -> Any:
            calls["all"] += 1
            return exchange_all(*args, label=label)

        comm.exchange, comm.exchange_all = one, everyone  # type: ignore[method-assign]
        comm.barrier = lambda: calls.update(["barrier"])  # type: ignore[method-assign]
        model(x, data.edge_index).sum().backward()
        del comm.exchange, comm.exchange_all, comm.barrier
        return calls

    forth, back = ("forward", "fetch"), ("backward", "gradient")
    again, there = ("backward", "refetch"), ("forward", "query")
    for sage, calls, gat, pushed in workers(worker, WORLD):
        assert sage == dict.fromkeys((forth, back), WORLD - 1)
        # Pulled rows, and pushed sums or gradients; neither of some pairs.
        assert WORLD - 1 <= calls.pop(forth) <= 2 * (WORLD - 1)
        assert WORLD - 1 <= calls.pop(back) <= 2 * (WORLD - 1)
        assert not calls
        assert gat == dict.fromkeys((forth, back, again), WORLD - 1)
        # Some pairs push nothing, and small ones share a unit. Gradients are those of source rows,
        # and those of queries.
        assert 0 < pushed.pop(back) <= 2 * (WORLD - 1)
        del pushed["all"]
        assert set(pushed) == {forth, again, there, ("forward", "state"), ("backward", "query")}
        assert max(pushed.values()) <= WORLD - 1


def test_workers_without_a_halo_send_nothing(partitions: Partitions):
    data = make_graph(40, 200, seed=2)
    part = torch.arange(40) // 10
    source, target = part[data.edge_index]
    data = data.edge_subgraph((source == target) | ((source < 2) & (target < 2)))
    data.num_nodes = 40
    root = partitions(data, WORLD, part)
    for rank, found in enumerate(workers(traffic, WORLD, root, ["gat"])):
        sent, received, halo, *_ = found["gat"]
        apart = rank >= 2
        assert (sum(halo) == 0) == apart
        assert (sum(sent.values()) == 0) == apart and (sum(received.values()) == 0) == apart


# Resident rows ###############################################################


class Deep(torch.nn.Module):
    """Layers of all kinds, batch norms, and dropout outside of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [
                gnn.GCNConv(CHANNELS, 8),
                gnn.GATConv(8, 4, heads=2, edge_dim=EDGE_DIM),
                gnn.TransformerConv(8, 4, heads=2),
                gnn.SAGEConv(8, 8, aggr="max"),
                gnn.GINConv(Linear(8, CLASSES)),
            ]
        )
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(8) for _ in range(4)])

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor, attr: Tensor) -> Tensor:
        extra = [(weight,), (attr,), (), (), ()]
        for k, conv in enumerate(self.convs):
            x = conv(x, edge_index, *extra[k])
            if k < 4:
                x = F.dropout(self.norms[k](x).relu(), 0.2, self.training)
        return x


def epoch(model: torch.nn.Module, data: Data, optimizer: torch.optim.Optimizer | None) -> None:
    """A step of training and an evaluation, as a training script does."""
    model.train()
    arguments = (data.x, data.edge_index, data.edge_weight, data.edge_attr)
    out = model(*arguments)[data.train_mask]
    F.cross_entropy(out, data.y[data.train_mask]).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        float((model(*arguments).argmax(-1) == data.y).double().mean())


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("budget", [None, 3000])
def test_resident_rows_in_mode_1(prefetch: int, budget: int | None, root: Path):
    """One shard without prefetch, ``1 + prefetch`` with: in each layer, and in the whole model.

    In the backward pass these may be targets of a peer's shard in place of its sources.
    """
    policy = SARPolicy(mode=1, prefetch=prefetch, message_budget=budget)

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(Deep().double(), policy)
        epoch(model, data, None)
        with pyg_sar.Ledger(comm) as ledger:
            epoch(model, data, None)
        layers = {k: ledger.peak_resident_rows(f"convs.{k}") for k in range(5)}
        edges = data.edge_index.to_local()
        slots = split_edges(edges, ALL_PUSHED, ALL_PUSHED, by_source=True).slots
        ways = [[way.num_rows[unit] for unit in range(1, WORLD)] for way in (edges.plan, slots)]
        rows = ledger.peak_resident_rows(), ledger.resident_rows()
        return layers, *rows, ways, edges.plan.num_halo

    for layers, peak, left, ways, halo in workers(worker, WORLD):
        windows = []
        for rows in ways:
            windows += [sum(rows[k : k + 1 + prefetch]) for k in range(len(rows))]
        assert left == 0
        for layer, rows in layers.items():
            assert 0 < rows <= max(windows), (layer, rows, windows)
        assert peak <= max(windows)
        if prefetch == 0:
            assert peak < halo


@pytest.mark.parametrize("prefetch", [0, 1])
def test_resident_rows_of_chunks(prefetch: int, partitions: Partitions):
    """Chunked: the halo of one chunk, and of the prefetched one.

    A chunk has as many edges as the budget holds inputs for, or those of one target: it needs no
    more halo rows than that.
    """
    data = make_graph(80, 1500, seed=5)
    root = partitions(data, 2, "random")
    most = 20
    policy = SARPolicy(
        mode=1, prefetch=prefetch, message_budget=most * CHANNELS * 8, strategy="chunked"
    )

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        mine = pyg_sar.load_partition(root)
        layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT, aggr="median").double(), policy)
        x = mine.x.clone().requires_grad_()
        with pyg_sar.Ledger(comm) as ledger:
            layer(x, mine.edge_index).sum().backward()
        edges = mine.edge_index.to_local()
        degree = int(torch.bincount(edges[1]).max())
        return ledger.peak_resident_rows(), ledger.resident_rows(), degree, edges.plan.num_halo

    for peak, left, degree, halo in workers(worker, 2):
        bound = (1 + prefetch) * max(most, degree)
        assert left == 0 and 0 < peak <= bound < halo * (1 + prefetch) + most


# Once per structure ##########################################################

PREPROCESSING = (
    "sort", "argsort", "msort", "unique", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "bucketize", "searchsorted", "topk", "histc",
)  # fmt: skip


EVENTS = ("bucketing", "analysis", "halo_gather", "halo_reduce")


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "policy",
    [*(SARPolicy(mode=mode) for mode in (1, 2, 3)), SARPolicy(strategy="chunked")],
    ids=["mode 1", "mode 2", "mode 3", "chunked"],
)
def test_no_preprocessing_after_the_first_epoch(policy: SARPolicy, root: Path):
    """No bucketing, analysis, normalisation, sorting: counted over whole epochs."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(Deep().double(), policy)
        optimizer = torch.optim.Adam(model.parameters())
        with pyg_sar.Ledger(comm) as first, Operators() as before:
            epoch(model, data, optimizer)
        with pyg_sar.Ledger(comm) as later, Operators() as after:
            for _ in range(2):
                epoch(model, data, optimizer)
        events = [{name: ledger.events(name) for name in EVENTS} for ledger in (first, later)]
        return *events, before.names, after.names

    for first, later, before, after in workers(worker, WORLD):
        assert before["pow_"] == 1, "one normalisation per worker, by a power of the degrees"
        assert after["pow_"] == 0, "normalised again"
        if policy.mode != 3:
            assert first["bucketing"] >= 2
        if policy.mode != 3 and policy.strategy == "auto":
            # The edges as they are, with loops replaced (GAT), and those that GCN keeps.
            assert first["bucketing"] == 3
            assert first["analysis"] >= 5
            assert later["halo_gather"] == 0
        assert later["bucketing"] == later["analysis"] == 0
        assert later["halo_reduce"] == 0
        found = {name: after[name] for name in PREPROCESSING if after[name]}
        assert not found, found
        assert any(before[name] for name in ("bincount", "bucketize")) or policy.mode == 3
        assert after["threshold_backward"] > 0, "the backward pass is counted as well"


def test_layers_that_normalise_alike_share_it(root: Path):
    """Each layer held a copy of the edges, and from the 13th on made them anew in each pass."""

    def worker() -> tuple[int, int, int]:
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(gnn.GCN(CHANNELS, 4, 14).double())
        model.convs[7].improved = True
        with Operators() as first:
            model(data.x, data.edge_index)
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger, Operators() as later:
            model(data.x, data.edge_index)
        # What a layer keeps is the same on all workers: nobody asks.
        return first.names["pow_"], later.names["pow_"], ledger.received_bytes(kind="agreement")

    assert workers(worker, WORLD) == [(2, 0, 0)] * WORLD


LOOPS: dict[str, Callable[[], MessagePassing]] = {
    "GAT": lambda: gnn.GATConv(CHANNELS, OUT),
    "GATv2": lambda: gnn.GATv2Conv(CHANNELS, OUT),
    "AGNN": lambda: gnn.AGNNConv(),
    "Cluster": lambda: gnn.ClusterGCNConv(CHANNELS, OUT),
}


@pytest.mark.parametrize("name", LOOPS)
def test_edges_with_loops_are_the_same_on_all_workers(name: str, graph: Data, root: Path):
    """Nobody asks whether the others have made what hangs on them."""

    def worker() -> tuple[Tensor, int]:
        data = pyg_sar.load_partition(root)
        torch.manual_seed(0)
        layer = pyg_sar.distribute(LOOPS[name]().double())
        layer(data.x, data.edge_index)
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            out = layer(data.x, data.edge_index)
        return out.full_tensor(), ledger.received_bytes(kind="agreement")

    torch.manual_seed(0)
    expected = LOOPS[name]().double()(graph.x, graph.edge_index)
    for out, agreed in workers(worker, WORLD):
        assert torch.allclose(out, expected, rtol=1e-10, atol=1e-12)
        assert agreed == 0


def test_layers_that_normalise_in_another_way_share_nothing(root: Path):
    """EGConv, whose aggregators say whether it weights edges."""

    def worker() -> tuple[list[Tensor], list[Any]]:
        data, outs, states = pyg_sar.load_partition(root), [], []
        for layer in eg_layers():
            layer = pyg_sar.distribute(layer)
            outs.append(layer(data.x, data.edge_index).full_tensor())
            states.append(layer.state_dict())
        return outs, states

    def eg_layers() -> list[gnn.EGConv]:
        torch.manual_seed(0)
        kinds = (["mean"], ["symnorm"], ["symnorm", "mean"], ["mean"])
        return [gnn.EGConv(CHANNELS, 8, kind).double() for kind in kinds]

    whole = make_graph(50, 260)
    for outs, states in workers(worker, WORLD):
        for layer, out, state in zip(eg_layers(), outs, states, strict=True):
            layer.load_state_dict(state)
            expected = layer(whole.x, whole.edge_index)
            assert torch.allclose(out, expected, rtol=1e-10, atol=1e-12)


def test_changed_weights_are_normalised_again(root: Path):
    """What is kept hangs on the very weights: in-place changes and other tensors are noticed."""

    def worker() -> Any:
        data = pyg_sar.load_partition(root)
        layer = pyg_sar.distribute(gnn.GCNConv(CHANNELS, OUT).double())
        weight = data.edge_weight.clone()
        outs = [layer(data.x, data.edge_index, weight)]
        weight.mul_(2).add_(0.3)
        outs.append(layer(data.x, data.edge_index, weight))
        outs.append(layer(data.x, data.edge_index, weight.sqrt()))
        outs.append(layer(data.x, data.edge_index))
        return [out.full_tensor() for out in outs], layer.state_dict()

    whole = make_graph(50, 260)
    found = workers(worker, WORLD)
    plain = gnn.GCNConv(CHANNELS, OUT).double()
    plain.load_state_dict(found[0][1])
    changed = whole.edge_weight * 2 + 0.3
    for step, weight in enumerate((whole.edge_weight, changed, changed.sqrt(), None)):
        expected = plain(whole.x, whole.edge_index, weight)
        for outs, _ in found:
            assert torch.allclose(outs[step], expected, rtol=1e-10, atol=1e-12), step


# The ledger itself ###########################################################


def test_summary_and_selections(root: Path):
    def worker() -> None:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(Deep().double())
        with pyg_sar.Ledger(comm) as outer:
            epoch(model, data, None)
            with pyg_sar.Ledger(comm) as inner:
                epoch(model, data, None)
        assert comm.ledgers == []
        before = outer.sent, inner.sent
        epoch(model, data, None)
        assert (outer.sent, inner.sent) == before, "closed ledgers count no more"
        assert 0 < inner.sent < outer.sent
        summary = json.loads(json.dumps(inner.summary()))
        assert summary["rank"] == comm.rank
        assert summary["sent_bytes"] == inner.sent
        assert summary["received_bytes"] == inner.received
        rows = inner.by_layer().values()
        assert sum(n for row in rows for key, n in row.items() if key.endswith(" in")) == (
            inner.received
        )
        assert sum(row.get("out", 0) for row in inner.by_peer().values()) == inner.sent
        assert sum(inner.sent_bytes(peer=q) for q in range(-1, WORLD)) == inner.sent
        names = set(inner.by_layer())
        assert names == {"", *(f"convs.{k}" for k in range(5))}
        assert sum(inner.received_bytes(layer=name) for name in names) == inner.received
        assert inner.peak_memory >= 0 and inner.baseline_memory > 0
        assert inner.peak_resident_rows("convs.1") <= inner.peak_resident_rows()
        with pytest.raises(ValueError, match=r"Unknown selection \['owner'\]"):
            inner.sent_bytes(owner=1)

    workers(worker, WORLD)


def test_ledger_closes_on_errors():
    comm = pyg_sar.comm.current()
    with pytest.raises(KeyError), pyg_sar.Ledger(comm):
        raise KeyError
    assert comm.ledgers == []


def test_single_process_sends_nothing(graph: Data, partitions: Partitions):
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(partitions(graph, 1, "contiguous"))
    model = pyg_sar.distribute(Deep().double())
    with pyg_sar.Ledger(comm) as ledger:
        epoch(model, data, None)
    assert ledger.sent == ledger.received == ledger.peak_resident_rows() == 0
