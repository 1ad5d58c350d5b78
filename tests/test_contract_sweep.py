"""The contract of rematerialization, over all convolutions that run distributed.

The rules have tests in detail for a few layers (tests/test_contract*.py); here every convolution of
the coverage table goes through the same uses: evaluation with dropout, no_grad, copies, state
dictionaries, accumulated gradients, autograd.grad, frozen parameters, autocast.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from coverage_case import Case, coverage_graph
from coverage_convs import CONVS
from coverage_judge import joined
from coverage_run import Pass, build, invoke, leaves, one_pass, tensors_of, weighted_sum
from oracle import TOLERANCE, Partitions, error, gradient_scale
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar

WORLD = 2
LAYERS: dict[str, Case] = {}
for name, options in CONVS.items():
    for case in options.values():
        plain = not (case.refused or case.unavailable) and case.graph == "random" and case.train
        if plain and name not in LAYERS:
            LAYERS[name] = case


def prepared(case: Case, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The plain layer, with dropout that an evaluation must ignore; not training."""
    layer = build(case, dtype)
    for module in layer.modules():
        if isinstance(vars(module).get("dropout"), float):
            module.dropout = 0.5
    return layer.eval()


def gradient(
    case: Case, layer: torch.nn.Module, data: Data, mean: Any
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Gradients of inputs and of parameters by torch.autograd.grad."""
    ids = data.n_id if "n_id" in data else torch.arange(data.num_nodes)
    given = leaves(case, data, torch.float64, ids, 0)
    inputs = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad}
    wanted = {**inputs, **dict(layer.named_parameters())}
    outs = [o.view(-1, 1) if o.dim() == 1 else o for o in tensors_of(invoke(case, layer, given))]
    loss = mean(weighted_sum(outs, ids))
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    named = dict(zip(wanted, found, strict=True))
    return {k: named[k] for k in inputs}, {k: v for k, v in named.items() if k not in inputs}


def autocast(case: Case, layer: torch.nn.Module, data: Data) -> Tensor:
    """Outputs under autocast, as one matrix of rows."""
    ids = data.n_id if "n_id" in data else torch.arange(data.num_nodes)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        outs = tensors_of(invoke(case, layer, leaves(case, data, torch.float32, ids, 0)))
    return torch.cat([out.float().flatten(1) for out in outs], dim=1)


def uses(
    case: Case, layer: torch.nn.Module, half: torch.nn.Module | None, data: Data, mean: Any
) -> dict[str, Any]:
    """Everything that is done with a layer; the same in one process and on workers.

    Args:
        case: Says how it is called.
        layer: The layer, in float64.
        half: The same in float32, for autocast; ``None`` where PyG itself can't.
        data: The graph, or a worker's part.
        mean: The mean over nodes.
    """
    found: dict[str, Any] = {"first": one_pass(case, layer, data, mean)}
    ids = data.n_id if "n_id" in data else torch.arange(data.num_nodes)
    with torch.no_grad():
        outs = tensors_of(invoke(case, layer, leaves(case, data, torch.float64, ids, 0)))
    found["no_grad"] = outs
    found["copy"] = one_pass(case, copy.deepcopy(layer), data, mean)
    found["grad"] = gradient(case, layer, data, mean)
    found["state"] = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.zero_grad()
    for _ in range(2):
        given = leaves(case, data, torch.float64, ids, 0)
        outs = [o.view(-1, 1) if o.dim() == 1 else o for o in
                tensors_of(invoke(case, layer, given))]  # fmt: skip
        loss = mean(weighted_sum(outs, ids))
        if loss.requires_grad:
            loss.backward()
    found["twice"] = {
        k: None if p.grad is None else p.grad.clone() for k, p in layer.named_parameters()
    }
    for parameter in list(layer.parameters())[::2]:
        parameter.requires_grad_(False)
    found["frozen"] = one_pass(case, layer, data, mean)
    for parameter in layer.parameters():
        parameter.requires_grad_()
    found["autocast"] = autocast(case, half, data) if half is not None else None
    return found


def worker(root: Path, case: Case, layer: Any, half: Any) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    layer = pyg_sar.distribute(copy.deepcopy(layer), view="local")
    half = half if half is None else pyg_sar.distribute(copy.deepcopy(half), view="local")
    return uses(case, layer, half, data, pyg_sar.mean), data.n_id


@pytest.fixture(scope="module")
def graph() -> Data:
    return coverage_graph()


@pytest.fixture(scope="module")
def root(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("sweep"))(graph, WORLD, "random")


def compare(title: str, passes: list[Pass], expected: Pass) -> None:
    whole = joined(passes)
    for a, b in zip(whole.outs, expected.outs, strict=True):
        assert error(a, b) <= TOLERANCE, title
    for kind in ("node_grads", "edge_grads", "parameter_grads"):
        theirs = getattr(expected, kind)
        same(f"{title}, {kind}", getattr(whole, kind), theirs)


def same(title: str, found: dict[str, Any], expected: dict[str, Any], factor: float = 1.0) -> None:
    scale = gradient_scale(expected) * factor
    for name, value in expected.items():
        other = value if value is None or factor == 1.0 else value * factor
        assert error(found[name], other, scale) <= TOLERANCE, (title, name)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_uses(name: str, graph: Data, root: Path):
    case = LAYERS[name]
    layer, half = prepared(case), prepared(case, torch.float32)
    try:
        autocast(case, copy.deepcopy(half), graph)
    except RuntimeError:
        half = None
    expected = uses(case, copy.deepcopy(layer), copy.deepcopy(half), graph, torch.mean)
    found = pyg_sar.launch(worker, WORLD, root, case, layer, half, backend="threads")
    workers, ids = [f for f, _ in found], [n for _, n in found]
    for use in ("first", "copy", "frozen"):
        compare(use, [w[use] for w in workers], expected[use])
    compare("the copy", [w["copy"] for w in workers], expected["first"])
    for n_id, w in zip(ids, workers, strict=True):
        for a, b in zip(w["no_grad"], expected["no_grad"], strict=True):
            assert error(a, b[n_id]) <= TOLERANCE, "no_grad"
        assert w["state"].keys() == layer.state_dict().keys() == expected["state"].keys()
        for key, value in expected["state"].items():
            assert error(w["state"][key], value) <= TOLERANCE, key
        same("twice", w["twice"], expected["first"].parameter_grads, 2.0)
        same("sums", w["grad"][1], expected["grad"][1])
    copy.deepcopy(layer).load_state_dict(workers[0]["state"])
    inputs, _ = expected["grad"]
    same("grad", {k: gathered(k, workers, graph, ids, root) for k in inputs}, inputs)
    if half is not None:
        check_autocast(case, half, graph, workers, ids, expected["autocast"])


def gathered(key: str, workers: list[Any], graph: Data, ids: list[Tensor], root: Path) -> Any:
    """An input's gradient from torch.autograd.grad, from all workers."""
    rows = [w["grad"][0][key] for w in workers]
    if any(row is None for row in rows):
        return None
    places = ids if graph.is_node_attr(key) else [w["first"].e_id for w in workers]
    whole = rows[0].new_zeros(sum(map(len, rows)), *rows[0].shape[1:])
    for place, row in zip(places, rows, strict=True):
        whole[place] = row
    return whole


def check_autocast(
    case: Case, half: torch.nn.Module, graph: Data, workers: list[Any], ids: list[Tensor], one: Any
) -> None:
    """At most twice the single process's own error, in the 2-norm."""
    with torch.no_grad():
        given = leaves(case, graph, torch.float64, torch.arange(graph.num_nodes), 0)
        outs = tensors_of(invoke(case, copy.deepcopy(half).double(), given))
    exact = torch.cat([out.flatten(1) for out in outs], dim=1)
    mine = torch.empty_like(one)
    for n_id, w in zip(ids, workers, strict=True):
        mine[n_id] = w["autocast"]
    own = float((one - exact).norm())
    least = torch.finfo(torch.bfloat16).eps / 2 * float(exact.norm())
    assert float((mine - exact).norm()) <= 2 * max(own, least)
