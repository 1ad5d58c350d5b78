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
from random_messages import (
    LOCAL_STATE,
    MIXING,
    NUMBERING,
    OWN,
    SIZES,
    WIDTH,
    Program,
    build,
    random_program,
)
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import aggr

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


Job = tuple[Program, list[SARPolicy]]


def job_of(number: int) -> Job:
    """A random program; mode 3 and another way to run it."""
    return random_program(number), [SARPolicy(mode=3), random.Random(number).choice(POLICIES)]


def worker(root: Path, jobs: Sequence[Job]) -> tuple[list[list[Found | str]], Tensor, Tensor]:
    """What each job's program gave under each policy, or why not; and this worker's ids."""
    data = pyg_sar.load_partition(root, view="local")
    results = []
    for program, policies in jobs:
        mine: list[Found | str] = []
        for policy in policies:
            layer = pyg_sar.distribute(build(program), policy, view="local")
            try:
                mine.append(passes(layer, data, data.n_id, pyg_sar.mean))
            except (pyg_sar.errors.DistributedIndexError, ValueError) as error:
                mine.append(f"{type(error).__name__}: {error}")
        results.append(mine)
    return results, data.n_id, data.e_id


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
    folder: Path, world: int, data: Data, jobs: Sequence[Job], part: Any = "random"
) -> tuple[list[str], list[list[str]]]:
    """What is wrong; and for each job and policy why it was refused, or an empty string."""
    pyg_sar.write_partitions(data, world, folder / "parts", part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyg_sar.errors.OneShotWarning)
        workers = pyg_sar.launch(
            worker, world, folder / "parts", jobs, backend="threads", timeout=60.0
        )
    ids = [(n_id, e_id) for _, n_id, e_id in workers]
    wrong: list[str] = []
    outcomes: list[list[str]] = []
    for k, (program, policies) in enumerate(jobs):
        expected = passes(build(program), data, torch.arange(data.num_nodes), torch.mean)
        outcomes.append([])
        for step, policy in enumerate(policies):
            found = [results[k][step] for results, _, _ in workers]
            refused = [f for f in found if isinstance(f, str)]
            outcomes[-1].append(refused[0] if refused else "")
            problem = "" if refused else difference(found, ids, expected)  # type: ignore[arg-type]
            wrong += [f"{program} {policy}: {problem}"] if problem else []
    return wrong, outcomes


def graph(seed: int = 0) -> Data:
    data = make_graph(24, 90, seed)
    data.x = data.x[:, :WIDTH].contiguous()
    return data


