"""The contract under the ways in which models are really used: between forward and backward,
in place, through hooks, with several graphs, after an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from combinations import some
from contract_case import Nonlinear
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
    error,
    make_graph,
    node_losses,
    single_process,
    whole,
    workers,
)
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.errors import WorkerError
from pyg_sar.message.layer_state import TileValue

WORLD = 3
REMADE = SARPolicy(mode=1, prefetch=0, message_budget=BUDGET)
CHUNKED = SARPolicy(mode=1, prefetch=0, message_budget=BUDGET, strategy="chunked")


def check(
    models: dict[str, torch.nn.Module],
    graph: Data,
    root: Path,
    backend: str | None = None,
    timeout: float = 120.0,
    policies: Sequence[SARPolicy] = ALL_POLICIES,
) -> None:
    """Compares models with one process, all in one launch."""
    sweep = Sweep(WORLD)
    for title, model in models.items():
        sweep.add(title, Job(model.double(), root, policies=policies), graph)
    sweep.check(backend, timeout=timeout)


# Between forward and backward ################################################


def test_inputs_changed_before_backward(root: Path):
    """A message remade with others would give wrong gradients: torch's own error, and where."""

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for policy in (REMADE, CHUNKED):
            for change in ("parameter", "features"):
                layer: Any = pyg_sar.distribute(Nonlinear().double(), policy)
                x = data.x.clone()
                out = layer(x, data.edge_index)
                with torch.no_grad():
                    (x if change == "features" else layer.lin.weight).mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace op") as caught:
                    out.sum().backward()
                assert "in the backward pass of Nonlinear" in "\n".join(caught.value.__notes__)

    workers(worker, WORLD)


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


def test_evaluation_before_backward(graph: Data, root: Path):
    """``model.eval()`` between forward and backward: the message is remade as it was."""
    plain = Moody().double()

    def run(layer: Any, data: Data) -> Any:
        layer.train()
        layer.zero_grad()
        x = data.x.clone().requires_grad_()
        loss = node_losses(layer(x, data.edge_index)).mean()
        layer.eval()
        with torch.no_grad():
            layer(data.x, data.edge_index)
        loss.backward()
        assert not layer.training and not layer.inner.training
        return whole(x.grad), layer.lin.weight.grad

    def worker() -> Any:
        data = pyg_sar.load_partition(root)
        return [
            run(pyg_sar.distribute(copy.deepcopy(plain), policy), data) for policy in ALL_POLICIES
        ]

    expected = run(copy.deepcopy(plain), graph)
    for by_policy in workers(worker, WORLD):
        for policy, found in zip(ALL_POLICIES, by_policy, strict=True):
            assert max(map(error, found, expected)) <= TOLERANCE, policy


def test_backward_without_grad_mode(root: Path):
    """``backward()`` under ``no_grad`` is legal; so is another forward pass in between."""
    plain = Nonlinear().double()

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        for policy in MODES:
            layer: Any = pyg_sar.distribute(copy.deepcopy(plain), policy)
            grads = []
            for quiet in (False, True):
                layer.zero_grad()
                first = layer(data.x, data.edge_index).square().sum()
                layer(data.x * 2, data.edge_index)
                with torch.set_grad_enabled(not quiet):
                    first.backward()
                grads.append(layer.lin.weight.grad.clone())
            assert torch.equal(*grads) and grads[0].abs().max() > 0

    workers(worker, WORLD)


class InPlace(torch.nn.Module):
    """A nonlinearity in place on what the layer returned, as ``relu_`` and ``dropout_`` are."""

    def __init__(self, conv: MessagePassing) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return F.relu(self.conv(x, edge_index).mul_(1.5), inplace=True)


IN_PLACE: dict[str, Callable[[], MessagePassing]] = {
    "sum": lambda: Nonlinear(),
    "mean": lambda: Nonlinear("mean"),
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT, bias=False),
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT, root_weight=False),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, bias=False),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, bias=False),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, root_weight=False),
}


def test_outputs_changed_in_place(graph: Data, root: Path):
    """PyG allows it for these layers."""
    check({name: InPlace(make()) for name, make in IN_PLACE.items()}, graph, root)


