r"""Parts with nearly the same number of nodes and of edges each, and few halo rows.

METIS balances several weights of a node at once (Karypis and Kumar, "Multilevel Algorithms for
Multi-Constraint Graph Partitioning", SC 1998); here a node weighs :math:`(1, d_i)` with its
in-degree :math:`d_i`. METIS minimises cut edges; then nodes move, one after another, where that
saves halo rows (:func:`save_halo_rows_`) and no part gets too large.

METIS halves the graph, then the halves. Its k-way method for the fewest rows sent takes many times
as long, the more so where nodes have many neighbours.

[Note: two constraints] ``pymetis.part_graph`` takes one weight per node. The library that it loads
exports METIS's own functions, which take several, so they are called with :mod:`ctypes`. Limits go
in through the option ``ufactor``, an integer: nothing here depends on METIS's width of floats.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_sar.kernels.ops import run, sort_edges, use_kernel
from pyg_sar.wording import counted

_Ints = NDArray[np.int64]

LIMIT = 1.1
"""The most nodes, and the most edges, of a part over the mean."""
_AIM = 1.06  # METIS's own limit: what is left of LIMIT is room to improve
_TIGHT = 1.09  # for parts over LIMIT: single moves get no nearer than a percent to what they aim at
_PASSES = 8  # over the nodes, at most, and none after one that saves little
_LITTLE = 0.02  # of all that the passes have saved
METIS_EDGE, METIS_NODE = 150, 200
"""Bytes of memory that METIS and what feeds it take for each edge and node."""
_JUDGED = 1000  # nodes and edges per part: in smaller graphs a single node is a large share


def balanced_assignment(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    seed: int,
    report: Callable[[str], None],
    marked: Tensor | None = None,
) -> Tensor:
    """Assigns nodes so that nodes and in-edges per part are within :data:`LIMIT` of their means.

    ``edge_index`` has edges, and the graph more nodes than parts. Nodes that are ``marked``, bool
    ``[N]``, are balanced by themselves, too. Returns the part of each node, int64, ``[N]``. A limit
    that can't be kept, as a node has more edges than it, is exceeded as little as these steps
    allow, with a warning.
    """
    report("METIS")
    indegree = torch.bincount(edge_index[1], minlength=num_nodes)
    kinds = [torch.ones_like(indegree), indegree]
    if marked is not None and bool(marked.any()):
        kinds.append(marked.long())
    weights = torch.stack(kinds, dim=1)
    starts, adjacent = (values.numpy() for values in undirected_csr(edge_index, num_nodes))
    graph = Coarse(starts, adjacent, weights.numpy())
    part = metis_assignment(graph, num_parts, seed)
    del graph, starts, adjacent
    report("improving METIS's parts")
    dtype = torch.int32 if num_nodes < 2**31 else torch.int64
    source, target, part = edge_index[0].to(dtype), edge_index[1].to(dtype), part.to(dtype)
    by_source, first_out = sort_edges(source, num_nodes)
    by_target, first_in = sort_edges(target, num_nodes, by_source)
    target, source = target.index_select(0, by_source), source.index_select(0, by_target)
    del by_source, by_target
    edges = first_out.long(), target, first_in.long(), source
    loads = torch.zeros(num_parts, len(kinds), dtype=torch.long).index_add_(0, part, weights)
    totals = weights.sum(0).tolist()
    largest = weights.max(0).values.tolist()
    most, tight = (limits(totals, largest, num_parts, limit) for limit in (LIMIT, _TIGHT))
    saved = 0
    for _ in range(_PASSES):
        over = bool((loads > most).any())
        now = save_halo_rows_(part, loads, weights, tight if over else most, *edges)
        saved += now
        if now <= _LITTLE * saved and not over:
            break
    _warn_if_uneven(loads, totals, int(indegree.max()))
    return part.long()


def limits(
    totals: Sequence[int], largest: Sequence[int], num_parts: int, limit: float = LIMIT
) -> Tensor:
    """Returns the most that a part may have of each kind of what is balanced, int64, ``[C]``.

    That is ``limit`` times the mean of ``totals``. A part may also have as much as one node
    (``largest``), and the average, rounded up to a whole number.
    """
    found = []
    for total, of_one in zip(totals, largest, strict=True):
        mean = max(total, 1) / num_parts
        found.append(max(of_one, math.ceil(mean), math.floor(limit * mean)))
    return torch.tensor(found)


def undirected_csr(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns the undirected adjacency without duplicates and loops: CSR ``(starts, adjacent)``.

    Both are int64, of shapes ``[num_nodes + 1]`` and ``[2 * number of undirected edges]``.
    """
    low, high = unique_edges(
        torch.stack([torch.minimum(*edge_index), torch.maximum(*edge_index)]), num_nodes
    )
    row, column = torch.cat([low, high]), torch.cat([high, low])
    del low, high
    order, starts = sort_edges(row, num_nodes)
    return starts.long(), column.index_select(0, order)


