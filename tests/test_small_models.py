"""Small models as researchers write them give one process's numbers, or are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import small_edge_models  # noqa: F401
import small_odd_models  # noqa: F401
import small_trainings  # noqa: F401
import torch
from small_models import MODELS, SEED

import pyg_sar
from pyg_sar.tensors import mapped, whole

REFUSED: dict[str, str] = {}
"""Models that are refused on several workers, and a part of the error's text."""


def outcome(name: str, data: Any, ready: Callable[[Any], Any]) -> Any:
    """Returns the numbers of a model, or the text of its error."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        found = MODELS[name](data, ready)
        return mapped(lambda t: whole(t, "the test").detach().clone(), found)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def worker(root: str, names: list[str]) -> dict[str, Any]:
    data = pyg_sar.load_partition(root, view="global")
    ready = lambda module: pyg_sar.distribute(module, view="global")  # noqa: E731
    return {name: outcome(name, data, ready) for name in names}
