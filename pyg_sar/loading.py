"""``load_partition``: this worker's part of the graph as a PyG ``Data`` or ``HeteroData``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.comm import Communicator, current
from pyg_sar.errors import PartitionError
from pyg_sar.graph_index import dist_batch
from pyg_sar.halo import HaloPlan
from pyg_sar.hetero_parts import HeteroSchema, set_attributes, store_tensors
from pyg_sar.index_space import dist_edge_index
from pyg_sar.parts import decode_attributes, restore_adjacency
from pyg_sar.storage import PartitionMetadata, part_attributes, read_metadata, read_part


def load_partition(
    root: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    verify: bool = True,
) -> Data | HeteroData:
    """Loads this worker's part of a partitioned graph.

    The result is a PyG ``Data`` with this worker's rows of every attribute, the distributed
    ``edge_index``, and global ids ``n_id`` (of its nodes) and ``e_id`` (of its edges). A node-level
    ``batch`` (graph ids) becomes a :class:`~pyg_sar.nn.DistBatch`, into which all workers scatter
    together. Of a heterogeneous graph it is a ``HeteroData`` that has these for each node type and
    relation, also for those of which this worker holds nothing. Only this worker's file is read.
    Where the graph had its edges as ``adj_t`` (``ToSparseTensor``), ``data.adj_t`` is the same
    distributed ``edge_index``, which layers take like the one.

    Args:
        root: The folder that :func:`write_partitions` wrote.
        device: Where the tensors go; the communicator's device by default.
        verify: Compare the file's checksum.

    Returns:
        ``data`` with ``data.num_nodes`` own nodes and ``data.num_edges`` edges into them.

    Raises:
        PartitionError: On every worker alike, when any worker can't read its part, or the number
            of parts is not the number of workers.
    """
    comm = current()
    metadata: PartitionMetadata | None = None
    tensors: dict[str, Tensor] = {}
    problem = ""
    try:
        metadata = read_metadata(root)
        metadata.check_world_size(comm.world_size)
        tensors = read_part(root, comm.rank, verify=verify, metadata=metadata)
    except (PartitionError, OSError) as error:
        problem = str(error)
    _agree(comm, problem)
    if metadata is None:
        raise PartitionError(f"'{root}' could not be read")
    mine = [os.fspath(root), [part.sha256 for part in metadata.parts]]
    copies = comm.all_gather_object(mine)
    other = [rank for rank, copy in enumerate(copies) if copy[1] != copies[0][1]]
    if other:
        raise PartitionError(
            f"'{copies[other[0]][0]}' at rank {other[0]} is another partition than "
            f"'{copies[0][0]}' at rank 0; copy the folder of one pyg_sar.write_partitions() to "
            "all hosts"
        )
    place = torch.device(device or comm.device)
    if metadata.hetero is not None:
        return _as_hetero_data(comm, metadata, metadata.hetero, tensors, place)
    return _as_data(comm, metadata, tensors, place)


def _agree(comm: Communicator, problem: str) -> None:
    """Every worker raises what any worker met, so that none waits for one that is gone."""
    problems = comm.all_gather_object(problem)
    distinct = {text: rank for rank, text in reversed(list(enumerate(problems))) if text}
    if not distinct:
        return
    if len(distinct) == 1:
        (text, rank) = next(iter(distinct.items()))
        raise PartitionError(text if problems.count(text) > 1 else f"rank {rank}: {text}")
    lines = [f"rank {rank}: {text}" for text, rank in sorted(distinct.items(), key=lambda i: i[1])]
    raise PartitionError("; ".join(lines))


def _as_data(
    comm: Communicator,
    metadata: PartitionMetadata,
    tensors: dict[str, Tensor],
    device: torch.device,
) -> Data:
    plan = _plan(comm, tensors["n_id"].numel(), tensors, device)
    data = Data(**part_attributes(metadata, tensors))
    data = data.to(device)
    data.n_id = tensors["n_id"].to(device)
    data.e_id = tensors["e_id"].to(device)
    data.num_nodes, plan.n_id = plan.num_local, data.n_id
    edge_index = dist_edge_index(tensors["edge_index"].to(device), plan)
    data.edge_index = edge_index.ordered(data.e_id)
    restore_adjacency(data, whole=False)
    kind = metadata.attributes.get("batch")
    if kind is not None and (kind.level, kind.dtype, len(kind.shape)) == ("node", "int64", 1):
        data.batch = dist_batch(data.batch)
    return data


def _plan(
    comm: Communicator, num_local: int, tensors: dict[str, Tensor], device: torch.device
) -> HaloPlan:
    return HaloPlan(
        comm,
        num_local,
        tensors["halo_counts"].tolist(),
        tensors["send_index"].to(device),
        tensors["send_counts"].tolist(),
    )


def _as_hetero_data(
    comm: Communicator,
    metadata: PartitionMetadata,
    schema: HeteroSchema,
    tensors: dict[str, Tensor],
    device: torch.device,
) -> HeteroData:
    data = HeteroData()
    set_attributes(data._global_store, part_attributes(metadata, tensors))
    for k, info in enumerate(schema.types):
        rows = store_tensors(tensors, "type", k)
        (name,) = info.name
        store: Any = data[name]
        set_attributes(store, decode_attributes(info.attributes, info.values, rows))
        store.n_id = rows["n_id"]
        store.num_nodes = rows["n_id"].numel()
    for k, info in enumerate(schema.relations):
        rows = store_tensors(tensors, "relation", k)
        store = data[info.name]
        set_attributes(store, decode_attributes(info.attributes, info.values, rows))
        store.e_id = rows["e_id"]
    data = data.to(device)
    for k, info in enumerate(schema.relations):
        rows = store_tensors(tensors, "relation", k)
        source, _, target = info.name
        plan = _plan(comm, data[source].num_nodes, rows, device)
        targets = None if source == target else data[target].num_nodes
        edges = rows["edge_index"].to(device)
        edge_index = dist_edge_index(edges, plan, targets=targets)
        data[info.name].edge_index = edge_index.ordered(data[info.name].e_id)
    return data
