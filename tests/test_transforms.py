"""PyG's transforms on a loaded graph: the numbers of one process, or an error. Nothing else.

``docs/what-runs.md`` names those that are refused.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.transforms as T
from hetero_graphs import make_hetero
from oracle import TOLERANCE, make_graph, whole, workers
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform

import pyg_sar
from pyg_sar.tensors import NodeMatrix, whole_matrix

NODES, WORLD = 40, 2
NOT_TRIED = {"BaseTransform", "ComposeFilters", "Pad"}
"""An abstract class, no transform, and one that goes through a set of names, in any order."""

# What transforms need, and other ways to ask for them.
ARGUMENTS: dict[str, list[Callable[[], Any]]] = {
    "AddLaplacianEigenvectorPE": [lambda: T.AddLaplacianEigenvectorPE(2)],
    "AddRandomWalkPE": [lambda: T.AddRandomWalkPE(2)],
    "AddRemainingSelfLoops": [lambda: T.AddRemainingSelfLoops("edge_weight", 2.0)],
    "AddSelfLoops": [
        lambda: T.AddSelfLoops("edge_weight", 3.0), lambda: T.AddSelfLoops("edge_weight", "mean"),
    ],
    "Cartesian": [lambda: T.Cartesian(norm=False), lambda: T.Cartesian(max_value=2.0)],
    "Compose": [lambda: T.Compose([T.OneHotDegree(30), T.Constant()])],
    "Constant": [lambda: T.Constant(2.0), lambda: T.Constant(cat=False)],
    "Distance": [lambda: T.Distance(norm=False), lambda: T.Distance(), lambda: T.Distance(True, 2)],
    "FeaturePropagation": [
        lambda: T.FeaturePropagation(torch.arange(NODES).view(-1, 1).expand(-1, 6) % 3 == 0)
    ],
    "FixedPoints": [lambda: T.FixedPoints(9)],
    "GCNNorm": [lambda: T.GCNNorm(), lambda: T.GCNNorm(add_self_loops=False)],
    "IndexToMask": [lambda: T.IndexToMask("list_index"), lambda: T.IndexToMask(sizes=NODES)],
    "LinearTransformation": [lambda: T.LinearTransformation(torch.arange(9.0).view(3, 3).double())],
    "LocalCartesian": [lambda: T.LocalCartesian(), lambda: T.LocalCartesian(norm=False, cat=False)],
    "MaskToIndex": [lambda: T.MaskToIndex(["train_mask"])],
    "NodePropertySplit": [lambda: T.NodePropertySplit("popularity", [0.3, 0.1, 0.1, 0.3, 0.2])],
    "OneHotDegree": [lambda: T.OneHotDegree(30), lambda: T.OneHotDegree(30, in_degree=True)],
    "Pad": [lambda: T.Pad(60)],
    "RandomFlip": [lambda: T.RandomFlip(0)],
    "RandomJitter": [lambda: T.RandomJitter(0.1)],
    "RandomLinkSplit": [lambda: T.RandomLinkSplit(0.2, 0.1)],
    "RandomRotate": [lambda: T.RandomRotate(30)],
    "RandomScale": [lambda: T.RandomScale((0.5, 2.0))],
    "RandomShear": [lambda: T.RandomShear(0.2)],
    "RemoveSelfLoops": [lambda: T.RemoveSelfLoops("edge_weight")],
    "RemoveTrainingClasses": [lambda: T.RemoveTrainingClasses([1])],
    "RootedEgoNets": [lambda: T.RootedEgoNets(1)],
    "SIGN": [lambda: T.SIGN(2)],
    "SVDFeatureReduction": [lambda: T.SVDFeatureReduction(2)],
    "SamplePoints": [lambda: T.SamplePoints(9)],
    "TargetIndegree": [lambda: T.TargetIndegree(norm=False), lambda: T.TargetIndegree()],
    "ToDevice": [lambda: T.ToDevice("cpu")],
    # MKL's products of sparse matrices read beyond their memory where an entry comes twice.
    "TwoHop": [lambda: T.Compose([T.RemoveDuplicatedEdges(), T.TwoHop()])],
}  # fmt: skip

EIGENVALUES = {"AddLaplacianEigenvectorPE", "LaplacianLambdaMax"}  # From a random start.


class Own(BaseTransform):
    """A user's, over all nodes."""

    def forward(self, data: Data) -> Data:
        data.x = data.x - data.x.mean(0)
        return data


def graphs() -> list[Data]:
    """One with all attributes, and one with few, in float32: each transform takes one of them."""
    data = make_graph(NODES)
    draw = torch.Generator().manual_seed(5)
    data.pos = torch.randn(NODES, 3, generator=draw, dtype=torch.float64)
    data.norm = torch.randn(NODES, 3, generator=draw, dtype=torch.float64)
    data.list_index = torch.tensor([3, 30, 1, 39])
    pos = data.pos[:, :2].float()
    bare = Data(x=data.x.float(), edge_index=data.edge_index, pos=pos, y=data.y)
    return [data, bare]


