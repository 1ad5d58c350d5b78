"""Tensors of the whole graph: code of one process computes its numbers on several."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from combinations import some
from oracle import alike, parts
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data, HeteroData
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.typing import WITH_TORCH_SPARSE
from torch_geometric.utils import (
    batched_negative_sampling,
    coalesce,
    negative_sampling,
    remove_self_loops,
    structured_negative_sampling,
    to_edge_index,
)

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import NodeTensor, whole

NODES, EDGES, CLASSES, WIDTH = 60, 240, 3, 16
DOUBLE = torch.float64


def make_graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(NODES, 8, dtype=DOUBLE, generator=draw),
        edge_index=torch.randint(0, NODES, (2, EDGES), generator=draw),
        y=torch.randint(0, CLASSES, (NODES,), generator=draw),
        train_mask=torch.rand(NODES, generator=draw) < 0.5,
        train_idx=torch.randperm(NODES, generator=draw)[:20],
        edge_type=torch.randint(0, 3, (EDGES,), generator=draw),
        edge_attr=torch.randn(EDGES, 4, dtype=DOUBLE, generator=draw),
        edge_label_index=torch.randint(0, NODES, (2, 30), generator=draw),
        edge_label=torch.randint(0, 2, (30,), generator=draw).to(DOUBLE),
    )


class Net(torch.nn.Module):
    """Layers between operators that mix all nodes, parameters that meet them, and a norm."""

    def __init__(self, conv: Callable[[int, int], Any], edges: str = "") -> None:
        super().__init__()
        self.first, self.second = conv(8, WIDTH), conv(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)
        self.head, self.scale = torch.nn.Linear(WIDTH, CLASSES), torch.nn.Parameter(torch.ones(1))
        self.edges = edges

    def forward(self, data: Data) -> Tensor:
        more = (data[self.edges],) if self.edges else ()
        x = F.relu(self.norm(self.first(data.x, data.edge_index, *more)))
        x = F.dropout(x, 0.3, self.training)
        x = x - x.mean(0)
        x = self.second(x, data.edge_index, *more) + x * self.scale
        return self.head(torch.cat([x, x.softmax(-1)], dim=-1)[:, :WIDTH])


def relations(x: Tensor, edge_index: Tensor, kind: Tensor, convs: Any) -> Tensor:
    return sum(conv(x, edge_index[:, kind == k]) for k, conv in enumerate(convs))


class Relational(torch.nn.Module):
    """A layer for the edges of each kind, which the model itself selects."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(gnn.SAGEConv(8, CLASSES) for _ in range(3))
        self.other = gnn.GraphConv(8, CLASSES)

    def forward(self, data: Data) -> Tensor:
        out = relations(data.x, data.edge_index, data.edge_type, self.convs)
        return out + self.other(data.x, data.edge_index.flip([0]))


class Linkx(torch.nn.Module):
    """A weight with a row per node, beside what all workers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gnn.LINKX(NODES, 8, WIDTH, CLASSES, num_layers=2)

    def forward(self, data: Data) -> Tensor:
        return self.model(data.x, data.edge_index)


class Ids(torch.nn.Module):
    """A layer that has a row of its weight for each node, and takes them by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.FastRGCNConv(NODES, CLASSES, 3, num_bases=2)

    def forward(self, data: Data) -> Tensor:
        return self.conv(None, data.edge_index, data.edge_type)


