"""Workers that are killed, hang, leave early or fail: the others end, and say who it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import pyg_sar
from pyg_sar.comm import current
from pyg_sar.errors import LostWorkerError, WorkerError
from pyg_sar.launch import launch

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


def test_killed_rank_0_under_launch(light, tmp_path):
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

# One interpreter imports the package, and forks the workers of one scenario after the other: each
# is a process of its own with torchrun's variables, on a port found at run time.
RANKS = textwrap.dedent(
    """
    import json, os, signal, socket, sys, time, traceback
    import torch
    from pyg_sar.comm import init, finalize
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
            time.sleep(4)  # Longer than the timeout, but it lives.
        comm.exchange(torch.ones(3), (comm.rank + 1) % 3, torch.empty(3),
                      (comm.rank - 1) % 3, label=LABEL).wait()

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

    def worker(scenario, victim, timeout, folder):
        rank = int(os.environ["RANK"])
        told = "ended well"
        try:
            comm = init(timeout=timeout)
            def kill():
                if rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
            globals()[scenario](comm, kill)
            finalize()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise
        finally:
            with open(f"{folder}/{scenario}.{rank}", "w") as file:
                json.dump(told, file)

    def by_hand(scenario, world, victim, timeout, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                                  MASTER_PORT=str(port))
                # Nobody else's error output.
                sys.stderr = open(os.devnull, "w")
                os.dup2(sys.stderr.fileno(), 2)
                return worker(scenario, victim, timeout, folder)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        with open(f"{folder}/{scenario}.codes", "w") as file:
            json.dump(codes, file)

    folder, *scenarios = sys.argv[1:]
    for scenario in scenarios:
        name, world, victim, timeout = scenario.split(":")
        arguments = name, int(victim), float(timeout), folder
        if "RANK" in os.environ:  # Under torchrun.
            worker(*arguments)
        else:
            by_hand(name, int(world), *arguments[1:])
        if "RANK" in os.environ:
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
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_environment_set_by_hand(light, tmp_path):
    """Rank 0 hosts the store here: it must name others before it ends, and be missed itself."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    scenarios = [
        "reduce_loop:3:0:100",
        "exchange_loop:3:1:100",
        "behind_a_sleeper:3:0:100",
        "hung:3:-1:2",
        "leaves_early:3:-1:100",
        "fails:3:-1:100",
    ]
    done = run([str(script), str(tmp_path), *scenarios], light)
    assert done.returncode == 0, done.stderr

    told = read_told(tmp_path, "reduce_loop")
    assert told.codes == [-9, 1, 1]
    assert all(told[r].startswith("LostWorkerError: Rank 0 was lost") for r in (1, 2)), told
    assert all("pyg_sar.load_checkpoint" in told[r] for r in (1, 2))

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

    told = read_told(tmp_path, "fails")
    assert told.codes == [1, 1, 1]
    assert told[0] == "KeyError: 'rows'"
    assert all("Rank 0 failed" in told[r] and "KeyError: 'rows'" in told[r] for r in (1, 2)), told


def test_killed_rank_under_torchrun(light, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "3", str(script)]
    done = run([*torchrun, str(tmp_path), "some_compute:3:1:100"], light)
    assert done.returncode != 0
    told = read_told(tmp_path, "some_compute")
    assert sorted(told) == [0, 2], done.stderr
    assert all(told[r].startswith("LostWorkerError: Rank 1 was lost") for r in told), told


# On threads ##################################################################


def test_hung_thread():
    def work():
        comm = current()
        if comm.rank == 1:
            time.sleep(1.5)
        comm.exchange(None, 0, torch.empty(1), 1 - comm.rank, label=LABEL).wait()

    with pytest.raises(
        WorkerError, match="Rank 0 failed: CommTimeoutError: .*waiting for rank 1 to send"
    ):
        launch(work, 2, backend="threads", timeout=0.5)


def test_thread_that_leaves_early():
    def work(collective):
        comm = current()
        if comm.rank == 0 and collective:
            comm.barrier()
        elif comm.rank == 0:
            comm.exchange(None, 1, torch.empty(1), 1, label=LABEL).wait()

    for collective in (True, False):
        with pytest.raises(LostWorkerError, match="Rank 1 was lost: its program had already ended"):
            launch(work, 2, collective, backend="threads", timeout=60)
