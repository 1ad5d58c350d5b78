"""Losses and metrics over the nodes of all workers, and all their rows in the graph's order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_sar.comm.group import Communicator, current
from pyg_sar.exchange.rows import flat_rows
from pyg_sar.ledger import Label
from pyg_sar.reduction.gradients import unsummed_parameter
from pyg_sar.tensors import NodeTensor
from pyg_sar.wording import counted


class _GlobalMean(torch.autograd.Function):
    """The mean over all workers' values; its adjoint is :class:`_Share`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator, phase: str) -> Tensor:
        # Both in float64: half precision has no 70,000, bfloat16 no 257.
        total = values.detach().sum(dtype=torch.float64)
        sums = torch.stack([total, total.new_tensor(values.numel())])
        comm.all_reduce(sums, label=("", phase, "mean"))
        total, count = sums.tolist()
        if count == 0:
            raise ValueError(
                f"No worker of {comm.world_size} holds a value to average: is the mask empty on "
                "the whole graph?"
            )
        ctx.given = values.shape, count, comm
        return values.new_tensor(total / count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Share.apply(gradient, *ctx.given), None, None


class _Share(torch.autograd.Function):
    """Gives each value its share of the mean's gradient, which all workers hold alike."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, shape: torch.Size, count: float, comm: Communicator
    ) -> Tensor:
        ctx.comm = comm
        return (gradient.double() / count).to(gradient.dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _GlobalMean.apply(gradient, ctx.comm, "backward"), None, None, None


def mean(values: Tensor) -> Tensor:
    r"""Returns the mean over all workers' values, the same on every worker.

    .. math::
        \frac{\sum_p \sum_k v_{p,k}}{\sum_p n_p}, \qquad
        \frac{\partial}{\partial v_{p,k}} = \frac{1}{\sum_p n_p}

    Workers may hold different numbers of values, or none. With the gradients summed over workers
    (as :func:`pyg_sar.distribute` arranges), ``mean(values).backward()`` on every worker gives the
    gradients of one process. A term that every worker computes alike, such as a penalty on
    parameters, would be counted once per worker: divide it by ``comm.world_size``.

    Args:
        values: Per-node values of any shape, such as
            ``F.cross_entropy(out[mask], y[mask], reduction='none')``.

    Returns:
        A scalar.

    Raises:
        TypeError: When ``values`` is no floating point tensor.
        ValueError: When no worker holds a value, or the values depend on a parameter of a model
            that was not passed through :func:`pyg_sar.distribute`.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values)
        raise TypeError(f"Expected 'values' to be a floating point tensor (got {kind})")
    if values.dim() == 0:
        raise ValueError(
            "Expected per-node values, got a scalar: pass the loss with reduction='none'"
        )
    if isinstance(values, NodeTensor):  # Its mean is over all workers, as are gradients.
        return values.mean()
    comm = current()
    stray = unsummed_parameter(values) if comm.world_size > 1 else None
    if stray is not None:
        raise ValueError(
            f"'values' depend on a parameter of shape {list(stray.shape)} whose gradients are not "
            f"summed over the workers (rank {comm.rank}): pass the model through "
            "pyg_sar.distribute(model) first"
        )
    return _GlobalMean.apply(values, comm, "forward")


def accuracy(pred: Tensor, y: Tensor, mask: Tensor | None = None) -> float:
    r"""Returns the fraction of correctly classified nodes of all workers.

    Args:
        pred: Class scores ``[num_local, C]``, C at least 2, or predicted classes ``[num_local]``,
            integers.
        y: Labels ``[num_local]``.
        mask: Nodes to count, bool ``[num_local]``.

    Returns:
        A number in [0, 1]; NaN when no worker has a node to count.

    Raises:
        TypeError: When an argument is no tensor.
        ValueError: When shapes or dtypes do not fit, or a label has no column in ``pred``.
    """
    rank = current().rank
    _check_accuracy(pred, y, mask, rank)
    right = (pred.argmax(dim=-1) if pred.dim() == 2 else pred) == y
    chosen = y
    if mask is not None:
        right, chosen = right[mask], y[mask]
    highest = int(chosen.max()) if pred.dim() == 2 and chosen.numel() else -1
    if highest >= pred.size(-1):
        raise ValueError(
            f"'pred' has scores of {counted(pred.size(1), 'classes')}, 'y' holds label {highest} "
            f"(rank {rank}): pass a score for each class; of one score per node the classes, (pred "
            "> 0).long()"
        )
    counts = torch.tensor([int(right.sum()), right.numel()], device=y.device)
    current().all_reduce(counts, label=("", "", "accuracy"))
    correct, total = counts.tolist()
    return correct / total if total else float("nan")