class SelfSupervised(torch.nn.Module):
    """A layer whose loss is of edges that it samples, and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.SuperGATConv(
            8, CLASSES, 2, concat=False, dropout=0.3, edge_sample_ratio=0.8
        )

    def forward(self, data: Data) -> Tensor:
        out = self.conv(data.x, data.edge_index)
        return out + self.conv.get_attention_loss()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: Net(gnn.GCNConv),
    "sage": lambda: Net(gnn.SAGEConv),
    "gat": lambda: Net(lambda i, o: gnn.GATConv(i, o // 4, heads=4)),
    "transformer": lambda: Net(lambda i, o: gnn.TransformerConv(i, o, edge_dim=4), "edge_attr"),
    "gin": lambda: Net(lambda i, o: gnn.GINConv(gnn.MLP([i, WIDTH, o]))),
    "directed": lambda: Net(lambda i, o: gnn.DirGNNConv(gnn.SAGEConv(i, o))),
    "rgcn": lambda: Net(lambda i, o: gnn.RGCNConv(i, o, 3), "edge_type"),
    "pna": lambda: Net(
        lambda i, o: gnn.PNAConv(i, o, ["mean", "std"], ["identity"], torch.ones(9))
    ),
    "selected edges": Relational,
    "gat with dropout": lambda: Net(lambda i, o: gnn.GATConv(i, o // 4, heads=4, dropout=0.4)),
    "linkx": Linkx,
    "fast rgcn": lambda: Net(lambda i, o: gnn.FastRGCNConv(i, o, 3), "edge_type"),
    "fast rgcn without features": Ids,
    "super gat": SelfSupervised,
    "arma with dropout": lambda: Net(lambda i, o: gnn.ARMAConv(i, o, 2, 2, dropout=0.4)),
}


def train(model: torch.nn.Module, data: Any) -> list[Any]:
    """Losses, metrics and gradients of a few epochs, as a script for one process writes them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    torch.manual_seed(2)
    random.seed(2)
    found: list[Any] = []
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        out = model(data)
        mask = data.train_mask
        loss = F.cross_entropy(out[mask], data.y[mask])
        loss = loss + 1e-2 * sum(p.square().sum() for p in model.parameters())
        loss = loss + F.nll_loss(out.log_softmax(-1)[data.train_idx], data.y[data.train_idx])
        source, target = data.edge_label_index
        scores = (out[source] * out[target]).sum(-1)
        loss = loss + F.binary_cross_entropy_with_logits(scores, data.edge_label)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(data).argmax(-1) == data.y
        found += [loss.item(), int(right.sum()), int(right[mask].sum()) / int(mask.sum())]
    return found + [p.grad.clone() for p in model.parameters()]


