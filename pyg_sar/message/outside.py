"""State that a message reads besides its arguments and what its layer holds.

The backward pass runs a message again. Arguments are then as they were, and so are attributes
(:class:`~pyg_sar.message.layer_state.AmbientState`). Globals, closures, attributes of classes and
fields of objects are not: they may be others by then, and only the messages' values tell. In the
next call they may have the message do something else than it was analysed for: so their numbers,
names and objects are part of a call's key (:func:`state_of`).

[Note: what is seen] There are two walks, each with a bound. That of the *code*, once, goes through
functions of the user's, functions of PyG that they name, classes of objects, and whatever these
hold: it finds places of values. That of the *values*, in each call, goes from what is in these
places through containers and objects, however deep. What neither can follow (a clock, a flag of
torch, an object of C, more than the bound) is unknown: then the message is looked at in each call.
"""

from __future__ import annotations

import dis
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import _lru_cache_wrapper, cached_property, lru_cache, partial
from inspect import Parameter
from io import IOBase
from operator import attrgetter, methodcaller
from random import Random
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyg_sar.message.layer_facts import (
    LIBRARIES,
    Itself,
    facts_of,
    function_of,
    home_of,
    hooks_of,
    is_users,
    names_in,
)
from pyg_sar.message.layer_state import is_kept

_SAME_EACH_TIME = frozenset({
    "__future__", "_abc", "_bisect", "_collections", "_collections_abc", "_functools", "_heapq",
    "_operator", "_pytest", "_warnings", "abc", "bisect", "builtins", "cmath", "collections",
    "contextlib", "copy", "dataclasses", "decimal", "einops", "enum", "fractions", "functools",
    "heapq", "itertools", "math", "numbers", "numpy", "operator", "pyg_lib", "pyg_sar", "re",
    "scipy", "statistics", "string", "torch", "torch_cluster", "torch_geometric", "torch_scatter",
    "torch_sparse", "torch_spline_conv", "types", "typing", "typing_extensions", "warnings",
})  # fmt: skip
"""Packages whose functions tell the same each time, but for those of _SWITCHES."""
_VALUES = _SAME_EACH_TIME | {"datetime", "pathlib", "uuid"}
"""Packages whose objects are what their fields are, or never change."""
_TELL = LIBRARIES - _VALUES
_SWITCHES = re.compile(
    r"is_\w*enabled|are_\w+|get_\w+|geterr|initial_seed|backends|_C|cuda|distributed"
)
"""Names in torch and numpy by which a message reads flags of the process."""
_BY_NAME = frozenset({
    "__dict__", "__getattribute__", "__import__", "attrgetter", "dir", "eval", "exec", "exists",
    "getattr", "globals", "hasattr", "is_file", "locals", "methodcaller", "next", "open",
    "read_text", "stat", "vars",
})  # fmt: skip
_NOT_CALLED = frozenset({"__init__", "reset_parameters", "extra_repr", "__repr__"})
_OF_LAYER = "message", "edge_update", "aggregate", "update"
_FOLLOWED = "torch_geometric.nn.", "torch_geometric.utils."
_PLAIN = frozenset({
    bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device,
})  # fmt: skip
_BOUND = BuiltinFunctionType, MethodWrapperType
_FIXED = (
    *(*_BOUND, CodeType, MethodDescriptorType, WrapperDescriptorType, bytearray, object),
    *(type(...), type(NotImplemented), type(type.__dict__["__doc__"])),
)
_CONTAINERS = dict, list, tuple, set, frozenset, deque, MappingProxyType
_OF_TENSORS = frozenset(dir(Tensor))
_RESULTS_BY_NAME = attrgetter, methodcaller, _lru_cache_wrapper
_GENERATORS = Random, np.random.Generator, np.random.RandomState
_THEMSELVES = FunctionType, type, ModuleType
_NOTHING: Any = Parameter.empty  # There was nothing.
_MANY_BYTES = 1 << 16  # of an array that is looked at
_LARGEST = 1 << 15  # numbers beyond are no numbers of edges that a message is tried with
_MOST = 2048  # of what either walk meets


class _Of(NamedTuple):
    """Reads a function, a cell or a class by names, as a mapping is read."""

    owner: Any

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self.owner, type):  # A descriptor itself, not what it tells.
            bases = [vars(base) for base in self.owner.__mro__]
            return next((own[name] for own in bases if name in own), default)
        try:
            return getattr(self.owner, name)
        except (AttributeError, ValueError):  # An empty cell.
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)


