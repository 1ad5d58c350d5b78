"""The commands of ``pyg-sar`` by name: nothing here imports PyTorch, so that help comes at once."""

from __future__ import annotations

import argparse
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {
    "partition": "cut a graph into parts",
    "plan": "predict memory, bytes and times of a training",
    "train": "train on a partitioned graph",
    "run": "run a PyG script on several workers",
    "predict": "write a model's outputs for all nodes",
    "verify": "compare a model on workers with one process",
    "demo": "compare 4 workers with one plain process, no download",
}


def command_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``pyg-sar`` itself, without any command."""
    parser = argparse.ArgumentParser(
        prog="pyg-sar",
        description="Exact full-batch training of PyTorch Geometric models on several workers.",
    )
    versions = []
    for name in ("pyg_sar", "torch", "torch_geometric"):
        with suppress(PackageNotFoundError):  # A checkout that is not installed.
            versions.append(f"{name} {version(name)}")
    parser.add_argument("--version", action="version", version=", ".join(versions))
    return parser
