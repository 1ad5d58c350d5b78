"""Small graphs that the training tests share."""

from __future__ import annotations

import torch
from torch_geometric.data import Data

FEATURES, CLASSES = 12, 4


def small_graph(
    num_nodes: int = 90, *, dtype: torch.dtype = torch.float32, splits: int = 0
) -> Data:
    """A directed random graph with loops, duplicates, unlabelled nodes and planted classes.

    With ``splits`` the masks have that many columns.
    """
    generator = torch.Generator().manual_seed(7)
    y = torch.randint(0, CLASSES, (num_nodes,), generator=generator)
    x = torch.randn(num_nodes, FEATURES, generator=generator, dtype=dtype)
    x = x + 2 * torch.nn.functional.one_hot(y, FEATURES)
    edge_index = torch.randint(0, num_nodes, (2, 6 * num_nodes), generator=generator)
    draw = torch.rand(num_nodes, max(splits, 1), generator=generator)
    masks = [draw < 0.5, (draw >= 0.5) & (draw < 0.75), draw >= 0.75]
    if not splits:
        masks = [mask.view(-1) for mask in masks]
    y[::10] = -1
    return Data(
        x=x,
        y=y,
        edge_index=edge_index,
        edge_weight=torch.rand(edge_index.size(1), generator=generator, dtype=dtype),
        train_mask=masks[0],
        val_mask=masks[1],
        test_mask=masks[2],
    )
