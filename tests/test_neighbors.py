"""Edges that are made while training: near nodes, and those that each worker gives for its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.typing
from oracle import parts, whole, workers
from torch import Tensor
from torch.utils.data import default_collate
from torch_geometric import nn as gnn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import DynamicEdgeConv, EdgeConv, MessagePassing, TransformerConv

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.nn import knn_graph, radius_graph

NODES, RADIUS = 60, 0.9
DRAW = torch.Generator().manual_seed(0)
POSITIONS = torch.rand(NODES, 3, generator=DRAW, dtype=torch.float64) * 3
GROUPS = torch.randint(4, (NODES,), generator=DRAW)
BOX = torch.tensor([3.0, 3.0, 1.1], dtype=torch.float64)
SLANTED = torch.tensor([[3.0, 0, 0], [0.4, 3.0, 0], [-0.3, 0.2, 1.2]], dtype=torch.float64)


def graph() -> Data:
    ring = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    x = torch.randn(NODES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Data(x=x, pos=POSITIONS, batch=GROUPS, edge_index=ring)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Partition folders; of three parts one has a single node."""
    folder = tmp_path_factory.mktemp("parts")
    for count in (2, 3):
        owner = torch.arange(NODES) * 7 % 2 if count == 2 else (torch.arange(NODES) % 2).clone()
        owner[5] = count - 1
        pyg_sar.write_partitions(graph(), count, folder / str(count), owner)
    return {count: folder / str(count) for count in (2, 3)}


# Which edges ##################################################################


def by_all_pairs(
    pos: Tensor, r: float, batch: Tensor | None = None, cell: Tensor | None = None
) -> list[tuple[Any, ...]]:
    """Source, target and shift of each edge, by a loop over images and all pairs."""
    found = []
    steps = [(0,) * 3] if cell is None else list(itertools.product(range(-3, 4), repeat=3))
    lattice = torch.eye(3).double() if cell is None else cell.diag() if cell.dim() == 1 else cell
    for step in steps:
        shift = torch.tensor(step, dtype=torch.float64) @ lattice
        near = (pos[None] + shift - pos[:, None]).square().sum(-1) <= r * r
        if batch is not None:
            near &= batch[None] == batch[:, None]
        for target, source in near.nonzero().tolist():
            if source != target or any(step):
                found.append((source, target, *(round(float(s), 9) for s in shift)))
    return sorted(found)


def listed(edge_index: Tensor, shift: Tensor | None = None) -> list[tuple[Any, ...]]:
    moved = torch.zeros(edge_index.size(1), 3) if shift is None else shift
    rows = zip(*edge_index.tolist(), moved.tolist(), strict=True)
    return sorted((s, t, *(round(v, 9) + 0.0 for v in move)) for s, t, move in rows)


@pytest.mark.parametrize("r", [0.3, RADIUS, 10.0])
def test_all_within_the_radius(r: float):
    found = radius_graph(POSITIONS, r)
    assert listed(found) == by_all_pairs(POSITIONS, r)
    assert torch.equal(found[1], found[1].sort().values)
    loops = radius_graph(POSITIONS, r, loop=True)
    assert loops.size(1) == found.size(1) + NODES


@pytest.mark.parametrize("cell", [BOX, SLANTED], ids=["box", "slanted"])
@pytest.mark.parametrize("r", [RADIUS, 1.6])
def test_images_of_a_periodic_cell(cell: Tensor, r: float):
    for pos in (POSITIONS, POSITIONS - 7.3):  # outside of the cell, too
        found, shift = radius_graph(pos, r, cell=cell)
        assert listed(found, shift) == by_all_pairs(pos, r, cell=cell)
        assert float((pos[found[0]] - pos[found[1]] + shift).norm(dim=1).max()) <= r


def test_graphs_of_a_batch_stay_apart():
    assert listed(radius_graph(POSITIONS, 1.5, GROUPS)) == by_all_pairs(POSITIONS, 1.5, GROUPS)
    found = knn_graph(POSITIONS, 3, GROUPS)
    assert bool((GROUPS[found[0]] == GROUPS[found[1]]).all())


