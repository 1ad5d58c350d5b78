"""Ways to train on a graph that doesn't fit: accuracy, time and memory of each, beside plain PyG.

    python benchmarks/alternatives.py --out alternatives.md --plot alternatives.svg

GraphSAGE (mean) of two layers on real graphs and on a synthetic one with power-law degrees, Adam,
one learning rate; nothing is tuned. The ways of a graph take turns, one seed after the other, and
each is compared with plain PyG of the same seed.

* Time is of processors: all threads of all workers together, in training steps. Evaluations, on
  the whole graph, and partitions are not counted. "Until" is the first evaluation whose validation
  metric is 0.99 of plain PyG's best (the median of its seeds).
* Ways that are exact follow plain PyG's curve: they train for a few epochs, which show that and
  the time of an epoch, and take as many epochs as plain PyG.
* Memory is the largest resident set in a training step, beyond that before the graph was loaded,
  of the worker that takes most.
* ``DGL`` is its ``SAGEConv`` on the whole graph. "SAR on DGL" is IntelLabs' implementation of SAR,
  whose workers use gloo (:mod:`alternatives_dgl` says what to install). Both train as long as plain
  PyG.
* ``NeighborLoader`` needs pyg-lib or torch-sparse; without them this package's sampler takes its
  place. ``ClusterLoader`` gets its clusters from METIS by pymetis.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import date
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import alternatives_dgl as dgl
import pymetis
import torch
import torch.nn.functional as F
import torch_geometric
from alternatives_report import PLAIN, Found, plot, report
from command_line import command
from scipy.stats import rankdata
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.loader import ClusterData, ClusterLoader, NeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import remove_self_loops, sort_edge_index, to_undirected
from torch_geometric.utils.sparse import index2ptr

import pyg_sar
from pyg_sar.ledger import peak_memory, reset_peak_memory
from pyg_sar.partition.message_flow import sample_neighbors
from pyg_sar.tensors import NodeTensor
from pyg_sar.tools import load_graph

GRAPHS = {
    "Tolokers": "tolokers.npz",
    "Coauthor Physics": "coauthor_physics.npz:split=random",
    "synthetic": "synthetic:nodes=20000,degree=25,features=64,classes=16,signal=0.1,homophily=0.5",
}
FANOUT, BATCH, CLUSTERS, TOGETHER, PARTS = [10, 10], 1024, 100, 10, 8
SAMPLER = "NeighborLoader" if WITH_PYG_LIB or WITH_TORCH_SPARSE else "neighbours, by pyg_sar"
QUARTER = f"pyg_sar, {PARTS} parts in a quarter"
WORKERS = {"pyg_sar, 1 worker": 1, "pyg_sar, 2 workers": 2, "pyg_sar, 4 workers": 4}
SAMPLED = (SAMPLER, "ClusterLoader")
WAYS = [PLAIN, "checkpoint", *SAMPLED, *dgl.WAYS, *WORKERS, QUARTER]
CPU = torch.device("cpu")


def prepared(source: str, features: int) -> Data:
    """The graph, undirected; more than 1,000 features are projected by a random matrix."""
    graph = load_graph(source)
    graph.edge_index = to_undirected(graph.edge_index)
    if graph.num_features > 1000:
        torch.manual_seed(0)
        graph.x = graph.x @ (torch.randn(graph.num_features, features) / features**0.5)
    return graph


def metric(out: Tensor, y: Tensor, mask: Tensor, area: bool) -> float:
    """Accuracy, or the area under the ROC curve, in percent."""
    if not area:
        return 100 * float((out.argmax(1) == y)[mask].double().mean())
    score, label = (out[:, 1] - out[:, 0])[mask], y[mask]
    if isinstance(score, NodeTensor) and isinstance(label, NodeTensor):
        score, label = score.full_tensor(), label.full_tensor()
    ranks, ones = torch.from_numpy(rankdata(score.numpy())), int(label.sum())
    above = float(ranks[label > 0].sum()) - ones * (ones + 1) / 2
    return 100 * above / (ones * (len(label) - ones))


class Clusters(ClusterData):
    """With METIS by pymetis, which needs neither pyg-lib nor torch-sparse."""

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        row, column = sort_edge_index(remove_self_loops(edge_index)[0])
        start = index2ptr(row, num_nodes).tolist()
        adjacency = pymetis.CSRAdjacency(start, column.tolist())
        found = pymetis.part_graph(self.num_parts, adjacency=adjacency)
        return torch.tensor(found[1])


def train(way: str, data: Any, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One training: seconds of this process and scores by epoch, and the peak."""
    masks = [getattr(data, name) for name in dgl.MASKS]
    masks = [(mask[:, seed] if mask.dim() == 2 else mask).bool() for mask in masks]
    edges = data.edges if way in dgl.WAYS else data.edge_index
    torch.manual_seed(seed)
    classes = int(data.y.max()) + 1
    model: Any = GraphSAGE(data.num_features, given.hidden, 2, classes, dropout=0.5)
    model = dgl.GraphSAGE(model, 0.5) if way in dgl.WAYS else model
    model = pyg_sar.distribute(model) if "pyg_sar" in way else model

    def whole() -> Iterator[tuple[Tensor, Tensor]]:
        yield model(data.x, edges)[masks[0]], data.y[masks[0]]

    def sampled() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in loader:
            first = slice(batch.batch_size) if way == SAMPLER else batch.chosen
            yield model(batch.x, batch.edge_index)[first], batch.y[first]

    def own_sampler() -> Iterator[tuple[Tensor, Tensor]]:
        ids = masks[0].full_tensor().nonzero().flatten()
        for seeds in ids[torch.randperm(len(ids))].split(BATCH):
            batch = sample_neighbors(data, seeds, FANOUT, int(torch.randint(2**40, ())))
            rows = slice(batch.batch_size)
            yield model(batch.x, batch.edge_index)[rows], batch.y[rows]

    if way == "NeighborLoader":
        loader = NeighborLoader(data, FANOUT, masks[0], batch_size=BATCH, shuffle=True)
    elif way == "ClusterLoader":
        data.chosen = masks[0]
        clusters = Clusters(data, CLUSTERS, log=False)
        loader = ClusterLoader(clusters, batch_size=TOGETHER, shuffle=True)
    elif way == "checkpoint":
        for conv in model.convs:
            conv.forward = partial(checkpoint, conv.forward, use_reentrant=False)
    steps = whole if way not in SAMPLED else own_sampler if "pyg_sar" in way else sampled
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    times: list[float] = []
    peak, curve, losses = 0, [], []
    complete = (PLAIN, *dgl.WAYS)
    epochs = given.epochs[0 if way in complete else 1 if way in SAMPLED else 2]
    for epoch in range(1, epochs + 1):
        ctypes.CDLL(None).malloc_trim(0)  # what the evaluation left
        model.train()
        reset_peak_memory(CPU)
        start = time.process_time()
        for out, y in steps():
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            if way == dgl.WORKERS:
                loss = dgl.backward(model, loss, len(y))
            else:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds = time.process_time() - start
        times.append(float(dgl.total(seconds)) if way == dgl.WORKERS else seconds)
        del out, loss
        peak = max(peak, peak_memory(CPU))
        if way in SAMPLED or (way in complete and epoch % given.every == 0):
            model.eval()
            with torch.no_grad():
                rows = [model(data.x, edges), data.y, *masks[1:]]
                rows = dgl.all_rows(*rows) if way == dgl.WORKERS else rows
                area = int(data.y.max()) == 1
                scores = [metric(rows[0], rows[1], mask, area) for mask in rows[2:]]
                curve.append((epoch, sum(times), *scores))
            del rows
    each = sum(times[1:]) / (epochs - 1)  # The first plans what is sent.
    return {"curve": curve, "epoch": each, "peak": peak, "losses": losses}


