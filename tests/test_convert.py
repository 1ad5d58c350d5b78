"""``distribute``: what it changes, what it keeps, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    CHANNELS,
    OUT,
    TOLERANCE,
    Partitions,
    alike,
    assert_small,
    both,
    error,
    errors,
    node_losses,
    one_pass,
    single_process,
    whole,
    workers,
)
from torch import Tensor
from torch.nn import Linear
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.explain import (
    AttentionExplainer,
    Explainer,
    GraphMaskExplainer,
)
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import DistMessagePassing, SARPolicy

WORLD = 3


@pytest.fixture(scope="module")
def root(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("convert"))(graph, WORLD, "random")


class Net(torch.nn.Module):
    """Layers at several depths, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GATConv(CHANNELS, 4)
        self.block = torch.nn.ModuleDict({"conv": gnn.SAGEConv(4, 4), "norm": gnn.BatchNorm(4)})
        self.alias = self.block["conv"]
        self.head = Linear(4, OUT)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.block["norm"](self.block["conv"](self.first(x, edge_index), edge_index))
        return self.head(self.alias(x.relu(), edge_index))


# What it keeps ###############################################################


def test_in_place_and_nothing_else():
    """Same object, parameters, names and order; an optimizer made before stays right."""

    def worker() -> None:
        model = Net()
        parameters = dict(model.named_parameters())
        keys, modules = list(model.state_dict()), dict(model.named_modules())
        assert pyg_sar.distribute(model) is model
        assert list(model.state_dict()) == keys
        assert {n: id(p) for n, p in model.named_parameters()} == {
            n: id(p) for n, p in parameters.items()
        }
        assert {n: id(m) for n, m in model.named_modules()} == {
            n: id(m) for n, m in modules.items()
        }
        assert isinstance(model.first, gnn.GATConv | DistMessagePassing)
        assert isinstance(model.first, gnn.GATConv) and isinstance(model.first, DistMessagePassing)
        assert type(model) is Net and type(model.head) is Linear
        assert "GATConv(6, 4, heads=1)" in repr(model.first)

    workers(worker, WORLD)


def test_pyg_stays_as_it_is(graph: Data):
    """No class of PyG is patched; other models of the process don't notice."""
    before = {kind: dict(vars(kind)) for kind in (MessagePassing, gnn.GATConv, gnn.SAGEConv)}
    plain = gnn.GATConv(CHANNELS, OUT).double()
    before[gnn.GATConv] = dict(vars(gnn.GATConv))
    expected = plain(graph.x, graph.edge_index)
    converted = pyg_sar.distribute(copy.deepcopy(plain))
    converted(graph.x, graph.edge_index)
    for kind, names in before.items():
        now = dict(vars(kind))
        changed = {n for n in names.keys() | now.keys() if names.get(n) is not now.get(n)}
        assert not changed - {"propagate", "edge_updater", "__abstractmethods__"}, kind
        assert kind.propagate is not DistMessagePassing.propagate
    assert type(plain) is gnn.GATConv
    assert torch.equal(plain(graph.x, graph.edge_index), expected)
    again = gnn.GATConv(CHANNELS, OUT).double()
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again(graph.x, graph.edge_index), expected)


PLAIN: dict[str, Callable[[], MessagePassing]] = {
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "std": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="std"),
    "edge": lambda: gnn.EdgeConv(Linear(2 * CHANNELS, OUT)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_edges_run_as_pyg(name: str, graph: Data):
    """A converted layer handed an ordinary edge_index is PyG's, to the bit, without the kernels.

    With them: where no kernel is for it. The others, test_one_process compares.
    """
    plain = PLAIN[name]().double()
    expected = single_process(plain, graph)
    kernels = "auto" if name in ("std", "edge") else "off"
    converted = pyg_sar.distribute(copy.deepcopy(plain), SARPolicy(kernels=kernels))
    found = one_pass(converted, graph)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.x_grad, expected.x_grad)
    for key, gradient in expected.parameter_grads.items():
        assert torch.equal(found.parameter_grads[key], gradient)


def test_plain_sparse_matrices_and_bipartite_graphs(graph: Data):
    """What else PyG takes: a sparse adjacency, a pair of node tensors with sizes."""
    plain = gnn.SAGEConv((CHANNELS, CHANNELS), OUT).double()
    converted = pyg_sar.distribute(copy.deepcopy(plain))
    dense = torch.zeros(40, 40, dtype=torch.float64)
    dense[graph.edge_index[1], graph.edge_index[0]] = 1
    adjacency = dense.to_sparse_csr()
    assert torch.equal(converted(graph.x, adjacency), plain(graph.x, adjacency))
    pair = (graph.x, graph.x[:5])
    edges = torch.stack([graph.edge_index[0], graph.edge_index[1] % 5])
    assert torch.allclose(converted(pair, edges), plain(pair, edges), rtol=1e-12, atol=1e-12)
    assert torch.equal(converted(pair, edges, (40, 5)), plain(pair, edges, (40, 5)))


