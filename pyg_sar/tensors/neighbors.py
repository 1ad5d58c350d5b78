"""Edges that are made while training: between near nodes, or any that workers give for their own.

[Note: near nodes] Positions are few numbers per node: every worker has those of all nodes, and
finds the neighbours of its own ones, so that only features travel. Candidates are SciPy's
(k-d trees); whether one is near enough is decided by one formula for each pair alone, so edges are
the same for any number of workers. In a periodic cell points near its faces are repeated beyond
them, as often as the radius asks for.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.files import check_whole
from pyg_sar.tensors.boundary import rows_of
from pyg_sar.tensors.distributing import edges_at_targets
from pyg_sar.tensors.node_tensor import NodeTensor, rule, whole
from pyg_sar.tensors.operands import wrap
from pyg_sar.tensors.rows import Rows

Array = np.ndarray[Any, Any]

_LABEL = ("", "", "made edges")
_SLACK = 1 + 1e-9  # of the candidates' distance, whose rounding is SciPy's
_MOST_IMAGES = 10**4


def edges(sources: Tensor, targets: Tensor, data: Any, source_data: Any = None) -> NodeTensor:
    r"""Returns edges that each worker gives for its own nodes as one ``edge_index``. Collective.

    Each worker gives the in-edges of the nodes that it owns, so that nothing but the ids of remote
    sources is sent. In the whole graph edges stand in the order of their targets; those of one
    target in the order in which they are given.

    .. code-block:: python

        mine = data.x.rows.ids                          # global ids of this worker's nodes
        edge_index = pyg_sar.edges(sources, targets, data)
        out = model(data.x, edge_index)

    Args:
        sources: Global ids of the sources, int64 ``[E_p]``, a plain tensor.
        targets: Global ids of the targets, ``[E_p]``, all of them nodes of this worker.
        data: Whose nodes these are: what :func:`pyg_sar.load_partition` gave, the store of a node
            type, or a tensor with a row per node.
        source_data: The same of the sources, where these are nodes of another type.

    Returns:
        ``edge_index`` of the whole graph, ``[2, E]``.

    Raises:
        TypeError: When ``sources`` or ``targets`` are no plain int64 tensors of one axis.
        ValueError: On every worker, when one gives ids that are not there, targets that it doesn't
            own, or numbers of sources and targets that differ.
    """
    nodes = rows_of(data)
    others = nodes if source_data is None else rows_of(source_data)
    problem = _problem(sources, targets, others, nodes)
    for rank, text in enumerate(nodes.comm.all_gather_object(problem, label=_LABEL)):
        if text:
            kind = TypeError if text.startswith("Expected") else ValueError
            raise kind(f"pyg_sar.edges: {text} (rank {rank})")
    return _numbered(sources, targets, others, nodes)


def _problem(sources: Any, targets: Any, others: Rows, nodes: Rows) -> str:
    """Returns what is wrong with this worker's ends of edges; ``''``: nothing."""
    for name, ids in (("sources", sources), ("targets", targets)):
        plain = isinstance(ids, Tensor) and not isinstance(ids, NodeTensor)
        if not plain or ids.dtype != torch.long or ids.dim() != 1:
            what = f"{ids.dtype} {list(ids.shape)}" if plain else type(ids).__name__
            return f"Expected '{name}' to be a plain int64 tensor [E] (got {what})"
    if sources.numel() != targets.numel():
        return f"{sources.numel()} 'sources' and {targets.numel()} 'targets'"
    for name, ids, rows in (("sources", sources, others), ("targets", targets, nodes)):
        low, high = map(int, ids.aminmax()) if ids.numel() else (0, 0)
        if low < 0 or (ids.numel() and high >= rows.total):
            wrong = low if low < 0 else high
            return f"'{name}' hold {wrong}, and nodes are 0 to {rows.total - 1}"
    own = torch.zeros(nodes.total, dtype=torch.bool, device=targets.device)
    own[nodes.ids] = True
    strange = targets[~own[targets]]
    if strange.numel():
        return f"'targets' hold node {int(strange[0])}, which another worker owns"
    return ""


def _numbered(sources: Tensor, targets: Tensor, others: Rows, nodes: Rows) -> NodeTensor:
    """Returns edges into own nodes by global ids, numbered by target and in their order."""
    order = targets.argsort(stable=True)
    sources, targets = sources[order], targets[order]
    mine = torch.bincount(targets, minlength=nodes.total)
    counts = nodes.comm.all_reduce(mine.clone(), label=_LABEL)
    first = counts.cumsum(0) - counts
    within = torch.arange(targets.numel(), device=targets.device)
    within -= (mine.cumsum(0) - mine)[targets]
    numbers = first[targets] + within
    return edges_at_targets([sources, targets], numbers, int(counts.sum()), others, nodes)


