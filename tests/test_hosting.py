"""Hosted parts: exact, the same to the bit for any number of workers, and their failures."""

from __future__ import annotations

import copy
import faulthandler
import importlib
import io
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from hosted_workers import host
from oracle import (
    CHANNELS,
    EDGE_DIM,
    OUT,
    SWITCH,
    Partitions,
    error,
    make_graph,
    node_losses,
)
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm.group import current, finalize
from pyg_sar.comm.host import Host
from pyg_sar.comm.hosting import check_parts
from pyg_sar.comm.store import no_check
from pyg_sar.comm.turns import SETTINGS, Turns
from pyg_sar.errors import (
    DistributedIndexError,
    LostWorkerError,
    MismatchError,
    PygSarError,
    WorkerError,
)

PARTS = 8
LABEL = ("conv", "forward", "fetch")


@pytest.fixture(autouse=True)
def no_test_hangs() -> Iterator[None]:
    """Ends the tests, with all stacks, where one takes two minutes."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    finalize()


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(60, 400, seed=1)


@pytest.fixture(scope="module")
def root(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosting") / "parts"
    pyg_sar.write_partitions(graph, PARTS, folder, "random")
    return folder


# What travels; exactness: every second layer of a sweep (oracle.Sweep) ########


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...]]] = {
    "sum": (lambda: gnn.GraphConv(CHANNELS, OUT), ()),
    "gat": (lambda: gnn.GATConv(CHANNELS, OUT, heads=2, edge_dim=EDGE_DIM), ("edge_attr",)),
    "median": (lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="median"), ()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_halo_row_comes_once_and_its_gradient_goes_once(name: str, graph: Data, root: Path):
    """Chunks of a few edges, too: they select from the halo."""
    make, edge = LAYERS[name]
    policy = SARPolicy(message_budget=600)

    def worker() -> Any:
        data = pyg_sar.load_partition(root)
        layer = pyg_sar.distribute(make().double(), policy)
        x = data.x.clone().requires_grad_()
        given = {key: data[key] for key in edge}
        layer(x, data.edge_index, **given).sum().backward()  # makes the plans
        with pyg_sar.Ledger(current()) as ledger:
            layer(x, data.edge_index, **given).sum().backward()
        edges = data.edge_index.to_local()
        source, target = edges.ends()
        owner = torch.bucketize(
            source - edges.plan.num_local, torch.tensor(edges.plan.halo_offsets), right=True
        )
        cut = source >= edges.plan.num_local
        slots = torch.stack([owner[cut], target[cut]]).unique(dim=1).size(1)
        kinds = ("fetch", "refetch", "gradient")
        found = [ledger.received_bytes(kind=kind) for kind in kinds]
        return edges.plan.num_halo, found, ledger.resident_rows(), slots

    results = host(worker, PARTS)
    total = sum(halo for halo, *_ in results)
    fetch, refetch, gradient = (sum(r[1][k] for r in results) for k in range(3))
    assert all(left == 0 for _, _, left, _ in results)
    row = fetch // total
    assert fetch == total * row and row >= OUT * 8
    # Owners of sources read gradients of the sums' targets, each once, where these lie.
    assert gradient == (sum(r[3] for r in results) * row if name == "sum" else fetch)
    assert refetch == (0 if name == "sum" else fetch)


# To the bit ###################################################################


class Gat(torch.nn.Module):
    """Two layers of GAT with dropout everywhere and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GATConv(CHANNELS, 4, heads=2, dropout=0.3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = gnn.GATConv(8, 3, dropout=0.3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        return self.last(torch.nn.functional.dropout(x, 0.4, self.training), edge_index)


def trained(root: Path, dtype: torch.dtype) -> Any:
    """Losses, gradients, parameters and random numbers of a part after some epochs."""
    torch.manual_seed(7)
    model = Gat().to(dtype)
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(model)
    step = torch.optim.Adam(model.parameters(), 0.01)
    losses, x = [], data.x.to(dtype)
    for _ in range(2):
        step.zero_grad()
        out = model(x, data.edge_index)
        loss = torch.nn.functional.cross_entropy(out, data.y)
        loss.backward()
        step.step()
        losses.append(loss.detach())
    grads = [p.grad for p in model.parameters()]
    return losses, grads, list(model.state_dict().values()), torch.rand(3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_same_to_the_bit_for_any_number_of_workers(dtype: torch.dtype, root: Path):
    expected = pyg_sar.run(trained, root, dtype, parts=PARTS, timeout=60.0)
    assert len(expected) == PARTS
    # NaN would equal nothing.
    assert all(bool(loss.isfinite()) for loss in expected[0][0])
    how: list[tuple[int, dict[str, str]]] = [(2, {}), (3, {SWITCH: "0"}), (4, {})]
    for workers, env in how if dtype == torch.float64 else how[1:2]:
        found = pyg_sar.launch(trained, workers, root, dtype, parts=PARTS, timeout=60.0, env=env)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def under_autocast(root: Path) -> list[Tensor]:
    """Gradients of a layer that is used three times, whose casts autocast may share."""
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, CHANNELS))
    x = data.x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            x = model(x, data.edge_index)
    node_losses(x.float()).sum().backward()
    return [p.grad for p in model.parameters()]


def test_the_same_to_the_bit_under_autocast(root: Path):
    """Parts of a process share autocast's cache, which one of them empties while others wait."""
    expected = pyg_sar.run(under_autocast, root, parts=PARTS)
    found = pyg_sar.launch(under_autocast, PARTS, root, parts=PARTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_each_part_draws_its_own_random_numbers():
    def draws(meet: Callable[[], Any]) -> list[Any]:
        found = []
        for step in range(7):
            found += [float(torch.rand(())), random.random()]
            # Every second normal number is kept beside the generator until it is asked for.
            found += np.random.randn((0, 1, 1, 0, 2, 1, 1)[step]).tolist()
            found += np.random.rand(step % 2).tolist()
            meet()
        return found

    def worker() -> list[Any]:
        comm = current()
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(comm.rank)
        return draws(comm.barrier)

    expected = []
    for rank in range(4):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(rank)
        expected.append(draws(lambda: None))
    assert host(worker, 4) == expected
    assert pyg_sar.launch(worker, 3, parts=4, timeout=30.0) == expected


def test_each_part_has_settings_of_its_own():
    """What part 0 sets while the others are still in between is not theirs."""

    def worker() -> list[list[Any]]:
        found = []
        for on, dtype in ((True, torch.float64), (False, torch.float32)):
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(on, warn_only=on)
            torch.backends.mha.set_fastpath_enabled(not on)
            current().barrier()
            found.append([torch.ones(1).dtype, *(read() for read, _ in SETTINGS)])
        return found

    start = [read() for read, _ in SETTINGS]
    first, second, third = host(worker, 3)
    assert first == second == third
    changed, restored = first
    assert restored == [torch.float32, *start] == [torch.float32, *(r() for r, _ in SETTINGS)]
    assert changed[:2] == [torch.float64] * 2
    assert changed[3:5] == [(True, True), False]


def test_contexts_end_where_a_part_ends_them():
    """Parts enter and leave a context in turn: it would stay on, or off, for all of the process."""
    flash = torch.backends.cuda.flash_sdp_enabled

    def worker() -> list[tuple[bool, bool]]:
        found = []
        for _ in range(2):
            with (
                torch.autograd.set_detect_anomaly(True),
                sdpa_kernel(SDPBackend.MATH),
            ):
                current().barrier()
                found.append((torch.is_anomaly_enabled(), flash()))
            found.append((torch.is_anomaly_enabled(), flash()))
        return found

    assert host(worker, 3) == [[(True, False), (False, True)] * 2] * 3
    assert not torch.is_anomaly_enabled()
    assert flash()


class Doubled(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_hooks_and_cached_weights_are_those_of_a_part():
    """PyTorch keeps those of all modules, and of all optimizers, in variables of the process."""

    def worker() -> list[float]:
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(layer.weight)
        parametrize.register_parametrization(layer, "weight", Doubled())
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        hooks = [
            register_module_forward_hook(lambda module, given, out: out + 10),
            register_optimizer_step_pre_hook(lambda *_: found.append(0.0)),
        ]
        found: list[float] = []
        for _ in range(2):
            with parametrize.cached():
                current().barrier()
                loss = layer(torch.ones(1, 1)).sum()
                loss.backward()
                current().barrier()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        for hook in hooks:
            hook.remove()
        current().barrier()
        with torch.no_grad():
            found.append(layer(torch.ones(1, 1)).item())
        return found

    # The weight is 1, -1 and -3, doubled; a hook adds 10 for each of three modules.
    assert host(worker, 3) == [[0.0, 32.0, 0.0, 28.0, -6.0]] * 3


def test_what_a_part_prints_goes_where_it_says():
    """The last part to leave a redirection would leave the process with another part's stream."""

    def worker() -> list[str]:
        found = []
        for digits in (2, 4):
            with redirect_stdout(io.StringIO()) as stream:
                torch.set_printoptions(precision=digits)
                current().barrier()
                print(torch.tensor(1 / 3), current().rank)
                current().barrier()
                torch.set_printoptions(profile="default")
            found.append(stream.getvalue())
        return found

    before = sys.stdout
    expected = [[f"tensor(0.33) {k}\n", f"tensor(0.3333) {k}\n"] for k in range(3)]
    assert host(worker, 3) == expected
    assert sys.stdout is before


def test_a_part_catches_its_own_warnings():
    """The last part to leave would leave the process with another part's filters."""

    def worker() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            current().barrier()
            warnings.warn(f"of part {current().rank}", stacklevel=1)
            current().barrier()
        return [str(one.message) for one in caught]

    before = list(warnings.filters)
    assert host(worker, 3) == [[f"of part {k}"] for k in range(3)]
    assert list(warnings.filters) == before


def test_what_a_process_has_but_one_of_is_refused():
    """The first part that ended its level of derivatives, or its profile, would end all of them."""

    def worker() -> float:
        square = lambda x: x.square()  # noqa: E731
        one = torch.ones(())
        meet = lambda x: square(x) + int(current().barrier() is None)  # noqa: E731
        with pytest.raises(DistributedIndexError, match=r"torch\.func\.jvp.*workers as parts"):
            jvp(meet, (one,), (one,))
        with (
            pytest.raises(DistributedIndexError, match=r"torch\.profiler.*workers as parts"),
            profile(activities=[ProfilerActivity.CPU]),
        ):
            current().barrier()
        with allow_mutation_on_saved_tensors():
            current().barrier()
        return float(jvp(square, (one,), (one,))[1])

    assert host(worker, 3) == [2.0] * 3
    with profile(activities=[ProfilerActivity.CPU]):
        assert host(lambda: current().barrier(), 2) == [None] * 2


def test_what_a_module_sets_is_set_for_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The worker imports it before its parts begin."""
    code = "import torch\ntorch.set_default_dtype(torch.float64)\n"
    (tmp_path / "sets_a_dtype.py").write_text(code + "def kind(): return torch.ones(1).dtype\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("sets_a_dtype").kind
    try:
        assert pyg_sar.launch(kind, 1, parts=2, timeout=30.0) == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_parts_compute_in_turn(root: Path, monkeypatch: pytest.MonkeyPatch):
    """In each pass in the order of the parts, never two at once."""
    trace: list[tuple[str, int]] = []
    make = Turns.__init__

    def traced(self: Turns, parts: Any, check: Any, outside: Any, *_: Any) -> None:
        make(
            self, parts, check, outside,
            lambda part: trace.append(("begin", part)), lambda part: trace.append(("end", part)),
        )  # fmt: skip

    monkeypatch.setattr(Turns, "__init__", traced)

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        layer = pyg_sar.distribute(gnn.GCNConv(CHANNELS, OUT).double())
        for step in range(3):
            current().barrier()
            if current().rank == 0 and step == 2:
                trace.clear()
            layer(data.x.clone().requires_grad_(), data.edge_index).sum().backward()

    host(worker, PARTS)
    assert len(trace) > 3 * 2 * PARTS
    # Part 0's last turn before the barrier has begun when the trace is cleared.
    kinds, parts = zip(*trace, strict=True)
    assert list(kinds) == ["end" if k % 2 == 0 else "begin" for k in range(len(trace))]
    assert all(parts[k] == parts[k + 1] for k in range(1, len(parts) - 1, 2))
    turns = [parts[0], *parts[1::2]]
    assert turns == [k % PARTS for k in range(len(turns))]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="processors are chosen on Linux, where there are two",
)
def test_a_parts_own_threads_compute_on_other_processors():
    """Where threads are as many as processors; processes that a part forks may use all of them."""
    everything = os.sched_getaffinity(0)

    def worker() -> tuple[set[int], list[set[int]], int]:
        before = set(os.listdir("/proc/self/task"))
        torch.ones(1 << 17).add_(1)
        new = [os.sched_getaffinity(int(t)) for t in set(os.listdir("/proc/self/task")) - before]
        child = os.fork()
        if child == 0:
            os._exit(os.sched_getaffinity(0) == everything)
        same = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return os.sched_getaffinity(0), new, same

    threads = torch.get_num_threads()
    try:
        for number in (len(everything), len(everything) - 1):
            torch.set_num_threads(number)
            for found, new, same in host(worker, 3):
                assert same == 1
                if number == len(everything):  # The threads are there already.
                    assert len(found) == 1 and found < everything and not new
                else:
                    assert found == everything
            assert os.sched_getaffinity(0) == everything
    finally:
        torch.set_num_threads(threads)


# Failures #####################################################################


def meet_at(rank: int, do: Callable[[], Any]) -> Callable[[], None]:
    """A worker whose part ``rank`` does something else at the second meeting."""

    def worker() -> None:
        comm = current()
        comm.barrier()
        if comm.rank == rank:
            do()
            return
        comm.barrier()

    return worker


def broken() -> None:
    raise ValueError("broken")


def parts_left() -> list[str]:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate() if t.name.startswith("pyg_sar part")]
        if not names:
            return []
        time.sleep(0.01)
    return names


def test_a_part_raises():
    with pytest.raises(ValueError, match="broken") as failed:
        pyg_sar.run(meet_at(2, broken), parts=4, timeout=30.0)
    assert failed.value.__notes__ == ["in part 2"]
    assert parts_left() == []
    with pytest.raises(WorkerError, match="^Rank 2 failed: ValueError: broken") as lost:
        pyg_sar.launch(meet_at(2, broken), 2, parts=4, timeout=30.0)
    assert lost.value.rank == 2


def test_a_tensor_of_a_run_that_has_ended():
    out = pyg_sar.run(lambda: pyg_sar.scatter(Data(x=torch.ones(4, 1))).x, parts=2)[0]
    with pytest.raises(PygSarError, match=r"run that has ended: return out\.full_tensor\(\)"):
        float(out.sum())


def test_a_part_ends_early():
    with pytest.raises(MismatchError, match=r"part 0 waits for .*part 2's program has ended"):
        pyg_sar.run(meet_at(2, lambda: None), parts=4, timeout=30.0)
    with pytest.raises(WorkerError, match=r"part 3 waits for .*part 2's program has ended"):
        pyg_sar.launch(meet_at(2, lambda: None), 2, parts=4, timeout=30.0)


def test_a_call_that_one_part_makes():
    other = meet_at(2, lambda: current().all_gather(torch.ones(3)))
    with pytest.raises(MismatchError, match=r"expects 'all_gather .* which sends 'all_reduce"):
        pyg_sar.run(other, parts=4, timeout=30.0)
    with pytest.raises(WorkerError, match=r"MismatchError: Rank \d expects"):
        pyg_sar.launch(other, 2, parts=4, timeout=30.0)


def test_a_transfer_that_ends_between_two_looks():
    """Nothing is under way any more, and just that has ended the part's wait."""
    ended: list[bool] = []
    turns = Turns([0], no_check, lambda: bool(ended.append(True)), lambda _: None, lambda _: None)
    turns.begin(0)
    turns.wait(0, lambda: bool(ended), "rows")
    assert turns.record is None and ended


@pytest.mark.parametrize("where", [[1], [2, 3]], ids=["a part", "a worker"])
def test_two_operations_in_another_order(where: list[int]):
    def worker() -> None:
        comm = current()
        calls = [lambda: comm.all_reduce(torch.ones(3)), lambda: comm.broadcast(torch.ones(2))]
        for call in calls[::-1] if comm.rank in where else calls:
            call()

    with pytest.raises(MismatchError, match="look for a call that only some ranks make"):
        pyg_sar.run(worker, parts=4, timeout=30.0)
    with pytest.raises(WorkerError, match="look for a call that only some ranks make"):
        pyg_sar.launch(worker, 2, parts=4, timeout=30.0)


INTERRUPTED = """
import _thread, signal, threading, time
import pyg_sar

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.

def worker():
    comm, then = pyg_sar.comm.current(), 0.0
    while True:
        # Again after a while: Python loses an interrupt that comes while it collects garbage.
        if comm.rank == 1 and time.monotonic() > then:
            then = time.monotonic() + 5
            _thread.interrupt_main()
        comm.barrier()

try:
    pyg_sar.run(worker, parts=4, timeout=30.0)
except KeyboardInterrupt:
    end = time.monotonic() + 20
    while any(t.name.startswith("pyg_sar part") for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    print("interrupted")
"""


def test_interrupted():
    """In a process of its own, which the interrupt may reach at any place."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "interrupted\n", done.stderr


@pytest.mark.parametrize("waits", ["meeting", "message"])
def test_a_worker_is_killed(waits: str):
    def worker() -> None:
        comm = current()
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if waits == "meeting":
            comm.barrier()
        there, back = (comm.rank + 2) % 4, (comm.rank - 2) % 4
        comm.exchange(torch.ones(2), there, torch.empty(2), back, label=LABEL).wait()

    with pytest.raises(LostWorkerError, match="Rank 1 was lost: it was killed by SIGKILL"):
        pyg_sar.launch(worker, 2, parts=4, timeout=30.0)


def test_messages_are_matched_in_the_order_of_posts():
    """Not in that of waits, be it within a process or between two."""

    def worker() -> list[float]:
        comm = current()
        there, back = (comm.rank + 1) % 4, (comm.rank - 1) % 4
        into = [torch.empty(2), torch.empty(2)]
        works = [
            comm.exchange(torch.full((2,), float(k)), there, into[k], back, label=LABEL)
            for k in range(2)
        ]
        for work in works[::-1]:
            work.wait()
        return [float(tensor[0]) for tensor in into]

    assert pyg_sar.run(worker, parts=4, timeout=30.0) == [[0.0, 1.0]] * 4
    assert pyg_sar.launch(worker, 3, parts=4, timeout=30.0) == [[0.0, 1.0]] * 4


def test_a_model_in_the_arguments(root: Path):
    """Each part of launch() has its own, as each worker has."""

    def worker(conv: torch.nn.Module) -> Tensor:
        data = pyg_sar.load_partition(root)
        pyg_sar.distribute(conv)(data.x, data.edge_index).square().sum().backward()
        return next(conv.parameters()).grad

    conv = gnn.GCNConv(CHANNELS, OUT).double()
    one, two = (pyg_sar.launch(worker, w, conv, parts=PARTS, timeout=30.0) for w in (1, 2))
    assert all(torch.equal(found, one[0]) for found in [*one, *two])


@pytest.mark.parametrize("parts", [True, 0, -1, "8", 2.0])
def test_no_number_of_parts(parts: Any):
    said = rf"'parts' to be an integer of at least 1 \(got {parts!r}\)"
    with pytest.raises(ValueError, match=said):
        pyg_sar.launch(print, 1, parts=parts)
    with pytest.raises(ValueError, match=said):
        pyg_sar.run(print, parts=parts)


def test_refused(root: Path):
    with pytest.raises(ValueError, match=r"hosted by 1 to 3 workers \(got 4\); start fewer"):
        pyg_sar.launch(print, 4, parts=3)
    with pytest.raises(ValueError, match="needs backend='gloo'"):
        check_parts(4, 2, "nccl")
    with pytest.raises(ValueError, match="within a part, which hosts none"):
        pyg_sar.run(lambda: pyg_sar.run(print, parts=2), parts=2)
    with pytest.raises(ValueError, match=f"{PARTS}"):
        pyg_sar.run(lambda: pyg_sar.load_partition(root), parts=3)


def ask_the_default_group() -> list[str]:
    """What calls of ``torch.distributed`` without a group say in a part."""
    found = []
    value = torch.ones(1)
    for ask in (dist.barrier, lambda: dist.all_reduce(value)):
        with pytest.raises((PygSarError, ValueError)) as caught:
            ask()
        found.append(str(caught.value))
    total = current().all_reduce(value)
    assert total.item() == value.item() == 3
    assert (dist.get_rank(), dist.get_world_size()) == (current().rank, 3)
    assert len(list(DataLoader(range(4)))) == 4  # It asks for both.
    return found


def default_group_after(store: str) -> tuple[Any, float]:
    """The same in a worker, which has its group again when the parts have ended."""
    rank = current().rank
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = pyg_sar.run(ask_the_default_group, parts=3)
    value = torch.ones(1)
    dist.all_reduce(value)
    return found, value.item()


def test_the_scripts_group_is_refused_in_parts(tmp_path: Path):
    """Its sums would be those of one part of each worker."""
    store = str(tmp_path / "store")
    for found, total in pyg_sar.launch(default_group_after, 2, store, backend="gloo"):
        for text in itertools.chain(*found):
            assert "of the 2 workers, not of the 3 parts" in text
            assert "pyg_sar.comm.current()" in text
        assert total == 2


def test_runs_follow_each_other():
    def rank() -> tuple[int, int]:
        return current().rank, current().world_size

    assert pyg_sar.run(rank, parts=3) == [(0, 3), (1, 3), (2, 3)]
    assert pyg_sar.run(rank, parts=2) == [(0, 2), (1, 2)]
    assert pyg_sar.run(rank) == [(0, 1)]


def test_what_only_cycles_keep_alive_is_freed_before_the_end(monkeypatch):
    """Closing brings in the tensors that are still alive: beyond any limit of memory."""
    held: list[Any] = []

    def fn() -> None:
        cycle = Cycle()
        cycle.itself = cycle
        held.append(weakref.ref(cycle))

    found: list[bool] = []
    original = Host.close
    monkeypatch.setattr(
        Host, "close", lambda self: (found.extend(ref() is None for ref in held), original(self))
    )
    host(fn, 3)
    assert found == [True] * 3


class Cycle:
    itself: Any


# What parts must not share ####################################################


def taken(data: Data, model: torch.nn.Module) -> None:
    model(data.x, data.edge_index)


def computed_with(data: Data, model: torch.nn.Module) -> None:
    data.x.sum()


@pytest.mark.parametrize("use", [taken, computed_with])
def test_a_tensor_of_another_part_is_refused(use: Callable[..., None], tmp_path: Path):
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")
    first: list[Data] = []

    def fn() -> None:
        first.append(pyg_sar.load_partition(tmp_path / "parts"))
        layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT).double())
        current().barrier()
        use(first[0], layer)

    with pytest.raises(WorkerError, match="Part 1 got a tensor of part 0"):
        host(fn, 2)


def test_a_model_of_another_part_is_refused(tmp_path: Path):
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")
    layer = gnn.SAGEConv(CHANNELS, OUT).double()

    def fn() -> Any:
        data = pyg_sar.load_partition(tmp_path / "parts")
        return pyg_sar.distribute(layer)(data.x, data.edge_index)

    with pytest.raises(WorkerError, match="runs this model in the same process, and rank 1"):
        host(fn, 2)
    with pytest.raises(WorkerError, match="runs this model in the same process, and rank 1"):
        host(torch.no_grad()(fn), 2)


def of_a_module(data: Data, model: torch.nn.Module, weight: Tensor) -> Tensor:
    return model(data.x)


def of_a_layer(data: Data, model: torch.nn.Module, weight: Tensor) -> Tensor:
    return gnn.SimpleConv()(data.x * weight[:CHANNELS, 0], data.edge_index)


def of_a_table(data: Data, model: torch.nn.Module, weight: Tensor) -> Tensor:
    return data.x * weight


def of_read_rows(data: Data, model: torch.nn.Module, weight: Tensor) -> Tensor:
    return weight[data.y]


@pytest.mark.parametrize("use", [of_a_module, of_a_layer, of_a_table, of_read_rows])
def test_a_leaf_of_another_part_is_refused(use: Callable[..., Tensor], tmp_path: Path):
    """It would get each part's gradient, and each part's step; or parts would wait for its lock."""
    graph = make_graph()
    pyg_sar.write_partitions(graph, 2, tmp_path / "parts", "random")
    model = torch.nn.Linear(CHANNELS, OUT).double()
    weight = torch.ones_like(graph.x, requires_grad=True)
    weight.grad = torch.zeros_like(weight)

    def fn() -> None:
        use(pyg_sar.load_partition(tmp_path / "parts"), model, weight).sum().backward()

    with pytest.raises(WorkerError, match=r"Parts 0 and 1 .* use the same tensor .* a parameter"):
        host(fn, 2)


def test_statistics_and_a_generator_of_another_part_are_refused(tmp_path: Path):
    """Each part would move the statistics, and draw what the one before it has left."""
    graph = make_graph()
    root = Partitions(tmp_path)(graph, 2, "random")
    norm = torch.nn.BatchNorm1d(CHANNELS, affine=False).double()
    shared = torch.Generator().manual_seed(3)

    def normalise() -> None:
        norm(pyg_sar.load_partition(root).x)

    def drop(generator: torch.Generator) -> Tensor:
        x = pyg_sar.load_partition(root).x
        return (x * torch.empty_like(x).bernoulli_(0.5, generator=generator)).sum(0)

    with pytest.raises(WorkerError, match=r"Parts 0 and 1 .* running statistics of a norm"):
        host(normalise, 2)
    with pytest.raises(WorkerError, match=r"generators of rank 1 and rank 0 are in different"):
        host(lambda: drop(shared), 2)
    x, own = graph.x, torch.Generator().manual_seed(3)
    expected = (x * torch.empty_like(x).bernoulli_(0.5, generator=own)).sum(0)
    for found in host(lambda: drop(torch.Generator().manual_seed(3)), 2):
        assert error(found, expected) < 1e-12


COPIED: dict[str, Callable[[], torch.nn.Module]] = {
    "batch": lambda: gnn.GCN(CHANNELS, 8, 2, OUT, norm="batch_norm"),
    "layer": lambda: gnn.GCN(CHANNELS, 8, 2, OUT, norm="layer_norm"),
    "graph": lambda: gnn.GCN(CHANNELS, 8, 2, OUT, norm="graph_norm"),
    "instance": lambda: gnn.GCN(CHANNELS, 8, 2, OUT, norm="instance_norm"),
    "pair": lambda: gnn.GCN(CHANNELS, 8, 2, OUT, norm="pair_norm"),
    "within a layer": lambda: gnn.GIN(CHANNELS, 8, 2, OUT, norm="batch_norm"),
}


@pytest.mark.parametrize("name", COPIED)
def test_copies_of_a_model_that_one_process_distributed(name: str, tmp_path: Path) -> None:
    """Norms that had all rows there count those of all parts here."""

    def gradients(model: torch.nn.Module, data: Any) -> list[Tensor]:
        model(data.x, data.edge_index).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    graph = make_graph()
    root = Partitions(tmp_path)(graph, 2, "random")
    model = COPIED[name]().double()
    expected = gradients(copy.deepcopy(model), graph)
    model = pyg_sar.distribute(model)
    for found in host(lambda: gradients(copy.deepcopy(model), pyg_sar.load_partition(root)), 2):
        assert max(error(*pair, 1.0) for pair in zip(found, expected, strict=True)) < 1e-10
