"""Facts about a layer: if its methods are PyG's own, and what earlier calls have shown."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch_geometric.nn import Aggregation, MessagePassing
from torch_geometric.nn.dense import linear

# Methods and hooks ############################################################

MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@cache
def hook_names(*methods: str) -> tuple[str, ...]:
    """Returns the attributes that hold hooks around methods of a PyG layer."""
    return tuple(f"_{name}_forward{when}_hooks" for name in methods for when in ("_pre", ""))


def hooks_of(layer: Any, *methods: str) -> list[Any]:
    """Returns the hooks before and after methods of a layer, such as ``'message'``."""
    registered = [layer.__dict__.get(name) for name in hook_names(*methods)]
    return [hook for hooks in registered if hooks for hook in hooks.values()]


def asked_by(layer: Any, *methods: str) -> list[str]:
    """Returns the arguments that methods of a layer ask for.

    PyG's inspector has this in one call, which refuses a name that two of them type differently.
    """
    return [name for method in methods for name in layer.inspector.get_param_names(method)]


def hooked_message(layer: Any, arguments: Any) -> Any:
    """Returns a layer's message with the hooks around it: ``to_hetero_with_bases`` weighs it so."""
    out = layer.message(**arguments)
    for hook in layer._message_forward_hooks.values():
        result = hook(layer, (arguments,), out)
        out = out if result is None else result
    return out


def pristine(layer: Any, *methods: str, of: type | None = None) -> bool:
    """Returns whether methods of a layer are those of its class, with no hooks around them.

    Args:
        layer: The layer.
        methods: Names of methods.
        of: The class whose methods they must be; ``None``: the layer's own class.
    """
    own, attributes = type(layer), layer.__dict__
    for name in methods:
        if name in attributes or (of is not None and getattr(own, name) is not getattr(of, name)):
            return False
    return not any(map(attributes.get, hook_names(*methods)))


def home_of(function: Any) -> str:
    """Returns the package of the code that runs where a function, or an object, is called.

    ``__module__`` would tell another one: ``functools.wraps`` copies it.
    """
    if isinstance(function, type):
        module: Any = function.__module__  # of a class of C's own kind a descriptor
        return module.partition(".")[0] if isinstance(module, str) else "builtins"
    function = getattr(function, "__func__", function)
    if isinstance(function, partial) and home_of(function.func) == "pyg_sar":
        return "pyg_sar"
    names = getattr(function, "__globals__", None) or {}
    home = names.get("__name__") or getattr(function, "__module__", None)
    return str(home or type(function).__module__).partition(".")[0]


LIBRARIES = frozenset(
    {
        *("torch", "torch_geometric", "pyg_sar", "pyg_lib", "torch_scatter", "torch_sparse"),
        *("torch_cluster", "torch_spline_conv", "numpy", "scipy", "einops", "typing_extensions"),
        "_pytest",  # which looks at each assert of a test module
        *(sys.stdlib_module_names - {"unittest"}),  # which puts others in the place of functions
    }
)
"""Packages whose functions are nobody's own."""


def is_users(value: Any) -> bool:
    """Returns whether a class, or a function or an object that is called, is of a user's code."""
    return home_of(value) not in LIBRARIES


def function_of(value: Any) -> FunctionType | None:
    """Returns the function of a method, a property or a partial; ``None`` for all else."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, MethodType | classmethod | staticmethod):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def names_in(code: CodeType) -> frozenset[str]:
    """Returns the names of globals and attributes in a function, and in those within it."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(code.co_names).union(*inner)


