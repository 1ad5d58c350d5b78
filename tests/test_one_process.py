"""One process and a plain ``edge_index``: ``distribute(model)`` takes the fused ways there."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from torch_geometric.nn import (
    APPNP,
    ClusterGCNConv,
    EdgeConv,
    FAConv,
    GATConv,
    GatedGraphConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphSAGE,
    HeteroConv,
    MessagePassing,
    SAGEConv,
    SuperGATConv,
    TransformerConv,
)

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.kernels import ops

NODES, EDGES, WIDTH = 60, 400, 6


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = FAConv(WIDTH)

    def forward(self, x, edge_index):
        return self.conv(x, x, edge_index)


MAKERS = {
    "SAGEConv": lambda: SAGEConv(WIDTH, 5),
    "SAGEConv max": lambda: SAGEConv(WIDTH, 5, aggr="max"),
    "SAGEConv project": lambda: SAGEConv(WIDTH, 5, project=True, normalize=True),
    "GINConv": lambda: GINConv(torch.nn.Linear(WIDTH, 5)),
    "GCNConv": lambda: GCNConv(WIDTH, 5),
    "GATConv": lambda: GATConv(WIDTH, 5, heads=2),
    "GATv2Conv": lambda: GATv2Conv(WIDTH, 5, heads=2),
    "TransformerConv": lambda: TransformerConv(WIDTH, 5, heads=2),
    "SuperGATConv": lambda: SuperGATConv(WIDTH, 5, heads=2),
    "FAConv": lambda: Residual(),
    "GraphConv": lambda: GraphConv(WIDTH, 5),
    "GatedGraphConv": lambda: GatedGraphConv(WIDTH, 2),
    "APPNP": lambda: APPNP(3, 0.1),
    "ClusterGCNConv": lambda: ClusterGCNConv(WIDTH, 5),
    "EdgeConv": lambda: EdgeConv(torch.nn.Linear(2 * WIDTH, 5)),
    "GraphSAGE": lambda: GraphSAGE(WIDTH, 8, 3, jk="cat"),
}

needs_kernels = pytest.mark.skipif(ops.why_missing() is not None, reason="needs the C++ kernels")


def graph(seed=0):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(NODES - 5, (2, EDGES), generator=generator)  # isolated nodes too
    x = torch.randn(NODES, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.cat([edge_index, edge_index[:, :9], torch.zeros(2, 2).long()], 1)


def run(model, x, *edges):
    """Output, and gradients of the input and of all parameters, under a weighted loss."""
    x = x.clone().requires_grad_()
    out = model(x, *edges)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), [x, *model.parameters()])
    return [out, *grads]


def largest_error(found, expected):
    return max(
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-2))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", MAKERS)
def test_it_equals_pyg(name):
    torch.manual_seed(0)
    plain = MAKERS[name]().double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    x, edge_index = graph()
    expected = run(plain, x, edge_index)
    for _ in range(2):  # the second call knows whether the first was fused
        assert largest_error(run(model, x, edge_index), expected) < 1e-10
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert largest_error([model(x, edge_index)], [plain(x, edge_index)]) < 1e-10


@needs_kernels
@pytest.mark.parametrize(
    "name, training, passes",
    [
        ("TransformerConv", True, 1),
        ("FAConv", True, 1),
        ("SuperGATConv", False, 1),
        ("SuperGATConv", True, 0),  # draws edges, whose scores it keeps
    ],
)
def test_attention_takes_the_kernels_way(name, training, passes):
    model = pyg_sar.distribute(MAKERS[name]().double()).train(training)
    x, edge_index = graph()
    model(x, edge_index)  # finds out
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        model(x, edge_index)
    assert ledger.events("fused attention") == passes


@needs_kernels
@pytest.mark.parametrize("kind", [GATConv, GATv2Conv, TransformerConv])
def test_dropout_of_attention_is_that_of_pyg(kind):
    torch.manual_seed(0)
    plain = kind(WIDTH, 5, heads=2, dropout=0.4).double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    x, edge_index = graph()
    model.eval()(x, edge_index)  # What was made of the edges without draws serves with them, too.
    model.train()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        for _ in range(2):
            torch.manual_seed(3)
            expected, state = run(plain, x, edge_index), torch.get_rng_state()
            torch.manual_seed(3)
            assert largest_error(run(model, x, edge_index), expected) < 1e-10
            assert torch.equal(torch.get_rng_state(), state)
    assert ledger.events("fused attention") == 2


@needs_kernels
def test_layers_share_one_structure_which_goes_with_the_edges():
    model = pyg_sar.distribute(GraphSAGE(WIDTH, 8, 3).double())
    x, edge_index = graph()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        run(model, x, edge_index)
        run(model, x, edge_index)
    assert ledger.events("bucketing") == 1
    layers = [m for m in model.modules() if isinstance(m, MessagePassing)]
    ((_, _, _, _, kept),) = layers[0].own_graphs._found
    kept = weakref.ref(kept)
    del edge_index
    run(model, x, graph(1)[1])
    gc.collect()
    assert kept() is None


@needs_kernels
def test_each_layer_keeps_the_structure_of_its_own_edges():
    """Of more relations than are kept of one layer's lists; each was made anew in each pass."""
    relations = [("a", str(k), "a") for k in range(12)]
    model = HeteroConv({relation: SAGEConv(WIDTH, 5) for relation in relations}).double()
    model = pyg_sar.distribute(model)
    x, edges = graph()[0], {relation: graph(k)[1] for k, relation in enumerate(relations)}
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        model({"a": x}, edges)
        model({"a": x}, edges)
    assert ledger.events("bucketing") == len(relations)
    lists, layer = [graph(k)[1] for k in range(30)], model.convs[relations[0]]
    for edge_index in lists:
        layer(x, edge_index)
    assert len(layer.own_graphs._found) == 8 + len(relations) - 1


