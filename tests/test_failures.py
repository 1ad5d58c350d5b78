"""Workers that are killed, hang, leave early or fail: the others end, and say who it was."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pyg_sar
import pyg_sar.comm.heartbeats as heartbeats_module
import pyg_sar.comm.watch as watch_module
from pyg_sar.comm.backends import TransportError
from pyg_sar.comm.environment import WorkerInfo, find_stopped, has_starter
from pyg_sar.comm.group import claim_rank, current, name_start, wait_for_workers
from pyg_sar.comm.issuer import Progress
from pyg_sar.comm.launch import launch
from pyg_sar.comm.messages import Posts, is_consequence, to_text
from pyg_sar.comm.processes import ask, is_dead, this_process
from pyg_sar.comm.store import AskedStore
from pyg_sar.comm.watch import StoreWatch
from pyg_sar.errors import CommTimeoutError, LostWorkerError, MismatchError, WorkerError

LABEL = ("conv", "forward", "fetch")
PATIENCE = 120  # Seconds after which a test counts as hanging.


@pytest.fixture
def light(tmp_path, monkeypatch) -> Path:
    """A folder whose pyg_sar imports only what is asked of it: all of PyG takes seconds each."""
    folder = tmp_path / "light" / "pyg_sar"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"__path__ = {list(pyg_sar.__path__)!r}\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder.parent


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Under launch ################################################################


def test_killed_rank_0_under_launch(tmp_path):
    def work(folder):
        comm = current()
        (folder / f"{comm.rank}.pid").write_text(str(os.getpid()))
        step = 0
        while True:
            comm.all_reduce(torch.ones(100))
            step += 1
            if comm.rank == 0 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LostWorkerError, match=r"Rank 0 was lost: it was killed by SIGKILL") as lost:
        launch(work, 3, tmp_path)
    assert lost.value.rank == 0
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 3
    assert not any(exists(pid) for pid in pids)


# Under torchrun, and its environment set by hand #############################

# One interpreter imports the package, and forks the workers of all scenarios: each is a process of
# its own with torchrun's variables, on a port found at run time.
RANKS = textwrap.dedent(
    """
    import atexit, ctypes, json, os, signal, socket, sys, threading, time
    import torch
    import pyg_sar.comm.group as comm_module
    import pyg_sar.comm.heartbeats as heartbeats_module
    import pyg_sar.comm.watch as watch_module
    from pyg_sar.comm.backends import GlooTransport
    from pyg_sar.comm.group import init, finalize
    from pyg_sar.errors import PygSarError

    LABEL = ("conv", "forward", "fetch")

    def reduce_loop(comm, kill):
        for step in range(10**9):
            comm.all_reduce(torch.ones(100))
            if step == 20:
                kill()

    def exchange_loop(comm, kill):
        world = comm.world_size
        for step in range(10**9):
            works = []
            for r in range(1, world):
                dst, src = (comm.rank + r) % world, (comm.rank - r) % world
                recv = torch.empty(1000)
                works.append(comm.exchange(torch.ones(1000), dst, recv, src, label=LABEL))
            if step == 20:
                kill()
            for work in works:
                work.wait()

    def some_compute(comm, kill):
        # Rank 0 computes: no transfer of its fails. torchrun ends it by a signal.
        comm.barrier()
        kill()
        while comm.rank == 0:
            torch.ones(100).sum()
        exchange_loop(comm, kill)

    def behind_a_sleeper(comm, kill):
        # The last rank waits for the one before it, which is alive: no transfer of it fails.
        comm.barrier()
        kill()
        if comm.rank == comm.world_size - 1:
            comm.exchange(None, 0, torch.empty(3), comm.rank - 1, label=LABEL).wait()
        time.sleep(5)
        comm.barrier()

    def hung(comm, kill):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(9)  # Longer than the timeout, but it lives.
        for step in (1, 2):  # Both ways around: every rank needs rank 1.
            dst, src = (comm.rank + step) % 3, (comm.rank - step) % 3
            comm.exchange(torch.ones(3), dst, torch.empty(3), src, label=LABEL).wait()

    def leaves_early(comm, kill):
        comm.barrier()
        if comm.rank != 1:
            comm.all_reduce(torch.ones(3))

    def fails(comm, kill):
        with comm:
            comm.barrier()
            if comm.rank == 0:
                raise KeyError("rows")
            while True:
                comm.all_reduce(torch.ones(3))

    def swap(comm, rows, dtype, layer="conv"):
        # With both neighbours of a ring.
        works = []
        for step in (1, -1):
            dst, src = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
            send, recv = (torch.ones(rows, 4, dtype=dtype) for _ in range(2))
            label = (layer, "forward", "fetch")
            works.append(comm.exchange(send, dst, recv, src, label=label))
        for work in works:
            work.wait()

    def extra_sum(comm, kill):
        swap(comm, 5, torch.float32)
        if comm.rank == 0:
            comm.all_reduce(torch.ones(2), label=("", "forward", "mean"))
        for layer in ("first", "second"):
            swap(comm, 5, torch.float32, layer)

    def ends_before_a_letter(comm, kill):
        # Where memory is shared, nothing is received from the rank that has ended.
        comm.barrier()
        if comm.rank != 1:
            time.sleep(0.5)
            for _ in range(3):
                send = torch.ones(3) if comm.rank == 0 else None
                comm.exchange(send, 1, None, 1, label=LABEL).wait()
                comm.exchange(None, 1, torch.ones(3), 1, label=LABEL).wait()

    def extra_layer(comm, kill):
        comm.barrier()
        for layer in ("first", "first", "second") if comm.rank == 1 else ("first", "second"):
            swap(comm, 5, torch.float32, layer)

    def other_dtype(comm, kill):
        swap(comm, 5, torch.float64 if comm.rank == 2 else torch.float32)

    def other_sum(comm, kill):
        for count in (3, 10**5):  # One is sent to all, one by the backend's own collective.
            comm.all_reduce(torch.ones(count))
        comm.all_reduce(torch.ones(10**5 + (comm.rank == 1)))

    def slow(comm, kill):
        # One computes for long: nobody who waits for it is wrong.
        for step in range(2):
            if comm.rank == step:
                time.sleep(3 * watch_module.STUCK)
            swap(comm, 5, torch.float32)
            comm.all_reduce(torch.ones(10**5))

    def holds_the_lock(comm, kill):
        comm.barrier()
        if comm.rank == 1:
            ctypes.PyDLL(None).sleep(int(3 * watch_module.SILENT))  # PyDLL keeps Python's lock.
        comm.barrier()

    def stopped(comm, kill):
        comm.barrier()
        kill(signal.SIGSTOP)
        comm.barrier()

    def stopped_host(comm, kill):  # Of the store.
        stopped(comm, kill)

    def stopped_early(kill):  # Before it has said who it is.
        if os.environ["RANK"] == "1":
            watch_module.find_stopped = None
            whole = comm_module.claim_rank
            comm_module.claim_rank = lambda *args: (kill(signal.SIGSTOP), whole(*args))
        else:
            watch_module.find_stopped = lambda info: {1: None}

    def in_the_roll_call(kill):
        whole = comm_module.wait_for_workers
        if os.environ["RANK"] == "2":
            time.sleep(1)  # The others wait for it.
        comm_module.wait_for_workers = lambda *args: whole(*args[:4], lambda known: (
            kill() if len(known) == 2 else None, args[4](known)))

    def while_meeting(kill):
        whole = comm_module.meet_local_peers
        comm_module.meet_local_peers = lambda *args: (kill(), whole(*args))[1]

    def while_connecting(kill):
        whole = GlooTransport.__init__
        GlooTransport.__init__ = lambda *args: (kill(), whole(*args))[1]

    AT_START = in_the_roll_call, while_meeting, while_connecting, stopped_early
    # What is to take long takes a second or two.
    QUICK = (extra_sum, ends_before_a_letter, extra_layer, other_dtype, other_sum, slow,
             holds_the_lock, stopped, stopped_host, *AT_START)

    def worker(scenario, victim, timeout, folder):
        rank = int(os.environ["RANK"])
        told = "ended well"
        def kill(how=signal.SIGKILL):
            if rank == victim:
                os.kill(os.getpid(), how)
        play = globals()[scenario]
        if play in QUICK:
            watch_module.BEAT, watch_module.STUCK, watch_module.SILENT = 0.1, 0.3, 0.7
            heartbeats_module.ANSWER = 0.5
        try:
            if play in AT_START:
                play(kill)
                play = reduce_loop
            comm = init(timeout=timeout)
            play(comm, kill)
            finalize()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise
        finally:
            with open(f"{folder}/{scenario}.{rank}", "w") as file:
                json.dump(told, file)

    def end_after(play, *given):
        # As an interpreter ends, but for taking apart what was imported: most of the time.
        code = 1
        try:
            play(*given)
            code = 0
        finally:
            threading._shutdown()
            atexit._run_exitfuncs()
            os._exit(code)

    def by_hand(scenario, world, victim, timeout, folder, port):
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                                  MASTER_PORT=str(port))
                # Nobody else's error output.
                sys.stderr = open(os.devnull, "w")
                os.dup2(sys.stderr.fileno(), 2)
                end_after(worker, scenario, victim, timeout, folder)
            pids.append(pid)
        asleep = [pids.pop(victim)] if scenario == "stopped_early" else []
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for pid in asleep:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with open(f"{folder}/{scenario}.codes", "w") as file:
            json.dump(codes, file)

    folder, *scenarios = sys.argv[1:]
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in scenarios]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    # Beside each other: most of the time they wait.
    for scenario, port in zip(scenarios, ports):
        name, world, victim, timeout = scenario.split(":")
        if "RANK" in os.environ:  # Under torchrun.
            worker(name, int(victim), float(timeout), folder)
        elif os.fork() == 0:
            end_after(by_hand, name, int(world), int(victim), float(timeout), folder, port)
    while "RANK" not in os.environ:
        try:
            assert os.wait()[1] == 0
        except ChildProcessError:
            break
    """
)


class Told(dict[int, str]):
    """What each rank raised, and the exit codes."""

    codes: list[int]


def read_told(folder: Path, scenario: str) -> Told:
    told = Told(
        (int(path.suffix[1:]), json.loads(path.read_text()))
        for path in folder.glob(f"{scenario}.*")
        if path.suffix != ".codes"
    )
    codes = folder / f"{scenario}.codes"
    told.codes = json.loads(codes.read_text()) if codes.exists() else []
    return told


def run(command: list[str], light: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(light), *(p for p in sys.path if p)])
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        # Whatever was left, should the test fail.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def play(light: Path, folder: Path, scenarios: Sequence[str], *launcher: str, **env: str) -> None:
    """Runs scenarios at once; under a launcher one of them."""
    script = folder / "ranks.py"
    script.write_text(RANKS)
    done = run([*launcher, str(script), str(folder), *scenarios], light, **env)
    assert (done.returncode == 0) != bool(launcher), done.stderr


def test_environment_set_by_hand(light, tmp_path):
    """Rank 0 hosts the store here: it must name others before it ends, and be missed itself."""
    scenarios = [
        "reduce_loop:3:0:100",
        "exchange_loop:3:1:100",
        "behind_a_sleeper:3:0:100",
        "hung:3:-1:6",
        "leaves_early:3:-1:100",
        "fails:3:-1:100",
    ]
    play(light, tmp_path, scenarios)

    told = read_told(tmp_path, "reduce_loop")
    assert told.codes == [-9, 1, 1]
    assert all(told[r].startswith("LostWorkerError: Rank 0 was lost") for r in (1, 2)), told
    assert all("pyg_sar.train.load_checkpoint" in told[r] for r in (1, 2))

    told = read_told(tmp_path, "exchange_loop")
    assert told.codes == [1, -9, 1]
    assert all(told[r].startswith("LostWorkerError: Rank 1 was lost") for r in (0, 2)), told
    assert "during: exchange with ranks" in told[0]

    told = read_told(tmp_path, "behind_a_sleeper")
    assert told.codes == [-9, 1, 1]
    assert all(told[r].startswith("LostWorkerError: Rank 0 was lost") for r in (1, 2)), told

    told = read_told(tmp_path, "hung")
    assert told.codes == [1, 1, 1]
    timeouts = [r for r in range(3) if told[r].startswith("CommTimeoutError")]
    assert timeouts, told
    assert all("did not end in time" in told[r] for r in timeouts)
    assert all("All workers are alive" in told[r] for r in timeouts)
    others = [told[r] for r in range(3) if r not in timeouts]
    assert all("failed: CommTimeoutError" in t or "ends rank" in t for t in others), told

    told = read_told(tmp_path, "leaves_early")
    assert told.codes == [1, 0, 1]
    assert told[1] == "ended well"
    for r in (0, 2):
        assert told[r].startswith("LostWorkerError: Rank 1 was lost: its program had already ended")
        assert "look for a call that only some ranks make" in told[r]

    told = read_told(tmp_path, "fails")
    assert told.codes == [1, 1, 1]
    assert told[0] == "KeyError: 'rows'"
    assert all("Rank 0 failed" in told[r] and "KeyError: 'rows'" in told[r] for r in (1, 2)), told


def test_workers_that_end_before_all_have_met_or_fall_silent(light, tmp_path):
    """A backend that waits for them can't be asked to stop: it is left behind.

    One that computes with Python's lock held lives; one that was stopped is lost.
    """
    killed = {"in_the_roll_call": 1, "while_meeting": 0, "while_connecting": 0}
    halted = {"stopped": 1, "stopped_host": 0, "stopped_early": 1}
    victims = killed | halted
    scenarios = [f"{name}:3:{victim}:600" for name, victim in victims.items()]
    play(light, tmp_path, [*scenarios, "holds_the_lock:3:-1:600"])
    assert set(read_told(tmp_path, "holds_the_lock").values()) == {"ended well"}
    for name, victim in victims.items():
        told = read_told(tmp_path, name)
        if name != "stopped_early":  # The others end it: a launcher's SIGTERM would not.
            assert told.codes.pop(victim) == -signal.SIGKILL, (name, told)
        assert told.codes == [1, 1], (name, told.codes, told)
        assert len(told) == 2
        how = "its process was st" if name in halted else ""
        for text in told.values():
            assert text.startswith(f"LostWorkerError: Rank {victim} was lost: {how}"), (name, text)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_operations_that_differ(switch, light, tmp_path):
    """An error that names ranks and operations, on all of them, through memory and through gloo."""
    names = ["extra_layer", "other_dtype"]
    names += ["extra_sum", "other_sum"] if switch == "0" else []
    other = "slow" if switch == "0" else "ends_before_a_letter"
    scenarios = [f"{name}:3:-1:600" for name in (*names, other)]
    play(light, tmp_path, scenarios, PYG_SAR_SHARED_MEMORY=switch)
    for name in names:
        told = read_told(tmp_path, name)
        assert told.codes == [1, 1, 1], (name, told.codes, told)
        assert all("MismatchError" in text for text in told.values()), (name, told)
        assert all("Every rank must call the same layers" in text for text in told.values())
        parts = {
            "extra_sum": (r"rank 0.*forward mean", "rank [12].*first forward fetch"),
            "extra_layer": ("first forward fetch", "second forward fetch"),
            "other_dtype": (r"float32 \[5, 4\]", r"float64 \[5, 4\]"),
            "other_sum": (r"float32 \[100000\]", r"float32 \[100001\]"),
        }[name]
        for text in told.values():
            assert all(re.search(part, text, re.IGNORECASE) for part in parts), (name, text)
    told = read_told(tmp_path, other)
    assert told.pop(1) == "ended well"
    for text in told.values():
        ended = "LostWorkerError: Rank 1 was lost: its program had already ended"
        assert text.startswith("ended well" if other == "slow" else ended), text


def test_killed_rank_under_torchrun(light, tmp_path):
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", "3"
    play(light, tmp_path, ["some_compute:3:1:100"], *torchrun)
    told = read_told(tmp_path, "some_compute")
    assert sorted(told) == [0, 2]
    assert all(told[r].startswith("LostWorkerError: Rank 1 was lost") for r in told), told


# The roll call and the watch by themselves ###################################

HERE = this_process()


def place_of(rank: int, world: int = 2, agent_store: bool = True) -> WorkerInfo:
    return WorkerInfo(
        rank=rank,
        world_size=world,
        local_rank=None,
        local_world_size=world,
        agent_store=agent_store,
    )


def test_roll_call():
    store = dist.HashStore()
    with pytest.raises(CommTimeoutError, match=r"Rank 0 waited 0.05 s for rank\(s\) \[1, 2\] of 3"):
        wait_for_workers(store, place_of(0, 3), "gloo", 0.05)
    claim_rank(store, 0)
    with pytest.raises(ValueError, match="RANK=0 is taken by another process"):
        claim_rank(store, 0)

    store = dist.HashStore()
    with pytest.raises(CommTimeoutError):
        wait_for_workers(store, place_of(0), "gloo", 0.05)
    with pytest.raises(ValueError, match="backend: rank 1 wants 'nccl', rank 0 'gloo'"):
        wait_for_workers(store, place_of(1), "nccl", 5)


def test_workers_of_one_start_agree_on_its_name():
    store = dist.HashStore()
    assert name_start(store, place_of(0), 5) == "start 1"
    store.add("beat/start 1", 1)
    with pytest.raises(CommTimeoutError, match=r"Rank 1 waited 0.05 s for rank 0 of 2 to start"):
        name_start(store, place_of(1), 0.05)  # A name of workers before: nobody beats.
    found: queue.Queue[str] = queue.Queue()
    other = threading.Thread(target=lambda: found.put(name_start(store, place_of(1), PATIENCE)))
    other.start()
    name = name_start(store, place_of(0), 5)
    while other.is_alive():
        store.add(f"beat/{name}", 1)
    assert found.get() == name == "start 2"


def test_which_process_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    start = this_process()["start"]
    child.wait()
    assert not is_dead(HERE)
    assert is_dead({**HERE, "pid": child.pid})
    assert is_dead({**HERE, "start": start - 1})  # Another process with the same number.
    assert not is_dead({**HERE, "pid": child.pid, "host": "elsewhere"})


class Seen:
    """A watch over a peer on another host, and what it told."""

    def __init__(
        self,
        store: dist.Store,
        progress: Progress,
        agent_store: bool = True,
        posts: Posts | None = None,
    ) -> None:
        elsewhere = {**HERE, "host": "elsewhere"}
        self.watch = StoreWatch(store, place_of(1, 2, agent_store), [elsewhere, HERE])
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.watch.start(self.errors.put, lambda: progress, posts)


PENDING = Progress(started=5, ended=4, pending=1, doing="all_reduce")


def beat(store: dist.Store, number: int, **note: object) -> None:
    idle = {"started": 3, "ended": 3, "pending": 0, "doing": "exchange", "left": False}
    store.set("beat/0", json.dumps({"beat": number, **idle, **note}))


@pytest.fixture
def quick(monkeypatch):
    for name in ("BEAT", "STUCK", "STUCK_DEAD"):
        monkeypatch.setattr(watch_module, name, 0.02)
    for name in ("SILENT", "UNKNOWN"):
        monkeypatch.setattr(watch_module, name, 0.2)
    monkeypatch.setattr(watch_module, "INQUIRY", 0.1)


def test_silent_host_is_lost_while_something_waits_for_it(quick):
    store = dist.HashStore()
    beat(store, 1)
    seen = Seen(store, PENDING)
    error = seen.errors.get(timeout=PATIENCE)
    assert isinstance(error, LostWorkerError)
    assert str(error).startswith("Rank 0 was lost: it has not answered for 0 s: stopped, or")
    seen.watch.close()


class MuteStore:
    """A store whose host was stopped: it never answers."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: threading.Event().wait()