def built(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().to(DOUBLE)


def worker(root: str, names: list[str]) -> list[list[Any]]:
    data = pyg_sar.load_partition(root)
    return [train(pyg_sar.distribute(built(name)), data) for name in names]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    made: dict[int, str] = {}

    def make(world: int) -> str:
        if world not in made:
            made[world] = str(tmp_path_factory.mktemp("global") / "parts")
            pyg_sar.write_partitions(make_graph(), world, made[world])
        return made[world]

    return make


@pytest.mark.parametrize("world", [1, 3])
def test_training_gives_the_numbers_of_one_process(world: int, roots: Callable[[int], str]) -> None:
    names = some(list(MODELS), f"{world}", 5 if world == 1 else 3)
    expected = [train(built(name), make_graph()) for name in names]
    # Workers in processes: each draws from a generator of its own.
    for found in pyg_sar.launch(worker, world, roots(world), names):
        for name, one, other in zip(names, expected, found, strict=True):
            torch.testing.assert_close(
                other, one, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


# What a script sees ###########################################################


def looks(data: Data) -> list[Any]:
    index = data.edge_index
    return [
        *(
            data.num_nodes,
            data.num_edges,
            data.num_features,
            list(data.x.shape),
            list(data.to_dict())[:3],
        ),
        *(index.tolist(), index[0].tolist(), (index[0] == index[1]).sum().item(), int(index.max())),
        *(
            data.x[index[0]].sum(0).tolist(),
            data.train_idx.tolist(),
            data.edge_label_index.tolist(),
        ),
        *(len(repr(data)), data.edge_attr.mean().item(), len(data.y), data.is_directed()),
        *(data.x[data.edge_index[0, :5]].tolist(), data.edge_type.bincount().tolist()),
    ]


def test_the_data_is_that_of_the_whole_graph(roots: Callable[[int], str]) -> None:
    expected = looks(make_graph())
    run = lambda root: looks(pyg_sar.load_partition(root))  # noqa: E731
    for found in pyg_sar.launch(run, 1, roots(2), parts=2):
        for one, other in zip(expected, found, strict=True):
            if isinstance(one, float) or (
                isinstance(one, list) and one and isinstance(one[0], float)
            ):
                torch.testing.assert_close(torch.tensor(other), torch.tensor(one))
            else:
                assert other == one


def test_workers_draw_alike(roots: Callable[[int], str]) -> None:
    """NumPy and Python draw one process's splits."""

    def run(root: str) -> list[Any]:
        rank = pyg_sar.comm.current().rank
        np.random.seed(rank)
        random.seed(rank)
        pyg_sar.load_partition(root)
        return [np.random.permutation(NODES).tolist(), random.random()]

    first, second = pyg_sar.launch(run, 1, roots(2), parts=2)
    assert first == second


def test_what_has_no_global_view_is_refused_by_name(roots: Callable[[int], str]) -> None:
    def refused(root: str) -> None:
        data = pyg_sar.load_partition(root)
        conv = pyg_sar.distribute(gnn.GCNConv(8, 2).to(DOUBLE))
        with pytest.raises(DistributedIndexError, match="no edges of which it is known"):
            conv((data.x, None), torch.randint(0, NODES, (2, 9)))
        assert isinstance(conv(torch.ones(NODES, 8, dtype=DOUBLE), data.edge_index), NodeTensor)

    pyg_sar.launch(refused, 1, roots(2), parts=2)


class Hidden(torch.nn.Module):
    """A layer whose inputs no hook sees: the model holds them itself."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.conv, self.held = gnn.SAGEConv(8, 2).to(DOUBLE), [data]

    def forward(self) -> Tensor:
        return self.conv(self.held[0].x, self.held[0].edge_index)


def test_layers_refuse_a_workers_own_rows(roots: Callable[[int], str]) -> None:
    """Gradients would not be summed."""

    def mixed(root: str) -> None:
        data = pyg_sar.load_partition(root)
        own = Data(data.x.to_local(), data.edge_index.to_local())
        refusal = partial(pytest.raises, DistributedIndexError)
        conv = pyg_sar.distribute(gnn.SAGEConv(8, 2).to(DOUBLE))
        with refusal(match="got a worker's own"):
            conv(own.x, own.edge_index)
        with refusal(match="got a worker's own"):
            pyg_sar.distribute(Net(gnn.SAGEConv).to(DOUBLE))(own)
        with refusal(match="got a worker's own"):
            pyg_sar.distribute(Hidden(own))()
        with refusal(match="of this worker's rows alone"):
            conv(own.x, data.edge_index)
        with refusal(match="no edges of which it is known"):
            conv(data.x, own.edge_index)

    pyg_sar.launch(mixed, 1, roots(2), parts=2)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an end": lambda e, kind: e.__setitem__(0, e[0].flip(0)),
    "some of an end": lambda e, kind: e.__setitem__((0, kind == 1), 5),
    "a view of an end": lambda e, kind: e[0].clamp_(max=10),
    "one of both ends": lambda e, kind: e.unbind(0)[1].add_(1).remainder_(NODES),
    "an entry": lambda e, kind: e.__setitem__((0, 3), 5),
    "an edge": lambda e, kind: e.__setitem__((slice(None), 3), 5),
    "a run of edges": lambda e, kind: e.__setitem__((slice(None), slice(3, 9)), 5),
    "a run of edges in place": lambda e, kind: e[:, 3:9].fill_(5),
    "a piece of the edges": lambda e, kind: e.chunk(3, 1)[1].zero_(),
    "edges of a kind": lambda e, kind: e.__setitem__((slice(None), kind == 1), 5),
    "a column of the transpose": lambda e, kind: e.t().__setitem__((slice(None), 0), 3),
    "what shares its memory": lambda e, kind: e.detach().view(2, -1).zero_(),
    "its data": lambda e, kind: e.data.__setitem__(0, 3),
    "by scatter": lambda e, kind: e.index_fill_(0, torch.tensor([0]), 3),
    "at random": lambda e, kind: e[0].random_(NODES),
}


@pytest.mark.parametrize("inference", [False, True])
def test_edges_that_were_written_are_not_the_graphs(
    inference: bool, roots: Callable[[int], str]
) -> None:
    """They have their new ids, and layers take these; those made of them before have the old."""

    def write(root: str) -> None:
        data, whole_data = pyg_sar.load_partition(root), make_graph()
        own = gnn.SAGEConv(8, 2).to(DOUBLE)
        conv = pyg_sar.distribute(deepcopy(own))
        own.load_state_dict(conv.state_dict())
        for name, change in WRITES.items():
            with torch.inference_mode(inference):
                found, plain = data.edge_index.clone(), whole_data.edge_index.clone()
                before, copy = found.flip(0), found.clone()
                kept = found[:, data.edge_type == 2]
                out = conv(data.x, found)
                for edges, kind in ((found, data.edge_type), (plain, whole_data.edge_type)):
                    torch.manual_seed(2)
                    change(edges, kind)
                expected = own(whole_data.x, plain)
                torch.testing.assert_close(whole(conv(data.x, found), "test"), expected, msg=name)
                assert torch.equal(whole(found, "test"), plain), name
                assert torch.equal(whole(before, "test"), whole_data.edge_index.flip(0))
                kept_ids = whole_data.edge_index[:, whole_data.edge_type == 2]
                assert torch.equal(whole(kept, "test"), kept_ids)
                torch.testing.assert_close(whole(conv(data.x, copy), "test"), whole(out, "test"))

    pyg_sar.launch(write, 1, roots(2), parts=2)


# Sparse matrices, and masks of edges ###########################################


def with_matrix() -> Data:
    data = make_graph()
    edge_index = coalesce(remove_self_loops(data.edge_index)[0])
    weight = torch.rand(
        edge_index.size(1), dtype=DOUBLE, generator=torch.Generator().manual_seed(3)
    )
    data = Data(x=data.x, edge_index=edge_index, edge_weight=weight)
    return ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data)


def products(data: Data) -> list[Any]:
    """What layers and operators make of a matrix."""
    x = data.x.detach().clone().requires_grad_()
    matrix = data.adj_t
    torch.manual_seed(4)
    convs = [
        *(gnn.APPNP(2, 0.1), gnn.GatedGraphConv(8, 2), gnn.GraphConv(8, 8)),
        *(gnn.GCNConv(8, 8), gnn.GCN2Conv(8, 0.1, 0.5, 1), gnn.SGConv(8, 8, 2)),
        *(gnn.SSGConv(8, 8, 0.1, 2), gnn.TAGConv(8, 8), gnn.GCNConv(8, 8, normalize=False)),
    ]
    outs = []
    for conv in convs:
        conv.to(DOUBLE)
        if isinstance(x, NodeTensor):
            pyg_sar.distribute(conv)
        outs.append(conv(x, x, matrix) if isinstance(conv, gnn.GCN2Conv) else conv(x, matrix))
    outs += [matrix @ x, torch.mm(matrix.t(), x), matrix @ torch.ones(NODES, dtype=DOUBLE)]
    mixed = 0.5 * matrix + torch.eye(NODES, dtype=DOUBLE).to_sparse(layout=torch.sparse_csr)
    outs.append(mixed @ x)
    plain = torch.eye(NODES, dtype=DOUBLE).roll(1, 0).to_sparse()
    outs.append(plain @ x)
    loss = sum((out * (k + 1)).square().mean() for k, out in enumerate(outs))
    loss.backward()
    shape = [*matrix.shape, matrix.layout, matrix._nnz(), data.num_edges, repr(data)]
    return [*shape, *(whole(out.detach(), "out") for out in outs), whole(x.grad, "gradient")]


def test_sparse_matrices(tmp_path: Path) -> None:
    expected = products(with_matrix())
    pyg_sar.write_partitions(with_matrix(), 2, tmp_path / "parts")
    loops = with_matrix()
    loops.adj_t = (loops.adj_t.to_dense() + torch.eye(NODES, dtype=DOUBLE)).to_sparse_csr()
    pyg_sar.write_partitions(loops, 2, tmp_path / "loops")
    edges = to_edge_index(with_matrix().adj_t)[0].flip(0)
    # What is written of a matrix of torch-sparse, which need not be installed here.
    other = Data(x=loops.x, edge_index=edges, adj_t="the edges, as SparseTensor")
    pyg_sar.write_partitions(other, 2, tmp_path / "other")

    def run(root: Path) -> list[Any]:
        data = pyg_sar.load_partition(root / "parts")
        assert torch.equal(data.adj_t.whole().to_dense(), with_matrix().adj_t.to_dense())
        sage = pyg_sar.distribute(gnn.SAGEConv(8, 2).to(DOUBLE))
        with pytest.raises(DistributedIndexError, match="SAGEConv.*'adj_t' with weights"):
            sage(data.x, data.adj_t)
        assert torch.equal(data.adj_t.to_dense(), with_matrix().adj_t.to_dense())
        data = pyg_sar.load_partition(root / "other")
        dense = (with_matrix().adj_t.to_dense() != 0).to(DOUBLE)
        found = whole(sage(data.x, data.adj_t), "test")
        degree = dense.sum(1, keepdim=True).clamp(min=1)
        expected = sage.lin_l(dense @ other.x / degree) + sage.lin_r(other.x)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        if not WITH_TORCH_SPARSE:
            assert torch.equal(data.adj_t.to_dense(), dense)
        data = pyg_sar.load_partition(root / "loops")
        gcn = pyg_sar.distribute(gnn.GCNConv(8, 2).to(DOUBLE))
        with pytest.raises(DistributedIndexError, match="GCNConv.*self-loops"):
            gcn(data.x, data.adj_t)
        return products(pyg_sar.load_partition(root / "parts"))

    for found in pyg_sar.launch(run, 1, tmp_path, parts=2):
        for one, other in zip(expected, found, strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
            else:
                assert other == one


def explanation(data: Data, ready: Callable[[Any], Any]) -> list[Tensor]:
    """The masks that explain a node's class."""
    model = ready(built("gcn"))
    layers = torch.nn.ModuleList([model.first, model.second])

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x, edge_index).relu(), edge_index)

    torch.manual_seed(5)
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(
        Two(),
        GNNExplainer(epochs=3),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config=config,
    )
    found = explainer(data.x, data.edge_index, index=4)
    assert int((found.edge_mask > 0).sum()) > 3
    return [mask.detach() for mask in (found.node_mask, found.edge_mask)]


