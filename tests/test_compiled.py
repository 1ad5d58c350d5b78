"""``torch.jit.script``, ``torch.compile`` and ``torch.export``: functions, layers, workers."""

from __future__ import annotations

import copy
import inspect
import io
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from oracle import Partitions, whole
from torch import Tensor
from torch._dynamo.utils import counters
from torch.export import Dim
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.comm.group import finalize
from pyg_sar.functional import attention, gather_sum, sorted_edges
from pyg_sar.kernels import fallback, ops
from pyg_sar.nn.one_process import FEWEST_EDGES

NODES, EDGES, WIDTH = 30, 170, 6
needs_kernels = pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")


@pytest.fixture(autouse=True)
def compile_anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graph(nodes: int = NODES, edges: int = EDGES) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Node rows, edges with loops and duplicates among them, their weights and features."""
    draw = torch.Generator().manual_seed(nodes)
    edge_index = torch.randint(nodes - 3, (2, edges), generator=draw)
    edge_index[:, :4] = torch.tensor([[1, 1, 2, 0], [1, 1, 2, 3]])
    x = torch.randn(nodes, WIDTH, generator=draw, dtype=torch.float64)
    features = torch.randn(edges, 3, generator=draw, dtype=torch.float64)
    return x, edge_index, features[:, 0].abs() + 0.1, features


def gradients(f: Callable[..., Tensor], *given: Tensor, over: Any = ()) -> list[Tensor]:
    """Output, and gradients of the floating-point arguments and of parameters."""
    given = tuple(t.clone().requires_grad_(t.is_floating_point()) for t in given)
    out = f(*given)
    leaves = [*(t for t in given if t.requires_grad), *over]
    found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        # Of sums that are 0 in exact arithmetic, both have rounding alone.
        scale = max(float(other.abs().max()), 1e-2)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * scale)


# Functions ####################################################################


def by_kernel(x: Tensor, edge_index: Tensor, weight: Tensor, attr: Tensor) -> Tensor:
    source, offsets, edges = sorted_edges(edge_index, x.size(0), x.size(0))
    x = gather_sum(x, source, offsets, weight[edges]).view(-1, 2, 3)
    key = x.sum(-1)
    flat = torch.ones(3, 2, dtype=x.dtype)
    x = attention("additive", x, key, key, source, offsets, edges, None, attr, flat, 0.2)
    keys = torch.arange(edge_index.size(1))
    x = attention(
        "dot", x, None, x, source, offsets, edges, scale=0.5, drop_key=keys, seed=7, p=0.3
    )
    att = torch.linspace(-1, 1, 12, dtype=x.dtype).view(2, 2, 3)
    x = attention("gatv2", x, None, x, source, offsets, att=att[0], slope=0.2)
    x = attention("mixed", x, None, x, source, offsets, att=att, slope=0.2)
    one = x[:, :1]
    return attention("tanh", one, key[:, :1], key[:, 1:], source, offsets).flatten(1)


def by_pytorch(x: Tensor, edge_index: Tensor, weight: Tensor, attr: Tensor) -> Tensor:
    source, offsets, edges = sorted_edges(edge_index, x.size(0), x.size(0), False)
    x = gather_sum(x, source, offsets, weight[edges], False).view(-1, 2, 3)
    key = x.sum(-1)
    keys = torch.arange(edge_index.size(1))
    flat = torch.ones(3, 2, dtype=x.dtype)
    x = attention(
        "additive",
        x,
        key,
        key,
        source,
        offsets,
        edges,
        edge_attr=attr,
        edge_weight=flat,
        slope=0.2,
        drop_key=keys,
        seed=4611686018427387909,
        p=0.4,
        native=False,
    )
    return attention("dot", x, None, x, source, offsets, native=False).flatten(1)


FUNCTIONS = {"PyTorch": by_pytorch, "kernels": by_kernel}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_script(name: str) -> None:
    expected = gradients(FUNCTIONS[name], *graph())
    scripted = torch.jit.script(FUNCTIONS[name])
    for _ in range(3):  # it is optimised after the first calls
        assert_equal(gradients(scripted, *graph()), expected)
    stored = io.BytesIO()
    torch.jit.save(scripted, stored)
    stored.seek(0)
    assert_equal(gradients(torch.jit.load(stored), *graph()), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compile_once_for_all_sizes(name: str) -> None:
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for nodes, edges in ((30, 170), (41, 230), (20, 300)):
        given = graph(nodes, edges)
        assert_equal(gradients(compiled, *given), gradients(FUNCTIONS[name], *given))
    assert counters["stats"]["unique_graphs"] == 1


class Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor, attr: Tensor) -> Tensor:
        return self.function(x, edge_index, weight, attr)


@pytest.mark.parametrize("strict", [False, True])
def test_functions_export(strict: bool) -> None:
    nodes, edges = Dim("nodes", max=2**31 - 1), Dim("edges", max=2**31 - 1)
    shapes = ({0: nodes}, {1: edges}, {0: edges}, {0: edges})
    module = Module(by_kernel)
    found = torch.export.export(module, graph(), dynamic_shapes=shapes, strict=strict)
    for given in (graph(), graph(41, 230)):
        torch.testing.assert_close(found.module()(*given), by_kernel(*given), rtol=1e-12, atol=0)


def test_all_of_the_fallback_is_torchscript() -> None:
    """By PyTorch, compiled, the seed's words are those of Python's numbers of any length."""
    functions = inspect.getmembers(fallback, inspect.isfunction)
    scripted = {n: torch.jit.script(f) for n, f in functions if f.__module__ == fallback.__name__}
    assert {"attention_", "attention_backward_", "gather_sum_", "transpose"} <= scripted.keys()

    def split(seed: int) -> tuple[int, int]:
        z = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        return z & 0xFFFFFFFF, z >> 32

    draw = torch.Generator().manual_seed(0)
    for seed in [0, 1, -1, 2**63 - 1, *torch.randint(2**62, (50,), generator=draw).tolist()]:
        assert fallback.split_seed(seed) == scripted["split_seed"](seed) == split(seed)
    assert fallback.split_seed(2**64 - 3) == split(2**64 - 3)


def test_wrong_arguments_are_named_by_scripted_code_too() -> None:
    x, edge_index, *_ = graph()
    source, offsets, _ = sorted_edges(edge_index, NODES, NODES)
    with pytest.raises(torch.jit.Error, match="each of the 170 edges"):
        torch.jit.script(gather_sum)(x, source, offsets, torch.ones(3))
    value = x.view(-1, 2, 3)
    with pytest.raises(torch.jit.Error, match="one of \\('additive'"):
        torch.jit.script(attention)("cosine", value, None, value, source, offsets)


def test_no_kernel_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a compiler: TorchScript sees the functions of PyTorch alone."""
    monkeypatch.setattr(ops, "why_missing", lambda: "not built")
    monkeypatch.setattr(torch.jit._state, "_jit_caching_layer", weakref.WeakKeyDictionary())
    assert not ops.built
    scripted = torch.jit.script(by_kernel)
    assert "pyg_sar::" not in str(scripted.inlined_graph)
    assert_equal(gradients(scripted, *graph()), gradients(by_kernel, *graph()))
    with pytest.raises(RuntimeError, match="no C\\+\\+ kernels"):
        sorted_edges(graph()[1], NODES, NODES, native=True)


