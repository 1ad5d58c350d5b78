"""What must be alike on all workers, and isn't: an error, where numbers would be wrong."""

from __future__ import annotations

import copy
import gc
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import Partitions, alike, error, make_graph, parts, workers
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import HeteroData
from torch_geometric.nn import GAT, ChebConv, GCNConv, GraphNorm, MessagePassing, SAGEConv

import pyg_sar
from pyg_sar.errors import WorkerError
from pyg_sar.tensors import rows
from pyg_sar.tensors.rows import note_plain
from pyg_sar.tools.graphs import load_graph
from pyg_sar.tools.run import RunConfig, say_kept, train_worker
from pyg_sar.train.config import TrainConfig


def change(root, where, name, value, learns):
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(GAT(data.x.size(1), 4, 2, norm=GraphNorm(4)).double())
    with torch.set_grad_enabled(learns):
        model(data.x, data.edge_index).sum()
        if pyg_sar.comm.current().rank == 1:
            setattr(model.get_submodule(where), name, value)
        out = model(data.x, data.edge_index)
        if learns:
            out.square().sum().backward()


@pytest.mark.parametrize("learns", [True, False])
def test_an_attribute_changed_on_one_worker(learns, tmp_path):
    root = Partitions(tmp_path)(make_graph(), 2)
    for where, name, value in (("convs.1", "negative_slope", 0.5), ("norms.0", "eps", 0.1)):
        message = f"'{where}.{name}: {value}' at rank 1, '{where}.{name}: "
        with pytest.raises(WorkerError, match=message):
            workers(change, 2, root, where, name, value, learns)


class Scale(torch.nn.Module):
    """A module within a layer of one's own."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return self.factor * x


class Own(MessagePassing):
    """A layer of one's own whose message reads all kinds of attributes."""

    def __init__(self, channels):
        super().__init__()
        self.lin, self.scale, self.shift = torch.nn.Linear(channels, 4), Scale(), None
        self.tau, self.powers, self.act, self.gate = 1.0, [1, 2], torch.tanh, torch.nn.Tanh()
        self.table, self.by_name = np.ones(3), {"a": 2.0}
        self.talks, self._seconds = False, 0.0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j):
        if self.talks:
            float(x_j.dim() + self._seconds)  # pytest rewrites assert, to call code of its own
        out = self.act(self.scale(x_j) / self.tau) ** self.powers[1] * self.by_name["a"]
        out = self.gate(out) * float(self.table[0])
        return out if self.shift is None else out + self.shift


OTHER = {
    "tau": lambda layer: setattr(layer, "tau", 2.0),
    "scale.factor": lambda layer: setattr(layer.scale, "factor", 2.0),
    "powers": lambda layer: layer.powers.__setitem__(1, 3),
    "by_name": lambda layer: layer.by_name.update(a=3.0),
    "act": lambda layer: setattr(layer, "act", torch.relu),
    "gate": lambda layer: setattr(layer, "gate", torch.nn.Sigmoid()),
    "shift": lambda layer: setattr(layer, "shift", torch.arange(4.0, dtype=torch.double)),
    "table": lambda layer: setattr(layer, "table", np.full(3, 2.0)),
}


def other_attribute(root, which, learns, change):
    """A step in which ``change`` was made on some workers: what the error says, or the result."""
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(torch.nn.ModuleList([Own(data.x.size(1)).double()]))
    with torch.set_grad_enabled(learns):
        model[0](data.x, data.edge_index)
        if which is None or pyg_sar.comm.current().rank == which:
            change(model[0])
        out = model[0](data.x, data.edge_index).square().sum()
        if learns:
            out.backward()
    return out.item()


@pytest.mark.parametrize("begin", [workers, parts])
def test_attributes_of_ones_own_layers_that_differ(begin, root):
    """Each as parts; the first as processes, too."""
    for name, change in list(OTHER.items())[: 1 if begin is workers else None]:
        for learns in (True, False):
            with pytest.raises(WorkerError, match=rf"attribute differs .*'0\.{name}: .* at rank 1"):
                begin(other_attribute, 2, root, 1, learns, change)


