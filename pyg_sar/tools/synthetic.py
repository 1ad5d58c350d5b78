r"""A synthetic graph with power-law degrees and planted classes, of any size, the same for a seed.

The degree-corrected planted partition model, drawn edge by edge (all at once):

1. Node :math:`i` has class :math:`y_i` and weight :math:`w_i = u_i^{-1 / (\gamma - 1)}` with
   :math:`u_i` uniform in (0, 1), so that :math:`P(w > t) = t^{1 - \gamma}`: degrees follow a power
   law with exponent :math:`\gamma`. Weights are cut so that no node expects to be joined to more
   than a quarter of all.
2. An edge takes its first end with probability proportional to the weight, and its second end in
   the same way, among the first's class for a fraction h of the edges, else among the others.
3. Self loops and duplicates are thrown away and drawn again until the numbers are reached.
4. Features are the class's centroid times ``signal`` plus standard normal noise.

Source: Karrer and Newman, "Stochastic blockmodels and community structure in networks", Phys. Rev.
E 2011; Chung and Lu, "Connected components in random graphs with given expected degree sequences",
2002.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

Array = np.ndarray[Any, Any]
MAX_ROUNDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticGraph:
    """What to draw.

    Attributes:
        nodes: The number of nodes.
        degree: Mean number of edges per node (columns of ``edge_index`` over nodes).
        edges: Columns of ``edge_index``, instead of ``degree``. Undirected: an even number.
        features: The number of features; 0: no ``x``.
        classes: The number of classes, of equal size up to one node.
        homophily: The fraction h of edges that join nodes of one class.
        exponent: The exponent of the degrees' power law, above 1. Real graphs: 2 to 3.
        signal: Length of the class centroids' coordinates against noise of 1.
        directed: One direction per edge, drawn; otherwise both.

    Raises:
        ValueError: When a number is out of range.
    """

    nodes: int = 10_000
    degree: float = 20.0
    edges: int | None = None
    features: int = 64
    classes: int = 8
    homophily: float = 0.7
    exponent: float = 2.5
    signal: float = 0.2
    directed: bool = False

    def __post_init__(self) -> None:
        _check(self.nodes >= 1, "nodes", self.nodes, "at least 1")
        _check(self.degree >= 0, "degree", self.degree, "at least 0")
        _check(self.features >= 0, "features", self.features, "at least 0")
        _check(1 <= self.classes <= self.nodes, "classes", self.classes, "1 to 'nodes'")
        _check(0 <= self.homophily <= 1, "homophily", self.homophily, "0 to 1")
        _check(self.exponent > 1, "exponent", self.exponent, "above 1")
        if self.edges is not None:
            fits = self.edges >= 0 and (self.directed or self.edges % 2 == 0)
            _check(fits, "edges", self.edges, "at least 0, and even unless 'directed'")
        largest = self.nodes * (self.nodes - 1) // (1 if self.directed else 2)
        if self.num_pairs > largest // 2:
            raise ValueError(
                f"{self.num_pairs} edges are more than half of the {largest} that {self.nodes} "
                "nodes can have; ask for fewer 'edges' or a smaller 'degree'"
            )

    @property
    def num_pairs(self) -> int:
        """Distinct edges to draw; an undirected one counts once."""
        columns = self.edges if self.edges is not None else round(self.nodes * self.degree)
        return columns if self.directed else columns // 2


def _check(fits: bool, name: str, value: Any, expected: str) -> None:
    if not fits:
        raise ValueError(f"Expected '{name}' of the synthetic graph to be {expected} (got {value})")


def synthetic_graph(graph: SyntheticGraph, seed: int = 0) -> Data:
    """Draws the graph: ``edge_index``, ``y`` and ``x``, without masks.

    Args:
        graph: What to draw.
        seed: The same seed gives the same graph.

    Raises:
        ValueError: When so many edges can't be drawn.
    """
    rng = np.random.default_rng(seed)
    y = rng.permutation(graph.nodes) % graph.classes
    edge_index = torch.from_numpy(_edges(graph, y, rng))
    data = Data(edge_index=edge_index, y=torch.from_numpy(y), num_nodes=graph.nodes)
    if graph.features:
        centroids = rng.standard_normal((graph.classes, graph.features), dtype=np.float32)
        x = rng.standard_normal((graph.nodes, graph.features), dtype=np.float32)
        x += np.float32(graph.signal) * centroids[y]
        data.x = torch.from_numpy(x)
    return data


def _weights(graph: SyntheticGraph, rng: np.random.Generator) -> Array:
    """Power-law weights; none above N/4 over the mean degree times the mean weight."""
    weights = (1.0 - rng.random(graph.nodes)) ** (-1.0 / (graph.exponent - 1.0))
    mean_degree = max(2 * graph.num_pairs / graph.nodes, 1.0)
    return np.minimum(weights, weights.mean() * max(graph.nodes / 4 / mean_degree, 1.0))


def _edges(graph: SyntheticGraph, y: Array, rng: np.random.Generator) -> Array:
    """Distinct edges without loops, shape ``[2, columns]``, sorted."""
    draw = _EndDrawer(graph, y, rng)
    same = round(graph.num_pairs * (graph.homophily if graph.classes > 1 else 1.0))
    keys = np.concatenate(
        [_distinct(graph, draw, same, True), _distinct(graph, draw, graph.num_pairs - same, False)]
    )
    a, b = keys // graph.nodes, keys % graph.nodes
    if not graph.directed:
        keys = np.concatenate([keys, b * graph.nodes + a])
    keys.sort()
    return np.stack([keys // graph.nodes, keys % graph.nodes])


def _distinct(graph: SyntheticGraph, draw: _EndDrawer, number: int, same: bool) -> Array:
    """``number`` distinct edges ``source * N + target`` within classes, or between them."""
    keys = np.empty(0, dtype=np.int64)
    for attempt in range(MAX_ROUNDS):
        missing = number - keys.size
        if missing == 0:
            return keys
        surplus = 1.125 if attempt == 0 else 2.0 ** min(attempt, 6)
        a, b = draw.pairs(min(int(missing * surplus), 2 * number) + 16, same)
        if not graph.directed:
            a, b = np.minimum(a, b), np.maximum(a, b)
        fits = (a != b) & ((draw.y[a] == draw.y[b]) == same)  # Sums are rounded at the borders.
        new = np.sort((a * graph.nodes + b)[fits])
        new = new[np.diff(new, prepend=-1) > 0]
        if keys.size:
            position = np.minimum(np.searchsorted(keys, new), keys.size - 1)
            new = new[keys[position] != new]
        if new.size > missing:  # A random choice: the first ones would favour low ids.
            new = new[draw.rng.permutation(new.size)[:missing]]
        keys = np.sort(np.concatenate([keys, new]))
    raise ValueError(
        f"Could not draw {number} distinct edges {'within' if same else 'between'} "
        f"{graph.classes} classes of {graph.nodes} nodes (exponent {graph.exponent}); ask for "
        "fewer edges, a larger 'exponent' or a 'homophily' nearer 1 / classes"
    )


class _EndDrawer:
    """Draws the two ends of edges by inverse transform sampling of the cumulated weights."""

    def __init__(self, graph: SyntheticGraph, y: Array, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes = np.argsort(y, kind="stable")  # By class: a class is an interval.
        self.y = y
        weights = _weights(graph, rng)[self.nodes]
        self.sums = np.concatenate([[0.0], np.cumsum(weights)])
        starts = np.searchsorted(y[self.nodes], np.arange(graph.classes + 1))
        self.low, self.high = self.sums[starts[:-1]], self.sums[starts[1:]]

    def _at(self, position: Array) -> Array:
        index = np.searchsorted(self.sums, position, side="right") - 1
        return self.nodes[np.clip(index, 0, self.nodes.size - 1)]

    def pairs(self, number: int, same: bool) -> tuple[Array, Array]:
        """``number`` pairs of nodes of one class, or of two; not all are distinct."""
        total = self.sums[-1]
        # Multinomial counts are as many independent draws, in order, which keeps searches local.
        first = np.repeat(self.nodes, self.rng.multinomial(number, np.diff(self.sums) / total))
        low, high = self.low[self.y[first]], self.high[self.y[first]]
        if same:
            return first, self._at(low + self.rng.random(number) * (high - low))
        position = self.rng.random(number) * (total - (high - low))
        return first, self._at(position + np.where(position >= low, high - low, 0.0))
