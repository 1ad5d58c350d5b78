"""The settings of Tolokers, chosen by the validation score of plain PyG; test nodes are not read.

    python benchmarks/choose_settings.py

Prints the best validation metric of each setting of a small grid, mean over seeds; the best row of
each model is what ``real_graphs.py`` holds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import accuracy
import torch
from accuracy import DATA, Job, train
from real_graphs import GRAPHS, MODELS, Setting, load
from torch_geometric.data import Data
from tqdm import tqdm


def validation_score(job: Job, setting: Setting, data: Data) -> float:
    """The best validation score of one run: what serves as 'test' here is the validation set."""
    GRAPHS[job.graph].settings[job.model] = setting
    result = train(job, data)
    assert result is not None, "only a run with a pause stops before its end"
    return float(result["metric"])


def main() -> None:
    """Prints the grid."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the .npz graphs")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--hidden", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--lr", nargs="+", type=float, default=[0.01, 0.03])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="to the models' own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    accuracy._quiet()
    data = load("tolokers", args.data, args.seeds)
    data.num_labels, data.num_nodes_in_all = int(data.y.max()) + 1, data.num_nodes
    data.test_mask = data.val_mask
    print("| model | hidden | learning rate | validation |\n| --- | --- | --- | --- |", flush=True)
    grid = [(m, h, lr) for m in args.models for h in args.hidden for lr in args.lr]
    for model, hidden, lr in tqdm(grid, desc="grid"):
        base = GRAPHS["tolokers"].settings[model]
        setting = replace(base, hidden=hidden, lr=lr)
        if args.epochs:
            setting = replace(setting, epochs=args.epochs, every=min(base.every, args.epochs))
        scores = [
            validation_score(
                Job(graph="tolokers", model=model, seed=seed, workers=0), setting, data
            )
            for seed in range(args.seeds)
        ]
        score = 100 * sum(scores) / len(scores)
        print(f"| {model} | {hidden} | {lr} | {score:.2f} |", flush=True)


if __name__ == "__main__":
    main()
