"""Targets, the rows of each split, and labels as inputs.

[Note: labels as inputs] Masked label prediction (Shi et al., IJCAI 2021; PyG's ``MaskLabel``): in
each step some training nodes, drawn anew, show the model their labels, and the loss is that of the
others. A node's number is a function of its global id and of the step: it is the same for any
number of workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.space.draws import keyed_numbers
from pyg_sar.wording import counted

SPLITS: tuple[str, ...] = ("train", "val", "test")

MASKS: dict[str, str] = {split: f"{split}_mask" for split in SPLITS}
"""Attributes that hold the splits of nodes."""

_LISTS = "_index_place"  # The end of the name of a list's places in the whole graph.


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The targets of one graph, of this worker.

    Attributes:
        values: A row for each row that the model returns, ``[n, *]``; classes as int64 ``[n]``.
        index: The rows of each split that count, int64.
        ids: Where these rows are in the whole graph's order, int64 ``[n]``, if that is known.
    """

    values: Tensor
    index: dict[str, Tensor]
    ids: Tensor | None

    def select(self, split: str) -> Tensor:
        """Returns the targets of a split."""
        return self.values[self.index[split]]


def find_targets(
    data: Data,
    name: str = "y",
    *,
    splits: Mapping[str, str] | None = None,
    column: int = 0,
    of_classes: bool = True,
    probabilities: bool = False,
    whole: str | None = None,
) -> Targets:
    """Finds the targets in a graph's data, and the rows of each split.

    Args:
        data: This worker's part, or the whole graph.
        name: The attribute that holds the targets.
        splits: The attribute of each split: a mask, bool ``[n]`` or ``[n, num_splits]``, or a list
            of rows, int64 ``[K]``. By default ``train_mask``, ``val_mask`` and ``test_mask`` for
            ``y``; all rows of other targets are for training.
        column: Which split of two-dimensional masks.
        of_classes: Integer targets are classes, -1 where there is none.
        probabilities: Targets may also be floating point: probabilities of the classes.
        whole: The split that all rows belong to, in place of ``splits``.

    Raises:
        ValueError: When targets or the training rows are missing, have another shape or type, or
            hold NaN.
    """
    values = data.get(name)
    if not isinstance(values, Tensor) or values.dim() == 0:
        raise _missing(name, values)
    of_classes = of_classes and not (probabilities and values.is_floating_point())
    if of_classes:
        values = node_labels(data, name)
    if whole is None and splits is None:
        splits, whole = (MASKS, None) if name == "y" else ({}, "train")
    if whole is None:
        masks = splits or {}
        of_train, *others = (_dim(data, masks.get(split, "")) for split in SPLITS)
        if column and of_train == 1 and 2 not in others:
            raise ValueError(
                f"split {column}: data.{masks.get('train')} has one dimension, so the graph has "
                "one split; leave the split out"
            )
        index = {s: _rows(data, masks.get(s), s, column, values, name) for s in SPLITS}
    else:
        counts = {split: len(values) if split == whole else 0 for split in SPLITS}
        index = {s: torch.arange(n, device=values.device) for s, n in counts.items()}
    if of_classes:
        index = {split: rows[values[rows] >= 0] for split, rows in index.items()}
    for split, rows in index.items():
        missing = int(values[rows].isnan().view(len(rows), -1).any(1).sum()) if len(rows) else 0
        if missing:
            raise ValueError(
                f"data.{name} holds NaN in {missing} of the {len(rows)} {split} rows: leave rows "
                "without a target out of the split"
            )
    return Targets(values=values, index=index, ids=_ids(data, name, len(values)))


def node_labels(data: Data, name: str = "y") -> Tensor:
    """Returns ``data.y`` as int64 ``[num_nodes]``.

    Raises:
        ValueError: When it is missing or does not hold one class per node.
    """
    labels = data.get(name)
    if not isinstance(labels, Tensor):
        raise _missing(name, labels)
    if labels.dim() == 2 and labels.size(1) == 1:
        labels = labels.view(-1)
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"Expected 'data.{name}' to hold one integer class per node, shape [num_nodes] or "
            f"[num_nodes, 1] (got {labels.dtype} {list(labels.shape)}); for other targets give the "
            "Trainer a loss, such as loss=torch.nn.BCEWithLogitsLoss()"
        )
    return labels.long()


def _missing(name: str, found: Any) -> ValueError:
    what = "node classification needs a label per node (-1: none)" if name == "y" else "the target"
    state = "is missing" if found is None else f"is a {type(found).__name__}, no tensor of numbers"
    return ValueError(f"data.{name} {state}: {what}")


def _dim(data: Data, name: str) -> int:
    value = data.get(name)
    return value.dim() if isinstance(value, Tensor) else 0


