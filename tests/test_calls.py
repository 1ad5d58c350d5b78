"""How much Python a steady call of a layer runs: a bound on calls, no clock."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import pyg_sar
from pyg_sar.kernels import ops
from pyg_sar.tools import load_graph

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "calls.py"
# files and functions of the package that are entered, and their calls, forward and backward
BOUNDS = {
    ("SAGE", "local"): (28, 140, 300),
    ("GCN", "local"): (28, 140, 330),
    ("GAT", "local"): (36, 240, 700),
    ("SAGE", "global"): (37, 185, 540),
    ("GAT", "global"): (45, 275, 1110),
}

pytestmark = pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")


def script() -> Any:
    spec = importlib.util.spec_from_file_location("calls", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(root: str, name: str, view: str) -> dict[str, int]:
    calls = script()
    found: dict[str, int] = calls.summary(calls.steady_calls(root, name, 0, view))
    return found


@pytest.mark.parametrize(("name", "view"), BOUNDS)
def test_a_steady_call_runs_little_python(
    name: str, view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    graph = load_graph("synthetic:nodes=400,degree=10,features=16")
    pyg_sar.write_partitions(graph, 2, tmp_path / "parts")
    found = pyg_sar.launch(measured, 2, str(tmp_path / "parts"), name, view)[0]
    numbers = tuple(found[what] for what in ("files", "functions", "calls"))
    bounds = BOUNDS[name, view]
    assert all(n <= most for n, most in zip(numbers, bounds, strict=True)), (numbers, bounds)
