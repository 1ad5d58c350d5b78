"""Triton's kernels against loops in float64: on a GPU, or by Triton's interpreter on the CPU.

The interpreter is slow: problems are small. ``make test-full`` and ``make test-gpu`` install it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from attention_problems import looped, problem, shards_of
from oracle import Job, Partitions, Sweep, make_graph
from test_attention_ops import TOLERANCES as ATTENTION_TOLERANCES
from test_attention_ops import computed, distance, worst
from test_devices import table_of_gpus
from test_ops import TOLERANCES, gathered
from test_ops import looped as looped_sums
from test_ops import problem as sums_problem
from torch import Tensor
from torch_geometric import nn as gnn

from pyg_sar import SARPolicy
from pyg_sar.kernels import KernelWarning, on_gpu, ops
from pyg_sar.kernels.attention_ops import (
    attention_,
    attention_backward_sources_,
    attention_backward_targets_,
    keep_factors,
)
from pyg_sar.kernels.attention_terms import AttentionGradients, AttentionState, Cotangent
from pyg_sar.kernels.scores import SCORES

ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] == "0"
HALF = torch.float16
BY_CHUNKS = ("gather_sum_", "edge_dot", "attention_", "attention_backward_")
OPERATORS = (*BY_CHUNKS, "extremum_", "extremum_backward_")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, HALF)
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (make test-full, or pip install triton)",
)


def carried(operator: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The operator on copies of its tensors on a device, which are copied back."""

    @wraps(operator)
    def run(*given: Any, **how: Any) -> Any:
        tensors = [t if isinstance(t, Tensor) else None for t in given]
        there = [
            g if t is None else t.to(device, copy=True) for g, t in zip(given, tensors, strict=True)
        ]
        found = operator(*there, **how)
        for tensor, copy in zip(tensors, there, strict=True):
            if tensor is not None and tensor.is_floating_point():
                tensor.copy_(copy)
        return found.cpu() if isinstance(found, Tensor) else found

    return run


def take_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the kernels take them: by the interpreter, or carried to the GPU and back."""
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    if ON_GPU:
        real = on_gpu._operators()
        taken = {name: carried(getattr(real, name), "cuda") for name in OPERATORS}
        there = SimpleNamespace(**taken, fits=real.fits)
        monkeypatch.setattr(on_gpu, "_operators", lambda: there)


def go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has edges of small graphs fill chunks."""
    for name in BY_CHUNKS:
        operator = getattr(on_gpu._operators(), name)
        operator = getattr(operator, "__wrapped__", operator)
        monkeypatch.setattr(operator, "__kwdefaults__", {"chunk": 16})