def _check_accuracy(pred: Any, y: Any, mask: Any, rank: int) -> None:
    for name, value in (("pred", pred), ("y", y), ("mask", mask)):
        if not isinstance(value, Tensor) and (name != "mask" or value is not None):
            raise TypeError(
                f"Expected '{name}' to be a tensor (got {type(value).__name__} at rank {rank})"
            )
    if pred.shape[:1] != y.shape or pred.dim() not in (1, 2):
        raise ValueError(
            f"Expected predictions for 'y' of shape {list(y.shape)} (got {list(pred.shape)} at "
            f"rank {rank})"
        )
    if pred.dim() == 2 and pred.size(1) < 2:
        raise ValueError(
            "Expected 'pred' to be scores of at least 2 classes, [num_local, C], or classes, "
            f"[num_local] (got shape {list(pred.shape)} at rank {rank}): pass "
            "pred.squeeze(1) of classes, (pred.squeeze(1) > 0).long() of a binary score"
        )
    if pred.dim() == 1 and pred.is_floating_point():
        raise ValueError(
            f"Expected 'pred' of shape {list(pred.shape)} to hold classes, integers (got "
            f"{pred.dtype} at rank {rank}): of scores pass the classes, (pred > 0).long()"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != y.shape):
        raise ValueError(
            f"Expected 'mask' to be bool of shape {list(y.shape)} (got {mask.dtype} of shape "
            f"{list(mask.shape)} at rank {rank}): pass mask.bool(), or for ids pred[ids] and y[ids]"
        )


# Rows of all nodes ############################################################

_LABEL: Label = ("", "", "gather nodes")
_BUFFER = 2**24  # bytes on their way at a time


@torch.no_grad()
def gather_nodes(
    values: Tensor, data: Any, dst: int = 0, node_type: str | None = None
) -> Tensor | None:
    r"""Returns the rows of all workers' nodes in the whole graph's order, on rank ``dst``.

    For what needs all nodes in one place: scikit-learn, torchmetrics, OGB's evaluators, a file of
    embeddings. Every worker has to call it. Without gradients, and to the bit in every dtype. Rank
    ``dst`` holds the result and 16 MiB of rows on their way, the others nothing more.

    .. code-block:: python

        scores = pyg_sar.gather_nodes(out, data)
        if scores is not None:  # rank 0
            roc_auc_score(y_of_all, scores.numpy())

    Args:
        values: A row per node of this worker, ``[num_local, *]``.
        data: What :func:`pyg_sar.load_partition` gave, or the store of a node type: its ``n_id``
            says whose rows these are. Or these places themselves, int64 ``[num_local]``, for rows
            of something else: ``data.test_idx_place``, ``data.edge_label_index_place``,
            ``data.e_id``.
        dst: The rank that gets them.
        node_type: Of a ``HeteroData``: the nodes' type.

    Returns:
        ``[num_nodes, *]`` on rank ``dst``, of the dtype and on the device of ``values``; ``None``
        on the others.

    Raises:
        ValueError: On every worker alike, naming the rank, when rows and nodes differ in number,
            when the workers' dtypes, shapes or ``dst`` differ, or when the places of all workers
            are not 0, 1, ..., each once.
    """
    comm = current()
    problem, places = "", torch.empty(0, dtype=torch.long)
    try:
        places = _places(data, node_type)
        _check(values, places, dst, comm)
    except (TypeError, ValueError) as error:
        problem = str(error)
    counts = _agree(values, dst, problem, comm)
    plain = values.as_subclass(Tensor).detach().resolve_conj().resolve_neg().contiguous()
    ids = _gather_ids(places.to(plain.device), counts, dst, comm)
    wrong = ids is not None and not torch.equal(
        torch.cat(ids).sort().values, torch.arange(sum(counts), device=plain.device)
    )
    flag = torch.tensor([int(wrong)], device=comm.device)
    if int(comm.all_reduce(flag, "max", label=_LABEL)):
        raise ValueError(
            f"The ids of all workers' rows are not 0 to {sum(counts) - 1}, each once: pass the "
            "'data' that pyg_sar.load_partition gave these workers, or the places of all rows"
        )
    return _gather_rows(plain, ids, counts, dst, comm)


