"""What a case of the coverage table is, and the graphs that cases run on.

A *case* is a PyG module with options, and the names of what it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from oracle import CHANNELS, TOLERANCE, make_graph
from torch import Tensor
from torch_geometric.data import Data

NODES, EDGES = 40, 200

Call = Callable[[torch.nn.Module, SimpleNamespace], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A class of PyG with options.

    Attributes:
        make: Builds the plain module.
        args: What it is called with: names of tensors of the graph, ``name=tensor`` for keywords,
            ``(x,x)`` for pairs. Floating point tensors get gradients.
        call: Calls it otherwise; ``args`` then only names the tensors that get gradients.
        constants: Tensors of ``args`` that get none.
        refused: The error that distribute() or the call raises must match this.
        unavailable: Why it can't be built here; building it must raise an ImportError.
        no_layer: It has no distributed meaning to test, for a reason that ``why`` gives.
        why: Why it is refused, for the table.
        level: ``'graph'`` where the result has a row per graph, the same on all workers.
        tolerance: Of float64; wider where PyG itself computes in float32.
        default_double: PyG mixes in tensors of the default dtype: make that float64, and don't
            look at others.
        relations: Relations that the layer joins; each sends rows of its own.
        graph: One of ``GRAPHS``.
        train: Whether the module trains.
        one_shot: Whether a warning that the whole halo is fetched is expected.
    """

    make: Callable[[], Any]
    args: str = "x edge_index"
    call: Call | None = None
    constants: str = ""
    refused: str = ""
    unavailable: bool = False
    no_layer: bool = False
    why: str = ""
    level: str = "node"
    tolerance: float = TOLERANCE
    default_double: bool = False
    relations: int = 1
    graph: str = "random"
    train: bool = True
    one_shot: bool = False

    def names(self) -> list[str]:
        """Names of the tensors that it is called with."""
        words = self.args.replace("(", " ").replace(")", " ").replace(",", " ").split()
        return list(dict.fromkeys(word.split("=")[-1] for word in words))


# Graphs ######################################################################


def coverage_graph() -> Data:
    """The oracle's random graph with everything that some layer asks for."""
    data = make_graph(NODES, EDGES)
    return dressed(data, torch.Generator().manual_seed(11))


def mesh_graph() -> Data:
    """Every node has four in-edges, in an order that matters (MeshCNN)."""
    draw = torch.Generator().manual_seed(12)
    nodes = 24
    source = torch.randint(nodes, (nodes * 4,), generator=draw)
    edges = torch.stack([source, torch.arange(nodes).repeat_interleave(4)])
    data = Data(
        x=torch.randn(nodes, CHANNELS, generator=draw, dtype=torch.float64),
        edge_index=edges,
        edge_weight=torch.rand(nodes * 4, generator=draw, dtype=torch.float64),
        edge_attr=torch.randn(nodes * 4, 4, generator=draw, dtype=torch.float64),
        num_nodes=nodes,
    )
    return dressed(data, draw)


def dressed(data: Data, draw: torch.Generator) -> Data:
    """Adds what layers ask for: positions, types, batches, ..."""
    nodes, edges = data.num_nodes, data.num_edges

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    data.pos = normal(nodes, 3)
    data.normal = torch.nn.functional.normalize(normal(nodes, 3), dim=-1)
    data.x0 = normal(nodes, CHANNELS)
    data.x_t = normal(nodes, CHANNELS)
    data.x_layers = normal(nodes, 3, CHANNELS)
    data.color = torch.randint(4, (nodes,), generator=draw)
    data.rare = (torch.arange(nodes) == 5).long() * 2 + (torch.arange(nodes) % 2)
    data.node_type = torch.randint(2, (nodes,), generator=draw)
    data.batch = torch.arange(nodes) * 3 // nodes
    data.edge_type = torch.randint(3, (edges,), generator=draw)
    data.positive = torch.rand(edges, generator=draw) < 0.6
    data.pseudo = torch.rand(edges, 2, generator=draw, dtype=torch.float64)
    return data


def sorted_graph() -> Data:
    """The same graph with its edges in the order of their targets, as some aggregations ask."""
    return coverage_graph().sort(sort_by_row=False)


GRAPHS = {"random": coverage_graph, "mesh": mesh_graph, "sorted": sorted_graph}
