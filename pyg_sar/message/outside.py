"""State that a message reads besides its arguments and what its layer holds.

The backward pass runs a message again. Arguments are then as they were, and so are attributes
(:class:`~pyg_sar.message.layer_state.AmbientState`). Globals, closures, attributes of classes and
fields of objects are not: they may be others by then, and only the messages' values tell. In the
next call they may have the message do something else than it was analysed for: so their numbers,
names and objects are part of a call's key (:func:`state_of`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from pyg_sar.message.layer_facts import (
    LIBRARIES,
    Itself,
    function_of,
    home_of,
    hooks_of,
    is_users,
    names_in,
)
from pyg_sar.message.layer_state import is_kept

_TELLS = frozenset({"os", "posix", "time", "datetime", "random", "secrets", "sys", "io"})
"""Modules of Python whose functions may tell another thing in each call."""
_BY_NAME = frozenset({
    "getattr", "hasattr", "globals", "vars", "eval", "exec", "open", "next", "__import__",
})  # fmt: skip
_CONSTANT = frozenset({"torch", "torch_geometric", "numpy", "pyg_sar"})
"""Packages whose objects without fields are as they are: a dtype, a device."""
_NOT_CALLED = frozenset({"__init__", "reset_parameters", "extra_repr", "__repr__"})
_OF_LAYER = "message", "edge_update", "aggregate", "update"
_PLAIN = bool, int, float, complex, str, bytes, type(None)
_THEMSELVES = nn.Module, ModuleType, type, FunctionType, BuiltinFunctionType
_MANY = 256  # entries of a container that are looked at
_DEEP = 3  # objects within objects


class _Cell(NamedTuple):
    """A variable of a function around another one, as a mapping."""

    cell: Any

    def get(self, name: str) -> Any:
        return self.cell.cell_contents


class Outside(NamedTuple):
    """State that a layer's message, and what comes with it, may read beside its arguments.

    Attributes:
        places: Where values are, by their names; those of the layer's own modules as well.
        changes: Some of them may be others when the message runs again.
        unknown: It reads by names that are made, or from a module like ``os``.
    """

    places: list[tuple[Any, str]]
    changes: bool
    unknown: bool

    def state(self) -> tuple[Any, ...]:
        """Returns the values, as part of a key."""
        return tuple([state_of(place.get(name)) for place, name in self.places])


def outside_of(layer: nn.Module) -> Outside:
    """Returns what a layer's message may read beside its arguments.

    Its code and that of the user's functions, methods and modules that it names are looked at.

    Args:
        layer: A layer of PyG, or one of the user's.
    """
    places: list[tuple[Any, str]] = []
    named: set[str] = set()
    changes, unknown = bool(hooks_of(layer, "message", "edge_update")), False
    modules = list(layer.modules())
    for module in modules:
        found = _look(module, _methods_of(module, layer), places, named)
        changes, unknown = changes or found[0], unknown or found[1]
    for module in modules[1:]:  # Whatever the layer reads of them.
        own = [(name, vars(module)[name]) for name in named & vars(module).keys()]
        read = [(name, v) for name, v in own if not isinstance(v, Tensor | nn.Module)]
        places += [(vars(module), name) for name, _ in read]
        changes |= any(callable(value) or not is_kept(value) for _, value in read)
    return Outside(places, changes, unknown)


def _methods_of(module: nn.Module, layer: nn.Module) -> list[Any]:
    """Returns what a message may call of a module: of classes below others, theirs as well."""
    bases = [vars(base) for base in type(module).__mro__ if is_users(base)]
    if module is layer:
        return [own[name] for own in (vars(layer), *bases) for name in _OF_LAYER if name in own]
    return [value for own in bases for name, value in own.items() if name not in _NOT_CALLED]


def _look(module: nn.Module, methods: list[Any], places: Any, named: set[str]) -> tuple[bool, bool]:
    """Returns whether a module's methods read what may change, and what can't be told."""
    changes = unknown = False
    waiting = [(method, module) for method in methods]
    seen: set[Any] = set()
    while waiting:
        value, owner = waiting.pop()
        function: Any = function_of(value)
        if function is None or function in seen or not is_users(function):
            continue
        seen.add(function)
        names = sorted(names_in(function.__code__))
        named.update(names)
        unknown |= not _BY_NAME.isdisjoint(names)
        for place, name in _places_of(function, names, owner):
            value = place.get(name)
            unknown |= isinstance(value, ModuleType) and value.__name__ in _TELLS
            unknown |= callable(value) and home_of(value) in _TELLS
            if isinstance(value, ModuleType) and _is_constant(value):
                continue
            places.append((place, name))
            if value is None or _is_constant(value):
                continue
            unknown |= function_of(value) is None and _is_opaque(value)
            held = owner is module and place is vars(module) and is_kept(value)
            changes |= function_of(value) is None and not (held and not callable(value))
            waiting += _functions_in(value, owner)
    return changes or unknown, unknown


def _functions_in(value: Any, owner: Any) -> list[tuple[Any, Any]]:
    """Returns the functions that a value is or holds, or methods of its class, and of whom."""
    if isinstance(value, Mapping | list | tuple) and len(value) <= _MANY:
        items = value.values() if isinstance(value, Mapping) else value
        return [(item, owner) for item in items]
    holder = getattr(value, "__self__", None)
    if holder is not None and not isinstance(holder, ModuleType):
        return [(value, holder)]
    if function_of(value) is not None or isinstance(value, type | ModuleType | Tensor):
        return [(value, owner)]
    own = filter(is_users, type(value).__mro__)
    methods = [pair for base in own for pair in vars(base).items()]
    return [(method, value) for name, method in methods if name not in _NOT_CALLED]


def _places_of(function: FunctionType, names: list[str], owner: Any) -> Iterator[tuple[Any, str]]:
    """Yields where names in a function's code may have their values."""
    for name in names:
        value = function.__globals__.get(name)
        if name in function.__globals__:
            yield function.__globals__, name
        for inner in names if isinstance(value, ModuleType | type | FunctionType) else ():
            if not _is_constant(value) and inner in vars(value):
                yield vars(value), inner
        place = _place_of(owner, name)
        if place is not None and not isinstance(place.get(name), Tensor | nn.Module):
            yield place, name
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in defaults:  # An object that changes, say.
        yield {"": value}, ""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield _Cell(cell), name