# Layers #######################################################################

LAYERS: dict[str, tuple[Callable[[], Any], str]] = {
    "SAGEConv": (lambda: gnn.SAGEConv(WIDTH, 4), ""),
    "SAGEConv max": (lambda: gnn.SAGEConv(WIDTH, 4, aggr="max"), ""),
    "GINConv": (lambda: gnn.GINConv(torch.nn.Linear(WIDTH, 4), train_eps=True), ""),
    "TAGConv": (lambda: gnn.TAGConv(WIDTH, 4, K=2), "weight"),
    "TransformerConv": (lambda: gnn.TransformerConv(WIDTH, 4, heads=2, edge_dim=3), "attr"),
    "GCNConv": (lambda: gnn.GCNConv(WIDTH, 4), "weight"),
    "GATConv": (lambda: gnn.GATConv(WIDTH, 4, heads=2, edge_dim=3, residual=True), "attr"),
    "GATv2Conv": (lambda: gnn.GATv2Conv(WIDTH, 4, heads=2), ""),
    "EdgeConv": (lambda: gnn.EdgeConv(torch.nn.Linear(2 * WIDTH, 4)), ""),
    "GraphSAGE": (lambda: gnn.GraphSAGE(WIDTH, 8, 2, norm="BatchNorm", jk="cat"), ""),
    "GAT": (lambda: gnn.GAT(WIDTH, 8, 2, heads=2), ""),
}


