"""Attributes that hold node ids: split to their owners, and whole again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from hetero_graphs import make_hetero, random_parts
from oracle import MODES, TOLERANCE, alike, error, make_graph, parts, workers
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCNConv, HeteroConv, SAGEConv

import pyg_sar
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.node_lists import is_named
from pyg_sar.partition.storage import merge_partitions, write_partitions
from pyg_sar.space import DistEdgeIndex
from pyg_sar.tensors import NodeTensor
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


# What is loaded ##############################################################

PAIRS = ("edge_label_index", "pos_edge_label_index", "neg_edge_label_index", "edge_index_2")
ROWS = {
    "train_y": "train_idx",
    "edge_label": "edge_label_index",
    "pos_edge_label": "pos_edge_label_index",
    "edge_weight_2": "edge_index_2",
}


def whole_of(data: Data) -> dict[str, Tensor]:
    """Each list, and what has a row per entry; also what is none."""
    names = ("train_idx", "val_idx", "idx_empty", "array_idx", "list_idx", "roots", *PAIRS, *ROWS)
    found = {name: data[name] for name in (*names, "class_idx", "degree_counts", "is_node_idx")}
    found |= {f"split_idx {key}": ids for key, ids in data.split_idx.items()}
    return {name: torch.as_tensor(value) for name, value in found.items()}


def look(root: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The lists of the whole graph; the places of the entries that this worker holds."""
    data = pyg_sar.load_partition(root)
    found, nodes = whole_of(data), data.x.rows.ids
    places = {}
    for name, value in found.items():
        if name == "degree_counts":
            continue
        assert isinstance(value, NodeTensor)
        place = places[name] = value.rows.ids
        if name in PAIRS:
            edges = value.to_local()
            assert isinstance(edges, DistEdgeIndex) and torch.equal(edges.order, place)
            assert edges.plan is not data.edge_index.to_local().plan and type(edges[1]) is Tensor
            ids = value.full_tensor()[:, place]
            assert torch.equal(nodes.double()[edges[0]].long(), ids[0])
            assert torch.equal(nodes[edges[1]], ids[1])
        elif name in ROWS:
            assert value.rows is data[ROWS[name]].rows
        elif name not in ("class_idx", "is_node_idx"):
            assert bool(torch.isin(value.to_local(), nodes).all())
    return {name: value.full_tensor() if name in places else value
            for name, value in found.items()}, places  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lists_go_to_the_owners(world: int, roots: dict[int, Path]):
    expected, found = whole_of(graph()), workers(look, world, roots[world])
    for name, value in expected.items():
        value = value.long() if name in PAIRS else value
        assert all(same(lists[name], value) for lists, _ in found), name
    for name in found[0][1]:
        place = torch.cat([places[name] for _, places in found]).sort().values
        assert torch.equal(place, torch.arange(expected[name].size(-1))), name


@pytest.mark.parametrize("world", [1, 2, 3])
def test_merged_as_it_was(world: int, tmp_path: Path):
    write_partitions(graph(), world, tmp_path / "parts", "random", node_ids=SAID)
    assert_same(merge_partitions(tmp_path / "parts"), graph())


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
    "several": (
        {"roots": torch.tensor([3]), "table": torch.zeros(4, 3).long()},
        r"'roots' holds.*'table' holds.*node_ids=\['roots'\] for.*'roots': False, 'table': False",
    ),
    "no shape of ids": (
        {"table": torch.zeros(4, 3).long()},
        r"say write_partitions\(..., node_ids=\{'table': False\}",
    ),
    "list of another": (
        {"train_idx": torch.arange(5), "train_roots": torch.arange(5)},
        "'train_roots' holds integers",
    ),
    "unnamed dict": ({"split": {"train": torch.tensor([3])}}, "dict 'split'.*node_ids=\\['split'"),
    "per node": ({"cluster_idx": torch.arange(40) % 3}, "one entry per node, but is named"),
    "edge ids": ({"edge_idx": torch.tensor([1, 2])}, "named after edges"),
    "face": ({"face": torch.zeros(3, 4).long()}, "'face' can't be split"),
    "hyperedge": ({"hyperedge_index": torch.zeros(2, 4).long()}, "can't be split"),
    "shape": ({"train_idx": torch.zeros(5, 2).long()}, r"\[K\] or \[2, K\].*\[5, 2\]"),
    "scalar": ({"root_idx": torch.tensor(3)}, r"\[K\] or \[2, K\]"),
    "number": ({"root_idx": 3}, r"\[K\] or \[2, K\] to be split .got \[\]"),
    "bool": ({"train_idx": torch.ones(4).bool()}, "should hold integers .got torch.bool of shape"),
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


