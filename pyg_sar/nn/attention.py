r"""Attention among all nodes of a graph that workers share, and torch's attention in sequences.

Softmax attention (``GPSConv``, ``QFormer``, ``SetTransformerAggregation``) streams keys and values
from worker to worker (:mod:`pyg_sar.engine.kernels.dense`). Attention that is linear in its kernel
needs, per graph and head, one matrix that is a sum over nodes (Katharopoulos et al., 2020):

.. math::
    o_i = \frac{q_i^\top \sum_j k_j v_j^\top}{q_i^\top \sum_j k_j}

[Note: padded rows] PyG puts graphs of different sizes into a dense batch, and Performer
and Polynormer attend to the padding: :math:`N_{max} - n_g` rows per graph whose values are masked
but whose keys count in the normaliser. The same numbers come out here: each graph has one row that
stands for its padding, counted that often. A single graph has none. (Dropout draws such a row
once, where PyG draws each of its copies.)

[Note: sequences] :class:`torch.nn.MultiheadAttention` attends along one axis and not along another,
its batch. Where that batch has one entry, or none, on all workers, the other axis holds the nodes:
attention among them would see each worker's own only, and is refused.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer
from torch_geometric.nn import GPSConv
from torch_geometric.nn.attention import PerformerAttention

from pyg_sar.comm.collectives import sum_over_workers
from pyg_sar.comm.group import current
from pyg_sar.engine.kernels.dense import global_attention
from pyg_sar.errors import DistributedIndexError
from pyg_sar.nn.newer import (
    Polynormer,
    PolynormerAttention,
    QFormer,
    SGFormerAttention,
    SGModule,
)
from pyg_sar.space.graph_index import DistBatch, dist_batch, one_graph, plain_batch
from pyg_sar.tensors import FromLocal, NodeTensor
from pyg_sar.tensors.boundary import to_local
from pyg_sar.wording import counted


def graphs_of(x: Tensor, batch: Tensor | None) -> DistBatch:
    """Returns the graph of each of this worker's rows of ``x [num_local, F]``."""
    found = one_graph(x.size(0), x.device) if batch is None else dist_batch(batch)
    if found.numel() != x.size(0):
        raise ValueError(
            f"Expected 'batch' to hold the graph of each of the {counted(x.size(0), 'nodes')} (got "
            f"{found.numel()} at rank {found.comm.rank})"
        )
    return found


# Softmax attention ###########################################################


def has_other_inputs(attn: MultiheadAttention) -> bool:
    """Returns whether keys or values are more, or others, than one projection of the nodes."""
    unlike = not attn._qkv_same_embed_dim or attn.bias_k is not None or attn.add_zero_attn
    return unlike or attn.in_proj_weight is None


def heads_of(attn: MultiheadAttention, x: Tensor, part: int) -> Tensor:
    """Returns queries (0), keys (1) or values (2) of ``x [n, C]`` as ``[n, heads, d]``."""
    if has_other_inputs(attn):
        raise ValueError(
            "Attention over all nodes needs a MultiheadAttention without 'kdim', 'vdim', "
            f"'add_bias_kv' and 'add_zero_attn' (rank {current().rank})"
        )
    weight = attn.in_proj_weight.chunk(3)[part]
    bias = None if attn.in_proj_bias is None else attn.in_proj_bias.chunk(3)[part]
    return F.linear(x, weight, bias).view(x.size(0), attn.num_heads, attn.head_dim)


def self_attention(attn: MultiheadAttention, x: Tensor, graphs: DistBatch) -> Tensor:
    """Returns ``attn(x, x, x)`` among the nodes of each graph, ``[n, C]`` to ``[n, C]``."""
    q, k, v = (heads_of(attn, x, part) for part in range(3))
    dropout = attn.dropout if attn.training else 0.0
    out = global_attention(q, k, v, graphs, dropout=dropout)
    return cast(Tensor, attn.out_proj(out.reshape(x.size(0), attn.embed_dim)))


# Linear attention ############################################################


def local_slices(graphs: DistBatch) -> tuple[Tensor, list[int]]:
    """Returns an order of this worker's nodes by graph, and the nodes of each graph in it."""
    ids = plain_batch(graphs)
    return ids.argsort(stable=True), ids.bincount(minlength=graphs.num_graphs).tolist()


