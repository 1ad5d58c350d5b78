"""Messages that are source rows times a number per edge: sums by kernel, the same gradients."""

from __future__ import annotations

from collections.abc import Callable
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
    single_process,
    whole,
    workers,
)
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy

SWITCHES = (
    SARPolicy(),
    SARPolicy(mode=2, prefetch=1),
    SARPolicy(prefetch=0, message_budget=1),
    SARPolicy(kernels="off"),
)


class Weighted(MessagePassing):
    """A message made of source rows and a number per edge; counts the rows that messages had."""

    def __init__(self, write: Callable[..., Tensor], aggr: Any = "sum", **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        self.write = write
        self.scale = 1.0

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        MESSAGES.rows.append(x_j.size(0))
        out = self.write(x_j, edge_weight)
        return out if self.scale == 1.0 else out * self.scale


def column_first(x: Tensor, weight: Tensor) -> Tensor:
    return weight.view(-1, 1) * x


def rows_first(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.unsqueeze(-1)


def indexed(x: Tensor, weight: Tensor) -> Tensor:
    return weight[:, None] * x


PRODUCTS = {"column first": column_first, "rows first": rows_first, "indexed": indexed}


def grow(x: Tensor, weight: Tensor) -> Tensor:
    out = weight.view(-1, 1) * x
    out.add_(1)
    return out


OTHERS: dict[str, Callable[..., Tensor]] = {
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

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
    "graph conv, mean": lambda: gnn.GraphConv(CHANNELS, OUT, aggr="mean"),
    "tag": lambda: gnn.TAGConv(CHANNELS, OUT, K=2),
    "cheb": lambda: gnn.ChebConv(CHANNELS, OUT, K=3),
    "simple": lambda: gnn.SimpleConv("mean"),
    "rows first, two aggregations": lambda: Weighted(rows_first, ["sum", "mean"]),
    "indexed": lambda: Weighted(indexed),
}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_layers_are_exact_with_constant_and_learned_weights(world: int, partitions: Partitions):
    """One part has no node."""
    data = make_graph()
    part = torch.arange(data.num_nodes) % max(world - 1, 1)
    root = partitions(data, world, part)
    sweep = Sweep(world)
    for name, make in LAYERS.items():
        for learned in (False, True) if name != "cheb" else (False,):
            torch.manual_seed(0)
            names: Any = {"edge" if learned else "constants": ("edge_weight",)}
            job = Job(make().double(), root, policies=SWITCHES, **names)
            sweep.add(f"{name}, learned: {learned}", job, data)
    sweep.check(hosted(world))


def test_weights_with_an_axis_of_one(partitions: Partitions):
    data = make_graph()
    data.edge_weight = data.edge_weight.view(-1, 1)
    sweep = Sweep(2)
    root = partitions(data, 2, "random")
    for names in ({"edge": ("edge_weight",)}, {"constants": ("edge_weight",)}):
        sweep.add(
            "[E, 1]", Job(Weighted(lambda x, w: w * x), root, policies=SWITCHES, **names), data
        )
    sweep.check()


def rows_of_messages(root: Path, runs: list[Any]) -> list[tuple[list[int], int]]:
    """For each run (message, policy, learned weights): rows of its messages, and the edges here."""
    data, found = pyg_sar.load_partition(root), []
    x = data.x.requires_grad_()
    for write, policy, learned in runs:
        layer = pyg_sar.distribute(Weighted(write), policy)
        weight = data.edge_weight.clone().requires_grad_(learned)
        layer(x, data.edge_index, weight)  # is analysed
        MESSAGES.rows.clear()
        layer(x, data.edge_index, weight).square().sum().backward()
        found.append((MESSAGES.rows.copy(), data.edge_index.to_local().size(1)))
    return found


def test_no_message_is_materialized(partitions: Partitions, kernels: None):
    """One edge is tried; graphs that are kept need messages of learned weights."""
    root = partitions(make_graph(), 3, "random")
    runs = [
        (write, SARPolicy(mode=mode, push="off"), learned)
        for write, mode, learned in product(PRODUCTS.values(), (1, 2), (False, True))
    ]
    for found in workers(rows_of_messages, 3, root, runs):
        for (write, policy, learned), (rows, edges) in zip(runs, found, strict=True):
            if learned and policy.mode == 2:
                assert sum(rows) == edges, write
            else:
                assert rows == [1], (write, policy, learned)


def test_other_messages_are_not_taken_for_products(partitions: Partitions):
    data = make_graph()
    root = partitions(data, 2, "random")
    runs = [(write, SARPolicy(), False) for write in OTHERS.values()]
    for found in workers(rows_of_messages, 2, root, runs):
        for name, (rows, edges) in zip(OTHERS, found, strict=True):
            assert sum(rows) >= edges, name
    sweep = Sweep(2)
    for name, write in OTHERS.items():
        job = Job(Weighted(write), root, policies=SWITCHES[:1], constants=("edge_weight",))
        sweep.add(name, job, data)
    sweep.check()


def after_a_change(root: Path) -> tuple[Tensor, Tensor]:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(Weighted(column_first), SARPolicy(push="off"))
    x = data.x.requires_grad_()
    layer(x, data.edge_index, data.edge_weight)
    layer.scale = 2.0
    out = layer(x, data.edge_index, data.edge_weight)
    out.square().sum().backward()
    return whole(out.detach()), whole(x.grad)


def test_a_message_that_changed_is_noticed(partitions: Partitions):
    """Numbers don't make a layer be analysed again. The gradient is that of the new message."""
    data = make_graph()
    x = data.x.clone().requires_grad_()
    expected = 2 * Weighted(column_first)(x, data.edge_index, data.edge_weight)
    expected.square().sum().backward()
    for out, gradient in workers(after_a_change, 3, partitions(data, 3, "random")):
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(gradient, x.grad)


def in_bfloat16(root: Path) -> Tensor:
    data = pyg_sar.load_partition(root)
    layer = pyg_sar.distribute(Weighted(column_first))
    return whole(layer(data.x.bfloat16(), data.edge_index, data.edge_weight.bfloat16()))


def test_bfloat16(partitions: Partitions):
    data: Data = make_graph()
    expected = single_process(Weighted(column_first), data, constants=("edge_weight",)).out
    for out in workers(in_bfloat16, 2, partitions(data, 2, "random")):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.1)