def talk(layer):
    layer.talks, layer._seconds = True, 0.5 + pyg_sar.comm.current().rank


@pytest.mark.parametrize("begin", [workers, parts])
def test_attributes_of_ones_own_layers_that_may_differ(begin, root):
    """Booleans, what begins with an underscore; and all that is changed alike."""
    data = make_graph()
    for who, change in ((1, talk), *((None, change) for change in OTHER.values())):
        if begin is workers and who is None:
            break
        torch.manual_seed(0)
        layer = Own(data.x.size(1)).double()
        if who is None:
            change(layer)
        expected = layer(data.x, data.edge_index).square().sum().item()
        found = begin(other_attribute, 2, root, who, True, change)
        assert found == pytest.approx([expected] * 2, rel=1e-10)


def other_ids(model, data, draw):
    rows = model(data.x, data.edge_index)[torch.from_numpy(draw.permutation(40)[:10])]
    return rows.square().sum()


def other_order(model, data, draw):
    return model(data.x, data.edge_index)[torch.from_numpy(draw.permutation(40))][:5].sum()


def other_features(model, data, draw):
    return model(torch.from_numpy(draw.random((40, data.num_features))), data.edge_index).sum()


def other_noise(model, data, draw):
    noise = torch.from_numpy(draw.random((40, data.num_features)))
    return model(data.x + noise, data.edge_index).sum()


def other_labels(model, data, draw):
    out = model(data.x, data.edge_index)
    return F.cross_entropy(out, torch.from_numpy(draw.integers(0, 2, 40)))


def other_mask(model, data, draw):
    chosen = torch.zeros(40, dtype=torch.bool)
    chosen[torch.from_numpy(draw.permutation(40)[:20])] = True
    return model(data.x, data.edge_index)[chosen].sum()


def other_edges(model, data, draw):
    kept = torch.from_numpy(draw.random(data.num_edges) < 0.5)
    return model(data.x, data.edge_index[:, kept]).sum()


LOSSES = [other_ids, other_order, other_features, other_noise, other_labels, other_mask]
LOSSES += [other_edges]


