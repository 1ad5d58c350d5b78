"""The communicator: every operation, with every kind of payload, of processes and of parts."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from oracle import parts, workers

from pyg_sar.comm.agreement import raised_everywhere
from pyg_sar.comm.group import Communicator, current, finalize, init
from pyg_sar.comm.launch import launch
from pyg_sar.errors import CommTimeoutError, LostWorkerError, PygSarError, WorkerError
from pyg_sar.ledger import Ledger

WORLD = 3
FETCH = ("conv", "forward", "fetch")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def numbers(rows: int, src: int, dst: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``src`` sends to ``dst``: different for every pair, and exact in every dtype."""
    values = (torch.arange(rows * 2) + 3 * src + dst) % 7
    return values.view(rows, 2).to(dtype)


# Checks, run by every worker #################################################


def check_place(comm: Communicator, folder: Path) -> None:
    assert comm.world_size == WORLD
    assert current() is comm
    assert init() is comm
    ranks = comm.all_gather(torch.tensor([comm.rank]))
    assert torch.cat(ranks).tolist() == list(range(WORLD))


def check_exchange(comm: Communicator, folder: Path) -> None:
    for dtype in DTYPES:
        for r in range(1, WORLD):
            dst, src = (comm.rank + r) % WORLD, (comm.rank - r) % WORLD
            # Uneven, and empty from rank 0 to rank 1 and in between where both are 1 apart.
            rows = {
                pair: 5 * pair[0] + (pair[1] - 1) for pair in ((comm.rank, dst), (src, comm.rank))
            }
            sent, got = (max(0, rows[p]) for p in ((comm.rank, dst), (src, comm.rank)))
            recv = torch.zeros(got, 2, dtype=dtype)
            with Ledger(comm) as ledger:
                send = numbers(sent, comm.rank, dst, dtype)
                comm.exchange(send, dst, recv, src, label=FETCH).wait()
            assert torch.equal(recv, numbers(got, src, comm.rank, dtype)), (dtype, r)
            size = 2 * dtype.itemsize
            assert ledger.sent == ledger.sent_bytes(peer=dst, kind="fetch") == sent * size
            assert ledger.received == ledger.received_bytes(peer=src) == got * size


def check_one_sided_exchange(comm: Communicator, folder: Path) -> None:
    """Only rank 0 sends, only rank 2 receives; rank 1 calls it all the same."""
    recv = torch.zeros(3)
    send = torch.ones(3) if comm.rank == 0 else None
    comm.exchange(send, 2, recv if comm.rank == 2 else None, 0, label=FETCH).wait()
    assert recv.sum() == (3 if comm.rank == 2 else 0)


def check_strided_send(comm: Communicator, folder: Path) -> None:
    dst, src = (comm.rank + 1) % WORLD, (comm.rank - 1) % WORLD
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:].flip(0), lambda t: t[0, 0]):
        send = view(torch.arange(12.0).view(3, 4) + comm.rank)
        expected = view(torch.arange(12.0).view(3, 4) + src)
        recv = torch.zeros(expected.shape)
        comm.exchange(send, dst, recv, src, label=FETCH).wait()
        assert torch.equal(recv, expected)
    send = torch.tensor([1 + 2j]).conj()
    landing = torch.zeros(1, dtype=torch.complex64)
    comm.exchange(send, dst, landing, src, label=FETCH).wait()
    assert landing.item() == 1 - 2j


def check_receive_into_a_slice(comm: Communicator, folder: Path) -> None:
    """Data lands in the caller's memory, not in a copy of it."""
    dst, src = (comm.rank + 1) % WORLD, (comm.rank - 1) % WORLD
    buffer = torch.zeros(6, 2)
    comm.exchange(torch.full((2, 2), comm.rank + 1.0), dst, buffer[2:4], src, label=FETCH).wait()
    assert buffer.sum(1).tolist() == [0, 0, 2 * (src + 1), 2 * (src + 1), 0, 0]


def check_exchange_all(comm: Communicator, folder: Path) -> None:
    me = comm.rank
    sends = [None if p == me else numbers(p * me, me, p, torch.float32) for p in range(WORLD)]
    packed = [None if s is None else partial(torch.clone, s) for s in sends]
    recvs = [None if p == me else torch.zeros(p * me, 2) for p in range(WORLD)]
    with Ledger(comm) as ledger:
        comm.exchange_all(packed, recvs, label=FETCH).wait()
    for p in range(WORLD):
        recv = recvs[p]
        if recv is not None:
            assert torch.equal(recv, numbers(p * me, p, me, torch.float32))
            assert ledger.received_bytes(peer=p) == ledger.sent_bytes(peer=p) == p * me * 2 * 4