def test_a_silent_store_keeps_no_watch_waiting(quick, monkeypatch):
    monkeypatch.setattr(heartbeats_module, "ANSWER", 0.1)
    seen = Seen(MuteStore(), PENDING)
    error = seen.errors.get(timeout=PATIENCE)
    assert str(error).startswith("Rank 0 was lost: it has not answered for 0 s: stopped, or")
    seen.watch.close()
    begun = StoreWatch(MuteStore(), place_of(1, 3, agent_store=False))
    begun.begin()
    while begun._told is None:
        pass
    assert "Rank 0 was lost: the workers' store, which it hosts, has not an" in str(begun._told)
    begun.close()


def test_a_connection_to_the_store_that_broke_names_its_host(quick):
    """Also where nobody knows yet which process that is."""
    broken = dist.DistNetworkError("Connection reset by peer")
    for agent_store, who in ((True, "The launcher"), (False, "Rank 0")):
        watch = StoreWatch(dist.HashStore(), place_of(1, 3, agent_store))
        error = watch.diagnose(broken, "the start")
        assert str(error).startswith(f"{who} was lost: it hosts the workers' store"), error
        watch._store.close()


def test_a_question_to_the_store_is_not_asked_once_a_worker_is_lost():
    """A store that answers at once kept who asked it from learning that."""

    def check() -> None:
        raise LostWorkerError("y", rank=0)

    store = AskedStore(dist.HashStore, check)
    with pytest.raises(LostWorkerError):
        name_start(store, place_of(1), 5)
    store.close()


