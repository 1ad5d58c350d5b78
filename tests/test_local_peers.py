"""What workers of one host share: segments, who may map them, and what is left after a kill."""

from __future__ import annotations

import errno
import os
import signal
import socket
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyg_sar.comm.meeting as meeting
import pyg_sar.comm.shared_memory as segments
from pyg_sar.comm.launch import launch
from pyg_sar.comm.shared_memory import GRAIN, Pool, Segment, SharedMessage
from pyg_sar.errors import LostWorkerError, PygSarError

SWITCH = "PYG_SAR_SHARED_MEMORY"

# Segments ####################################################################


def test_segments_are_used_again_once_all_have_released_them():
    forgotten: list[int] = []
    pool = Pool(0, lambda segment: forgotten.append(segment.number))
    first = pool.take(10)
    assert first.capacity == GRAIN
    pool.hold(first)
    pool.release(first.number)
    second = pool.take(10)
    assert second is not first  # A reader still holds the first.
    pool.release(first.number)
    assert pool.take(GRAIN) is first
    pool.release(first.number)
    large = pool.take(40 * GRAIN)
    assert forgotten == [first.number]  # Too small: given back before more is taken.
    pool.release(large.number)
    assert pool.take(20 * GRAIN) is large
    pool.release(large.number)
    small = pool.take(GRAIN)  # Not for a small part of it.
    assert small is not large and pool.sizes() == (2 * GRAIN, 40 * GRAIN)
    pool.trim()
    assert pool.sizes() == (2 * GRAIN, 0) and forgotten[-1] == large.number
    pool.close()


def test_no_memory_is_one_clear_error(monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments.os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PygSarError, match=r"Rank 3 can't get 1.0 MiB .*No space.*MEMORY=0"):
        Pool(3, lambda segment: None).take(1 << 20)
    assert os.listdir("/proc/self/fd") == before


def test_wrong_switch_is_named():
    with pytest.raises(ValueError, match=f"{SWITCH}='yes' must be 'auto'"):
        meeting.read_switch({SWITCH: "yes"})
    assert meeting.read_switch({}) == meeting.read_switch({SWITCH: ""}) == "auto"


# Workers #####################################################################


def in_shared_memory() -> list[str]:
    return sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []


