"""Parameters' gradients as one process has them: where no edge is, and through ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from oracle import Partitions, make_graph, parts
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINEConv,
    HeteroConv,
    HGTConv,
    LayerNorm,
    MessagePassing,
    NNConv,
    SAGEConv,
    TransformerConv,
    to_hetero,
)
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.message.layer_facts import facts_of
from pyg_sar.tensors import NodeTensor


class Reads(MessagePassing):
    """Reads parameters in ``message``, a frozen one too, an unread one, and in ``update``."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.unread, self.last = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(x_j).relu() * x_i[:, :3] * self.frozen

    def update(self, inputs: Tensor) -> Tensor:
        return self.last(inputs)


class Updates(MessagePassing):
    """Reads its parameters in ``edge_update`` alone."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(8, 4)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=self.edge_updater(edge_index, x=x))

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], -1)).sigmoid()

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return x_j * e


class Aggregates(MessagePassing):
    """Has its parameter in the aggregation."""

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x.abs())


class Products(MessagePassing):
    """Needs its parameters and the source rows in the backward pass."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(x_j).tanh() * x_i[:, :3]


class Switches(MessagePassing):
    """Needs what another attribute says."""

    gates = False

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j * (x_i * x_j).sigmoid() if self.gates else x_j


class Alone(nn.Module):
    """A layer that takes no edge attributes."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    found = [
        Reads(),
        Updates(),
        Aggregates(SoftmaxAggregation(learn=True)),
        Aggregates(PowerMeanAggregation(learn=True)),
        Alone(GCNConv(4, 3)),
        Alone(SAGEConv(4, 3, project=True)),
        Alone(GATConv(4, 3, add_self_loops=False)),
        Alone(EdgeConv(nn.Linear(8, 3))),
        Alone(EdgeConv(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)))),
        NNConv(4, 3, nn.Linear(2, 12)),
        GINEConv(nn.Linear(4, 3), edge_dim=2, train_eps=True),
        TransformerConv(4, 3, edge_dim=2),
        GATConv(4, 3, edge_dim=2, add_self_loops=False),
        GATv2Conv(4, 3, edge_dim=2, add_self_loops=False),
    ]
    return [model.double() for model in found]


RELATIONS = [("a", "to", "b"), ("b", "to", "a"), ("a", "near", "a")]


class Relations(nn.Module):
    """A layer for each relation, twice; ``b`` is a node type without nodes on the last worker."""

    def __init__(self, make: Callable[[], nn.Module], attributes: bool) -> None:
        super().__init__()
        self.attributes = attributes
        layers = [HeteroConv({kind: make() for kind in RELATIONS}) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: dict[str, Tensor], edges: Any, attributes: Any) -> Tensor:
        given = {"edge_attr_dict": attributes} if self.attributes else {}
        for layer in self.layers:
            x = layer(x, edges, **given)
        return torch.cat([x["a"], x["b"]])


class Converted(nn.Module):
    """What takes dictionaries of features and of edges."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, Tensor], edges: Any, attributes: Any) -> Tensor:
        out = self.model(x, edges)
        return torch.cat([out["a"], out["b"]])


