"""The contract under the ways in which models are really used: between forward and backward,
in place, through hooks, with several graphs, after an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    ALL_POLICIES,
    BUDGET,
    CHANNELS,
    MODES,
    OUT,
    TOLERANCE,
    Job,
    Partitions,
    Sweep,
    assemble,
    error,
    make_graph,
    node_losses,
    threads,
)
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import PygSarError
from pyg_sar.message.layer_state import TileValue

WORLD = 3
REMADE = SARPolicy(mode=1, prefetch=0, message_budget=BUDGET)
CHUNKED = SARPolicy(mode=1, prefetch=0, message_budget=BUDGET, strategy="chunked")


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph()


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("use"))


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, WORLD, "random")


class Learned(MessagePassing):
    """Case 2 with parameters in the message."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__(aggr=aggr)
        self.lin = Linear(2 * CHANNELS, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], dim=-1)).tanh()


def check(title: str, model: torch.nn.Module, graph: Data, root: Path, **job: Any) -> None:
    sweep = Sweep(WORLD)
    sweep.add(title, Job(model.double(), root, **job), graph)
    sweep.check()


# Between forward and backward ################################################


@pytest.mark.parametrize("policy", [REMADE, CHUNKED], ids=["shards", "chunks"])
def test_parameters_changed_before_backward(policy: SARPolicy, root: Path):
    """A message remade with other parameters would give wrong gradients: torch's own error."""
    plain = Learned().double()

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(copy.deepcopy(plain), policy, view="local")
        out = layer(data.x.clone().requires_grad_(), data.edge_index)
        with torch.no_grad():
            layer.lin.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    threads(worker, WORLD)


def test_features_changed_before_backward(root: Path):
    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(Learned().double(), REMADE, view="local")
        x = data.x.clone()
        out = layer(x, data.edge_index)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    threads(worker, WORLD)


