"""Finds out who failed, by heartbeats and a failure record in the workers' store.

[Note: Naming the lost worker]
When a worker is killed, the transfers with it fail at its peers; these end, and then their
peers' transfers fail too. Which rank a failed transfer names is therefore chance. The first
worker to notice finds out who is really gone (a process of this host that no longer exists, a
heartbeat that stopped) and writes that into the store's ``failure`` record, where the first
writer wins; all others read it there. A worker that fails by its own error writes that. The
process that hosts the store must not end before the others have read the record, so it waits for
their acknowledgements, for a few seconds at most.

A waiter is also woken when no transfer fails but none can succeed either: its peer's process is
gone and the operation under way has made no progress since; or all it waits for are workers that
wait themselves, in other operations. For that a worker whose wait takes long writes into the store
what it has posted and waits for, once per wait; see [Note: waiting in vain] in messages.

[Note: the start] The watch begins before the workers have met, and before the store is reached.
Until they have met nobody may end: a dead process is a lost worker at once. One that was stopped
before it has said who it is shows among this host's stopped processes, by its environment.
Whoever comes later than the store is kept waits for its host.

[Note: the starter] torchrun, ``mpirun`` and ``srun`` end their workers. One that was killed can't:
its workers have another parent then, and end themselves. A process that was started by hand may
outlive the shell that it was started from.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from pyg_sar.comm.environment import WorkerInfo, find_stopped, has_starter
from pyg_sar.comm.heartbeats import START, Heartbeats
from pyg_sar.comm.messages import (
    DESERTED,
    LAUNCHER,
    GetProgress,
    OnFailure,
    Posts,
    Watch,
    explain,
    failed,
    in_vain,
    is_consequence,
    lost,
    to_error,
    unmatched,
)
from pyg_sar.comm.processes import find_process, is_dead, is_stopped, kill_stopped
from pyg_sar.comm.store import AskedStore
from pyg_sar.errors import CommTimeoutError, PygSarError

BEAT = 0.5  # Seconds between two heartbeats.
STUCK = 3.0  # Seconds without progress after which to ask whether it can still come.
STUCK_DEAD = 8.0  # The same, where a process ended without finalize().
QUIET = 5.0  # Seconds without heartbeat that explain a failed transfer.
SILENT = 20.0  # Seconds without heartbeat after which to check that a peer runs.
UNKNOWN = 30.0  # Seconds without heartbeat after which it is lost where nobody can check.
VARIABLE = "PYG_SAR_SILENCE"
"""The environment variable for other seconds than :data:`UNKNOWN`."""
INQUIRY = 8.0  # Seconds to find out why a transfer failed.
LINGER = 5.0  # Seconds to keep the store for those who still have to read it.
LATE = 15.0  # The same, where a worker was lost before all have met.
ASK = 20.0  # Seconds that the store may take to be reached.

ENDED = "its process ended without a word (killed, out of memory, or crashed)"
HALTED = "its process was stopped (SIGSTOP)"


def read_limits() -> tuple[float, float]:
    """Returns the seconds without heartbeat: to look into, and to be lost where nobody can tell.

    Raises:
        ValueError: When the environment variable is no positive number.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return SILENT, UNKNOWN
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds * SILENT / UNKNOWN, seconds
    raise ValueError(
        f"{VARIABLE}={text!r} must be a positive number of seconds, after which a worker that "
        "doesn't answer is lost"
    )


