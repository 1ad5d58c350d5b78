"""Attention over edges, by kernel and by PyTorch, against a loop over targets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problems import (
    BOTH,
    NATIVE,
    Edges,
    Problem,
    edge_terms,
    looped,
    plain,
    problem,
    shards_of,
)
from combinations import everything, some
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyg_sar.kernels.attention_ops import (
    attention_,
    attention_backward_sources_,
    attention_backward_targets_,
    keep_factors,
)
from pyg_sar.kernels.attention_terms import (
    Attention,
    AttentionGradients,
    AttentionState,
    Cotangent,
    wide_dtype,
)
from pyg_sar.kernels.scores import SCORES, number_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Of bfloat16 the inputs are exact, and everything is computed in float32.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-4, torch.bfloat16: 2e-4}
ALL = tuple(SCORES)
KINDS = tuple(name for name, score in SCORES.items() if score.softmax)  # by a kernel of their own


def computed(
    given: Problem,
    native: bool,
    shards: int = 1,
    names: tuple[str, ...] | None = None,
    squeezed: bool = False,
    index: torch.dtype = torch.int32,
    places: torch.dtype | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and the gradients of ``names`` by the operators.

    With ``places``, keys and values lie among others, in any order.
    """
    whole = given.attention
    wide = wide_dtype(whole.value.dtype)
    state = AttentionState.start(given.num_targets, whole.value)
    found = {
        n: torch.zeros_like(t, dtype=wide)
        for n, t in whole.tensors().items()
        if names is None or n in names
    }
    parts = []
    for rows, forward, backward in shards_of(given, shards, squeezed, index):
        by_source = ("value", "key")
        mine = {n: t[rows] for n, t in whole.tensors().items() if n in by_source}
        if places is not None:
            count = mine["value"].size(0)
            mine = {n: torch.cat([t, torch.full_like(t, torch.nan)]) for n, t in mine.items()}
            order = torch.randperm(2 * count)
            mine = {n: t[order] for n, t in mine.items()}
            mine["places"] = order.argsort()[:count].to(places)
        gradients = {n: t[rows] if n in by_source else t for n, t in found.items()}
        parts.append((replace(whole, **mine), forward, backward, AttentionGradients(**gradients)))
    for attention, forward, _, _ in parts:
        attention_(state, attention, forward, native=native)
    out = state.finish()
    cotangent = Cotangent.of(given.grad_out, out, state.maximum, state.normaliser)
    for attention, forward, backward, gradients in parts:
        attention_backward_sources_(gradients, attention, cotangent, backward, native=native)
        attention_backward_targets_(gradients, attention, cotangent, forward, native=native)
    return out, found


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest number, or to 1: sums that cancel out are as wrong as their terms."""
    if expected.numel() == 0:
        return 0.0
    assert bool(found.isfinite().all())
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1))


def worst(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> tuple[float, str]:
    apart = [(distance(found[0], expected[0]), "out")]
    return max(apart + [(distance(t, expected[1][n]), n) for n, t in found[1].items()])


# Against the loop #############################################################

SHAPES = (  # heads, channels, edge features, dropout, shards
    (1, 1, 0, 0.0, 1),
    (4, 8, 0, 0.6, 3),
    (4, 8, 3, 0.0, 1),
    (2, 100, 0, 0.0, 2),
    (3, 17, 5, 0.4, 3),
    (8, 16, 1, 0.0, 1),
    (16, 3, 0, 0.0, 2),
    (1, 32, 2, 0.5, 1),
    (20, 64, 0, 0.0, 1),
    (14, 8, 0, 0.0, 2),  # narrow heads: four, two and one register of them
    (28, 4, 2, 0.3, 1),
    (40, 2, 0, 0.0, 1),
    (8, 1, 0, 0.0, 2),
)


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("kind", ALL)
def test_outputs_and_gradients_equal_a_loop(kind: str, native: bool):
    for dtype in DTYPES:
        for heads, channels, features, p, shards in some(SHAPES, f"{kind} {native} {dtype}"):
            given = problem(kind, heads, channels, features, p, dtype, seed=channels)
            found = computed(given, native, shards)
            assert found[0].dtype == wide_dtype(dtype)
            apart, name = worst(found, looped(given))
            assert apart <= TOLERANCES[dtype], (dtype, heads, channels, features, p, name)


def told_by_bits(hashed: Problem) -> Problem:
    """The problem, where bits tell which heads are kept, and no hash."""
    a = hashed.attention
    assert a.drop_key is not None
    kept = keep_factors(a.drop_key, a.value.size(1), a.seed, a.p) != 0
    words = torch.zeros(kept.size(0), (kept.size(1) + 31) // 32, dtype=torch.long)
    for head in range(kept.size(1)):
        words[:, head // 32] |= kept[:, head].long() << (head % 32)
    return replace(hashed, attention=replace(a, drop_key=words.int(), seed=5))


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("kind", ALL)
def test_which_heads_are_kept_may_be_told_by_bits(kind: str, native: bool):
    """The same numbers to the bit as where a hash drops these weights."""
    for heads, shards in ((1, 1), (3, 2), (32, 1), (40, 2)):
        hashed = problem(kind, heads, 4, 2, 0.5, seed=heads)
        told = told_by_bits(hashed)
        found, expected = computed(told, native, shards), computed(hashed, native, shards)
        assert torch.equal(found[0], expected[0])
        for name, gradient in expected[1].items():
            assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("kind", ALL)
def test_keys_and_values_may_lie_among_others(kind: str, native: bool):
    """The same numbers to the bit, but where all keys give a bound of the scores."""
    for dtype in DTYPES:
        bounded = kind == "additive" and dtype != torch.float64
        for features, p, shards, places in (
            (0, 0.0, 1, torch.int32),
            (2, 0.3, 3, torch.int64),
            (0, 0.5, 2, torch.int32),
        ):
            given = problem(kind, 4, 8, features, p, dtype, seed=features)
            for names in (None, ("query",)):
                found = computed(given, native, shards, names, places=places)
                expected = computed(given, native, shards, names)
                most = 1e-5 if bounded else 0.0
                wide = expected[0].double(), {n: t.double() for n, t in expected[1].items()}
                apart, name = worst(found, wide)
                assert apart <= most, (dtype, features, name)


@pytest.mark.parametrize("native", BOTH)
def test_places_outside_raise(native: bool):
    given = problem("gatv2")
    ((_, forward, backward),) = shards_of(given, 1)
    state = AttentionState.start(given.num_targets, given.attention.value)
    cotangent = Cotangent.of(given.grad_out, state.acc, state.maximum, state.normaliser)
    count = given.attention.value.size(0)
    gradients = AttentionGradients(value=torch.zeros_like(given.attention.value))
    for places, kind in (
        (torch.full((count,), count, dtype=torch.int32), IndexError),
        (torch.full((count,), -1), IndexError),
        (torch.zeros(count, 1, dtype=torch.int32), ValueError),
    ):
        attention = replace(given.attention, places=places)
        with pytest.raises(kind, match="attention: |out of range"):
            attention_(state, attention, forward, native=native)
        with pytest.raises(kind, match="attention: |out of range"):
            attention_backward_sources_(gradients, attention, cotangent, backward, native=native)
    few = replace(given.attention, places=torch.arange(count - 1))
    with pytest.raises(ValueError, match="gradient of value"):
        attention_backward_sources_(gradients, few, cotangent, backward, native=native)


@pytest.mark.parametrize("native", BOTH)
@settings(
    max_examples=60 if everything() else 30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_graph_and_shape_equals_a_loop(native: bool, data: Any):
    draw = data.draw
    kind = draw(st.sampled_from(ALL))
    dtype = draw(st.sampled_from(DTYPES))
    given = problem(
        kind,
        heads=draw(st.integers(1, 9)),
        channels=draw(st.integers(1, 40) | st.sampled_from([8, 16, 32, 64, 100, 130])),
        features=draw(st.integers(0, 4)),
        p=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        dtype=dtype,
        edges=draw(st.integers(0, 150)),
        sources=draw(st.integers(1, 12)),
        targets=draw(st.integers(1, 12)),
        own_key=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    wanted = [n for n in given.attention.tensors() if draw(st.booleans())]
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    shards, squeezed = draw(st.integers(1, 4)), draw(st.booleans())
    found = computed(given, native, shards, tuple(wanted), squeezed, index)
    assert set(found[1]) == set(wanted)
    apart, name = worst(found, looped(given))
    assert apart <= TOLERANCES[dtype], name


@pytest.mark.parametrize("native", BOTH)
def test_additive_scores_without_a_query(native: bool):
    given = problem("additive", features=2)
    given = replace(given, attention=replace(given.attention, query=None))
    assert worst(computed(given, native), looped(given))[0] <= 1e-12


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kind", ALL)
def test_error_is_at_most_twice_that_of_pytorch(kind: str, native: bool):
    """The mean error over many numbers, so that chance has no say."""

    def error(found: Tensor, exact: Tensor) -> float:
        return float((found.double() - exact).abs().mean())

    given = problem(kind, 4, 32, dtype=torch.float32, edges=4000, sources=200, targets=150)
    exact, ours, theirs = looped(given), computed(given, native), plain(given)
    assert error(ours[0], exact[0]) <= 2 * error(theirs[0], exact[0])
    for name, gradient in exact[1].items():
        assert error(ours[1][name], gradient) <= 2 * error(theirs[1][name], gradient), name


@pytest.mark.parametrize("native", BOTH)
def test_no_edges_and_no_rows(native: bool):
    for kind in ALL:
        for edges, sources, targets in ((0, 3, 4), (0, 0, 4), (0, 3, 0)):
            given = problem(kind, edges=edges, sources=sources, targets=targets, features=2)
            out, found = computed(given, native)
            assert out.shape == (targets, *given.attention.value.shape[1:]) and not bool(out.any())
            assert not any(bool(t.any()) for t in found.values())


ADDITIVE = (  # heads, channels, slope, scale of keys and queries, shards
    (1, 8, 0.2, 1.0, 1),  # half a register
    (2, 4, 0.0, 3.0, 2),
    (1, 16, 1.0, 1.0, 1),
    (2, 8, 0.2, 1.0, 3),
    (4, 8, 0.2, 3.5, 1),
    (3, 10, 0.2, 1.0, 2),  # lines that a row shares with the next
    (1, 47, 0.1, 3.0, 1),
    (5, 7, 0.2, 1.0, 2),
    (7, 9, 0.2, 1.0, 1),
    (8, 10, 0.9, 2.0, 1),
    (6, 16, 0.2, 1.0, 3),
    (4, 25, 0.2, 1.0, 1),
    (8, 16, 0.2, 3.0, 2),
    (9, 8, 0.2, 1.0, 1),  # more heads than that
    (3, 8, 0.2, 3.0, 2),  # half heads, of which two fill a register
    (5, 8, 0.2, 1.0, 1),
    (6, 8, 0.2, 1.0, 2),
    (7, 8, 0.2, 1.0, 1),
    (3, 20, 0.2, 1.0, 1),
    (3, 32, 0.2, 1.0, 2),
    (4, 8, 2.0, 1.0, 1),  # slopes with which a leaky ReLU is no maximum
    (4, 8, -0.5, 1.0, 2),
    (4, 8, 0.2, 9.0, 1),  # keys too large
)


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.6])
def test_additive_scores_of_many_edges_per_row(native: bool, squeezed: bool, p: float):
    """Rows of all widths that the kernels tell apart, tiny segments and a hub."""
    for heads, channels, slope, scale, shards in some(ADDITIVE, f"{native} {squeezed} {p}"):
        sizes: Any = {"edges": 800, "sources": 40, "targets": 200}
        given = problem("additive", heads, channels, 0, p, torch.float32, **sizes)
        given = told_by_bits(given) if p else given
        tensors = given.attention.tensors()
        changed = {n: tensors[n] * scale for n in ("key", "query")}
        given = replace(given, attention=replace(given.attention, slope=slope, **changed))
        apart, name = worst(computed(given, native, shards, squeezed=squeezed), looped(given))
        assert apart <= TOLERANCES[torch.float32], (heads, channels, slope, scale, name)


@pytest.mark.parametrize("native", BOTH)
def test_additive_scores_of_shards_far_apart(native: bool):
    for step in (11, -11):
        given = problem("additive", 4, 8, dtype=torch.float32, edges=2000, sources=40)
        key = given.attention.key
        assert key is not None
        key = key / 4 + torch.linspace(-1, 1, 40).view(-1, 1) * step
        given = replace(given, attention=replace(given.attention, key=key))
        for shards in (1, 4):
            assert worst(computed(given, native, shards), looped(given))[0] <= 2e-4


# Numbers at the edge ##########################################################


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_stay_finite(kind: str, native: bool):
    for scale in (1e4, -1e4):
        given = problem(kind, dtype=torch.float32)
        tensors = given.attention.tensors()
        larger = "key" if kind != "gatv2" else "att"
        given = replace(
            given, attention=replace(given.attention, **{larger: tensors[larger] * scale})
        )
        scores, _ = edge_terms(given.attention, given.source, given.target)
        assert float(scores.abs().max()) > 1e4
        out, found = computed(given, native, shards=3)
        assert all(bool(t.isfinite().all()) for t in (out, *found.values()))
        expected = looped(given)[0]
        # A score of 1e4 is off by 1e-3 in float32, a weight by as much.
        assert distance(out, expected) <= 2e-2


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["value", "key", "query"])
def test_nan_and_infinity_give_what_pyg_gives(kind: str, native: bool, bad: float, name: str):
    given = problem(kind, dtype=torch.float32, edges=60)
    tensor = given.attention.tensors()[name]
    row = int(given.source[0]) if name != "query" else int(given.target[0])
    tensor[row, min(1, tensor.size(1) - 1)] = bad
    expected = plain(given)[0]
    # An additive score of minus infinity is a weight of 0, the tanh of infinity 1.
    hidden = (kind, bad) == ("additive", -math.inf)
    hidden |= kind == "tanh" and name != "value" and math.isinf(bad)
    assert not bool(expected.isfinite().all()) or hidden
    for shards in (1, 3):
        out, _ = computed(given, native, shards)
        torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


# Dropout ######################################################################


def agreement(x: Tensor, y: Tensor, p: float) -> float:
    """How far the rate of equal draws is from that of independent ones, in standard deviations."""
    rate = p * p + (1 - p) * (1 - p)
    return abs(float(((x > 0) == (y > 0)).double().mean()) - rate) * math.sqrt(
        x.numel() / (rate * (1 - rate))
    )


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("keys", ["counted", "large"])
def test_dropout_has_its_rate_and_is_independent(p: float, keys: str):
    count = 50_000
    key = torch.arange(count, dtype=torch.int32)
    if keys == "large":
        key = torch.arange(count) * 7919 + 2**31
    for seed in (0, 1, -5, 2**62):
        keep = keep_factors(key, 4, seed, p)
        factors = keep.unique()
        torch.testing.assert_close(factors, torch.tensor([0, 1 / (1 - p)], dtype=torch.float64))
        spread = math.sqrt(p * (1 - p) / count)
        dropped = (keep == 0).double().mean(0)
        assert float((dropped - p).abs().max()) <= 5 * spread
        for head in range(1, 4):
            assert agreement(keep[:, 0], keep[:, head], p) <= 5
        for apart in (1, 2, 64):
            assert agreement(keep[apart:], keep[:-apart], p) <= 5
        assert agreement(keep, keep_factors(key, 4, seed + 1, p), p) <= 5
    assert bool((keep_factors(key, 2, 0, 1.0) == 0).all())


@pytest.mark.parametrize("native", NATIVE)
def test_the_kernel_draws_the_same_mask(native: bool):
    """Each target has one edge, of weight 1: the output is the mask."""
    count, heads, p = 1000, 5, 0.3
    key = torch.randint(-(2**31), 2**31, (count,))
    identity = Edges(torch.arange(count), torch.arange(count + 1), None, None)
    attention = Attention(
        kind="additive",
        value=torch.ones(count, heads, 1, dtype=torch.float64),
        key=torch.zeros(count, heads, dtype=torch.float64),
        query=None,
        drop_key=key,
        seed=-(2**60) + 3,
        p=p,
    )
    state = AttentionState.start(count, attention.value)
    attention_(state, attention, identity, native=native)
    expected = keep_factors(key, heads, attention.seed, p)
    torch.testing.assert_close(state.finish().squeeze(-1), expected)


# Threads, strides, bad input ##################################################


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_chance(kind: str, native: bool):
    """Rows don't depend on the number of threads; what threads share does, but not on chance."""
    given = problem(kind, edges=9000, sources=300, targets=200, features=2, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 3, 7):
            torch.set_num_threads(count)
            found.append(computed(given, native))
    finally:
        torch.set_num_threads(before)
    (out, first), others = found[0], found[1:]
    by_row = {"value", "key", "edge_attr"} | ({"query"} if kind != "additive" else set())
    for other_out, other in others:
        assert torch.equal(out, other_out)
        for name in first:
            if name in by_row:
                assert torch.equal(first[name], other[name]), name
            torch.testing.assert_close(first[name], other[name], rtol=1e-3, atol=1e-3)
    assert all(torch.equal(t, found[3][1][n]) for n, t in found[2][1].items())