class Outside(NamedTuple):
    """State that a layer's message, and what comes with it, may read beside its arguments.

    Attributes:
        modules: The layer and those within it.
        places: Where values are, by their names; those of the layer's own modules as well.
        changes: Some of them may be others when the message runs again.
        fixed: Places of code and of ``None``, which are rarely others then: :meth:`code` tells.
        unknown: It may read what can't be followed.
        takes: An iterator, or a generator of random numbers, which is another one after each run.
        largest: The largest number that code and places hold, up to a bound.
    """

    modules: list[nn.Module]
    places: list[tuple[Any, str]]
    changes: bool
    fixed: list[tuple[Any, str]]
    unknown: bool
    takes: str
    largest: int

    def state(self) -> tuple[Any, ...]:
        """Returns the values, as part of a key."""
        found = [place.get(name, _NOTHING) for place, name in self.places]
        return state_of(found, self.modules)

    def code(self) -> list[Any]:
        """Returns what is in the places of code and of ``None``."""
        return [place.get(name, _NOTHING) for place, name in self.fixed]

    def has_code(self, before: Sequence[Any]) -> bool:
        """Returns whether what :meth:`code` gave before is there, or functions alike."""
        now = self.code()
        return len(now) == len(before) and all(map(_is_same_code, now, before))

    @contextmanager
    def kept(self) -> Iterator[list[str]]:
        """Puts back afterwards what a message changes; yields a list that then names that."""
        changed: list[str] = []
        roots = [(place, name, place.get(name, _NOTHING)) for place, name in self.places]
        inside = list(_inside([value for *_, value in roots], self.modules))
        before = [(value, *_contents(value)) for value in inside]
        try:
            yield changed
        finally:
            for value, *contents in before:
                if _put_back(value, *contents):
                    changed.append(type(value).__name__)
            for place, name, value in roots:
                if value is not _NOTHING and not _is_same(place.get(name, _NOTHING), value):
                    changed.append(name)
                    place[name] = value


def outside_of(layer: nn.Module) -> Outside:
    """Returns what a layer's message may read beside its arguments.

    Its code and that of the user's functions, methods and modules that it names are looked at.

    Args:
        layer: A layer of PyG, or one of the user's.
    """
    facts, modules = facts_of(layer), list(layer.modules())
    if facts.outside is None or facts.outside.modules != modules:
        facts.outside = _Walk(layer, modules).found()
    found: Outside = facts.outside
    return found


# Code #########################################################################