def unique_edges(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns sources and targets of the edges without duplicates and loops, sorted by source."""
    source, target = edge_index[:, edge_index[0] != edge_index[1]]
    order = sort_edges(source, num_nodes, sort_edges(target, num_nodes)[0])[0]
    source, target = source.index_select(0, order), target.index_select(0, order)
    first = torch.ones_like(source, dtype=torch.bool)
    first[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[first], target[first]


# METIS ###################################################################################


def metis(
    graph: tuple[Tensor, Tensor],
    num_parts: int,
    seed: int,
    nodes: _Ints | None = None,
    weight: _Ints | None = None,
) -> Tensor:
    """Assigns nodes to parts of nearly equal node counts with few cut edges.

    ``graph`` is an adjacency (:func:`undirected_csr`); what each node counts, and each entry of the
    adjacency, is 1 by default.
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
    """A graph for METIS: the undirected adjacency (:func:`undirected_csr`), weights of each node,
    int64 ``[N, C]``, of which the first one counts nodes, and the weight of each entry, by
    default 1.
    """

    starts: _Ints
    adjacent: _Ints
    size: _Ints
    weight: _Ints | None = None

    @classmethod
    def of(cls, low: Tensor, high: Tensor, weight: Tensor, size: Tensor) -> Coarse:
        """Returns a graph with these undirected edges, each given once."""
        order, starts = sort_edges(torch.cat([low, high]), len(size))
        other = torch.cat([high, low]).index_select(0, order)
        given = starts.long(), other, size, weight.repeat(2).index_select(0, order)
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

    An ``OSError`` or ``AttributeError`` says that pymetis's library can't be called so.
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
                f"METIS ended with code {code} on {counted(len(graph.size), 'nodes')} and "
                f"{counted(num_parts, 'parts')} (-3: not enough memory; -4: an error or a signal); "
                "free memory or partition with method='random'"
            )
        return part.astype(np.int64)


