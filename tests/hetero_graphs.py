"""Small heterogeneous graphs that the tests share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

SIZES = {"author": 13, "paper": 21, "venue": 4, "loner": 3}
WIDTHS = {"author": 5, "paper": 6, "venue": 3, "loner": 2}
EDGES = {
    ("author", "writes", "paper"): 50,
    ("paper", "written_by", "author"): 50,
    ("paper", "cites", "paper"): 60,
    ("paper", "in", "venue"): 21,
    ("author", "knows", "author"): 17,
    ("venue", "invites", "author"): 0,
}
"""Bipartite and same-type relations, one without edges; no relation has the last node type."""


def make_hetero(
    seed: int = 0, dtype: torch.dtype = torch.float64, loner: bool = True
) -> HeteroData:
    """A graph of several node types with duplicates, loops and nodes without edges.

    Args:
        seed: Seed of everything random.
        dtype: Of features, edge weights and edge attributes.
        loner: Have a node type that no relation has.
    """
    draw = torch.Generator().manual_seed(seed)
    data = HeteroData()
    for name, count in SIZES.items():
        if name == "loner" and not loner:
            continue
        data[name].x = torch.randn(count, WIDTHS[name], generator=draw, dtype=dtype)
        data[name].y = torch.randint(3, (count,), generator=draw)
        data[name].train_mask = torch.rand(count, generator=draw) < 0.6
    for (source, relation, target), count in EDGES.items():
        edges = torch.stack(
            [
                torch.randint(max(SIZES[source] - 1, 1), (count,), generator=draw),
                torch.randint(max(SIZES[target] - 1, 1), (count,), generator=draw),
            ]
        )
        store = data[source, relation, target]
        store.edge_index = torch.cat([edges, edges[:, :3]], dim=1)
        count = store.edge_index.size(1)
        store.edge_weight = torch.rand(count, generator=draw, dtype=dtype) + 0.1
        store.edge_attr = torch.randn(count, 2, generator=draw, dtype=dtype)
    return data


def random_parts(data: HeteroData, world: int, seed: int = 0) -> dict[str, Tensor]:
    """An assignment that leaves types, relations and the last of several parts empty here or there.

    Venues are all on worker 0, papers not on the last worker.
    """
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name in data.node_types:
        most = {"venue": 1, "paper": max(world - 1, 1)}.get(name, world)
        found[name] = torch.randint(most, (data[name].num_nodes,), generator=draw)
    return found
