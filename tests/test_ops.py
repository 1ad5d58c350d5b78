"""The C++ kernels against loops and PyTorch, and layers that use them against layers that don't."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, OUT, Job, Partitions, Sweep, make_graph, single_process, threads
from torch import Tensor
from torch.nn import Linear
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy, ops
from pyg_sar.ops import KernelWarning, gather_sum_
from pyg_sar.shard import shards_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}
WIDTHS = (1, 3, 7, 100, 257)


@pytest.fixture
def kernels() -> None:
    """Skips where the kernels were not built."""
    reason = ops.why_missing()
    if reason is not None:
        pytest.skip(f"no C++ kernels: {reason}")


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def problem(
    width: int,
    dtype: torch.dtype,
    edges: int = 300,
    index: torch.dtype = torch.int32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Edges with repeated sources and targets, a hub, and rows that no edge touches."""
    draw = torch.Generator().manual_seed(seed)
    target = (torch.rand(edges, generator=draw) ** 3 * 20).long().sort().values * 2
    targets, position = torch.unique_consecutive(target, return_inverse=True)
    return {
        "out": torch.randn(45, width, generator=draw, dtype=torch.float64).to(dtype),
        "rows": torch.randn(30, width, generator=draw, dtype=torch.float64).to(dtype),
        "source": torch.randint(28, (edges,), generator=draw).to(index),
        "position": position.to(index),
        "targets": targets,
        "weight": torch.randn(edges, generator=draw, dtype=torch.float64).to(wide(dtype)),
    }


def looped(given: dict[str, Tensor], weighted: bool) -> Tensor:
    """Edge by edge, in float64."""
    out, rows = given["out"].double().clone(), given["rows"].double()
    for e in range(given["source"].numel()):
        scale = float(given["weight"][e]) if weighted else 1.0
        target = int(given["targets"][int(given["position"][e])])
        out[target] += scale * rows[int(given["source"][e])]
    return out


def gathered(given: dict[str, Tensor], weighted: bool, native: bool) -> Tensor:
    copied = {**given, "out": given["out"].clone()}
    if not weighted:
        copied["weight"] = None  # type: ignore[assignment]
    return gather_sum_(**copied, native=native)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


# The kernel ###################################################################


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_equal_a_loop(dtype: torch.dtype, native: bool, request: pytest.FixtureRequest):
    if native:
        request.getfixturevalue("kernels")
    for width in WIDTHS:
        for weighted in (False, True):
            index = torch.int64 if width % 2 else torch.int32
            given = problem(width, dtype, index=index, seed=width)
            found = gathered(given, weighted, native)
            assert found.dtype == dtype
            where = (width, weighted)
            assert distance(found, looped(given, weighted)) <= TOLERANCES[dtype], where


def test_any_number_of_threads_gives_the_same_sums(kernels: None):
    before = torch.get_num_threads()
    given = problem(64, torch.float32, edges=6000)
    expected = looped(given, weighted=False)
    found = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(gathered(given, weighted=False, native=True))
    finally:
        torch.set_num_threads(before)
    assert distance(found[0], expected) <= 1e-5
    assert all(torch.equal(found[0], other) for other in found)


def test_one_target_that_has_all_edges(kernels: None):
    """Threads other than the first find nothing to do."""
    before = torch.get_num_threads()
    given = problem(64, torch.float64, edges=6000)
    given["position"].zero_()
    try:
        torch.set_num_threads(3)
        found = gathered(given, weighted=True, native=True)
    finally:
        torch.set_num_threads(before)
    assert distance(found, looped(given, weighted=True)) <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_error_is_at_most_twice_that_of_pytorch(dtype: torch.dtype, kernels: None):
    given = problem(33, dtype, edges=2000)
    expected = looped(given, weighted=False)
    found = distance(gathered(given, weighted=False, native=True), expected)
    plain = given["out"].clone()
    plain.index_add_(
        0, given["targets"][given["position"].long()], given["rows"][given["source"].long()]
    )
    assert found <= 2 * distance(plain, expected)


