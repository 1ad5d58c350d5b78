"""Messages of one's own that are softmax attention, or nearly: by kernels where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from combinations import everything, some
from oracle import CHANNELS, Partitions, parts, whole, workers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import pyg_sar
from pyg_sar.nn import message_passing

HEADS, WIDTH = 3, 4


class Base(MessagePassing):
    """Of which no layer is made: PyG has layers share the methods that it writes for their base."""

    p, sums, way = 0.0, "add", "source_to_target"

    def __init__(self) -> None:
        super().__init__(node_dim=0, aggr=self.sums, flow=self.way)
        self.lin = nn.Linear(CHANNELS, HEADS * WIDTH)
        self.a = nn.Parameter(torch.randn(1, HEADS, WIDTH))
        self.b = nn.Parameter(torch.randn(1, HEADS, WIDTH))
        self._alpha: Any = None


class Own(Base):
    """A copy of GATConv as it is in many projects."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x).view(-1, HEADS, WIDTH)
        alpha = ((x * self.a).sum(-1), (x * self.b).sum(-1))
        return self.propagate(edge_index, x=x, alpha=alpha)

    def message(self, x_j: Tensor, alpha_j: Tensor, alpha_i: Tensor, index: Tensor) -> Tensor:
        self._alpha = alpha = softmax(self.score(alpha_j, alpha_i), index)
        alpha = F.dropout(alpha, self.p, self.training)
        return self.weighted(x_j, alpha)

    def score(self, alpha_j: Tensor, alpha_i: Tensor) -> Tensor:
        return F.leaky_relu(alpha_j + alpha_i, 0.2)

    def weighted(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * alpha.unsqueeze(-1)


class Viewed(Own):
    def score(self, alpha_j: Tensor, alpha_i: Tensor) -> Tensor:
        return alpha_i + alpha_j

    def weighted(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha.view(-1, HEADS, 1) * x_j


class Dropped(Own):
    p = 0.4


class Backwards(Own):
    way = "target_to_source"


class OneHead(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        alpha = (x @ self.a.view(-1, 1), x @ self.b.view(-1, 1))
        return self.propagate(edge_index, x=(x, x), alpha=alpha)

    def weighted(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * alpha


class Second(Base):
    """GATv2Conv."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x).view(-1, HEADS, WIDTH)
        return self.propagate(edge_index, x=(x, x * self.b))

    def message(self, x_j: Tensor, x_i: Tensor, index: Tensor) -> Tensor:
        score = (F.leaky_relu(x_i + x_j, 0.1) * self.a).sum(dim=-1)
        return x_j * softmax(score, index).unsqueeze(-1)


class Frozen(Second):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class Inner(Base):
    """TransformerConv."""

    scale = WIDTH**0.5

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x).view(-1, HEADS, WIDTH)
        return self.propagate(edge_index, q=x * self.a, k=x * self.b, v=x)

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, index: Tensor, ptr: Any, size_i: int
    ) -> Tensor:
        alpha = (q_i * k_j).sum(dim=-1) / self.scale
        alpha = F.dropout(softmax(alpha, index, ptr, size_i), self.p, self.training)
        return v_j * alpha.view(-1, HEADS, 1)


class DroppedInner(Inner):
    p = 0.3


class Joined(Base):
    """GATConv of PyG 1: rows are cut into heads, and joined, in the message."""

    p = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.att = nn.Parameter(torch.randn(1, HEADS, 2 * WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        x_i, x_j = (x.view(-1, HEADS, WIDTH) for x in (x_i, x_j))
        alpha = F.leaky_relu((self.joined(x_i, x_j) * self.att).sum(dim=-1), 0.2)
        alpha = F.dropout(softmax(alpha, index, num_nodes=size_i), self.p, self.training)
        return x_j * alpha.view(-1, HEADS, 1)

    def joined(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.cat([x_i, x_j], dim=-1)


class JoinedOther(Joined):
    def joined(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.cat([x_j, x_i], dim=-1)


class CutInner(Inner):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, a, b = self.lin(x), self.a.flatten(), self.b.flatten()
        return self.propagate(edge_index, q=x * a, k=x * b, v=x)

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, index: Tensor, ptr: Any, size_i: int
    ) -> Tensor:
        rows = (x.view(-1, HEADS, WIDTH) for x in (q_i, k_j, v_j))
        return Inner.message(self, *rows, index, ptr, size_i)


KNOWN = (
    Joined,
    JoinedOther,
    CutInner,
    Own,
    Viewed,
    Dropped,
    Backwards,
    OneHead,
    Second,
    Inner,
    DroppedInner,
)


# What is no attention that the kernels know ###################################


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.leaky_relu(x, 0.2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def scored(score: Callable[[Tensor, Tensor], Tensor]) -> type[Base]:
    return type("Scored", (Own,), {"score": lambda self, j, i: score(j, i)})


def weighted(weigh: Callable[[Tensor, Tensor], Tensor]) -> type[Base]:
    return type("Weighted", (Own,), {"weighted": lambda self, x, a: weigh(x, a)})


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 3)
    return x


class Turned(Own):
    """Normalised over the edges that leave a node."""

    def message(
        self, x_j: Tensor, alpha_j: Tensor, alpha_i: Tensor, edge_index_j: Tensor
    ) -> Tensor:
        return Own.message(self, x_j, alpha_j, alpha_i, edge_index_j)


class Swapped(Own):
    """The targets' rows."""

    def message(self, x_i: Tensor, alpha_j: Tensor, alpha_i: Tensor, index: Tensor) -> Tensor:
        return Own.message(self, x_i, alpha_j, alpha_i, index)


class CutOtherwise(Joined):
    """The values have other heads than the scores."""

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        rows, (x_i, x_j) = x_j, (x.view(-1, HEADS, WIDTH) for x in (x_i, x_j))
        alpha = F.leaky_relu((self.joined(x_i, x_j) * self.att).sum(dim=-1), 0.2)
        alpha = softmax(alpha, index, num_nodes=size_i)
        rows = rows.view(-1, WIDTH, HEADS).transpose(1, 2)
        return rows * alpha.view(-1, HEADS, 1)


class KeysAlone(Joined):
    def joined(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.cat([x_j, x_j], dim=-1)


class Mean(Own):
    sums = "mean"


class OtherRows(Second):
    """The values are no keys."""

    def message(self, x_j: Tensor, x_i: Tensor, index: Tensor) -> Tensor:
        score = (F.leaky_relu(x_i + x_j, 0.1) * self.a).sum(dim=-1)
        return x_i * softmax(score, index).unsqueeze(-1)


UNKNOWN: dict[str, type[Base]] = {
    "elu": scored(lambda j, i: F.elu(j + i)),
    "a difference": scored(lambda j, i: F.leaky_relu(j - i)),
    "twice": scored(lambda j, i: F.leaky_relu(j + j + i)),
    "keys alone": scored(lambda j, i: F.leaky_relu(j + j)),
    "queries alone": scored(lambda j, i: F.leaky_relu(i + i)),
    "a temperature": scored(lambda j, i: F.leaky_relu(j + i) / 2),
    "detached": scored(lambda j, i: F.leaky_relu(j + i).detach()),
    "detached keys": scored(lambda j, i: F.leaky_relu(j.detach() + i)),
    "a gradient of its own": scored(lambda j, i: Double.apply(j + i)),
    "a hook": scored(lambda j, i: F.leaky_relu(hooked(j + i))),
    "written": scored(lambda j, i: F.leaky_relu(j.clone().mul_(2) + i)),
    "rounded": scored(lambda j, i: torch.div(j + i, 0.5, rounding_mode="floor")),
    "other bits": scored(lambda j, i: F.leaky_relu((j + i).detach().view(torch.int64) / 2.0**62)),
    "a power": weighted(lambda x, a: x * a.unsqueeze(-1) ** 2),
    "weights of constants": weighted(lambda x, a: x * a.detach().unsqueeze(-1)),
    "constant rows": weighted(lambda x, a: x.detach() * a.unsqueeze(-1)),
    "a hook of weights": weighted(lambda x, a: x * hooked(a).unsqueeze(-1)),
    "a hook of messages": weighted(lambda x, a: hooked(x * a.unsqueeze(-1))),
    "one more": weighted(lambda x, a: x * a.unsqueeze(-1) + 1),
    "dropped rows": weighted(lambda x, a: F.dropout(x, 0.5) * a.unsqueeze(-1)),
    "heads turned": weighted(lambda x, a: x * a.flip(1).unsqueeze(-1)),
    "leaving": Turned,
    "rows of targets": Swapped,
    "a mean": Mean,
    "other rows": OtherRows,
    "cut otherwise": CutOtherwise,
    "keys joined to keys": KeysAlone,
}


class Product(Base):
    """Rows times a number of each edge, of which autograd may see another one."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = (x[edge_index[0]] * x[edge_index[1]]).sum(-1).sin()
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return self.times(x_j, weight.view(-1, 1))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def times(product: Callable[[Tensor, Tensor], Tensor]) -> type[Base]:
    return type("Times", (Product,), {"times": lambda self, x, w: product(x, w)})


PRODUCTS: dict[str, type[Base]] = {
    "a product": times(lambda x, w: w * x),
    "detached rows": times(lambda x, w: w * x.detach()),
    "detached numbers": times(lambda x, w: x * w.detach()),
    "a hook of rows": times(lambda x, w: hooked(x) * w),
    "a hook of numbers": times(lambda x, w: hooked(w) * x),
    "a gradient of its own": times(lambda x, w: Reversed.apply(x) * w),
    "rows with a hook": times(lambda x, w: hooked(x)),
    "rows reversed": times(lambda x, w: Reversed.apply(x)),
}


# Compared with one process ####################################################


def computed(kind: type[Base], data: Any, prepared: Callable[..., Any]) -> list[Tensor]:
    """Outputs and gradients of two passes in training, and an output in evaluation."""
    torch.manual_seed(0)
    layer, x = prepared(kind().double()), data.x.clone().requires_grad_()
    found = []
    for step in range(2):
        torch.manual_seed(step)
        out = layer(x, data.edge_index)
        out.sin().square().sum().backward()
        found.append(out)
    found.append(x.grad)
    found += [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    with torch.no_grad():
        found.append(layer.eval()(x, data.edge_index))
    return [whole(t.detach()) for t in found]


@contextmanager
def counted() -> Iterator[list[tuple[str, bool]]]:
    """Yields the classes of layers whose attention a kernel computes, and if gradients follow."""
    plain, calls = message_passing.attention_kernel, list[tuple[str, bool]]()

    def kernel(*args: Any) -> Any:
        calls.append((args[-1].split()[0], torch.is_grad_enabled()))
        return plain(*args)

    message_passing.attention_kernel = kernel  # type: ignore[assignment]
    try:
        yield calls
    finally:
        message_passing.attention_kernel = plain


def here(kinds: Collection[type[Base]], root: Path, policy: Any) -> list[list[Tensor]]:
    data = pyg_sar.load_partition(root)
    return [computed(kind, data, lambda layer: pyg_sar.distribute(layer, policy)) for kind in kinds]


def counted_here(*args: Any) -> Any:
    with counted() as calls:
        return here(*args), calls


def compare(kinds: Collection[type[Base]], graph: Data, found: list[list[Tensor]]) -> None:
    for kind, values in zip(kinds, found, strict=True):
        right = computed(kind, graph, lambda layer: layer)
        torch.testing.assert_close(values, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", [1, 2])
def test_attention_by_kernels(kernels: None, mode: int, root: Path, graph: Data) -> None:
    kinds = KNOWN if everything() else KNOWN[mode - 1 :: 2]
    with counted() as calls:
        for found in parts(here, 3, kinds, root, pyg_sar.SARPolicy(mode=mode)):
            compare(kinds, graph, found)
    for kind in kinds:
        assert [calls.count((kind.__name__, grad)) for grad in (True, False)] == [6, 3], kind


def test_on_workers(kernels: None, root: Path, graph: Data) -> None:
    kinds = some(KNOWN, "workers", 2)
    for found, calls in workers(counted_here, 3, kinds, root, pyg_sar.SARPolicy()):
        compare(kinds, graph, found)
        assert len(calls) == 3 * len(kinds)


def test_one_process(kernels: None, graph: Data) -> None:
    with counted() as calls:
        compare(KNOWN, graph, [computed(kind, graph, pyg_sar.distribute) for kind in KNOWN])
    assert calls


def checkpointed(kind: type[Base], data: Any, prepared: Callable[..., Any]) -> list[Tensor]:
    """Layers that run again in the backward pass, from the first pass on."""
    torch.manual_seed(0)
    layer, x = prepared(kind().double()), data.x.clone().requires_grad_()
    for step in range(2):
        torch.manual_seed(step)
        checkpoint(layer, x, data.edge_index, use_reentrant=False).sin().sum().backward()
    return [whole(t.detach()) for t in (x.grad, layer.lin.weight.grad)]


def each_here(found: Callable[..., Any], kinds: Sequence[type[Base]], root: Path) -> list[Any]:
    data = pyg_sar.load_partition(root)
    return [found(kind, data, pyg_sar.distribute) for kind in kinds]


def compare_each(
    found: Callable[..., Any], kinds: Sequence[type[Base]], root: Path, graph: Data
) -> None:
    right = [found(kind, graph, lambda layer: layer) for kind in kinds]
    for values in parts(each_here, 3, found, kinds, root):
        torch.testing.assert_close(values, right, rtol=1e-10, atol=1e-10)


def test_checkpoints(root: Path, graph: Data) -> None:
    compare_each(checkpointed, (Own, Dropped, Joined), root, graph)


def penalized(kind: type[Base], data: Any, prepared: Callable[..., Any]) -> list[Tensor]:
    """Gradients of the norm of a gradient."""
    torch.manual_seed(0)
    layer, x = prepared(kind().double()), data.x.clone().requires_grad_()
    out = layer(x, data.edge_index).sin()
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [whole(t.detach()) for t in (x.grad, *(p.grad for p in layer.parameters()))]


def test_second_derivatives(root: Path, graph: Data) -> None:
    compare_each(penalized, (Own, Second, Inner), root, graph)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("kinds", [UNKNOWN, PRODUCTS], ids=["attention", "products"])
def test_what_is_no_formula_of_the_kernels(
    kinds: dict[str, type[Base]], partitions: Partitions, graph: Data
) -> None:
    root = partitions(graph, 2, "random")
    with counted() as calls:
        for found in parts(here, 2, kinds.values(), root, pyg_sar.SARPolicy()):
            compare(kinds.values(), graph, found)
    assert all(not grad for _, grad in calls), "in evaluation detach() and hooks change nothing"


def test_without_kernels(root: Path, graph: Data) -> None:
    with counted() as calls:
        for found in parts(here, 3, [Own], root, pyg_sar.SARPolicy(kernels="off")):
            compare([Own], graph, found)
    assert not calls


# A message that changes #######################################################

SLOPE = [0.2]


class Global(Own):
    """Its slope is no attribute."""

    def score(self, alpha_j: Tensor, alpha_i: Tensor) -> Tensor:
        return F.leaky_relu(alpha_j + alpha_i, SLOPE[0])


class Attribute(Own):
    def __init__(self, slope: float = 0.2) -> None:
        super().__init__()
        self.slope = slope

    def score(self, alpha_j: Tensor, alpha_i: Tensor) -> Tensor:
        return F.leaky_relu(alpha_j + alpha_i, self.slope)


def changing(kind: type[Base], data: Any, prepared: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(0)
    layer, found = prepared(kind().double()), []
    for slope in (0.2, 0.7, 0.2):
        if kind is Attribute:
            layer.slope = slope
        else:
            SLOPE[0] = slope
        found.append(whole(layer(data.x, data.edge_index).detach()))
    SLOPE[0] = 0.2
    return found


def changing_here(kind: type[Base], root: Path) -> list[Tensor]:
    return changing(kind, pyg_sar.load_partition(root), pyg_sar.distribute)


@pytest.mark.parametrize("kind", [Attribute, Global])
def test_a_number_that_changes(kind: type[Base], kernels: None, root: Path, graph: Data) -> None:
    """Of an attribute, and of a global's: the message is looked at again."""
    right = changing(kind, graph, lambda layer: layer)
    for found in parts(changing_here, 3, kind, root):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
