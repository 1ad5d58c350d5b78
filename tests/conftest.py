"""What all tests share: thread counts, the folder of real graphs, and Hypothesis settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

# Workers share the cores: one thread each, set before torch starts its pools; inherited by them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1048576")
os.environ.setdefault("MPLBACKEND", "Agg")
# A thread that wakes lets the running one go on: it would only wait, spinning, for what that holds.
with suppress(AttributeError, OSError):  # Elsewhere than on Linux, or not allowed.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Triton reads this when it is imported; `make test-gpu` sets 0, and its kernels run on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Whether there is a GPU is asked of its driver without starting it: workers are forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Arrow, which pandas imports, would start a thread: then nothing could be forked.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

import combinations
import pytest
import torch
from forked_workers import Templates, keep_compiled_templates, seed_what_is_here, templates
from hosted_workers import hosted_workers, why_not
from hypothesis import HealthCheck, settings
from oracle import Partitions, make_graph
from torch_geometric.data import Data

from pyg_sar.comm.group import finalize
from pyg_sar.comm.launch import _Worker
from pyg_sar.kernels import ops


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of single test files, which pytest wants here."""
    parser.addoption(
        "--coverage-out",
        metavar="FILE",
        default=None,
        help="tests/test_coverage.py writes what it found to FILE (docs/what-runs.md)",
    )
    parser.addoption(
        "--operators",
        action="store_true",
        help="tests/test_operators.py takes more of PyTorch's samples of each operator",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="all combinations of parameters and policies, which take a few times as long",
    )
    parser.addoption(
        "--hosted",
        action="store_true",
        help="each worker of a test is a part: one of several that a process hosts",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tells all tests, and what they start, whether all combinations are asked for.

    The document of ``--coverage-out`` has all of them.
    """
    if config.getoption("--all") or config.getoption("--coverage-out"):
        os.environ[combinations.SWITCH] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first: what several processes share must not end with one of them."""
    for item in items if config.getoption("--hosted") else ():
        if why := why_not(item):
            item.add_marker(pytest.mark.skip(reason=f"not of hosted parts: {why}"))
    others = set(combinations.left_out(items))
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not go through it time and again."""
    gc.collect()
    gc.freeze()


# By what they take, of files that take more than a hundredth of all (pytest --durations=0 says).
LONGEST = (
    "test_examples",
    "test_exactness",
    "test_documents",
    "test_plan",
    "test_cli",
    "test_replicate",
    "test_contract_state",
    "test_wire",
    "test_larger_than_memory",
    "test_contract",
    "test_failures",
    "test_workers_alike",
    "test_second_derivatives",
    "test_small_models",
    "test_compiled",
    "test_ledger",
    "test_norm",
    "test_calls",
    "test_fused_attention",
    "test_own_attention",
    "test_pushed_attention",
    "test_outside",
    "test_random_messages",
    "test_transform_first",
    "test_dependence",
    "test_contract_use",
    "test_attention_ops",
    "test_lightning",
    "test_hosting",
    "test_hand_written",
    "test_hetero",
    "test_changed_layers",
    "test_global_view",
    "test_message_flow",
    "test_coverage",
    "test_checkpoint",
    "test_message_norms",
    "test_no_edges",
    "test_adjacency",
    "test_pager",
)
REPOSITORY = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)
keep_compiled_templates()
seed_what_is_here()
# The processes that tests start compile the package once, not each for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
settings.register_profile(
    "pyg_sar",
    deadline=None,  # No test depends on the clock.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "thousand", settings.get_profile("pyg_sar"), max_examples=1000, derandomize=False
)
settings.load_profile("pyg_sar")


def shared_file(name: str) -> Path:
    """A file of the folder of real graphs beside the repository, or a skip that says why."""
    path = REPOSITORY.parent / "shared" / "data" / name
    if not path.exists():
        pytest.skip(f"the real graph '{name}' is not in {path.parent}")
    return path


@pytest.fixture(scope="session")
def shared_data():
    """``shared_data('cora.npz')``: the path of a real graph; skips where it is absent."""
    return shared_file


@pytest.fixture(scope="module")
def graph() -> Data:
    """The graph of most tests; a file may have one of its own."""
    return make_graph()


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> Partitions:
    """Writes partitions, once each."""
    return Partitions(tmp_path_factory.mktemp("partitions"))


@pytest.fixture(scope="module")
def root(graph: Data, partitions: Partitions) -> Path:
    """The graph in three parts; a file may have a folder of its own."""
    return partitions(graph, 3, "random")


@pytest.fixture
def kernels() -> None:
    """Skips where the kernels were not built."""
    reason = ops.why_missing()
    if reason is not None:
        pytest.skip(f"no C++ kernels: {reason}")


@pytest.fixture
def double() -> Iterator[None]:
    """The default dtype is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[Templates]:
    """Launches fork their workers from these processes, for the fixtures of modules as well."""
    with templates() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Worker, "start", found.start)
        yield found


@pytest.fixture(scope="session", autouse=True)
def hosted(pytestconfig: pytest.Config) -> Iterator[None]:
    """With ``--hosted``, launches make each worker a hosted part."""
    with hosted_workers() if pytestconfig.getoption("--hosted") else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_to_collect() -> None:
    """Of what a file's tests find: the collector, which hosted parts call, goes through theirs."""
    gc.freeze()


@pytest.fixture(autouse=True)
def surroundings() -> Iterator[None]:
    """Paths and variables that a test leaves go: with others, all later workers start from nothing.

    That takes seconds each.
    """
    variables, paths = dict(os.environ), list(sys.path)
    yield
    sys.path[:] = paths
    for name in variables.keys() | os.environ.keys():
        if not name.startswith("PYTEST_") and os.environ.get(name) != variables.get(name):
            os.environ.pop(name, None)
            os.environ.update({name: variables[name]} if name in variables else {})


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test starts from the same random state, and without code that PyG wrote for others.

    PyG's ``Sequential`` keeps its code under a number that Python's generator draws: after
    ``random.seed(3)`` in two tests, a model of the second one ran the code of the first.
    """
    torch.manual_seed(0)
    for name in [name for name in sys.modules if name.startswith("torch_geometric.nn.sequential_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def communicator_of_its_own() -> Iterator[None]:
    """What a test, or a script that it runs, leaves open isn't the next test's."""
    yield
    finalize()


@pytest.fixture(autouse=True)
def kernels_on_small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one process they are left out where there are too few edges to be worth it."""
    monkeypatch.setattr("pyg_sar.nn.one_process.FEWEST_EDGES", 0)