# Near nodes ###################################################################


def radius_graph(
    pos: Tensor,
    r: float,
    batch: Tensor | None = None,
    *,
    loop: bool = False,
    cell: Tensor | None = None,
) -> Any:
    r"""Returns the edges between nodes within a distance, all of them. Collective.

    .. math::
        \{ (j, i) : \lVert \mathbf{p}_j - \mathbf{p}_i + \mathbf{s} \rVert \leq r \}

    where :math:`\mathbf{s}` is 0 or, with ``cell``, any sum of whole multiples of the cell's
    vectors: a pair may have several edges, and a node edges from its own images. Edges stand in the
    order of their targets, those of one target in that of the sources. Edges have no gradient;
    positions have one by what is computed of them:

    .. code-block:: python

        edge_index, shift = radius_graph(pos, 5.0, cell=cell)
        vector = pos[edge_index[0]] - pos[edge_index[1]] + shift

    Args:
        pos: Positions ``[N, D]``: a node tensor, or a plain one, as in one process.
        r: The distance.
        batch: The graph of each node, int64 ``[N]``: only nodes of one graph are joined.
        loop: Whether each node has an edge to itself.
        cell: Of a periodic system: the cell's vectors, rows of ``[D, D]``, or the edges ``[D]`` of
            a box.

    Returns:
        ``edge_index`` ``[2, E]``; with ``cell`` that and the shifts ``[E, D]``, of the dtype of
        ``pos``.

    Raises:
        ValueError: On every worker: positions that aren't finite, a distance that isn't positive, a
            cell without volume or much smaller than ``r``, ``batch`` of another length or beside
            ``cell``, other arguments than on another worker.
    """
    points, groups = _points("radius_graph", "pos", pos, batch)
    if not isinstance(r, int | float) or not 0 < r < math.inf:
        raise ValueError(f"radius_graph: Expected 'r' to be a positive number (got {r!r})")
    cell = None if cell is None else torch.as_tensor(cell, dtype=torch.float64)
    own = _own("radius_graph", pos, [float(r), bool(loop), None if cell is None else cell.tolist()])
    if cell is not None and groups is not None:
        raise ValueError("radius_graph: Expected one of 'batch' and 'cell' (got both)")
    lattice = None if cell is None else _lattice(cell, points.shape[1], float(r))
    there = None if groups is None else groups[own]
    source, target, shift = _near(points, points[own], float(r), groups, there, lattice)
    target = own[target]
    if not loop:
        kept = (source != target) | (shift != 0).any(1)
        source, target, shift = source[kept], target[kept], shift[kept]
    made = _edge_index(pos, pos, source, target)
    if lattice is None:
        return made
    order = np.argsort(target, kind="stable")
    moved = torch.from_numpy(shift[order] @ lattice).to(pos.device, pos.dtype)
    if not isinstance(made, NodeTensor):
        return made, moved
    rank = made.rows.ids.argsort().argsort()  # They lie by the workers of their sources.
    return made, wrap(moved[rank], made.rows, 0)


def knn_graph(
    x: Tensor,
    k: int,
    batch: Tensor | None = None,
    *,
    loop: bool = False,
    cosine: bool = False,
) -> Tensor:
    r"""Returns edges from the nearest nodes of each node. Collective.

    Edges stand in the order of their targets, those of one target by distance. There are fewer than
    ``k`` where a graph has no more nodes. Of nodes at the same distance SciPy's tree of all nodes
    decides, alike for any number of workers.

    Args:
        x: Positions, or features, ``[N, F]``: a node tensor, or a plain one, as in one process.
        k: How many.
        batch: The graph of each node, int64 ``[N]``: only nodes of one graph are joined.
        loop: Whether a node counts as its own neighbour.
        cosine: By the angle between rows, not by their distance.

    Returns:
        ``edge_index`` ``[2, E]``.

    Raises:
        ValueError: On every worker: rows that aren't finite, ``k`` below 1, ``batch`` of another
            length, other arguments than on another worker.
    """
    points, groups = _points("knn_graph", "x", x, batch)
    check_whole("k", k)
    own = _own("knn_graph", x, [k, bool(loop), bool(cosine)])
    if cosine:
        points = _directions(points)
    there = None if groups is None else groups[own]
    source, target = _nearest(points, points[own], k + (not loop), groups, there)
    target = own[target]
    if not loop:
        first = source == target
        alone = np.bincount(target[first], minlength=len(points)) == 0
        last = np.append(target[1:] != target[:-1], True)[: len(target)]
        full = np.bincount(target, minlength=len(points)) > k
        kept = ~first & ~(last & alone[target] & full[target])  # Many at one place: not itself.
        source, target = source[kept], target[kept]
    return _edge_index(x, x, source, target)


