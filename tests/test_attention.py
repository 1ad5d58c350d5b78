"""Attention to all nodes of a graph, over workers, against PyG's on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from combinations import some
from oracle import TOLERANCE, error, gradient_scale, make_graph, threads
from torch import Tensor
from torch_geometric.nn import attention as plain

import pyg_sar
from pyg_sar.engine.kernels import dense as engine

CHANNELS, NODES = 6, 37
WORLDS = (1, 2, 3, 5)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """SGFormerAttention makes tensors of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way also on small graphs."""
    monkeypatch.setattr(engine, "QUERIES", 5)
    monkeypatch.setattr(engine, "KEYS", 3)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assignment(world: int) -> Tensor:
    """Parts of the nodes, interleaved; with three or more, the second has none."""
    part = torch.randint(world, (NODES,), generator=torch.Generator().manual_seed(2))
    if world > 2:
        part[part == 1] = 0
    return part


def graph(several: bool) -> Any:
    data = make_graph(NODES, 120)
    data.batch = (torch.arange(NODES) * 3 // NODES).clamp(max=2) if several else None
    if several:
        data.batch[:4] = 0
        data.batch[4:9] = 1  # Graphs of different sizes: PyG pads the smaller ones.
        data.batch[9:] = 2
    return data


# The primitive ###############################################################


def dense(q: Tensor, k: Tensor, v: Tensor, batch: Tensor) -> Tensor:
    scores = torch.einsum("nhd,mhd->hnm", q, k) / q.size(2) ** 0.5
    scores = scores.masked_fill(batch[:, None] != batch[None], float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_streamed_attention(world: int, prefetch: int):
    tensors = [draw(NODES, 2, d, seed=s) for d, s in ((3, 1), (3, 2), (4, 3))]
    part, weights = assignment(world), draw(NODES, 2, 4, seed=4)
    for several in (False, True):
        batch = graph(True).batch if several else torch.zeros(NODES, dtype=torch.long)
        leaves = [t.clone().requires_grad_() for t in tensors]
        expected = dense(*leaves, batch)
        (expected * weights).sum().backward()

        def worker(batch: Tensor = batch) -> Any:
            ids = (part == pyg_sar.comm.current().rank).nonzero().view(-1).flip(0)  # in any order
            mine = [t[ids].requires_grad_() for t in tensors]
            out = engine.global_attention(
                *mine, pyg_sar.space.dist_batch(batch[ids]), prefetch=prefetch
            )
            (out * weights[ids]).sum().backward()
            return [ids, out.detach(), *(t.grad for t in mine)]

        workers = threads(worker, world)
        ids = torch.cat([w[0] for w in workers])
        for k, want in enumerate([expected.detach(), *(t.grad for t in leaves)], start=1):
            got = torch.empty_like(want)
            got[ids] = torch.cat([w[k] for w in workers])
            assert error(got, want) <= TOLERANCE, (k, several)


def test_scores_far_apart():
    """Scores of plus and minus 10^4 neither overflow nor vanish."""
    q, k, v = (draw(12, 1, 2, seed=s) * scale for s, scale in ((1, 100), (2, 100), (3, 1)))
    batch = torch.zeros(12, dtype=torch.long)

    def worker() -> Tensor:
        mine = slice(0, 4) if pyg_sar.comm.current().rank == 0 else slice(4, 12)
        return engine.global_attention(
            q[mine], k[mine], v[mine], pyg_sar.space.dist_batch(batch[mine])
        )

    assert error(torch.cat(threads(worker, 2)), dense(q, k, v, batch)) <= TOLERANCE


def test_memory_and_traffic():
    """Keys and values of one worker at a time, or two; scores never; by formula."""
    rows, heads, width, world = 20, 2, 4, 4

    def worker(prefetch: int) -> Any:
        comm = pyg_sar.comm.current()
        q, k, v = (draw(rows, heads, width, seed=s).requires_grad_() for s in range(3))
        batch = pyg_sar.space.dist_batch(torch.zeros(rows, dtype=torch.long))
        saved: list[int] = []
        with (
            pyg_sar.Ledger(comm) as ledger,
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.append(t.numel()) or t, lambda t: t
            ),
        ):
            out = engine.global_attention(q, k, v, batch, prefetch=prefetch, layer="attn")
            out.sum().backward()
        found = [
            ledger.received_bytes(layer="attn", kind=kind)
            for kind in ("fetch", "refetch", "gradient")
        ]
        return ledger.peak_resident_rows("attn"), found, max(saved)

    per_pass = (world - 1) * rows * heads * 2 * width * 8
    for prefetch in (0, 1):
        for peak, traffic, largest in threads(worker, world, prefetch):
            assert peak <= (1 + prefetch) * rows
            assert traffic == [per_pass] * 3
            assert largest == rows * heads * width


@pytest.mark.parametrize("world", [1, 3])
def test_dropout_is_right_in_distribution_and_remade(world: int):
    """Weights are kept with probability 1 - p and scaled; the backward pass uses the same mask.

    The values are a unit matrix, so that the output is the dropped matrix of weights itself.
    """
    p, part = 0.4, assignment(world)
    q, k = draw(NODES, 1, 3, seed=1), draw(NODES, 1, 3, seed=2)
    batch = torch.zeros(NODES, dtype=torch.long)
    unit, gradient = torch.eye(NODES).unsqueeze(1), draw(NODES, 1, NODES, seed=5)

    def worker(seed: int) -> Any:
        rank = pyg_sar.comm.current().rank
        ids = (part == rank).nonzero().view(-1)
        v, query = unit[ids].requires_grad_(), q[ids].requires_grad_()
        torch.manual_seed(seed)
        args = (query, k[ids], v, pyg_sar.space.dist_batch(batch[ids]))
        out = engine.global_attention(*args, dropout=p)
        (out * gradient[ids]).sum().backward()
        return ids, out.detach().squeeze(1), v.grad.squeeze(1), query.grad

    weights = dense(q, k, unit, batch).squeeze(1)
    seen = []
    for seed in (3, 4):
        workers = threads(worker, world, seed)
        order = torch.cat([w[0] for w in workers]).argsort()
        out, v_grad, q_grad = (torch.cat([w[n] for w in workers])[order] for n in (1, 2, 3))
        kept = out != 0
        assert error(out[kept], (weights / (1 - p))[kept]) <= TOLERANCE
        assert abs(float(kept.double().mean()) - (1 - p)) < 4 * (p * (1 - p)) ** 0.5 / NODES
        assert error(v_grad, out.t() @ gradient.squeeze(1)) <= TOLERANCE
        leaf = q.clone().requires_grad_()
        scale = kept.double() / (1 - p)
        (dense(leaf, k, unit, batch).squeeze(1) * scale * gradient.squeeze(1)).sum().backward()
        assert error(q_grad, leaf.grad) <= TOLERANCE
        seen.append(kept)
    assert not torch.equal(*seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype):
    """At most twice the error of the dense product in that dtype, both against float64."""
    full = [draw(NODES, 2, 4, seed=s).to(dtype) for s in range(3)]
    batch = torch.zeros(NODES, dtype=torch.long)
    exact = dense(*(t.double() for t in full), batch)
    theirs = dense(*full, batch)

    def worker() -> Tensor:
        mine = slice(0, 10) if pyg_sar.comm.current().rank == 0 else slice(10, NODES)
        return engine.global_attention(
            *(t[mine] for t in full), pyg_sar.space.dist_batch(batch[mine])
        )

    ours = torch.cat(threads(worker, 2))
    assert ours.dtype == dtype
    assert (ours.double() - exact).norm() <= 2 * (theirs.double() - exact).norm()


def test_wrong_shapes_are_errors():
    batch = pyg_sar.space.dist_batch(torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[num_local, heads, d\].*rank 0"):
        engine.global_attention(draw(4, 2, 3), draw(5, 2, 3), draw(5, 2, 3), batch)
    with pytest.raises(ValueError, match="'dropout'=1.5"):
        engine.global_attention(*[draw(4, 2, 3)] * 3, batch, dropout=1.5)


# Modules #####################################################################


class Dense(torch.nn.Module):
    """An attention on a dense batch, among the nodes of one graph."""

    def __init__(self, attn: torch.nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None) -> Tensor:
        return self.attn(x.unsqueeze(0)).squeeze(0)


class Stack(torch.nn.Module):
    """Two layers called with a batch vector."""

    def __init__(self, layer: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index, batch)
        return x


def polynormer(**options: Any) -> torch.nn.Module:
    model = gnn.Polynormer(
        CHANNELS, 4, 3, local_layers=2, in_dropout=0.0, dropout=0.0, global_dropout=0.0, **options
    )
    model._global = True
    return model


def sgformer(**options: Any) -> torch.nn.Module:
    return gnn.SGFormer(CHANNELS, 8, 3, trans_dropout=0.0, gnn_dropout=0.0, **options)


def gps(**options: Any) -> torch.nn.Module:
    return Stack(lambda: gnn.GPSConv(CHANNELS, gnn.GCNConv(CHANNELS, CHANNELS), heads=2, **options))


ANY: dict[str, Callable[[], torch.nn.Module]] = {
    "GPS": gps,
    "GPS, no norm": lambda: gps(norm=None, act="tanh"),
    "GPS, no conv": lambda: Stack(
        lambda: gnn.GPSConv(CHANNELS, None, norm="layer_norm", norm_kwargs={"mode": "node"})
    ),
    "GPS, performer": lambda: gps(
        attn_type="performer", attn_kwargs={"head_channels": 4, "qkv_bias": True}
    ),
    "GPS, GINE": lambda: Stack(
        lambda: gnn.GPSConv(CHANNELS, gnn.GINConv(gnn.MLP([CHANNELS, 4, CHANNELS])), heads=3)
    ),
    "SGFormer": lambda: sgformer(trans_num_heads=2),
    "SGFormer, cat": lambda: sgformer(aggregate="cat"),
    "Polynormer": polynormer,
    "Polynormer, shared": lambda: polynormer(qk_shared=True, pre_ln=True, local_attn=True),
}  # fmt: skip

SINGLE: dict[str, Callable[[], torch.nn.Module]] = {
    "performer": lambda: Dense(plain.PerformerAttention(CHANNELS, 2, 4)),
    "SGFormer attention": lambda: Dense(plain.SGFormerAttention(CHANNELS, 2, 4)),
    "Polynormer attention": lambda: Dense(plain.PolynormerAttention(CHANNELS, 2, 4)),
    "QFormer": lambda: Dense(plain.QFormer(CHANNELS, 8, 4, num_heads=2, num_layers=2)),
    "Polynormer, local phase": lambda: polynormer().train(),
}
SINGLE_CASES = {**SINGLE, **ANY}


def one_pass(model: torch.nn.Module, data: Any, ids: Tensor, batch: Any, mean: Any) -> Any:
    x = data.x.clone().requires_grad_()
    out = model(x, data.edge_index, batch)
    mean((out * draw(NODES, out.size(1), seed=8)[ids] + out.square()).sum(1)).backward()
    return out.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("world", WORLDS)
def test_models_are_exact(world: int, tmp_path: Any):
    cases = [(name, False) for name in SINGLE_CASES] + [(name, True) for name in ANY]
    cases, models = list(some(cases, f"{world}", 3)), {}
    for name, make in SINGLE_CASES.items():
        torch.manual_seed(1)
        models[name] = make()
    models["Polynormer, local phase"]._global = False
    datas, part = {several: graph(several) for several in (False, True)}, assignment(world)
    for several, data in datas.items():
        pyg_sar.write_partitions(data, world, tmp_path / f"{several}", part)

    def run(load: Any, convert: Any, mean: Any) -> list[Any]:
        found, loaded = [], {several: load(several) for several in datas}
        for name, several in cases:
            data = loaded[several]
            model, ids = convert(copy.deepcopy(models[name])), data.get("n_id", torch.arange(NODES))
            batch = data.batch if several else torch.zeros(data.num_nodes, dtype=torch.long)
            found.append((*one_pass(model, data, ids, batch, mean), ids))
        return found

    expected = run(lambda several: datas[several], lambda m: m, torch.mean)
    workers = threads(
        lambda: run(
            lambda several: pyg_sar.load_partition(tmp_path / f"{several}", view="local"),
            partial(pyg_sar.distribute, view="local"),
            pyg_sar.mean,
        ),
        world,
    )
    for k, (case, want) in enumerate(zip(cases, expected, strict=True)):
        ids = torch.cat([w[k][3] for w in workers])
        for place in (0, 1):
            got = torch.empty_like(want[place])
            got[ids] = torch.cat([w[k][place] for w in workers])
            assert error(got, want[place]) <= TOLERANCE, (case, place)
        scale = gradient_scale(want[2])
        for worker in workers:
            for name, gradient in want[2].items():
                assert error(worker[k][2][name], gradient, scale) <= TOLERANCE, (case, name)


# torch's attention ###########################################################


class Sequences(torch.nn.Module):
    """A sequence of three tokens per node."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(CHANNELS, 2, batch_first=True)
        self.block = torch.nn.TransformerEncoderLayer(CHANNELS, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x + 1, x * x], dim=1)
        return self.block(self.attn(tokens, tokens, tokens)[0]).sum(1)