# Subclasses of DistMessagePassing ############################################


class Methods:
    """A layer's methods, for PyG's base class and for the package's."""

    def __init__(self, aggr: str = "sum", flow: str = "source_to_target") -> None:
        super().__init__(aggr=aggr, flow=flow)
        self.score = Linear(2 * CHANNELS, 1)
        self.lin = Linear(CHANNELS, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.score(torch.cat([x_i, x_j], -1)).sigmoid()

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate * self.lin(x_j)

    def update(self, inputs: Tensor) -> Tensor:
        return inputs.tanh()


class PlainLayer(Methods, MessagePassing):
    """The oracle of :class:`OwnLayer`."""


class OwnLayer(Methods, DistMessagePassing):
    """A user's layer, written against the package."""


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["sum", "max", "median"])
def test_subclass_on_plain_edges_is_pyg(aggr: str, flow: str, graph: Data):
    own = OwnLayer(aggr, flow).double()
    plain = PlainLayer(aggr, flow).double()
    plain.load_state_dict(own.state_dict())
    expected = single_process(plain, graph)
    found = one_pass(own, graph)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.x_grad, expected.x_grad)


# Calling it again, policies ##################################################


def test_idempotent(graph: Data, root: Path):
    model = Net().double()

    def worker() -> Any:
        data = pyg_sar.load_partition(root)
        mine: Any = copy.deepcopy(model)
        for _ in range(3):
            pyg_sar.distribute(mine)
        assert isinstance(mine.first, DistMessagePassing) and not mine._forward_pre_hooks
        assert type(mine.first).__mro__.count(DistMessagePassing) == 1
        return one_pass(mine, data)

    assert_small(errors(workers(worker, WORLD), single_process(model, graph)), TOLERANCE, "thrice")


def test_policies_per_layer():
    default, other = SARPolicy(mode=2), SARPolicy(mode=3)
    model = pyg_sar.distribute(Net(), default, layer_policies={"block.conv": other})
    assert model.first.policy == default and model.block["conv"].policy == other
    pyg_sar.distribute(model, other)
    assert model.first.policy == other
    pyg_sar.distribute(model)
    assert model.first.policy == SARPolicy()
    alone = pyg_sar.distribute(gnn.GCNConv(3, 3), other)
    assert alone.policy == other


