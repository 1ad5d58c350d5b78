r"""Attention among all nodes of the graph, keys and values streamed from worker to worker.

See :mod:`pyg_sar.engine.kernels.dense`. All other attention is torch's own, by its operators.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.nn import MultiheadAttention

from pyg_sar.engine.kernels.dense import streamed_attention
from pyg_sar.message.row_modules import changes_of
from pyg_sar.tensors import FromLocal, NodeTensor
from pyg_sar.tensors.boundary import to_local


def global_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None = None, *, prefetch: int = 1
) -> Tensor:
    r"""Softmax attention of every node to all nodes of its graph.

    .. math::
        o_i = \sum_j \mathrm{softmax}_j\left(\frac{q_i^\top k_j}{\sqrt{d}}\right) v_j

    Scores of all pairs are never stored; keys and values of one other worker are at a time, or of
    two with ``prefetch``.

    Args:
        q: Queries, a tensor of the whole graph ``[N, heads, d]``.
        k: Keys, ``[N, heads, d]``.
        v: Values, ``[N, heads, d']``.
        batch: Graph of each node, int64 ``[N]``; by default they are of one graph.
        prefetch: Workers' keys and values that are fetched ahead: 0, or 1.

    Returns:
        ``[N, heads, d']``, a tensor of the whole graph.

    Raises:
        TypeError: When ``q`` is a plain tensor.
        ValueError: When the shapes don't fit.
    """
    if not isinstance(q, NodeTensor):
        raise TypeError(
            f"Expected 'q', 'k', 'v' to be tensors of the whole graph (got {type(q).__name__}): "
            "pass what is computed of load_partition(root)"
        )
    rows = q.rows
    q, k, v = (to_local(t, rows, 0) for t in (q, k, v))
    graph = None if batch is None else to_local(batch, rows, 0)
    out = streamed_attention(q, k, v, graph, prefetch=prefetch)
    return cast(Tensor, FromLocal.apply(out, rows, 0))


def _has_other_inputs(attn: MultiheadAttention) -> bool:
    """Returns whether keys or values are more, or others, than one projection of the nodes."""
    unlike = not attn._qkv_same_embed_dim or attn.bias_k is not None or attn.add_zero_attn
    return unlike or attn.in_proj_weight is None


def _heads(attn: MultiheadAttention, x: Tensor, part: int) -> Tensor:
    """Returns queries (0), keys (1) or values (2) of ``x [N, C]`` as ``[N, heads, d]``."""
    weight = attn.in_proj_weight.chunk(3)[part]
    bias = None if attn.in_proj_bias is None else attn.in_proj_bias.chunk(3)[part]
    return F.linear(x, weight, bias).view(x.size(0), attn.num_heads, attn.head_dim)


class GlobalMultiheadAttention(MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` between tensors of the whole graph.

    Attention of all nodes to each other streams keys and values, where torch's own would give no
    weights and drop none of them. All else is torch's, by its operators.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        axis = 1 if query.dim() == 3 and self.batch_first else 0
        streams = (
            isinstance(query, NodeTensor)
            and query is key is value
            and query.axis == axis
            and (query.dim() == 2 or query.size(1 - axis) == 1)
            and attn_mask is None
            and not (need_weights or is_causal or (self.training and self.dropout))
            and (key_padding_mask is None or not bool(key_padding_mask.any()))
            and not _has_other_inputs(self)
            and not changes_of(self)
        )
        if not streams:
            return super().forward(
                *(query, key, value, key_padding_mask, need_weights, attn_mask),
                *(average_attn_weights, is_causal),
            )
        x = cast(NodeTensor, query if query.dim() == 2 else query.squeeze(1 - axis))
        out = global_attention(*(_heads(self, x, part) for part in range(3)))
        out = self.out_proj(out.reshape(x.shape))
        return (out if query.dim() == 2 else out.unsqueeze(1 - axis)), None
