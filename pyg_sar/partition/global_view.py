"""A part as the whole graph: its attributes as tensors of the whole graph."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import WITH_TORCH_SPARSE

from pyg_sar.comm.devices import random_states, set_random_states
from pyg_sar.comm.group import Communicator
from pyg_sar.errors import PartitionError
from pyg_sar.ledger import Label
from pyg_sar.partition.assignment import OF_TORCH_SPARSE, adjacency_of
from pyg_sar.partition.attributes import Attribute
from pyg_sar.partition.metadata import PartitionMetadata
from pyg_sar.partition.node_lists import PLACE, NodeList
from pyg_sar.partition.parts import put_list
from pyg_sar.space.distributed_index import DistEdgeIndex
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

    Raises:
        ValueError: When workers are threads that draw from one generator.
    """
    if comm.backend == "threads" and comm.host is None and comm.world_size > 1:
        raise ValueError(
            "data of the whole graph needs workers that each have a generator of random numbers, "
            f"and threads share PyTorch's (rank {comm.rank}): start processes, launch(fn, W), or "
            "parts of one process, launch(fn, 1, parts=P)"
        )
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


def global_data(local: Data, metadata: PartitionMetadata, comm: Communicator) -> Data:
    """Returns a part as a ``Data`` of the whole graph, of which this worker holds its rows.

    Args:
        local: The part, as :func:`~pyg_sar.partition.loading.load_partition` gives it.
        metadata: What is known of the whole graph.
        comm: The workers.
    """
    nodes = node_rows(comm, local.n_id, metadata.num_nodes)
    comm.layouts.setdefault(nodes.total, nodes)
    edges = node_rows(comm, local.e_id, metadata.num_edges)
    data = Data()
    for name, value in local.to_dict().items():
        data[name] = value
    _take_rows(data, metadata.attributes, nodes, edges)
    _take_lists(data, metadata.lists, nodes, nodes, comm)
    index = edge_tensor(Edges(local.edge_index, nodes, nodes), edges)
    for name in ("edge_index", "adj_t"):
        if isinstance(data.get(name), DistEdgeIndex):
            data[name] = index
    found = adjacency_of(metadata.values)
    if found is not None:
        form, weighted = found
        weight = data.edge_weight if weighted else None
        if WITH_TORCH_SPARSE and str(metadata.values["adj_t"]).endswith(OF_TORCH_SPARSE):
            data.adj_t = edges_matrix(index, weight)
        else:
            data.adj_t = adjacency(index, weight, form)
        del data.edge_index
        if weighted:
            del data.edge_weight
    del data.n_id, data.e_id, data.num_nodes
    if "x" not in data:
        data.num_nodes = metadata.num_nodes
    out = Data()
    names = list(data.to_dict())
    for name in [*filter(names.__contains__, _FIRST), *(n for n in names if n not in _FIRST)]:
        out[name] = data[name]
    return out


def global_hetero_data(
    local: HeteroData, metadata: PartitionMetadata, comm: Communicator
) -> HeteroData:
    """Returns a part as a ``HeteroData`` of the whole graph. See :func:`global_data`."""
    schema = metadata.hetero
    assert schema is not None
    data = HeteroData()
    for name, value in local._global_store.items():
        setattr(data, name, value)
    layouts: dict[str, Rows] = {}
    for info in schema.types:
        (name,) = info.name
        layouts[name] = node_rows(comm, local[name].n_id, info.count)
        comm.layouts.setdefault(info.count, layouts[name])
        for key, value in local[name].items():
            data[name][key] = value
        _take_rows(data[name], info.attributes, layouts[name], None)
        _take_lists(data[name], info.lists, layouts[name], layouts[name], comm)
        del data[name].n_id, data[name].num_nodes
        if "x" not in data[name]:
            data[name].num_nodes = info.count
    for info in schema.relations:
        store, there = local[info.name], data[info.name]
        sources, targets = layouts[info.name[0]], layouts[info.name[-1]]
        edges = node_rows(comm, store.e_id, info.count)
        for key, value in store.items():
            there[key] = value
        _take_rows(there, info.attributes, None, edges)
        _take_lists(there, info.lists, sources, targets, comm)
        there.edge_index = edge_tensor(Edges(store.edge_index, sources, targets), edges)
        del there.e_id
    return data


def _take_rows(
    store: Any, attributes: Mapping[str, Attribute], nodes: Rows | None, edges: Rows | None
) -> None:
    """Turns attributes with a row per node, or edge, into tensors of the whole graph."""
    for name, attribute in attributes.items():
        rows = {"node": nodes, "edge": edges}.get(attribute.level)
        value = store.get(name)
        if rows is not None and value is not None and not isinstance(value, DistEdgeIndex):
            store[name] = _tensor(name, value, attribute, rows)


def _tensor(name: str, value: Any, attribute: Attribute, rows: Rows) -> NodeTensor:
    """Returns an attribute's rows of this worker as a dense tensor of the whole graph."""
    if isinstance(value, Tensor):
        value = value if value.layout == torch.strided else value.to_dense()
        return wrap(value.as_subclass(Tensor), rows, attribute.dim)
    raise PartitionError(
        f"'{name}' ({attribute.form}, a row per {attribute.level}) can't be "
        f"a tensor of the whole graph (rank {rows.comm.rank}): make it a tensor "
        "before write_partitions(), or leave it out"
    )


def _take_lists(
    store: Any, lists: Sequence[NodeList], sources: Rows, targets: Rows, comm: Communicator
) -> None:
    """Turns lists of node ids into lists of the whole graph, by global ids."""
    for info in lists:
        place_name = f"{info.name}{PLACE}"
        value, place = store[info.name], store[place_name]
        if info.key is not None:
            value, place = value[info.key], place[info.key]
        rows = node_rows(comm, place, info.count)
        if isinstance(value, DistEdgeIndex):
            ids: Tensor = edge_tensor(Edges(value, sources, targets), rows)
        else:
            ids = sources.ids[torch.as_tensor(value).long()]
            ids = wrap(ids.to(getattr(torch, info.attribute.dtype)), rows, 0)
        put_list(store, info.name, info.key, ids)
        for name, attribute in info.rows.items():
            store[name] = _tensor(name, store[name], attribute, rows)
    for info in lists:
        if store.get(f"{info.name}{PLACE}") is not None:
            del store[f"{info.name}{PLACE}"]
