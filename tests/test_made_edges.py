"""Edges that are computed in the global view: layers give the numbers of one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch_geometric.utils as pyg
from oracle import workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric import seed_everything
from torch_geometric import transforms as T
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.comm.group import current
from pyg_sar.nn.made_edges import _outline, made_edges
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.tensors import NodeTensor, Rows, whole
from pyg_sar.tensors.distributing import distributed_edges

NODES, EDGES = 40, 170
DOUBLE = torch.float64
Case = Callable[[Data, Tensor], tuple[Any, ...]]


def make_graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randint(NODES * NODES, (EDGES,), generator=draw).unique()
    edge_index = torch.stack([pairs // NODES, pairs % NODES])
    edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=draw)]
    return Data(
        x=torch.randn(NODES, 6, dtype=DOUBLE, generator=draw),
        edge_index=edge_index,
        edge_weight=torch.rand(edge_index.size(1), dtype=DOUBLE, generator=draw) + 0.1,
    )


def order(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(7))


def half(data: Data) -> Tensor:
    return order(NODES)[: NODES // 2]


def transformed(transform: Any, data: Data, weight: Tensor) -> tuple[Any, ...]:
    changed = data.clone()
    changed.edge_weight = weight
    changed = transform.forward(changed)
    return data.x, changed.edge_index, changed.edge_weight


def of_subgraph(data: Data, weight: Tensor) -> tuple[Any, ...]:
    nodes = half(data)
    edges, weight = pyg.subgraph(nodes, data.edge_index, weight, relabel_nodes=True, num_nodes=40)
    return data.x[nodes.sort().values], edges, weight


def of_hops(data: Data, weight: Tensor) -> tuple[Any, ...]:
    nodes, edges, _, mask = pyg.k_hop_subgraph([3, 5], 2, data.edge_index, relabel_nodes=True)
    return data.x[nodes], edges, weight[mask]


def assigned(data: Data, weight: Tensor) -> tuple[Any, ...]:
    changed = data.clone()
    changed.edge_index = pyg.to_undirected(data.edge_index)
    changed.edge_index = changed.edge_index[:, changed.edge_index[0] < 30]
    return changed.x, changed.edge_index, None


CASES: dict[str, Case] = {
    "coalesce": lambda d, w: (d.x, *pyg.coalesce(d.edge_index, w)),
    "to_undirected": lambda d, w: (d.x, *pyg.to_undirected(d.edge_index, w, reduce="mean")),
    "add_self_loops": lambda d, w: (d.x, *pyg.add_self_loops(d.edge_index, w, fill_value=2.0)),
    "add_remaining_self_loops": lambda d, w: (
        d.x,
        *pyg.add_remaining_self_loops(d.edge_index, w, num_nodes=NODES),
    ),
    "remove_self_loops": lambda d, w: (d.x, *pyg.remove_self_loops(d.edge_index, w)),
    "sorted": lambda d, w: (d.x, *pyg.sort_edge_index(d.edge_index, w)),
    "permuted": lambda d, w: (d.x, d.edge_index[:, order(w.numel())], w[order(w.numel())]),
    "first ones": lambda d, w: (d.x, d.edge_index[:, :50], w[:50]),
    "every other": lambda d, w: (d.x, d.edge_index[:, ::2], w[::2]),
    "no edge": lambda d, w: (d.x, d.edge_index[:, :0], w[:0]),
    "joined": lambda d, w: (
        d.x,
        torch.cat([d.edge_index, torch.tensor([[1, 2], [3, 39]])], 1),
        torch.cat([w, torch.ones(2, dtype=DOUBLE)]),
    ),
    "plain": lambda d, w: (d.x, make_graph().edge_index, w),
    "plain features": lambda d, w: (make_graph().x, d.edge_index[:, 3:], w[3:]),
    "all plain but weights": lambda d, w: (make_graph().x, make_graph().edge_index, w),
    "dropout_edge": lambda d, w: (d.x, pyg.dropout_edge(d.edge_index, 0.4)[0], None),
    "dropout_edge of pairs": lambda d, w: (
        d.x,
        pyg.dropout_edge(d.edge_index, 0.4, force_undirected=True)[0],
        None,
    ),
    "dropout_node": lambda d, w: (d.x, pyg.dropout_node(d.edge_index, 0.3)[0], None),
    "add_random_edge": lambda d, w: (d.x, pyg.add_random_edge(d.edge_index, 0.3)[0], None),
    "subgraph": of_subgraph,
    "k_hop_subgraph": of_hops,
    "assigned": assigned,
    "loops by a transform": lambda d, w: transformed(T.AddSelfLoops(attr="edge_weight"), d, w),
    "no loops by one": lambda d, w: transformed(T.RemoveSelfLoops(attr="edge_weight"), d, w),
}
LAYERS = {
    "gcn": lambda: gnn.GCNConv(6, 3),
    "graph": lambda: gnn.GraphConv(6, 3, aggr="max"),
    "arma": lambda: gnn.ARMAConv(6, 3, 2),
    "gat": lambda: gnn.GATConv(6, 3, edge_dim=1),
}


def compute(case: Case, name: str, data: Data) -> list[Tensor]:
    torch.manual_seed(3)
    layer = LAYERS[name]().to(DOUBLE)
    if whole(data.x, "test") is not data.x:
        layer = pyg_sar.distribute(layer)
    seed_everything(4)
    weight = data.edge_weight.clone().requires_grad_()
    x, edge_index, given = case(data, weight)
    x = x.clone().requires_grad_()
    out = layer(x, edge_index, *(() if given is None else (given,)))
    out.square().sum().backward()
    grads = [
        x.grad,
        *([] if given is None else [weight.grad]),
        *(p.grad for p in layer.parameters()),
    ]
    return [whole(t, "test").detach() for t in (out, *grads) if t is not None]


def sweep(root: str) -> list[str]:
    data, wrong = pyg_sar.load_partition(root), []
    for number, case in enumerate(CASES):
        for name in ("gcn", list(LAYERS)[1 + number % 3]):
            expected = compute(CASES[case], name, make_graph())
            try:
                found = compute(CASES[case], name, data)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            except Exception as error:
                wrong.append(f"{case}, {name}: {type(error).__name__} {error}"[:400])
    return wrong


def made_by(calls: list[tuple[Any, ...]], layer: Any) -> list[int]:
    """How many lists of edges were distributed by each of these calls."""
    known, found = made_edges(current()), []
    for args in calls:
        before = known.made
        layer(*args)
        found.append(known.made - before)
    return found


def recognised(root: str) -> None:
    data, plain = pyg_sar.load_partition(root), make_graph().edge_index
    layer = pyg_sar.distribute(gnn.GraphConv(6, 3).to(DOUBLE))
    copies = [(data.x, plain.clone()) for _ in range(3)]
    assert made_by(copies, layer) == [1, 0, 0]
    assert made_by([(data.x.clone(), pyg.coalesce(data.edge_index)) for _ in range(3)], layer) == [
        *(1, 0, 0)
    ]
    assert made_by([(data.x, plain.flip(1)), (data.x, plain)], layer) == [1, 0]
    # Equal in all that is looked at before lists are compared.
    alike = plain.clone()
    alike[0, [3, 6]] = alike[0, [6, 3]]
    assert not torch.equal(alike, plain)
    assert made_by([(data.x, alike), (data.x, plain.clone()), (data.x, alike)], layer) == [1, 1, 1]
    # Written by what nobody counts, or through a view.
    written = plain.clone()
    written.numpy()[1, :9] = 7
    computed = pyg.coalesce(data.edge_index)
    assert made_by([(data.x, written), (data.x, computed)], layer) == [1, 0]
    written.numpy()[1, :9] = 8
    computed.data[0, :9] = 7
    assert made_by([(data.x, written), (data.x, computed)], layer) == [1, 1]
    # The graph's own edges and what a mask selects of them stay as they are.
    own = [data.edge_index, data.edge_index.flip(0), data.edge_index[:, data.edge_index[0] > 3]]
    assert made_by([(data.x, edges) for edges in own], layer) == [0, 0, 0]
    for wrong in (plain + 1, torch.cat([data.edge_index, plain - NODES], 1)):
        with pytest.raises(ValueError, match="GraphConv got an 'edge_index' with .* nodes 0 to 39"):
            layer(data.x, wrong)


def loaded_again(root: str) -> None:
    """Nodes that were loaded before, and as many edges as there are of them."""
    found = []
    for data in (pyg_sar.load_partition(root), pyg_sar.load_partition(root), make_graph()):
        graphs = torch.stack([torch.arange(NODES), torch.arange(NODES) % 3])
        torch.manual_seed(0)
        layer = pyg_sar.distribute(gnn.GATConv((6, 6), 3, add_self_loops=False).to(DOUBLE))
        found.append(layer((data.x.sin(), torch.ones(3, 6, dtype=DOUBLE)), graphs))
    for out in found:
        torch.testing.assert_close(whole(out, "rows"), found[-1], rtol=1e-10, atol=1e-10)


def test_long_lists_are_told_apart() -> None:
    """As float32 has no number for their last edge."""
    long = torch.zeros(2, 1, dtype=torch.long).expand(2, 2**24 + 4)
    assert _outline(long) != _outline(long[:, 1:])


def bounded(root: str) -> None:
    """A few lists are kept whatever they take; of many, as much as there is room for."""
    data, layer = pyg_sar.load_partition(root), gnn.SimpleConv()
    layer, plain = pyg_sar.distribute(layer), make_graph().edge_index
    lists = [plain[:, k:] for k in range(30)]
    assert made_by([(data.x, edges) for edges in lists * 2], layer) == [1] * 30 + [0] * 30
    current().made_edges = None
    made_edges(current()).room = 0
    for count, made in ((4, 4), (5, 1 + 5)):
        assert sum(made_by([(data.x, edges) for edges in lists[:count] * 2], layer)) == made
    few = plain[:, (plain < 20).all(0)]
    among = [(data.x[: NODES - k], few) for k in range(17)]  # each between other nodes
    current().made_edges = None
    made_edges(current()).room = 0
    assert sum(made_by(among[:16] * 2, layer)) == 16
    assert sum(made_by(among * 2, layer)) == 1 + 17
    current().made_edges = None


def alive(root: str) -> list[list[int]]:
    """Edge lists that are there as other edges are dropped in each step: none waits for Python's
    collector of circles, nor is out of its sight."""
    data, found = pyg_sar.load_partition(root), []
    made_edges(current()).room = 0
    gc.disable()
    for make in (gnn.SAGEConv, gnn.GCNConv, gnn.GATConv):
        layer = pyg_sar.distribute(make(6, 3).to(DOUBLE))
        for change in (lambda edges: edges, pyg.to_undirected):
            counts = []
            for step in range(60):
                if step % 20 == 0:
                    counts.append(sum(issubclass(type(o), DistEdgeIndex) for o in gc.get_objects()))
                kept = torch.rand(data.edge_index.size(1)) < 0.8
                layer(data.x, change(data.edge_index[:, kept])).sum().backward()
            found.append(counts[1:])
    return found


def test_edges_of_earlier_steps_are_freed(tmp_path: Path) -> None:
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts")
    for found in workers(alive, 2, str(tmp_path / "parts")):
        assert all(len({*counts}) == 1 for counts in found), found


def unsent() -> None:
    """Edges that all workers hold lie as those that each has a share of, without a message."""
    comm, plain = current(), make_graph().edge_index
    draw = torch.Generator().manual_seed(5)

    def layout() -> Rows:
        owner, ids = torch.randint(comm.world_size, (NODES,), generator=draw), order(NODES)
        rows = Rows(comm, NODES, int((owner == comm.rank).sum()), ids[owner[ids] == comm.rank])
        rows.places()
        return rows

    def described(made: NodeTensor) -> list[Any]:
        index = made.edges.index
        plan = index.plan
        rows = [t.long().tolist() for t in (*index.ends(), made.rows.ids, plan.send_index)]
        return [*rows, plan.send_counts, plan.halo_counts, plan.num_local, index.targets]

    nodes, others = layout(), layout()
    for edges in (plain, plain.repeat(1, 2), plain[:, :1], plain[:, :0]):
        ids = torch.arange(edges.size(1))[comm.rank :: comm.world_size].flip(0)
        share = NodeTensor(edges[:, ids], Rows(comm, edges.size(1), len(ids), ids), 1)
        for ends in ((nodes, nodes), (nodes, others)):
            expected = described(distributed_edges(share, *ends))
            silent = ("all_gather", "all_reduce", "exchange", "exchange_all")
            with mock.patch.multiple(comm, **dict.fromkeys(silent)):
                found = distributed_edges(edges, *ends)
            assert described(found) == expected


def both(root: str) -> list[str]:
    unsent()
    recognised(root)
    loaded_again(root)
    current().made_edges = None
    bounded(root)
    return sweep(root)


def test_layers_on_made_edges_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    pyg_sar.write_partitions(make_graph(), 3, tmp_path / "parts")
    for wrong in pyg_sar.launch(both, 1, str(tmp_path / "parts"), parts=3):
        assert not wrong, "\n".join(wrong)
