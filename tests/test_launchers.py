"""Workers that srun, mpirun or Ray has started: their variables, set by hand for two processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.comm.environment import adopted, find_launcher, first_node, read_environment
from pyg_sar.comm.group import current, finalize, init
from pyg_sar.tools import cli
from pyg_sar.tools.graphs import load_graph
from pyg_sar.train.checkpoint import inspect_checkpoint

SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04,09]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "1234"}


def place(env):
    found = read_environment(env)
    assert found is not None
    return found.rank, found.world_size, found.local_rank, found.local_world_size, found.address


def test_variables_of_each_launcher():
    assert place(SRUN) == (3, 5, 1, 2, "gpu03")
    assert place(SRUN | {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"})[3] == 1
    assert place(OPEN_MPI) == place(MPICH) == (1, 2, 1, 2, "127.0.0.1")
    assert place(TORCHRUN) == (1, 2, None, 2, "host0")
    # One host: only the loopback. What the user says counts.
    assert place(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5"})[4] == "127.0.0.1"
    assert place(SRUN | {"MASTER_ADDR": "other"})[4] == "other"
    # A port for each job, and the user's.
    ports = [read_environment(SRUN | {"SLURM_JOB_ID": str(n)}).port for n in range(70, 80)]
    assert len(set(ports)) == 10 and all(10_000 <= port < 30_000 for port in ports)
    assert read_environment(SRUN | {"MASTER_PORT": "1234"}).port == 1234
    assert read_environment(MPICH).port == 29_500


def test_launchers_within_launchers():
    task = {k: v for k, v in SRUN.items() if k not in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")}
    agent = TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert place(SRUN | agent) == (1, 2, None, 2, "host0")
    assert place(SRUN | OPEN_MPI) == (1, 2, 1, 2, "127.0.0.1")
    # srun --mpi=pmi2 says rank and size, SLURM the rest.
    assert place(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}) == (3, 5, 1, 2, "gpu03")
    for alone in ({}, SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, task):
        assert read_environment(alone) is None is find_launcher(alone)
    # A batch script, which no srun started, is a task neither.
    assert read_environment(task | {"SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (SRUN | TORCHRUN, "RANK=1, WORLD_SIZE=2, but srun says SLURM_PROCID=3, .*Unset RANK"),
        (OPEN_MPI | {"PMI_RANK": "0", "PMI_SIZE": "2"}, r"mpiexec \(PMI\) says PMI_RANK=0"),
        (SRUN | {"SLURM_PROCID": "5"}, "SLURM_PROCID=5 must be between 0 and 4"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,many"}, "'many' is not a number of tasks"),
        (SRUN | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3 must be between 0 and 2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "1"}, "PMI_SIZE is not set"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MASTER_ADDR is not set, and mpiexec .*HOST0"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
         "MASTER_ADDR is not set, and mpirun"),
        (OPEN_MPI | {"MASTER_PORT": "high"}, "MASTER_PORT='high' is not a whole number"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_is_incomplete(env, message):
    with pytest.raises(ValueError, match=message):
        read_environment(env)


def test_the_first_host_of_a_list():
    lists = {
        "node1": "node1",
        "a-1.x,b": "a-1.x",
        "n[003-007,9],m1": "n003",
        "r[0-1]n[2,5]-ib": "r0n2-ib",
        "tux[7]": "tux7",
    }
    assert {text: first_node(text) for text in lists} == lists
    with pytest.raises(ValueError, match="is not a list of hosts"):
        first_node("(null)")


# Two processes ################################################################


def start(env) -> None:
    """Makes ``env`` all that is said of workers."""
    finalize()
    for name in list(os.environ):
        if name.startswith(
            ("RANK", "WORLD", "LOCAL_", "MASTER", "TORCHEL", "SLURM", "OMPI", "PMI")
        ):
            del os.environ[name]
    os.environ.update(env)


def srun(rank: int, job: int) -> dict[str, str]:
    return SRUN | {
        "SLURM_JOB_ID": str(job),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "nowhere",
    }


def free_job() -> int:
    """A job whose port nobody has."""
    for job in range(os.getpid(), os.getpid() + 50):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", read_environment(srun(0, job)).port)):
                return job
    raise RuntimeError("no port is free")


def meet(rank: int, port: int) -> tuple[int, int, float]:
    comm = init("gloo", timeout=60)
    total = comm.all_reduce(torch.tensor([float(rank + 1)]))
    return comm.rank, comm.world_size, float(total)


def by_each_launcher(job: int, ports: list[int]) -> list[tuple[int, int, float]]:
    rank = current().rank
    mine = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
    starts = [
        srun(rank, job),
        OPEN_MPI | mine | {"MASTER_PORT": str(ports[0])},
        MPICH | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank), "MASTER_PORT": str(ports[1])},
    ]
    found = []
    for env in starts:
        start(env)
        found.append(meet(rank, ports[0]))
    start({"RANK": str(rank), "WORLD_SIZE": "2"} if rank else {})  # As Ray Train: a group is there.
    store = f"tcp://127.0.0.1:{ports[2]}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found.append(meet(rank, ports[2]))
    finalize()
    assert dist.is_initialized() and dist.get_world_size() == 2  # It is the script's.
    os.environ["RANK"] = str(1 - rank)
    with pytest.raises(ValueError, match="but torch.distributed's process group says"):
        adopted()
    start({})
    dist.destroy_process_group()
    return found


def free_ports(number: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def test_workers_of_each_launcher_meet():
    found = pyg_sar.launch(by_each_launcher, 2, free_job(), free_ports(3), timeout=60)
    assert found == [[(rank, 2, 3.0)] * 4 for rank in range(2)]


def stopped(root: str, checkpoint: str, job: int) -> int:
    """Trains as srun's task. The signal reaches rank 1 alone, once there is a checkpoint."""
    rank = current().rank
    start(srun(rank, job))

    def ask() -> None:
        while not os.path.exists(checkpoint):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    if rank == 1:
        threading.Thread(target=ask, daemon=True).start()
    options = ["--model", "sage", "--hidden", "4", "--epochs", "100000", "--checkpoint-every", "7"]
    return main(
        ["train", "--parts", root, "--checkpoint", checkpoint, "--quiet", "--auto-resume", *options]
    )


def test_a_signal_to_one_worker_saves_and_ends_all(tmp_path: Path, capfd):
    """One of the workers hosts two parts, which are threads: its main thread gets the signal."""
    graph = load_graph("synthetic:nodes=60,degree=4,features=4,classes=3")
    pyg_sar.write_partitions(graph, 3, tmp_path / "parts", "random")
    given = str(tmp_path / "parts"), str(tmp_path / "run.ckpt")
    codes = pyg_sar.launch(stopped, 2, *given, free_job(), timeout=60)
    assert codes == [cli.EXIT_STOPPED] * 2
    state = inspect_checkpoint(given[1]).state
    assert len(state["losses"]) == state["epoch"] > 7
    said = capfd.readouterr().err
    assert said.count(f"Stopped by a signal after epoch {state['epoch']}") == 1
