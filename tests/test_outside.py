"""Switches that a message reads far from its layer, and what it takes or counts there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import math
import operator
import os
import random
import re
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from combinations import everything
from oracle import CHANNELS, Partitions, error, whole, workers
from torch import Tensor
from torch import is_warn_always_enabled as warns
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import Aggregation, MessagePassing
from torch_geometric.utils import _softmax, scatter, softmax

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.message.outside import outside_of

pytestmark = pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
NAMES = SimpleNamespace
STORE = {"on": False}
VARIABLE: ContextVar[bool] = ContextVar("VARIABLE", default=False)
LOGGER = logging.getLogger("a message's")
Pair = namedtuple("Pair", ["left", "right"])


FUNCTION: Callable[[float], float] = math.floor
NOTHING: object = None


class WithAttribute(dict[str, bool]):
    on = False


class Meta(type):
    @property
    def told(cls) -> bool:
        return STORE["on"]


class Config(metaclass=Meta):
    on = False

    class Inner:
        on = False

    @classmethod
    def of_class(cls) -> bool:
        return STORE["on"]

    def __bool__(self) -> bool:
        return STORE["on"]

    def method(self) -> bool:
        return STORE["on"]


class Derived(Config):
    pass


class Proxy:
    def __getattr__(self, name: str) -> Any:
        return STORE[name]


class Replaced:
    def told(self) -> bool:
        return False


class Slots:
    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


class Called:
    on = False

    def __call__(self) -> bool:
        return self.on


class Block(torch.nn.Module):
    on = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.gate = torch.nn.Parameter(torch.tensor(-1.0))
        self.inner, self.table, self._hidden = torch.nn.Identity(), {"on": False}, False
        self.inner._on = False  # type: ignore[assignment]

    @property
    def of_global(self) -> bool:
        return STORE["on"]

    def told(self) -> bool:
        return self.table["on"]


BLOCK = Block()


def told() -> bool:
    return STORE["on"]


told.on = False  # type: ignore[attr-defined]


def of_table(table: dict[str, bool]) -> bool:
    return table["on"]


def yes() -> bool:
    return True


def no() -> bool:
    return False


def replaced() -> bool:
    return False


def with_default(held: Any, table: Any = NAMES(a=[NAMES(b={"c": NAMES(on=False)})])) -> bool:  # noqa: B008
    return bool(table.a[0].b["c"].on)


def imports(held: Any) -> bool:
    from test_outside import STORE

    return STORE["on"]


@functools.lru_cache
def cached() -> bool:
    return STORE["on"]


@functools.singledispatch
def dispatched(value: Any) -> bool:
    return STORE["on"]


@torch.no_grad()
def without_gradient() -> bool:
    return STORE["on"]


@contextlib.contextmanager
def entered() -> Iterator[bool]:
    yield STORE["on"]


def enters(held: Any) -> bool:
    with entered() as on:
        return on


def matches(held: Any) -> bool:
    match held.a:
        case Proxy(on=True):
            return True
    return False


def in_a_closure() -> Any:
    cell = {"on": False}
    return NAMES(look=lambda: cell["on"], cell=cell)


OF_TABLE = functools.partial(of_table, STORE)
VECTOR = np.vectorize(lambda number: number * STORE["on"])


def store(held: Any, on: bool) -> None:
    STORE["on"] = on


def store_anew(held: Any, on: bool) -> None:
    STORE["on"] = on
    cached.cache_clear()


def put(path: str) -> Callable[[Any, bool], None]:
    """A function that sets an attribute of what is held."""
    *above, name = path.split(".")

    def set_it(held: Any, on: bool) -> None:
        setattr(functools.reduce(getattr, above, held), name, on)

    return set_it


def item(*keys: Any) -> Callable[[Any, bool], None]:
    """A function that sets an item of what is held."""

    def set_it(held: Any, on: bool) -> None:
        functools.reduce(operator.getitem, keys[:-1], held)[keys[-1]] = on

    return set_it


def of(owner: Any, name: str) -> Callable[[Any, bool], None]:
    return lambda held, on: setattr(owner, name, on)


def fill(held: Any, on: bool) -> None:
    held.steps.fill_(2.0 * on)


# What a layer holds, how its message reads a switch, and how that is turned on.
PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, bool], Any]]] = {
    "deep": (
        lambda: NAMES(a=NAMES(b=NAMES(c=NAMES(d=NAMES(on=False))))),
        lambda h: h.a.b.c.d.on,
        put("a.b.c.d.on"),
    ),
    "buffer": (Block, lambda h: h.steps >= 2, fill),
    "item of a buffer": (Block, lambda h: h.steps.item() >= 2, fill),
    "parameter": (Block, lambda h: h.gate > 0, lambda h, on: h.gate.data.fill_(2.0 * on - 1)),
    "underscore": (Block, lambda h: h._hidden, put("_hidden")),
    "of a submodule": (Block, lambda h: h.inner._on, put("inner._on")),
    "method of a module": (Block, lambda h: h.told(), lambda h, on: item("on")(h.table, on)),
    "module in a list": (
        lambda: [Block()],
        lambda h: h[0].told(),
        lambda h, on: item("on")(h[0].table, on),
    ),
    "property": (Block, lambda h: h.of_global, store),
    "slots": (Slots, lambda h: h.on, put("on")),
    "callable": (Called, lambda h: h(), put("on")),
    "method": (lambda: Called().__call__, lambda h: h(), lambda h, on: put("on")(h.__self__, on)),
    "queue": (lambda: deque([False]), lambda h: h[0], item(0)),
    "closure": (in_a_closure, lambda h: h.look(), lambda h, on: item("on")(h.cell, on)),
    "of a function": (int, lambda h: told.on, of(told, "on")),  # type: ignore[attr-defined]
    "function": (
        int,
        lambda h: FUNCTION(-1.5) > 0,
        lambda h, on: globals().update(FUNCTION=math.fabs if on else math.floor),
    ),
    "nothing": (
        int,
        lambda h: NOTHING is not None,
        lambda h, on: globals().update(NOTHING=object() if on else None),
    ),
    "environment": (
        int,
        lambda h: os.environ.get("PYG_SAR_TEST_SWITCH") == "on",
        lambda h, on: os.environ.update(PYG_SAR_TEST_SWITCH="on" if on else "off"),
    ),
    "deep items": (
        lambda: [{"a": [[{"on": 0}]]}],
        lambda h: h[0]["a"][0][0]["on"],
        item(0, "a", 0, 0, "on"),
    ),
    "long dict": (lambda: dict.fromkeys(range(1000), False), lambda h: h[777], item(777)),
    "long list": (
        lambda: NAMES(a=[0] * 5000),
        lambda h: h.a[4000],
        lambda h, on: item(4000)(h.a, on),
    ),
    "array": (lambda: np.zeros(1000), lambda h: h[700] > 0, item(700)),
    "bytes": (lambda: NAMES(a=bytearray(3)), lambda h: h.a[1], lambda h, on: item(1)(h.a, on)),
    "attribute of a dict": (WithAttribute, lambda h: h.on, put("on")),
    "field of a tuple": (
        lambda: Pair(Pair({"on": 0}, 1), 2),
        lambda h: h.left.left["on"],
        lambda h, on: item("on")(h.left.left, on),
    ),
    "class of an object": (Config, lambda h: h.on, of(Config, "on")),
    "class within a class": (int, lambda h: Config.Inner.on, of(Config.Inner, "on")),
    "base class": (int, lambda h: Derived.on, of(Config, "on")),
    "metaclass": (int, lambda h: Config.told, store),
    "class method": (int, lambda h: Derived.of_class(), store),
    "proxy": (Proxy, lambda h: h.on, store),
    "truth": (lambda: NAMES(a=NAMES(b=Config())), lambda h: bool(h.a.b), store),
    "pattern": (lambda: NAMES(a=Proxy()), matches, store),
    "method in a dict": (lambda: {"a": {"b": Config().method}}, lambda h: h["a"]["b"](), store),
    "object in an object": (lambda: NAMES(a=Config()), lambda h: h.a.method(), store),
    "function in a list": (lambda: {"a": [told]}, lambda h: h["a"][0](), store),
    "method of a class": (
        lambda: NAMES(a=Replaced()),
        lambda h: h.a.told(),
        lambda h, on: setattr(Replaced, "told", lambda self: on),
    ),
    "code": (
        int,
        lambda h: replaced(),
        lambda h, on: setattr(replaced, "__code__", (yes if on else no).__code__),
    ),
    "partial": (
        lambda: functools.partial(of_table, {"on": False}),
        lambda h: h(),
        lambda h, on: item("on")(h.args[0], on),
    ),
    "global partial": (int, lambda h: OF_TABLE(), store),
    "cache": (int, lambda h: cached(), store_anew),
    "dispatch": (int, lambda h: dispatched(1), store),
    "decorated": (int, lambda h: without_gradient(), store),
    "context": (int, enters, store),
    "vectorized": (int, lambda h: bool(VECTOR(1.0)), store),
    "default": (
        int,
        with_default,
        lambda h, on: put("on")(with_default.__defaults__[0].a[0].b["c"], on),
    ),  # type: ignore[index]
    "getter": (
        lambda: NAMES(f=operator.attrgetter("g.a.on"), g=NAMES(a=NAMES(on=0))),
        lambda h: h.f(h),
        put("g.a.on"),
    ),
    "import": (
        int,
        imports,
        lambda h, on: importlib.import_module("test_outside").STORE.update(on=on),
    ),
    "frame": (int, lambda h: inspect.currentframe().f_globals["STORE"]["on"], store),  # type: ignore[union-attr]
    "module of a module": (
        int,
        lambda h: importlib.import_module("test_outside").Config.on,
        lambda h, on: setattr(importlib.import_module("test_outside").Config, "on", on),
    ),
    "module in an object": (lambda: NAMES(a=Block()), lambda h: h.a.on, put("a.on")),
    "global module trains": (int, lambda h: BLOCK.training, lambda h, on: BLOCK.train(on)),
    "listed module trains": (
        lambda: [torch.nn.ReLU()],
        lambda h: h[0].training,
        lambda h, on: h[0].train(on),
    ),
    "class of a module": (Block, lambda h: h.on, of(Block, "on")),
    "variable": (lambda: NAMES(a=VARIABLE), lambda h: h.a.get(), lambda h, on: VARIABLE.set(on)),
    "weak": (lambda: NAMES(a=weakref.ref(BLOCK)), lambda h: h.a().on, of(BLOCK, "on")),
    "logger": (
        int,
        lambda h: LOGGER.isEnabledFor(10),
        lambda h, on: LOGGER.setLevel(10 if on else 40),
    ),
    "deterministic": (
        int,
        lambda h: torch.are_deterministic_algorithms_enabled(),
        lambda h, on: torch.use_deterministic_algorithms(on, warn_only=on),
    ),
    "flag of torch": (int, lambda h: warns(), lambda h, on: torch.set_warn_always(on)),
    "seed": (
        int,
        lambda h: torch.initial_seed() == 7,
        lambda h, on: torch.manual_seed(7 if on else 8),
    ),
    "backend": (
        int,
        lambda h: torch.backends.cudnn.benchmark,
        lambda h, on: torch._C._set_cudnn_benchmark(on),  # PyTorch's own tests forbid the name.
    ),
    "precision": (
        int,
        lambda h: torch.get_float32_matmul_precision() == "high",
        lambda h, on: torch.set_float32_matmul_precision("high" if on else "highest"),
    ),
    "errors of numpy": (
        int,
        lambda h: np.geterr()["over"] == "ignore",
        lambda h, on: np.seterr(over="ignore" if on else "warn"),
    ),
}
"""Of these, `int` holds nothing."""


class OwnSum(Aggregation):
    """Reads what the layer holds."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(
        self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
    ) -> Tensor:
        out = self.reduce(x, index, ptr, dim_size, dim, "sum")
        return out / (1 + out.norm()) if self.held.steps >= 2 else out


