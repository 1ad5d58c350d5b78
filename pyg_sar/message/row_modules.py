"""Modules within a layer that are known to treat each node's row for itself.

[Note: as PyG made it] Kernels stand in for code of PyG and PyTorch. That code may be another one in
a process: a method of a class, or a function that it names, may be replaced at any time, and hooks
of all modules and modes of torch change what it does. Each class knows the places from which its
code takes methods and functions, and what was there at first. A call looks whether it is there now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from operator import attrgetter, itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.overrides import _get_current_function_mode_stack
from torch_geometric.nn import Aggregation, GraphSizeNorm, MeanSubtractionNorm, MessagePassing

from pyg_sar.message.layer_facts import (
    MODULE_HOOKS,
    Itself,
    facts_of,
    function_of,
    home_of,
    is_users,
    names_in,
    plain_class,
)
from pyg_sar.reduction.moments import OVER_ROWS

_OWN = (
    *("torch_geometric.nn.conv.", "torch_geometric.nn.aggr.", "torch_geometric.nn.dense.linear"),
    *("torch_geometric.nn.norm.", "torch_geometric.nn.models.mlp", "torch_geometric.nn.encoding"),
    *("torch_geometric.nn.parameter_dict", "torch_geometric.nn.module_dict", "pyg_sar."),
)
"""Where PyG's modules are that compute row by row, or whose rows :func:`distribute` knows."""

_BY_ROW = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    *(nn.Identity, nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.RMSNorm),
    *(nn.Dropout, nn.AlphaDropout, nn.GRUCell, nn.LSTMCell, nn.RNNCell, *OVER_ROWS),
)
_ALONG_AN_AXIS = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)
_METHODS = frozenset({"message", "aggregate", "edge_update", "update"})
_WITHIN_AGGREGATIONS = (nn.LSTM, nn.GRU, nn.MultiheadAttention, nn.Conv1d)


def has_foreign_module(layer: nn.Module) -> bool:
    """Returns whether a layer holds a module that may do more than treat each row for itself.

    ``GINConv(nn)`` calls ``nn`` with the rows of all nodes, and ``propagate`` a user's ``update``.
    Modules of PyG and PyTorch that are known treat each row for itself, or ask the other workers;
    what users wrote may subtract a mean.

    Args:
        layer: A layer of PyG.
    """
    if has_own(layer, "update"):
        return True
    aggregates = isinstance(layer, Aggregation)
    aggregation: str | None = None
    for name, module in layer.named_modules():
        if aggregation is not None and name.startswith(aggregation):
            continue
        if isinstance(module, Aggregation) and not aggregates:
            aggregation = f"{name}."  # It runs within propagate, and is asked for itself.
            continue
        if module is not layer:
            if isinstance(module, MessagePassing) or ".parametrizations." in f".{name}":
                continue  # A layer itself; what is called with weights.
            if not _is_known(module, aggregates):
                return True
        for own, value in vars(module).items():
            looked_at = module is layer and own in _METHODS  # by the analysis of the message
            if callable(value) and not looked_at and not _is_pygs(value, aggregates):
                return True
    return False


_ENTRIES = "propagate", "edge_updater", "__call__"


def replaced_entry(layer: Any) -> str:
    """Returns which of the methods that this package replaces was put on a layer; ``''`` if none.

    PyG compiles ``propagate`` of each class, and puts that on a layer that is, or was, explained.

    Args:
        layer: A layer of PyG, or a norm, which asks the other workers in its ``forward``.
    """
    for name in _ENTRIES if isinstance(layer, MessagePassing) else ("forward",):
        own = vars(layer).get(name)
        users = own is not None and home_of(own) != "pyg_sar"
        if users and not is_compiled(own, type(layer), name):
            return name
    return ""


def overridden_entry(kind: Any) -> str:
    """Returns which of the methods that this package replaces is of a user's class of layers."""
    for name in _ENTRIES:
        definer = next(base for base in kind.__mro__ if name in vars(base))
        method = vars(definer)[name]
        if home_of(method) not in ("torch_geometric", "pyg_sar", "torch") and (
            method.__module__ != _compiled_in(definer, name)
        ):
            return name
    return ""


def is_compiled(method: Any, kind: Any, name: str) -> bool:
    """Returns whether a method is what PyG has put in the place of one of a class.

    A copy that came from another process is another function, of a module of the same name.
    """
    function = getattr(method, "__func__", method)
    module = getattr(function, "__globals__", {}).get("__name__")
    return function in [
        getattr(kind, f"_{how}_{name}", None) for how in ("orig", "jinja")
    ] or module in [_compiled_in(base, name) for base in kind.__mro__]


