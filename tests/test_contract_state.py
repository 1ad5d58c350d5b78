"""The contract, rules 4 and 5: random, autocast and running state; dtypes of accumulators."""

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
    EDGE_DIM,
    MODES,
    OUT,
    TOLERANCE,
    Job,
    Partitions,
    Sweep,
    assemble,
    assert_small,
    error,
    errors,
    make_graph,
    node_losses,
    one_pass,
    run_jobs,
    set_policy,
    single_process,
    threads,
)
from torch import Tensor
from torch.nn import BatchNorm1d, LayerNorm, Linear, ReLU, Sequential
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_sar
from pyg_sar import SARPolicy

WORLD = 3
REMADE = SARPolicy(mode=1, prefetch=0, message_budget=BUDGET)
AHEAD = SARPolicy(mode=1, prefetch=1, message_budget=BUDGET)
KEPT = SARPolicy(mode=2, prefetch=1, message_budget=BUDGET)


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph()


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, WORLD, "random")


# Rule 4: random numbers ######################################################


class DropsMessages(MessagePassing):
    """Dropout in message: of source features, then of a learned function of them."""

    def __init__(self, aggr: str = "sum", plain: bool = False) -> None:
        super().__init__(aggr=aggr)
        self.lin = Linear(CHANNELS, OUT)
        self.plain = plain

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x) if self.plain else x)

    def message(self, x_j: Tensor) -> Tensor:
        x_j = F.dropout(x_j, 0.4, self.training)
        return x_j if self.plain else F.dropout(self.lin(x_j).tanh(), 0.3, self.training)


