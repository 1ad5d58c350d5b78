"""Small models as researchers write them: on several workers each gives the numbers of one process, or is refused.

:data:`REFUSED` holds what is refused, each with a part of the error's text.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from small_models import MODELS

import pyg_sar
from pyg_sar.tensors import whole
from pyg_sar.tensors.nested import mapped

REFUSED: dict[str, str] = {}


def outcome(name: str, data: Any, ready: Any) -> Any:
    """Returns the numbers of a model, or the text of its error."""
    torch.manual_seed(5)
    random.seed(5)
    start = time.time()
    try:
        found = MODELS[name](data, ready)
        return mapped(lambda t: whole(t, "the test").detach().clone(), found), time.time() - start
    except Exception as error:
        import traceback

        return f"{type(error).__name__}: {error}", traceback.format_exc()


def worker(root: str, names: list[str]) -> dict[str, Any]:
    data = pyg_sar.load_partition(root, view="global")
    ready = lambda module: pyg_sar.distribute(module, view="global")  # noqa: E731
    out = {}
    for name in names:
        print(name, file=open("/tmp/models/at", "a"), flush=True)
        out[name] = outcome(name, data, ready)
    return out
