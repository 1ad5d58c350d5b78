"""Training on sampled neighbours: one sample for any number of workers, PyG's numbers on it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_workers import host
from oracle import CHANNELS, CLASSES, TOLERANCE, Partitions, error, make_graph, threads
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN

import pyg_sar
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
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def models() -> list[nn.Module]:
    torch.manual_seed(4)
    return [kind(CHANNELS, 8, 2, CLASSES).double() for kind in (GCN, GAT)]


def sampled(root: Path, models: list[nn.Module], seeds: torch.Tensor) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    mine = torch.isin(data.n_id, seeds)
    flow = sample_neighbors(data, mine, FANOUT, key=5)
    assert torch.equal(flow.e_id, flow.edge_index.order)
    outs = [call_model(pyg_sar.distribute(copy.deepcopy(m), view="local"), flow) for m in models]
    return [out[: flow.batch_size].detach() for out in outs], flow.n_id, flow.e_id, flow.batch_size


@pytest.mark.parametrize(("world", "run"), [(1, threads), (3, threads), (8, host)])
def test_numbers_are_those_of_pyg_on_the_sampled_edges(world, run, graph, partitions, models):
    seeds = torch.tensor([2, 3, 30, 77])
    workers = run(sampled, world, partitions(graph, world), models, seeds)
    e_id = torch.cat([found[2] for found in workers])
    alone = threads(sampled, 1, partitions(graph, 1), models, seeds)[0]
    assert torch.equal(e_id.sort().values, alone[2].sort().values)
    # Each node has its neighbours or as many as were asked for, by the hop where it is found.
    source, target = graph.edge_index
    degree, found = target.bincount(minlength=NODES), target[e_id].bincount(minlength=NODES)
    first = torch.isin(torch.arange(NODES), seeds)
    second = torch.zeros(NODES, dtype=torch.bool)
    second[source[e_id[first[target[e_id]]]]] = True
    most = torch.where(first, FANOUT[0], torch.where(second, FANOUT[1], 0))
    assert torch.equal(found, degree.minimum(most)) and bool((degree > most)[first].any())
    # PyG trims: its layers see the edges into the batch's nodes only at last.
    for k, model in enumerate(models):
        x, edges = graph.x, graph.edge_index[:, e_id]
        hidden = model.act(model.convs[0](x, edges))
        expected = model.convs[1](hidden, edges[:, first[edges[1]]]).detach()
        for outs, n_id, _, size in workers:
            assert error(outs[k], expected[n_id[:size]]) < TOLERANCE


def train(root: Path, model: nn.Module) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    own = pyg_sar.distribute(copy.deepcopy(model), view="local")
    return pyg_sar.Trainer(own, data, CONFIG, sampler=SAMPLING).fit()


def test_any_number_of_workers_trains_the_same(graph, partitions, models):
    alone = threads(train, 1, partitions(graph, 1), models[0])[0]
    for world, run in ((3, threads), (8, host)):
        found = run(train, world, partitions(graph, world), models[0])[0]
        assert found.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        assert found.final == pytest.approx(alone.final, rel=TOLERANCE)


def test_the_command(graph, partitions, capsys):
    graph = copy.copy(graph)
    graph.x = graph.x.float()
    root = str(partitions(graph, 2))
    config = tool.RunConfig(
        parts=root, model=tool.ModelConfig(name="gcn", hidden=4), train=CONFIG, progress="none"
    )
    whole = host(tool.train_worker, 2, config)[0]
    config = dataclasses.replace(config, sampler=SAMPLING)
    assert host(tool.train_worker, 2, config)[0].losses != whole.losses
    for wrong in ("0", "3,x", "1,2,3"):
        given = ["train", "--parts", root, "--sampler", "neighbor", "--num-neighbors", wrong]
        assert cli.main(given) == cli.EXIT_USAGE and "--num-neighbors" in capsys.readouterr().err


def test_wrong_arguments_are_refused(graph, partitions):
    with pytest.raises(ValueError, match="at least 1"):
        NeighborSampling(num_neighbors=(2,), batch_size=0)

    def work(root: Path) -> None:
        data = pyg_sar.load_partition(root, view="local")
        with pytest.raises(ValueError, match="-1 or at least 1"):
            sample_neighbors(data, data.train_mask, [3, 0], 1)
        with pytest.raises(ValueError, match="without 'flow' and 'labels'"):
            model = pyg_sar.distribute(GCN(CHANNELS, 8, 2, CLASSES).double(), view="local")
            pyg_sar.Trainer(model, data, CONFIG, sampler=SAMPLING, labels=0.5)
        with pytest.raises(ValueError, match="cached=True"):
            model = pyg_sar.distribute(
                GCN(CHANNELS, 8, 2, CLASSES, cached=True).double(), view="local"
            )
            pyg_sar.Trainer(model, data, CONFIG, sampler=SAMPLING)

    threads(work, 2, partitions(graph, 2))