def _compiled_in(kind: type, name: str) -> str:
    """Returns the module that PyG makes for a method of a class."""
    return f"{kind.__module__}_{kind.__name__}_{name}"


def has_own(layer: nn.Module, method: str) -> bool:
    """Returns whether a layer's ``update``, say, is a user's."""
    return isinstance(layer, MessagePassing) and (
        method in vars(layer) or not _is_pygs(getattr(type(layer), method))
    )


@lru_cache(256)
def names_within(kind: type, method: str) -> frozenset[str]:
    """Returns the names in the code of a class's method, and of the user's methods it may call."""
    found, names = set(), [method]
    while names:
        name = names.pop()
        for base in kind.__mro__ if name not in found else ():
            code = getattr(vars(base).get(name), "__code__", None)
            if code is not None and not _is_pygs(vars(base)[name]):
                names += code.co_names
        found.add(name)
    return frozenset(found)


def update_asks_for_edges(layer: Any) -> bool:
    """Returns whether ``update`` takes anything with a row per edge, or sizes."""
    names = layer.inspector.get_param_names("update")
    return any(name in layer.special_args or name[-2:] in ("_i", "_j") for name in names)


def holds_foreign_module(layer: nn.Module) -> bool:
    """:func:`has_foreign_module`, remembered for as long as a layer's modules are of their kinds.

    Args:
        layer: A layer.
    """
    modules, facts = list(layer.modules()), facts_of(layer)
    functions = [value for module in modules for value in vars(module).values() if callable(value)]
    kinds = *map(type, modules), *map(Itself, functions)
    if facts.kinds != kinds or "update" in vars(layer):
        if has_foreign_module(layer):
            return True
        facts.kinds = kinds
    return False


def _is_known(module: Any, aggregates: bool) -> bool:
    kind: Any = type(module)
    if isinstance(module, _ALONG_AN_AXIS):
        return module.dim == -1
    if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.max_norm):
        return False  # They count, or change, the rows that are read.
    return _is_by_row(kind) or (aggregates and issubclass(kind, _WITHIN_AGGREGATIONS))


@cache
def _is_by_row(kind: type) -> bool:
    home = kind.__module__
    if home.startswith(_OWN):
        return not issubclass(kind, GraphSizeNorm | MeanSubtractionNorm)
    if not home.startswith("torch."):
        return False
    if issubclass(kind, nn.MultiheadAttention):
        return False
    activates = home == "torch.nn.modules.activation"
    return activates or issubclass(kind, _BY_ROW) or home.startswith("torch.nn.utils.")


def _is_pygs(value: Any, aggregates: bool = False) -> bool:
    """Returns whether a function, or an object that is called, is PyG's or this package's.

    PyTorch's may do anything with rows, but for those that PyG's aggregations hold.
    """
    home = home_of(value)
    return home in ("torch_geometric", "pyg_sar") or (aggregates and home == "torch")


# What users change ############################################################

Place = tuple[Any, str, Any]
"""A class, or the names of a module, a name there, and what stood there at first."""

_USERS = "another one"  # What a user's function was at first: PyG's is not known.
_HOOKS_OF_ALL = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_BY_CALLS = frozenset(
    {"forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate"}
)
_COMPILED = frozenset(
    f"{how}{name}" for how in ("", "_orig_", "_jinja_") for name in ("propagate", "edge_updater")
) | {"collect", "edge_collect"}
"""Methods that PyG writes anew for each layer that is built."""
_NOT_IN_CALLS = (
    *("__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters", "jittable"),
    *("_get_", "_set_jittable", "register_", "explain", "decomposed"),
)
"""Beginnings of names of methods that no forward pass calls."""
_LOOKED_INTO = ("torch_geometric.nn.", "torch_geometric.utils.")
_OPERATORS = {"F": nn.functional, "torch": torch, "nn": nn}
"""Modules by the names that PyG's and PyTorch's have for them."""
_CONSTANTS = (ModuleType, type, type(None), bool, int, float, str, tuple, list, dict, set)


