"""Compares a checkpoint with the run that goes on from it: its settings, and its graph.

[Note: sums of hashes] Graphs are told apart by digests, the same under every partition. Each node
and each edge is hashed by global ids. The hashes are added up, modulo 2^64, so that neither the
order nor the worker that holds a node or an edge matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import CheckpointError
from pyg_sar.files import from_json, to_json
from pyg_sar.partition.scratch import mixed
from pyg_sar.tensors import NodeTensor, rows_at
from pyg_sar.train.checkpoint import Checkpoint
from pyg_sar.train.evaluation import Graph
from pyg_sar.train.targets import Targets
from pyg_sar.wording import counted

#: Settings that a resumed run may change without leaving the loss curve it continues.
_FREE = frozenset({"epochs", "patience", "restore_best"})

_OF_SCHEDULE = ("schedule", "warmup", "step_size", "gamma", "scheduler")

#: Entries of an optimizer's groups that change no numbers, but for ``initial_lr``, which ``lr`` is.
_NO_OPTIONS = frozenset(
    {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
)


def start_of(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler]
) -> dict[str, list[Any]]:
    """Returns what a training starts with: the options of each group, and of the schedulers."""
    options = [
        {key: to_json(value) for key, value in group.items() if key not in _NO_OPTIONS}
        | {"lr": float(group.get("initial_lr", group["lr"]))}
        for group in optimizer.param_groups
    ]
    return {
        "options": options,
        "schedulers": [to_json(scheduler.state_dict()) for scheduler in schedulers],
    }


def _arguments(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of coded states of schedulers, with their names, but for rates."""
    if isinstance(state, dict) and "dict" in state:
        for key, value in state["dict"]:
            if "lr" not in str(key):
                yield from _arguments(value, str(key))
    elif isinstance(state, list):
        for value in state:
            yield from _arguments(value, name)
    else:
        yield name, state


def check_same_run(
    name: str,
    saved: Checkpoint,
    now: Mapping[str, Any],
    start: Mapping[str, list[Any]],
    *,
    allow_changes: bool,
) -> None:
    """Compares a trainer's settings ``now`` with those that the checkpoint ``name`` was saved with.

    ``start`` is what this run starts with (:func:`start_of`). Refused are a file of something else,
    other settings, and other weights than those of the last epoch.
    """
    state = saved.state
    if any(state.get(key) is None for key in ("config", "start", "graph", "evaluated")):
        raise CheckpointError(f"{name!r} was not saved by a Trainer")
    if state.get("restored") and state["epoch"] < now["epochs"] and not allow_changes:
        raise CheckpointError(
            f"{name!r} was saved after fit(), which had put the weights of epoch "
            f"{state['best_epoch']} in the place of those of epoch {state['epoch']}: save by the "
            "callback CheckpointEvery, train with restore_best=False, or pass allow_changes=True "
            "(--allow-changes)"
        )
    before = state["config"]
    free = _FREE - ({"epochs"} if now["schedule"] == "cosine" else set())
    changes = [
        f"{key}={before.get(key)!r} is now {value!r}"
        for key, value in now.items()
        if key not in free and before.get(key) != value
    ]
    if not changes:
        changes = list(_other_start(state["start"], start))
    changes += _one_more(state, now)
    if changes and not allow_changes:
        raise CheckpointError(
            f"{name!r} was saved with other settings: {', '.join(changes)}; give the same, or "
            "pass allow_changes=True (--allow-changes)"
        )


