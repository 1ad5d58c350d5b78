"""Tensors with a row per node, in checkpoints: gathered when saved, cut when loaded.

A file holds what one process would save: whole tensors, rows by their global ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.reduction.parameters import gather_to_first, in_global_order
from pyg_sar.tensors import NodeTensor, wrap

Tensors = dict[str, Tensor]


def gather_rows(tensors: Tensors, comm: Communicator) -> Tensors:
    """Returns tensors with all workers' rows of node tensors: on rank 0. Collective.

    Raises ``ValueError`` on every worker where one has other tensors, or of other shapes, than rank
    0.
    """
    everyone = comm.all_gather_object({name: list(t.shape) for name, t in tensors.items()})
    first = everyone[0]
    for rank, found in enumerate(everyone):
        for name in first.keys() | found.keys():
            if first.get(name) != found.get(name):
                raise ValueError(
                    f"'{name}' has the shape {first.get(name)} on rank 0, {found.get(name)} on "
                    f"rank {rank}: keep rows of a worker's own as a tensor of the whole graph, "
                    "pyg_sar.from_local(rows, data), or out of the state_dict (persistent=False)"
                )
    out, ids = dict(tensors), {}
    for name in first:
        value = tensors[name]
        if isinstance(value, NodeTensor):
            rows = value.rows
            if rows not in ids:
                ids[rows] = gather_to_first(rows.ids, comm)
            parts = gather_to_first(value.local.movedim(value.axis, 0), comm)
            if comm.rank == 0:
                out[name] = in_global_order(parts, ids[rows]).movedim(0, value.axis)
    return out


def cut_rows(
    tensors: Tensors, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> None:
    """Replaces a file's tensors by this worker's rows, where the model or optimizer that will take
    them has node tensors. In place.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    state = {} if model is None else model.state_dict()
    for key, value in tensors.items():
        kind, _, name = key.removeprefix("extra/").partition("/")
        like = None
        if kind in ("model", "best"):
            like = state.get(name)
        elif kind == "optimizer" and parameters:
            like = parameters[int(name.partition("/")[0])]
        if isinstance(like, NodeTensor) and value.dim() == like.dim():
            rows, axis = like.rows, like.axis
            if value.size(axis) == rows.total:
                tensors[key] = wrap(rows.cut(value.to(like.device), axis), rows, axis)
