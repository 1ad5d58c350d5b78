"""Pairs that are no edges, over workers: PyG's pairs, and losses and gradients of one process."""

from __future__ import annotations

import copy
import random
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from hetero_graphs import make_hetero
from hosted_workers import host
from oracle import TOLERANCE, Partitions, make_graph, whole, workers
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAE, GCNConv
from torch_geometric.utils import negative_sampling as sample_in_one_process

import pyg_sar
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.tensors import NodeTensor

NODES = 40
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "link_prediction.py"


# Which pairs ##################################################################

ASKED: dict[str, dict[str, Any]] = {
    "as many as edges": {},
    "a share": {"num_neg_samples": 0.5},
    "a number": {"num_neg_samples": 77, "method": "dense"},
    "both directions": {"force_undirected": True},
    "none": {"num_neg_samples": 0},
    "all there are": {"num_neg_samples": 10**6},
    "all, undirected": {"num_neg_samples": 10**6, "force_undirected": True},
}


def sampled(root: Path) -> list[tuple[Tensor, float]]:
    """All pairs, twice each, and what ``random`` gives afterwards."""
    data, found = pyg_sar.load_partition(root), []
    random.seed(5 + pyg_sar.comm.current().rank)  # Rank 0's state decides.
    for asked in [*ASKED.values(), *ASKED.values()]:
        pairs = pyg_sar.nn.negative_sampling(data.edge_index, data.num_nodes, **asked)
        assert isinstance(pairs, NodeTensor)
        mine = torch.isin(whole(pairs)[1], data.edge_index.to_local().plan.n_id)
        assert torch.equal(pairs.rows.ids.sort().values, mine.nonzero().view(-1))
        assert torch.equal(pairs.local, whole(pairs)[:, pairs.rows.ids])
        found.append((whole(pairs), random.getstate()[1][-1]))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, "hosted", "an idle worker"])
def test_pairs_are_those_of_one_process(world: int | str, partitions: Partitions):
    data = make_graph(NODES)
    random.seed(5)
    expected = []
    for asked in [*ASKED.values(), *ASKED.values()]:
        pairs = sample_in_one_process(data.edge_index, **{**asked, "num_nodes": NODES})
        expected.append((pairs.long(), random.getstate()[1][-1]))
    if isinstance(world, int):
        everyone = workers(sampled, world, partitions(data, world))
    elif world == "hosted":
        everyone = host(sampled, 3, partitions(data, 3))
    else:
        everyone = workers(sampled, 3, partitions(data, 3, torch.arange(NODES) % 2))
    edges = set(map(tuple, data.edge_index.t().tolist()))
    for k, (pairs, state) in enumerate(expected):
        for theirs in everyone:
            found, after = theirs[k]
            assert torch.equal(found, pairs) and after == state, k
            if "force_undirected" not in list(ASKED.values())[k % len(ASKED)]:
                assert not edges & set(map(tuple, found.t().tolist()))


def test_a_complete_graph_has_no_pairs(partitions: Partitions):
    data = Data(edge_index=torch.cartesian_prod(torch.arange(6), torch.arange(6)).t())
    data.num_nodes = 6
    found = workers(sampled, 2, partitions(data, 2))
    assert all(rows[0].shape == (2, 0) for worker in found for rows in worker)


def test_plain_edges_in_one_process():
    edges = make_graph(NODES).edge_index
    found = []
    for sample in (pyg_sar.nn.negative_sampling, sample_in_one_process):
        random.seed(1)
        found.append(sample(edges, NODES, 30))
    assert torch.equal(*found)


def test_what_is_sent(partitions: Partitions):
    """Once per graph: three numbers. Per call: a byte per pair, and the state."""
    data = make_graph(NODES)

    def worker(root: Path) -> list[dict[str, int]]:
        part, found = pyg_sar.load_partition(root), []
        for count in (100, 100, 200):
            with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
                pyg_sar.nn.negative_sampling(part.edge_index, num_neg_samples=count)
            found.append(ledger.sent_bytes(kind="negative sampling"))
        return found

    edges = data.edge_index
    proper = int((edges[0] != edges[1]).sum())
    free = 1 - proper / (NODES * (NODES - 1))
    for first, second, third in workers(worker, 2, partitions(data, 2)):
        assert first - second == 2 * 8 + 8
        assert third - second == int(1.1 * 200 / free) - int(1.1 * 100 / free)


# Training #####################################################################


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(6, 8), GCNConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def link_splits() -> tuple[Data, ...]:
    data = make_graph(NODES)
    for name in ("y", "train_mask", "edge_type", "edge_attr", "edge_weight"):
        del data[name]
    torch.manual_seed(4)
    split = T.RandomLinkSplit(0.2, 0.1, add_negative_train_samples=False)
    found: tuple[Data, ...] = split(data)
    return found


