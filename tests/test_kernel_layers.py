"""Layers whose messages the kernels compute: sums, products with a number per edge, extrema."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    CHANNELS,
    MESSAGES,
    OUT,
    Job,
    Partitions,
    Sweep,
    hosted,
    make_graph,
    whole,
    workers,
)
from torch import Tensor
from torch.nn import Linear
from torch_geometric import nn as gnn
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.nn import propagation
from pyg_sar.space.shard import Segments, shards_of

SWITCHES = (
    SARPolicy(),
    SARPolicy(mode=2, prefetch=1),
    SARPolicy(prefetch=0, message_budget=1),
    SARPolicy(kernels="off"),
)
Write = Callable[[Tensor, Tensor], Tensor]


class Written(MessagePassing):
    """A message of source rows and a number per edge; counts the rows that messages had."""

    def __init__(self, write: Write, aggr: Any = "sum", **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        self.write = write
        self.scale = 1.0

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Any) -> Tensor:
        MESSAGES.rows.append(x_j.size(0))
        out = self.write(x_j, edge_weight)
        return out if self.scale == 1.0 else out * self.scale


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return x


def column_first(x: Tensor, weight: Tensor) -> Tensor:
    return weight.view(-1, 1) * x


def rows_first(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.unsqueeze(-1)


def indexed(x: Tensor, weight: Tensor) -> Tensor:
    return weight[:, None] * x


def grow(x: Tensor, weight: Tensor) -> Tensor:
    out = weight.view(-1, 1) * x
    out.add_(1)
    return out


NO_PRODUCTS: dict[str, Write] = {
    "source rows scaled before": lambda x, w: w.view(-1, 1) * (2 * x),
    "scaled after": lambda x, w: w.view(-1, 1) * x * 2,
    "a function of it": lambda x, w: (w.view(-1, 1) * x).relu(),
    "changed in place": grow,
    "function of the weight": lambda x, w: w.exp().view(-1, 1) * x,
    "weight changed in place": lambda x, w: w.clone().view(-1, 1) * x,
    "a sum": lambda x, w: w.view(-1, 1) * x + x,
    "twice": lambda x, w: w.view(-1, 1) * (w.view(-1, 1) * x),
    "columns turned": lambda x, w: w.view(-1, 1) * x.flip(-1),
    "edges turned": lambda x, w: w.view(-1, 1).abs() * x,
    "square": lambda x, w: w.view(-1, 1) * x * x,
    "some columns": lambda x, w: torch.cat([w.view(-1, 1) * x[:, :2], x[:, 2:]], 1),
    "in place of rows": lambda x, w: x.mul_(w.view(-1, 1)),
}


class Heads(torch.nn.Module):
    """Sums rows of two axes."""

    def __init__(self, aggr: Any) -> None:
        super().__init__()
        self.conv = Written(plain, aggr, node_dim=0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, CHANNELS // 2), edge_index)


class Negated(torch.nn.Module):
    """Operands whose sign PyTorch keeps beside their memory, as of ``z.conj().imag``."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([gnn.LEConv(CHANNELS, OUT), Written(plain)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        messages, sums = self.convs
        x, weight = torch._neg_view(x * 2), torch._neg_view(-edge_weight)
        return messages(x, edge_index, weight) + sums(x, edge_index)[:, :OUT]


Layers = dict[str, Callable[[], torch.nn.Module]]
SUMS: Layers = {
    "sage, mean": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage, sum": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="sum", project=True),
    "gin": lambda: gnn.GINConv(Linear(CHANNELS, OUT), train_eps=True),
    "simple": lambda: gnn.SimpleConv("mean", combine_root="cat"),
    "graph conv": lambda: gnn.GraphConv(CHANNELS, OUT),
    "sum and mean": lambda: Written(plain, ["sum", "mean"]),
    "two axes": lambda: Heads("mean"),
}
EXTREMA: Layers = {
    "sage, max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max", project=True),
    "min": lambda: Written(plain, "min"),
    "several": lambda: Written(plain, ["max", "sum", "min", "mean"]),
    "gin, max": lambda: gnn.GINConv(Linear(CHANNELS, OUT), aggr="max"),
}
WITH_LEARNED_WEIGHTS: Layers = {
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
    "graph conv, mean": lambda: gnn.GraphConv(CHANNELS, OUT, aggr="mean"),
    "tag": lambda: gnn.TAGConv(CHANNELS, OUT, K=2),
    "simple": lambda: gnn.SimpleConv("mean"),
    "rows first, two aggregations": lambda: Written(rows_first, ["sum", "mean"]),
    "indexed": lambda: Written(indexed),
    "negated views": Negated,
}
WITH_WEIGHTS: Layers = {
    **{f"constant, {n}": make for n, make in WITH_LEARNED_WEIGHTS.items() if make is not Negated},
    "cheb": lambda: gnn.ChebConv(CHANNELS, OUT, K=3),
}
OF_A_COLUMN: Layers = {"[E, 1]": lambda: Written(lambda x, w: w * x)}


