"""Checkpoints: one safetensors file with a JSON header, nothing pickled.

[Note: one file] A checkpoint is a single safetensors file: tensors (model, optimizer, random
states, whatever the caller adds) and, in the header's metadata, JSON for everything else. One file
can replace another in one rename, which a folder or a pair of files cannot: whoever is killed while
saving leaves the previous checkpoint whole.

[Note: all or none] Each collective step ends with every worker knowing whether every other one
succeeded, so that a bad file or a full disk is the same error on all of them and nobody waits for a
worker that has gone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_sar.comm.agreement import raised_everywhere
from pyg_sar.comm.devices import other_states, random_states, set_other_states
from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import CheckpointError
from pyg_sar.files import check_path, from_json, replace_file, save_tensors, to_json
from pyg_sar.partition.schema import without_prefix
from pyg_sar.reduction.parameters import check_replicas, check_tensors, shared_names
from pyg_sar.train.checkpoint_rows import cut_rows, gather_rows
from pyg_sar.wording import Shown, counted

_FORMAT = "pyg_sar.train.checkpoint"
_VERSION = 1
_HEADER = "pyg_sar"
_LABEL = ("", "", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Shown):
    """The content of a checkpoint besides model, optimizer and random states.

    Attributes:
        state: The JSON values given to :func:`save_checkpoint`.
        tensors: The tensors given to :func:`save_checkpoint`, on the CPU.
        world_size: How many ranks wrote it: workers, or the parts that they hosted.
        replicas: How many replicas of as many ranks each.
        has_best: Whether it holds the weights that were best on the validation nodes.
    """

    state: dict[str, Any]
    tensors: dict[str, Tensor]
    world_size: int
    replicas: int
    has_best: bool


@dataclass
class _Content:
    """A file's content as read: tensors by prefixed name, and the JSON header."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    has_best: bool = False

    def group(self, prefix: str) -> dict[str, Tensor]:
        return without_prefix(self.tensors, f"{prefix}/")


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    comm: Communicator | None = None,
) -> None:
    """Saves model, optimizer and every worker's random state. Collective: all workers call it.

    Rank 0 (of replica 0, whose buffers are saved) writes to a hidden file beside ``path``, flushes
    it to disk and renames it; the call returns on every worker once the file is there. Runs that
    save under one name don't disturb each other: the last one stays.

    Args:
        path: The file. Its folder must exist on rank 0's host.
        model: Its ``state_dict`` is saved. Of tensors with a row per node
            (:class:`~pyg_sar.nn.NodeEmbedding`) rank 0 gathers all rows.
        optimizer: Saved too where given.
        state: Numbers, texts, lists, tuples, and dictionaries of these (epoch, best values,
            configuration, a scheduler's ``state_dict()``, ...).
        tensors: Further tensors, of the same names and shapes on all workers; rank 0's are written.
        comm: The workers (:func:`pyg_sar.comm.group.current`).

    Raises:
        CheckpointError: on every worker, when rank 0 cannot write, or ``state`` is not JSON.
        ValueError: on every worker, when parameters or buffers differ between them (buffers:
            between those of a replica).
    """
    comm = comm or current()
    check_replicas(model, comm)
    if comm.across is not None:
        check_tensors(shared_names(model), [], comm.across)
    random_states = _gather_random_states(comm)
    what = f"Cannot write the checkpoint {os.fspath(path)!r}"
    with _all_or_none(comm, what):
        content = _collect(model, optimizer, state or {}, tensors or {}, comm)
    try:
        content.tensors = gather_rows(content.tensors, comm)
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}") from None
    with _all_or_none(comm, what):
        if comm.writes:
            content.tensors |= {f"random/{name}": value for name, value in random_states.items()}
            _write(Path(path), content)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    weights: Literal["last", "best"] = "last",
    restore_rng: bool | None = None,
    comm: Communicator | None = None,
) -> Checkpoint:
    """Loads what :func:`save_checkpoint` wrote. Collective: all workers call it, all read the file.

    Nothing is changed on any worker unless the file suits all of them. A model alone can be loaded
    with any number of workers, one process included::

        pyg_sar.train.load_checkpoint("run.ckpt", model, weights="best")

    Args:
        path: The file; on several hosts each needs it under this name (a shared folder).
        model: Takes the parameters and buffers; of tensors with a row per node each worker takes
            its rows, of any partition of the graph.
        optimizer: Takes the optimizer state.
        weights: ``'last'``: as of when it was saved. ``'best'``: the weights that a
            :class:`pyg_sar.train.trainer.Trainer` found best on the validation nodes.
        restore_rng: Whether the random state is taken up again, without which dropout draws other
            masks; default: where an optimizer is given, too. Where ranks had different ones it
            needs as many ranks as wrote it.
        comm: The workers (:func:`pyg_sar.comm.group.current`).

    Raises:
        CheckpointError: on every worker, when the file is missing, truncated, altered, newer, of
            another model or optimizer, has other random states than ranks, or is not the same
            file for all.
    """
    comm = comm or current()
    restore = optimizer is not None if restore_rng is None else restore_rng
    with _all_or_none(comm, _not_loaded(path)):
        content = _read(Path(path))
        if weights not in ("last", "best"):
            raise ValueError(f"Expected 'weights' to be 'last' or 'best' (got {weights!r})")
        group = content.group("model" if weights == "last" else "extra/best")
        if model is not None:
            _check_model(group, model, weights)
        if optimizer is not None:
            _check_optimizer(content.header.get("optimizer"), optimizer)
        if restore:
            _check_random_states(content, comm)
    _check_same_file(comm, path, content.header["sha256"])
    cut_rows(content.tensors, model, optimizer)
    if model is not None:
        model.load_state_dict(content.group("model" if weights == "last" else "extra/best"))
    if optimizer is not None:
        _load_optimizer(content, optimizer)
    if restore:
        _set_random_states(comm, content.group("random"), content.header["replicas"])
    comm.barrier()
    return _described(content)


