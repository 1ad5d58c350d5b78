"""How a case of the coverage table is run, compared with one process, and judged.

A *case* is a PyG module with options, and the names of what it is called with. A case is *exact*
where workers give what one process gives, or *refused* where an error says by name what can't run
distributed. Everything else (other numbers, another error, a hang) is a defect.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from oracle import CHANNELS, TOLERANCE, assemble, error, gradient_scale, make_graph, probe
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy

WORLD = 3
NODES, EDGES = 40, 200
EXACT, REFUSED, UNAVAILABLE, NO_LAYER = "exact", "refused", "unavailable", "no layer"
LOW_PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TWICE = 2.0  # flash-attention's rule: our error is at most twice the single process's own

Call = Callable[[torch.nn.Module, SimpleNamespace], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A class of PyG with options.

    Attributes:
        make: Builds the plain module.
        args: What it is called with: names of tensors of the graph, ``name=tensor`` for keywords,
            ``(x,x)`` for pairs. Floating point tensors get gradients.
        call: Calls it otherwise; ``args`` then only names the tensors that get gradients.
        constants: Tensors of ``args`` that get none.
        refused: The error that distribute() or the call raises must match this.
        unavailable: Why it can't be built here; building it must raise an ImportError.
        no_layer: It has no distributed meaning to test, for a reason that ``why`` gives.
        why: Why it is refused, for the table.
        level: ``'graph'`` where the result has a row per graph, the same on all workers.
        tolerance: Of float64; wider where PyG itself computes in float32.
        default_double: PyG mixes in tensors of the default dtype: make that float64, and don't
            look at others.
        graph: One of ``GRAPHS``.
        train: Whether the module trains.
        one_shot: Whether a warning that the whole halo is fetched is expected.
    """

    make: Callable[[], Any]
    args: str = "x edge_index"
    call: Call | None = None
    constants: str = ""
    refused: str = ""
    unavailable: bool = False
    no_layer: bool = False
    why: str = ""
    level: str = "node"
    tolerance: float = TOLERANCE
    default_double: bool = False
    graph: str = "random"
    train: bool = True
    one_shot: bool = False

    def names(self) -> list[str]:
        """Names of the tensors that it is called with."""
        words = self.args.replace("(", " ").replace(")", " ").replace(",", " ").split()
        return list(dict.fromkeys(word.split("=")[-1] for word in words))


# Graphs ######################################################################


def coverage_graph() -> Data:
    """The oracle's random graph with everything that some layer asks for."""
    data = make_graph(NODES, EDGES)
    return _dressed(data, torch.Generator().manual_seed(11))


def mesh_graph() -> Data:
    """Every node has four in-edges, in an order that matters (MeshCNN)."""
    draw = torch.Generator().manual_seed(12)
    nodes = 24
    source = torch.randint(nodes, (nodes * 4,), generator=draw)
    edges = torch.stack([source, torch.arange(nodes).repeat_interleave(4)])
    data = Data(
        x=torch.randn(nodes, CHANNELS, generator=draw, dtype=torch.float64),
        edge_index=edges,
        edge_weight=torch.rand(nodes * 4, generator=draw, dtype=torch.float64),
        edge_attr=torch.randn(nodes * 4, 4, generator=draw, dtype=torch.float64),
        num_nodes=nodes,
    )
    return _dressed(data, draw)


def _dressed(data: Data, draw: torch.Generator) -> Data:
    nodes, edges = data.num_nodes, data.num_edges

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    data.pos = normal(nodes, 3)
    data.normal = torch.nn.functional.normalize(normal(nodes, 3), dim=-1)
    data.x0 = normal(nodes, CHANNELS)
    data.x_t = normal(nodes, CHANNELS)
    data.x_layers = normal(nodes, 3, CHANNELS)
    data.color = torch.randint(4, (nodes,), generator=draw)
    data.rare = (torch.arange(nodes) == 5).long() * 2 + (torch.arange(nodes) % 2)
    data.node_type = torch.randint(2, (nodes,), generator=draw)
    data.batch = torch.arange(nodes) * 3 // nodes
    data.edge_type = torch.randint(3, (edges,), generator=draw)
    data.positive = torch.rand(edges, generator=draw) < 0.6
    data.pseudo = torch.rand(edges, 2, generator=draw, dtype=torch.float64)
    return data


