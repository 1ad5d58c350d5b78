"""The laws of traffic and residence (DESIGN, section 5), counted to the byte and to the row."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from oracle import CHANNELS, CLASSES, EDGE_DIM, OUT, Partitions, make_graph, node_losses, threads
from torch import Tensor
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv import gcn_conv

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
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("ledger"))


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


def traffic(
    root: Path, model: torch.nn.Module, policy: SARPolicy, edge: tuple[str, ...], dtype: torch.dtype
) -> Any:
    """The second epoch's bytes by (phase, kind, peer), and the plan's numbers."""
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root, view="local")
    model = pyg_sar.distribute(copy.deepcopy(model), policy, view="local")
    tensors = [data[name].to(dtype) for name in edge]

    def epoch() -> None:
        x = data.x.to(dtype).requires_grad_()
        out = model(x, data.edge_index, *tensors)
        pyg_sar.mean(node_losses(out, data.n_id)).backward()

    epoch()  # edges are normalised and analysed once
    with pyg_sar.Ledger(comm) as ledger:
        epoch()
    phases = [
        (phase, kind, peer)
        for phase in ("forward", "backward")
        for kind in HALO_KINDS
        for peer in range(WORLD)
    ]
    sent, received = {}, {}
    for phase, kind, peer in phases:
        where = {"layer": "layers.0", "phase": phase, "kind": kind, "peer": peer}
        sent[phase, kind, peer] = ledger.sent_bytes(**where)
        received[phase, kind, peer] = ledger.received_bytes(**where)
    plan = data.edge_index.plan
    sends = [plan.send_rows(peer).numel() for peer in range(WORLD)]
    return sent, received, plan.halo_counts, sends, ledger.summary(), list(model.parameters())


PULLED = SARPolicy(mode=2, push="off")


def expected_rows(policy: SARPolicy, case: int) -> dict[tuple[str, str], tuple[bool, bool]]:
    """Which transfers there are, as (rows of my halo come in, go out)."""
    rows = {("forward", "fetch"): (True, False), ("backward", "gradient"): (False, True)}
    if policy.mode == 1 and case == 2:
        rows["backward", "refetch"] = (True, False)
    return rows


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("name", LAWS)
def test_bytes_equal_the_law(name: str, mode: int, root: Path):
    """Per phase, kind and peer: ``H_p F b`` in, ``H_p F b`` gradients out, a refetch in case 2.

    Per peer q: halo rows owned by q come in and their gradients go out; what the peer needs of
    mine goes out and its gradients come in.
    """
    make, width, case, edge = LAWS[name]
    model = One(make().double())
    policy = SARPolicy(mode=mode, push="off")  # what pushing saves, test_pushed counts
    size = width * 8
    for rank, found in enumerate(threads(traffic, WORLD, root, model, policy, edge, torch.float64)):
        sent, received, halo, needed, summary, parameters = found
        assert sum(halo) > 0
        rows = expected_rows(policy, case)
        for phase, kind, peer in sent:
            halo_in, _ = rows.get((phase, kind), (False, False))
            gradient = (phase, kind) in rows and not halo_in
            incoming = halo[peer] if halo_in else needed[peer] if gradient else 0
            outgoing = needed[peer] if halo_in else halo[peer] if gradient else 0
            where = (name, rank, phase, kind, peer)
            assert received[phase, kind, peer] == incoming * size, where
            assert sent[phase, kind, peer] == outgoing * size, where
        check_the_rest(summary, parameters, "layers.0")


def check_the_rest(summary: dict[str, Any], parameters: list[Tensor], layer: str) -> None:
    """Nothing else but O(1), and the sum of the parameters' gradients with their checksums."""
    others = {name: row for name, row in summary["layers"].items() if name != layer}
    assert set(others) == {""}
    gradients = sum(p.numel() for p in parameters) + len(parameters) + LIMBS * WORLD
    assert others[""]["backward gradient sum in"] == gradients * 8
    rest = sum(n for key, n in others[""].items() if "gradient sum" not in key)
    assert rest <= 96


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_follow_the_dtype(dtype: torch.dtype, root: Path):
    for name in ("sage", "gat", "transformer"):
        make, width, _, edge = LAWS[name]
        model = One(make().to(dtype))
        for found in threads(traffic, WORLD, root, model, PULLED, edge, dtype):
            _, received, halo, needed, *_ = found
            assert sum(n for (p, k, _), n in received.items() if k == "fetch") == (
                sum(halo) * width * dtype.itemsize
            )
            assert sum(n for (p, k, _), n in received.items() if k == "gradient") == (
                sum(needed) * width * dtype.itemsize
            )