class DropsEdges(MessagePassing):
    """Dropout and noise in edge_update, and noise in message."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.score = Linear(2 * CHANNELS, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        score = self.score(torch.cat([x_i, x_j], -1)).sigmoid()
        return F.dropout(score + 0.1 * torch.rand_like(score), 0.3, self.training)

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate * x_j.sin() + 0.01 * torch.randn_like(x_j)


RANDOM: dict[str, Callable[[], MessagePassing]] = {
    "messages": DropsMessages,
    "messages, plain": lambda: DropsMessages(plain=True),
    "messages, max": lambda: DropsMessages("max"),
    "edges": DropsEdges,
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2, dropout=0.4),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2, dropout=0.4, add_self_loops=False),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2, dropout=0.4),
}


def global_loss(layer: torch.nn.Module, data: Data, x: Tensor, seed: int) -> Tensor:
    """The loss with the dropout masks of a seed, other masks on each worker."""
    torch.manual_seed(seed + pyg_sar.comm.current().rank)
    return pyg_sar.mean(node_losses(layer(x, data.edge_index), data.n_id))


def random_pass(layer: torch.nn.Module, data: Data, policy: SARPolicy, seed: int) -> dict[str, Any]:
    """Outputs, gradients and the random state before and after the backward pass."""
    set_policy(layer, policy)
    layer.zero_grad()
    torch.manual_seed(seed + pyg_sar.comm.current().rank)
    x = data.x.clone().requires_grad_()
    out = layer(x, data.edge_index)
    after_forward = torch.get_rng_state()
    pyg_sar.mean(node_losses(out, data.n_id)).backward()
    return {
        "out": out.detach(),
        "x.grad": x.grad,
        "state after forward": after_forward,
        "state after backward": torch.get_rng_state(),
        **{f"{n}.grad": p.grad.clone() for n, p in layer.named_parameters()},
    }


def slope_error(layer: torch.nn.Module, data: Data, policy: SARPolicy) -> float:
    """The directional derivative against a central difference, relative."""
    set_policy(layer, policy)
    layer.zero_grad()
    comm = pyg_sar.comm.current()
    x = data.x.clone().requires_grad_()
    global_loss(layer, data, x, 7).backward()
    alike = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + comm.rank)
    directions = [torch.randn(p.shape, generator=alike, dtype=p.dtype) for p in layer.parameters()]
    x_direction = torch.randn(x.shape, generator=own, dtype=x.dtype)
    # Parameter gradients are sums over the workers already.
    slope = sum(
        float((p.grad * d).sum()) for p, d in zip(layer.parameters(), directions, strict=True)
    )
    mine = torch.tensor([float((x.grad * x_direction).sum())], dtype=torch.float64)
    slope += float(comm.all_reduce(mine))
    values = []
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            moved = copy.deepcopy(layer)
            for p, d in zip(moved.parameters(), directions, strict=True):
                p.add_(d, alpha=step)
            values.append(float(global_loss(moved, data, x + step * x_direction, 7)))
    difference = (values[0] - values[1]) / 2e-5
    return abs(slope - difference) / max(abs(difference), 1e-3)


def random_worker(root: Path, layers: dict[str, MessagePassing]) -> dict[str, Any]:
    """What each layer does with each policy, in a process of its own: random state is global."""
    data = pyg_sar.load_partition(root, view="local")
    found: dict[str, Any] = {"n_id": data.n_id}
    for name, layer in layers.items():
        layer = pyg_sar.distribute(layer.double(), view="local")
        passes = [random_pass(layer, data, policy, 3) for policy in (REMADE, AHEAD, KEPT)]
        again = random_pass(layer, data, REMADE, 3)
        other = random_pass(layer, data, REMADE, 50)
        slopes = [slope_error(layer, data, policy) for policy in (REMADE, KEPT, SARPolicy(mode=3))]
        layer.eval()
        with torch.no_grad():
            calm = layer(data.x, data.edge_index)
        found[name] = passes, again, other, slopes, calm
    data.x = data.x.float()
    for name, make in CAST.items():
        layer = pyg_sar.distribute(make(), view="local")
        runs = []
        for policy in (REMADE, KEPT):
            set_policy(layer, policy)
            runs.append(cast_pass(layer, data, data.n_id, pyg_sar.mean, cache=True))
        found[f"cast {name}"] = runs
    return found


@pytest.fixture(scope="module")
def random_runs(root: Path) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    layers = {name: make() for name, make in RANDOM.items()}
    return pyg_sar.launch(
        random_worker, WORLD, root, layers, backend="gloo", threads_per_worker=1, timeout=120.0
    )


@pytest.mark.parametrize("name", RANDOM)
def test_rule_4_rematerialized_dropout_is_the_same(name: str, random_runs: list[dict[str, Any]]):
    """Mode 1 remakes what mode 2 keeps; in one mode to the bit, whatever is fetched ahead."""
    for rank, run in enumerate(random_runs):
        (remade, ahead, kept), again, other, _, _ = run[name]
        for key, value in kept.items():
            where = (rank, key)
            if value.is_floating_point():  # the modes may push other partial states
                assert torch.allclose(remade[key], value, rtol=1e-12, atol=1e-12), where
            else:
                assert torch.equal(remade[key], value), where
            assert torch.equal(ahead[key], remade[key]), where
            assert torch.equal(again[key], remade[key]), ("the analysis drew numbers", *where)
        assert not torch.equal(other["out"], kept["out"]), "no dropout happened"


@pytest.mark.parametrize("name", RANDOM)
def test_rule_4_the_backward_pass_draws_no_numbers(name: str, random_runs: list[dict[str, Any]]):
    for run in random_runs:
        for one in run[name][0]:
            assert torch.equal(one["state after forward"], one["state after backward"])


@pytest.mark.parametrize("name", RANDOM)
def test_rule_4_gradients_with_dropout_are_right(name: str, random_runs: list[dict[str, Any]]):
    for run in random_runs:
        assert_small(dict(enumerate(run[name][3])), 1e-5, name)


@pytest.mark.parametrize("name", [n for n in RANDOM if n != "edges"])
def test_rule_4_no_dropout_in_evaluation(name: str, graph: Data, random_runs: list[dict[str, Any]]):
    torch.manual_seed(0)
    layers = {key: make() for key, make in RANDOM.items()}
    with torch.no_grad():
        expected = layers[name].double().eval()(graph.x, graph.edge_index)
    found = assemble(((run["n_id"], run[name][4]) for run in random_runs), 40)
    assert error(found, expected) <= TOLERANCE


def test_rule_4_dropped_weights_are_those_of_the_whole_softmax(tmp_path: Path, graph: Data):
    """One worker, one edge per tile: the mask is recorded, and plain PyG is given the same.

    Dropout comes after the softmax: a dropped weight stays in the normaliser.
    """
    root = Partitions(tmp_path)(graph, 1)
    data = pyg_sar.load_partition(root, view="local")
    layer = gnn.GATConv(CHANNELS, OUT, heads=2, dropout=0.5, add_self_loops=False).double()
    plain = copy.deepcopy(layer)
    masks: list[Tensor] = []

    def drop(value: Tensor, p: float, training: bool) -> Tensor:
        masks.append((torch.rand_like(value) > p).to(value.dtype) / (1 - p))
        return value * masks[-1]

    policy = SARPolicy(mode=2, message_budget=1, kernels="off")
    layer = pyg_sar.distribute(layer, policy, view="local")
    layer(data.x, data.edge_index)  # analysed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", drop)
        x = data.x.clone().requires_grad_()
        out = layer(x, data.edge_index)
        out.square().sum().backward()
        # Tiles follow the targets, and a target's edges their sources.
        source, target = pyg_sar.space.index_space.plain(data.edge_index)
        places = source.argsort(stable=True)
        places = places[target[places].argsort(stable=True)]
        whole = torch.empty(graph.num_edges, 2, dtype=torch.float64)
        whole[data.e_id[places]] = torch.cat(masks)
        patch.setattr(F, "dropout", lambda value, p, training: value * whole)
        y = graph.x.clone().requires_grad_()
        expected = plain(y, graph.edge_index)
        expected.square().sum().backward()
    assert len(masks) == graph.num_edges
    assert error(out, expected[data.n_id]) <= TOLERANCE
    assert error(x.grad, y.grad[data.n_id]) <= TOLERANCE
    assert error(layer.att_src.grad, plain.att_src.grad) <= TOLERANCE


# Rule 4: autocast ############################################################


class LearnedMessage(MessagePassing):
    """A matrix product inside the message: what autocast is about."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__(aggr=aggr)
        self.lin = Linear(2 * CHANNELS, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], -1)).tanh()