def check_order_under_prefetch(comm: Communicator, folder: Path) -> None:
    """Many transfers under way, collectives between them, waited for in any order."""
    works, buffers, sums = [], [], []
    for step in range(6):
        for r in range(1, WORLD):
            dst, src = (comm.rank + r) % WORLD, (comm.rank - r) % WORLD
            value = 100.0 * step + 10 * comm.rank + dst
            recv = torch.zeros(4)
            packed = partial(torch.full, (4,), value)
            works.append(comm.exchange(packed, dst, recv, src, label=FETCH))
            buffers.append((recv, 100.0 * step + 10 * src + comm.rank))
        total = torch.tensor([step + comm.rank])
        if step % 2:
            comm.all_reduce(total)
        else:
            works.append(comm.all_reduce_async(total))
        sums.append((total, WORLD * step + 3))
    for work in reversed(works):
        work.wait()
        assert work.done()
        work.wait()
    for recv, expected in buffers:
        assert recv.tolist() == [expected] * 4
    for total, expected in sums:
        assert total.item() == expected


def check_packing(comm: Communicator, folder: Path) -> None:
    """Packing sees this worker's communicator, records nothing; a worker's issuer does it."""
    seen: dict[str, Any] = {}
    weight = torch.ones(2, requires_grad=True)

    def pack() -> torch.Tensor:
        seen["thread"] = threading.current_thread()
        seen["comm"] = current()
        seen["grad"] = (weight * 2).requires_grad
        return weight * 2

    recv = torch.zeros(2)
    peers = (comm.rank + 1) % WORLD, (comm.rank - 1) % WORLD
    comm.exchange(pack, peers[0], recv, peers[1], label=FETCH).wait()
    assert recv.tolist() == [2, 2]
    assert (seen["thread"] is threading.current_thread()) == (comm.host is not None)
    assert seen["comm"] is comm
    assert seen["grad"] is False


class Shift(torch.autograd.Function):
    """Gives every worker its left neighbour's rows; the gradient goes back."""

    @staticmethod
    def forward(ctx, x):
        return shifted(current(), x, 1, "forward")

    @staticmethod
    def backward(ctx, grad):
        return shifted(current(), grad, -1, "backward")


def shifted(comm: Communicator, x: torch.Tensor, by: int, phase: str) -> torch.Tensor:
    out = torch.empty_like(x)
    dst, src = (comm.rank + by) % WORLD, (comm.rank - by) % WORLD
    comm.exchange(lambda: x, dst, out, src, label=("shift", phase, "fetch")).wait()
    return out


def check_autograd(comm: Communicator, folder: Path) -> None:
    x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
    with Ledger(comm) as ledger:
        y = Shift.apply(Shift.apply(x))
        (y * (comm.rank + 1)).sum().backward()
    assert y.tolist() == [(comm.rank - 2) % WORLD + 1.0] * 2
    assert x.grad is not None
    assert x.grad.tolist() == [(comm.rank + 2) % WORLD + 1.0] * 2
    assert ledger.sent_bytes(phase="backward") == ledger.sent_bytes(phase="forward") == 16
    with torch.inference_mode():
        assert shifted(comm, torch.ones(1) * comm.rank, 1, "forward") == (comm.rank - 1) % WORLD


def check_all_reduce(comm: Communicator, folder: Path) -> None:
    for dtype in DTYPES:
        parts = [numbers(4, p, 0, dtype) for p in range(WORLD)]
        everything = torch.stack(parts)
        if dtype == torch.bool:
            expected = {
                "sum": everything.any(0),
                "max": everything.any(0),
                "min": everything.all(0),
            }
        else:
            expected = {"sum": everything.sum(0).to(dtype)}
            if not dtype.is_complex:
                expected |= {"max": everything.amax(0), "min": everything.amin(0)}
        for op, value in expected.items():
            mine = parts[comm.rank].clone()
            with Ledger(comm) as ledger:
                assert comm.all_reduce(mine, op) is mine
            assert torch.equal(mine, value), (dtype, op)
            assert ledger.sent == ledger.received == mine.numel() * dtype.itemsize
            assert ledger.sent_bytes(peer=-1, kind="sum") == ledger.sent


