"""The stored plan: which pairs of workers travel together, what is sent, what loading asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hetero_graphs import make_hetero, random_parts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import MODES, Job, Partitions, Sweep, make_graph, threads
from safetensors.torch import save_file
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.comm.timetable import Timetable, make_timetable
from pyg_sar.errors import PartitionError
from pyg_sar.partition import storage
from pyg_sar.partition.metadata import METADATA
from pyg_sar.partition.storage import part_file, read_part

# Units #######################################################################


def draw_rows(world: int, seed: int, kind: str) -> Tensor:
    """Rows of pairs: alike, or a few large among small and empty ones, as METIS cuts."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "alike":
        rows = torch.full((world, world), 7)
    else:
        size = torch.rand(world, world, generator=draw)
        rows = (1000 * size**8).long() * (torch.rand(world, world, generator=draw) < 0.7)
    return rows.fill_diagonal_(0)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(0, 10**6), st.sampled_from(["alike", "skewed"]))
@example(16, 0, "alike")
@example(16, 1, "skewed")
def test_units_hold_no_more_than_the_largest_pair(world: int, seed: int, kind: str):
    rows = draw_rows(world, seed, kind)
    for matchings in (True, False):
        table = make_timetable(rows, matchings)
        units = table.units.long()
        assert torch.equal(table.rows.long(), rows)
        assert torch.equal(units > 0, rows > 0)
        assert sorted(units[units > 0].unique().tolist()) == list(range(1, table.num_units + 1))
        for unit in range(1, table.num_units + 1):
            now = rows * (units == unit)
            assert bool((now.sum(1) <= rows.amax(1)).all())
            assert bool((now.sum(0) <= rows.amax(0)).all())
        for rank in range(world):
            assert table.problem(rank, rows[rank], rows[:, rank]) == ""
    if kind == "alike":
        assert make_timetable(rows).num_units == world - 1


def busiest(rows: Tensor, units: Tensor) -> int:
    """Rows on the busiest link, summed over units."""
    now = [rows * (units == unit) for unit in range(1, int(units.max()) + 1)]
    return sum(int(torch.maximum(part.sum(0).max(), part.sum(1).max())) for part in now)


def test_small_pairs_share_units_and_links():
    """Fewer units than peers, and less time on the busiest links than in rounds p + r, p - r."""
    world, links = 12, []
    shifts = (torch.arange(world) - torch.arange(world).view(-1, 1)) % world
    for seed in range(5):
        rows = draw_rows(world, seed, "skewed")
        table = make_timetable(rows)
        assert table.num_units < world - 1
        links.append((busiest(rows, table.units), busiest(rows, shifts)))
        assert links[-1][0] <= links[-1][1]
    assert sum(a for a, _ in links) < 0.8 * sum(b for _, b in links)


def test_what_does_not_fit_is_named():
    rows = draw_rows(5, 0, "skewed")
    good = make_timetable(rows)
    wrong: dict[str, Timetable] = {
        "shapes": Timetable(good.rows[:4], good.units),
        "negative": Timetable(-good.rows, good.units),
        "own rows": Timetable(good.rows + torch.eye(5, dtype=torch.int32), good.units),
        "units": Timetable(good.rows, torch.zeros_like(good.units)),
        "differ from those of part 2": Timetable(good.rows * 2, good.units),
    }
    for text, table in wrong.items():
        assert text in table.problem(2, rows[2], rows[:, 2])


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
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("timetable"))


@pytest.fixture(scope="module")
def graph() -> Data:
    return clusters()[0]


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    return partitions(graph, 5, clusters()[1])


def test_every_part_holds_the_whole_timetable(root: Path):
    parts = [read_part(root, p) for p in range(5)]
    rows = torch.stack([part["halo_counts"] for part in parts])
    for p, part in enumerate(parts):
        assert part["send_index"].dtype == part["pair_rows"].dtype == torch.int32
        assert torch.equal(part["pair_rows"].long(), rows)
        assert torch.equal(part["pair_units"], parts[0]["pair_units"])
        assert torch.equal(part["send_counts"], rows[:, p])
    assert 0 < int(parts[0]["pair_units"].max()) < 4
    assert int((rows == 0).sum()) > 5 + 8  # more pairs are empty than those with the empty part


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[str, ...]]] = {
    "sage": (lambda: gnn.SAGEConv(6, 5), ()),
    "gat": (lambda: gnn.GATConv(6, 5, heads=2, edge_dim=4), ("edge_attr",)),
    "gcn": (lambda: gnn.GCNConv(6, 5), ("edge_weight",)),
    "max": (lambda: gnn.SAGEConv(6, 5, aggr="max"), ()),
    "reversed": (lambda: gnn.GraphConv(6, 5, flow="target_to_source"), ()),
}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_exact_with_shared_units(world: int, partitions: Partitions):
    data, part = clusters()
    folder = partitions(data, world, part % world)
    sweep = Sweep(world)
    for name, (make, edge) in LAYERS.items():
        sweep.add(name, Job(make().double(), folder, edge, (*MODES, SARPolicy(prefetch=2))), data)
    sweep.check()


