"""Graphs in memory that are spread over workers without files, one after the other."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import CHANNELS, EDGE_DIM, TOLERANCE, error, make_graph, parts, whole, workers
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool

import pyg_sar
from pyg_sar.errors import DistributedIndexError, PartitionError
from pyg_sar.files import with_checksum
from pyg_sar.partition import merge_partitions
from pyg_sar.tensors import NodeTensor


def graphs(positions: bool = True) -> list[Data]:
    """Six graphs of different sizes, each with one target."""
    found = []
    for k in range(6):
        data = make_graph(20 + 3 * k, 90 + 7 * k, seed=k)
        data.target = torch.randn(1, 2, dtype=torch.float64)
        if positions:
            data.pos = torch.randn(data.num_nodes, 3, dtype=torch.float64)
        found.append(data)
    return found


class Net(nn.Module):
    """A layer with edge attributes, dropout, and a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GINEConv(nn.Linear(CHANNELS, 8), edge_dim=EDGE_DIM)
        self.out = nn.Linear(8, 2)

    def forward(self, data: Any) -> Tensor:
        h = F.dropout(self.conv(data.x, data.edge_index, data.edge_attr).tanh(), 0.3)
        return self.out(global_mean_pool(h, data.batch, data.num_graphs))


def train(model: nn.Module, loader: Any, spread: Any = lambda batch: batch) -> list[Tensor]:
    """Losses of two epochs, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(data := spread(batch)), data.target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach().clone() for p in model.parameters())]


def fit(model: nn.Module, given: list[Data], batch_size: int, everywhere: bool) -> list[Tensor]:
    """A worker's training; where not ``everywhere``, the last rank alone has the graphs."""
    comm = pyg_sar.init()
    model = pyg_sar.distribute(copy.deepcopy(model))
    last = comm.world_size - 1
    torch.manual_seed(3 if everywhere or comm.rank == last else comm.rank + 10)
    loader: Any = DataLoader(given, batch_size, shuffle=True)
    if not everywhere and comm.rank != last:
        loader = [None] * len(loader)
    return train(model, loader, pyg_sar.scatter)


def every_way(model: nn.Module, given: list[Data]) -> list[list[Tensor]]:
    return [fit(model, given, size, everywhere) for size in (1, 4) for everywhere in (True, False)]


@pytest.mark.parametrize(
    ("start", "world"), [(workers, 1), (workers, 2), (workers, 4), (workers, 3), (parts, 3)]
)
def test_training_on_many_graphs_equals_one_process(start: Any, world: int):
    given, model = graphs(positions=world != 2), Net().double()
    expected = []
    for size in (1, 4):
        torch.manual_seed(3)
        expected += [train(copy.deepcopy(model), DataLoader(given, size, shuffle=True))] * 2
    for found in start(every_way, world, model, given):
        for way, (mine, whole_) in enumerate(zip(found, expected, strict=True)):
            for a, b in zip(mine, whole_, strict=True):
                assert error(a, b) < TOLERANCE, way


def contents(data: Any, root: Any) -> tuple[Any, Any]:
    """All tensors of a scattered graph and of the same graph from files."""
    found = []
    for graph in (pyg_sar.scatter(data, "random", seed=5), pyg_sar.load_partition(root)):
        found.append(
            [
                (store._key, name, whole(value), getattr(value, "local", None))
                for store in graph.stores
                for name, value in store.items()
            ]
        )
    return found[0], found[1]


def test_it_is_what_the_files_give(tmp_path: Any):
    data = make_graph()
    data.train_idx = torch.tensor([3, 1, 7])
    data.name = "a graph"
    hetero = HeteroData()
    hetero["a"].x, hetero["b"].num_nodes = torch.randn(9, 3), 4
    hetero["a", "to", "b"].edge_index = torch.stack([torch.arange(9), torch.arange(9) % 4])
    for number, graph in enumerate((data, hetero)):
        root = tmp_path / str(number)
        pyg_sar.write_partitions(graph, 3, root, "random", seed=5)
        for mine, other in workers(contents, 3, graph, root):
            assert [row[:2] for row in mine] == [row[:2] for row in other]
            for (_, name, *values), (_, _, *expected) in zip(mine, other, strict=True):
                for a, b in zip(values, expected, strict=True):
                    same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
                    assert same, name


def cost_and_memory(given: list[Data]) -> tuple[list[int], list[int], int]:
    """Operations of the workers per graph, on all and on one; graphs alive; layouts kept."""
    comm = pyg_sar.init()
    pyg_sar.scatter(given[0])  # The workers' generators are alike from here on.
    counts = []
    for everywhere in (True, False):
        with pyg_sar.Ledger(comm) as ledger:
            pyg_sar.scatter(given[0] if everywhere or comm.rank == 0 else None)
        counts.append(ledger.sent_messages())
    conv = pyg_sar.distribute(GINEConv(nn.Linear(CHANNELS, 8), edge_dim=EDGE_DIM).double())
    seen, alive = [], []
    for data in given:
        graph = pyg_sar.scatter(data)
        assert isinstance(graph.x, NodeTensor)
        conv(graph.x, graph.edge_index, graph.edge_attr).sum().backward()
        seen += [weakref.ref(graph.edge_index.edges.index.plan), weakref.ref(graph.x.rows)]
        del graph
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
    return counts, alive, len(comm.layouts)


