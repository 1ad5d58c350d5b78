"""``NodeEmbedding``: trainable rows for the nodes of this worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models import LightGCN
from torch_geometric.nn.models.linkx import SparseLinear

from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import PygSarError
from pyg_sar.reduction.parameters import gather_to_first, ids_of, in_global_order, owned_parameters
from pyg_sar.wording import counted

_DRAWN = 2**20  # numbers that are drawn at a time


class NodeEmbedding(torch.nn.Embedding):
    r"""One trainable vector for each of this worker's nodes: :math:`\mathbf{W}_p \in
    \mathbb{R}^{n_p \times d}`, the rows ``n_id`` of one process' :math:`\mathbf{W}`.

    Each worker owns its rows: :func:`~pyg_sar.distribute` neither copies nor compares them, and
    their gradients, which are complete on their worker, are not summed. An optimizer holds its
    state of these rows only. :func:`~pyg_sar.train.save_checkpoint` writes all workers' rows.

    .. code-block:: python

        self.embedding = pyg_sar.nn.NodeEmbedding(data.num_nodes, 64, n_id=data.n_id)
        ...
        x = self.embedding()          # [num_nodes, 64], as x = data.x would be

    Args:
        num_rows: This worker's nodes :math:`n_p` (of one type).
        embedding_dim: Width :math:`d`.
        n_id: Their global ids. With these, checkpoints fit any partition and number of workers;
            without, only the same.
        num_nodes: The nodes (of that type) of the whole graph. With it and ``n_id`` the rows are
            those that :class:`torch.nn.Embedding` of so many rows draws on the CPU of one process
            with the same seed, and generators are left as there. Each worker draws all of them, a
            block at a time. Without, every worker draws others.
        **kwargs: ``device`` and ``dtype``.
    """

    owned_rows = ("weight",)
    n_id: Tensor | None = None
    num_nodes: int | None = None

    def __init__(
        self,
        num_rows: int,
        embedding_dim: int,
        n_id: Tensor | None = None,
        *,
        num_nodes: int | None = None,
        **kwargs: Any,
    ) -> None:
        if num_nodes is not None and n_id is None:
            raise ValueError("'num_nodes' says nothing without 'n_id': pass n_id=data.n_id, too")
        # Drawn once, when the ids are known: each draw moves the generator on.
        place = {name: kwargs.pop(name) for name in ("device", "dtype") if name in kwargs}
        empty = torch.empty(num_rows, embedding_dim, **place)
        super().__init__(num_rows, embedding_dim, _weight=empty, **kwargs)
        self.n_id, self.num_nodes = n_id, num_nodes
        ids_of(self, num_rows)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws standard normal rows, which leaves all generators alike. See ``num_nodes``."""
        if self.n_id is not None and self.num_nodes is not None:
            draw_rows(self.weight, self.n_id, self.num_nodes)
            return
        seed = int(torch.randint(2**62, ()))
        try:
            rank = current().rank
        except PygSarError:
            rank = 0
        generator = torch.Generator().manual_seed((seed + rank) % 2**63)
        weight = self.weight
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        with torch.no_grad():
            weight.copy_(drawn)

    def forward(self, index: Tensor | None = None) -> Tensor:
        """Returns the rows of these local node ids; of all nodes by default."""
        return self.weight if index is None else super().forward(index)


@torch.no_grad()
def draw_rows(weight: Tensor, n_id: Tensor, num_nodes: int) -> None:
    """Rows of ``torch.empty(num_nodes, d).normal_()``, to the bit, without the whole matrix.

    [Note: blocks of normal numbers] On the CPU torch turns 16 uniform numbers into 16 normal ones
    at a time, one group after the other. So blocks of a multiple of 16 numbers are those of the
    whole; and where 16 does not divide the number of all, the last 16 are drawn once more.

    Args:
        weight: Gets the rows, ``[n, d]``.
        n_id: Which these are, ``[n]``.
        num_nodes: Rows of the matrix.

    Raises:
        ValueError: When it does not have such rows.
    """
    low, high = (int(v) for v in n_id.aminmax()) if n_id.numel() else (0, -1)
    if low < 0 or high >= num_nodes:
        raise ValueError(f"'n_id' holds the nodes {low} to {high}, but 'num_nodes' is {num_nodes}")
    ids, width = n_id.cpu(), weight.size(1)
    rows = torch.empty(weight.shape, dtype=weight.dtype)
    order = ids.argsort()
    ascending = ids[order]
    step = 16 * max(_DRAWN // max(16 * width, 1), 1)
    start = 0
    while start < num_nodes:
        # Fewer than 16 numbers would be drawn in another way: the last block takes them in.
        stop = start + step if (num_nodes - start - step) * width >= 16 else num_nodes
        block = torch.empty(stop - start, width, dtype=weight.dtype).normal_()
        first, last = torch.searchsorted(ascending, torch.tensor([start, stop])).tolist()
        rows[order[first:last]] = block[ascending[first:last] - start]
        start = stop
    weight.copy_(rows)


def claim_rows(model: torch.nn.Module) -> None:
    """Makes the per-node parameters of PyG's own models owned: LightGCN's and LINKX's.

    They are built with this worker's number of nodes, ``LightGCN(data.num_nodes, ...)``.
    """
    for module in model.modules():
        if isinstance(module, LightGCN) and type(module.embedding) is torch.nn.Embedding:
            module.embedding.__class__ = NodeEmbedding
        elif isinstance(module, SparseLinear):
            object.__setattr__(module, "owned_rows", ("weight",))


@torch.no_grad()
def own_rows(
    model: torch.nn.Module | Callable[[int], torch.nn.Module],
    n_id: Tensor,
    names: Iterable[str] = (),
) -> torch.nn.Module:
    """Cuts per-node parameters of a model of the whole graph to this worker's rows.

    For models that are built alike on every worker, or loaded, with the number of nodes of the
    whole graph. Call it before the optimizer is made and before :func:`~pyg_sar.distribute`. With
    the same seed the parameters are those of one process. The whole parameter is in memory until
    it is cut; :class:`NodeEmbedding` never needs that.

    .. code-block:: python

        model = own_rows(lambda n: LINKX(n, 64, 64, 7, num_layers=2), data.n_id)

    Args:
        model: Has PyG's ``LightGCN`` or ``LINKX`` somewhere, or embeddings in ``names``. Or a
            function that builds it for a number of nodes, which is called with those of all
            workers: all of them call this then.
        n_id: The global ids of this worker's nodes.
        names: :class:`torch.nn.Embedding` modules with a row per node, by their names.

    Returns:
        ``model``.

    Raises:
        ValueError: When there is nothing to cut, a name is wrong, or there are too few rows.
    """
    if not isinstance(model, torch.nn.Module):
        count = torch.tensor([n_id.numel()], device=current().device)
        current().all_reduce(count, label=("", "", "number of nodes"))
        with torch.enable_grad():
            model = model(int(count))
    claim_rows(model)
    for name in names:
        module = dict(model.named_modules()).get(name)
        if not isinstance(module, torch.nn.Embedding):
            raise ValueError(f"Expected 'names' to name embeddings of the model (got {name!r})")
        module.__class__ = NodeEmbedding
    found = list(owned_parameters(model))
    if not found:
        raise ValueError("The model has no per-node parameters; name its embeddings in 'names'")
    for name, module, parameter in found:
        if n_id.numel() and int(n_id.max()) >= parameter.size(0):
            raise ValueError(
                f"'{name}' has {counted(parameter.size(0), 'rows')}, but 'n_id' holds the node "
                f"{int(n_id.max())}; build the model for the whole graph"
            )
        rows = parameter[n_id.to(parameter.device)].clone()
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(rows))
        object.__setattr__(module, "n_id", n_id)
        if isinstance(module, torch.nn.Embedding):
            module.num_embeddings = rows.size(0)
    return model


def gather_embedding(
    embedding: torch.nn.Embedding, n_id: Tensor, comm: Communicator | None = None
) -> torch.nn.Embedding | None:
    """Returns all workers' rows as a plain embedding of the whole graph, on rank 0. Collective.

    Args:
        embedding: This worker's rows.
        n_id: Their global ids.
        comm: The workers (:func:`pyg_sar.comm.group.current`).

    Returns:
        On rank 0 an :class:`torch.nn.Embedding` on the CPU whose row i is that of node i, so that
        its ``state_dict`` fits a model of one process. ``None`` on the others.

    Raises:
        ValueError: When ids don't fit the rows.
    """
    comm = comm or current()
    if tuple(n_id.shape) != (embedding.weight.size(0),):
        raise ValueError(
            "Expected 'n_id' to hold the global ids of the "
            f"{counted(embedding.weight.size(0), 'rows')} of rank {comm.rank} (got shape "
            f"{list(n_id.shape)}); pass data.n_id"
        )
    parts = gather_to_first(embedding.weight, comm)
    ids = gather_to_first(n_id, comm)
    if comm.rank != 0:
        return None
    return torch.nn.Embedding.from_pretrained(in_global_order(parts, ids), freeze=False)


@torch.no_grad()
def scatter_embedding(
    whole: torch.nn.Embedding | Tensor, embedding: torch.nn.Embedding, n_id: Tensor
) -> None:
    """Takes this worker's rows from an embedding of the whole graph. Communicates nothing.

    Args:
        whole: The embedding, or its weight ``[N, d]``, the same on every worker.
        embedding: Gets the rows.
        n_id: Their global ids.

    Raises:
        ValueError: When shapes or ids don't fit.
    """
    weight = whole if isinstance(whole, Tensor) else whole.weight
    own = embedding.weight
    if tuple(n_id.shape) != (own.size(0),) or weight.shape[1:] != own.shape[1:]:
        raise ValueError(
            f"Can't take rows of shape {list(own.shape)} for {list(n_id.shape)} ids from an "
            f"embedding of shape {list(weight.shape)}; pass data.n_id and an embedding as wide"
        )
    if n_id.numel() and int(n_id.max()) >= weight.size(0):
        raise ValueError(
            f"'n_id' holds the node {int(n_id.max())}, but the embedding has {weight.size(0)} "
            "rows; pass one of the whole graph"
        )
    own.copy_(weight[n_id.to(weight.device)])
