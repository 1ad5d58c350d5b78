"""Every class that PyG exports: exact on workers, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverage_modules import TABLES
from coverage_run import GRAPHS, judge
from oracle import Partitions
from torch_geometric.data import Data

CASES = [
    pytest.param(case, id=f"{kind}:{name}{', ' * bool(option)}{option}")
    for kind, (_, table) in TABLES.items()
    for name, options in table.items()
    for option, case in options.items()
]


@pytest.fixture(scope="module")
def graphs() -> dict[str, Data]:
    return {name: make() for name, make in GRAPHS.items()}


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    return Partitions(tmp_path_factory.mktemp("coverage"))


@pytest.mark.parametrize("kind", TABLES)
def test_every_class_has_an_entry(kind: str):
    module, table = TABLES[kind]
    assert sorted(set(module.__all__) - set(table)) == []
    assert sorted(set(table) - set(module.__all__)) == []


@pytest.mark.parametrize("case", CASES)
def test_case(case, request, graphs: dict[str, Data], partitions: Partitions):
    data = graphs[case.graph]
    root = partitions(data, 3, "random")
    outcome = judge(request.node.callspec.id, case, data, root)
    print(outcome)
    assert not outcome.problems, outcome
