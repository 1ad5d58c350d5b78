"""``verify(model, data)``: does this model give on workers what it gives in one process?

A small part of the graph goes through the model in one process (plain PyG) and in a few parts that
the process hosts in turn, in float64 and from the same parameters. Outputs, gradients and buffers
are compared, and what passes between the modules: the first difference names the place.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_sar.comm.devices import other_states, seed_generators, set_other_states
from pyg_sar.comm.group import LocalCommunicator, current
from pyg_sar.comm.host import Hosting
from pyg_sar.comm.hosting import PartError, host_parts
from pyg_sar.convert import distribute
from pyg_sar.errors import OneShotWarning
from pyg_sar.files import TemporaryFolder, check_argument, check_folder, check_type, check_whole
from pyg_sar.ledger import HALO_KINDS, Ledger
from pyg_sar.message.layer_facts import facts_of
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.partition.levels import check_levels, levels_of
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.node_lists import NodeIds, said_of, without_lists
from pyg_sar.partition.parts import restricted
from pyg_sar.partition.storage import write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.tensors import Edges, NodeTensor
from pyg_sar.tools.comparison import (
    LayerReport,
    ModelPass,
    Recorder,
    StandIn,
    VerifyReport,
    compare,
    floats,
    in_full,
    watched,
)
from pyg_sar.tools.inference import is_distributed
from pyg_sar.tools.models import Call, call_with, default_dtype
from pyg_sar.train.hosted import HostedRun, backward_case
from pyg_sar.train.targets import not_finite
from pyg_sar.wording import counted

_MOST_FAILURES = 50
_SEED = 1


def verify(
    model: nn.Module,
    data: Data,
    num_workers: int = 3,
    *,
    policy: SARPolicy | None = None,
    call: Call | None = None,
    max_nodes: int = 2000,
    method: str = "random",
    tolerance: float = 1e-9,
    seed: int = 0,
    timeout: float = 300.0,
    node_ids: NodeIds | None = None,
    levels: Mapping[str, str] | None = None,
    memory: int | str | None = None,
    store: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    r"""Compares a model on a few workers with itself in one process, before a long run.

    .. code-block:: python

        report = pyg_sar.verify(model, data)
        print(report)     # a line per layer, and the first difference
        assert report.ok

    Both run in float64 from ``model``'s parameters, in its mode (``model.training``), with the same
    random numbers. The loss is a fixed weighting of all outputs. ``model`` and ``data`` stay as
    they are. While it runs, the default dtype of the process is float64.

    Args:
        model: A plain PyG model.
        data: The graph, or a part of it.
        num_workers: Workers: parts of the graph that this process hosts in turn.
        policy: How layers run.
        call: Runs the model, ``call(model, data)``. By default the arguments of ``forward``
            without a default value are attributes of ``data`` by their names; see
            :func:`call_with`.
        max_nodes: Larger graphs are sampled: randomly chosen nodes, grown along edges, with the
            edges between them.
        method: How nodes are given to workers (see :func:`pyg_sar.write_partitions`).
        tolerance: The largest error :math:`\max |a - b| / \max |b|` that counts as equal.
        seed: Of the sample.
        timeout: Seconds that an operation of a worker may take.
        node_ids: Attributes that hold node ids (see :func:`pyg_sar.write_partitions`).
        levels: What rows of attributes are (see there).
        memory: The limit of memory of these parts, as of :func:`pyg_sar.run`. The report then says
            what they kept, computed again and moved.
        store: The directory where they wait, as of :func:`pyg_sar.run`.

    Returns:
        A report with ``ok``, ``layers``, ``refused``, ``first_difference``; ``str(report)`` is a
        table.

    Raises:
        TypeError: When an argument has another type; ``data`` is no ``HeteroData``.
        ValueError: When an argument is out of range, or the model can't be called.
        Exception: Whatever the model raises in one process.
    """
    _check_arguments(model, data, policy, call, tolerance, num_workers, max_nodes)
    if policy is not None and policy.refresh_every > 1:
        raise ValueError(
            f"'policy' has refresh_every={policy.refresh_every}: steps between exchanges differ "
            "from one process by intent. Verify with refresh_every=1; "
            "pyg_sar.train.gradient_error measures the difference"
        )
    check_folder("store", store)
    hosting: Any = Hosting.of(num_workers, memory, store)
    with default_dtype(torch.float64), _generators_kept():
        # Of the graph: in a sample there may be as many edges as nodes.
        check_levels(levels, data.keys())
        rest, _ = without_lists(data, data.num_nodes, said_of(node_ids, data.keys()), levels)
        levels = levels_of(rest, levels)
        part = sample_nodes(data, max_nodes, seed, node_ids, levels)
        part = (
            copy.copy(part)
            .cpu()
            .apply(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t)
        )
        if num_workers > part.num_nodes:
            raise ValueError(
                f"'num_workers' is {num_workers}, of which some would have none of the "
                f"{counted(part.num_nodes, 'nodes')}: take fewer"
            )
        plain = copy.deepcopy(model).cpu().double()
        run = call or call_with(_required(plain, part))
        try:
            expected = _reference(plain, part, run)
        except Exception as error:
            error.add_note("verify: this is of plain PyG in one process; no worker has started")
            raise
        with TemporaryFolder("pyg_sar-verify-") as folder:
            root = os.path.join(folder, "parts")
            write_partitions(
                part, num_workers, root, method, seed, node_ids=node_ids, levels=levels
            )
            task = _Task(plain, run, root, replace(policy or SARPolicy(), random="same"), expected)
            report = VerifyReport(
                type(model).__name__, part.num_nodes, data.num_nodes, part.num_edges, num_workers,
                tolerance,
            )  # fmt: skip
            _run(task, report, timeout, hosting)
            if memory is None and store is None:
                report.hosting = {}
    return report


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Puts the default generators of PyTorch, NumPy and Python back: both runs seed them alike."""
    others = other_states()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        set_other_states(others)