def batches(root: Path | None, batch: Any) -> list[tuple[Any, ...]]:
    """What a batch of graphs tells of itself: from files, or scattered."""
    data = pyg_sar.scatter(batch, "random") if root is None else pyg_sar.load_partition(root)
    assert isinstance(data, Batch)
    said = []
    for take in (lambda: data[1], data.to_data_list, lambda: copy.copy(data).get_example(1)):
        with pytest.raises(DistributedIndexError, match="to_data_list.*subgraph.batch.batch == "):
            take()
    one = data.subgraph(data.batch == 1)
    said.append((len(data), data.num_graphs, data.batch_size, one.x.full_tensor()))
    return said


def test_a_batch_of_graphs_is_a_batch_again(tmp_path: Path):
    graphs = [make_graph(10 + k, 40, k) for k in range(4)]
    batch = Batch.from_data_list(graphs)
    pyg_sar.write_partitions(batch, 2, tmp_path / "parts", "random")
    assert len(merge_partitions(tmp_path / "parts")) == 4
    for root in (tmp_path / "parts", None):
        for ((*counts, x),) in parts(batches, 2, root, batch):
            assert counts == [4, 4, 4] and torch.equal(x, graphs[1].x)


def test_a_partition_that_names_no_batch_is_read(tmp_path: Path):
    """Those of before have no such field."""
    pyg_sar.write_partitions(make_graph(), 1, tmp_path / "parts")
    path = tmp_path / "parts" / "metadata.json"
    content = json.loads(path.read_text())
    del content["batched"], content["checksum"]
    path.write_text(with_checksum(content))
    kind = lambda: type(pyg_sar.load_partition(tmp_path / "parts")).__name__  # noqa: E731
    assert parts(kind, 1) == ["Data"]


@pytest.mark.parametrize("start", [workers, parts])
def test_few_messages_and_nothing_is_kept(start: Any):
    for counts, alive, layouts in start(cost_and_memory, 2, graphs()):
        assert counts[0] <= 1
        assert counts[1] <= 5
        assert max(alive) <= 2, alive
        assert layouts == 0


def refusals(data: Data) -> list[str]:
    comm = pyg_sar.init()
    other = data.clone()
    other.x = data.x + comm.rank
    loose = data.clone()
    loose.thing = {1, 2}
    given: list[Any] = [
        None,
        data if comm.rank < 2 else None,
        other,
        "a graph",
        loose if comm.rank == 1 else None,
        pyg_sar.scatter(data).subgraph(torch.arange(20)),
    ]
    found = []
    for graph in given:
        with pytest.raises((TypeError, ValueError, PartitionError)) as caught:
            pyg_sar.scatter(graph)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises((ValueError, PartitionError)) as caught:
        pyg_sar.scatter(data if comm.rank == 2 else None, "geometric")
    return [*found, f"{type(caught.value).__name__}: {caught.value}"]


def test_what_is_refused():
    found = workers(refusals, 3, make_graph())
    for rank, texts in enumerate(found):
        expected = [
            "ValueError: scatter(data): no rank passed a graph",
            "ValueError: scatter(data): ranks [0, 1] of 3 workers passed a graph",
            "ValueError: scatter(data): rank 1 passed another graph than rank 0",
            "TypeError: Expected 'data' to be a Data, a HeteroData or None (got str)",
            "'thing'",
            "ValueError: 'data' is divided among the workers already",
            "method='geometric' needs positions 'pos' of all 40 nodes (got none)",
        ]
        for text, part in zip(texts, expected, strict=True):
            assert part in text, (rank, text)
    assert found[2][-1].startswith("ValueError")
    assert found[0][-1].startswith("PartitionError: rank 2")


def matrices(data: Data) -> list[float | str]:
    """Features as sparse matrices, the same on both workers, or others on one."""
    comm, found = pyg_sar.init(), list[float | str]()
    for form in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        for factor in (1, 1 + comm.rank):
            given = data.clone()
            given.x = (data.x * factor).to_sparse(layout=form)
            try:
                found.append(error(whole(pyg_sar.scatter(given).x).to_dense(), data.x))
            except ValueError as problem:
                found.append(str(problem))
    return found


def test_sparse_matrices_are_compared():
    for found in workers(matrices, 2, make_graph()):
        assert found[::2] == [0.0] * 3
        assert all("rank 1 passed another graph than rank 0" in text for text in found[1::2])