def train(model: torch.nn.Module, data: Data, sample: Any) -> list[Tensor]:
    """Three steps as PyG's ``link_pred.py`` makes them: losses, and the last gradients."""
    random.seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        z = model(data.x, data.edge_index)
        pairs = sample(data.edge_index, num_nodes=data.num_nodes, num_neg_samples=60)
        both = torch.cat([data.edge_label_index, pairs], dim=-1)
        label = torch.cat([data.edge_label, data.edge_label.new_zeros(pairs.size(1))]).double()
        score = (z[both[0]] * z[both[1]]).sum(dim=-1)
        loss = F.binary_cross_entropy_with_logits(score, label)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(torch.as_tensor(p.grad).clone() for p in model.parameters())]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max() + 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_is_that_of_one_process(world: int, tmp_path: Path):
    data = link_splits()[0]
    part = assign_nodes(data.edge_index, NODES, world)
    pyg_sar.write_partitions(data, world, tmp_path / "parts", part)
    model = Net().double()
    expected = train(copy.deepcopy(model), data, sample_in_one_process)

    def worker() -> list[list[Tensor]]:
        part = pyg_sar.load_partition(tmp_path / "parts")
        return [
            train(pyg_sar.distribute(copy.deepcopy(model)), part, sample)
            for sample in (pyg_sar.nn.negative_sampling, sample_in_one_process)
        ]

    for both in workers(worker, world):
        for found in both:
            assert_close(found, expected)


@pytest.mark.parametrize("world", [1, 3])
def test_gae_samples_its_pairs(world: int, partitions: Partitions):
    data, model = make_graph(NODES), GAE(Net()).double()

    def loss_of(auto: GAE, data: Data) -> list[Tensor]:
        random.seed(3)
        loss = auto.recon_loss(auto.encode(data.x, data.edge_index), data.edge_index)
        loss.backward()
        return [loss.detach(), *(torch.as_tensor(p.grad) for p in auto.parameters())]

    expected = loss_of(copy.deepcopy(model), data)

    def worker(root: Path) -> list[Tensor]:
        mine: Any = pyg_sar.distribute(copy.deepcopy(model))
        return loss_of(mine, pyg_sar.load_partition(root))

    for found in workers(worker, world, partitions(data, world)):
        assert_close(found, expected)


def test_lists_of_the_same_nodes_are_joined(tmp_path: Path):
    """The order of the whole list is known, and a layer takes the result as an ``edge_index``."""
    data, conv = link_splits()[1], GCNConv(6, 3, normalize=False).double()
    random.seed(2)
    pairs = sample_in_one_process(data.edge_index, NODES)
    joined = torch.cat([data.edge_label_index, pairs, data.edge_index], dim=1)
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    expected = conv(data.x, joined).detach()

    def worker() -> Any:
        part = pyg_sar.load_partition(tmp_path / "parts")
        random.seed(2)
        lists = [part.edge_label_index, pyg_sar.nn.negative_sampling(part.edge_index)]
        both = torch.cat([*lists, part.edge_index], dim=1)
        turned = torch.cat([part.edge_index, part.edge_label_index.flip(0)], dim=1)
        mine = pyg_sar.distribute(copy.deepcopy(conv))
        return [whole(t.detach()) for t in (mine(part.x, both), both, mine(part.x, turned))]

    turned = conv(data.x, torch.cat([data.edge_index, data.edge_label_index.flip(0)], dim=1))
    for out, ids, other in workers(worker, 3):
        assert torch.allclose(out, expected, rtol=0, atol=TOLERANCE)
        assert torch.equal(ids, joined)
        assert torch.allclose(other, turned.detach(), rtol=0, atol=TOLERANCE)


# What is refused ##############################################################


def test_refused_by_name(partitions: Partitions, tmp_path: Path):
    data = make_graph(NODES)
    pyg_sar.write_partitions(make_hetero(), 2, tmp_path / "hetero", "random")

    def worker(root: Path) -> None:
        edges, rank = pyg_sar.load_partition(root).edge_index, pyg_sar.comm.current().rank
        wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, "same on all workers .got .*30.* at rank 1", {"num_neg_samples": 20}),
            (ValueError, "'num_nodes' to be 40.*got 7. at rank", {"num_nodes": 7}),
            (ValueError, "got .40, 40.. at rank", {"num_nodes": (40, 40)}),
            (ValueError, "'method'.*got 'fast'.*rank 0", {"method": "fast"}),
            (ValueError, "at least 0 .got -1. at rank 0", {"num_neg_samples": -1}),
            (ValueError, "a number .got 'x'. at rank 0", {"num_neg_samples": "x"}),
        ]
        for kind, text, asked in wrong:
            if asked.get("num_neg_samples") == 20:
                asked["num_neg_samples"] += 10 * rank
            with pytest.raises(kind, match=text):
                pyg_sar.nn.negative_sampling(edges, **asked)
        relation = pyg_sar.load_partition(tmp_path / "hetero")["author", "writes", "paper"]
        for other in (edges.flip(0), edges + 0, relation.edge_index):
            with pytest.raises(pyg_sar.errors.DistributedIndexError, match=r"rank \d is flipped"):
                pyg_sar.nn.negative_sampling(other)
        with pytest.raises(TypeError, match="a tensor of shape"):
            pyg_sar.nn.negative_sampling(edges[0])

    workers(worker, 2, partitions(data, 2))


# The example ##################################################################


def test_the_example_shows_one_curve(capsys, monkeypatch):
    assert len(EXAMPLE.read_text().splitlines()) <= 80
    source = "synthetic:nodes=300,classes=4,features=16"
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), source])
    monkeypatch.setattr(pyg_sar, "launch", host)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(\d) workers: (loss .* test AUC (0\.\d+))", line) for line in lines]
    assert [match and match[1] for match in found] == ["1", "2", "3"]
    assert len({match and match[2] for match in found}) == 1
    assert all(match and float(match[3]) > 0.6 for match in found), lines
