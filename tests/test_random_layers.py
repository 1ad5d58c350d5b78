"""Random numbers of layers and models: those of one process, or the same for any workers."""

from __future__ import annotations

import copy
from dataclasses import replace

import combinations
import pytest
import torch
import torch.nn.functional as F
from hosted_workers import host
from oracle import apart, make_graph, whole
from torch_geometric.nn import (
    APPNP,
    GAT,
    MLP,
    DNAConv,
    FAConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    RGATConv,
    SAGEConv,
    TransformerConv,
    aggr,
)
from torch_geometric.utils import dropout_edge, dropout_node

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm.group import current
from pyg_sar.errors import WorkerError
from pyg_sar.kernels import ops

DATA = make_graph(40, 200)
POLICIES = (
    SARPolicy(),
    SARPolicy(mode=2, kernels="off", message_budget=4000),
    SARPolicy(mode=1, kernels="off", message_budget=4000),
    SARPolicy(mode=3),
    SARPolicy(kernels="off", message_budget=4000, strategy="chunked"),
)


class Noise(MessagePassing):
    """Messages that draw in all the ways that are known, in `edge_update` and in `message`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(6, 6)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x, edge_index):
        x = self.lin(x)
        alpha = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, alpha=alpha)

    def edge_update(self, x_i, x_j):
        return F.dropout((x_i * x_j).sum(-1), 0.5, self.training)

    def message(self, x_j, alpha):
        noise = torch.randn_like(x_j) + torch.rand_like(x_j) + torch.zeros_like(x_j).bernoulli_(0.4)
        noise = noise + torch.empty_like(x_j).exponential_(2.0)
        return self.drop(x_j * torch.sigmoid(alpha).view(-1, 1)) + 0.1 * noise


class Model(torch.nn.Module):
    """Dropout of features, of attention weights and of edges, and noise on nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(6, 4, heads=2, dropout=0.6)
        self.second = GCNConv(8, 3)

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.6, self.training) + torch.rand(x.size(0), 1, dtype=x.dtype)
        fewer, _ = dropout_edge(edge_index, 0.4, training=self.training)
        x = F.elu(self.first(x, fewer))
        x = x * torch.randint(1, 4, (x.size(0), 8)) + 0.1 * torch.randn_like(x)
        kept, _, _ = dropout_node(edge_index, 0.3, num_nodes=x.size(0), training=self.training)
        return self.second(x, kept) + torch.rand(3)  # alike on all workers


MODELS = {
    "gat": lambda: GATConv(6, 5, heads=2, dropout=0.6),
    "gat, edge features": lambda: GATConv(6, 5, heads=3, dropout=0.6, edge_dim=4),
    "gat, no loops": lambda: GATConv(6, 5, dropout=0.5, add_self_loops=False),
    "gat, 33 heads": lambda: GATConv(6, 1, heads=33, dropout=0.6),
    "gatv2": lambda: GATv2Conv(6, 5, heads=2, dropout=0.6),
    "transformer": lambda: TransformerConv(6, 5, heads=2, dropout=0.3),
    "fa": lambda: FAConv(6, dropout=0.4),
    "rgat": lambda: RGATConv(6, 5, 3, heads=2, dropout=0.4),
    "noise": Noise,
    "model": Model,
    "GAT": lambda: GAT(6, 8, 2, 3, dropout=0.5, heads=2),
    "nothing random": lambda: GCNConv(6, 3),
}


def made(name):
    torch.manual_seed(1)
    return MODELS[name]().double()


def arguments(model, data, x):
    if isinstance(model, GATConv) and model.lin_edge is not None:
        return x, data.edge_index, data.edge_attr
    if isinstance(model, FAConv):
        return x, x, data.edge_index
    if isinstance(model, RGATConv):
        return x, data.edge_index, data.edge_type
    return x, data.edge_index


def two_steps(model, data):
    """Outputs, gradients, and a number drawn afterwards."""
    torch.manual_seed(5)
    outs = []
    for _ in range(2):
        model.zero_grad()
        x = data.x.clone().requires_grad_()
        out = model(*arguments(model, data, x))
        (out.square().sum() + out.sum()).backward()
        outs.append(whole(out.detach()))
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return torch.cat(outs, 1), whole(x.grad), gradients, torch.rand(())


def work(root, models, policies):
    data, found = pyg_sar.load_partition(root), []
    for model in models:
        for policy in policies:
            found.append(two_steps(pyg_sar.distribute(copy.deepcopy(model), policy), data))
    return found


def alike(results):
    """What one worker found; the others have found the same."""
    first = results[0]
    for result in results:
        assert torch.equal(result[3], first[3])
        for mine, other in zip((*result[:2], *result[2]), (*first[:2], *first[2]), strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or torch.allclose(mine, other, rtol=1e-10, atol=1e-10)
    return first


def assert_same(found, expected, title):
    for mine, other in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert (mine is None) == (other is None), title
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10, msg=title)
    assert torch.equal(found[3], expected[3]), title


