"""Partitions written within a memory limit, from mapped folders too, are those without a limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ended
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.__main__ import main
from pyg_sar.kernels import ops
from pyg_sar.partition import coarsening, merge_partitions
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.layout import NodeOrder, group_edges, partition_statistics
from pyg_sar.partition.scratch import Scratch
from pyg_sar.tools import load_graph

NODES, EDGES = 3000, 60_000  # several pieces at the smallest limit


def graph() -> Data:
    """Every kind of attribute: dense of all levels, sparse, node ids."""
    torch.manual_seed(0)
    data = Data(x=torch.randn(NODES, 5), edge_index=torch.randint(0, NODES, (2, EDGES)))
    data.edge_attr, data.edge_weight = torch.randn(EDGES, 2), torch.rand(EDGES).bfloat16()
    data.y, data.train_mask = torch.randint(0, 4, (NODES,)), torch.rand(NODES) < 0.5
    data.bag = torch.eye(NODES).to_sparse_csr()
    data.train_idx, data.names = torch.randperm(NODES)[:100], ["a", "b"]
    data.empty = torch.empty(NODES, 0)
    return data


def hetero() -> HeteroData:
    torch.manual_seed(1)
    data, half = HeteroData(), NODES // 2
    data["a"].x, data["b"].x = torch.randn(NODES, 3), torch.randn(half, 4)
    ends = torch.randint(0, NODES, (EDGES,)), torch.randint(0, half, (EDGES,))
    data["a", "to", "b"].edge_index = torch.stack(ends)
    data["a", "to", "b"].edge_attr = torch.randn(EDGES, 2)
    data["b", "of", "a"].edge_index = torch.stack(ends[::-1])
    data["a", "is", "a"].edge_index = torch.randint(0, NODES, (2, EDGES // 2))
    return data


def content(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


@pytest.mark.parametrize(("method", "memory"), [("random", "12MiB"), ("coarsened", "32MiB")])
@pytest.mark.parametrize("make", [graph, hetero])
def test_the_same_bytes_as_without_a_limit(
    make: Any, method: str, memory: str, tmp_path: Path
) -> None:
    """Of the coarsened graph all edges fit within the larger limit."""
    data, free, bounded = make(), tmp_path / "free", tmp_path / "bounded"
    expected = pyg_sar.write_partitions(data, 5, free, method)
    assert pyg_sar.write_partitions(data, 5, bounded, method, memory=memory) == expected
    assert content(bounded) == content(free)
    assert sorted(tmp_path.iterdir()) == [bounded, free]  # No scratch is left.


def test_what_does_not_fit_names_a_number_of_parts_that_does(tmp_path: Path) -> None:
    data, said = graph(), []
    with pytest.raises(ValueError, match=r"Expected 'memory' to hold 64 bytes .* parts") as caught:
        pyg_sar.write_partitions(
            data, 2, tmp_path / "parts", "random", memory="2MiB", progress=said.append
        )
    assert said and not [line for line in said if line.startswith("assigning")]  # Not even parts.
    assert not list(tmp_path.iterdir())
    words = str(caught.value).split()
    parts = int(words[words.index("about") + 1])
    pyg_sar.write_partitions(data, parts, tmp_path / "parts", "random", memory="2MiB")
    with pytest.raises(
        ValueError, match=r"method='metis' takes about .* 'balanced' or 'coarsened'"
    ):
        pyg_sar.write_partitions(data, 20, tmp_path / "other", "metis", memory="2MiB")
    with pytest.raises(ValueError, match=r"memory='much' must be a number of bytes"):
        pyg_sar.write_partitions(data, 2, tmp_path / "other", memory="much")


def test_an_assignment_of_types_is_taken_up(tmp_path: Path) -> None:
    """Ctrl-C leaves it, and the same call goes on from there."""
    data, said = hetero(), []

    def partition(root: Path, last: str = "") -> None:
        said.clear()

        def report(line: str) -> None:
            said.append(line)
            if last and line.startswith(last):
                raise KeyboardInterrupt

        pyg_sar.write_partitions(data, 3, root, "random", memory="64MiB", progress=report)

    partition(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt, match="goes on from there"):
        partition(tmp_path / "parts", "writing part 2")
    partition(tmp_path / "parts")
    assert "taking the assignment of a run that did not end" in said
    assert next(line for line in said if line.startswith("writing")) == "writing part 2 of 3"
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_a_killed_run_is_taken_up(tmp_path: Path) -> None:
    data, said = graph(), []
    root, whole = tmp_path / "parts", tmp_path / "whole"
    pyg_sar.write_partitions(data, 5, whole, "random")

    def die(line: str) -> None:
        if line.startswith("writing part 4"):
            os.kill(os.getpid(), signal.SIGKILL)

    how: dict[str, Any] = {"memory": "12MiB", "overwrite": True}
    killed = partial(pyg_sar.write_partitions, progress=die, **how)
    assert ended(killed, data, 5, root, "random") == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path != whole)
    assert left.name == ".parts.unfinished" and len(list((left / "parts").iterdir())) == 3
    before = left.with_name("left")
    shutil.copytree(left, before)

    def partition(data: Any, seed: int = 0) -> list[str]:
        said.clear()
        pyg_sar.write_partitions(data, 5, root, "random", seed, progress=said.append, **how)
        assert not left.exists()
        return [line for line in said if line.startswith(("taking", "writing"))]

    assert partition(data)[1:] == ["writing part 4 of 5", "writing part 5 of 5"]
    assert "to know if it is the one of the unfinished run" in said[0]
    partition(data)
    assert "can be taken up" in said[0]  # Nothing is unfinished this time.
    assert content(root) == content(whole)
    shutil.copytree(before, left)
    next((left / "parts").iterdir()).unlink()
    assert len(partition(data)) == 1 + 3  # A part that is gone is written again.
    assert content(root) == content(whole)
    # Another graph, and other arguments, begin anew.
    shutil.copytree(before, left)
    assert len(partition(data, seed=1)) == 5
    shutil.copytree(before, left)
    data.edge_weight[7] += 1
    assert len(partition(data)) == 5


PEAK = """
import sys, threading, time
import pyg_sar
from pyg_sar.tools import load_graph

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