def check_all_reduce_shapes(comm: Communicator, folder: Path) -> None:
    strided = torch.full((4, 6), comm.rank + 1.0)
    comm.all_reduce(strided[:, ::2])
    assert strided[:, ::2].eq(6).all()
    assert strided[:, 1::2].eq(comm.rank + 1).all()
    scalar = torch.tensor(comm.rank)
    assert comm.all_reduce(scalar, "max").item() == WORLD - 1
    assert comm.all_reduce(torch.empty(0, 3)).shape == (0, 3)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert comm.all_reduce(parameter).tolist() == [WORLD] * 2
    # The same bits everywhere, whatever the order of summation.
    torch.manual_seed(comm.rank)
    total = comm.all_reduce(torch.randn(1000) * 10 ** float(comm.rank))
    assert all(torch.equal(total, other) for other in comm.all_gather(total))


def check_all_gather(comm: Communicator, folder: Path) -> None:
    for dtype in DTYPES:
        mine = numbers(3, comm.rank, 1, dtype)
        with Ledger(comm) as ledger:
            everyone = comm.all_gather(mine.t())
        assert all(torch.equal(t, numbers(3, p, 1, dtype).t()) for p, t in enumerate(everyone))
        size = mine.numel() * dtype.itemsize
        assert (ledger.sent, ledger.received) == (size, size * (WORLD - 1))
    assert [t.shape for t in comm.all_gather(torch.empty(2, 0))] == [(2, 0)] * WORLD


def check_broadcast(comm: Communicator, folder: Path) -> None:
    for src in range(WORLD):
        for dtype in (torch.float64, torch.bool, torch.bfloat16):
            tensor = numbers(3, comm.rank, 0, dtype)
            assert comm.broadcast(tensor, src) is tensor
            assert torch.equal(tensor, numbers(3, src, 0, dtype))


def check_objects(comm: Communicator, folder: Path) -> None:
    mine = {"rank": comm.rank, "list": [0.5] * (7 * comm.rank), "text": "ä" * comm.rank, "no": None}
    everyone = comm.all_gather_object(mine)
    assert [o["rank"] for o in everyone] == list(range(WORLD))
    assert [len(o["list"]) for o in everyone] == [7 * p for p in range(WORLD)]
    assert [o["text"] for o in everyone] == ["", "ä", "ää"]
    assert comm.broadcast_object(("a", comm.rank), src=2) == ["a", 2]
    with pytest.raises(TypeError, match="JSON"):
        comm.all_gather_object({1, 2})
    comm.barrier()


def check_mistakes(comm: Communicator, folder: Path) -> None:
    """Wrong arguments are told at the call, on this rank, and break nothing."""
    other = (comm.rank + 1) % WORLD
    with pytest.raises(ValueError, match=f"receive into from rank {other}.*isn't contiguous"):
        comm.exchange(None, other, torch.empty(4, 4).t(), other, label=FETCH)
    for peer in (comm.rank, WORLD, -1):
        with pytest.raises(ValueError, match=f"'dst'={peer} must be another rank"):
            comm.exchange(torch.ones(1), peer, None, other, label=FETCH)
    with pytest.raises(ValueError, match="one entry per rank"):
        comm.exchange_all([None], [None] * WORLD, label=FETCH)
    with pytest.raises(ValueError, match="own entry"):
        comm.exchange_all([torch.ones(1)] * WORLD, [None] * WORLD, label=FETCH)
    with pytest.raises(ValueError, match="'op' must be one of sum, max, min; got 'mean'"):
        comm.all_reduce(torch.ones(1), "mean")
    with pytest.raises(ValueError, match="'src'=3"):
        comm.broadcast(torch.ones(1), 3)
    comm.barrier()


def check_wait_with_timeout(comm: Communicator, folder: Path) -> None:
    """A wait that is over too early leaves the transfer alone; a part waits for its turn."""
    if comm.host is not None:
        return
    flag = folder / f"{comm.backend} flag"
    recv = torch.zeros(1)
    if comm.rank == 0:
        work = comm.exchange(None, 1, recv, 1, label=FETCH)
        with pytest.raises(CommTimeoutError, match="did not end within 0.01 s"):
            work.wait(0.01)
        assert not work.done()
        flag.touch()
        work.wait(60)
        assert recv.item() == 5
    else:
        while comm.rank == 1 and not flag.exists():
            time.sleep(0.01)
        send = torch.full((1,), 5.0) if comm.rank == 1 else None
        comm.exchange(send, 0, None, 0, label=FETCH).wait()