def random(strength, policies=POLICIES):
    return [replace(policy, random=strength) for policy in policies]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folders of 1, 2 and 3 parts; of the three, the last has the isolated node alone, or none."""
    folder = tmp_path_factory.mktemp("parts")
    lonely = torch.arange(40) % 2
    lonely[39] = 2
    for world, method in ((1, "random"), (2, "random"), (3, lonely)):
        pyg_sar.write_partitions(DATA, world, folder / str(world), method)
    pyg_sar.write_partitions(DATA, 3, folder / "none", torch.arange(40) % 2)
    return folder


def tried(name):
    """Each strength in one way, and ``'same'`` in another that goes round with the models."""
    number = list(MODELS).index(name)
    ways = POLICIES if name in ("gat", "noise", "model") else POLICIES[:1]
    one = POLICIES[1 + number % (len(POLICIES) - 1)]
    return [*random("same", dict.fromkeys((*ways, one))), *random("keyed", (POLICIES[0], one))]


@pytest.mark.parametrize("name", MODELS)
def test_as_one_process_draws_and_as_any_number_of_workers(name, parts):
    model, policies = made(name), tried(name)
    expected = {"same": two_steps(copy.deepcopy(model), DATA)}
    for world in (1, 3):
        workers = host(work, world, parts / str(world), [model], policies)
        for k, policy in enumerate(policies):
            found = alike([worker[k] for worker in workers])
            title = f"{name}, {world} workers, {policy}"
            assert_same(found, expected.setdefault(policy.random, found), title)
    if name != "nothing random":
        assert not torch.allclose(expected["same"][0], expected["keyed"][0])


def inferred_first(model, data):
    """Those of two steps after a call in inference mode, with its outputs."""
    torch.manual_seed(4)
    with torch.inference_mode():
        out = whole(model(*arguments(model, data, data.x)).clone())
    outs, *others = two_steps(model, data)
    return torch.cat([out, outs], 1), *others


def test_a_first_call_in_inference_mode_draws_as_one_process(parts):
    models = [made(name) for name in MODELS]

    def worker():
        data = pyg_sar.load_partition(parts / "2")
        return [inferred_first(pyg_sar.distribute(copy.deepcopy(m)), data) for m in models]

    results = host(worker, 2)
    for k, (name, model) in enumerate(zip(MODELS, models, strict=True)):
        assert_same(alike([found[k] for found in results]), inferred_first(model, DATA), name)


def test_as_one_process_draws_where_a_part_has_no_nodes(parts):
    policies = [*random("same", POLICIES[::3]), SARPolicy(mode=3, random="keyed")]
    names = combinations.some(list(MODELS), "no nodes", 3)
    models = [made(name) for name in names]
    results = host(work, 3, parts / "none", models, policies)
    keyed = host(work, 2, parts / "2", models, policies[2:])
    for k, (name, model) in enumerate(zip(names, models, strict=True)):
        expected = two_steps(copy.deepcopy(model), DATA)
        for step, right in enumerate((expected, expected, alike([w[k] for w in keyed]))):
            found = alike([worker[3 * k + step] for worker in results])
            assert_same(found, right, f"{name}, {policies[step]}")


def test_processes_draw_alike_where_rows_travel_and_where_they_are_read(parts):
    """Edges between workers run at their sources, too: there the same weights are dropped."""
    names = ("gat", "transformer", "model")
    models = [made(name) for name in names]
    policies = [*random("same", POLICIES[:1]), *random("keyed", POLICIES[:1])]
    expected = [two_steps(copy.deepcopy(model), DATA) for model in models]
    keyed = [host(work, 1, parts / "1", [model], policies[1:])[0][0] for model in models]
    near = pyg_sar.launch(work, 2, parts / "2", models, policies, backend="gloo")
    with apart():
        far = pyg_sar.launch(work, 3, parts / "3", models, policies, backend="gloo")
    for workers in (near, far):
        for k, name in enumerate(names):
            found = [alike([worker[2 * k + s] for worker in workers]) for s in (0, 1)]
            assert_same(found[0], expected[k], name)
            assert_same(found[1], alike([keyed[k]]), f"{name}, keyed")


def counted(root, model, policy):
    data = pyg_sar.load_partition(root)
    mine = pyg_sar.distribute(copy.deepcopy(model), policy)
    with pyg_sar.Ledger(current()) as ledger:
        two_steps(mine, data)
    return ledger.events("fused attention")


@pytest.mark.skipif(not ops.built, reason="the C++ kernels are not built")
def test_the_kernels_compute_what_they_compute_without(parts):
    for name in ("gat", "gatv2", "transformer", "fa", "rgat"):
        for strength in (None, "same", "keyed"):
            policy = SARPolicy(random=strength)
            assert host(counted, 2, parts / "2", made(name), policy) == [2, 2], (name, strength)


def test_with_none_each_worker_draws_its_own(parts):
    results = host(work, 2, parts / "2", [made("gat")], [SARPolicy(random=None)])
    assert not torch.allclose(results[0][0][0], two_steps(made("gat"), DATA)[0])


def test_evaluation_draws_nothing(parts):
    def evaluated(root, model, policy):
        data = pyg_sar.load_partition(root)
        mine = pyg_sar.distribute(copy.deepcopy(model), policy).eval()
        torch.manual_seed(3)
        state = torch.get_rng_state()
        out = mine(data.x, data.edge_index)
        return whole(out.detach()), torch.equal(torch.get_rng_state(), state)

    model = made("GAT")
    expected = copy.deepcopy(model).eval()(DATA.x, DATA.edge_index)
    for policy in (SARPolicy(random="same"), SARPolicy(random="keyed")):
        results = host(evaluated, 2, parts / "2", model, policy)
        for rows, same in results:
            assert same
            torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-10)


class AlwaysDropout(torch.nn.Module):
    """Dropout in evaluation, too, as for an estimate of uncertainty."""

    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


@pytest.mark.parametrize("strength", ["same", "keyed"])
def test_what_draws_in_evaluation_is_that_of_one_process(parts, strength):
    """Within a layer of PyG, in its message, and a module that was put to training alone."""

    def models():
        torch.manual_seed(1)
        asked = GATConv(DATA.num_features, 4, dropout=0.5)
        inner = torch.nn.Linear(DATA.num_features, 5)
        return torch.nn.ModuleList([
            GINConv(torch.nn.Sequential(copy.deepcopy(inner), AlwaysDropout())),
            GINConv(torch.nn.Sequential(inner, torch.nn.Dropout(0.5))),
            asked,
        ]).to(DATA.x.dtype)  # fmt: skip

    def evaluated(root, policy=None):
        data = DATA if root is None else pyg_sar.load_partition(root)
        model = models() if root is None else pyg_sar.distribute(models(), policy)
        model.eval()
        model[1].nn[1].train()
        model[2].train()
        torch.manual_seed(3)
        return [whole(layer(data.x, data.edge_index).detach()) for layer in model]

    found = [host(evaluated, n, parts / str(n), SARPolicy(random=strength)) for n in (2, 3)]
    expected = evaluated(None) if strength == "same" else found[0][0]
    for rows in (*found[0], *found[1]):
        torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-10)


# Refused #####################################################################


class Drawing(MessagePassing):
    """A message that draws by a function of its own."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.weight = draw, torch.nn.Parameter(torch.ones(6))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * self.draw(self, x_j)