class _Walk:
    """The walk of the code. See [Note: what is seen].

    Args:
        layer: The layer.
        modules: It, and those within it.
    """

    def __init__(self, layer: nn.Module, modules: list[nn.Module]) -> None:
        self.layer, self.modules = layer, modules
        self.places: dict[tuple[int, str], tuple[Any, str]] = {}
        self.fixed: list[tuple[Any, str]] = []
        self.changes, self.unknown = bool(hooks_of(layer, "message", "edge_update")), False
        self.takes, self.largest, self.of_tensors = "", 0, _Of(Tensor)
        self.waiting: list[Any] = []
        self.named: set[str] = set()  # by code of the user's
        kinds = dict.fromkeys(base for m in modules for base in type(m).__mro__ if is_users(base))
        held = [value for module in modules for value in vars(module).values()]
        drawn = [v for v in held if isinstance(v, _GENERATORS)]  # `other_draws` watches them.
        self.seen: dict[int, Any] = {id(v): v for v in (*modules, *kinds, *drawn)}
        self.holders: list[tuple[Any, Any]] = [(vars(module), vars(module)) for module in modules]
        for kind in dict.fromkeys(map(type, modules)):
            own = {
                name: v for base in kind.__mro__ if is_users(base) for name, v in vars(base).items()
            }
            self.holders += [(own, _Of(kind))] if own else []
        self.of_modules = {id(vars(module)) for module in modules}

    def found(self) -> Outside:
        """Returns what it has found."""
        for module in self.modules:
            self.waiting += _methods_of(module, self.layer)
        before = -1
        while before < len(self.places) and len(self.seen) < _MOST:
            before = len(self.places)
            while self.waiting and len(self.seen) < _MOST:
                self._look_at(self.waiting.pop())
            for own, place in self.holders:
                for name in sorted(self.named & own.keys()):
                    if not isinstance(own[name], Tensor | nn.Module):
                        self._note(place, name)
        unknown = self.unknown or len(self.seen) >= _MOST
        changes = self.changes or unknown
        places = [*self.places.values()]
        rest = self.fixed, unknown, self.takes, self.largest
        return Outside(self.modules, places, changes, *rest)

    def _note(self, place: Any, name: str, watched: bool = True) -> None:
        """Notes a place, and if what is there may be another when the message runs again."""
        if (id(place), name) in self.places:
            return
        self.places[id(place), name] = place, name
        value = place.get(name, _NOTHING)
        self.waiting.append(value)
        if id(place) in self.of_modules and is_kept(value) and not callable(value):
            return  # As it was, when the message runs again.
        fixed = value is None or _is_code(value)
        self.changes |= watched and not fixed
        if fixed:
            self.fixed.append((place, name))

    def _look_at(self, value: Any) -> None:
        kind = type(value)
        if kind in (int, float):
            self.largest = max(self.largest, _up_to_a_bound(value))
        if kind in _PLAIN or issubclass(kind, Tensor | np.generic) or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if kind in (FunctionType, *_BOUND) and home_of(value) in ("torch", "numpy"):
            self.unknown |= _SWITCHES.fullmatch(value.__name__) is not None
        if kind is FunctionType:
            self._look_into(value)
        elif issubclass(kind, ModuleType):
            self._look_at_module(value, frozenset())
        elif issubclass(kind, type):
            self._look_at_class(value)
        else:
            self._look_at_object(value, kind)

    def _look_into(self, function: FunctionType) -> None:
        """Notes what a function names and holds."""
        users, known = is_users(function), function.__globals__
        names = names_in(function.__code__)
        if users:
            self.named |= names
            self.unknown |= not _BY_NAME.isdisjoint(names)
            self._note(_Of(function), "__code__")
            self.largest = max(self.largest, _largest(function.__code__))
            for name in sorted(names & _OF_TENSORS):
                self._note(self.of_tensors, name, watched=False)
            for name in _imported(function.__code__):
                self.unknown |= name not in sys.modules
                if name in sys.modules:
                    self._look_at_module(sys.modules[name], names)
        if users or str(known.get("__name__")).startswith(_FOLLOWED):
            for name in sorted(names & known.keys()):
                if isinstance(known[name], ModuleType) and users:
                    self._look_at_module(known[name], names)
                if users or function_of(known[name]) is not None:
                    self._note(known, name)
            known = getattr(function, "__builtins__")  # noqa: B009
            for name in sorted(names & known.keys()) if users else ():
                self._note(known, name)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for cell in [_Of(cell) for name, cell in cells if name != "__class__"]:
            if users:
                self._note(cell, "cell_contents")
            else:  # What a decorator has kept, a cache also.
                value = cell.get("cell_contents")
                self.unknown |= not (type(value) in _PLAIN or _is_code(value))
                self.waiting.append(value)
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            held: Any = getattr(function, name) or ()
            values = held.values() if type(held) is dict else held
            plain = name != "__dict__" and all(type(value) in _PLAIN for value in values)
            if held and not plain:
                self._note(_Of(function), name, watched=not all(map(_is_code, values)))

    def _look_at_module(self, module: ModuleType, names: frozenset[str]) -> None:
        """Notes what code names of a module, and of modules that are reached by it."""
        waiting, done = [module], set()
        while waiting:
            module = waiting.pop()
            own, home = vars(module), module.__name__.partition(".")[0]
            if id(module) in done:
                continue
            done.add(id(module))
            if home not in LIBRARIES:  # Of a user's, whatever some code names.
                if all(own is not held for held, _ in self.holders):
                    self.holders.append((own, own))
                    self.waiting += [own[name] for name in ("__getattr__",) if name in own]
                continue
            self.unknown |= home not in _SAME_EACH_TIME
            for name in sorted(names & own.keys()):
                self.unknown |= _SWITCHES.fullmatch(name) is not None
                if isinstance(own[name], ModuleType):
                    waiting.append(own[name])
                else:  # Another one may stand there tomorrow.
                    self._note(own, name, watched=type(own[name]) not in (float, torch.dtype))

    def _look_at_class(self, kind: type) -> None:
        self.unknown |= home_of(kind) in _TELL - {"datetime", "pathlib"}
        self.waiting.append(type(kind))
        place = _Of(kind)
        for base in filter(is_users, kind.__mro__):
            for name, value in vars(base).items():
                special = name[:2] == "__" and not callable(value)
                if name not in _NOT_CALLED and not special:
                    self._note(place, name)

    def _look_at_object(self, value: Any, kind: type) -> None:
        home, users = home_of(kind), is_users(kind)
        if users:
            self.waiting.append(kind)
        elif issubclass(kind, (*_GENERATORS, Iterator)) and not issubclass(kind, IOBase):
            self.takes = kind.__name__
        parts = _parts_of(value, kind)
        self.waiting += parts or ()
        if kind in _FIXED and parts is None:
            self.unknown |= callable(value) and home_of(value) not in _SAME_EACH_TIME
        elif parts is None:
            self.unknown |= home == "builtins" or home not in _VALUES
        else:
            self.unknown |= home in _TELL
        self.unknown |= issubclass(kind, _RESULTS_BY_NAME)
        if issubclass(kind, partial):
            self.changes |= not all(map(self._stays, (*value.args, *value.keywords.values())))
        elif callable(value) or (issubclass(kind, _CONTAINERS) and _fields_of(value, kind)):
            self.changes |= not all(map(self._stays, parts or ()))

    def _stays(self, value: Any) -> bool:
        """Says if what an object holds stays as it is, for as long as it holds it."""
        if type(value) is tuple:
            return all(map(self._stays, value))
        own = any(value is module for module in self.modules)
        return own or type(value) in _PLAIN or _is_code(value)


