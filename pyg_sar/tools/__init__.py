"""The command line, verification, and graphs to try things on."""

from pyg_sar.tools.comparison import VerifyReport
from pyg_sar.tools.graph_sources import synthetic_graph
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.inference import propagate_features
from pyg_sar.tools.models import call_with
from pyg_sar.tools.predict import load_model

__all__ = [
    "VerifyReport",
    "call_with",
    "load_graph",
    "load_model",
    "propagate_features",
    "synthetic_graph",
]
