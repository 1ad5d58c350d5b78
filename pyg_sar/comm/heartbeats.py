"""Beats and notes in the store: a worker tells of itself by them, and sees the others.

[Note: silence] Heartbeats stop where a worker was stopped, and also where it computes in code that
keeps Python's lock: that is no reason to give it up. They all stop where the store is silent, as
its host was stopped or can't be reached. So a silent worker is examined from outside, without the
store: in ``/proc`` on this host, by its status server elsewhere. A process that runs is waited for,
as long as the timeout of the operation allows. Each worker judges by its own clock, which stands
still while it is stopped itself: it has not seen what the others did meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from pyg_sar.comm.environment import WorkerInfo
from pyg_sar.comm.issuer import Progress
from pyg_sar.comm.messages import GetProgress, Posts, State, from_text, to_text
from pyg_sar.comm.processes import RUNS, STOPPED, StatusServer, ask, is_dead, is_stopped, place
from pyg_sar.comm.store import AskedStore
from pyg_sar.errors import PygSarError

AWAY = 6.0  # Seconds from one look to the next; after more this process was stopped itself.
ANSWER = 5.0  # Seconds to wait for the store's answer.
START = "the start"  # What a worker does until all have met.


class Heartbeats:
    """The beats of all workers, and their notes, as one of them sees them.

    ``everyone`` is what each rank is, from the rendezvous, as far as it is known. After ``long``
    seconds this worker tells what it waits for.
    """

    def __init__(
        self, info: WorkerInfo, everyone: Sequence[Mapping[str, Any]], long: float
    ) -> None:
        self.info, self.long = info, long
        self.rank, self.world_size = info.rank, info.world_size
        self.others = [rank for rank in range(info.world_size) if rank != info.rank]
        self.everyone: Mapping[int, Mapping[str, Any]] = dict(enumerate(everyone))
        self._store: AskedStore | None = None
        self._store_error: BaseException | None = None
        self._lock = threading.RLock()
        self._record: dict[str, Any] | None = None
        self._awake = 0.0  # This worker's clock: see [Note: silence].
        self._looked = time.monotonic()
        self._answered = 0.0  # When the store last answered, or was not there yet.
        self._beats = dict.fromkeys(self.others, (-1, 0.0))
        self._notes: dict[int, dict[str, Any]] = {}
        self._deaths: dict[int, float] = {}
        self._count = 0
        self._progress: GetProgress = lambda: Progress(0, 0, 1, START)
        self._posts = Posts()
        self._published = -1
        self._states: dict[int, State] = {}
        self._status_server: StatusServer | None = None
        self._status: dict[int, Any] = {}

    def use(self, make: Callable[[], dist.Store]) -> None:
        """Takes the store that ``make`` returns, as soon as it does."""
        self._store = AskedStore(make, hear=self.hear, patience=ANSWER)

    def hear(self) -> None:
        """Takes in that the store answers, or that nobody hosts it yet."""
        self._answered = self._awake

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """Asks the store by a method of it; ``None`` while it is silent, or is gone for good."""
        with self._lock:
            if self._store_error is not None or self._store is None:
                return None
            try:
                return question(self._store, *args)
            except TimeoutError:
                return None
            except (dist.DistError, PygSarError) as error:
                self._store_error = error
                return None

    def _has(self, key: str) -> bool:
        return bool(self._ask(AskedStore.check, [key]))

    # Where the others run ----------------------------------------------------

    def serve_status(self, addresses: Sequence[str]) -> None:
        """Has a process answer for this worker. See [Note: silence]."""
        with contextlib.suppress(OSError):  # Without one, silence is all there is to see.
            self._status_server = StatusServer(addresses)
            text = json.dumps(self._status_server.where)
            self._ask(AskedStore.set, f"status/{self.rank}", text)

    def _learn_status(self) -> None:
        """Reads who answers for the workers of other hosts, as long as the store tells it."""
        for rank in self.others:
            away = rank in self.everyone and not self._is_near(rank)
            if away and self._has(f"status/{rank}"):
                text = self._ask(AskedStore.get, f"status/{rank}")
                self._status[rank] = json.loads(text or "[]")

    def _is_near(self, rank: int) -> bool:
        """Returns whether a worker is in this host's network: it is reached where it runs."""
        who = self.everyone[rank]
        return bool(place(who) == place(self.everyone.get(self.rank, who)))

    def _is_stopped(self, rank: int) -> bool | None:
        """Returns whether a silent worker was stopped; ``None``: unknown. See [Note: silence]."""
        known = is_stopped(self.everyone[rank])
        if known or (known is False and self._is_near(rank)):
            return known
        return {STOPPED: True, RUNS: False}.get(ask(self._status.get(rank, [])) or "")

    # Beats and notes ---------------------------------------------------------

    def _pass_time(self) -> float:
        """Returns the time by this worker's clock. See [Note: silence]."""
        now = time.monotonic()
        self._awake += min(now - self._looked, AWAY)
        self._looked = now
        return self._awake

    def _beat(self, left: bool = False) -> None:
        progress = self._progress()
        self._count += 1
        wait_number = self._tell_waits(progress.doing, left)
        note = {"beat": self._count, "left": left, "wait": wait_number, **progress._asdict()}
        self._ask(AskedStore.set, f"beat/{self.rank}", json.dumps(note))

    def _tell_waits(self, doing: str, left: bool) -> int | None:
        """Writes what this worker waits for, once it waits long; returns the wait's number."""
        if not left and not self._posts.for_long(self.long):
            return None
        state = self._posts.state(doing)
        if state.wait_number != self._published:
            self._ask(AskedStore.set, f"waits/{self.rank}", to_text(state))
            self._published = state.wait_number
        return state.wait_number

    def _poll(self) -> dict[str, Any] | None:
        """Beats, and reads everything once; returns the failure record, if any."""
        with self._lock:
            now = self._pass_time()
            self._beat()
            # Deaths before notes: whoever is seen dead has written its last note by then.
            for rank in self.others:
                who = self.everyone.get(rank)
                if rank not in self._deaths and who is not None and is_dead(who):
                    self._deaths[rank] = now
            if self._record is None and self._has("failure"):
                self._record = json.loads(self._ask(AskedStore.get, "failure") or "null")
            present = [r for r in self.others if r in self._notes or self._has(f"beat/{r}")]
            keys = [f"beat/{rank}" for rank in present]
            notes = self._ask(AskedStore.multi_get, keys) if keys else None
            for rank, text in zip(present, notes or [], strict=False):
                note = json.loads(text)
                if note["beat"] != self._beats[rank][0]:
                    self._beats[rank] = (note["beat"], now)
                self._notes[rank] = note
            return self._record

    def _left(self, rank: int) -> bool:
        return bool(self._notes.get(rank, {}).get("left"))

    def _read_waits(self) -> dict[int, State]:
        """Returns what the others that wait for long, or have left, wrote of it."""
        found = {}
        for rank, note in list(self._notes.items()):
            wait_number, known = note.get("wait"), self._states.get(rank)
            if wait_number is None:
                continue
            if known is None or known.wait_number != wait_number:
                text = self._ask(AskedStore.get, f"waits/{rank}")
                known = None if text is None else from_text(text.decode())
            if known is not None and known.wait_number == wait_number:
                found[rank] = self._states[rank] = known
        return found
