"""Whether what should be the same on all workers is: parameters, settings, attributes of modules.

[Note: marks] Parameters are compared by checksums of their bits, sums of integers, which come out
the same whatever the order of summation. A checksum travels with the gradients as eight numbers
below 256 in a place of its worker's own, where the others add 0: exact in every dtype. Only where
checksums differ are the values compared. Rounding may differ between unlike processors: such
differences are taken away, larger ones are an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.data.data import BaseData

from pyg_sar.comm.group import Communicator
from pyg_sar.reduction.owned_rows import owned_parameters, shared_names
from pyg_sar.space.distributed_index import InSpace

LIMBS = 8
_LABEL = ("", "", "replicas")
_ROUNDING = 4  # units in the last place of a tensor's largest value
_LOCAL = frozenset({"debug", "device", "local_rank", "num_nodes", "rank", "verbose"})


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's words of at most 32 bits, as int64."""
    flat = tensor.detach().contiguous().view(-1)
    words = {2: torch.int16}.get(flat.itemsize, torch.int32 if flat.itemsize >= 4 else torch.uint8)
    return flat.view(words).sum(dtype=torch.int64)


def marks(tensors: Sequence[Tensor], comm: Communicator, like: Tensor) -> Tensor:
    """This worker's checksum in its place among those of all: ``[world_size * LIMBS]``."""
    sums = torch.stack([_checksum(t) for t in tensors])
    total = (sums * torch.arange(1, 1 + len(tensors), device=sums.device)).sum()
    limbs = (total >> (8 * torch.arange(LIMBS, device=sums.device))) & 255
    out = like.new_zeros(comm.world_size, LIMBS)
    out[comm.rank] = limbs.to(out.dtype)
    return out.view(-1)


def differ(found: Sequence[Any]) -> bool:
    """Whether summed :func:`marks` are of different checksums."""
    return any(found[k] != found[k % LIMBS] for k in range(len(found)))


@torch.no_grad()
def reconcile(named: Sequence[tuple[str, Tensor]], comm: Communicator) -> None:
    """Compares tensors' values. Collective.

    Differences of a few roundings are replaced by the middle of the lowest and the highest value.

    Raises:
        ValueError: on every worker, for larger ones, with the tensor's name and the ranks.
    """
    own = [int(_checksum(tensor)) for _, tensor in named]
    everyone = comm.all_gather_object(own)
    for k, (name, tensor) in enumerate(named):
        ranks = [r for r, sums in enumerate(everyone) if sums[k] != everyone[0][k]]
        if not ranks:
            continue
        exact = not tensor.is_floating_point()
        value = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
        value = value.nan_to_num() if value.is_floating_point() else value.to(torch.int64)
        low = comm.all_reduce(value.clone().contiguous(), "min", label=_LABEL)
        high = comm.all_reduce(value.clone().contiguous(), "max", label=_LABEL)
        gap = float((high - low).max())
        size = float(torch.maximum(low.abs(), high.abs()).max())
        if exact or not gap <= _ROUNDING * torch.finfo(value.dtype).eps * size:
            raise ValueError(
                f"'{name}' differs between the workers: ranks {ranks} hold other values than rank "
                f"0 (by up to {gap:.3g}; this is rank {comm.rank}). All workers must start from "
                "the same values and take the same steps: give every worker's optimizer the same "
                "settings, and call load_state_dict() on all of them, or before distribute()"
            )
        tensor.data.copy_(low + (high - low) / 2)


def check_replicas(model: torch.nn.Module, comm: Communicator) -> None:
    """Compares parameters and saved buffers, but for rows that workers own. Collective.

    Raises:
        ValueError: on every worker, when some differ (:func:`reconcile`).
    """
    if comm.world_size == 1:
        return
    saved = model.state_dict(keep_vars=True)
    buffers = [(name, b) for name, b in model.named_buffers() if name in saved]
    named = [(name, t) for name, t in (*shared_names(model), *buffers) if t.numel()]
    if not named:
        return
    sums = torch.stack([_checksum(t).to(comm.device) for _, t in named])
    sizes = torch.tensor([t.numel() for _, t in named], device=comm.device)
    everyone = torch.stack(comm.all_gather(torch.stack([sizes, sums], dim=1), label=_LABEL))
    alike = (everyone == everyone[0]).all(0)
    # Buffers of another length belong to a worker's rows.
    found = [named[k] for k, (size, value) in enumerate(alike.tolist()) if size and not value]
    if found:
        reconcile(found, comm)


