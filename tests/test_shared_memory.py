"""Workers of one host that share memory: exact, counted, mixed with the network, and cleaned up."""

from __future__ import annotations

import copy
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import (
    CHANNELS,
    OUT,
    TOLERANCE,
    Job,
    Partitions,
    Sweep,
    assert_small,
    errors,
    make_graph,
    run_jobs,
    workers,
)
from torch_geometric import nn as gnn

import pyg_sar.comm.processes as processes
import pyg_sar.comm.sharing as neighbours
from pyg_sar import Ledger, SARPolicy, distribute, load_partition
from pyg_sar.comm.backends import SMALL_SUM, TransportError
from pyg_sar.comm.group import Communicator, current, finalize, init
from pyg_sar.comm.launch import launch
from pyg_sar.comm.shared_memory import Link, SharedMemory
from pyg_sar.errors import MismatchError
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.halo_rows import HaloSink, HaloSource, published_rows
from pyg_sar.exchange.rows import Travel, add_distinct_rows, add_rows

SWITCH = "PYG_SAR_SHARED_MEMORY"
SHARED = "shared memory"
LABEL = ("conv", "forward", "fetch")

POLICIES = (
    SARPolicy(mode=1, prefetch=0),
    SARPolicy(mode=1, prefetch=1, message_budget=600),
    SARPolicy(mode=1, prefetch=1),
    SARPolicy(mode=2, prefetch=1),
    SARPolicy(mode=3),
    SARPolicy(mode=1, prefetch=1, strategy="chunked"),
)
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
}


def make_sweep(world: int, partitions: Partitions, names: tuple[str, ...], **kw: Any) -> Sweep:
    """Layers on a random partition, and one whose second part is empty."""
    data = make_graph(41, 220)
    sparse = torch.arange(41) % world
    sparse[sparse == 1] = world - 1 if world > 2 else 0
    sweep = Sweep(world)
    for name in names:
        for part in ("random", sparse):
            job = Job(LAYERS[name]().double(), partitions(data, world, part), **kw)
            sweep.add(name, job, data)
    return sweep


# Exactness ###################################################################


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_layers_are_exact(world, switch, partitions, monkeypatch):
    monkeypatch.setenv(SWITCH, switch)
    make_sweep(world, partitions, tuple(LAYERS), policies=POLICIES[:4]).check()


WORLD = 5
HOSTS = (0, 0, 1, 1, 0)


def join(switch: str, hosts: tuple[int, ...] | None = None) -> Communicator:
    """Leaves the group and joins it anew, on a host of that number."""
    rank = current().rank
    finalize()
    os.environ[SWITCH] = switch
    if hosts is not None:
        processes._host = lambda: f"host {hosts[rank]}"  # type: ignore[assignment]
    return init(timeout=60)


def counted(jobs: list[Job]) -> tuple[Any, Any, Any]:
    """Results, bytes by (layer, phase, kind, peer, way), bytes by (peer, transport)."""
    comm = current()
    with Ledger(comm) as ledger:
        found = run_jobs(jobs)
    by_label = {
        (*label, peer, transport, way): number
        for counts, way in ((ledger._sent, "out"), (ledger._received, "in"))
        for (label, peer, transport), number in counts.items()
    }
    return found, by_label, ledger.peak_resident_rows()


def in_three_ways(jobs: list[Job]) -> list[Any]:
    """All workers on one host; on two; sharing nothing."""
    found = []
    for switch, hosts in (("1", None), ("auto", HOSTS), ("0", None)):
        comm = join(switch, hosts)
        near = sorted(comm.sharing.ranks) if comm.sharing else []
        found.append((near, *counted(jobs)))
    return found


