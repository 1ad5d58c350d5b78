"""The examples run, show what they promise, and stay as short as they promise to be."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tokenize
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import everything
from forked_workers import Templates

from pyg_sar.comm.launch import _Worker
from pyg_sar.kernels import ops

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOK = EXAMPLES / "debug_in_a_notebook.ipynb"
TUTORIAL = EXAMPLES.parent / "docs" / "tutorial.ipynb"
LIMITS = ops.built and sys.platform.startswith("linux")


def run_example(name: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr, ran.stderr
    return ran.stdout


def run_here(name: str, capfd: pytest.CaptureFixture[str]) -> str:
    """As :func:`run_example`, in this process: its workers need not import everything anew."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capfd.readouterr()
    assert "Warning" not in shown.err, shown.err
    return shown.out


def test_quickstart_learns():
    out = run_example("quickstart.py")
    assert out.count("epoch 30: loss") == 1  # Rank 0 speaks alone.
    found = re.search(r"test accuracy (\d\.\d+)", out)
    assert found is not None and float(found[1]) > 0.8


def test_quickstart_is_short_and_changes_two_lines():
    path = EXAMPLES / "quickstart.py"
    assert len(path.read_text().splitlines()) <= 60
    with path.open("rb") as file:
        comments = [
            t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT
        ]
    replaced = [c for c in comments if "=" in c]
    assert len(replaced) == 2
    assert all(word in " ".join(replaced) for word in ("data =", "model ="))


def test_hetero_learns(capfd):
    out = run_here("hetero.py", capfd)
    assert out.count("epoch 30: loss") == 1 and "author writes paper" in out
    found = re.search(r"other papers (\d\.\d+)", out)
    assert found is not None and float(found[1]) > 0.8


