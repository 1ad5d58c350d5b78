"""Whole passes without gradients: outputs for all nodes, after training of any kind (``infer``),
and features propagated before it (``propagate_features``), for SIGN and SGC.

[Note: a state of its own] Layers remember things of the graph that they ran on (``cached=True``),
and modules whether they train. Inference puts both aside and brings them back: the result belongs
to the graph that was given, and the model goes on as it was.
"""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage
from torch_geometric.nn import LGConv
from torch_geometric.utils import add_remaining_self_loops

from pyg_sar.comm.group import current
from pyg_sar.comm.launch import launch
from pyg_sar.convert import distribute
from pyg_sar.errors import WorkerError
from pyg_sar.files import TemporaryFolder, check_folder, check_type, check_whole, parse_bytes
from pyg_sar.message.layer_state import modes_kept
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.storage import add_attributes, write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.reduction.parameters import check_replicas
from pyg_sar.reduction.rows_file import write_rows
from pyg_sar.tensors import NodeTensor, node_tensors
from pyg_sar.wording import counted

Forward = Callable[[nn.Module, Any], Any]

_AT_ONCE = 4
"""Tensors as large as the largest that a part needs in memory together, about."""
_BASE = 48 << 20
"""Bytes that a worker takes for the first use of the libraries, about."""
_EDGE_BYTES = 64
"""Bytes that an edge takes: its ids, its place in a shard, and copies while these are made."""
_MOST_PARTS = 1024
_TRIES = 3


def infer(
    model: nn.Module,
    data: Data | HeteroData,
    *,
    out: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    parts: int | None = None,
    workers: int = 1,
    store: str | os.PathLike[str] | None = None,
    forward: Forward | None = None,
    node_type: str | None = None,
    policy: SARPolicy | None = None,
) -> Tensor:
    r"""Computes a model's outputs for all nodes, :math:`f_\theta(X, E)`, exactly.

    The model may have been trained in any way, by sampled neighbours (``NeighborLoader``) too: no
    neighbour is sampled here. It runs in evaluation mode, without gradients, and is left in the
    mode that it had.

    .. code-block:: python

        scores = pyg_sar.infer(model, data)                                   # plain PyG, one pass
        scores = pyg_sar.infer(model, data, out="scores.npy", memory="1GiB")  # layer by layer

    With ``memory`` or ``parts`` the graph is cut into parts, in a temporary folder. A worker
    process computes them in turn, all parts of one layer before the next; parts that wait are kept
    in files (docs/larger-than-memory.md; Linux, with the C++ kernels). On the workers of a
    partition all of them call this. In both cases the model's own code sees tensors of the whole
    graph (docs/whole-graph.md).

    Args:
        model: The model, plain or distributed.
        data: The whole graph in one process, or what :func:`pyg_sar.load_partition` gave.
        out: A ``.npy`` file, which the workers write in global order, each its own rows. It gets
            its name once it is complete, and replaces one of that name.
        memory: By how many bytes each worker process may grow after its start, such as
            ``'2GiB'``. The number of parts follows from it. Not for a partition: its workers have
            been started.
        parts: The number of parts, where it shall not follow from ``memory``.
        workers: Worker processes that compute the parts.
        store: A folder for the parts, on a local disk; that of ``out`` by default, else the
            system's for temporary files.
        forward: Computes the outputs, ``forward(model, data)``, where
            ``model(data.x, data.edge_index)`` is not the right call; for a ``HeteroData``
            ``model(data.x_dict, data.edge_index_dict)`` is. With ``memory`` the parts have only
            what the default call takes, unless it is given.
        node_type: Of a ``HeteroData``: the nodes' type, by which outputs in a dict are chosen.
        policy: How layers run on parts.

    Returns:
        The rows of all nodes ``[num_nodes, *]`` of a whole graph; with ``out`` they are mapped
        from the file. On a partition a tensor of the whole graph. With ``out``, ``memory`` or
        ``parts``, half precision that NumPy does not have (bfloat16) becomes float32.

    Raises:
        ValueError: When an argument is out of range or does not fit the others; when the result
            has not one row per node, naming the rank.
        OSError: When ``out`` is a folder, or in none, before anything is computed; when it can't
            be written.
        StoreError, WorkerError: When ``memory`` does not suffice.
    """
    comm, is_part = current(), is_distributed(data)
    _check(data, memory, parts, workers, store, node_type, is_part)
    check_type("model", model, nn.Module, "a torch.nn.Module")
    check_type("policy", policy or SARPolicy(), SARPolicy, "a SARPolicy or None")
    if forward is not None and not callable(forward):
        raise TypeError(f"forward={forward!r} must be a function of model and data")
    if out is not None:
        _check_out(Path(out))
    if not is_part and (memory is not None or parts is not None):
        how = {"forward": forward, "node_type": node_type, "policy": policy}
        return _in_parts(model, data, out, memory, parts, workers, store, how)
    if is_part:
        check_replicas(model, comm)
        with _put_aside(model):  # A copy: the caller's stays a plain model.
            model = distribute(copy.deepcopy(model), policy)
    rows = _run(model, data, forward, node_type)
    if out is None:
        return rows
    rows = rows.float() if rows.dtype == torch.bfloat16 else rows
    if isinstance(rows, NodeTensor):
        write_rows(rows.local, rows.rows.ids, out)
    else:
        write_rows(rows, torch.arange(len(rows)), out)
    return rows if is_part else _mapped(out)


