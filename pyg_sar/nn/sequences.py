"""torch's attention layers: within a sequence per row they are exact; among nodes, refused.

:class:`torch.nn.MultiheadAttention` attends along one axis and not along another, its batch. Where
that batch has one entry, or none, on all workers, the other axis holds the nodes: attention among
them would see each worker's own only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer

from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError


def check_sequences(layer: torch.nn.Module, x: Tensor, batch_first: bool) -> None:
    """Refuses attention among rows that are one sequence on every worker.

    Raises:
        DistributedIndexError: On every worker.
    """
    comm = current()
    if comm.world_size == 1:
        return
    axis = 0 if batch_first else 1
    sequences = torch.tensor([x.size(axis) if x.dim() == 3 else 1], device=x.device)
    comm.all_reduce(sequences, "max", label=("", "forward", "sequences"))
    if int(sequences) <= 1:
        raise DistributedIndexError(
            f"{type(layer).__name__} got one sequence of shape {list(x.shape)} at rank "
            f"{comm.rank}, as if of all nodes: it would attend to this worker's own nodes only. "
            "Use torch_geometric.nn.GPSConv or pyg_sar.nn.global_attention(q, k, v, batch); if "
            "the rows are the same on all workers, name the layer in distribute(replicated=[...])"
        )


class DistMultiheadAttention(MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` within sequences that each worker has of its own."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        check_sequences(self, query, self.batch_first)
        return super().forward(query, *args, **kwargs)


class DistTransformerEncoderLayer(TransformerEncoderLayer):
    """As :class:`DistMultiheadAttention`; torch's fast path goes around that."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_sequences(self, src, self.self_attn.batch_first)
        return super().forward(src, *args, **kwargs)


class DistTransformerDecoderLayer(TransformerDecoderLayer):
    """As :class:`DistMultiheadAttention`."""

    def forward(self, tgt: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_sequences(self, tgt, self.self_attn.batch_first)
        return super().forward(tgt, *args, **kwargs)


MODULES: dict[type, type] = {
    MultiheadAttention: DistMultiheadAttention,
    TransformerEncoderLayer: DistTransformerEncoderLayer,
    TransformerDecoderLayer: DistTransformerDecoderLayer,
}
