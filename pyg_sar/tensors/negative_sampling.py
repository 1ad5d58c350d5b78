"""``negative_sampling``: PyG's pairs that are no edges, of which each worker keeps its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import negative_sampling as sample_in_one_process

from pyg_sar.comm.group import Communicator
from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.negative_sampling import sampled_pairs
from pyg_sar.tensors.distributing import distributed_edges
from pyg_sar.tensors.node_tensor import NodeTensor

_METHODS = ("sparse", "dense")


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
