"""What a worker says when torchrun ends it because another one failed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from pyg_sar.errors import PygSarError


class TerminationNotice:
    """Turns torchrun's SIGTERM into the error that says why.

    As soon as a worker is lost, torchrun sends SIGTERM to all others, wherever they are: by
    default they end without a word. While installed, SIGTERM raises the error of the lost worker in
    the main thread. Where no worker is lost it ends the process as ever. It is installed only in
    torchrun's workers, from the main thread, and where the script has no handler of its own.

    Args:
        cause: Returns the error to raise, or ``None``.
    """

    def __init__(self, cause: Callable[[], PygSarError | None]) -> None:
        self._cause = cause
        self._installed = False
        self._process = os.getpid()

    def install(self) -> None:
        """Installs the handler where it applies."""
        applies = (
            "TORCHELASTIC_RUN_ID" in os.environ
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if applies:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Restores the default."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.remove()
        # A forked child (a data loader's) inherits the handler, but must not touch the store.
        error = self._cause() if os.getpid() == self._process else None
        if error is not None:
            raise error
        os.kill(os.getpid(), signum)