def outer_sums(k: Tensor, v: Tensor, graphs: DistBatch) -> Tensor:
    r"""Returns :math:`\sum_j k_j v_j^\top` over each graph's nodes on all workers.

    Args:
        k: ``[n, heads, r]``.
        v: ``[n, heads, d]``.
        graphs: Graph of each row.

    Returns:
        ``[num_graphs, heads, r, d]``.
    """
    if graphs.num_graphs == 1:
        local = torch.einsum("nhr,nhd->hrd", k, v).unsqueeze(0)
    else:
        order, counts = local_slices(graphs)
        parts = zip(k[order].split(counts), v[order].split(counts), strict=True)
        local = torch.stack([torch.einsum("nhr,nhd->hrd", a, b) for a, b in parts])
    return sum_over_workers(local, graphs.comm)


def read_sums(q: Tensor, sums: Tensor, graphs: DistBatch) -> Tensor:
    r"""Returns :math:`q_i^\top S_{g(i)}`, ``[n, heads, d]``.

    Args:
        q: ``[n, heads, r]``.
        sums: ``[num_graphs, heads, r, d]``.
        graphs: Graph of each row.
    """
    if graphs.num_graphs == 1:
        return torch.einsum("nhr,hrd->nhd", q, sums[0])
    order, counts = local_slices(graphs)
    parts = zip(q[order].split(counts), sums, strict=True)
    out = torch.cat([torch.einsum("nhr,hrd->nhd", a, b) for a, b in parts])
    return out[order.argsort()]


class Padding:
    """The rows that PyG would pad these graphs with. See [Note: padded rows].

    Attributes:
        longest: Nodes of the largest graph.
        missing: Padded rows of each graph ``[num_graphs]``, or ``None`` if there are none.
    """

    def __init__(self, graphs: DistBatch) -> None:
        counts = torch.bincount(graphs)
        self.longest = int(counts.max()) if counts.numel() else 0
        missing = self.longest - counts
        self.missing = missing if bool(missing.any()) else None

    def rows(self, x: Tensor) -> Tensor:
        """Returns the nodes' rows, then a row of zeros per graph that stands for its padding."""
        if self.missing is None:
            return x
        return torch.cat([x, x.new_zeros(self.missing.numel(), x.size(1))])


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, graphs: DistBatch, padding: Padding
) -> tuple[Tensor, Tensor]:
    """Returns numerator and normaliser of linear attention, for nodes and padded rows.

    Args:
        q: ``[rows, heads, r]``, rows as in :meth:`Padding.rows`.
        k: ``[rows, heads, r]``.
        v: ``[rows, heads, d]``.
        graphs: Graph of each node.
        padding: The padded rows.

    Returns:
        ``[rows, heads, d]`` and ``[rows, heads, 1]``.
    """
    nodes = graphs.numel()
    wide = torch.cat([v[:nodes], v.new_ones(nodes, v.size(1), 1)], dim=-1)
    sums = outer_sums(k[:nodes], wide, graphs)
    if padding.missing is not None:
        more = k[nodes:] * padding.missing.view(-1, 1, 1)
        sums = torch.cat([sums[..., :-1], sums[..., -1:] + more.unsqueeze(-1)], dim=-1)
    out = read_sums(q[:nodes], sums, graphs)
    if padding.missing is not None:
        out = torch.cat([out, torch.einsum("nhr,nhrd->nhd", q[nodes:], sums)])
    return out[..., :-1], out[..., -1:]


def performer(attn: PerformerAttention, x: Tensor, graphs: DistBatch, padding: Padding) -> Tensor:
    """Returns :class:`PerformerAttention` of rows ``[rows, C]``."""
    shape = (x.size(0), attn.heads, attn.head_channels)
    q, k, v = (lin(x).view(shape) for lin in (attn.q, attn.k, attn.v))
    project = attn.fast_attn
    q, k = (project.kernel(t @ project.projection_matrix.t()) + 0.001 for t in (q, k))
    above, below = linear_attention(q, k, v, graphs, padding)
    out = (above * (1.0 / below)).reshape(x.size(0), attn.heads * attn.head_channels)
    return cast(Tensor, attn.dropout(attn.attn_out(out)))