def messages(root: Path, prefetch: int) -> Any:
    comm = pyg_sar.current()
    data = pyg_sar.load_partition(root)
    policy = SARPolicy(prefetch=prefetch, push="off")
    layer = pyg_sar.distribute(gnn.GATConv(6, 5).double(), policy)
    x = data.x.clone().requires_grad_()
    layer(x, data.edge_index).sum().backward()
    with pyg_sar.Ledger(comm) as ledger:
        layer(x, data.edge_index).sum().backward()
    kinds = ("fetch", "refetch", "gradient")
    sent = {kind: ledger.sent_messages(kind=kind) for kind in kinds}
    return sent, ledger.peak_resident_rows(), data.edge_index.plan


@pytest.mark.parametrize("prefetch", [0, 1])
def test_pairs_without_rows_send_nothing(prefetch: int, root: Path):
    """One message per pair with rows and phase; resident are the rows of 1 + prefetch units."""
    for sent, peak, plan in threads(messages, 5, root, prefetch):
        going = sum(1 for n in plan.send_counts if n)
        coming = sum(1 for n in plan.halo_counts if n)
        assert sent == {"fetch": going, "refetch": going, "gradient": coming}
        assert peak <= (1 + prefetch) * max(plan.halo_counts)
        assert all(unit.num_rows <= max(plan.halo_counts) for unit in plan.units()[1:])
        assert len(plan.units()) - 1 == plan.timetable.num_units < 4


# Loading #####################################################################


def bytes_of_loading(root: Path) -> dict[str, dict[str, int]]:
    with pyg_sar.Ledger(pyg_sar.current()) as ledger:
        pyg_sar.load_partition(root)
    return ledger.by_layer(), ledger.sent_messages()


def test_loading_exchanges_a_digest_alone(tmp_path: Path, graph: Data, partitions: Partitions):
    """One collective of 33 bytes and 3 + 2W numbers, also with ``batch``, and of a HeteroData."""
    batched = graph.clone()
    batched.batch = torch.arange(60) // 20
    hetero = make_hetero()
    pyg_sar.write_partitions(batched, 3, tmp_path / "batched", "random")
    pyg_sar.write_partitions(hetero, 3, tmp_path / "hetero", random_parts(hetero, 3))
    for name in ("batched", "hetero"):
        for layers, sent in threads(bytes_of_loading, 3, tmp_path / name):
            size = 33 + 8 * (3 + 2 * 3)
            assert layers == {"": {"agreement in": 2 * size, "agreement out": size}}
            assert sent == 1


def test_the_number_of_graphs_is_stored(tmp_path: Path, graph: Data):
    batched = graph.clone()
    batched.batch = torch.arange(60) // 20
    pyg_sar.write_partitions(batched, 3, tmp_path / "parts", "contiguous")

    def worker() -> int:
        return pyg_sar.load_partition(tmp_path / "parts").batch.num_graphs

    assert threads(worker, 3) == [3, 3, 3]


def rewrite(root: Path, change: Callable[[int, dict[str, Tensor]], None], version: int) -> None:
    """Changes parts' tensors, with checksums that fit, and the version."""
    content = json.loads((root / METADATA).read_text())
    del content["checksum"]
    count = content["num_parts"]
    rows = []
    for p in range(count):
        tensors = {k: v.clone() for k, v in read_part(root, p).items()}
        change(p, tensors)
        rows.append(storage._write_part(root, tensors, p, count))
    storage._write_metadata(root, {**content, "version": version, "parts": rows})


COVERS = ("covers", "cover_costs", "cover_edges")


def without_covers(p: int, tensors: dict[str, Tensor]) -> None:
    """As version 3 was."""
    for name in [name for name in tensors if name.endswith(COVERS)]:
        del tensors[name]


def as_before(p: int, tensors: dict[str, Tensor]) -> None:
    """As versions 1 and 2 were."""
    for name in list(tensors):
        if name.endswith(("pair_rows", "pair_units", *COVERS)):
            del tensors[name]
        elif name.endswith("send_index"):
            tensors[name] = tensors[name].long()


