"""Aggregations, norms and models of PyG, each with options: how they are built and called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from coverage_case import NODES, Case
from coverage_convs import CONVS, HISTOGRAM, PLAIN_ATTR, WEIGHT, Cases, X, conv, mlp, signed
from oracle import CHANNELS as C
from oracle import CLASSES, EDGE_DIM, OUT
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.nn import aggr, models
from torch_geometric.utils import scatter

# Aggregations: of a node's neighbours, inside a convolution ##################


def inside(make: Any, **kwargs: Any) -> Case:
    """An aggregation as a convolution uses it."""
    return Case(make=lambda: gnn.SimpleConv(aggr=make()), **kwargs)


AGGREGATIONS: dict[str, Cases] = {
    "Aggregation": {"": Case(
        make=lambda: OwnAggregation(), args=X)},
    "MultiAggregation": {
        "cat": inside(lambda: aggr.MultiAggregation(["mean", "max", "std"])),
        "proj": inside(lambda: aggr.MultiAggregation(
            ["mean", "min"], mode="proj", mode_kwargs={"in_channels": C, "out_channels": OUT})),
        "attn": inside(lambda: aggr.MultiAggregation(
            ["mean", "sum"], mode="attn",
            mode_kwargs={"in_channels": C, "out_channels": C, "num_heads": 2})),
        "sum": inside(lambda: aggr.MultiAggregation(["sum", "max"], mode="sum")),
        "logsumexp": inside(lambda: aggr.MultiAggregation(["sum", "max"], mode="logsumexp")),
    },
    "SumAggregation": {"": inside(aggr.SumAggregation)},
    "MeanAggregation": {"": inside(aggr.MeanAggregation)},
    "MaxAggregation": {"": inside(aggr.MaxAggregation)},
    "MinAggregation": {"": inside(aggr.MinAggregation)},
    "MulAggregation": {"": inside(aggr.MulAggregation)},
    "VarAggregation": {
        "": inside(aggr.VarAggregation),
        "semi gradient": inside(lambda: aggr.VarAggregation(semi_grad=True)),
    },
    "StdAggregation": {
        "": inside(aggr.StdAggregation),
        "semi gradient": inside(lambda: aggr.StdAggregation(semi_grad=True)),
    },
    "SoftmaxAggregation": {
        "": inside(aggr.SoftmaxAggregation),
        "learned": inside(lambda: aggr.SoftmaxAggregation(t=0.5, learn=True)),
        "learned per channel": inside(lambda: aggr.SoftmaxAggregation(learn=True, channels=C)),
        "semi gradient": inside(lambda: aggr.SoftmaxAggregation(t=2.0, semi_grad=True)),
    },
    "PowerMeanAggregation": {
        "": inside(lambda: aggr.PowerMeanAggregation(p=2.0)),
        "learned per channel": inside(
            lambda: aggr.PowerMeanAggregation(p=1.5, learn=True, channels=C)),
    },
    "MedianAggregation": {"": inside(aggr.MedianAggregation)},
    "QuantileAggregation": {
        "": inside(lambda: aggr.QuantileAggregation(0.3)),
        "several, lower": inside(
            lambda: aggr.QuantileAggregation([0.25, 0.75], interpolation="lower")),
    },
    "LSTMAggregation": {"": inside(lambda: aggr.LSTMAggregation(C, OUT), graph="sorted")},
    "GRUAggregation": {"": inside(lambda: aggr.GRUAggregation(C, OUT), graph="sorted")},
    "Set2Set": {"": inside(lambda: aggr.Set2Set(C, processing_steps=2))},
    "DegreeScalerAggregation": {
        "": inside(lambda: aggr.DegreeScalerAggregation(
            ["mean", "std"], ["identity", "amplification", "attenuation"], HISTOGRAM)),
        "trained": inside(lambda: aggr.DegreeScalerAggregation(
            ["sum", "max"], ["linear", "inverse_linear"], HISTOGRAM, train_norm=True)),
    },
    "SortAggregation": {"": inside(lambda: aggr.SortAggregation(k=3), graph="sorted")},
    "GraphMultisetTransformer": {"": inside(
        lambda: aggr.GraphMultisetTransformer(C, k=3, heads=2), graph="sorted")},
    "AttentionalAggregation": {
        "": inside(lambda: aggr.AttentionalAggregation(mlp(C, 1))),
        "per channel": inside(lambda: aggr.AttentionalAggregation(mlp(C, OUT), mlp(C, OUT))),
    },
    "EquilibriumAggregation": {"": inside(
        lambda: aggr.EquilibriumAggregation(C, OUT, num_layers=[8], grad_iter=2),
        tolerance=1e-6, default_double=True, one_shot=True)},
    "MLPAggregation": {"": inside(
        lambda: aggr.MLPAggregation(C, OUT, 20, num_layers=1), graph="sorted")},
    "DeepSetsAggregation": {
        "": inside(lambda: aggr.DeepSetsAggregation(mlp(C), mlp(OUT))),
        "local only": inside(lambda: aggr.DeepSetsAggregation(mlp(C))),
    },
    "SetTransformerAggregation": {"": inside(
        lambda: aggr.SetTransformerAggregation(C, num_seed_points=2, heads=2, layer_norm=True),
        graph="sorted")},
    "LCMAggregation": {"": inside(
        lambda: aggr.LCMAggregation(C, OUT), graph="sorted")},
    "VariancePreservingAggregation": {"": inside(aggr.VariancePreservingAggregation)},
    "PatchTransformerAggregation": {"": inside(
        lambda: aggr.PatchTransformerAggregation(C, OUT, patch_size=2, hidden_channels=8),
        graph="sorted")},
}  # fmt: skip


class OwnAggregation(gnn.SimpleConv):
    """A user's aggregation."""

    def __init__(self) -> None:
        super().__init__(aggr=LogSum())


