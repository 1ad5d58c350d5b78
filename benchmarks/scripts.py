"""Runs PyG's own scripts on several workers and in one process, and compares all they print.

    python benchmarks/scripts.py --pyg CHECKOUT --planetoid FOLDER
    python benchmarks/scripts.py --pyg CHECKOUT --planetoid FOLDER --only gcn gat --workers 2

CHECKOUT is a checkout of PyG's repository, FOLDER holds the raw files of Planetoid (Cora/raw/...),
and stays as it is. The scripts run as they are, but for fewer epochs, all digits of what they
print, and stand-ins for datasets that would be downloaded (benchmarks/script_stand_ins.py); dropout
is on. Lines with a time are left out. The table goes to standard output.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_geometric

from pyg_sar.__main__ import main as pyg_sar_main

HERE = Path(__file__).resolve().parent
NUMBER = re.compile(r"(?<![\w.])-?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)(?![\w.])")
TIME = re.compile(r"time|it/s\b", re.IGNORECASE)
SECONDS = re.compile(r"\b[\d.]+(?:e[-+]?\d+)?m?s\b")
ERROR = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt|example)\b")

SCRIPTS = {
    **dict.fromkeys(
        (
            *("agnn", "argva_node_clustering", "arma", "autoencoder", "cora", "correct_and_smooth"),
            *("dir_gnn", "dna", "gat", "gcn", "gcn2_cora", "glnn", "graph_unet"),
            *("infomax_transductive", "label_prop", "link_pred", "linkx", "mixhop", "ogc", "pmlp"),
            *("rect", "rgat", "rgcn", "rgcn_link_pred", "sgc", "signed_gcn", "super_gat", "tagcn"),
            *("tensorboard_logging", "unimp_arxiv", "lightgcn"),
            *("compile/gcn", "jit/gcn", "jit/gat", "explain/gnn_explainer"),
            *("explain/captum_explainer", "explain/graphmask_explainer"),
            *("hetero/bipartite_sage", "hetero/dmgi_unsup", "hetero/han_imdb"),
            *("hetero/hetero_conv_dblp", "hetero/hgt_dblp"),
        ),
        (),
    ),
    **dict.fromkeys([f"sparse/{n}" for n in ("difformer", "gcn", "linkx", "scatter", "sign")], ()),
    "graphland": ("--name", "tolokers-2", "--split", "RL"),
    **dict.fromkeys(
        [f"benchmark/citation/{name}" for name in ("appnp", "arma", "cheb", "gat", "gcn", "sgc")],
        ("--dataset", "Cora", "--runs", "2", "--random_splits"),
    ),
}
"""Scripts of PyG that train on one graph, those of ``examples`` without it, and their arguments.

Those of ``sparse`` are in benchmarks/sparse_scripts, and need torch-sparse and torch-scatter."""


@dataclass
class Outcome:
    """What a run of a script gave."""

    code: int
    lines: list[str]
    error: str


@dataclass
class Comparison:
    """How a run on workers differs from that in one process."""

    equal: int
    lines: int
    largest: float
    error: str

    def __str__(self) -> str:
        if self.error:
            return self.error
        text = f"{self.equal} of {self.lines} lines"
        return text if self.equal == self.lines == 0 else f"{text}, {self.largest:.1e}"


def run(given: Sequence[str], workers: int, timeout: float) -> Outcome:
    """Runs a script in forks of this process, which have PyTorch and PyG loaded.

    Lines that tell a time are left out.

    Args:
        given: The script and its arguments.
        workers: How many processes, as torchrun starts them; 0: without pyg_sar.
        timeout: In seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = [_fork(given, workers, rank, folder) for rank in range(max(workers, 1))]
        codes: dict[int, int] = {}
        end = time.monotonic() + timeout
        while len(codes) < len(running) and time.monotonic() < end:
            time.sleep(0.02)
            for rank, pid in enumerate(running):
                if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(found[1])
                    if codes[rank]:  # The others end soon.
                        end = min(end, time.monotonic() + 30)
        for rank, pid in enumerate(running):
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        failed = next((rank for rank, code in codes.items() if code), None)
        if failed is None and len(codes) < len(running):
            return Outcome(-1, [], f"no end after {timeout:g} s")
        texts = [Path(f"{folder}/{rank}.err").read_text() for rank in range(len(running))]
        printed = Path(f"{folder}/0.out").read_text().splitlines()
    lines = [SECONDS.sub("T", line) for line in printed if not TIME.search(line)]
    if failed is None:
        return Outcome(0, lines, "")
    said = [line for line in texts[failed].splitlines() if line.strip()]
    errors = [line for line in said if ERROR.match(line)] or said or ["?"]
    return Outcome(codes[failed], lines, textwrap.shorten(errors[-1], 200, placeholder=" ..."))


