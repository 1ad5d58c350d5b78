"""Layers of PyG whose code reduces over the rows that it gets: here, over those of all workers."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.utils import get_laplacian

from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.space.index_space import DistEdgeIndex


class ChebMixin(gnn.ChebConv):
    """Scales the Laplacian by twice the largest weight of all workers' edges."""

    def __norm__(
        self,
        edge_index: Tensor,
        num_nodes: int | None,
        edge_weight: Tensor | None,
        normalization: str | None,
        lambda_max: Any = None,
        dtype: Any = None,
        batch: Tensor | None = None,
    ) -> Any:
        comm = current()
        if lambda_max is None and comm.world_size > 1:
            _, weight = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
            weight = weight.detach()
            least = weight.new_full((1,), float("-inf"))
            most = torch.cat([weight, least]).max().view(1)
            lambda_max = (
                2.0 * comm.all_reduce(most, "max", label=("", "forward", "largest weight"))[0]
            )
        return super().__norm__(
            edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch
        )


class FastRGCNMixin(gnn.FastRGCNConv):
    """Takes a node without features by its id, which is its place in one process only."""

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        ids = x[0] if isinstance(x, tuple) else x
        if isinstance(edge_index, DistEdgeIndex) and ids is not None:
            known = edge_index.plan.n_id
            if not ids.is_floating_point() and (known is None or not torch.equal(ids, known)):
                raise DistributedIndexError(
                    f"{type(self).__name__} got ids of other nodes than its own (rank "
                    f"{current().rank}), and would take its own: use RGCNConv"
                )
        return cast(Tensor, super().forward(x, edge_index, edge_type))

    def message(self, x_j: Tensor, edge_type: Tensor, edge_index_j: Tensor) -> Tensor:
        if not x_j.is_floating_point():
            edge_index_j = x_j
        return cast(Tensor, super().message(x_j, edge_type, edge_index_j))


MIXINS: dict[type, type] = {
    gnn.ChebConv: ChebMixin,
    gnn.FastRGCNConv: FastRGCNMixin,
}


def check_layer(name: str, layer: torch.nn.Module, rank: int) -> None:
    """Raises ``ValueError`` on a layer that is right in one process alone."""
    if isinstance(layer, gnn.PANConv):
        raise ValueError(
            f"'{name}' ({type(layer).__name__}) can't run on several workers (rank {rank}): it "
            "multiplies adjacency matrices, of which a worker holds some rows only. Sum several "
            "steps of propagation instead: TAGConv, MixHopConv"
        )


def mixin_of(kind: type) -> tuple[type, ...]:
    """Returns the classes that go before :class:`DistMessagePassing` in a layer's bases."""
    return tuple(mixin for base, mixin in MIXINS.items() if issubclass(kind, base))
