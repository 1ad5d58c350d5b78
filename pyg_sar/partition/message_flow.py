"""Message flow graphs: the nodes and edges that a few nodes' outputs depend on, layer by layer.

[Note: layers] A node's hop is the least number of edges from it to a seed. Nodes are in the order
of hops, seeds first, and of their ids, edges in that of their targets' hops. Of L layers, layer
l = 0, 1, ... reads nodes of at most L - l hops and sums over the in-edges of those of at most
L - l - 1. Both are the first ones of what layer l - 1 has, so that ``trim_to_layer`` cuts one from
the other, as of a batch of ``NeighborLoader``; but no neighbour is left out. Self loops of the
nodes of L - l hops stay in layer l: layers replace them by others, and a node's number of in-edges
must be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.exchange.gather import halo_reduce, plans_of_subsets
from pyg_sar.files import check_argument, check_whole
from pyg_sar.ledger import Label
from pyg_sar.partition.node_lists import is_named
from pyg_sar.space.distributed_index import DistEdgeIndex, Order, Partial, dist_edge_index, plain
from pyg_sar.space.draws import keyed_numbers
from pyg_sar.space.edge_ids import Given
from pyg_sar.tensors import Edges, NodeTensor, Rows, edge_tensor, rows_at, wrap
from pyg_sar.tensors.rows import all_to_all
from pyg_sar.wording import counted

_LABEL: Label = ("", "", "message flow graph")


@torch.no_grad()
def message_flow_graphs(data: Data, seeds: Tensor, num_layers: int) -> Data:
    """Makes the message flow graphs of some nodes, for training steps on few of them. Collective.

    The result is like a batch of PyG's ``NeighborLoader`` whose seeds are all seeds and whose
    neighbours are all neighbours, so outputs and gradients of the seeds are those of the whole
    graph. Its tensors are of the subgraph, spread over the workers as in ``data``. PyG's own models
    (``torch_geometric.nn.GCN``, ...) compute in each layer what the seeds need and nothing else
    where they get ``num_sampled_nodes`` and ``num_sampled_edges``, models of your own with
    ``torch_geometric.utils.trim_to_layer``:

    .. code-block:: python

        flow = pyg_sar.partition.message_flow_graphs(data, data.train_mask, num_layers=2)
        pyg_sar.train.check_flow(model, data, flow)
        out = model(
            flow.x,
            flow.edge_index,
            num_sampled_nodes_per_hop=flow.num_sampled_nodes,
            num_sampled_edges_per_hop=flow.num_sampled_edges,
        )[: flow.batch_size]
        loss = F.cross_entropy(out, flow.y[: flow.batch_size])

    What takes all nodes together (batch norms, readouts, attention over all nodes) sees fewer nodes
    here than in the whole graph, and gives other numbers. So layers run on it after
    :func:`pyg_sar.train.check_flow` has compared the seeds' outputs with those of the whole graph;
    ``Trainer(..., flow=flow)`` does so before the first step.

    Dropout and other random numbers are those that one process draws on ``flow``, a graph of its
    own: with the same state of the generator others than on the whole graph.

    Args:
        data: What :func:`pyg_sar.load_partition` gave.
        seeds: The nodes whose outputs are needed: bool ``[num_nodes]`` or a list of ids, each once.
        num_layers: How often the model passes messages on, one after the other. A layer of K hops
            (``SGConv(K=3)``) counts K times, and must not be trimmed inside.

    Returns:
        A ``Data`` with the node- and edge-level attributes of ``data`` and ``batch_size`` (the
        seeds, which come first, in the order of their ids), ``n_id`` and ``e_id`` (of each node and
        edge the number in ``data``), ``input_id`` (the seeds' ``n_id``), ``num_sampled_nodes`` and
        ``num_sampled_edges`` (lists of numbers, by hop). The order of nodes and edges is the same
        for any number of workers.

    Raises:
        TypeError: When ``data`` is no graph with one type of nodes.
        ValueError: When the seeds are no nodes, or none.
        IndexError: When they are ids of no nodes.
    """
    edges = distributed_edges(data)
    check_whole("num_layers", num_layers)
    numbers, everything = data.edge_index.rows.ids, [-1] * num_layers
    hop, _ = _sampled(edges.index, numbers, _mask(seeds, edges.targets), everything, key=0)
    source, target = edges.index.ends()
    turns = torch.where(source == target, (hop[target] - 1).clamp(min=0), hop[target])
    return _flow(data, edges, hop, turns, num_layers, whole=True)  # See [Note: layers].


@torch.no_grad()
def sample_neighbors(data: Data, seeds: Tensor, num_neighbors: Sequence[int], key: int) -> Data:
    """Samples a message flow graph, as a batch of ``NeighborLoader`` does. Collective.

    Of each node that a layer computes, some in-edges are kept, drawn without replacement. A node's
    neighbours are drawn once. Edges are drawn by their global numbers: the same ones for any number
    of workers. What a model computes on it is an estimate of what it computes on the whole graph.

    Args:
        data, seeds: As of :func:`pyg_sar.partition.message_flow_graphs`, which also says what is
            returned; degrees are those among the sampled edges.
        num_neighbors: The most in-edges of a node, by hop from the seeds; -1 keeps all.
        key: Which draw: another number for each batch and epoch.
    """
    edges, layers = distributed_edges(data), len(num_neighbors)
    fits = layers and not any(isinstance(n, bool) or n == 0 or n < -1 for n in num_neighbors)
    wanted = "integers, -1 or at least 1"
    check_argument(bool(fits), "num_neighbors", num_neighbors, wanted)
    numbers = data.edge_index.rows.ids
    hop, turns = _sampled(edges.index, numbers, _mask(seeds, edges.targets), num_neighbors, key)
    return _flow(data, edges, hop, turns, layers, whole=False)


def distributed_edges(data: Data) -> Edges:
    """Returns the edges of a graph with one type of nodes."""
    if isinstance(data, HeteroData):
        raise TypeError(
            "Message flow graphs and sampled neighbours are of one type of nodes (got 'data' of "
            f"types {', '.join(data.node_types)}): train on the whole HeteroData, or write the "
            "partitions of data.to_homogeneous(), whose data.edge_type RGCNConv and others take"
        )
    index = data.get("edge_index") if isinstance(data, Data) else None
    edges = index.edges if isinstance(index, NodeTensor) else None
    if edges is None or edges.index.bipartite or edges.index.partial is not None:
        raise TypeError(
            "Expected 'data' to be a graph with one type of nodes and its own edge_index, as "
            f"load_partition(root) gives it (got {type(data).__name__} with {_kind(index)} as "
            "edge_index)"
        )
    if edges.index.dist_row != 0:
        raise ValueError("Expected 'data.edge_index' to go from sources to targets (it is flipped)")
    return edges


def _kind(index: Any) -> str:
    if not isinstance(index, NodeTensor):
        return type(index).__name__
    return "computed edges" if index.edges is None else "edges of a message flow graph"


def _mask(seeds: Tensor, rows: Rows) -> Tensor:
    """Returns which of this worker's nodes are seeds. Collective."""
    wanted = "Expected 'seeds' to be a mask or a list of ids"
    if not isinstance(seeds, Tensor) or seeds.dim() != 1 or seeds.is_floating_point():
        raise ValueError(f"{wanted} (got {getattr(seeds, 'shape', type(seeds).__name__)})")
    if seeds.dtype == torch.uint8:
        raise ValueError(f"{wanted} (got torch.uint8; if it is a mask, pass seeds.bool())")
    if seeds.dtype == torch.bool:
        if len(seeds) != rows.total:
            raise ValueError(f"{wanted} of {counted(rows.total, 'nodes')} (got {len(seeds)})")
        mask = rows_at(seeds, rows, 0)
    else:
        mask = torch.zeros(rows.count, dtype=torch.bool, device=rows.comm.device)
        wrap(mask, rows, 0)[seeds.to(rows.comm.device).long()] = True
    number = int(rows.comm.all_reduce(mask.sum().view(1), label=_LABEL))
    if seeds.dtype != torch.bool and number < len(seeds):
        raise ValueError(
            f"{wanted}, each once (got {len(seeds)} of {counted(number, 'nodes')}; is it a mask? "
            "pass seeds.bool())"
        )
    if not number:
        raise ValueError("'seeds' holds no node")
    return mask


# The subgraph ##################################################################


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Some rows of the whole graph, in the order of a number that each of them has: this worker's,
    by their places among its rows, their layout, and how many have each number, on all workers.
    """

    source: Tensor
    rows: Rows
    totals: list[int]

    def layers(self, first: int, count: int) -> list[Rows]:
        """Returns the layouts of ``count`` layers, of which the first one has ``first`` numbers:
        each leaves out those of one number more.
        """
        found = [self.rows]
        for k in range(1, count):
            total, last = sum(self.totals[: first - k]), found[-1]
            found.append(last if total == last.total else last.sliced(0, total, 1))
        return found


def _chosen(rows: Rows, number: Tensor, most: int) -> _Chosen:
    """Chooses the rows whose number is below ``most``, in its order and that of ids. Collective.

    ``number`` is that of each row here, not negative. Each worker orders a run of ids; none holds a
    table of all rows.
    """
    comm, world = rows.comm, rows.comm.world_size
    source = number.argsort(stable=True)[: int((number < most).sum())]
    ids, number = rows.ids[source], number[source]
    span = max(-(-rows.total // world), 1)
    order = (ids // span).argsort(stable=True)
    counts = torch.bincount(ids // span, minlength=world).tolist()
    asked = all_to_all(list(torch.stack([number, ids], 1)[order].split(counts)), comm)
    number, own = torch.cat(asked).unbind(1)
    by_number = (number * span + own % span).argsort()
    here = torch.bincount(number, minlength=most)
    everywhere = torch.stack(comm.all_gather(here, label=_LABEL))
    totals = everywhere.sum(0)
    before = totals.cumsum(0) - totals + everywhere[: comm.rank].sum(0) - here.cumsum(0) + here
    places = torch.empty(len(own), dtype=torch.long, device=own.device)
    places[by_number] = torch.arange(len(own), device=own.device)
    places += before[number]
    answers = all_to_all(list(places.split([len(part) for part in asked])), comm)
    found = torch.empty_like(ids)
    found[order] = torch.cat(answers)
    return _Chosen(source, Rows(comm, int(totals.sum()), len(source), found), totals.tolist())


def _flow(data: Data, edges: Edges, hop: Tensor, turns: Tensor, layers: int, whole: bool) -> Data:
    """Returns the graph of the nodes of at most ``layers`` hops, and of edges by their turns.

    ``turns`` is the hop that each edge here is sorted by; ``layers`` where it is left out.
    ``whole``: no neighbour is left out, and degrees are those of the whole graph.
    """
    of_edges = data.edge_index.rows
    nodes, columns = _chosen(edges.targets, hop, layers + 1), _chosen(of_edges, turns, layers)
    nodes.rows.compared = WeakSet() if whole else None
    flow = Data()
    for name, value in data.to_dict().items():
        strided = isinstance(value, Tensor) and value.layout == torch.strided
        if not strided or not value.dim() or is_named(name):
            continue
        # PyG takes as many rows as nodes for nodes' rows, also where there are as many edges.
        of_edge = isinstance(value, NodeTensor) and value.rows is of_edges
        if data.is_node_attr(name) and not of_edge:
            flow[name] = _of_chosen(data, name, edges.targets, nodes)
        elif data.is_edge_attr(name) or of_edge:
            flow[name] = _of_chosen(data, name, of_edges, columns)
    flow.edge_index = _edges(edges.index, of_edges.ids, nodes, columns, whole)
    flow.num_nodes = nodes.rows.total
    flow.num_sampled_nodes, flow.num_sampled_edges = nodes.totals, columns.totals
    flow.batch_size = nodes.totals[0]
    flow.n_id = wrap(edges.targets.ids[nodes.source], nodes.rows, 0)
    flow.e_id = wrap(of_edges.ids[columns.source], columns.rows, 0)
    flow.input_id = flow.n_id[: flow.batch_size]
    return flow


def _of_chosen(data: Data, name: str, rows: Rows, chosen: _Chosen) -> NodeTensor:
    """Returns the chosen rows of an attribute."""
    value = data[name]
    axis = data.__cat_dim__(name, value) % value.dim()
    local = rows_at(value, rows, axis).index_select(axis, chosen.source)
    return wrap(local, chosen.rows, axis)


def _sampled(
    edges: DistEdgeIndex, numbers: Tensor, seeds: Tensor, num_neighbors: Sequence[int], key: int
) -> tuple[Tensor, Tensor]:
    """Returns each own node's hop over sampled edges, and the hop of each sampled edge's target."""
    source, target = edges.ends()
    layers = len(num_neighbors)
    hop = torch.full(seeds.shape, layers + 1, device=seeds.device)
    hop[seeds] = 0
    turns = torch.full(target.shape, layers, device=seeds.device)
    for k, most in enumerate(num_neighbors):
        columns = (hop[target] == k).nonzero().view(-1)
        if most > 0:
            columns = columns[_first(target[columns], numbers[columns], most, key)]
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


def _edges(
    edges: DistEdgeIndex, numbers: Tensor, nodes: _Chosen, columns: _Chosen, whole: bool
) -> NodeTensor:
    """Returns the first layer's edges, which know those of the next. Collective.

    ``numbers`` are those of the whole graph's edges; ``whole``: degrees are those of the whole
    graph.
    """
    plan, device, layers = edges.plan, edges.device, len(columns.totals)
    ends = nodes.layers(layers + 1, layers)
    rows = columns.layers(layers, layers)
    place = torch.full((plan.num_local,), -1, device=device)
    place[nodes.source] = torch.arange(len(nodes.source), device=device)
    source, target = plain(edges)[:, columns.source]
    degree = edges.ends()[1].bincount(minlength=plan.num_local)[nodes.source]
    used = torch.zeros(plan.num_halo, layers, dtype=torch.uint8, device=device)
    for k, own in enumerate(rows):
        halo = source[: own.count] - plan.num_local
        used[halo[halo >= 0], k] = 1
    sizes = [end.count for end in ends]
    plans = plans_of_subsets(plan, used, place, sizes, nodes.rows.ids)
    following: NodeTensor | None = None
    for k in reversed(range(layers)):
        count, size = rows[k].count, sizes[k]
        halo_place = used[:, k].long().cumsum(0) - 1 + size
        found = torch.cat([place, halo_place])
        pairs = torch.stack([found[source[:count]], place[target[:count]]])
        made = dist_edge_index(pairs, plans[k])
        # Sums go in the whole graph's order; what is drawn is drawn in the subgraph's.
        drawn = Given(columns.rows.ids[:count])
        made.ordered(Order(numbers[columns.source[:count]], drawn))
        missing = degree[:size] - pairs[1].bincount(minlength=size)
        made.partial = Partial(missing if whole else torch.zeros_like(missing))
        following = edge_tensor(Edges(made, ends[k], ends[k], following), rows[k])
    if following is None:
        raise AssertionError("no layers")
    return following
