"""State of a layer around its message: what a run sees, leaves as it was, and may change."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import aggr

from pyg_sar.comm.devices import other_states, set_other_states
from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.layer_facts import facts_of, hook_names
from pyg_sar.space.distributed_index import version_of

_PADDED = {
    aggr.GRUAggregation: 0,
    aggr.LCMAggregation: 0,
    aggr.LSTMAggregation: 0,
    aggr.PatchTransformerAggregation: 1,
}
"""Aggregations whose result depends on the places they pad to, and how many PyG adds to these."""


def pads(layer: torch.nn.Module) -> bool:
    """Says if a node's aggregate depends on the most in-edges of any node of the graph."""
    return any(type(module) in _PADDED for module in layer.modules())


@contextmanager
def padded_to(layer: torch.nn.Module, most_edges: int) -> Iterator[None]:
    """Aggregations of ``layer`` pad to ``most_edges`` places, whatever their chunk holds."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        places = most_edges + _PADDED[type(module)]
        return args, {**kwargs, "max_num_elements": places}

    modules = [m for m in layer.modules() if type(m) in _PADDED] if most_edges else []
    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class OtherGenerators:
    """Python's and NumPy's generators as they are now, those of a layer as well.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        held = [item for module in layer.modules() for item in vars(module).items()]
        kinds = random.Random | np.random.Generator | np.random.RandomState
        self._own = [
            (f"its generator '{name}'", value, _state_of(value))
            for name, value in held
            if isinstance(value, kinds)
        ]
        of_torch = [value for _, value in held if isinstance(value, torch.Generator)]
        self._of_torch = [(value, value.get_state()) for value in of_torch]
        self._before = other_states()

    def put_back(self) -> list[str]:
        """Gives back what was drawn; returns the names of the generators that were drawn from."""
        drawn: list[str] = []
        for generator, kept in self._of_torch:
            generator.set_state(kept)
        if not torch.equal(self._before, other_states()):
            set_other_states(self._before)
            drawn.append("Python's random or numpy.random")
        for name, value, state in self._own:
            if pickle.dumps(_state_of(value)) != pickle.dumps(state):
                drawn.append(name)
                if isinstance(value, random.Random):
                    value.setstate(state)
                elif isinstance(value, np.random.Generator):
                    value.bit_generator.state = state
                else:
                    value.set_state(state)
        return drawn


@contextmanager
def other_draws(layer: torch.nn.Module) -> Iterator[list[str]]:
    """Gives back what a block draws of Python's and NumPy's generators, the layer's own as well.

    Yields a list, which names these generators afterwards.
    """
    generators, drawn = OtherGenerators(layer), list[str]()
    try:
        yield drawn
    finally:
        drawn += generators.put_back()


