"""Sums over workers: of values, of moments of node rows, of parameter gradients."""

from pyg_sar.reduction.gradients import sum_gradients
from pyg_sar.reduction.parameters import clip_grad_norm

__all__ = [
    "clip_grad_norm",
    "sum_gradients",
]
