"""Norms over the nodes of the whole graph, against torch's and PyG's on one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from combinations import everything, some
from oracle import TOLERANCE, alike, error, parts, processes, whole, workers
from torch import Tensor
from torch.nn import BatchNorm1d
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.errors import OneShotWarning
from pyg_sar.kernels import ops
from pyg_sar.nn import NORMS
from pyg_sar.reduction.moments import moments, reduces_over_rows

CHANNELS, NODES, TYPES = 5, 31, 4
NUMBER = 8  # bytes of a float64

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


class OwnNorm(BatchNorm1d):
    """A norm that the package doesn't know."""


class OwnGraphNorm(gnn.GraphNorm):
    """Another one."""


class Images(torch.nn.Module):
    """Statistics of a norm of images, one row and column of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.view(-1, CHANNELS, 1, 1)).view(-1, CHANNELS)


class Positions(torch.nn.Module):
    """Rows as positions of one sequence ``[1, C, N]``, or ``[C, N]``."""

    def __init__(self, batch: bool, running: bool) -> None:
        super().__init__()
        self.batch = batch
        self.norm = torch.nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=running)

    def forward(self, x: Tensor) -> Tensor:
        x = x.t().unsqueeze(0) if self.batch else x.t()
        out = self.norm(x)
        return (out.squeeze(0) if self.batch else out).t()


class Sequences(torch.nn.Module):
    """A sequence ``[C, 3]`` for each row."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.stack([x, x.cos(), x * x], dim=-1)) @ x.new_tensor([1.0, -2.0, 0.5])


ROW_NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "BatchNorm1d": lambda: BatchNorm1d(CHANNELS),
    "BatchNorm1d, cumulative": lambda: BatchNorm1d(CHANNELS, momentum=None),
    "BatchNorm1d, momentum": lambda: BatchNorm1d(CHANNELS, momentum=0.37, eps=1e-2),
    "BatchNorm1d, not affine": lambda: BatchNorm1d(CHANNELS, affine=False),
    "BatchNorm1d, no statistics": lambda: BatchNorm1d(CHANNELS, track_running_stats=False),
    "BatchNorm1d, nothing": lambda: BatchNorm1d(CHANNELS, affine=False, track_running_stats=False),
    "BatchNorm1d of sequences": lambda: Sequences(BatchNorm1d(CHANNELS)),
    "BatchNorm": lambda: gnn.BatchNorm(CHANNELS),
    "BatchNorm, options": lambda: gnn.BatchNorm(CHANNELS, eps=1e-3, momentum=0.5, affine=False),
    "BatchNorm, no statistics": lambda: gnn.BatchNorm(CHANNELS, track_running_stats=False),
    "BatchNorm, single": lambda: gnn.BatchNorm(CHANNELS, allow_single_element=True),
    "BatchNorm2d": Images,
    "DiffGroupNorm": lambda: gnn.DiffGroupNorm(CHANNELS, 3, lamda=0.5),
    "DiffGroupNorm, no statistics": lambda: gnn.DiffGroupNorm(
        CHANNELS, 2, affine=False, track_running_stats=False
    ),
    "SyncBatchNorm": lambda: torch.nn.SyncBatchNorm(CHANNELS, momentum=None),
    "SyncBatchNorm in BatchNorm": lambda: torch.nn.SyncBatchNorm.convert_sync_batchnorm(
        gnn.BatchNorm(CHANNELS, allow_single_element=True)
    ),
    "InstanceNorm1d": lambda: torch.nn.InstanceNorm1d(CHANNELS),
    "InstanceNorm1d of sequences": lambda: Sequences(
        torch.nn.InstanceNorm1d(CHANNELS, affine=True)
    ),
    "InstanceNorm1d of sequences, running": lambda: Sequences(
        torch.nn.InstanceNorm1d(CHANNELS, track_running_stats=True)
    ),
    **{
        f"InstanceNorm1d of positions, {batch}, {running}": lambda b=batch, r=running: Positions(
            b, r
        )
        for batch in (False, True)
        for running in (False, True)
    },
    "own BatchNorm1d": lambda: OwnNorm(CHANNELS),
    "torch's LayerNorm": lambda: torch.nn.LayerNorm(CHANNELS),
    "GroupNorm": lambda: torch.nn.GroupNorm(1, CHANNELS),
}
GRAPH_NORMS["own GraphNorm"] = lambda: OwnGraphNorm(CHANNELS)
ALL = {**GRAPH_NORMS, **TYPE_NORMS, **ROW_NORMS}