def _fork(given: Sequence[str], workers: int, rank: int, folder: str) -> int:
    """Starts one process, and returns its id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if rank == 0 else 0
    if rank == 0:
        Path(f"{folder}/port").write_text(str(port))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY)
            os.dup2(file, number)
        if workers:
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "MASTER_PORT": Path(f"{folder}/port").read_text(),
            }
            numbers |= {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
            os.environ |= {name: str(value) for name, value in numbers.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            code = pyg_sar_main(["run", "--cache", os.environ["CACHE"], *given])
        else:
            sys.argv = list(given)
            runpy.run_path(given[0], run_name="__main__")
            code = 0
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def compare(plain: Outcome, ours: Outcome, tolerance: float) -> Comparison:
    """Compares lines: their words must be the same, their numbers within ``tolerance``."""
    if ours.code != plain.code:
        return Comparison(0, len(plain.lines), 0.0, ours.error or f"exit code {ours.code}")
    equal, largest = 0, 0.0
    for one, other in zip(plain.lines, ours.lines, strict=False):
        if NUMBER.sub("#", one) != NUMBER.sub("#", other):
            largest = float("inf")
            continue
        pairs = list(zip(NUMBER.findall(one), NUMBER.findall(other), strict=True))
        gap = max([difference(float(a), float(b)) for a, b in pairs], default=0.0)
        largest = max(largest, gap)
        equal += gap <= tolerance
    if len(plain.lines) != len(ours.lines):
        largest = float("inf")
    return Comparison(equal, len(plain.lines), largest, "")


def difference(a: float, b: float) -> float:
    """The difference of two numbers, of large ones relative to them."""
    if a == b or (a != a and b != b):
        return 0.0
    gap = abs(a - b) / max(1.0, abs(a))
    return gap if gap == gap else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs PyG's own scripts on several workers.")
    parser.add_argument("--pyg", type=Path, required=True, help="a checkout of PyG")
    parser.add_argument("--planetoid", type=Path, required=True, help="raw files of Planetoid")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", nargs="+", help="names of scripts")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    given = parser.parse_args()
    wanted = given.only or list(SCRIPTS)
    # Compiled models draw other random numbers; sets must have one order.
    fixed = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONHASHSEED": "0"}
    if any(os.environ.get(name) != value for name, value in fixed.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **fixed})
    sys.path[1:1] = [str(given.pyg.resolve() / "benchmark")]  # The first place is the script's.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(given.planetoid, f"{folder}/planetoid")
        os.environ |= {"PLANETOID": f"{folder}/planetoid", "CACHE": f"{folder}/cache"}
        rows = []
        for name in sorted(wanted):
            rows.append([name, *cells(name, given)])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(describe(given))
    heads = [f"{dtype}, {w} workers" for dtype in given.dtypes for w in given.workers]
    print("| script | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def cells(name: str, given: argparse.Namespace) -> list[str]:
    """Runs one script in all ways."""
    place = given.pyg if name.startswith("benchmark/") else given.pyg / "examples"
    script = place / f"{name}.py"
    if name.startswith("sparse/"):
        script = HERE / "sparse_scripts" / f"{name.removeprefix('sparse/')}.py"
    found = []
    for dtype in given.dtypes:
        tolerance = 1e-9 if dtype == "float64" else 1e-5
        wrapper = [str(HERE / "script_stand_ins.py"), "--epochs", str(given.epochs)]
        command = [*wrapper, "--dtype", dtype, str(script), *SCRIPTS.get(name, ())]
        plain = run(command, 0, given.timeout)
        for workers in given.workers:
            if plain.code:
                found.append(f"fails in one process: {plain.error}")
                continue
            ours = run(command, workers, given.timeout)
            found.append(str(compare(plain, ours, tolerance)).replace("|", "/"))
    return found


def describe(given: argparse.Namespace) -> str:
    """What was run where, for the document."""
    commit = subprocess.run(
        ["git", "-C", str(given.pyg), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    project = (given.pyg / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version *= *"(.*)"', project, re.MULTILINE)[:1]
    versions = f"PyTorch {torch.__version__}, PyG {torch_geometric.__version__}"
    return (
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, "
        f"{versions}; scripts of PyG {version}{commit and f', commit {commit}'}; "
        f"{given.epochs} epochs.\n"
    )


if __name__ == "__main__":
    main()
