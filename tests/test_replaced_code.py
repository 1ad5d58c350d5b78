"""Code of PyG and PyTorch that users replace, hooks of all modules, modes: as in one process.

Kernels stand in for that code, and a layer's ``forward`` computes with a worker's rows. Each change
is made before a layer's first call, or between its first and its second one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from combinations import everything
from oracle import Partitions, make_graph, one_pass, parts, workers
from test_exactness import build
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn.conv import gat_conv, gatv2_conv, gcn_conv, transformer_conv

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.row_modules import _is_as_made, _places_of, changes_of
from pyg_sar.nn import one_process

GRAPH = make_graph()
Change = Callable[[], AbstractContextManager[Any]]

# Changes #####################################################################


def replacing(owner: Any, name: str, change: Callable[[Any], Any]) -> Change:
    """Another function in the place of one of a class or a module, around it."""
    own = getattr(owner, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        return change(own(*args, **kwargs))

    return lambda: mock.patch.object(owner, name, other)


def centred(out: Any) -> Any:
    return out - 0.3 * out.mean(0) if isinstance(out, Tensor) else out


def halved(out: Any) -> Any:
    return out * 0.5 if isinstance(out, Tensor) else out


def other_forward(owner: type, change: Callable[[Any], Any] = centred) -> Change:
    """With the signature of the class's own, of which layers ask."""
    own: Any = vars(owner)["forward"]

    def forward(self: Any, x: Any, edge_index: Any, size: Any = None) -> Any:
        return change(own(self, x, edge_index))

    return lambda: mock.patch.object(owner, "forward", forward)


def sage_message(self: Any, x_j: Tensor) -> Tensor:
    return x_j * 0.5


def graph_message(self: Any, x_j: Tensor, edge_weight: Any) -> Tensor:
    return x_j.tanh()


def gat_message(self: Any, x_j: Tensor, alpha: Tensor) -> Tensor:
    return alpha.square().unsqueeze(-1) * x_j


def no_attention(self: Any, alpha_j: Tensor, **_: Any) -> Tensor:
    return torch.ones_like(alpha_j)


def centred_update(self: Any, inputs: Tensor) -> Tensor:
    return centred(inputs)


def no_softmax(src: Tensor, *_: Any, **__: Any) -> Tensor:
    return src.tanh()


def other_norm(edge_index: Any, edge_weight: Any, num_nodes: int, *_: Any) -> Any:
    return edge_index, edge_index[0].double().mean().expand(edge_index.size(1))


