"""Training over several hosts: network namespaces joined by a bridge, links limited by tc.

    sudo python benchmarks/hosts.py --out hosts.md

Each namespace is a host with an address and a host name of its own and runs one worker, started by
``torchrun``; the bridge is in a namespace too, so that the machine's own network stays as it is.
Both ends of each link pass ``tc tbf``. Per number of hosts and prefetch depth, with all rows pulled
and with covers (push): the time of an epoch; of its compute alone (the same epoch with nothing
sent: rows that would come are zeros); of its transfer alone (bytes of the busiest direction of any
worker over the bandwidth measured between workers); and the losses, which must be those of one
process. Needs root, ``ip``, ``tc`` and ``unshare``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric
from command_line import command
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GraphSAGE

import pyg_sar
from pyg_sar.reduction import gradients
from pyg_sar.reduction.parameters import differ
from pyg_sar.tools import load_graph

REPOSITORY = Path(__file__).resolve().parent.parent
PORT = 29511
MEGABYTE = 1 << 20
PLAIN_EDGES = 3_000_000  # GAT needs 3 kB for each

# The network #################################################################


class Network:
    """Hosts as network namespaces; torn down on leaving, also after an error or Ctrl-C.

    Args:
        hosts: How many.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts, self.mark = hosts, f"sar{os.getpid()}"
        self.running: list[subprocess.Popen[bytes]] = []

    def name(self, host: int) -> str:
        return f"{self.mark}h{host}"

    def address(self, host: int) -> str:
        return f"10.213.77.{host + 1}"

    def __enter__(self) -> Network:
        missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            what = f"{', '.join(missing)} (packages iproute2, util-linux)" if missing else "root"
            raise SystemExit(f"benchmarks/hosts.py sets up network namespaces, which needs {what}")
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def _build(self) -> None:
        switch = f"{self.mark}s"
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in range(self.hosts):
            name = self.name(host)
            run("ip", "netns", "add", name)
            ends = ("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name")
            run("ip", *ends, f"port{host}", "netns", switch)
            run("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")

    def limit(self, rate: str) -> None:
        """Bandwidth of each link, each way, as ``tc`` writes it."""
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        for host in range(self.hosts):
            run("tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0", *shape)
            run("tc", "-n", f"{self.mark}s", "qdisc", "replace", "dev", f"port{host}", *shape)

    def torchrun(self, arguments: Sequence[str], timeout: float) -> None:
        """Runs a script on all hosts, one worker each.

        Raises:
            RuntimeError: When it fails anywhere.
        """
        nodes = ("--nnodes", str(self.hosts), "--nproc-per-node", "1")
        place = ("--master-addr", self.address(0), "--master-port", str(PORT))
        for host in range(self.hosts):
            torchrun = (sys.executable, "-m", "torch.distributed.run", *nodes, *place)
            script = 'hostname "$0" && exec "$@"'
            inside = ("ip", "netns", "exec", self.name(host), "unshare", "--uts", "sh", "-c")
            command = (*inside, script, self.name(host), *torchrun, "--node-rank", str(host))
            paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
            setting = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            self.running.append(
                subprocess.Popen(
                    [*command, *arguments], start_new_session=True, env={**os.environ, **setting}
                )
            )
        codes = [process.wait(timeout) for process in self.running]
        self.running.clear()
        if any(codes):
            raise RuntimeError(f"torchrun ended with {codes} on the {self.hosts} hosts")

    def _tear_down(self) -> None:
        for name in (f"{self.mark}s", *(self.name(host) for host in range(self.hosts))):
            # torchrun's workers are in sessions of their own: found by where they run.
            inside = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in inside.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)

        for process in self.running:
            process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tear_down()