def sgformer(attn: Any, x: Tensor, graphs: DistBatch, padding: Padding) -> Tensor:
    """Returns :class:`SGFormerAttention` of rows ``[rows, C]``."""
    shape = (x.size(0), attn.heads, attn.head_channels)
    q, k, v = (lin(x).view(shape) for lin in (attn.q, attn.k, attn.v))
    q, k = (t.masked_fill(t == 0, 1e-6) for t in (q, k))
    q, k = (t / torch.linalg.norm(t, ord=2, dim=-1, keepdim=True) for t in (q, k))
    above, below = linear_attention(q, k, v, graphs, padding)
    inner = torch.cat([v[: graphs.numel()], torch.zeros_like(v[graphs.numel() :])])
    return ((above + padding.longest * inner) / (below + padding.longest)).mean(dim=1)


def polynormer(attn: Any, x: Tensor, graphs: DistBatch, padding: Padding) -> Tensor:
    """Returns :class:`PolynormerAttention` of rows ``[rows, C]``."""

    def split(values: Tensor) -> Tensor:
        return values.view(x.size(0), attn.head_channels, attn.heads).transpose(1, 2)

    h, k, v = attn.h_lins(x), split(attn.k(x).sigmoid()), split(attn.v(x))
    q = k if attn.qk_shared else split(attn.q(x).sigmoid())
    above, below = linear_attention(q, k, v, graphs, padding)
    out = (above / (below + 1e-6)).transpose(1, 2).flatten(1)
    out = attn.lns(out) * (h + attn.beta)
    return cast(Tensor, attn.dropout(F.relu(attn.lin_out(out))))


# Modules #####################################################################


def _one_dense_graph(x: Tensor, mask: Tensor | None, name: str) -> tuple[Tensor, DistBatch]:
    """Returns this worker's rows of a dense batch ``[1, num_local, C]``."""
    if x.dim() != 3 or x.size(0) != 1 or (mask is not None and not bool(mask.all())):
        raise ValueError(
            f"{name} got a dense batch of shape {list(x.shape)} at rank {current().rank}: over "
            "workers it takes the nodes of one graph, [1, num_local, C], without padding"
        )
    return x[0], one_graph(x.size(1), x.device)


class _DenseAttention(torch.nn.Module):
    """Calls ``_attend(rows, graphs, padding)`` with the nodes of one graph."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if current().world_size == 1:
            return cast(Any, super()).forward(x, mask)
        rows, graphs = _one_dense_graph(x, mask, type(self).__name__)
        return self._attend(rows, graphs, Padding(graphs)).unsqueeze(0)

    def _attend(self, x: Tensor, graphs: DistBatch, padding: Padding) -> Tensor:
        raise NotImplementedError


class DistPerformerAttention(_DenseAttention, PerformerAttention):
    """:class:`PerformerAttention` over the nodes of all workers."""

    _attend = performer


class DistSGFormerAttention(_DenseAttention, SGFormerAttention):
    """:class:`SGFormerAttention` over the nodes of all workers."""

    _attend = sgformer


class DistPolynormerAttention(_DenseAttention, PolynormerAttention):
    """:class:`PolynormerAttention` over the nodes of all workers."""

    _attend = polynormer


class DistGPSConv(GPSConv):
    """:class:`GPSConv` that attends to the nodes of all workers."""

    def forward(
        self, x: Tensor, edge_index: Any, batch: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        parts = []
        if self.conv is not None:
            h = F.dropout(self.conv(x, edge_index, **kwargs), self.dropout, self.training)
            parts.append(self._normed(self.norm1, h + x, batch))
        graphs = graphs_of(x, batch)
        if isinstance(self.attn, MultiheadAttention):
            h = self_attention(self.attn, x, graphs)
        else:
            padding = Padding(graphs)
            h = performer(self.attn, padding.rows(x), graphs, padding)[: x.size(0)]
        h = F.dropout(h, self.dropout, self.training)
        parts.append(self._normed(self.norm2, h + x, batch))
        out = sum(parts[1:], parts[0])
        return self._normed(self.norm3, out + self.mlp(out), batch)

    def _normed(self, norm: Any, h: Tensor, batch: Tensor | None) -> Tensor:
        if norm is None:
            return h
        return cast(Tensor, norm(h, batch=batch) if self.norm_with_batch else norm(h))


class DistSGModule(SGModule):
    """:class:`SGFormer`'s attention module over the nodes of all workers."""

    def forward(self, x: Tensor, batch: Tensor | None) -> Tensor:
        graphs = graphs_of(x, batch)
        padding = Padding(graphs)

        def settle(values: Tensor, norm: Any) -> Tensor:
            values = self.activation(norm(values))
            return F.dropout(values, self.dropout, self.training)

        rows = settle(self.fcs[0](padding.rows(x)), self.bns[0])
        layers = [rows]
        for i, attn in enumerate(self.attns):
            rows = (sgformer(attn, rows, graphs, padding) + layers[i]) / 2.0
            rows = settle(rows, self.bns[i + 1])
            layers.append(rows)
        return rows[: x.size(0)]


