"""Parameters with a row per node: owned, not summed, saved and restored by each worker."""

from __future__ import annotations

import copy
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import (
    CHANNELS,
    MODES,
    OUT,
    assemble,
    error,
    make_graph,
    node_losses,
    set_policy,
    threads,
)
from torch import Tensor
from torch_geometric.nn import LINKX, GATConv, LightGCN, RGCNConv

import pyg_sar
from pyg_sar.errors import CheckpointError
from pyg_sar.nn import NodeEmbedding, gather_embedding, own_rows, scatter_embedding

NODES = 40


class Embedded(torch.nn.Module):
    """A layer on trainable node vectors alone."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.conv = GATConv(CHANNELS, OUT)

    def forward(self, edge_index: Tensor) -> Tensor:
        return self.conv(self.embedding.weight, edge_index)


class Relational(torch.nn.Module):
    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding, self.conv = embedding, RGCNConv(CHANNELS, OUT, 3)

    def forward(self, edge_index: Tensor) -> Tensor:
        return self.conv(self.embedding.weight, edge_index, self.edge_type)


def build(kind: str, rows: int, table: Any = NodeEmbedding) -> tuple[torch.nn.Module, str]:
    """A model with ``rows`` owned rows, and the name of the parameter that holds them."""
    torch.manual_seed(4)
    if kind == "LightGCN":
        return LightGCN(rows, CHANNELS, 2).double(), "embedding.weight"
    if kind == "LINKX":
        return LINKX(rows, CHANNELS, 8, OUT, num_layers=2).double(), "edge_lin.weight"
    model = (Relational if kind == "RGCN" else Embedded)(table(rows, CHANNELS))
    return model.double(), "embedding.weight"


KINDS = ("GAT", "RGCN", "LightGCN", "LINKX")


def whole(kind: str) -> tuple[torch.nn.Module, str, dict[str, Tensor]]:
    model, name = build(kind, NODES, torch.nn.Embedding)
    return model, name, {k: v.clone() for k, v in model.state_dict().items()}


def run(kind: str, model: Any, data: Any) -> Tensor:
    if kind == "RGCN":
        model.edge_type = data.edge_type
    if kind == "LightGCN":
        return model.get_embedding(data.edge_index)
    if kind == "LINKX":
        return model(data.x, data.edge_index)
    return model(data.edge_index)


def local(kind: str, data: Any, state: dict[str, Tensor]) -> tuple[torch.nn.Module, str]:
    """This worker's model, with the rows of the whole one."""
    if kind == "LINKX":  # PyG builds it for at least one node
        model, name, _ = whole(kind)
        model.load_state_dict(state)
        return pyg_sar.distribute(own_rows(model, data.n_id), view="local"), name
    model, name = build(kind, data.num_nodes)
    pyg_sar.distribute(model, view="local")
    rows = {k: v[data.n_id] if k == name else v for k, v in state.items()}
    model.load_state_dict(rows)
    return model, name


