"""Gradients by source row of additive attention: the loops that compute no exponential per edge."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_problems import BOTH, NATIVE, Edges, Problem, looped, problem, shards_of
from torch import Tensor

from pyg_sar.kernels.attention_ops import attention_, attention_backward_sources_
from pyg_sar.kernels.attention_terms import Attention, AttentionGradients, AttentionState, Cotangent

NAMES = ("value", "key", "query")
TOLERANCE = 2e-5


def known(given: Problem, forward: Edges, native: bool) -> Cotangent:
    state = AttentionState.start(given.num_targets, given.attention.value)
    attention_(state, given.attention, forward, native=native)
    return Cotangent.of(given.grad_out, state.finish(), state.maximum, state.normaliser)


def packed(value: Tensor, key: Tensor, spare: int) -> tuple[Tensor, Tensor]:
    """The same numbers as columns of one buffer, as rows travel between workers."""
    heads, width = key.size(1), value[0].numel()
    buffer = value.new_full((value.size(0), width + heads + spare), math.nan)
    buffer[:, :width], buffer[:, width : width + heads] = value.flatten(1), key
    return buffer[:, :width].unflatten(1, value.shape[1:]), buffer[:, width : width + heads]


def found(
    attention: Attention,
    cotangent: Cotangent,
    backward: Edges,
    native: bool,
    names: tuple[str, ...] = NAMES,
    before: float = 0.0,
    spare: int = 0,
) -> dict[str, Tensor]:
    """The gradients of ``names``, added to ``before``."""
    assert attention.key is not None
    shape = (attention.num_sources, *attention.value.shape[1:])
    value, key = torch.full(shape, before), torch.full(shape[:2], before)
    zeros = dict(zip(("value", "key"), packed(value, key, spare), strict=True))
    if attention.query is not None:
        zeros["query"] = torch.full_like(attention.query, before)
    gradients = AttentionGradients(**{n: t for n, t in zeros.items() if n in names})
    attention_backward_sources_(gradients, attention, cotangent, backward, native=native)
    return gradients.wanted()


def computed(given: Problem, native: bool, squeezed: bool = False) -> dict[str, Tensor]:
    ((_, forward, backward),) = shards_of(given, 1, squeezed)
    return found(given.attention, known(given, forward, native), backward, native)


def check(result: dict[str, Tensor], given: Problem, before: float = 0.0) -> None:
    expected = looped(given)[1]
    assert result and set(result) <= set(expected)
    for name, gradient in result.items():
        assert bool(gradient.isfinite().all()), name
        apart = (gradient.double() - before - expected[name]).abs().max()
        assert float(apart) <= TOLERANCE * float(expected[name].abs().max().clamp(min=1)), name


def scores(key: Tensor, query: Tensor, heads: int, slope: float) -> Problem:
    """Every pair of a key and a query."""
    count, others = key.numel(), query.numel()
    given = problem("additive", heads, 16, dtype=torch.float32, sources=count, targets=others)
    source = torch.arange(count).repeat_interleave(others)
    attention = replace(
        given.attention,
        key=key.view(-1, 1).repeat(1, heads),
        query=query.view(-1, 1).repeat(1, heads),
        slope=slope,
    )
    target = torch.arange(others).repeat(count)
    return replace(given, attention=attention, source=source, target=target)


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("heads", [*range(1, 9), 11, 32])
def test_all_heads_and_widths(heads: int, native: bool):
    """Segments from none to more edges than several groups; rows in buffers of several strides.

    Of the edges, half are dropped where there are many: a bit for each head.
    """
    for channels in (1, 3, 8, 10, 16, 25, 32, 47, 64, 70, 97, 128, 129):
        if heads * channels < 8 or (heads > 8 and channels > 64):
            continue
        for edges, sources, targets, spare in ((1, 3, 2, 0), (90, 30, 9, 3), (400, 12, 25, 16)):
            given = problem(
                "additive", heads, channels, 0, 0.0, torch.float32, edges, sources, targets
            )
            a = given.attention
            if edges > 90:
                bits = torch.randint(-(2**31), 2**31, (edges, 1), dtype=torch.int32)
                a = replace(a, drop_key=bits, p=0.5)
            given = replace(given, attention=a)
            ((_, forward, backward),) = shards_of(given, 1)
            assert a.key is not None
            value, key = packed(a.value, a.key, spare)
            attention = replace(a, value=value, key=key)
            cotangent = known(given, forward, native)
            wide = packed(given.grad_out, cotangent.delta, spare)[0]
            cotangent = replace(cotangent, grad_out=wide)
            result = found(attention, cotangent, backward, native, before=0.5, spare=spare)
            check(result, given, before=0.5)


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("squeezed", [False, True])
def test_rows_among_others(squeezed: bool, native: bool):
    """What no edge names isn't read, be it NaN or a number like any other."""
    for heads, channels in ((4, 32), (3, 8), (1, 47), (8, 16)):
        given = problem("additive", heads, channels, 0, 0.0, torch.float32, 200, 31, 20)
        a = given.attention
        assert a.key is not None
        ((_, forward, backward),) = shards_of(given, 1, squeezed)
        cotangent = known(given, forward, native)
        order = torch.randperm(2 * given.num_sources)
        places = order.argsort()[: given.num_sources].int()
        for other in (math.nan, 5.0):
            value, key = (
                torch.cat([t, torch.full_like(t, other)])[order] for t in (a.value, a.key)
            )
            attention = replace(a, value=value, key=key, places=places)
            check(found(attention, cotangent, backward, native), given)


