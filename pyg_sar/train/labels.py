"""Labels as inputs: masked label prediction (Shi et al., IJCAI 2021; PyG's ``MaskLabel``).

In each step some training nodes, drawn anew, show the model their labels, and the loss is that of
the others. A node's number is a function of its global id and of the step: it is the same for any
number of workers, and after a resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.space.draws import Draws, draw, uniform


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
    """
    out = mask.clone()
    ids = n_id[mask]
    total = int(ids.max()) + 1 if ids.numel() else 0
    numbers = draw(
        uniform(),
        (),
        ids,
        total,
        dtype=torch.float64,
        device=mask.device,
        draws=Draws("keyed", key=key),
    )
    out[mask] = numbers < ratio
    return out


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