def test_raw_features_send_no_gradients(root: Path):
    """The first layer: ``H_p F b`` in, and nothing in the backward pass."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        model = pyg_sar.distribute(One(gnn.SAGEConv(CHANNELS, OUT).double()), PULLED, view="local")
        with pyg_sar.Ledger(comm) as ledger:
            model(data.x, data.edge_index).sum().backward()
        kinds = {k: ledger.received_bytes(layer="layers.0", kind=k) for k in HALO_KINDS}
        return kinds, data.edge_index.plan.num_halo * CHANNELS * 8

    for kinds, law in threads(worker, WORLD):
        assert kinds == {"fetch": law, "refetch": 0, "gradient": 0, "reduce": 0}


def test_unused_tensors_are_not_shipped(root: Path):
    """Only what the message reads of the sources travels (``y_j`` here, not ``x`` or ``z_i``)."""

    class Picky(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, y=x[:, :2], z=x.sin())

        def message(self, y_j: Tensor, z_i: Tensor) -> Tensor:
            return y_j + z_i[:, :2]

    model = One(Picky().double())
    for found in threads(traffic, WORLD, root, model, SARPolicy(), (), torch.float64):
        _, received, halo, *_ = found
        assert (
            sum(received.values())
            - sum(n for (_, kind, _), n in received.items() if kind == "gradient")
            == sum(halo) * 2 * 8
        )


def test_a_tensor_in_two_roles_travels_once(root: Path):
    """GATv2 reads ``x_j`` in edge_update and in message; a layer may pass one tensor twice."""

    class Same(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, y=x)

        def message(self, x_j: Tensor, y_j: Tensor) -> Tensor:
            return x_j * 2 + y_j

    model = One(Same().double())
    for found in threads(traffic, WORLD, root, model, SARPolicy(), (), torch.float64):
        _, received, halo, *_ = found
        fetched = sum(n for (_, kind, _), n in received.items() if kind == "fetch")
        assert fetched == sum(halo) * CHANNELS * 8


def test_exchanges_are_pairwise(root: Path, monkeypatch: pytest.MonkeyPatch):
    """W - 1 exchanges per layer and direction: no padded all-to-all, no barrier, per round."""
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")

    def worker(kind: str, push: Literal["auto", "off"]) -> Counter[Any]:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        make = LAWS[kind][0]
        model = pyg_sar.distribute(One(make().double()), SARPolicy(push=push), view="local")
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
        return calls

    forth, back = ("forward", "fetch"), ("backward", "gradient")
    again, there = ("backward", "refetch"), ("forward", "query")
    for calls in threads(worker, WORLD, "sage", "off"):
        assert calls == dict.fromkeys((forth, back), WORLD - 1)
    for calls in threads(worker, WORLD, "sage", "auto"):
        # Pulled rows, and pushed sums or gradients; neither of some pairs.
        assert WORLD - 1 <= calls.pop(forth) <= 2 * (WORLD - 1)
        assert WORLD - 1 <= calls.pop(back) <= 2 * (WORLD - 1)
        assert not calls
    for calls in threads(worker, WORLD, "gat", "off"):
        assert calls == dict.fromkeys((forth, back, again), WORLD - 1)
    for calls in threads(worker, WORLD, "gat", "auto"):
        # Some pairs push nothing, and small ones share a unit. Gradients are those of source rows,
        # and those of queries.
        assert 0 < calls.pop(back) <= 2 * (WORLD - 1)
        del calls["all"]
        assert set(calls) == {forth, again, there, ("forward", "state"), ("backward", "query")}
        assert max(calls.values()) <= WORLD - 1


def test_workers_without_a_halo_send_nothing(partitions: Partitions):
    data = make_graph(40, 200, seed=2)
    part = torch.arange(40) // 10
    source, target = part[data.edge_index]
    data = data.edge_subgraph((source == target) | ((source < 2) & (target < 2)))
    data.num_nodes = 40
    root = partitions(data, WORLD, part)
    model = One(LAWS["gat"][0]().double())
    found = threads(traffic, WORLD, root, model, SARPolicy(), (), torch.float64)
    for rank, (sent, received, halo, *_) in enumerate(found):
        apart = rank >= 2
        assert (sum(halo) == 0) == apart
        assert (sum(sent.values()) == 0) == apart and (sum(received.values()) == 0) == apart


def test_what_is_sent_is_received(root: Path):
    model = One(LAWS["transformer"][0]().double())
    found = threads(traffic, WORLD, root, model, SARPolicy(), (), torch.float64)
    for p, (sent, *_) in enumerate(found):
        for (phase, kind, q), number in sent.items():
            assert number == found[q][1][phase, kind, p]


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
    loss = pyg_sar.mean(F.cross_entropy(out, data.y[data.train_mask], reduction="none"))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        pyg_sar.accuracy(model(*arguments), data.y)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("budget", [None, 3000])
def test_resident_rows_in_mode_1(prefetch: int, budget: int | None, root: Path):
    """One shard without prefetch, ``1 + prefetch`` with: in each layer, and in the whole model.

    In the backward pass these may be targets of a peer's shard in place of its sources.
    """
    policy = SARPolicy(mode=1, prefetch=prefetch, message_budget=budget)

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        model = pyg_sar.distribute(Deep().double(), policy, view="local")
        epoch(model, data, None)
        with pyg_sar.Ledger(comm) as ledger:
            epoch(model, data, None)
        layers = {k: ledger.peak_resident_rows(f"convs.{k}") for k in range(5)}
        edges = split_edges(data.edge_index, ALL_PUSHED, ALL_PUSHED, by_source=True)
        plans = data.edge_index.plan, edges.slots
        return layers, ledger.peak_resident_rows(), ledger.resident_rows(), plans

    for layers, peak, left, (plan, slots) in threads(worker, WORLD):
        windows = []
        for way in (plan, slots):
            rows = [way.num_rows[unit] for unit in range(1, WORLD)]
            windows += [sum(rows[k : k + 1 + prefetch]) for k in range(len(rows))]
        assert left == 0
        for layer, rows in layers.items():
            assert 0 < rows <= max(windows), (layer, rows, windows)
        assert peak <= max(windows)
        if prefetch == 0:
            assert peak < plan.num_halo


def test_resident_rows_of_the_other_modes(root: Path):
    """Mode 3 holds the whole halo of every layer at once: that is what mode 1 is measured by."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        model = pyg_sar.distribute(Deep().double(), SARPolicy(mode=3), view="local")
        epoch(model, data, None)
        with pyg_sar.Ledger(comm) as ledger:
            epoch(model, data, None)
        return ledger.peak_resident_rows("convs.2"), data.edge_index.plan.num_halo

    for rows, halo in threads(worker, WORLD):
        assert rows >= halo


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
        mine = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(
            gnn.SAGEConv(CHANNELS, OUT, aggr="median").double(), policy, view="local"
        )
        x = mine.x.clone().requires_grad_()
        with pyg_sar.Ledger(comm) as ledger:
            layer(x, mine.edge_index).sum().backward()
        target = mine.edge_index[1]
        degree = int(torch.bincount(target).max())
        return ledger.peak_resident_rows(), ledger.resident_rows(), degree, mine.edge_index.plan

    for peak, left, degree, plan in threads(worker, 2):
        bound = (1 + prefetch) * max(most, degree)
        assert left == 0 and 0 < peak <= bound < plan.num_halo * (1 + prefetch) + most


