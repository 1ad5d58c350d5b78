"""PyG's norms over nodes, several graphs cut over workers, against PyG on one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, error, threads
from torch import Tensor

import pyg_sar
from pyg_sar.nn import NORMS
from pyg_sar.reduction.moments import moments, reduces_over_rows
from pyg_sar.reduction.parameters import LIMBS

CHANNELS, NODES, TYPES = 5, 31, 4
WORLDS = [1, 2, 3, 5]

GRAPH_NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "GraphNorm": lambda: gnn.GraphNorm(CHANNELS, eps=1e-3),
    "GraphSizeNorm": gnn.GraphSizeNorm,
    "InstanceNorm": lambda: gnn.InstanceNorm(CHANNELS),
    "InstanceNorm, affine": lambda: gnn.InstanceNorm(CHANNELS, eps=1e-2, affine=True),
    "InstanceNorm, running": lambda: gnn.InstanceNorm(
        CHANNELS, momentum=0.3, affine=True, track_running_stats=True
    ),
    "LayerNorm": lambda: gnn.LayerNorm(CHANNELS),
    "LayerNorm, plain": lambda: gnn.LayerNorm(CHANNELS, eps=1e-2, affine=False),
    "LayerNorm, node": lambda: gnn.LayerNorm(CHANNELS, mode="node"),
    "MeanSubtractionNorm": gnn.MeanSubtractionNorm,
    "PairNorm": lambda: gnn.PairNorm(scale=1.7),
    "PairNorm, individually": lambda: gnn.PairNorm(scale_individually=True, eps=1e-3),
}
TYPE_NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "HeteroBatchNorm": lambda: gnn.HeteroBatchNorm(CHANNELS, TYPES),
    "HeteroBatchNorm, cumulative": lambda: gnn.HeteroBatchNorm(CHANNELS, TYPES, momentum=None),
    "HeteroBatchNorm, nothing": lambda: gnn.HeteroBatchNorm(
        CHANNELS, TYPES, eps=0.2, affine=False, track_running_stats=False
    ),
    "HeteroLayerNorm": lambda: gnn.HeteroLayerNorm(CHANNELS, TYPES),
}
ROW_NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "DiffGroupNorm": lambda: gnn.DiffGroupNorm(CHANNELS, 3, lamda=0.5),
    "DiffGroupNorm, no statistics": lambda: gnn.DiffGroupNorm(
        CHANNELS, 2, affine=False, track_running_stats=False
    ),
    "SyncBatchNorm": lambda: torch.nn.SyncBatchNorm(CHANNELS, momentum=None),
    "SyncBatchNorm in BatchNorm": lambda: torch.nn.SyncBatchNorm.convert_sync_batchnorm(
        gnn.BatchNorm(CHANNELS, allow_single_element=True)
    ),
}
ALL = {**GRAPH_NORMS, **TYPE_NORMS, **ROW_NORMS}


def make_norm(name: str) -> torch.nn.Module:
    """A norm of which no parameter has its initial value."""
    norm = ALL[name]().double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return norm


def owners(world: int) -> Tensor:
    """The worker of each node: any; of three and more workers the second has none."""
    owner = torch.randint(world, (NODES,), generator=torch.Generator().manual_seed(world))
    return torch.where(owner == 1, 0, owner) if world > 2 else owner


@dataclass
class Case:
    """A norm and what it is called with besides the features.

    Attributes:
        title: For messages.
        norm: A plain norm.
        groups: The graph or type of each node, if the call has one.
        more: Further arguments.
    """

    title: str
    norm: torch.nn.Module
    groups: Tensor | None = None
    more: tuple[Any, ...] = ()

    def call(self, norm: torch.nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        args = () if self.groups is None else (self.groups[ids], *self.more)
        out: Tensor = norm(x, *args)
        return out


def cases() -> Iterator[Case]:
    draw = torch.Generator().manual_seed(5)
    graphs = torch.tensor([0, 1, 2, 4])[torch.randint(3, (NODES,), generator=draw)]  # 3 is empty
    graphs[7] = 4  # of a single node
    types = torch.tensor([0, 1, 3])[torch.randint(3, (NODES,), generator=draw)]
    for name in GRAPH_NORMS:
        norm = make_norm(name)
        yield Case(name, norm)
        yield Case(f"{name}, batch", norm, graphs)
        yield Case(f"{name}, batch and size", norm, graphs, (6,))
    for name in TYPE_NORMS:
        yield Case(name, make_norm(name), types)
    for name in ROW_NORMS:
        yield Case(name, make_norm(name))


@dataclass
class Step:
    """What a pass leaves."""

    out: Tensor
    x_grad: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run(case: Case, norm: torch.nn.Module, ids: Tensor) -> list[Step]:
    """Two steps of training and one of evaluation, with any cotangents."""
    steps = []
    for k in range(3):
        draw = torch.Generator().manual_seed(10 + k)
        values, cotangents = torch.randn(2, NODES, CHANNELS, generator=draw, dtype=torch.float64)
        x = (values * (k + 1) + k)[ids].requires_grad_()
        norm.train(k < 2)
        norm.zero_grad()
        out = case.call(norm, x, ids)
        out.backward(cotangents[ids])
        grads = {n: p.grad.clone() for n, p in norm.named_parameters() if p.grad is not None}
        buffers = {n: b.detach().clone() for n, b in norm.named_buffers()}
        steps.append(Step(out.detach(), x.grad, grads, buffers))
        for buffer in norm.buffers():  # PyG's InstanceNorm leaves its graph on them.
            buffer.detach_()
    return steps


def run_cases(sweep: list[Case], owner: Tensor) -> list[list[Step]]:
    """A worker's part: every case."""
    ids = (owner == pyg_sar.comm.current().rank).nonzero().view(-1)
    return [
        run(case, pyg_sar.distribute(copy.deepcopy(case.norm), view="local"), ids) for case in sweep
    ]