@pytest.mark.parametrize("batch", range(COUNT // BATCH))
def test_random_messages(batch: int, tmp_path: Path):
    jobs = [job_of(number) for number in range(FIRST + batch * BATCH, FIRST + (batch + 1) * BATCH)]
    wrong, outcomes = judge(tmp_path, 2 + batch % 2, graph(batch), jobs)
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    ran: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for (program, _), found in zip(jobs, outcomes, strict=True):
        key = "mixing" if program.mixes else program.kind
        tried[key] += len(found)
        ran[key] += found.count("")
    assert ran["plain"] + ran["targets"] >= 0.95 * (tried["plain"] + tried["targets"]), (ran, tried)
    assert ran["mixing"] <= 0.05 * tried["mixing"], (ran, tried)


def programs(kind: str, expressions: Sequence[str], aggr: Any = "sum") -> list[Program]:
    return [Program(kind, (f"return {e.format('x_j')}",), "", aggr) for e in expressions]


REFUSED = [
    *programs("mixing", MIXING),
    *programs("numbering", NUMBERING),
    *[Program("local state", (line, "return x_j"), "", "sum") for line in LOCAL_STATE],
    Program("own", ("return x_j",), OWN["joint"], "sum"),
]


def test_what_depends_on_other_edges_is_refused(tmp_path: Path):
    """Each act that no worker can do, in all modes; the error names the layer and the remedy."""
    every = [SARPolicy(mode=3), *POLICIES]
    jobs = [(p, [every[0], every[1 + k % len(POLICIES)]]) for k, p in enumerate(REFUSED)]
    _, outcomes = judge(tmp_path, 2, graph(), jobs)
    for (program, _), reasons in zip(jobs, outcomes, strict=True):
        for reason in reasons:
            assert reason.startswith("DistributedIndexError: Random"), (program, reason)
            assert ": " in reason.partition("its ")[2], (program, reason)


def test_sizes_that_are_numbers_are_the_graphs(tmp_path: Path):
    """``size_i`` and the like count nodes of the whole graph; where they are lengths, too, not."""
    jobs = [(p, [SARPolicy(mode=3), *POLICIES[::3]]) for p in programs("sizes", SIZES)]
    wrong, outcomes = judge(tmp_path, 3, graph(), jobs)
    assert not wrong, wrong
    for (program, _), reasons in zip(jobs, outcomes, strict=True):
        assert ("softmax" in program.lines[0]) == any(reasons), (program, reasons)
        assert all("number of edges or nodes" in reason for reason in reasons if reason)


UPDATES = {
    "inputs + scatter(x_j, index, 0, dim_size, 'sum')": "",
    "inputs / dim_size": "number of edges or nodes",
    "inputs - inputs.mean(0) + 0 * scatter(x_j, index, 0, dim_size)": "mixes edges",
    "inputs * (1 + torch.arange(inputs.size(0)).view(-1, 1)) + 0 * size_i": "update()",
}


def test_update_that_asks_for_edges(tmp_path: Path):
    """It may do what a message may, at nodes."""
    names = [Program(f"update {line}", ("return x_j",), "", "sum") for line in UPDATES]
    wrong, outcomes = judge(tmp_path, 3, graph(), [(p, [SARPolicy(), POLICIES[3]]) for p in names])
    assert not wrong, wrong
    for expected, reasons in zip(UPDATES.values(), outcomes, strict=True):
        assert all(bool(r) == bool(expected) and expected in r for r in reasons), reasons


AGGREGATED = ("median", "lstm", "sort", "quantile", "gru", "own", "sum")


def make_aggregation(name: str) -> Any:
    torch.manual_seed(3)
    made = {
        "lstm": lambda: aggr.LSTMAggregation(WIDTH, 3).double(),
        "gru": lambda: aggr.GRUAggregation(WIDTH, 3).double(),
        "sort": lambda: aggr.SortAggregation(2),
        "quantile": lambda: aggr.QuantileAggregation([0.25, 0.75]).double(),
        "own": lambda: "sum",
    }
    return made.get(name, lambda: name)()


def test_mode_3_is_one_shot_for_every_aggregation(tmp_path: Path):
    """Edges come in the whole graph's order, also at workers whose nodes are in another."""
    data = graph(5).sort(sort_by_row=False)
    part = torch.tensor([0, 1, 2, 2, 1, 0] * 4) % 3  # rank 3 has nothing

    def shuffled(root: Path) -> list[list[Tensor]]:
        mine = pyg_sar.load_partition(root, view="local")
        found = []
        for name in AGGREGATED:
            program = Program("own", ("return x_j * x_i",), OWN["apart"] if name == "own" else "",
                              make_aggregation(name))  # fmt: skip
            layer = pyg_sar.distribute(build(program), SARPolicy(mode=3), view="local")
            order = torch.arange(mine.num_edges)
            x = mine.x.clone().requires_grad_()
            out = layer(x, mine.edge_index, mine.edge_weight[order], mine.edge_attr[order])
            out.square().sum().backward()
            assert {c.strategy for c in layer._choices.values()} == {"one_shot"}
            found.append([mine.n_id, out.detach(), x.grad])
        return found

    pyg_sar.write_partitions(data, 4, tmp_path / "parts", part)
    workers = pyg_sar.launch(shuffled, 4, tmp_path / "parts", backend="threads", timeout=60.0)
    for k, name in enumerate(AGGREGATED):
        program = Program("own", ("return x_j * x_i",), OWN["apart"] if name == "own" else "",
                          make_aggregation(name))  # fmt: skip
        x = data.x.clone().requires_grad_()
        out = build(program)(x, data.edge_index, data.edge_weight, data.edge_attr)
        out.square().sum().backward()
        for n_id, mine, gradient in (found[k] for found in workers):
            assert torch.allclose(mine, out[n_id], 1e-10, 1e-10), name
            assert torch.allclose(gradient, x.grad[n_id], 1e-10, 1e-10), name
