"""Builds the C++ kernels where PyTorch and a compiler are at hand; else the package does without.

Everything else about the package is in ``pyproject.toml``. The build needs the PyTorch that will
load the library: install with ``--no-build-isolation``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import setup


def options(sanitizer: str) -> tuple[list[str], list[str]]:
    """Options of the compiler and of the linker.

    Args:
        sanitizer: ``'address'`` or ``'thread'`` (``extensions/sanitize.sh``), or none.
    """
    # No -march=native: the loops have a version for each kind of processor.
    # Vectors are handed over in registers only where they are inlined (psabi).
    compiled = ["-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wno-psabi"]
    if not sanitizer:
        compiled += ["-O3", "-g0", "-fopenmp", "-DAT_PARALLEL_OPENMP=1"]
        return compiled, ["-fopenmp"]
    # One version of each loop: more take long to compile.
    compiled += ["-O1", "-g1", "-fno-omit-frame-pointer", "-DPYG_SAR_ONE_VERSION"]
    compiled.append(f"-fsanitize={sanitizer}")
    if sanitizer == "thread":  # which doesn't know the barriers of OpenMP
        threads = Path(__file__).parent.resolve() / "extensions" / "sanitizer_threads.h"
        compiled += ["-fopenmp-simd", "-include", str(threads)]
        return compiled, [f"-fsanitize={sanitizer}"]
    compiled += ["-fopenmp", "-DAT_PARALLEL_OPENMP=1"]
    return compiled, ["-fopenmp", f"-fsanitize={sanitizer}"]


def kernels() -> dict[str, Any]:
    """The arguments of ``setup`` that build ``pyg_sar/_kernels.so``.

    ``PYG_SAR_KERNELS=keep``: none, as an editable install in place has it already.
    """
    if os.environ.get("PYG_SAR_KERNELS") == "keep":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        print(f"pyg_sar: no C++ kernels are built ({error}); install with --no-build-isolation")
        return {}

    class OptionalBuild(BuildExtension):  # type: ignore[misc]
        """A build whose failure is told, and leaves the package without the library.

        The package has the reason in a file, and names it when it is used: pip shows no output.
        """

        def build_extensions(self) -> None:
            # In place, setuptools copies what was built from another folder.
            place = Path(__file__).parent.resolve() / "pyg_sar" / "_kernels.so"
            library = place if self.inplace else Path(self.get_ext_fullpath("pyg_sar._kernels"))
            reason = library.with_name("_no_kernels.txt")
            reason.unlink(missing_ok=True)
            try:
                super().build_extensions()
            except (Exception, SystemExit) as error:
                library.unlink(missing_ok=True)  # Of an earlier build.
                reason.parent.mkdir(parents=True, exist_ok=True)
                compiler = os.environ.get("CXX", "c++")
                found = shutil.which(compiler) is not None
                text = str(error) if found else f"there is no C++ compiler {compiler!r}"
                reason.write_text(" ".join(text.split())[:300])
                print(f"pyg_sar: the C++ kernels could not be built, doing without: {text}")

    sanitizer = os.environ.get("PYG_SAR_SANITIZER", "")
    compiled, linked = options(sanitizer)
    here = Path(__file__).parent
    sources, headers = (
        sorted(str(path.relative_to(here)) for path in here.glob(f"extensions/*.{kind}"))
        for kind in ("cpp", "h")
    )
    if sanitizer != "thread":
        sources.remove("extensions/sanitizer_threads.cpp")
    extension = CppExtension(
        "pyg_sar._kernels",
        sources,
        depends=headers,
        extra_compile_args=compiled,
        extra_link_args=linked,
        optional=True,
    )
    # Compiles in parallel where ninja is at hand: beside this Python, maybe, and not on the path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build = OptionalBuild.with_options(no_python_abi_suffix=True)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": build}}


setup(**kernels())
