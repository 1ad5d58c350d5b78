"""The arguments of ``pyg-sar run``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pyg_sar.files import parse_bytes
from pyg_sar.tools.script import ScriptConfig, run_script, run_script_under_torchrun
from pyg_sar.tools.start import node_ids_of, was_launched

RUN_EPILOG = """\
the script is one for a single process, as it is (docs/scripts.md):
  pyg-sar run --workers 4 gcn.py --epochs 100
  torchrun --nproc-per-node 4 -m pyg_sar run gcn.py --epochs 100
All options stand before the script; what follows it is for the script.
Exit code: the script's own. 1: it failed, or a worker did. 130: Ctrl-C.
"""

_WORKERS = 2


def add_run(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``pyg-sar run``."""
    group = command.add_argument_group("workers").add_argument
    group(
        "--workers", type=int, metavar="N", help=f"start N here (default: --parts, or {_WORKERS})"
    )
    group("--parts", type=int, metavar="N", help="parts of the graph (default: one per worker)")
    group("--memory", metavar="SIZE", help="of each worker, for its parts: 2GiB, 500MB")
    group("--store", metavar="DIR", help="folder for what parts that wait hold")
    group("--backend", choices=("gloo", "nccl", "mpi", "ccl"), help="default: nccl with GPUs")
    group("--timeout", type=float, default=1800.0, metavar="S", help="seconds per operation")
    group = command.add_argument_group("graphs").add_argument
    group("--cache", metavar="DIR", help="folder of partitions (default: in the user's cache)")
    group(
        "--node-ids",
        type=node_ids_of,
        metavar="NAMES",
        help="attributes that hold node ids, or don't: a,b=no",
    )
    command.add_argument("script", metavar="SCRIPT", help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run_command(arguments: argparse.Namespace) -> int:
    """Runs ``pyg-sar run``, and returns the script's exit code.

    Raises:
        ValueError: Options that make no sense.
        FileNotFoundError: There is no such script.
    """
    if not Path(arguments.script).is_file():
        raise FileNotFoundError(2, "No such file", arguments.script)
    store = arguments.store
    if store is not None and not Path(store).is_dir():
        raise ValueError(f"--store {store}: there is no such folder")
    memory = arguments.memory
    config = ScriptConfig(
        script=arguments.script,
        arguments=tuple(arguments.arguments),
        parts=arguments.parts,
        memory=None if memory is None else parse_bytes(memory, "--memory"),
        store=store,
        cache=None if arguments.cache is None else os.path.abspath(arguments.cache),
        node_ids=arguments.node_ids or None,
        backend=arguments.backend,
        timeout=arguments.timeout,
    )
    if arguments.parts is not None and arguments.parts < 1:
        raise ValueError(f"--parts {arguments.parts} must be at least 1")
    if was_launched(arguments.workers):
        return run_script_under_torchrun(config)
    workers = arguments.workers if arguments.workers is not None else arguments.parts or _WORKERS
    if workers < 1 or (config.parts is not None and not workers <= config.parts):
        raise ValueError(
            f"--workers {workers} must be from 1 to the number of parts ({config.parts or 'any'})"
        )
    return run_script(config, workers)