def trained(kind: str, model: Any, data: Any, ids: Tensor, mean: Any, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = run(kind, model, data)
        mean(node_losses(out, ids)).backward()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        found.append((out.detach(), grads))
    return found


def worker(root: Path, states: dict[str, dict[str, Tensor]]) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    found = {}
    for kind in KINDS:
        for k, policy in enumerate(MODES):
            model, _ = local(kind, data, states[kind])
            set_policy(model, policy)
            found[kind, k] = trained(kind, model, data, data.n_id, pyg_sar.mean)
    return data.n_id, found


def typed_graph() -> Any:
    data = make_graph(NODES)
    data.edge_type = torch.arange(data.num_edges) % 3
    return data


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_training_equals_one_process(world, tmp_path):
    data = typed_graph()
    part = torch.arange(NODES) * max(world - 1, 1) // NODES  # the last of several parts is empty
    pyg_sar.write_partitions(data, world, tmp_path / "parts", part)
    states = {kind: whole(kind)[2] for kind in KINDS}
    workers = threads(worker, world, tmp_path / "parts", states)
    for kind in KINDS:
        model, name, _ = whole(kind)
        expected = trained(kind, model, data, torch.arange(NODES), torch.mean)
        for k, policy in enumerate(MODES):
            for step, (out, grads) in enumerate(expected):
                where = f"{kind}, {world} workers, {policy}, step {step}"
                got = [(ids, found[kind, k][step]) for ids, found in workers]
                assert error(assemble(((i, g[0]) for i, g in got), NODES), out) < 1e-9, where
                rows = assemble(((i, g[1][name]) for i, g in got), NODES)
                assert error(rows, grads[name]) < 1e-9, where
                scale = max(float(g.abs().max()) for g in grads.values() if g is not None)
                for _, (_, theirs) in got:
                    for n, gradient in grads.items():
                        if n != name:
                            assert error(theirs[n], gradient, scale) < 1e-9, (where, n)


# Checkpoints ##################################################################


def save(root: Path, path: Path, state: dict[str, Tensor], ids: bool, best: bool) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    model, _ = local("GAT", data, state)
    if ids:
        model.embedding.n_id = data.n_id
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    extra = {f"best/{k}": v.detach() + 1 for k, v in model.state_dict().items()} if best else {}
    for _ in range(2):
        optimizer.zero_grad()
        pyg_sar.mean(node_losses(run("GAT", model, data), data.n_id)).backward()
        optimizer.step()
    pyg_sar.train.save_checkpoint(path, model, optimizer, tensors=extra)
    moments = optimizer.state[model.embedding.weight]["exp_avg"].clone()
    return data.n_id, model.embedding.weight.detach().clone(), moments


def restore(root: Path, path: Path, ids: bool, weights: str = "last") -> Any:
    data = pyg_sar.load_partition(root, view="local")
    model, _ = build("GAT", data.num_nodes)
    if ids:
        model.embedding.n_id = data.n_id
    pyg_sar.distribute(model, view="local")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = model.embedding.weight.detach().clone()
    try:
        pyg_sar.train.load_checkpoint(path, model, optimizer, weights=weights, restore_rng=False)
    except CheckpointError as problem:
        assert torch.equal(before, model.embedding.weight)
        return str(problem)
    moments = optimizer.state[model.embedding.weight]["exp_avg"].clone()
    return data.n_id, model.embedding.weight.detach().clone(), moments


def test_checkpoints_hold_every_workers_rows(tmp_path):
    data, state = make_graph(NODES), whole("GAT")[2]
    roots = {}
    for world, method in ((3, "random"), (3, "contiguous"), (2, "random")):
        roots[world, method] = tmp_path / f"{method}{world}"
        pyg_sar.write_partitions(data, world, roots[world, method], method)
    saved = threads(save, 3, roots[3, "random"], tmp_path / "ids.ckpt", state, True, True)
    blind = threads(save, 3, roots[3, "random"], tmp_path / "blind.ckpt", state, False, False)
    rows = [assemble(((w[0], w[place]) for w in saved), NODES) for place in (1, 2)]
    for (world, _), root in roots.items():
        found = threads(restore, world, root, tmp_path / "ids.ckpt", True)
        for place in (1, 2):
            whole_rows = assemble(((w[0], w[place]) for w in found), NODES)
            assert torch.equal(whole_rows, rows[place - 1])
    best = threads(restore, 2, roots[2, "random"], tmp_path / "ids.ckpt", True, "best")
    assert torch.equal(assemble(((w[0], w[1]) for w in best), NODES), state["embedding.weight"] + 1)
    again = threads(restore, 3, roots[3, "random"], tmp_path / "blind.ckpt", False)
    for a, b in zip(again, blind, strict=True):
        assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
    for problem in threads(restore, 2, roots[2, "random"], tmp_path / "blind.ckpt", False):
        assert "saved without global ids" in problem and "n_id" in problem
    for problem in threads(restore, 3, roots[3, "random"], tmp_path / "ids.ckpt", False):
        assert "set 'n_id'" in problem


def test_a_checkpoint_fits_one_process(tmp_path):
    data, (plain, _, state) = make_graph(NODES), whole("GAT")
    pyg_sar.write_partitions(data, 3, tmp_path / "p", "random")
    saved = threads(save, 3, tmp_path / "p", tmp_path / "c.ckpt", state, True, False)
    threads(lambda: pyg_sar.train.load_checkpoint(tmp_path / "c.ckpt", plain), 1)
    assert torch.equal(plain.embedding.weight, assemble(((w[0], w[1]) for w in saved), NODES))


# To and from a plain embedding ################################################


def there_and_back(root: Path, weight: Tensor) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    embedding = NodeEmbedding(data.num_nodes, CHANNELS, data.n_id, dtype=torch.float64)
    drawn = embedding.weight.detach().clone()
    after = torch.rand(2)
    scatter_embedding(weight, embedding, data.n_id)
    assert torch.equal(embedding(torch.arange(data.num_nodes)), embedding())
    return gather_embedding(embedding, data.n_id), drawn, after


def test_gather_and_scatter(tmp_path):
    data = make_graph(NODES)
    pyg_sar.write_partitions(data, 3, tmp_path / "p", torch.arange(NODES) % 2)
    weight = torch.randn(NODES, CHANNELS, dtype=torch.float64)

    def seeded() -> Any:
        torch.manual_seed(7)
        return there_and_back(tmp_path / "p", weight)

    first, *others = pyg_sar.launch(seeded, 3, backend="threads", timeout=60.0)
    assert type(first[0]) is torch.nn.Embedding and torch.equal(first[0].weight, weight)
    assert [found[0] for found in others] == [None, None]
    assert not torch.equal(first[1], others[0][1])  # not the same rows on every worker


def wrong(root: Path) -> list[str]:
    data = pyg_sar.load_partition(root, view="local")
    rows, found = data.num_nodes, []
    embedding = NodeEmbedding(rows, CHANNELS)
    for case in (
        lambda: NodeEmbedding(rows, CHANNELS, data.n_id[1:]),
        lambda: gather_embedding(embedding, data.n_id[1:]),
        lambda: scatter_embedding(torch.zeros(3, CHANNELS), embedding, data.n_id),
        lambda: scatter_embedding(torch.zeros(NODES, 2), embedding, data.n_id),
        lambda: own_rows(torch.nn.Linear(2, 2), data.n_id),
        lambda: own_rows(LightGCN(3, 2, 1), data.n_id),
        lambda: own_rows(LightGCN(NODES, 2, 1), data.n_id, ["convs"]),
        lambda: pyg_sar.distribute(LightGCN(NODES, 2, 1), view="local").get_embedding(
            data.edge_index
        ),
    ):
        try:
            case()
        except (ValueError, pyg_sar.errors.DistributedIndexError) as problem:
            found.append(str(problem))
    return found


def test_what_does_not_fit_is_named(tmp_path):
    pyg_sar.write_partitions(make_graph(NODES), 2, tmp_path / "p", "contiguous")
    for found in threads(wrong, 2, tmp_path / "p"):
        assert len(found) == 8
        assert "n_id" in found[0] and "n_id" in found[1]
        assert "has 3 rows" in found[2] and "embedding of shape" in found[3]
        assert "no per-node parameters" in found[4] and "whole graph" in found[5]
        assert "'convs'" in found[6]
        assert "[40]" in found[7] and "the worker's 20 nodes" in found[7]


def clipped(root: Path, state: dict[str, Tensor]) -> Any:
    data = pyg_sar.load_partition(root, view="local")
    model, _ = local("GAT", data, state)
    pyg_sar.mean(node_losses(run("GAT", model, data), data.n_id)).backward()
    norm = pyg_sar.reduction.parameters.clip_grad_norm(model, 0.01, pyg_sar.comm.current())
    return norm, data.n_id, model.embedding.weight.grad, model.conv.bias.grad


def test_the_gradient_norm_is_of_all_rows(tmp_path):
    data, (plain, _, state) = make_graph(NODES), whole("GAT")
    pyg_sar.write_partitions(data, 3, tmp_path / "p", "random")
    found = threads(clipped, 3, tmp_path / "p", state)
    node_losses(run("GAT", plain, data), torch.arange(NODES)).mean().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    rows = assemble(((w[1], w[2]) for w in found), NODES)
    assert error(rows, plain.embedding.weight.grad) < 1e-10
    for got, _, _, bias in found:
        assert got == pytest.approx(norm, rel=1e-12)
        assert error(bias, plain.conv.bias.grad) < 1e-10


def test_gradients_summed_by_hand_leave_rows_alone(tmp_path):
    data, (plain, _, state) = make_graph(NODES), whole("GAT")
    pyg_sar.write_partitions(data, 2, tmp_path / "p", "random")

    def by_hand() -> Any:
        part = pyg_sar.load_partition(tmp_path / "p", view="local")
        model, name = build("GAT", part.num_nodes)
        pyg_sar.distribute(model, sum_gradients=False, view="local")
        model.load_state_dict({k: v[part.n_id] if k == name else v for k, v in state.items()})
        pyg_sar.mean(node_losses(model(part.edge_index), part.n_id)).backward()
        pyg_sar.reduction.sum_gradients(model)
        return part.n_id, model.embedding.weight.grad, model.conv.bias.grad

    node_losses(plain(data.edge_index), torch.arange(NODES)).mean().backward()
    workers = threads(by_hand, 2)
    rows = assemble(((w[0], w[1]) for w in workers), NODES)
    assert error(rows, plain.embedding.weight.grad) < 1e-10
    assert all(error(w[2], plain.conv.bias.grad) < 1e-10 for w in workers)


def test_a_copied_model_owns_its_rows(tmp_path):
    data, (plain, _, state) = make_graph(NODES), whole("GAT")
    pyg_sar.write_partitions(data, 2, tmp_path / "p", "random")

    def copied() -> Any:
        part = pyg_sar.load_partition(tmp_path / "p", view="local")
        model = copy.deepcopy(local("GAT", part, state)[0])
        pyg_sar.mean(node_losses(model(part.edge_index), part.n_id)).backward()
        return part.n_id, model.embedding.weight.grad

    node_losses(plain(data.edge_index), torch.arange(NODES)).mean().backward()
    assert error(assemble(threads(copied, 2), NODES), plain.embedding.weight.grad) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_drawn_in_blocks_are_those_of_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """See [Note: blocks of normal numbers]; to the bit, and the generator goes on as there."""
    monkeypatch.setattr("pyg_sar.nn.embedding._DRAWN", 100)
    for nodes, width in ((1, 3), (5, 3), (6, 3), (16, 1), (33, 1), (50, 7), (97, 5), (31, 16)):
        torch.manual_seed(3)
        whole, after = torch.empty(nodes, width, dtype=dtype).normal_(), torch.rand(4)
        ids = torch.randperm(nodes)[: (nodes + 1) // 2]
        torch.manual_seed(3)
        table = NodeEmbedding(len(ids), width, ids, num_nodes=nodes, dtype=dtype)
        assert torch.equal(table.weight, whole[ids]), (nodes, width)
        assert torch.equal(torch.rand(4), after)
    with pytest.raises(ValueError, match="holds the nodes 1 to 4, but 'num_nodes' is 4"):
        NodeEmbedding(2, 3, torch.tensor([1, 4]), num_nodes=4)
    with pytest.raises(ValueError, match="pass n_id=data.n_id"):
        NodeEmbedding(2, 3, num_nodes=4)


class Table(torch.nn.Module):
    def __init__(self, rows: int, make: Any = torch.nn.Embedding) -> None:
        super().__init__()
        self.embedding = make(rows, CHANNELS)
        self.conv = GATConv(CHANNELS, OUT)

    def forward(self, edge_index: Tensor) -> Tensor:
        return self.conv(self.embedding.weight, edge_index)


def test_the_first_parameters_are_those_of_one_process(tmp_path):
    """Every worker drew rows of its own, LINKX's of another scale: another curve."""
    pyg_sar.write_partitions(typed_graph(), 3, tmp_path / "parts", "random")

    makers: dict[str, tuple[Any, str]] = {
        "names": (Table, "embedding.weight"),
        "LightGCN": (lambda n: LightGCN(n, CHANNELS, 2), "embedding.weight"),
        "LINKX": (lambda n: LINKX(n, CHANNELS, 8, OUT, num_layers=2), "edge_lin.weight"),
    }
    lock = threading.Lock()  # Workers that are threads share one generator.

    def seeded(make: Any, *args: Any) -> torch.nn.Module:
        with lock:
            torch.manual_seed(4)
            model: torch.nn.Module = make(*args)
        return model

    def built(kind: str, data: Any) -> tuple[torch.nn.Module, str]:
        if kind == "table":
            rows = functools.partial(NodeEmbedding, n_id=data.n_id, num_nodes=NODES)
            return seeded(Table, data.num_nodes, rows), "embedding.weight"
        make, name = makers[kind]
        names = ["embedding"] if kind == "names" else []
        return own_rows(lambda n: seeded(make, n), data.n_id, names), name

    def worker() -> Any:
        data = pyg_sar.load_partition(tmp_path / "parts", view="local")
        found = {}
        for kind in ("table", "names", "LightGCN", "LINKX"):
            model, name = built(kind, data)
            pyg_sar.distribute(model, view="local")
            found[kind] = name, {k: v.clone() for k, v in model.state_dict().items()}
        return data.n_id, found

    for ids, found in threads(worker, 3):
        for kind, (name, state) in found.items():
            torch.manual_seed(4)
            for key, value in makers.get(kind, (Table, ""))[0](NODES).state_dict().items():
                right = value[ids] if key == name else value
                assert torch.equal(state[key], right), (kind, key)
