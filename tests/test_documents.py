"""The Python of README.md and of docs/ runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import threads
from torch_geometric import transforms
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv, HeteroConv, SAGEConv, global_mean_pool
from torch_geometric.utils import scatter, softmax

import pyg_sar
from pyg_sar.kernels import ops

REPOSITORY = Path(__file__).resolve().parent.parent


def snippets(document: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / document).read_text(), flags=re.DOTALL)


def test_the_first_snippet_is_a_whole_script_and_runs_twice(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(snippets("README.md")[0])
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script.name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr, done.stderr
        found = re.fullmatch(r"test accuracy (\d\.\d+)\n", done.stdout)
        assert found is not None and float(found[1]) > 0.8, done.stdout  # By chance: 1 of 8.


class MyModel(torch.nn.Module):
    """The reader's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 3)

    def forward(self, x, edge_index, edge_attr=None):
        return self.conv(x, edge_index)


class Readout(MyModel):
    def forward(self, x, edge_index, batch):
        return global_mean_pool(super().forward(x, edge_index), batch)


def a_graph() -> Data:
    mask = torch.arange(30) % 3
    return Data(
        x=torch.randn(30, 4),
        edge_index=torch.randint(30, (2, 120)),
        edge_attr=torch.randn(120, 2),
        y=torch.randint(3, (30,)),
        train_mask=mask == 0,
        val_mask=mask == 1,
        test_mask=mask == 2,
        batch=torch.arange(30) // 10,
        graph_y=torch.tensor([0, 1, 2]),
    )


def a_hetero_graph() -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(20, 4), torch.randn(20, 5)
    for source, target in ("ab", "ba"):
        data[source, "to", target].edge_index = torch.randint(20, (2, 60))
    return data


def run(document: str, code: list[str], **names: Any) -> None:
    """Runs pieces of a document one after the other, with what the text around them gives."""
    assert code
    for piece in code:
        exec(compile(piece, document, "exec"), names)


@pytest.mark.parametrize(("document", "first"), [("README.md", 1), ("docs/verify.md", 0)])
def test_verifying(document, first):
    run(document, snippets(document)[first:], pyg_sar=pyg_sar, model=MyModel(), data=a_graph())


def test_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 1, "parts")
    code = snippets("docs/training.md")
    run("docs/training.md", code[:2] + code[5:], MyModel=MyModel)
    assert {"report", "run.ckpt"} <= set(os.listdir())


class Energy(MyModel):
    def forward(self, z, pos, edge_index):
        return self.conv(torch.cat([pos, z.view(-1, 1)], dim=1).sin(), edge_index)


def test_forces(tmp_path):
    data = Data(z=torch.rand(30), pos=torch.randn(30, 3), edge_index=a_graph().edge_index)
    data.force = torch.randn(30, 3)
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")

    def work() -> None:
        mine = pyg_sar.load_partition(tmp_path / "parts")
        pos = mine.pos.requires_grad_()
        code = snippets("docs/training.md")[2:3]
        names = {"torch": torch, "pyg_sar": pyg_sar, "model": Energy(), "data": mine, "pos": pos}
        run("docs/training.md", code, **names)

    threads(work, 3)


def test_link_prediction_and_all_nodes_in_one_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    links, gather = snippets("docs/training.md")[3:5]
    once, each = links.split("# in each worker\n")
    run("docs/training.md", [once], pyg_sar=pyg_sar, data=a_graph(), T=transforms)
    found = []

    class Evaluator:
        """As OGB's."""

        def __init__(self, name: str) -> None:
            self.name = name

        def eval(self, values: Any) -> str:
            found.append([len(rows) for rows in values.values()])
            return self.name

    def work() -> None:
        model = pyg_sar.distribute(MyModel())
        names = {"pyg_sar": pyg_sar, "F": F, "model": model, "Evaluator": Evaluator}
        run("docs/training.md", [each, "out = z", gather], **names)

    threads(work, 4)
    assert found == [[30, 30]]


def test_reductions_over_all_nodes(tmp_path):
    pyg_sar.write_partitions(a_graph(), 3, tmp_path / "parts", "random")
    names = {"softmax": softmax, "scatter": scatter, "global_mean_pool": global_mean_pool}

    def work() -> None:
        data = pyg_sar.load_partition(tmp_path / "parts")
        model = pyg_sar.distribute(Readout())
        names_here = {**names, "F": F, "pyg_sar": pyg_sar, "data": data, "model": model}
        run("docs/global.md", snippets("docs/global.md"), x=data.x, gate=data.x, **names_here)

    threads(work, 3)


def test_heterogeneous_graphs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = snippets("docs/hetero.md")
    once, each = code.split("\n\n")
    run("docs/hetero.md", [once], pyg_sar=pyg_sar, data=a_hetero_graph())

    def work() -> None:
        model = HeteroConv({(s, "to", t): SAGEConv((-1, -1), 3) for s, t in ("ab", "ba")})
        run("docs/hetero.md", [each], pyg_sar=pyg_sar, model=model)

    threads(work, 4)


@pytest.mark.skipif(not ops.built, reason="no C++ kernels")
def test_larger_than_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pyg_sar.write_partitions(a_graph(), 16, "parts", "random")

    def train(root: str) -> int:
        return pyg_sar.load_partition(root).num_nodes

    (code,) = snippets("docs/larger-than-memory.md")
    names = {"pyg_sar": pyg_sar, "train": train}
    assert "/scratch" in code
    run("docs/larger-than-memory.md", [code.replace("/scratch", str(tmp_path))], **names)


def test_compiled():
    data = a_graph()
    names = {"x": data.x, "edge_index": data.edge_index, "model": MyModel()}
    run("docs/compiled.md", snippets("docs/compiled.md"), pyg_sar=pyg_sar, torch=torch, **names)


def test_no_document_with_python_is_left_out():
    documents = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("**/*.md")]
    names = {str(path.relative_to(REPOSITORY)) for path in documents}
    tried = ("compiled", "global", "hetero", "larger-than-memory", "training", "verify")
    found = {name for name in names if snippets(name)}
    assert found == {"README.md", *(f"docs/{name}.md" for name in tried)}
