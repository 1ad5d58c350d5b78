"""Norms over nodes, where workers share a graph: their statistics are those of all workers' nodes.

[Note: norms per graph] Norms of graphs take ``batch``, the graph of each of this worker's nodes, or
``None`` for a single graph, as PyG's classes do; a graph's nodes may lie anywhere. Every worker
calls the norm, also one without nodes. One collective of :math:`O(F)` numbers forward, with
``batch`` two of so many per graph, and one backward; without ``batch_size`` one of a number more.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor

from pyg_sar.comm.group import Communicator, current
from pyg_sar.nn.uncompiled import between_graphs
from pyg_sar.reduction.moments import (
    Moments,
    check_batch,
    graph_moments,
    moments,
    normalise,
    reduces_over_rows,
    standardise,
)
from pyg_sar.wording import counted


def counts_all(norm: torch.nn.Module) -> bool:
    """Returns whether a norm takes its statistics over all workers' rows, not over what it gets."""
    local = "shared_parameters" not in vars(norm)
    return current().world_size > 1 and (local or current().in_layer)


# Norms per graph #############################################################


def plain_dtype(norm: torch.nn.Module, kind: Any, x: Tensor, batch: Tensor | None) -> torch.dtype:
    """Returns the dtype of ``kind.forward``: autocast's rules differ by operator and device."""
    state = (*norm.parameters(), *norm.buffers())
    kinds = {x.dtype, *(t.dtype for t in state if t.is_floating_point())}
    if len(kinds) == 1 and not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    stand_in = copy.copy(norm)  # running statistics are not to move
    stand_in._buffers = {n: None if b is None else b.clone() for n, b in norm._buffers.items()}
    with torch.no_grad():
        rows = x.new_zeros(2, x.size(1))
        graphs = None if batch is None else batch.new_zeros(2)
        dtype: torch.dtype = kind.forward(stand_in, rows, graphs).dtype
    return dtype