def test_a_store_that_dies_as_the_program_ends(light, tmp_path):
    """The thread that still asked it came back in the interpreter's shutdown: SIGABRT."""
    script = tmp_path / "ends.py"
    script.write_text(
        textwrap.dedent(
            """
            import atexit, os, signal, sys, time
            import torch.distributed as dist
            from pyg_sar.comm.store import AskedStore, host_store

            ready, say = os.pipe()
            if (host := os.fork()) == 0:
                store = host_store("127.0.0.1", 0)
                os.write(say, str(store.port).encode())
                time.sleep(100)
            port = int(os.read(ready, 9))
            atexit.register(lambda: os.kill(host, signal.SIGKILL))  # After all that follow.
            asked = AskedStore(
                lambda: dist.TCPStore("127.0.0.1", port, is_master=False), patience=0.5
            )
            asked.set("key", "value")
            os.kill(host, signal.SIGSTOP)
            os.waitpid(host, os.WUNTRACED)  # Until all of its threads have stopped.
            try:
                asked.get("key")
            except TimeoutError:
                sys.exit(7)
            """
        )
    )
    done = run([str(script)], light)
    assert done.returncode == 7, done.stderr


def test_workers_whose_starter_is_gone(quick, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    seen = Seen(dist.HashStore(), PENDING._replace(pending=0))
    with pytest.raises(queue.Empty):
        seen.errors.get(timeout=0.2)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert "The launcher was lost: the process that started" in str(seen.errors.get(timeout=9))
    seen.watch.close()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # By hand: its shell may go, as with nohup.
    monkeypatch.undo()
    assert not has_starter({"RANK": "1", "WORLD_SIZE": "2"})
    assert has_starter({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})


def test_a_stopped_process_that_has_not_said_who_it_is():
    run = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], env={**run, "RANK": "2"},
                             stdin=subprocess.PIPE)  # fmt: skip
    with child:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        found = find_stopped(place_of(0, 3))
        assert found.keys() == {2} and found[2]["pid"] == child.pid
        assert find_stopped(place_of(0, 2)) == {}  # Another run.
        child.kill()