def names() -> list[str]:
    """PyG's transforms that the documentation names: later versions may have more."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "what-runs.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text))
    return sorted((set(T.__all__) & documented) - NOT_TRIED)


def plain(value: Any, name: str = "") -> Any:
    """A value that can be compared, of all rows."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, HeteroData):
        return {store._key: plain(store.to_dict()) for store in value.stores}
    if isinstance(value, Data | dict):
        return {name: plain(item, name) for name, item in value.items() if name != "num_nodes"}
    if isinstance(value, NodeMatrix) or type(value).__name__ == "SparseTensor":
        value = whole_matrix(value)
        value = value.to_dense()
    value = whole(value)
    if isinstance(value, Tensor):
        value = value.detach()
        if name == "laplacian_eigenvector_pe":  # The last bit of the matrix decides on the signs.
            value = value.abs()
        return value if value.layout == torch.strided else value.to_dense()
    return value


def made(transform: Callable[[], Any], data: Data) -> Any:
    """What a transform makes of a copy; or its error."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(transform()(copy.copy(data)))
        except Exception as problem:
            return problem


def cases() -> list[tuple[str, Callable[[], Any]]]:
    found: list[tuple[str, Callable[[], Any]]] = [("own", Own)]
    for name in names():
        ways = ARGUMENTS.get(name, [getattr(T, name)])
        found += [(name, way) for way in ways]
    return found


def same(found: Any, right: Any, tolerance: float) -> bool:
    if isinstance(right, dict):
        return found.keys() == right.keys() and all(
            same(found[k], right[k], tolerance) for k in right
        )
    if isinstance(right, list):
        return len(found) == len(right) and all(
            same(a, b, tolerance) for a, b in zip(found, right, strict=True)
        )
    if isinstance(right, Tensor):
        if found.shape != right.shape or found.dtype != right.dtype:
            return False
        a, b = found.nan_to_num(-7.0).double(), right.nan_to_num(-7.0).double()
        return right.numel() == 0 or float((a - b).abs().max()) <= tolerance
    if isinstance(right, float):
        return abs(found - right) <= tolerance
    return bool(found == right)


def on_worker(root: Path, graph_of: list[int]) -> list[tuple[str, Any]]:
    """Of each case an empty string where it is right, or what is not; or its error."""
    every = graphs()
    parts = [pyg_sar.load_partition(root / str(k)) for k in range(len(every))]
    found: list[tuple[str, Any]] = []
    for (name, case), k in zip(cases(), graph_of, strict=True):
        if k < 0:
            continue
        out = made(case, parts[k])
        if isinstance(out, Exception):
            found.append((name, f"{type(out).__name__}: {out}"))
            continue
        tolerance = TOLERANCE if k == 0 and name not in EIGENVALUES else 1e-4
        right = same(out, made(case, every[k]), tolerance)
        found.append((name, "" if right else "WRONG"))
    return found


def test_each_is_right(tmp_path: Path, repository: Path):
    part = torch.randint(WORLD, (NODES,), generator=torch.Generator().manual_seed(0))
    graph_of = []
    for k, data in enumerate(graphs()):
        pyg_sar.write_partitions(data, WORLD, tmp_path / str(k), part)
    for _, case in cases():
        runs = [not isinstance(made(case, data), Exception) for data in graphs()]
        graph_of.append(runs.index(True) if any(runs) else -1)
    for found in workers(on_worker, WORLD, tmp_path, graph_of):
        for name, said in found:
            assert not said, (name, said)
    tried = {name for (name, _), k in zip(cases(), graph_of, strict=True) if k >= 0}
    text = (repository / "docs" / "what-runs.md").read_text()
    right = text.partition("Right:")[2].partition("`Pad`")[0]
    assert tried - {"own"} == set(re.findall(r"`(\w+)`", right)), tried


def test_heterogeneous_graphs(tmp_path: Path):
    every = [T.Constant, T.NormalizeFeatures, T.ToUndirected, T.RandomNodeSplit, T.AddSelfLoops]
    pyg_sar.write_partitions(make_hetero(), WORLD, tmp_path / "parts", "random")

    def worker() -> list[str]:
        data = pyg_sar.load_partition(tmp_path / "parts")
        pairs = [(made(case, data), made(case, make_hetero())) for case in every]
        return [repr(a) for a, b in pairs if isinstance(a, Exception) or not same(a, b, TOLERANCE)]

    assert workers(worker, WORLD) == [[], []]
