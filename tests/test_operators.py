"""A sweep over torch's operators: of node tensors each gives the whole tensor's numbers or raises.

The samples are those that PyTorch tests its own operators with (``OpInfo``), of real and of complex
numbers. By default a few of each; ``pytest --operators`` takes more.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from combinations import some
from oracle import parts
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_sar.comm import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import NodeTensor, Rows, mapped, node_rows, whole, wrap
from pyg_sar.tensors.node_tensor import in_memory

WORLD = 2
# Threads share one generator of random numbers; test_node_tensors.py has processes draw.
RANDOM = (
    *("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "cauchy"),
    *("geometric", "rrelu", "empty", "fractional_max_pool", "multi_head_attention", "lowrank"),
)
# Many samples of no use here: quadrature and special functions of one element each.
SLOW = ("svd", "pinv", "lstsq", "ormqr", "eig", "matrix_rank", "cond", "interpolate", "grid_sample")


def transposed(x: Tensor) -> Tensor:
    """The same numbers; the first axis comes last in memory."""
    axes = list(range(x.dim()))[::-1]
    return x.permute(axes).clone(memory_format=torch.contiguous_format).permute(axes)


def apart(x: Tensor) -> Tensor:
    """The same numbers, each second one in memory."""
    return torch.stack([x, x], -1)[..., 0]


# Of a complex tensor: itself, and views with the conjugate and the negative bit.
BITS = (torch.clone, torch.conj, lambda z: z.conj().imag)
# Of a real one: itself, and in other orders in memory.
ORDERS = (torch.clone, transposed, apart)
# Of transposed tensors PyTorch's functions without memory give other strides than those with it.
OTHER_STRIDES = ("copysign", "div", "floor_divide", "fft.")
# The gradient of torch's own determinant is wrong for a view with the negative bit.
PLAIN_WRONG = ("linalg.det",)


def operators() -> list[Any]:
    pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if not any(name in op.name for name in RANDOM + SLOW)]


def samples_of(op: Any, most: int, kind: torch.dtype | None = None) -> list[Any]:
    kinds = op.supported_dtypes("cpu")
    kind = kind or next((k for k in (torch.float64, torch.int64) if k in kinds), None)
    if kind not in kinds:
        return []
    grad = kind.is_floating_point or kind.is_complex
    grad = grad and op.supports_autograd and kind in op.supported_backward_dtypes("cpu")
    try:
        found = list(itertools.islice(op.sample_inputs("cpu", kind, requires_grad=grad), 40))
    except (RuntimeError, ValueError, ImportError):
        return []
    found = [s for s in found if first_of(s) is not None]
    return found[:: max(1, len(found) // most)][:most]


def first_of(sample: Any) -> Tensor | None:
    """The tensor whose rows are spread: one that has several."""
    leaves = [t for t in tree_leaves(sample.input) if isinstance(t, Tensor)]
    fits = bool(leaves) and leaves[0].dim() > 0 and leaves[0].size(0) > 1
    return leaves[0] if fits and leaves[0].layout == torch.strided else None


def layout(total: int) -> Rows:
    comm = current()
    owner = torch.randint(0, WORLD, (total,), generator=torch.Generator().manual_seed(total))
    return node_rows(comm, (owner == comm.rank).nonzero().view(-1), total)


def spread(value: Any, rows: Rows) -> Any:
    """Tensors with as many rows as node tensors."""

    def change(t: Tensor) -> Tensor:
        plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided
        if not plain or t.dim() == 0 or t.size(0) != rows.total:
            return t
        out = wrap(t.detach()[rows.ids].clone(), rows, 0)
        return out.requires_grad_() if t.requires_grad else out

    return mapped(change, value)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = one.detach(), whole(other, "test").detach()
        if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
            return False
        if one.layout != torch.strided:
            return torch.equal(one.to_dense(), other.to_dense())
        return torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))


def same_gradients(one: Any, other: Any) -> bool:
    def zero(t: Tensor | None) -> bool:
        return t is None or not bool(whole(t, "test").any())

    return len(one) == len(other) and all(
        equal(a, b) if a is not None and b is not None else zero(a) and zero(b)
        for a, b in zip(one, other, strict=True)
    )


def gradients(out: Tensor, inputs: list[Any]) -> tuple[Any, ...]:
    weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    if out.is_complex():
        out, weights = (
            torch.view_as_real(out.resolve_conj()),
            torch.stack([weights.real, 2 - weights.real], -1),
        )
    wanted = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
    return torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)


def called(op: Any, given: list[Any], view: Any) -> Any:
    """Calls an operator with views of its arguments: of complex ones for views of bits."""

    def change(t: Tensor) -> Tensor:
        fits = t.dim() > 1 if view in ORDERS else t.is_complex()
        return view(t) if fits and t.layout == torch.strided else t

    first, args, kwargs = mapped(change, given)
    return op(first, *args, **kwargs)


def same_order(one: Any, other: Any) -> bool:
    """Whether results lie in memory in the same order: the same draws go to the same places."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    tensors = [p for p in pairs if isinstance(p[0], Tensor) and p[0].layout == torch.strided]
    return all(in_memory(a) == in_memory(b) for a, b in tensors if a.numel() > 1)


