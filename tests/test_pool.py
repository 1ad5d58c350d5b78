"""Readouts over the nodes of all workers, against PyG's on one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from oracle import TOLERANCE, error, gradient_scale, make_graph, probe, threads
from torch import Tensor
from torch.nn import Linear, Sequential, Tanh
from torch_geometric.nn import aggr
from torch_geometric.utils import degree, scatter, softmax

import pyg_sar
from pyg_sar.nn import registry

CHANNELS, ROWS, GRAPHS = 4, 23, 5
WORLDS = (1, 2, 3, 5)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features() -> Tensor:
    """Rows with ties, and with a maximum that several workers have."""
    x = draw(ROWS, CHANNELS)
    x[1::4, 0] = 2.5
    x[:, 1] = (x[:, 1] > 0).double() + 0.5
    return x


def graphs() -> Tensor:
    """Ascending graph ids; graph 3 has no node."""
    ids = torch.randint(GRAPHS, (ROWS,), generator=torch.Generator().manual_seed(1))
    ids[ids == 3] = 4
    return ids.sort().values


def owners(world: int) -> list[Tensor]:
    """Rows of each worker, interleaved; with three or more, the second has none."""
    part = torch.randint(world, (ROWS,), generator=torch.Generator().manual_seed(2))
    if world > 2:
        part[part == 1] = 0
    return [(part == p).nonzero().view(-1) for p in range(world)]


def deg() -> Tensor:
    return torch.tensor([0, 3, 4, 2, 1])


READOUTS: dict[str, Callable[[], torch.nn.Module]] = {
    "sum": aggr.SumAggregation,
    "mean": aggr.MeanAggregation,
    "max": aggr.MaxAggregation,
    "min": aggr.MinAggregation,
    "mul": aggr.MulAggregation,
    "var": aggr.VarAggregation,
    "var, semi-gradient": lambda: aggr.VarAggregation(semi_grad=True),
    "std": aggr.StdAggregation,
    "softmax": lambda: aggr.SoftmaxAggregation(t=0.7, learn=True),
    "softmax, semi-gradient": lambda: aggr.SoftmaxAggregation(semi_grad=True),
    "softmax, channels": lambda: aggr.SoftmaxAggregation(learn=True, channels=CHANNELS),
    "power mean": lambda: aggr.PowerMeanAggregation(p=2.0, learn=True),
    "multi": lambda: aggr.MultiAggregation(["mean", "max", "std", "min", "sum", "var", "mul"]),
    "multi, softmax": lambda: aggr.MultiAggregation(
        ["mean", "softmax", "max"],
        mode="proj",
        mode_kwargs={"in_channels": CHANNELS, "out_channels": 3},
    ),
    "multi, attention": lambda: aggr.MultiAggregation(
        ["mean", "max"],
        mode="attn",
        mode_kwargs={"in_channels": CHANNELS, "out_channels": 4, "num_heads": 2},
    ),
    "degree scaler": lambda: aggr.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "amplification", "inverse_linear"], deg()
    ),
    "attentional": lambda: aggr.AttentionalAggregation(Linear(CHANNELS, 1), Linear(CHANNELS, 3)),
    "attentional, mlp": lambda: aggr.AttentionalAggregation(
        gnn.MLP([CHANNELS, 5, 1]), gnn.MLP([CHANNELS, 5, 3])
    ),
    "set2set": lambda: aggr.Set2Set(CHANNELS, processing_steps=3),
    "deep sets": lambda: aggr.DeepSetsAggregation(
        Sequential(Linear(CHANNELS, 5), Tanh()), gnn.MLP([5, 6, 3])
    ),
    "variance preserving": aggr.VariancePreservingAggregation,
    "set transformer": lambda: aggr.SetTransformerAggregation(
        CHANNELS, 2, heads=2, layer_norm=True
    ),
    "set transformer, mean": lambda: aggr.SetTransformerAggregation(
        CHANNELS, 3, num_encoder_blocks=2, concat=False
    ),
    "multiset transformer": lambda: aggr.GraphMultisetTransformer(
        CHANNELS, 3, heads=2, layer_norm=True
    ),
}


class Net(torch.nn.Module):
    """A layer per node, a readout, a head per graph; and a head per node that reads graphs."""

    def __init__(self, readout: torch.nn.Module) -> None:
        super().__init__()
        self.lin = Linear(CHANNELS, CHANNELS)
        self.readout = readout
        self.head = gnn.MLP([-1, 6, 2], norm=None)
        self.node = Linear(CHANNELS + 2, 2)

    def forward(self, x: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # The second channel keeps its ties.
        h = torch.cat([x[:, :2], self.lin(x)[:, 2:].sigmoid()], dim=1)
        pooled = self.head(self.readout(h, batch))
        back = pooled.expand(x.size(0), -1) if batch is None else pooled[batch]
        return pooled, self.node(torch.cat([h, back], dim=1))


def make(name: str) -> Net:
    torch.manual_seed(5)
    net = Net(READOUTS[name]()).double()
    with torch.no_grad():
        net(features(), graphs())  # Makes the lazy head.
    return net.train()


def one_pass(net: torch.nn.Module, x: Tensor, batch: Any, ids: Tensor, mean: Any) -> Any:
    """A loss of graphs and nodes, with weights of their own."""
    x = x.clone().requires_grad_()
    pooled, nodes = net(x, batch)
    by_graph = (pooled * draw(*pooled.shape, seed=7)).sum(1)
    by_node = (nodes * draw(ROWS, 2, seed=8)[ids] + nodes.square()).sum(1)
    (mean(by_graph) + mean(by_node)).backward()
    grads = {n: p.grad for n, p in net.named_parameters()}
    return pooled.detach(), nodes.detach(), x.grad, grads, dict(net.named_buffers())


@pytest.mark.parametrize("world", WORLDS)
def test_readouts_are_exact(world: int):
    nets = {name: make(name) for name in READOUTS}
    cases = [(name, True) for name in nets]
    cases += [(name, False) for name in nets if name != "deep sets"]  # One row: no batch norm.

    def run(comm: Any) -> list[Any]:
        found = []
        for name, several in cases:
            net = copy.deepcopy(nets[name])
            ids, mean, batch = torch.arange(ROWS), torch.mean, graphs() if several else None
            if comm is not None:
                net = pyg_sar.distribute(net, view="local")
                ids, mean = owners(world)[comm.rank], pyg_sar.mean
                batch = pyg_sar.space.dist_batch(batch[ids]) if several else None
            found.append((*one_pass(net, features()[ids], batch, ids, mean), ids))
        return found

    expected = run(None)
    workers = threads(lambda: run(pyg_sar.comm.current()), world)
    for k, (case, want) in enumerate(zip(cases, expected, strict=True)):
        ids = torch.cat([w[k][5] for w in workers])
        for place in (1, 2):
            got = torch.empty_like(want[place])
            got[ids] = torch.cat([w[k][place] for w in workers])
            assert error(got, want[place]) <= TOLERANCE, (case, place)
        scale = gradient_scale(want[3])
        for rank, worker in enumerate(workers):
            assert error(worker[k][0], want[0]) <= TOLERANCE, (case, rank)
            for name, gradient in want[3].items():
                assert error(worker[k][3][name], gradient, scale) <= TOLERANCE, (case, name)
            for name, buffer in want[4].items():
                assert error(worker[k][4][name], buffer) <= TOLERANCE, (case, name)


def pools() -> dict[str, tuple[Any, Any]]:
    return {
        "add": (gnn.global_add_pool, pyg_sar.nn.global_add_pool),
        "mean": (gnn.global_mean_pool, pyg_sar.nn.global_mean_pool),
        "max": (gnn.global_max_pool, pyg_sar.nn.global_max_pool),
    }


@pytest.mark.parametrize("world", WORLDS)
def test_functions(world: int):
    """PyG's functions with a distributed batch; the package's with any batch, or none."""
    x, batch = draw(ROWS, CHANNELS), graphs()

    def plain(use: Callable[..., Tensor], *args: Any) -> tuple[Tensor, Tensor]:
        value = x.clone().requires_grad_()
        out = use(value, *args)
        (out * draw(*out.shape, seed=3)).sum().backward()
        return out.detach(), value.grad

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        ids, found = owners(world)[comm.rank], []
        mine = batch[ids]
        for theirs, ours in pools().values():
            for use, args in (
                (theirs, (pyg_sar.space.dist_batch(mine),)),
                (ours, (pyg_sar.space.dist_batch(mine),)),
                (ours, (mine,)),
                (ours, (mine, GRAPHS + 2)),
                (ours, (None,)),
            ):
                value = x[ids].requires_grad_()
                out = use(value, *args)
                (pyg_sar.mean(out * draw(*out.shape, seed=3)) * out.numel()).backward()
                found.append((out.detach(), value.grad, ids))
        return found

    expected = []
    for theirs, _ in pools().values():
        expected += [plain(theirs, batch)] * 3
        expected += [plain(theirs, batch, GRAPHS + 2), plain(theirs, None)]
    workers = threads(worker, world)
    for k, (out, grad) in enumerate(expected):
        got = torch.empty_like(grad)
        for w in workers:
            assert error(w[k][0], out) <= TOLERANCE, k
            got[w[k][2]] = w[k][1]
        assert error(got, grad) <= TOLERANCE, k


@pytest.mark.parametrize("world", WORLDS)
def test_code_with_a_batch_vector(world: int):
    """What models do with ``batch`` by themselves is global, or refused; never local."""
    x, batch = draw(ROWS, CHANNELS), graphs()

    def use(x: Tensor, batch: Tensor) -> list[Tensor]:
        size = int(batch.max()) + 1
        attention = softmax(x[:, 0], batch, num_nodes=size)
        pooled = x.new_zeros(size, CHANNELS).index_add_(0, batch, x * attention.view(-1, 1))
        nodes = x - scatter(x, batch, dim=0, reduce="mean").index_select(0, batch)
        chosen = batch[x[:, 1] > 0]
        return [
            pooled,
            degree(batch, dtype=x.dtype),
            torch.bincount(batch, minlength=GRAPHS + 1),
            scatter(x.t().contiguous(), batch, dim=1, reduce="max"),
            scatter(x[x[:, 1] > 0], chosen, dim=0, dim_size=size, reduce="min"),
            scatter(batch.new_ones(batch.numel()), batch, dim=0),
            *(attention, nodes, (batch == 2).to(x.dtype)),
        ]

    def worker() -> Any:
        ids = owners(world)[pyg_sar.comm.current().rank]
        mine = pyg_sar.space.dist_batch(batch[ids])
        return [*use(x[ids], copy.deepcopy(mine).clone()), ids]

    expected, workers = use(x, batch), threads(worker, world)
    for k, want in enumerate(expected[:6]):
        assert all(error(w[k], want) <= TOLERANCE for w in workers), k
    for k, want in enumerate(expected[6:], start=6):
        got = torch.empty_like(want)
        for w in workers:
            got[w[-1]] = w[k]
        assert error(got, want) <= TOLERANCE, k


REFUSED_CODE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "unique": lambda x, batch: batch.unique(),
    "sort": lambda x, batch: batch.sort(),
    "add": lambda x, batch: batch + 1,
    "diff": lambda x, batch: batch.diff(),
    "last": lambda x, batch: int(batch[-1]),
    "tolist": lambda x, batch: batch.tolist(),
    "one_hot": lambda x, batch: F.one_hot(batch),
    "to_dense_batch": lambda x, batch: __import__(
        "torch_geometric.utils", fromlist=["x"]
    ).to_dense_batch(x, batch),
}


@pytest.mark.parametrize("name", REFUSED_CODE)
def test_local_numbers_are_refused(name: str):
    def worker() -> None:
        x, batch = draw(4, CHANNELS), pyg_sar.space.dist_batch(torch.tensor([0, 0, 1, 1]))
        with pytest.raises(pyg_sar.errors.DistributedIndexError, match="distributed batch vector"):
            REFUSED_CODE[name](x, batch)

    threads(worker, 2)


def test_wrong_batches_are_errors_on_every_worker():
    def worker() -> None:
        rank = pyg_sar.comm.current().rank
        with pytest.raises(ValueError, match="num_graphs"):
            pyg_sar.space.dist_batch(torch.tensor([0]), num_graphs=rank + 1)
        with pytest.raises(ValueError, match="graph ids from 0 to 1"):
            pyg_sar.space.dist_batch(torch.tensor([0, rank + 1]), num_graphs=2)
        with pytest.raises(ValueError, match="-1 to 0"):
            pyg_sar.space.dist_batch(torch.tensor([-rank]))
        with pytest.raises(TypeError, match="int64"):
            pyg_sar.space.dist_batch(torch.zeros(3))
        batch = pyg_sar.space.dist_batch(torch.tensor([0, 1, 2]))
        with pytest.raises(ValueError, match="3 graphs"):
            gnn.global_add_pool(draw(3, 2), batch, 2)
        with pytest.raises(ValueError, match="each of the 1"):
            gnn.global_add_pool(draw(2, 2), batch[:1])  # PyG would broadcast it.

    threads(worker, 2)


def test_readouts_refuse_ordinary_indices():
    """Local target ids look like graph ids: neither is guessed."""

    def worker() -> None:
        model = pyg_sar.distribute(Sequential(aggr.SumAggregation()), view="local")
        with pytest.raises(
            pyg_sar.errors.DistributedIndexError, match=r"ordinary 'index' at rank \d"
        ):
            model[0](draw(3, 2), torch.tensor([0, 1, 1]))
        with pytest.raises(ValueError, match="'ptr'"):
            model[0](draw(3, 2), ptr=torch.tensor([0, 3]))

    threads(worker, 2)


def test_one_process_takes_ordinary_indices():
    x, batch = draw(ROWS, CHANNELS), graphs()
    ptr = torch.bincount(batch).cumsum(0)
    ptr = torch.cat([ptr.new_zeros(1), ptr])
    for name in ("sum", "mean", "softmax", "set transformer"):
        plain = READOUTS[name]().double()
        ours = pyg_sar.distribute(copy.deepcopy(plain), view="local")
        assert error(ours(x, batch), plain(x, batch)) <= TOLERANCE
        assert error(ours(x, batch, dim_size=9), plain(x, batch, dim_size=9)) <= TOLERANCE
        assert error(ours(x, ptr=ptr), plain(x, batch)) <= TOLERANCE


REFUSED = {
    "MedianAggregation": aggr.MedianAggregation,
    "QuantileAggregation": lambda: aggr.QuantileAggregation(0.3),
    "SortAggregation": lambda: aggr.SortAggregation(3),
    "LSTMAggregation": lambda: aggr.LSTMAggregation(4, 4),
    "GRUAggregation": lambda: aggr.GRUAggregation(4, 4),
    "MLPAggregation": lambda: aggr.MLPAggregation(4, 4, 3, num_layers=1),
    "LCMAggregation": lambda: aggr.LCMAggregation(4, 4),
    "EquilibriumAggregation": lambda: aggr.EquilibriumAggregation(4, 4, [4]),
    "PatchTransformerAggregation": lambda: aggr.PatchTransformerAggregation(4, 4, 2, 4),
    "OwnReadout": lambda: OwnReadout(),
    "OwnSum": lambda: OwnSum(),
}


class OwnReadout(aggr.Aggregation):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.sum(0)


class OwnSum(aggr.SumAggregation):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.sum(0)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_readouts_name_the_module(name: str):
    def worker() -> None:
        model = torch.nn.ModuleDict({"readout": REFUSED[name]()})
        with pytest.raises(ValueError, match=rf"'readout' \({name}\) can't .*rank \d"):
            pyg_sar.distribute(model, view="local")

    threads(worker, 2)
    pyg_sar.distribute(
        torch.nn.ModuleDict({"readout": REFUSED[name]()}), view="local"
    )  # One process is exact.


def test_every_aggregation_is_exact_or_refused():
    kinds = {getattr(aggr, name) for name in aggr.__all__} - {aggr.Aggregation}
    assert kinds - set(registry.MODULES) == kinds & set(registry.REFUSED)


class Readers(torch.nn.Module):
    """A graph classifier of PyG's tutorials, with a batch norm after the readout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(6, 5)
        self.readout = aggr.MeanAggregation()
        self.head = gnn.MLP([5, 5, 3], dropout=0.0, norm="batch_norm")

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(self.readout(self.conv(x, edge_index).relu(), batch))


