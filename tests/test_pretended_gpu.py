"""The package on a GPU that isn't there: its memory is the CPU's, and foreign to the CPU.

Tensors that are left on the CPU, kernels that are called with tensors of the GPU, random numbers
of the other generator and the like are errors there, as on a GPU. Kernels, streams and times are
not shown: see ``pretended_gpu/device.cpp`` and docs/gpu.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FOLDER = HERE / "pretended_gpu"
pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or not sys.platform.startswith("linux"),
    reason="its place in PyTorch is taken, or this is no Linux",
)


def run(arguments: Sequence[str], **variables: str) -> str:
    """Runs Python; fails with what it printed."""
    paths = [str(FOLDER), str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # Ninja's
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": tools, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=600, env=env
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


BUILD = """
import sys
from torch.utils import cpp_extension

source, folder = sys.argv[1:]
cpp_extension.load(
    "pretended_gpu", [source], build_directory=folder, extra_cflags=["-O0"], is_python_module=False
)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pretended_gpu")
    run(["-c", BUILD, str(FOLDER / "device.cpp"), str(folder)])
    return str(folder / "pretended_gpu.so")


REFUSED = """
import torch

x = torch.ones(3, device="cuda")
assert (x.is_cuda, (x + 1).tolist(), x.sum().item()) == (True, [2.0, 2.0, 2.0], 3.0)
state = torch.cuda.get_rng_state()
torch.rand(3)
assert torch.equal(state, torch.cuda.get_rng_state()) and x.uniform_().is_cuda
assert not torch.equal(state, torch.cuda.get_rng_state())
import pyg_sar.kernels.ops
calls = {
    "same device": lambda: x + torch.ones(3),
    "at least two devices, cuda:0 and cpu": lambda: torch.mm(x[None], torch.ones(3, 1)),
    "at least two devices, cuda:0 and cuda:1": lambda: torch.mm(x[None], x[:, None].to("cuda:1")),
    "index_select": lambda: x.index_select(0, torch.arange(2)),
    "can't convert cuda": lambda: x.numpy(),
}
if pyg_sar.kernels.ops.built:
    moments = torch.ops.pyg_sar.column_moments
    calls["no kernel for the pretended GPU"] = lambda: moments(x.double()[None])
for text, call in calls.items():
    try:
        call()
    except (RuntimeError, TypeError) as error:
        assert text in str(error), (text, error)
    else:
        raise AssertionError(text)
"""


def test_it_refuses_what_a_gpu_refuses(library: str):
    run(["-c", REFUSED], PRETENDED_GPU=library)


@pytest.mark.parametrize("file", ["test_gpu_workers", "test_gpu_flows", "test_gpu_tools"])
def test_what_runs_on_gpus_runs_there(file: str, library: str):
    """The tests of `make test-gpu`, without its kernels, and without NCCL."""
    given = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"{file}.py")]
    given += ["-k", "not nccl"]
    found = run(given, PRETENDED_GPU=library, TRITON_INTERPRET="0")  # which finds no GPU
    assert "skipped" not in found and " passed" in found, found[-500:]
