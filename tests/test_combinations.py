"""Nothing is left out for good: values of parameters, policies, names of tests that exist."""

from __future__ import annotations

import importlib
from itertools import combinations as pairs_of
from itertools import product

import pytest
from combinations import EVERY, LONG, PAIRS, SWITCH, covering, in_turn, left_out, some
from oracle import ALL_POLICIES, MODES


def test_all_pairs_of_values_are_covered_by_few_rows():
    rows = [dict(zip("abc", row, strict=True)) for row in product(range(3), range(4), range(5))]
    taken = covering(rows)
    found = {pair for k in taken for pair in pairs_of(sorted(rows[k].items()), 2)}
    assert found == {pair for row in rows for pair in pairs_of(sorted(row.items()), 2)}
    assert 20 <= len(taken) <= 26 < len(rows)
    assert covering([{"a": 0}, {"a": 1}]) == {0, 1}


@pytest.mark.parametrize("values", [ALL_POLICIES, MODES, MODES[:2], MODES[:1]])
def test_all_values_are_some_keys_values(values, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    found = [some(values, f"layer {k}") for k in range(40)]
    assert {k for part in found for k in map(values.index, part)} == set(range(len(values)))
    assert all(1 <= len(part) <= 2 for part in found)
    monkeypatch.setenv(SWITCH, "1")
    assert some(values, "layer") == values


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_all_values_are_tried_in_turn(count, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    shares = in_turn([MODES] * count + [MODES[:1]], 7)
    assert shares.pop() == MODES[:1] and all(shares)
    assert {MODES.index(value) for share in shares for value in share} == set(range(4))
    assert sum(map(len, shares)) <= max(count, 4) + 1
    monkeypatch.setenv(SWITCH, "1")
    assert in_turn([MODES] * count, 7) == [MODES] * count


@pytest.mark.parametrize("name", sorted({*PAIRS, *EVERY, *LONG}))
def test_names_are_those_of_tests_and_but_for_the_long_ones_with_parameters(name):
    module, _, test = name.partition("::")
    marks = getattr(getattr(importlib.import_module(module), test), "pytestmark", ())
    assert name in LONG or any(mark.name == "parametrize" for mark in marks)


def test_the_switch_leaves_nothing_out(request, monkeypatch):
    items = [item for item in request.session.items if item.path.stem == "test_combinations"]
    monkeypatch.setitem(EVERY, "test_combinations::test_all_values_are_some_keys_values", 2)
    monkeypatch.delenv(SWITCH, raising=False)
    assert len(left_out(items)) == 2
    monkeypatch.setenv(SWITCH, "1")
    assert left_out(items) == []
