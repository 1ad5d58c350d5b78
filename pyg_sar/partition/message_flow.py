"""Message flow graphs: the nodes and edges that a few nodes' outputs depend on, layer by layer.

[Note: layers] A node's hop is the least number of edges from it to a seed. Nodes are in the order
of hops, seeds first, edges in that of their targets' hops. Of L layers, layer l = 0, 1, ... reads
nodes of at most L - l hops and sums over the in-edges of those of at most L - l - 1. Both are the
first ones of what layer l - 1 has, so that ``trim_to_layer`` cuts one from the other, as of a batch
of ``NeighborLoader``; but no neighbour is left out. Self loops of the nodes of L - l hops stay in
layer l: layers replace them by others, and a node's number of in-edges must be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.exchange.gather import halo_reduce, plans_of_subsets
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.partition.loading import PartData
from pyg_sar.partition.node_lists import is_named
from pyg_sar.space.distributed_index import DistEdgeIndex, Partial, dist_edge_index, plain
from pyg_sar.space.draws import keyed_numbers


@torch.no_grad()
def message_flow_graphs(data: Data, seeds: Tensor, num_layers: int) -> Data:
    """Makes the message flow graphs of some nodes, for training steps on few of them. Collective.

    The result is like a batch of PyG's ``NeighborLoader`` whose seeds are all seeds and whose
    neighbours are all neighbours, so outputs and gradients of the seeds are those of the whole
    graph. Its nodes are spread over the workers as in ``data``. PyG's own models
    (``torch_geometric.nn.GCN``, ...) compute in each layer what the seeds need and nothing else
    where they get ``num_sampled_nodes`` and ``num_sampled_edges``, models of your own with
    ``torch_geometric.utils.trim_to_layer``:

    .. code-block:: python

        flow = pyg_sar.message_flow_graphs(data, data.train_mask, num_layers=2)
        pyg_sar.train.check_flow(model, data, flow)
        out = model(
            flow.x,
            flow.edge_index,
            num_sampled_nodes_per_hop=flow.num_sampled_nodes,
            num_sampled_edges_per_hop=flow.num_sampled_edges,
        )[: flow.batch_size]
        loss = pyg_sar.mean(F.cross_entropy(out, flow.y[: flow.batch_size], reduction="none"))

    What takes all nodes together (batch norms, readouts, attention over all nodes) sees fewer nodes
    here than in the whole graph, and gives other numbers. So layers run on it after
    :func:`pyg_sar.train.check_flow` has compared the seeds' outputs with those of the whole graph;
    ``Trainer(..., flow=flow)`` does so before the first step.

    Args:
        data: What :func:`pyg_sar.load_partition` gave.
        seeds: This worker's nodes whose outputs are needed: bool ``[num_nodes]`` or a list of local
            ids, each once; none on some workers.
        num_layers: How often the model passes messages on, one after the other. A layer of K hops
            (``SGConv(K=3)``) counts K times, and must not be trimmed inside.

    Returns:
        A ``Data`` with the node- and edge-level attributes of ``data``, ``batch_size`` (the seeds,
        which come first), ``n_id`` and ``e_id`` (global ids), ``input_id`` (the seeds' local ids in
        ``data``), ``num_sampled_nodes`` and ``num_sampled_edges`` (of this worker, by hop).

    Raises:
        TypeError: When ``data`` is no worker's part of a graph with one type of nodes.
        ValueError: When the seeds are no nodes, or there is none on any worker.
    """
    edges = _distributed_edges(data)
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"Expected 'num_layers' to be an integer >= 1 (got {num_layers!r})")
    hop = _hops(edges, _mask(seeds, edges.plan), num_layers)
    return _flow(data, edges, hop, _turns(edges, hop), num_layers, whole=True)


@torch.no_grad()
def sample_neighbors(data: Data, seeds: Tensor, num_neighbors: Sequence[int], key: int) -> Data:
    """Samples a message flow graph, as a batch of ``NeighborLoader`` does. Collective.

    Of each node that a layer computes, some in-edges are kept, drawn without replacement. A node's
    neighbours are drawn once. Edges are drawn by their global numbers: the same ones for any number
    of workers. What a model computes on it is an estimate of what it computes on the whole graph.

    Args:
        data: What :func:`pyg_sar.load_partition` gave.
        seeds: This worker's nodes of the batch, as of :func:`pyg_sar.message_flow_graphs`.
        num_neighbors: The most in-edges of a node, by hop from the seeds; -1 keeps all.
        key: Which draw: another number for each batch and epoch.

    Returns:
        A ``Data`` as of :func:`pyg_sar.message_flow_graphs`. Degrees are those among its edges.

    Raises:
        TypeError: When ``data`` is no worker's part of a graph with one type of nodes.
        ValueError: When the seeds are no nodes, there is none on any worker, or ``num_neighbors``
            is no list of integers, -1 or at least 1.
    """
    edges, layers = _distributed_edges(data), len(num_neighbors)
    if not layers or any(isinstance(n, bool) or n == 0 or n < -1 for n in num_neighbors):
        raise ValueError(
            f"Expected 'num_neighbors' to be integers, -1 or at least 1 (got {num_neighbors!r})"
        )
    if edges.order is None:
        raise ValueError("Edges whose global numbers are unknown can't be sampled")
    hop, turns = _sampled(edges, _mask(seeds, edges.plan), num_neighbors, key)
    return _flow(data, edges, hop, turns, layers, whole=False)


def _distributed_edges(data: Data) -> DistEdgeIndex:
    if isinstance(data, HeteroData):
        raise TypeError(
            "Message flow graphs and sampled neighbours are of one type of nodes (got 'data' of "
            f"types {', '.join(data.node_types)}): train on the whole HeteroData, or write the "
            "partitions of data.to_homogeneous(), whose data.edge_type RGCNConv and others take"
        )
    edges = data.get("edge_index") if isinstance(data, Data) else None
    if not isinstance(edges, DistEdgeIndex) or edges.bipartite or edges.partial is not None:
        raise TypeError(
            "Expected 'data' to be a part with one type of nodes, as "
            f"load_partition(root, view='local') gives it (got {type(data).__name__} with "
            f"{_kind(edges)} as edge_index)"
        )
    if edges.dist_row != 0:
        raise ValueError("Expected 'data.edge_index' to go from sources to targets (it is flipped)")
    return edges


def _kind(edges: Any) -> str:
    if isinstance(edges, DistEdgeIndex) and edges.partial is not None:
        return "edges of a message flow graph"
    return type(edges).__name__


def _flow(
    data: Data, edges: DistEdgeIndex, hop: Tensor, turns: Tensor, layers: int, whole: bool
) -> Data:
    """Returns the graph of the nodes of at most ``layers`` hops, and of edges by their turns.

    Args:
        data: The part.
        edges: Its edges.
        hop: Each own node's hop.
        turns: The hop that each edge is sorted by; ``layers`` where it is left out.
        layers: The number of layers.
        whole: Degrees are those of the whole graph.
    """
    nodes = hop.argsort(stable=True)[: int((hop <= layers).sum())]
    columns = turns.argsort(stable=True)[: int((turns < layers).sum())]
    flow = PartData()
    for name, level in _levels(data, edges.plan).items():
        flow[name] = _rows(data[name], nodes if level == "node" else columns)
    flow.num_nodes = len(nodes)
    flow.num_sampled_nodes = hop[nodes].bincount(minlength=layers + 1).tolist()
    flow.num_sampled_edges = turns[columns].bincount(minlength=layers).tolist()
    flow.batch_size = flow.num_sampled_nodes[0]
    flow.input_id = nodes[: flow.batch_size]
    flow.edge_index = _edges(edges, nodes, columns, flow, whole)
    return flow


def _mask(seeds: Tensor, plan: HaloPlan) -> Tensor:
    """Returns which own nodes are seeds."""
    num = plan.num_local
    problem = ""
    mask = torch.zeros(num, dtype=torch.bool, device=plan.send_index.device)
    if not isinstance(seeds, Tensor) or seeds.dim() != 1 or seeds.is_floating_point():
        problem = f"a mask or a list of ids (got {getattr(seeds, 'shape', type(seeds).__name__)})"
    elif seeds.dtype == torch.uint8:
        problem = "a mask or a list of ids (got torch.uint8; if it is a mask, pass seeds.bool())"
    elif seeds.dtype == torch.bool and len(seeds) != num:
        problem = f"a mask of this worker's nodes, {num} values (got {len(seeds)})"
    elif seeds.dtype != torch.bool and not bool(((seeds >= 0) & (seeds < num)).all()):
        problem = f"local ids below {num} (got {int(seeds.min())} to {int(seeds.max())})"
    elif seeds.dtype != torch.bool and len(seeds.unique()) < len(seeds):
        problem = f"local ids, each once (got {len(seeds)} of {len(seeds.unique())} nodes; is it "
        problem += "a mask? pass seeds.bool())"
    else:
        mask[seeds] = True
    told = plan.comm.all_gather_object((problem, int(mask.sum())))
    for rank, (text, _) in enumerate(told):
        if text:
            raise ValueError(f"Expected 'seeds' to be {text} at rank {rank}")
    if not any(count for _, count in told):
        raise ValueError("'seeds' holds no node on any worker")
    return mask


def _hops(edges: DistEdgeIndex, seeds: Tensor, num_layers: int) -> Tensor:
    """Returns each own node's least number of edges to a seed, at most ``num_layers + 1``."""
    source, target = edges.ends()
    hop = torch.full(seeds.shape, num_layers + 1, device=seeds.device)
    hop[seeds] = 0
    for k in range(1, num_layers + 1):
        found = torch.zeros(edges.plan.num_ids, device=seeds.device)
        found[source[hop[target] < k]] = 1
        hop[(halo_reduce(found, edges.plan, "amax") > 0) & (hop > k)] = k
    return hop


