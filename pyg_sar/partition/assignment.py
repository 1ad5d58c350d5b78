"""The nodes and edges of a graph, checked, and the part of each node."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import to_edge_index, to_torch_coo_tensor, to_torch_csr_tensor

from pyg_sar.files import TemporaryFolder, check_type
from pyg_sar.partition.attributes import check_compressed
from pyg_sar.partition.balance import (
    METIS_EDGE,
    METIS_NODE,
    balanced_assignment,
    metis,
    undirected_csr,
)
from pyg_sar.partition.coarsening import Edges, coarsened_assignment
from pyg_sar.partition.geometric import geometric_assignment
from pyg_sar.partition.scratch import Scratch
from pyg_sar.usage import METHODS
from pyg_sar.wording import counted

_MOST_PARTS = 99_999
_STREAMED = 2**30  # bytes for pieces of the stream where nothing limits them


def assign_nodes(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    method: str | Tensor | np.ndarray[Any, Any] = "balanced",
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
    scratch: Scratch | None = None,
    marked: Tensor | None = None,
    pos: Tensor | None = None,
) -> Tensor:
    r"""Assigns every node to one of ``num_parts`` parts.

    A part without nodes is legal: METIS leaves some empty when there are many parts, and more
    parts than nodes can't all be filled.

    Args:
        edge_index: Edges (source, target), shape ``[2, num_edges]``. ``'balanced'`` and
            ``'metis'`` look at them.
        num_nodes: The number of nodes :math:`N`.
        num_parts: The number of parts :math:`P \geq 1`.
        method: ``'balanced'``: few halo rows, with at most 1.1 times the mean of nodes and of
            edges in each part; an edge is in the part of its target. A warning says where a limit
            can't be kept, as when one node has most edges (not in graphs with fewer than 1,000
            nodes and edges per part). ``'metis'``: few cut edges, parts of nearly equal node
            counts; where degrees are skewed one of them can have most edges. ``'coarsened'``: nodes
            in a stream, in less memory than METIS takes, with more halo rows (``coarsening.py``);
            nodes and edges within 1.1 times the mean. ``'geometric'``: boxes around positions
            (``geometric.py``), of equal sums of in-edges plus nodes; for meshes and point clouds.
            ``'random'``:
            node counts that differ by at most one, drawn from ``seed``. ``'contiguous'``: part
            :math:`\lfloor i P / N \rfloor` for node :math:`i`. Or the assignment itself, an
            integer vector of shape ``[num_nodes]``.
        seed: Seed of all but ``'contiguous'``. The same seed gives the same assignment.
        report: Called with a line of text before each stage that may take long.
        scratch: Its memory is a limit: where METIS would take more, ``'balanced'`` becomes
            ``'coarsened'``.
        marked: Nodes that ``'balanced'`` and ``'coarsened'`` balance by themselves, too (training
            nodes), bool, ``[num_nodes]``.
        pos: The positions that ``'geometric'`` needs, ``[num_nodes, D]``.

    Returns:
        The part of each node, int64, shape ``[num_nodes]``.

    Raises:
        ValueError: When an argument is out of range, or the vector is not an assignment.
        TypeError: When ``num_parts`` or ``seed`` is not an integer.

    Source: Karypis and Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning
    Irregular Graphs", SIAM J. Sci. Comput. 1998, and "Multilevel Algorithms for Multi-Constraint
    Graph Partitioning", SC 1998 (through ``pymetis``).
    """
    check_num_parts(num_parts)
    check_seed(seed)
    if not isinstance(method, str):
        return check_assignment(method, num_nodes, num_parts)
    edges = [(edge_index, 0, 0)]
    return _assign(edges, num_nodes, num_parts, method, seed, report, scratch, marked, pos)


def _assign(
    edges: Edges,
    num_nodes: int,
    num_parts: int,
    method: str,
    seed: int,
    report: Callable[[str], None],
    scratch: Scratch | None,
    marked: Tensor | None = None,
    pos: Tensor | None = None,
) -> Tensor:
    if method not in METHODS:
        raise ValueError(
            f"Expected 'method' to be one of {', '.join(map(repr, METHODS))} or an integer vector "
            f"of shape [{num_nodes}] (got {method!r})"
        )
    if method == "geometric" and (pos is None or len(pos) != num_nodes):
        had = "none" if pos is None else f"shape {list(pos.shape)}"
        raise ValueError(
            f"method='geometric' needs positions 'pos' of all {counted(num_nodes, 'nodes')} (got "
            f"{had}); set data.pos or choose another method"
        )
    blocks = torch.arange(num_nodes) * num_parts // max(num_nodes, 1)
    if method == "contiguous" or num_parts == 1:
        return blocks
    generator = torch.Generator().manual_seed(seed)
    if method == "random":
        return blocks[torch.randperm(num_nodes, generator=generator)]
    num_edges = sum(edge_index.size(1) for edge_index, _, _ in edges)
    if pos is not None and method == "geometric":
        weight = torch.ones(num_nodes, dtype=torch.long)
        for edge_index, _, first in edges:
            weight += torch.bincount(edge_index[1].long() + first, minlength=num_nodes)
        return geometric_assignment(pos, weight, num_parts)
    if num_parts >= num_nodes or (num_edges == 0 and method != "metis"):
        return blocks
    needs = METIS_EDGE * num_edges + METIS_NODE * num_nodes
    if scratch is not None and needs > scratch.memory and method != "coarsened":
        if method == "metis":
            raise ValueError(
                f"method='metis' takes about {needs / 1e9:.1f} GB for "
                f"{counted(num_edges, 'edges')}, more than memory={scratch.memory / 1e9:.1f} GB; "
                "take 'balanced' or 'coarsened'"
            )
        report(f"METIS would take about {needs / 1e9:.1f} GB: it cuts a coarsened graph")
        method = "coarsened"
    if method == "coarsened":
        with ExitStack() as stack:
            if scratch is None:
                folder = stack.enter_context(TemporaryFolder("pyg_sar-assign-"))
                scratch = Scratch(folder, _STREAMED, report)
            return coarsened_assignment(edges, num_nodes, num_parts, seed, scratch, marked)
    whole = edges[0][0]  # METIS takes memory enough: no copy where none is needed
    if len(edges) > 1 or edges[0][1:] != (0, 0) or whole.dtype != torch.long:
        moved = [rows.long() + torch.tensor([[s], [t]]) for rows, s, t in edges]
        whole = torch.cat(moved, dim=1)
        del moved
    if method == "metis":
        return metis(undirected_csr(whole, num_nodes), num_parts, seed)
    return balanced_assignment(whole, num_nodes, num_parts, seed, report, marked)


def check_num_parts(num_parts: int) -> None:
    """Raises unless ``num_parts`` is an integer from 1 to 99,999, what names of files can hold."""
    if isinstance(num_parts, bool) or not isinstance(num_parts, int):
        raise TypeError(f"Expected 'num_parts' to be an integer (got {num_parts!r})")
    if num_parts < 1:
        raise ValueError(f"Expected 'num_parts' to be at least 1 (got {num_parts})")
    if num_parts > _MOST_PARTS:
        raise ValueError(f"Expected 'num_parts' to be at most {_MOST_PARTS} (got {num_parts})")


def whole_number(name: str, value: Any) -> int:
    """Returns a number of nodes as an int; NumPy integers and tensors with one integer are
    taken.
    """
    single = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    plain = value.item() if single else value
    if isinstance(plain, bool) or not isinstance(plain, int) or plain < 0:
        raise ValueError(f"Expected '{name}' to be an integer of at least 0 (got {value!r})")
    return plain


def check_seed(seed: int) -> None:
    """Raises unless ``seed`` is an integer that every generator here takes."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"Expected 'seed' to be an integer (got {seed!r})")
    if not 0 <= seed < 2**31:
        raise ValueError(f"Expected 'seed' to be in 0 .. 2**31 - 1 (got {seed})")


