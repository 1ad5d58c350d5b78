"""The commands of ``pyg-sar`` by name: nothing here imports PyTorch, so that help comes at once."""

from __future__ import annotations

import argparse
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

COMMANDS = {
    "partition": "cut a graph into parts",
    "plan": "predict memory, bytes and times of a training",
    "train": "train on a partitioned graph",
    "run": "run a PyG script on several workers",
    "predict": "write a model's outputs for all nodes",
    "verify": "compare a model on workers with one process",
    "demo": "compare 4 workers with one plain process, no download",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and that takes options by their whole names only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2."""
        self.exit(2, f"pyg-sar: error: {message} ({self.prog} --help)\n")


def command_parser() -> Parser:
    """Returns the parser of ``pyg-sar`` itself, without any command."""
    parser = Parser(
        prog="pyg-sar",
        description="Exact full-batch training of PyTorch Geometric models on several workers.",
    )
    versions = []
    for name in ("pyg_sar", "torch", "torch_geometric"):
        with suppress(PackageNotFoundError):  # A checkout that is not installed.
            versions.append(f"{name} {version(name)}")
    parser.add_argument("--version", action="version", version=", ".join(versions))
    return parser