def make_norm(name: str) -> torch.nn.Module:
    """A norm of which no parameter has its initial value."""
    norm = ALL[name]().double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return norm


def graph() -> Data:
    draw = torch.Generator().manual_seed(5)
    batch = torch.tensor([0, 1, 2, 4])[torch.randint(3, (NODES,), generator=draw)]  # 3 is empty
    batch[7] = 4  # of a single node
    return Data(
        x=torch.randn(NODES, CHANNELS, generator=draw, dtype=torch.float64),
        batch=batch,
        kind=torch.tensor([0, 1, 3])[torch.randint(3, (NODES,), generator=draw)],
        edge_index=torch.randint(NODES, (2, 40), generator=draw),
    )


def written(root: Path, world: int, data: Data | None = None) -> Path:
    """A partition with any nodes on each worker; of three and more the second has none."""
    data = graph() if data is None else data
    owner = torch.randint(world, (data.num_nodes,), generator=torch.Generator().manual_seed(world))
    owner = torch.where(owner == 1, 0, owner) if world > 2 else owner
    pyg_sar.write_partitions(data, world, root / f"parts{world}", owner)
    return root / f"parts{world}"


@dataclass
class Case:
    """A norm and what it is called with besides the features.

    Attributes:
        title: For messages.
        norm: A plain norm.
        groups: Which of the data's tensors has the group of each node, if the call has one.
        more: Further arguments.
    """

    title: str
    norm: torch.nn.Module
    groups: str = ""
    more: tuple[Any, ...] = ()

    def call(self, norm: torch.nn.Module, x: Tensor, data: Data) -> Tensor:
        args = (data[self.groups], *self.more) if self.groups else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # InstanceNorm1d: that N is no number of channels.
            out: Tensor = norm(x, *args)
        return out


def cases() -> Iterator[Case]:
    for name in GRAPH_NORMS:
        norm = make_norm(name)
        yield Case(name, norm)
        yield Case(f"{name}, batch", norm, "batch")
        yield Case(f"{name}, batch and size", norm, "batch", (6,))
    for name in TYPE_NORMS:
        yield Case(name, make_norm(name), "kind")
    for name in ROW_NORMS:
        yield Case(name, make_norm(name))


Found = dict[str, Any]


def run(case: Case, norm: torch.nn.Module, data: Data) -> list[Found]:
    """Two steps of training and one of evaluation: all that they leave."""
    steps = []
    for k in range(3):
        draw = torch.Generator().manual_seed(10 + k)
        cotangents = torch.randn(NODES, CHANNELS, generator=draw, dtype=torch.float64)
        x = (data.x * (k + 1) + k).requires_grad_()
        norm.train(k < 2)
        norm.zero_grad()
        out = case.call(norm, x, data)
        (out * cotangents).sum().backward()
        found = {"out": whole(out.detach()), "x.grad": whole(x.grad)}
        found |= {n: p.grad.clone() for n, p in norm.named_parameters() if p.grad is not None}
        found |= {n: whole(b.detach()).clone() for n, b in norm.named_buffers()}
        steps.append(found)
        for buffer in norm.buffers():  # PyG's InstanceNorm leaves its graph on them.
            buffer.detach_()
    return steps


def run_cases(root: Path, sweep: Sequence[Case]) -> list[list[Found]]:
    """A worker's part: every case."""
    data = pyg_sar.load_partition(root)
    return [run(case, pyg_sar.distribute(copy.deepcopy(case.norm)), data) for case in sweep]


def check(found: Found, right: Found, limit: float, where: Any) -> None:
    assert found.keys() == right.keys(), where
    wrong = {n: error(found[n], v) for n, v in right.items() if not error(found[n], v) <= limit}
    assert not wrong, (where, wrong)


