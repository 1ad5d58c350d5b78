"""Trains on the workers' parts, however the workers were started (docs/launching.md).

``pyg-sar partition synthetic --parts 4 --out parts``, then one of this folder's files starts a
worker for each part.
"""

import os
import sys

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch_geometric.nn import GraphSAGE

import pyg_sar
from pyg_sar.train import CheckpointEvery, LineProgress, SignalNotice, TrainConfig


@record  # torchrun prints this function's error, of the worker that failed first
def main(parts: str, checkpoint: str) -> float:
    with SignalNotice() as stop:  # SIGUSR1: all workers save the same epoch, and end
        comm = pyg_sar.init()  # of torchrun, srun, mpirun, or a process group that is there
        data = pyg_sar.load_partition(parts)
        classes = 1 + int(data.y.max())
        torch.manual_seed(0)
        model = pyg_sar.distribute(GraphSAGE(data.num_features, 32, 2, classes))
        callbacks = [LineProgress(), CheckpointEvery(checkpoint, every=10, stop=stop)]
        config = TrainConfig(epochs=20, eval_every=10)
        trainer = pyg_sar.Trainer(model, data, config, callbacks=callbacks)
        if comm.broadcast_object(os.path.isfile(checkpoint)):  # rank 0 wrote it
            trainer.resume(checkpoint)
        result = trainer.fit()
        return result.losses[-1]


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["parts", "run.ckpt"]))
