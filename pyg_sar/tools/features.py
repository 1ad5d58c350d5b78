"""Features propagated once, before the training: SIGN, SGC, and what else needs no gradient."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import LGConv
from torch_geometric.utils import add_remaining_self_loops

from pyg_sar.comm.group import current
from pyg_sar.convert import distribute
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.storage import add_attributes


@torch.no_grad()
def propagate_features(
    parts: str | os.PathLike[str],
    K: int,  # noqa: N803 (as PyG's SIGN and SGConv)
    out: str | os.PathLike[str] | None = None,
    *,
    add_self_loops: bool = False,
    overwrite: bool = False,
) -> Data:
    r"""Computes powers of the normalised adjacency matrix times the features. Collective.

    .. math::
        \mathbf{X}^{(k)} = {\left( \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2} \right)}^k
        \mathbf{X}, \qquad k = 1, \ldots, K

    as ``data.x1``, ``data.x2``, ...: those of ``torch_geometric.transforms.SIGN``, in the
    features' dtype. What trains on them needs no edges. With ``add_self_loops`` the matrix is that
    of ``GCNConv`` and ``SGConv``.

    Args:
        parts: A partition, of which each worker has a part; edges may have ``edge_weight``.
        K: The number of powers.
        out: Write the partition with these features, to a folder that all workers share. It may be
            ``parts`` with ``overwrite``.
        add_self_loops: Add the edges from each node to itself first, where there are none.
        overwrite: Replace a partition at ``out``.

    Returns:
        This worker's part, with the features.

    Raises:
        ValueError: When the graph has no features, or several node types, or an argument is wrong.
        PartitionError: On every worker, where the partition can't be read or written.
    """
    if isinstance(K, bool) or not isinstance(K, int) or K < 1:
        raise ValueError(f"Expected 'K' to be an integer >= 1 (got {K!r})")
    data = load_partition(parts)
    x = data.get("x") if isinstance(data, Data) else None
    if not isinstance(data, Data) or not isinstance(x, Tensor) or x.dim() != 2:
        raise ValueError(
            f"'{os.fspath(parts)}' has no features 'x' of one node type, [num_nodes, F] (rank "
            f"{current().rank})"
        )
    x = x if x.layout == torch.strided else x.to_dense()
    if not x.is_floating_point():
        x = x.float()
    edge_index, weight = data.edge_index, data.get("edge_weight")
    weight = None if weight is None else weight.view(-1).to(x.dtype)
    if add_self_loops:
        edge_index, weight = add_remaining_self_loops(edge_index, weight, 1.0, data.num_nodes)
    layer = distribute(LGConv())
    found: dict[str, Tensor] = {}
    for k in range(1, K + 1):
        x = found[f"x{k}"] = layer(x, edge_index, weight)
        data[f"x{k}"] = x
    if out is not None:
        add_attributes(parts, found, out, overwrite=overwrite)
    return data
