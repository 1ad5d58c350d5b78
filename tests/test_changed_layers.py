"""Layers that users change, before ``distribute()`` or after calls: right, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from combinations import everything, some
from oracle import Partitions, both, make_graph, one_pass, parts, whole, workers
from test_exactness import LAYERS, WIDER, build
from torch import Tensor, nn
from torch.nn.utils import parametrize

import pyg_sar
from pyg_sar.errors import DistributedIndexError, OneShotWarning

GRAPH = make_graph()
NAMES = ("gcn, weights, cached", "sage, mean", "gin", "gat, edges", "arma", "attentional")
Change = Callable[[Any], Any]

# Changes #####################################################################


class Tanh(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def doubled(out: Any) -> Any:
    return out * 2 if isinstance(out, Tensor) else out


def centred(out: Any) -> Any:
    """Takes all rows to compute one, which a worker's rows alone don't tell."""
    return out - 0.3 * out.mean(0) if isinstance(out, Tensor) else out


def wrapping(path: str, method: str, change: Change) -> Change:
    """A method of the object, around that of its class, which copies that one's ``__module__``."""

    def apply(layer: Any) -> None:
        module = layer.get_submodule(path)
        own = getattr(module, method)

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return change(own(*args, **kwargs))

        setattr(module, method, wrapped)

    return apply


def hooking(path: str, change: Change) -> Change:
    return lambda layer: layer.get_submodule(path).register_forward_hook(
        functools.wraps(nn.Linear.forward)(lambda module, inputs, out: change(out))
    )


def setting(name: str, value: Any) -> Change:
    return lambda layer: setattr(layer, name, value)


def other_values(layer: Any) -> dict[str, Change]:
    """Other values of flags, numbers and lists among a layer's attributes."""
    changes = {}
    for name, value in vars(layer).items():
        if name.startswith("_") or name in ("training", "node_dim", "fuse", "inspector"):
            continue
        if isinstance(value, bool):
            changes[name] = setting(name, not value)
        elif isinstance(value, float):
            changes[name] = setting(name, value * 0.5 + 0.11)
    changes["flow"] = setting("flow", "target_to_source")
    changes["aggr_module"] = setting("aggr_module", gnn.aggr.MaxAggregation())
    return {f"another {name}": change for name, change in changes.items()}


def changes_of(layer: Any) -> dict[str, Change]:
    found = other_values(layer)
    for method in ("message", "aggregate", "update", "edge_update", "forward", "propagate"):
        found[f"{method}, doubled"] = wrapping("", method, doubled)
        found[f"{method}, centred"] = wrapping("", method, centred)
    for path, module in layer.named_modules():
        if path and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found[f"forward of {path}, centred"] = wrapping(path, "forward", centred)
            found[f"forward of {path}, doubled"] = wrapping(path, "forward", doubled)
            found[f"hook of {path}, centred"] = hooking(path, centred)
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            found[f"weight of {path}, parametrized"] = lambda layer, path=path: (
                parametrize.register_parametrization(layer.get_submodule(path), "weight", Tanh())
            )
    for name, parameter in layer.named_parameters(recurse=False):
        found[f"{name} gone"] = setting(name, None)
        found[f"another {name}"] = setting(name, nn.Parameter(parameter.detach() * 0.4))
    return found


def result_of(case: tuple[str, str, str], root: Path | None) -> Any:
    name, change, when = case
    make, edge, constants = {**LAYERS, **WIDER}[name]
    layer = copy.deepcopy(build(make))  # Defaults such as an activation are one object of all.
    apply = changes_of(layer)[change]
    data = GRAPH if root is None else pyg_sar.load_partition(root)
    try:
        if when == "before":
            apply(layer)
        layer = layer if root is None else pyg_sar.distribute(layer)
        if when == "after":
            one_pass(layer, data, edge, constants)
            apply(layer)
        return vars(one_pass(layer, data, edge, constants))
    except DistributedIndexError as error:
        return str(error)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return (
            f"{type(error).__name__}: {error}"  # as PyG says it, too, or the next test would fail
        )