@pytest.mark.parametrize("k", [1, 4, NODES + 3])
def test_the_nearest(k: int):
    apart = torch.cdist(POSITIONS, POSITIONS, compute_mode="donot_use_mm_for_euclid_dist")
    apart.fill_diagonal_(torch.inf)
    count = min(k, NODES - 1)
    expected = apart.topk(count, largest=False).indices
    found = knn_graph(POSITIONS, k)
    assert torch.equal(found[0].view(NODES, count), expected)
    assert torch.equal(found[1], torch.arange(NODES).repeat_interleave(count))
    angles = knn_graph(POSITIONS * torch.rand(NODES, 1).add(0.1), 4, cosine=True)
    assert torch.equal(angles, knn_graph(POSITIONS, 4, cosine=True))


def test_many_nodes_at_one_place():
    pos = torch.zeros(9, 2)
    assert radius_graph(pos, 0.1).size(1) == 72
    found = knn_graph(pos, 3)
    assert torch.equal(found[1].bincount(), torch.full((9,), 3))
    assert not bool((found[0] == found[1]).any())


# On workers ###################################################################


class Distances(MessagePassing):
    """Messages that decay with the distance, as in SchNet."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(5, 5).double()

    def forward(self, x: Tensor, edge_index: Tensor, vector: Tensor) -> Tensor:
        apart = vector.norm(dim=-1, keepdim=True)
        return x + self.propagate(edge_index, x=self.lin(x), near=(-apart).exp())

    def message(self, x_j: Tensor, near: Tensor) -> Tensor:
        return x_j.tanh() * near


def moving(data: Data, convert: Any = lambda model: model) -> list[Any]:
    """Nodes that move along their forces: edges anew in each of three steps."""
    torch.manual_seed(0)
    model = convert(torch.nn.ModuleList([Distances(), Distances()]))
    pos, found = data.pos, []
    for _ in range(3):
        pos = pos.detach().clone().requires_grad_()
        edge_index, shift = radius_graph(pos, RADIUS, cell=BOX.to(pos.dtype))
        h = data.x
        for layer in model:
            h = layer(h, edge_index, pos[edge_index[0]] - pos[edge_index[1]] + shift)
        energy = h.square().mean()
        energy.backward()
        pos.grad = pos.grad * 20
        found += [energy.detach(), whole(pos.grad), edge_index.size(1)]
        pos = pos - pos.grad
    return default_collate([f for f in found if not isinstance(f, Tensor)]).tolist() + [
        f for f in found if isinstance(f, Tensor)
    ] + [p.grad for p in model.parameters()]  # fmt: skip


def nearest(data: Data, convert: Any = lambda model: model) -> list[Any]:
    """Edges anew in each layer, from its features, as in ``DynamicEdgeConv``; dropout by edge."""
    torch.manual_seed(0)
    first = EdgeConv(torch.nn.Sequential(torch.nn.Linear(10, 6), torch.nn.ReLU()), aggr="max")
    model = convert(torch.nn.ModuleList([first, TransformerConv(6, 3, dropout=0.4)]).double())
    x = data.x.detach().clone().requires_grad_()
    h = model[0](x, knn_graph(x, 4, data.batch))
    h = model[1](h, knn_graph(h, 5))
    h.square().sum().backward()
    return [whole(h.detach()), whole(x.grad), *(p.grad for p in model.parameters())]


def given_by_hand(data: Data, convert: Any = lambda model: model) -> list[Any]:
    """Each worker gives two in-edges of each of its nodes."""
    torch.manual_seed(0)
    model = convert(TransformerConv(5, 3, dropout=0.3).double())
    spread = pyg_sar.comm.current().world_size > 1
    targets = data.x.rows.ids if spread else torch.arange(NODES)
    targets = targets.flip(0).repeat(2)
    sources = (targets * 11 + torch.arange(2).repeat_interleave(len(targets) // 2)) % NODES
    if spread:
        edge_index = pyg_sar.edges(sources, targets, data)
    else:
        order = targets.argsort(stable=True)
        edge_index = torch.stack([sources[order], targets[order]])
    out = model(data.x, edge_index)
    out.square().sum().backward()
    return [whole(edge_index), whole(out.detach()), *(p.grad for p in model.parameters())]


CASES = {"moving": moving, "nearest": nearest, "by hand": given_by_hand}


def work(root: Path, name: str) -> list[Any]:
    data = pyg_sar.load_partition(root)
    return CASES[name](data, lambda model: pyg_sar.distribute(model))


@pytest.mark.parametrize("world", [2, 3, "parts"])
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_one_process(name: str, world: Any, roots: dict[int, Path]):
    expected = CASES[name](graph())
    start = (parts, 3) if world == "parts" else (workers, world)
    for found in start[0](work, start[1], roots[start[1]], name):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def relation(root: Path | None) -> list[Any]:
    """Edges by hand from nodes of one type to those of another."""
    data = two_types() if root is None else pyg_sar.load_partition(root)
    targets = torch.arange(NODES) if root is None else data["a"].x.rows.ids
    sources = targets * 5 % 40
    if root is None:
        edge_index = torch.stack([sources, targets])
    else:
        edge_index = pyg_sar.edges(sources, targets, data["a"], data["b"])
    torch.manual_seed(0)
    model = gnn.SAGEConv((3, 5), 4).double()
    model = model if root is None else pyg_sar.distribute(model)
    out = model((data["b"].x, data["a"].x), edge_index)
    out.square().sum().backward()
    return [whole(edge_index), whole(out.detach()), *(p.grad for p in model.parameters())]


def two_types() -> HeteroData:
    data, draw = HeteroData(), torch.Generator().manual_seed(2)
    data["a"].x = torch.randn(NODES, 5, generator=draw, dtype=torch.float64)
    data["b"].x = torch.randn(40, 3, generator=draw, dtype=torch.float64)
    data["b", "to", "a"].edge_index = torch.randint(40, (2, 80), generator=draw)
    return data


def test_edges_between_nodes_of_two_types(tmp_path: Path):
    pyg_sar.write_partitions(two_types(), 2, tmp_path / "two", "random")
    expected = relation(None)
    for found in workers(relation, 2, tmp_path / "two"):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# PyG's functions ##############################################################


def pretend_pyg_lib() -> None:
    """Defines pyg-lib's operators by all pairs, where it is not installed."""
    torch_geometric.typing.WITH_KNN = torch_geometric.typing.WITH_RADIUS = True
    if hasattr(torch.ops.pyg, "knn"):
        return
    pairs = "(Tensor x, Tensor y, Tensor? ptr_x, Tensor? ptr_y, "
    torch.library.define("pyg::knn", pairs + "int k, bool cosine, int num_workers) -> Tensor")
    torch.library.define(
        "pyg::radius",
        pairs + "float r, int? max_num_neighbors, int num_workers, bool ignore_same_index)"
        " -> Tensor",
    )

    def apart(x: Tensor, y: Tensor, first_x: Any, first_y: Any) -> Tensor:
        found = torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist")
        if first_x is not None:
            graph = [torch.repeat_interleave(p.diff()) for p in (first_y, first_x)]
            found[graph[0][:, None] != graph[1][None]] = torch.inf
        return found

    @torch.library.impl("pyg::knn", "CPU")
    def knn(x, y, first_x, first_y, k, cosine, num_workers):
        values, found = apart(x, y, first_x, first_y).topk(k, largest=False)
        rows = torch.arange(len(y)).view(-1, 1).expand_as(found)
        return torch.stack([rows[values < torch.inf], found[values < torch.inf]])

    @torch.library.impl("pyg::radius", "CPU")
    def radius(x, y, first_x, first_y, r, most, num_workers, ignores):
        near = apart(x, y, first_x, first_y) <= r
        return (near.fill_diagonal_(False) if ignores else near).nonzero().t()