@pytest.mark.parametrize("world", [2, 3])
def test_graph_classification_in_three_lines(world: int, tmp_path: Any):
    """``load_partition``, ``distribute``, ``mean``: gradients and running statistics are exact."""
    data = make_graph(40, 160)
    data.batch = (torch.arange(40) * 4 // 40).long()
    data.graph_y = torch.tensor([0, 2, 1, 1])
    pyg_sar.write_partitions(data, world, tmp_path / "parts", "random")
    model = Readers().double()

    def train(model: torch.nn.Module, data: Any, mean: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            out = model(data.x, data.edge_index, data.batch)
            mean(F.cross_entropy(out, data.graph_y, reduction="none")).backward()
            optimizer.step()
        return {n: t.detach() for n, t in model.state_dict().items()}

    expected = train(copy.deepcopy(model), data, torch.mean)

    def worker() -> Any:
        mine = pyg_sar.load_partition(tmp_path / "parts", view="local")
        ours = pyg_sar.distribute(copy.deepcopy(model), replicated=["head"], view="local")
        return train(ours, mine, pyg_sar.mean)

    for found in threads(worker, world):
        for name, value in expected.items():
            assert error(found[name], value) <= TOLERANCE, name


def test_replicated_names_are_checked():
    for names in (["tail"], "head", [""]):
        with pytest.raises(ValueError, match=r"'replicated' must be names .*conv"):
            pyg_sar.distribute(Readers(), replicated=names, view="local")


def test_one_row_per_graph_travels():
    """The sum of 4 columns over 5 graphs and back: nothing per node."""

    def worker() -> Any:
        comm = pyg_sar.comm.current()
        batch = pyg_sar.space.dist_batch(torch.arange(50) % GRAPHS)
        x = draw(50, CHANNELS).requires_grad_()
        with pyg_sar.Ledger(comm) as ledger:
            out = gnn.global_add_pool(x, batch)
            (out * probe(torch.arange(GRAPHS) + GRAPHS * comm.rank, out)).sum().backward()
        return [ledger.sent_bytes(phase=phase) for phase in ("forward", "backward", "")]

    bytes_ = GRAPHS * CHANNELS * 8
    assert threads(worker, 2) == [[bytes_, bytes_, 0]] * 2


def test_a_loss_of_graphs_that_is_counted_by_every_worker_warns():
    """Without ``pyg_sar.mean`` gradients are W times too large."""

    def each_node(rows: Tensor) -> Tensor:
        """No loss of graphs: every node has its own share of what comes back."""
        return (rows * probe(torch.arange(50) + 50 * pyg_sar.comm.current().rank, rows)).sum()

    def worker(pool: Any, loss: Any) -> None:
        batch = pyg_sar.space.dist_batch(torch.arange(50) % GRAPHS)
        out = pool(draw(50, CHANNELS).requires_grad_(), batch)
        loss(out[batch] if loss is each_node else out.square().mean(-1)).backward()

    for pool in (gnn.global_add_pool, gnn.global_max_pool):
        for loss in (pyg_sar.mean, each_node, torch.mean, torch.sum):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                threads(worker, 2, pool, loss)
            texts = [str(w.message) for w in caught]
            wrong = loss in (torch.mean, torch.sum)
            assert sum("Call backward() on pyg_sar.mean(losses)" in t for t in texts) == 2 * wrong
