"""Calls of layers in the global view: hooks, batches, and backward passes that begin anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import MODES, parts
from torch import Tensor
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex, Index
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GraphNorm, MessagePassing, SAGEConv
from torch_geometric.utils import scatter, softmax, sort_edge_index

import pyg_sar
from pyg_sar.errors import DistributedIndexError, WorkerError
from pyg_sar.nn.shared_parameters import SharedParameters
from pyg_sar.tensors import NodeTensor, mapped, whole

DOUBLE = torch.float64
NODES = 20


def make_graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(NODES, 6, dtype=DOUBLE, generator=draw),
        edge_index=torch.randint(0, NODES, (2, 90), generator=draw),
        mask=torch.rand(NODES, generator=draw) < 0.5,
    )


class Converted:
    """Distributes modules where the data is that of workers."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __call__(self, module: torch.nn.Module) -> Any:
        module = module.to(DOUBLE)
        if isinstance(self.data.x, NodeTensor):
            policy = pyg_sar.SARPolicy(message_budget=300)
            module = pyg_sar.distribute(module, policy)
        return module


Case = Callable[[Data, Converted], Any]


def equal(tmp_path: Path, *cases: Case) -> None:
    """All workers have the numbers of one process."""

    def run(data: Data) -> list[Any]:
        found = []
        for case in cases:
            torch.manual_seed(1)
            found.append(mapped(lambda t: whole(t, "test").detach(), case(data, Converted(data))))
        return found

    expected = run(make_graph())
    pyg_sar.write_partitions(make_graph(), 3, tmp_path / "parts", "random")
    work = lambda: run(pyg_sar.load_partition(tmp_path / "parts"))  # noqa: E731
    for found in pyg_sar.launch(work, 1, parts=3):
        for case, one, other in zip(cases, expected, found, strict=True):
            torch.testing.assert_close(
                other, one, rtol=1e-9, atol=1e-9, msg=lambda m, c=case: f"{c.__name__}: {m}"
            )


def gradients(module: torch.nn.Module, *more: Tensor) -> list[Tensor]:
    return [p.grad for p in (*module.parameters(), *more)]


# Backward passes that begin at a node tensor ##################################


SAGEConv(1, 1)  # PyG writes the class's propagate() for the first layer that is built.


def conv_of(kind: str) -> torch.nn.Module:
    return SAGEConv(6, 3, aggr="softmax") if kind == "sage" else GATConv(6, 3)


def from_rows(kind: str) -> Case:
    """``out.backward(rows)``, twice."""

    def case(data: Data, converted: Converted) -> Any:
        conv, x = converted(conv_of(kind)), data.x.clone().requires_grad_()
        out = conv(x, data.edge_index)
        out.backward(out.detach(), retain_graph=True)
        out.backward(gradient=torch.ones(NODES, 3, dtype=DOUBLE), inputs=[x])
        return gradients(conv, x)

    return case


def from_one_value(kind: str) -> Case:
    """A row, and one number of a row."""

    def case(data: Data, converted: Converted) -> Any:
        conv, x = converted(conv_of(kind)), data.x.clone().requires_grad_()
        conv(x, data.edge_index)[3, 1].backward()
        torch.autograd.backward([conv(x, data.edge_index)[5].sum()])
        return gradients(conv, x)

    return case


def asked_for(kind: str) -> Case:
    """``torch.autograd.grad`` of rows, of a list and of a dict."""

    def case(data: Data, converted: Converted) -> Any:
        conv, x = converted(conv_of(kind)), data.x.clone().requires_grad_()
        out = conv(x, data.edge_index)
        found = torch.autograd.grad(
            out, [x, *conv.parameters()], grad_outputs=out.detach(), retain_graph=True
        )
        return found, torch.autograd.grad(out.square().sum(), {"x": x})

    return case


def again(kind: str) -> Case:
    """The layer runs again in the backward pass."""

    def case(data: Data, converted: Converted) -> Any:
        conv, x = converted(conv_of(kind)), data.x.clone().requires_grad_()
        for reentrant in (False, True):
            out = checkpoint(conv, x, data.edge_index, use_reentrant=reentrant)
            out.backward(out.detach())
        return gradients(conv, x)

    return case


def test_backward_passes_begin_anywhere(tmp_path: Path) -> None:
    equal(tmp_path, from_rows("sage"), from_one_value("gat"), asked_for("sage"), again("gat"))


