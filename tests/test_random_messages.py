"""Random messages over workers: what one process says, or refused by name; never other numbers.

25 programs in the ordinary run, the same ones every time, each with one of its two policies; 200
with both with ``--all``, 2000 others with ``make test-random`` (``--hypothesis-profile thousand``).
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from hypothesis import settings
from oracle import make_graph, node_losses, parts, whole, workers
from random_messages import (
    LOCAL_STATE,
    MIXING,
    NUMBERING,
    OWN,
    PLACES,
    SIZES,
    WIDTH,
    Program,
    build,
    random_program,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import aggr

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import OneShotWarning
from pyg_sar.message.layer_facts import facts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Random:pyg_sar.errors.OneShotWarning"),
    # x.numpy() of a tensor of the graph is a copy that can't be written.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]
ORDINARY = settings.get_current_profile_name() == "pyg_sar"
COUNT, FIRST = (200, 0) if ORDINARY else (2000, 10_000)
BATCH = 25
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


def passes(layer: Any, data: Data) -> Found:
    """Two passes; the second knows what the first found out."""
    found = Found([], [], [], [], [])
    for _ in range(2):
        layer.zero_grad()
        x, attr = data.x.clone().requires_grad_(), data.edge_attr.clone().requires_grad_()
        out = layer(x, data.edge_index, data.edge_weight, attr)
        node_losses(out).mean().backward()
        found.outs.append(whole(out.detach()))
        found.nodes.append(whole(x.grad))
        found.edges.append(whole(attr.grad))
        found.parameters += [None if p.grad is None else p.grad.clone() for p in layer.parameters()]
    found.state = layer.state()
    return found


Job = tuple[Program, list[SARPolicy]]


def job_of(number: int) -> Job:
    """A random program; mode 3 and another way to run it, or one of the two."""
    policies = [SARPolicy(mode=3), random.Random(number).choice(POLICIES)]
    return random_program(number), list(some(policies, str(number), 2))


def worker(root: Path, jobs: Sequence[Job]) -> list[list[Found | str]]:
    """What each job's program gave under each policy, or why not."""
    data = pyg_sar.load_partition(root)
    results = []
    for program, policies in jobs:
        mine: list[Found | str] = []
        for policy in policies:
            layer = pyg_sar.distribute(build(program), policy)
            try:
                mine.append(passes(layer, data))
            except (pyg_sar.errors.DistributedIndexError, ValueError) as error:
                mine.append(f"{type(error).__name__}: {error}")
        results.append(mine)
    return results


def apart(found: Tensor | None, expected: Tensor | None, scale: float) -> bool:
    if found is None or expected is None:
        kept = expected if found is None else found
        return kept is not None and bool(kept.any())
    if found.shape != expected.shape:
        return True
    both = found.isnan() & expected.isnan()
    return not bool((((found - expected).abs() <= TOLERANCE * scale) | both).all())


def difference(found: Found, expected: Found) -> str:
    """What is wrong, or an empty string."""
    states = tree_leaves(found.state), pytest.approx(tree_leaves(expected.state), rel=TOLERANCE)
    wrong = [f"state {found.state} for {expected.state}"] * (states[0] != states[1])
    scale = max([float(g.abs().max()) for g in expected.parameters if g is not None] + [1.0])
    for name in ("outs", "nodes", "edges", "parameters"):
        for step, value in enumerate(getattr(expected, name)):
            size = 1.0 if value is None else max(1.0, float(value.abs().max()))
            size = scale if name == "parameters" else size
            wrong += [f"{name} {step}"] * apart(getattr(found, name)[step], value, size)
    return ", ".join(wrong)