def in_space(inputs: Any) -> bool:
    """Whether a model's inputs hold a distributed ``edge_index``, so that all workers call it."""
    leaves = tree_leaves(inputs)
    for data in [leaf for leaf in leaves if isinstance(leaf, BaseData)]:
        leaves += [value for store in data.stores for value in store.values()]
    return any(isinstance(leaf, InSpace) for leaf in leaves)


# Settings ####################################################################


def plain(value: Any) -> str | None:
    """A number, string, function, or a container of such as text; ``None`` for another object."""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        parts = [plain(item) for item in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    if isinstance(value, Mapping):
        pairs = {repr(key): plain(item) for key, item in value.items()}
        return None if None in pairs.values() else str(sorted(pairs.items()))
    if callable(value) and not isinstance(value, torch.nn.Module):
        name = getattr(value, "__qualname__", None)
        return name if isinstance(name, str) else None  # Generated modules have random names.
    if isinstance(value, Tensor) and value.numel() == 1:
        return repr(value.item())
    return None


def attribute_rows(model: torch.nn.Module) -> list[str]:
    """A line for each plain attribute of each module, but for those that are a worker's own.

    These begin with an underscore, are named ``rank``, ``local_rank``, ``device``, ``num_nodes``,
    ``verbose`` or ``debug``, or count something (``num_users``) in a module with rows that each
    worker owns.
    """
    owners = [name for name, _, _ in owned_parameters(model)]
    rows = []
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        owns = any(name.startswith(start) for name in owners)
        for name, value in sorted(vars(module).items()):
            local = name.startswith("_") or name in _LOCAL or (owns and name.startswith("num_"))
            text = None if local or isinstance(value, Tensor) else plain(value)
            if text is not None:
                rows.append(f"{start}{name}: {text}")
    return rows


def first_difference(rows: Sequence[str], comm: Communicator) -> tuple[int, str, str] | None:
    """A rank whose lines differ from rank 0's, its line and rank 0's; the same on all workers."""
    digest = hashlib.sha256(json.dumps(list(rows)).encode()).hexdigest()
    digests = comm.all_gather_object(digest)
    if len(set(digests)) == 1:
        return None
    everyone = comm.all_gather_object(list(rows))
    rank = next(r for r, other in enumerate(everyone) if other != everyone[0])
    theirs, first = everyone[rank], everyone[0]
    for k in range(max(len(theirs), len(first))):
        pair = [lines[k] if k < len(lines) else "nothing" for lines in (theirs, first)]
        if pair[0] != pair[1]:
            return rank, pair[0], pair[1]
    return None


def check_settings(
    config: Mapping[str, Any], optimizer: torch.optim.Optimizer, comm: Communicator
) -> None:
    """Compares a trainer's settings and its optimizer's. Collective.

    Raises:
        ValueError: on every worker, for the first setting that differs.
    """
    rows = [f"{name}: {plain(value)}" for name, value in config.items()]
    rows.append(f"optimizer: {type(optimizer).__qualname__}")
    for k, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        rows.append(f"optimizer.param_groups[{k}]['params']: {len(group['params'])} parameters")
        rows += [
            f"optimizer.param_groups[{k}][{name!r}]: {plain(value)}"
            for name, value in sorted(options.items())
        ]
    found = first_difference(rows, comm)
    if found is not None:
        rank, here, first = found
        raise ValueError(
            f"The workers' settings differ: '{here}' at rank {rank}, '{first}' at rank 0. Give "
            "the same TrainConfig and optimizer on every worker"
        )
