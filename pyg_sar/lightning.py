"""Lightning's ``Trainer`` on the parts of a graph: ``Trainer(strategy=SARStrategy())``.

A ``LightningModule`` stays as it is: it is converted by :func:`pyg_sar.distribute`, and its batches
are what :func:`pyg_sar.load_partition` gives. Losses and metrics are of the whole graph on every
worker, so that logging, early stopping and the best checkpoint are decided alike.

Needs ``lightning`` (``pip install 'pyg_sar[lightning]'``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from pyg_sar.comm.group import init
from pyg_sar.convert import distribute
from pyg_sar.errors import PygSarError
from pyg_sar.policy import SARPolicy
from pyg_sar.reduction.parameters import copy_from_first
from pyg_sar.tensors import NodeTensor
from pyg_sar.tensors.rows import every_rows
from pyg_sar.train.evaluation import over_replicas

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.utilities import rank_zero_only
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(
        "pyg_sar.lightning needs the package 'lightning': pip install 'pyg_sar[lightning]'"
    ) from error


class SARStrategy(ParallelStrategy):
    """Trains a ``LightningModule`` on the worker's part of a graph, together with other workers.

    Workers are started as for other scripts (``torchrun``, :func:`pyg_sar.launch`);
    ``Trainer(devices=...)`` adds none. Each batch is for all workers of a replica: a loader gives
    the graph of :func:`pyg_sar.load_partition`. What is logged is of the whole graph, with
    ``sync_dist`` or without. Rank 0 writes checkpoints and logs.

    With replicas, loaders get a ``DistributedSampler`` over them, and ``sync_dist`` takes what is
    logged over them. Validation, tests and predictions have replica 0's buffers, as checkpoints do.

    Args:
        policy: Of the converted layers.
        replicas: As for :func:`pyg_sar.init`.
        **rest: ``accelerator``, ``checkpoint_io``, ``precision_plugin``: as Lightning's.
    """

    strategy_name = "sar"

    def __init__(
        self, policy: SARPolicy | None = None, *, replicas: int | None = None, **rest: Any
    ) -> None:
        self.comm, self.policy = init(replicas=replicas), policy
        super().__init__(**rest)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @property
    def root_device(self) -> torch.device:
        """Returns this worker's device."""
        return self.comm.device

    @property
    def global_rank(self) -> int:
        """Returns the rank among the workers of all replicas."""
        return self.comm.replica * self.comm.world_size + self.comm.rank

    @property
    def world_size(self) -> int:
        """Returns the number of replicas: values need no sum over the workers of one."""
        return self.comm.replicas

    @property
    def is_distributed(self) -> bool:
        """Says if there are several replicas, which take samples of their own."""
        return self.comm.replicas > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Returns which samples are this replica's."""
        return {"num_replicas": self.comm.replicas, "rank": self.comm.replica}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Lets a sampler draw when the first sample is asked for.

        Lightning makes the first iterator of a run, and only then tells samplers the epoch, which
        is not the first one in a run that is resumed.
        """
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            kind: Any = type(sampler)

            def later(sampler: Any) -> Iterator[Any]:
                yield from kind.__iter__(sampler)

            sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": later})
        return super().process_dataloader(dataloader)

    def setup(self, trainer: Trainer) -> None:
        """Converts the module, then makes its optimizers.

        Each worker's torchmetrics have seen all rows of its replica: only replicas are combined.
        """
        if self.model is None:
            raise PygSarError("Lightning has connected no module to the strategy")
        distribute(self.model, self.policy)
        for metric in self.model.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = self._has_replicas
                metric.dist_sync_fn = self._of_replicas
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Moves the module to this worker's device."""
        if self.model is not None:
            self.model.to(self.root_device)

    def on_validation_start(self) -> None:
        """Takes replica 0's buffers: what is judged is what is saved."""
        if self.comm.across is not None and self.model is not None:
            copy_from_first(self.model.buffers(), self.comm.across)

    on_test_start = on_predict_start = on_validation_start

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the mean, sum, maximum or minimum over replicas."""
        if self.comm.across is None or not isinstance(tensor, Tensor):
            return tensor
        op = str(reduce_op or "mean").rpartition(".")[2].lower()
        if op in ("mean", "avg"):
            return self.comm.average(tensor if tensor.is_floating_point() else tensor.double())
        return self.comm.across.all_reduce(tensor.detach().clone(), op)

    def _has_replicas(self) -> bool:
        return self.is_distributed

    def _of_replicas(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Returns a metric's state in each replica, or all replicas' rows of one."""
        across = self.comm.across
        if across is None:
            return [state]
        if isinstance(state, NodeTensor):
            return [over_replicas(state, self.comm)]
        found = every_rows(torch.atleast_1d(state), across)
        return found if state.dim() else [one[0] for one in found]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all workers."""
        for group in (self.comm, self.comm.across):
            if group is not None:
                group.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank ``src``, counted over all replicas."""
        replica, part = divmod(src, self.comm.world_size)
        obj = self.comm.broadcast_object(obj, part)
        return obj if self.comm.across is None else self.comm.across.broadcast_object(obj, replica)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns all workers' tensors of one shape, ``[W, *]``, without a gradient."""
        own = torch.stack(self.comm.all_gather(tensor.detach().contiguous()))
        return own if self.comm.across is None else torch.cat(self.comm.across.all_gather(own))