class Between(Noise):
    """Draws between an edge update, which draws itself, and the messages."""

    def forward(self, x, edge_index):
        alpha = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=F.dropout(x, 0.5), alpha=alpha)


class Plain(torch.nn.Module):
    """A model whose forward pass is a function."""

    def __init__(self, forward):
        super().__init__()
        self.function, self.conv = forward, GraphConv(6, 6).double()

    def forward(self, x, edge_index):
        return self.function(self, x, edge_index)


def refused(root, model, policy, unlike=False):
    data = pyg_sar.load_partition(root)
    mine = pyg_sar.distribute(copy.deepcopy(model).double(), policy)
    torch.manual_seed(current().rank if unlike else 0)
    for _ in range(2):
        mine(data.x.clone().requires_grad_(), data.edge_index).sum().backward()


def after(model, x, edge_index):
    return F.dropout1d(model.conv(x, edge_index), 0.5)


def deeper(model, x, edge_index):
    return model.conv(x, edge_index) * F.dropout(torch.ones(6, x.size(0), dtype=x.dtype)).sum()


def some(model, x, edge_index):
    return model.conv(x, edge_index)[: F.dropout(x[1:], 0.5).size(0)]


def shuffled(model, x, edge_index):
    return model.conv(x[torch.randperm(x.size(0))], edge_index)


def before(model, x, edge_index):
    return model.conv(F.dropout(x, 0.5), edge_index)


def transposed(model, x, edge_index):
    return model.conv(F.dropout(x.t().contiguous().t(), 0.5), edge_index)


def permuted(model, x, edge_index):
    backwards = torch.arange(edge_index.size(1) - 1, -1, -1)
    return model.conv(x, edge_index[:, backwards])


class Depths(DNAConv):
    """Rows of several layers, of which each node has its own."""

    def __init__(self):
        super().__init__(6, 2, 1, dropout=0.5)

    def forward(self, x, edge_index):
        return super().forward(torch.stack([x, x.sin()], 1), edge_index)


