r"""Parts with nearly the same number of nodes and of edges each, and few halo rows.

METIS balances several weights of a node at once (Karypis and Kumar, "Multilevel Algorithms for
Multi-Constraint Graph Partitioning", SC 1998); here a node weighs :math:`(1, d_i)` with its
in-degree :math:`d_i`. What METIS finds is then improved: nodes move to the part that most of their
neighbours are in, where that saves halo rows and no part gets too large.

METIS halves the graph, then the halves. Its k-way method for the fewest rows sent takes many times
as long, the more so where nodes have many neighbours; with another seed halving is as good.

[Note: two constraints] ``pymetis.part_graph`` takes one weight per node. The library that it loads
exports METIS's own functions, which take several, so they are called with :mod:`ctypes`. Limits go
in through the option ``ufactor``, an integer: nothing here depends on METIS's width of floats.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Ints = NDArray[np.int64]

LIMIT = 1.1
"""The most nodes, and the most edges, of a part over the mean."""
_AIM = 1.06  # METIS's own limit: what is left of LIMIT is room to improve
_ROUNDS = 16  # of improvement
_MOST_ROUNDS = 200  # with those that take load off parts over the limit
_BLOCK = 2**22  # entries of [nodes, parts] at a time
_TWICE = 2**22  # edges up to which METIS runs with two seeds: one of them may be unlucky
METIS_EDGE, METIS_NODE = 150, 200
"""Bytes of memory that METIS and what feeds it take for each edge and node."""
_JUDGED = 1000  # nodes and edges per part: in smaller graphs a single node is a large share


def balanced_assignment(
    edge_index: Tensor,
    num_nodes: int,
    random: Tensor,
    num_parts: int,
    seed: int,
    report: Callable[[str], None],
    marked: Tensor | None = None,
) -> Tensor:
    """Assigns nodes so that nodes and in-edges per part are within :data:`LIMIT` of their means.

    Args:
        edge_index: Edges (source, target), shape ``[2, E]``, E > 0.
        num_nodes: Nodes N, more than ``num_parts``.
        random: A random assignment with even node counts, int64, ``[N]``. Where METIS's have more
            halo rows, this one is balanced and improved instead.
        num_parts: Parts P.
        seed: METIS's seed.
        report: Called with a line of text before each stage.
        marked: Nodes that are balanced by themselves, too, bool, ``[N]``.

    Returns:
        The part of each node, int64, ``[N]``. A limit that can't be kept, as a node has more edges
        than it, is exceeded as little as these steps allow, with a warning.
    """
    graph = _Graph(edge_index, num_nodes, num_parts, marked)
    coarse = Coarse(graph.starts, graph.adjacent, graph.size)
    found = (math.inf, 0, random.numpy())
    twice = edge_index.size(1) <= _TWICE  # To METIS seeds 0 and 1 are the same.
    for other in (seed, (seed + 2) % 2**31)[: 1 + twice]:
        report("METIS")
        part = metis_assignment(coarse, num_parts, other).numpy()
        report("improving METIS's parts")
        found = min(found, _improve(graph, part), key=lambda one: one[:2])
    start = random.numpy()
    drawn = graph.halo_rows(start, graph.readers(start))
    if found[:2] > (0.0, drawn):
        report("improving a random assignment")
        found = min(found, _improve(graph, start), key=lambda one: one[:2])
    best = found[2]
    _warn_if_uneven(graph, best)
    return torch.from_numpy(best)


def undirected_csr(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns the undirected adjacency without duplicates and loops: CSR ``(starts, adjacent)``.

    Both are int64, of shapes ``[num_nodes + 1]`` and ``[2 * number of undirected edges]``.
    """
    low, high = unique_edges(
        torch.stack([torch.minimum(*edge_index), torch.maximum(*edge_index)]), num_nodes
    )
    row, column = torch.cat([low, high]), torch.cat([high, low])
    del low, high
    degree = torch.bincount(row, minlength=num_nodes)
    order = row.sort(stable=True).indices
    return torch.cat([degree.new_zeros(1), degree.cumsum(0)]), column[order]


