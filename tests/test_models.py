"""PyG's models on one big graph, over workers, against one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
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
    parts,
    probe,
    second_is_empty,
    whole,
    workers,
)
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric import seed_everything
from torch_geometric.nn import models, pool
from torch_geometric.utils import scatter

import pyg_sar

# EdgeCNN with norms has one in its message.
pytestmark = [
    pytest.mark.usefixtures("double"),  # LabelPropagation makes labels of it.
    pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning"),
]

NODES, HIDDEN = 30, 4
WORLDS = ((1, workers), (2, workers), (3, parts))


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


# Cases #######################################################################

Run = Callable[[torch.nn.Module, Any], Any]
"""(model, data) to a node tensor, or to (node tensor, loss)."""


def edges(model: torch.nn.Module, data: Any) -> Tensor:
    return model(data.x, data.edge_index)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Run]] = {
    "PNA": (
        lambda: gnn.PNA(
            *(CHANNELS, HIDDEN, 2, CLASSES),
            aggregators=["mean", "max", "std"],
            scalers=["identity", "amplification"],
            deg=torch.tensor([0, 3, 9, 4]),
        ),
        edges,
    ),
    "EdgeCNN, norm": (
        lambda: gnn.EdgeCNN(CHANNELS, HIDDEN, 2, CLASSES, norm="batch_norm"),
        edges,
    ),
}


def deep(block: str, **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: gnn.DeepGCNLayer(
        gnn.GCNConv(CHANNELS, CHANNELS), BatchNorm1d(CHANNELS), ReLU(), block=block, **options
    )


for _block in ("res+", "res", "dense", "plain"):
    CASES[f"DeepGCNLayer, {_block}"] = (deep(_block), edges)
CASES["DeepGCNLayer, checkpoint"] = (deep("res+", ckpt_grad=True), edges)


def reversible(model: torch.nn.Module, data: Any) -> Tensor:
    return model(data.x * 1.0, data.edge_index)  # It frees its input.


CASES["GroupAddRev"] = (
    lambda: gnn.GroupAddRev(gnn.SAGEConv(CHANNELS // 2, CHANNELS // 2), num_groups=2),
    reversible,
)


def predict_masked(model: torch.nn.Module, data: Any) -> Tensor:
    return model(data.x, data.y, data.train_mask)


CASES["MaskLabel"] = (lambda: gnn.MaskLabel(CLASSES, CHANNELS), predict_masked)
CASES["MaskLabel, concat"] = (lambda: gnn.MaskLabel(CLASSES, 3, method="concat"), predict_masked)
CASES["PMLP"] = (lambda: gnn.PMLP(CHANNELS, HIDDEN, CLASSES, 3), edges)
CASES["PMLP, inference"] = (lambda: gnn.PMLP(CHANNELS, HIDDEN, CLASSES, 3).eval(), edges)
CASES["MLP"] = (
    lambda: gnn.MLP([CHANNELS, HIDDEN, CLASSES]),
    lambda model, data: model(data.x),
)
if hasattr(gnn, "GPSENodeEncoder"):  # since PyG 2.7
    CASES["GPSENodeEncoder"] = (
        lambda: gnn.GPSENodeEncoder(
            HIDDEN + CHANNELS, HIDDEN, CHANNELS, HIDDEN, dropout_be=0.0, dropout_ae=0.0
        ),
        lambda model, data: model(data.x, data.z),
    )


def signed(model: torch.nn.Module, data: Any) -> Any:
    positive, negative = (data.edge_index[:, data.edge_label == k] for k in (1, 0))
    z = model(data.x, positive, negative)
    loss = -model.discriminate(z, positive)[:, 0], -model.discriminate(z, negative)[:, 1]
    return z, loss[0].mean() + loss[1].mean()


CASES["SignedGCN"] = (lambda: gnn.SignedGCN(CHANNELS, HIDDEN, 2), signed)


def semantic(model: torch.nn.Module, data: Any) -> Any:
    labels = model.get_semantic_labels(data.x, data.y, data.train_mask)
    out = model(data.x, data.edge_index, data.edge_weight)
    return out, (out[data.train_mask] - labels).square().sum(1).mean()


CASES["RECT_L"] = (lambda: gnn.RECT_L(CHANNELS, HIDDEN), semantic)


def propagated(model: torch.nn.Module, data: Any) -> Tensor:
    return model(data.y, data.edge_index, data.train_mask) + 0 * data.x[:, :1]


CASES["LabelPropagation"] = (lambda: gnn.LabelPropagation(3, 0.6), propagated)


def corrected(model: torch.nn.Module, data: Any) -> Tensor:
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


def reconstruct(model: torch.nn.Module, data: Any) -> Any:
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


def infomax(model: torch.nn.Module, data: Any) -> Any:
    pos, neg, summary = model(data.x, data.edge_index)
    return torch.cat([pos, neg], 1), model.loss(pos, neg, summary)


SUMMARIES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda z, x, edge_index: z.mean(dim=0).sigmoid(),
    "pool": lambda z, *args: gnn.global_mean_pool(z, None).sigmoid(),
    "first": lambda z, *args: z[0] + z.median(dim=0).values + z.sort(dim=0).values[3],
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


def links(model: torch.nn.Module, data: Any) -> Any:
    attract, repel = model.encode(data.x)
    scores = model(data.x, data.edge_index)
    fraction = model.calculate_r_fraction(attract, repel)
    return attract + fraction, scores.mean()


if hasattr(gnn, "ARLinkPredictor"):  # since PyG 2.7
    CASES["ARLinkPredictor"] = (lambda: gnn.ARLinkPredictor(CHANNELS, HIDDEN), links)


def graphs(model: torch.nn.Module, data: Any) -> Any:
    weights = torch.arange(1.0, 2 * CLASSES + 1, dtype=torch.float64).view(2, CLASSES)
    out = model(data.x, data.edge_index, data.batch)
    alone = model(data.x, data.edge_index)
    values = (out * weights).sum(1), (alone * weights[:1]).sum(1)
    return data.x, values[0].mean() + values[1].mean()


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


def meta(model: torch.nn.Module, data: Any) -> Any:
    x, _, u = model(data.x, data.edge_index, data.edge_attr, data.batch)
    return x, u.square().sum(1).mean() + x.square().sum(1).mean()


CASES["MetaLayer"] = (Meta, meta)


def han(model: torch.nn.Module, data: Any) -> Any:
    relations = {("n", f"r{k}", "n"): data.edge_index[:, data.edge_label == k] for k in (0, 1)}
    out, weights = model({"n": data.x}, relations, return_semantic_attention_weights=True)
    return out["n"], out["n"].square().sum(1).mean() + weights["n"].square().mean()


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
        lambda model, data: model(data),
    )

METADATA = (["n"], [("n", "r0", "n"), ("n", "r1", "n")])
CASES["HANConv"] = (lambda: gnn.HANConv(CHANNELS, HIDDEN, METADATA, heads=1), han)


class Summary(torch.nn.Module):
    """Infomax with a corruption that shuffles rows, and PyG's test of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gnn.DeepGraphInfomax(
            HIDDEN,
            gnn.GCNConv(CHANNELS, HIDDEN),
            SUMMARIES["mean"],
            lambda x, edge_index: (x[torch.randperm(x.size(0))], edge_index),
        )

    def forward(self, data: Any) -> Any:
        torch.manual_seed(4)
        return infomax(self.model, data)