@pytest.mark.parametrize("native", [True, False])
def test_strides_and_views(native: bool, request: pytest.FixtureRequest):
    """Rows in columns of a wider tensor, transposed, expanded; results into a packed buffer."""
    if native:
        request.getfixturevalue("kernels")
    given = problem(7, torch.float64)
    expected = looped(given, weighted=True)
    rows = given["rows"]
    layouts = {
        "columns": torch.cat([rows, rows], dim=1)[:, 7:],
        "transposed": rows.t().contiguous().t(),
        "every other row": rows.repeat_interleave(2, 0)[::2],
    }
    for name, view in layouts.items():
        assert not view.is_contiguous(), name
        found = gathered({**given, "rows": view}, weighted=True, native=native)
        assert distance(found, expected) <= 1e-14, name
    packed = torch.full((45, 20), 3.0, dtype=torch.float64)
    packed[:, 4:11] = given["out"]
    gather_sum_(**{**given, "out": packed[:, 4:11]}, native=native)
    assert distance(packed[:, 4:11], expected) <= 1e-14
    assert bool((packed[:, :4] == 3).all() and (packed[:, 11:] == 3).all())
    same = rows[:1].expand(30, -1)
    found = gathered({**given, "rows": same}, weighted=True, native=native)
    assert distance(found, looped({**given, "rows": same}, weighted=True)) <= 1e-14
    strided = {name: given[name].repeat_interleave(2)[::2] for name in ("source", "weight")}
    assert distance(gathered({**given, **strided}, True, native), expected) <= 1e-14


@pytest.mark.parametrize("native", [True, False])
def test_nothing_to_add(native: bool, request: pytest.FixtureRequest):
    if native:
        request.getfixturevalue("kernels")
    given = problem(5, torch.float32)
    none = {name: given[name][:0] for name in ("source", "position", "targets", "weight")}
    for empty in (
        {**given, **none},
        {**given, **none, "rows": given["rows"][:0]},
        {**given, **none, "out": given["out"][:0]},
        {**given, "out": given["out"][:, :0], "rows": given["rows"][:, :0]},
    ):
        found = gathered(empty, weighted=True, native=native)
        assert torch.equal(found, empty["out"])


