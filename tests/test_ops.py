"""The C++ kernels against loops and PyTorch, and layers that use them against layers that don't."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_problems import BOTH
from oracle import (
    CHANNELS,
    OUT,
    Job,
    Partitions,
    Sweep,
    make_graph,
)
from torch import Tensor
from torch.nn import Linear
from torch_geometric import nn as gnn

from pyg_sar import SARPolicy
from pyg_sar.kernels import ops
from pyg_sar.kernels.ops import KernelWarning, edge_dot, gather_sum_, sort_edges

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}
WIDTHS = (1, 3, 7, 16, 100, 257)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def problem(
    width: int,
    dtype: torch.dtype,
    edges: int = 300,
    index: torch.dtype = torch.int32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Edges with repeated sources and targets, a hub, and rows that no edge touches.

    The last target has no edge. The order of edges is that of a shuffle.
    """
    draw = torch.Generator().manual_seed(seed)
    target = (torch.rand(edges, generator=draw) ** 3 * 20).long().sort().values * 2
    targets, counts = torch.unique_consecutive(target, return_counts=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0), counts.new_tensor([edges])])
    return {
        "out": torch.randn(45, width, generator=draw, dtype=torch.float64).to(dtype),
        "rows": torch.randn(30, width, generator=draw, dtype=torch.float64).to(dtype),
        "source": torch.randint(28, (edges,), generator=draw).to(index),
        "offsets": offsets.to(index),
        "targets": torch.cat([targets, targets.new_tensor([44])]),
        "weight": torch.randn(edges, generator=draw, dtype=torch.float64).to(wide(dtype)),
        "edges": torch.randperm(edges, generator=draw).to(index),
    }


def looped(given: dict[str, Tensor], weighted: bool) -> Tensor:
    """Edge by edge, in float64."""
    out, rows = given["out"].double().clone(), given["rows"].double()
    offsets = given["offsets"].tolist()
    for k, target in enumerate(given["targets"].tolist()):
        for e in range(offsets[k], offsets[k + 1]):
            scale = float(given["weight"][int(given["edges"][e])]) if weighted else 1.0
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


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_equal_a_loop(dtype: torch.dtype, native: bool):
    for width in WIDTHS:
        for weighted in (False, True):
            index = torch.int64 if width % 2 else torch.int32
            given = problem(width, dtype, index=index, seed=width)
            found = gathered(given, weighted, native)
            assert found.dtype == dtype
            where = (width, weighted)
            assert distance(found, looped(given, weighted)) <= TOLERANCES[dtype], where


def many_edges(hub: bool) -> tuple[dict[str, Any], Tensor]:
    """Enough edges for several threads, and their sum in float64 by a product of matrices."""
    draw = torch.Generator().manual_seed(0)
    count, rows = 60_000, torch.randn(50, 20, generator=draw)
    target = (torch.rand(count, generator=draw) ** 3 * 30).long().sort().values
    target = torch.full_like(target, 7) if hub else target
    given = {
        "source": torch.randint(50, (count,), generator=draw, dtype=torch.int32),
        "offsets": torch.searchsorted(target, torch.arange(31), out_int32=True),
        "weight": torch.rand(count, generator=draw),
    }
    matrix = torch.zeros(30, 50, dtype=torch.float64)
    at = target, given["source"].long()
    matrix.index_put_(at, given["weight"].double(), accumulate=True)
    return {**given, "rows": rows}, matrix @ rows.double()


@pytest.mark.parametrize("hub", [False, True])
def test_any_number_of_threads_gives_the_same_sums(hub: bool, kernels: None):
    """Also where one target has all edges, and most threads find nothing to do."""
    before = torch.get_num_threads()
    given, expected = many_edges(hub)
    found = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(gather_sum_(torch.zeros(30, 20), **given, native=True))
    finally:
        torch.set_num_threads(before)
    assert distance(found[0], expected) <= 1e-5
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_error_is_at_most_twice_that_of_pytorch(dtype: torch.dtype, kernels: None):
    given = problem(33, dtype, edges=2000)
    expected = looped(given, weighted=False)
    found = distance(gathered(given, weighted=False, native=True), expected)
    plain = given["out"].clone()
    target = given["targets"].repeat_interleave(given["offsets"].diff())
    plain.index_add_(0, target, given["rows"][given["source"].long()])
    assert found <= 2 * distance(plain, expected)


@pytest.mark.parametrize("native", BOTH)
def test_strides_and_views(native: bool):
    """Rows in columns of a wider tensor, transposed, expanded; results into a packed buffer."""
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
    names = ("source", "offsets", "targets", "weight", "edges")
    strided = {name: given[name].repeat_interleave(2)[::2] for name in names}
    assert distance(gathered({**given, **strided}, True, native), expected) <= 1e-14