def _one_more(state: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields the evaluation after the last epoch, where a run of more epochs would not have it.

    It must have changed what follows: the wait for better weights, or learning rates.
    """
    last, every = state["config"]["epochs"], now["eval_every"]
    plateau = now["schedule"] == "plateau" or "ReduceLROnPlateau" in now["scheduler"]
    counts = now["patience"] is not None or plateau
    if state["epoch"] == last < now["epochs"] and last % every and counts:
        yield (
            f"epochs={last}, after which it was evaluated, is now {now['epochs']}, with "
            f"eval_every={every} (epochs that eval_every divides can be extended)"
        )


def _other_start(before: Mapping[str, list[Any]], now: Mapping[str, list[Any]]) -> Iterator[str]:
    pairs = zip(before["options"], now["options"], strict=False)  # As many, as is checked later.
    for k, (old, new) in enumerate(pairs):
        for key, value in new.items():
            if key in old and old[key] != value:
                yield f"optimizer.param_groups[{k}][{key!r}]={old[key]!r} is now {value!r}"
    both = (_arguments(start["schedulers"]) for start in (before, now))
    for old, new in zip_longest(*both, fillvalue=("", None)):
        if old != new:
            yield f"scheduler.{new[0] or old[0]}={old[1]!r} is now {new[1]!r}"


def check_same_graph(
    name: str,
    saved: Checkpoint,
    graph: Mapping[str, Any],
    *,
    evaluated: Mapping[str, Any],
    allow_changes: bool,
) -> None:
    """Compares the graphs of a trainer with those of the checkpoint ``name``.

    ``graph`` and ``evaluated`` are the digests of this run's graph, and of those that are only
    evaluated. ``allow_changes``: go on with another number of parts where nothing tells the graphs
    apart, or with other graphs that are only evaluated.
    """
    before, parts = saved.state["graph"], counted(saved.world_size, "parts")
    if other := _differences(before, graph):
        raise CheckpointError(f"{name!r} belongs to another graph or other splits: other {other}")
    other = _differences(saved.state["evaluated"], evaluated)
    if other and not allow_changes:
        raise CheckpointError(
            f"{name!r} was evaluated on other graphs: other {other}; give the same as evaluate_on, "
            "or pass allow_changes=True (--allow-changes)"
        )
    unknown = None in (graph["edge_digest"], before["edge_digest"])
    if unknown and graph["owners"] != before["owners"] and not allow_changes:
        raise CheckpointError(
            f"{name!r} is of {parts}, this run has {len(graph['owners'])} others, and it can't be "
            "shown that they are of the same graph: 'data' must have an 'edge_index' when saving "
            f"and now. Start workers that host {parts}, the same ones, or pass allow_changes=True "
            "(--allow-changes)"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns in words what differs between digests of graphs, of what both know; numbers too."""
    other = {
        key: text
        for key, text in DIFFERENCES.items()
        if before[key] != now[key] and None not in (before[key], now[key])
    }
    for key in {"nodes", "edges"} & other.keys():
        other[key] += f" ({before[key]}, now {now[key]})"
    return ", ".join(other.values())


def resume_schedulers(
    schedulers: Sequence[LRScheduler],
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    start: Mapping[str, list[Any]],
    state: Mapping[str, Any],
    now: Mapping[str, Any],
) -> None:
    """Sets the options of the optimizer, and the schedulers, after the optimizer's state is loaded.

    Where the schedule is the saved one it goes on: an option that starts with the saved run's value
    is what that had become, by the schedule or a callback, and others are this run's; learning
    rates of a schedule are the saved ones, times what a first one has changed by. Another schedule
    begins, with the options of this run.

    Args:
        optimizer: With the options of the checkpoint; this run's are ``options``, of each group.
        start: What this run starts with (:func:`start_of`).
        state, now: The checkpoint's state, and this run's settings.
    """
    keys = [*_OF_SCHEDULE, *(["epochs"] if now["schedule"] == "cosine" else [])]
    before = state["config"]
    goes_on = all(before.get(key) == now[key] for key in keys)
    old_start = state["start"]
    goes_on &= [*_arguments(old_start["schedulers"])] == [*_arguments(start["schedulers"])]
    groups = zip(
        optimizer.param_groups, options, start["options"], old_start["options"], strict=True
    )
    rescaled = False
    for group, option, first, old in groups:
        saved = dict(group)
        group.update(option)
        if goes_on:
            group |= {key: saved[key] for key in old if old[key] == first.get(key)}
            if schedulers and first["lr"] != old["lr"]:
                group["lr"], rescaled = saved["lr"] * first["lr"] / old["lr"], True
    if goes_on:
        for scheduler, values in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(from_json(values))
            if hasattr(scheduler, "base_lrs") and rescaled:
                scheduler.base_lrs = [first["lr"] for first in start["options"]]


# Digests of graphs ############################################################


_CHUNK = 2**20  # edges that are hashed at a time

DIFFERENCES = {
    "nodes": "number of nodes",
    "edges": "number of edges",
    "node_digest": "labels or splits",
    "edge_digest": "ends of edges",
}
"""Names what differs between graphs, for each value of :func:`graph_digest`."""


def digest_of_all(graphs: Sequence[Graph], comm: Communicator) -> dict[str, Any]:
    """Returns the sums of :func:`graph_digest` over graphs, and over replicas. Collective."""
    found = [graph_digest(data, targets, comm) for data, targets, _ in graphs]
    if comm.across is not None:
        found = [one for replica in comm.across.all_gather_object(found) for one in replica]

    def total(values: Sequence[Any]) -> Any:
        if None in values:
            return None
        numbers = [int(value, 16) if isinstance(value, str) else value for value in values]
        digests = any(isinstance(value, str) for value in values)
        return f"{sum(numbers) % 2**64:016x}" if digests else sum(numbers)

    columns = zip(*(digest["owners"] for digest in found), strict=True)
    sums = {name: total([digest[name] for digest in found]) for name in DIFFERENCES}
    return {**sums, "owners": [total(of_rank) for of_rank in columns]}


def graph_digest(data: Any, targets: Targets, comm: Communicator) -> dict[str, Any]:
    """Returns the sizes of a graph and digests of its nodes and edges. Collective.

    Features are not looked at, nor are attributes of edges.

    Returns:
        ``nodes`` and ``edges``, how many there are; ``node_digest`` of ids, targets and splits;
        ``edge_digest`` of the pairs of ids; ``owners``, a digest of the ids of each worker. The
        same on all workers, and but for ``owners`` under all partitions. Those of edges are
        ``None`` where there is no ``edge_index`` between nodes of one type.
    """
    edges: Any = data.get("edge_index") if isinstance(data, Data) else None
    joined = edges.edges if isinstance(edges, NodeTensor) else None
    one_type = joined is None or joined.sources is joined.targets
    plain = isinstance(edges, Tensor) and edges.layout == torch.strided and edges.dim() == 2
    member = torch.zeros_like(targets.masks["train"], dtype=torch.long)
    for k, mask in enumerate(targets.masks.values()):
        member = member + (mask.long() << k)
    values, rows = targets.values, len(targets.values)
    ids = torch.arange(rows, device=values.device)
    if isinstance(values, NodeTensor) and isinstance(member, NodeTensor):
        ids, member = values.rows.ids, rows_at(member, values.rows, 0)
        values = values.to_local()
    node = mixed(mixed(mixed(ids) + _bits(values)) + member)
    owned, edge = ids, 0
    if plain and one_type:
        owned = torch.arange(data.num_nodes) if joined is None else joined.targets.ids
        pairs = edges.as_subclass(Tensor) if joined is None else joined.global_ids()
        for source, target in zip(*(end.split(_CHUNK) for end in pairs), strict=True):
            edge += int(mixed(mixed(source) + target).sum())
    mine = [int(node.sum()), edge, int(mixed(owned).sum())]
    whole = isinstance(targets.values, NodeTensor), joined is not None
    columns = list(zip(*comm.all_gather_object(mine), strict=True))
    nodes, ends = (
        sum(column) if spread else column[0] for column, spread in zip(columns, whole, strict=False)
    )
    return {
        "nodes": data.num_nodes if isinstance(data, Data) else rows,
        "edges": edges.size(1) if plain and one_type else None,
        "node_digest": f"{nodes % 2**64:016x}",
        "edge_digest": f"{ends % 2**64:016x}" if plain and one_type else None,
        "owners": [f"{value % 2**64:016x}" for value in columns[2]],
    }


def _bits(targets: Tensor) -> Tensor:
    """Returns a number for each row, another one for other values: a class is its own."""
    columns = targets.view(len(targets), -1) if targets.numel() else targets.view(-1, 1)
    if columns.is_floating_point():
        columns = columns.double().view(torch.int64)
    rows = columns[:, 0].long()
    for k in range(1, columns.size(1)):
        rows = mixed(rows) + columns[:, k].long()
    return rows