def test_the_limit_of_silence_is_the_users(monkeypatch):
    monkeypatch.setenv(watch_module.VARIABLE, "90")
    assert watch_module.read_limits() == (60, 90)
    monkeypatch.setenv(watch_module.VARIABLE, "soon")
    with pytest.raises(ValueError, match="PYG_SAR_SILENCE='soon' must be a positive number"):
        watch_module.read_limits()


def test_silence_harms_nobody_who_does_not_wait(quick):
    store = dist.HashStore()
    beat(store, 1)
    seen = Seen(store, PENDING._replace(pending=0))
    with pytest.raises(queue.Empty):
        seen.errors.get(timeout=0.5)
    seen.watch.close()


def test_first_failure_record_wins(quick):
    store = dist.HashStore()
    beat(store, 1, left=True)
    seen = Seen(store, PENDING._replace(pending=0))
    store.set("failure", json.dumps({"kind": "error", "rank": 0, "how": "KeyError: 'a'"}))
    error = seen.errors.get(timeout=PATIENCE)
    assert str(error) == "Rank 0 failed, which ends rank 1 as well: KeyError: 'a'"
    late = seen.watch.diagnose(TransportError("connection reset"), "exchange")
    assert str(late) == str(error)
    seen.watch.report(ValueError("later"))
    assert "KeyError" in store.get("failure").decode()
    assert store.check(["seen/1"])
    seen.watch.close()