@pytest.mark.parametrize("loops", [False, True])
def test_explanations(loops: bool, tmp_path: Path) -> None:
    data = make_graph()
    edges = data.edge_index if loops else remove_self_loops(data.edge_index)[0]
    data = Data(x=data.x, edge_index=edges)
    pyg_sar.write_partitions(data, 2, tmp_path / "parts")
    alike(explanation, data, tmp_path / "parts", 2, parts, 1e-9)


# Several node types ###########################################################


def make_hetero() -> HeteroData:
    draw = torch.Generator().manual_seed(0)
    data = HeteroData()
    sizes = {"paper": 40, "author": 25}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 8, dtype=DOUBLE, generator=draw)
    data["paper"].y = torch.randint(0, CLASSES, (40,), generator=draw)
    for one, other in (("paper", "author"), ("author", "paper"), ("paper", "paper")):
        ends = [torch.randint(0, sizes[kind], (90,), generator=draw) for kind in (one, other)]
        data[one, "to", other].edge_index = torch.stack(ends)
    return data


class Hetero(torch.nn.Module):
    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.first = gnn.HGTConv(8, WIDTH, metadata, heads=2)
        convs = {kind: gnn.SAGEConv((-1, -1), WIDTH) for kind in metadata[1]}
        self.second, self.head = gnn.HeteroConv(convs), torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, data: HeteroData) -> Tensor:
        x = self.first(data.x_dict, data.edge_index_dict)
        x = {name: rows.relu() for name, rows in x.items()}
        return self.head(self.second(x, data.edge_index_dict)["paper"])