def test_integer_labels_go_with_their_list(tmp_path: Path):
    data = make_graph(NODES)
    data.train_idx, data.train_y = torch.tensor([7, 3, 20]), torch.tensor([2, 0, 1])
    write_partitions(data, 2, tmp_path / "parts", "random")

    def worker() -> tuple[list[int], list[int], bool]:
        found = pyg_sar.load_partition(tmp_path / "parts")
        spread = isinstance(found.train_y, NodeTensor)
        return found.train_idx.tolist(), found.train_y.tolist(), spread

    assert parts(worker, 2) == [([7, 3, 20], [2, 0, 1], True)] * 2


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
        part = pyg_sar.load_partition(tmp_path / "parts")
        assert torch.equal(part.cluster_idx.full_tensor(), torch.arange(40) % 3)
        return part.roots.tolist(), part.cluster_idx.to_local().numel()

    found = workers(worker, 2)
    assert [roots for roots, _ in found] == [[3, 7]] * 2 and sum(n for _, n in found) == 40


def test_labels_of_graphs_are_no_ids(tmp_path: Path):
    data = make_graph(NODES)
    data.batch, data.label = torch.arange(40) // 10, torch.tensor([1, 0, 2, 1])
    write_partitions(data, 2, tmp_path / "parts", "random")
    assert torch.equal(merge_partitions(tmp_path / "parts").label, data.label)


# Training ####################################################################


class LinkModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(6, 8), GCNConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        z = self.second(self.first(x, edge_index).relu(), edge_index)
        return (z[pairs[0]] * z[pairs[1]]).sum(-1)


def assert_close(found: Any, expected: Any) -> None:
    """The loss and the gradients of the parameters."""
    assert error(found[0], expected[0]) <= TOLERANCE
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert float((mine - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max() + 1)


def trained(model: torch.nn.Module, loss: Callable[[torch.nn.Module], Tensor]) -> Any:
    """A loss, and the gradients of the parameters."""
    model.zero_grad()
    value = loss(model)
    value.backward()
    missing = torch.zeros(1, dtype=torch.float64)
    return value.detach(), [missing if p.grad is None else p.grad.clone()
                            for p in model.parameters()]  # fmt: skip


def link_loss(data: Data) -> Callable[[torch.nn.Module], Tensor]:
    return lambda model: F.binary_cross_entropy_with_logits(
        model(data.x, data.edge_index, data.edge_label_index), data.edge_label.double()
    )


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
    expected = [trained(model, link_loss(split)) for split in splits]

    def worker() -> Any:
        mine = pyg_sar.distribute(copy.deepcopy(model))
        parts = [pyg_sar.load_partition(tmp_path / str(k)) for k in range(3)]
        assert all(torch.equal(data.x.rows.ids, parts[0].x.rows.ids) for data in parts)
        return [trained(mine, link_loss(data)) for data in parts]

    for found in workers(worker, world):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs)


@pytest.mark.parametrize("world", [2, 3])
def test_node_classification_by_lists(world: int, roots: dict[int, Path]):
    """``train_idx`` and ``split_idx``, on a worker without nodes too."""
    plain = GCNConv(6, 3).double()

    def run(data: Data, ready: Callable[[Any], Any]) -> Any:
        model, lists = ready(copy.deepcopy(plain)), (data.train_idx, data.split_idx["train"])
        return [
            trained(
                model,
                lambda m, ids=ids: F.cross_entropy(m(data.x, data.edge_index)[ids], data.y[ids]),
            )
            for ids in lists
        ]

    alike(run, graph(), roots[world], world)


def test_messages_along_pairs(roots: dict[int, Path]):
    """A second edge list is an ``edge_index`` in every mode: layers take it."""
    plain = GCNConv(6, 3).double()

    def outs(data: Data, ready: Callable[[Any], Any]) -> list[Tensor]:
        model, found = ready(copy.deepcopy(plain)), []
        for policy in MODES:
            model.policy = policy
            found.append(model(data.x, data.edge_index_2, data.edge_weight_2.double()).detach())
        return found

    alike(outs, graph(), roots[3], 3)


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

    def loss(data: Any) -> Callable[[torch.nn.Module], Tensor]:
        return lambda m: sum(values.square().mean() for values in m(data).values())  # type: ignore

    expected = trained(copy.deepcopy(model), loss(data))

    def worker() -> Any:
        part = pyg_sar.load_partition(root)
        pairs = part["paper"].pair_index
        assert torch.equal(pairs.full_tensor(), torch.tensor([[3, 20, 5], [20, 0, 0]]))
        return trained(pyg_sar.distribute(model), loss(part))

    for found in workers(worker, world):
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
    from pyg_sar.__main__ import main

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
