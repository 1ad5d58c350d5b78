"""Layers that are called with ``adj_t``: they get its edges and their weights."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    GatedGraphConv,
    GCN2Conv,
    GCNConv,
    GraphConv,
    LabelPropagation,
    LGConv,
    SGConv,
    SimpleConv,
    SSGConv,
    TAGConv,
)

from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.tensors import NodeMatrix

_PYG = "torch_geometric."
_TAKE_WEIGHTS = (
    *(APPNP, GatedGraphConv, GCN2Conv, GCNConv, GraphConv, SGConv, SimpleConv, SSGConv),
    TAGConv,
)
"""Layers to which a matrix is its entries' places, and their values as ``edge_weight``."""

_KEEP_LOOPS = (ARMAConv, LabelPropagation, LGConv, TAGConv)
"""Layers that normalise weights without loops of their own."""


def without_matrix(layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a call with edges and weights in the place of a matrix.

    Args:
        layer: The layer.
        args: What it is called with.
        kwargs: The same by name.

    Raises:
        DistributedIndexError: PyG's layer would do something else with a matrix.
    """
    matrices = [v for v in (*args, *kwargs.values()) if isinstance(v, NodeMatrix)]
    if not matrices:
        return args, kwargs
    kind: Any = type(layer)
    matrix, title = matrices[0], f"{kind.__name__} (rank {current().rank})"
    edges = matrix.places.flip(0)
    args = tuple(edges if v is matrix else v for v in args)
    kwargs = {name: edges if v is matrix else v for name, v in kwargs.items()}
    known = isinstance(layer, _TAKE_WEIGHTS) and kind.forward.__module__.startswith(_PYG)
    if not matrix.ones and known:
        args, kwargs = (), dict(inspect.signature(layer.forward).bind(*args, **kwargs).arguments)
        known = kwargs.get("edge_weight") is None
        kwargs["edge_weight"] = matrix.entries
    if len(matrices) > 1 or not (matrix.ones or known):
        raise DistributedIndexError(
            f"{title} got an 'adj_t' with weights, and may take them in another way than "
            "'edge_weight': leave ToSparseTensor out, and pass data.edge_index and weights"
        )
    normalizes = getattr(layer, "normalize", True) and _uses_gcn_norm(kind)
    adds = getattr(layer, "add_self_loops", not isinstance(layer, _KEEP_LOOPS))
    if normalizes and adds:
        target, source = matrix.places.unbind(0)
        if bool((target == source).any()):
            raise DistributedIndexError(
                f"{title} would add self-loops to those of 'adj_t', and PyG does so in another way "
                "for matrices than for edges: leave ToSparseTensor out, or pass normalize=False"
            )
    return args, kwargs


@cache
def _uses_gcn_norm(kind: Any) -> bool:
    """Returns whether a layer's module normalises weights as GCN does."""
    return any("gcn_norm" in vars(sys.modules.get(c.__module__, c)) for c in kind.__mro__)