CASES["DeepGraphInfomax, shuffled"] = (Summary, lambda model, data: model(data))


def sampled(model: torch.nn.Module, data: Any) -> Any:
    """Losses that draw pairs of nodes."""
    seed_everything(7)
    return data.z, model.recon_loss(data.z * data.x.mean(), data.edge_index)


def signed_losses(model: torch.nn.Module, data: Any) -> Any:
    positive, negative = (data.edge_index[:, data.edge_label == k] for k in (1, 0))
    z = model(data.x, positive, negative)
    seed_everything(7)
    return z, model.loss(z, positive, negative)


def all_pairs(model: torch.nn.Module, data: Any) -> Any:
    return data.z, model.decoder.forward_all(data.z * data.x.mean()).square().mean()


CASES["GAE, all pairs"] = (lambda: gnn.GAE(Linear(CHANNELS, HIDDEN)), all_pairs)
CASES["GAE, sampled pairs"] = (lambda: gnn.GAE(Linear(CHANNELS, HIDDEN)), sampled)
CASES["SignedGCN, its losses"] = (lambda: gnn.SignedGCN(CHANNELS, HIDDEN, 2), signed_losses)


class Pooled(torch.nn.Module):
    """A pooling layer, whose nodes are fewer, and a readout."""

    def __init__(self, pooling: torch.nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.lin, self.pooling, self.call = Linear(CHANNELS, HIDDEN), pooling, call

    def forward(self, data: Any) -> Any:
        x = self.lin(data.x)
        out = self.call(self.pooling, x, data.edge_index, data.batch)
        return x, out.square().mean() + out.sum() / 9


def first(pooling: Any, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
    return pooling(x, edge_index, batch=batch)[0]


POOLINGS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., Tensor]]] = {
    "TopKPooling": (lambda: gnn.TopKPooling(HIDDEN), first),
    "SAGPooling": (lambda: gnn.SAGPooling(HIDDEN), first),
    "EdgePooling": (lambda: gnn.EdgePooling(HIDDEN), first),
    "ClusterPooling": (lambda: gnn.ClusterPooling(HIDDEN), first),
    "ASAPooling": (lambda: gnn.ASAPooling(HIDDEN), first),
    "MemPooling": (
        lambda: gnn.MemPooling(HIDDEN, 3, 2, 2),
        lambda pooling, x, edges, batch: pooling(x, batch)[0],
    ),
}