def no_draws(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return x * (0.25 if training else 1.0)


@contextlib.contextmanager
def hooked(register: str, change: Callable[[Any], Any], kind: type) -> Iterator[None]:
    def after(module: Any, given: Any, out: Any = None) -> Any:
        return change(out) if isinstance(module, kind) else None

    def before(module: Any, given: Any) -> Any:
        return tuple(map(change, given)) if isinstance(module, kind) else None

    def backwards(module: Any, inputs: Any, outputs: Any) -> Any:
        return tuple(map(change, inputs)) if isinstance(module, kind) else None

    hooks = {FORWARD: after, BEFORE: before, BACKWARD: backwards}
    handle = getattr(all_modules, register)(hooks[register])
    try:
        yield
    finally:
        handle.remove()


class Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is F.leaky_relu else out


def patched(owner: Any, name: str, value: Any) -> Change:
    return lambda: mock.patch.object(owner, name, value)


OTHER_F = SimpleNamespace(**{**vars(F), "leaky_relu": F.relu})
FORWARD = "register_module_forward_hook"
BEFORE = "register_module_forward_pre_hook"
BACKWARD = "register_module_full_backward_hook"


def sage() -> Any:
    return gnn.SAGEConv(6, 5)


def gat() -> Any:
    return gnn.GATConv(6, 5, heads=2, dropout=0.4)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = gnn.SAGEConv(6, 5), norm

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.norm(self.conv(x, edge_index))


def batch() -> Any:
    return Normed(nn.BatchNorm1d(5))


CHANGES: dict[str, tuple[Callable[[], Any], Change]] = {
    "SAGEConv.forward": (sage, other_forward(gnn.SAGEConv)),
    "SAGEConv.message": (sage, patched(gnn.SAGEConv, "message", sage_message)),
    "SAGEConv.update": (sage, patched(gnn.SAGEConv, "update", centred_update)),
    "GraphConv.message": (
        lambda: gnn.GraphConv(6, 5),
        patched(gnn.GraphConv, "message", graph_message),
    ),
    "MessagePassing.aggregate": (sage, replacing(gnn.MessagePassing, "aggregate", centred)),
    "GATConv.message": (gat, patched(gnn.GATConv, "message", gat_message)),
    "GATConv.edge_update": (gat, patched(gnn.GATConv, "edge_update", no_attention)),
    "MeanAggregation.forward": (sage, replacing(gnn.MeanAggregation, "forward", centred)),
    "Linear.forward": (sage, replacing(gnn.Linear, "forward", centred)),
    "gat_conv.softmax": (gat, patched(gat_conv, "softmax", no_softmax)),
    "transformer_conv.softmax": (
        lambda: gnn.TransformerConv(6, 5),
        patched(transformer_conv, "softmax", no_softmax),
    ),
    "gatv2_conv.F": (lambda: gnn.GATv2Conv(6, 5), patched(gatv2_conv, "F", OTHER_F)),
    "F.leaky_relu": (gat, replacing(F, "leaky_relu", halved)),
    "F.dropout": (gat, patched(F, "dropout", no_draws)),
    "gcn_norm": (lambda: gnn.GCNConv(6, 5), patched(gcn_conv, "gcn_norm", other_norm)),
    "hook": (sage, lambda: hooked(FORWARD, centred, gnn.MeanAggregation)),
    "hook of linear": (gat, lambda: hooked(FORWARD, centred, gnn.Linear)),
    "pre hook": (sage, lambda: hooked(BEFORE, centred, gnn.Linear)),
    "backward hook": (sage, lambda: hooked(BACKWARD, halved, gnn.Linear)),
    "mode": (gat, Halves),
    "BatchNorm1d.forward": (batch, replacing(nn.BatchNorm1d, "forward", centred)),
    "hook of norm": (batch, lambda: hooked(FORWARD, centred, nn.BatchNorm1d)),
    "F.batch_norm": (batch, replacing(F, "batch_norm", halved)),
    "GraphNorm.forward": (
        lambda: Normed(gnn.GraphNorm(5)),
        replacing(gnn.GraphNorm, "forward", centred),
    ),
}


def result_of(name: str, when: str, root: Path | None) -> list[dict[str, Any]]:
    make, change = CHANGES[name]
    data = GRAPH if root is None else pyg_sar.load_partition(root)
    layer, found = build(make), []
    with change() if when == "before" else contextlib.nullcontext():
        layer = layer if root is None else pyg_sar.distribute(layer)
        torch.manual_seed(1)
        found.append(vars(one_pass(layer, data)))
    with change() if when == "after" else contextlib.nullcontext():
        torch.manual_seed(2)
        found.append(vars(one_pass(layer, data)))
    return found


def sweep(root: Path | None, cases: list[tuple[str, str]]) -> list[Any]:
    return [result_of(*case, root) for case in cases]


REFUSED = ("F.leaky_relu", "F.dropout", "F.batch_norm")
WHENS = ("before", "after")
CASES = [
    (name, when)
    for k, name in enumerate(name for name in CHANGES if name not in REFUSED)
    for when in WHENS
    if everything() or when == WHENS[k % 2]
]


@pytest.fixture(scope="module")
def root(partitions: Partitions) -> Path:
    return partitions(GRAPH, 2)


def same(results: Any, expected: Any, cases: list[Any]) -> None:
    for case, found, right in zip(cases, results, expected, strict=True):
        torch.testing.assert_close(
            found, right, rtol=1e-9, atol=1e-9, msg=lambda m, case=case: f"{case}: {m}"
        )


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_replaced_code_runs_as_in_one_process(root: Path) -> None:
    expected = sweep(None, CASES)
    for results in workers(sweep, 2, root, CASES):
        same(results, expected, CASES)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("name", ["SAGEConv.forward", "gat_conv.softmax", "hook", "mode"])
def test_parts_share_what_is_replaced(name: str, tmp_path: Path) -> None:
    """All parts of a process see it; a mode is of the thread that enters it."""
    make, change = CHANGES[name]
    root = Partitions(tmp_path)(GRAPH, 3)

    def worker() -> Any:
        own = change() if name == "mode" else contextlib.nullcontext()
        layer = pyg_sar.distribute(build(make)).eval()
        data = pyg_sar.load_partition(root)
        with own:
            return vars(one_pass(layer, data))

    with change():
        expected = vars(one_pass(build(make).eval(), GRAPH))
    with contextlib.nullcontext() if name == "mode" else change():
        results = parts(worker, 3)
    same(results, [expected] * 3, [name] * 3)


def refusals(root: Path) -> list[str]:
    found = []
    for name in REFUSED:
        for when in WHENS:
            with pytest.raises(DistributedIndexError) as caught:
                result_of(name, when, root)
            found.append(str(caught.value))
    return found


def test_functions_that_pytorch_would_call_twice_are_refused(root: Path) -> None:
    for errors in workers(refusals, 2, root):
        for name, error in zip((n for n in REFUSED for _ in WHENS), errors, strict=True):
            assert f"calls torch.nn.functional.{name[2:]}, in whose place" in error


def test_one_process_runs_replaced_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels, where no layer is too small for them."""
    monkeypatch.setattr(one_process, "FEWEST_EDGES", 0)
    for name, (make, change) in CHANGES.items():
        layer, own = build(make).eval(), pyg_sar.distribute(build(make)).eval()
        for when in WHENS:
            with change() if when == "after" else contextlib.nullcontext():
                expected, found = (vars(one_pass(one, GRAPH)) for one in (layer, own))
                same([found], [expected], [(name, when)])


def test_modes_and_hooks_of_pytorch_change_nothing() -> None:
    layer = gat()
    count = FlopCounterMode(display=False)
    with torch.device("cpu"), count:
        assert changes_of(layer) == []
    with Halves():
        assert changes_of(layer) == ["the mode Halves"]
    with hooked(FORWARD, halved, nn.Linear):
        assert changes_of(layer) == ["a hook of all modules (forward_hooks)"]
    assert changes_of(layer) == []


def test_no_class_of_pyg_or_pytorch_is_taken_for_a_changed_one() -> None:
    for name, kind in {**vars(nn), **vars(gnn)}.items():
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            places = _places_of(kind).values()
            assert all(_is_as_made(*place) for place in places), name


@pytest.mark.parametrize("kind", [gnn.GINConv, gnn.GATConv])
def test_what_pyg_writes_for_a_later_layer_is_no_change(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyG writes these methods anew where a layer of the class is built: other functions."""
    layer = kind(nn.Linear(4, 4)) if kind is gnn.GINConv else kind(4, 4)
    assert changes_of(layer) == []
    written = ("propagate", "collect", "edge_updater", "edge_collect")
    present = [name for name in written if name in vars(kind)]
    assert {"propagate", "collect"} <= set(present)
    for name in present:
        old = vars(kind)[name]
        new = FunctionType(old.__code__, old.__globals__, name, old.__defaults__)
        new.__kwdefaults__ = old.__kwdefaults__
        monkeypatch.setattr(kind, name, new)
    assert changes_of(layer) == []
