"""PyG's models on one big graph, over workers, against one process."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from oracle import (
    CHANNELS,
    CLASSES,
    EDGE_DIM,
    TOLERANCE,
    error,
    gradient_scale,
    make_graph,
    probe,
    threads,
)
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric import seed_everything
from torch_geometric.nn import models, pool
from torch_geometric.utils import scatter

import pyg_sar
from pyg_sar.nn import newer, registry

# EdgeCNN with norms has one in its message.
pytestmark = pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")

NODES, HIDDEN = 30, 4
WORLDS = (1, 2, 3)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """LabelPropagation makes labels of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@functools.cache
def graph() -> Any:
    """The oracle's graph with labels of edges and of nodes; the largest class has one node."""
    data = make_graph(NODES, 110)
    draw = torch.Generator().manual_seed(9)
    data.edge_label = (torch.rand(data.num_edges, generator=draw) < 0.7).long()
    data.y = data.y.clamp(max=CLASSES - 2)
    data.y[3] = CLASSES - 1
    data.batch = (torch.arange(NODES) >= 11).long()
    data.z = torch.randn(NODES, HIDDEN, generator=draw, dtype=torch.float64)
    return data


def parts(world: int) -> Tensor:
    """Interleaved parts; with three or more, the second is empty."""
    part = torch.randint(world, (NODES,), generator=torch.Generator().manual_seed(2))
    if world > 2:
        part[part == 1] = 0
    return part


# Cases #######################################################################

Run = Callable[[torch.nn.Module, Any, Any], Any]
"""(model, data, mean) to a node tensor, or to (node tensor, loss)."""


def edges(model: torch.nn.Module, data: Any, mean: Any) -> Tensor:
    return model(data.x, data.edge_index)


def basic(kind: type, **options: Any) -> Callable[[], torch.nn.Module]:
    if kind is gnn.PNA:
        options |= {
            "aggregators": ["mean", "max", "std"],
            "scalers": ["identity", "amplification"],
            "deg": torch.tensor([0, 3, 9, 4]),
        }
    return lambda: kind(CHANNELS, HIDDEN, 2, CLASSES, **options)


BASIC = (gnn.GCN, gnn.GraphSAGE, gnn.GIN, gnn.GAT, gnn.PNA, gnn.EdgeCNN)
CASES: dict[str, tuple[Callable[[], torch.nn.Module], Run]] = {}
for _kind in BASIC:
    _name = _kind.__name__
    CASES[_name] = (basic(_kind), edges)
    CASES[f"{_name}, norm, cat"] = (basic(_kind, norm="batch_norm", jk="cat"), edges)
    CASES[f"{_name}, act first, max"] = (
        basic(_kind, norm="BatchNorm", act_first=True, jk="max", act="tanh"),
        edges,
    )
    CASES[f"{_name}, lstm"] = (
        basic(_kind, norm="layer_norm", norm_kwargs={"mode": "node"}, jk="lstm"),
        edges,
    )