@pytest.mark.parametrize("change, version", [(as_before, 1), (without_covers, 3)])
def test_older_partitions_load(change: Any, version: int, tmp_path: Path, graph: Data):
    data, part = clusters()
    pyg_sar.write_partitions(data, 5, tmp_path / "old", part)
    rewrite(tmp_path / "old", change, version)
    sweep = Sweep(5)
    for name, (make, edge) in LAYERS.items():
        sweep.add(name, Job(make().double(), tmp_path / "old", edge, MODES), data)
    sweep.check()
    hetero = make_hetero()
    pyg_sar.write_partitions(hetero, 3, tmp_path / "hetero", random_parts(hetero, 3))
    rewrite(tmp_path / "hetero", change, max(version, 2))

    def worker() -> int:
        found = pyg_sar.load_partition(tmp_path / "hetero")
        plans = [found[key].edge_index.plan for key in found.edge_types]
        assert all(plan.covers is None for plan in plans)
        return max(len(plan.units()) for plan in plans)

    if version < 3:
        assert threads(worker, 3) == [3, 3, 3]


def other_units(p: int, tensors: dict[str, Tensor]) -> None:
    if p == 1:
        tensors["pair_units"] += tensors["pair_units"].gt(0).int()


def other_counts(p: int, tensors: dict[str, Tensor]) -> None:
    if p == 1:
        tensors["pair_rows"] *= 2


def row_beyond(p: int, tensors: dict[str, Tensor]) -> None:
    if p == 1:
        tensors["send_index"][0] = tensors["n_id"].numel()


def fewer_rows(p: int, tensors: dict[str, Tensor]) -> None:
    if p == 1:
        tensors["send_counts"][0] -= 1


def other_covers(p: int, tensors: dict[str, Tensor]) -> None:
    if p == 1:
        tensors["covers"] = tensors["covers"].view(torch.int8)


def other_costs(p: int, tensors: dict[str, Tensor]) -> None:
    if p == 1:
        tensors["cover_costs"] = tensors["cover_costs"].view(-1)


def no_edges(p: int, tensors: dict[str, Tensor]) -> None:
    if p == 1:
        tensors["cover_edgex"] = tensors.pop("cover_edges")


ALTERED: dict[str, tuple[Callable[[int, dict[str, Tensor]], None], str]] = {
    "units": (other_units, "at rank 1 is not that of .* at rank 0: one was altered"),
    "counts": (other_counts, "'pair_rows' of '.*part-00001.* was altered: its counts differ"),
    "index": (row_beyond, "'send_index' of '.*part-00001.* was altered: it names rows"),
    "sums": (fewer_rows, "'send_counts' of '.*part-00001.* was altered: it does not add up"),
    "covers": (other_covers, "'covers' of '.*part-00001.* was altered: it is torch.int8"),
    "costs": (other_costs, "'cover_costs' of '.*part-00001.* was altered: it is .*shape"),
    "edges": (no_edges, "part-00001.*was altered: it lacks the tensor 'cover_edges'"),
}


@pytest.mark.parametrize("name", ALTERED)
@pytest.mark.parametrize("verify", [True, False])
def test_an_altered_plan_is_one_error_on_every_worker(name: str, verify: bool, tmp_path: Path):
    data, part = clusters()
    change, text = ALTERED[name]
    root = tmp_path / "parts"
    pyg_sar.write_partitions(data, 5, root, part)
    size = (root / part_file(1, 5)).stat().st_size
    tensors = {k: v.clone() for k, v in read_part(root, 1).items()}
    change(1, tensors)
    save_file(tensors, root / part_file(1, 5))
    assert (root / part_file(1, 5)).stat().st_size == size

    def worker() -> str:
        with pytest.raises(PartitionError, match="SHA-256" if verify else text) as caught:
            pyg_sar.load_partition(root, verify=verify)
        return str(caught.value)

    assert len(set(threads(worker, 5))) == 1


# Several relations ###########################################################


def test_a_joint_plan_has_units_of_its_own(tmp_path: Path):
    """HGT joins relations: their rows add up, and every worker finds the same units."""
    hetero = make_hetero()
    pyg_sar.write_partitions(hetero, 3, tmp_path / "parts", random_parts(hetero, 3))

    def worker() -> Any:
        data = pyg_sar.load_partition(tmp_path / "parts")
        keys = [key for key in data.edge_types if key[2] == "paper"]
        parts = []
        for shift, key in enumerate(keys):
            edges = data[key].edge_index.clone()
            edges[0] += shift * 100
            edges[1] += shift * 50
            parts.append(edges)
        plan = torch.cat(parts, dim=1).plan
        assert plan.timetable is not None
        return plan.timetable.rows, plan.timetable.units, plan.halo_counts, plan.send_counts

    found = threads(worker, 3)
    for rank, (rows, units, needed, sent) in enumerate(found):
        assert torch.equal(rows, found[0][0]) and torch.equal(units, found[0][1])
        assert rows[rank].tolist() == needed and rows[:, rank].tolist() == sent
    assert int(found[0][1].max()) > 0
