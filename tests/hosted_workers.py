"""Launches of the tests with hosted parts: each worker of a test is a part (``pytest --hosted``).

Workers that are threads become parts that this process hosts; worker processes become parts
that two worker processes host. So whatever the tests show of workers is shown of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pyg_sar
from pyg_sar.comm import launch as starting
from pyg_sar.comm.communicator import LocalCommunicator
from pyg_sar.comm.hosting import PartError, host_parts

PROCESSES = 2


def host(fn: Callable[..., Any], parts: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs ``fn(*args)`` for parts that this process hosts; fails as :func:`launch` does.

    Unlike :func:`pyg_sar.run`, it leaves the process without a communicator.
    """
    outer = LocalCommunicator(torch.device("cpu"), timeout)
    try:
        return host_parts(fn, args, parts, outer)
    except PartError as failure:
        raise starting._describe(failure.error, failure.part)[0] from failure.error


@contextmanager
def hosted_workers() -> Iterator[None]:
    """Meanwhile ``pyg_sar.launch`` makes each worker a hosted part."""
    original = starting.launch

    def launch(fn: Any, num_workers: int, *args: Any, **how: Any) -> list[Any]:
        backend = how.get("backend")
        if backend == "threads":
            return host(fn, num_workers, *args, timeout=how.get("timeout", 60.0))
        if backend not in (None, "gloo") or "parts" in how:
            return original(fn, num_workers, *args, **how)
        return original(fn, min(PROCESSES, num_workers), *args, parts=num_workers, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyg_sar, "launch", launch)
        yield