class Moody(MessagePassing):
    """What it computes depends on ``training``, also of a submodule."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = Linear(CHANNELS, OUT)
        self.inner = torch.nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        out = self.lin(x_j)
        out = out.tanh() if self.training else out.sin()
        return out.cos() if self.inner.training else out.exp()


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
def test_evaluation_before_backward(policy: SARPolicy, graph: Data, root: Path):
    """``model.eval()`` between forward and backward: the message is remade as it was."""
    plain = Moody().double()

    def run(layer: Any, data: Data, ids: Tensor, mean: Callable[[Tensor], Tensor]) -> Any:
        layer.train()
        layer.zero_grad()
        x = data.x.clone().requires_grad_()
        loss = mean(node_losses(layer(x, data.edge_index), ids))
        layer.eval()
        with torch.no_grad():
            layer(data.x, data.edge_index)
        loss.backward()
        assert not layer.training and not layer.inner.training
        return ids, x.grad, layer.lin.weight.grad

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(copy.deepcopy(plain), policy, view="local")
        return run(layer, data, data.n_id, pyg_sar.mean)

    _, x_grad, weight_grad = run(copy.deepcopy(plain), graph, torch.arange(40), torch.mean)
    workers = threads(worker, WORLD)
    assert error(assemble(((w[0], w[1]) for w in workers), 40), x_grad) <= TOLERANCE
    assert all(error(w[2], weight_grad) <= TOLERANCE for w in workers)


@pytest.mark.parametrize("policy", MODES, ids=str)
def test_backward_without_grad_mode(policy: SARPolicy, root: Path):
    """``backward()`` under ``no_grad`` is legal; so is another forward pass in between."""

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        torch_layer = pyg_sar.distribute(copy.deepcopy(plain), policy, view="local")
        grads = []
        for quiet in (False, True):
            torch_layer.zero_grad()
            first = torch_layer(data.x, data.edge_index).square().sum()
            torch_layer(data.x * 2, data.edge_index)
            with torch.set_grad_enabled(not quiet):
                first.backward()
            grads.append(torch_layer.lin.weight.grad.clone())
        return grads

    plain = Learned().double()
    for loud, quiet in threads(worker, WORLD):
        assert torch.equal(loud, quiet) and loud.abs().max() > 0


class InPlace(torch.nn.Module):
    """A nonlinearity in place on what the layer returned, as ``relu_`` and ``dropout_`` are."""

    def __init__(self, conv: MessagePassing) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.relu(self.conv(x, edge_index).mul_(1.5), inplace=True)


IN_PLACE: dict[str, Callable[[], MessagePassing]] = {
    "sum": lambda: Learned(),
    "mean": lambda: Learned("mean"),
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT, bias=False),
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT, root_weight=False),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, bias=False),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, bias=False),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, root_weight=False),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_outputs_changed_in_place(name: str, graph: Data, root: Path):
    """PyG allows it for these layers."""
    check(name, InPlace(IN_PLACE[name]()), graph, root)


class Checkpointed(torch.nn.Module):
    """A layer under ``torch.utils.checkpoint``, between two others or last."""

    def __init__(self, reentrant: bool, last: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before = Linear(CHANNELS, CHANNELS)
        self.conv = Learned()
        self.after = torch.nn.Identity() if last else Linear(OUT, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.before(x)
        x = checkpoint(self.conv, x, edge_index, use_reentrant=self.reentrant)
        return self.after(x)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, last: bool, graph: Data, root: Path):
    """Both kinds: all workers exchange alike, and gradients are summed once, nested or not."""
    sweep = Sweep(WORLD)
    model = Checkpointed(reentrant, last).double()
    sweep.add(f"reentrant {reentrant}", Job(model, root, policies=MODES), graph)
    sweep.check(timeout=20.0)


def test_backward_after_a_backward_that_failed(graph: Data, root: Path):
    """A backward pass that fails leaves nothing behind that would spoil the next one."""
    plain = Learned().double()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(
            torch.nn.ModuleDict({"conv": copy.deepcopy(plain)}), view="local"
        )
        conv: Any = layer["conv"]

        def loss() -> Tensor:
            return pyg_sar.mean(node_losses(conv(data.x, data.edge_index), data.n_id))

        loss().backward()
        once = conv.lin.weight.grad.clone()

        def fail(gradient: Tensor) -> Tensor:
            raise KeyError("in a hook")

        handle = conv.lin.bias.register_hook(fail)
        with pytest.raises(KeyError, match="in a hook"):
            loss().backward()
        handle.remove()
        conv.zero_grad()
        loss().backward()
        return once, conv.lin.weight.grad

    for once, again in threads(worker, WORLD):
        assert error(again, once) <= TOLERANCE


# Inputs ######################################################################


class Shaped(torch.nn.Module):
    """Inputs that are not fresh contiguous tensors."""

    def __init__(self, conv: MessagePassing, how: str) -> None:
        super().__init__()
        self.conv, self.how = conv, how

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.how == "transposed":
            return self.conv(x.t().contiguous().t(), edge_index)
        if self.how == "strided":
            return self.conv(x.repeat_interleave(2, dim=1)[:, ::2], edge_index)
        if self.how == "expanded":
            return self.conv(x.mean(1, keepdim=True).expand(-1, CHANNELS), edge_index)
        if self.how == "constant":
            return self.conv(torch.ones_like(x), edge_index) + 0 * x[:, :1]
        if self.how == "pair":
            return self.conv((x.sin(), x.cos()), edge_index)
        if self.how == "same pair":
            return self.conv((x, x), edge_index)
        return self.conv((x, None), edge_index)


@pytest.mark.parametrize("how", ["transposed", "strided", "expanded", "constant"])
def test_inputs_of_any_layout(how: str, graph: Data, root: Path):
    for conv in (gnn.SAGEConv(CHANNELS, OUT), gnn.GATConv(CHANNELS, OUT), Learned("max")):
        check(f"{conv}, {how}", Shaped(conv, how), graph, root, policies=MODES)


@pytest.mark.parametrize("how", ["pair", "same pair", "no target"])
def test_pairs_of_inputs(how: str, graph: Data, root: Path):
    """Sources and targets with features of their own, or targets without any."""
    width = (CHANNELS, CHANNELS)
    convs = [gnn.SAGEConv(width, OUT), gnn.GraphConv(width, OUT)]
    if how != "no target":
        convs += [gnn.GATConv(width, OUT, add_self_loops=False), gnn.TransformerConv(width, OUT)]
    for conv in convs:
        check(f"{conv}, {how}", Shaped(conv, how), graph, root, policies=MODES)


class Tables(MessagePassing):
    """Arguments of the message that are no node or edge tensors: scalars, tables, flags."""

    def __init__(self, rows: int) -> None:
        super().__init__(aggr="sum")
        self.table = Parameter(torch.rand(rows, CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scale = self.table.mean()
        return self.propagate(
            edge_index, x=x, table=self.table.tanh(), scale=scale, power=2, flag=True, no=None
        )

    def message(
        self, x_j: Tensor, table: Tensor, scale: Tensor, power: int, flag: bool, no: Tensor | None
    ) -> Tensor:
        assert flag and no is None
        return x_j.pow(power) * table.mean(0) * scale


def test_arguments_that_are_no_rows(graph: Data, root: Path):
    """Also where a table happens to have as many rows as some worker has edges or nodes."""
    sizes = threads(lambda: pyg_sar.load_partition(root, view="local"), WORLD)
    for rows in {3, sizes[0].num_edges, sizes[1].num_nodes}:
        check(f"{rows} rows", Tables(rows), graph, root, policies=MODES)


# Hooks #######################################################################


class Gated(MessagePassing):
    """Has every hook: edge_update, message, aggregate, propagate."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).sum(-1, keepdim=True).sigmoid()

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate * self.lin(x_j)


