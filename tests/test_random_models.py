"""Random layers on random graphs and partitions: what one process says, or refused by name.

A few dozen draws in the ordinary run, the same ones every time; a thousand new ones with
``make test-random`` (``--hypothesis-profile thousand``).
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from coverage_case import Case, dressed
from coverage_judge import exact_errors
from coverage_modules import TABLES
from coverage_run import Pass, build, one_pass
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from oracle import make_graph, workers
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy

TOLERANCE = 1e-8  # some draws are badly conditioned: a variance of two nearly equal numbers
LEAST = 1e-3  # gradients are of the order of 1; those that cancel are rounding noise
ORDINARY = 40
LAYERS = {
    f"{name}, {option}": case
    for kind in ("conv", "aggr", "norm")
    for name, options in TABLES[kind][1].items()
    for option, case in options.items()
    if not (case.refused or case.unavailable or case.no_layer or case.default_double)
    and case.graph in ("random", "sorted")
}
POLICIES = st.builds(
    SARPolicy,
    mode=st.sampled_from([1, 1, 2, 3]),
    prefetch=st.integers(0, 1),
    message_budget=st.sampled_from([None, 1, 300, 2000]),
    strategy=st.sampled_from(["auto", "auto", "chunked"]),
)


@st.composite
def graphs(draw: st.DrawFn) -> Data:
    """Directed, with or without isolated nodes, loops and duplicates; or hardly any edges."""
    nodes, edges = draw(st.integers(1, 30)), draw(st.integers(0, 90))
    data = make_graph(nodes, edges, draw(st.integers(0, 10_000)))
    keep = torch.ones(data.num_edges, dtype=torch.bool)
    source, target = data.edge_index
    if not draw(st.booleans()):
        keep &= source != target
    if draw(st.booleans()):
        keep &= target >= draw(st.integers(0, nodes))
    data = data.edge_subgraph(keep)
    data.num_nodes = nodes
    return dressed(data, torch.Generator().manual_seed(draw(st.integers(0, 100))))


@st.composite
def parts(draw: st.DrawFn, nodes: int, world: int) -> Tensor:
    """Any assignment, also one that leaves parts empty."""
    used = draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    seed = draw(st.integers(0, 10_000))
    pick = torch.randint(len(used), (nodes,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(used)[pick]


def two_passes(case: Case, module: torch.nn.Module, data: Data) -> list[Pass]:
    """From the same parameters; the second with everything that the first has kept."""
    start = copy.deepcopy(module.state_dict())
    first = one_pass(case, module, data)
    module.load_state_dict(start)
    return [first, one_pass(case, module, data)]


def worker(root: Path, case: Case, plain: torch.nn.Module, policy: SARPolicy) -> list[Pass]:
    data = pyg_sar.load_partition(root)
    return two_passes(case, pyg_sar.distribute(copy.deepcopy(plain), policy), data)


def is_finite(found: Pass) -> bool:
    tensors = [*found.outs, *found.input_grads.values(), *found.parameter_grads.values()]
    return all(bool(t.isfinite().all()) for t in tensors if t is not None)


def difference(
    case: Case, graph: Data, world: int, part: Tensor, policy: SARPolicy, folder: Path
) -> str | None:
    """What is wrong, or an empty string; ``None`` where PyG itself has no (finite) answer."""
    plain = build(case)
    single = copy.deepcopy(plain)
    try:
        expected = two_passes(case, single, graph)
    except (RuntimeError, IndexError, ValueError):
        return None
    if not all(map(is_finite, expected)):
        return None
    root = folder / "parts"
    pyg_sar.write_partitions(graph, world, root, part, overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyg_sar.errors.OneShotWarning)
        everyone = workers(worker, world, root, case, plain, policy)
    for step in range(2):
        found = exact_errors([passes[step] for passes in everyone], expected[step], LEAST)
        wrong = {key: value for key, value in found.items() if not value <= TOLERANCE}
        if graph.num_edges == 0:  # one process gives zeros to what its empty messages read
            zeros = {
                k for k, g in expected[step].parameter_grads.items() if g is None or not g.any()
            }
            wrong = {k: v for k, v in wrong.items() if k.split(".grad@")[0] not in zeros}
        if wrong:
            return f"pass {step + 1}: {wrong}"
    return ""


@given(st.data())
@settings(
    max_examples=ORDINARY
    if settings.get_current_profile_name() == "pyg_sar"
    else settings.default.max_examples,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
def test_random_models(tmp_path: Path, data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(LAYERS)), label="layer")
    case, graph = LAYERS[name], data.draw(graphs())
    if case.graph == "sorted":
        graph = graph.sort(sort_by_row=False)
    world = data.draw(st.integers(1, 5), label="workers")
    part = data.draw(parts(graph.num_nodes, world))
    policy = data.draw(POLICIES, label="policy")
    note(f"{graph.num_nodes} nodes, edges {graph.edge_index.tolist()}, parts {part.tolist()}")
    wrong = difference(case, graph, world, part, policy, tmp_path)
    assume(wrong is not None)
    assert not wrong, wrong