@pytest.mark.parametrize("world", [1, 2, 5, 3])
def test_layers_are_exact_with_kernels_and_without(world: int, partitions: Partitions):
    """One part has no node. Ties of extrema are within shards and between them."""
    data, part = make_graph(), torch.arange(40) % max(world - 1, 1)
    column, tied, sweep = copy(data), copy(data), Sweep(world)
    column.edge_weight = data.edge_weight.view(-1, 1)
    tied.x = data.x.round()
    weight = ("edge_weight",)
    for title, graph, layers, names in (
        ("", data, SUMS | EXTREMA, {}),
        ("ties", tied, EXTREMA, {}),
        ("", data, WITH_LEARNED_WEIGHTS, {"edge": weight}),
        ("", data, WITH_WEIGHTS, {"constants": weight}),
        ("", column, OF_A_COLUMN, {"edge": weight}),
        ("constant", column, OF_A_COLUMN, {"constants": weight}),
    ):
        for name, make in layers.items():
            torch.manual_seed(0)
            root, options = partitions(graph, world, part), {"policies": SWITCHES, **names}
            sweep.add(f"{name} {title}", Job(make().double(), root, **options), graph)
    for name, write in NO_PRODUCTS.items() if world == 2 else ():
        job = Job(Written(write), partitions(data, 2, part), (), SWITCHES[:1], weight)
        sweep.add(name, job, data)
    sweep.check(hosted(world))


# Which messages are made #######################################################

Run = tuple[Write, Any, SARPolicy, bool]
"""Message, aggregation, policy and whether the weights are learned."""


def rows_of_messages(root: Path, runs: list[Run]) -> list[tuple[list[int], int]]:
    """For each run: rows of its messages, and the edges here."""
    data, found = pyg_sar.load_partition(root), []
    x = data.x.requires_grad_()
    for write, aggr, policy, learned in runs:
        layer = pyg_sar.distribute(Written(write, aggr), policy)
        weight = data.edge_weight.clone().requires_grad_(learned)
        layer(x, data.edge_index, weight)  # is analysed
        MESSAGES.rows.clear()
        layer(x, data.edge_index, weight).square().sum().backward()
        found.append((MESSAGES.rows.copy(), data.edge_index.to_local().size(1)))
    return found


def test_no_message_is_materialized(partitions: Partitions, kernels: None):
    """One edge is tried; without kernels, and of what is no product, every edge has its message.

    Mode 2 keeps what graphs of messages of extrema and of learned weights need.
    """
    here = [SARPolicy(mode=mode, push="off") for mode in (1, 2)]
    off = [SARPolicy(mode=mode, kernels="off") for mode in (1, 2)]
    several = ["mean", "sum"]
    one: list[Run] = [(plain, a, p, False) for a, p in product(("sum", "mean", several), here)]
    one += [(plain, aggr, here[0], False) for aggr in ("max", ["sum", "min"])]
    each: list[Run] = [(plain, a, p, False) for a, p in product(("sum", "mean", several), off)]
    each += [(plain, aggr, here[1], False) for aggr in ("max", ["sum", "min"])]
    for write in (column_first, rows_first, indexed):
        one += [(write, "sum", here[0], False), (write, "sum", here[1], False)]
        one += [(write, "sum", here[0], True)]
        each += [(write, "sum", here[1], True)]
    more: list[Run] = [(plain, a, SARPolicy(), False) for a in ("var", ["sum", "std"], "median")]
    more += [(write, "sum", SARPolicy(), False) for write in NO_PRODUCTS.values()]
    root = partitions(make_graph(), 3, "random")
    for found in workers(rows_of_messages, 3, root, one + each + more):
        for k, (rows, edges) in enumerate(found):
            if k < len(one):
                assert rows == [1], one[k]
            elif k < len(one + each):
                assert sum(rows) == edges, each[k - len(one)]
            else:
                assert sum(rows) >= edges, more[k - len(one + each)]


def after_a_change(root: Path) -> list[Any]:
    """Outputs and gradients of messages that have changed, and messages that a hook saw."""
    data, found = pyg_sar.load_partition(root), []
    for write in (plain, column_first):
        layer = pyg_sar.distribute(Written(write), SARPolicy(push="off"))
        x = data.x.clone().requires_grad_()
        layer(x, data.edge_index, data.edge_weight)
        layer.scale = 2.0
        out = layer(x, data.edge_index, data.edge_weight)
        out.square().sum().backward()
        found += [whole(out.detach()), whole(x.grad)]
    seen: list[int] = []
    layer.register_message_forward_hook(lambda *given: seen.append(given[2].size(0)))
    half = layer(data.x.bfloat16(), data.edge_index, data.edge_weight.bfloat16())
    return [*found, whole(half.detach()), sum(seen)]


