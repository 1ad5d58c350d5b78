"""Tries one wheel of the package with the oldest and the newest PyTorch and PyG that it is for.

.. code-block:: bash

    make test-versions                                  # every Python from 3.11 on that is at hand
    python benchmarks/tested_versions.py --combinations 3.12/2.12.1/newest --tests tests/test_ops.py

The wheel is built with the Python and the PyTorch that run this script. Each combination gets an
environment of its own, in which pip installs what its registry has, and the wheel, and runs tests.
What can't be installed is a row that says so.
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
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from command_line import command

REPOSITORY = Path(__file__).resolve().parent.parent
COMBINATIONS = tuple(
    f"{python}/{versions}"
    for python in ("3.11", "3.12", "3.13")
    for versions in ("2.10.0/2.6.0", "newest/newest")
)
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
QUIET = ("--disable-pip-version-check", "--quiet")


class StepError(Exception):
    """A step that failed; its text is the last line of the output."""


def done(*words: str, folder: Path) -> str:
    """Runs a command in a folder, and returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if found.returncode:
        lines = (found.stderr + found.stdout).strip().splitlines() or ["no output"]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise StepError(f"{' '.join(words[1:5])}: {errors[-1].strip()[:160]}")
    return found.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the wheel.

    Returns:
        The wheel, and a copy of the repository without the package: tests there need the wheel.
    """
    source = folder / "source"
    for name in done("git", "ls-files", folder=REPOSITORY).splitlines():
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, source / name)
    options = "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)
    done(sys.executable, "-m", "pip", "wheel", *QUIET, *options, str(source), folder=folder)
    for name in ("pyg_sar", "build"):
        shutil.rmtree(source / name, ignore_errors=True)
    return next(folder.glob("*.whl")), source


@dataclass
class Environment:
    """A virtual environment.

    Args:
        folder: Where it is made.
        wheel: The package.
        source: Where the tests are.
    """

    folder: Path
    wheel: Path
    source: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def install(self, python: str, torch: str, pyg: str) -> list[str]:
        """Makes the environment, and returns the versions in it and if the kernels are there."""
        done(python, "-m", "venv", str(self.folder), folder=self.source)
        wanted = [
            name if wish == "newest" else f"{name}=={wish}"
            for name, wish in (("torch", torch), ("torch-geometric", pyg))
        ]
        wanted.append(f"{self.wheel}[test]")
        done(self.python, "-m", "pip", "install", *QUIET, *wanted, folder=self.source)
        return done(self.python, "-c", VERSIONS, folder=self.source).split()

    def test(self, tests: list[str]) -> str:
        """Returns the last line of pytest: how many tests passed."""
        words = [self.python, "-m", "pytest", "-q", "-W", "default", *tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        ran = subprocess.run(
            words, cwd=self.source, env=environment, capture_output=True, text=True
        )
        failed = re.findall(r"^(?:FAILED|ERROR) \S+?(\w+\.py\S*)", ran.stdout, re.MULTILINE)
        lines = ran.stdout.strip().splitlines() or ran.stderr.strip().splitlines() or ["none"]
        counts = re.sub(r"^=* ?| in .*$", "", lines[-1])
        return counts + "".join(f"; `{name}`" for name in failed[:3])


def row(combination: str, tests: list[str], wheel: Path, source: Path) -> str:
    """Returns the line of a combination."""
    python, torch, pyg = found = combination.split("/")
    if shutil.which(f"python{python}") is None:
        return f"| {python} | {torch} | {pyg} | - | not at hand |"
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder).resolve(), wheel, source)
        try:
            found = environment.install(f"python{python}", torch, pyg)
            result = environment.test(tests)
        except (OSError, StepError) as error:
            found, result = [*found[:3], "-"], f"not tried: {error}".replace(folder, "")
    return f"| {' | '.join([*found, result])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--combinations",
        nargs="+",
        default=list(COMBINATIONS),
        help="versions of Python/PyTorch/PyG",
    )
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files to run")
    parser.add_argument("--out", help="Markdown file to write")
    arguments = parser.parse_args()
    text = (
        f"# Tested versions\n\n{date.today()}, `{command(arguments)}`, "
        f"{platform.system()} {platform.machine()}. One wheel, built with Python "
        f"{platform.python_version()} and PyTorch {version('torch')}, runs in a fresh environment "
        "for each row. `make test` runs all tests with the versions of the Makefile.\n\n"
        f"{HEADER}\n"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        wheel, source = build(Path(folder).resolve())
        for combination in arguments.combinations:
            rows.append(row(combination, arguments.tests, wheel, source))
            print(rows[-1], flush=True)
            if arguments.out:  # What was tried stays, also when a later one is cut short.
                page = Path(arguments.out)
                before = page.read_text() if page.exists() else ""
                _, heading, sections = before.partition("\n## ")
                page.write_text(text + "\n".join(rows) + "\n" + heading + sections)
    sys.exit(any("failed" in line or "error" in line for line in rows))


if __name__ == "__main__":
    main()
