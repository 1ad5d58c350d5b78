"""The whole graph of a part's tensors: attributes, edges, and lists of node ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import WITH_TORCH_SPARSE

from pyg_sar.comm.devices import random_states, set_random_states
from pyg_sar.comm.group import Communicator
from pyg_sar.errors import PartitionError
from pyg_sar.exchange.cover import StoredCovers
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.ledger import Label
from pyg_sar.partition.assignment import OF_TORCH_SPARSE, adjacency_of
from pyg_sar.partition.attributes import Attribute
from pyg_sar.partition.metadata import PartitionMetadata
from pyg_sar.partition.node_lists import NodeList
from pyg_sar.partition.parts import (
    PartTensors,
    decode_attributes,
    decode_rows,
    list_tensors,
    put_list,
)
from pyg_sar.partition.whole_graph import HeteroSchema, set_attributes, store_tensors
from pyg_sar.space.index_space import dist_edge_index
from pyg_sar.tensors import (
    Edges,
    NodeTensor,
    Rows,
    adjacency,
    edge_tensor,
    edges_matrix,
    node_rows,
    wrap,
)

STATES: Label = ("", "", "random states")
"""The ledger's label of random states."""

_FIRST = ("x", "edge_index", "edge_attr", "y", "pos", "time")  # As ``Data`` itself orders them.


def draw_alike(comm: Communicator) -> None:
    """Gives all workers' generators of random numbers the state of rank 0's. Collective.

    NumPy's and Python's too: splits are often drawn by ``numpy.random.permutation``.
    """
    if comm.world_size > 1:
        share_random_states(comm)


def share_random_states(comm: Communicator) -> None:
    """Gives all workers the states of rank 0's generators: PyTorch's, NumPy's and Python's.

    PyTorch's are the CPU's and, where workers compute on GPUs, the GPU's.

    Args:
        comm: The communicator. All workers call this together.
    """
    mine = [state.to(comm.device) for state in random_states(comm.device)]
    states = [comm.broadcast(state, label=STATES).cpu() for state in mine]
    set_random_states(states, comm.device)
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    others = [[str(name), np.asarray(keys).tolist(), *rest], [version, list(numbers), gauss]]
    numpy_state, (version, numbers, gauss) = comm.broadcast_object(others, label=STATES)
    np.random.set_state(tuple(numpy_state))
    random.setstate((version, tuple(numbers), gauss))


def whole_graph(
    comm: Communicator, metadata: PartitionMetadata, tensors: PartTensors, device: torch.device
) -> Data | HeteroData:
    """Returns the graph, in tensors of which this worker holds the rows of its part.

    Args:
        comm: The workers.
        metadata: What is known of the whole graph.
        tensors: Those of this worker's part.
        device: Where they go.

    Raises:
        PartitionError: An attribute with a row per node, edge or entry is no tensor.
    """
    if metadata.hetero is not None:
        return _hetero_graph(comm, metadata, metadata.hetero, tensors, device)
    nodes = _layout(comm, tensors["n_id"].to(device), metadata.num_nodes)
    edges = node_rows(comm, tensors["e_id"].to(device), metadata.num_edges)
    found = _attributes(metadata.attributes, metadata.values, tensors, device, nodes, edges)
    found["edge_index"] = _edges(tensors, nodes, nodes, edges)
    found |= _lists(metadata.lists, tensors, nodes, nodes)
    _put_adjacency(found, metadata.values)
    if "x" not in found:
        found["num_nodes"] = metadata.num_nodes
    data = Data()
    for name in [*filter(found.__contains__, _FIRST), *(n for n in found if n not in _FIRST)]:
        data[name] = found[name]
    return data


def _hetero_graph(
    comm: Communicator,
    metadata: PartitionMetadata,
    schema: HeteroSchema,
    tensors: PartTensors,
    device: torch.device,
) -> HeteroData:
    data = HeteroData()
    found = _attributes(metadata.attributes, metadata.values, tensors, device)
    set_attributes(data._global_store, found)
    layouts: dict[str, Rows] = {}
    for k, info in enumerate(schema.types):
        (name,) = info.name
        own = store_tensors(tensors, "type", k)
        nodes = layouts[name] = _layout(comm, own["n_id"].to(device), info.count)
        found = _attributes(info.attributes, info.values, own, device, nodes)
        set_attributes(data[name], found | _lists(info.lists, own, nodes, nodes))
        if "x" not in found:
            data[name].num_nodes = info.count
    for k, info in enumerate(schema.relations):
        own = store_tensors(tensors, "relation", k)
        sources, targets = layouts[info.name[0]], layouts[info.name[-1]]
        edges = node_rows(comm, own["e_id"].to(device), info.count)
        found = {"edge_index": _edges(own, sources, targets, edges)}  # First, as in PyG's graphs.
        found |= _attributes(info.attributes, info.values, own, device, None, edges)
        set_attributes(data[info.name], found | _lists(info.lists, own, sources, targets))
    return data


