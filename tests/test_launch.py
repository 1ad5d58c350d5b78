"""Starting workers: what they get, what comes back, and that none is left behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import pyg_sar
from pyg_sar.comm.backends import GlooTransport, Setting
from pyg_sar.comm.group import current, finalize, init
from pyg_sar.comm.launch import _pack as pack
from pyg_sar.comm.launch import launch
from pyg_sar.errors import LostWorkerError, WorkerError


@pytest.fixture
def light(tmp_path, monkeypatch):
    """Workers start from nothing, and import what they need of the package only."""
    folder = tmp_path / "light" / "pyg_sar"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"__path__ = {list(pyg_sar.__path__)!r}\n")
    monkeypatch.syspath_prepend(str(folder.parent))


def write_pid(folder: Path, rank: int) -> None:
    temporary = folder / f"{rank}.tmp"
    temporary.write_text(str(os.getpid()))
    temporary.rename(folder / f"{rank}.pid")


def read_pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    # An ended grandchild waits for the system's first process to take note of it.
    return stat.rpartition(")")[2].split()[0] != "Z"


def run_script(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script that sees the package of ``light``."""
    path = os.pathsep.join([str(folder / "light"), *sys.path])
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_results_and_surroundings(light, monkeypatch):
    """Order of results, arguments, closures and lambdas, environment, tensors both ways."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of another launcher")
    before = dict(os.environ)
    factor = 10
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA")
    names += ("MALLOC_MMAP_THRESHOLD_", "THP_MEM_ALLOC_ENABLE", "TORCHELASTIC_RUN_ID")
    names += ("PYTHONHASHSEED",)

    def reached(host):
        try:
            socket.create_connection((host, int(os.environ["MASTER_PORT"])), 5).close()
        except OSError:
            return False
        return True

    def work(x, function):
        comm = current()
        # The store takes what comes from the loopback's own address, and nothing else.
        assert [reached(host) for host in ("127.0.0.1", "127.0.0.2")] == [True, False]
        total = comm.all_reduce(x * (comm.rank + 1))
        env = {name: os.environ.get(name) for name in names}
        facts = comm.backend, comm.timeout, torch.get_num_threads(), os.getpid()
        return comm.rank * factor, function(total), env, facts

    cores = len(os.sched_getaffinity(0))
    results = launch(work, 2, torch.arange(3.0), lambda t: t + 1, timeout=77, env={"EXTRA": "yes"})
    assert [r[0] for r in results] == [0, 10]
    assert all(torch.equal(r[1], torch.tensor([1.0, 4.0, 7.0])) for r in results)
    for rank, (_, _, env, facts) in enumerate(results):
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert (env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "127.0.0.1")
        assert (env["MALLOC_MMAP_THRESHOLD_"], env["THP_MEM_ALLOC_ENABLE"]) == ("1048576", "1")
        assert env["OMP_NUM_THREADS"] == str(max(1, cores // 2))
        assert (env["EXTRA"], env["TORCHELASTIC_RUN_ID"]) == ("yes", None)
        assert env["PYTHONHASHSEED"] == "0"  # Sets of names are in one order on all workers.
        assert facts[:3] == ("gloo", 77, max(1, cores // 2))
        assert not exists(facts[3])
    assert dict(os.environ) == before


def drawn() -> tuple[torch.Tensor, float, float]:
    return torch.rand(3), float(np.random.rand()), random.random()


def test_workers_start_from_the_callers_dtype_and_random_numbers():
    """A script's first lines hold in workers that don't run them."""
    torch.set_default_dtype(torch.float64)
    try:
        found = [*launch(drawn, 2), *launch(drawn, 1, parts=2)]
        expected = drawn()
    finally:
        torch.set_default_dtype(torch.float32)
    for numbers, *others in found:
        assert numbers.dtype == torch.float64 and torch.equal(numbers, expected[0])
        assert others == [*expected[1:]]


def test_first_error_is_raised_and_no_process_is_left(tmp_path):
    """Rank 1 fails; 0 waits for it, 2 waits for 0, and 3 computes, for ever."""

    def work(folder):
        comm = current()
        write_pid(folder, comm.rank)
        if comm.rank == 3:
            # What it started ends with it.
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            (folder / "4.pid").write_text(str(child.pid))
            time.sleep(3600)
        if comm.rank == 1:
            while len(read_pids(folder)) < 5:
                time.sleep(0.01)
            rows = {"a": 1}
            return rows["b"]
        source = 1 if comm.rank == 0 else 0
        recv = torch.empty(3)
        comm.exchange(None, 0, recv, source, label=("conv", "forward", "fetch")).wait()
        return None

    with pytest.raises(WorkerError, match="Rank 1 failed: KeyError: 'b'") as caught:
        launch(work, 4, tmp_path)
    assert caught.value.rank == 1
    assert 'return rows["b"]' in caught.value.traceback
    assert "Traceback" in str(caught.value)
    pids = read_pids(tmp_path)
    assert len(pids) == 5
    assert [pid for pid in pids if exists(pid)] == []


def test_interrupt_ends_the_worker(tmp_path):
    def work(folder):
        write_pid(folder, 0)
        time.sleep(3600)

    def interrupt():
        while not read_pids(tmp_path):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell's background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            launch(work, 1, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [exists(pid) for pid in read_pids(tmp_path)] == [False]


def test_a_stopped_worker_that_nobody_waits_for(monkeypatch):
    def work():
        if current().rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)

    monkeypatch.setattr(sys.modules[launch.__module__], "read_limits", lambda: (0.3, 0.5))
    with pytest.raises(LostWorkerError, match="Rank 1 was lost: its process was stopped"):
        launch(work, 2)


def test_a_script_without_main_guard(light, tmp_path):
    """Functions, classes and globals of ``__main__`` travel; the script isn't run again."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pyg_sar.comm.launch import launch\n"
        "class Pair:\n"
        "    def __init__(self, a): self.a = a\n"
        "OFFSET = 5\n"
        "def work(pair): return Pair(pair.a + OFFSET)\n"
        "(result,) = launch(work, 1, Pair(2))\n"
        "print(type(result) is Pair, result.a)\n"
    )
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True 7\n"


