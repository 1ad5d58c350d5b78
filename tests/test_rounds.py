"""The stored plan: the rounds of workers, what is sent in them, what loading exchanges."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hetero_graphs import make_hetero, random_parts
from oracle import MODES, Job, Partitions, Sweep, make_graph, workers
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.__main__ import main
from pyg_sar.errors import PartitionError
from pyg_sar.files import save_aligned
from pyg_sar.partition import storage
from pyg_sar.partition.metadata import METADATA
from pyg_sar.partition.schema import VERSION
from pyg_sar.partition.storage import part_file, read_part

# What is stored ##############################################################


def clusters(parts: int = 5, seed: int = 3) -> tuple[Data, Tensor]:
    """A graph in parts, most pairs of which share few edges, or none; one part is empty."""
    data = make_graph(60, 0, seed)
    draw = torch.Generator().manual_seed(seed)
    part = torch.arange(60) % (parts - 1)  # the last part owns nothing
    weight = torch.tensor([[0, 40, 3, 2], [30, 0, 2, 0], [2, 3, 0, 25], [1, 0, 30, 0]])[
        : parts - 1, : parts - 1
    ]
    edges = [data.edge_index]
    for p, q in weight.nonzero().tolist():
        targets, sources = ((part == k).nonzero().view(-1) for k in (p, q))
        count = int(weight[p, q])
        ends = [
            ids[torch.randint(ids.numel(), (count,), generator=draw)] for ids in (sources, targets)
        ]
        edges.append(torch.stack(ends))
    inner = torch.randint(15, (2, 60), generator=draw) * (parts - 1)
    graph = make_graph(60, 0, seed)
    graph.edge_index = torch.cat([*edges, inner], dim=1)
    count = graph.edge_index.size(1)
    graph.edge_weight = torch.rand(count, generator=draw, dtype=torch.float64) + 0.1
    graph.edge_attr = torch.randn(count, 4, generator=draw, dtype=torch.float64)
    del graph.edge_type
    return graph, part


@pytest.fixture(scope="module")
def graph() -> Data:
    return clusters()[0]


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, 5, clusters()[1])


def test_every_part_holds_what_it_needs_and_sends(root: Path):
    parts = [read_part(root, p) for p in range(5)]
    rows = torch.stack([part["halo_counts"] for part in parts])
    for p, part in enumerate(parts):
        assert part["send_index"].dtype == torch.int32
        assert torch.equal(part["send_counts"], rows[:, p])
    assert int((rows == 0).sum()) > 5 + 8  # more pairs are empty than those with the empty part


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...]]] = {
    "sage": (lambda: gnn.SAGEConv(6, 5), ()),
    "gat": (lambda: gnn.GATConv(6, 5, heads=2, edge_dim=4), ("edge_attr",)),
    "gcn": (lambda: gnn.GCNConv(6, 5), ("edge_weight",)),
    "max": (lambda: gnn.SAGEConv(6, 5, aggr="max"), ()),
    "reversed": (lambda: gnn.GraphConv(6, 5, flow="target_to_source"), ()),
}


def test_exact_with_empty_rounds(graph: Data, root: Path):
    sweep = Sweep(5)
    for name, (make, edge) in LAYERS.items():
        sweep.add(name, Job(make().double(), root, edge, (*MODES, SARPolicy(prefetch=0))), graph)
    sweep.check("gloo")


def messages(root: Path, prefetch: int) -> Any:
    comm = pyg_sar.comm.current()
    data = pyg_sar.load_partition(root)
    policy = SARPolicy(prefetch=prefetch, push="off")
    layer = pyg_sar.distribute(gnn.GATConv(6, 5).double(), policy)
    x = data.x.clone().requires_grad_()
    layer(x, data.edge_index).sum().backward()
    with pyg_sar.Ledger(comm) as ledger:
        layer(x, data.edge_index).sum().backward()
    kinds = ("fetch", "refetch", "gradient")
    sent = {kind: ledger.sent_messages(kind=kind) for kind in kinds}
    plan = data.edge_index.to_local().plan
    rows = [plan.num_rows[unit] for unit in range(1, 5)]
    assert sorted(rows) == sorted(plan.halo_counts[q] for q in range(5) if q != plan.rank)
    return sent, ledger.peak_resident_rows(), plan.send_counts, plan.halo_counts


def test_pairs_without_rows_send_nothing(root: Path):
    """One message per pair with rows and phase; resident are the rows of 1 + prefetch units."""
    for found in workers(lambda: [messages(root, prefetch) for prefetch in (0, 1)], 5):
        for prefetch, (sent, peak, send_counts, halo_counts) in enumerate(found):
            going = sum(1 for n in send_counts if n)
            coming = sum(1 for n in halo_counts if n)
            assert sent == {"fetch": going, "refetch": going, "gradient": coming}
            assert peak <= (1 + prefetch) * max(halo_counts)


# Loading #####################################################################


def bytes_of_loading(root: Path) -> dict[str, dict[str, int]]:
    with pyg_sar.Ledger(pyg_sar.comm.current()) as ledger:
        pyg_sar.load_partition(root)
    return ledger.by_layer(), ledger.sent_messages()


def test_loading_exchanges_a_digest_and_random_states(tmp_path: Path, graph: Data):
    """One collective of 33 bytes and 2 + 2W numbers, also with ``batch``, and of a HeteroData.

    And rank 0's states of three generators: PyTorch's 5056 bytes, and 1254 numbers of the others.
    """
    batched = graph.clone()
    batched.batch = torch.arange(60) // 20
    hetero = make_hetero()
    pyg_sar.write_partitions(batched, 3, tmp_path / "batched", "random")
    pyg_sar.write_partitions(hetero, 3, tmp_path / "hetero", random_parts(hetero, 3))
    for name in ("batched", "hetero"):
        for rank, (layers, sent) in enumerate(workers(bytes_of_loading, 3, tmp_path / name)):
            size, states = 33 + 8 * (2 + 2 * 3), "random states " + ("in" if rank else "out")
            assert layers[""].pop(states) == 5056 + 8 * 1254
            assert layers == {"": {"agreement in": 2 * size, "agreement out": size}}
            assert sent == (1 if rank else 1 + 2)


def of_version(root: Path, version: int, **fields: Any) -> Path:
    """The partition as if it were of another format version."""
    content = json.loads((root / METADATA).read_text())
    del content["checksum"]
    storage._write_metadata(root, {**content, **fields, "version": version})
    return root


def test_older_partitions_are_refused_with_the_command_that_rewrites_them(tmp_path: Path):
    """By the version alone: other fields may be of any kind."""
    data, part = clusters()
    pyg_sar.write_partitions(data, 3, tmp_path / "old ones", "metis", seed=7)
    pyg_sar.write_partitions(data, 3, tmp_path / "vector", part % 3)
    for version in range(1, VERSION):
        named = of_version(tmp_path / "old ones", version, hetero={"types": 1})
        given = of_version(tmp_path / "vector", version)

        def worker(folders: tuple[Path, ...] = (named, given)) -> list[str]:
            found = []
            for folder in folders:
                with pytest.raises(PartitionError) as caught:
                    pyg_sar.load_partition(folder)
                found.append(str(caught.value))
            return found

        for texts in workers(worker, 3):
            for text, options in zip(texts, ("--method metis --seed 7", "--seed 0"), strict=True):
                assert f"version {version}, older than {VERSION}" in text
                assert f"pyg-sar partition GRAPH --parts 3 {options} --out " in text
    command = texts[0].split("again from its graph: ")[1].split(";")[0].replace("GRAPH", "g.pt")
    torch.save(data, tmp_path / "g.pt")
    words = shlex.split(command.replace("g.pt", str(tmp_path / "g.pt")))
    assert main(words[1:]) == 0
    assert pyg_sar.partition.merge_partitions(named).num_edges == data.num_edges


def test_the_command_holds_numbers_and_known_methods_only(tmp_path: Path):
    """It is made of what the file says, which may be anything."""
    pyg_sar.write_partitions(clusters()[0], 1, tmp_path / "old")
    of_version(tmp_path / "old", 5, method="; rm -rf /", seed="$(id)", num_parts=[2])
    with pytest.raises(PartitionError, match="partition GRAPH --out") as caught:
        pyg_sar.load_partition(tmp_path / "old")
    assert "rm -rf" not in str(caught.value) and "id" not in str(caught.value).split("--out")[0]


def row_beyond(tensors: dict[str, Tensor]) -> None:
    tensors["send_index"][0] = tensors["n_id"].numel()


def fewer_rows(tensors: dict[str, Tensor]) -> None:
    tensors["send_counts"][0] -= 1


def other_covers(tensors: dict[str, Tensor]) -> None:
    tensors["covers"] = tensors["covers"].view(torch.int8)


def other_costs(tensors: dict[str, Tensor]) -> None:
    tensors["cover_costs"] = tensors["cover_costs"].view(-1)


def no_edges(tensors: dict[str, Tensor]) -> None:
    tensors["cover_edgex"] = tensors.pop("cover_edges")


ALTERED: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "index": (row_beyond, "'send_index' of '.*part-00001.* was altered: it names rows"),
    "sums": (fewer_rows, "'send_counts' of '.*part-00001.* was altered: it does not add up"),
    "covers": (other_covers, "'covers' of '.*part-00001.* was altered: it is torch.int8"),
    "costs": (other_costs, "'cover_costs' of '.*part-00001.* was altered: it is .*shape"),
    "edges": (no_edges, "part-00001.*was altered: it lacks the tensor 'cover_edges'"),
}


def test_an_altered_plan_is_one_error_on_every_worker(tmp_path: Path):
    data, part = clusters()
    for name, (change, _) in ALTERED.items():
        root = tmp_path / name
        pyg_sar.write_partitions(data, 5, root, part)
        size = (root / part_file(1, 5)).stat().st_size
        tensors = {k: v.clone() for k, v in read_part(root, 1).items()}
        change(tensors)
        save_aligned(tensors, root / part_file(1, 5))
        assert (root / part_file(1, 5)).stat().st_size == size

    def worker() -> list[str]:
        found = []
        for name, (_, text) in ALTERED.items():
            for verify in (True, False):
                with pytest.raises(PartitionError, match="SHA-256" if verify else text) as caught:
                    pyg_sar.load_partition(tmp_path / name, verify=verify)
                found.append(str(caught.value))
        return found

    first, *others = workers(worker, 5)
    assert all(found == first for found in others)


# Several relations ###########################################################


def test_a_joint_plan_adds_up_its_relations(tmp_path: Path):
    """HGT joins relations: what each worker needs of another is what that one sends."""
    hetero = make_hetero()
    pyg_sar.write_partitions(hetero, 3, tmp_path / "parts", random_parts(hetero, 3))

    def worker() -> Any:
        data = pyg_sar.load_partition(tmp_path / "parts")
        keys = [key for key in data.edge_types if key[2] == "paper"]
        parts = []
        for shift, key in enumerate(keys):
            edges = data[key].edge_index.to_local().clone()
            edges[0] += shift * 100
            edges[1] += shift * 50
            parts.append(edges)
        plan = torch.cat(parts, dim=1).plan
        single = torch.tensor([data[key].edge_index.to_local().plan.halo_counts for key in keys])
        assert single.sum(0).tolist() == plan.halo_counts
        return plan.halo_counts, plan.send_counts

    needed, sent = (torch.tensor(rows) for rows in zip(*workers(worker, 3), strict=True))
    assert torch.equal(needed, sent.t()) and int(needed.sum()) > 0
