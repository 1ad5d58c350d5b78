"""Layers of the user: their classes travel, keep their names, and leave nothing of some edges."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import OUT, TOLERANCE, Partitions, alike, error, make_graph, parts, whole, workers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import DistMessagePassing, SARPolicy
from pyg_sar.errors import DistributedIndexError, WorkerError

CHANNELS, WORLD = 6, 2


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(30)


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, WORLD)


# Classes travel ##############################################################


def own_classes() -> dict[str, type[MessagePassing]]:
    """Classes that no other process can import, as those of ``__main__`` and of notebooks."""

    class Plain(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    class Updating(Plain):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            weight = self.edge_updater(edge_index, x=x)
            return self.propagate(edge_index, x=x, weight=weight)

        def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return (x_i * x_j).sum(-1, keepdim=True)

        def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
            return x_j * weight

    class OfGCN(gnn.GCNConv):
        def __init__(self) -> None:
            super().__init__(CHANNELS, 3)

        def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
            return 3 * edge_weight.view(-1, 1) * x_j

    return {"plain": Plain, "updating": Updating, "of GCN": OfGCN}


def test_layers_that_were_built_in_the_parent_run_in_workers(graph: Data, root: Path):
    """Their classes are of functions, and closures, arguments and results hold them."""
    built = {name: kind().double() for name, kind in own_classes().items()}
    expected = {
        name: layer(graph.x, graph.edge_index).detach() for name, layer in built.items()
    }  # once in one process, as everyone does

    def work(given: dict[str, MessagePassing]) -> Any:
        data = pyg_sar.load_partition(root)
        found = []
        for name, kind in own_classes_of(built).items():
            again = kind().double()
            again.load_state_dict(given[name].state_dict())
            for layer in (given[name], built[name], again):
                plain = layer(torch.ones(2, CHANNELS).double(), torch.tensor([[0, 1], [1, 0]]))
                out = pyg_sar.distribute(layer)(data.x, data.edge_index)
                found.append((name, whole(out.detach()), plain.detach()))
        return found, given["of GCN"].lin

    for found, lin in pyg_sar.launch(work, WORLD, built):
        assert len(found) == 3 * len(built) and torch.equal(lin.weight, built["of GCN"].lin.weight)
        for name, out, _ in found:
            assert error(out, expected[name]) <= TOLERANCE, name


def own_classes_of(built: dict[str, MessagePassing]) -> dict[str, type[MessagePassing]]:
    return {name: type(layer) for name, layer in built.items()}


# What a message leaves #######################################################


class Keeping(MessagePassing):
    """Its message keeps something by ``keep``, and its forward reads it by ``read``."""

    saved: Any = None

    def __init__(self, keep: Callable[..., Any], read: Callable[..., Any]) -> None:
        super().__init__()
        self.keep, self.read = keep, read
        self.items: list[Any] = []
        self.table: dict[str, Any] = {}
        self.total = torch.zeros(CHANNELS, dtype=torch.float64)
        self.kept: Tensor | None = torch.zeros(1)
        self.inner = torch.nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) + self.read(self)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        out = x_j * x_i.sigmoid()
        self.keep(self, out)
        return out


class KeepingEdges(Keeping):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, weight=weight) + self.read(self)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        weight = (x_i * x_j).sum(-1, keepdim=True).tanh()
        self.keep(self, weight)
        return weight

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight


def put(name: str, of: Callable[[Tensor], Any] = lambda m: m) -> Callable[..., Any]:
    return lambda layer, message: setattr(layer, name, of(message))


KEEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "of the class": (put("saved"), lambda layer: layer.saved.mean()),
    "new": (put("fresh"), lambda layer: layer.fresh.mean()),
    "in the place of another": (put("kept"), lambda layer: layer.kept.sum()),
    "of a module": (lambda s, m: setattr(s.inner, "saved", m), lambda s: s.inner.saved[0].sum()),
    "tuple": (put("pair", lambda m: (m, m)), lambda layer: layer.pair[0].mean()),
    "list": (put("pair", lambda m: [m]), lambda layer: layer.pair[0].mean()),
    "appended": (lambda s, m: s.items.append(m), lambda s: s.items[-1].mean()),
    "in a dict": (lambda s, m: s.table.update(m=m), lambda s: s.table["m"].mean()),
    "sum": (put("saved", lambda m: m.sum()), lambda layer: layer.saved),
    "number": (put("saved", lambda m: float(m.detach().sum())), lambda layer: layer.saved),
    "count": (put("saved", lambda m: m.size(0)), lambda layer: layer.saved),
    "in place": (lambda s, m: s.total.add_(m.detach().sum(0)), lambda s: s.total),
}


ROW_PER_EDGE = ("of the class", "new", "in the place of another", "of a module")


@pytest.mark.filterwarnings("ignore:Keeping :pyg_sar.errors.OneShotWarning")
def test_what_a_message_keeps_of_its_edges_is_right_or_refused(graph: Data, root: Path):
    """A tensor with a row per edge is refused where it is read, unless edge_update() keeps it.

    Mode 3 has it.
    """
    cases = list(product(KEEPS, [SARPolicy(mode=mode) for mode in (1, 2, 3)]))
    plain = KeepingEdges(*KEEPS["new"])(graph.x, graph.edge_index)
    expected = {}
    for name, kept in KEEPS.items():
        layer = Keeping(*kept)
        expected[name] = [layer(graph.x, graph.edge_index) for _ in range(2)]

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        attribute = r"'(inner\.)?(saved|fresh|kept)'"
        for name, policy in cases:
            layer = pyg_sar.distribute(Keeping(*KEEPS[name]), policy)
            for right in expected[name]:  # The second call as the first.
                if name not in ROW_PER_EDGE or policy.mode == 3:
                    assert error(whole(layer(data.x, data.edge_index)), right) <= TOLERANCE, name
                    continue
                with pytest.raises(DistributedIndexError, match=attribute) as caught:
                    layer(data.x, data.edge_index)
                assert "Keeping" in str(caught.value) and "mode=3" in str(caught.value)
        for policy in (SARPolicy(), SARPolicy(mode=3)):
            layer = pyg_sar.distribute(KeepingEdges(*KEEPS["new"]), policy)
            assert error(whole(layer(data.x, data.edge_index)), plain) <= TOLERANCE

    workers(worker, WORLD)
    assert all(bool(out.isfinite().all()) for outs in expected.values() for out in outs)


def test_what_nobody_reads_may_be_kept(graph: Data, root: Path):
    def run(data: Data, ready: Callable[[Any], Any]) -> list[Tensor]:
        found = []
        for policy in (SARPolicy(), SARPolicy(mode=3)):
            layer, x = ready(Keeping(KEEPS["new"][0], lambda s: 0)), data.x.clone().requires_grad_()
            layer.policy = policy
            out = layer(x, data.edge_index)
            out.square().sum().backward()
            found += [t.detach() for t in (out, x.grad, layer(x, data.edge_index))]
        return found

    alike(run, graph, root, WORLD)


# Names #######################################################################


class Own(gnn.GCNConv):
    pass


def named_model() -> torch.nn.Module:
    own = torch.nn.Module()
    own.conv1, own.own = gnn.GCNConv(CHANNELS, 4), Own(4, 4)
    own.gat, own.super = gnn.GATConv(4, 4, heads=2), gnn.SuperGATConv(8, 4)
    own.norm, own.batch = gnn.BatchNorm(4), torch.nn.BatchNorm1d(4)
    own.graph_norm, own.pool = gnn.GraphNorm(4), gnn.aggr.SumAggregation()
    own.gps = gnn.GPSConv(4, gnn.GINConv(gnn.MLP([4, 4, 4])), heads=2)
    own.stock = gnn.GraphSAGE(4, 4, 2, norm="BatchNorm")
    own.arma, own.gae = gnn.ARMAConv(4, 4), gnn.GAE(gnn.GCNConv(4, 4))
    return own


@pytest.mark.parametrize("world", [1, WORLD])
def test_a_model_prints_as_that_of_pyg(world: int):
    expected = named_model()

    def worker() -> None:
        model = named_model()
        pyg_sar.distribute(model)
        assert repr(model) == repr(expected)
        for mine, plain in zip(model.modules(), expected.modules(), strict=True):
            for part in ("__name__", "__qualname__", "__module__"):
                assert getattr(type(mine), part) == getattr(type(plain), part)
        assert list(model.state_dict()) == list(expected.state_dict())
        assert isinstance(model.conv1, DistMessagePassing)
        assert isinstance(model.conv1, gnn.GCNConv)
        assert repr(pyg_sar.distribute(model)) == repr(expected)  # once more

    parts(worker, world)


def test_errors_name_the_class_of_the_user(root: Path):
    def worker() -> None:
        data = pyg_sar.load_partition(root)
        pyg_sar.distribute(Own(CHANNELS, 4).double())(data.x[:3], data.edge_index)

    with pytest.raises(WorkerError) as caught:
        parts(worker, WORLD)
    notes = "\n".join(getattr(caught.value.__cause__, "__notes__", []))
    text = f"{caught.value}\n{notes}"
    assert "Own" in text and "DistOwn" not in text and "Own 'Own'" not in text


# Aggregates that are no tensor ###############################################


class Pair(MessagePassing):
    """Returns messages beside their sums, as neural-lam's layers do, or sums twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        total, other = self.propagate(edge_index, x=x)
        return total + other.sum()

    def message(self, x_j: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.norm(x_j), 0.5)