# Turns ############################################################################################


def result_file(folder: Path, seed: int, way: str) -> Path:
    return folder / f"{seed}-{WAYS.index(way)}.json"


def wait_for_turn(folder: Path, seed: int, way: str) -> None:
    """Waits until the way before has trained with this seed."""
    place = seed * len(WAYS) + WAYS.index(way) - 1
    before = result_file(folder, place // len(WAYS), WAYS[place % len(WAYS)])
    while place >= 0 and not before.exists():
        time.sleep(0.1)


def write(path: Path, found: dict[str, Any]) -> None:
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)
    if found and path.stem.startswith("0"):
        print(f"{WAYS[int(path.stem[2:])]}: {found['epoch']:.2f} s", file=sys.stderr, flush=True)


def train_all(folder: Path, way: str, given: argparse.Namespace) -> None:
    """Runs in each process, worker or part of a way: all seeds, each in its turn."""
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak_memory(CPU)
    comm = pyg_sar.comm.current() if "pyg_sar" in way else None
    parts = str(PARTS if way == QUARTER else WORKERS.get(way, 1))
    first = comm.rank == 0 if comm else way != dgl.WORKERS or dgl.rank() == 0
    if comm:
        data = pyg_sar.load_partition(folder / parts)
    elif way == dgl.WORKERS:
        data = dgl.part(folder / "dgl")
    else:
        data = load_graph(f"{folder}/graph.pt")
        data = dgl.in_memory(data) if way == dgl.MEMORY else data
    for seed in range(given.seeds):
        if first:
            wait_for_turn(folder, seed, way)
        if comm:
            comm.barrier()
        found = train(way, data, seed, given)
        if way == dgl.WORKERS:
            found["peak"] = dgl.largest(found["peak"] - before) + before
        if comm:
            # Parts of one process have the same clock and the same peak.
            seconds = torch.tensor(found["epoch"], dtype=torch.float64)
            peak = torch.tensor(float(found["peak"]))
            found["epoch"] = float(comm.all_reduce(seconds, "max" if way == QUARTER else "sum"))
            found["peak"] = float(comm.all_reduce(peak, "max"))
        found["peak"] -= before
        if first:
            write(result_file(folder, seed, way), found)


