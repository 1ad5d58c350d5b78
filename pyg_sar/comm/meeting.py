"""Finds the workers that share memory: they are on the same host, and prove it to each other.

[Note: the proof] Names can deceive: containers share a host's name, and network namespaces share
everything but the network. So each worker listens on a Unix socket without a file, says in the
workers' store where, and hands whoever dials a piece of memory that holds a number drawn at random;
the other reads that number there and compares it with the one in the store. A pair of
workers shares memory if both have read the other's number, and both know that.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import os
import secrets
import socket
import struct
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pyg_sar.comm.environment import WorkerInfo
from pyg_sar.comm.processes import network
from pyg_sar.comm.shared_memory import Link, Segment, SharedMemory, shares_memory
from pyg_sar.comm.store import AskedStore
from pyg_sar.errors import CommTimeoutError, PygSarError

VARIABLE = "PYG_SAR_SHARED_MEMORY"
"""The environment variable: ``auto`` (or not set), ``0`` never, ``1`` always or fail."""
HANDSHAKE = 20.0  # Seconds that one step of a handshake may take.
GREETING = 256  # Bytes of a handshake's packet.
TOKEN = 32  # Characters of a random number.


def read_switch(env: Mapping[str, str] | None = None) -> str:
    """Returns when workers of one host share memory: ``'auto'``, ``'0'`` or ``'1'``.

    Raises:
        ValueError: When the variable says something else.
    """
    value = (os.environ if env is None else env).get(VARIABLE) or "auto"
    if value not in ("auto", "0", "1"):
        raise ValueError(
            f"{VARIABLE}={value!r} must be 'auto' (share memory where workers can), '0' (never) or "
            f"'1' (an error where workers of a host can't)"
        )
    return value


def say(
    store: AskedStore, info: WorkerInfo, subject: str, value: Any, doing: str, timeout: float
) -> list[Any]:
    """Says something (that JSON has) in the workers' store; returns what each rank said.

    Raises:
        CommTimeoutError: Workers that said nothing; names what they were waited for ``doing``.
    """
    store.set(f"{subject}/{info.rank}", json.dumps(value))
    keys = [f"{subject}/{other}" for other in range(info.world_size)]
    end = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > end:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise CommTimeoutError(
                f"Rank {info.rank} waited {timeout:g} s for rank(s) {missing} {doing}"
            )
        time.sleep(0.002)
    return [json.loads(text) for text in store.multi_get(keys)]


class _Meeting:
    """One worker's part in finding its local peers."""

    def __init__(
        self,
        store: AskedStore,
        info: WorkerInfo,
        everyone: Sequence[Mapping[str, Any]],
        switch: str,
        timeout: float,
    ) -> None:
        self.store, self.info = store, info
        self.rank, self.world = info.rank, info.world_size
        self.everyone, self.switch, self.timeout = everyone, switch, timeout
        self.trouble = ""
        self.links: dict[int, tuple[socket.socket, ...]] = {}
        self.complete = False

    def say(self, subject: str, value: Any) -> list[Any]:
        """Says something and waits until all have; returns what each rank said."""
        doing = "to say whether they share memory"
        return say(self.store, self.info, subject, value, doing, self.timeout)

    def hold(self) -> dict[int, Link]:
        """Dials, answers, compares; returns the connections to those who share memory."""
        with contextlib.ExitStack() as stack:
            token, address, listener, memory = secrets.token_hex(TOKEN // 2), "", None, None
            if self.switch != "0" and self._hopeful():
                try:
                    listener = stack.enter_context(_listener())
                    memory = stack.enter_context(_memory(token))
                    address = listener.getsockname()[1:].decode()
                except (OSError, PygSarError) as error:
                    self.trouble = str(error)
            mine = {"address": address, "token": token, "switch": self.switch, "net": network()}
            self.said = self.say("memory", mine)
            dialled = []
            if memory is not None:
                peers = [peer for peer in range(self.rank) if self._fits(self.rank, peer)]
                dialled = [peer for peer in peers if self._dial(peer, memory)]
            callers = self.say("dialled", dialled)
            if listener is not None and memory is not None:
                self._answer(listener, memory, [r for r, d in enumerate(callers) if self.rank in d])
            for peer in dialled:
                self._finish(peer)
            agreed = self.say("agreed", sorted(self.links))
        for peer in list(self.links):
            if self.rank not in agreed[peer]:
                self._close(self.links.pop(peer), "it could not read this worker's memory")
        self._check_agreement(agreed)
        # All workers know of all pairs, and say the same.
        pairs = itertools.permutations(range(len(agreed)), 2)
        self.complete = all(one in agreed[other] for one, other in pairs)
        return {peer: _link(peer, *both) for peer, both in self.links.items()}

    def _hopeful(self) -> bool:
        return shares_memory() and any(
            who["host"] == self.everyone[self.rank]["host"]
            for rank, who in enumerate(self.everyone)
            if rank != self.rank
        )

    def _fits(self, a: int, b: int) -> bool:
        """Returns whether two workers are of one host and network, and listen."""
        same = self.everyone[a]["host"] == self.everyone[b]["host"]
        near = self.said[a]["net"] == self.said[b]["net"]
        return a != b and same and near and all(self.said[rank]["address"] for rank in (a, b))

    # Handshakes --------------------------------------------------------------

    def _dial(self, peer: int, memory: Segment) -> bool:
        made = []
        try:
            for number in range(2):
                made.append(_socket())
                made[number].connect(b"\0" + self.said[peer]["address"].encode())
                if not _same_user(made[number]):
                    raise OSError("another user answers where it should")
                greeting = {"rank": self.rank, "number": number, "for": self.said[peer]["token"]}
                _greet(made[number], greeting, memory)
        except OSError as error:
            self._close(made, error)
            return False
        self.links[peer] = tuple(made)
        return True

    def _answer(self, listener: socket.socket, memory: Segment, callers: Sequence[int]) -> None:
        """Accepts what those who dialled have dialled."""
        lines: dict[int, dict[int, socket.socket]] = {peer: {} for peer in callers}
        try:
            while any(len(both) < 2 for both in lines.values()):
                connection = listener.accept()[0]
                connection.settimeout(HANDSHAKE)
                caller = self._caller(connection) if _same_user(connection) else None
                if caller is None or caller[0] not in lines:
                    connection.close()  # A stranger.
                    continue
                _greet(connection, {}, memory)
                lines[caller[0]][caller[1]] = connection
        except OSError as error:
            self.trouble = str(error)
        for peer, both in lines.items():
            if len(both) == 2:
                self.links[peer] = (both[0], both[1])
            else:
                self._close(list(both.values()), "no answer")

    def _caller(self, connection: socket.socket) -> tuple[int, int] | None:
        """Returns who calls, and with which of its two connections; ``None`` without a proof."""
        try:
            greeting, number = _read_greeting(connection)
            peer, line = int(greeting["rank"]), int(greeting["number"])
            proven = greeting["for"] == self.said[self.rank]["token"]
        except (ValueError, KeyError, TypeError):
            return None
        return (peer, line) if proven and number == self.said[peer]["token"] else None

    def _finish(self, peer: int) -> None:
        """Reads the answers of a worker that was dialled."""
        try:
            token = self.said[peer]["token"]
            if any(_read_greeting(line)[1] != token for line in self.links[peer]):
                self._close(self.links.pop(peer), "its memory holds another number")
        except (OSError, ValueError) as error:
            self._close(self.links.pop(peer), error)

    def _close(self, lines: Sequence[socket.socket], why: object) -> None:
        self.trouble = str(why)
        for line in lines:
            line.close()

    # The result --------------------------------------------------------------

    def _check_agreement(self, agreed: Sequence[Sequence[int]]) -> None:
        """Tells of workers of one host that don't share memory; the same result on every rank."""
        pairs = [(a, b) for b in range(self.world) for a in range(b)]
        same = [p for p in pairs if self.everyone[p[0]]["host"] == self.everyone[p[1]]["host"]]
        failed = [(a, b) for a, b in same if b not in agreed[a] or a not in agreed[b]]
        must = [rank for rank, said in enumerate(self.said) if said["switch"] == "1"]
        wrong = [pair for pair in failed if set(pair) & set(must)]
        if wrong:
            self.close()
            a, b = wrong[0]
            raise PygSarError(
                f"{VARIABLE}=1 on rank(s) {must}, but ranks {a} and {b} of one host can't share "
                f"memory (seen by rank {self.rank}: {self.trouble or 'nothing'}). Set it to 'auto' "
                f"or '0' on all ranks to use the network between them"
            )
        wanted = [(a, b) for a, b in failed if self._fits(a, b)]
        if wanted and self.rank == wanted[0][1]:
            warnings.warn(
                f"Ranks {wanted} are on one host but can't share memory ({self.trouble}); their "
                f"rows travel by the network backend. {VARIABLE}=0 silences this",
                stacklevel=2,
            )

    def close(self) -> None:
        """Closes what was opened."""
        for both in self.links.values():
            for line in both:
                line.close()
        self.links = {}


def meet_local_peers(
    store: AskedStore,
    info: WorkerInfo,
    everyone: Sequence[Mapping[str, Any]],
    switch: str,
    timeout: float,
) -> SharedMemory | None:
    """Finds the workers that share memory with this one; all ranks call it. See [Note: the proof].

    The store has no keys of others, and raises once a worker has failed. ``everyone`` is what each
    rank is, from the rendezvous, ``switch`` is as :func:`read_switch`. A later wait may take
    ``timeout`` seconds, too.

    Returns:
        The local peers; ``None`` where there are none, on all ranks if every host is another.

    Raises:
        CommTimeoutError: Workers that said nothing.
        PygSarError: Workers of one host that can't share memory, where the switch is ``'1'``.
    """
    if len({who["host"] for who in everyone}) == len(everyone):
        return None
    meeting = _Meeting(store, info, everyone, switch, timeout)
    try:
        links = meeting.hold()
    except BaseException:
        meeting.close()
        raise
    return SharedMemory(info.rank, links, timeout, meeting.complete) if links else None


# Sockets #####################################################################


def _socket() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(HANDSHAKE)
    return connection


def _same_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to this user, by the kernel's word."""
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", found)[1] == os.getuid())


def _listener() -> socket.socket:
    listener = _socket()
    try:
        listener.bind(b"\0pyg_sar/" + secrets.token_hex(16).encode())  # No file: an abstract name.
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _memory(token: str) -> Iterator[Segment]:
    """Makes shared memory with a number in it."""
    segment = Segment(0, len(token))
    try:
        segment.data.copy_(torch.frombuffer(bytearray(token.encode()), dtype=torch.uint8))
        yield segment
    finally:
        # Not freed: a peer may still be about to read it.
        os.close(segment.descriptor)


def _greet(connection: socket.socket, greeting: Mapping[str, Any], memory: Segment) -> None:
    rights = array.array("i", [memory.descriptor])
    connection.sendmsg(
        [json.dumps(greeting).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    )


def _read_greeting(connection: socket.socket) -> tuple[dict[str, Any], str]:
    """Returns the other's greeting, and the number in its memory."""
    packet, rights, _, _ = connection.recvmsg(
        GREETING, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
    )
    number = ""
    for _, _, data in rights:
        (descriptor,) = array.array("i", data)
        try:
            number = os.pread(descriptor, TOKEN, 0).decode(errors="replace")
        finally:
            os.close(descriptor)
    return json.loads(packet), number


def _link(peer: int, messages: socket.socket, releases: socket.socket) -> Link:
    messages.setblocking(False)
    releases.setblocking(False)
    return Link(peer, messages, releases, set(), {}, [])