def _points(title: str, name: str, x: Any, batch: Any) -> tuple[Array, Array | None]:
    """Returns all rows in float64 ``[N, D]``, and the graph of each, on every worker."""
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        what = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{title}: Expected '{name}' to be a float tensor [N, D] (got {what})")
    points = whole(x.detach(), f"'{name}' of {title}()").cpu().double().numpy()
    if not np.isfinite(points).all():
        row = int((~np.isfinite(points).all(1)).argmax())
        raise ValueError(f"{title}: '{name}' of node {row} is not finite: {points[row]}")
    if batch is None:
        return points, None
    groups = whole(batch, f"'batch' of {title}()").cpu().numpy()
    if groups.shape != (len(points),) or groups.dtype != np.int64:
        raise ValueError(
            f"{title}: Expected 'batch' to be int64 [{len(points)}] (got {batch.dtype} "
            f"{list(batch.shape)})"
        )
    return points, groups


def _own(title: str, x: Tensor, settings: list[Any]) -> Array:
    """Returns this worker's nodes. Raises where another worker has other settings."""
    if not isinstance(x, NodeTensor):
        return np.arange(x.size(0))
    everyone = x.rows.comm.all_gather_object(settings, label=_LABEL)
    for rank, others in enumerate(everyone):
        if others != everyone[0]:
            raise ValueError(
                f"{title}: arguments must be the same on all workers (got {others} at rank {rank}, "
                f"{everyone[0]} at rank 0)"
            )
    return x.rows.ids.cpu().numpy()


def _edge_index(of_sources: Tensor, of_targets: Tensor, source: Array, target: Array) -> Tensor:
    """Returns edges into own nodes, by target, as a tensor of the whole graph or a plain one."""
    device = of_targets.device
    ends = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
    if isinstance(of_targets, NodeTensor) and isinstance(of_sources, NodeTensor):
        return _numbered(*ends, of_sources.rows, of_targets.rows)
    return torch.stack(ends)[:, ends[1].argsort(stable=True)]


def _lattice(cell: Tensor, width: int, r: float) -> Array:
    """Returns the vectors of a cell, ``[D, D]``."""
    vectors: Array = cell.detach().cpu().numpy()
    vectors = np.diag(vectors) if vectors.ndim == 1 else vectors
    if vectors.shape != (width, width) or not abs(np.linalg.det(vectors)) > 0:
        raise ValueError(
            f"radius_graph: Expected 'cell' to be [{width}] or [{width}, {width}], with a volume "
            f"(got {cell.tolist()})"
        )
    if math.prod(2 * n + 1 for n in _reach(vectors, r)) > _MOST_IMAGES:
        raise ValueError(
            f"radius_graph: 'r' is {r:g}, more than ten times the cell's width: repeat the cell"
        )
    return vectors


def _reach(lattice: Array, r: float) -> list[int]:
    """Returns how many cells away points within ``r`` may lie, along each vector."""
    widths = 1 / np.linalg.norm(np.linalg.inv(lattice), axis=0)
    return [math.ceil(r * _SLACK / width) for width in widths]


def _near(
    points: Array,
    targets: Array,
    r: float,
    groups: Array | None,
    there: Array | None,
    lattice: Array | None = None,
) -> tuple[Any, Any, Any]:
    """Returns pairs within ``r``, by target and source: their numbers, and whole shifts ``[E, D]``.

    See [Note: near nodes].

    Args:
        points: Of the sources, ``[N, D]``.
        targets: Of the targets, ``[n, D]``.
        r: The distance.
        groups: The graph of each source.
        there: That of each target.
        lattice: Vectors of a periodic cell.
    """
    number, steps = np.arange(len(points)), np.zeros((len(points), points.shape[1]), np.int64)
    places, centres, corner, home = points, targets, steps, np.zeros(targets.shape, np.int64)
    if lattice is not None:
        inverse = np.linalg.inv(lattice)
        corner = np.floor(points @ inverse).astype(np.int64)
        inside = points - corner @ lattice
        share = inside @ inverse
        margin = r * _SLACK * np.linalg.norm(inverse, axis=0) + 1e-9
        parts = []
        for shift in product(*(range(-n, n + 1) for n in _reach(lattice, r))):
            moved = share + np.array(shift)
            near = ((moved >= -margin) & (moved <= 1 + margin)).all(1).nonzero()[0]
            parts.append((near, np.broadcast_to(np.array(shift), (len(near), len(shift)))))
        number = np.concatenate([part for part, _ in parts])
        steps = np.concatenate([shift for _, shift in parts])
        home = np.floor(targets @ inverse).astype(np.int64)
        places, centres = inside[number] + steps @ lattice, targets - home @ lattice
    if groups is not None and there is not None:  # Other graphs are out of reach.
        places = np.column_stack([places, groups[number] * (3 * r)])
        centres = np.column_stack([centres, there * (3 * r)])
    if len(centres):
        low, high = centres.min(0) - r * _SLACK, centres.max(0) + r * _SLACK
        kept = ((places >= low) & (places <= high)).all(1).nonzero()[0]
        number, steps, places = number[kept], steps[kept], places[kept]
    if not len(centres) or not len(places):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, np.zeros((0, points.shape[1]), np.int64)
    near = _tree(centres).sparse_distance_matrix(_tree(places), r * _SLACK, output_type="ndarray")
    target, found = near["i"], near["j"]
    source, shift = number[found], steps[found] - corner[number[found]] + home[target]
    apart = points[source] - targets[target]
    if lattice is not None:
        apart = apart + sum(shift[:, [k]] * lattice[k] for k in range(len(lattice)))
    kept = sum(apart[:, k] ** 2 for k in range(apart.shape[1])) <= r * r
    source, target, shift = source[kept], target[kept], shift[kept]
    order = np.lexsort([*shift.T[::-1], source, target])
    return source[order], target[order], shift[order]