def hetero_step(data: HeteroData, ready: Callable[[Any], Any]) -> list[Any]:
    model = ready(built_hetero(make_hetero()))
    out = model(data)
    loss = F.cross_entropy(out, data["paper"].y)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [loss.item(), out.detach(), *gradients, *negative_pairs(data)]


def negative_pairs(data: HeteroData) -> list[Tensor]:
    """Pairs of two types' nodes that are no edges, as PyG draws them, and what is made of them."""
    random.seed(3)
    torch.manual_seed(3)
    edges = data["paper", "to", "author"].edge_index
    pairs = [negative_sampling(edges, (40, 25), method=how) for how in ("sparse", "dense")]
    scores = [(data["paper"].x[a] * data["author"].x[b]).sum(-1) for a, b in pairs]
    inside = data["paper", "to", "paper"].edge_index
    inside = inside[:, inside[0].argsort(stable=True)]
    pairs += [*structured_negative_sampling(edges), negative_sampling(inside, 40, 0.5)]
    pairs.append(batched_negative_sampling(inside, torch.zeros(40, dtype=torch.long)))
    return [*pairs, *scores]


def built_hetero(data: HeteroData) -> torch.nn.Module:
    torch.manual_seed(1)
    model = Hetero(data.metadata()).to(DOUBLE)
    with torch.no_grad():
        model(data)
    return model


