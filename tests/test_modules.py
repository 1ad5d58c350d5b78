"""A sweep over ``torch.nn``: of node tensors each module gives one process's numbers, or raises.

The samples are those that PyTorch tests its own modules with (``ModuleInfo``).
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from oracle import parts
from test_operators import equal, layout, same_gradients
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_sar.comm import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import Rows, mapped, node_rows, whole, wrap

DOUBLE = torch.float64


def modules() -> list[Any]:
    pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db

    return list(module_db)


def samples(info: Any, most: int) -> list[Any]:
    """Some samples of a module: each a module and the arguments of a call."""
    found = []
    torch.manual_seed(0)
    given = [
        sample
        for sample in info.module_inputs_func(
            info, device="cpu", dtype=DOUBLE, requires_grad=True, training=True
        )
        if sample.forward_input is not None
    ]
    for sample in given[:: max(1, len(given) // most)][:most]:
        build, call = sample.constructor_input, sample.forward_input
        try:
            module = info.module_cls(*build.args, **build.kwargs).double()
            module(*copied(call.args), **copied(call.kwargs))  # Lazy ones begin.
        except (RuntimeError, TypeError, ValueError):
            continue
        found.append((module, call.args, call.kwargs))
    return found


def copied(value: Any) -> Any:
    return mapped(lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)


def spread(value: Any, rows: Rows, axis: int) -> Any:
    """Tensors with as many rows at an axis as node tensors."""

    def change(t: Tensor) -> Tensor:
        if t.dim() <= axis or t.size(axis) != rows.total:
            return t.detach().clone().requires_grad_(t.requires_grad)
        local = t.detach().index_select(axis, rows.ids)
        return wrap(local, rows, axis).requires_grad_(t.requires_grad)

    return mapped(change, value)


def called(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What a module gives, and the gradients of its inputs and parameters."""
    out = module(*args, **kwargs)
    parts = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    inputs += list(module.parameters())
    wanted = [t for t in inputs if t.requires_grad]
    if not parts or not wanted:
        return out, ()
    weighed = [
        (t * torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in parts
    ]
    return out, torch.autograd.grad(sum(weighed), wanted, allow_unused=True)


def problem(sample: Any, axis: int) -> str | None:
    """Returns how a call differs; an empty text: it doesn't; ``None``: it has no nodes there."""
    module, args, kwargs = sample
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    if first.dim() <= axis or first.size(axis) < 2 or not first.numel():
        return None
    plain = copy.deepcopy(module)
    expected = called(plain, copied(args), copied(kwargs))
    rows = layout(first.size(axis))
    ours = copy.deepcopy(module)
    try:
        found = called(ours, spread(args, rows, axis), spread(kwargs, rows, axis))
    except DistributedIndexError as error:
        return f"refused: {str(error)[:150]}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    if not equal(list(tree_leaves(expected[0])), list(tree_leaves(found[0]))):
        return "other values"
    if not same_gradients(expected[1], found[1]):
        return "other gradients"
    if not equal(list(plain.buffers()), list(ours.buffers())):
        return "other buffers"
    return ""


def test_every_module_is_right_or_refused(pytestconfig: pytest.Config) -> None:
    """None of them is refused today."""
    most = 40 if pytestconfig.getoption("--operators") else 2

    def run() -> list[str]:
        texts = []
        for name, sample in found:
            for axis in (0, 1):
                text = problem(sample, axis)
                if text:
                    texts.append(f"{name}, nodes along axis {axis}: {text}")
        return texts

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(info.name, one) for info in modules() for one in samples(info, most)]
        for problems in parts(run, 2):
            assert problems == []
    assert len({name for name, _ in found}) > 100


def test_recurrent_layers_in_single_precision() -> None:
    """They take another operator there; and a worker may have no node."""
    torch.manual_seed(0)
    cases = []
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        for by_nodes in (True, False):
            layer = kind(5, 4, num_layers=2, bidirectional=True, batch_first=by_nodes)
            x = torch.randn((7, 3, 5) if by_nodes else (3, 7, 5), requires_grad=True)
            cases.append((layer, x, 0 if by_nodes else 1, called(layer, (x,), {})))

    def run(world: int) -> list[str]:
        comm, texts = current(), []
        owner = torch.arange(7) % max(world - 1, 1)  # The last worker has none.
        rows = node_rows(comm, (owner == comm.rank).nonzero().view(-1), 7)
        for layer, x, axis, expected in cases:
            found = called(copy.deepcopy(layer), (spread(x, rows, axis),), {})
            for one, other in zip(*map(tree_leaves, (expected, found)), strict=True):
                if not torch.allclose(one, whole(other, "test"), rtol=1e-5, atol=1e-5):
                    texts.append(f"{type(layer).__name__}, nodes along axis {axis}")
        return texts

    for world in (1, 3):
        for texts in parts(run, world, world):
            assert texts == []