def _check_arguments(
    model: Any, data: Any, policy: Any, call: Any, tolerance: Any, num_workers: Any, max_nodes: Any
) -> None:
    check_whole("num_workers", num_workers)
    check_whole("max_nodes", max_nodes)
    check_type("model", model, nn.Module, "a torch.nn.Module")
    if any("shared_parameters" in vars(module) for module in model.modules()):
        raise ValueError("verify takes the plain model: call it before distribute()")
    check_type("data", data, Data, "a Data, the graph; HeteroData can't be verified")
    check_type("policy", policy or SARPolicy(), SARPolicy, "a SARPolicy or None")
    check_type("call", call or print, Callable, "a function of model and data, or None")
    if is_distributed(data):
        raise ValueError("'data' is a part of a graph: pass the whole graph, or a sample of it")
    fits = isinstance(tolerance, int | float) and tolerance >= 0
    check_argument(fits, "tolerance", tolerance, "a number of at least 0")


def _required(model: nn.Module, data: Data) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    missing = [name for name in names if name not in data and name != "data"]
    if missing or not names:
        raise ValueError(
            f"{type(model).__name__}.forward() takes {missing or 'no named arguments'}, which "
            "'data' does not hold by that name; pass call=lambda model, data: model(data.x, ...)"
        )
    return names


# The sample ##################################################################


