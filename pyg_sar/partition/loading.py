"""``load_partition``: a partitioned graph, of which this worker holds its part."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.comm.devices import check_gpu, count_gpus, device_of
from pyg_sar.comm.group import Communicator, Label, current
from pyg_sar.errors import PartitionError
from pyg_sar.files import check_path
from pyg_sar.partition.global_view import share_random_states, whole_graph
from pyg_sar.partition.metadata import PartitionMetadata, read_metadata
from pyg_sar.partition.part_checks import check_marks, gather_marks, num_marks, part_marks
from pyg_sar.partition.storage import read_part

_AGREE: Label = ("", "", "agreement")


def load_partition(
    root: str | os.PathLike[str], *, device: torch.device | str | None = None, verify: bool = True
) -> Data | HeteroData:
    """Loads a partitioned graph, of which this worker holds its part.

    .. code-block:: python

        data = pyg_sar.load_partition("parts")  # on each worker
        data.x.shape                            # torch.Size([num_nodes, F])
        data.x.to_local().shape                 # torch.Size([nodes of this worker, F])

    The result is a PyG ``Data`` whose tensors have the shapes of the whole graph
    (:class:`~pyg_sar.tensors.NodeTensor`): code that is written for one process computes the same
    numbers (docs/whole-graph.md). Of a heterogeneous graph it is a ``HeteroData`` that has these
    for each node type and relation, also for those of which this worker holds nothing. All workers
    draw random numbers alike: their generators take the state of rank 0's here, and must be seeded
    alike from then on.

    Lists of node ids (``train_idx``) and pairs of them (``edge_label_index``, int64) are such
    tensors, too: each worker holds the entries of its own nodes (see
    :func:`~pyg_sar.partition.storage.write_partitions`). Where the graph had its edges as ``adj_t``
    (``ToSparseTensor``), it has them so here.

    A worker reads only its own file. Workers exchange a digest, to see that their parts belong
    together, and nothing else.

    Args:
        root: The folder that :func:`write_partitions` wrote.
        device: Where the tensors go: this worker's device (``comm.device``), which is the default.
            A single process on the CPU may choose any.
        verify: Compare the file's checksum, and refuse a file that was altered.

    Returns:
        ``data``. Its ``num_nodes`` and ``num_edges`` are the graph's.

    Raises:
        ValueError: When ``device`` isn't there, or is another one than that of one of several
            workers, or of a single one that computes on a GPU.
        PartitionError: On every worker alike, when any worker can't read its part, the number of
            parts is not the number of workers, or an attribute with a row per node, edge or entry
            is no tensor.
    """
    comm = current()
    check_path("root", root)
    place = place_of(device, comm)
    metadata: PartitionMetadata | None = None
    tensors: dict[str, Tensor] = {}
    problem = ""
    try:
        metadata = read_metadata(root)
        metadata.check_world_size(comm.world_size, comm.host is not None)
        tensors = read_part(root, comm.rank, verify=verify, metadata=metadata)
        if comm.host is not None:
            # Views of the file would stay in memory: copies wait in the store with the part. Also
            # without a store: where tensors lie (here: aligned) decides the last bits of products.
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    except (PartitionError, OSError) as error:
        problem = str(error)
    _check_together(comm, root, metadata, tensors, problem)
    if metadata is None:
        raise PartitionError(f"'{root}' could not be read")
    torch.compiler.set_stance("force_eager")  # Graphs of it would lose node tensors' gradients.
    if comm.world_size > 1:
        share_random_states(comm)
    return whole_graph(comm, metadata, tensors, place)


def place_of(device: torch.device | str | None, comm: Communicator) -> torch.device:
    """Returns the device of the data, on which all that workers exchange with each other lies."""
    if device is None:
        return comm.device
    found = device_of(device)
    check_gpu(found, comm.rank, count_gpus())
    if found == comm.device or (comm.world_size == 1 and comm.device.type == "cpu"):
        return found
    if found.index is None and found.type == comm.device.type:
        return comm.device
    raise ValueError(
        f"load_partition(device='{device}') at rank {comm.rank}, whose device is {comm.device}: "
        f"leave 'device' out, or call pyg_sar.init(device='{device}') first"
    )


def _digest(metadata: PartitionMetadata) -> bytes:
    """Returns 32 bytes that tell this partition from others."""
    files = [part.sha256 for part in metadata.parts]
    files += [end for info in metadata.series.values() for end in info.sha256]
    return hashlib.sha256("".join(files).encode()).digest()


def _check_together(
    comm: Communicator,
    root: str | os.PathLike[str],
    metadata: PartitionMetadata | None,
    tensors: dict[str, Tensor],
    problem: str,
) -> None:
    """Raises on all workers where one met a problem, or where their parts don't belong together."""
    digest, marks = bytes(32), torch.zeros(num_marks(comm.world_size), dtype=torch.long)
    fine = metadata is not None and not problem
    if metadata is not None and fine:
        digest, marks = _digest(metadata), part_marks(metadata, tensors)
    everyone, found = gather_marks(comm, [int(fine), *digest], marks, _AGREE)
    if bool((everyone[:, 0] == 1).all()) and bool((everyone == everyone[0]).all()):
        if metadata is not None:
            check_marks(metadata, found)
        return
    agree(comm, problem)
    files = [] if metadata is None else [part.sha256 for part in metadata.parts]
    copies = comm.all_gather_object([os.fspath(root), files])
    rank = next(k for k, row in enumerate(everyone) if not torch.equal(row, everyone[0]))
    if copies[rank][1] == copies[0][1]:
        raise PartitionError(
            f"The halo plan of '{copies[rank][0]}' at rank {rank} is not that of "
            f"'{copies[0][0]}' at rank 0: one was altered; copy the parts again or partition the "
            "graph anew"
        )
    raise PartitionError(
        f"'{copies[rank][0]}' at rank {rank} is another partition than "
        f"'{copies[0][0]}' at rank 0; copy the folder of one pyg_sar.write_partitions() to "
        "all hosts"
    )


def agree(comm: Communicator, problem: str) -> None:
    """Raises on every worker what any worker met, so that none waits for one that is gone."""
    problems = comm.all_gather_object(problem)
    distinct = {text: rank for rank, text in reversed(list(enumerate(problems))) if text}
    lines = [f"rank {rank}: {text}" for text, rank in sorted(distinct.items(), key=lambda i: i[1])]
    if len(distinct) == 1 and problems.count(*distinct) > 1:
        lines = [*distinct]
    if lines:
        raise PartitionError("; ".join(lines))