def hook_message_input(layer: MessagePassing, inputs: Any) -> Any:
    (arguments,) = inputs
    return ({**arguments, "x_j": arguments["x_j"].sin()},)


def hook_propagate_input(layer: MessagePassing, inputs: Any) -> Any:
    edge_index, size, arguments = inputs
    return edge_index, size, {**arguments, "x": arguments["x"].sin()}


def hook_edge_input(layer: MessagePassing, inputs: Any) -> Any:
    edge_index, size, arguments = inputs
    return edge_index, size, {**arguments, "x_j": arguments["x_j"].sin()}


def double(layer: MessagePassing, inputs: Any, out: Tensor) -> Tensor:
    return 2 * out


HOOKS: dict[str, tuple[str, Any]] = {
    "message, before": ("register_message_forward_pre_hook", hook_message_input),
    "message, after": ("register_message_forward_hook", double),
    "propagate, before": ("register_propagate_forward_pre_hook", hook_propagate_input),
    "propagate, after": ("register_propagate_forward_hook", double),
    "aggregate, after": ("register_aggregate_forward_hook", double),
    "edge_update, before": ("register_edge_update_forward_pre_hook", hook_edge_input),
    "edge_update, after": ("register_edge_update_forward_hook", double),
}


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_pyg(name: str, graph: Data, root: Path):
    """Message passing hooks see and change what they do in PyG."""
    method, hook = HOOKS[name]
    hooked = Gated().double()
    plain = copy.deepcopy(hooked)
    getattr(hooked, method)(hook)
    sweep = Sweep(WORLD)
    sweep.add(name, Job(hooked, root, policies=MODES), graph)
    bare = Sweep(WORLD)
    bare.add(name, Job(plain, root), graph)
    assert error(sweep.expected[0].out, bare.expected[0].out) > 1e-3, "the hook does something"
    sweep.check()


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_a_hook_that_mixes_edges_is_refused(root: Path):
    """Of ``edge_update``, whose result a hook sees for this worker's edges alone."""

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        for policy in MODES:
            layer: Any = pyg_sar.distribute(
                gnn.GATConv(CHANNELS, OUT).double(), policy, view="local"
            )
            layer.register_edge_update_forward_hook(lambda _, inputs, out: out - out.mean(0))
            with pytest.raises(PygSarError, match="mixes edges"):
                layer(data.x, data.edge_index)

    threads(worker, WORLD)


def test_module_hooks(graph: Data, root: Path):
    """torch's own hooks on a converted layer: once per call, with tensors of this worker."""
    plain = gnn.GATConv(CHANNELS, OUT).double()

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(copy.deepcopy(plain), REMADE, view="local")
        calls: list[str] = []
        layer.register_forward_pre_hook(lambda *_: calls.append("before"))
        layer.register_forward_hook(lambda *_: calls.append("after"))
        layer.register_full_backward_hook(lambda m, i, o: calls.append("backward"))
        layer(data.x.clone().requires_grad_(), data.edge_index).sum().backward()
        assert calls == ["before", "after", "backward"]

    threads(worker, WORLD)


# Several graphs, errors ######################################################


