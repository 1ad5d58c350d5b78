"""The index space, in which layers compute: what may be done with a distributed edge index gives
global results. And what may not raises an error that names the operation, never a local number.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import TOLERANCE, Partitions, assemble, error, make_graph, parts, whole, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric import utils
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_sar
from pyg_sar.errors import DistributedIndexError
from pyg_sar.space import DistEdgeIndex, DistIndex
from pyg_sar.space.edge_ids import edge_numbers
from pyg_sar.tensors import NodeTensor

WORLD = 3
NODES = 40


@pytest.fixture(scope="module")
def graph() -> Data:
    return make_graph(NODES)


@pytest.fixture(scope="module")
def root(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Partitions(tmp_path_factory.mktemp("space"))(graph, WORLD, "random")


def own_rows(root: Path) -> Data:
    """What a layer's ``forward()`` meets: this worker's rows and edges, and which these are."""
    whole = pyg_sar.load_partition(root)
    data = Data(n_id=whole.x.rows.ids, e_id=whole.edge_attr.rows.ids)
    for name, value in whole.to_dict().items():
        data[name] = value.to_local() if isinstance(value, NodeTensor) else value
    data.num_nodes = len(data.n_id)
    return data


def on_workers(fn: Callable[[Data], Any], root: Path) -> list[Any]:
    """``fn(data)`` of every worker's part."""
    return parts(lambda: fn(own_rows(root)), WORLD)


def refusal(fn: Callable[[Data], Any], data: Data) -> str:
    with pytest.raises(DistributedIndexError) as caught:
        fn(data)
    return str(caught.value)


def refused(fn: Callable[[Data], Any], root: Path) -> str:
    """The message of the error that every worker must raise; the same kind on all."""
    return str(on_workers(lambda data: refusal(fn, data), root)[0])


# Reading and scattering ######################################################

NodeFn = Callable[[Data], Tensor]
NODE_RESULTS: dict[str, NodeFn] = {
    "degree of sources": lambda d: utils.degree(d.edge_index[0], d.num_nodes),
    "degree of targets": lambda d: utils.degree(d.edge_index[1], d.num_nodes),
    "degree of sources, long": lambda d: utils.degree(d.edge_index[0], d.num_nodes, torch.long),
    "sum at sources": lambda d: utils.scatter(d.edge_attr, d.edge_index[0], 0, d.num_nodes),
    "mean at sources": lambda d: utils.scatter(
        d.edge_attr, d.edge_index[0], 0, d.num_nodes, "mean"
    ),
    "max at sources": lambda d: utils.scatter(d.edge_attr, d.edge_index[0], 0, d.num_nodes, "max"),
    "min at sources": lambda d: utils.scatter(d.edge_attr, d.edge_index[0], 0, d.num_nodes, "min"),
    "max of negatives": lambda d: utils.scatter(
        -d.edge_weight, d.edge_index[0], 0, d.num_nodes, "max"
    ),
    "sum along columns": lambda d: utils.scatter(
        d.edge_attr.t(), d.edge_index[0], 1, d.num_nodes
    ).t(),
    "scatter_add_": lambda d: torch.zeros(d.num_nodes, dtype=torch.float64).scatter_add_(
        0, d.edge_index[0], d.edge_weight
    ),
    "index_add_": lambda d: torch.zeros(d.num_nodes, 4, dtype=torch.float64).index_add_(
        0, d.edge_index[0], d.edge_attr
    ),
    "scatter_add into a start": lambda d: torch.scatter_add(
        d.x[:, 0], 0, d.edge_index[0], d.edge_weight
    ),
    "self loop attributes": lambda d: utils.get_self_loop_attr(
        d.edge_index, d.edge_weight, d.num_nodes
    ),
    "two hops": lambda d: utils.scatter(d.x[d.edge_index[0]], d.edge_index[1], 0, d.num_nodes),
    "max of neighbours' degrees": lambda d: utils.scatter(
        utils.degree(d.edge_index[0], d.num_nodes)[d.edge_index[0]],
        d.edge_index[1], 0, d.num_nodes, "max",
    ),
}  # fmt: skip

