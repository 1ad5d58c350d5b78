"""``load_partition``: tensors of the whole graph, and one error on all workers alike."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import make_graph, workers
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv

import pyg_sar
from pyg_sar.errors import PartitionError
from pyg_sar.partition.metadata import METADATA
from pyg_sar.partition.storage import part_file, read_part
from pyg_sar.space import DistEdgeIndex
from pyg_sar.space.index_space import plain
from pyg_sar.tensors import NodeTensor
from pyg_sar.wording import counted

WORLD = 3


def make() -> Data:
    data = make_graph()
    data.scale, data.title = torch.tensor(2.5), "a graph"
    data.edge_kind = torch.arange(data.num_edges, dtype=torch.int16)
    return data


@pytest.fixture(scope="module")
def graph() -> Data:
    return make()


@pytest.fixture(scope="module")
def written(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loading") / "parts"
    pyg_sar.write_partitions(graph, WORLD, root, "random")
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "parts"))


NODE, EDGE = ("x", "y", "train_mask"), ("edge_weight", "edge_attr", "edge_kind", "edge_type")


def loaded(root: Path) -> tuple[Tensor, Tensor]:
    """Looks at what a worker gets; returns which nodes and edges are its own."""
    comm, graph, data = pyg_sar.comm.current(), make(), pyg_sar.load_partition(root)
    assert type(data) is Data and (data.num_nodes, data.num_edges) == (40, graph.num_edges)
    assert torch.equal(data.scale, graph.scale) and data.title == graph.title
    nodes, edges = data.x.rows.ids, data.edge_attr.rows.ids
    for name in (*NODE, *EDGE, "edge_index"):
        value, dim = data[name], int(name == "edge_index")
        assert isinstance(value, NodeTensor) and value.dtype == graph[name].dtype
        assert value.shape == graph[name].shape
        assert torch.equal(value.full_tensor(), graph[name])
        if not dim:
            here = graph[name][nodes if name in NODE else edges]
            assert type(value.to_local()) is Tensor and torch.equal(value.to_local(), here)
    assert bool((nodes.diff() > 0).all())
    # Targets are own rows; sources own rows or halo rows, whose global ids the part knows.
    index = data.edge_index.to_local()
    assert isinstance(index, DistEdgeIndex)
    source, target = plain(index)
    halo = read_part(root, comm.rank)["halo_n_id"]
    names = torch.cat([nodes, halo])
    assert torch.equal(nodes[target], graph.edge_index[1][edges])
    assert torch.equal(names[source], graph.edge_index[0][edges])
    assert torch.equal(nodes.double()[index[0]], names[source].double())
    plan = index.plan
    assert plan.num_halo == halo.numel() and plan.num_local == len(nodes)
    assert plan.halo_counts[comm.rank] == 0
    # Once more, by a string; without the checksum; on a device.
    for again in (
        pyg_sar.load_partition(str(root)),
        pyg_sar.load_partition(root, verify=False),
        pyg_sar.load_partition(root, device="cpu"),
    ):
        assert torch.equal(again.x.to_local(), data.x.to_local())
        assert torch.equal(plain(again.edge_index.to_local()), plain(index))
    assert again.x.device.type == "cpu"
    return nodes, edges


def test_rows_of_the_whole_graph(graph: Data, written: Path):
    """Every node and edge is held once."""
    found = workers(loaded, WORLD, written)
    for place, count in ((0, 40), (1, graph.num_edges)):
        held = torch.cat([ids[place] for ids in found])
        assert torch.equal(held.sort()[0], torch.arange(count))


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("names", [f"node {k}" for k in range(40)], "node"),
        ("numbers", np.arange(40) / 2, "node"),
        ("edge_kinds", ("a",) * make().num_edges, "edge"),
        ("train_kind", [str(k) for k in range(5)], "row"),
    ],
)
def test_rows_that_are_no_tensor_are_refused(name: str, value: Any, level: str, tmp_path: Path):
    """No worker could load them: they are refused where the graph is cut."""
    data = make()
    data[name], data.train_idx = value, torch.arange(5)
    with pytest.raises(ValueError, match=f"The {level}-level attribute '{name}' .* of a tensor"):
        pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")
    if level == "row":
        return
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random", levels={name: "graph"})
    for found in workers(lambda: pyg_sar.load_partition(tmp_path / "parts")[name], 2):
        assert type(found) is type(value) and list(found) == list(value)


@pytest.mark.parametrize("said", [True, False])
def test_the_number_of_nodes_is_kept_where_it_was_said(said: bool, tmp_path: Path):
    data = Data(x=torch.ones(9, 2), edge_index=torch.tensor([[0, 5], [4, 6]]))
    if said:
        data.num_nodes = 9
    pyg_sar.write_partitions(data, 2, tmp_path / "parts", "random")

    def worker() -> bool:
        return "num_nodes" in pyg_sar.load_partition(tmp_path / "parts")

    assert workers(worker, 2) == [said, said]
    assert pyg_sar.partition.merge_partitions(tmp_path / "parts").num_nodes == 9


def test_loading_needs_no_other_part(root: Path):
    """A worker's own file is enough: the others may lie on other hosts."""

    def worker() -> int:
        comm = pyg_sar.comm.current()
        mine = root.parent / f"host{comm.rank}"
        mine.mkdir()
        for name in (METADATA, part_file(comm.rank, WORLD)):
            shutil.copy(root / name, mine / name)
        return len(pyg_sar.load_partition(mine).x.to_local())

    assert sum(workers(worker, WORLD)) == 40


