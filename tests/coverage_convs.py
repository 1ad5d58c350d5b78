"""The convolutions of PyG, each with options: how they are built and called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from coverage_case import Case
from oracle import CHANNELS as C
from oracle import EDGE_DIM as D
from oracle import OUT
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric import nn as gnn

Cases = dict[str, Case]

X, PAIR = "x edge_index", "(x,x_t) edge_index"
WEIGHT, ATTR = f"{X} edge_weight", f"{X} edge_attr=edge_attr"
PLAIN_ATTR = f"{X} edge_attr"
HISTOGRAM = torch.arange(12)


def mlp(inputs: int, outputs: int = OUT, *extra: torch.nn.Module) -> Sequential:
    return Sequential(Linear(inputs, 8), ReLU(), *extra, Linear(8, outputs))


def conv(kind: Any, *args: Any, call: str = X, **kwargs: Any) -> Case:
    """A convolution whose construction needs nothing but plain arguments."""
    return Case(make=lambda: kind(*args, **kwargs), args=call)


def rgat(*args: Any, **kwargs: Any) -> Any:
    """PyG 2.8 leaves ``l2`` as it finds the memory, which its reset means to fill."""
    layer = gnn.RGATConv(*args, **kwargs)
    torch.nn.init.constant_(layer.l2, 1 / layer.out_channels)
    return layer


# Hetero layers on one node type ##############################################

TYPES = (["n", "m"], [("n", "a", "n"), ("n", "b", "n")])


def split_types(g: SimpleNamespace) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    one, two = g.edge_index[:, g.positive], g.edge_index[:, ~g.positive]
    return {"n": g.x}, {("n", "a", "n"): one, ("n", "b", "n"): two}


def typed(make: Any, relations: int = 1) -> Case:
    return Case(
        make=make,
        args="x",
        call=lambda layer, g: layer(*split_types(g)),
        relations=relations,
    )


def signed(layer: torch.nn.Module, g: SimpleNamespace) -> Any:
    return layer(g.x, g.edge_index[:, g.positive], g.edge_index[:, ~g.positive])


# The table ###################################################################

CONVS: dict[str, Cases] = {
    "MessagePassing": {
        "sum": Case(make=lambda: Propagates("sum")),
        "max": Case(make=lambda: Propagates("max")),
    },
    "SimpleConv": {
        "sum": conv(gnn.SimpleConv, call=WEIGHT),
        "mean, root": conv(gnn.SimpleConv, "mean", "sum", call=WEIGHT),
        "max, cat": conv(gnn.SimpleConv, "max", "cat"),
        "several": conv(gnn.SimpleConv, ["sum", "min", "std"]),
        "self loop": conv(gnn.SimpleConv, "mean", "self_loop", call=WEIGHT),
        "pair": conv(gnn.SimpleConv, "sum", call=PAIR),
        "reversed": conv(gnn.SimpleConv, "sum", flow="target_to_source", call=WEIGHT),
        "reversed, max": conv(gnn.SimpleConv, "max", flow="target_to_source"),
    },
    "GCNConv": {
        "": conv(gnn.GCNConv, C, OUT),
        "weights": conv(gnn.GCNConv, C, OUT, call=WEIGHT),
        "improved, no bias": conv(gnn.GCNConv, C, OUT, improved=True, bias=False, call=WEIGHT),
        "cached": conv(gnn.GCNConv, C, OUT, cached=True),
        "no loops": conv(gnn.GCNConv, C, OUT, add_self_loops=False, call=WEIGHT),
        "not normalised": conv(gnn.GCNConv, C, OUT, normalize=False, call=WEIGHT),
        "reversed": conv(gnn.GCNConv, C, OUT, flow="target_to_source", call=WEIGHT),
        "constant weights": Case(make=lambda: gnn.GCNConv(C, OUT), args=WEIGHT,
                                 constants="edge_weight"),
    },
    "ChebConv": {
        "K=1": conv(gnn.ChebConv, C, OUT, K=1),
        "K=3": conv(gnn.ChebConv, C, OUT, K=3, call=WEIGHT),
        "rw": Case(make=lambda: gnn.ChebConv(C, OUT, 3, normalization="rw"), args=WEIGHT,
                   call=lambda m, g: m(g.x, g.edge_index, g.edge_weight,
                                       lambda_max=torch.tensor(2.5, dtype=g.x.dtype))),
        "none": Case(make=lambda: gnn.ChebConv(C, OUT, 2, normalization=None), args=WEIGHT,
                     call=lambda m, g: m(g.x, g.edge_index, g.edge_weight,
                                         lambda_max=torch.tensor(9.0, dtype=g.x.dtype))),
        "batch": Case(make=lambda: gnn.ChebConv(C, OUT, 3), args="x edge_weight",
                      call=lambda m, g: m(g.x, g.edge_index, g.edge_weight, g.batch,
                                          torch.tensor([2.0, 2.5, 3.0], dtype=g.x.dtype))),
    },
    "SAGEConv": {
        "mean": conv(gnn.SAGEConv, C, OUT),
        "sum, project": conv(gnn.SAGEConv, C, OUT, aggr="sum", project=True),
        "max, normalize": conv(gnn.SAGEConv, C, OUT, aggr="max", normalize=True),
        "min, no root": conv(gnn.SAGEConv, C, OUT, aggr="min", root_weight=False),
        "pair": conv(gnn.SAGEConv, (C, C), OUT, call=PAIR),
        "lstm": Case(make=lambda: gnn.SAGEConv(C, OUT, aggr="lstm"), graph="sorted"),
        "softmax": conv(gnn.SAGEConv, C, OUT, aggr="softmax", aggr_kwargs={"learn": True}),
        "std": conv(gnn.SAGEConv, C, OUT, aggr="std"),
        "median": conv(gnn.SAGEConv, C, OUT, aggr="median"),
        "several": conv(gnn.SAGEConv, C, OUT, aggr=["mean", "max", "var"]),
        "reversed": conv(gnn.SAGEConv, C, OUT, flow="target_to_source"),
        "reversed, max": conv(gnn.SAGEConv, C, OUT, aggr="max", flow="target_to_source"),
    },
    "CuGraphSAGEConv": {"": Case(make=lambda: gnn.CuGraphSAGEConv(C, OUT), unavailable=True,
                                 why="CUDA kernels of cugraph; use SAGEConv")},
    "GraphConv": {
        "add": conv(gnn.GraphConv, C, OUT, call=WEIGHT),
        "mean": conv(gnn.GraphConv, C, OUT, aggr="mean", call=WEIGHT),
        "max": conv(gnn.GraphConv, C, OUT, aggr="max", call=WEIGHT),
        "pair": conv(gnn.GraphConv, (C, C), OUT, call=PAIR),
    },
    "GravNetConv": {"": Case(
        make=lambda: gnn.GravNetConv(C, OUT, 3, 4, 2), unavailable=True,
        why="joins nearest neighbours by an operator of pyg-lib, which distributed tensors take")},
    "GatedGraphConv": {
        "": conv(gnn.GatedGraphConv, C, 2),
        "mean, weights": conv(gnn.GatedGraphConv, C, 3, aggr="mean", call=WEIGHT),
    },
    "ResGatedGraphConv": {
        "": conv(gnn.ResGatedGraphConv, C, OUT),
        "edges": conv(gnn.ResGatedGraphConv, C, OUT, edge_dim=D, call=PLAIN_ATTR),
        "no root, pair": conv(gnn.ResGatedGraphConv, (C, C), OUT, root_weight=False, call=PAIR),
    },
    "GATConv": {
        "": conv(gnn.GATConv, C, OUT),
        "heads, edges": conv(gnn.GATConv, C, OUT, heads=2, edge_dim=D, call=PLAIN_ATTR),
        "mean of heads": conv(gnn.GATConv, C, OUT, heads=3, concat=False),
        "no loops, edges": conv(gnn.GATConv, C, OUT, add_self_loops=False, edge_dim=D,
                                call=PLAIN_ATTR),
        "residual, fill": conv(gnn.GATConv, C, OUT, heads=2, edge_dim=D, fill_value=0.5,
                               residual=True, call=PLAIN_ATTR),
        "pair": conv(gnn.GATConv, (C, C), OUT, heads=2, add_self_loops=False, call=PAIR),
        "dropout, eval": Case(make=lambda: gnn.GATConv(C, OUT, heads=2, dropout=0.5), train=False),
        "reversed": conv(gnn.GATConv, C, OUT, heads=2, flow="target_to_source"),
        "attention weights": Case(
            make=lambda: gnn.GATConv(C, OUT, heads=2), args="x",
            call=lambda m, g: m(g.x, g.edge_index, return_attention_weights=True)[0]),
    },
    "CuGraphGATConv": {"": Case(make=lambda: gnn.CuGraphGATConv(C, OUT), unavailable=True,
                                why="CUDA kernels of cugraph; use GATConv")},
    "FusedGATConv": {"": Case(
        make=lambda: gnn.conv.FusedGATConv(C, OUT, add_self_loops=False), unavailable=True,
        why="CUDA kernels of dgNN on a CSR and CSC of its own; use GATConv")},
    "GATv2Conv": {
        "": conv(gnn.GATv2Conv, C, OUT, heads=2),
        "edges, mean of heads": conv(gnn.GATv2Conv, C, OUT, heads=2, edge_dim=D, concat=False,
                                     call=PLAIN_ATTR),
        "shared, no loops": conv(gnn.GATv2Conv, C, OUT, heads=2, share_weights=True,
                                 add_self_loops=False, residual=True),
        "pair": conv(gnn.GATv2Conv, (C, C), OUT, add_self_loops=False, call=PAIR),
        "reversed": conv(gnn.GATv2Conv, C, OUT, flow="target_to_source"),
    },
    "TransformerConv": {
        "": conv(gnn.TransformerConv, C, OUT, heads=2),
        "edges, beta": conv(gnn.TransformerConv, C, OUT, heads=2, edge_dim=D, beta=True,
                            call=PLAIN_ATTR),
        "mean, no root": conv(gnn.TransformerConv, C, OUT, heads=2, concat=False,
                              root_weight=False),
        "pair": conv(gnn.TransformerConv, (C, C), OUT, call=PAIR),
    },
    "AGNNConv": {
        "": conv(gnn.AGNNConv),
        "constant beta, no loops": conv(gnn.AGNNConv, requires_grad=False, add_self_loops=False),
    },
    "TAGConv": {
        "": conv(gnn.TAGConv, C, OUT, K=3, call=WEIGHT),
        "not normalised": conv(gnn.TAGConv, C, OUT, K=2, normalize=False, call=WEIGHT),
    },
    "GINConv": {
        "": Case(make=lambda: gnn.GINConv(mlp(C), train_eps=True)),
        "batch norm": Case(make=lambda: gnn.GINConv(mlp(C, OUT, BatchNorm1d(8)))),
        "mean": Case(make=lambda: gnn.GINConv(mlp(C), eps=0.3, aggr="mean")),
    },
    "GINEConv": {
        "": Case(make=lambda: gnn.GINEConv(mlp(C), edge_dim=D), args=PLAIN_ATTR),
        "train eps, max": Case(
            make=lambda: gnn.GINEConv(mlp(C), edge_dim=D, train_eps=True, aggr="max"),
            args=PLAIN_ATTR),
    },
    "ARMAConv": {
        "": conv(gnn.ARMAConv, C, OUT, call=WEIGHT),
        "stacks, layers": conv(gnn.ARMAConv, C, OUT, num_stacks=2, num_layers=2, call=WEIGHT),
        "shared": conv(gnn.ARMAConv, C, OUT, num_stacks=3, num_layers=2, shared_weights=True,
                       bias=False),
    },
    "SGConv": {
        "": conv(gnn.SGConv, C, OUT, K=2, call=WEIGHT),
        "cached": conv(gnn.SGConv, C, OUT, K=2, cached=True),
    },
    "SSGConv": {
        "": conv(gnn.SSGConv, C, OUT, alpha=0.1, K=3, call=WEIGHT),
        "cached, no loops": conv(gnn.SSGConv, C, OUT, alpha=0.2, K=2, cached=True,
                                 add_self_loops=False),
    },
    "APPNP": {
        "": conv(gnn.APPNP, K=3, alpha=0.1, call=WEIGHT),
        "cached, no loops": conv(gnn.APPNP, K=2, alpha=0.2, cached=True, add_self_loops=False),
        "dropout, eval": Case(make=lambda: gnn.APPNP(K=2, alpha=0.1, dropout=0.5), train=False),
    },
    "MFConv": {
        "": conv(gnn.MFConv, C, OUT, max_degree=4),
        "pair": conv(gnn.MFConv, (C, C), OUT, max_degree=3, call=PAIR),
    },
    "RGCNConv": {
        "": conv(gnn.RGCNConv, C, OUT, 3, call=f"{X} edge_type"),
        "bases, add": conv(gnn.RGCNConv, C, OUT, 3, num_bases=2, aggr="add",
                           call=f"{X} edge_type"),
        "blocks": conv(gnn.RGCNConv, C, 4, 3, num_blocks=2, call=f"{X} edge_type"),
        "max": conv(gnn.RGCNConv, C, OUT, 3, aggr="max", call=f"{X} edge_type"),
        "pair": conv(gnn.RGCNConv, (C, C), OUT, 3, call=f"{PAIR} edge_type"),
    },
    "FastRGCNConv": {
        "": conv(gnn.FastRGCNConv, C, OUT, 3, call=f"{X} edge_type"),
        "bases": conv(gnn.FastRGCNConv, C, OUT, 3, num_bases=2, call=f"{X} edge_type"),
        "blocks, add": conv(gnn.FastRGCNConv, C, 4, 3, num_blocks=2, aggr="add",
                            call=f"{X} edge_type"),
    },
    "CuGraphRGCNConv": {"": Case(make=lambda: gnn.CuGraphRGCNConv(C, OUT, 3), unavailable=True,
                                 why="CUDA kernels of cugraph; use RGCNConv")},
    "RGATConv": {
        "": conv(rgat, C, OUT, 3, heads=2, edge_dim=D,
                 call=f"{X} edge_type edge_attr"),
        "within, multiplicative": conv(
            rgat, C, OUT, 3, attention_mechanism="within-relation",
            attention_mode="multiplicative-self-attention", heads=2, dim=2,
            call=f"{X} edge_type"),
        "bases, additive": conv(rgat, C, 4, 3, num_bases=2, mod="additive",
                                call=f"{X} edge_type"),
        "blocks, f-scaled": conv(rgat, C, 4, 3, num_blocks=2, mod="f-scaled", concat=False,
                                 call=f"{X} edge_type"),
        "scaled": conv(rgat, C, OUT, 3, mod="scaled", call=f"{X} edge_type"),
    },
    "SignedConv": {
        "first": Case(make=lambda: gnn.SignedConv(C, OUT, True), args="x", call=signed),
        "later": Case(make=lambda: gnn.SignedConv(C // 2, OUT, False), args="x", call=signed),
    },
    "DNAConv": {
        "": conv(gnn.DNAConv, C, heads=2, groups=2, call="x_layers edge_index edge_weight"),
        "cached, not normalised": conv(gnn.DNAConv, C, heads=1, normalize=False,
                                       call="x_layers edge_index edge_weight"),
    },
    "PointNetConv": {
        "": Case(make=lambda: gnn.PointNetConv(mlp(C + 3), mlp(OUT)), args="x pos edge_index"),
        "mean, no loops": Case(
            make=lambda: gnn.PointNetConv(mlp(C + 3), None, add_self_loops=False, aggr="mean"),
            args="x pos edge_index"),
        "batch norm": Case(make=lambda: gnn.PointNetConv(gnn.MLP([C + 3, 8, OUT])),
                           args="x pos edge_index", one_shot=True),
    },
    "GMMConv": {
        "": conv(gnn.GMMConv, C, OUT, D, kernel_size=2, call=PLAIN_ATTR),
        "separate, add": conv(gnn.GMMConv, C, OUT, D, 3, separate_gaussians=True, aggr="add",
                              call=PLAIN_ATTR),
    },
    "SplineConv": {"": Case(
        make=lambda: gnn.SplineConv(C, OUT, dim=2, kernel_size=3), unavailable=True,
        why="needs torch-spline-conv or pyg-lib")},
    "NNConv": {
        "mean": Case(make=lambda: gnn.NNConv(C, OUT, mlp(D, C * OUT), aggr="mean"),
                     args=PLAIN_ATTR),
        "max, no root": Case(
            make=lambda: gnn.NNConv(C, OUT, Linear(D, C * OUT), aggr="max", root_weight=False),
            args=PLAIN_ATTR),
    },
    "CGConv": {
        "": conv(gnn.CGConv, C, dim=D, call=PLAIN_ATTR),
        "batch norm, mean": conv(gnn.CGConv, C, dim=D, batch_norm=True, aggr="mean",
                                 call=PLAIN_ATTR),
        "no edges": conv(gnn.CGConv, C),
    },
    "EdgeConv": {
        "max": Case(make=lambda: gnn.EdgeConv(mlp(2 * C))),
        "mean": Case(make=lambda: gnn.EdgeConv(mlp(2 * C), aggr="mean")),
        "batch norm": Case(make=lambda: gnn.EdgeConv(mlp(2 * C, OUT, BatchNorm1d(8)), aggr="add"),
                           one_shot=True),
    },
    "DynamicEdgeConv": {"": Case(
        make=lambda: gnn.DynamicEdgeConv(mlp(2 * C), 2), unavailable=True,
        why="joins nearest neighbours by an operator of pyg-lib, which distributed tensors take")},
    "XConv": {"": Case(
        make=lambda: None, no_layer=True,
        why="joins nearest neighbours by an operator of torch-cluster or pyg-lib")},
    "PPFConv": {
        "": Case(make=lambda: gnn.PPFConv(mlp(C + 4), mlp(OUT), add_self_loops=False),
                 args="x pos normal edge_index", constants="pos normal"),
        "loops, mean": Case(make=lambda: gnn.PPFConv(mlp(C + 4), aggr="mean"),
                            args="x pos normal edge_index", constants="pos normal"),
    },
    "FeaStConv": {
        "": conv(gnn.FeaStConv, C, OUT, heads=2),
        "no loops": conv(gnn.FeaStConv, C, OUT, heads=3, add_self_loops=False, bias=False),
    },
    "PointTransformerConv": {
        "": conv(gnn.PointTransformerConv, C, OUT, call="x pos edge_index"),
        "networks": Case(
            make=lambda: gnn.PointTransformerConv(C, OUT, mlp(3), mlp(OUT), add_self_loops=False),
            args="x pos edge_index"),
    },
    "HypergraphConv": {
        "": conv(gnn.HypergraphConv, C, OUT),
        "attention": Case(
            make=lambda: gnn.HypergraphConv(C, OUT, use_attention=True, heads=2),
            args="x edge_index hyperedge_attr=x0"),
        "edge attention": Case(
            make=lambda: gnn.HypergraphConv(
                C, OUT, use_attention=True, attention_mode="edge", concat=False),
            args="x edge_index hyperedge_attr=x0"),
    },
    "LEConv": {"": conv(gnn.LEConv, C, OUT, call=WEIGHT)},
    "PNAConv": {
        "": Case(make=lambda: gnn.PNAConv(
            C, OUT, ["mean", "max", "min", "std"], ["identity", "amplification", "attenuation"],
            HISTOGRAM, edge_dim=D), args=PLAIN_ATTR),
        "towers": Case(make=lambda: gnn.PNAConv(
            C, 4, ["sum", "var"], ["linear", "inverse_linear"], HISTOGRAM, towers=2,
            divide_input=True, pre_layers=2, post_layers=2)),
    },
    "ClusterGCNConv": {
        "": conv(gnn.ClusterGCNConv, C, OUT),
        "diagonal": conv(gnn.ClusterGCNConv, C, OUT, diag_lambda=0.5, bias=False),
    },
    "GENConv": {
        "softmax": conv(gnn.GENConv, C, OUT, edge_dim=D, call=PLAIN_ATTR),
        "softmax, learned": conv(gnn.GENConv, C, OUT, learn_t=True, learn_msg_scale=True,
                                 msg_norm=True),
        "powermean": conv(gnn.GENConv, C, OUT, aggr="powermean", learn_p=True, num_layers=1),
        "add, layer norm": conv(gnn.GENConv, C, OUT, aggr="add", norm="layer"),
        "pair": conv(gnn.GENConv, (C, C), OUT, call=PAIR),
    },
    "GCN2Conv": {
        "": conv(gnn.GCN2Conv, C, alpha=0.2, theta=0.5, layer=2, call="x x0 edge_index"),
        "weights": conv(gnn.GCN2Conv, C, alpha=0.2, call="x x0 edge_index edge_weight",
                        shared_weights=False),
    },
    "PANConv": {"": Case(
        make=lambda: gnn.PANConv(C, OUT, 2), args=X, refused="it multiplies adjacency",
        why="multiplies powers of the adjacency matrix")},
    "WLConv": {"": Case(make=lambda: gnn.WLConv(), args="color edge_index", train=False)},
    "WLConvContinuous": {
        "": conv(gnn.WLConvContinuous, call=WEIGHT),
        "no weights": conv(gnn.WLConvContinuous),
    },
    "FiLMConv": {
        "": conv(gnn.FiLMConv, C, OUT),
        "relations": conv(gnn.FiLMConv, C, OUT, num_relations=3, call=f"{X} edge_type"),
        "network, max": Case(make=lambda: gnn.FiLMConv(C, OUT, nn=Linear(C, 2 * OUT), act=None,
                                                       aggr="max")),
    },
    "SuperGATConv": {
        "MX, eval": Case(make=lambda: gnn.SuperGATConv(C, OUT, heads=2), train=False),
        "SD, eval": Case(make=lambda: gnn.SuperGATConv(C, OUT, heads=2, attention_type="SD",
                                                       concat=False), train=False),
        "training": Case(make=lambda: gnn.SuperGATConv(C, OUT, heads=2, edge_sample_ratio=0.8)),
    },
    "FAConv": {
        "": conv(gnn.FAConv, C, call="x x0 edge_index"),
        "weights": conv(gnn.FAConv, C, normalize=False, add_self_loops=False,
                        call="x x0 edge_index edge_weight"),
        "cached": conv(gnn.FAConv, C, cached=True, call="x x0 edge_index"),
    },
    "EGConv": {
        "symnorm": conv(gnn.EGConv, C, 4, num_heads=2, num_bases=2),
        "several": conv(gnn.EGConv, C, 4, ["sum", "mean", "max", "min", "std", "var", "symnorm"],
                        num_heads=2, num_bases=3),
        "no loops": conv(gnn.EGConv, C, 4, ["mean", "std"], num_heads=4, num_bases=2,
                         add_self_loops=False),
    },
    "PDNConv": {
        "": conv(gnn.PDNConv, C, OUT, D, 8, call=PLAIN_ATTR),
        "not normalised": conv(gnn.PDNConv, C, OUT, D, 8, normalize=False, add_self_loops=False,
                               call=PLAIN_ATTR),
    },
    "GeneralConv": {
        "": conv(gnn.GeneralConv, C, OUT),
        "edges, attention": conv(gnn.GeneralConv, C, OUT, D, attention=True, heads=2,
                                 call=f"{X} edge_attr=edge_attr"),
        "dot product, mean": conv(gnn.GeneralConv, C, OUT, attention=True, aggr="mean",
                                  attention_type="dot_product", skip_linear=True,
                                  l2_normalize=True),
        "directed": conv(gnn.GeneralConv, C, OUT, D, directed_msg=False,
                         call=f"{X} edge_attr=edge_attr"),
    },
    "HGTConv": {"": typed(lambda: gnn.HGTConv(
        {"n": C}, 4, (["n"], TYPES[1]), heads=2), relations=2)},
    "HEATConv": {
        "": conv(gnn.HEATConv, C, OUT, 2, 3, 3, D, 3, heads=2,
                 call=f"{X} node_type edge_type edge_attr"),
        "mean of heads": conv(gnn.HEATConv, C, OUT, 2, 3, 3, D, 3, heads=2, concat=False,
                              root_weight=False, call=f"{X} node_type edge_type edge_attr"),
    },
    "HeteroConv": {
        "sum": typed(lambda: gnn.HeteroConv({
            TYPES[1][0]: gnn.GCNConv(C, OUT), TYPES[1][1]: gnn.SAGEConv((C, C), OUT)})),
        "cat": typed(lambda: gnn.HeteroConv({
            TYPES[1][0]: gnn.SAGEConv(C, OUT, aggr="max"),
            TYPES[1][1]: gnn.GATConv((C, C), OUT, add_self_loops=False)}, aggr="cat")),
    },
    "HANConv": {"": typed(lambda: gnn.HANConv({"n": C}, 4, (["n"], TYPES[1]), heads=2))},
    "LGConv": {
        "": conv(gnn.LGConv, call=WEIGHT),
        "not normalised": conv(gnn.LGConv, normalize=False, call=WEIGHT),
    },
    "PointGNNConv": {"": Case(
        make=lambda: gnn.PointGNNConv(mlp(C, 3), mlp(C + 3, 7), mlp(7, C)),
        args="x pos edge_index")},
    "GPSConv": {
        "multihead": Case(
            make=lambda: gnn.GPSConv(C, gnn.SAGEConv(C, C), heads=2, norm="batch_norm")),
        "multihead, batch": Case(
            make=lambda: gnn.GPSConv(C, gnn.GINConv(mlp(C, C)), heads=2, norm=None),
            args=f"{X} batch"),
        "performer": Case(
            make=lambda: gnn.GPSConv(C, gnn.GCNConv(C, C), heads=2, norm="layer_norm",
                                     attn_type="performer"), args=f"{X} batch"),
    },
    "AntiSymmetricConv": {
        "": conv(gnn.AntiSymmetricConv, C, num_iters=2),
        "phi": Case(make=lambda: gnn.AntiSymmetricConv(C, gnn.GATConv(C, C), act="relu")),
    },
    "DirGNNConv": {
        "sage": Case(make=lambda: gnn.DirGNNConv(gnn.SAGEConv(C, OUT))),
        "gcn": Case(make=lambda: gnn.DirGNNConv(gnn.GCNConv(C, OUT), alpha=0.3)),
        "gat": Case(make=lambda: gnn.DirGNNConv(
            gnn.GATConv(C, OUT, add_self_loops=False), root_weight=False)),
    },
    "MixHopConv": {
        "": conv(gnn.MixHopConv, C, OUT, call=WEIGHT),
        "powers": conv(gnn.MixHopConv, C, OUT, [1, 3], add_self_loops=False, call=WEIGHT),
    },
    "MeshCNNConv": {"": Case(
        make=lambda: gnn.MeshCNNConv(C, OUT), graph="mesh", default_double=True, one_shot=True)},
}  # fmt: skip


class Propagates(gnn.MessagePassing):
    """The base class with its own message."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)