@pytest.mark.parametrize(
    ("world", "backend"), [*((world, "threads") for world in WORLDS), (2, "gloo")]
)
def test_equal_to_one_process(world: int, backend: str):
    """Outputs, all gradients and running statistics; on one worker to the last bit."""
    sweep, owner = list(cases()), owners(world)
    expected = [run(case, copy.deepcopy(case.norm), torch.arange(NODES)) for case in sweep]
    workers = pyg_sar.launch(run_cases, world, sweep, owner, backend=backend, timeout=60.0)
    limit = TOLERANCE if world > 1 else 0.0
    order = torch.cat([(owner == rank).nonzero().view(-1) for rank in range(world)])
    for number, (case, steps) in enumerate(zip(sweep, expected, strict=True)):
        for k, right in enumerate(steps):
            found = [w[number][k] for w in workers]
            where = (case.title, k)
            assert error(torch.cat([f.out for f in found]), right.out[order]) <= limit, where
            assert error(torch.cat([f.x_grad for f in found]), right.x_grad[order]) <= limit, where
            for f in found:
                assert f.grads.keys() == right.grads.keys(), where
                assert f.buffers.keys() == right.buffers.keys(), where
                for name, gradient in right.grads.items():
                    assert error(f.grads[name], gradient) <= limit, (where, name)
                for name, buffer in right.buffers.items():
                    assert error(f.buffers[name], buffer) <= limit, (where, name)


