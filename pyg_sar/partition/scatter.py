"""``scatter``: each worker gets its part of a graph that is in memory, without files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.comm.group import Communicator, Label, current
from pyg_sar.errors import PartitionError
from pyg_sar.files import check_type
from pyg_sar.partition.assignment import Assignment
from pyg_sar.partition.global_view import random_digest, share_random_states, whole_graph
from pyg_sar.partition.loading import agree, place_of
from pyg_sar.partition.metadata import METADATA, parse_metadata
from pyg_sar.partition.node_lists import NodeIds
from pyg_sar.partition.part_checks import check_marks, gather_marks, num_marks, part_marks
from pyg_sar.partition.schema import PartTensors
from pyg_sar.partition.unfinished import digest
from pyg_sar.partition.whole_graph import prepare
from pyg_sar.wording import counted

_LABEL: Label = ("", "", "scatter")
_NOWHERE = f"scatter(data)/{METADATA}"  # In messages, in the place of a file.
_NONE, _GIVEN, _UNKNOWN, _FAILED = range(4)


def scatter(
    data: Data | HeteroData | None,
    method: str | Tensor | np.ndarray[Any, Any] | Assignment | None = None,
    seed: int = 0,
    *,
    node_ids: NodeIds | None = None,
    levels: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
) -> Data | HeteroData:
    """Gives each worker its part of a graph that is in memory. Collective.

    The result is what :func:`pyg_sar.write_partitions` and :func:`pyg_sar.load_partition` give,
    without files: tensors of the whole graph, of which each worker holds its part's rows. A batch
    of graphs (PyG's ``DataLoader``) is one graph, a ``Batch`` with ``num_graphs``, out of which
    single graphs can't be taken:

    .. code-block:: python

        for batch in DataLoader(graphs, batch_size=4, shuffle=True):
            batch = pyg_sar.scatter(batch)
            loss = F.mse_loss(model(batch.x, batch.edge_index, batch.batch), batch.y)

    Where all workers have the graph, one message of some hundred bytes compares their graphs and
    parts. Where one has it, that one cuts it and sends each part: three messages more. All workers
    draw random numbers alike from then on: where the states of their generators differ, they take
    those of the worker that has the graph (of rank 0, where all have it). Nothing is kept of a
    graph when its tensors are gone. Tables of node embeddings (``torch.nn.Embedding`` of all nodes)
    are for :func:`pyg_sar.load_partition`.

    Args:
        data: The graph: on one worker, ``None`` on the others; or on all, and equal.
        method: As of :func:`pyg_sar.write_partitions`. By default ``'geometric'`` where there is
            ``data.pos``, else ``'balanced'``.
        seed: Seed of the partitioner.
        node_ids: As of :func:`pyg_sar.write_partitions`.
        levels: The same; graphs with as many edges as nodes need it for some names.
        device: Where the tensors go, as of :func:`pyg_sar.load_partition`.

    Returns:
        The graph, in tensors of the whole graph.

    Raises:
        TypeError: When ``data`` is no graph. This and what follows ends the call on all workers.
        ValueError: When no worker has a graph, or some but not all and more than one; when their
            graphs differ, or hold what can't be compared; when a graph can't be partitioned.
        PartitionError: At workers that have no graph, where the one that has can't partition it.
    """
    comm = current()
    place = place_of(device, comm)
    if method is None:
        method = "balanced" if data is None or not _has_positions(data) else "geometric"
    state, known, marks = _NONE, "", torch.zeros(num_marks(comm.world_size), dtype=torch.long)
    content: dict[str, Any] = {}
    tensors_of: Callable[[int], PartTensors] | None = None
    tensors: PartTensors = {}
    failure: Exception | None = None
    if data is not None:
        try:
            how = {"node_ids": node_ids, "levels": levels}
            content, tensors_of = _cut(data, comm.world_size, method, seed, how)
            tensors = tensors_of(comm.rank)
            marks = part_marks(parse_metadata(Path(_NOWHERE), content), tensors)
            known = digest(data) or ""
            state = _GIVEN if known else _UNKNOWN
        except Exception as error:
            state, failure = _FAILED, error
    hashes = hashlib.sha256(known.encode()).digest() + random_digest(comm.device)
    everyone, rows = gather_marks(comm, [state, *hashes], marks, _LABEL)
    states = everyone[:, 0].tolist()
    if _FAILED in states:
        try:
            agree(comm, "" if failure is None else f"scatter(data): {failure}")
        except PartitionError:
            if failure is not None:
                raise failure from None
            raise
    source = _source(states, everyone[:, 1:33])
    if source is None:
        source = 0
        check_marks(parse_metadata(Path(_NOWHERE), content), rows)
    else:
        content, tensors = _sent(comm, source, content, tensors, tensors_of)
    if not bool((everyone[:, 33:] == everyone[0, 33:]).all()):
        share_random_states(comm, source)
    torch.compiler.set_stance("force_eager")  # As in load_partition().
    return whole_graph(comm, parse_metadata(Path(_NOWHERE), content), tensors, place, keep=False)


def _has_positions(data: Any) -> bool:
    if isinstance(data, HeteroData):
        return all("pos" in data[name] for name in data.node_types)
    return isinstance(data, Data) and data.get("pos") is not None


def _cut(
    data: Any, num_parts: int, method: Any, seed: int, how: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[int], PartTensors]]:
    """Returns the metadata of a graph's parts, as their file has it, and what makes their
    tensors.
    """
    check_type("data", data, (Data, HeteroData), "a Data, a HeteroData or None")
    header, statistics, tensors_of = prepare(data, num_parts, method, seed, lambda _: None, **how)
    rows = zip(statistics.nodes, statistics.edges, statistics.halo, strict=True)
    names = ("num_nodes", "num_edges", "num_halo")
    nowhere = {"file": "", "sha256": "", "bytes": 0}
    header["parts"] = [nowhere | dict(zip(names, counts, strict=True)) for counts in rows]
    return json.loads(json.dumps(header)), tensors_of


def _source(states: list[int], digests: Tensor) -> int | None:
    """Returns the one rank that has the graph; ``None`` where all have it, and it is the same."""
    having = [rank for rank, state in enumerate(states) if state != _NONE]
    if len(having) == 1:
        return having[0] if len(states) > 1 else None
    remedy = "pass the graph on one worker and None on the others, or the same graph on all"
    if len(having) < len(states):
        where = f"ranks {having} of {counted(len(states), 'workers')}" if having else "no rank"
        raise ValueError(f"scatter(data): {where} passed a graph; {remedy}")
    if _UNKNOWN in states:
        raise ValueError(
            f"scatter(data): the graph at rank {states.index(_UNKNOWN)} holds more than tensors, "
            "numbers and texts, which workers can't compare; pass it on one worker and None on the "
            "others"
        )
    other = next((r for r, row in enumerate(digests) if not torch.equal(row, digests[0])), None)
    if other is not None:
        raise ValueError(
            f"scatter(data): rank {other} passed another graph than rank 0; seed the workers alike "
            f"where a loader shuffles, or {remedy}"
        )
    return None


def _sent(
    comm: Communicator,
    source: int,
    content: dict[str, Any],
    tensors: PartTensors,
    tensors_of: Callable[[int], PartTensors] | None,
) -> tuple[dict[str, Any], PartTensors]:
    """Sends each part from the rank that has the graph; returns metadata and tensors of one's own.

    A part is one message: the bytes of a safetensors file.
    """
    sends: list[Tensor | None] = [None] * comm.world_size
    recvs, sizes = list(sends), [0] * comm.world_size
    for p in range(comm.world_size) if tensors_of is not None else ():
        if p != source and tensors_of is not None:
            packed = torch.frombuffer(bytearray(save(tensors_of(p))), dtype=torch.uint8)
            sends[p], sizes[p] = packed.to(comm.device), packed.numel()
    content, sizes = comm.broadcast_object((content, sizes), source, label=_LABEL)
    if comm.rank != source:
        size = sizes[comm.rank]
        recvs[source] = torch.empty(size, dtype=torch.uint8, device=comm.device)
    comm.exchange_all(sends, recvs, label=_LABEL).wait()
    received = recvs[source]
    if received is None:
        return content, tensors
    found = load(received.cpu().numpy().tobytes())
    # Copies of their own, each of which is freed when the tensor is.
    return content, {name: tensor.clone() for name, tensor in found.items()}