class Labelled(Tensor):
    """A loss of a class of its own: torch calls its functions with all such classes off."""


class ByTarget(gnn.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax(x_j, index, num_nodes=size_i) * x_j


def test_a_loss_of_a_subclass(tmp_path: Path) -> None:
    def gradient(data: Data, layer: Any) -> Tensor:
        x = data.x.clone().requires_grad_()
        layer(x, data.edge_index).square().sum(-1).mean().as_subclass(Labelled).backward()
        return whole(x.grad, "test")

    expected = gradient(make_graph(), ByTarget())
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")

    def work() -> Tensor:
        data = pyg_sar.load_partition(tmp_path / "parts")
        policy = pyg_sar.SARPolicy(message_budget=300)
        return gradient(data, pyg_sar.distribute(ByTarget(), policy))

    for found in pyg_sar.launch(work, 1, parts=2):
        torch.testing.assert_close(found, expected)


# What autograd doesn't see ####################################################


def data_assigned(data: Data, converted: Converted) -> Any:
    x, y = data.x.clone().requires_grad_(), data.x * 2
    x.data = y
    y.add_(1)  # They share their memory.
    x.data.mul_(2)
    x.square().sum().backward()
    return x, y, x.grad


def ascended(data: Data, converted: Converted) -> Any:
    """Adversarial features, as FLAG perturbs them."""
    conv, noise = converted(SAGEConv(6, 3)), torch.zeros_like(data.x).requires_grad_()
    for _ in range(2):
        conv(data.x + noise, data.edge_index).square().mean().backward()
        noise.data = (noise.detach() + 0.1 * noise.grad.sign()).data
        noise.grad[:] = 0
    return noise, gradients(conv)


def distributions(data: Data, converted: Converted) -> Any:
    """Their checks ask whether all values are valid."""
    normal = torch.distributions.Normal(data.x, data.x.exp())
    return normal.log_prob(data.x * 2).mean(), torch.distributions.Categorical(
        logits=data.x
    ).entropy()


def addresses(data: Data, converted: Converted) -> Any:
    """What PyG's ``EdgeIndex`` and ``Index`` tell copies from themselves by."""
    edges = EdgeIndex(data.edge_index, sparse_size=(NODES, NODES))
    copy, index = edges.clone(), Index(data.edge_index[0], dim_size=NODES)
    copy += 1
    kinds = [t.dtype == torch.int32 for t in (edges.int(), edges, index.int(), index)]
    same = [data.x.data_ptr() == x.data_ptr() for x in (data.x.detach(), data.x.clone(), data.mask)]
    return edges.as_tensor(), copy.as_tensor(), copy is edges, kinds, same


def scaled_losses(data: Data, converted: Converted) -> Any:
    """A step is left out where a gradient of some row is infinite."""
    weight = data.x.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for scale in (1.0, float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale((weight[3:5] * scale).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight, scaler.get_scale()


def test_what_autograd_does_not_see(tmp_path: Path) -> None:
    equal(tmp_path, data_assigned, ascended, distributions, addresses, scaled_losses)

    def refused() -> None:
        data, plain = pyg_sar.load_partition(tmp_path / "parts"), torch.zeros(NODES, 6)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, pytest.raises(DistributedIndexError, match=r"plain.*x\.data\.copy_"):
                plain.data = data.x.float()
        assert not plain.any()
        for use in (
            lambda: torch.from_dlpack(data.x),
            lambda: data.x.apply_(abs),
            lambda: plain.map_(data.x, max),
            data.x.share_memory_,
            data.x.storage,
        ):
            with pytest.raises(DistributedIndexError, match=r"reads memory.*x\.to_local\(\)"):
                use()
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(data.x)
        for values in (torch.ones(NODES, 6, dtype=DOUBLE), data.x[data.mask]):
            with pytest.raises(DistributedIndexError, match=r"x\.data = values"):
                data.x.data = values
        data.x.data = data.x.float()
        assert data.x.dtype == data.x.to_local().dtype == torch.float32

    pyg_sar.launch(refused, 1, parts=3)


# Hooks ########################################################################


def hooks_of(kind: Callable[[], torch.nn.Module], *more: str) -> Case:
    """A layer's hooks see the whole graph and change what it takes and gives."""

    def case(data: Data, converted: Converted) -> Any:
        layer, seen = converted(kind()), []
        given = [data[name] for name in more]
        if isinstance(layer, SAGEConv):
            torch.nn.utils.spectral_norm(layer.lin_r)  # A hook of torch, of parameters.
            layer.lin_l.register_forward_hook(lambda _, args, out: out - out.mean(0))
        if isinstance(layer, gnn.BatchNorm):
            layer.module.register_forward_hook(lambda _, args, out: out - out.mean(0))
        layer.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(0), *args[1:]))
        layer.register_forward_hook(lambda _, args, out: out / out.norm(dim=0))
        layer.register_forward_hook(
            lambda _, args, kwargs, out: seen.append((args[0], out)), with_kwargs=True
        )
        x = data.x.clone().requires_grad_()
        for scale in (1.0, 2.0):
            layer(x * scale, *given).square().mul(x[:, :1]).sum().backward()
        layer.register_full_backward_hook(lambda _, into, out: seen.append((into[0], out[0])))
        layer.register_full_backward_pre_hook(lambda _, out: (out[0] - out[0].mean(0),))
        layer(x, *given).square().mul(x[:, :1]).sum().backward()
        return seen, gradients(layer, x)

    return case


class Whole(torch.nn.Module):
    """A model whose own hooks get ``edge_index``, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_hooks_see_the_whole_graph(tmp_path: Path) -> None:
    layers = hooks_of(lambda: SAGEConv(6, 3), "edge_index"), hooks_of(Whole, "edge_index")
    norms = hooks_of(lambda: torch.nn.BatchNorm1d(6)), hooks_of(lambda: gnn.BatchNorm(6))
    equal(tmp_path, *layers, *norms)


# Groups of nodes ##############################################################


def plain_batch(data: Data, converted: Converted) -> Any:
    """A batch that all workers hold."""
    norm, batch = converted(GraphNorm(6)), torch.arange(NODES) % 3
    out = norm(data.x, batch)
    out.square().sum().backward()
    return out, gradients(norm)


def test_a_plain_batch(tmp_path: Path) -> None:
    equal(tmp_path, plain_batch)


# One sum of gradients per backward pass ########################################


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([GATConv(6, 8), gnn.BatchNorm(8), SAGEConv(8, 3)])

    def __getitem__(self, k: int) -> Any:
        return self.layers[k]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, norm, last = self.layers
        out: Tensor = last(norm(first(x, edge_index)), edge_index)
        return out


def net(converted: Converted) -> Any:
    return converted(Net())


def loss_of(model: Any, data: Data) -> Tensor:
    out: Tensor = model(data.x, data.edge_index)
    return out.square().mean()


def of_two_passes(data: Data, converted: Converted) -> Any:
    """Two passes forward before one back, with other weights in the second."""
    model = net(converted)
    first = loss_of(model, data)
    (first + loss_of(model, data.clone())).backward(retain_graph=True)
    first.backward()
    return gradients(model)


def of_changing_weights(data: Data, converted: Converted) -> Any:
    """Steps in place, by ``.data``, by another parameter; a layer is frozen for a while."""
    model, found = net(converted), []
    for step in range(5):
        model.requires_grad_(True)
        if step == 1:
            model[0].requires_grad_(False)
        loss_of(model, data).backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad)
                    p.grad = None
        if step == 2:
            for p in model.parameters():
                p.data = p.data * 2
        if step == 3:
            model[2].lin_l.weight = torch.nn.Parameter(model[2].lin_l.weight.detach() / 2)
    return found


def copied(data: Data, converted: Converted) -> Any:
    model = net(converted)
    loss_of(model, data).backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    loss_of(other, data).backward()
    del model
    loss_of(other, data).backward()
    return gradients(other)


def pruned(data: Data, converted: Converted) -> Any:
    model = net(converted)
    prune.l1_unstructured(model[0].lin, "weight", 0.5)
    prune.l1_unstructured(model[0], "att_src", 0.5)
    loss_of(model, data).backward()
    return gradients(model)


def parametrized(data: Data, converted: Converted) -> Any:
    model = net(converted)
    torch.nn.utils.parametrizations.weight_norm(model[0].lin, "weight")
    torch.nn.utils.parametrizations.weight_norm(model[2].lin_l, "weight")
    loss_of(model, data).backward()
    return gradients(model)


def of_another_network(data: Data, converted: Converted) -> Any:
    """Weights that are computed; the layer keeps rows of its own beside them."""
    model, source = net(converted), torch.nn.Linear(4, 8, dtype=DOUBLE)
    del model[0].bias, model[2].lin_l.weight
    model[2].register_forward_hook(lambda m, _, out: setattr(m, "last", out))
    total = torch.zeros((), dtype=DOUBLE)
    for _ in range(2):
        model[0].bias = source(torch.ones(4, dtype=DOUBLE)).sin()
        model[2].lin_l.weight = source.weight.t()[:3] * 2
        total = total + loss_of(model, data)
    (total + model[2].last.sum()).backward()
    return gradients(model, *source.parameters())


class Holding(Net):
    """Holds tensors of the graph before it is distributed."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.register_buffer("mask", data.mask)
        self.features = torch.nn.Embedding.from_pretrained(data.x.clone(), freeze=False)
        self.weight = torch.nn.Parameter(torch.ones_like(data.edge_index[0], dtype=DOUBLE))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        features = self.features.weight + scatter(self.weight, edge_index[1], 0).view(-1, 1)
        return super().forward(x * features, edge_index)[self.mask]


def holding(data: Data, converted: Converted) -> Any:
    model = converted(Holding(data))
    loss_of(copy.deepcopy(model), data).backward()
    loss_of(model, data).backward()
    return gradients(model), [*model.buffers()]


def in_lists(data: Data, converted: Converted) -> Any:
    """Operators on lists of tensors: of optimizers, norms and averages of models."""
    model = converted(Holding(data))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        optimizer.step()
        average.update_parameters(model)
    return norm, [*model.parameters()], [*average.parameters()]


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """Accumulated, asked for, hooked and checkpointed ones: test_gradient_hooks.py."""
    cases = (of_two_passes, of_changing_weights, copied, pruned, parametrized)
    equal(tmp_path, *cases, of_another_network, holding, in_lists)


def summed_once(root: Path) -> list[Any]:
    data = pyg_sar.load_partition(root)
    model = net(Converted(data))
    comm, found = pyg_sar.comm.current(), []
    for _ in range(2):
        loss = loss_of(model, data)
        with pyg_sar.Ledger(comm) as ledger:
            loss.backward()
        found.append(ledger.sent_messages(kind="gradient sum"))
        torch.optim.SGD(model.parameters(), 0.1).step()
    errors = []
    for change in (
        lambda m: setattr(m[0], "negative_slope", 0.3),
        lambda m: torch.nn.init.ones_(m[2].lin_l.weight),
    ):
        before = copy.deepcopy(model)
        if comm.rank == 1:
            change(model)
        with pytest.raises(ValueError, match="differs between the workers") as caught:
            loss_of(model, data).backward()
        errors.append(str(caught.value))
        model = before
    return [found, errors]


def test_a_pass_sends_one_sum_and_compares_the_models(tmp_path: Path) -> None:
    pyg_sar.write_partitions(make_graph(), 2, tmp_path)
    for found, errors in pyg_sar.launch(summed_once, 2, tmp_path):
        assert found == [1, 1]
        assert "layers.0.negative_slope" in errors[0] and "layers.2.lin_l.weight" in errors[1]


def test_layers_join_in_the_same_order_where_a_number_was_anothers() -> None:
    """``id()`` of a layer that is gone comes again on one worker, and on another it doesn't."""
    shared, (gone, second, third) = SharedParameters(), (SAGEConv(2, 2) for _ in range(3))
    shared.join("gone", gone)
    shared._layers[id(third)] = shared._layers.pop(id(gone))  # as if they had one number
    shared.join("second", second)
    shared.join("third", third)
    assert [name for name, _ in shared.layers()] == ["second", "third"]


# Out and back ##################################################################


def written_after(write: Callable[[Tensor], Any]) -> Case:
    def case(data: Data, converted: Converted) -> Any:
        """Whether a backward pass says that what it needs was written."""
        net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU())
        out = converted(gnn.GINConv(net))(data.x, data.edge_index)
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    return case