CAST: dict[str, Callable[[], MessagePassing]] = {
    "sage": lambda: gnn.SAGEConv(CHANNELS, OUT),
    "sage, max": lambda: gnn.SAGEConv(CHANNELS, OUT, aggr="max"),
    "gcn": lambda: gnn.GCNConv(CHANNELS, OUT),
    "gat": lambda: gnn.GATConv(CHANNELS, OUT, heads=2),
    "gatv2": lambda: gnn.GATv2Conv(CHANNELS, OUT, heads=2),
    "transformer": lambda: gnn.TransformerConv(CHANNELS, OUT, heads=2),
    "learned": LearnedMessage,
    "learned, max": lambda: LearnedMessage("max"),
    "edge conv": lambda: gnn.EdgeConv(Sequential(Linear(2 * CHANNELS, 8), ReLU(), Linear(8, OUT))),
}


def cast_pass(
    layer: torch.nn.Module,
    data: Data,
    ids: Tensor,
    mean: Callable[[Tensor], Tensor],
    cache: bool = False,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor | None]]:
    """One pass under autocast.

    Threads share autocast's cache, and any of them empties it; with it, sums of gradients are
    rounded elsewhere. So it is on in processes only.
    """
    layer.zero_grad()
    x = data.x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        out = layer(x, data.edge_index)
    # As recommended, the backward pass runs outside: the state is that of the forward pass.
    mean(node_losses(out.float(), ids)).backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in layer.named_parameters()}
    return out.detach(), x.grad, grads