class DistPolynormer(Polynormer):
    """:class:`Polynormer` whose global phase attends to the nodes of all workers."""

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor | None) -> Tensor:
        if not self._global:
            return super().forward(x, edge_index, batch)
        local = self._local(x, edge_index)
        graphs = graphs_of(local, batch)
        padding = Padding(graphs)
        rows = padding.rows(self.ln(local))
        for attn in self.global_attn:
            rows = polynormer(attn, rows, graphs, padding)
        return F.log_softmax(self.pred_global(rows[: x.size(0)]), dim=-1)

    def _local(self, x: Tensor, edge_index: Any) -> Tensor:
        """Returns the local phase, as in PyG's ``forward``."""
        x = F.dropout(x, self.in_drop, self.training)
        total: Any = 0
        for i, conv in enumerate(self.local_convs):
            if self.pre_ln:
                x = self.pre_lns[i](x)
            h = F.relu(self.h_lins[i](x))
            x = conv(x, edge_index) + self.lins[i](x)
            if self.post_bn:
                x = self.post_bns[i](x)
            x = F.dropout(F.relu(x), self.dropout, self.training)
            x = (1 - self.beta) * self.lns[i](h * x) + self.beta * x
            total = total + x
        return cast(Tensor, total)


class DistQFormer(QFormer):
    """:class:`QFormer` of one graph's nodes ``[num_local, C]`` (or ``[1, num_local, C]``)."""

    def forward(self, x: Tensor) -> Tensor:
        if current().world_size == 1:
            return cast(Tensor, super().forward(x))
        dense = x if x.dim() == 3 else x.unsqueeze(0)
        rows, graphs = _one_dense_graph(dense, None, type(self).__name__)
        rows = self.layer_norm(rows)
        for layer in self.encoder.layers:
            h = self_attention(layer.self_attn, rows, graphs)
            rows = layer.norm1(rows + layer.dropout1(h))
            rows = layer.norm2(rows + layer._ff_block(rows))
        return cast(Tensor, self.project(rows).view(*x.shape[:-1], self.project.out_features))


# Sequences ###################################################################


def check_sequences(layer: torch.nn.Module, x: Tensor, batch_first: bool) -> None:
    """Refuses attention among rows that are one sequence on every worker. See [Note: sequences].

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
            and not has_other_inputs(self)
        )
        if not streams:
            return super().forward(
                *(query, key, value, key_padding_mask, need_weights, attn_mask),
                *(average_attn_weights, is_causal),
            )
        x = cast(NodeTensor, query if query.dim() == 2 else query.squeeze(1 - axis))
        q, k, v = (to_local(heads_of(self, x, part), x.rows, 0) for part in range(3))
        out = global_attention(q, k, v, one_graph(x.rows.count, x.device))
        out = self.out_proj(FromLocal.apply(out, x.rows, 0).reshape(x.shape))
        return (out if query.dim() == 2 else out.unsqueeze(1 - axis)), None


SEQUENCES: dict[type, type] = {
    MultiheadAttention: DistMultiheadAttention,
    TransformerEncoderLayer: DistTransformerEncoderLayer,
    TransformerDecoderLayer: DistTransformerDecoderLayer,
}

MODULES: dict[type, type] = {
    GPSConv: DistGPSConv,
    SGModule: DistSGModule,
    Polynormer: DistPolynormer,
    PerformerAttention: DistPerformerAttention,
    SGFormerAttention: DistSGFormerAttention,
    PolynormerAttention: DistPolynormerAttention,
    QFormer: DistQFormer,
    **SEQUENCES,
}
