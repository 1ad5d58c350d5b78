"""Parameter gradients that are summed behind the backward pass, in buckets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import CHANNELS, OUT, TOLERANCE, Partitions, error, make_graph, node_losses, threads
from torch import Tensor
from torch_geometric.nn import GATConv, SAGEConv

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.reduction.gradients import GradientSum


class Model(torch.nn.Module):
    """Three layers, and a projection whose use depends on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [SAGEConv(CHANNELS, 8), GATConv(8, 4, heads=2), SAGEConv(8, OUT)]
        )
        self.last = torch.nn.Linear(OUT, OUT)
        self.step = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        late = self.step == 3
        if late:  # The projection's gradient is complete at the very end of the pass.
            x = torch.nn.functional.pad(self.last(x[:, :OUT]), (0, CHANNELS - OUT)) + x
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x if self.step == 4 else self.last(x)


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def steps(model: Any, inner: Model, x: Tensor, edge_index: Tensor, ids: Tensor, mean: Any) -> Any:
    """Passes with a complete, a later, a missing gradient, and one on top of another."""
    found = []
    for step in (0, 1, 2, 3, 4, 5, 5):
        inner.step = step
        if step != 5:
            model.zero_grad()
        mean(node_losses(model(x, edge_index), ids)).backward()
        found.append(gradients(inner))
    return found


@contextmanager
def recorded(comm: Any) -> Iterator[list[str]]:
    """What is submitted, in its order: ``'sum'`` of gradients, gradient ``'rows'``, or other."""
    log: list[str] = []
    submit = comm._issuer.submit

    def submitting(task: Any, label: Any, doing: str) -> Any:
        kinds = {"gradient sum": "sum", "gradient": "rows"}
        log.append(kinds.get(label[2], "other") if label[1] == "backward" else "other")
        return submit(task, label, doing)

    comm._issuer.submit = submitting
    try:
        yield log
    finally:
        comm._issuer.submit = submit


def work(root: Any, model: Model, policy: SARPolicy) -> Any:
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root, view="local")
    model = pyg_sar.distribute(copy.deepcopy(model), policy, view="local")
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, GradientSum):
            hook.bucket_bytes = 1
    found = steps(model, model, data.x, data.edge_index, data.n_id, pyg_sar.mean)
    fresh = copy.deepcopy(model)
    fresh.step = 0
    orders = []
    for _ in range(2 if comm.world_size > 1 else 0):
        with recorded(comm) as log:
            out = fresh(data.x, data.edge_index)
            pyg_sar.mean(node_losses(out, data.n_id)).backward()
        orders.append(log)
    out = fresh(data.x, data.edge_index)
    losses = pyg_sar.mean(node_losses(out, data.n_id))
    before = gradients(fresh)
    named = dict(fresh.named_parameters())
    given = dict(zip(named, torch.autograd.grad(losses, list(named.values())), strict=True))
    after = gradients(fresh)
    unchanged = all(error(after[name], before[name]) == 0 for name in before)
    return found, orders, given, unchanged


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "policy",
    [SARPolicy(), SARPolicy(mode=3), SARPolicy(prefetch=0, strategy="chunked")],
    ids=["shards", "one shot", "chunks"],
)
def test_buckets(world: int, policy: SARPolicy, tmp_path):
    """Exact whether a gradient is there at its point, later, or never; and sent before the end."""
    data = make_graph(30, 150)
    part = torch.arange(30) % world
    if world > 2:
        part[part == 1] = 0  # A worker without nodes.
    root = Partitions(tmp_path)(data, world, part)
    torch.manual_seed(0)
    model = Model().double()
    plain = copy.deepcopy(model)
    ids = torch.arange(30)
    expected = steps(plain, plain, data.x, data.edge_index, ids, torch.mean)
    workers = threads(work, world, root, model, policy)
    assert world == 1 or any("rows" in orders[1] for _, orders, _, _ in workers)
    for found, orders, given, unchanged in workers:
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            scale = max(float(g.abs().max()) for g in theirs.values() if g is not None)
            for name in theirs:
                assert error(ours[name], theirs[name], scale) <= TOLERANCE, (step, name)
        assert found[4]["last.weight"] is None
        assert unchanged
        scale = max(float(g.abs().max()) for g in expected[0].values())
        for name in given:
            assert error(given[name], expected[0][name], scale) <= TOLERANCE, name
        if world > 1:
            first, second = orders
            assert first[-2:] == ["sum"] * 2 and "sum" not in first[:-2]  # The sum; what is learnt.
            assert second[-2:] == ["sum"] * 2  # What is left; whether anything came late.
            assert second.count("sum") > 2
            if "rows" not in second:  # The worker without nodes.
                assert found[0]["last.weight"] is not None and world > 2
                continue
            assert second.index("sum") < len(second) - 1 - second[::-1].index("rows")
