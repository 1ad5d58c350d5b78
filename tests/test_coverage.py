"""Every class that PyG exports: exact on workers, or refused by name (docs/what-runs.md)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from combinations import some
from coverage_case import GRAPHS
from coverage_judge import WORLD, Outcome, exact_errors, judge
from coverage_modules import TABLES
from coverage_report import TITLE, render, verdicts_in
from coverage_run import Pass, build, evaluated_first, run_first
from oracle import Partitions, assert_small, parts
from torch_geometric.data import Data

from pyg_sar.errors import OneShotWarning

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "what-runs.md"
CASES = {
    f"{kind}:{name}{', ' * bool(option)}{option}": case
    for kind, (_, table) in TABLES.items()
    for name, options in table.items()
    for option, case in options.items()
}
FIRST = {
    f"{kind}:{name}{', ' * bool(option)}{option}"
    for kind, (_, table) in TABLES.items()
    for name, options in table.items()
    for option in list(options)[:1]
}


@pytest.fixture(scope="module")
def graphs() -> dict[str, Data]:
    return {name: make() for name, make in GRAPHS.items()}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Outcome]]:
    """What was found; written as a document at the end, if it is asked for and complete."""
    found: dict[str, Outcome] = {}
    yield found
    path = request.config.getoption("--coverage-out")
    if path is not None:
        missing = sorted(CASES.keys() - found.keys())
        assert not missing, f"{path} is not written: no outcome for {missing}"
        prose = DOCUMENT.read_text().partition(TITLE)[0]
        Path(path).write_text(prose + render([found[name] for name in CASES]))


@pytest.mark.parametrize("kind", TABLES)
def test_every_class_has_an_entry(kind: str):
    module, table = TABLES[kind]
    assert sorted(set(module.__all__) - set(table)) == []
    assert sorted(set(table) - set(module.__all__)) == []
    assert all(table.values())


@pytest.mark.parametrize("name", CASES)
def test_case(
    name: str,
    request: pytest.FixtureRequest,
    graphs: dict[str, Data],
    partitions: Partitions,
    outcomes: dict[str, Outcome],
):
    """Low precision for all options where the document is written, else for the first of each."""
    case = CASES[name]
    data = graphs[case.graph]
    precise = name in FIRST or request.config.getoption("--coverage-out") is not None
    outcome = judge(name, case, data, partitions(data, WORLD, "random"), precise)
    outcomes[name] = outcome
    assert not outcome.problems, outcome


def test_a_first_call_in_inference_mode(graphs: dict[str, Data], partitions: Partitions):
    """It gives PyG's results, and so does the training step after it."""
    jobs, expected, mode = {}, {}, torch.inference_mode
    names = [name for name in sorted(FIRST) if name.startswith(("conv:", "models:"))]
    for name in some(names, "inference mode", 3):
        case = CASES[name]
        if not (case.refused or case.unavailable or case.no_layer or case.default_double):
            jobs[name] = case, build(case)
            plain = copy.deepcopy(jobs[name][1])
            expected[name] = evaluated_first(case, plain, graphs[case.graph], mode)
    roots = {name: partitions(data, WORLD, "random") for name, data in graphs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OneShotWarning)
        everyone = parts(run_first, WORLD, roots, jobs, mode)
    for name, (case, _) in jobs.items():
        found = [worker[name] for worker in everyone]
        passes = [one for one in found if isinstance(one, Pass)]
        assert passes == found, (name, found)
        assert_small(exact_errors(passes, expected[name]), case.tolerance, name)


def test_the_document_is_in_step(request: pytest.FixtureRequest, outcomes: dict[str, Outcome]):
    """The same classes, options and verdicts; the digits may differ."""
    if request.config.getoption("--coverage-out") is not None:
        pytest.skip("the document is being written")
    if outcomes.keys() != CASES.keys():
        pytest.skip("not all cases ran")
    rendered = verdicts_in(render([outcomes[name] for name in CASES]))
    assert verdicts_in(DOCUMENT.read_text()) == rendered, "run `make coverage`"
