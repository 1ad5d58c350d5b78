"""Attributes that hold node ids: split to their owners, and whole again."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from hetero_graphs import make_hetero, random_parts
from oracle import MODES, TOLERANCE, make_graph, threads
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv, HeteroConv, SAGEConv

import pyg_sar
from pyg_sar.files import with_checksum
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.metadata import METADATA
from pyg_sar.partition.node_lists import is_named
from pyg_sar.partition.storage import merge_partitions, write_partitions
from pyg_sar.space.index_space import plain
from pyg_sar.tools.verify import sample_nodes

NODES = 40


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def assert_same(found: Any, store: Any) -> None:
    """The same attributes with the same values."""
    assert set(found.keys()) - {"num_nodes"} == set(store.keys()) - {"num_nodes"}
    for name, value in store.items():
        assert same(value, found[name]), name


def graph() -> Data:
    """Lists of node ids in all forms: unsorted, with duplicates, empty, of other dtypes."""
    data = make_graph(NODES)
    draw = torch.Generator().manual_seed(3)
    data.train_idx = torch.tensor([33, 2, 7, 7, 0, 39, 12])
    data.train_y = torch.arange(7) * 100 + 50
    data.val_idx = torch.tensor([5, 4], dtype=torch.int32)
    data.idx_empty = torch.empty(0, dtype=torch.long)
    data.array_idx = np.array([9, 3, 21], dtype=np.int16)
    data.list_idx = [8, 30, 8]
    data.split_idx = {"train": torch.tensor([1, 31, 2]), "valid": torch.tensor([30]), "no test": []}
    data.split_idx["no test"] = torch.empty(0, dtype=torch.long)
    data.roots = torch.tensor([20, 11])
    data.edge_label_index = torch.randint(NODES, (2, 60), generator=draw)
    data.edge_label = torch.rand(60, generator=draw, dtype=torch.float64)
    data.edge_label_time = [str(k) for k in range(60)]
    count = data.num_edges  # As many as there are edges.
    data.pos_edge_label_index = torch.randint(NODES, (2, count), generator=draw)
    data.pos_edge_label = torch.arange(count)
    data.neg_edge_label_index = torch.empty(2, 0, dtype=torch.long)
    data.edge_index_2 = torch.randint(NODES, (2, NODES), generator=draw, dtype=torch.int32)
    data.edge_weight_2 = torch.rand(NODES, generator=draw)
    data.class_idx = torch.arange(NODES) % 5
    data.degree_counts = torch.tensor([3, 4, 5])
    data.is_node_idx = torch.rand(NODES, generator=draw) < 0.5
    return data


SAID = {"roots": True, "class_idx": False, "degree_counts": False}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {}
    for world in (1, 2, 3):
        found[world] = tmp_path_factory.mktemp("ids") / "parts"
        part = torch.randint(
            max(world - 1, 1), (NODES,), generator=torch.Generator().manual_seed(1)
        )
        write_partitions(graph(), world, found[world], part, node_ids=SAID)
    return found


def test_names():
    for name in ("train_idx", "idx_train", "idx", "edge_label_index", "test_indices", "IDX_2"):
        assert is_named(name), name
    for name in ("x", "y", "hidx", "idxs", "train_mask", "surface"):
        assert not is_named(name), name


# What a part holds ###########################################################


def look(root: Path) -> dict[str, Any]:
    """What a worker finds, with the values that the lists choose."""
    data = pyg_sar.load_partition(root, view="local")
    lists = {
        name: (data.n_id[data[name]], data[f"{name}_place"])
        for name in ("train_idx", "val_idx", "idx_empty", "array_idx", "list_idx", "roots")
    }
    for key, ids in data.split_idx.items():
        lists[f"split_idx {key}"] = data.n_id[ids], data.split_idx_place[key]
    assert type(data.train_idx) is Tensor and data.val_idx.dtype == torch.int32
    assert isinstance(data.array_idx, np.ndarray) and isinstance(data.list_idx, list)
    links = {}
    for name in (
        "edge_label_index",
        "pos_edge_label_index",
        "neg_edge_label_index",
        "edge_index_2",
    ):
        edges = data[name]
        assert isinstance(edges, pyg_sar.space.DistEdgeIndex)
        source, target = edges
        assert edges.plan is not data.edge_index.plan and type(target) is Tensor
        ids = torch.stack([data.n_id.double()[source].long(), data.n_id[target]])
        links[name] = ids, data[f"{name}_place"]
        assert torch.equal(edges.order, data[f"{name}_place"])
    names = ("train_y", "edge_label", "edge_label_time", "pos_edge_label", "edge_weight_2")
    rows = {name: data[name] for name in names}
    assert torch.equal(data.class_idx, data.n_id % 5) and data.is_node_idx.dtype == torch.bool
    assert data.degree_counts.tolist() == [3, 4, 5]
    return {"lists": lists, "links": links, "rows": rows}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lists_go_to_the_owners(world: int, roots: dict[int, Path]):
    data, workers = graph(), threads(look, world, roots[world])

    def whole(name: str) -> Tensor:
        if name.startswith("split_idx "):
            return data.split_idx[name.removeprefix("split_idx ")]
        return torch.as_tensor(data[name])

    for level, dim in (("lists", 0), ("links", 1)):
        for name in workers[0][level]:
            place = torch.cat([found[level][name][1] for found in workers])
            ids = torch.cat([found[level][name][0] for found in workers], dim=dim)
            assert torch.equal(place.sort().values, torch.arange(whole(name).size(-1))), name
            assert torch.equal(ids, whole(name).long().index_select(dim, place)), name
    aligned = {
        "train_y": ("lists", "train_idx"),
        "edge_label": ("links", "edge_label_index"),
        "edge_label_time": ("links", "edge_label_index"),
        "pos_edge_label": ("links", "pos_edge_label_index"),
        "edge_weight_2": ("links", "edge_index_2"),
    }
    for found in workers:
        for name, (level, owner) in aligned.items():
            place = found[level][owner][1]
            if name == "edge_label_time":
                assert found["rows"][name] == [data[name][k] for k in place.tolist()]
            else:
                assert torch.equal(found["rows"][name], data[name][place]), name


@pytest.mark.parametrize("world", [1, 2, 3])
def test_merged_as_it_was(world: int, roots: dict[int, Path]):
    assert_same(merge_partitions(roots[world]), graph())


# What is refused #############################################################

REFUSED = {
    "out of range": ({"train_idx": torch.tensor([0, 40])}, "below 40 .got 0 to 40"),
    "negative": ({"train_idx": torch.tensor([-1, 3])}, "got -1 to 3"),
    "pairs out of range": ({"edge_label_index": torch.tensor([[0], [40]])}, "below 40"),
    "labels": (
        {"edge_label_index": torch.zeros(2, 3).long(), "edge_label": torch.zeros(4)},
        "'edge_label' to have one row per column of 'edge_label_index', 3 rows .got 4",
    ),
    "unnamed": ({"roots": torch.tensor([3, 7])}, "'roots' holds integers that could be node ids"),
    "unnamed scalar": ({"root": torch.tensor(3)}, "'root' holds integers"),
    "unnamed array": ({"roots": np.array([3, 7])}, "'roots' holds integers"),
    "unnamed dict": ({"split": {"train": torch.tensor([3])}}, "dict 'split'.*node_ids=\\['split'"),
    "per node": ({"cluster_idx": torch.arange(40) % 3}, "one entry per node, but is named"),
    "edge ids": ({"edge_idx": torch.tensor([1, 2])}, "named after edges"),
    "face": ({"face": torch.zeros(3, 4).long()}, "'face' can't be split"),
    "hyperedge": ({"hyperedge_index": torch.zeros(2, 4).long()}, "can't be split"),
    "shape": ({"train_idx": torch.zeros(5, 2).long()}, r"\[K\] or \[2, K\].*\[5, 2\]"),
    "scalar": ({"root_idx": torch.tensor(3)}, r"\[K\] or \[2, K\]"),
    "number": ({"root_idx": 3}, r"\[K\] or \[2, K\] to be split .got \[\]"),
    "bool": ({"train_idx": torch.ones(4).bool()}, "should hold integers .got torch.bool of shape"),
    "place": ({"train_idx": torch.tensor([1]), "train_idx_place": "a"}, "'train_idx_place' is the"),
    "keys": ({"split_idx": {1: torch.tensor([1])}}, "strings for keys"),
    "mixed dict": ({"split_idx": {"a": torch.tensor([1]), "b": "c"}}, "integers .got str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path):
    change, message = REFUSED[name]
    data = make_graph(NODES)
    for key, value in change.items():
        data[key] = value
    with pytest.raises(ValueError, match=message):
        write_partitions(data, 2, tmp_path / "parts", "random")
    assert list(tmp_path.iterdir()) == []


def test_what_the_caller_says(tmp_path: Path):
    data = make_graph(NODES)
    data.roots, data.cluster_idx = torch.tensor([3, 7]), torch.arange(40) % 3
    data.y = torch.tensor([1])  # Labels of graphs are no ids.
    data.idx, data.step, data.long_idx = 10**30, 3, -1  # Nor what is no node's.
    for wrong, kind in (({"roots": 1}, TypeError), (["root"], ValueError), ([3], TypeError)):
        with pytest.raises(kind, match="node_ids"):
            write_partitions(data, 2, tmp_path / "parts", "random", node_ids=wrong)  # type: ignore
    data.x_idx = torch.rand(3)
    with pytest.raises(ValueError, match="should hold integers .got torch.float32"):
        said = {"x_idx": True, "cluster_idx": False, "roots": True}
        write_partitions(data, 2, tmp_path / "parts", "random", node_ids=said)
    del data.x_idx
    write_partitions(
        data, 2, tmp_path / "parts", "random", node_ids={"roots": False, "cluster_idx": True}
    )

    def worker() -> tuple[list[int], int]:
        part = pyg_sar.load_partition(tmp_path / "parts", view="local")
        assert torch.equal(part.n_id[part.cluster_idx], part.cluster_idx_place % 3)
        return part.roots.tolist(), part.cluster_idx.numel()

    found = threads(worker, 2)
    assert [roots for roots, _ in found] == [[3, 7]] * 2 and sum(n for _, n in found) == 40


def test_labels_of_graphs_are_no_ids(tmp_path: Path):
    data = make_graph(NODES)
    data.batch, data.label = torch.arange(40) // 10, torch.tensor([1, 0, 2, 1])
    write_partitions(data, 2, tmp_path / "parts", "random")
    assert torch.equal(merge_partitions(tmp_path / "parts").label, data.label)


def test_older_partitions_warn(tmp_path: Path):
    """Until version 4 ids were kept as they were."""
    data = make_graph(NODES)
    data.train_idx, data.roots = torch.tensor([3, 7]), torch.tensor([4])
    data.cluster_idx = torch.arange(40) % 3
    hetero = make_hetero()
    hetero["paper"].val_idx = torch.tensor([4, 2])
    hetero["author", "writes", "paper"].edge_label_index = torch.tensor([[3], [7]])
    for graph, names in (
        (data, {"train_idx", "roots", "cluster_idx"}),
        (hetero, {"val_idx", "edge_label_index"}),
    ):
        root = tmp_path / type(graph).__name__
        write_partitions(graph, 1, root, node_ids=dict.fromkeys(names, False))
        path = root / METADATA
        content = {**json.loads(path.read_text()), "version": 4}
        for row in (content, *content.get("hetero", {}).get("types", ())):
            row.pop("lists", None)
        del content["checksum"]
        path.write_text(with_checksum(content))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = pyg_sar.load_partition(root, view="local")
        texts = [str(w.message) for w in caught if "may hold node ids" in str(w.message)]
        assert {text.split("'")[1] for text in texts} == names
        assert all("Partition the graph anew" in text for text in texts)
        assert found is not None


# Training ####################################################################


class LinkModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(6, 8), GCNConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        z = self.second(self.first(x, edge_index).relu(), edge_index)
        return (z[pairs[0]] * z[pairs[1]]).sum(-1)


def link_losses(model: torch.nn.Module, data: Data) -> Tensor:
    score = model(data.x, data.edge_index, data.edge_label_index)
    return F.binary_cross_entropy_with_logits(score, data.edge_label.double(), reduction="none")


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [torch.as_tensor(p.grad) for p in model.parameters()]


def assert_close(found: Any, expected: Any) -> None:
    """The loss and the gradients of the parameters."""
    assert abs(float(found[0]) - float(expected[0])) <= TOLERANCE
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert float((mine - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max() + 1)


def link_splits() -> tuple[Data, Data, Data]:
    data = make_graph(NODES)
    del data.y, data.train_mask, data.edge_type, data.edge_attr, data.edge_weight
    torch.manual_seed(4)
    found: tuple[Data, Data, Data] = T.RandomLinkSplit(0.2, 0.1)(data)
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_link_prediction(world: int, tmp_path: Path):
    """Three splits over the same nodes, with one assignment."""
    splits = link_splits()
    part = assign_nodes(splits[0].edge_index, NODES, world)
    for k, split in enumerate(splits):
        write_partitions(split, world, tmp_path / str(k), part)
    model = LinkModel().double()
    expected = []
    for split in splits:
        model.zero_grad()
        loss = link_losses(model, split).mean()
        loss.backward()
        expected.append((loss.detach(), [g.clone() for g in gradients(model)]))

    def worker() -> Any:
        mine = pyg_sar.distribute(copy.deepcopy(model), view="local")
        found, n_id = [], None
        for k in range(3):
            data = pyg_sar.load_partition(tmp_path / str(k), view="local")
            assert n_id is None or torch.equal(n_id, data.n_id)
            n_id = data.n_id
            mine.zero_grad()
            loss = pyg_sar.mean(link_losses(mine, data))
            loss.backward()
            found.append((loss.detach(), [g.clone() for g in gradients(mine)]))
        return found

    for found in threads(worker, world):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs)


@pytest.mark.parametrize("world", [2, 3])
def test_node_classification_by_lists(world: int, roots: dict[int, Path]):
    """``train_idx`` and ``split_idx``, on a worker without nodes too, scores in the old order."""
    data, model = graph(), GCNConv(6, 3).double()

    def run(model: torch.nn.Module, data: Data, mean: Any) -> Any:
        found = []
        for choose in (lambda d: d.train_idx, lambda d: d.split_idx["train"]):
            model.zero_grad()
            ids = choose(data)
            out = model(data.x, data.edge_index)
            loss = mean(F.cross_entropy(out[ids], data.y[ids], reduction="none"))
            loss.backward()
            found.append((loss.detach(), [g.clone() for g in gradients(model)]))
        return found

    expected = run(copy.deepcopy(model), data, torch.mean)

    def worker() -> Any:
        part = pyg_sar.load_partition(roots[world], view="local")
        return run(pyg_sar.distribute(copy.deepcopy(model), view="local"), part, pyg_sar.mean)

    for found in threads(worker, world):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs)


def test_messages_along_pairs(roots: dict[int, Path]):
    """A second edge list is an ``edge_index`` in every mode: layers take it."""
    data, model = graph(), GCNConv(6, 3).double()
    expected = model(data.x, data.edge_index_2, data.edge_weight_2.double()).detach()

    def worker() -> Any:
        part, found = pyg_sar.load_partition(roots[3], view="local"), []
        for policy in MODES:
            mine = pyg_sar.distribute(copy.deepcopy(model), policy, view="local")
            found.append(mine(part.x, part.edge_index_2, part.edge_weight_2.double()).detach())
        return part.n_id, found

    for n_id, found in threads(worker, 3):
        for out in found:
            assert torch.allclose(out, expected[n_id], rtol=0, atol=TOLERANCE)


# Heterogeneous ###############################################################


def rich() -> HeteroData:
    data = make_hetero()
    data["paper"].train_idx = torch.tensor([20, 0, 3, 3])
    data["paper"].split_idx = {"train": torch.tensor([7, 1]), "test": torch.tensor([2])}
    data["paper"].pair_index = torch.tensor([[3, 20, 5], [20, 0, 0]])
    data["venue"].val_idx = torch.empty(0, dtype=torch.int32)
    draw = torch.Generator().manual_seed(2)
    for edge_type in (("author", "writes", "paper"), ("paper", "cites", "paper")):
        low = torch.tensor([[13 if edge_type[0] == "author" else 21], [21]])
        store = data[edge_type]
        store.edge_label_index = (torch.rand(2, 30, generator=draw) * low).long()
        store.edge_label = torch.rand(30, generator=draw, dtype=torch.float64)
    return data


class HeteroLinks(torch.nn.Module):
    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        convs = {
            key: SAGEConv((data[key[0]].x.size(1), data[key[2]].x.size(1)), 4)
            for key in data.edge_types
        }
        self.conv = HeteroConv(convs)  # type: ignore[arg-type]

    def forward(self, data: HeteroData) -> dict[Any, Tensor]:
        z = self.conv(data.x_dict, data.edge_index_dict)
        found = {}
        for key in (("author", "writes", "paper"), ("paper", "cites", "paper")):
            source, target = data[key].edge_label_index
            found[key] = (z[key[0]][source] * z[key[2]][target]).sum(-1) - data[key].edge_label
        found["nodes"] = z["paper"][data["paper"].train_idx].square().sum(-1)
        found["test"] = z["paper"][data["paper"].split_idx["test"]].exp().sum(-1)
        return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_heterogeneous(world: int, tmp_path: Path):
    data, root = rich(), tmp_path / "parts"
    write_partitions(data, world, root, random_parts(data, world))
    merged = merge_partitions(root)
    for store in data.stores:
        if store._key is not None:
            assert_same(merged[store._key], store)
    model = HeteroLinks(data).double()

    def run(model: torch.nn.Module, data: Any, mean: Any) -> Any:
        loss = sum(mean(values.square()) for values in model(data).values())
        loss.backward()
        return loss.detach(), [torch.zeros(1) if p.grad is None else p.grad
                               for p in model.parameters()]  # fmt: skip

    expected = run(copy.deepcopy(model), data, torch.mean)

    def worker() -> Any:
        part = pyg_sar.load_partition(root, view="local")
        pairs = plain(part["paper"].pair_index)
        assert pairs.size(1) == part["paper"].pair_index_place.numel()
        return run(pyg_sar.distribute(copy.deepcopy(model), view="local"), part, pyg_sar.mean)

    for found in threads(worker, world):
        assert_close(found, expected)


def test_heterogeneous_refusals(tmp_path: Path):
    def refused(change: Any, message: str) -> None:
        data = make_hetero()
        change(data)
        with pytest.raises(ValueError, match=message):
            write_partitions(data, 2, tmp_path / "parts", "random")

    relation = ("author", "writes", "paper")
    ids = torch.tensor([3, 4])
    refused(lambda d: d["paper"].update({"train_idx": ids + 20}), "node type 'paper'.*below 21")
    refused(lambda d: d["paper"].update({"roots": ids}), "'roots' of the node type 'paper'")
    refused(lambda d: d[relation].update({"some_idx": ids}), "move it to the store")
    refused(
        lambda d: d[relation].update({"edge_label_index": torch.tensor([[13], [0]])}),
        r"'writes'.*below \(13, 21\)",
    )
    refused(lambda d: setattr(d, "train_idx", ids), "'train_idx'.*has no node type")
    refused(lambda d: setattr(d, "roots", ids), "'roots' holds integers")


# Elsewhere ###################################################################


def test_a_sample_keeps_its_nodes_of_a_list():
    """``verify`` looks at a subgraph: lists name its nodes, labels stay with their pairs."""
    data = graph()
    data.orig = torch.arange(NODES)
    found = sample_nodes(data, 15, node_ids=SAID)
    assert found.num_nodes == 15
    kept = torch.isin(data.train_idx, found.orig)
    assert torch.equal(found.orig[found.train_idx], data.train_idx[kept])
    assert torch.equal(found.train_y, data.train_y[kept])
    both = torch.isin(data.edge_label_index, found.orig).all(0)
    assert both.any() and torch.equal(
        found.orig[found.edge_label_index], data.edge_label_index[:, both]
    )
    assert torch.equal(found.edge_label, data.edge_label[both])
    assert found.split_idx.keys() == data.split_idx.keys()


class ForVerify(LinkModel):
    def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index, edge_label_index)


@pytest.mark.parametrize("max_nodes", [NODES, 25])
def test_verify_knows_lists(max_nodes: int):
    """Scores of pairs are compared pair by pair, of the whole graph and of a sample."""
    report = pyg_sar.verify(ForVerify(), graph(), max_nodes=max_nodes, node_ids=SAID)
    assert report.ok, report
    assert report.output_error <= TOLERANCE and len(report.gradient_errors) == 5  # and of x


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from pyg_sar.tools.cli import main

    data = make_graph(NODES)
    data.roots, data.cluster_idx = torch.tensor([3, 7]), torch.arange(40) % 3
    torch.save(data, tmp_path / "graph.pt")
    command = ["partition", str(tmp_path / "graph.pt"), "--parts", "2", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "no")]) == 2
    assert "roots" in capsys.readouterr().err
    told = ["--out", str(tmp_path / "p"), "--node-ids", "roots,cluster_idx=no"]
    assert main([*command, *told]) == 0
    verify = ["verify", str(tmp_path / "graph.pt"), "--model", "gcn", "--workers", "1"]
    assert main([*verify, "--node-ids", "roots,cluster_idx=no"]) == 0
    assert "ok" in capsys.readouterr().out
    assert same(merge_partitions(tmp_path / "p").roots, data.roots)