def _sampled(
    edges: DistEdgeIndex, seeds: Tensor, num_neighbors: Sequence[int], key: int
) -> tuple[Tensor, Tensor]:
    """Returns each own node's hop over sampled edges, and the hop of each sampled edge's target."""
    (source, target), order = edges.ends(), edges.order
    if order is None:
        raise AssertionError("edges without global numbers")
    layers = len(num_neighbors)
    hop = torch.full(seeds.shape, layers + 1, device=seeds.device)
    hop[seeds] = 0
    turns = torch.full(target.shape, layers, device=seeds.device)
    for k, most in enumerate(num_neighbors):
        columns = (hop[target] == k).nonzero().view(-1)
        if most > 0:
            columns = columns[_first(target[columns], order[columns], most, key)]
        turns[columns] = k
        found = torch.zeros(edges.plan.num_ids, device=seeds.device)
        found[source[columns]] = 1
        hop[(halo_reduce(found, edges.plan, "amax") > 0) & (hop > k + 1)] = k + 1
    return hop, turns


def _first(target: Tensor, ids: Tensor, most: int, key: int) -> Tensor:
    """Returns which edges are the first ones of their target by random numbers of their own."""
    by_number = keyed_numbers(ids, key).argsort(stable=True)
    place = by_number[target[by_number].argsort(stable=True)]
    counts = target.bincount()
    start = (counts.cumsum(0) - counts)[target[place]]
    kept = torch.empty(target.shape, dtype=torch.bool, device=ids.device)
    kept[place] = torch.arange(len(place), device=ids.device) - start < most
    return kept