def test_failed_transfer_between_live_workers_keeps_its_message(quick):
    store = dist.HashStore()
    beat(store, 1)
    seen = Seen(store, PENDING._replace(pending=0))
    error = seen.watch.diagnose(TransportError("odd size"), "exchange [conv]")
    assert str(error) == "Rank 1: exchange [conv] failed though all workers seem alive: odd size"
    store = dist.HashStore()
    beat(store, 1, started=7, pending=1)
    timeout = Seen(store, PENDING._replace(pending=0))
    error = timeout.watch.diagnose(TransportError("Timed out waiting 5ms"), "all_reduce")
    assert isinstance(error, CommTimeoutError)
    assert "rank 0 is in its operation 7 (exchange)" in str(error)
    for one in (seen, timeout):
        one.watch.close()


def test_a_wait_in_vain_is_told_once_both_are_seen_to_be_in_it(quick):
    """As long as the other's heart doesn't beat, it may have gone on."""
    store, posts, theirs = dist.HashStore(), Posts(), Posts()
    store.set("waits/0", "")
    with posts.waiting([("receive", 0, "mean")]), theirs.waiting([("receive", 1, "fetch")]):
        store.set("waits/0", to_text(theirs.state("exchange [fetch]")))
        beat(store, 1, wait=theirs.wait_number)
        seen = Seen(store, PENDING, posts=posts)
        with pytest.raises(queue.Empty):
            seen.errors.get(timeout=0.1)
        error = None
        for number in range(2, 10**4):
            beat(store, number, wait=theirs.wait_number)
            with contextlib.suppress(queue.Empty):
                error = seen.errors.get(timeout=0.02)
                break
    assert isinstance(error, MismatchError)
    assert "rank 0 waits for rank 1 in exchange [fetch] (fetch)" in str(error)
    assert "rank 1 waits for rank 0 in all_reduce (mean)" in str(error)
    seen.watch.close()


