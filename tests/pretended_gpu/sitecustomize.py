"""Gives each Python process that has this folder in ``PYTHONPATH`` a GPU that isn't there.

PyTorch's device 'cuda', where PyTorch was built without it: see ``device.cpp``, whose library the
variable ``PRETENDED_GPU`` of the environment names. It is loaded before PyTorch, whose Python
functions for CUDA are then replaced. Python imports this module by its name when it starts.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def load(library: str) -> None:
    """Loads the device, behind PyTorch's libraries and before PyTorch."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise ImportError("the pretended GPU needs PyTorch")
    folder = Path(found.submodule_search_locations[0]) / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)
    for name in ("triton", "torch_scatter", "torch_sparse"):  # They know a real one, or none.
        sys.modules[name] = None  # type: ignore[assignment]


class Stream:
    """All work has ended when it returns."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        import torch

        self.device = torch.device("cuda", 0) if device is None else torch.device(device)

    def record_event(self, event: Any = None) -> Stream:
        return self

    def wait_event(self, event: Any) -> None:
        pass

    wait_stream = wait_event

    def synchronize(self) -> None:
        pass


class Device:
    """Makes a device the current one until the block ends."""

    def __init__(self, device: Any) -> None:
        import torch

        index = device if isinstance(device, int) else torch.device(device).index
        self.ops: Any = torch.ops.pretended_gpu
        self.before, self.index = self.ops.current(), index

    def __enter__(self) -> None:
        if self.index is not None and self.index >= 0:
            self.ops.choose(self.index)

    def __exit__(self, *failure: Any) -> None:
        self.ops.choose(self.before)


def replace_functions() -> None:
    """Has ``torch.cuda`` speak of the device."""
    import torch

    ops: Any = torch.ops.pretended_gpu

    def nothing(*given: Any, **named: Any) -> None:
        pass

    def chosen(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is None:
            raise ValueError(f"Expected a device with a number (got {device})")  # as PyTorch does
        ops.choose(index)

    def set_all(states: Any) -> None:
        ops.set_rng_state(states[0])

    def seed(number: int) -> None:
        ops.manual_seed(int(number) - (2**64 if int(number) >= 2**63 else 0))

    drawn = {
        "get_rng_state": lambda device=None: ops.get_rng_state(),
        "set_rng_state": lambda state, device=None: ops.set_rng_state(state),
        "get_rng_state_all": lambda: [ops.get_rng_state()],
        "set_rng_state_all": set_all,
        "manual_seed": seed,
        "manual_seed_all": seed,
    }
    others: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 4,
        "current_device": lambda: ops.current(),
        "get_device_name": lambda device=None: "a GPU that isn't there",
        "empty_cache": nothing,
        "set_device": chosen,
        "device": Device,
        "_lazy_init": nothing,
        "_lazy_call": lambda call, **named: call(),
        "_is_in_bad_fork": lambda: False,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "Stream": Stream,
        "synchronize": nothing,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *given: True,
        "memory_allocated": lambda device=None: ops.allocated(False),
        "max_memory_allocated": lambda device=None: ops.allocated(True),
        "reset_peak_memory_stats": lambda device=None: ops.forget_peak(),
    }
    resize = torch.UntypedStorage.resize_

    def resized(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            ops.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(self), size)
        return self

    clone = torch.UntypedStorage.clone

    def cloned(self: Any) -> Any:
        if self.device.type != "cuda":
            return clone(self)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            given = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
            return given.clone().untyped_storage()

    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            given = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
            return given.to(device).untyped_storage()

    torch.distributed.is_nccl_available = lambda: "PRETENDED_NCCL" in os.environ
    torch.UntypedStorage.clone = cloned  # type: ignore[method-assign]
    torch.UntypedStorage.to = moved  # type: ignore[method-assign]
    torch.Tensor.record_stream = nothing  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
    for name, value in {**drawn, **others}.items():
        setattr(torch.cuda, name, value)
    for name, value in drawn.items():
        setattr(importlib.import_module("torch.cuda.random"), name, value)


if LIBRARY := os.environ.get("PRETENDED_GPU"):
    load(LIBRARY)
    replace_functions()
