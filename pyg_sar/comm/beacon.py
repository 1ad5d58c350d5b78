"""Says to other hosts whether a worker's process runs, without the worker's help.

[Note: a worker that can't say so] A worker that computes in code that keeps Python's lock sends no
heartbeats, and nor does one that was stopped. On its own host anyone can see which it is, in
``/proc``. For other hosts each worker starts a small process that answers this one question, over
TCP, to whoever knows the word that the workers' store holds. It imports nothing but the standard
library, and ends with the worker.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LOOK = 1.0  # Seconds between two looks whether the worker still is.
ANSWER = 1.0  # Seconds that an answer may take.
RUNS, STOPPED, GONE = "runs", "stopped", "gone"


class Process(NamedTuple):
    """A process, as the kernel describes it."""

    state: str
    start: int
    """When it started, in clock ticks."""


def look_at(pid: int) -> Process | None:
    """Describes a process; ``None``: it has ended (or there is no ``/proc``)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; fields are counted from behind it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else Process(fields[0], int(fields[19]))


class Beacon:
    """The process that answers for this one.

    Args:
        addresses: By which other hosts reach this one.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._word = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((addresses[0] if len(addresses) == 1 else "", 0))
            listener.listen()
            self.where = [[address, listener.getsockname()[1], self._word] for address in addresses]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(listener.fileno()), str(os.getpid())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        # Not as an argument, which every user of the host could read.
        pipe: Any = self._process.stdin
        with contextlib.suppress(OSError), pipe:
            pipe.write(self._word.encode())

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


def ask(where: Sequence[Sequence[str | int]]) -> str | None:
    """Returns :data:`RUNS`, :data:`STOPPED` or :data:`GONE`; ``None`` where nobody answers."""
    for address, port, word in where:
        target = str(address), int(port)
        with contextlib.suppress(OSError), socket.create_connection(target, ANSWER) as connection:
            connection.sendall(str(word).encode())
            if answer := connection.recv(16).decode(errors="replace"):
                return answer
    return None


def serve(descriptor: int, pid: int) -> None:
    """Answers until the process ``pid``, this one's parent, has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends this one.
    word = sys.stdin.buffer.read()
    listener = socket.socket(fileno=descriptor)
    listener.settimeout(LOOK)
    while os.getppid() == pid:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.settimeout(ANSWER)
            if hmac.compare_digest(connection.recv(len(word)), word):
                found = look_at(pid)
                told = GONE if found is None else STOPPED if found.state == "T" else RUNS
                connection.sendall(told.encode())


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
