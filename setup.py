"""Builds the C++ libraries where PyTorch and a compiler are at hand; else the package does without.

Everything else about the package is in ``pyproject.toml``. The build needs PyTorch, for the pager
the one that will load it: that of the environment whose pip builds, with or without isolation.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

TARGET = "0x020a000000000000"  # PyTorch 2.10, the oldest that the kernels run in
NAMES = {"_kernels": "the C++ kernels", "_pager": "the pager"}
HEADERS = tuple(f"torch/csrc/stable/{name}.h" for name in ("library", "ops", "tensor"))
HERE = Path(__file__).parent.resolve()
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
# Files that take long: as many are compiled at once as there are cores. The others of a library are
# compiled as one, as they read the same headers.
LARGE = ("pager_allocator", "factored_backward", "gather_sum", "factored", "attention_avx2")
LARGE += ("weighted_rows", "extremum", "attention_avx512", "norms")


def is_gcc() -> bool:
    """Says if the compiler is GCC, which takes a compiled header where options agree."""
    try:
        told = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True, check=False)
    except OSError:  # The build says that there is none.
        return False
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
        # -O3 makes 1.3 times the code, none of it faster: loops over registers say what they need
        # (processors.h). GCC's -O2 alone leaves loops of any length, marked or not, to scalars.
        vectors = ["-fvect-cost-model=dynamic"] if is_gcc() else []
        return [*compiled, "-O2", *vectors, "-fpeel-loops", "-g0"], []
    # One version of each loop: more take long to compile.
    compiled += ["-O1", "-g1", "-fno-omit-frame-pointer", "-DPYG_SAR_ONE_VERSION"]
    if sanitizer == "thread":  # which doesn't know the barriers of OpenMP
        compiled.append("-DPYG_SAR_STANDARD_THREADS")
    return [*compiled, f"-fsanitize={sanitizer}"], [f"-fsanitize={sanitizer}"]


class OptionalBuild(build_ext):
    """A build whose failure is told, and leaves the package without the library.

    The package has the reason in a file, and names it when it is used: pip shows no output.
    """

    def run(self) -> None:
        """Builds in a folder of its own; setuptools copies libraries where they are in place."""
        self.in_place = bool(self.inplace)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Returns a library's file, which is for any Python."""
        return f"{fullname.replace('.', os.sep)}.so"

    def build_extensions(self) -> None:
        """Compiles the files of all libraries at once, and links them."""
        self.compiler.set_executables(compiler_so_cxx=[*COMPILER, *self.compiler.compiler_so[1:]])
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", cores or 1))) as pool:
            units = [unit for extension in self.extensions for unit in self.units(extension)]
            places = {stem: place for place, stem in enumerate(LARGE)}
            units.sort(key=lambda unit: places.get(unit[1].stem, -1))
            headers = {e.name: pool.submit(self.compiled_header, e) for e in self.extensions}
            objects: dict[str, list[Future[str]]] = {e.name: [] for e in self.extensions}
            for extension, file in units:
                header = headers[extension.name]
                objects[extension.name].append(pool.submit(self.compiled, extension, file, header))
            for extension in self.extensions:
                self.link_optional(extension, objects[extension.name])

    def units(self, extension: Extension) -> list[tuple[Extension, Path]]:
        """Returns the files to be compiled: the large ones, and one that includes the others."""
        files = [Path(file).resolve() for file in extension.sources]
        small = [file for file in files if file.stem not in LARGE]
        unit = Path(self.build_temp).resolve() / f"{extension.name}_small.cpp"
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text("".join(f'#include "{file}"\n' for file in small))
        return [(extension, file) for file in [*files, unit] if file not in small]

    def compiled_header(self, extension: Extension) -> list[str]:
        """Compiles PyTorch's headers of the kernels once for all: half the work of a small file.

        Returns:
            The options that have GCC read them. Of another compiler, and of the pager, none.
        """
        self.check_compiler()
        if extension.name != "pyg_sar._kernels" or not is_gcc():
            return []
        header = Path(self.build_temp).resolve() / "torch_headers.h"
        header.write_text("".join(f"#include <{name}>\n" for name in HEADERS))
        folders = [f"-I{path}" for path in extension.include_dirs]
        flags = [*self.compiler.compiler_so[1:], *folders, *extension.extra_compile_args]
        self.spawn([*COMPILER, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
        return ["-include", str(header)]

    def check_compiler(self) -> None:
        """Raises an error where there is none."""
        if shutil.which(COMPILER[0]) is None:
            raise OSError(f"there is no C++ compiler {COMPILER[0]!r}")

    def compiled(self, extension: Extension, file: Path, header: Future[list[str]]) -> str:
        """Compiles a file, and returns the object."""
        result: list[str] = self.compiler.compile(
            [str(file)],
            output_dir=str(Path(self.build_temp).resolve()),
            include_dirs=extension.include_dirs,
            extra_postargs=[*extension.extra_compile_args, *header.result()],
        )
        return result[0]

    def link_optional(self, extension: Extension, objects: list[Future[str]]) -> None:
        """Links a library, or says why there is none."""
        library = Path(self.get_ext_fullpath(extension.name))
        installed = HERE / "pyg_sar" / library.name if self.in_place else library
        reason = installed.with_name(f"_no{library.stem}.txt")
        reason.unlink(missing_ok=True)
        try:
            self.compiler.link_shared_object(
                [one.result() for one in objects],
                str(library),
                libraries=extension.libraries,
                library_dirs=extension.library_dirs,
                extra_postargs=extension.extra_link_args,
                target_lang="c++",
            )
        except Exception as error:
            for earlier in (library, installed):
                earlier.unlink(missing_ok=True)
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(" ".join(str(error).split())[:300])
            print(f"pyg_sar: {NAMES[library.stem]} could not be built, doing without: {error}")


class AnyPython(bdist_wheel):
    """A wheel for any Python: the libraries don't use its API."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


def libraries() -> dict[str, Any]:
    """The arguments of ``setup`` that build ``pyg_sar/_kernels.so`` and ``pyg_sar/_pager.so``.

    The kernels use nothing but PyTorch's stable ABI, and run in PyTorch 2.10 and all later ones, in
    any Python. The pager replaces PyTorch's allocator, and runs in the PyTorch it is built with.

    ``PYG_SAR_KERNELS=keep``: none, as an editable install in place has them already.
    """
    if os.environ.get("PYG_SAR_KERNELS") == "keep":
        return {}
    # Not imported, which takes seconds. Where pip isolates the build, packages of the environment
    # are not on the path.
    torch = find_spec("torch") or PathFinder.find_spec("torch", [sysconfig.get_path("platlib")])
    if torch is None or torch.origin is None:
        print(
            "pyg_sar: no C++ kernels are built without PyTorch: install it before, into the same "
            "environment (from another place: --no-build-isolation)"
        )
        return {}
    installed = Path(torch.origin).parent
    compiled, linked = options(os.environ.get("PYG_SAR_SANITIZER", ""))
    names = sorted(path.name for path in (HERE / "extensions").iterdir())
    pager = [name for name in names if name.startswith("pager")]
    kernels = [name for name in names if name not in pager]

    def extension(
        name: str, files: list[str], macros: list[str], linked_with: list[str]
    ) -> Extension:
        return Extension(
            name,
            [f"extensions/{file}" for file in files if file.endswith(".cpp")],
            depends=[f"extensions/{file}" for file in files],
            include_dirs=[
                str(installed / "include" / place) for place in ("", "torch/csrc/api/include")
            ],
            library_dirs=[str(installed / "lib")],
            libraries=linked_with,
            extra_compile_args=compiled + macros,
            extra_link_args=linked,
            language="c++",
            optional=True,
        )

    # The pager first: it needn't wait for the kernels' headers.
    extensions = [
        extension("pyg_sar._pager", pager, [], ["torch_cpu", "c10"]),
        extension("pyg_sar._kernels", kernels, [f"-DTORCH_TARGET_VERSION={TARGET}"], ["torch_cpu"]),
    ]
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": OptionalBuild, "bdist_wheel": AnyPython},
    }


setup(**libraries())