@pytest.mark.parametrize("name", CAST)
def test_rule_4_autocast(name: str, partitions: Partitions):
    """Mode 1 equals mode 2 in dtype and value, and both equal PyG as far as bfloat16 goes."""
    data = make_graph(dtype=torch.float32)
    root = partitions(data, WORLD, "random")
    layer = CAST[name]()

    def worker() -> Any:
        mine = pyg_sar.load_partition(root, view="local")
        found = []
        model = pyg_sar.distribute(copy.deepcopy(layer), view="local")
        for policy in (REMADE, KEPT, SARPolicy(mode=3)):
            set_policy(model, policy)
            found.append(cast_pass(model, mine, mine.n_id, pyg_sar.mean))
        return mine.n_id, found

    ids = torch.arange(40)
    exact = single_process(layer.double(), make_graph(dtype=torch.float64))
    layer.float()
    out, x_grad, grads = cast_pass(copy.deepcopy(layer), data, ids, torch.mean)
    assert x_grad is not None
    workers = threads(worker, WORLD)
    for _, (remade, kept, whole) in workers:
        for one in (remade, kept, whole):
            assert one[0].dtype == out.dtype
            assert one[1].dtype == x_grad.dtype
            assert {n: g.dtype for n, g in one[2].items()} == {n: g.dtype for n, g in grads.items()}
        assert torch.equal(remade[0], kept[0])
        assert torch.equal(remade[1], kept[1])
        assert all(torch.equal(remade[2][n], kept[2][n]) for n in grads)
    plain_error = error(out.double(), exact.out)
    for step in range(3):
        found = assemble(((n_id, runs[step][0]) for n_id, runs in workers), 40)
        assert found is not None
        assert error(found.double(), exact.out) <= 2 * plain_error + 2**-8
        x_found = assemble(((n_id, runs[step][1]) for n_id, runs in workers), 40)
        assert error(x_found, x_grad) <= 0.1
        for _, runs in workers:
            for key, gradient in grads.items():
                scale = max(float(g.abs().max()) for g in grads.values())
                assert error(runs[step][2][key], gradient, scale) <= 0.1, (key, step)


@pytest.mark.parametrize("name", CAST)
def test_rule_4_autocast_with_its_cache(name: str, random_runs: list[dict[str, Any]]):
    """A cast made without a graph must not be reused where a gradient is wanted."""
    for run in random_runs:
        remade, kept = run[f"cast {name}"]
        assert torch.equal(remade[0], kept[0]) and remade[0].dtype == kept[0].dtype
        scale = max(float(g.abs().max()) for g in kept[2].values())
        assert scale > 0
        for key, gradient in kept[2].items():
            assert error(remade[2][key], gradient, scale) <= 2**-8, key
        assert error(remade[1], kept[1]) <= 2**-8


# Rule 4: running statistics ##################################################


class Counts(MessagePassing):
    """Counts what its message is called with: in place, by a new tensor, and in Python."""

    def __init__(self, calls: bool) -> None:
        super().__init__(aggr="sum")
        self.lin, self.calls = Linear(CHANNELS, OUT), calls
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("made", torch.zeros((), dtype=torch.long))
        self.number, self.log = 0, {"calls": [0]}

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        count = 1 if self.calls else x_j.size(0)
        self.seen += count
        self.made = self.made + count
        self.number += count
        self.log["calls"][0] += count
        return self.lin(x_j).tanh()


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
def test_rule_4_state_of_a_message_is_updated_once(root: Path):
    """Neither the analysis nor tiles nor the second computation count."""

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        for policy in ALL_POLICIES:
            layer = pyg_sar.distribute(Counts(True).double(), policy, view="local")
            for epoch in (1, 2):
                layer(data.x.clone().requires_grad_(), data.edge_index).sum().backward()
                found = [int(layer.seen), int(layer.made), layer.number, *layer.log["calls"]]
                assert found == [epoch] * 4, (policy, found)

    threads(worker, WORLD)


