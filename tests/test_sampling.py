"""Training on sampled neighbours: one sample for any number of workers, PyG's numbers on it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    CHANNELS,
    CLASSES,
    TOLERANCE,
    error,
    make_graph,
    parts,
    whole,
    workers,
)
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.partition.message_flow import sample_neighbors
from pyg_sar.tools import cli
from pyg_sar.tools import run as tool
from pyg_sar.train import NeighborSampling, TrainConfig
from pyg_sar.train.flow import call_model

NODES, FANOUT = 80, (4, 2)
SAMPLING = NeighborSampling(num_neighbors=FANOUT, batch_size=16)
CONFIG = TrainConfig(epochs=2, restore_best=False, eval_every=2)


@pytest.fixture(scope="module")
def graph() -> Data:
    data = make_graph(NODES, 800)
    data.val_mask = data.test_mask = ~data.train_mask
    del data.edge_weight
    return data


@pytest.fixture(scope="module")
def models() -> list[nn.Module]:
    torch.manual_seed(4)
    return [kind(CHANNELS, 8, 2, CLASSES).double() for kind in (GCN, GAT)]


def sampled(root: Path, models: list[nn.Module], seeds: torch.Tensor) -> Any:
    data = pyg_sar.load_partition(root)
    flow = sample_neighbors(data, seeds, FANOUT, key=5)
    outs = [call_model(pyg_sar.distribute(copy.deepcopy(m)), flow) for m in models]
    outs = [whole(out[: flow.batch_size].detach()) for out in outs]
    return outs, whole(flow.n_id), whole(flow.e_id), whole(flow.edge_index)


@pytest.mark.parametrize(("world", "run"), [(1, workers), (3, workers), (4, parts)])
def test_numbers_are_those_of_pyg_on_the_sampled_edges(world, run, graph, partitions, models):
    seeds = torch.tensor([2, 3, 30, 77])
    everyone = run(sampled, world, partitions(graph, world), models, seeds)
    alone = workers(sampled, 1, partitions(graph, 1), models, seeds)[0]
    e_id = alone[2]
    # Each node has its neighbours or as many as were asked for, by the hop where it is found.
    source, target = graph.edge_index
    degree, found = target.bincount(minlength=NODES), target[e_id].bincount(minlength=NODES)
    first = torch.isin(torch.arange(NODES), seeds)
    second = torch.zeros(NODES, dtype=torch.bool)
    second[source[e_id[first[target[e_id]]]]] = True
    most = torch.where(first, FANOUT[0], torch.where(second, FANOUT[1], 0))
    assert torch.equal(found, degree.minimum(most)) and bool((degree > most)[first].any())
    for _, *ids in everyone:
        assert all(map(torch.equal, ids, alone[1:]))
        assert torch.equal(ids[0][: len(seeds)], seeds)
        assert torch.equal(ids[0][ids[2]], graph.edge_index[:, e_id])
    # PyG trims: its layers see the edges into the batch's nodes only at last.
    for k, model in enumerate(models):
        x, edges = graph.x, graph.edge_index[:, e_id]
        hidden = model.act(model.convs[0](x, edges))
        expected = model.convs[1](hidden, edges[:, first[edges[1]]]).detach()[seeds]
        assert all(error(outs[k], expected) < TOLERANCE for outs, *_ in everyone)


def train(root: Path, models: list[nn.Module]) -> list[Any]:
    data = pyg_sar.load_partition(root)
    own = [pyg_sar.distribute(copy.deepcopy(model)) for model in models]
    return [pyg_sar.Trainer(model, data, CONFIG, sampler=SAMPLING).fit() for model in own]


def test_any_number_of_workers_trains_the_same(graph, partitions, models):
    trained = [models[0], GCN(CHANNELS, 8, 2, CLASSES, dropout=0.5).double()]
    alone = workers(train, 1, partitions(graph, 1), trained)[0]
    for world, run in ((3, workers), (4, parts)):
        everyone = run(train, world, partitions(graph, world), trained)
        for found, expected in zip(everyone[0], alone, strict=True):
            assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
            assert found.final == pytest.approx(expected.final, rel=TOLERANCE)


def test_the_command(graph, partitions, capsys):
    graph = copy.copy(graph)
    graph.x = graph.x.float()
    root = str(partitions(graph, 2))
    config = tool.RunConfig(
        parts=root, model=tool.ModelConfig(name="gcn", hidden=4), train=CONFIG, progress="none"
    )
    every = parts(tool.train_worker, 2, config)[0]
    config = dataclasses.replace(config, sampler=SAMPLING)
    assert parts(tool.train_worker, 2, config)[0].losses != every.losses
    for wrong in ("0", "3,x", "1,2,3"):
        given = ["train", "--parts", root, "--sampler", "neighbor", "--num-neighbors", wrong]
        assert main(given) == cli.EXIT_USAGE and "--num-neighbors" in capsys.readouterr().err


def test_wrong_arguments_are_refused(graph, partitions):
    with pytest.raises(ValueError, match="at least 1"):
        NeighborSampling(num_neighbors=(2,), batch_size=0)

    def work(root: Path) -> None:
        data = pyg_sar.load_partition(root)
        with pytest.raises(ValueError, match="-1 or at least 1"):
            sample_neighbors(data, data.train_mask, [3, 0], 1)
        with pytest.raises(ValueError, match="without 'flow' and 'labels'"):
            model = pyg_sar.distribute(GCN(CHANNELS, 8, 2, CLASSES).double())
            pyg_sar.Trainer(model, data, CONFIG, sampler=SAMPLING, labels=0.5)
        with pytest.raises(ValueError, match="cached=True"):
            model = pyg_sar.distribute(GCN(CHANNELS, 8, 2, CLASSES, cached=True).double())
            pyg_sar.Trainer(model, data, CONFIG, sampler=SAMPLING)

    workers(work, 2, partitions(graph, 2))
