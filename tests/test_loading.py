"""``load_partition``: this worker's rows, global ids, and one error on all workers alike."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_graph, threads
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv

import pyg_sar
from pyg_sar.errors import PartitionError
from pyg_sar.partition.metadata import METADATA
from pyg_sar.partition.storage import part_file, read_part
from pyg_sar.space import DistEdgeIndex
from pyg_sar.space.index_space import plain
from pyg_sar.wording import counted

WORLD = 3


@pytest.fixture(scope="module")
def graph() -> Data:
    data = make_graph()
    data.names = [f"node {k}" for k in range(40)]
    data.sparse = torch.eye(40, 7).to_sparse_csr()
    data.scale, data.title = torch.tensor(2.5), "a graph"
    data.edge_kind = torch.arange(data.num_edges, dtype=torch.int16)
    return data


@pytest.fixture(scope="module")
def written(graph: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loading") / "parts"
    pyg_sar.write_partitions(graph, WORLD, root, "random")
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "parts"))


def test_rows_and_ids(graph: Data, root: Path):
    """Every node and edge is held once; every attribute follows ``n_id`` or ``e_id``."""

    def worker() -> tuple[Tensor, Tensor]:
        data = pyg_sar.load_partition(root, view="local")
        assert isinstance(data, Data)
        assert data.num_nodes == data.n_id.numel() and data.num_edges == data.e_id.numel()
        for name in ("x", "y", "train_mask"):
            assert torch.equal(data[name], graph[name][data.n_id])
            assert data[name].dtype == graph[name].dtype
        for name in ("edge_weight", "edge_attr", "edge_kind"):
            assert torch.equal(data[name], graph[name][data.e_id])
            assert data[name].dtype == graph[name].dtype
        assert data.names == [f"node {k}" for k in data.n_id.tolist()]
        assert torch.equal(data.sparse.to_dense(), graph.sparse.to_dense()[data.n_id])
        assert torch.equal(data.scale, graph.scale) and data.title == graph.title
        assert data.n_id.dtype == data.e_id.dtype == torch.long
        assert bool((data.n_id.diff() > 0).all())
        return data.n_id, data.e_id

    workers = threads(worker, WORLD)
    assert torch.equal(torch.cat([n for n, _ in workers]).sort()[0], torch.arange(40))
    edges = torch.cat([e for _, e in workers]).sort()[0]
    assert torch.equal(edges, torch.arange(graph.num_edges))


def test_edges_are_those_of_the_graph(graph: Data, root: Path):
    """Targets are own rows; sources own rows or halo rows, whose global ids the part knows."""

    def worker() -> None:
        comm = pyg_sar.comm.current()
        data = pyg_sar.load_partition(root, view="local")
        assert isinstance(data.edge_index, DistEdgeIndex)
        source, target = plain(data.edge_index)
        halo = read_part(root, comm.rank)["halo_n_id"]
        names = torch.cat([data.n_id, halo])
        assert torch.equal(data.n_id[target], graph.edge_index[1][data.e_id])
        assert torch.equal(names[source], graph.edge_index[0][data.e_id])
        assert torch.equal(data.n_id.double()[data.edge_index[0]], names[source].double())
        plan = data.edge_index.plan
        assert plan.num_halo == halo.numel() and plan.num_local == data.num_nodes
        assert plan.halo_counts[comm.rank] == 0

    threads(worker, WORLD)


def test_loading_needs_no_other_part(root: Path, graph: Data):
    """A worker's own file is enough: the others may lie on other hosts."""

    def worker() -> int:
        comm = pyg_sar.comm.current()
        mine = root.parent / f"host{comm.rank}"
        mine.mkdir()
        for name in (METADATA, part_file(comm.rank, WORLD)):
            shutil.copy(root / name, mine / name)
        return pyg_sar.load_partition(mine, view="local").num_nodes

    assert sum(threads(worker, WORLD)) == graph.num_nodes


