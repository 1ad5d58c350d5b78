"""The device that a worker computes on, and the backend that carries its tensors.

One rule for both, a function of its arguments alone: a worker computes on the GPU of its number on
its host (``LOCAL_RANK``) where each worker of the host has one. NCCL carries tensors between such
workers; in all other cases gloo does, which copies tensors of a GPU through the CPU's memory.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from pyg_sar.comm.backends import TRANSPORTS
from pyg_sar.comm.environment import WorkerInfo
from pyg_sar.wording import counted


@dataclass(frozen=True, slots=True)
class Placement:
    """The backend and the device of a worker, and why these."""

    backend: str
    device: torch.device
    reason: str


def device_of(device: torch.device | str | int) -> torch.device:
    """Returns what the user gave as a device, or raises ``ValueError``."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device such as 'cpu' or 'cuda:0'") from error


def check_gpu(device: torch.device, rank: int, gpus: int) -> None:
    """Raises ``ValueError`` on a GPU that this host, on which PyTorch sees ``gpus``, hasn't."""
    if device.type != "cuda" or (device.index or 0) < gpus:
        return
    remedy = f"pass 'cuda:0' to 'cuda:{gpus - 1}', or leave 'device' out"
    raise ValueError(
        f"device='{device}' at rank {rank}, but this host has "
        f"{counted(gpus, 'CUDA devices')} that PyTorch sees: "
        f"{remedy if gpus else 'leave it out, to compute on the CPU'}"
    )


def count_gpus() -> int:
    """Returns the number of CUDA devices that PyTorch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def placement(
    info: WorkerInfo,
    backend: str | None,
    device: torch.device | None,
    gpus: int,
    nccl: bool,
    parts: bool = False,
) -> Placement:
    """Returns where a worker computes, and what carries its tensors.

    Args:
        info: The worker.
        backend, device: What the user asked for, if anything. ``cuda`` without a number is
            ``cuda:LOCAL_RANK``, modulo the GPUs.
        gpus: CUDA devices of this host that PyTorch sees.
        nccl: This PyTorch has NCCL.
        parts: The worker hosts parts, whose messages are put together in the CPU's memory: not by
            NCCL, unless the user says so.

    Raises:
        ValueError: NCCL and a device that is no GPU, a GPU that isn't there, or ``LOCAL_RANK`` is
            not set where it is needed.
    """
    if device is not None and device.type == "cuda":
        check_gpu(device, info.rank, gpus)
        number = device.index
        if number is None:
            number = (info.local_rank or 0) % gpus
        device = torch.device("cuda", number)
    if backend is not None:
        if backend == "nccl" and device is not None and device.type != "cuda":
            raise ValueError(
                f"backend='nccl' carries tensors of GPUs, and device='{device}' at rank "
                f"{info.rank} is none: pass backend='gloo', or no device"
            )
        kind = TRANSPORTS[backend]
        return Placement(backend, device or kind.choose_device(info), "as asked for")
    enough = gpus > 0 and gpus >= info.local_world_size
    count = f"{counted(gpus, 'GPUs')} for {counted(info.local_world_size, 'workers')} of this host"
    if device is None and not enough:
        hint = ": init(device='cuda') lets workers share a GPU" if gpus else ""
        return Placement("gloo", torch.device("cpu"), f"{count}{hint}")
    own = TRANSPORTS["nccl"].choose_device(info) if enough else None
    device = device or own
    if device is None:
        raise RuntimeError("Expected a device where each worker has a GPU")
    if device != own:
        return Placement("gloo", device, f"{count}; device='{device}' is not a worker's own GPU")
    if nccl and not parts:
        return Placement("nccl", device, f"{count}, each its own")
    why = "parts are carried by gloo" if parts else "this PyTorch has no NCCL"
    return Placement("gloo", device, f"{count}; {why}")


def place(
    info: WorkerInfo, backend: str | None, device: torch.device | None, parts: bool = False
) -> Placement:
    """Returns :func:`placement` on this machine; rank 0 writes it to the log ``pyg_sar.comm``."""
    found = placement(info, backend, device, count_gpus(), dist.is_nccl_available(), parts)
    if info.rank == 0:
        logging.getLogger("pyg_sar.comm").info(
            "backend %s, device %s at rank 0 (%s)", found.backend, found.device, found.reason
        )
    return found


def numbered(device: torch.device) -> torch.device:
    """Returns a device with its number, as that of its tensors has: ``cuda`` is the current GPU."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of PyTorch's default generators: the CPU's, and that of a GPU, on the CPU."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_states(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Makes these generators go on from :func:`random_states`."""
    torch.random.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def other_states() -> torch.Tensor:
    """Returns the states of NumPy's and Python's default generators: int64 ``[1254]``."""
    _, keys, place, waits, normal = np.random.get_state(legacy=True)
    _, words, gauss = random.getstate()
    counts = np.array([*keys, place, waits, *words, gauss is not None], dtype=np.int64)
    normals = np.array([normal, gauss or 0.0], dtype=np.float64).view(np.int64)
    return torch.from_numpy(np.concatenate([counts, normals]))


def set_other_states(states: torch.Tensor) -> None:
    """Makes NumPy's and Python's default generators go on from :func:`other_states`."""
    counts = states.numpy()
    normal, gauss = counts[-2:].copy().view(np.float64).tolist()
    keys, (place, waits), words, (drawn, *_) = np.split(counts, [624, 626, 1251])
    np.random.set_state(("MT19937", keys.astype(np.uint32), int(place), int(waits), normal))
    random.setstate((3, tuple(words.tolist()), gauss if drawn else None))


def seed_generators(seed: int) -> None:
    """Seeds PyTorch's default generators, NumPy's and Python's."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