def layer(name: str, edges: int = EDGES) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """PyG's layer, the same converted, and the arguments."""
    make, wants = LAYERS[name]
    torch.manual_seed(0)
    plain = make().double()
    x, edge_index, weight, attr = graph(edges=edges)
    more = {"": (), "weight": (weight,), "attr": (attr,)}[wants]
    return plain, pyg_sar.distribute(copy.deepcopy(plain)), (x, edge_index, *more)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch, of PyG's loops
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compile_as_pygs(name: str) -> None:
    """With so many edges that they run by kernel where they are not compiled."""
    plain, model, given = layer(name, FEWEST_EDGES)
    compiled = torch.compile(model, backend="aot_eager")
    found = gradients(compiled, *given, over=list(model.parameters()))
    assert_equal(found, gradients(plain, *given, over=list(plain.parameters())))


def test_layers_compile_in_one_graph_and_are_exported() -> None:
    plain, model, given = layer("GraphSAGE")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for edges in (EDGES, FEWEST_EDGES):
        x, edge_index, *_ = graph(edges=edges)
        expected = gradients(plain, x, edge_index, over=list(plain.parameters()))
        assert_equal(gradients(compiled, x, edge_index, over=list(model.parameters())), expected)
    plain.load_state_dict(model.state_dict())  # running statistics
    exported = torch.export.export(model.eval(), given, strict=False)
    expected_out = plain.eval()(*given)
    torch.testing.assert_close(exported.module()(*given), expected_out, rtol=1e-12, atol=1e-12)


def test_distributed_models_are_not_scripted() -> None:
    """What the error proposes works, and the model stays as it is."""
    plain, model, given = layer("GraphSAGE")
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(TypeError, match=r"SAGEConv 'convs\.0'.*plain.load_state_dict"):
        torch.jit.script(model)
    assert [type(m) for m in model.modules()] == kinds
    other = LAYERS["GraphSAGE"][0]().double()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.jit.script(other)(*given), plain(*given))


def test_attention_weights_are_pygs() -> None:
    x, edge_index, *_ = graph()
    for plain in (gnn.GATConv(WIDTH, 4, add_self_loops=False), gnn.TransformerConv(WIDTH, 4)):
        model = pyg_sar.distribute(copy.deepcopy(plain.double()))
        compiled = torch.compile(model, backend="eager")
        out, (_, weights) = compiled(x, edge_index, return_attention_weights=True)
        expected, (_, others) = plain(x, edge_index, return_attention_weights=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights, others)


# Workers ######################################################################


class Net(torch.nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.norm = kind(WIDTH, 8), gnn.BatchNorm(8)
        self.second = kind(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        x = self.norm(x).relu() * 2
        x = self.second(x, edge_index)
        return x.sigmoid() + 1


def compiled_worker(root: Path, kind: Any) -> tuple[list[Tensor], list[Tensor], int]:
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(Net(kind).double())
    expected = gradients(lambda x: model(x, data.edge_index), data.x, over=list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager")
    found = gradients(lambda x: compiled(x, data.edge_index), data.x, over=list(model.parameters()))
    return [*map(whole, found)], [*map(whole, expected)], counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("kind", [gnn.SAGEConv, gnn.GATConv])
def test_models_of_workers_stay_as_they_are(kind: Any, tmp_path: Path) -> None:
    """Compiled graphs would lose the gradients of node tensors; later ones are compiled again."""
    x, edge_index, *_ = graph()
    partitions, data = Partitions(tmp_path), Data(x=x, edge_index=edge_index)
    for found, expected, graphs in pyg_sar.launch(compiled_worker, 2, partitions(data, 2), kind):
        assert_equal(found, expected)
        assert graphs == 0
    found, expected, graphs = compiled_worker(partitions(data, 1), kind)
    assert_equal(found, expected)
    finalize()
    before = counters["stats"]["unique_graphs"]
    torch.compile(lambda t: t.sin() + 1, backend="eager")(x)
    assert counters["stats"]["unique_graphs"] == before + 1