def _state_of(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    is_new = isinstance(value, np.random.Generator)
    return value.bit_generator.state if is_new else value.get_state(legacy=False)


class TileValue(Tensor):
    """Stands for an attribute that ``message`` sets, of which each tile had its own value."""

    attribute: str
    owner: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = next(v for v in tree_leaves((args, kwargs or {})) if isinstance(v, cls))
        raise DistributedIndexError(
            f"'{value.attribute}' of {value.owner} was set by message() or edge_update(), which "
            "runs for one part of the edges after the other, and on each worker for its own: "
            "there is no value for all of them. A layer of your own has it with `layer.policy = "
            "pyg_sar.SARPolicy(mode=3)`. Layers of PyG return attention weights where forward() "
            "takes 'return_attention_weights'"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TileValue('{self.attribute}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> TileValue:
        return tile_value(self.attribute, self.owner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return tile_value, (self.attribute, self.owner)


def tile_value(name: str, owner: str) -> TileValue:
    """Returns a stand-in for an attribute that ``message`` sets.

    Args:
        name: The attribute.
        owner: How errors name the layer.
    """
    out = torch.empty(0).as_subclass(TileValue)
    out.attribute, out.owner = name, owner
    return out


_NOTHING: Any = Parameter.empty  # There was no such attribute. A class is copied as itself.


def attributes_of(layer: torch.nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """Returns attributes of a layer and its modules by dotted names, for `put_tile_values`."""
    found = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        before = layer.get_submodule(path).__dict__.get(attribute, _NOTHING)
        found[name] = None if isinstance(before, TileValue) else before
    return found


def put_tile_values(layer: torch.nn.Module, before: Mapping[str, Any], owner: str) -> None:
    """Puts stand-ins in the place of attributes that a message has set.

    Args:
        layer: The layer.
        before: What they were before the message ran (:func:`attributes_of`).
        owner: How errors name the layer.
    """
    kept = facts_of(layer).before_tiles
    for name, value in before.items():
        path, _, attribute = name.rpartition(".")
        kept.setdefault(name, value)
        layer.get_submodule(path).__dict__[attribute] = tile_value(name, owner)


def forget_tile_values(layer: torch.nn.Module) -> None:
    """Takes stand-ins away again: a message that looks for its attribute finds it as at first."""
    facts = facts_of(layer)
    before_tiles, facts.before_tiles = facts.before_tiles, {}
    for name, before in before_tiles.items():
        path, _, attribute = name.rpartition(".")
        module = layer.get_submodule(path)
        if not isinstance(module.__dict__.get(attribute), TileValue):
            continue  # The layer has set it since.
        if before is _NOTHING:
            del module.__dict__[attribute]
        else:
            module.__dict__[attribute] = before


@contextmanager
def preserved_attributes(layer: torch.nn.Module, buffers: bool) -> Iterator[list[str]]:
    """Puts back tensor attributes that ``message`` set: nothing of a tile outlives its turn.

    Buffers too, when the message runs a second time. Yields a list that afterwards names the
    attributes that were set, those of modules with dots.
    """
    names: list[str] = []
    titles, modules = zip(*layer.named_modules(), strict=True)
    kept = [dict(module.__dict__) for module in modules]
    values = [(b, version_of(b), b.clone()) for b in layer.buffers()] if buffers else []
    try:
        yield names
    finally:
        for title, module, before in zip(titles, modules, kept, strict=True):
            now = module.__dict__
            for name, value in list(now.items()):
                if isinstance(value, Tensor) and value is not before.get(name):
                    names.append(f"{title}.{name}" if title else name)
                    if name in before:
                        now[name] = before[name]
                    else:
                        del now[name]
        for buffer, known in zip(layer.buffers() if buffers else (), values, strict=True):
            put_back(buffer, *known)


def put_back(buffer: Tensor, before: Tensor, version: int, saved: Tensor) -> None:
    """Gives a buffer its value again where it was written.

    Otherwise it isn't: autograd may have saved it in what the layer did before.

    Args:
        buffer: The layer's buffer.
        before: What it was.
        version: The version of that.
        saved: The value of that.
    """
    if buffer is not before or version < 0 or version_of(buffer) != version:
        buffer.copy_(saved)


@contextmanager
def detached_parameters(layer: torch.nn.Module) -> Iterator[dict[str, Tensor]]:
    """Swaps the layer's parameters that want gradients for leaves of their own, yielded by name.

    Gradients taken inside neither touch ``.grad`` nor run the parameters' hooks; they return as
    gradients of the autograd function's inputs, once (contract, rule 3). Names outlast a call in
    which others stand in for the parameters.
    """
    named = {id(p): (name, p) for name, p in layer.named_parameters() if p.requires_grad}
    leaves = {name: p.detach().requires_grad_() for name, p in named.values()}
    swapped: list[tuple[Any, str, Tensor]] = []
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in named:
                swapped.append((module._parameters, name, parameter))
    try:
        for registry, name, original in swapped:
            registry[name] = leaves[named[id(original)][0]]
        yield leaves
    finally:
        for registry, name, original in swapped:
            registry[name] = original


@contextmanager
def modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Puts back afterwards whether each module trains."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _Held:
    """An attribute, or a parameter or buffer, as it is now; small tensors by their values.

    Args:
        registry: Where it is, by its name.
        name: The name.
        title: How errors name it.
    """

    def __init__(self, registry: dict[str, Any], name: str, title: str) -> None:
        self.registry, self.name, self._title = registry, name, title
        self._watched: list[tuple[Tensor, int, Tensor | None]] = []
        self._value = registry[name]
        self.value = _copied(self._value, self._copy)
        """Its stand-in for a run of the message in the backward pass."""

    def _copy(self, value: Any) -> Any:
        """Returns a copy of what may be written in place, but for parameters and large tensors."""
        if isinstance(value, np.ndarray) or _is_record(value):
            return copy.copy(value)
        if type(value) not in (Tensor, torch.nn.Parameter):
            return value
        copied = value.detach().clone() if value.numel() <= _SMALL else None
        self._watched.append((value, version_of(value), copied))
        return value if copied is None or value.requires_grad else copied

    def is_as_it_was(self) -> bool:
        """Says if it is what it was.

        Raises:
            DistributedIndexError: A parameter, or a large tensor, was written in place.
        """
        for tensor, version, copied in self._watched:
            # On a GPU the values are not looked at: this would wait for it.
            looked_at = copied is not None and not tensor.is_cuda
            if version_of(tensor) == version and (not looked_at or _alike(tensor, copied)):
                continue
            if copied is not None and not tensor.requires_grad:
                return False
            raise DistributedIndexError(
                f"{self._title} was written in place after the layer's call and before its "
                "backward pass, which computes messages again: give the layer another tensor "
                "(`layer.x = layer.x + 1`), or set SARPolicy(mode=2), which keeps messages"
            )
        now = self.registry.get(self.name, _NOTHING)
        if now is self._value:
            return isinstance(now, Tensor) or _alike(now, self.value)
        by_value = isinstance(now, (*_NUMBERS, *_CONTAINERS, Tensor))
        return by_value and not isinstance(now, TileValue) and _alike(now, self.value)


class AmbientState:
    """Random numbers, autocast, and a layer's state at a moment: to compute again as at first.

    Others stand for the parameters and buffers within ``torch.func.functional_call``, say. Modules,
    numbers, functions, tensors and containers that are attributes may be others by the backward
    pass, may be written in place, and may be missing then, or have been missing at first. Tensors
    with a graph are not kept: each step's would keep the graph of the step before.

    Args:
        device: The device that the layer computes on.
        layer: The layer.
    """

    def __init__(self, device: torch.device, layer: torch.nn.Module) -> None:
        self.device = device
        self._training: list[tuple[torch.nn.Module, bool]] = []
        self._held: list[_Held] = []
        self._fixed: list[tuple[dict[str, Any], str, Any]] = []  # what nobody writes into
        self._names: list[tuple[dict[str, Any], set[str]]] = []
        for title, module in layer.named_modules():
            prefix = f"{type(layer).__name__}.{title}." if title else f"{type(layer).__name__}."
            self._training.append((module, module.training))
            own: Any = vars(module)
            registry: Any
            for registry in (own, module._parameters, module._buffers, module._modules):
                self._names.append((registry, set(registry)))
                for name, value in registry.items():
                    if registry is own and name in _OF_PYG:
                        continue
                    if type(value) in _FIXED or isinstance(value, torch.nn.Module):
                        self._fixed.append((registry, name, value))
                    elif registry is not own or is_kept(value):
                        self._held.append(_Held(registry, name, prefix + name))
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._autocast = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)

    def autocast(self) -> Any:
        """Restores the autocast state without its cache: a cast without a graph has no gradient."""
        return torch.autocast(
            self.device.type, self._dtype, enabled=self._autocast, cache_enabled=False
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs in this state and puts the present state back afterwards."""
        devices = [self.device] if self._cuda is not None else []
        now = [(module, module.training) for module, _ in self._training]
        others = [
            (held.registry, held.name, _copied(held.value))
            for held in self._held
            if not held.is_as_it_was()
        ]
        others += [
            (registry, name, value)
            for registry, name, value in self._fixed
            if registry.get(name, _NOTHING) is not value
        ]
        others += [
            (registry, name, _NOTHING)
            for registry, names in self._names
            for name in registry.keys() - names - _OF_PYG
        ]
        put = [(*other, other[0].get(other[1], _NOTHING)) for other in others]
        with torch.random.fork_rng(devices=devices), self.autocast():
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self.device)
            try:
                for module, training in self._training:
                    module.training = training
                for registry, name, held, _ in put:
                    _set(registry, name, held)
                yield
            finally:
                for registry, name, held, other in put:
                    if registry.get(name, _NOTHING) is held:  # Else the message has changed it.
                        _set(registry, name, other)
                for module, training in now:
                    module.training = training


# What a message changes #######################################################


_CONTAINERS = (list, dict, set, deque)
_FIXED = (bool, int, float, complex, str, bytes, type(None))
_NUMBERS = (*_FIXED, tuple)
_SMALL = 1 << 16  # Numbers of a tensor that is copied for the backward pass.
_OWN = frozenset({"_edge_type", "_facts", "own_graphs"})
_INTERNAL = frozenset({*vars(torch.nn.Module()), *_OWN})
_OF_PYG = frozenset(
    {
        *hook_names("propagate", "message", "aggregate", "message_and_aggregate", "edge_update"),
        *("_user_args", "_fused_user_args", "_edge_user_args"),
        *_INTERNAL,
    }
)
"""Attributes that no message reads."""


class Snapshot:
    """State of a layer and its submodules before a message runs.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._registries = [
            (f"{title}." if title else "", registry, dict(registry))
            for title, module in layer.named_modules()
            for registry in (module.__dict__, module._buffers)
        ]
        own = [v for *_, kept in self._registries for k, v in kept.items() if k not in _INTERNAL]
        tensors = [v for v in own if isinstance(v, Tensor) and not isinstance(v, TileValue)]
        others = [v for v in own if isinstance(v, _CONTAINERS) or _is_record(v)]
        self._versions = {id(v): version_of(v) for v in tensors}
        self._values = {id(v): (v, v.detach().clone()) for v in tensors}
        self._values |= {id(v): (v, _apart(v)) for v in others}

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Returns names, values before and values now of what changed."""
        for prefix, registry, before in self._registries:
            for key, value in registry.items():
                old = before.get(key)
                _, saved = self._values.get(id(old), (old, old))
                if key in _INTERNAL:
                    changed = False
                elif value is old:
                    changed = saved is not old and self._written(old) and not _alike(old, saved)
                elif isinstance(value, Tensor):
                    changed = True
                else:
                    changed = isinstance(value, (*_NUMBERS, *_CONTAINERS))
                    changed = changed and not _alike(value, saved)
                if changed:
                    yield prefix + key, saved, _apart(value)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for _, registry, before in self._registries:
            for key in registry.keys() - before.keys():
                del registry[key]
            registry.update(before)
        for value, saved in self._values.values():
            if not isinstance(value, Tensor):
                _refill(value, saved)
            elif self._written(value):
                value.detach().copy_(saved)

    def _written(self, value: Any) -> bool:
        """Says if somebody wrote into it."""
        saved, version = self._values[id(value)][1], self._versions.get(id(value), -1)
        if version >= 0:
            return version_of(value) != version
        return not _alike(value, saved)


def _apart(value: Any) -> Any:
    """Returns a copy of a container, or of an object with fields; else the value."""
    return copy.copy(value) if _is_record(value) else _copied(value)


def _copied(value: Any, leaf: Callable[[Any], Any] = lambda value: value) -> Any:
    """Returns a copy of a container, of whatever depth; ``leaf`` of all else, which stays the same.

    PyTorch's ``tree_map`` would leave a cycle of its own functions for the collector.
    """
    if isinstance(value, tuple):
        items = [_copied(item, leaf) for item in value]
        if type(value) is tuple:
            return tuple(items)
        if hasattr(value, "_fields"):
            return type(value)(*items)
    if not isinstance(value, _CONTAINERS):
        return leaf(value)
    found: Any = copy.copy(value)
    if isinstance(value, dict):
        found.update({k: _copied(v, leaf) for k, v in value.items()})
    elif not isinstance(value, set):
        for k, item in enumerate(value):
            found[k] = _copied(item, leaf)
    return found


def _is_record(value: Any) -> bool:
    """Says if a value is an object of the user's with fields that are numbers or texts alone."""
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or callable(value) or isinstance(value, Tensor):
        return False
    return all(isinstance(field, _NUMBERS) for field in fields.values())


def is_kept(value: Any) -> bool:
    """Says if an attribute is state that a message may read, and keeps no graph of autograd."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.grad_fn is None
    if isinstance(value, _CONTAINERS) or type(value) is tuple:
        return all(map(is_kept, value.values() if isinstance(value, dict) else value))
    is_state = isinstance(value, (*_NUMBERS, np.ndarray))
    return is_state or callable(value) or _is_record(value)


def _set(registry: dict[str, Any], name: str, value: Any) -> None:
    if value is _NOTHING:
        registry.pop(name, None)
    else:
        registry[name] = value


def _refill(container: Any, contents: Any) -> None:
    if _alike(container, contents):
        return
    if not isinstance(container, _CONTAINERS):  # An object.
        vars(container).clear()
        vars(container).update(vars(contents))
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(contents)
    else:
        container.update(contents)


def _alike(left: Any, right: Any) -> bool:
    """Says if two values are equal, tensors by their values."""
    if left is right:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            return False
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(_alike, left.values(), right.values()))
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(
            left, right, equal_nan=left.dtype.kind in "fc"
        )
    if _is_record(left):
        return bool(vars(left) == vars(right))
    try:
        return bool(left == right)
    except (RuntimeError, TypeError, ValueError):
        return False


class Changes:
    """The changes that two runs of a message made.

    Attributes:
        updates: What it changed alike in both: counters of calls.
        rows: Tensors with a row per edge that it left.
        refused: What depends on the edges, and is another on every worker.
    """

    def __init__(self) -> None:
        self.updates: list[str] = []
        self.rows: list[str] = []
        self.refused = ""

    def judge(
        self,
        first: dict[str, Any],
        second: Iterator[tuple[str, Any, Any]],
        mixed: Callable[[Any], str],
    ) -> None:
        """Compares them.

        Args:
            first: What the first run changed, by name.
            second: What the second changed.
            mixed: Says of a tensor whether it is made of no edge (``''``), has a row per edge
                (``'rows'``), or holds something else (``'mixed'``).
        """
        for name, before, now in second:
            kinds = {mixed(leaf) for leaf in tree_leaves(now) if isinstance(leaf, Tensor)}
            if "mixed" in kinds:
                self.refused = name
            elif kinds == {"rows"}:
                if isinstance(now, Tensor):
                    self.rows.append(name)
                else:
                    self.refused = name
            elif not _alike(first.get(name), now):
                self.refused = name
            elif not isinstance(now, Tensor) or before is not None:
                self.updates.append(name)
