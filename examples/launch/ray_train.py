"""Ray starts the workers and sets up torch.distributed; ``pyg_sar.init()`` joins that group.

``pip install 'ray[train]'``, then run this file in a folder with the partition ``parts``.
"""

import os
import sys
from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(config: dict[str, str]) -> None:
    sys.path.insert(0, config["code"])
    from train import main

    main(config["parts"], config["checkpoint"])


if __name__ == "__main__":
    given = {
        "parts": os.path.abspath("parts"),
        "checkpoint": os.path.abspath("run.ckpt"),
        "code": str(Path(__file__).resolve().parent),
    }
    workers = len(list(Path("parts").glob("part-*")))  # one worker for each part
    trainer = TorchTrainer(
        work,
        train_loop_config=given,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=os.path.abspath("ray")),
    )
    trainer.fit()