# What other hosts are told ###################################################

BEACON = """
import json, sys, time
from pyg_sar.comm.processes import StatusServer
beacon = StatusServer(["127.0.0.1"])
print(json.dumps(beacon.where), flush=True)
sys.stdin.read()
"""


def test_a_beacon_answers_for_a_worker_that_cannot(light, quick):
    path = os.pathsep.join([str(light), *(p for p in sys.path if p)])
    process = subprocess.Popen(
        [sys.executable, "-c", BEACON],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    with process, process.stdin, process.stdout:
        where = json.loads(process.stdout.readline())
        assert ask(where) == "runs"
        assert ask([[*where[0][:2], "another word"]]) is None

        store = dist.HashStore()
        store.set("status/0", json.dumps(where))
        beat(store, 1)
        seen = Seen(store, PENDING)
        with pytest.raises(queue.Empty):  # Its heart doesn't beat, but it runs.
            seen.errors.get(timeout=1.0)
        os.kill(process.pid, signal.SIGSTOP)
        error = seen.errors.get(timeout=PATIENCE)
        assert "Rank 0 was lost: its process was stopped (SIGSTOP)" in str(error)
        seen.watch.close()
        process.kill()
    while ask(where) is not None:  # It ends with its worker.
        pass


def test_errors_that_only_follow():
    mine = WorkerError("x", rank=1)
    wrapped = ValueError("wrapper")
    wrapped.__cause__ = LostWorkerError("y", rank=0)
    assert not is_consequence(mine, 1)
    assert is_consequence(mine, 0)
    assert is_consequence(wrapped, 1)
    assert not is_consequence(ValueError("own"), 1)