class LogSum(aggr.Aggregation):
    def forward(
        self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
    ) -> Tensor:
        return self.reduce(x.exp(), index, ptr, dim_size, dim, reduce="sum").log1p()


# Norms #######################################################################


def norm(kind: Any, *args: Any, call: str = "x", **kwargs: Any) -> Case:
    return Case(make=lambda: kind(*args, **kwargs), args=call)


def evaluated(make: Any, call: str = "x") -> Case:
    return Case(make=make, args=call, train=False)


NORMS: dict[str, Cases] = {
    "BatchNorm": {
        "": norm(gnn.BatchNorm, C),
        "plain": norm(gnn.BatchNorm, C, affine=False, track_running_stats=False),
        "momentum, single": norm(gnn.BatchNorm, C, momentum=None, allow_single_element=True),
        "evaluation": evaluated(lambda: gnn.BatchNorm(C)),
    },
    "HeteroBatchNorm": {
        "": norm(gnn.HeteroBatchNorm, C, 2, call="x node_type"),
        "evaluation": evaluated(lambda: gnn.HeteroBatchNorm(C, 2), "x node_type"),
    },
    "InstanceNorm": {
        "": norm(gnn.InstanceNorm, C),
        "batch, affine": norm(gnn.InstanceNorm, C, affine=True, track_running_stats=True,
                              call="x batch"),
    },
    "LayerNorm": {
        "graph": norm(gnn.LayerNorm, C),
        "graph, batch": norm(gnn.LayerNorm, C, call="x batch"),
        "node": norm(gnn.LayerNorm, C, mode="node"),
    },
    "HeteroLayerNorm": {"": norm(gnn.HeteroLayerNorm, C, 2, call="x node_type")},
    "GraphNorm": {"": norm(gnn.GraphNorm, C), "batch": norm(gnn.GraphNorm, C, call="x batch")},
    "GraphSizeNorm": {
        "": norm(gnn.GraphSizeNorm),
        "batch": norm(gnn.GraphSizeNorm, call="x batch"),
    },
    "PairNorm": {
        "": norm(gnn.PairNorm),
        "individually": norm(gnn.PairNorm, scale=2.0, scale_individually=True),
        "batch": norm(gnn.PairNorm, call="x batch"),
    },
    "MeanSubtractionNorm": {
        "": norm(gnn.MeanSubtractionNorm),
        "batch": norm(gnn.MeanSubtractionNorm, call="x batch"),
    },
    "MessageNorm": {"": norm(gnn.MessageNorm, learn_scale=True, call="x x0")},
    "DiffGroupNorm": {
        "": norm(gnn.DiffGroupNorm, C, 3),
        "evaluation": evaluated(lambda: gnn.DiffGroupNorm(C, 2)),
    },
}  # fmt: skip


