"""The tensors of one part of a graph, and the whole graph back from all parts.

Tensors of part :math:`p`, with :math:`n_p` nodes, :math:`H_p` halo rows, :math:`E_p` edges and
:math:`P` parts (all int64 but the attributes and what is marked):

===============  =============  ==========================================================
name             shape          content
===============  =============  ==========================================================
n_id             [n_p]          global ids of its nodes, ascending
halo_n_id        [H_p]          global ids of the remote sources of its edges, by (owner, id)
halo_counts      [P]            halo rows per owner
send_index       [sum]          its rows that peers need, by peer, in that peer's halo order (int32)
send_counts      [P]            how many rows each peer needs
covers           [H_p]          bit k: does the cover at ``cover_costs[k]`` pull the row? (uint8)
cover_costs      [K, 2]         what pulled and pushed rows cost in each of K covers (int32)
cover_edges      [1]            edges from other parts
edge_index       [2, E_p]       edges whose target it owns: sources are local (< n_p) or
                                n_p + position in halo_n_id, targets local
e_id             [E_p]          global edge ids (columns of the whole graph's edge_index)
node.NAME        [n_p, ...]     node-level attributes (see ``attributes.py``)
edge.NAME        [E_p, ...]     edge-level attributes
graph.NAME       [...]          graph-level tensors, whole in every part
===============  =============  ==========================================================

Edges of part p are sorted by (round of the source's owner q, target, source, e_id), where the round
is (q - p) mod P. Covers are those of ``cover.py``. Versions 3 to 5 sorted by units of several
owners, and held them; version 3 had no covers; versions 1 and 2 sorted by (owner, target, source,
e_id), and their ``send_index`` was int64.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import to_edge_index, to_torch_coo_tensor, to_torch_csr_tensor

from pyg_sar.exchange.cover import stored_covers
from pyg_sar.partition.attributes import (
    Attribute,
    Column,
    concatenate_rows,
    decode,
    select_rows,
    tensor_names,
)
from pyg_sar.partition.partitioners import Layout, whole_number
from pyg_sar.partition.sparse_matrix import check_compressed

PartTensors = dict[str, Tensor]


def check_graph(data: Data) -> tuple[Tensor, int]:
    """Checks ``data`` and returns its edges (int64, on the CPU) and number of nodes.

    Raises:
        TypeError: When ``data`` is not a homogeneous ``Data``.
        ValueError: When its edges can't be used.
    """
    if isinstance(data, HeteroData) or not isinstance(data, Data):
        raise TypeError(
            "Expected 'data' to be a torch_geometric.data.Data or HeteroData "
            f"(got {type(data).__name__})"
        )
    x = data.get("x")
    # PyG infers the number of nodes from dense features only.
    known = isinstance(x, SparseTensor) and "num_nodes" not in data
    num_nodes = x.size(0) if known else data.num_nodes
    if num_nodes is None:
        raise ValueError("'data' does not tell its number of nodes; set data.num_nodes")
    num_nodes = whole_number("data.num_nodes", num_nodes)
    edge_index = edges_of(data)
    if edge_index.numel() > 0:
        low, high = int(edge_index.min()), int(edge_index.max())
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"Expected 'edge_index' to hold node ids 0 to {num_nodes - 1} (got {low} to "
                f"{high}); correct it or set data.num_nodes"
            )
    return edge_index, num_nodes


_ADJACENCY = "the edges, as "


def with_edges(data: Any) -> Any:
    """``data`` with an ``edge_index`` where it has its edges as ``adj_t`` (``ToSparseTensor``).

    Of the adjacency only its type is kept: :func:`load_partition` puts the distributed
    ``edge_index`` in its place, which layers take for it.

    Raises:
        ValueError: When ``adj_t`` holds weights: layers would no longer see these.
    """
    adjacency = data.get("adj_t") if isinstance(data, Data) else None
    if adjacency is None or data.get("edge_index") is not None:
        return data
    if isinstance(adjacency, SparseTensor):
        target, source, values = adjacency.coo()
        form = "SparseTensor"
    elif isinstance(adjacency, Tensor) and adjacency.layout in (torch.sparse_csr, torch.sparse_coo):
        check_compressed(adjacency)
        (target, source), values = to_edge_index(adjacency)
        form = str(adjacency.layout)
    else:
        return data
    if values is not None and not bool((values == 1).all()):
        raise ValueError(
            "'adj_t' holds weights, which layers read from it; set data.edge_weight and "
            "data.edge_index (torch_geometric.utils.to_edge_index), delete data.adj_t and hand the "
            "weights to the layers"
        )
    data, nodes = copy.copy(data), data.num_nodes
    data.edge_index, data.num_nodes = torch.stack([source, target]), nodes
    data.adj_t = f"{_ADJACENCY}{form}"
    return data


def restore_adjacency(data: Data, whole: bool) -> None:
    """Puts ``adj_t`` back: the edges themselves, or of the ``whole`` graph as it was."""
    form = data.get("adj_t")
    if not isinstance(form, str) or not form.startswith(_ADJACENCY):
        return
    data.adj_t = data.edge_index
    if whole:
        source, target = data.edge_index
        size = (data.num_nodes, data.num_nodes)
        if form.endswith("SparseTensor"):
            data.adj_t = SparseTensor(row=target, col=source, sparse_sizes=size)
        else:
            make = to_torch_csr_tensor if form.endswith("csr") else to_torch_coo_tensor
            data.adj_t = make(torch.stack([target, source]), size=size)
        del data.edge_index


def edges_of(data: Any) -> Tensor:
    """``edge_index`` of a ``Data`` or an edge store, int64, on the CPU.

    Raises:
        ValueError: When it is not one.
    """
    edge_index = data.get("edge_index")
    if edge_index is None:
        if data.get("adj_t") is not None or data.get("adj") is not None:
            raise ValueError(
                "'data' holds its edges in another form; partition it before ToSparseTensor, "
                "or set data.edge_index by torch_geometric.utils.to_edge_index"
            )
        return torch.empty(2, 0, dtype=torch.long)
    if hasattr(edge_index, "as_tensor"):
        edge_index = edge_index.as_tensor()  # PyG's EdgeIndex.
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"Expected 'edge_index' to be a tensor (got {type(edge_index).__name__}); "
            "convert it with torch.as_tensor"
        )
    dtype = edge_index.dtype
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"Expected 'edge_index' to hold integers (got dtype {dtype}); convert it with .long()"
        )
    if edge_index.layout != torch.strided:
        raise ValueError(
            f"Expected 'edge_index' of shape [2, num_edges] (got a matrix in {edge_index.layout}); "
            "convert it with torch_geometric.utils.to_edge_index"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' of shape [2, num_edges] (got {list(edge_index.shape)})"
        )
    return edge_index.detach().cpu().long()


def part_tensors(
    edge_index: Tensor, layout: Layout, columns: dict[str, Column], p: int
) -> PartTensors:
    """The tensors of part ``p``, by their names in its file."""
    n_id = layout.nodes(p)
    tensors = {"n_id": n_id.clone(), **relation_tensors(edge_index, layout, p)}
    tensors |= attribute_tensors(columns, {"node": n_id, "edge": tensors["e_id"]}, tensors)
    return tensors


def relation_tensors(edge_index: Tensor, layout: Layout, p: int) -> PartTensors:
    """The edges into part ``p``, their ids, its halo, and what others need of it."""
    halo = layout.halos[p]
    sends = [layout.send_rows(p, q) for q in range(layout.num_parts)]
    local_edges, e_id = _part_edges(edge_index, layout, p)
    source, target = local_edges
    row = source - layout.nodes(p).numel()
    cut = row >= 0
    covers = stored_covers(row[cut], target[cut], layout.halo_offsets[p].tolist())
    return {
        "halo_n_id": layout.node_order[halo],
        "halo_counts": layout.halo_counts(p),
        "send_index": torch.cat(sends).int(),
        "send_counts": torch.tensor([rows.numel() for rows in sends]),
        "covers": covers.pulled,
        "cover_costs": torch.tensor(covers.costs, dtype=torch.int32).view(-1, 2),
        "cover_edges": torch.tensor([covers.num_edges]),
        "edge_index": local_edges,
        "e_id": e_id,
    }


def attribute_tensors(
    columns: dict[str, Column], ids: dict[str, Tensor], taken: Container[str] = ()
) -> PartTensors:
    """The attributes' tensors for the rows ``ids`` of each level, by their names in a file.

    Args:
        columns: The attributes of the whole graph.
        ids: Rows of the levels of which a part holds some rows only.
        taken: Names that are in use.
    """
    tensors: PartTensors = {}
    for name, column in columns.items():
        rows = column.tensors
        if column.attribute.level in ids:
            rows = select_rows(column.attribute, rows, ids[column.attribute.level])
        for suffix, full_name in tensor_names(name, column.attribute).items():
            if full_name in tensors or full_name in taken:
                raise ValueError(
                    f"Two attributes would be stored as '{full_name}'; rename '{name}'"
                )
            tensors[full_name] = rows[suffix].clone(memory_format=torch.contiguous_format)
    return tensors


def _part_edges(edge_index: Tensor, layout: Layout, p: int) -> tuple[Tensor, Tensor]:
    """The edges of part ``p`` in its index space, and their global ids, in the file's order."""
    e_id, halo = layout.edges(p), layout.halos[p]
    low, high = int(layout.node_offsets[p]), int(layout.node_offsets[p + 1])
    source = edge_index[0, e_id]
    rank, owner = layout.node_rank[source], layout.part[source]
    targets = layout.target_offsets[p : p + 2].tolist()
    target = layout.target_rank[edge_index[1, e_id]] - targets[0]
    # Stable sorts, the last key first; ids ascend already. By rank is by (owner, source).
    unit = (owner.long() - p) % layout.num_parts
    order = rank.sort(stable=True).indices
    order = order[(unit * max(targets[1] - targets[0], 1) + target)[order].sort(stable=True)[1]]
    rank, target = rank[order], target[order]
    local = (rank >= low) & (rank < high)
    source = torch.where(local, rank - low, torch.searchsorted(halo, rank) + (high - low))
    return torch.stack([source, target]), e_id[order]


