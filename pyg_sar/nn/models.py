"""PyG's models that reduce over nodes or edges, over all workers; ``WLConv``; the models refused.

Most models need nothing: their layers are distributed and the rest works on each node. Those here
reduce by themselves; the classes override just the methods that do. A loss comes from
:func:`pyg_sar.mean`, so that calling ``backward()`` on it on every worker gives the gradients of
one process.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.nn.models.autoencoder import EPS, MAX_LOGSTD
from torch_geometric.utils import get_laplacian, one_hot, scatter

from pyg_sar.comm.collectives import sum_over_workers
from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.nn import newer
from pyg_sar.nn.pool import global_add_pool
from pyg_sar.reduction.metrics import mean
from pyg_sar.space.graph_index import dist_batch
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.negative_sampling import sampled_pairs
from pyg_sar.space.node_rows import node_rows, plain_rows
from pyg_sar.wording import counted

_COLOURS = ("", "forward", "colours")


def _count(number: int, device: torch.device) -> int:
    """Returns the sum over workers of a number that has no gradient."""
    total = torch.tensor([number], device=device)
    return int(current().all_reduce(total, label=("", "forward", "count")))


def _alone() -> bool:
    return current().world_size == 1


def _refuse(model: torch.nn.Module, what: str, instead: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__}.{what} would see the nodes of rank {current().rank} only; "
        f"{instead}"
    )


class DistDeepGraphInfomax(gnn.DeepGraphInfomax):
    """:class:`DeepGraphInfomax` whose summary and loss are over the nodes of all workers.

    ``summary`` and ``corruption`` get node rows (:mod:`pyg_sar.space.node_rows`): means over axis 0
    are global, and shuffling rows needs :func:`pyg_sar.nn.shuffle_nodes`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        rows = [node_rows(a) for a in args]
        named = {name: node_rows(a) for name, a in kwargs.items()}
        pos_z = self.encoder(*args, **kwargs)
        found = self.corruption(*rows, **named)
        changed = [plain_rows(a) for a in (found if isinstance(found, tuple) else (found,))]
        other = copy.copy(kwargs)
        other.update(zip(kwargs, changed[len(args) :], strict=False))
        neg_z = self.encoder(*changed[: len(args)], **other)
        return pos_z, neg_z, plain_rows(self.summary(node_rows(pos_z), *rows, **named))

    def loss(self, pos_z: Tensor, neg_z: Tensor, summary: Tensor) -> Tensor:
        right = -torch.log(self.discriminate(pos_z, summary) + EPS)
        wrong = -torch.log(1 - self.discriminate(neg_z, summary) + EPS)
        return mean(right) + mean(wrong)

    def test(self, *args: Any, **kwargs: Any) -> float:
        if _alone():
            return cast(float, super().test(*args, **kwargs))
        raise _refuse(self, "test()", "save the embeddings with data.n_id and fit on one process")


class DistInnerProductDecoder(gnn.InnerProductDecoder):
    """:class:`InnerProductDecoder` of distributed edges."""

    def forward_all(self, z: Tensor, sigmoid: bool = True) -> Tensor:
        if _alone():
            return cast(Tensor, super().forward_all(z, sigmoid))
        raise _refuse(
            self, "forward_all()", "the dense matrix of all pairs isn't made over workers"
        )