def sweep(root: Path | None, cases: list[tuple[str, str, str]]) -> list[Any]:
    return [result_of(case, root) for case in cases]


@pytest.fixture(scope="module")
def root(partitions: Partitions) -> Path:
    return partitions(GRAPH, 2)


def must_run(change: str) -> bool:
    """Says which changes are right, as they must be, and not refused."""
    refused = ("message, centred", "aggregate, centred", "edge_update", "weight of , parametrized")
    within = ("weight of nn.2", "forward of nn", "forward of lin_edge, centred", "another aggr")
    parts = change.startswith("forward of aggr_module") and "centred" in change
    return not parts and not change.startswith((*refused, *within))


def cases_of(name: str) -> list[tuple[str, str, str]]:
    """Half of the changes before and half after the layer is distributed; with ``--all`` all."""
    make, _, _ = {**LAYERS, **WIDER}[name]
    cases = [
        (name, change, when)
        for when in ("before", "after")
        for change in changes_of(build(make))
        if when == "after" or "," in change  # Other values before are those of another layer.
    ]
    return list(some(cases, name, 2))


@pytest.fixture(scope="module")
def expected() -> Callable[[str], list[Any]]:
    """What one process finds in each case, by the layer's name."""
    return functools.cache(lambda name: sweep(None, cases_of(name)))


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize(
    ("start", "name"),
    [(workers, "gin"), (workers, "gat, edges"), *((parts, name) for name in NAMES)],
)
def test_a_changed_layer_is_right_or_refused(
    start: Any, name: str, root: Path, expected: Callable[[str], list[Any]]
):
    cases, rights = cases_of(name), expected(name)
    assert sum(isinstance(value, dict) for value in rights) > len(cases) // 2
    if start is workers and not everything():  # All of them are tried as parts.
        cases, rights = cases[::4], rights[::4]
    for found in start(sweep, 2, root, cases):
        for case, result, right in zip(cases, found, rights, strict=True):
            if not isinstance(result, str):
                assert not isinstance(right, str), (case, right)
                torch.testing.assert_close(
                    result, right, rtol=1e-9, atol=1e-9, msg=lambda m, case=case: f"{case}: {m}"
                )
            elif not isinstance(right, str):
                assert not must_run(case[1]), (case, result)


# Classes #####################################################################


class OwnPropagate(gnn.GCNConv):
    def propagate(self, edge_index: Any, **kwargs: Any) -> Tensor:
        return 2 * super().propagate(edge_index, **kwargs)


class OwnEdgeUpdater(gnn.GATConv):
    def edge_updater(self, edge_index: Any, **kwargs: Any) -> Tensor:
        return 0.5 * super().edge_updater(edge_index, **kwargs)


class OwnCall(gnn.SAGEConv):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return centred(super().__call__(*args, **kwargs))


class OwnHelper(gnn.ChebConv):
    """``forward`` is PyG's, and calls a method that isn't, with all rows and edges."""

    def __norm__(self, *args: Any, **kwargs: Any) -> Any:
        edges, weight = super().__norm__(*args, **kwargs)
        return edges, weight / weight.abs().max()


