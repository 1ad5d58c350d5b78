"""Tries the package with the oldest and the newest PyTorch and PyG that it is for.

.. code-block:: bash

    make test-versions                                  # every Python from 3.11 on that is at hand
    python benchmarks/tested_versions.py --python python3.12 --tests tests --out docs/versions.md
    python benchmarks/tested_versions.py --keep FOLDER  # environments that stay for the next time

Each combination gets an environment of its own, in which pip installs what its registry has, builds
the package with its kernels, and runs tests. What can't be installed is a row that says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13")
PAIRS = (("2.10.0", "2.6.0"), ("newest", "newest"))  # PyTorch, PyG
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in ("exactness", "contract", "hetero", "models", "ops", "objectives", "storage")
)
VERSIONS = (
    "import platform, torch, torch_geometric; from pyg_sar.kernels import ops; "
    "print(platform.python_version(), torch.__version__, torch_geometric.__version__, "
    "'yes' if ops.built else 'no')"
)
HEADER = "| Python | PyTorch | PyG | kernels | tests |\n|---|---|---|---|---|"


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

    def run(self, *command: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["PATH"] = f"{self.folder / 'env' / 'bin'}:{environment['PATH']}"
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
            errors = [line for line in lines if "error" in line.lower()] or lines
            raise StepError(f"{' '.join(command[1:5])}: {errors[-1].strip()[:160]}")
        return done.stdout

    def install(self, python: str, torch: str, pyg: str) -> None:
        """Makes the environment, and installs the package in it."""
        self.run(python, "-m", "venv", str(self.folder / "env"))
        pip = (self.python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
        wanted = [
            name if version == "newest" else f"{name}=={version}"
            for name, version in (("torch", torch), ("torch-geometric", pyg))
        ]
        self.run(*pip, *wanted, "setuptools>=77", "wheel")
        files = subprocess.run(
            ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for name in files:
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            if (REPOSITORY / name).is_file():
                shutil.copy2(REPOSITORY / name, self.source / name)
        self.run(*pip, "--no-build-isolation", "-e", f"{self.source}[test]")

    def test(self, tests: list[str]) -> str:
        """Returns the last line of pytest: how many tests passed."""
        command = [self.python, "-m", "pytest", "-q", "-W", "default", *tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            command, cwd=self.source, env=environment, capture_output=True, text=True
        )
        failed = re.findall(r"^(?:FAILED|ERROR) \S+?(\w+\.py\S*)", done.stdout, re.MULTILINE)
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["none"]
        counts = re.sub(r"^=* ?| in .*$", "", lines[-1])
        return counts + "".join(f"; `{name}`" for name in failed[:3])


def row(python: str, torch: str, pyg: str, tests: list[str], keep: str | None) -> str:
    """Returns the line of a combination."""
    kept = keep and f"{keep}/{python}-{torch}-{pyg}"
    with nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder).resolve())
        found = [python.removeprefix("python"), torch, pyg, "-"]
        try:
            environment.install(python, torch, pyg)
            found = environment.run(environment.python, "-c", VERSIONS).split()
            result = environment.test(tests)
        except (OSError, StepError) as error:
            result = f"not tried: {error}".replace(folder, "")
    return f"| {' | '.join([*found, result])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="interpreters to try")
    parser.add_argument("--torch", nargs="+", help="versions, one for each of --pyg")
    parser.add_argument("--pyg", nargs="+", help="versions")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files to run")
    parser.add_argument("--keep", metavar="FOLDER", help="where environments stay, and are found")
    parser.add_argument("--out", help="Markdown file to write")
    arguments = parser.parse_args()
    pairs = list(zip(arguments.torch, arguments.pyg, strict=True)) if arguments.torch else PAIRS
    names = ", ".join(Path(test).stem for test in arguments.tests)
    text = (
        f"# Tested versions\n\n{date.today()}, `python benchmarks/tested_versions.py`, "
        f"{platform.system()} {platform.machine()}. The tests are {names}; `make test` runs "
        f"all of them with the versions of the Makefile.\n\n{HEADER}\n"
    )
    rows = []
    for python, (torch, pyg) in product(arguments.python, pairs):
        if shutil.which(python) is None:
            rows.append(f"| {python.removeprefix('python')} | {torch} | {pyg} | - | not at hand |")
        else:
            rows.append(row(python, torch, pyg, arguments.tests, arguments.keep))
        print(rows[-1], flush=True)
        if arguments.out:  # What was tried stays, also when a later one is cut short.
            page = Path(arguments.out)
            _, heading, sections = (page.read_text() if page.exists() else "").partition("\n## ")
            page.write_text(text + "\n".join(rows) + "\n" + heading + sections)
    sys.exit(any("failed" in line or "error" in line for line in rows))


if __name__ == "__main__":
    main()
