"""Messages between workers: their names, their bytes, who waits for one in vain, and failures.

[Note: waiting in vain] Messages from one worker to another by one way (a channel) have numbers: the
n-th that is sent is the n-th that is received, and both sides name it alike: layer, phase, kind,
dtype, shape. Where they name it differently, or where the one that should send it never will, the
other waits in vain. So take the workers that wait, and those that have ended. Strike out whoever
waits for nothing but messages that are posted under the same name (they may be on their way), or
that a worker which is not in the set, as it computes, may post yet; go on until nobody is struck
out. Whoever is left waits for a worker that is left, which posts no more: it waits in vain, however
long the timeout is. Nobody who only computes is ever suspected, and nobody whose messages are slow.

A mean over nodes has no layer's name: the line of the program that asks for it stands for it.

The rule needs a moment at which all of them waited. Each state has a number that changes with
every wait: all were waiting at once if each is found, later than all were found so for the first
time, to wait still in the wait of that number.

[Note: the failure record] The first worker that notices a failure writes a record of it; all others
read it and raise the same error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.comm.issuer import Progress
from pyg_sar.errors import LostWorkerError, MismatchError, PygSarError, WorkerError
from pyg_sar.ledger import Label, Ledger, spoken
from pyg_sar.wording import counted

# Values as bytes ##############################################################

Outgoing = Tensor | Callable[[], Tensor | None] | None
"""Content of a message: a tensor, a function that packs it on the issuing thread, or nothing."""

COLLECTIVE = -1
"""The peer that ledgers are told for collectives."""

SUM: Label = ("", "", "sum")
GATHER: Label = ("", "", "gather")
BROADCAST: Label = ("", "", "broadcast")
OBJECT: Label = ("", "", "object")
BARRIER: Label = ("", "", "barrier")


def pack(send: Outgoing) -> Tensor:
    """Returns what to send, contiguous; an empty tensor for nothing."""
    tensor = send() if callable(send) else send
    if tensor is None:
        return torch.empty(0)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def count(
    ledgers: Sequence[Ledger],
    label: Label,
    sends: Mapping[int, int],
    recvs: Mapping[int, int],
    transport: str,
) -> None:
    """Tells ledgers of the bytes that went to and came from single ranks."""
    for ledger in ledgers:
        for peer, size in sends.items():
            ledger.transfer(label, peer, sent=size, received=0, transport=transport)
        for peer, size in recvs.items():
            ledger.transfer(label, peer, sent=0, received=size, transport=transport)


def count_all(
    ledgers: Sequence[Ledger], label: Label, sent: int, received: int, transport: str
) -> None:
    """Tells ledgers of a collective."""
    for ledger in ledgers:
        ledger.transfer(label, COLLECTIVE, sent=sent, received=received, transport=transport)


def num_bytes(tensor: Tensor) -> int:
    """Returns the size of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def encode(obj: Any) -> Tensor:
    """Returns the bytes of ``obj`` as JSON; ``TypeError``: it has no such form."""
    try:
        text = json.dumps(obj)
    except (TypeError, ValueError) as error:
        raise TypeError(f"'obj' must have a JSON form: {error}") from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Returns the object whose :func:`encode` is ``data``."""
    return json.loads(data.cpu().numpy().tobytes())


# Names, and who waits for which ###############################################

SEND, RECEIVE, MEET = "send", "receive", "meet"
"""Channels of a backend: messages between two workers, and collectives."""
WROTE, READ = "wrote", "read"
"""Channels of shared memory, each followed by the subject."""
PARTNERS = {SEND: RECEIVE, RECEIVE: SEND, MEET: MEET, WROTE: READ, READ: WROTE}

MOST_NAMED = 8  # Workers in an error.

REMEDY = (
    "Every rank must call the same layers, losses and backward() in the same order, with tensors "
    "of the same dtypes and widths: look for a call that only some ranks make, or a hook that only "
    "some have"
)


class Post(NamedTuple):
    """A message that is waited for, until it is received or taken."""

    channel: str
    peer: int
    number: int
    """Of those to or from this peer by this channel."""
    mark: int
    """Of its name: :func:`mark_of`."""
    name: str


class State(NamedTuple):
    """The messages that a worker waits for, and those that it has posted."""

    wait_number: int
    """Another number for every wait."""
    doing: str
    waits: Sequence[Post]
    posted: Mapping[tuple[str, int], tuple[int, int]]
    """Number and mark of the last post by channel and peer."""


_LIBRARIES = ("pyg_sar", "torch", "torch_geometric", "contextlib")


def called_from(label: Label) -> str:
    """Returns a label in words, and the program's line that asks for it: ``'... at train.py:12'``.

    For operations that no layer names: every worker must ask for them from the same line.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            break
        frame = frame.f_back
    # torch.fx numbers what it generates, in each part of a process anew: '<eval_with_key>.7'.
    file = os.path.basename(frame.f_code.co_filename).partition(">.")[0]
    return f"{spoken(label)} at {file}:{frame.f_lineno}"


