"""Files and output of a script that several workers run: rank 0's are real, others are private.

[Note: private files] Every worker runs all of the script, so each writes all of its files. Rank 0
writes them where the script says; every other rank writes its own into a folder of its own, and
reads them back from there. Files that a worker has not written itself it reads where they are.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from pyg_sar.errors import PygSarError
from pyg_sar.files import TemporaryFolder

REMOVED = ""
"""Where a file is that was removed."""

_RUNNER = "pyg_sar.tools.script"
_DEVICES = ("/dev/", "/proc/", "/sys/")

Function = Callable[..., Any]


class PrivateFiles:
    """The files that a rank other than 0 writes. See [Note: private files].

    Its methods stand for functions of ``os`` and ``builtins``, which they get as first argument.
    """

    def __init__(self) -> None:
        self._made = TemporaryFolder("pyg_sar-files-")
        self.folder = str(self._made.path)
        self._places: dict[str, str] = {}
        self._partial: set[str] = set()

    def close(self) -> None:
        """Removes them."""
        self._made.close()

    def place(self, path: Any, writes: bool = False) -> Any:
        """Returns where a file is for this rank: ``path`` itself unless this rank writes it."""
        if not isinstance(path, str | bytes | os.PathLike):
            return path  # a descriptor, or an open file
        name = _absolute(path)
        if name.startswith((*_DEVICES, self.folder)):
            return path
        known = self._places.get(name)
        if writes:
            return known or self._new_place(name)
        if known is None:
            return path
        if known == REMOVED:
            raise FileNotFoundError(2, "No such file or directory", name)
        if name in self._partial:
            raise OSError(
                f"'{name}' was appended to by this run, whose workers have only what they added: "
                "it can't be read back. Write it anew (mode 'w'), or read it before"
            )
        return known

    def _new_place(self, name: str) -> str:
        parent = os.path.dirname(name)
        if not self._places.get(parent) and not os.path.isdir(parent):
            raise FileNotFoundError(2, "No such file or directory", name)
        self._places[name] = f"{self.folder}/{len(self._places)}-{os.path.basename(name)}"
        return self._places[name]

    # In the place of functions -----------------------------------------------

    def open(self, real: Function, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Opens a file; one that is written in this rank's folder."""
        if not set(mode) & set("wax+") or isinstance(file, int) or called_by_package():
            return real(self.place(file), mode, *args, **kwargs)
        name = _absolute(file)
        fresh = not self._places.get(name)
        if fresh and "x" in mode:
            mode = mode.replace("x", "w")  # Rank 0 looks whether it exists.
        place = self.place(file, writes=True)
        if fresh and place != file:
            if "r" in mode and os.path.exists(name):
                shutil.copyfile(name, place)
            elif "a" in mode:
                self._partial.add(name)
        if "w" in mode:
            self._partial.discard(name)
        return real(place, mode, *args, **kwargs)

    def stat(self, real: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Looks at a file."""
        known = isinstance(path, str | bytes | os.PathLike) and self._places.get(_absolute(path))
        if known == REMOVED:
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return real(known or path, *args, **kwargs)

    def mkdir(self, real: Function, path: Any, *args: Any, **kwargs: Any) -> None:
        """Makes a folder, unless it is there: rank 0 may have made it already."""
        name = _absolute(path)
        if called_by_package() or name.startswith(self.folder):
            real(path, *args, **kwargs)
        elif not self._places.get(name) and not os.path.isdir(path):
            real(self._new_place(name), *args, **kwargs)

    def remove(self, real: Function, path: Any, *args: Any, **kwargs: Any) -> None:
        """Removes a file, or a folder; what is not this rank's rank 0 removes."""
        if not isinstance(path, str | bytes | os.PathLike) or called_by_package():
            return real(path, *args, **kwargs)
        name = _absolute(path)
        if name.startswith(self.folder):
            return real(path, *args, **kwargs)
        for known in [n for n in self._places if n == name or n.startswith(name + os.sep)]:
            self._places[known] = REMOVED
        self._places[name] = REMOVED
        return None

    def rename(self, real: Function, source: Any, target: Any, **kwargs: Any) -> None:
        """Renames a file of this rank; what is not this rank's rank 0 renames."""
        if called_by_package():
            return real(source, target, **kwargs)
        old, new = _absolute(source), _absolute(target)
        place = self._places.get(old)
        if place:
            self._places[new] = place
            self._partial.discard(new)
        else:
            self._places[new] = f"{self.folder}/{len(self._places)}"
            self._partial.add(new)
        self._places[old] = REMOVED
        return None

    def change(self, real: Function, path: Any, *args: Any, **kwargs: Any) -> None:
        """Changes access or times of a file of this rank; rank 0 does so of all others."""
        if isinstance(path, int) or called_by_package():
            real(path, *args, **kwargs)
            return
        place = self._places.get(_absolute(path))
        if place:
            real(place, *args, **kwargs)


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def called_by_package() -> bool:
    """Returns whether the package itself, not the script, works with a file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "__main__":
            return False
        if name.startswith("pyg_sar.") and not name.startswith(_RUNNER):
            return True
        frame = frame.f_back
    return False


class NoInput(io.TextIOBase):
    """Stands for standard input, of which workers have none, or torchrun's, a share each."""

    def read(self, *_: Any) -> NoReturn:
        """Raises ``PygSarError``, as all that reads."""
        raise PygSarError(
            "The script reads standard input (sys.stdin, input(), breakpoint()), which workers "
            "haven't got under 'pyg-sar run': give arguments or a file"
        )

    readline = readlines = __next__ = read

    @property
    def buffer(self) -> NoReturn:
        """Raises ``PygSarError``."""
        self.read()


class Output:
    """Standard output or error of a process whose ranks may differ: what rank 0 writes
    (``is_first()``) goes to the process's own ``stream``.
    """

    def __init__(self, stream: Any, is_first: Callable[[], bool]) -> None:
        self.stream = stream
        self.is_first = is_first
        self.nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream if self.is_first() else self.nowhere, name)

    def __iter__(self) -> Any:
        return iter(self.stream)

    def close(self) -> None:
        """Leaves the process's own stream open."""
        self.nowhere.close()