def scaled(inverse: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the inverse deviation times the weight, in float64."""
    return inverse if weight is None else inverse * weight.double()


def _standardised(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Standardised rows that lie in memory as ``x`` does, as operators on each element make them.

    Random numbers, those of a dropout, follow the order in memory.
    """
    out = standardise(x, *args, **options)
    return out if x.is_contiguous() else torch.empty_like(x, dtype=out.dtype).copy_(out)


class DistGraphNorm(gnn.GraphNorm):
    r""":class:`torch_geometric.nn.GraphNorm` over the nodes of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x}_i - \alpha \odot \mu}{\sqrt{\sigma^2 +
        (1 - \alpha)^2 \odot \mu^2 + \epsilon}} \odot \gamma + \beta

    which is the paper's, with the variance about :math:`\alpha \odot \mu` split into its two parts.
    """

    @between_graphs
    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """See :meth:`torch_geometric.nn.GraphNorm.forward`."""
        if not counts_all(self):
            return super().forward(x, batch, batch_size)
        found = graph_moments("GraphNorm", x, batch, batch_size)
        kept = self.mean_scale.double()
        spread = found.variance + ((1 - kept) * found.mean).square()
        scale = scaled((spread + self.eps).rsqrt(), self.weight)
        dtype = plain_dtype(self, gnn.GraphNorm, x, batch)
        return _standardised(x, found.mean * kept, scale, self.bias, batch, dtype)


class DistPairNorm(gnn.PairNorm):
    """:class:`torch_geometric.nn.PairNorm` over the nodes of all workers."""

    @between_graphs
    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """See :meth:`torch_geometric.nn.PairNorm.forward`."""
        if not counts_all(self):
            return super().forward(x, batch, batch_size)
        dtype = plain_dtype(self, gnn.PairNorm, x, batch)
        found = graph_moments("PairNorm", x, batch, batch_size)
        if self.scale_individually:
            x = _standardised(x, found.mean, batch=batch)
            return (self.scale * x / (self.eps + x.norm(2, -1, keepdim=True))).to(dtype)
        length = (self.eps + found.variance.sum(-1, keepdim=True)).sqrt()
        return _standardised(x, found.mean, self.scale / length, None, batch, dtype)


class DistLayerNorm(gnn.LayerNorm):
    """:class:`torch_geometric.nn.LayerNorm` over the nodes of all workers.

    With ``mode='node'`` it is PyG's and sends nothing. Without ``batch``, PyG adds eps to the
    deviation, with ``batch`` to the variance; so does this.
    """

    @between_graphs
    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """See :meth:`torch_geometric.nn.LayerNorm.forward`."""
        if not counts_all(self) or self.mode != "graph":
            return super().forward(x, batch, batch_size)
        found = graph_moments("LayerNorm(mode='graph')", x, batch, batch_size)
        mean = found.mean.mean(-1, keepdim=True)
        variance = (found.variance + (found.mean - mean).square()).mean(-1, keepdim=True)
        if batch is None:
            # As std(): no gradient where all values are equal.
            inverse = 1 / (variance.clamp(min=1e-300).sqrt() + self.eps)
        else:
            inverse = (variance + self.eps).rsqrt()
        dtype = plain_dtype(self, gnn.LayerNorm, x, batch)
        shift = mean.expand_as(found.mean)
        return _standardised(x, shift, scaled(inverse, self.weight), self.bias, batch, dtype)


class DistInstanceNorm(gnn.InstanceNorm):
    """:class:`torch_geometric.nn.InstanceNorm` over the nodes of all workers.

    Running statistics are PyG's: with ``batch``, the average over the graphs, also those without
    nodes.

    Raises:
        ValueError: Without ``batch``, when all workers together have at most one node, as in PyG.
    """

    @between_graphs
    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """See :meth:`torch_geometric.nn.InstanceNorm.forward`."""
        reduces = reduces_over_rows(self)
        if current().world_size == 1 or (reduces and not counts_all(self)):
            return super().forward(x, batch, batch_size)
        dtype = plain_dtype(self, gnn.InstanceNorm, x, batch)
        if not reduces:  # as well where a message runs again, with or without rows
            scale = scaled((self.running_var.double() + self.eps).rsqrt(), self.weight)
            shift, scale = self.running_mean.view(1, -1), scale.view(1, -1)
            return _transposed(standardise(x, shift, scale, self.bias, None, dtype), batch)
        found = graph_moments("InstanceNorm", x, batch, batch_size)
        whole = found.count.view(-1, 1)
        if batch is None and int(whole) <= 1:  # No deviation.
            raise ValueError(
                f"Expected more than 1 spatial element when training (got "
                f"{counted(int(whole), 'nodes')} on all {counted(current().world_size, 'workers')})"
            )
        unbiased = found.variance * whole / (whole - 1).clamp(min=1)
        _move(self, found.mean.mean(0), unbiased.mean(0), self.momentum)
        scale = scaled((found.variance + self.eps).rsqrt(), self.weight)
        return _transposed(standardise(x, found.mean, scale, self.bias, batch, dtype), batch)


def _transposed(rows: Tensor, batch: Tensor | None) -> Tensor:
    """Lays rows out as PyG's norm does without a batch: dropout draws in the order of memory."""
    return rows if batch is not None else rows.t().contiguous().t()


@torch.no_grad()
def _move(norm: Any, mean: Tensor, variance: Tensor, factor: float) -> None:
    """Moves running statistics towards those of a call."""
    for running, now in ((norm.running_mean, mean), (norm.running_var, variance)):
        if running is not None:
            running.mul_(1 - factor).add_(now.to(running.dtype), alpha=factor)


class DistInstanceNorm1d(torch.nn.InstanceNorm1d):
    """:class:`torch.nn.InstanceNorm1d` of rows ``[n, F]`` within a layer, as in ``GENConv``.

    Each row is normalised over its features, which torch takes for positions, so that no other
    worker is asked. On tensors of the whole graph it is torch's own.

    Raises:
        ValueError: Within a layer, where rows would be normalised together.
    """

    @between_graphs
    def forward(self, input: Tensor) -> Tensor:
        """See :class:`torch.nn.InstanceNorm1d`."""
        if not current().in_layer or current().world_size == 1:
            return super().forward(input)
        own = self.affine or self.track_running_stats  # of channels, which rows would be then
        if own or input.dim() != 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"InstanceNorm1d({self.num_features}, affine={self.affine}, track_running_stats="
                f"{self.track_running_stats}) got {list(input.shape)} within a layer (rank "
                f"{current().rank}), where it takes rows [n, {self.num_features}] and normalises "
                "each by itself: use torch_geometric.nn.InstanceNorm, or call it between layers"
            )
        return super().forward(input) if input.size(0) else input


# Norms over rows #############################################################