class Checkpointed(torch.nn.Module):
    """A layer under ``torch.utils.checkpoint``, between two others or last."""

    def __init__(self, reentrant: bool, last: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.before = Linear(CHANNELS, CHANNELS)
        self.conv = Nonlinear()
        self.after = torch.nn.Identity() if last else Linear(OUT, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.before(x)
        x = checkpoint(self.conv, x, edge_index, use_reentrant=self.reentrant)
        return self.after(x)


def test_activation_checkpointing_where_a_worker_has_no_nodes(tmp_path: Path):
    """It asks how gradients of no edges look: within a checkpoint, but not by computing again."""
    data = make_graph(seed=6)
    part = torch.arange(data.num_nodes) % 2 * 2
    pyg_sar.write_partitions(data, 3, tmp_path / "3", part)
    policies = [SARPolicy(mode=mode, kernels="off") for mode in (1, 2)]
    models = {f"{reentrant=}": Checkpointed(reentrant, False) for reentrant in (False, True)}
    check(models, data, tmp_path / "3", timeout=20.0, policies=policies)


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


def test_inputs_of_any_layout(graph: Data, root: Path):
    models = {
        f"{conv}, {how}": Shaped(conv, how)
        for how in ("transposed", "strided", "expanded", "constant")
        for conv in (gnn.SAGEConv(CHANNELS, OUT), gnn.GATConv(CHANNELS, OUT), Nonlinear("max"))
    }
    check(models, graph, root, policies=MODES)


def test_pairs_of_inputs(graph: Data, root: Path):
    """Sources and targets with features of their own, or targets without any."""
    width, models = (CHANNELS, CHANNELS), {}
    for how in ("pair", "same pair", "no target"):
        convs = [gnn.SAGEConv(width, OUT), gnn.GraphConv(width, OUT)]
        if how != "no target":
            convs.append(gnn.GATConv(width, OUT, add_self_loops=False))
            convs.append(gnn.TransformerConv(width, OUT))
        models |= {f"{conv}, {how}": Shaped(conv, how) for conv in convs}
    check(models, graph, root, "parts", policies=MODES)


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
    """Also where a table happens to have as many rows as there are nodes or edges: right, or not.

    A table of as many rows as a worker has is taken for its own rows, and refused.
    """

    def rows_here() -> tuple[int, int]:
        data = pyg_sar.load_partition(root)
        return data.x.to_local().size(0), data.edge_index.to_local().size(1)

    (nodes, _), (_, edges), _ = workers(rows_here, WORLD)
    check({"3 rows": Tables(3)}, graph, root, policies=MODES)
    for rows in (nodes, edges, graph.num_nodes, graph.num_edges):
        try:
            check({f"{rows} rows": Tables(rows)}, graph, root, "parts", policies=MODES)
        except WorkerError as error:
            assert "Tables" in str(error) and "DistributedIndexError" in str(error)


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


def double(layer: MessagePassing, inputs: Any, out: Tensor) -> Tensor:
    return 2 * out


def hook_propagate_input(layer: MessagePassing, inputs: Any) -> Any:
    edge_index, size, arguments = inputs
    return edge_index, size, {**arguments, "x": arguments["x"] - arguments["x"].mean(0)}


def hook_edge_input(layer: MessagePassing, inputs: Any) -> Any:
    edge_index, size, arguments = inputs
    return edge_index, size, {**arguments, "x_j": arguments["x_j"] - arguments["x_j"].mean(0)}


def centred(layer: MessagePassing, inputs: Any, out: Tensor) -> Tensor:
    """Tensors are of the whole graph: of all its nodes, or edges."""
    return out - out.mean(0)


HOOKS: dict[str, tuple[str, Any]] = {
    "message, before": ("register_message_forward_pre_hook", hook_message_input),
    "message, after": ("register_message_forward_hook", double),
    "message, sums": ("register_message_forward_hook", lambda _, given, out: out.cumsum(0) / 9),
    "aggregate, after": ("register_aggregate_forward_hook", double),
    "aggregate, centred": ("register_aggregate_forward_hook", centred),
    "propagate, before": ("register_propagate_forward_pre_hook", hook_propagate_input),
    "propagate, after": ("register_propagate_forward_hook", centred),
    "edge_update, before": ("register_edge_update_forward_pre_hook", hook_edge_input),
    "edge_update, after": ("register_edge_update_forward_hook", centred),
}


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_hooks_of_pyg(graph: Data, root: Path):
    """Message passing hooks see and change what they do in PyG."""
    plain, sweep = Gated().double(), Sweep(WORLD)
    out = single_process(plain, graph).out
    for name, (method, hook) in HOOKS.items():
        hooked = copy.deepcopy(plain)
        getattr(hooked, method)(hook)
        sweep.add(name, Job(hooked, root, policies=some(MODES, name, 2)), graph)
        assert error(sweep.expected[-1].out, out) > 1e-3, f"{name} does something"
    sweep.check()


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
        first, then = pyg_sar.load_partition(root), pyg_sar.load_partition(second)
        mine = pyg_sar.distribute(copy.deepcopy(layer), policy)
        return [whole(mine(d.x, d.edge_index).detach()) for d in (first, then, first, then)]

    expected = [layer(d.x, d.edge_index).detach() for d in (graph, other)]
    for found in workers(worker, WORLD):
        assert max(map(error, found, 2 * expected)) <= TOLERANCE


def test_a_layer_survives_an_error_in_its_message(graph: Data, tmp_path: Path):
    """Parameters, attributes, scopes and caches are as before, and the next call is right."""

    class Fragile(Nonlinear):
        fails: ClassVar = [False]  # Of the class: its own attributes are the forward pass's.

        def __init__(self) -> None:
            super().__init__()
            self.kept: Tensor | None = None

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            self.kept = x_j
            if self.fails[0]:
                raise ArithmeticError("once")
            return super().message(x_i, x_j)

    root = Partitions(tmp_path)(graph, 1)
    data = pyg_sar.load_partition(root)
    plain = Fragile().double()
    layer: Any = pyg_sar.distribute(copy.deepcopy(plain), REMADE)
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
        assert data.edge_index.to_local().plan.context.layer == ""
        assert torch.is_grad_enabled()
        out = layer(x, data.edge_index)
        assert error(out, plain(graph.x, graph.edge_index)) <= TOLERANCE


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
    check(models, graph, root, "parts", policies=MODES[:1])