# Models ######################################################################

HELPER = "a function for explanations, no layer"


def basic(kind: Any, *, call: str = X, **kwargs: Any) -> Case:
    return Case(make=lambda: kind(C, 8, 2, OUT, **kwargs), args=call)


def not_a_layer(why: str) -> Case:
    return Case(make=lambda: None, no_layer=True, why=why)


class EdgeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nn = mlp(2 * C + EDGE_DIM, EDGE_DIM)

    def forward(self, src: Tensor, dst: Tensor, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
        return self.nn(torch.cat([src, dst, edge_attr], dim=-1))


class NodeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nn = mlp(C + EDGE_DIM)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: Any, batch: Any) -> Any:
        inbox = scatter(edge_attr, edge_index[1], dim=0, dim_size=x.size(0), reduce="mean")
        return self.nn(torch.cat([x, inbox], dim=-1))


def decoded(model: torch.nn.Module, g: SimpleNamespace) -> Tensor:
    """Scores of edges, summed at their targets."""
    scores = model(g.x, g.edge_index)
    return scatter(scores, g.edge_index[1], dim_size=g.x.size(0), reduce="sum")


def encoded(model: Any, g: SimpleNamespace) -> Tensor:
    return model.encode(g.x, g.edge_index)


def smoothed(model: Any, g: SimpleNamespace) -> Tensor:
    soft = g.x[:, :CLASSES].softmax(dim=-1)
    true = g.y[g.train_mask]
    soft = model.correct(soft, true, g.train_mask, g.edge_index)
    return model.smooth(soft, true, g.train_mask, g.edge_index)


def discriminated(model: Any, g: SimpleNamespace) -> Tensor:
    positive, negative, summary = model(g.x, g.edge_index)
    return [
        model.discriminate(positive, summary).view(-1, 1),
        model.discriminate(negative, summary).view(-1, 1),
    ]


def gcn() -> torch.nn.Module:
    return models.GCN(C, 8, 2, OUT)


def block(kind: str, **kwargs: Any) -> Case:
    return Case(
        make=lambda: models.DeepGCNLayer(
            gnn.GENConv(C, C), gnn.LayerNorm(C, mode="node"), torch.nn.ReLU(), block=kind, **kwargs
        )
    )


