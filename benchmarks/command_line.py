"""The command line that a page of results names."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

FOLDERS = ("before", "directory", "folder", "scratch", "store")
FILES = ("note", "out", "plot", "results", "rows")


def command(args: argparse.Namespace) -> str:
    """The running script and all its options, but for files and folders of one machine."""
    words = [f"python benchmarks/{Path(sys.argv[0]).name}"]
    for name, value in vars(args).items():
        if name in FOLDERS + FILES or value is None or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        values = ["../shared/data"] if name == "data" else values
        words += [f"--{name.replace('_', '-')}", *(shlex.quote(str(v)) for v in values)]
    return " ".join(words)
