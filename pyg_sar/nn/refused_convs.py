"""PyG's convolutions that no partition of nodes makes right, and why: ``distribute`` refuses them.

What else can't run distributed is found when a layer is called. These would compute with one
worker's nodes or edges and say nothing, or fail with an error of something else.
"""

from __future__ import annotations

from torch_geometric import nn

_NEIGHBOURS = (
    "it builds a graph of k nearest neighbours in every pass, among this worker's nodes only. "
    "Build the graph once, before write_partitions(), and use {instead}"
)

REFUSED: dict[type, str] = {
    nn.DynamicEdgeConv: _NEIGHBOURS.format(instead="EdgeConv"),
    nn.GravNetConv: _NEIGHBOURS.format(instead="GraphConv with weights"),
    nn.XConv: _NEIGHBOURS.format(instead="PointNetConv or PointTransformerConv"),
    nn.HypergraphConv: (
        "its hyperedges are no edges between nodes, so that no worker owns them. Make hyperedges "
        "nodes of a type of their own (HeteroData), with SAGEConv or GATConv both ways"
    ),
    nn.PANConv: (
        "it multiplies adjacency matrices, of which a worker holds some rows only. Sum several "
        "steps of propagation instead: TAGConv, MixHopConv"
    ),
    nn.MeshCNNConv: (
        "it tells the four neighbours of a mesh's edge apart by their places in the edge list, "
        "which a partition changes"
    ),
    nn.WLConv: (
        "it numbers colours in the order in which it meets them, which differs between workers. "
        "Use WLConvContinuous, or colour the whole graph before write_partitions()"
    ),
}