def scattered(x: Tensor) -> Tensor:
    """The same numbers, apart in memory along every axis."""
    wide = x.new_full([2 * n + 1 for n in x.shape], 7)
    view = wide[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
    view.copy_(x)
    assert not view.is_contiguous() or x.numel() <= 1
    return view


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_and_views(kind: str, native: bool):
    given = problem(kind, features=2, p=0.2)
    apart = {n: scattered(t) for n, t in given.attention.tensors().items()}
    key = scattered(given.attention.drop_key)  # type: ignore[arg-type]
    attention = replace(given.attention, **apart, drop_key=key)
    state = AttentionState.start(given.num_targets, attention.value)
    state = AttentionState(*(scattered(t) for t in (state.acc, state.maximum, state.normaliser)))
    zeros = {n: scattered(torch.zeros_like(t)) for n, t in apart.items()}
    # Columns of a wider buffer, as rows travel between workers.
    zeros["value"] = torch.zeros(given.num_sources, 50, dtype=torch.float64)[:, 4:36].unflatten(
        1, (4, 8)
    )
    gradients = AttentionGradients(**zeros)
    ((_, forward, backward),) = shards_of(given, 1)
    attention_(state, attention, forward, native=native)
    out = state.finish()
    known = (given.grad_out, state.maximum, state.normaliser, (given.grad_out * out).sum(-1))
    cotangent = Cotangent(*(scattered(t) for t in known))
    attention_backward_sources_(gradients, attention, cotangent, backward, native=native)
    attention_backward_targets_(gradients, attention, cotangent, forward, native=native)
    assert worst((out, gradients.wanted()), looped(given))[0] <= 1e-12


@pytest.mark.parametrize("native", BOTH)
def test_what_is_known_of_targets_side_by_side(native: bool):
    """As targets' rows come from other workers: each with its query, in one row of a buffer."""
    given = problem("additive", features=0, p=0.2)
    attention, heads = given.attention, given.grad_out.size(1)
    state = AttentionState.start(given.num_targets, attention.value)
    ((_, forward, backward),) = shards_of(given, 1)
    out = attention_(state, attention, forward, native=native).finish()
    delta, query = (given.grad_out * out).sum(-1), attention.query
    assert query is not None and query.shape == delta.shape
    known = given.grad_out, state.maximum, state.normaliser, delta, query
    rows = torch.cat([t.flatten(1) for t in known], 1)
    wide, *narrow = rows.split([rows.size(1) - 4 * heads, *[heads] * 4], 1)
    gradients = AttentionGradients(
        **{name: torch.zeros_like(t) for name, t in attention.tensors().items()}
    )
    cotangent = Cotangent(wide.view_as(given.grad_out), *narrow[:3])
    attention = replace(attention, query=narrow[3])
    attention_backward_sources_(gradients, attention, cotangent, backward, native=native)
    assert worst((out, gradients.wanted()), looped(given))[0] <= 1e-12


def changed(given: Edges, changes: dict[str, Any]) -> Edges:
    return replace(given, **{n: change(getattr(given, n).clone()) for n, change in changes.items()})


BAD_EDGES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "source too large": ({"source": lambda v: v.fill_(20)}, IndexError, "outside|out of"),
    "source negative": ({"source": lambda v: v - 30}, IndexError, "outside|out of"),
    "edges too large": ({"edges": lambda v: v + 1}, IndexError, "outside|out of"),
    "edges negative": ({"edges": lambda v: v - 400}, IndexError, "outside|out of"),
    "offsets start late": ({"offsets": lambda v: v.clamp(min=1)}, ValueError, "ascend from 0"),
    "offsets too large": ({"offsets": lambda v: v * 2}, ValueError, "ascend from 0"),
    "offsets fall": ({"offsets": lambda v: v[[0, 2, 1, *range(3, len(v))]]}, ValueError, "ascend"),
    "targets too large": ({"targets": lambda v: v + 9}, IndexError, "ascending|out of"),
    "offsets dtype": ({"offsets": lambda v: v.long()}, TypeError, "dtype of 'source'"),
    "edges lengths": ({"edges": lambda v: v[1:]}, ValueError, "each of the 300 edges"),
    "targets dtype": ({"targets": lambda v: v.int()}, TypeError, "'targets' of dtype"),
    "targets length": ({"targets": lambda v: v[1:]}, ValueError, "'targets' of shape"),
    "source dtype": ({"source": lambda v: v.short()}, TypeError, "int32 or int64"),
}