def constant_written(data: Data, converted: Converted) -> Any:
    """Weights of edges that are written, as what layers keep of them must notice."""
    layer, weight = converted(gnn.GCNConv(6, 4)), data.edge_index[0].double() + 1
    outs = [layer(data.x, data.edge_index, weight)]
    for part in (weight, weight.view(-1, 1)[:, 0], weight.data, weight.detach()):
        part.mul_(part + 1)
        outs.append(layer(data.x, data.edge_index, weight))
        outs.append(layer(data.x, data.edge_index, part))
    return outs


def test_what_layers_keep_of_a_tensor_knows_of_writes(tmp_path: Path) -> None:
    """As PyTorch's versions do: of a result's, of a view's, of a constant's."""
    writes = [lambda out: out.mul_(2), lambda out: out[:, :2].add_(1), lambda out: out[3].zero_()]
    equal(tmp_path, constant_written, *map(written_after, writes))


def rows_out_and_back(data: Data, converted: Converted) -> Any:
    """A function of each row and one of each edge; then all rows on every worker."""
    conv = converted(gnn.GINEConv(torch.nn.Linear(6, 6), edge_dim=6))
    weight = torch.randn(6, 6, dtype=DOUBLE).requires_grad_()
    x, ends = data.x @ weight, data.x[data.edge_index[0]] - data.x[data.edge_index[1]]
    if isinstance(data.x, NodeTensor):
        assert type(x.to_local()) is Tensor and len(x.to_local()) < NODES
        assert data.edge_index.to_local().size(1) == len(ends.to_local())
        x = pyg_sar.from_local(x.to_local().sin(), data)
        ends = pyg_sar.from_local(ends.to_local().cos(), ends)
        full = conv(x, data.edge_index, ends).full_tensor()
    else:
        full = conv(x.sin(), data.edge_index, ends.cos())
    assert type(full) is Tensor
    loss = (full @ full.t()).tanh().logsumexp(0).sum()
    loss.backward()
    return [full, *gradients(conv, weight)]


