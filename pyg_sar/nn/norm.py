"""Batch normalisation over the nodes of all workers, and the table of all norms."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch.nn.functional import batch_norm

from pyg_sar.comm.group import current
from pyg_sar.nn.compiled import between_graphs
from pyg_sar.nn.graph_norm import (
    DistGraphNorm,
    DistGraphSizeNorm,
    DistInstanceNorm,
    DistInstanceNorm1d,
    DistLayerNorm,
    DistMeanSubtractionNorm,
    DistPairNorm,
    plain_dtype,
    scaled,
)
from pyg_sar.reduction.moments import check_batch, moments, reduces_over_rows, standardise


class DistBatchNorm1d(torch.nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` whose batch is the nodes of all workers.

    Equal to one process in training and evaluation, running statistics included (variance with
    Bessel's correction over all nodes, ``momentum=None`` as cumulative average). With
    ``[N, C, L]``, every position is a row. In training every worker calls it; evaluation sends
    nothing.

    Raises:
        ValueError: When all workers together have at most one row in training.
    """

    @between_graphs
    def forward(self, input: Tensor, allow_single_element: bool = False) -> Tensor:
        """See :class:`torch.nn.BatchNorm1d`.

        Args:
            input: This worker's rows, ``[N, C]`` or ``[N, C, L]``.
            allow_single_element: With at most one row on all workers, use running statistics.
        """
        if not reduces_over_rows(self):
            return super().forward(input)
        if current().world_size == 1:
            single = allow_single_element and input.size(0) <= 1
            return _by_running(self, input) if single else super().forward(input)
        self._check_input_dim(input)
        return _over_all_rows(self, input, allow_single_element)


class DistSyncBatchNorm(torch.nn.SyncBatchNorm):
    """:class:`torch.nn.SyncBatchNorm` over this run's workers, as :class:`DistBatchNorm1d`."""

    @between_graphs
    def forward(self, input: Tensor, allow_single_element: bool = False) -> Tensor:
        """See :meth:`DistBatchNorm1d.forward`; ``[N, C, *]``."""
        if not reduces_over_rows(self):
            return super().forward(input)
        if current().world_size == 1:
            single = allow_single_element and input.size(0) <= 1
            return _by_running(self, input) if single else super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        return _over_all_rows(self, input, allow_single_element)


def _over_all_rows(norm: Any, input: Tensor, allow_single_element: bool) -> Tensor:
    """Batch statistics over every axis but the channels', and over the workers."""
    if input.size(1) != norm.num_features:
        raise ValueError(
            f"{type(norm).__name__} expected {norm.num_features} channels on axis 1, got a tensor "
            f"of shape {list(input.shape)} at rank {current().rank}"
        )
    last = input.movedim(1, -1)
    rows = last.reshape(-1, norm.num_features)
    found = moments(rows)
    total = int(found.count)
    if total <= 1 and allow_single_element:
        return _by_running(norm, input)
    if total <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training (got {total} rows on all "
            f"{current().world_size} workers)"
        )
    if norm.training and norm.track_running_stats:
        _track(norm, found.mean[0], found.variance[0] * (total / (total - 1)))
    scale = scaled((found.variance + norm.eps).rsqrt(), norm.weight)
    return standardise(rows, found.mean, scale, norm.bias).view(last.shape).movedim(-1, 1)


def _by_running(norm: Any, input: Tensor) -> Tensor:
    return batch_norm(
        input, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
    )


@torch.no_grad()
def _track(norm: Any, mean: Tensor, unbiased: Tensor) -> None:
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    factor = norm.momentum
    if factor is None:
        factor = 1.0 / float(norm.num_batches_tracked or 1)
    for running, now in ((norm.running_mean, mean), (norm.running_var, unbiased)):
        if running is not None:
            running.mul_(1 - factor).add_(now.to(running.dtype), alpha=factor)


class DistBatchNorm(gnn.BatchNorm):
    """:class:`torch_geometric.nn.BatchNorm` over the nodes of all workers."""

    @between_graphs
    def forward(self, x: Tensor) -> Tensor:
        """See :meth:`torch_geometric.nn.BatchNorm.forward`."""
        return self.module(x, True) if self.allow_single_element else self.module(x)


class DistHeteroBatchNorm(gnn.HeteroBatchNorm):
    """:class:`torch_geometric.nn.HeteroBatchNorm` over the nodes of all workers.

    As in PyG, no gradient flows through the statistics, eps is the least variance, and running
    statistics move for the types that any worker holds.
    """

    @between_graphs
    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """See :meth:`torch_geometric.nn.HeteroBatchNorm.forward`."""
        comm = current()
        if comm.world_size == 1 or not reduces_over_rows(self):
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


class DistDiffGroupNorm(gnn.DiffGroupNorm):
    """:class:`torch_geometric.nn.DiffGroupNorm`, whose batch norm is over all workers' nodes."""

    @staticmethod
    def group_distance_ratio(x: Tensor, y: Tensor, eps: float = 1e-5) -> float:
        """PyG's, on one worker.

        Raises:
            ValueError: On several workers: the distances between their nodes are missing.
        """
        comm = current()
        if comm.world_size > 1:
            raise ValueError(
                f"group_distance_ratio() needs all pairs of nodes, rank {comm.rank} of "
                f"{comm.world_size} has its own only: call it in one process on the whole graph"
            )
        return float(gnn.DiffGroupNorm.group_distance_ratio(x, y, eps))


NORMS: dict[type, type] = {
    torch.nn.BatchNorm1d: DistBatchNorm1d,
    torch.nn.InstanceNorm1d: DistInstanceNorm1d,
    torch.nn.SyncBatchNorm: DistSyncBatchNorm,
    gnn.BatchNorm: DistBatchNorm,
    gnn.DiffGroupNorm: DistDiffGroupNorm,
    gnn.GraphNorm: DistGraphNorm,
    gnn.GraphSizeNorm: DistGraphSizeNorm,
    gnn.HeteroBatchNorm: DistHeteroBatchNorm,
    gnn.InstanceNorm: DistInstanceNorm,
    gnn.LayerNorm: DistLayerNorm,
    gnn.MeanSubtractionNorm: DistMeanSubtractionNorm,
    gnn.PairNorm: DistPairNorm,
}
"""The norms that take statistics over nodes, and what :func:`pyg_sar.distribute` makes of them."""