@pytest.mark.parametrize("name", ["sage", "gat", "transformer"])
def test_one_chunk_ships_what_shards_ship(name: str, root: Path):
    """With a budget for all edges a row travels once: ``H_p F b``, and again in case 2."""
    make, width, _, edge = LAWS[name]
    policy = SARPolicy(mode=1, strategy="chunked", message_budget=2**30)
    model = One(make().double())
    for _, received, halo, needed, *_ in threads(
        traffic, WORLD, root, model, policy, edge, torch.float64
    ):
        for kind, rows in (("fetch", halo), ("gradient", needed)):
            found = sum(n for (_, k, _), n in received.items() if k == kind)
            assert found == sum(rows) * width * 8, kind


# Once per structure ##########################################################

PREPROCESSING = (
    "sort", "argsort", "msort", "unique", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "bucketize", "searchsorted", "topk", "histc",
)  # fmt: skip


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
def test_no_preprocessing_after_the_first_epoch(
    policy: SARPolicy, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """No bucketing, analysis, normalisation, sorting: counted over whole epochs."""
    norms: list[int] = []
    original = gcn_conv.gcn_norm

    def counted(*args: Any, **kwargs: Any) -> Any:
        norms.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(gcn_conv, "gcn_norm", counted)

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        model = pyg_sar.distribute(Deep().double(), policy, view="local")
        optimizer = torch.optim.Adam(model.parameters())
        with pyg_sar.Ledger(comm) as first, Operators() as before:
            epoch(model, data, optimizer)
        comm.barrier()
        made = len(norms)
        comm.barrier()
        with pyg_sar.Ledger(comm) as later, Operators() as after:
            for _ in range(2):
                epoch(model, data, optimizer)
        return first, later, before.names, after.names, made

    workers = threads(worker, WORLD)
    for first, later, before, after, made in workers:
        assert made == WORLD, "one normalisation per worker"
        assert len(norms) == made, "normalised again"
        if policy.mode != 3:
            assert first.events("bucketing") >= 2
        if policy.mode != 3 and policy.strategy == "auto":
            # The edges as they are, and with loops replaced: GCN and GAT share these.
            assert first.events("bucketing") == 2
            assert first.events("analysis") >= 5
            assert later.events("halo_gather") == 0
        assert later.events("bucketing") == later.events("analysis") == 0
        assert later.events("halo_reduce") == 0
        found = {name: after[name] for name in PREPROCESSING if after[name]}
        assert not found, found
        assert any(before[name] for name in ("bincount", "bucketize")) or policy.mode == 3
        assert after["threshold_backward"] > 0, "the backward pass is counted as well"


def test_changed_weights_are_normalised_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    """What is kept hangs on the very weights: in-place changes and other tensors are noticed."""

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(gnn.GCNConv(CHANNELS, OUT).double(), view="local")
        plain = gnn.GCNConv(CHANNELS, OUT).double()
        plain.load_state_dict(layer.state_dict())
        weight = data.edge_weight.clone()
        outs = [layer(data.x, data.edge_index, weight)]
        weight.mul_(2).add_(0.3)
        outs.append(layer(data.x, data.edge_index, weight))
        outs.append(layer(data.x, data.edge_index, weight.sqrt()))
        outs.append(layer(data.x, data.edge_index))
        return data.n_id, outs, layer.state_dict()

    whole = make_graph(50, 260)
    workers = threads(worker, WORLD)
    plain = gnn.GCNConv(CHANNELS, OUT).double()
    plain.load_state_dict(workers[0][2])
    changed = whole.edge_weight * 2 + 0.3
    for step, weight in enumerate((whole.edge_weight, changed, changed.sqrt(), None)):
        expected = plain(whole.x, whole.edge_index, weight)
        for n_id, outs, _ in workers:
            assert torch.allclose(outs[step], expected[n_id], rtol=1e-10, atol=1e-12), step


# The ledger itself ###########################################################


def test_summary_and_selections(root: Path):
    def worker() -> None:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        model = pyg_sar.distribute(Deep().double(), view="local")
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

    threads(worker, WORLD)


def test_ledger_closes_on_errors():
    comm = pyg_sar.comm.current()
    with pytest.raises(KeyError), pyg_sar.Ledger(comm):
        raise KeyError
    assert comm.ledgers == []


def test_single_process_sends_nothing(graph: Data, partitions: Partitions):
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(partitions(graph, 1, "contiguous"), view="local")
    model = pyg_sar.distribute(Deep().double(), view="local")
    with pyg_sar.Ledger(comm) as ledger:
        epoch(model, data, None)
    assert ledger.sent == ledger.received == ledger.peak_resident_rows() == 0
