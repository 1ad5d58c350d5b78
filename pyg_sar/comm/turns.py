"""Threads of one process that compute one at a time.

[Note: Taking turns]
Workers as threads gain little by computing at once: the interpreter runs one of them at a time.
They lose by it: PyTorch's Python layer (dispatch modes, tensor subclasses, lazily written code) and
PyTorch Geometric's generated modules are not made for several threads at the same instant, and a
debugger's prompt is of no use while others print into it. A thread therefore computes while it has
the turn, and passes it on wherever it waits for another worker. Who keeps it for long without
waiting there (in a debugger, or for something of its own that another worker must do first) loses
it, so that nothing can hang that would not hang without turns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

PATIENCE = 2.0  # Seconds that a thread may keep the turn while others want it.


class Turns:
    """The turn of a group of threads. See [Note: Taking turns]."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._number = 0
        self._member = threading.local()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for the turn, and keeps it for the block but where that is :meth:`passed`."""
        self._take()
        self._member.inside = True
        try:
            yield
        finally:
            self._member.inside = False
            self._give()

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """Lets others compute during the block, in which this thread waits for one of them."""
        inside = getattr(self._member, "inside", False)
        if inside:
            self._give()
        try:
            yield
        finally:
            if inside:
                self._take()

    def _take(self) -> None:
        with self._changed:
            while self._holder is not None:
                seen = self._number
                self._changed.wait(PATIENCE)
                if self._number == seen:
                    break  # Free, or kept for too long.
            self._holder = threading.get_ident()
            self._number += 1

    def _give(self) -> None:
        with self._changed:
            if self._holder == threading.get_ident():
                self._holder = None
                self._changed.notify()


class Free:
    """No turns: threads compute whenever they can."""

    def taken(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()

    passed = taken
