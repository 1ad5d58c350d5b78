"""Compares what workers found with one process, and judges.

A case is *exact* where workers give what one process gives, or *refused* where an error says by
name what can't run distributed. Everything else (other numbers, another error, a hang) is a defect.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from coverage_case import Case
from coverage_run import LOW_PRECISION, Pass, Worker, build, one_pass, run_case, run_low
from oracle import assemble, error, gradient_scale
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.nn.registry import distributed_class

WORLD = 3
EXACT, REFUSED, UNAVAILABLE, NO_LAYER = "exact", "refused", "unavailable", "no layer"
TWICE = 2.0  # flash-attention's rule: our error is at most twice the single process's own

# Comparing ###################################################################


def joined(passes: Sequence[Pass]) -> Pass:
    """The whole graph's rows from the workers'."""
    nodes = sum(p.n_id.numel() for p in passes)
    edges = sum(p.e_id.numel() for p in passes)

    def rows(kind: str, key: Any, ids: str, count: int) -> Tensor | None:
        return assemble([(getattr(p, ids), getattr(p, kind)[key]) for p in passes], count)

    first = passes[0]
    outs = first.outs
    if first.level == "node":
        outs = [rows("outs", k, "n_id", nodes) for k in range(len(first.outs))]
    return Pass(
        outs,
        {k: rows("node_grads", k, "n_id", nodes) for k in first.node_grads},
        {k: rows("edge_grads", k, "e_id", edges) for k in first.edge_grads},
        first.parameter_grads,
        first.buffers,
        torch.arange(nodes),
        torch.arange(edges),
        first.level,
    )


def exact_errors(passes: Sequence[Pass], expected: Pass, least: float = 0.0) -> dict[str, float]:
    """The largest relative error of everything that workers found, by name.

    Args:
        passes: What workers found.
        expected: What one process found.
        least: Gradients are judged by their largest, which counts as no less than this.
    """
    whole = joined(passes)
    found = {
        f"output {k}": error(out, other)
        for k, (out, other) in enumerate(zip(whole.outs, expected.outs, strict=True))
    }
    everything = {**expected.node_grads, **expected.edge_grads}
    ours = {**whole.node_grads, **whole.edge_grads}
    scale = max(gradient_scale(everything), least)
    found |= {f"{k}.grad": error(ours[k], grad, scale) for k, grad in everything.items()}
    scale = max(gradient_scale(expected.parameter_grads), least)
    for rank, one in enumerate(passes):
        if one.level == "graph":
            pairs = zip(one.outs, expected.outs, strict=True)
            found |= {f"output {k}@{rank}": error(a, b) for k, (a, b) in enumerate(pairs)}
        for name, gradient in expected.parameter_grads.items():
            found[f"{name}.grad@{rank}"] = error(one.parameter_grads[name], gradient, scale)
        for name, buffer in expected.buffers.items():
            found[f"{name}@{rank}"] = error(one.buffers[name], buffer)
    return found


def groups(one: Pass) -> dict[str, Tensor]:
    """Outputs, input gradients and parameter gradients, each as one long vector."""
    kinds: dict[str, list[Tensor | None]] = {
        "outputs": list(one.outs),
        "input gradients": [*one.node_grads.values(), *one.edge_grads.values()],
        "parameter gradients": list(one.parameter_grads.values()),
    }
    return {
        name: torch.cat([t.double().flatten() for t in tensors if t is not None])
        for name, tensors in kinds.items()
        if any(t is not None for t in tensors)
    }


def ratios(ours: Pass, theirs: Pass, exact: Pass, dtype: torch.dtype) -> dict[str, float]:
    r"""The workers' error by the single process's, both against float64.

    .. math:: \frac{\|v - v_{64}\|_2}{\max(\|v_1 - v_{64}\|_2, \tfrac{\epsilon}{2}\|v_{64}\|_2)}

    with one unit in the last place of the dtype as the least that counts.
    """
    found = {}
    a, b, c = groups(ours), groups(theirs), groups(exact)
    half = torch.finfo(dtype).eps / 2
    for name, right in c.items():
        own = max(float((b[name] - right).norm()), half * float(right.norm()), 1e-300)
        found[name] = float((a[name] - right).norm()) / own
    return found


# Low precision ###############################################################

MORE_DRAWS = range(1, 25)


@dataclass
class Low:
    """One case in one dtype, on one process and in float64."""

    layer: torch.nn.Module
    dtype: torch.dtype
    runs: dict[int, tuple[Pass, Pass]] = field(default_factory=dict)

    def add(self, case: Case, data: Data, draw: int) -> None:
        """Runs a draw; the float64 result is that of the rounded tensors and parameters."""
        single = one_pass(case, copy.deepcopy(self.layer), data, torch.mean, self.dtype, draw)
        rounded = data.clone()
        for name, value in data:
            if isinstance(value, Tensor) and value.is_floating_point():
                rounded[name] = value.to(self.dtype).double()
        layer = copy.deepcopy(self.layer).double()
        self.runs[draw] = single, one_pass(case, layer, rounded, torch.mean, draw=draw)


def low_precision(case: Case, data: Data) -> dict[str, Low]:
    """The case in every dtype that PyG itself runs it in."""
    found = {}
    for name, dtype in LOW_PRECISION.items():
        low = Low(build(case, dtype), dtype)
        with suppress(RuntimeError):  # PyG has no such operator
            low.add(case, data, 0)
            if all(bool(v.isfinite().all()) for v in groups(low.runs[0][0]).values()):
                found[name] = low
    return found


def low_ratios(
    case: Case, data: Data, root: Path, low: Low, first: Sequence[Pass]
) -> dict[str, float]:
    """The ratios of :func:`ratios`; where one draw says too little, the medians of 25.

    A gradient of one number may come out right by luck, and a rectifier or a maximum may switch
    in one of two results of equal quality.
    """
    found = ratios(joined(first), *low.runs[0], low.dtype)
    if max(found.values(), default=0.0) <= TWICE:
        return found
    for draw in MORE_DRAWS:
        low.add(case, data, draw)
    workers = pyg_sar.launch(
        run_low, WORLD, root, case, low.layer, low.dtype, MORE_DRAWS,
        timeout=60.0,
    )  # fmt: skip
    passes = zip(MORE_DRAWS, zip(*workers, strict=True), strict=True)
    draws = [found, *(ratios(joined(p), *low.runs[d], low.dtype) for d, p in passes)]
    return {name: median(draw[name] for draw in draws) for name in found}


@dataclass
class Outcome:
    """A row of the table: what was found for one case."""

    name: str
    verdict: str
    reason: str = ""
    strategy: str = ""
    case: str = ""
    error: float = 0.0
    ratios: dict[str, float] = field(default_factory=dict)
    resident: list[int] = field(default_factory=list)
    traffic: float = math.nan
    gathers: bool = False
    problems: list[str] = field(default_factory=list)


def judge(name: str, case: Case, data: Data, root: Path, precise: bool = True) -> Outcome:
    """Runs a case on one process and on workers, and says what holds.

    Args:
        name: The case's name.
        case: The case.
        data: Its graph.
        root: A partition of it.
        precise: Look at low precision as well.
    """
    if not case.default_double:
        return _judge(name, case, data, root, precise)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _judge(name, case, data, root, precise=False)
    finally:
        torch.set_default_dtype(before)


def _judge(name: str, case: Case, data: Data, root: Path, precise: bool) -> Outcome:
    if case.no_layer:
        return Outcome(name, NO_LAYER, case.why)
    if case.by_class:
        try:
            distributed_class(case.make())
        except ValueError as reason:
            return Outcome(name, REFUSED, str(reason))
        return Outcome(name, "", problems=["distribute() does not refuse the class"])
    if case.unavailable:
        try:
            case.make()
        except (ImportError, RuntimeError) as missing:
            return Outcome(name, UNAVAILABLE, case.why or str(missing).splitlines()[0])
        return Outcome(name, "", problems=["can be built here after all: give it a real case"])
    plain = build(case)
    expected, low = None, {}
    if not case.refused:
        expected = one_pass(case, copy.deepcopy(plain), data, torch.mean)
        low = low_precision(case, data) if precise else {}
    layers = {key: one.layer for key, one in low.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pyg_sar.errors.OneShotWarning)
            workers = pyg_sar.launch(run_case, WORLD, root, case, plain, layers, timeout=60.0)
    except pyg_sar.errors.WorkerError as failure:
        return _failed(name, case, failure)
    outcome = Outcome(name, EXACT)
    if case.refused or expected is None:
        outcome.problems.append(f"ran, but was expected to be refused: {case.refused}")
        return outcome
    for key, one in low.items():
        found = low_ratios(case, data, root, one, [w.low[key] for w in workers])
        outcome.ratios[key] = max(found.values(), default=0.0)
        if not outcome.ratios[key] <= TWICE:
            outcome.problems.append(f"{key}: {found} times the single process's error")
    _compare(outcome, workers, expected, case.tolerance)
    _laws(outcome, case, data, workers)
    return outcome


def _failed(name: str, case: Case, failure: pyg_sar.errors.WorkerError) -> Outcome:
    cause = failure.__cause__
    text = f"{type(cause).__name__}: {cause}"
    outcome = Outcome(name, REFUSED, case.why or text.splitlines()[0])
    named = isinstance(cause, ValueError | TypeError | pyg_sar.errors.DistributedIndexError)
    if not case.refused:
        outcome.problems.append(text)
    elif not named or not re.search(case.refused, str(cause)):
        outcome.problems.append(f"refused otherwise than by '{case.refused}': {text}")
    return outcome


def _compare(outcome: Outcome, workers: Sequence[Worker], expected: Pass, tolerance: float) -> None:
    found = exact_errors([w.exact for w in workers], expected)
    wrong = {k: v for k, v in found.items() if not v <= tolerance}
    outcome.error = max(found.values(), default=0.0)
    if wrong:
        outcome.problems.append(f"differs in float64: {wrong}")
    strategies = {tuple(w.strategies) for w in workers}
    outcome.strategy = ", ".join(workers[0].strategies) or "none"
    if len(strategies) > 1 or len({w.case_2 for w in workers}) > 1:
        outcome.problems.append(f"workers chose differently: {strategies}")
    if workers[0].strategies and outcome.strategy != "one_shot":
        outcome.case = "2" if workers[0].case_2 else "1"
    if any(w.left for w in workers):
        outcome.problems.append(f"rows still resident: {[w.left for w in workers]}")


def shards(data: Data, parts: Sequence[Tensor], reverse: bool) -> list[list[int]]:
    """Remote rows of each other worker that a worker has resident with a shard.

    Sources that its own edges need, or, where the sources' worker goes through the edges in the
    backward pass, targets of the other's edges from its nodes.

    Args:
        data: The whole graph.
        parts: The nodes of each worker.
        reverse: Messages go from targets to sources.
    """
    owner = torch.empty(data.num_nodes, dtype=torch.long)
    for rank, nodes in enumerate(parts):
        owner[nodes] = rank
    far, near = data.edge_index.flip(0) if reverse else data.edge_index

    def rows(p: int, q: int) -> int:
        sources = far[(owner[near] == p) & (owner[far] == q)]
        targets = near[(owner[near] == q) & (owner[far] == p)]
        return max(int(sources.unique().numel()), int(targets.unique().numel()))

    return [[rows(p, q) for q in range(len(parts)) if q != p] for p in range(len(parts))]


def _laws(outcome: Outcome, case: Case, data: Data, workers: Sequence[Worker]) -> None:
    """One shard of remote rows, or a hosted part's halo; bytes, relative to the one-shot way's."""
    parts = [w.exact.n_id for w in workers]
    ways = [False, True] if any(w.reverses for w in workers) else [False]
    counts = [shards(data, parts, way) for way in ways]
    for rank, w in enumerate(workers):
        most = sum if w.hosted else max
        law = case.relations * max(most(of[rank]) for of in counts)
        peak = max(w.resident.values(), default=0)
        if not outcome.resident or peak * outcome.resident[1] > outcome.resident[0] * law:
            outcome.resident = [peak, law]
        over = {k: n for k, n in w.resident.items() if n > law}
        if outcome.strategy == "sequential" and over and not w.gathers:
            outcome.problems.append(f"rank {rank}: {over} rows resident, at most {law}")
    outcome.gathers = any(w.gathers for w in workers)
    theirs = sum(w.one_shot_bytes for w in workers)
    if theirs:
        outcome.traffic = sum(w.bytes for w in workers) / theirs
