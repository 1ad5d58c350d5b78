"""PyG's transforms on a part: the whole graph's numbers, or refused by name. Nothing else.

``docs/transforms.md`` holds the table that :func:`table` makes of what is tried here.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.transforms as T
from hetero_graphs import make_hetero
from oracle import TOLERANCE, make_graph, threads
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.partition.loading import RIGHT

NODES, WORLD = 40, 3
NOT_TRIED = {"BaseTransform", "ComposeFilters"}  # An abstract class, and no transform.

# Those that give the whole graph's numbers, as they do so.
TRIED: dict[str, list[Callable[[], Any]]] = {
    "AddRemainingSelfLoops": [lambda: T.AddRemainingSelfLoops("edge_weight", 2.0)],
    "AddSelfLoops": [
        lambda: T.AddSelfLoops("edge_weight", 3.0), lambda: T.AddSelfLoops("edge_weight", "mean"),
    ],
    "Compose": [lambda: T.Compose([T.OneHotDegree(30), T.Constant()])],
    "Constant": [lambda: T.Constant(2.0), lambda: T.Constant(cat=False)],
    "GCNNorm": [lambda: T.GCNNorm(), lambda: T.GCNNorm(add_self_loops=False)],
    "IndexToMask": [lambda: T.IndexToMask("list_index")],
    "LinearTransformation": [lambda: T.LinearTransformation(torch.arange(4.0).view(2, 2).double())],
    "LocalCartesian": [lambda: T.LocalCartesian(), lambda: T.LocalCartesian(norm=False, cat=False)],
    "LocalDegreeProfile": [lambda: T.LocalDegreeProfile()],
    "MaskToIndex": [lambda: T.MaskToIndex(["train_mask"])],
    "OneHotDegree": [lambda: T.OneHotDegree(30), lambda: T.OneHotDegree(30, in_degree=True)],
    "PointPairFeatures": [lambda: T.Compose([Deepen(), T.PointPairFeatures()])],
    "RemoveSelfLoops": [lambda: T.RemoveSelfLoops("edge_weight")],
    "RemoveTrainingClasses": [lambda: T.RemoveTrainingClasses([1])],
    "ToDevice": [lambda: T.ToDevice("cpu")],
    "Cartesian": [lambda: T.Cartesian(norm=False), lambda: T.Cartesian(max_value=2.0)],
    "Distance": [lambda: T.Distance(norm=False), lambda: T.Distance(max_value=2.0)],
    "Polar": [lambda: T.Polar(norm=False), lambda: T.Polar(max_value=2.0)],
    "Spherical": [lambda: T.Compose([Deepen(), T.Spherical(norm=False)])],
    "TargetIndegree": [lambda: T.TargetIndegree(norm=False), lambda: T.TargetIndegree(max_value=9)],
}  # fmt: skip

# What else these can be asked for, and is refused.
LEFT: dict[str, list[Any]] = {
    "Cartesian": [T.Cartesian()],
    "Distance": [T.Distance()],
    "Polar": [T.Polar()],
    "Spherical": [T.Spherical()],
    "TargetIndegree": [T.TargetIndegree()],
    "IndexToMask": [T.IndexToMask(sizes=NODES)],
}

# The arguments of those that are refused, where they need some.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "AddGPSE": (torch.nn.Identity(),),
    "AddLaplacianEigenvectorPE": (2,),
    "AddMetaPaths": ([[("a", "b"), ("b", "a")]],),
    "AddRandomMetaPaths": ([[("a", "b"), ("b", "a")]],),
    "AddRandomWalkPE": (2,),
    "FeaturePropagation": (torch.zeros(1, 1, dtype=torch.bool),),
    "FixedPoints": (9,),
    "GridSampling": (1.0,),
    "KNNGraph": (2,),
    "NodePropertySplit": ("popularity", [0.3, 0.1, 0.1, 0.3, 0.2]),
    "Pad": (60,),
    "RadiusGraph": (1.0,),
    "RandomFlip": (0,),
    "RandomJitter": (0.1,),
    "RandomRotate": (30,),
    "RandomScale": ((0.5, 2.0),),
    "RandomShear": (0.2,),
    "RootedEgoNets": (1,),
    "RootedRWSubgraph": (2,),
    "SIGN": (2,),
    "SVDFeatureReduction": (2,),
    "SamplePoints": (9,),
}


class Deepen(BaseTransform):
    """Gives positions a third coordinate; called by its ``forward`` only."""

    def __call__(self, data: Data) -> Data:
        return self.forward(data)

    def forward(self, data: Data) -> Data:
        data.pos = torch.cat([data.pos, data.pos[:, :1].square()], dim=1)
        return data


class Own(BaseTransform):
    def forward(self, data: Data) -> Data:
        data.x = data.x - data.x.mean(0)
        return data


def graph() -> Data:
    data = make_graph(NODES)
    draw = torch.Generator().manual_seed(5)
    data.pos = torch.randn(NODES, 2, generator=draw, dtype=torch.float64)
    data.norm = torch.randn(NODES, 3, generator=draw, dtype=torch.float64)
    data.list_index = torch.tensor([3, 30, 1, 39])
    return data


def names() -> list[str]:
    """PyG's transforms that the documentation names: later versions may have more, all refused."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "transforms.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert len(documented) > 50
    return sorted((set(T.__all__) & documented) - NOT_TRIED)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transforms") / "parts"
    part = torch.randint(WORLD - 1, (NODES,), generator=torch.Generator().manual_seed(0))
    pyg_sar.write_partitions(graph(), WORLD, folder, part)  # The last worker has no nodes.
    return folder