def unique_edges(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns sources and targets of the edges without duplicates and loops, sorted by source."""
    source, target = edge_index
    key = (source * num_nodes + target)[source != target].sort().values
    if key.numel() > 0:
        first = torch.ones_like(key, dtype=torch.bool)
        torch.ne(key[1:], key[:-1], out=first[1:])
        key = key[first]
    source = torch.div(key, max(num_nodes, 1), rounding_mode="floor")
    return source, key - source * num_nodes


# METIS ###################################################################################


def metis(
    graph: tuple[Tensor, Tensor],
    num_parts: int,
    seed: int,
    nodes: _Ints | None = None,
    weight: _Ints | None = None,
) -> Tensor:
    """Assigns nodes to parts of nearly equal node counts with few cut edges.

    Args:
        graph: Adjacency as of :func:`undirected_csr`.
        num_parts: The number of parts.
        seed: METIS's seed.
        nodes: What each node counts; ``None``: 1.
        weight: Of each entry of the adjacency; ``None``: 1.
    """
    import pymetis

    _, part = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(graph[0].numpy(), graph[1].numpy()),
        vweights=None if nodes is None else np.ascontiguousarray(nodes),
        eweights=weight,
        options=pymetis.Options(seed=seed, contig=0),
    )
    return torch.from_numpy(np.array(part, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Coarse:
    """A graph for METIS.

    Attributes:
        starts, adjacent: The undirected adjacency (:func:`undirected_csr`).
        size: Weights of each node, int64, ``[N, C]``; the first one counts nodes.
        weight: Of each entry of ``adjacent``; ``None``: 1.
    """

    starts: _Ints
    adjacent: _Ints
    size: _Ints
    weight: _Ints | None = None

    @classmethod
    def of(cls, low: Tensor, high: Tensor, weight: Tensor, size: Tensor) -> Coarse:
        """Returns a graph with these undirected edges, each given once."""
        row, column = torch.cat([low, high]), torch.cat([high, low])
        order = row.sort(stable=True).indices
        degree = torch.bincount(row, minlength=len(size))
        starts = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        given = starts, column[order], size, weight.repeat(2)[order]
        return cls(*(values.numpy() for values in given))


def metis_assignment(graph: Coarse, num_parts: int, seed: int) -> Tensor:
    """Returns METIS's assignment, of two weights per node where it can be called so."""
    try:
        call = _MetisCall()
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"METIS in this build of pymetis can't be called with two weights per node ({error}); "
            "parts start with equal node counts, and more edges are cut; "
            "install pymetis from its wheels on PyPI",
            stacklevel=2,
        )
        csr = torch.from_numpy(graph.starts), torch.from_numpy(graph.adjacent)
        return metis(csr, num_parts, seed, graph.size[:, 0], graph.weight)
    return torch.from_numpy(call(graph, num_parts, seed))


class _MetisCall:
    """Calls METIS with the weights of a graph's nodes. See [Note: two constraints].

    Raises:
        OSError: When pymetis's library can't be opened.
        AttributeError: When it hides METIS's functions.
    """

    def __init__(self) -> None:
        import pymetis
        import pymetis._internal

        library = ctypes.CDLL(pymetis._internal.__file__)
        self._by_halves = library.METIS_PartGraphRecursive
        self._defaults = library.METIS_SetDefaultOptions
        self._dtype = pymetis.zero_copy_dtype()
        self._keys = pymetis.OptionKey

    def __call__(self, graph: Coarse, num_parts: int, seed: int) -> _Ints:
        """Returns the part of each node, by halving the graph, its halves, and so on."""
        limit = _AIM ** (1 / math.ceil(math.log2(num_parts)))
        options = np.zeros(40, self._dtype)  # METIS_NOPTIONS
        self._defaults(_pointer(options))
        options[int(self._keys.SEED)] = seed
        options[int(self._keys.UFACTOR)] = max(round(1000 * (limit - 1)), 1)
        whole = [
            np.ascontiguousarray(values, self._dtype)
            for values in (graph.starts, graph.adjacent, graph.size.ravel())
        ]
        weight = None if graph.weight is None else np.ascontiguousarray(graph.weight, self._dtype)
        sizes = [np.array([n], self._dtype) for n in (*graph.size.shape, num_parts, 0)]
        part = np.zeros(len(graph.size), self._dtype)
        starts, adjacent, weights = map(_pointer, whole)
        nodes, constraints, parts, cut = map(_pointer, sizes)
        of_edges = None if weight is None else _pointer(weight)
        code = self._by_halves(
            *(nodes, constraints, starts, adjacent, weights, None, of_edges, parts, None, None),
            *(_pointer(options), cut, _pointer(part)),
        )
        if code != 1:
            raise RuntimeError(
                f"METIS ended with code {code} on {len(graph.size):,} nodes and "
                f"{num_parts} parts (-3: not enough memory; -4: an error or a signal); "
                "free memory or partition with method='random'"
            )
        return part.astype(np.int64)