def test_alone(graph: Data, tmp_path: Path):
    """World size 1 goes through the same call, without a communicator."""
    pyg_sar.write_partitions(graph, 1, tmp_path / "one")
    data = pyg_sar.load_partition(tmp_path / "one")
    layer = pyg_sar.distribute(GATConv(6, 3).double())
    expected = layer(graph.x, graph.edge_index)
    found = layer(data.x, data.edge_index).full_tensor()
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_loaded_tensors_may_be_written(root: Path):
    """Files are memory mapped: writing to a loaded tensor must not reach the file, nor crash."""
    before = (root / part_file(0, WORLD)).read_bytes()

    def worker() -> None:
        data = pyg_sar.load_partition(root)
        data.x.mul_(2).add_(1)
        data.train_mask[:] = True
        assert torch.equal(pyg_sar.load_partition(root).x.full_tensor() * 2 + 1, data.x)

    workers(worker, WORLD)
    assert (root / part_file(0, WORLD)).read_bytes() == before


# Damage ######################################################################


def truncate(root: Path) -> None:
    path = root / part_file(1, WORLD)
    path.write_bytes(path.read_bytes()[:-10])


def alter(root: Path) -> None:
    path = root / part_file(1, WORLD)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def remove_part(root: Path) -> None:
    (root / part_file(1, WORLD)).unlink()


def folder_for_part(root: Path) -> None:
    remove_part(root)
    (root / part_file(1, WORLD)).mkdir()


def remove_metadata(root: Path) -> None:
    (root / METADATA).unlink()


def remove_all(root: Path) -> None:
    shutil.rmtree(root)


def cut_metadata(root: Path) -> None:
    path = root / METADATA
    path.write_text(path.read_text()[:50])


def alter_metadata(root: Path) -> None:
    path = root / METADATA
    path.write_text(path.read_text().replace('"num_nodes": 40', '"num_nodes": 41'))


def no_text(root: Path) -> None:
    (root / METADATA).write_bytes(b"\xff\xfe")


def newer(root: Path) -> None:
    content = json.loads((root / METADATA).read_text())
    content["version"] = 99
    (root / METADATA).write_text(json.dumps(content))


def other_format(root: Path) -> None:
    (root / METADATA).write_text('{"format": "something else"}')


# name: (damage, what the error names)
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated part": (truncate, r"part-00001-of-00003\.safetensors' has [\d,]+ bytes"),
    "altered part": (alter, r"part-00001-of-00003\.safetensors' was altered"),
    "missing part": (remove_part, "part 1 of '.*', is missing"),
    "folder instead of part": (folder_for_part, "part-00001-of-00003"),
    "missing metadata": (remove_metadata, r"metadata\.json"),
    "missing folder": (remove_all, "holds no partition"),
    "truncated metadata": (cut_metadata, "truncated or was altered"),
    "altered metadata": (alter_metadata, "truncated or was altered"),
    "metadata of no text": (no_text, "can't be read"),
    "newer version": (newer, "version 99, newer than 6"),
    "other format": (other_format, "does not describe"),
}


def errors(roots: list[Callable[[int], Path]]) -> list[str]:
    """Of each folder a worker's PartitionError; none waits, and all can go on."""
    comm, found = pyg_sar.comm.current(), []
    for root in roots:
        with pytest.raises(PartitionError) as caught:
            pyg_sar.load_partition(root(comm.rank))
        # The communicator isn't broken: a script may try another folder.
        assert comm.all_gather_object(comm.rank) == list(range(comm.world_size))
        found.append(str(caught.value))
    return found


def same_errors(roots: list[Callable[[int], Path]], world: int = WORLD) -> list[str]:
    """Every worker must raise the same errors."""
    first, *others = workers(errors, world, roots)
    assert all(other == first for other in others), (first, *others)
    return first


def test_damage_is_one_error_on_every_worker(written: Path, tmp_path: Path):
    roots = []
    for name, (damage, _) in DAMAGE.items():
        roots.append(Path(shutil.copytree(written, tmp_path / name / "parts")))
        damage(roots[-1])
    found = same_errors([lambda rank, root=root: root for root in roots])  # type: ignore[misc]
    for (name, (_, text)), message in zip(DAMAGE.items(), found, strict=True):
        assert re.search(text, message), (name, message)
        if "part" in name and name != "other format":
            assert "rank 1" in message or "part 1" in message or "part-00001" in message


def test_one_worker_sees_another_folder(graph: Data, root: Path, tmp_path: Path):
    """Another partition, whose parts fit by their counts only by accident; none; two damaged."""
    other, both = tmp_path / "other", Path(shutil.copytree(root, tmp_path / "both"))
    pyg_sar.write_partitions(graph, WORLD, other, "random", seed=7)
    (both / part_file(0, WORLD)).unlink()
    truncate(both)
    another, none, two = same_errors(
        [
            lambda rank: other if rank == 2 else root,
            lambda rank: root / "nowhere" if rank == 1 else root,
            lambda rank: both,
        ]
    )
    assert "another partition" in another and "rank 2" in another
    assert "rank 1" in none and "nowhere" in none
    assert "rank 0" in two and "part-00000" in two and "rank 1" in two and "part-00001" in two


@pytest.mark.parametrize("world", [1, 2, 4])
def test_wrong_world_size(world: int, root: Path):
    (message,) = same_errors([lambda rank: root], world)
    assert "has 3 parts" in message and counted(world, "workers") in message
    assert "start 3 workers" in message and f"into {counted(world, 'parts')}" in message
