"""DGL's GraphSAGE in memory, and on workers of IntelLabs' SAR, for ``alternatives.py``.

Both need packages that are not among this project's (``pip install dgl==1.1.3 ifaddr`` and a
checkout of https://github.com/IntelLabs/SAR): without them these ways are left out.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

MEMORY, WORKERS, COUNT = "DGL", "SAR on DGL, 2 workers", 2
WAYS = [
    *([MEMORY] if find_spec("dgl") else []),
    *([WORKERS] if find_spec("dgl") and find_spec("sar") else []),
]
MASKS = ("train_mask", "val_mask", "test_mask")


def use_pytorch() -> None:
    """To be called before anything imports DGL, which reads this."""
    os.environ.setdefault("DGLBACKEND", "pytorch")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps to itself what DGL prints of each step."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class GraphSAGE(torch.nn.Module):
    """PyG's ``GraphSAGE`` of two layers, in DGL's layers, with its first weights."""

    def __init__(self, plain: Any, dropout: float) -> None:
        import dgl.nn

        super().__init__()
        with torch.random.fork_rng([]):
            layers = [dgl.nn.SAGEConv(c.in_channels, c.out_channels, "mean") for c in plain.convs]
        with torch.no_grad():
            for layer, conv in zip(layers, plain.convs, strict=True):
                layer.fc_neigh.weight.copy_(conv.lin_l.weight)
                layer.fc_self.weight.copy_(conv.lin_r.weight)
                layer.fc_self.bias.copy_(conv.lin_l.bias)
        self.first, self.last = layers
        self.dropout = dropout

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        x = F.dropout(self.first(graph, x).relu(), self.dropout, self.training)
        return self.last(graph, x)


def whole_graph(data: Data) -> Any:
    """The graph of a ``Data`` as DGL's."""
    import dgl

    return dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)


def in_memory(data: Data) -> Any:
    """The graph as ``train`` takes it."""
    return SimpleNamespace(**data.to_dict(), edges=whole_graph(data), num_features=data.x.size(1))


def write_parts(data: Data, folder: Path) -> None:
    """Cuts the graph by DGL's METIS, in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_write_parts, args=(data, folder))
    process.start()
    process.join()


def _write_parts(data: Data, folder: Path) -> None:
    import dgl.distributed

    graph = whole_graph(data)
    for name in ("x", "y", *MASKS):
        graph.ndata[name] = data[name]
    with quiet():
        dgl.distributed.partition_graph(graph, "graph", COUNT, str(folder), num_hops=1)


def start_workers(work: Callable[[], None]) -> None:
    """Runs ``work`` in worker processes that SAR joins."""
    forks = multiprocessing.get_context("fork")
    started = [forks.Process(target=_work, args=(rank, work)) for rank in range(COUNT)]
    for process in started:
        process.start()
    for process in started:
        process.join()


def _work(rank: int, work: Callable[[], None]) -> None:
    import sar

    sar.initialize_comms(rank, COUNT, "127.0.0.1", "gloo")
    work()


def part(folder: Path) -> Any:
    """This worker's part, as ``train`` takes it."""
    import sar

    with quiet():
        rows = sar.load_dgl_partition_data(f"{folder}/graph.json", rank(), "cpu")
    data = SimpleNamespace(edges=sar.construct_full_graph(rows))
    for name in ("x", "y", *MASKS):
        setattr(data, name, sar.suffix_key_lookup(rows.node_features, name))
    data.num_features = data.x.size(1)
    return data


def backward(model: torch.nn.Module, loss: Tensor, rows: int) -> Tensor:
    """The gradients of the mean over all workers' rows, and that mean; SAR's recipe."""
    import sar

    mean = loss * rows / total(rows)
    mean.backward()
    sar.gather_grads(model)
    return total(mean.detach().clone())


def total(value: Any) -> Any:
    """A sum over workers."""
    found = torch.as_tensor(value).clone()
    dist.all_reduce(found)
    return found


def rank() -> int:
    """This worker's number."""
    return dist.get_rank()


def largest(value: int) -> int:
    """The largest of all workers' values."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def all_rows(*tensors: Tensor) -> list[Tensor]:
    """The rows of all workers, one worker after the other."""
    found: list[Any] = [None] * COUNT
    dist.all_gather_object(found, tensors)
    return [torch.cat(rows) for rows in zip(*found, strict=True)]
