"""Parameters with one row per node: each worker owns its rows, and nobody sums or copies them.

A module names such parameters in ``owned_rows``. They are not alike on all workers, so that
``distribute`` neither compares nor copies them, their gradients are not summed, and a checkpoint
holds every worker's rows. With ``n_id``, the global ids of its rows, a module's rows are known
under every partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.communicator import Communicator
from pyg_sar.ledger import Label

_LABEL: Label = ("", "", "owned rows")


def owned_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Tensor]]:
    """Names (as in ``state_dict``), modules and values of parameters with a row per node."""
    for prefix, module in model.named_modules():
        for name in getattr(module, "owned_rows", ()):
            parameter = getattr(module, name)
            yield f"{prefix}.{name}" if prefix else name, module, parameter


def shared_names(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters that are alike on all workers, in the model's order, with their names."""
    owned = {id(parameter) for _, _, parameter in owned_parameters(model)}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in owned]


def shared_parameters(model: torch.nn.Module) -> list[Tensor]:
    """The parameters that are alike on all workers, in the model's order."""
    return [parameter for _, parameter in shared_names(model)]


def gather_to_first(rows: Tensor, comm: Communicator) -> list[Tensor]:
    """Every worker's rows on rank 0, in rank order; the other workers get nothing. Collective.

    Args:
        rows: ``[n_p, *]``, alike on all workers but for :math:`n_p`.
        comm: The workers.
    """
    rows = rows.detach().contiguous()
    counts = [int(n) for n in comm.all_gather_object(rows.size(0))]
    if comm.rank != 0:
        comm.exchange(rows if rows.numel() else None, 0, None, 0, label=_LABEL).wait()
        return []
    found = [rows]
    for rank in range(1, comm.world_size):
        part = rows.new_empty(counts[rank], *rows.shape[1:])
        comm.exchange(None, rank, part if part.numel() else None, rank, label=_LABEL).wait()
        found.append(part)
    return found


def ids_of(module: torch.nn.Module, rows: int) -> Tensor | None:
    """The global ids of a module's rows, if it has been told.

    Raises:
        ValueError: When there is not one per row.
    """
    n_id: Any = getattr(module, "n_id", None)
    if n_id is None:
        return None
    if not isinstance(n_id, Tensor) or tuple(n_id.shape) != (rows,):
        raise ValueError(
            f"Expected 'n_id' of {type(module).__name__} to hold the global ids of its {rows} rows "
            f"(got shape {list(getattr(n_id, 'shape', []))}); set it to data.n_id"
        )
    return n_id


def in_global_order(parts: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
    """Rows of all workers, each in the place of its global id.

    Raises:
        ValueError: When the ids are not each of 0, 1, ... once.
    """
    place = torch.cat(list(ids)).cpu()
    if not torch.equal(place.sort().values, torch.arange(place.numel())):
        raise ValueError(
            f"the global ids of all workers' rows are not 0 to {place.numel() - 1}, each once; set "
            "'n_id' to data.n_id"
        )
    whole = torch.cat([part.cpu() for part in parts])
    out = torch.empty_like(whole)
    out[place] = whole
    return out


@torch.no_grad()
def clip_grad_norm(model: torch.nn.Module, max_norm: float, comm: Communicator) -> float:
    """As :func:`torch.nn.utils.clip_grad_norm_`, over the parameters of the whole graph.

    Gradients of shared parameters are sums over the workers already; those of owned rows are
    counted once for each worker.

    Returns:
        The norm before clipping, the same on every worker.
    """
    shared = [p.grad for p in shared_parameters(model) if p.grad is not None]
    owned = [p.grad for _, _, p in owned_parameters(model) if p.grad is not None]
    total = torch.nn.utils.get_total_norm(shared).double() if shared else torch.zeros(()).double()
    if any(True for _ in owned_parameters(model)):
        device = next(p.device for p in model.parameters())
        part = sum((g.double().square().sum() for g in owned), torch.zeros((), device=device))
        square = torch.as_tensor(part, dtype=torch.float64, device=device).reshape(1)
        comm.all_reduce(square, label=_LABEL)
        total = (total.to(device).square() + square[0]).sqrt()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in (*shared, *owned):
        gradient.mul_(scale.to(gradient.dtype))
    return float(total)