def trained_with(root, losses, seeds):
    data, found = pyg_sar.load_partition(root), []
    for loss in losses:
        torch.manual_seed(0)
        model = pyg_sar.distribute(GAT(data.x.size(1), 4, 2, 2).double())
        draw = np.random.default_rng(seeds[pyg_sar.comm.current().rank])
        value = loss(model, data, draw)
        value.backward()
        found.append(value.item())
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return Partitions(tmp_path_factory.mktemp("alike"))(make_graph(), 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_plain_tensors_that_differ(loss, root):
    """As NumPy draws them where nobody gave it a seed."""
    with pytest.raises(WorkerError, match="different values in a plain tensor .*numpy.random"):
        parts(trained_with, 2, root, [loss], (0, 1))


def test_plain_tensors_that_are_equal(root):
    data, expected = make_graph(), []
    for loss in LOSSES:
        torch.manual_seed(0)
        model = GAT(data.x.size(1), 4, 2, 2).double()
        expected.append(loss(model, data, np.random.default_rng(3)).item())
    for found in workers(trained_with, 2, root, LOSSES, (3, 3)):
        assert found == pytest.approx(expected, rel=1e-9)


def written(rows, k):
    return rows.relu_() if k else rows.tanh_()


# What is added up, where ``k`` is the worker's rank, or 0 on all workers
OF_OTHER_ROWS = {
    "a mask": lambda out, data, k: out[data.other_mask if k else data.train_mask],
    "an attribute": lambda out, data, k: out[:, 0] * (data.other if k else data.y),
    "columns": lambda out, data, k: out[:, [0, 2] if k else [0, 1]],
    "columns in place": lambda out, data, k: out.index_fill(1, torch.tensor([k]), 0.0),
    "an operator": lambda out, data, k: -out if k else out,
    "several operators": lambda out, data, k: out + out.detach() if k else out,
    "in place": lambda out, data, k: written(out * 2, k),
    "shifted": lambda out, data, k: out.roll(1 + k, 1)[:, 0],
    "the order": lambda out, data, k: [out, -out][k].sum() + 2 * [-out, out][k].sum(),
}


def of_other_rows(root, kind, differs, learns):
    data = pyg_sar.load_partition(root)
    data.other, data.other_mask = 2 - data.y, ~data.train_mask
    torch.manual_seed(0)
    model = pyg_sar.distribute(GCNConv(data.x.size(1), 3).double())
    k = pyg_sar.comm.current().rank if differs else 0
    with torch.set_grad_enabled(learns):
        found = OF_OTHER_ROWS[kind](model(data.x, data.edge_index), data, k).sum()
        if learns:
            found.backward()
    return float(found.detach())


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("kind", OF_OTHER_ROWS)
def test_workers_that_add_up_other_rows(kind, learns, root):
    """As a loop over a set of names does, which goes in another order in each process."""
    begin = workers if kind == "the order" else parts
    message = "added up rows of different tensors|different numbers beside tensors"
    with pytest.raises(WorkerError, match=message):
        begin(of_other_rows, 2, root, kind, True, learns)


@pytest.mark.parametrize("learns", [True, False])
def test_workers_that_add_up_the_same_rows(learns, root):
    data, expected = make_graph(), []
    data.other, data.other_mask = 2 - data.y, ~data.train_mask
    torch.manual_seed(0)
    out = GCNConv(data.x.size(1), 3).double()(data.x, data.edge_index).detach()
    for rows_of in OF_OTHER_ROWS.values():
        expected.append(float(rows_of(out.clone(), data, 0).sum()))

    def worker():
        return [of_other_rows(root, kind, False, learns) for kind in OF_OTHER_ROWS]

    for found in workers(worker, 2):
        assert found == pytest.approx(expected, rel=1e-9)


def with_statistics(data):
    """Of a norm in evaluation mode, whose weights learn."""
    model = pyg_sar.distribute(torch.nn.BatchNorm1d(data.x.size(1)).double()).eval()
    if pyg_sar.comm.current().rank == 1:
        model.running_mean += 1
    model(data.x).square().sum().backward()


def with_nan(data):
    """It is not 0."""
    model = pyg_sar.distribute(GCNConv(data.x.size(1), 3).double())
    if pyg_sar.comm.current().rank == 1:
        model.bias.data[0] = torch.nan
    with torch.no_grad():
        model(data.x, data.edge_index)


def of_longer_labels(data):
    return torch.ones(50)[data.train_mask]


def many_tables(data):
    for k in range(rows._TABLES + 2):
        data.x[:, 0] += torch.tensor([0.0, 1, 1 + (k + pyg_sar.comm.current().rank > 257)])[data.y]
    data.x.sum()


def other_weights(data):
    """The distributed model has no backward pass, whose sum would compare the gradients."""
    torch.manual_seed(0)
    teacher = pyg_sar.distribute(GCNConv(data.num_features, 3).double())
    teacher(data.x, data.edge_index)
    torch.manual_seed(pyg_sar.comm.current().rank)
    torch.nn.Linear(data.num_features, 3).double()(data.x).square().mean().backward()


OF_ONE_WORKER = {
    with_statistics: "running_mean' differs between the workers",
    with_nan: "'bias' differs between the workers",
    of_longer_labels: r"mask \[40\] at index 0 .* indexed tensor \[50\]",
    many_tables: "got different numbers beside tensors",
    other_weights: "got different numbers beside tensors",
}


@pytest.mark.parametrize("wrong", OF_ONE_WORKER)
def test_what_differs_on_one_worker(wrong, root):
    with pytest.raises(WorkerError, match=OF_ONE_WORKER[wrong]):
        parts(lambda: wrong(pyg_sar.load_partition(root)), 2)


def scaled(model, data, k):
    return model(data.x, data.edge_index).square().mean() * (1 + k)


def temperature(model, data, k):
    return F.cross_entropy(model(data.x, data.edge_index) / torch.tensor(1.0 + k), data.y)


def weights_of_classes(model, data, k):
    weight = torch.tensor([1.0, 1 + k, 2.0], dtype=torch.float64)
    return F.cross_entropy(model(data.x, data.edge_index), data.y, weight)


def smoothing(model, data, k):
    return F.cross_entropy(model(data.x, data.edge_index), data.y, label_smoothing=0.1 + k / 10)


def learned(model, data, k):
    scale = torch.nn.Parameter(torch.full([3], 1.0 + k, dtype=torch.float64))
    return (model(data.x, data.edge_index) * scale).square().mean()


def learned_map(model, data, k):
    weight = torch.nn.Parameter(torch.full([90, 3], 1.0 + k, dtype=torch.float64))
    return F.linear(model(data.x, data.edge_index), weight).square().mean()


def bound(model, data, k):
    return model(data.x, data.edge_index)[data.x[:, 0] > k / 10].square().mean()


def rate(model, data, k):
    return model(F.dropout(data.x, 0.3 + k / 5), data.edge_index).square().mean()


def rows_up_to(model, data, k):
    return model(data.x, data.edge_index)[: 20 + k].square().mean()


def column(model, data, k):
    return model(data.x, data.edge_index)[:, k].square().mean()


def target(model, data, k):
    wanted = torch.tensor([1.0, 1 + k, 2.0], dtype=torch.float64)
    return F.mse_loss(model(data.x, data.edge_index).mean(0), wanted)


def hooked(model, data, k):
    out = model(data.x, data.edge_index)
    out.register_hook(lambda gradient: gradient * (1 + k))
    return out.square().mean()


def bound_of_layer(model, data, k, kind=float):
    torch.manual_seed(1)
    layer = pyg_sar.distribute(ChebConv(3, 3, 3, normalization=None).double())
    out = model(data.x, data.edge_index)
    return layer(out, data.edge_index, lambda_max=kind(4.0 + k)).square().mean()


def plain_bound_of_layer(model, data, k):
    return bound_of_layer(model, data, k, lambda number: torch.tensor(number, dtype=torch.float64))


def trained_beside(root, loss, differ):
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(GAT(data.x.size(1), 4, 1, 3).double())
    value = loss(model, data, int(differ and pyg_sar.comm.current().rank == 1))
    value.backward()
    return value.item()


@pytest.mark.parametrize("begin", [workers, parts])
def test_numbers_beside_rows_that_differ(begin, tmp_path):
    root = Partitions(tmp_path)(make_graph(), 2)
    losses = (scaled, temperature, weights_of_classes, smoothing, learned, learned_map, bound)
    losses += bound_of_layer, plain_bound_of_layer
    for loss in (*losses, rate, rows_up_to, column, target, hooked)[:: 1 if begin is parts else 12]:
        with pytest.raises(WorkerError, match="different numbers beside tensors of the graph"):
            begin(trained_beside, 2, root, loss, True)
        torch.manual_seed(0)
        data = make_graph()
        torch.manual_seed(0)
        expected = loss(GAT(data.x.size(1), 4, 1, 3).double(), data, 0).item()
        assert begin(trained_beside, 2, root, loss, False) == pytest.approx(
            [expected] * 2, rel=1e-9
        )


def sum_after_a_model(root):
    """A sum of rows where a distributed model is gone on one worker, and still there on another."""
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(GCNConv(data.num_features, 3).double())
    model.itself = [model]  # Only the collector frees it.
    model(data.x, data.edge_index).square().sum().backward()
    gc.disable()
    del model
    if pyg_sar.comm.current().rank == 1:
        gc.collect()
    x = data.x.clone().requires_grad_()
    x.square().sum().backward()
    return x.grad.full_tensor()


def test_what_sums_compare_does_not_depend_on_the_collector(root):
    for found in workers(sum_after_a_model, 2, root):
        assert error(found, 2 * make_graph().x) < 1e-10


class Between(torch.nn.Module):
    """A layer of PyG between two of torch."""

    def __init__(self, channels):
        super().__init__()
        self.lin, self.conv = torch.nn.Linear(channels, 8), GCNConv(8, 8)
        self.norm, self.head = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)

    def forward(self, x, edge_index):
        return self.head(self.norm(self.conv(self.lin(x), edge_index)).relu())