def test_processes_on_one_host_on_two_and_apart(partitions):
    """One host, two hosts of three and two workers, and the network alone: the same numbers."""
    # Chosen here: by itself ('auto') what is pushed depends on the hosts.
    policies = tuple(replace(p, push="off") for p in POLICIES)
    sweep = make_sweep(WORLD, partitions, ("sage", "gat"), policies=policies)
    found = launch(in_three_ways, WORLD, sweep.jobs, timeout=120)
    same = [[q for q in range(WORLD) if HOSTS[q] == HOSTS[p] and q != p] for p in range(WORLD)]
    others = [[q for q in range(WORLD) if q != p] for p in range(WORLD)]
    for way, near in enumerate((others, same, [[]] * WORLD)):
        assert [worker[way][0] for worker in found] == near
        for k, job in enumerate(sweep.jobs):
            for step, policy in enumerate(job.policies):
                results = [worker[way][1][k][step] for worker in found]
                title = f"{job.title}, way {way}, {policy}"
                assert_small(errors(results, sweep.expected[k]), TOLERANCE, title)
    for rank, worker in enumerate(found):
        halo = [
            {
                (layer, phase, kind, peer, end): number
                for (layer, phase, kind, peer, _, end), number in ways[2].items()
                if kind != "plan" and peer >= 0
            }
            for ways in worker
        ]
        assert halo[0] == halo[1] == halo[2] and halo[0]
        assert worker[0][3] == worker[1][3] == worker[2][3] > 0
        for way, near in enumerate((others, same, [[]] * WORLD)):
            carriers = {(key[3], key[4]) for key in worker[way][2] if key[3] >= 0}
            assert {peer for peer, how in carriers if how == SHARED} == set(near[rank])
            far = {peer for peer, how in carriers if how == "gloo"}
            assert far == set(others[rank]) - set(near[rank])


# What is published ###########################################################


def ring_plan(comm: Communicator, rows: int) -> HaloPlan:
    """Each worker needs the first rows of every other, the more the farther, some not at all."""
    wanted = lambda p, q: 0 if p == q else (q - p) % comm.world_size + 1  # noqa: E731
    halo = [wanted(comm.rank, q) for q in range(comm.world_size)]
    sends = [wanted(q, comm.rank) for q in range(comm.world_size)]
    index = torch.cat([torch.arange(n).flip(0) * 2 for n in sends])
    return HaloPlan(comm, rows, halo, index, sends)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_are_read_where_they_are(world, prefetch):
    """By who finds them by an index: no buffer is made, and what is counted is the same."""

    def work() -> None:
        comm = current()
        plan = ring_plan(comm, 40)
        assert comm.sharing is not None
        tensors = [torch.rand(40, 3), torch.rand(40, 2, 2).double(), torch.rand(40)]
        counted = []
        for in_place in (False, True):
            borrowed, found = [], []
            with Ledger(comm) as ledger:
                source = HaloSource(plan, tensors, Travel(LABEL, prefetch, in_place=in_place))
                for unit in range(plan.world_size):
                    rows = source.open(unit)
                    every = torch.arange(len(rows.tensors[0])) if rows.index is None else rows.index
                    found += [part.index_select(0, every) for part in rows.tensors]
                    published = published_rows(plan, comm.sharing).count
                    where_it_lies = unit > 0 and in_place
                    assert (rows.index is not None) == where_it_lies
                    if where_it_lies:
                        borrowed.append(rows.tensors[0].data_ptr())
                        assert {part.size(0) for part in rows.tensors} == {published}
                        assert ledger.resident_rows() == rows.index.numel()
                    del rows
                    source.close(unit)
                source.finish()
                assert ledger.resident_rows() == 0
            largest = max(plan.halo_counts)
            assert not in_place or ledger.peak_resident_rows() == largest
            ways = ledger.received_bytes(kind="fetch"), ledger.sent_bytes(kind="fetch")
            counted.append((found, *ways))
            assert len(set(borrowed)) == len(borrowed)
        assert all(map(torch.equal, counted[0][0], counted[1][0]))
        assert counted[0][1:] == counted[1][1:]

    workers(work, world)