def _turns(edges: DistEdgeIndex, hop: Tensor) -> Tensor:
    """Returns the hop by which edges are sorted. See [Note: layers]."""
    source, target = edges.ends()
    return torch.where(source == target, (hop[target] - 1).clamp(min=0), hop[target])


def _levels(data: Data, plan: HaloPlan) -> dict[str, str]:
    """Returns the attributes with a row per node or edge, on all workers."""
    even = data.num_nodes == data.num_edges  # Here, where other workers may tell them apart.
    mine: dict[str, list[str]] = {}
    for name, value in data.to_dict().items():
        if type(value) is Tensor and value.dim() and not is_named(name):
            node, edge = data.is_node_attr(name), data.is_edge_attr(name)
            fits = node or (even and edge), edge or (even and node)
            mine[name] = [level for level, fit in zip(("node", "edge"), fits, strict=True) if fit]
    everywhere = plan.comm.all_gather_object(mine)
    agreed: dict[str, str] = {}
    for name in mine:
        levels = [k for k in mine[name] if all(k in found.get(name, ()) for found in everywhere)]
        if levels:
            agreed[name] = "edge" if "edge" in name and "edge" in levels else levels[0]
    return agreed


def _rows(value: Tensor, rows: Tensor) -> Tensor:
    """Returns some rows of a tensor, which may be sparse."""
    if value.layout == torch.strided:
        return value[rows]
    chosen = value.to_sparse_coo().index_select(0, rows)
    return chosen.to_sparse_csr() if value.layout == torch.sparse_csr else chosen


def _edges(
    edges: DistEdgeIndex, nodes: Tensor, columns: Tensor, flow: Any, whole: bool
) -> DistEdgeIndex:
    """Returns the first layer's edges, which know those of the next."""
    plan, device = edges.plan, nodes.device
    place = torch.full((plan.num_local,), -1, device=device)
    place[nodes] = torch.arange(len(nodes), device=device)
    source, target = plain(edges)[:, columns]
    degree = edges.ends()[1].bincount(minlength=plan.num_local)[nodes]
    layers = len(flow.num_sampled_edges)
    sizes = [sum(flow.num_sampled_nodes[: layers + 1 - k]) for k in range(layers)]
    counts = [sum(flow.num_sampled_edges[: layers - k]) for k in range(layers)]
    used = torch.zeros(plan.num_halo, layers, dtype=torch.uint8, device=device)
    for k, count in enumerate(counts):
        halo = source[:count] - plan.num_local
        used[halo[halo >= 0], k] = 1
    order = edges.order
    following: DistEdgeIndex | None = None
    plans = plans_of_subsets(plan, used, place, sizes)
    checked: WeakSet[Any] | None = WeakSet() if whole else None
    for k in reversed(range(layers)):
        halo_place = used[:, k].long().cumsum(0) - 1 + sizes[k]
        numbers = torch.cat([place, halo_place])
        ends = torch.stack([numbers[source[: counts[k]]], place[target[: counts[k]]]])
        made = dist_edge_index(ends, plans[k])
        if order is not None:
            made.ordered(order[columns[: counts[k]]])
        missing = degree[: sizes[k]] - ends[1].bincount(minlength=sizes[k])
        missing = missing if whole else torch.zeros_like(missing)
        made.partial = Partial(missing, following, checked)
        following = made
    if following is None:
        raise AssertionError("no layers")
    return following
