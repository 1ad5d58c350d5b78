"""Layers and norms that run on a distributed graph."""

from pyg_sar.nn.message_passing import DistMessagePassing, OneShotWarning
from pyg_sar.nn.norm import DistBatchNorm, DistBatchNorm1d

__all__ = ["DistBatchNorm", "DistBatchNorm1d", "DistMessagePassing", "OneShotWarning"]
