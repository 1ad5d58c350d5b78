"""Small models as researchers write them give one process's numbers, or are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_edge_models  # noqa: F401
import small_odd_models  # noqa: F401
import small_trainings  # noqa: F401
import torch
from combinations import everything
from small_models import MODELS, SEED, make_graph

import pyg_sar
from pyg_sar.tensors import mapped, whole

REFUSED = {}
"""Models that are refused on several workers, and a part of the error's text."""

SHARES: dict[str, tuple[int, ...]] = {
    "2 workers": (),
    "3 workers": (2,),
    "3 parts": (0, 3, 5),
}
"""Which twelfths of the models run where; with ``--all`` all of them everywhere."""

ALWAYS = (
    *("ranking_of_all_pairs", "transposed_parameter_dropped", "dropped_across", "pairs_of_nodes"),
    *("layer_of_a_computed_weight", "layer_with_a_mean_over_all_nodes", "gps_layer"),
    *(
        "two_nodes_at_a_time",
        "rows_of_a_table_of_neighbors",
        "random_slopes",
        "runs_of_rows_written_beside_ids",
    ),
    *("transformer_over_all_nodes", "transformer_over_views", "multihead_attention"),
    *REFUSED,
    *("gradient_penalty", "meta_learning_by_functional_call"),
    *("norms_over_nodes_as_a_sequence", "layer_of_pairs"),
)
"""Models that always run, on 2 workers."""


def outcome(name: str, data: Any, ready: Callable[[Any], Any]) -> Any:
    """Returns the numbers of a model, or the text of its error."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    try:
        found = MODELS[name](data, ready)
        return mapped(lambda t: whole(t, "the test").detach().clone(), found)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def worker(root: Path, names: list[str]) -> dict[str, Any]:
    data = pyg_sar.load_partition(root)
    ready = lambda module: pyg_sar.distribute(module)  # noqa: E731
    return {name: outcome(name, data, ready) for name in names}


def fault(name: str, found: Any, expected: Any) -> str:
    """Returns how a model's outcome differs from what it has to be; empty where it doesn't."""
    if name in REFUSED or isinstance(found, str):
        known = isinstance(found, str) and name in REFUSED and REFUSED[name] in found
        return "" if known else f"{name}: {found if isinstance(found, str) else 'not refused'}"
    try:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    except AssertionError as error:
        return f"{name}: other numbers: {error}"
    return ""


@pytest.mark.parametrize("where", SHARES)
def test_each_gives_the_numbers_of_one_process_or_is_refused(where: str, tmp_path: Path) -> None:
    names = [n for k, n in enumerate(MODELS) if everything() or k % 12 in SHARES[where]]
    if where == "2 workers":
        names = list(dict.fromkeys([*ALWAYS, *names]))
    alone: Callable[[Any], Any] = lambda module: module  # noqa: E731
    expected = {name: outcome(name, make_graph(), alone) for name in names}
    assert [f"{n}: {text}" for n, text in expected.items() if isinstance(text, str)] == []
    count = int(where[0])
    pyg_sar.write_partitions(make_graph(), count, tmp_path / "parts")
    workers, parts = (1, count) if "parts" in where else (count, None)
    found = pyg_sar.launch(worker, workers, tmp_path / "parts", names, parts=parts, timeout=60.0)
    faults = [
        text
        for rank, theirs in enumerate(found)
        for name in names
        if rank == 0 or not isinstance(theirs[name], str)
        if (text := fault(name, theirs[name], expected[name]))
    ]
    assert not faults, "\n".join(faults)


def test_the_table_names_models() -> None:
    assert len(MODELS) >= 120 and REFUSED.keys() <= MODELS.keys()