@pytest.mark.parametrize("piece", [neighbours.PIECE, 40])
def test_rows_are_published_once_for_all_neighbours(piece):
    """One buffer per dtype and stream, with just the rows that anybody needs, and one per send.

    Also where these are read in pieces of two rows or three.
    """

    def work() -> Any:
        neighbours.PIECE = piece
        comm = current()
        assert comm.sharing is not None
        plan = ring_plan(comm, 40)
        published_rows(plan, comm.sharing)  # Workers tell each other, once.
        near = comm.sharing.local_peers
        sizes: list[int] = []
        take = near.take

        def taking(size: int) -> Any:
            sizes.append(size)
            return take(size)

        near.take = taking  # type: ignore[method-assign]
        own = torch.arange(40.0).view(40, 1) + 100 * comm.rank
        tensors = [own.expand(40, 3), own.double().view(40, 1, 1).expand(40, 2, 2), own[:, 0]]
        source = HaloSource(plan, tensors, Travel(LABEL))
        for unit in range(plan.world_size):
            rows = source.open(unit).tensors
            owner = plan.peers[unit][0]
            count = plan.halo_counts[owner] or 40
            there = torch.arange(40.0) if owner == comm.rank else torch.arange(count).flip(0) * 2.0
            for k, part in enumerate(rows):
                expected = (there + 100 * owner).to(part.dtype)
                for column in part.reshape(count, -1).unbind(1):
                    assert torch.equal(column, expected), (k, owner)
            del part, rows
            source.close(unit)
        source.finish()
        published, sizes[:] = sizes[:], []
        totals = [torch.zeros(40, 3), torch.zeros(40, 2, dtype=torch.float64)]
        back = HaloSink(plan, totals, Travel(LABEL))
        for unit in range(plan.world_size):
            for part in back.open(unit):
                part += 1.0
            back.close(unit)
        back.finish()
        shared = published_rows(plan, comm.sharing)
        return shared.count, shared.rows, published, sizes, plan.halo_counts, totals

    world = 4
    for count, rows, published, lent, halo, totals in workers(work, world):
        assert rows.tolist() == [0, 2, 4, 6] and count == world
        assert published == [count * 4 * 4, count * 4 * 8]  # float32: 3 + 1 columns; float64: 4
        assert sorted(lent) == sorted(n * b for n in halo if n for b in (12, 16))
        needed = [sum(2 * k < 2 * n and j == 2 * k for n in (2, 3, 4) for k in range(n))
                  for j in range(40)]  # fmt: skip
        for total in totals:
            assert total[:, 0].tolist() == [1.0 + n for n in needed]


def test_most_rows_are_published_as_they_are():
    """Where neighbours need most rows, gathering these costs more than copying all."""

    def work(number: int) -> Any:
        comm = current()
        assert comm.sharing is not None
        counts = [0 if q == comm.rank else number for q in range(2)]
        plan = HaloPlan(comm, 5, counts, torch.tensor([4, 2, 0, 1])[:number], counts)
        own = torch.arange(5.0).view(5, 1) + 10 * comm.rank
        source = HaloSource(plan, [own], Travel(LABEL, 0))
        source.open(0)
        fetched = source.open(1).tensors[0].clone()
        source.finish()
        shared = published_rows(plan, comm.sharing)
        return None if shared.rows is None else shared.rows.tolist(), shared.count, fetched

    for number, expected in ((4, (None, 5)), (2, ([2, 4], 2))):
        for rank, (rows, count, fetched) in enumerate(workers(work, 2, number)):
            assert (rows, count) == expected
            assert fetched[:, 0].tolist() == [n + 10 * (1 - rank) for n in [4, 2, 0, 1][:number]]


# Overlap #####################################################################