@given(
    owner=st.lists(st.integers(0, 2), min_size=2, max_size=12),
    graph=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    shift=st.sampled_from([0.0, 1e4]),
)
@settings(max_examples=15)
def test_moments_of_any_split(owner: list[int], graph: list[int], shift: float):
    """Merged moments and their gradients are those of the formula, evaluated at once."""
    count = len(owner)
    batch = torch.tensor(graph[:count])
    draw = torch.Generator().manual_seed(count)
    values, of_mean, of_variance = torch.randn(3, 12, 2, generator=draw, dtype=torch.float64)
    x = (values[:count] + shift).requires_grad_()
    one_hot = torch.nn.functional.one_hot(batch, 4).double()
    whole = one_hot.sum(0).clamp(min=1).view(-1, 1)
    mean = one_hot.t() @ x / whole
    variance = one_hot.t() @ (x - mean[batch]).square() / whole
    (mean * of_mean[:4] + variance * of_variance[:4]).sum().backward()

    def worker() -> Any:
        rank = pyg_sar.comm.current().rank
        mine = torch.tensor(owner) == rank
        rows = x.detach()[mine].requires_grad_()
        found = moments(rows, batch[mine], 4)
        if rank == 0:  # The workers' losses add up.
            loss = (found.mean * of_mean[:4] + found.variance * of_variance[:4]).sum()
        else:
            loss = (found.mean + found.variance).sum() * 0
        loss.backward()
        return found, mine, rows.grad

    for found, mine, gradient in threads(worker, 3):
        assert torch.equal(found.count, one_hot.sum(0))
        assert torch.allclose(found.mean, mean, rtol=1e-12, atol=1e-12)
        assert torch.allclose(found.variance, variance, rtol=1e-9, atol=1e-9)
        assert torch.allclose(gradient, x.grad[mine], rtol=1e-9, atol=1e-9)


def test_more_graphs_than_everyone_could_send_to_everyone():
    """Sums instead of gathered moments: the same numbers; bytes in don't grow with workers."""
    size, world = 2**15, 3
    batch = torch.randint(size, (400,), generator=torch.Generator().manual_seed(0))
    batch[:200] = batch[200:]  # graphs of two nodes
    draw = torch.Generator().manual_seed(1)
    values, cotangents = torch.randn(2, 400, CHANNELS, generator=draw, dtype=torch.float64)
    x = values.clone().requires_grad_()
    norm = gnn.GraphNorm(CHANNELS).double()
    expected = norm(x, batch, size)
    expected.backward(cotangents)

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        mine = torch.arange(400) % 3 == comm.rank
        rows = values[mine].requires_grad_()
        with pyg_sar.Ledger(comm) as ledger:
            out = pyg_sar.distribute(copy.deepcopy(norm), view="local")(rows, batch[mine], size)
        out.backward(cotangents[mine])
        return mine, out.detach(), rows.grad, ledger.received_bytes(kind="statistics")

    for mine, out, gradient, received in threads(worker, world):
        assert error(out, expected.detach()[mine]) <= TOLERANCE
        assert error(gradient, x.grad[mine]) <= TOLERANCE
        assert received < size * (1 + 2 * CHANNELS) * 8 * 1.01