for _name, (_make, _call) in POOLINGS.items():
    CASES[_name] = (
        lambda make=_make, call=_call: Pooled(make(), call),
        lambda model, data: model(data),
    )

CASES["GraphUNet"] = (lambda: gnn.GraphUNet(CHANNELS, HIDDEN, CLASSES, depth=2), edges)
CASES["AttentiveFP"] = (
    lambda: gnn.AttentiveFP(CHANNELS, HIDDEN, 2, EDGE_DIM, 2, 2),
    lambda model, data: (
        data.x,
        model(data.x, data.edge_index, data.edge_attr, data.batch).square().mean(),
    ),
)
CASES["WLConv"] = (
    gnn.WLConv,
    lambda model, data: model(data.y, data.edge_index).view(-1, 1) + 0 * data.x[:, :1],
)


# Comparing ###################################################################


def one_pass(model: torch.nn.Module, run: Run, data: Any) -> Any:
    data = copy.copy(data)
    data.x = leaf = data.x.clone().requires_grad_()
    found = run(model, data)
    out, loss = found if isinstance(found, tuple) else (found, None)
    kept = whole(out.detach().clone())  # GroupAddRev frees its output in the backward pass.
    total = (out * probe(torch.arange(NODES), out) + 0.1 * out.square()).sum(1).mean()
    (total if loss is None else total + loss).backward()
    grads = {n: None if p.grad is None else p.grad for n, p in model.named_parameters()}
    value = None if loss is None else loss.detach()
    return kept, whole(leaf.grad), grads, dict(model.named_buffers()), value


def all_passes(root: Path, made: dict[str, torch.nn.Module]) -> dict[str, Any]:
    """A worker's part: every case, or the text of its error."""
    torch.set_default_dtype(torch.float64)
    data, found = pyg_sar.load_partition(root), {}
    for name, (_, run) in CASES.items():
        try:
            model = pyg_sar.distribute(copy.deepcopy(made[name]))
            found[name] = one_pass(model, run, data)
        except (RuntimeError, ValueError) as refusal:
            found[name] = f"{type(refusal).__name__}: {refusal}"
    return found


@pytest.mark.parametrize(("world", "launch"), WORLDS)
def test_models_are_exact(world: int, launch: Any, tmp_path: Path):
    made = {}
    for name, (make, _) in CASES.items():
        torch.manual_seed(3)
        made[name] = make().double()
    pyg_sar.write_partitions(graph(), world, tmp_path / "parts", second_is_empty(NODES, world))
    expected = {
        name: one_pass(copy.deepcopy(made[name]), run, graph()) for name, (_, run) in CASES.items()
    }
    wrong = []
    for rank, found in enumerate(launch(all_passes, world, tmp_path / "parts", made)):
        for name, want in expected.items():
            got = found[name]
            if isinstance(got, str):
                wrong.append((name, rank, got))
                continue
            errors = {"out": error(got[0], want[0]), "x.grad": error(got[1], want[1])}
            errors["loss"] = error(got[4], want[4])
            scale = gradient_scale(want[2])
            errors |= {n: error(got[2][n], gradient, scale) for n, gradient in want[2].items()}
            errors |= {n: error(got[3][n], buffer) for n, buffer in want[3].items()}
            large = {n: value for n, value in errors.items() if not value <= TOLERANCE}
            if large:
                wrong.append((name, rank, large))
    assert not wrong, "\n".join(map(str, wrong))


OTHER = {
    **dict.fromkeys(("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"), "test_contract_use.py"),
    "to_captum_model": "test_convert.py",
    "to_captum_input": "test_convert.py",
    "captum_output_to_dicts": "test_convert.py",
    "HeteroJumpingKnowledge": "per node",
    "JumpingKnowledge": "in BasicGNN, jk",
    "SGFormer": "test_attention.py",
    "Polynormer": "test_attention.py",
    "InnerProductDecoder": "in GAE",
    "LINKX": "test_embedding.py",
    "LightGCN": "test_embedding.py",
    **dict.fromkeys(("Node2Vec", "MetaPath2Vec"), "samples walks"),
    **dict.fromkeys(("TGNMemory", "RENet"), "events in order"),
    **dict.fromkeys(("SchNet", "DimeNet", "DimeNetPlusPlus", "ViSNet", "GNNFF"), "molecules"),
    "PANPooling": "takes a SparseTensor",
    **dict.fromkeys(("GPSE", "GRetriever", "LPFormer"), "needs other packages"),
}


def test_every_model_and_pooling_is_shown():
    shown = {name.split(",")[0] for name in CASES} | set(OTHER)
    assert set(models.__all__) <= shown
    kinds = {n for n in pool.__all__ if isinstance(getattr(gnn, n, None), type)}
    kinds = {n for n in kinds if issubclass(getattr(gnn, n), torch.nn.Module)}
    assert kinds <= shown
