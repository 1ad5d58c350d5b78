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
from torch_geometric.data import Data, HeteroData

from pyg_sar.files import check_argument
from pyg_sar.space.draws import keyed_numbers
from pyg_sar.tensors import NodeTensor, from_local
from pyg_sar.wording import counted

SPLITS: tuple[str, ...] = ("train", "val", "test")

MASKS: dict[str, str] = {split: f"{split}_mask" for split in SPLITS}
"""Attributes that hold the splits of nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The targets of one graph.

    Attributes:
        values: A row for each row that the model returns, ``[n, *]``; classes as int64 ``[n]``.
        masks: The rows of each split that count, bool ``[n]``.
        counts: How many these are.
    """

    values: Tensor
    masks: dict[str, Tensor]
    counts: dict[str, int]

    def select(self, split: str) -> Tensor:
        """Returns the targets of a split."""
        return self.values[self.masks[split]]


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

    Targets that are missing, have another shape or type, or hold NaN, are refused.

    Args:
        name: The attribute that holds the targets.
        splits: The attribute of each split: a mask, bool ``[n]`` or ``[n, num_splits]``, or a list
            of rows, int64 ``[K]``. By default ``train_mask``, ``val_mask`` and ``test_mask`` for
            ``y``; all rows of other targets are for training.
        column: Which split of two-dimensional masks.
        of_classes: Integer targets are classes, -1 where there is none.
        probabilities: Targets may also be floating point: probabilities of the classes.
        whole: The split that all rows belong to, in place of ``splits``.
    """
    values = data.get(name)
    if not isinstance(values, Tensor) or values.dim() == 0:
        if isinstance(data, HeteroData):
            raise ValueError(
                f"a HeteroData has data.{name} by type, which the Trainer doesn't take: write the "
                "loop as in examples/hetero.py"
            )
        raise _missing(name, values)
    of_classes = of_classes and not (probabilities and values.is_floating_point())
    if of_classes:
        values = node_labels(data, name)
    if whole is None and splits is None:
        splits, whole = (MASKS, None) if name == "y" else ({}, "train")
    if whole is None:
        names = splits or {}
        given = [data.get(names.get(split, "")) for split in SPLITS]
        of_train, *others = (one.dim() if isinstance(one, Tensor) else 0 for one in given)
        if column and of_train == 1 and 2 not in others:
            raise ValueError(
                f"split {column}: data.{names.get('train')} has one dimension, so the graph has "
                "one split; leave the split out"
            )
        masks = {s: _mask(data, names.get(s), s, column, values, name) for s in SPLITS}
    else:
        masks = {split: _rows(values, split == whole) for split in SPLITS}
    if of_classes:
        masks = {split: mask & (values >= 0) for split, mask in masks.items()}
    counts = {split: int(mask.sum()) for split, mask in masks.items()}
    if values.is_floating_point():
        missing = values.isnan().view(len(values), -1).any(1)
        for split, mask in masks.items():
            if number := int((missing & mask).sum()):
                raise ValueError(
                    f"data.{name} holds NaN in {number} of the {counts[split]} {split} rows: leave "
                    "rows without a target out of the split"
                )
    return Targets(values=values, masks=masks, counts=counts)


def _rows(values: Tensor, value: bool) -> Tensor:
    """Returns a mask of all rows, or of none."""
    first = values if values.dim() == 1 else values.flatten(1).select(1, 0)
    return torch.full_like(first, value, dtype=torch.bool)


def node_labels(data: Data, name: str = "y") -> Tensor:
    """Returns ``data.y`` as int64 ``[num_nodes]``."""
    labels = data.get(name)
    if not isinstance(labels, Tensor):
        raise _missing(name, labels)
    if labels.dim() == 2 and labels.size(1) == 1:
        labels = labels.view(-1)
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"Expected 'data.{name}' to hold one integer class per node, shape [num_nodes] or "
            f"[num_nodes, 1] (got {labels.dtype} {list(labels.shape)}); for other targets give the "
            "Trainer a loss, such as loss=torch.nn.BCEWithLogitsLoss() (--loss bce; of numbers mse "
            "or mae)"
        )
    return labels.long()


def not_finite(data: Data, target: str = "y") -> str:
    """Says which tensors of a graph, but for its targets, hold NaN or infinite numbers, if any."""
    found = [
        f": data.{name} holds NaN or infinite numbers"
        for name, value in data
        if name != target and isinstance(value, Tensor) and value.layout == torch.strided
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    return "".join(found)


def _missing(name: str, found: Any) -> ValueError:
    what = "node classification needs a label per node (-1: none)" if name == "y" else "the target"
    state = "is missing" if found is None else f"is a {type(found).__name__}, no tensor of numbers"
    return ValueError(f"data.{name} {state}: {what}")


def _mask(
    data: Data, name: str | None, split: str, column: int, values: Tensor, target: str
) -> Tensor:
    """Returns the mask of a split, from its attribute, a mask or a list."""
    found = None if name is None else data.get(name)
    if not isinstance(found, Tensor):
        if split != "train" and name in (None, MASKS[split]):
            return _rows(values, False)
        raise ValueError(
            f"data.{name or MASKS[split]} is missing: training needs to know which rows of "
            f"data.{target} to use (torch_geometric.transforms.RandomNodeSplit makes masks)"
        )
    if found.dtype == torch.long and found.dim() == 1:
        return _of_list(found, name, values, target)
    if target == "y" and found.dtype == torch.bool and len(found) == data.num_nodes != len(values):
        raise ValueError(
            f"Expected 'data.y' to have a row for each of {counted(len(found), 'nodes')}, as "
            f"data.{name} has (got {len(values)}); a node without a label has y=-1"
        )
    if found.dtype != torch.bool or found.dim() not in (1, 2) or len(found) != len(values):
        raise ValueError(
            f"Expected 'data.{name}' to be bool of shape [{len(values)}] or "
            f"[{len(values)}, num_splits] (got {found.dtype} {list(found.shape)})"
        )
    if found.dim() == 2:
        if column >= found.size(1):
            raise ValueError(f"split {column}: data.{name} has {found.size(1)} splits")
        found = found[:, column]
    return found


def _of_list(rows: Tensor, name: str | None, values: Tensor, target: str) -> Tensor:
    """Returns the mask of the rows that a list names."""
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(values):
        raise ValueError(
            f"data.{name} holds rows {int(rows.min())} to {int(rows.max())}, data.{target} has "
            f"{len(values)}"
        )
    mask = _rows(values, False)
    mask[rows] = True
    if (number := int(mask.sum())) < len(rows):
        raise ValueError(
            f"data.{name} lists {counted(number, 'rows')} in {len(rows)} numbers: give each once; "
            f"if it is a mask, data.{name}.bool()"
        )
    return mask


# Labels as inputs #############################################################


def ratio_mask(mask: Tensor, ratio: float, key: int) -> Tensor:
    """Keeps a random share of a mask, the same nodes for any number of workers.

    It is ``MaskLabel.ratio_mask`` with random numbers that belong to the nodes. Nothing is sent.

    Args:
        mask: Bool ``[num_nodes]``.
        ratio: The share that stays ``True``.
        key: Which draw: the epoch, say. The same key draws the same nodes.

    Returns:
        Bool ``[num_nodes]``.

    Raises:
        ValueError: When the mask is not bool, or the ratio no share.
    """
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(
            "Expected 'mask' to be bool with a value for each node (got "
            f"{mask.dtype} {list(mask.shape)})"
        )
    check_argument(0 <= ratio <= 1, "ratio", ratio, "in [0, 1]")
    if isinstance(mask, NodeTensor):
        return from_local(_share(mask.to_local(), ratio, mask.rows.ids, key), mask)
    return _share(mask, ratio, torch.arange(len(mask), device=mask.device), key)


def _share(mask: Tensor, ratio: float, ids: Tensor, key: int) -> Tensor:
    out = mask.clone()
    out[mask] = keyed_numbers(ids[mask].to(mask.device), key) < ratio
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
    shown = shown.view(-1)
    labels = y.view(-1).long().where(shown, 0)
    low, high = (int(n) for n in labels.aminmax()) if len(labels) else (0, 0)
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"'shown' has a node with label {low if low < 0 else high}; classes are 0 to "
            f"{num_classes - 1}"
        )
    columns = F.one_hot(labels, num_classes) * shown.view(-1, 1)
    return torch.cat([x, columns.to(x.dtype)], dim=1)


class LabelSplit:
    """The split of training nodes, bool ``[num_nodes]``, into inputs and targets, step by step.

    ``ratio`` is the share that show their labels in a step, in ``[0, 1)``; in evaluations all do.
    """

    def __init__(self, ratio: float, seed: int, mask: Tensor) -> None:
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        check_argument(number and 0 <= ratio < 1, "labels", ratio, "in [0, 1)")
        self.ratio, self.seed, self.mask = ratio, seed, mask

    def shown(self, epoch: int) -> Tensor:
        """Returns which nodes show their labels in a step, bool ``[num_nodes]``."""
        key = (self.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63
        return ratio_mask(self.mask, self.ratio, key)