class Aggregates(Pair):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> tuple[Tensor, Tensor]:
        return super().aggregate(inputs, index, dim_size=dim_size), inputs


class Updates(Pair):
    def update(self, inputs: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, 2 * inputs


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("world", [1, WORLD])
def test_messages_of_a_layer_that_gives_tuples_run_once(
    world: int, graph: Data, partitions: Partitions
):
    """Numbers are drawn, statistics moved and tensors saved as in one process, at once."""
    root = partitions(graph, world, "random")

    def steps(data: Data, ready: Callable[[Any], Any]) -> list[Tensor]:
        found = []
        for kind, again in product((Aggregates, Updates), (False, True)):
            torch.manual_seed(0)
            layer, x = ready(kind().double()), data.x.clone().requires_grad_()
            given = layer, x, data.edge_index
            out = checkpoint(*given, use_reentrant=False) if again else layer(*given[1:])
            out.square().mean().backward()
            found += [out, x.grad, layer.norm.weight.grad, layer.norm.running_mean, torch.rand(2)]
        return [t.detach() for t in found]

    alike(steps, graph, root, world, parts)


class OfAllEdges(gnn.APPNP):
    """PyG's forward draws before its message, which depends on all edges."""

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * (x_j - x_j.mean(0))


class MapsBefore(gnn.SAGEConv):
    """PyG's forward moves statistics before its message, which depends on all edges."""

    def __init__(self) -> None:
        super().__init__(CHANNELS, OUT, project=True)
        norm = torch.nn.BatchNorm1d(CHANNELS)
        self.lin = torch.nn.Sequential(torch.nn.Linear(CHANNELS, CHANNELS), norm)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j - x_j.mean(0)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_what_comes_before_a_message_of_all_edges_runs_once(graph: Data, root: Path):
    def steps(data: Data, ready: Callable[[Any], Any]) -> list[Tensor]:
        found = []
        for make, again in product((lambda: OfAllEdges(3, 0.1, 0.4), MapsBefore), (False, True)):
            torch.manual_seed(0)
            layer, x = ready(make().double()), data.x.clone().requires_grad_()
            for _ in range(2):
                given = layer, x, data.edge_index
                out = checkpoint(*given, use_reentrant=False) if again else layer(*given[1:])
                out.square().mean().backward()
                found += [out, x.grad.clone(), *[b for b in layer.buffers() if b.dim()]]
            found.append(torch.rand(2))
        return [t.detach().clone() for t in found]

    alike(steps, graph, root, WORLD, parts)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("world", [1, 2])
def test_a_message_of_all_edges_on_an_object(world: int, graph: Data, partitions: Partitions):
    def out(data: Data, ready: Callable[[Any], Any]) -> Tensor:
        torch.manual_seed(0)
        layer = gnn.SAGEConv(CHANNELS, OUT).double()
        layer.message = lambda x_j: x_j.cumsum(0)
        return ready(layer)(data.x, data.edge_index)

    alike(out, graph, partitions(graph, world, "random"), world, parts)


# Edges of a batch ############################################################


class Batched(MessagePassing):
    """Nodes ``[B, N, F]``, and edges that are given once or for each of the batch."""

    def __init__(self, read: bool, flow: str) -> None:
        super().__init__(node_dim=-2, flow=flow)
        self.read = read

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        e = e.expand(2, -1, -1)
        return torch.cat([x_j, e], -1) if self.read else e


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("read", [True, False])
def test_edges_of_a_batch_are_right_or_refused(read: bool, flow: str, root: Path, graph: Data):
    """Their rows do not follow reversed edges; ``[E, *]`` does, as the error says."""

    def outs(data: Data, ready: Callable[[Any], Any], batched: bool) -> Tensor:
        e = torch.stack([data.edge_attr] * 2) if batched else data.edge_attr
        layer, x = ready(Batched(read, flow)), torch.stack([data.x, data.x])
        return layer(x, data.edge_index, e).transpose(0, 1)

    alike(partial(outs, batched=False), graph, root, WORLD, parts)
    refused = pytest.raises(WorkerError, match=r"Batched \(rank 0\) takes 'e' of shape \[2, ")
    with refused if flow == "target_to_source" else nullcontext():
        alike(partial(outs, batched=True), graph, root, WORLD, parts)