def test_a_message_that_changed_is_noticed_and_hooks_see_every_message(partitions: Partitions):
    """Numbers don't make a layer be analysed again. Gradients are those of the new message."""
    data, expected = make_graph(), []
    for write in (plain, column_first):
        x = data.x.clone().requires_grad_()
        out = 2 * Written(write)(x, data.edge_index, data.edge_weight)
        out.square().sum().backward()
        expected += [out.detach(), x.grad]
    results = workers(after_a_change, 3, partitions(data, 3, "random"))
    for *found, half, _ in results:
        torch.testing.assert_close(found, expected)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.double(), expected[2], rtol=0.05, atol=0.2)
    assert sum(seen for *_, seen in results) >= data.num_edges


def transposed(root: Path) -> None:
    """Each shard's transposed structure holds the shard's edges, and is made once."""
    data = pyg_sar.load_partition(root)
    edges = data.edge_index.to_local()
    shards = shards_of(edges)
    source, target = edges.ends()
    for shard in shards.blocks:
        forward, back = shard.segments, shard.transposed(numbered=True)
        there, here = ends_of(forward), ends_of(back)
        assert here == [tuple(there[int(e)][::-1]) for e in back.edges]
        assert sorted(there, key=lambda end: end[::-1]) == there
        assert sorted(here, key=lambda end: end[::-1]) == here
        assert shard.transposed(numbered=True) is back
        tile = shard.tile(shard.edges)
        assert target[tile.columns].tolist() == [end[1] for end in there]
        assert list(zip(tile.source.tolist(), tile.target_rows.tolist(), strict=True)) == there
    assert sum(len(ends_of(shard.segments)) for shard in shards.blocks) == source.numel()


def ends_of(segments: Segments) -> list[tuple[int, int]]:
    """Source and target of each edge."""
    counts, targets = segments.offsets.diff(), segments.targets
    assert bool((counts > 0).all())
    if targets is None:
        targets = torch.arange(counts.numel())
    return list(
        zip(segments.source.tolist(), targets.repeat_interleave(counts).tolist(), strict=True)
    )


def test_transposed_shards_hold_the_same_edges(partitions: Partitions):
    workers(transposed, 3, partitions(make_graph(), 3, "random"))


class CountedKept(dict[Any, Any]):
    """Notes each order that weights are brought into."""

    def __init__(self, made: list[bool]) -> None:
        super().__init__()
        self.made = made

    def setdefault(self, block: Any, orders: Any = None) -> Any:
        if block not in self:
            self[block] = CountedOrders(self.made)
        return self[block]


class CountedOrders(dict[bool, Tensor]):
    def __init__(self, made: list[bool]) -> None:
        super().__init__()
        self.made = made

    def __setitem__(self, by_source: bool, weights: Tensor) -> None:
        self.made.append(by_source)
        super().__setitem__(by_source, weights)


def normalised(data: Any, made: list[bool] | None = None) -> tuple[list[Any], list[list[bool]]]:
    """Outputs and gradients of steps whose weights change after two; orders that each step made."""
    torch.manual_seed(0)
    model = gnn.GCN(data.x.size(1), 4, 3, 2, dropout=0.0).double()
    if made is not None:
        model = pyg_sar.distribute(model)
    found, orders = [], []
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                data.edge_weight.mul_(2).clamp_(max=1.0)
        model.zero_grad()
        out = model(data.x, data.edge_index, data.edge_weight)
        out.square().mean().backward()
        found += [whole(out.detach()), *[p.grad for p in model.parameters()]]
        orders.append([] if made is None else [*made])
        if made is not None:
            made.clear()
    return found, orders


def normalised_on_a_worker(root: Path) -> tuple[list[Any], list[list[bool]]]:
    made: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(propagation, "WeakKeyDictionary", lambda: CountedKept(made))
        return normalised(pyg_sar.load_partition(root), made)


def test_normalised_weights_are_put_in_order_once(partitions: Partitions, kernels: None):
    """For all layers and steps, by target and by source, until the weights are others."""
    data = make_graph()
    expected, _ = normalised(data.clone())
    for found, orders in workers(normalised_on_a_worker, 3, partitions(data, 3, "random")):
        torch.testing.assert_close(found, expected)
        assert orders[1] == orders[3] == [] and sorted(orders[0]) == sorted(orders[2])
        assert 0 < orders[0].count(True) <= orders[0].count(False) <= 3  # a block for each owner
