"""Messages that do something else in a later call than in the first, by what no attribute tells."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Partitions, error, whole, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import Aggregation, MessagePassing

import pyg_sar
from pyg_sar.errors import DistributedIndexError

CHANNELS, STEPS = 6, 4
SWITCH = {"on": False}
VARIABLE: ContextVar[bool] = ContextVar("VARIABLE", default=False)
FUNCTION: Callable[[float], float] = math.floor
NOTHING: object = None
pytestmark = pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")


TABLE = {"on": False}


def of_function() -> None: ...


class Slots:
    __slots__ = ("on",)


class Called:
    on = False

    def __call__(self) -> bool:
        return self.on


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"on": False}

    def told(self) -> bool:
        return self.table["on"]


class Places(torch.nn.Module):
    """Where a switch may be, beside plain attributes of a layer."""

    by_class = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.gate = torch.nn.Parameter(torch.tensor(-1.0))
        self.lin = torch.nn.Linear(CHANNELS, CHANNELS)
        self.space, self.slots, self.called = SimpleNamespace(on=False), Slots(), Called()
        self.slots.on, self.table, self.numbers, self._hidden = False, {"on": False}, [0.0], False
        self.inner = SimpleNamespace(deeper=SimpleNamespace(on=False))
        cell = {"on": False}
        self.cell, self.look = cell, lambda: cell["on"]
        self.lin._on, self.lin.cfg = False, {"on": False}  # type: ignore[assignment]
        self.block, self.hidden = Block(), [Block()]
        self.queue, self.method = deque([False]), Called().__call__

    @property
    def of_global(self) -> bool:
        return SWITCH["on"]


ON: dict[str, Callable[[Any], Any]] = {
    "buffer": lambda m: m.steps >= 2,
    "parameter": lambda m: m.gate > 0,
    "item": lambda m: m.steps.item() >= 2,
    "namespace": lambda m: m.space.on,
    "nested": lambda m: m.inner.deeper.on,
    "slots": lambda m: m.slots.on,
    "callable": lambda m: m.called(),
    "dict": lambda m: m.table["on"],
    "list": lambda m: m.numbers[0] > 0,
    "underscore": lambda m: m._hidden,
    "class": lambda m: m.by_class,
    "closure": lambda m: m.look(),
    "global": lambda m: SWITCH["on"],
    "of a submodule": lambda m: m.lin._on,
    "dict of a submodule": lambda m: m.lin.cfg["on"],
    "method of a submodule": lambda m: m.block.told(),
    "module in a list": lambda m: m.hidden[0].told(),
    "queue": lambda m: m.queue[0],
    "method": lambda m: m.method(),
    "default": lambda m, table=TABLE: table["on"],
    "of a function": lambda m: of_function.on,  # type: ignore[attr-defined]
    "context": lambda m: VARIABLE.get(),
    "function": lambda m: FUNCTION(-1.5) > 0,
    "nothing": lambda m: NOTHING is not None,
    "property": lambda m: m.of_global,
    "environment": lambda m: os.environ.get("PYG_SAR_TEST_SWITCH") == "on",
}


def switch(m: Any, on: bool) -> None:
    with torch.no_grad():
        m.steps.fill_(2.0 * on)
        m.gate.fill_(2.0 * on - 1)
    m.space.on = m.slots.on = m.called.on = m.table["on"] = m._hidden = m.cell["on"] = on
    m.queue[0] = m.method.__self__.on = TABLE["on"] = of_function.on = on  # type: ignore[attr-defined]
    VARIABLE.set(on)
    m.lin._on = m.lin.cfg["on"] = on
    for block in (m.block, m.hidden[0]):
        block.table["on"] = on
    m.inner.deeper.on, m.numbers[0], SWITCH["on"], Places.by_class = on, float(on), on, on
    globals().update(FUNCTION=math.fabs if on else math.floor, NOTHING=object() if on else None)
    os.environ["PYG_SAR_TEST_SWITCH"] = "on" if on else "off"


KINDS: dict[str, Callable[[bool, Tensor, Tensor], Tensor]] = {
    "mixes": lambda on, x_i, x_j: x_j * x_i.tanh() - (x_j.mean(0) if on else 0),
    "reads": lambda on, x_i, x_j: (x_j * x_i).tanh() if on else x_i.tanh(),
    "scales": lambda on, x_i, x_j: x_i.tanh() * x_j.cos() * (2.0 if on else 1.0),
}


class Layer(MessagePassing):
    def __init__(self, kind: str, place: str) -> None:
        super().__init__()
        self.made, self.on, self.state = KINDS[kind], ON[place], Places()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.state.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.made(bool(self.on(self.state)), x_i, x_j)


class Derived(Layer):
    """Its message calls that of its base class."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return 2 * super().message(x_i, x_j)