EDGE_RESULTS: dict[str, NodeFn] = {
    "x[row]": lambda d: d.x[d.edge_index[0]],
    "x[col]": lambda d: d.x[d.edge_index[1]],
    "x[:, row]": lambda d: d.x.t()[:, d.edge_index[0]].t(),
    "x[:, row, :]": lambda d: d.x.view(-1, 2, 3).transpose(0, 1)[:, d.edge_index[0], :].sum(0),
    "index_select": lambda d: d.x.index_select(0, d.edge_index[0]),
    "torch.index_select": lambda d: torch.index_select(d.x.t(), -1, d.edge_index[0]).t(),
    "of bools": lambda d: d.train_mask[d.edge_index[0]],
    "of integers": lambda d: d.y[d.edge_index[0]],
    "of halves": lambda d: d.x.to(torch.bfloat16)[d.edge_index[0]],
    "of cubes": lambda d: d.x.view(-1, 2, 3)[d.edge_index[0]],
    "of wide rows of nothing": lambda d: d.x[:, :0][d.edge_index[0]],
    "softmax over sources": lambda d: utils.softmax(
        d.edge_attr, d.edge_index[0], num_nodes=d.num_nodes
    ),
    "softmax over targets": lambda d: utils.softmax(
        d.edge_attr, d.edge_index[1], num_nodes=d.num_nodes
    ),
    "gcn_norm without loops": lambda d: gcn_norm(
        d.edge_index, d.edge_weight, d.num_nodes, add_self_loops=False
    )[1],
    "loops": lambda d: d.edge_index[0] == d.edge_index[1],
    "no loops": lambda d: d.edge_index[0] != d.edge_index[1],
    "unbound": lambda d: d.x[d.edge_index.unbind()[0]] - d.x[torch.unbind(d.edge_index, 0)[1]],
    "unpacked": lambda d: (lambda row, col: d.x[row] - d.x[col])(*d.edge_index),
    "cloned": lambda d: d.x[d.edge_index.clone()[0].clone()],
    "flipped": lambda d: d.x[d.edge_index.flip(0)[1]] - d.x[d.edge_index[1]],
    "negative row": lambda d: d.x[d.edge_index[-2]] - d.x[d.edge_index[-1]],
    "joined halves": lambda d: d.edge_attr.sum(1) + d.x[
        torch.cat([d.edge_index[:, k] for k in (d.y.new_ones(d.num_edges) > 0, d.edge_weight > 2)],
                  dim=1)[0]
    ].sum(1),
}  # fmt: skip


def with_gradients(fn: NodeFn, data: Data, weigh: Callable[[Tensor], Tensor]) -> Any:
    """The result, and the gradients of a weighted sum of it over all workers."""
    data = copy.copy(data)
    names = ("x", "edge_weight", "edge_attr")
    inputs = {name: data[name].clone().requires_grad_() for name in names}
    for name, value in inputs.items():
        data[name] = value
    out = fn(data)
    grads: dict[str, Tensor | None] = dict.fromkeys(inputs)
    if out.requires_grad:
        (weigh(out) * out).sum().backward()
        grads = {name: value.grad for name, value in inputs.items()}
    return out.detach(), grads