def in_inference_mode(tensor, values):
    with torch.inference_mode():
        tensor.copy_(values)


def by_another_tensor(tensor, values):
    tensor.data = values


WRITES = {
    "in place": lambda tensor, values: tensor.copy_(values),
    "in inference mode": in_inference_mode,
    "by data": lambda tensor, values: tensor.data.copy_(values),
    "another tensor": by_another_tensor,
    "by NumPy": lambda tensor, values: tensor.numpy().__setitem__(..., values.numpy()),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("kind", [SAGEConv, GCNConv, GraphConv, GATConv])
def test_what_is_written_into_edges_and_weights_counts(kind, flow, write):
    plain = kind(WIDTH, 5, flow=flow).double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    x, edge_index = graph()
    weight = torch.rand(edge_index.size(1), dtype=torch.float64)
    given = [edge_index, weight] if kind in (GCNConv, GraphConv) else [edge_index]
    for tensor, values in ((weight, weight), (edge_index, graph(1)[1]), (weight, weight.flip(0))):
        WRITES[write](tensor, values)
        assert largest_error(run(model, x, *given), run(plain, x, *given)) < 1e-10


class Counting(torch.nn.Linear):
    """A linear map that grows with each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Remembering(MessagePassing):
    """Keeps something of each call, in all ways, and draws from all generators; no kernel's."""

    def __init__(self):
        super().__init__("add")
        self.lin = Counting(WIDTH, 5)
        self.calls, self.past, self.hidden, self.by_name = 0, [], None, {"calls": 0}
        self.memory = torch.zeros(NODES, 5, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(5))
        self.numpy, self.own = np.random.default_rng(1), torch.Generator().manual_seed(1)

    def forward(self, x, edge_index):
        h = self.lin(x)
        self.calls += 1
        self.past.append(h.sum().item())
        self.by_name["calls"] += self.calls
        self.memory[: self.calls] += h[: self.calls].detach()
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        self.hidden = h if self.hidden is None else h + self.hidden.detach()
        drawn = random.random() + np.random.rand() + self.numpy.random()
        h = h + drawn + torch.rand(1, generator=self.own).item() + self.memory - self.mean
        h = h / self.by_name["calls"] + len(self.past) + self.hidden
        return self.propagate(edge_index, x=h)

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_a_layer_that_no_kernel_is_for_is_called_once():
    plain = Remembering().double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    given, results = graph(), []
    for layer in (plain, model):
        random.seed(2)
        np.random.seed(2)
        found = [t for step in range(3) for t in run(layer.train(step != 1), *given)]
        state = [layer.memory, layer.mean, torch.tensor([layer.calls, layer.lin.calls])]
        results.append([*found, *state, torch.tensor(layer.past)])
    assert largest_error(*results) < 1e-10


def test_two_kinds_of_nodes():
    torch.manual_seed(0)
    plain = HeteroConv(
        {
            ("a", "to", "b"): SAGEConv((WIDTH, WIDTH), 5),
            ("b", "to", "a"): GATConv((WIDTH, WIDTH), 5, add_self_loops=False),
        }
    ).double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    x, edge_index = graph()
    edges = {("a", "to", "b"): edge_index % 40, ("b", "to", "a"): (edge_index % 40).flip(0)}
    nodes = {"a": x, "b": x[:40] * 2}
    for _ in range(2):
        expected, found = plain(nodes, edges), model(nodes, edges)
        assert all(largest_error([found[k]], [expected[k]]) < 1e-10 for k in expected)


@needs_kernels
@pytest.mark.parametrize("bad", [NODES, -1])
def test_an_id_outside_of_the_graph_is_an_error(bad):
    model = pyg_sar.distribute(SAGEConv(WIDTH, 5).double())
    x, edge_index = graph()
    for row in (0, 1):
        wrong = edge_index.clone()
        wrong[row, 3] = bad
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            model(x, wrong)


def test_few_edges_are_not_worth_it(monkeypatch):
    x, edge_index = graph()
    plain = SAGEConv(WIDTH, 5).double()
    model = pyg_sar.distribute(copy.deepcopy(plain))
    monkeypatch.setattr("pyg_sar.nn.one_process.FEWEST_EDGES", edge_index.size(1) + 1)
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        assert torch.equal(model(x, edge_index), plain(x, edge_index))
    assert ledger.events("bucketing") == 0


@needs_kernels
def test_switched_off_nothing_is_bucketed():
    model = pyg_sar.distribute(SAGEConv(WIDTH, 5).double(), SARPolicy(kernels="off"))
    x, edge_index = graph()
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        model(x, edge_index)
    assert ledger.events("bucketing") == 0


def test_copies_and_pickles_start_anew():
    model = pyg_sar.distribute(SAGEConv(WIDTH, 5).double())
    x, edge_index = graph()
    expected = run(model, x, edge_index)
    assert largest_error(run(copy.deepcopy(model), x, edge_index), expected) == 0.0
    assert pickle.loads(pickle.dumps(model.own_graphs))._found == []
    plain = SAGEConv(WIDTH, 5).double()
    plain.load_state_dict(model.state_dict())
    assert largest_error(run(plain, x, edge_index), expected) < 1e-10
