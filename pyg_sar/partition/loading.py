"""``load_partition``: this worker's part of the graph as a PyG ``Data`` or ``HeteroData``.

[Note: transforms] A transform gets a part's tensors and takes them for the whole graph's: most
would centre, normalise or draw over this worker's nodes, and nobody would notice. All of PyG's copy
what they get before they change it (``BaseTransform.__call__``), so the copy is where they can be
told from other code, without touching PyG: ``__copy__`` looks who called it. Those known to give
the whole graph's numbers pass, all others are refused by name.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform

from pyg_sar.comm.devices import check_gpu, count_gpus, device_of
from pyg_sar.comm.group import Communicator, Label, current
from pyg_sar.errors import DistributedIndexError, PartitionError
from pyg_sar.exchange.cover import StoredCovers
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.files import check_path
from pyg_sar.partition.assignment import restore_adjacency
from pyg_sar.partition.attributes import Attribute, tensor_names
from pyg_sar.partition.global_view import draw_alike, whole_graph
from pyg_sar.partition.metadata import PartitionMetadata, read_metadata
from pyg_sar.partition.node_lists import PLACE, NodeList, Space, kind_of
from pyg_sar.partition.part_checks import check_marks, num_marks, part_marks
from pyg_sar.partition.parts import (
    decode_attributes,
    decode_list,
    decode_rows,
    list_tensors,
    put_list,
)
from pyg_sar.partition.storage import part_attributes, read_part
from pyg_sar.partition.whole_graph import HeteroSchema, set_attributes, store_tensors
from pyg_sar.space.graph_index import dist_batch, whole_batch
from pyg_sar.space.index_space import dist_edge_index
from pyg_sar.space.pyg_calls import library_frames, public_name

_BOUNDED = (
    lambda t: not t.norm or t.max is not None,
    "norm=True takes the largest value of all edges: say norm=False, or max_value=...",
)

RIGHT: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            "AddRemainingSelfLoops", "AddSelfLoops", "Compose", "Constant", "GCNNorm",
            "LinearTransformation", "LocalCartesian", "LocalDegreeProfile", "MaskToIndex",
            "OneHotDegree", "PointPairFeatures", "RemoveSelfLoops", "RemoveTrainingClasses",
            "ToDevice",
        ),
        (lambda t: True, ""),
    ),
    **dict.fromkeys(("Cartesian", "Distance", "Polar", "Spherical", "TargetIndegree"), _BOUNDED),
    "IndexToMask": (
        lambda t: t.sizes is None,
        "'sizes' are the whole graph's: leave them out",
    ),
}  # fmt: skip
"""Transforms that give a part the whole graph's numbers, on what condition, and what to do."""

INSTEAD = {"SIGN": "pyg_sar.propagate_features(parts, K) computes it on workers"}
"""Calls that take the place of other transforms."""


class PartData(Data):
    """A worker's part of a graph: a ``Data``. See [Note: transforms]."""

    def __copy__(self) -> PartData:
        check_transform()
        copied: PartData = super().__copy__()
        return copied


class PartHeteroData(HeteroData):
    """A worker's part of a heterogeneous graph: a ``HeteroData``. See [Note: transforms]."""

    def __copy__(self) -> PartHeteroData:
        check_transform()
        copied: PartHeteroData = super().__copy__()
        return copied


def check_transform() -> None:
    """Raises where a transform copies a part of which it would take too much or too little.

    Raises:
        DistributedIndexError: Naming the transform, and the remedy.
    """
    for frame in library_frames():
        transform = frame.f_locals.get("self")
        if not isinstance(transform, BaseTransform):
            continue
        kind = type(transform)
        allowed, hint = lambda t: False, ""
        if kind.__module__.startswith("torch_geometric."):
            allowed, hint = RIGHT.get(kind.__name__, (allowed, INSTEAD.get(kind.__name__, "")))
        elif kind.forward is not BaseTransform.forward:
            hint = "If it changes each node by itself, call its forward(data)"
        if allowed(transform):
            return
        raise DistributedIndexError(
            f"'{public_name(kind.__module__, kind.__name__)}' on one worker's part of a "
            "distributed graph would take its nodes for all nodes, and give other numbers. Apply "
            f"it to the whole graph, before write_partitions(){'. ' if hint else ''}{hint}"
        )


_AGREE: Label = ("", "", "agreement")


