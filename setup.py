"""Builds the C++ kernels where PyTorch and a compiler are at hand; else the package does without.

Everything else about the package is in ``pyproject.toml``. The build needs the PyTorch that will
load the library: install with ``--no-build-isolation``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup


def kernels() -> dict[str, Any]:
    """The arguments of ``setup`` that build ``pyg_sar/_kernels.so``."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        print(f"pyg_sar: no C++ kernels are built ({error}); install with --no-build-isolation")
        return {}

    class OptionalBuild(BuildExtension):  # type: ignore[misc]
        """A build whose failure is told, and leaves the package without the library."""

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except (Exception, SystemExit) as error:
                print(f"pyg_sar: the C++ kernels could not be built, doing without: {error}")

    sources = (
        *("segments", "transpose", "gather_sum", "edge_dot", "extremum", "attention"),
        "functional",
    )
    extension = CppExtension(
        "pyg_sar._kernels",
        [f"extensions/{name}.cpp" for name in sources],
        depends=[
            f"extensions/{name}.h"
            for name in ("segments", "vectors", "gather_sum", "attention", "attention_loops")
        ],
        # No -march=native: the loops have a version for each kind of processor.
        extra_compile_args=[
            "-O3",
            "-g0",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-Wno-psabi",  # vectors are handed over in registers only where they are inlined
            "-fopenmp",
            "-fvisibility=hidden",
            "-DAT_PARALLEL_OPENMP=1",
        ],
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    # Compiles in parallel where ninja is at hand: beside this Python, maybe, and not on the path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build = OptionalBuild.with_options(no_python_abi_suffix=True)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": build}}


setup(**kernels())