def inspect_checkpoint(
    path: str | os.PathLike[str], comm: Communicator | None = None
) -> Checkpoint:
    """Returns a checkpoint without its tensors; all workers call it, and check the file.

    Errors are those of :func:`load_checkpoint`.
    """
    check_path("checkpoint", path)
    comm = comm or current()
    with _all_or_none(comm, _not_loaded(path)):
        # Parts of one worker come here in turn: no more than one of them holds the tensors.
        content = _read(Path(path))
        content.tensors = {}
    _check_same_file(comm, path, content.header["sha256"])
    return _described(content)


def checksum_in(path: str | os.PathLike[str]) -> str | None:
    """Returns the checksum that a checkpoint names; ``""`` for another file, ``None`` for none."""
    if not os.path.lexists(path):
        return None
    with suppress(SafetensorError, OSError, ValueError, TypeError, LookupError):
        if os.path.isfile(path):
            with safe_open(path, framework="pt") as file:
                return str(json.loads(file.metadata()[_HEADER])["sha256"])
    return ""


def _described(content: _Content) -> Checkpoint:
    return Checkpoint(
        state=content.header["state"],
        tensors=content.group("extra"),
        world_size=content.header["world_size"],
        replicas=content.header["replicas"],
        has_best=content.has_best,
    )


def _not_loaded(path: str | os.PathLike[str]) -> str:
    return f"Cannot load the checkpoint {os.fspath(path)!r}"


def _all_or_none(comm: Communicator, what: str) -> AbstractContextManager[None]:
    """Raises an error of any worker on all of them. See [Note: all or none]."""
    caught = CheckpointError, OSError, SafetensorError, TypeError, ValueError
    return raised_everywhere(comm, CheckpointError, f"{what}: ", *caught)


def _check_same_file(comm: Communicator, path: str | os.PathLike[str], digest: str) -> None:
    digests = comm.from_everyone(digest)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise CheckpointError(
                f"{_not_loaded(path)}: ranks 0 and {rank} read different files under this name; "
                "use a folder that all hosts share"
            )


# Random states ###############################################################


def _gather_random_states(comm: Communicator) -> dict[str, Tensor]:
    """Returns every worker's generator states, ``{kind: [R * world_size, *]}``, R replicas in turn.

    PyTorch's, by the type of device, as bytes; NumPy's and Python's are of the kind ``others``.
    """
    states = dict(zip(("cpu", "cuda"), random_states(comm.device), strict=False))
    states["others"] = other_states()
    found = {}
    for name, state in states.items():
        own = torch.stack(comm.all_gather(state.to(comm.device), label=_LABEL))
        everyone = [own] if comm.across is None else comm.across.all_gather(own, label=_LABEL)
        found[name] = torch.cat(everyone).cpu()
    return found