def load_partition(
    root: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    verify: bool = True,
    view: Literal["local", "global"] = "global",
) -> Data | HeteroData:
    """Loads a partitioned graph, of which this worker holds its part.

    The result is a PyG ``Data`` with tensors of the whole graph
    (:class:`~pyg_sar.tensors.NodeTensor`): code that is written for one process computes its
    numbers. All workers draw random numbers alike: their generators take the state of rank 0's
    here, and must be seeded alike from then on.

    With ``view='local'`` it has this worker's rows of every attribute, the distributed
    ``edge_index``, and global ids ``n_id`` (of its nodes) and ``e_id`` (of its edges). A node-level
    ``batch`` (graph ids) becomes a :class:`~pyg_sar.space.DistBatch`, into which all workers
    scatter together. Of a heterogeneous graph it is a ``HeteroData`` that has these for each node
    type and relation, also for those of which this worker holds nothing. Only this worker's file is
    read.
    Lists of node ids (``train_idx``) hold this worker's nodes, by local ids, and pairs of them
    (``edge_label_index``) are a distributed ``edge_index`` of its own: ``NAME_place`` says where
    their entries stood in the whole list (see :func:`~pyg_sar.partition.storage.write_partitions`).
    PyG's transforms that would give it other numbers than the whole graph are refused by name.
    Where the graph had its edges as ``adj_t`` (``ToSparseTensor``), ``data.adj_t`` is the same
    distributed ``edge_index``, which layers take like the one.

    The halo plan is part of the file: the workers exchange a digest, to see that their parts belong
    together, and nothing else.

    Args:
        root: The folder that :func:`write_partitions` wrote.
        device: Where the tensors go: this worker's device (``comm.device``), which is the default.
            A single process on the CPU may choose any.
        verify: Compare the file's checksum.
        view: ``'global'``, as above, or ``'local'``: this worker's rows, in its own numbering,
            for ``distribute(model, view='local')``.

    Returns:
        ``data``. With ``view='local'`` its ``num_nodes`` and ``num_edges`` are this worker's.

    Raises:
        ValueError: When ``view`` is none of these, or is ``'global'`` on workers that are threads;
            when ``device`` isn't there, or is another one than that of one of several workers, or
            of a single one that computes on a GPU.
        PartitionError: On every worker alike, when any worker can't read its part, or the number
            of parts is not the number of workers.
    """
    comm = current()
    if view not in ("local", "global"):
        raise ValueError(f"Expected 'view' to be 'local' or 'global' (got {view!r})")
    check_path("root", root)
    place = _place(device, comm)
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
    if view == "global":
        torch.compiler.set_stance("force_eager")  # Graphs of it would lose node tensors' gradients.
        draw_alike(comm)
    _warn_of_global_ids(metadata, tensors)
    if view == "global":
        return whole_graph(comm, metadata, tensors, place)
    if metadata.hetero is not None:
        return _as_hetero_data(comm, metadata, metadata.hetero, tensors, place)
    return _as_data(comm, metadata, tensors, place)


def _place(device: torch.device | str | None, comm: Communicator) -> torch.device:
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


def _warn_of_global_ids(metadata: PartitionMetadata, tensors: dict[str, Tensor]) -> None:
    """Warns of node ids that older versions kept as they were: the whole graph's, on every part."""
    if metadata.version >= 5:
        return
    whole = Space("the graph", metadata.num_nodes, metadata.num_nodes)
    stores = [(whole, metadata.attributes, tensors)]
    if metadata.hetero is not None:
        sizes = {info.name[0]: info.count for info in metadata.hetero.types}
        for kind, infos in (
            ("type", metadata.hetero.types),
            ("relation", metadata.hetero.relations),
        ):
            for k, info in enumerate(infos):
                space = Space(f"{info.name}", sizes[info.name[0]], sizes[info.name[-1]])
                stores.append((space, info.attributes, store_tensors(tensors, kind, k)))
    for space, attributes, rows in stores:
        for name, attribute in attributes.items():
            if attribute.layout == "dense" and _may_hold_ids(name, rows, attribute, space):
                warnings.warn(
                    f"'{name}' of {space.owner} may hold node ids, and the partition "
                    f"'{metadata.root}' (format version {metadata.version}) keeps the whole "
                    "graph's: on this part they name other nodes. Partition the graph anew",
                    stacklevel=3,
                )


def _may_hold_ids(
    name: str, tensors: dict[str, Tensor], attribute: Attribute, space: Space
) -> bool:
    """Returns True where an attribute would be split, or refused, when it is written today."""
    try:
        value = tensors[tensor_names(name, attribute)[""]]
        return kind_of(name, value, attribute.level, space, None) != ""
    except ValueError:
        return True


def _covers(tensors: dict[str, Tensor]) -> StoredCovers | None:
    if "covers" not in tensors:
        return None
    costs = tuple((int(pull), int(push)) for pull, push in tensors["cover_costs"].tolist())
    return StoredCovers(tensors["covers"], costs, int(tensors["cover_edges"]))


def _digest(metadata: PartitionMetadata) -> bytes:
    """Returns 32 bytes that tell this partition from others."""
    return hashlib.sha256("".join(part.sha256 for part in metadata.parts).encode()).digest()