class TwoLayers(nn.Module):
    """To be converted by ``to_hetero``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv((4, 4), 4, add_self_loops=False)
        self.second = SAGEConv((4, 4), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def hetero_models() -> list[nn.Module]:
    torch.manual_seed(0)
    both, kinds = (4, 4), (["a", "b"], RELATIONS)
    found = [
        Relations(lambda: SAGEConv(both, 4), False),
        Relations(lambda: GATConv(both, 4, add_self_loops=False, edge_dim=2), True),
        Relations(lambda: NNConv(both, 4, nn.Linear(2, 16)), True),
        Relations(lambda: EdgeConv(nn.Linear(8, 4)), False),
        Converted(to_hetero(TwoLayers(), kinds)),
        Converted(HGTConv(4, 4, kinds)),
    ]
    return [model.double() for model in found]


def hetero_graph(counts: list[int]) -> HeteroData:
    """A graph with as many edges of each relation, to nodes of the first worker."""
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(8, 4).double(), torch.randn(6, 4).double()
    for kind, count in zip(RELATIONS, counts, strict=True):
        data[kind].edge_index = torch.randint(0, 4, (2, count))
        data[kind].edge_attr = torch.randn(count, 2).double()
    return data


def stepped(model: nn.Module, data: Any) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients, and parameters after a step with weight decay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    kinds = "_dict" if isinstance(data, HeteroData) else ""
    given = [getattr(data, f"{name}{kinds}") for name in ("x", "edge_index", "edge_attr")]
    model(*given).square().sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return gradients, [p.detach() for p in model.parameters()]


def cases(count: int, key: str) -> list[tuple[int, int]]:
    """Numbers of models and modes: of each model one mode, or all."""
    return [(k, m) for k in range(count) for m in some((1, 2, 3), f"{key} {k}", 3)]


def trained(root: Path, every: list[nn.Module], chosen: list[tuple[int, int]]) -> list[Any]:
    data, found = pyg_sar.load_partition(root), []
    for number, mode in chosen:
        model = pyg_sar.distribute(copy.deepcopy(every[number]), SARPolicy(mode=mode))
        found.append(stepped(model, data))
    return found


def same(
    got: list[Any], right: list[Any], every: list[nn.Module], chosen: list[tuple[int, int]]
) -> None:
    for (number, _), one in zip(chosen, got, strict=True):
        expected, model = right[number], every[number]
        names = [name for name, _ in model.named_parameters()]
        pairs = zip([*one[0], *one[1]], [*expected[0], *expected[1]], strict=True)
        for k, (mine, plain) in enumerate(pairs):
            name = f"{type(model).__name__} {number}: {names[k % len(names)]}"
            assert (mine is None) == (plain is None), name
            if mine is not None:
                torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("some_edges", [False, True])
def test_gradients_are_there_where_one_process_has_them(some_edges: bool, tmp_path: Path) -> None:
    """No edge anywhere; and edges of the first worker only."""
    torch.manual_seed(1)
    edges = torch.randint(0, 4, (2, 9)).unique(dim=1) if some_edges else torch.empty(2, 0).long()
    attributes = torch.randn(edges.size(1), 2).double()
    data = Data(torch.randn(10, 4).double(), edges, attributes, num_nodes=10)
    every = models()
    right = [stepped(copy.deepcopy(model), data) for model in every]
    root = Partitions(tmp_path)(data, 2, "contiguous")
    hosted = cases(len(every), f"{some_edges}")
    first = [(k, 1) for k in some(range(len(every)), f"{some_edges} first", 2)]
    for chosen, found in (
        (hosted, parts(trained, 2, root, every, hosted)),
        (first, pyg_sar.launch(trained, 2, root, every, first)),
    ):
        for got in found:
            same(got, right, every, chosen)


def switched(data: Any, layers: list[nn.Module]) -> list[Tensor]:
    """Gradients before and after attributes change."""
    found = []
    for layer in layers:
        for gates in (False, True, True):
            layer.gates = gates
            x = data.x.clone().requires_grad_()
            layer(x, data.edge_index).square().sum().backward()
            found.append(x.grad)
    return [t.full_tensor() if isinstance(t, NodeTensor) else t for t in found]


def test_workers_without_edges_follow_a_layer_that_changes(tmp_path: Path) -> None:
    def on_part(root: Path) -> list[Tensor]:
        data = pyg_sar.load_partition(root)
        layers = [pyg_sar.distribute(Switches(), SARPolicy(mode=mode)) for mode in (1, 2, 3)]
        found = switched(data, layers)
        assert [len(facts_of(layer).silent) for layer in layers] == [2, 2, 2]
        return found

    data = make_graph()
    root = Partitions(tmp_path)(data, 2, torch.zeros(40, dtype=torch.long))
    right = switched(data, [Switches() for _ in range(3)])
    for found in parts(on_part, 2, root):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


def all_trained(roots: list[Path], chosen: list[Any]) -> list[Any]:
    return [trained(root, hetero_models(), c) for root, c in zip(roots, chosen, strict=True)]


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_relations_without_edges(tmp_path: Path) -> None:
    """No relation has edges; one has none; two have none."""
    torch.manual_seed(2)
    every = hetero_models()
    graphs = [hetero_graph(counts) for counts in ([0, 0, 0], [9, 0, 7], [9, 0, 0])]
    right = [[stepped(copy.deepcopy(model), data) for model in every] for data in graphs]
    owners = {"a": torch.arange(8) // 4, "b": torch.zeros(6, dtype=torch.long)}
    roots = [tmp_path / str(number) for number in range(len(graphs))]
    for data, root in zip(graphs, roots, strict=True):
        pyg_sar.write_partitions(data, 2, root, owners)
    chosen = [cases(len(every), root.name) for root in roots]
    for worker in parts(all_trained, 2, roots, chosen):
        for found, expected, own in zip(worker, right, chosen, strict=True):
            same(found, expected, every, own)


def replaced(model: nn.Module, data: Any, learns: bool) -> list[Tensor | None]:
    """Value and gradients of a call with other parameters, which want gradients or don't."""
    x = data.x.clone().requires_grad_()
    other = {name: (2 * p.detach()).requires_grad_(learns) for name, p in model.named_parameters()}
    given = (x,) if isinstance(model, LayerNorm) else (x, data.edge_index)
    loss = functional_call(model, other, given).square().mean()
    wanted = [x, *other.values()] if learns else [x]
    found = [loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]
    return [t.full_tensor() if isinstance(t, NodeTensor) else t for t in found]


