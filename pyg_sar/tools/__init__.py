"""The command line, verification, and graphs to try things on."""

from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.synthetic import synthetic_graph
from pyg_sar.tools.verify import call_with
from pyg_sar.tools.verify_report import VerifyReport

__all__ = [
    "VerifyReport",
    "call_with",
    "load_graph",
    "synthetic_graph",
]
