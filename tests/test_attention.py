"""Attention to all nodes of a graph, over workers, against PyG's on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from combinations import some
from oracle import (
    TOLERANCE,
    error,
    gradient_scale,
    make_graph,
    parts,
    second_is_empty,
    whole,
    workers,
)
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import attention as plain
from torch_geometric.utils import to_dense_batch

import pyg_sar
from pyg_sar.engine.kernels import dense as engine

pytestmark = pytest.mark.usefixtures("double")  # SGFormerAttention makes tensors of it.
CHANNELS, NODES = 6, 37
WORLDS = ((1, workers), (2, workers), (3, workers), (5, parts))


def set_up() -> None:
    """A worker's process: several tiles each way also on small graphs, and the default dtype."""
    engine.QUERIES, engine.KEYS = 5, 3
    torch.set_default_dtype(torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def written(root: Path, world: int, data: Any) -> Path:
    pyg_sar.write_partitions(data, world, root / "parts", second_is_empty(NODES, world))
    return root / "parts"


def nodes(world: int, **tensors: Tensor) -> Any:
    data = graph(True)
    data.update(tensors)
    return data


@pytest.mark.parametrize(("world", "launch"), WORLDS)
def test_streamed_attention(world: int, launch: Any, tmp_path: Path):
    tensors = {n: draw(NODES, 2, d, seed=s) for n, d, s in (("q", 3, 1), ("k", 3, 2), ("v", 4, 3))}
    data, weights, expected = nodes(world, **tensors), draw(NODES, 2, 4, seed=4), []
    zeros = torch.zeros(NODES, dtype=torch.long)
    for batch in (data.batch, zeros):
        leaves = [t.clone().requires_grad_() for t in tensors.values()]
        out = dense(*leaves, batch)
        (out * weights).sum().backward()
        expected.append([out.detach(), *(t.grad for t in leaves)])

    def worker(root: Path) -> list[list[Tensor]]:
        set_up()
        data, found = pyg_sar.load_partition(root), []
        for prefetch in (0, 1, 2):
            for batch in (data.batch, None):
                leaves = [data[name].clone().requires_grad_() for name in tensors]
                out = pyg_sar.nn.global_attention(*leaves, batch, prefetch=prefetch)
                (out * weights).sum().backward()
                found.append([whole(out.detach()), *(whole(t.grad) for t in leaves)])
        return found

    for found in launch(worker, world, written(tmp_path, world, data)):
        for k, values in enumerate(found):
            for got, want in zip(values, expected[k % 2], strict=True):
                assert error(got, want) <= TOLERANCE, k


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_far_apart_and_low_precision(dtype: torch.dtype, tmp_path: Path):
    """Scores of plus and minus 10^4 neither overflow nor vanish; half precision as PyTorch's.

    At most twice the error of the dense product in that dtype, both against float64.
    """
    scales = (100, 100, 1) if dtype == torch.float64 else (1, 1, 1)
    full = [(draw(NODES, 2, 4, seed=s) * scale).to(dtype) for s, scale in enumerate(scales)]
    batch = torch.zeros(NODES, dtype=torch.long)
    exact, theirs = dense(*(t.double() for t in full), batch), dense(*full, batch)
    data = nodes(2, **dict(zip("qkv", full, strict=True)))

    def worker(root: Path) -> Tensor:
        set_up()
        data = pyg_sar.load_partition(root)
        return whole(pyg_sar.nn.global_attention(data.q, data.k, data.v))

    for ours in workers(worker, 2, written(tmp_path, 2, data)):
        assert ours.dtype == dtype
        if dtype == torch.float64:
            assert error(ours, exact) <= TOLERANCE
        else:
            assert (ours.double() - exact).norm() <= 2 * (theirs.double() - exact).norm()


def test_memory_and_traffic(tmp_path: Path):
    """Keys and values of one worker at a time, or two; scores never; by formula."""
    rows, heads, width, world = 20, 2, 4, 4
    given = {n: draw(world * rows, heads, width, seed=s) for s, n in enumerate("qkv")}
    none = torch.zeros(2, 0, dtype=torch.long)
    data = Data(edge_index=none, num_nodes=world * rows, **given)
    part = torch.arange(world * rows) % world
    pyg_sar.write_partitions(data, world, tmp_path / "parts", part)

    def worker(root: Path) -> list[Any]:
        comm, data, found = pyg_sar.comm.current(), pyg_sar.load_partition(root), []
        for prefetch in (0, 1):
            q, k, v = (data[name].to_local().clone().requires_grad_() for name in "qkv")
            saved: list[int] = []
            with (
                pyg_sar.Ledger(comm) as ledger,
                torch.autograd.graph.saved_tensors_hooks(
                    lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
                ),
            ):
                engine.streamed_attention(q, k, v, prefetch=prefetch, layer="a").sum().backward()
            kinds = ("fetch", "refetch", "gradient")
            traffic = [ledger.received_bytes(layer="a", kind=kind) for kind in kinds]
            found.append((ledger.peak_resident_rows("a"), traffic, max(saved)))
        return found

    per_pass = (world - 1) * rows * heads * 2 * width * 8
    for found in workers(worker, world, tmp_path / "parts"):
        for prefetch, (peak, traffic, largest) in enumerate(found):
            assert peak <= (1 + prefetch) * rows
            assert traffic == [per_pass] * 3
            assert largest == rows * heads * width


def test_wrong_shapes_are_errors(tmp_path: Path):
    data = nodes(2, q=draw(NODES, 2, 3), k=draw(NODES, 3, 3))

    def worker(root: Path) -> None:
        data = pyg_sar.load_partition(root)
        with pytest.raises(ValueError, match=r"\[num_local, heads, d\].*rank"):
            pyg_sar.nn.global_attention(data.q, data.k, data.k)
        with pytest.raises(TypeError, match="tensors of the whole graph"):
            pyg_sar.nn.global_attention(draw(4, 2, 3), draw(4, 2, 3), draw(4, 2, 3))

    workers(worker, 2, written(tmp_path, 2, data))


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


def one_pass(model: torch.nn.Module, data: Any, several: bool) -> Any:
    x = data.x.clone().requires_grad_()
    batch = data.batch if several else torch.zeros(data.num_nodes, dtype=torch.long)
    out = model(x, data.edge_index, batch)
    (out * draw(NODES, out.size(1), seed=8) + out.square()).sum(1).mean().backward()
    return whole(out.detach()), whole(x.grad), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "launch"), WORLDS)