class Itself:
    """A key that equals that of the same object alone.

    Args:
        value: The object, which lives as long as the key.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value


def is_plain_module(module: Any, *kinds: type) -> bool:
    """Returns whether a module is of one of these very classes, without hooks or own functions."""
    own: Any = getattr(module, "__dict__", {})
    watched = any(map(own.get, MODULE_HOOKS)) or any(map(callable, own.values()))
    return type(module) in kinds and not watched


@contextmanager
def standing_in(*methods: tuple[nn.Module, str, Callable[..., Any]]) -> Iterator[None]:
    """Calls of these modules' methods, by module and name, go to other functions meanwhile."""
    before = [(module.__dict__, name, module.__dict__.get(name)) for module, name, _ in methods]
    for module, name, function in methods:
        module.__dict__[name] = function
    try:
        yield
    finally:
        for attributes, name, own in reversed(before):
            attributes[name] = own
            if own is None:
                del attributes[name]


# Facts ########################################################################

_MOST_KEYS = 256


@dataclass
class LayerFacts:
    """Facts that calls of a layer have shown. A copy starts without, on all workers alike.

    Attributes:
        before_tiles: Attributes that a message has set, as they were before it ran. A copy keeps
            them.
        choices: How kinds of calls run (:class:`pyg_sar.engine.analysis.Choice`).
        steady: The same by all that decides how a plain call runs, which may run at once.
        rows: What the messages of kinds of calls do with rows, whatever the policy.
        edge_updates: Attributes that ``edge_update`` of all edges leaves, with a row per edge.
        silent: Kinds of calls that draw no random numbers.
        edge_sets: Those that ``edge_update`` of all edges has set since the last ``propagate``.
        kinds: Classes of its modules and functions on them, of which it is known that they treat
            each row for itself.
        transforms_first: The last call mapped source rows before it summed them.
        warned: It was said that all of the halo is fetched at once.
        not_fused: Values of ``training`` in which no kernel is for it on one process.
        only_fused: The present call is worth it for the kernels alone.
        identity: An object of this layer alone, for keys.
        outside: What its message may read beside its arguments
            (:class:`pyg_sar.message.outside.Outside`); ``None``: to be found out.
        asks: What its message does may depend on values of tensors.
        bias: What is still to be added to the output of this call, ``[heads, channels]``.
        bias_apart: It is added by PyG's code: what the layer gives is changed in place.
    """

    before_tiles: dict[str, Any] = field(default_factory=dict)
    choices: dict[Any, Any] = field(default_factory=dict)
    steady: dict[Any, Any] = field(default_factory=dict)
    rows: dict[Any, Any] = field(default_factory=dict)
    edge_updates: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    silent: set[Any] = field(default_factory=set)
    edge_sets: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[Any, ...] = ()
    transforms_first: bool = False
    warned: bool = False
    not_fused: set[bool] = field(default_factory=set)
    only_fused: bool = False
    identity: object = field(default_factory=object)
    outside: Any = None
    asks: bool = False
    bias: Any = None
    bias_apart: bool = False

    def found(self, asks: bool) -> None:
        """Notes that the layer was looked at; of values that change at each call a few are kept."""
        self.asks |= asks
        self.outside = None  # It may name others now.
        if len(self.steady) + len(self.choices) + len(self.edge_updates) > _MOST_KEYS:
            self.steady.clear()
            for known in (self.choices, self.rows, self.edge_updates):
                for key in [key for key in known if isinstance(key[0], tuple)]:
                    del known[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerFacts:
        return LayerFacts(copy.deepcopy(self.before_tiles, memo))

    def __reduce__(self) -> Any:
        return LayerFacts, (self.before_tiles,)


def facts_of(layer: Any) -> LayerFacts:
    """Returns the facts about a layer."""
    attributes = layer.__dict__
    if "_facts" not in attributes:
        attributes["_facts"] = LayerFacts()
    facts: LayerFacts = attributes["_facts"]
    return facts


# Random numbers ###############################################################

_WORDS = (
    *("drop", "rand", "bernoulli", "multinomial", "normal_(", "gauss", "uniform_(", "_sampl"),
    *("sampling", "sampler", ".sample", "noise", "exponential_", "gumbel", "generator"),
)
_PLAIN = (
    *(nn.Linear, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(nn.BatchNorm1d, nn.LayerNorm, linear.Linear, linear.HeteroLinear, linear.HeteroDictLinear),
    *(nn.ParameterDict, nn.GRUCell, nn.Embedding),
    nn.modules.linear.NonDynamicallyQuantizableLinear,  # of nn.MultiheadAttention
)
_BASES = frozenset(base for kind in _PLAIN for base in kind.__mro__)
_DROP = (nn.RNNBase, nn.MultiheadAttention)
"""Modules of PyTorch that draw for dropout alone, by an attribute of that name."""


@lru_cache(256)
def plain_class(kind: type) -> type:
    """Returns the class that :func:`distribute` made ``kind`` of, or ``kind`` itself."""
    while "replaced" in vars(kind):
        kind = vars(kind)["replaced"]
    return kind


def draws_nothing(layer: nn.Module) -> bool:
    """Returns whether it is sure that a layer draws no random numbers in a call.

    So it is of PyG's own classes whose modules say nothing of randomness in their source, but for
    dropout whose probability is 0 or, in evaluation, any: PyG's and PyTorch's own modules ask their
    ``training`` for it. A user's module may draw in evaluation, too.
    """
    if getattr(layer, "_edge_mask", None) is not None:
        return False
    return all(_is_silent(module) for module in layer.modules())


def draws_within_messages(layer: MessagePassing) -> bool:
    """Returns whether it is sure that a layer of PyG's draws, if at all, in its messages alone."""
    kind: Any = type(layer)
    inner = (module for module in layer.modules() if module is not layer)
    return not _names_draws(kind) and all(map(_is_silent, inner))


def _is_silent(module: Any) -> bool:
    kind: Any = type(module)
    kind = plain_class(kind)
    own = vars(module)
    if any(home_of(own[name]) != "pyg_sar" for name in _OWN_METHODS & own.keys()):
        return False
    if kind in _PLAIN or (kind.__module__.startswith("torch.nn.") and not module.training):
        return True
    if kind is nn.Dropout and module.p == 0:
        return True
    if not _only_drops(kind):
        return False
    rates = [v for name, v in own.items() if "drop" in name] if module.training else []
    drops = any(any(v) if isinstance(v, list) else v for v in rates)
    return not drops and not any(map(own.get, _HOOKS))


_HOOKED = "message", "edge_update", "aggregate", "message_and_aggregate", "propagate"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", *hook_names(*_HOOKED))
_OWN_METHODS = frozenset({"forward", "message", "aggregate", "update", "edge_update", "propagate"})


@cache
def _only_drops(kind: type) -> bool:
    """Returns whether a class is PyG's, and its source has no words of randomness but dropout."""
    if issubclass(kind, _DROP):
        return kind.__module__.startswith("torch.nn.")
    for base in kind.__mro__:
        home = base.__module__
        if home.startswith("torch_geometric.nn.") and base not in (MessagePassing, Aggregation):
            source = inspect.getsource(sys.modules[home]).lower().replace("dropout", " ")
            if any(word in source for word in _WORDS):
                return False
        elif issubclass(base, nn.Module) and home.startswith("torch."):
            if base not in _BASES:
                return False
        elif not home.startswith(_KNOWN_HOMES):
            return False
    return True


_KNOWN_HOMES = ("torch.", "torch_geometric.nn.", "builtins", "pyg_sar.", "typing", "abc")
_MESSAGES = frozenset({"message", "edge_update", "message_and_aggregate"})
_NO_PASS = frozenset({"__init__", "reset_parameters", "__repr__"})


@cache
def _names_draws(kind: type) -> bool:
    """Returns whether methods of PyG's in a layer, but for its messages, name what draws."""
    words = [word.strip("(.") for word in _WORDS]
    for base in kind.__mro__:
        if base is not MessagePassing and base.__module__.startswith("torch_geometric.nn."):
            for name, method in vars(base).items():
                if inspect.isfunction(method) and name not in _MESSAGES | _NO_PASS:
                    names = " ".join(names_in(method.__code__)).lower()
                    if any(word in names for word in words):
                        return True
    return False
