"""The parameters of a model on several workers: rows of their own, and equal copies.

A parameter with a row per node is a node tensor: each worker owns its rows, which are neither
compared nor copied. All other parameters are equal copies.

[Note: marks] Parameters are compared by checksums of their bits, sums of integers, which come out
the same whatever the order of summation. A checksum travels with the gradients as eight numbers
below 256 in a place of its worker's own, where the others add 0: exact in every dtype. Only where
checksums differ are the values compared. Rounding may differ between unlike processors: such
differences are taken away, larger ones are an error. The settings of the model's layers (plain
attributes that their constructors take: ``negative_slope``, ``eps``) are part of the checksum.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pyg_sar.comm.group import Communicator
from pyg_sar.ledger import Label
from pyg_sar.tensors import NodeMatrix, NodeTensor
from pyg_sar.tensors.rows import compare_notes, notes
from pyg_sar.wording import counted

# Rows that a worker owns ######################################################

_OWNED: Label = ("", "", "owned rows")


def shared_names(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the parameters that are alike on all workers, with names, in the model's order."""
    return [(name, p) for name, p in model.named_parameters() if not isinstance(p, NodeTensor)]


def gather_to_first(rows: Tensor, comm: Communicator) -> list[Tensor]:
    """Returns every worker's rows, ``[n_p, *]``, on rank 0, in rank order; else nothing.
    Collective.
    """
    rows = rows.detach().contiguous()
    counts = [int(n) for n in comm.all_gather_object(rows.size(0))]
    sends: list[Tensor | None] = [None] * comm.world_size
    parts: list[Tensor | None] = [None] * comm.world_size
    if comm.rank != 0:
        sends[0] = rows
    else:
        parts[1:] = [rows.new_empty(count, *rows.shape[1:]) for count in counts[1:]]
    comm.exchange_all(sends, parts, label=_OWNED).wait()
    return [rows, *(part for part in parts if part is not None)] if comm.rank == 0 else []


