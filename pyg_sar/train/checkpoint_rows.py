"""Rows that each worker owns, in checkpoints: gathered when saved, cut out when loaded.

A checkpoint's header says of each such parameter how many rows each worker had, and whether the
rows are in the order of global ids (the modules knew them) or worker by worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.reduction.parameters import gather_to_first, ids_of, in_global_order, owned_parameters
from pyg_sar.wording import counted

Tensors = dict[str, Tensor]


def gather_rows(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Tensor],
    comm: Communicator,
) -> tuple[Tensors, dict[str, Any]]:
    """Returns all workers' rows of owned parameters, of their optimizer state and best weights.

    Collective.

    Returns:
        On rank 0 the tensors by their names in the file, and what the header says of them.

    Raises:
        ValueError: On every worker, when the modules' ids don't fit, or a buffer or a state of the
            optimizer has rows of a worker's own.
    """
    tensors: Tensors = {}
    header: dict[str, Any] = {}
    _check_carried(model, optimizer, comm)
    for name, module, parameter in owned_parameters(model):
        by_id, ids = _gathered_ids(module, parameter, comm)
        header[name] = {"counts": comm.all_gather_object(parameter.size(0)), "by_id": by_id}
        mine = {f"model/{name}": parameter.detach()}
        if f"best/{name}" in extra:
            mine[f"extra/best/{name}"] = extra[f"best/{name}"]
        mine |= _optimizer_rows(optimizer, parameter)
        for key in comm.broadcast_object(sorted(mine)):
            parts = gather_to_first(mine.get(key, torch.zeros_like(parameter)), comm)
            if comm.rank == 0:
                joined = torch.cat([part.cpu() for part in parts])
                tensors[key] = in_global_order(parts, ids) if by_id else joined
    return tensors, header


def _check_carried(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, comm: Communicator
) -> None:
    """Raises where the file, which has rank 0's tensors, would lack those of other workers."""
    saved = model.state_dict()
    shapes = {name: list(b.shape) for name, b in model.named_buffers() if name in saved}
    problem = ""
    for name, _, parameter in owned_parameters(model):
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                problem = (
                    f"the optimizer's '{key}' of '{name}' has the shape {list(value.shape)}, not "
                    f"{list(parameter.shape)}: these are not the rows that a worker owns; take an "
                    "optimizer with a state per element, such as Adam or SGD"
                )
    everyone = comm.all_gather_object([problem, shapes])
    first = everyone[0][1]
    for rank, (text, found) in enumerate(everyone):
        if text:
            raise ValueError(f"rank {rank}: {text}")
        for name in first.keys() | found.keys():
            if first.get(name) != found.get(name):
                raise ValueError(
                    f"the buffer '{name}' has the shape {first.get(name)} on rank 0, "
                    f"{found.get(name)} on rank {rank}: rows that each worker owns can't be saved "
                    "in buffers; register it with persistent=False, or keep it in data"
                )


def _gathered_ids(
    module: torch.nn.Module, parameter: Tensor, comm: Communicator
) -> tuple[bool, list[Tensor]]:
    """Returns whether every worker knows its rows' ids, and on rank 0 these."""
    problem, ids = "", None
    try:
        ids = ids_of(module, parameter.size(0))
    except ValueError as error:
        problem = str(error)
    found = comm.all_gather_object([ids is not None, problem])
    for rank, (_, text) in enumerate(found):
        if text:
            raise ValueError(f"rank {rank}: {text}")
    known = all(has for has, _ in found)
    return known, gather_to_first(ids, comm) if known and ids is not None else []


def _optimizer_rows(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> Tensors:
    """Returns the state of a parameter that has its shape, by name in the file."""
    if optimizer is None:
        return {}
    index = _index_of(optimizer, parameter)
    state = optimizer.state.get(parameter, {})
    return {
        f"optimizer/{index}/{key}": value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }


def _index_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    known = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return known.index(id(parameter)) if id(parameter) in known else -1


def cut_rows(
    tensors: Tensors,
    header: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    comm: Communicator,
) -> Tensors:
    """Returns the file's tensors as this worker holds them: of owned parameters, its own rows.

    Args:
        tensors: The file's content by name.
        header: What :func:`gather_rows` said.
        model, optimizer: Which will take them.
        comm: The workers.

    Raises:
        ValueError: When it can't be told which rows are this worker's.
    """
    out = dict(tensors)
    owned = {name: (module, p) for name, module, p in owned_parameters(model)}
    for name, about in header.items():
        if name not in owned and not about["by_id"] and len(about["counts"]) > 1:
            raise ValueError(
                f"'{name}' holds the rows of {len(about['counts'])} workers in an order that only "
                "their partition tells; set 'n_id' of its module to data.n_id before saving"
            )
    for name, (module, parameter) in owned.items():
        rows = _rows_of(name, module, parameter, header.get(name), tensors, comm)
        index = -1 if optimizer is None else _index_of(optimizer, parameter)
        for key in (f"model/{name}", f"extra/best/{name}"):
            if key in out:
                out[key] = out[key][rows]
        for key in out:
            if key.startswith(f"optimizer/{index}/") and out[key].dim() == parameter.dim():
                out[key] = out[key][rows]
    return out


def _rows_of(
    name: str,
    module: torch.nn.Module,
    parameter: Tensor,
    about: Mapping[str, Any] | None,
    tensors: Tensors,
    comm: Communicator,
) -> Tensor:
    """Returns the numbers of those of the file's rows that are this worker's."""
    n_id, saved = ids_of(module, parameter.size(0)), tensors.get(f"model/{name}")
    total = 0 if saved is None else saved.size(0)
    if n_id is not None and (about is None or about["by_id"]):
        if n_id.numel() and int(n_id.max()) >= total:
            raise ValueError(
                f"'{name}' has {counted(total, 'rows')}, but rank {comm.rank} owns node "
                f"{int(n_id.max())}: it is of another graph"
            )
        return n_id.cpu()
    counts = [total] if about is None else about["counts"]
    if about is not None and about["by_id"]:
        raise ValueError(
            f"'{name}' is stored by global ids; set 'n_id' of its module to data.n_id at rank "
            f"{comm.rank}, to load it"
        )
    if len(counts) != comm.world_size or counts[comm.rank] != parameter.size(0):
        raise ValueError(
            f"'{name}' was saved without global ids by workers with {counts} rows, rank "
            f"{comm.rank} of {comm.world_size} has {parameter.size(0)}: load it under the same "
            "partition, or set 'n_id' of its module to data.n_id before saving"
        )
    start = sum(counts[: comm.rank])
    return torch.arange(start, start + counts[comm.rank])