def transforms(model: nn.Module, data: Any) -> dict[str, Callable[[], Any]]:
    one = torch.ones(2, dtype=torch.float64)
    edges = () if isinstance(model, nn.Linear | LayerNorm) else (data.edge_index,)

    def run(s: Tensor) -> Tensor:
        return model(data.x * s, *edges).square().mean()

    return {
        "grad": lambda: grad(run)(one[0]),
        "jacrev": lambda: jacrev(run)(one[0]),
        "vmap": lambda: vmap(run)(one),
        "jvp": lambda: torch.stack(jvp(run, (one[0],), (one[0],))),
    }


def ensembles(linear: nn.Linear, data: Any) -> list[Tensor]:
    """Several weights at once, and the gradient by others."""
    weights = torch.stack([linear.weight.detach(), 2 * linear.weight.detach()])
    run = lambda w: functional_call(linear, {"weight": w}, data.x).square().mean(0)  # noqa: E731
    return [vmap(run)(weights), grad(lambda w: run(w).sum())(weights[1])]


def whole_models() -> list[nn.Module]:
    torch.manual_seed(3)
    found = [GCNConv(6, 3), EdgeConv(nn.Linear(12, 3)), GATConv(6, 3), Products(), LayerNorm(6)]
    return [model.double() for model in found]


def transformed(root: Path) -> list[Any]:
    data, found = pyg_sar.load_partition(root), []
    for mode in (1, 2):
        for plain in whole_models():
            model = pyg_sar.distribute(plain, SARPolicy(mode=mode))
            found.append([replaced(model, data, learns) for learns in (True, False)])
            for call in transforms(model, data).values():
                with pytest.raises(
                    pyg_sar.errors.DistributedIndexError, match=r"torch\.func\."
                ) as e:
                    call()
                assert "autograd.grad" in str(e.value) or "loop" in str(e.value)
    torch.manual_seed(4)
    linear = pyg_sar.distribute(nn.Linear(6, 3).double())
    calls = transforms(linear, data)
    out, many = linear(data.x).mean(0), torch.eye(3, dtype=torch.float64)
    with pytest.raises(pyg_sar.errors.DistributedIndexError, match="is_grads_batched"):
        torch.autograd.grad(out, linear.weight, many, is_grads_batched=True)
    calculated = [calls[name]() for name in ("grad", "jacrev", "vmap")]
    return [found, calculated + ensembles(linear, data)]


def test_transforms_between_tensors_of_the_whole_graph(tmp_path: Path) -> None:
    """Layers refuse them, or are right; with others' parameters layers are right, too."""
    data = make_graph()
    right = [[replaced(m, data, learns) for learns in (True, False)] for m in whole_models()]
    torch.manual_seed(4)
    linear = nn.Linear(6, 3).double()
    calls = transforms(linear, data)
    calculated = [calls[name]() for name in ("grad", "jacrev", "vmap")]
    expected = [2 * right, calculated + ensembles(linear, data)]
    root = Partitions(tmp_path)(data, 2, "random")
    for worker in parts(transformed, 2, root):
        torch.testing.assert_close(worker, expected, rtol=1e-10, atol=1e-10)
