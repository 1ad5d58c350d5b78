"""Python's values as JSON, which has no tuples, no infinities, and no keys but strings."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch


def to_json(value: Any) -> Any:
    """Returns a value coded as JSON can hold it.

    Dictionaries and tuples become objects with one key, which names the type. Tensors of one
    element become numbers. What is unknown stays as it is.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    kind = type(value)
    if kind is list:
        return [to_json(item) for item in value]
    if kind is tuple:
        return {"tuple": [to_json(item) for item in value]}
    if kind in (dict, Counter):
        return {kind.__name__: [[to_json(key), to_json(item)] for key, item in value.items()]}
    return value


def from_json(value: Any) -> Any:
    """Returns what :func:`to_json` was given.

    Raises:
        ValueError: When it is something else.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str
    content: Any
    kind, content = next(iter(value.items()), ("", []))
    try:
        if kind == "float":
            return float(content)
        if kind == "tuple":
            return tuple(from_json(item) for item in content)
        pairs = {from_json(key): from_json(item) for key, item in content}
    except TypeError as error:
        raise ValueError(f"{value!r} is no coded value: {error}") from None
    if len(value) != 1 or kind not in ("dict", "Counter"):
        raise ValueError(f"{value!r} is no coded value")
    return Counter(pairs) if kind == "Counter" else pairs