def _set_random_states(comm: Communicator, states: dict[str, Tensor], replicas: int) -> None:
    # All ranks' are one where there are more ranks than there were, and so with replicas.
    mine = {}
    for name, state in states.items():
        by_replica = state.view(replicas, -1, state.size(1))
        own = by_replica[comm.replica % replicas]
        mine[name] = own[comm.rank % len(own)].clone()
    torch.set_rng_state(mine["cpu"])
    if comm.device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"], comm.device)
    set_other_states(mine["others"])


def _check_random_states(content: _Content, comm: Communicator) -> None:
    """Raises where another number of ranks, or replicas, had a random state each."""
    written_by, replicas = content.header["world_size"], content.header["replicas"]
    world_size = comm.world_size
    # Not the others: processes that seed nothing differ in these, and most draw nothing by them.
    found = {kind: s for kind, s in content.group("random").items() if kind != "others"}
    states = [s.view(replicas, -1, s.size(1)) for s in found.values()]
    if replicas != comm.replicas and any(bool((s != s[:1]).any()) for s in states):
        raise CheckpointError(
            f"it was written by {counted(replicas, 'replicas')} with different random states, this "
            f"run has {comm.replicas}: start as many, load the model alone, or pass "
            "restore_rng=False (Trainer.resume: allow_changes=True)"
        )
    if written_by != world_size and any(bool((s != s[:, :1]).any()) for s in states):
        raise CheckpointError(
            f"it was written by {counted(written_by, 'ranks')} with different random states, this "
            f"run has {world_size}: start workers that host {counted(written_by, 'parts')}, load "
            "the model alone, or pass restore_rng=False"
        )


# To and from the file ########################################################


def _collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    extra: Mapping[str, Tensor],
    comm: Communicator,
) -> _Content:
    content = _Content(header={"format": _FORMAT, "version": _VERSION})
    content.header |= {"world_size": comm.world_size, "replicas": comm.replicas}
    content.header |= {"state": {}, "coded": {}}
    for name, value in state.items():
        if isinstance(value, Tensor):
            raise TypeError(
                f"state[{name!r}] is a Tensor: state takes what JSON can hold; call .tolist()"
            )
        with suppress(ValueError):  # An infinite number.
            if json.loads(json.dumps(value, allow_nan=False)) == value:
                content.header["state"][name] = value
                continue
        coded = to_json(value)  # Such as MultiStepLR's milestones, whose keys are numbers.
        with suppress(ValueError):
            if repr(from_json(json.loads(json.dumps(coded)))) == repr(value):
                content.header["coded"][name] = coded
                continue
        raise TypeError(f"state[{name!r}] does not come back from JSON as it is: {value!r:.200}")
    content.tensors |= {f"extra/{name}": tensor for name, tensor in extra.items()}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"model.state_dict()[{name!r}] is a {type(tensor).__name__}")
        content.tensors[f"model/{name}"] = tensor
    if optimizer is not None:
        saved = optimizer.state_dict()
        scalars: dict[str, dict[str, Any]] = {}
        for index, entry in saved["state"].items():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    content.tensors[f"optimizer/{index}/{key}"] = value
                elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps several tensors in {key!r}, which a "
                        "checkpoint doesn't hold: save the model without its optimizer"
                    )
                else:
                    scalars.setdefault(str(index), {})[key] = value
        content.header["optimizer"] = {
            "class": type(optimizer).__name__,
            "groups": [
                {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}
                for group in saved["param_groups"]
            ],
            "scalars": scalars,
        }
    return content