@pytest.mark.parametrize("native", BOTH)
def test_bad_edges_raise(native: bool):
    given = problem("additive", features=2)
    ((_, forward, backward),) = shards_of(given, 1, squeezed=True)
    for name, (changes, kind, text) in BAD_EDGES.items():
        state = AttentionState.start(given.num_targets, given.attention.value)
        with pytest.raises(kind, match=text):
            attention_(state, given.attention, changed(forward, changes), native=native)
        cotangent = Cotangent.of(given.grad_out, state.acc, state.maximum, state.normaliser)
        gradients = AttentionGradients(value=torch.zeros_like(given.attention.value))
        if name != "targets too large":
            wrong = given.attention, cotangent, changed(backward, changes)
            with pytest.raises(kind, match=text):
                attention_backward_sources_(gradients, *wrong, native=native)


@pytest.mark.parametrize("native", NATIVE)
def test_two_segments_of_one_row_raise(native: bool):
    given = problem("dot")
    ((_, forward, _),) = shards_of(given, 1, squeezed=True)
    state = AttentionState.start(given.num_targets, given.attention.value)
    with pytest.raises(IndexError, match="ascending 'targets'"):
        attention_(state, given.attention, changed(forward, {"targets": lambda v: v // 2}))


BAD_TENSORS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "kind": ("dot", {"kind": "cosine"}, ValueError, "'kind' to be one of"),
    "axes": ("dot", {"value": torch.zeros(3, 4)}, ValueError, r"\[M, H, C\]"),
    "query": ("dot", {"query": None}, ValueError, "'query' of shape"),
    "key": ("additive", {"key": None}, ValueError, "'key' of shape"),
    "key rows": ("additive", {"key": torch.zeros(19, 4).double()}, ValueError, "'key' of shape"),
    "att": ("gatv2", {"att": None}, ValueError, "'att' of shape"),
    "no att": ("dot", {"att": torch.zeros(4, 8).double()}, ValueError, "'att' of shape None"),
    "edge weight": ("dot", {"edge_weight": None}, ValueError, "'edge_weight' of shape"),
    "mixed edges": (
        "mixed",
        {"edge_attr": torch.zeros(300, 2).double()},
        ValueError,
        "'edge_attr' of shape None",
    ),
    "tanh heads": ("tanh", {"value": torch.zeros(20, 2, 8).double()}, ValueError, "a single head"),
    "tanh edges": (
        "tanh",
        {"edge_attr": torch.zeros(300, 2).double()},
        ValueError,
        "'edge_attr' of shape",
    ),
    "edge attr": ("dot", {"edge_attr": None}, ValueError, "'edge_weight' of shape None"),
    "edge rows": ("dot", {"edge_attr": torch.zeros(9, 2).double()}, IndexError, "outside|out of"),
    "dtype": ("dot", {"query": torch.zeros(15, 4, 8)}, TypeError, "dtype of 'value'"),
    "p": ("dot", {"p": 1.5}, ValueError, "'p' between 0 and 1"),
    "no keys": ("dot", {"p": 0.5}, ValueError, "needs a 'drop_key'"),
    "key dtype": ("dot", {"drop_key": torch.zeros(300)}, TypeError, "int32 or int64 'drop_key'"),
    "few keys": ("dot", {"p": 0.5, "drop_key": torch.arange(9)}, IndexError, "outside|out of"),
}


@pytest.mark.parametrize("native", BOTH)
def test_bad_tensors_raise(native: bool):
    for score, changes, kind, text in BAD_TENSORS.values():
        given = problem(score, features=2)
        ((_, forward, _),) = shards_of(given, 1)
        state = AttentionState.start(given.num_targets, given.attention.value)
        with pytest.raises(kind, match=text):
            attention_(state, replace(given.attention, **changes), forward, native=native)


def test_states_and_gradients_that_do_not_fit_raise():
    given = problem("gatv2", own_key=False)
    ((_, forward, _),) = shards_of(given, 1)
    state = AttentionState.start(given.num_targets, given.attention.value)
    for wrong, kind in (
        (replace(state, acc=state.acc[1:]), ValueError),
        (replace(state, acc=state.acc.float()), TypeError),
        (replace(state, maximum=state.maximum[:, 1:]), ValueError),
    ):
        with pytest.raises(kind, match="attention: expected"):
            attention_(wrong, given.attention, forward)
    cotangent = Cotangent.of(given.grad_out, state.acc, state.maximum, state.normaliser)
    key = torch.zeros(20, 4, 8, dtype=torch.float64)
    for gradients in (AttentionGradients(key=key), AttentionGradients(att=key)):
        with pytest.raises(ValueError, match="attention"):
            attention_backward_targets_(gradients, given.attention, cotangent, forward)


@pytest.mark.parametrize("native", NATIVE)
def test_rows_that_share_memory_are_not_added_to(native: bool):
    given = problem("dot")
    ((_, forward, _),) = shards_of(given, 1)
    state = AttentionState.start(given.num_targets, given.attention.value)
    state = replace(state, acc=state.acc[:1].expand_as(state.acc))
    with pytest.raises(RuntimeError, match="single memory location"):
        attention_(state, given.attention, forward, native=native)


def test_a_gradient_is_not_lost_silently():
    given = problem("dot")
    given.attention.value.requires_grad_()
    ((_, forward, _),) = shards_of(given, 1)
    state = AttentionState.start(given.num_targets, given.attention.value)
    with pytest.raises(ValueError, match="not recorded by autograd"):
        attention_(state, given.attention, forward)
    with torch.no_grad():
        attention_(state, given.attention, forward)


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_are_registered_as_torch_wants_them(kind: str, native: bool):
    given = problem(kind, edges=20, features=2, p=0.5, dtype=torch.float32)
    a, number = given.attention, number_of(kind)
    assert a.drop_key is not None
    ((_, forward, backward),) = shards_of(given, 1)
    state = AttentionState.start(given.num_targets, a.value)
    tensors = (a.value, a.key, a.query, a.att, a.edge_attr, a.edge_weight, a.slope, a.scale)

    def arguments(e: Edges) -> tuple[Any, ...]:
        key = a.drop_key.int()  # type: ignore[union-attr]
        return (number, *tensors, e.source, e.offsets, e.targets, e.edges, key, 1, 2, a.p)

    states = (state.acc, state.maximum, state.normaliser)
    torch.library.opcheck(torch.ops.pyg_sar.attention_.default, (*states, *arguments(forward)))
    attention_(state, a, forward)
    known = (given.grad_out, state.maximum, state.normaliser, torch.zeros_like(state.maximum))
    zeros = {n: torch.zeros_like(t) for n, t in a.tensors().items()}
    others = [zeros.get(n) for n in ("query", "edge_attr", "edge_weight")]
    written = [zeros["value"], zeros["key"], *(others if kind == "additive" else [None] * 3)]
    torch.library.opcheck(
        torch.ops.pyg_sar.attention_backward_sources_.default,
        (*written, *known, *arguments(backward)),
    )
    if kind != "additive":
        torch.library.opcheck(
            torch.ops.pyg_sar.attention_backward_targets_.default,
            (others[0], zeros.get("att"), *others[1:], *known, *arguments(forward)),
        )
