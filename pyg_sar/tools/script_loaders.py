"""Loaders of a script whose one batch is the whole graph: PyG's own code gives it.

[Note: one batch] Such a loader runs as it is, in this process, on node tensors; its ``Batch``, or
what it selects by all nodes, has node tensors again. A sampler gets the edges of the whole graph:
it must not see a worker's. All other loaders are for mini-batches, or many graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.sampler import NeighborSampler

from pyg_sar.tensors import NodeTensor, whole
from pyg_sar.tools.script_graphs import is_distributed

_WORKERS = ("num_workers", "persistent_workers", "prefetch_factor", "worker_init_fn")
_SAMPLER = ("num_neighbors", "replace", "subgraph_type", "disjoint")


def of_whole_graph(make: Callable[..., Any], loader: Any, args: Any, kwargs: Any) -> Any:
    """Returns the arguments of a loader whose one batch is the whole graph; ``None`` of others.

    Args:
        make: The loader's ``__init__``.
        loader: The loader.
        args: What it is made with.
        kwargs: The same by name.
    """
    given = dict(inspect.signature(make).bind(loader, *args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    for name in ("self", *_WORKERS):  # Processes of its own would have no place among the workers.
        given.pop(name, None)
    if type(loader) is DataLoader:
        graphs = given["dataset"]
        one = hasattr(graphs, "__len__") and len(graphs) == 1
        return given if one and is_distributed(graphs[0]) else None
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
