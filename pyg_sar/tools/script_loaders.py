"""Loaders of a script: of one batch, which is the whole graph, and of batches of many graphs.

[Note: one batch] A loader whose one batch is the whole graph runs as it is, in this process, on
node tensors; its ``Batch``, or what it selects by all nodes, has node tensors again. A sampler gets
the edges of the whole graph: it must not see a worker's.

[Note: many graphs] PyG's ``DataLoader`` of graphs that are in memory on every worker runs as it is
on each of them, and draws the same batches; ``scatter`` compares these, and gives each worker its
part of each. All other loaders sample parts of a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.sampler import NeighborSampler

from pyg_sar.errors import DistributedIndexError
from pyg_sar.partition.scatter import scatter
from pyg_sar.tensors import NodeTensor, whole
from pyg_sar.tools.inference import is_distributed
from pyg_sar.tools.script_graphs import Graphs

_WORKERS = ("num_workers", "persistent_workers", "prefetch_factor", "worker_init_fn")
_SAMPLER = ("num_neighbors", "replace", "subgraph_type", "disjoint")


def divided(batch: Any, graphs: Graphs) -> Any:
    """Returns a batch of many graphs as this worker's part of it. Collective."""
    if not isinstance(batch, Data | HeteroData):
        return batch
    if is_distributed(batch):
        raise DistributedIndexError(
            "'DataLoader' under 'pyg-sar run': its graphs are distributed already, as the one of a "
            "dataset of one graph is: make the batch of plain graphs, or train on one at a time"
        )
    levels = {name: level for name, level in (graphs.levels or {}).items() if name in batch}
    try:
        return scatter(batch, node_ids=graphs.lists_in(batch), levels=levels)
    except (TypeError, ValueError) as error:
        raise type(error)(f"a batch of 'DataLoader' can't be distributed: {error}") from error


def in_place_here(make: Callable[..., Any], loader: Any, args: Any, kwargs: Any) -> Any:
    """Returns the arguments of a loader that runs on workers; ``None`` of others.

    ``make`` is the loader's ``__init__``, called with ``args`` and ``kwargs``.
    """
    given = dict(inspect.signature(make).bind(loader, *args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    for name in ("self", *_WORKERS):  # Processes of its own would have no place among the workers.
        given.pop(name, None)
    if isinstance(loader, DataLoader):
        graphs = given["dataset"]
        loader.__dict__["_of_many"] = not hasattr(graphs, "__len__") or len(graphs) != 1
        if not loader.__dict__["_of_many"]:
            loader.__dict__["_of_many"] = not is_distributed(graphs[0])
        return given
    data = given.get("data")
    if type(loader) is not NeighborLoader or not isinstance(data, Data) or not is_distributed(data):
        return None
    fan_out, edges = given["num_neighbors"], data.get("edge_index")
    everything = given.get("input_nodes") is None and given.get("batch_size", 1) >= data.num_nodes
    everything = everything and isinstance(fan_out, list) and set(fan_out) == {-1}
    if not everything or not isinstance(edges, NodeTensor):
        return None
    if any(given.get(name) for name in ("time_attr", "weight_attr", "neighbor_sampler")):
        return None
    plain = Data(edge_index=whole(edges, "NeighborLoader"), num_nodes=data.num_nodes)
    options = {name: given[name] for name in _SAMPLER if name in given}
    return {**given, "neighbor_sampler": NeighborSampler(plain, **options)}