def open_things() -> dict[str, Any]:
    """This process's descriptors and mappings of shared memory."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # That of the listing itself.
            continue
    return {
        "segments": sum("memfd:pyg_sar" in name for name in names),
        "mapped": Path("/proc/self/maps").read_text().count("memfd:pyg_sar"),
    }


def test_descriptors_do_not_grow_and_are_closed():
    def work() -> Any:
        import gc

        import torch

        from pyg_sar.comm.group import finalize, init

        os.environ["PYG_SAR_SHARED_MEMORY"] = "0"
        finalize()
        init(timeout=60)
        without = open_things()
        finalize()
        os.environ["PYG_SAR_SHARED_MEMORY"] = "1"
        comm = init(timeout=60)
        seen = []
        label = ("conv", "forward", "fetch")
        for _ in range(6):
            for number in (1, 7000, 300_000, 40_000, 2_000_000, 90_000):
                works = []
                for r in (1, 2):
                    dst, src = (comm.rank + r) % 3, (comm.rank - r) % 3
                    recv = torch.empty(number)
                    send = torch.full((number,), float(comm.rank))
                    works.append((comm.exchange(send, dst, recv, src, label=label), recv, src))
                for wait, recv, src in works:
                    wait.wait()
                    assert bool((recv == src).all())
            comm.barrier()
            seen.append(open_things())
        links = list(comm.sharing.local_peers._links.values())
        finalize()
        gc.collect()
        during, after = seen, open_things()
        after["connections"] = [c.fileno() for k in links for c in (k.messages, k.releases)]
        del wait, works
        return without, during, after

    before = in_shared_memory()
    for without, during, after in launch(work, 3, timeout=60):
        assert without["segments"] == 0 < during[0]["segments"]
        # Two at a time of what serves up to 1 MiB, of 1.2 and of 8 MB: here, and of either
        # neighbour, where these are mapped (a mapping holds a descriptor too).
        assert max(now["mapped"] for now in during) <= 3 * 2 * 3
        assert max(now["segments"] for now in during) <= 3 * 2 * 3 + 3 * 2
        assert after["connections"] == [-1] * 4  # Two to either neighbour, closed.
        assert after["segments"] == after["mapped"] == 0
    assert in_shared_memory() == before


@pytest.mark.parametrize("moment", ["meeting", "writing", "reading", "between"])
def test_killed_worker_leaves_nothing(tmp_path, moment):
    def work(folder: Path, moment: str) -> None:
        import time

        import torch

        from pyg_sar.comm import meeting, shared_memory
        from pyg_sar.comm.group import current, finalize, init

        comm = current()
        rank = comm.rank
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        label = ("conv", "forward", "fetch")

        def kill(*_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 1 and moment == "meeting":
            meeting._Meeting._answer = kill  # type: ignore[method-assign]
        finalize()
        comm = init(timeout=60)
        for step in range(10**9):
            if step == 10 and rank == 1:
                if moment == "writing":
                    shared_memory.SharedMemory.send = kill  # type: ignore[method-assign]
                elif moment == "reading":
                    shared_memory.SharedMessage.release = kill  # type: ignore[method-assign]
                else:
                    time.sleep(0.2)  # The others wait.
                    kill()
            works = []
            for r in (1, 2):
                recv = torch.empty(50_000)
                send = torch.ones(50_000)
                dst, src = (rank + r) % 3, (rank - r) % 3
                works.append(comm.exchange(send, dst, recv, src, label=label))
            for wait in works:
                wait.wait()

    before = in_shared_memory()
    with pytest.raises(LostWorkerError, match="Rank 1 was lost") as lost:
        launch(work, 3, tmp_path, moment, env={SWITCH: "1"}, timeout=60)
    assert lost.value.rank == 1
    assert in_shared_memory() == before
    for path in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_who_can_not_prove_it_uses_the_network():
    def work() -> Any:
        import torch

        from pyg_sar.comm import meeting
        from pyg_sar.comm.group import current, finalize, init
        from pyg_sar.errors import PygSarError

        told = []
        rank = current().rank
        real = meeting._read_greeting
        for lie in ("dial", "number", "user"):
            if lie == "dial":
                meeting._Meeting._dial = lambda *_: False  # type: ignore[method-assign]
            elif lie == "user":
                meeting._read_greeting = real
                meeting._same_user = lambda _: rank != 0  # Whoever calls rank 0 is another's.
            else:
                meeting._Meeting._dial = dial  # type: ignore[method-assign]
                meeting._read_greeting = lambda c: (real(c)[0], "x" * 32)
                meeting.HANDSHAKE = 1.0
            for switch in ("auto", "1"):
                finalize()
                os.environ["PYG_SAR_SHARED_MEMORY"] = switch
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    try:
                        comm = init(timeout=60)
                    except PygSarError as error:
                        told.append(str(error))
                        continue
                recv = torch.empty(1)
                label = ("conv", "forward", "fetch")
                send = torch.full((1,), float(rank))
                comm.exchange(send, 1 - rank, recv, 1 - rank, label=label).wait()
                assert comm.sharing is None and int(recv) == 1 - rank
                told.append([str(w.message) for w in heard if "memory" in str(w.message)])
        return told

    dial = meeting._Meeting._dial
    both = launch(work, 2, timeout=60)
    for rank, told in enumerate(both):
        for heard, raised in (told[:2], told[2:4], told[4:]):
            assert len(heard) == rank  # One warning, by the second of the two.
            assert all("Ranks [(0, 1)] are on one host" in text for text in heard)
            assert "ranks 0 and 1 of one host can't share memory" in raised
            assert "Set it to 'auto' or '0'" in raised


def test_the_kernel_says_whose_process_it_is(monkeypatch):
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        assert meeting._same_user(near)
        monkeypatch.setattr(meeting.os, "getuid", lambda: 12345)
        assert not meeting._same_user(near)


def test_a_segment_is_seen_by_who_maps_it():
    with torch.inference_mode():
        segment = Segment(1, GRAIN)
    segment.data[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    other = segments.map_bytes(segment.descriptor, GRAIN)[1]
    assert other[:4].tolist() == [1, 2, 3, 0]
    segment.data[3] = 9
    assert int(other[3]) == 9
    segment.free()


def resident_shared_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) * 1024


def test_a_paused_letter_holds_no_pages_and_can_be_read_on():
    size = 40 * GRAIN
    segment = Segment(1, size)
    segment.data.fill_(7)
    link: Any = SimpleNamespace(mapped={1: segments.map_bytes(segment.descriptor, size)})
    letter = SharedMessage(None, link, 1, 0, size)  # type: ignore[arg-type]
    before = resident_shared_bytes()
    assert int(letter.data.sum(dtype=torch.long)) == 7 * size
    assert resident_shared_bytes() >= before + size
    letter.pause()
    assert resident_shared_bytes() <= before
    assert int(letter.data[GRAIN]) == 7
    segment.free()