class Scaled(MessagePassing):
    """Reads buffers before it aggregates, and within its message."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.utils.parametrizations.orthogonal(Linear(CHANNELS, CHANNELS))
        self.register_buffer("scale", torch.arange(1.0, CHANNELS + 1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x * self.scale)) * self.scale

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i.sigmoid() * x_j * self.scale


def test_buffers_that_nobody_writes_are_not_written(partitions: Partitions, graph: Data):
    """Autograd has saved them when a layer is looked at."""
    sweep = Sweep(2)
    root = partitions(graph, 2, "random")
    sweep.add("buffers", Job(Scaled().double(), root, policies=MODES), graph)
    sweep.check()


def test_rule_4_state_that_depends_on_the_edges_is_refused(root: Path):
    """A worker would count its own edges."""

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        for policy in ALL_POLICIES:
            layer = pyg_sar.distribute(Counts(False).double(), policy, view="local")
            with pytest.raises(pyg_sar.errors.DistributedIndexError, match="its message changes '"):
                layer(data.x, data.edge_index)
            assert int(layer.seen) == layer.number == 0

    threads(worker, WORLD)


def edge_norm(norm: torch.nn.Module) -> Callable[[], MessagePassing]:
    return lambda: gnn.EdgeConv(Sequential(Linear(2 * CHANNELS, 8), norm, ReLU(), Linear(8, OUT)))


@pytest.mark.filterwarnings("ignore::pyg_sar.errors.OneShotWarning")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rule_4_batch_norm_inside_a_message(world: int, graph: Data, partitions: Partitions):
    """Its batch is all edges of all workers: exact, or refused; never a tile's or a hang."""
    layer = edge_norm(BatchNorm1d(8))().double()
    root = partitions(graph, world, "random")
    job = Job(layer, root, policies=MODES)
    expected = single_process(layer, graph)
    try:
        workers = pyg_sar.launch(run_jobs, world, [job], backend="threads", timeout=20.0)
    except pyg_sar.errors.WorkerError as refusal:
        origin = refusal.__cause__
        assert isinstance(origin, pyg_sar.errors.DistributedIndexError | ValueError), origin
        assert "BatchNorm1d" in str(origin) or "statistics" in str(origin)
        return
    for step, policy in enumerate(job.policies):
        assert_small(errors([w[0][step] for w in workers], expected), TOLERANCE, str(policy))


def test_layer_norm_inside_a_message(graph: Data, root: Path):
    """A norm per edge is a message like any other."""
    sweep = Sweep(WORLD)
    sweep.add("layer norm", Job(edge_norm(LayerNorm(8))().double(), root), graph)
    sweep.check()


class Mixes(MessagePassing):
    """A message of one edge that depends on the other edges of the call."""

    def __init__(self, how: str) -> None:
        super().__init__(aggr="sum")
        self.how = how

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        if self.how == "mean":
            return x_j - x_j.mean(0)
        if self.how == "softmax":
            return x_j.softmax(0)
        return x_j.cumsum(0)


@pytest.mark.parametrize("how", ["mean", "softmax", "cumsum"])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_a_message_that_mixes_edges_is_refused(how: str, mode: int, root: Path):
    """A worker doesn't have all edges: local numbers would come out without an error."""

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(Mixes(how), SARPolicy(mode=mode), view="local")
        layer(data.x, data.edge_index)

    with pytest.raises(pyg_sar.errors.WorkerError, match="DistributedIndexError"):
        threads(worker, WORLD)


@pytest.mark.parametrize("mode", [1, 3])
def test_a_hook_of_the_aggregation_that_mixes_targets_is_refused(mode: int, root: Path):
    """One that treats each target alone isn't."""

    def worker() -> None:
        data = pyg_sar.load_partition(root, view="local")
        layer = pyg_sar.distribute(
            gnn.GraphConv(CHANNELS, 2).double(), SARPolicy(mode=mode), view="local"
        )
        expected = layer(data.x, data.edge_index) * 2 - layer.lin_root(data.x)
        for hook in (lambda _, args, out: out * 2, lambda _, args, out: out - out.mean(0)):
            handle = layer.register_aggregate_forward_hook(hook)
            found = layer(data.x, data.edge_index) + layer.lin_rel.bias
            torch.testing.assert_close(found, expected)
            handle.remove()

    with pytest.raises(pyg_sar.errors.WorkerError, match="mixes edges of different targets"):
        threads(worker, WORLD)


