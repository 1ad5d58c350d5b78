"""Tensors in nested lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_NESTED = (list, tuple, dict)


def tensors_in(*values: Any) -> list[Tensor]:
    """Returns all tensors in nested lists, tuples and dicts."""
    found: list[Tensor] = []
    waiting = [*reversed(values)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _NESTED):
            waiting += reversed([*(value.values() if isinstance(value, dict) else value)])
    return found


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Returns nested lists, tuples and dicts with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if not isinstance(value, _NESTED):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, v) for v in value))
    if isinstance(value, dict):
        return {key: mapped(change, v) for key, v in value.items()}
    return type(value)([mapped(change, v) for v in value])