def _layout(comm: Communicator, ids: Tensor, total: int) -> Rows:
    """Returns the layout of a graph's nodes, or of those of a type."""
    nodes = node_rows(comm, ids, total)
    comm.layouts.setdefault(total, nodes)
    return nodes


def _attributes(
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    tensors: PartTensors,
    device: torch.device,
    nodes: Rows | None = None,
    edges: Rows | None = None,
) -> dict[str, Any]:
    """Returns attributes as ``Data`` holds them, in tensors of the whole graph."""
    found = decode_attributes(attributes, values, tensors)
    for name, value in found.items():
        rows = {"node": nodes, "edge": edges}.get(attributes[name].level)
        if rows is not None:
            found[name] = _tensor(name, value, attributes[name], rows)
        elif hasattr(value, "to"):
            found[name] = value.to(device)
    return found


def _tensor(name: str, value: Any, attribute: Attribute, rows: Rows) -> NodeTensor:
    """Returns an attribute's rows of this worker as a dense tensor of the whole graph."""
    if isinstance(value, Tensor):
        value = value if value.layout == torch.strided else value.to_dense()
        return wrap(value.to(rows.ids.device), rows, attribute.dim)
    raise PartitionError(
        f"'{name}' ({attribute.form}, a row per {attribute.level}) can't be "
        f"a tensor of the whole graph (rank {rows.comm.rank}): make it a tensor "
        "before write_partitions(), or leave it out"
    )


def _edges(tensors: PartTensors, sources: Rows, targets: Rows, edges: Rows) -> NodeTensor:
    """Returns edges, or pairs of a list, whose tensors these are."""
    device, same, covers = edges.ids.device, sources is targets, None
    if "covers" in tensors:
        costs = tuple((int(pull), int(push)) for pull, push in tensors["cover_costs"].tolist())
        covers = StoredCovers(tensors["covers"], costs, int(tensors["cover_edges"]))
    plan = HaloPlan(
        edges.comm,
        sources.count,
        tensors["halo_counts"].tolist(),
        tensors["send_index"].to(device),
        tensors["send_counts"].tolist(),
        sources.ids if same else None,
        covers,
    )
    local = tensors["edge_index"].to(device)
    index = dist_edge_index(local, plan, targets=None if same else targets.count)
    return edge_tensor(Edges(index.ordered(edges.ids), sources, targets), edges)


def _lists(
    lists: Sequence[NodeList], tensors: PartTensors, sources: Rows, targets: Rows
) -> dict[str, Any]:
    """Returns lists of node ids, by global ids, and the attributes with a row per entry."""
    found: dict[str, Any] = {}
    for k, info in enumerate(lists):
        own = list_tensors(tensors, k)
        rows = node_rows(sources.comm, own["place"].to(sources.ids.device), info.count)
        if info.kind == "links":
            ids: Tensor = _edges(own, sources, targets, rows)
        else:
            local = own["ids"].to(sources.ids.device).long()
            ids = sources.ids[local].to(getattr(torch, info.attribute.dtype))
            ids = wrap(ids, rows, 0)
        put_list(found, info.name, info.key, ids)
        for name, value in decode_rows(info, own).items():
            found[name] = _tensor(name, value, info.rows[name], rows)
    return found


def _put_adjacency(found: dict[str, Any], values: dict[str, Any]) -> None:
    """Puts ``adj_t`` in the place of the edges and weights where the graph had it."""
    form = adjacency_of(values)
    if form is None:
        return
    index, weight = found.pop("edge_index"), found.pop("edge_weight") if form[1] else None
    if WITH_TORCH_SPARSE and str(values["adj_t"]).endswith(OF_TORCH_SPARSE):
        found["adj_t"] = edges_matrix(index, weight)
    else:
        found["adj_t"] = adjacency(index, weight, form[0])