def other_parameters(root, which, how, distributed):
    """A model of which ``which`` is another one at rank 1; and where one sees that it is."""
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    # Another model, which is distributed and doesn't learn, compares nothing for this one.
    teacher = pyg_sar.distribute(GCNConv(data.num_features, 3).double())
    with torch.no_grad():
        teacher(data.x, data.edge_index)
    model = Between(data.num_features).double().train(how == "learns")
    model = pyg_sar.distribute(model) if distributed else model
    if how == "frozen":
        model.requires_grad_(False)
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[which]
    if pyg_sar.comm.current().rank == 1:
        tensor.data.add_(0.25)
    with torch.set_grad_enabled(how != "evaluates"):
        out = model(data.x, data.edge_index)
        if how == "learns":
            F.cross_entropy(out, data.y).backward()
        return float(out.sum())


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("how", ["learns", "evaluates", "frozen"])
def test_parameters_that_differ(how, distributed, tmp_path):
    """Of a model that was not distributed, too; and of its layers of torch.

    Behind a layer that was not distributed all workers have all rows, and may see that they differ.
    """
    root = Partitions(tmp_path)(make_graph(), 2)
    named = ["lin.bias", "conv.lin.weight"]
    named += ["head.weight"] if distributed or how == "learns" else []
    named += ["norm.running_mean"] if distributed and how == "evaluates" else []
    for which in named:
        error = f"'{which}' differs between the workers"
        error += "" if distributed else "|got different numbers beside tensors"
        with pytest.raises(WorkerError, match=error):
            parts(other_parameters, 2, root, which, how, distributed)