def sample_nodes(
    data: Data,
    max_nodes: int,
    seed: int = 0,
    node_ids: NodeIds | None = None,
    levels: Mapping[str, str] | None = None,
) -> Data:
    """Returns the subgraph of at most ``max_nodes`` nodes: a few random ones, grown along edges.

    Lists of node ids (``node_ids``, ``levels``: as of :func:`pyg_sar.write_partitions`) keep their
    kept nodes. ``data`` itself where it is small enough.
    """
    nodes = data.num_nodes
    if nodes is None or nodes <= max_nodes:
        return data
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(nodes, generator=draw)
    kept = torch.zeros(nodes, dtype=torch.bool)
    kept[order[: max(max_nodes // 20, 1)]] = True
    source, target = data.edge_index.cpu()
    while True:
        reached = kept.clone()
        reached[source[kept[target]]] = True
        reached[target[kept[source]]] = True
        new = order[(reached & ~kept)[order]]
        room = max_nodes - int(kept.sum())
        if not room:
            break
        # Where nothing is reached any more, another node is drawn.
        kept[(new if new.numel() else order[~kept[order]][:1])[:room]] = True
    nodes_kept = kept.nonzero().view(-1)
    rest, lists = without_lists(data, nodes, said_of(node_ids, data.keys()), levels)
    sample = rest.subgraph(nodes_kept.to(data.edge_index.device))
    for name, level in (levels or {}).items():
        if level == "edge" and rest.is_node_attr(name):  # to PyG, of as many edges as nodes
            sample[name] = rest[name][kept[source] & kept[target]]
    return restricted(sample, lists, nodes_kept, nodes)


# One pass ####################################################################


@dataclass
class _Task:
    """The task of each worker."""

    model: nn.Module
    call: Call
    root: str
    policy: SARPolicy
    expected: ModelPass
    refused: dict[str, str] = field(default_factory=dict)


def _values(tensor: Tensor) -> Tensor:
    """Returns one number per row, in which every entry has a weight of its own."""
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.view(-1, 1)
    place = torch.arange(rows.size(0))
    columns = torch.arange(rows.size(1))
    weight = torch.cos(place.view(-1, 1) * 1.3 + columns * 0.7 + 0.1)
    return (rows * weight + 0.1 * rows.square()).sum(-1)


def _leaves(data: Data) -> tuple[Data, dict[str, Tensor]]:
    """Returns a copy whose dense floating point attributes take gradients."""
    data, leaves = copy.copy(data), {}
    for name, value in data:
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        if dense and value.is_floating_point():
            leaves[name] = data[name] = value.detach().clone().requires_grad_()
    return data, leaves


def _reference(plain: nn.Module, data: Data, call: Call) -> ModelPass:
    """Runs the sample in one process; its first call gives lazy parameters their shapes."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in plain.parameters()):
        with torch.no_grad():
            call(plain, data)
    model = copy.deepcopy(plain)
    data, leaves = _leaves(data)
    seed_generators(_SEED)
    with Recorder(model, keep_results=True).watch() as recorder:
        outputs = floats(call(model, data))
    if not all(bool(out.isfinite().all()) for out in outputs):
        raise ValueError(
            "In one process the model's outputs are not finite, so there is nothing to compare"
            f"{not_finite(data)}"
        )
    _backward(outputs)
    found = ModelPass(recorder.events, [out.detach() for out in outputs])
    found.results = recorder.results
    return _with_gradients(found, model, leaves)


def _with_gradients(found: ModelPass, model: nn.Module, leaves: Mapping[str, Tensor]) -> ModelPass:
    found.input_grads = {
        name: None if leaf.grad is None else in_full(leaf.grad) for name, leaf in leaves.items()
    }
    found.parameter_grads = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    found.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return found


# Workers #####################################################################


def _run(task: _Task, report: VerifyReport, timeout: float, hosting: Hosting) -> None:
    """Runs workers until no layer fails any more: one that does is replaced by its results."""
    refused = task.refused
    outer = LocalCommunicator(torch.device("cpu"), timeout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", OneShotWarning)
        refused.update(_innermost(host_parts(_refusals, (task,), hosting, outer)[0]))
        report.failure = refused.get("", "")
        while report.failure == "":
            try:
                workers = host_parts(_worker, (task,), hosting, outer)
                break
            except PartError as failure:
                place, text = _place_of(failure)
                if not place or place in refused or len(refused) == _MOST_FAILURES:
                    report.failure = text
                else:
                    refused[place] = text
        if report.failure == "":
            report.hosting = workers[0].hosting
    report.warnings = list(dict.fromkeys(str(warning.message) for warning in caught))
    kinds = {name: type(module).__name__ for name, module in task.model.named_modules()}
    report.refused = {f"{name or 'model'} ({kinds[name]})": why for name, why in refused.items()}
    if report.failure == "":
        compare(task.model, task.expected, workers, report)


def _place_of(failure: PartError) -> tuple[str, str]:
    """Returns the module in which a worker failed, and what it said."""
    cause = failure.__cause__ or failure
    text = str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"
    return getattr(cause, "module_name", ""), text


def _refusals(task: _Task) -> dict[str, str]:
    """Returns what distribute() refuses, module by module."""
    found = {}
    for name, module in watched(task.model).items():
        try:
            distribute(copy.deepcopy(module), SARPolicy())
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    return found


def _innermost(refused: Mapping[str, str]) -> dict[str, str]:
    """Returns the refused modules without their containers."""
    return {
        name: why
        for name, why in refused.items()
        if not any(o != name and o.startswith(f"{name}." if name else "") for o in refused)
    }


def _worker(task: _Task) -> ModelPass:
    """Makes two passes: one is compared; the other is counted, when all that is kept is there."""
    current().compares = False
    mine = load_partition(task.root)
    edges: Any = mine.get("edge_index", mine.get("adj_t"))
    joined: Edges = edges.edges if isinstance(edges, NodeTensor) else edges.places.edges
    model = copy.deepcopy(task.model)
    for name in task.refused:
        model.set_submodule(name, StandIn(task.expected.results[name]))
    model = distribute(model, task.policy)
    recorder = Recorder(model)
    try:
        with recorder.watch():
            found = _pass(task, model, mine)
    except Exception as error:
        error.module_name = recorder.active[-1] if recorder.active else ""  # type: ignore
        raise
    found.events = recorder.events
    run = HostedRun(current())
    with Ledger(current()) as ledger:
        _pass(task, model, mine)
    found.hosting = run.summary(model, ledger, joined.targets.count, 1)
    plan = joined.index.plan
    for name, module in model.named_modules():
        if isinstance(module, DistMessagePassing):
            found.layers[name] = _layer(name, module, ledger, plan.num_halo)
    return found


def _pass(task: _Task, model: nn.Module, mine: Data) -> ModelPass:
    data, leaves = _leaves(mine)
    model.zero_grad()
    seed_generators(_SEED)
    outputs = floats(task.call(model, data))
    found = ModelPass({}, [in_full(out) for out in outputs])
    if task.refused:
        return found
    _backward(outputs)
    return _with_gradients(found, model, leaves)


def _backward(outputs: Sequence[Tensor]) -> None:
    """Passes a loss back that weights every output in another way."""
    loss = sum((_values(out).mean() for out in outputs), torch.zeros(()))
    if loss.requires_grad:
        torch.autograd.backward(loss)


def _layer(name: str, layer: Any, ledger: Ledger, halo: int) -> LayerReport:
    """Returns how a layer ran on this worker."""
    choices = facts_of(layer).choices.values()
    label = layer.ledger_name
    return LayerReport(
        name=name,
        kind=type(layer).__name__,
        strategy=", ".join(sorted({choice.strategy for choice in choices})) or "not called",
        case=backward_case(layer),
        received_bytes=sum(ledger.received_bytes(layer=label, kind=kind) for kind in HALO_KINDS),
        resident_rows=ledger.peak_resident_rows(label),
        halo_rows=halo,
        transforms_first=facts_of(layer).transforms_first,
    )
