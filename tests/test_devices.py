"""Where workers compute and what carries their tensors: decisions, without a GPU at hand."""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Partitions, make_graph, whole, workers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch_geometric import nn as gnn

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm.communicator import LocalCommunicator
from pyg_sar.comm.devices import numbered, place, placement, random_states, set_random_states
from pyg_sar.comm.environment import WorkerInfo
from pyg_sar.convert import _put_on_device
from pyg_sar.space import shard

CPU, META = torch.device("cpu"), torch.device("meta")


def cuda(number: int | None = None) -> torch.device:
    return torch.device("cuda") if number is None else torch.device("cuda", number)


def worker(rank: int | None, count: int, local: int | None = None) -> WorkerInfo:
    return WorkerInfo(
        rank=rank or 0,
        world_size=count,
        local_rank=rank,
        local_world_size=local or count,
        agent_store=False,
    )


@pytest.mark.parametrize(
    ("info", "backend", "device", "gpus", "nccl", "expected"),
    [
        # Nothing asked for: a GPU for each worker, or none for all.
        (worker(1, 2), None, None, 0, False, ("gloo", CPU)),
        (worker(1, 2), None, None, 2, True, ("nccl", cuda(1))),
        (worker(1, 2), None, None, 8, True, ("nccl", cuda(1))),
        (worker(1, 4, local=2), None, None, 2, True, ("nccl", cuda(1))),
        (worker(1, 2), None, None, 1, True, ("gloo", CPU)),
        (worker(1, 2), None, None, 2, False, ("gloo", cuda(1))),
        (worker(None, 1), None, None, 4, True, ("nccl", cuda(0))),
        # A device: nccl only where it is the worker's own.
        (worker(1, 2), None, CPU, 2, True, ("gloo", CPU)),
        (worker(1, 2), None, cuda(), 2, True, ("nccl", cuda(1))),
        (worker(1, 2), None, cuda(1), 2, True, ("nccl", cuda(1))),
        (worker(1, 2), None, cuda(0), 2, True, ("gloo", cuda(0))),
        (worker(1, 2), None, cuda(0), 1, True, ("gloo", cuda(0))),
        (worker(3, 4), None, cuda(), 2, True, ("gloo", cuda(1))),
        (worker(1, 2), None, META, 0, False, ("gloo", META)),
        # A backend.
        (worker(1, 2), "gloo", None, 2, True, ("gloo", CPU)),
        (worker(1, 2), "gloo", cuda(), 2, True, ("gloo", cuda(1))),
        (worker(1, 2), "nccl", cuda(0), 1, True, ("nccl", cuda(0))),
    ],
)
def test_placement(
    info: WorkerInfo,
    backend: str | None,
    device: torch.device | None,
    gpus: int,
    nccl: bool,
    expected: tuple[str, torch.device],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = placement(info, backend, device, gpus, nccl)
    assert (found.backend, found.device) == expected
    assert found.reason


@pytest.mark.parametrize(
    ("info", "backend", "device", "gpus", "text"),
    [
        (worker(1, 2), None, cuda(2), 2, r"device='cuda:2' at rank 1, but this host has 2"),
        (worker(1, 2), None, cuda(), 0, r"device='cuda' at rank 1, but this host has 0"),
        (worker(1, 2), "nccl", CPU, 2, r"device='cpu' at rank 1 is none: pass backend='gloo'"),
        (worker(2, 3), "nccl", None, 2, r"LOCAL_RANK=2, but this host has 2 CUDA device"),
        (worker(None, 2), None, None, 2, r"LOCAL_RANK is not set"),
    ],
)
def test_what_cannot_be_is_refused(
    info: WorkerInfo,
    backend: str | None,
    device: torch.device | None,
    gpus: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=text):
        placement(info, backend, device, gpus, True)


def test_a_process_that_is_alone_is_refused_what_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"device='cuda:9' at rank 0.*2 CUDA.*'cuda:0' to 'cuda:1'"
    ):
        pyg_sar.init(device="cuda:9")
    with pytest.raises(ValueError, match=r"device='cudda' is no device such as"):
        pyg_sar.init(device="cudda")
    assert pyg_sar.init(device="meta").device == META
    with pytest.raises(ValueError, match=r"device='cpu' at rank 0.*already computes on meta"):
        pyg_sar.init(device="cpu")