def test_equal_parameters_that_are_not_distributed(tmp_path):
    """The gradients, too, are those of one process."""
    graph = make_graph()
    root = Partitions(tmp_path)(graph, 2)

    def trained(data, _):
        torch.manual_seed(0)
        model = Between(data.num_features).double()
        loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
        loss.backward()
        model.eval()
        with torch.no_grad():
            score = model(data.x, data.edge_index).sum()
        return [loss.detach(), score, *(p.grad for p in model.parameters())]

    alike(trained, graph, root, 2, parts)


READS = {
    "index": lambda table, ids: table[ids],
    "index_select": lambda table, ids: table.index_select(0, ids),
    "embedding": lambda table, ids: F.embedding(ids, table),
    "take": lambda table, ids: table.take(2 * ids),
    "gather": lambda table, ids: table.gather(0, ids.view(-1, 1)),
    "two indices": lambda table, ids: table[ids, ids % 2],
    "along an axis": lambda table, ids: table.t().index_select(1, ids),
    "a mask": lambda table, ids: table[:40][ids % 2 == 0],
}
LONG, DOUBLE = torch.long, torch.double


def learned_with_table(data, model, read, kind, unwritten, changed=None):
    """A loss and its gradients; of the table the rows of nodes are read, or some of them."""
    table = torch.full((60, 2), unwritten, dtype=kind)
    table[:40] = torch.arange(80).view(40, 2) % 7
    if changed is not None:
        table[changed] += 1
    learns = [*model.parameters(), *([table.requires_grad_()] if kind == DOUBLE else [])]
    found = READS[read](table, data.number)
    loss = found.double().square().sum() * model(data.x, data.edge_index).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, learns)]


def numbered_graph():
    data = make_graph()
    data.number = torch.arange(40)
    torch.manual_seed(0)
    return data, GCNConv(data.num_features, 3).double()


def tables_of_workers(root, reads, kind, changed=None):
    """Memory that was never written differs; of ``changed``, a rank and a row, a row that was."""
    rank = pyg_sar.comm.current().rank
    data, model = pyg_sar.load_partition(root), pyg_sar.distribute(numbered_graph()[1])
    changed = changed[1] if changed is not None and changed[0] == rank else None
    return [learned_with_table(data, model, read, kind, 9 + rank, changed) for read in reads]


