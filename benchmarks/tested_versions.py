"""Tries the package with the oldest and the newest PyTorch and PyG that it is for.

.. code-block:: bash

    make test-versions                                  # every Python from 3.11 on that is at hand
    python benchmarks/tested_versions.py --python python3.12 --work FOLDER --out docs/versions.md

Each combination gets an environment of its own, in which pip installs what its registry has, and
runs tests. Kernels hold nothing of Python, so they are built once for each PyTorch. What can't be
installed is a row that says so. With ``--work`` environments, kernels and rows stay, and a later
call goes on from there: gigabytes are downloaded, and a build takes eight minutes of one core.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13")
PAIRS = (("2.6.0", "2.6.0"), ("newest", "newest"))  # PyTorch, PyG
# What other versions change: PyTorch's operators and autograd, PyG's layers and containers.
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in (
        *("ops", "node_tensors", "operators", "global_view", "models", "convert", "objectives"),
        *("storage", "script"),
    )
)
NEEDS = ("expecttest", "hypothesis", "pytest>=8", "pytest-xdist", "torchmetrics")
VERSIONS = (
    "import platform, torch, torch_geometric; from pyg_sar.kernels import ops; "
    "print(platform.python_version(), torch.__version__, torch_geometric.__version__, "
    "'yes' if ops.built else 'no')"
)
HEADER = "| Python | PyTorch | PyG | kernels | import | tests |\n|---|---|---|---|---|---|"


class StepError(Exception):
    """A step that failed; its text is the last line of the output."""


@dataclass
class Environment:
    """A virtual environment, and a copy of the repository beside it.

    Args:
        folder: Where both are.
    """

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "env" / "bin" / "python")

    @property
    def source(self) -> Path:
        return self.folder / "source"

    def run(self, *command: str, **variables: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
        environment["PATH"] = f"{self.folder / 'env' / 'bin'}:{environment['PATH']}"
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
            errors = [line for line in lines if "error" in line.lower()] or lines
            raise StepError(f"{' '.join(command[1:5])}: {errors[-1].strip()[:160]}")
        return done.stdout

    def pip(self, *packages: str, **variables: str) -> None:
        quiet = ("--disable-pip-version-check", "--quiet", "--no-build-isolation")
        self.run(self.python, "-m", "pip", "install", *quiet, *packages, **variables)

    def install(self, python: str, torch: str, pyg: str) -> None:
        """Makes the environment, with PyTorch, PyG and what the tests need, if it isn't there."""
        done = self.folder / "installed"
        if done.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run(python, "-m", "venv", str(self.folder / "env"))
        wanted = [
            name if version == "newest" else f"{name}=={version}"
            for name, version in (("torch", torch), ("torch-geometric", pyg))
        ]
        self.pip(*wanted, "setuptools>=77", "wheel", "ninja", *NEEDS)
        done.touch()

    def build(self, kernels: Path) -> None:
        """Installs the package as it is now, with kernels that were built for this PyTorch."""
        shutil.rmtree(self.source, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            if (REPOSITORY / name).is_file():
                shutil.copy2(REPOSITORY / name, self.source / name)
        version = self.run(self.python, "-c", "import torch; print(torch.__version__)").strip()
        built, kept = self.source / "pyg_sar" / "_kernels.so", kernels / f"{version}.so"
        if kept.exists():
            shutil.copy2(kept, built)
        self.pip("-e", str(self.source), PYG_SAR_KERNELS="keep" if kept.exists() else "")
        if built.exists() and not kept.exists():
            kernels.mkdir(exist_ok=True)
            shutil.copy2(built, kept)

    def imports(self) -> str:
        """Processor time of ``import pyg_sar`` over that of ``import torch_geometric``.

        The least of three runs each, in turn.
        """
        used: dict[str, float] = {}
        for name in ("torch_geometric", "pyg_sar") * 4:  # The first of each fills caches.
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.run(self.python, "-c", f"import {name}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            used[name] = min(took, used.get(name, took))
        return f"{used['pyg_sar'] / used['torch_geometric']:.2f}"

    def test(self, tests: list[str]) -> str:
        """Returns the last line of pytest: how many tests passed."""
        command = [self.python, "-m", "pytest", "-q", "-W", "default", *tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            command, cwd=self.source, env=environment, capture_output=True, text=True
        )
        (self.folder / "tests.log").write_text(done.stdout + done.stderr)
        failed = re.findall(r"^(?:FAILED|ERROR) \S+?(\w+\.py\S*)", done.stdout, re.MULTILINE)
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["none"]
        counts = re.sub(r"^=* ?| in .*$|, \d+ warnings?", "", lines[-1])
        return counts + "".join(f"; `{name}`" for name in failed[:3])


def row(work: Path, python: str, torch: str, pyg: str, tests: list[str]) -> str:
    """Returns the line of a combination."""
    environment = Environment(work / f"{python}-{torch}-{pyg}")
    found = [python.removeprefix("python"), torch, pyg, "-", "-"]
    try:
        environment.install(python, torch, pyg)
        environment.build(work / "kernels")
        found = environment.run(environment.python, "-c", VERSIONS).split()
        found.append(environment.imports())
        result = environment.test(tests)
    except (OSError, StepError) as error:
        result = f"not tried: {error}".replace(str(environment.folder), "")
    return f"| {' | '.join([*found, result])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="interpreters to try")
    parser.add_argument("--torch", nargs="+", help="versions, one for each of --pyg")
    parser.add_argument("--pyg", nargs="+", help="versions")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files to run")
    parser.add_argument("--work", type=Path, help="folder in which all stays for a later call")
    parser.add_argument("--out", help="Markdown file to write")
    arguments = parser.parse_args()
    pairs = list(zip(arguments.torch, arguments.pyg, strict=True)) if arguments.torch else PAIRS
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        rows = []
        for python, (torch, pyg) in product(arguments.python, pairs):
            line = f"| {python.removeprefix('python')} | {torch} | {pyg} | - | - | not at hand |"
            if shutil.which(python) is not None:
                kept = work / f"{python}-{torch}-{pyg}.row"
                line = (
                    kept.read_text()
                    if kept.exists()
                    else row(work, python, torch, pyg, arguments.tests)
                )
                if arguments.work:
                    kept.write_text(line)
            rows.append(line)
            print(line, flush=True)
            if arguments.out:  # What was tried stays, also when a later one is cut short.
                Path(arguments.out).write_text(described(arguments.tests) + "\n".join(rows) + "\n")
    sys.exit(any("failed" in line or "error" in line for line in rows))


def described(tests: list[str]) -> str:
    """The document up to the rows."""
    names = ", ".join(Path(test).stem for test in tests)
    return (
        f"# Tested versions\n\n{date.today()}, `python benchmarks/tested_versions.py`, "
        f"{platform.system()} {platform.machine()}: the oldest PyTorch and PyG that the package is "
        "for, and the newest that pip was offered. The C++ kernels were built once for each "
        "PyTorch. Import: processor time of `import pyg_sar` over that of `import "
        f"torch_geometric`. The tests are {names}; `make test` runs all tests with the versions of "
        f"the Makefile.\n\n{HEADER}\n"
    )


if __name__ == "__main__":
    main()