@pytest.mark.parametrize("native", BOTH)
def test_rows_without_edges_may_hold_anything(native: bool):
    given = problem("additive", 4, 16, 0, 0.0, torch.float32, edges=100, sources=20, targets=15)
    ((_, forward, backward),) = shards_of(given, 1)
    a, cotangent = given.attention, known(given, forward, native)
    lonely = torch.bincount(given.target, minlength=15) == 0
    unused = torch.bincount(given.source, minlength=20) == 0
    assert bool(lonely.any()) and bool(unused.any())
    assert bool((cotangent.maximum[lonely] == -math.inf).all())
    assert a.key is not None and a.query is not None
    key, value, query = a.key.clone(), a.value.clone(), a.query.clone()
    key[unused], value[unused], query[lonely] = 1e30, math.nan, math.nan
    for bad in (math.nan, math.inf, -math.inf):
        normaliser, delta = cotangent.normaliser.clone(), cotangent.delta.clone()
        grad_out = cotangent.grad_out.clone()
        for rows in (normaliser, delta, grad_out):
            rows[lonely] = bad
        about = replace(cotangent, grad_out=grad_out, normaliser=normaliser, delta=delta)
        attention = replace(a, key=key, value=value, query=query)
        check(found(attention, about, backward, native), given)


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8])
def test_scores_of_zero_and_near_it(heads: int, native: bool):
    """The sign of a sum says which slope it has, where both products are the same number."""
    step = 2.0**-23
    for slope in (0.0, 0.2, 1.0):
        key = torch.tensor([-1.5, -1 - 2 * step, -1 - step, -1.0, -1 + step / 2, 0.0, 0.5, 3.0])
        query = torch.tensor([1.0, 1 - step, 1 + step, 0.0, -0.5, 1.5, -3.0])
        given = scores(key, query, heads, slope)
        sums = key.view(-1, 1) + query
        assert all(bool(x.any()) for x in (sums == 0, (sums > 0) & (sums < 1e-6), sums < 0))
        check(computed(given, native), given)


@pytest.mark.parametrize("native", BOTH)
def test_keys_of_all_sizes(native: bool):
    """Those that have no factors, too: one in the last row, of the last head."""
    for most in (11.9, 12.1, 60.0, 300.0):
        for sign in (1, -1):
            key = torch.linspace(-1, 1, 40)
            key[-1] = sign * most
            for scale in (1.0, 90.0):
                for heads in (4, 11):
                    given = scores(key, torch.linspace(-scale, scale, 9), heads, 0.2)
                    assert given.attention.key is not None
                    given.attention.key[-1, :-1] = 1.0
                    check(computed(given, native), given)


@pytest.mark.parametrize("native", BOTH)
def test_slopes_with_which_it_is_no_maximum(native: bool):
    for slope in (-0.5, 1.5):
        given = scores(torch.linspace(-2, 2, 11), torch.linspace(-2, 2, 9), 4, slope)
        check(computed(given, native), given)


@pytest.mark.parametrize("native", NATIVE)
def test_gradients_that_are_not_wanted(native: bool):
    """The others are the same to the bit."""
    for heads, channels in ((4, 32), (5, 8), (1, 47)):
        given = problem("additive", heads, channels, 0, 0.0, torch.float32, 500, 40, 30)
        ((_, forward, backward),) = shards_of(given, 1)
        cotangent = known(given, forward, native)
        whole = found(given.attention, cotangent, backward, native)
        for names in (NAMES[:1], NAMES[1:2], NAMES[2:], NAMES[:2], NAMES[1:], NAMES[::2]):
            some = found(given.attention, cotangent, backward, native, names)
            assert set(some) == set(names)
            assert all(torch.equal(t, whole[n]) for n, t in some.items())


@pytest.mark.parametrize("native", NATIVE)
def test_rows_do_not_depend_on_the_number_of_threads(native: bool):
    given = problem("additive", 4, 32, 0, 0.0, torch.float32, 30_000, 4000, 900)
    ((_, forward, backward),) = shards_of(given, 1)
    cotangent, before, results = known(given, forward, native), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 3, 7):
            torch.set_num_threads(count)
            results.append(found(given.attention, cotangent, backward, native))
    finally:
        torch.set_num_threads(before)
    first = results[0]
    for result in results[1:]:
        assert torch.equal(result["value"], first["value"])
        assert torch.equal(result["key"], first["key"])
        torch.testing.assert_close(result["query"], first["query"], rtol=1e-4, atol=1e-4)
    assert torch.equal(results[2]["query"], results[3]["query"])


@pytest.mark.parametrize("edges", [250, 550, 3000])
@pytest.mark.parametrize("native", NATIVE)
def test_rows_beside_the_sources_change_no_bit(edges: int, native: bool) -> None:
    """Those of other parts' targets, in a table that parts of a process share."""
    given = problem("additive", 4, 8, dtype=torch.float32, sources=200, targets=60, edges=edges)
    assert given.attention.key is not None
    ((_, forward, backward),) = shards_of(given, 1)
    places = torch.arange(3, 3 + 5 * 200, 5)
    value = torch.full((1100, 4, 8), math.nan).index_copy_(0, places, given.attention.value)
    key = torch.full((1100, 4), 50.0).index_copy_(0, places, given.attention.key)
    beside = replace(given.attention, value=value, key=key, places=places)
    states = []
    for attention in (given.attention, beside):
        state = AttentionState.start(given.num_targets, value)
        states.append(attention_(state, attention, forward, native=native))
    for name in ("acc", "maximum", "normaliser"):
        assert torch.equal(*[getattr(state, name) for state in states]), name
    cotangent = known(given, forward, native)
    both = [found(a, cotangent, backward, native) for a in (given.attention, beside)]
    for name in NAMES:
        assert torch.equal(both[0][name], both[1][name]), name