def _methods_of(module: nn.Module, layer: nn.Module) -> list[Any]:
    """Returns what a message may call of a module: of classes below others, theirs as well."""
    bases = [vars(base) for base in type(module).__mro__ if is_users(base)]
    if module is layer:
        return [own[name] for own in (vars(layer), *bases) for name in _OF_LAYER if name in own]
    own = [value for value in vars(module).values() if function_of(value) is not None]
    return [*own, *(v for base in bases for name, v in base.items() if name not in _NOT_CALLED)]


def _is_code(value: Any) -> bool:
    """Returns whether a value is a function, or what is as it is: a known module or class, say."""
    kind = type(value)
    if issubclass(kind, ModuleType):
        return value.__name__.partition(".")[0] in LIBRARIES
    if issubclass(kind, (type, *_BOUND)):
        return not is_users(value)
    if function_of(value) is not None or kind is CodeType:
        return True
    return callable(value) and not issubclass(kind, nn.Module) and not is_users(kind)


@lru_cache(1024)
def _imported(code: CodeType) -> tuple[str, ...]:
    """Returns the modules that a function, and those within it, import."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _imported(one)]
    found = [one.argval for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME"]
    return (*found, *inner)


@lru_cache(1024)
def _largest(code: CodeType) -> int:
    """Returns the largest number in a function, and in those within it."""
    waiting, found = [*code.co_consts], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, CodeType):
            found = max(found, _largest(value))
        elif isinstance(value, tuple | frozenset):
            waiting += value
        elif isinstance(value, int | float):
            found = max(found, _up_to_a_bound(value))
    return found


def _up_to_a_bound(value: float) -> int:
    return int(abs(value)) if abs(value) < _LARGEST else 0


# Values #######################################################################


def state_of(values: Sequence[Any], modules: Sequence[nn.Module] = ()) -> tuple[Any, ...]:
    """Returns numbers and names that values hold, and which objects, as part of a key.

    Args:
        values: The values.
        modules: Modules whose own state is known otherwise.
    """
    found: list[Any] = []
    seen = {id(module): place for place, module in enumerate(modules)}
    waiting = [*reversed(values)]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in _PLAIN:
            found += kind, value
        elif id(value) in seen:
            found.append(seen[id(value)])
        elif issubclass(kind, Tensor | np.ndarray | np.generic):
            found += _of_array(value, kind)
        elif issubclass(kind, set | frozenset):
            found += (
                kind,
                frozenset((type(v), v if type(v) in _PLAIN else Itself(v)) for v in value),
            )
        elif (parts := _parts_of(value, kind)) is None:
            found.append(Itself(value))
        else:
            seen[id(value)] = len(seen)
            found += kind, len(parts)
            waiting += reversed(parts)
        if len(found) > _MOST:
            return (Itself(object()),)
    return tuple(found)


def _of_array(value: Any, kind: type) -> tuple[Any, ...]:
    if issubclass(kind, Tensor):  # Not itself: a key would keep it. A stand-in refuses its shape.
        plain = kind is Tensor or issubclass(kind, nn.Parameter)
        return (kind, value.dtype, tuple(value.shape)) if plain else (kind,)
    if value.nbytes > _MANY_BYTES or value.dtype.hasobject:
        return (Itself(object()),)
    return kind, value.dtype, value.shape, value.tobytes()


def _parts_of(value: Any, kind: Any) -> list[Any] | None:
    """Returns what a value holds, without asking code of the user's; ``None``: nothing is seen."""
    if issubclass(kind, (*_THEMSELVES, CodeType, Tensor, np.ndarray)):
        return None
    if home_of(kind) == "pyg_sar":  # None of these is for messages.
        return None
    parts: list[Any] = []
    if issubclass(kind, dict | MappingProxyType):
        parts += *value.keys(), *value.values()
    elif issubclass(kind, _CONTAINERS):
        parts += value
    elif kind is bytearray:
        return [bytes(value)]
    elif kind is cached_property:  # Else it holds a lock.
        return [value.func]
    elif kind in _BOUND:
        owner = value.__self__
        known = owner is None or isinstance(owner, ModuleType | type)
        return None if known else [owner, value.__name__]
    elif not (kind.__dictoffset__ or _slots_of(kind)):
        return None
    if kind in _CONTAINERS:
        return parts
    fields = _fields_of(value, kind)
    return [*parts, *fields.keys(), *fields.values()]