def _pointer(values: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


# Improvement #############################################################################


class _Graph:
    """A graph that is to be partitioned, and counts over assignments of its nodes.

    Attributes:
        starts, adjacent: The undirected adjacency (:func:`undirected_csr`).
        source, target: The directed edges without duplicates and loops, sorted by source.
        size: 1, the in-degree, and 1 for marked nodes if there are any, int64, ``[N, 2 or 3]``.
        most: The most of these that a part may have.
        least: Their means over the parts, rounded up: some part has as many.
    """

    def __init__(
        self, edge_index: Tensor, num_nodes: int, num_parts: int, marked: Tensor | None = None
    ) -> None:
        self.num_nodes, self.num_parts = num_nodes, num_parts
        self.starts, self.adjacent = (t.numpy() for t in undirected_csr(edge_index, num_nodes))
        self.source, self.target = (t.numpy() for t in unique_edges(edge_index, num_nodes))
        self.first_edge = np.searchsorted(self.source, np.arange(num_nodes + 1))
        degree = torch.bincount(edge_index[1], minlength=num_nodes).numpy()
        sizes = [np.ones_like(degree), degree]
        if marked is not None and bool(marked.any()):
            sizes.append(marked.numpy().astype(degree.dtype))
        self.size = np.stack(sizes, axis=1)
        self.mean = self.size.sum(0) / num_parts
        # Where there are few edges per part, even their mean is no whole number of them.
        self.least = np.ceil(self.mean)
        self.most = np.maximum(LIMIT * self.mean, np.maximum(self.least, self.size.max(0)))
        self._block = max(_BLOCK // num_parts, 1)

    def load(self, part: _Ints) -> _Ints:
        """Returns what each part has of all sizes, ``[P, 2 or 3]``."""
        columns = [np.bincount(part, size, self.num_parts) for size in self.size.T]
        return np.stack(columns, 1).astype(np.int64)

    def excess(self, load: _Ints) -> float:
        """Returns the sum over parts of their excess over the limits, relative to these."""
        return float(np.maximum(load / self.most - 1, 0).sum())

    def blocks(self) -> list[tuple[int, int]]:
        """Returns ranges of nodes whose ``[nodes, parts]`` is not too large at once."""
        starts = range(0, self.num_nodes, self._block)
        return [(start, min(start + self._block, self.num_nodes)) for start in starts]

    def readers(self, part: _Ints) -> NDArray[np.uint8]:
        """Counts the targets of each node in each part: 0, 1, or 2 for more; ``[N * P]``."""
        counts = np.empty(self.num_nodes * self.num_parts, np.uint8)
        for start, stop in self.blocks():
            edges = slice(self.first_edge[start], self.first_edge[stop])
            key = (self.source[edges] - start) * self.num_parts + part[self.target[edges]]
            found = np.bincount(key, minlength=(stop - start) * self.num_parts)
            counts[start * self.num_parts : stop * self.num_parts] = np.minimum(found, 2)
        return counts

    def halo_rows(self, part: _Ints, readers: NDArray[np.uint8]) -> int:
        """Counts pairs of a node and another part that needs its row."""
        own = readers[np.arange(self.num_nodes) * self.num_parts + part]
        return int(np.count_nonzero(readers) - np.count_nonzero(own))

    def destinations(self, part: _Ints, room: NDArray[Any], turn: int) -> _Ints:
        """Returns the part with room where a node has most neighbours, or else its own."""
        to, order = part.copy(), (np.arange(self.num_parts) + turn) % self.num_parts
        for start, stop in self.blocks():
            near = self.adjacent[self.starts[start] : self.starts[stop]]
            row = np.repeat(np.arange(stop - start), np.diff(self.starts[start : stop + 1]))
            size = (stop - start) * self.num_parts
            count = np.bincount(row * self.num_parts + part[near], minlength=size)
            count = count.reshape(-1, self.num_parts)
            fits = (self.size[start:stop, None, :] <= room[None]).all(2)
            count[~fits] = -1
            count[np.arange(stop - start), part[start:stop]] = -1
            best = order[count[:, order].argmax(1)]
            open_ = count[np.arange(stop - start), best] >= 0
            to[start:stop] = np.where(open_, best, part[start:stop])
        return to

    def savings(self, part: _Ints, readers: NDArray[np.uint8], to: _Ints) -> NDArray[Any]:
        """Returns for each node the halo rows that are saved when it alone moves; ``[N]``."""
        row, columns = np.arange(self.num_nodes) * self.num_parts, self.num_parts
        own = (readers[row + to] > 0).astype(np.int64) - (readers[row + part] > 0)
        here, there, home = part[self.target], to[self.target], part[self.source]
        source = self.source * columns
        saved = ((readers[source + here] == 1) & (home != here)).astype(np.float64)
        saved -= (readers[source + there] == 0) & (home != there)
        return own + np.bincount(self.target, saved, self.num_nodes)


def _improve(graph: _Graph, part: _Ints) -> tuple[float, int, _Ints]:
    """Moves nodes until no part is too large, and then while halo rows become fewer.

    Returns:
        What is over the limits (0: nothing), the halo rows, and the part of each node.
    """
    readers, load = graph.readers(part), graph.load(part)
    rows, share, improved = graph.halo_rows(part, readers), 0.5, 0
    for turn in range(_MOST_ROUNDS):
        over = graph.excess(load) > 0
        if not over and (improved >= _ROUNDS or share < 0.02):
            break
        room = np.maximum(graph.most - load, 0)
        to = graph.destinations(part, room, turn)
        moving = to != part
        if over:
            worst, kind = np.unravel_index((load / graph.most).argmax(), load.shape)
            moving &= (part == worst) & (graph.size[:, kind] > 0)
        saved = graph.savings(part, readers, to)
        if not over:
            moving &= saved > 0
        nodes = np.flatnonzero(moving)
        if over:
            need = load[worst, kind] - graph.most[kind]
            take = _lighten(nodes, saved[nodes], graph.size[nodes, kind], need, graph.mean[kind])
        else:
            improved += 1
            order = nodes[np.argsort(-saved[nodes], kind="stable")]
            take = order[: math.ceil(share * order.size)]
        take = _fitting(graph, take, to, room)
        if take.size == 0:
            break
        moved = part.copy()
        moved[take] = to[take]
        counts = graph.readers(moved)
        fewer = graph.halo_rows(moved, counts)
        if over or fewer < rows:
            part, readers, load, rows = moved, counts, graph.load(moved), fewer
        else:
            share /= 2
    return graph.excess(load), rows, part


def _lighten(
    nodes: _Ints, saved: NDArray[Any], size: _Ints, need: float, mean: float
) -> NDArray[np.int64]:
    """Returns nodes whose moves cost few halo rows for the load that they take along."""
    worth = np.where(saved < 0, saved / size, saved * size)
    order = np.argsort(-worth, kind="stable")
    enough = max(0.3 * need, min(need, 0.01 * mean))
    return nodes[order][: int(np.searchsorted(size[order].cumsum(), enough)) + 1]


def _fitting(graph: _Graph, nodes: _Ints, to: _Ints, room: NDArray[Any]) -> _Ints:
    """Returns those of the nodes that fit into their new parts, in the order given."""
    fits = np.zeros(nodes.size, bool)
    for q in range(graph.num_parts):
        here = np.flatnonzero(to[nodes] == q)
        fits[here] = (graph.size[nodes[here]].cumsum(0) <= room[q]).all(1)
    return nodes[fits]


def _warn_if_uneven(graph: _Graph, part: _Ints) -> None:
    load = graph.load(part)
    most, least = load.max(0), np.maximum(LIMIT * graph.mean, graph.least)
    if (most <= least).all() or graph.mean.sum() < _JUDGED:
        return
    nodes, edges, *others = most / np.maximum(graph.mean, 1e-9)
    more = "".join(f", and {other:.2f} times the mean of training nodes" for other in others)
    warnings.warn(
        f"{graph.num_parts} parts can't all be within {LIMIT} of the mean: the largest have "
        f"{most[0]:,} nodes ({nodes:.2f} times the mean) and {most[1]:,} edges ({edges:.2f} times "
        f"the mean){more}, and one node alone has {graph.size[:, 1].max():,} in-edges of "
        f"{graph.size[:, 1].sum():,}; the worker of the largest part sets the pace: fewer parts "
        "waste less",
        stacklevel=2,
    )