class OverSizes(MessagePassing):
    """Divides by the number of nodes of the whole graph, whichever that is."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, size_j: int) -> Tensor:
        return x_j / size_j


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("rows", REMADE), ("rows", SARPolicy(mode=3)), ("sizes", SARPolicy(mode=3))],
)
def test_one_model_on_two_graphs(
    kind: str, policy: SARPolicy, partitions: Partitions, graph: Data, root: Path
):
    """Training on one partitioned graph and evaluating on another, by turns."""
    other = make_graph(33, 120, seed=9)
    second = partitions(other, WORLD, "metis")
    layer = gnn.GCNConv(CHANNELS, OUT).double() if kind == "rows" else OverSizes()

    def worker() -> Any:
        first, then = (
            pyg_sar.load_partition(root, view="local"),
            pyg_sar.load_partition(second, view="local"),
        )
        mine = pyg_sar.distribute(copy.deepcopy(layer), policy, view="local")
        return [(d.n_id, mine(d.x, d.edge_index).detach()) for d in (first, then, first, then)]

    for step, shards in enumerate(zip(*threads(worker, WORLD), strict=True)):
        data = (graph, other)[step % 2]
        expected = layer(data.x, data.edge_index).detach()
        assert error(assemble(shards, data.num_nodes), expected) <= TOLERANCE


def test_a_layer_survives_an_error_in_its_message(graph: Data, tmp_path: Path):
    """Parameters, attributes, scopes and caches are as before, and the next call is right."""

    class Fragile(Learned):
        def __init__(self) -> None:
            super().__init__()
            self.fails = [False]
            self.kept: Tensor | None = None

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            self.kept = x_j
            if self.fails[0]:
                raise ArithmeticError("once")
            return super().message(x_i, x_j)

    root = Partitions(tmp_path)(graph, 1)
    data = pyg_sar.load_partition(root, view="local")
    plain = Fragile().double()
    layer: Any = pyg_sar.distribute(copy.deepcopy(plain), REMADE, view="local")
    parameters = dict(layer.named_parameters())
    for moment in ("analysis", "forward", "backward"):
        x = data.x.clone().requires_grad_()
        layer.fails[0] = moment != "backward"
        with pytest.raises(ArithmeticError, match="once"):
            out = layer(x, data.edge_index)
            layer.fails[0] = True
            out.sum().backward()
        layer.fails[0] = False
        assert all(p is parameters[name] for name, p in layer.named_parameters())
        assert all(type(p) is Parameter for p in layer.parameters())
        assert layer.kept is None or isinstance(layer.kept, TileValue)  # nothing of a tile
        assert data.edge_index.plan.context.layer == ""
        assert torch.is_grad_enabled()
        out = layer(x, data.edge_index)
        assert error(out, plain(graph.x, graph.edge_index)[data.n_id]) <= TOLERANCE


def test_layers_in_containers_of_all_kinds(graph: Data, root: Path):
    """PyG's ``Sequential`` and ready-made models are converted like any module."""
    models: dict[str, torch.nn.Module] = {
        "sequential": gnn.Sequential(
            "x, edge_index",
            [
                (gnn.GCNConv(CHANNELS, 8), "x, edge_index -> x"),
                torch.nn.ReLU(),
                (gnn.GATConv(8, OUT), "x, edge_index -> x"),
            ],
        ),
        "GCN": gnn.models.GCN(CHANNELS, 8, 2, OUT, norm="batch", jk="cat"),
        "GraphSAGE": gnn.models.GraphSAGE(CHANNELS, 8, 2, OUT, norm="layer",
                                          norm_kwargs={"mode": "node"}),
        "GAT": gnn.models.GAT(CHANNELS, 8, 3, OUT, heads=2, v2=True, jk="lstm"),
        "GIN": gnn.models.GIN(CHANNELS, 8, 2, OUT, norm="batch_norm", train_eps=True),
        "EdgeCNN": gnn.models.EdgeCNN(CHANNELS, 8, 2, OUT),
        "JumpingKnowledge": gnn.models.GIN(CHANNELS, 8, 3, OUT, jk="max"),
    }  # fmt: skip
    sweep = Sweep(WORLD)
    for name, model in models.items():
        sweep.add(name, Job(model.double(), root, policies=MODES[:1]), graph)
    sweep.check()


def tripled(inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: Any = None) -> Tensor:
    out = inputs.new_zeros(dim_size, inputs.size(1))
    return 3 * out.index_add(0, index, inputs)


def doubled(inputs: Tensor) -> Tensor:
    return inputs * 2


def squared(x_j: Tensor) -> Tensor:
    return x_j.square()


METHODS = {"message": squared, "aggregate": tripled, "update": doubled}


def with_own_method(root: Path, name: str, moment: int) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    torch.manual_seed(0)
    layer = pyg_sar.distribute(gnn.SAGEConv(CHANNELS, OUT, aggr="sum").double(), view="local")
    for call in range(3):
        if call == moment:
            setattr(layer, name, METHODS[name])
        x = data.x.clone().requires_grad_()
        out = layer(x, data.edge_index)
        out.square().sum().backward()
    return data.n_id, out.detach(), x.grad


@pytest.mark.parametrize("moment", [0, 2])
@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_layer_itself(name: str, moment: int, graph: Data, root: Path):
    """Put there before the first call, or after calls without them."""
    torch.manual_seed(0)
    plain = gnn.SAGEConv(CHANNELS, OUT, aggr="sum").double()
    setattr(plain, name, METHODS[name])
    x = graph.x.clone().requires_grad_()
    expected = plain(x, graph.edge_index)
    expected.square().sum().backward()
    for ids, out, gradient in threads(with_own_method, WORLD, root, name, moment):
        assert error(out, expected.detach()[ids]) <= TOLERANCE
        assert error(gradient, x.grad[ids]) <= TOLERANCE