def judge(
    folder: Path,
    world: int,
    data: Data,
    jobs: Sequence[Job],
    part: Any = "random",
    start: Any = workers,
) -> tuple[list[str], list[list[str]]]:
    """What is wrong; and for each job and policy why it was refused, or an empty string."""
    pyg_sar.write_partitions(data, world, folder / "parts", "random")
    found = start(worker, world, folder / "parts", jobs)
    wrong: list[str] = []
    outcomes: list[list[str]] = []
    for k, (program, policies) in enumerate(jobs):
        expected = passes(build(program), data)
        outcomes.append([])
        for step, policy in enumerate(policies):
            given = [results[k][step] for results in found]
            refused = [one for one in given if isinstance(one, str)]
            outcomes[-1].append(refused[0] if refused else "")
            problems = [] if refused else [difference(one, expected) for one in given]
            problem = ", ".join(f"rank {rank}: {p}" for rank, p in enumerate(problems) if p)
            wrong += [f"{program} {policy}: {problem}"] if problem else []
    return wrong, outcomes


def graph(seed: int = 0) -> Data:
    data = make_graph(24, 90, seed)
    data.x = data.x[:, :WIDTH].contiguous()
    return data


@pytest.mark.parametrize("batch", range(COUNT // BATCH))
def test_random_messages(batch: int, tmp_path: Path):
    jobs = [job_of(number) for number in range(FIRST + batch * BATCH, FIRST + (batch + 1) * BATCH)]
    ran: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for half, start in ((jobs[::2], workers), (jobs[1::2], parts)):
        folder = tmp_path / start.__name__
        wrong, outcomes = judge(folder, 2 + batch % 2, graph(batch), half, start=start)
        assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
        for (program, _), found in zip(half, outcomes, strict=True):
            key = "mixing" if program.mixes else program.kind
            tried[key] += len(found)
            ran[key] += found.count("")
    assert all(ran[key] >= 0.95 * tried[key] for key in tried), (ran, tried)


def programs(kind: str, expressions: Sequence[str], aggr: Any = "sum") -> list[Program]:
    return [Program(kind, (f"return {e.format('x_j')}",), "", aggr) for e in expressions]


HOOK = "y.requires_grad and y.register_hook(lambda g: g / g.norm())"
ON_THE_WHOLE_GRAPH = [
    *programs("mixing", MIXING),
    *programs("numbering", NUMBERING),
    *programs("places", [line for line in PLACES if "dropout" not in line]),
    Program("places", ("y = x_j * 2", HOOK, "return y"), "", "sum"),
    *[Program("local state", (line, "return x_j"), "", "sum") for line in LOCAL_STATE],
]


@pytest.mark.parametrize("world", [1, 2])
def test_what_depends_on_other_edges_runs_on_the_whole_graph(world: int, tmp_path: Path):
    """Each act that no worker can do with its own edges, in all modes, and a warning names it."""
    every = [SARPolicy(mode=3), *POLICIES]
    jobs = []
    for k, program in enumerate(ON_THE_WHOLE_GRAPH):
        policies = [every[0], every[1 + k % len(POLICIES)]]
        jobs.append((program, list(some(policies, f"{program} {world}", 2))))
    jobs = jobs if world > 1 else some(jobs, "one worker", 3)
    for half, start in ((jobs[::2], workers), (jobs[1::2], parts)):
        wrong, outcomes = judge(tmp_path / start.__name__, world, graph(), half, start=start)
        assert not wrong, wrong
        for (program, _), reasons in zip(half, outcomes, strict=True):
            assert not any(reasons), (program, reasons)


def warned(root: Path, given: Sequence[Program]) -> list[tuple[str, str]]:
    """The program's title and the warning of its first call; its second gives none."""
    data, found = pyg_sar.load_partition(root), []
    x = data.x.clone().requires_grad_()
    for program in given:
        layer = pyg_sar.distribute(build(program))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                layer(x, data.edge_index, data.edge_weight, data.edge_attr)
        texts = [str(w.message) for w in seen if w.category is OneShotWarning]
        found.append((str(program), "; ".join(texts)))
    return found


def test_a_warning_says_why_the_whole_graph_is_taken(tmp_path: Path):
    pyg_sar.write_partitions(graph(), 2, tmp_path / "parts")
    given = some(ON_THE_WHOLE_GRAPH, "warnings", 3)
    for found in workers(warned, 2, tmp_path / "parts", given):
        for program, text in found:
            assert text.startswith("Random") and text.count("can't be computed") == 1, program
            assert ": its " in text and "of the whole graph: each worker holds" in text, program


def test_an_aggregate_over_all_messages_runs(tmp_path: Path):
    """With messages, too, that depend on other edges: what runs is what one process says."""
    policies = [SARPolicy(mode=3), *POLICIES[::2]]
    mixing = [Program(p.kind, p.lines, OWN["joint"], "sum") for p in programs("mixing", MIXING)]
    pair = "scatter({0}[0], index, 0, dim_size, 'sum') / dim_size"
    jobs = [(Program("own", ("return x_j",), OWN["joint"], "sum"), policies)]
    jobs.append((Program("own", ("return x_j, x_i",), pair, "sum"), policies))
    jobs += [(p, list(some(policies, str(p), 4))) for p in mixing]
    wrong, outcomes = judge(tmp_path, 2, graph(), jobs, start=parts)
    assert not wrong, wrong
    assert not any(outcomes[0] + outcomes[1]), outcomes[:2]
    assert sum(not any(reasons) for reasons in outcomes) >= len(outcomes) / 2, outcomes


UPDATES = (
    "inputs + scatter(x_j, index, 0, dim_size, 'sum')",
    "inputs / dim_size",
    "inputs - inputs.mean(0) + 0 * scatter(x_j, index, 0, dim_size)",
    "inputs * (1 + torch.arange(inputs.size(0)).view(-1, 1)) + 0 * size_i",
)


def test_sizes_that_are_numbers_and_updates_that_ask_for_edges(tmp_path: Path):
    """``size_i`` and the like count nodes of the whole graph; where they are lengths, too, not.

    An ``update`` may do at nodes what a message may.
    """
    every = [(p, [SARPolicy(mode=3), *POLICIES[::3]]) for p in programs("sizes", SIZES)]
    for line in UPDATES:
        program = Program(f"update {line}", ("return x_j",), "", "sum")
        every.append((program, [SARPolicy(), POLICIES[3]]))
    jobs = [(program, list(some(policies, str(program), 2))) for program, policies in every]
    wrong, outcomes = judge(tmp_path, 3, graph(), jobs, start=parts)
    assert not wrong, wrong
    assert not any(map(any, outcomes)), outcomes


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


def aggregating(name: str) -> Any:
    own = OWN["apart"] if name == "own" else ""
    return build(Program("own", ("return x_j * x_i",), own, make_aggregation(name)))


def squares(layer: Any, data: Data) -> list[Tensor]:
    x = data.x.clone().requires_grad_()
    out = layer(x, data.edge_index, data.edge_weight, data.edge_attr)
    out.square().sum().backward()
    return [whole(out.detach()), whole(x.grad)]


def test_mode_3_is_one_shot_for_every_aggregation(tmp_path: Path):
    """Edges come in the whole graph's order, also at workers whose nodes are in another."""
    data = graph(5).sort(sort_by_row=False)
    part = torch.tensor([0, 1, 2, 2, 1, 0] * 4) % 3  # rank 3 has nothing

    def shuffled(root: Path) -> list[list[Tensor]]:
        mine = pyg_sar.load_partition(root)
        found = []
        for name in AGGREGATED:
            layer = pyg_sar.distribute(aggregating(name), SARPolicy(mode=3))
            found.append(squares(layer, mine))
            assert {c.strategy for c in facts_of(layer).choices.values()} == {"one_shot"}
        return found

    pyg_sar.write_partitions(data, 4, tmp_path / "parts", part)
    expected = [squares(aggregating(name), data) for name in AGGREGATED]
    for found in workers(shuffled, 4, tmp_path / "parts"):
        for name, mine, right in zip(AGGREGATED, found, expected, strict=True):
            assert all(map(partial(torch.allclose, rtol=1e-10, atol=1e-10), mine, right)), name