def test_sequences_per_node_are_exact_and_attention_among_nodes_is_refused():
    x, part = draw(NODES, CHANNELS), assignment(3)
    torch.manual_seed(1)
    model = Sequences()
    expected = model(x).detach()

    def worker() -> Any:
        ours = pyg_sar.distribute(copy.deepcopy(model), view="local")
        mine = x[part == pyg_sar.comm.current().rank]
        out = ours(mine).detach()
        for training in (True, False):  # torch has a path of its own for evaluation.
            ours.train(training)
            with torch.no_grad():
                for call in (lambda t: ours.attn(t, t, t), ours.block):
                    for shape in (mine.unsqueeze(0), mine):
                        with pytest.raises(pyg_sar.errors.DistributedIndexError, match="GPSConv"):
                            call(shape)
        return out

    found = torch.cat(threads(worker, 3))
    assert error(found, expected[part.argsort(stable=True)]) <= TOLERANCE


def test_dense_batches_of_several_graphs_are_refused():
    def worker() -> None:
        model = pyg_sar.distribute(plain.SGFormerAttention(CHANNELS, 2, 4), view="local")
        with pytest.raises(ValueError, match=r"nodes of one graph.*without padding"):
            model(draw(2, 5, CHANNELS))
        with pytest.raises(ValueError, match=r"nodes of one graph"):
            model(draw(1, 3, CHANNELS), torch.tensor([[True, True, False]]))
        with pytest.raises(ValueError, match="add_bias_kv"):
            attn = torch.nn.MultiheadAttention(CHANNELS, 2, add_bias_kv=True)
            layer = gnn.GPSConv(CHANNELS, None, norm=None)
            layer.attn = attn
            pyg_sar.distribute(layer, view="local")(draw(3, CHANNELS), None)

    threads(worker, 2)


class OwnGPS(gnn.GPSConv):
    """Overrides nothing that is distributed."""

    def extra_repr(self) -> str:
        return "own"


class OtherGPS(gnn.GPSConv):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x - x.mean(0)


def test_subclasses():
    def worker() -> list[str]:
        own = pyg_sar.distribute(OwnGPS(CHANNELS, None), view="local")
        with pytest.raises(ValueError, match=r"model \(OtherGPS\).*overrides forward of GPSConv"):
            pyg_sar.distribute(OtherGPS(CHANNELS, None), view="local")
        return [kind.__name__ for kind in type(own).__mro__[:3]]

    assert threads(worker, 2) == [["OwnGPS", "OwnGPS", "DistGPSConv"]] * 2
