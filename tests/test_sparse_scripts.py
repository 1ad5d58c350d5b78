"""Scripts that import torch-sparse and torch-scatter print on parts what one process prints."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric import datasets
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.typing import WITH_TORCH_SCATTER, WITH_TORCH_SPARSE
from torch_geometric.utils import coalesce, remove_self_loops

from pyg_sar.comm.group import finalize
from pyg_sar.tools.script import ScriptConfig, work

pytestmark = pytest.mark.skipif(
    not (WITH_TORCH_SPARSE and WITH_TORCH_SCATTER),
    reason="needs torch-sparse and torch-scatter: pip install 'pyg_sar[sparse]'",
)
FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "sparse_scripts"
LINES = {"gcn": 4, "difformer": 3, "linkx": 3, "scatter": 4, "sign": 5}


class Planetoid(InMemoryDataset):
    """A small graph, sorted as Planetoid's, undirected."""

    def __init__(self, root: str, name: str, transform: Any = None) -> None:
        super().__init__("graphs", transform)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self) -> list[str]:
        return ["data.pt"]

    def process(self) -> None:
        draw = torch.Generator().manual_seed(1)
        half = torch.randint(40, (2, 70), generator=draw)
        edges = coalesce(remove_self_loops(torch.cat([half, half.flip(0)], 1))[0])
        data = Data(x=torch.rand(40, 5, generator=draw), edge_index=edges)
        data.y = torch.randint(3, (40,), generator=draw)
        data.train_mask = torch.rand(40, generator=draw) < 0.6
        self.save([data], self.processed_paths[0])


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


@pytest.mark.parametrize("name", sorted(LINES))
def test_a_script(name: str, tmp_path, monkeypatch, capsys):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "Planetoid", Planetoid)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        expected = out.getvalue()
        capsys.readouterr()
        assert work(ScriptConfig(script=str(FOLDER / f"{name}.py"), parts=3, cache="cache")) == 0
    finally:
        finalize()
        torch.set_default_dtype(before)
    found = capsys.readouterr().out
    assert len(expected.splitlines()) == len(found.splitlines()) == LINES[name]
    assert numbers(found) == pytest.approx(numbers(expected), abs=1e-10)
