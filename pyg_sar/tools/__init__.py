"""The command line, verification, and graphs to try things on."""

from pyg_sar.tools.comparison import VerifyReport
from pyg_sar.tools.graph_sources import synthetic_graph
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.verify import call_with

__all__ = [
    "VerifyReport",
    "call_with",
    "load_graph",
    "synthetic_graph",
]