def sorted_graph() -> Data:
    """The same graph with its edges in the order of their targets, as some aggregations ask."""
    return coverage_graph().sort(sort_by_row=False)


GRAPHS = {"random": coverage_graph, "mesh": mesh_graph, "sorted": sorted_graph}

# One pass ####################################################################


@dataclass
class Pass:
    """What a forward and backward pass leaves."""

    outs: list[Tensor]
    node_grads: dict[str, Tensor | None]
    edge_grads: dict[str, Tensor | None]
    parameter_grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    n_id: Tensor
    e_id: Tensor


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


def weighted_sum(outs: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Losses per node ``[num_local]``: every output has a nonlinear share of its own."""
    total = torch.zeros(ids.numel(), dtype=torch.float64)
    for out in outs:
        rows = out.double()
        total = total + (rows * probe(ids, rows) + 0.1 * rows.square()).flatten(1).sum(-1)
    return total


def leaves(case: Case, data: Data, dtype: torch.dtype, ids: Tensor, draw: int) -> dict[str, Any]:
    """What the case is called with; floating point tensors in ``dtype``, with gradients.

    Every ``draw`` has features of its own: multiples of an eighth, which all dtypes hold.
    """
    given: dict[str, Any] = {"num_nodes": data.num_nodes}
    constants = case.constants.split()
    for name, value in data:
        if isinstance(value, Tensor) and value.is_floating_point():
            if name == "x" and draw:
                value = (probe(ids + 40 * draw, value) * 16).round() / 8
            value = value.to(dtype)
            if name in case.names() and name not in constants:
                value = value.clone().requires_grad_()
        given[name] = value
    return given


def one_pass(
    case: Case,
    module: torch.nn.Module,
    data: Data,
    mean: Callable[[Tensor], Tensor],
    dtype: torch.dtype = torch.float64,
    draw: int = 0,
) -> Pass:
    """Runs forward and backward once, from zeroed gradients."""
    module.zero_grad()
    whole = not isinstance(data.edge_index, pyg_sar.DistEdgeIndex)
    n_id = torch.arange(data.num_nodes) if whole else data.n_id
    given = leaves(case, data, dtype, n_id, draw)
    e_id = torch.arange(data.num_edges) if whole else data.e_id
    outs = [out.view(-1, 1) if out.dim() == 1 else out for out in
            tensors_of(invoke(case, module, given))]  # fmt: skip
    found = [out.detach().clone() for out in outs]  # reversible layers free theirs
    loss = mean(weighted_sum(outs, n_id))
    if loss.requires_grad:
        loss.backward()
    grads = {k: v.grad for k, v in given.items() if isinstance(v, Tensor) and v.requires_grad}
    return Pass(
        found,
        {k: g for k, g in grads.items() if data.is_node_attr(k) or k in NODE_LEVEL},
        {k: g for k, g in grads.items() if k in EDGE_LEVEL},
        {k: None if p.grad is None else p.grad.clone() for k, p in module.named_parameters()},
        {k: b.clone() for k, b in module.named_buffers()},
        n_id,
        e_id,
    )


NODE_LEVEL = ("x", "x0", "x_t", "x_layers", "pos", "normal")
EDGE_LEVEL = ("edge_weight", "edge_attr", "pseudo")


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
    low: dict[str, Pass]
    strategies: list[str]
    case_2: bool
    bytes: int
    one_shot_bytes: int
    resident: dict[str, int]
    law: int
    halo: int
    gathers: int
    left: int


def look(module: torch.nn.Module) -> tuple[list[str], bool]:
    """Strategies that the layers took, and whether any backward pass needs source values."""
    found, case_2 = [], False
    for layer in module.modules():
        for verdict in layer.__dict__.get("_verdicts", {}).values():
            found.append(verdict.strategy)
            case_2 |= verdict.needs is not None and verdict.needs.needs_sources
    return sorted(set(found)), case_2


def run_case(root: Path, case: Case, plain: torch.nn.Module, low: Mapping[str, Any]) -> Worker:
    """A worker's part of a case: exact, then counted in a second pass, then in low precision."""
    comm = pyg_sar.current()
    data = pyg_sar.load_partition(root)
    module = pyg_sar.distribute(copy.deepcopy(plain), SARPolicy(mode=1, prefetch=0))
    exact = one_pass(case, module, data, pyg_sar.mean)
    strategies, case_2 = look(module)
    plan = data.edge_index.plan
    ledger = counted_pass(case, module, data)
    one_shot = 0
    if strategies and strategies != ["one_shot"]:
        for layer in module.modules():
            if isinstance(layer, MessagePassing):
                layer.policy = SARPolicy(mode=3)
        one_pass(case, module, data, pyg_sar.mean)
        one_shot = halo_bytes(counted_pass(case, module, data))
    found = {
        name: run_low(root, case, layer, LOW_PRECISION[name], (0,))[0]
        for name, layer in low.items()
    }
    names = {getattr(layer, "ledger_name", None) for layer in module.modules()} - {None}
    return Worker(
        exact=exact,
        low=found,
        strategies=strategies,
        case_2=case_2,
        bytes=halo_bytes(ledger),
        one_shot_bytes=one_shot,
        resident={name: ledger.peak_resident_rows(name) for name in sorted(names)},
        law=max((plan.halo_counts[owner] for owner, _ in plan.rounds()), default=0),
        halo=plan.num_halo,
        gathers=ledger.events("halo_gather") + ledger.events("halo_reduce"),
        left=ledger.resident_rows(),
    )


def counted_pass(case: Case, module: torch.nn.Module, data: Data) -> pyg_sar.Ledger:
    """What a pass costs once everything that is kept has been made."""
    with pyg_sar.Ledger(pyg_sar.current()) as ledger:
        one_pass(case, module, data, pyg_sar.mean)
    return ledger


def halo_bytes(ledger: pyg_sar.Ledger) -> int:
    """Bytes of halo rows received."""
    return sum(ledger.received_bytes(kind=kind) for kind in ("fetch", "refetch", "gradient"))


# Comparing ###################################################################


def joined(passes: Sequence[Pass]) -> Pass:
    """The whole graph's rows from the workers'."""
    nodes = sum(p.n_id.numel() for p in passes)
    edges = sum(p.e_id.numel() for p in passes)

    def rows(kind: str, key: Any, ids: str, count: int) -> Tensor | None:
        return assemble([(getattr(p, ids), getattr(p, kind)[key]) for p in passes], count)

    first = passes[0]
    return Pass(
        [rows("outs", k, "n_id", nodes) for k in range(len(first.outs))],
        {k: rows("node_grads", k, "n_id", nodes) for k in first.node_grads},
        {k: rows("edge_grads", k, "e_id", edges) for k in first.edge_grads},
        first.parameter_grads,
        first.buffers,
        torch.arange(nodes),
        torch.arange(edges),
    )


def exact_errors(passes: Sequence[Pass], expected: Pass) -> dict[str, float]:
    """The largest relative error of everything that workers found, by name."""
    whole = joined(passes)
    found = {
        f"output {k}": error(out, other)
        for k, (out, other) in enumerate(zip(whole.outs, expected.outs, strict=True))
    }
    everything = {**expected.node_grads, **expected.edge_grads}
    ours = {**whole.node_grads, **whole.edge_grads}
    scale = gradient_scale(everything)
    found |= {f"{k}.grad": error(ours[k], grad, scale) for k, grad in everything.items()}
    scale = gradient_scale(expected.parameter_grads)
    for rank, one in enumerate(passes):
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

MORE_DRAWS = range(1, 9)


@dataclass
class Low:
    """One case in one dtype, on one process and in float64."""

    layer: torch.nn.Module
    dtype: torch.dtype
    runs: dict[int, tuple[Pass, Pass]] = field(default_factory=dict)

    def add(self, case: Case, data: Data, draw: int) -> None:
        """Runs a draw; the float64 result is that of the rounded tensors and parameters."""
        single = one_pass(
            case, copy.deepcopy(self.layer), data, torch.mean, self.dtype, draw
        )
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
        with suppress(RuntimeError):  # PyG has no such operator here
            low.add(case, data, 0)
            found[name] = low
    return found


def run_low(
    root: Path, case: Case, layer: torch.nn.Module, dtype: torch.dtype, draws: Sequence[int]
) -> list[Pass]:
    """A worker's part of a case in low precision."""
    data = pyg_sar.load_partition(root)
    copied = pyg_sar.distribute(copy.deepcopy(layer), SARPolicy(mode=1))
    return [one_pass(case, copied, data, pyg_sar.mean, dtype, draw) for draw in draws]


def low_ratios(
    case: Case, data: Data, root: Path, low: Low, first: Sequence[Pass]
) -> dict[str, float]:
    """The ratios of :func:`ratios`; where one draw says too little, the medians of nine.

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
        backend="threads", timeout=60.0,
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def judge(name: str, case: Case, data: Data, root: Path) -> Outcome:
    """Runs a case on one process and on workers, and says what holds."""
    if not case.default_double:
        return _judge(name, case, data, root, precise=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _judge(name, case, data, root, precise=False)
    finally:
        torch.set_default_dtype(before)


def _judge(name: str, case: Case, data: Data, root: Path, precise: bool) -> Outcome:
    if case.no_layer:
        return Outcome(name, NO_LAYER, case.why)
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
            warnings.simplefilter("ignore", pyg_sar.OneShotWarning)
            workers = pyg_sar.launch(
                run_case, WORLD, root, case, plain, layers, backend="threads", timeout=60.0
            )
    except pyg_sar.WorkerError as failure:
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
    return _compare(outcome, workers, expected, case.tolerance)


def _failed(name: str, case: Case, failure: pyg_sar.WorkerError) -> Outcome:
    cause = failure.__cause__
    text = f"{type(cause).__name__}: {cause}"
    outcome = Outcome(name, REFUSED, case.why or text.splitlines()[0])
    named = isinstance(cause, ValueError | TypeError | pyg_sar.DistributedIndexError)
    if not case.refused:
        outcome.problems.append(text)
    elif not named or not re.search(case.refused, str(cause)):
        outcome.problems.append(f"refused otherwise than by '{case.refused}': {text}")
    return outcome


def _compare(
    outcome: Outcome, workers: Sequence[Worker], expected: Pass, tolerance: float
) -> Outcome:
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
    _laws(outcome, workers)
    return outcome


def _laws(outcome: Outcome, workers: Sequence[Worker]) -> None:
    """One shard of remote rows; the bytes, relative to the one-shot way's."""
    most = max(workers, key=lambda w: max(w.resident.values(), default=0) / max(w.law, 1))
    outcome.resident = [max(most.resident.values(), default=0), most.law, most.halo]
    for rank, w in enumerate(workers):
        over = {k: n for k, n in w.resident.items() if n > w.law}
        if outcome.strategy == "sequential" and over and not w.gathers:
            outcome.problems.append(f"rank {rank}: {over} rows resident, one shard: {w.law}")
    outcome.gathers = any(w.gathers for w in workers)
    theirs = sum(w.one_shot_bytes for w in workers)
    if theirs:
        outcome.traffic = sum(w.bytes for w in workers) / theirs