def test_names_in_the_annotations_of_a_class_of_a_script(light, tmp_path):
    """PyG evaluates a layer's annotations by the names of its module, ``__main__`` of a worker."""
    script = tmp_path / "script.py"
    script.write_text(
        "from __future__ import annotations\n"
        "import sys, typing as t\n"
        "from fractions import Fraction\n"
        "from pyg_sar.comm.launch import launch\n"
        "Number = t.Union[Fraction, int]\n"
        "graph = b'not for annotations'\n"
        "class Pair:\n"
        "    def add(self, a: Number, b: t.Literal['graph']) -> list[Fraction]: pass\n"
        "def work():\n"
        "    names = vars(sys.modules['__main__'])\n"
        "    found = [eval(text, names) for text in Pair.add.__annotations__.values()]\n"
        "    return found, 'graph' in names\n"
        "if __name__ == '__main__':\n"
        "    (result,) = launch(work, 1)\n"
        "    print(result == ([Number, t.Literal['graph'], list[Fraction]], False))\n"
    )
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_a_module_that_starts_workers_when_it_is_imported(light, tmp_path):
    """Its worker imports it for the function, and must not start workers that import it."""
    (tmp_path / "job.py").write_text(
        "from pyg_sar.comm.launch import launch\n"
        "print('imported', flush=True)\n"
        "def work(): return 7\n"
        "launch(work, 1)\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import job\n")
    done = run_script(script, tmp_path)
    assert done.stdout == "imported\nimported\n"
    assert done.returncode == 1
    assert "RuntimeError: launch() was called while a worker imports" in done.stderr
    assert "under 'if __name__ == \"__main__\":'" in done.stderr


