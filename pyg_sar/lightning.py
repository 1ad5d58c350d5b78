"""Lightning's ``Trainer`` on the parts of a graph: ``Trainer(strategy=SARStrategy())``.

A ``LightningModule`` stays as it is: it is converted by :func:`pyg_sar.distribute`, and its batches
are what :func:`pyg_sar.load_partition` gives. Losses and metrics are of the whole graph on every
worker, so that logging, early stopping and the best checkpoint are decided alike.

Needs ``lightning`` (``pip install 'pyg_sar[lightning]'``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import init
from pyg_sar.convert import distribute
from pyg_sar.errors import PygSarError
from pyg_sar.policy import SARPolicy

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities import rank_zero_only
except ImportError as error:
    raise ImportError(
        "pyg_sar.lightning needs the package 'lightning': pip install 'pyg_sar[lightning]'"
    ) from error


class SARStrategy(SingleDeviceStrategy):
    """Trains a ``LightningModule`` on the worker's part of a graph, together with other workers.

    Workers are started as for other scripts (``torchrun``, :func:`pyg_sar.launch`);
    ``Trainer(devices=...)`` adds none. Each batch is for all workers: a loader gives the graph of
    :func:`pyg_sar.load_partition`. What is logged is of the whole graph, with ``sync_dist`` or
    without. Rank 0 writes checkpoints and logs.

    Args:
        policy: Of the converted layers.
        **rest: ``accelerator``, ``checkpoint_io``, ``precision_plugin``: as Lightning's.
    """

    strategy_name = "sar"

    def __init__(self, policy: SARPolicy | None = None, **rest: Any) -> None:
        self.comm, self.policy = init(), policy
        if self.comm.replicas > 1:
            raise ValueError(
                f"SARStrategy trains on one graph, and this is replica {self.comm.replica} of "
                f"{self.comm.replicas}: write the loop over a replica's samples yourself "
                "(docs/training.md), or start with one replica"
            )
        super().__init__(device=self.comm.device, **rest)
        self.global_rank = self.comm.rank  # Values need no sum over workers: world_size stays 1.
        rank_zero_only.rank = self.comm.rank  # type: ignore[attr-defined]

    @property
    def is_global_zero(self) -> bool:
        """Says if this worker writes checkpoints and logs."""
        return self.comm.rank == 0

    def setup(self, trainer: Trainer) -> None:
        """Converts the module, then makes its optimizers."""
        if self.model is None:
            raise PygSarError("Lightning has connected no module to the strategy")
        distribute(self.model, self.policy)
        super().setup(trainer)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all workers."""
        self.comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank ``src``."""
        return self.comm.broadcast_object(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the workers' tensors of one shape, ``[W, *]``, without a gradient."""
        return torch.stack(self.comm.all_gather(tensor.detach().contiguous()))
