"""Rows that are exchanged in every k-th step: what is kept, what is sent, what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import CHANNELS, OUT, Partitions, make_graph, node_losses, parts, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.exchange.gather import halo_gather
from pyg_sar.train import TrainConfig, gradient_error
from pyg_sar.train.wire_error import ALL

WORLD, NODES = 3, 50
STALE = SARPolicy(mode=3, refresh_every=2, transform_first=False)


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(NODES, 300)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, graph: Data) -> Path:
    return Partitions(tmp_path_factory.mktemp("stale"))(graph, WORLD, "random")


class Weighted(MessagePassing):
    """A message that multiplies by a parameter, and whose gradient needs source values."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(CHANNELS, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if isinstance(x, tuple):
            return self.propagate(edge_index, x=x, size=(x[0].size(0), x[1].size(0)))
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return torch.tanh(self.lin(x_j) * x_i[:, :1])


def plain_step(layer: Any, ext: Tensor, edges: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """One worker's loss by plain PyG on its own edges: gradients of all rows, and of parameters."""
    ext = ext.clone().requires_grad_()
    layer.zero_grad()
    out = layer((ext, ext[: ids.numel()]), edges)
    (node_losses(out, ids).sum() / NODES).backward()
    return out.detach(), ext.grad, *(p.grad for p in layer.parameters())


@pytest.mark.parametrize("name", ["sage", "weighted", "gat"])
def test_steps_with_and_without_exchange(name: str, root: Path, graph: Data):
    """The oracle: plain PyG on a worker's own edges, with halo rows of an older step."""
    torch.manual_seed(0)
    plain = {
        "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
        "weighted": Weighted,
        "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, add_self_loops=False),
    }[name]().double()
    steps = [graph.x * scale + shift for scale, shift in ((1.0, 0.0), (1.3, 0.2), (0.7, -0.1))]

    def worker() -> None:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        ids, index = data.x.rows.ids, data.edge_index.to_local()
        halo = halo_gather(ids, index.plan)[ids.numel() :]
        layer = pyg_sar.distribute(copy.deepcopy(plain), STALE)
        own = copy.deepcopy(plain)
        kept_rows = kept_sums = None
        sent = []
        for k, whole in enumerate(steps):
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(0.0)  # An optimizer's step.
            layer.zero_grad()
            x = pyg_sar.from_local(whole[ids], data).requires_grad_()
            with pyg_sar.Ledger(comm) as ledger:
                out = layer(x, data.edge_index)
                node_losses(out).mean().backward()
            sent.append(sum(ledger.sent_bytes(kind=kind) for kind in ("fetch", "gradient")))
            found, found_gradient = out.detach().to_local(), x.grad.to_local()
            if k % 2 == 0:
                kept_rows = whole[halo]
            expected, gradient, *parameters = plain_step(
                own, torch.cat([whole[ids], kept_rows]), index.as_subclass(Tensor), ids
            )
            assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
            if k % 2 == 0:  # What came from others is what is not of the own edges.
                kept_sums = found_gradient - gradient[: ids.numel()]
                exact = pyg_sar.distribute(copy.deepcopy(plain), replace(STALE, refresh_every=1))
                y = pyg_sar.from_local(whole[ids], data).requires_grad_()
                node_losses(exact(y, data.edge_index)).mean().backward()
                assert torch.equal(y.grad, x.grad)
            assert torch.allclose(
                found_gradient, gradient[: ids.numel()] + kept_sums, rtol=1e-9, atol=1e-12
            )
            for (key, parameter), part in zip(layer.named_parameters(), parameters, strict=True):
                total = comm.all_reduce(part.clone())
                if k % 2 and name == "gat" and key != "bias":
                    continue  # GAT maps rows before they travel: kept gradients meet new features.
                assert torch.allclose(parameter.grad, total, rtol=1e-9, atol=1e-12), key
        assert sent[0] > 0 and sent[1] == 0 and sent[2] == sent[0]
        layer.eval()  # Evaluation is exact, and leaves what is kept.
        with torch.no_grad():
            exact_out = layer(data.x, data.edge_index)
        assert torch.allclose(exact_out, plain(graph.x, graph.edge_index), atol=1e-12)

    workers(worker, WORLD)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([gnn.GCNConv(CHANNELS, 8), gnn.SAGEConv(8, OUT)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


def test_the_meter_measures_the_next_step(root: Path):
    """The error is 0 in steps with an exchange, and measuring changes no step."""

    def worker() -> list[float]:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        errors, results = [], []
        for measures in (True, False):
            torch.manual_seed(1)
            model = pyg_sar.distribute(Net().double(), SARPolicy(mode=3, refresh_every=3))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

            def step(model: Any = model, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                out = model(data.x, data.edge_index)
                node_losses(out).mean().backward()

            for _ in range(7):
                if measures:
                    errors.append(gradient_error(model, step)[ALL])
                step()
                if measures:  # What was measured is the step that was taken.
                    found = [p.grad.clone() for p in model.parameters()]
                    for layer in model.convs:
                        layer.policy = SARPolicy(mode=3)
                    step()
                    true = [p.grad for p in model.parameters()]
                    apart = sum((a - b).square().sum() for a, b in zip(found, true, strict=True))
                    size = sum(b.square().sum() for b in true)
                    assert errors[-1] == pytest.approx(float(apart / size) ** 0.5, abs=1e-12)
                    for p, gradient in zip(model.parameters(), found, strict=True):
                        p.grad = gradient
                    for layer in model.convs:
                        layer.policy = SARPolicy(mode=3, refresh_every=3)
                optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
            assert comm.world_size == WORLD
        assert all(map(torch.equal, *results))
        return errors

    first, *others = workers(worker, WORLD)
    assert all(other == first for other in others)
    assert [error == 0 for error in first] == [k % 3 == 0 for k in range(7)]
    assert max(first) > 1e-3


def test_in_a_training(root: Path):
    config = TrainConfig(epochs=4, lr=0.01, eval_every=2)

    def worker(every: int) -> Any:
        data = pyg_sar.load_partition(root)
        torch.manual_seed(1)
        policy = SARPolicy(mode=3, refresh_every=every, measure_every=1)
        model = pyg_sar.distribute(gnn.GraphSAGE(CHANNELS, 8, 2, 3).double(), policy)
        with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
            result = pyg_sar.Trainer(model, data, config).fit()
        return [errors[ALL] for errors in ledger.gradient_errors], result.losses

    stale, losses = workers(worker, WORLD, 2)[0]
    exact, true = workers(worker, WORLD, 1)[0]
    assert exact == [] and [error > 0 for error in stale] == [False, True, False, True]
    assert losses[0] == true[0] and losses[1] != true[1]


def test_what_is_not_supported_is_refused(root: Path, graph: Data):
    for options in ({"refresh_every": 0}, {"refresh_every": True}, {"refresh_every": 1.5}):
        with pytest.raises(ValueError, match="'refresh_every' to be an integer of at least 1"):
            SARPolicy(mode=3, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"refresh_every=2 needs mode=3 \(got mode=1\)"):
        SARPolicy(refresh_every=2)
    with pytest.raises(ValueError, match="'policy' has refresh_every=2"):
        pyg_sar.verify(gnn.SAGEConv(CHANNELS, OUT), graph, 2, policy=STALE)

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT).double(), STALE)
        layer(data.x, data.edge_index)
        with pytest.raises(ValueError, match="called twice without an optimizer step"):
            layer(data.x, data.edge_index)
        layer = pyg_sar.distribute(gnn.SimpleConv(), STALE)
        with pytest.raises(ValueError, match="has no parameter to train"):
            layer(data.x, data.edge_index)
        x = data.x.clone().requires_grad_()
        layer = pyg_sar.distribute(Weighted().double(), STALE)
        (gradient,) = torch.autograd.grad(layer(x, data.edge_index).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()
        flow = pyg_sar.partition.message_flow_graphs(data, data.train_mask, 1)
        layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT).double(), STALE)
        with pytest.raises(Exception, match="refresh_every=2.*message flow graph"):
            pyg_sar.train.check_flow(layer, data, flow)
            layer(flow.x, flow.edge_index)

    workers(worker, WORLD)
    with pytest.raises(Exception, match="parts that a worker hosts in turn"):
        parts(hosted, WORLD, root)


def hosted(root: Path) -> None:
    data = pyg_sar.load_partition(root)
    pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT).double(), STALE)(data.x, data.edge_index)