def check_assignment(
    vector: Tensor | np.ndarray[Any, Any], num_nodes: int, num_parts: int
) -> Tensor:
    """Checks a given assignment vector and returns it as int64 on the CPU."""
    if not isinstance(vector, (Tensor, np.ndarray)):
        raise TypeError(
            "Expected 'method' to be a name, a tensor or a NumPy array "
            f"(got {type(vector).__name__}); pass torch.tensor(assignment)"
        )
    part = torch.as_tensor(vector).detach().cpu()
    if part.dtype == torch.bool or part.is_floating_point() or part.is_complex():
        raise ValueError(
            f"Expected the assignment to hold integers (got dtype {part.dtype}); "
            "convert it with .long()"
        )
    if tuple(part.shape) != (num_nodes,):
        raise ValueError(
            f"Expected an assignment of shape [{num_nodes}], one part per node "
            f"(got shape {list(part.shape)})"
        )
    part = part.long()
    wrong = ((part < 0) | (part >= num_parts)).nonzero().view(-1)
    if wrong.numel() > 0:
        node = int(wrong[0])
        raise ValueError(
            f"Expected the assignment to hold parts 0 to {num_parts - 1} (got {int(part[node])} "
            f"at node {node}, {counted(wrong.numel(), 'nodes')} in all); correct it or set "
            f"num_parts={max(int(part.max()) + 1, 1)}"
        )
    return part