@pytest.mark.parametrize(
    ("world", "launch"), [(1, workers), (2, workers), (3, workers), (2, parts), (5, parts)]
)
def test_equal_to_one_process(world: int, launch: Any, tmp_path: Path):
    """Outputs, all gradients and running statistics; on one worker to the last bit.

    Each case runs on 1 or 3 workers or on 5 parts; with ``--all`` on all.
    """
    sweep = list(cases()) if everything() else list(cases())[world // 2 :: 3]
    expected = [run(case, copy.deepcopy(case.norm), graph()) for case in sweep]
    for found in launch(run_cases, world, written(tmp_path, world), sweep):
        for case, steps, right in zip(sweep, found, expected, strict=True):
            for k in range(3):
                exact = (
                    world == 1 and type(case.norm) in NORMS and "InstanceNorm1d" not in case.title
                )
                limit = 0.0 if exact else TOLERANCE
                check(steps[k], right[k], limit, (case.title, k))


class Readers(torch.nn.Module):
    """A graph classifier of PyG's tutorials, with a batch norm after the readout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(CHANNELS, 5)
        self.readout = gnn.MeanAggregation()
        self.head = gnn.MLP([5, 5, 3], dropout=0.0, norm="batch_norm")

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(self.readout(self.conv(x, edge_index).relu(), batch))


def classify(model: torch.nn.Module, data: Data) -> Found:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch)
        torch.nn.functional.cross_entropy(out, torch.tensor([0, 2, 1, 1, 0])).backward()
        optimizer.step()
    return {n: t.detach() for n, t in model.state_dict().items()}


def test_a_norm_after_a_readout_counts_each_graph_once(tmp_path: Path):
    """Its rows are plain: all workers have them. Its running statistics are one process's."""
    model = Readers().double()
    expected = classify(copy.deepcopy(model), graph())

    def worker(root: Path) -> Found:
        data = pyg_sar.load_partition(root)
        return classify(pyg_sar.distribute(copy.deepcopy(model)), data)

    for found in workers(worker, 3, written(tmp_path, 3)):
        check(found, expected, TOLERANCE, "")


# Moments ######################################################################


def test_moments_of_any_split():
    """Merged moments and their gradients are those of the formula, evaluated at once."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for k in range(20):
        count, shift = int(torch.randint(2, 13, (), generator=draw)), 1e4 * (k % 2)
        owner, batch = (
            torch.randint(3, (count,), generator=draw),
            torch.randint(4, (count,), generator=draw),
        )
        values, *of = torch.randn(3, 12, 2, generator=draw, dtype=torch.float64)
        x = (values[:count] + shift).requires_grad_()
        one_hot = torch.nn.functional.one_hot(batch, 4).double()
        rows = one_hot.sum(0).clamp(min=1).view(-1, 1)
        mean = one_hot.t() @ x / rows
        variance = one_hot.t() @ (x - mean[batch]).square() / rows
        (mean * of[0][:4] + variance * of[1][:4]).sum().backward()
        right = [one_hot.sum(0), mean.detach(), variance.detach(), x.grad]
        found.append((owner, batch, x.detach(), of, right))

    def worker() -> list[Any]:
        rank, outcome = pyg_sar.comm.current().rank, []
        for owner, batch, x, (of_mean, of_variance), _ in found:
            mine = owner == rank
            rows = x[mine].requires_grad_()
            got = moments(rows, batch[mine], 4)
            if rank == 0:  # The workers' losses add up.
                loss = (got.mean * of_mean[:4] + got.variance * of_variance[:4]).sum()
            else:
                loss = (got.mean + got.variance).sum() * 0
            loss.backward()
            outcome.append((got.count, got.mean.detach(), got.variance.detach(), rows.grad))
        return outcome

    for rank, outcome in enumerate(workers(worker, 3)):
        for got, (owner, *_, right) in zip(outcome, found, strict=True):
            right = [*right[:3], right[3][owner == rank]]
            for value, expected, limit in zip(got, right, (0, 1e-12, 1e-9, 1e-9), strict=True):
                torch.testing.assert_close(value, expected, rtol=limit, atol=limit)


# Edge cases ###################################################################


def test_features_without_a_gradient(tmp_path: Path):
    """A first layer: parameters get theirs, and no statistics are sent backward."""
    names = [n for n in ALL if list(make_norm(n).parameters()) and type(make_norm(n)) in NORMS]
    draw = torch.Generator().manual_seed(0)
    cotangents = torch.randn(NODES, CHANNELS, generator=draw, dtype=torch.float64)

    def one(norm: torch.nn.Module, name: str, data: Data) -> Found:
        args = (data.kind,) if name in TYPE_NORMS else ()
        (norm(data.x, *args) * cotangents).sum().backward()
        return {n: p.grad for n, p in norm.named_parameters() if p.grad is not None}

    def worker(root: Path) -> list[tuple[Found, int]]:
        data, found = pyg_sar.load_partition(root), []
        for name in names:
            with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
                grads = one(pyg_sar.distribute(make_norm(name)), name, data)
            found.append((grads, ledger.sent_bytes(phase="backward", kind="statistics")))
        return found

    for outcome in workers(worker, 2, written(tmp_path, 2)):
        for name, (grads, sent) in zip(names, outcome, strict=True):
            check(grads, one(make_norm(name), name, graph()), TOLERANCE, name)
            # The softmax before DiffGroupNorm's statistics has a parameter.
            assert (sent > 0) == name.startswith("DiffGroupNorm"), name


def test_equal_features(tmp_path: Path):
    """No variance at all: PyG's outputs and gradients, nothing undefined."""
    names = ("GraphNorm", "LayerNorm", "PairNorm", "InstanceNorm, affine")

    def all_of(data: Data, ready: Callable[..., Any]) -> list[tuple[Tensor, Tensor]]:
        found = []
        for name in names:
            for args in ((), (data.batch,)):
                x = torch.full_like(data.x, 2.0).requires_grad_()
                out = ready(make_norm(name))(x, *args)
                (out * torch.arange(NODES * CHANNELS).view(NODES, CHANNELS)).sum().backward()
                found.append((out.detach(), x.grad))
        return found

    alike(all_of, graph(), written(tmp_path, 2), 2, tolerance=1e-9)


@pytest.mark.parametrize("world", [1, 3])
def test_few_rows(world: int, tmp_path: Path):
    """No row, one and two in all: torch's error, or PyG's running statistics, or Bessel's."""

    def all_of(data: Data, ready: Callable[..., Any]) -> list[Any]:
        found: list[Any] = []
        for rows in (0, 1, 2):
            x = data.x[torch.arange(NODES) < rows]
            for name in ("BatchNorm, single", "BatchNorm1d", "InstanceNorm", "SyncBatchNorm"):
                if rows == 0 and name != "BatchNorm, single":
                    continue  # torch's running statistics would be NaN
                norm = ready(make_norm(name))
                for training in (True, False):
                    norm.train(training)
                    try:
                        found += [norm(x).detach(), *(b.clone() for b in norm.buffers() if b.dim())]
                    except ValueError as refusal:
                        found.append("more than 1" in str(refusal) or str(refusal))
        return found

    alike(all_of, graph(), written(tmp_path, world), world)


def test_instance_norm_told_not_to_use_what_it_tracked(tmp_path: Path):
    """``track_running_stats`` switched off later: instance statistics in evaluation too."""
    norm = gnn.InstanceNorm(CHANNELS, track_running_stats=True).double().eval()
    norm.track_running_stats = False
    assert reduces_over_rows(norm)

    def evaluated(data: Data, ready: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        model = ready(copy.deepcopy(norm))
        return model(data.x), model.running_var

    alike(evaluated, graph(), written(tmp_path, 2), 2)


def test_distances_of_groups(tmp_path: Path):
    """``DiffGroupNorm.group_distance_ratio`` is over all pairs of nodes."""
    groups = torch.arange(NODES) % 3
    expected = gnn.DiffGroupNorm.group_distance_ratio(graph().x, groups)

    def worker(root: Path) -> float:
        data, norm = pyg_sar.load_partition(root), pyg_sar.distribute(make_norm("DiffGroupNorm"))
        return norm.group_distance_ratio(data.x, groups)

    for found in workers(worker, 2, written(tmp_path, 2)):
        assert found == pytest.approx(expected, rel=1e-10)


# Precision ####################################################################

PRECISE = [name for name in (*GRAPH_NORMS, *TYPE_NORMS) if "node" not in name and "own" not in name]
PRECISE += ["BatchNorm1d", "SyncBatchNorm", "own BatchNorm1d"]


def calls(name: str) -> tuple[str, ...]:
    """What a norm is called with besides the features."""
    if name in TYPE_NORMS:
        return ("kind",)
    return ("", "batch") if name in GRAPH_NORMS else ("",)


def test_low_precision(tmp_path: Path):
    """PyG's dtypes; at most twice PyG's error, both against float64."""
    sweep = [
        (name, groups, parameters, autocast, dtype)
        for name in PRECISE
        for groups in calls(name)
        for parameters in (torch.float32, torch.bfloat16)
        for autocast in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    sweep = some(sweep, "precision", 2)

    def one(case: Any, data: Data, ready: Callable[..., Any], exact: bool = False) -> Any:
        name, groups, parameters, autocast, dtype = case
        norm, x = make_norm(name).to(parameters), (data.x + 1).to(dtype)
        norm, x = (norm.double(), x.double()) if exact else (norm, x)
        args = (data[groups],) if groups else ()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and not exact):
            try:
                return whole(ready(norm)(x, *args).detach())
            except RuntimeError as refusal:  # PyG refuses to mix these dtypes.
                return None if ready is not pyg_sar.distribute else refusal

    same = lambda norm: norm  # noqa: E731
    theirs = [one(case, graph(), same) for case in sweep]
    sweep = [case for case, out in zip(sweep, theirs, strict=True) if out is not None]
    theirs = [out for out in theirs if out is not None]
    assert len(sweep) > 2 * len(PRECISE)
    exact = [one(case, graph(), same, exact=True) for case in sweep]

    def worker(root: Path) -> list[Tensor]:
        data = pyg_sar.load_partition(root)
        return [one(case, data, pyg_sar.distribute) for case in sweep]

    for ours in parts(worker, 2, written(tmp_path, 2)):
        for case, mine, plain, right in zip(sweep, ours, theirs, exact, strict=True):
            assert isinstance(mine, Tensor) and mine.dtype == plain.dtype, (case, mine)
            limit = 2 * error(plain.double(), right) + 2 * torch.finfo(plain.dtype).eps
            assert error(mine.double(), right) <= limit, case


def test_large_mean_small_deviation(tmp_path: Path):
    """Mean 100, deviation 0.01: at most twice PyG's error in float32, both against float64.

    E[x^2] - E[x]^2 would cancel, as it does in PyG's HeteroBatchNorm (pitfall 6). In float64 the
    numbers of torch's norm are met within 1e-10.
    """
    count = 200
    draw = torch.Generator().manual_seed(3)
    values, cotangents = torch.randn(2, count, CHANNELS, generator=draw)
    groups = torch.arange(count) % TYPES
    data = Data(x=100 + 0.01 * values, batch=groups, kind=groups, edge_index=groups.new_zeros(2, 0))
    sweep = [(n, groups) for n in PRECISE if "running" not in n for groups in calls(n)]

    def one(case: Any, data: Data, ready: Callable[..., Any], dtype: Any) -> list[Tensor]:
        name, groups = case
        norm, x = ready(make_norm(name).to(dtype)), data.x.to(dtype).clone().requires_grad_()
        out = norm(x, *((data[groups],) if groups else ()))
        (out * cotangents.to(out.dtype)).sum().backward()
        return [whole(out.detach()).double(), whole(x.grad).double()]

    def worker(root: Path) -> list[Any]:
        data = pyg_sar.load_partition(root)
        kinds = torch.float32, torch.float64
        return [[one(c, data, pyg_sar.distribute, dtype) for dtype in kinds] for c in sweep]

    same = lambda norm: norm  # noqa: E731
    alone = [[one(c, data, same, kind) for kind in (torch.float64, torch.float32)] for c in sweep]
    for found in workers(worker, 2, written(tmp_path, 2, data)):
        for case, (ours, double), (exact, theirs) in zip(sweep, found, alone, strict=True):
            for mine, wide, right, plain in zip(ours, double, exact, theirs, strict=True):
                hetero = case[0].startswith("HeteroBatchNorm")
                limit = 8 * torch.finfo(torch.float32).eps
                assert error(mine, right) <= limit + 2 * error(plain, right) * (not hetero), case
                assert error(wide, right) <= TOLERANCE * 100 or hetero, case


# What travels, and what is kept ################################################


def test_nothing_per_row_is_kept_but_the_features(tmp_path: Path):
    names = [n for n in PRECISE if n in GRAPH_NORMS and "individually" not in n]

    def bytes_kept(name: str, x: Tensor) -> int:
        norm, kept = pyg_sar.distribute(make_norm(name)), {}

        def pack(tensor: Tensor) -> Tensor:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            kept[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = norm(x)
        assert out.requires_grad
        return sum(size for size in kept.values() if size >= x.to_local().size(0) * NUMBER)

    def worker(root: Path) -> tuple[dict[str, int], int]:
        x = pyg_sar.load_partition(root).x.requires_grad_()
        return {name: bytes_kept(name, x) for name in names}, x.to_local().size(0)

    data = Data(
        x=torch.randn(1000, CHANNELS, dtype=torch.float64),
        edge_index=torch.zeros(2, 0, dtype=torch.long),
    )
    for kept, rows in workers(worker, 2, written(tmp_path, 2, data)):
        assert {name: n for name, n in kept.items() if n > rows * CHANNELS * NUMBER} == {}


class Calls(pyg_sar.Ledger):
    """Notes the sizes of collectives of norms."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self.calls: list[tuple[str, int]] = []

    def transfer(
        self, label: Any, peer: int, *, sent: int = 0, received: int = 0, transport: str = ""
    ) -> None:
        assert peer == -1, "a norm has no business with a single peer"
        if label[2] == "statistics":
            self.calls.append((label[1], sent))


# Norm, numbers per graph forward and backward.
COSTS: Sequence[tuple[str, int, int]] = (
    ("GraphNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("InstanceNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("LayerNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("LayerNorm, node", 0, 0),
    ("PairNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("PairNorm, individually", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("HeteroBatchNorm", 1 + 2 * CHANNELS, 0),
    ("HeteroLayerNorm", 0, 0),
    ("BatchNorm1d", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("SyncBatchNorm", 1 + 2 * CHANNELS, 2 * CHANNELS),
    ("DiffGroupNorm", 1 + 6 * CHANNELS, 6 * CHANNELS),
)


def test_collectives_of_o_of_f_numbers(tmp_path: Path):
    """One each way, however many nodes; with a batch one more, and for its size one of a number.

    Evaluation has none.
    """

    def worker(root: Path) -> list[dict[str, Any]]:
        comm, data, outcome = pyg_sar.comm.current(), pyg_sar.load_partition(root), []
        for name, _, _ in COSTS:
            norm, found = pyg_sar.distribute(make_norm(name)), {}
            for groups in calls(name):
                args = (data[groups],) if groups else ()
                x = data.x.clone().requires_grad_()
                with Calls(comm) as ledger:
                    norm(x, *args).square().sum().backward()
                found[groups] = ledger.calls
            if "BatchNorm" in name:
                with Calls(comm) as ledger:
                    norm.eval()(data.x, *args)
                assert ledger.calls == []
            outcome.append(found)
        return outcome

    for outcome in workers(worker, 2, written(tmp_path, 2)):
        for (name, forward, backward), found in zip(COSTS, outcome, strict=True):
            for groups, travelled in found.items():
                count = TYPES if groups == "kind" else 5 if groups else 1
                sums = [("backward", count * backward * NUMBER)] if backward else []
                # Of several groups first counts and sums, then squares about the means.
                steps = [1 + CHANNELS, CHANNELS] if groups else [forward]
                there = [("forward", count * step * NUMBER) for step in steps if forward]
                if groups == "batch" and forward:
                    there = [("forward", NUMBER), *there]
                assert travelled == [*there, *sums], (name, groups)


# Mistakes #####################################################################

MISTAKES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "size too small": (
        "GraphNorm",
        lambda norm, data: norm(data.x, data.batch, 2),
        "has rows of the groups",
    ),
    "negative": ("PairNorm", lambda norm, data: norm(data.x, data.batch - 3), "has rows of the"),
    "batch of another length": (
        "GraphNorm",
        lambda norm, data: norm(data.x, torch.zeros(3, dtype=torch.long)),
        "one group (int64) for each of the",
    ),
    "batch of another dtype": (
        "LayerNorm",
        lambda norm, data: norm(data.x, data.batch.int()),
        "got torch.int32",
    ),
    "features of three axes": (
        "GraphNorm",
        lambda norm, data: norm(data.x.unsqueeze(1)),
        "expected node features 'x' of shape [num_nodes, channels], got [",
    ),
    "types out of range": (
        "HeteroBatchNorm",
        lambda norm, data: norm(data.x, data.kind + 3),
        "has rows of the groups",
    ),
    "channels": (
        "SyncBatchNorm",
        lambda norm, data: norm(data.x[:, :3]),
        "expected 5 channels on axis 1, got a tensor of shape [",
    ),
    "one axis": ("BatchNorm1d", lambda norm, data: norm(data.x[:, 0]), "2D or 3D"),
}


def test_mistakes_end_all_workers(tmp_path: Path):
    def worker(root: Path) -> list[str]:
        data, found = pyg_sar.load_partition(root), []
        for name, call, text in MISTAKES.values():
            with pytest.raises(ValueError) as caught:
                call(pyg_sar.distribute(make_norm(name)), data)
            found.append("" if text in str(caught.value) else f"{name}: {caught.value}")
        return found

    for found in workers(worker, 2, written(tmp_path, 2)):
        assert not any(found), found


class Layer(gnn.MessagePassing):
    """A layer whose message has a norm."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(CHANNELS, CHANNELS), norm)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.block(x_j)


@pytest.mark.filterwarnings("ignore:input's size at dim=0 does not match num_features")
def test_norms_of_other_classes_within_layers(tmp_path: Path):
    """A layer with one computes as PyG does, on tensors of the whole graph, and says so."""
    sizes = {"HeteroBatchNorm": (CHANNELS, 2), "DiffGroupNorm": (CHANNELS, 2)}
    sizes |= dict.fromkeys(("GraphSizeNorm", "MeanSubtractionNorm", "PairNorm"), ())
    own = lambda kind: type("Own", (kind,), {})(*sizes.get(kind.__name__, (CHANNELS,)))  # noqa: E731
    made = [own(kind) for kind in NORMS if kind is not torch.nn.SyncBatchNorm]
    made += [torch.nn.LazyBatchNorm1d(affine=False, track_running_stats=False)]
    kinds = list(NORMS)

    def outcome(norm: torch.nn.Module, data: Any, ready: Any) -> Any:
        torch.manual_seed(4)
        layer = ready(Layer(copy.deepcopy(norm)).double())
        try:
            x = data.x.clone().requires_grad_()
            out = layer(x, data.edge_index)
            (out * torch.linspace(-1, 1, CHANNELS, dtype=out.dtype)).square().sum().backward()
            return [whole(t.detach()) for t in (out, x.grad, *layer.buffers())]
        except (TypeError, ValueError) as error:  # One wants types, one a GPU.
            return str(error)

    def ready(layer: torch.nn.Module) -> torch.nn.Module:
        with pytest.warns(OneShotWarning, match="normalises over rows by 'block.1'"):
            return pyg_sar.distribute(layer)

    def worker(root: Path) -> list[Any]:
        data = pyg_sar.load_partition(root)
        for kind in kinds:
            of_ours = type("Own", (NORMS[kind],), {})(*sizes.get(kind.__name__, (CHANNELS,)))
            pyg_sar.distribute(Layer(of_ours))
        for norm, x in (
            (torch.nn.InstanceNorm1d(CHANNELS, affine=True), data.x),
            (torch.nn.InstanceNorm1d(CHANNELS, track_running_stats=True), data.x),
            (torch.nn.InstanceNorm1d(CHANNELS + 1), data.x),
        ):
            with pytest.raises(ValueError, match="within a layer"):
                pyg_sar.distribute(Layer(norm).double())(x, data.edge_index)
        with pytest.raises(ValueError, match="derived from SyncBatchNorm"):
            pyg_sar.distribute(Layer(own(torch.nn.SyncBatchNorm)))
        with pytest.raises(ValueError, match="'process_group' of its own"):
            norm = torch.nn.SyncBatchNorm(CHANNELS, process_group=object())
            pyg_sar.distribute(norm)
        return [outcome(norm, data, ready) for norm in made]

    root = written(tmp_path, 2)
    expected = [outcome(norm, graph(), lambda layer: layer) for norm in made]
    for found in processes(worker, 2, root):  # Parts share what notes warnings.
        for norm, one, right in zip(made, found, expected, strict=True):
            message = f"{type(norm).__mro__[1].__name__}"
            if isinstance(right, str) or isinstance(one, str):
                assert one == right, message
            else:
                torch.testing.assert_close(
                    one, right, rtol=1e-9, atol=1e-9, msg=lambda m, n=message: f"{n}: {m}"
                )


def test_every_norm_of_pyg_is_shown():
    """A norm that a new PyG brings must be looked at."""
    assert set(gnn.norm.__all__) - {"MessageNorm"} <= {name.split(",")[0] for name in ALL}


@pytest.mark.skipif(ops.why_missing() is not None, reason=str(ops.why_missing()))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 3), (1, 1), (33, 257), (17_000, 5)])
def test_kernels_of_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(3, rows, 2 * width, generator=draw, dtype=torch.float64).add(1e3).to(dtype)
    x, g, _ = given[..., :width]  # rows that lie apart
    shift, *columns = torch.randn(4, width, generator=draw, dtype=torch.float64).to(dtype).double()
    shift = (shift + 1e3).float().double()
    scale, offset, factor = columns
    right = x.double(), g.double()
    centred, away = right[0] - shift, right[1] - offset
    mean = right[0].mean(0) if rows else torch.zeros(width, dtype=torch.float64)
    kernels, wide = torch.ops.pyg_sar, torch.float64 if dtype == torch.float64 else torch.float32
    least = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    sums = torch.finfo(wide).eps * 64
    moments, products = kernels.column_moments(x), kernels.column_products(g, x, shift)
    made = kernels.scale_rows(x, shift, scale, offset)
    both = kernels.scale_rows(x, shift, scale, offset, g, factor)
    for found, expected, most in (
        (moments[0], mean, sums),
        (moments[1], (right[0] - mean).square().sum(0), sums),
        (products[0], right[1].sum(0), sums),
        (products[1], (right[1] * centred).sum(0), sums * max(rows, 1) ** 0.5),
        (made, centred * scale + offset, least),
        (both, centred * scale + away * factor, least),
    ):
        most *= float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=most)
    for call in (
        (kernels.column_moments.default, (x,)),
        (kernels.column_products.default, (g, x, shift)),
        (kernels.scale_rows.default, (x, shift, scale, offset, g, factor)),
    ):
        torch.library.opcheck(*call)
    with pytest.raises(ValueError, match=f"'shift' to have {width} numbers"):
        ops.run(kernels.scale_rows, x, shift[:-1], scale, offset)
    with pytest.raises(ValueError, match="'gradient' of shape"):
        ops.run(kernels.column_products, g.repeat(2, 2), x, shift)


def test_a_dropout_after_a_norm_follows_the_order_in_memory(tmp_path: Path) -> None:
    """Of rows that lie in memory column by column, and of those of PyG's norm without a batch."""

    def dropped(data: Data, ready: Callable[..., Any]) -> list[Tensor]:
        found = []
        for make in (*GRAPH_NORMS.values(), lambda: torch.nn.RMSNorm(CHANNELS)):
            norm = ready(make().double())
            for x in (data.x, data.x.t().contiguous().t()):
                torch.manual_seed(3)
                found.append(torch.nn.functional.dropout(norm(x), 0.5).detach())
        return found

    alike(dropped, graph(), written(tmp_path, 2), 2, parts)