class OwnMessage(gnn.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return 3 * super().message(x_j)


CLASSES: dict[type, Callable[[], nn.Module]] = {
    OwnPropagate: lambda: OwnPropagate(6, 5),
    OwnEdgeUpdater: lambda: OwnEdgeUpdater(6, 5),
    OwnCall: lambda: OwnCall(6, 5),
    OwnHelper: lambda: OwnHelper(6, 5, 3),
    OwnMessage: lambda: OwnMessage(6, 5),
}


def of_own_classes(root: Path | None) -> list[Any]:
    data, found = GRAPH if root is None else pyg_sar.load_partition(root), []
    for kind, make in CLASSES.items():
        layer: Any = build(make)
        warned = root is not None and kind not in (OwnHelper, OwnMessage)
        with pytest.warns(OneShotWarning, match="of its own") if warned else nullcontext():
            layer = layer if root is None else pyg_sar.distribute(layer)
        found.append(vars(one_pass(layer, data)))
    return found


def test_classes_that_override_what_layers_run_by_are_right(root: Path):
    expected = of_own_classes(None)
    for found in workers(of_own_classes, 2, root):
        for kind, result, right in zip(CLASSES, found, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=1e-9, atol=1e-9, msg=kind.__name__)


def explained_and_trained(root: Path | None, layer: Any) -> Any:
    """A layer that was explained, comes from another process, is explained again, and trained."""
    data = GRAPH if root is None else pyg_sar.load_partition(root)
    layer = layer if root is None else pyg_sar.distribute(layer)
    layer.explain = True
    layer.explain = False
    found = vars(one_pass(layer, data))
    assert root is None or "propagate" not in vars(layer)  # PyG leaves its own there.
    return found


def test_a_layer_that_was_explained_runs_as_before(root: Path):
    layer: Any = build(lambda: gnn.SAGEConv(6, 5))
    layer.explain = False
    given = copy.deepcopy(layer)
    expected = explained_and_trained(None, layer)
    for found in workers(explained_and_trained, 2, root, given):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def looked_at(layer: Any, data: Any) -> list[Tensor]:
    """Calls that compare the workers' parameters, which must look at no weight."""
    parametrize.register_parametrization(layer.lin_l, "weight", Counted())
    with torch.no_grad():
        return [layer(data.x, data.edge_index) for _ in range(3)]


class Counted(nn.Module):
    """A weight that each look at it makes larger."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("looks", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.looks += 1
        return weight * self.looks


def keeping(layer: Any, data: Any) -> list[Tensor]:
    """PyG's code goes on using what a layer has kept when ``cached`` is set to ``False``."""
    found = [layer(data.x, data.edge_index)]
    for cached in (False, True):
        layer.cached = cached
        found.append(layer(data.x, data.edge_index.flip(0)))
    return found


def keeping_of_all_nodes(layer: Any, data: Any) -> list[Tensor]:
    """What a layer with a hook within it keeps is not made again, nor without the hook."""
    hook = layer.register_message_forward_hook(lambda module, given, out: out * 2)
    found = [layer(data.x, edges) for edges in (data.edge_index, data.edge_index.flip(0))]
    hook.remove()
    return [*found, layer(data.x, data.edge_index.flip(0))]


def evaluated(layer: Any, data: Any) -> list[Tensor]:
    """Evaluation takes what training has kept, as in PyG."""
    found = [layer(data.x, data.edge_index)]
    layer.eval()
    return [*found, layer(data.x, data.edge_index.flip(0))]


STATES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], list[Tensor]]]] = {
    "a weight that counts": (lambda: gnn.SAGEConv(6, 5), looked_at),
    "gcn, no longer cached": (lambda: gnn.GCNConv(6, 5, cached=True), keeping),
    "appnp, no longer cached": (lambda: gnn.APPNP(2, 0.1, cached=True), keeping),
    "gcn, hooked": (lambda: gnn.GCNConv(6, 5, cached=True), keeping_of_all_nodes),
    "sg, hooked": (lambda: gnn.SGConv(6, 5, cached=True), keeping_of_all_nodes),
    "appnp, dropout": (lambda: gnn.APPNP(2, 0.1, dropout=0.3, cached=True), evaluated),
}


def states(root: Path | None) -> list[Any]:
    data, found = GRAPH if root is None else pyg_sar.load_partition(root), []
    for make, run in STATES.values():
        layer: Any = build(make)
        layer = layer if root is None else pyg_sar.distribute(layer)
        torch.manual_seed(0)
        found.append([whole(out.detach()) for out in run(layer, data)])
    return found


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_what_a_layer_keeps_between_calls_is_that_of_one_process(root: Path):
    expected = states(None)
    for found in both(states, 2, root):
        for name, result, right in zip(STATES, found, expected, strict=True):
            torch.testing.assert_close(
                result, right, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
            )


