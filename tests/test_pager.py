"""The pager: contents survive, budgets hold, nothing is left, and real crashes stay crashes."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import pyg_sar
from pyg_sar.errors import StoreError
from pyg_sar.store import Pager, PagerCounters
from pyg_sar.store import pager as pager_library
from pyg_sar.store.pager import keep_freed

pytestmark = [
    pytest.mark.skipif(pager_library.why_missing() is not None, reason="no pager"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pager is for Linux"),
]

MB = 1 << 20
KB = 1 << 10


@pytest.fixture(autouse=True)
def only_its_own_tensors() -> None:
    """Tests count all regions of the process: cycles of tests before may hold some."""
    gc.collect()


@contextmanager
def opened(
    directory: Path | None, budget: int | None, arenas: int = 3, io_threads: int = 1
) -> Iterator[Pager]:
    """A pager in whose arena 0 this thread allocates."""
    with Pager(arenas, budget, directory, io_threads) as pager:
        pager.enter(0)
        try:
            yield pager
        finally:
            pager.enter(None)


def numbered(megabytes: int, number: int) -> torch.Tensor:
    return torch.full((megabytes * MB // 8,), number, dtype=torch.int64)


def run(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fresh process."""
    before = (
        "import faulthandler, os, resource, signal, sys\nfaulthandler.enable()\n"
        "import torch\nfrom pyg_sar.store import Pager\n"
        "from pyg_sar.store.pager import keep_freed\ntorch.set_num_threads(1)\nMB = 1 << 20\n"
    )
    return subprocess.run(
        [sys.executable, "-c", before + textwrap.dedent(code), *map(str, arguments)],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


# Contents #####################################################################


def test_contents_survive_out_and_in(tmp_path):
    least = 16 * KB
    sizes = (1, 100, least - 1, least, least + 1, 64 * KB, 200 * KB, MB + 8, 5 * MB + 4096, 9 * MB)
    generator = torch.Generator().manual_seed(1)
    expected = [torch.randint(256, (n,), generator=generator, dtype=torch.uint8) for n in sizes]
    with opened(tmp_path, None) as pager:
        tensors = [x.clone() for x in expected]
        views = [x[len(x) // 2 :] for x in tensors]
        arrays = [x.numpy() for x in tensors]
        for x in tensors:
            assert pager.touch(x) == (x.nbytes >= least)
        for round in range(3):
            pager.move_out(0)
            assert pager.counters().evictions == (round + 1) * pager.counters().regions
            for x, view, array, y in zip(tensors, views, arrays, expected, strict=True):
                assert torch.equal(view, y[len(y) // 2 :]) and torch.equal(x, y)
                assert (array == y.numpy()).all()
    for x, y in zip(tensors, expected, strict=True):
        assert torch.equal(x, y)


def test_gradients_are_equal_to_the_bit_far_below_what_is_saved(tmp_path):
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(64, 64) for _ in range(12)]
        model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.GELU())))
        x = torch.randn(2000, 64, requires_grad=True)
        model(x).square().sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]

    expected = gradients()
    with opened(tmp_path, 3 * MB) as pager:
        found = gradients()
        counters = pager.counters()
    assert counters.demand_faults > 10 and counters.overrun_bytes == 0
    assert counters.peak_resident_bytes <= 3 * MB
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_storage_that_grows_keeps_its_content(tmp_path):
    with opened(tmp_path, 8 * MB) as pager:
        x = numbered(1, 7)
        pager.move_out(0)
        x.resize_(4 * MB // 8)
        assert (x[: MB // 8] == 7).all()
        x.untyped_storage().resize_(0)
        assert pager.counters().regions == 0
    x.untyped_storage().resize_(MB)


def test_other_allocators_are_untouched(tmp_path):
    with opened(tmp_path, 8 * MB) as pager:
        x = numbered(1, 7).share_memory_()
        assert pager.counters().regions == 0 and (x == 7).all()
        pager.enter(None)
        x = numbered(1, 7)
        assert pager.counters().regions == 0 and not pager.touch(x)


# Threads ######################################################################


def in_threads(work: Callable[[int], None], number: int) -> None:
    failed: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_four_openmp_threads_read_what_is_out(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with opened(tmp_path, 64 * MB) as pager:
            x = torch.arange(4 * MB)
            for _ in range(20):
                pager.move_out(0)
                assert x.sum().item() == 4 * MB * (4 * MB - 1) // 2
            assert pager.counters().demand_faults == 20
    finally:
        torch.set_num_threads(before)


def test_no_write_is_lost_while_regions_move(tmp_path):
    """Threads count in every page, as the regions are evicted, written ahead and prefetched."""
    rounds, size = 30, 256 * KB // 8
    with opened(tmp_path, 2 * MB, io_threads=2) as pager:
        tensors = [torch.zeros(size, dtype=torch.int64) for _ in range(16)]
        done = threading.Event()

        def count(i: int) -> None:
            for round in range(rounds):
                for k in range(16):
                    # A word of its own in every page, which other threads' words are in too.
                    tensors[(i + k + round) % 16][i::512] += 1

        def disturb() -> None:
            while not done.is_set():
                for arena in range(3):
                    pager.turn(arena)  # Reads ahead what threads have needed in such turns.
                    pager.move_out(0)

        disturber = threading.Thread(target=disturb)
        disturber.start()
        in_threads(count, 4)
        done.set()
        disturber.join()
        for x in tensors:
            for i in range(4):
                assert (x[i::512] == rounds).all()
            assert x.sum().item() == 4 * rounds * (size // 512)
        assert pager.counters().evictions > 16


def test_threads_allocate_and_free_at_once(tmp_path):
    with opened(tmp_path, 8 * MB) as pager:  # What four operators need at once fits.

        def work(i: int) -> None:
            pager.enter(i % 3)
            kept = []
            for k in range(150):
                x = torch.full((64 * KB // 8 + (k * 7919 % 100) * 512,), i * 1000 + k)
                kept.append((i * 1000 + k, x))
                if len(kept) > 12:
                    number, x = kept.pop(k % 12)
                    assert (x == number).all()
            for number, x in kept:
                assert (x == number).all()

        in_threads(work, 4)
        pager.wait()
        counters = pager.counters()
        assert counters.regions == 0 and counters.stored_bytes == 0
        # What a thread reads while the others hold all the rest comes in all the same.
        assert counters.peak_resident_bytes <= 8 * MB + counters.overrun_bytes


# Budget #######################################################################


def test_the_budget_holds_through_ten_times_as_much(tmp_path):
    with opened(tmp_path, 16 * MB) as pager:
        tensors = [numbered(1, i) for i in range(160)]
        for i in reversed(range(160)):
            assert (tensors[i] == i).all()
            tensors[i] += 1
        assert all((x == i + 1).all() for i, x in enumerate(tensors))
        counters = pager.counters()
        assert counters.peak_resident_bytes == 16 * MB and counters.overrun_bytes == 0
        assert counters.regions == 160
        pager.budget = 4 * MB
        assert pager.counters().resident_bytes <= 4 * MB
        del tensors
        assert pager.counters().regions == 0 and pager.counters().stored_bytes == 0


def test_resident_memory_follows_the_budget(tmp_path):
    done = run(
        """
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
        with Pager(1, 32 * MB, sys.argv[1]) as pager:
            warm = torch.ones(4 * MB).sum()
            pager.enter(0)
            before = resident()
            most = 0
            tensors = []
            for i in range(60):
                tensors.append(torch.full((5 * MB // 4 + i,), float(i)))
                most = max(most, resident() - before)
            for i, x in enumerate(tensors):
                assert x.min() == x.max() == i
                most = max(most, resident() - before)
            pager.enter(None)
            print(most // MB)
            del tensors, x
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert 16 <= int(done.stdout) <= 32 + 8


def test_what_is_too_large_is_refused(tmp_path):
    with opened(tmp_path, 4 * MB) as pager:
        x = numbered(1, 1)
        with pytest.raises(torch.OutOfMemoryError, match=r"5242880 bytes.*4194304.*more parts"):
            numbered(5, 1)
        assert pager.counters().resident_bytes == MB and (x == 1).all()


def test_without_a_store_the_budget_is_an_error(tmp_path):
    with opened(None, 4 * MB) as pager:
        tensors = [numbered(1, i) for i in range(4)]
        with pytest.raises(torch.OutOfMemoryError, match="there is no store"):
            numbered(1, 4)
        with pytest.raises(StoreError, match="no store"):
            pager.move_out(0)
    assert all((x == i).all() for i, x in enumerate(tensors))


def test_pinned_tensors_stay(tmp_path):
    with opened(tmp_path, 4 * MB) as pager:
        x = numbered(2, 5)
        with pager.pinned(x, write=True):
            others = [numbered(1, i) for i in range(8)]
            faults = pager.counters().demand_faults
            with open("/dev/zero", "rb") as zeros:
                assert zeros.readinto(memoryview(x.numpy())) == 2 * MB  # type: ignore[arg-type]
            assert (x == 0).all() and pager.counters().demand_faults == faults
            with pager.pinned(others[-1]), pytest.raises(torch.OutOfMemoryError, match="pinned"):
                numbered(2, 1)
        assert all((y == i).all() for i, y in enumerate(others))


def test_operands_that_do_not_fit_together_exceed_the_budget(tmp_path):
    with opened(tmp_path, 2 * MB) as pager:
        x, y, out = numbered(1, 1), numbered(1, 2), numbered(1, 0)
        torch.add(x, y, out=out)
        with pytest.raises(torch.OutOfMemoryError, match="needed 1048576 bytes more at once"):
            numbered(1, 0)
        assert (out == 3).all()
        assert 0 < pager.counters().overrun_bytes <= 2 * MB


def adam(sizes: int) -> list[torch.Tensor]:
    """A parameter after a step of one fused operator that changes five tensors, and these."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, sizes))
    parameter.grad = torch.linspace(1, 2, sizes)
    optimizer = torch.optim.Adam([parameter], amsgrad=True, fused=True)
    optimizer.step()
    return [parameter.detach(), parameter.grad, *list(optimizer.state[parameter].values())[1:]]


def test_an_operator_of_many_tensors_that_do_not_fit_together_ends(tmp_path):
    """It reads and writes each a few times, not once for each of its steps; then it is refused."""
    expected = adam(MB // 4)
    with opened(tmp_path, 3 * MB) as pager:
        found = adam(MB // 4)
        counters = pager.counters()
        assert counters.bytes_read <= 10 * len(found) * MB
        assert 2 * MB <= counters.overrun_bytes <= 4 * MB
        with pytest.raises(torch.OutOfMemoryError, match=r"needed 2097152 bytes more at once"):
            numbered(1, 1)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        numbered(1, 1)


def test_operators_that_fit_one_by_one_are_not_refused(tmp_path):
    """Each misses what the one before has moved out, as often as there are operators."""
    with opened(tmp_path, 4 * MB) as pager:
        tensors = [numbered(1, i) for i in range(8)]
        for _ in range(20):
            for x in tensors:
                x.add_(1)
        assert pager.counters().demand_faults >= 100 and pager.counters().overrun_bytes == 0
        assert all((x == 20 + i).all() for i, x in enumerate(tensors))


# Turns ########################################################################


def test_the_farthest_arena_goes_first_and_its_oldest(tmp_path):
    with opened(tmp_path, 8 * MB) as pager:
        made: dict[int, list[torch.Tensor]] = {}
        for arena in (0, 1, 2):
            pager.enter(arena)
            made[arena] = [numbered(1, arena) for _ in range(2)]
        pager.turn(1)  # So arena 0 is the farthest, and 2 is next.
        pager.enter(1)
        rest = []
        for _ in range(5):
            pager.wait()  # What is being written stays: one of a nearer arena would go instead.
            rest.append(numbered(1, 9))
        assert pager.counters().evictions == 3
        pager.enter(None)
        for arena, faults in ((1, 0), (0, 2)):
            before = pager.counters().demand_faults
            assert all((x == arena).all() for x in made[arena])
            assert pager.counters().demand_faults - before == faults
        del rest


def test_a_larger_tensor_takes_the_pages_of_a_freed_one(tmp_path):
    """Up to an eighth larger; what it was made of goes out and comes back like all else."""
    numbers = MB // 8
    with opened(tmp_path, 48 * MB) as pager:
        out = numbered(1, 1)
        pager.move_out(0)  # From now on memory is short.
        for megabytes, resident in ((9, 9 * MB), (10, 18 * MB)):
            pager.budget = 1  # Nothing is kept of what was freed before.
            pager.budget = 48 * MB
            freed = numbered(8, 1)
            assert pager.counters().resident_bytes == 8 * MB
            del freed
            taken = numbered(megabytes, 2)
            taken[0] = 3
            assert pager.counters().resident_bytes == resident
            pager.move_out(0)
            assert pager.counters().resident_bytes == resident - megabytes * MB
            assert taken[0] == 3 and (taken[1:] == 2).all()
            del taken
        assert (out == 1).all()
        pager.budget = 24 * MB
        generator = torch.Generator().manual_seed(0)
        kept: list[torch.Tensor] = []
        for step in range(300):  # All sizes near each other, four times as much as there is room.
            count = int(torch.randint(numbers * 7 // 2, numbers * 4, (), generator=generator))
            kept.append(torch.full((count,), step))
            if len(kept) > 24:
                one = kept.pop(int(torch.randint(len(kept), (), generator=generator)))
                assert one.min() == one.max()
            assert pager.counters().resident_bytes <= 24 * MB
        steps = [int(one[0]) for one in kept]
        assert all((one == step).all() for one, step in zip(kept, steps, strict=True))
        assert steps == sorted(set(steps)) and steps[-1] == 299


def test_what_the_last_step_needed_is_read_ahead(tmp_path):
    """For this arena and the next one, by how many tensors the turns before have made."""
    steps, turns, arenas = 6, 5, 3
    made: list[list[torch.Tensor]] = [[] for _ in range(arenas)]
    with opened(tmp_path, 64 * MB, arenas) as pager:
        for arena in range(arenas):  # What the parts plan differs.
            pager.turn(arena)
            pager.enter(arena)
            made[arena] = [numbered(1, k) for k in range(2 + arena)]
        faults = []
        for _ in range(steps):
            before = pager.counters().demand_faults
            kept: list[list[torch.Tensor]] = [[] for _ in range(arenas)]
            for turn in range(2 * turns):
                for arena in range(arenas):
                    pager.turn(arena)
                    pager.enter(arena)
                    pager.wait()
                    if turn < turns:  # The forward pass makes what the backward pass reads.
                        kept[arena].extend(numbered(1, 10 * turn + k) for k in range(turn % 3))
                        assert (made[arena][turn % 2] == turn % 2).all()
                    else:
                        place = 2 * turns - 1 - turn
                        for x in kept[arena][place : place + 1]:
                            assert x.numel() == MB // 8 and (x == x[0]).all()
                    pager.move_out(arena)
            faults.append(pager.counters().demand_faults - before)
            del kept, x
        # The first step after those that plan has other turns before it than all others.
        assert faults[0] >= turns and faults[3:] == [0] * (steps - 3), faults
        assert sum(faults) <= 30, faults  # Where few turns before are alike, that helps already.
        assert pager.counters().resident_bytes <= 64 * MB


def test_nothing_else_is_read_ahead_where_many_turns_are_alike(tmp_path):
    """As in a deep model, whose layers make as many tensors, one like the other."""
    layers, arenas = 24, 2
    with opened(tmp_path, 64 * MB, arenas) as pager:
        ahead = []
        for _ in range(7):
            before = pager.counters()
            kept: list[list[torch.Tensor]] = [[] for _ in range(arenas)]
            for turn in range(2 * layers):
                for arena in range(arenas):
                    pager.turn(arena)
                    pager.enter(arena)
                    pager.wait()
                    if turn < layers:
                        kept[arena].append(numbered(1, turn))
                    else:
                        place = 2 * layers - 1 - turn
                        assert kept[arena][place].aminmax() == (place, place)  # makes no tensor
                    pager.move_out(arena)
            found = pager.counters()
            read = found.prefetched_bytes - before.prefetched_bytes
            ahead.append((read // MB, found.demand_faults - before.demand_faults))
        assert ahead[-2:] == [(layers * arenas, 0)] * 2, ahead


def test_what_the_arena_before_needed_is_read_ahead(tmp_path):
    with opened(tmp_path, 64 * MB) as pager:
        tensors = []
        for arena in range(3):
            pager.turn(arena)
            pager.enter(arena)
            tensors.append([numbered(1, 10 * arena + k) for k in range(4)])
        for arena in range(3):
            pager.move_out(arena)
        pager.turn(0)
        assert (tensors[0][2] == 2).all() and pager.counters().demand_faults == 1
        pager.turn(1)  # Reads the same tensor of arenas 1 and 2.
        pager.wait()
        assert pager.counters().prefetched_bytes == 2 * MB
        assert (tensors[1][2] == 12).all() and pager.counters().demand_faults == 1
        assert (tensors[1][3] == 13).all() and pager.counters().demand_faults == 2
        pager.turn(2)
        pager.wait()
        assert pager.counters().prefetched_bytes == 3 * MB
        assert (tensors[2][2] == 22).all() and (tensors[2][3] == 23).all()
        assert pager.counters().demand_faults == 2
        pager.turn(0)  # Another step of the program: nothing is known.
        pager.wait()
        assert pager.counters().prefetched_bytes == 3 * MB


def test_as_much_is_written_ahead_as_allocations_need_and_only_of_waiting_arenas(tmp_path):
    with opened(tmp_path, 40 * MB) as pager:
        tensors = [numbered(4, i) for i in range(8)]
        pager.turn(1)
        pager.wait()
        assert pager.counters().bytes_written == 0  # A fifth of the budget is free.
        pager.enter(1)
        more = [numbered(4, 8)]
        pager.wait()
        assert pager.counters().bytes_written == 4 * MB
        more.append(numbered(4, 9))
        pager.wait()
        assert pager.counters().bytes_written == 12 * MB  # Neighbours go together.
        assert pager.counters().evictions == 0
        more.append(numbered(4, 10))
        pager.wait()
        assert pager.counters().bytes_written == 12 * MB and pager.counters().evictions == 1
        pager.move_out(0)
        assert pager.counters().bytes_written == 32 * MB and pager.counters().evictions == 8
        assert all((x == i).all() for i, x in enumerate([*tensors, *more]))


def test_clean_regions_are_not_written_again(tmp_path):
    with opened(tmp_path, 8 * MB) as pager:
        x = numbered(4, 3)
        assert pager.counters().waited_ns == 0
        for _ in range(3):
            pager.move_out(0)
            assert (x == 3).all()
        assert pager.counters().waited_ns > 0
        assert pager.counters().bytes_written == 4 * MB and pager.counters().bytes_read == 12 * MB
        x[0] = 1
        pager.move_out(0)
        assert pager.counters().bytes_written == 8 * MB and x[0] == 1


def write_calls() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw"))


def test_neighbours_in_the_file_are_written_at_once(tmp_path):
    with opened(tmp_path, None) as pager:
        tensors = [torch.full((8 * KB,), i, dtype=torch.int64) for i in range(64)]
        held = [pager.pinned(tensors[i]) for i in (0, 31)]
        for pin in held:
            pin.__enter__()
        for again in range(3):  # All have places in the file after the first time.
            before = write_calls()
            pager.move_out(0)
            assert write_calls() - before <= 62 // 8
            assert pager.counters().resident_bytes == len(held) * 64 * KB
            for i, tensor in enumerate(tensors):
                assert bool((tensor == i + again).all())
                tensor.add_(1)
        for pin in held:
            pin.__exit__(None, None, None)


def test_freed_while_it_is_written(tmp_path):
    with opened(tmp_path, 8 * MB) as pager:
        for round in range(40):
            pager.enter(0)
            pager.turn(1)
            x = numbered(6, round)  # Is written ahead at once.
            y = numbered(1, round)
            del x
            assert (y == round).all()
            del y
        pager.wait()
        counters = pager.counters()
        assert counters.regions == 0 and counters.stored_bytes == 0
        assert counters.peak_resident_bytes <= 8 * MB


# The file #####################################################################


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system can be mounted by root only")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_an_error_and_nothing_is_lost(small_disk):
    with opened(small_disk, 4 * MB) as pager:
        tensors = []
        with pytest.raises(torch.OutOfMemoryError, match=r"No space left.*directory"):
            for i in range(20):
                tensors.append(numbered(1, i))
        assert 7 <= len(tensors) <= 8
        pager.enter(None)
        for _ in range(2):
            assert all((x == i).all() for i, x in enumerate(tensors))
        # Full on both sides: what comes in is one region too many, until it goes out again.
        assert pager.counters().peak_resident_bytes <= 5 * MB
        pager.enter(0)
        tensors.pop()
        tensors.append(numbered(1, len(tensors)))
        pager.budget = 100 * MB
        tensors += [numbered(1, i) for i in range(len(tensors), 10)]
        with pytest.raises(StoreError, match="No space left"):
            pager.move_out(0)
    assert all((x == i).all() for i, x in enumerate(tensors))


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"missing can't be opened: No such file"):
        Pager(1, None, tmp_path / "missing")
    with Pager(1, None, tmp_path):
        pass


def test_nothing_is_left_after_a_kill(tmp_path):
    done = run(
        """
        pager = Pager(1, 4 * MB, sys.argv[1])
        pager.enter(0)
        tensors = [torch.ones(MB // 4) for _ in range(16)]
        assert pager.counters().stored_bytes > 0
        assert os.listdir(sys.argv[1]) == []
        print("moved", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL and done.stdout == "moved\n", done.stderr
    assert os.listdir(tmp_path) == []


# Memory of freed tensors, kept without a pager #################################


@pytest.fixture
def kept() -> Iterator[Callable[[], PagerCounters]]:
    """Memory of freed tensors is kept; returns what there is of it now."""
    assert keep_freed(True)
    yield pager_library.counters
    assert not keep_freed(False)


def step(sizes: list[int]) -> None:
    """A step of a training: tensors of these MiB are made and freed, the last ones first."""
    tensors = [numbered(size, size) for size in sizes]
    assert [int(x.min()) for x in tensors] == [int(x.max()) for x in tensors] == sizes
    while tensors:
        tensors.pop()


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_kept_memory_is_used_again_and_never_more_than_was_alive_at_once(kept):
    step([1, 4, 2, 8, 3])
    alive = kept().resident_bytes
    assert alive == kept().peak_resident_bytes == 18 * MB
    before = minor_faults()
    for _ in range(20):
        step([1, 4, 2, 8, 3])
    assert minor_faults() - before < 20 * alive / 4096 / 20  # Anew they are as many as pages.
    for sizes in ([16], [5, 5, 5], [7, 1, 9], [18], [17, 1]):
        step(sizes)
        assert kept().peak_resident_bytes == alive
    step([10, 10])
    assert kept().peak_resident_bytes == 20 * MB


def test_a_part_of_kept_memory_is_not_counted_twice(kept):
    step([8])
    with_less = numbered(7, 7)  # at most an eighth less: its last pages go back to the system
    assert kept().resident_bytes == with_less.numel() * 8 == 7 * MB
    assert (with_less == 7).all()


def test_memory_that_was_not_needed_lately_goes_back_to_the_system(kept):
    step([40, 40])
    assert kept().resident_bytes == 80 * MB
    for _ in range(2 * 4096 + 2):
        torch.empty(MB, dtype=torch.uint8)
    assert kept().resident_bytes == MB


def test_kept_memory_serves_all_threads_and_a_forked_child(kept):
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(numbered(4, 4)))
    thread.start()
    thread.join()
    assert kept().resident_bytes == 4 * MB and (found[0] == 4).all()
    child = os.fork()
    if child == 0:
        try:
            found[0] += 1
            step([4, 4])
            right = kept().regions == 1 and bool((found.pop() == 5).all())
            os._exit(0 if right and kept().regions == 0 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (found[0] == 4).all()


def test_a_pager_comes_before_kept_memory_which_then_goes_on(kept, tmp_path):
    first = numbered(4, 4)
    with opened(tmp_path, 4 * MB) as pager:
        tensors = [numbered(1, i) for i in range(8)]
        assert not keep_freed(True)
        assert pager.counters().resident_bytes <= 4 * MB
        assert all((x == i).all() for i, x in enumerate(tensors))
    second = numbered(4, 5)
    assert kept().resident_bytes == 4 * MB
    assert (first == 4).all() and (second == 5).all()


def test_memory_is_not_kept_where_addresses_are_few():
    done = run(
        """
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
        assert not keep_freed(True)
        assert torch.ones(MB).sum() == MB
        """,
    )
    assert done.returncode == 0, done.stderr


def test_init_keeps_memory_until_finalize():
    assert not pager_library.counters().regions
    pyg_sar.init()
    try:
        x = numbered(2, 2)
        assert pager_library.counters().regions == 1
    finally:
        pyg_sar.comm.finalize()
    y = numbered(2, 2)
    assert pager_library.counters().regions == 1 and (x == y).all()


# The process ##################################################################


def test_one_pager_at_a_time_and_arguments_are_checked(tmp_path):
    with Pager(2, None, tmp_path) as pager:
        with pytest.raises(StoreError, match="open pager already"):
            Pager(1, None, tmp_path)
        for call in (pager.turn, pager.enter, pager.move_out):
            with pytest.raises(ValueError, match="arena from 0 to 1"):
                call(2)
        with pytest.raises(ValueError, match="budget"):
            pager.budget = 0
    with pytest.raises(StoreError, match="closed"):
        pager.turn(0)
    for arguments in ((0, None, None, 1), (1, 0, None, 1), (1, None, None, 0)):
        with pytest.raises(ValueError, match="expected"):
            Pager(*arguments)


@pytest.fixture
def anew():
    """Lets the library be looked for again, and after the test."""
    pager_library.why_missing.cache_clear()
    yield
    pager_library.why_missing.cache_clear()


def test_without_its_library_there_is_no_pager(anew, monkeypatch):
    monkeypatch.setattr(pager_library, "_LIBRARY", "_not_built.so")
    with pytest.raises(StoreError, match="without pyg_sar's C\\+\\+ pager: it was not built"):
        Pager(1, None, None)


def test_a_library_of_another_pytorch_is_refused_by_name(anew, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    version = (
        "it was built with PyTorch .*, and this is 2.99.0\\+cpu. Install it beside this PyTorch"
    )
    with pytest.raises(StoreError, match=version):
        Pager(1, None, None)


def test_tensors_outlive_their_pager(tmp_path):
    kept = []
    for number in range(3):
        with opened(tmp_path, 4 * MB) as pager:
            assert pager.counters().regions == 8 * number
            kept += [numbered(1, number) for _ in range(8)]
        assert all((x == i // 8).all() for i, x in enumerate(kept))
        kept[0] += 0


def test_a_forked_child_can_use_what_was_resident(tmp_path):
    done = run(
        """
        pager = Pager(1, 4 * MB, sys.argv[1], 2)
        pager.enter(0)
        tensors = [torch.full((MB // 4,), float(i)) for i in range(8)]

        def child(work):
            pid = os.fork()
            if pid == 0:
                work()
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        def use():
            tensors[7] += 1
            assert (tensors[7] == 8).all()
            mine = [torch.ones(MB) for _ in range(8)]
            del mine, tensors[7]
            try:
                pager.turn(0)
            except RuntimeError as error:
                assert "fork" in str(error)
            else:
                os._exit(1)
            pager.close()

        assert child(use) == 0
        written = pager.counters().bytes_written
        print(child(lambda: tensors[0].sum()))
        for i, x in enumerate(tensors):
            assert (x == i).all()
        pager.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{-signal.SIGSEGV}\n"
    assert "waits in its parent's store" in done.stderr


@pytest.mark.parametrize(
    ("when", "address"),
    [("before", "8"), ("after", "x.data_ptr() + 3 * MB")],
    ids=["faulthandler before, far", "faulthandler after, beyond a region"],
)
def test_a_real_crash_stays_a_crash(tmp_path, when, address):
    done = run(
        f"""
        import ctypes
        pager = Pager(1, 4 * MB, sys.argv[1])
        if {when!r} == "after":
            faulthandler.disable()
            faulthandler.enable()
            pager.turn(0)
        pager.enter(0)
        x = torch.ones(MB // 4)
        pager.move_out(0)
        assert x.sum() == MB // 4
        def where_it_crashes():
            ctypes.string_at({address})
        where_it_crashes()
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "where_it_crashes" in done.stderr