@pytest.mark.parametrize("kind", [LONG, DOUBLE])
@pytest.mark.parametrize("begin", [workers, parts])
def test_memory_of_tables_that_was_never_written(begin, kind, tmp_path):
    """Each worker reads the rows of its nodes: others of the table may hold anything."""
    data, model = numbered_graph()
    root = Partitions(tmp_path)(data, 2)
    everything = [learned_with_table(data, model, read, kind, 5) for read in READS]
    for found in begin(tables_of_workers, 2, root, [*READS], kind):
        torch.testing.assert_close(found, everything, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [LONG, DOUBLE])
@pytest.mark.parametrize("read", READS)
def test_rows_of_tables_that_differ(read, kind, tmp_path):
    """Whether the worker that has another one reads it, or another worker; of several tables."""
    root = Partitions(tmp_path)(numbered_graph()[0], 2, torch.arange(40) // 20)
    for rank, row in ((1, 38), (0, 38), (1, 2)):
        with pytest.raises(WorkerError, match="got different numbers beside tensors"):
            parts(tables_of_workers, 2, root, ["index", read], kind, (rank, row))


def rated():
    draw = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["user"].x = torch.randn(60, 6, generator=draw, dtype=DOUBLE)
    data["item"].x = torch.randn(40, 8, generator=draw, dtype=DOUBLE)
    data["user"].chosen = torch.rand(60, generator=draw) < 0.5
    ends = [torch.randint(n, (200,), generator=draw) for n in (60, 40)]
    data["user", "rates", "item"].edge_index = torch.stack(ends)
    return data, SAGEConv((6, 8), 4).double()


def chosen_users(data, layer):
    part = data.subgraph({"user": data["user"].chosen})
    x = part["user"].x, part["item"].x
    loss = layer(x, part["user", "rates", "item"].edge_index).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [*layer.parameters()])]