def _pointer(values: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


# Halo rows ################################################################################


class Loads:
    """Counts what groups hold of what is balanced, int64 ``[groups, C]``, beside the most that they
    may, ``[C]``; :meth:`add` changes it.
    """

    def __init__(self, held: Tensor, most: Tensor) -> None:
        self._held = memoryview(held.view(-1).numpy())  # type: ignore[arg-type]
        self._most: list[int] = most.tolist()

    def of(self, group: int) -> memoryview:
        """Returns what a group holds of each kind."""
        kinds = len(self._most)
        return self._held[group * kinds : (group + 1) * kinds]

    def fits(self, group: int, weight: list[int]) -> bool:
        """Says if a group has room for a node that counts so much."""
        held = self.of(group)
        return all(h + w <= m for h, w, m in zip(held, weight, self._most, strict=True))

    def is_alone(self, group: int, weight: list[int]) -> bool:
        """Says if a group holds a node that counts so much, and nothing else."""
        return self.of(group).tolist() == weight

    def excess(self, group: int, weight: list[int]) -> float:
        """Returns how much further over its limits, as shares of them, a node takes a group."""
        kinds = zip(self.of(group), weight, self._most, strict=True)
        return sum((max(h + w - m, 0) - max(h - m, 0)) / m for h, w, m in kinds)

    def add(self, group: int, weight: list[int], times: int) -> None:
        """Adds a node, or takes it away: ``times`` 1 or -1."""
        held = self.of(group)
        for kind, one in enumerate(weight):
            held[kind] += times * one


def save_halo_rows_(
    part: Tensor,
    loads: Tensor,
    weights: Tensor,
    most: Tensor,
    first_out: Tensor,
    target: Tensor,
    first_in: Tensor,
    source: Tensor,
    *,
    native: bool | None = None,
) -> int:
    r"""Lets each node, in order, move to the part with room where that saves most halo rows.

    Halo rows are pairs of a node and another part in which it has a target,

    .. math::
        \sum_v |\{\pi(t) : (v, t) \in E\} \setminus \{\pi(v)\}|.

    A node whose part is over a limit moves also where that costs halo rows and, where no part has
    room, to the part that it takes least over its limits.

    Args:
        part: The part of each node, int32 or int64, ``[N]``; changed.
        loads: What parts count of each kind, int64, ``[P, C]``; changed.
        weights, most: What nodes count, ``[N, C]``, and what a part may, ``[C]``, int64.
        first_out: Where the targets of each node start, and at last E, int64, ``[N + 1]``.
        target: The targets, of the dtype of ``part``, ``[E]``.
        first_in, source: The same of the sources; those of a node ascend.
        native: Whether to use the kernel; ``None``: where it is there.

    Returns:
        The halo rows that are saved.
    """
    given = part, loads, weights, most, first_out, target, first_in, source
    if use_kernel(native, True):
        return int(run(torch.ops.pyg_sar.save_halo_rows_, *given))
    where, held, parts = part.tolist(), Loads(loads, most), range(len(loads))
    out, into = (
        [t.tolist() for t in x.split(f.diff().tolist())] for f, x in (given[4:6], given[6:])
    )
    readers = [Counter(where[t] for t in targets if t != v) for v, targets in enumerate(out)]
    total = 0
    for v, (sources, weight) in enumerate(zip(into, weights.tolist(), strict=True)):
        own, edges = where[v], Counter(u for u in sources if u != v)
        held.add(own, weight, -1)
        left = sum(where[u] != own and readers[u][own] == n for u, n in edges.items())
        left -= len(edges) + (own in readers[v])
        there = Counter(readers[v].keys())
        for u in edges:
            there.update(readers[u].keys() | {where[u]})
        best, saved = (own, 0) if held.fits(own, weight) else (-1, 0)
        for p in parts:
            found = left + there[p]
            if p != own and (best < 0 or found > saved) and held.fits(p, weight):
                best, saved = p, found
        if best < 0:  # No part has room: the limit can't be kept.
            best = min((own, *parts), key=lambda p: held.excess(p, weight))
            saved = 0 if best == own else left + there[best]
        held.add(best, weight, 1)
        if best == own:
            continue
        for u, n in edges.items():
            readers[u] += Counter({best: n})
            readers[u] -= Counter({own: n})
        where[v] = best
        total += saved
    part.copy_(torch.tensor(where))
    return total


def _warn_if_uneven(loads: Tensor, totals: Sequence[int], most_edges: int) -> None:
    num_parts, most = len(loads), loads.max(0).values.tolist()
    means = [total / num_parts for total in totals]
    even = all(m <= max(LIMIT * mean, math.ceil(mean)) for m, mean in zip(most, means, strict=True))
    if even or sum(means) < _JUDGED:
        return
    nodes, edges, *others = (m / max(mean, 1e-9) for m, mean in zip(most, means, strict=True))
    more = "".join(f", and {other:.2f} times the mean of training nodes" for other in others)
    warnings.warn(
        f"{counted(num_parts, 'parts')} can't all be within {LIMIT} of the mean: the largest have "
        f"{counted(most[0], 'nodes')} ({nodes:.2f} times the mean) and {counted(most[1], 'edges')} "
        f"({edges:.2f} times the mean){more}, and one node alone has {most_edges:,} in-edges of "
        f"{totals[1]:,}; the worker of the largest part sets the pace: fewer parts waste less",
        stacklevel=2,
    )