def _rows(
    data: Data, mask_name: str | None, split: str, column: int, values: Tensor, target: str
) -> Tensor:
    """Returns the rows of a split, from its mask or list."""
    rows = None if mask_name is None else data.get(mask_name)
    if not isinstance(rows, Tensor):
        if split != "train" and mask_name in (None, MASKS[split]):
            return torch.empty(0, dtype=torch.long, device=values.device)
        raise ValueError(
            f"data.{mask_name or MASKS[split]} is missing: training needs to know which rows of "
            f"data.{target} to use (torch_geometric.transforms.RandomNodeSplit makes masks)"
        )
    if rows.dtype == torch.long and rows.dim() == 1:
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(values):
            raise ValueError(
                f"data.{mask_name} holds rows {int(rows.min())} to {int(rows.max())}, "
                f"data.{target} has {len(values)}"
            )
        if len(rows.unique()) < len(rows):
            raise ValueError(
                f"data.{mask_name} lists {counted(len(rows.unique()), 'rows')} in {len(rows)} "
                f"numbers: give each once; if it is a mask, data.{mask_name}.bool()"
            )
        return rows
    if target == "y" and rows.dtype == torch.bool and len(rows) == data.num_nodes != len(values):
        raise ValueError(
            f"Expected 'data.y' to have a row for each of {counted(len(rows), 'nodes')}, as "
            f"data.{mask_name} has (got {len(values)}); a node without a label has y=-1"
        )
    if rows.dtype != torch.bool or rows.dim() not in (1, 2) or len(rows) != len(values):
        raise ValueError(
            f"Expected 'data.{mask_name}' to be bool of shape [{len(values)}] or "
            f"[{len(values)}, num_splits] (got {rows.dtype} {list(rows.shape)})"
        )
    if rows.dim() == 2:
        if column >= rows.size(1):
            raise ValueError(f"split {column}: data.{mask_name} has {rows.size(1)} splits")
        rows = rows[:, column]
    return rows.nonzero().view(-1)


def _ids(data: Any, name: str, rows: int) -> Tensor | None:
    """Returns where the rows are in the whole graph's order; ``None`` where nothing tells."""
    edges = name.startswith("edge")
    candidates = (f"{name}{_LISTS}", "e_id") if edges else ("n_id", f"{name}{_LISTS}")
    for candidate in candidates:
        ids = data.get(candidate)
        if isinstance(ids, Tensor) and tuple(ids.shape) == (rows,):
            return ids
    return None


# Labels as inputs #############################################################


def ratio_mask(mask: Tensor, ratio: float, n_id: Tensor, key: int) -> Tensor:
    """Keeps a random share of a mask, the same nodes for any number of workers.

    It is ``MaskLabel.ratio_mask`` whose random numbers belong to the nodes, where workers that draw
    their own would split otherwise for each number of workers. Nothing is sent.

    Args:
        mask: This worker's nodes, bool ``[num_nodes]``.
        ratio: The share that stays ``True``.
        n_id: Global ids of the nodes, ``data.n_id``; ``torch.arange(num_nodes)`` in one process.
        key: Which draw: the epoch, say. The same key draws the same nodes.

    Returns:
        Bool ``[num_nodes]``.

    Raises:
        ValueError: When the mask is not bool, or the ratio no share.
    """
    if mask.dtype != torch.bool or mask.shape != n_id.shape:
        raise ValueError(
            "Expected 'mask' to be bool with a value for each of the "
            f"{counted(len(n_id), 'nodes')} of 'n_id' (got {mask.dtype} {list(mask.shape)})"
        )
    if not 0 <= ratio <= 1:
        raise ValueError(f"Expected 'ratio' to be in [0, 1] (got {ratio!r})")
    out = mask.clone()
    out[mask] = keyed_numbers(n_id[mask].to(mask.device), key) < ratio
    return out


def with_labels(x: Tensor, y: Tensor, shown: Tensor, num_classes: int) -> Tensor:
    """Puts the labels of some nodes as one-hot columns behind the features.

    Args:
        x: Features ``[num_nodes, F]``.
        y: Labels, integers ``[num_nodes]``; those that aren't shown may be anything.
        shown: Which nodes show theirs, bool ``[num_nodes]``; the columns of others are 0.
        num_classes: The columns.

    Returns:
        ``[num_nodes, F + num_classes]``, as ``pyg-sar train --labels`` gives it to its model.

    Raises:
        ValueError: When a shown label is no class, or ``shown`` no mask.
    """
    if y.is_floating_point() or shown.dtype != torch.bool or y.numel() != shown.numel():
        raise ValueError(
            "Expected 'y' to hold an integer and 'shown' a bool for each node (got "
            f"{y.dtype} {list(y.shape)} and {shown.dtype} {list(shown.shape)})"
        )
    labels, shown = y.view(-1).long(), shown.view(-1)
    wrong = labels[shown & ((labels < 0) | (labels >= num_classes))]
    if len(wrong):
        raise ValueError(
            f"'shown' has a node with label {int(wrong[0])}; classes are 0 to {num_classes - 1}"
        )
    columns = F.one_hot(labels.where(shown, 0), num_classes) * shown.view(-1, 1)
    return torch.cat([x, columns.to(x.dtype)], dim=1)


class LabelSplit:
    """The split of training nodes into inputs and targets, step by step.

    Args:
        ratio: The share of training nodes that show their labels in a step, in ``[0, 1)``.
        seed: Of all draws.
        index: This worker's training nodes.
        n_id: Global ids of all its nodes.
        num_nodes: How many it has.

    Raises:
        ValueError: When the ratio is out of range, or global ids are missing.
    """

    def __init__(
        self, ratio: float, seed: int, index: Tensor, n_id: Tensor | None, num_nodes: int
    ) -> None:
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if not number or not 0 <= ratio < 1:
            raise ValueError(f"Expected 'labels' to be in [0, 1) (got {ratio!r})")
        if n_id is None:
            raise ValueError("'labels' needs global ids of the nodes: data.n_id is missing")
        self.ratio, self.seed, self.index, self.n_id = ratio, seed, index, n_id
        self.num_nodes = num_nodes

    def everything(self) -> Tensor:
        """Returns the mask of evaluations: all training nodes show their labels."""
        mask = torch.zeros(self.num_nodes, dtype=torch.bool, device=self.index.device)
        mask[self.index] = True
        return mask

    def shown(self, epoch: int) -> Tensor:
        """Returns which training nodes show their labels in a step, bool ``[len(index)]``."""
        key = (self.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63
        return ratio_mask(self.everything(), self.ratio, self.n_id, key)[self.index]