def decode_attributes(
    attributes: dict[str, Attribute], values: dict[str, Any], tensors: PartTensors
) -> dict[str, Any]:
    """The attributes of a part as ``Data`` held them, ``{name: value}``, for the part's rows.

    Args:
        attributes: How each is stored.
        values: The graph-level plain values.
        tensors: The part's tensors.
    """
    decoded = {}
    for name, attribute in attributes.items():
        names = tensor_names(name, attribute)
        rows = {suffix: tensors[full_name] for suffix, full_name in names.items()}
        decoded[name] = decode(attribute, rows, values.get(name))
    return decoded


def merge_parts(
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    num_nodes: int,
    parts: list[PartTensors],
) -> Data:
    """The whole graph from the tensors of all parts, nodes and edges in their old order."""
    place = {
        "node": torch.cat([part["n_id"] for part in parts]).argsort(),
        "edge": torch.cat([part["e_id"] for part in parts]).argsort(),
    }
    edges = [torch.cat([part["n_id"], part["halo_n_id"]])[part["edge_index"]] for part in parts]
    data = Data(
        edge_index=torch.cat(edges, dim=1)[:, place["edge"]],
        num_nodes=num_nodes,
        **merged_attributes(attributes, values, place, parts),
    )
    restore_adjacency(data, whole=True)
    return data


def merged_attributes(
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    place: dict[str, Tensor],
    parts: list[PartTensors],
) -> dict[str, Any]:
    """The whole graph's attributes; ``place`` sorts the joined rows of a level."""
    whole = dict(parts[0])
    for name, attribute in attributes.items():
        if attribute.level not in place:
            continue
        names = tensor_names(name, attribute)
        rows = [{suffix: part[full] for suffix, full in names.items()} for part in parts]
        joined = concatenate_rows(attribute, rows)
        joined = select_rows(attribute, joined, place[attribute.level])
        whole.update((names[suffix], tensor) for suffix, tensor in joined.items())
    return decode_attributes(attributes, values, whole)