def _check(
    data: Any, memory: Any, parts: Any, workers: Any, store: Any, node_type: Any, is_part: bool
) -> None:
    comm = current()
    if not isinstance(data, Data | HeteroData):
        raise TypeError(
            f"Expected 'data' to be a Data or a HeteroData (got {type(data).__name__} at rank "
            f"{comm.rank})"
        )
    if not is_part and comm.world_size > 1:
        raise ValueError(
            f"'data' at rank {comm.rank} of {comm.world_size} is not a part: pass what "
            "pyg_sar.load_partition() gives, or call infer() in one process"
        )
    given = {"memory": memory, "parts": parts, "store": store}
    name = next((name for name, value in given.items() if value is not None), None)
    if is_part and name is not None:
        raise ValueError(
            f"{name}={given[name]!r} is of the workers, which have been started (rank "
            f"{comm.rank}): say pyg_sar.launch(fn, num_workers, parts=..., memory=..., store=...)"
        )
    if memory is None and parts is None and (store is not None or workers != 1):
        name, value = ("store", store) if store is not None else ("workers", workers)
        raise ValueError(f"{name}={value!r} is for parts: pass memory= or parts=, too")
    check_whole("parts", parts, optional=True)
    check_whole("workers", workers)
    check_folder("store", store)
    if isinstance(data, Data) and node_type is not None:
        raise ValueError(f"node_type={node_type!r} is for a HeteroData; 'data' has no node types")
    if isinstance(data, HeteroData) and node_type not in data.node_types:
        raise ValueError(
            f"Expected 'node_type' to be one of {data.node_types} for a HeteroData (got "
            f"{node_type!r} at rank {comm.rank})"
        )


def _check_out(path: Path) -> None:
    """Raises before anything is computed where the result could not be written."""
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "Is a folder; give the name of a .npy file", str(path)
        )
    if path.suffix != ".npy":
        raise ValueError(
            f"Expected 'out' to be the name of a .npy file (got {str(path)!r} at rank "
            f"{current().rank}); pyg-sar predict also writes tables, .parquet or .csv"
        )
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(path.absolute().parent))


# One pass #####################################################################


def call_default(model: nn.Module, data: Any) -> Any:
    """Makes the default call of :func:`infer`."""
    if isinstance(data, HeteroData):
        return model(data.x_dict, data.edge_index_dict)
    return model(data.x, data.get("edge_index", data.get("adj_t")))


@contextmanager
def _put_aside(model: nn.Module) -> Iterator[None]:
    """Has a model evaluate, and its layers remember nothing. See [Note: a state of its own]."""
    kept = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.startswith("_cached") and value is not None
    ]
    try:
        for module, name, _ in kept:
            setattr(module, name, None)
        with modes_kept(model):
            model.eval()
            yield
    finally:
        for module in model.modules():
            for name in [name for name in vars(module) if name.startswith("_cached")]:
                setattr(module, name, None)
        for module, name, value in kept:
            setattr(module, name, value)