def by_pyg_lib(root: Path | None) -> list[Any]:
    pretend_pyg_lib()
    data = ordered_graph() if root is None else pyg_sar.load_partition(root)
    torch.manual_seed(0)
    dynamic = DynamicEdgeConv(torch.nn.Linear(10, 3), 4)
    layers = [dynamic, gnn.GravNetConv(5, 3, 3, 4, 4), gnn.XConv(5, 8, 3, 4, hidden_channels=4)]
    model = torch.nn.ModuleList(layers).double()
    model = model if root is None else pyg_sar.distribute(model)
    outs = [model[0](data.x, data.batch), model[1](data.x, data.batch)]
    outs.append(model[2](data.x, data.pos, data.batch))
    sum(out.square().mean() for out in outs).backward()
    found = [
        *(whole(out.detach()) for out in outs),
        *(p.grad for p in model.parameters()),
        *model.buffers(),
        whole(gnn.knn_graph(data.pos, 3, data.batch)),
        whole(gnn.radius_graph(data.pos, RADIUS, max_num_neighbors=None)).sort(1).values,
        whole(gnn.knn(data.x, data.pos[:, :1].expand(-1, 5), 2)),
    ]
    if root is not None:
        with pytest.raises(DistributedIndexError, match="more than max_num_neighbors=3"):
            gnn.radius_graph(data.pos, RADIUS, max_num_neighbors=3)
    return found