def test_models_are_exact(world: int, launch: Any, tmp_path: Path):
    cases = [(name, False) for name in SINGLE_CASES] + [(name, True) for name in ANY]
    cases, models = list(some(cases, f"{world}", 3)), {}
    for name, make in SINGLE_CASES.items():
        torch.manual_seed(1)
        models[name] = make()
    models["Polynormer, local phase"]._global = False
    data = graph(True)
    expected = [one_pass(copy.deepcopy(models[name]), data, several) for name, several in cases]

    def worker(root: Path) -> list[Any]:
        set_up()
        data = pyg_sar.load_partition(root)
        return [
            one_pass(pyg_sar.distribute(copy.deepcopy(models[name])), data, several)
            for name, several in cases
        ]

    for found in launch(worker, world, written(tmp_path, world, data)):
        for case, got, want in zip(cases, found, expected, strict=True):
            for place in (0, 1):
                assert error(got[place], want[place]) <= TOLERANCE, (case, place)
            scale = gradient_scale(want[2])
            for name, gradient in want[2].items():
                assert error(got[2][name], gradient, scale) <= TOLERANCE, (case, name)


class Tokens(torch.nn.Module):
    """A sequence of three tokens per node."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(CHANNELS, 2, batch_first=True)
        self.block = torch.nn.TransformerEncoderLayer(CHANNELS, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        tokens = torch.stack([x, x + 1, x * x], dim=1)
        return self.block(self.attn(tokens, tokens, tokens)[0]).sum(1)


class OwnGPS(gnn.GPSConv):
    """Of which a class of one's own is made."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(x - x.mean(0), *args, **kwargs)


class Batched(torch.nn.Module):
    """An attention on a dense batch of several graphs, some of them padded."""

    def __init__(self, attn: torch.nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        rows, mask = to_dense_batch(x, batch)
        return self.attn(rows, mask)[mask]


SINGLE |= {
    "sequences of each node": Tokens,
    "own GPS": lambda: OwnGPS(CHANNELS, None, norm=None),
    "SGFormer attention of several": lambda: Batched(plain.SGFormerAttention(CHANNELS, 2, 4)),
    "performer of several": lambda: Batched(plain.PerformerAttention(CHANNELS, 2, 4)),
}
SINGLE_CASES = {**SINGLE, **ANY}