@torch.no_grad()
def _run(model: nn.Module, data: Any, forward: Forward | None, node_type: str | None) -> Tensor:
    """Returns the rows of ``data``'s nodes."""
    with _put_aside(model):
        rows: Any = (forward or call_default)(model, data)
    if isinstance(data, HeteroData) and isinstance(rows, Mapping):
        rows = rows.get(node_type, rows)
    count = data[node_type].num_nodes if isinstance(data, HeteroData) else data.num_nodes
    found = f"shape {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
    if not isinstance(rows, Tensor) or rows.dim() == 0 or rows.size(0) != count:
        raise ValueError(
            "Expected the model to return a tensor with a row for each of the "
            f"{counted(count, 'nodes')} of rank {current().rank} (got {found}): pass forward=, a "
            "function of model and data that does"
        )
    if is_distributed(data) and not (isinstance(rows, NodeTensor) and rows.axis == 0):
        raise ValueError(
            f"Expected a result of the nodes, each worker its rows (got {found} on all workers, at "
            f"rank {current().rank}): pass forward=, a function that computes it of data"
        )
    return rows.detach()


def is_distributed(data: Any) -> bool:
    """Says if data is a distributed graph, as :func:`pyg_sar.load_partition` gives it."""
    return isinstance(data, Data | HeteroData) and bool(node_tensors(data.to_dict()))


def _mapped(path: str | os.PathLike[str]) -> Tensor:
    """Returns a file's rows; they are read when they are needed, and changes stay in memory."""
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))


# In parts #####################################################################


def _in_parts(
    model: nn.Module,
    data: Any,
    out: str | os.PathLike[str] | None,
    memory: int | str | None,
    parts: int | None,
    workers: int,
    store: str | os.PathLike[str] | None,
    how: dict[str, Any],
) -> Tensor:
    size = None if memory is None else parse_bytes(memory, "memory")
    place = store or (None if out is None else Path(out).absolute().parent)
    folder = None if place is None else Path(place)
    graph = (_needed(data) if how["forward"] is None else copy.copy(data)).cpu()
    with _put_aside(model), TemporaryFolder("pyg_sar-infer-", folder) as scratch:
        plain = model
        if any(tensor.device.type != "cpu" for tensor in model.state_dict().values()):
            plain = copy.deepcopy(model).cpu()  # Which another process can load.
        root, path = f"{scratch}/parts", out or f"{scratch}/rows.npy"
        for attempt in range(_TRIES):
            count = _cut(graph, model, root, size, parts, workers, attempt)
            hosting: dict[str, Any] = {"parts": count}
            if size is not None:
                hosting |= {"memory": size, "store": str(scratch)}
            try:
                launch(_infer_part, workers, plain, root, os.fspath(path), how, **hosting)
                break
            except WorkerError as error:
                more = "Cut the graph into more parts" in str(error)
                if not more or parts is not None or attempt == _TRIES - 1:
                    raise
        return _mapped(path) if out else torch.from_numpy(np.load(path, allow_pickle=False))


def _infer_part(model: nn.Module, root: str, path: str, how: dict[str, Any]) -> None:
    """Runs for each part. The model's own code sees the whole graph, as it does in one process."""
    infer(model, load_partition(root), out=path, **how)


def _needed(data: Any) -> Any:
    """Returns the part of a graph that the default call takes."""
    kept: Any = HeteroData() if isinstance(data, HeteroData) else Data()
    pairs = [(data, kept)]
    if isinstance(data, HeteroData):
        pairs = [(data[key], kept[key]) for key in (*data.node_types, *data.edge_types)]
    for store, own in pairs:
        for name in ("x", "edge_index", "adj_t"):
            if store.get(name) is not None:
                own[name] = store[name]
        if not isinstance(store, EdgeStorage):
            own.num_nodes = store.num_nodes
    return kept


