"""The scripts of the folder ``benchmarks`` run, and print the tables that their pages show."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from benchmark_scripts import FOLDER, benchmark

import pyg_sar

SIZES = {
    "epochs": "--nodes 300 --edges 1200 --workers 1 --rounds 1 --dropout 0.5",
    "message_flow": "--graph synthetic:nodes=300 --hidden 4 --models sage --shares 0.1 --epochs 1",
    "sampling": "synthetic:nodes=200 --hidden 4 --seeds 1 --epochs 3 3 --batch-size 40",
    "transform_first": "--nodes 300 --edges 1200 --features 4 --hidden 8 --epochs 1 --workers 2",
}


def columns(text: str) -> set[str]:
    """The first lines of a document's tables, without blanks."""
    heads = re.findall(r"^(\|.*\|)\n\|[ :|-]+\|$", text, flags=re.MULTILINE)
    return {head.replace(" ", "") for head in heads}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_each_is_imported(name):
    if name == "gpu_kernels":
        pytest.importorskip("triton")
    benchmark(name)


@pytest.mark.parametrize("name", SIZES)
def test_it_prints_the_tables_of_its_page(name: str, monkeypatch: Any, capfd: Any) -> None:
    commands = (FOLDER / "README.md").read_text()
    (page,) = re.findall(rf"^\| `python benchmarks/{name}\b.*\]\(([\w/]+\.md)", commands, re.M)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # that others would keep
    # With another number of threads than the tests' workers would start from nothing.
    launch = pyg_sar.launch
    alike = lambda *given, threads_per_worker=None, **more: launch(*given, **more)  # noqa: E731
    monkeypatch.setattr(pyg_sar, "launch", alike)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *SIZES[name].split()])
    benchmark(name).main()
    out = capfd.readouterr().out
    command = re.search(r"`python (.*?)`", out)
    assert command is None or {f"benchmarks/{name}.py", *SIZES[name].split()} <= {
        *command[1].split()
    }
    printed = columns(out)
    assert printed and printed <= columns((FOLDER / page).read_text())