def weights(ids: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda out: torch.cos(ids.double()).view(-1, *[1] * (out.dim() - 1)).to(out.dtype)


NOT_DIFFERENTIABLE = {"max at sources", "min at sources", "max of negatives"}
CASES = {**NODE_RESULTS, **EDGE_RESULTS}


def results(data: Data) -> dict[str, Any]:
    """Of each case the result, and its gradients."""
    found = {}
    for name, fn in CASES.items():
        ids = data.n_id if name in NODE_RESULTS else data.e_id
        plain = name in NOT_DIFFERENTIABLE
        found[name] = (fn(data), {}) if plain else with_gradients(fn, data, weights(ids))
    return found


def test_results_are_global(graph: Data, root: Path):
    whole = copy.copy(graph)
    whole.n_id, whole.e_id = torch.arange(NODES), torch.arange(graph.num_edges)
    sizes = {"n_id": NODES, "e_id": graph.num_edges}
    found = workers(lambda: (lambda d: (d.n_id, d.e_id, results(d)))(own_rows(root)), WORLD)
    for name, (expected, gradients) in results(whole).items():
        place = int(name in EDGE_RESULTS)
        rows = assemble(((w[place], w[2][name][0]) for w in found), [*sizes.values()][place])
        assert rows is not None and rows.dtype == expected.dtype, name
        assert error(rows, expected) <= TOLERANCE, name
        for of, gradient in gradients.items():
            k = int(of != "x")
            got = assemble(((w[k], w[2][name][1][of]) for w in found), [*sizes.values()][k])
            if got is None or gradient is None:
                assert got is None or not got.any(), (name, of)
                assert gradient is None or not gradient.any(), (name, of)
            else:
                tolerance = TOLERANCE if expected.dtype != torch.bfloat16 else 0.05
                assert error(got, gradient) <= tolerance, (name, of)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_maxima_at_sources_have_no_gradient_and_say_so(reduce: str, root: Path):
    def run(data: Data) -> None:
        values = data.edge_weight.clone().requires_grad_()
        utils.scatter(values, data.edge_index[0], 0, data.num_nodes, reduce)

    assert f"a{reduce}" in refused(run, root)


# Self loops and normalisation ################################################


def edges_by_name(edge_index: Tensor, data: Data, values: Tensor) -> list[tuple[int, int, float]]:
    """Edges as (source, target, value) with global ids, sorted: independent of the order."""
    ids = data.n_id.double()
    source, target = ids[edge_index[0]], ids[edge_index[1]]
    rows = torch.stack([source, target, values.double()], dim=1)
    return sorted((int(a), int(b), round(c, 9)) for a, b, c in rows.tolist())


LISTS: dict[str, Callable[[Data], tuple[Tensor, Tensor | None]]] = {
    "remove": lambda d: utils.remove_self_loops(d.edge_index, d.edge_weight),
    "add": lambda d: utils.add_self_loops(d.edge_index, d.edge_weight, 0.5, d.num_nodes),
    "add, mean": lambda d: utils.add_self_loops(d.edge_index, d.edge_weight, "mean", d.num_nodes),
    "add, max": lambda d: utils.add_self_loops(d.edge_index, d.edge_weight, "max", d.num_nodes),
    "add remaining": lambda d: utils.add_remaining_self_loops(
        d.edge_index, d.edge_weight, 0.5, d.num_nodes
    ),
    "remove and add": lambda d: utils.add_self_loops(
        *utils.remove_self_loops(d.edge_index, d.edge_weight), num_nodes=d.num_nodes
    ),
    "segregate": lambda d: utils.segregate_self_loops(d.edge_index, d.edge_weight)[:2],
    "norm": lambda d: gcn_norm(d.edge_index, d.edge_weight, d.num_nodes),
    "norm, improved": lambda d: gcn_norm(d.edge_index, None, d.num_nodes, True, dtype=torch.double),
    "dropped": lambda d: (
        d.edge_index[:, d.edge_weight > 0.5], d.edge_weight[d.edge_weight > 0.5],
    ),
    "sliced by index": lambda d: (
        d.edge_index.index_select(1, (d.edge_weight > 0.5).nonzero().view(-1)),
        d.edge_weight[d.edge_weight > 0.5],
    ),
    "laplacian": lambda d: utils.get_laplacian(
        d.edge_index, d.edge_weight, "sym", num_nodes=d.num_nodes
    ),
    "subgraph": lambda d: utils.subgraph(d.train_mask, d.edge_index, d.edge_weight),
}  # fmt: skip


def test_edge_lists_are_those_of_the_whole_graph(graph: Data, root: Path):
    graph.n_id = torch.arange(NODES)

    def lists(data: Data) -> dict[str, Any]:
        found = {}
        for name, fn in LISTS.items():
            edge_index, values = fn(data)
            assert data is graph or isinstance(edge_index, DistEdgeIndex)
            found[name] = edges_by_name(*reorder((edge_index, values), data))
        return found

    every = workers(lambda: lists(own_rows(root)), WORLD)
    for name, expected in lists(graph).items():
        assert sorted(edge for found in every for edge in found[name]) == expected, name


def reorder(result: tuple[Tensor, Tensor | None], data: Data) -> tuple[Tensor, Data, Tensor]:
    edge_index, values = result
    return edge_index, data, values if values is not None else torch.zeros(edge_index.size(1))


def test_self_loops_without_the_number_of_nodes(graph: Data, tmp_path: Path):
    """Nodes behind the last one with an edge get none; those of a worker without edges get one."""
    one = (graph.edge_index[1] != 5) & (graph.edge_index[1] != 9)
    part = torch.arange(NODES) % 2
    part[[5, 9]] = 2
    torch.manual_seed(0)
    layers = [gnn.EGConv(6, 4, ["sum", "max"], num_heads=2, num_bases=2), gnn.SAGEConv(6, 4)]
    layers = [layer.double() for layer in layers]

    def outputs(data: Data, layers: list[Any]) -> list[Tensor]:
        loops = [f(data.edge_index)[0] for f in (utils.add_self_loops, _without_and_with)]
        found = [
            *(layers[0](data.x, data.edge_index), layers[0](data.x, data.edge_index[:, :0])),
            *(layers[1](data.x, edges) for edges in loops),
            *(layers[1](data.x, data.edge_index[:, k]) for k in (slice(None, None, 2), slice(9))),
        ]
        return [whole(out.detach()) for out in found]

    def worker(root: Path) -> Any:
        models = [pyg_sar.distribute(copy.deepcopy(layer)) for layer in layers]
        return outputs(pyg_sar.load_partition(root), models)

    for edges in (graph.edge_index, graph.edge_index[:, one]):
        kept = Data(x=graph.x, edge_index=edges)
        pyg_sar.write_partitions(kept, WORLD, tmp_path / "parts", part, overwrite=True)
        for found in workers(worker, WORLD, tmp_path / "parts"):
            for out, expected in zip(found, outputs(kept, layers), strict=True):
                assert error(out, expected) <= TOLERANCE


def _without_and_with(edge_index: Tensor) -> Any:
    return utils.add_self_loops(utils.remove_self_loops(edge_index)[0])


# What is refused #############################################################

# Others have no handler, and are refused as sort() is.
REFUSED: dict[str, Callable[[Data], Any]] = {
    "getitem": lambda d: d.edge_index[:, ::2],
    "__getitem__": lambda d: d.edge_index[0, 1:],
    "sort": lambda d: d.edge_index[0].sort(),
    "radd": lambda d: 1 + d.edge_index[0],
    "lt": lambda d: d.edge_index[0] < d.edge_index[1],
    "eq": lambda d: d.edge_index[0] == 3,
    "sum": lambda d: d.edge_index.sum(),
    "float": lambda d: d.edge_index.float(),
    "to": lambda d: d.edge_index.to(torch.float32),
    "numpy": lambda d: d.edge_index.numpy(),
    "array": lambda d: np.asarray(d.edge_index),
    "embedding": lambda d: torch.nn.functional.embedding(d.edge_index[0], d.x),
    "gather": lambda d: d.x.gather(0, d.edge_index[0].view(-1, 1)),
    "index_put_": lambda d: d.x.clone().index_put_((d.edge_index[0],), d.x[:1]),
    "add_": lambda d: d.edge_index.add_(1),
    "iadd": lambda d: d.edge_index.__iadd__(1),
    "setitem": lambda d: d.edge_index.__setitem__((0, 0), 1),
    "max of axis": lambda d: d.edge_index.max(dim=1),
    "scatter_": lambda d: torch.zeros(d.num_nodes).scatter_(0, d.edge_index[0], 1.0),
    "scatter prod": lambda d: utils.scatter(
        d.edge_weight, d.edge_index[0], 0, d.num_nodes, "mul"
    ),
}  # fmt: skip


def test_refused_operations_name_themselves(root: Path):
    def worker(data: Data) -> dict[str, str]:
        return {name: refusal(fn, data) for name, fn in REFUSED.items()}

    for found in on_workers(worker, root):
        for name, message in found.items():
            named = {
                "radd": "add", "array": "__array__", "max of axis": "max", "iadd": "add_",
                "scatter prod": "scatter_reduce", "embedding": "embedding|_no_grad",
                "setitem": "setitem",
            }.get(name, name.rstrip("_"))  # fmt: skip
            assert "distributed" in message and len(message) > 40
            assert any(part in message for part in named.split("|")), message


def test_the_function_of_pyg_is_named(root: Path):
    """Not just the operator inside it; nothing of PyG where the caller used the operator."""
    called: dict[str, Callable[[Data], Any]] = {
        "utils.coalesce": lambda d: utils.coalesce(d.edge_index),
        "utils.to_undirected": lambda d: utils.to_undirected(d.edge_index),
        "utils.negative_sampling": lambda d: utils.negative_sampling(d.edge_index, d.num_nodes),
        "utils.add_random_edge": lambda d: utils.add_random_edge(d.edge_index, 0.5),
        "utils.k_hop_subgraph": lambda d: utils.k_hop_subgraph(0, 1, d.edge_index),
        "utils.subgraph": lambda d: utils.subgraph(
            torch.tensor([0]), d.edge_index, relabel_nodes=True
        ),
        "utils.degree": lambda d: utils.degree(d.edge_index[0], 99),
        "utils.add_self_loops": lambda d: utils.add_self_loops(d.edge_index, num_nodes=99),
        "data.Data.coalesce": lambda d: d.coalesce(),
        "nn.InnerProductDecoder": lambda d: gnn.InnerProductDecoder()(d.x[:1], d.edge_index),
    }

    def worker(data: Data) -> dict[str, str]:
        return {name: refusal(fn, data) for name, fn in called.items()}

    for found in on_workers(worker, root):
        for name, message in found.items():
            assert message.startswith(f"'torch_geometric.{name}'"), message
            assert "before write_partitions()" in message or "must hold" in message


def test_node_tensors_must_hold_this_workers_rows(root: Path):
    message = refused(lambda d: torch.zeros(NODES, 2)[d.edge_index[0]], root)
    assert "[40, 2]" in message and "rank" in message
    refused(lambda d: torch.zeros(3)[d.edge_index[0]], root)
    refused(lambda d: utils.degree(d.edge_index[0], NODES), root)
    refused(lambda d: utils.degree(d.edge_index[0], d.num_nodes + 1), root)


# Joining #####################################################################


def test_joining_edges(root: Path):
    def worker(data: Data) -> None:
        edges = data.edge_index
        loops = torch.arange(data.num_nodes).expand(2, -1)
        joined = torch.cat([edges, loops], dim=1)
        assert isinstance(joined, DistEdgeIndex)
        assert joined.shape == (2, data.num_edges + data.num_nodes)
        assert isinstance(torch.cat([loops, edges], dim=-1), DistEdgeIndex)
        assert isinstance(torch.cat([edges, edges[:, data.edge_weight > 1]], dim=1), DistEdgeIndex)
        assert isinstance(torch.cat([edges[0], loops[0]]), DistIndex)
        empty = torch.empty(2, 0, dtype=torch.long)
        assert torch.cat([edges, empty], dim=1).size(1) == data.num_edges

    on_workers(worker, root)


@pytest.mark.parametrize("bad", [NODES - 1, 10**6, -1])
def test_joining_edges_out_of_range(bad: int, root: Path):
    """Ids beyond the worker's own rows would mean other workers' nodes to somebody else."""
    message = refused(lambda d: torch.cat([d.edge_index, torch.tensor([[0], [bad]])], dim=1), root)
    assert str(bad) in message and "rank" in message
    refused(lambda d: torch.cat([d.edge_index[0], torch.tensor([bad])]), root)


def test_joining_other_spaces(root: Path):
    def worker(data: Data) -> None:
        edges, other = data.edge_index, own_rows(root).edge_index
        for wrong in (other, edges.flip(0)):
            with pytest.raises(DistributedIndexError, match="different index spaces"):
                torch.cat([edges, wrong], dim=1)
        with pytest.raises(DistributedIndexError):
            torch.cat([edges, edges], dim=0)
        with pytest.raises(DistributedIndexError):
            torch.stack([edges[0], edges[0]])

    on_workers(worker, root)


# Once per structure ##########################################################


def test_derived_edge_lists_are_the_same_objects(root: Path):
    """PyG derives anew in each forward pass; what hangs on the result must be made once."""

    def worker(data: Data) -> None:
        edges = data.edge_index
        assert edges[0] is edges[0] and edges[1] is edges[1]
        assert (edges[0] != edges[1]) is (edges[0] != edges[1])
        mask = data.edge_weight > 0.5
        assert edges[:, mask] is edges[:, mask]
        assert edges[:, :0] is edges[:, :0] and edges[:, :].shape == edges.shape
        assert edges[:, mask] is edges[:, mask.clone()]  # found by content
        assert edges[:, mask] is edges[:, mask.nonzero().view(-1)]
        assert edges[:, mask] is not edges[:, ~mask]
        assert edges.flip(0) is edges.flip(0)
        for _ in range(2):
            first = utils.add_self_loops(edges, num_nodes=data.num_nodes)[0]
            again = utils.add_self_loops(edges, num_nodes=data.num_nodes)[0]
            assert first is again
            first = utils.remove_self_loops(edges)[0]
            assert first is utils.remove_self_loops(edges)[0]
        first = gcn_norm(edges, data.edge_weight, data.num_nodes)[0]
        assert first is gcn_norm(edges, data.edge_weight, data.num_nodes)[0]

    on_workers(worker, root)


def test_masks_written_in_place_are_noticed(root: Path):
    def worker(data: Data) -> None:
        edges = data.edge_index
        mask = torch.ones(data.num_edges, dtype=torch.bool)
        assert edges[:, mask].size(1) == data.num_edges
        mask[:2] = False
        assert edges[:, mask].size(1) == data.num_edges - 2
        for wrong in (torch.ones(data.num_edges + 1, dtype=torch.bool), mask[:-1]):
            with pytest.raises(IndexError, match="shape of the mask"):
                edges[:, wrong]
        chosen = edges[:, mask]
        mask.fill_(False)  # Which edges were chosen was written down.
        ids = [edge_numbers(one, places=False).numbers for one in (chosen, edges)]
        assert torch.equal(ids[0], ids[1][2:])
        compared = edges[0] != edges[1]
        loops = int((~compared).sum())
        compared.fill_(True)
        assert int((edges[0] == edges[1]).sum()) == loops
        assert int((~(edges[0] != edges[1])).sum()) == loops
        equal = edges[0] == edges[1]
        equal &= False
        assert int((edges[0] == edges[1]).sum()) == loops
        target = edges[1]
        with_mask = edges[:, compared]
        assert with_mask.size(1) == data.num_edges and target is edges[1]

    on_workers(worker, root)


def test_joined_edges_with_other_content_are_other_edges(root: Path):
    """Same shapes, other ids: the memory must not mix them up."""

    def worker(data: Data) -> None:
        edges = data.edge_index
        for k in range(min(3, data.num_nodes)):
            extra = torch.full((2, 1), k)
            joined = torch.cat([edges, extra], dim=1)
            assert int(joined[1][-1]) == k

    on_workers(worker, root)


def test_memory_is_bounded(root: Path):
    """Edges drawn anew every epoch are not kept for ever."""

    def worker(data: Data) -> int:
        for seed in range(60):
            draw = torch.Generator().manual_seed(seed)
            chosen = data.edge_index[:, torch.rand(data.num_edges, generator=draw) < 0.5]
            assert isinstance(chosen, DistEdgeIndex)
        return len(data.edge_index.memory)

    assert max(on_workers(worker, root)) <= 16


# As a tensor #################################################################


def test_it_is_a_tensor(root: Path):
    def worker(data: Data) -> None:
        edges = data.edge_index
        assert isinstance(edges, Tensor) and isinstance(edges, DistEdgeIndex)
        assert isinstance(edges[0], DistIndex) and type(edges[1]) is Tensor
        assert edges.shape == (2, data.e_id.numel()) == edges.size()
        assert edges.dtype == torch.long and edges.device.type == "cpu" and edges.dim() == 2
        assert len(edges) == 2 and edges.numel() == 2 * data.num_edges
        assert edges.is_contiguous() and not edges.requires_grad and not edges.is_sparse
        assert torch.is_tensor(edges) and not edges.is_floating_point()
        assert edges.to("cpu") is edges and edges.long() is edges and edges.contiguous() is edges
        assert edges.cpu() is edges
        assert isinstance(edges.clone(), DistEdgeIndex) and edges.clone() is not edges
        assert isinstance(edges.detach(), DistEdgeIndex)
        ones = torch.ones_like(edges[0])
        assert type(ones) is Tensor and ones.numel() == data.num_edges
        assert type(edges.new_zeros(3)) is Tensor

    on_workers(worker, root)


def test_max_is_the_last_own_node(root: Path):
    """PyG takes ``edge_index.max() + 1`` for the number of nodes: the worker's own."""

    def worker(data: Data) -> None:
        assert int(data.edge_index.max()) + 1 == data.num_nodes
        assert int(data.edge_index[0].max()) + 1 == data.num_nodes
        assert utils.num_nodes.maybe_num_nodes(data.edge_index) == data.num_nodes
        assert int(data.edge_index.min()) >= 0

    on_workers(worker, root)


def test_pickling_is_refused(root: Path):
    def worker(data: Data) -> None:
        for thing in (data.edge_index, data.edge_index[0]):
            with pytest.raises(DistributedIndexError, match="load_partition"):
                pickle.dumps(thing)
            with pytest.raises(DistributedIndexError, match="load_partition"):
                torch.save(thing, io.BytesIO())

    on_workers(worker, root)


def test_deepcopy_and_clone_of_data(graph: Data, root: Path):
    layer = gnn.GATConv(6, 5).double()

    def worker() -> list[Tensor]:
        data, mine = pyg_sar.load_partition(root), pyg_sar.distribute(layer)
        copies = [copy.deepcopy(data), data.clone(), copy.copy(data), data.to("cpu"), data.cpu()]
        assert all(one.validate() and one.num_nodes == NODES for one in copies)
        return [mine(one.x, one.edge_index).detach().full_tensor() for one in copies]

    for found in workers(worker, WORLD):
        assert all(error(out, layer(graph.x, graph.edge_index)) <= TOLERANCE for out in found)


def test_it_refuses_other_shapes():
    from pyg_sar.exchange.halo import HaloPlan
    from pyg_sar.space.index_space import dist_edge_index

    plan = HaloPlan(pyg_sar.comm.current(), 4, [0], torch.empty(0, dtype=torch.long), [0])
    for shape in ((3, 2), (2,), (2, 3, 1)):
        with pytest.raises(ValueError, match=r"Expected 'edge_index' of shape \[2, num_edges\]"):
            dist_edge_index(torch.zeros(shape, dtype=torch.long), plan)
