"""Random messages over workers: what one process says, or refused by name; never other numbers.

Two hundred programs in the ordinary run, the same ones every time; two thousand others with
``make test-random`` (``--hypothesis-profile thousand``).
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from oracle import make_graph, node_losses
from random_messages import Program, build, random_program
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy

ORDINARY = settings.get_current_profile_name() == "pyg_sar"
COUNT, FIRST = (200, 0) if ORDINARY else (2000, 10_000)
BATCH = 50
TOLERANCE = 1e-10
POLICIES = (
    SARPolicy(mode=1, prefetch=0, message_budget=400),
    SARPolicy(mode=1, kernels="off"),
    SARPolicy(mode=2, prefetch=0, message_budget=400),
    SARPolicy(mode=1, strategy="chunked", message_budget=400),
    SARPolicy(mode=2, strategy="chunked"),
)


@dataclass
class Found:
    """What two passes of a layer leave."""

    outs: list[Tensor]
    nodes: list[Tensor | None]
    edges: list[Tensor | None]
    parameters: list[Tensor | None]
    state: list[Any]


def passes(layer: Any, data: Data, ids: Tensor, mean: Any) -> Found:
    """Two passes; the second knows what the first found out."""
    found = Found([], [], [], [], [])
    for _ in range(2):
        layer.zero_grad()
        x, attr = data.x.clone().requires_grad_(), data.edge_attr.clone().requires_grad_()
        out = layer(x, data.edge_index, data.edge_weight, attr)
        mean(node_losses(out, ids)).backward()
        found.outs.append(out.detach())
        found.nodes.append(x.grad)
        found.edges.append(attr.grad)
        found.parameters += [None if p.grad is None else p.grad.clone() for p in layer.parameters()]
    found.state = layer.state()
    return found


def policies_of(number: int) -> list[SARPolicy]:
    """Mode 3 and two others."""
    return [SARPolicy(mode=3), *random.Random(number).sample(POLICIES, 2)]


def worker(root: Path, numbers: Sequence[int]) -> list[list[Found | str]]:
    data = pyg_sar.load_partition(root)
    results = []
    for number in numbers:
        mine: list[Found | str] = []
        for policy in policies_of(number):
            layer = pyg_sar.distribute(build(random_program(number)), policy)
            try:
                mine.append(passes(layer, data, data.n_id, pyg_sar.mean))
            except (pyg_sar.DistributedIndexError, ValueError) as error:
                mine.append(f"{type(error).__name__}: {error}")
        results.append(mine)
    return [*results, [data.n_id, data.e_id]]  # type: ignore[list-item]


def rows(workers: Sequence[tuple[Tensor, Tensor | None]], count: int) -> Tensor | None:
    """All workers' rows in their global places."""
    if any(found is None for _, found in workers):
        return None
    given = [(ids, found) for ids, found in workers if found is not None]
    whole = given[0][1].new_full((count, *given[0][1].shape[1:]), float("nan"))
    for ids, found in given:
        whole[ids] = found
    return whole


def apart(found: Tensor | None, expected: Tensor | None, scale: float) -> bool:
    if found is None or expected is None:
        kept = expected if found is None else found
        return kept is not None and bool(kept.any())
    if found.shape != expected.shape:
        return True
    both = found.isnan() & expected.isnan()
    return not bool((((found - expected).abs() <= TOLERANCE * scale) | both).all())


def difference(found: list[Found], ids: Any, expected: Found) -> str:
    """What is wrong, or an empty string."""
    n_id, e_id = zip(*ids, strict=True)
    sizes = {"outs": n_id, "nodes": n_id, "edges": e_id}
    wrong = [f"state {f.state} for {expected.state}" for f in found if f.state != expected.state]
    scale = max([float(g.abs().max()) for g in expected.parameters if g is not None] + [1.0])
    for name, where in sizes.items():
        for step, value in enumerate(getattr(expected, name)):
            parts = [getattr(f, name)[step] for f in found]
            whole = rows(list(zip(where, parts, strict=True)), sum(i.numel() for i in where))
            size = 1.0 if value is None else max(1.0, float(value.abs().max()))
            wrong += [f"{name} {step}"] if apart(whole, value, size) else []
    for number, value in enumerate(expected.parameters):
        wrong += [
            f"gradient {number} of rank {rank}"
            for rank, f in enumerate(found)
            if apart(f.parameters[number], value, scale)
        ]
    return ", ".join(dict.fromkeys(wrong))


def judge(
    root: Path, world: int, data: Data, numbers: Sequence[int]
) -> tuple[list[str], list[tuple[Program, list[str]]]]:
    """What is wrong, and each program with what became of it per policy."""
    every = torch.arange(data.num_nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyg_sar.OneShotWarning)
        workers = pyg_sar.launch(worker, world, root, numbers, backend="threads", timeout=20.0)
    ids = [mine.pop() for mine in workers]
    wrong: list[str] = []
    outcomes: list[tuple[Program, list[str]]] = []
    for k, number in enumerate(numbers):
        program = random_program(number)
        expected = passes(build(program), data, every, torch.mean)
        outcomes.append((program, []))
        for step, policy in enumerate(policies_of(number)):
            found = [mine[k][step] for mine in workers]
            refused = [f for f in found if isinstance(f, str)]
            if refused:
                outcomes[-1][1].append(refused[0])
                continue
            problem = difference(found, ids, expected)  # type: ignore[arg-type]
            outcomes[-1][1].append("")
            wrong += [f"{number} {program} {policy}: {problem}"] if problem else []
    return wrong, outcomes


@pytest.mark.parametrize("batch", range(COUNT // BATCH))
def test_random_messages(batch: int, tmp_path: Path):
    data = make_graph(24, 90, seed=batch)
    data.x = data.x[:, :4].contiguous()
    world = 2 + batch % 2
    pyg_sar.write_partitions(data, world, tmp_path / "parts", "random")
    numbers = range(FIRST + batch * BATCH, FIRST + (batch + 1) * BATCH)
    wrong, outcomes = judge(tmp_path / "parts", world, data, numbers)
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    ran: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for program, found in outcomes:
        key = "mixing" if program.mixes else program.kind
        tried[key] += len(found)
        ran[key] += found.count("")
    assert ran["plain"] + ran["targets"] >= 0.9 * (tried["plain"] + tried["targets"]), (ran, tried)
    assert ran["mixing"] <= 0.25 * tried["mixing"], (ran, tried)
