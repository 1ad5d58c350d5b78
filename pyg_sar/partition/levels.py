"""Levels of a ``Data``'s attributes: whether their rows are nodes or edges, or they have none.

[Note: levels] PyG tells by the number of rows. Where a graph has as many edges as nodes (rings, one
neighbour each, parent pointers), it takes rows for edges if the name has 'edge' in it, and for
nodes otherwise: ``weight`` too. So what neither the name nor the caller tells is asked here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.partition.attributes import (
    NODE_NAMES,
    Column,
    encode_all,
    is_sparse,
    named_attributes,
    rows_of,
)
from pyg_sar.wording import counted

SURELY_NODES = (*NODE_NAMES, "y", "z", "batch", "normal")
"""Names of node-level attributes that PyG documents; others may have a row per edge as well."""
LEVELS = ("node", "edge", "graph")


def encode_attributes(
    data: Data, num_nodes: int, levels: Mapping[str, str] | None = None
) -> dict[str, Column]:
    """Encodes every attribute of ``data``, of ``num_nodes`` nodes, but its edges and size.

    ``levels`` are those that the caller says (:func:`level_of`). What can't be told is refused.
    """
    data = fresh(data)
    data.num_nodes, num_edges = num_nodes, data.num_edges

    def level(name: str, value: Any) -> str:
        return _asked_level(data, name, value, num_nodes, num_edges, levels)

    counts = {"node": num_nodes, "edge": num_edges}
    return encode_all(data.to_dict(), level, counts, "the graph")


def check_levels(levels: Mapping[str, str] | None, names: Collection[str]) -> None:
    """Raises ``TypeError`` or ``ValueError`` where ``levels`` is no dict of attributes' levels."""
    if not isinstance(levels or {}, Mapping):
        raise TypeError(f"Expected 'levels' to be a dict {{name: level}} (got {levels!r})")
    for name, level in (levels or {}).items():
        if level not in LEVELS:
            raise ValueError(
                f"Expected levels[{name!r}] to be 'node', 'edge' or 'graph' (got {level!r})"
            )
        if name not in names:
            raise ValueError(f"'levels' names {name!r}, which 'data' does not have")


def level_of(
    data: Data,
    name: str,
    value: Any,
    num_nodes: int,
    num_edges: int,
    levels: Mapping[str, str] | None = None,
) -> str:
    """Returns ``'node'``, ``'edge'`` or ``'graph'``: what an attribute's rows are.

    It is what ``levels`` says, else what PyG takes them for (``data.is_node_attr``,
    ``data.is_edge_attr``); sparse matrices go by their number of rows.
    """
    if levels and name in levels:
        count = {"node": num_nodes, "edge": num_edges}.get(levels[name])
        if count is not None and rows_of(name, value) != count:
            raise ValueError(
                f"levels[{name!r}] is {levels[name]!r}, but it has "
                f"{counted(rows_of(name, value), 'rows')} instead of {count}"
            )
        return levels[name]
    return _level_by_rows(data, name, value, num_nodes, num_edges)


def _asked_level(
    data: Data,
    name: str,
    value: Any,
    num_nodes: int,
    num_edges: int,
    levels: Mapping[str, str] | None,
) -> str:
    """Returns the level; raises where rows could be nodes or edges, and nothing tells which."""
    level = level_of(data, name, value, num_nodes, num_edges, levels)
    told = name in (levels or {}) or name in SURELY_NODES
    told = told or "node" in name or name.endswith("_mask")
    if level == "node" and num_nodes == num_edges and not told:
        raise ValueError(
            f"The attribute '{name}' has {counted(num_nodes, 'rows')}, and the graph has as many "
            f"edges as nodes: rename it to 'edge_{name}' or 'node_{name}', or pass "
            f"levels={{'{name}': 'edge'}} or levels={{'{name}': 'node'}} to write_partitions() "
            f"(--levels {name}=edge)"
        )
    return level


def fresh(data: Data) -> Data:
    """Returns a copy without PyG's cache of levels, which may be stale, or a batch's sizes."""
    data = copy.copy(data)
    vars(data._store).pop("_num_nodes", None)  # to_dict() would list it among the attributes.
    return data


def levels_of(data: Data, levels: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the levels of all attributes of a graph by name."""
    data = fresh(data)
    sizes = data.num_nodes, data.num_edges
    return {
        name: _asked_level(data, name, value, *sizes, levels)
        for name, value in named_attributes(data.to_dict())
    }


def _level_by_rows(data: Data, name: str, value: Any, num_nodes: int, num_edges: int) -> str:
    if is_sparse(value):
        rows = value.size(0)
        if "adj" in name or rows not in (num_nodes, num_edges):
            raise ValueError(
                f"The sparse attribute '{name}' of shape [{value.size(0)}, {value.size(1)}] "
                f"has no row per node ({num_nodes}) or edge ({num_edges}); keep edges in "
                f"'edge_index', and delete '{name}'"
            )
        edge = rows == num_edges and (num_nodes != num_edges or "edge" in name)
        return "edge" if edge else "node"
    if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
        return "graph"
    if num_nodes == num_edges == rows_of(name, value) and "edge" in name:
        return "edge"  # PyG takes lists for nodes, whatever their name.
    if data.is_node_attr(name):
        return "node"
    return "edge" if data.is_edge_attr(name) else "graph"