def test_rows_out_and_back(tmp_path: Path) -> None:
    equal(tmp_path, rows_out_and_back)


# One message of gradients ######################################################


class Own(gnn.MessagePassing):
    """A layer as users write them: with maps in its ``forward`` and ``update``."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.before = gnn.Linear(6, 6, bias=False)
        self.after = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.before(x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()

    def update(self, aggr_out: Tensor) -> Tensor:
        return self.after(aggr_out)


class Parts(torch.nn.Module):
    """Linear maps, a recurrent cell and layers beside each other; one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.conv = torch.nn.Linear(6, 6), Own(), gnn.GCNConv(6, 6)
        self.cell, self.head = torch.nn.GRUCell(6, 6), torch.nn.Linear(6, 3)
        self.unused = torch.nn.Linear(64, 64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(self.first(x).relu())
        h = self.cell(self.own(x, edge_index), self.conv(x, edge_index))
        return self.head(h)


def test_all_gradients_of_rowwise_maps_travel_in_one_message(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Parts().to(DOUBLE)

    def steps(root: Path) -> tuple[list[Tensor | None], int, int]:
        data, comm = pyg_sar.load_partition(root), pyg_sar.comm.current()
        own = pyg_sar.distribute(copy.deepcopy(model))
        for _ in range(3):  # What parameters are used is known after the first step.
            own.zero_grad()
            with pyg_sar.Ledger(comm) as ledger:
                own(data.x, data.edge_index).square().sum().backward()
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.add_(0)
        sums, total = ledger.sent_messages(kind="gradient sum"), ledger.sent_bytes()
        return [p.grad for p in own.parameters()], sums, total

    data = make_graph()
    plain = copy.deepcopy(model)
    plain(data.x, data.edge_index).square().sum().backward()
    pyg_sar.write_partitions(data, 3, tmp_path / "parts", "random")
    for found_here, sums, total in pyg_sar.launch(steps, 3, tmp_path / "parts"):
        assert sums == 1
        assert total < 8 * 64 * 64  # Nothing is sent for what no call uses.
        for found, expected in zip(found_here, plain.parameters(), strict=True):
            assert (found is None) == (expected.grad is None)
            if found is not None:
                assert torch.allclose(found, expected.grad, rtol=1e-10, atol=1e-12)


def test_dropout_of_unlike_generators_is_an_error(tmp_path: Path) -> None:
    """Whether layers draw or not; what is drawn alike, or not kept, is none."""
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")

    def drop(seed: int, p: float) -> None:
        data = pyg_sar.load_partition(tmp_path / "parts")
        layer = pyg_sar.distribute(SAGEConv(6, 3).to(DOUBLE))
        for begin in (0, 0, 0, seed):  # A layer's first calls compare the generators themselves.
            torch.manual_seed(begin)
            out = layer(torch.dropout(data.x, p, p > 0), data.edge_index)
            out.square().sum().backward()

    pyg_sar.launch(lambda: drop(1, 0.5), 2)
    pyg_sar.launch(lambda: drop(pyg_sar.comm.current().rank, 0.0), 2)
    with pytest.raises(WorkerError, match=r"The random generators of rank 1 and rank 0 are in"):
        pyg_sar.launch(lambda: drop(pyg_sar.comm.current().rank, 0.5), 2)


class Weighed(MessagePassing):
    """The reader's own layer, whose messages, or sums, are weighed."""

    def __init__(self, late: bool) -> None:
        super().__init__(aggr="sum")
        self.lin, self.late = torch.nn.Linear(6, 3), late

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        given = {"v": w, "w": w.detach()} if self.late else {"w": w, "v": w.detach()}
        out: Tensor = self.propagate(edge_index, x=self.lin(x), **given)
        return out

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return x_j if self.late else x_j * w.view(-1, 1)

    def aggregate(self, inputs: Tensor, index: Tensor, v: Tensor, dim_size: int) -> Tensor:
        found: Tensor = super().aggregate(inputs * v.view(-1, 1), index, dim_size=dim_size)
        return found


class Updated(MessagePassing):
    """Its ``update()`` gets the rows of all nodes by the name by which messages read them."""

    def __init__(self, flow: str) -> None:
        super().__init__(aggr="sum", flow=flow)
        self.lin = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x))
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + x.tanh()