def start(folder: Path, way: str, given: argparse.Namespace) -> None:
    """The process of a way."""
    run = partial(train_all, folder, way, given)
    if way == QUARTER:
        wait_for_turn(folder, 0, way)
        plain = json.loads(result_file(folder, 0, PLAIN).read_text())
        pyg_sar.run(run, parts=PARTS, memory=int(plain["peak"] / 4), store=folder)
    elif WORKERS.get(way, 1) > 1:
        pyg_sar.launch(run, WORKERS[way], threads_per_worker=1)
    elif "pyg_sar" in way:
        pyg_sar.run(run, parts=1)
    elif way == dgl.WORKERS:
        dgl.start_workers(run)
    else:
        run()


def wait_for_all(started: Mapping[str, BaseProcess], folder: Path, seeds: int) -> None:
    """Waits for the processes by way. One that fails, or is killed, leaves its turns to others."""
    going = True
    while going:
        going = any(process.is_alive() for process in started.values())
        ended = [way for way, process in started.items() if not process.is_alive()]
        for path in (result_file(folder, seed, way) for way in ended for seed in range(seeds)):
            if not path.exists():
                write(path, {})
        time.sleep(0.1)


def measure(graph: Data, given: argparse.Namespace) -> Found:
    """All ways on a graph, by way and seed."""
    with tempfile.TemporaryDirectory(dir=given.scratch) as name:
        folder, forks = Path(name), multiprocessing.get_context("fork")
        torch.save(graph, folder / "graph.pt")
        for parts in (1, 2, 4, PARTS):
            pyg_sar.write_partitions(graph, parts, folder / f"{parts}")
        if dgl.WORKERS in WAYS:
            dgl.write_parts(graph, folder / "dgl")
        ctypes.CDLL(None).malloc_trim(0)  # of what the partitioner took
        started = {w: forks.Process(target=start, args=(folder, w, given)) for w in WAYS}
        for process in started.values():
            process.start()
        wait_for_all(started, folder, given.seeds)
        seeds = range(given.seeds)
        return {w: [json.loads(result_file(folder, s, w).read_text()) for s in seeds] for w in WAYS}


def main() -> None:
    dgl.use_pytorch()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="../shared/data", help="folder of the real graphs")
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="plain PyG first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--epochs", nargs=3, type=int, default=[50, 10, 4], help="plain, sampled, exact"
    )
    parser.add_argument("--every", type=int, default=5, help="epochs between evaluations")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--features", type=int, default=128, help="projected ones")
    parser.add_argument("--scratch", help="folder for partitions and the store")
    parser.add_argument("--out")
    parser.add_argument("--plot")
    given = parser.parse_args()
    WAYS[:] = given.ways
    torch.set_num_threads(1)
    load, texts = os.getloadavg()[0], []
    for name in given.graphs:
        source = GRAPHS[name]
        graph = prepared(f"{given.data}/{source}" if ".npz" in source else source, given.features)
        found = measure(graph, given)
        texts.append(report(name, graph, found))
        print(texts[-1], flush=True)
    head = (
        f"{date.today()}, `{command(given)}`, one thread "
        f"for each process, {platform.machine()}, torch {torch.__version__}, torch-geometric "
        f"{torch_geometric.__version__}. Load at the start and at the end: {load:.1f} and "
        f"{os.getloadavg()[0]:.1f}.\n"
    )
    if given.out:
        Path(given.out).write_text("\n".join([head, *texts]))
    if given.plot:
        plot(given.plot, "\n".join(texts))


if __name__ == "__main__":
    main()