def run(*command: str) -> None:
    """Runs a command; its own message says what failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


# On a host ###################################################################


def make_model(spec: dict[str, Any], inputs: int, outputs: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if spec["model"] == "gat":
        return GAT(inputs, spec["hidden"], 3, outputs, heads=4, jk=None)
    return GraphSAGE(inputs, spec["hidden"], 3, outputs)


def train_epoch(model: torch.nn.Module, optimizer: Any, data: Data) -> float:
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    kept = data.train_mask
    loss = F.cross_entropy(out[kept], data.y[kept])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def bandwidth(comm: Any, megabytes: int = 32) -> float:
    """Bytes per second from every worker to the next, all at once."""
    data = torch.zeros(megabytes * MEGABYTE, dtype=torch.uint8)
    to, come = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    times = []
    for _ in range(4):
        comm.barrier()
        start = time.perf_counter()
        comm.exchange(data, to, torch.empty_like(data), come, label=("", "", "probe")).wait()
        times.append(time.perf_counter() - start)
    return data.numel() / min(times[1:])


class Silent:
    """Sends nothing while it is entered; what would have come is zeros.

    Sums are local, and nobody compares the workers' parameters, nor later what stood beside rows.
    """

    def __init__(self, comm: Any) -> None:
        self.comm, self.carrier = comm, comm._transport

    def __enter__(self) -> None:
        self.before = self.comm.plain, self.comm.beside
        self.carrier.exchange = lambda sends, recvs, where: [t.zero_() for _, t in recvs]
        self.carrier.all_reduce = lambda tensor, op, where: None
        gradients.differ = lambda found: False

    def __exit__(self, *error: Any) -> None:
        del self.carrier.exchange, self.carrier.all_reduce
        self.comm.plain, self.comm.beside = self.before
        gradients.differ = differ


class Case:
    """One policy: a model that is trained, and a twin that is trained with nothing sent.

    Args:
        comm: The workers.
        spec: What is run.
        data: The graph.
        policy: Arguments of the policy.
    """

    def __init__(self, comm: Any, spec: dict[str, Any], data: Data, policy: dict[str, Any]) -> None:
        self.comm, self.data, self.policy = comm, data, policy
        self.trained, self.twin = (self._run(spec) for _ in range(2))
        self.losses: list[float] = []
        self.times: list[float] = []
        self.silent: list[float] = []
        self.sent = self.received = 0

    def _run(self, spec: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = make_model(spec, self.data.num_features, spec["classes"])
        model = pyg_sar.distribute(model, pyg_sar.SARPolicy(**self.policy))
        return model, torch.optim.Adam(model.parameters(), lr=0.003)

    def epoch(self) -> None:
        """An epoch as it is, then one with nothing sent; both from the same moment everywhere."""
        self.comm.barrier()
        with pyg_sar.Ledger(self.comm) as ledger:
            start = time.perf_counter()
            self.losses.append(train_epoch(*self.trained, self.data))
            self.times.append(time.perf_counter() - start)
        self.sent, self.received = ledger.sent, ledger.received
        if not self.silent:  # the twin's first epoch agrees with others on how its layers run
            train_epoch(*self.twin, self.data)
        self.comm.barrier()
        with Silent(self.comm):
            start = time.perf_counter()
            train_epoch(*self.twin, self.data)
            self.silent.append(time.perf_counter() - start)

    def result(self) -> dict[str, Any]:
        """The slowest worker's fastest epoch, without the first; the busiest worker's bytes."""
        mine = [min(self.times[1:]), min(self.silent[1:]), self.sent, self.received]
        everyone = self.comm.all_gather_object(mine)
        return {
            **self.policy,
            "losses": self.losses,
            "epoch": max(row[0] for row in everyone),
            "compute": max(row[1] for row in everyone),
            "bytes": max(max(row[2:]) for row in everyone),
            "total": sum(row[2] for row in everyone),
        }


def worker(spec_file: str) -> None:
    """What torchrun starts on each host."""
    torch.set_num_threads(1)
    spec = json.loads(Path(spec_file).read_text())
    comm = pyg_sar.init(timeout=300)
    try:
        data = pyg_sar.load_partition(spec["parts"])
        speed = min(comm.all_gather_object(bandwidth(comm)))
        cases = [Case(comm, spec, data, policy) for policy in spec["cases"]]
        for _ in range(spec["epochs"] + 1):
            for case in cases:  # in turn: the machine may be busier at one time than at another
                case.epoch()
        rows = [case.result() for case in cases]
        if comm.rank == 0:
            Path(spec["result"]).write_text(json.dumps({"bandwidth": speed, "cases": rows}))
    finally:
        pyg_sar.comm.finalize()


# The table ###################################################################


def one_process(spec: dict[str, Any], data: Data) -> list[float]:
    """The losses of plain PyG; where its messages would not fit, of one worker's kernels."""
    model = make_model(spec, data.num_features, spec["classes"])
    if data.num_edges > PLAIN_EDGES:
        model = pyg_sar.distribute(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    return [train_epoch(model, optimizer, data) for _ in range(spec["epochs"] + 1)]


def over_hosts(arguments: argparse.Namespace, data: Data, hosts: int, model: str) -> list[str]:
    """Rows of the table for one number of hosts and one model."""
    cases: list[dict[str, Any]] = [
        {"push": push, "wire": wire, "prefetch": depth}
        for push in arguments.push
        for wire in arguments.wires
        for depth in (0, 1)
    ]
    spec = {
        "model": model,
        "hidden": arguments.hidden,
        "epochs": arguments.epochs,
        "classes": int(data.y.max()) + 1,
        "cases": cases,
    }
    expected = one_process(spec, data)
    with tempfile.TemporaryDirectory() as folder, Network(hosts) as network:
        spec |= {"parts": f"{folder}/parts", "result": f"{folder}/result.json"}
        pyg_sar.write_partitions(data, hosts, spec["parts"], arguments.method)
        Path(folder, "spec.json").write_text(json.dumps(spec))
        network.limit(arguments.rate)
        network.torchrun([__file__, "--worker", f"{folder}/spec.json"], arguments.timeout)
        found = json.loads(Path(folder, "result.json").read_text())
    first = f"{hosts} | {model}"
    return [row_of(first, found["bandwidth"], case, expected) for case in found["cases"]]


def row_of(first: str, speed: float, case: dict[str, Any], expected: list[float]) -> str:
    pairs = zip(case["losses"], expected, strict=True)
    error = max(abs(a - b) / abs(b) for a, b in pairs)
    transfer = case["bytes"] / speed
    ratio = case["epoch"] / max(case["compute"], transfer)
    return (
        f"| {first} | {case['push']} | {case['wire']} | {case['prefetch']} "
        f"| {case['total'] / 1e6:.1f} | {speed * 8 / 1e9:.2f} | {case['compute']:.2f} "
        f"| {transfer:.2f} | {case['epoch']:.2f} | {ratio:.2f} | {error:.1e} |"
    )


COLUMNS = (
    *(
        "hosts",
        "model",
        "push",
        "wire",
        "prefetch",
        "MB sent, all workers",
        "Gb/s measured",
        "compute alone, s",
    ),
    *("transfer alone, s", "epoch, s", "epoch / max(compute, transfer)"),
    "loss: largest relative error to one process",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def report(arguments: argparse.Namespace, data: Data) -> str:
    rows = [
        row
        for hosts in arguments.hosts
        for model in arguments.models
        for row in over_hosts(arguments, data, hosts, model)
    ]
    text = f"""\
# Several hosts

Network namespaces as hosts, one worker with one thread each, links of {arguments.rate} each way
(`tc tbf`), on one machine of {os.cpu_count()} cores, which all workers share.
Three layers of {arguments.hidden} (GAT: 4 heads), {arguments.source}: {data.num_nodes:,} nodes,
{data.num_edges:,} edges, {data.num_features} features, parts by {arguments.method}. The fastest of
{arguments.epochs} epochs after one more, of the slowest worker; policies take turns epoch by epoch.
Compute alone: the same epoch with nothing sent. Transfer alone: the bytes of the busiest direction
of any worker over the bandwidth measured between workers.

{date.today()}, `{command(arguments)}`, {platform.machine()}, Python {platform.python_version()},
torch {torch.__version__}, torch-geometric {torch_geometric.__version__}.

{HEAD}
"""
    return text + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Training over several hosts.")
    add = parser.add_argument
    add("--worker", metavar="SPEC", help=argparse.SUPPRESS)
    add("--hosts", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of hosts")
    add("--rate", default="1gbit", help="of each link, as tc writes it")
    add("--source", default="synthetic:nodes=40000,degree=25", help="the graph")
    add("--method", default="balanced", help="of partitioning")
    add("--models", choices=("sage", "gat"), nargs="+", default=["sage", "gat"])
    add("--hidden", type=int, default=128, metavar="N", help="width")
    add("--epochs", type=int, default=8, metavar="N", help="measured")
    add("--wires", nargs="+", default=["exact"], metavar="WIRE", help="exact, bfloat16, float16")
    add("--push", nargs="+", default=["off", "auto"], help="off: all rows are pulled")
    add("--timeout", type=float, default=900, metavar="S", help="of each run")
    add("--out", metavar="FILE", help="write the table here")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    torch.set_num_threads(1)
    text = report(arguments, load_graph(arguments.source))
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text)


if __name__ == "__main__":
    main()
