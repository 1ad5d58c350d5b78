"""Planned caches of rows: exact, never worse than another choice, and what they read."""

from __future__ import annotations

import tracemalloc
from functools import cache
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmark_scripts import benchmark

from pyg_sar.exchange.part_tables import Routes, RowCache, StoredPlan
from pyg_sar.exchange.row_plan import (
    JOINED_GAPS,
    REQUEST_BYTES,
    gap_of,
    joined_runs,
    plan_rows,
)
from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.layout import NodeOrder, group_edges
from pyg_sar.tools.graph_sources import load_npz

row_loads = benchmark("row_loads")
check_plan, loads = row_loads.check_plan, row_loads.loads


def random_case(seed, most_parts=7, most_rows=60):
    """Halo rows of some parts, where each part's published rows begin, an order, a capacity."""
    draw = np.random.default_rng(seed)
    parts, rows = int(draw.integers(1, most_parts + 1)), int(draw.integers(0, most_rows + 1))
    first = np.concatenate([[0], np.sort(draw.integers(0, rows + 1, parts - 1)), [rows]])
    needs = []
    for part in range(parts):
        wanted = draw.random(rows) < draw.choice([0, 0.1, 0.5, 1])
        wanted[first[part] : first[part + 1]] = False
        needs.append(np.flatnonzero(wanted).astype(draw.choice([np.int32, np.int64])))
    capacity = int(draw.choice([0, 1, 2, rows // 4, rows // 2, rows, 2 * rows]))
    return needs, first, capacity, [int(part) for part in draw.permutation(parts)]


@pytest.mark.parametrize("stay", [True, False])
def test_plans_deliver_the_rows_that_are_needed(stay):
    for seed in range(200):
        needs, first, capacity, order = random_case(seed)
        plan = plan_rows(needs, first, capacity, order, stay)
        check_plan(plan, needs)
        assert [turn.part for turn in plan.turns] == order
        assert plan.num_slots <= capacity
        total = loads(plan)
        assert total.rows + total.found == sum(rows.size for rows in needs)
        assert total.read == total.rows
        if capacity == 0:
            assert total.found == 0
        if capacity >= first[-1]:
            distinct = np.unique(np.concatenate(needs)).size
            assert total.rows == (0 if stay else distinct)
        if not stay:
            assert not any(rows.size for rows in plan.publish_row)


def fewest_loads(needs, num_rows, capacity, order, stay):
    """Tries all contents of the cache after each turn."""
    lists = [frozenset(needs[part].tolist()) for part in order]

    def contents(rows):
        size = min(capacity, len(rows))  # To hold more is never worse.
        return (frozenset(some) for some in combinations(sorted(rows), size))

    @cache
    def fewest(turn, held):
        if turn == len(lists):
            return 0
        missing = len(lists[turn] - held)
        return missing + min(fewest(turn + 1, kept) for kept in contents(held | lists[turn]))

    opening = contents(range(num_rows)) if stay else [frozenset()]
    return min(fewest(0, held) for held in opening)


@pytest.mark.parametrize("stay", [True, False])
def test_no_choice_of_contents_reads_fewer_rows(stay):
    reused = 0
    for seed in range(100):
        needs, first, _, order = random_case(seed, most_parts=5, most_rows=7)
        for capacity in (1, 2, 3):
            plan = plan_rows(needs, first, capacity, order, stay)
            fewest = fewest_loads(needs, int(first[-1]), capacity, order, stay)
            assert loads(plan).rows == fewest, (seed, capacity)
            reused += loads(plan).found
    assert reused > 100


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="fewer than 2\\^31"):
        plan_rows([np.array([2, 3]), np.array([0])], [0, 2, 2**31], 2)


def test_a_wrong_plan_is_found():
    needs = [np.array([2, 3]), np.array([0, 3]), np.array([0, 2])]
    plan = plan_rows(needs, [0, 2, 3, 4], 4, published_stay=False)
    check_plan(plan, needs)
    assert loads(plan).rows == 3
    for wrong in ([[2, 3], [1, 3], [0, 2]], [[2, 3], [0, 3], [0, 1]], [[2], [0, 3], [0, 2]]):
        with pytest.raises(ValueError, match="plan of cached rows is wrong"):
            check_plan(plan, [np.array(rows) for rows in wrong])
    plan.turns[1].found_slot[:] = 1 - plan.turns[1].found_slot
    with pytest.raises(ValueError, match="plan of cached rows is wrong"):
        check_plan(plan, needs)


# Requests #####################################################################


def test_runs_within_the_gap_are_one_request():
    needs = [np.array([0, 1, 4, 5, 9, 20]), np.empty(0, np.int64)]
    plan = plan_rows(needs, [0, 0, 30], 0)
    for gap, requests, read in ((0, 4, 6), (1, 4, 6), (2, 3, 8), (3, 2, 11), (10, 1, 21)):
        total = loads(plan, gap)
        assert (total.rows, total.requests, total.read) == (6, requests, read)
        assert total.mean == read / requests
    begin, end = joined_runs(plan.turns[0], 2)
    assert begin.tolist() == [0, 2, 3] and end.tolist() == [2, 3, 4]
    assert loads(plan_rows([needs[1]], [0, 0], 0)).mean == 0
    assert gap_of(512) == 128 and gap_of(0) == REQUEST_BYTES


def test_joined_requests_stay_short():
    draw = np.random.default_rng(0)
    for gap in (1, 2, 5):
        longest = JOINED_GAPS * gap
        rows = np.flatnonzero(np.repeat(draw.random(400) < 0.6, draw.choice([1, 3, 90], 400)))
        plan = plan_rows([rows, rows[:0]], [0, 0, int(rows[-1]) + 1], 0)
        turn = plan.turns[0]
        begin, end = joined_runs(turn, gap)
        assert begin[0] == 0 and end[-1] == turn.run_start.size
        assert np.array_equal(begin[1:], end[:-1])
        several = end - begin > 1
        sizes = turn.run_stop[end - 1] - turn.run_start[begin]
        assert several.any() and (sizes[several] < 2 * longest).all()
        assert (sizes[~several] >= longest).any()


# The cache ####################################################################


def run_pass(plan, needs, rows, gap):
    """Publishes and gathers ``rows``; returns how many came from the file, and what it read."""
    read, loaded = [], 0

    def read_rows(start, stop, out):
        read.append((start, stop))
        out.copy_(rows[start:stop])

    slots = torch.full((plan.num_slots, *rows.shape[1:]), 7, dtype=rows.dtype)
    rows_cache = RowCache(plan, slots, read_rows, gap)
    for part, (start, stop) in enumerate(zip(plan.first, plan.first[1:], strict=False)):
        rows_cache.publish(part, rows[start:stop])
    for turn in plan.turns:
        out = torch.full((turn.num_halo, *rows.shape[1:]), 5, dtype=rows.dtype)
        loaded += rows_cache.gather(turn.part, out)
        assert torch.equal(out, rows[torch.from_numpy(needs[turn.part]).long()])
    return loaded, read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (0,)])
