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

from pyg_sar.partition.attributes import NODE_NAMES, is_sparse, named_attributes, rows_of
from pyg_sar.usage import LEVELS
from pyg_sar.wording import counted

SURELY_NODES = (*NODE_NAMES, "y", "z", "batch", "normal")
"""Names of node-level attributes that PyG documents; others may have a row per edge as well."""


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


class Levels:
    """Says of a graph's attributes what their rows are: ``'node'``, ``'edge'`` or ``'graph'``.

    ``said`` are the levels that the caller says; ``data`` is a copy without PyG's cache of levels,
    which may be stale, or a batch's sizes.
    """

    def __init__(
        self, data: Data, num_nodes: int | None = None, said: Mapping[str, str] | None = None
    ) -> None:
        self.data, self._said = copy.copy(data), said or {}
        vars(self.data._store).pop("_num_nodes", None)  # to_dict() would list it as an attribute.
        if num_nodes is not None:
            self.data.num_nodes = num_nodes
        self.counts = {"node": int(self.data.num_nodes or 0), "edge": self.data.num_edges}

    def of(self, name: str, value: Any) -> str:
        """Returns an attribute's level.

        It is what the caller says, else what PyG takes its rows for (``data.is_node_attr``,
        ``data.is_edge_attr``); sparse matrices go by their number of rows.
        """
        if name in self._said:
            level, rows = self._said[name], rows_of(name, value)
            if rows != self.counts.get(level, rows):
                raise ValueError(
                    f"levels[{name!r}] is {level!r}, but it has {counted(rows, 'rows')} instead of "
                    f"{self.counts[level]}"
                )
            return level
        num_nodes, num_edges = self.counts.values()
        if is_sparse(value):
            rows = value.size(0)
            if "adj" in name or rows not in (num_nodes, num_edges):
                why = f"has no row per node ({num_nodes}) or edge ({num_edges})"
                if "adj" in name:
                    why = "is an adjacency matrix by its name, and edges are those of 'edge_index'"
                raise ValueError(
                    f"The sparse attribute '{name}' of shape [{value.size(0)}, {value.size(1)}] "
                    f"{why}; keep edges in 'edge_index', and delete '{name}'"
                )
            edge = rows == num_edges and (num_nodes != num_edges or "edge" in name)
            return "edge" if edge else "node"
        if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
            return "graph"
        if num_nodes == num_edges == rows_of(name, value) and "edge" in name:
            return "edge"  # PyG takes lists for nodes, whatever their name.
        if self.data.is_node_attr(name):
            return "node"
        return "edge" if self.data.is_edge_attr(name) else "graph"

    def told(self, name: str, value: Any) -> str:
        """Returns the level; raises where rows could be nodes or edges, and nothing tells which."""
        level = self.of(name, value)
        known = name in self._said or name in SURELY_NODES
        known = known or "node" in name or name.endswith("_mask")
        if level == "node" and self.counts["node"] == self.counts["edge"] and not known:
            raise ValueError(
                f"The attribute '{name}' has {counted(self.counts['node'], 'rows')}, and the graph "
                f"has as many edges as nodes: rename it to 'edge_{name}' or 'node_{name}', or pass "
                f"levels={{'{name}': 'edge'}} or levels={{'{name}': 'node'}} to write_partitions() "
                f"(--levels {name}=edge)"
            )
        return level


def levels_of(data: Data, said: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the levels of all attributes of a graph by name."""
    levels = Levels(data, None, said)
    attributes = named_attributes(levels.data.to_dict())
    return {name: levels.told(name, value) for name, value in attributes}
