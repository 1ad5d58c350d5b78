"""Training on sampled neighbours, to compare with: several steps an epoch, each an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.comm.group import Communicator
from pyg_sar.partition.message_flow import sample_neighbors
from pyg_sar.space.draws import Draws, draw, uniform

_LABEL = ("", "", "batches")


@dataclass(frozen=True, kw_only=True)
class NeighborSampling:
    """Steps on batches of training nodes with sampled neighbours, as of PyG's ``NeighborLoader``.

    The batches of an epoch, and the neighbours, are functions of the seed and of global ids: the
    same for any number of workers.

    Args:
        num_neighbors: The most in-edges of a node, by hop from the batch's nodes; -1 keeps all.
        batch_size: Training nodes of a step, on all workers together.

    Raises:
        ValueError: For a batch without nodes, or other numbers of neighbours.
    """

    num_neighbors: tuple[int, ...]
    batch_size: int = 1024

    def __post_init__(self) -> None:
        size, numbers = self.batch_size, self.num_neighbors
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"Expected 'batch_size' to be an integer of at least 1 (got {size!r})")
        several = isinstance(numbers, list | tuple) and len(numbers) > 0
        if not several or not all(type(n) is int and (n == -1 or n > 0) for n in numbers):
            raise ValueError(
                "Expected 'num_neighbors' to be integers, -1 or at least 1, by hop, such as "
                f"(10, 5) (got {numbers!r})"
            )

    def batches(
        self, data: Data, index: Tensor, n_id: Tensor, seed: int, epoch: int, comm: Communicator
    ) -> Iterator[tuple[Data, Tensor]]:
        """Yields the graphs of an epoch, and which of the training nodes are their seeds.

        Args:
            data: This worker's part.
            index: Its training nodes.
            n_id: Their global ids.
            seed: Of all draws.
            epoch: The epoch.
            comm: The workers.
        """
        first = seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9
        numbers = draw(
            uniform(),
            (),
            n_id,
            int(n_id.max()) + 1 if n_id.numel() else 0,
            dtype=torch.float64,
            device=index.device,
            draws=Draws("keyed", key=first % 2**63),
        )
        own = torch.tensor([numbers.numel()], device=index.device)
        rest = int(comm.all_reduce(own, "max", label=_LABEL)) - numbers.numel()
        padded = torch.cat([numbers, numbers.new_full((rest,), 2.0)])
        everyone = torch.cat(comm.all_gather(padded, label=_LABEL)).sort().values
        everyone = everyone[everyone < 2]
        batch = torch.searchsorted(everyone, numbers) // self.batch_size
        for k in range(-(-len(everyone) // self.batch_size)):
            rows = (batch == k).nonzero().view(-1)
            rows = rows[index[rows].argsort()]
            key = (first + (k + 1) * 0x94D049BB133111EB) % 2**63
            yield sample_neighbors(data, index[rows], self.num_neighbors, key), rows
