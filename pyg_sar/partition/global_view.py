"""The whole graph of a part's tensors: attributes, edges, and lists of node ids."""

from __future__ import annotations

import hashlib
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import WITH_TORCH_SPARSE

from pyg_sar.comm.devices import other_states, random_states, set_other_states, set_random_states
from pyg_sar.comm.group import Communicator
from pyg_sar.errors import PartitionError
from pyg_sar.exchange.cover import StoredCovers
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.ledger import Label
from pyg_sar.partition.assignment import OF_TORCH_SPARSE, adjacency_form
from pyg_sar.partition.attributes import Attribute
from pyg_sar.partition.metadata import PartitionMetadata
from pyg_sar.partition.parts import as_batch, decode_attributes, put_list, put_store
from pyg_sar.partition.schema import NodeList, PartTensors, RowGroup, StoreInfo, without_prefix
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


def random_digest(device: torch.device) -> bytes:
    """Returns 32 bytes that tell the states of this worker's generators from others."""
    found = hashlib.sha256()
    for state in (*random_states(device), other_states()):
        found.update(state.cpu().numpy().tobytes())
    return found.digest()


def share_random_states(comm: Communicator, src: int = 0) -> None:
    """Gives all workers the states of one's generators: PyTorch's, NumPy's and Python's.
    Collective.

    PyTorch's are the CPU's and, where workers compute on GPUs, the GPU's. Splits are often drawn by
    ``numpy.random.permutation``.
    """
    mine = [state.to(comm.device) for state in (*random_states(comm.device), other_states())]
    *states, others = [comm.broadcast(state, src, label=STATES).cpu() for state in mine]
    set_random_states(states, comm.device)
    set_other_states(others)


def whole_graph(
    comm: Communicator,
    metadata: PartitionMetadata,
    tensors: PartTensors,
    device: torch.device,
    keep: bool = True,
) -> Data | HeteroData:
    """Returns the graph, in tensors of which this worker holds the rows of its part.

    ``keep``: parameters with a row per node, and edges made of plain ids, lie as these nodes do.
    """
    data: Data | HeteroData = HeteroData() if metadata.hetero else Data()
    layouts: dict[str, Rows] = {}
    for info in metadata.stores:
        found = _store(comm, info, tensors, device, layouts)
        if keep and "node" in info.totals:
            comm.layouts.setdefault(info.totals["node"], layouts[info.ends[0]])
        if not metadata.hetero:
            _put_adjacency(found, info.values)
            first = filter(found.__contains__, _FIRST)
            found = {name: found[name] for name in dict.fromkeys([*first, *found])}
        put_store(data, info, found)
    return as_batch(data, metadata.batched)


def _store(
    comm: Communicator,
    info: StoreInfo,
    tensors: PartTensors,
    device: torch.device,
    layouts: dict[str, Rows],
) -> dict[str, Any]:
    """Returns the attributes of a store; puts the layout of its nodes into ``layouts``."""
    own = without_prefix(tensors, info.prefix)
    found: dict[str, Any] = {}
    rows: dict[str, Rows] = {}
    source, target = info.ends
    if "node" in info.totals:
        total = info.totals["node"]
        rows["node"] = layouts[source] = node_rows(comm, own["n_id"].to(device), total)
    if "edge" in info.totals:
        rows["edge"] = node_rows(comm, own["e_id"].to(device), info.totals["edge"])
        found["edge_index"] = _edges(own, layouts[source], layouts[target], rows["edge"])
    found |= _attributes(info.attributes, info.values, own, device, rows)
    for listed, group in zip(info.lists, info.list_groups(), strict=True):
        _put_list(found, listed, group, tensors, layouts[source], layouts[target])
    if "node" in info.totals and "x" not in found:
        found["num_nodes"] = info.totals["node"]
    return found


def _attributes(
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    tensors: PartTensors,
    device: torch.device,
    rows: dict[str, Rows],
) -> dict[str, Any]:
    """Returns attributes as ``Data`` holds them, in tensors of the whole graph.

    ``rows`` are the layouts of the levels whose rows are split among parts.
    """
    found = decode_attributes(attributes, values, tensors)
    for name, value in found.items():
        if attributes[name].level in rows:
            found[name] = _tensor(name, value, attributes[name], rows[attributes[name].level])
        elif hasattr(value, "to"):
            found[name] = value.to(device)
    return found


def _tensor(name: str, value: Any, attribute: Attribute, rows: Rows) -> NodeTensor:
    """Returns an attribute's rows of this worker as a dense tensor of the whole graph."""
    if isinstance(value, Tensor):
        value = value if value.layout == torch.strided else value.to_dense()
        found = wrap(value.to(rows.ids.device), rows, attribute.dim)
        found.mark = crc32(name.encode())
        return found.strided((1, found.size(0))) if attribute.form == "column_major" else found
    raise PartitionError(
        f"'{name}' ({attribute.form}, a row per {attribute.level}) can't be "
        f"a tensor of the whole graph (rank {rows.comm.rank}): make it a tensor "
        "before write_partitions(), or leave it out"
    )


def _edges(tensors: PartTensors, sources: Rows, targets: Rows, edges: Rows) -> NodeTensor:
    """Returns edges, or pairs of a list, whose tensors these are."""
    device, same = edges.ids.device, sources is targets
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


def _put_list(
    store: dict[str, Any],
    info: NodeList,
    group: RowGroup,
    tensors: PartTensors,
    sources: Rows,
    targets: Rows,
) -> None:
    """Puts a list of node ids, by global ids, and the attributes with a row per entry."""
    own = without_prefix(tensors, group.prefix)
    rows = node_rows(sources.comm, own["place"].to(sources.ids.device), group.total)
    if group.kind == "links":
        ids: Tensor = _edges(own, sources, targets, rows)
    else:
        local = own["ids"].to(sources.ids.device).long()
        ids = wrap(sources.ids[local].to(getattr(torch, info.attribute.dtype)), rows, 0)
    put_list(store, info, ids)
    store |= _attributes(info.rows, {}, own, rows.ids.device, {"row": rows})


def _put_adjacency(found: dict[str, Any], values: dict[str, Any]) -> None:
    """Puts ``adj_t`` in the place of the edges and weights where the graph had it."""
    form = adjacency_form(values)
    if form is None:
        return
    index, weight = found.pop("edge_index"), found.pop("edge_weight") if form[1] else None
    if WITH_TORCH_SPARSE and form[0] == OF_TORCH_SPARSE:
        found["adj_t"] = edges_matrix(index, weight)
    else:
        coo = form[0] == str(torch.sparse_coo)
        layout = torch.sparse_coo if coo else torch.sparse_csr
        found["adj_t"] = adjacency(index, weight, layout)