def test_a_module_that_starts_parts_when_it_is_imported(light, tmp_path):
    """A layer of its own would import it, too, in a thread that the import waits for."""
    (tmp_path / "job.py").write_text(
        "from pyg_sar.comm.launch import run\nrun(print, 'ran', parts=2)\n"
    )
    script = tmp_path / "script.py"
    script.write_text("import job\n")
    done = run_script(script, tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "RuntimeError: parts were started while the module 'job' is imported" in done.stderr
    done = run_script(tmp_path / "job.py", tmp_path)  # A script of its own is no import.
    assert (done.returncode, done.stdout) == (0, "ran\nran\n")


def test_result_that_cannot_travel():
    with pytest.raises(TypeError, match="rank 3: the result can't be sent.*generator"):
        pack((n for n in range(3)), "the result", 3)


def test_arguments_that_cannot_travel():
    with pytest.raises(TypeError, match="fn or an argument can't be sent.*lock"):
        launch(print, 2, threading.Lock())


def test_invalid_arguments():
    for number in (0, -1, 2.0, "2"):
        with pytest.raises(ValueError, match="'num_workers' to be an integer of at l"):
            launch(print, number)
    for threads in (0, "2"):
        with pytest.raises(ValueError, match="'threads_per_worker' to be an integer"):
            launch(print, 1, threads_per_worker=threads)
    for start in (lambda: launch("train", 2), lambda: pyg_sar.run("train", parts=2)):
        with pytest.raises(TypeError, match="fn='train' must be a function"):
            start()
    for env in ({"A": 1}, "A=1"):
        with pytest.raises(TypeError, match="env=.* must be a mapping of texts to texts"):
            launch(print, 1, env=env)
    with pytest.raises(ValueError, match="backend='tin' must be one of"):
        launch(print, 1, backend="tin")
    with pytest.raises(ValueError, match="timeout=0"):
        launch(print, 1, timeout=0)


# Debugging ###################################################################

DEBUGGED = """
import pyg_sar

met = []

def work():
    comm = pyg_sar.comm.current()
    comm.barrier()
    if comm.rank == 1:
        breakpoint()
    met.append(comm.rank)
    comm.barrier()
    met.append(comm.rank)
    return comm.rank

print(pyg_sar.run(work, parts=3), met)
"""


def test_a_breakpoint_stops_a_part_and_the_others_wait():
    """In this process, with its terminal and its objects; then all go on."""
    done = subprocess.run(
        [sys.executable, "-c", DEBUGGED],
        input="p comm.rank, sorted(met)\nimport time; time.sleep(1)\np sorted(met)\ncontinue\n",
        env={**os.environ, "PYTHONBREAKPOINT": "pdb.set_trace"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (first, second), (*_, last) = (
        [line for line in done.stdout.splitlines() if "(Pdb)" in line and "[" in line][:2],
        done.stdout.splitlines(),
    )
    # Part 0 came before it, part 2 may compute while it waits; none goes through the barrier.
    assert "(1, [0])" in first and second.endswith(("[0]", "[0, 2]")), done.stdout
    assert last.partition("[")[2].startswith("0, 1, 2] [0, "), done.stdout


def joins_late(mark: str) -> bool:
    """Joins again; rank 1 writes a file half a second after it has opened its connections."""
    rank = current().rank
    finalize()
    open_all = GlooTransport.__init__

    def slowly(transport: GlooTransport, setting: Setting) -> None:
        open_all(transport, setting)
        time.sleep(0.5)
        Path(mark).touch()

    if rank == 1:
        GlooTransport.__init__ = slowly
    init()
    return Path(mark).exists()


def test_no_worker_goes_on_before_all_have_joined(tmp_path):
    """One that ended at once would close connections that others still open."""
    assert launch(joins_late, 3, str(tmp_path / "joined")) == [True] * 3