def test_rgcn_learns(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rgcn.py"])
    assert len((EXAMPLES / "rgcn.py").read_text().splitlines()) <= 80
    found = re.findall(r"'(num_\w+)': \d.: test accuracy (\d\.\d+)", run_here("rgcn.py", capfd))
    assert [name for name, _ in found] == ["num_bases", "num_blocks"]
    assert all(float(accuracy) > 0.5 for _, accuracy in found)  # By chance: 1 of 3.


def test_propagation_is_the_same_on_workers(capfd):
    before = torch.get_default_dtype()
    assert len((EXAMPLES / "propagation.py").read_text().splitlines()) <= 80
    try:
        out = run_here("propagation.py", capfd)
    finally:
        torch.set_default_dtype(before)
    found = re.findall(r"(.+): test accuracy (\S+), largest difference (\S+)", out)
    names = ["SIGN", "SGC", "APPNP", "label propagation", "SGC, C&S"]
    assert [name for name, *_ in found] == names
    assert all(float(right) > 0.5 and float(apart) < 1e-10 for _, right, apart in found)


def test_mesh_is_the_same_on_workers(capfd):
    assert len((EXAMPLES / "mesh.py").read_text().splitlines()) <= 80
    out = run_here("mesh.py", capfd)
    found = re.search(r"loss (\S+) to (\S+); largest difference (\S+)", out)
    assert found is not None and float(found[2]) < 0.3 * float(found[1])
    assert float(found[3]) < 1e-10


def test_potential_is_the_same_on_workers(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["potential.py", "4", "20"])
    assert len((EXAMPLES / "potential.py").read_text().splitlines()) <= 80
    found = re.search(
        r"loss (\S+) to (\S+); largest difference (\S+)", run_here("potential.py", capfd)
    )
    assert found is not None and float(found[2]) < 0.3 * float(found[1])
    assert float(found[3]) < 1e-10


@pytest.mark.skipif(not LIMITS, reason="no C++ kernels, or no Linux, which the store is for")
def test_larger_than_memory_stays_within_its_limit():
    path = EXAMPLES / "larger_than_memory.py"
    assert len(path.read_text().splitlines()) <= 80
    out = run_example(path.name)
    assert out.count("epoch 6: loss") == 1
    accuracy = re.search(r"test accuracy (\d\.\d+)", out)
    assert accuracy is not None and float(accuracy[1]) > 0.8
    found = re.search(r"at most (\d+) MiB .* limit was (\d+)MiB", out)
    assert found is not None and int(found[1]) <= int(found[2])


def test_custom_layer_is_the_same_on_workers(capfd):
    out = run_here("custom_layer.py", capfd)
    assert "2 workers and one process: the same" in out
    names = ["out", *(f"conv{k}.{part}" for k in (1, 2) for part in ("root", "neighbour", "gate"))]
    assert all(name in out for name in names)


def outputs(cell: dict[str, Any]) -> str:
    """What a code cell printed and returned, as text."""
    texts = [o.get("text", o.get("data", {}).get("text/plain", "")) for o in cell["outputs"]]
    return "".join("".join(text) for text in texts)


def in_a_kernel(paths: Sequence[Path]) -> dict[Path, list[str]]:
    """What the code cells of notebooks give; each runs in a kernel of its own."""
    nbclient = pytest.importorskip("nbclient", reason="the extra 'notebook' is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra 'notebook' is not installed")
    pytest.importorskip("ipykernel", reason="the extra 'notebook' is not installed")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        # The kernel warns about its transport, tqdm about missing widgets.
        patch.setenv("PYTHONWARNINGS", "ignore")
        for path in paths:
            notebook = nbformat.read(path, as_version=4)
            nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
            found[path] = [outputs(c) for c in notebook.cells if c["cell_type"] == "code"]
    return found


def as_scripts(paths: Sequence[Path], folder: Path, forked: Templates) -> dict[Path, list[str]]:
    """The same, run as scripts by this process, whose workers need not import everything anew.

    Those of which the memory is measured do, as a user's: they host parts.
    """

    def start(rank: int, common: Mapping[str, str]) -> Any:
        hosts = "MKL_DISABLE_FAST_MM" in common
        return (forked.from_nothing if hosts else forked.start)(rank, common)

    found = {}
    for path in paths:
        script, printed = folder / f"{path.stem}.py", io.StringIO()
        script.write_text("\nprint(chr(0), end='')\n".join(map(showing_its_value, codes(path))))
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
            patch.setattr(_Worker, "start", start)
            runpy.run_path(str(script), run_name="__main__")
        found[path] = printed.getvalue().split("\0")
    return found


def codes(path: Path) -> list[dict[str, Any]]:
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def showing_its_value(cell: dict[str, Any]) -> str:
    """A cell's code, which prints the value of its last line as a notebook does."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body[-1]
    if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call):
        tree.body[-1] = ast.parse(f"print({ast.unparse(last)}, end='')").body[0]
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory, forked: Templates) -> dict[Path, str]:
    """What the cells of both notebooks gave: outputs like those that the files show.

    With ``--all`` in a kernel. After a change:
    ``PYTHONWARNINGS=ignore jupyter execute --inplace docs/*.ipynb``.
    """
    paths = (NOTEBOOK, TUTORIAL) if LIMITS else (NOTEBOOK,)
    folder = tmp_path_factory.mktemp("notebooks")
    found = in_a_kernel(paths) if everything() else as_scripts(paths, folder, forked)
    for path, texts in found.items():
        for cell, text in zip(codes(path), texts, strict=True):
            assert shape(text) == shape(outputs(cell)), cell["source"]
    return {path: "".join(texts) for path, texts in found.items()}


def test_notebook_runs_and_gives_the_outputs_it_shows(executed):
    assert "four workers" in executed[NOTEBOOK]


@pytest.mark.skipif(not LIMITS, reason="no C++ kernels, or no Linux, which the store is for")
def test_tutorial_runs_and_keeps_its_limit_of_memory(executed):
    text = executed[TUTORIAL]
    without, limit, within = map(int, re.findall(r"(\d+) MiB(?: beyond|:)", text))
    assert within <= limit < without
    assert "ok: the same as one process" in text and "DIFFERS: the input of 'conv'" in text


def shape(text: str) -> str:
    """The text without its fractions and peaks, which depend on the machine."""
    return re.sub(r"\d+\.\d+|\d+e[-+]\d+|target \d+|\d+ mib beyond", "#", text.lower())


@pytest.mark.parametrize("path", [NOTEBOOK, TUTORIAL], ids=lambda path: path.stem)
def test_notebook_shows_no_errors_and_no_paths(path):
    text = path.read_text()
    assert '"output_type": "error"' not in text and '"stderr"' not in text
    assert not re.search(r"/(home|root|tmp|work|Users)\b", text)
    code = codes(path)
    assert len(code) >= 7 and all(c["execution_count"] for c in code)
    assert sum(bool(c["outputs"]) for c in code) == len(code)


def test_atoms_move_as_in_one_process_and_keep_their_energy(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["molecular_dynamics.py", "4", "20"])
    out = run_here("molecular_dynamics.py", capfd)
    drift, apart = (float(x) for x in re.findall(r"(\S+e[-+]\d+)", out))
    assert drift < 1e-3 and apart < 1e-12
    assert len((EXAMPLES / "molecular_dynamics.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", ["many_meshes.py", "weather.py"])
def test_many_graphs_and_snapshots_train_as_in_one_process(name, capfd):
    out = run_here(name, capfd)
    first, last, apart = map(float, re.findall(r"(\d\S*\d)", out))
    assert last < 0.7 * first and apart < 1e-10
    assert len((EXAMPLES / name).read_text().splitlines()) <= 80


def test_a_lightning_module_learns(capfd, monkeypatch):
    pytest.importorskip("lightning", reason="needs the extra 'lightning'")
    monkeypatch.setattr(sys, "argv", ["lightning_gcn.py"])
    runpy.run_path(str(EXAMPLES / "lightning_gcn.py"), run_name="__main__")
    found = re.search(r"validation accuracy (\d\.\d+)", capfd.readouterr().out)
    assert found is not None and float(found[1]) > 0.8
    assert len((EXAMPLES / "lightning_gcn.py").read_text().splitlines()) <= 80