def changes_of(layer: nn.Module) -> list[str]:
    """Returns what users have put around a layer's code or in its place, by name.

    See [Note: as PyG made it].

    Args:
        layer: A layer, or a norm.
    """
    found = []
    modules = list(layer.modules())
    for module in modules[1:]:
        own = module.__dict__
        if any(map(own.get, MODULE_HOOKS)):
            found += [f"a hook in {kind!r} of its {name!r}" for name, kind in hooks_within(layer)]
            break
    for read, owner, values, places in _read_together(frozenset(map(type, modules))):
        if read(owner) != values:
            found += [title for title, place in places.items() if not _is_as_made(*place)]
    if all_modules._has_any_global_hook():
        for kind in _HOOKS_OF_ALL:
            hooks = getattr(all_modules, f"_global_{kind}").values()
            found += [f"a hook of all modules ({kind})" for hook in hooks if _is_users(hook)]
    if torch._C._len_torch_function_stack():
        modes = _get_current_function_mode_stack()
        found += [f"the mode {type(mode).__name__}" for mode in modes if _is_users(mode)]
    return found


def is_of_forward(layer: nn.Module, change: str) -> bool:
    """Returns whether a change is another ``forward`` of a layer's class: edges don't see that."""
    return change in [f"{base.__name__}.forward" for base in type(layer).__mro__]


def hooks_within(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Hooks of modules within another one: their names, and where the hook is.

    Those of torch and PyG (``weight_norm``, lazy parameters) compute with parameters only.
    """
    for name, inner in module.named_modules():
        for kind in MODULE_HOOKS if inner is not module else ():
            for hook in (inner.__dict__.get(kind) or {}).values():
                if home_of(hook) not in ("torch", "torch_geometric"):
                    yield name, kind


@lru_cache(256)
def _read_together(
    kinds: frozenset[type],
) -> list[tuple[Callable[[Any], Any], Any, tuple[Any, ...], dict[str, Place]]]:
    """Returns the places that the code of these classes depends on, by what they are places of.

    That is how they are read at once, of what, what stood there at first, and the places by title.
    """
    groups: dict[tuple[int, bool], dict[str, Place]] = {}
    for places in map(_places_of, map(plain_class, kinds)):
        for title, (owner, name, value) in places.items():
            groups.setdefault((id(owner), name in _COMPILED), {})[title] = owner, name, value
    found = []
    for places in groups.values():
        first, *_ = known = [*places.values()]
        owners, names, values = zip(first, *known, strict=True)  # More than one: read as a tuple.
        read: Any = attrgetter(*names) if isinstance(first[0], type) else itemgetter(*names)
        found.append((read, owners[0], values, places))
    return found


@cache
def _places_of(kind: type) -> dict[str, Place]:
    """Returns the places that the code of a class depends on, by their titles."""
    found: dict[str, Place] = {}
    for base in kind.__mro__:
        pygs = base.__module__.partition(".")[0] in ("torch", "torch_geometric")
        if pygs and base is not nn.Module:
            for name in {*vars(base), *_BY_CALLS}:
                method = None if name.startswith(_NOT_IN_CALLS) else getattr(base, name, None)
                if callable(method) and not isinstance(method, type):
                    _note(found, base, name, f"{base.__name__}.{name}")
    return found


def _note(found: dict[str, Place], owner: Any, name: str, title: str) -> None:
    """Notes a function, by the title of its place, and those that it names, if it is PyG's."""
    if title in found:
        return
    value = getattr(owner, name) if isinstance(owner, type) else owner[name]
    found[title] = owner, name, _USERS if _is_users(value) else value
    function = function_of(value)
    code, home = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    looks = isinstance(owner, type) or str(home.get("__name__")).startswith(_LOOKED_INTO)
    if looks and code is not None and found[title][2] is not _USERS:
        used = names_in(code)
        for one in used & home.keys():
            _note_used(found, home, one, used)


def _note_used(
    found: dict[str, Place], names: dict[str, Any], name: str, used: frozenset[str]
) -> None:
    """Notes a function that another one names; of a module those that may be meant."""
    title, value = f"{names.get('__name__')}.{name}", names[name]
    operators = value if value is nn.functional else _OPERATORS.get(name)
    if operators is not None:
        found.setdefault(title, (names, name, operators))
        if value is operators:
            for one in used & vars(value).keys() - {name}:
                _note_used(found, vars(value), one, used - {name})
    elif not isinstance(value, _CONSTANTS):
        _note(found, names, name, title)


def _is_users(value: Any) -> bool:
    """Returns whether a function, or what it wraps, is neither PyG's nor PyTorch's, by its home."""
    while value is not None:
        value = function_of(value) or value
        if is_users(value):
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def _is_as_made(owner: Any, name: str, value: Any) -> bool:
    """Returns whether what stands in a place is what stood there at first, or no user's."""
    now = getattr(owner, name) if isinstance(owner, type) else owner[name]
    if value is _USERS or name in _COMPILED:
        return not _is_users(now)
    return now == value or home_of(now) == "pyg_sar"