def _place_of(owner: Any, name: str) -> Any:
    """Returns where an object's attribute is; ``None``: it has none, or PyTorch's or PyG's."""
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own
    base: Any = next((base for base in type(owner).__mro__ if name in vars(base)), None)
    return vars(base) if base is not None and is_users(base) else None


def _is_constant(value: Any) -> bool:
    """Returns whether what is no function is a known module, class or object that is called."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in LIBRARIES
    return callable(value) and not isinstance(value, nn.Module) and not is_users(value)


def _is_opaque(value: Any) -> bool:
    """Returns whether an object, an iterator say, may tell another thing each time unseen."""
    seen = callable(value) or not isinstance(state_of(value), Itself)
    return not (seen or isinstance(value, _THEMSELVES)) and home_of(value) not in _CONSTANT


def state_of(value: Any, deep: int = _DEEP) -> Any:
    """Returns a value's numbers and names, and which objects it holds, as part of a key."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, np.ndarray) and value.size <= _MANY:
        return value.dtype, value.tobytes()
    if isinstance(value, Tensor) and type(value) is not Tensor:  # A stand-in refuses its shape.
        return type(value)
    if isinstance(value, Tensor | np.ndarray):  # Not itself: a key would keep it.
        return type(value), value.dtype, tuple(value.shape)
    if deep == 0 or isinstance(value, _THEMSELVES):
        return Itself(value)
    fields: Any = value
    if not isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        slots = [s for kind in type(value).__mro__ for s in getattr(kind, "__slots__", ())]
        own = getattr(value, "__dict__", {})
        fields = {**own, **{s: getattr(value, s) for s in slots if hasattr(value, s)}}
        if not fields:
            return Itself(value)
    if len(fields) > _MANY:
        return Itself(value)
    items = fields.items() if isinstance(fields, Mapping) else enumerate(fields)
    return type(value), tuple(
        [(k if isinstance(k, _PLAIN) else Itself(k), state_of(v, deep - 1)) for k, v in items]
    )