class Net(torch.nn.Module):
    def __init__(self, place: str, columns: int) -> None:
        super().__init__()
        self.on, self.state = ON[place], Places()
        self.map = torch.nn.Linear(columns, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.map(x).tanh()
        return x - x.mean(0) if self.on(self.state) else x


class OwnSum(Aggregation):
    def __init__(self) -> None:
        super().__init__()
        self.state = Places()

    def forward(
        self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
    ) -> Tensor:
        out = self.reduce(x, index, ptr, dim_size, dim, "sum")
        return out / (1 + out.norm()) if self.state.steps >= 2 else out


def with_aggregation() -> Layer:
    layer = Layer("scales", "class")
    layer.aggr_module = OwnSum()
    return layer


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    **{
        f"{kind}, {place}": lambda kind=kind, place=place: Layer(kind, place)
        for kind in KINDS
        for place in ON
    },
    "EdgeConv, namespace": lambda: gnn.EdgeConv(Net("namespace", 2 * CHANNELS)),
    "EdgeConv, buffer": lambda: gnn.EdgeConv(Net("buffer", 2 * CHANNELS)),
    "aggregation": with_aggregation,
    "reads, base class": lambda: Derived("reads", "global"),
}


def trained(name: str, x: Tensor, edge_index: Any) -> list[Any]:
    """Losses, and gradients; the switch is turned on after two steps."""
    torch.manual_seed(0)
    layer, losses = LAYERS[name]().double(), []
    if type(x) is not Tensor:
        layer = pyg_sar.distribute(layer)
    states = [module for module in layer.modules() if isinstance(module, Places)]
    for step in range(STEPS):
        for state in states:
            switch(state, step >= 2)
        layer.zero_grad()
        loss = layer(x, edge_index).square().sum()
        loss.backward()
        losses.append(loss.detach())
    found = [(n, p.grad) for n, p in layer.named_parameters() if p.grad is not None]
    return [*losses, *[gradient for n, gradient in found if "gate" not in n]]


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, 2)


REFUSED = ("mixes", "EdgeConv")


@pytest.mark.parametrize("refused", [False, True])
def test_a_later_call_is_looked_at_again(refused: bool, graph: Data, root: Path) -> None:
    names = [name for name in LAYERS if name.startswith(REFUSED) == refused]

    def found_of(name: str, data: Data) -> list[Tensor] | str:
        try:
            return [whole(t) for t in trained(name, data.x, data.edge_index)]
        except DistributedIndexError as problem:
            return str(problem)

    def worker() -> list[list[Tensor] | str]:
        data = pyg_sar.load_partition(root)
        return [found_of(name, data) for name in names]

    for every in workers(worker, 2):
        for name, found in zip(names, every, strict=True):
            if refused:
                assert "can't be computed from each worker's own edges" in found, name
                continue
            for one, other in zip(found, trained(name, graph.x, graph.edge_index), strict=True):
                assert error(one, other) <= 1e-10, name


class Counter:
    calls = 0


class Counts(Layer):
    """Its message counts its calls in an object."""

    def __init__(self) -> None:
        super().__init__("scales", "class")
        self.counter = Counter()

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.counter.calls += 1
        return x_i.tanh() * x_j * self.counter.calls


def test_what_a_message_counts_in_an_object(graph: Data, root: Path) -> None:
    """Looking at it counts nothing, and it runs once in a call."""

    def losses(x: Tensor, edge_index: Any) -> list[float]:
        torch.manual_seed(0)
        layer: Any = Counts().double()
        layer = layer if type(x) is Tensor else pyg_sar.distribute(layer)
        return [float(layer(x, edge_index).detach().square().sum()) for _ in range(3)]

    def worker() -> list[float]:
        data = pyg_sar.load_partition(root)
        return losses(data.x, data.edge_index)

    expected = pytest.approx(losses(graph.x, graph.edge_index), rel=1e-10)
    assert workers(worker, 2) == [expected] * 2
