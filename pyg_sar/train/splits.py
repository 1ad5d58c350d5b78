"""Which labelled nodes of a ``Data`` belong to which split."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

__all__ = ["SPLITS", "node_labels", "split_nodes"]

SPLITS: tuple[str, ...] = ("train", "val", "test")


def split_nodes(data: Data, column: int = 0) -> dict[str, Tensor]:
    """The labelled nodes of each split.

    Args:
        data: With ``y`` (-1: no label), ``train_mask``, and ``val_mask``, ``test_mask`` where there
            are such nodes.
        column: Which split of two-dimensional masks.

    Returns:
        Node indices int64 for each of :data:`SPLITS`.

    Raises:
        ValueError: When labels or ``train_mask`` are missing or a mask has another shape or type.
    """
    labelled = node_labels(data) >= 0
    return {split: (_mask(data, split, column) & labelled).nonzero().view(-1) for split in SPLITS}


def node_labels(data: Data) -> Tensor:
    """``data.y`` as int64 ``[num_nodes]``.

    Raises:
        ValueError: When it is missing or does not hold one class per node.
    """
    labels = data.get("y")
    if not isinstance(labels, Tensor):
        raise ValueError("data.y is missing: node classification needs a label per node (-1: none)")
    if labels.dim() == 2 and labels.size(1) == 1:
        labels = labels.view(-1)
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            "Expected 'data.y' to hold one integer class per node, shape [num_nodes] or "
            f"[num_nodes, 1] (got {labels.dtype} {list(labels.shape)})"
        )
    return labels.long()


def _mask(data: Data, split: str, column: int) -> Tensor:
    name = f"{split}_mask"
    mask = data.get(name)
    if not isinstance(mask, Tensor):
        if split != "train":
            return torch.zeros(data.y.size(0), dtype=torch.bool, device=data.y.device)
        raise ValueError(
            "data.train_mask is missing: training needs to know which nodes' labels to use "
            "(torch_geometric.transforms.RandomNodeSplit makes masks)"
        )
    if mask.dtype != torch.bool or mask.dim() not in (1, 2) or len(mask) != data.y.size(0):
        raise ValueError(
            f"Expected 'data.{name}' to be bool of shape [{data.y.size(0)}] or "
            f"[{data.y.size(0)}, num_splits] (got {mask.dtype} {list(mask.shape)})"
        )
    if mask.dim() == 2:
        if column >= mask.size(1):
            raise ValueError(f"split {column}: data.{name} has {mask.size(1)} splits")
        mask = mask[:, column]
    return mask
