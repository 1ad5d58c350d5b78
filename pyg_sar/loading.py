"""``load_partition``: this worker's part of the graph as an ordinary PyG ``Data``."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.comm import Communicator, current
from pyg_sar.errors import PartitionError
from pyg_sar.graph_index import dist_batch
from pyg_sar.halo import HaloPlan
from pyg_sar.index_space import dist_edge_index
from pyg_sar.storage import PartitionMetadata, part_attributes, read_metadata, read_part


def load_partition(
    root: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    verify: bool = True,
) -> Data:
    """Loads this worker's part of a partitioned graph.

    The result is a PyG ``Data`` with this worker's rows of every attribute, the distributed
    ``edge_index``, and global ids ``n_id`` (of its nodes) and ``e_id`` (of its edges). A node-level
    ``batch`` (graph ids) becomes a :class:`~pyg_sar.nn.DistBatch`, into which all workers scatter
    together. Only this worker's file is read.

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
    return _as_data(comm, metadata, tensors, torch.device(device or comm.device))


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
    plan = HaloPlan(
        comm,
        tensors["n_id"].numel(),
        tensors["halo_counts"].tolist(),
        tensors["send_index"].to(device),
        tensors["send_counts"].tolist(),
    )
    data = Data(**part_attributes(metadata, tensors))
    data = data.to(device)
    data.n_id = tensors["n_id"].to(device)
    data.e_id = tensors["e_id"].to(device)
    data.num_nodes = plan.num_local
    data.edge_index = dist_edge_index(tensors["edge_index"].to(device), plan)
    kind = metadata.attributes.get("batch")
    if kind is not None and (kind.level, kind.dtype, len(kind.shape)) == ("node", "int64", 1):
        data.batch = dist_batch(data.batch)
    return data
