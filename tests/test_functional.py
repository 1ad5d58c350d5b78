"""Sums and attention that autograd records: values, gradients, how PyTorch sees the operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problems import Problem, looped, problem, shards_of
from torch import Tensor

from pyg_sar import functional
from pyg_sar.functional import gather_sum, sorted_edges
from pyg_sar.kernels import ops
from pyg_sar.kernels.attention_ops import arguments_of
from pyg_sar.kernels.attention_terms import Attention
from pyg_sar.kernels.scores import SCORES

ALL = tuple(SCORES)
KINDS = tuple(name for name, score in SCORES.items() if score.softmax)  # by a kernel of their own
MISSING = ops.why_missing()
NATIVE = [pytest.param(True, marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)))]
BOTH = [False, *NATIVE]
needs_kernels = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def recorded(given: Problem) -> tuple[Problem, dict[str, Tensor]]:
    """The problem with leaves that want a gradient."""
    leaves = {n: t.detach().requires_grad_() for n, t in given.attention.tensors().items()}
    return replace(given, attention=replace(given.attention, **leaves)), leaves


def edges_of(given: Problem, index: torch.dtype = torch.int32) -> Any:
    ((_, edges, _),) = shards_of(given, 1, False, index)
    return edges


def attention(terms: Attention, edges: Any, native: bool | None = None) -> Tensor:
    """The function of the same name, of a problem's terms."""
    names = ("att", "edge_attr", "edge_weight", "slope", "scale", "drop_key", "seed", "p")
    given = {name: getattr(terms, name) for name in names}
    ends = (edges.source, edges.offsets, edges.edges)
    main = (terms.kind, terms.value, terms.key, terms.query)
    return functional.attention(*main, *ends, **given, native=native)


def small(kind: str, p: float = 0.0) -> Problem:
    return problem(kind, 2, 3, 2, p, edges=20, sources=5, targets=6)


# Attention ####################################################################


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("kind", ALL)
def test_attention_and_its_gradients_equal_a_loop(kind: str, native: bool):
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
        for features, p, index in (
            (0, 0.0, torch.int32),
            (3, 0.0, torch.int64),
            (2, 0.4, torch.int32),
        ):
            given, leaves = recorded(problem(kind, 3, 5, features, p, dtype, seed=features))
            out = attention(given.attention, edges_of(given, index), native=native)
            found = torch.autograd.grad(out, list(leaves.values()), given.grad_out)
            expected, gradients = looped(given)
            assert out.dtype == dtype and out.shape == expected.shape
            for name, one, other in zip(leaves, found, gradients.values(), strict=True):
                scale = other.abs().max().clamp(min=1)
                assert float((one.double() - other).abs().max() / scale) <= tolerance, name
            assert float((out.detach().double() - expected).abs().max()) <= tolerance * 10


@pytest.mark.parametrize("native", BOTH)
def test_only_wanted_gradients_and_shared_keys(native: bool):
    """Values that are the keys, and a single leaf at a time."""
    given = problem("gatv2", 2, 3, 2, own_key=False)
    expected = looped(given)[1]
    for name, tensor in given.attention.tensors().items():
        leaf = tensor.detach().requires_grad_()
        terms = replace(given.attention, **{name: leaf})
        out = attention(terms, edges_of(given), native=native)
        (found,) = torch.autograd.grad(out, leaf, given.grad_out)
        torch.testing.assert_close(found, expected[name])


@pytest.mark.parametrize("native", BOTH)
def test_half_precision_and_no_edges(native: bool):
    for kind in ALL:
        given, leaves = recorded(problem(kind, dtype=torch.bfloat16, edges=0))
        out = attention(given.attention, edges_of(given), native=native)
        assert out.dtype == torch.bfloat16 and not bool(out.any())
        for gradient in torch.autograd.grad(out.sum(), list(leaves.values())):
            assert gradient.dtype == torch.bfloat16 and not bool(gradient.any())


@pytest.mark.parametrize("native", BOTH)
def test_targets_without_a_query(native: bool):
    given = problem("additive")
    terms, edges = replace(given.attention, query=None), edges_of(given)
    expected = looped(replace(given, attention=terms))[0]
    torch.testing.assert_close(attention(terms, edges, native=native), expected)
    few = replace(given.attention, query=present(given.attention.query)[:-1])
    with pytest.raises(ValueError, match="a row for each of the 15 targets"):
        attention(few, edges, native=native)


def present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


@needs_kernels
@pytest.mark.parametrize(("kind", "p"), [(kind, k % 2 * 0.5) for k, kind in enumerate(KINDS)])
def test_the_attention_operator_passes_opcheck(kind: str, p: float):
    """Schema, fake and autograd registration, and a trace of both passes with symbolic shapes."""
    given, _ = recorded(small(kind, p))
    arguments = (*arguments_of(given.attention, edges_of(given)), given.num_targets)
    found = torch.library.opcheck(torch.ops.pyg_sar.attention.default, arguments)
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