def _tree(points: Array) -> Any:
    from scipy.spatial import cKDTree  # a tenth of a second

    return cKDTree(points)


def _nearest(
    points: Array,
    targets: Array,
    k: int,
    groups: Array | None,
    there: Array | None,
) -> tuple[Any, Any]:
    """Returns the ``k`` nearest points of each target, by target and distance."""
    if not len(points) or not len(targets):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if groups is not None and there is not None:  # Other graphs are farther than any point.
        low, high = (f(points.min(0), points.max(0)) for f in (np.minimum, np.maximum))
        step = 2 * float(np.linalg.norm(high - low)) + 1
        points = np.column_stack([points, groups * step])
        targets = np.column_stack([targets, there * step])
    _, found = _tree(points).query(targets, k=range(1, k + 1))
    target = np.repeat(np.arange(len(targets)), found.shape[1])
    source = found.reshape(-1)
    kept = source < len(points)
    if groups is not None and there is not None:
        kept[kept] = groups[source[kept]] == there[target[kept]]
    return source[kept].astype(np.int64), target[kept]


# PyG's own functions ##########################################################


@rule("pyg::knn", "pyg::radius")
def _pairs(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns ``[2, E]``: points of y, and those of x that are near, as pyg-lib gives them.

    ``DynamicEdgeConv``, ``knn_graph`` and ``radius_graph`` of PyG call it.
    """
    title = f"'{func}'"
    x, y, first_x, first_y = args[:4]
    if not isinstance(x, NodeTensor) or not isinstance(y, NodeTensor):
        raise DistributedIndexError(
            f"{title} got rows of one tensor of the whole graph and a plain one (rank "
            f"{current().rank}): pass tensors of load_partition(root) for both"
        )
    (points, _), (others, _) = (_points(title, n, t, None) for n, t in (("x", x), ("y", y)))
    own = y.rows.ids.cpu().numpy()
    groups, there = _of_pointers(title, first_x, points), _of_pointers(title, first_y, others)
    there = None if there is None else there[own]
    if "knn" in str(func):
        count, cosine = args[4], args[5]
        if cosine:
            points, others = _directions(points), _directions(others)
        source, target = _nearest(points, others[own], count, groups, there)
    else:
        r, most, ignores = args[4], args[5], args[7]
        source, target, _ = _near(points, others[own], r, groups, there)
        kept = (source != own[target]) | (not ignores)
        source, target = source[kept], target[kept]
        many = int(np.bincount(target, minlength=1).max())
        if not y.rows.agree(most is None or many <= most):
            raise DistributedIndexError(
                f"{title}: some node has more than max_num_neighbors={most} neighbours, of which "
                f"pyg-lib takes any (rank {current().rank}): raise it, or use "
                "pyg_sar.nn.radius_graph, which takes all"
            )
    return _edge_index(x, y, source, own[target]).flip(0)


def _of_pointers(title: str, first: Tensor | None, points: Array) -> Array | None:
    """Returns the graph of each node by where the graphs begin, ``[G + 1]``."""
    if first is None:
        return None
    sizes = whole(first, "'ptr'").diff().cpu().numpy()
    if sizes.sum() != len(points):
        raise ValueError(f"{title}: 'ptr' has {sizes.sum()} of {len(points)} nodes")
    return np.repeat(np.arange(len(sizes)), sizes)


def _directions(rows: Array) -> Array:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
