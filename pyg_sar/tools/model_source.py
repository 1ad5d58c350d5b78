"""Where the command line's models come from: a name, or a function of the user's.

=====================  ==========================================================================
model                  what is built
=====================  ==========================================================================
``gat``, ``gcn``, ...  :func:`pyg_sar.tools.models.build_model` with the options of the command line
``module:callable``    what ``callable(data)`` returns, or ``callable()`` where it takes nothing
``FILE.py:callable``   the same, from a file
=====================  ==========================================================================
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch_geometric.data import Data

from pyg_sar.tools.models import MODELS


def imported_model(source: str, data: Data) -> nn.Module:
    """Builds a model by ``'module:callable'`` or ``'FILE.py:callable'``.

    Args:
        source: Where the function (or class) is.
        data: The graph that the model is for.

    Returns:
        The model.

    Raises:
        ValueError: When there is no such function, or it returns no model.
    """
    place, colon, name = source.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"Expected a model to be one of {', '.join(MODELS)}, 'module:callable' or "
            f"'FILE.py:callable' (got {source!r})"
        )
    make: Callable[..., Any] | None = getattr(_module(place), name, None)
    if not callable(make):
        raise ValueError(f"{place!r} has no function or class {name!r}")
    model = make(data) if inspect.signature(make).parameters else make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{source} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"There is no module {place!r}") from error
    if not os.path.exists(place):
        raise ValueError(f"There is no file {place!r}")
    name = os.path.splitext(os.path.basename(place))[0]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ValueError(f"{place!r} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