data = load_graph(sys.argv[1])
pyg_sar.write_partitions(data, 16, sys.argv[2] + "-warm", "random", memory=2**25)
before = most = anonymous()
done = False

def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.005)

thread = threading.Thread(target=watch)
thread.start()
pyg_sar.write_partitions(data, 16, sys.argv[2], memory=2**25)
done = True
thread.join()
print(most - before)
"""


def arrays(folder: Path, nodes: int, edges: int) -> None:
    """A folder with the arrays of a graph, whose edges stay near."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    source = draw.integers(0, nodes, edges)
    target = (source + draw.integers(-300, 300, edges)) % nodes
    np.save(folder / "edge_index.npy", np.stack([source, target]).astype(np.int32))
    np.save(folder / "x.npy", draw.standard_normal((nodes, 200), dtype=np.float32))
    np.save(folder / "edge_attr.npy", draw.standard_normal((edges, 8), dtype=np.float32))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_holds_for_a_folder_several_times_as_large(tmp_path: Path) -> None:
    """A graph of 100 MB in 32 MiB: memory that can't be given back stays below that."""
    arrays(tmp_path / "graph", 100_000, 600_000)
    size = sum(file.stat().st_size for file in (tmp_path / "graph").iterdir())
    assert size > 3 * 2**25
    given = [sys.executable, "-c", PEAK, str(tmp_path / "graph"), str(tmp_path / "parts")]
    done = subprocess.run(given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 2**25, f"{int(done.stdout):,} bytes"


def test_coarsened_is_balanced_and_keeps_neighbours_together() -> None:
    """On planted groups: nodes and edges within 1.1 of the mean, far fewer halo rows than drawn."""
    torch.manual_seed(0)
    count, parts = 4000, 4
    group = torch.randint(0, 40, (count,))
    order = group.argsort()
    ends = torch.randint(0, count, (2, 30_000))
    near = order[(order.argsort()[ends[0]] + torch.randint(-50, 50, (30_000,))) % count]
    edge_index = torch.stack([ends[0], torch.where(torch.rand(30_000) < 0.9, near, ends[1])])

    def measured(method: str) -> Any:
        part = assign_nodes(edge_index, count, parts, method)
        return partition_statistics(group_edges(edge_index, NodeOrder.of(part, parts)))

    found, drawn = measured("coarsened"), measured("random")
    assert found.balance["nodes"] <= 1.1 and found.balance["edges"] <= 1.1
    assert sum(found.halo) < 0.6 * sum(drawn.halo)


def planted(count: int, groups: int, edges: int, share: float) -> Tensor:
    """Edges of which a share lies within groups of nodes whose ids are scattered."""
    torch.manual_seed(0)
    ids = torch.randperm(count)
    source, target = torch.randint(0, count, (2, edges))
    within = source // (count // groups) * (count // groups) + target % (count // groups)
    target = torch.where(torch.rand(edges) < share, within, target)
    return torch.stack([ids[source], ids[target]])


@pytest.mark.parametrize("limit", [2**30, 2**21])
def test_coarsened_cuts_hardly_more_than_metis(limit: int, tmp_path: Path) -> None:
    """Also where METIS gets a sample of the edges, and clusters are joined."""
    count, parts, lines = 12_000, 4, []
    edge_index = planted(count, 60, 80_000, 0.8)
    scratch = Scratch(tmp_path, limit, lines.append)
    part = assign_nodes(edge_index, count, parts, "coarsened", report=lines.append, scratch=scratch)
    source, target = edge_index
    whole = assign_nodes(edge_index, count, parts, "metis")
    cut, metis_cut = (int((p[source] != p[target]).sum()) for p in (part, whole))
    assert cut <= 1.1 * metis_cut
    for values in (part, part[target]):
        assert int(torch.bincount(values, minlength=parts).max()) <= 1.1 * len(values) / parts
    (told,) = (line for line in lines if "METIS cuts" in line)
    clusters, pairs = (int(word.replace(",", "")) for word in told.split() if word[0].isdigit())
    assert clusters < count / 2
    assert (clusters <= limit // 400 and pairs <= limit // 150) if limit < 2**22 else pairs > 20_000


def test_clusters_keep_to_their_size(tmp_path: Path) -> None:
    """Of two cliques that are as large as a part no cluster takes a whole one."""
    size, parts = 400, 2
    clique = torch.combinations(torch.arange(size)).t()
    edge_index = torch.cat([clique, clique + size], 1)
    scratch = Scratch(tmp_path, 2**30, lambda line: None)
    blocks = coarsening.Blocks([(edge_index, 0, 0)], 2 * size, scratch)
    clusters = coarsening.Clusters(blocks, parts)
    for _ in range(3):
        clusters.stream("clustering")
    label, count = clusters.numbered(10**6)
    assert parts * coarsening.CLUSTERS <= count < 0.75 * 2 * size
    most = torch.tensor([2 * size, edge_index.size(1)]) // (parts * coarsening.CLUSTERS)
    assert bool((blocks.loads(label, count) <= most).all())
    joined, fewer = clusters.numbered(7)
    assert fewer == 7 and joined.unique().tolist() == list(range(7))
    assert all(joined[label == k].unique().numel() == 1 for k in range(count))


def test_leaves_of_a_hub_and_nodes_without_neighbours_go_together(tmp_path: Path) -> None:
    """A cluster may have 5 of the edges: one in-edge for each leaf."""
    leaves, alone = torch.arange(1, 1001), 500
    edge_index = torch.stack([torch.zeros_like(leaves), leaves])
    size = 1 + len(leaves) + alone
    scratch = Scratch(tmp_path, 2**20, lambda line: None)
    clusters = coarsening.Clusters(coarsening.Blocks([(edge_index, 0, 0)], size, scratch), 2)
    clusters.stream("clustering")
    label, count = clusters.numbered(size)
    most = size // (2 * coarsening.CLUSTERS)
    assert count <= 1 + len(leaves) / 5 + -(-alone // most) + 1
    assert int(label.bincount().max()) <= most


def loads_of(group: Tensor, weights: Tensor, count: int) -> Tensor:
    return torch.zeros(count, weights.size(1)).long().index_add_(0, group, weights)


@pytest.mark.skipif(not ops.built, reason="the C++ kernels were not built")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kinds", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_kernels_decide_as_plain_loops_do(dtype: torch.dtype, kinds: int, seed: int) -> None:
    """Also where no part has room, and where runs start behind the first node."""
    torch.manual_seed(seed)
    count, groups, parts = 300, 40, 5
    degree = torch.randint(0, 9, (count,)) * torch.randint(0, 9, (count,))
    offsets = torch.cat([torch.zeros(1).long(), degree.cumsum(0)])
    adjacent = (torch.rand(int(degree.sum())).square() * count).to(dtype)
    weights = torch.stack([torch.ones_like(degree), degree, (torch.rand(count) < 0.3).long()], 1)
    weights = weights[:, :kinds].contiguous()
    changed = 0
    for size, share in ((count, 4), (groups, 1.3), (parts, 1.1), (parts, 0.9)):
        start = torch.randint(0, size, (count,), dtype=dtype)
        if size == count:
            start = torch.arange(count, dtype=dtype)
        most = (share * weights.sum(0) / size).long() + 1
        price = 3e4 * torch.rand(kinds, dtype=torch.double)
        found = []
        for native in (True, False):
            group, loads = start.clone(), loads_of(start, weights, size)
            for first, last in ((0, 170), (170, 300)):
                low, high = offsets[[first, last]].tolist()
                run = first, offsets[first : last + 1] - low, adjacent[low:high]
                given = group, loads, weights[first:last], most
                if size >= groups:
                    coarsening.join_clusters_(*given, *run, native=native)
                else:
                    coarsening.join_parts_(*given, price, *run, native=native)
            assert torch.equal(loads, loads_of(group, weights, size))
            found.append(group)
        assert torch.equal(*found)
        changed += int((found[0] != start).sum())
    assert changed > count


@pytest.mark.skipif(not ops.built, reason="the C++ kernels were not built")
def test_kernels_refuse_what_would_be_read_outside() -> None:
    def given(**other: Any) -> list[Any]:
        usual = {
            "part": torch.zeros(3, dtype=torch.int32),
            "loads": torch.tensor([[3, 2], [0, 0]]),
            "weights": torch.tensor([[1, 1], [1, 1], [1, 0]]),
            "most": torch.tensor([9, 9]),
            "price": torch.ones(2, dtype=torch.double),
            "first": 0,
            "offsets": torch.tensor([0, 1, 2, 2]),
            "adjacent": torch.tensor([1, 0], dtype=torch.int32),
        }
        return list((usual | other).values())

    coarsening.join_parts_(*given(), native=True)
    for error, other in (
        (IndexError, {"adjacent": torch.tensor([1, 3], dtype=torch.int32)}),
        (IndexError, {"part": torch.tensor([0, 2, 0], dtype=torch.int32)}),
        (IndexError, {"part": torch.tensor([0, -1, 0], dtype=torch.int32)}),
        (IndexError, {"first": 1}),
        (IndexError, {"first": -1}),
        (ValueError, {"offsets": torch.tensor([0, 2, 1, 2])}),
        (ValueError, {"offsets": torch.tensor([0, 1, 2, 3])}),
        (ValueError, {"weights": torch.ones(3, 3).long()}),
        (ValueError, {"weights": torch.ones(2, 3).long().t()}),
        (ValueError, {"price": torch.ones(2)}),
        (TypeError, {"adjacent": torch.tensor([1, 0])}),
        (TypeError, {"loads": torch.zeros(2, 2)}),
    ):
        with pytest.raises(error, match="join_parts_: expected"):
            coarsening.join_parts_(*given(**other), native=True)


def test_balanced_becomes_coarsened_where_metis_does_not_fit(tmp_path: Path) -> None:
    data, lines = graph(), []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    small = Scratch(scratch, 2**22, lines.append)
    given = data.edge_index, NODES, 3
    found = assign_nodes(*given, "balanced", report=lines.append, scratch=small)
    assert torch.equal(found, assign_nodes(*given, "coarsened", scratch=small))
    assert any("it cuts a coarsened graph" in line for line in lines)


# Folders ######################################################################


def test_a_folder_of_arrays_and_of_tables_is_the_graph(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    data = Data(edge_index=torch.randint(0, 50, (2, 300)), x=torch.randn(50, 3))
    data.y, data.edge_weight = torch.arange(50), torch.rand(300).double()
    for name in ("npy", "parquet", "csv"):
        (tmp_path / name).mkdir()
    for name, value in data.to_dict().items():
        np.save(tmp_path / "npy" / f"{name}.npy", value.numpy())
    source, target = data.edge_index.numpy()
    edges = {"src": source, "dst": target, "edge_weight": data.edge_weight.numpy()}
    nodes = {"x": list(data.x.numpy()), "y": data.y.numpy()}
    parquet.write_table(pa.table(edges), tmp_path / "parquet" / "edges.parquet", row_group_size=64)
    parquet.write_table(pa.table(nodes), tmp_path / "parquet" / "nodes.parquet")
    csv.write_csv(pa.table(edges), tmp_path / "csv" / "edges.csv")
    np.save(tmp_path / "csv" / "x.npy", data.x.numpy())
    np.save(tmp_path / "csv" / "y.npy", data.y.numpy())
    for name in ("npy", "parquet", "csv"):
        found = load_graph(str(tmp_path / name))
        assert found.num_nodes == 50
        for key, value in data.to_dict().items():
            assert torch.equal(found[key], value), (name, key)
    found.x[0] = 7.0  # A change stays in memory: the file is as it was.
    assert torch.equal(load_graph(str(tmp_path / "csv")).x, data.x)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "uint64"])
def test_edges_of_any_integers(dtype: str, tmp_path: Path) -> None:
    ends = np.random.default_rng(0).integers(0, 50, (2, 300))
    (tmp_path / "graph").mkdir()
    np.save(tmp_path / "graph" / "edge_index.npy", ends.astype(dtype))
    np.save(tmp_path / "graph" / "num_nodes.npy", np.array(50))
    data = load_graph(str(tmp_path / "graph"))
    for name, memory in (("free", None), ("bounded", "1MiB")):
        pyg_sar.write_partitions(data, 2, tmp_path / name, "coarsened", memory=memory)
        assert torch.equal(merge_partitions(tmp_path / name).edge_index, torch.from_numpy(ends))


def test_a_folder_of_a_heterogeneous_graph(tmp_path: Path) -> None:
    data = hetero()
    for name, store in zip([*data.node_types, *data.edge_types], data.stores[1:], strict=True):
        folder = tmp_path / "graph" / (name if isinstance(name, str) else "__".join(name))
        folder.mkdir(parents=True)
        for key, value in store.items():
            np.save(folder / f"{key}.npy", value.numpy())
    out = tmp_path / "parts"
    given = ["partition", str(tmp_path / "graph"), "--parts", "3", "--out", str(out), "--quiet"]
    assert main([*given, "--method", "random", "--memory", "12MiB"]) == 0
    whole = merge_partitions(out)
    for store in data.stores[1:]:
        for key, value in store.items():
            assert torch.equal(whole[store._key][key], value), (store._key, key)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no nodes": ({"edge_index.npy": np.zeros((2, 1), int)}, "no x.npy, no nodes table"),
    "floats": (
        {"edge_index.npy": np.zeros((2, 1)), "x.npy": np.zeros((2, 1))},
        "'edge_index' to hold integers",
    ),
    "objects": (
        {"edge_index.npy": np.zeros((2, 1), int), "x.npy": np.array([["a"]])},
        "x.npy' is not an array of numbers",
    ),
    "range": (
        {"edge_index.npy": np.full((2, 1), 9), "num_nodes.npy": np.array(3)},
        "node ids 0 to 2",
    ),
    "text": (
        {"edges.csv": "source,target\na,b\n", "num_nodes.npy": np.array(2)},
        "'source' of .* holds text",
    ),
    "empty": ({"edges.csv": "source,target\n1,\n"}, "'target' of .* rows without a value"),
    "names": ({"edges.csv": "from,to\n1,2\n"}, "one column named source or src or row"),
    "commas": ({"edges.csv": "source;target\n0;1\n"}, "with commas and no blanks between"),
    "twice": ({"edges.csv": "source,target,w,w\n0,1,2,3\n"}, "more than one column named 'w'"),
    "line without a value": (
        {"edges.csv": "source,target\n0,1\n", "nodes.csv": "y\n5\n\n6\n"},
        "'y' of .* rows without a value",
    ),
    "table": (
        {"edge_index.npy": np.zeros((2, 1), int), "other.csv": "a\n1\n"},
        "to be named nodes or edges",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_named(name: str, tmp_path: Path) -> None:
    files, message = WRONG[name]
    for file, value in files.items():
        if isinstance(value, str):
            (tmp_path / file).write_text(value)
        else:
            np.save(tmp_path / file, value, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        load_graph(str(tmp_path))


def test_masks_of_zeros_and_ones_and_tables_without_rows(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("source,target\n")
    (tmp_path / "nodes.csv").write_text("id,train_mask,y\n0,1,4\n1,0,5\n")
    data = load_graph(str(tmp_path))
    assert data.train_mask.tolist() == [True, False] and data.y.tolist() == [4, 5]
    assert data.edge_index.shape == (2, 0) and data.num_nodes == 2
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "edges.csv").unlink()
    table = pa.table({"src": [0], "dst": [1], "edge_attr": [[1.0, None]]})
    parquet.write_table(table, tmp_path / "edges.parquet")
    with pytest.raises(ValueError, match="'edge_attr' of .* has lists without a value"):
        load_graph(str(tmp_path))