def in_global_order(parts: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
    """Returns rows of all workers, each in the position of its global id.

    Raises:
        ValueError: When the ids are not each of 0, 1, ... once.
    """
    place = torch.cat(list(ids)).cpu()
    if not torch.equal(place.sort().values, torch.arange(place.numel())):
        raise ValueError(
            f"the global ids of all workers' rows are not 0 to {place.numel() - 1}, each once"
        )
    whole = torch.cat([part.cpu() for part in parts])
    out = torch.empty_like(whole)
    out[place] = whole
    return out


# Equal copies #################################################################

LIMBS = 8
_REPLICAS: Label = ("", "", "replicas")
_ROUNDING = 4  # units in the last place of a tensor's largest value
_SMALL = 4096  # Numbers of a tensor that is compared by what it holds.
_LIBRARIES = frozenset({"torch", "torch_geometric", "pyg_sar"})
_LOCAL = frozenset({"debug", "device", "local_rank", "num_nodes", "rank", "replica", "verbose"})


def _checksum(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's words of at most 32 bits, as int64."""
    flat = tensor.detach().contiguous().view(-1)
    words = {2: torch.int16}.get(flat.itemsize, torch.int32 if flat.itemsize >= 4 else torch.uint8)
    return flat.view(words).sum(dtype=torch.int64)


def marks(
    tensors: Sequence[Tensor], comm: Communicator, like: Tensor, settings: Sequence[str] = ()
) -> Tensor:
    """Returns this worker's checksum at its place among those of all: ``[world_size * LIMBS]``."""
    sums = torch.stack([_checksum(t) for t in tensors])
    total = (sums * torch.arange(1, 1 + len(tensors), device=sums.device)).sum()
    total = total + zlib.crc32("\n".join(settings).encode())
    out = like.new_zeros(comm.world_size, LIMBS)
    out[comm.rank] = total.view(1).view(torch.uint8)
    return out.view(-1)


def differ(found: Sequence[Any]) -> bool:
    """Returns whether summed :func:`marks` are of different checksums."""
    return any(found[k] != found[k % LIMBS] for k in range(len(found)))


@torch.no_grad()
def reconcile(
    named: Sequence[tuple[str, Tensor]], comm: Communicator, settings: Sequence[str] = ()
) -> None:
    """Compares tensors' values, and settings of layers. Collective.

    Differences of a few roundings are replaced by the middle of the lowest and the highest value.

    Raises:
        ValueError: on every worker, for larger ones, with the tensor's name and the ranks; for
            a setting that differs, with its layer and the ranks.
    """
    noted = notes(comm)
    unlike = first_difference([line for line in settings if line not in noted], comm)
    if unlike is not None:
        rank, here, first = unlike
        raise ValueError(
            f"A layer's attribute differs between the {comm.members}: '{here}' at {comm.member} "
            f"{rank}, '{first}' at {comm.member} 0 (this is {comm.member} {comm.rank}). Change it "
            "alike on every worker"
        )
    own = [int(_checksum(tensor)) for _, tensor in named]
    everyone = comm.all_gather_object(own)
    for k, (name, tensor) in enumerate(named):
        ranks = [r for r, sums in enumerate(everyone) if sums[k] != everyone[0][k]]
        if not ranks:
            continue
        exact = not tensor.is_floating_point()
        place = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
        nan = place.isnan()
        value = place.nan_to_num() if place.is_floating_point() else place.to(torch.int64)
        few, many = (comm.all_reduce(nan.int(), op, label=_REPLICAS) for op in ("min", "max"))
        low = comm.all_reduce(value.clone().contiguous(), "min", label=_REPLICAS)
        high = comm.all_reduce(value.clone().contiguous(), "max", label=_REPLICAS)
        gap = float((high - low).max())
        size = float(torch.maximum(low.abs(), high.abs()).max())
        near = not exact and gap <= _ROUNDING * torch.finfo(value.dtype).eps * size
        if not near or not torch.equal(few, many):
            raise ValueError(
                f"'{name}' differs between the {comm.members}: {comm.member}s {ranks} hold other "
                f"values than {comm.member} 0 (by up to {gap:.3g}; this is {comm.member} "
                f"{comm.rank}). All workers must start from "
                "the same values and take the same steps: give every worker's optimizer the same "
                "settings, and call load_state_dict() on all of them, or before distribute()"
            )
        place.copy_((low + (high - low) / 2).masked_fill_(nan, torch.nan))
    compare_notes(comm)


def check_replicas(model: torch.nn.Module, comm: Communicator) -> None:
    """Compares parameters and saved buffers, but for rows that workers own. Collective.

    Raises:
        ValueError: on every worker, when some differ (:func:`reconcile`).
    """
    if comm.world_size > 1:
        check_tensors(replicas(model), attribute_rows(model, settings=True), comm)


def replicas(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Returns parameters and saved buffers, but for rows that workers own, with their names."""
    named = [  # state_dict() may compute: PyG's Linear gives a weight that a spectral norm changes.
        (f"{title}.{name}" if title else name, buffer)
        for title, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    buffers = [(name, part) for name, b in named for part in dense_parts(b)]
    return [*shared_names(model), *buffers]


def check_tensors(
    named: Sequence[tuple[str, Tensor]], settings: Sequence[str], comm: Communicator
) -> None:
    """Compares tensors, but for those of other lengths, and settings of layers
    (:func:`attribute_rows`). Collective.

    Tensors come with names for errors, the same number of them on all workers.

    Raises:
        ValueError: on every worker, when some differ (:func:`reconcile`).
    """
    named = [(name, t) for name, t in named if t.numel()]
    if not named and not settings:
        return
    number = torch.tensor(zlib.crc32("\n".join(settings).encode()), device=comm.device)
    sums = torch.stack([*(_checksum(t).to(comm.device) for _, t in named), number])
    sizes = torch.tensor([*(t.numel() for _, t in named), 1], device=comm.device)
    everyone = torch.stack(comm.all_gather(torch.stack([sizes, sums], dim=1), label=_REPLICAS))
    alike = (everyone == everyone[0]).all(0)
    # Buffers of another length belong to a worker's rows.
    *alike_tensors, (_, settings_alike) = alike.tolist()
    found = [named[k] for k, (size, value) in enumerate(alike_tensors) if size and not value]
    if found or not settings_alike:
        reconcile(found, comm, settings)


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that a sparse one consists of, a dense one itself; nothing of rows."""
    if isinstance(tensor, NodeTensor | NodeMatrix):  # Of which each worker holds its rows.
        return ()
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


@torch.no_grad()
def copy_from_first(tensors: Iterable[Tensor], comm: Communicator) -> None:
    """Writes rank 0's parameters and buffers on every worker, by one message per dtype."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in chain.from_iterable(map(dense_parts, tensors)):
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    label = ("", "", "initial parameters")
    for (dtype, _), group in groups.items():
        flat = torch.cat([t.reshape(-1) for t in group])
        flat = flat.to(torch.int32) if dtype == torch.bool else flat
        if comm.rank != 0:
            flat.zero_()
        comm.all_reduce(flat, label=label)
        for tensor, value in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(value.view_as(tensor))


def plain(value: Any) -> str | None:
    """Returns a number, string, function or container of such as text; else ``None``."""
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


@lru_cache(1024)
def _arguments(kind: Any) -> frozenset[str]:
    """Returns the names of the arguments that a class's constructors take."""
    found: set[str] = set()
    for base in kind.__mro__[:-1]:
        with suppress(KeyError, TypeError, ValueError):
            found.update(inspect.signature(base.__dict__["__init__"]).parameters)
    return frozenset(found)


def attribute_rows(
    model: torch.nn.Module, settings: bool = False, of_users: bool = False
) -> list[str]:
    """Returns a line for each plain attribute of each module, except a worker's own.

    These begin with an underscore, or are named ``rank``, ``local_rank``, ``device``,
    ``num_nodes``, ``verbose`` or ``debug``. With ``settings`` only those that a constructor
    takes: others may be anything that a model keeps of its run. With ``of_users`` modules of users'
    own classes have a line for all attributes but booleans, small tensors among them, and for the
    classes of the modules that they hold.
    """
    rows = []
    for prefix, module in model.named_modules():
        start, kind = f"{prefix}." if prefix else "", cast(Any, type(module))
        users = of_users and kind.__module__.partition(".")[0] not in _LIBRARIES
        if users:
            rows += [f"{start}{name}: {type(m).__name__}" for name, m in module.named_children()]
        for name, value in sorted(vars(module).items()):
            local = name.startswith("_") or name in _LOCAL
            if settings and name not in _arguments(kind):
                local = local or not users or isinstance(value, bool)
            try:
                local = local or (isinstance(value, Tensor) and not users)
                text = None if local else _content(value) if users else plain(value)
            except RecursionError as error:
                raise ValueError(
                    f"The model's attribute '{start}{name}' is a {type(value).__name__} that holds "
                    "itself, which can't be compared between workers: take it out of the model"
                ) from error
            if text is not None:
                rows.append(f"{start}{name}: {text}")
    return rows


def _content(value: Any) -> str | None:
    """Returns :func:`plain` text, and a checksum of a small tensor on the CPU, or of an array."""
    if type(value) is Tensor:
        if value.is_cpu and not value.requires_grad and value.layout == torch.strided:
            return _content(value.numpy()) if value.numel() <= _SMALL else None
        return None  # A GPU would have to be waited for; what is computed of parameters follows.
    if isinstance(value, Tensor):
        return None
    if isinstance(value, np.ndarray):
        if value.size > _SMALL or value.dtype == object:
            return None
        numbers = value.tolist() if value.size == 1 else zlib.crc32(value.tobytes())
        return f"{value.dtype} {list(value.shape)} {numbers}"
    if isinstance(value, list | tuple | Mapping) and len(value) > _SMALL:
        return None
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_content(item)) for item in value)}]"
    if isinstance(value, Mapping):
        return str(sorted((repr(key), _content(item)) for key, item in value.items()))
    return plain(value)


