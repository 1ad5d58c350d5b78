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
from contract_case import agree, gradients
from coverage_case import Case, coverage_graph
from coverage_convs import CONVS
from coverage_run import build, invoke, leaves, tensors_of, weighted_sum
from oracle import TOLERANCE, Partitions, whole, workers
from torch import Tensor
from torch.utils._pytree import tree_map
from torch_geometric.data import Data

import pyg_sar

WORLD, BATCHES = 2, 10
LAYERS: dict[str, Case] = {}
for name, options in CONVS.items():
    for case in options.values():
        no = case.refused or case.unavailable or case.no_layer
        if not no and case.graph == "random" and case.train and name not in LAYERS:
            LAYERS[name] = case


def prepared(case: Case, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The plain layer, with dropout that an evaluation must ignore; not training."""
    layer = build(case, dtype)
    for module in layer.modules():
        if isinstance(vars(module).get("dropout"), float):
            module.dropout = 0.5
    return layer.eval()


def called(case: Case, layer: Any, data: Data, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """Outputs, and inputs that want a gradient."""
    given = leaves(case, data, dtype, 0)
    outs = [o.view(-1, 1) if o.dim() == 1 else o for o in tensors_of(invoke(case, layer, given))]
    return outs, {k: v for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad}


def loss_of(outs: list[Tensor]) -> Tensor:
    return weighted_sum(outs).mean()


def one_pass(case: Case, layer: Any, data: Data) -> list[Any]:
    """Outputs, gradients of inputs and of parameters, the latter on top of what is there."""
    outs, inputs = called(case, layer, data, torch.float64)
    loss, found = loss_of(outs), [out.detach().clone() for out in outs]
    if loss.requires_grad:
        loss.backward()
    return [found, {k: v.grad for k, v in inputs.items()}, gradients(layer)]


def autocast(case: Case, half: Any, data: Data) -> Tensor:
    """Outputs under autocast, as one matrix of rows."""
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        outs, _ = called(case, half, data, torch.float32)
    return torch.cat([out.float().flatten(1) for out in outs], dim=1)


def uses(case: Case, layer: Any, data: Data) -> dict[str, list[Any]]:
    """Everything that is done with a layer; the same in one process and on workers."""
    found = {"first": one_pass(case, layer, data)}
    with torch.no_grad():
        found["no_grad"] = called(case, layer, data, torch.float64)[0]
    found["twice"] = one_pass(case, layer, data)
    layer.zero_grad()
    found["copy"] = one_pass(case, copy.deepcopy(layer), data)
    outs, inputs = called(case, layer, data, torch.float64)
    wanted = {**inputs, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(loss_of(outs), list(wanted.values()), allow_unused=True)
    named = dict(zip(wanted, grads, strict=True))
    found["grad"] = [{k: named.pop(k) for k in inputs}, named]
    found["state"] = [[k, v.clone()] for k, v in layer.state_dict().items()]
    for parameter in list(layer.parameters())[::2]:
        parameter.requires_grad_(False)
    found["frozen"] = one_pass(case, layer, data)
    return found


def worker(root: Path, names: list[str], halves: dict[str, Tensor]) -> list[Any]:
    data, found = pyg_sar.load_partition(root), []
    for name in names:
        case = LAYERS[name]
        try:
            layer = pyg_sar.distribute(prepared(case))
            found.append([tree_map(whole, uses(case, layer, data))])
            if name in halves:
                half = pyg_sar.distribute(prepared(case, torch.float32))
                found[-1].append(whole(autocast(case, half, data)))
        except Exception as error:
            error.add_note(name)
            raise
    return found


@pytest.mark.parametrize("batch", range(BATCHES))
def test_uses(batch: int, tmp_path: Path):
    names, graph, halves = list(LAYERS)[batch::BATCHES], coverage_graph(), {}
    for name in names:
        try:
            halves[name] = autocast(LAYERS[name], prepared(LAYERS[name], torch.float32), graph)
        except RuntimeError:  # PyG itself can't.
            continue
    root = Partitions(tmp_path)(graph, WORLD, "random")
    results = workers(worker, WORLD, root, names, halves)
    for k, name in enumerate(names):
        case, layer = LAYERS[name], prepared(LAYERS[name])
        expected = uses(case, layer, graph)
        for found in (result[k] for result in results):
            agree(list(found[0].items()), list(expected.items()), TOLERANCE, name)
            if name in halves:
                check_autocast(case, graph, found[1], halves[name])


def check_autocast(case: Case, graph: Data, mine: Tensor, one: Tensor) -> None:
    """At most twice the single process's own error, in the 2-norm."""
    half = prepared(case, torch.float32).double()
    with torch.no_grad():
        outs, _ = called(case, half, graph, torch.float64)
    exact = torch.cat([out.flatten(1) for out in outs], dim=1)
    least = torch.finfo(torch.bfloat16).eps / 2 * float(exact.norm())
    assert float((mine - exact).norm()) <= 2 * max(float((one - exact).norm()), least)
