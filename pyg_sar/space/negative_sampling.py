r"""Pairs of nodes that are no edges of the whole graph: PyG's ``negative_sampling`` over workers.

[Note: the same draws] PyG numbers all pairs of nodes, draws numbers by Python's ``random``, and
keeps those that are no edge's. Here every worker draws the same numbers, from rank 0's random
state, and looks them up among the edges into its own nodes. One sum of these verdicts later all
workers know which pairs are no edges, and each keeps those whose target it owns. So the pairs are
those of one process with the same random state, whatever the partition.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import negative_sampling as sample_in_one_process
from torch_geometric.utils._negative_sampling import edge_index_to_vector, vector_to_edge_index

from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.space.distributed_index import DistEdgeIndex, dist_edge_index

_LABEL = ("", "", "negative sampling")
_METHODS = ("sparse", "dense")
_TRIES = 3  # As PyG's.


@torch.no_grad()
def negative_sampling(
    edge_index: Tensor,
    num_nodes: int | None = None,
    num_neg_samples: int | float | None = None,
    method: str = "sparse",
    force_undirected: bool = False,
) -> Tensor:
    r"""Draws pairs of nodes that are not edges of the whole graph. Collective.

    Of a graph with :math:`N` nodes and the edges :math:`E` it draws, without repetition, from

    .. math::
        \{ (i, j) : i \neq j, \; (i, j) \notin E \}.

    These are the pairs that :func:`torch_geometric.utils.negative_sampling` draws in one process
    with the same state of Python's ``random``, for any number of workers and any partition: rank
    0's state decides, and moves on alike on all workers.

    .. code-block:: python

        pairs = pyg_sar.negative_sampling(data.edge_index)
        score = (z[pairs[0]] * z[pairs[1]]).sum(-1)  # fetches rows of other workers

    Every worker draws all pairs: it holds about 110 bytes per pair while it does so (Python's
    numbers), and keeps 8 bytes per own edge, and 1 per node of the graph (4 with more than 256
    workers), with ``edge_index``. Per try, 1 byte per pair is summed over the workers.

    Args:
        edge_index: The distributed ``edge_index`` of a graph of one node type. Where there is only
            one process, a plain one ``[2, E]`` will do: PyG's function is called.
        num_nodes: May be left out. If given, the nodes of the whole graph, or of this worker.
        num_neg_samples: Pairs of all workers together; a float is a share of the edges of all
            workers. By default as many as there are edges. The same on every worker.
        method: ``'sparse'`` or ``'dense'``; these draw the same pairs, and are one here.
        force_undirected: Give each pair in both directions; pairs count once for each direction.

    Returns:
        The pairs whose target this worker owns, a distributed ``edge_index`` ``[2, K_p]`` with its
        own halo; its ``order`` says where they stand in the list of all workers. There are fewer
        than asked for where three tries didn't find enough, as in PyG.

    Raises:
        TypeError: When ``edge_index`` is a plain tensor on several workers.
        DistributedIndexError: When it is flipped, or of a relation of a ``HeteroData``.
        ValueError: On every worker, when an argument is out of range or differs between workers.
    """
    if not isinstance(edge_index, DistEdgeIndex):
        if (comm := current()).world_size > 1:
            raise TypeError(
                f"Expected 'edge_index' to be a distributed one (got {type(edge_index).__name__} "
                f"at rank {comm.rank} of {comm.world_size}): pass that of pyg_sar.load_partition()"
            )
        if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or len(edge_index) != 2:
            found = list(edge_index.shape) if isinstance(edge_index, Tensor) else edge_index
            raise TypeError(f"Expected 'edge_index' to be a tensor of shape [2, E] (got {found!r})")
        plain: Tensor = sample_in_one_process(
            edge_index, num_nodes, num_neg_samples, method, force_undirected
        )
        return plain
    plan = edge_index.plan
    if plan.n_id is None or edge_index.bipartite or edge_index.dist_row != 0:
        what = "is flipped" if edge_index.dist_row else "has no global ids: it is of a relation"
        raise DistributedIndexError(
            f"negative_sampling: 'edge_index' at rank {plan.rank} {what}. Pass data.edge_index of "
            "a graph of one node type; for others take T.RandomLinkSplit before write_partitions()"
        )
    _agree(plan, num_nodes, num_neg_samples, method, force_undirected)
    edges: _Edges = edge_index.remember_together(
        ("pairs", force_undirected), lambda: _Edges(edge_index, force_undirected)
    )
    amount: int | float = edges.num_edges if num_neg_samples is None else num_neg_samples
    count = int(amount * edges.num_edges) if isinstance(amount, float) else amount
    count = count // 2 if force_undirected else count
    numbers = torch.empty(0, dtype=torch.long)
    if edges.num_pairs < edges.population:
        numbers = _draw(edges, count, plan.comm)
    size = edges.num_nodes, edges.num_nodes
    pairs = vector_to_edge_index(numbers, size, False, force_undirected)
    return _own_pairs(pairs.to(edge_index.device), edges.owner, plan, plan.n_id)


def _agree(
    plan: HaloPlan,
    num_nodes: Any,
    num_neg_samples: Any,
    method: Any,
    force_undirected: Any,
) -> None:
    """Raises on all workers where one has wrong arguments, or others than the rest."""
    problem, amount = "", num_neg_samples
    if method not in _METHODS:
        problem = f"Expected 'method' to be one of {_METHODS} (got {method!r})"
    elif amount is not None and (isinstance(amount, bool) or not isinstance(amount, int | float)):
        problem = f"Expected 'num_neg_samples' to be a number (got {amount!r})"
    elif amount is not None and not 0 <= amount < 2**62:
        problem = f"Expected 'num_neg_samples' to be at least 0 (got {amount})"
    asked = [type(amount).__name__, amount, bool(force_undirected)]
    facts = plan.comm.all_gather_object(
        [problem, None if problem else asked, plan.num_local, repr(num_nodes)], label=_LABEL
    )
    total = sum(fact[2] for fact in facts)
    for rank, (text, mine, local, nodes) in enumerate(facts):
        if text:
            raise ValueError(f"negative_sampling: {text} at rank {rank}")
        if mine != facts[0][1]:
            raise ValueError(
                "negative_sampling: 'num_neg_samples' and 'force_undirected' must be the same on "
                f"all workers (got {mine[1:]} at rank {rank}, {facts[0][1][1:]} at rank 0): the "
                "number is that of all workers together; a float is a share of all edges"
            )
        if nodes not in ("None", repr(local), repr(total)):
            raise ValueError(
                f"negative_sampling: Expected 'num_nodes' to be {total}, the nodes of the whole "
                f"graph, or {local}, this worker's (got {nodes} at rank {rank}); leave it out"
            )


class _Edges:
    """The whole graph's edges by the numbers that PyG gives to pairs. Made by all workers together.

    Attributes:
        num_nodes, num_edges: Of the whole graph.
        num_pairs: Its edges that have a number: none of a node with itself, and with
            ``force_undirected`` those that lead to the larger id.
        population: How many numbers there are.
        owner: The rank of each node, ``[num_nodes]``.
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
        narrow = torch.uint8 if plan.world_size <= 256 else torch.int32
        self.owner = torch.zeros(self.num_nodes, dtype=narrow, device=n_id.device)
        self.owner[n_id] = plan.rank
        comm.all_reduce(self.owner, "max", label=_LABEL)

    def hold(self, numbers: Tensor) -> Tensor:
        """Returns for each number whether it is that of an edge of any worker. Collective."""
        numbers, known = numbers.to(self.owner.device), self._numbers
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