def first_difference(rows: Sequence[str], comm: Communicator) -> tuple[int, str, str] | None:
    """Returns a rank whose lines differ from rank 0's, its line and rank 0's; alike on all."""
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
        rows.append(
            f"optimizer.param_groups[{k}]['params']: {counted(len(group['params']), 'parameters')}"
        )
        rows += [
            f"optimizer.param_groups[{k}][{name!r}]: {plain(value)}"
            for name, value in sorted(options.items())
        ]
    found = first_difference(rows, comm)
    if found is not None:
        rank, here, first = found
        raise ValueError(
            f"The {comm.members}' settings differ: '{here}' at {comm.member} {rank}, '{first}' at "
            f"{comm.member} 0. Give the same TrainConfig, optimizer and number of graphs on every "
            "worker"
        )


# Hooks, wrappers #################################################################

_WRAPPERS = frozenset(
    {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
)


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Raises ``ValueError`` where a distributed model's gradients are summed by others as well."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if getattr(model, "_is_fsdp_managed_module", False):
        names.add("FullyShardedDataParallel")
    if getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
        names.add("DistributedDataParallel")
    for name in sorted(names & _WRAPPERS)[:1]:
        raise ValueError(
            f"The model is distributed by pyg_sar.distribute() and by {name}, which would take "
            "each worker's gradients for those of a batch of its own, and average them. Use the "
            f"model that distribute() returns, without {name}"
        )
