r"""Pairs of nodes that are no edges of the whole graph: PyG's ``negative_sampling`` over workers.

[Note: the same draws] PyG numbers all pairs of nodes, draws numbers by Python's ``random``, and
keeps those that are no edge's. Here every worker draws the same numbers, from rank 0's random
state, and looks them up among the edges into its own nodes. One sum of these verdicts later all
workers know which pairs are no edges. So the pairs are those of one process with the same random
state, whatever the partition.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch_geometric.utils._negative_sampling import edge_index_to_vector, vector_to_edge_index

from pyg_sar.comm.group import Communicator
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.space.distributed_index import DistEdgeIndex

_LABEL = ("", "", "negative sampling")
_TRIES = 3  # As PyG's.


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
        assert n_id is not None
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
