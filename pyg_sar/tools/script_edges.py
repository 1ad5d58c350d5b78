"""Edges that a script makes itself: they are distributed on their way into a layer.

[Note: made edges] Layers run on the edges of a partition. An ``edge_index`` that a script has
computed (``dropout_edge``, ``k_hop_subgraph``, ``cat``) has none. It is gathered, and partitioned
with the owners of the nodes that the layer gets; edge tensors beside it have their rows in its
order, so they fit. This takes the time of a partition for each new one: the script is told so.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.tensors import Edges, NodeTensor, Rows, edge_tensor, whole
from pyg_sar.tensors.rows import written
from pyg_sar.tools.script_graphs import Graphs

_KEPT = 16  # the most edge indices that are remembered


class MadeEdges:
    """Edges that the script has made, at one rank.

    Args:
        graphs: What partitions them.
    """

    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self._layouts: dict[int, Rows] = {}
        self._kept: OrderedDict[Any, tuple[Tensor, int | Tensor, Tensor]] = OrderedDict()

    def in_call(self, layer: Any, args: Any, kwargs: Any) -> dict[int, Tensor]:
        """Returns distributed edges for those of a call that the script has made, by identity.

        Args:
            layer: The layer.
            args: What it is called with.
            kwargs: The same by name.
        """
        made = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and _is_made(t)]
        found = {id(t): self.distributed(layer, t, args, kwargs) for t in made}
        return {key: edges for key, edges in found.items() if edges is not None}

    def distributed(self, layer: Any, made: Tensor, args: Any, kwargs: Any) -> Tensor | None:
        """Returns distributed edges for those that the script has made. Collective.

        Args:
            layer: The layer that gets them.
            made: Its ``edge_index`` ``[2, E]``.
            args: All that it is called with.
            kwargs: The same by name.

        Returns:
            ``None`` where it is not known how many nodes there are.
        """
        ends = _ends(layer, args, kwargs)
        if ends is None:
            return None
        sizes = [end if isinstance(end, int) else end.size(0) for end in ends]
        key = id(made), tuple(sizes)
        if key in self._kept and _is_as_before(made, self._kept[key][1]):
            self._kept.move_to_end(key)
            return self._kept[key][2]
        owners = [self._owners(end, size) for end, size in zip(ends, sizes, strict=True)]
        edge_index = whole(made.detach(), "an 'edge_index' that the script has made")
        if len(ends) == 1:
            graph: Any = Data(edge_index=edge_index, num_nodes=sizes[0])
            loaded = self.graphs.share_made(graph, owners[0])
            found = loaded.edge_index
        else:
            graph = HeteroData()
            graph["source"].num_nodes, graph["target"].num_nodes = sizes
            graph["source", "to", "target"].edge_index = edge_index
            named = zip(("source", "target"), owners, strict=True)
            known = {name: owner for name, owner in named if owner is not None}
            loaded = self.graphs.share_made(graph, known if len(known) == 2 else None)
            found = loaded["source", "to", "target"].edge_index
        found = self._on(found, ends)
        state = written(made) if isinstance(made, NodeTensor) else made.detach().clone()
        self._kept[key] = made, state, found
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return found

    def _on(self, found: NodeTensor, ends: list[Any]) -> NodeTensor:
        """Returns edges between rows of the layouts that the layer gets, or that others have."""
        joined = []
        for rows, end in zip((found.edges.sources, found.edges.targets), ends * 2, strict=False):
            known = self._layouts.setdefault(rows.total, rows)
            if isinstance(end, NodeTensor) and end.axis == 0:
                known = end.rows
            joined.append(known if known.same(rows) else rows)
        return edge_tensor(Edges(found.edges.index, *joined), found.rows)

    def _owners(self, end: Any, size: int) -> Tensor | None:
        if not isinstance(end, NodeTensor) or end.axis != 0:
            known = self.graphs.owners.get(size)
            return known if isinstance(known, Tensor) else None
        rows = end.rows
        owner = torch.empty(size, dtype=torch.long)
        for rank, ids in enumerate(rows.gathered_ids(rows.ids)):
            owner[ids] = rank
        return owner


def _is_as_before(made: Tensor, state: int | Tensor) -> bool:
    """Returns whether a tensor was not written since, through ``.data`` or NumPy either."""
    return torch.equal(made, state) if isinstance(state, Tensor) else written(made) == state


def _is_made(value: Tensor) -> bool:
    pair = value.dim() == 2 and value.size(0) == 2 and value.dtype == torch.long
    if isinstance(value, NodeTensor):
        return pair and value.edges is None and value.axis == 1
    return pair and value.layout == torch.strided


def _ends(layer: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """Returns the tensors of source and target nodes, or how many there are; one if they agree."""
    x = args[0] if args and not _is_graph(args[0]) else kwargs.get("x")
    if x is None and isinstance(getattr(layer, "in_channels_l", None), int):
        return [layer.in_channels_l]  # RGCNConv: a parameter's row for each node
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, tuple | list) and len(x) == 2:
        size = kwargs.get("size")
        target = x[1] if x[1] is not None or size is None else size[1]
        return None if x[0] is None or target is None else [x[0], target]
    return None


def _is_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and _is_made(value)
