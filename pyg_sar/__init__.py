r"""pyg_sar: exact full-batch training of any PyTorch Geometric model on several workers.

A plugin for PyTorch Geometric with the sequential aggregation and rematerialization of SAR
(Mostafa, MLSys 2022): partition a graph, start workers, train an unmodified PyG model on all of it.

.. code-block:: python

    pyg_sar.write_partitions(data, 4, "parts")          # once

    pyg_sar.init()                                      # in each worker
    data = pyg_sar.load_partition("parts")
    model = pyg_sar.distribute(model)
    loss = pyg_sar.mean(F.cross_entropy(out[mask], data.y[mask], reduction="none"))
"""

from pyg_sar.comm.group import Communicator, current, finalize, init
from pyg_sar.comm.launch import launch
from pyg_sar.convert import distribute
from pyg_sar.errors import (
    CommTimeoutError,
    DistributedIndexError,
    LostWorkerError,
    MismatchError,
    PartitionError,
    PygSarError,
    WorkerError,
)
from pyg_sar.lazy import initialize
from pyg_sar.ledger import Ledger
from pyg_sar.nn import DistMessagePassing, OneShotWarning
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.storage import merge_partitions, write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.reduction.gathering import gather_nodes
from pyg_sar.reduction.gradients import sum_gradients
from pyg_sar.reduction.metrics import accuracy, mean
from pyg_sar.space.graph_index import DistBatch, dist_batch
from pyg_sar.space.index_space import DistEdgeIndex, DistIndex
from pyg_sar.tools.verify import call_with, verify
from pyg_sar.tools.verify_report import VerifyReport
from pyg_sar.train.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from pyg_sar.train.config import TrainConfig
from pyg_sar.train.trainer import Trainer
from pyg_sar.train.wire_error import gradient_error

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommTimeoutError",
    "Communicator",
    "DistBatch",
    "DistEdgeIndex",
    "DistIndex",
    "DistMessagePassing",
    "DistributedIndexError",
    "Ledger",
    "LostWorkerError",
    "MismatchError",
    "OneShotWarning",
    "PartitionError",
    "PygSarError",
    "SARPolicy",
    "TrainConfig",
    "Trainer",
    "VerifyReport",
    "WorkerError",
    "accuracy",
    "call_with",
    "current",
    "dist_batch",
    "distribute",
    "finalize",
    "gather_nodes",
    "gradient_error",
    "init",
    "initialize",
    "launch",
    "load_checkpoint",
    "load_partition",
    "mean",
    "merge_partitions",
    "save_checkpoint",
    "sum_gradients",
    "verify",
    "write_partitions",
]
