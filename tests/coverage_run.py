"""Runs cases of the coverage table, on one process and on workers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from coverage_case import Case
from oracle import probe, whole
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import DirGNNConv, MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.message.layer_facts import facts_of

LOW_PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# One pass ####################################################################


@dataclass
class Pass:
    """What a forward and backward pass leaves: all rows, on one process or each worker."""

    outs: list[Tensor]
    input_grads: dict[str, Tensor | None]
    parameter_grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def invoke(case: Case, module: torch.nn.Module, given: Mapping[str, Any]) -> Any:
    """Calls the module with the case's arguments."""
    if case.call is not None:
        return case.call(module, SimpleNamespace(**given))
    args, kwargs = [], {}
    for word in case.args.split():
        key, _, name = word.rpartition("=")
        pair = name.strip("()").split(",")
        value = given[name] if name[0] != "(" else tuple(given[part] for part in pair)
        if key:
            kwargs[key] = value
        else:
            args.append(value)
    return module(*args, **kwargs)


def tensors_of(result: Any) -> list[Tensor]:
    """The floating point tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else [result.double()]
    if isinstance(result, Mapping):
        return [t for key in sorted(result) for t in tensors_of(result[key])]
    if isinstance(result, list | tuple):
        return [t for item in result for t in tensors_of(item)]
    return []


def weighted_sum(outs: Sequence[Tensor]) -> Tensor:
    """Losses per row: every output has a nonlinear share of its own."""
    ids = torch.arange(outs[0].size(0))
    total = torch.zeros(ids.numel(), dtype=torch.float64)
    for out in outs:
        rows = out.double()
        total = total + (rows * probe(ids, rows) + 0.1 * rows.square()).flatten(1).sum(-1)
    return total


def leaves(case: Case, data: Data, dtype: torch.dtype, draw: int) -> dict[str, Any]:
    """What the case is called with; floating point tensors in ``dtype``, with gradients.

    Every ``draw`` has features of its own: multiples of an eighth, which all dtypes hold.
    """
    given: dict[str, Any] = {"num_nodes": data.num_nodes}
    constants = case.constants.split()
    for name, value in data:
        if isinstance(value, Tensor) and value.is_floating_point():
            if name == "x" and draw:
                ids = torch.arange(value.size(0)) + 40 * draw
                value = torch.zeros_like(value) + (probe(ids, value) * 16).round() / 8
            value = value.to(dtype)
            if name in case.names() and name not in constants:
                value = value.clone().requires_grad_()
        given[name] = value
    return given


def one_pass(
    case: Case,
    module: torch.nn.Module,
    data: Data,
    dtype: torch.dtype = torch.float64,
    draw: int = 0,
) -> Pass:
    """Runs forward and backward once, from zeroed gradients."""
    module.zero_grad()
    given = leaves(case, data, dtype, draw)
    outs = [out.view(-1, 1) if out.dim() == 1 else out for out in
            tensors_of(invoke(case, module, given))]  # fmt: skip
    found = [whole(out.detach().clone()) for out in outs]  # reversible layers free theirs
    loss = weighted_sum(outs).mean()
    if loss.requires_grad:
        loss.backward()
    grads = {k: v.grad for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad}
    parameters = {k: p.grad if p.grad is None else whole(p.grad.clone()) for k, p in
                  module.named_parameters()}  # fmt: skip
    return Pass(
        found,
        {k: whole(g) for k, g in grads.items()},
        parameters,
        {k: b.clone() for k, b in module.named_buffers()},
    )


def evaluated_first(case: Case, module: torch.nn.Module, data: Data, mode: Any) -> Pass:
    """A pass whose module was called once before, in ``mode``; with that call's results."""
    given = leaves(case, data, torch.float64, 0)
    with mode():
        first = [whole(out.clone()) for out in tensors_of(invoke(case, module, given))]
    found = one_pass(case, module, data)
    found.outs += first
    return found


