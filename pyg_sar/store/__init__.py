"""Where tensors wait that are not needed yet: in a file under a budget, or on a GPU's host."""

from pyg_sar.store.pager import Pager, PagerCounters

__all__ = ["Pager", "PagerCounters"]
