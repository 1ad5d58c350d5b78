"""Parameters with a row per node: node tensors, of which each worker owns its rows.

[Note: owned rows] A parameter with a row per node is a :class:`~pyg_sar.tensors.NodeTensor` as all
else with such rows: of the whole graph's shape, while each worker holds its rows of it, of its
gradient and of an optimizer's state. Its gradient is complete at the rows' owner, so that nothing
is summed, compared or copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models.linkx import SparseLinear

from pyg_sar.comm.group import Communicator, current
from pyg_sar.space.draws import drawn_rows
from pyg_sar.tensors import NodeTensor, Rows, wrap


class NodeEmbedding(torch.nn.Embedding):
    r"""``torch.nn.Embedding(num_nodes, d)``, of which each worker makes its own rows only.

    One trainable vector for each node of the whole graph: ``weight`` is a tensor of the whole graph
    :math:`\mathbf{W} \in \mathbb{R}^{N \times d}` of which each worker holds the rows
    :math:`\mathbf{W}_p \in \mathbb{R}^{n_p \times d}` of its nodes, and so of the gradient and of
    what an optimizer keeps. A ``torch.nn.Embedding(data.num_nodes, d)`` becomes the same by
    :func:`~pyg_sar.distribute`; until then each worker holds all of it.

    .. code-block:: python

        data = pyg_sar.load_partition("parts")
        self.embedding = pyg_sar.nn.NodeEmbedding(data.num_nodes, 64)
        ...
        x = self.embedding()          # [num_nodes, 64], as x = data.x would be

    The rows are those that one process draws on the CPU with the same seed, and generators are left
    as there. Each worker draws all of them, a block at a time.

    Args:
        num_nodes: The nodes :math:`N` (of one type) of the whole graph that was loaded.
        embedding_dim: Width :math:`d`.
        device: Of the rows; by default this worker's.
        dtype: Of the rows.

    Raises:
        ValueError: When no graph with so many nodes was loaded.
    """

    def __init__(
        self,
        num_nodes: int,
        embedding_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        comm = current()
        place: dict[str, Any] = {"device": device or comm.device, "dtype": dtype}
        if comm.world_size == 1:
            super().__init__(num_nodes, embedding_dim, **place)
            return
        rows: Rows | None = comm.layouts.get(num_nodes)
        if rows is None:
            raise ValueError(
                f"NodeEmbedding({num_nodes}, {embedding_dim}): no graph with so many nodes (of a "
                f"type) was loaded at rank {comm.rank}, only with {sorted(comm.layouts)}: call "
                "load_partition() first, and give data.num_nodes"
            )
        empty = wrap(torch.empty(rows.count, embedding_dim, **place), rows, 0)
        super().__init__(num_nodes, embedding_dim, _weight=empty)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws standard normal rows: those of one process."""
        weight, cpu = self.weight, torch.device("cpu")
        if not isinstance(weight, NodeTensor):
            return super().reset_parameters()

        def make(shape: Sequence[int]) -> Tensor:
            return torch.empty(shape, dtype=weight.dtype).normal_()

        rows, width = weight.rows, [weight.size(1)]
        own = drawn_rows(make, width, rows.ids.cpu(), rows.total, cpu)
        weight.copy_(wrap(own.to(weight.device), rows, 0))

    def forward(self, input: Tensor | None = None) -> Tensor:
        """Returns the rows of these nodes, by ids in the whole graph; of all nodes by default."""
        return self.weight if input is None else super().forward(input)


@torch.no_grad()
def own_rows(model: torch.nn.Module, comm: Communicator) -> None:
    """Makes per-node parameters of a model node tensors. See [Note: owned rows].

    Those of embeddings, and of LINKX's adjacency, with as many rows as a graph that was loaded has
    nodes. They stay the objects that they are, which an optimizer may know already.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            plain = module.padding_idx is None and module.max_norm is None and not module.sparse
            if not plain or module.scale_grad_by_freq:
                continue
        elif not isinstance(module, SparseLinear):
            continue
        # module.weight would compute what a parametrization makes: a spectral norm takes a step.
        weight: Any = module._parameters.get("weight")
        rows = None if weight is None else comm.layouts.get(weight.size(0))
        if rows is None or isinstance(weight, NodeTensor) or weakref.getweakrefs(weight):
            continue
        owned = torch.nn.Parameter(_cut(weight, rows), weight.requires_grad)
        if weight.grad is not None:
            owned.grad = _cut(weight.grad, rows)
        torch.utils.swap_tensors(weight, owned)


def _cut(x: Tensor, rows: Rows) -> NodeTensor:
    return wrap(rows.cut(x.detach(), 0).clone(), rows, 0)