# Right #######################################################################


def node_columns(data: Data, ids: Tensor) -> dict[str, Tensor]:
    """Everything with a row per node, in global order where ``ids`` are the nodes'."""
    return {
        name: value
        for name, value in data.to_dict().items()
        if isinstance(value, Tensor) and value.dim() and value.size(0) == len(ids)
        and "index" not in name and "edge" not in name
    }  # fmt: skip


def edge_rows(data: Data, sources: Tensor, targets: Tensor) -> list[list[float]]:
    """Every edge with its weight and attributes, as far as there is one of each for each edge."""
    columns = [sources.view(-1, 1).double(), targets.view(-1, 1).double()]
    for name in ("edge_weight", "edge_attr"):
        value = data[name]
        if len(value) == len(sources):
            columns.append(value.reshape(len(value), value.shape[1:].numel()).double())
    found: list[list[float]] = torch.cat(columns, dim=1).nan_to_num(-7).tolist()
    return found


def on_a_part(root: Path) -> list[Any]:
    """What each transform makes of this worker's part, by global ids."""
    data, found = pyg_sar.load_partition(root, view="local"), []
    n_id = data.n_id
    for makes in TRIED.values():
        for make in makes:
            part = make()(copy.copy(data))
            source, target = part.edge_index
            ends = n_id.double()[source].long(), n_id[target]
            index = part.get("train_index")
            index = None if index is None else n_id[index]
            found.append((n_id, node_columns(part, n_id), edge_rows(part, *ends), index))
        assert torch.equal(data.x, pyg_sar.load_partition(root, view="local").x)
    return found


def test_what_passes_gives_the_whole_graphs_numbers(root: Path):
    assert set(TRIED) == set(RIGHT)
    workers = threads(on_a_part, WORLD, root)
    cases = [(name, make) for name, makes in TRIED.items() for make in makes]
    for k, (name, make) in enumerate(cases):
        whole = make()(graph())
        expected = node_columns(whole, torch.arange(NODES))
        ids = torch.cat([found[k][0] for found in workers]).argsort()
        for column, value in expected.items():
            rows = torch.cat([found[k][1][column] for found in workers])[ids]
            assert torch.allclose(rows.double(), value.double(), rtol=0, atol=TOLERANCE), name
        edges = sorted(row for found in workers for row in found[k][2])
        right = sorted(edge_rows(whole, *whole.edge_index))
        difference = torch.tensor(edges, dtype=torch.float64) - torch.tensor(
            right, dtype=torch.float64
        )
        assert float(difference.abs().max()) <= TOLERANCE, name
        if "train_index" in whole:
            chosen = torch.cat([found[k][3] for found in workers]).sort().values
            assert torch.equal(chosen, whole.train_index), name


# Refused #####################################################################


def refused(transform: Any, data: Data | HeteroData) -> str:
    before = repr(data)
    with pytest.raises(DistributedIndexError, match="before write_partitions") as caught:
        transform(data)
    assert repr(data) == before
    return str(caught.value)


def make(name: str) -> Any:
    kind = getattr(T, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(*ARGUMENTS.get(name, ()))


def test_all_others_are_refused_by_name(root: Path):
    others = [make(name) for name in names() if name not in RIGHT]
    others += [transform for some in LEFT.values() for transform in some]

    def worker() -> list[str]:
        data = pyg_sar.load_partition(root, view="local")
        messages = [refused(transform, data) for transform in others]
        inner = refused(T.Compose([T.Constant(), T.Center()]), data)
        assert inner.startswith("'torch_geometric.transforms.Center' on one worker's part")
        own = refused(Own(), data)
        assert "test_transforms.Own'" in own and "call its forward(data)" in own
        assert Own().forward(copy.copy(data)).num_nodes == data.num_nodes
        assert type(copy.copy(data)) is type(copy.deepcopy(data)) is type(data)
        return messages

    for messages in threads(worker, WORLD):
        for transform, message in zip(others, messages, strict=True):
            assert f"transforms.{type(transform).__name__}' on" in message
    assert "norm=False" in messages[-2] and "'sizes'" in messages[-1]


def test_heterogeneous_parts(tmp_path: Path):
    pyg_sar.write_partitions(make_hetero(), 2, tmp_path / "parts", "random")

    def worker() -> None:
        data = pyg_sar.load_partition(tmp_path / "parts", view="local")
        assert isinstance(T.Constant()(data), HeteroData)
        for transform in (T.NormalizeFeatures(), T.ToUndirected(), T.RandomNodeSplit()):
            assert type(transform).__name__ in refused(transform, data)

    threads(worker, 2)


# The table ###################################################################


def table(transforms: Iterable[str]) -> list[str]:
    lines = ["| transform | on a part |", "|---|---|"]
    for name in transforms:
        said = "refused"
        if name in RIGHT:
            hint = RIGHT[name][1]
            said = "right" if not hint else f"right, but {hint}"
        lines.append(f"| `{name}` | {said} |")
    return lines


def test_the_documentation_has_the_table(repository: Path):
    """``print("\\n".join(table(sorted(set(T.__all__) - NOT_TRIED))))`` prints it."""
    assert set(RIGHT) <= set(names())
    text = (repository / "docs" / "transforms.md").read_text()
    assert [line for line in table(names()) if line not in text.splitlines()] == []
