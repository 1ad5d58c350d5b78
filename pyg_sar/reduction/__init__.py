"""Sums over workers: of values, of moments of node rows, of parameter gradients."""

from pyg_sar.reduction.gradients import sum_gradients

__all__ = [
    "sum_gradients",
]