EdgeType = tuple[str, str, str]
Assignment = Mapping[str, Tensor | np.ndarray[Any, Any]]


def assign_node_types(
    edges: Mapping[EdgeType, Tensor],
    num_nodes: Mapping[str, int],
    num_parts: int,
    method: str | Assignment = "balanced",
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
    scratch: Scratch | None = None,
    marked: Mapping[str, Tensor] | None = None,
    pos: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Assigns every node of every type to one of ``num_parts`` parts: int64 ``[N_t]`` by type.

    Arguments are as of :func:`~pyg_sar.partition.assignment.assign_nodes`, by relation and by node
    type. ``'balanced'``, ``'metis'``, ``'coarsened'`` and ``'geometric'`` take nodes and edges of
    all types together; ``'random'`` and ``'contiguous'`` each type by itself, so that its node
    counts differ by at most one. Or the assignment itself: an integer vector for each node type.
    """
    check_num_parts(num_parts)
    check_seed(seed)
    if isinstance(method, Mapping):
        return _given(method, num_nodes, num_parts)
    if not isinstance(method, str):
        raise TypeError(
            "Expected 'method' to be a name or a dict {node type: vector} for a HeteroData (got "
            f"{type(method).__name__})"
        )
    nothing = torch.empty(2, 0, dtype=torch.long)
    if method in ("random", "contiguous"):
        return {
            name: assign_nodes(nothing, count, num_parts, method, (seed + k) % 2**31)
            for k, (name, count) in enumerate(num_nodes.items())
        }
    starts, total = {}, 0
    for name, count in num_nodes.items():
        starts[name], total = total, total + count
    joint = [(rows, starts[source], starts[target]) for (source, _, target), rows in edges.items()]
    together = None
    if marked is not None:
        of_type = [
            marked.get(name, torch.zeros(n, dtype=torch.bool)) for name, n in num_nodes.items()
        ]
        together = torch.cat(of_type)
    edges_ = [(nothing, 0, 0), *joint]
    places = None
    if method == "geometric" and pos is not None:
        if pos.keys() != num_nodes.keys() or len({p.shape[1:] for p in pos.values()}) > 1:
            known = {name: list(p.shape) for name, p in pos.items()}
            raise ValueError(
                "method='geometric' needs 'pos' of all node types, in one space (got "
                f"{known} of the types {sorted(num_nodes)}); choose another method"
            )
        places = torch.cat([pos[name].double() for name in num_nodes])
    part = _assign(edges_, total, num_parts, method, seed, report, scratch, together, places)
    return dict(zip(num_nodes, part.split(list(num_nodes.values())), strict=True))


def _given(method: Assignment, num_nodes: Mapping[str, int], num_parts: int) -> dict[str, Tensor]:
    missing, unknown = sorted(set(num_nodes) - set(method)), sorted(set(method) - set(num_nodes))
    if missing or unknown:
        raise ValueError(
            f"Expected 'method' to hold a vector for each of the node types {sorted(num_nodes)} "
            f"(missing: {missing}, unknown: {unknown})"
        )
    found = {}
    for name, count in num_nodes.items():
        try:
            found[name] = check_assignment(method[name], count, num_parts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"method['{name}']: {error}") from error
    return found


def count_nodes(name: str, store: Any) -> int:
    """Returns the number of nodes of a type, from its store."""
    x = store.get("x")
    if "num_nodes" not in store and x is not None and hasattr(x, "size"):
        return int(x.size(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = store.num_nodes if store.can_infer_num_nodes else None
    if found is None:
        raise ValueError(
            f"'data' does not tell how many '{name}' nodes it has; set data['{name}'].num_nodes"
        )
    return whole_number(f"data['{name}'].num_nodes", found)


def check_graph(data: Data, whole: bool = True) -> tuple[Tensor, int]:
    """Checks ``data`` and returns its edges (on the CPU) and number of nodes.

    ``whole``: edges as int64; else as they are, without a copy.
    """
    check_type("data", data, Data, "a torch_geometric.data.Data or HeteroData")
    x = data.get("x")
    # PyG infers the number of nodes from dense features only.
    known = isinstance(x, SparseTensor) and "num_nodes" not in data
    num_nodes = x.size(0) if known else data.num_nodes
    if num_nodes is None:
        raise ValueError("'data' does not tell its number of nodes; set data.num_nodes")
    num_nodes = whole_number("data.num_nodes", num_nodes)
    edge_index = edges_of(data, whole)
    low, high = _range(edge_index)
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"Expected 'edge_index' to hold node ids 0 to {num_nodes - 1} (got {low} to {high}); "
            "correct it or set data.num_nodes"
        )
    return edge_index, num_nodes


def _range(ids: Tensor) -> tuple[int, int]:
    """Returns the least and the largest id, of any integer dtype, read in pieces; (0, -1): none."""
    if not ids.numel():
        return 0, -1
    pieces = [piece.long().aminmax() for piece in ids.split(2**20, dim=-1)]
    return min(int(low) for low, _ in pieces), max(int(high) for _, high in pieces)


_ADJACENCY = "the edges, as "
_WEIGHTED = "weighted "
OF_TORCH_SPARSE = "SparseTensor"
"""The form of an ``adj_t`` that is torch-sparse's, not torch's."""


def with_edges(data: Any) -> Any:
    """Returns ``data`` with an ``edge_index``, made of ``adj_t`` (``ToSparseTensor``) if need be.

    Of the adjacency only its type is kept: :func:`load_partition` puts the distributed
    ``edge_index`` in its place, which layers take for it. Weights become ``edge_weight``; a part
    then has no ``adj_t``, as layers would see no weights in it.
    """
    adjacency = data.get("adj_t") if isinstance(data, Data) else None
    if isinstance(adjacency, tuple) and len(adjacency) == 2 and adjacency[1] is None:
        adjacency = adjacency[0]  # GCNNorm leaves a pair where adj_t was a matrix of torch.
    if adjacency is None or data.get("edge_index") is not None:
        return data
    if isinstance(adjacency, SparseTensor):
        target, source, values = adjacency.coo()
        form = OF_TORCH_SPARSE
    elif isinstance(adjacency, Tensor) and adjacency.layout in (torch.sparse_csr, torch.sparse_coo):
        check_compressed(adjacency)
        (target, source), values = to_edge_index(adjacency)
        form = str(adjacency.layout)
    else:
        return data
    weighted = values is not None and not bool((values == 1).all())
    if weighted and data.get("edge_weight") is not None:
        raise ValueError(
            "'adj_t' holds weights, and there is 'edge_weight' as well, in another order maybe; "
            "delete the one that the layers don't take"
        )
    data, nodes = copy.copy(data), adjacency.size(0)
    data.edge_index, data.num_nodes = torch.stack([source, target]), nodes
    data.adj_t = f"{_ADJACENCY}{_WEIGHTED if weighted else ''}{form}"
    if weighted:
        data.edge_weight = values
    return data


def adjacency_form(values: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Returns the form of the ``adj_t`` that a graph's edges were, and whether it had weights.

    That is :data:`OF_TORCH_SPARSE`, or a layout of PyTorch's by name; ``None`` where they were no
    sparse matrix. ``values`` are the attributes that are no tensors.
    """
    text = values.get("adj_t")
    if not isinstance(text, str) or not text.startswith(_ADJACENCY):
        return None
    form = text.removeprefix(_ADJACENCY)
    return form.removeprefix(_WEIGHTED), form.startswith(_WEIGHTED)


def restore_adjacency(data: Data) -> None:
    """Puts ``adj_t`` of the whole graph back as it was, in the place of its edges."""
    form = adjacency_form(data.to_dict())
    if form is None:
        return
    (name, weighted), (source, target) = form, data.edge_index
    size = (data.num_nodes, data.num_nodes)
    weight = data.edge_weight if weighted else None
    if name == OF_TORCH_SPARSE:
        data.adj_t = SparseTensor(row=target, col=source, value=weight, sparse_sizes=size)
    else:
        make = to_torch_coo_tensor if name == str(torch.sparse_coo) else to_torch_csr_tensor
        data.adj_t = make(torch.stack([target, source]), weight, size=size)
    del data.edge_index
    if weighted:
        del data.edge_weight


def edges_of(data: Any, whole: bool = True) -> Tensor:
    """Returns ``edge_index`` of a ``Data`` or an edge store, on the CPU.

    ``whole``: as int64; else as it is, without a copy.
    """
    edge_index = data.get("edge_index")
    if edge_index is None:
        if data.get("adj_t") is not None or data.get("adj") is not None:
            raise ValueError(
                "'data' holds its edges in another form ('adj_t' or 'adj'); partition it before "
                "ToSparseTensor, or set data.edge_index by torch_geometric.utils.to_edge_index"
            )
        if data.num_edges:
            named = ", ".join(f"'{name}'" for name in sorted(data.keys()) if "edge" in name)
            raise ValueError(
                f"'data' holds attributes of {counted(data.num_edges, 'edges')} ({named}) and no "
                "'edge_index': set data.edge_index (to torch.empty(2, 0, dtype=torch.long), if "
                "there are none), or delete them"
            )
        return torch.empty(2, 0, dtype=torch.long)
    if hasattr(edge_index, "as_tensor"):
        edge_index = edge_index.as_tensor()  # PyG's EdgeIndex.
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"Expected 'edge_index' to be a tensor (got {type(edge_index).__name__}); "
            "convert it with torch.as_tensor"
        )
    dtype = edge_index.dtype
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise ValueError(
            f"Expected 'edge_index' to hold integers (got dtype {dtype}); convert it with .long()"
        )
    if edge_index.layout != torch.strided:
        raise ValueError(
            f"Expected 'edge_index' of shape [2, num_edges] (got a matrix in {edge_index.layout}); "
            "convert it with torch_geometric.utils.to_edge_index"
        )
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"Expected 'edge_index' of shape [2, num_edges] (got {list(edge_index.shape)})"
        )
    found: Tensor = edge_index.detach().cpu()
    return found.long() if whole else found


def edges_of_relations(
    data: HeteroData, num_nodes: Mapping[str, int], whole: bool = True
) -> dict[EdgeType, Tensor]:
    """Returns ``edge_index`` of each relation, on the CPU; ``whole``: as int64, else as it is."""
    found = {}
    for edge_type in data.edge_types:
        try:
            edges = found[edge_type] = edges_of(data[edge_type], whole)
        except ValueError as error:
            raise ValueError(f"{edge_type}: {error}") from error
        for row, name, what in zip(edges, edge_type[::2], ("source", "target"), strict=True):
            if name not in num_nodes:
                raise ValueError(
                    f"{edge_type} refers to the node type '{name}', which 'data' does not have; "
                    f"set data['{name}'].num_nodes"
                )
            count, (low, high) = num_nodes[name], _range(row)
            if low < 0 or high >= count:
                raise ValueError(
                    f"Expected 'edge_index' of {edge_type} to hold {what} ids 0 to {count - 1} of "
                    f"'{name}' (got {low} to {high}); correct it or set data['{name}'].num_nodes"
                )
    return found