MODELS: dict[str, Cases] = {
    "MLP": {
        "": norm(models.MLP, [C, 8, OUT], norm=None),
        "batch norm": norm(models.MLP, [C, 8, OUT]),
        "layer norm": norm(models.MLP, [C, 8, OUT], norm="layer_norm", norm_kwargs={
            "mode": "node"}),
    },
    "GCN": {
        "": basic(models.GCN, call=f"{X} edge_weight=edge_weight"),
        "batch norm, jk max": basic(models.GCN, norm="batch_norm", jk="max"),
        "graph norm, jk lstm": basic(models.GCN, norm="graph_norm", jk="lstm", act_first=True),
    },
    "GraphSAGE": {
        "": basic(models.GraphSAGE, jk="cat"),
        "layer norm": basic(models.GraphSAGE, norm="layer_norm", aggr="max"),
    },
    "GIN": {"": basic(models.GIN), "batch norm": basic(models.GIN, norm="batch_norm")},
    "GAT": {
        "": basic(models.GAT, heads=2),
        "v2, edges": basic(models.GAT, v2=True, heads=2, edge_dim=EDGE_DIM,
                           call=f"{X} edge_attr=edge_attr"),
    },
    "PNA": {"": Case(make=lambda: models.PNA(
        C, 8, 2, OUT, aggregators=["mean", "max", "std"], scalers=["identity", "attenuation"],
        deg=HISTOGRAM))},
    "EdgeCNN": {"": basic(models.EdgeCNN)},
    "JumpingKnowledge": {
        mode: Case(make=lambda mode=mode: models.JumpingKnowledge(mode, C, 2), args="x x0",
                   call=lambda m, g: m([g.x, g.x0]))
        for mode in ("cat", "max", "lstm")
    },
    "HeteroJumpingKnowledge": {"": Case(
        make=lambda: models.HeteroJumpingKnowledge(["n"], "lstm", C, 2), args="x x0",
        call=lambda m, g: m({"n": [g.x, g.x0]}))},
    "MetaLayer": {"": Case(
        make=lambda: models.MetaLayer(EdgeModel(), NodeModel()), args="x edge_attr",
        call=lambda m, g: m(g.x, g.edge_index, g.edge_attr)[0])},
    "Node2Vec": {"": Case(
        make=lambda: models.Node2Vec(torch.tensor([[0, 1], [1, 0]]), 4, 3, 2), unavailable=True,
        why="random walks (pyg-lib or torch-cluster)")},
    "DeepGraphInfomax": {"": Case(
        make=lambda: models.DeepGraphInfomax(
            8, models.GCN(C, 8, 1), summary=lambda z, *args: z.mean(0).sigmoid(),
            corruption=lambda x, e: (x.cos(), e)),
        args="x", call=discriminated)},
    "InnerProductDecoder": {"": Case(
        make=models.InnerProductDecoder, args="x", call=decoded)},
    "GAE": {"encode": Case(make=lambda: models.GAE(gcn()), args="x", call=encoded)},
    "VGAE": {"encode, evaluation": Case(
        make=lambda: models.VGAE(Twice()), args="x", call=encoded, train=False)},
    "ARGA": {"encode": Case(
        make=lambda: models.ARGA(gcn(), mlp(OUT, 1)), args="x", call=encoded)},
    "ARGVA": {"encode, evaluation": Case(
        make=lambda: models.ARGVA(Twice(), mlp(OUT, 1)), args="x", call=encoded, train=False)},
    "SignedGCN": {"": Case(make=lambda: models.SignedGCN(C, 8, 2), args="x", call=signed)},
    "RENet": {"": not_a_layer("takes events in order")},
    "GraphUNet": {"": Case(
        make=lambda: models.GraphUNet(C, 8, OUT, depth=2))},
    "SchNet": {"": not_a_layer("takes batches of molecules, whose edges it makes itself")},
    "DimeNet": {"": not_a_layer("takes batches of molecules, whose edges it makes itself")},
    "DimeNetPlusPlus": {"": not_a_layer("takes batches of molecules, whose edges it makes itself")},
    "GPSE": {"": not_a_layer("needs other packages")},
    "GPSENodeEncoder": {"": Case(
        make=lambda: models.GPSENodeEncoder(8, C, 4, dim_in=C, expand_x=True, dropout_be=0.0,
                                            dropout_ae=0.0), args="x x0")},
    "to_captum_model": {"": not_a_layer(HELPER)},
    "to_captum_input": {"": not_a_layer(HELPER)},
    "captum_output_to_dicts": {"": not_a_layer(HELPER)},
    "MetaPath2Vec": {"": not_a_layer("samples random walks")},
    "DeepGCNLayer": {kind: block(kind) for kind in ("res+", "res", "dense", "plain")} | {
        "res+, checkpointed": block("res+", ckpt_grad=True)},
    "TGNMemory": {"": not_a_layer("takes events in order")},
    "LabelPropagation": {
        "soft labels": Case(make=lambda: models.LabelPropagation(2, 0.7),
                            args="x edge_index mask=train_mask edge_weight=edge_weight"),
        "classes": Case(make=lambda: models.LabelPropagation(2, 0.7), tolerance=1e-6,
                        args="rare edge_index mask=train_mask"),
    },
    "CorrectAndSmooth": {
        "autoscale": Case(make=lambda: models.CorrectAndSmooth(2, 0.8, 2, 0.7), args="x",
                          call=smoothed),
        "scale": Case(make=lambda: models.CorrectAndSmooth(2, 0.8, 2, 0.7, False, 0.5), args="x",
                      call=smoothed),
    },
    "AttentiveFP": {"": Case(
        make=lambda: models.AttentiveFP(C, 8, OUT, EDGE_DIM, 2, 2), level="graph",
        args=f"{PLAIN_ATTR} batch")},
    "RECT_L": {"": Case(make=lambda: models.RECT_L(C, 8), args=WEIGHT)},
    "LINKX": {"": Case(
        make=lambda: models.LINKX(NODES, C, 8, OUT, 2), args=WEIGHT)},
    "LightGCN": {"": Case(
        make=lambda: models.LightGCN(NODES, 8, 2), args="edge_weight",
        call=lambda m, g: m.get_embedding(g.edge_index, g.edge_weight))},
    "MaskLabel": {
        "add": Case(make=lambda: models.MaskLabel(CLASSES, C), args="x y train_mask"),
        "concat": Case(make=lambda: models.MaskLabel(CLASSES, 4, "concat"),
                       args="x y train_mask"),
    },
    "GroupAddRev": {"": Case(make=lambda: models.GroupAddRev(gnn.SAGEConv(C // 2, C // 2), -1, 2))},
    "GNNFF": {"": not_a_layer("takes batches of molecules, whose edges it makes itself")},
    "PMLP": {
        "training": conv(models.PMLP, C, 8, OUT, 2),
        "evaluation": Case(make=lambda: models.PMLP(C, 8, OUT, 2), train=False),
    },
    "NeuralFingerprint": {"": Case(
        make=lambda: models.NeuralFingerprint(C, 8, OUT, 2), args=f"{X} batch", level="graph")},
    "ViSNet": {"": not_a_layer("takes batches of molecules, whose edges it makes itself")},
    "LPFormer": {"": not_a_layer("needs other packages")},
    "SGFormer": {"": Case(
        make=lambda: models.SGFormer(C, 8, OUT, trans_dropout=0.0, gnn_dropout=0.0),
        args=f"{X} batch", default_double=True)},
    "Polynormer": {
        "local": Case(make=lambda: polynormer(False), args=f"{X} batch"),
        "global": Case(make=lambda: polynormer(True), args=f"{X} batch"),
    },
    "ARLinkPredictor": {"": Case(make=lambda: models.ARLinkPredictor(C, 8, OUT), args="x",
                                 call=decoded)},
}  # fmt: skip


def polynormer(attends: bool) -> torch.nn.Module:
    model = models.Polynormer(C, 8, OUT, 2, 1, in_dropout=0.0, dropout=0.0, global_dropout=0.0)
    model._global = attends  # as after its warm-up epochs
    return model


class Twice(torch.nn.Module):
    """Mean and log deviation of a variational encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = gnn.GCNConv(C, OUT), gnn.GCNConv(C, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x, edge_index), self.two(x, edge_index)


TABLES: dict[str, tuple[Any, dict[str, Cases]]] = {
    "conv": (gnn.conv, CONVS),
    "aggr": (gnn.aggr, AGGREGATIONS),
    "norm": (gnn.norm, NORMS),
    "models": (gnn.models, MODELS),
}
