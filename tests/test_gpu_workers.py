"""The contract's first rule where the data lies on a GPU: the numbers of one process on the CPU.

`make test-gpu` runs this on CUDA devices; workers that find fewer devices than there are of them
share one. On a CPU the same test shows that workers may choose their device by ``init``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, MODES, OUT, Job, Partitions, Sweep, make_graph, run_jobs
from torch import Tensor
from torch_geometric import nn as gnn

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm import finalize

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NONE = pytest.mark.skipif(GPUS == 0, reason="PyTorch sees no CUDA device")

LAYERS: dict[str, Any] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
    "std": lambda: gnn.SimpleConv(["mean", "std"]),
    "norm": lambda: gnn.GraphSAGE(CHANNELS, 8, 2, OUT, norm="BatchNorm"),
}


def on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: on_cpu(v) for name, v in value.items()}
    return value.detach().cpu() if isinstance(value, Tensor) else value


def on_device(jobs: Sequence[Job], device: str) -> tuple[str, list[Any]]:
    """A worker's part, on a device of its choice."""
    finalize()
    comm = pyg_sar.init(device=device, timeout=60)
    found = [
        [replace(r, **{f.name: on_cpu(getattr(r, f.name)) for f in fields(r)}) for r in results]
        for results in run_jobs(copy.deepcopy(jobs))
    ]
    return f"{comm.backend} {comm.device}", found


@pytest.mark.parametrize(
    ("world", "device", "names"),
    [
        (2, "cpu", ("sage",)),
        *(pytest.param(n, "cuda", tuple(LAYERS), marks=NONE) for n in (1, 2, 4)),
    ],
)
def test_numbers_are_those_of_one_process(
    world: int, device: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, sweep = make_graph(), Sweep(world)
    root = Partitions(tmp_path)(data, world, "random")
    policies = (SARPolicy(mode=1), *MODES) if device != "cpu" else (SARPolicy(),)
    for name in names:
        torch.manual_seed(0)
        sweep.add(name, Job(LAYERS[name]().double(), root, policies=policies), data)
    launch, seen = pyg_sar.launch, []

    def launched(fn: Any, count: int, jobs: Any, **kwargs: Any) -> list[Any]:
        workers = launch(on_device, count, jobs, device, timeout=300.0)
        seen.extend(where for where, _ in workers)
        return [found for _, found in workers]

    monkeypatch.setattr(pyg_sar, "launch", launched)
    sweep.check(backend="processes", network=False)
    assert all(where.split()[1].startswith(device) for where in seen) and len(seen) == world
