"""Classes of PyG that are newer than the oldest version that the package is for."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn


def newer(module: str, name: str, package: str = "torch_geometric.nn") -> Any:
    """Returns a class of PyG; where this PyG lacks it, one that nothing is an instance of."""
    try:
        return getattr(importlib.import_module(f"{package}{module}"), name)
    except (AttributeError, ImportError):
        return type(name, (nn.Module,), {"__doc__": "This PyG has no such class."})


ARLinkPredictor: Any = newer("", "ARLinkPredictor")
GPSE: Any = newer("", "GPSE")
GRetriever: Any = newer(".models", "GRetriever", "torch_geometric.llm")  # since PyG 2.7
OldGRetriever: Any = newer("", "GRetriever")
LPFormer: Any = newer("", "LPFormer")
MeshCNNConv: Any = newer("", "MeshCNNConv")
Polynormer: Any = newer("", "Polynormer")
PolynormerAttention: Any = newer(".attention", "PolynormerAttention")
QFormer: Any = newer(".attention", "QFormer")
SGFormerAttention: Any = newer(".attention", "SGFormerAttention")
SGModule: Any = newer(".models.sgformer", "SGModule")