def test_features_without_a_gradient():
    """A first layer: parameters get theirs, and nothing is sent backward but their sum."""
    names = [name for name in ALL if list(make_norm(name).parameters())]
    draw = torch.Generator().manual_seed(0)
    x, cotangents = torch.randn(2, 20, CHANNELS, generator=draw, dtype=torch.float64)
    types = torch.arange(20) % TYPES

    def one(name: str, part: slice, convert: Callable[..., Any]) -> dict[str, Tensor]:
        norm = convert(make_norm(name))
        out = norm(x[part], types[part]) if name in TYPE_NORMS else norm(x[part])
        out.backward(cotangents[part])
        return {n: p.grad for n, p in norm.named_parameters() if p.grad is not None}

    def worker() -> list[tuple[dict[str, Tensor], int]]:
        comm, found = pyg_sar.comm.current(), []
        part = [slice(0, 20), slice(20, 20)][comm.rank]
        for name in names:
            with pyg_sar.Ledger(comm) as ledger:
                grads = one(name, part, partial(pyg_sar.distribute, view="local"))
            found.append((grads, ledger.sent_bytes(phase="backward", kind="statistics")))
        return found

    workers = threads(worker, 2)
    for k, name in enumerate(names):
        expected = one(name, slice(None), lambda norm: norm)
        for grads, sent in (w[k] for w in workers):
            assert grads.keys() == expected.keys()
            assert all(error(grads[n], g) <= TOLERANCE for n, g in expected.items()), name
            # The softmax before DiffGroupNorm's statistics has a parameter.
            assert (sent > 0) == name.startswith("DiffGroupNorm"), name


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["GraphNorm", "LayerNorm", "PairNorm", "InstanceNorm, affine"])
def test_equal_features(name: str, graphs: bool):
    """No variance at all: PyG's outputs and gradients, nothing undefined."""
    norm = make_norm(name)
    batch = torch.tensor([0, 0, 1, 1, 1]) if graphs else None
    draw = torch.Generator().manual_seed(0)
    cotangents = torch.randn(5, CHANNELS, generator=draw, dtype=torch.float64)

    def one(norm: torch.nn.Module, part: slice) -> tuple[Tensor, Tensor]:
        x = torch.full((5, CHANNELS), 2.0, dtype=torch.float64)[part].requires_grad_()
        out = norm(x, None if batch is None else batch[part])
        out.backward(cotangents[part])
        return out.detach(), x.grad

    expected = one(copy.deepcopy(norm), slice(None))

    def worker() -> Any:
        part = [slice(0, 3), slice(3, 5)][pyg_sar.comm.current().rank]
        return one(pyg_sar.distribute(copy.deepcopy(norm), view="local"), part)

    workers = threads(worker, 2)
    for k, right in enumerate(expected):
        assert torch.allclose(torch.cat([w[k] for w in workers]), right, rtol=1e-9, atol=1e-9)


# Precision ####################################################################

PRECISE = [name for name in (*GRAPH_NORMS, *TYPE_NORMS) if "node" not in name]