def tried(op: Any, sample: Any, rows: Rows, all_of_them: bool, view: Any = torch.clone) -> str:
    """One call: nothing, or how it differs."""

    def own(t: Tensor) -> Tensor:
        """A leaf of this thread's own."""
        strided = t.layout == torch.strided
        leaf = t.detach().clone(memory_format=torch.contiguous_format) if strided else t.detach()
        return leaf.requires_grad_(t.requires_grad)

    given = mapped(own, [sample.input, sample.args, sample.kwargs])
    found = spread(given, rows) if all_of_them else [spread(given[0], rows), *given[1:]]
    try:
        plain = called(op, given, view)
        learns = isinstance(plain, Tensor) and plain.requires_grad
        right = gradients(plain, given) if learns else ()
    except Exception:
        return ""
    try:
        out = called(op, found, view)
        if not equal(plain, out):
            return "other values"
        others = getattr(op, "name", "").startswith(OTHER_STRIDES)
        if view in ORDERS and not others and not same_order(plain, out):
            return "another order in memory"
        if learns and not same_gradients(right, gradients(out, found)):
            return "other gradients"
    except DistributedIndexError as error:
        return "" if "node tensors" in str(error) or "rows" in str(error) else str(error)
    except NotImplementedError as error:
        return f"no implementation: {error}"
    return ""


def sweep(op: Any, samples: list[Any]) -> list[str]:
    found = []
    for number, sample in enumerate(samples):
        first: Any = first_of(sample)
        rows = layout(first.size(0))
        view = (BITS if first.is_complex() else ORDERS)[number % 3]
        for all_of_them in (False, True):
            problem = tried(op, sample, rows, all_of_them, view)
            if problem:
                what = f"{first.dtype} {list(first.shape)}, view {number % 3}"
                found.append(f"{op.name} of {what}: {problem}")
    return found


GROUPS = ("linalg", "nn.functional", "special", "masked", "fft", "a-f", "g-m", "n-s", "t-z")


def group_of(name: str) -> str:
    head = (
        name.partition(".")[0]
        if name.partition(".")[0] in ("linalg", "special", "masked", "fft")
        else ""
    )
    if name.startswith("nn.functional"):
        return "nn.functional"
    first = name.lstrip("_")[0].lower()
    return head or next(g for g in ("a-f", "g-m", "n-s", "t-z") if g[0] <= first <= g[2])


@pytest.mark.parametrize("group", GROUPS)
def test_every_operator_is_right_or_refused(group: str, pytestconfig: pytest.Config) -> None:
    most = 10 if pytestconfig.getoption("--operators") else 2
    problems = []
    mine = [op for op in operators() if group_of(op.name) == group]
    for op in some(mine, group, 6):
        torch.manual_seed(0)
        samples = samples_of(op, most)
        if op.name not in PLAIN_WRONG:
            samples += samples_of(op, most + 1, torch.complex128)
        if not samples:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for found in parts(sweep, WORLD, op, samples):
                problems += found
    assert problems == []


def test_a_wrong_operator_would_be_found() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x.local.sum() if isinstance(x, NodeTensor) else x.sum()

    class Sample:
        input, args, kwargs = torch.arange(9.0), (), {}

    run = lambda: tried(wrong, Sample, layout(9), False)  # noqa: E731
    assert parts(run, WORLD) == ["other values"] * WORLD
