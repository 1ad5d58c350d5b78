"""Calls that ``torch.compile`` does not look into: those that talk to other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # which PyG imports, too

from pyg_sar.space.index_space import DistEdgeIndex, DistIndex


def between_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ``torch.compile`` leaves as it is, between two graphs, and doesn't look into.

    Whatever talks to other workers is one: how often depends on the graph's parts, not on shapes.
    """
    why = "pyg_sar talks to other workers here, between two compiled graphs"
    found: Callable[..., Any] = torch.compiler.disable(function, reason=why)
    return found


def keep_out_of_graphs() -> None:
    """Tells ``torch.compile`` to hand distributed indices on, and not to take them apart."""
    torch._dynamo.config.nontraceable_tensor_subclasses.update({DistEdgeIndex, DistIndex})