def test_rank_0_says_which_in_one_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "pyg_sar.comm"):
        place(worker(1, 2), "gloo", CPU)
        place(worker(0, 2), "gloo", CPU)
    (record,) = caplog.records
    assert record.getMessage() == "backend gloo, device cpu at rank 0 (as asked for)"


# The data and the model #######################################################


ON_META = LocalCommunicator(META)  # A worker on another device than the CPU, without numbers.


def test_a_model_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyg_sar.convert.current", lambda: ON_META)
    model = gnn.GCN(4, 8, 2, 3)
    model.convs[0].to("meta")
    text = r"'convs.1.bias' on cpu at rank 0, whose.*is meta: call model.to\(comm.device\)"
    with pytest.raises(ValueError, match=text):
        pyg_sar.distribute(model)
    _put_on_device(model.to("meta"), ON_META)


def test_a_model_on_the_cpu_is_moved():
    class Moves(torch.nn.Module):
        """Whose parameters stay the same objects, as on the way to a GPU."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.asked = gnn.GCNConv(4, 3), []

        def to(self, device: Any) -> Any:
            self.asked.append(device)

    model = Moves()
    _put_on_device(model, ON_META)
    assert model.asked == [META]
    # Parameters that are replaced, which is what happens here, are not what an optimizer knows.
    with pytest.raises(ValueError, match=r"call model.to\(comm.device\) first"):
        _put_on_device(gnn.GCNConv(4, 3), ON_META)


def test_a_single_process_on_the_cpu_chooses_for_itself():
    model = gnn.GCNConv(4, 3).to("meta")
    assert pyg_sar.distribute(model) is model


def asked(root: Path, device: str) -> str:
    try:
        return str(pyg_sar.load_partition(root, device=device).x.device)
    except ValueError as error:
        return str(error)


def test_data_goes_where_the_worker_is(tmp_path: Path):
    root = Partitions(tmp_path)(make_graph(), 2, "random")
    assert workers(asked, 2, root, "cpu") == ["cpu", "cpu"]
    for rank, text in enumerate(workers(asked, 2, root, "meta")):
        assert text == (
            f"load_partition(device='meta') at rank {rank}, whose device is cpu: leave 'device' "
            "out, or call pyg_sar.init(device='meta') first"
        )
    alone = Partitions(tmp_path / "alone")(make_graph(), 1, "random")
    assert asked(alone, "meta") == "meta"
    pyg_sar.init(device="meta")  # Alone, too, on another device than the CPU.
    assert "at rank 0, whose device is meta: leave 'device' out" in asked(alone, "cpu")


# What is made on the way ######################################################


class Apart(TorchFunctionMode):
    """Raises where a tensor that was made without a device meets the data, which has one.

    On a GPU they would be apart. A tensor that is made of none else is on the CPU when no device is
    given, and so is what is made of it, until it is copied ``to`` a device or into another tensor.
    """

    __module__ = "pyg_sar"  # With a mode of users' layers run as PyG's own.

    def __init__(self) -> None:
        self.host: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        host = [t for t in given if id(t) in self.host]
        name = getattr(func, "__name__", str(func))
        both = 0 < len(host) < len(given)
        # Labels of rows are on the CPU, and are not seen where they are made (below autograd).
        frames = sys._getframe(1), sys._getframe(2)  # The second: where draws are watched.
        both &= all("row_" not in Path(f.f_code.co_filename).name for f in frames)
        if both and name not in FREE and any(t.dim() > 0 for t in host):
            raise AssertionError(f"{name} of tensors on the CPU and on the device")
        out = func(*args, **kwargs)
        placed = name in ("to", "cpu") or name.startswith("new_") or name.endswith("_like")
        if placed and isinstance(out, Tensor):
            self.host.pop(id(out), None)
        elif not placed and kwargs.get("device") is None and len(host) == len(given):
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    self.host[id(t)] = t  # which stays, as its id may not be another's
        return out


# What PyTorch allows: copies, and places on the CPU in a tensor of a GPU.
FREE = {"copy_", "__getitem__", "__setitem__", "is_", "__get__", "__set__", "type_as"}


def steps(root: Path, make: Any) -> tuple[Tensor, int]:
    """Two steps of training in which the CPU's tensors are kept apart from the data."""
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = make(data.num_features)
    with Apart() as apart:
        model = pyg_sar.distribute(model)
        for _ in range(2):
            out = model(data.x, data.edge_index)
            F.cross_entropy(out, data.y).backward()
        (out.argmax(-1) == data.y).double().mean()
        made = len(apart.host)
    return whole(out.detach()), made


