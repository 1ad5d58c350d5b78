"""Parts that wait in host memory: here the CPU is the device, and its host has the same memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import CLASSES, Partitions, make_graph
from torch import Tensor
from torch_geometric import nn as gnn

import pyg_sar
from pyg_sar.comm.communicator import LocalCommunicator
from pyg_sar.comm.host import Host, Hosting
from pyg_sar.comm.hosting import PartError, check_parts, host_parts
from pyg_sar.store import host_store
from pyg_sar.store.host_store import PINNED, HostStore

CPU, SMALLEST = torch.device("cpu"), 64


@pytest.fixture(autouse=True)
def cpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "DEVICES", ("cpu",))
    monkeypatch.setattr(host_store, "SMALLEST", SMALLEST)


# One store, without parts ####################################################


@pytest.fixture
def store() -> Iterator[HostStore]:
    made = HostStore(2, CPU)
    yield made
    made.end()
    made.leave(0)
    made.close()


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_what_a_part_made_is_out_between_its_turns(store: HostStore):
    store.begin(0)
    x = torch.arange(100.0)
    view, small, bits = x[10:].view(9, 10).t(), torch.ones(4), x > 5
    held = [x.clone(), view.clone(), bits.clone()]
    numbers = x.double().numpy()
    store.end()
    assert size(x) == size(view) == size(bits) == 0 and small.tolist() == [1, 1, 1, 1]
    assert numbers.sum() == 4950  # NumPy has its memory, which stays.
    for count in (1, 2):
        store.begin(0)
        assert all(map(torch.equal, held, (x, view, bits)))
        store.end()
        moved = 4 * 100 + 100 + 4 * 100 + 4 * 90 + 100  # x, bits, and the copies
        assert store.counters() == {
            "bytes_read": count * moved,
            "bytes_written": (count + 1) * moved,
            "demand_bytes": 0,
            "peak_resident_bytes": moved,
        }
    store.begin(0)


def test_what_is_freed_moves_no_more(store: HostStore):
    store.begin(0)
    x, y = torch.ones(100), torch.ones(1000)
    store.end()
    del y
    store.begin(0)
    assert store.counters()["bytes_read"] == 400 and torch.equal(x, torch.full((100,), 1.0))


def test_changes_of_a_turn_are_kept(store: HostStore):
    store.begin(0)
    x = torch.zeros(50)
    for step in range(3):
        store.end()
        store.begin(0)
        x.add_(1)
        x.numpy  # noqa: B018  # not called: the storage can still move
        assert x.tolist() == [step + 1.0] * 50
    x.resize_(200).fill_(7)
    store.end()
    assert size(x) == 0
    store.begin(0)
    assert x.tolist() == [7.0] * 200


def test_saved_tensors_and_states_of_optimizers(store: HostStore):
    def trained(turns: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(16, 4)
        )
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            loss = model(torch.randn(20, 8)).square().mean()
            if turns:
                store.end()
                assert size(model[0].weight) == 0
                store.begin(0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters(), *optimizer.state[model[0].weight].values()]

    store.begin(0)
    assert all(map(torch.equal, trained(True), trained(False)))


def in_a_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_what_another_part_made_comes_when_it_is_read_and_goes_again(store: HostStore):
    store.begin(0)
    x, other = torch.arange(100.0), torch.ones(100)
    store.end()

    def second() -> tuple[float, int, int]:
        store.begin(1)
        total, there = float(x.sum()), size(x)
        x.mul_(2)
        store.end()
        after = size(x)
        store.leave(1)
        return total, there, after

    assert in_a_thread(second) == (4950, 400, 0)
    assert store.counters()["demand_bytes"] == 400 and size(other) == 0
    store.begin(0)
    assert torch.equal(x, 2 * torch.arange(100.0))


def test_what_the_network_uses_stays(store: HostStore):
    store.begin(0)
    with store.unpaged():
        buffer = torch.zeros(100)
    pieces = buffer.split(50)
    pieces[0].add_(1)
    store.end()
    assert size(buffer) == 400 and float(buffer.sum()) == 50
    store.begin(0)


def test_closing_brings_all_back():
    store = HostStore(1, CPU)
    store.begin(0)
    x = torch.arange(100.0)
    store.end()
    store.leave(0)
    store.close()
    assert torch.equal(x, torch.arange(100.0)) and torch._C._len_torch_dispatch_stack() == 0


# Hosted parts #################################################################


def hosted(fn: Callable[..., Any], parts: int, *args: Any, store: str | None = PINNED) -> list[Any]:
    return host_parts(fn, args, Hosting(parts, store=store), LocalCommunicator(CPU))


def trained(root: Path, seed: int = 0) -> tuple[list[Tensor], Tensor, dict[str, int]]:
    """Two steps of a GAT with BatchNorm and dropout: gradients, scores of own nodes, counters."""
    torch.manual_seed(seed)
    data = pyg_sar.load_partition(root)
    model = gnn.GAT(data.num_features, 8, 2, CLASSES, heads=2, norm="BatchNorm", dropout=0.3)
    model = pyg_sar.distribute(model.double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()
    with torch.no_grad():
        scores = model.eval()(data.x, data.edge_index).to_local()
    host: Any = pyg_sar.comm.current().host
    counters = {} if host.store is None else host.store.counters()
    return [p.grad.clone() for p in model.parameters()], scores, counters


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("parts"))(make_graph(), 3, "random")


def test_same_bits_as_without_a_store_and_one_part_at_a_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    most = [0, 0]  # bytes of what was noted and in memory: of the turn's part, and of others

    def resident(store: HostStore) -> None:
        now = [0, 0]
        for noted in list(store._noted.values()):
            storage = noted.storage()
            if storage is not None and storage.resizable():
                now[noted.arena != store._turn] += storage.nbytes()
        most[:] = [max(pair) for pair in zip(most, now, strict=True)]

    begin = HostStore.begin

    def begun(store: HostStore, arena: int) -> None:
        begin(store, arena)
        resident(store)

    plain = hosted(trained, 3, root, store=None)
    monkeypatch.setattr(HostStore, "begin", begun)
    moved = hosted(trained, 3, root)
    for ours, theirs in zip(moved, plain, strict=True):
        assert all(map(torch.equal, ours[0], theirs[0])) and torch.equal(ours[1], theirs[1])
    assert most[0] > 10_000 and most[1] == 0
    counters = moved[-1][2]
    assert counters["bytes_written"] > counters["bytes_read"] > 10 * most[0]
    assert 0 < counters["demand_bytes"] < counters["bytes_read"]
    assert most[0] <= counters["peak_resident_bytes"] < 4 * most[0]


def test_gradients_are_those_of_one_process(root: Path):
    data = make_graph()
    torch.manual_seed(1)
    whole = gnn.GAT(data.num_features, 8, 2, CLASSES, heads=2, norm="BatchNorm").double()

    def step(given: Any, model: Any) -> list[Tensor]:
        F.cross_entropy(model(given.x, given.edge_index), given.y).backward()
        return [p.grad for p in model.parameters()]

    def part() -> list[Tensor]:
        model = pyg_sar.distribute(copy.deepcopy(whole))
        return step(pyg_sar.load_partition(root), model)

    found = hosted(part, 3)
    expected = step(data, whole)
    largest = max(float(g.abs().max()) for g in expected)
    for gradients in found:
        for ours, theirs in zip(gradients, expected, strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-10 * largest


def test_an_error_of_a_part_brings_all_back(root: Path):
    kept: list[Tensor] = []

    def fails() -> None:
        data = pyg_sar.load_partition(root)
        kept.append(data.x.to_local())
        comm = pyg_sar.comm.current()
        comm.barrier()
        if comm.rank == 1:
            raise ArithmeticError("in part 1")
        comm.barrier()

    with pytest.raises(PartError, match="part 1"):
        hosted(fails, 3)
    assert len(kept) == 3 and all(size(x) and bool(x.isfinite().all()) for x in kept)


# What it can't do #############################################################


def test_what_cannot_wait_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"memory='1GiB' is the limit of a store on disk"):
        Hosting.of(2, "1GiB", PINNED)
    with pytest.raises(ValueError, match=r"store='.*nowhere' is no folder"):
        pyg_sar.launch(print, 1, parts=2, store=tmp_path / "nowhere")
    monkeypatch.setattr(host_store, "DEVICES", ("cuda",))
    with pytest.raises(
        ValueError, match=r"store='pinned' moves tensors of a GPU .* on cpu: pass a"
    ):
        Host(Hosting(2, store=PINNED), LocalCommunicator(CPU))
    meta = LocalCommunicator(torch.device("meta"))
    for hosting in (Hosting(2, store=str(tmp_path)), Hosting(2, memory=2**20)):
        with pytest.raises(ValueError, match=r"parts that compute on the CPU, .* on meta: say sto"):
            Host(hosting, meta)


def test_a_store_on_disk_is_for_parts_on_the_cpu(tmp_path: Path):
    """So that they compute there, also where there is a GPU."""
    for memory, store, device in (
        (None, None, None),
        (None, PINNED, None),
        (None, tmp_path, "cpu"),
        ("1GiB", None, "cpu"),
    ):
        hosting = Hosting.of(2, memory, store)
        assert hosting is not None and hosting.device == device
    with pytest.raises(
        ValueError, match=r"\(got 'nccl'\): call pyg_sar.init\('gloo', device='cuda'"
    ):
        check_parts(4, 2, "nccl")


def test_too_little_memory_of_the_device_names_the_remedy():
    error = HostStore(1, CPU).explained(torch.OutOfMemoryError("CUDA out of memory.\nMore"))
    assert "a part's turn needs more memory than cpu has (CUDA out of memory.). Cut" in str(error)
