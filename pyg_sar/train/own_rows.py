"""This worker's rows of what a training looks at: targets, splits, edges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.tensors import NodeTensor, Rows, rows_at, whole


def own_rows(data: Data, target: str, splits: Iterable[str]) -> Data:
    """Returns a part with this worker's rows of targets and splits, its edges, and global ids.

    Args:
        data: What :func:`pyg_sar.load_partition` gave, or a graph in one process, which is returned
            as it is.
        target: The attribute that holds the targets.
        splits: Those that hold masks, or lists of rows.

    Raises:
        ValueError: When the targets are those of the whole graph, and its nodes are not known.
    """
    tensors = [value for value in data.to_dict().values() if isinstance(value, NodeTensor)]
    if not tensors:
        return data
    own, index = Data(), data.get("edge_index")
    nodes: Rows | None = None
    if isinstance(index, NodeTensor) and index.edges is not None:
        nodes = index.edges.targets
        own.edge_index, own.e_id = index.to_local(), index.rows.ids
    nodes = nodes or next((t.rows for t in tensors if t.rows.total == data.num_nodes), None)
    values = data.get(target)
    rows = values.rows if isinstance(values, NodeTensor) else nodes
    if nodes is None or rows is None:
        raise ValueError(f"data.{target} has rows of which it is not known where they lie")
    own.n_id, own.num_nodes = nodes.ids, nodes.count
    own[f"{target}_index_place"] = rows.ids
    for name in (target, *splits):
        if isinstance(value := data.get(name), Tensor) and value.dim():
            own[name] = _rows_of(value, rows, name != target)
        elif value is not None:
            own[name] = value
    return own


def _rows_of(value: Any, rows: Rows, lists: bool) -> Tensor:
    """Returns this worker's rows of a tensor, or the numbers of those that a list names."""
    if lists and value.dtype == torch.long and value.dim() == 1:
        local = rows.local(rows.checked(whole(value, "a list of rows")))
        return local[local >= 0]
    if not isinstance(value, NodeTensor) and value.size(0) != rows.total:
        return value.detach()  # What is wrong with it is said where targets are found.
    return rows_at(value, rows, 0).detach()
