"""The scripts of the folder ``benchmarks`` as modules, for tests of what they count and print."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def benchmark(name: str) -> Any:
    """Returns the script of this name, executed anew as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(FOLDER))  # for this time: workers are forked where paths are the same
    sys.modules.setdefault(name, module)  # Dataclasses look there.
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
        if sys.modules[name] is module:
            del sys.modules[name]  # Workers get its functions, not its name.
    return module