@pytest.mark.parametrize("switch", ["0", "1"])
def test_gradients_stay_in_flight(switch, monkeypatch, tmp_path):
    """With ``prefetch=1`` a worker goes on while its peers still compute theirs.

    Where workers share memory, always; else unless shards are fetched meanwhile, whose buffers
    are all that the policy affords.
    """
    monkeypatch.setenv(SWITCH, switch)

    def work(in_flight: bool) -> Any:
        comm, gone_on = current(), tmp_path / f"gone on {in_flight}"
        plan = ring_plan(comm, 10)
        total = torch.zeros(10, 2)
        back = HaloSink(plan, [total], Travel(LABEL, in_flight=in_flight))
        for unit in range(1, plan.world_size):
            if comm.rank > 0 and unit == 1:
                end = time.monotonic() + 60
                while not gone_on.exists():
                    assert time.monotonic() < end
                    time.sleep(0.001)
            back.open(unit)[0].fill_(comm.rank + 1.0)
            back.close(unit)
            if comm.rank == 0:
                gone_on.touch()
        back.finish()
        return total[:, 0].tolist()

    for in_flight in (True, False):
        if in_flight or switch == "1":
            found = workers(work, 3, in_flight)
            # Worker p needs 2 rows of p + 1 and 3 of p + 2.
            for rank, total in enumerate(found):
                before, behind = (rank - 1) % 3 + 1.0, (rank + 1) % 3 + 1.0
                both = before + behind
                assert total == [both, 0, both, 0, behind, 0, 0, 0, 0, 0]

    def leaves(in_flight: bool | None) -> bool:
        plan = ring_plan(current(), 10)
        back = HaloSink(plan, [torch.zeros(10, 2)], Travel(LABEL, in_flight=in_flight))
        left = []
        for unit in range(1, plan.world_size):
            back.open(unit)
            back.close(unit)
            left.append(back._pending is not None)
        back.finish()
        return any(left)

    assert workers(leaves, 3, None) == [False] * 3
    assert workers(leaves, 3, False) == [switch == "1"] * 3


# What comes back #############################################################


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ascending", [True, False])
def test_distinct_rows_are_added_as_any_others(ascending, dtype):
    """To the bit; also columns of wider rows, and where the index is in no order."""
    buffer, index = torch.randn(7, 18).to(dtype), torch.randperm(13)[:7]
    index = index.sort()[0] if ascending else index.sort(descending=True)[0]
    for rows in (buffer, buffer[:, :15].unflatten(1, (3, 5)), buffer[:, 15:], buffer[:0, :4]):
        total = torch.randn(13, *rows.shape[1:]).to(dtype)
        expected = total.clone()
        add_rows(expected, index[: rows.size(0)], rows)
        add_distinct_rows(total, index[: rows.size(0)], rows)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_own_edges_come_while_the_last_gradients_travel(kernels, partitions):
    """Nothing is left to travel at depth 0; the gradients are the same to the bit."""
    data = make_graph(41, 220)
    root, layer = partitions(data, 3, "random"), LAYERS["sage"]().double()

    def work(prefetch: int) -> tuple[list[int], torch.Tensor]:
        started, start = [], HaloSink.open

        def starting(self: HaloSink, unit: int) -> list[torch.Tensor]:
            started.append(unit)
            return start(self, unit)

        HaloSink.open = starting
        mine = load_partition(root)
        policy = SARPolicy(prefetch=prefetch, kernels=kernels, push="off")
        x = mine.x.clone().requires_grad_()
        distribute(copy.deepcopy(layer), policy)(x, mine.edge_index).square().sum().backward()
        return started, x.grad.full_tensor()

    gradients = []
    for prefetch, order in ((0, [1, 0, 2]), (1, [1, 2, 0])):
        found = workers(work, 3, prefetch)
        assert [started for started, _ in found] == [order] * 3
        gradients += [gradient for _, gradient in found]
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


# Small sums ##################################################################


@pytest.fixture
def connected() -> Iterator[Callable[..., list[neighbours.Sharing]]]:
    """Workers of one host, here in one process, each with its connections to the others."""
    made: list[SharedMemory] = []

    def connect(world: int, timeout: float = 20.0) -> list[neighbours.Sharing]:
        links: list[dict[int, Link]] = [{} for _ in range(world)]
        for a, b in itertools.combinations(range(world), 2):
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
            for k, (one, other) in enumerate(((a, b), (b, a))):
                ends = [pair[k] for pair in pairs]
                for end in ends:
                    end.setblocking(False)
                links[one][other] = Link(other, ends[0], ends[1], set(), {}, [])
        workers = [SharedMemory(rank, links[rank], timeout, True) for rank in range(world)]
        made.extend(workers)
        return [neighbours.Sharing(one, one.rank, None, []) for one in workers]

    yield connect
    for one in made:
        one.close()


def at_once(
    workers: list[neighbours.Sharing], run: Callable[[neighbours.Sharing], Any]
) -> list[Any]:
    with ThreadPoolExecutor(len(workers)) as pool:
        return [task.result() for task in [pool.submit(run, worker) for worker in workers]]


