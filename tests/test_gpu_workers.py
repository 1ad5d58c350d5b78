"""The contract's first rule where the data lies on a GPU: the numbers of one process on the CPU.

`make test-gpu` runs this on CUDA devices; workers that find fewer devices than there are of them
share one. On a CPU the same test shows that workers may choose their device by ``init``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, MODES, OUT, Job, Partitions, Sweep, like_loops, make_graph, run_jobs
from torch import Tensor
from torch.distributed import HashStore
from torch_geometric import nn as gnn

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm import Communicator, finalize
from pyg_sar.comm.backends import NcclTransport, Setting
from pyg_sar.comm.communicator import GroupCommunicator
from pyg_sar.comm.environment import WorkerInfo
from pyg_sar.comm.group import adopt
from pyg_sar.comm.messages import Watch
from pyg_sar.errors import PygSarError

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


class Unwatched(Watch):
    def diagnose(self, error: BaseException, doing: str) -> PygSarError:
        return PygSarError(f"{doing} failed: {error}")

    def report(self, error: BaseException, rank: int | None = None) -> None:
        pass


def nccl_of_one() -> Communicator:
    """NCCL, whose sums a single worker goes through; ``init`` gives it none."""
    info = WorkerInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, agent_store=False)
    setting = Setting(info=info, store=HashStore(), timeout=60, device=torch.device("cuda", 0))
    comm = GroupCommunicator(NcclTransport(setting), Unwatched(), 60)
    adopt(comm)
    return comm


def on_device(jobs: Sequence[Job], device: str) -> tuple[str, list[Any]]:
    """A worker's part, on a device of its choice."""
    finalize()
    comm = nccl_of_one() if device == "nccl" else pyg_sar.init(device=device, timeout=60)
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
        pytest.param(1, "nccl", tuple(LAYERS), marks=NONE),
    ],
)
def test_numbers_are_those_of_one_process(
    world: int, device: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, sweep = like_loops(make_graph()), Sweep(world)
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
    assert all(device in where for where in seen) and len(seen) == world


def told(call: Callable[[], Any]) -> str:
    """What a call says of a device."""
    try:
        return str(call())
    except ValueError as error:
        return str(error)


@NONE
def test_a_device_that_is_not_the_workers_is_an_error(tmp_path: Path):
    """Alone, too: else numbers of one device would meet those of another one in a layer."""
    root = Partitions(tmp_path)(make_graph(), 1, "random")
    none, missing = f"cuda:{GPUS}", "at rank 0, but this host has"
    assert missing in told(lambda: pyg_sar.init(device=none))
    assert missing in told(lambda: pyg_sar.load_partition(root, device=none))
    assert told(lambda: pyg_sar.load_partition(root, device="cuda:0").x.device) == "cuda:0"
    assert told(lambda: pyg_sar.init(device="cuda").device) == "cuda:0"
    assert told(lambda: pyg_sar.init(device="cuda:0").device) == "cuda:0"
    assert "already computes on cuda:0" in told(lambda: pyg_sar.init(device="cpu"))
    assert told(lambda: pyg_sar.load_partition(root, device="cuda").x.device) == "cuda:0"
    text = told(lambda: pyg_sar.load_partition(root, device="cpu"))
    assert "device='cpu') at rank 0, whose device is cuda:0: leave 'device' out" in text
    assert "this worker computes on cuda:0" in told(
        lambda: pyg_sar.run(print, parts=1, memory="1GiB")
    )


@NONE
def test_errors_name_arguments_that_are_elsewhere(tmp_path: Path):
    """And those of dtypes that nothing adds up."""
    pyg_sar.init(device="cuda")
    data: Any = pyg_sar.load_partition(Partitions(tmp_path)(make_graph(), 1, "random"))
    model = pyg_sar.distribute(gnn.GCNConv(CHANNELS, OUT).double())
    with pytest.raises(RuntimeError) as seen:
        model(data.x, data.edge_index, torch.rand(data.num_edges).double())
    assert "'edge_weight' is on cpu, and the edges on cuda:0: move it" in seen.value.__notes__
    layer = pyg_sar.distribute(gnn.SimpleConv())
    with pytest.raises(NotImplementedError) as refused:
        layer(data.x.to(torch.float8_e4m3fn), data.edge_index)
    assert any("'x' is torch.float8_e4m3fn" in note for note in refused.value.__notes__)