def _cut(
    graph: Any,
    model: nn.Module,
    root: str,
    memory: int | None,
    parts: int | None,
    workers: int,
    attempt: int,
) -> int:
    """Writes the parts of a graph; returns how many there are."""
    if parts is not None or memory is None:
        count = max(parts or 1, workers)
        write_partitions(graph, count, root, overwrite=True)
        return count
    sizes = [parameter.element_size() for parameter in model.parameters()]
    row_bytes = _widest(model, graph) * max(sizes, default=4)
    free = max(memory - _BASE, memory // 4)
    whole = _AT_ONCE * graph.num_nodes * row_bytes + _EDGE_BYTES * graph.num_edges
    count = max(-(-whole // free), workers, 1) * 2**attempt
    while True:
        count = min(count, _MOST_PARTS, graph.num_nodes)
        found = write_partitions(graph, count, root, overwrite=True)
        rows = max(own + halo for own, halo in zip(found.nodes, found.halo, strict=True))
        needed = _AT_ONCE * rows * row_bytes + _EDGE_BYTES * max(found.edges)
        if needed <= free or count in (_MOST_PARTS, graph.num_nodes):
            return count
        count = count * 2


def _widest(model: nn.Module, graph: Any) -> int:
    """Returns the most values per node that a layer reads or makes, as its parameters tell."""
    widths = [1]
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            # Rows of an embedding are nodes, or words.
            widths += parameter.shape[int(isinstance(module, nn.Embedding)) :]
    stores = graph.node_stores if isinstance(graph, HeteroData) else [graph]
    features = [store.get("x") for store in stores]
    return max([*widths, *(x.size(1) for x in features if x is not None and x.dim() == 2)])


# Before the training ##########################################################


class _WithLoops(LGConv):
    """The matrix of ``GCNConv``: with edges from each node to itself."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        edges, weight = add_remaining_self_loops(edge_index, edge_weight, 1.0, x.size(0))
        return super().forward(x, edges, weight)


@torch.no_grad()
def propagate_features(
    parts: str | os.PathLike[str],
    K: int,  # noqa: N803 (as PyG's SIGN and SGConv)
    out: str | os.PathLike[str] | None = None,
    *,
    add_self_loops: bool = False,
    overwrite: bool = False,
) -> Data:
    r"""Computes powers of the normalised adjacency matrix times the features. Collective.

    .. math::
        \mathbf{X}^{(k)} = {\left( \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2} \right)}^k
        \mathbf{X}, \qquad k = 1, \ldots, K

    as ``data.x1``, ``data.x2``, ...: those of ``torch_geometric.transforms.SIGN``, in the
    features' dtype. What trains on them needs no edges. With ``add_self_loops`` the matrix is that
    of ``GCNConv`` and ``SGConv``.

    Args:
        parts: A partition, of which each worker has a part; edges may have ``edge_weight``.
        K: The number of powers.
        out: Write the partition with these features, to a folder that all workers share. It may be
            ``parts`` with ``overwrite``.
        add_self_loops: Add the edges from each node to itself first, where there are none.
        overwrite: Replace a partition at ``out``.

    Returns:
        The graph as :func:`pyg_sar.load_partition` gives it, with the features.

    Raises:
        ValueError: When the graph has no features, or several node types, or an argument is wrong.
        PartitionError: On every worker, where the partition can't be read or written.
    """
    check_whole("K", K)
    data = load_partition(parts)
    x = data.get("x") if isinstance(data, Data) else None
    if not isinstance(data, Data) or not isinstance(x, Tensor) or x.dim() != 2:
        raise ValueError(
            f"'{os.fspath(parts)}' has no features 'x' of one node type, [num_nodes, F] (rank "
            f"{current().rank})"
        )
    if not x.is_floating_point():
        x = x.float()
    edges, weight = data.get("edge_index", data.get("adj_t")), data.get("edge_weight")
    weight = None if weight is None else weight.view(-1).to(x.dtype)
    layer = distribute(_WithLoops() if add_self_loops else LGConv())
    found: dict[str, Tensor] = {}
    for k in range(1, K + 1):
        x = found[f"x{k}"] = layer(x, edges, weight)
        data[f"x{k}"] = x
    if out is not None:
        add_attributes(parts, found, out, overwrite=overwrite)
    return data