class DistBatchNorm1d(torch.nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` whose batch is the nodes of all workers.

    Equal to one process in training and evaluation, running statistics included (variance with
    Bessel's correction over all nodes, ``momentum=None`` as cumulative average). With
    ``[N, C, L]``, every position is a row. In training every worker calls it; evaluation sends
    nothing.

    Raises:
        ValueError: When all workers together have one row in training.
    """

    @between_graphs
    def forward(self, input: Tensor) -> Tensor:
        """See :class:`torch.nn.BatchNorm1d`; this worker's rows, ``[N, C]`` or ``[N, C, L]``."""
        if not reduces_over_rows(self) or not counts_all(self):
            return super().forward(input)
        self._check_input_dim(input)
        return _over_all_rows(self, input)


class DistSyncBatchNorm(torch.nn.SyncBatchNorm):
    """:class:`torch.nn.SyncBatchNorm` over this run's workers, as :class:`DistBatchNorm1d`.

    With replicas its statistics are over the rows of all of them, which call it together.
    """

    @between_graphs
    def forward(self, input: Tensor) -> Tensor:
        """See :meth:`DistBatchNorm1d.forward`; ``[N, C, *]``."""
        across = current().across
        alone = current().world_size == 1 and across is not None  # A part is a whole graph.
        if not reduces_over_rows(self) or not (counts_all(self) or alone):
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        return _over_all_rows(self, input, across)


def _over_all_rows(norm: Any, input: Tensor, across: Communicator | None = None) -> Tensor:
    """Normalises by statistics over every axis but the channels', and over the workers."""
    if input.size(1) != norm.num_features:
        raise ValueError(
            f"{type(norm).__name__} expected {norm.num_features} channels on axis 1, got a tensor "
            f"of shape {list(input.shape)} at rank {current().rank}"
        )
    last = input.movedim(1, -1)
    rows = last.reshape(-1, norm.num_features)
    tracks = norm.training and norm.track_running_stats
    track = partial(_track, norm) if tracks else None
    out, found = normalise(rows, norm.weight, norm.bias, norm.eps, across, track)
    total = int(found.count)
    if total == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training (got {counted(total, 'rows')} "
            f"on all {counted(current().world_size, 'workers')})"
        )
    return out.view(last.shape).movedim(-1, 1)


@torch.no_grad()
def _track(norm: Any, found: Moments) -> None:
    total = int(found.count)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    if total <= 1:
        return
    factor = norm.momentum
    if factor is None:
        factor = 1.0 / float(norm.num_batches_tracked or 1)
    _move(norm, found.mean[0], found.variance[0] * (total / (total - 1)), factor)


class DistHeteroBatchNorm(gnn.HeteroBatchNorm):
    """:class:`torch_geometric.nn.HeteroBatchNorm` over the nodes of all workers.

    As in PyG, no gradient flows through the statistics, eps is the least variance, and running
    statistics move for the types that any worker holds.
    """

    @between_graphs
    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """See :meth:`torch_geometric.nn.HeteroBatchNorm.forward`."""
        comm = current()
        if not counts_all(self) or not reduces_over_rows(self):
            return super().forward(x, type_vec)
        check_batch(x, type_vec, self.num_types, comm)
        found = moments(x.detach(), type_vec, self.num_types)
        if self.training and self.track_running_stats:
            self._track(found.count > 0, found.mean, found.variance)
        scale = scaled(found.variance.clamp(min=self.eps).rsqrt(), self.weight)
        dtype = plain_dtype(self, gnn.HeteroBatchNorm, x, type_vec)
        return standardise(x, found.mean, scale, self.bias, type_vec, dtype)

    @torch.no_grad()
    def _track(self, present: Tensor, mean: Tensor, variance: Tensor) -> None:
        factor = self.momentum
        if factor is None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked)
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            moved = (1 - factor) * running + factor * now.to(running.dtype)
            running.copy_(torch.where(present.view(-1, 1), moved, running))


NORMS: dict[type, type] = {
    torch.nn.BatchNorm1d: DistBatchNorm1d,
    torch.nn.InstanceNorm1d: DistInstanceNorm1d,
    torch.nn.SyncBatchNorm: DistSyncBatchNorm,
    gnn.GraphNorm: DistGraphNorm,
    gnn.HeteroBatchNorm: DistHeteroBatchNorm,
    gnn.InstanceNorm: DistInstanceNorm,
    gnn.LayerNorm: DistLayerNorm,
    gnn.PairNorm: DistPairNorm,
}
"""The norms that take statistics over nodes, and what :func:`pyg_sar.distribute` makes of them."""