SELECTED = torch.arange(NODES)[torch.arange(NODES) != 5].flip(0)
AS_MANY: dict[str, Callable[[Any, Callable[[Any], Any]], Tensor]] = {
    "weights of edges": lambda v, c: c(gnn.GraphConv(6, 3))(v.x, v.edge_index, v.edge_weight),
    "weights of nodes": lambda v, c: c(gnn.GraphConv(6, 3))(v.x, v.edge_index, v.x[:, 0]),
    "weights of both": lambda v, c: c(gnn.GCNConv(6, 3))(
        v.x, v.edge_index, v.x[:, 0].abs() + v.edge_weight
    ),
    "attributes of nodes": lambda v, c: c(gnn.GATConv(6, 3, edge_dim=6))(v.x, v.edge_index, v.x),
    "x of edges": lambda v, c: c(gnn.SAGEConv(6, 3))(v.edge_attr, v.edge_index),
    "a second x of edges": lambda v, c: c(gnn.GCN2Conv(6, 0.5, 1.0, 1))(
        v.x, v.edge_attr, v.edge_index
    ),
    "two x": lambda v, c: c(gnn.GCN2Conv(6, 0.5, 1.0, 1))(v.x, v.x.sin(), v.edge_index),
    "sorted edges": lambda v, c: c(gnn.GraphConv(6, 3))(
        v.x, *sort_edge_index(v.edge_index, v.edge_weight)
    ),
    "a subgraph by ids": lambda v, c: (lambda s: c(gnn.GCNConv(6, 3))(
        s.x, s.edge_index, s.edge_weight
    ))(v.subgraph(SELECTED)),
    "an own layer, of edges": lambda v, c: c(Weighed(False))(v.x, v.edge_index, v.edge_weight),
    "an own layer, of nodes": lambda v, c: c(Weighed(False))(v.x, v.edge_index, v.x[:, 0]),
    "an own sum, of nodes": lambda v, c: c(Weighed(True))(v.x, v.edge_index, v.x[:, 0]),
    "an own update, turned edges": lambda v, c: c(Updated("source_to_target"))(
        v.x, v.edge_index.flip(0)
    ),
    "an own update, backwards": lambda v, c: c(Updated("target_to_source"))(v.x, v.edge_index),
}  # fmt: skip