def _own_pairs(pairs: Tensor, owner: Tensor, plan: HaloPlan, n_id: Tensor) -> DistEdgeIndex:
    """Returns the pairs whose target this worker owns, in its numbering, with a halo plan.

    All workers know all pairs, so each knows who needs which of its rows: nothing is sent.

    Args:
        pairs: Global ids of sources and targets of all pairs ``[2, K]``.
        owner: The rank of each node.
        plan: The plan of the graph's edges.
        n_id: Global ids of the own nodes.
    """
    total = owner.numel()
    at_source, at_target = owner[pairs[0]].long(), owner[pairs[1]].long()
    order = n_id.argsort()
    ascending = n_id[order]

    def local(ids: Tensor) -> Tensor:
        return order[torch.searchsorted(ascending, ids)]

    def by_rank(keys: Tensor) -> list[int]:
        counts: list[int] = torch.bincount(keys // max(total, 1), minlength=len(ranks)).tolist()
        return counts

    ranks = range(plan.world_size)
    leaving = (at_source == plan.rank) & (at_target != plan.rank)
    sent = (at_target * total + pairs[0])[leaving].unique()  # by (reader, id), as its halo is
    place = (at_target == plan.rank).nonzero().view(-1)
    source, target = pairs[:, place]
    remote = at_source[place] != plan.rank
    halo, column = (at_source[place] * total + source)[remote].unique(return_inverse=True)
    row = torch.empty_like(source)
    row[~remote] = local(source[~remote])
    row[remote] = plan.num_local + column
    of_pairs = HaloPlan(
        plan.comm, plan.num_local, by_rank(halo), local(sent % max(total, 1)), by_rank(sent), n_id
    )
    return dist_edge_index(torch.stack([row, local(target)]), of_pairs).ordered(place)