def test_the_cache_gives_the_published_rows(dtype, shape, monkeypatch):
    monkeypatch.setattr("pyg_sar.exchange.part_tables.MOVE_BYTES", 100)
    for seed in range(20):
        needs, first, capacity, order = random_case(seed)
        plan = plan_rows(needs, first, capacity, order, seed % 2 == 0)
        rows = torch.randint(0, 200, (int(first[-1]), *shape)).to(dtype)
        for gap in (0, 3):
            loaded, read = run_pass(plan, needs, rows, gap)
            total = loads(plan, gap)
            assert (loaded, len(read)) == (total.rows, total.requests)
            assert sum(stop - start for start, stop in read) == total.read


def test_rows_that_lie_together_are_read_in_place():
    """Rows between two runs that the part needs as well are read straight into its buffer."""
    needs = [np.array([3, 5]), np.array([2, 3, 4, 5, 6]), np.array([9])]
    plan = plan_rows(needs, [0, 0, 0, 10], 2, published_stay=False)
    assert plan.turns[1].run_start.tolist() == [2, 4, 6]
    rows = torch.arange(10.0).view(-1, 1)
    where = []

    def read_rows(start, stop, out):
        where.append((start, stop, out.untyped_storage().data_ptr()))
        out.copy_(rows[start:stop])

    done = RowCache(plan, torch.empty(2, 1), read_rows, gap=1)
    with pytest.raises(RuntimeError, match="Part 2 gathers rows at the turn of part 0"):
        RowCache(plan, torch.empty(2, 1), read_rows).gather(2, torch.empty(1, 1))
    loaded = 0
    for part, size in ((0, 2), (1, 5), (2, 1)):
        out = torch.empty(size, 1)
        loaded += done.gather(part, out)
        if part == 1:
            assert where[-1] == (2, 7, out.untyped_storage().data_ptr())
    assert (loaded, len(where)) == (6, 3)


# A real graph #################################################################


def test_a_real_graph(shared_data):
    data = load_npz(shared_data("cora.npz"))
    part = assign_nodes(data.edge_index, data.num_nodes, 8, "metis")
    layout = group_edges(data.edge_index, NodeOrder.of(part, 8))
    halos = [halo.numpy() for halo in layout.halos]
    published = np.unique(np.concatenate(halos))
    needs = [np.searchsorted(published, halo) for halo in halos]
    first = np.searchsorted(published, layout.sources.offsets.numpy())
    capacity = max(rows.size for rows in needs)
    rows = torch.randn(published.size, 4)
    found = {}
    for stay in (True, False):
        plan = plan_rows(needs, first, capacity, None, stay)
        check_plan(plan, needs)
        run_pass(plan, needs, rows, gap=4)
        found[stay] = loads(plan).rows
    # HongTu's rule loads what the last part did not have.
    again = sum(np.intersect1d(*pair).size for pair in pairwise(needs))
    assert found[False] < sum(rows.size for rows in needs) - again
    assert found[True] <= found[False] - min(capacity, needs[0].size)


@pytest.mark.parametrize("capacity", [0, 4000, 64_000])
def test_planning_takes_no_more_than_the_store_makes_room_for(capacity):
    parts, published, halo = 16, 4000, 6000
    draw = np.random.default_rng(0)
    places = {
        part: torch.cat(
            [
                torch.from_numpy(draw.permutation(published)[: halo // parts] + owner * published)
                for owner in range(parts)
                if owner != part
            ]
        )
        for part in range(parts)
    }
    routes = Routes([published] * parts, places, {}, None)
    host = SimpleNamespace(parts=range(parts), num_parts=parts)
    tracemalloc.start()
    try:
        StoredPlan(routes, host, capacity)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert routes.planning_bytes() / 4 < most < routes.planning_bytes()