def _fields_of(value: Any, kind: Any) -> dict[str, Any]:
    """Returns an object's fields, by name."""
    fields: dict[str, Any] = {}
    for name, slot in _slots_of(kind):
        with suppress(AttributeError):  # It is empty.
            fields[name] = slot.__get__(value)
    if kind.__dictoffset__:
        with suppress(AttributeError):
            fields |= object.__getattribute__(value, "__dict__")
    return fields


@lru_cache(1024)
def _slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Returns where objects of a class have fields outside of their dictionary."""
    return tuple(
        (name, slot)
        for base in kind.__mro__
        for name, slot in vars(base).items()
        if type(slot) is MemberDescriptorType
        if name[:2] != "__" or name in ("__func__", "__self__")
    )


# What a message changes #######################################################


def _inside(values: Sequence[Any], modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Yields containers, arrays and objects that values hold, but for these modules."""
    seen = {id(module) for module in modules}
    waiting = [*values]
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        kind = type(value)
        if kind in _PLAIN or issubclass(kind, Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        parts = _parts_of(value, kind)
        if parts is not None or (kind is np.ndarray and value.nbytes <= _MANY_BYTES):
            yield value
            waiting += parts or ()


def _contents(value: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what is in a container or an array, and the fields of an object."""
    kind = type(value)
    kinds: list[tuple[type, Any]] = [(dict, dict), (list, list), (deque, list), (set, set)]
    kinds += (bytearray, bytes), (np.ndarray, np.array)
    made = next((made for one, made in kinds if issubclass(kind, one)), None)
    return None if made is None else made(value), _fields_of(value, kind)


def _put_back(value: Any, inside: Any, fields: dict[str, Any]) -> bool:
    """Gives a container, an array or an object its contents again; whether it had others."""
    now, fields_now = _contents(value)
    if not _same(now, inside):
        if isinstance(value, bytearray | np.ndarray):
            value[:] = inside
        else:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(inside)
    for name in fields_now.keys() - fields.keys():
        object.__delattr__(value, name)
    for name, field in fields.items():
        if not _is_same(fields_now.get(name, _NOTHING), field):
            object.__setattr__(value, name, field)
    return not (_same(now, inside) and _same(fields_now, fields))


def _same(left: Any, right: Any) -> bool:
    """Says if contents, as :func:`_contents` has them, are the same."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_is_same(v, right[k]) for k, v in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return bool(np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right)


def _is_same_code(left: Any, right: Any) -> bool:
    """Returns whether functions have one code and hold the same: a line may make them anew."""
    if left is right or not (type(left) is type(right) is FunctionType):
        return left is right
    held = [(f.__code__, f.__globals__, f.__defaults__, f.__kwdefaults__) for f in (left, right)]
    cells = [[_Of(c).get("cell_contents") for c in f.__closure__ or ()] for f in (left, right)]
    alike = len(cells[0]) == len(cells[1]) and all(map(_is_same, *cells))
    return alike and all(a is b for a, b in zip(*held, strict=True))


def _is_same(left: Any, right: Any) -> bool:
    kind = type(left)
    alike = kind is type(right) and kind in _PLAIN
    return left is right or (alike and (left == right or left != left))