def test_nodes_and_edges_that_are_as_many_are_told_apart(tmp_path: Path) -> None:
    """Each node has one edge: parts have as many edges as nodes, in another order."""
    draw = torch.Generator().manual_seed(0)
    ends = torch.stack([torch.randperm(NODES, generator=draw), torch.arange(NODES)])
    ends = ends[:, torch.randperm(NODES, generator=draw)]
    graph = Data(
        x=make_graph().x,
        edge_index=ends,
        edge_weight=torch.rand(NODES, dtype=DOUBLE, generator=draw),
        edge_attr=torch.randn(NODES, 6, dtype=DOUBLE, generator=draw),
    )
    pyg_sar.write_partitions(graph, 3, tmp_path / "parts", "random")

    def outcomes(data: Data, convert: Callable[[Any], Any]) -> list[list[Tensor]]:
        found = []
        for call in AS_MANY.values():
            torch.manual_seed(1)
            made: list[Any] = []

            def converted(layer: Any, made: list[Any] = made) -> Any:
                made.append(convert(layer.to(DOUBLE)))
                return made[0]

            out = call(data, converted)
            out.square().sum().backward()
            found.append([whole(out, "test").detach(), *gradients(made[0])])
        return found

    right = outcomes(graph, lambda layer: layer)
    work = lambda: outcomes(pyg_sar.load_partition(tmp_path / "parts"), pyg_sar.distribute)  # noqa: E731
    for found in parts(work, 3):
        for name, one, other in zip(AS_MANY, right, found, strict=True):
            torch.testing.assert_close(
                other, one, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_of_selected_edges_as_well(tmp_path: Path) -> None:
    def weights_of_nodes(data: Data, converted: Converted) -> Any:
        edges = data.edge_index[:, torch.arange(90) < NODES]
        return converted(gnn.GraphConv(6, 3))(data.x, edges, data.x[:, 0])

    equal(tmp_path, weights_of_nodes)


def test_of_graphs_as_many_as_nodes(tmp_path: Path) -> None:
    """A number of each graph is none of each node: ``lambda_max``."""

    def of_graphs(data: Data, converted: Converted) -> Any:
        batch = (data.x[:, 0] > 0).long() * (NODES - 1)
        largest = torch.linspace(2, 3, NODES, dtype=DOUBLE).requires_grad_()
        layer = converted(gnn.ChebConv(6, 3, 2))
        out = layer(data.x, data.edge_index, None, batch, largest)
        out.square().sum().backward()
        return [out, *gradients(layer, largest)]

    equal(tmp_path, of_graphs)


def test_nodes_along_another_axis_are_refused_with_a_remedy(tmp_path: Path) -> None:
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")

    def worker() -> None:
        data = pyg_sar.load_partition(tmp_path / "parts")
        layer = pyg_sar.distribute(gnn.GraphConv(6, 3).double())
        layer.node_dim = 0
        with pytest.raises(DistributedIndexError, match=r"axis 0 .*pass x.movedim\(1, 0\)"):
            layer(torch.stack([data.x, data.x]), data.edge_index)
        layer.node_dim = -2
        with pytest.raises(DistributedIndexError, match=r"axis -2 .*pass x.movedim\(0, -2\)"):
            layer(torch.stack([data.x, data.x], 1), data.edge_index)

    parts(worker, 2)


class Along(MessagePassing):
    """The reader's own layer, with its nodes along an axis that is counted from the first."""

    def __init__(self, own: bool) -> None:
        super().__init__(aggr="mean", node_dim=1)
        self.lin, self.own = torch.nn.Linear(6, 3).to(DOUBLE), own

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return x_j * x_i.tanh() if self.own else x_j


def test_nodes_along_an_axis_counted_from_the_first(tmp_path: Path) -> None:
    data = make_graph()
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")

    def passed(data: Data, layer: torch.nn.Module) -> list[Tensor]:
        out = layer(torch.stack([data.x, 2 * data.x]), data.edge_index)
        loss = out.square().sum() + out[1, :5].sum()
        return [loss.detach(), *torch.autograd.grad(loss, [*layer.parameters()])]

    layers = [Along(own) for own in (False, True)]

    def worker() -> list[list[Tensor]]:
        part = pyg_sar.load_partition(tmp_path / "parts")
        return [
            passed(part, pyg_sar.distribute(copy.deepcopy(layer), policy))
            for layer in layers
            for policy in MODES
        ]

    expected = [passed(data, layer) for layer in layers for _ in MODES]
    for found in parts(worker, 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_parameter_that_is_frozen_on_one_worker_is_named(tmp_path: Path) -> None:
    pyg_sar.write_partitions(make_graph(), 2, tmp_path / "parts", "random")

    def worker() -> None:
        data = pyg_sar.load_partition(tmp_path / "parts")
        layer = pyg_sar.distribute(SAGEConv(6, 3).to(DOUBLE))
        layer.lin_r.weight.requires_grad_(pyg_sar.comm.current().rank == 0)
        layer(data.x, data.edge_index)

    with pytest.raises(WorkerError, match="with 'lin_r.weight: requires_grad=False' at rank 1 and"):
        parts(worker, 2)
