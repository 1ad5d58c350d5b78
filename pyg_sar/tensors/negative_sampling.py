r"""``negative_sampling``: PyG's pairs that are no edges, of which each worker keeps its own.

[Note: the same draws] PyG numbers all pairs of nodes, draws numbers by Python's ``random``, and
keeps those that are no edge's. Here every worker draws the same numbers, from rank 0's random
state, and looks them up among the edges into its own nodes. One sum of these verdicts later all
workers know which pairs are no edges. So the pairs are those of one process with the same random
state, whatever the partition.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import negative_sampling as sample_in_one_process
from torch_geometric.utils._negative_sampling import edge_index_to_vector, vector_to_edge_index

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.space.distributed_index import DistEdgeIndex
from pyg_sar.tensors.distributing import distributed_edges
from pyg_sar.tensors.node_tensor import NodeTensor

_METHODS = ("sparse", "dense")
_LABEL = ("", "", "negative sampling")
_TRIES = 3  # As PyG's.


@torch.no_grad()
def negative_sampling(
    edge_index: Tensor,
    num_nodes: int | None = None,
    num_neg_samples: int | float | None = None,
    method: str = "sparse",
    force_undirected: bool = False,
) -> Tensor:
    r"""Draws pairs of nodes that are not edges of the graph, with each worker's own edges.

    Of a graph with :math:`N` nodes and the edges :math:`E` it draws, without repetition, from

    .. math::
        \{ (i, j) : i \neq j, \; (i, j) \notin E \}.

    These are the pairs of :func:`torch_geometric.utils.negative_sampling`, which gathers all edges
    on every worker instead, with the same state of Python's ``random``, for any number of workers
    and any partition: rank 0's state decides, and moves on alike on all workers. Collective.

    .. code-block:: python

        pairs = pyg_sar.nn.negative_sampling(data.edge_index)
        score = (z[pairs[0]] * z[pairs[1]]).sum(-1)

    Every worker draws all pairs: it holds about 110 bytes per pair while it does so (Python's
    numbers), and keeps 8 bytes per own edge with ``edge_index``, and a table of all nodes, 16 bytes
    each, that serves all edges which are computed. Per try, 1 byte per pair is summed over the
    workers.

    Args:
        edge_index: ``data.edge_index`` of :func:`pyg_sar.load_partition`, of one node type, or
            edges that are selected from it by a mask. Of a plain one ``[2, E]`` PyG's function
            draws.
        num_nodes: The nodes of the graph; may be left out.
        num_neg_samples: How many pairs; a float is a share of the edges. By default as many as
            there are edges.
        method: ``'sparse'`` or ``'dense'``; these draw the same pairs, and are one here.
        force_undirected: Give each pair in both directions; pairs count once for each direction.

    Returns:
        The pairs ``[2, K]``, a tensor of the whole graph like ``edge_index``, each at the worker
        that owns its target. There are fewer than asked for where three tries didn't find enough,
        as in PyG.

    Raises:
        TypeError: When ``edge_index`` is no tensor of edges.
        DistributedIndexError: When it is flipped, written, or of a relation of a ``HeteroData``.
        ValueError: On every worker, when an argument is out of range or differs between workers.
    """
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or len(edge_index) != 2:
        found = list(edge_index.shape) if isinstance(edge_index, Tensor) else edge_index
        raise TypeError(f"Expected 'edge_index' to be a tensor of shape [2, E] (got {found!r})")
    if not isinstance(edge_index, NodeTensor):
        return sample_in_one_process(
            edge_index, num_nodes, num_neg_samples, method, force_undirected
        )
    edges, comm = edge_index.edges, edge_index.rows.comm
    if edges is None or edges.index.bipartite or edges.index.dist_row != 0:
        raise DistributedIndexError(
            f"negative_sampling: 'edge_index' at rank {comm.rank} is flipped, computed, or of a "
            "relation. Pass data.edge_index of a graph of one node type; of others "
            "torch_geometric.utils.negative_sampling draws, which gathers all edges"
        )
    nodes = edges.targets
    _agree(comm, nodes.total, num_nodes, num_neg_samples, method, force_undirected)
    pairs = sampled_pairs(edges.index, num_neg_samples, force_undirected)
    return distributed_edges(pairs, nodes, nodes)


def _agree(
    comm: Communicator, total: int, num_nodes: Any, amount: Any, method: Any, force_undirected: Any
) -> None:
    """Raises on all workers where one has wrong arguments, or others than the rest."""
    problem = ""
    if method not in _METHODS:
        problem = f"Expected 'method' to be one of {_METHODS} (got {method!r})"
    elif amount is not None and (isinstance(amount, bool) or not isinstance(amount, int | float)):
        problem = f"Expected 'num_neg_samples' to be a number (got {amount!r})"
    elif amount is not None and not 0 <= amount < 2**62:
        problem = f"Expected 'num_neg_samples' to be at least 0 (got {amount})"
    elif num_nodes not in (None, total):
        problem = f"Expected 'num_nodes' to be {total}, the nodes of the graph (got {num_nodes})"
    asked = None if problem else [type(amount).__name__, amount, bool(force_undirected)]
    facts = comm.all_gather_object([problem, asked], label=("", "", "negative sampling"))
    for rank, (text, mine) in enumerate(facts):
        if text:
            raise ValueError(f"negative_sampling: {text} at rank {rank}")
        if mine != facts[0][1]:
            raise ValueError(
                "negative_sampling: 'num_neg_samples' and 'force_undirected' must be the same on "
                f"all workers (got {mine[1:]} at rank {rank}, {facts[0][1][1:]} at rank 0)"
            )


# The same draws on all workers ################################################


@torch.no_grad()
def sampled_pairs(
    edge_index: DistEdgeIndex, num_neg_samples: int | float | None, force_undirected: bool
) -> Tensor:
    """Draws pairs of nodes that are not edges of the whole graph, by global ids. Collective.

    See :func:`pyg_sar.nn.negative_sampling`. The graph is of one node type, and not flipped.

    Returns:
        All pairs, ``[2, K]``, on every worker.
    """
    edges: _Edges = edge_index.remember_together(
        ("pairs", force_undirected), lambda: _Edges(edge_index, force_undirected)
    )
    amount: int | float = edges.num_edges if num_neg_samples is None else num_neg_samples
    count = int(amount * edges.num_edges) if isinstance(amount, float) else amount
    count = count // 2 if force_undirected else count
    numbers = torch.empty(0, dtype=torch.long)
    if edges.num_pairs < edges.population:
        numbers = _draw(edges, count, edge_index.plan.comm)
    size = edges.num_nodes, edges.num_nodes
    return vector_to_edge_index(numbers, size, False, force_undirected).to(edge_index.device)


class _Edges:
    """The whole graph's edges by the numbers that PyG gives to pairs. Made by all workers together.

    Attributes:
        num_nodes, num_edges: Of the whole graph.
        num_pairs: Its edges that have a number: none of a node with itself, and with
            ``force_undirected`` those that lead to the larger id.
        population: How many numbers there are.
    """

    def __init__(self, edge_index: DistEdgeIndex, force_undirected: bool) -> None:
        plan = edge_index.plan
        comm, n_id = plan.comm, plan.n_id
        if n_id is None:
            raise DistributedIndexError("Pairs are drawn for edges between nodes of one type only")
        source, target = edge_index.ends()
        ids = torch.stack([halo_gather(n_id, plan)[source], n_id[target]])
        counts = torch.tensor([n_id.numel(), source.numel()], device=n_id.device)
        comm.all_reduce(counts, label=_LABEL)
        self.num_nodes, self.num_edges = counts.tolist()
        size = self.num_nodes, self.num_nodes
        found, self.population = edge_index_to_vector(ids, size, False, force_undirected)
        total = torch.tensor(found.numel(), device=n_id.device)
        self.num_pairs = int(comm.all_reduce(total, label=_LABEL))
        self._numbers = found.unique()
        self._comm = comm

    def hold(self, numbers: Tensor) -> Tensor:
        """Returns for each number whether it is that of an edge of any worker. Collective."""
        numbers, known = numbers.to(self._numbers.device), self._numbers
        here = torch.zeros_like(numbers, dtype=torch.bool)
        if known.numel():
            place = torch.searchsorted(known, numbers).clamp_(max=known.numel() - 1)
            here = known[place] == numbers
        return self._comm.all_reduce(here.to(torch.uint8), "max", label=_LABEL).bool().cpu()


def _draw(edges: _Edges, count: int, comm: Communicator) -> Tensor:
    """Returns ``count`` numbers that are no edge's. See [Note: the same draws]."""
    generator = _shared_generator(comm)
    free = 1.0 - edges.num_pairs / edges.population
    at_once = int(1.1 * count / free)
    kept = torch.empty(0, dtype=torch.long)
    for _ in range(_TRIES):
        if edges.population <= at_once:
            drawn = torch.arange(edges.population)
        else:
            sample = generator.sample(range(edges.population), at_once)
            drawn = torch.tensor(sample, dtype=torch.long)
            del sample
        fresh = ~edges.hold(drawn)
        if kept.numel():
            fresh &= ~torch.isin(drawn, kept)
        kept = torch.cat([kept, drawn[fresh]])
        if kept.numel() >= count:
            break
    random.setstate(generator.getstate())
    return kept[:count]


def _shared_generator(comm: Communicator) -> random.Random:
    """Returns a generator with the state that Python's ``random`` has at rank 0. Collective."""
    version, words, gauss = random.getstate()
    shared = comm.broadcast(torch.tensor(words, device=comm.device), label=_LABEL)
    generator = random.Random()
    generator.setstate((version, tuple(shared.tolist()), gauss))
    return generator