@pytest.fixture(autouse=True)
def kernels_of_gpus(monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[None]:
    """The kernels take the CPU's tensors, and don't check themselves first."""
    take_tensors_of_the_cpu(monkeypatch)
    if "moved" not in request.fixturenames:
        go_in_chunks(monkeypatch)
    monkeypatch.setattr(on_gpu, "_agrees", lambda *given: True)
    with numpy.errstate(all="ignore"):  # Infinite numbers on the way are what a GPU computes, too.
        yield


# Sums #########################################################################


def by_kernel(given: dict[str, Tensor], weighted: bool) -> Tensor:
    return gathered(given, weighted, native=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_equal_a_loop(dtype: torch.dtype):
    for width, weighted in ((1, False), (7, True), (130, True)):
        index = torch.int64 if width % 2 else torch.int32
        given = sums_problem(width, dtype, 150, index=index, seed=width)
        found = by_kernel(given, weighted)
        assert found.dtype == dtype
        most = {**TOLERANCES, HALF: 2e-3}[dtype]
        assert distance(found, looped_sums(given, weighted)) <= most, (width, weighted)


def test_sums_of_views_and_of_first_rows():
    given = sums_problem(7, torch.float64, 80)
    expected, rows = looped_sums(given, True), given["rows"]
    for view in (torch.cat([rows, rows], 1)[:, 7:], rows.t().contiguous().t()):
        assert distance(by_kernel({**given, "rows": view}, True), expected) <= 1e-14
    packed = torch.full((45, 20), 3.0, dtype=torch.float64)
    packed[:, 4:11] = given["out"]
    ops.gather_sum_(**{**given, "out": packed[:, 4:11]})
    assert distance(packed[:, 4:11], expected) <= 1e-14
    assert bool((packed[:, :4] == 3).all() and (packed[:, 11:] == 3).all())
    first = {**given, "targets": torch.arange(given["offsets"].numel() - 1)}
    found = by_kernel({**given, "targets": None}, True)  # type: ignore[dict-item]
    assert distance(found, looped_sums(first, True)) <= 1e-14


def test_nothing_to_add():
    given = sums_problem(5, torch.float32, 40)
    none = {name: given[name][:0] for name in ("source", "targets", "weight", "edges")}
    none["offsets"] = given["offsets"][:1]
    for empty in ({**given, **none}, {**given, "out": given["out"][:, :0], "rows": rows_of(given)}):
        assert torch.equal(by_kernel(empty, True), empty["out"])


def rows_of(given: dict[str, Tensor]) -> Tensor:
    return given["rows"][:, :0]


def test_nan_and_infinity_arrive_where_they_belong():
    given = sums_problem(3, torch.float32, 80)
    given["rows"][4, 0], given["rows"][5, 1] = float("nan"), float("inf")
    expected = looped_sums(given, False)
    assert bool(expected.isnan().any()) and bool(expected.isinf().any())
    found = by_kernel(given, False).double()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inner_products_equal_a_loop(dtype: torch.dtype):
    for width in (3, 130):
        given = sums_problem(width, dtype, 150, seed=width)
        place = given["targets"].repeat_interleave(given["offsets"].diff())
        ends = given["rows"][given["source"].long()].double(), given["out"][place].double()
        expected = torch.empty(150, dtype=torch.float64)
        expected[given["edges"].long()] = (ends[0] * ends[1]).sum(1)
        at = given["source"], given["offsets"], given["targets"], given["edges"]
        found = ops.edge_dot(given["rows"], given["out"], *at)
        assert distance(found, expected) <= min(TOLERANCES.get(dtype, 2e-6), 2e-6)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("largest", [True, False])
def test_extrema_equal_a_loop(dtype: torch.dtype, largest: bool):
    """Ties, NaN, infinite rows; two shards; and the gradient."""
    given = sums_problem(5, dtype, 200)
    assert int(given["offsets"].diff().max()) > 64  # edges of a target, which are read in blocks
    rows = given["rows"].round()
    rows[3, 1], rows[4, 2], rows[5, 3] = float("nan"), float("inf"), -float("inf")
    sign = 1.0 if largest else -1.0
    best = torch.full((45, 5), -sign * float("inf"), dtype=dtype)
    ties = torch.zeros_like(best)
    place = given["targets"].repeat_interleave(given["offsets"].diff())
    at = given["source"], given["offsets"], given["targets"]
    for _ in range(2):  # Each edge twice.
        ops.extremum_(best, ties, rows, *at, largest)
    found, count = best.clone(), torch.zeros_like(ties)
    for target in range(45):
        own = rows[given["source"].long()[place == target]]
        none = torch.full((5,), -sign * float("inf"), dtype=dtype)
        expected = (own * sign).amax(0) * sign if own.numel() else none
        torch.testing.assert_close(found[target], expected, rtol=0, atol=0, equal_nan=True)
        count[target] = 2 * (own == expected).sum(0)
    assert torch.equal(ties, count)
    order = given["source"].long().argsort(stable=True)
    sources, counts = given["source"].long()[order].unique(return_counts=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    gradient, total = torch.randn(45, 5, dtype=dtype), torch.ones(30, 5, dtype=dtype)
    hits = ops.extremum_backward_(total, rows, gradient, best, place[order].int(), offsets, sources)
    reached = rows[given["source"].long()] == best[place]
    expected = torch.ones(30, 5, dtype=dtype)
    expected.index_add_(0, given["source"].long(), gradient[place] * reached)
    assert int(hits) == int(reached.sum())
    assert distance(total, expected.double()) <= TOLERANCES[dtype]


@pytest.mark.skipif(ON_GPU, reason="an assertion ends the process's use of the GPU")
def test_bad_shapes_and_indices_raise():
    given = sums_problem(6, torch.float32, 60)
    for change, kind, text in (
        ({"rows": given["rows"][:, 1:]}, ValueError, r"of shapes \[N, F\] and \[M, F\]"),
        ({"rows": given["rows"].double()}, TypeError, "one dtype"),
        ({"weight": given["weight"][1:]}, ValueError, "for each of the 60 edges"),
        ({"out": given["out"].t().contiguous().t()}, ValueError, "lie in one piece"),
        ({"out": given["out"][:1].expand(45, -1)}, ValueError, "are the same memory"),
    ):
        with pytest.raises(kind, match=text):
            ops.gather_sum_(**{**given, **change})
    for name, bad in (("source", 30), ("edges", 60), ("targets", 45), ("offsets", 61)):
        wrong = given[name].clone()
        wrong[-1] = bad
        with pytest.raises(RuntimeError, match=f"'{name}'"):
            ops.gather_sum_(**{**given, name: wrong})


# Attention ####################################################################

CASES = (  # heads, channels, features, p, shards
    (1, 1, 0, 0.0, 1),
    (4, 8, 0, 0.6, 2),
    (3, 17, 2, 0.4, 1),
)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_gradients_equal_a_loop(kind: str, dtype: torch.dtype):
    for number, case in enumerate(CASES if dtype == torch.float64 else CASES[2:]):
        heads, channels, features, p, shards = case
        given = problem(kind, heads, channels, features, p, dtype, 45, 5, 4, seed=number)
        found = computed(given, None, shards)  # type: ignore[arg-type]
        apart, name = worst(found, looped(given))
        assert apart <= {**ATTENTION_TOLERANCES, HALF: 2e-4}[dtype], (case, name)


@pytest.mark.parametrize("kind", [name for name, score in SCORES.items() if score.softmax])
def test_rows_are_read_where_they_lie(kind: str):
    """Among others, by int64 places; keys that are the values; targets that occur; some wanted."""
    given = problem(kind, 3, 5, 2, 0.3, edges=30, sources=5, targets=4, own_key=False)
    how: dict[str, Any] = {"squeezed": True, "index": torch.int64, "places": torch.int64}
    found = computed(given, None, 2, ("value", "query", "edge_attr"), **how)  # type: ignore[arg-type]
    assert worst(found, looped(given))[0] <= 1e-11


def test_which_heads_are_kept_may_be_told_by_bits():
    hashed = problem("dot", 34, 2, 0, 0.5, edges=30, sources=5, targets=4)
    a = hashed.attention
    assert a.drop_key is not None
    kept = keep_factors(a.drop_key, 34, a.seed, a.p) != 0
    words = torch.zeros(kept.size(0), 2, dtype=torch.long)
    for head in range(34):
        words[:, head // 32] |= kept[:, head].long() << (head % 32)
    told = replace(hashed, attention=replace(a, drop_key=words.int(), seed=5))
    results = [computed(given, None) for given in (told, hashed)]  # type: ignore[arg-type]
    assert distance(results[0][0], results[1][0]) <= 1e-14  # Another kernel, compiled by itself.
    for name, gradient in results[1][1].items():
        assert distance(results[0][1][name], gradient) <= 1e-14, name


def test_additive_scores_without_a_query():
    given = problem("additive", 2, 3, 2, edges=40, sources=6, targets=5)
    given = replace(given, attention=replace(given.attention, query=None))
    assert worst(computed(given, None), looped(given))[0] <= 1e-12  # type: ignore[arg-type]


def test_no_edges():
    for kind in ("additive", "gatv2"):
        given = problem(kind, edges=0, sources=3, targets=4, features=2)
        out, found = computed(given, None)  # type: ignore[arg-type]
        assert not bool(out.any()) and not any(bool(t.any()) for t in found.values())


@pytest.mark.parametrize("kind", ["additive", "dot"])
def test_large_scores_stay_finite(kind: str):
    for scale in (1e4, -1e4):
        given = problem(kind, 2, 4, dtype=torch.float32, edges=30, sources=4, targets=3)
        larger = "key" if kind != "gatv2" else "att"
        changed = {larger: given.attention.tensors()[larger] * scale}
        given = replace(given, attention=replace(given.attention, **changed))
        out, found = computed(given, None, shards=2)  # type: ignore[arg-type]
        assert all(bool(t.isfinite().all()) for t in (out, *found.values()))
        assert distance(out, looped(given)[0]) <= 2e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinite_scores_give_what_pytorch_gives(bad: float):
    given = problem("additive", 2, 4, dtype=torch.float32, edges=40, sources=6, targets=5)
    key = given.attention.tensors()["key"].clone()
    key[2, 1] = bad
    given = replace(given, attention=replace(given.attention, key=key))
    ours = computed(given, None, 2)  # type: ignore[arg-type]
    theirs = computed(given, False, 2)
    for name, tensor in {"out": ours[0], **ours[1]}.items():
        expected = theirs[0] if name == "out" else theirs[1][name]
        torch.testing.assert_close(tensor, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_what_is_too_large_for_a_tile_is_left_to_pytorch():
    given = problem("dot", 3, 3000, edges=6, sources=3, targets=2)
    assert worst(computed(given, None), looped(given))[0] <= 1e-11  # type: ignore[arg-type]


# Layers #######################################################################

LAYERS: dict[str, Any] = {
    "sage": lambda: gnn.SAGEConv(6, 5),
    "max": lambda: gnn.SAGEConv(6, 5, aggr="max"),
    "gat": lambda: gnn.GATConv(6, 5, heads=2),
    "gatv2": lambda: gnn.GATv2Conv(6, 5, heads=2),
}


@pytest.mark.skipif(ON_GPU, reason="tests/test_gpu_workers.py runs layers on GPUs")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_layers_are_exact(tmp_path: Path):
    """Parts take turns, as the interpreter is no place for threads."""
    data = make_graph(10, 24)
    root = Partitions(tmp_path)(data, 2, "random")
    sweep = Sweep(2)
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        sweep.add(name, Job(make().double(), root, policies=(SARPolicy(),)), data)
    sweep.check(backend="parts")


@pytest.mark.skipif(ON_GPU, reason="tests/test_gpu_tools.py runs it on GPUs")
def test_the_benchmark_of_gpus_runs_with_these_kernels(tmp_path: Path, capsys: Any):
    layer, *models = table_of_gpus("cpu", tmp_path, 40, 80)
    for row in (layer, *models):
        assert float(row[-1].strip("| ")) < 1e-5, row


# Bytes, and the compiler ######################################################


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the bytes that programs load, store and add: those of lanes that a mask lets through.

    What is added by atomic operations is counted as such, not as read and written. What checks
    indices is left out.
    """
    monkeypatch.setattr(on_gpu._operators(), "_check_edges", lambda *given: None)
    from triton.runtime import interpreter

    total = {"read": 0, "written": 0, "added": 0}
    builder: Any = interpreter.InterpreterBuilder
    ways = {"read": "create_masked_load", "written": "create_masked_store"}
    masks = {"read": 1, "written": 2, "added": 3}  # places of masks among the arguments
    for way, name in {**ways, "added": "create_atomic_rmw"}.items():
        real = getattr(builder, name)

        def counted(self: Any, *given: Any, way: str = way, real: Any = real) -> Any:
            pointers, mask = given[way == "added"], given[masks[way]]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            total[way] += int(mask.data.sum()) * size
            return real(self, *given)

        monkeypatch.setattr(builder, name, counted)
    return total


def taken(moved: dict[str, int]) -> tuple[int, int, int]:
    """What was read, written and added since the last call."""
    found = moved["read"], moved["written"], moved["added"]
    moved.update(read=0, written=0, added=0)
    return found


COUNTED = pytest.mark.parametrize(
    ("dtype", "index"),
    [(torch.float32, torch.int32), (torch.bfloat16, torch.int32), (torch.float64, torch.int64)],
)


@pytest.mark.skipif(ON_GPU, reason="the interpreter counts")
@COUNTED
def test_bytes_of_sums(dtype: torch.dtype, index: torch.dtype, moved: dict[str, int]):
    """The formulas of docs/gpu.md; columns beyond 128 are a second program of each target."""
    b, w, s = dtype.itemsize, max(dtype.itemsize, 4), index.itemsize
    for F in (7, 130):
        given = sums_problem(F, dtype, 150, index=index)
        E, U, times = 150, given["targets"].numel(), 1 + (F > 128)  # the last one has no edge
        place = 2 * s + 8
        for weighted in (False, True):
            by_kernel(given, weighted)
            per_edge = times * (s + (w + s) * weighted)
            read = E * (per_edge + F * b) + U * (times * place + F * b)
            assert taken(moved) == (read, U * F * b, 0)
        at = [given[n] for n in ("source", "offsets", "targets")]
        runs = blocks(given["offsets"], min(1024 // min(-(-F // 8) * 8, 128), 32))
        read = E * (s + F * b) + U * place + runs * F * b
        for numbers in ((), (given["edges"],)):
            ops.edge_dot(given["rows"], given["out"], *at, *numbers)
            assert taken(moved) == (read + E * s * len(numbers), E * w, 0)


def blocks(offsets: Tensor, edges: int) -> int:
    """In how many pieces of so many edges, or fewer, rows' edges are gone through."""
    return int(((offsets.diff() + edges - 1) // edges).sum())


@pytest.mark.skipif(ON_GPU, reason="the interpreter counts")
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 7), (torch.float64, 130)])
def test_bytes_of_extrema(dtype: torch.dtype, width: int, moved: dict[str, int]):
    """The formulas of docs/gpu.md."""
    F = width
    given, w, s, times = sums_problem(F, dtype, 150), dtype.itemsize, 4, 1 + (F > 128)
    E, U, rows = 150, given["targets"].numel(), given["rows"].round()
    best = torch.full((45, F), -torch.inf, dtype=dtype)
    at = given["source"], given["offsets"], given["targets"]
    ops.extremum_(best, torch.zeros_like(best), rows, *at, True)
    index = times * (E * s + U * (2 * s + 8))
    assert taken(moved) == (index + E * F * w + U * 2 * F * w, U * 2 * F * w, 0)
    total = torch.zeros(45, F, dtype=dtype)
    # The same edges, as if they were those of 45 sources that read 30 targets.
    hits = int(ops.extremum_backward_(total, best, rows, rows, *at))
    read = index + E * F * w + hits * w + U * 2 * F * w
    assert hits and taken(moved) == (read, U * (F * w + 8 * times), 0)


@pytest.mark.skipif(ON_GPU, reason="the interpreter counts")
@pytest.mark.parametrize("drop", ["no", "hash", "bits"])
@pytest.mark.parametrize("kind", [name for name, score in SCORES.items() if score.softmax])
def test_bytes_of_attention(kind: str, drop: str, moved: dict[str, int]):
    """The formulas of docs/gpu.md, with edges' features too; without 'targets'."""
    H, C, E, b, w, s = 2, 4, 50, 2, 4, 4
    D = 3 if drop != "hash" and kind != "mixed" else 0
    given = problem(kind, H, C, D, 0.4 * (drop != "no"), torch.bfloat16, E, 7, 6)
    attention = given.attention
    if drop == "bits":
        told = torch.randint(2**H, (E, 1), dtype=torch.int32)
        attention = replace(attention, drop_key=told)
    ((_, forward, backward),) = shards_of(given, 1)
    score = SCORES[kind]
    K = W = H if score.narrow_key else H * C
    Q = H if score.narrow_query else H * C
    A = score.att * H * C
    number = s * (D > 0 or drop != "no") + {"no": 0, "hash": 4, "bits": 4 * H}[drop]
    states = (H * C + 2 * H) * w

    def common(at: Any) -> tuple[int, int, int]:
        """Blocks, rows, and what both passes read of edges, features, ``att`` and places."""
        count = blocks(at.offsets, 32)
        rows = at.offsets.numel() - 1
        return count, rows, E * (s + number + D * b) + (count * D * W + rows * A) * b + rows * 2 * s

    state = AttentionState.start(6, attention.value)
    attention_(state, attention, forward)
    _, _, read = common(forward)
    read += E * (H * C + K) * b + 6 * (Q * b + states)
    assert taken(moved) == (read, 6 * states, 0)

    wanted = {n: torch.zeros_like(t, dtype=torch.float32) for n, t in attention.tensors().items()}
    out = state.finish()
    cotangent = Cotangent.of(given.grad_out, out, state.maximum, state.normaliser)
    by_edge = E * D * b, E * D * w  # what gradients of features and weights read, and write
    attention_backward_sources_(AttentionGradients(**wanted), attention, cotangent, backward)
    count, rows, read = common(backward)
    read += E * (H * C * w + Q * b + 3 * H * w) + rows * ((H * C + K) * b)
    read += 7 * (H * C + K) * w
    written, added = 7 * (H * C + K) * w, 0
    if kind == "additive":
        read += by_edge[0] + count * D * W * b
        written += by_edge[1]
        added = E * H * w + count * D * W * w
    assert taken(moved) == (read, written, added)
    for places in (torch.arange(7, dtype=torch.int32), torch.arange(7)):
        lying = replace(attention, places=places)
        attention_backward_sources_(AttentionGradients(**wanted), lying, cotangent, backward)
        assert taken(moved) == (read + places.nbytes, written, added)

    attention_backward_targets_(AttentionGradients(**wanted), attention, cotangent, forward)
    if kind == "additive":
        assert taken(moved) == (0, 0, 0)  # The other pass gives all.
        return
    count, rows, read = common(forward)
    read += E * (H * C + K) * b + rows * ((H * C + 3 * H) * w + Q * b) + 6 * Q * w
    read += by_edge[0] + count * D * W * b
    added = 6 * A * w + count * D * W * w
    assert taken(moved) == (read, 6 * Q * w + by_edge[1], added)


def test_kernels_compile_for_a_gpu_that_is_not_there():
    """Types, shapes and registers as a compiler sees them, which the interpreter doesn't."""
    path = Path(__file__).parent / "compile_gpu_kernels.py"
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = {line.split()[0] for line in done.stdout.splitlines()}
    sums = {"check_edges", "gather_sum", "edge_dot", "extremum", "extremum_backward"}
    assert names == {*sums, "forward", "backward"}


# The check, and what has no GPU ###############################################


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, kernels_of_gpus: None) -> Iterator[None]:
    """The kernels check themselves."""
    monkeypatch.undo()
    take_tensors_of_the_cpu(monkeypatch)
    on_gpu._agrees.cache_clear()
    yield
    on_gpu._agrees.cache_clear()


def test_kernels_that_agree_are_taken(checked: None):
    given = sums_problem(3, torch.float32, 40)
    run = on_gpu.sums_operator("gather_sum_", given["out"])
    assert run.__module__ == "pyg_sar.kernels.triton_operators"
    assert on_gpu._agrees.cache_info().currsize == 1
    value = torch.zeros(1, 2, 3)
    shape = on_gpu.AttentionShape(
        kind=1, heads=2, channels=3, features=1, own_key=True, own_query=True, drop=2, p=0.5,
        slope=0.2, scale=1.0,
    )  # fmt: skip
    assert on_gpu.attention_operators(shape, value) is not None


@pytest.mark.parametrize("how", ["wrong", "fails"])
def test_kernels_that_differ_are_left_out_with_one_warning(
    how: str, checked: None, monkeypatch: pytest.MonkeyPatch
):
    operators = on_gpu._operators()
    right = operators.gather_sum_

    def broken(out: Tensor, *given: Any, **chunk: int) -> None:
        if how == "fails":
            raise RuntimeError("out of resource\nmore")
        right(out, *given, **chunk)
        out[3, 0] += 0.01

    monkeypatch.setattr(operators, "gather_sum_", broken)
    given = sums_problem(3, torch.float32, 40)
    text = r"kernel 'gather_sum' for torch.float32 on .* is left out: PyTorch's operators compute"
    with pytest.warns(KernelWarning, match=text) as seen:
        for _ in range(2):
            found = by_kernel(given, True)
    assert len(seen) == 1
    assert distance(found, looped_sums(given, True)) <= 2e-6


def test_without_triton_pytorch_computes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on_gpu, "why_missing", lambda: "the package 'triton' is not installed")
    given = sums_problem(3, torch.float64, 40)
    assert on_gpu.sums_operator("gather_sum_", given["out"]).__module__.endswith("fallback")
    assert distance(by_kernel(given, True), looped_sums(given, True)) <= 1e-14
    on_gpu.warn_if_missing.cache_clear()
    with pytest.warns(KernelWarning, match="'triton' is not installed"):
        on_gpu.warn_if_missing()


def test_the_kernels_are_not_imported_with_the_package():
    """PyG itself imports Triton where it is there."""
    code = "import pyg_sar, sys; assert not [m for m in sys.modules if 'kernels.triton' in m]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