def deep(block: str, **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: gnn.DeepGCNLayer(
        gnn.GCNConv(CHANNELS, CHANNELS), BatchNorm1d(CHANNELS), ReLU(), block=block, **options
    )


for _block in ("res+", "res", "dense", "plain"):
    CASES[f"DeepGCNLayer, {_block}"] = (deep(_block), edges)
CASES["DeepGCNLayer, checkpoint"] = (deep("res+", ckpt_grad=True), edges)


def reversible(model: torch.nn.Module, data: Any, mean: Any) -> Tensor:
    return model(data.x * 1.0, data.edge_index)  # It frees its input.


CASES["GroupAddRev"] = (
    lambda: gnn.GroupAddRev(gnn.SAGEConv(CHANNELS // 2, CHANNELS // 2), num_groups=2),
    reversible,
)


def predict_masked(model: torch.nn.Module, data: Any, mean: Any) -> Tensor:
    return model(data.x, data.y, data.train_mask)


CASES["MaskLabel"] = (lambda: gnn.MaskLabel(CLASSES, CHANNELS), predict_masked)
CASES["MaskLabel, concat"] = (lambda: gnn.MaskLabel(CLASSES, 3, method="concat"), predict_masked)
CASES["PMLP"] = (lambda: gnn.PMLP(CHANNELS, HIDDEN, CLASSES, 3), edges)
CASES["PMLP, inference"] = (lambda: gnn.PMLP(CHANNELS, HIDDEN, CLASSES, 3).eval(), edges)
CASES["MLP"] = (
    lambda: gnn.MLP([CHANNELS, HIDDEN, CLASSES]),
    lambda model, data, mean: model(data.x),
)
if hasattr(gnn, "GPSENodeEncoder"):  # since PyG 2.7
    CASES["GPSENodeEncoder"] = (
        lambda: gnn.GPSENodeEncoder(
            HIDDEN + CHANNELS, HIDDEN, CHANNELS, HIDDEN, dropout_be=0.0, dropout_ae=0.0
        ),
        lambda model, data, mean: model(data.x, data.z),
    )


def signed(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    positive, negative = (data.edge_index[:, data.edge_label == k] for k in (1, 0))
    z = model(data.x, positive, negative)
    loss = -model.discriminate(z, positive)[:, 0], -model.discriminate(z, negative)[:, 1]
    return z, mean(loss[0]) + mean(loss[1])


CASES["SignedGCN"] = (lambda: gnn.SignedGCN(CHANNELS, HIDDEN, 2), signed)


def semantic(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    labels = model.get_semantic_labels(data.x, data.y, data.train_mask)
    out = model(data.x, data.edge_index, data.edge_weight)
    return out, mean((out[data.train_mask] - labels).square().sum(1))


CASES["RECT_L"] = (lambda: gnn.RECT_L(CHANNELS, HIDDEN), semantic)


def propagated(model: torch.nn.Module, data: Any, mean: Any) -> Tensor:
    return model(data.y, data.edge_index, data.train_mask) + 0 * data.x[:, :1]


CASES["LabelPropagation"] = (lambda: gnn.LabelPropagation(3, 0.6), propagated)


def corrected(model: torch.nn.Module, data: Any, mean: Any) -> Tensor:
    mask, soft = data.train_mask, data.x[:, :CLASSES].detach().softmax(-1)
    soft = model.correct(soft, data.y[mask], mask, data.edge_index)
    index = mask.nonzero().view(-1)
    smooth = model.smooth(soft, data.y[index], index, data.edge_index)
    return torch.cat([smooth, soft, data.x[:, :1]], dim=1)  # Its scale has no gradient at 0.


for _scale in (True, False):
    CASES[f"CorrectAndSmooth, autoscale={_scale}"] = (
        functools.partial(gnn.CorrectAndSmooth, 3, 0.7, 2, 0.5, autoscale=_scale, scale=0.8),
        corrected,
    )


def reconstruct(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    positive, negative = (data.edge_index[:, data.edge_label == k] for k in (1, 0))
    z = model.encode(data.x, positive)
    loss = model.recon_loss(z, positive, negative)
    if hasattr(model, "kl_loss"):
        loss = loss + 0.3 * model.kl_loss() + 0.1 * model.kl_loss(z, 0.5 * z)
    if hasattr(model, "reg_loss"):
        loss = loss + model.reg_loss(z)
    return z, loss


class Variational(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mu, self.logstd = (gnn.GCNConv(CHANNELS, HIDDEN) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.mu(x, edge_index), self.logstd(x, edge_index)


def critic() -> torch.nn.Module:
    return Sequential(Linear(HIDDEN, 5), BatchNorm1d(5), ReLU(), Linear(5, 1))


CASES["GAE"] = (lambda: gnn.GAE(gnn.GCNConv(CHANNELS, HIDDEN)), reconstruct)
CASES["VGAE"] = (lambda: gnn.VGAE(Variational()).eval(), reconstruct)
CASES["ARGA"] = (lambda: gnn.ARGA(gnn.GCNConv(CHANNELS, HIDDEN), critic()), reconstruct)
CASES["ARGVA"] = (lambda: gnn.ARGVA(Variational(), critic()).eval(), reconstruct)


def infomax(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    pos, neg, summary = model(data.x, data.edge_index)
    return torch.cat([pos, neg], 1), model.loss(pos, neg, summary)


SUMMARIES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda z, x, edge_index: z.mean(dim=0).sigmoid(),
    "pool": lambda z, *args: gnn.global_mean_pool(z, None).sigmoid(),
    "own pool": lambda z, *args: pyg_sar.nn.global_mean_pool(z).sigmoid(),
    "max": lambda z, x, edge_index: torch.tanh(z.relu().amax(0) + torch.sum(x, 0)[:HIDDEN] / 9),
    "all": lambda z, *args: (2 * z - 1).mean() * z.sum(dim=(0,), keepdim=True) / 30,
}
for _name, _summary in SUMMARIES.items():
    CASES[f"DeepGraphInfomax, {_name}"] = (
        functools.partial(
            gnn.DeepGraphInfomax,
            HIDDEN,
            gnn.GCNConv(CHANNELS, HIDDEN),
            _summary,
            lambda x, edge_index: (1 - 0.5 * x, edge_index),
        ),
        infomax,
    )


def links(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    attract, repel = model.encode(data.x)
    scores = model(data.x, data.edge_index)
    fraction = model.calculate_r_fraction(attract, repel)
    return attract + fraction, mean(scores)


if hasattr(gnn, "ARLinkPredictor"):  # since PyG 2.7
    CASES["ARLinkPredictor"] = (lambda: gnn.ARLinkPredictor(CHANNELS, HIDDEN), links)


def graphs(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    weights = torch.arange(1.0, 2 * CLASSES + 1, dtype=torch.float64).view(2, CLASSES)
    out = model(data.x, data.edge_index, data.batch)
    alone = model(data.x, data.edge_index)
    values = (out * weights).sum(1), (alone * weights[:1]).sum(1)
    return data.x, mean(values[0]) + mean(values[1])


CASES["NeuralFingerprint"] = (
    lambda: gnn.NeuralFingerprint(CHANNELS, HIDDEN, CLASSES, 2, max_degree=4),
    graphs,
)


class EdgeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = Linear(2 * CHANNELS + EDGE_DIM + 2, 3)

    def forward(self, src: Tensor, dst: Tensor, attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        return self.lin(torch.cat([src, dst, attr, u[batch]], 1)).tanh()


class NodeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = Linear(CHANNELS + 3 + 2, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor, u: Tensor, batch: Tensor) -> Any:
        received = scatter(attr, edge_index[1], dim=0, dim_size=x.size(0), reduce="mean")
        return self.lin(torch.cat([x, received, u[batch]], dim=1)).relu()


class GlobalModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = Linear(2 + CHANNELS + 3, 2)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor, u: Tensor, batch: Tensor) -> Any:
        nodes = scatter(x, batch, dim=0, reduce="mean")
        between = scatter(attr, batch[edge_index[0]], dim=0, reduce="sum")
        return self.lin(torch.cat([u, nodes, between], dim=1))


class Meta(torch.nn.Module):
    """Two rounds, so that the graphs' features come back to edges and nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = gnn.MetaLayer(EdgeModel(), NodeModel(), GlobalModel())

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor, batch: Tensor) -> Any:
        u = x.new_ones(2, 2)
        x, _, u = self.layer(x, edge_index, attr, u, batch)
        return self.layer(x, edge_index, attr, u, batch)


def meta(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    x, _, u = model(data.x, data.edge_index, data.edge_attr, data.batch)
    return x, mean(u.square().sum(1)) + mean(x.square().sum(1))


CASES["MetaLayer"] = (Meta, meta)


def han(model: torch.nn.Module, data: Any, mean: Any) -> Any:
    relations = {("n", f"r{k}", "n"): data.edge_index[:, data.edge_label == k] for k in (0, 1)}
    out, weights = model({"n": data.x}, relations, return_semantic_attention_weights=True)
    return out["n"], mean(out["n"].square().sum(1)) + mean(weights["n"].square())


class Neighbours(torch.nn.Module):
    """PyG's pooling of neighbours, which keeps the nodes."""

    def __init__(self, pooling: Callable[[Any], Any]) -> None:
        super().__init__()
        self.lin, self.pooling = Linear(CHANNELS, HIDDEN), pooling

    def forward(self, data: Any) -> Tensor:
        data = copy.copy(data)
        data.x = self.lin(data.x)
        return self.pooling(data).x


for _pooling in (gnn.max_pool_neighbor_x, gnn.avg_pool_neighbor_x):
    CASES[_pooling.__name__] = (
        functools.partial(Neighbours, _pooling),
        lambda model, data, mean: model(data),
    )

METADATA = (["n"], [("n", "r0", "n"), ("n", "r1", "n")])
CASES["HANConv"] = (lambda: gnn.HANConv(CHANNELS, HIDDEN, METADATA, heads=1), han)


# Comparing ###################################################################


def one_pass(model: torch.nn.Module, run: Run, data: Any, mean: Any) -> Any:
    data = copy.copy(data)
    ids = data.get("n_id", torch.arange(NODES))
    data.x = leaf = data.x.clone().requires_grad_()
    found = run(model, data, mean)
    out, loss = found if isinstance(found, tuple) else (found, None)
    kept = out.detach().clone()  # GroupAddRev frees its output in the backward pass.
    total = mean((out * probe(ids, out) + 0.1 * out.square()).sum(1))
    (total if loss is None else total + loss).backward()
    grads = {n: None if p.grad is None else p.grad for n, p in model.named_parameters()}
    value = None if loss is None else loss.detach()
    return kept, leaf.grad, grads, dict(model.named_buffers()), value, ids


@pytest.mark.parametrize("world", WORLDS)
def test_models_are_exact(world: int, tmp_path: Any):
    made = {}
    for name, (make, _) in CASES.items():
        torch.manual_seed(3)
        made[name] = make().double()
    pyg_sar.write_partitions(graph(), world, tmp_path / "parts", parts(world))
    expected = {
        name: one_pass(copy.deepcopy(made[name]), run, graph(), torch.mean)
        for name, (_, run) in CASES.items()
    }

    def worker() -> dict[str, Any]:
        data = pyg_sar.load_partition(tmp_path / "parts", view="local")
        return {
            name: one_pass(
                pyg_sar.distribute(copy.deepcopy(made[name]), view="local"), run, data, pyg_sar.mean
            )
            for name, (_, run) in CASES.items()
        }

    workers = threads(worker, world)
    for name, want in expected.items():
        ids = torch.cat([w[name][5] for w in workers])
        for place in (0, 1):
            got = torch.empty_like(want[place])
            got[ids] = torch.cat([w[name][place] for w in workers])
            assert error(got, want[place]) <= TOLERANCE, (name, place)
        scale = gradient_scale(want[2])
        for rank, worker in enumerate(workers):
            for key, gradient in want[2].items():
                assert error(worker[name][2][key], gradient, scale) <= TOLERANCE, (name, key, rank)
            for key, buffer in want[3].items():
                assert error(worker[name][3][key], buffer) <= TOLERANCE, (name, key, rank)
            assert error(worker[name][4], want[4]) <= TOLERANCE, (name, "loss", rank)


# What is refused #############################################################


def refused() -> dict[str, Callable[[], torch.nn.Module]]:
    conv = functools.partial(gnn.GCNConv, HIDDEN)
    path = torch.tensor([[0, 1], [1, 0]])
    meta = {("a", "to", "a"): path}
    return {
        "GraphUNet": lambda: gnn.GraphUNet(CHANNELS, HIDDEN, 2, depth=1),
        "Node2Vec": lambda: bare(gnn.Node2Vec),
        "MetaPath2Vec": lambda: gnn.MetaPath2Vec(meta, HIDDEN, [("a", "to", "a")], 2, 2),
        "TGNMemory": lambda: gnn.TGNMemory(
            NODES, 2, 3, 2, models.tgn.IdentityMessage(2, 3, 2), models.tgn.LastAggregator()
        ),
        "RENet": lambda: gnn.RENet(NODES, 3, HIDDEN, 2),
        "SchNet": lambda: gnn.SchNet(HIDDEN, 4, 1, 4),
        "DimeNet": lambda: bare(gnn.DimeNet),
        "DimeNetPlusPlus": lambda: bare(gnn.DimeNetPlusPlus),
        "ViSNet": lambda: bare(gnn.ViSNet),
        "GNNFF": lambda: bare(gnn.GNNFF),
        "AttentiveFP": lambda: gnn.AttentiveFP(CHANNELS, HIDDEN, 2, EDGE_DIM, 1, 1),
        "GRetriever": lambda: bare(
            gnn.GRetriever if hasattr(gnn, "GRetriever") else newer.GRetriever
        ),
        **{
            name: functools.partial(bare, getattr(gnn, name))
            for name in ("GPSE", "LPFormer")
            if hasattr(gnn, name)  # since PyG 2.7
        },
        "TopKPooling": lambda: gnn.TopKPooling(HIDDEN),
        "SAGPooling": lambda: gnn.SAGPooling(HIDDEN),
        "EdgePooling": lambda: gnn.EdgePooling(HIDDEN),
        "ClusterPooling": lambda: gnn.ClusterPooling(HIDDEN),
        "ASAPooling": lambda: gnn.ASAPooling(HIDDEN, GNN=conv),
        "PANPooling": lambda: gnn.PANPooling(HIDDEN),
        "MemPooling": lambda: gnn.MemPooling(HIDDEN, 2, 1, 2),
    }


def bare(kind: type) -> torch.nn.Module:
    """A module of a class whose constructor needs much, or packages that aren't here."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


@pytest.mark.parametrize("name", refused())
def test_refused_models_are_named(name: str):
    def worker() -> None:
        with pytest.raises(ValueError, match=rf"'inner' \({name}\) can't be .*rank \d"):
            pyg_sar.distribute(torch.nn.ModuleDict({"inner": refused()[name]()}), view="local")

    threads(worker, 2)


OTHER = {
    "to_captum_model": "works on one process",
    "to_captum_input": "works on one process",
    "captum_output_to_dicts": "works on one process",
    "HeteroJumpingKnowledge": "per node",
    "JumpingKnowledge": "in BasicGNN, jk",
    "SGFormer": "test_attention.py",
    "Polynormer": "test_attention.py",
    "InnerProductDecoder": "in GAE",
    "LINKX": "test_embedding.py",
    "LightGCN": "test_embedding.py",
}


def test_every_model_is_exact_or_refused():
    shown = {name.split(",")[0] for name in CASES} | set(refused()) | set(OTHER)
    assert set(models.__all__) <= shown


def test_every_pooling_module_is_refused():
    kinds = {n for n in pool.__all__ if isinstance(getattr(gnn, n, None), type)}
    kinds = {n for n in kinds if issubclass(getattr(gnn, n), torch.nn.Module)}
    assert kinds <= set(refused())


POOLINGS: dict[str, Callable[[Any], Any]] = {
    "graclus": lambda data: gnn.graclus(data.edge_index, num_nodes=data.num_nodes),
    "avg_pool": lambda data: gnn.avg_pool(torch.arange(data.num_nodes), data),
    "max_pool": lambda data: gnn.max_pool(torch.arange(data.num_nodes), data),
}


def test_the_documentation_lists_every_class():
    """docs/global.md says of each class what ``distribute`` does, and why."""
    text = (Path(__file__).parent.parent / "docs" / "global.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, flags=re.MULTILINE))
    for package in (models, pool, gnn.aggr, gnn.attention):
        for name in package.__all__:
            kind: Any = getattr(gnn, name, None) or getattr(package, name)
            bases = getattr(kind, "__mro__", ())
            reasons = [registry.REFUSED[base] for base in bases if base in registry.REFUSED]
            verdict = f"no | refused: {reasons[0]}" if reasons else ("yes", "no | ")
            assert rows[name].startswith(verdict), name
            if kind in registry.MODULES:
                assert rows[name].startswith("yes"), name


def test_methods_and_functions_that_see_this_workers_nodes(tmp_path: Any):
    pyg_sar.write_partitions(graph(), 2, tmp_path / "parts", parts(2))

    def worker() -> list[str]:
        data = pyg_sar.load_partition(tmp_path / "parts", view="local")
        edges, z = data.edge_index, data.z
        auto = pyg_sar.distribute(gnn.GAE(gnn.GCNConv(CHANNELS, HIDDEN)), view="local")
        model = pyg_sar.distribute(gnn.SignedGCN(CHANNELS, HIDDEN, 1), view="local").double()
        for call in (
            lambda: auto.recon_loss(z, edges, torch.zeros(2, 3, dtype=torch.long)),
            lambda: auto.test(z, edges, edges),
            lambda: auto.decoder.forward_all(z),
            *(functools.partial(getattr(model, m), z, edges, edges) for m in ("loss", "nll_loss")),
            lambda: model.pos_embedding_loss(z, edges),
            lambda: model.create_spectral_features(edges, edges),
        ):
            with pytest.raises(ValueError, match=r"rank \d"):
                call()
        silent = []
        for name, function in POOLINGS.items():
            try:
                function(data)
                silent.append(name)
            except (pyg_sar.errors.DistributedIndexError, ImportError):
                pass
        return silent

    assert threads(worker, 2) == [[], []]


def test_one_process_samples_pairs_as_before():
    data = graph()
    z, edges = data.z, data.edge_index
    auto, plain = pyg_sar.distribute(gnn.GAE(Linear(2, 2)), view="local"), gnn.GAE(Linear(2, 2))
    losses = []
    for model in (auto, plain):
        seed_everything(1)
        losses.append(model.recon_loss(z, edges))
    assert torch.equal(*losses)
    assert torch.equal(auto.decoder.forward_all(z), plain.decoder.forward_all(z))
    assert (
        float(
            pyg_sar.distribute(gnn.SignedGCN(4, HIDDEN, 1), view="local")
            .loss(z, edges, edges)
            .detach()
        )
        > 0
    )


REFUSED_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "permuted": lambda x: x[torch.randperm(x.size(0))],
    "first": lambda x: x[0],
    "sorted": lambda x: x.sort(dim=0),
    "median": lambda x: x.median(dim=0),
    "gram": lambda x: x.t() @ x,
    "softmax": lambda x: torch.softmax(x, dim=0),
    "argmax": lambda x: x.max(dim=0),
    "std": lambda x: x.std(0),
    "norm": lambda x: x.norm(),
    "PyG's readout": lambda x: gnn.global_mean_pool(x, torch.zeros(len(x), dtype=torch.long)),
}


@pytest.mark.parametrize("name", REFUSED_ROWS)
@pytest.mark.parametrize("role", ["summary", "corruption"])
def test_infomax_refuses_functions_of_its_own_rows(name: str, role: str, tmp_path: Any):
    pyg_sar.write_partitions(graph(), 2, tmp_path / "parts", parts(2))
    wrong = REFUSED_ROWS[name]
    functions: dict[str, Any] = {
        "summary": lambda z, x, edge_index: z.mean(0),
        "corruption": lambda x, edge_index: (-x, edge_index),
    }
    functions[role] = lambda x, *rest: wrong(x)

    def worker() -> None:
        data = pyg_sar.load_partition(tmp_path / "parts", view="local")
        model = gnn.DeepGraphInfomax(HIDDEN, gnn.GCNConv(CHANNELS, HIDDEN), **functions).double()
        model = pyg_sar.distribute(model, view="local")
        with pytest.raises(pyg_sar.errors.DistributedIndexError):
            model(data.x, data.edge_index)

    threads(worker, 2)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shuffle_is_a_permutation_of_all_nodes(world: int):
    """Every row once; rows change workers; the gradient follows each row home."""
    x, part = torch.arange(2.0 * NODES).view(NODES, 2), parts(world)

    def worker(seed: int) -> Any:
        ids = (part == pyg_sar.comm.current().rank).nonzero().view(-1)
        mine = x[ids].requires_grad_()
        torch.manual_seed(seed)
        out = pyg_sar.nn.shuffle_nodes(mine)
        (out * out.detach().cos()).sum().backward()
        return out.detach(), mine.grad, ids

    orders = []
    for seed in (1, 2):
        workers = threads(worker, world, seed)
        out = torch.cat([w[0] for w in workers])
        assert torch.equal(out.sort(0).values, x)
        for _, grad, ids in workers:
            assert torch.equal(grad, x[ids].cos())
        assert [w[0].shape for w in workers] == [w[1].shape for w in workers]
        orders.append(out)
        if world > 1:
            stayed = [torch.isin(w[0][:, 0], x[w[2], 0]).double().mean() for w in workers]
            assert not all(share == 1 for share in stayed)
    assert not torch.equal(*orders)
