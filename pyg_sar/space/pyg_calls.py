"""Which function of PyG the caller's own code called: what an error has to name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

_LIBRARIES = frozenset(("pyg_sar", "torch", "torch_geometric", "copy", "functools", "contextlib"))


def library_frames() -> Iterator[FrameType]:
    """The frames from here outward, up to the caller's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_of(frame).partition(".")[0] in _LIBRARIES:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """The name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def pyg_call() -> str:
    """The outermost of these frames that is PyG's, by the public name of what it runs; or ``''``.

    ``'torch_geometric.utils.coalesce'``, ``'torch_geometric.transforms.ToUndirected'``,
    ``'torch_geometric.data.Data.coalesce'``.
    """
    found = None
    for frame in library_frames():
        if module_of(frame).partition(".")[0] == "torch_geometric":
            found = frame
    return "" if found is None else _name(found)


def _name(frame: FrameType) -> str:
    name, owner = frame.f_code.co_qualname, frame.f_locals.get("self")
    first, _, method = name.partition(".")
    for kind in type(owner).__mro__ if owner is not None and method else ():
        if kind.__module__.partition(".")[0] == "torch_geometric":
            path = public_name(kind.__module__, kind.__name__)
            return path if method in ("__call__", "forward") else f"{path}.{method}"
    path = public_name(module_of(frame), first)
    return f"{path}.{method}" if method else path


def public_name(module: str, name: str) -> str:
    """Without private modules: ``torch_geometric.utils.coalesce``, not ``..utils._coalesce.``."""
    parts = module.split(".")
    for length in range(1, len(parts)):
        package = sys.modules.get(".".join(parts[:length]))
        if getattr(package, name, None) is not None:
            return ".".join((*parts[:length], name))
    return f"{module}.{name}"