def test_nan_and_infinity_arrive_where_they_belong(kernels: None):
    given = problem(3, torch.float32)
    given["rows"][4, 0], given["rows"][5, 1] = float("nan"), float("inf")
    expected = looped(given, weighted=False)
    found = gathered(given, weighted=False, native=True).double()
    assert bool(expected.isnan().any()) and bool(expected.isinf().any())
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "source too large": ({"source": lambda v: v.fill_(30)}, IndexError, "'source' names a row"),
    "source negative": ({"source": lambda v: v.fill_(-1)}, IndexError, "'source' names a row"),
    "position too large": ({"position": lambda v: v + 99}, IndexError, "'position' is outside"),
    "position negative": ({"position": lambda v: v - 1}, IndexError, "'position' is outside"),
    "not sorted": ({"position": lambda v: v.flip(0)}, ValueError, "sorted by 'position'"),
    "targets too large": ({"targets": lambda v: v + 45}, IndexError, "ascending 'targets'"),
    "targets negative": ({"targets": lambda v: v - 45}, IndexError, "ascending 'targets'"),
    "targets twice": ({"targets": lambda v: v // 4}, IndexError, "ascending 'targets'"),
    "widths": ({"rows": lambda v: v[:, 1:]}, ValueError, r"\[N, F\] and \[M, F\]"),
    "axes": ({"rows": lambda v: v[0]}, ValueError, r"\[N, F\] and \[M, F\]"),
    "dtypes": ({"rows": lambda v: v.double()}, TypeError, "one dtype"),
    "half": (
        {"rows": lambda v: v.half(), "out": lambda v: v.half()},
        TypeError,
        "float32, float64 or bfloat16",
    ),
    "index dtype": (
        {"source": lambda v: v.short(), "position": lambda v: v.short()},
        TypeError,
        "int32 or int64",
    ),
    "targets dtype": ({"targets": lambda v: v.int()}, TypeError, "int64 'targets'"),
    "lengths": ({"source": lambda v: v[1:]}, ValueError, r"of shape \[E\]"),
    "weights": ({"weight": lambda v: v[1:]}, ValueError, "for each of the 300 edges"),
    "weight dtype": ({"weight": lambda v: v.double()}, TypeError, "'weight' of dtype"),
    "expanded out": (
        {"out": lambda v: v[:1].expand(45, -1)},
        RuntimeError,
        "refers to a single memory location",
    ),
    "columns of out apart": (
        {"out": lambda v: v.t().contiguous().t()},
        ValueError,
        "lie in one piece",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises(name: str, kernels: None):
    changes, kind, text = BAD[name]
    given = problem(6, torch.float32)
    given.update({key: change(given[key]) for key, change in changes.items()})
    with pytest.raises(kind, match=text):
        gather_sum_(**given, native=True)


@pytest.mark.parametrize("name", ["widths", "axes", "dtypes", "lengths", "weights"])
def test_bad_shapes_raise_without_the_kernel(name: str):
    changes, kind, text = BAD[name]
    given = problem(6, torch.float32)
    given.update({key: change(given[key]) for key, change in changes.items()})
    with pytest.raises(kind, match=text):
        gather_sum_(**given, native=False)


def test_overlap_raises(kernels: None):
    given = problem(6, torch.float32)
    with pytest.raises(RuntimeError, match="overlap|single memory location"):
        gather_sum_(**{**given, "rows": given["out"]}, native=True)


def test_a_gradient_is_not_lost_silently():
    given = problem(6, torch.float32)
    given["rows"].requires_grad_()
    with pytest.raises(ValueError, match="not recorded by autograd"):
        gather_sum_(**given)
    with torch.no_grad():
        gather_sum_(**given)


def test_the_operator_is_registered_as_torch_wants_it(kernels: None):
    for dtype in DTYPES:
        given = problem(4, dtype, edges=20)
        for weight in (None, given["weight"]):
            arguments = tuple({**given, "weight": weight}.values())
            torch.library.opcheck(torch.ops.pyg_sar.gather_sum_.default, arguments)


# Layers #######################################################################


class Default(MessagePassing):
    """PyG's default message, over nodes of several axes; counts the rows that messages had."""

    def __init__(self, aggr: Any = "sum", **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        self.rows: list[int] = []
        self.scale = 1.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        self.rows.append(x_j.size(0))
        return x_j if self.scale == 1.0 else x_j * self.scale


class Heads(torch.nn.Module):
    """Sums rows of two axes."""

    def __init__(self, aggr: Any) -> None:
        super().__init__()
        self.conv = Default(aggr, node_dim=0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, CHANNELS // 2), edge_index)


FUSED: dict[str, Any] = {
    "sage, mean": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage, sum": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="sum", project=True),
    "gin": lambda: gnn.GINConv(Linear(CHANNELS, OUT), train_eps=True),
    "simple": lambda: gnn.SimpleConv("mean", combine_root="cat"),
    "graph conv": lambda: gnn.GraphConv(CHANNELS, OUT),
    "default, sum and mean": lambda: Default(["sum", "mean"]),
    "default, two axes": lambda: Heads("mean"),
}
SWITCHES = (
    SARPolicy(),
    SARPolicy(mode=2, prefetch=2),
    SARPolicy(prefetch=0, message_budget=1),
    SARPolicy(kernels="off"),
)


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("ops"))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_layers_are_exact_with_kernels_and_without(world: int, partitions: Partitions):
    """One part has no node."""
    data = make_graph()
    part = torch.arange(data.num_nodes) % max(world - 1, 1)
    sweep = Sweep(world)
    for name, make in FUSED.items():
        torch.manual_seed(0)
        root = partitions(data, world, part)
        sweep.add(name, Job(make().double(), root, policies=SWITCHES), data)
    sweep.check()


def rows_of_messages(root: Path, policy: SARPolicy, aggr: Any) -> tuple[list[int], int]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(Default(aggr), policy)
    x = data.x.requires_grad_()
    layer(x, data.edge_index)  # is analysed
    layer.rows.clear()
    layer(x, data.edge_index).square().sum().backward()
    return layer.rows, data.edge_index.size(1)


@pytest.mark.parametrize("aggr", ["sum", "mean", ["mean", "sum"]])
@pytest.mark.parametrize("mode", [1, 2])
def test_no_message_is_materialized(mode: int, aggr: Any, partitions: Partitions, kernels: None):
    """One edge of each shard is tried; without kernels every edge has its message."""
    world = 3
    root = partitions(make_graph(), world, "random")
    for rows, _ in threads(rows_of_messages, world, root, SARPolicy(mode=mode), aggr):
        assert rows == [1] * world
    off = SARPolicy(mode=mode, kernels="off")
    for rows, edges in threads(rows_of_messages, world, root, off, aggr):
        assert sum(rows) == edges


@pytest.mark.parametrize("aggr", ["max", ["sum", "max"], "var", "median"])
def test_other_aggregations_take_the_general_path(aggr: Any, partitions: Partitions):
    root = partitions(make_graph(), 2, "random")
    for rows, edges in threads(rows_of_messages, 2, root, SARPolicy(), aggr):
        assert sum(rows) >= edges


def after_a_change(root: Path, hooked: bool) -> tuple[Tensor, Tensor, int]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(Default())
    seen = []
    if hooked:
        layer.register_message_forward_hook(lambda *given: seen.append(given[2].size(0)))
    with torch.no_grad():
        layer(data.x, data.edge_index)
        layer.scale = 2.0
        return layer(data.x, data.edge_index), data.n_id, sum(seen)


def test_a_message_that_changed_is_noticed(partitions: Partitions):
    """Numbers don't make a layer be analysed again."""
    data = make_graph()
    expected = 2 * single_process(Default(), data).out
    for out, ids, _ in threads(after_a_change, 3, partitions(data, 3, "random"), False):
        torch.testing.assert_close(out, expected[ids])


def test_message_hooks_see_every_message(partitions: Partitions):
    data = make_graph()
    found = threads(after_a_change, 2, partitions(data, 2, "random"), True)
    assert sum(seen for _, _, seen in found) >= 2 * data.num_edges


def transposed(root: Path) -> None:
    """Each shard's transposed structure holds the shard's edges, and is made once."""
    data = pyg_sar.load_partition(root)
    shards = shards_of(data.edge_index)
    for owner in range(data.edge_index.plan.world_size):
        forward, back = shards.segments(owner), shards.transposed(owner)
        there = [forward.targets[forward.position].long(), forward.source.long()]
        here = [back.source.long(), back.targets[back.position]]
        assert sorted(zip(*map(Tensor.tolist, there), strict=True)) == sorted(
            zip(*map(Tensor.tolist, here), strict=True)
        )
        assert bool((back.position.diff() >= 0).all() and (back.targets.diff() > 0).all())
        assert shards.transposed(owner) is back


def test_transposed_shards_hold_the_same_edges(partitions: Partitions):
    threads(transposed, 3, partitions(make_graph(), 3, "random"))


# Without the library ##########################################################


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if there had been no compiler."""
    monkeypatch.setattr(ops, "_LIBRARY", "_not_built.so")
    ops.why_missing.cache_clear()
    ops.warn_if_missing.cache_clear()
    yield
    monkeypatch.undo()
    ops.why_missing.cache_clear()
    ops.warn_if_missing.cache_clear()


def test_one_warning_and_the_same_results(
    without_kernels: None, partitions: Partitions, tmp_path: Path
):
    data: Data = make_graph()
    sweep = Sweep(2)
    root = partitions(data, 2, "random")
    for make in (FUSED["sage, mean"], FUSED["gin"]):
        torch.manual_seed(0)
        sweep.add("without", Job(make().double(), root, policies=[SARPolicy()]), data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sweep.check()
    texts = [str(w.message) for w in caught if w.category is KernelWarning]
    assert len(texts) == 1 and "not built" in texts[0] and "kernels='off'" in texts[0]
    given = problem(3, torch.float64)
    assert distance(gather_sum_(**given), looped(problem(3, torch.float64), True)) <= 1e-14
    with pytest.raises(RuntimeError, match="no C\\+\\+ kernels"):
        gather_sum_(**given, native=True)


def test_kernels_off_does_not_warn(without_kernels: None, partitions: Partitions):
    root = partitions(make_graph(), 2, "random")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads(rows_of_messages, 2, root, SARPolicy(kernels="off"), "sum")


def test_a_library_that_cannot_be_loaded_is_told(
    without_kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(ops, "_LIBRARY", str(broken))
    ops.why_missing.cache_clear()
    assert "can't be loaded" in str(ops.why_missing())


def test_the_switch_is_checked():
    with pytest.raises(ValueError, match="'kernels' to be 'auto' or 'off'"):
        SARPolicy(kernels="on")  # type: ignore[arg-type]