def ordered_graph() -> Data:
    """A graph whose nodes stand graph by graph, as in a batch."""
    data = graph()
    data.batch = data.batch.sort().values
    return data


def test_layers_and_functions_that_ask_pyg_lib(tmp_path: Path):
    pyg_sar.write_partitions(ordered_graph(), 2, tmp_path / "two", "random")
    expected = forked_alone(by_pyg_lib)
    for found in workers(by_pyg_lib, 2, tmp_path / "two"):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def forked_alone(fn: Any) -> list[Any]:
    """In a process of its own: the operators that it defines stay there."""
    return pyg_sar.launch(fn, 1, None)[0]


# Refused ######################################################################


@pytest.mark.parametrize(
    "change, message",
    [
        ({"r": 0.0}, "radius_graph: Expected 'r' to be a positive number"),
        ({"pos": POSITIONS.log()}, "'pos' of node .* is not finite"),
        ({"pos": POSITIONS[:, 0]}, r"Expected 'pos' to be a float tensor \[N, D\]"),
        ({"batch": GROUPS[:3]}, r"Expected 'batch' to be int64 \[60\]"),
        ({"batch": GROUPS, "cell": BOX}, "Expected one of 'batch' and 'cell'"),
        ({"cell": torch.ones(3, 3)}, "with a volume"),
        ({"cell": BOX / 100}, "more than ten times the cell's width"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str):
    if "pos" in change and change["pos"].dim() == 2:
        change["pos"][3] = torch.nan
    with pytest.raises(ValueError, match=message):
        radius_graph(**{"pos": POSITIONS, "r": 1.0, **change})
    with pytest.raises(ValueError, match="Expected 'k' to be an integer of at least 1"):
        knn_graph(POSITIONS, 0)


def wrong(root: Path) -> list[str]:
    data, found = pyg_sar.load_partition(root), []
    rank, mine = data.x.rows.comm.rank, data.x.rows.ids
    for give in (
        lambda: radius_graph(data.pos, 1.0 + rank),
        lambda: knn_graph(data.pos, 3 + rank),
        lambda: pyg_sar.edges(mine, mine if rank else mine - mine[0] + NODES, data),
        lambda: pyg_sar.edges(mine, (mine + rank) % NODES, data),
        lambda: pyg_sar.edges(mine[rank:], mine, data),
        lambda: pyg_sar.edges(data.x if rank else mine, mine, data),
    ):
        try:
            give()
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


def test_what_one_worker_gets_wrong_ends_all(roots: dict[int, Path]):
    for found in workers(wrong, 2, roots[2]):
        radius, nearest, beyond, others, fewer, kind = found
        assert "arguments must be the same on all workers" in radius
        assert "arguments must be the same on all workers" in nearest
        assert "'targets' hold" in beyond and "nodes are 0 to 59 (rank 0)" in beyond
        assert "which another worker owns (rank 1)" in others
        assert "'sources' and" in fewer and "(rank 1)" in fewer
        assert "Expected 'sources' to be a plain int64 tensor [E] (got NodeTensor) (rank 1)" in kind