def low_precision_calls(norm: torch.nn.Module, autocast: bool) -> Callable[..., Tensor]:
    def call(x: Tensor, *groups: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out: Tensor = norm(x, *groups)
        return out

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_low_precision(parameters: torch.dtype, autocast: bool, dtype: torch.dtype):
    """PyG's dtypes; at most twice PyG's error, both against float64."""
    draw = torch.Generator().manual_seed(2)
    x = (torch.randn(60, CHANNELS, generator=draw) + 1).to(dtype)
    batch = torch.randint(TYPES, (60,), generator=draw)
    found = []
    for name in PRECISE:
        norm = make_norm(name).to(parameters)
        for groups in ((batch,),) if name in TYPE_NORMS else ((), (batch,)):
            exact = copy.deepcopy(norm).double()(x.double(), *groups).detach()
            try:
                theirs = low_precision_calls(copy.deepcopy(norm), autocast)(x, *groups).detach()
            except RuntimeError:  # PyG refuses to mix these dtypes.
                continue
            found.append((name, norm, groups, exact, theirs))

    def worker() -> list[Tensor]:
        mine = slice(0, 45) if pyg_sar.comm.current().rank == 0 else slice(45, 60)
        outs = []
        for _, norm, groups, *_ in found:
            model = pyg_sar.distribute(copy.deepcopy(norm), view="local")
            call = low_precision_calls(model, autocast)
            outs.append(call(x[mine], *(g[mine] for g in groups)).detach())
        return outs

    workers = threads(worker, 2)
    assert len(found) > len(PRECISE)
    for k, (name, _, groups, exact, theirs) in enumerate(found):
        ours = torch.cat([w[k] for w in workers])
        where = (name, bool(groups))
        assert ours.dtype == theirs.dtype, where
        limit = 2 * error(theirs.double(), exact) + 2 * torch.finfo(theirs.dtype).eps
        assert error(ours.double(), exact) <= limit, where


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", [n for n in PRECISE if "running" not in n])
def test_large_mean_small_deviation(name: str, graphs: bool):
    """Mean 100, deviation 0.01: at most twice PyG's error in float32, both against float64.

    E[x^2] - E[x]^2 would cancel, as it does in PyG's HeteroBatchNorm (pitfall 6).
    """
    draw = torch.Generator().manual_seed(3)
    values, cotangents = torch.randn(2, 200, CHANNELS, generator=draw)
    x, groups = 100 + 0.01 * values, torch.arange(200) % TYPES
    norm = make_norm(name).float()

    def one(norm: torch.nn.Module, x: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        x = x[part].clone().requires_grad_()
        out = norm(x, groups[part]) if graphs or name in TYPE_NORMS else norm(x)
        out.backward(cotangents[part].to(out.dtype))
        return out.detach().double(), x.grad.double()

    whole = slice(None)
    hetero = name.startswith("HeteroBatchNorm")
    exact = one(copy.deepcopy(norm).double(), x.double(), whole)
    theirs = one(copy.deepcopy(norm), x, whole)

    def worker() -> Any:
        part = [slice(0, 70), slice(70, 200)][pyg_sar.comm.current().rank]
        return one(pyg_sar.distribute(copy.deepcopy(norm), view="local"), x, part)

    workers = threads(worker, 2)
    for k, right in enumerate(exact):
        ours = torch.cat([w[k] for w in workers])
        limit = 8 * torch.finfo(torch.float32).eps
        limit += 0 if hetero else 2 * error(theirs[k], right)
        assert error(ours, right) <= limit


@pytest.mark.parametrize(
    "name", [n for n in PRECISE if n in GRAPH_NORMS and "individually" not in n]
)
def test_nothing_per_row_is_kept_but_the_features(name: str):
    def worker() -> int:
        norm = pyg_sar.distribute(make_norm(name), view="local")
        x = torch.randn(500, CHANNELS, dtype=torch.float64, requires_grad=True)
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = norm(x)
        assert out.requires_grad
        return sum(size for size in kept.values() if size >= 500 * NUMBER)

    for kept in threads(worker, 2):
        assert kept <= 500 * CHANNELS * NUMBER


# InstanceNorm1d ###############################################################


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("layout", ["C L", "1 C L", "N C L"])
@pytest.mark.parametrize("running", [False, True])
def test_torch_instance_norm(layout: str, running: bool, world: int):
    """Nodes as positions (``x.t()``), or one by one with positions of their own."""
    norm = torch.nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=running).double()
    draw = torch.Generator().manual_seed(0)
    x, cotangents = torch.randn(2, 9, CHANNELS, 4, generator=draw, dtype=torch.float64)
    bounds = {1: [0, 9], 2: [0, 3, 9], 3: [0, 5, 5, 9]}[world]

    def steps(norm: torch.nn.Module, part: slice) -> list[Any]:
        found = []
        for training in (True, True, False):
            norm.train(training)
            rows = x[part].clone().requires_grad_()
            flat = rows[:, :, 0].t()
            value = {"C L": flat, "1 C L": flat.unsqueeze(0), "N C L": rows}[layout]
            out = norm(value)
            out = out if layout == "N C L" else out.reshape(flat.shape).t()
            (
                out * (cotangents if layout == "N C L" else cotangents[:, :, 0])[part]
            ).sum().backward()
            found.append((out.detach(), rows.grad, [b.clone() for b in norm.buffers()]))
        return found

    expected = steps(copy.deepcopy(norm), slice(0, 9))

    def worker() -> list[Any]:
        rank = pyg_sar.comm.current().rank
        model = pyg_sar.distribute(copy.deepcopy(norm), view="local")
        return steps(model, slice(bounds[rank], bounds[rank + 1]))

    workers = threads(worker, world)
    for k, (out, gradient, buffers) in enumerate(expected):
        assert error(torch.cat([w[k][0] for w in workers]), out) <= TOLERANCE
        assert error(torch.cat([w[k][1] for w in workers]), gradient) <= TOLERANCE
        for w in workers:
            assert all(error(*pair) <= TOLERANCE for pair in zip(w[k][2], buffers, strict=True))


@pytest.mark.parametrize("sizes", [(2, CHANNELS), (CHANNELS, 0, 3), (1, 1)])
def test_instance_norm_of_nodes_by_rows(sizes: tuple[int, ...]):
    """``[N, F]``, as GENConv(norm='instance') has it: torch takes each node over its features."""
    norm = torch.nn.InstanceNorm1d(CHANNELS).double()
    x = torch.randn(sum(sizes), CHANNELS, dtype=torch.float64).requires_grad_()
    weight = torch.randn_like(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That N is no number of channels, it says.
        expected = norm(x)
    (expected * weight).sum().backward()

    def worker() -> Any:
        rank, model = (
            pyg_sar.comm.current().rank,
            pyg_sar.distribute(copy.deepcopy(norm), view="local"),
        )
        rows = x.detach().split(sizes)[rank].clone().requires_grad_()
        out = model(rows)
        (out * weight.split(sizes)[rank]).sum().backward()
        return out.detach(), rows.grad

    workers = threads(worker, len(sizes))
    for found, right in ((0, expected.detach()), (1, x.grad)):
        assert error(torch.cat([w[found] for w in workers]), right) <= TOLERANCE


def test_instance_norm_that_may_mean_both_is_refused():
    """As many nodes as channels on every worker: columns were taken for nodes."""
    x = torch.randn(CHANNELS, CHANNELS, dtype=torch.float64)
    refused(
        lambda: torch.nn.InstanceNorm1d(CHANNELS),
        lambda model, rank: model(x),
        "can't be told. Pass x.t().unsqueeze(0)",
    )
    refused(
        lambda: torch.nn.InstanceNorm1d(CHANNELS, affine=True),
        lambda model, rank: model(x[:3]),
        "nodes would be the channels",
    )


def test_instance_norm_told_not_to_use_what_it_tracked():
    """``track_running_stats`` switched off later: instance statistics in evaluation too."""
    norm = gnn.InstanceNorm(CHANNELS, track_running_stats=True).double().eval()
    norm.track_running_stats = False
    x = torch.randn(9, CHANNELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = copy.deepcopy(norm)
    out = expected(x)
    assert reduces_over_rows(norm)

    def worker() -> Any:
        model = pyg_sar.distribute(copy.deepcopy(norm), view="local")
        return model(x[[slice(0, 3), slice(3, 9)][pyg_sar.comm.current().rank]]), model.running_var

    workers = threads(worker, 2)
    assert error(torch.cat([w[0] for w in workers]), out) <= TOLERANCE
    assert all(error(w[1], expected.running_var) <= TOLERANCE for w in workers)


# What travels ##################################################################


class Calls(pyg_sar.Ledger):
    """Counts collectives and notes their sizes."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self.calls: list[tuple[str, int]] = []

    def transfer(
        self, label: Any, peer: int, *, sent: int = 0, received: int = 0, transport: str = ""
    ) -> None:
        assert peer == -1, "a norm has no business with a single peer"
        self.calls.append((label[1], sent))


HEAD, NUMBER = 4, 8  # numbers to agree on; bytes of a float64

# Norm, numbers per graph forward and backward.
COSTS: Sequence[tuple[str, int, int]] = (
    ("GraphNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("GraphSizeNorm", 1, 0),
    ("InstanceNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("LayerNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("LayerNorm, node", 0, 0),
    ("MeanSubtractionNorm", 1 + CHANNELS, CHANNELS),
    ("PairNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("PairNorm, individually", 1 + CHANNELS, CHANNELS),
    ("HeteroBatchNorm", 1 + 2 * CHANNELS, 0),
    ("HeteroLayerNorm", 0, 0),
    ("SyncBatchNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("DiffGroupNorm", 1 + 6 * CHANNELS, 6 * CHANNELS),
)


@pytest.mark.parametrize(("name", "forward", "backward"), COSTS)
def test_one_collective_each_way_of_o_of_f_numbers(name: str, forward: int, backward: int):
    """However many nodes; a batch adds one collective, and numbers per graph."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        norm = pyg_sar.distribute(make_norm(name), view="local")
        rows = 40 + 100 * comm.rank
        x = torch.randn(rows, CHANNELS, dtype=torch.float64, requires_grad=True)
        groups = torch.arange(rows) % 3
        calls = {"none": (), "batch": (groups,)}
        if name in TYPE_NORMS:
            calls = {"none": (groups,)}
        elif name in ROW_NORMS:
            calls = {"none": ()}
        found = {}
        for how, args in calls.items():
            with Calls(comm) as ledger:
                norm(x, *args).square().sum().backward()
            sizes = [
                (phase, size) for phase, size in ledger.calls if phase in ("forward", "backward")
            ]
            found[how] = [c for c in sizes if c != ("backward", gradients(norm))]
        return found

    def gradients(norm: torch.nn.Module) -> int:
        """Bytes of the sum of the parameters' gradients, which is not the norm's doing."""
        return sum((p.numel() + 1) * NUMBER for p in norm.parameters()) + 2 * LIMBS * NUMBER

    for found in threads(worker, 2):
        groups = TYPES if name in TYPE_NORMS else 1
        head = HEAD if name in GRAPH_NORMS else 0
        single = [("forward", (head + groups * forward) * NUMBER)] if forward else []
        single += [("backward", groups * backward * NUMBER)] if backward else []
        assert found["none"] == single
        if "batch" in found and forward:
            agreed = ("forward", (HEAD + forward) * NUMBER)
            several = [agreed, ("forward", 3 * forward * NUMBER)]
            several += [("backward", 3 * backward * NUMBER)] if backward else []
            assert found["batch"] == several


# Mistakes #####################################################################


def refused(norm: Callable[[], torch.nn.Module], call: Callable[..., Any], text: str) -> None:
    """All of two workers end with the error, none waits."""

    def worker() -> None:
        model = pyg_sar.distribute(norm().double(), view="local")
        call(model, pyg_sar.comm.current().rank)

    with pytest.raises(pyg_sar.errors.WorkerError) as caught:
        threads(worker, 2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert text in str(caught.value.__cause__), caught.value.__cause__


X = torch.ones(4, CHANNELS, dtype=torch.float64)
BATCH = torch.tensor([0, 0, 1, 1])
MISTAKES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "batch on one worker": (
        "GraphNorm",
        lambda norm, rank: norm(X, BATCH if rank else None),
        "'batch' is given at rank 1, 'batch' is not given at rank 0",
    ),
    "local batch size": (
        "LayerNorm",
        lambda norm, rank: norm(X, BATCH, 2 + rank),
        "'batch_size' is 3 at rank 1, 'batch_size' is 2 at rank 0",
    ),
    "size on one worker": (
        "InstanceNorm",
        lambda norm, rank: norm(X, BATCH, 2 if rank else None),
        "'batch_size' is 2 at rank 1, 'batch_size' is not given at rank 0",
    ),
    "size too small": (
        "GraphNorm",
        lambda norm, rank: norm(X, BATCH + rank, 2),
        "Rank 1 has rows of the groups 1 to 2 of 2",
    ),
    "negative": ("PairNorm", lambda norm, rank: norm(X, BATCH - rank), "Rank 1 has rows"),
    "gradient on one worker": (
        "PairNorm",
        lambda norm, rank: norm(X.clone().requires_grad_(rank == 0)),
        "'x' does not require a gradient at rank 1, 'x' requires a gradient at rank 0",
    ),
    "batch of another length": (
        "MeanSubtractionNorm",
        lambda norm, rank: norm(X, BATCH[: 4 - rank]),
        "one group (int64) for each of the 4 rows of rank 1",
    ),
    "batch of another dtype": (
        "GraphSizeNorm",
        lambda norm, rank: norm(X, BATCH.int()),
        "got torch.int32",
    ),
    "features of three axes": (
        "GraphNorm",
        lambda norm, rank: norm(X.view(2, 2, CHANNELS)),
        "expected node features 'x' of shape [num_nodes, channels], got [2, 2, 5]",
    ),
    "types out of range": (
        "HeteroBatchNorm",
        lambda norm, rank: norm(X, BATCH + 3 * rank),
        "Rank 1 has rows of the groups 3 to 4 of 4",
    ),
    "one node": (
        "InstanceNorm",
        lambda norm, rank: norm(X[:rank]),
        "got 1 node on all 2 workers",
    ),
    "channels": (
        "SyncBatchNorm",
        lambda norm, rank: norm(X[:, :3]),
        "expected 5 channels on axis 1, got a tensor of shape [4, 3]",
    ),
    "distances": (
        "DiffGroupNorm",
        lambda norm, rank: norm.group_distance_ratio(X, BATCH),
        "needs all pairs of nodes",
    ),
}


@pytest.mark.parametrize("title", MISTAKES)
def test_mistakes_end_all_workers(title: str):
    name, call, text = MISTAKES[title]
    refused(ALL[name], call, text)


def test_instance_norm_of_unlike_axes_or_features_as_positions():
    def norm() -> torch.nn.Module:
        return torch.nn.InstanceNorm1d(CHANNELS, track_running_stats=True)

    refused(norm, lambda model, rank: model(X), "nodes would be the channels")
    nodes = X.unsqueeze(-1).expand(-1, -1, 3)
    refused(norm, lambda model, rank: model(nodes if rank else X), "3 axes at rank 1")


def test_every_norm_of_pyg_is_exact_or_per_node():
    """A norm that a new PyG brings must be looked at."""
    per_node = {"HeteroLayerNorm", "MessageNorm"}
    pygs = set(gnn.norm.__all__)
    known = {kind.__name__ for kind in NORMS}
    assert pygs - per_node <= known
    assert {name.split(",")[0] for name in (*GRAPH_NORMS, *TYPE_NORMS)} >= pygs - per_node - {
        "BatchNorm",
        "DiffGroupNorm",
    }


@pytest.mark.parametrize("kind", NORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_subclasses_are_refused_by_name(kind: type):
    """What a subclass computes is not known; those of the distributed classes are let through."""

    def make(base: type) -> torch.nn.Module:
        own = type("Own", (base,), {})
        sizes = {"HeteroBatchNorm": (CHANNELS, 2), "DiffGroupNorm": (CHANNELS, 2)}
        sizes |= dict.fromkeys(("GraphSizeNorm", "MeanSubtractionNorm", "PairNorm"), ())
        norm: torch.nn.Module = own(*sizes.get(kind.__name__, (CHANNELS,)))
        return norm

    def worker() -> str:
        pyg_sar.distribute(torch.nn.Sequential(make(NORMS[kind])), view="local")
        with pytest.raises(ValueError, match=r"'1' \(Own\) normalises over nodes") as caught:
            pyg_sar.distribute(torch.nn.Sequential(torch.nn.Linear(1, 1), make(kind)), view="local")
        return str(caught.value)

    assert all("pyg_sar.nn.NORMS" in text for text in threads(worker, 2))


def test_a_process_group_of_its_own_is_refused():
    def worker() -> None:
        norm = torch.nn.SyncBatchNorm(CHANNELS, process_group=object())
        with pytest.raises(ValueError, match="'process_group' of its own"):
            pyg_sar.distribute(norm, view="local")

    threads(worker, 2)