def _check_together(
    comm: Communicator,
    root: str | os.PathLike[str],
    metadata: PartitionMetadata | None,
    tensors: dict[str, Tensor],
    problem: str,
) -> None:
    """Raises on all workers where one met a problem, or where their parts don't belong together."""
    fine = metadata is not None and not problem
    digest = _digest(metadata) if metadata is not None and fine else bytes(32)
    marks = torch.zeros(num_marks(comm.world_size), dtype=torch.long)
    if metadata is not None and fine:
        marks = part_marks(metadata, tensors)
    mine = torch.tensor([int(fine), *digest], dtype=torch.uint8)
    mine = torch.cat([mine, marks.view(torch.uint8)]).to(comm.device)
    everyone = torch.stack(comm.all_gather(mine, label=_AGREE)).cpu()
    everyone, found = (
        everyone[:, : mine.numel() - 8 * marks.numel()],
        everyone[:, 1 + len(digest) :],
    )
    if bool((everyone[:, 0] == 1).all()) and bool((everyone == everyone[0]).all()):
        if metadata is not None:
            check_marks(metadata, found.reshape(-1).clone().view(torch.long).view(len(found), -1))
        return
    _agree(comm, problem)
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


def _agree(comm: Communicator, problem: str) -> None:
    """Raises on every worker what any worker met, so that none waits for one that is gone."""
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
    n_id = tensors["n_id"].to(device)
    plan = _plan(comm, n_id.numel(), tensors, device, n_id)
    data: Data = PartData(**part_attributes(metadata, tensors))
    data = data.to(device)
    data.n_id, data.e_id = n_id, tensors["e_id"].to(device)
    data.num_nodes = plan.num_local
    edge_index = dist_edge_index(tensors["edge_index"].to(device), plan)
    data.edge_index = edge_index.ordered(data.e_id)
    _put_lists(comm, data, metadata.lists, tensors, data.n_id, None)
    restore_adjacency(data, whole=False)
    kind = metadata.attributes.get("batch")
    if kind is not None and (kind.level, kind.dtype, len(kind.shape)) == ("node", "int64", 1):
        graphs, ids = metadata.num_graphs, data.batch
        data.batch = dist_batch(ids) if graphs is None else whole_batch(ids, graphs, comm)
    return data


def _plan(
    comm: Communicator,
    num_local: int,
    tensors: dict[str, Tensor],
    device: torch.device,
    n_id: Tensor | None = None,
) -> HaloPlan:
    return HaloPlan(
        comm,
        num_local,
        tensors["halo_counts"].tolist(),
        tensors["send_index"].to(device),
        tensors["send_counts"].tolist(),
        n_id,
        _covers(tensors),
    )


def _as_hetero_data(
    comm: Communicator,
    metadata: PartitionMetadata,
    schema: HeteroSchema,
    tensors: dict[str, Tensor],
    device: torch.device,
) -> HeteroData:
    data: HeteroData = PartHeteroData()
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
        store.edge_index = rows["edge_index"]  # The first one, as in PyG's own graphs.
        set_attributes(store, decode_attributes(info.attributes, info.values, rows))
        store.e_id = rows["e_id"]
    data = data.to(device)
    for k, info in enumerate(schema.types):
        rows, store = store_tensors(tensors, "type", k), data[info.name[0]]
        _put_lists(comm, store, info.lists, rows, store.n_id, None)
    for k, info in enumerate(schema.relations):
        rows, store = store_tensors(tensors, "relation", k), data[info.name]
        source, _, target = info.name
        plan = _plan(comm, data[source].num_nodes, rows, device)
        targets = None if source == target else data[target].num_nodes
        edge_index = dist_edge_index(store.edge_index, plan, targets=targets)
        store.edge_index = edge_index.ordered(store.e_id)
        _put_lists(comm, store, info.lists, rows, data[source].n_id, targets)
    return data


def _put_lists(
    comm: Communicator,
    store: Any,
    lists: Sequence[NodeList],
    tensors: dict[str, Tensor],
    n_id: Tensor,
    targets: int | None,
) -> None:
    """Sets lists of node ids, their places, and the attributes with a row per entry.

    Args:
        comm: The workers.
        store: Where they go.
        lists: What they are.
        tensors: Those of the part, node type or relation.
        n_id: Global ids of the (source) nodes.
        targets: The number of this worker's targets where they are of another type.
    """
    device = n_id.device
    for k, info in enumerate(lists):
        rows = list_tensors(tensors, k)
        place = rows["place"].to(device)
        if info.kind == "links":
            known = n_id if targets is None else None
            plan = _plan(comm, n_id.numel(), rows, device, known)
            edges = dist_edge_index(rows["edge_index"].to(device), plan, targets=targets)
            value: Any = edges.ordered(place)
        else:
            value = decode_list(info, rows["ids"].to(device))
        put_list(store, info.name, info.key, value)
        put_list(store, f"{info.name}{PLACE}", info.key, place)
        for name, found in decode_rows(info, rows).items():
            store[name] = found.to(device) if isinstance(found, Tensor) else found