def aggregating(aggregation):
    return SAGEConv(6, 6, aggr=aggregation)


def attended():
    options = {"in_channels": 6, "out_channels": 6, "num_heads": 2, "dropout": 0.5}
    return aggr.MultiAggregation(["mean", "max"], mode="attn", mode_kwargs=options)


def mapped_sums():
    """Dropout of messages, and of what they sum to."""
    first = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5))
    return aggr.DeepSetsAggregation(first, copy.deepcopy(first))


REFUSED = {
    "a function that isn't known": (
        Drawing(lambda layer, x: F.rrelu(x, training=True)),
        "Drawing.*by a function that is not known to draw a row for each edge",
    ),
    "what is no row per edge": (
        Drawing(lambda layer, x: F.dropout(layer.weight, 0.5)),
        r"dropout numbers for a tensor of shape \[6\], which isn't a row for each",
    ),
    "memory in another order": (
        Drawing(
            lambda layer, x: F.dropout(x.repeat(3, 1).t().reshape(6, 3, -1).permute(2, 1, 0))[
                :, 0, :
            ]
        ),
        "lies in memory in another order.*contiguous",
    ),
}
RIGHT = {
    "between an edge update and the messages": Between(),
    "by feature": Plain(after),
    "nodes on another axis": Plain(deeper),
    "some of the nodes": Plain(some),
    "a permutation": Plain(shuffled),
    "nodes in another order": Plain(transposed),
    "edges in another order": Plain(permuted),
    "drawn before the model": Plain(before),
    "edges with self loops": APPNP(3, 0.1, dropout=0.4),
    "a module within a layer": GINConv(MLP([6, 8, 6], dropout=0.5)),
    "attention within a message": Depths(),
    "of what messages sum to": aggregating(mapped_sums()),
    "of several aggregations": aggregating(attended()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, parts):
    model, message = REFUSED[case]
    policy = SARPolicy(random="same", kernels="off", message_budget=4000)
    with pytest.raises(WorkerError, match=f"(?s){message}"):
        host(refused, 2, parts / "2", model, policy)


def late(root, backward, policy):
    """Draws from the second call on, or in the second backward pass only."""
    data, begun = DATA if root is None else pyg_sar.load_partition(root), []
    draw = lambda layer, x: x * F.dropout(x, 0.5) if begun else x * x  # noqa: E731
    layer = Drawing(draw).double()
    layer = layer if root is None else pyg_sar.distribute(layer, policy)
    x = data.x.clone().requires_grad_()
    torch.manual_seed(4)
    layer(x, data.edge_index).sum().backward()
    if not backward:
        begun.append(True)
    out = layer(x, data.edge_index)
    begun.append(True)
    out.sum().backward()
    return float(x.grad.square().sum())


@pytest.mark.parametrize("strength", ["same", "keyed"])
def test_what_draws_in_the_backward_pass_alone_is_refused(strength, parts):
    policy = SARPolicy(random=strength, mode=1, kernels="off", message_budget=4000)
    with pytest.raises(WorkerError, match="draws random numbers now, and did not"):
        host(late, 2, parts / "2", True, policy)


def test_what_draws_later_draws_as_one_process(parts):
    policy = SARPolicy(random="same", mode=1, kernels="off", message_budget=4000)
    expected = late(None, False, policy)
    assert host(late, 2, parts / "2", False, policy) == [pytest.approx(expected, rel=1e-10)] * 2


@pytest.mark.filterwarnings("ignore:SAGEConv draws:pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("case", RIGHT)
def test_a_model_draws_as_one_process(case, parts):
    model = RIGHT[case].double()
    expected = two_steps(copy.deepcopy(model), DATA)
    found = alike([w[0] for w in host(work, 2, parts / "2", [model], random("same", POLICIES[:1]))])
    assert_same(found, expected, case)


def test_edges_in_another_order_drop_the_same_messages(parts):
    model = Plain(permuted).double()
    model.conv = GATv2Conv(6, 6, dropout=0.5, add_self_loops=False).double()
    policies = random("same")
    results = host(work, 2, parts / "2", [model], policies)
    expected = two_steps(copy.deepcopy(model), DATA)
    for k, policy in enumerate(policies):
        assert_same(alike([worker[k] for worker in results]), expected, str(policy))


def test_generators_in_other_states_are_told(parts):
    for strength in ("same", "keyed"):
        with pytest.raises(WorkerError, match="same state.*manual_seed.*one seed"):
            host(refused, 2, parts / "2", made("gat"), SARPolicy(random=strength), True)
        # Whose layers draw nothing.
        host(refused, 2, parts / "2", made("nothing random"), SARPolicy(random=strength), True)
