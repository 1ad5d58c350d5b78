"""Parameters with a row per node: each worker owns its rows, of what one process has."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import some
from oracle import (
    CHANNELS,
    MODES,
    OUT,
    alike,
    error,
    make_graph,
    node_losses,
    parts,
    set_policy,
    whole,
)
from oracle import workers as launched
from torch import Tensor
from torch_geometric.nn import LINKX, GATConv, LightGCN, RGCNConv
from torch_geometric.utils import to_undirected

import pyg_sar
from pyg_sar.errors import CheckpointError
from pyg_sar.nn import NodeEmbedding
from pyg_sar.tensors import NodeTensor

NODES = 40


class Embedded(torch.nn.Module):
    """A layer on trainable node vectors alone."""

    def __init__(self, make: Any = torch.nn.Embedding) -> None:
        super().__init__()
        self.embedding = make(NODES, CHANNELS)
        self.conv = GATConv(CHANNELS, OUT)

    def forward(self, edge_index: Tensor) -> Tensor:
        return self.conv(self.embedding.weight, edge_index)


class Relational(torch.nn.Module):
    """R-GCN on entities without features, whose vectors are looked up by ids."""

    def __init__(self, make: Any = torch.nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.conv = make(NODES, CHANNELS), RGCNConv(CHANNELS, OUT, 3)

    def forward(self, data: Any) -> Tensor:
        twice = torch.stack([data.name, data.name], dim=1)  # [N, 2], ids in another order
        x = self.embedding(twice).mean(1) + self.embedding(torch.arange(NODES))
        return self.conv(x, data.edge_index, data.edge_type)


KINDS: dict[str, tuple[Any, str, Any]] = {
    "GAT": (Embedded, "embedding.weight", lambda m, d: m(d.edge_index)),
    "own GAT": (lambda: Embedded(NodeEmbedding), "embedding.weight", lambda m, d: m(d.edge_index)),
    "RGCN": (Relational, "embedding.weight", lambda m, d: m(d)),
    "LightGCN": (
        lambda: LightGCN(NODES, CHANNELS, 2),
        "embedding.weight",
        lambda m, d: m.get_embedding(d.edge_index),
    ),
    "LINKX": (
        lambda: LINKX(NODES, CHANNELS, 8, OUT, num_layers=2),
        "edge_lin.weight",
        lambda m, d: m(d.x, d.edge_index),
    ),
    "LINKX, made edges": (
        lambda: LINKX(NODES, CHANNELS, 8, OUT, num_layers=2),
        "edge_lin.weight",
        lambda m, d: m(d.x, *to_undirected(d.edge_index, d.edge_weight)),
    ),
}


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(4)
    return KINDS[kind][0]().double()


def graph() -> Any:
    data = make_graph(NODES)
    data.edge_type = torch.arange(data.num_edges) % 3
    data.name = torch.randperm(NODES, generator=torch.Generator().manual_seed(1))
    return data


def trained(kind: str, model: Any, data: Any, steps: int = 2) -> list[Any]:
    """Outputs, norms and gradients of some steps, all rows of each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = KINDS[kind][2](model, data)
        node_losses(out).mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        grads = {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        found.append((whole(out.detach()), norm, grads))
    state = optimizer.state[dict(model.named_parameters())[KINDS[kind][1]]]
    for held in (state["exp_avg"], state["exp_avg_sq"]):
        assert not isinstance(held, NodeTensor) or held.local.size(0) == data.x.local.size(0)
    return found


def worker(root: Path, cases: list[tuple[str, int]]) -> Any:
    data = pyg_sar.load_partition(root)
    found = {}
    for kind, k in cases:
        model, name = build(kind), KINDS[kind][1]
        before = dict(model.named_parameters())
        pyg_sar.distribute(model)
        weight = dict(model.named_parameters())[name]
        if pyg_sar.comm.current().world_size > 1:
            assert weight is before[name] and isinstance(weight, torch.nn.Parameter)
            assert weight.shape[0] == NODES
            assert weight.to_local().size(0) == data.x.to_local().size(0)
        set_policy(model, MODES[k])
        first = {key: whole(value).clone() for key, value in model.state_dict().items()}
        found[kind, k] = first, trained(kind, model, data)
    return found


@pytest.mark.parametrize(
    ("world", "run"), [(1, launched), (2, launched), (3, parts), (5, launched)]
)
def test_training_equals_one_process(world, run, tmp_path):
    data = graph()
    part = torch.arange(NODES) * max(world - 1, 1) // NODES  # the last of several parts is empty
    pyg_sar.write_partitions(data, world, tmp_path / "parts", part)
    cases = [(kind, k) for kind in KINDS for k in some(range(len(MODES)), f"{kind} {world}", 4)]
    workers = run(worker, world, tmp_path / "parts", cases)
    for kind in KINDS:
        model = build(kind)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        expected = trained(kind, model, data)
        for theirs, (_, k) in product(workers, [case for case in cases if case[0] == kind]):
            first, found = theirs[kind, k]
            for key, value in state.items():
                assert torch.equal(first[key], value), (kind, key)
            for step, ((out, norm, grads), right) in enumerate(zip(found, expected, strict=True)):
                where = f"{kind}, {world} workers, {MODES[k]}, step {step}"
                assert error(out, right[0]) < 1e-9, where
                assert norm == pytest.approx(right[1], rel=1e-9), where
                scale = max(float(g.abs().max()) for g in right[2].values() if g is not None)
                for n, gradient in right[2].items():
                    assert error(grads[n], gradient, scale) < 1e-9, (where, n)


# Checkpoints ##################################################################


def step(model: Any, optimizer: Any, data: Any) -> None:
    optimizer.zero_grad()
    node_losses(model(data.edge_index)).mean().backward()
    optimizer.step()


def rows_of(model: Any, optimizer: Any) -> tuple[Tensor, ...]:
    weight = model.embedding.weight
    return tuple(whole(t.detach()).clone() for t in (weight, optimizer.state[weight]["exp_avg"]))


def save(root: Path, path: Path) -> Any:
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(build("GAT"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    best = {f"best/{k}": v.detach() + 1 for k, v in model.state_dict().items()}
    for _ in range(2):
        step(model, optimizer, data)
    pyg_sar.train.save_checkpoint(path, model, optimizer, tensors=best)
    return rows_of(model, optimizer)


def restore(root: Path, path: Path) -> Any:
    data = pyg_sar.load_partition(root)
    model = pyg_sar.distribute(build("own GAT"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pyg_sar.train.load_checkpoint(path, model, optimizer, restore_rng=False)
    moment = optimizer.state[model.embedding.weight]["exp_avg"]
    assert isinstance(moment, NodeTensor) or pyg_sar.comm.current().world_size == 1
    found = rows_of(model, optimizer)
    step(model, optimizer, data)
    after = whole(model.embedding.weight.detach()).clone()
    content = pyg_sar.train.load_checkpoint(path, model, weights="best")
    best = content.tensors["best/embedding.weight"]
    assert best.shape == (NODES, CHANNELS)
    return *found, after, whole(model.embedding.weight.detach())


def other(root: Path, path: Path) -> str:
    pyg_sar.load_partition(root)
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Embedding(NODES, 2)]).double()
    pyg_sar.distribute(model)
    before = whole(model[0].weight.detach())
    try:
        pyg_sar.train.load_checkpoint(path, model)
    except CheckpointError as problem:
        assert torch.equal(before, whole(model[0].weight.detach()))
        return str(problem)
    return ""


def buffered(root: Path, path: Path) -> str:
    data = pyg_sar.load_partition(root)
    model = build("GAT")
    model.register_buffer("kept", torch.zeros(data.x.to_local().size(0)))
    try:
        pyg_sar.train.save_checkpoint(path, model)
    except CheckpointError as problem:
        return str(problem)
    return ""


def test_checkpoints_hold_every_workers_rows(tmp_path):
    """Under any partition, and in one process, they load to the bit."""
    data, path = graph(), tmp_path / "c.ckpt"
    state = build("GAT").state_dict()
    roots = {}
    for world, method in ((3, "random"), (3, "contiguous"), (2, "random"), (1, "random")):
        roots[world, method] = tmp_path / f"{method}{world}"
        pyg_sar.write_partitions(data, world, roots[world, method], method)
    saved = launched(save, 3, roots[3, "random"], path)[0]
    model = build("GAT")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pyg_sar.train.load_checkpoint(path, model, optimizer, restore_rng=False)
    for found, right in zip(rows_of(model, optimizer), saved, strict=True):
        assert torch.equal(found, right)
    step(model, optimizer, data)
    for (world, _), root in roots.items():
        for *found, after, best in launched(restore, world, root, path):
            assert all(map(torch.equal, found, saved))
            assert error(after, model.embedding.weight.detach()) < 1e-10
            assert torch.equal(best, state["embedding.weight"] + 1)
    for problem in launched(other, 2, roots[2, "random"], path):
        assert "another model" in problem
    uneven = tmp_path / "uneven"
    pyg_sar.write_partitions(data, 2, uneven, torch.arange(NODES) // 30)
    for problem in launched(buffered, 2, uneven, path):
        assert "'model/kept' has the shape [30] on rank 0, [10] on rank 1" in problem


# Use ##########################################################################


def used(root: Path) -> dict[str, Any]:
    data = pyg_sar.load_partition(root)
    model = build("GAT")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # before distribute()
    model.embedding.weight.grad = torch.ones(NODES, CHANNELS, dtype=torch.float64)
    pyg_sar.distribute(model)
    found: dict[str, Any] = {}
    node_losses(model(data.edge_index)).mean().backward()
    found["added"] = whole(model.embedding.weight.grad)
    optimizer.step()
    found["stepped"] = whole(model.embedding.weight.detach())
    twin = copy.deepcopy(model)
    twin.zero_grad()
    node_losses(twin(data.edge_index)).mean().backward()
    assert isinstance(twin.embedding.weight, torch.nn.Parameter)
    found["copied"] = whole(twin.embedding.weight.grad)
    plain = pickle.loads(pickle.dumps(model.embedding))
    assert type(plain.weight) is torch.nn.Parameter
    found["pickled"] = plain.weight.detach()
    plain = build("GAT")
    plain.load_state_dict(model.state_dict())
    found["plain"] = plain.embedding.weight.detach()
    twin.load_state_dict(build("GAT").state_dict())
    found["loaded"] = whole(twin.embedding.weight.detach())
    twin.float()
    assert twin.embedding.weight.dtype == twin.embedding.weight.to_local().dtype == torch.float32
    found["float"] = whole(twin(data.edge_index).detach())
    frozen = build("GAT")
    frozen.embedding.weight.requires_grad_(False)
    pyg_sar.distribute(frozen)
    node_losses(frozen(data.edge_index)).mean().backward()
    assert frozen.embedding.weight.grad is None and not frozen.embedding.weight.requires_grad
    found["frozen"] = frozen.conv.bias.grad
    tied = torch.nn.ModuleDict(
        {"one": torch.nn.Embedding(NODES, 3), "two": torch.nn.Embedding(NODES, 3)}
    )
    tied["two"].weight = tied["one"].weight
    pyg_sar.distribute(tied)
    assert tied["two"].weight is tied["one"].weight
    assert isinstance(tied["one"].weight, NodeTensor)
    return found


def test_a_model_is_used_as_in_one_process(tmp_path):
    data = graph()
    pyg_sar.write_partitions(data, 2, tmp_path / "p", "random")
    right: dict[str, Any] = {}
    model = build("GAT")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.embedding.weight.grad = torch.ones(NODES, CHANNELS, dtype=torch.float64)
    node_losses(model(data.edge_index)).mean().backward()
    right["added"], right["frozen"] = (
        model.embedding.weight.grad.clone(),
        model.conv.bias.grad.clone(),
    )
    optimizer.step()
    right["stepped"] = right["pickled"] = right["plain"] = model.embedding.weight.detach().clone()
    model.zero_grad()
    node_losses(model(data.edge_index)).mean().backward()
    right["copied"] = model.embedding.weight.grad
    right["loaded"] = build("GAT").embedding.weight.detach()
    right["float"] = build("GAT").float()(data.edge_index).detach()
    for found in launched(used, 2, tmp_path / "p"):
        for name, value in right.items():
            assert error(found[name], value) < (1e-5 if name == "float" else 1e-10), name


def options(root: Path) -> Any:
    """Embeddings whose rows by other rules than a plain one's stay with every worker."""
    data = pyg_sar.load_partition(root)
    found = []
    for how in ({"padding_idx": 3}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}):
        torch.manual_seed(2)
        table = pyg_sar.distribute(torch.nn.Embedding(NODES, 3, dtype=torch.float64, **how))
        ids = data.name // 2
        node_losses(table(ids)).mean().backward()
        found.append((whole(table(ids).detach()), whole(table.weight.grad)))
    return found


def test_options_of_embeddings(tmp_path):
    data = graph()
    pyg_sar.write_partitions(data, 2, tmp_path / "p", "random")
    for workers in launched(options, 2, tmp_path / "p"):
        for how, found in zip(
            ({"padding_idx": 3}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}),
            workers,
            strict=True,
        ):
            torch.manual_seed(2)
            table = torch.nn.Embedding(NODES, 3, dtype=torch.float64, **how)
            ids = data.name // 2
            node_losses(table(ids)).mean().backward()
            assert error(found[0], table(ids).detach()) < 1e-10, how
            assert error(found[1], table.weight.grad) < 1e-10, how


def computed(data: Any, ready: Any) -> list[Tensor]:
    """A table that is computed in each call, and counts its calls: by a spectral norm's steps."""
    torch.manual_seed(2)
    table = torch.nn.Embedding(NODES, CHANNELS).double()
    table = ready(torch.nn.utils.parametrizations.spectral_norm(table, n_power_iterations=1))
    found = []
    for _ in range(3):
        table.zero_grad()
        node_losses(table(data.name // 2)).mean().backward()
        found += [p.grad.clone() for p in table.parameters()]
    return [*found, *(buffer.clone() for buffer in table.buffers())]


def test_distribute_computes_no_table(tmp_path):
    pyg_sar.write_partitions(data := graph(), 2, tmp_path / "p", "random")
    alike(computed, data, tmp_path / "p", 2)


def wrong(root: Path) -> list[str]:
    found = []
    for case in (
        lambda: NodeEmbedding(NODES, 3),
        lambda: pyg_sar.load_partition(root) and NodeEmbedding(NODES + 1, 3),
        lambda: NodeEmbedding(NODES, 3)(torch.tensor([NODES])),
        lambda: NodeEmbedding(NODES, 3)(torch.tensor([-1])),
    ):
        try:
            case()
        except (ValueError, IndexError) as problem:
            found.append(str(problem))
    return found


def test_what_does_not_fit_is_named(tmp_path):
    pyg_sar.write_partitions(graph(), 2, tmp_path / "p", "contiguous")
    for found in launched(wrong, 2, tmp_path / "p"):
        assert len(found) == 4
        assert "NodeEmbedding(40, 3): no graph with so many nodes" in found[0]
        assert "only with [40]" in found[1] and "index 40 is out of bounds" in found[2]
        assert "out of range" in found[3]