def test_node_types(tmp_path: Path) -> None:
    pyg_sar.write_partitions(make_hetero(), 2, tmp_path / "parts")
    alike(hetero_step, make_hetero(), tmp_path / "parts", 2, tolerance=1e-9)


STATIC: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: gnn.GCNConv(8, 5),
    "max": lambda: gnn.GraphConv(8, 5, aggr="max"),
    "cheb": lambda: gnn.ChebConv(8, 5, 3),
    "film": lambda: gnn.FiLMConv(8, 5),
    "model": lambda: gnn.GCN(8, 5, 2),
}


def of_static_graphs(data: Data, convert: Any) -> dict[str, list[Tensor]]:
    """Features ``[T, N, F]`` of several times, on the same edges."""
    found = {}
    for name, build in STATIC.items():
        torch.manual_seed(0)
        model = convert(build().double())
        x = torch.stack([data.x, data.x * 2, data.x.sin()]).detach().requires_grad_()
        out = model(x, data.edge_index)
        weights = torch.linspace(1, 2, out.numel(), dtype=DOUBLE).view(out.shape)
        gradients = torch.autograd.grad((out * weights).sum(), [x, *model.parameters()])
        found[name] = [t.detach() for t in (out, *gradients)]
        if name == "cheb":  # Plain features, with the graph's weights.
            plain, weight = whole(x.detach(), "test"), data.edge_attr[:, 0].abs()
            found[name].append(model(plain, data.edge_index, weight).detach())
    for layer in (gnn.GATConv(8, 5), torch.nn.BatchNorm1d(8)):
        if not isinstance(data.x, NodeTensor):
            break
        model = convert(layer.double())
        edges = (data.edge_index,) if isinstance(layer, gnn.GATConv) else ()
        with pytest.raises(DistributedIndexError, match="nodes along axis 1"):
            model(torch.stack([data.x, data.x]), *edges)
    return found


def test_static_graphs(roots: Callable[[int], str]) -> None:
    alike(of_static_graphs, make_graph(), Path(roots(2)), 2)


def test_a_matrix_by_columns_stays_one(tmp_path: Path) -> None:
    """As Pandas gives it; dropout of it draws in this order, where the graph comes from files or
    from memory."""
    data = make_graph()
    data.x = data.x.t().contiguous().t()
    pyg_sar.write_partitions(data, 2, tmp_path / "parts")

    def dropped(given: Any) -> list[Any]:
        torch.manual_seed(3)
        return [given.x.stride(), whole(F.dropout(given.x, 0.5), "test")]

    def work() -> list[Any]:
        scattered = pyg_sar.scatter(data, "random", seed=0)
        return [*dropped(pyg_sar.load_partition(tmp_path / "parts")), *dropped(scattered)]

    for found in parts(work, 2):
        assert found[0] == found[2] == data.x.stride()
        assert torch.equal(found[1], dropped(data)[1]) and torch.equal(found[3], found[1])
