"""Layers and norms that run on a distributed graph, and edges that are made for them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_sar.message.layer_state import modes_kept
from pyg_sar.nn.attention import global_attention
from pyg_sar.nn.embedding import NodeEmbedding
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.nn.norm import (
    NORMS,
    DistBatchNorm1d,
    DistGraphNorm,
    DistHeteroBatchNorm,
    DistInstanceNorm,
    DistInstanceNorm1d,
    DistLayerNorm,
    DistPairNorm,
    DistSyncBatchNorm,
)
from pyg_sar.space.distributed_index import DistEdgeIndex
from pyg_sar.tensors import NodeTensor
from pyg_sar.tensors.negative_sampling import negative_sampling
from pyg_sar.tensors.neighbors import knn_graph, radius_graph

__all__ = [
    "NORMS",
    "DistBatchNorm1d",
    "DistGraphNorm",
    "DistHeteroBatchNorm",
    "DistInstanceNorm",
    "DistInstanceNorm1d",
    "DistLayerNorm",
    "DistMessagePassing",
    "DistPairNorm",
    "DistSyncBatchNorm",
    "NodeEmbedding",
    "global_attention",
    "initialize",
    "knn_graph",
    "negative_sampling",
    "radius_graph",
]


@torch.no_grad()
def initialize(model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Initialises lazy parameters (``SAGEConv((-1, -1), 64)``, ``to_hetero``), for ``distribute``.

    Runs the model once, in evaluation mode and without gradients, on a plain graph of one node of
    each type and one edge of each relation, with the widths and dtypes of the arguments. Nothing
    is communicated, and a worker without nodes or edges does the same as the others.

    .. code-block:: python

        data = pyg_sar.load_partition(root)
        model = to_hetero(model, data.metadata())
        pyg_sar.nn.initialize(model, data.x_dict, data.edge_index_dict)
        model = pyg_sar.distribute(model)

    Args:
        model: The model, not converted yet.
        *args: What the model will be called with: node and edge tensors, whose first axis runs
            along nodes or edges, distributed edges, and dicts, lists or tuples of these.
        **kwargs: More of them.

    Returns:
        ``model``.
    """

    def cut(value: Any) -> Any:
        edges = isinstance(value, NodeTensor) and value.edges is not None
        plain = isinstance(value, Tensor) and not isinstance(value, NodeTensor)
        if plain and value.dtype == torch.long and value.dim() == 2:
            edges = len(value) == 2  # The edges of one process, which are not distributed.
        if edges or isinstance(value, DistEdgeIndex):
            return torch.zeros(2, 1, dtype=torch.long, device=value.device)
        if isinstance(value, Tensor) and value.dim() > 0:
            return torch.zeros(1, *value.shape[1:], dtype=value.dtype, device=value.device)
        return value

    with modes_kept(model):
        model.eval()
        model(*tree_map(cut, args), **tree_map(cut, kwargs))
    return model