MODELS: dict[str, Any] = {
    "sage": lambda width: gnn.GraphSAGE(width, 8, 2, 3, norm="BatchNorm"),
    "gat": lambda width: gnn.GAT(width, 8, 2, 3, heads=2, dropout=0.5),
    "general": lambda width: gnn.PNA(
        width, 8, 1, 3, aggregators=["mean", "std"], scalers=["identity"], deg=torch.ones(9)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_on_the_way_is_where_the_data_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = Partitions(tmp_path)(make_graph(dtype=torch.float32), 2, "random")
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")  # in which GPUs' rows never are
    for out, made in workers(steps, 2, root, MODELS[name]):
        assert bool(out.isfinite().all()) and made > 0


def looked_up(root: Path) -> list[int]:
    """How often a worker has looked for a tile's targets, which a GPU is waited for: by step."""
    data, looked = pyg_sar.load_partition(root), []
    model = pyg_sar.distribute(MODELS["general"](data.num_features), SARPolicy(message_budget=600))
    holding = shard._holding

    def counted(*given: Any) -> tuple[int, int]:
        looked.append(given)
        return holding(*given)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "_holding", counted)
        for _ in range(3):
            model(data.x, data.edge_index).square().sum(-1).mean().backward()
            found.append(len(looked))
    return found


def test_a_gpu_is_not_waited_for_at_each_tile(tmp_path: Path):
    root = Partitions(tmp_path)(make_graph(dtype=torch.float32), 2, "random")
    for first, second, third in workers(looked_up, 2, root):
        assert 0 < first == second == third


def test_a_device_has_its_number_and_a_gpu_its_random_numbers(monkeypatch: pytest.MonkeyPatch):
    """Else the data's device, which has one, would be another than the worker's."""
    states = {cuda(1): torch.tensor([1])}
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "get_rng_state": states.__getitem__,
        "set_rng_state": lambda state, device: states.update({device: state}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert [numbered(d) for d in (CPU, cuda(), cuda(0))] == [CPU, cuda(1), cuda(0)]
    before = random_states(cuda(1))
    expected = torch.rand(3)
    states[cuda(1)] = torch.tensor([2])
    set_random_states(before, cuda(1))
    assert torch.equal(torch.rand(3), expected) and states[cuda(1)].tolist() == [1]
    assert len(random_states(CPU)) == 1


def test_a_tensor_of_the_cpu_would_be_found():
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="add of tensors on the CPU"), Apart():
        torch.add(x, torch.arange(3))
    with Apart():
        x.add(torch.arange(3).to(x.device))
        x.add(torch.arange(3, device=x.device))


# The benchmark ################################################################


def table_of_gpus(
    device: str, folder: Path, nodes: int = 300, edges: int = 1500
) -> list[list[str]]:
    """Rows that benchmarks/gpu.py writes of a layer and a model on a tiny graph."""
    script = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
    given = ["--device", device, "--nodes", str(nodes), "--edges", str(edges), "--parts", "3"]
    given += ["--rounds", "1", "--compiler", "eager", "--layers", "GATConv 4x8"]
    given += ["--models", "sage", "--out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *given, str(folder / "gpu.md")])
        patch.syspath_prepend(script.parent)
        runpy.run_path(str(script), run_name="__main__")
    rows = [line.split(" | ") for line in (folder / "gpu.md").read_text().splitlines()]
    return [row for row in rows if row[0].startswith(("| GATConv", "| sage"))]


def test_the_benchmark_of_gpus_runs_without_one(tmp_path: Path, capsys: Any):
    layer, *models = table_of_gpus("cpu", tmp_path)
    assert [row[:3] for row in models] == [
        ["| sage", "1", "-"],
        *(["| sage", "3", mode] for mode in "123"),
    ]
    assert all(float(number) > 0 for number in layer[1:5])  # times
    assert all(row[k] == "-" for row in models for k in (5, 6))  # Memory of a CPU is not known.
    for row in (layer, *models):
        assert float(row[-1].strip("| ")) < 1e-5, row