def build(case: Case, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The plain module, from the same parameters every time."""
    torch.manual_seed(1)
    module: torch.nn.Module = case.make()
    return module.to(dtype).train(case.train)


# Workers #####################################################################


@dataclass
class Worker:
    """What one worker found."""

    exact: Pass
    nodes: Tensor
    low: dict[str, Pass]
    strategies: list[str]
    case_2: bool
    bytes: int
    one_shot_bytes: int
    resident: dict[str, int]
    reverses: bool
    gathers: int
    left: int
    hosted: bool


def look(module: torch.nn.Module) -> tuple[list[str], bool]:
    """Strategies that the layers took, and whether any backward pass needs source values."""
    found, case_2 = [], False
    for layer in module.modules():
        for verdict in facts_of(layer).choices.values():
            found.append(verdict.strategy)
            case_2 |= verdict.needs is not None and verdict.needs.needs_sources
    return sorted(set(found)), case_2


def run_case(root: Path, case: Case, plain: torch.nn.Module, low: Mapping[str, Any]) -> Worker:
    """A worker's part of a case: exact, then counted in a second pass, then in low precision."""
    data = pyg_sar.load_partition(root)
    module = pyg_sar.distribute(copy.deepcopy(plain), SARPolicy(mode=1, prefetch=0))
    exact = one_pass(case, module, data)
    strategies, case_2 = look(module)
    ledger = counted_pass(case, module, data)
    one_shot = 0
    if strategies and strategies != ["one_shot"]:
        for layer in module.modules():
            if isinstance(layer, MessagePassing):
                layer.policy = SARPolicy(mode=3)
        one_pass(case, module, data)
        one_shot = halo_bytes(counted_pass(case, module, data))
    found = {
        name: run_low(root, case, layer, LOW_PRECISION[name], (0,))[0]
        for name, layer in low.items()
    }
    names = {getattr(layer, "ledger_name", None) for layer in module.modules()} - {None}
    return Worker(
        exact=exact,
        nodes=data.x.rows.ids,
        low=found,
        strategies=strategies,
        case_2=case_2,
        bytes=halo_bytes(ledger),
        one_shot_bytes=one_shot,
        resident={name: ledger.peak_resident_rows(name) for name in sorted(names)},
        reverses=any(
            getattr(m, "flow", "") == "target_to_source" or isinstance(m, DirGNNConv)
            for m in module.modules()
        ),
        gathers=ledger.events("halo_gather") + ledger.events("halo_reduce"),
        left=ledger.resident_rows(),
        hosted=pyg_sar.comm.current().host is not None,
    )


def run_first(
    roots: Mapping[str, Path], jobs: Mapping[str, tuple[Case, torch.nn.Module]], mode: Any
) -> dict[str, Pass | str]:
    """A worker's part of cases that are called in ``mode`` first; what they raise in its place."""
    found: dict[str, Pass | str] = {}
    modules = {name: pyg_sar.distribute(copy.deepcopy(plain)) for name, (_, plain) in jobs.items()}
    for name, (case, _) in jobs.items():
        data = pyg_sar.load_partition(roots[case.graph])
        try:
            found[name] = evaluated_first(case, modules[name], data, mode)
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def counted_pass(case: Case, module: torch.nn.Module, data: Data) -> pyg_sar.Ledger:
    """What a pass costs once everything that is kept has been made."""
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        one_pass(case, module, data)
    return ledger


def halo_bytes(ledger: pyg_sar.Ledger) -> int:
    """Bytes of halo rows received."""
    kinds = ("fetch", "refetch", "gradient", "query", "state")
    return sum(ledger.received_bytes(kind=kind) for kind in kinds)


def run_low(
    root: Path, case: Case, layer: torch.nn.Module, dtype: torch.dtype, draws: Sequence[int]
) -> list[Pass]:
    """A worker's part of a case in low precision."""
    data = pyg_sar.load_partition(root)
    copied = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy(mode=1))
    return [one_pass(case, copied, data, dtype, draw) for draw in draws]