class StoreWatch(Heartbeats, Watch):
    """A watch through the workers' store.

    It takes a connection to the store, for the watch alone (``None``: by :meth:`use`), and what
    each rank is, from the rendezvous, by :meth:`meet` where that is to come.
    """

    def __init__(
        self, store: dist.Store | None, info: WorkerInfo, everyone: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        super().__init__(info, everyone, STUCK)
        self.host = None if info.agent_store else 0
        self._stop = threading.Event()
        self._silent_after, self._lost_after = read_limits()
        self._starter = os.getppid() if has_starter() else None
        self._last_start = (0, 0.0)
        self._told: PygSarError | None = None
        self._on_failure: OnFailure = lambda error: None
        self._suspected: dict[int, tuple[int, int]] = {}
        self._stopped_early: dict[int, dict[str, Any]] = {}
        # Not a daemon: ended inside the store's C++ by the interpreter's shutdown, it would abort
        # the process. It ends with the main thread instead.
        self._thread = threading.Thread(target=self._loop, name="pyg_sar watch", daemon=False)
        if store is not None:
            self.use(lambda: store)

    # The start: see its note -------------------------------------------------

    def begin(self) -> None:
        """Watches the start."""
        self._thread.start()

    def meet(self, known: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes in who has come so far; raises once one of them has failed."""
        with self._lock:
            for rank in known.keys() & self._beats.keys() - self.everyone.keys():
                self._beats[rank] = self._beats[rank][0], self._awake
            self.everyone = dict(known)
        self.check()

    def check(self) -> None:
        """Raises once another worker has failed during the start."""
        if self._told is not None:
            raise self._told

    def start(
        self, on_failure: OnFailure, progress: GetProgress, posts: Posts | None = None
    ) -> None:
        with self._lock:
            self._on_failure, self._progress = on_failure, progress
            self._posts = posts or self._posts
            told = self._told
        self._learn_status()
        if told is not None:
            on_failure(told)
        if not self._thread.is_alive():
            self._thread.start()

    def _loop(self) -> None:
        main = threading.main_thread()
        while main.is_alive():
            record = self._poll()
            if record is None and (suspect := self._left_alone() or self._stalled()) is not None:
                record = self._publish(suspect)
            if record is not None:
                self._acknowledge()
                # Its own error is this rank's already: who wrote the record raises it.
                if record["kind"] != "error" or record["rank"] != self.rank:
                    with self._lock:
                        on_failure = self._on_failure
                        self._told = self._to_error(record)
                    on_failure(self._told)
                break
            if self._stop.wait(BEAT):
                break
        self._end_stopped()

    def _end_stopped(self) -> None:
        """Ends the lost worker, where it is stopped and no parent of all workers does."""
        record = self._record
        if record is None or record["kind"] != "lost" or (self._starter is self.host is None):
            return
        who = self.everyone.get(record["rank"]) or self._stopped_early.get(record["rank"])
        if who is not None and is_stopped(who):
            time.sleep(2 * BEAT)  # Others see by themselves that it is stopped, not dead.
            kill_stopped(who)

    # What there is to see ----------------------------------------------------

    def _left_alone(self) -> dict[str, Any] | None:
        """Returns the record of a lost starter. See [Note: the starter]."""
        if self._starter is None or os.getppid() == self._starter:
            return None
        how = f"the process that started this host's workers (pid {self._starter}) is gone"
        return lost(LAUNCHER, how, self.rank, self._progress().doing)

    def _suspect(self, doing: str, limit: float | None = None) -> dict[str, Any] | None:
        """Returns the record of who made a transfer fail by all that was seen, if anybody."""
        dead = [rank for rank in self._deaths if not self._left(rank)]
        dead.sort(key=lambda rank: (self._did_its_part(rank), self._deaths[rank]))
        # The store's host outlives every failure but its own (it waits for the others to read).
        if self._store_error is not None and self.host in dead:
            dead = [self.host]
        if dead:
            return lost(dead[0], ENDED, self.rank, doing)
        return self._orphaned(doing) or self._silent(doing, QUIET if limit is None else limit)

    def _begun(self) -> dict[str, Any] | None:
        """Returns the record of a worker that is lost before all have met."""
        if (suspect := self._suspect(START, self._silent_after)) is not None:
            return suspect
        missing = [rank for rank in self.others if rank not in self.everyone]
        if missing and self._awake > self._silent_after / 2:
            self._stopped_early = find_stopped(self.info)
            for rank in self._stopped_early.keys() & missing:
                return lost(rank, HALTED, self.rank, START)
        host = LAUNCHER if self.host is None else self.host
        waited = self._awake - self._answered
        if host not in (LAUNCHER, *missing) or waited <= self._lost_after:
            return None
        starter = find_process(os.getppid())
        if self.host is None and starter is not None and starter.state == "T":
            return None  # Ctrl-Z: it goes on some time.
        how = f"the workers' store, which it hosts, has not answered for {waited:.0f} s"
        return lost(host, f"{how}: it was stopped, or is unreachable", self.rank, START)

    def _stalled(self) -> dict[str, Any] | None:
        """Returns the record of a lost worker that the pending operation waits for in vain."""
        now = self._awake
        progress = self._progress()
        if progress.doing == START:
            return self._begun()
        if progress.pending == 0 or progress.started != self._last_start[0]:
            self._last_start = (progress.started, now)
        since = now - self._last_start[1]
        if since < STUCK:
            return None
        for rank, when in self._deaths.items():
            # A process may end without finalize() when it has done its part.
            if min(since, now - when) > STUCK_DEAD and not self._did_its_part(rank):
                return lost(rank, ENDED, self.rank, progress.doing)
        orphaned = self.host is None or not self._did_its_part(self.host)
        return (
            (self._orphaned(progress.doing) if orphaned else None)
            or self._in_vain(progress.doing)
            or self._silent(progress.doing, self._silent_after)
        )

    def _did_its_part(self, rank: int) -> bool:
        """Returns whether ``rank`` has been through the operation that this rank is in."""
        return bool(self._notes.get(rank, {}).get("ended", 0) >= self._progress().started)

    def _orphaned(self, doing: str) -> dict[str, Any] | None:
        """Returns the record of the lost host of the store."""
        if self._store_error is None or (self.host is not None and self._left(self.host)):
            return None
        how = "it hosts the workers' store, which can't be reached any more"
        return lost(LAUNCHER if self.host is None else self.host, how, self.rank, doing)

    def _silent(self, doing: str, limit: float) -> dict[str, Any] | None:
        """Returns the record of a worker that gave no sign of life for ``limit`` seconds."""
        for rank, (beat, when) in list(self._beats.items()):
            silence = self._awake - when
            if silence <= limit or self._left(rank) or rank not in self.everyone:
                continue
            stopped = self._is_stopped(rank)
            if stopped:
                return lost(rank, HALTED, self.rank, doing)
            if stopped is False:
                self._beats[rank] = beat, self._awake  # A sign of life.
            elif silence > self._lost_after or limit <= QUIET:
                host = str(self.everyone[rank]["host"]).partition(" ")[0]
                how = f"it has not answered for {silence:.0f} s: stopped, or its host {host} is"
                return lost(rank, f"{how} unreachable", self.rank, doing)
        return None

    def _in_vain(self, doing: str) -> dict[str, Any] | None:
        """Returns the record of workers that wait for what never comes."""
        with self._lock:
            if not self._posts.for_long(STUCK):
                return None
            states = {self.rank: self._posts.state(doing), **self._read_waits()}
            ended = {rank for rank in states if self._left(rank)}
            found = in_vain(states, ended)
            seen = {r: (states[r].wait_number, self._beats[r][0]) for r in found if r != self.rank}
            before = self._suspected
            same = before.keys() == seen.keys()
            if not same or any(seen[r][0] != before[r][0] for r in seen):
                self._suspected = before = seen
            # All waited at once: since one moment, everyone has said again that it waits.
            if not found or any(seen[r][1] == before[r][1] for r in seen):
                return None
        gone = ended.intersection(post.peer for post in found.values())
        if gone:
            return lost(min(gone), DESERTED, self.rank, doing)
        return unmatched(explain(found, states, ended), self.rank)

    def _deserted(self, doing: str) -> dict[str, Any] | None:
        """Returns the record of a worker that left without what a failed transfer was for."""
        states = {r: state for r, state in self._read_waits().items() if self._left(r)}
        mine = self._posts.state(doing)._replace(waits=self._posts.failed)
        for post in in_vain({**states, self.rank: mine}, states.keys()).values():
            return lost(post.peer, DESERTED, self.rank, doing)
        return None

    # What there is to say ----------------------------------------------------

    def _publish(self, record: dict[str, Any]) -> dict[str, Any]:
        """Writes the failure record; returns the one that was first."""
        with self._lock:
            if self._record is None:
                text = self._ask(AskedStore.compare_set, "failure", "", json.dumps(record))
                self._record = json.loads(text) if text else record
            return self._record

    def _acknowledge(self) -> None:
        self._ask(AskedStore.set, f"seen/{self.rank}", "1")
        if self.host == self.rank:
            late = self._record is not None and self._record["kind"] == "lost"
            self._linger(lambda rank: self._has(f"seen/{rank}"), LATE if late else 0.0)

    def _linger(self, finished: Callable[[int], bool], late: float = 0.0) -> None:
        """Waits until all others that live, or come so late, are finished with the store."""
        gone = None if self._record is None else self._record["rank"]
        begin, waiting = time.monotonic(), [rank for rank in self.others if rank != gone]
        while waiting:
            waited = time.monotonic() - begin
            ends = {rank: LINGER if rank in self.everyone else late for rank in waiting}
            waiting = [
                rank
                for rank in waiting
                if waited < ends[rank]
                and not (rank in self.everyone and is_dead(self.everyone[rank]))
                and not finished(rank)
            ]
            time.sleep(0.02)

    def diagnose(self, error: BaseException, doing: str) -> PygSarError:
        said = str(error).lower()
        late = isinstance(error, TimeoutError) or "timed out" in said or "timeout" in said
        begin = time.monotonic()
        record: dict[str, Any] | None = None
        if isinstance(error, dist.DistNetworkError):  # A connection to the store, which broke.
            self._store_error = self._store_error or error
        while True:
            record = self._poll()
            if record is None and (suspect := self._suspect(doing)) is not None:
                record = self._publish(suspect)
            waited = time.monotonic() - begin
            if record is None and waited > 1.0 and (gone := self._deserted(doing)) is not None:
                record = self._publish(gone)
            if record is not None or waited > (0.0 if late else INQUIRY):
                break
            time.sleep(0.02)
        if record is None:
            text = f"Rank {self.rank}: {doing} failed though all workers seem alive: {error}"
            reason = self._tell_time(error, doing) if late else PygSarError(text)
            record = self._publish(failed(self.rank, reason))
            if record["rank"] == self.rank and record["kind"] == "error":
                self._acknowledge()
                return reason
        self._acknowledge()
        return self._to_error(record)

    def _to_error(self, record: Mapping[str, Any]) -> PygSarError:
        return to_error(record, self.rank, self.info.parts)

    def _tell_time(self, error: BaseException, doing: str) -> CommTimeoutError:
        mine = self._progress().started
        lines = []
        for rank, note in sorted(self._notes.items()):
            state = "in" if note["pending"] else "idle after"
            number, doing_there = note["started"], note["doing"]
            lines.append(f"rank {rank} is {state} its operation {number} ({doing_there})")
        return CommTimeoutError(
            f"Rank {self.rank}: {doing} (its operation {mine}) did not end in time: {error}. "
            f"All workers are alive: {'; '.join(lines) or 'no other was heard of'}. Do all ranks "
            f"run the same operations in the same order? If one is only slow, raise init(timeout=)"
        )

    def cause(self) -> PygSarError | None:
        end = time.monotonic() + 1.0
        while True:
            record = self._poll() or self._suspect(self._progress().doing)
            if record is not None:
                return self._to_error(self._publish(record))
            if time.monotonic() > end:
                return None
            time.sleep(0.02)

    def report(self, error: BaseException, rank: int | None = None) -> None:
        who = self.rank if rank is None else rank
        if is_consequence(error, who):
            return
        self._publish(failed(who, error))
        self._acknowledge()

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LINGER)
        self._beat(left=True)  # The last beat: no other may follow it.
        if self._status_server is not None:
            self._status_server.close()
        if self._record is None and self.host == self.rank:
            self._linger(self._has_left)
        if self._store is not None:
            self._store.close()

    def _has_left(self, rank: int) -> bool:
        key = f"beat/{rank}"
        text = self._ask(AskedStore.get, key) if self._has(key) else None
        return self._store_error is not None or bool(text and json.loads(text)["left"])