@needs_kernels
def test_second_derivatives_are_refused():
    given, leaves = recorded(small("dot"))
    out = attention(given.attention, edges_of(given))
    with pytest.raises(NotImplementedError, match="attention has no second derivatives"):
        torch.autograd.grad(out.sum(), leaves["value"], create_graph=True)


@needs_kernels
def test_an_output_that_was_changed_is_noticed():
    given, _ = recorded(small("dot"))
    out = attention(given.attention, edges_of(given))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# Sums #########################################################################


def edge_list(seed: int = 0) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Edges among 7 sources and 6 targets, of which the last have none."""
    draw = torch.Generator().manual_seed(seed)
    source, target = (
        torch.randint(6, (30,), generator=draw),
        torch.randint(5, (30,), generator=draw),
    )
    return source, target, sorted_edges(torch.stack([source, target]), 7, 6)


@pytest.mark.parametrize("native", BOTH)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_and_their_gradients(weighted: bool, native: bool):
    source, target, edges = edge_list()
    rows = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, dtype=torch.float64, requires_grad=True)
    leaves = (rows, weight) if weighted else (rows,)

    def fn(rows: Tensor, weight: Tensor | None = None) -> Tensor:
        ordered = None if weight is None else weight[edges[2]]
        return gather_sum(rows, *edges[:2], ordered, native=native)

    messages = rows[source] * weight.unsqueeze(-1) if weighted else rows[source]
    expected = rows.new_zeros(6, 4).index_add(0, target, messages)
    torch.testing.assert_close(fn(*leaves), expected)
    assert torch.autograd.gradcheck(fn, leaves)
    for one in range(len(leaves)):
        alone = [t if k == one else t.detach() for k, t in enumerate(leaves)]
        probe = torch.randn(6, 4, dtype=torch.float64)
        found = torch.autograd.grad(fn(*alone), alone[one], probe)
        torch.testing.assert_close(found, torch.autograd.grad(expected, leaves[one], probe, True))


@pytest.mark.parametrize("native", BOTH)
def test_sums_of_half_precision(native: bool):
    source, target, edges = edge_list()
    rows = torch.randn(7, 4).bfloat16().requires_grad_()
    weight = torch.rand(30).bfloat16().requires_grad_()
    out = gather_sum(rows, *edges[:2], weight[edges[2]], native=native)
    products = rows.float()[source] * weight.float().unsqueeze(-1)
    expected = torch.zeros(6, 4).index_add(0, target, products)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    for gradient in torch.autograd.grad(out.float().sum(), (rows, weight)):
        assert gradient.dtype == torch.bfloat16 and bool(gradient.isfinite().all())


@pytest.mark.parametrize("native", BOTH)
def test_bad_sums_raise(native: bool):
    _, _, edges = edge_list()
    for rows, weight, match in (
        (torch.zeros(7), None, r"\[M, F\]"),
        (torch.zeros(7, 4).long(), None, "floating point"),
        (torch.zeros(7, 4), torch.zeros(29), "each of the 30 edges"),
    ):
        with pytest.raises(ValueError, match=match):
            gather_sum(rows, *edges[:2], weight, native=native)


@needs_kernels
def test_the_operator_of_sums_passes_opcheck():
    _, _, edges = edge_list()
    rows = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    for weight in (None, torch.randn(30, dtype=torch.float64, requires_grad=True)):
        arguments = (rows, *edges[:2], None, weight, edges[2], 6)
        found = torch.library.opcheck(torch.ops.pyg_sar.gather_sum.default, arguments)
        assert set(found.values()) == {"SUCCESS"} and len(found) == 4
    with pytest.raises(NotImplementedError, match="gather_sum has no second derivatives"):
        torch.autograd.grad(gather_sum(rows, *edges[:2]).sum(), rows, create_graph=True)


@pytest.mark.parametrize("native", BOTH)
def test_edges_are_sorted_by_target_then_by_source(native: bool):
    source, target, _ = edge_list()
    edge_index = torch.stack([source, target])
    found, offsets, edges = sorted_edges(edge_index, 7, 6, native=native)
    order = (target * 7 + source).argsort(stable=True)
    assert torch.equal(edges.long(), order) and torch.equal(found.long(), source[order])
    assert offsets.tolist() == [0, *torch.bincount(target, minlength=6).cumsum(0).tolist()]
    for bad in (edge_index - 1, edge_index + 3):
        with pytest.raises((IndexError, RuntimeError), match="expected"):
            sorted_edges(bad, 7, 6, native=native)
    with pytest.raises(ValueError, match=r"shape \[2, E\]"):
        sorted_edges(source, 7, 6, native=native)
    with pytest.raises(TypeError, match="int64"):
        sorted_edges(edge_index.int(), 7, 6, native=native)
