"""Builds the C++ libraries where PyTorch and a compiler are at hand; else the package does without.

Everything else about the package is in ``pyproject.toml``. The build needs PyTorch, for the pager
the one that will load it: install with ``--no-build-isolation``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

TARGET = "0x020a000000000000"  # PyTorch 2.10, the oldest that the kernels run in
NAMES = {"_kernels": "the C++ kernels", "_pager": "the pager"}
HEADERS = tuple(f"torch/csrc/stable/{name}.h" for name in ("library", "ops", "tensor"))
COMPILER = os.environ.get("CXX", "c++")
# Files that take long. The others of a library are compiled as one, as they read the same headers.
LARGE = {"attention_avx2", "attention_avx512", "extremum", "factored", "factored_backward"}
LARGE |= {"gather_sum", "norms", "pager_ops", "weighted_rows"}


def is_gcc() -> bool:
    """Says if the compiler is GCC, which takes a compiled header where options agree."""
    if shutil.which(COMPILER) is None:
        return False
    told = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=False)
    return "Free Software Foundation" in told.stdout


def options(sanitizer: str) -> tuple[list[str], list[str]]:
    """Options of the compiler and of the linker.

    Args:
        sanitizer: ``'address'`` or ``'thread'`` (``extensions/sanitize.sh``), or none.
    """
    # No -march=native: the loops have a version for each kind of processor.
    # Vectors are handed over in registers only where they are inlined (psabi).
    # Of OpenMP there are the loops over vectors alone: threads are PyTorch's.
    compiled = ["-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
    compiled += ["-fopenmp-simd", "-Wno-psabi"]
    if not sanitizer:
        # -O3 makes 1.3 times the code, none of it faster: loops say what they need (processors.h).
        return [*compiled, "-O2", "-fpeel-loops", "-g0"], []
    # One version of each loop: more take long to compile.
    compiled += ["-O1", "-g1", "-fno-omit-frame-pointer", "-DPYG_SAR_ONE_VERSION"]
    if sanitizer == "thread":  # which doesn't know the barriers of OpenMP
        compiled.append("-DPYG_SAR_STANDARD_THREADS")
    return [*compiled, f"-fsanitize={sanitizer}"], [f"-fsanitize={sanitizer}"]


def libraries() -> dict[str, Any]:
    """The arguments of ``setup`` that build ``pyg_sar/_kernels.so`` and ``pyg_sar/_pager.so``.

    The kernels use nothing but PyTorch's stable ABI, and run in PyTorch 2.10 and all later ones, in
    any Python. The pager replaces PyTorch's allocator, and runs in the PyTorch it is built with.

    ``PYG_SAR_KERNELS=keep``: none, as an editable install in place has them already.
    """
    if os.environ.get("PYG_SAR_KERNELS") == "keep":
        return {}
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        print(f"pyg_sar: no C++ kernels are built ({error}); install with --no-build-isolation")
        return {}

    class OptionalBuild(cpp_extension.BuildExtension):  # type: ignore[misc]
        """A build whose failure is told, and leaves the package without the library.

        The package has the reason in a file, and names it when it is used: pip shows no output.
        """

        def build_extensions(self) -> None:
            extensions = self.extensions
            for extension in extensions:
                self.extensions = [extension]
                self.build_optional(extension.name)
            self.extensions = extensions

        def build_optional(self, name: str) -> None:
            # In place, setuptools copies what was built from another folder.
            file = f"{name.rpartition('.')[2]}.so"
            place = Path(__file__).parent.resolve() / "pyg_sar" / file
            library = place if self.inplace else Path(self.get_ext_fullpath(name))
            reason = library.with_name(f"_no{library.stem}.txt")
            reason.unlink(missing_ok=True)
            try:
                super().build_extensions()
            except (Exception, SystemExit) as error:
                library.unlink(missing_ok=True)  # Of an earlier build.
                reason.parent.mkdir(parents=True, exist_ok=True)
                found = shutil.which(COMPILER) is not None
                text = str(error) if found else f"there is no C++ compiler {COMPILER!r}"
                reason.write_text(" ".join(text.split())[:300])
                what = NAMES[library.stem]
                print(f"pyg_sar: {what} could not be built, doing without: {text}")

        def build_extension(self, extension: Extension) -> None:
            folder = Path(self.build_temp).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            small = [Path(file) for file in extension.sources if Path(file).stem not in LARGE]
            unit = folder / f"{extension.name}_small.cpp"
            unit.write_text("".join(f'#include "{file.resolve()}"\n' for file in small))
            extension.sources = [*(set(extension.sources) - {str(f) for f in small}), str(unit)]
            extension.sources.sort()
            # Reading PyTorch's headers is half the work of a small file: GCC does it once for all.
            if extension.name == "pyg_sar._kernels" and is_gcc():
                header = folder / "torch_headers.h"
                header.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
                folders = [f"-I{path}" for path in extension.include_dirs]
                flags = [*self.compiler.compiler_so[1:], *folders, *extension.extra_compile_args]
                made = ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
                self.spawn([COMPILER, *flags, *made])
                extension.extra_compile_args += ["-include", str(header)]
            super().build_extension(extension)

    class AnyPython(bdist_wheel):
        """A wheel for any Python: the libraries don't use its API."""

        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    sanitizer = os.environ.get("PYG_SAR_SANITIZER", "")
    compiled, linked = options(sanitizer)
    folder = Path(__file__).parent / "extensions"
    names = sorted(path.name for path in folder.iterdir())
    pager = [name for name in names if name.startswith("pager")]

    def extension(
        name: str, files: list[str], macros: list[str], linked_with: list[str]
    ) -> Extension:
        return Extension(
            name,
            [f"extensions/{file}" for file in files if file.endswith(".cpp")],
            depends=[f"extensions/{file}" for file in files],
            include_dirs=cpp_extension.include_paths(),
            library_dirs=cpp_extension.library_paths(),
            libraries=linked_with,
            extra_compile_args=compiled + macros,
            extra_link_args=linked,
            language="c++",
            optional=True,
        )

    kernels = [name for name in names if name not in pager]
    extensions = [
        extension("pyg_sar._kernels", kernels, [f"-DTORCH_TARGET_VERSION={TARGET}"], ["torch_cpu"]),
        extension("pyg_sar._pager", pager, [], ["torch_cpu", "c10"]),
    ]
    # Compiles in parallel where ninja is at hand: beside this Python, maybe, and not on the path.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    build = OptionalBuild.with_options(no_python_abi_suffix=True)
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": build, "bdist_wheel": AnyPython},
    }


setup(**libraries())