# Rule 5: dtypes ##############################################################

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CAST)
def test_rule_5_dtypes(name: str, dtype: torch.dtype, partitions: Partitions):
    """Accumulators have the messages' dtype; errors are at most twice those of plain PyG.

    Both against float64 (the tolerance rule of flash-attention).
    """
    data = make_graph(dtype=dtype)
    root = partitions(data, WORLD, "random")
    layer = CAST[name]().to(dtype)
    plain = single_process(layer, data)
    exact_data = make_graph(dtype=torch.float64)
    exact_data.x = data.x.double()
    exact = single_process(copy.deepcopy(layer).double(), exact_data)
    job = Job(layer, root, policies=MODES)
    workers = threads(run_jobs, WORLD, [job])
    for step, policy in enumerate(MODES):
        results = [w[0][step] for w in workers]
        for result in results:
            assert result.out.dtype == dtype
            assert result.x_grad is not None and result.x_grad.dtype == dtype
            for key, gradient in plain.parameter_grads.items():
                assert result.parameter_grads[key].dtype == gradient.dtype, key
        ours = low_precision_errors(results, exact)
        theirs = low_precision_errors([plain_rows(plain)], exact)
        slack = 4 * torch.finfo(dtype).eps
        for key, value in ours.items():
            assert value <= 2 * theirs[key] + slack, (key, value, theirs[key], policy)
        if dtype == torch.float32:
            assert_small(errors(results, plain), 1e-5, f"{name}, {policy}")


def plain_rows(result: Any) -> Any:
    result.n_id = torch.arange(result.out.size(0))
    return result


def low_precision_errors(results: list[Any], exact: Any) -> dict[str, float]:
    """Errors against float64, as fractions of the largest value."""
    out = assemble(((r.n_id, r.out.double()) for r in results), 40)
    x_grad = assemble(((r.n_id, r.x_grad.double()) for r in results), 40)
    found = {"out": error(out, exact.out), "x.grad": error(x_grad, exact.x_grad)}
    scale = max(float(g.abs().max()) for g in exact.parameter_grads.values())
    for key, gradient in exact.parameter_grads.items():
        values = [error(r.parameter_grads[key].double(), gradient, scale) for r in results]
        found[key] = max(values)
    return found


def test_rule_5_integers_and_halves_travel_with_features(graph: Data, root: Path):
    """Operands of several dtypes in one message; integers get no gradient."""

    class Typed(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="sum")
            self.table = torch.nn.Embedding(3, CHANNELS)

        def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor, half: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, kind=kind, half=half)

        def message(self, x_j: Tensor, kind_j: Tensor, half_j: Tensor) -> Tensor:
            return x_j * self.table(kind_j[:, 0]) * half_j.to(x_j.dtype)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = Typed()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            kind = (x[:, :1] > 0).long() + (x[:, 1:2] > 0).long()
            return self.conv(x, edge_index, kind, (x[:, 2:3] > 0).to(torch.float16))

    sweep = Sweep(WORLD)
    sweep.add("typed", Job(Model().double(), root), graph)
    sweep.check()


def test_rule_5_edge_attributes_of_another_dtype(graph: Data, root: Path):
    """float32 edge attributes in a float64 message keep their own gradient's dtype."""

    class Weighted(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="sum")
            self.lin = Linear(EDGE_DIM, CHANNELS)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, edge_attr=edge_attr)

        def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            return x_j * self.lin(edge_attr).double()

    def worker() -> Any:
        data = pyg_sar.load_partition(root, view="local")
        data.edge_attr = data.edge_attr.float()
        found = []
        for policy in MODES:
            torch.manual_seed(0)
            layer = pyg_sar.distribute(copy.deepcopy(plain), policy, view="local")
            found.append(one_pass(layer, data, data.n_id, pyg_sar.mean, ("edge_attr",)))
            found[-1].n_id, found[-1].e_id = data.n_id, data.e_id
        return found

    plain = Weighted()
    low = graph.clone()
    low.edge_attr = graph.edge_attr.float()
    expected = single_process(plain, low, ("edge_attr",))
    workers = threads(worker, WORLD)
    for step, policy in enumerate(MODES):
        assert_small(errors([w[step] for w in workers], expected), 1e-5, str(policy))