def test_layer_policies_take_effect(root: Path):
    """Counted: the layer in mode 3 holds its halo, the others a shard."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root)
        model = pyg_sar.distribute(
            Net().double(),
            SARPolicy(prefetch=0),
            layer_policies={"first": SARPolicy(mode=3)},
        )
        with pyg_sar.Ledger(comm) as ledger:
            model(data.x, data.edge_index)
        plan = data.edge_index.to_local().plan
        assert ledger.peak_resident_rows("first") >= plan.num_halo
        assert ledger.peak_resident_rows("block.conv") <= max(plan.halo_counts)

    workers(worker, WORLD)


@pytest.mark.parametrize("name", ["nothing", "head", "block", ""])
def test_unknown_layer_names(name: str):
    with pytest.raises(ValueError, match=r"'layer_policies' names .*no message passing") as caught:
        pyg_sar.distribute(Net(), layer_policies={name: SARPolicy(), "first": SARPolicy()})
    assert "block.conv" in str(caught.value) and repr(name) in str(caught.value)


def test_policies_are_frozen_and_keyword_only():
    """Wrong settings: test_arguments.py."""
    with pytest.raises(AttributeError):
        SARPolicy().mode = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SARPolicy(2)  # type: ignore[misc]


# What it refuses #############################################################


def test_attributes_that_hold_themselves_are_refused() -> None:
    def work() -> str:
        layer = gnn.SAGEConv(4, 3)
        layer.things = [1]
        layer.things.append({"inner": layer.things})
        with pytest.raises(ValueError, match="attribute 'things' is a list that holds itself") as e:
            pyg_sar.distribute(layer)
        return str(e.value)

    assert all("take it out of the model" in text for text in workers(work, 2))


def test_lazy_parameters_are_refused():
    model = torch.nn.ModuleDict({"conv": gnn.SAGEConv(-1, 4)})

    def worker() -> str:
        with pytest.raises(ValueError, match=r"'conv\.lin_l\.weight' is not initialized") as caught:
            pyg_sar.distribute(copy.deepcopy(model))
        return str(caught.value)

    assert all("data.x_dict" in message for message in workers(worker, 2))


def test_unlike_models_are_refused():
    """Another width or another layer on one worker: every worker says so, none waits."""

    def worker(how: str) -> str:
        rank = pyg_sar.comm.current().rank
        width = 5 if rank == 1 and how == "width" else 4
        layers = [gnn.GCNConv(3, width)]
        if rank == 1 and how == "layer":
            layers.append(gnn.GCNConv(width, 2))
        model = torch.nn.ModuleList(layers)
        if rank == 1 and how == "frozen":
            model.requires_grad_(False)
        policy = SARPolicy(mode=2 if rank == 1 and how == "policy" else 1)
        with pytest.raises(ValueError) as caught:
            pyg_sar.distribute(model, policy)
        return str(caught.value)

    for how in ("width", "layer", "frozen", "policy"):
        messages = workers(worker, WORLD, how)
        assert all("1" in message for message in messages), how


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, CHANNELS, sparse=True)
        self.conv = gnn.SAGEConv(CHANNELS, OUT)

    def forward(self, kind: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.table(kind), edge_index)


def test_a_table_with_sparse_gradients(graph: Data, root: Path):
    plain = Table().double()

    def gradient(data: Data, ready: Callable[[Any], Any]) -> Tensor:
        model = ready(copy.deepcopy(plain))
        node_losses(model(data.y, data.edge_index)).mean().backward()
        return model.table.weight.grad.to_dense()

    alike(gradient, graph, root, WORLD)


# Parameters of rank 0, several models #########################################


def test_rank_0s_parameters_and_buffers_everywhere():
    def worker() -> dict[str, Tensor]:
        rank = pyg_sar.comm.current().rank
        model = Net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank + 0.5)
            model.steps.fill_(2**53 + 1 + rank)
            model.flag.fill_(rank == 0)
            model.low.fill_(rank + 3)
            model.block["norm"].module.running_mean.fill_(-rank - 1)
        model.head.bias.requires_grad_(False)
        pyg_sar.distribute(model)
        return {name: value.clone() for name, value in model.state_dict().items()}

    state, *others = workers(worker, WORLD)
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in state.items())
    assert float(state["first.lin.weight"].min()) == float(state["head.bias"].max()) == 0.5
    assert int(state["steps"]) == 2**53 + 1 and bool(state["flag"])
    assert float(state["low"][0]) == 3 and float(state["block.norm.module.running_mean"][0]) == -1


def test_special_values_of_rank_0_are_copied():
    """Rank 0's NaN, infinity and minus zero; nothing of the others' NaN gets in."""

    def worker() -> Tensor:
        model = Linear(2, 2, bias=False)
        special = torch.tensor([[float("inf"), float("nan")], [-0.0, 1e-45]])
        other = torch.full((2, 2), float("nan"))
        with torch.no_grad():
            model.weight.copy_(special if pyg_sar.comm.current().rank == 0 else other)
        return pyg_sar.distribute(model).weight.detach()

    for weight in workers(worker, WORLD):
        assert weight[0, 0] == float("inf") and weight[0, 1].isnan()
        assert weight[1, 0] == 0 and weight[1, 1] == torch.tensor(1e-45)


def test_two_models_in_one_backward_pass(graph: Data, root: Path):
    """An encoder and a head, distributed each on its own, or both frozen in turn."""
    encoder, head = gnn.GATConv(CHANNELS, 4).double(), Linear(4, OUT).double()

    def gradients(data: Data, ready: Callable[[Any], Any]) -> Any:
        first, second = ready(copy.deepcopy(encoder)), ready(copy.deepcopy(head))
        found = []
        for _ in range(2):
            first.zero_grad(), second.zero_grad()
            node_losses(second(first(data.x, data.edge_index))).mean().backward()
            found.append([p.grad.clone() for p in (*first.parameters(), *second.parameters())])
        return found

    alike(gradients, graph, root, WORLD)


# What must not undo the override #############################################


def is_distributed(layer: MessagePassing) -> bool:
    """Whether ``layer.propagate`` is the package's, however it is reached."""
    bound = layer.propagate
    updater = layer.edge_updater
    of_class = inspect.getattr_static(type(layer), "propagate")
    return (
        getattr(bound, "__func__", bound) is DistMessagePassing.propagate
        and getattr(updater, "__func__", updater) is DistMessagePassing.edge_updater
        and of_class is DistMessagePassing.propagate
    )


def explain_on_and_off(layer: Any) -> Any:
    layer.explain = True
    layer.explain = False
    layer.explain = None
    return layer


def decomposed(layer: Any) -> Any:
    layer.decomposed_layers = 2
    return layer


def decomposed_and_back(layer: Any) -> Any:
    layer.decomposed_layers = 2
    layer.decomposed_layers = 1
    return layer


def state_through_pickle(layer: Any) -> Any:
    state = pickle.loads(pickle.dumps(layer.state_dict()))
    for value in state.values():
        value.mul_(1)
    layer.load_state_dict(state)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    layer.load_state_dict(torch.load(buffer, weights_only=True))
    return layer


