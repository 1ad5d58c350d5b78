"""Layers of PyG that draw no random numbers as they are, of which no draw has to be watched."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

from torch import nn
from torch_geometric.nn import Aggregation, MessagePassing
from torch_geometric.nn.dense import linear

_WORDS = re.compile(
    r"dropout|drop|rand|bernoulli|multinomial|normal_\(|gauss|uniform_\(|_sampl|sampling|sampler|"
    r"\.sample|noise|exponential_|gumbel|generator",
    re.IGNORECASE,
)
_PLAIN = (
    *(nn.Linear, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(nn.BatchNorm1d, nn.LayerNorm, linear.Linear, linear.HeteroLinear, linear.HeteroDictLinear),
)


def draws_nothing(layer: nn.Module) -> bool:
    """Returns whether it is sure that a layer draws no random numbers in a call.

    So it is of PyG's own classes whose modules say nothing of randomness in their source, but for
    dropout whose probability is 0 or, in evaluation, any: PyG's and PyTorch's own modules ask their
    ``training`` for it. A user's module may draw in evaluation, too.
    """
    if getattr(layer, "_edge_mask", None) is not None:
        return False
    return all(_is_silent(module) for module in layer.modules())


def _is_silent(module: Any) -> bool:
    kind: Any = type(module)
    if kind in _PLAIN or (kind.__module__.startswith("torch.nn.") and not module.training):
        return True
    words = _words(kind)
    own = _OWN_METHODS & vars(module).keys()
    if words is None or words - {"dropout"} or any(_is_users(vars(module)[n]) for n in own):
        return False
    drops = module.training and any(v for name, v in vars(module).items() if "drop" in name)
    return not drops and not any(v for name, v in vars(module).items() if name.endswith(_HOOKS))


def _is_users(method: Any) -> bool:
    """Returns whether a method was put on a layer by its user, not meanwhile by this package."""
    return not str(getattr(method, "__module__", "")).startswith("pyg_sar.")


_HOOKS = ("forward_hooks", "forward_pre_hooks")
_OWN_METHODS = frozenset({"forward", "message", "aggregate", "update", "edge_update", "propagate"})


@cache
def _words(kind: type) -> frozenset[str] | None:
    """Returns words of randomness around a class of PyG; ``None`` of others'."""
    if not issubclass(kind, MessagePassing | Aggregation):
        return None
    found: set[str] = set()
    for base in kind.__mro__:
        home = base.__module__
        own = home.startswith(("torch_geometric.nn.conv.", "torch_geometric.nn.aggr."))
        if own and base not in (MessagePassing, Aggregation):
            found |= set(map(str.lower, _WORDS.findall(inspect.getsource(sys.modules[home]))))
        elif not own and not home.startswith(("torch.", "builtins", "pyg_sar.", "typing", "abc")):
            return None
    return frozenset(found)
