"""Modules within a layer that are known to treat each node's row for itself."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from torch import nn
from torch_geometric.nn import Aggregation, MessagePassing

from pyg_sar.message.layer_facts import Itself, facts_of, home_of
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
        return True
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