def check_buffers_are_freed(comm: Communicator, folder: Path) -> None:
    """Nothing keeps a buffer once its transfer ended: neither the handle nor the issuer."""
    dst, src = (comm.rank + 1) % WORLD, (comm.rank - 1) % WORLD
    send, recv = torch.ones(10), torch.empty(10)
    packed: list[weakref.ref[torch.Tensor]] = []

    def pack(send: torch.Tensor = send) -> torch.Tensor:
        copy = send * 2
        packed.append(weakref.ref(copy))
        return copy

    work = comm.exchange(pack, dst, recv, src, label=FETCH)
    work.wait()
    comm.barrier()  # The receiver has read it on any backend.
    kept = [weakref.ref(recv), *packed]
    del recv, pack, send
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * 2
    assert work.done()


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


def run_checks(folder: Path) -> list[str]:
    comm = current()
    for check in CHECKS:
        check(comm, folder)
    return [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("start", [workers, parts])
def test_operations(start, tmp_path):
    names = start(run_checks, WORLD, tmp_path)
    assert names == [[check.__name__ for check in CHECKS]] * WORLD


# A broken communicator #######################################################


def test_error_while_packing_reaches_the_waiter_and_all_later_calls():
    def work() -> None:
        comm = current()
        other = 1 - comm.rank

        both_queued = threading.Event()

        def pack() -> torch.Tensor:
            both_queued.wait(60)
            raise KeyError("no such rows")

        if comm.rank == 1:
            first = comm.exchange(pack, other, None, other, label=FETCH)
            second = comm.all_reduce_async(torch.ones(1))
            both_queued.set()
            with pytest.raises(KeyError, match="no such rows"):
                first.wait()
            with pytest.raises(KeyError, match="no such rows"):
                second.wait()
            with pytest.raises(PygSarError, match="broken by an earlier error.*no such rows"):
                comm.barrier()
            raise RuntimeError("first")
        with pytest.raises(WorkerError, match="Rank 1 failed.*KeyError.*no such rows") as caught:
            comm.exchange(None, other, torch.empty(3), other, label=FETCH).wait()
        assert caught.value.rank == 1
        with pytest.raises(WorkerError, match="Rank 1 failed"):
            comm.all_reduce(torch.ones(1))

    with pytest.raises(WorkerError, match="Rank 1 failed: RuntimeError: first"):
        launch(work, 2, timeout=60)


def test_closed_communicator_says_so():
    def work() -> str:
        comm = current()
        with comm:
            comm.barrier()
        finalize()
        with pytest.raises(PygSarError, match=r"closed; call pyg_sar.init\(\)"):
            comm.barrier()
        return current().backend

    assert launch(work, 2, timeout=60) == ["local", "local"]


def test_context_manager_tells_the_others_of_an_error():
    def work() -> None:
        with current() as comm:
            if comm.rank == 0:
                raise ZeroDivisionError("mine")
            comm.barrier()

    with pytest.raises(WorkerError, match="Rank 0 failed: ZeroDivisionError: mine"):
        launch(work, 3, timeout=60)


def test_errors_keep_their_rank_when_pickled():
    error = cloudpickle.loads(cloudpickle.dumps(LostWorkerError("gone", rank=2, traceback="tb")))
    assert (type(error), str(error), error.rank) == (LostWorkerError, "gone", 2)
    assert error.traceback == "tb"
    assert isinstance(CommTimeoutError("late"), TimeoutError)


def told_on_one_rank() -> None:
    """As of ``trainer.resume()`` on rank 0 alone, where rank 1 trains."""
    comm = current()
    if comm.rank == 0:
        with raised_everywhere(comm, ValueError, "", OSError):
            pass
    comm.all_gather_object("words")


@pytest.mark.parametrize("begin", [workers, parts])
def test_what_another_function_tells_is_no_error_text(begin):
    with pytest.raises(WorkerError, match=r"MismatchError: Ranks \[1\] called another function"):
        begin(told_on_one_rank, 2)