LATE: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], tuple[Tensor, ...]], bool]] = {
    "edges": (lambda: gnn.GCNConv(6, 5, cached=True), lambda d: (d.x, d.edge_index.flip(0)), True),
    "weights": (
        lambda: gnn.GCNConv(6, 5, cached=True),
        lambda d: (d.x, d.edge_index, (d.edge_index[0] % 2).double()),
        True,
    ),
    "rows": (lambda: gnn.SGConv(6, 5, cached=True), lambda d: (2 * d.x, d.edge_index), False),
    "h": (
        lambda: gnn.SSGConv(6, 5, 0.2, 2, cached=True),
        lambda d: (d.x, d.edge_index[:, :9]),
        False,
    ),
}


def hooked_late(root: Path | None) -> list[Any]:
    data, found = GRAPH if root is None else pyg_sar.load_partition(root), []
    for make, other, refused in LATE.values():
        layer: Any = build(make)
        layer = layer if root is None else pyg_sar.distribute(layer)
        results = [layer(data.x, data.edge_index)]
        layer.register_propagate_forward_hook(lambda module, given, out: 2 * out)
        results.append(layer(data.x, data.edge_index))
        if not refused:
            results.append(layer(*other(data)))
        elif root is not None:
            with pytest.raises(DistributedIndexError, match="goes on using what it has kept"):
                layer(*other(data))
        found.append([whole(out.detach()) for out in results])
    return found


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_what_a_layer_keeps_before_it_has_a_hook(root: Path):
    """PyG goes on using it, whatever the layer is given."""
    expected = hooked_late(None)
    for found in both(hooked_late, 2, root):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def derived(layer: Any) -> None:
    kind: Any = type(layer)
    twice = {"forward": lambda self, *given: 2 * kind.forward(self, *given)}
    layer.__class__ = type("Derived", (kind,), twice)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "change", [derived, lambda layer: parametrize.register_parametrization(layer, "bias", Tanh())]
)
def test_a_class_that_a_layer_gets_later_is_refused(change: Change, world: int, root: Path):
    """It lost what a user's class has, when the layer ran on tensors of the whole graph."""

    def run() -> None:
        data = GRAPH if world == 1 else pyg_sar.load_partition(root)
        for make in (gnn.GATConv, gnn.ARMAConv):
            layer: Any = pyg_sar.distribute(build(lambda make=make: make(6, 5)))
            layer(data.x, data.edge_index)
            change(layer)
            with pytest.raises(DistributedIndexError, match=r"'.*Conv' got this class after dist"):
                layer(data.x, data.edge_index)

    parts(run, world)


# Whole models in files #######################################################


def trained_and_saved(root: Path, path: Path) -> nn.Module:
    data = pyg_sar.load_partition(root)
    model = build(lambda: gnn.GAT(6, 8, 2, 5, heads=2, norm="batch"))
    model = pyg_sar.distribute(model)
    one_pass(model, data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)
    twin = copy.deepcopy(model)
    one_pass(twin, data)  # A copy runs here as the model does.
    if pyg_sar.comm.current().rank == 0:
        torch.save(model, path)
    return model


def test_a_saved_model_is_that_of_pyg(root: Path, tmp_path: Path):
    model = build(lambda: gnn.GAT(6, 8, 2, 5, heads=2, norm="batch"))
    one_pass(model, GRAPH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)
    expected = one_pass(model, GRAPH)
    returned = workers(trained_and_saved, 2, root, tmp_path / "model.pt")
    for found in (torch.load(tmp_path / "model.pt", weights_only=False), *returned):
        kinds = {type(module) for module in found.modules()}
        assert kinds == {type(module) for module in model.modules()}
        assert not any("pyg_sar" in str(type(v)) for m in found.modules() for v in vars(m).values())
        model.zero_grad()
        torch.testing.assert_close(
            vars(one_pass(found, GRAPH))["out"], expected.out, rtol=1e-9, atol=1e-9
        )