class Layer(MessagePassing):
    def __init__(self, place: str, how: str) -> None:
        super().__init__()
        make, self.read, self.put = PLACES[place]
        self.held, self.how, self.lin = make(), how, torch.nn.Linear(CHANNELS, CHANNELS)
        if how == "aggregates":
            self.aggr_module = OwnSum(self.held)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        on = self.read(self.held)
        if self.how in ("scales", "aggregates"):
            return x_i.tanh() * x_j.cos() * (2.0 if on else 1.0)
        if not on:
            return x_i.tanh()
        return x_j * x_i.tanh() - x_j.mean(0) if self.how == "mixes" else (x_j * x_i).tanh()


class OfBase(Layer):
    """Its message calls that of its base class."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return 2 * super().message(x_i, x_j)


def steps(layer: Any, x: Tensor, edge_index: Any, switch: Callable[[int, bool], None]) -> list[Any]:
    """Losses and gradients; ``switch`` is called before and after each forward pass."""
    layer = layer.double()
    layer = layer if type(x) is Tensor else pyg_sar.distribute(layer)
    found = []
    for step in range(3):
        switch(step, False)
        layer.zero_grad()
        loss = layer(x, edge_index).square().sum()
        switch(step, True)
        loss.backward()
        found += [loss.detach(), layer.lin.weight.grad.clone()]
    return [whole(tensor) for tensor in found]


def trained(place: str, how: str, data: Any) -> list[Tensor] | str:
    """``how``: the message mixes edges once the switch is on, reads other rows; or does between."""
    torch.manual_seed(0)
    layer = (OfBase if how == "of a base class" else Layer)(place, how)

    def switch(step: int, after: bool) -> None:
        layer.put(layer.held, after if how == "between" else step >= 2)

    try:
        return steps(layer, data.x, data.edge_index, switch)
    except DistributedIndexError as problem:
        return str(problem)
    finally:
        layer.put(layer.held, False)


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, 2)


def places(how: str) -> list[str]:
    """Every second one mixes edges or reads other rows; the others scale them, or are put between.

    With ``--all`` each does all.
    """
    others = how in ("scales", "between")
    return list(PLACES) if everything() else list(PLACES)[others::2]


def all_trained(root: Path, how: str) -> list[list[Tensor] | str]:
    data = pyg_sar.load_partition(root)
    return [trained(name, how, data) for name in places(how)]


@pytest.mark.parametrize("how", ["mixes", "reads", "scales", "between"])
def test_a_switch_far_away(how: str, graph: Data, root: Path) -> None:
    """It is refused, or the numbers are right: attributes are put back for the backward pass."""
    refused = {"mixes": "each worker's own edges", "between": "differently|was written"}
    for every in workers(all_trained, 2, root, how):
        many = 2 * sum(isinstance(found, str) for found in every) >= len(every) - 1
        assert many or how in ("reads", "scales")
        for name, found in zip(places(how), every, strict=True):
            if isinstance(found, str):
                assert re.search(refused.get(how, "no"), found), (name, found)
                continue
            for one, other in zip(found, trained(name, how, graph), strict=True):
                assert isinstance(other, Tensor) and error(one, other) <= 1e-10, name


@pytest.mark.parametrize("how", ["aggregates", "of a base class"])
def test_a_switch_of_another_class(how: str, graph: Data, root: Path) -> None:
    expected = trained("buffer", how, graph)
    for found in workers(lambda: trained("buffer", how, pyg_sar.load_partition(root)), 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# What another run finds changed ###############################################

CALLS, QUEUE = {"n": 0}, [*range(900, 0, -1)]
DRAWS = random.Random(3)


def numbered() -> Iterator[int]:
    yield from itertools.count(1)


def called() -> int:
    called.n += 1  # type: ignore[attr-defined]
    return called.n  # type: ignore[attr-defined, no-any-return]


def add_one(held: Any) -> int:
    CALLS["n"] += 1
    return CALLS["n"]


def add_deep(held: Any) -> int:
    held.a["b"].n += 1
    return int(held.a["b"].n)


def first_of(held: Any) -> int:
    for number in held.a:
        return int(number)
    return 0


def of_class(held: Any) -> int:
    type(held).n += 1
    return int(held.n)


class Class:
    n = 0


def closure() -> Callable[[], int]:
    n = 0

    def add() -> int:
        nonlocal n
        n += 1
        return n

    return add


TAKEN: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "count": (lambda: itertools.count(1), lambda h: next(h)),
    "generator": (lambda: NAMES(a=numbered()), first_of),
    "method": (lambda: itertools.count(1).__next__, lambda h: h()),
    "partial": (lambda: functools.partial(next, numbered()), lambda h: h()),
    "queue": (lambda: QUEUE.__setitem__(slice(None), range(900, 0, -1)), lambda h: QUEUE.pop()),
    "draws": (lambda: DRAWS.seed(3), lambda h: DRAWS.random()),
    "NumPy draws": (lambda: NAMES(a=np.random.default_rng(0)), lambda h: h.a.random()),
    "calls": (lambda: CALLS.update(n=0), add_one),
    "calls, deep": (lambda: NAMES(a={"b": NAMES(n=0)}), add_deep),
    "calls of a function": (lambda: setattr(called, "n", 0), lambda h: called()),
    "calls in a closure": (closure, lambda h: h()),
    "calls in a class": (lambda: type("Own", (Class,), {})(), of_class),
}


class Takes(Layer):
    def __init__(self, name: str) -> None:
        super().__init__("deep", "reads")
        make, self.take = TAKEN[name]
        self.held = make()

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).tanh() * self.take(self.held)


def numbers(name: str, data: Any) -> list[Any]:
    torch.manual_seed(0)
    return steps(Takes(name), data.x, data.edge_index, lambda step, after: None)


def all_numbers(root: Path) -> list[list[Tensor]]:
    data = pyg_sar.load_partition(root)
    return [numbers(name, data) for name in TAKEN]


def test_what_is_taken_or_counted_is_so_once_in_a_call(graph: Data, root: Path) -> None:
    for every in workers(all_numbers, 2, root):
        for name, found in zip(TAKEN, every, strict=True):
            for one, other in zip(found, numbers(name, graph), strict=True):
                assert error(one, other) <= 1e-10, name


# What is replaced #############################################################

MESSAGES: dict[str, Callable[..., Tensor]] = {
    "torch": lambda m, index, ptr, size: torch.tanh(m),
    "functional": lambda m, index, ptr, size: functional.elu(m),
    "method": lambda m, index, ptr, size: m.sigmoid(),
    "softmax": lambda m, index, ptr, size: softmax(m, index, ptr, size),
}
REPLACED = {
    "torch": (torch, "tanh", torch.tanh),
    "functional": (functional, "elu", functional.elu),
    "method": (Tensor, "sigmoid", Tensor.sigmoid),
    "softmax": (_softmax, "scatter", scatter),
}


class Replaces(Layer):
    def __init__(self, name: str) -> None:
        super().__init__("deep", "reads")
        self.made = MESSAGES[name]

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Any, size_i: Any) -> Tensor:
        return self.made(x_i * x_j, index, ptr, size_i) * x_j


def with_replaced(name: str, data: Any) -> str:
    owner, attribute, function = REPLACED[name]

    def mixes(*given: Any, **named: Any) -> Tensor:
        out = function(*given, **named)
        return out - out.mean(0)

    def switch(step: int, after: bool) -> None:
        setattr(owner, attribute, mixes if step >= 2 else function)

    try:
        return f"{steps(Replaces(name), data.x, data.edge_index, switch)}"
    except DistributedIndexError as problem:
        return str(problem)
    finally:
        setattr(owner, attribute, function)


def all_with_replaced(root: Path) -> list[str]:
    data = pyg_sar.load_partition(root)
    return [with_replaced(name, data) for name in REPLACED]


def test_functions_of_torch_and_pyg_that_are_replaced(root: Path) -> None:
    for every in workers(all_with_replaced, 2, root):
        for name, found in zip(REPLACED, every, strict=True):
            assert "each worker's own edges" in found, (name, found)


# What costs nothing ###########################################################


class Usual(MessagePassing):
    """A message as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.cfg = 0.2, NAMES(dropout=0.1, norm=True)
        self.lin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.act = functools.partial(functional.leaky_relu, negative_slope=0.1)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        import math

        alpha = functional.leaky_relu(self.lin(x_i + x_j), self.slope).sum(-1) / math.sqrt(4)
        alpha = softmax(alpha, index) if self.cfg.norm else alpha.to(torch.float64)
        alpha = functional.dropout(alpha, self.cfg.dropout, self.training)
        return self.act(torch.cat([x_j, x_i], -1) * alpha.view(-1, 1))


def test_a_usual_message_is_known() -> None:
    found = outside_of(Usual())
    assert not (found.unknown or found.changes or found.takes), found
    assert found.state() == found.state()