SUMMED = [torch.float32, torch.float64, torch.half, torch.bfloat16, torch.complex64]
SUMMED += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_small_sums_are_sums_in_rank_order(connected, world):
    """To the bit, many in a row, some before others have read the last; up to 16 KiB."""
    generator = torch.Generator().manual_seed(world)
    given = []
    for turn, dtype in enumerate(SUMMED * 5):
        shape = (world, *((), (3, 5), (SMALL_SUM // dtype.itemsize,))[turn % 3])
        values = torch.randn(shape, generator=generator) * 10.0 ** (turn % 4)
        given.append(values > 0 if dtype == torch.bool else values.to(dtype))
    given = [g.clamp(min=0) if g.dtype == torch.uint8 else g for g in given]

    def run(worker: neighbours.Sharing) -> list[torch.Tensor]:
        found = [each[worker.rank].clone() for each in given]
        for tensor in found:
            assert worker.reduces(tensor)
            worker.all_reduce(tensor, "sum", "sum")
        return found

    everyones = at_once(connected(world), run)
    for k, values in enumerate(given):
        total = values[0].float() if values.dtype in (torch.half, torch.bfloat16) else values[0]
        for other in values[1:]:
            total = total + other
        for found in everyones:
            assert torch.equal(found[k], total.to(values.dtype)), values.dtype


@pytest.mark.parametrize("op", ["max", "min"])
def test_small_extremes(connected, op):
    given = torch.tensor([[1.0, -2.0], [0.5, 7.0], [3.0, -3.0]])

    def run(worker: neighbours.Sharing) -> torch.Tensor:
        found = given[worker.rank].clone()
        worker.all_reduce(found, op, op)
        return found

    for found in at_once(connected(3), run):
        assert torch.equal(found, getattr(given, f"a{op}")(0))


def test_what_is_no_small_sum_of_this_host_goes_by_the_network(connected):
    worker = connected(2)[0]
    assert worker.reduces(torch.zeros(SMALL_SUM // 4))
    assert not worker.reduces(torch.zeros(SMALL_SUM // 4 + 1))
    assert not worker.reduces(torch.zeros(1, device="meta"))
    worker.local_peers.complete = False
    assert not worker.reduces(torch.zeros(1))


def test_a_sum_among_other_messages(connected):
    """A publication that is read later stays where it is; a sum before it doesn't take it."""
    first, second = connected(2)

    def run(worker: neighbours.Sharing) -> torch.Tensor:
        total = torch.ones(2)
        if worker is first:
            buffer = worker.local_peers.take(8)
            buffer.data.fill_(5)
            worker.local_peers.send(buffer, neighbours.Subject.ROWS, [1], "rows")
        worker.all_reduce(total, "sum", "sum")
        if worker is second:
            message = worker.local_peers.receive(0, neighbours.Subject.ROWS, "rows")
            assert message.data.tolist() == [5] * 8
        return total

    assert all(total.tolist() == [2, 2] for total in at_once([first, second], run))


def test_a_sum_that_a_worker_never_joins(connected):
    first, _ = connected(2, timeout=0.05)
    with pytest.raises(TimeoutError, match="waiting for rank 1 to send"):
        first.all_reduce(torch.ones(1), "sum", "sum")
    first, second = connected(2)
    second.local_peers.close()
    with pytest.raises(TransportError, match="rank 1"):
        first.all_reduce(torch.ones(1), "sum", "sum")
    first, second = connected(2)
    with ThreadPoolExecutor(1) as pool:  # It waits already when the other one dies.
        waiting = pool.submit(first.all_reduce, torch.ones(1), "sum", "sum")
        while not first.local_peers.posts.waits:
            pass
        second.local_peers.abort()
        with pytest.raises(TransportError, match="rank 1"):
            waiting.result()


def test_sums_of_other_shapes_are_told_apart(connected):
    workers = connected(2)

    def run(worker: neighbours.Sharing) -> None:
        with pytest.raises(MismatchError, match="float32"):
            worker.all_reduce(torch.ones(1 + worker.rank), "sum", "sum")

    at_once(workers, run)
