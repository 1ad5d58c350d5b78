"""State that a message reads besides its arguments and what its layer holds.

The backward pass runs a message again. Arguments are then as they were, and so are attributes
(:class:`~pyg_sar.message.layer_state.AmbientState`). Globals, closures, attributes of classes and
fields of objects are not: they may be others by then, and only the messages' values tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from pyg_sar.message.layer_facts import home_of, hooks_of
from pyg_sar.message.layer_state import is_kept

_KNOWN = frozenset({"torch", "torch_geometric", "pyg_sar", "numpy", "math", "builtins", "typing"})
_BY_NAME = frozenset({"getattr", "globals", "vars", "eval", "exec", "open", "next", "__import__"})


def reads_outside(layer: nn.Module) -> bool:
    """Returns whether a layer's message may read what its backward pass can't put back.

    Its code and that of the user's functions, methods and modules that it names are looked at.

    Args:
        layer: A layer of PyG, or one of the user's.
    """
    if hooks_of(layer, "message", "edge_update"):
        return True
    return any(
        _reads_outside(module, ("message", "edge_update") if module is layer else ("forward",))
        for module in layer.modules()
    )


def _reads_outside(module: nn.Module, methods: tuple[str, ...]) -> bool:
    waiting = [_function(_named(module, name)) for name in methods]
    seen: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen or not _is_users(function):
            continue
        seen.add(function)
        for value in _values_of(function, module):
            waiting.append(_function(value))
            if waiting[-1] is None and not _is_constant(value):
                return True
    return False


def _values_of(function: FunctionType, module: nn.Module) -> Iterator[Any]:
    """Yields what names in a function's code may be: globals, attributes, variables outside."""
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in code.co_names:
            yield object() if name in _BY_NAME else function.__globals__.get(name)
            found = _named(module, name)
            held = name in vars(module) and not callable(found) and is_kept(found)
            yield None if held or isinstance(found, Tensor | nn.Module) else found
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield cell.cell_contents


def _named(module: nn.Module, name: str) -> Any:
    """Returns a module's attribute, or its class's; ``None``: it has none, or PyTorch's or PyG's.

    Nothing is run: a property is found as such.
    """
    if name in vars(module):
        return vars(module)[name]
    base: Any = next((base for base in type(module).__mro__ if name in vars(base)), None)
    known = base is None or base.__module__.partition(".")[0] in _KNOWN
    return None if known else vars(base)[name]


def _function(value: Any) -> Any:
    """Returns the function of a method or a property; ``None`` for all else."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _is_users(function: Any) -> bool:
    return home_of(function) not in _KNOWN


def _is_constant(value: Any) -> bool:
    """Returns whether what is no function is a known module, class or object that is called."""
    if value is None:
        return True
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _KNOWN
    return callable(value) and not isinstance(value, nn.Module) and not _is_users(value)
