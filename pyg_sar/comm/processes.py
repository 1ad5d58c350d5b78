"""Processes of workers: who runs, by which addresses a host is reached, and how a worker ends.

[Note: a worker that can't say so] A worker that computes in code that keeps Python's lock sends no
heartbeats, and nor does one that was stopped. On its own host anyone can see which it is, in
``/proc``. For other hosts each worker starts a small process that answers this one question, over
TCP, to whoever knows the secret that the workers' store holds. It imports nothing but the standard
library, and ends with the worker.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

# Only the standard library at the top: the small process has nothing else.

INTERVAL = 1.0  # Seconds between two checks that the worker still runs.
ANSWER = 1.0  # Seconds that an answer may take.
RUNS, STOPPED, GONE = "runs", "stopped", "gone"


class Process(NamedTuple):
    """A process, as the kernel describes it."""

    state: str
    start: int
    """When it started, in clock ticks."""


def find_process(pid: int) -> Process | None:
    """Describes a process; ``None``: it has ended (or there is no ``/proc``)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; fields are counted from behind it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else Process(fields[0], int(fields[19]))


# Processes of a host ##########################################################


def this_process() -> dict[str, Any]:
    """Returns what tells this process from every other: host, process id, time of start."""
    return _describe(os.getpid())


def _describe(pid: int) -> dict[str, Any]:
    return {"host": _host(), "net": network(pid), "pid": pid, "start": _started(pid)}


def place(who: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns where a process is: its host, and the network there."""
    return who["host"], who.get("net")


def stopped_processes() -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yields this user's stopped processes (SIGSTOP) here, in this network: who, environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        found = find_process(pid)
        if found is not None and found.state == "T" and network(pid) == network():
            with contextlib.suppress(OSError):  # Another user's, or ended meanwhile.
                entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                yield _describe(pid), dict(e.split("=", 1) for e in entries if "=" in e)


def kill_stopped(who: Mapping[str, Any]) -> None:
    """Ends a process of this host that was stopped: SIGTERM would wait until it goes on."""
    if not is_dead(who) and is_stopped(who):
        with contextlib.suppress(OSError):  # Another user's, or ended meanwhile.
            os.kill(int(who["pid"]), signal.SIGKILL)


def is_dead(who: Mapping[str, Any]) -> bool:
    """Returns whether a process of this host is known to have ended (``False``: can't tell)."""
    if who["host"] != _host():
        return False
    if who["start"] is not None:
        return _started(int(who["pid"])) != who["start"]
    try:
        os.kill(int(who["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def is_stopped(who: Mapping[str, Any]) -> bool | None:
    """Returns whether a process was stopped (SIGSTOP); ``None`` where this host can't tell."""
    if who["host"] != _host() or (found := find_process(int(who["pid"]))) is None:
        return None
    return found.state == "T"


def _started(pid: int) -> int | None:
    """Returns a process's start time in clock ticks, or ``None``: ended, a zombie, no /proc."""
    found = find_process(pid)
    return None if found is None else found.start


@functools.cache
def _host() -> str:
    """Names the host; containers that share its name differ by their process namespace."""
    try:
        space = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        space = boot = ""
    return f"{socket.gethostname()} {boot} {space}"


def network(pid: int | str = "self") -> str:
    """Names a process's network namespace."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


# By which addresses ###########################################################


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards(host: str) -> str:
    """Returns this host's address on the route to another."""
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # Sends nothing: only the route is chosen.
        return str(probe.getsockname()[0])


def addresses_from(host: str) -> list[str]:
    """Returns the addresses by which another host may reach this one: the route's, if there is one;
    where ``host`` is this very host, all of its addresses.
    """
    mine = _address_towards(host)
    if not is_loopback(mine):
        return [mine]
    import psutil  # type: ignore[import-untyped]

    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    found = [e.address for e in entries if e.family == socket.AF_INET]
    return [address for address in found if not is_loopback(address)] or [mine]


def interface_to(host: str) -> str | None:
    """Returns the network interface by which this host reaches another, or itself: ``'eth0'``.

    ``None`` where it is reached within the machine only, or can't be found out.
    """
    try:
        mine = _address_towards(host)
        if is_loopback(mine):
            return None
        import psutil

        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == mine for entry in addresses):
                return str(name)
    except OSError:
        pass
    return None


# A process that answers for a worker ##########################################


class StatusServer:
    """The process that answers for this one, at the addresses by which other hosts reach it."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._secret = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((addresses[0] if len(addresses) == 1 else "", 0))
            listener.listen()
            self.where = [
                [address, listener.getsockname()[1], self._secret] for address in addresses
            ]
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
            pipe.write(self._secret.encode())

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


def ask(where: Sequence[Sequence[str | int]]) -> str | None:
    """Returns :data:`RUNS`, :data:`STOPPED` or :data:`GONE`; ``None`` where nobody answers."""
    for address, port, secret in where:
        target = str(address), int(port)
        with contextlib.suppress(OSError), socket.create_connection(target, ANSWER) as connection:
            connection.sendall(str(secret).encode())
            if answer := connection.recv(16).decode(errors="replace"):
                return answer
    return None


def serve(descriptor: int, pid: int) -> None:
    """Answers until the process ``pid``, this one's parent, has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends this one.
    secret = sys.stdin.buffer.read()
    listener = socket.socket(fileno=descriptor)
    listener.settimeout(INTERVAL)
    while os.getppid() == pid:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.settimeout(ANSWER)
            if hmac.compare_digest(connection.recv(len(secret)), secret):
                found = find_process(pid)
                told = GONE if found is None else STOPPED if found.state == "T" else RUNS
                connection.sendall(told.encode())


# The end of a worker #########################################################


class _Notice:
    """A handler of a signal in the main thread, where the script has none of its own."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self._installed = False

    def install(self) -> None:
        """Installs it where it applies."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(self.signum) is signal.SIG_DFL:
            signal.signal(self.signum, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Restores the default."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(self.signum, signal.SIG_DFL)
            self._installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class TerminationNotice(_Notice):
    """Turns torchrun's SIGTERM into the error that says why.

    As soon as a worker is lost, torchrun sends SIGTERM to all others, wherever they are: by
    default they end without a message. While installed, SIGTERM raises the error of the lost worker
    in the main thread. Where no worker is lost it ends the process as ever. It is installed only in
    torchrun's workers, from the main thread, and where the script has no handler of its own.

    Args:
        cause: Returns the error to raise, or ``None``.
    """

    def __init__(self, cause: Callable[[], Exception | None]) -> None:
        super().__init__(signal.SIGTERM)
        self._cause = cause
        self._process = os.getpid()

    def install(self) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            super().install()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.remove()
        # A forked child (a data loader's) inherits the handler, but must not touch the store.
        error = self._cause() if os.getpid() == self._process else None
        if error is not None:
            raise error
        os.kill(os.getpid(), signum)


class SignalNotice(_Notice):
    """Notes that a signal came, in place of ending the process. A context manager.

    Nothing is noted outside the main thread, and where the script has a handler of its own.

    Args:
        signum: The signal.

    Attributes:
        came: Whether it came, to this process.
    """

    def __init__(self, signum: int = signal.SIGUSR1) -> None:
        super().__init__(signum)
        self.came = False

    def __enter__(self) -> SignalNotice:
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.came = True


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