def _load_optimizer(content: _Content, optimizer: torch.optim.Optimizer) -> None:
    saved = content.header["optimizer"]
    state: dict[int, dict[str, Any]] = {int(i): dict(v) for i, v in saved["scalars"].items()}
    for name, tensor in content.group("optimizer").items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = tensor
    groups = []
    for group, now in zip(saved["groups"], optimizer.param_groups, strict=True):
        # JSON has lists only, and optimizers such as Adam hold tuples (``betas``).
        groups.append(
            {k: tuple(v) if isinstance(now.get(k), tuple) else v for k, v in group.items()}
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _digest(content: _Content) -> str:
    """Returns a SHA-256 over the tensors (names, types, shapes, values) and the header."""
    total = hashlib.sha256()
    header = {k: v for k, v in content.header.items() if k != "sha256"}
    total.update(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(content.tensors.items()):
        total.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _write(path: Path, content: _Content) -> None:
    # Copies: safetensors refuses tensors that share memory, as tied weights do. The system reads
    # them: they stay in memory.
    with current().unpaged():
        content.tensors = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in content.tensors.items()
        }
    content.header["sha256"] = _digest(content)
    header = json.dumps(content.header, sort_keys=True, allow_nan=False)
    replace_file(path, lambda file: save_tensors(content.tensors, file, {_HEADER: header}))


def _read(path: Path) -> _Content:
    if not path.is_file():
        raise CheckpointError("there is no such file")
    content = _Content()
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = (file.metadata() or {}).get(_HEADER)
            if header is not None:
                content.header = json.loads(header)
                # Clones: the file may be replaced by the next checkpoint while it is mapped.
                content.tensors = {k: file.get_tensor(k).clone() for k in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        if is_zipfile(path):
            raise CheckpointError(
                "it is no checkpoint of pyg_sar; a file of torch.save loads by "
                "model.load_state_dict(torch.load(...))"
            ) from error
        raise CheckpointError(f"the file is truncated or damaged ({error})") from error
    if not isinstance(content.header, dict) or content.header.get("format") != _FORMAT:
        raise CheckpointError("this is not a checkpoint of pyg_sar")
    version = content.header.get("version")
    if isinstance(version, int) and version > _VERSION:
        raise CheckpointError(
            f"it has format version {version}, this package knows {_VERSION}; update pyg_sar"
        )
    if content.header.get("sha256") != _digest(content):
        raise CheckpointError("its checksum is wrong: the file was altered after it was written")
    _check_header(content.header)
    try:
        coded = {name: from_json(value) for name, value in content.header.get("coded", {}).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"its header says {error}: another program wrote it") from error
    content.header["state"] |= coded
    content.has_best = any(name.startswith("extra/best/") for name in content.tensors)
    return content


def _check_header(header: Mapping[str, Any]) -> None:
    """Raises where a field is of another type: a checksum does not tell who wrote a file."""
    fields = dict(header)
    kinds: dict[str, Any] = {"state": dict, "world_size": int, "replicas": int}
    if "optimizer" in header:
        kinds["optimizer"] = dict
        inner = header["optimizer"] if isinstance(header["optimizer"], dict) else {}
        fields |= {f"optimizer.{k}": v for k, v in inner.items()}
        kinds |= {"optimizer.class": str, "optimizer.groups": list, "optimizer.scalars": dict}
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind):
            raise CheckpointError(
                f"its header says {name}={fields.get(name)!r}, not a {kind.__name__}: another "
                "program wrote it"
            )


def _check_model(saved: Mapping[str, Tensor], model: nn.Module, weights: str) -> None:
    if not saved:
        raise CheckpointError(f"it holds no {weights!r} weights")
    now = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    notes = [f"{name} is only in the checkpoint" for name in saved if name not in now]
    notes += [f"{name} is only in the model" for name in now if name not in saved]
    for name, tensor in now.items():
        other = saved.get(name, tensor)
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            notes.append(
                f"{name} is {other.dtype} {list(other.shape)} in the checkpoint, "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )
    if notes:
        more = f", and {len(notes) - 3} more" if len(notes) > 3 else ""
        raise CheckpointError(f"it is of another model: {'; '.join(notes[:3])}{more}")


def _check_optimizer(saved: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer) -> None:
    if saved is None:
        raise CheckpointError("it holds no optimizer state")
    sizes = [len(group["params"]) for group in saved["groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if saved["class"] != type(optimizer).__name__ or sizes != now:
        raise CheckpointError(
            f"it is of another optimizer: {saved['class']} with {sizes} parameters per group, "
            f"this run has {type(optimizer).__name__} with {now}"
        )