@torch.no_grad()
def gather_selected(values: Tensor, ids: Tensor, comm: Communicator) -> Tensor | None:
    """Returns rows of some of all workers' nodes on rank 0, in the order of ids. Collective.

    As :func:`gather_nodes`, for rows whose ids are any distinct numbers.

    Args:
        values: ``[n, *]``, of one dtype and row shape on all workers.
        ids: The global ids of these rows, int64 ``[n]``.
        comm: The workers.

    Returns:
        All rows on rank 0; ``None`` on the others.
    """
    counts = _agree(values, 0, "", comm)
    plain = values.as_subclass(Tensor).detach().contiguous()
    found = _gather_ids(ids.to(plain.device), counts, 0, comm)
    if found is not None:
        order = torch.cat(found).argsort()
        positions = torch.empty_like(order)
        positions[order] = torch.arange(order.numel(), device=order.device)
        found = list(positions.split(counts))
    return _gather_rows(plain, found, counts, 0, comm)


def _places(data: Any, node_type: str | None) -> Tensor:
    if isinstance(data, HeteroData) and node_type not in data.node_types:
        raise ValueError(
            f"Expected 'node_type' to be one of {data.node_types} for a HeteroData (got "
            f"{node_type!r})"
        )
    if isinstance(data, HeteroData):
        data = data[node_type]
    if isinstance(data, Tensor):
        found: Any = data
    else:
        found = data.get("n_id") if hasattr(data, "get") else None
    if not isinstance(found, Tensor) or found.dtype != torch.long or found.dim() != 1:
        raise ValueError(
            "Expected 'data' to hold the global ids 'n_id', as pyg_sar.load_partition gives it, or "
            f"to be an int64 vector of places (got {type(data).__name__})"
        )
    return found


def _check(values: Any, places: Tensor, dst: Any, comm: Communicator) -> None:
    if not isinstance(values, Tensor) or values.layout != torch.strided or values.is_quantized:
        raise TypeError(f"Expected 'values' to be a dense tensor (got {type(values).__name__})")
    if isinstance(dst, bool) or not isinstance(dst, int) or not 0 <= dst < comm.world_size:
        raise ValueError(f"Expected 'dst' to be in 0 .. {comm.world_size - 1} (got {dst!r})")
    if values.dim() == 0 or values.size(0) != places.numel():
        raise ValueError(
            f"Expected 'values' to have one row per node, {counted(places.numel(), 'rows')} (got "
            f"shape {list(values.shape)})"
        )


def _agree(values: Tensor, dst: int, problem: str, comm: Communicator) -> list[int]:
    """Returns the rows of each worker; raises on all of them alike."""
    mine = (
        [problem] if problem else ["", len(values), str(values.dtype), list(values.shape[1:]), dst]
    )
    everyone = comm.all_gather_object(mine, label=_LABEL)
    for rank, facts in enumerate(everyone):
        if facts[0]:
            raise ValueError(f"rank {rank}: {facts[0]}")
    first = everyone[0][2:]
    for rank, facts in enumerate(everyone):
        for name, one, other in zip(("dtype", "row shape", "dst"), first, facts[2:], strict=True):
            if one != other:
                raise ValueError(
                    f"Expected 'values' and 'dst' to be alike on all workers (got {name} {one} at "
                    f"rank 0 and {other} at rank {rank})"
                )
    return [facts[1] for facts in everyone]


def _gather_ids(
    places: Tensor, counts: list[int], dst: int, comm: Communicator
) -> list[Tensor] | None:
    """Returns the position of each worker's rows on rank ``dst``."""
    if comm.rank != dst:
        comm.exchange(places if places.numel() else None, dst, None, dst, label=_LABEL).wait()
        return None
    found = []
    for rank, count in enumerate(counts):
        if rank == dst:
            found.append(places)
            continue
        buffer = places.new_empty(count)
        comm.exchange(None, rank, buffer if count else None, rank, label=_LABEL).wait()
        found.append(buffer)
    return found


def _gather_rows(
    values: Tensor, ids: list[Tensor] | None, counts: list[int], dst: int, comm: Communicator
) -> Tensor | None:
    """Returns the gathered rows, which travel as bytes, some at a time."""
    shape = (sum(counts), *values.shape[1:])
    if 0 in shape:
        return values.new_empty(shape) if ids is not None else None
    rows = flat_rows(values).view(torch.uint8)
    step = max(_BUFFER // rows.size(1), 1)
    if ids is None:
        for part in rows.split(step) if len(rows) else ():
            comm.exchange(part, dst, None, dst, label=_LABEL).wait()
        return None
    out = rows.new_empty(shape[0], rows.size(1))
    out[ids[dst]] = rows
    buffer = rows.new_empty(min(step, max(counts)), rows.size(1))
    for rank, places in enumerate(ids):
        for some in places.split(step) if rank != dst and len(places) else ():
            part = buffer[: some.numel()]
            comm.exchange(None, rank, part, rank, label=_LABEL).wait()
            out[some] = part
    return out.view(values.dtype).view(shape)