def test_a_subgraph_of_chosen_nodes(tmp_path):
    """PyG numbers them in memory of which it writes their places alone."""
    data, layer = rated()
    root = Partitions(tmp_path)(data, 2)

    def worker():
        own = pyg_sar.distribute(copy.deepcopy(layer))
        if pyg_sar.comm.current().rank:  # Memory that is given again.
            _ = [torch.full((k,), 7.0) for k in range(20, 100)]
        return [chosen_users(pyg_sar.load_partition(root), own) for _ in range(3)]

    expected = [chosen_users(data, layer)] * 3
    for found in parts(worker, 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def least_squares(data, ready):
    """Of PyTorch's default driver, whose results on equal numbers differ by roundings."""
    torch.manual_seed(0)
    model = ready(torch.nn.Linear(6, 3).double())
    out = model(data.x)
    best = torch.linalg.lstsq(data.x, out).solution
    loss = best.square().sum() + (data.x @ best - data.y.view(-1, 1)).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.mark.parametrize("begin", [workers, parts])
def test_least_squares(begin, root):
    several = lambda *given: [least_squares(*given) for _ in range(10)]  # noqa: E731
    alike(several, make_graph(), root, 2, begin)


def goes_on(root):
    with pytest.raises(ValueError, match="different numbers beside tensors"):
        trained_beside(root, temperature, True)
    with pytest.raises(ValueError, match="different values in a plain tensor"):
        trained_with(root, [other_ids], (0, 1))
    return trained_beside(root, temperature, False)


@pytest.mark.parametrize("begin", [workers, parts])
def test_what_comes_after_the_error(begin, root):
    torch.manual_seed(0)
    expected = temperature(GAT(6, 4, 1, 3).double(), make_graph(), 0).item()
    assert begin(goes_on, 2, root) == pytest.approx([expected] * 2, rel=1e-10)


class Normed(torch.nn.Module):
    """A layer, and a norm whose gradients are sums over nodes: these compare what differs first."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = GCNConv(6, 3), norm

    def forward(self, x, edge_index):
        return self.norm(self.conv(x, edge_index))


def other_rate(root, norm):
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(Normed(norm()).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * (1 + pyg_sar.comm.current().rank))
    for _ in range(2):
        model(data.x, data.edge_index).pow(3).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("begin", [workers, parts])
def test_another_learning_rate_names_the_parameter(begin, root):
    for norm in (torch.nn.Identity, lambda: torch.nn.LayerNorm(3), lambda: torch.nn.Linear(3, 3)):
        with pytest.raises(WorkerError, match=r"'\w+\.[\w.]+' differs between.* ranks \[1\]"):
            begin(other_rate, 2, root, norm)


def trained_on_unlike_processors(root):
    """Losses of some steps, and how often the workers compared what they hold."""
    comm, asked = pyg_sar.comm.current(), []

    def processor(device):
        asked.append(device)
        return "AVX2", f"model {comm.rank}"

    rows._processor = processor
    data = pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = pyg_sar.distribute(GAT(data.x.size(1), 4, 2, 3).double())
    losses = []
    for _ in range(4):
        model.zero_grad()
        loss = scaled(model, data, 1e-15 * comm.rank)
        loss.backward()
        losses.append(loss.item())
    return losses, len(asked)


def test_unlike_processors_compare_numbers_beside_rows_once(tmp_path):
    """What these compute alike differs by roundings, in every step."""
    root = Partitions(tmp_path)(make_graph(), 2)
    torch.manual_seed(0)
    data = make_graph()
    torch.manual_seed(0)
    expected = scaled(GAT(data.x.size(1), 4, 2, 3).double(), data, 0).item()
    for losses, asked in workers(trained_on_unlike_processors, 2, root):
        assert losses == pytest.approx([expected] * 4, rel=1e-9) and asked == 1


class Several:
    """What notes of plain tensors need of a communicator."""

    def __init__(self):
        self.world_size, self.plain, self.noted = 2, 0, WeakIdKeyDictionary()


def noted(*tensors):
    comm = Several()
    for tensor in tensors:
        note_plain(tensor, comm)
    return comm.plain


def test_notes_of_plain_tensors():
    """Values, their order and later writes tell; repeated ones, as of 2 TiB here, are read once."""
    x = torch.arange(6.0).view(3, 2)
    assert noted(x) == noted(x.clone()) == noted(x.t().contiguous().t()) != noted(x.flip(0))
    assert noted(torch.ones(1).expand(2**37, 4)) == noted(torch.ones(1, 1)) != noted(x)
    large = torch.zeros(2**21)
    end = large.clone()
    end[-1] = 1
    assert noted(large) != noted(end)
    comm = Several()
    note_plain(x, comm)
    once = comm.plain
    note_plain(x, comm)
    assert comm.plain == once
    x.add_(1)
    note_plain(x, comm)
    assert comm.plain != once


def notes_of_a_step(root):
    """What a step notes whose plain tensors are gradients, which PyTorch makes."""
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(GAT(data.x.size(1), 4, 2, 2).double())
    out = model(data.x, data.edge_index)
    (out.square().mean() + out.sum(1).relu().sum()).backward()
    return pyg_sar.comm.current().plain


def test_gradients_are_not_noted(tmp_path):
    assert workers(notes_of_a_step, 2, Partitions(tmp_path)(make_graph(), 2)) == [0, 0]


def stops_in_a_debugger():
    breakpoint()


def test_a_breakpoint_in_a_worker_process_says_how_to_debug():
    with pytest.raises(WorkerError, match=r"no terminal in a worker.*run\(fn, parts=P\)"):
        pyg_sar.launch(stops_in_a_debugger, 1, env={"PYTHONBREAKPOINT": "pdb.set_trace"})


def test_what_an_interrupted_run_leaves(tmp_path):
    path = str(tmp_path / "run.ckpt")
    assert "nothing is kept" in say_kept(RunConfig(parts="p"))
    assert f"there is no '{path}'" in say_kept(RunConfig(parts="p", checkpoint=path))
    root = Partitions(tmp_path)(load_graph("synthetic:nodes=40,degree=4,features=4,classes=3"), 1)
    train = TrainConfig(epochs=3)
    config = RunConfig(parts=str(root), train=train, checkpoint=path, progress="none")
    train_worker(config)
    assert os.path.exists(path) and "the state after epoch 3" in say_kept(config)