def another_plain_layer(layer: Any) -> Any:
    """PyG installs templates on classes whenever a layer is built or copied."""
    copy.deepcopy(gnn.SAGEConv(3, 3))
    kind = type(layer).__mro__[2]
    assert issubclass(kind, MessagePassing)
    copy.deepcopy(layer)
    return layer


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda layer: layer,
    "explain": explain_on_and_off,
    "decomposed": decomposed,
    "decomposed and back": decomposed_and_back,
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda layer: copy.deepcopy(copy.deepcopy(layer)),
    "state_dict": state_through_pickle,
    "another layer": another_plain_layer,
    "reset_parameters": lambda layer: (
        (layer.reset_parameters(), layer.load_state_dict(START))[0] or layer
    ),
    "to": lambda layer: layer.to(torch.float32).to(torch.float64),
    "distribute again": lambda layer: pyg_sar.distribute(layer),
}
START: dict[str, Tensor] = {}


def test_override_survives(graph: Data, root: Path):
    """Counted too: the layer goes on aggregating shard by shard, and exactly."""
    layer = gnn.TransformerConv(CHANNELS, OUT, heads=2).double().float().double()
    start = copy.deepcopy(layer.state_dict())
    policy = SARPolicy(mode=1, prefetch=0)

    def worker() -> Any:
        START.update(start)
        comm, found = pyg_sar.comm.current(), {}
        data = pyg_sar.load_partition(root)
        for name, change in CHANGES.items():
            mine = change(pyg_sar.distribute(copy.deepcopy(layer), policy))
            pyg_sar.distribute(mine, policy)
            assert is_distributed(mine), name
            with pyg_sar.Ledger(comm) as ledger:
                found[name] = whole(mine(data.x, data.edge_index).detach())
            most = max(data.edge_index.to_local().plan.halo_counts)
            assert ledger.peak_resident_rows() <= most, name
        return found

    expected = layer(graph.x, graph.edge_index).detach()
    for found in workers(worker, WORLD):
        for name, out in found.items():
            assert error(out, expected) <= TOLERANCE, name


class Differences(gnn.MessagePassing):
    """A layer of one's own, whose ``forward`` runs between tensors of the whole graph."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x - x.mean(0))

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return x_j - x_i.tanh()


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("layer", [gnn.SAGEConv(CHANNELS, OUT).double(), Differences()])
def test_an_explained_layer_is_exact(layer: Any, graph: Data, root: Path):
    """An edge mask, as explainers set it: each edge's message is scaled."""

    def explained(data: Data, ready: Callable[[Any], Any]) -> Tensor:
        module, mask = ready(copy.deepcopy(layer)), data.edge_weight
        module.explain = True
        module._edge_mask, module._loop_mask, module._apply_sigmoid = mask, mask > 0, False
        return module(data.x, data.edge_index).detach()

    alike(explained, graph, root, WORLD)


EXPLAINERS: dict[str, Any] = {
    "attention": (AttentionExplainer, {}, lambda: gnn.GATConv(CHANNELS, CHANNELS)),
    "graph mask": (
        lambda: GraphMaskExplainer(1, epochs=2, log=False),
        {"node_mask_type": "attributes"},
        lambda: gnn.GraphConv(CHANNELS, CHANNELS),
    ),
}


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("name", EXPLAINERS)
@pytest.mark.usefixtures("double")
def test_explainers_that_read_messages(name: str, graph: Data, root: Path):
    """They see, and change, the messages of all edges, on each worker."""
    make, options, layer = EXPLAINERS[name]
    graph = Data(x=graph.x, edge_index=graph.edge_index)

    def explained(data: Any, ready: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = ready(layer())
        explainer = Explainer(
            model,
            make(),
            explanation_type="model",
            edge_mask_type="object",
            model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
            **options,
        )
        found = explainer(data.x, data.edge_index, index=3)
        after = model(data.x, data.edge_index)  # It runs as before.
        masks = [mask for mask in (found.edge_mask, found.get("node_mask")) if mask is not None]
        return [t.detach() for t in (*masks, after)]

    alike(explained, graph, root, WORLD, both, 1e-9)


def test_an_explained_message_of_ones_own(graph: Data, root: Path):
    """A mean over edges is that of all workers' edges."""

    def explain_message(self: Any, inputs: Tensor, x_i: Tensor, x_j: Tensor) -> Tensor:
        return inputs - inputs.mean(0) * (x_i - x_j).mean()

    def explained(data: Any, ready: Any) -> Tensor:
        torch.manual_seed(3)
        layer = ready(gnn.GraphConv(CHANNELS, CHANNELS).double())
        layer.explain_message, layer.explain = explain_message.__get__(layer), True
        return layer(data.x, data.edge_index).detach()

    alike(explained, graph, root, WORLD, both)