@lru_cache(4096)
def name_of(where: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Names a message: the same on both sides."""
    return f"{where}, {str(dtype).removeprefix('torch.')} {list(shape)}"


def mark_of(name: str) -> int:
    """Returns a number of 30 bits for a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 2


def unlike(rank: int, src: int, expected: str, got: str) -> MismatchError:
    """Returns the error of a message that is not the one that is expected."""
    return MismatchError(
        f"Rank {rank} expects '{expected}' from rank {src}, which sends '{got}'. {REMEDY}"
    )


class Posts:
    """Notes what a worker posts. Written by its issuing thread, read by any."""

    def __init__(self) -> None:
        self.wait_number = 0
        self.since = 0.0
        self.waits: tuple[Post, ...] = ()
        self.failed: tuple[Post, ...] = ()
        """The messages that were waited for when a wait failed."""
        self._posted: dict[tuple[str, int], tuple[int, int]] = {}

    def note(self, channel: str, peer: int, name: str) -> Post:
        """Notes a message that nobody need wait for."""
        number = self._posted.get((channel, peer), (0, 0))[0] + 1
        mark = mark_of(name)
        self._posted[channel, peer] = number, mark
        return Post(channel, peer, number, mark, name)

    @contextmanager
    def waiting(self, messages: Sequence[tuple[str, int, str]]) -> Iterator[Sequence[Post]]:
        """Notes messages ``(channel, peer, name)`` that are waited for in the block."""
        self.wait_number += 1
        self.since = time.monotonic()
        self.waits = tuple([self.note(*message) for message in messages])
        try:
            yield self.waits
        except BaseException:
            self.failed = self.waits
            raise
        finally:
            self.waits = ()
            self.wait_number += 1

    def for_long(self, seconds: float) -> bool:
        """Returns whether one wait has taken so long."""
        return bool(self.waits) and time.monotonic() - self.since >= seconds

    def state(self, doing: str) -> State:
        """Returns what is waited for and posted now; no waits while these change."""
        wait_number, waits, posted = self.wait_number, self.waits, self._posted.copy()
        return State(wait_number, doing, waits if wait_number == self.wait_number else (), posted)


class MemberPosts(Posts):
    """Notes what is posted within a group of some of the workers, by their ranks among all."""

    def __init__(self, everyone: Posts, members: Sequence[int]) -> None:
        self.everyone, self.members = everyone, members

    def note(self, channel: str, peer: int, name: str) -> Post:
        return self.everyone.note(channel, self.members[peer], name)

    @contextmanager
    def waiting(self, messages: Sequence[tuple[str, int, str]]) -> Iterator[Sequence[Post]]:
        renamed = [(way, self.members[peer], name) for way, peer, name in messages]
        with self.everyone.waiting(renamed) as posts:
            yield posts


def to_text(state: State) -> str:
    """Returns a state as JSON."""
    posted = [[*key, *value] for key, value in state.posted.items()]
    return json.dumps([state.wait_number, state.doing, state.waits, posted])


def from_text(text: str) -> State:
    """Returns the state that :func:`to_text` wrote."""
    wait_number, doing, waits, posted = json.loads(text)
    last = {(channel, peer): (number, mark) for channel, peer, number, mark in posted}
    return State(wait_number, doing, [Post(*post) for post in waits], last)


# Who waits in vain ###########################################################


def in_vain(states: Mapping[int, State], ended: Collection[int]) -> dict[int, Post]:
    """Returns who waits in vain, and a message that never comes. See [Note: waiting in vain].

    ``states`` are of the workers that wait, and of those that have ``ended``.
    """
    left = {rank for rank, state in states.items() if state.waits or rank in ended}
    found: dict[int, Post] = {}
    while True:
        found = {}
        for rank in sorted(left.difference(ended)):
            never = (p for p in states[rank].waits if _never(rank, p, states, left))
            if (post := next(never, None)) is not None:
                found[rank] = post
        if left == found.keys() | (left & set(ended)):
            return found
        left = found.keys() | (left & set(ended))


def _never(rank: int, post: Post, states: Mapping[int, State], left: Collection[int]) -> bool:
    """Returns whether a message that a worker waits for will never be there."""
    if post.peer not in states:
        return False
    kind, _, subject = post.channel.partition(" ")
    partner = f"{PARTNERS[kind]} {subject}".strip()
    number, mark = states[post.peer].posted.get((partner, rank), (0, 0))
    if number == post.number:
        return mark != post.mark
    return number < post.number and post.peer in left


def explain(
    found: Mapping[int, Post], states: Mapping[int, State], ended: Collection[int]
) -> MismatchError:
    """Returns the error for what :func:`in_vain` has found."""
    lines = []
    for rank, post in list(found.items())[:MOST_NAMED]:
        way = "to send to" if post.channel == SEND else "for"
        lines.append(f"rank {rank} waits {way} rank {post.peer} in {states[rank].doing}")
        lines[-1] += f" ({post.name})"
    lines += [f"rank {rank}'s program has ended" for rank in sorted(ended)[:MOST_NAMED]]
    hidden = len(found) + len(ended) - len(lines)
    lines += [f"{counted(hidden, 'more ranks')} likewise"] if hidden else []
    return MismatchError(f"The workers run different operations: {'; '.join(lines)}. {REMEDY}")


# The failure record ###########################################################

DESERTED = "its program had already ended"
RESUME = (
    "The others can't go on without it: start all workers again; training resumes from the last "
    "checkpoint (pyg_sar.train.load_checkpoint)."
)


def place_in(rank: int, parts: int | None) -> str:
    """Returns where a rank among all workers stands: ``' (replica 1, part 0)'``.

    ``parts`` are the workers of a replica; ``None``, and no text: there is one replica.
    """
    return "" if parts is None else f" (replica {rank // parts}, part {rank % parts})"


LAUNCHER = -1  # The "rank" of the process that started the workers.

OnFailure = Callable[[PygSarError], None]
GetProgress = Callable[[], Progress]


class Watch(ABC):
    """Finds out which worker failed, and tells the others when it's this one."""

    def start(self, on_failure: OnFailure, progress: GetProgress, posts: Posts) -> None:
        """Begins; ``on_failure`` is called, on any thread, once another worker has failed."""

    @abstractmethod
    def diagnose(self, error: BaseException, doing: str) -> PygSarError:
        """Returns why a transfer failed, having told the others."""

    @abstractmethod
    def report(self, error: BaseException, rank: int | None = None) -> None:
        """Tells the others that this worker fails by its own ``error``, or by that of its part."""

    def cause(self) -> PygSarError | None:
        """Returns which worker's failure explains that this one is told to end, if any."""
        return None

    def close(self) -> None:
        """Tells the others that this worker left, and ends."""


def lost(rank: int, how: str, by: int, doing: str) -> dict[str, Any]:
    """Returns the record of a lost worker."""
    return {"kind": "lost", "rank": rank, "how": how, "by": by, "doing": doing}


def failed(rank: int, error: BaseException) -> dict[str, Any]:
    """Returns the record of a worker that fails by its own error."""
    return {"kind": "error", "rank": rank, "how": f"{type(error).__name__}: {error}"[:4000]}


def unmatched(error: MismatchError, by: int) -> dict[str, Any]:
    """Returns the record of workers that run different operations."""
    return {"kind": "mismatch", "rank": by, "how": str(error)}


def to_error(record: Mapping[str, Any], me: int, parts: int | None = None) -> PygSarError:
    """Returns the error to raise on rank ``me`` for a failure record.

    ``parts`` are the workers of a replica, where there are several replicas.
    """
    rank, how = record["rank"], record["how"]
    if record["kind"] == "mismatch":
        return MismatchError(how)
    if record["kind"] == "error":
        who = f"Rank {rank}{place_in(rank, parts)}"
        return WorkerError(f"{who} failed, which ends rank {me} as well: {how}", rank=rank)
    who = "The launcher" if rank == LAUNCHER else f"Rank {rank}{place_in(rank, parts)}"
    seen = f"noticed by rank {record['by']} during: {record['doing']}"
    remedy = f"{REMEDY}." if how == DESERTED else RESUME
    return LostWorkerError(f"{who} was lost: {how} ({seen}). {remedy}", rank=rank)


def is_consequence(error: BaseException | None, rank: int) -> bool:
    """Returns whether ``error`` only tells rank ``rank`` of another rank's failure."""
    seen: set[int] = set()  # An error may be among its own causes.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, WorkerError) and error.rank != rank:
            return True
        error = error.__cause__ or error.__context__
    return False