def test_loading_twice_and_as_a_string(root: Path):
    def worker() -> None:
        first, again = (
            pyg_sar.load_partition(root, view="local"),
            pyg_sar.load_partition(str(root), view="local"),
        )
        assert torch.equal(first.x, again.x)
        assert torch.equal(plain(first.edge_index), plain(again.edge_index))
        assert pyg_sar.load_partition(root, device="cpu", view="local").x.device.type == "cpu"
        assert torch.equal(pyg_sar.load_partition(root, verify=False, view="local").x, first.x)

    threads(worker, WORLD)


def test_alone(graph: Data, tmp_path: Path):
    """World size 1 goes through the same call, without a communicator."""
    pyg_sar.write_partitions(graph, 1, tmp_path / "one")
    data = pyg_sar.load_partition(tmp_path / "one", view="local")
    assert torch.equal(data.n_id, torch.arange(40))
    layer = pyg_sar.distribute(GATConv(6, 3).double(), view="local")
    expected = layer(graph.x, graph.edge_index)
    assert torch.allclose(layer(data.x, data.edge_index), expected, rtol=1e-10, atol=1e-12)


def test_loaded_tensors_may_be_written(root: Path):
    """Files are memory mapped: writing to a loaded tensor must not reach the file, nor crash."""
    before = (root / part_file(0, WORLD)).read_bytes()

    def worker() -> Tensor:
        data = pyg_sar.load_partition(root, view="local")
        data.x.mul_(2).add_(1)
        data.train_mask[:] = True
        return pyg_sar.load_partition(root, view="local").x

    threads(worker, WORLD)
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
    "newer version": (newer, "version 99, newer than 6"),
    "other format": (other_format, "does not describe"),
}


def same_error(root: Path | Callable[[int], Path], world: int = WORLD) -> str:
    """Every worker must raise the same PartitionError; none waits, and all can go on."""

    def worker() -> str:
        comm = pyg_sar.comm.current()
        place = root(comm.rank) if callable(root) else root
        with pytest.raises(PartitionError) as caught:
            pyg_sar.load_partition(place, view="local")
        # The communicator isn't broken: a script may try another folder.
        assert comm.all_gather_object(comm.rank) == list(range(world))
        return str(caught.value)

    messages = set(threads(worker, world))
    assert len(messages) == 1, messages
    return messages.pop()


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_error_on_every_worker(name: str, root: Path):
    damage, text = DAMAGE[name]
    damage(root)
    message = same_error(root)
    assert re.search(text, message), message
    if "part" in name and name != "other format":
        assert "rank 1" in message or "part 1" in message or "part-00001" in message


def test_several_damaged_parts_are_all_named(root: Path):
    (root / part_file(0, WORLD)).unlink()
    truncate(root)
    message = same_error(root)
    assert "rank 0" in message and "part-00000" in message
    assert "rank 1" in message and "part-00001" in message


@pytest.mark.parametrize("world", [1, 2, 4])
def test_wrong_world_size(world: int, root: Path):
    message = same_error(root, world)
    assert "has 3 parts" in message and counted(world, "workers") in message
    assert "start 3 workers" in message and f"into {counted(world, 'parts')}" in message


def test_one_worker_sees_another_folder(graph: Data, root: Path, tmp_path: Path):
    """Parts of two different partitions would fit by their counts only by accident."""
    other = tmp_path / "other"
    pyg_sar.write_partitions(graph, WORLD, other, "random", seed=7)
    message = same_error(lambda rank: other if rank == 2 else root)
    assert "another partition" in message and "rank 2" in message


def test_one_worker_sees_no_folder(root: Path):
    message = same_error(lambda rank: root / "nowhere" if rank == 1 else root)
    assert "rank 1" in message and "nowhere" in message


def test_a_second_attempt_after_damage(root: Path, written: Path):
    remove_part(root)

    def worker() -> int:
        with pytest.raises(PartitionError):
            pyg_sar.load_partition(root, view="local")
        return pyg_sar.load_partition(written, view="local").num_nodes

    assert sum(threads(worker, WORLD)) == 40


def test_verification_can_be_skipped(root: Path):
    """Without the checksum an altered value goes unnoticed: that is what it is for."""
    alter(root)

    def worker() -> Any:
        with pytest.raises(PartitionError):
            pyg_sar.load_partition(root, view="local")
        return pyg_sar.load_partition(root, verify=False, view="local").num_nodes

    assert sum(threads(worker, WORLD)) == 40