@pytest.mark.parametrize("native", BOTH)
def test_nothing_to_add(native: bool):
    given = problem(5, torch.float32)
    none = {name: given[name][:0] for name in ("source", "targets", "weight", "edges")}
    none["offsets"] = given["offsets"][:1]
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


def fall(offsets: Tensor) -> Tensor:
    offsets[1] = offsets[2] + 1
    return offsets


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "source too large": ({"source": lambda v: v.fill_(30)}, IndexError, "'source' names a row"),
    "source negative": ({"source": lambda v: v.fill_(-1)}, IndexError, "'source' names a row"),
    "offsets too large": ({"offsets": lambda v: v + 1}, ValueError, "from 0 to the number of e"),
    "offsets too few": ({"offsets": lambda v: v // 2}, ValueError, "from 0 to the number of e"),
    "offsets fall": ({"offsets": lambda v: fall(v)}, ValueError, "that ascend from 0"),
    "edges too large": ({"edges": lambda v: v + 1}, IndexError, "'edges' names an edge"),
    "edges negative": ({"edges": lambda v: v - 1}, IndexError, "'edges' names an edge"),
    "more targets than rows": (
        {"out": lambda v: v[:9], "targets": lambda v: None},
        IndexError,
        "ascending 'targets'",
    ),
    "targets too large": ({"targets": lambda v: v + 45}, IndexError, "ascending 'targets'"),
    "targets negative": ({"targets": lambda v: v - 45}, IndexError, "ascending 'targets'"),
    "targets twice": ({"targets": lambda v: v // 4}, IndexError, "ascending 'targets'"),
    "widths": ({"rows": lambda v: v[:, 1:]}, ValueError, r"of shapes \[., F\] and \[., F\]"),
    "axes": ({"rows": lambda v: v[0]}, ValueError, r"\[N, F\] and \[M, F\]"),
    "dtypes": ({"rows": lambda v: v.double()}, TypeError, "one dtype"),
    "half": (
        {"rows": lambda v: v.half(), "out": lambda v: v.half()},
        TypeError,
        "float32, float64 or bfloat16",
    ),
    "index dtype": (
        {"source": lambda v: v.short(), "offsets": lambda v: v.short()},
        TypeError,
        "int32 or int64",
    ),
    "index dtypes": ({"offsets": lambda v: v.long()}, TypeError, "of the dtype of 'source'"),
    "edges dtype": ({"edges": lambda v: v.long()}, TypeError, "'edges' of the dtype"),
    "targets dtype": ({"targets": lambda v: v.int()}, TypeError, "int64 'targets'"),
    "no offsets": ({"offsets": lambda v: v[:0]}, ValueError, r"of shapes \[E\] and \[U \+ 1\]"),
    "lengths": ({"targets": lambda v: v[1:]}, ValueError, "'targets' of shape"),
    "edges": ({"edges": lambda v: v[1:]}, ValueError, r"'edges' of shape \[300\]"),
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


CHECKED_ALWAYS = (
    *("widths", "axes", "dtypes", "lengths", "weights", "no offsets"),
    *("offsets too few", "offsets fall"),
)


@pytest.mark.parametrize("native", BOTH)
def test_bad_input_raises(native: bool):
    for name in BAD if native else CHECKED_ALWAYS:
        changes, kind, text = BAD[name]
        given = problem(6, torch.float32)
        given.update({key: change(given[key]) for key, change in changes.items()})
        with pytest.raises(kind, match=text):
            gather_sum_(**given, native=native)


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


def test_the_operators_are_registered_as_torch_wants_it(kernels: None):
    for dtype in DTYPES:
        given = problem(4, dtype, edges=20)
        for weight in (None, given["weight"]):
            arguments = tuple({**given, "weight": weight}.values())
            torch.library.opcheck(torch.ops.pyg_sar.gather_sum_.default, arguments)
        names = ("rows", "out", "source", "offsets", "targets", "edges")
        arguments = tuple(given[name] for name in names)
        torch.library.opcheck(torch.ops.pyg_sar.edge_dot.default, arguments)
    for order in (None, given["edges"]):
        arguments = (given["source"], 30, order)
        torch.library.opcheck(torch.ops.pyg_sar.sort_edges.default, arguments)


@pytest.mark.parametrize("native", BOTH)
def test_the_first_rows_as_targets(native: bool):
    """Without 'targets' these are rows 0, 1, ..."""
    for dtype in DTYPES:
        given = problem(5, dtype)
        count = given["offsets"].numel() - 1
        expected = looped({**given, "targets": torch.arange(count)}, weighted=True)
        found = gathered({**given, "targets": None}, True, native)  # type: ignore[dict-item]
        assert distance(found, expected) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(dtype: torch.dtype, kernels: None):
    """Rows fill registers of several sizes, and several tiles; against a product of matrices."""
    for width in (*range(1, 36), 47, 48, 49, 63, 65, 95, 96, 113, 127, 128, 129, 145, 300):
        given = problem(width, dtype, seed=width)
        matrix = torch.zeros(45, 30, dtype=torch.float64)
        target = given["targets"].repeat_interleave(given["offsets"].diff())
        at = target, given["source"].long()
        matrix.index_put_(at, given["weight"][given["edges"].long()].double(), accumulate=True)
        expected = given["out"].double() + matrix @ given["rows"].double()
        assert distance(gathered(given, True, True), expected) <= TOLERANCES[dtype], width


# Inner products of edges ######################################################


def dots(given: dict[str, Tensor], native: bool) -> Tensor:
    names = ("rows", "source", "offsets", "targets", "edges")
    return edge_dot(gradient=given["out"], **{n: given[n] for n in names}, native=native)


def looped_dots(given: dict[str, Tensor]) -> Tensor:
    target = given["targets"].repeat_interleave(given["offsets"].diff())
    products = given["out"].double()[target] * given["rows"].double()[given["source"].long()]
    out = torch.zeros(target.numel(), dtype=torch.float64)
    out[given["edges"].long()] = products.sum(1)
    return out


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inner_products(dtype: torch.dtype, native: bool):
    for width in (0, 1, 2, 5, 8, 15, 16, 23, 100, 257):
        index = torch.int64 if width % 2 else torch.int32
        given = problem(width, dtype, index=index, seed=width)
        expected = looped_dots(given)
        found = dots(given, native)
        assert found.dtype == wide(dtype) and found.shape == expected.shape
        if width:
            assert distance(found, expected) <= TOLERANCES[dtype], width
        else:
            assert not bool(found.any())
        turned = {**given, "rows": given["rows"].t().contiguous().t()}
        assert torch.equal(dots(turned, native), found)


def test_inner_products_check_what_they_are_given(kernels: None):
    for name in ("source too large", "offsets fall", "widths", "dtypes", "edges too large", "half"):
        changes, kind, text = BAD[name]
        given = problem(6, torch.float32)
        given.update({key: change(given[key]) for key, change in changes.items()})
        with pytest.raises(kind, match=text.replace("'out'", ".*")):
            dots(given, True)
    given = problem(6, torch.float32)
    given["rows"].requires_grad_()
    with pytest.raises(ValueError, match="not recorded by autograd"):
        dots(given, True)


# Sorting ######################################################################


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edges_are_sorted_by_one_key_and_by_two(dtype: torch.dtype, native: bool):
    draw = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    try:
        for count, keys in ((0, 0), (0, 3), (1, 1), (500, 7), (20_000, 900), (40, 5000)):
            torch.set_num_threads(3)
            first, second = (torch.randint(max(keys, 1), (count,), generator=draw) for _ in "ab")
            order, offsets = sort_edges(first.to(dtype), keys, native=native)
            assert order.dtype == offsets.dtype == torch.int32
            assert torch.equal(order.long(), first.argsort(stable=True))
            places = torch.searchsorted(first.sort().values, torch.arange(keys + 1))
            assert torch.equal(offsets.long(), places)
            by_second = sort_edges(second.to(dtype), keys, native=native)[0]
            both, again = sort_edges(first.to(dtype), keys, by_second, native=native)
            assert torch.equal(both.long(), (first * max(keys, 1) + second).argsort(stable=True))
            assert torch.equal(again, offsets)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("native", BOTH)
def test_keys_out_of_range_raise(native: bool):
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=r"keys in \[0, 3\)"):
            sort_edges(torch.tensor([0, bad, 1]), 3, native=native)
    if native:
        with pytest.raises(IndexError, match=r"an 'order' of numbers in \[0, 2\)"):
            sort_edges(torch.tensor([0, 1]), 3, torch.tensor([0, 2]), native=True)


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


def test_one_warning_and_the_same_results(without_kernels: None, partitions: Partitions):
    """With kernels='off' there is none."""
    data = make_graph()
    sweep = Sweep(2)
    root = partitions(data, 2, "random")
    for layer in (gnn.SAGEConv(CHANNELS, OUT), gnn.GINConv(Linear(CHANNELS, OUT))):
        sweep.add("without", Job(layer.double(), root, policies=[SARPolicy()]), data)
    off = Sweep(2)
    off.add("off", Job(gnn.SimpleConv(), root, policies=[SARPolicy(kernels="off")]), data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        off.check("parts")
        assert not [w for w in caught if w.category is KernelWarning]
        sweep.check("parts")
    texts = [str(w.message) for w in caught if w.category is KernelWarning]
    assert len(texts) == 1 and "not built" in texts[0] and "kernels='off'" in texts[0]
    given = problem(3, torch.float64)
    assert distance(gather_sum_(**given), looped(problem(3, torch.float64), True)) <= 1e-14
    with pytest.raises(RuntimeError, match="no C\\+\\+ kernels"):
        gather_sum_(**given, native=True)


def test_a_library_that_cannot_be_loaded_is_told(
    without_kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(ops, "_LIBRARY", str(broken))
    ops.why_missing.cache_clear()
    assert "can't be loaded" in str(ops.why_missing())


def test_a_processor_without_a_version_is_told(
    without_kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    answers = SimpleNamespace(runs_here=lambda: False)
    here = SimpleNamespace(load_library=lambda path: None, pyg_sar=answers)
    monkeypatch.setattr(ops, "_LIBRARY", str(tmp_path))
    monkeypatch.setattr(ops.torch, "ops", here)
    ops.why_missing.cache_clear()
    assert ops.why_missing() == "this x86-64 processor has no AVX2 and FMA"


def test_a_build_without_compiler_says_so(
    without_kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """As pip builds a wheel: the package is there, and tells why it has no kernels."""
    build = [sys.executable, "setup.py", "-q", "build_ext"]
    build += ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    done = subprocess.run(
        build,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "CXX": "no-such-compiler", "PYG_SAR_KERNELS": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "pyg_sar: the C++ kernels could not be built, doing without: there" in done.stdout
    monkeypatch.setattr(ops, "_REASON", str(tmp_path / "lib" / "pyg_sar" / "_no_kernels.txt"))
    ops.why_missing.cache_clear()
    why = "they were not built when it was installed (there is no C++ compiler 'no-such-compiler')"
    assert ops.why_missing() == why


def test_a_checksum_tells_every_change(kernels: None):
    """Of one word, of two that change places or signs; with any number of threads."""
    checksum = torch.ops.pyg_sar.checksum
    for count in (1, 63, 64, 65, 16384, 16385, 40000):
        words = torch.arange(1, count + 1, dtype=torch.int32)
        given = words.view(torch.uint8)
        found = {checksum(given), checksum(given[:-1]), checksum(torch.cat([given, given[:1] * 0]))}
        places = sorted({0, count // 3, count - 1})
        for place in places:
            for bit in (0, 8, 31):
                other = words.clone()
                other[place] ^= torch.tensor(1 << bit).int()
                found.add(checksum(other.view(torch.uint8)))
        pairs = [(a, b) for a in range(0, count, 97) for b in (a + 1, a + 64, a + 128) if b < count]
        for a, b in pairs[:200]:
            other = words.clone()
            other[[a, b]] = other[[b, a]]
            found.add(checksum(other.view(torch.uint8)))
            signs = words.float()
            before = checksum(signs.view(torch.uint8))
            signs[[a, b]] *= -1
            assert checksum(signs.view(torch.uint8)) != before
        assert len(found) == 3 + 3 * len(places) + len(pairs[:200])
    torch.set_num_threads(3)
    several = checksum(given)
    torch.set_num_threads(1)
    assert several == checksum(given)
    with pytest.raises(RuntimeError, match="expected uint8 'bytes'"):
        checksum(words)


def test_the_library_needs_the_stable_abi_alone(kernels: None):
    """So that one build runs in PyTorch 2.10 and all later ones, and in any Python."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm, of binutils")
    library = Path(ops.__file__).parent.parent / ops._LIBRARY
    names = subprocess.run(
        ["nm", "--dynamic", "--demangle", "--undefined-only", str(library)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split("\n")
    names = [line.strip().partition(" ")[2] for line in names if line.strip()]
    assert {"aoti_torch_library_def", "torch_library_impl", "torch_parallel_for"} <= {*names}
    assert not [name for name in names if re.search(r"\b(at|c10|torch|pybind11)::|^_?Py", name)]


def test_a_wheel_is_for_any_python(tmp_path: Path):
    """Of one kind of processor; built here without the libraries, which take long to compile."""
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    build += ["bdist_wheel", "--bdist-dir", str(tmp_path / "wheel"), "--dist-dir", str(tmp_path)]
    subprocess.run(
        build,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "CXX": "no-such-compiler", "PYG_SAR_KERNELS": ""},
        capture_output=True,
        check=True,
        timeout=200,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"pyg_sar-[^-]+-py3-none-(?!any)\w+\.whl", wheel.name)
