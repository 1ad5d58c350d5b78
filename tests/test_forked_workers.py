"""What forked workers share with those that start from nothing: all but the time it takes."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import forked_workers
import numpy
import pytest
import torch
from forked_workers import Templates

import pyg_sar.comm
from pyg_sar.comm.launch import _Worker, launch
from pyg_sar.errors import LostWorkerError


def surroundings() -> dict[str, Any]:
    standard = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    here = {
        "path": sys.path,
        "folder": os.getcwd(),
        "session": os.getsid(0) == os.getpgrp() == os.getpid(),
        "torch": (torch.get_num_threads(), torch.get_default_dtype()),
        "modules": sorted(name for name in sys.modules if name.startswith("pyg_sar")),
        "generation": pyg_sar.comm.group._scope.get().generation,
        "standard": standard,
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }
    return here | {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}


def test_they_find_what_workers_from_nothing_find(monkeypatch, forked, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYG_SAR_SHARED_MEMORY", "0")
    (found,) = launch(surroundings, 1)
    monkeypatch.setattr(_Worker, "start", forked.from_nothing)
    (expected,) = launch(surroundings, 1)
    differ = {name for name in {*found, *expected} if found.get(name) != expected.get(name)}
    # Modules are loaded when they are used: by others of the template's workers, too.
    assert differ <= {"modules"} and set(expected["modules"]) <= set(found["modules"])


def test_no_launch_finds_what_another_left():
    def work() -> tuple[Any, ...]:
        drawn = random.random(), numpy.random.rand(), torch.initial_seed()
        found = os.environ.pop("LEFT", None), torch.get_default_dtype(), hasattr(torch, "left")
        os.environ["LEFT"], torch.left = "1", True
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(7)
        return os.getpid(), hash("a name"), *drawn, found

    own = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    launches = [launch(work, 2) for _ in range(2)]
    workers = launches[0] + launches[1]
    assert all(found == (None, torch.float32, False) for *_, found in workers)
    pids, hashes, *drawn = (set(values) for values in list(zip(*workers, strict=True))[:5])
    # All start with the caller's random states.
    random.setstate(own[0]), numpy.random.set_state(own[1]), torch.set_rng_state(own[2])
    expected = random.random(), numpy.random.rand(), torch.initial_seed()
    assert len(pids) == 4 and drawn == [{value} for value in expected]
    assert len(hashes) == 1  # Sets of names have one order in all workers.


def test_a_killed_one_is_missed():
    with pytest.raises(LostWorkerError, match="Rank 1 was lost: it was killed by SIGKILL"):
        launch(lambda: os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else 0, 2)


def test_what_a_process_reads_when_it_starts_makes_one_start(monkeypatch):
    chosen: list[dict[str, str]] = []
    found = Templates(lambda rank, common: chosen.append(dict(common)))  # type: ignore[arg-type]
    common = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "0", "MASTER_PORT": "1"}
    found.like = list(sys.path), {"OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(sys, "path", [*sys.path, "/packages/setuptools/_vendor"])
    template: Any = SimpleNamespace(fork=lambda *_: "forked", alone=True)
    found.started = [template]
    assert found.start(0, {**common, "PYG_SAR_SHARED_MEMORY": "0"}) == "forked" and not chosen
    found.start(0, {**common, "OMP_NUM_THREADS": "2"})
    monkeypatch.syspath_prepend("elsewhere")
    found.start(0, common)
    assert [c["OMP_NUM_THREADS"] for c in chosen] == ["2", "1"]


def test_what_has_threads_is_not_forked(monkeypatch):
    """As where an import starts one: PyTorch for CUDA does."""
    chosen: list[int] = []
    found = Templates(lambda rank, common: chosen.append(rank))  # type: ignore[arg-type,return-value]
    found.like = list(sys.path), {}
    monkeypatch.setattr(forked_workers, "searched", lambda: found.like[0])
    template: Any = SimpleNamespace(fork=lambda *_: "forked", alone=False)
    found.started = [template]
    assert found.start(1, {"WORLD_SIZE": "1"}) is None and chosen == [1]