class _Reconstruction(gnn.GAE):
    """Losses of :class:`GAE` over the edges of all workers."""

    def recon_loss(
        self, z: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor | None = None
    ) -> Tensor:
        if neg_edge_index is None and isinstance(pos_edge_index, DistEdgeIndex):
            neg_edge_index = sampled_pairs(pos_edge_index, None, False)[0]
        if _alone():
            return cast(Tensor, super().recon_loss(z, pos_edge_index, neg_edge_index))
        for name, edges in (("pos", pos_edge_index), ("neg", neg_edge_index)):
            if not isinstance(edges, DistEdgeIndex):
                raise ValueError(
                    f"'{name}_edge_index' must hold distributed edges (got "
                    f"{type(edges).__name__} at rank {current().rank}): pairs of load_partition() "
                    "or of pyg_sar.negative_sampling()"
                )
        right = -torch.log(self.decoder(z, pos_edge_index, sigmoid=True) + EPS)
        wrong = -torch.log(1 - self.decoder(z, neg_edge_index, sigmoid=True) + EPS)
        return mean(right) + mean(wrong)

    def test(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if _alone():
            return cast(tuple[Tensor, Tensor], super().test(*args, **kwargs))
        raise _refuse(self, "test()", "gather predictions and labels and score them on one process")


class DistGAE(_Reconstruction):
    """:class:`GAE` over workers."""


class DistVGAE(_Reconstruction, gnn.VGAE):
    """:class:`VGAE` over workers."""

    def kl_loss(self, mu: Tensor | None = None, logstd: Tensor | None = None) -> Tensor:
        mu = self.__mu__ if mu is None else mu
        logstd = self.__logstd__ if logstd is None else logstd.clamp(max=MAX_LOGSTD)
        return -0.5 * mean(torch.sum(1 + 2 * logstd - mu**2 - logstd.exp() ** 2, dim=1))


class DistARGA(_Reconstruction, gnn.ARGA):
    """:class:`ARGA` over workers."""

    def reg_loss(self, z: Tensor) -> Tensor:
        return mean(-torch.log(torch.sigmoid(self.discriminator(z)) + EPS))

    def discriminator_loss(self, z: Tensor) -> Tensor:
        real = torch.sigmoid(self.discriminator(torch.randn_like(z)))
        fake = torch.sigmoid(self.discriminator(z.detach()))
        return mean(-torch.log(real + EPS)) + mean(-torch.log(1 - fake + EPS))


class DistARGVA(DistARGA, gnn.ARGVA):
    """:class:`ARGVA` over workers."""


class DistSignedGCN(gnn.SignedGCN):
    """:class:`SignedGCN`'s layers and discriminator over workers; its losses sample pairs."""

    def _sampled(self, name: str, *args: Any) -> Any:
        if _alone():
            return getattr(super(), name)(*args)
        raise _refuse(
            self,
            f"{name}()",
            "take pyg_sar.mean() of F.nll_loss(model.discriminate(z, edges), y, reduction='none') "
            "with pairs that are edges of the partition",
        )

    def nll_loss(self, *args: Any) -> Tensor:
        return cast(Tensor, self._sampled("nll_loss", *args))

    def pos_embedding_loss(self, *args: Any) -> Tensor:
        return cast(Tensor, self._sampled("pos_embedding_loss", *args))

    def neg_embedding_loss(self, *args: Any) -> Tensor:
        return cast(Tensor, self._sampled("neg_embedding_loss", *args))

    def loss(self, *args: Any) -> Tensor:
        return cast(Tensor, self._sampled("loss", *args))

    def test(self, *args: Any) -> tuple[float, float]:
        return cast(tuple[float, float], self._sampled("test", *args))

    def create_spectral_features(self, *args: Any) -> Tensor:
        return cast(Tensor, self._sampled("create_spectral_features", *args))


class DistCorrectAndSmooth(gnn.CorrectAndSmooth):
    """:class:`CorrectAndSmooth` whose error scale is over the labelled nodes of all workers."""

    def correct(
        self,
        y_soft: Tensor,
        y_true: Tensor,
        mask: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        if not self.autoscale:
            return super().correct(y_soft, y_true, mask, edge_index, edge_weight)
        number = int(mask.sum()) if mask.dtype == torch.bool else mask.size(0)
        if y_true.size(0) != number:
            raise ValueError(
                f"Expected 'y_true' to hold the labels of the {counted(number, 'nodes')} of 'mask' "
                f"(got {y_true.size(0)} at rank {current().rank})"
            )
        if y_true.dtype == torch.long and y_true.size(0) == y_true.numel():
            y_true = one_hot(y_true.view(-1), num_classes=y_soft.size(-1), dtype=y_soft.dtype)
        error = torch.zeros_like(y_soft)
        error[mask] = y_true - y_soft[mask]
        smoothed = self.prop1(
            error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0)
        )
        total = sum_over_workers(error[mask].abs().sum(), current())
        sigma = total / _count(number, y_soft.device)
        scale = sigma / smoothed.abs().sum(dim=1, keepdim=True)
        scale = scale.masked_fill(scale.isinf() | (scale > 1000), 1.0)
        return y_soft + scale * smoothed


class LabelPropagationMixin(gnn.LabelPropagation):
    """One-hot labels with the classes of all workers."""

    def forward(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if y.dtype == torch.long and y.size(0) == y.numel():
            largest = y.max().view(1) if y.numel() else y.new_full((1,), -1)
            current().all_reduce(largest, "max", label=("", "forward", "classes"))
            y = one_hot(y.view(-1), num_classes=int(largest) + 1)
        return cast(Tensor, super().forward(y, *args, **kwargs))


class DistRectL(gnn.RECT_L):
    """:class:`RECT_L` whose semantic labels are class means over all workers."""

    def get_semantic_labels(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            labels = dist_batch(y[mask])
            return scatter(x[mask], labels, dim=0, reduce="mean")[labels]


class DistNeuralFingerprint(gnn.NeuralFingerprint):
    """:class:`NeuralFingerprint` of graphs that workers share."""

    def forward(
        self, x: Tensor, edge_index: Any, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        total: Any = 0
        batch = None if batch is None else dist_batch(batch)
        for conv, lin in zip(self.convs, self.lins, strict=True):
            x = conv(x, edge_index).sigmoid()
            total = total + global_add_pool(lin(x).softmax(dim=-1), batch, batch_size)
        return cast(Tensor, total)


class DistARLinkPredictor(newer.ARLinkPredictor):
    """:class:`ARLinkPredictor` of distributed edges."""

    def calculate_r_fraction(self, attract_z: Tensor, repel_z: Tensor) -> float:
        norms = torch.stack([(attract_z**2).sum(), (repel_z**2).sum()]).detach()
        attract, repel = sum_over_workers(norms, current())
        return float(repel / (attract + repel + 1e-10))


class HANMixin(gnn.HANConv):
    """Semantic attention with the mean over the nodes of all workers."""

    def forward(
        self,
        x_dict: dict[str, Tensor],
        edge_index_dict: dict[Any, Any],
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        shape = (-1, self.heads, self.out_channels // self.heads)
        x = {
            kind: self.proj[kind](value).view(value.size(0), *shape[1:])
            for kind, value in x_dict.items()
        }
        found: dict[str, list[Tensor]] = {kind: [] for kind in x_dict}
        for edge_type, edge_index in edge_index_dict.items():
            source, _, target = edge_type
            name = "__".join(edge_type)
            pair = (x[source], x[target])
            alpha = (
                (pair[0] * self.lin_src[name]).sum(dim=-1),
                (pair[1] * self.lin_dst[name]).sum(dim=-1),
            )
            found[target].append(F.relu(self.propagate(edge_index, x=pair, alpha=alpha)))
        joined = {kind: self._semantic(outs) for kind, outs in found.items()}
        out = {kind: values for kind, (values, _) in joined.items()}
        if return_semantic_attention_weights:
            return out, {kind: weights for kind, (_, weights) in joined.items()}
        return out

    def _semantic(self, outs: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        if not outs:
            return None, None
        out = torch.stack(outs)  # [relations, nodes, channels]
        scores = torch.tanh(self.k_lin(out))
        local = scores.sum(1, dtype=wide_dtype(scores.dtype))
        total, count = sum_over_workers(local, current()), _count(out.size(1), out.device)
        if count == 0:
            return out[0], None
        mean_scores = (total / count).to(scores.dtype)
        weights = F.softmax((self.q * mean_scores).sum(-1), dim=0)
        return (weights.view(-1, 1, 1) * out).sum(dim=0), weights


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


class DistWLConv(gnn.WLConv):
    r"""Weisfeiler-Lehman colours of the nodes of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \textrm{hash} \left( \mathbf{x}_i, \{ \mathbf{x}_j \colon j \in
        \mathcal{N}(i) \} \right)

    PyG numbers colours in the order in which they come up among nodes :math:`0, 1, \ldots`; so
    every worker sees the hashes of all nodes, 16 bytes each, and keeps the same table.

    Raises:
        DistributedIndexError: When edges are flipped, or the partition's global ids are not known.
    """

    @torch.no_grad()
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        if not isinstance(edge_index, DistEdgeIndex):
            return super().forward(x, edge_index)
        plan = edge_index.plan
        if edge_index.dist_row != 0 or edge_index.bipartite or plan.n_id is None:
            raise DistributedIndexError(
                f"WLConv needs the edge_index of load_partition(), not flipped (rank {plan.rank})"
            )
        if x.dim() > 1:
            if not bool((x.sum(dim=-1) == 1).all()):
                raise ValueError(f"Expected one-hot colours in 'x' at rank {plan.rank}")
            x = x.argmax(dim=-1)
        source, target = edge_index
        order = target.argsort(stable=True)
        degrees = torch.bincount(target, minlength=plan.num_local).tolist()
        neighbours = x[source][order].split(degrees)
        hashes = [
            hash((node, *sorted(near.tolist())))
            for node, near in zip(x.tolist(), neighbours, strict=True)
        ]
        return self._numbered(torch.tensor(hashes, dtype=torch.long, device=x.device), plan)

    def _numbered(self, hashes: Tensor, plan: Any) -> Tensor:
        """Numbers hashes ``[num_local]`` in the order of the nodes of all workers."""
        comm = plan.comm
        count = hashes.new_tensor([hashes.numel()])
        counts = [int(n) for n in comm.all_gather(count, label=_COLOURS)]
        mine = hashes.new_zeros(2, max(counts))
        mine[:, : hashes.numel()] = torch.stack([plan.n_id, hashes])
        rows = comm.all_gather(mine, label=_COLOURS)
        ids, every = torch.cat([row[:, :n] for row, n in zip(rows, counts, strict=True)], 1)
        for value in every[ids.argsort()].tolist():
            self.hashmap.setdefault(value, len(self.hashmap))
        numbers = [self.hashmap[value] for value in hashes.tolist()]
        return torch.tensor(numbers, dtype=torch.long, device=hashes.device)


MODULES: dict[type, type] = {
    gnn.DeepGraphInfomax: DistDeepGraphInfomax,
    gnn.InnerProductDecoder: DistInnerProductDecoder,
    gnn.GAE: DistGAE,
    gnn.VGAE: DistVGAE,
    gnn.ARGA: DistARGA,
    gnn.ARGVA: DistARGVA,
    gnn.SignedGCN: DistSignedGCN,
    gnn.CorrectAndSmooth: DistCorrectAndSmooth,
    gnn.RECT_L: DistRectL,
    gnn.NeuralFingerprint: DistNeuralFingerprint,
    newer.ARLinkPredictor: DistARLinkPredictor,
    gnn.WLConv: DistWLConv,
}

MIXINS: dict[type, type] = {
    gnn.ChebConv: ChebMixin,
    gnn.LabelPropagation: LabelPropagationMixin,
    gnn.HANConv: HANMixin,
    gnn.FastRGCNConv: FastRGCNMixin,
}

_COARSE = "it ranks or merges the nodes of the whole graph"
_TEXTS = "it takes the mean over the nodes of each text's graph itself"
_POSITIONS = "it makes its graph from the positions of all atoms; train it on batches of molecules"
_WALKS = "it samples random walks over the whole graph"
_EVENTS = "it keeps a memory of all nodes that events change in order"

REFUSED: dict[type, str] = {
    gnn.TopKPooling: _COARSE,
    gnn.SAGPooling: _COARSE,
    gnn.EdgePooling: _COARSE,
    gnn.ClusterPooling: _COARSE,
    gnn.ASAPooling: _COARSE,
    gnn.PANPooling: _COARSE,
    gnn.MemPooling: _COARSE,
    gnn.GraphUNet: _COARSE,
    gnn.Node2Vec: _WALKS,
    gnn.MetaPath2Vec: _WALKS,
    gnn.TGNMemory: _EVENTS,
    gnn.RENet: _EVENTS,
    gnn.SchNet: _POSITIONS,
    gnn.DimeNet: _POSITIONS,
    gnn.DimeNetPlusPlus: _POSITIONS,
    gnn.ViSNet: _POSITIONS,
    gnn.GNNFF: _POSITIONS,
    gnn.AttentiveFP: "it passes messages from nodes to graphs",
    newer.GRetriever: _TEXTS,
    newer.OldGRetriever: _TEXTS,
    newer.GPSE: "it joins nodes to a virtual node of each graph within its layers",
    newer.LPFormer: "it looks up personalised PageRank and neighbours of any pair of nodes",
}
